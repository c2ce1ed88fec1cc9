"""What agents are shown of an AgentJob: at most 1 KiB."""

import json
from typing import Any

from agentjobs.api.agentjob import AgentJob
from agentjobs.api.names import TERMINAL_STATES, State
from agentjobs.contract.calls import (
    MAX_STATUS_BYTES,
    Cause,
    JobStatus,
    Progress,
    Waiting,
)
from agentjobs.domain.callbacks import EVENT_OF_STATE
from agentjobs.domain.jobids import job_id
from agentjobs.domain.texts import cut_bytes

TEXT_BYTES = (320, 160, 80, 40, 8)
"""Sizes that the longer texts are cut to, one after the other, until all fits."""


def state_of(job: AgentJob) -> State:
    """The state that a caller is told: a stop counts from when it is on record."""
    state = job.status.state or State.QUEUED
    if state in TERMINAL_STATES:
        return state
    stopping = job.spec.stop is not None or job.metadata.deletion_timestamp is not None
    return State.STOPPING if stopping else state


def render_status(job: AgentJob) -> bytes:
    """The status as compact JSON of at most MAX_STATUS_BYTES."""
    content = b""
    for size in TEXT_BYTES:
        content = _dumps(status_view(job, size).to_json())
        if len(content) <= MAX_STATUS_BYTES:
            break
    return content


def status_view(job: AgentJob, text_bytes: int = TEXT_BYTES[0]) -> JobStatus:
    """The status, its texts cut to that many bytes."""
    meta, spec, status = job.metadata, job.spec, job.status
    state = state_of(job)
    progress, cause, waiting = status.progress, status.cause, status.waiting

    def short(text: str) -> str:
        return cut_bytes(text, text_bytes)

    return JobStatus(
        job_id=job_id(meta.namespace, meta.name),
        status=state,
        tool=spec.tool_ref.name if spec.tool_ref else None,
        created_at=meta.creation_timestamp,
        started_at=status.started_at,
        finished_at=status.finished_at,
        deadline_at=status.deadline_at,
        attempts=len(status.attempts or ()),
        waiting=Waiting(code=waiting.code, message=short(waiting.message))
        if waiting and state is State.QUEUED
        else None,
        progress=Progress(
            percent=progress.percent,
            message=short(progress.message) if progress.message else None,
            at=progress.at,
        )
        if progress
        else None,
        summary=short(status.summary) if status.summary else None,
        cause=Cause.model_validate({**cause.model_dump(), "message": short(cause.message)})
        if cause
        else None,
        event_id=f"evt_{meta.uid}_{EVENT_OF_STATE[state]}" if state in EVENT_OF_STATE else None,
    )


def _dumps(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
