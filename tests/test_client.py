"""The client against real servers on this machine, most of which misbehave."""

import asyncio
import base64
import itertools
import json
import logging
import re
import ssl
import subprocess
import sys
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from agentjobs.api.names import State
from agentjobs.client import (
    AlreadyAnsweredError,
    Backoff,
    Client,
    ClientError,
    InvalidArgumentsError,
    KeyReusedError,
    NotDoneError,
    NotFoundError,
    ProblemError,
    QuotaExceededError,
    UnavailableError,
    UnexpectedAnswerError,
    content_of,
    exchange,
)
from agentjobs.client.seen import Seen, Sight
from agentjobs.contract import calls, operations
from agentjobs.contract.calls import Answer, Callback, OutputPage
from agentjobs.contract.problems import MEDIA_TYPE, ProblemType
from agentjobs.gateway.reviews import Caller
from agentjobs.gateway.server import Call, Server, answer
from agentjobs.metrics import GatewayMetrics

TOKEN = "header.payload-that-nobody-may-see.signature"  # noqa: S105 - of nothing
JOB = "job-1.team-a"
README = Path(__file__).resolve().parents[1] / "README.md"
PRIVATE = [each for each in operations.OPERATIONS if not (each.public or each.pod)]
QUICK = Backoff(total_seconds=5, first_seconds=0.001, largest_seconds=0.01)
SHORT = Backoff(total_seconds=0.2, first_seconds=0.001, largest_seconds=0.02)

Step = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True)
class Asked:
    """One request that came in."""

    method: str
    raw_path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: bytes

    @property
    def key(self) -> str:
        return self.headers["idempotency-key"]


@dataclass
class Script:
    """Does one step for each request; the last one again and again."""

    steps: deque[Step]
    asked: list[Asked] = field(default_factory=list)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        headers = {name.lower(): value for name, value in request.headers.items()}
        self.asked.append(
            Asked(
                request.method,
                request.raw_path.partition("?")[0],
                dict(request.query),
                headers,
                await request.read(),
            )
        )
        step = self.steps.popleft() if len(self.steps) > 1 else self.steps[0]
        return await step(request)


@asynccontextmanager
async def listening(handler: Step, tls: ssl.SSLContext | None = None) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handler)
    async with serving(app, tls) as url:
        yield url


@asynccontextmanager
async def serving(app: web.Application, tls: ssl.SSLContext | None = None) -> AsyncIterator[str]:
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls).start()
    try:
        yield f"http{'s' if tls else ''}://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def client_of(
    *steps: Step, backoff: Backoff = QUICK, **options: Any
) -> AsyncIterator[tuple[Client, list[Asked]]]:
    """A client, and what its server was asked."""
    script = Script(deque(steps))
    async with (
        listening(script.answer) as url,
        Client(url, token=TOKEN, backoff=backoff, **options) as client,
    ):
        yield client, script.asked


def says(body: Any, status: int = 200, **headers: str) -> Step:
    """Answer with JSON."""

    async def step(_: web.Request) -> web.Response:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return web.json_response(body, status=status, headers=named)

    return step


def refuses(kind: ProblemType, headers: dict[str, str] | None = None, **members: Any) -> Step:
    """Answer with a problem document."""
    body = {"type": kind.uri, "title": kind.title, "status": kind.status.value, **members}

    async def step(_: web.Request) -> web.Response:
        return web.Response(
            body=json.dumps(body),
            status=kind.status,
            headers={**(headers or {}), "Content-Type": MEDIA_TYPE},
        )

    return step


def shows_page(status: int, **headers: str) -> Step:
    """Answer as a proxy does."""

    async def step(_: web.Request) -> web.Response:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        text = "<h1>Oops</h1>"
        return web.Response(text=text, content_type="text/html", status=status, headers=named)

    return step


def unchanged(**headers: str) -> Step:
    async def step(_: web.Request) -> web.Response:
        return web.Response(status=304, headers=headers)

    return step


async def drops(request: web.Request) -> web.StreamResponse:
    """Close the connection instead of answering."""
    assert request.transport is not None
    request.transport.close()
    return web.Response()


async def hangs(_: web.Request) -> web.StreamResponse:
    await asyncio.Event().wait()
    raise AssertionError


async def breaks_off(request: web.Request) -> web.StreamResponse:
    """Answer half of what was announced."""
    response = web.StreamResponse(headers={"Content-Type": "application/json"})
    response.content_length = 1000
    await response.prepare(request)
    await response.write(b'{"job_id"')
    assert request.transport is not None
    request.transport.close()
    return response


