"""Whose turn it is: which of the events that are due is sent next, so that none waits for others.

Namespaces take turns, and so do the destinations of each. A destination gets few tries at once, and
none while its breaker is open. Tries that take long do not keep back those that do not: each has a
place in one of three lanes, all of them bounded; and of what is left of a lane, a namespace gets no
more than it has already, so that none takes it all.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from functools import partial
from typing import NamedTuple

from agentjobs.domain.breaker import Breaker, Standing
from agentjobs.domain.callbacks import Outcome, Reply

PER_TARGET = 4
"""Tries at once to one destination of one namespace."""
MOST_TARGETS = 20_000
"""Destinations that failed and are remembered, beside those that something waits for."""


class Target(NamedTuple):
    """A destination, as one namespace uses it."""

    namespace: str
    host: str
    port: int


class Lane(StrEnum):
    """Where a try has its place while it is under way."""

    PROMPT = "prompt"
    """It began a moment ago, at a destination that works as far as is known."""
    LINGERING = "lingering"
    """It began there too, and takes longer than most."""
    SUSPECT = "suspect"
    """At a destination whose last try failed."""


PLACES = {Lane.PROMPT: 256, Lane.LINGERING: 2048, Lane.SUSPECT: 512}
"""Tries that may be under way; each costs a socket and some 20 KiB."""


class Turn(NamedTuple):
    """An event whose turn has come."""

    event_id: str
    held: Outcome | None = None
    """It is not to be sent, and this is what comes of it; else it is to be sent now."""


@dataclass(slots=True)
class _Line:
    """What waits for one target."""

    breaker: Breaker = field(default_factory=Breaker)
    waiting: deque[str] = field(default_factory=deque)
    under_way: int = 0

    @property
    def lane(self) -> Lane:
        return Lane.SUSPECT if self.breaker.failures else Lane.PROMPT

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.under_way

    @property
    def has_turn(self) -> bool:
        """Whether its next may be sent, as far as the target is concerned."""
        most = 1 if self.breaker.open_until else PER_TARGET
        return bool(self.waiting) and self.under_way < most


class Turns:
    """Events that wait and tries that are under way. It does nothing, and knows no clock."""

    def __init__(self) -> None:
        self._lines: dict[Target, _Line] = {}
        self._under_way: dict[str, tuple[Target, Lane]] = {}
        self._taken: Counter[Lane] = Counter()
        self._taken_by: Counter[tuple[Lane, str]] = Counter()
        self._ready = {lane: _Ring() for lane in (Lane.PROMPT, Lane.SUSPECT)}
        self._held: deque[Turn] = deque()

    def add(self, event_id: str, target: Target, now: datetime) -> None:
        """Put an event that is due at the end of its line."""
        line = self._lines.setdefault(target, _Line())
        if line.breaker.standing(now) is Standing.OPEN:
            self._held.append(Turn(event_id, _held(line.breaker, now)))
            return
        line.waiting.append(event_id)
        self._offer(target, line)

    def next(self) -> Turn | None:
        """The next event to send, or to give back as held; None: it is nobody's turn."""
        if self._held:
            return self._held.popleft()
        for lane, ring in self._ready.items():
            if target := ring.pop(partial(self._has_place, lane)):
                line = self._lines[target]
                event_id = line.waiting.popleft()
                line.under_way += 1
                self._under_way[event_id] = target, lane
                self._take(lane, target.namespace)
                self._offer(target, line)
                return Turn(event_id)
        return None

    def linger(self, event_id: str) -> bool:
        """Give the prompt place of a try that takes long to another; return whether it has none."""
        target, lane = self._under_way[event_id]
        if lane is not Lane.PROMPT:
            return True
        if not self._has_place(Lane.LINGERING, target.namespace):
            return False
        self._under_way[event_id] = target, Lane.LINGERING
        self._take(Lane.PROMPT, target.namespace, -1)
        self._take(Lane.LINGERING, target.namespace)
        return True

    def done(self, event_id: str, outcome: Outcome) -> None:
        """Take note of how a try ended. What waits behind it may be held because of that."""
        target, lane = self._under_way.pop(event_id)
        self._take(lane, target.namespace, -1)
        line = self._lines[target]
        self._ready[line.lane].discard(target)
        line.under_way -= 1
        line.breaker = line.breaker.after(outcome)
        if line.breaker.standing(outcome.at) is Standing.OPEN:
            self._held += [Turn(each, _held(line.breaker, outcome.at)) for each in line.waiting]
            line.waiting.clear()
        self._offer(target, line)
        self._prune(target, line)

    def waiting(self) -> int:
        """Events that are due and wait for their turn."""
        return sum(len(line.waiting) for line in self._lines.values())

    def under_way(self) -> Counter[Lane]:
        """Tries, by lane."""
        return +self._taken

    def standings(self, now: datetime) -> Counter[Standing]:
        """Destinations that are remembered, by what may be sent to them."""
        return Counter(line.breaker.standing(now) for line in self._lines.values())

    def _has_place(self, lane: Lane, namespace: str) -> bool:
        return self._taken_by[lane, namespace] < PLACES[lane] - self._taken[lane]

    def _take(self, lane: Lane, namespace: str, places: int = 1) -> None:
        self._taken[lane] += places
        self._taken_by[lane, namespace] += places
        if not self._taken_by[lane, namespace]:
            del self._taken_by[lane, namespace]

    def _offer(self, target: Target, line: _Line) -> None:
        if line.has_turn:
            self._ready[line.lane].add(target)

    def _prune(self, target: Target, line: _Line) -> None:
        del self._lines[target]
        if line.idle and line.breaker == Breaker():
            return
        self._lines[target] = line
        if len(self._lines) > MOST_TARGETS:
            # Those that were used last are at the end. One for each that comes is enough.
            oldest, unused = next(iter(self._lines.items()))
            del self._lines[oldest]
            if not unused.idle:
                self._lines[oldest] = unused


class _Ring:
    """Targets whose turn may come: namespaces in turn, within each its targets in turn."""

    def __init__(self) -> None:
        self._namespaces: OrderedDict[str, OrderedDict[Target, None]] = OrderedDict()

    def add(self, target: Target) -> None:
        """Add a target at the end of its namespace's, unless it is there."""
        self._namespaces.setdefault(target.namespace, OrderedDict()).setdefault(target)

    def pop(self, has_place: Callable[[str], bool]) -> Target | None:
        """Take the next target out; its namespace goes to the end."""
        namespace = next((each for each in self._namespaces if has_place(each)), None)
        if namespace is None:
            return None
        targets = self._namespaces.pop(namespace)
        target, _ = targets.popitem(last=False)
        if targets:
            self._namespaces[namespace] = targets
        return target

    def discard(self, target: Target) -> None:
        """Take a target out, if it is there."""
        targets = self._namespaces.get(target.namespace)
        if targets and target in targets:
            del targets[target]
            if not targets:
                del self._namespaces[target.namespace]


def _held(breaker: Breaker, now: datetime) -> Outcome:
    until = breaker.open_until or now
    text = f"held back: {breaker.failures} tries in a row failed at this destination"
    return Outcome(Reply.HELD, now, text, (until - now).total_seconds())
