"""The catalogue as tools of MCP, and tools for clients that know no tasks."""

from collections.abc import Iterable, Mapping
from typing import Any, Final

from agentjobs.api.agenttool import AgentTool
from agentjobs.domain.arguments import RESERVED_ARGUMENT
from agentjobs.gateway.catalogue import FOLLOW_UPS, KEY, STARTS
from agentjobs.gateway.mcp.wire import Json

START: Final = "start_"
"""Before a tool's name: start it and do not wait. No name of a tool has an underscore."""
FOLLOW_UP_NAMES: Final = frozenset(each.name for each in FOLLOW_UPS)


def definitions(tools: Iterable[AgentTool], *, plain: bool) -> list[Json]:
    """Definitions for tools/list, in the order of their names.

    :param plain: also tools that start and follow jobs without tasks.
    """
    found = list(tools)
    listed = [_definition(each.metadata.name, each.spec.description, each) for each in found]
    if plain:
        listed += [
            _definition(START + each.metadata.name, f"{each.spec.description}\n\n{STARTS}", each)
            for each in found
        ]
        listed += [
            {"name": each.name, "description": each.description, "inputSchema": each.parameters}
            for each in FOLLOW_UPS
        ]
    return sorted(listed, key=lambda each: str(each["name"]))


def _definition(name: str, description: str, tool: AgentTool) -> Json:
    schema: Mapping[str, Any] = tool.spec.input_schema or {"additionalProperties": False}
    properties = {**(schema.get("properties") or {}), RESERVED_ARGUMENT: KEY}
    return {
        "name": name,
        "description": description.rstrip(),
        "inputSchema": {**schema, "type": "object", "properties": properties},
    }
