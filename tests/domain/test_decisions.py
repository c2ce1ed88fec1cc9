"""The decision for every pair of what was asked and what is seen (R-STOP, R-DEADLINE, R-HONEST)."""

from dataclasses import replace
from typing import Any

import pytest

from agentjobs.domain.observed import ReadPods
from agentjobs.domain.plan import CreateJob, ExpirePod, SuspendJob
from agentjobs.domain.pods import PodView
from agentjobs.domain.reconcile import decide
from tests.builders import (
    JOB_NAME,
    POD_NAME,
    POD_UID,
    a_child,
    a_pod,
    a_template,
    an_agentjob,
    at,
    claimed,
    ended,
    observed,
    running,
    stamp,
    waiting,
)
from tests.domain.situations import ASKED, SEEN, situation, told

DECISIONS: dict[str, dict[str, str]] = {
    "unclaimed": {
        "nothing": "queued (creating) | CreateJob",
        "stop": "cancelled stopped unstarted",
        "kubectl delete": "cancelled stopped unstarted",
        "deadline": "timed_out deadline_exceeded unstarted",
        "pending deadline": "queued (creating) | CreateJob",
        "stop then deadline": "cancelled stopped unstarted",
        "deadline then stop": "timed_out deadline_exceeded unstarted",
        "declined": "cancelled declined unstarted",
    },
    "claimed, Job unseen": {
        "nothing": "queued | CreateJob",
        "stop": "stopping | CreateJob",
        "kubectl delete": "stopping | CreateJob",
        "deadline": "stopping | CreateJob",
        "pending deadline": "queued | CreateJob",
        "stop then deadline": "stopping | CreateJob",
        "deadline then stop": "stopping | CreateJob",
        "declined": "stopping | CreateJob",
    },
    "Job without pod": {
        "nothing": "queued (creating)",
        "stop": "stopping | SuspendJob",
        "kubectl delete": "stopping | SuspendJob",
        "deadline": "stopping | SuspendJob",
        "pending deadline": "stopping | SuspendJob",
        "stop then deadline": "stopping | SuspendJob",
        "deadline then stop": "stopping | SuspendJob",
        "declined": "stopping | SuspendJob",
    },
    "pod pending": {
        "nothing": "queued (creating)",
        "stop": "stopping | SuspendJob",
        "kubectl delete": "stopping | SuspendJob",
        "deadline": "stopping | SuspendJob",
        "pending deadline": "stopping | SuspendJob",
        "stop then deadline": "stopping | SuspendJob",
        "deadline then stop": "stopping | SuspendJob",
        "declined": "stopping | SuspendJob",
    },
    "unschedulable": {
        "nothing": "queued (unschedulable)",
        "stop": "stopping | SuspendJob",
        "kubectl delete": "stopping | SuspendJob",
        "deadline": "stopping | SuspendJob",
        "pending deadline": "stopping | SuspendJob",
        "stop then deadline": "stopping | SuspendJob",
        "deadline then stop": "stopping | SuspendJob",
        "declined": "stopping | SuspendJob",
    },
    "pulling": {
        "nothing": "queued (image_pull)",
        "stop": "stopping | SuspendJob",
        "kubectl delete": "stopping | SuspendJob",
        "deadline": "stopping | SuspendJob",
        "pending deadline": "stopping | SuspendJob",
        "stop then deadline": "stopping | SuspendJob",
        "deadline then stop": "stopping | SuspendJob",
        "declined": "stopping | SuspendJob",
    },
    "running": {
        "nothing": "running",
        "stop": "stopping | ExpirePod",
        "kubectl delete": "stopping | ExpirePod",
        "deadline": "stopping | ExpirePod",
        "pending deadline": "running",
        "stop then deadline": "stopping | ExpirePod",
        "deadline then stop": "stopping | ExpirePod",
        "declined": "stopping | ExpirePod",
    },
    "tool ended, other lingers": {
        "nothing": "running",
        "stop": "stopping | ExpirePod",
        "kubectl delete": "stopping | ExpirePod",
        "deadline": "stopping | ExpirePod",
        "pending deadline": "running",
        "stop then deadline": "stopping | ExpirePod",
        "deadline then stop": "stopping | ExpirePod",
        "declined": "stopping | ExpirePod",
    },
    "succeeded before the signal": {
        "nothing": "done",
        "stop": "done",
        "kubectl delete": "done",
        "deadline": "done",
        "pending deadline": "done",
        "stop then deadline": "done",
        "deadline then stop": "done",
        "declined": "done",
    },
    "ended by signal, exit 0": {
        "nothing": "timed_out deadline_exceeded ran",
        "stop": "cancelled stopped ran",
        "kubectl delete": "cancelled stopped ran",
        "deadline": "timed_out deadline_exceeded ran",
        "pending deadline": "timed_out pending_deadline_exceeded ran",
        "stop then deadline": "cancelled stopped ran",
        "deadline then stop": "timed_out deadline_exceeded ran",
        "declined": "cancelled declined ran",
    },
    "ended by signal, exit 143": {
        "nothing": "timed_out deadline_exceeded ran exit=143",
        "stop": "cancelled stopped ran exit=143",
        "kubectl delete": "cancelled stopped ran exit=143",
        "deadline": "timed_out deadline_exceeded ran exit=143",
        "pending deadline": "timed_out pending_deadline_exceeded ran exit=143",
        "stop then deadline": "cancelled stopped ran exit=143",
        "deadline then stop": "timed_out deadline_exceeded ran exit=143",
        "declined": "cancelled declined ran exit=143",
    },
    "ended by signal, exit 137": {
        "nothing": "timed_out deadline_exceeded ran forced exit=137",
        "stop": "cancelled stopped ran forced exit=137",
        "kubectl delete": "cancelled stopped ran forced exit=137",
        "deadline": "timed_out deadline_exceeded ran forced exit=137",
        "pending deadline": "timed_out pending_deadline_exceeded ran forced exit=137",
        "stop then deadline": "cancelled stopped ran forced exit=137",
        "deadline then stop": "timed_out deadline_exceeded ran forced exit=137",
        "declined": "cancelled declined ran forced exit=137",
    },
    "ended by deletion": {
        "nothing": "failed deleted_externally ran exit=143",
        "stop": "cancelled stopped ran exit=143",
        "kubectl delete": "cancelled stopped ran exit=143",
        "deadline": "timed_out deadline_exceeded ran exit=143",
        "pending deadline": "timed_out pending_deadline_exceeded ran exit=143",
        "stop then deadline": "cancelled stopped ran exit=143",
        "deadline then stop": "timed_out deadline_exceeded ran exit=143",
        "declined": "cancelled declined ran exit=143",
    },
    "pod gone, end unseen": {
        "nothing": "failed deleted_externally ran lost",
        "stop": "cancelled stopped ran lost",
        "kubectl delete": "cancelled stopped ran lost",
        "deadline": "timed_out deadline_exceeded ran lost",
        "pending deadline": "timed_out pending_deadline_exceeded ran lost",
        "stop then deadline": "cancelled stopped ran lost",
        "deadline then stop": "timed_out deadline_exceeded ran lost",
        "declined": "cancelled declined ran lost",
    },
    "Job gone": {
        "nothing": "failed deleted_externally ran lost",
        "stop": "cancelled stopped ran lost",
        "kubectl delete": "cancelled stopped ran lost",
        "deadline": "timed_out deadline_exceeded ran lost",
        "pending deadline": "timed_out pending_deadline_exceeded ran lost",
        "stop then deadline": "cancelled stopped ran lost",
        "deadline then stop": "timed_out deadline_exceeded ran lost",
        "declined": "cancelled declined ran lost",
    },
    "Job halted, no pod left": {
        "nothing": "queued (suspended)",
        "stop": "cancelled stopped unstarted",
        "kubectl delete": "cancelled stopped unstarted",
        "deadline": "timed_out deadline_exceeded unstarted",
        "pending deadline": "timed_out pending_deadline_exceeded unstarted",
        "stop then deadline": "cancelled stopped unstarted",
        "deadline then stop": "timed_out deadline_exceeded unstarted",
        "declined": "cancelled declined unstarted",
    },
    "already over": {
        "nothing": "-",
        "stop": "-",
        "kubectl delete": "- | RemoveFinalizer",
        "deadline": "-",
        "pending deadline": "-",
        "stop then deadline": "-",
        "deadline then stop": "-",
        "declined": "-",
    },
}
PAIRS = [(seen, asked) for seen, row in DECISIONS.items() for asked in row]


