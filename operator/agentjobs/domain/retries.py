"""Whether a failed attempt is followed by another, decided from its cause (R-ATTEMPT)."""

from dataclasses import replace
from datetime import datetime, timedelta

from agentjobs.api.agentjob import Attempt, Cause, Retry, RetryCause, Waiting
from agentjobs.api.names import CauseCode, Evidence, Reason, State, WaitingCode
from agentjobs.domain import status as st
from agentjobs.domain.accept import accept
from agentjobs.domain.claim import claim
from agentjobs.domain.ending import ending_due
from agentjobs.domain.errors import InvalidSpecError
from agentjobs.domain.finish import end_unstarted, with_attempt_ended
from agentjobs.domain.gates import closed_gate
from agentjobs.domain.mirror import deadline, invalid, mirror, stamped
from agentjobs.domain.observed import Observed, ReadTool
from agentjobs.domain.plan import DeleteJob, Note, Plan
from agentjobs.domain.verdict import Verdict

MAX_ATTEMPTS = 10
"""Of one job, those that never began included: so many the status lists."""
FIRST_PAUSE = timedelta(seconds=10)
LARGEST_PAUSE = timedelta(minutes=5)
"""Between attempts of a tool that failed by itself: as the Job controller's back-off, bounded
earlier. After a disruption there is none."""
GROUP_OF = {
    CauseCode.PREEMPTED: RetryCause.DISRUPTION,
    CauseCode.EVICTED: RetryCause.DISRUPTION,
    CauseCode.NODE_LOST: RetryCause.DISRUPTION,
    CauseCode.OOM_KILLED: RetryCause.OOM,
    CauseCode.TOOL_ERROR: RetryCause.TOOL_ERROR,
}
ONE_ATTEMPT = Retry()


def try_again(seen: Observed, attempt: Attempt, verdict: Verdict) -> Plan | None:
    """Record the end of an attempt that another one follows; None where this was the last."""
    cause = verdict.cause
    if cause is None or attempt.number >= MAX_ATTEMPTS:
        return None
    # Who held it back and stops it now, or lets its deadline pass, is told so by what follows.
    if not _was_held_back(seen, cause) and (
        not _allowed(seen, cause) or seen.now >= deadline(seen)
    ):
        return None
    status = with_attempt_ended(seen, seen.job.status, verdict)
    number = attempt.number + 1
    message = f"attempt {attempt.number} ended {cause.code}: {cause.message}"
    status = status.model_copy(
        update={
            "state": State.QUEUED,
            "waiting": Waiting(
                code=WaitingCode.RETRY, message=f"{message}; attempt {number} follows"
            ),
            "started_at": status.started_at or (status.attempts or (attempt,))[-1].started_at,
            "pod_uids": None,
            "pod_phase": verdict.pod.phase if verdict.pod else None,
            "pods": None,
        }
    )
    note = Note(Reason.ATTEMPT_FAILED, message, warning=True)
    return Plan(status=st.fit(stamped(seen, status)), notes=(note,), requeue_at=seen.now)


def between(seen: Observed, ended: Attempt) -> Plan:
    """Decide for a job whose last attempt has ended, and which another one may follow."""
    left_over = seen.child if seen.child and seen.child.waits_in_vain else None
    if seen.job.spec.tool_ref and seen.tool is None and not seen.tool_known:
        return Plan(need=ReadTool())
    # What is left of the attempt that has ended says nothing about the next.
    seen = replace(seen, child=None, pods=(), refusal=None)
    due = ending_due(seen, deadline(seen))
    if due:
        return end_unstarted(seen, due)
    if left_over:
        again = seen.now + timedelta(seconds=seen.policy.refusal_recheck)
        return Plan(actions=(DeleteJob(left_over.name, left_over.uid),), requeue_at=again)
    return _next(seen, ended)


def _next(seen: Observed, ended: Attempt) -> Plan:
    """Claim the next attempt when nothing holds it back any more."""
    try:
        accepted = replace(accept(seen), deadline_at=deadline(seen))
    except InvalidSpecError as error:
        return end_unstarted(seen, invalid(seen, error))
    closed = closed_gate(seen, accepted)
    if closed and closed.ending:
        return end_unstarted(seen, closed.ending)
    if closed:
        status = seen.job.status.model_copy(update={"waiting": closed.waiting})
        return mirror(seen, status, requeue_at=deadline(seen))
    begins = _begins_at(ended)
    if begins and seen.now < begins:
        return mirror(seen, seen.job.status, requeue_at=min(begins, deadline(seen)))
    return claim(seen, accepted, seen.job.status)


def _was_held_back(seen: Observed, cause: Cause) -> bool:
    """Whether it was ended for somebody who wants it later, and may be begun again then."""
    if cause.code is not CauseCode.PREEMPTED or not (seen.child and seen.child.held_back):
        return False
    return not cause.ran or st.repeatable(seen.job.status)


def _allowed(seen: Observed, cause: Cause) -> bool:
    """Whether the job's own rule lets another attempt follow this end."""
    status = seen.job.status
    asked = seen.job.spec.stop or seen.job.metadata.deletion_timestamp or status.ending
    group = GROUP_OF.get(cause.code)
    if asked or group is None:
        return False
    if group is RetryCause.DISRUPTION and not cause.retryable:
        # Evicted for a limit that the tool broke itself: it would break it again.
        return False
    if group is RetryCause.DISRUPTION and not cause.ran:
        # It never began, so it waits again, whatever the rule.
        return True
    if cause.evidence is Evidence.LOST and not st.repeatable(status):
        # It may still run somewhere; two at once are for tools that do not mind.
        return False
    retry = (status.effective and status.effective.retry) or ONE_ATTEMPT
    begun = sum(st.has_begun(each) for each in (status.attempts or ())[:-1]) + 1
    return group in retry.causes and begun < retry.max_attempts


def _begins_at(ended: Attempt) -> datetime | None:
    """When the next attempt may begin; None: at once."""
    if ended.cause is None or GROUP_OF.get(ended.cause) is RetryCause.DISRUPTION:
        return None
    if ended.finished_at is None:
        return None
    pause: timedelta = FIRST_PAUSE * 2 ** (ended.number - 1)
    return ended.finished_at + min(pause, LARGEST_PAUSE)
