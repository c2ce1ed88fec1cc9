"""Which output is to be kept: followed from its start, put together after the end (R-OUTPUT)."""

from datetime import datetime

from agentjobs.api.agentjob import AgentJobStatus, Output, Progress
from agentjobs.api.names import ConditionType, Reason
from agentjobs.domain import status as st
from agentjobs.domain.mirror import with_condition
from agentjobs.domain.observed import Observed
from agentjobs.domain.plan import Action, ArchiveOutput, FollowOutput, Plan


def keep_output(seen: Observed, plan: Plan) -> tuple[Action, ...]:
    """What has to be done so that no output is lost."""
    status = plan.status or seen.job.status
    if not status.started_at:
        return ()
    if status.finished_at:
        known = is_archived(status) or (seen.archived and not seen.archived.trouble)
        begun = tuple(each.number for each in status.attempts or () if st.has_begun(each))
        return () if known else (ArchiveOutput(_sources(seen), begun),)
    return _sources(seen)


def is_archived(status: AgentJobStatus) -> bool:
    """Whether the record says what was kept of all output."""
    return archived_at(status) is not None


def to_be_heard(seen: Observed) -> tuple[FollowOutput, ...]:
    """Tools that have ended before anybody read what they printed; it may be their summary.

    A stream that is followed shows a line long before the kubelet tells of an end, so this concerns
    tools that are over at once, and those that ended while no operator was there.
    """
    if not seen.keeps_output or seen.job.metadata.deletion_timestamp:
        return ()
    return tuple(each for each in _sources(seen) if each.pod_uid not in seen.heard)


def archived_at(status: AgentJobStatus) -> datetime | None:
    """Since when all output is kept."""
    found = st.condition(status, ConditionType.OUTPUT_ARCHIVED)
    return found.last_transition_time if found and found.status == "True" else None


def with_archived(seen: Observed, status: AgentJobStatus) -> AgentJobStatus:
    """Record what was kept, if that is known by now."""
    found = seen.archived
    if found is None or is_archived(status):
        return status
    if found.trouble:
        return with_condition(
            seen,
            status,
            ConditionType.OUTPUT_ARCHIVED,
            Reason.ARCHIVE_PENDING,
            holds=False,
            message=f"output is missing until it can be stored: {found.trouble}",
        )
    output = Output(bytes=found.size, sha256=found.sha256 or None, gaps=found.gaps)
    parts = {0: "all of it", 1: "with one gap"}.get(found.gaps, f"with {found.gaps} gaps")
    return with_condition(
        seen,
        status.model_copy(update={"output": output}),
        ConditionType.OUTPUT_ARCHIVED,
        Reason.ARCHIVED,
        message=f"{found.size} bytes are kept, {parts}",
    )


def with_said(seen: Observed, status: AgentJobStatus) -> AgentJobStatus:
    """Record how far the tool says it is, where it says so in its output."""
    percent, message = seen.said.percent, seen.said.message or None
    old = status.progress or Progress()
    if (percent, message) in {(None, None), (old.percent, old.message)}:
        return status
    progress = Progress(percent=percent, message=message, at=seen.now)
    return status.model_copy(update={"progress": progress})


def _sources(seen: Observed) -> tuple[FollowOutput, ...]:
    attempt = st.current_attempt(seen.job.status)
    return tuple(
        FollowOutput(
            pod=pod.name,
            pod_uid=pod.uid,
            job_uid=pod.job_uid,
            container=pod.tool_name,
            started_at=pod.started_at,
            attempt=attempt.number if attempt else 1,
            index=pod.index,
        )
        for pod in seen.pods
        if pod.started
    )