def job(status: str = "running", job_id: str = JOB, **members: Any) -> dict[str, Any]:
    return {
        "job_id": job_id,
        "status": status,
        "created_at": "2026-11-30T18:00:00Z",
        **members,
    }


STARTED = says({"job_id": JOB, "status": "queued"}, 202)
RUNNING = says(job(), ETag='"7-aa"')
DONE = says(job("done"), ETag='"9-cc"')


# --- starts


async def test_a_start_sends_what_was_given() -> None:
    arguments = {"url": "http://docs-site/ä", "max_pages": 600, "ratio": 0.1, "since": None}
    async with client_of(STARTED) as (client, asked):
        started = await client.start(
            "crawl-site",
            arguments,
            key="k-1",
            depends_on=["job-0.team-a"],
            deadline_seconds=900,
            pending_deadline_seconds=60,
            callback=Callback(url="https://runtime.example.com/events"),
            namespace="team-a",
        )
    assert (started.job_id, started.status) == (JOB, State.QUEUED)
    (request,) = asked
    assert (request.method, request.raw_path, request.key) == ("POST", "/v1/jobs", "k-1")
    assert request.headers["authorization"] == f"Bearer {TOKEN}"
    assert request.headers["content-type"] == "application/json"
    assert json.loads(request.body) == {
        "tool": "crawl-site",
        "arguments": arguments,
        "depends_on": ["job-0.team-a"],
        "deadline_seconds": 900,
        "pending_deadline_seconds": 60,
        "callback": {"url": "https://runtime.example.com/events"},
        "namespace": "team-a",
    }


async def test_a_template_goes_as_it_is() -> None:
    template = {"spec": {"template": {"spec": {"containers": [{"name": "a", "env": None}]}}}}
    async with client_of(STARTED) as (client, asked):
        await client.start(template=template)
    assert json.loads(asked[0].body) == {"template": template}


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({}, id="neither tool nor template"),
        pytest.param({"tool": "No Tool"}, id="no name of a tool"),
        pytest.param({"tool": "t", "deadline_seconds": 0}, id="no duration"),
        pytest.param({"tool": "t", "depends_on": ["../x"]}, id="no job id"),
        pytest.param({"tool": "t", "arguments": {"x": float("nan")}}, id="no number of JSON's"),
        pytest.param({"tool": "t", "arguments": {"x": object()}}, id="nothing of JSON's"),
    ],
)
async def test_what_the_contract_does_not_know_is_not_sent(fields: dict[str, Any]) -> None:
    async with client_of(STARTED) as (client, asked):
        with pytest.raises((ValueError, TypeError), match=r"valid|JSON"):
            await client.start(**fields)
    assert asked == []


@pytest.mark.parametrize(
    "trouble",
    [drops, breaks_off, shows_page(502), shows_page(504)],
    ids=["dropped", "half", "502", "504"],
)
async def test_r_key_a_start_whose_answer_is_lost_makes_one_job(trouble: Step) -> None:
    jobs: dict[str, str] = {}

    def taking(then: Step | None) -> Step:
        async def step(request: web.Request) -> web.StreamResponse:
            key = request.headers["Idempotency-Key"]
            this = jobs.setdefault(key, f"job-{len(jobs)}.team-a")
            return await (then or says({"job_id": this, "status": "queued"}, 202))(request)

        return step

    async with client_of(taking(trouble), taking(trouble), taking(None)) as (client, asked):
        started = await client.start("t")
    assert list(jobs.values()) == [started.job_id]
    assert len(asked) == 3
    assert len({request.body for request in asked}) == 1


async def test_r_key_every_start_has_a_key_of_its_own() -> None:
    async with client_of(STARTED) as (client, asked):
        await asyncio.gather(*(client.start("t") for _ in range(20)))
    keys = {request.key for request in asked}
    assert len(keys) == 20
    assert all(re.fullmatch(r"[\x21-\x7e]{32,255}", key) for key in keys)


async def test_r_key_who_gives_up_keeps_the_key() -> None:
    async with client_of(drops, backoff=SHORT) as (client, asked):
        with pytest.raises(UnavailableError) as caught:
            await client.start("t")
    assert {request.key for request in asked} == {caught.value.key}
    assert len(asked) > 2


# --- what is tried again, and for how long

RETRY = {"Retry-After": "0"}


