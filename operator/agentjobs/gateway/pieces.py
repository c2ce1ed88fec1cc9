"""Output that tools hand in piece by piece: kept in the store beside what they print (R-REPORT)."""

import asyncio
import logging
from weakref import WeakValueDictionary

from agentjobs.contract.calls import OutputKept
from agentjobs.contract.problems import ProblemType
from agentjobs.domain.output import (
    REPORTED,
    REPORTED_HEAD,
    Reported,
    chunk_name,
    stream_name,
)
from agentjobs.domain.pods import completion_of
from agentjobs.gateway.known import JobRecord
from agentjobs.gateway.pods import JobsOfPods
from agentjobs.gateway.problems import ProblemError, try_later
from agentjobs.gateway.reviews import Pod
from agentjobs.store import OutputStore, StoreError

log = logging.getLogger(__name__)
MAX_PIECES = 4096
"""Of one job: each is an object, and all of them are listed for the next one."""


class Pieces:
    """Takes pieces in order, each once, and says yes only when they are stored."""

    def __init__(self, pods: JobsOfPods, store: OutputStore | None, most: int) -> None:
        """Prepare.

        :param most: bytes that the pods of one job may hand in.
        """
        self._pods = pods
        self._store = store
        self._most = most
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def put(self, pod: Pod, job_id: str, offset: int, content: bytes) -> OutputKept:
        """Keep a piece; return when it is stored.

        :param offset: bytes that the pod has handed in before.
        :raises ProblemError: not a pod of that job; the job is over; no store, or it fails (503);
            the stream does not go on there; there is no more room.
        """
        record = await self._pods.job_of(pod, job_id)
        if self._store is None:
            raise ProblemError(
                ProblemType.OUTPUT_NOT_KEPT, "print it; the platform has set no store up"
            )
        index = completion_of(pod.name, record.job_name) or 0
        stream = stream_name(record.attempt, index, pod.uid)
        # A tool that has given up on an answer sends the rest together, while the first is written.
        turn = self._turns.setdefault(record.uid, asyncio.Lock())
        async with turn:
            # It may have waited for long.
            record = await self._pods.job_of(pod, job_id)
            try:
                return await self._keep(self._store, record, stream, offset, content)
            except (StoreError, ValueError) as error:
                log.warning("a piece of output cannot be stored: %s", error)
                raise try_later(ProblemType.UNAVAILABLE, "the store does not answer", 5) from error

    async def _keep(
        self, store: OutputStore, job: JobRecord, stream: str, offset: int, content: bytes
    ) -> OutputKept:
        below = f"{job.uid}/{REPORTED}"
        reported = Reported.of(await store.names(below))
        kept, name = reported.kept(stream), f"{stream}/{chunk_name(offset)}"
        if offset != kept:
            if reported.sizes.get(name) != len(content):
                raise _elsewhere(kept)
            await self._pods.settle(job, store)
        else:
            self._check_room(reported, len(content))
            if not content:
                return OutputKept(offset=kept)
            kept += len(content)
            if await self._create(store, job, f"{below}/{name}", content):
                return OutputKept(offset=kept)
        # It was sent before and the answer to it lost, or it is being sent to another replica too.
        if await store.get(f"{below}/{name}") != _piece(content):
            raise _elsewhere(Reported.of(await store.names(below)).kept(stream))
        return OutputKept(offset=kept)

    async def _create(self, store: OutputStore, job: JobRecord, path: str, content: bytes) -> bool:
        """Store a piece, unless there is one; whatever comes of it does not outlive the job.

        :raises ProblemError: the job is over.
        """
        try:
            return await store.create(path, _piece(content))
        finally:
            # Also when the tool has gone meanwhile, or the store does not answer.
            await self._pods.settle(job, store)

    def _check_room(self, reported: Reported, more: int) -> None:
        if reported.total + more > self._most:
            raise ProblemError(
                ProblemType.OUTPUT_FULL, f"at most {self._most} bytes of one job are kept"
            )
        if len(reported.sizes) >= MAX_PIECES:
            raise ProblemError(
                ProblemType.OUTPUT_FULL,
                f"at most {MAX_PIECES} pieces of one job are kept; send larger ones",
            )


def _elsewhere(kept: int) -> ProblemError:
    return ProblemError(
        ProblemType.OUTPUT_ELSEWHERE,
        f"{kept} bytes are kept; send what follows, or the last piece as it was",
        offset=kept,
    )


def _piece(content: bytes) -> bytes:
    """Content of the object of a piece."""
    return REPORTED_HEAD + content
