"""The one door to the API server: what its answers mean, against a server that answers them."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable

import kubernetes.client
import pytest
from aiohttp import web

from agentjobs.kube import (
    AGENTJOBS,
    JOBS,
    NODES,
    PODS,
    Access,
    ConflictError,
    GoneError,
    Kube,
    KubeError,
    NotFoundError,
    UnavailableError,
)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Server:
    """Answers with what it is told to, and keeps what it was asked."""

    def __init__(self) -> None:
        self.answers: list[web.Response] = []
        self.asked: list[tuple[str, str, dict[str, str], bytes, str]] = []
        self.break_off = False

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        kind = request.headers.get("Content-Type", "")
        self.asked.append((request.method, request.path, dict(request.query), body, kind))
        if self.break_off and request.transport:
            request.transport.abort()
        return self.answers.pop(0) if self.answers else web.json_response({})

    def will_answer(
        self, status: int, body: object = None, headers: dict[str, str] | None = None
    ) -> None:
        text = body if isinstance(body, str) else json.dumps(body or {})
        self.answers.append(web.Response(status=status, text=text, headers=headers))


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
async def kube(server: Server) -> AsyncIterator[Kube]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", server.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    address = runner.addresses[0]
    configuration = kubernetes.client.Configuration()
    configuration.host = f"http://{address[0]}:{address[1]}"
    async with Kube(Access(configuration.host, configuration)) as kube:
        yield kube
    await runner.cleanup()


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (400, KubeError),
        (403, KubeError),
        (404, NotFoundError),
        (409, ConflictError),
        (410, GoneError),
        (413, KubeError),
        (422, KubeError),
        (401, UnavailableError),
        (408, UnavailableError),
        (429, UnavailableError),
        (500, UnavailableError),
        (502, UnavailableError),
        (503, UnavailableError),
        (504, UnavailableError),
    ],
)
async def test_an_answer_is_final_or_worth_another_try(
    kube: Kube, server: Server, code: int, error: type[Exception]
) -> None:
    server.will_answer(code, {"kind": "Status", "message": "because of that"})
    with pytest.raises(error, match="because of that") as caught:
        await kube.create(JOBS, "n", {"a": 1})
    assert type(caught.value) is error


async def test_retry_after_is_kept(kube: Kube, server: Server) -> None:
    server.will_answer(429, {}, {"Retry-After": "3"})
    with pytest.raises(UnavailableError) as caught:
        await kube.get(JOBS, "n", "x")
    assert caught.value.retry_after == 3.0
    server.will_answer(503, "no JSON at all", {"Retry-After": "Wed, 21 Oct 2026 07:28:00 GMT"})
    with pytest.raises(UnavailableError, match="no JSON at all") as caught:
        await kube.get(JOBS, "n", "x")
    assert caught.value.retry_after is None


@pytest.mark.parametrize("body", ["", "<html>", "[1]", '"text"', "null"])
async def test_an_answer_that_is_no_object_is_no_answer(
    kube: Kube, server: Server, body: str
) -> None:
    server.will_answer(200, body)
    with pytest.raises(UnavailableError):
        await kube.get(JOBS, "n", "x")
    server.will_answer(422, body)
    with pytest.raises(KubeError):
        await kube.get(JOBS, "n", "x")


async def test_a_connection_that_breaks_is_worth_another_try(kube: Kube, server: Server) -> None:
    server.break_off = True
    with pytest.raises(UnavailableError):
        await kube.create(JOBS, "n", {})


async def test_a_server_that_is_not_there_is_worth_another_try() -> None:
    configuration = kubernetes.client.Configuration()
    async with Kube(Access("http://127.0.0.1:1", configuration)) as kube:
        with pytest.raises(UnavailableError):
            await kube.get(JOBS, "n", "x")


async def test_what_is_gone_already_is_deleted(kube: Kube, server: Server) -> None:
    for code in (200, 404, 409):
        server.will_answer(code)
        await kube.delete(JOBS, "n", "x", "the-uid")
    method, path, _, body, _ = server.asked[-1]
    assert (method, path) == ("DELETE", "/apis/batch/v1/namespaces/n/jobs/x")
    assert json.loads(body)["preconditions"] == {"uid": "the-uid"}


async def test_objects_are_created_strictly_and_patched_by_merge(
    kube: Kube, server: Server
) -> None:
    await kube.create(JOBS, "n", {"a": 1})
    await kube.patch(AGENTJOBS, "n", "x", {"status": {}}, "status")
    create, patch = server.asked
    assert create[2] == {"fieldValidation": "Strict"}
    assert patch[:2] == (
        "PATCH",
        "/apis/agentjobs.dev/v1alpha1/namespaces/n/agentjobs/x/status",
    )
    assert patch[4] == "application/merge-patch+json"


async def test_lists_go_on_until_the_last_page(kube: Kube, server: Server) -> None:
    server.will_answer(200, {"metadata": {"continue": "c1"}, "items": [1]})
    server.will_answer(200, {"metadata": {}, "items": [2]})
    pages = [page async for page in kube.pages(PODS, "", {"labelSelector": "l"})]
    assert [page["items"] for page in pages] == [[1], [2]]
    assert [query.get("continue") for _, _, query, _, _ in server.asked] == [None, "c1"]
    assert {query["labelSelector"] for _, _, query, _, _ in server.asked} == {"l"}


async def test_a_call_that_is_cancelled_is_cancelled(kube: Kube, server: Server) -> None:
    async with asyncio.timeout(5):
        task = asyncio.create_task(kube.get(NODES, "", "x"))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert len(server.asked) <= 1
