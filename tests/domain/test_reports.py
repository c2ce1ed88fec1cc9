"""What a tool reports about itself, and what the verdict makes of it (R-REPORT, R-HONEST)."""

from typing import Any

import pytest

from agentjobs.api.names import State
from agentjobs.domain.observed import Policy
from agentjobs.domain.plan import CreateJob
from agentjobs.domain.reconcile import decide
from tests.builders import (
    JOB_UID,
    Json,
    a_child,
    a_pod,
    an_agentjob,
    claimed,
    ended,
    observed,
    stamp,
)

RESULT = {"source": "report", "text": '{"summary": "3 of 4"}', "bytes": 21}


def stopped(result: Json | None, exit_code: int) -> Any:
    """A tool that was asked to go at 50 and left at 55."""
    status = claimed(
        jobUID=JOB_UID,
        startedAt=stamp(5),
        ending={"code": "stopped", "message": "enough", "at": stamp(50)},
        effective={"resultFrom": "report"},
        **({"result": result} if result else {}),
    )
    job = an_agentjob(status=status, stop={"reason": "enough"})
    pod = a_pod(ended(exit_code, finished=55), reason="DeadlineExceeded", active_deadline=1)
    return decide(observed(job, child=a_child(), pods=(pod,))).status


@pytest.mark.parametrize(
    ("result", "exit_code", "state"),
    [
        pytest.param(None, 0, State.CANCELLED, id="tidying up with exit 0 is cancelled"),
        pytest.param(RESULT, 0, State.DONE, id="a result that was handed in is done"),
        pytest.param(RESULT, 143, State.CANCELLED, id="but not with another exit code"),
    ],
)
def test_r_honest_a_stop_after_the_result_was_handed_in(
    result: Json | None, exit_code: int, state: State
) -> None:
    assert stopped(result, exit_code).state is state


def test_r_report_the_result_is_kept_and_summed_up_at_the_end() -> None:
    status = stopped(RESULT, 0)
    assert status.result.text == RESULT["text"]
    assert status.summary == "3 of 4"


def test_r_report_a_summary_of_its_own_stays_where_the_result_has_none() -> None:
    status = claimed(
        jobUID=JOB_UID,
        startedAt=stamp(5),
        effective={"resultFrom": "report"},
        summary="as I said",
    )
    pod = a_pod(ended(0))
    plan = decide(observed(an_agentjob(status=status), child=a_child(), pods=(pod,)))
    assert plan.status is not None
    assert (plan.status.summary, plan.status.result) == ("as I said", None)


def test_r_report_what_an_attempt_reported_is_not_the_next_ones() -> None:
    retry = {"maxAttempts": 2, "causes": ["tool_error"]}
    attempt = {
        "number": 1,
        "jobName": "nightly-index-1",
        "jobUID": JOB_UID,
        "cause": "tool_error",
        "startedAt": stamp(5),
        "finishedAt": stamp(30),
    }
    status = claimed(
        attempts=[attempt],
        effective={"resultFrom": "report", "retry": retry},
        result=RESULT,
        summary="half",
        progress={"percent": 50},
        startedAt=stamp(5),
    )
    plan = decide(observed(an_agentjob(status=status, retry=retry), now=60))
    assert plan.status is not None
    assert len(plan.status.attempts or ()) == 2
    assert (plan.status.result, plan.status.summary, plan.status.progress) == (None, None, None)


def test_r_report_a_tool_is_told_where_to_report() -> None:
    policy = Policy(gateway_url="https://gateway.example.com/")
    (create,) = decide(observed(now=1, policy=policy)).actions
    assert isinstance(create, CreateJob)
    env = create.body["spec"]["template"]["spec"]["containers"][0]["env"]
    where = {"name": "AGENTJOBS_REPORT_URL", "value": "https://gateway.example.com/v1/report"}
    assert where in env