@pytest.mark.parametrize(
    ("trouble", "tries"),
    [
        pytest.param(drops, 2, id="a lost connection"),
        pytest.param(breaks_off, 2, id="half an answer"),
        pytest.param(shows_page(502), 2, id="502"),
        pytest.param(shows_page(503), 2, id="503"),
        pytest.param(shows_page(504), 2, id="504"),
        pytest.param(refuses(ProblemType.BUSY, RETRY), 2, id="busy"),
        pytest.param(refuses(ProblemType.UNAVAILABLE, RETRY), 2, id="no API server"),
        pytest.param(refuses(ProblemType.QUOTA_EXCEEDED, RETRY), 2, id="429 that says when"),
        pytest.param(shows_page(429), 1, id="429 that does not"),
        pytest.param(shows_page(500), 1, id="500"),
        pytest.param(refuses(ProblemType.INTERNAL, RETRY), 1, id="broken"),
        pytest.param(shows_page(400, Retry_After="0"), 1, id="400"),
        pytest.param(shows_page(403, Retry_After="0"), 1, id="403"),
        pytest.param(refuses(ProblemType.UNAUTHENTICATED), 1, id="401"),
        pytest.param(refuses(ProblemType.JOB_NOT_FOUND), 1, id="404"),
        pytest.param(refuses(ProblemType.TIMEOUT), 1, id="408"),
        pytest.param(refuses(ProblemType.NOT_DONE), 1, id="409"),
        pytest.param(refuses(ProblemType.INVALID_BODY), 1, id="422"),
        pytest.param(shows_page(301, Location="/v1/tools"), 1, id="301"),
        pytest.param(shows_page(200), 1, id="a page instead of JSON"),
    ],
)
@pytest.mark.parametrize("method", ["start", "inputs", "answer", "stop"])
async def test_what_is_tried_again(method: str, trouble: Step, tries: int) -> None:
    async def fine(request: web.Request) -> web.StreamResponse:
        if request.path.endswith("/inputs/q"):
            return web.Response(status=204)
        if request.method == "GET":
            return await says({"inputs": []})(request)
        return await STARTED(request)

    async with client_of(trouble, fine) as (client, asked):
        methods: dict[str, Callable[[], Awaitable[Any]]] = {
            "start": lambda: client.start("t"),
            "inputs": lambda: client.inputs(JOB),
            "answer": lambda: client.answer(JOB, "q", Answer(outcome="declined")),
            "stop": lambda: client.stop(JOB),
        }
        call = methods[method]()
        if tries == 1:
            with pytest.raises((ProblemError, UnexpectedAnswerError)):
                await call
        else:
            await call
    assert len(asked) == tries


@pytest.mark.parametrize(
    "header",
    ["3600", format_datetime(datetime.now(UTC) + timedelta(hours=1), usegmt=True), "9" * 400],
    ids=["seconds", "date", "for ever"],
)
async def test_who_is_told_to_come_back_too_late_does_not_wait(header: str) -> None:
    async with client_of(shows_page(503, Retry_After=header)) as (client, asked):
        with pytest.raises(UnavailableError):
            await asyncio.wait_for(client.status(JOB), 2)
    assert len(asked) == 1


async def test_retry_after_is_honoured() -> None:
    clock = asyncio.get_running_loop().time
    async with client_of(refuses(ProblemType.BUSY, {"Retry-After": "1"}), RUNNING) as (client, _):
        began = clock()
        await client.status(JOB)
        assert clock() - began >= 1


@pytest.mark.parametrize("header", ["soon", "-1", "\u00b2", "Mon, 30 Nov 1926 18:00:00 GMT"])
async def test_a_retry_after_in_odd_words_delays_nobody(header: str) -> None:
    async with client_of(shows_page(503, Retry_After=header), RUNNING) as (client, asked):
        await asyncio.wait_for(client.status(JOB), 2)
    assert len(asked) == 2


async def test_a_quota_is_the_callers_and_says_so_in_the_end() -> None:
    quota = refuses(ProblemType.QUOTA_EXCEEDED, {"Retry-After": "30"}, detail="namespace team-a: …")
    async with client_of(quota) as (client, asked):
        with pytest.raises(QuotaExceededError, match="team-a"):
            await client.start("t")
    assert len(asked) == 1


async def test_a_server_that_says_nothing_is_given_up_in_time() -> None:
    async with client_of(hangs, backoff=SHORT) as (client, _):
        with pytest.raises(UnavailableError, match="no answer in time"):
            await asyncio.wait_for(client.status(JOB), 2)


async def test_a_try_that_hangs_is_followed_by_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "TRY_SECONDS", 0.05)
    async with client_of(hangs, RUNNING) as (client, asked):
        assert (await client.status(JOB)).status is State.RUNNING
    assert len(asked) == 2


async def test_nobody_listening_is_said() -> None:
    async with Client("http://127.0.0.1:9", token=TOKEN, backoff=SHORT) as client:
        with pytest.raises(UnavailableError, match="GET /v1/tools: ClientConnectorError"):
            await client.tools()


