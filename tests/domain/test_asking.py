"""Questions of tools: the state says that one is open, and the operator closes what is left."""

from typing import Any

import pytest

from agentjobs.api.agentjob import AgentJob
from agentjobs.api.inputrequest import Outcome
from agentjobs.api.names import State
from agentjobs.contract.calls import AskReport
from agentjobs.domain.plan import CloseQuestion, Plan
from agentjobs.domain.questions import QuestionView, question_name, question_of
from agentjobs.domain.reconcile import decide
from tests.builders import (
    JOB_UID,
    Json,
    a_child,
    a_pod,
    an_agentjob,
    at,
    claimed,
    ended,
    observed,
    running,
    stamp,
)

NOW = 60


def asked(expires: float = 600, *, closed: bool = False, name: str = "q") -> QuestionView:
    uid = f"{name}-uid"
    return QuestionView(name, uid, "7", "job-uid", expires_at=at(expires), closed=closed)


def decided(*questions: QuestionView, pod: Json | None = None, **more: Any) -> Plan:
    status = claimed(jobUID=JOB_UID, startedAt=stamp(5), state="running", **more.pop("status", {}))
    job = an_agentjob(status=status, **more)
    return decide(
        observed(
            job, now=NOW, child=a_child(), pods=(a_pod(pod or running()),), questions=questions
        )
    )


def closes(plan: Plan) -> dict[str, Outcome]:
    return {each.name: each.outcome for each in plan.actions if isinstance(each, CloseQuestion)}


@pytest.mark.parametrize(
    ("questions", "state"),
    [
        pytest.param((), State.RUNNING, id="none"),
        pytest.param((asked(),), State.INPUT_REQUIRED, id="one is open"),
        pytest.param((asked(closed=True),), State.RUNNING, id="it was answered"),
        pytest.param((asked(closed=True), asked(name="r")), State.INPUT_REQUIRED, id="another"),
        pytest.param((asked(NOW),), State.RUNNING, id="its time is over"),
    ],
)
def test_r_state_derived_a_running_job_with_an_open_question_requires_input(
    questions: tuple[QuestionView, ...], state: State
) -> None:
    plan = decided(*questions)
    assert plan.status is not None
    assert plan.status.state is state
    assert plan.status.waiting is None


@pytest.mark.parametrize(
    ("before", "question", "after"),
    [
        pytest.param("input_required", asked(closed=True), State.RUNNING, id="answered"),
        pytest.param("running", asked(), State.INPUT_REQUIRED, id="asked"),
    ],
)
def test_r_state_derived_a_pod_that_outlives_its_job_is_still_asking_or_not(
    before: str, question: QuestionView, after: State
) -> None:
    status = claimed(jobUID=JOB_UID, startedAt=stamp(5), state=before)
    seen = observed(an_agentjob(status=status), pods=(a_pod(running()),), questions=(question,))
    plan = decide(seen)
    assert plan.status is not None
    assert plan.status.state is after


def test_r_state_derived_a_stop_is_shown_before_a_question() -> None:
    plan = decided(asked(), stop={"reason": "enough"})
    assert plan.status is not None
    assert plan.status.state is State.STOPPING
    assert closes(plan) == {}, "the tool may still wait for it in its last seconds"


def test_r_state_derived_a_tool_that_has_not_begun_asks_nothing() -> None:
    job = an_agentjob(status=claimed(jobUID=JOB_UID))
    plan = decide(observed(job, now=NOW, child=a_child(), pods=(a_pod(),), questions=(asked(),)))
    assert plan.status is not None
    assert plan.status.state is State.QUEUED


def test_r_report_what_has_expired_is_closed_and_the_next_is_waited_for() -> None:
    plan = decided(asked(NOW, name="over"), asked(NOW + 5, name="soon"), asked(NOW + 9))
    assert closes(plan) == {"over": Outcome.EXPIRED}
    assert plan.requeue_at == at(NOW + 5)


def test_r_report_the_end_of_the_job_withdraws_what_is_open() -> None:
    plan = decided(asked(name="open"), asked(closed=True), pod=ended(0, finished=NOW - 1))
    assert plan.status is not None
    assert plan.status.state is State.DONE
    assert closes(plan) == {"open": Outcome.WITHDRAWN}


def test_r_report_one_that_was_asked_just_before_the_end_is_withdrawn_later() -> None:
    status = claimed(jobUID=JOB_UID, startedAt=stamp(5), state="done", finishedAt=stamp(50))
    job = an_agentjob(status=status)
    questions = (asked(name="open"), asked(NOW - 9, name="over"), asked(closed=True))
    plan = decide(observed(job, now=NOW, child=a_child(), questions=questions))
    assert closes(plan) == {"open": Outcome.WITHDRAWN, "over": Outcome.EXPIRED}
    assert plan.status is None


# --- what is made of what a tool asks


def test_r_report_the_same_question_has_the_same_name_and_no_other_has_it() -> None:
    names = [
        question_name("crawl", "uid-1", "k"),
        question_name("crawl", "uid-2", "k"),
        question_name("crawl", "uid-1", "l"),
        question_name("x" * 63, "uid-1", "k"),
    ]
    assert len(set(names)) == len(names)
    assert question_name("crawl", "uid-1", "k") == names[0]
    assert all(len(name) <= 63 for name in names)
    assert names[0].startswith("crawl-")


@pytest.mark.parametrize(
    ("seconds", "deadline", "expires"),
    [
        pytest.param(10, 1000, 70, id="its own time"),
        pytest.param(5000, 1000, 1000, id="not beyond the deadline"),
    ],
)
def test_r_report_a_question_is_open_for_its_time_within_the_jobs(
    seconds: int, deadline: float, expires: float
) -> None:
    job = an_agentjob(requestedBy="agent-a", status={"deadlineAt": stamp(deadline)})
    body = question_of(job, AskReport(key="k", prompt="?", expires_seconds=seconds), at(60))
    assert body["spec"]["expiresAt"] == stamp(expires)
    assert body["spec"]["requestedBy"] == "agent-a"


def stored(job: AgentJob, **status: Any) -> Json:
    body = question_of(job, AskReport(key="k", prompt="?"), at(0))
    body["metadata"] |= {"uid": "q-uid", "resourceVersion": "7"}
    return {**body, "status": status}


def test_r_level_a_question_is_its_jobs_by_the_uid_of_its_owner() -> None:
    job = an_agentjob()
    view = QuestionView.from_json(stored(job))
    assert view.owner_uid == job.metadata.uid
    assert view.is_open(at(599))
    assert not view.is_open(at(600))
    assert not QuestionView.from_json(stored(job, outcome="declined")).is_open(at(1))
    foreign = stored(job)
    foreign["metadata"]["ownerReferences"][0]["uid"] = "another"
    assert QuestionView.from_json(foreign).owner_uid == ""
