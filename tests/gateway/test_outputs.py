"""Output read in pages from the store (R-OUTPUT)."""

import asyncio
import base64
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import cached_property
from itertools import pairwise
from pathlib import Path

import obstore
import pytest
from typing_extensions import override

from agentjobs.api.names import State
from agentjobs.contract.calls import OutputPage
from agentjobs.contract.operations import Stream
from agentjobs.contract.problems import ProblemType
from agentjobs.domain.output import (
    LEFT,
    MISSING,
    REPORTED,
    Gap,
    Head,
    Mark,
    Whole,
    chunk_name,
    moment,
    stream_name,
)
from agentjobs.gateway import outputs as module
from agentjobs.gateway.keys import Keys
from agentjobs.gateway.known import JobRecord, Name, record_of
from agentjobs.gateway.outputs import CLOSES_AFTER, READS_AT_ONCE, Outputs, Which
from agentjobs.gateway.problems import ProblemError
from agentjobs.store import OutputStore
from tests.builders import an_agentjob
from tests.until import until

KEYS = Keys(name=b"n" * 32, state=(b"s" * 32,))
STREAM = stream_name(1, 0, "pod-1")


def record(state: State = State.RUNNING, *, archived: bool = False, uid: str = "u1") -> JobRecord:
    return JobRecord(
        name=Name("team-a", "job-1"),
        uid=uid,
        version=1,
        created="2026-03-01T12:00:00Z",
        state=state,
        tool="t",
        digest="",
        caller="",
        body=b"{}",
        tag="x",
        archived=archived,
    )


@pytest.fixture
def store(tmp_path: Path) -> OutputStore:
    return OutputStore.open(tmp_path.as_uri())


async def put(store: OutputStore, *pieces: bytes, gaps: tuple[Gap, ...] = ()) -> int:
    offset = 0
    for piece in pieces:
        content = Head(Mark("t", 1, 1), gaps).encode() + piece
        await store.put(f"u1/{STREAM}/{chunk_name(offset)}", content)
        offset += len(piece)
    return offset


async def finish(store: OutputStore, size: int, gaps: tuple[Gap, ...] = ()) -> None:
    await store.put(f"u1/{STREAM}/end", Whole(size, "0" * 64, gaps).encode())


async def read_all(outputs: Outputs, job: JobRecord, limit: int) -> tuple[bytes, int]:
    got, cursor, pages = b"", "", 0
    while True:
        page = await outputs.page(KEYS, job, Which(), cursor=cursor, limit=limit)
        assert len(page.data.encode()) <= limit
        assert len(page.model_dump_json().encode()) <= 64 * 1024
        raw = page.data.encode()
        got += base64.b64decode(raw) if page.encoding == "base64" else raw
        cursor, pages = page.next, pages + 1
        if page.end:
            return got, pages
        assert pages < 1000


@pytest.mark.parametrize("limit", [4096, 65536])
async def test_r_output_pages_join_across_chunks(store: OutputStore, limit: int) -> None:
    whole = b"a" * 100_000 + "äöü".encode() * 20_000 + b"\xff\xfeend\n" + b"\x00\x01" * 5000
    cuts = [0, 1, 65_536, 100_001, 150_003, len(whole)]
    size = await put(store, *(whole[a:b] for a, b in pairwise(cuts)))
    await finish(store, size)
    got, pages = await read_all(Outputs(store), record(State.DONE, archived=True), limit)
    assert got == whole
    assert pages > 2


