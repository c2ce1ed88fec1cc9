"""The inbox of an agent: what its loop calls, and what goes on beside it."""

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from http import HTTPStatus
from pathlib import Path
from sqlite3 import Error as SqliteError
from sqlite3 import OperationalError as SqliteOperationalError
from types import TracebackType
from typing import Any, Final, Literal, Self, TypeVar

from agentjobs.api.names import TERMINAL_STATES
from agentjobs.client import Client, ClientError, NotFoundError, ProblemError, UnexpectedAnswerError
from agentjobs.contract.calls import Callback, Started, StartRequest
from agentjobs.inbox.acceptance import Rules, Ruling
from agentjobs.inbox.batch import Estimate, estimate_tokens
from agentjobs.inbox.deliveries import Refused, judge
from agentjobs.inbox.heard import Heard, heard_from_status
from agentjobs.inbox.keyring import KeyRing
from agentjobs.inbox.lines import not_started_line, plain, started_line, word
from agentjobs.inbox.signatures import Verifier
from agentjobs.inbox.store import Batch, OpenStart, Store

log = logging.getLogger(__name__)
T = TypeVar("T")
Clock = Callable[[], datetime]

REPEATABLE: Final = timedelta(minutes=50)
"""A start may be repeated for so long: the gateway knows a key for an hour at least."""
OF_THE_MOMENT: Final = frozenset(
    {
        HTTPStatus.UNAUTHORIZED,
        HTTPStatus.FORBIDDEN,
        HTTPStatus.REQUEST_TIMEOUT,
        HTTPStatus.TOO_EARLY,
        HTTPStatus.TOO_MANY_REQUESTS,
    }
)
"""Refusals before anybody looked whether the key has started a job."""
QUIET: Final = timedelta(minutes=5)
"""A job whose end is awaited, and of which nothing was heard, is asked about so often."""
ASKED_AT_ONCE: Final = 20
TEND_SECONDS: Final = 5.0
PRUNE_EVERY: Final = timedelta(hours=1)
POLL_SECONDS: Final = 0.5
"""Another process may write into the same file, and tells nobody."""
FULL_RETRY_SECONDS: Final = 30
TROUBLE_RETRY_SECONDS: Final = 5


def utc_now() -> datetime:
    """The clock of the machine."""
    return datetime.now(UTC)


