"""The door to the MCP library: its methods, and nothing of it anywhere else."""

import contextlib
import logging
from functools import partial
from typing import Any, Final

import mcp_types as types
from mcp.server.caching import CacheHint
from mcp.server.context import CallNext, HandlerResult, ServerRequestContext
from mcp.server.lowlevel import Server
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp.shared.exceptions import MCPError
from mcp.shared.inbound import decode_header_value
from pydantic import BaseModel, Field
from starlette.requests import Request
from typing_extensions import override

from agentjobs import __version__
from agentjobs.contract.problems import ProblemType
from agentjobs.domain.errors import AgentJobError
from agentjobs.gateway.mcp import wire
from agentjobs.gateway.mcp.calls import Calls, ToolCall, Visit
from agentjobs.gateway.mcp.listener import MAX_BODY_BYTES, VERSION, VISITOR, Asgi, Visitor
from agentjobs.gateway.mcp.wire import Abilities, Json, WireError
from agentjobs.gateway.problems import ProblemError, try_later
from agentjobs.kube import UnavailableError
from agentjobs.metrics import GatewayMetrics

log = logging.getLogger(__name__)
Context = ServerRequestContext[Any, Any]
FRESH_MS: Final = 10_000
"""How long a client may keep the list of tools: rights are asked for again after that, too."""
INSTRUCTIONS: Final = (
    "Each tool runs as a job that may take long and survives this connection. Go on with other "
    "work meanwhile. Give idempotency_key, a new random value for each new job: the same call "
    "with the same key is the same job."
)
LISTEN: Final = "subscriptions/listen"
METHODS: Final = ("server/discover", "tools/list", "tools/call", LISTEN)
TASK_METHODS: Final = ("tasks/get", "tasks/update", "tasks/cancel")
DONE: Final[Json] = {"resultType": "complete"}


class TaskParams(types.RequestParams):
    """Parameters of tasks/get and tasks/cancel."""

    task_id: str = Field(alias="taskId")


class UpdateParams(TaskParams):
    """Parameters of tasks/update."""

    input_responses: dict[str, Any] = Field(alias="inputResponses")


class Notification(BaseModel):
    """A notification of the extension, which the library has no type for."""

    method: str
    params: dict[str, Any]

    @override
    def model_dump(self, **_: Any) -> dict[str, Any]:
        """As it is: the library would leave members out that are null."""
        return {"method": self.method, "params": self.params}


