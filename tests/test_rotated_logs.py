"""Logs that are rotated while they are read, as kubelets do it, in virtual time (R-OUTPUT).

The kubelet's reader, as it stands in cri-client's `ReadLogs` (Kubernetes 1.36): it goes through the
file that was the newest when it was opened; at its end it begins to watch the directory; at each
file that it hears was created it opens the newest one, from its beginning; of a container that has
ended it reads no other file. So it waits at the end of a file that nobody writes any more, passes
over files, serves others twice, and says nothing of all that.
"""

import asyncio
import os
import random
from collections.abc import AsyncGenerator, Callable, Coroutine
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any, cast

import pytest
from typing_extensions import override

from agentjobs import streams as module
from agentjobs.domain import rotation
from agentjobs.domain.output import END, Archived, Head, Whole
from agentjobs.kube import Kube
from agentjobs.metrics import Metrics
from agentjobs.store import OutputStore
from agentjobs.streams import Source, Streams

HISTORIES = 1000 if os.environ.get("AGENTJOBS_SOAK") else 60
BEGIN = datetime(2026, 3, 1, 12, tzinfo=UTC)
UID, STREAM = "uid-1", "0001.000000.pod-1"
SOURCE = Source("ns", "pod", "pod-1", "job-1", "tool", None, f"{UID}/{STREAM}")
LARGE = 10_000
"""Bytes of a file that is rotated at the next tick; everything is a hundred times smaller here."""
TICK = 10.0
IDLE = 2.0
LINE = 100
"""Bytes of a line."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """A loop whose time is that of whatever is to happen next."""

    def __init__(self) -> None:
        super().__init__()
        self._passed = 0.0

    @override
    def time(self) -> float:
        return self._passed

    def _run_once(self) -> None:
        if not self._ready and self._scheduled:  # type: ignore[attr-defined]
            self._passed = max(self._passed, self._scheduled[0]._when)  # type: ignore[attr-defined]
        super()._run_once()  # type: ignore[misc]


def now() -> datetime:
    return BEGIN + timedelta(seconds=asyncio.get_running_loop().time())


class MemoryStore(OutputStore):
    def __init__(self) -> None:
        super().__init__(None, "memory:")
        self.objects: dict[str, bytes] = {}

    @override
    async def put(self, path: str, content: bytes) -> None:
        self.objects[path] = content

    @override
    async def get(self, path: str) -> bytes:
        return self.objects[path]

    @override
    async def names(self, prefix: str) -> dict[str, int]:
        found = (each for each in sorted(self.objects) if each.startswith(f"{prefix}/"))
        return {each.removeprefix(f"{prefix}/"): 0 for each in found}


@dataclass
class Log:
    """The files of a container's log, and those who read it."""

    speed: float
    """Bytes per second at which it is read."""
    held_up: Callable[[], float] = lambda: 0.0
    """Seconds by which a rotation comes late."""
    files: list[list[tuple[datetime, bytes]]] = field(default_factory=lambda: [[]])
    printed: list[bytes] = field(default_factory=list)
    watchers: list[list[str]] = field(default_factory=list)
    stamp: datetime = BEGIN
    over: bool = False
    reads: int = 0

    def print(self, lines: int) -> None:
        for _ in range(lines):
            line = b"%d " % len(self.printed)
            self.printed.append(line.ljust(LINE - 1, b".") + b"\n")
            # No two lines have the same stamp.
            self.stamp = max(now(), self.stamp + timedelta(microseconds=1))
            self.files[-1].append((self.stamp, self.printed[-1]))
        for watcher in self.watchers:
            if watcher[-1:] != ["write"]:
                watcher.append("write")

    async def rotate(self) -> None:
        """What the kubelet does as long as the container runs."""
        while not self.over:
            await asyncio.sleep(TICK)
            if len(self.files[-1]) * LINE >= LARGE and not self.over:
                await asyncio.sleep(self.held_up())
                self.files.append([])
                for watcher in self.watchers:
                    watcher.append("create")

    async def follow_log(  # noqa: C901 - as it is
        self, *_: object, since: str | None, follow: bool
    ) -> AsyncGenerator[bytes]:
        self.reads += 1
        begin = datetime.fromisoformat(since) if since else BEGIN
        file, at, ended = self.files[-1], 0, False
        watcher: list[str] | None = None
        idle_since = asyncio.get_running_loop().time()
        while True:
            if at < len(file):
                lines = file[at : at + 64]
                at += len(lines)
                await asyncio.sleep(len(lines) * LINE / self.speed)
                stamped = [
                    f"{stamp:%Y-%m-%dT%H:%M:%S.%f}000Z ".encode() + line
                    for stamp, line in lines
                    if stamp >= begin
                ]
                if stamped:
                    idle_since = asyncio.get_running_loop().time()
                    yield b"".join(stamped)
            elif not follow or ended:
                return
            elif watcher is None:
                watcher = []
                self.watchers.append(watcher)
            elif self.over:
                ended = True
            elif watcher:
                if watcher.pop(0) == "create":
                    file, at = self.files[-1], 0
            else:
                await asyncio.sleep(0.05)
                if asyncio.get_running_loop().time() - idle_since >= IDLE:
                    idle_since = asyncio.get_running_loop().time()
                    yield b""


