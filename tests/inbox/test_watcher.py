"""The watcher: the same events, under the same ids, as callbacks would have brought."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from agentjobs.api.names import State
from agentjobs.client import NotFoundError, UnavailableError
from agentjobs.contract.calls import Cause, JobStatus
from agentjobs.inbox import Inbox, Rules, Verifier, Watcher
from agentjobs.inbox.heard import heard_from_status
from tests.inbox.events import NOW, SIGNER, body_of, headers_of, heard_of
from tests.inbox.played import PlayedGateway
from tests.until import until

ALL = Rules(namespaces=frozenset({"team-a"}))


@dataclass
class Place:
    path: Path
    gateway: PlayedGateway

    @asynccontextmanager
    async def watching(
        self, rules: Rules | None = None, namespaces: tuple[str, ...] = ("",)
    ) -> AsyncIterator[Inbox]:
        async with self.quiet(rules) as (inbox, watcher):
            task = asyncio.create_task(Watcher(inbox, watcher._client, namespaces).run())
            try:
                yield inbox
            finally:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task

    @asynccontextmanager
    async def quiet(self, rules: Rules | None = None) -> AsyncIterator[tuple[Inbox, Watcher]]:
        """With a watcher that goes no step by itself."""
        verifier = Verifier([SIGNER.public()["ed25519"]])
        async with (
            self.gateway.client() as client,
            Inbox(self.path, client, verifier=verifier, rules=rules, clock=lambda: NOW) as inbox,
        ):
            yield inbox, Watcher(inbox, client)


@pytest.fixture
async def place(tmp_path: Path) -> AsyncIterator[Place]:
    async with PlayedGateway().serving() as gateway:
        yield Place(tmp_path / "inbox.db", gateway)


def jobs_in(text: str) -> list[str]:
    return re.findall(r"job_completed job_id=(\S+)", text)


async def collect(inbox: Inbox, count: int) -> list[str]:
    """Ends in the order of their lines, acknowledged, until there are so many."""
    found: list[str] = []
    while len(found) < count:
        batch = await inbox.take()
        found += jobs_in(batch.text)
        await inbox.acknowledge(batch)
    return found


@pytest.mark.parametrize(
    ("status", "kind", "words"),
    [
        pytest.param(State.DONE, "job_completed", "3 pages", id="R-EVENT done"),
        pytest.param(State.FAILED, "job_completed", "look at pod x", id="R-EVENT failed"),
        pytest.param(State.CANCELLED, "job_cancelled", "look at pod x", id="R-EVENT cancelled"),
        pytest.param(State.TIMED_OUT, "job_timed_out", "look at pod x", id="R-EVENT timed out"),
        pytest.param(State.STOPPING, None, "", id="R-DEAD stopping is no end"),
        pytest.param(State.RUNNING, None, "", id="R-DEAD running is no end"),
    ],
)
def test_an_end_is_read_from_a_status(status: State, kind: str | None, words: str) -> None:
    done = status is State.DONE
    over = kind is not None
    job = JobStatus(
        job_id="a.team-a",
        status=status,
        created_at=NOW,
        finished_at=NOW if over else None,
        summary="3 pages" if done else None,
        cause=Cause(code="stopped", message="look at pod x", retryable=False, ran=True)
        if over and not done
        else None,
        event_id=f"evt_u_{kind}" if over else None,
    )
    event = heard_from_status(job)
    assert (event and (event.id, event.type, event.summary)) == (
        (f"evt_u_{kind}", kind, words) if over else None
    )


async def test_r_inbox_own_a_watcher_hands_over_own_ends_alone(place: Place) -> None:
    place.gateway.end(place.gateway.make("k.team-a"))
    async with place.watching() as inbox:
        ours = (await inbox.start("crawl")).job_id
        place.gateway.end(ours)
        assert await collect(inbox, 1) == [ours]
        await until(lambda: inbox.store.counts().get("not_ours"))
        assert await inbox.take_now() is None


async def test_r_inbox_own_receiver_and_watcher_together_are_one(place: Place) -> None:
    async with place.watching() as inbox:
        ours = (await inbox.start("crawl")).job_id
        body = body_of(heard_of(ours))
        assert (await inbox.receive(headers_of(body), body)).status == 204
        place.gateway.end(ours)
        assert await collect(inbox, 1) == [ours]
        await until(lambda: inbox.store.counts().get("duplicate"))
        assert (await inbox.receive(headers_of(body), body)).status == 204
        assert await inbox.take_now() is None


async def test_ends_of_a_down_time_are_read_once(place: Place) -> None:
    for n in range(3):
        place.gateway.end(f"j{n}.team-a")
    async with place.watching(ALL) as inbox:
        assert await collect(inbox, 3) == [f"j{n}.team-a" for n in range(3)]
    place.gateway.end("j3.team-a")
    async with place.watching(ALL) as inbox:
        assert await collect(inbox, 1) == ["j3.team-a"]
        assert inbox.store.counts()["taken"] == 4
        assert "duplicate" not in inbox.store.counts(), "the cursor was kept"


async def test_a_cursor_that_is_not_taken_any_more_costs_nothing(place: Place) -> None:
    place.gateway.end("j0.team-a")
    async with place.watching(ALL) as inbox:
        assert await collect(inbox, 1) == ["j0.team-a"]
    place.gateway.epoch += 1
    place.gateway.end("j1.team-a")
    async with place.watching(ALL) as inbox:
        assert await collect(inbox, 1) == ["j1.team-a"]
        assert inbox.store.counts()["duplicate"] == 1
        assert await inbox.take_now() is None


async def test_the_cursor_waits_where_there_is_no_room(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Back-pressure: pages larger than the inbox come through, and nothing is passed over."""
    monkeypatch.setattr("agentjobs.inbox.watcher.FULL_PAUSE_SECONDS", 0.01)
    for n in range(7):
        place.gateway.end(f"j{n}.team-a")
    rules = Rules(namespaces=ALL.namespaces, capacity=3)
    async with place.quiet(rules) as (inbox, watcher):
        stepping = asyncio.create_task(watcher.step())
        await until(lambda: inbox.store.counts().get("full"))
        assert inbox.store.cursor("") == ""
        assert await collect(inbox, 7) == [f"j{n}.team-a" for n in range(7)]
        await stepping
        assert inbox.store.cursor("") == "0-7"


