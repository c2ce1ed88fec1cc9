"""AgentJob: one long run of a tool, as a record that users write and watch."""

from enum import StrEnum
from typing import Annotated, Any

from pydantic import BeforeValidator, ConfigDict, Field

from agentjobs.api.base import (
    SET,
    Condition,
    Model,
    ObjectMeta,
    ResourceName,
    Seconds,
    ServerDefault,
    Time,
    cel,
    held_to,
    keyed_by,
    name_rule,
    readable_time,
)
from agentjobs.api.names import (
    CAUSE_MESSAGE_CHARACTERS,
    INLINE_RESULT_BYTES,
    MAX_DEPENDENCIES,
    MAX_DURATION_SECONDS,
    REDELIVER_CHARACTERS,
    SUMMARY_CHARACTERS,
    TERMINAL_STATES,
    CauseCode,
    EventType,
    Evidence,
    State,
    WaitingCode,
)

Text = Annotated[str, Field(max_length=1024)]
Preserved = Annotated[
    dict[str, Any], Field(json_schema_extra={"x-kubernetes-preserve-unknown-fields": True})
]
UserName = Annotated[str, Field(min_length=1, max_length=256)]


def unchanged(field: str) -> dict[str, Any]:
    """Keep a field, its presence included (R-IMMUTABLE).

    A transition rule on the field itself does not run when the field is added or removed.
    """
    return cel(
        f"has(self.{field}) == has(oldSelf.{field}) && "
        f"(!has(self.{field}) || self.{field} == oldSelf.{field})",
        f"{field} cannot be changed; create another AgentJob instead",
        field,
    )


class ToolKind(StrEnum):
    """Kinds of catalogue entries."""

    AGENT_TOOL = "AgentTool"
    CLUSTER_AGENT_TOOL = "ClusterAgentTool"


class ToolRef(Model):
    """Names a catalogue entry."""

    kind: Annotated[ToolKind, ServerDefault] = ToolKind.AGENT_TOOL
    """AgentTool (of the same namespace) or ClusterAgentTool."""
    name: ResourceName
    """Name of the tool."""


class DependencyCondition(StrEnum):
    """What a dependency must have reached."""

    SUCCEEDED = "Succeeded"
    FINISHED = "Finished"


class Dependency(Model):
    """Another AgentJob of the same namespace that must end first."""

    name: ResourceName
    """Name of the AgentJob to wait for. It may be created later."""
    condition: DependencyCondition = DependencyCondition.SUCCEEDED
    """Succeeded: it must end `done`, or this job fails. Finished: any end will do."""


class RetryCause(StrEnum):
    """Groups of causes after which another attempt may be made."""

    DISRUPTION = "disruption"
    OOM = "oom"
    TOOL_ERROR = "tool_error"


class Retry(Model):
    """When a failed attempt is followed by another."""

    max_attempts: Annotated[int, Field(ge=1, le=10)] = 1
    """Attempts in all, the first included."""
    causes: Annotated[tuple[RetryCause, ...], Field(max_length=3, json_schema_extra=SET)] = ()
    """Causes after which the tool may begin again: disruption, oom, tool_error."""


class Callback(Model):
    """Where the agent runtime is told."""

    url: Annotated[str, Field(min_length=1, max_length=2048, pattern=r"^https?://")]
    """Receiver of signed events. The platform's settings must allow the destination."""
    events: Annotated[tuple[EventType, ...], Field(max_length=5, json_schema_extra=SET)] | None = (
        None
    )
    """Event types to send. Absent: every end of the job, and job_input_required."""


class Stop(Model):
    """A request to end the job. Once set it stays."""

    requested_by: UserName | None = None
    """Who asked."""
    reason: Annotated[str, Field(max_length=1024)] | None = None
    """Why, for the record."""
    at: Annotated[Time | None, BeforeValidator(readable_time)] = None
    """When it was asked, by the requester's clock."""
    declined: bool | None = None
    """The start was declined by its own side before anything ran (gateway only)."""


class Idempotency(Model):
    """How a repeated start is recognised. Written by the gateway only."""

    digest: Annotated[str, Field(max_length=128)]
    """Digest of the payload of the start."""
    caller: UserName
    """Whose key it is."""


IMMUTABLE_FIELDS = (
    "toolRef",
    "arguments",
    "template",
    "pendingDeadlineSeconds",
    "dependsOn",
    "retry",
    "callback",
    "queueName",
    "requestedBy",
    "idempotency",
)


