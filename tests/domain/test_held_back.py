"""A job that is suspended after its Job was made: another attempt may follow (R-ATTEMPT)."""

from dataclasses import replace
from typing import Any

import pytest

from agentjobs.api.names import Evidence, State, WaitingCode
from agentjobs.domain.children import JobView
from agentjobs.domain.mirror import with_status
from agentjobs.domain.observed import Observed, ReadPods
from agentjobs.domain.plan import CreateJob, Plan, RetireJob
from agentjobs.domain.pods import PodView
from agentjobs.domain.reconcile import decide
from tests.builders import (
    JOB_NAME,
    JOB_UID,
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

REPEATABLE = {"uid": "t1", "generation": 1, "digest": "sha256:0", "repeatable": True}
BEGUN = {"number": 1, "jobName": JOB_NAME, "jobUID": JOB_UID, "startedAt": stamp(5)}


def seen(
    child: JobView | None, pods: tuple[PodView, ...] = (), spec: Any = None, **status: Any
) -> Observed:
    job = an_agentjob(status=claimed(jobUID=JOB_UID, **status), **{"suspend": True} | (spec or {}))
    return observed(job, child=child, pods=pods, now=60, pods_listed=True)


def retirement(plan: Plan) -> str:
    """Why the Job is kept from making pods; nothing where it is not."""
    found = [action.why for action in plan.actions if isinstance(action, RetireJob)]
    return found[0] if found else ""


def of_the_attempt(plan: Plan) -> str:
    """The state that is written, and the cause of the attempt that has ended."""
    assert plan.status is not None
    assert plan.status.attempts is not None
    return f"{plan.status.state} {plan.status.attempts[-1].cause or ''}".strip()


@pytest.mark.parametrize(
    ("child", "pods", "status", "why"),
    [
        pytest.param({}, (a_pod(waiting()),), {}, "suspended", id="its pod waits"),
        pytest.param({}, (), {}, "suspended", id="its pod may be on its way"),
        pytest.param(
            {"queue": "gpus", "suspended": True, "halted": True},
            (),
            {},
            "suspended-before-it-began",
            id="it waits in a queue",
        ),
        pytest.param({}, (a_pod(running()),), {}, "", id="it has begun, and may begin once"),
        pytest.param(
            {}, (a_pod(running()),), {"tool": REPEATABLE}, "suspended", id="it may be repeated"
        ),
        pytest.param({"complete": True}, (), {}, "", id="it is over"),
        pytest.param({"deleting": True}, (), {}, "", id="it goes"),
    ],
)
def test_r_attempt_a_suspension_ends_what_has_not_begun_or_may_begin_again(
    child: dict[str, Any], pods: tuple[PodView, ...], status: dict[str, Any], why: str
) -> None:
    assert retirement(decide(seen(a_child(**child), pods, **status))) == why


def test_r_attempt_what_was_held_back_before_it_began_stays_so_whoever_resumes_it() -> None:
    child = a_child(queue="gpus", retired=True, held_back=True, unbegun=True)
    assert retirement(decide(seen(child))) == "suspended-before-it-began"


def held_back(**child: Any) -> JobView:
    fields = {"suspended": True, "halted": True, "retired": True, "held_back": True}
    return a_child(**fields | child)


NEVER = a_pod(waiting(), deleted_at=52, gone=True, phase="Failed")
KILLED = a_pod(ended(143, finished=58), deleted_at=52, gone=True)


@pytest.mark.parametrize(
    ("child", "pods", "status", "told"),
    [
        pytest.param({}, (NEVER,), {}, "queued preempted", id="it had not begun"),
        pytest.param({"unbegun": True}, (), {}, "queued preempted", id="it had no pod"),
        pytest.param(
            {}, (KILLED,), {"tool": REPEATABLE}, "queued preempted", id="it may be repeated"
        ),
        pytest.param({}, (KILLED,), {}, "failed preempted", id="it began in that moment"),
        pytest.param({}, (), {}, "failed preempted", id="nobody knows whether it began"),
        pytest.param(
            {}, (a_pod(ended(0), deleted_at=52, gone=True),), {}, "done", id="it was over before"
        ),
    ],
)
def test_r_attempt_another_attempt_follows_where_it_may(
    child: dict[str, Any], pods: tuple[PodView, ...], status: dict[str, Any], told: str
) -> None:
    assert of_the_attempt(decide(seen(held_back(**child), pods, **status))) == told


def test_r_cause_who_watched_it_from_the_beginning_knows_that_it_had_no_pod() -> None:
    watched = replace(seen(held_back()), child_seen=True)
    assert of_the_attempt(decide(watched)) == "queued preempted"
    unwatched = decide(seen(held_back())).status
    assert unwatched is not None
    assert unwatched.cause is not None
    assert (unwatched.cause.ran, unwatched.cause.evidence) == (True, Evidence.LOST)
    assert "suspended on request" in unwatched.cause.message


def test_r_dead_nothing_is_judged_before_its_pods_are_dead_and_listed() -> None:
    going = decide(seen(held_back(), (a_pod(running(), deleted_at=52),), tool=REPEATABLE))
    assert going.status is not None
    assert going.status.state is State.QUEUED
    assert going.status.waiting is not None
    assert going.status.waiting.code is WaitingCode.SUSPENDED
    unlisted = replace(seen(held_back(), (NEVER,)), pods_listed=False)
    assert decide(unlisted).need == ReadPods()


def test_r_attempt_the_next_one_begins_when_the_suspension_is_lifted() -> None:
    over = {"number": 1, "jobName": JOB_NAME, "jobUID": JOB_UID, "cause": "preempted"}
    waits = decide(seen(held_back(), attempts=[over]))
    assert waits.status is not None
    assert waits.status.waiting is not None
    assert waits.status.waiting.code is WaitingCode.SUSPENDED
    assert not [action for action in waits.actions if isinstance(action, CreateJob)]
    (action,) = decide(seen(held_back(), spec={"suspend": False}, attempts=[over])).actions
    assert isinstance(action, CreateJob)
    assert action.body["metadata"]["name"] == JOB_NAME.removesuffix("1") + "2"


def test_r_claim_a_claim_whose_job_was_never_seen_waits_too() -> None:
    job = an_agentjob(suspend=True, status=claimed())
    plan = decide(observed(job, now=60))
    assert not plan.actions
    assert plan.status is not None
    assert plan.status.waiting is not None
    assert plan.status.waiting.code is WaitingCode.SUSPENDED


@pytest.mark.parametrize(
    ("spec", "end"),
    [
        pytest.param({"stop": {"at": stamp(50)}}, "cancelled stopped", id="a stop"),
        pytest.param({"deadlineSeconds": 55}, "timed_out deadline_exceeded", id="its deadline"),
    ],
)
def test_r_honest_what_ends_a_job_that_is_held_back_is_not_its_suspension(
    spec: dict[str, Any], end: str
) -> None:
    ending = seen(held_back(), (NEVER,), spec=spec)
    attempt_over = decide(ending).status
    assert attempt_over is not None
    assert attempt_over.finished_at is None
    status = decide(with_status(ending, attempt_over)).status
    assert status is not None
    assert status.cause is not None
    assert f"{status.state} {status.cause.code}" == end
    assert status.cause.ran is False


@pytest.mark.parametrize(
    ("why", "held", "unbegun"),
    [("true", False, False), ("suspended", True, False), ("suspended-before-it-began", True, True)],
)
def test_r_attempt_why_a_job_was_retired_is_read_back(
    why: str, *, held: bool, unbegun: bool
) -> None:
    body = job_json(annotations={"agentjobs.dev/retired": why}, spec={"parallelism": 0})
    child = JobView.from_json(body)
    assert (child.retired, child.held_back, child.unbegun) == (True, held, unbegun)
