"""MCP over two replicas of the gateway, spoken by the SDK's own client (2026-07-28)."""

import asyncio
import http.client
import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import mcp_types as types
import pytest
import urllib3
from mcp.shared.exceptions import MCPError

from tests.apiclient import Document
from tests.controlplane import mcp_client
from tests.controlplane.mcp_client import (
    Listening,
    connected,
    error,
    make,
    post,
    structured,
    tell,
    text,
)
from tests.controlplane.reporting import Reporter, known, token_of
from tests.controlplane.stage import Place, Scenario, scenario, told_in
from tests.controlplane.tenants import (
    CALLS,
    START,
    Right,
    Tenant,
    name_of,
    unknown_id,
    until_offered,
    use,
    wait_until,
)
from tests.faulty_proxy import Fault
from tests.gateway_process import Agent

pytestmark = pytest.mark.controlplane

SCHEMA: Document = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}
REQUEST: Document = {
    "method": "elicitation/create",
    "params": {
        "mode": "form",
        "message": "Drop it?",
        "requestedSchema": {k: v for k, v in SCHEMA.items() if k != "additionalProperties"},
    },
}
TABLE: Document = {
    "type": "object",
    "properties": {"table": {"type": "string"}, "all": {"type": "boolean", "default": False}},
    "required": ["table", "all"],
}
YES: Document = {"action": "accept", "content": {"ok": True}}
READ = Right("agentjobs", ("get",))


class Town:
    """A namespace, an agent who may call its tool, two replicas."""

    def __init__(self, place: Place, *, served: bool = True, **tool: Any) -> None:
        self.place = place
        self.replicas = place.stage.mcp_replicas
        self.tenant = Tenant(place.stage, place.namespace)
        if served:
            place.stage.operator(place)
            place.tool("asker", **tool)
        else:
            self.tenant.usable_tool("asker", **tool)
        self.a = self.tenant.account("agent-a", CALLS, use("asker"))
        until_offered(self.a.agent, "asker", *self.replicas)

    def running(self, task_id: str) -> Reporter:
        """Start the pod of a task; return its tool."""
        name = name_of(task_id)
        pod = self.place.until_running(name)[name]
        wait_until(f"podUIDs of {name}", partial(known, self.place, name))
        return Reporter(self.replicas[0], self.place, name, token_of(self.place, pod))

    def finish(self, task_id: str, code: int = 0, message: str = "") -> None:
        name = name_of(task_id)
        self.place.kubelet.finish(self.place.until_pod(name), code, message=message)
        self.place.until_over(name)


async def until(client: Any, task_id: str, **wanted: Any) -> Document:
    """Poll a task until it has these members."""
    async with asyncio.timeout(40):
        while True:
            task = await tell(client, "tasks/get", task_id)
            if all(task.get(name) == value for name, value in wanted.items()):
                return task
            await asyncio.sleep(0.05)


@scenario("R-MRTR R-REPORT a tool is a task that asks, is answered and ends", own=True)
def asks_and_ends(place: Place) -> None:
    asyncio.run(_asks_and_ends(Town(place)))


async def _asks_and_ends(town: Town) -> None:
    one, two = town.replicas
    async with (
        connected(one, town.a.agent, asked=_nobody) as first,
        connected(two, town.a.agent, asked=_nobody) as second,
        connected(two, town.a.agent) as silent,
    ):
        listed = {each.name: each for each in (await first.list_tools()).tools}
        assert set(listed) == {
            "asker", "start_asker", "get_job_result", "get_job_status", "stop_job",
        }  # fmt: skip
        assert "idempotency_key" in listed["asker"].input_schema["properties"]
        task = await make(first, "asker")
        told = await tell(second, "tasks/get", task)
        assert (told["resultType"], told["status"], told["ttlMs"]) == ("complete", "working", None)
        tool = await asyncio.to_thread(town.running, task)
        for key in ("drop", "more"):
            question = {"key": key, "prompt": "Drop it?", "answer_schema": SCHEMA}
            await asyncio.to_thread(tool.until_taken, "ask", question)
        asked = await until(second, task, status="input_required")
        await until(second, task, inputRequests={"drop": REQUEST, "more": REQUEST})
        unseen = await tell(silent, "tasks/get", task)
        assert unseen["status"] == "working", "this client cannot be asked"
        assert "2 question(s)" in unseen["statusMessage"]
        assert asked["lastUpdatedAt"] >= asked["createdAt"]

        await _answered(town, tool, task, first, second)
        assert (await tell(first, "tasks/get", task))["status"] == "completed"


