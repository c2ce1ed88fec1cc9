"""Looks up what names of receivers resolve to, before anything is run for them (R-CALLBACK)."""

import asyncio
import logging
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from agentjobs.domain.destinations import Address, as_address
from agentjobs.expiring import Expiring

log = logging.getLogger(__name__)
THREADS: Final = 4
"""Of its own, so that names that nobody answers for hold up nothing else."""
PATIENCE_SECONDS: Final = 2.0
KNOWN_SECONDS: Final = 5.0
KNOWN_NAMES: Final = 1024


class LookUps:
    """What names resolve to, remembered for seconds. At connect it is looked up again."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="look-up")
        self._known: Expiring[str, tuple[Address, ...]] = Expiring(
            lambda _: KNOWN_SECONDS, KNOWN_NAMES
        )

    async def addresses_of(self, host: str) -> tuple[Address, ...]:
        """All addresses of a name; none: nobody could say in time, which is no reason to refuse.

        An address is its own.
        """
        literal = as_address(host)
        if literal is not None:
            return (literal,)
        return await self._known.get(host, lambda: self._look_up(host))

    async def _look_up(self, host: str) -> tuple[Address, ...]:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                found = await loop.run_in_executor(self._threads, _asked, host)
        except (OSError, UnicodeError, TimeoutError) as error:
            log.info("the name %s could not be looked up: %s", host, error or "no answer in time")
            return ()
        return tuple(address for text in found if (address := as_address(text)))


def _asked(host: str) -> list[str]:
    return [str(entry[4][0]) for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]
