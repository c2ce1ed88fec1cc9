"""Waiting for a change of something, by many at once."""

import asyncio
from collections import defaultdict
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class Changes(Generic[K]):
    """Who waits for which key."""

    def __init__(self) -> None:
        self._waiting: defaultdict[K, set[asyncio.Future[None]]] = defaultdict(set)
        self.closed = False

    def __len__(self) -> int:
        """How many wait."""
        return sum(len(futures) for futures in self._waiting.values())

    def tell(self, key: K) -> None:
        """Wake who waits for a key."""
        for future in self._waiting.pop(key, ()):
            if not future.done():
                future.set_result(None)

    async def wait(self, key: K, seconds: float) -> None:
        """Wait for a change of a key, at most so long."""
        if self.closed or seconds <= 0:
            return
        future = asyncio.get_running_loop().create_future()
        self._waiting[key].add(future)
        try:
            async with asyncio.timeout(seconds):
                await future
        except TimeoutError:
            pass
        finally:
            waiting = self._waiting.get(key)
            if waiting:
                waiting.discard(future)
                if not waiting:
                    del self._waiting[key]

    def close(self) -> None:
        """Wake everybody; nobody waits from now on."""
        self.closed = True
        for key in list(self._waiting):
            self.tell(key)
