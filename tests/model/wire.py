"""Requests of an operator, carried to the API server and back by the test, late or never."""

import copy
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Mapping
from functools import partial
from typing import Any, cast

from agentjobs.domain.errors import AgentJobError
from agentjobs.kube import (
    AGENTJOBS,
    JOBS,
    LEASES,
    TOTAL_SECONDS,
    ConflictError,
    KubeError,
    NotFoundError,
    Resource,
    UnavailableError,
)
from tests.model.apiserver import ApiServer, Json, copied
from tests.model.clock import Clock
from tests.model.truth import RuleBroken, Truth

IN_FLIGHT_SECONDS = float(TOTAL_SECONDS)
"""How long a request may be on its way: longer than a Lease lasts, so that it may be carried out
while another leads."""
UNPROCESSABLE = 422


class Request:
    """One call on its way to the API server and back."""

    def __init__(self, call: Callable[[], Any], kube: "ModelKube", verb: str) -> None:
        self._call = call
        self._kube = kube
        self._answer: Any = None
        self._error: AgentJobError | None = None
        self.verb = verb
        self.sender = kube.identity()
        self.sent_at = kube.clock.monotonic()
        self.done = False
        self.conflict = False

    @property
    def writes(self) -> bool:
        return self.verb != "read"

    def carry_out(self) -> None:
        """Let the API server do it; the answer is not back yet."""
        if self.done:
            return
        self.done = True
        server = self._kube.server
        before, server.written_by = server.written_by, self.sender
        try:
            self._answer = self._call()
        except KubeError as error:
            if self.writes and error.code == UNPROCESSABLE:
                raise RuleBroken(f"R-STATE-FINAL: the API server refused: {error}") from error
            self._error = error
            self.conflict = isinstance(error, ConflictError)
        finally:
            server.written_by = before

    def lose(self) -> None:
        """Break the connection: whoever waits learns nothing of what was done."""
        self.done = True
        self._error = UnavailableError("the connection broke")

    def time_out(self) -> "Request":
        """Let the sender give up; what it sent is still on its way."""
        twin = copy.copy(self)
        self.lose()
        return twin

    def __await__(self) -> Generator["Request", None, Any]:
        yield self
        if not self.done:
            raise RuntimeError("resumed before it was carried out")
        if self._error is not None:
            raise self._error
        return copied(self._answer)


class ModelKube:
    """The interface of `Kube`; every call is a `Request`."""

    def __init__(
        self, server: ApiServer, truth: Truth, clock: Clock, identity: Callable[[], str]
    ) -> None:
        self.server = server
        self.clock = clock
        self.identity = identity
        self._truth = truth
        self.writes = 0
        """Writes that the API server was asked for, Leases left out."""

    async def get(self, resource: Resource, namespace: str, name: str) -> Json:
        return cast("Json", await self._read(self.server.get, resource, namespace, name))

    async def create(self, resource: Resource, namespace: str, body: Mapping[str, Any]) -> Json:
        call = partial(self.server.create, resource, namespace, body)
        verb = "create a Job" if resource == JOBS else "write"
        return cast("Json", await self._send(call, resource, verb))

    async def patch(
        self,
        resource: Resource,
        namespace: str,
        name: str,
        body: Mapping[str, Any],
        subresource: str = "",
    ) -> Json:
        verb = "write"
        if resource == AGENTJOBS and subresource and self._truth.sends(namespace, name, body):
            verb = "claim"
        if resource == JOBS:
            self._truth.sends_to_job(self.identity(), name)
        call = partial(self.server.patch, resource, namespace, name, body, subresource)
        return cast("Json", await self._send(call, resource, verb))

    async def replace(
        self, resource: Resource, namespace: str, name: str, body: Mapping[str, Any]
    ) -> Json:
        call = partial(self.server.replace, resource, namespace, name, body)
        return cast("Json", await self._send(call, resource))

    async def delete(self, resource: Resource, namespace: str, name: str, uid: str) -> None:
        call = partial(self.server.delete, resource, namespace, name, uid)
        try:
            await self._send(call, resource)
        except (NotFoundError, ConflictError):
            return

    async def pages(
        self, resource: Resource, _namespace: str = "", params: Mapping[str, str] | None = None
    ) -> AsyncIterator[Json]:
        yield await self._read(self.server.listed, resource, params)

    async def last_line(self, *_: Any) -> str:
        return ""

    async def _read(self, call: Callable[..., Any], *args: Any) -> Any:
        return await Request(partial(call, *args), self, "read")

    async def _send(self, call: Callable[[], Any], resource: Resource, verb: str = "write") -> Any:
        if resource != LEASES:
            self.writes += 1
        return await Request(call, self, verb)


class Task:
    """A coroutine that runs from one request to the next."""

    def __init__(self, work: Coroutine[Any, Any, Any]) -> None:
        self._work = work
        self.request: Request | None = None
        self.finished = False
        self.result: Any = None
        self.error: Exception | None = None
        self._resume()

    def carry_out(self) -> None:
        if self.request:
            self.request.carry_out()

    def answer(self) -> None:
        """Bring the answer back, and go on until the next request."""
        self.carry_out()
        self._resume()

    def run(self) -> Any:
        """Go on to the end without any trouble."""
        while not self.finished:
            self.answer()
        if self.error:
            raise self.error
        return self.result

    def _resume(self) -> None:
        try:
            self.request = cast("Request", self._work.send(None))
        except StopIteration as stop:
            self.request, self.finished, self.result = None, True, stop.value
        except Exception as error:  # noqa: BLE001 - whoever waits for the task looks at it
            self.request, self.finished, self.error = None, True, error

    def abandon(self) -> Request | None:
        """Die with the process; what was sent and not yet carried out is still on its way."""
        self._work.close()
        request, self.request, self.finished = self.request, None, True
        return request if request and request.writes and not request.done else None
