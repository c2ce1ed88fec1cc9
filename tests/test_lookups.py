"""Where receivers' names lead, before anything is run for them (R-CALLBACK)."""

import asyncio
import socket
import threading
from ipaddress import ip_address
from typing import Any

import pytest
from kubernetes.client import Configuration

from agentjobs import lookups
from agentjobs.domain.destinations import DeniedError
from agentjobs.kube import Access
from agentjobs.lookups import LookUps
from agentjobs.main import destinations_of
from agentjobs.settings import Settings, SettingsError


async def test_r_callback_all_addresses_of_a_name_are_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []

    def answer(host: str, *_: object, **__: object) -> list[Any]:
        asked.append(host)
        four, six = ("203.0.113.9", 0), ("fe80::1%eth0", 0, 0, 1)
        return [(socket.AF_INET, 0, 0, "", four), (socket.AF_INET6, 0, 0, "", six)]

    monkeypatch.setattr(socket, "getaddrinfo", answer)
    names = LookUps()
    found = await asyncio.gather(*[names.addresses_of("a.example.com") for _ in range(20)])
    assert set(found) == {(ip_address("203.0.113.9"), ip_address("fe80::1"))}
    assert asked == ["a.example.com"], "a burst of starts asks once"


@pytest.mark.parametrize("error", [socket.gaierror(-2, "unknown"), UnicodeError("label too long")])
async def test_r_callback_a_name_that_nobody_knows_has_no_addresses(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    assert await LookUps().addresses_of("a.example.com") == ()


async def test_r_callback_names_that_nobody_answers_for_hold_up_nobody_for_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lookups, "PATIENCE_SECONDS", 0.05)
    end = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: end.wait(10))
    names = LookUps()
    many = [names.addresses_of(f"{n}.example.com") for n in range(3 * lookups.THREADS)]
    try:
        async with asyncio.timeout(5):
            assert set(await asyncio.gather(*many)) == {()}
            assert await asyncio.to_thread(lambda: "others have threads of their own")
    finally:
        end.set()


@pytest.mark.parametrize("server", ["https://api.example.com:6443", "https://203.0.113.7"])
async def test_r_callback_the_api_server_is_never_called_under_any_of_its_names(
    monkeypatch: pytest.MonkeyPatch, server: str
) -> None:
    inside = {"api.example.com": "203.0.113.7", "kubernetes.default.svc": "10.96.0.1"}

    def answer(host: str, *_: object, **__: object) -> list[Any]:
        return [(socket.AF_INET, 0, 0, "", (inside[host], 0))]

    monkeypatch.setattr(socket, "getaddrinfo", answer)
    settings = Settings(
        callbacks_allow='[{"cidrs": ["0.0.0.0/0"]}]', callbacks_deny=("10.1.0.0/16",)
    )
    destinations = await destinations_of(settings, Access(server, Configuration()))
    for address in ("203.0.113.7", "10.96.0.1", "10.1.2.3"):
        with pytest.raises(DeniedError, match="never called"):
            destinations.check_address("a", "x", 443, ip_address(address))
    destinations.check_address("a", "x", 443, ip_address("10.2.0.1"))


async def test_a_network_that_is_none_is_a_fault_of_the_settings() -> None:
    with pytest.raises(SettingsError, match="CALLBACKS"):
        await destinations_of(Settings(callbacks_deny=("nodes",)), Access("", Configuration()))
