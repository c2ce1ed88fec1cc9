"""Deliveries over HTTP: a handler to mount into an application, or a server of its own.

app.router.add_post("/events", handler_of(inbox))
"""

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Final

from aiohttp import web

from agentjobs.inbox.acceptance import LARGEST_EVENT_BYTES
from agentjobs.inbox.runtime import Inbox, Reply

READ_SECONDS: Final = 10.0
LINGER_SECONDS: Final = 1.0
"""For the rest of a body that was refused."""
PATH: Final = "/events"
HEALTH: Final = "/healthz"


def handler_of(inbox: Inbox) -> Callable[[web.Request], Awaitable[web.Response]]:
    """A handler for POST in an aiohttp application. It bounds what it reads itself."""

    async def handle(request: web.Request) -> web.Response:
        reply = await _received(inbox, request)
        return web.Response(status=reply.status, headers=reply.headers, text=reply.reason or None)

    return handle


@asynccontextmanager
async def serving(
    inbox: Inbox,
    host: str = "127.0.0.1",
    port: int = 0,
    *,
    path: str = PATH,
    tls: ssl.SSLContext | None = None,
) -> AsyncIterator[int]:
    """Serve an inbox for the block; yield the port.

    :param host: address to listen on; the default is not seen from outside.
    :param port: 0: a free one.
    :raises OSError: the address is taken, or not ours.
    """
    app = web.Application()
    app.router.add_post(path, handler_of(inbox))
    app.router.add_get(HEALTH, _healthy)
    runner = web.AppRunner(
        app, access_log=None, lingering_time=LINGER_SECONDS, auto_decompress=False
    )
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port, ssl_context=tls)
        await site.start()
        yield int(runner.addresses[0][1])
    finally:
        await runner.cleanup()


async def _healthy(_: web.Request) -> web.Response:
    return web.Response(text="ok")


async def _received(inbox: Inbox, request: web.Request) -> Reply:
    if request.headers.get("Content-Encoding", "identity") != "identity":
        # Nobody compresses a kilobyte, and what is small may be made to unpack to a lot.
        return Reply(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "a compressed body is not taken")
    body = bytearray()
    try:
        async with asyncio.timeout(READ_SECONDS):
            async for piece in request.content.iter_any():
                body += piece
                if len(body) > LARGEST_EVENT_BYTES:
                    break
    except TimeoutError:
        return Reply(HTTPStatus.REQUEST_TIMEOUT, f"no whole body within {READ_SECONDS:.0f} s")
    return await inbox.receive(request.headers, bytes(body))
