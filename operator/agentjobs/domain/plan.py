"""What is to be done after a decision: one status write, then the rest."""

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from agentjobs.api.agentjob import AgentJobStatus
from agentjobs.api.inputrequest import Outcome
from agentjobs.api.names import RETIRED_BY_QUEUE, Reason
from agentjobs.domain.observed import Need


@dataclass(frozen=True, slots=True)
class CreateJob:
    """Create a Job; if the name is taken, look at who owns it."""

    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class SuspendJob:
    """Suspend a Job: its pods are deleted with their grace period, and none follows."""

    name: str
    uid: str


@dataclass(frozen=True, slots=True)
class RetireJob:
    """See to it that a Job makes no more pods, whoever resumes it; only as it was at a version."""

    name: str
    uid: str
    version: str
    why: str = RETIRED_BY_QUEUE
    """RETIRED_BY_QUEUE, RETIRED_SUSPENDED or RETIRED_UNBEGUN."""


@dataclass(frozen=True, slots=True)
class DeleteJob:
    """Delete a Job and its pods, where a suspension would be taken back by a queue."""

    name: str
    uid: str


@dataclass(frozen=True, slots=True)
class ExpirePod:
    """Lower a pod's activeDeadlineSeconds to 1: the kubelet ends it and keeps the evidence."""

    name: str
    uid: str


@dataclass(frozen=True, slots=True)
class DeletePod:
    """Delete a dead pod; what it printed is kept elsewhere."""

    name: str
    uid: str
    job_uid: str
    """Of the batch/v1 Job."""


@dataclass(frozen=True, slots=True)
class Deliver:
    """Try to deliver an event of the outbox."""

    event_id: str


@dataclass(frozen=True, slots=True)
class FollowOutput:
    """Keep what a tool's container prints."""

    pod: str
    pod_uid: str
    job_uid: str
    """Of the batch/v1 Job."""
    container: str
    started_at: datetime | None
    attempt: int
    index: int


@dataclass(frozen=True, slots=True)
class ArchiveOutput:
    """See to it that all output of the job that can still be had is stored."""

    sources: tuple[FollowOutput, ...]
    """Containers that are there to be read."""
    attempts: tuple[int, ...] = ()
    """Attempts in which the tool began; each has a stream, be it only a gap."""


@dataclass(frozen=True, slots=True)
class DeleteOutput:
    """Delete what was kept of the job's output."""


@dataclass(frozen=True, slots=True)
class CloseQuestion:
    """Close a question without an answer, unless it has changed since: then it was answered."""

    name: str
    version: str
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class AddFinalizer:
    """Keep the AgentJob until its pod was ended honestly."""


@dataclass(frozen=True, slots=True)
class RemoveFinalizer:
    """Let the AgentJob go."""


@dataclass(frozen=True, slots=True)
class DeleteAgentJob:
    """Delete an AgentJob whose time to live is over."""


Action = (
    CreateJob
    | SuspendJob
    | RetireJob
    | DeleteJob
    | ExpirePod
    | DeletePod
    | Deliver
    | FollowOutput
    | ArchiveOutput
    | DeleteOutput
    | CloseQuestion
    | AddFinalizer
    | RemoveFinalizer
    | DeleteAgentJob
)


@dataclass(frozen=True, slots=True)
class Note:
    """A Kubernetes Event about the AgentJob, sent after the status write succeeded."""

    reason: Reason
    message: str
    warning: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """A decision. The status is written first; nothing else happens unless that succeeded."""

    status: AgentJobStatus | None = None
    """The status to write; None: it is right as it is."""
    actions: tuple[Action, ...] = ()
    notes: tuple[Note, ...] = ()
    requeue_at: datetime | None = None
    """When to look again, though nothing may have changed by then."""
    need: Need | None = None
    """A read without which nothing can be decided; then the rest is empty."""
    postponed: bool = False
    """Whether the job waits for a slot though it has claimed an attempt (R-SLOTS)."""
