"""Every name that the outside can see, declared once, next to its meaning."""

from enum import StrEnum
from typing import Final

GROUP: Final = "agentjobs.dev"
VERSION: Final = "v1alpha1"
API_VERSION: Final = f"{GROUP}/{VERSION}"

CATEGORY: Final = "agentjobs-all"
"""kubectl's word for all our kinds. Not `agentjobs`: kubectl takes a category before a resource of
the same name, and `kubectl delete agentjobs --all` would delete the tools too."""

LABEL_JOB: Final = f"{GROUP}/job"
"""Label of Jobs and pods: name of the AgentJob. For people and selectors; ownership goes by uid."""
LABEL_TOOL: Final = f"{GROUP}/tool"
"""Label of Jobs and pods: name of the tool, where there is one."""
LABEL_QUEUE: Final = "kueue.x-k8s.io/queue-name"
"""Kueue's label of a Job: the LocalQueue that admits it."""
ANNOTATION_ARGUMENTS: Final = f"{GROUP}/arguments"
"""Annotation of a pod: the tool's arguments as JSON, defaults filled in."""
ANNOTATION_ATTEMPT: Final = f"{GROUP}/attempt"
"""Annotation of a Job: number of its attempt, from 1."""
ANNOTATION_PLACEHOLDER: Final = f"{GROUP}/placeholder"
"""Annotation of a suspended Job that only takes the name of an attempt that must never begin."""
ANNOTATION_RETIRED: Final = f"{GROUP}/retired"
"""Annotation of a Job that makes no more pods: a queue took it back from a tool that had begun, or
its AgentJob was suspended."""
RETIRED_BY_QUEUE: Final = "true"
RETIRED_SUSPENDED: Final = "suspended"
RETIRED_UNBEGUN: Final = "suspended-before-it-began"
"""Values of it, all of which retire; the last: no pod of it was there, and none has come since."""
ANNOTATION_REDELIVER: Final = f"{GROUP}/redeliver"
"""Annotation of a finished AgentJob: whenever its value is a new one, the event is sent again."""
ANNOTATION_DEFAULT_CONTAINER: Final = "kubectl.kubernetes.io/default-container"
"""kubectl's annotation of a pod: which container is the tool."""
FINALIZER: Final = f"{GROUP}/finalizer"
"""Finalizer of an AgentJob: its pod is ended honestly before the record goes."""

MOUNT_PATH: Final = "/var/run/agentjobs"
"""Where a tool finds its arguments and its token."""
ARGUMENTS_FILE: Final = f"{MOUNT_PATH}/arguments.json"
TOKEN_FILE: Final = f"{MOUNT_PATH}/token"
VOLUME: Final = "agentjobs"
"""Name of the one volume that is added to a pod."""
REPORT_AUDIENCE: Final = "agentjobs-report"
"""Audience of the pod's token; it is valid for the report API and nothing else."""
ENV_ARGUMENT_PREFIX: Final = "AGENTJOBS_ARG_"

MAX_DEPENDENCIES: Final = 512
"""How many others a job may wait for."""
MAX_DURATION_SECONDS: Final = 366 * 24 * 3600
"""No duration of ours is longer; the API server refuses it."""
STATUS_BUDGET_BYTES: Final = 8 * 1024
"""The whole status of an AgentJob as JSON, always."""
MAX_REPORTED_BYTES: Final = 2**31 - 1
"""What a platform may let the pods of one job hand in as output, at most."""
INLINE_RESULT_BYTES: Final = 4 * 1024
"""A larger result is stored by reference."""
CAUSE_MESSAGE_CHARACTERS: Final = 256
CONDITION_MESSAGE_BYTES: Final = 1024
SUMMARY_CHARACTERS: Final = 280
REDELIVER_CHARACTERS: Final = 64
"""Of the annotation, that much counts."""


class State(StrEnum):
    """One word for people and agents, computed from what was observed (R-STATE-DERIVED)."""

    QUEUED = "queued"
    """Accepted; no attempt is running, not yet or not again."""
    RUNNING = "running"
    """A container of the current attempt is running."""
    INPUT_REQUIRED = "input_required"
    """An InputRequest of this job is open."""
    STOPPING = "stopping"
    """A stop was asked for or a deadline passed, and the pod is not proven dead yet."""
    DONE = "done"
    """The tool finished and exited 0."""
    FAILED = "failed"
    """It did not, and the cause says why."""
    CANCELLED = "cancelled"
    """It was stopped on request before it finished."""
    TIMED_OUT = "timed_out"
    """A deadline ended it."""


