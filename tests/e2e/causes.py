"""Why jobs end otherwise than `done`, each way once (R-CAUSE).

A case says what its AgentJob ends with, so a test that holds the job to its case proves the row of
`docs/causes.md` too.
"""

import re
from dataclasses import dataclass
from typing import Any

from agentjobs.api.names import CauseCode

OF_THE_END = {"exitCode", "signal", "evidence"}

Document = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One AgentJob, by its name, and how it ends."""

    job: str
    code: CauseCode
    how: str
    says: str
    """Found in the message of its cause: the object to look at, and its words. `POD` and `JOB`
    stand for the names of this job's."""
    ran: bool = True
    retryable: bool = False
    exit_code: int | None = None
    signal: int | None = None
    forced: bool = False
    evidence: str = "observed"
    state: str = "failed"
    raced: bool = False
    """Whether the kubelet sees the container's end before it forgets it is a race of its own."""

    @property
    def facts(self) -> Document:
        """What `status` says apart from sentences."""
        told = {
            "state": self.state,
            "code": self.code.value,
            "ran": self.ran,
            "retryable": self.retryable,
            "exitCode": self.exit_code,
            "signal": self.signal,
            "forced": self.forced,
            "evidence": self.evidence,
        }
        return {name: value for name, value in told.items() if value is not None}

    def fits(self, found: Document) -> bool:
        """Whether a job that ended with these facts ended as it should."""
        if not self.raced:
            return found == self.facts
        seen = found.get("evidence") == "observed"
        rest = [
            {name: value for name, value in facts.items() if name not in OF_THE_END}
            for facts in (found, self.facts)
        ]
        return rest[0] == rest[1] and seen == ("exitCode" in found)

    @property
    def pattern(self) -> str:
        """`says` as a regular expression."""
        names = {"POD": rf"{self.job}-\d+-(\d+-)?[a-z0-9]{{5}}\b", "JOB": rf"{self.job}-\d+\b"}
        return re.sub("POD|JOB", lambda found: names[found[0]], self.says)


