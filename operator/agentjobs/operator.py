"""The operator: one process that leads at a time, its parts and the order of their lives."""

import asyncio
import contextlib
import logging
import signal
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from agentjobs.cache import Cache, Key
from agentjobs.catalogue import Catalogue
from agentjobs.controller import Feed, watch
from agentjobs.dispatch import Dispatcher
from agentjobs.domain.destinations import Destinations
from agentjobs.domain.errors import AgentJobError
from agentjobs.domain.observed import Policy
from agentjobs.kube import Access, Kube
from agentjobs.lease import Lease, LostLeadershipError, Terms
from agentjobs.lookups import LookUps
from agentjobs.metrics import Metrics
from agentjobs.notices import Notices
from agentjobs.openfiles import allow_files
from agentjobs.passes import Passes
from agentjobs.relist import Relist
from agentjobs.settings import Settings
from agentjobs.signing import Signer, load_signer
from agentjobs.store import OutputStore
from agentjobs.streams import Source, Streams
from agentjobs.workqueue import WorkQueue, set_within

log = logging.getLogger(__name__)
RETRY_SECONDS = 1.0
SIGNING_KEYS_SECONDS = 60.0
"""How often the signing keys are read, since somebody may have added or retired one."""
FILES = 8192
"""That many sockets are open when tries to deliver and streams of output have all their places."""
LOOKUPS = 64
"""Names of receivers that are looked up at once: a name server that does not answer takes a thread
for each, for many seconds."""


