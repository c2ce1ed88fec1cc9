"""AgentTool and ClusterAgentTool: catalogue entries that agents may start."""

from enum import StrEnum
from typing import Annotated

from pydantic import BeforeValidator, ConfigDict, Field, WithJsonSchema

from agentjobs.api.agentjob import Preserved, ResultSource, Retry, Text
from agentjobs.api.base import (
    SET,
    Condition,
    Model,
    ObjectMeta,
    Seconds,
    held_to,
    keyed_by,
    name_rule,
)
from agentjobs.api.names import MAX_DURATION_SECONDS

QUANTITY_PATTERN = r"^[0-9]+(\.[0-9]+)?(m|k|Ki|M|Mi|G|Gi|T|Ti|P|Pi|E|Ei)?$"


def _as_text(value: object) -> object:
    """Read `cpu: 2` as Kubernetes does: whole numbers need no quotes."""
    return str(value) if type(value) is int else value


Quantity = Annotated[
    str,
    BeforeValidator(_as_text),
    Field(max_length=32, pattern=QUANTITY_PATTERN),
    WithJsonSchema(
        {
            "anyOf": [{"type": "integer"}, {"type": "string"}],
            "maxLength": 32,
            "pattern": QUANTITY_PATTERN,
            "x-kubernetes-int-or-string": True,
        }
    ),
]
Resources = Annotated[dict[str, Quantity], Field(max_length=16)]


class ResourceRequirements(Model):
    """Resources of the tool's container, as in a pod."""

    requests: Resources | None = None
    """What the scheduler sets aside."""
    limits: Resources | None = None
    """What the container may not exceed."""


class ToolDefaults(Model):
    """Used where the AgentJob says nothing."""

    deadline_seconds: Seconds | None = None
    """Default of spec.deadlineSeconds."""
    pending_deadline_seconds: Seconds | None = None
    """Default of spec.pendingDeadlineSeconds."""
    ttl_seconds_after_finished: Annotated[int, Field(ge=0, le=MAX_DURATION_SECONDS)] | None = None
    """Default of spec.ttlSecondsAfterFinished."""
    resources: ResourceRequirements | None = None
    """Resources of the tool's container where the template gives none."""


class ToolLimits(Model):
    """What an AgentJob may ask for at most; more is refused, not cut."""

    deadline_seconds: Seconds | None = None
    """Largest spec.deadlineSeconds."""
    pending_deadline_seconds: Seconds | None = None
    """Largest spec.pendingDeadlineSeconds."""
    resources: Resources | None = None
    """Largest requests and limits of the tool's container, by resource name."""


class OnExpiry(StrEnum):
    """What happens when nobody answered in time."""

    REJECT = "reject"
    ACCEPT = "accept"


class Consent(Model):
    """What a person is shown before the tool runs. Texts may hold `${arguments.path}`."""

    action: Text
    """What will be done."""
    object: Text
    """To what."""
    value: Text
    """With which values."""
    consequence: Text
    """What follows from it."""
    expires_seconds: Seconds = 3600
    """How long an answer is waited for."""
    on_expiry: OnExpiry = OnExpiry.REJECT
    """What happens when nobody answered in time."""


class Approval(Consent):
    """A permission that somebody else than the requester must give."""

    approvers: Annotated[
        tuple[Annotated[str, Field(max_length=256, pattern=r"^(user|group):.+$")], ...],
        Field(min_length=1, max_length=16, json_schema_extra=SET),
    ]
    """Who may approve: `user:NAME` or `group:NAME`."""


class AgentToolSpec(Model):
    """A tool: what it does, what it takes, how it runs."""

    description: Annotated[str, Field(min_length=1, max_length=4096)]
    """What the tool does and when to use it, for the model that chooses it."""
    input_schema: Preserved | None = None
    """JSON Schema (2020-12) of the arguments, an object schema. Absent: no arguments."""
    template: Preserved
    """A batch/v1 JobTemplateSpec: how the tool runs."""
    defaults: ToolDefaults | None = None
    """Used where the AgentJob says nothing."""
    limits: ToolLimits | None = None
    """What an AgentJob may ask for at most."""
    retry: Retry | None = None
    """When a failed attempt is followed by another, unless the AgentJob says otherwise."""
    idempotent: bool = False
    """Whether the tool may begin more than once for one job."""
    max_concurrent: Annotated[int, Field(ge=1, le=10000)] | None = None
    """How many jobs of this tool may run at once. Absent: any number."""
    result_from: ResultSource = ResultSource.TERMINATION_MESSAGE
    """Where the result is taken from: report, terminationMessage or lastLine."""
    confirm: Consent | None = None
    """Ask the caller's side before each run."""
    approval: Approval | None = None
    """Ask somebody else before each run."""


class AgentToolStatus(Model):
    """Whether the tool can be used. Written by the operator."""

    observed_generation: Annotated[int, Field(ge=0)] | None = None
    """The metadata.generation that this status is about."""
    usable: bool | None = None
    """Whether jobs can be started with it."""
    message: Text | None = None
    """Why it is not usable."""
    conditions: Annotated[
        tuple[Condition, ...], Field(max_length=8, json_schema_extra=keyed_by("type"))
    ] = ()
    """Ready: the tool is usable."""


class AgentTool(Model):
    """A tool that agents of this namespace may start."""

    model_config = ConfigDict(json_schema_extra=held_to(name_rule("models call the tool by it")))

    metadata: ObjectMeta
    spec: AgentToolSpec
    """What the tool does, what it takes, how it runs."""
    status: AgentToolStatus = AgentToolStatus()
    """Whether the tool can be used."""


class ClusterAgentTool(AgentTool):
    """A tool that agents of all namespaces may start.

    In the catalogue an AgentTool of the same name hides it.
    """
