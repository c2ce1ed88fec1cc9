"""A cluster in memory, move by move: Job controller, garbage collector, scheduler, kubelets, users.

Every controller's work is cut into moves that may come in any order and as late as one likes.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from agentjobs.api.names import API_VERSION, LABEL_JOB, LABEL_QUEUE
from agentjobs.kube import AGENTJOBS, JOBS, NODES, PODS, NotFoundError
from tests.model.apiserver import ApiServer, Json
from tests.model.clock import Clock, moment
from tests.model.truth import Container, Truth

NAMESPACE = "search"
NODE_NAMES = ("node-a", "node-b")
TRACKING = "batch.kubernetes.io/job-tracking"
OVER = {"Succeeded", "Failed"}
EVICTION_SECONDS = 300
GRACE_SECONDS = 30

Move = Callable[[], object]


class Cluster:
    def __init__(self) -> None:
        self.clock = Clock()
        self.server = ApiServer(self.clock)
        self.truth = Truth(self.server, self.clock)
        self.kubelets = Kubelets(self.server, self.truth, self.clock)
        self.jobs = JobController(self.server, self.clock)

    def moves(self) -> list[Move]:
        """What controllers and kubelets could do next, exits of tools left out."""
        moves: list[Move] = [partial(self.jobs.sync, b) for b in self.server.all(JOBS)]
        moves += [partial(self.jobs.release, b) for b in self._ownerless_pods()]
        moves += [partial(self._collect, r, b) for r, b in self.server.orphans()]
        for pod in self.server.all(PODS):
            moves += self.kubelets.moves(pod)
        return moves

    def run(self, rounds: int = 6) -> None:
        """Let everything but tools go on until nothing changes."""
        for _ in range(rounds):
            before = len(self.server.history)
            for move in self.moves():
                move()
            if len(self.server.history) == before:
                return

    def _ownerless_pods(self) -> Iterator[Json]:
        alive = {body["metadata"]["uid"] for body in self.server.all(JOBS)}
        for pod in self.server.all(PODS):
            if pod["metadata"]["ownerReferences"][0]["uid"] not in alive:
                yield pod

    def _collect(self, resource: Any, body: Json) -> None:
        meta = body["metadata"]
        try:
            self.server.delete(resource, meta["namespace"], meta["name"], meta["uid"])
        except NotFoundError:
            return

    # --- users

    def create(self, name: str, **spec: Any) -> None:
        containers = [{"name": "main", "image": "images.example.net/base:1"}]
        template = {"spec": {"template": {"spec": {"containers": containers}}}}
        body = {
            "apiVersion": API_VERSION,
            "kind": "AgentJob",
            "metadata": {"name": name},
            "spec": {"template": template} | spec,
        }
        self.server.create(AGENTJOBS, NAMESPACE, body)

    def stop(self, name: str) -> None:
        self.server.patch(AGENTJOBS, NAMESPACE, name, {"spec": {"stop": {"reason": "enough"}}})

    def lower_deadline(self, name: str, seconds: int) -> None:
        spec = self.server.get(AGENTJOBS, NAMESPACE, name)["spec"]
        if seconds < spec.get("deadlineSeconds", 10**9):
            patch = {"spec": {"deadlineSeconds": seconds}}
            self.server.patch(AGENTJOBS, NAMESPACE, name, patch)

    def admit(self, name: str) -> None:
        """Resume a queued Job, as Kueue does."""
        self.server.patch(JOBS, NAMESPACE, name, {"spec": {"suspend": False}})


class JobController:
    """kube-controller-manager's part for Jobs that make one pod."""

    def __init__(self, server: ApiServer, clock: Clock) -> None:
        self._server = server
        self._clock = clock
        self.forgiving = False
        """Pods that a suspension has ended do not count as failures; versions differ on that."""

    def sync(self, job: Json) -> None:
        """One pass over a Job, by what is stored now."""
        found = self._server.by_uid(JOBS, job["metadata"]["uid"])
        if found is None:
            return
        name, status = found["metadata"]["name"], dict(found["status"])
        pods = self._pods_of(found)
        if _condition(status, "Complete") or _condition(status, "Failed"):
            for pod in pods:
                self.release(pod)
            return
        self._count(pods, status)
        self._go_on(found, pods, status)
        if status != found["status"]:
            self._server.patch(JOBS, NAMESPACE, name, {"status": _nulled(found, status)}, "status")
        for pod in pods:
            if pod["status"].get("phase") in OVER:
                self.release(pod)

    def release(self, pod: Json) -> None:
        """Take the tracking finalizer off a pod that was counted, or that is nobody's."""
        meta = pod["metadata"]
        found = self._server.by_uid(PODS, meta["uid"])
        if found is not None and TRACKING in (found["metadata"].get("finalizers") or ()):
            patch = {"metadata": {"finalizers": None}}
            self._server.patch(PODS, meta["namespace"], meta["name"], patch)

    def _pods_of(self, job: Json) -> list[Json]:
        uid = job["metadata"]["uid"]
        owned = [
            pod
            for pod in self._server.all(PODS)
            if pod["metadata"]["ownerReferences"][0]["uid"] == uid
        ]
        return sorted(owned, key=lambda pod: str(pod["metadata"]["uid"]))

    @staticmethod
    def _count(pods: list[Json], status: Json) -> None:
        for field, phase in (("succeeded", "Succeeded"), ("failed", "Failed")):
            fresh = [
                pod
                for pod in pods
                if pod["status"].get("phase") == phase
                and TRACKING in (pod["metadata"].get("finalizers") or ())
            ]
            status[field] = status.get(field, 0) + len(fresh)

    def _go_on(self, job: Json, pods: list[Json], status: Json) -> None:
        spec = job["spec"]
        live = [pod for pod in pods if pod["status"].get("phase") not in OVER]
        active = [pod for pod in live if "deletionTimestamp" not in pod["metadata"]]
        going = len(live) - len(active)
        fate = self._fate(spec, status)
        if fate or spec.get("suspend"):
            going += len(active)
            for pod in active:
                meta = pod["metadata"]
                self._server.delete(PODS, meta["namespace"], meta["name"], meta["uid"])
            active = []
        if fate:
            self._set(status, *fate)
            if not going:
                final = "Complete" if fate[0] == "SuccessCriteriaMet" else "Failed"
                self._set(status, final, fate[1])
        elif spec.get("suspend"):
            self._set(status, "Suspended", "JobSuspended")
            status.pop("startTime", None)
        else:
            self._resume(status)
            if not live and not status["failed"]:
                self._make_pod(job)
                status["active"] = 1
                return
        status["active"], status["terminating"] = len(active), going

    def _fate(self, spec: Json, status: Json) -> tuple[str, str] | None:
        for kind in ("FailureTarget", "SuccessCriteriaMet"):
            known = _condition(status, kind)
            if known:
                return kind, known["reason"]
        forgiven = self.forgiving and spec.get("suspend")
        if status["failed"] > spec["backoffLimit"] and not forgiven:
            return "FailureTarget", "BackoffLimitExceeded"
        limit, begun = spec.get("activeDeadlineSeconds"), status.get("startTime")
        late = limit is not None and begun is not None and not spec.get("suspend")
        if late and (self._clock.now() - moment(str(begun))).total_seconds() >= limit:
            return "FailureTarget", "DeadlineExceeded"
        if status["succeeded"]:
            return "SuccessCriteriaMet", "CompletionsReached"
        return None

    def _resume(self, status: Json) -> None:
        if _condition(status, "Suspended"):
            self._set(status, "Suspended", "JobResumed", holds=False)
        status.setdefault("startTime", self._clock.stamp())

    def _set(self, status: Json, kind: str, reason: str, *, holds: bool = True) -> None:
        others = [c for c in status.get("conditions") or () if c["type"] != kind]
        known = _condition(status, kind)
        if known and holds:
            return
        new = {
            "type": kind,
            "status": "True" if holds else "False",
            "reason": reason,
            "message": "",
            "lastTransitionTime": self._clock.stamp(),
        }
        status["conditions"] = [*others, new]

    def _make_pod(self, job: Json) -> None:
        meta, template = job["metadata"], job["spec"]["template"]
        serial = len(self._server.history)
        owner = {"apiVersion": "batch/v1", "kind": "Job", "controller": True}
        labels = (template.get("metadata") or {}).get("labels") or {}
        pod = {
            "metadata": {
                "name": f"{meta['name']}-{serial}",
                "labels": {LABEL_JOB: meta["labels"][LABEL_JOB]} | labels,
                "ownerReferences": [owner | {"name": meta["name"], "uid": meta["uid"]}],
                "finalizers": [TRACKING],
            },
            "spec": dict(template["spec"]),
            "status": {"phase": "Pending"},
        }
        self._server.create(PODS, meta["namespace"], pod)


class Kubelets:
    """Scheduler, kubelets and what cleans up after nodes: from a bound pod to its last report."""

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
    return {"waiting": {"reason": pull_failure or "ContainerCreating", "message": ""}}


def _text(value: Any) -> str:
    return str(value.strftime("%Y-%m-%dT%H:%M:%SZ"))


def _condition(status: Json, kind: str) -> Json | None:
    found = (c for c in status.get("conditions") or () if c["type"] == kind)
    return next((c for c in found if c["status"] == "True"), None)


def _nulled(old: Json, status: Json) -> Json:
    """A status as a merge patch that removes what is not in it."""
    return dict.fromkeys(old["status"]) | status


def is_queued(job: Json) -> bool:
    return LABEL_QUEUE in (job["metadata"].get("labels") or {}) and job["spec"].get(
        "suspend", False
    )