def test_no_pair_is_missing() -> None:
    assert DECISIONS.keys() == SEEN.keys()
    assert all(row.keys() == ASKED.keys() for row in DECISIONS.values())


@pytest.mark.parametrize(("seen", "asked"), PAIRS, ids=[f"{s} / {a}" for s, a in PAIRS])
def test_r_stop_r_deadline_every_pair_has_its_decision(seen: str, asked: str) -> None:
    assert told(decide(situation(ASKED[asked], SEEN[seen]()))) == DECISIONS[seen][asked]


def test_r_claim_a_claimed_attempt_is_ended_by_taking_its_name() -> None:
    plan = decide(situation(ASKED["stop"], SEEN["claimed, Job unseen"]()))
    (action,) = plan.actions
    assert isinstance(action, CreateJob)
    assert action.body["metadata"]["name"] == JOB_NAME
    assert action.body["metadata"]["annotations"] == {"agentjobs.dev/placeholder": "true"}
    assert action.body["spec"]["suspend"] is True
    assert "kueue.x-k8s.io/queue-name" not in action.body["metadata"]["labels"]


def test_r_claim_the_placeholder_once_seen_ends_the_job() -> None:
    job = an_agentjob(stop={"at": stamp(40)}, status=claimed())
    plan = decide(observed(job, child=a_child(placeholder=True, suspended=True, halted=True)))
    assert told(plan) == "cancelled stopped unstarted"


