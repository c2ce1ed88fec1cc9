"""Output that tools hand in piece by piece: each once, in order, read like any other (R-REPORT)."""

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from typing_extensions import override

from agentjobs.api.names import State
from agentjobs.contract.operations import Stream
from agentjobs.contract.problems import ProblemType
from agentjobs.gateway.keys import Keys
from agentjobs.gateway.known import JobRecord, KnownJobs, Name
from agentjobs.gateway.outputs import Outputs, Which
from agentjobs.gateway.pieces import Pieces
from agentjobs.gateway.pods import JobsOfPods
from agentjobs.gateway.problems import ProblemError
from agentjobs.gateway.reviews import Pod
from agentjobs.kube import NotFoundError
from agentjobs.store import OutputStore, StoreError
from tests.builders import Json

KEYS = Keys(name=b"n" * 32, state=(b"s" * 32,))
JOB = "crawl.team-a"
POD = Pod("team-a", "crawl-1-x7k2p", "pod-1")
MOST = 1000


def record(state: State = State.RUNNING, attempt: int = 1, *pods: str) -> JobRecord:
    return JobRecord(
        name=Name("team-a", "crawl"),
        uid="u1",
        version=1,
        created="2026-03-01T12:00:00Z",
        state=state,
        tool="t",
        digest="",
        caller="",
        body=b"{}",
        tag="x",
        archived=False,
        job_name=f"crawl-{attempt}",
        attempt=attempt,
        pods=pods or ("pod-1", "pod-2"),
    )


class OneJob:
    """An API server that has one AgentJob, or none any more."""

    def __init__(self, body: Json | None) -> None:
        self.body = body

    async def get(self, *_: object) -> Json:
        if self.body is None:
            raise NotFoundError(404, {}, "get")
        return self.body


class OnePlace(JobsOfPods):
    """The job of every pod here."""

    def __init__(self, found: JobRecord, server: OneJob) -> None:
        super().__init__(server, KnownJobs())  # type: ignore[arg-type] - it is asked for one
        self.found = found

    @override
    async def job_of(self, pod: Pod, job_id: str) -> JobRecord:
        if self.found.over:
            raise ProblemError(ProblemType.JOB_OVER, "it is done")
        return self.found


class FailingStore(OutputStore):
    """Keeps what it is given, or says that it cannot."""

    fails = False
    before: Callable[[], Awaitable[object]] | None = None
    """Called before an object is written."""

    @override
    async def create(self, path: str, content: bytes) -> bool:
        if self.fails:
            raise StoreError("full")
        if self.before:
            await self.before()
        return await super().create(path, content)


@pytest.fixture
def store(tmp_path: Path) -> FailingStore:
    return FailingStore.open(tmp_path.as_uri())


def pieces(
    store: OutputStore | None, found: JobRecord | None = None, server: OneJob | None = None
) -> Pieces:
    place = OnePlace(found or record(), server or OneJob(agentjob()))
    return Pieces(place, store, MOST)


def agentjob(uid: str = "u1", *, over: bool = False, deleted: bool = False) -> Json:
    """The AgentJob as the API server has it."""
    at = "2026-03-01T12:00:00Z"
    meta = {"name": "crawl", "namespace": "team-a", "uid": uid, "resourceVersion": "2"}
    meta |= {"deletionTimestamp": at} if deleted else {}
    return {"metadata": meta, "spec": {}, "status": {"finishedAt": at} if over else {}}


async def put(taker: Pieces, offset: int, content: bytes, pod: Pod = POD) -> int:
    return (await taker.put(pod, JOB, offset, content)).offset


async def refusal(taker: Pieces, offset: int, content: bytes) -> tuple[str, Any]:
    with pytest.raises(ProblemError) as caught:
        await put(taker, offset, content)
    return caught.value.kind.name, caught.value.problem.offset


async def read(store: OutputStore, job: JobRecord, attempt: int | None = None) -> tuple[bytes, int]:
    """All of it in small pages, and how many gaps were told."""
    outputs, which = Outputs(store), Which(attempt, 0, Stream.REPORTED)
    got, gaps, cursor = b"", 0, ""
    for _ in range(1000):
        piece = await outputs.piece(KEYS, job, which, cursor=cursor, limit=7)
        got, gaps, cursor = got + piece.data, gaps + len(piece.gaps), piece.next
        if piece.end or not piece.data:
            return got, gaps
    raise AssertionError("it does not end")


