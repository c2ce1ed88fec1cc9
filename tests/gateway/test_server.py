"""Room for so many requests at once, and what becomes of them when their callers hang up."""

import asyncio
import gc
from collections.abc import AsyncIterator
from itertools import count
from typing import cast

import pytest
from aiohttp import web

from agentjobs.contract import operations
from agentjobs.contract.problems import ProblemType
from agentjobs.gateway.connections import Listener
from agentjobs.gateway.problems import ProblemError
from agentjobs.gateway.reviews import Caller, Pod, Reviews
from agentjobs.gateway.server import MAX_LARGE, MAX_LARGE_EACH, Call, Room, Server
from agentjobs.metrics import GatewayMetrics
from tests.cluster.controlplane import free_ports
from tests.until import until


def test_who_finds_no_room_is_told_when_to_come_again() -> None:
    room = Room(2, "too much", 5)
    with room.place("a"), room.place("a"):
        with pytest.raises(ProblemError) as caught, room.place("a"):
            pytest.fail("there was room for a third one")
        with room.place("b"):
            pass
    assert caught.value.kind is ProblemType.BUSY
    assert caught.value.headers["Retry-After"] == "5"
    with room.place("a"), room.place("a"):
        pass


async def test_whoever_goes_leaves_the_place_free() -> None:
    room = Room(1, "too much")

    async def stay() -> None:
        with room.place("a"):
            await asyncio.Event().wait()

    staying = asyncio.ensure_future(stay())
    await asyncio.sleep(0)
    staying.cancel()
    await asyncio.gather(staying, return_exceptions=True)
    with pytest.raises(KeyError), room.place("a"):
        raise KeyError
    with room.place("a"):
        pass


def test_nothing_is_kept_of_those_who_were_there_or_refused() -> None:
    room = Room(1, "too much")
    before = refusals()
    for number in range(1000):
        this = f"caller-{number}"
        with room.place(this), pytest.raises(ProblemError), room.place(this):
            pass
    assert not room._taken
    # One that is raised again and again would grow with each raise, and keep all who raised it.
    assert refusals() == before


def refusals() -> int:
    gc.collect()
    return sum(isinstance(each, ProblemError) for each in gc.get_objects())


# --- who hangs up


PODS = count()


class AnyCaller:
    """Reviews that know one caller."""

    async def authenticate(self, header: str, *, secure: bool) -> Caller:
        assert header == "Bearer t"
        assert not secure
        return Caller("caller")

    async def authenticate_pod(self, header: str) -> Pod:
        name = header.removeprefix("Bearer ")
        return Pod(namespace=name, name="pod", uid=f"{name}-{next(PODS)}")


class Site:
    """A server whose only handler goes on when it is let."""

    def __init__(self) -> None:
        (self.port,) = free_ports(1)
        self.go_on = asyncio.Event()
        self.at_work = 0
        self.ended: list[str] = []
        reviews = cast("Reviews", AnyCaller())
        self.server = Server(reviews, GatewayMetrics(), not_ready=lambda: "")
        self.server.serve(operations.STATUS, self._handle)
        self.server.serve(operations.REPORT_RESULT, self._handle)
        self.listener = Listener(self.server.app, 5)

    async def _handle(self, _: Call) -> web.Response:
        self.at_work += 1
        try:
            await self.go_on.wait()
        except asyncio.CancelledError:
            self.ended.append("broken off")
            raise
        self.ended.append("done")
        return web.Response(text="ok")

    async def ask(self, query: str = "") -> asyncio.StreamWriter:
        """Send a request, and wait until it is worked on."""
        _, writer = await asyncio.open_connection("127.0.0.1", self.port)
        head = f"GET /v1/jobs/a.b{query} HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer t\r\n\r\n"
        writer.write(head.encode())
        before = self.at_work
        await until(lambda: self.at_work > before)
        return writer

    async def report(self, namespace: str) -> bytes:
        """Hand in a result; return the first line of the answer."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        lines = (
            "POST /v1/report/result HTTP/1.1",
            "Host: h",
            "Agentjobs-Job: a.b",
            f"Authorization: Bearer {namespace}",
            "Content-Length: 2",
        )
        writer.write("\r\n".join((*lines, "", "ok")).encode())
        try:
            return await reader.readline()
        finally:
            writer.close()

    async def until_hung_up(self) -> None:
        runner = self.listener._runner.server
        assert runner
        await until(lambda: not runner.connections)


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    this = Site()
    await this.listener.start("127.0.0.1", (this.port,), None)
    yield this
    this.go_on.set()
    await this.listener.stop()


async def test_what_was_begun_goes_on_and_keeps_its_place_when_its_caller_hangs_up(
    site: Site,
) -> None:
    writer = await site.ask()
    writer.close()
    await site.until_hung_up()
    assert site.server._busy._taken == {"": 1}
    assert site.server._busy_each._taken == {"caller": 1}
    assert not site.ended
    site.go_on.set()
    await until(lambda: site.ended == ["done"])
    await until(lambda: not site.server._busy._taken)


async def test_who_waits_for_a_change_waits_no_longer_when_they_hang_up(site: Site) -> None:
    writer = await site.ask("?wait=60")
    assert site.server._waiting._taken == {"": 1}
    assert site.server._waiting_each._taken == {"caller": 1}
    assert not site.server._busy._taken, "whoever waits is in nobody's way"
    writer.close()
    await until(lambda: site.ended == ["broken off"])
    await until(lambda: not site.server._waiting._taken)
    assert not site.server._waiting_each._taken


async def test_large_bodies_have_little_room_until_they_are_done_with(site: Site) -> None:
    reports = [
        asyncio.ensure_future(site.report(namespace))
        for namespace in ("a", "b")
        for _ in range(MAX_LARGE_EACH)
    ]
    # They have been read, but stand in memory for as long as they are worked on.
    await until(lambda: site.at_work == len(reports) == MAX_LARGE)
    assert b"503" in await site.report("c")
    site.go_on.set()
    assert {line[9:12] for line in await asyncio.gather(*reports)} == {b"200"}
    site.go_on.clear()
    reports = [asyncio.ensure_future(site.report("a")) for _ in range(MAX_LARGE_EACH)]
    await until(lambda: site.at_work == MAX_LARGE + MAX_LARGE_EACH)
    assert b"503" in await site.report("a"), "one namespace must leave room for others"
    site.go_on.set()
    await asyncio.gather(*reports)
