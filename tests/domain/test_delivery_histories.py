"""Random histories of deliveries, in virtual time: receivers that fail, operators that die.

R-CALLBACK: every event arrives, with the same id and the same bytes each time, unless its receiver
wants no more or has not taken it for three days.
"""

import heapq
import itertools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentjobs.api.agentjob import AgentJob, Delivery, DeliveryState
from agentjobs.domain.callbacks import RETRY_WINDOW, Outcome, Reply, answered, event_body
from agentjobs.domain.destinations import Destinations
from agentjobs.domain.observed import Observed, Policy
from agentjobs.domain.plan import Deliver
from agentjobs.domain.reconcile import decide
from agentjobs.domain.turns import Target, Turns
from tests.builders import an_agentjob

HISTORIES = 1200 if os.environ.get("AGENTJOBS_SOAK") else 100
NOW = datetime(2026, 5, 1, 12, 0, tzinfo=UTC)
ALLOWED = Policy(destinations=Destinations.from_json('[{"hosts": ["*.example.com"]}]'))
LARGEST_PAUSE = timedelta(hours=6 * 1.2)
ANSWERS = ("204", "refuses", "silent", "500", "404", "302", "429", "503", "410")
SECONDS = {"refuses": 0.0, "silent": 10.0}
Happen = Callable[[datetime], None]


@dataclass(frozen=True)
class Span:
    """For a while a receiver behaves in one way."""

    hours: float
    behaviour: str


@dataclass(frozen=True)
class Flaw:
    """At some time something goes wrong with the operator."""

    hours: float
    what: str
    """dies, is away (for a day), or one write is refused."""


SPANS = st.lists(
    st.builds(Span, st.floats(0.001, 30), st.sampled_from(ANSWERS)), min_size=0, max_size=6
)
FLAWS = st.lists(
    st.builds(Flaw, st.floats(0, 90), st.sampled_from(["dies", "is away", "conflict"])), max_size=8
)


