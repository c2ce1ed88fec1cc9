"""Nodes, as far as they prove that a pod cannot run any more (R-DEAD)."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any, Self

from agentjobs.domain.pods import NEVER, PodView, parse_time

OUT_OF_SERVICE = "node.kubernetes.io/out-of-service"
"""Taint by which an administrator vouches that a node is off (KEP-2268)."""


@dataclass(frozen=True, slots=True)
class NodeView:
    """One node."""

    name: str
    uid: str = ""
    version: int = 0
    """metadata.resourceVersion: an older word about a node counts for nothing."""
    gone: bool = False
    """It was deleted."""
    not_ready_since: datetime | None = None
    """Since when its kubelet has not been heard of, or says that it is not ready."""
    out_of_service: bool = False

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Self:
        """Parse a core/v1 Node."""
        conditions = {c["type"]: c for c in (body.get("status") or {}).get("conditions") or ()}
        ready = conditions.get("Ready") or {}
        taints = (body.get("spec") or {}).get("taints") or ()
        since = None
        if ready and ready.get("status") != "True":
            since = parse_time(ready.get("lastTransitionTime"))
        return cls(
            name=body["metadata"]["name"],
            uid=body["metadata"]["uid"],
            version=int(body["metadata"].get("resourceVersion") or 0),
            not_ready_since=since,
            out_of_service=any(taint.get("key") == OUT_OF_SERVICE for taint in taints),
        )

    def lost_at(self, patience: timedelta) -> datetime | None:
        """When everything on it is given up for lost; None while its kubelet is well."""
        if self.gone:
            return NEVER
        if self.not_ready_since is None:
            return None
        return self.not_ready_since if self.out_of_service else self.not_ready_since + patience


def lose_pods(
    pods: Iterable[PodView],
    nodes: Mapping[str, NodeView],
    now: datetime,
    patience: timedelta,
) -> tuple[tuple[PodView, ...], datetime | None]:
    """Mark the pods of lost nodes.

    Of a node that was never seen nothing is concluded: Kubernetes deletes its pods by itself.

    :param nodes: what is known of the pods' nodes.
    :return: the pods, and when the next of them would be given up.
    """
    marked, times = [], []
    for pod in pods:
        if pod.dead or pod.node not in nodes:
            marked.append(pod)
            continue
        lost_at = nodes[pod.node].lost_at(patience)
        lost = lost_at is not None and lost_at <= now
        marked.append(replace(pod, lost=True) if lost else pod)
        if lost_at is not None and not lost:
            times.append(lost_at)
    return tuple(marked), min(times, default=None)
