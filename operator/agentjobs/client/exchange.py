"""Requests and their answers: the token, the time they may take, what is tried again."""

import asyncio
import logging
import math
import random
import ssl
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from pathlib import Path
from typing import Final, TypeVar
from urllib.parse import quote, urlencode

import aiohttp
from pydantic import BaseModel, ValidationError
from typing_extensions import override
from yarl import URL

from agentjobs import __version__
from agentjobs.client.errors import ClientError, UnavailableError, UnexpectedAnswerError, error_of
from agentjobs.contract.calls import Problem
from agentjobs.contract.operations import KEY, Operation
from agentjobs.contract.problems import MEDIA_TYPE

log = logging.getLogger(__name__)
B = TypeVar("B", bound=BaseModel)
Token = str | Path | Callable[[], str]
"""A token, the file that holds it, or what returns it. The last two are asked for every request."""

JSON: Final = "application/json"
CONNECT_SECONDS = 5.0
TRY_SECONDS = 20.0
"""For one try, beside a long poll's wait. The gateway itself asks its API server for 10 s."""
MAX_ANSWER_BYTES = 16 * 1024 * 1024
"""Far more than any answer of a gateway: pages are small, a catalogue may be large."""
AWAY: Final = frozenset(
    {HTTPStatus.BAD_GATEWAY, HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.GATEWAY_TIMEOUT}
)


@dataclass(frozen=True, slots=True)
class Backoff:
    """How long, and with what pauses, a call is tried."""

    total_seconds: float = 30.0
    """All tries of a call together, beside what a long poll waits."""
    first_seconds: float = 0.1
    """The first pause; each is twice the one before, less a random part."""
    largest_seconds: float = 5.0

    def pauses(self) -> Iterator[float]:
        """Pauses of one call, in seconds, without an end."""
        largest = self.first_seconds
        while True:
            # Callers that failed together must not come back together.
            yield largest * random.uniform(0.5, 1)  # noqa: S311 - no secret
            largest = min(2 * largest, self.largest_seconds)


