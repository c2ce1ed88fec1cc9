"""Follows one kind of object: list, then watch, and list again when the watch has lost its place.

Not by kopf, which hands events to a task for each object: cursors of changes need them in the order
in which they happened.
"""

import asyncio
import logging
from collections.abc import Collection
from typing import Any, Protocol

from agentjobs.domain.errors import AgentJobError
from agentjobs.kube import GoneError, Kube, Resource

log = logging.getLogger(__name__)
FIRST_PAUSE = 0.2
LARGEST_PAUSE = 10.0


class Sink(Protocol):
    """Takes in what a reflector sees."""

    def put(self, body: dict[str, Any]) -> None:
        """An object as it is now, or was: older versions come too."""

    def drop(self, body: dict[str, Any]) -> None:
        """An object was deleted."""

    def listed(self, uids: Collection[str], version: int) -> None:
        """Everything that there was at a version has been put."""

    def reached(self, version: int) -> None:
        """Everything up to a version has been put."""


class Reflector:
    """Keeps a sink in step with the API server."""

    def __init__(self, kube: Kube, resource: Resource, sink: Sink) -> None:
        self._kube = kube
        self._resource = resource
        self._sink = sink
        self.synced = asyncio.Event()
        """Set once everything was listed."""

    async def run(self) -> None:
        """Follow until cancelled."""
        pause = FIRST_PAUSE
        version = ""
        while True:
            try:
                if not version:
                    version = await self._list()
                    self.synced.set()
                async for event in self._kube.watch(self._resource, version):
                    version = self._take(event)
                    pause = FIRST_PAUSE
            except GoneError:
                log.info("the watch of %s lost its place; listing again", self._resource.plural)
                version = ""
            except AgentJobError as error:
                log.warning("%s cannot be followed: %s", self._resource.plural, error)
            # Also after a watch that has just ended: one that ends at once must not be a storm.
            await asyncio.sleep(pause)
            pause = min(2 * pause, LARGEST_PAUSE)

    async def _list(self) -> str:
        uids: set[str] = set()
        version = ""
        async for page in self._kube.pages(self._resource):
            version = page["metadata"]["resourceVersion"]
            for body in page["items"]:
                uids.add(body["metadata"]["uid"])
                self._sink.put(body)
        self._sink.listed(uids, int(version))
        self._sink.reached(int(version))
        return version

    def _take(self, event: dict[str, Any]) -> str:
        body = event["object"]
        version = str(body["metadata"]["resourceVersion"])
        if event["type"] == "DELETED":
            self._sink.drop(body)
        elif event["type"] != "BOOKMARK":
            self._sink.put(body)
        self._sink.reached(int(version))
        return version