TERMINAL_STATES: Final = frozenset({State.DONE, State.FAILED, State.CANCELLED, State.TIMED_OUT})


class CauseCode(StrEnum):
    """Why a job ended otherwise than `done` (R-CAUSE)."""

    TOOL_ERROR = "tool_error"
    OOM_KILLED = "oom_killed"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    PENDING_DEADLINE_EXCEEDED = "pending_deadline_exceeded"
    IMAGE_PULL = "image_pull"
    INVALID_SPEC = "invalid_spec"
    ADMISSION_DENIED = "admission_denied"
    START_ERROR = "start_error"
    EVICTED = "evicted"
    PREEMPTED = "preempted"
    NODE_LOST = "node_lost"
    DELETED_EXTERNALLY = "deleted_externally"
    DEPENDENCY_FAILED = "dependency_failed"
    DECLINED = "declined"
    APPROVAL_DENIED = "approval_denied"
    INPUT_EXPIRED = "input_expired"
    STOPPED = "stopped"
    INTERNAL = "internal"


class WaitingCode(StrEnum):
    """What a queued job waits for."""

    DEPENDENCY = "dependency"
    SLOT = "slot"
    KUEUE = "kueue"
    SUSPENDED = "suspended"
    UNSCHEDULABLE = "unschedulable"
    QUOTA_EXCEEDED = "quota_exceeded"
    IMAGE_PULL = "image_pull"
    CREATING = "creating"
    RETRY = "retry"


class Evidence(StrEnum):
    """How the end is known."""

    OBSERVED = "observed"
    """The terminated state of the container was seen, or it never started."""
    LOST = "lost"
    """Nobody saw how the container ended: lost node, pod or Job deleted from outside."""


class ConditionType(StrEnum):
    """Types of AgentJob conditions."""

    ACCEPTED = "Accepted"
    """The spec can be run: tool found, arguments valid, template taken by the API server."""
    STARTED = "Started"
    """A tool container has started at least once."""
    STOP_REQUESTED = "StopRequested"
    """A stop was asked for; how the job ended is another matter."""
    FINISHED = "Finished"
    """The job is over and nothing of it runs."""
    SUCCEEDED = "Succeeded"
    """True when done; False when it ended otherwise."""
    OUTPUT_ARCHIVED = "OutputArchived"
    CALLBACK_DELIVERED = "CallbackDelivered"
    STALLED = "Stalled"
    """A person must act; the message says on what."""


class Reason(StrEnum):
    """Reasons of conditions and Events: a state, not a sentence. Stable."""

    ACCEPTED = "Accepted"
    INVALID_SPEC = "InvalidSpec"
    ADMISSION_DENIED = "AdmissionDenied"
    CONTAINER_STARTED = "ContainerStarted"
    STOP_REQUESTED = "StopRequested"
    DEADLINE_PASSED = "DeadlinePassed"
    COMPLETED = "Completed"
    FAILED = "Failed"
    CANCELLED = "Cancelled"
    TIMED_OUT = "TimedOut"
    WAITING = "Waiting"
    ATTEMPT_FAILED = "AttemptFailed"
    GRACE_PERIOD_CUT = "GracePeriodCut"
    OPERATOR_FORBIDDEN = "OperatorForbidden"
    ARCHIVED = "Archived"
    ARCHIVE_PENDING = "ArchivePending"
    OUTPUT_LEFT_BEHIND = "OutputLeftBehind"
    DELIVERED = "Delivered"
    DELIVERY_PENDING = "DeliveryPending"
    DELIVERY_FAILED = "DeliveryFailed"
    DESTINATION_DENIED = "DestinationDenied"
    USABLE = "Usable"
    UNUSABLE = "Unusable"


class EventType(StrEnum):
    """Types of events to the agent runtime (R-EVENT)."""

    COMPLETED = "job_completed"
    CANCELLED = "job_cancelled"
    TIMED_OUT = "job_timed_out"
    INPUT_REQUIRED = "job_input_required"
    PROGRESS = "job_progress"
