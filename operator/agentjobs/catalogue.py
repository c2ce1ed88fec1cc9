"""Tools: whether jobs can be started with them, written into their status."""

import logging
from collections.abc import Callable
from datetime import UTC, datetime

from agentjobs.api.agentjob import ToolKind
from agentjobs.api.agenttool import AgentTool, AgentToolStatus
from agentjobs.api.base import Condition, ConditionStatus
from agentjobs.api.names import Reason
from agentjobs.cache import Cache, Key
from agentjobs.domain.accept import check_tool
from agentjobs.domain.errors import InvalidSpecError
from agentjobs.domain.texts import cut, one_line
from agentjobs.kube import AGENTTOOLS, CLUSTERAGENTTOOLS, ConflictError, Kube, NotFoundError

log = logging.getLogger(__name__)
READY = "Ready"
MESSAGE_CHARACTERS = 1024


class Catalogue:
    """Passes over tools."""

    def __init__(self, kube: Kube, cache: Cache, *, fence: Callable[[], None]) -> None:
        self._kube = kube
        self._cache = cache
        self._fence = fence

    async def run(self, key: Key) -> float | None:
        """Check one tool and write its status if that changed."""
        tool = self._cache.tools.get(key)
        if tool is None:
            return None
        status = judged(tool, datetime.now(UTC))
        if status == tool.status:
            return None
        self._fence()
        resource = AGENTTOOLS if key.kind == ToolKind.AGENT_TOOL else CLUSTERAGENTTOOLS
        body = {
            "metadata": {"resourceVersion": tool.metadata.resource_version},
            "status": {"message": None, **status.to_json()},
        }
        try:
            answer = await self._kube.patch(resource, key.namespace, key.name, body, "status")
        except (ConflictError, NotFoundError) as error:
            log.debug("%s %s changed under the pass: %s", key.kind, key.name, error)
            return None
        self._cache.put_tool({"kind": key.kind, **answer})
        return None


def judged(tool: AgentTool, now: datetime) -> AgentToolStatus:
    """The status that a tool deserves."""
    message = ""
    try:
        check_tool(tool)
    except InvalidSpecError as error:
        message = cut(one_line(str(error)), MESSAGE_CHARACTERS)
    generation = tool.metadata.generation
    value = ConditionStatus.FALSE if message else ConditionStatus.TRUE
    old = next((c for c in tool.status.conditions if c.type == READY), None)
    ready = Condition(
        type=READY,
        status=value,
        reason=Reason.UNUSABLE if message else Reason.USABLE,
        message=message,
        last_transition_time=old.last_transition_time if old and old.status == value else now,
        observed_generation=generation,
    )
    return AgentToolStatus(
        observed_generation=generation,
        usable=not message,
        message=message or None,
        conditions=(ready,),
    )
