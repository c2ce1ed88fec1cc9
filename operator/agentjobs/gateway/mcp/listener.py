"""The port of MCP: who may come in, and the server that listens."""

import asyncio
import contextlib
import json
import logging
import re
import socket
import ssl
from collections.abc import Awaitable, Callable, Generator, MutableMapping
from dataclasses import dataclass
from typing import Any, Final

import uvicorn
from typing_extensions import override

from agentjobs import codec
from agentjobs.contract.problems import MEDIA_TYPE, ProblemType
from agentjobs.domain.errors import AgentJobError
from agentjobs.gateway.mcp.wire import HEADER_MISMATCH, UNSUPPORTED_VERSION, Json
from agentjobs.gateway.problems import ProblemError, try_later
from agentjobs.gateway.reviews import Caller, Reviews

log = logging.getLogger(__name__)
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Asgi = Callable[[Message, Receive, Send], Awaitable[None]]

VISITOR: Final = "agentjobs.visitor"
VERSION: Final = "2026-07-28"
VERSION_META: Final = "io.modelcontextprotocol/protocolVersion"
OLDER: Final = re.compile(r"202[45]-\d\d-\d\d")
"""Versions that begin with a handshake and keep a session."""
PATH: Final = re.compile(r"/mcp(?:/([a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?))?")
MAX_BODY_BYTES: Final = 256 * 1024
MAX_CONNECTIONS: Final = 2000
BODY_SECONDS: Final = 10.0
HEAD_BYTES: Final = 32 * 1024
KEEPALIVE_SECONDS: Final = 75


@dataclass(frozen=True, slots=True)
class Visitor:
    """Who has come in."""

    caller: Caller
    namespace: str
    """What the path names; empty: nothing."""


class Gate:
    """Lets those in who are known, before the library looks at a request."""

    def __init__(
        self,
        inside: Asgi,
        reviews: Reviews,
        *,
        not_ready: Callable[[], str],
        origins: frozenset[str],
    ) -> None:
        """Prepare.

        :param not_ready: why nobody can be served yet; empty when they can.
        :param origins: of web pages that may call.
        """
        self._inside = inside
        self._reviews = reviews
        self._not_ready = not_ready
        self._origins = origins

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Serve one request."""
        headers: dict[str, list[str]] = {}
        for name, value in scope["headers"]:
            headers.setdefault(name.decode("latin-1"), []).append(value.decode("latin-1"))
        try:
            scope[VISITOR] = await self._visitor(scope, headers)
            versions = headers.get("mcp-protocol-version", [])
            if len(versions) != 1 or OLDER.fullmatch(versions[0]):
                await _refuse_version(next(iter(versions), ""), receive, send)
                return
        except ProblemError as problem:
            await _send_problem(problem, send)
            return
        incoming = _Incoming(receive)
        try:
            await self._inside(scope, incoming, send)
        except Exception:
            if not incoming.broken:
                raise
            if incoming.late:
                detail = f"the body did not arrive within {BODY_SECONDS:.0f} s"
                close = {"Connection": "close"}
                late = ProblemError(ProblemType.TIMEOUT, detail, headers=close)
                await _send_problem(late, send)

    async def _visitor(self, scope: Message, headers: dict[str, list[str]]) -> Visitor:
        """Who calls.

        :raises ProblemError: nobody who may come in, or not this way.
        """
        path = PATH.fullmatch(scope["path"])
        if path is None:
            raise ProblemError(ProblemType.NOT_FOUND, "MCP is at /mcp and /mcp/NAMESPACE")
        if not set(headers.get("origin", ())) <= self._origins:
            raise ProblemError(ProblemType.FORBIDDEN, "web pages of this origin may not call")
        if scope["method"] != "POST":
            raise ProblemError(ProblemType.METHOD_NOT_ALLOWED, "POST", headers={"Allow": "POST"})
        if self._not_ready():
            raise try_later(ProblemType.UNAVAILABLE, "the gateway is not ready yet")
        tokens = headers.get("authorization", [""])
        if len(tokens) > 1:
            raise ProblemError(
                ProblemType.INVALID_REQUEST, "header Authorization is given more than once"
            )
        try:
            caller = await self._reviews.authenticate(tokens[0], secure=scope["scheme"] == "https")
        except ProblemError:
            raise
        except AgentJobError as error:
            log.warning("a caller cannot be reviewed: %s", error)
            raise try_later(ProblemType.UNAVAILABLE, "the API server does not answer") from error
        return Visitor(caller, path[1] or "")


class _Incoming:
    """What comes in of a request: its body in time, and its end whenever it is."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._whole = False
        self.broken = False
        """Whether the body is not whole and will never be."""
        self.late = False
        """Whether that is so because it took too long."""

    async def __call__(self) -> Message:
        """Return the next piece; for a body that is late, what is said of one that is gone."""
        if self._whole:
            return await self._receive()
        try:
            async with asyncio.timeout(BODY_SECONDS):
                message = await self._receive()
        except TimeoutError:
            self.late = self.broken = True
            return {"type": "http.disconnect"}
        self.broken = message["type"] == "http.disconnect"
        self._whole = not message.get("more_body")
        return message


