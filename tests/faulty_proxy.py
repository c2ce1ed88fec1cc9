"""A reverse proxy before the API server that can be cut, throttle, fail, hang and lie."""

import asyncio
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from types import TracebackType
from typing import Self

import aiohttp
from aiohttp import web

HOP_BY_HOP = {"connection", "host", "transfer-encoding", "content-length", "content-encoding"}
HANG = 5.0
HOLD_POLL = 0.005
SESSION = web.AppKey("session", aiohttp.ClientSession)
GONE = (
    b'{"type":"ERROR","object":{"kind":"Status","apiVersion":"v1","status":"Failure",'
    b'"reason":"Expired","code":410}}\n'
)


class Fault(Enum):
    """What happens to a request."""

    NONE = auto()
    TOO_MANY = auto()
    """429 with Retry-After: 1."""
    BROKEN = auto()
    """500, not passed on."""
    AWAY = auto()
    """503, not passed on."""
    HANG = auto()
    """No answer for some seconds, then a reset; not passed on."""
    LOST_ANSWER = auto()
    """Passed on and done; the answer is a reset."""
    EXPIRED = auto()
    """What a watch asks for has been compacted away: 410, told in the stream."""
    DEAD_END = auto()
    """404: an answer that a watch does not come back from by itself."""
    CUT = auto()
    """A reset at once; not passed on."""


@dataclass(frozen=True)
class Passed:
    """A request that came through here, and what was done to it."""

    at: float
    method: str
    path: str
    fault: Fault


class FaultyProxy:
    """Listens on 127.0.0.1 with plain HTTP; speaks to the API server with somebody's certificate.

    `choose` says what happens to a request, from its method and its path with the query. `hold`
    says whether a piece of the answer to a path is still kept back, from its age in seconds.
    `delay` says whether a request is still on its way, from its method and its path: it comes in
    when it does, whether or not its sender is there by then.
    """

    def __init__(self, upstream: str, context: ssl.SSLContext, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.choose: Callable[[str, str], Fault] = lambda _method, _path: Fault.NONE
        self.hold: Callable[[str, float], bool] = lambda _path, _age: False
        self.delay: Callable[[str, str], bool] = lambda _method, _path: False
        self.passed: list[Passed] = []
        self._port = port
        self._upstream = upstream
        self._context = context
        self._open: dict[int, web.Request] = {}
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(10), "the proxy did not start"
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)

    def break_connections(self, chosen: Callable[[str], bool] = lambda _: True) -> None:
        """Reset what is under way, watches above all."""
        self._loop.call_soon_threadsafe(self._break, chosen)

    def between(self, begin: float, end: float) -> list[Passed]:
        """What came in between two moments of the monotonic clock."""
        return [each for each in list(self.passed) if begin <= each.at < end]

    def _run(self) -> None:
        self._loop.run_until_complete(self._serve())
        # Handlers of broken connections are left behind.
        left = asyncio.all_tasks(self._loop)
        for task in left:
            task.cancel()
        if left:
            self._loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        self._loop.close()

    async def _serve(self) -> None:
        connector = aiohttp.TCPConnector(ssl=self._context, limit=0)
        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(
            connector=connector, timeout=timeout, auto_decompress=False
        ) as session:
            app = web.Application(client_max_size=16 * 1024**2)
            app[SESSION] = session
            app.router.add_route("*", "/{path:.*}", self._handle)
            runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", self._port).start()
            self._ready.set()
            await self._stop.wait()
            self._break(lambda _: True)
            await runner.cleanup()

    def _break(self, chosen: Callable[[str], bool]) -> None:
        for request in list(self._open.values()):
            if chosen(request.path_qs):
                _reset(request)

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        fault = self.choose(request.method, request.path_qs)
        self.passed.append(Passed(time.monotonic(), request.method, request.path_qs, fault))
        if fault in ANSWERS:
            code, headers, body = ANSWERS[fault]
            return web.Response(
                status=code, headers=headers, body=body, content_type="application/json"
            )
        if fault is Fault.HANG:
            await asyncio.sleep(HANG)
        if fault in {Fault.HANG, Fault.CUT}:
            return _reset(request)
        self._open[id(request)] = request
        try:
            return await self._pass_on(request, fault)
        except (aiohttp.ClientError, ConnectionError):
            return _reset(request)
        finally:
            self._open.pop(id(request), None)

    async def _pass_on(self, request: web.Request, fault: Fault) -> web.StreamResponse:
        session = request.app[SESSION]
        headers = {k: v for k, v in request.headers.items() if k.lower() not in HOP_BY_HOP}
        body = await request.read()
        while self.delay(request.method, request.path_qs):  # noqa: ASYNC110 - set by a thread
            await asyncio.sleep(HOLD_POLL)
        async with session.request(
            request.method,
            self._upstream + request.raw_path,
            headers=headers,
            data=body or None,
        ) as answer:
            if fault is Fault.LOST_ANSWER:
                return _reset(request)
            kept = {k: v for k, v in answer.headers.items() if k.lower() not in HOP_BY_HOP}
            if "Content-Encoding" in answer.headers:
                kept["Content-Encoding"] = answer.headers["Content-Encoding"]
            passed = web.StreamResponse(status=answer.status, headers=kept)
            await passed.prepare(request)
            async for chunk in answer.content.iter_any():
                came = time.monotonic()
                while self.hold(request.path_qs, time.monotonic() - came):  # noqa: ASYNC110
                    await asyncio.sleep(HOLD_POLL)
                await passed.write(chunk)
            await passed.write_eof()
            return passed


def is_watch_of(path: str, plural: str) -> bool:
    """Whether a path, with its query, is a watch of that kind."""
    return "watch=" in path and path.partition("?")[0].endswith(f"/{plural}")


ANSWERS: dict[Fault, tuple[int, dict[str, str], bytes]] = {
    Fault.TOO_MANY: (429, {"Retry-After": "1"}, b'{"kind":"Status","message":"too many requests"}'),
    Fault.BROKEN: (500, {}, b'{"kind":"Status","message":"internal error"}'),
    Fault.AWAY: (503, {}, b"upstream connect error"),
    Fault.EXPIRED: (200, {}, GONE),
    Fault.DEAD_END: (404, {}, b'{"kind":"Status","message":"not found"}'),
}


def _reset(request: web.Request) -> web.Response:
    if request.transport:
        request.transport.abort()
    return web.Response(status=502)
