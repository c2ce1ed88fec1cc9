"""Follows what tools print and keeps it, one stream for each running tool container (R-OUTPUT).

Everything needed to go on after a crash stands in the store: the head of the last chunk of a stream
says where it ends in the container's log.
"""

import asyncio
import hashlib
import logging
from collections.abc import AsyncIterator, Callable, Hashable, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Generic, TypeVar

from agentjobs.domain.errors import AgentJobError
from agentjobs.domain.output import (
    END,
    LATE,
    LOST,
    OVERTAKEN,
    ROTATED,
    Archived,
    Chunks,
    Gap,
    Head,
    LogReader,
    Mark,
    NoLogError,
    Whole,
    moment,
    parse_stream_name,
    stored_streams,
    stream_name,
    total,
)
from agentjobs.domain.rotation import Rotation, has_room
from agentjobs.domain.said import Listener, Said
from agentjobs.kube import Kube, KubeError, NotFoundError, UnavailableError
from agentjobs.metrics import Metrics
from agentjobs.store import OutputStore, StoreError

log = logging.getLogger(__name__)
K = TypeVar("K", bound=Hashable)
AT_ONCE = 500
"""Streams that are followed at the same time; beyond it output is read at the end. Namespaces share
them: one gets all that others do not ask for, and gives up what is more than its share."""
ENDS_AT_ONCE = 32
"""Logs that are read after their end at the same time."""
WAITING_BYTES = 32 * 1024 * 1024
"""What all streams together keep in memory before it is stored."""
PUTS_AT_ONCE = 8
FIRST_PAUSE = 0.5
LARGEST_PAUSE = 15.0
SETTLE_SECONDS = 5.0
"""How long a log that ended is waited for to be the end of its container."""
STILL_SECONDS = 10.0
"""How long a stream may stand still, after its container has ended or because of the store, before
the log is read anew. The kubelet rotates logs no more often."""
HEARD_SECONDS = 1.0
"""How long the end of a tool waits, at most, for what it has printed to be read."""
SAID_SECONDS = 1.0
"""Between two passes, at least, that are made because of what a tool says; it may say it always."""
FIRST_LINE_WITHIN = timedelta(seconds=2)


@dataclass(frozen=True, slots=True)
class Source:
    """A container whose output is kept."""

    namespace: str
    pod: str
    pod_uid: str
    job_uid: str
    """Of the batch/v1 Job."""
    container: str
    started_at: datetime | None
    path: str
    """Of its stream in the store: `<uid of the AgentJob>/<stream>`."""


