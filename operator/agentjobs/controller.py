"""kopf's part: it watches, authenticates and handles signals; handlers store and enqueue.

Only `on.event` handlers are used: they write nothing and keep nothing in the objects. A pass never
depends on which event woke it, so a lost, doubled or late one does no harm (R-LEVEL).
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from datetime import UTC, datetime, timedelta
from typing import Any

import kopf
from pydantic import ValidationError
from typing_extensions import override

from agentjobs.api.agentjob import ToolKind
from agentjobs.api.names import GROUP, LABEL_JOB, VERSION
from agentjobs.cache import Cache, Key
from agentjobs.domain.errors import AgentJobError
from agentjobs.kube import (
    AGENTJOBS,
    AGENTTOOLS,
    CLUSTERAGENTTOOLS,
    INPUTREQUESTS,
    JOBS,
    NODES,
    PODS,
    Access,
)
from agentjobs.metrics import Metrics
from agentjobs.passes import Passes
from agentjobs.workqueue import WorkQueue

log = logging.getLogger(__name__)
DELETED = "DELETED"
CREDENTIALS_SECONDS = 300
"""How often kopf asks for the token again; a service account's is rotated by the hour."""
BACKOFFS = (1, 1, 2, 3, *[5] * 60)
"""Seconds between tries of a watch: an API server that is back is noticed within the longest."""
WATCH_TASK = "watcher for "
"""How kopf names the task that watches one resource in one namespace."""
WATCHES_PER_NAMESPACE = 5
WATCHES_CLUSTER_WIDE = 2
CHECK_SECONDS = 1.0
BEGUN_WITHIN_SECONDS = 30.0
WATCHED = (AGENTJOBS, AGENTTOOLS, CLUSTERAGENTTOOLS, INPUTREQUESTS, JOBS, NODES, PODS)
LISTING_SECONDS = 10.0
"""Objects of one list come closer together than this."""


class DeadWatchError(AgentJobError):
    """A watch has ended for good, and nothing else would notice."""