class Endpoint:
    """The methods of MCP, as the library calls them."""

    def __init__(self, calls: Calls, metrics: GatewayMetrics) -> None:
        self._calls = calls
        self._metrics = metrics
        server: Server[Any] = Server(
            "agentjobs",
            version=__version__,
            cache_hints={
                "tools/list": CacheHint(FRESH_MS, "private"),
                "server/discover": CacheHint(FRESH_MS, "public"),
            },
        )
        server.add_request_handler("tools/list", types.PaginatedRequestParams, self._list)
        server.add_request_handler("tools/call", types.CallToolRequestParams, self._call)
        server.add_request_handler("tasks/get", TaskParams, self._get)
        server.add_request_handler("tasks/update", UpdateParams, self._update)
        server.add_request_handler("tasks/cancel", TaskParams, self._cancel)
        server.add_request_handler(LISTEN, types.SubscriptionsListenRequestParams, self._listen)
        server.add_request_handler("server/discover", types.RequestParams, self._discover)
        server.middleware.append(self._check)
        self._manager = StreamableHTTPSessionManager(
            server, stateless=True, max_request_body_size=MAX_BODY_BYTES
        )

    @property
    def app(self) -> Asgi:
        """The application, for requests whose visitor is known."""
        return self._manager.handle_request

    def running(self) -> contextlib.AbstractAsyncContextManager[None]:
        """The library's own life, around that of the server."""
        return self._manager.run()

    async def _check(self, ctx: Context, call_next: CallNext) -> HandlerResult:
        """Check what the library does not; say refusals in the protocol's words; count."""
        known = ctx.method if ctx.method in {*METHODS, *TASK_METHODS} else "none"
        code = 0
        try:
            if ctx.method in TASK_METHODS:
                _check_task_request(ctx)
            return await call_next(ctx)
        except MCPError as error:
            code = error.code
            raise
        except (WireError, AgentJobError) as error:
            said = _said(error)
            code = said.code
            raise MCPError(said.code, said.message, said.data) from error
        finally:
            self._metrics.requests.labels(f"mcp {known}", str(code)).inc()

    async def _discover(self, _: Context, __: types.RequestParams) -> HandlerResult:
        # The library would promise notifications about the list of tools.
        return {
            **DONE,
            "supportedVersions": [VERSION],
            "capabilities": {"tools": {}, "extensions": {wire.TASKS: {}}},
            "instructions": INSTRUCTIONS,
        }

    async def _listen(
        self, ctx: Context, params: types.SubscriptionsListenRequestParams
    ) -> HandlerResult:
        """Tell of tasks until all are over, or we end; nothing else is told of."""
        visit = _visit(ctx)
        asked = (params.notifications.model_extra or {}).get("taskIds")
        ids = [each for each in asked if isinstance(each, str)] if isinstance(asked, list) else []
        if asked is not None and not visit.client.tasks:
            raise wire.needs_tasks()
        meta = {"io.modelcontextprotocol/subscriptionId": ctx.request_id}

        async def tell(method: str, told: Json) -> None:
            notification: Any = Notification(method=method, params={**told, "_meta": meta})
            await ctx.session.send_notification(notification, ctx.request_id)

        with self._calls.busy(visit.caller):
            agreed = await self._calls.agreed(visit, ids)
        honoured = {} if asked is None else {"taskIds": agreed}
        await tell("notifications/subscriptions/acknowledged", {"notifications": honoured})
        await self._calls.follow(visit, agreed, partial(tell, "notifications/tasks"))
        return {**DONE, "_meta": meta}

    async def _list(self, ctx: Context, params: types.PaginatedRequestParams) -> HandlerResult:
        # To check a call's headers the library lists tools by itself: that one is enough then.
        headers = _request(ctx).headers
        only = headers.get("mcp-name", "") if headers.get("mcp-method") == "tools/call" else ""
        visit = _visit(ctx)
        with self._calls.busy(visit.caller):
            return {**DONE, **await self._calls.tools(visit, params.cursor, only=only)}

    async def _call(self, ctx: Context, params: types.CallToolRequestParams) -> HandlerResult:
        given = (ctx.params or {}).get("inputResponses")
        call = ToolCall(
            params.name,
            params.arguments or {},
            given if isinstance(given, dict) else {},
            params.request_state,
        )
        return {**DONE, **await self._calls.call(_visit(ctx), call)}

    async def _get(self, ctx: Context, params: TaskParams) -> HandlerResult:
        visit = _visit(ctx)
        with self._calls.busy(visit.caller):
            return {**await self._calls.get(visit, params.task_id), **DONE}

    async def _update(self, ctx: Context, params: UpdateParams) -> HandlerResult:
        visit = _visit(ctx)
        with self._calls.busy(visit.caller):
            await self._calls.update(visit, params.task_id, params.input_responses)
        return {**DONE}

    async def _cancel(self, ctx: Context, params: TaskParams) -> HandlerResult:
        visit = _visit(ctx)
        with self._calls.busy(visit.caller):
            await self._calls.cancel(visit, params.task_id)
        return {**DONE}


def _visit(ctx: Context) -> Visit:
    visitor: Visitor = _request(ctx).scope[VISITOR]
    meta = (ctx.params or {}).get("_meta") or {}
    able = Abilities.of(meta.get(types.CLIENT_CAPABILITIES_META_KEY))
    return Visit(visitor.caller, visitor.namespace, able)


def _check_task_request(ctx: Context) -> None:
    """The library knows nothing of tasks: neither who may speak of them nor their header.

    :raises WireError: the extension was not declared; `Mcp-Name` is not the task's id.
    """
    if not _visit(ctx).client.tasks:
        raise wire.needs_tasks()
    named = decode_header_value(_request(ctx).headers.get("mcp-name"))
    if named is None or named != (ctx.params or {}).get("taskId"):
        raise WireError(wire.HEADER_MISMATCH, "Mcp-Name must be the taskId")


def _request(ctx: Context) -> Request:
    if ctx.request is None:  # pragma: no cover - all come over HTTP
        raise WireError(wire.INTERNAL_ERROR, "no request")
    request: Request = ctx.request
    return request


def _said(error: WireError | AgentJobError) -> WireError:
    """What a caller is told of what went wrong."""
    if isinstance(error, WireError):
        return error
    if isinstance(error, ProblemError):
        return wire.error_of(error)
    log.warning("the API server: %s", error)
    seconds = error.retry_after if isinstance(error, UnavailableError) else None
    later = "the API server does not answer"
    return wire.error_of(try_later(ProblemType.UNAVAILABLE, later, seconds or 1))