def test_pauses_grow_to_a_bound_and_differ() -> None:
    backoff = Backoff(first_seconds=1, largest_seconds=4)
    pauses = list(itertools.islice(backoff.pauses(), 50))
    for pause, largest in zip(pauses, [1, 2, 4, *[4] * 47], strict=True):
        assert largest / 2 <= pause <= largest
    assert len(set(pauses)) > 40


# --- answers that are none


async def test_an_endless_answer_is_not_read_to_its_end() -> None:
    written = 0

    async def endless(request: web.Request) -> web.StreamResponse:
        nonlocal written
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        while written < 512 * 1024 * 1024:
            await response.write(b" " * 262144)
            written += 262144
        return response

    async with client_of(endless) as (client, asked):
        with pytest.raises(UnexpectedAnswerError, match="more than"):
            await client.tools()
    assert written < 64 * 1024 * 1024
    assert len(asked) == 1


@pytest.mark.parametrize(
    "body",
    ['{"status": "running"}', "[]", "{", "null", "\ufeff{}", "[" * 100_000, job("resting")],
    ids=["no id", "a list", "half", "null", "a mark", "deep", "a state that nobody knows"],
)
async def test_json_of_another_shape_is_no_answer(body: Any) -> None:
    async def step(_: web.Request) -> web.Response:
        text = body if isinstance(body, str) else json.dumps(body)
        return web.Response(text=text, content_type="application/json")

    async with client_of(step) as (client, _):
        with pytest.raises(
            UnexpectedAnswerError, match=r"GET /v1/jobs/job-1\.team-a: answered no JobStatus: "
        ):
            await client.status(JOB)


async def test_what_a_newer_gateway_adds_is_no_harm() -> None:
    async with client_of(says(job(colour="green"))) as (client, _):
        assert (await client.status(JOB)).status is State.RUNNING


async def test_a_redirect_does_not_get_the_token() -> None:
    elsewhere = Script(deque([says({"tools": []})]))
    async with listening(elsewhere.answer) as url:
        redirect = shows_page(307, Location=f"{url}/v1/tools")
        async with client_of(redirect) as (client, _):
            with pytest.raises(UnexpectedAnswerError, match="answered 307"):
                await client.tools()
    assert elsewhere.asked == []


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        pytest.param(ProblemType.JOB_NOT_FOUND, NotFoundError, id="job-not-found"),
        pytest.param(ProblemType.TOOL_NOT_FOUND, NotFoundError, id="tool-not-found"),
        pytest.param(ProblemType.NOT_FOUND, NotFoundError, id="not-found"),
        pytest.param(ProblemType.INVALID_ARGUMENTS, InvalidArgumentsError, id="invalid-arguments"),
        pytest.param(ProblemType.KEY_REUSED, KeyReusedError, id="key-reused"),
        pytest.param(ProblemType.QUOTA_EXCEEDED, QuotaExceededError, id="quota-exceeded"),
        pytest.param(ProblemType.NOT_DONE, NotDoneError, id="not-done"),
        pytest.param(ProblemType.ALREADY_ANSWERED, AlreadyAnsweredError, id="already-answered"),
        pytest.param(ProblemType.FORBIDDEN, ProblemError, id="forbidden"),
        pytest.param(ProblemType.UNAUTHENTICATED, ProblemError, id="unauthenticated"),
    ],
)
async def test_a_refusal_has_its_class(kind: ProblemType, error: type[ProblemError]) -> None:
    async with client_of(refuses(kind, detail="look there")) as (client, _):
        with pytest.raises(ProblemError) as caught:
            await client.start("t")
    assert type(caught.value) is error
    assert caught.value.type == kind.uri.rpartition("/")[2]
    assert str(caught.value) == f"{kind.title}: look there"


async def test_a_refusal_names_the_places_that_are_wrong() -> None:
    faults = [{"pointer": "/arguments/url", "detail": "must be a string"}]
    step = refuses(ProblemType.INVALID_ARGUMENTS, detail="tool t", errors=faults)
    async with client_of(step) as (client, _):
        with pytest.raises(InvalidArgumentsError, match="/arguments/url: must be a string"):
            await client.start("t")


@pytest.mark.parametrize("status", [403, 404, 409, 422, 599])
async def test_a_proxys_refusal_is_not_taken_for_the_gateways(status: int) -> None:
    async with client_of(shows_page(status)) as (client, _):
        with pytest.raises(ProblemError) as caught:
            await client.status(JOB)
    assert type(caught.value) is ProblemError
    assert (caught.value.type, caught.value.problem.status) == ("about:blank", status)


