"""Consistent lists: when a leadership begins, and now and then to repair what watches missed."""

import logging
from collections.abc import Callable
from typing import Any

from agentjobs.api.agentjob import ToolKind
from agentjobs.api.names import LABEL_JOB
from agentjobs.cache import Cache
from agentjobs.controller import Feed
from agentjobs.kube import (
    AGENTJOBS,
    AGENTTOOLS,
    CLUSTERAGENTTOOLS,
    INPUTREQUESTS,
    JOBS,
    NODES,
    PODS,
    Kube,
    Resource,
)
from agentjobs.metrics import Metrics

log = logging.getLogger(__name__)
OURS = {"labelSelector": LABEL_JOB}


class Relist:
    """Brings the cache in step with the API server; the feed wakes whom a difference concerns."""

    def __init__(
        self,
        kube: Kube,
        cache: Cache,
        feed: Feed,
        metrics: Metrics,
        namespaces: tuple[str, ...] = (),
    ) -> None:
        self._kube = kube
        self._cache = cache
        self._feed = feed
        self._metrics = metrics
        self._namespaces = namespaces or ("",)

    async def run(self) -> None:
        """List everything once.

        Children come before their AgentJobs, so that no pass misses a Job that is there.

        :raises AgentJobError: a list failed; what was taken in so far is right.
        """
        await self._nodes()
        await self._list(CLUSTERAGENTTOOLS, self._feed.tool, ToolKind.CLUSTER_AGENT_TOOL)
        await self._list(AGENTTOOLS, self._feed.tool, ToolKind.AGENT_TOOL)
        await self._pods()
        await self._jobs()
        await self._questions()
        await self._agentjobs()

    async def _nodes(self) -> None:
        seen, version = await self._list(NODES, self._feed.node)
        for node in list(self._cache.nodes.values()):
            if node.uid not in seen and not node.gone and node.version <= version:
                self._missed("Node", node.name)
                meta = {"name": node.name, "uid": node.uid, "resourceVersion": str(version)}
                self._feed.node({"metadata": meta}, gone=True)

    async def _pods(self) -> None:
        seen, version = await self._list(PODS, self._feed.pod)
        for job_uid, pod, at in self._cache.live_pods():
            if pod.uid not in seen and at <= version:
                self._missed("Pod", pod.name)
                self._feed.wake(self._cache.lose_pod(job_uid, pod.uid))

    async def _jobs(self) -> None:
        seen, version = await self._list(JOBS, self._feed.job)
        for name, job, at in self._cache.job_keys():
            if job.uid not in seen and at <= version:
                self._missed("Job", job.name)
                self._feed.wake(self._cache.lose_job(name, job.uid))

    async def _questions(self) -> None:
        seen, version = await self._list(INPUTREQUESTS, self._feed.question)
        for question in self._cache.all_questions():
            if question.uid not in seen and int(question.version) <= version:
                self._missed("InputRequest", question.name)
                self._feed.wake(self._cache.drop_question(question.owner_uid, question.uid))

    async def _agentjobs(self) -> None:
        seen, version = await self._list(AGENTJOBS, self._feed.agentjob)
        for key, uid, at in self._cache.agentjob_keys():
            if uid not in seen and at <= version:
                self._missed("AgentJob", key.name)
                self._feed.agentjob_gone(key, uid)
        self._feed.look_for_rings()

    async def _list(
        self, resource: Resource, take: Callable[[dict[str, Any]], None], kind: str = ""
    ) -> tuple[set[str], int]:
        """List a resource into the cache; return the uids seen and the version of the list."""
        seen: set[str] = set()
        version = 0
        params = OURS if resource in {JOBS, PODS} else None
        for namespace in self._namespaces if resource.namespaced else ("",):
            async for page in self._kube.pages(resource, namespace, params):
                self._feed.heard(resource.plural)
                listed = int(page["metadata"]["resourceVersion"])
                version = min(version, listed) if version else listed
                for body in page["items"]:
                    seen.add(body["metadata"]["uid"])
                    take({"kind": kind, **body} if kind else body)
        return seen, version

    def _missed(self, kind: str, name: str) -> None:
        self._metrics.repaired.labels(kind).inc()
        log.info("%s %s was deleted while nobody watched", kind, name)
