"""What tools printed, read from the store in pages: it survives the pod (R-OUTPUT)."""

import asyncio
import logging
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from agentjobs.api.agentjob import AgentJob
from agentjobs.api.names import State
from agentjobs.contract.calls import Gap, OutputPage, ResultPage
from agentjobs.contract.operations import MAX_PAGE_BYTES, Stream
from agentjobs.contract.problems import ProblemType
from agentjobs.domain.jobids import job_id
from agentjobs.domain.output import (
    END,
    LEFT,
    MISSING,
    REPORTED,
    Head,
    Stored,
    Whole,
    chunk_name,
    encode_page,
    ended_in_the_middle,
    parse_stream_name,
    stored_streams,
)
from agentjobs.domain.output import Gap as StoredGap
from agentjobs.gateway.cursors import open_cursor, seal_cursor
from agentjobs.gateway.keys import Keys
from agentjobs.gateway.known import JobRecord
from agentjobs.gateway.problems import try_later
from agentjobs.store import PATIENCE_SECONDS, MissingObjectError, OutputStore, StoreError

log = logging.getLogger(__name__)
NOT_KEPT = "no output is kept here; while the pod exists, kubectl logs shows it"
CACHED_CHUNKS = 32
"""Chunks never change; a reader asks for the same one for each of its pages."""
READS_AT_ONCE = 16
"""Chunks, or lists of them, that are read from the store at once: one takes thrice its size while
it is copied."""
LISTED_JOBS = 64
"""Chunks are only added, so a list is good for all that it shows; to list anew is dear in S3."""
LISTED_CHUNKS = 200_000
"""In all lists that are kept: a tool that always prints makes 17,280 a day, of 40 bytes each."""
CLOSES_AFTER = timedelta(seconds=3 * PATIENCE_SECONDS)
"""After the end of an attempt: what one piece asks of the store that is handed in just before."""
DATA_BYTES = MAX_PAGE_BYTES - 2048
"""Of a page as JSON; the rest is for what stands around it."""


@dataclass(frozen=True, slots=True)
class Which:
    """Which of a job's streams is asked for."""

    attempt: int | None = None
    """None: all, one after the other."""
    index: int = 0
    """Of an indexed Job: which completion."""
    kind: Stream = Stream.PRINTED

    def below(self, record: JobRecord) -> str:
        """Where in the store these streams are."""
        return record.uid if self.kind is Stream.PRINTED else f"{record.uid}/{REPORTED}"

    def is_final(self, record: JobRecord) -> bool:
        """Whether nothing is added to them any more."""
        # A piece is acknowledged if its job was not over when it was stored (`Pieces`); what was
        # printed is put together after the end.
        return record.archived if self.kind is Stream.PRINTED else record.over

    def purpose(self, record: JobRecord) -> str:
        """What cursors into them are good for."""
        kind = "" if self.kind is Stream.PRINTED else f" {self.kind}"
        return f"output {record.uid}{kind}"


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a stream."""

    data: bytes
    gaps: tuple[Gap, ...]
    next: str
    end: bool


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of a stream, and the place behind it."""

    data: bytes
    after: int
    gaps: tuple[Gap, ...]
    end: bool
    stream: str = ""


@dataclass(frozen=True, slots=True)
class _Listing:
    """What the store has of a job."""

    streams: Mapping[str, Stored]
    final: bool
    """Whether it was listed after all had been stored."""
    closed: frozenset[int] = frozenset()
    """Attempts of which it was listed long after they had ended."""

    def missing(self, which: Which, stream: str, following: str) -> str:
        """What is said of what a stream lacks; empty while it may come.

        :param following: the stream that is read after it; empty: there is none.
        """
        if self.final:
            return MISSING
        # Nobody reports for an attempt that has ended. What it printed may be stored still, however
        # late; who has nothing else to read waits for it.
        waits = which.kind is Stream.PRINTED and not following
        place = parse_stream_name(stream)
        return LEFT if place and place[0] in self.closed and not waits else ""


