"""What a job waits for before it begins (R-DEPENDS, R-SLOTS)."""

from typing import Any

import pytest

from agentjobs.api.names import CauseCode, State, WaitingCode
from agentjobs.domain.observed import DependencySeen, SlotsSeen
from agentjobs.domain.plan import CreateJob, DeleteAgentJob
from agentjobs.domain.reconcile import decide
from tests.builders import a_tool, an_agentjob, at, claimed, observed, stamp

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


@pytest.mark.parametrize(
    ("ahead", "place"),
    [
        (0, "next in line"),
        (1, "1 before"),
        (3, "3 before"),
        (4, "more than 3 before"),
        (11, "more than 10 before"),
        (100, "more than 30"),
        (101, "more than 100"),
        (9999, "more than 3000"),
    ],
)
def test_r_slots_who_waits_is_told_the_place_in_the_line(ahead: int, place: str) -> None:
    """Roughly where it is far: each change is a write."""
    message = decided(1, SlotsSeen(taken=1, ahead=ahead)).status.waiting.message
    assert place in message
    assert "at most 1 at once" in message


def waiting_on(*others: DependencySeen, condition: str = "Succeeded", **more: Any) -> Any:
    needs = [{"name": each.name, "condition": condition} for each in others]
    spec = {"toolRef": REF, "dependsOn": needs, **more.pop("spec", {})}
    job = an_agentjob(**spec)
    return decide(observed(job, now=1, tool=a_tool(), dependencies=others, **more)).status


DONE = DependencySeen("done", exists=True, finished=True, succeeded=True, state="done")
LOST = DependencySeen("lost", exists=True, finished=True, state="cancelled")
BUSY = DependencySeen("busy", exists=True, state="running")
ABSENT = DependencySeen("absent")


def test_r_depends_a_dependency_that_failed_ends_a_job_at_once_whatever_else_it_waits_for() -> None:
    """And says which, and how that ended."""
    for status in (waiting_on(BUSY, LOST), waiting_on(LOST, spec={"suspend": True})):
        assert (status.state, status.cause.code) == (State.FAILED, CauseCode.DEPENDENCY_FAILED)
        assert "AgentJob lost is cancelled" in status.cause.message
        assert (status.cause.ran, status.attempts) == (False, None)


def test_r_depends_a_job_that_wants_another_over_goes_on_however_it_ended() -> None:
    assert waiting_on(LOST, DONE, condition="Finished").attempts


@pytest.mark.parametrize(
    ("others", "words"),
    [((DONE, BUSY), "waits for AgentJob busy to end"), ((ABSENT,), "absent, which does not exist")],
)
def test_r_depends_what_a_job_waits_for_is_said(
    others: tuple[DependencySeen, ...], words: str
) -> None:
    waiting = waiting_on(*others).waiting
    assert waiting.code is WaitingCode.DEPENDENCY
    assert words in waiting.message


def test_r_depends_who_closes_a_ring_ends_and_names_it() -> None:
    status = waiting_on(BUSY, ring=("nightly-index", "busy", "third"))
    assert (status.state, status.cause.code) == (State.FAILED, CauseCode.INVALID_SPEC)
    ring = "nightly-index waits for busy waits for third waits for nightly-index"
    assert status.cause.message.endswith(ring)


def test_r_depends_a_long_ring_is_named_as_far_as_there_is_room() -> None:
    names = tuple(f"{'n' * 20}-{n:03}" for n in range(150))
    message = waiting_on(BUSY, ring=names).cause.message
    assert len(message) <= 256
    assert "145 more" in message or message.endswith("…")


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


@pytest.mark.parametrize("taken", [0, 1])
def test_r_slots_a_claim_beyond_the_limit_waits_before_it_makes_its_job(taken: int) -> None:
    job = an_agentjob(toolRef=REF, status=claimed())
    seen = observed(job, now=3, tool=a_tool(maxConcurrent=1), slots=SlotsSeen(taken=taken))
    plan = decide(seen)
    assert plan.postponed is bool(taken)
    assert [type(action).__name__ for action in plan.actions] == ([] if taken else ["CreateJob"])
    if taken:
        assert plan.status is not None
        assert plan.status.waiting is not None
        assert plan.status.waiting.code is WaitingCode.SLOT
        assert plan.status.state is State.QUEUED
