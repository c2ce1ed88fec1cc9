"""What the inbox makes good beside its loop: one thing that fails holds up none of the others."""

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from contextlib import suppress
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from agentjobs.api.names import State
from agentjobs.client import ProblemError
from agentjobs.contract.calls import StartRequest
from agentjobs.inbox import KeyRing, Rules, Ruling, Watcher, runtime
from agentjobs.inbox.store import Store
from agentjobs.signing import Signer
from tests.inbox.events import NOW, OTHER, SIGNER, body_of, headers_of, heard_of
from tests.inbox.place import DAY, Place, everything, jobs_in
from tests.inbox.played import PlayedGateway
from tests.until import until

SOON = timedelta(seconds=1)
TEAM_A = Rules(namespaces=frozenset({"team-a"}))


@pytest.fixture
async def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Place]:
    monkeypatch.setattr(runtime, "TEND_SECONDS", 0.02)
    async with PlayedGateway().serving() as gateway:
        yield Place(tmp_path, gateway)


@pytest.mark.parametrize("status", [401, 403, 408, 425, 429, 500, 501])
async def test_r_inbox_own_a_start_that_fails_again_and_again_starves_no_other(
    place: Place, status: int
) -> None:
    place.gateway.refuses["first"] = status
    async with place.open() as inbox:
        for n, key in enumerate(("first", "second")):
            at = NOW + n * SOON
            inbox.store.begin_start(key, '{"tool": "crawl"}', None, at)
        inbox.wake()
        await until(lambda: not inbox.store.is_open("second"))
        assert inbox.store.is_open("first"), "nobody has said that there is no job"
        assert ["job_started" in line for line in await everything(inbox)] == [True]
        del place.gateway.refuses["first"]
        await until(lambda: not inbox.store.is_open("first"))


async def test_r_inbox_own_a_start_that_nobody_can_read_starves_no_other(place: Place) -> None:
    async with place.open() as inbox:
        inbox.store.begin_start("of another version", '{"tools": 1}', None, NOW)
        inbox.store.begin_start("second", '{"tool": "crawl"}', None, NOW + SOON)
        inbox.wake()
        await until(lambda: not inbox.store.is_open("second"))


