"""How an attempt ended, as far as there is proof (R-HONEST, R-DEAD, R-CAUSE)."""

from typing import Any

import pytest

from agentjobs.api.agentjob import Cause, Ending
from agentjobs.api.names import CauseCode
from agentjobs.domain.pods import PodView
from agentjobs.domain.reconcile import decide
from agentjobs.domain.verdict import Verdict, judge_job, judge_pod, never_ran, vanished
from tests.builders import (
    Json,
    a_child,
    a_pod,
    an_agentjob,
    at,
    claimed,
    disrupted,
    ended,
    observed,
    running,
    waiting,
)
from tests.domain.situations import told

STOPPED = Ending(code=CauseCode.STOPPED, message="stopped by ada", at=at(40))
DEADLINE = Ending(code=CauseCode.DEADLINE_EXCEEDED, message="the deadline passed", at=at(40))
BY_KUBELET: Json = {"phase": "Failed", "reason": "DeadlineExceeded"}


def judged(pod: PodView, ending: Ending | None = None) -> Verdict:
    return judge_pod(pod, ending, linger=30)


def short(verdict: Verdict) -> Json:
    """State and cause of a verdict, absent fields left out."""
    cause = verdict.cause.to_json() if verdict.cause else {}
    return {"state": str(verdict.state)} | cause


def includes(found: Json, expected: Json) -> None:
    assert {key: found.get(key) for key in expected} == expected


