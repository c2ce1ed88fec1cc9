"""Why an attempt must end, how its pods are asked to go, and when they are proven dead."""

from collections.abc import Iterator
from datetime import datetime, timedelta

from agentjobs.api.agentjob import Ending, Waiting
from agentjobs.api.names import CAUSE_MESSAGE_CHARACTERS, CauseCode
from agentjobs.domain import status as st
from agentjobs.domain.children import JobView
from agentjobs.domain.observed import Observed
from agentjobs.domain.plan import Action, DeleteJob, ExpirePod, SuspendJob
from agentjobs.domain.pods import PodView
from agentjobs.domain.texts import cut, one_line
from agentjobs.domain.verdict import may_have_begun
from agentjobs.domain.waiting import hopeless, waiting_for

EXPIRED = 1
"""activeDeadlineSeconds of a pod that was asked to go."""


def ending_due(seen: Observed, deadline_at: datetime) -> Ending | None:
    """Why the job must end now, if it must. The first reason that was recorded stays."""
    if seen.job.status.ending:
        return seen.job.status.ending
    due = [(moment, ending) for moment, ending in _due(seen, deadline_at) if moment <= seen.now]
    if due:
        return min(due, key=lambda each: each[0])[1]
    reason = hopeless(seen)
    return _ending(seen, reason.code, reason.message) if reason else None


def _due(seen: Observed, deadline_at: datetime) -> Iterator[tuple[datetime, Ending]]:
    """All that would end the job, with its moment; of equal moments the first counts."""
    asked = _asked(seen)
    if asked:
        code = CauseCode.DECLINED if _declined(seen) else CauseCode.STOPPED
        yield _asked_at(seen), _ending(seen, code, asked)
    waiting = _waiting(seen)
    while_it = f" while waiting: {waiting.message}" if waiting else _while_running(seen)
    text = f"the deadline passed{while_it}"
    yield deadline_at, _ending(seen, CauseCode.DEADLINE_EXCEEDED, text)
    pending_at = pending_deadline(seen)
    if pending_at:
        text = "no container started in time" + (f": {waiting.message}" if waiting else "")
        yield pending_at, _ending(seen, CauseCode.PENDING_DEADLINE_EXCEEDED, text)


def pending_deadline(seen: Observed) -> datetime | None:
    """When the tool must have started at the latest; None once it has, or without a limit."""
    effective, child = seen.job.status.effective, seen.child
    seconds = effective.pending_deadline_seconds if effective else None
    if seconds is None or child is None or child.created is None or started(seen):
        return None
    return child.created + timedelta(seconds=seconds)


def started(seen: Observed) -> bool:
    """Whether the tool's container was ever seen running in this attempt."""
    attempt = st.current_attempt(seen.job.status)
    recorded = attempt is not None and attempt.started_at is not None
    return recorded or any(pod.started for pod in seen.pods)


def end_pods(seen: Observed, child: JobView) -> tuple[Action, ...]:
    """What still has to be done so that the attempt ends (R-STOP).

    A running tool of a Job that makes no other pod is ended through its own deadline, which keeps
    pod, exit code and log. Everything else is suspended, so that no pod follows; what a queue
    would resume is deleted.
    """
    if child.over or child.deleting:
        return ()
    alive = [pod for pod in seen.pods if not pod.dead]
    if child.single and alive and all(pod.started for pod in alive):
        return tuple(expire(pod) for pod in alive if can_expire(pod))
    if child.queued:
        return (DeleteJob(child.name, child.uid),)
    return () if child.suspended else (SuspendJob(child.name, child.uid),)


def expire(pod: PodView) -> ExpirePod:
    """Ask the kubelet to end a pod and to keep it."""
    return ExpirePod(pod.name, pod.uid)


def can_expire(pod: PodView) -> bool:
    """Whether the pod was not asked to go yet."""
    return pod.active_deadline != EXPIRED and pod.delete_by is None


