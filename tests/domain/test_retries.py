"""Whether another attempt follows: decided from the cause, never two at once (R-ATTEMPT)."""

from dataclasses import replace
from typing import Any

import pytest

from agentjobs.api.names import CauseCode, State, WaitingCode
from agentjobs.domain.observed import DependencySeen, Observed
from agentjobs.domain.plan import CreateJob, DeleteJob, Plan
from agentjobs.domain.reconcile import decide
from tests.builders import (
    JOB_NAME,
    JOB_UID,
    NAME,
    POD_NAME,
    Json,
    a_child,
    a_pod,
    a_template,
    a_tool,
    an_agentjob,
    at,
    claimed,
    disrupted,
    ended,
    observed,
    running,
    stamp,
)

ALL = ["disruption", "oom", "tool_error"]
PREEMPTED = (disrupted("PreemptionByScheduler"),)


def retried(
    *, number: int = 1, begun: int | None = None, spec: Json | None = None, **status: Any
) -> Any:
    """An AgentJob in that attempt; the earlier ones have ended, so many of all had begun."""
    retry = (spec or {}).pop("retry", {"maxAttempts": 3, "causes": ALL})
    earlier = [
        {
            "number": each,
            "jobName": f"{NAME}-{each}",
            "cause": "tool_error",
            **({"startedAt": stamp(1)} if begun is None or each <= begun else {}),
        }
        for each in range(1, number)
    ]
    current = {"number": number, "jobName": f"{NAME}-{number}", "jobUID": JOB_UID}
    whole = claimed(
        attempts=[*earlier, current],
        jobName=f"{NAME}-{number}",
        effective={"resultFrom": "terminationMessage", "retry": retry},
        **status,
    )
    return an_agentjob(status=whole, retry=retry, **(spec or {}))


def failed(job: Any, pod: Any, *, number: int = 1, **fields: Any) -> Observed:
    return observed(job, child=a_child(name=f"{NAME}-{number}"), pods=(pod,), **fields)


def follows(plan: Plan) -> bool:
    assert plan.status is not None
    if plan.status.state is State.QUEUED:
        assert plan.status.waiting is not None
        assert plan.status.waiting.code is WaitingCode.RETRY
        assert plan.status.finished_at is None
        assert plan.status.callback is None, "nothing is owed before the end"
        return True
    assert plan.status.state is State.FAILED
    return False


@pytest.mark.parametrize(
    ("pod", "causes", "again"),
    [
        pytest.param(a_pod(ended(3)), ALL, True, id="tool_error"),
        pytest.param(a_pod(ended(3)), ["oom", "disruption"], False, id="tool_error not asked for"),
        pytest.param(a_pod(ended(137, reason="OOMKilled")), ["oom"], True, id="oom_killed"),
        pytest.param(
            a_pod(ended(137, reason="Error")), ["oom"], False, id="137 without proof is no oom"
        ),
        pytest.param(a_pod(ended(143), conditions=PREEMPTED), ["disruption"], True, id="preempted"),
        pytest.param(
            a_pod(ended(143), conditions=PREEMPTED), ["tool_error"], False, id="no tool_error"
        ),
        pytest.param(
            a_pod(ended(137), phase="Failed", reason="Evicted", message="over its limit"),
            ALL,
            False,
            id="evicted for its own limit",
        ),
        pytest.param(
            a_pod(running(), gone=True, conditions=PREEMPTED), ALL, False, id="its end unseen"
        ),
        pytest.param(a_pod(ended(3), deleted_at=20), ALL, False, id="deleted by somebody"),
        pytest.param(
            a_pod(ended(128, reason="StartError", started=None)), ALL, False, id="cannot start"
        ),
    ],
)
def test_r_attempt_the_cause_decides(pod: Any, causes: list[str], *, again: bool) -> None:
    job = retried(spec={"retry": {"maxAttempts": 3, "causes": causes}}, startedAt=stamp(5))
    assert follows(decide(failed(job, pod))) is again


def test_r_attempt_an_unseen_end_is_retried_for_a_tool_that_may_be_repeated() -> None:
    tool = {"uid": "t", "generation": 1, "digest": "d", "repeatable": True}
    job = retried(startedAt=stamp(5), tool=tool)
    assert follows(decide(failed(job, a_pod(running(), gone=True, conditions=PREEMPTED))))


@pytest.mark.parametrize(
    ("number", "begun", "maximum", "again"),
    [
        pytest.param(1, 0, 1, False, id="one is the default"),
        pytest.param(1, 0, 2, True, id="the first of two"),
        pytest.param(2, 1, 2, False, id="the second of two"),
        pytest.param(3, 1, 2, False, id="what never began does not count"),
        pytest.param(3, 1, 3, True, id="what never began leaves room"),
        pytest.param(10, 0, 10, False, id="ten in all"),
    ],
)
def test_r_attempt_never_more_than_max_attempts(
    number: int, begun: int, maximum: int, *, again: bool
) -> None:
    retry = {"maxAttempts": maximum, "causes": ALL}
    job = retried(number=number, begun=begun, spec={"retry": retry})
    assert follows(decide(failed(job, a_pod(ended(3)), number=number))) is again


