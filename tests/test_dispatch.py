"""Sending events to a real receiver on this machine (R-CALLBACK)."""

import asyncio
import base64
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import datetime, tzinfo

import pytest
from aiohttp import web
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from standardwebhooks import webhooks
from typing_extensions import override

from agentjobs import dispatch
from agentjobs.dispatch import Dispatcher, Letter
from agentjobs.domain.callbacks import Outcome, Reply
from agentjobs.domain.destinations import Destinations
from agentjobs.metrics import Metrics
from agentjobs.signing import Signer
from tests.receiver import Request

SIGNER = Signer({"ed25519": Ed25519PrivateKey.generate()})
OURS = "whsk_" + base64.b64encode(b"o" * 32).decode()
SHARED = "whsec_" + base64.b64encode(b"s" * 24).decode()
HERE = Destinations.from_json('[{"cidrs": ["127.0.0.0/8"]}]', insecure_loopback=True)
BODY = b'{"id": "evt_1", "subject": "a.b"}'

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def receiving(handler: Handler) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    try:
        yield f"http://127.0.0.1:{port}/events"
    finally:
        await runner.cleanup()


async def sent(
    url: str, destinations: Destinations = HERE, event: str = "evt_1", signer: Signer = SIGNER
) -> Outcome:
    """Send one event and wait for what comes of it."""
    told = asyncio.Event()
    dispatcher: Dispatcher[str] = Dispatcher(
        signer, destinations, lambda _key: told.set(), Metrics()
    )
    dispatcher.submit("key", Letter(event, "team-a", url, BODY))
    await asyncio.wait_for(told.wait(), 10)
    outcome = dispatcher.outcomes("key")[event]
    await dispatcher.close()
    return outcome


def answering(status: int, headers: dict[str, str] | None = None) -> Handler:
    async def handler(_: web.Request) -> web.Response:
        return web.Response(status=status, headers=headers)

    return handler


async def test_a_receiver_gets_the_bytes_and_a_signature_that_verifies() -> None:
    got: list[Request] = []

    async def handler(request: web.Request) -> web.Response:
        headers = {name.lower(): value for name, value in request.headers.items()}
        got.append(Request(0, headers, await request.read()))
        return web.Response(status=204)

    async with receiving(handler) as url:
        assert (await sent(url)).reply is Reply.TAKEN
    (request,) = got
    assert request.body == BODY
    assert request.headers["content-type"].startswith("application/cloudevents+json")
    request.verify(SIGNER.public()["ed25519"])
    with pytest.raises(InvalidSignature):
        Request(0, request.headers, BODY + b" ").verify(SIGNER.public()["ed25519"])


async def test_r_callback_the_answer_decides_by_status_and_retry_after() -> None:
    """What which answer means is the core's: `tests/domain/test_callbacks.py`."""
    async with receiving(answering(429, {"Retry-After": "7"})) as url:
        outcome = await sent(url)
    assert (outcome.reply, outcome.retry_after) == (Reply.FAILED, 7.0)


async def test_a_receiver_that_never_answers_is_given_up_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dispatch, "HEADERS_SECONDS", 0.2)

    async def handler(_: web.Request) -> web.Response:
        await asyncio.sleep(30)
        return web.Response()

    async with receiving(handler) as url:
        outcome = await sent(url)
    assert outcome.reply is Reply.FAILED
    assert "no answer" in outcome.error


async def test_an_endless_answer_is_not_read_to_its_end() -> None:
    written = 0

    async def handler(request: web.Request) -> web.StreamResponse:
        nonlocal written
        response = web.StreamResponse()
        await response.prepare(request)
        while written < 64 * 1024 * 1024:
            await response.write(b"x" * 65536)
            written += 65536
        return response

    async with receiving(handler) as url:
        assert (await sent(url)).reply is Reply.TAKEN
    assert written < 16 * 1024 * 1024


async def test_nobody_listening_says_so_without_an_address() -> None:
    outcome = await sent("http://127.0.0.1:9/events")
    assert (outcome.reply, outcome.error) == (Reply.FAILED, "no connection to the receiver")


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "localhost", "2130706433", "0x7f000001", "\uff11\uff12\uff17.0.0.1"]
)
async def test_a_forbidden_address_gets_no_connection_however_it_is_written(host: str) -> None:
    async def handler(_: web.Request) -> web.Response:
        raise AssertionError("it was called")

    everything = Destinations.from_json('[{"hosts": ["*"], "cidrs": ["0.0.0.0/0", "::/0"]}]')
    async with receiving(handler) as url:
        outcome = await sent(url.replace("127.0.0.1", host), everything)
    assert outcome.reply is Reply.FAILED


