"""The queue of keys: coalesced, one pass at a time, delayed, backing off."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from agentjobs.workqueue import LARGEST_BACKOFF, WorkQueue, set_within

Handle = Callable[[str], Awaitable[float | None]]
LONG = 3600.0


@asynccontextmanager
async def running(handle: Handle, workers: int = 4) -> AsyncIterator[WorkQueue[str]]:
    queue = WorkQueue(handle, workers)
    task = asyncio.create_task(queue.run())
    try:
        yield queue
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


class Gate:
    """A handler that holds every pass until it is let go."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.under_way: dict[str, int] = {}
        self.most_at_once: dict[str, int] = {}
        self.open = asyncio.Event()
        self._began = asyncio.Condition()

    async def __call__(self, key: str) -> float | None:
        now = self.under_way[key] = self.under_way.get(key, 0) + 1
        self.most_at_once[key] = max(now, self.most_at_once.get(key, 0))
        async with self._began:
            self.begun.append(key)
            self._began.notify_all()
        await self.open.wait()
        self.under_way[key] -= 1
        return None

    async def until_begun(self, count: int) -> None:
        async with asyncio.timeout(5), self._began:
            await self._began.wait_for(lambda: len(self.begun) >= count)


async def settled(queue: WorkQueue[str]) -> None:
    async with asyncio.timeout(5):
        while len(queue):  # noqa: ASYNC110 - the queue tells nobody when it is empty
            await asyncio.sleep(0)


async def test_a_key_that_is_added_twice_before_its_pass_gets_one() -> None:
    gate = Gate()
    gate.open.set()
    async with running(gate) as queue:
        for _ in range(5):
            queue.add("a")
        await gate.until_begun(1)
        await settled(queue)
    assert gate.begun == ["a"]


async def test_a_key_that_is_added_during_its_pass_gets_one_more_and_never_two_at_once() -> None:
    gate = Gate()
    async with running(gate) as queue:
        queue.add("a")
        await gate.until_begun(1)
        for _ in range(5):
            queue.add("a")
        queue.add("b")
        await gate.until_begun(2)
        assert gate.begun == ["a", "b"]
        gate.open.set()
        await gate.until_begun(3)
        await settled(queue)
    assert gate.begun == ["a", "b", "a"]
    assert gate.most_at_once == {"a": 1, "b": 1}


async def test_no_more_passes_than_workers_are_under_way() -> None:
    gate = Gate()
    async with running(gate, workers=2) as queue:
        for key in "abcde":
            queue.add(key)
        await gate.until_begun(2)
        for _ in range(20):
            await asyncio.sleep(0)
        assert gate.begun == ["a", "b"]
        assert len(queue) == 5
        gate.open.set()
        await gate.until_begun(5)


async def test_the_earlier_of_two_times_counts() -> None:
    gate = Gate()
    gate.open.set()
    async with running(gate) as queue:
        queue.add_later("a", LONG)
        queue.add_later("a", 0.01)
        queue.add_later("a", LONG)
        queue.add_later("b", LONG)
        await gate.until_begun(1)
        await settled(queue)
    assert gate.begun == ["a"]


async def test_a_pass_replaces_the_time_that_was_set_before_it() -> None:
    times = iter([LONG, 0.01, None])
    passes: list[float] = []
    begun, done = asyncio.Event(), asyncio.Event()

    async def handle(_: str) -> float | None:
        passes.append(asyncio.get_running_loop().time())
        begun.set()
        delay = next(times)
        if delay is None:
            done.set()
        return delay

    async with running(handle) as queue:
        queue.add("a")
        await begun.wait()
        queue.add("a")
        async with asyncio.timeout(5):
            await done.wait()
    assert len(passes) == 3
    assert passes[2] - passes[1] >= 0.01


async def test_failures_back_off_and_a_success_forgets_them() -> None:
    queue = WorkQueue(Gate(), 1)
    delays = [queue._backoff("a", RuntimeError()) for _ in range(12)]
    assert 0.05 <= delays[0] <= 0.1
    assert delays[5] > delays[0]
    assert LARGEST_BACKOFF / 2 <= delays[-1] <= LARGEST_BACKOFF
    assert queue._backoff("b", RuntimeError()) <= 0.1
    queue.forget("a")
    assert queue._backoff("a", RuntimeError()) <= 0.1


async def test_what_the_server_asked_for_is_waited() -> None:
    class ThrottledError(Exception):
        retry_after = 7.0

    assert WorkQueue(Gate(), 1)._backoff("a", ThrottledError()) == 7.0


async def test_a_pass_that_breaks_is_made_again_and_others_go_on() -> None:
    tries: list[str] = []
    done = asyncio.Event()

    async def handle(key: str) -> float | None:
        tries.append(key)
        if tries.count("a") < 3 and key == "a":
            raise ZeroDivisionError
        if tries.count("a") == 3:
            done.set()
        return None

    async with running(handle, workers=1) as queue:
        queue.add("a")
        queue.add("b")
        async with asyncio.timeout(5):
            await done.wait()
        await settled(queue)
        assert not queue._failures
    assert sorted(tries) == ["a", "a", "a", "b"]


@pytest.mark.parametrize("delay", [0.0, -1.0])
async def test_no_delay_is_now(delay: float) -> None:
    gate = Gate()
    gate.open.set()
    async with running(gate) as queue:
        queue.add_later("a", delay)
        await gate.until_begun(1)


async def test_a_key_that_is_forgotten_is_not_woken_by_its_old_time() -> None:
    gate = Gate()
    gate.open.set()
    async with running(gate) as queue:
        queue.add_later("a", 0.01)
        queue.forget("a")
        queue.add_later("b", 0.03)
        await gate.until_begun(1)
    assert gate.begun == ["b"]


async def test_a_wait_that_is_cancelled_as_its_event_comes_is_cancelled() -> None:
    """A leader that had lost its Lease went on for ever: one of its tasks took no cancellation."""
    event = asyncio.Event()

    async def wait_for_ever() -> None:
        while True:
            await set_within(event, 60)
            event.clear()

    task = asyncio.create_task(wait_for_ever())
    await asyncio.sleep(0)
    event.set()
    task.cancel()
    await asyncio.wait({task}, timeout=1)
    assert task.cancelled()
