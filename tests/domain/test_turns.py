"""Whose turn it is among events that are due (R-CALLBACK)."""

import heapq
import itertools
import os
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

import pytest

from agentjobs.domain import turns as module
from agentjobs.domain.breaker import OPENS_AFTER, Standing
from agentjobs.domain.callbacks import Outcome, Reply, pause
from agentjobs.domain.turns import PER_TARGET, PLACES, Lane, Target, Turns

NOW = datetime(2026, 5, 1, 12, 0, tzinfo=UTC)
SOAK = bool(os.environ.get("AGENTJOBS_SOAK"))
HERE = Target("team-a", "runtime.example.com", 443)
THERE = Target("team-b", "runtime.example.com", 443)


def taken(at: datetime = NOW) -> Outcome:
    return Outcome(Reply.TAKEN, at, works=True)


def silence(at: datetime = NOW) -> Outcome:
    return Outcome(Reply.FAILED, at, "no answer", works=False)


def sent(turns: Turns) -> list[str]:
    """All whose turn has come."""
    return [turn.event_id for turn in iter(turns.next, None) if turn.held is None]


def fail(turns: Turns, target: Target, times: int = OPENS_AFTER) -> None:
    for number in range(times):
        turns.add(f"failing-{number}", target, NOW)
        (event_id,) = sent(turns)
        turns.done(event_id, silence())


def test_r_callback_a_destination_gets_few_at_once_in_the_order_of_their_coming() -> None:
    turns = Turns()
    for number in range(10):
        turns.add(f"e{number}", HERE, NOW)
    assert sent(turns) == [f"e{number}" for number in range(PER_TARGET)]
    turns.done("e2", taken())
    assert sent(turns) == [f"e{PER_TARGET}"]


def test_r_callback_one_namespace_with_many_events_does_not_keep_another_waiting() -> None:
    turns = Turns()
    for number in range(5000):
        turns.add(f"a{number}", Target("team-a", f"h{number}.example.com", 443), NOW)
    assert len(sent(turns)) == PLACES[Lane.PROMPT] / 2
    turns.add("b", THERE, NOW)
    assert sent(turns) == ["b"]


def test_r_callback_namespaces_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PLACES, Lane.PROMPT, 8)
    turns = Turns()
    for number in range(3):
        turns.add(f"a{number}", Target("team-a", f"h{number}.example.com", 443), NOW)
    for number in range(3):
        turns.add(f"b{number}", Target("team-b", f"h{number}.example.com", 443), NOW)
    assert sent(turns)[:4] == ["a0", "b0", "a1", "b1"]


def test_r_callback_a_dead_destination_gets_one_try_after_its_pause_and_nothing_before() -> None:
    turns = Turns()
    fail(turns, HERE)
    turns.add("early", HERE, NOW)
    turn = turns.next()
    assert turn is not None
    assert turn.held is not None
    assert turn.held.reply is Reply.HELD
    assert turn.held.retry_after
    later = NOW + timedelta(seconds=turn.held.retry_after)
    for number in range(5):
        turns.add(f"e{number}", HERE, later)
    assert sent(turns) == ["e0"]
    turns.done("e0", taken(later))
    assert sent(turns) == ["e1", "e2", "e3", "e4"]


def test_r_callback_who_waits_behind_a_try_that_fails_is_given_back() -> None:
    turns = Turns()
    fail(turns, HERE, OPENS_AFTER - 1)
    for number in range(10):
        turns.add(f"e{number}", HERE, NOW)
    sent(turns)
    turns.done("e0", silence())
    held = [turn.event_id for turn in iter(turns.next, None) if turn.held]
    assert held == ["e4", "e5", "e6", "e7", "e8", "e9"]
    assert turns.waiting() == 0


def test_r_callback_the_breaker_of_one_namespace_is_not_that_of_another() -> None:
    turns = Turns()
    fail(turns, HERE)
    turns.add("b", THERE, NOW)
    assert sent(turns) == ["b"]


def test_r_callback_a_try_that_takes_long_leaves_its_place_to_others() -> None:
    turns = Turns()
    slow = [Target(f"n{number}", "h.example.com", 443) for number in range(2000)]
    for number, target in enumerate(slow):
        turns.add(f"s{number}", target, NOW)
    under_way = sent(turns)
    turns.add("quick", HERE, NOW)
    assert sent(turns) == []
    assert all(turns.linger(each) for each in under_way)
    assert len(sent(turns)) == PLACES[Lane.PROMPT]
    assert turns.under_way()[Lane.LINGERING] == PLACES[Lane.PROMPT]


def test_r_callback_places_have_a_bound_and_come_back() -> None:
    turns = Turns()
    for number in range(5000):
        turns.add(f"e{number}", Target(f"n{number}", "h.example.com", 443), NOW)
    seen, under_way = 0, sent(turns)
    while under_way:
        moved = [turns.linger(each) for each in under_way]
        more = sent(turns)
        under_way_now = sum(turns.under_way().values())
        assert under_way_now <= PLACES[Lane.PROMPT] + PLACES[Lane.LINGERING]
        if not all(moved):
            break
        under_way += more
        seen = under_way_now
    for each in [*under_way, *more]:
        turns.done(each, taken())
    while rest := sent(turns):
        for each in rest:
            turns.done(each, taken())
    assert seen > PLACES[Lane.LINGERING] / 2
    assert (turns.waiting(), turns.under_way()) == (0, Counter())


