"""The gateway's public keys, read again when they have changed."""

import asyncio
import logging
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Final

from agentjobs.client import Client, ClientError
from agentjobs.inbox.signatures import Verifier

log = logging.getLogger(__name__)
RENEW_EVERY: Final = timedelta(minutes=1)
"""Whoever sends signatures that fit no key must not make us ask the gateway each time."""


class KeyRing:
    """Keys that the gateway serves: any of them may have signed, and new ones are noticed."""

    def __init__(self, client: Client) -> None:
        """Prepare; nothing is read before the first delivery."""
        self._client = client
        self._verifier: Verifier | None = None
        self._asked: datetime | None = None
        self._lock = asyncio.Lock()

    async def verifier(self, clock: Callable[[], datetime]) -> Verifier | None:
        """What is known; None: the gateway has not told yet."""
        return self._verifier or await self.renewed(clock, None)

    async def renewed(
        self, clock: Callable[[], datetime], known: Verifier | None
    ) -> Verifier | None:
        """Ask the gateway, unless that was done a moment ago; None: there is nothing new.

        :param known: what the caller has found wanting. Whoever waited while another one asked
            gets what that one got.
        """
        async with self._lock:
            now = clock()
            if self._verifier is not known:
                return self._verifier
            if self._asked and abs(now - self._asked) < RENEW_EVERY:
                return None
            self._asked = now
            try:
                self._verifier = Verifier(await self._client.signing_keys())
            except (ClientError, ValueError) as error:
                log.warning("the gateway's signing keys cannot be read: %s", error)
                return None
            return self._verifier