@dataclass(frozen=True, slots=True)
class Request:
    """One call."""

    operation: Operation
    places: Mapping[str, str] = field(default_factory=dict)
    """Values in the path."""
    query: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes | None = None
    wait: float = 0
    """Seconds of a long poll."""

    @override
    def __str__(self) -> str:
        return f"{self.operation.method} {self.path}"

    @property
    def path(self) -> str:
        """Path of the URL. Ids come from models: whatever they hold stays one segment."""
        places = {name: quote(value, safe="") for name, value in self.places.items()}
        return self.operation.path.format_map(places)


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back."""

    request: Request
    status: int
    headers: Mapping[str, str]
    content_type: str
    body: bytes
    """Of JSON; of anything else nothing is read."""

    def read(self, model: type[B]) -> B:
        """The body.

        :raises UnexpectedAnswerError: it is not of the model's shape.
        """
        if self.content_type != JSON:
            raise UnexpectedAnswerError(f"{self.request}: answered {self.content_type}, not {JSON}")
        try:
            return model.model_validate_json(self.body)
        except ValidationError as error:
            # Without what was read: it may be anything, an echo of our own headers too.
            first = error.errors(include_url=False, include_context=False, include_input=False)[0]
            place = ".".join(str(step) for step in first["loc"])
            fault = f"{place}: {first['msg']}" if place else first["msg"]
        raise UnexpectedAnswerError(f"{self.request}: answered no {model.__name__}: {fault}")

    @property
    def problem(self) -> Problem:
        """Why the call was refused, as the gateway says it or, without its word, by the status."""
        if self.content_type == MEDIA_TYPE:
            try:
                return Problem.model_validate_json(self.body)
            except ValidationError:
                log.debug("a problem document has not the shape of one")
        try:
            title = HTTPStatus(self.status).phrase
        except ValueError:
            title = "Refused"
        return Problem(type="about:blank", title=f"{self.status} {title}", status=self.status)

    @property
    def retry_after(self) -> float | None:
        """Seconds that the gateway wants to be left alone."""
        text = self.headers.get("Retry-After", "")
        if text.isascii() and text.isdigit():
            return float(text)
        try:
            seconds = (parsedate_to_datetime(text) - datetime.now(UTC)).total_seconds()
        except (TypeError, ValueError):
            return None
        return max(0.0, seconds)

    @property
    def passing(self) -> bool:
        """Whether the same request may be answered otherwise soon."""
        if self.status == HTTPStatus.TOO_MANY_REQUESTS:
            return self.retry_after is not None
        return self.status in AWAY


@dataclass(frozen=True, slots=True)
class _Lost:
    """A try without an answer."""

    why: str
    passing: bool = True
    retry_after: float | None = None


class Exchange:
    """Requests to one gateway, each tried again while that may help.

    Every call of the contract may be repeated: reads change nothing, a start has its key, a second
    stop and a second answer to a question are refused without harm.
    """

    def __init__(
        self, url: str, token: Token, tls: ssl.SSLContext | Path | None, backoff: Backoff
    ) -> None:
        base = URL(url)
        if base.scheme not in {"http", "https"} or not base.host or base.user is not None:
            raise ValueError("the URL of a gateway is http(s)://host[:port][/path]")
        self._base = str(base).rstrip("/")
        self._token = token
        self._tls = tls
        self._backoff = backoff
        self._session: aiohttp.ClientSession | None = None

    async def open(self) -> None:
        """Get ready to send.

        :raises OSError: the CA file cannot be read.
        """
        tls = self._tls
        if isinstance(tls, Path):
            tls = ssl.create_default_context(cafile=tls)
        self._session = aiohttp.ClientSession(
            # Without a limit: a thousand long polls must not keep a start from being sent.
            connector=aiohttp.TCPConnector(limit=0, ssl=tls or True),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers={
                "User-Agent": f"agentjobs/{__version__}",
                "Accept": f"{JSON}, {MEDIA_TYPE}",
            },
        )

    async def close(self) -> None:
        """Close all connections."""
        if self._session:
            await self._session.close()

    async def send(self, request: Request) -> Answer:
        """Send a request until it is answered.

        :returns: a success of the operation, 304 where it has that.
        :raises ProblemError: refused.
        :raises UnavailableError: tried for as long as the back-off says.
        :raises UnexpectedAnswerError: neither a success nor a refusal.
        """
        answer, repeated = await self._final(request)
        if answer.status >= HTTPStatus.BAD_REQUEST:
            raise error_of(answer.problem, repeated=repeated)
        if answer.status not in {request.operation.status, *request.operation.also}:
            raise UnexpectedAnswerError(f"{request}: answered {answer.status}")
        return answer

    async def ask(self, request: Request, model: type[B]) -> B:
        """Send a request and read the answer's body; raises what both do."""
        return (await self.send(request)).read(model)

    async def _final(self, request: Request) -> tuple[Answer, bool]:
        """An answer after which no other try would help; whether one before may have been heard."""
        clock = asyncio.get_running_loop().time
        wait_end = clock() + request.wait
        end = wait_end + self._backoff.total_seconds
        pauses = self._backoff.pauses()
        reasons: dict[str, None] = {}
        repeated = False
        while True:
            came = await self._try(request, wait_end, end)
            if isinstance(came, Answer) and not came.passing:
                return came, repeated
            reasons[_why(came)] = None
            pause = next(pauses) + (came.retry_after or 0)
            if not came.passing or clock() + pause >= end:
                break
            repeated |= not isinstance(came, Answer) or came.status in AWAY
            log.info("%s: %s; again in %.1f s", request, _why(came), pause)
            await asyncio.sleep(pause)
        if isinstance(came, Answer) and came.status == HTTPStatus.TOO_MANY_REQUESTS:
            # The caller's own limit, not trouble of the gateway's.
            return came, repeated
        raise UnavailableError(f"{request}: {'; '.join(reasons)}", request.headers.get(KEY))

    async def _try(self, request: Request, wait_end: float, end: float) -> Answer | _Lost:
        if self._session is None:
            raise RuntimeError("use Client as an async context manager")
        now = asyncio.get_running_loop().time()
        # A long poll that is tried again waits for what is left of it.
        left = max(0, math.ceil(wait_end - now))
        query = {**request.query, "wait": str(left)} if request.wait else request.query
        url = self._base + request.path + (f"?{urlencode(query)}" if query else "")
        headers = {**request.headers, "Authorization": f"Bearer {self._bearer()}"}
        if request.body is not None:
            headers["Content-Type"] = JSON
        try:
            async with (
                asyncio.timeout_at(min(end, now + left + TRY_SECONDS)),
                self._session.request(
                    request.operation.method,
                    URL(url, encoded=True),
                    data=request.body,
                    headers=headers,
                    # Whoever answered would send the token on.
                    allow_redirects=False,
                ) as response,
            ):
                return await _received(request, response)
        except aiohttp.ClientConnectorCertificateError as error:
            return _Lost(
                f"the certificate is not trusted ({error.certificate_error})", passing=False
            )
        except TimeoutError:
            return _Lost("no answer in time")
        except (aiohttp.ClientError, OSError) as error:
            # Only its words: some of these errors keep the headers that were sent.
            return _Lost(f"{type(error).__name__}: {error}")

    def _bearer(self) -> str:
        """The token of now: the kubelet replaces the file long before the token expires."""
        if isinstance(self._token, Path):
            try:
                token = self._token.read_text(encoding="utf-8", errors="replace")
            except OSError as error:
                raise ClientError(f"the token cannot be read: {error}") from error
        else:
            token = self._token if isinstance(self._token, str) else self._token()
        return token.strip()


async def _received(request: Request, response: aiohttp.ClientResponse) -> Answer:
    content = bytearray()
    if response.content_type in {JSON, MEDIA_TYPE}:
        async for piece in response.content.iter_any():
            content += piece
            if len(content) > MAX_ANSWER_BYTES:
                raise UnexpectedAnswerError(f"{request}: answered more than {MAX_ANSWER_BYTES} B")
    return Answer(request, response.status, response.headers, response.content_type, bytes(content))


def _why(came: Answer | _Lost) -> str:
    if isinstance(came, _Lost):
        return came.why
    problem = came.problem
    return f"{problem.title}: {problem.detail}" if problem.detail else problem.title
