"""Streams from a log that is served as kubelets serve it to a store that may fail (R-OUTPUT)."""

import asyncio
import hashlib
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import pytest
from typing_extensions import override

from agentjobs import streams as module
from agentjobs.domain import output, rotation
from agentjobs.domain.errors import AgentJobError
from agentjobs.domain.output import (
    END,
    LATE,
    LOST,
    OVERTAKEN,
    Archived,
    Gap,
    Head,
    Whole,
    stream_name,
)
from agentjobs.domain.said import Said
from agentjobs.kube import Kube, NotFoundError, UnavailableError
from agentjobs.metrics import Metrics
from agentjobs.store import OutputStore, StoreError
from agentjobs.streams import Source, Streams

UID = "uid-1"
WITHIN = 10.0
POLL = 0.005
PATIENCE = 0.3


@dataclass
class Container:
    """What a tool has printed so far, in lines with stamps, and whether it has ended."""

    lines: list[tuple[datetime, bytes]] = field(default_factory=list)
    over: bool = False
    faults: list[Exception] = field(default_factory=list)
    """Raised by the next reads, one each."""
    always: Exception | None = None
    """Raised by every read."""
    cuts_after: int = 0
    """Lines after which a read breaks; 0: it does not."""
    following: int = 0
    most_following: int = 0
    reads: int = 0
    served: int = 0
    """Bytes."""

    def print(self, *lines: bytes, at: datetime | None = None) -> None:
        self.lines += [(at or datetime.now(UTC), line + b"\n") for line in lines]

    @property
    def output(self) -> bytes:
        return b"".join(line for _, line in self.lines)

    async def follow_log(
        self, _namespace: str, _pod: str, _container: str, *, since: str | None, follow: bool
    ) -> AsyncGenerator[bytes]:
        self.reads += 1
        self.following += 1
        self.most_following = max(self.most_following, self.following)
        try:
            if self.always or self.faults:
                raise self.always or self.faults.pop(0)
            begin = datetime.fromisoformat(since) if since else None
            at, sent = 0, 0
            while True:
                over = self.over
                while at < len(self.lines):
                    stamp, line = self.lines[at]
                    at += 1
                    if begin and stamp.replace(microsecond=0) < begin:
                        continue
                    piece = f"{stamp:%Y-%m-%dT%H:%M:%S}.{stamp:%f}000Z ".encode() + line
                    self.served += len(line)
                    yield piece
                    sent += 1
                    if self.cuts_after and sent >= self.cuts_after:
                        raise UnavailableError("connection reset by peer")
                if over or not follow:
                    return
                await asyncio.sleep(POLL)
                yield b""
        finally:
            self.following -= 1


class FaultyStore(OutputStore):
    """A directory that refuses, or is slow."""

    broken = False
    slow = 0.0
    puts = 0

    @override
    async def put(self, path: str, content: bytes) -> None:
        self.puts += 1
        writing = asyncio.ensure_future(self._write(path, content))
        try:
            await asyncio.shield(writing)
        except asyncio.CancelledError:
            await asyncio.wait({writing})
            raise

    async def _write(self, path: str, content: bytes) -> None:
        await asyncio.sleep(self.slow)
        if self.broken:
            raise StoreError("No space left on device")
        await super().put(path, content)


@dataclass
class Stage:
    store: FaultyStore
    containers: dict[str, Container] = field(default_factory=dict)
    told: list[str] = field(default_factory=list)
    fences: int = 0
    leads: bool = True
    made: list[Streams[str]] = field(default_factory=list)

    def begin(self) -> Streams[str]:
        """What a new leader begins with."""
        streams = Streams(
            cast("Kube", self),
            self.store,
            Metrics(),
            tell=self.told.append,
            over=lambda source: self.containers[source.pod].over,
            fence=self.fence,
            patience=PATIENCE,
            store_patience=0.2,
        )
        self.made.append(streams)
        return streams

    def follow_log(self, namespace: str, pod: str, *args: Any, **more: Any) -> AsyncIterator[bytes]:
        return self.containers[pod].follow_log(namespace, pod, *args, **more)

    def fence(self) -> None:
        if not self.leads:
            raise AgentJobError("somebody else leads")

    def source(
        self,
        number: int = 1,
        started_at: datetime | None = None,
        *,
        namespace: str = "ns",
        job: str = UID,
    ) -> Source:
        pod = f"pod-{number}"
        self.containers.setdefault(pod, Container())
        path = f"{job}/{1:04d}.{number:06d}.{pod}"
        return Source(namespace, pod, pod, "job-1", "tool", started_at, path)

    async def whole(self, source: Source) -> Whole:
        return Whole.decode(await self.store.get(f"{source.path}/{END}"))

    async def kept(self, source: Source) -> bytes:
        data = b""
        for name in await self.store.names(source.path):
            if name != END:
                data += Head.decode(await self.store.get(f"{source.path}/{name}"))[1]
        return data

    async def until_stored(self, source: Source) -> None:
        async with asyncio.timeout(WITHIN):
            while not await self.store.names(source.path):  # noqa: ASYNC110 - files
                await asyncio.sleep(POLL)