@pytest.mark.parametrize(
    ("pod", "ending", "expected"),
    [
        pytest.param(
            a_pod(ended(137, reason="OOMKilled")),
            None,
            {"state": "failed", "code": "oom_killed", "exitCode": 137, "signal": 9}
            | {"forced": False},
            id="R-CAUSE: both proofs of a kill for memory",
        ),
        pytest.param(
            a_pod(ended(137)),
            None,
            {"state": "failed", "code": "tool_error", "exitCode": 137, "signal": 9}
            | {"forced": False},
            id="R-CAUSE: 137 alone proves nothing",
        ),
        pytest.param(
            a_pod(ended(137), conditions=(disrupted("PreemptionByScheduler"),)),
            None,
            {"state": "failed", "code": "preempted", "retryable": True, "forced": False},
            id="R-CAUSE: killed because it was preempted",
        ),
        pytest.param(
            a_pod(ended(137, finished=58), **BY_KUBELET),
            STOPPED,
            {"state": "cancelled", "code": "stopped", "forced": True, "exitCode": 137}
            | {"signal": 9},
            id="R-STOP: killed after its grace period",
        ),
        pytest.param(
            a_pod(ended(137, finished=58), **BY_KUBELET),
            DEADLINE,
            {"state": "timed_out", "code": "deadline_exceeded", "forced": True, "exitCode": 137}
            | {"signal": 9},
            id="R-DEADLINE: killed after its grace period",
        ),
        pytest.param(
            a_pod(
                ended(137, reason="ContainerStatusUnknown"),
                phase="Failed",
                reason="Evicted",
                message="disk pressure",
            ),
            None,
            {"state": "failed", "code": "evicted", "exitCode": None, "signal": None},
            id="R-CAUSE: the kubelet's stand-in is no exit code",
        ),
        pytest.param(
            a_pod(ended(0, reason="OOMKilled"), phase="Succeeded"),
            None,
            {"state": "done", "code": None},
            id="R-CAUSE: the runtime's word alone proves nothing",
        ),
        pytest.param(
            a_pod(ended(143, reason="OOMKilled")),
            None,
            {"state": "failed", "code": "tool_error", "exitCode": 143},
            id="R-CAUSE: nor does it with another exit code",
        ),
        pytest.param(
            a_pod(ended(143)),
            None,
            {"state": "failed", "code": "tool_error", "exitCode": 143, "signal": 15},
            id="R-CAUSE: 143 without a request is the tool's own",
        ),
        pytest.param(
            a_pod(ended(143, reason="OOMKilled"), conditions=(disrupted("EvictionByEvictionAPI"),)),
            None,
            {"state": "failed", "code": "evicted", "exitCode": 143, "retryable": True},
            id="R-CAUSE: an eviction, whatever the runtime says",
        ),
        pytest.param(
            a_pod(None, phase="Failed", reason="Evicted", message="scratch is over its limit"),
            None,
            {"state": "failed", "code": "evicted", "ran": True, "retryable": False}
            | {"exitCode": None},
            id="R-CAUSE: an eviction for a limit of its own is no disruption",
        ),
        pytest.param(
            a_pod(ended(0, finished=30), conditions=(disrupted("EvictionByEvictionAPI"),)),
            None,
            {"state": "failed", "code": "evicted"},
            id="R-HONEST: exit 0 at an eviction without a time",
        ),
        pytest.param(
            a_pod(
                ended(0, finished=30),
                conditions=(
                    disrupted("EvictionByEvictionAPI")
                    | {"lastTransitionTime": "2026-03-01T12:00:45Z"},
                ),
            ),
            None,
            {"state": "done"},
            id="R-HONEST: done before its pod was drained",
        ),
        pytest.param(
            a_pod(ended(0, finished=30), **BY_KUBELET | {"phase": "Succeeded"}),
            STOPPED,
            {"state": "done"},
            id="R-HONEST: over before the signal, though the stop is on record",
        ),
        pytest.param(
            a_pod(ended(3, finished=30)),
            STOPPED,
            {"state": "failed", "code": "tool_error", "exitCode": 3},
            id="R-HONEST: failed by itself before the signal",
        ),
        pytest.param(
            a_pod(ended(0, finished=58), **BY_KUBELET),
            STOPPED,
            {"state": "cancelled", "code": "stopped", "forced": False, "signal": None},
            id="R-HONEST: exit 0 on the signal is cancelled, not forced",
        ),
        pytest.param(
            a_pod(ended(143, finished=58), deleted_at=45, gone=True),
            STOPPED,
            {"state": "cancelled", "code": "stopped", "forced": False, "exitCode": 143},
            id="R-STOP: ended by the deletion of its pod",
        ),
        pytest.param(
            a_pod(running(), deleted_at=45, gone=True),
            STOPPED,
            {"state": "cancelled", "code": "stopped", "forced": False, "evidence": "lost"}
            | {"exitCode": None, "ran": True},
            id="R-DEAD: a pod whose end nobody saw",
        ),
        pytest.param(
            a_pod(waiting("CrashLoopBackOff"), last_state=ended(1), deleted_at=45, gone=True),
            STOPPED,
            {"state": "cancelled", "code": "stopped", "ran": True, "forced": False},
            id="R-HONEST: stopped between two runs in place",
        ),
        pytest.param(
            a_pod(ended(137, finished=58), **BY_KUBELET),
            None,
            {"state": "timed_out", "code": "deadline_exceeded", "ran": True},
            id="R-DEADLINE: the pod's own deadline, nothing else on record",
        ),
        pytest.param(
            a_pod(waiting(), **BY_KUBELET),
            None,
            {"state": "timed_out", "code": "deadline_exceeded", "ran": False},
            id="R-DEADLINE: the pod's own deadline during its init containers",
        ),
        pytest.param(
            a_pod(
                waiting("PodInitializing"),
                init={"fetch": ended(0), "plan": ended(1)},
                phase="Failed",
            ),
            None,
            {"state": "failed", "code": "tool_error", "ran": False, "exitCode": None},
            id="R-DEAD: an init container failed, the tool never ran",
        ),
        pytest.param(
            a_pod(waiting("PodInitializing"), init={"plan": running()}, **BY_KUBELET),
            STOPPED,
            {"state": "cancelled", "code": "stopped", "ran": False, "forced": False},
            id="R-DEAD: stopped while an init container ran",
        ),
        pytest.param(
            a_pod(ended(128, reason="StartError", started=None, message="argument list too long")),
            None,
            {"state": "failed", "code": "start_error", "ran": False, "exitCode": None},
            id="R-CAUSE: the runtime could not start it",
        ),
        pytest.param(
            a_pod(running(), gone=True),
            None,
            {"state": "failed", "code": "deleted_externally", "ran": True, "evidence": "lost"},
            id="R-CAUSE: somebody deleted its pod",
        ),
        pytest.param(
            a_pod(running(), gone=True, conditions=(disrupted("DeletionByPodGC"),)),
            None,
            {"state": "failed", "code": "node_lost", "evidence": "lost", "retryable": True},
            id="R-CAUSE: its node is lost",
        ),
        pytest.param(
            a_pod(ended(0, finished=35), others={"helper": ended(137, finished=70)}, **BY_KUBELET),
            None,
            {"state": "done"},
            id="R-CONTAINER: another container lingered and was killed",
        ),
        pytest.param(
            a_pod(ended(1), others={"helper": ended(0)}, phase="Failed"),
            None,
            {"state": "failed", "code": "tool_error", "exitCode": 1},
            id="R-CONTAINER: the verdict is the tool's",
        ),
        pytest.param(
            a_pod(ended(0), others={"helper": ended(2)}, phase="Failed"),
            None,
            {"state": "done"},
            id="R-CONTAINER: another container's failure is not the tool's",
        ),
        pytest.param(
            a_pod(ended(0), init={"database": ended(137)}, phase="Succeeded"),
            None,
            {"state": "done"},
            id="R-CONTAINER: a sidecar that was killed after the tool",
        ),
    ],
)
def test_a_pod_that_is_dead(pod: PodView, ending: Ending | None, expected: Json) -> None:
    includes(short(judged(pod, ending)), expected)


