"""The calls of the contract as methods."""

import asyncio
import base64
import json
import secrets
import ssl
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from agentjobs.api.names import TERMINAL_STATES, State
from agentjobs.client.errors import ProblemError, UnexpectedAnswerError
from agentjobs.client.exchange import Backoff, Exchange, Request, Token
from agentjobs.client.seen import Seen
from agentjobs.contract import operations
from agentjobs.contract.calls import (
    Answer,
    Callback,
    Function,
    JobPage,
    JobStatus,
    OutputPage,
    Question,
    QuestionList,
    ResultPage,
    SigningKeys,
    Started,
    StartRequest,
    Stopped,
    ToolList,
)
from agentjobs.contract.operations import DEFAULT_PAGE_JOBS, KEY, MAX_PAGE_BYTES, Stream
from agentjobs.contract.problems import ProblemType

POLL_SECONDS: Final = 30
"""One long poll; load balancers often end a silent connection after 60 s."""
KEY_BYTES = 24
BACKOFF: Final = Backoff()


@dataclass(frozen=True, slots=True)
class Result:
    """What a tool handed in at its end, whole."""

    job_id: str
    content: bytes
    truncated: bool
    """Whether it was larger than what was kept of it."""

    @property
    def text(self) -> str:
        """The content as UTF-8; what is none is replaced."""
        return self.content.decode("utf-8", "replace")


