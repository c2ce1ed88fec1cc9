"""A node and its kubelet, played: pods do what the test says, and end when they are asked to.

A pod that has a deletionTimestamp is ended and let go; one whose activeDeadlineSeconds was lowered
to 1 is ended and kept. Everything else that happens to a pod is a step of the test.
"""

import threading
import time
from datetime import UTC, datetime
from typing import Any

from tests.apiclient import ApiClient, Document, Record, RefusedError

NODE = "played"
HEARTBEAT = 10.0
GONE = {404, 409}
TERMINATED = 143


def stamp(moment: datetime | None = None) -> str:
    return (moment or datetime.now(UTC)).strftime("%Y-%m-%dT%H:%M:%SZ")


class Kubelet:
    """The only one that writes the status of pods on the node `played`."""

    def __init__(self, api: ApiClient, record: Record) -> None:
        self._api = api
        self._record = record
        self._exits: dict[str, tuple[int, float] | None] = {}
        self._asked: dict[str, str] = {}
        self._lock = threading.Lock()
        self._closed = threading.Event()
        api.create({"apiVersion": "v1", "kind": "Node", "metadata": {"name": NODE}})
        self._heartbeat()
        self._pulse = threading.Thread(target=self._beat, daemon=True)
        self._pulse.start()
        record.listen(self._on_pod)

    def close(self) -> None:
        self._closed.set()
        self._pulse.join()

    # --- what a test tells it

    def when_asked_to_end(self, pod: Document, code: int | None, *, after: float = 0.0) -> None:
        """Exit with this code when asked to end; None: go without a last status."""
        self._exits[pod["metadata"]["uid"]] = None if code is None else (code, after)

    def bind(self, pod: Document) -> None:
        meta = pod["metadata"]
        if (self._now(pod).get("spec") or {}).get("nodeName"):
            return
        body = {
            "apiVersion": "v1",
            "kind": "Binding",
            "metadata": {"name": meta["name"]},
            "target": {"apiVersion": "v1", "kind": "Node", "name": NODE},
        }
        path = f"/api/v1/namespaces/{meta['namespace']}/pods/{meta['name']}/binding"
        self._api.send("POST", path, body).object()

    def start(self, pod: Document) -> None:
        """All containers run."""
        self.bind(pod)
        running = {"running": {"startedAt": stamp()}}
        self._write(pod, {"phase": "Running", "startTime": stamp(), **_containers(pod, running)})

    def finish(
        self,
        pod: Document,
        code: int = 0,
        *,
        reason: str = "",
        message: str = "",
        at: datetime | None = None,
    ) -> None:
        """All containers have ended by themselves."""
        ended = _terminated(code, reason, message, at)
        phase = "Failed" if code else "Succeeded"
        self._write(pod, {"phase": phase, **_containers(pod, ended, pod=self._now(pod))})

    def finish_container(self, pod: Document, name: str, code: int) -> None:
        """One of several containers has ended; the others go on."""
        before = self._now(pod)["status"]["containerStatuses"]
        ended = _containers(pod, _terminated(code, "", "", None), pod=self._now(pod))
        after = {each["name"]: each for each in ended["containerStatuses"]}
        statuses = [after[c["name"]] if c["name"] == name else c for c in before]
        self._write(pod, {"phase": "Running", "containerStatuses": statuses})

    def run(self, pod: Document, code: int = 0, *, message: str = "") -> None:
        """Start and finish."""
        self.start(pod)
        self.finish(pod, code, message=message)

    def waits(self, pod: Document, reason: str, message: str = "") -> None:
        """No container can start, for now."""
        self.bind(pod)
        waiting = {"waiting": {"reason": reason, "message": message}}
        self._write(pod, {"phase": "Pending", **_containers(pod, waiting)})

    def unschedulable(self, pod: Document, message: str) -> None:
        """The scheduler finds no node."""
        condition = {
            "type": "PodScheduled",
            "status": "False",
            "reason": "Unschedulable",
            "message": message,
            "lastTransitionTime": stamp(),
        }
        self._write(pod, {"phase": "Pending", "conditions": [condition]})

    def evict(self, pod: Document, message: str) -> None:
        """The kubelet gives the pod up; of its containers nothing is known any more."""
        status = {"phase": "Failed", "reason": "Evicted", "message": message}
        self._write(pod, {**status, "containerStatuses": []})

    # --- what it does by itself

    def _on_pod(self, _event: str, pod: Document) -> None:
        meta, spec = pod["metadata"], pod.get("spec") or {}
        if spec.get("nodeName") != NODE:
            return
        if _event == "DELETED":
            return
        deleted = "deletionTimestamp" in meta
        expired = spec.get("activeDeadlineSeconds") == 1
        if not deleted and not expired:
            return
        how = "deleted" if deleted else "expired"
        with self._lock:
            if self._asked.get(meta["uid"]) == how:
                return
            self._asked[meta["uid"]] = how
        threading.Thread(target=self._end, args=(pod,), kwargs={"deleted": deleted}).start()

    def _end(self, pod: Document, *, deleted: bool) -> None:
        wanted = self._exits.get(pod["metadata"]["uid"], (TERMINATED, 0.0))
        try:
            if wanted is None:
                return
            code, after = wanted
            if any("running" in state for state in _states(pod)):
                self._closed.wait(after)
                self._write(pod, _ended(pod, code, deleted=deleted))
            elif (pod.get("status") or {}).get("phase") == "Pending":
                self._write(pod, {"phase": "Failed"})  # its last word: nothing of it ever ran
        except RefusedError:
            return  # the pod was gone before
        finally:
            if deleted:
                self._let_go(pod)

    def _let_go(self, pod: Document) -> None:
        meta = pod["metadata"]
        options = {"gracePeriodSeconds": 0, "preconditions": {"uid": meta["uid"]}}
        self._api.delete("Pod", meta["namespace"], meta["name"], **options)

    def _write(self, pod: Document, status: Document) -> None:
        meta = pod["metadata"]
        change = {"metadata": {"uid": meta["uid"]}, "status": status}
        self._api.patch("Pod", meta["namespace"], meta["name"], change, "status").object()

    def _now(self, pod: Document) -> Document:
        meta = pod["metadata"]
        return self._record.latest("Pod", meta["namespace"], meta["name"]) or pod

    def _beat(self) -> None:
        while not self._closed.wait(HEARTBEAT):
            self._heartbeat()

    def _heartbeat(self) -> None:
        ready = {
            "type": "Ready",
            "status": "True",
            "reason": "KubeletReady",
            "lastHeartbeatTime": stamp(),
        }
        self._api.patch("Node", "", NODE, {"status": {"conditions": [ready]}}, "status").object()
        self._api.patch("Node", "", NODE, {"spec": {"taints": None}}).object()