def lose(store: OutputStore, path: str) -> None:
    """Take an object away behind everybody's back."""
    Path(store.url.removeprefix("file://"), "output", path).unlink()


async def test_r_report_pieces_join_and_any_bytes_are_taken(store: FailingStore) -> None:
    taker = pieces(store)
    whole = hashlib.shake_256(b"seed").digest(300)
    for at in range(0, 300, 50):
        assert await put(taker, at, whole[at : at + 50]) == at + 50
    assert await read(store, record()) == (whole, 0)
    assert await read(store, record(State.DONE)) == (whole, 0)


async def test_r_report_a_piece_sent_again_is_kept_once(store: FailingStore) -> None:
    taker, other_replica = pieces(store), pieces(store)
    assert await put(taker, 0, b"first ") == 6
    assert await put(taker, 6, b"second") == 12
    assert await put(other_replica, 6, b"second") == 12
    assert await put(taker, 0, b"first ") == 12
    assert await read(store, record(State.DONE)) == (b"first second", 0)


@pytest.mark.parametrize(
    ("offset", "content"),
    [
        pytest.param(7, b"x", id="a gap"),
        pytest.param(3, b"x", id="within what is kept"),
        pytest.param(0, b"other!", id="other bytes of the same length"),
        pytest.param(0, b"first and more", id="the same and more"),
    ],
)
async def test_r_report_what_does_not_go_on_is_refused_with_where_it_does(
    store: FailingStore, offset: int, content: bytes
) -> None:
    taker = pieces(store)
    await put(taker, 0, b"first ")
    assert await refusal(taker, offset, content) == ("OUTPUT_ELSEWHERE", 6)
    assert await read(store, record(State.DONE)) == (b"first ", 0)


async def test_r_report_a_longer_repetition_does_not_take_the_place_of_the_first(
    store: FailingStore,
) -> None:
    taker = pieces(store)
    taken = await asyncio.gather(
        put(taker, 0, b"first "), put(taker, 0, b"first and more"), return_exceptions=True
    )
    assert [type(each) for each in taken] == [int, ProblemError]


async def test_r_report_nothing_is_taken_that_is_not_stored(store: FailingStore) -> None:
    taker = pieces(store)
    store.fails = True
    assert await refusal(taker, 0, b"x") == ("UNAVAILABLE", None)
    store.fails = False
    assert await put(taker, 0, b"x") == 1
    assert await refusal(pieces(None), 0, b"x") == ("OUTPUT_NOT_KEPT", None)


