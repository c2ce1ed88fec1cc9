"""No attempt is under way: accept, wait at the gates, claim the next one (R-CLAIM)."""

from datetime import datetime

from agentjobs.api.agentjob import (
    AgentJobStatus,
    Attempt,
    Ending,
)
from agentjobs.api.names import (
    FINALIZER,
    ConditionType,
    Reason,
    State,
)
from agentjobs.domain import status as st
from agentjobs.domain.accept import Accepted, accept, name_to_look_up
from agentjobs.domain.ending import (
    ending_due,
)
from agentjobs.domain.errors import InvalidSpecError
from agentjobs.domain.finish import end_unstarted
from agentjobs.domain.gates import closed_gate
from agentjobs.domain.job import desired_job
from agentjobs.domain.mirror import earlier, invalid, mirror, stamped, with_condition, with_status
from agentjobs.domain.observed import LookUp, Need, Observed, ReadTool
from agentjobs.domain.plan import (
    AddFinalizer,
    CreateJob,
    Note,
    Plan,
)
from agentjobs.domain.waiting import creating


def before_start(seen: Observed) -> Plan:
    """Decide for a job of which nothing was ever created."""
    if (
        seen.job.metadata.deletion_timestamp is None
        and FINALIZER not in seen.job.metadata.finalizers
    ):
        return Plan(actions=(AddFinalizer(),))
    # A job that was stopped before it was ever looked at is cancelled, valid or not.
    asked = ending_due(seen, datetime.max.replace(tzinfo=seen.now.tzinfo))
    need = _unread(seen, asked)
    if need:
        return Plan(need=need)
    try:
        accepted = accept(seen)
    except InvalidSpecError as error:
        return end_unstarted(seen, asked or invalid(seen, error))
    due = ending_due(seen, accepted.deadline_at)
    if due:
        return end_unstarted(seen, due)
    status = _accepted_status(seen, accepted)
    closed = closed_gate(seen, accepted)
    if closed and closed.ending:
        return end_unstarted(with_status(seen, status), closed.ending)
    if closed:
        status = status.model_copy(update={"waiting": closed.waiting})
        return mirror(seen, status, requeue_at=accepted.deadline_at)
    return claim(seen, accepted, status)


def _unread(seen: Observed, asked: Ending | None) -> Need | None:
    """What has to be read before a job can be accepted."""
    if seen.job.spec.tool_ref and seen.tool is None and not seen.tool_known:
        return ReadTool()
    name = None if asked else name_to_look_up(seen)
    return LookUp(name) if name else None


def _accepted_status(seen: Observed, accepted: Accepted) -> AgentJobStatus:
    status = seen.job.status.model_copy(
        update={
            "tool": accepted.tool,
            "effective": accepted.effective,
            "deadline_at": earlier(seen.job.status.deadline_at, accepted.deadline_at),
            "state": State.QUEUED,
        }
    )
    return with_condition(seen, status, ConditionType.ACCEPTED, Reason.ACCEPTED)


def claim(seen: Observed, accepted: Accepted, status: AgentJobStatus) -> Plan:
    """Record the next attempt and the name of its Job, then create it (R-CLAIM)."""
    earlier_ones = status.attempts or ()
    number = len(earlier_ones) + 1
    body, warnings = desired_job(
        seen.job, accepted, attempt=number, now=seen.now, policy=seen.policy
    )
    name = body["metadata"]["name"]
    status = status.model_copy(
        update={
            "attempts": (*earlier_ones, Attempt(number=number, job_name=name)),
            "state": State.QUEUED,
            # What an earlier attempt has reported was its own.
            "result": None,
            "summary": None,
            "progress": None,
            "job_name": name,
            "pod_name": None,
            "pod_phase": None,
            "waiting": creating(name),
            "warnings": warnings[:8] or None,
        }
    )
    notes = tuple(Note(Reason.GRACE_PERIOD_CUT, text) for text in warnings if "Grace" in text)
    return Plan(status=st.fit(stamped(seen, status)), actions=(CreateJob(body),), notes=notes)
