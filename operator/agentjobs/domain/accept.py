"""What is to be run: spec, tool and platform settings brought together, once (R-TOOL)."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, TypeVar

from agentjobs.api.agentjob import (
    AgentJob,
    AgentJobSpec,
    Effective,
    ResolvedTool,
    ResultSource,
    Retry,
    ToolRef,
)
from agentjobs.api.agenttool import AgentTool, ResourceRequirements
from agentjobs.domain import arguments as args
from agentjobs.domain.destinations import as_address, host_of
from agentjobs.domain.errors import InvalidSpecError
from agentjobs.domain.nesting import check_depth
from agentjobs.domain.observed import Observed, Policy
from agentjobs.domain.quantity import parse_quantity
from agentjobs.domain.template import Template, containers_of, read_template

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Accepted:
    """Everything that a Job is made of."""

    template: Template
    tool: ResolvedTool | None
    tool_name: str
    arguments: Mapping[str, Any] | None
    default_resources: ResourceRequirements | None
    deadline_at: datetime
    effective: Effective
    suspend: bool
    queue: str | None
    warnings: tuple[str, ...] = ()


def accept(seen: Observed) -> Accepted:
    """Bring together spec, tool and settings.

    :raises InvalidSpecError: if this can never be run; the message names the field.
    """
    if seen.job.spec.callback:
        namespace, url = seen.job.metadata.namespace, seen.job.spec.callback.url
        seen.policy.destinations.check_url(namespace, url)
        seen.policy.destinations.check_found(namespace, url, seen.receiver_at or ())
    if seen.job.spec.tool_ref:
        return _from_tool(seen, seen.job.spec.tool_ref)
    template = read_template(seen.job.spec.template, namespace=seen.job.metadata.namespace)
    _check_retry(seen.job.spec.retry, template, "spec.template")
    return _accepted(seen, template, None)


def name_to_look_up(seen: Observed) -> str | None:
    """The receiver's name, while nobody knows where it leads; once accepted, the send checks it."""
    if seen.job.spec.callback is None or seen.receiver_at is not None or seen.job.status.state:
        return None
    try:
        host, _ = host_of(seen.job.spec.callback.url)
    except InvalidSpecError:
        return None
    return host if as_address(host) is None else None


def check_tool(tool: AgentTool) -> Template:
    """Check that jobs can be started with a tool.

    :raises InvalidSpecError: if not; the message names the field of the tool.
    """
    template = read_template(tool.spec.template, namespace=tool.metadata.namespace)
    _check_retry(tool.spec.retry, template, "spec.template")
    args.check_input_schema(tool.spec.input_schema or {})
    _check_resources(tool, template)
    if tool.spec.confirm or tool.spec.approval:
        raise InvalidSpecError(
            "spec.approval and spec.confirm: asking people is not supported by this version, "
            "and such a tool is never run without asking"
        )
    return template


def deadline_of(job: AgentJob, spec_deadline: int | None) -> datetime | None:
    """When a deadline of that many seconds passes: counted from creation (R-DEADLINE)."""
    if spec_deadline is None:
        return None
    return job.metadata.creation_timestamp + timedelta(seconds=spec_deadline)


def digest_of(template: Mapping[str, Any], arguments: Mapping[str, Any]) -> str:
    """Digest of a tool's template and the arguments."""
    text = json.dumps([template, arguments], sort_keys=True, separators=(",", ":"))
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def _from_tool(seen: Observed, ref: ToolRef) -> Accepted:
    tool = seen.tool
    if tool is None:
        raise InvalidSpecError(
            f"spec.toolRef: there is no {ref.kind.value} {ref.name}"
            + (f" in namespace {seen.job.metadata.namespace}" if ref.kind == "AgentTool" else "")
        )
    try:
        template = check_tool(tool)
    except InvalidSpecError as error:
        raise InvalidSpecError(f"{ref.kind.value} {ref.name} is unusable: {error}") from error
    _check_retry(seen.job.spec.retry, template, f"{ref.kind.value} {ref.name}")
    _check_limits(seen.job.spec, tool)
    arguments = _arguments(seen.job.spec, tool, seen.policy)
    accepted = _accepted(seen, template, tool)
    resolved = ResolvedTool(
        uid=tool.metadata.uid,
        generation=tool.metadata.generation,
        digest=digest_of(tool.spec.template, arguments),
        repeatable=tool.spec.idempotent,
    )
    _unchanged(seen.job.status.tool, resolved, ref)
    return _with_tool(accepted, tool, resolved, arguments)