def is_over(seen: Observed, child: JobView) -> bool:
    """Whether the attempt has ended and nothing of it can run any more (R-DEAD)."""
    if any(not pod.dead for pod in seen.pods):
        return False
    if child.placeholder or child.over:
        return True
    if child.retired:
        # The Job controller may have made another pod before it took note.
        return child.halted
    # The Job goes on counting a pod that nobody can end any more: its node is lost.
    lost = sum(pod.lost for pod in seen.pods)
    idle = child.halted and child.active + child.terminating <= lost
    # What a queue may resume is not over before it is deleted.
    if seen.job.status.ending and idle and not child.queued:
        return True
    if not child.single:
        return False
    begun = started(seen) or seen.job.status.pod_name
    if child.queued and begun and not seen.pods and not child.active + child.terminating:
        # It ended while nobody watched, and the Job controller does not count it.
        return True
    return any(_has_decided(pod, child) for pod in seen.pods)


def can_be_resumed(seen: Observed, child: JobView) -> bool:
    """Whether a Job that is over for us would run its tool again, should its queue resume it.

    The Job controller does not count a pod that it deleted because of a suspension.
    """
    if not _is_held(child):
        return False
    return not seen.pods or any(not (pod.final and pod.tracked) for pod in seen.pods)


def loses_its_place(seen: Observed, child: JobView) -> bool:
    """Whether a queue takes back the place of a Job whose tool has begun.

    Once its pod has ended, a Job that was resumed meanwhile makes another one at once. One that has
    made it before anybody could look runs on.
    """
    if child.retired:
        # It was resumed all the same; that its controller took note shows only while suspended.
        return not (child.suspended or child.over or child.deleting)
    if not _is_held(child) or not started(seen):
        return False
    goes = any(pod.delete_by and not pod.tracked for pod in seen.pods)
    return child.suspended or (goes and not child.active)


def is_to_be_held_back(seen: Observed, child: JobView) -> bool:
    """Whether its AgentJob was suspended after the Job was made, and may begin anew later.

    A tool that has begun and may not be repeated runs on: who suspended its job was too late.
    """
    if not seen.job.spec.suspend or child.retired or child.over or child.deleting:
        return False
    return not child.placeholder and (not started(seen) or st.repeatable(seen.job.status))


def _is_held(child: JobView) -> bool:
    """Whether a queue decides if the Job makes another pod."""
    counted = child.over or child.succeeded or child.failed
    return child.queued and child.single and not (counted or child.retired or child.deleting)


def _has_decided(pod: PodView, child: JobView) -> bool:
    """Whether a pod that is dead was the only one of its Job.

    A queue takes back the place of a Job whose tool has not begun, and gives it another later.
    """
    if not child.queued:
        return pod.started or pod.final
    return may_have_begun(pod) or (pod.final and pod.delete_by is None)


def lingering_until(seen: Observed, child: JobView) -> datetime | None:
    """When containers that outlive the tool's are ended (R-CONTAINER)."""
    if not child.single:
        return None
    for pod in seen.pods:
        if not pod.dead and pod.finished_at and any(c.running for c in pod.others):
            return pod.finished_at + timedelta(seconds=seen.policy.linger)
    return None


def _asked(seen: Observed) -> str:
    stop = seen.job.spec.stop
    if stop is not None:
        how = "declined" if stop.declined else "stopped"
        by = f"{how} by {stop.requested_by}" if stop.requested_by else f"{how} on request"
        return f"{by}: {stop.reason}" if stop.reason else by
    return "the AgentJob was deleted" if seen.job.metadata.deletion_timestamp else ""


def _declined(seen: Observed) -> bool:
    return bool(seen.job.spec.stop and seen.job.spec.stop.declined)


def _asked_at(seen: Observed) -> datetime:
    """When the end was asked for, as far as that is told; never later than it was seen."""
    stop = seen.job.spec.stop
    told = stop.at if stop else seen.job.metadata.deletion_timestamp
    return min(told or seen.job.metadata.creation_timestamp, seen.now)


def _waiting(seen: Observed) -> Waiting | None:
    if started(seen):
        return None
    return waiting_for(seen, seen.child) if seen.child else seen.job.status.waiting


def _while_running(seen: Observed) -> str:
    pod = next((pod for pod in seen.pods if not pod.dead), None)
    return f" while pod {pod.name} ran" if pod else ""


def _ending(seen: Observed, code: CauseCode, text: str) -> Ending:
    return Ending(code=code, message=cut(one_line(text), CAUSE_MESSAGE_CHARACTERS), at=seen.now)
