"""An attempt is claimed: make its Job, mirror it, end it, judge it."""

from dataclasses import replace
from datetime import datetime, timedelta

from agentjobs.api.agentjob import (
    AgentJobStatus,
    Attempt,
    Ending,
    ResultSource,
)
from agentjobs.api.names import (
    RETIRED_BY_QUEUE,
    RETIRED_SUSPENDED,
    RETIRED_UNBEGUN,
    CauseCode,
    ConditionType,
    Evidence,
    Reason,
    State,
)
from agentjobs.domain import status as st
from agentjobs.domain.accept import accept
from agentjobs.domain.asking import asks
from agentjobs.domain.children import JobView
from agentjobs.domain.ending import (
    can_be_resumed,
    can_expire,
    end_pods,
    ending_due,
    expire,
    is_over,
    is_to_be_held_back,
    lingering_until,
    loses_its_place,
    pending_deadline,
    started,
)
from agentjobs.domain.errors import InvalidSpecError
from agentjobs.domain.finish import begun_at, end, end_unstarted
from agentjobs.domain.gates import no_slot, suspended
from agentjobs.domain.job import desired_job, placeholder_job
from agentjobs.domain.keeping import to_be_heard, with_said
from agentjobs.domain.mirror import (
    counts,
    deadline,
    invalid,
    mirror,
    sentence,
    with_condition,
    with_status,
)
from agentjobs.domain.observed import Observed, ReadPods, ReadRefusals
from agentjobs.domain.plan import (
    CreateJob,
    Plan,
    RetireJob,
)
from agentjobs.domain.pods import PodView
from agentjobs.domain.refusal import RefusalKind
from agentjobs.domain.retries import try_again
from agentjobs.domain.verdict import (
    Verdict,
    ended_by_itself,
    ended_unseen,
    judge_job,
    judge_pod,
    may_have_begun,
    never_ran,
    preempted,
    preempted_unseen,
    vanished,
)
from agentjobs.domain.waiting import creating, hopeless, refused, waiting_for

HEARD_WITHIN = timedelta(seconds=2)
"""When to look again for what a tool has printed, should nobody tell."""
MAX_POD_UIDS = 16
NAME_PATIENCE = timedelta(seconds=60)
"""How long a placeholder is tried for. A former leader that slept longer has lost its Lease; a Job
that it makes all the same is suspended when it is seen (`afterwards`)."""


def during(seen: Observed, attempt: Attempt) -> Plan:
    """Decide for a job whose current attempt has claimed the name of a Job."""
    child = seen.child
    if child is None or child.owner_uid != seen.job.metadata.uid:
        return _without_job(seen, attempt)
    over = is_over(seen, child)
    due = None if over else ending_due(seen, deadline(seen))
    if (over or due) and _counts_unseen_pods(seen, child):
        return Plan(need=ReadPods())
    if over:
        return _over(seen, attempt, child)
    status = _mirrored(seen, child, due)
    taken = loses_its_place(seen, child) or is_to_be_held_back(seen, child)
    retire = (_retire(seen, child),) if taken else ()
    if due or retire:
        actions = (*retire, *(end_pods(seen, child) if due else ()))
        wake = seen.pods_lost_at if due else deadline(seen)
        return mirror(seen, status, actions=actions, requeue_at=wake)
    if _wants_reason(seen, child) and not seen.refusal_known:
        return Plan(need=ReadRefusals(child.uid))
    linger = lingering_until(seen, child)
    if linger and seen.now >= linger:
        actions = tuple(expire(p) for p in seen.pods if not p.dead and can_expire(p))
        return mirror(seen, status, actions=actions, requeue_at=deadline(seen))
    times = (
        deadline(seen),
        pending_deadline(seen),
        linger,
        seen.pods_lost_at,
        _next_look(seen, child),
    )
    return mirror(seen, status, requeue_at=min(t for t in times if t))