def _states(pod: Document) -> list[Document]:
    statuses = (pod.get("status") or {}).get("containerStatuses") or ()
    return [each["state"] for each in statuses]


def _ended(pod: Document, code: int, *, deleted: bool) -> Document:
    """The last status of a pod that was asked to end while it ran."""
    status = _containers(pod, _terminated(code, "", "", None), pod=pod, only_running=True)
    if deleted:
        return {"phase": "Failed" if code else "Succeeded", **status}
    message = "Pod was active on the node longer than the specified deadline"
    return {"phase": "Failed", "reason": "DeadlineExceeded", "message": message, **status}


def _containers(
    pod_spec: Document,
    state: Document,
    *,
    pod: Document | None = None,
    only_running: bool = False,
) -> Document:
    before = {
        c["name"]: c for c in ((pod or {}).get("status") or {}).get("containerStatuses") or ()
    }
    after = []
    for container in pod_spec["spec"]["containers"]:
        old = before.get(container["name"])
        if only_running and old and "running" not in old["state"]:
            after.append(old)
            continue
        after.append(
            {
                "name": container["name"],
                "image": container["image"],
                "imageID": "",
                "restartCount": 0,
                "ready": "running" in state,
                "state": _began(state, old),
            }
        )
    return {"containerStatuses": after}


def _began(state: Document, before: Document | None) -> Document:
    running = ((before or {}).get("state") or {}).get("running")
    if "terminated" not in state:
        return state
    began = running["startedAt"] if running else state["terminated"]["finishedAt"]
    return {"terminated": {**state["terminated"], "startedAt": began}}


def _terminated(code: int, reason: str, message: str, at: datetime | None) -> Document:
    ended: dict[str, Any] = {
        "exitCode": code,
        "reason": reason or ("Error" if code else "Completed"),
        "finishedAt": stamp(at),
    }
    return {"terminated": {**ended, **({"message": message} if message else {})}}


def settle() -> None:
    """Let the second end: times in a pod's status have no fractions."""
    time.sleep(1.0 - time.time() % 1.0)
