"""Follows what tools print and keeps it, one stream for each running tool container (R-OUTPUT).

Everything needed to go on after a crash stands in the store: the head of the last chunk of a stream
says where it ends in the container's log.
"""

import asyncio
import hashlib
import logging
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Generic, TypeVar

from agentjobs.domain.errors import AgentJobError
from agentjobs.domain.output import (
    END,
    LOST,
    ROTATED,
    Archived,
    Chunks,
    Gap,
    Head,
    LogReader,
    Mark,
    NoLogError,
    Whole,
    parse_stream_name,
    total,
)
from agentjobs.kube import Kube, KubeError, NotFoundError, UnavailableError
from agentjobs.metrics import Metrics
from agentjobs.store import OutputStore, StoreError

log = logging.getLogger(__name__)
K = TypeVar("K", bound=Hashable)
AT_ONCE = 500
"""Streams that are followed at the same time; beyond it output is read at the end."""
FIRST_PAUSE = 0.5
LARGEST_PAUSE = 15.0
SETTLE_SECONDS = 5.0
"""How long a log that ended is waited for to be the end of its container."""


@dataclass(frozen=True, slots=True)
class Source:
    """A container whose output is kept."""

    namespace: str
    pod: str
    pod_uid: str
    job_uid: str
    """Of the batch/v1 Job."""
    container: str
    path: str
    """Of its stream in the store: `<uid of the AgentJob>/<stream>`."""