def _over(seen: Observed, attempt: Attempt, child: JobView) -> Plan:
    """End an attempt of which nothing can run any more."""
    if can_be_resumed(seen, child):
        # Before the end is written: a crash in between must not leave a tool that begins again.
        return Plan(actions=(_retire(seen, child),))
    if child.retired and not seen.pods_listed:
        return Plan(need=ReadPods())
    unheard = to_be_heard(seen)
    if unheard:
        return Plan(actions=unheard, requeue_at=seen.now + HEARD_WITHIN)
    ending = seen.job.status.ending or _unrecorded(seen, child)
    verdict = _unsure(seen, _judge(seen, child, ending))
    return try_again(seen, attempt, verdict) or end(seen, verdict, ending)


def _retire(seen: Observed, child: JobView) -> RetireJob:
    why = RETIRED_BY_QUEUE
    if child.held_back or is_to_be_held_back(seen, child):
        nothing_yet = child.suspended and child.halted and not (child.retired or seen.pods)
        unbegun = child.unbegun or (nothing_yet and not _may_have_begun(seen))
        why = RETIRED_UNBEGUN if unbegun else RETIRED_SUSPENDED
    return RetireJob(child.name, child.uid, child.version, why)


def _counts_unseen_pods(seen: Observed, child: JobView) -> bool:
    """Whether the Job knows of pods whose evidence is not here, because their watch lags behind."""
    counted = child.active + child.succeeded + child.failed
    # Pods that ended because a queue had their Job suspended are not counted.
    another = child.queued and child.active > sum(not pod.dead for pod in seen.pods)
    return not seen.pods_listed and (len(seen.pods) < counted or another)


def _unrecorded(seen: Observed, child: JobView) -> Ending | None:
    """Why a placeholder was made, should the record of it be missing."""
    return ending_due(seen, deadline(seen)) if child.placeholder else None


def _without_job(seen: Observed, attempt: Attempt) -> Plan:
    """Go on with a claimed attempt whose Job is not there, or is somebody else's."""
    if attempt.job_uid or seen.child_seen or attempt.started_at:
        return _job_gone(seen, attempt)
    if seen.child is not None:
        return _name_taken(seen, seen.child)
    if seen.refusal and seen.refusal.kind in {RefusalKind.INVALID, RefusalKind.DENIED}:
        reason = hopeless(seen)
        if reason:
            found = Ending(code=reason.code, message=sentence(reason.message), at=seen.now)
            # A stop that was recorded first names the end, whatever refuses its placeholder.
            return end_unstarted(seen, seen.job.status.ending or found)
    due = ending_due(seen, deadline(seen))
    if due:
        # The claim may still be acted upon by a former leader; only a taken name prevents it.
        status = seen.job.status.model_copy(update={"ending": due})
        state = st.live_state(status, running=False)
        waits = status.waiting if state is State.QUEUED else None
        status = status.model_copy(update={"state": state, "waiting": waits})
        return _take_name(seen, status, attempt.job_name)
    return _create_again(seen, attempt)


def _take_name(seen: Observed, status: AgentJobStatus, name: str) -> Plan:
    """Make a placeholder; one that is refused is tried again after a while."""
    ending = status.ending
    if seen.refusal and ending and seen.now >= ending.at + NAME_PATIENCE:
        return end_unstarted(with_status(seen, status), ending)
    if seen.refusal and seen.refusal_known:
        later = seen.now + timedelta(seconds=seen.policy.refusal_recheck)
        return mirror(seen, status, requeue_at=later)
    body = placeholder_job(seen.job, name)
    return mirror(seen, status, actions=(CreateJob(body),), requeue_at=None)


def _job_gone(seen: Observed, attempt: Attempt) -> Plan:
    """Go on with an attempt whose Job was there and is not any more; it is never made again."""
    if any(not pod.dead for pod in seen.pods):
        return _outlived(seen)
    if not seen.pods_listed:
        return Plan(need=ReadPods())
    ending = seen.job.status.ending
    if ending is None:
        verdict = vanished(attempt.job_name, seen.pods, ran=_may_have_begun(seen))
        return end(seen, verdict, None)
    return _vanished_while_ending(seen, ending)