class Streams(Generic[K]):
    """Follows sources, each on a task of its own."""

    def __init__(  # noqa: PLR0913 - all that a stream reads, writes and waits with
        self,
        kube: Kube,
        store: OutputStore,
        metrics: Metrics,
        *,
        tell: Callable[[K], None],
        over: Callable[[Source], bool],
        fence: Callable[[], None],
        patience: float,
        store_patience: float,
    ) -> None:
        """Prepare.

        :param tell: called with the key of a job whose output is all that can be had.
        :param over: whether a container has ended.
        :param fence: raises when this process may not write any more (R-CLAIM).
        :param patience: seconds for which a log that cannot be read is asked for after the end.
        :param store_patience: seconds for which the store is waited for beyond that, before it is
            said that output is missing.
        """
        self.kube = kube
        self._over = over
        self.patience = patience
        self._store_patience = store_patience
        self._store = store
        self._metrics = metrics
        self._tell = tell
        self._fence = fence
        self._followed: dict[str, dict[str, Source]] = {}
        """By namespace, and by the path of the stream; those begun last stand last."""
        self._leaving: dict[str, asyncio.Task[Whole]] = {}
        """Streams that are not followed any more, while what they write comes to its end."""
        self._ends = asyncio.Semaphore(ENDS_AT_ONCE)
        self._turns = asyncio.Semaphore(PUTS_AT_ONCE)
        self._waiting = 0
        self._trouble = ""
        self._tasks: dict[str, asyncio.Task[Whole]] = {}
        """By the path of the stream."""
        self._archives: dict[str, asyncio.Task[None]] = {}
        self._archived: dict[str, Archived] = {}
        self._said: dict[str, Said] = {}
        self._heard: dict[str, set[str]] = {}
        self._saying: set[K] = set()
        """Jobs whose passes will be told soon that their tools have said something."""

    # --- what passes ask for

    def follow(self, key: K, source: Source) -> None:
        """Follow a source, unless that is being done, or too many are followed already."""
        if source.path in self._tasks or source.path in self._leaving:
            return
        if self._has_turn(source.namespace):
            self._followed.setdefault(source.namespace, {})[source.path] = source
            task = self._begin(key, source, nullcontext())
            task.add_done_callback(lambda _: self._unfollow(source))
            loop = asyncio.get_running_loop()
            loop.call_later(HEARD_SECONDS, self._hear, key, source)
            return
        if self._over(source):
            # The job may go on with another attempt, and nobody asks for this one then.
            _ = self._begin(key, source, self._ends)
        if source.pod_uid not in self.heard(_job_uid(source)):
            self._heard.setdefault(_job_uid(source), set()).add(source.pod_uid)
            self._tell(key)

    def archive(
        self, key: K, job_uid: str, sources: Sequence[Source], attempts: Sequence[int]
    ) -> None:
        """Put together all output of a job that is over, unless that is being done.

        :param sources: the containers that can still be read.
        :param attempts: those in which the tool began; one without a stream gets a gap.
        """
        if job_uid not in self._archives:
            task = asyncio.create_task(self._archive(key, job_uid, sources, attempts))
            self._archives[job_uid] = task

    def archived(self, job_uid: str) -> Archived | None:
        """What was kept of the output of a job, once that is all, or why it is not."""
        return self._archived.get(job_uid)

    def said(self, job_uid: str) -> Said:
        """What the tool of a job has said on lines of its output."""
        return self._said.get(job_uid) or Said()

    def heard(self, job_uid: str) -> frozenset[str]:
        """Pods of a job of which all was read that they had printed, or was waited for."""
        return frozenset(self._heard.get(job_uid, ()))

    def settle(self, job_uid: str) -> None:
        """Forget what was written into the status."""
        self._archived.pop(job_uid, None)

    def forget(self, job_uid: str) -> list[asyncio.Task[Any]]:
        """Keep nothing more of a job's output; return what is ending because of that."""
        archive = self._archives.pop(job_uid, None)
        ending: list[asyncio.Task[Any]] = [archive] if archive else []
        ending += [task for path, task in self._leaving.items() if path.startswith(f"{job_uid}/")]
        ending += [self._tasks.pop(path) for path in self._paths(job_uid)]
        self._archived.pop(job_uid, None)
        self._said.pop(job_uid, None)
        self._heard.pop(job_uid, None)
        for task in ending:
            task.cancel()
        return ending

    async def delete(self, job_uid: str) -> None:
        """Delete what was kept of a job's output; nothing more is kept of it.

        :raises StoreError: try again later.
        """
        # What is being written must not come to lie there after the deletion.
        await asyncio.gather(*self.forget(job_uid), return_exceptions=True)
        await self._store.delete(job_uid)

    async def close(self) -> None:
        """End all streams; what was stored is gone on with by the next leader."""
        tasks = [*self._archives.values(), *self._tasks.values(), *self._leaving.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # --- what streams ask for

    def over(self, source: Source) -> bool:
        """Whether a container has ended; what is known of a lost node knows only the job's end."""
        return _job_uid(source) in self._archives or self._over(source)

    async def names(self, path: str) -> Sequence[str]:
        """Names of the objects of a stream, in order."""
        async with self._turns, self._told():
            return list(await self._store.names(path))

    async def get(self, path: str) -> bytes:
        """Read an object."""
        async with self._turns, self._told():
            return await self._store.get(path)

    async def put(self, path: str, content: Callable[[], bytes]) -> None:
        """Write an object; its content is made when it is its turn, so that few are in memory.

        :raises StoreError: it is not known to be stored.
        """
        async with self._turns, self._told():
            self._fence()
            await self._store.put(path, content())

    @asynccontextmanager
    async def _told(self) -> AsyncIterator[None]:
        """Keep what the store says, for those who wait for their output."""
        try:
            yield
        except StoreError as error:
            self._trouble = str(error)
            raise
        self._trouble = ""

    def hold(self, size: int) -> None:
        """Count bytes that wait to be stored, or negative ones that wait no more."""
        self._waiting += size

    @property
    def crowded(self) -> bool:
        """Whether so much waits that a stream has to store what it has before it reads on."""
        return self._waiting > WAITING_BYTES

    # --- tasks

    def _begin(
        self, key: K, source: Source, turn: AbstractAsyncContextManager[None]
    ) -> asyncio.Task[Whole]:
        task = asyncio.create_task(self._keep(key, source, turn), name=f"output-{source.path}")
        self._tasks[source.path] = task
        return task

    def _hear(self, key: K, source: Source) -> None:
        """Take note that what a source had printed was read, or waited for long enough."""
        if source.path not in self._tasks:
            return
        pods = self._heard.setdefault(_job_uid(source), set())
        if source.pod_uid not in pods:
            pods.add(source.pod_uid)
            if self._over(source):
                self._tell(key)

    def _has_turn(self, namespace: str) -> bool:
        """Whether one more of a namespace may be followed; another's may have to give way."""
        if sum(map(len, self._followed.values())) < AT_ONCE:
            return True
        largest = max(self._followed.values(), key=len, default={})
        if len(self._followed.get(namespace, ())) + 1 >= len(largest):
            return False
        # Of the one begun last the most is still in its log when that is read at the end.
        dropped = next((each for each in reversed(largest.values()) if self._may_wait(each)), None)
        if dropped:
            self._drop(dropped)
        return dropped is not None

    def _may_wait(self, source: Source) -> bool:
        return source.path in self._tasks and not self.over(source)

    def _drop(self, source: Source) -> None:
        """Follow a source no more: its log is read on from where it is stored, at its end."""
        task = self._leaving[source.path] = self._tasks.pop(source.path)
        task.add_done_callback(lambda _: self._leaving.pop(source.path, None))
        task.cancel()
        self._unfollow(source)

    def _tell_said(self, key: K) -> None:
        self._saying.discard(key)
        self._tell(key)

    def _unfollow(self, source: Source) -> None:
        paths = self._followed.get(source.namespace, {})
        paths.pop(source.path, None)
        if not paths:
            self._followed.pop(source.namespace, None)

    async def _keep(self, key: K, source: Source, turn: AbstractAsyncContextManager[None]) -> Whole:
        """Follow a source to its end, whatever breaks on the way."""
        leaving = self._leaving.get(source.path)
        if leaving:
            # Two that write one stream would replace each other's chunks.
            await asyncio.wait({leaving})
        async with turn:
            with self._metrics.streams.track_inprogress():
                return await self._follow(key, source)

    async def _follow(self, key: K, source: Source) -> Whole:
        def say(said: Said) -> None:
            self._said[_job_uid(source)] = said
            if key not in self._saying:
                self._saying.add(key)
                asyncio.get_running_loop().call_later(SAID_SECONDS, self._tell_said, key)

        def hear() -> None:
            self._hear(key, source)

        pause = FIRST_PAUSE
        while True:
            try:
                return await _Stream(self, source, say, hear).run()
            except (AgentJobError, ValueError) as error:
                log.warning("output of pod %s/%s: %s", source.namespace, source.pod, error)
            except Exception:
                log.exception("the output of pod %s/%s broke", source.namespace, source.pod)
            await asyncio.sleep(pause)
            pause = min(2 * pause, LARGEST_PAUSE)

    async def _archive(
        self, key: K, job_uid: str, sources: Sequence[Source], attempts: Sequence[int]
    ) -> None:
        for source in sources:
            if source.path not in self._tasks:
                _ = self._begin(key, source, self._ends)
        gathered = asyncio.create_task(self._gather(job_uid, attempts))
        try:
            await asyncio.wait({gathered}, timeout=self.patience + self._store_patience)
            if not gathered.done():
                why = self._trouble or "its log is still being read"
                self._archived[job_uid] = Archived(trouble=why)
                self._tell(key)
            self._archived[job_uid] = await gathered
        finally:
            gathered.cancel()
            self._archives.pop(job_uid, None)
        for path in self._paths(job_uid):
            del self._tasks[path]
        self._said.pop(job_uid, None)
        self._heard.pop(job_uid, None)
        self._tell(key)

    async def _gather(self, job_uid: str, attempts: Sequence[int]) -> Archived:
        """All streams of a job, each with its end; one that nobody can go on with gets a gap."""
        pause = FIRST_PAUSE
        while True:
            await asyncio.gather(*(asyncio.shield(self._tasks[p]) for p in self._paths(job_uid)))
            try:
                paths = await self._streams(job_uid, attempts)
                return total([await self._whole(path) for path in paths])
            except (AgentJobError, ValueError) as error:
                log.warning("output of AgentJob %s is not put together yet: %s", job_uid, error)
            await asyncio.sleep(pause)
            pause = min(2 * pause, LARGEST_PAUSE)

    async def _streams(self, job_uid: str, attempts: Sequence[int]) -> list[str]:
        """Paths of all streams of a job, one at least for each attempt."""
        streams = set(stored_streams(await self.names(job_uid)))
        known = {place[0] for place in map(parse_stream_name, streams) if place}
        streams |= {stream_name(attempt, 0, "unknown") for attempt in {*attempts} - known}
        return [f"{job_uid}/{name}" for name in sorted(streams)]

    async def _whole(self, path: str) -> Whole:
        stored = await self.names(path)
        if END in stored:
            return Whole.decode(await self.get(f"{path}/{END}"))
        digest, size = hashlib.sha256(), 0
        gaps: tuple[Gap, ...] = ()
        for name in stored:
            head, data = Head.decode(await self.get(f"{path}/{name}"))
            digest.update(data)
            size, gaps = int(name) + len(data), head.gaps
        whole = Whole(size, digest.hexdigest(), (*gaps, Gap(size, LOST)))
        await self.put(f"{path}/{END}", whole.encode)
        return whole

    def _paths(self, job_uid: str) -> list[str]:
        """Of the streams of a job that are followed, or were."""
        return [path for path in self._tasks if path.startswith(f"{job_uid}/")]


def _job_uid(source: Source) -> str:
    """Of the AgentJob."""
    return source.path.partition("/")[0]


class _Stream:
    """One life of one stream: from what the store has of it to its end."""

    def __init__(
        self,
        streams: Streams[Any],
        source: Source,
        say: Callable[[Said], None],
        hear: Callable[[], None],
    ) -> None:
        """Prepare.

        :param say: called with what the tool has said, when that is news.
        :param hear: called when what it had printed was read.
        """
        self._streams = streams
        self._source = source
        self._say = say
        self._hear = hear
        self._listener = Listener()
        self._chunks = Chunks()
        self._mark = Mark()
        self._digest = hashlib.sha256()
        self._pause = FIRST_PAUSE
        self._unread_since = 0.0
        """Since when the log of the container, which has ended, cannot be read."""
        self._rotation = Rotation()
        self._opened_at = datetime.now(UTC)

    async def run(self) -> Whole:
        """Follow until the container has ended and all that it printed is stored."""
        path = self._source.path
        stored = await self._streams.names(path)
        if END in stored:
            return Whole.decode(await self._streams.get(f"{path}/{END}"))
        try:
            await self._take_up(stored)
            while not await self._read():
                await self._rest()
        finally:
            self._streams.hold(self._chunks.offset - self._chunks.size)
        whole = Whole(self._chunks.size, self._digest.hexdigest(), tuple(self._chunks.gaps))
        await self._streams.put(f"{path}/{END}", whole.encode)
        return whole

    async def _take_up(self, stored: Sequence[str]) -> None:
        """Go on where the last chunk ends. The digest is made anew from what is stored."""
        for name in stored:
            head, data = Head.decode(await self._streams.get(f"{self._source.path}/{name}"))
            self._digest.update(data)
            self._listen(data)
            self._chunks.offset = int(name) + len(data)
            self._chunks.gaps = list(head.gaps)
            self._mark = head.mark

    async def _read(self) -> bool:
        """Read the log as far as it goes; return whether nothing more will come of it."""
        over = self._streams.over(self._source)
        reader = LogReader(self._mark)
        clock = asyncio.get_running_loop().time
        self._rotation.begin(clock(), over=over)
        try:
            whole = await self._read_on(reader, over=over)
        except (UnavailableError, KubeError, NoLogError) as error:
            await self._flush()
            return self._is_lost(error, over=over)
        if not over:
            self._rotation.end(reader, clock())
        await self._flush()
        if not whole:
            self._pause = 0.0
            return False
        if not over and not await self._has_ended():
            return False
        if not over and self._rotation.was_large:
            # What stands in a file after the one that was read has to be asked for.
            return False
        if not reader.settled and not self._rotation.follows_on:
            self._chunks.miss(ROTATED)
        return True

    async def _read_on(self, reader: LogReader, *, over: bool) -> bool:
        """Read a log; return whether to its end, as far as the kubelet would tell."""
        source, since = self._source, self._mark.since
        clock = asyncio.get_running_loop().time
        alive_at = clock()
        self._opened_at = datetime.now(UTC)
        pieces = self._streams.kube.follow_log(
            source.namespace, source.pod, source.container, since=since, follow=not over
        )
        async with aclosing(pieces):
            async for piece in pieces:
                if piece or not self._streams.over(source):
                    alive_at = clock()
                if piece:
                    self._take(reader, piece, follows=not over)
                elif not over and self._rotation.is_to_be_opened_anew(reader, clock()):
                    return False
                if not over:
                    self._hear()
                await self._store_what_is_due()
                if not over and clock() - alive_at > STILL_SECONDS:
                    # Either nothing comes from its node any more; or nothing could be stored for so
                    # long that the log may have been rotated twice, and a stream that reads on
                    # passes over the file between in silence.
                    raise UnavailableError("the stream stood still")
        self._add(reader.finish())
        self._mark = reader.mark
        # If the container goes on the line does too, and is heard again with its end.
        if self._listener.at_end() != self._listener.said:
            self._say(self._listener.at_end())
        self._hear()
        return True

    async def _rest(self) -> None:
        """Pause before the next read, until the container ends at most."""
        over = self._streams.over(self._source)
        pause = min(self._pause, self._streams.patience / 4) if over else self._pause
        clock = asyncio.get_running_loop().time
        end = clock() + pause
        while clock() < end and self._streams.over(self._source) == over:  # noqa: ASYNC110
            await asyncio.sleep(min(pause, FIRST_PAUSE))

    def _is_lost(self, error: AgentJobError | ValueError, *, over: bool) -> bool:
        """Whether a log that cannot be read will not be read any more."""
        log.debug("the log of pod %s/%s: %s", self._source.namespace, self._source.pod, error)
        self._pause = min(max(2 * self._pause, FIRST_PAUSE), LARGEST_PAUSE)
        if not isinstance(error, NotFoundError):
            if not self._streams.over(self._source):
                return False
            now = asyncio.get_running_loop().time()
            self._unread_since = self._unread_since or now
            waits = now - self._unread_since < self._streams.patience
            if waits and (isinstance(error, UnavailableError) or not over):
                return False
        self._chunks.miss(LOST)
        return True

    def _take(self, reader: LogReader, piece: bytes, *, follows: bool) -> None:
        self._pause, self._unread_since = FIRST_PAUSE, 0.0
        begun, rotated, before = reader.first, reader.rotated, self._mark
        data = reader.feed(piece)
        if not begun and reader.first and self._is_late(reader.first):
            self._chunks.miss(LATE)
        elsewhere = reader.rotated and not rotated and not self._rotation.follows_on
        if elsewhere and has_room(before.stamp, reader.first):
            self._chunks.miss(ROTATED)
        now = asyncio.get_running_loop().time()
        passed_over = self._rotation.take(len(piece), before, reader.mark, now, datetime.now(UTC))
        if passed_over and follows:
            self._chunks.miss(OVERTAKEN)
        self._add(data)
        self._mark = reader.mark

    def _add(self, data: bytes) -> None:
        self._listen(data)
        self._chunks.add(data, datetime.now(UTC))
        self._streams.hold(len(data))

    def _listen(self, data: bytes) -> None:
        said = self._listener.said
        self._listener.feed(data)
        if self._listener.said != said:
            self._say(self._listener.said)

    def _is_late(self, first: str) -> bool:
        """Whether lines may have been rotated away before the log was first read."""
        started_at = self._source.started_at
        if self._mark.stamp or self._chunks.size or started_at is None:
            return False
        # What was printed since it was opened cannot follow a file that was rotated before.
        return started_at + FIRST_LINE_WITHIN < moment(first) < self._opened_at

    async def _has_ended(self) -> bool:
        """Whether the end of the log was the end of the container: its watch may lag behind."""
        loop = asyncio.get_running_loop()
        end = loop.time() + SETTLE_SECONDS
        while not self._streams.over(self._source):
            if loop.time() > end:
                return False
            await asyncio.sleep(0.1)
        return True

    async def _store_what_is_due(self) -> None:
        if self._streams.crowded or self._chunks.full(datetime.now(UTC)):
            await self._flush()

    async def _flush(self) -> None:
        """Store what waits, however long that takes: the log waits in the kubelet meanwhile."""
        pause = FIRST_PAUSE
        while self._chunks.size > self._chunks.offset:
            try:
                await self._store()
            except StoreError as error:
                log.warning("output of pod %s waits: %s", self._source.pod, error)
                await asyncio.sleep(pause)
                pause = min(2 * pause, LARGEST_PAUSE)

    async def _store(self) -> None:
        chunks = self._chunks
        path = f"{self._source.path}/{chunks.name}"
        await self._streams.put(path, lambda: chunks.content(self._mark))
        self._digest.update(chunks.waiting)
        self._streams.hold(-len(chunks.waiting))
        chunks.clear()
