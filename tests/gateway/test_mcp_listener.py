"""The gate of the MCP port: who comes in, and bodies that never arrive."""

import asyncio
from typing import Any

import pytest

from agentjobs.gateway.mcp import listener
from agentjobs.gateway.mcp.listener import VERSION, VISITOR, Gate, Message, Receive, Send
from agentjobs.gateway.reviews import Caller

AGENT = Caller("system:serviceaccount:team-a:agent")
WEB = "https://agents.example.com"


class Reviews:
    async def authenticate(self, _: str, *, secure: bool) -> Caller:
        assert not secure
        return AGENT


class BrokenOffError(Exception):
    """As the library has one."""


async def reads(scope: Message, receive: Receive, send: Send) -> None:
    """Read a body as the library does, and answer it."""
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise BrokenOffError
        more = bool(message.get("more_body"))
    assert scope[VISITOR].caller == AGENT
    await send({"type": "http.response.start", "status": 200, "headers": []})


async def breaks(_: Message, receive: Receive, __: Send) -> None:
    await receive()
    raise ZeroDivisionError


async def asked(*messages: Message, inside: Any = reads, **change: Any) -> list[Message]:
    """Send a request; return what is answered."""
    waiting, sent = list(messages), []

    async def receive() -> Message:
        if not waiting:
            await asyncio.Event().wait()
        return waiting.pop(0)

    async def send(message: Message) -> None:
        sent.append(message)

    headers = {"mcp-protocol-version": VERSION, **change.pop("headers", {})}
    scope = {
        "type": "http", "method": "POST", "path": "/mcp", "scheme": "http", **change,
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
    }  # fmt: skip
    reviews: Any = Reviews()
    gate = Gate(inside, reviews, not_ready=lambda: "", origins=frozenset({WEB}))
    await gate(scope, receive, send)
    return sent


PIECE = {"type": "http.request", "body": b"{", "more_body": True}
LAST = {"type": "http.request", "body": b"}", "more_body": False}
GONE = {"type": "http.disconnect"}


async def status(*messages: Message, **change: Any) -> int:
    sent = await asked(*messages, **change)
    return int(sent[0]["status"])


async def test_a_body_that_does_not_arrive_in_time_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(listener, "BODY_SECONDS", 0.01)
    started, _ = await asked(PIECE)
    assert started["status"] == 408
    assert (b"connection", b"close") in started["headers"]


async def test_nobody_is_answered_who_has_gone() -> None:
    assert await asked(PIECE, GONE) == []


async def test_what_breaks_inside_is_no_fault_of_the_body() -> None:
    with pytest.raises(ZeroDivisionError):
        await asked(LAST, inside=breaks)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        pytest.param({}, 200, id="as it should be"),
        pytest.param({"path": "/mcp/team-b"}, 200, id="a namespace"),
        pytest.param({"path": "/mcp/Team"}, 404, id="no namespace"),
        pytest.param({"path": "/v1/jobs"}, 404, id="elsewhere"),
        pytest.param({"method": "GET"}, 405, id="GET"),
        pytest.param({"headers": {"origin": WEB}}, 200, id="a page that may"),
        pytest.param({"headers": {"origin": "https://evil.example.com"}}, 403, id="a page"),
        pytest.param({"headers": {"origin": "null"}}, 403, id="a page of nowhere"),
        pytest.param({"headers": {"mcp-protocol-version": "2025-06-18"}}, 400, id="older"),
    ],
)
async def test_r_auth_who_comes_in(change: dict[str, Any], code: int) -> None:
    assert await status(LAST, **change) == code
