"""Leadership by a coordination.k8s.io Lease: one operator acts, the others wait (R-CLAIM).

Times of other processes are never compared with our clock: what counts is for how long a Lease was
seen unchanged, on our own monotonic clock.
"""

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from agentjobs.domain.errors import AgentJobError
from agentjobs.kube import LEASES, ConflictError, Kube, NotFoundError

log = logging.getLogger(__name__)


class LostLeadershipError(AgentJobError):
    """The process does not lead any more and must not write."""


@dataclass(frozen=True, slots=True)
class Terms:
    """Durations in seconds: how long a Lease holds, renewing gives up, tries are apart."""

    lease: float = 10
    renew: float = 7
    retry: float = 2


class Lease:
    """Our side of one Lease."""

    def __init__(
        self,
        kube: Kube,
        namespace: str,
        name: str,
        identity: str,
        terms: Terms,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._kube = kube
        self._namespace = namespace
        self._name = name
        self._identity = identity
        self._terms = terms
        self._clock = clock
        self._renewed: float | None = None
        self._observed: tuple[str, float] = ("", 0.0)

    @property
    def held(self) -> bool:
        """Whether nobody else can hold it by now."""
        return self._renewed is not None and self._clock() < self._renewed + self._terms.renew

    def fence(self) -> None:
        """Stop a write of a process that was frozen, or cut off, past its Lease.

        :raises LostLeadershipError: the Lease may be somebody else's by now.
        """
        if not self.held:
            raise LostLeadershipError(f"Lease {self._namespace}/{self._name} is not ours any more")

    async def acquire(self) -> None:
        """Wait until the Lease is ours."""
        log.info("waiting for Lease %s/%s", self._namespace, self._name)
        while not await self._try():  # noqa: ASYNC110 - another process is waited for
            await asyncio.sleep(self._terms.retry * random.uniform(0.8, 1.2))  # noqa: S311 - jitter
        log.info("leading as %s", self._identity)

    async def keep(self) -> None:
        """Renew until it is lost.

        :raises LostLeadershipError: it could not be renewed in time, or somebody else has it.
        """
        while True:
            await asyncio.sleep(self._terms.retry)
            self.fence()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._terms.renew):
                    await self._try()
            self.fence()

    async def release(self) -> None:
        """Give it up, so that the next one leads at once."""
        if not self.held:
            return
        self._renewed = None
        try:
            async with asyncio.timeout(self._terms.retry):
                lease = await self._kube.get(LEASES, self._namespace, self._name)
                if lease["spec"].get("holderIdentity") == self._identity:
                    lease["spec"] |= {"holderIdentity": "", "leaseDurationSeconds": 1}
                    await self._kube.replace(LEASES, self._namespace, self._name, lease)
        except (AgentJobError, TimeoutError) as error:
            log.info("the Lease was not released and runs out by itself: %s", error)

    async def _try(self) -> bool:
        began = self._clock()
        try:
            await self._renew()
        except ConflictError:
            return False
        except AgentJobError as error:
            log.warning("Lease %s/%s: %s", self._namespace, self._name, error)
            return False
        except _HeldByOther:
            return False
        self._renewed = began
        return True

    async def _renew(self) -> None:
        try:
            lease = await self._kube.get(LEASES, self._namespace, self._name)
        except NotFoundError:
            body = {
                "apiVersion": "coordination.k8s.io/v1",
                "kind": "Lease",
                "metadata": {"name": self._name, "namespace": self._namespace},
                "spec": self._spec({}),
            }
            await self._kube.create(LEASES, self._namespace, body)
            return
        spec = lease.get("spec") or {}
        self._observe(lease["metadata"]["resourceVersion"])
        if self._taken_by_other(spec):
            raise _HeldByOther
        lease["spec"] = self._spec(spec)
        await self._kube.replace(LEASES, self._namespace, self._name, lease)

    def _observe(self, version: str) -> None:
        if version != self._observed[0]:
            self._observed = (version, self._clock())

    def _taken_by_other(self, spec: dict[str, Any]) -> bool:
        holder = spec.get("holderIdentity") or ""
        if holder in {"", self._identity}:
            return False
        duration = float(spec.get("leaseDurationSeconds") or self._terms.lease)
        return self._clock() < self._observed[1] + duration

    def _spec(self, old: dict[str, Any]) -> dict[str, Any]:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        ours = old.get("holderIdentity") == self._identity
        transitions = int(old.get("leaseTransitions") or 0)
        return {
            "holderIdentity": self._identity,
            "leaseDurationSeconds": int(self._terms.lease),
            "acquireTime": old.get("acquireTime") if ours else now,
            "renewTime": now,
            "leaseTransitions": transitions if ours or not old else transitions + 1,
        }


class _HeldByOther(Exception):  # noqa: N818 - control flow within this module
    pass
