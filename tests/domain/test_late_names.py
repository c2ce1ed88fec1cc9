"""Names that cannot be taken, Jobs that come too late, tools that the watch has not shown."""

from agentjobs.api.names import CauseCode, State
from agentjobs.domain.observed import ReadTool
from agentjobs.domain.plan import CreateJob, SuspendJob
from agentjobs.domain.reconcile import decide
from agentjobs.domain.refusal import Refusal, RefusalKind
from tests.builders import a_child, an_agentjob, claimed, observed, stamp

STOPPED = {"code": "stopped", "message": "stopped on request", "at": stamp(10)}
FULL = Refusal(RefusalKind.QUOTA, "exceeded quota: jobs")
DENIED = Refusal(RefusalKind.DENIED, "images of placeholder.invalid are denied")


def test_r_tool_a_tool_that_the_watch_has_not_shown_is_asked_for_before_anything_ends() -> None:
    job = an_agentjob(toolRef={"name": "new"})
    plan = decide(observed(job, tool_known=False))
    assert plan.need == ReadTool()
    told = decide(observed(job, tool_known=True)).status
    assert told is not None
    assert told.state is State.FAILED


def test_r_claim_a_placeholder_that_a_quota_refuses_is_given_up_after_a_minute() -> None:
    job = an_agentjob(stop={}, status=claimed(ending=STOPPED))
    soon = decide(observed(job, now=30, refusal=FULL))
    assert isinstance(soon.actions[0], CreateJob)
    late = decide(observed(job, now=75, refusal=FULL)).status
    assert late is not None
    assert late.state is State.CANCELLED


def test_r_honest_a_refused_placeholder_does_not_turn_a_stop_into_a_failure() -> None:
    job = an_agentjob(stop={}, status=claimed(ending=STOPPED))
    ended = decide(observed(job, now=30, refusal=DENIED, refusal_known=True)).status
    assert ended is not None
    assert (ended.state, ended.cause and ended.cause.code) == (State.CANCELLED, CauseCode.STOPPED)


def test_r_claim_a_job_that_comes_after_the_end_is_suspended() -> None:
    job = an_agentjob(stop={}, status=claimed(ending=STOPPED))
    over = decide(observed(job, now=75, refusal=FULL)).status
    late = observed(job.model_copy(update={"status": over}), now=80, child=a_child())
    assert [type(action) for action in decide(late).actions] == [SuspendJob]
