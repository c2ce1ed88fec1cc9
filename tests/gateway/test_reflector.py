"""Following a kind of object: whatever the watch does, the sink has it all in the end."""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection
from typing import Any, cast

import pytest

from agentjobs.gateway import reflector
from agentjobs.gateway.reflector import Reflector
from agentjobs.kube import AGENTJOBS, GoneError, Kube, Resource, UnavailableError

Step = list[dict[str, Any]] | Exception


def thing(uid: str, version: int) -> dict[str, Any]:
    return {"metadata": {"uid": uid, "name": uid, "resourceVersion": str(version)}}


def event(kind: str, uid: str, version: int) -> dict[str, Any]:
    return {"type": kind, "object": thing(uid, version)}


def page(version: int, *things: dict[str, Any]) -> dict[str, Any]:
    return {"metadata": {"resourceVersion": str(version)}, "items": list(things)}


GONE = GoneError(410, {}, "WATCH")
AWAY = UnavailableError("no answer")


class FakeKube:
    """Lists and watches by a script; a watch that has none left stays silent."""

    def __init__(self, lists: list[Step], watches: list[Step]) -> None:
        self._lists = lists
        self._watches = watches
        self.asked: list[str] = []

    async def pages(self, _: Resource) -> AsyncIterator[dict[str, Any]]:
        self.asked.append("list")
        step = self._lists.pop(0)
        if isinstance(step, Exception):
            raise step
        for each in step:
            yield each

    async def watch(self, _: Resource, version: str) -> AsyncIterator[dict[str, Any]]:
        self.asked.append(version)
        if not self._watches:
            await asyncio.Event().wait()
        step = self._watches.pop(0)
        if isinstance(step, Exception):
            raise step
        for each in step:
            yield each


class Seen:
    """What a sink was told."""

    def __init__(self) -> None:
        self.things: dict[str, int] = {}
        self.position = 0

    def put(self, body: dict[str, Any]) -> None:
        self.things[body["metadata"]["uid"]] = int(body["metadata"]["resourceVersion"])

    def drop(self, body: dict[str, Any]) -> None:
        del self.things[body["metadata"]["uid"]]

    def listed(self, uids: Collection[str], version: int) -> None:
        assert version >= self.position
        self.things = {uid: v for uid, v in self.things.items() if uid in uids}

    def reached(self, version: int) -> None:
        self.position = max(self.position, version)


class Run:
    """A reflector that ran until its script was over."""

    def __init__(self, kube: FakeKube, seen: Seen, pauses: list[float]) -> None:
        self.asked, self.seen, self.pauses = kube.asked, seen, pauses


Follow = Callable[[list[Step], list[Step]], Any]


@pytest.fixture
def follow(monkeypatch: pytest.MonkeyPatch) -> Follow:
    """Run a reflector until nothing is left of the script; pauses are noted, not made."""

    async def run(lists: list[Step], watches: list[Step]) -> Run:
        kube, seen, pauses = FakeKube(lists, watches), Seen(), list[float]()
        tick = asyncio.sleep

        async def pause(seconds: float) -> None:
            pauses.append(seconds)
            await tick(0)

        monkeypatch.setattr(reflector.asyncio, "sleep", pause)
        this = Reflector(cast("Kube", kube), AGENTJOBS, seen)
        task = asyncio.ensure_future(this.run())
        # One watch more than the script has: it is the one that stays.
        total = len(lists) + len(watches) + 1
        while len(kube.asked) < total and not task.done():
            await tick(0)
        await tick(0)
        assert not task.done(), task.exception()
        assert this.synced.is_set()
        task.cancel()
        return Run(kube, seen, pauses)

    return run


async def test_r_level_what_is_listed_and_watched_is_seen_in_order(follow: Follow) -> None:
    run = await follow(
        [[page(7, thing("a", 3)), page(7, thing("b", 5))]],
        [[event("MODIFIED", "a", 8), event("DELETED", "b", 9), event("BOOKMARK", "", 12)]],
    )
    assert run.seen.things == {"a": 8}
    assert run.seen.position == 12
    assert run.asked == ["list", "7", "12"], "it goes on from where the watch ended"


async def test_r_level_a_watch_that_lost_its_place_lists_again(follow: Follow) -> None:
    run = await follow(
        [[page(7, thing("a", 3), thing("b", 5))], [page(20, thing("a", 3), thing("c", 19))]],
        [[event("MODIFIED", "b", 9)], GONE],
    )
    assert run.seen.things == {"a": 3, "c": 19}, "b was deleted while nobody watched"
    assert run.asked == ["list", "7", "9", "list", "20"]


async def test_r_level_an_api_server_that_is_away_is_asked_again_with_growing_pauses(
    follow: Follow,
) -> None:
    run = await follow([AWAY, AWAY, [page(7, thing("a", 3))]], [AWAY] * 8)
    assert run.seen.things == {"a": 3}
    assert run.asked == ["list"] * 3 + ["7"] * 9
    assert run.pauses == sorted(run.pauses)
    assert run.pauses[0] == reflector.FIRST_PAUSE
    assert run.pauses[-1] == reflector.LARGEST_PAUSE


@pytest.mark.parametrize(
    ("lists", "watches"),
    [
        pytest.param([[page(7)]], [[]] * 8, id="a watch that ends at once"),
        pytest.param([[page(7)]] + [GONE] * 8 + [[page(7)]], [GONE], id="lists that break off"),
        pytest.param([[page(7)]] * 9, [GONE] * 8, id="a place that is lost again and again"),
    ],
)
async def test_r_level_nothing_becomes_a_storm_of_requests(
    follow: Follow, lists: list[Step], watches: list[Step]
) -> None:
    run = await follow(lists, watches)
    assert len(run.pauses) >= 8
    assert sum(run.pauses[:8]) > 20


async def test_r_level_a_watch_that_works_again_is_followed_without_pauses(
    follow: Follow,
) -> None:
    run = await follow([[page(7)]], [AWAY, AWAY, AWAY, [event("ADDED", "a", 8)], AWAY])
    assert run.pauses[3:] == [reflector.FIRST_PAUSE, 2 * reflector.FIRST_PAUSE]
