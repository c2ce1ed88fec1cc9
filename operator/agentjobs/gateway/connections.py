"""Connections of strangers: who connects and says nothing, or nonsense, is shown out."""

import asyncio
import ssl
from collections.abc import Callable
from typing import Any

from aiohttp import web
from typing_extensions import override

from agentjobs.contract.problems import ProblemType
from agentjobs.gateway.problems import ProblemError

HEAD_SECONDS = 10.0
"""How long the head of the first request may take."""
KEEPALIVE_SECONDS = 75.0
MAX_CONNECTIONS = 8192
BACKLOG = 512


class _Connection(web.RequestHandler):
    """One connection, which must begin a request in time."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_time: asyncio.TimerHandle | None = None

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        loop = asyncio.get_running_loop()
        self._in_time = loop.call_later(HEAD_SECONDS, self.force_close)

    def begun(self) -> None:
        """Say that a request has begun."""
        if self._in_time:
            self._in_time.cancel()
            self._in_time = None

    @override
    def connection_lost(self, exc: BaseException | None) -> None:
        self.begun()
        super().connection_lost(exc)

    @override
    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """What is no HTTP: a problem document, and the end of the connection."""
        if exc is not None and status >= 500:  # noqa: PLR2004
            response = super().handle_error(request, status, exc, message)
        else:
            detail = "it is not HTTP/1.1 as RFC 9112 has it"
            response = ProblemError(ProblemType.INVALID_REQUEST, detail).response()
        response.force_close()
        return response


class _Refusal(asyncio.Protocol):
    """One connection too many."""

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()


@web.middleware
async def note_begin(
    request: web.Request, handler: Callable[[web.Request], Any]
) -> web.StreamResponse:
    """Tell a connection that its request has begun."""
    if isinstance(request.protocol, _Connection):
        request.protocol.begun()
    response: web.StreamResponse = await handler(request)
    return response


class Listener:
    """An application on some ports."""

    def __init__(self, app: web.Application, patience: float) -> None:
        """Prepare.

        :param patience: seconds that requests have to end when we do.
        """
        app.middlewares.insert(0, note_begin)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=patience)
        self._servers: list[asyncio.Server] = []

    async def start(self, host: str, ports: tuple[int, ...], tls: ssl.SSLContext | None) -> None:
        """Listen.

        :raises OSError: a port is taken.
        """
        await self._runner.setup()
        loop = asyncio.get_running_loop()
        for port in ports:
            self._servers.append(
                await loop.create_server(
                    self._accept,
                    host,
                    port,
                    ssl=tls,
                    backlog=BACKLOG,
                    ssl_handshake_timeout=HEAD_SECONDS if tls else None,
                )
            )

    async def stop(self) -> None:
        """Take no more connections; let what is under way end."""
        for server in self._servers:
            server.close()
        await self._runner.cleanup()

    def _accept(self) -> asyncio.Protocol:
        server = self._runner.server
        if server is None or len(server.connections) >= MAX_CONNECTIONS:
            return _Refusal()
        return _Connection(
            server,
            loop=asyncio.get_running_loop(),
            keepalive_timeout=KEEPALIVE_SECONDS,
            access_log=None,
        )
