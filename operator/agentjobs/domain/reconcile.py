"""The decision: all that was read goes in, what is to be done comes out.

A job goes through three stages: nothing is claimed yet, an attempt is claimed, it is over. Each
pass finds the stage anew from the stored status and from what is seen of Job and pods; no pass
depends on an earlier one having been made.
"""

from dataclasses import replace
from datetime import datetime, timedelta

from agentjobs.api.agentjob import (
    AgentJob,
    AgentJobStatus,
    Attempt,
    Ending,
    PodCounts,
    ResultSource,
    Waiting,
)
from agentjobs.api.names import (
    CAUSE_MESSAGE_CHARACTERS,
    FINALIZER,
    CauseCode,
    ConditionType,
    Evidence,
    Reason,
    State,
)
from agentjobs.domain import status as st
from agentjobs.domain.accept import Accepted, accept, deadline_of
from agentjobs.domain.children import JobView
from agentjobs.domain.ending import (
    can_expire,
    end_pods,
    ending_due,
    expire,
    is_over,
    lingering_until,
    pending_deadline,
    started,
)
from agentjobs.domain.errors import InvalidSpecError
from agentjobs.domain.gates import closed_gate
from agentjobs.domain.job import desired_job, placeholder_job
from agentjobs.domain.observed import Observed, ReadLastLine, ReadRefusals
from agentjobs.domain.plan import (
    Action,
    AddFinalizer,
    CreateJob,
    DeleteAgentJob,
    Note,
    Plan,
    RemoveFinalizer,
)
from agentjobs.domain.pods import PodView
from agentjobs.domain.refusal import RefusalKind
from agentjobs.domain.texts import cut, one_line
from agentjobs.domain.verdict import Verdict, judge_job, judge_pod, never_ran, vanished
from agentjobs.domain.waiting import creating, hopeless, refused, waiting_for

MAX_POD_UIDS = 16


def decide(seen: Observed) -> Plan:
    """Decide what is to be done for one AgentJob, from what was read and nothing else."""
    status = seen.job.status
    if status.finished_at:
        return _after_end(seen)
    if not status.attempts:
        return _before_start(seen)
    return _during(seen, status.attempts[-1])


# --- nothing is claimed yet ---------------------------------------------------------------------


def _before_start(seen: Observed) -> Plan:
    if (
        seen.job.metadata.deletion_timestamp is None
        and FINALIZER not in seen.job.metadata.finalizers
    ):
        return Plan(actions=(AddFinalizer(),))
    try:
        accepted = accept(seen)
    except InvalidSpecError as error:
        # A job that was stopped before it was ever looked at is cancelled, valid or not.
        asked = ending_due(seen, datetime.max.replace(tzinfo=seen.now.tzinfo))
        return _end_unstarted(seen, asked or _invalid(seen, error))
    due = ending_due(seen, accepted.deadline_at)
    if due:
        return _end_unstarted(seen, due)
    status = _accepted_status(seen, accepted)
    closed = closed_gate(seen, accepted)
    if closed and closed.ending:
        return _end_unstarted(replace(seen, job=_with(seen, status)), closed.ending)
    if closed:
        status = status.model_copy(update={"waiting": closed.waiting})
        return _mirror(seen, status, requeue_at=accepted.deadline_at)
    return _claim(seen, accepted, status)


def _accepted_status(seen: Observed, accepted: Accepted) -> AgentJobStatus:
    status = seen.job.status.model_copy(
        update={
            "tool": accepted.tool,
            "effective": accepted.effective,
            "deadline_at": _earlier(seen.job.status.deadline_at, accepted.deadline_at),
            "state": State.QUEUED,
        }
    )
    return _condition(seen, status, ConditionType.ACCEPTED, Reason.ACCEPTED)


def _claim(seen: Observed, accepted: Accepted, status: AgentJobStatus) -> Plan:
    """Record the attempt and the name of its Job, then create it (R-CLAIM)."""
    body, warnings = desired_job(seen.job, accepted, attempt=1, now=seen.now, policy=seen.policy)
    name = body["metadata"]["name"]
    status = status.model_copy(
        update={
            "attempts": (Attempt(number=1, job_name=name),),
            "job_name": name,
            "waiting": creating(name),
            "warnings": warnings[:8] or None,
        }
    )
    notes = tuple(Note(Reason.GRACE_PERIOD_CUT, text) for text in warnings if "Grace" in text)
    return Plan(status=st.fit(_observed(seen, status)), actions=(CreateJob(body),), notes=notes)