@pytest.mark.parametrize("ran", [None, True], ids=["never began", "may have begun"])
def test_r_attempt_what_may_have_begun_counts_though_nobody_saw_it_begin(ran: bool | None) -> None:
    job = retried(number=2, begun=0, spec={"retry": {"maxAttempts": 2, "causes": ALL}})
    status = job.status.to_json()
    status["attempts"][0] |= {} if ran is None else {"ran": ran}
    job = an_agentjob(status=status, template=a_template())
    assert follows(decide(failed(job, a_pod(ended(3)), number=2))) is not ran


def test_r_cause_an_earlier_attempt_that_may_have_begun_has_run() -> None:
    status = resting().status.to_json()
    status["attempts"][0] |= {"ran": True, "startedAt": None, "cause": "node_lost"}
    status |= {"startedAt": None}
    job = an_agentjob(status=status, template=a_template(), stop={"reason": "enough"})
    over = decide(observed(job, now=35, **old_child())).status
    assert over is not None
    assert over.cause is not None
    assert (over.state, over.cause.ran) == (State.CANCELLED, True)


@pytest.mark.parametrize(
    ("pod", "ran"),
    [
        pytest.param(a_pod(ended(3)), True, id="it began"),
        pytest.param(
            a_pod(None, phase="Failed", conditions=PREEMPTED, node=""), False, id="it did not"
        ),
    ],
)
def test_r_attempt_the_record_says_whether_the_tool_began(pod: Any, *, ran: bool) -> None:
    plan = decide(failed(retried(), pod))
    assert plan.status is not None
    assert plan.status.attempts
    assert plan.status.attempts[0].ran is ran


@pytest.mark.parametrize(
    ("spec", "fields"),
    [
        pytest.param({"stop": {"reason": "enough"}}, {}, id="after a stop"),
        pytest.param({"deleted": 40}, {}, id="after a deletion"),
        pytest.param({}, {"now": 600}, id="past the deadline"),
    ],
)
def test_r_attempt_none_follows(spec: Json, fields: Json) -> None:
    plan = decide(failed(retried(spec=spec), a_pod(ended(3)), **fields))
    assert plan.status is not None
    assert plan.status.finished_at is not None
    assert len(plan.status.attempts or ()) == 1


def test_r_attempt_what_never_began_waits_again_without_a_rule() -> None:
    """R-ATTEMPT: drained before its tool began; the default of one attempt is about begun ones."""
    job = retried(spec={"retry": {"maxAttempts": 1}})
    drained = a_pod(None, phase="Failed", conditions=PREEMPTED, node="")
    assert follows(decide(failed(job, drained)))


def test_r_attempt_the_end_of_an_attempt_is_on_record() -> None:
    plan = decide(failed(retried(), a_pod(ended(3, started=5, finished=30))))
    assert plan.status is not None
    (attempt,) = plan.status.attempts or ()
    assert (attempt.cause, attempt.started_at, attempt.finished_at) == (
        CauseCode.TOOL_ERROR,
        at(5),
        at(30),
    )
    assert plan.status.started_at == at(5)
    assert plan.actions == (), "the next attempt is claimed by a write of its own"
    assert plan.status.waiting is not None
    assert "exited with 3" in plan.status.waiting.message


def resting(*, cause: str = "tool_error", finished: float = 30, **spec: Any) -> Any:
    """Between the first attempt and the second."""
    retry = {"maxAttempts": 3, "causes": ALL}
    attempt = {
        "number": 1,
        "jobName": JOB_NAME,
        "jobUID": JOB_UID,
        "cause": cause,
        "startedAt": stamp(5),
        "finishedAt": stamp(finished),
    }
    status = claimed(
        attempts=[attempt],
        effective={"resultFrom": "terminationMessage", "retry": retry},
        startedAt=stamp(5),
        waiting={"code": "retry", "message": "attempt 1 ended"},
    )
    return an_agentjob(status=status, retry=retry, **spec)


def old_child() -> Json:
    return {"child": a_child(failed_reason="BackoffLimitExceeded"), "pods": (a_pod(ended(3)),)}


