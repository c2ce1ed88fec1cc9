"""Random histories of an inbox: whatever happens in whatever order, each thing is handed over once.

Beside the inbox runs a list of what was taken, in order; at the end of each history everything that
was taken has been acknowledged exactly once, in the order of its arrival.
"""

import os
import random
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from agentjobs.inbox.acceptance import KEPT, Rules, Ruling
from agentjobs.inbox.store import Batch, FullError, Store
from tests.inbox.events import NOW, heard_of

HISTORIES = 1200 if os.environ.get("AGENTJOBS_SOAK") else 60
STEPS = 60
LEASE = timedelta(minutes=10)
RULES = Rules(namespaces=frozenset({"open"}), capacity=4, retention=timedelta(days=30))


class History:
    """An inbox, who uses it, and what must come of it."""

    def __init__(self, path: Path, chance: random.Random) -> None:
        self.path = path
        self.chance = chance
        self.now: datetime = NOW
        self.store = Store(path, RULES)
        self.taken: list[str] = []
        """What waits or was given out."""
        self.held: list[str] = []
        self.own: set[str] = set()
        self.starts: dict[str, str] = {}
        """Keys of starts under way, and the jobs that they make."""
        self.given: dict[str, list[str]] = {}
        """What each batch holds."""
        self.done: list[str] = []
        self.acknowledged: set[str] = set()
        self.order: list[str] = []
        """Everything that was kept, in the order of its arrival."""
        self.number = 0

    def play(self) -> None:
        steps = (self.event, self.event, self.say, self.start, self.answer, self.refuse)
        steps += (self.take, self.take, self.acknowledge, self.crash, self.late)
        for _ in range(STEPS):
            self.chance.choice(steps)()
            self.now += timedelta(seconds=self.chance.random() * 60)
        for key in list(self.starts):
            self.finish(key)
        self.late()
        while self.take():
            self.acknowledge()
            self.late()
        self.store.close()

    def event(self) -> None:
        self.number += 1
        own = self.chance.choice([*sorted(self.own), *self.starts.values(), f"x{self.number}.n"])
        job = self.chance.choice([own, f"j{self.chance.randrange(8)}.open", f"k{self.number}.n"])
        again = self.store.accept(heard_of(job, time=self.now), self.now)
        word = f"job_id={job}"
        known = [*self.taken, *self.done, *self.held]
        expected = (
            Ruling.DUPLICATE
            if word in known
            else Ruling.NOT_OURS
            if not (job in self.own or job.endswith(".open") or self.starts)
            else (Ruling.FULL if len(self.taken) >= RULES.capacity else Ruling.TAKEN)
            if job in self.own or job.endswith(".open")
            else (Ruling.FULL if len(self.held) >= RULES.capacity else Ruling.HELD)
        )
        assert again is expected, (job, again, expected)
        if again in KEPT:
            (self.taken if again is Ruling.TAKEN else self.held).append(word)
            self.order.append(word)

    def say(self) -> None:
        self.number += 1
        message = f"m{self.chance.randrange(self.number)}"
        known = [*self.taken, *self.done]
        try:
            new = self.store.say(message, self.now, message)
        except FullError:
            assert len(self.taken) >= RULES.capacity
            return
        assert new == (message not in known)
        if new:
            self.taken.append(message)
            self.order.append(message)

    def start(self) -> None:
        self.number += 1
        key = f"k{self.number}"
        self.store.begin_start(key, "{}", None, self.now)
        self.starts[key] = f"s{self.number}.n"

    def answer(self) -> None:
        if self.starts:
            self.finish(self.chance.choice(sorted(self.starts)))

    def finish(self, key: str) -> None:
        job = self.starts.pop(key)
        self.store.end_start(key, job, self.now)
        self.own.add(job)
        self.settle()

    def refuse(self) -> None:
        if self.starts:
            key = self.chance.choice(sorted(self.starts))
            del self.starts[key]
            self.store.end_start(key, None, self.now)
            self.settle()

    def settle(self) -> None:
        for word in list(self.held):
            if word.removeprefix("job_id=") in self.own:
                self.held.remove(word)
                self.taken.append(word)
            elif not self.starts:
                self.held.remove(word)
                self.order.remove(word)

    def take(self) -> Batch | None:
        holder = self.chance.choice(["loop", "loop", "other"])
        batch = self.store.take(holder, self.now, LEASE, self.chance.choice([60, 200, 4000]))
        if batch is None:
            return None
        assert batch.id not in self.acknowledged
        words = [
            line.split()[2] if line.startswith("[event]") else line.split()[1]
            for line in batch.text.split("\n")
        ]
        assert batch.again == (batch.id in self.given)
        assert self.given.setdefault(batch.id, words) == words, "to the letter"
        return batch

    def acknowledge(self) -> None:
        open_ = [batch for batch in self.given if batch not in self.acknowledged]
        if not open_:
            return
        batch = self.chance.choice(open_)
        assert self.store.acknowledge(batch)
        assert not self.store.acknowledge(batch)
        self.acknowledged.add(batch)
        for word in self.given[batch]:
            self.taken.remove(word)
            self.done.append(word)

    def crash(self) -> None:
        self.store.close()
        self.store = Store(self.path, RULES)

    def late(self) -> None:
        self.now += LEASE
        self.store.prune(self.now)


@pytest.mark.parametrize("part", range(4))
def test_r_inbox_own_each_thing_is_handed_over_once_and_in_order(tmp_path: Path, part: int) -> None:
    for n in range(HISTORIES // 4):
        seed = f"{part}-{n}"
        history = History(tmp_path / f"{n}.db", random.Random(seed))  # noqa: S311 - no secrets
        try:
            history.play()
        except AssertionError as error:
            error.add_note(f"history {seed}")
            raise
        given = [word for words in history.given.values() for word in words]
        assert sorted(given) == sorted(set(given)), seed
        assert set(given) == set(history.order), seed
        assert history.taken == history.held == [], seed
        # A batch is in order; what was held longer than that comes with a later one.
        places = {word: place for place, word in enumerate(history.order)}
        for words in history.given.values():
            assert words == sorted(words, key=places.__getitem__), seed