async def _answered(town: Town, tool: Reporter, task: str, first: Any, second: Any) -> None:
    """Some answers are none; the first that is one stays."""
    no_answers: tuple[Document, ...] = (
        {"drop": {"action": "accept"}},
        {"drop": {"action": "cancel"}},
        {"never-asked": YES},
    )
    for nothing in no_answers:
        acked = await tell(first, "tasks/update", task, inputResponses=nothing)
        assert acked == {"resultType": "complete"}
    bad = {"drop": {"action": "accept", "content": {"ok": "yes"}}, "more": YES}
    with pytest.raises(MCPError) as refused:
        await tell(first, "tasks/update", task, inputResponses=bad)
    assert refused.value.error.code == -32602
    assert refused.value.error.data["errors"][0]["pointer"] == "/answer/ok"
    await until(second, task, inputRequests={"drop": REQUEST})
    assert tool.ask("ask/drop").body["outcome"] == "open"
    assert tool.ask("ask/more").body["answer"] == {"ok": True}
    for response in ({"drop": YES}, {"drop": {"action": "decline"}}, {"drop": YES}):
        acked = await tell(first, "tasks/update", task, inputResponses=response)
        assert acked == {"resultType": "complete"}
    given = await asyncio.to_thread(tool.ask, "ask/drop?wait=20")
    assert given.body["answer"] == {"ok": True}, "the first answer stays"
    await until(second, task, status="working")

    await asyncio.to_thread(town.finish, task, 0, '{"rows": 3}')
    ended = await until(second, task, status="completed")
    assert ended["result"]["isError"] is False
    assert ended["result"]["structuredContent"] == {"rows": 3}
    assert ended["result"]["content"] == [{"type": "text", "text": '{"rows": 3}'}]
    assert ended["ttlMs"] >= 3600_000
    assert await tell(first, "tasks/cancel", task) == {"resultType": "complete"}


async def _nobody(_: Any, __: types.ElicitRequestParams) -> types.ElicitResult:
    raise AssertionError("a task is asked about by tasks/get")


@scenario("R-STOP R-CAUSE a task is cancelled; a tool that fails is a result", own=True)
def ends_otherwise(place: Place) -> None:
    town = Town(place)

    async def story() -> None:
        async with connected(town.replicas[0], town.a.agent) as client:
            stopped, failed = await make(client, "asker"), await make(client, "asker")
            for each in (stopped, failed):
                await asyncio.to_thread(town.running, each)
            for _ in range(2):
                assert await tell(client, "tasks/cancel", stopped) == {"resultType": "complete"}
            told = await until(client, stopped, status="cancelled")
            assert not {"result", "error", "inputRequests"} & set(told)
            await asyncio.to_thread(town.finish, failed, 3)
            told = await until(client, failed, status="completed")
            assert told["result"]["isError"] is True
            assert told["result"]["structuredContent"]["cause"]["exit_code"] == 3

    asyncio.run(story())


@scenario("R-AUTH R-EVENT who listens is told of own tasks as they change, to the end", own=True)
def listens(place: Place) -> None:
    secure: dict[str, str | int] = {
        **place.stage.certificate("mcp-tls"),
        "MCP": "true",
        "END_SECONDS": 10,
    }
    third = place.stage.gateway("mcp-3", wait=False, settings=secure)
    town = Town(place)
    b = town.tenant.account("agent-b", CALLS)
    params = {"name": "asker"}
    made = [post(town.replicas[0], town.a.agent, "tools/call", params) for _ in range(2)]
    first, second = (each.body["result"]["taskId"] for each in made)
    unknown = unknown_id(place.namespace)
    hears = Listening(town.replicas[1], town.a.agent, first, unknown, first)
    subscription = {"io.modelcontextprotocol/subscriptionId": 7}
    ended = {"resultType": "complete", "_meta": subscription}
    deaf = Listening(town.replicas[1], b.agent, first)
    assert deaf.until_ended() == ended
    assert deaf.told() == []
    wait_until("snapshot", hears.told)
    acknowledged, snapshot, *_ = hears.frames
    assert acknowledged["method"] == "notifications/subscriptions/acknowledged"
    assert acknowledged["params"] == {"notifications": {"taskIds": [first]}, "_meta": subscription}
    assert (snapshot["params"]["taskId"], snapshot["params"]["ttlMs"]) == (first, None)
    assert snapshot["params"]["_meta"] == subscription

    third.wait_until_ready()
    trusting = Agent(town.a.agent.token, urllib3.PoolManager(ca_certs=third.trusted, timeout=60))
    ends = Listening(third, trusting, second)
    wait_until("snapshot", ends.told)
    assert third.terminate() == 0
    assert ends.until_ended() == ended
    assert {each["status"] for each in ends.told()} == {"working"}

    town.running(first)
    town.finish(first, message="forty-two")
    assert hears.until_ended() == ended
    told = hears.told()
    assert [each["status"] for each in told][-1] == "completed"
    assert told[-1]["result"]["content"] == [{"type": "text", "text": "forty-two"}]
    assert len({json.dumps(each) for each in told}) == len(told), "each was a change"
    listen: Document = {"notifications": {"taskIds": [first]}}
    one, a = town.replicas[0], town.a.agent
    undeclared = post(one, a, "subscriptions/listen", listen, capabilities={})
    assert error(undeclared) == (400, -32021)