def _end_unstarted(seen: Observed, ending: Ending) -> Plan:
    return _end(seen, never_ran(ending), ending)


def _invalid(seen: Observed, error: Exception) -> Ending:
    return Ending(code=CauseCode.INVALID_SPEC, message=_short(str(error)), at=seen.now)


# --- an attempt is claimed ----------------------------------------------------------------------


def _during(seen: Observed, attempt: Attempt) -> Plan:
    child = seen.child
    if child is None or child.owner_uid != seen.job.metadata.uid:
        return _without_job(seen, attempt)
    if is_over(seen, child):
        ending = seen.job.status.ending or _unrecorded(seen, child)
        return _end(seen, _judge(seen, child, ending), ending)
    due = ending_due(seen, _deadline(seen))
    status = _mirrored(seen, child, due)
    if due:
        return _mirror(seen, status, actions=end_pods(seen, child), requeue_at=None)
    if _wants_reason(seen, child) and not seen.refusal_known:
        return Plan(need=ReadRefusals(child.uid))
    linger = lingering_until(seen, child)
    if linger and seen.now >= linger:
        actions = tuple(expire(p) for p in seen.pods if not p.dead and can_expire(p))
        return _mirror(seen, status, actions=actions, requeue_at=_deadline(seen))
    times = (_deadline(seen), pending_deadline(seen), linger, _next_look(seen, child))
    return _mirror(seen, status, requeue_at=min(t for t in times if t))


def _unrecorded(seen: Observed, child: JobView) -> Ending | None:
    """Why a placeholder was made, should the record of it be missing."""
    return ending_due(seen, _deadline(seen)) if child.placeholder else None


def _without_job(seen: Observed, attempt: Attempt) -> Plan:
    """Go on with a claimed attempt whose Job is not there, or is somebody else's."""
    if seen.child is not None:
        return _name_taken(seen, seen.child)
    if attempt.job_uid or seen.child_seen or seen.job.status.started_at:
        if any(not pod.dead for pod in seen.pods):
            return Plan(requeue_at=_deadline(seen))
        ending = seen.job.status.ending
        if ending is None:
            verdict = vanished(attempt.job_name, seen.pods, ran=started(seen))
            return _end(seen, verdict, None)
        return _vanished_while_ending(seen, ending)
    if seen.refusal and seen.refusal.kind in {RefusalKind.INVALID, RefusalKind.DENIED}:
        reason = hopeless(seen)
        if reason:
            ending = Ending(code=reason.code, message=_short(reason.message), at=seen.now)
            return _end_unstarted(seen, ending)
    due = ending_due(seen, _deadline(seen))
    if due:
        # The claim may still be acted upon by a former leader; only a taken name prevents it.
        status = seen.job.status.model_copy(update={"ending": due})
        body = placeholder_job(seen.job, attempt.job_name)
        return _mirror(seen, status, actions=(CreateJob(body),), requeue_at=None)
    return _create_again(seen)


def _vanished_while_ending(seen: Observed, ending: Ending) -> Plan:
    """The Job that was being ended is gone: deleted by us because of its queue, or by others."""
    pod = next((p for p in reversed(seen.pods) if p.started), None)
    if pod is not None:
        return _end(seen, judge_pod(pod, ending, linger=seen.policy.linger), ending)
    verdict = never_ran(ending)
    if started(seen) and verdict.cause:
        lost = verdict.cause.model_copy(update={"ran": True, "evidence": Evidence.LOST})
        verdict = replace(verdict, cause=lost)
    return _end(seen, verdict, ending)


