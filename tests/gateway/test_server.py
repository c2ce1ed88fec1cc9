"""Room for so many requests at once, and what becomes of them when their callers hang up."""

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import ExitStack
from itertools import count
from typing import cast

import pytest
from aiohttp import web

from agentjobs.contract import operations
from agentjobs.contract.problems import ProblemType
from agentjobs.gateway.connections import Listener
from agentjobs.gateway.problems import ProblemError
from agentjobs.gateway.reviews import Caller, Pod, Reviews
from agentjobs.gateway.server import MAX_LARGE, Call, Room, Server, tenant_of
from agentjobs.metrics import GatewayMetrics
from tests.cluster.controlplane import free_ports
from tests.until import until


def crowd(room: Room, stack: ExitStack, tenant: str) -> int:
    """Take all the places that a tenant gets; return how many that were."""
    for taken in count():
        try:
            stack.enter_context(room.place(tenant))
        except ProblemError:
            return taken
    raise AssertionError


def test_who_finds_no_room_is_told_when_to_come_again_and_which_limit_it_was() -> None:
    room = Room(4, "boats are out", 5)
    with ExitStack() as stack:
        assert crowd(room, stack, "a") == 2
        with pytest.raises(ProblemError) as own, room.place("a"):
            pytest.fail("there was room for a third one")
        assert crowd(room, stack, "b") == crowd(room, stack, "c") == 1
        with pytest.raises(ProblemError) as full, room.place("d"):
            pytest.fail("there was room for a fifth one")
    assert own.value.kind is ProblemType.BUSY
    assert own.value.headers["Retry-After"] == "5"
    assert own.value.problem.detail == (
        "2 of at most 4 boats are out; a has 2, which is its share just now"
    )
    assert full.value.problem.detail == "4 of at most 4 boats are out"
    with room.place("a"), room.place("a"):
        pass


def test_room_is_left_for_the_next_tenant_whatever_the_others_hold() -> None:
    room = Room(512, "boats are out")
    with ExitStack() as stack:
        assert [crowd(room, stack, tenant) for tenant in "abcde"] == [256, 128, 64, 32, 16]
        stack.enter_context(room.place("f"))


def test_those_whom_nobody_knows_yet_are_bounded_together_alone() -> None:
    room = Room(4, "boats are out")
    with ExitStack() as stack:
        assert crowd(room, stack, "") == 4


@pytest.mark.parametrize(
    ("caller", "pod", "tenant"),
    [
        ("system:serviceaccount:team-a:one", None, "namespace team-a"),
        ("system:serviceaccount:team-a:two", None, "namespace team-a"),
        ("alice", None, "user alice"),
        ("pod uid-1", Pod("team-a", "p", "uid-1"), "the tools of namespace team-a"),
    ],
)
def test_r_namespace_room_is_counted_by(caller: str, pod: Pod | None, tenant: str) -> None:
    assert tenant_of(Caller(caller), pod) == tenant


async def test_whoever_goes_leaves_the_place_free() -> None:
    room = Room(1, "boats are out")

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
    room = Room(1, "boats are out")
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
    assert site.server._busy._taken == {"user caller": 1}
    assert not site.ended
    site.go_on.set()
    await until(lambda: site.ended == ["done"])
    await until(lambda: not site.server._busy._taken)


async def test_who_waits_for_a_change_waits_no_longer_when_they_hang_up(site: Site) -> None:
    writer = await site.ask("?wait=60")
    assert site.server._waiting._taken == {"user caller": 1}
    assert not site.server._busy._taken, "whoever waits is in nobody's way"
    writer.close()
    await until(lambda: site.ended == ["broken off"])
    await until(lambda: not site.server._waiting._taken)


async def test_large_bodies_have_little_room_until_they_are_done_with(site: Site) -> None:
    shares = {"a": MAX_LARGE // 2, "b": MAX_LARGE // 4, "c": MAX_LARGE // 8}
    reports: list[asyncio.Future[bytes]] = []
    for namespace, share in shares.items():
        reports += [asyncio.ensure_future(site.report(namespace)) for _ in range(share)]
        # They have been read, but stand in memory for as long as they are worked on.
        await until(lambda begun=reports: site.at_work == len(begun))
        assert b"503" in await site.report(namespace), "a namespace must leave room for others"
    site.go_on.set()
    assert {line[9:12] for line in await asyncio.gather(*reports)} == {b"200"}


async def test_r_namespace_one_whose_requests_all_hang_leaves_room_for_others(site: Site) -> None:
    """Such as reads from a store that does not answer."""
    with ExitStack() as stack:
        crowd(site.server._busy, stack, tenant_of(Caller("caller"), None))
        reader, writer = await asyncio.open_connection("127.0.0.1", site.port)
        writer.write(b"GET /v1/jobs/a.b HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer t\r\n\r\n")
        assert b"503" in await reader.readline()
        writer.close()
        site.go_on.set()
        assert b"200" in await site.report("another")
