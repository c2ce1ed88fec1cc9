"""HTTP: checks requests by the table of operations, renders answers and problems."""

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from aiohttp import HttpVersion11, web
from pydantic import BaseModel, ValidationError

from agentjobs import codec
from agentjobs.contract import operations
from agentjobs.contract.calls import Fault
from agentjobs.contract.operations import In, Operation
from agentjobs.contract.problems import ProblemType
from agentjobs.domain.errors import AgentJobError, InvalidSpecError
from agentjobs.domain.nesting import check_depth
from agentjobs.gateway.problems import ProblemError, try_later
from agentjobs.gateway.reviews import Caller, Pod, Reviews
from agentjobs.kube import UnavailableError
from agentjobs.metrics import GatewayMetrics

log = logging.getLogger(__name__)
MAX_BODY_BYTES = 256 * 1024
BODY_SECONDS = 10.0
LARGE_BODY_SECONDS = 60.0
MAX_BUSY = 512
"""Requests that are worked on at once; beyond it callers are asked to come back."""
MAX_LARGE = 16
"""Bodies of megabytes at once: they stand in memory."""
MAX_WAITING = 5000
"""Long polls at once."""
CLOSE = {"Connection": "close"}
NO_STORE = {"Cache-Control": "no-store"}
SAFE = {**NO_STORE, "X-Content-Type-Options": "nosniff"}


@dataclass(frozen=True, slots=True)
class Call:
    """A request that was understood: who calls, and the values that it gave."""

    caller: Caller
    values: Mapping[str, Any]
    body: Any
    pod: Pod | None = None
    """The pod that calls, where pods do."""


Handler = Callable[[Call], Awaitable[web.StreamResponse]]
OPERATION = web.RequestKey("operation", str)
NOBODY = Caller("")


class Room:
    """Room for so many at once, shared by tenants: nobody may hold more than is left over.

    So one alone has half of it, a second one half of the rest, and there is a place for whoever
    comes next, whatever the others hold (the dynamic thresholds of Choudhury and Hahne).
    """

    def __init__(self, limit: int, what: str, seconds: float = 1) -> None:
        """Prepare.

        :param what: what there may be so many of, in the words of a refusal,
        :param seconds: and when who is refused may come again.
        """
        self._limit = limit
        self._what = what
        self._seconds = seconds
        self._taken: Counter[str] = Counter()
        self._total = 0

    @contextlib.contextmanager
    def place(self, tenant: str = "") -> Iterator[None]:
        """Take one place.

        :param tenant: whose; empty while nobody knows.
        :raises ProblemError: there is none (503); it says which limit was met.
        """
        held, left = self._taken[tenant], self._limit - self._total
        if left <= 0 or (tenant and held >= left):
            whose = f"; {tenant} has {held}, which is its share just now" if tenant and held else ""
            raise try_later(
                ProblemType.BUSY,
                f"{self._total} of at most {self._limit} {self._what}{whose}",
                self._seconds,
            )
        self._taken[tenant] += 1
        self._total += 1
        try:
            yield
        finally:
            self._total -= 1
            self._taken[tenant] -= 1
            if not self._taken[tenant]:
                del self._taken[tenant]


def tenant_of(caller: Caller, pod: Pod | None) -> str:
    """For whom room is counted: a namespace; a user who has none; apart from it what its tools do.

    Otherwise a tool could keep its own agent from stopping it.
    """
    if pod:
        return f"the tools of namespace {pod.namespace}"
    return f"namespace {caller.home}" if caller.home else f"user {caller.name}"


WAIT_RETRY_SECONDS = 5