async def test_a_crash_between_the_pages_repeats_and_loses_nothing(place: Place) -> None:
    place.gateway.page = 2
    for n in range(6):
        place.gateway.end(f"j{n}.team-a")
    found: list[str] = []
    for _ in range(3):
        async with place.quiet(ALL) as (inbox, watcher):  # each time anew
            await watcher.step()
            found += await collect(inbox, 2)
    assert found == [f"j{n}.team-a" for n in range(6)]


async def test_several_namespaces_have_a_cursor_each(place: Place) -> None:
    rules = Rules(namespaces=frozenset({"team-a", "team-b"}))
    place.gateway.end("a.team-a")
    place.gateway.end("b.team-b")
    async with place.watching(rules, ("team-a", "team-b")) as inbox:
        assert sorted(await collect(inbox, 2)) == ["a.team-a", "b.team-b"]
        await until(lambda: inbox.store.cursor("team-b"))
        assert inbox.store.cursor("") == ""


async def test_a_gateway_that_is_away_is_asked_again(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors = [UnavailableError("away"), UnavailableError("away")]
    async with place.quiet(ALL) as (inbox, watcher):
        real = watcher._client.changes

        async def sometimes(*args: Any, **kwargs: Any) -> Any:
            if errors:
                raise errors.pop()
            return await real(*args, **kwargs)

        monkeypatch.setattr(watcher._client, "changes", sometimes)
        monkeypatch.setattr("agentjobs.inbox.watcher.asyncio.sleep", _no_pause)
        place.gateway.end("a.team-a")
        task = asyncio.create_task(watcher.run())
        assert await collect(inbox, 1) == ["a.team-a"]
        assert not errors
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def test_a_refusal_that_is_about_no_cursor_is_told(place: Place) -> None:
    async with place.quiet() as (inbox, watcher):
        inbox.store.accept_page("", "0-1", [], NOW)

        async def refused(*_: Any, **__: Any) -> Any:
            from agentjobs.contract.calls import Problem  # noqa: PLC0415

            raise NotFoundError(Problem(type="about:blank", title="x", status=404))

        watcher._client.changes = refused  # type: ignore[method-assign]
        with pytest.raises(NotFoundError):
            await watcher.step()
        assert inbox.store.cursor("") == "0-1"


_sleep = asyncio.sleep


async def _no_pause(_: float) -> None:
    await _sleep(0)