def _name_taken(seen: Observed, other: JobView) -> Plan:
    due = ending_due(seen, _deadline(seen))
    if due:
        return _end_unstarted(seen, due)
    if other.owner == f"AgentJob {seen.job.metadata.name}":
        message = f"waits for Job {other.name} of an earlier AgentJob of this name to go"
        status = seen.job.status.model_copy(
            update={"waiting": creating(other.name).model_copy(update={"message": message})}
        )
        return _mirror(seen, status, requeue_at=_deadline(seen))
    owner = f"belongs to {other.owner}" if other.owner else "belongs to nobody"
    message = f"Job {other.name} exists already and {owner}; delete it or choose another name"
    return _end_unstarted(
        seen, Ending(code=CauseCode.INVALID_SPEC, message=_short(message), at=seen.now)
    )


def _create_again(seen: Observed) -> Plan:
    """Act on a claim whose Job was never seen. The name makes a second creation harmless."""
    try:
        accepted = accept(seen)
    except InvalidSpecError as error:
        status = seen.job.status.model_copy(update={"ending": _invalid(seen, error)})
        body = placeholder_job(seen.job, status.job_name or "")
        return _mirror(seen, status, actions=(CreateJob(body),), requeue_at=None)
    if seen.refusal:
        status = seen.job.status.model_copy(update={"waiting": refused(seen.refusal)})
        if seen.refusal.kind is RefusalKind.RIGHTS:
            status = _condition(
                seen,
                status,
                ConditionType.STALLED,
                Reason.OPERATOR_FORBIDDEN,
                message=seen.refusal.message,
            )
    else:
        status = seen.job.status
    later = seen.now + timedelta(seconds=seen.policy.refusal_recheck)
    if seen.refusal_known:
        return _mirror(seen, status, requeue_at=min(later, _deadline(seen)))
    accepted = replace(accepted, deadline_at=_deadline(seen))
    body, _ = desired_job(seen.job, accepted, attempt=1, now=seen.now, policy=seen.policy)
    return _mirror(seen, status, actions=(CreateJob(body),), requeue_at=later)


def _judge(seen: Observed, child: JobView, ending: Ending | None) -> Verdict:
    linger = seen.policy.linger
    if ending and not started(seen):
        return never_ran(ending)
    began = [pod for pod in seen.pods if pod.started] or list(seen.pods)
    if child.single and began:
        return judge_pod(began[-1], ending, linger=linger)
    if ending and not child.over:
        return judge_pod(began[-1], ending, linger=linger) if began else never_ran(ending)
    return judge_job(child, seen.pods, ending, linger=linger)


def _mirrored(seen: Observed, child: JobView, due: Ending | None) -> AgentJobStatus:
    """The status of an attempt that is not over."""
    pod = _pod_to_show(seen.pods)
    running = any(p.running and p.started for p in seen.pods)
    begun = seen.job.status.started_at or min(
        (p.started_at for p in seen.pods if p.started_at), default=None
    )
    status = seen.job.status.model_copy(
        update={
            "deadline_at": _deadline(seen),
            "ending": due,
            "job_name": child.name,
            "pod_name": pod.name if pod else None,
            "pod_phase": pod.phase if pod else None,
            "pod_uids": tuple(p.uid for p in seen.pods if not p.dead)[:MAX_POD_UIDS] or None,
            "pods": _counts(child, seen.pods),
            "started_at": begun,
        }
    )
    status = st.with_attempt(status, job_uid=child.uid, started_at=begun)
    state = st.live_state(status, running=running)
    waiting = waiting_for(seen, child) if state is State.QUEUED else None
    status = status.model_copy(update={"state": state, "waiting": waiting})
    if begun:
        status = _condition(seen, status, ConditionType.STARTED, Reason.CONTAINER_STARTED)
    return status


def _wants_reason(seen: Observed, child: JobView) -> bool:
    """Whether a Job has had no pod for so long that its Events must say why."""
    if seen.pods or child.suspended or child.created is None or child.completions == 0:
        return False
    return seen.now >= child.created + timedelta(seconds=seen.policy.pod_grace)


def _next_look(seen: Observed, child: JobView) -> datetime | None:
    if seen.pods or child.suspended or child.created is None:
        return None
    if _wants_reason(seen, child):
        return seen.now + timedelta(seconds=seen.policy.refusal_recheck)
    return child.created + timedelta(seconds=seen.policy.pod_grace)


# --- it is over ---------------------------------------------------------------------------------


