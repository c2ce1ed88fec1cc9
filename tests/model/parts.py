"""Parts of an operator whose rules are played in virtual time: its work queue, its dispatcher."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from agentjobs.cache import Key
from agentjobs.dispatch import Letter
from agentjobs.domain.callbacks import Outcome
from tests.model.clock import Clock
from tests.model.wire import Task

LARGEST_BACKOFF = 30.0


class Queue:
    """The work queue's rules in virtual time: coalesced keys, delays, back-off."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.due: dict[Key, float] = {}
        self._failures: Counter[Key] = Counter()

    def add(self, key: Key) -> None:
        self.due[key] = self._clock.monotonic()

    def add_later(self, key: Key, delay: float) -> None:
        moment = self._clock.monotonic() + delay
        self.due[key] = min(moment, self.due.get(key, moment))

    def forget(self, key: Key) -> None:
        if self.due.get(key, 0) > self._clock.monotonic():
            del self.due[key]
        del self._failures[key]

    def ready(self) -> list[Key]:
        return sorted(key for key, at in self.due.items() if at <= self._clock.monotonic())

    def failing(self) -> bool:
        """Whether some pass must be made again because the last one failed."""
        return any(self._failures.values())

    def ended(self, key: Key, task: Task) -> None:
        """Take note of the end of a pass."""
        if task.error:
            self._failures[key] += 1
            self.add_later(key, min(0.1 * 2 ** self._failures[key], LARGEST_BACKOFF))
            return
        del self._failures[key]
        if task.result is not None:
            self.add_later(key, task.result)


class Post:
    """The dispatcher's rules without a network: what it was given waits to reach the receiver."""

    def __init__(self, tell: Callable[[Key], None]) -> None:
        self._tell = tell
        self._outcomes: dict[Key, dict[str, Outcome]] = {}
        self.flying: dict[str, tuple[Key, Letter]] = {}

    def submit(self, key: Key, letter: Letter) -> None:
        if letter.id not in self.flying and letter.id not in self.outcomes(key):
            self.flying[letter.id] = (key, letter)

    def outcomes(self, key: Key) -> Mapping[str, Outcome]:
        return self._outcomes.get(key, {})

    def busy(self, event_id: str) -> bool:
        return event_id in self.flying

    def settle(self, key: Key, event_ids: Iterable[str]) -> None:
        for each in event_ids:
            self._outcomes.get(key, {}).pop(each, None)

    def forget(self, key: Key) -> None:
        self._outcomes.pop(key, None)

    def arrives(self, event_id: str, outcome: Outcome) -> None:
        key, _ = self.flying.pop(event_id)
        self._outcomes.setdefault(key, {})[event_id] = outcome
        self._tell(key)
