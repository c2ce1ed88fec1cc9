"""What a job waits for before it begins (R-DEPENDS, R-SLOTS)."""

from typing import Any

import pytest

from agentjobs.api.names import State, WaitingCode
from agentjobs.domain.observed import DependencySeen, SlotsSeen
from agentjobs.domain.plan import CreateJob, DeleteAgentJob
from agentjobs.domain.reconcile import decide
from tests.builders import a_tool, an_agentjob, at, observed, stamp

REF = {"kind": "AgentTool", "name": "indexer"}


def decided(limit: int | None, slots: SlotsSeen, **spec: Any) -> Any:
    tool = a_tool(**({"maxConcurrent": limit} if limit else {}))
    return decide(observed(an_agentjob(toolRef=REF, **spec), now=1, tool=tool, slots=slots))


@pytest.mark.parametrize(
    ("limit", "taken", "ahead", "begins"),
    [
        pytest.param(None, 50, 50, True, id="no limit"),
        pytest.param(2, 0, 0, True, id="all are free"),
        pytest.param(2, 1, 0, True, id="the last one"),
        pytest.param(2, 2, 0, False, id="none is free"),
        pytest.param(2, 1, 1, False, id="the last one is somebody else's"),
        pytest.param(2, 0, 2, False, id="both are for others"),
        pytest.param(1, 3, 0, False, id="more run than now may"),
    ],
)
def test_r_slots_first_come_first_served(
    limit: int | None, taken: int, ahead: int, *, begins: bool
) -> None:
    plan = decided(limit, SlotsSeen(taken=taken, ahead=ahead))
    assert plan.status.state is State.QUEUED
    assert bool([a for a in plan.actions if isinstance(a, CreateJob)]) is begins
    assert (plan.status.waiting.code is WaitingCode.SLOT) is not begins
    assert bool(plan.status.attempts) is begins, "nothing is claimed without a slot"


def test_r_slots_who_waits_for_another_gate_is_not_in_line() -> None:
    seen = observed(
        an_agentjob(toolRef=REF, dependsOn=[{"name": "first"}]),
        now=1,
        tool=a_tool(maxConcurrent=1),
        slots=SlotsSeen(taken=1),
        dependencies=(DependencySeen("first", exists=True),),
    )
    plan = decide(seen)
    assert plan.status is not None
    assert plan.status.waiting is not None
    assert plan.status.waiting.code is WaitingCode.DEPENDENCY


def test_r_slots_a_stop_is_not_kept_waiting_for_a_slot() -> None:
    plan = decided(1, SlotsSeen(taken=1), stop={"reason": "enough"})
    assert plan.status.state is State.CANCELLED
    assert plan.status.cause.ran is False
    assert not plan.actions, "not even a placeholder: nothing was claimed"


def test_r_depends_a_job_is_not_collected_before_its_dependents_have_seen_its_end() -> None:
    status = {"state": "done", "finishedAt": stamp(10), "startedAt": stamp(5)}
    job = an_agentjob(status=status, ttlSecondsAfterFinished=0)
    kept = decide(observed(job, now=60, awaited=True))
    assert (kept.actions, kept.requeue_at) == ((), at(70))
    assert [type(each) for each in decide(observed(job, now=60)).actions] == [DeleteAgentJob]