class Server:
    """Serves handlers under their operations."""

    def __init__(
        self, reviews: Reviews, metrics: GatewayMetrics, *, not_ready: Callable[[], str]
    ) -> None:
        """Prepare.

        :param not_ready: why callers cannot be served yet; empty when they can.
        """
        self._reviews = reviews
        self._metrics = metrics
        self._not_ready = not_ready
        self._busy = Room(MAX_BUSY, "requests are under way")
        self._waiting = Room(MAX_WAITING, "requests wait; ask without wait", WAIT_RETRY_SECONDS)
        self._large = Room(MAX_LARGE, "large bodies are under way")
        self.ending = False
        """Set when nobody should stay connected any more."""
        self.app = web.Application(
            middlewares=[self._render_problems], client_max_size=MAX_BODY_BYTES
        )

    def serve(self, operation: Operation, handler: Handler) -> None:
        """Serve one operation."""

        async def handle(request: web.Request) -> web.StreamResponse:
            request[OPERATION] = operation.id
            began = time.perf_counter()
            response = await self._handle(operation, handler, request)
            if "wait" not in request.query:
                seconds = time.perf_counter() - began
                self._metrics.request_seconds.labels(operation.id).observe(seconds)
            return response

        # By itself aiohttp keeps braces out of what stands for a name.
        path = operation.path.replace("}", ":[^/]+}")
        self.app.router.add_route(operation.method, path, handle, expect_handler=_go_on_later)

    async def _handle(
        self, operation: Operation, handler: Handler, request: web.Request
    ) -> web.StreamResponse:
        if operation.public:
            return await handler(Call(NOBODY, _values(operation, request), None))
        # Who hangs up does not break off what was begun, and keeps the place until it is over.
        call, response = await asyncio.shield(self._work(operation, handler, request))
        if response is not None:
            return response
        tenant = tenant_of(call.caller, call.pod)
        # Waiting ends with the connection: who comes again and again must not wait many times.
        in_progress = self._metrics.waiting.track_inprogress()
        with self._waiting.place(tenant), in_progress:
            return await handler(call)

    async def _work(
        self, operation: Operation, handler: Handler, request: web.Request
    ) -> tuple[Call, web.StreamResponse | None]:
        """Understand a request and answer it, unless it has to wait."""
        with self._busy.place():
            if self._not_ready():
                raise try_later(ProblemType.UNAVAILABLE, "the gateway is not ready yet")
            header = request.headers.getall("Authorization", [""])
            if len(header) > 1:
                raise _invalid("header Authorization is given more than once")
            caller, pod = await self._who(operation, header[0], secure=request.secure)
        tenant = tenant_of(caller, pod)
        with self._busy.place(tenant), self._room_for_body(operation, tenant):
            values = _values(operation, request)
            body = await _content(operation, request)
            call = Call(caller, values, body, pod)
            return call, None if values.get("wait") else await handler(call)

    def _room_for_body(
        self, operation: Operation, tenant: str
    ) -> contextlib.AbstractContextManager[None]:
        """Room for a large body from its beginning until what is done with it is over."""
        large = operation.raw_limit is not None
        return self._large.place(tenant) if large else contextlib.nullcontext()

    async def _who(
        self, operation: Operation, header: str, *, secure: bool
    ) -> tuple[Caller, Pod | None]:
        """Who calls: a user, or the pod of a job. The one's token is of no use to the other."""
        if not operation.pod:
            return await self._reviews.authenticate(header, secure=secure), None
        pod = await self._reviews.authenticate_pod(header)
        return Caller(f"pod {pod.uid}"), pod

    @web.middleware
    async def _render_problems(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        try:
            response = await handler(request)
        except ProblemError as error:
            response = error.response()
        except web.HTTPException as error:
            response = _from_aiohttp(error).response()
        except UnavailableError as error:
            log.warning("%s: %s", _operation(request), error)
            response = try_later(
                ProblemType.UNAVAILABLE, "the API server does not answer", error.retry_after or 1
            ).response()
        except AgentJobError as error:
            # What the API server denies us is no business of the caller's.
            log.error("%s: %s", _operation(request), error)
            response = try_later(
                ProblemType.UNAVAILABLE, "the gateway is not set up rightly; see its log", 10
            ).response()
        except Exception:
            log.exception("%s broke", _operation(request))
            response = ProblemError(ProblemType.INTERNAL, "see the gateway's log").response()
        if self.ending:
            response.force_close()
        self._metrics.requests.labels(_operation(request), str(response.status)).inc()
        return response


def _operation(request: web.Request) -> str:
    """What is asked for, in our own words: a path is the caller's, and logs are read by others."""
    return str(request.get(OPERATION, "none"))


def answer(
    body: BaseModel | bytes | dict[str, Any],
    status: int = 200,
    headers: Mapping[str, str] | None = None,
) -> web.Response:
    """A JSON answer."""
    if isinstance(body, BaseModel):
        body = body.model_dump(mode="json", exclude_none=True)
    content = body if isinstance(body, bytes) else codec.dumps(body)
    return web.Response(
        body=content, status=status, headers={**SAFE, **(headers or {})},
        content_type="application/json",
    )  # fmt: skip


def _values(operation: Operation, request: web.Request) -> dict[str, Any]:
    """Check parameters by the table.

    :raises ProblemError: unknown, doubled, missing or malformed ones.
    """
    known = {each.name for each in operation.parameters if each.where is In.QUERY}
    unknown = sorted(set(request.query) - known)
    if unknown:
        wanted = f"; it takes {', '.join(sorted(known))}" if known else ""
        raise _invalid(f"unknown parameter {unknown[0][:64]!r}{wanted}")
    values: dict[str, Any] = {}
    for each in operation.parameters:
        found = {
            In.QUERY: lambda name: request.query.getall(name, []),
            In.HEADER: lambda name: request.headers.getall(name, []),
            In.PATH: lambda name: [request.match_info[name]],
        }[each.where](each.name)
        if len(found) > 1:
            raise _invalid(f"{each.where} {each.name} is given more than once")
        if found:
            values[each.name] = _value(each, found[0])
        elif each.name == operations.KEY:
            raise ProblemError(
                ProblemType.KEY_REQUIRED, f"send the header {each.name} with a new random value"
            )
        elif each.required:
            raise _invalid(f"{each.where} {each.name} is required")
    if operation.octets:
        values["Accept"] = ", ".join(request.headers.getall("Accept", []))
    return values


def _value(parameter: operations.Parameter, text: str) -> Any:
    if parameter.where is In.PATH:
        # What no object can be called is not found like anything else.
        return text
    try:
        return parameter.adapter.validate_python(text)
    except ValidationError as error:
        reason = error.errors()[0]["msg"]
        kind = ProblemType.INVALID_REQUEST
        if parameter.name in {"cursor", "since"}:
            kind = ProblemType.INVALID_CURSOR
        elif parameter.name == operations.KEY:
            kind = ProblemType.KEY_REQUIRED
        raise ProblemError(kind, f"{parameter.where} {parameter.name}: {reason}") from error


async def _content(operation: Operation, request: web.Request) -> Any:
    """The body that an operation takes.

    :raises ProblemError: too large, too slow, or not what it takes.
    """
    if operation.raw_limit is not None:
        limit = operation.raw_limit
        _check_encoding(request, limit)
        return await _read(request.clone(client_max_size=limit), LARGE_BODY_SECONDS, limit)
    return await _body(operation.body, request) if operation.body else None


async def _body(model: type[BaseModel], request: web.Request) -> BaseModel:
    """Read and check a body.

    :raises ProblemError: too large, too slow, no JSON, or not of the model's shape.
    """
    _check_headers(request)
    raw = await _read(request, BODY_SECONDS, MAX_BODY_BYTES)
    try:
        value = codec.parse(raw)
    except ValueError as error:
        raise _invalid(f"the body is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise _invalid("the body is no JSON object")
    return _checked(model, value)


async def _read(request: web.Request, seconds: float, limit: int) -> bytes:
    """Read a body.

    :raises ProblemError: it is too slow, too large, or broken off.
    """
    try:
        async with asyncio.timeout(seconds):
            if "Expect" in request.headers and request.version == HttpVersion11:
                await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
                # What is counted is the answer.
                request.writer.output_size = 0
            return await request.read()
    except web.HTTPRequestEntityTooLarge as error:
        raise _too_large(limit) from error
    except TimeoutError as error:
        raise ProblemError(
            ProblemType.TIMEOUT,
            f"the body did not arrive within {seconds:.0f} s",
            headers=CLOSE,
        ) from error
    except (web.RequestPayloadError, ConnectionError) as error:
        raise ProblemError(
            ProblemType.INVALID_REQUEST, "the body is broken off", headers=CLOSE
        ) from error


def _checked(model: type[BaseModel], value: Any) -> BaseModel:
    """A body as its model.

    :raises ProblemError: it has not the model's shape.
    """
    try:
        check_depth(value, "the body")
        return model.model_validate(value)
    except InvalidSpecError as error:
        raise ProblemError(ProblemType.INVALID_BODY, str(error)) from error
    except ValidationError as error:
        raise ProblemError(
            ProblemType.INVALID_BODY,
            "see errors for the places that are wrong",
            faults=[
                Fault(
                    pointer=_pointer(each["loc"]), detail=each["msg"].removeprefix("Value error, ")
                )
                for each in error.errors(include_url=False, include_input=False)
            ],
        ) from error


async def _go_on_later(request: web.Request) -> None:
    """Ask for no body before it is known who sends it, and that it is not too large."""
    if request.headers["Expect"].lower() != "100-continue":
        raise web.HTTPExpectationFailed(text="Expect may be 100-continue")


def _check_headers(request: web.Request) -> None:
    """Refuse a body for what is said of it.

    :raises ProblemError: not JSON, not UTF-8, compressed, too large.
    """
    wrong = ""
    if request.content_type != "application/json":
        wrong = "send Content-Type: application/json"
    elif (request.charset or "utf-8").lower() != "utf-8":
        wrong = "send JSON in UTF-8"
    if wrong:
        raise ProblemError(ProblemType.UNSUPPORTED_MEDIA_TYPE, wrong)
    _check_encoding(request, MAX_BODY_BYTES)


def _check_encoding(request: web.Request, limit: int) -> None:
    """Refuse a body that is compressed, or larger than it may be.

    :raises ProblemError: it is.
    """
    if (
        request.headers.get("Content-Encoding", "identity").lower() != "identity"
        or request.headers.get("Transfer-Encoding", "chunked").lower() != "chunked"
    ):
        raise ProblemError(ProblemType.UNSUPPORTED_MEDIA_TYPE, "send the body uncompressed")
    if (request.content_length or 0) > limit:
        raise _too_large(limit)


def _pointer(place: tuple[int | str, ...]) -> str:
    return "".join(f"/{str(step).replace('~', '~0').replace('/', '~1')}" for step in place)


def _invalid(detail: str) -> ProblemError:
    return ProblemError(ProblemType.INVALID_REQUEST, detail)


def _too_large(limit: int) -> ProblemError:
    return ProblemError(
        ProblemType.BODY_TOO_LARGE,
        f"at most {limit} bytes; pass large data by reference",
        headers=CLOSE,
    )


def _from_aiohttp(error: web.HTTPException) -> ProblemError:
    if isinstance(error, web.HTTPRequestEntityTooLarge):
        return _too_large(MAX_BODY_BYTES)
    if isinstance(error, web.HTTPMethodNotAllowed):
        allowed = ", ".join(sorted(error.allowed_methods))
        return ProblemError(ProblemType.METHOD_NOT_ALLOWED, allowed, headers={"Allow": allowed})
    if isinstance(error, web.HTTPNotFound):
        return ProblemError(ProblemType.NOT_FOUND, "see /openapi.json for what there is")
    return _invalid(error.reason or type(error).__name__)
