"""Receivers that misbehave in every way, on real sockets (R-CALLBACK).

Each try ends within its bound, reads no more than its bound, and says what went wrong without
saying what the network looks like inside.
"""

import asyncio
import contextlib
import gzip
import socket
import ssl
import struct
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from agentjobs import dispatch
from agentjobs.dispatch import Dispatcher, Letter
from agentjobs.domain.callbacks import Outcome, Reply
from agentjobs.metrics import Metrics
from tests.cluster.pki import Pki
from tests.test_dispatch import BODY, HERE, SIGNER

HEADERS_SECONDS = 0.4
READ_SECONDS = 0.3
LARGE = 64 * 1024 * 1024

Misbehave = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@pytest.fixture(autouse=True)
def _hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "HEADERS_SECONDS", HEADERS_SECONDS)
    monkeypatch.setattr(dispatch, "READ_SECONDS", READ_SECONDS)


@asynccontextmanager
async def misbehaving(how: Misbehave, context: ssl.SSLContext | None = None) -> AsyncIterator[int]:
    """A server on this machine that does one thing with every connection; its port."""

    tasks: set[asyncio.Task[None]] = set()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task
        tasks.add(task)
        try:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                await how(reader, writer)
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
        except asyncio.CancelledError:
            # The test is over.
            writer.transport.abort()
        finally:
            tasks.discard(task)

    server = await asyncio.start_server(handle, "127.0.0.1", 0, ssl=context)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)


async def sent(url: str) -> Outcome:
    told = asyncio.Event()
    dispatcher: Dispatcher[str] = Dispatcher(SIGNER, HERE, lambda _key: told.set(), Metrics())
    dispatcher.submit("key", Letter("evt_1", "team-a", url, BODY))
    await asyncio.wait_for(told.wait(), 10)
    outcome = dispatcher.outcomes("key")["evt_1"]
    await dispatcher.close()
    return outcome


async def request_of(reader: asyncio.StreamReader) -> None:
    await reader.readuntil(b"\r\n\r\n")
    await reader.readexactly(len(BODY))


async def drips(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await request_of(reader)
    writer.write(b"HTTP/1.1 200 OK\r\nX-Slow: ")
    while True:
        writer.write(b"x")
        await writer.drain()
        await asyncio.sleep(0.02)


async def goes_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await request_of(reader)
    while True:
        writer.write(b"HTTP/1.1 102 Processing\r\n\r\n")
        await writer.drain()
        await asyncio.sleep(0.02)


async def swallows(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
    await reader.read()


def drips_body(status: str) -> Misbehave:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request_of(reader)
        writer.write(f"HTTP/1.1 {status}\r\nContent-Length: 100000\r\n\r\n".encode())
        while True:
            writer.write(b"x")
            await writer.drain()
            await asyncio.sleep(0.02)

    return handle


def resets(after: bytes = b"") -> Misbehave:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request_of(reader)
        if after:
            writer.write(after)
            await writer.drain()
        raw = writer.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    return handle


def says(content: bytes) -> Misbehave:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request_of(reader)
        writer.write(content)
        await writer.drain()

    return handle


def answer(status: str, body: bytes = b"", **headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


TAKEN, FAILED, GONE = Reply.TAKEN, Reply.FAILED, Reply.GONE
RESET = "the exchange with the receiver failed"


@pytest.mark.parametrize(
    ("how", "reply", "words"),
    [
        pytest.param(swallows, FAILED, "no answer within", id="never answers"),
        pytest.param(drips, FAILED, "no answer within", id="drips headers"),
        pytest.param(goes_on, FAILED, "no answer within", id="is processing for ever"),
        pytest.param(drips_body("200 OK"), TAKEN, "", id="drips a body after 200"),
        pytest.param(drips_body("500 No"), FAILED, "answered 500", id="drips a body after 500"),
        pytest.param(resets(), FAILED, RESET, id="resets without an answer"),
        pytest.param(resets(b"HTTP/1.1 20"), FAILED, RESET, id="resets within the headers"),
        pytest.param(says(b""), FAILED, RESET, id="hangs up"),
        pytest.param(says(b"SSH-2.0-OpenSSH\r\n"), FAILED, RESET, id="speaks something else"),
        pytest.param(
            says(answer("200 OK", X_Large="x" * 100_000)), FAILED, RESET, id="a header without end"
        ),
        pytest.param(
            says(b"HTTP/1.1 204 No Content\r\nContent-Length: 5\r\n\r\nHTTP/"),
            TAKEN,
            "",
            id="a body where there is none",
        ),
        pytest.param(
            says(answer("302 Found", Location="http://127.0.0.1:1/")),
            FAILED,
            "redirects are not followed",
            id="redirects",
        ),
        pytest.param(says(answer("410 Gone")), GONE, "410", id="410"),
        pytest.param(says(answer("429 Slow", Retry_After="7")), FAILED, "429", id="429"),
    ],
)
async def test_r_callback_a_receiver_that(how: Misbehave, reply: Reply, words: str) -> None:
    began = time.monotonic()
    async with misbehaving(how) as port:
        outcome = await sent(f"http://127.0.0.1:{port}/events")
    assert (outcome.reply, words in outcome.error) == (reply, True), outcome.error
    assert str(port) not in outcome.error
    assert "127.0.0.1" not in outcome.error
    assert time.monotonic() - began < HEADERS_SECONDS + READ_SECONDS + 1


async def test_r_callback_a_redirect_is_not_followed_anywhere() -> None:
    called = asyncio.Event()

    async def inside(_: asyncio.StreamReader, __: asyncio.StreamWriter) -> None:
        called.set()

    async with misbehaving(inside) as target:
        moved = answer("307 Moved", Location=f"http://127.0.0.1:{target}/")
        async with misbehaving(says(moved)) as port:
            await sent(f"http://127.0.0.1:{port}/events")
    assert not called.is_set()


@pytest.mark.parametrize("headers", ["", "Content-Encoding: gzip\r\n"], ids=["plain", "a bomb"])
async def test_r_callback_of_a_huge_answer_little_is_read(headers: str) -> None:
    written = 0

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal written
        await request_of(reader)
        writer.write(f"HTTP/1.1 200 OK\r\n{headers}Content-Length: {LARGE}\r\n\r\n".encode())
        block = gzip.compress(bytes(1024 * 1024)) if headers else bytes(65536)
        while written < LARGE:
            writer.write(block)
            await writer.drain()
            written += len(block)

    async with misbehaving(handle) as port:
        outcome = await sent(f"http://127.0.0.1:{port}/events")
        assert outcome.reply is Reply.TAKEN
        # The rest is what the sockets' buffers hold.
        assert written < LARGE / 4


@pytest.fixture
def pki(tmp_path: Path) -> Pki:
    made = Pki(tmp_path)
    made.create()
    return made


async def test_r_callback_a_certificate_that_nobody_vouches_for_gets_no_event(pki: Pki) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*pki.server("receiver", ["127.0.0.1"]))
    async with misbehaving(says(answer("204 No Content")), context) as port:
        outcome = await sent(f"https://127.0.0.1:{port}/events")
    assert (outcome.reply, outcome.error) == (FAILED, "the receiver's certificate is not trusted")


async def test_r_callback_tls_and_plain_text_do_not_mix() -> None:
    async with misbehaving(says(answer("204 No Content"))) as port:
        outcome = await sent(f"https://127.0.0.1:{port}/events")
    assert outcome.reply is FAILED