async def _refuse_version(header: str, receive: Receive, send: Send) -> None:
    """Tell a client of another version, or of none, which one is spoken here."""
    body = await _body(_Incoming(receive))
    given = body if isinstance(body, dict) else {}
    this = given.get("id")
    refusal = {
        "jsonrpc": "2.0",
        "id": this if isinstance(this, str | int) else None,
        "error": refusal_of_version(header, given.get("params")),
    }
    await _send(400, codec.dumps(refusal), {"Content-Type": "application/json"}, send)


def refusal_of_version(header: str, params: Any) -> Json:
    """The error for a request whose header names a version with handshakes, or none.

    :param params: of the request: those of a handshake name a version, and so does `_meta`.
    """
    params = params if isinstance(params, dict) else {}
    meta = params.get("_meta")
    inside = meta.get(VERSION_META) if isinstance(meta, dict) else None
    if inside is not None and inside != header:
        message = "MCP-Protocol-Version must be the protocolVersion in _meta"
        return {"code": HEADER_MISMATCH, "message": message}
    requested = header or str(params.get("protocolVersion") or "")[:64]
    return {
        "code": UNSUPPORTED_VERSION,
        "message": f"Send MCP-Protocol-Version: {VERSION}",
        "data": {"supported": [VERSION], "requested": requested},
    }


async def _body(receive: Receive) -> Any:
    """The body of a request that will be refused, as far as it tells for what."""
    content, more = b"", True
    while more and len(content) < MAX_BODY_BYTES:
        message = await receive()
        content += message.get("body", b"")
        more = bool(message.get("more_body"))
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        return None


async def _send_problem(problem: ProblemError, send: Send) -> None:
    headers = {**problem.headers, "Content-Type": MEDIA_TYPE, "Cache-Control": "no-store"}
    body: Json = problem.problem.to_json()
    await _send(problem.kind.status, codec.dumps(body), headers, send)


async def _send(status: int, body: bytes, headers: dict[str, str], send: Send) -> None:
    headers = {**headers, "Content-Length": str(len(body))}
    lines = [(name.lower().encode(), value.encode("latin-1")) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": int(status), "headers": lines})
    await send({"type": "http.response.body", "body": body})


class _Server(uvicorn.Server):
    """Signals are the gateway's."""

    @override
    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


class McpListener:
    """An ASGI application on a port, in this event loop."""

    def __init__(
        self, app: Asgi, life: contextlib.AbstractAsyncContextManager[None], patience: int
    ) -> None:
        """Prepare.

        :param life: what lives around the server.
        :param patience: seconds that requests have to end when we do.
        """
        self._app = app
        self._life = life
        self._patience = patience
        self._server: _Server | None = None
        self._socket: socket.socket | None = None

    def bind(self, host: str, port: int, tls: ssl.SSLContext | None) -> None:
        """Take the port.

        :raises OSError: it is taken.
        """
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, port), family=family, backlog=512)
        config = uvicorn.Config(
            self._app,
            http="h11",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            limit_concurrency=MAX_CONNECTIONS,
            timeout_keep_alive=KEEPALIVE_SECONDS,
            timeout_graceful_shutdown=self._patience,
            ssl_context_factory=(lambda _config, _default: tls) if tls else None,
            h11_max_incomplete_event_size=HEAD_BYTES,
        )
        self._server = _Server(config)

    async def run(self) -> None:
        """Serve until `stop`, and let what is under way end."""
        if self._server is None or self._socket is None:
            return
        async with self._life:
            await self._server.serve([self._socket])

    def stop(self) -> None:
        """Take no more connections."""
        if self._server:
            self._server.should_exit = True
