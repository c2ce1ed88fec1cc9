"""What tools printed, read from the store in pages: it survives the pod (R-OUTPUT)."""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from agentjobs.api.agentjob import AgentJob
from agentjobs.api.names import State
from agentjobs.contract.calls import Gap, OutputPage, ResultPage
from agentjobs.contract.operations import MAX_PAGE_BYTES
from agentjobs.contract.problems import ProblemType
from agentjobs.domain.jobids import job_id
from agentjobs.domain.output import (
    END,
    Head,
    Whole,
    chunk_name,
    encode_page,
    ended_in_the_middle,
    parse_stream_name,
)
from agentjobs.gateway.cursors import open_cursor, seal_cursor
from agentjobs.gateway.keys import Keys
from agentjobs.gateway.known import JobRecord
from agentjobs.gateway.problems import try_later
from agentjobs.store import MissingObjectError, OutputStore, StoreError

NOT_KEPT = "no output is kept here; while the pod exists, kubectl logs shows it"
NO_END = 1 << 63
CACHED_CHUNKS = 32
"""Chunks never change; a reader asks for the same one for each of its pages."""
DATA_BYTES = MAX_PAGE_BYTES - 2048
"""Of a page as JSON; the rest is for what stands around it."""


@dataclass(frozen=True, slots=True)
class Which:
    """Which of a job's streams is asked for."""

    attempt: int | None = None
    """None: all, one after the other."""
    index: int = 0
    """Of an indexed Job: which completion."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a stream."""

    data: bytes
    gaps: tuple[Gap, ...]
    next: str
    end: bool


