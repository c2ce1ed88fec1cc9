"""Answers that hold for some seconds; who asks while one is on its way gets that one."""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Expiring(Generic[K, V]):
    """A bounded cache of answers. Failures are not kept."""

    def __init__(self, seconds_of: Callable[[V], float], size: int) -> None:
        """Prepare.

        :param seconds_of: how long an answer holds.
        :param size: answers kept; the oldest go first.
        """
        self._seconds_of = seconds_of
        self._size = size
        self._known: OrderedDict[K, tuple[float, V]] = OrderedDict()
        self._asked: dict[K, asyncio.Task[V]] = {}

    async def get(self, key: K, ask: Callable[[], Awaitable[V]]) -> V:
        """The answer to a question, asked for at most once at a time."""
        now = asyncio.get_running_loop().time()
        known = self._known.get(key)
        if known and now < known[0]:
            return known[1]
        task = self._asked.get(key)
        if task is None:
            task = self._asked[key] = asyncio.ensure_future(self._ask(key, ask))
        # Who hangs up must not take the answer away from the others.
        return await asyncio.shield(task)

    async def _ask(self, key: K, ask: Callable[[], Awaitable[V]]) -> V:
        try:
            asked_at = asyncio.get_running_loop().time()
            value = await ask()
        finally:
            del self._asked[key]
        self._known.pop(key, None)
        self._known[key] = (asked_at + self._seconds_of(value), value)
        while len(self._known) > self._size:
            self._known.popitem(last=False)
        return value