class Feed:
    """Takes in what is seen, from watches and lists alike, and wakes whom it concerns."""

    def __init__(
        self,
        cache: Cache,
        queue: WorkQueue[Key],
        passes: Passes,
        metrics: Metrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cache = cache
        self._queue = queue
        self._passes = passes
        self._metrics = metrics
        self._clock = clock
        self._heard_at = dict.fromkeys((each.plural for each in WATCHED), clock())
        self._listed_at: dict[str, float] = {}
        self._watched: set[str] = set()
        self.lost_place = asyncio.Event()
        """A watch began anew with a list: what was deleted in between was told by nobody."""

    def heard(self, plural: str) -> None:
        """Remember that the API server has told something of a kind, be it that there is none."""
        self._heard_at[plural] = self._clock()

    def measure(self) -> None:
        """Bring the gauge of silence up to date."""
        now = self._clock()
        for plural, at in self._heard_at.items():
            self._metrics.watch_silence.labels(plural).set(now - at)

    def follow(self, kind: str, event: str | None) -> None:
        """Notice a watch that lists again; without a type an event is part of such a list."""
        self.heard(kind)
        if event is not None:
            self._watched.add(kind)
            return
        now = asyncio.get_running_loop().time()
        last = self._listed_at.get(kind)
        if kind in self._watched or (last is not None and now > last + LISTING_SECONDS):
            self.lost_place.set()
        self._watched.discard(kind)
        self._listed_at[kind] = now

    def agentjob(self, body: dict[str, Any], *, gone: bool = False) -> None:
        """Take in an AgentJob."""
        self._metrics.watch_events.labels("AgentJob").inc()
        meta = body["metadata"]
        if gone:
            self.agentjob_gone(Key(meta["namespace"], meta["name"]), meta["uid"])
            return
        key = self._cache.put_agentjob(body)
        self._queue.add(key)
        self._wake(self._cache.dependents(key))
        self._wake(self._cache.next_in_line(self._cache.records[key].tool))

    def look_for_rings(self) -> None:
        """Wake whoever has come to wait for itself by a ring of dependencies (R-DEPENDS)."""
        self._wake(self._cache.find_rings())

    def agentjob_gone(self, key: Key, uid: str) -> None:
        """Forget a deleted AgentJob; who waited for it, or for its slot, is woken."""
        record = self._cache.records.get(key)
        self._cache.drop_agentjob(key, uid)
        self._passes.forget(uid)
        self._wake(self._cache.dependents(key))
        self._wake(self._cache.next_in_line(record.tool if record else None))
        if key not in self._cache.records:
            self._queue.forget(key)

    def job(self, body: dict[str, Any], *, gone: bool = False) -> None:
        """Take in a Job."""
        self._metrics.watch_events.labels("Job").inc()
        key = self._cache.drop_job(body) if gone else self._cache.put_job(body)
        if gone and (key is None or key not in self._cache.records):
            self._cache.forget_pods(body["metadata"]["uid"])
        self._wake([key] if key else [])

    def pod(self, body: dict[str, Any], *, gone: bool = False) -> None:
        """Take in a pod."""
        self._metrics.watch_events.labels("Pod").inc()
        key = self._cache.put_pod(body, gone=gone)
        if gone and (key is None or key not in self._cache.records):
            self._cache.forget_pod(body)
        self._wake([key] if key else [])

    def question(self, body: dict[str, Any], *, gone: bool = False) -> None:
        """Take in a question, or its answer."""
        self._metrics.watch_events.labels("InputRequest").inc()
        if gone:
            key = self._cache.drop_question(body["spec"]["jobUID"], body["metadata"]["uid"])
        else:
            key = self._cache.put_question(body)
        self._wake([key] if key else [])

    def tool(self, body: dict[str, Any], *, gone: bool = False) -> None:
        """Take in a tool. Jobs that it refused have ended; those in line may have more room."""
        self._metrics.watch_events.labels("Tool").inc()
        meta = body["metadata"]
        key = Key(meta.get("namespace", ""), meta["name"], body.get("kind", ToolKind.AGENT_TOOL))
        if gone:
            self._cache.drop_tool(key, meta["uid"])
            self._wake(self._cache.in_line(key))
            return
        try:
            self._queue.add(self._cache.put_tool(body))
        except ValidationError as error:
            log.error("%s %s/%s cannot be read: %s", key.kind, key.namespace, key.name, error)
        # Its limit may be another one, or gone.
        self._wake(self._cache.in_line(key))

    def node(self, body: dict[str, Any], *, gone: bool = False) -> None:
        """Take in a node."""
        self._metrics.watch_events.labels("Node").inc()
        self._wake(self._cache.put_node(body, gone=gone))

    def wake(self, key: Key | None) -> None:
        """Ask for a pass over an AgentJob that a list showed to have changed."""
        self._wake([key] if key else [])

    def _wake(self, keys: Iterable[Key]) -> None:
        for key in keys:
            if key in self._cache.records:
                self._queue.add(key)


def make_registry(feed: Feed, access: Access) -> kopf.OperatorRegistry:
    """Register the handlers, and where kopf gets its credentials from."""
    registry = kopf.OperatorRegistry()

    @kopf.on.login(registry=registry)
    async def login(**_: Any) -> kopf.ConnectionInfo:
        configuration = access.configuration
        return kopf.ConnectionInfo(
            server=access.server,
            ca_path=configuration.ssl_ca_cert,
            insecure=not configuration.verify_ssl,
            token=access.token(),
            certificate_path=configuration.cert_file,
            private_key_path=configuration.key_file,
            expiration=datetime.now(UTC) + timedelta(seconds=CREDENTIALS_SECONDS),
        )

    def take(into: Any) -> Any:
        async def handler(event: Any, resource: kopf.Resource, **_: Any) -> None:
            feed.follow(resource.plural, event["type"])
            into(dict(event["object"]), gone=event["type"] == DELETED)
            if into == feed.agentjob and event["type"] is not None:
                # Nothing else closes or breaks a ring; lists are looked at as a whole.
                feed.look_for_rings()

        return handler

    on = kopf.on.event
    on(GROUP, VERSION, "agentjobs", id="agentjobs", registry=registry)(take(feed.agentjob))
    on(GROUP, VERSION, "agenttools", id="agenttools", registry=registry)(take(feed.tool))
    on(GROUP, VERSION, "clusteragenttools", id="catools", registry=registry)(take(feed.tool))
    on(GROUP, VERSION, "inputrequests", id="questions", registry=registry)(take(feed.question))
    on("batch", "v1", "jobs", id="jobs", registry=registry)(take(feed.job))
    on("", "v1", "nodes", id="nodes", registry=registry)(take(feed.node))
    on("", "v1", "pods", id="pods", registry=registry)(take(feed.pod))
    return registry


def make_settings() -> kopf.OperatorSettings:
    """Make kopf watch and do nothing else: no annotations, finalizers, Events or peering."""
    settings = kopf.OperatorSettings()
    settings.persistence.progress_storage = _NoProgress()
    settings.persistence.diffbase_storage = _NoDiff()
    settings.persistence.consistency_timeout = 0
    settings.posting.enabled = False
    settings.scanning.disabled = True
    settings.peering.standalone = True
    # A worker lives this long after its object's last event; the default would keep one for each.
    settings.queueing.idle_timeout = 0.05
    settings.watching.chunk_size = 500
    settings.watching.server_timeout = 290
    settings.watching.client_timeout = 310
    settings.watching.connect_timeout = 10
    settings.watching.label_selectors["batch", "v1", "jobs"] = LABEL_JOB
    settings.watching.label_selectors["v1", "pods"] = LABEL_JOB
    settings.networking.request_timeout = 30
    settings.networking.connect_timeout = 5
    settings.networking.error_backoffs = BACKOFFS
    return settings


async def watch(
    feed: Feed, access: Access, *, namespaces: tuple[str, ...], stop: asyncio.Event
) -> None:
    """Watch until a signal comes or `stop` is set.

    :raises DeadWatchError: in a group; a watch has ended, the process must be started again.
    """
    watches = WATCHES_PER_NAMESPACE * max(len(namespaces), 1) + WATCHES_CLUSTER_WIDE
    async with asyncio.TaskGroup() as group:
        guard = group.create_task(_guard(watches), name="watch-guard")
        await kopf.operator(
            registry=make_registry(feed, access),
            settings=make_settings(),
            standalone=True,
            clusterwide=not namespaces,
            namespaces=namespaces,
            stop_flag=stop,
        )
        guard.cancel()


async def _guard(watches: int) -> None:
    """Raise when a watch is missing.

    kopf ends a watch for good at answers that it takes for final (403, 404, 410, and 5xx after
    some tries) and lives on without it: what the watch would have told is then never seen.
    """
    loop = asyncio.get_running_loop()
    begun_by = loop.time() + BEGUN_WITHIN_SECONDS
    seen: set[asyncio.Task[Any]] = set()
    while True:
        await asyncio.sleep(CHECK_SECONDS)
        seen |= {task for task in asyncio.all_tasks() if task.get_name().startswith(WATCH_TASK)}
        for task in seen:
            # At the end of the process they are cancelled; by themselves they never end.
            if task.done() and not task.cancelled():
                raise DeadWatchError(f"{task.get_name()} has ended: {task.exception()}")
        if len(seen) < watches and loop.time() > begun_by:
            raise DeadWatchError(f"only {len(seen)} of {watches} watches have begun")


class _NoProgress(kopf.ProgressStorage):
    """Keeps nothing: passes find out anew what is left to do."""

    @override
    def fetch(self, **_: Any) -> None:
        return None

    @override
    def store(self, **_: Any) -> None:
        return

    @override
    def purge(self, **_: Any) -> None:
        return

    @override
    def touch(self, **_: Any) -> None:
        return

    @override
    def clear(self, *, essence: Any) -> Any:
        return essence


class _NoDiff(kopf.DiffBaseStorage):
    """Keeps nothing: decisions compare with the cluster, not with an older spec."""

    @override
    def build(self, **_: Any) -> Any:
        return {}

    @override
    def fetch(self, **_: Any) -> None:
        return None

    @override
    def store(self, **_: Any) -> None:
        return
