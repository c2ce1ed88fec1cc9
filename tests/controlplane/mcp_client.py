"""An MCP client: the SDK's own, with what it lacks of the Tasks extension."""

import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, ClassVar, Literal

import httpx2
import mcp_types as types
from mcp.client import Client
from mcp.client.extension import ClaimContext, ClientExtension, ResultClaim
from mcp.client.streamable_http import streamable_http_client
from pydantic import ConfigDict
from pydantic.alias_generators import to_camel
from typing_extensions import override

from tests.apiclient import Document
from tests.gateway_process import Agent, GatewayProcess, Reply

TASKS = "io.modelcontextprotocol/tasks"
VERSION = "2026-07-28"
Asked = Callable[[Any, types.ElicitRequestParams], Awaitable[types.ElicitResult]]


class Made(types.Result):
    """CreateTaskResult."""

    model_config = ConfigDict(extra="allow", alias_generator=to_camel, populate_by_name=True)
    result_type: Literal["task"]
    task_id: str
    status: str


class Told(types.Result):
    """Whatever the server says of a task."""

    model_config = ConfigDict(extra="allow")


class TaskRequest(types.Request[dict[str, Any], str]):
    name_param: ClassVar[str | None] = "taskId"


class Tasks(ClientExtension):
    identifier = TASKS

    @override
    def claims(self) -> tuple[ResultClaim[Any], ...]:
        return (ResultClaim(result_type="task", model=Made, resolve=self._unresolved),)

    async def _unresolved(self, made: Made, _: ClaimContext) -> types.CallToolResult:
        raise AssertionError(made)


@asynccontextmanager
async def connected(
    gateway: GatewayProcess,
    agent: Agent,
    *,
    tasks: bool = True,
    asked: Asked | None = None,
    namespace: str = "",
) -> AsyncIterator[Client]:
    """Connect the SDK's client, which asks server/discover first."""
    url = gateway.mcp_url + (f"/{namespace}" if namespace else "")
    headers = {"Authorization": f"Bearer {agent.token}"}
    async with (
        httpx2.AsyncClient(headers=headers, timeout=60) as http,
        Client(
            streamable_http_client(url, http_client=http),
            extensions=[Tasks()] if tasks else None,
            elicitation_callback=asked,
        ) as client,
    ):
        yield client


async def make(client: Client, tool: str, **arguments: Any) -> str:
    """Call a tool; return the id of the task that it is."""
    made = await client.session.call_tool(tool, arguments, allow_claimed=True)
    assert isinstance(made, Made), made
    return made.task_id


async def tell(client: Client, method: str, task_id: str, **params: Any) -> Document:
    """Send tasks/get, tasks/update or tasks/cancel; return the result but for its _meta."""
    request = TaskRequest(method=method, params={"taskId": task_id, **params})
    told = await client.session.send_request(request, Told)
    return told.model_dump(mode="json", by_alias=True, exclude={"meta"}, exclude_unset=True)


def wire_form(
    agent: Agent,
    method: str,
    params: Document | None,
    capabilities: Document | None,
    headers: dict[str, str | None] | None,
) -> tuple[Document, dict[str, str]]:
    """Body and headers of one request; headers of None are left out."""
    params = dict(params or {})
    declared = {"extensions": {TASKS: {}}} if capabilities is None else capabilities
    params["_meta"] = {
        "io.modelcontextprotocol/protocolVersion": VERSION,
        "io.modelcontextprotocol/clientCapabilities": declared,
    }
    sent: dict[str, str | None] = {
        "Accept": "application/json, text/event-stream",
        "Content-Type": "application/json",
        "Authorization": f"Bearer {agent.token}" if agent.token else None,
        "MCP-Protocol-Version": VERSION,
        "Mcp-Method": method,
        "Mcp-Name": params.get("taskId") or params.get("name"),
        **(headers or {}),
    }
    body = {"jsonrpc": "2.0", "id": 7, "method": method, "params": params}
    return body, {name: value for name, value in sent.items() if value is not None}


class Listening:
    """A stream of notifications about tasks; it is read until the server ends it."""

    def __init__(self, gateway: GatewayProcess, agent: Agent, *task_ids: str) -> None:
        params = {"notifications": {"taskIds": list(task_ids), "toolsListChanged": True}}
        body, headers = wire_form(agent, "subscriptions/listen", params, None, None)
        self._answer = agent.http.request(
            "POST",
            gateway.mcp_url,
            body=json.dumps(body).encode(),
            headers=headers,
            preload_content=False,
        )
        assert self._answer.headers["Content-Type"] == "text/event-stream"
        self.frames: list[Document] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self._answer:
            if line.startswith(b"data: "):
                self.frames.append(json.loads(line.removeprefix(b"data: ")))

    def until_ended(self) -> Document:
        """Wait for the end; return the result."""
        self._reader.join(60)
        assert not self._reader.is_alive()
        result: Document = self.frames[-1]["result"]
        del result["_meta"]["io.modelcontextprotocol/serverInfo"]
        self._answer.close()
        return result

    def told(self) -> list[Document]:
        """What was told of tasks so far."""
        return [
            each["params"] for each in self.frames if each.get("method") == "notifications/tasks"
        ]


def post(
    gateway: GatewayProcess,
    agent: Agent,
    method: str,
    params: Document | None = None,
    *,
    capabilities: Document | None = None,
    headers: dict[str, str | None] | None = None,
    path: str = "",
) -> Reply:
    """Send one request as it is on the wire; headers of None are left out."""
    body, sent = wire_form(agent, method, params, capabilities, headers)
    return agent.send(gateway.mcp_url + path, "POST", "", body, sent)


def error(reply: Reply) -> tuple[int, int]:
    """HTTP status and code of an error, which names the request."""
    assert reply.body["id"] == 7, reply.raw
    return reply.code, int(reply.body["error"]["code"])


def text(result: types.CallToolResult) -> str:
    (content, *_) = result.content
    assert isinstance(content, types.TextContent)
    return content.text


def structured(result: types.CallToolResult) -> Document:
    value: Document = json.loads(json.dumps(result.structured_content))
    return value
