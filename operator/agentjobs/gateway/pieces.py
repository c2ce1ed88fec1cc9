"""Output that tools hand in piece by piece: kept in the store beside what they print (R-REPORT)."""

import asyncio
import logging
from collections.abc import Mapping
from weakref import WeakValueDictionary

from agentjobs.contract.calls import OutputKept
from agentjobs.contract.problems import ProblemType
from agentjobs.domain.output import (
    REPORTED_HEAD,
    chunk_name,
    reported_path,
    reported_pieces,
)
from agentjobs.gateway.known import JobRecord
from agentjobs.gateway.pods import JobsOfPods
from agentjobs.gateway.problems import ProblemError, try_later
from agentjobs.gateway.reviews import Pod
from agentjobs.store import OutputStore, StoreError

log = logging.getLogger(__name__)
MAX_PIECES = 4096
"""Of one pod: each is an object, and all of them are listed for the next one."""


class Pieces:
    """Takes pieces in order, each once, and says yes only when they are stored."""

    def __init__(self, pods: JobsOfPods, store: OutputStore | None, most: int) -> None:
        """Prepare.

        :param most: bytes that one pod may hand in.
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
        path = reported_path(record.uid, record.attempt, _index(record, pod), pod.uid)
        # A tool that has given up on an answer sends the rest together, while the first is written.
        turn = self._turns.setdefault(path, asyncio.Lock())
        async with turn:
            try:
                return await self._keep(self._store, path, offset, content)
            except (StoreError, ValueError) as error:
                log.warning("a piece of output cannot be stored: %s", error)
                raise try_later(ProblemType.UNAVAILABLE, "the store does not answer", 5) from error

    async def _keep(self, store: OutputStore, path: str, offset: int, content: bytes) -> OutputKept:
        pieces = reported_pieces(await store.names(path))
        kept = max((at + size for at, size in pieces.items()), default=0)
        name = f"{path}/{chunk_name(offset)}"
        if offset != kept:
            if pieces.get(offset) == len(content) and await store.get(name) == _piece(content):
                # The answer to it was lost.
                return OutputKept(offset=kept)
            raise ProblemError(
                ProblemType.OUTPUT_ELSEWHERE,
                f"{kept} bytes are kept; send what follows, or the last piece as it was",
                offset=kept,
            )
        self._check_room(pieces, kept + len(content))
        if content:
            await store.put(name, _piece(content))
        return OutputKept(offset=offset + len(content))

    def _check_room(self, pieces: Mapping[int, int], size: int) -> None:
        if size > self._most:
            raise ProblemError(
                ProblemType.OUTPUT_FULL, f"at most {self._most} bytes of one pod are kept"
            )
        if len(pieces) >= MAX_PIECES:
            raise ProblemError(
                ProblemType.OUTPUT_FULL,
                f"at most {MAX_PIECES} pieces of one pod are kept; send larger ones",
            )


def _piece(content: bytes) -> bytes:
    """Content of the object of a piece."""
    return REPORTED_HEAD + content


def _index(record: JobRecord, pod: Pod) -> int:
    """The completion that a pod is of: `<job>-<index>-<random>`, where the Job is indexed."""
    index, dash, _ = pod.name.removeprefix(f"{record.job_name}-").partition("-")
    return int(index) if dash and index.isdecimal() else 0
