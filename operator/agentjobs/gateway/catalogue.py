"""The catalogue as function definitions for a model."""

import asyncio
from typing import Any, Final

from agentjobs.api.agentjob import ToolKind
from agentjobs.api.agenttool import AgentTool
from agentjobs.contract.calls import JOB_ID, Function
from agentjobs.domain.arguments import RESERVED_ARGUMENT
from agentjobs.gateway.known import KnownTools
from agentjobs.gateway.reviews import Caller
from agentjobs.gateway.starts import Starts

STARTS: Final = (
    "Starts a job and returns its job_id at once. The result comes later, as an event: go on with "
    "other work, do not wait and do not start it again."
)
KEY: Final = {
    "type": "string",
    "minLength": 1,
    "maxLength": 255,
    "pattern": "^[\\x21-\\x7e]+$",
    "description": "A new random value for each new job; the same value to repeat a start whose "
    "answer was lost.",
}
JOB: Final = {"type": "string", "pattern": JOB_ID, "description": "As the start returned it."}


def _object(required: list[str], **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


FOLLOW_UPS: Final = (
    Function(
        name="get_job_status",
        description="Tells how a job stands. Ask only when it matters; its end comes as an event.",
        parameters=_object(["job_id"], job_id=JOB),
    ),
    Function(
        name="stop_job",
        description="Asks for the end of a job. Its status then says how it really ended.",
        parameters=_object(
            ["job_id"],
            job_id=JOB,
            reason={"type": "string", "maxLength": 1024, "description": "Why, for the record."},
        ),
    ),
    Function(
        name="get_job_result",
        description="Returns the result of a job that is done, in pages.",
        parameters=_object(
            ["job_id"],
            job_id=JOB,
            cursor={"type": "string", "description": "`next` of the page before."},
            limit={"type": "integer", "minimum": 4, "maximum": 65536, "description": "Bytes."},
        ),
    ),
)
"""What to do with the jobs that tools start."""


class Catalogue:
    """Tools that a caller may start."""

    def __init__(self, own: KnownTools, wide: KnownTools, starts: Starts) -> None:
        self._own = own
        self._wide = wide
        self._starts = starts

    async def functions(self, caller: Caller, namespace: str) -> tuple[Function, ...]:
        """Definitions of all usable tools that the caller may use in a namespace."""
        tools = await self.usable(caller, namespace)
        return (*(function_of(tool) for tool in tools), *FOLLOW_UPS)

    async def usable(
        self, caller: Caller, namespace: str, *, only: str = ""
    ) -> tuple[AgentTool, ...]:
        """All usable tools that the caller may use in a namespace, by name.

        :param only: the one of that name, if it is among them.
        """
        own = {tool.metadata.name: tool for tool in self._own.of(namespace)}
        found = [(tool, ToolKind.AGENT_TOOL) for tool in own.values()]
        found += [
            (tool, ToolKind.CLUSTER_AGENT_TOOL)
            for tool in self._wide.of("")
            if tool.metadata.name not in own
        ]
        usable = [
            (tool, kind)
            for tool, kind in found
            if tool.status.usable and only in {"", tool.metadata.name}
        ]
        allowed = await asyncio.gather(
            *(
                self._starts.may_use(caller, namespace, tool.metadata.name, kind)
                for tool, kind in usable
            )
        )
        tools = [tool for (tool, _), may in zip(usable, allowed, strict=True) if may]
        return tuple(sorted(tools, key=lambda tool: tool.metadata.name))


def function_of(tool: AgentTool) -> Function:
    """The definition that a model is given."""
    schema = dict(tool.spec.input_schema or {"additionalProperties": False})
    schema["type"] = "object"
    schema["properties"] = {**(schema.get("properties") or {}), RESERVED_ARGUMENT: KEY}
    schema["required"] = [*(schema.get("required") or ()), RESERVED_ARGUMENT]
    return Function(
        name=tool.metadata.name,
        description=f"{tool.spec.description.rstrip()}\n\n{STARTS}",
        parameters=schema,
    )