async def test_r_output_a_page_of_a_living_job_is_gone_on_with(store: OutputStore) -> None:
    outputs = Outputs(store)
    first = await outputs.page(KEYS, record(), Which(), cursor="", limit=65536)
    assert (first.data, first.end) == ("", False)
    await put(store, b"one\n")
    second = await outputs.page(KEYS, record(), Which(), cursor=first.next, limit=65536)
    assert (second.data, second.end) == ("one\n", False)
    await put(store, b"one\n", b"two\n")
    third = await outputs.page(KEYS, record(), Which(), cursor=second.next, limit=65536)
    assert third.data == "two\n"
    again = await outputs.page(KEYS, record(), Which(), cursor=second.next, limit=65536)
    assert again == third, "the same cursor gives the same page"
    await finish(store, 8)
    for archived in (False, True):
        job = record(State.DONE, archived=archived)
        last = await outputs.page(KEYS, job, Which(), cursor=third.next, limit=65536)
        assert (last.data, last.end) == ("", archived)


async def test_r_output_half_a_character_waits_for_its_rest(store: OutputStore) -> None:
    outputs = Outputs(store)
    half, rest = "ä".encode()[:1], "ä".encode()[1:]
    await put(store, b"x" + half)
    page = await outputs.page(KEYS, record(), Which(), cursor="", limit=65536)
    assert (page.data, page.encoding) == ("x", "utf-8")
    nothing = await outputs.page(KEYS, record(), Which(), cursor=page.next, limit=65536)
    assert (nothing.data, nothing.end) == ("", False)
    await put(store, b"x" + half, rest)
    more = await outputs.page(KEYS, record(), Which(), cursor=nothing.next, limit=65536)
    assert (more.data, more.encoding) == ("ä", "utf-8")


@pytest.mark.parametrize("gaps", [(), (Gap(0, "lost"),)])
async def test_r_output_of_a_tool_that_printed_nothing_is_empty(
    store: OutputStore, gaps: tuple[Gap, ...]
) -> None:
    await finish(store, 0, gaps)
    job = record(State.DONE, archived=True)
    page = await Outputs(store).page(KEYS, job, Which(), cursor="", limit=65536)
    assert (page.data, page.end) == ("", True)
    assert [gap.reason for gap in page.gaps] == [gap.reason for gap in gaps]


async def test_r_output_a_chunk_that_was_not_listed_is_waited_for(store: OutputStore) -> None:
    """A list that is made while chunks are written may show the later and not the earlier one."""
    await store.put(f"u1/{STREAM}/{chunk_name(4)}", Head(Mark()).encode() + b"two\n")
    outputs = Outputs(store)
    page = await outputs.page(KEYS, record(), Which(), cursor="", limit=65536)
    assert (page.data, page.end) == ("", False)
    await put(store, b"one\n")
    page = await outputs.page(KEYS, record(), Which(), cursor=page.next, limit=65536)
    assert page.data == "one\ntwo\n"


@pytest.mark.parametrize("limit", [8, 65536])
async def test_r_output_what_the_store_has_lost_is_a_gap_and_holds_nobody_up(
    store: OutputStore, limit: int
) -> None:
    """But only after all was stored: until then it may still come."""
    await put(store, b"one\n", b"two\n", b"three\n", b"four\n")
    await finish(store, 19)
    names = [f"output/u1/{STREAM}/{chunk_name(offset)}" for offset in (4, 14)]
    await obstore.delete_async(store._store, names)
    living, cursor = Outputs(store), ""
    for expected in ("one\n", ""):
        page = await living.page(KEYS, record(), Which(), cursor=cursor, limit=65536)
        assert (page.data, page.end, page.gaps) == (expected, False, ())
        cursor = page.next
    outputs, job = Outputs(store), record(State.DONE, archived=True)
    data, gaps, cursor, end = "", [], "", False
    while not end:
        page = await outputs.page(KEYS, job, Which(), cursor=cursor, limit=limit)
        data, cursor, end = data + page.data, page.next, page.end
        gaps += [(gap.offset, gap.reason) for gap in page.gaps]
    assert (data, gaps) == ("one\nthree\n", [(4, MISSING), (14, MISSING)])