def _outlived(seen: Observed) -> Plan:
    """Wait for pods that outlive their Job; a stop or a deadline ends them all the same."""
    due = ending_due(seen, deadline(seen))
    begun = begun_at(seen)
    first = seen.job.status.started_at or begun
    status = seen.job.status.model_copy(update={"ending": due, "started_at": first})
    status = st.with_attempt(status, started_at=begun)
    if begun:
        status = with_condition(seen, status, ConditionType.STARTED, Reason.CONTAINER_STARTED)
    state = st.live_state(status, running=begun is not None, asks=asks(seen))
    waiting = status.waiting if state is State.QUEUED else None
    status = status.model_copy(update={"state": state, "waiting": waiting})
    if not due:
        times = (deadline(seen), seen.pods_lost_at)
        return mirror(seen, status, requeue_at=min(t for t in times if t))
    actions = tuple(expire(p) for p in seen.pods if not p.dead and can_expire(p))
    return mirror(seen, status, actions=actions, requeue_at=seen.pods_lost_at)


def _vanished_while_ending(seen: Observed, ending: Ending) -> Plan:
    """The Job that was being ended is gone: deleted by us because of its queue, or by others."""
    pod = next((p for p in reversed(seen.pods) if may_have_begun(p)), None)
    if pod is not None:
        linger, handed_in = seen.policy.linger, _handed_in(seen)
        return end(seen, judge_pod(pod, ending, linger=linger, handed_in=handed_in), ending)
    return end(seen, ended_unseen(ending) if _may_have_begun(seen) else never_ran(ending), ending)


def _name_taken(seen: Observed, other: JobView) -> Plan:
    due = ending_due(seen, deadline(seen))
    if due:
        return end_unstarted(seen, due)
    if other.owner == f"AgentJob {seen.job.metadata.name}":
        message = f"waits for Job {other.name} of an earlier AgentJob of this name to go"
        status = seen.job.status.model_copy(
            update={"waiting": creating(other.name).model_copy(update={"message": message})}
        )
        return mirror(seen, status, requeue_at=deadline(seen))
    owner = f"belongs to {other.owner}" if other.owner else "belongs to nobody"
    message = f"Job {other.name} exists already and {owner}; delete it or choose another name"
    return end_unstarted(
        seen, Ending(code=CauseCode.INVALID_SPEC, message=sentence(message), at=seen.now)
    )