class Streams(Generic[K]):
    """Follows sources, each on a task of its own."""

    def __init__(
        self,
        kube: Kube,
        store: OutputStore,
        metrics: Metrics,
        *,
        tell: Callable[[K], None],
        over: Callable[[Source], bool],
        patience: float,
    ) -> None:
        """Prepare.

        :param tell: called with the key of a job whose output is all that can be had.
        :param over: whether a container has ended.
        :param patience: seconds for which a log that cannot be read is asked for after the end.
        """
        self._kube = kube
        self._store = store
        self._metrics = metrics
        self._tell = tell
        self._over = over
        self._patience = patience
        self._tasks: dict[str, asyncio.Task[Whole]] = {}
        self._archives: dict[str, asyncio.Task[None]] = {}
        self._archived: dict[str, Archived] = {}

    def follow(self, source: Source) -> None:
        """Follow a source, unless that is being done, or too many are followed already."""
        followed = sum(not task.done() for task in self._tasks.values())
        if source.pod_uid not in self._tasks and followed < AT_ONCE:
            self._begin(source)

    def archive(self, key: K, job_uid: str, sources: Sequence[Source]) -> None:
        """Put together all output of a job that is over, unless that is being done."""
        if job_uid in self._archives or job_uid in self._archived:
            return
        task = asyncio.create_task(self._archive(key, job_uid, sources), name=f"archive-{job_uid}")
        self._archives[job_uid] = task

    def archived(self, job_uid: str) -> Archived | None:
        """What was kept of the output of a job, once that is all."""
        return self._archived.get(job_uid)

    def settle(self, job_uid: str) -> None:
        """Forget what was written into the status."""
        self._archived.pop(job_uid, None)

    async def delete(self, job_uid: str) -> None:
        """Delete what was kept of a job's output; nothing more is kept of it.

        :raises StoreError: try again later.
        """
        archive = self._archives.pop(job_uid, None)
        if archive:
            archive.cancel()
        self._drop(job_uid)
        self._archived.pop(job_uid, None)
        await self._store.delete(job_uid)

    async def close(self) -> None:
        """End all streams; what was stored is gone on with by the next leader."""
        tasks = [*self._archives.values(), *self._tasks.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _begin(self, source: Source) -> None:
        task = asyncio.create_task(self._keep(source), name=f"output-{source.path}")
        self._tasks[source.pod_uid] = task
        task.add_done_callback(lambda _: self._metrics.streams.dec())
        self._metrics.streams.inc()

    async def _keep(self, source: Source) -> Whole:
        """Follow a source to its end, whatever breaks on the way."""
        pause = FIRST_PAUSE
        while True:
            try:
                return await _Stream(self, source).run()
            except (AgentJobError, ValueError) as error:
                log.warning("output of pod %s/%s: %s", source.namespace, source.pod, error)
            except Exception:
                log.exception("the output of pod %s/%s broke", source.namespace, source.pod)
            await asyncio.sleep(pause)
            pause = min(2 * pause, LARGEST_PAUSE)

    async def _archive(self, key: K, job_uid: str, sources: Sequence[Source]) -> None:
        try:
            for source in sources:
                if source.pod_uid not in self._tasks:
                    self._begin(source)
                await asyncio.shield(self._tasks[source.pod_uid])
            self._archived[job_uid] = await self._close_all(job_uid)
            self._drop(job_uid)
        except AgentJobError as error:
            log.warning("output of AgentJob %s is not put together yet: %s", job_uid, error)
            await asyncio.sleep(LARGEST_PAUSE)
        finally:
            self._archives.pop(job_uid, None)
        self._tell(key)

    def _drop(self, job_uid: str) -> None:
        """Forget the streams of a job, and end those that go on."""
        for uid, task in list(self._tasks.items()):
            if task.get_name().startswith(f"output-{job_uid}/"):
                task.cancel()
                del self._tasks[uid]

    async def _close_all(self, job_uid: str) -> Archived:
        """All streams of a job; those that nobody can go on with end with a gap."""
        names = await self._store.names(job_uid)
        wholes = []
        for stream in sorted({name.partition("/")[0] for name in names}):
            if parse_stream_name(stream) is None:
                continue
            path = f"{job_uid}/{stream}"
            if f"{stream}/{END}" in names:
                wholes.append(Whole.decode(await self._store.get(f"{path}/{END}")))
            elif not any(task.get_name() == f"output-{path}" for task in self._tasks.values()):
                wholes.append(await self._close(path))
        return total(wholes)

    async def _close(self, path: str) -> Whole:
        """End a stream whose pod is gone."""
        digest, size = hashlib.sha256(), 0
        gaps: tuple[Gap, ...] = ()
        for name in await self._store.names(path):
            head, data = Head.decode(await self._store.get(f"{path}/{name}"))
            digest.update(data)
            size, gaps = int(name) + len(data), head.gaps
        whole = Whole(size, digest.hexdigest(), (*gaps, Gap(size, LOST)))
        await self._store.put(f"{path}/{END}", whole.encode())
        return whole


class _Stream:
    """One life of one stream: from what the store has of it to its end."""

    def __init__(self, streams: Streams[Any], source: Source) -> None:
        self._kube = streams._kube  # noqa: SLF001 - a part of it
        self._store = streams._store  # noqa: SLF001
        self._over = streams._over  # noqa: SLF001
        self._source = source
        self._chunks = Chunks()
        self._mark = Mark()
        self._digest = hashlib.sha256()
        self._patience = streams._patience  # noqa: SLF001
        self._asked_since = 0.0

    async def run(self) -> Whole:
        """Follow until the container has ended and all that it printed is stored."""
        stored = await self._store.names(self._source.path)
        if END in stored:
            return Whole.decode(await self._store.get(f"{self._source.path}/{END}"))
        await self._take_up(list(stored))
        while not await self._read_to_the_end():  # noqa: ASYNC110 - it waits in there too
            await asyncio.sleep(FIRST_PAUSE)
        await self._flush()
        whole = Whole(self._chunks.size, self._digest.hexdigest(), tuple(self._chunks.gaps))
        await self._store.put(f"{self._source.path}/{END}", whole.encode())
        return whole

    async def _take_up(self, stored: list[str]) -> None:
        """Go on where the last chunk ends. The digest is made anew from what is stored."""
        for name in stored:
            head, data = Head.decode(await self._store.get(f"{self._source.path}/{name}"))
            self._digest.update(data)
            self._chunks.offset = int(name) + len(data)
            self._chunks.gaps = list(head.gaps)
            self._mark = head.mark

    async def _read_to_the_end(self) -> bool:
        """Read the log as far as it goes; return whether that is its end."""
        reader = LogReader(self._mark)
        source = self._source
        over = self._over(self._source)
        broken = False
        try:
            async for piece in self._kube.follow_log(
                source.namespace,
                source.pod,
                source.container,
                since=self._mark.since,
                follow=not over,
            ):
                self._take(reader, piece)
                await self._store_what_is_full()
        except UnavailableError as error:
            log.debug("the log of pod %s/%s broke: %s", source.namespace, source.pod, error)
            broken = True
            if over and self._given_up():
                self._chunks.miss(LOST)
                return True
        except (KubeError, NoLogError) as error:
            if not isinstance(error, NotFoundError) and not self._over(self._source):
                raise UnavailableError(f"no log yet: {error}") from error
            # Pod and log are gone.
            self._chunks.miss(LOST)
            return True
        await self._flush()
        return not broken and (over or await self._settled())

    def _given_up(self) -> bool:
        """Whether the log of a container that has ended was asked for long enough."""
        now = asyncio.get_running_loop().time()
        self._asked_since = self._asked_since or now
        return now - self._asked_since > self._patience

    def _take(self, reader: LogReader, piece: bytes) -> None:
        if piece:
            was = reader.rotated
            data = reader.feed(piece)
            if reader.rotated and not was:
                self._chunks.miss(ROTATED)
            self._chunks.add(data, datetime.now(UTC))
            self._mark = reader.mark

    async def _settled(self) -> bool:
        """Whether the end of the log was the end of the container: its watch may lag behind."""
        loop = asyncio.get_running_loop()
        end = loop.time() + SETTLE_SECONDS
        while not self._over(self._source) and loop.time() < end:  # noqa: ASYNC110 - seconds
            await asyncio.sleep(0.1)
        return self._over(self._source)

    async def _store_what_is_full(self) -> None:
        if self._chunks.full(datetime.now(UTC)):
            await self._flush()

    async def _flush(self) -> None:
        chunk = self._chunks.cut(self._mark)
        if chunk is None:
            return
        pause = FIRST_PAUSE
        while True:
            try:
                await self._store.put(f"{self._source.path}/{chunk.name}", chunk.encode())
            except StoreError as error:
                # The log waits in the kubelet meanwhile; nothing more is read into memory.
                log.warning("output of pod %s waits: %s", self._source.pod, error)
                await asyncio.sleep(pause)
                pause = min(2 * pause, LARGEST_PAUSE)
            else:
                self._digest.update(chunk.data)
                return
