"""Scheduler, kubelets and what cleans up after nodes: from a bound pod to its last report."""

from collections.abc import Callable
from functools import partial
from typing import Any

from agentjobs.kube import NODES, PODS
from tests.model.apiserver import ApiServer, Json
from tests.model.clock import Clock, moment
from tests.model.truth import OVER, Container, Truth

NAMESPACE = "search"
NODE_NAMES = ("node-a", "node-b")
EVICTION_SECONDS = 300
GRACE_SECONDS = 30
NOT_FOUND = "The container could not be located when the pod was terminated"
DISRUPTIONS = (
    *("PreemptionByScheduler", "EvictionByEvictionAPI", "TerminationByKubelet"),
    "over its own limit",
)
"""The last one is no disruption: the tool would break its limit again."""

Move = Callable[[], object]


class Kubelets:
    def __init__(self, server: ApiServer, truth: Truth, clock: Clock) -> None:
        self._server = server
        self._truth = truth
        self._clock = clock
        self.cut_off: set[str] = set()
        """Nodes that cannot reach the API server; what runs on them runs on."""
        self.unpullable: dict[str, str] = {}
        """Reasons by pod uid."""
        self.unschedulable: set[str] = set()
        for name in NODE_NAMES:
            server.create(NODES, "", {"metadata": {"name": name}, "spec": {}, "status": {}})
            self._ready(name, ready=True)

    # --- nodes

    def cut(self, name: str) -> None:
        """Lose contact with a node; the node controller notices at once."""
        if name not in self.cut_off and self._server.find(NODES, "", name):
            self.cut_off.add(name)
            self._ready(name, ready=False)

    def mend(self, name: str) -> None:
        self.cut_off.discard(name)
        if self._server.find(NODES, "", name):
            self._ready(name, ready=True)
        else:
            self._server.create(NODES, "", {"metadata": {"name": name}, "spec": {}, "status": {}})
            self._ready(name, ready=True)

    def remove(self, name: str) -> None:
        """Delete the Node object of a node that is cut off."""
        self.cut(name)
        if self._server.find(NODES, "", name):
            self._server.delete(NODES, "", name)

    def _ready(self, name: str, *, ready: bool) -> None:
        condition = {
            "type": "Ready",
            "status": "True" if ready else "Unknown",
            "lastTransitionTime": self._clock.stamp(),
        }
        self._server.patch(NODES, "", name, {"status": {"conditions": [condition]}})

    def _silent_for(self, name: str) -> float:
        node = self._server.find(NODES, "", name)
        if node is None:
            return float("inf")
        ready = node["status"]["conditions"][0]
        if ready["status"] == "True":
            return 0
        return (self._clock.now() - moment(ready["lastTransitionTime"])).total_seconds()

    # --- pods

    def moves(self, pod: Json) -> list[Move]:
        """What could happen next to a pod, unless its tool ends by itself."""
        uid, name = pod["metadata"]["uid"], pod["spec"].get("nodeName")
        container = self._truth.containers.get(uid)
        if container is None:
            return []
        if name is None:
            return self._unbound(pod)
        moves: list[Move] = []
        if self._may_start(pod, container):
            moves.append(partial(self._on, uid, self._start))
        if name in self.cut_off:
            return moves + self._given_up(pod, name)
        return moves + self._within_reach(pod, container)

    def _within_reach(self, pod: Json, container: Container) -> list[Move]:
        """What a kubelet does that hears and is heard."""
        uid, moves = pod["metadata"]["uid"], list[Move]()
        if self._must_go(pod) and container.told_to_go is None:
            moves.append(partial(self._on, uid, self._notice))
        if container.running and self._grace_is_over(container):
            moves.append(partial(self.ends, uid, 137, "Error"))
        if self._reported(pod, container) != pod["status"]:
            moves.append(partial(self._on, uid, self._report))
        if "deletionTimestamp" in pod["metadata"] and pod["status"].get("phase") in OVER:
            moves.append(partial(self._on, uid, self._remove))
        return moves

    def running(self) -> list[str]:
        """uids of the pods whose tool runs."""
        return [uid for uid, each in self._truth.containers.items() if each.running]

    def ends(self, uid: str, code: int, reason: str) -> None:
        """Let a tool end, by itself or because of a signal."""
        if self._truth.containers[uid].running:
            self._truth.ends(uid, code, reason)

    def disrupt(self, uid: str, why: str) -> None:
        """End a pod for the cluster's sake: by scheduler, by drain, or by its own kubelet."""
        pod, container = self._server.by_uid(PODS, uid), self._truth.containers[uid]
        if pod is None or "deletionTimestamp" in pod["metadata"] or container.over:
            return
        node = pod["spec"].get("nodeName")
        if node is None or pod["status"].get("phase") in OVER:
            return
        if why in DISRUPTIONS[:2]:
            pod = self._patch(pod, {"status": {"conditions": [self._disruption(why)]}})
            self._server.delete(PODS, NAMESPACE, pod["metadata"]["name"])
        elif node not in self.cut_off and container.told_to_go is None:
            container.told_to_go, container.grace = self._clock.now(), 1
            container.why = "Evicted"
            container.disruption = why if why in DISRUPTIONS[:3] else ""

    def fails_to_start(self, uid: str) -> None:
        container = self._truth.containers[uid]
        if not container.began and container.told_to_go is None:
            container.never_started = True

    def _on(self, uid: str, move: Callable[[Json, Container], None]) -> None:
        """Make a move on the pod as it is by now, if it is still there."""
        pod = self._server.by_uid(PODS, uid)
        if pod is not None:
            move(pod, self._truth.containers[uid])

    def _unbound(self, pod: Json) -> list[Move]:
        uid = pod["metadata"]["uid"]
        if pod["status"].get("phase") in OVER:
            return []
        if "deletionTimestamp" in pod["metadata"]:
            return [partial(self._on, uid, self._fail_by_collector)]
        if uid in self.unschedulable:
            return [partial(self._on, uid, self._say_unschedulable)]
        ready = [n for n in NODE_NAMES if self._silent_for(n) == 0]
        return [partial(self._bind, uid, ready[0])] if ready else []

    def _bind(self, uid: str, node: str) -> None:
        pod = self._server.by_uid(PODS, uid)
        if pod is not None and "deletionTimestamp" not in pod["metadata"]:
            self._patch(pod, {"spec": {"nodeName": node}})

    def _say_unschedulable(self, pod: Json, _container: Container) -> None:
        condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
        self._patch(pod, {"status": {"conditions": [condition | {"message": "no node fits"}]}})

    def _fail_by_collector(self, pod: Json, _container: Container) -> None:
        """Fail an unscheduled pod that is being deleted, as the pod garbage collector does."""
        self._patch(pod, {"status": {"phase": "Failed"}})

    def _given_up(self, pod: Json, node: str) -> list[Move]:
        uid = pod["metadata"]["uid"]
        if self._server.find(NODES, "", node) is None:
            return [partial(self._on, uid, self._give_up_with_node)]
        deleting = "deletionTimestamp" in pod["metadata"]
        if self._silent_for(node) >= EVICTION_SECONDS and not deleting:
            return [partial(self._on, uid, self._evict)]
        return []

    def _give_up_with_node(self, pod: Json, _container: Container) -> None:
        if pod["status"].get("phase") not in OVER:
            conditions = [self._disruption("DeletionByPodGC")]
            pod = self._patch(pod, {"status": {"phase": "Failed", "conditions": conditions}})
        self._remove(pod, _container)

    def _evict(self, pod: Json, _container: Container) -> None:
        conditions = [self._disruption("DeletionByTaintManager")]
        pod = self._patch(pod, {"status": {"conditions": conditions}})
        self._server.delete(PODS, NAMESPACE, pod["metadata"]["name"])

    def _disruption(self, reason: str) -> Json:
        return {
            "type": "DisruptionTarget",
            "status": "True",
            "reason": reason,
            "message": "",
            "lastTransitionTime": self._clock.stamp(),
        }

    def _may_start(self, pod: Json, container: Container) -> bool:
        """Whether the kubelet, as far as it has taken note, would start the tool."""
        fresh = not container.began and not container.never_started and container.told_to_go is None
        over = pod["status"].get("phase") in OVER
        return fresh and not over and pod["metadata"]["uid"] not in self.unpullable

    def _start(self, pod: Json, container: Container) -> None:
        if self._may_start(pod, container):
            self._truth.starts(pod["metadata"]["uid"])

    def _must_go(self, pod: Json) -> bool:
        return "deletionTimestamp" in pod["metadata"] or self._past_deadline(pod)

    def _past_deadline(self, pod: Json) -> bool:
        limit, begun = pod["spec"].get("activeDeadlineSeconds"), pod["status"].get("startTime")
        if limit is None or begun is None or pod["status"].get("phase") in OVER:
            return False
        return (self._clock.now() - moment(begun)).total_seconds() >= limit

    def _notice(self, pod: Json, container: Container) -> None:
        """The kubelet learns that a pod must go: what runs gets its signal."""
        if container.told_to_go is None and self._must_go(pod):
            container.told_to_go = self._clock.now()
            asked = pod["metadata"].get("deletionGracePeriodSeconds")
            own = pod["spec"].get("terminationGracePeriodSeconds", GRACE_SECONDS)
            container.grace = own if asked is None else asked
            container.why = "DeadlineExceeded" if self._past_deadline(pod) else ""

    def _grace_is_over(self, container: Container) -> bool:
        told = container.told_to_go
        if told is None:
            return False
        return (self._clock.now() - told).total_seconds() >= container.grace

    def _report(self, pod: Json, container: Container) -> None:
        status = self._reported(pod, container)
        if status != pod["status"]:
            self._patch(pod, {"status": status})

    def _reported(self, pod: Json, container: Container) -> Json:
        """The pod's status as its kubelet would write it now."""
        status = dict(pod["status"])
        if status.get("phase") in OVER:
            return status
        status.setdefault("startTime", self._clock.stamp())
        state = _state(container, self.unpullable.get(pod["metadata"]["uid"], ""))
        status["containerStatuses"] = [{"name": "main", "state": state}]
        if container.over:
            done = container.began and container.code == 0 and not container.why
            status["phase"] = "Succeeded" if done else "Failed"
            if container.why:
                status["reason"] = container.why
            if container.disruption:
                status["conditions"] = [self._disruption(container.disruption)]
        elif container.running:
            status["phase"] = "Running"
        return status

    def _remove(self, pod: Json, _container: Container) -> None:
        """The kubelet has cleaned up: nothing but finalizers holds the object any more."""
        self._server.delete(PODS, NAMESPACE, pod["metadata"]["name"], grace=0)

    def _patch(self, pod: Json, change: Json) -> Json:
        return self._server.patch(PODS, NAMESPACE, pod["metadata"]["name"], change)


def _state(container: Container, pull_failure: str) -> Json:
    if container.running:
        return {"running": {"startedAt": _text(container.started_at)}}
    if container.never_started:
        end = {"exitCode": 128, "reason": "StartError", "startedAt": "1970-01-01T00:00:00Z"}
        return {"terminated": end | {"message": "no such file"}}
    if container.began:
        reason = "Completed" if container.code == 0 else container.reason
        times = {
            "startedAt": _text(container.started_at),
            "finishedAt": _text(container.ended_at),
        }
        return {"terminated": {"exitCode": container.code, "reason": reason} | times}
    if container.told_to_go:
        end = {"exitCode": 137, "reason": "ContainerStatusUnknown", "message": NOT_FOUND}
        return {"terminated": end}
    return {"waiting": {"reason": pull_failure or "ContainerCreating", "message": ""}}


def _text(value: Any) -> str:
    return str(value.strftime("%Y-%m-%dT%H:%M:%SZ"))
