"""Jobs that a queue suspends and resumes: a tool that has begun never begins again (R-ATTEMPT)."""

from dataclasses import replace
from typing import Any

import pytest

from agentjobs.api.names import CauseCode, Evidence
from agentjobs.domain.children import JobView
from agentjobs.domain.observed import Observed, ReadPods
from agentjobs.domain.plan import DeleteJob, Deliver, Plan, RetireJob
from agentjobs.domain.pods import PodView
from agentjobs.domain.reconcile import decide
from tests.builders import (
    JOB_NAME,
    JOB_UID,
    POD_NAME,
    Json,
    a_child,
    a_pod,
    an_agentjob,
    claimed,
    ended,
    job_json,
    observed,
    running,
    stamp,
    waiting,
)

STOPPED = {"code": "stopped", "message": "stopped on request", "at": stamp(50)}
BEGUN = {"number": 1, "jobName": JOB_NAME, "jobUID": JOB_UID, "startedAt": stamp(5)}


def held(**child: Any) -> JobView:
    """A Job that a queue holds, as of version 7."""
    return a_child(**{"queue": "gpus", "version": "7"} | child)


def seen(pods: tuple[PodView, ...], child: JobView, *, now: float = 60, **status: Any) -> Observed:
    spec: Json = {"stop": {"reason": "enough"}} if "ending" in status else {}
    job = an_agentjob(queueName="gpus", status=claimed(jobUID=JOB_UID, **status), **spec)
    return observed(job, child=child, pods=pods, now=now)


def retired(plan: Plan) -> bool:
    """Whether the Job is kept from making pods, and nothing is on record as over yet."""
    over = plan.status is not None and plan.status.finished_at is not None
    retires = RetireJob(JOB_NAME, JOB_UID, "7") in plan.actions
    assert not (over and retires)
    return retires


@pytest.mark.parametrize(
    ("pod", "child", "retires"),
    [
        pytest.param(a_pod(running()), held(), False, id="it runs"),
        pytest.param(a_pod(running()), held(suspended=True), True, id="its place is taken back"),
        pytest.param(
            a_pod(running(), deleted_at=52), held(), True, id="and given again before it has ended"
        ),
        pytest.param(
            a_pod(running(), deleted_at=52, tracked=True),
            held(),
            False,
            id="somebody else deletes the pod, which the Job will count",
        ),
        pytest.param(
            a_pod(running(), deleted_at=52), held(active=1), False, id="it has begun again by now"
        ),
        pytest.param(a_pod(waiting()), held(suspended=True), False, id="it has not begun"),
        pytest.param(
            a_pod(running()), held(suspended=True, retired=True), False, id="that was done"
        ),
        pytest.param(a_pod(running()), held(retired=True), True, id="and was undone by half"),
        pytest.param(
            a_pod(running()), held(suspended=True, deleting=True), False, id="the Job goes"
        ),
        pytest.param(
            a_pod(running()), a_child(suspended=True), False, id="no queue would resume it"
        ),
    ],
)
def test_r_attempt_a_job_is_retired_as_soon_as_its_place_is_taken(
    pod: PodView, child: JobView, *, retires: bool
) -> None:
    """Not only once its pod is dead: resumed meanwhile it would make another one at once."""
    assert retired(decide(seen((pod,), child))) is retires


@pytest.mark.parametrize(
    ("pod", "child", "retires"),
    [
        pytest.param(a_pod(ended(3), tracked=True), held(), False, id="the Job will count it"),
        pytest.param(a_pod(ended(3)), held(failed=1), False, id="the Job has counted it"),
        pytest.param(a_pod(ended(3)), held(), True, id="the Job did not count it"),
        pytest.param(a_pod(running(), gone=True), held(), True, id="nobody saw it end"),
        pytest.param(
            a_pod(None, gone=True), held(suspended=True), True, id="it may have begun unseen"
        ),
    ],
)
@pytest.mark.parametrize("ending", [None, STOPPED], ids=["by itself", "stopped"])
def test_r_attempt_no_end_is_written_of_what_its_queue_may_resume(
    pod: PodView, child: JobView, ending: Json | None, *, retires: bool
) -> None:
    plan = decide(seen((pod,), child, **({"ending": ending} if ending else {})))
    assert retired(plan) is retires
    assert (plan.status is not None and plan.status.finished_at is not None) is not retires


@pytest.mark.parametrize(
    "record", [{"attempts": [BEGUN]}, {"podName": POD_NAME}], ids=["had begun", "had a pod"]
)
def test_r_attempt_what_ended_while_nobody_watched_does_not_begin_again(record: Json) -> None:
    """A new leader finds the Job suspended and no pod: the record tells that there was one."""
    assert retired(decide(seen((), held(suspended=True), **record)))
    over = held(suspended=True, retired=True, halted=True)
    plan = decide(seen((), over, **record))
    assert plan.status is not None
    cause = plan.status.cause
    assert cause is not None
    assert (cause.code, cause.ran, cause.evidence) == (CauseCode.PREEMPTED, True, Evidence.LOST)


