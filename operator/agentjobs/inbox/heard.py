"""What an inbox has heard of a job: one event, however it came in."""

from dataclasses import dataclass
from datetime import datetime
from typing import Final

from agentjobs.api.names import EventType, State
from agentjobs.contract.calls import JobStatus
from agentjobs.contract.events import JobEvent

LONGEST_ID: Final = 255
TYPE_OF: Final = {
    State.DONE: EventType.COMPLETED,
    State.FAILED: EventType.COMPLETED,
    State.CANCELLED: EventType.CANCELLED,
    State.TIMED_OUT: EventType.TIMED_OUT,
}
ENDS: Final = frozenset(TYPE_OF.values())


@dataclass(frozen=True, slots=True)
class Heard:
    """One event of the platform. `tool` and `summary` are not to be trusted."""

    id: str
    type: EventType
    job_id: str
    tool: str
    """Empty: a template was run."""
    status: State
    summary: str
    cause: str
    """Empty: the job is done, or not over."""
    time: datetime

    @property
    def over(self) -> bool:
        """Whether it tells the end of its job."""
        return self.type in ENDS

    @property
    def namespace(self) -> str:
        """The namespace of its job."""
        return namespace_of(self.job_id)


def namespace_of(job_id: str) -> str:
    """The namespace in a job id."""
    return job_id.partition(".")[2]


def heard_from_event(event: JobEvent) -> Heard:
    """What the body of a callback tells.

    :raises ValueError: its members contradict each other.
    """
    data = event.data
    name, _, namespace = data.job_id.partition(".")
    if event.subject != data.job_id:
        raise ValueError("subject and data.job_id name different jobs")
    if not event.source.endswith(f"/namespaces/{namespace}/agentjobs/{name}"):
        raise ValueError("source and data.job_id name different jobs")
    # A question or progress may arrive when its job is over, and say so.
    if event.type in ENDS and TYPE_OF.get(data.status) != event.type:
        raise ValueError(f"a job that is {data.status} is not told as {event.type}")
    return Heard(
        id=event.id,
        type=event.type,
        job_id=data.job_id,
        tool=data.tool or "",
        status=data.status,
        summary=data.summary,
        cause=data.cause.value if data.cause else "",
        time=event.time,
    )


def heard_from_status(job: JobStatus) -> Heard | None:
    """The same from a job's status, under the id of its callback; None: it is not over."""
    if job.status not in TYPE_OF or job.event_id is None:
        return None
    return Heard(
        id=job.event_id,
        type=TYPE_OF[job.status],
        job_id=job.job_id,
        tool=job.tool or "",
        status=job.status,
        summary=job.summary or (job.cause.message if job.cause else ""),
        cause=job.cause.code.value if job.cause else "",
        time=job.finished_at or job.created_at,
    )