def _with_tool(
    accepted: Accepted, tool: AgentTool, resolved: ResolvedTool, arguments: Mapping[str, Any]
) -> Accepted:
    return Accepted(
        template=accepted.template,
        tool=resolved,
        tool_name=tool.metadata.name,
        arguments=arguments,
        default_resources=tool.spec.defaults.resources if tool.spec.defaults else None,
        deadline_at=accepted.deadline_at,
        effective=accepted.effective,
        suspend=accepted.suspend,
        queue=accepted.queue,
        warnings=tuple(args.environment(arguments)[1]),
    )


def _accepted(seen: Observed, template: Template, tool: AgentTool | None) -> Accepted:
    spec = seen.job.spec
    defaults = tool.spec.defaults if tool else None
    deadlines = [
        deadline_of(seen.job, seconds)
        for seconds in (spec.deadline_seconds, template.active_deadline)
    ]
    fallback = (defaults and defaults.deadline_seconds) or seen.policy.default_deadline
    # Who asks for nothing gets no more than who asks for the most.
    limit = tool.spec.limits.deadline_seconds if tool and tool.spec.limits else None
    asked = any(deadlines)
    deadlines += [None if asked else deadline_of(seen.job, fallback), deadline_of(seen.job, limit)]
    deadline_at = min((deadline for deadline in deadlines if deadline), default=None)
    if deadline_at is None:  # pragma: no cover - the platform's default is a number
        raise InvalidSpecError("no deadline")
    return Accepted(
        template=template,
        tool=None,
        tool_name="",
        arguments=None,
        default_resources=None,
        deadline_at=deadline_at,
        effective=Effective(
            pending_deadline_seconds=_first(
                spec.pending_deadline_seconds, defaults and defaults.pending_deadline_seconds
            ),
            ttl_seconds_after_finished=_first(
                template.ttl,
                defaults and defaults.ttl_seconds_after_finished,
                seen.policy.default_ttl,
            ),
            result_from=tool.spec.result_from if tool else ResultSource.TERMINATION_MESSAGE,
            retry=_first(spec.retry, tool and tool.spec.retry),
        ),
        suspend=bool(_first(spec.suspend, template.suspend)),
        queue=spec.queue_name or template.queue,
    )


def _first(*values: T | None) -> T | None:
    return next((value for value in values if value is not None), None)


def _arguments(spec: AgentJobSpec, tool: AgentTool, policy: Policy) -> dict[str, Any]:
    schema = tool.spec.input_schema
    if schema is None:
        schema = {"type": "object", "additionalProperties": False}
    check_depth(spec.arguments, "spec.arguments")
    arguments = args.fill_defaults(schema, spec.arguments or {})
    args.check_size(arguments, policy.max_arguments)
    faults = args.faults_of(schema, arguments)
    if faults:
        raise InvalidSpecError(args.describe(faults))
    return arguments


def _check_retry(retry: Retry | None, template: Template, where: str) -> None:
    if retry and retry.max_attempts > 1 and template.repeats:
        raise InvalidSpecError(
            f"retry: {where} decides on repetitions itself by {template.repeats}; use one of both"
        )


def _check_limits(spec: AgentJobSpec, tool: AgentTool) -> None:
    limits = tool.spec.limits
    if limits is None:
        return
    for field, asked, limit in (
        ("deadlineSeconds", spec.deadline_seconds, limits.deadline_seconds),
        (
            "pendingDeadlineSeconds",
            spec.pending_deadline_seconds,
            limits.pending_deadline_seconds,
        ),
    ):
        if asked is not None and limit is not None and asked > limit:
            raise InvalidSpecError(
                f"spec.{field}: {asked} is above the limit of tool {tool.metadata.name}, {limit}"
            )


def _check_resources(tool: AgentTool, template: Template) -> None:
    """Hold the template's containers to the tool's own limits."""
    allowed = tool.spec.limits.resources if tool.spec.limits else None
    if not allowed:
        return
    pod = template.body["spec"]["template"]["spec"]
    for container in containers_of(pod, "containers"):
        resources = container.get("resources")
        for kind, values in resources.items() if isinstance(resources, Mapping) else ():
            for name, value in values.items() if isinstance(values, Mapping) else ():
                if name in allowed and parse_quantity(value) > parse_quantity(allowed[name]):
                    raise InvalidSpecError(
                        f"spec.template: container {container.get('name')} has {kind}.{name} "
                        f"{value}, above spec.limits.resources.{name} {allowed[name]}"
                    )


def _unchanged(accepted: ResolvedTool | None, now: ResolvedTool, ref: ToolRef) -> None:
    if accepted is None or (accepted.uid == now.uid and accepted.digest == now.digest):
        return
    raise InvalidSpecError(
        f"{ref.kind.value} {ref.name} was changed between acceptance (generation "
        f"{accepted.generation}) and start (generation {now.generation}); start the job again"
    )
