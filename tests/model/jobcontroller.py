"""kube-controller-manager's part for Jobs that make one pod, as kubernetes 1.36 does it."""

from typing import Any

from agentjobs.api.names import LABEL_JOB
from agentjobs.kube import JOBS, PODS
from tests.model.apiserver import ApiServer, Json
from tests.model.clock import Clock, moment
from tests.model.truth import OVER

TRACKING = "batch.kubernetes.io/job-tracking"


class JobController:
    def __init__(self, server: ApiServer, clock: Clock) -> None:
        self._server = server
        self._clock = clock

    def sync(self, job: Json, *, recorded: bool = True) -> None:
        """One pass over a Job, by what is stored now.

        :param recorded: otherwise it fails to write the status, and begins anew another time.
        """
        found = self._server.by_uid(JOBS, job["metadata"]["uid"])
        if found is None:
            return
        status, pods = dict(found["status"]), self._pods_of(found)
        if condition(status, "Complete") or condition(status, "Failed"):
            for pod in pods:
                self.release(pod)
            return
        self._count(pods, status)
        self._go_on(found, pods, status)
        if recorded:
            self._record(found, pods, status)

    def release(self, pod: Json) -> None:
        """Take the tracking finalizer off a pod that was counted, or that is nobody's."""
        meta = pod["metadata"]
        found = self._server.by_uid(PODS, meta["uid"])
        if found is not None and TRACKING in (found["metadata"].get("finalizers") or ()):
            patch = {"metadata": {"finalizers": None}}
            self._server.patch(PODS, meta["namespace"], meta["name"], patch)

    def _record(self, job: Json, pods: list[Json], status: Json) -> None:
        meta = job["metadata"]
        if status != job["status"]:
            patch = {"status": _nulled(job, status)}
            self._server.patch(JOBS, meta["namespace"], meta["name"], patch, "status")
        for pod in pods:
            if pod["status"].get("phase") in OVER:
                self.release(pod)

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
        """Count what has ended; what bears no finalizer was counted, or does not count."""
        for field, phase in (("succeeded", "Succeeded"), ("failed", "Failed")):
            fresh = [
                pod
                for pod in pods
                if pod["status"].get("phase") == phase
                and TRACKING in (pod["metadata"].get("finalizers") or ())
            ]
            status[field] = status.get(field, 0) + len(fresh)

    def _go_on(self, job: Json, pods: list[Json], status: Json) -> None:
        live = [pod for pod in pods if pod["status"].get("phase") not in OVER]
        active = [pod for pod in live if "deletionTimestamp" not in pod["metadata"]]
        going = len(live) - len(active)
        fate, count = self._fate(job["spec"], status), 0
        if fate:
            going += self._end(active)
            self._set(status, *fate)
            if not going:
                final = "Complete" if fate[0] == "SuccessCriteriaMet" else "Failed"
                self._set(status, final, fate[1])
        else:
            wanted = 0 if job["spec"].get("suspend") else job["spec"]["parallelism"]
            going += self._end_unwanted(active[wanted:])
            count = len(active[:wanted])
            if wanted > count + going:
                self._make_pod(job)
                count = wanted
            self._note_suspension(job["spec"], status)
        status["active"], status["terminating"] = count, going

    def _end(self, pods: list[Json]) -> int:
        for pod in pods:
            meta = pod["metadata"]
            self._server.delete(PODS, meta["namespace"], meta["name"], meta["uid"])
        return len(pods)

    def _end_unwanted(self, pods: list[Json]) -> int:
        """End pods of a Job that is suspended or wants fewer: they never count as failed."""
        for pod in pods:
            self.release(pod)
        return self._end(pods)

    def _fate(self, spec: Json, status: Json) -> tuple[str, str] | None:
        for kind in ("FailureTarget", "SuccessCriteriaMet"):
            known = condition(status, kind)
            if known:
                return kind, known["reason"]
        if status["failed"] > spec["backoffLimit"]:
            return "FailureTarget", "BackoffLimitExceeded"
        limit, begun = spec.get("activeDeadlineSeconds"), status.get("startTime")
        late = limit is not None and begun is not None and not spec.get("suspend")
        if late and (self._clock.now() - moment(str(begun))).total_seconds() >= limit:
            return "FailureTarget", "DeadlineExceeded"
        if status["succeeded"]:
            return "SuccessCriteriaMet", "CompletionsReached"
        return None

    def _note_suspension(self, spec: Json, status: Json) -> None:
        if spec.get("suspend"):
            self._set(status, "Suspended", "JobSuspended")
            status.pop("startTime", None)
            return
        if condition(status, "Suspended"):
            self._set(status, "Suspended", "JobResumed", holds=False)
        status.setdefault("startTime", self._clock.stamp())

    def _set(self, status: Json, kind: str, reason: str, *, holds: bool = True) -> None:
        others = [c for c in status.get("conditions") or () if c["type"] != kind]
        known = condition(status, kind)
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


def condition(status: Json, kind: str) -> Json | None:
    """A condition that holds."""
    found = (c for c in status.get("conditions") or () if c["type"] == kind)
    return next((c for c in found if c["status"] == "True"), None)


def _nulled(old: Json, status: Json) -> dict[str, Any]:
    """A status as a merge patch that removes what is not in it."""
    return dict.fromkeys(old["status"]) | status