async def test_r_callback_a_try_that_breaks_has_an_outcome_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Some resolvers refuse a name with Python's errors of texts."""

    async def refuse(*_: object) -> None:
        raise UnicodeError("label too long")

    monkeypatch.setattr(dispatch.DefaultResolver, "resolve", refuse)
    outcome = await sent("http://a.example.com/", Destinations.from_json('[{"hosts": ["*"]}]'))
    assert outcome.reply is Reply.FAILED
    assert "Unicode" in outcome.error


async def test_one_slow_receiver_does_not_delay_another() -> None:
    release = asyncio.Event()

    async def slow(_: web.Request) -> web.Response:
        await release.wait()
        return web.Response(status=204)

    told: asyncio.Queue[str] = asyncio.Queue()
    dispatcher: Dispatcher[str] = Dispatcher(SIGNER, HERE, told.put_nowait, Metrics())
    async with receiving(slow) as slow_url, receiving(answering(204)) as fast_url:
        for number in range(20):
            dispatcher.submit(f"slow-{number}", Letter(f"s{number}", "team-a", slow_url, BODY))
        dispatcher.submit("fast", Letter("f", "team-a", fast_url, BODY))
        assert await asyncio.wait_for(told.get(), 5) == "fast"
        release.set()
        await dispatcher.close()


async def test_an_event_is_not_submitted_twice() -> None:
    calls = 0

    async def handler(_: web.Request) -> web.Response:
        nonlocal calls
        calls += 1
        return web.Response(status=204)

    told = asyncio.Event()
    dispatcher: Dispatcher[str] = Dispatcher(SIGNER, HERE, lambda _key: told.set(), Metrics())
    async with receiving(handler) as url:
        letter = Letter("e", "team-a", url, BODY)
        dispatcher.submit("key", letter)
        dispatcher.submit("key", letter)
        await asyncio.wait_for(told.wait(), 5)
        dispatcher.submit("key", letter)
        assert (calls, dispatcher.busy("e")) == (1, False)
        dispatcher.settle("key", ["e"])
        assert dispatcher.outcomes("key") == {}
        await dispatcher.close()


class MovedClock(datetime):
    """What the package standardwebhooks takes for the time: that of `time.time`."""

    @classmethod
    @override
    def now(cls, tz: tzinfo | None = None) -> "MovedClock":
        return cls.fromtimestamp(dispatch.time.time(), tz)


async def test_r_callback_second_try_is_fresh_and_so_is_the_third(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Who refuses what is 300 s old takes each try: the event is the same, the time its own."""
    monkeypatch.setattr(webhooks, "datetime", MovedClock)
    signer = Signer.from_secret({"ed25519": OURS, "hmac": SHARED})
    receiver = webhooks.Webhook(SHARED)
    got: list[Request] = []
    taken: list[str] = []
    codes = [500, 500, 204]

    async def handler(request: web.Request) -> web.Response:
        headers = {name.lower(): value for name, value in request.headers.items()}
        got.append(Request(0, headers, await request.read()))
        taken.append(receiver.verify(got[-1].body, headers)["id"])
        return web.Response(status=codes[len(got) - 1])

    start = 1_777_636_800
    async with receiving(handler) as url:
        for seconds in (0, 2, 402):
            monkeypatch.setattr(dispatch.time, "time", lambda at=start + seconds: float(at))
            await sent(url, signer=signer)
    assert [int(each.headers["webhook-timestamp"]) - start for each in got] == [0, 2, 402]
    assert taken == ["evt_1"] * 3
    assert len({each.id for each in got}) == len({each.body for each in got}) == 1
    for each in got:
        each.verify(signer.public()["ed25519"])
    with pytest.raises(webhooks.WebhookVerificationError, match="too old"):
        receiver.verify(got[1].body, got[1].headers)


async def test_r_callback_who_was_told_and_who_must_not_be_is_audited(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="agentjobs.audit")
    async with receiving(answering(204)) as url:
        await sent(f"{url}?token=s3cret")
        await sent(url, Destinations())
    async with receiving(answering(500)) as url:
        await sent(url)
    lines = [json.loads(r.message) for r in caplog.records if r.name == "agentjobs.audit"]
    assert [each["outcome"] for each in lines] == ["taken", "denied"]
    assert lines[0]["namespace"] == "team-a"
    assert "s3cret" not in str(lines)
