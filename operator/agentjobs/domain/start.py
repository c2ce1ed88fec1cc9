"""A start over HTTP or MCP: the AgentJob that is to be created, or why not."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from agentjobs.api.agentjob import AgentJob, ToolKind
from agentjobs.api.agenttool import AgentTool
from agentjobs.api.base import format_time
from agentjobs.api.names import API_VERSION, FINALIZER
from agentjobs.contract.calls import Fault, StartRequest
from agentjobs.domain import arguments as args
from agentjobs.domain.accept import accept
from agentjobs.domain.errors import AgentJobError, InvalidSpecError
from agentjobs.domain.idempotency import payload_of_request
from agentjobs.domain.jobids import parse_job_id
from agentjobs.domain.nesting import check_depth
from agentjobs.domain.observed import Observed, Policy

SHORTEST_TTL_SECONDS = 3600
"""A finished job of the gateway is kept at least so long: until then its key is remembered."""


class InvalidArgumentsError(AgentJobError):
    """Arguments that the tool's schema refuses."""

    def __init__(self, faults: tuple[Fault, ...]) -> None:
        self.faults = faults
        super().__init__("; ".join(f"{fault.pointer}: {fault.detail}" for fault in faults))


@dataclass(frozen=True, slots=True)
class Start:
    """A start whose caller is known and may make it."""

    request: StartRequest
    namespace: str
    name: str
    caller: str
    tool: AgentTool | None = None
    tool_kind: ToolKind = ToolKind.AGENT_TOOL


def agentjob_of(start: Start, policy: Policy, now: datetime) -> dict[str, Any]:
    """The AgentJob to create, checked as the operator will check it.

    :raises InvalidArgumentsError: the arguments break the tool's schema.
    :raises InvalidSpecError: it could never run; the message names the field.
    """
    body = _body(start)
    if start.tool is not None:
        _check_arguments(start.tool, start.request.arguments or {})
    stamped = {**body, "metadata": {**body["metadata"], "creationTimestamp": format_time(now)}}
    job = AgentJob.from_json(stamped)
    accepted = accept(Observed(now=now, job=job, policy=policy, tool=start.tool))
    ttl = accepted.effective.ttl_seconds_after_finished or 0
    body["spec"]["ttlSecondsAfterFinished"] = max(SHORTEST_TTL_SECONDS, ttl)
    return body


def _body(start: Start) -> dict[str, Any]:
    request = start.request
    spec: dict[str, Any] = {
        "requestedBy": start.caller,
        "idempotency": {
            "digest": payload_of_request(request).digest,
            "caller": start.caller,
        },
    }
    if request.tool is not None:
        spec["toolRef"] = {"kind": start.tool_kind.value, "name": request.tool}
    if request.arguments is not None:
        spec["arguments"] = request.arguments
    if request.template is not None:
        spec["template"] = request.template
    if request.deadline_seconds is not None:
        spec["deadlineSeconds"] = request.deadline_seconds
    if request.pending_deadline_seconds is not None:
        spec["pendingDeadlineSeconds"] = request.pending_deadline_seconds
    if request.depends_on:
        places = (parse_job_id(each) for each in sorted(set(request.depends_on)))
        spec["dependsOn"] = [{"name": place[1]} for place in places if place]
    if request.callback is not None:
        spec["callback"] = request.callback.to_json()
    return {
        "apiVersion": API_VERSION,
        "kind": "AgentJob",
        "metadata": {
            "name": start.name,
            "namespace": start.namespace,
            "finalizers": [FINALIZER],
        },
        "spec": spec,
    }


def _check_arguments(tool: AgentTool, arguments: Mapping[str, Any]) -> None:
    """Refuse arguments with a pointer to every fault."""
    check_depth(arguments, "arguments")
    schema = tool.spec.input_schema
    if schema is None:
        schema = {"type": "object", "additionalProperties": False}
    try:
        faults = args.faults_of(schema, args.fill_defaults(schema, arguments))
    except InvalidSpecError:
        # The schema itself: `accept` says so, and of which tool.
        return
    if faults:
        raise InvalidArgumentsError(
            tuple(
                Fault(pointer=f"/arguments{each.pointer}", detail=each.message) for each in faults
            )
        )