@dataclass(frozen=True)
class Outcome:
    log: Log
    data: bytes
    whole: Whole

    def check(self) -> None:
        """Every line once and in order; where one is missing a gap says so."""
        kept = self.data.splitlines(keepends=True)
        numbers = [int(line.split()[0]) for line in kept]
        assert kept == [self.log.printed[number] for number in numbers]
        assert numbers == sorted(set(numbers)), "a line twice, or out of order"
        holes = sum(b != a + 1 for a, b in pairwise([-1, *numbers, len(self.log.printed)]))
        assert bool(self.whole.gaps) or not holes, f"{holes} holes, and no gap"


async def keep(log: Log, tool: Coroutine[Any, Any, None]) -> Outcome:
    """Run a tool and keep what it prints, to its end."""
    store = MemoryStore()
    streams: Streams[str] = Streams(
        cast("Kube", log),
        store,
        Metrics(),
        tell=lambda _: None,
        over=lambda _: log.over,
        fence=lambda: None,
        patience=10.0,
        store_patience=10.0,
    )
    streams.follow("key", SOURCE)
    kubelet = asyncio.create_task(log.rotate())
    await tool
    log.over = True
    streams.archive("key", UID, [SOURCE], (1,))
    while (found := streams.archived(UID)) is None or found.trouble:  # noqa: ASYNC110
        await asyncio.sleep(0.1)
    await kubelet
    data = b"".join(
        Head.decode(store.objects[f"{UID}/{name}"])[1]
        for name in await store.names(UID)
        if not name.endswith(END)
    )
    whole = Whole.decode(store.objects[f"{UID}/{STREAM}/{END}"])
    assert found == Archived(len(data), whole.sha256, len(whole.gaps))
    return Outcome(log, data, whole)


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Callable[[Coroutine[Any, Any, Outcome]], Outcome]:
    class Now(datetime):
        @classmethod
        @override
        def now(cls, tz: Any = None) -> Any:
            return now()

    monkeypatch.setattr(module, "datetime", Now)
    monkeypatch.setattr(rotation, "LARGE_BYTES", LARGE)

    def run(story: Coroutine[Any, Any, Outcome]) -> Outcome:
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            outcome = runner.run(story)
        outcome.check()
        return outcome

    return run


async def print_for(log: Log, seconds: float, rate: float, rest: float = 0.0) -> None:
    """Print so many bytes a second for so long, then run on in silence."""
    end = asyncio.get_running_loop().time() + seconds
    owed = 0.0
    while asyncio.get_running_loop().time() < end:
        owed += rate * 0.1 / LINE
        log.print(int(owed))
        owed -= int(owed)
        await asyncio.sleep(0.1)
    await asyncio.sleep(rest)