class Outputs:
    """Reads streams of jobs that the caller may see."""

    def __init__(self, store: OutputStore | None) -> None:
        self._store = store
        self._chunks: OrderedDict[str, tuple[Head, bytes]] = OrderedDict()

    async def page(
        self, keys: Keys, record: JobRecord, which: Which, *, cursor: str, limit: int
    ) -> OutputPage:
        """A page of at most so many bytes of data, 64 KiB as JSON.

        :raises ProblemError: a cursor that is not ours; a store that does not answer (503).
        """
        piece = await self.piece(keys, record, which, cursor=cursor, limit=limit)
        if not piece.data:
            return OutputPage(data="", next=piece.next, end=piece.end, gaps=piece.gaps)
        text, encoding, used = encode_page(piece.data, min(limit, DATA_BYTES))
        whole = used == len(piece.data)
        after = piece.next
        if not whole:
            stream, offset = _place(open_cursor(keys, _purpose(record), piece.next))
            after = _seal(keys, record, stream, offset - len(piece.data) + used)
        return OutputPage(
            data=text,
            encoding=encoding,
            next=after,
            end=piece.end and whole,
            gaps=piece.gaps,
        )

    async def piece(
        self, keys: Keys, record: JobRecord, which: Which, *, cursor: str, limit: int
    ) -> Piece:
        """A part of a stream as it was printed.

        :raises ProblemError: a cursor that is not ours; a store that does not answer (503).
        """
        stream, offset = "", 0
        if cursor:
            stream, offset = _place(open_cursor(keys, _purpose(record), cursor))
        if self._store is None:
            gaps = (Gap(offset=0, reason=NOT_KEPT),) if record.over else ()
            return Piece(b"", gaps, _seal(keys, record, stream, offset), end=record.over)
        try:
            names = await self._store.names(record.uid)
            return await self._read_on(keys, record, names, which, (stream, offset), limit)
        except (StoreError, ValueError) as error:
            raise try_later(
                ProblemType.UNAVAILABLE, "the store of output does not answer", 5
            ) from error

    async def result(self, keys: Keys, job: AgentJob, *, cursor: str, limit: int) -> ResultPage:
        """A page of what a job handed in at its end; at most so many bytes, 64 KiB as JSON.

        :raises ProblemError: a cursor that is not ours; a store that does not answer (503).
        """
        purpose = f"result {job.metadata.uid}"
        begin = int(open_cursor(keys, purpose, cursor)) if cursor else 0
        kept = job.status.result
        content, size = await self._result_part(job, begin, limit)
        text, encoding, used = encode_page(content, min(limit, DATA_BYTES))
        after = begin + used
        return ResultPage(
            job_id=job_id(job.metadata.namespace, job.metadata.name),
            status=State.DONE,
            data=text,
            encoding=encoding,
            truncated=bool(kept and kept.truncated),
            next=seal_cursor(keys, purpose, after) if after < size else None,
        )

    async def _result_part(self, job: AgentJob, begin: int, limit: int) -> tuple[bytes, int]:
        """Bytes of a result from an offset on, and how many there are in all."""
        kept = job.status.result
        if kept is None or not kept.uri:
            content = (kept.text or "").encode() if kept else b""
            return content[begin : begin + limit], len(content)
        length = min(limit, kept.bytes - begin)
        if self._store is None:
            raise try_later(ProblemType.UNAVAILABLE, "the store of results is not set up here", 5)
        path = f"{job.metadata.uid}/{kept.uri}"
        try:
            return await self._store.get_range(path, begin, length), kept.bytes
        except StoreError as error:
            raise try_later(
                ProblemType.UNAVAILABLE, "the store of results does not answer", 5
            ) from error

    async def _read_on(
        self,
        keys: Keys,
        record: JobRecord,
        names: Mapping[str, int],
        which: Which,
        place: tuple[str, int],
        limit: int,
    ) -> Piece:
        """A part of a stream, or of the next one that has something."""
        streams = _fitting(names, which)
        stream, offset = place
        stream = stream or next(iter(streams), "")
        gaps: tuple[Gap, ...] = ()
        while True:
            piece = await self._read(keys, record, names, stream, offset, limit)
            following = next((each for each in streams if each > stream), "")
            if piece.end and not piece.data and following:
                gaps += piece.gaps
                stream, offset = following, 0
                continue
            # Another attempt may follow as long as the job is not over.
            settled = which.attempt is not None or record.archived
            end = piece.end and settled and not following
            # A gap at the end of a stream is told once: when the reader leaves it.
            after = offset + len(piece.data)
            gaps += tuple(gap for gap in piece.gaps if end or gap.offset < after)
            return replace(piece, gaps=gaps, end=end)

    async def _read(
        self,
        keys: Keys,
        record: JobRecord,
        names: Mapping[str, int],
        stream: str,
        offset: int,
        limit: int,
    ) -> Piece:
        if not stream:
            # Nothing was printed, or nothing is stored yet.
            return Piece(b"", (), _seal(keys, record, "", 0), end=record.archived)
        path = f"{record.uid}/{stream}"
        starts = [
            int(name.rpartition("/")[2])
            for name in names
            if name.startswith(f"{stream}/") and name.rpartition("/")[2].isdigit()
        ]
        data, gaps = await self._range(path, starts, offset, limit)
        whole = await self._whole(path) if f"{stream}/{END}" in names else None
        if whole:
            gaps = tuple(Gap(offset=gap.offset, reason=gap.reason) for gap in whole.gaps)
        after = offset + len(data)
        end = whole is not None and after >= whole.size
        if not end and data and ended_in_the_middle(data) and len(data) < limit:
            # The rest of the character is still to come.
            data = data.decode("utf-8", "ignore").encode()
            after = offset + len(data)
        shown = tuple(
            gap for gap in gaps if offset <= gap.offset < after or (end and gap.offset == after)
        )
        return Piece(data, shown, _seal(keys, record, stream, after), end=end)

    async def _range(
        self, path: str, starts: list[int], offset: int, limit: int
    ) -> tuple[bytes, tuple[Gap, ...]]:
        """At most so many bytes from an offset on; all gaps known up to there."""
        data = b""
        gaps: tuple[Gap, ...] = ()
        for start, following in pairwise([*starts, NO_END]):
            if following <= offset + len(data):
                continue
            if start > offset + len(data):
                # It was written while the store was listed, and one before it was not seen.
                break
            head, content = await self._chunk(f"{path}/{chunk_name(start)}")
            gaps = tuple(Gap(offset=gap.offset, reason=gap.reason) for gap in head.gaps)
            data += content[offset + len(data) - start :][: limit - len(data)]
            if len(data) >= limit:
                break
        return data, gaps

    async def _chunk(self, path: str) -> tuple[Head, bytes]:
        known = self._chunks.get(path)
        if known:
            self._chunks.move_to_end(path)
            return known
        if self._store is None:
            raise MissingObjectError(path)
        read = Head.decode(await self._store.get(path))
        self._chunks[path] = read
        while len(self._chunks) > CACHED_CHUNKS:
            self._chunks.popitem(last=False)
        return read

    async def _whole(self, path: str) -> Whole | None:
        if self._store is None:
            return None
        return Whole.decode(await self._store.get(f"{path}/{END}"))


def _fitting(names: Mapping[str, int], which: Which) -> list[str]:
    """The streams that are asked for, in order."""
    streams = sorted({name.partition("/")[0] for name in names})
    places = [(parse_stream_name(stream), stream) for stream in streams]
    return [
        stream
        for place, stream in places
        if place and place[1] == which.index and which.attempt in {None, place[0]}
    ]


def _purpose(record: JobRecord) -> str:
    return f"output {record.uid}"


def _place(value: list[Any]) -> tuple[str, int]:
    stream, offset = value
    return str(stream), int(offset)


def _seal(keys: Keys, record: JobRecord, stream: str, offset: int) -> str:
    return seal_cursor(keys, _purpose(record), [stream, offset])
