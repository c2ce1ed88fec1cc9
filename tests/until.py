"""Waiting within a loop for what nobody tells of."""

import asyncio
from collections.abc import Callable

SOON = 10.0
POLL = 0.002


async def until(condition: Callable[[], object]) -> None:
    """Wait until something holds."""
    async with asyncio.timeout(SOON):
        while not condition():  # noqa: ASYNC110 - whoever brings it about tells nobody
            await asyncio.sleep(POLL)
