"""Kubernetes Events about AgentJobs: sent beside the passes, once each, never waited for."""

import asyncio
import hashlib
import logging
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from agentjobs.api.agentjob import AgentJob
from agentjobs.api.base import format_time
from agentjobs.api.names import API_VERSION
from agentjobs.domain.errors import AgentJobError
from agentjobs.domain.plan import Note
from agentjobs.domain.texts import cut, one_line
from agentjobs.kube import EVENTS, ConflictError, Kube
from agentjobs.metrics import Metrics

log = logging.getLogger(__name__)
BACKLOG = 2000
SENDERS = 4
MESSAGE_CHARACTERS = 1024
COMPONENT = "agentjobs-operator"


class Notices:
    """A bounded backlog of Events. Losing one is better than holding up a pass."""

    def __init__(
        self, kube: Kube, metrics: Metrics, identity: str, *, fence: Callable[[], None]
    ) -> None:
        """Prepare.

        :param fence: raises when this process may not write any more (R-CLAIM).
        """
        self._kube = kube
        self._fence = fence
        self._metrics = metrics
        self._identity = identity
        self._backlog: asyncio.Queue[tuple[str, dict[str, Any]]] = asyncio.Queue(BACKLOG)

    def post(self, job: AgentJob, note: Note) -> None:
        """Queue an Event."""
        body = event_body(job, note, self._identity, datetime.now(UTC))
        try:
            self._backlog.put_nowait((job.metadata.namespace, body))
        except asyncio.QueueFull:
            self._metrics.events_dropped.inc()

    async def run(self) -> None:
        """Send until cancelled."""
        async with asyncio.TaskGroup() as group:
            for _ in range(SENDERS):
                group.create_task(self._send())

    async def _send(self) -> None:
        while True:
            namespace, body = await self._backlog.get()
            self._fence()
            try:
                await self._kube.create(EVENTS, namespace, body)
            except ConflictError:
                # The same Event was sent before this process took over.
                continue
            except AgentJobError as error:
                self._metrics.events_dropped.inc()
                log.debug("an Event was not sent: %s", error)


def event_body(job: AgentJob, note: Note, identity: str, now: datetime) -> dict[str, Any]:
    """Build a core/v1 Event. Its name follows from what it says, so that it exists only once."""
    meta = job.metadata
    text = f"{meta.uid}/{note.reason}/{note.message}"
    digest = hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:16]
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": f"{meta.name}.{digest}", "namespace": meta.namespace},
        "involvedObject": {
            "apiVersion": API_VERSION,
            "kind": "AgentJob",
            "name": meta.name,
            "namespace": meta.namespace,
            "uid": meta.uid,
            "resourceVersion": meta.resource_version,
        },
        "reason": note.reason.value,
        "message": cut(one_line(note.message), MESSAGE_CHARACTERS),
        "type": "Warning" if note.warning else "Normal",
        "count": 1,
        "firstTimestamp": format_time(now),
        "lastTimestamp": format_time(now),
        "source": {"component": COMPONENT},
        "reportingComponent": COMPONENT,
        "reportingInstance": identity,
    }
