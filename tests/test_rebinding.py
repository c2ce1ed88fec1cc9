"""Names that point inside, or that change their mind: connections are counted (R-CALLBACK)."""

import asyncio
import socket
from typing import Any

import pytest
from aiohttp.abc import AbstractResolver, ResolveResult
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from agentjobs import dispatch
from agentjobs.dispatch import NOT_ALLOWED, Dispatcher, Letter
from agentjobs.domain.callbacks import Outcome, Reply
from agentjobs.domain.destinations import Destinations
from agentjobs.metrics import Metrics
from agentjobs.signing import Signer

SIGNER = Signer({"ed25519": Ed25519PrivateKey.generate()})
BOTH = Destinations.from_json('[{"hosts": ["*.hooks.example"], "cidrs": ["203.0.113.0/24"]}]')
TRIES = 3

ANSWERS = {
    "meta.hooks.example": [["169.254.169.254"]],
    "mixed.hooks.example": [["203.0.113.9", "10.0.0.5"]],
    "v6.hooks.example": [["::ffff:169.254.169.254"]],
    "zone.hooks.example": [["fe80::1%eth0"]],
    "flip.hooks.example": [["203.0.113.9"], ["127.0.0.1"]],
    "none.hooks.example": [["no address at all"]],
    "kubernetes.default.svc": [["10.96.0.1"]],
    "good.hooks.example": [["203.0.113.9", "203.0.113.10"]],
}
"""What each name resolves to, look-up by look-up; the last answer stays."""


class PlayedNames(AbstractResolver):
    """Stands at aiohttp's door in place of DNS."""

    asked: list[str]

    def __init__(self) -> None:
        pass

    async def resolve(self, host: str, port: int = 0, _family: int = 0) -> list[ResolveResult]:
        answers = ANSWERS[host.removesuffix(".")]
        answer = answers[min(self.asked.count(host), len(answers) - 1)]
        self.asked.append(host)
        return [
            ResolveResult(
                hostname=host,
                host=address,
                port=port,
                family=socket.AF_INET6 if ":" in address else socket.AF_INET,
                proto=0,
                flags=socket.AI_NUMERICHOST,
            )
            for address in answer
        ]

    async def close(self) -> None:
        pass


@pytest.fixture
async def connected(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Addresses that a connection was tried to; none is made."""
    tried: list[str] = []

    async def connect(_: socket.socket, address: tuple[Any, ...]) -> None:
        tried.append(address[0])
        raise ConnectionRefusedError

    monkeypatch.setattr(asyncio.get_running_loop(), "sock_connect", connect)
    monkeypatch.setattr(PlayedNames, "asked", [], raising=False)
    monkeypatch.setattr(dispatch, "DefaultResolver", PlayedNames)
    return tried


async def tried(url: str) -> list[Outcome]:
    """Hand in an event three times."""
    told: asyncio.Queue[str] = asyncio.Queue()
    dispatcher: Dispatcher[str] = Dispatcher(SIGNER, BOTH, told.put_nowait, Metrics())
    outcomes: list[Outcome] = []
    for _ in range(TRIES):
        dispatcher.submit("key", Letter("e", "team-a", url, b"{}"))
        await asyncio.wait_for(told.get(), 10)
        outcomes.append(dispatcher.outcomes("key")["e"])
        dispatcher.settle("key", ["e"])
    await dispatcher.close()
    return outcomes


@pytest.mark.parametrize(
    "url",
    [
        pytest.param("https://meta.hooks.example/", id="a metadata"),
        pytest.param("https://mixed.hooks.example/", id="b one bad address among several"),
        pytest.param("https://v6.hooks.example/", id="c metadata inside of IPv6"),
        pytest.param("https://zone.hooks.example/", id="link-local with its zone"),
        pytest.param("https://none.hooks.example/", id="an answer that is no address"),
        pytest.param("http://2130706433:19002/", id="e loopback as a number"),
        pytest.param("http://[fd00:ec2::254]/", id="f metadata of IPv6"),
        pytest.param("http://kubernetes.default.svc/", id="g the API server's name"),
    ],
)
async def test_r_callback_name_that_points_inside(connected: list[str], url: str) -> None:
    outcomes = await tried(url)
    assert [(each.reply, each.error) for each in outcomes] == [(Reply.FAILED, NOT_ALLOWED)] * TRIES
    assert connected == []


async def test_r_callback_name_that_points_inside_at_the_second_look(connected: list[str]) -> None:
    """What was checked is what is connected to; each try looks up once, for itself."""
    outcomes = await tried("https://flip.hooks.example/")
    errors = [each.error for each in outcomes]
    assert errors == ["no connection to the receiver", NOT_ALLOWED, NOT_ALLOWED]
    assert connected == ["203.0.113.9"]
    assert len(PlayedNames.asked) == TRIES, "once for each try"


async def test_r_callback_a_name_whose_addresses_are_all_allowed_is_called(
    connected: list[str],
) -> None:
    await tried("https://good.hooks.example./")
    assert set(connected) == {"203.0.113.9", "203.0.113.10"}