@pytest.mark.parametrize("status", [401, 403, 500])
async def test_a_job_that_may_not_be_seen_any_more_keeps_no_other_from_being_asked_about(
    place: Place, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    monkeypatch.setattr(runtime, "ASKED_AT_ONCE", 1)
    async with place.open() as inbox:
        hidden = (await inbox.start("crawl")).job_id
        place.clock.now += SOON
        seen = (await inbox.start("crawl")).job_id
        place.gateway.refuses[hidden] = status
        place.gateway.end(seen)
        place.clock.now += runtime.QUIET + SOON
        inbox.wake()
        batch = await asyncio.wait_for(inbox.take(), 5)
        assert jobs_in(batch.text.split("\n")) == [seen]


@pytest.mark.parametrize("status", [401, 403, 429])
async def test_r_inbox_own_a_refusal_at_once_is_final(place: Place, status: int) -> None:
    place.gateway.refuse_starts = status
    async with place.open() as inbox:
        with pytest.raises(ProblemError):
            await inbox.start("crawl", key="once")
        assert inbox.store.open_starts() == []


async def test_r_inbox_own_a_refusal_after_a_lost_answer_is_not(place: Place) -> None:
    """The token expires between the try that made the job and the next one."""

    async def lost(_: str) -> None:
        place.gateway.refuse_starts = 401
        raise web.HTTPBadGateway

    place.gateway.before_answer = lost
    async with place.open() as inbox:
        with pytest.raises(ProblemError) as refused:
            await inbox.start("crawl", key="once")
        assert refused.value.repeated
        (ours,) = place.gateway.jobs
        place.gateway.before_answer, place.gateway.refuse_starts = None, 0
        inbox.wake()
        assert f"job_started job_id={ours} " in (await asyncio.wait_for(inbox.take(), 5)).text


async def test_r_inbox_own_a_start_that_has_its_answer_meanwhile_is_not_sent_again(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The list of open starts is old by the time that the last of them is looked at."""
    place.gateway.refuse_starts = 403
    async with place.open(tends=False) as inbox:
        listed = inbox.store.open_starts
        inbox.store.begin_start("k", '{"tool": "crawl"}', None, NOW)
        old = listed()
        inbox.store.end_start("k", None, NOW)
        monkeypatch.setattr(inbox.store, "open_starts", lambda: old)
        await inbox._mend()
        assert place.gateway.starts == []
        assert await everything(inbox) == []


# Follow-ups


async def test_r_depends_a_job_of_a_named_namespace_whose_event_came_and_went(
    place: Place,
) -> None:
    place.gateway.end("k.team-a")
    async with place.open(TEAM_A) as inbox:
        await inbox.when_over(["k.team-a"], "look at it")
        batch = await asyncio.wait_for(inbox.take(), 5)
        text = batch.text
        while "jobs_over" not in text:
            await inbox.acknowledge(batch)
            batch = await asyncio.wait_for(inbox.take(), 5)
            text += batch.text
        assert 'jobs_over jobs=k.team-a:done note: "look at it"' in text


async def test_r_depends_an_end_that_was_told_and_forgotten_is_asked_for(place: Place) -> None:
    rules = Rules(namespaces=frozenset({"team-a"}), retention=DAY)
    async with place.open(rules) as inbox:
        assert await inbox.accept(heard_of("k.team-a")) is Ruling.TAKEN
        await everything(inbox)
        place.gateway.end("k.team-a")
        place.clock.now += 1.5 * DAY
        inbox.store.prune(place.clock.now)
        await inbox.when_over(["k.team-a"], "x")
        batch = await asyncio.wait_for(inbox.take(), 5)
        assert batch.text == '[event] jobs_over jobs=k.team-a:done note: "x"', "its end was told"


def test_r_depends_ends_are_remembered_while_a_follow_up_waits_for_them(tmp_path: Path) -> None:
    store = Store(tmp_path / "inbox.db", Rules(retention=DAY))
    for job in ("a.team-a", "b.team-a"):
        store.adopt(job, NOW)
    store.follow_up("f", ["a.team-a", "b.team-a"], "both", None, "over", NOW)
    store.accept(heard_of("a.team-a"), NOW)
    late = NOW + 40 * DAY
    store.prune(late)
    store.accept(heard_of("b.team-a", time=late, status=State.FAILED), late)
    batch = store.take("loop", late, DAY, 4000)
    assert batch
    assert "jobs=a.team-a:done,b.team-a:failed" in batch.text
    store.close()


async def test_r_depends_a_follow_up_whose_start_fails_starves_no_other(place: Place) -> None:
    async with place.open() as inbox:
        one = (await inbox.start("build")).job_id
        place.gateway.refuses["f-1"] = 403
        for key in ("f-1", "f-2"):
            await inbox.when_over([one], key, start=StartRequest(tool="deploy"), key=key)
        await inbox.accept(heard_of(one))
        await until(lambda: not inbox.store.is_open("f-2"))
        assert inbox.store.is_open("f-1")
        place.clock.now += runtime.REPEATABLE + SOON
        inbox.wake()
        await until(lambda: not inbox.store.is_open("f-1"))
        assert 'note: "f-1" nothing was started: ' in "\n".join(await everything(inbox))


async def test_r_depends_a_key_that_names_a_start_too_does_not_block_the_event(
    place: Place,
) -> None:
    async with place.open(tends=False) as inbox:
        one = (await inbox.start("build")).job_id
        inbox.store.begin_start("k", '{"tool": "deploy"}', None, NOW)
        await inbox.when_over([one], "x", start=StartRequest(tool="deploy"), key="k")
        assert await inbox.accept(heard_of(one)) is Ruling.TAKEN


# Keys and the watcher


async def test_r_callback_deliveries_at_once_share_one_look_at_new_keys(place: Place) -> None:
    async with place.gateway.client() as client:
        place.verifier = KeyRing(client)
        async with place.open(TEAM_A) as inbox:

            async def at_once(signer: Signer, name: str) -> list[int]:
                bodies = [body_of(heard_of(f"{name}{n}.team-a")) for n in range(5)]
                replies = [
                    inbox.receive(headers_of(body, signer, at=place.clock.now), body)
                    for body in bodies
                ]
                return [reply.status for reply in await asyncio.gather(*replies)]

            place.gateway.keys = [SIGNER.public()["ed25519"]]
            assert await at_once(SIGNER, "a") == [204] * 5
            place.clock.now += timedelta(minutes=2)
            place.gateway.keys = [OTHER.public()["ed25519"]]
            assert await at_once(OTHER, "b") == [204] * 5
            assert place.gateway.keys_read == 2


async def test_r_callback_a_clock_that_is_set_back_does_not_hide_new_keys(place: Place) -> None:
    async with place.gateway.client() as client:
        place.gateway.keys = [SIGNER.public()["ed25519"]]
        place.verifier = KeyRing(client)
        async with place.open(TEAM_A) as inbox:
            body = body_of(heard_of("a.team-a"))
            assert (await inbox.receive(headers_of(body, at=NOW), body)).status == 204
            place.clock.now -= 9 * DAY
            place.gateway.keys = [OTHER.public()["ed25519"]]
            headers = headers_of(body, OTHER, at=place.clock.now)
            assert (await inbox.receive(headers, body)).status == 204


async def test_a_watcher_outlives_a_disk_that_is_full(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with place.open(TEAM_A) as inbox, place.gateway.client() as client:
        real, failed = inbox.store.accept_page, asyncio.Event()
        loop = asyncio.get_running_loop()

        def full(*_: Any) -> bool:
            loop.call_soon_threadsafe(failed.set)
            raise sqlite3.OperationalError("database or disk is full")

        monkeypatch.setattr(inbox.store, "accept_page", full)
        place.gateway.end("k.team-a", finished_at=datetime.isoformat(NOW))
        watching = asyncio.create_task(Watcher(inbox, client, ("team-a",)).run())
        try:
            await asyncio.wait_for(failed.wait(), 5)
            monkeypatch.setattr(inbox.store, "accept_page", real)
            batch = await asyncio.wait_for(inbox.take(), 5)
            assert jobs_in(batch.text.split("\n")) == ["k.team-a"]
        finally:
            watching.cancel()
            with suppress(asyncio.CancelledError):
                await watching