async def test_r_report_output_of_a_job_is_bounded(
    store: FailingStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    taker = pieces(store)
    assert await put(taker, 0, b"x" * MOST) == MOST
    assert await refusal(taker, MOST, b"x") == ("OUTPUT_FULL", None)
    another = pieces(store, record(State.RUNNING, 2))
    assert await refusal(another, 0, b"x") == ("OUTPUT_FULL", None)
    await store.delete("u1")
    monkeypatch.setattr("agentjobs.gateway.pieces.MAX_PIECES", 2)
    small = Pod("team-a", "crawl-1-zzzzz", "pod-2")
    assert [await put(taker, at, b"x", small) for at in (0, 1)] == [1, 2]
    with pytest.raises(ProblemError, match="pieces"):
        await put(taker, 2, b"x", small)


async def test_r_report_attempts_and_completions_have_streams_of_their_own(
    store: FailingStore,
) -> None:
    await put(pieces(store), 0, b"one")
    second = record(State.RUNNING, 2)
    await put(pieces(store, second), 0, b"two", Pod("team-a", "crawl-2-x7k2p", "pod-2"))
    indexed = Pod("team-a", "crawl-2-3-x7k2p", "pod-3")
    await put(pieces(store, second), 0, b"three", indexed)
    over = record(State.DONE)
    assert await read(store, over) == (b"onetwo", 0)
    assert await read(store, over, 2) == (b"two", 0)
    which = Which(None, 3, Stream.REPORTED)
    assert (await Outputs(store).piece(KEYS, over, which, cursor="", limit=9)).data == b"three"


async def test_r_report_it_is_no_part_of_what_was_printed_and_goes_with_the_job(
    store: FailingStore,
) -> None:
    await put(pieces(store), 0, b"handed in")
    printed = await Outputs(store).piece(KEYS, record(), Which(), cursor="", limit=100)
    assert printed.data == b""
    reported = Which(kind=Stream.REPORTED)
    page = await Outputs(store).piece(KEYS, record(), reported, cursor="", limit=4)
    with pytest.raises(ProblemError, match="cursor"):
        await Outputs(store).piece(KEYS, record(), Which(), cursor=page.next, limit=4)
    await store.delete("u1")
    assert await store.names("u1") == {}


async def test_r_output_a_piece_that_the_store_has_lost_is_a_gap(store: FailingStore) -> None:
    taker = pieces(store)
    for at in (0, 5, 10):
        await put(taker, at, b"abcde")
    names = list(await store.names("u1/reported"))
    lose(store, f"u1/reported/{names[1]}")
    assert await read(store, record(State.DONE)) == (b"abcdeabcde", 1)


@pytest.mark.parametrize(
    ("then", "left"),
    [
        pytest.param(agentjob(over=True), 2, id="the job ends"),
        pytest.param(agentjob(over=True, deleted=True), 0, id="its output may be deleted already"),
        pytest.param(agentjob(uid="u2"), 0, id="it is gone, and another has its name"),
        pytest.param(None, 0, id="it is gone"),
    ],
)
async def test_r_report_what_is_stored_after_the_end_is_not_acknowledged_nor_outlives_the_job(
    store: FailingStore, then: Json | None, left: int
) -> None:
    server = OneJob(agentjob())
    taker = pieces(store, server=server)
    await put(taker, 0, b"first ")

    async def end() -> None:
        server.body = then

    store.before = end
    assert await refusal(taker, 6, b"second") == ("JOB_OVER", None)
    assert len(await store.names("u1/reported")) == left
    if left:
        assert await refusal(taker, 6, b"second") == ("JOB_OVER", None), "nor is it later"


async def test_r_report_pieces_are_taken_while_a_deleted_job_still_runs(
    store: FailingStore,
) -> None:
    taker = pieces(store, server=OneJob(agentjob(deleted=True)))
    assert await put(taker, 0, b"last words") == 10


async def test_r_report_a_tool_that_is_killed_while_it_reports_leaves_nothing_of_a_deleted_job(
    store: FailingStore,
) -> None:
    server, begun = OneJob(agentjob()), asyncio.Event()
    sending = asyncio.create_task(put(pieces(store, server=server), 0, b"x"))

    async def begin() -> None:
        begun.set()

    store.before = begin
    await begun.wait()
    server.body = None
    sending.cancel()
    with pytest.raises((asyncio.CancelledError, ProblemError)):
        await sending
    assert await store.names("u1") == {}


async def test_r_report_a_piece_that_waited_for_its_turn_until_the_end_is_not_stored(
    store: FailingStore,
) -> None:
    place = OnePlace(record(), OneJob(agentjob()))
    taker = Pieces(place, store, MOST)

    async def end() -> None:
        place.found = record(State.DONE)

    store.before = end
    taken = await asyncio.gather(
        put(taker, 0, b"in time"), put(taker, 7, b"late"), return_exceptions=True
    )
    assert [type(each) for each in taken] == [int, ProblemError]
    assert len(await store.names("u1")) == 1


@pytest.mark.parametrize(
    ("theirs", "outcome"),
    [
        pytest.param(b"ours", 4, id="the same piece"),
        pytest.param(b"else", ("OUTPUT_ELSEWHERE", 4), id="another one"),
        pytest.param(b"ours and more", ("OUTPUT_ELSEWHERE", 13), id="a longer one"),
    ],
)
async def test_r_report_of_two_pieces_sent_to_two_replicas_at_once_one_is_kept(
    store: FailingStore, theirs: bytes, outcome: object
) -> None:
    other_replica = pieces(FailingStore.open(store.url))
    store.before = lambda: put(other_replica, 0, theirs)
    ours = (
        put(pieces(store), 0, b"ours") if theirs == b"ours" else refusal(pieces(store), 0, b"ours")
    )
    assert await ours == outcome
    assert await read(store, record(State.DONE)) == (theirs, 0)
