"""A queue of keys: one pass at a time for each, coalesced, delayed, with back-off on failure."""

import asyncio
import contextlib
import heapq
import random
from collections import deque
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
FIRST_BACKOFF = 0.1
LARGEST_BACKOFF = 15.0


async def set_within(event: asyncio.Event, seconds: float | None) -> None:
    """Wait until an event is set, at most so long; None: as long as it takes.

    Not by `asyncio.wait_for`, which before Python 3.12 swallows a cancellation that comes together
    with the event: a task group then waits for ever.
    """
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()


class WorkQueue(Generic[K]):
    """Keys that want a pass.

    A key that is added while its pass is under way gets another one afterwards; added twice
    before it, one. Delays are relative, in seconds of the loop's clock.
    """

    def __init__(self, handle: Callable[[K], Awaitable[float | None]], workers: int) -> None:
        """Prepare a queue.

        :param handle: makes one pass; returns after how many seconds it wants another, or None.
        :param workers: passes that may be under way at once.
        """
        self._handle = handle
        self._workers = workers
        self._ready: deque[K] = deque()
        self._waiting: set[K] = set()
        self._busy: set[K] = set()
        self._again: set[K] = set()
        self._due: dict[K, float] = {}
        self._heap: list[tuple[float, int, K]] = []
        self._serial = 0
        self._failures: dict[K, int] = {}
        self._wake = asyncio.Event()
        self._work = asyncio.Semaphore(0)

    def __len__(self) -> int:
        """Keys that are ready or under way."""
        return len(self._waiting) + len(self._busy)

    def add(self, key: K) -> None:
        """Ask for a pass now."""
        if key in self._busy:
            self._again.add(key)
        elif key not in self._waiting:
            self._waiting.add(key)
            self._ready.append(key)
            self._work.release()

    def add_later(self, key: K, delay: float) -> None:
        """Ask for a pass after some seconds. The earlier of two times counts."""
        if delay <= 0:
            self.add(key)
            return
        due = asyncio.get_running_loop().time() + delay
        if due < self._due.get(key, float("inf")):
            self._due[key] = due
            self._serial += 1
            heapq.heappush(self._heap, (due, self._serial, key))
            self._wake.set()

    def forget(self, key: K) -> None:
        """Drop what is remembered of a key: its next time and its failures."""
        self._due.pop(key, None)
        self._failures.pop(key, None)

    async def run(self) -> None:
        """Work until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._alarm(), name="workqueue-alarm")
            for number in range(self._workers):
                group.create_task(self._worker(), name=f"workqueue-{number}")

    async def _worker(self) -> None:
        while True:
            await self._work.acquire()
            key = self._ready.popleft()
            self._waiting.discard(key)
            self._busy.add(key)
            self._due.pop(key, None)
            try:
                delay = await self._handle(key)
            except Exception as error:  # noqa: BLE001 - the handler has reported it; try again
                delay = self._backoff(key, error)
            else:
                self._failures.pop(key, None)
            finally:
                self._busy.discard(key)
            if delay is not None:
                self.add_later(key, delay)
            if key in self._again:
                self._again.discard(key)
                self.add(key)

    def _backoff(self, key: K, error: Exception) -> float:
        """Seconds until the next try: doubled each time, with jitter; at least Retry-After."""
        count = self._failures[key] = self._failures.get(key, 0) + 1
        delay: float = min(FIRST_BACKOFF * 2 ** min(count - 1, 16), LARGEST_BACKOFF)
        asked: float = getattr(error, "retry_after", None) or 0.0
        return max(asked, delay * random.uniform(0.5, 1.0))  # noqa: S311 - jitter, no secret

    async def _alarm(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            self._wake.clear()
            while self._heap and self._heap[0][0] <= loop.time():
                due, _, key = heapq.heappop(self._heap)
                if self._due.get(key) == due:
                    del self._due[key]
                    self.add(key)
            pause = max(self._heap[0][0] - loop.time(), 0) if self._heap else None
            await set_within(self._wake, pause)
