"""Why jobs end otherwise than `done` (R-CAUSE): each way once, and the table of what is seen of it.

A case says what its AgentJob ends with, so a test that holds the job to its case proves the row of
`docs/causes.md` too. The texts of the table are recorded from a real cluster (`make causes`).
"""

import os
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentjobs.api.names import CauseCode
from tests.e2e.platform import Platform

RECORD = "AGENTJOBS_RECORD_CAUSES"
"""Names the file to write the table to."""
MOST_EVENTS = 3
EVENTS_WITHIN = 15
POLL = 0.2

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
        "the deadline passed",
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
        "ValidatingAdmissionPolicy 'no-pods.*denied request: no pods today",
        ran=False,
    ),
    Case(
        "policy-on-jobs",
        C.ADMISSION_DENIED,
        "a ValidatingAdmissionPolicy refuses the Job",
        "ValidatingAdmissionPolicy 'no-jobs.*denied request: no Jobs today",
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
        exit_code=0,
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
        "AgentJob init-fails did not succeed, and this job depends on it",
        ran=False,
    ),
    Case(
        "declined",
        C.DECLINED,
        "the gateway creates it with `stop.declined`, as it will when the caller's side says no",
        "stopped on request: not today",
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
    C.INPUT_EXPIRED: "nothing asks for input yet",
    C.INTERNAL: "nothing of this version ends so",
}
"""Codes that are declared in the API and that no code of ours writes."""


def wait_for_case(here: Platform, name: str, seconds: float = 90) -> Document:
    """Wait until the job of a case is over, hold it to its case, and return its status."""
    case = BY_JOB[name]
    status = here.wait_for(name, seconds=seconds)
    found = {"state": status["state"], **(status.get("cause") or {})}
    message = str(found.pop("message", ""))
    assert found == case.facts, message
    assert re.search(case.pattern, message), message
    events = wait_for_events(here, name, message)
    assert len(events) <= MOST_EVENTS + 2 * (len(status.get("attempts", ())) > 1), events
    return status


def wait_for_events(here: Platform, name: str, message: str) -> list[Document]:
    """Wait until the end of the job is told in an Event; return all Events about it."""
    until = time.monotonic() + EVENTS_WITHIN
    selector = f"involvedObject.kind=AgentJob,involvedObject.name={name}"
    while True:
        events = here.api.items("Event", here.namespace, fieldSelector=selector)
        if any(message in each["message"] for each in events):
            return events
        assert time.monotonic() < until, events
        time.sleep(POLL)


@dataclass
class Seen:
    """What kubectl showed of the cases, in a form that is the same after every run."""

    shown: dict[str, str] = field(default_factory=dict)

    def take(self, here: Platform, name: str) -> None:
        """Take down what `kubectl describe` shows of a job that is over."""
        if os.environ.get(RECORD):
            text = here.kubectl("describe", "agentjob", name)
            self.shown[name] = "<br>".join(excerpt(plain(text, name, here.namespace)))

    def write(self) -> None:
        """Write the table, should that be wanted; only ever all of it."""
        place = os.environ.get(RECORD)
        if not place:
            return
        missing = [case.job for case in CASES if case.job not in self.shown]
        assert not missing, f"the table wants all cases, and these were not seen: {missing}"
        Path(place).write_text(table(self.shown), encoding="utf-8")


def plain(text: str, name: str, namespace: str) -> str:
    """Without what is different in every run."""
    text = re.sub(rf"\b({name}-\d+(?:-\d+)?)-[a-z0-9]{{5}}\b", r"\1-xxxxx", text)
    text = re.sub(r"\bt-[0-9a-f]{8}\b", "team-a", text.replace(namespace, "team-a"))
    return re.sub(r"\b[0-9a-f]{32,64}\b", "…", text)


def excerpt(described: str) -> list[str]:
    """The lines of `kubectl describe` that say how a job ended."""
    body, _, events = described.partition("\nEvents:\n")
    state = re.search(r"^  State:\s+(\S+)", body, re.MULTILINE)
    cause = re.search(r"^  Cause:\n((?:    .*\n)+)", body, re.MULTILINE)
    assert state, body
    assert cause, body
    fields = [_field(line) for line in cause[1].splitlines()]
    lines = [f"State: {state[1]}", "Cause:", *(f"  {name}: {value}" for name, value in fields)]
    rows = [re.split(r"\s{2,}", line.strip(), maxsplit=4) for line in events.splitlines()]
    told = [f"  {row[0]} {row[1]}: {row[4]}" for row in rows if row[0] in {"Normal", "Warning"}]
    return [_code(line) for line in (*lines, "Events:", *told)]


def table(shown: Mapping[str, str]) -> str:
    """`docs/causes.md`."""
    rows = [f"| `{case.code}` | {case.how} | {shown[case.job]} |" for case in CASES]
    rows += [f"| `{code}` | {why} | nothing |" for code, why in NOT_YET.items()]
    return f"{HEAD}{_lines(rows)}{FOOT}"


HEAD = """\
# Why a job ended

<!-- Written by `make causes` from what the tests saw on a real cluster of two nodes. -->

Every way to end otherwise than `done` that can be provoked: the cause, what was done to provoke it,
and what `kubectl describe aj NAME` then shows. The tests that do so are `tests/e2e/test_causes.py`
and `tests/e2e/test_endings.py`.

| cause | provoked by | `kubectl describe` shows |
|---|---|---|
"""
FOOT = """
* `Ran`: the tool's container began. `false` is said only where that is certain.
* `Retryable`: the same job may end otherwise the next time; nothing about the tool was at fault.
* `Forced`: it was killed after its grace period, and a stop or a deadline of ours was the reason.
* `Evidence: lost`: nobody saw how the container ended.
* `oom_killed` is said only with the kernel's word *and* exit code 137; a bare 137 proves nothing.
* A full quota, a node that is missing, a registry that does not answer are waited for: the state is
  `queued`, and `status.waiting` says why. Only a deadline ends that, with the reason in its message.
"""


def _lines(rows: Iterable[str]) -> str:
    return "".join(f"{row}\n" for row in rows)


def _field(line: str) -> tuple[str, str]:
    name, _, value = line.strip().partition(":")
    return name, value.strip()


def _code(line: str) -> str:
    indent = len(line) - len(line.lstrip())
    text = line.strip().replace("|", "\\|")
    fence = "``" if "`" in text else "`"
    return "&nbsp;" * indent + f"{fence}{text}{fence}"