@scenario("R-KEY a call repeated with its key is the same job, without one another", own=True)
def repeated(place: Place) -> None:
    town = Town(place, served=False)
    params = {"name": "asker", "arguments": {"idempotency_key": "k-1"}}

    def call(number: int) -> str:
        reply = post(town.replicas[number % 2], town.a.agent, "tools/call", params)
        assert reply.code == 200, reply.raw
        assert reply.body["result"]["resultType"] == "task"
        return str(reply.body["result"]["taskId"])

    with ThreadPoolExecutor(10) as pool:
        (this,) = set(pool.map(call, range(10)))
    made = town.a.agent.start(town.replicas[0], "k-1", "asker")
    assert made.body["job_id"] == this, "over HTTP too"
    params["arguments"] = {"idempotency_key": "k-1", "x": 1}
    other = post(town.replicas[0], town.a.agent, "tools/call", params).body["result"]
    assert (other["isError"], other["structuredContent"]["job_id"]) == (True, this)
    assert other["structuredContent"]["type"].endswith("/key-reused")
    params["arguments"] = {}
    one, two = call(0), call(0)
    assert len({this, one, two}) == len(town.tenant.agentjobs()) == 3


@scenario("R-KEY who hangs up during a start has started it all the same", own=True)
def hangs_up(place: Place) -> None:
    town = Town(place, served=False)
    proxy, gateway, agent = place.stage.mcp_proxy, town.replicas[1], town.a.agent
    creates = f"/namespaces/{place.namespace}/agentjobs"
    broken = threading.Event()
    broken.set()

    def choose(method: str, path: str) -> Fault:
        fails = broken.is_set() and method == "POST" and creates in path
        return Fault.BROKEN if fails else Fault.NONE

    def tries() -> int:
        return sum(each.method == "POST" and creates in each.path for each in proxy.passed)

    proxy.choose = choose
    params = {"name": "asker", "arguments": {"idempotency_key": "k-1"}}
    body, headers = mcp_client.wire_form(agent, "tools/call", params, None, None)
    address = urlsplit(gateway.mcp_url)
    connection = http.client.HTTPConnection(str(address.hostname), address.port, timeout=30)
    connection.request("POST", address.path, json.dumps(body), headers)
    wait_until("a try to create it", tries)
    connection.close()
    before = tries()
    wait_until("further tries", lambda: tries() >= before + 2)
    broken.clear()
    wait_until("the job", town.tenant.agentjobs)
    again = post(gateway, agent, "tools/call", params).body["result"]
    (made,) = town.tenant.agentjobs()
    assert name_of(again["taskId"]) == made["metadata"]["name"]


@scenario("R-AUTH R-POLICY-INPUT another's task looks like one that never was", own=True)
def foreign(place: Place) -> None:
    town = Town(place)
    stranger = town.tenant.account("agent-b", START)
    reader = town.tenant.account("reader", CALLS)

    async def start() -> str:
        async with connected(town.replicas[0], town.a.agent) as client:
            return await make(client, "asker")

    task = asyncio.run(start())
    tool = town.running(task)
    tool.until_taken("ask", {"key": "drop", "prompt": "?", "answer_schema": SCHEMA})
    calls: tuple[tuple[str, Document], ...] = (
        ("tasks/get", {}),
        ("tasks/update", {"inputResponses": {"drop": YES}}),
        ("tasks/cancel", {}),
    )
    for who in (stranger, reader):
        for method, more in calls:
            theirs, none = (
                post(town.replicas[1], who.agent, method, {"taskId": each, **more})
                for each in (task, unknown_id(place.namespace))
            )
            assert error(theirs) == (400, -32602)
            assert theirs.body == none.body, "the answers are equal"
    assert "stop" not in place.job(name_of(task))["spec"]
    assert tool.ask("ask/drop").body["outcome"] == "open"
    withdrawn(town, task)
    town.finish(task)


