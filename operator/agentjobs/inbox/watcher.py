"""Events for a runtime that nobody can call: the ends of jobs, read from the gateway's changes."""

import asyncio
import logging
from sqlite3 import Error as SqliteError
from typing import Final

from agentjobs.client import Backoff, Client, ClientError, ProblemError
from agentjobs.contract.calls import JobPage
from agentjobs.contract.problems import ProblemType
from agentjobs.inbox.heard import heard_from_status
from agentjobs.inbox.runtime import Inbox

log = logging.getLogger(__name__)
OWN: Final = ""
"""The caller's own namespace."""
FULL_PAUSE_SECONDS: Final = 1.0
PAUSES: Final = Backoff(first_seconds=0.5, largest_seconds=30)


class Watcher:
    """Follows the changes of namespaces. The events have the ids that callbacks have."""

    def __init__(self, inbox: Inbox, client: Client, namespaces: tuple[str, ...] = (OWN,)) -> None:
        """Prepare.

        :param namespaces: where the agent's jobs run; empty text: the caller's own namespace. Whose
            events are taken is for the inbox to say.
        """
        self._inbox = inbox
        self._client = client
        self._namespaces = namespaces

    async def run(self) -> None:
        """Watch until cancelled."""
        async with asyncio.TaskGroup() as group:
            for namespace in self._namespaces:
                group.create_task(self._follow(namespace), name=f"watcher {namespace}")

    async def _follow(self, namespace: str) -> None:
        pauses = PAUSES.pauses()
        while True:
            try:
                await self.step(namespace)
            except (ClientError, SqliteError) as error:
                pause = next(pauses)
                log.warning("changes cannot be taken; again in %.1f s: %s", pause, error)
                await asyncio.sleep(pause)
            else:
                pauses = PAUSES.pauses()

    async def step(self, namespace: str = OWN) -> None:
        """Wait for one page of changes, and take what it tells.

        The cursor moves on in the same write that keeps the events; where there is no room for
        them it stays, so nothing is passed over.

        :raises ClientError: the gateway cannot be read.
        :raises sqlite3.Error: what it says cannot be kept; the cursor stays.
        """
        store = self._inbox.store
        since = await asyncio.to_thread(store.cursor, namespace)
        try:
            page = await self._client.changes(since, namespace=namespace or None)
        except ProblemError as error:
            if not since or error.problem.type != ProblemType.INVALID_CURSOR.uri:
                raise
            log.warning("the gateway does not take the cursor any more: all jobs are read anew")
            await asyncio.to_thread(store.forget_cursor, namespace)
            return
        await self._take(namespace, page)

    async def _take(self, namespace: str, page: JobPage) -> None:
        store = self._inbox.store
        events = [event for job in page.jobs if (event := heard_from_status(job))]
        while not await asyncio.to_thread(  # noqa: ASYNC110 - acknowledgements tell nobody
            store.accept_page, namespace, page.since, events, self._inbox.now()
        ):
            await asyncio.sleep(FULL_PAUSE_SECONDS)
        self._inbox.wake()