class Operator:
    """Waits for leadership, then leads until a signal comes or leadership is lost."""

    def __init__(
        self,
        settings: Settings,
        access: Access,
        kube: Kube,
        metrics: Metrics,
        store: OutputStore | None,
    ) -> None:
        self._settings = settings
        self._store = store
        self._access = access
        self._kube = kube
        self._metrics = metrics
        self._cache = Cache()
        self._lease = Lease(
            kube,
            settings.namespace,
            settings.lease_name,
            settings.identity,
            Terms(
                settings.lease_seconds, settings.lease_renew_seconds, settings.lease_retry_seconds
            ),
        )
        self._catalogue = Catalogue(kube, self._cache, fence=self._lease.fence)
        self._queue: WorkQueue[Key] = WorkQueue(self._handle, settings.workers)
        self._passes: Passes | None = None
        self._dispatcher: Dispatcher[Key] | None = None
        self._feed: Feed | None = None
        self._unready = "no contact with the API server yet"

    def not_ready(self) -> str:
        """Why the process is not ready; empty when it is. A follower that can take over is."""
        return self._unready

    def refresh(self) -> None:
        """Bring the gauges up to date."""
        records = self._cache.records.values()
        finished = sum(record.finished for record in records)
        self._metrics.jobs.labels("finished").set(finished)
        self._metrics.jobs.labels("live").set(len(records) - finished)
        self._metrics.queue.set(len(self._queue))
        self._metrics.leader.set(self._lease.held)
        if self._dispatcher:
            self._dispatcher.measure()
        if self._feed:
            self._feed.measure()

    async def run(self, signer: Signer, destinations: Destinations) -> int:
        """Run until a signal comes (0), or until it must be started again (1)."""
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(LOOKUPS))
        allow_files(FILES)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        self._unready = ""
        if not await _unless(stop, self._lease.acquire()):
            return 0
        dispatcher: Dispatcher[Key] = Dispatcher(
            signer, destinations, self._queue.add, self._metrics
        )
        self._dispatcher = dispatcher
        streams = self._make_streams()
        code = 0
        try:
            await self._lead(stop, dispatcher, destinations, streams)
        except* LostLeadershipError as lost:
            log.error("%s; starting again as a follower", lost.exceptions[0])
            code = 1
        except* AgentJobError as error:
            log.error("the operator cannot go on and starts again: %s", error.exceptions[0])
            code = 1
        finally:
            # kopf's watches do not let themselves be closed, and asyncio tells so with tracebacks.
            logging.getLogger("asyncio").setLevel(logging.CRITICAL)
            await dispatcher.close()
            if streams:
                await streams.close()
            await self._lease.release()
        return code

    async def _lead(
        self,
        stop: asyncio.Event,
        dispatcher: Dispatcher[Key],
        destinations: Destinations,
        streams: Streams[Key] | None,
    ) -> None:
        self._unready = "the first list is not complete yet"
        notices = Notices(
            self._kube, self._metrics, self._settings.identity, fence=self._lease.fence
        )
        self._passes = Passes(
            self._kube,
            self._cache,
            notices,
            dispatcher,
            self._metrics,
            self._policy(destinations),
            fence=self._lease.fence,
            streams=streams,
            lookups=LookUps(),
        )
        namespaces = self._settings.watch_namespaces
        feed = Feed(self._cache, self._queue, self._passes, self._metrics)
        self._feed = feed
        relist = Relist(self._kube, self._cache, feed, self._metrics, namespaces)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._lease.keep(), name="lease")]
            # They may have changed while this process was no leader.
            await self._renew_keys(dispatcher)
            await self._list_first(relist)
            self._unready = ""
            log.info("%d AgentJobs are known; passes begin", len(self._cache.records))
            tasks += [
                group.create_task(self._queue.run(), name="passes"),
                group.create_task(notices.run(), name="notices"),
                group.create_task(self._keep_keys(dispatcher), name="signing-keys"),
                group.create_task(self._relist_when_due(relist, feed.lost_place), name="relist"),
            ]
            await watch(feed, self._access, namespaces=namespaces, stop=stop)
            for task in tasks:
                task.cancel()
        log.info("ended")

    async def _keep_keys(self, dispatcher: Dispatcher[Key]) -> None:
        while True:
            await asyncio.sleep(SIGNING_KEYS_SECONDS)
            await self._renew_keys(dispatcher)

    async def _renew_keys(self, dispatcher: Dispatcher[Key]) -> None:
        """Sign with the keys that are there now; what cannot be read changes nothing."""
        try:
            dispatcher.signer = await load_signer(
                self._kube, self._settings.namespace, dispatcher.signer
            )
        except (AgentJobError, ValueError) as error:
            log.error("the signing keys cannot be read and stay as they were: %s", error)

    def _make_streams(self) -> Streams[Key] | None:
        if self._store is None:
            return None
        return Streams(
            self._kube,
            self._store,
            self._metrics,
            tell=self._queue.add,
            over=self._is_over,
            fence=self._lease.fence,
            patience=self._settings.log_patience_seconds,
            store_patience=self._settings.store_patience_seconds,
        )

    def _is_over(self, source: Source) -> bool:
        """Whether a container has ended for good, as far as the watch of its pod has shown."""
        pods = self._cache.pods(source.job_uid)
        return not any(each.uid == source.pod_uid and not each.dead for each in pods)

    def _policy(self, destinations: Destinations) -> Policy:
        return Policy(
            default_deadline=self._settings.default_deadline_seconds,
            default_ttl=self._settings.default_ttl_seconds,
            max_arguments=self._settings.max_arguments_bytes,
            grace_ceiling=self._settings.grace_ceiling_seconds,
            node_lost=self._settings.node_lost_seconds,
            linger=self._settings.linger_seconds,
            store_patience=self._settings.store_patience_seconds,
            pod_retention=self._settings.pod_retention_seconds,
            destinations=destinations,
            gateway_url=self._settings.gateway_url,
        )

    async def _list_first(self, relist: Relist) -> None:
        """Know everything before anything is decided."""
        while True:
            try:
                await relist.run()
            except AgentJobError as error:
                log.warning("the first list failed and is tried again: %s", error)
                await asyncio.sleep(RETRY_SECONDS)
            else:
                return

    async def _relist_when_due(self, relist: Relist, lost_place: asyncio.Event) -> None:
        """List now and then, and soon after a watch had to begin anew."""
        while True:
            await set_within(lost_place, self._settings.relist_seconds)
            # Watches mostly lose their place together.
            await asyncio.sleep(RETRY_SECONDS)
            lost_place.clear()
            try:
                await relist.run()
            except AgentJobError as error:
                log.warning("the list that repairs failed and is tried again: %s", error)
                lost_place.set()

    async def _handle(self, key: Key) -> float | None:
        if key.kind != "AgentJob":
            return await self._catalogue.run(key)
        return await self._passes.run(key) if self._passes else None


async def _unless(stop: asyncio.Event, work: Coroutine[Any, Any, None]) -> bool:
    """Do some work unless a signal comes first; return whether it was done."""
    task, stopped = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
    await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if task.done():
        task.result()
        return True
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    return False