async def until(holds: Callable[[], object], what: str) -> None:
    end = asyncio.get_running_loop().time() + WITHIN
    while not holds():
        assert asyncio.get_running_loop().time() < end, f"{what} did not come"
        await asyncio.sleep(POLL)


async def archived(
    streams: Streams[str], *sources: Source, attempts: Sequence[int] = (1,)
) -> Archived:
    """What comes of all output of the job in the end."""
    streams.archive("key", UID, sources, attempts)
    await until(lambda: (found := streams.archived(UID)) and not found.trouble, "the archive")
    found = streams.archived(UID)
    assert found
    return found


@pytest.fixture
async def stage(store_url: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Stage]:
    for name, seconds in (("FIRST_PAUSE", 0.01), ("LARGEST_PAUSE", 0.05)):
        monkeypatch.setattr(module, name, seconds)
    stage = Stage(FaultyStore.open(store_url))
    yield stage
    for streams in stage.made:
        await streams.close()


async def test_r_output_all_that_a_tool_prints_is_kept(stage: Stage) -> None:
    streams, source = stage.begin(), stage.source()
    tool = stage.containers[source.pod]
    streams.follow("key", source)
    tool.print(b"one", b"\xff\x00", b"")
    await until(lambda: tool.served == len(tool.output), "what was printed first")
    tool.print(b"two")
    tool.over = True
    assert await archived(streams, source) == Archived(
        len(tool.output), hashlib.sha256(tool.output).hexdigest()
    )
    assert await stage.kept(source) == tool.output
    assert (tool.reads, stage.told) == (1, ["key"])


async def test_r_output_a_new_leader_goes_on_where_the_last_one_was(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "CHUNK_AGE", timedelta(seconds=0.2))
    source = stage.source()
    tool = stage.containers[source.pod]
    start = datetime.now(UTC)
    for life in range(4):
        streams = stage.begin()
        streams.follow("key", source)
        served = tool.served
        tool.print(*(b"%d.%d" % (life, n) for n in range(50)), at=start + timedelta(seconds=life))
        await until(lambda served=served: tool.served > served + 20, "what was printed")
        if life % 2:
            await stage.until_stored(source)
        await streams.close()
    tool.over = True
    whole = await archived(stage.begin(), source)
    assert await stage.kept(source) == tool.output
    assert whole.sha256 == hashlib.sha256(tool.output).hexdigest()
    assert whole.gaps == 0


async def test_r_output_a_stream_that_breaks_is_opened_anew(stage: Stage) -> None:
    streams, source = stage.begin(), stage.source()
    tool = stage.containers[source.pod]
    tool.cuts_after = 30
    start = datetime.now(UTC)
    for number in range(100):
        tool.print(b"%d" % number, at=start + timedelta(seconds=number / 10))
    tool.faults = [UnavailableError("502"), UnavailableError("503")]
    streams.follow("key", source)
    await until(lambda: tool.reads > 4, "more reads")
    tool.over = True
    whole = await archived(streams, source)
    assert await stage.kept(source) == tool.output
    assert (whole.gaps, tool.most_following) == (0, 1)