def test_r_claim_the_claim_is_written_before_the_job_is_created() -> None:
    plan = decide(observed(an_agentjob()))
    assert plan.status is not None
    assert plan.status.attempts is not None
    assert plan.status.attempts[0].job_name == JOB_NAME
    (action,) = plan.actions
    assert isinstance(action, CreateJob)
    assert action.body["metadata"]["name"] == JOB_NAME


@pytest.mark.parametrize(
    ("owner", "expected"),
    [
        pytest.param("AgentJob nightly-index", "queued (creating)", id="an earlier uid: waits"),
        pytest.param("CronJob sweeper", "failed invalid_spec unstarted", id="another owner: ends"),
        pytest.param("", "failed invalid_spec unstarted", id="nobody: ends"),
    ],
)
def test_r_attempt_a_name_that_is_taken(owner: str, expected: str) -> None:
    child = a_child(owner_uid="another", owner=owner)
    plan = decide(observed(an_agentjob(status=claimed()), child=child))
    assert told(plan) == expected


def test_r_dead_a_foreign_job_does_not_end_the_job_while_its_own_pod_runs() -> None:
    job = an_agentjob(status=claimed(jobUID="j1"), stop={"at": stamp(40)})
    foreign = a_child(uid="j9", owner_uid="another", owner="")
    plan = decide(observed(job, child=foreign, pods=(a_pod(running()),)))
    assert told(plan) == "stopping | ExpirePod"


@pytest.mark.parametrize("asked", ["nothing", "stop", "deadline", "kubectl delete"])
def test_r_level_a_pod_that_outlives_its_job_wakes_nobody_at_once(asked: str) -> None:
    seen = SEEN["running"]()
    world = situation(ASKED[asked], type(seen)(None, seen.pods, acted=True))
    plan = decide(world)
    assert plan.requeue_at is None or plan.requeue_at > world.now
    assert told(plan).endswith("ExpirePod") is (asked != "nothing")


