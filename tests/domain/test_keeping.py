"""What is kept of output, and what goes because it is kept (R-OUTPUT, R-TTL)."""

from typing import Any

import pytest

from agentjobs.domain.observed import Policy, Remains
from agentjobs.domain.plan import ArchiveOutput, DeletePod, FollowOutput
from agentjobs.domain.reconcile import decide
from agentjobs.domain.said import Said
from tests.builders import (
    JOB_UID,
    POD_NAME,
    POD_UID,
    a_child,
    a_pod,
    an_agentjob,
    at,
    claimed,
    ended,
    observed,
    stamp,
)

RETENTION = 600
ARCHIVED_AT = 50
LEFT = (Remains("first", "p1", JOB_UID), Remains("second", "p2", JOB_UID))


def over(**more: Any) -> dict[str, Any]:
    return claimed(state="done", startedAt=stamp(5), finishedAt=stamp(30), **more)


def archived(status: str) -> dict[str, Any]:
    condition = {
        "type": "OutputArchived",
        "status": status,
        "reason": "Archived",
        "message": "",
        "lastTransitionTime": stamp(ARCHIVED_AT),
    }
    return {"conditions": [condition]}


@pytest.mark.parametrize(
    ("kept", "seconds", "goes"),
    [
        ("True", RETENTION - 1, False),
        ("True", RETENTION, True),
        ("False", 10 * RETENTION, False),
        (None, 10 * RETENTION, False),
    ],
)
def test_r_ttl_pods_go_some_time_after_their_output_is_archived(
    kept: str | None, seconds: int, *, goes: bool
) -> None:
    """And never before: they are the only copy until then."""
    status = over(**(archived(kept) if kept else {}))
    plan = decide(
        observed(
            an_agentjob(status=status),
            child=a_child(complete=True),
            now=ARCHIVED_AT + seconds,
            policy=Policy(pod_retention=RETENTION),
            remains=LEFT,
        )
    )
    deleted = [(a.name, a.uid) for a in plan.actions if isinstance(a, DeletePod)]
    assert deleted == ([("first", "p1"), ("second", "p2")] if goes else [])
    if kept == "True" and not goes:
        assert plan.requeue_at == at(ARCHIVED_AT + RETENTION)


def test_r_event_the_end_waits_for_what_a_tool_printed_just_before() -> None:
    """Until it is read; who is asked says so, be it in vain."""
    job = an_agentjob(status=claimed(jobUID=JOB_UID))
    over = {"child": a_child(complete=True, succeeded=1), "pods": (a_pod(ended()),)}
    plan = decide(observed(job, **over, keeps_output=True))
    assert (plan.status, [each.pod for each in plan.actions]) == (None, [POD_NAME])
    assert isinstance(plan.actions[0], FollowOutput)
    for heard in ({"keeps_output": True, "heard": frozenset({POD_UID})}, {"keeps_output": False}):
        said = Said(summary="all is well")
        plan = decide(observed(job, **over, **heard, said=said))
        assert plan.status
        assert (plan.status.state, plan.status.summary) == ("done", "all is well")


def test_r_output_every_attempt_that_began_is_to_leave_a_stream() -> None:
    numbers = (("tool_error", True), ("evicted", False), ("tool_error", True))
    attempts = [
        {"number": n, "jobName": f"x-{n}", "cause": cause, "ran": ran}
        for n, (cause, ran) in enumerate(numbers, 1)
    ]
    job = an_agentjob(status=over(attempts=attempts))
    plan = decide(observed(job, now=31, keeps_output=True))
    (archive,) = [a for a in plan.actions if isinstance(a, ArchiveOutput)]
    assert archive.attempts == (1, 3)