@dataclass(frozen=True, slots=True)
class Reply:
    """How a delivery is to be answered."""

    status: HTTPStatus
    reason: str = ""
    retry_after: int | None = None
    """Seconds."""

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the answer."""
        return {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}


@dataclass(frozen=True, slots=True)
class Loop:
    """How batches are handed to the loop of an agent."""

    holder: str = "loop"
    """Name of the loop, the same after a restart: it gets its unacknowledged batch back at once."""
    lease: timedelta = timedelta(minutes=10)
    """Afterwards another holder may have the batch."""
    tokens: int = 4000
    """Budget of a batch."""
    estimate: Estimate = estimate_tokens


class Inbox:
    """The inbox of one agent. Use as an async context manager.

    Jobs are started through it, so that it knows which are the agent's own. Its loop takes what has
    come in, hands it to the model, and acknowledges.
    """

    def __init__(  # noqa: PLR0913 - its parts
        self,
        path: Path,
        client: Client,
        *,
        verifier: Verifier | KeyRing | None = None,
        callback: Callback | None = None,
        rules: Rules | None = None,
        loop: Loop | None = None,
        tends: bool = True,
        clock: Clock = utc_now,
    ) -> None:
        """Prepare.

        :param path: the file of its memory, on a disk that survives; made for its owner alone.
        :param client: of the gateway, open for as long as the inbox is.
        :param verifier: of callbacks, or the keys that the gateway serves; absent: no callbacks are
            taken, a Watcher brings the events.
        :param callback: where this inbox is called; goes with each start that names none.
        :param tends: sees to starts whose answer was lost, follow-ups, and jobs that are silent. Of
            several processes with one file only that of the agent's loop does.
        """
        self._path = path
        self._client = client
        self._verifier = verifier
        self._callback = callback
        self._rules = rules or Rules()
        self._loop = loop or Loop()
        self._tends = tends
        self._clock = clock
        self._kept: Store | None = None
        self._came = asyncio.Event()
        self._due = asyncio.Event()
        self._in_flight: set[str] = set()
        self._tending: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        """Open the file; raises OSError, sqlite3.Error, ValueError where that cannot be."""
        self._kept = await asyncio.to_thread(Store, self._path, self._rules)
        if self._tends:
            self._tending = asyncio.create_task(self._tend(), name="inbox")
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._tending:
            self._tending.cancel()
            with suppress(asyncio.CancelledError):
                await self._tending
        if self._kept:
            await asyncio.to_thread(self._kept.close)

    @property
    def store(self) -> Store:
        """Its memory."""
        if self._kept is None:
            raise RuntimeError("use Inbox as an async context manager")
        return self._kept

    # The agent's side

    async def start(
        self,
        tool: str | None = None,
        arguments: Mapping[str, Any] | None = None,
        *,
        key: str | None = None,
        **fields: Any,
    ) -> Started:
        """Start a job of this agent: `Client.start`, on record before it is sent.

        A start whose answer is lost, by a crash too, is repeated with its key by the inbox.

        :raises ClientError: as `Client.start`. After a ProblemError of a status below 500 there is
            no job, unless it is a 401, 403, 408, 425 or 429 that came after a try whose answer was
            lost (`error.repeated`). After this and everything else the start stays on record: the
            inbox repeats it and tells the agent what came of it.
        :raises sqlite3.Error: it cannot be put on record; it was not sent, or its answer is as good
            as lost.
        """
        request = self._request(tool=tool, arguments=arguments, **fields)
        name = key or secrets.token_urlsafe(24)
        text = request.model_dump_json(exclude_none=True)
        self._in_flight.add(name)
        try:
            await self._call(self.store.begin_start, name, text, request.namespace, self._clock())
            return await self._send(name, request)
        finally:
            self._in_flight.discard(name)

    async def adopt(self, job_id: str) -> None:
        """Take a job for this agent's that it has started elsewhere, over MCP for instance.

        Its event may have come in before and been passed over, so the gateway is asked at once.
        """
        await self._call(self.store.adopt, job_id, self._clock())
        self.wake()

    async def say(self, text: str, message_id: str | None = None) -> bool:
        """Queue a user's words; False: a message of this id was taken before.

        :raises FullError: too much waits already.
        """
        taken = await self._call(self.store.say, text, self._clock(), message_id)
        self._came.set()
        return taken

    async def take(self) -> Batch:
        """Wait until something has come in, and get all of it, in its order.

        Until the batch is acknowledged it is given again to whoever asks with the same name. What
        passes, such as a disk that is full, is waited for.

        :raises sqlite3.DatabaseError: the file is damaged.
        """
        while True:
            self._came.clear()
            try:
                batch = await self.take_now()
            except SqliteOperationalError as error:
                log.warning("no batch can be taken; it is tried again: %s", error)
                await asyncio.sleep(TROUBLE_RETRY_SECONDS)
                continue
            if batch:
                return batch
            with suppress(TimeoutError):
                async with asyncio.timeout(POLL_SECONDS):
                    await self._came.wait()

    async def take_now(self) -> Batch | None:
        """What has come in; None: nothing. Raises sqlite3.Error where that cannot be written."""
        loop = self._loop
        return await self._call(
            self.store.take, loop.holder, self._clock(), loop.lease, loop.tokens, loop.estimate
        )

    async def acknowledge(self, batch: Batch) -> bool:
        """The model has answered, and that is on record: never give this batch again.

        :returns: False: it was acknowledged before.
        :raises sqlite3.Error: it cannot be written, and the batch is given again.
        """
        return await self._call(self.store.acknowledge, batch.id)

    async def when_over(
        self,
        jobs: Iterable[str],
        note: str = "",
        *,
        start: StartRequest | None = None,
        condition: Literal["done", "over"] = "over",
        key: str | None = None,
    ) -> str:
        """When all these jobs are over, tell the agent, or start a job and tell it so.

        :param note: for the agent, shown then.
        :param condition: of the start: all are `done`, or `over` in any way.
        :param key: names this follow-up, so that asked for twice it is made once; of a start it is
            the key, too. Absent: a random one.
        :returns: the key.
        :raises ValueError: a job of which this inbox does not hear.
        """
        text = None
        if start:
            text = self._request(**_fields(start)).model_dump_json(exclude_none=True)
        name = key or secrets.token_urlsafe(24)
        now = self._clock()
        await self._call(self.store.follow_up, name, tuple(jobs), note, text, condition, now)
        self.wake()
        return name

    # What comes in

    async def receive(self, headers: Mapping[str, str], body: bytes) -> Reply:
        """Take one delivery of a callback. What is answered 2xx is on the disk."""
        if self._verifier is None:
            return Reply(HTTPStatus.NOT_FOUND, "no callbacks are taken here")
        event = await self._judged(headers, body, self._verifier)
        if event is None:
            return Reply(
                HTTPStatus.SERVICE_UNAVAILABLE, "no keys are known yet", TROUBLE_RETRY_SECONDS
            )
        if isinstance(event, Refused):
            log.warning("a delivery was refused: %s", event.reason)
            return Reply(event.status, event.reason)
        try:
            if await self._call(self.store.closed_for_good):
                return Reply(HTTPStatus.GONE, "no events are wanted any more")
            ruling = await self.accept(event)
        except SqliteError as error:
            log.error("event %s cannot be kept: %s: %s", event.id, self._path, error)
            return Reply(
                HTTPStatus.SERVICE_UNAVAILABLE, "the event cannot be kept", TROUBLE_RETRY_SECONDS
            )
        if ruling is Ruling.FULL:
            return Reply(HTTPStatus.TOO_MANY_REQUESTS, "the inbox is full", FULL_RETRY_SECONDS)
        return Reply(HTTPStatus.NO_CONTENT)

    async def _judged(
        self, headers: Mapping[str, str], body: bytes, keys: Verifier | KeyRing
    ) -> Heard | Refused | None:
        """Judge a delivery; one whose signature fits no key by new keys too, if there are some."""
        if isinstance(keys, Verifier):
            return judge(headers, body, keys, self._clock())
        known = await keys.verifier(self._clock)
        if known is None:
            return None
        event = judge(headers, body, known, self._clock())
        if isinstance(event, Refused) and event.status is HTTPStatus.UNAUTHORIZED:
            new = await keys.renewed(self._clock, known)
            return judge(headers, body, new, self._clock()) if new else event
        return event

    async def accept(self, event: Heard) -> Ruling:
        """Take an event that is known to be the platform's."""
        ruling = await self._call(self.store.accept, event, self._clock())
        if ruling is Ruling.NOT_OURS:
            log.info("event %s of %s is not for this agent", event.id, event.job_id)
        self.wake()
        return ruling

    def now(self) -> datetime:
        """What its clock says."""
        return self._clock()

    def wake(self) -> None:
        """Something has come in."""
        self._came.set()
        self._due.set()

    async def close_for_good(self) -> None:
        """Tell senders from now on that no events are wanted any more (410)."""
        await self._call(self.store.close_for_good)

    async def counts(self) -> dict[str, int]:
        """Events by what became of them (`Ruling`), and how many items are `waiting`."""
        return await self._call(self.store.counts)

    # Beside it

    async def _tend(self) -> None:
        pruned = self._clock() - PRUNE_EVERY
        while True:
            self._due.clear()
            try:
                mended = await self._mend()
                if abs(self._clock() - pruned) >= PRUNE_EVERY:
                    pruned = self._clock()
                    await self._call(self.store.prune, pruned)
            except SqliteError as error:
                log.warning("the inbox tries again in %.0f s: %s", TEND_SECONDS, error)
                mended = False
            if not mended:
                await asyncio.sleep(TEND_SECONDS)
                continue
            with suppress(TimeoutError):
                async with asyncio.timeout(TEND_SECONDS):
                    await self._due.wait()

    async def _mend(self) -> bool:
        """Make good what a crash or a silence has left open; return whether all of it could be.

        :raises sqlite3.Error: the file cannot be read or written.
        """
        mended = True
        for start in await self._call(self.store.open_starts):
            mended &= await self._tried(f"the start {start.key}", self._repeat(start))
        quiet = self._clock() - QUIET
        for job_id in await self._call(self.store.unheard, quiet, ASKED_AT_ONCE):
            if not await self._tried(f"the job {job_id}", self._ask(job_id)):
                # Who cannot be asked about is asked about later, and keeps no other from its turn.
                await self._call(self.store.looked_at, job_id, self._clock())
        return mended

    async def _tried(self, what: str, doing: Awaitable[None]) -> bool:
        """Do one thing of many: what fails holds up none of the others."""
        try:
            await doing
        except SqliteError:
            raise
        except ClientError as error:
            log.warning("%s is left for later: %s", what, error)
            return False
        except Exception:
            # Whatever it is: without this task nothing would ever be mended again.
            log.exception("%s is left for later", what)
            return False
        return True

    async def _repeat(self, start: OpenStart) -> None:
        """Send a start whose answer is not on record, and tell the agent what came of it."""
        if start.key in self._in_flight or not await self._call(self.store.is_open, start.key):
            return
        request = StartRequest.model_validate_json(start.request)
        job_id, refusal = None, "the gateway gave no answer for too long; a job may be there"
        if self._clock() - start.at <= REPEATABLE:
            try:
                job_id = (await self._client.start(**_fields(request), key=start.key)).job_id
            except ProblemError as error:
                if not _refused(error, again=True):
                    raise
                refusal = str(error)
        tool, now = request.tool or "", self._clock()
        if start.follows:
            outcome = (
                f"started job_id={word(job_id)} tool={word(tool) or '-'}"
                if job_id
                else f'nothing was started: "{plain(refusal)}"'
            )
            await self._call(self.store.followed, start.key, job_id, outcome, now)
        else:
            line = started_line(tool, job_id) if job_id else not_started_line(tool, refusal)
            await self._call(self.store.end_start, start.key, job_id, now, line)
        self.wake()

    async def _send(self, key: str, request: StartRequest) -> Started:
        try:
            started = await self._client.start(**_fields(request), key=key)
        except ProblemError as error:
            if _refused(error, again=error.repeated):
                await self._call(self.store.end_start, key, None, self._clock())
            raise
        await self._call(self.store.end_start, key, started.job_id, self._clock())
        self.wake()
        return started

    async def _ask(self, job_id: str) -> None:
        """Ask about a job of which no end was heard: its event may have been given up."""
        try:
            job = await self._client.status(job_id)
        except NotFoundError:
            await self._call(self.store.lost, job_id, self._clock())
            self.wake()
            return
        event = heard_from_status(job)
        if event is None and job.status in TERMINAL_STATES:
            raise UnexpectedAnswerError(f"{job_id} is over without an event_id: an older gateway")
        if event is None or await self.accept(event) in {Ruling.FULL, Ruling.NOT_OURS}:
            await self._call(self.store.looked_at, job_id, self._clock())

    def _request(self, **fields: Any) -> StartRequest:
        request = StartRequest.model_validate(fields)
        if request.callback is None and self._callback:
            return request.model_copy(update={"callback": self._callback})
        return request

    async def _call(self, function: Callable[..., T], *values: Any) -> T:
        """Beside the loop: a write waits for the disk."""
        return await asyncio.to_thread(function, *values)


def _refused(error: ProblemError, *, again: bool) -> bool:
    """Whether there is no job: a server that failed may have made it before.

    :param again: the start was sent before, so that a refusal of the caller, or of the moment,
        does not tell what came of it then.
    """
    status = error.problem.status
    return status < HTTPStatus.INTERNAL_SERVER_ERROR and not (again and status in OF_THE_MOMENT)


def _fields(request: StartRequest) -> dict[str, Any]:
    return {name: value for name, value in request if value is not None}
