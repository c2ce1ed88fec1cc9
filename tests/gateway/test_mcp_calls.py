"""Pages of the list of tools over MCP."""

from typing import Any, cast

import pytest

from agentjobs.api.agenttool import AgentTool
from agentjobs.contract.problems import ProblemType
from agentjobs.gateway.keys import KeyRing, Keys
from agentjobs.gateway.mcp.calls import Calls, Parts, Visit
from agentjobs.gateway.mcp.wire import Abilities
from agentjobs.gateway.problems import ProblemError
from agentjobs.gateway.reviews import Caller
from agentjobs.kube import Kube, UnavailableError
from agentjobs.metrics import GatewayMetrics
from tests.builders import a_tool

AGENT = Caller("system:serviceaccount:team-a:agent")


class Shelf:
    """A catalogue of many tools."""

    async def usable(self, _: Caller, namespace: str, *, only: str = "") -> tuple[AgentTool, ...]:
        assert namespace == "team-a"
        return tuple(a_tool(name=f"tool-{n:02}") for n in range(60) if only in {"", f"tool-{n:02}"})


class Away:
    """An API server that does not answer."""

    async def get(self, *_: Any) -> None:
        raise UnavailableError("away")


def some_calls() -> Calls:
    keys = KeyRing(cast("Kube", Away()), "agentjobs-system")
    keys.keys = Keys(b"n" * 32, (b"s" * 32,))
    rest = cast("Any", None)
    parts = Parts(rest, rest, rest, rest, cast("Any", Shelf()), rest, rest, keys)
    return Calls(parts, GatewayMetrics(), plain=True, sync_seconds=1)


def visit(place: str = "", caller: Caller = AGENT) -> Visit:
    return Visit(caller, place, Abilities())


async def test_the_list_of_tools_comes_in_pages_that_hold_each_once() -> None:
    calls = some_calls()
    first = await calls.tools(visit(), None)
    second = await calls.tools(visit("team-a"), first["nextCursor"])
    assert "nextCursor" not in second
    names = [each["name"] for page in (first, second) for each in page["tools"]]
    assert (len(first["tools"]), len(names)) == (100, 2 * 60 + 3)
    assert names == sorted(set(names))


async def test_a_call_needs_its_own_tool_alone() -> None:
    listed = await some_calls().tools(visit(), None, only="start_tool-07")
    names = {each["name"] for each in listed["tools"]}
    assert {"tool-07", "start_tool-07"} <= names
    assert "tool-08" not in names


async def test_a_cursor_of_somebody_elses_making_is_refused() -> None:
    with pytest.raises(ProblemError) as refused:
        await some_calls().tools(visit(), "AAAA")
    assert refused.value.kind is ProblemType.INVALID_CURSOR


async def test_r_namespace_a_person_has_to_name_one() -> None:
    with pytest.raises(ProblemError) as refused:
        await some_calls().tools(visit(caller=Caller("user:alice")), None)
    assert refused.value.kind is ProblemType.NAMESPACE_REQUIRED