async def test_a_problem_document_of_another_shape_is_no_more_than_its_status() -> None:
    async def step(_: web.Request) -> web.Response:
        return web.Response(text='{"title": 7}', content_type=MEDIA_TYPE, status=404)

    async with client_of(step) as (client, _):
        with pytest.raises(ProblemError, match="404 Not Found") as caught:
            await client.status(JOB)
    assert type(caught.value) is ProblemError


# --- the token


async def test_a_token_file_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("one\n")
    script = Script(deque([shows_page(503), says({"tools": []})]))
    async with listening(script.answer) as url, Client(url, token=file, backoff=QUICK) as client:
        await client.tools()
        (tmp_path / "next").write_text("two\n")
        (tmp_path / "next").rename(file)
        await client.tools()
        file.unlink()
        with pytest.raises(ClientError, match="the token cannot be read"):
            await client.tools()
    sent = [request.headers["authorization"] for request in script.asked]
    assert sent == ["Bearer one", "Bearer one", "Bearer two"]


async def test_a_token_is_asked_for_with_every_try() -> None:
    numbers = itertools.count()
    script = Script(deque([shows_page(503), says({"tools": []})]))
    async with (
        listening(script.answer) as url,
        Client(url, token=lambda: f"t{next(numbers)}", backoff=QUICK) as client,
    ):
        await client.tools()
    assert [each.headers["authorization"] for each in script.asked] == ["Bearer t0", "Bearer t1"]


async def echoes(request: web.Request) -> web.StreamResponse:
    """Answer with what was sent, as services for debugging do."""
    return web.json_response({"job_id": 7, "headers": dict(request.headers)})


async def echoes_as_page(request: web.Request) -> web.StreamResponse:
    return web.Response(text=str(request.headers), content_type="text/html", status=403)


async def garbles(request: web.Request) -> web.StreamResponse:
    """Answer what is no HTTP."""
    assert request.transport is not None
    assert isinstance(request.transport, asyncio.WriteTransport)
    request.transport.write(b"HTTP/9 what\r\n\r\n")
    request.transport.close()
    return web.Response()


def everything_said_of(error: BaseException) -> Iterable[str]:
    link: BaseException | None = error
    while link:
        yield from (str(link), repr(link), repr(link.args))
        link = link.__cause__ or link.__context__


@pytest.mark.parametrize(
    "step",
    [
        drops, breaks_off, hangs, garbles, echoes, echoes_as_page, shows_page(302),
        refuses(ProblemType.UNAUTHENTICATED), refuses(ProblemType.BUSY),
    ],
    ids=["drop", "half", "hang", "garble", "echo", "page", "redirect", "401", "busy"],
)  # fmt: skip
async def test_the_token_is_nowhere_to_be_read(
    step: Step, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    async with client_of(step, backoff=SHORT) as (client, _):
        with pytest.raises(ClientError) as caught:
            await client.status(JOB)
        said = [repr(client), repr(client._exchange), caplog.text]
    said += everything_said_of(caught.value)
    assert not [text for text in said if TOKEN in text]


@pytest.mark.parametrize("url", ["gateway:8080", "ftp://gateway", "/v1", "http://u:p@gateway", ""])
def test_a_url_that_no_gateway_has_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="the URL of a gateway"):
        Client(url, token=TOKEN)


async def test_a_gateway_may_be_below_a_path() -> None:
    script = Script(deque([says({"tools": []})]))
    async with (
        listening(script.answer) as url,
        Client(f"{url}/agent%20jobs/", token=TOKEN) as client,
    ):
        await client.tools()
    assert script.asked[0].raw_path == "/agent%20jobs/v1/tools"


async def test_it_must_be_opened() -> None:
    with pytest.raises(RuntimeError, match="async context manager"):
        await Client("http://127.0.0.1:9", token=TOKEN).tools()


# --- status and wait


async def test_a_status_that_did_not_change_is_not_sent_again() -> None:
    async with client_of(RUNNING, unchanged(ETag='"8-aa"')) as (client, asked):
        first = await client.status(JOB)
        assert await client.status(JOB) == first
    assert "if-none-match" not in asked[0].headers
    assert asked[1].headers["if-none-match"] == '"7-aa"'
    assert "wait" not in asked[1].query


async def test_a_304_that_nobody_asked_for_is_no_answer() -> None:
    async with client_of(unchanged()) as (client, _):
        with pytest.raises(UnexpectedAnswerError, match="304"):
            await client.status(JOB)


