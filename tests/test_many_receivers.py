"""Many receivers on real sockets, half of them dead: the others wait for nothing (R-CALLBACK)."""

import asyncio
import contextlib
import os
import resource
import sys
import time

import pytest

from agentjobs.dispatch import Dispatcher, Letter
from agentjobs.domain.turns import PLACES, Lane
from agentjobs.metrics import Metrics
from tests.test_dispatch import BODY, HERE, SIGNER

SOAK = bool(os.environ.get("AGENTJOBS_SOAK"))
RECEIVERS = 10_000 if SOAK else 300
RATE = 100 if SOAK else 150
"""Events in a second."""
ANSWER = b"HTTP/1.1 204 No Content\r\n\r\n"


def is_dead(number: int) -> bool:
    return number % 2 == 0


def host(number: int) -> str:
    return f"127.1.{number // 250}.{number % 250 + 1}"


async def receive(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer at once, or take what comes and never answer; each address is a receiver."""
    with contextlib.suppress(OSError, asyncio.IncompleteReadError):
        await reader.readuntil(b"\r\n\r\n")
        block, last = map(int, writer.get_extra_info("sockname")[0].split(".")[2:])
        if is_dead(block * 250 + last - 1):
            await reader.read()
        else:
            writer.write(ANSWER)
            await writer.drain()
    writer.close()


@pytest.mark.timeout(300)
async def test_r_callback_live_receivers_hear_at_once_though_half_of_all_never_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not SOAK:
        # So few that those that never answer would take them all.
        monkeypatch.setitem(PLACES, Lane.PROMPT, 32)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if SOAK:
        # Both ends of each connection are in this process.
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 16_384), hard))
    began: dict[int, float] = {}
    waits: list[float] = []
    all_heard = asyncio.Event()

    def tell(number: int) -> None:
        if not is_dead(number):
            waits.append(time.monotonic() - began[number])
        if len(waits) == RECEIVERS / 2:
            all_heard.set()

    dispatcher: Dispatcher[int] = Dispatcher(SIGNER, HERE, tell, Metrics())
    server = await asyncio.start_server(receive, "0.0.0.0", 0, backlog=4096)  # noqa: S104
    port = server.sockets[0].getsockname()[1]
    start = time.monotonic()
    for number in range(RECEIVERS):
        await asyncio.sleep(max(start + number / RATE - time.monotonic(), 0))
        began[number] = time.monotonic()
        url = f"http://{host(number)}:{port}/events"
        dispatcher.submit(number, Letter(f"e{number}", f"team-{number // 2 % 50}", url, BODY))
    await asyncio.wait_for(all_heard.wait(), 30)
    await dispatcher.close()
    server.close()
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    waits.sort()
    p50, p99 = waits[len(waits) // 2], waits[len(waits) * 99 // 100]
    sys.stdout.write(f"{len(waits)} live of {RECEIVERS}: p50 {p50:.3f} s, p99 {p99:.3f} s\n")
    assert p99 <= 2.0