def test_r_attempt_a_job_that_vanished_is_not_created_again_and_keeps_its_uid_on_record() -> None:
    gone = an_agentjob(status=claimed(jobUID="j1"))
    assert decide(observed(gone, pods_listed=False)).need == ReadPods()
    plan = decide(observed(gone))
    assert told(plan) == "failed deleted_externally ran lost"
    seen_without_pods = decide(observed(gone, child_seen=True))
    assert told(seen_without_pods) == "failed deleted_externally unstarted"
    assert plan.status is not None
    assert plan.status.attempts is not None
    assert plan.status.attempts[0].job_uid == "j1"


def test_r_stop_a_running_pod_is_expired_and_nothing_is_written_twice() -> None:
    plan = decide(situation(ASKED["stop"], SEEN["running"]()))
    assert plan.actions == (ExpirePod(POD_NAME, POD_UID),)
    assert plan.status is not None
    assert plan.status.ending is not None
    assert plan.status.ending.message == "stopped by ada: wrong branch"
    again = an_agentjob(status=plan.status.to_json(), **ASKED["stop"].spec)
    asked = a_pod(running(), active_deadline=1)
    second = decide(observed(again, now=62, child=a_child(), pods=(asked,)))
    assert (second.actions, second.status) == ((), None)


@pytest.mark.parametrize(
    ("child", "expected"),
    [
        pytest.param({"single": False}, "stopping | SuspendJob", id="it could be replaced"),
        pytest.param({"queue": "gpus", "single": False}, "stopping | DeleteJob", id="it is queued"),
        pytest.param({"single": False, "suspended": True}, "stopping", id="suspended already"),
        pytest.param({"deleting": True}, "stopping", id="its Job goes already"),
        pytest.param({}, "stopping | ExpirePod", id="no other pod can follow"),
    ],
)
def test_r_stop_the_way_depends_on_whether_a_pod_could_follow(
    child: dict[str, Any], expected: str
) -> None:
    job = an_agentjob(stop={"at": stamp(40)}, status=claimed(jobUID="j1"))
    plan = decide(observed(job, child=a_child(**child), pods=(a_pod(running()),)))
    assert told(plan) == expected


def test_r_stop_a_pod_that_is_being_deleted_is_left_its_grace_period() -> None:
    job = an_agentjob(stop={"at": stamp(40)}, status=claimed(jobUID="j1"))
    pod = a_pod(running(), deleted_at=45, grace=300)
    assert told(decide(observed(job, child=a_child(), pods=(pod,)))) == "stopping"


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        pytest.param(64, "running", id="before the linger time: waits"),
        pytest.param(65, "running | ExpirePod", id="after it: the pod is ended"),
    ],
)
def test_r_container_others_may_outlive_the_tool_for_a_while(now: float, expected: str) -> None:
    pod = a_pod(ended(0, finished=35), others={"helper": running()})
    job = an_agentjob(status=claimed(jobUID="j1"))
    plan = decide(observed(job, now=now, child=a_child(), pods=(pod,)))
    assert told(plan) == expected
    assert plan.requeue_at == at(65 if now < 65 else 600)


@pytest.mark.parametrize(
    ("spec", "now", "expected"),
    [
        pytest.param(
            {"pendingDeadlineSeconds": 45, "stop": {"at": stamp(55)}},
            60,
            "pending_deadline_exceeded",
            id="the pending deadline passed before the stop",
        ),
        pytest.param(
            {"pendingDeadlineSeconds": 45, "stop": {"at": stamp(40)}},
            60,
            "stopped",
            id="the stop came before the pending deadline",
        ),
        pytest.param(
            {"pendingDeadlineSeconds": 45, "deadlineSeconds": 50},
            60,
            "pending_deadline_exceeded",
            id="the pending deadline passed before the deadline",
        ),
        pytest.param({"stop": {}}, 60, "stopped", id="a stop without a time counts as the first"),
        pytest.param(
            {"stop": {"at": stamp(5000)}}, 60, "stopped", id="a stop by a clock that is ahead"
        ),
        pytest.param(
            {"deadlineSeconds": 50}, 50, "deadline_exceeded", id="exactly at the deadline"
        ),
        pytest.param({"deadlineSeconds": 50}, 49.9, None, id="just before the deadline"),
    ],
)
def test_r_honest_the_first_of_several_names_the_end(
    spec: dict[str, Any], now: float, expected: str | None
) -> None:
    pending = spec.get("pendingDeadlineSeconds")
    effective = {"resultFrom": "report", "pendingDeadlineSeconds": pending}
    job = an_agentjob(status=claimed(jobUID="j1", effective=effective), **spec)
    plan = decide(observed(job, now=now, child=a_child(), pods=(a_pod(),)))
    assert plan.status is not None
    assert (plan.status.ending and plan.status.ending.code) == expected