@pytest.mark.parametrize(
    ("pod", "words"),
    [
        pytest.param(
            a_pod(ended(137)), ["main", "suspected", "not proven"], id="137: suspected, not proven"
        ),
        pytest.param(
            a_pod(ended(143, reason="OOMKilled"), conditions=(disrupted("EvictionByEvictionAPI"),)),
            ["evicted", "EvictionByEvictionAPI"],
            id="an eviction is named, not memory",
        ),
        pytest.param(
            a_pod(None, phase="Failed", reason="Evicted", message="scratch is over its limit"),
            ["scratch is over its limit"],
            id="the kubelet's words",
        ),
        pytest.param(
            a_pod(waiting(), init={"plan": ended(1)}, phase="Failed"),
            ["init container plan", "exited with 1"],
            id="the init container that failed",
        ),
        pytest.param(
            a_pod(ended(128, reason="StartError", started=None, message="exec: no such file")),
            ["could not be started", "exec: no such file"],
            id="why it could not be started",
        ),
        pytest.param(a_pod(ended(7)), ["container main", "exited with 7"], id="container and code"),
    ],
)
def test_r_cause_the_message_names_what_to_look_at(pod: PodView, words: list[str]) -> None:
    cause = judged(pod).cause
    assert cause is not None
    assert not [word for word in words if word not in cause.message]
    assert "memory" not in cause.message or "suspected" in cause.message


@pytest.mark.parametrize("text", ["x" * 5000, "two\nlines \x1b[31m", "é" * 5000], ids=repr)
def test_r_cause_the_message_is_one_short_line_whatever_the_cluster_says(text: str) -> None:
    pod = a_pod(None, phase="Failed", reason="Evicted", message=text)
    cause = judged(pod).cause
    assert cause is not None
    assert len(cause.message) <= 256
    assert cause.message.isprintable()
    Cause.from_json(cause.to_json())


@pytest.mark.parametrize(
    ("job", "pods", "ending", "expected"),
    [
        pytest.param(
            {"complete": True},
            (a_pod(ended(1)), a_pod(ended(0))),
            None,
            {"state": "done"},
            id="R-CONTAINER: complete is done, though a pod failed",
        ),
        pytest.param(
            {"complete": True},
            (a_pod(ended(0)),),
            STOPPED,
            {"state": "done"},
            id="R-HONEST: complete is done, though a stop is on record",
        ),
        pytest.param(
            {"failed_reason": "BackoffLimitExceeded"},
            (a_pod(ended(2, finished=40), uid="b"), a_pod(ended(7, finished=20), uid="a")),
            None,
            {"state": "failed", "code": "tool_error", "exitCode": 7},
            id="R-CONTAINER: the first failure is named",
        ),
        pytest.param(
            {"failed_reason": "BackoffLimitExceeded", "failed_message": "limit reached"},
            (),
            None,
            {"state": "failed", "code": "tool_error", "evidence": "lost"},
            id="R-DEAD: failed and no pod was seen",
        ),
        pytest.param(
            {"failed_reason": "DeadlineExceeded"},
            (a_pod(ended(143, finished=58), deleted_at=52, gone=True),),
            None,
            {"state": "timed_out", "code": "deadline_exceeded", "exitCode": 143},
            id="R-DEADLINE: the Job's backstop deleted its pods",
        ),
        pytest.param(
            {"failed_reason": "DeadlineExceeded"},
            (),
            None,
            {"state": "timed_out", "code": "deadline_exceeded", "evidence": "lost"},
            id="R-DEADLINE: the Job's backstop, and no pod was seen",
        ),
        pytest.param(
            {"failed_reason": "BackoffLimitExceeded"},
            (a_pod(ended(143, finished=58), deleted_at=52, gone=True),),
            STOPPED,
            {"state": "cancelled", "code": "stopped"},
            id="R-STOP: several pods were stopped",
        ),
    ],
)
def test_a_job_of_several_pods(
    job: dict[str, Any], pods: tuple[PodView, ...], ending: Ending | None, expected: Json
) -> None:
    child = a_child(single=False, **job)
    includes(short(judge_job(child, pods, ending, linger=30)), expected)


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (CauseCode.STOPPED, {"state": "cancelled", "retryable": False}),
        (CauseCode.DECLINED, {"state": "cancelled", "retryable": False}),
        (CauseCode.DEADLINE_EXCEEDED, {"state": "timed_out", "retryable": False}),
        (CauseCode.PENDING_DEADLINE_EXCEEDED, {"state": "timed_out", "retryable": True}),
        (CauseCode.IMAGE_PULL, {"state": "failed", "retryable": False}),
        (CauseCode.INVALID_SPEC, {"state": "failed", "retryable": False}),
        (CauseCode.DEPENDENCY_FAILED, {"state": "failed", "retryable": False}),
    ],
    ids=lambda value: str(value) if isinstance(value, CauseCode) else "",
)
def test_r_honest_what_never_started_did_not_run(code: CauseCode, expected: Json) -> None:
    verdict = never_ran(Ending(code=code, message="why", at=at(40)))
    includes(short(verdict), expected | {"code": str(code), "ran": False, "forced": False})


