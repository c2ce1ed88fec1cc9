"""Connections that stay open, silent or full: shown out in time. Real sockets, short times."""

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator

import pytest
from aiohttp import web

from agentjobs.gateway import connections
from agentjobs.gateway.connections import Listener
from tests.cluster.controlplane import free_ports
from tests.until import until

SHORT, LONG = 0.2, 5.0
LARGE = b"x" * 8 * 1024**2
"""More than the kernel takes for a client who does not read."""
SMALL = b"x" * 16 * 1024
GET = b"GET / HTTP/1.1\r\nHost: h\r\n\r\n"
POST = b"POST / HTTP/1.1\r\nHost: h\r\n"


class Site:
    """An application that reads bodies and knows what became of its requests."""

    def __init__(self) -> None:
        (self.port,) = free_ports(1)
        self.begun = asyncio.Event()
        self.ended: list[str] = []
        self.go_on = asyncio.Event()
        self.go_on.set()
        app = web.Application(client_max_size=1024**2)
        app.router.add_get("/", self._handle)
        app.router.add_post("/", self._read)
        app.router.add_get("/{size}", self._send)
        self.listener = Listener(app, LONG)

    async def _handle(self, _: web.Request) -> web.Response:
        self.begun.set()
        try:
            await self.go_on.wait()
        except asyncio.CancelledError:
            self.ended.append("cancelled")
            raise
        self.ended.append("answered")
        return web.Response(text="ok")

    async def _read(self, request: web.Request) -> web.Response:
        self.begun.set()
        try:
            return web.Response(text=str(len(await request.read())))
        except web.RequestPayloadError as error:
            self.ended.append(f"broken: {error}")
            return web.Response(status=400)

    async def _send(self, request: web.Request) -> web.Response:
        self.begun.set()
        return web.Response(body=LARGE if request.match_info["size"] == "large" else SMALL)

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port, limit=2**20)

    async def exchange(self, content: bytes) -> bytes:
        """Everything that comes back until the connection is closed by the other side."""
        reader, writer = await self.connect()
        writer.write(content)
        try:
            async with asyncio.timeout(5):
                return await reader.read()
        finally:
            writer.close()

    @property
    def open(self) -> int:
        server = self.listener._runner.server
        assert server
        return len(server.connections)

    @property
    def unsent(self) -> int:
        """Bytes of answers that the kernel has not taken."""
        server = self.listener._runner.server
        assert server
        found = [each.transport for each in server.connections]
        return sum(each.get_write_buffer_size() for each in found if each)

    async def until_open(self, count: int) -> None:
        await until(lambda: self.open == count)


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    this = Site()
    await this.listener.start("127.0.0.1", (this.port,), None)
    yield this
    this.go_on.set()
    await this.listener.stop()


@pytest.mark.parametrize("begin", [b"", GET[:10]], ids=["silent", "half a head"])
async def test_who_does_not_begin_a_request_is_shown_out(
    site: Site, begin: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "HEAD_SECONDS", SHORT)
    assert await site.exchange(begin) == b""


@pytest.mark.parametrize("begin", [b"", GET[:10]], ids=["silent", "half a head"])
async def test_who_does_not_go_on_is_shown_out(
    site: Site, begin: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "KEEPALIVE_SECONDS", SHORT)
    assert (await site.exchange(GET + begin)).endswith(b"ok")


@pytest.mark.parametrize("path", [b"/large ", b"/small "], ids=["all", "the rest"])
async def test_who_does_not_read_an_answer_is_shown_out(
    site: Site, path: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "WRITE_SECONDS", SHORT)
    _, writer = await site.connect()
    writer.transport.pause_reading()  # type: ignore[attr-defined] # a socket's has it
    await until(lambda: site.open)
    while not site.unsent:
        # Until one answer is more than the kernel takes, by ever so little.
        site.begun.clear()
        writer.write(GET.replace(b"/ ", path))
        await site.begun.wait()
        await asyncio.sleep(0)
    await site.until_open(0)
    writer.close()


async def test_who_reads_slowly_but_in_time_gets_the_answer(site: Site) -> None:
    request = b"GET /large HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n"
    content = await site.exchange(request)
    assert content.endswith(LARGE)


async def test_a_head_is_bounded_as_a_whole(site: Site) -> None:
    endless = b"".join(b"X%d: " % n + b"x" * 4000 + b"\r\n" for n in range(100))
    reader, writer = await site.connect()
    with contextlib.suppress(ConnectionError):
        writer.write(GET[:-2])
        for at in range(0, len(endless), 1000):
            writer.write(endless[at : at + 1000])
            await writer.drain()
        async with asyncio.timeout(connections.HEAD_SECONDS / 2):
            assert await reader.read() == b""
    await site.until_open(0)
    assert not site.begun.is_set()
    writer.close()


@pytest.mark.parametrize("piece", [1000, 10**6], ids=["in pieces", "at once"])
async def test_a_long_body_is_no_head(site: Site, piece: int) -> None:
    body = b" " * 900_000
    content = POST + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    reader, writer = await site.connect()
    for at in range(0, len(content), piece):
        writer.write(content[at : at + piece])
        await writer.drain()
    async with asyncio.timeout(5):
        assert (await reader.read()).endswith(b"900000")
    writer.close()


async def test_a_body_that_breaks_off_ends_its_request_at_once(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    reader, writer = await site.connect()
    writer.write(POST + b"Transfer-Encoding: chunked\r\n\r\n5\r\nxyzzy\r\n")
    await site.begun.wait()
    with caplog.at_level(logging.DEBUG):
        writer.write(b"xyzzy\r\n")
        async with asyncio.timeout(5):
            assert b" 400 " in (await reader.read())
    assert site.ended == ["broken: it is broken"]
    assert not [each for each in caplog.records if each.levelno > logging.DEBUG]
    writer.close()


async def test_what_is_no_http_gets_a_problem_document(site: Site) -> None:
    head, _, body = (await site.exchange(b"xyzzy\r\n\r\n")).partition(b"\r\n\r\n")
    assert b"application/problem+json" in head
    assert json.loads(body)["status"] == 400


async def test_who_hangs_up_waits_no_longer(site: Site) -> None:
    site.go_on.clear()
    _, writer = await site.connect()
    writer.write(GET)
    await site.begun.wait()
    writer.close()
    await site.until_open(0)
    await until(lambda: site.ended)
    assert site.ended == ["cancelled"]


async def test_one_connection_too_many_is_closed(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(site.listener, "_most", 2)
    others = [await site.connect() for _ in range(2)]
    await site.until_open(2)
    assert await site.exchange(GET) == b""
    others[0][1].close()
    await site.until_open(1)
    assert (await site.exchange(GET.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))) != b""
    others[1][1].close()


async def test_at_the_end_what_is_under_way_is_answered(site: Site) -> None:
    site.go_on.clear()
    answer = asyncio.ensure_future(site.exchange(GET))
    await site.begun.wait()
    ending = asyncio.ensure_future(site.listener.stop())
    await asyncio.sleep(0)
    site.go_on.set()
    await ending
    assert (await answer).endswith(b"ok")


async def test_the_end_does_not_wait_for_ever(
    site: Site, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(site.listener, "_patience", SHORT)
    site.go_on.clear()
    answer = asyncio.ensure_future(site.exchange(GET))
    await site.begun.wait()
    async with asyncio.timeout(5):
        await site.listener.stop()
    assert "did not end within" in caplog.text
    site.go_on.set()
    answer.cancel()