def test_r_deadline_each_wait_wakes_at_the_next_moment_that_matters() -> None:
    effective = {"resultFrom": "report", "pendingDeadlineSeconds": 90}
    job = an_agentjob(status=claimed(jobUID="j1", effective=effective), deadlineSeconds=600)
    waits = decide(observed(job, child=a_child(), pods=(a_pod(),)))
    assert waits.requeue_at == at(1 + 90)
    runs = decide(observed(job, child=a_child(), pods=(a_pod(running()),)))
    assert runs.requeue_at == at(600)


def test_r_deadline_the_pending_deadline_counts_from_the_job_not_from_the_agentjob() -> None:
    effective = {"resultFrom": "report", "pendingDeadlineSeconds": 90}
    job = an_agentjob(status=claimed(jobUID="j1", effective=effective))
    late = a_child(created=at(100))
    plan = decide(observed(job, now=150, child=late, pods=(a_pod(),)))
    assert plan.requeue_at == at(190)


def test_r_deadline_lowering_it_moves_the_end() -> None:
    job = an_agentjob(status=claimed(jobUID="j1", deadlineAt=stamp(600)), deadlineSeconds=40)
    plan = decide(observed(job, child=a_child(), pods=(a_pod(running()),)))
    assert told(plan) == "stopping | ExpirePod"


def test_r_honest_a_job_that_is_complete_is_done_though_no_pod_of_it_was_seen() -> None:
    ending = {"code": "stopped", "message": "stopped", "at": stamp(40)}
    job = an_agentjob(status=claimed(jobUID="j1", ending=ending), stop={"at": stamp(40)})
    plan = decide(observed(job, child=a_child(complete=True, succeeded=1)))
    assert told(plan) == "done"
    assert plan.status is not None
    assert [c.type for c in plan.status.conditions if c.type == "StopRequested"]


@pytest.mark.parametrize(
    ("child", "now", "pods", "lists"),
    [
        pytest.param({"complete": True, "succeeded": 1}, 60, (), True, id="done, no pod seen"),
        pytest.param({"failed_reason": "X", "failed": 1}, 60, (), True, id="failed, no pod seen"),
        pytest.param({"active": 1}, 600, (), True, id="to be ended, no pod seen"),
        pytest.param({"active": 1}, 60, (), False, id="nothing is decided yet"),
        pytest.param({"active": 1}, 600, (a_pod(running()),), False, id="its pod was seen"),
        pytest.param({"failed_reason": "X"}, 600, (), False, id="it made none"),
    ],
)
def test_r_honest_pods_that_only_the_job_knows_of_are_listed_before_the_verdict(
    child: dict[str, Any], now: float, pods: tuple[PodView, ...], *, lists: bool
) -> None:
    job = an_agentjob(status=claimed(jobUID="j1"))
    seen = observed(job, now=now, child=a_child(created=at(58), **child), pods=pods)
    assert isinstance(decide(replace(seen, pods_listed=False)).need, ReadPods) is lists
    assert decide(seen).need is None


def test_r_template_completions_zero_is_done() -> None:
    job = an_agentjob(status=claimed(jobUID="j1"))
    plan = decide(observed(job, child=a_child(complete=True, completions=0)))
    assert told(plan) == "done"


