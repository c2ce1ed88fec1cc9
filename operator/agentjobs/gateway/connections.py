"""Connections of strangers: who connects and says nothing, or nonsense, is shown out."""

import asyncio
import logging
import ssl
from collections.abc import Callable
from typing import Any, cast

from aiohttp import HttpVersion10, HttpVersion11, web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.streams import EMPTY_PAYLOAD
from typing_extensions import override

from agentjobs.contract.problems import ProblemType
from agentjobs.gateway.problems import ProblemError
from agentjobs.openfiles import allow_files

log = logging.getLogger(__name__)
HEAD_SECONDS = 10.0
"""How long the head of the first request may take."""
HEAD_BYTES = 32 * 1024
"""What the head of a request may hold; a single line of it, a quarter of that."""
KEEPALIVE_SECONDS = 75.0
WRITE_SECONDS = 30.0
"""How long a client may take to read an answer that the kernel cannot hold for it."""
LINGER_SECONDS = 2.0
"""How long the rest of a refused body is read, so that the client gets to see the answer."""
READ_BYTES = 16 * 1024
"""What is read ahead of a body, or of requests that follow one that is under way."""
VERSIONS = {HttpVersion10, HttpVersion11}
MAX_CONNECTIONS = 6000
"""With TLS one costs some 50 KiB: together they stay within the memory that the chart allows."""
SPARE_FILES = 256
"""Open files that are no connections of callers."""
BACKLOG = 512


class _Connection(web.RequestHandler):
    """One connection, on which everything must happen in time."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_time: asyncio.TimerHandle | None = None
        self._written_in_time: asyncio.TimerHandle | None = None
        self._body: Any = EMPTY_PAYLOAD
        self._head_bytes = 0

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        # Whatever the kernel does not take is waited for, and not for ever.
        cast("asyncio.Transport", transport).set_write_buffer_limits(high=1, low=0)
        loop = asyncio.get_running_loop()
        self._in_time = loop.call_later(HEAD_SECONDS, self.force_close)

    def begun(self) -> None:
        """Say that a request has begun."""
        if self._in_time:
            self._in_time.cancel()
            self._in_time = None

    @override
    def data_received(self, data: bytes) -> None:
        requests, between_bodies = self._request_count, self._body.is_eof()
        super().data_received(data)
        if self._request_count > requests:
            if not self._body.is_eof():
                # Nothing can follow a body before its end: the parser gave up within it.
                self._body.set_exception(web.RequestPayloadError("it is broken"))
            _, self._body = self._messages[-1]
            self._head_bytes = 0
        elif between_bodies:
            self._head_bytes += len(data)
            if self._head_bytes > HEAD_BYTES:
                self.force_close()

    @override
    def pause_writing(self) -> None:
        super().pause_writing()
        if self.transport:
            loop = asyncio.get_running_loop()
            self._written_in_time = loop.call_later(WRITE_SECONDS, self.transport.abort)

    @override
    def resume_writing(self) -> None:
        self._stop_watch()
        super().resume_writing()

    @override
    def connection_lost(self, exc: BaseException | None) -> None:
        self.begun()
        self._stop_watch()
        super().connection_lost(exc)

    def _stop_watch(self) -> None:
        if self._written_in_time:
            self._written_in_time.cancel()
            self._written_in_time = None

    @override
    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """What is no HTTP: a problem document, and the end of the connection."""
        if request.writer.output_size > 0:
            raise ConnectionError("an answer was begun already")
        if status >= 500:  # noqa: PLR2004
            log.error("a request broke before it was handled", exc_info=exc)
            response = ProblemError(ProblemType.INTERNAL, "see the gateway's log").response()
        else:
            response = _not_http().response()
        response.force_close()
        return response

    @override
    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """What aiohttp refuses before it asks the application (an Expect that it does not know)."""
        if isinstance(resp, web.HTTPException):
            resp = ProblemError(ProblemType.INVALID_REQUEST, resp.text or resp.reason).response()
            resp.force_close()
        return await super().finish_response(request, resp, start_time)

    @override
    def log_exception(self, *args: Any, **kw: Any) -> None:
        """Do not tell of broken bodies: aiohttp quotes them."""
        error = kw.get("exc_info")
        if not isinstance(error, web.RequestPayloadError | HttpProcessingError | ConnectionError):
            super().log_exception(*args, **kw)


class _Refusal(asyncio.Protocol):
    """One connection too many."""

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()


@web.middleware
async def note_begin(
    request: web.Request, handler: Callable[[web.Request], Any]
) -> web.StreamResponse:
    """Tell a connection that its request has begun; take no head that is too large."""
    if isinstance(request.protocol, _Connection):
        request.protocol.begun()
    fault = _fault_of(request)
    if fault:
        refused = _not_http(fault).response()
        refused.force_close()
        return refused
    response: web.StreamResponse = await handler(request)
    return response


def _fault_of(request: web.Request) -> str:
    """What is wrong with a head that could be read; empty if nothing is."""
    if request.version not in VERSIONS:
        return "; it is another version"
    if sum(len(name) + len(value) for name, value in request.raw_headers) > HEAD_BYTES:
        return f"; its headers may have {HEAD_BYTES} bytes"
    return ""


class Listener:
    """An application on some ports."""

    def __init__(self, app: web.Application, patience: float) -> None:
        """Prepare.

        :param patience: seconds that requests have to end when we do.
        """
        app.middlewares.insert(0, note_begin)
        self._patience = patience
        self._runner = web.AppRunner(
            app, access_log=None, shutdown_timeout=patience, handler_cancellation=True
        )
        self._servers: list[asyncio.Server] = []
        self._most = min(MAX_CONNECTIONS, allow_files(MAX_CONNECTIONS + SPARE_FILES) - SPARE_FILES)

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
        """Take no more connections; let what is under way end, as long as we have patience."""
        for server in self._servers:
            server.close()
        try:
            async with asyncio.timeout(self._patience):
                await self._runner.cleanup()
        except TimeoutError:
            log.warning("some requests did not end within %g s", self._patience)

    def _accept(self) -> asyncio.Protocol:
        server = self._runner.server
        if server is None or len(server.connections) >= self._most:
            return _Refusal()
        return _Connection(
            server,
            loop=asyncio.get_running_loop(),
            keepalive_timeout=KEEPALIVE_SECONDS,
            access_log=None,
            lingering_time=LINGER_SECONDS,
            read_bufsize=READ_BYTES,
            # A body that is compressed is refused, not inflated.
            auto_decompress=False,
        )


def _not_http(more: str = "") -> ProblemError:
    return ProblemError(ProblemType.INVALID_REQUEST, f"it is not HTTP/1.1 as RFC 9112 has it{more}")