def withdrawn(town: Town, task: str) -> None:
    """What an agent may no longer see is gone for it, in the middle of a task."""
    binding = next(
        each["metadata"]["name"]
        for each in town.place.api.items("RoleBinding", town.place.namespace)
        if each["metadata"]["name"].startswith("agent-a-")
    )
    town.tenant.revoke(binding, town.a.user, READ)
    answered = {"taskId": task, "inputResponses": {"drop": YES}}

    def refused() -> bool:
        reply = post(town.replicas[0], town.a.agent, "tasks/get", {"taskId": task})
        return reply.code == 400

    wait_until("end of the right", refused)
    assert error(post(town.replicas[0], town.a.agent, "tasks/update", answered)) == (400, -32602)


@scenario("R-MRTR clients without tasks get results, then handles", own=True)
def without_tasks(place: Place) -> None:
    town = Town(place)

    async def story() -> None:
        async with connected(town.replicas[0], town.a.agent, tasks=False) as client:
            late = structured(await client.call_tool("asker", {"idempotency_key": "late"}))
            assert late["status"] in {"queued", "running"}
            await asyncio.to_thread(town.running, late["job_id"])
            await asyncio.to_thread(town.finish, late["job_id"], 0, "forty-two")
            again = client.call_tool("asker", {"idempotency_key": "late"})
            assert text(await again) == "forty-two"
            result = await client.call_tool("get_job_result", {"job_id": late["job_id"]})
            assert text(result) == "forty-two"

            begun = structured(await client.call_tool("start_asker", {}))["job_id"]
            shown = structured(await client.call_tool("get_job_status", {"job_id": begun}))
            assert shown["job_id"] == begun
            early = await client.call_tool("get_job_result", {"job_id": begun})
            assert early.is_error
            assert structured(early)["type"].endswith("/not-done")
            stopped = await client.call_tool("stop_job", {"job_id": begun, "reason": "no"})
            assert structured(stopped)["status"] in {"stopping", "cancelled"}
            await asyncio.to_thread(place.until_state, name_of(begun), "cancelled")
            with pytest.raises(MCPError) as unknown:
                await client.call_tool("no-such-tool", {})
            assert unknown.value.error.code == -32602

    asyncio.run(story())


@scenario("R-MRTR arguments that are missing are asked of the person, once", own=True)
def missing_arguments(place: Place) -> None:
    town = Town(place, inputSchema=TABLE)
    asked: list[Document] = []

    def answers(action: str, table: str = "") -> mcp_client.Asked:
        async def answer(_: Any, params: types.ElicitRequestParams) -> types.ElicitResult:
            asked.append(params.model_dump(by_alias=True, mode="json", exclude_none=True))
            content = {"table": table} if table else None
            return types.ElicitResult(action=action, content=content)

        return answer

    async def story() -> None:
        agent, one = town.a.agent, town.replicas[0]
        async with connected(one, agent, asked=answers("accept", "t1"), tasks=False) as client:
            started = structured(await client.call_tool("start_asker", {}))
            job = place.job(name_of(started["job_id"]))
            assert job["spec"]["arguments"] == {"table": "t1"}
            assert [set(each["requestedSchema"]["properties"]) for each in asked] == [{"table"}]
        async with connected(one, agent, asked=answers("decline")) as client:
            refused = await client.call_tool("asker", {})
            assert refused.is_error
            assert structured(refused) == {"outcome": "declined"}
        async with connected(one, agent) as client:
            refused = await client.call_tool("asker", {})
            assert structured(refused)["type"].endswith("/invalid-arguments"), "nobody to ask"
        assert len(town.tenant.agentjobs()) == 1

    asyncio.run(story())
    replayed(town)