def test_r_attempt_a_pod_that_the_watch_has_not_shown_is_looked_for() -> None:
    """The queue was quicker than we: the tool has begun again, and is not ended for that."""
    dead, runs = a_pod(ended(143), deleted_at=52), a_pod(running(since=55), uid="p2")
    resumed = seen((dead,), held(active=1))
    assert decide(replace(resumed, pods_listed=False)).need == ReadPods()
    plan = decide(replace(resumed, pods=(dead, runs)))
    assert not plan.actions
    assert plan.status is not None
    assert plan.status.finished_at is None


def test_r_attempt_after_a_retirement_the_pods_are_listed_before_anything_is_judged() -> None:
    child = held(suspended=True, retired=True, halted=True)
    listed = seen((a_pod(ended(143), deleted_at=52),), child)
    assert decide(replace(listed, pods_listed=False)).need == ReadPods()
    assert decide(listed).status is not None


def test_r_attempt_a_pod_that_proved_nothing_leaves_the_record() -> None:
    """Otherwise the next leader would take it for one whose tool may have begun."""
    pod = a_pod(waiting(), deleted_at=52, gone=True, phase="Failed")
    plan = decide(seen((pod,), held(suspended=True), podName=POD_NAME))
    assert plan.status is not None
    assert plan.status.pod_name is None
    assert plan.status.finished_at is None


def test_r_cause_who_waits_in_a_queue_is_told_in_which() -> None:
    plan = decide(seen((), held(suspended=True)))
    assert plan.status is not None
    assert plan.status.waiting is not None
    assert plan.status.waiting.code == "kueue"
    assert "LocalQueue gpus" in plan.status.waiting.message


def over(**status: Any) -> Any:
    """A job that failed and owes an event."""
    owed = {"id": "evt_1", "type": "job_completed", "time": stamp(55)}
    cause = {"code": "preempted", "retryable": True, "ran": True}
    whole = claimed(
        state="failed", finishedAt=stamp(55), cause=cause, callback={"deliveries": [owed]}
    )
    return an_agentjob(queueName="gpus", status=whole | status)


@pytest.mark.parametrize("suspended", [True, False], ids=["waits in it", "admitted"])
def test_r_claim_a_placeholder_stays_though_a_default_queue_has_taken_it_in(
    *, suspended: bool
) -> None:
    never = {"cause": {"code": "stopped", "retryable": False, "ran": False}}
    child = held(suspended=suspended, placeholder=True)
    assert decide(observed(over(**never), child=child, now=60)).actions == (Deliver("evt_1"),)


@pytest.mark.parametrize(
    ("child", "deleted"),
    [
        pytest.param(held(suspended=True, retired=True), True, id="retired"),
        pytest.param(held(suspended=True), True, id="suspended after its end"),
        pytest.param(held(failed_reason="BackoffLimitExceeded"), False, id="over"),
        pytest.param(held(suspended=True, deleting=True), False, id="it goes already"),
        pytest.param(held(), False, id="about to be counted"),
        pytest.param(a_child(suspended=True), False, id="no queue counts it"),
    ],
)
def test_what_a_queue_would_go_on_counting_is_deleted_after_the_end(
    child: JobView, *, deleted: bool
) -> None:
    plan = decide(observed(over(), child=child, now=60))
    assert (DeleteJob(JOB_NAME, JOB_UID) in plan.actions) is deleted
    assert Deliver("evt_1") in plan.actions, "and nobody waits for that"
    if deleted:
        assert plan.requeue_at, "a deletion that was lost is asked for again"


def test_r_claim_a_job_that_comes_after_the_end_and_that_a_queue_would_resume_is_deleted() -> None:
    never = {"cause": {"code": "stopped", "retryable": False, "ran": False}}
    plan = decide(observed(over(**never), child=held(), now=60))
    assert DeleteJob(JOB_NAME, JOB_UID) in plan.actions


@pytest.mark.parametrize(
    ("annotations", "parallelism", "is_retired"),
    [
        pytest.param({"agentjobs.dev/retired": "true"}, 0, True, id="by us"),
        pytest.param({}, 0, False, id="its template wants no pods"),
        pytest.param({"agentjobs.dev/retired": "true"}, 1, False, id="somebody has undone it"),
    ],
)
def test_r_attempt_a_job_is_retired_by_us_alone(
    annotations: Json, parallelism: int, *, is_retired: bool
) -> None:
    child = JobView.from_json(job_json(annotations=annotations, spec={"parallelism": parallelism}))
    assert child.retired is is_retired
    assert child.single is (is_retired or parallelism == 1)


@pytest.mark.parametrize(
    ("record", "ran"), [({"podName": POD_NAME}, True), ({}, False)], ids=["had a pod", "had none"]
)
def test_r_cause_a_pod_on_record_may_have_run_though_nobody_knows_it(
    record: Json, *, ran: bool
) -> None:
    """Its Job was deleted to end it, by a leader that has not seen it from the beginning."""
    waits = seen((), held(), ending=STOPPED, **record)
    plan = decide(replace(waits, child=None, child_seen=True))
    assert plan.status is not None
    assert plan.status.cause is not None
    assert (plan.status.cause.code, plan.status.cause.ran) == (CauseCode.STOPPED, ran)