def _create_again(seen: Observed, attempt: Attempt) -> Plan:
    """Act on a claim whose Job was never seen. The name makes a second creation harmless."""
    try:
        accepted = accept(seen)
    except InvalidSpecError as error:
        status = seen.job.status.model_copy(update={"ending": invalid(seen, error)})
        return _take_name(seen, status, attempt.job_name)
    held = suspended(seen, accepted)
    if held:
        status = seen.job.status.model_copy(update={"waiting": held.waiting})
        return mirror(seen, status, requeue_at=deadline(seen))
    waiting = no_slot(seen) if attempt.number == 1 else None
    if waiting:
        # A former leader's claim, which came when its slot had been given to another.
        status = seen.job.status.model_copy(update={"waiting": waiting})
        return replace(mirror(seen, status, requeue_at=deadline(seen)), postponed=True)
    if seen.refusal:
        status = seen.job.status.model_copy(update={"waiting": refused(seen.refusal)})
        if seen.refusal.kind is RefusalKind.RIGHTS:
            status = with_condition(
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
        return mirror(seen, status, requeue_at=min(later, deadline(seen)))
    accepted = replace(accepted, deadline_at=deadline(seen))
    body, _ = desired_job(
        seen.job, accepted, attempt=attempt.number, now=seen.now, policy=seen.policy
    )
    return mirror(seen, status, actions=(CreateJob(body),), requeue_at=later)


def _judge(seen: Observed, child: JobView, ending: Ending | None) -> Verdict:
    linger = seen.policy.linger
    if ending and not _may_have_begun(seen) and not child.complete:
        return never_ran(ending)
    began = [pod for pod in seen.pods if may_have_begun(pod)] or list(seen.pods)
    taken_back = ending is None and child.retired and not child.over
    if child.single and began:
        own = [pod for pod in began if ended_by_itself(pod, ending, linger=linger)]
        verdict = judge_pod((own or began)[-1], ending, linger=linger, handed_in=_handed_in(seen))
        return preempted(verdict, child) if taken_back else verdict
    if taken_back:
        watched = child.held_back and seen.child_seen and not _may_have_begun(seen)
        return preempted_unseen(child, ran=not (child.unbegun or watched))
    if ending and not child.over:
        return judge_pod(began[-1], ending, linger=linger) if began else ended_unseen(ending)
    return judge_job(child, seen.pods, ending, linger=linger)


def _handed_in(seen: Observed) -> bool:
    """Whether the tool has handed in its final result through the report API (R-REPORT)."""
    result = seen.job.status.result
    return result is not None and result.source is ResultSource.REPORT


def _may_have_begun(seen: Observed) -> bool:
    """Whether the tool began, or nobody can say that it did not."""
    if started(seen) or any(may_have_begun(pod) for pod in seen.pods) or _vanished(seen):
        return True
    # A pod on record that is not there came to its end while nobody watched.
    on_record = bool(seen.job.status.pod_name)
    child = seen.child
    if child is None or child.owner_uid != seen.job.metadata.uid:
        # Who saw the Job from the beginning has seen its pods too.
        return not seen.pods and (on_record or not seen.child_seen)
    return not seen.pods and bool(on_record or child.succeeded or child.failed)


def _vanished(seen: Observed) -> tuple[str, ...]:
    """Pods on record that came to their end while nobody watched; one may have been the tool's.

    They stay on record: what replaced them says nothing of them.
    """
    known = {pod.uid for pod in seen.pods}
    return tuple(uid for uid in seen.job.status.pod_uids or () if uid not in known)


def _unsure(seen: Observed, verdict: Verdict) -> Verdict:
    """Claim of no tool that it never began where a pod of its attempt has vanished."""
    if verdict.cause is None or verdict.cause.ran or not _vanished(seen):
        return verdict
    unseen = {"ran": True, "retryable": False, "evidence": Evidence.LOST}
    return replace(verdict, cause=verdict.cause.model_copy(update=unseen))


def _mirrored(seen: Observed, child: JobView, due: Ending | None) -> AgentJobStatus:
    """The status of an attempt that is not over."""
    pod = _pod_to_show(seen.pods)
    begun = begun_at(seen)
    # The name of a pod that is gone stays: it is the proof that its tool may have begun.
    name = pod.name if pod else seen.job.status.pod_name
    if child.queued and seen.pods and all(p.dead and not may_have_begun(p) for p in seen.pods):
        name = None
    alive = [p.uid for p in seen.pods if not p.dead]
    status = seen.job.status.model_copy(
        update={
            "deadline_at": deadline(seen),
            "ending": due,
            "job_name": child.name,
            "pod_name": name,
            "pod_phase": pod.phase if pod else None,
            "pod_uids": (*alive, *_vanished(seen))[:MAX_POD_UIDS] or None,
            "pods": counts(child, seen.pods),
            "started_at": seen.job.status.started_at or begun,
        }
    )
    status = st.with_attempt(status, job_uid=child.uid, started_at=begun)
    # Between the end of a container and that of its pod, and between two pods, it is not queued.
    running = begun is not None and not child.suspended
    state = st.live_state(status, running=running, asks=asks(seen))
    waiting = waiting_for(seen, child) if state is State.QUEUED else None
    status = status.model_copy(update={"state": state, "waiting": waiting})
    if begun:
        status = with_condition(seen, status, ConditionType.STARTED, Reason.CONTAINER_STARTED)
    return with_said(seen, status)


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


def _pod_to_show(pods: tuple[PodView, ...]) -> PodView | None:
    """The pod to look at: the first that failed, else the newest that lives, else the newest."""
    failed = next((pod for pod in pods if pod.phase == "Failed"), None)
    alive = next((pod for pod in reversed(pods) if not pod.dead), None)
    return failed or alive or (pods[-1] if pods else None)