class Client:
    """A connection to a gateway. Use as an async context manager.

    Every method raises ProblemError where the gateway refuses, UnavailableError where it cannot be
    reached for as long as the back-off says, UnexpectedAnswerError where something else answers.
    Calls may be made at the same time from one event loop.
    """

    def __init__(
        self,
        url: str,
        *,
        token: Token,
        namespace: str | None = None,
        tls: ssl.SSLContext | Path | None = None,
        backoff: Backoff = BACKOFF,
    ) -> None:
        """Prepare.

        :param url: of the gateway, `http(s)://host[:port][/path]`.
        :param token: of the audience agentjobs; a file (a Path) is read again for every request.
        :param namespace: where a call names none. Absent: that of the caller's ServiceAccount.
        :param tls: the file of the CA to trust, or a context; absent: the CAs of the system.
        :raises ValueError: that is no URL of a gateway.
        """
        self._exchange = Exchange(url, token, tls, backoff)
        self._namespace = namespace
        self._backoff = backoff
        self._seen = Seen()

    async def __aenter__(self) -> Self:
        await self._exchange.open()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._exchange.close()

    async def start(  # noqa: PLR0913 - the fields of a start
        self,
        tool: str | None = None,
        arguments: Mapping[str, Any] | None = None,
        *,
        key: str | None = None,
        template: Mapping[str, Any] | None = None,
        depends_on: Iterable[str] = (),
        deadline_seconds: int | None = None,
        pending_deadline_seconds: int | None = None,
        callback: Callback | None = None,
        namespace: str | None = None,
    ) -> Started:
        """Start a job; fields as in StartRequest.

        :param key: names this start: whoever repeats it with this key gets the same job. Absent: a
            random one for this call and its repetitions.
        :raises ValueError: a field has not the shape that the contract asks for.
        :raises TypeError: the arguments hold what JSON has not.
        :raises UnavailableError: the job may have been started; repeat with `error.key`.
        """
        fields = {
            "tool": tool,
            "arguments": arguments,
            "template": template,
            "depends_on": tuple(depends_on) or None,
            "deadline_seconds": deadline_seconds,
            "pending_deadline_seconds": pending_deadline_seconds,
            "callback": callback,
            "namespace": namespace or self._namespace,
        }
        request = Request(
            operations.START,
            headers={KEY: key or secrets.token_urlsafe(KEY_BYTES)},
            body=_json(StartRequest.model_validate(fields)),
        )
        return await self._exchange.ask(request, Started)

    async def status(self, job_id: str) -> JobStatus:
        """How a job stands: never older than what this client has seen of it, its stops included.

        :raises NotFoundError: no such job.
        """
        return await self._status(job_id)

    async def wait(self, job_id: str, timeout: float | None = None) -> JobStatus:  # noqa: ASYNC109
        """Wait until a job is over; return its status then.

        :param timeout: seconds; None: as long as it takes. A deadline ends every job.
        :raises TimeoutError: it is not over yet; it goes on.
        :raises NotFoundError: no such job.
        """
        clock = asyncio.get_running_loop().time
        job: JobStatus | None = None
        pauses = self._backoff.pauses()
        try:
            async with asyncio.timeout(timeout):
                while True:
                    before, began = job, clock()
                    job = await self._status(job_id, POLL_SECONDS)
                    if job.status in TERMINAL_STATES:
                        return job
                    if job != before:
                        pauses = self._backoff.pauses()
                    elif clock() - began < 1:
                        # A gateway that is ending answers at once.
                        await asyncio.sleep(next(pauses))
        except TimeoutError as error:
            state = f"is {job.status}" if job else "is not over"
            raise TimeoutError(f"job {job_id} {state} after {timeout} s") from error

    async def stop(self, job_id: str, reason: str = "") -> Stopped:
        """Ask for the end of a job.

        A job that is stopping or over is no error: asked for twice, or after a lost answer, a stop
        has what it wanted. The status says how far it is: `stopping`, or how the job has ended.

        :param reason: for the record, at most 1024 characters; of several stops the first counts.
        :raises NotFoundError: no such job.
        """
        request = Request(
            operations.STOP, {"job_id": job_id}, query={"reason": reason} if reason else {}
        )
        try:
            answer = await self._exchange.send(request)
        except ProblemError as error:
            reached = error.problem.job_status
            if error.problem.type != ProblemType.ALREADY_STOPPED.uri or reached is None:
                raise
            return Stopped(job_id=job_id, status=reached)
        if etag := answer.headers.get("ETag"):
            self._seen.put(job_id, etag, None)
        return answer.read(Stopped)

    async def result(self, job_id: str) -> Result:
        """What the tool handed in at its end, whole, in memory.

        :raises NotDoneError: the job is not over, or ended otherwise than `done`.
        :raises NotFoundError: no such job.
        """
        content, truncated = bytearray(), False
        async for page in self.result_pages(job_id):
            content += content_of(page)
            truncated = page.truncated
        return Result(job_id, bytes(content), truncated)

    async def result_pages(
        self, job_id: str, cursor: str = "", *, limit: int = MAX_PAGE_BYTES
    ) -> AsyncIterator[ResultPage]:
        """The result in pages.

        :param cursor: `next` of the page after which to go on; empty: from the beginning.
        :param limit: bytes of data in a page at most, 4 to 65536.
        :raises NotDoneError: the job is not over, or ended otherwise than `done`.
        :raises NotFoundError: no such job.
        """
        next_: str | None = cursor
        while next_ is not None:
            query = {"limit": str(limit), **({"cursor": next_} if next_ else {})}
            request = Request(operations.RESULT, {"job_id": job_id}, query)
            page = await self._exchange.ask(request, ResultPage)
            yield page
            next_ = page.next

    async def output(
        self,
        job_id: str,
        cursor: str = "",
        *,
        stream: Stream = Stream.PRINTED,
        limit: int = MAX_PAGE_BYTES,
    ) -> OutputPage:
        """A piece of what the tool has printed, or handed in piece by piece, at any time.

        :param cursor: `next` of the page before; empty: from the beginning.
        :param limit: bytes of data at most, 4 to 65536.
        :raises NotFoundError: no such job.
        """
        query = {"limit": str(limit), **({"cursor": cursor} if cursor else {})}
        if stream is not Stream.PRINTED:
            query["stream"] = stream.value
        request = Request(operations.OUTPUT, {"job_id": job_id}, query)
        return await self._exchange.ask(request, OutputPage)

    async def inputs(self, job_id: str) -> tuple[Question, ...]:
        """Open questions of a job.

        :raises NotFoundError: no such job.
        """
        request = Request(operations.INPUTS, {"job_id": job_id})
        return (await self._exchange.ask(request, QuestionList)).inputs

    async def answer(self, job_id: str, key: str, answer: Answer) -> None:
        """Answer a question of a job, once.

        :param key: of the question.
        :raises AlreadyAnsweredError: it is closed; after a lost answer maybe by this very call.
        :raises NotFoundError: no such job or question.
        """
        request = Request(operations.ANSWER, {"job_id": job_id, "key": key}, body=_json(answer))
        await self._exchange.send(request)

    async def jobs(
        self,
        *,
        status: State | None = None,
        tool: str | None = None,
        namespace: str | None = None,
        limit: int = DEFAULT_PAGE_JOBS,
    ) -> AsyncIterator[JobPage]:
        """Jobs of a namespace in pages, the newest first.

        :param limit: jobs in a page at most, 1 to 500.
        """
        query = self._query(namespace, status=status, tool=tool, limit=str(limit))
        cursor: str | None = ""
        while cursor is not None:
            request = Request(
                operations.LIST, query={**query, **({"cursor": cursor} if cursor else {})}
            )
            page = await self._exchange.ask(request, JobPage)
            yield page
            cursor = page.next

    async def changes(
        self,
        since: str = "",
        *,
        wait: float = POLL_SECONDS,
        status: State | None = None,
        tool: str | None = None,
        namespace: str | None = None,
    ) -> JobPage:
        """Jobs that changed, each in its newest state, the oldest change first.

        :param since: cursor of what is known already, from any JobPage; empty: of nothing.
        :param wait: seconds to wait for a change, at most 60.
        :returns: a page without jobs where nothing has changed; go on with its `since`.
        """
        query = self._query(namespace, status=status, tool=tool)
        clock = asyncio.get_running_loop().time
        end = clock() + wait
        pauses = self._backoff.pauses()
        while True:
            left = max(0, end - clock())
            request = Request(operations.LIST, query={**query, "since": since}, wait=left)
            page = await self._exchange.ask(request, JobPage)
            if page.jobs or clock() + (pause := next(pauses)) >= end:
                return page
            # A gateway that is ending answers at once.
            await asyncio.sleep(pause)
            since = page.since

    async def tools(self, namespace: str | None = None) -> tuple[Function, ...]:
        """The tools that the caller may use, as function definitions for a model."""
        request = Request(operations.TOOLS, query=self._query(namespace))
        return (await self._exchange.ask(request, ToolList)).tools

    async def signing_keys(self) -> tuple[str, ...]:
        """Public keys that events are signed with, `whpk_…`: any of them may have signed."""
        return (await self._exchange.ask(Request(operations.SIGNING_KEYS), SigningKeys)).keys

    def _query(self, namespace: str | None, **values: str | None) -> dict[str, str]:
        values["namespace"] = namespace or self._namespace
        return {name: value for name, value in values.items() if value is not None}

    async def _status(self, job_id: str, wait: float = 0) -> JobStatus:
        # A replica that knows less than this version asks the API server.
        known = self._seen.get(job_id)
        headers = {"If-None-Match": known.etag} if known else {}
        request = Request(operations.STATUS, {"job_id": job_id}, headers=headers, wait=wait)
        answer = await self._exchange.send(request)
        if answer.status == HTTPStatus.NOT_MODIFIED:
            if known is None:
                raise UnexpectedAnswerError(f"{request}: 304 without a condition")
            if known.status:
                return known.status
            self._seen.forget(job_id)
            return await self._status(job_id)
        job = answer.read(JobStatus)
        if etag := answer.headers.get("ETag"):
            self._seen.put(job_id, etag, job)
        return job


def content_of(page: OutputPage | ResultPage) -> bytes:
    """The data of a page.

    :raises ValueError: it says that it is base64, and is not.
    """
    if page.encoding == "base64":
        return base64.b64decode(page.data, validate=True)
    return page.data.encode()


def _json(body: StartRequest | Answer) -> bytes:
    """The body as JSON.

    :raises TypeError: it holds an object that JSON has not.
    :raises ValueError: or such a number.
    """
    # As values of Python: pydantic would send a NaN as null.
    return json.dumps(body.model_dump(exclude_none=True), allow_nan=False).encode()