async def test_r_output_a_full_store_loses_nothing_and_takes_no_memory(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log waits where it is; the record says what is missing until the store is back."""
    monkeypatch.setattr(module, "WAITING_BYTES", 100_000)
    sources = [stage.source(number) for number in range(1, 21)]
    streams = stage.begin()
    stage.store.broken = True
    for source in sources:
        tool = stage.containers[source.pod]
        tool.print(*(bytes([65 + n % 26]) * 9_999 for n in range(50)))
        streams.follow("key", source)
    await until(lambda: stage.store.puts > 40, "puts in vain")
    served = sum(tool.served for tool in stage.containers.values())
    # One more piece each may have been on its way.
    assert served <= 100_000 + 20 * 10_000
    assert streams._waiting == served
    for tool in stage.containers.values():
        tool.over = True
    streams.archive("key", UID, sources, (1,))
    await until(lambda: streams.archived(UID), "word of what is missing")
    assert streams.archived(UID) == Archived(trouble="No space left on device")
    assert stage.told == ["key"]
    streams.settle(UID)
    stage.store.broken = False
    whole = await archived(streams, *sources)
    assert (whole.gaps, whole.size) == (0, 20 * 50 * 10_000)
    assert streams._waiting == 0
    for source in sources:
        assert await stage.kept(source) == stage.containers[source.pod].output


@pytest.mark.parametrize("end", [b"\n", b""])
async def test_r_event_a_tool_that_is_over_at_once_is_heard(stage: Stage, end: bytes) -> None:
    streams, source = stage.begin(), stage.source()
    tool = stage.containers[source.pod]
    tool.lines.append((datetime.now(UTC), b"::summary made it" + end))
    tool.over = True
    assert streams.heard(UID) == frozenset()
    streams.follow("key", source)
    await until(lambda: streams.heard(UID), "word that it was read")
    assert (streams.heard(UID), streams.said(UID)) == ({source.pod_uid}, Said(summary="made it"))
    assert "key" in stage.told


@pytest.mark.parametrize("why", ["nobody serves its log", "too many are followed"])
async def test_r_event_nobody_waits_long_for_what_cannot_be_read(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    streams, source = stage.begin(), stage.source()
    tool = stage.containers[source.pod]
    tool.over = True
    if why == "too many are followed":
        monkeypatch.setattr(module, "AT_ONCE", 0)
    else:
        tool.always = UnavailableError("504")
        monkeypatch.setattr(module, "HEARD_SECONDS", 0.05)
    streams.follow("key", source)
    await until(lambda: streams.heard(UID), "the end of patience")
    assert "key" in stage.told
    told = len(stage.told)
    # A pass asks again, and must not wake itself by that.
    streams.follow("key", source)
    assert len(stage.told) == told


async def test_r_output_an_attempt_that_nobody_followed_leaves_a_gap(stage: Stage) -> None:
    streams, source = stage.begin(), stage.source()
    stage.containers[source.pod].print(b"of the first attempt")
    stage.containers[source.pod].over = True
    whole = await archived(streams, source, attempts=(1, 2))
    assert (whole.size, whole.gaps) == (21, 1)
    path = f"{UID}/{stream_name(2, 0, 'unknown')}/{END}"
    assert Whole.decode(await stage.store.get(path)).gaps == (Gap(0, LOST),)


async def test_r_output_a_log_that_cannot_be_read_ends_as_a_gap(stage: Stage) -> None:
    streams, source = stage.begin(), stage.source()
    tool = stage.containers[source.pod]
    tool.always = UnavailableError("500 dial tcp: no route to host")
    streams.follow("key", source)
    await until(lambda: tool.reads > 3, "reads in vain")
    tool.over = True
    before = asyncio.get_running_loop().time()
    assert (await archived(streams, source)).gaps == 1
    assert PATIENCE <= asyncio.get_running_loop().time() - before < PATIENCE + 1
    assert (await stage.whole(source)).gaps == (Gap(0, LOST),)


async def test_r_output_the_end_of_the_job_is_the_end_of_a_pod_that_nobody_saw_end(
    stage: Stage,
) -> None:
    """Its node is lost: the pod says "running" for ever, and its kubelet does not answer."""
    streams, source = stage.begin(), stage.source()
    tool = stage.containers[source.pod]
    tool.print(b"one")
    streams.follow("key", source)
    await until(lambda: tool.served, "the first line")
    tool.always, tool.cuts_after = UnavailableError("502 dial tcp"), 1
    tool.print(b"lost")
    assert (await archived(streams, source)).gaps == 1
    assert not tool.over


async def test_r_output_a_log_that_went_with_its_pod_ends_as_a_gap(stage: Stage) -> None:
    streams, source = stage.begin(), stage.source()
    tool = stage.containers[source.pod]
    tool.cuts_after = 1
    tool.print(b"one")
    tool.faults = []
    streams.follow("key", source)
    await until(lambda: tool.served, "the first line")
    tool.always, tool.over = NotFoundError(404, {}, "LOG"), True
    assert (await archived(streams, source)).gaps == 1
    assert (await stage.whole(source)).gaps == (Gap(4, LOST),)


async def test_r_output_what_ran_unseen_is_a_gap(stage: Stage) -> None:
    """The pod came and went while no operator was there."""
    assert await archived(stage.begin()) == Archived(0, hashlib.sha256().hexdigest(), 1)


async def test_r_output_a_stream_that_nobody_goes_on_with_ends_as_a_gap(stage: Stage) -> None:
    source = stage.source()
    tool = stage.containers[source.pod]
    tool.print(b"x" * 2_000_000)
    first = stage.begin()
    first.follow("key", source)
    await stage.until_stored(source)
    await first.close()
    whole = await archived(stage.begin())
    assert (whole.size, whole.gaps) == (len(tool.output), 1)
    assert whole.sha256 == hashlib.sha256(tool.output).hexdigest()


async def test_r_output_what_is_deleted_stays_deleted(stage: Stage) -> None:
    """A write that is under way comes to its end before."""
    stage.store.slow = 0.05
    streams, source = stage.begin(), stage.source()
    tool = stage.containers[source.pod]
    tool.print(*(b"x" * 600_000 for _ in range(10)))
    streams.follow("key", source)
    await until(lambda: stage.store.puts > 2, "a write")
    await streams.delete(UID)
    assert not await stage.store.names(UID)
    assert tool.following == 0
    others = asyncio.all_tasks() - {asyncio.current_task()}
    assert not [task for task in others if task.get_name().startswith("output-")]


async def test_r_output_beyond_the_limit_output_is_read_at_the_end(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "AT_ONCE", 2)
    streams = stage.begin()
    sources = [stage.source(number) for number in range(1, 6)]
    for source in sources:
        stage.containers[source.pod].print(source.pod.encode())
        streams.follow("key", source)
    await until(lambda: all(stage.containers[f"pod-{n}"].reads for n in (1, 2)), "two streams")
    assert not any(stage.containers[f"pod-{n}"].reads for n in (3, 4, 5))
    for tool in stage.containers.values():
        tool.over = True
    assert (await archived(streams, *sources)).size == 5 * len(b"pod-1\n")


async def test_r_output_beyond_the_limit_an_attempt_is_read_at_its_end(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job goes on with another one, whose pods alone are asked for then."""
    monkeypatch.setattr(module, "AT_ONCE", 0)
    streams, source = stage.begin(), stage.source()
    tool = stage.containers[source.pod]
    tool.print(b"of the first attempt")
    streams.follow("key", source)
    tool.over = True
    streams.follow("key", source)
    assert (await archived(streams)).gaps == 0
    assert await stage.kept(source) == tool.output


async def test_r_output_namespaces_share_the_streams_and_nothing_is_lost_by_it(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "AT_ONCE", 8)
    streams = stage.begin()
    sources = [
        stage.source(number, namespace=tenant, job=f"uid-{number}")
        for number, tenant in enumerate(tenant for tenant in "abc" for _ in range(10))
    ]

    def followed() -> Counter[str]:
        tools = stage.containers
        return Counter(each.namespace for each in sources if tools[each.pod].following)

    for begin, shares in ((0, {"a": 8}), (10, {"a": 4, "b": 4}), (20, {"a": 3, "b": 3, "c": 2})):
        for each in sources[begin : begin + 10]:
            stage.containers[each.pod].print(each.pod.encode())
            streams.follow("key", each)
        await until(lambda shares=shares: followed() == shares, f"{shares}")
    for each in sources:
        # Who asks again takes nothing from others.
        streams.follow("key", each)
    assert not streams._leaving
    for each in sources:
        tool = stage.containers[each.pod]
        tool.print(b"more")
        tool.over = True
        streams.archive("key", f"uid-{each.pod.removeprefix('pod-')}", [each], (1,))
    for number, each in enumerate(sources):
        await until(lambda uid=f"uid-{number}": streams.archived(uid), "the archive")
        assert await stage.kept(each) == stage.containers[each.pod].output


async def test_r_output_who_gives_way_has_written_its_last_before_it_is_read_on(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a shorter chunk could take the place of a longer one."""
    monkeypatch.setattr(module, "AT_ONCE", 2)
    streams = stage.begin()
    stays, goes = (stage.source(number, namespace="a", job=f"uid-{number}") for number in (1, 2))
    streams.follow("key", stays)
    stage.store.slow = 0.3
    with monkeypatch.context() as crowded:
        crowded.setattr(module, "WAITING_BYTES", 1)
        tool = stage.containers[goes.pod]
        tool.print(b"one", b"two")
        streams.follow("key", goes)
        await until(lambda: stage.store.puts, "a chunk of one line")
        streams.follow("key", stage.source(3, namespace="b", job="uid-3"))
    stage.store.slow = 0
    tool.over = True
    streams.archive("key", "uid-2", [goes], (1,))
    await until(lambda: streams.archived("uid-2"), "the archive")
    await until(lambda: not streams._leaving, "the end of what was written")
    assert await stage.kept(goes) == tool.output


async def test_r_claim_who_leads_no_more_writes_no_more(stage: Stage) -> None:
    streams, source = stage.begin(), stage.source()
    tool = stage.containers[source.pod]
    tool.print(b"one")
    tool.over = True
    stage.leads = False
    streams.follow("key", source)
    await until(lambda: tool.reads > 2, "tries")
    assert not await stage.store.names(UID)


@pytest.mark.parametrize(
    ("began", "first", "gaps"),
    [
        pytest.param(60, 30, (Gap(0, LATE),), id="read late, the beginning may be gone"),
        pytest.param(60, 60, (), id="read late, from the beginning"),
        pytest.param(5, 2, (Gap(0, LATE),), id="the kubelet may rotate at any time"),
        pytest.param(60, -1, (), id="printed after the log was opened"),
    ],
)
async def test_r_output_a_beginning_that_may_be_missing_is_told(
    stage: Stage, began: int, first: int, gaps: tuple[Gap, ...]
) -> None:
    now = datetime.now(UTC)
    source = stage.source(started_at=now - timedelta(seconds=began))
    tool = stage.containers[source.pod]
    tool.print(b"one", at=now - timedelta(seconds=first))
    tool.over = True
    await archived(stage.begin(), source)
    assert (await stage.whole(source)).gaps == gaps


@pytest.mark.parametrize(
    ("first", "second", "gaps"),
    [
        pytest.param(-30, -5, (Gap(4, OVERTAKEN),), id="far behind, and on at once"),
        pytest.param(-30, -29, (), id="far behind, line by line"),
        pytest.param(3600, 3625, (), id="close behind a tool that pauses, by a clock that is off"),
    ],
)
async def test_r_output_files_that_the_kubelet_passed_over_are_told(
    stage: Stage,
    monkeypatch: pytest.MonkeyPatch,
    first: int,
    second: int,
    gaps: tuple[Gap, ...],
) -> None:
    monkeypatch.setattr(rotation, "LARGE_BYTES", 1)
    source = stage.source()
    tool = stage.containers[source.pod]
    now = datetime.now(UTC)
    tool.print(b"one", at=now + timedelta(seconds=first))
    tool.print(b"two", at=now + timedelta(seconds=second))
    streams = stage.begin()
    streams.follow("key", source)
    await until(lambda: tool.served == len(tool.output), "all lines")
    tool.over = True
    await archived(streams, source)
    assert (await stage.whole(source)).gaps == gaps


async def test_r_report_what_a_tool_says_in_its_output_is_heard(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams, source = stage.begin(), stage.source()
    tool = stage.containers[source.pod]
    tool.print(b"::progress 40 half way", b"plain")
    streams.follow("key", source)
    await until(lambda: streams.said(UID).percent, "the progress")
    assert streams.said(UID) == Said(40, "half way")
    await until(lambda: stage.told, "a pass")
    assert stage.told == ["key"]
    monkeypatch.setattr("agentjobs.streams.SAID_SECONDS", 3600)
    for percent in range(41, 61):
        tool.print(b"::progress %d" % percent)
        await until(lambda percent=percent: streams.said(UID).percent == percent, "the next")
    assert stage.told == ["key"], "the next pass is made later, whatever is said until then"