async def test_a_stop_is_seen_by_the_reads_after_it() -> None:
    stopped = says({"job_id": JOB, "status": "stopping"}, 202, ETag='"8-bb"')
    stopping = says(job("stopping"), ETag='"8-bb"')
    async with client_of(stopped, stopping) as (client, asked):
        await client.stop(JOB)
        assert (await client.status(JOB)).status is State.STOPPING
    assert asked[1].headers["if-none-match"] == '"8-bb"'


async def test_what_a_stop_did_not_show_is_asked_for() -> None:
    stopped = says({"job_id": JOB, "status": "stopping"}, 202, ETag='"8-bb"')
    stopping = says(job("stopping"), ETag='"8-bb"')
    async with client_of(stopped, unchanged(), stopping) as (client, asked):
        await client.stop(JOB)
        assert (await client.status(JOB)).status is State.STOPPING
    assert "if-none-match" not in asked[2].headers


def test_only_the_newest_sight_of_the_last_jobs_is_kept() -> None:
    seen = Seen(size=2)
    seen.put("a", '"10-aa"', None)
    seen.put("a", '"9-bb"', None)
    assert seen.get("a") == Sight('"10-aa"', None)
    seen.put("b", '"1-aa"', None)
    seen.put("a", '"11-cc"', None)
    seen.put("c", f'W/"{"9" * 5000}-aa"', None)
    seen.put("c", '"rewritten"', None)
    assert len(seen) == 2
    assert seen.get("a") == Sight('"11-cc"', None)
    assert seen.get("b") is None


async def test_waiting_ends_when_the_job_is_over() -> None:
    steps = [says(job("queued"), ETag='"5-zz"'), drops, unchanged(), RUNNING, DONE]
    async with client_of(*steps) as (client, asked):
        ended = await client.wait(JOB, 5)
    assert ended.status is State.DONE
    assert [request.query["wait"] for request in asked] == ["30"] * 5
    sent = [request.headers.get("if-none-match") for request in asked]
    assert sent == [None, '"5-zz"', '"5-zz"', '"5-zz"', '"7-aa"']


async def test_a_job_that_is_over_is_not_waited_for() -> None:
    async with client_of(DONE, unchanged()) as (client, asked):
        await client.status(JOB)
        assert (await client.wait(JOB)).status is State.DONE
    assert len(asked) == 2


async def test_waiting_has_an_end() -> None:
    async with client_of(RUNNING, hangs) as (client, _):
        with pytest.raises(TimeoutError, match=r"job-1\.team-a is running after 0\.1 s"):
            await client.wait(JOB, 0.1)
    async with client_of(hangs) as (client, _):
        with pytest.raises(TimeoutError, match="is not over after 0 s"):
            await client.wait(JOB, 0)


async def test_a_gateway_that_answers_polls_at_once_is_not_hammered() -> None:
    pauses = Backoff(total_seconds=5, first_seconds=0.05, largest_seconds=0.1)
    async with client_of(RUNNING, unchanged(), backoff=pauses) as (client, asked):
        with pytest.raises(TimeoutError):
            await client.wait(JOB, 0.5)
    assert len(asked) < 20


async def test_many_waits_do_not_hold_up_a_start() -> None:
    waiting = 0
    enough = asyncio.Event()

    async def step(request: web.Request) -> web.StreamResponse:
        nonlocal waiting
        if request.method == "POST":
            return await STARTED(request)
        waiting += 1
        if waiting == 150:
            enough.set()
        return await hangs(request)

    async with client_of(step) as (client, _):
        tasks = [asyncio.create_task(client.wait(f"job-{n}.team-a")) for n in range(150)]
        await asyncio.wait_for(enough.wait(), 5)
        await asyncio.wait_for(client.start("t"), 2)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


# --- stop


@pytest.mark.parametrize("reached", ["stopping", "cancelled", "done"])
async def test_a_job_that_is_stopping_or_over_is_no_error(reached: str) -> None:
    step = refuses(ProblemType.ALREADY_STOPPED, job_id=JOB, job_status=reached)
    async with client_of(step) as (client, _):
        assert (await client.stop(JOB)).status == State(reached)


@pytest.mark.parametrize("trouble", [drops, shows_page(502)], ids=["dropped", "502"])
async def test_a_stop_whose_answer_is_lost_has_what_it_wanted(trouble: Step) -> None:
    again = refuses(ProblemType.ALREADY_STOPPED, job_id=JOB, job_status="stopping")
    async with client_of(trouble, again) as (client, asked):
        stopped = await client.stop(JOB, "changed my mind & more")
    assert (stopped.job_id, stopped.status) == (JOB, State.STOPPING)
    assert asked[-1].query == {"reason": "changed my mind & more"}


async def test_a_stop_of_nothing_is_an_error() -> None:
    async with client_of(refuses(ProblemType.JOB_NOT_FOUND)) as (client, _):
        with pytest.raises(NotFoundError):
            await client.stop(JOB)


