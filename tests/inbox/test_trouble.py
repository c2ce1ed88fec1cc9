"""The inbox on a disk that is full, in a damaged or shared file, with a clock that jumps."""

import sqlite3
from collections import Counter
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest

from agentjobs.inbox import Batch, Inbox, Rules, Ruling, runtime
from agentjobs.inbox.schema import connect
from agentjobs.inbox.store import Store
from tests.inbox.events import NOW, heard_of
from tests.inbox.place import DAY, Place, everything, jobs_in
from tests.inbox.played import PlayedGateway

TEAM_A = Rules(namespaces=frozenset({"team-a"}))
LEASE = timedelta(minutes=10)


@pytest.fixture
async def place(tmp_path: Path) -> AsyncIterator[Place]:
    async with PlayedGateway().serving() as gateway:
        yield Place(tmp_path, gateway)


def fill(inbox: Inbox) -> None:
    """Let the file grow no more, and use up what is left in it."""
    db = inbox.store._db
    (pages,) = db.execute("PRAGMA page_count").fetchone()
    db.execute(f"PRAGMA max_page_count = {pages}")
    with suppress(sqlite3.OperationalError):
        for n in range(1000):
            inbox.store.say("x" * 500, NOW, f"filling {n}")
        raise AssertionError("it never got full")


def make_room(inbox: Inbox) -> None:
    inbox.store._db.execute("PRAGMA max_page_count = 1000000")


async def test_r_inbox_own_what_does_not_fit_on_the_disk_is_not_acknowledged_and_comes_again(
    place: Place,
) -> None:
    async with place.open(TEAM_A, tends=False) as inbox:
        fill(inbox)
        events = [heard_of(f"j{n}.team-a", summary="s" * 280) for n in range(30)]
        replies = [await place.deliver(inbox, event) for event in events]
        assert 503 in replies
        refused = [event for event, reply in zip(events, replies, strict=True) if reply == 503]
        make_room(inbox)
        assert [await place.deliver(inbox, event) for event in refused] == [204] * len(refused)
        assert sorted(jobs_in(await everything(inbox))) == sorted(e.job_id for e in events)


async def test_r_inbox_own_no_start_is_sent_that_cannot_be_put_on_record(place: Place) -> None:
    async with place.open(tends=False) as inbox:
        fill(inbox)
        with pytest.raises(sqlite3.OperationalError):
            await inbox.start("crawl", {"text": "x" * 9000})
        assert place.gateway.starts == []


async def test_a_loop_waits_for_a_disk_that_is_full(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime, "TROUBLE_RETRY_SECONDS", 0)
    async with place.open(tends=False) as inbox:
        await inbox.say("hello")
        real, left = inbox.store.take, [3]

        def full(*words: object) -> Batch | None:
            left[0] -= 1
            if left[0]:
                raise sqlite3.OperationalError("database or disk is full")
            return real(*words)  # type: ignore[arg-type]

        monkeypatch.setattr(inbox.store, "take", full)
        assert (await inbox.take()).text == "[user] hello"


def test_a_file_that_is_damaged_is_refused_before_anything_is_promised(tmp_path: Path) -> None:
    path = tmp_path / "inbox.db"
    store = Store(path, TEAM_A)
    for n in range(200):
        store.accept(heard_of(f"j{n}.team-a"), NOW)
    store.close()
    content = bytearray(path.read_bytes())
    content[8192:16384] = b"\xaa" * 8192
    path.write_bytes(content)
    with pytest.raises(sqlite3.DatabaseError, match=r"damaged|malformed"):
        connect(path)


def test_r_inbox_own_an_event_that_two_processes_take_at_once_is_one(tmp_path: Path) -> None:
    """Receiver and watcher, each with a connection of its own."""
    stores = [Store(tmp_path / "inbox.db", TEAM_A) for _ in range(2)]
    events = [heard_of(f"j{n}.team-a") for n in range(100)]
    with ThreadPoolExecutor(4) as pool:
        rulings = Counter(
            pool.map(lambda n: stores[n % 2].accept(events[n // 4], NOW), range(4 * len(events)))
        )
    assert rulings == {Ruling.TAKEN: len(events), Ruling.DUPLICATE: 3 * len(events)}
    for store in stores:
        store.close()


def test_two_loops_at_once_never_hold_the_same_item(tmp_path: Path) -> None:
    stores = {holder: Store(tmp_path / "inbox.db", TEAM_A) for holder in ("a", "b")}
    for n in range(60):
        stores["a"].accept(heard_of(f"j{n}.team-a"), NOW)

    def loop(holder: str) -> list[str]:
        found: list[str] = []
        while batch := stores[holder].take(holder, NOW, LEASE, 150):
            found += jobs_in(batch.text.split("\n"))
            stores[holder].acknowledge(batch.id)
        return found

    with ThreadPoolExecutor(2) as pool:
        of_a, of_b = pool.map(loop, ("a", "b"))
    assert sorted(of_a + of_b) == sorted(f"j{n}.team-a" for n in range(60))
    for store in stores.values():
        store.close()


@pytest.mark.parametrize("days", [-4000, -1, 1, 4000])
async def test_r_inbox_own_a_clock_that_jumps_loses_no_own_job_and_keeps_a_batch(
    place: Place, days: int
) -> None:
    async with place.open() as inbox:
        jobs = [(await inbox.start("crawl")).job_id for _ in range(2)]
        await inbox.accept(heard_of(jobs[0]))
        first = await inbox.take()
        place.clock.now += days * DAY
        inbox.store.prune(place.clock.now)
        assert await inbox.accept(heard_of(jobs[1])) is Ruling.TAKEN
        again = await inbox.take()
        assert (again.id, again.parts) == (first.id, first.parts)
        assert await inbox.acknowledge(again)
        assert jobs_in(await everything(inbox)) == [jobs[1]]


async def test_r_inbox_own_strangers_do_not_take_the_room_of_the_agents_own(place: Place) -> None:
    """While a start is under way, anybody's event may be its job's, and is held."""
    async with place.open(Rules(capacity=3), tends=False) as inbox:
        ours = (await inbox.start("crawl")).job_id
        inbox.store.begin_start("under way", '{"tool": "crawl"}', None, NOW)
        strangers = [heard_of(f"j{n}.team-b") for n in range(9)]
        rulings = [await inbox.accept(each) for each in strangers]
        assert rulings == [Ruling.HELD] * 3 + [Ruling.FULL] * 6, "they may come again"
        assert await inbox.accept(heard_of(ours)) is Ruling.TAKEN
        assert await inbox.say("and I am heard, too")