@dataclass
class History:
    receivers: list[list[Span]]
    """After its last span a receiver takes what comes."""
    count: int
    """Of jobs; each tells one of the receivers."""
    turns: Turns = field(default_factory=Turns)
    jobs: dict[str, AgentJob] = field(default_factory=dict)
    outcomes: dict[str, dict[str, Outcome]] = field(default_factory=dict)
    busy: dict[str, str] = field(default_factory=dict)
    """Jobs by event that was handed to the dispatcher."""
    heap: list[tuple[datetime, int, Happen]] = field(default_factory=list)
    serial: Iterator[int] = field(default_factory=itertools.count)
    received: dict[str, list[tuple[str, bytes]]] = field(default_factory=dict)
    gone: set[str] = field(default_factory=set)
    life: int = 0
    away_until: datetime = NOW
    conflicts: int = 0

    def at(self, when: datetime, happen: Happen) -> None:
        heapq.heappush(self.heap, (when, next(self.serial), happen))

    def run(self, flaws: list[Flaw]) -> None:
        for number in range(self.count):
            name = f"job-{number}"
            url = f"https://{self._host(name)}/events"
            self.jobs[name] = an_agentjob(
                name=name, uid=name, stop={"reason": "enough"}, callback={"url": url}
            )
            self.received[name] = []
            self.at(NOW + timedelta(seconds=number), partial(self._pass, name))
        happens = {"dies": self._dies, "is away": self._is_away, "conflict": self._conflict}
        for flaw in flaws:
            self.at(NOW + timedelta(hours=flaw.hours), happens[flaw.what])
        while self.heap:
            now, _, happen = heapq.heappop(self.heap)
            happen(now)
            self._send(now)

    def _dies(self, now: datetime) -> None:
        """All that was only in memory is lost; what is on its way may arrive all the same."""
        self.life += 1
        self.turns, self.outcomes, self.busy = Turns(), {}, {}
        for name in self.jobs:
            self.at(max(now, self.away_until), partial(self._pass, name))

    def _is_away(self, now: datetime) -> None:
        self.away_until = now + timedelta(days=1)
        self._dies(now)

    def _conflict(self, _: datetime) -> None:
        self.conflicts += 1

    def _pass(self, name: str, now: datetime) -> None:
        if now < self.away_until:
            return
        job = self.jobs[name]
        plan = decide(
            Observed(
                now=now,
                job=job,
                policy=ALLOWED,
                outcomes=self.outcomes.get(name, {}),
                in_flight=frozenset(each for each, owner in self.busy.items() if owner == name),
            )
        )
        if plan.status:
            if self.conflicts:
                self.conflicts -= 1
                self.at(now, partial(self._pass, name))
                return
            stored = AgentJob.from_json({**job.to_json(), "status": plan.status.to_json()})
            self.jobs[name] = stored
            self.outcomes.pop(name, None)
        for action in plan.actions:
            if isinstance(action, Deliver):
                self.busy[action.event_id] = name
                target = Target("team-a", self._host(name), 443)
                self.turns.add(action.event_id, target, now)
        if plan.requeue_at and self._owes(name):
            self.at(max(plan.requeue_at, now), partial(self._pass, name))

    def _send(self, now: datetime) -> None:
        while turn := self.turns.next():
            name = self.busy[turn.event_id]
            if turn.held:
                self._told(name, turn.event_id, turn.held)
                self.at(now, partial(self._pass, name))
                continue
            how = self._behaviour(name, now)
            took = timedelta(seconds=SECONDS.get(how, 0.02))
            self.at(now + took, partial(self._arrives, turn.event_id, self.life))

    def _arrives(self, event_id: str, life: int, now: datetime) -> None:
        """An answer, or the lack of one; only the life in which it was sent hears of that."""
        name = event_id.split("_")[1]
        how = self._behaviour(name, now)
        outcome = outcome_of(how, now)
        if how not in SECONDS:
            (delivery,) = self._outbox(name)
            body = event_body(self.jobs[name], delivery, "")
            assert body is not None
            if outcome.reply is not Reply.FAILED:
                self.received[name].append((event_id, body))
        if outcome.reply is Reply.GONE:
            self.gone.add(name)
        if life == self.life and event_id in self.busy:
            self.turns.done(event_id, outcome)
            self._told(name, event_id, outcome)
            self.at(now, partial(self._pass, name))

    def _told(self, name: str, event_id: str, outcome: Outcome) -> None:
        del self.busy[event_id]
        self.outcomes.setdefault(name, {})[event_id] = outcome

    def _outbox(self, name: str) -> tuple[Delivery, ...]:
        outbox = self.jobs[name].status.callback
        return outbox.deliveries if outbox else ()

    def _owes(self, name: str) -> bool:
        job = self.jobs[name]
        states = {each.state for each in self._outbox(name)}
        return not job.status.finished_at or DeliveryState.PENDING in states

    def _number(self, name: str) -> int:
        return int(name.partition("-")[2]) % len(self.receivers)

    def _host(self, name: str) -> str:
        return f"r{self._number(name)}.example.com"

    def _behaviour(self, name: str, now: datetime) -> str:
        left = (now - NOW) / timedelta(hours=1)
        for span in self.receivers[self._number(name)]:
            left -= span.hours
            if left < 0:
                return span.behaviour
        return "204"


def outcome_of(how: str, now: datetime) -> Outcome:
    if how in SECONDS:
        return Outcome(Reply.FAILED, now, how, works=False)
    return answered(int(how), "1800" if how in {"429", "503"} else "", now)


@settings(max_examples=HISTORIES, deadline=None, suppress_health_check=list(HealthCheck))
@given(receivers=st.lists(SPANS, min_size=1, max_size=2), count=st.integers(1, 9), flaws=FLAWS)
def test_r_callback_no_event_is_lost(
    receivers: list[list[Span]], count: int, flaws: list[Flaw]
) -> None:
    history = History(receivers, count)
    history.run(flaws)
    for name in history.jobs:
        (delivery,) = history._outbox(name)
        got = history.received[name]
        # The same id and bytes each time.
        assert {event_id for event_id, _ in got} <= {delivery.id}
        assert len({body for _, body in got}) <= 1
        if delivery.state is DeliveryState.DELIVERED:
            assert got
            continue
        assert delivery.state is DeliveryState.GIVEN_UP
        assert delivery.first_attempt_at is not None
        if name not in history.gone:
            assert delivery.attempts + delivery.holds > 1
            # Nobody has taken it until the last moment at which it was tried, three days on.
            last = delivery.first_attempt_at + RETRY_WINDOW - LARGEST_PAUSE
            assert history._behaviour(name, last) != "204" or delivery.holds