@pytest.mark.parametrize("job_id", ["../tools", "a/b", "a?wait=60", "..", "", "%2e%2e", "a b#c"])
async def test_a_job_id_stays_one_segment_of_the_path(job_id: str) -> None:
    async with client_of(refuses(ProblemType.JOB_NOT_FOUND)) as (client, asked):
        with pytest.raises(NotFoundError):
            await client.stop(job_id)
    path = asked[0].raw_path
    assert path.startswith("/v1/jobs/")
    assert "/" not in path.removeprefix("/v1/jobs/")
    assert asked[0].query == {}


# --- the rest of the calls


def result_page(data: str, next_: str | None, **members: Any) -> Step:
    return says({"job_id": JOB, "status": "done", "data": data, "next": next_, **members})


async def test_a_result_is_put_together_from_its_pages() -> None:
    octets = base64.b64encode(b"\xff\x00").decode()
    steps = [
        result_page("grüße ", "c1"),
        drops,
        result_page(octets, "c2", encoding="base64"),
        result_page("!", None, truncated=True),
    ]
    async with client_of(*steps) as (client, asked):
        result = await client.result(JOB)
    assert result.content == "grüße ".encode() + b"\xff\x00!"
    assert result.truncated
    assert result.text == "grüße \ufffd\x00!"
    assert [request.query.get("cursor") for request in asked] == [None, "c1", "c1", "c2"]


async def test_result_pages_go_on_where_they_are_told() -> None:
    async with client_of(result_page("x", "c2"), result_page("y", None)) as (client, asked):
        pages = [page.data async for page in client.result_pages(JOB, "c1", limit=4)]
    assert pages == ["x", "y"]
    assert asked[0].query == {"cursor": "c1", "limit": "4"}


async def test_a_job_without_a_result_says_how_it_stands() -> None:
    step = refuses(ProblemType.NOT_DONE, job_id=JOB, job_status="cancelled")
    async with client_of(step) as (client, _):
        with pytest.raises(NotDoneError) as caught:
            await client.result(JOB)
    assert caught.value.problem.job_status is State.CANCELLED


def test_a_page_that_says_base64_and_is_not_is_refused() -> None:
    page = OutputPage(data="*", encoding="base64", next="c", end=True)
    with pytest.raises(ValueError, match="base64"):
        content_of(page)


async def test_jobs_come_in_pages() -> None:
    first = says({"jobs": [job(job_id="job-2.team-a")], "next": "c1", "since": "s1"})
    second = says({"jobs": [job()], "since": "s2"})
    async with client_of(first, second, namespace="team-a") as (client, asked):
        pages = [page async for page in client.jobs(status=State.RUNNING, tool="t", limit=1)]
    assert [each.job_id for page in pages for each in page.jobs] == ["job-2.team-a", JOB]
    query = {"namespace": "team-a", "status": "running", "tool": "t", "limit": "1"}
    assert [request.query for request in asked] == [query, {**query, "cursor": "c1"}]


async def test_changes_wait_for_one() -> None:
    nothing = says({"jobs": [], "since": "s2"})
    something = says({"jobs": [job()], "since": "s3"})
    async with client_of(nothing, drops, something) as (client, asked):
        page = await client.changes("s1", namespace="team-b")
    assert (page.since, len(page.jobs)) == ("s3", 1)
    assert [request.query["since"] for request in asked] == ["s1", "s2", "s2"]
    assert {request.query["namespace"] for request in asked} == {"team-b"}
    assert asked[0].query["wait"] == "30"


async def test_changes_say_when_there_are_none() -> None:
    async with client_of(says({"jobs": [], "since": "s2"})) as (client, asked):
        page = await client.changes(wait=0)
    assert (page.jobs, page.since) == ((), "s2")
    assert [request.query for request in asked] == [{"since": ""}]


ANSWERS: dict[str, Any] = {
    "startJob": calls.Started(job_id=JOB, status=State.QUEUED),
    "listJobs": calls.JobPage(jobs=(), since="s"),
    "getJob": job("done"),
    "stopJob": calls.Stopped(job_id=JOB, status=State.STOPPING),
    "getJobOutput": calls.OutputPage(data="", next="c", end=True),
    "getJobResult": calls.ResultPage(job_id=JOB, status=State.DONE, data="x"),
    "listInputs": {
        "inputs": [
            {"key": "q", "kind": "input", "prompt": "?", "expires_at": "2026-11-30T18:00:00Z"}
        ]
    },
    "listTools": calls.ToolList(tools=(calls.Function(name="t", description="", parameters={}),)),
}


