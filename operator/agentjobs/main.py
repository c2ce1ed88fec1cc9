"""Composition root: settings, clients, and the order in which things start and end."""

import argparse
import asyncio
import contextlib
import gc
import logging
import os
import signal
import sys
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

from agentjobs import __version__
from agentjobs.cache import Cache, Key
from agentjobs.catalogue import Catalogue
from agentjobs.controller import Feed, watch
from agentjobs.domain.errors import AgentJobError
from agentjobs.domain.observed import Policy
from agentjobs.health import make_app, serve
from agentjobs.kube import Access, Kube, NoClusterError
from agentjobs.lease import Lease, LostLeadershipError, Terms
from agentjobs.logs import set_up
from agentjobs.metrics import Metrics
from agentjobs.notices import Notices
from agentjobs.passes import Passes
from agentjobs.relist import Relist
from agentjobs.settings import Settings, SettingsError
from agentjobs.workqueue import WorkQueue

log = logging.getLogger(__name__)
GC_THRESHOLDS = (50_000, 50, 1000)
"""Lists of thousands of objects make garbage collection the larger part of a start."""


@dataclass(slots=True)
class Readiness:
    """Why the process is not ready; empty when it is. A follower that can take over is."""

    reason: str = "no contact with the API server yet"
    listed: bool = field(default=False)


def main(argv: list[str] | None = None) -> int:
    """Run a program of the package; return its exit code."""
    parser = argparse.ArgumentParser(prog="agentjobs", description="Programs of agentjobs.")
    parser.add_argument("--version", action="version", version=__version__)
    programs = parser.add_subparsers(dest="program", required=True)
    programs.add_parser("operator", help="run the operator")
    parser.parse_args(argv)
    try:
        settings = Settings.from_environment(os.environ)
        set_up(settings.log_level, settings.log_format)
        return asyncio.run(run_operator(settings, Access.find()))
    except (SettingsError, NoClusterError) as error:
        sys.stderr.write(f"agentjobs: {error}\n")
        return 2


async def run_operator(settings: Settings, access: Access) -> int:
    """Run the operator until a signal comes; 1 if it must be started again."""
    gc.set_threshold(*GC_THRESHOLDS)
    metrics, cache, readiness = Metrics(), Cache(), Readiness()
    async with Kube(access) as kube:
        operator = Operator(settings, access, kube, cache, metrics, readiness)
        app = make_app(metrics, ready=lambda: readiness.reason, refresh=operator.refresh)
        try:
            runner = await serve(app, settings.listen, settings.port)
        except OSError as error:
            sys.stderr.write(
                f"agentjobs: cannot listen on {settings.listen}:{settings.port} ({error}); "
                "set AGENTJOBS_PORT to a free port\n"
            )
            return 2
        try:
            return await operator.run()
        finally:
            await runner.cleanup()


class Operator:
    """The operator's parts, wired."""

    def __init__(
        self,
        settings: Settings,
        access: Access,
        kube: Kube,
        cache: Cache,
        metrics: Metrics,
        readiness: Readiness,
    ) -> None:
        self._settings = settings
        self._access = access
        self._cache = cache
        self._metrics = metrics
        self._readiness = readiness
        self._lease = Lease(
            kube,
            settings.namespace,
            settings.lease_name,
            settings.identity,
            Terms(
                settings.lease_seconds, settings.lease_renew_seconds, settings.lease_retry_seconds
            ),
        )
        policy = Policy(
            default_deadline=settings.default_deadline_seconds,
            default_ttl=settings.default_ttl_seconds,
            max_arguments=settings.max_arguments_bytes,
            grace_ceiling=settings.grace_ceiling_seconds,
            linger=settings.linger_seconds,
        )
        fence = self._lease.fence
        self._notices = Notices(kube, metrics, settings.identity)
        self._passes = Passes(kube, cache, self._notices, metrics, policy, fence=fence)
        self._catalogue = Catalogue(kube, cache, fence=fence)
        self._queue: WorkQueue[Key] = WorkQueue(self._handle, settings.workers)
        self._feed = Feed(cache, self._queue, self._passes, metrics)
        self._relist = Relist(kube, cache, self._feed, metrics, settings.watch_namespaces)

    async def run(self) -> int:
        """Wait for leadership, then lead until a signal comes or it is lost."""
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        self._readiness.reason = ""
        if not await _unless(stop, self._lease.acquire()):
            return 0
        code = 0
        try:
            await self._lead(stop)
        except* LostLeadershipError as lost:
            log.error("%s; starting again as a follower", lost.exceptions[0])
            code = 1
        except* AgentJobError as error:
            log.error("the operator cannot go on and starts again: %s", error.exceptions[0])
            code = 1
        finally:
            await self._lease.release()
        return code

    def refresh(self) -> None:
        """Bring the gauges up to date."""
        finished = sum(record.finished for record in self._cache.records.values())
        self._metrics.jobs.labels("finished").set(finished)
        self._metrics.jobs.labels("live").set(len(self._cache.records) - finished)
        self._metrics.queue.set(len(self._queue))
        self._metrics.leader.set(self._lease.held)

    async def _lead(self, stop: asyncio.Event) -> None:
        self._readiness.reason = "the first list is not complete yet"
        async with asyncio.TaskGroup() as group:
            keeper = group.create_task(self._lease.keep(), name="lease")
            await self._list_first()
            self._readiness.reason = ""
            log.info("%d AgentJobs are known; passes begin", len(self._cache.records))
            others = [
                keeper,
                group.create_task(self._queue.run(), name="passes"),
                group.create_task(self._notices.run(), name="notices"),
                group.create_task(self._relist_now_and_then(), name="relist"),
            ]
            await watch(
                self._feed, self._access, namespaces=self._settings.watch_namespaces, stop=stop
            )
            for task in others:
                task.cancel()
        log.info("ended")

    async def _list_first(self) -> None:
        """Know everything before anything is decided."""
        while True:
            try:
                await self._relist.run()
            except AgentJobError as error:
                log.warning("the first list failed and is tried again: %s", error)
                await asyncio.sleep(1)
            else:
                return

    async def _relist_now_and_then(self) -> None:
        while True:
            await asyncio.sleep(self._settings.relist_seconds)
            try:
                await self._relist.run()
            except AgentJobError as error:
                log.warning("the periodic list failed: %s", error)

    async def _handle(self, key: Key) -> float | None:
        return await (self._passes if key.kind == "AgentJob" else self._catalogue).run(key)


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


if __name__ == "__main__":
    sys.exit(main())