def test_r_output_what_stands_in_a_file_after_the_one_that_was_read_is_not_lost(play: Any) -> None:
    """The tool ends while its reader is in a file that was rotated away."""

    async def story() -> Outcome:
        log = Log(speed=4 * LARGE)
        return await keep(log, print_for(log, 13, 5 * LARGE))

    outcome = play(story())
    assert len(outcome.log.files) == 2
    assert (outcome.data, outcome.whole.gaps) == (b"".join(outcome.log.printed), ())


def test_r_output_a_reader_that_waits_at_the_end_of_an_old_file_is_sent_on(play: Any) -> None:
    """Nothing more would come of it until the tool ends, or its log is rotated again."""

    async def story() -> Outcome:
        log = Log(speed=4 * LARGE)

        async def tool() -> None:
            await print_for(log, 10.1, 5 * LARGE)
            # Slowly, so that no rotation wakes the reader.
            await print_for(log, 30, LINE)

        return await keep(log, tool())

    outcome = play(story())
    assert len(outcome.log.files) == 2
    assert (outcome.data, outcome.whole.gaps) == (b"".join(outcome.log.printed), ())


def test_r_output_a_file_that_was_passed_over_is_told(play: Any) -> None:
    async def story() -> Outcome:
        log = Log(speed=2 * LARGE)
        return await keep(log, print_for(log, 35, 6 * LARGE))

    outcome = play(story())
    assert len(outcome.log.files) == 4
    assert outcome.whole.gaps


@pytest.mark.parametrize("rest", [0.0, 60.0])
def test_r_output_a_tool_that_prints_much_and_rests_has_no_gap(play: Any, rest: float) -> None:
    """Its log is rotated in silence: the newest file is empty."""

    async def story() -> Outcome:
        log = Log(speed=50 * LARGE)
        return await keep(log, print_for(log, 4, 5 * LARGE, rest))

    outcome = play(story())
    assert (outcome.data, outcome.whole.gaps) == (b"".join(outcome.log.printed), ())
    assert outcome.log.reads <= 2 + rotation.CHECKS


def test_r_output_a_tool_that_prints_little_is_read_once(play: Any) -> None:
    async def story() -> Outcome:
        log = Log(speed=50 * LARGE)
        return await keep(log, print_for(log, 60, LINE, 30))

    assert play(story()).log.reads == 1


@pytest.mark.parametrize("seed", range(HISTORIES))
def test_r_output_rotated_logs_are_kept_line_by_line_or_with_a_gap(play: Any, seed: int) -> None:
    chance = random.Random(seed)  # noqa: S311 - no secret

    async def story() -> Outcome:
        log = Log(
            speed=chance.choice([1, 3, 6, 30]) * LARGE,
            held_up=lambda: chance.choice([0, 0, 0.5, 3]),
        )

        async def tool() -> None:
            for _ in range(chance.randint(1, 5)):
                rate = chance.choice([0.01, 0.3, 2, 6]) * LARGE
                rest = chance.choice([0, 0, 0.5, 3, 12])
                await print_for(log, chance.choice([0.2, 2, 6, 14]), rate, rest)

        return await keep(log, tool())

    play(story())


def test_r_output_no_gap_is_told_where_none_can_be(play: Any) -> None:
    """A reader that keeps up loses nothing, however often the log is rotated."""

    async def story() -> Outcome:
        log = Log(speed=100 * LARGE)

        async def tool() -> None:
            for _ in range(4):
                await print_for(log, 12, 2 * LARGE, 12)

        return await keep(log, tool())

    outcome = play(story())
    assert len(outcome.log.files) > 4
    assert (outcome.data, outcome.whole.gaps) == (b"".join(outcome.log.printed), ())