class AgentJobSpec(Model):
    """What is to be run, and its limits.

    Immutable but for `stop`, `suspend`, `ttlSecondsAfterFinished` and a lower `deadlineSeconds`.
    """

    model_config = ConfigDict(
        json_schema_extra=held_to(
            cel(
                "has(self.toolRef) != has(self.template)",
                "exactly one of toolRef and template must be given",
            ),
            cel(
                "!has(self.arguments) || has(self.toolRef)",
                "arguments belong to a toolRef; a template has none",
                "arguments",
            ),
            *(unchanged(field) for field in IMMUTABLE_FIELDS),
            cel(
                "!has(oldSelf.stop) || (has(self.stop) && self.stop == oldSelf.stop)",
                "a stop cannot be taken back or changed",
                "stop",
            ),
            cel(
                "!has(oldSelf.deadlineSeconds) || (has(self.deadlineSeconds) && "
                "self.deadlineSeconds <= oldSelf.deadlineSeconds)",
                "deadlineSeconds can only be lowered",
                "deadlineSeconds",
            ),
        )
    )

    tool_ref: ToolRef | None = None
    """The catalogue entry to run. Exactly one of toolRef and template must be given."""
    arguments: Preserved | None = None
    """Arguments of the tool, a JSON object that its inputSchema accepts; 16 KiB by default."""
    template: Preserved | None = None
    """A batch/v1 JobTemplateSpec (metadata.labels, metadata.annotations, spec) to run as it is."""
    deadline_seconds: Seconds | None = None
    """Seconds from the creation of this AgentJob until it is ended, whatever it is doing: waiting,
    approval, suspension and further attempts all count. Absent: the tool's or the platform's
    default. It can be lowered, never raised."""
    pending_deadline_seconds: Seconds | None = None
    """Seconds that may pass from the creation of the Job until its tool container starts. Absent:
    only deadlineSeconds counts."""
    depends_on: (
        Annotated[
            tuple[Dependency, ...],
            Field(max_length=MAX_DEPENDENCIES, json_schema_extra=keyed_by("name")),
        ]
        | None
    ) = None
    """AgentJobs of this namespace that must end before this one begins."""
    retry: Retry | None = None
    """When a failed attempt is followed by another. Absent: the tool's rule, else one attempt."""
    callback: Callback | None = None
    """Where the agent runtime is told that the job is over."""
    stop: Stop | None = None
    """Set it to end the job. It cannot be taken back."""
    suspend: bool | None = None
    """True holds the job back, false lets it go on. What its attempt had made is ended, and another
    attempt follows when it goes on. It cannot be set once a tool that may not be repeated has
    begun."""
    queue_name: ResourceName | None = None
    """Kueue LocalQueue that admits the job."""
    ttl_seconds_after_finished: Annotated[int, Field(ge=0, le=MAX_DURATION_SECONDS)] | None = None
    """Seconds that the finished AgentJob is kept, its Jobs with it. Absent: the platform's
    default."""
    requested_by: UserName | None = None
    """User that asked for the job. Must be the creator, unless the gateway vouches for it."""
    idempotency: Idempotency | None = None
    """Written by the gateway only."""


class Waiting(Model):
    """What a queued job waits for."""

    code: WaitingCode
    """One word: dependency, slot, kueue, suspended, unschedulable, quota_exceeded, image_pull,
    creating, retry."""
    message: Text = ""
    """The same for people, with the name of the object to look at."""


class ResolvedTool(Model):
    """The catalogue entry as it was when the job was accepted."""

    uid: Annotated[str, Field(max_length=64)]
    """metadata.uid of the tool."""
    generation: Annotated[int, Field(ge=0)]
    """metadata.generation of the tool."""
    digest: Annotated[str, Field(max_length=128)]
    """Digest of the tool's template and the arguments, `sha256:` and 64 hexadecimal digits."""
    repeatable: bool = False
    """Whether the tool may begin more than once."""


class Ending(Model):
    """Why the current attempt is being ended, recorded before its pod is asked to go."""

    code: CauseCode
    """What the job will be said to have ended of, unless it finished first."""
    message: Annotated[str, Field(max_length=CAUSE_MESSAGE_CHARACTERS)] = ""
    """The sentence that goes into the cause."""
    at: Time
    """When it was recorded. The first one stays."""


class ResultSource(StrEnum):
    """Where a result is taken from."""

    REPORT = "report"
    TERMINATION_MESSAGE = "terminationMessage"
    LAST_LINE = "lastLine"


class Effective(Model):
    """What holds for this job where its spec left it open, settled at acceptance."""

    pending_deadline_seconds: Seconds | None = None
    """Seconds from the Job's creation until its tool container must have started."""
    ttl_seconds_after_finished: Annotated[int, Field(ge=0, le=MAX_DURATION_SECONDS)] | None = None
    """Seconds that the finished job is kept, unless the spec says otherwise."""
    result_from: ResultSource
    """Where the result is taken from."""
    retry: Retry | None = None
    """When a failed attempt is followed by another: the spec's rule, else the tool's."""