def replayed(town: Town) -> None:
    """A state is good for one start, of the one who was asked, at any replica."""
    one, two = town.replicas
    can: Document = {"elicitation": {}, "extensions": {mcp_client.TASKS: {}}}
    first = post(one, town.a.agent, "tools/call", {"name": "asker"}, capabilities=can)
    state = first.body["result"]["requestState"]
    answer = {"arguments": {"action": "accept", "content": {"table": "t2"}}}
    params = {"name": "asker", "requestState": state, "inputResponses": answer}
    made = [
        post(each, town.a.agent, "tools/call", params, capabilities=can).body["result"]["taskId"]
        for each in (two, one)
    ]
    assert len(set(made)) == 1
    answer["arguments"]["content"] = {"table": "t3"}
    other = post(one, town.a.agent, "tools/call", params, capabilities=can).body["result"]
    assert other["structuredContent"]["type"].endswith("/key-reused")
    b = town.tenant.account("agent-b", CALLS, use("asker"))
    for who, change in (
        (b, {}),
        (town.a, {"requestState": state[:-2] + "xx"}),
        (town.a, {"arguments": {"table": "t9"}}),
    ):
        bad = post(one, who.agent, "tools/call", {**params, **change}, capabilities=can)
        assert error(bad) == (400, -32602), change
        assert bad.body["error"]["data"] == {"reason": "invalid_request_state"}
    assert len(town.tenant.agentjobs()) == 2


@scenario("R-AUTH what is no MCP of 2026-07-28, or comes from nobody, is refused", own=True)
def refused_over_mcp(place: Place) -> None:
    town = Town(place, served=False)
    gateway, a = town.replicas[0], town.a
    get: Document = {"taskId": unknown_id(place.namespace)}
    table: tuple[tuple[str, Document, dict[str, str | None], tuple[int, int]], ...] = (
        ("server/discover", {}, {"MCP-Protocol-Version": "2025-06-18"}, (400, -32020)),
        ("server/discover", {}, {"MCP-Protocol-Version": None}, (400, -32020)),
        ("server/discover", {}, {"MCP-Protocol-Version": "2031-01-01"}, (400, -32020)),
        ("server/discover", {}, {"Mcp-Method": "tools/list"}, (400, -32020)),
        ("tasks/get", get, {"Mcp-Name": None}, (400, -32020)),
        ("tasks/get", get, {"Mcp-Name": "other"}, (400, -32020)),
        ("tasks/get", get, {}, (400, -32602)),
        ("tasks/get", {}, {"Mcp-Name": "x"}, (400, -32020)),
        ("tasks/list", {}, {}, (404, -32601)),
        ("tasks/result", get, {}, (404, -32601)),
        ("initialize", {}, {}, (404, -32601)),
        ("tools/list", {"cursor": "none"}, {}, (400, -32602)),
        ("tools/call", {"name": "x" * 200}, {}, (400, -32602)),
    )
    for method, params, headers, said in table:
        reply = post(gateway, a.agent, method, params, headers=headers)
        assert error(reply) == said, (method, headers, reply.raw)
    handshake = {"jsonrpc": "2.0", "id": 7, "method": "initialize", "params": {}}
    older = a.agent.send(gateway.mcp_url, "POST", "", handshake)
    assert error(older) == (400, -32022)
    assert older.body["error"]["data"]["supported"] == ["2026-07-28"]
    undeclared = post(gateway, a.agent, "tasks/get", get, capabilities={})
    assert error(undeclared) == (400, -32021)
    assert undeclared.body["error"]["data"] == {
        "requiredCapabilities": {"extensions": {mcp_client.TASKS: {}}}
    }
    discovered = post(gateway, a.agent, "server/discover").body["result"]
    assert discovered["supportedVersions"] == ["2026-07-28"]
    assert discovered["capabilities"]["extensions"] == {mcp_client.TASKS: {}}
    assert "tasks" not in discovered["capabilities"]
    anonymous = type(a.agent)("")
    nobody = post(gateway, anonymous, "server/discover")
    assert (nobody.code, nobody.problem) == (401, "unauthenticated")
    assert nobody.headers["WWW-Authenticate"].startswith("Bearer")
    web = post(gateway, a.agent, "server/discover", headers={"Origin": "https://evil.example.com"})
    assert web.code == 403
    assert post(gateway, a.agent, "server/discover", path="/a/b").code == 404
    got = a.agent.send(gateway.mcp_url, "GET", "")
    assert (got.code, got.headers["Allow"]) == (405, "POST")
    wrong = post(
        gateway, a.agent, "tools/call", {"name": "asker", "arguments": {"x": float("nan")}}
    )
    assert wrong.body["result"]["isError"], "NaN is no JSON"
    assert json.loads(wrong.raw)["result"]["structuredContent"]["status"] == 422
    elsewhere = post(gateway, a.agent, "tools/list", path="/kube-system").body["result"]["tools"]
    assert not [each for each in elsewhere if each["name"] == "asker"]


@pytest.mark.parametrize("scenario", told_in(__name__), ids=str)
def test_rule(played: Callable[[Scenario], None], scenario: Scenario) -> None:
    played(scenario)