async def test_r_output_a_stream_that_nobody_finished_ends_with_a_gap(store: OutputStore) -> None:
    await put(store, b"one\n")
    outputs, job = Outputs(store), record(State.DONE, archived=True)
    page = await outputs.page(KEYS, job, Which(), cursor="", limit=65536)
    assert (page.data, page.end, page.gaps) == ("one\n", False, ())
    page = await outputs.page(KEYS, job, Which(), cursor=page.next, limit=65536)
    assert (page.end, [gap.reason for gap in page.gaps]) == (True, [MISSING])


class Counting(OutputStore):
    lists = 0

    @override
    async def names(self, prefix: str) -> Mapping[str, int]:
        self.lists += 1
        return await super().names(prefix)


async def test_r_output_reading_lists_a_job_once_for_what_is_there(tmp_path: Path) -> None:
    """To list many chunks is dear in S3."""
    store = Counting.open(tmp_path.as_uri())
    size = await put(store, *(b"%07d\n" % n * 100 for n in range(50)))
    living = Outputs(store)
    cursor = ""
    for _ in range(9):
        page = await living.page(KEYS, record(), Which(), cursor=cursor, limit=4096)
        cursor = page.next
    assert store.lists == 1
    await finish(store, size)
    store.lists = 0
    job = record(State.DONE, archived=True)
    got, pages = await read_all(Outputs(store), job, 4096)
    assert (len(got), pages > 9, store.lists) == (size, True, 1)


class Silent(OutputStore):
    """One that answers when it is let."""

    reading = most = 0

    @override
    async def get(self, path: str) -> bytes:
        self.reading += 1
        self.most = max(self.most, self.reading)
        try:
            await self.answers.wait()
            return await super().get(path)
        finally:
            self.reading -= 1

    @cached_property
    def answers(self) -> asyncio.Event:
        return asyncio.Event()


async def read_by_many(store: OutputStore, outputs: Outputs) -> list[asyncio.Task[OutputPage]]:
    """Pages of twice as many chunks as are read at once."""
    count = 2 * READS_AT_ONCE
    for number in range(1, count + 1):
        path = f"u1/{stream_name(number, 0, 'p')}/{chunk_name(0)}"
        await store.put(path, Head(Mark()).encode() + b"a")
    pages = [
        outputs.page(KEYS, record(), Which(attempt=number), cursor="", limit=65536)
        for number in range(1, count + 1)
    ]
    return [asyncio.create_task(page) for page in pages]


async def test_r_output_many_readers_at_once_have_few_chunks_in_memory(tmp_path: Path) -> None:
    store = Silent.open(tmp_path.as_uri())
    pages = await read_by_many(store, Outputs(store))
    await until(lambda: store.reading == READS_AT_ONCE)
    store.answers.set()
    assert {page.data for page in await asyncio.gather(*pages)} == {"a"}
    assert store.most == READS_AT_ONCE