class Attempt(Model):
    """One attempt: one Job."""

    number: Annotated[int, Field(ge=1)]
    """From 1."""
    job_name: Annotated[str, Field(max_length=63)]
    """Name of the Job. It was claimed here before the Job was created."""
    job_uid: Annotated[str | None, Field(alias="jobUID", max_length=64)] = None
    """metadata.uid of the Job, once it was seen."""
    started_at: Time | None = None
    """When its tool container started."""
    finished_at: Time | None = None
    """When its tool container ended."""
    cause: CauseCode | None = None
    """Why it ended, unless it succeeded."""
    ran: bool | None = None
    """Whether its tool began, or nobody can say that it did not. Absent until it is over."""


class PodCounts(Model):
    """Pods of the current attempt."""

    active: Annotated[int, Field(ge=0)] = 0
    """Pending or running."""
    succeeded: Annotated[int, Field(ge=0)] = 0
    """Phase Succeeded."""
    failed: Annotated[int, Field(ge=0)] = 0
    """Phase Failed."""


class Progress(Model):
    """How far the tool says it is. Written by the gateway from the tool's reports."""

    percent: Annotated[int, Field(ge=0, le=100)] | None = None
    """0 to 100."""
    message: Annotated[str, Field(max_length=256)] | None = None
    """One line of the tool's own words."""
    at: Time | None = None
    """When it was reported."""


class Cause(Model):
    """Why the job ended otherwise than `done`."""

    code: CauseCode
    """One word to act on."""
    message: Annotated[str, Field(max_length=CAUSE_MESSAGE_CHARACTERS)] = ""
    """One sentence that names the object to look at."""
    retryable: bool
    """Whether the same start may succeed without a change."""
    ran: bool
    """Whether the tool's container started. Init containers do not count."""
    exit_code: int | None = None
    """Exit code of the tool's container, where one was seen."""
    signal: Annotated[int, Field(ge=1, le=127)] | None = None
    """Signal that ended it: exit code minus 128, where that is one."""
    forced: bool = False
    """Whether it had to be killed after its grace period."""
    evidence: Evidence = Evidence.OBSERVED
    """observed, or lost where nobody saw how the container ended."""


class Output(Model):
    """What was kept of the tool's output."""

    bytes: Annotated[int, Field(ge=0)] = 0
    """Bytes archived."""
    sha256: Annotated[str, Field(max_length=64)] | None = None
    """Digest of the archived bytes, in hexadecimal digits."""
    gaps: Annotated[int, Field(ge=0)] = 0
    """Places where output is missing."""


class Result(Model):
    """What the tool handed in at its end."""

    source: ResultSource
    """Where it was taken from."""
    text: Annotated[str, Field(max_length=INLINE_RESULT_BYTES)] | None = None
    """The result itself, up to 4 KiB."""
    bytes: Annotated[int, Field(ge=0)] = 0
    """Size of the whole result."""
    truncated: bool = False
    """Whether text is only the beginning."""
    uri: Annotated[str, Field(max_length=512)] | None = None
    """Where a larger result is stored."""


class DeliveryState(StrEnum):
    """How the delivery of an event stands."""

    PENDING = "pending"
    DELIVERED = "delivered"
    GIVEN_UP = "given_up"


class Delivery(Model):
    """One event that is owed to the agent runtime, or was delivered."""

    id: Annotated[str, Field(max_length=128)]
    """Identifier of the event, the same on every try."""
    type: EventType
    """Type of the event."""
    time: Time
    """When what it tells happened."""
    state: DeliveryState = DeliveryState.PENDING
    """pending, delivered or given_up."""
    attempts: Annotated[int, Field(ge=0)] = 0
    """Tries so far."""
    holds: Annotated[int, Field(ge=0)] = 0
    """Times that it was due and held back, because its destination failed time after time."""
    first_attempt_at: Time | None = None
    """When it was first due, and tried or held back."""
    next_attempt_at: Time | None = None
    """When it is tried again."""
    last_error: Annotated[str, Field(max_length=256)] | None = None
    """What went wrong at the last try."""
    delivered_at: Time | None = None
    """When the receiver took it."""


class Outbox(Model):
    """Events of this job to the agent runtime. That of its end is part of the terminal write."""

    deliveries: Annotated[
        tuple[Delivery, ...], Field(max_length=8, json_schema_extra=keyed_by("id"))
    ] = ()
    """Oldest first."""
    redelivered: Annotated[str, Field(max_length=REDELIVER_CHARACTERS)] | None = None
    """The annotation agentjobs.dev/redeliver that was followed last."""