@pytest.mark.parametrize(
    ("spec", "now", "expected"),
    [
        pytest.param({"ttlSecondsAfterFinished": 20}, 49, "-", id="kept for its time"),
        pytest.param({"ttlSecondsAfterFinished": 20}, 50, "- | DeleteAgentJob", id="then deleted"),
        pytest.param({}, 30 + 7, "- | DeleteAgentJob", id="the template's time, where it has none"),
        pytest.param(
            {"ttlSecondsAfterFinished": 20}, 37, "-", id="its own time beats the template's"
        ),
    ],
)
def test_r_ttl_a_finished_job_goes_when_its_time_is_over(
    spec: dict[str, Any], now: float, expected: str
) -> None:
    effective = {"resultFrom": "report", "ttlSecondsAfterFinished": 7}
    status = claimed(state="done", finishedAt=stamp(30), effective=effective)
    assert told(decide(observed(an_agentjob(status=status, **spec), now=now))) == expected


def test_a_finalizer_is_set_before_anything_is_claimed() -> None:
    plan = decide(observed(an_agentjob(finalizers=())))
    assert told(plan) == "- | AddFinalizer"


@pytest.mark.parametrize(
    ("spec", "template", "expected"),
    [
        pytest.param({"suspend": True}, {}, "queued (suspended)", id="by the AgentJob"),
        pytest.param({}, {"suspend": True}, "queued (suspended)", id="by the template"),
        pytest.param(
            {"suspend": False}, {"suspend": True}, "queued (creating) | CreateJob", id="explicit"
        ),
        pytest.param(
            {"queueName": "gpus"},
            {"suspend": True},
            "queued (creating) | CreateJob",
            id="a queue resumes the Job, so the Job is created suspended",
        ),
    ],
)
def test_r_template_suspend_becomes_the_agentjobs(
    spec: dict[str, Any], template: dict[str, Any], expected: str
) -> None:
    body = a_template()
    body["spec"] |= template
    assert told(decide(observed(an_agentjob(template=body, **spec)))) == expected


def test_r_stop_a_suspended_job_resumed_by_its_queue_is_not_suspended_again() -> None:
    job = an_agentjob(queueName="gpus", status=claimed(jobUID="j1"))
    resumed = a_child(queue="gpus", suspended=False)
    plan = decide(observed(job, child=resumed, pods=(a_pod(running()),)))
    assert not [a for a in plan.actions if isinstance(a, SuspendJob)]
    assert told(plan) == "running"


@pytest.mark.parametrize(
    ("pod", "child", "expected"),
    [
        pytest.param(
            a_pod(ended(143, finished=58), deleted_at=52, gone=True),
            {"suspended": True, "retired": True},
            "failed preempted ran exit=143",
            id="the tool had begun: it never begins again",
        ),
        pytest.param(
            a_pod(waiting(), deleted_at=52, gone=True, phase="Failed"),
            {"suspended": True},
            "queued (kueue)",
            id="it had not begun: it waits again",
        ),
        pytest.param(
            a_pod(waiting(), deleted_at=52, gone=True, phase="Failed"),
            {"suspended": False},
            "queued (creating)",
            id="it had not begun, and has its place again",
        ),
        pytest.param(
            a_pod(ended(0), deleted_at=52, gone=True),
            {"suspended": True, "retired": True},
            "done",
            id="it was over before",
        ),
        pytest.param(
            a_pod(ended(143, finished=58), deleted_at=52, gone=True),
            {"suspended": True},
            "- | RetireJob",
            id="first it is kept from beginning again",
        ),
        pytest.param(
            a_pod(ended(143, finished=58), deleted_at=52, gone=True),
            {"suspended": False},
            "- | RetireJob",
            id="also where the queue was quicker",
        ),
        pytest.param(
            a_pod(ended(143, finished=58), deleted_at=52, gone=True),
            {"suspended": True, "retired": True, "halted": False},
            "queued (kueue)",
            id="the Job controller has not taken note yet",
        ),
    ],
)
def test_r_attempt_a_queue_takes_the_place_of_a_job_back(
    pod: PodView, child: dict[str, Any], expected: str
) -> None:
    job = an_agentjob(queueName="gpus", status=claimed(jobUID="j1"))
    plan = decide(
        observed(job, child=a_child(**{"queue": "gpus", "halted": True} | child), pods=(pod,))
    )
    assert told(plan) == expected