async def test_r_output_long_lists_are_not_kept(
    store: OutputStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LISTED_CHUNKS", 5)
    outputs = Outputs(store)
    for number, chunks in enumerate((3, 2, 1, 6)):
        for offset in range(chunks):
            path = f"u{number}/{STREAM}/{chunk_name(offset)}"
            await store.put(path, Head(Mark()).encode() + b"a")
        job = record(uid=f"u{number}")
        page = await outputs.page(KEYS, job, Which(), cursor="", limit=65536)
        assert page.data == "a" * chunks
    kept = (await outputs.page(KEYS, record(uid="u2"), Which(), cursor="", limit=65536)).data
    assert (kept, list(outputs._listings)) == ("a", ["u2"])


async def test_r_output_nobody_waits_long_for_others_to_be_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PATIENCE_SECONDS", 0.5)
    store = Silent.open(tmp_path.as_uri())
    pages = await read_by_many(store, Outputs(store))
    async with asyncio.timeout(5):
        ends = await asyncio.gather(*pages, return_exceptions=True)
    assert {end.kind for end in ends if isinstance(end, ProblemError)} == {ProblemType.UNAVAILABLE}
    assert sum(isinstance(end, ProblemError) for end in ends) == 2 * READS_AT_ONCE


async def test_r_output_a_gap_stands_where_output_is_missing(store: OutputStore) -> None:
    await put(store, b"one\n", b"two\n", gaps=(Gap(4, "rotated"),))
    await finish(store, 8, (Gap(4, "rotated"), Gap(8, "lost")))
    stopped = record(State.CANCELLED, archived=True)
    page = await Outputs(store).page(KEYS, stopped, Which(), cursor="", limit=65536)
    assert [(gap.offset, gap.reason) for gap in page.gaps] == [(4, "rotated"), (8, "lost")]
    assert page.end


async def test_r_output_each_attempt_and_index_can_be_asked_for(store: OutputStore) -> None:
    for attempt, index, text in ((1, 0, b"a1"), (2, 0, b"a2"), (2, 3, b"i3")):
        path = f"u1/{stream_name(attempt, index, f'p{attempt}{index}')}"
        await store.put(f"{path}/{0:016d}", Head(Mark()).encode() + text)
    outputs = Outputs(store)
    for which, expected in (
        (Which(), "a1"),
        (Which(attempt=1), "a1"),
        (Which(attempt=2), "a2"),
        (Which(index=3), "i3"),
        (Which(attempt=1, index=3), ""),
    ):
        page = await outputs.page(KEYS, record(), which, cursor="", limit=65536)
        assert page.data == expected


async def test_r_output_a_gap_at_the_end_of_a_stream_is_told_once(store: OutputStore) -> None:
    outputs, cursor, got = Outputs(store), "", []
    await finish(store, await put(store, b"one\n"), (Gap(4, "lost"),))
    for archived in (False, False, True):
        job = record(State.DONE, archived=archived)
        page = await outputs.page(KEYS, job, Which(), cursor=cursor, limit=65536)
        got += [(page.data, len(page.gaps), page.end)]
        cursor = page.next
    assert got == [("one\n", 0, False), ("", 0, False), ("", 1, True)]
    outputs, second = Outputs(store), f"u1/{stream_name(2, 0, 'p2')}"
    await store.put(f"{second}/{chunk_name(0)}", Head(Mark()).encode() + b"two\n")
    page = await outputs.page(KEYS, record(), Which(), cursor="", limit=65536)
    assert (page.data, page.gaps) == ("one\n", ())
    page = await outputs.page(KEYS, record(), Which(), cursor=page.next, limit=65536)
    assert (page.data, [gap.reason for gap in page.gaps]) == ("two\n", ["lost"])


async def test_r_output_of_all_attempts_is_read_one_after_the_other(store: OutputStore) -> None:
    """Who reads as it comes gets what others get later; one that printed nothing is no end."""
    outputs, job, cursor, got = Outputs(store), record(), "", []
    for attempt, text in ((1, b"a1"), (2, b""), (3, b"a3")):
        path = f"u1/{stream_name(attempt, 0, f'p{attempt}')}"
        if text:
            await store.put(f"{path}/{chunk_name(0)}", Head(Mark()).encode() + text)
        await store.put(f"{path}/end", Whole(len(text), "0" * 64).encode())
        page = await outputs.page(KEYS, job, Which(), cursor=cursor, limit=65536)
        got.append((page.data, page.end))
        cursor = page.next
    assert got == [("a1", False), ("", False), ("a3", False)]
    assert await read_all(outputs, record(State.DONE, archived=True), 65536) == (b"a1a3", 2)
    page = await outputs.page(KEYS, job, Which(attempt=1), cursor="", limit=65536)
    assert (page.data, page.end) == ("a1", True)


LONG_AGO = datetime.now(UTC) - 2 * CLOSES_AFTER
JUST_NOW = datetime.now(UTC) + timedelta(hours=1)


async def read_as_it_comes(
    store: OutputStore, kind: Stream, ended: tuple[tuple[int, datetime], ...], attempt: int | None
) -> tuple[bytes, list[tuple[int, str]], bool]:
    """What a reader gets of two attempts, the second of which goes on."""
    below = f"u1/{REPORTED}/" if kind is Stream.REPORTED else "u1/"
    for number in (1, 2):
        path = f"{below}{stream_name(number, 0, f'p{number}')}/{chunk_name(0)}"
        await store.put(path, Head(Mark()).encode() + b"a%d" % number)
    outputs, which = Outputs(store), Which(attempt=attempt, kind=kind)
    got, gaps, cursor, end = b"", [], "", False
    for _ in range(4):
        job = replace(record(), ended=ended)
        page = await outputs.page(KEYS, job, which, cursor=cursor, limit=65536)
        got, cursor, end = got + page.data.encode(), page.next, page.end
        gaps += [(gap.offset, gap.reason) for gap in page.gaps]
    return got, gaps, end


@pytest.mark.parametrize(
    ("kind", "ended", "attempt", "expected"),
    [
        pytest.param(
            Stream.PRINTED, LONG_AGO, None, (b"a1a2", [(2, LEFT)], False), id="printed, not ended"
        ),
        pytest.param(Stream.PRINTED, JUST_NOW, None, (b"a1", [], False), id="it may still come"),
        pytest.param(
            Stream.PRINTED, LONG_AGO, 1, (b"a1", [], False), id="there is nothing else to read"
        ),
        pytest.param(Stream.REPORTED, LONG_AGO, None, (b"a1a2", [], False), id="reported"),
        pytest.param(Stream.REPORTED, LONG_AGO, 1, (b"a1", [], True), id="nobody reports any more"),
        pytest.param(Stream.REPORTED, JUST_NOW, 1, (b"a1", [], False), id="on its way"),
    ],
)
async def test_r_output_nobody_is_held_up_by_an_attempt_that_another_one_followed(
    store: OutputStore,
    kind: Stream,
    ended: datetime,
    attempt: int | None,
    expected: tuple[bytes, list[tuple[int, str]], bool],
) -> None:
    assert await read_as_it_comes(store, kind, ((1, ended),), attempt) == expected


def test_r_output_when_attempts_ended_is_known_of_lost_ones_too() -> None:
    def attempt(number: int, **times: str) -> dict[str, object]:
        return {"number": number, "jobName": f"job-{number}", **times}

    first, third = "2026-03-01T12:00:00Z", "2026-03-01T13:00:00Z"
    attempts = [
        attempt(1, startedAt=first, finishedAt=first),
        attempt(2, startedAt=first),
        attempt(3, startedAt=third),
    ]
    job = an_agentjob(status={"state": "running", "attempts": attempts})
    assert record_of(job.to_json()).ended == ((1, moment(first)), (2, moment(third)))


async def test_r_output_a_cursor_of_another_job_is_refused(store: OutputStore) -> None:
    outputs = Outputs(store)
    page = await outputs.page(KEYS, record(), Which(), cursor="", limit=65536)
    with pytest.raises(ProblemError):
        await outputs.page(KEYS, record(uid="u2"), Which(), cursor=page.next, limit=65536)


async def test_a_gateway_without_a_store_says_that_nothing_is_kept() -> None:
    page = await Outputs(None).page(KEYS, record(State.DONE), Which(), cursor="", limit=65536)
    assert (page.data, page.end) == ("", True)
    assert page.gaps


async def test_a_store_that_fails_is_a_503(tmp_path: Path) -> None:
    store = OutputStore.open(tmp_path.as_uri())
    await put(store, b"one")
    await store.put(f"u1/{STREAM}/{0:016d}", b"broken")
    with pytest.raises(ProblemError) as caught:
        await Outputs(store).page(KEYS, record(), Which(), cursor="", limit=65536)
    assert caught.value.kind.status == 503
    assert "Retry-After" in caught.value.headers