@pytest.mark.parametrize(
    ("pods", "ran", "expected"),
    [
        pytest.param((), False, {"ran": False, "evidence": "observed"}, id="never ran"),
        pytest.param((), True, {"ran": True, "evidence": "lost"}, id="was running"),
        pytest.param(
            (a_pod(ended(143), gone=True),),
            True,
            {"ran": True, "evidence": "observed", "exitCode": 143},
            id="its end was seen",
        ),
    ],
)
def test_r_attempt_a_job_that_somebody_deleted(
    pods: tuple[PodView, ...],
    ran: bool,
    expected: Json,
) -> None:
    found = short(vanished("nightly-index-1", pods, ran=ran))
    includes(found, expected | {"state": "failed", "code": "deleted_externally"})


@pytest.mark.parametrize(
    ("child", "pods", "expected"),
    [
        pytest.param(
            {},
            (a_pod(ended(0, finished=50), others={"helper": running()}),),
            "running",
            id="another",
        ),
        pytest.param(
            {"single": False},
            (a_pod(ended(0), uid="a"), a_pod(running(), uid="b")),
            "running",
            id="a worker runs after the first success",
        ),
        pytest.param(
            {"single": False, "failed": 1},
            (a_pod(ended(1), uid="a"),),
            "running",
            id="the Job controller will make another pod",
        ),
        pytest.param(
            {"single": False, "complete": True},
            (a_pod(ended(0), uid="a"), a_pod(ended(1), uid="b")),
            "done",
            id="complete, all are over",
        ),
        pytest.param({}, (a_pod(running(), phase="Unknown"),), "running", id="its node is silent"),
        pytest.param(
            {},
            (a_pod(ended(0), phase="Running"),),
            "running",
            id="R-STATE-DERIVED a tool that has ended is not queued while its pod is alive",
        ),
    ],
)
def test_r_dead_nothing_is_over_while_something_may_run(
    child: dict[str, Any], pods: tuple[PodView, ...], expected: str
) -> None:
    job = an_agentjob(status=claimed(jobUID="j1"))
    assert told(decide(observed(job, child=a_child(**child), pods=pods))) == expected


@pytest.mark.parametrize(
    "surplus",
    [
        a_pod(running(), uid="b", name="surplus", gone=True),
        a_pod(running(), uid="b", name="surplus", deleted_at=45, gone=True),
        a_pod(ended(143, finished=58), uid="b", name="surplus", deleted_at=45, phase="Failed"),
    ],
    ids=["nobody saw it go", "it just went", "the kubelet told its end"],
)
def test_r_container_a_pod_that_the_job_controller_made_too_many_is_no_verdict(
    surplus: PodView,
) -> None:
    job = an_agentjob(status=claimed())
    kept = a_pod(running(), uid="a", name="kept", tracked=True)
    assert told(decide(observed(job, child=a_child(), pods=(kept, surplus)))) == "running"
    done = a_pod(ended(0, finished=60), uid="a", name="kept", phase="Succeeded", tracked=True)
    assert told(decide(observed(job, now=62, child=a_child(), pods=(done, surplus)))) == "done"
    gone = a_pod(ended(0, finished=40), uid="a", deleted_at=50, phase="Succeeded", gone=True)
    assert told(decide(observed(job, now=62, child=a_child(), pods=(gone, surplus)))) == "done"