class AgentJobStatus(Model):
    """What was observed. Written by the operator; `progress` by the gateway. At most 8 KiB."""

    observed_generation: Annotated[int, Field(ge=0)] | None = None
    """The metadata.generation that this status is about."""
    conditions: Annotated[
        tuple[Condition, ...], Field(max_length=16, json_schema_extra=keyed_by("type"))
    ] = ()
    """Accepted, Started, StopRequested, Finished, Succeeded, OutputArchived, CallbackDelivered,
    Stalled."""
    state: State | None = None
    """queued, running, input_required, stopping, done, failed, cancelled or timed_out."""
    waiting: Waiting | None = None
    """What a queued job waits for."""
    tool: ResolvedTool | None = None
    """The catalogue entry as it was when the job was accepted."""
    effective: Effective | None = None
    """What holds for this job where its spec left it open, settled at acceptance."""
    ending: Ending | None = None
    """Why the current attempt is being ended."""
    pod_phase: Annotated[str, Field(max_length=32)] | None = None
    """Phase of the pod named by podName."""
    pod_name: Annotated[str, Field(max_length=253)] | None = None
    """The pod to look at: the current attempt's, or of several the first that failed."""
    pod_uids: Annotated[
        tuple[Annotated[str, Field(max_length=64)], ...] | None,
        Field(alias="podUIDs", max_length=16, json_schema_extra=SET),
    ] = None
    """Pods that may report for this job."""
    job_name: Annotated[str, Field(max_length=63)] | None = None
    """Name of the current attempt's Job."""
    attempts: (
        Annotated[tuple[Attempt, ...], Field(max_length=10, json_schema_extra=keyed_by("number"))]
        | None
    ) = None
    """Attempts, oldest first."""
    pods: PodCounts | None = None
    """Pods of the current attempt, counted."""
    started_at: Time | None = None
    """When a tool container first started."""
    finished_at: Time | None = None
    """When the job was over: the end of the tool's container, where one was seen."""
    deadline_at: Time | None = None
    """When the job is ended at the latest."""
    progress: Progress | None = None
    """How far the tool says it is."""
    summary: Annotated[str, Field(max_length=SUMMARY_CHARACTERS)] | None = None
    """One line of the result. A tool's own words: not to be trusted."""
    cause: Cause | None = None
    """Why the job ended otherwise than `done`."""
    output: Output | None = None
    """What was kept of the tool's output."""
    result: Result | None = None
    """What the tool handed in at its end."""
    callback: Outbox | None = None
    """Events that are owed to the agent runtime, and those delivered."""
    warnings: (
        Annotated[tuple[Annotated[str, Field(max_length=256)], ...], Field(max_length=8)] | None
    ) = None
    """What was changed or left out of what was asked for."""


ENDED = (
    "(has({0}.status) && has({0}.status.state) && {0}.status.state in "
    f"{sorted(str(state) for state in TERMINAL_STATES)})"
)
"""CEL: the job is over."""
SAME = (
    "has(self.status.{0}) == has(oldSelf.status.{0}) && "
    "(!has(self.status.{0}) || self.status.{0} == oldSelf.status.{0})"
)
"""CEL: a field of the status is what it was, or as absent as it was."""


class AgentJob(Model):
    """One long run of a tool: started once, watched, stopped, ended by a deadline, told about."""

    model_config = ConfigDict(
        json_schema_extra=held_to(
            name_rule("pods and labels carry it"),
            cel(
                "!has(self.spec.dependsOn) || "
                "self.spec.dependsOn.all(each, each.name != self.metadata.name)",
                "a job cannot depend on itself",
                field="spec.dependsOn",
            ),
            cel(
                f"!{ENDED.format('oldSelf')} || (has(self.status) && has(self.status.state) && "
                "self.status.state == oldSelf.status.state)",
                "the job is over; its end cannot be changed",
            ),
            cel(
                f"!{ENDED.format('oldSelf')} || "
                f"(has(self.status) && {SAME.format('finishedAt')} && {SAME.format('cause')})",
                "the job is over; when and why it ended cannot be changed",
            ),
            cel(
                f"!{ENDED.format('self')} || has(self.status.finishedAt)",
                "a job that is over has a finishedAt",
            ),
            cel(
                "!(has(self.spec.suspend) && self.spec.suspend) || "
                "(has(oldSelf.spec.suspend) && oldSelf.spec.suspend) || "
                "!has(self.status) || !has(self.status.startedAt) || "
                "(has(self.status.tool) && has(self.status.tool.repeatable) && "
                "self.status.tool.repeatable)",
                "the tool has begun and may not be repeated, so the job cannot be suspended; "
                "stop it instead",
            ),
        )
    )

    metadata: ObjectMeta
    spec: AgentJobSpec
    """What is to be run, and its limits."""
    status: AgentJobStatus = AgentJobStatus()
    """What was observed."""