class Anybody:
    """Takes every token."""

    async def authenticate(self, header: str, *, secure: bool) -> Caller:
        assert (header, secure) == (f"Bearer {TOKEN}", False)
        return Caller("somebody")


@asynccontextmanager
async def gateway() -> AsyncIterator[tuple[str, dict[str, Call]]]:
    """The gateway's own server, which checks parameters and bodies; what it understood."""
    understood: dict[str, Call] = {}
    reviews: Any = Anybody()
    server = Server(reviews, GatewayMetrics(), not_ready=lambda: "")
    for operation in PRIVATE:

        async def handle(call: Call, operation: operations.Operation = operation) -> web.Response:
            understood[operation.id] = call
            if operation.id not in ANSWERS:
                return web.Response(status=operation.status)
            return answer(ANSWERS[operation.id], operation.status)

        server.serve(operation, handle)
    async with serving(server.app) as url:
        yield url, understood


async def test_the_gateway_understands_every_call() -> None:
    async with (
        gateway() as (url, understood),
        Client(url, token=TOKEN, namespace="team-a") as client,
    ):
        await client.start("t", {"x": 1}, callback=Callback(url="https://a.example.com/"))
        await client.wait(JOB)
        await client.stop(JOB, "why")
        assert (await client.output(JOB, "c1")).end
        assert (await client.result(JOB)).text == "x"
        (question,) = await client.inputs(JOB)
        await client.answer(JOB, question.key, Answer(outcome="answered", answer={"ok": True}))
        assert [tool.name for tool in await client.tools()] == ["t"]
        assert [page.jobs async for page in client.jobs(tool="t", status=State.DONE)] == [()]
        await client.changes("s", wait=0)
    assert set(understood) == {each.id for each in PRIVATE}
    assert understood["startJob"].body.namespace == "team-a"
    assert understood["answerInput"].body == Answer(outcome="answered", answer={"ok": True})
    assert understood["answerInput"].values == {"job_id": JOB, "key": "q"}
    assert understood["stopJob"].values == {"job_id": JOB, "reason": "why"}


async def test_the_example_in_the_readme_runs(tmp_path: Path) -> None:
    (code,) = re.findall(
        r"^```python\n(.*?)^```", README.read_text("utf-8"), re.DOTALL | re.MULTILINE
    )
    file = tmp_path / "token"
    file.write_text(TOKEN)
    names: dict[str, Any] = {}
    exec(code, names)  # noqa: S102 - ours
    async with gateway() as (url, understood):
        assert await names["crawl"](url, file) == "x"
    assert set(understood) == {"startJob", "getJob", "getJobResult"}


# --- TLS and packaging


def certificate(folder: Path) -> Path:
    """A certificate for 127.0.0.1 that nobody else signed, with its key, in one file."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "gateway")])
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(hours=1))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(IPv4Address("127.0.0.1"))]), critical=False
        )
        .sign(key, hashes.SHA256())
    )
    file = folder / "tls.pem"
    file.write_bytes(
        made.public_bytes(serialization.Encoding.PEM)
        + key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return file


async def test_the_authority_to_trust_is_given_by_file_or_context(tmp_path: Path) -> None:
    file = certificate(tmp_path)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(file)
    async with listening(says({"tools": []}), tls) as url:
        for trust in (file, ssl.create_default_context(cafile=file)):
            async with Client(url, token=TOKEN, tls=trust) as client:
                assert await client.tools() == ()


async def test_a_certificate_that_is_not_trusted_is_not_tried_again(tmp_path: Path) -> None:
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate(tmp_path))
    script = Script(deque([says({"tools": []})]))
    async with listening(script.answer, tls) as url, Client(url, token=TOKEN) as client:
        with pytest.raises(UnavailableError, match="the certificate is not trusted"):
            await asyncio.wait_for(client.tools(), 2)
    assert script.asked == []


WITHOUT_EXTRAS = """
import sys
for name in ("cryptography", "jsonschema_rs", "kopf", "kubernetes", "orjson", "prometheus_client"):
    sys.modules[name] = None  # an import of it fails
import agentjobs.client, agentjobs.contract.asyncapi, agentjobs.contract.openapi
import asyncio
async def main():
    async with agentjobs.client.Client("http://127.0.0.1:9", token="t"):
        print("ready")
asyncio.run(main())
"""


def test_a_client_needs_no_extra() -> None:
    run = subprocess.run(
        [sys.executable, "-c", WITHOUT_EXTRAS], capture_output=True, text=True, check=False
    )
    assert (run.returncode, run.stdout, run.stderr) == (0, "ready\n", "")