@pytest.mark.parametrize(
    ("cause", "now", "claims"),
    [
        pytest.param("tool_error", 39, False, id="a pause after an error"),
        pytest.param("tool_error", 40, True, id="after the pause"),
        pytest.param("oom_killed", 39, False, id="a pause after memory"),
        pytest.param("preempted", 30, True, id="none after a disruption"),
    ],
)
def test_r_attempt_the_next_is_claimed(cause: str, now: float, *, claims: bool) -> None:
    plan = decide(observed(resting(cause=cause), now=now, **old_child()))
    if not claims:
        assert plan.actions == ()
        assert plan.requeue_at == at(40)
        return
    assert plan.status is not None
    assert [each.job_name for each in plan.status.attempts or ()] == [JOB_NAME, f"{NAME}-2"]
    assert plan.status.job_name == f"{NAME}-2"
    (create,) = plan.actions
    assert isinstance(create, CreateJob)
    assert create.body["metadata"]["name"] == f"{NAME}-2"
    pod = create.body["spec"]["template"]["spec"]
    assert {"name": "AGENTJOBS_ATTEMPT", "value": "2"} in pod["containers"][0]["env"]
    assert pod["activeDeadlineSeconds"] == 600 - now + 15, "the deadline is the job's, not its own"


@pytest.mark.parametrize(
    ("spec", "now", "state", "code"),
    [
        pytest.param(
            {"stop": {"reason": "enough"}}, 35, State.CANCELLED, CauseCode.STOPPED, id="stopped"
        ),
        pytest.param({}, 600, State.TIMED_OUT, CauseCode.DEADLINE_EXCEEDED, id="deadline"),
        pytest.param({"deleted": 32}, 35, State.CANCELLED, CauseCode.STOPPED, id="deleted"),
    ],
)
def test_r_attempt_between_two_the_job_can_be_ended(
    spec: Json, now: float, state: State, code: CauseCode
) -> None:
    plan = decide(observed(resting(**spec), now=now, **old_child()))
    assert plan.status is not None
    assert (plan.status.state, plan.status.cause and plan.status.cause.code) == (state, code)
    assert plan.status.cause is not None
    assert plan.status.cause.ran, "the tool did begin, in an earlier attempt"
    (attempt,) = plan.status.attempts or ()
    assert attempt.cause is CauseCode.TOOL_ERROR, "the attempt keeps its own end"
    assert attempt.finished_at == at(30)


def test_r_tool_a_changed_tool_is_not_run_by_a_later_attempt() -> None:
    tool = a_tool(generation=5)
    resolved = {"uid": tool.metadata.uid, "generation": 4, "digest": "sha256:other"}
    status = {**resting().status.to_json(), "tool": resolved}
    job = an_agentjob(toolRef={"kind": "AgentTool", "name": "indexer"}, status=status)
    plan = decide(observed(job, now=60, tool=tool, **old_child()))
    assert plan.status is not None
    assert plan.status.cause is not None
    assert plan.status.cause.code is CauseCode.INVALID_SPEC
    assert "generation 4" in plan.status.cause.message


def test_r_depends_is_not_asked_again_before_a_later_attempt() -> None:
    """What it waited for has ended, and may be gone by now."""
    job = resting(dependsOn=[{"name": "first"}])
    plan = decide(observed(job, now=60, dependencies=(DependencySeen("first"),), **old_child()))
    assert [type(action) for action in plan.actions] == [CreateJob]


def test_r_cause_the_pod_of_an_earlier_attempt_proves_nothing_of_the_next() -> None:
    status = {**resting(cause="preempted").status.to_json(), "podName": POD_NAME}
    job = an_agentjob(status=status, template=a_template())
    plan = decide(observed(job, now=60, **old_child()))
    assert plan.status is not None
    assert len(plan.status.attempts or ()) == 2
    assert plan.status.pod_name is None


@pytest.mark.parametrize("asked", [False, True], ids=["goes on", "stopped"])
def test_r_attempt_a_job_that_its_queue_would_resume_goes_before_the_next(*, asked: bool) -> None:
    spec = {"stop": {"reason": "enough"}} if asked else {}
    job = resting(cause="preempted", queueName="gpus", **spec)
    child = a_child(queue="gpus", suspended=True, retired=True)
    plan = decide(observed(job, now=60, child=child))
    if asked:
        assert plan.status is not None
        assert plan.status.state is State.CANCELLED, "a deletion that fails does not hold that up"
        return
    assert plan.actions == (DeleteJob(JOB_NAME, JOB_UID),)
    assert plan.status is None
    gone = decide(observed(job, now=60, child=replace(child, deleting=True)))
    assert [type(action) for action in gone.actions] == [CreateJob]


def test_the_start_of_an_earlier_attempt_says_nothing_of_this_one() -> None:
    """The tool of attempt 2 has not begun: a pending deadline still counts for it."""
    job = retried(number=2, begun=1, startedAt=stamp(1))
    status = {**job.status.to_json()}
    status["effective"]["pendingDeadlineSeconds"] = 20
    job = an_agentjob(status=status, template=a_template())
    child = a_child(name=f"{NAME}-2", created=at(40))
    plan = decide(observed(job, now=61, child=child, pods=(a_pod(None, node=""),)))
    assert plan.status is not None
    assert plan.status.ending is not None
    assert plan.status.ending.code is CauseCode.PENDING_DEADLINE_EXCEEDED