def _end(seen: Observed, verdict: Verdict, ending: Ending | None) -> Plan:
    """Write the end, once (R-STATE-FINAL)."""
    pod = verdict.pod
    effective = seen.job.status.effective
    source = effective.result_from if effective else ResultSource.TERMINATION_MESSAGE
    printed = source is ResultSource.LAST_LINE and pod is not None and pod.started and not pod.gone
    if pod and printed and seen.last_line is None:
        return Plan(need=ReadLastLine(pod.name, pod.tool_name))
    text = _handed_in(seen, source, pod)
    finished_at = verdict.finished_at or seen.now
    cause = verdict.cause
    if cause and not cause.ran and seen.job.status.started_at:
        cause = cause.model_copy(update={"ran": True})
    status = seen.job.status.model_copy(
        update={
            "state": verdict.state,
            "cause": cause,
            "ending": ending if ending and ending.code in st.ASKED else None,
            "finished_at": finished_at,
            "waiting": None,
            "result": st.result_of(source, text),
            "summary": st.summary_of(text),
            **_last_pod(seen, pod),
        }
    )
    status = st.with_attempt(
        status,
        job_uid=seen.child.uid if seen.child and seen.child.owner_uid else None,
        started_at=status.started_at,
        finished_at=verdict.finished_at,
        cause=cause.code if cause else None,
    )
    status = _end_conditions(seen, status, verdict.state)
    failed = verdict.state in {State.FAILED, State.TIMED_OUT}
    message = cause.message if cause else f"AgentJob {seen.job.metadata.name} is done"
    note = Note(st.REASON_OF_STATE[verdict.state], message, warning=failed)
    return Plan(status=st.fit(_observed(seen, status)), notes=(note,), requeue_at=seen.now)


def _handed_in(seen: Observed, source: ResultSource, pod: PodView | None) -> str:
    if pod is None or pod.tool is None or pod.tool.end is None:
        return ""
    if source is ResultSource.LAST_LINE:
        return seen.last_line or ""
    return pod.tool.end.message if source is ResultSource.TERMINATION_MESSAGE else ""


def _last_pod(seen: Observed, pod: PodView | None) -> dict[str, object]:
    begun = seen.job.status.started_at or min(
        (p.started_at for p in seen.pods if p.started_at), default=None
    )
    changes: dict[str, object] = {"started_at": begun, "pod_uids": None}
    if seen.child and seen.child.owner_uid == seen.job.metadata.uid and not seen.child.placeholder:
        changes["pods"] = _counts(seen.child, seen.pods)
    if pod is not None:
        changes |= {"pod_name": pod.name, "pod_phase": pod.phase}
    return changes


def _end_conditions(seen: Observed, status: AgentJobStatus, state: State) -> AgentJobStatus:
    cause = status.cause
    reason = st.REASON_OF_STATE[state]
    message = cause.message if cause else ""
    if cause and cause.code in {CauseCode.INVALID_SPEC, CauseCode.ADMISSION_DENIED}:
        detail = seen.refusal.message if seen.refusal else message
        refused_as = (
            Reason.INVALID_SPEC if cause.code is CauseCode.INVALID_SPEC else Reason.ADMISSION_DENIED
        )
        status = _condition(
            seen, status, ConditionType.ACCEPTED, refused_as, holds=False, message=detail
        )
    if status.started_at:
        status = _condition(seen, status, ConditionType.STARTED, Reason.CONTAINER_STARTED)
    status = _condition(seen, status, ConditionType.FINISHED, reason, message=message)
    done = state is State.DONE
    return _condition(seen, status, ConditionType.SUCCEEDED, reason, holds=done, message=message)


def _after_end(seen: Observed) -> Plan:
    """Nothing of the job runs any more: let it go when it is told to, or when its time is over."""
    if seen.job.metadata.deletion_timestamp:
        held = FINALIZER in seen.job.metadata.finalizers
        return Plan(actions=(RemoveFinalizer(),) if held else ())
    expires_at = _expires_at(seen)
    if seen.now >= expires_at:
        return Plan(actions=(DeleteAgentJob(),))
    return Plan(requeue_at=expires_at)