def test_r_callback_what_is_remembered_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_TARGETS", 50)
    turns = Turns()
    for number in range(500):
        fail(turns, Target("team-a", f"h{number}.example.com", 443), 1)
    assert turns.standings(NOW)[Standing.CLOSED] == 50
    for number in range(450, 500):
        target = Target("team-a", f"h{number}.example.com", 443)
        turns.add("e", target, NOW)
        turns.done(sent(turns)[0], taken())
    assert turns.standings(NOW) == Counter()


# --- many receivers, half of them dead, in virtual time

ANSWER = timedelta(milliseconds=5)
SILENCE = timedelta(seconds=10)
PROMPT = timedelta(milliseconds=250)


@dataclass(slots=True)
class World:
    """A dispatcher without a network: receivers that answer at once, or never."""

    rate: float
    """Ends of jobs in a second."""
    receivers: int
    each: int = 1
    """Events to each receiver."""
    turns: Turns = field(default_factory=Turns)
    heap: list[tuple[datetime, int, str, str]] = field(default_factory=list)
    serial: Iterator[int] = field(default_factory=itertools.count)
    due: dict[str, datetime] = field(default_factory=dict)
    times: Counter[str] = field(default_factory=Counter)
    waits: list[float] = field(default_factory=list)
    most: int = 0

    def target(self, event_id: str) -> Target:
        number = int(event_id.split("-")[1])
        return Target(f"team-{number // 2 % 50}", f"r{number}.example.com", 443)

    def is_dead(self, event_id: str) -> bool:
        return int(event_id.split("-")[1]) % 2 == 0

    def at(self, when: datetime, what: str, event_id: str) -> None:
        heapq.heappush(self.heap, (when, next(self.serial), what, event_id))

    def run(self) -> None:
        for number in range(self.receivers * self.each):
            when = NOW + timedelta(seconds=number / self.rate)
            self.at(when, "due", f"e{number // self.receivers}-{number % self.receivers}")
        last = NOW + timedelta(seconds=self.receivers * self.each / self.rate + 30)
        while self.heap and self.heap[0][0] < last:
            now, _, what, event_id = heapq.heappop(self.heap)
            getattr(self, f"_{what}")(event_id, now)
            self._send(now)

    def _due(self, event_id: str, now: datetime) -> None:
        self.due[event_id] = now
        self.turns.add(event_id, self.target(event_id), now)

    def _slow(self, event_id: str, now: datetime) -> None:
        if event_id in self.turns._under_way and not self.turns.linger(event_id):
            self.at(now + PROMPT, "slow", event_id)

    def _silent(self, event_id: str, now: datetime) -> None:
        outcome = silence(now)
        self.turns.done(event_id, outcome)
        self._again(event_id, outcome)

    def _answers(self, event_id: str, now: datetime) -> None:
        self.turns.done(event_id, taken(now))
        self.waits.append((now - self.due[event_id]).total_seconds())

    def _again(self, event_id: str, outcome: Outcome) -> None:
        self.times[event_id] += 1
        seconds = pause(event_id, self.times[event_id], outcome.retry_after)
        self.at(outcome.at + timedelta(seconds=seconds), "due", event_id)

    def _send(self, now: datetime) -> None:
        while turn := self.turns.next():
            if turn.held:
                self._again(turn.event_id, turn.held)
            elif self.is_dead(turn.event_id):
                self.at(now + PROMPT, "slow", turn.event_id)
                self.at(now + SILENCE, "silent", turn.event_id)
            else:
                self.at(now + ANSWER, "answers", turn.event_id)
        self.most = max(self.most, len(self.turns._under_way))


LOADS = [pytest.param(100, 1500, 1, id="R-CALLBACK one event for each")]
if SOAK:
    LOADS += [
        pytest.param(100, 10_000, 5, id="R-CALLBACK five for each"),
        pytest.param(300, 10_000, 3, id="R-CALLBACK three for each, faster"),
    ]


@pytest.mark.parametrize(("rate", "receivers", "each"), LOADS)
def test_half_of_all_receivers_never_answer_and_the_others_wait_for_nothing(
    rate: float, receivers: int, each: int
) -> None:
    """The rate is at least twice that of a control plane on two cores (docs/soak.md)."""
    world = World(rate, receivers, each)
    world.run()
    waits = sorted(world.waits)
    assert len(waits) == receivers * each / 2
    p99 = waits[len(waits) * 99 // 100]
    sys.stdout.write(f"{len(waits)} live: p99 {p99:.3f} s, most at once {world.most}\n")
    assert p99 <= 2.0
    assert world.most <= sum(PLACES.values())