class Outputs:
    """Reads streams of jobs that the caller may see."""

    def __init__(self, store: OutputStore | None) -> None:
        self._store = store
        self._chunks: OrderedDict[str, tuple[Head, bytes]] = OrderedDict()
        self._reads = asyncio.Semaphore(READS_AT_ONCE)
        self._listings: OrderedDict[str, _Listing] = OrderedDict()

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
        if used < len(piece.data):
            piece = await self.piece(keys, record, which, cursor=cursor, limit=used)
        return OutputPage(
            data=text, encoding=encoding, next=piece.next, end=piece.end, gaps=piece.gaps
        )

    async def piece(
        self, keys: Keys, record: JobRecord, which: Which, *, cursor: str, limit: int
    ) -> Piece:
        """A part of a stream as it was printed.

        :raises ProblemError: a cursor that is not ours; a store that does not answer (503).
        """
        stream, offset = "", 0
        if cursor:
            stream, offset = _place(open_cursor(keys, which.purpose(record), cursor))
        if self._store is None:
            gaps = (Gap(offset=0, reason=NOT_KEPT),) if record.over else ()
            after = seal_cursor(keys, which.purpose(record), [stream, offset])
            return Piece(b"", gaps, after, end=record.over)
        try:
            part = await self._read_on(record, which, (stream, offset), limit)
        except (StoreError, ValueError) as error:
            log.warning("output of AgentJob %s cannot be read: %s", record.uid, error)
            raise try_later(
                ProblemType.UNAVAILABLE, "the store of output does not answer", 5
            ) from error
        after = seal_cursor(keys, which.purpose(record), [part.stream, part.after])
        return Piece(part.data, part.gaps, after, end=part.end)

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

    async def _list(self, record: JobRecord, which: Which) -> "_Listing":
        assert self._store is not None  # noqa: S101 - asked by `piece`
        # Whether it can change is asked first: what is stored meanwhile must not be missed.
        final, below = which.is_final(record), which.below(record)
        closed = _closed(record, datetime.now(UTC))
        async with self._turn(below):
            streams = stored_streams(await self._store.names(below))
        listing = self._listings[below] = _Listing(streams, final, closed)
        self._listings.move_to_end(below)
        while len(self._listings) > LISTED_JOBS or self._has_long_lists():
            self._listings.popitem(last=False)
        return listing

    def _has_long_lists(self) -> bool:
        chunks = sum(
            len(stored.starts)
            for listing in self._listings.values()
            for stored in listing.streams.values()
        )
        return chunks > LISTED_CHUNKS

    async def _read_on(
        self, record: JobRecord, which: Which, place: tuple[str, int], limit: int
    ) -> "_Part":
        """A part of a stream, from what is known to be there or from a new list."""
        listing = self._listings.get(which.below(record))
        if listing is not None:
            part = await self._read_from(listing, record, which, place, limit)
            if listing.final or len(part.data) == limit:
                return part
        return await self._read_from(await self._list(record, which), record, which, place, limit)

    async def _read_from(
        self,
        listing: "_Listing",
        record: JobRecord,
        which: Which,
        place: tuple[str, int],
        limit: int,
    ) -> "_Part":
        """A part of a stream, or of the next one that has something."""
        streams = _fitting(listing.streams, which)
        stream, offset = place
        stream = stream or next(iter(streams), "")
        gaps: tuple[Gap, ...] = ()
        while stream:
            stored = listing.streams.get(stream, Stored())
            path = f"{which.below(record)}/{stream}"
            following = next((each for each in streams if each > stream), "")
            missing = listing.missing(which, stream, following)
            part = await self._read(path, stored, offset, limit, missing)
            if part.end and not part.data and following:
                gaps += part.gaps
                stream, offset = following, 0
                continue
            # Another attempt may follow as long as the job is not over.
            settled = which.attempt is not None or listing.final
            end = part.end and settled and not following
            # A gap at the end of a stream is told once: when the reader leaves it.
            gaps += tuple(gap for gap in part.gaps if end or gap.offset < part.after)
            return replace(part, stream=stream, gaps=gaps, end=end)
        # Nothing was printed, or nothing is stored yet.
        return _Part(b"", after=0, gaps=(), end=listing.final)

    async def _read(
        self, path: str, stored: Stored, offset: int, limit: int, missing: str
    ) -> "_Part":
        """A part of one stream.

        :param missing: what is said of what is not there; empty: nothing yet, it is waited for.
        """
        final = bool(missing)
        whole = await self._whole(path, stored, final=final)
        begin, data, gaps = offset, *await self._range(path, stored.starts, offset, limit)
        if final and not data:
            # Nothing is written any more, so what is not there is missing.
            size = whole.size if whole else offset
            begin = min((start for start in stored.starts if start > offset), default=size)
            data, gaps = await self._range(path, stored.starts, begin, limit)
        if whole:
            gaps = _shown(whole.gaps)
        after = begin + len(data)
        end = after >= whole.size if whole else final and not data
        if not end and data and ended_in_the_middle(data) and len(data) < limit:
            # The rest of the character is still to come.
            data = data.decode("utf-8", "ignore").encode()
            after = begin + len(data)
        shown = tuple(
            gap for gap in gaps if offset <= gap.offset < after or (end and gap.offset == after)
        )
        if begin > offset or (end and not whole):
            shown = (Gap(offset=offset, reason=missing), *shown)
        return _Part(data, after=after, gaps=shown, end=end)

    async def _range(
        self, path: str, starts: Sequence[int], offset: int, limit: int
    ) -> tuple[bytes, tuple[Gap, ...]]:
        """At most so many bytes from an offset on; all gaps known up to there."""
        data = b""
        gaps: tuple[Gap, ...] = ()
        # The chunk that holds the offset, or the first one behind it.
        first = max(bisect_right(starts, offset) - 1, 0)
        for start in starts[first:]:
            at = offset + len(data) - start
            if at < 0:
                # One before it is missing, or was written while the store was listed.
                break
            head, content = await self._chunk(f"{path}/{chunk_name(start)}")
            gaps = _shown(head.gaps)
            data += content[at : at + limit - len(data)]
            if len(data) >= limit:
                break
        return data, gaps

    async def _chunk(self, path: str) -> tuple[Head, bytes]:
        read = self._chunks.get(path) or await self._fetch(path)
        self._chunks[path] = read
        self._chunks.move_to_end(path)
        while len(self._chunks) > CACHED_CHUNKS:
            self._chunks.popitem(last=False)
        return read

    async def _fetch(self, path: str) -> tuple[Head, bytes]:
        if self._store is None:
            raise MissingObjectError(path)
        async with self._turn(path):
            # Another reader may have brought it meanwhile.
            return self._chunks.get(path) or Head.decode(await self._store.get(path))

    @asynccontextmanager
    async def _turn(self, path: str) -> AsyncIterator[None]:
        """Read from the store when few others do.

        However many wait, nobody waits for longer than the store may take for one of them.

        :raises StoreError: there was no turn for so long.
        """
        try:
            async with asyncio.timeout(PATIENCE_SECONDS), self._reads:
                yield
        except TimeoutError as error:
            raise StoreError(f"{path} cannot be read: others are waited for") from error

    async def _whole(self, path: str, stored: Stored, *, final: bool) -> Whole | None:
        """What a stream came to, where that is known."""
        if self._store is None:
            return None
        if stored.ended:
            return Whole.decode(await self._store.get(f"{path}/{END}"))
        if final and stored.starts and f"/{REPORTED}/" in path:
            # A tool does not say when its last piece was the last.
            last = stored.starts[-1]
            _, content = await self._chunk(f"{path}/{chunk_name(last)}")
            return Whole(last + len(content), "")
        return None


def _shown(gaps: Iterable[StoredGap]) -> tuple[Gap, ...]:
    return tuple(Gap(offset=gap.offset, reason=gap.reason) for gap in gaps)


def _closed(record: JobRecord, now: datetime) -> frozenset[int]:
    """Attempts to whose output nothing is added any more, unless the store fails."""
    return frozenset(number for number, ended in record.ended if ended + CLOSES_AFTER < now)


def _fitting(streams: Iterable[str], which: Which) -> list[str]:
    """The streams that are asked for, in order."""
    places = [(parse_stream_name(stream), stream) for stream in streams]
    return [
        stream
        for place, stream in places
        if place and place[1] == which.index and which.attempt in {None, place[0]}
    ]


def _place(value: list[Any]) -> tuple[str, int]:
    stream, offset = value
    return str(stream), int(offset)
