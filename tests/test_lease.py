"""Leadership: who may write, for how long, and what a sleeper finds when it wakes up (R-CLAIM)."""

import copy
from typing import Any

import pytest

from agentjobs.kube import ConflictError, NotFoundError, Resource, UnavailableError
from agentjobs.lease import Lease, LostLeadershipError, Terms

TERMS = Terms(lease=10, renew=7, retry=2)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Server:
    """One Lease, as the API server keeps it."""

    def __init__(self) -> None:
        self.lease: dict[str, Any] | None = None
        self.away = False

    async def get(self, _resource: Resource, _namespace: str, _name: str) -> dict[str, Any]:
        if self.away:
            raise UnavailableError("away")
        if self.lease is None:
            raise NotFoundError(404, {}, "GET")
        return copy.deepcopy(self.lease)

    async def create(
        self, _resource: Resource, _namespace: str, body: dict[str, Any]
    ) -> dict[str, Any]:
        if self.away:
            raise UnavailableError("away")
        if self.lease is not None:
            raise ConflictError(409, {}, "POST")
        return self._keep(body, "1")

    async def replace(
        self, _resource: Resource, _namespace: str, _name: str, body: dict[str, Any]
    ) -> dict[str, Any]:
        if self.away:
            raise UnavailableError("away")
        assert self.lease is not None
        version = self.lease["metadata"]["resourceVersion"]
        if body["metadata"]["resourceVersion"] != version:
            raise ConflictError(409, {}, "PUT")
        return self._keep(body, str(int(version) + 1))

    @property
    def holder(self) -> str:
        assert self.lease is not None
        return str(self.lease["spec"]["holderIdentity"])

    def _keep(self, body: dict[str, Any], version: str) -> dict[str, Any]:
        self.lease = copy.deepcopy(body)
        self.lease["metadata"]["resourceVersion"] = version
        return copy.deepcopy(self.lease)


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
def clock() -> Clock:
    return Clock()


def candidate(server: Server, name: str, clock: Clock) -> Lease:
    return Lease(server, "ns", "l", name, TERMS, clock)  # type: ignore[arg-type] # three calls of Kube


async def test_the_first_leads_and_the_second_waits(server: Server, clock: Clock) -> None:
    first, second = candidate(server, "a", clock), candidate(server, "b", clock)
    assert await first._try()
    assert not await second._try()
    first.fence()
    with pytest.raises(LostLeadershipError):
        second.fence()
    assert server.holder == "a"


async def test_a_lease_that_is_renewed_is_never_taken(server: Server, clock: Clock) -> None:
    first, second = candidate(server, "a", clock), candidate(server, "b", clock)
    assert await first._try()
    for _ in range(20):
        clock.now += TERMS.retry
        assert await first._try()
        assert not await second._try()
    first.fence()


async def test_a_lease_that_is_not_renewed_is_taken_after_its_time(
    server: Server, clock: Clock
) -> None:
    first, second = candidate(server, "a", clock), candidate(server, "b", clock)
    assert await first._try()
    assert not await second._try()
    clock.now += TERMS.lease - 0.1
    assert not await second._try()
    clock.now += 0.2
    assert await second._try()
    assert server.holder == "b"
    assert server.lease is not None
    assert server.lease["spec"]["leaseTransitions"] == 1


async def test_two_never_lead_at_once(server: Server, clock: Clock) -> None:
    first, second = candidate(server, "a", clock), candidate(server, "b", clock)
    assert await first._try()
    await second._try()
    for _ in range(40):
        clock.now += 0.5
        await second._try()
        assert not (first.held and second.held)
    assert second.held


async def test_a_sleeper_is_fenced_before_it_asks_anybody(server: Server, clock: Clock) -> None:
    sleeper = candidate(server, "a", clock)
    assert await sleeper._try()
    clock.now += TERMS.renew - 0.1
    sleeper.fence()
    clock.now += 0.2
    with pytest.raises(LostLeadershipError):
        sleeper.fence()


async def test_time_spent_on_a_slow_renewal_counts_from_its_begin(
    server: Server, clock: Clock
) -> None:
    lease = candidate(server, "a", clock)
    get = server.get

    async def slow(*arguments: Any) -> dict[str, Any]:
        clock.now += 5
        return await get(*arguments)

    server.get = slow  # type: ignore[method-assign,assignment]
    assert await lease._try()
    clock.now += TERMS.renew - 5 - 0.1
    assert lease.held
    clock.now += 0.2
    assert not lease.held


async def test_a_server_that_is_away_does_not_end_leadership_at_once(
    server: Server, clock: Clock
) -> None:
    lease = candidate(server, "a", clock)
    assert await lease._try()
    server.away = True
    clock.now += 3
    assert not await lease._try()
    lease.fence()
    server.away = False
    clock.now += 3
    assert await lease._try()
    clock.now += 3
    lease.fence()


async def test_what_is_given_up_is_free_at_once(server: Server, clock: Clock) -> None:
    first, second = candidate(server, "a", clock), candidate(server, "b", clock)
    assert await first._try()
    assert not await second._try()
    await first.release()
    assert not first.held
    assert await second._try()


async def test_release_leaves_a_lease_that_is_another_s(server: Server, clock: Clock) -> None:
    first, second = candidate(server, "a", clock), candidate(server, "b", clock)
    assert await first._try()
    await second._try()
    clock.now += TERMS.lease + 1
    assert await second._try()
    await first.release()
    assert server.holder == "b"


async def test_of_two_that_take_it_at_the_same_time_one_leads(server: Server, clock: Clock) -> None:
    first, second = candidate(server, "a", clock), candidate(server, "b", clock)
    stale = await second_look(server, first)
    with pytest.raises(ConflictError):
        await server.replace(None, "ns", "l", stale)  # type: ignore[arg-type]
    assert first.held
    assert not await second._try()


async def second_look(server: Server, winner: Lease) -> dict[str, Any]:
    """What the loser had read before the winner wrote."""
    assert await winner._try()
    await winner.release()
    seen = copy.deepcopy(server.lease)
    assert seen is not None
    assert await winner._try()
    return seen
