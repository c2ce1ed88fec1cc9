"""What all stages share: the status written when it changed, conditions, the deadline."""

from dataclasses import replace
from datetime import datetime, timedelta

from agentjobs.api.agentjob import (
    AgentJobStatus,
    Ending,
    PodCounts,
    Waiting,
)
from agentjobs.api.names import (
    CAUSE_MESSAGE_CHARACTERS,
    CauseCode,
    ConditionType,
    Reason,
    WaitingCode,
)
from agentjobs.domain import status as st
from agentjobs.domain.accept import deadline_of
from agentjobs.domain.children import JobView
from agentjobs.domain.observed import Observed
from agentjobs.domain.plan import (
    Action,
    Note,
    Plan,
)
from agentjobs.domain.pods import PodView
from agentjobs.domain.texts import cut, one_line

BY_REQUEST = frozenset(
    {WaitingCode.SUSPENDED, WaitingCode.DEPENDENCY, WaitingCode.SLOT, WaitingCode.KUEUE}
)


def mirror(
    seen: Observed,
    status: AgentJobStatus,
    *,
    requeue_at: datetime | None,
    actions: tuple[Action, ...] = (),
) -> Plan:
    """Write the status if it changed; a change that nobody waits for may wait for others."""
    old = seen.job.status
    status = st.fit(stamped(seen, status))
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
    """Whether it waits for what it was told to wait for, or simply starts."""
    if waiting.code is WaitingCode.CREATING:
        return "starting" in waiting.message
    return waiting.code in BY_REQUEST


def stamped(seen: Observed, status: AgentJobStatus) -> AgentJobStatus:
    """Stamp the generation, and what is on record of a request to stop."""
    status = status.model_copy(update={"observed_generation": seen.job.metadata.generation})
    if seen.job.spec.stop or seen.job.metadata.deletion_timestamp:
        status = with_condition(seen, status, ConditionType.STOP_REQUESTED, Reason.STOP_REQUESTED)
    return status


def with_condition(
    seen: Observed,
    status: AgentJobStatus,
    kind: ConditionType,
    reason: Reason,
    *,
    holds: bool = True,
    message: str = "",
) -> AgentJobStatus:
    """Set a condition of this job, now."""
    return st.with_condition(
        status,
        kind,
        holds=holds,
        reason=reason,
        now=seen.now,
        generation=seen.job.metadata.generation,
        message=message,
    )


def deadline(seen: Observed) -> datetime:
    """The deadline of an accepted job; lowering spec.deadlineSeconds moves it, nothing else."""
    settled = seen.job.status.deadline_at or seen.now
    return earlier(settled, deadline_of(seen.job, seen.job.spec.deadline_seconds))


def earlier(first: datetime | None, second: datetime | None) -> datetime:
    """The earlier of two moments, of which one at least is known."""
    known = [moment for moment in (first, second) if moment is not None]
    return min(known)


def counts(child: JobView, pods: tuple[PodView, ...]) -> PodCounts:
    """Pods counted from what is seen of them; the Job's own counters where pods are gone."""
    return PodCounts(
        active=sum(not pod.dead for pod in pods),
        succeeded=max(sum(pod.phase == "Succeeded" for pod in pods), child.succeeded),
        failed=max(sum(pod.phase == "Failed" for pod in pods), child.failed),
    )


def sentence(text: str) -> str:
    """A text as the message of a cause: one line, of bounded length."""
    return cut(one_line(text), CAUSE_MESSAGE_CHARACTERS)


def invalid(seen: Observed, error: Exception) -> Ending:
    """The ending of a job that can never be run."""
    return Ending(code=CauseCode.INVALID_SPEC, message=sentence(str(error)), at=seen.now)


def with_status(seen: Observed, status: AgentJobStatus) -> Observed:
    """The same with a status that is not written yet."""
    return replace(seen, job=seen.job.model_copy(update={"status": status}))