C = CauseCode
CASES = (
    Case("exit-3", C.TOOL_ERROR, "the tool exits with 3", "pod POD exited with 3", exit_code=3),
    Case(
        "init-fails",
        C.TOOL_ERROR,
        "an init container exits with 5",
        "init container before of pod POD exited with 5, so tool did not start",
        ran=False,
    ),
    Case(
        "killed-without-proof",
        C.TOOL_ERROR,
        "the tool is killed by `kill -9`, in a container that has memory to spare",
        r"container tool of pod POD was killed \(exit code 137\).*suspected, not proven",
        exit_code=137,
        signal=9,
    ),
    Case(
        "index-fails",
        C.TOOL_ERROR,
        "index 1 of an indexed Job of three exits with 7 while the others run",
        "pod index-fails-1-1-.* exited with 7",
        exit_code=7,
    ),
    Case(
        "out-of-memory",
        C.OOM_KILLED,
        "the tool uses more memory than its limit",
        "pod POD was killed for using too much memory",
        exit_code=137,
        signal=9,
    ),
    Case(
        "deadline",
        C.DEADLINE_EXCEEDED,
        "`deadlineSeconds` pass while the tool runs, and it ignores SIGTERM",
        "the deadline passed while pod POD ran",
        state="timed_out",
        exit_code=137,
        signal=9,
        forced=True,
    ),
    Case(
        "pending-deadline",
        C.PENDING_DEADLINE_EXCEEDED,
        "`pendingDeadlineSeconds` pass while no node fits",
        "pod POD cannot be scheduled: 0/2 nodes are available",
        state="timed_out",
        ran=False,
        retryable=True,
    ),
    Case(
        "never-pulled",
        C.PENDING_DEADLINE_EXCEEDED,
        "`pendingDeadlineSeconds` pass while the registry does not answer",
        r"pod POD, container tool: (ErrImagePull|ImagePullBackOff) \(.*127.0.0.1:1/never:1",
        state="timed_out",
        ran=False,
        retryable=True,
    ),
    Case(
        "no-configmap",
        C.PENDING_DEADLINE_EXCEEDED,
        "`pendingDeadlineSeconds` pass while a ConfigMap is missing",
        r'pod POD, container tool: CreateContainerConfigError \(configmap "missing" not found\)',
        state="timed_out",
        ran=False,
        retryable=True,
    ),
    Case(
        "quota-in-vain",
        C.PENDING_DEADLINE_EXCEEDED,
        "`pendingDeadlineSeconds` pass while the namespace is out of quota",
        "exceeded quota: no-room.*pods",
        state="timed_out",
        ran=False,
        retryable=True,
    ),
    Case(
        "misnamed-image",
        C.IMAGE_PULL,
        "the image's name cannot be one",
        r"image of container tool, pod POD: InvalidImageName \(.*UPPER",
        ran=False,
    ),
    Case(
        "absent-image",
        C.IMAGE_PULL,
        "the image is not on the node and `imagePullPolicy` is Never",
        r"image of container tool, pod POD: ErrImageNeverPull \(.*local/absent:1",
        ran=False,
    ),
    Case(
        "refused-template",
        C.INVALID_SPEC,
        "the template mounts a volume that it does not have",
        r"spec\.template\.spec\.template\.spec\.containers\[0\]\.volumeMounts\[0\]\.name: "
        r"Not found: \"nowhere\"",
        ran=False,
    ),
    Case(
        "policy-on-pods",
        C.ADMISSION_DENIED,
        "a ValidatingAdmissionPolicy refuses the pod",
        "ValidatingAdmissionPolicy 'no-pods' .*denied request: no pods today",
        ran=False,
    ),
    Case(
        "policy-on-jobs",
        C.ADMISSION_DENIED,
        "a ValidatingAdmissionPolicy refuses the Job",
        "ValidatingAdmissionPolicy 'no-jobs' .*denied request: no Jobs today",
        ran=False,
    ),
    Case(
        "pod-security",
        C.ADMISSION_DENIED,
        "the namespace enforces Pod Security `restricted`, and the template does not keep to it",
        'violates PodSecurity "restricted:latest": allowPrivilegeEscalation != false',
        ran=False,
    ),
    Case(
        "no-such-command",
        C.START_ERROR,
        "the image has no such command",
        "container tool of pod POD could not be started: .*/no/such/command",
        ran=False,
    ),
    Case(
        "evicted",
        C.EVICTED,
        "the eviction API, while the tool runs; it exits 0 on SIGTERM",
        "pod POD was evicted: Eviction API: evicting",
        retryable=True,
        exit_code=0,
    ),
    Case(
        "evicted-stubborn",
        C.EVICTED,
        "the eviction API, while the tool runs; it ignores SIGTERM",
        "pod POD was evicted: Eviction API: evicting",
        retryable=True,
        exit_code=137,
        signal=9,
    ),
    Case(
        "drained",
        C.EVICTED,
        "`kubectl drain` of the node, while the tool runs",
        "pod POD was evicted: Eviction API: evicting",
        retryable=True,
        exit_code=0,
    ),
    Case(
        "tainted",
        C.EVICTED,
        "a NoExecute taint on the node, while the tool runs",
        "pod POD was evicted: Taint manager: deleting due to NoExecute taint",
        retryable=True,
        exit_code=0,
    ),
    Case(
        "overfull",
        C.EVICTED,
        "the kubelet, because the tool writes more than the `sizeLimit` of an emptyDir",
        'pod POD was evicted: Usage of EmptyDir volume "scratch" exceeds the limit "1Mi"',
        exit_code=143,
        signal=15,
        raced=True,
    ),
    Case(
        "preempted",
        C.PREEMPTED,
        "the scheduler, to make room for a pod of a higher PriorityClass",
        "pod POD was preempted: default-scheduler: preempting to accommodate a higher priority pod",
        retryable=True,
        exit_code=0,
    ),
    Case(
        "node-lost",
        C.NODE_LOST,
        "the kubelet of its node dies, for longer than `nodeLostSeconds`",
        "node node2 of pod POD is lost; the tool may still run there",
        retryable=True,
        evidence="lost",
    ),
    Case(
        "job-deleted",
        C.DELETED_EXTERNALLY,
        "somebody deletes the Job while the tool runs",
        "Job JOB was deleted by somebody else; it is not started again",
        exit_code=0,
    ),
    Case(
        "pod-deleted",
        C.DELETED_EXTERNALLY,
        "somebody deletes the pod while the tool runs",
        "pod POD was deleted by somebody else; it is not started again",
        exit_code=0,
    ),
    Case(
        "pod-force-deleted",
        C.DELETED_EXTERNALLY,
        "somebody deletes the pod with `--force --grace-period=0` while the tool runs",
        "pod POD was deleted by somebody else; it is not started again",
        evidence="lost",
        raced=True,
    ),
    Case(
        "pending-pod-deleted",
        C.DELETED_EXTERNALLY,
        "somebody deletes the pod while no node fits",
        "pod POD was deleted by somebody else; it is not started again",
        ran=False,
    ),
    Case(
        "dependency-fails",
        C.DEPENDENCY_FAILED,
        "it depends on the success of a job that fails",
        "AgentJob init-fails is failed, and this job needs it done",
        ran=False,
    ),
    Case(
        "declined",
        C.DECLINED,
        "the gateway creates it with `stop.declined`, as it will when the caller's side says no",
        "declined on request: not today",
        state="cancelled",
        ran=False,
    ),
    Case(
        "obeys-sigterm",
        C.STOPPED,
        "`spec.stop` while the tool runs; it exits 0 on SIGTERM",
        "stopped on request: no longer needed",
        state="cancelled",
        exit_code=0,
    ),
    Case(
        "ignores-sigterm",
        C.STOPPED,
        "`spec.stop` while the tool runs; it ignores SIGTERM",
        "stopped on request: no longer needed",
        state="cancelled",
        exit_code=137,
        signal=9,
        forced=True,
    ),
    Case(
        "unschedulable-then-stopped",
        C.STOPPED,
        "`spec.stop` while no node fits",
        "stopped on request: no longer needed",
        state="cancelled",
        ran=False,
    ),
)
BY_JOB = {each.job: each for each in CASES}

NOT_YET = {
    C.APPROVAL_DENIED: "nothing asks for approval yet",
    C.INPUT_EXPIRED: "a question that expires ends no job: its tool is told",
    C.INTERNAL: "nothing of this version ends so",
}
"""Codes that are declared in the API and that no code of ours writes."""