def _expires_at(seen: Observed) -> datetime:
    """When a finished AgentJob is deleted (R-TTL)."""
    effective = seen.job.status.effective
    ttl = seen.job.spec.ttl_seconds_after_finished
    if ttl is None and effective:
        ttl = effective.ttl_seconds_after_finished
    if ttl is None:
        ttl = seen.policy.default_ttl
    return (seen.job.status.finished_at or seen.now) + timedelta(seconds=ttl)


# --- what the stages share ----------------------------------------------------------------------


def _mirror(
    seen: Observed,
    status: AgentJobStatus,
    *,
    requeue_at: datetime | None,
    actions: tuple[Action, ...] = (),
) -> Plan:
    """Write the status if it changed; a change that nobody waits for may wait for others."""
    old = seen.job.status
    status = st.fit(_observed(seen, status))
    if status == old:
        return Plan(actions=actions, requeue_at=requeue_at)
    if seen.written_at and not st.urgent(old, status):
        due = seen.written_at + timedelta(seconds=seen.policy.mirror_interval)
        if seen.now < due:
            wake = min(due, requeue_at) if requeue_at else due
            return Plan(actions=actions, requeue_at=wake)
    return Plan(status=status, actions=actions, notes=_notes(old, status), requeue_at=requeue_at)


def _notes(old: AgentJobStatus, new: AgentJobStatus) -> tuple[Note, ...]:
    """Events worth a line in `kubectl describe`: the start, the stop, the first real obstacle."""
    if new.started_at and not old.started_at:
        return (Note(Reason.CONTAINER_STARTED, f"pod {new.pod_name} runs the tool"),)
    waits = new.waiting
    if waits and not _ordinary(waits) and not (old.waiting and not _ordinary(old.waiting)):
        return (Note(Reason.WAITING, waits.message, warning=True),)
    return ()


def _ordinary(waiting: Waiting) -> bool:
    return waiting.code == "creating" and "starting" in waiting.message


def _observed(seen: Observed, status: AgentJobStatus) -> AgentJobStatus:
    """Stamp the generation, and what is on record of a request to stop."""
    status = status.model_copy(update={"observed_generation": seen.job.metadata.generation})
    if seen.job.spec.stop or seen.job.metadata.deletion_timestamp:
        status = _condition(seen, status, ConditionType.STOP_REQUESTED, Reason.STOP_REQUESTED)
    return status


def _condition(
    seen: Observed,
    status: AgentJobStatus,
    kind: ConditionType,
    reason: Reason,
    *,
    holds: bool = True,
    message: str = "",
) -> AgentJobStatus:
    return st.with_condition(
        status,
        kind,
        holds=holds,
        reason=reason,
        now=seen.now,
        generation=seen.job.metadata.generation,
        message=message,
    )


def _deadline(seen: Observed) -> datetime:
    """The deadline of an accepted job; lowering spec.deadlineSeconds moves it, nothing else."""
    settled = seen.job.status.deadline_at or seen.now
    return _earlier(settled, deadline_of(seen.job, seen.job.spec.deadline_seconds))


def _earlier(first: datetime | None, second: datetime | None) -> datetime:
    known = [moment for moment in (first, second) if moment is not None]
    return min(known)


def _counts(child: JobView, pods: tuple[PodView, ...]) -> PodCounts:
    """Pods counted from what is seen of them; the Job's own counters where pods are gone."""
    return PodCounts(
        active=sum(not pod.dead for pod in pods),
        succeeded=max(sum(pod.phase == "Succeeded" for pod in pods), child.succeeded),
        failed=max(sum(pod.phase == "Failed" for pod in pods), child.failed),
    )


def _pod_to_show(pods: tuple[PodView, ...]) -> PodView | None:
    """The pod to look at: the first that failed, else the newest that lives, else the newest."""
    failed = next((pod for pod in pods if pod.phase == "Failed"), None)
    alive = next((pod for pod in reversed(pods) if not pod.dead), None)
    return failed or alive or (pods[-1] if pods else None)


def _with(seen: Observed, status: AgentJobStatus) -> AgentJob:
    return seen.job.model_copy(update={"status": status})


def _short(text: str) -> str:
    return cut(one_line(text), CAUSE_MESSAGE_CHARACTERS)
