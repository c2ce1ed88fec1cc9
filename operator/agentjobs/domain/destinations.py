"""Where events may be sent: nowhere, unless the platform says so (R-CALLBACK)."""

import fnmatch
import ipaddress
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Self
from urllib.parse import urlsplit

from agentjobs.domain.errors import AgentJobError, InvalidSpecError

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

NEVER = tuple(
    ipaddress.ip_network(text)
    for text in (
        "0.0.0.0/8",
        "169.254.0.0/16",  # link-local, cloud metadata
        "224.0.0.0/4",
        "240.0.0.0/4",
        "::/128",
        "fe80::/10",
        "fd00:ec2::254/128",  # cloud metadata
        "ff00::/8",
    )
)
"""Denied whatever the platform allows."""
NAT64 = ipaddress.ip_network("64:ff9b::/96")


class DeniedError(AgentJobError):
    """An address that no event may be sent to."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One permission of the platform."""

    namespaces: tuple[str, ...] = ("*",)
    """Patterns of namespaces whose jobs it is for."""
    hosts: tuple[str, ...] = ()
    """Patterns of host names."""
    cidrs: tuple[Network, ...] = ()
    """Networks whose addresses may be called, by whatever name."""
    ports: tuple[int, ...] = ()
    """Ports; none: any."""


@dataclass(frozen=True, slots=True)
class Destinations:
    """All permissions."""

    rules: tuple[Rule, ...] = ()
    denied: tuple[Network, ...] = ()
    """Denied besides: the API server."""
    insecure_loopback: bool = False
    """Loopback addresses are like others. For tests on one machine only."""

    @classmethod
    def from_json(
        cls, text: str, *, denied: Iterable[str] = (), insecure_loopback: bool = False
    ) -> Self:
        """Read rules: a JSON list of {namespaces, hosts, cidrs, ports}.

        :raises ValueError: it is none; the message says where.
        """
        rules = json.loads(text) if text else []
        if not isinstance(rules, list):
            raise ValueError("a JSON list of rules is required")  # noqa: TRY004 - text, not a type
        return cls(
            rules=tuple(_rule(rule) for rule in rules),
            denied=tuple(ipaddress.ip_network(each) for each in denied),
            insecure_loopback=insecure_loopback,
        )

    def check_url(self, namespace: str, url: str) -> None:
        """Check at acceptance what can be said without looking up a name.

        :raises InvalidSpecError: nothing allows this destination.
        """
        host, port = host_of(url)
        rules = self._rules(namespace, port)
        literal = as_address(host)
        if literal is not None:
            try:
                self.check_address(namespace, host, port, literal)
            except DeniedError as error:
                raise InvalidSpecError(f"spec.callback.url: {error}") from error
        elif not any(rule.cidrs or _matches(host, rule.hosts) for rule in rules):
            raise InvalidSpecError(
                f"spec.callback.url: {host}:{port} is not an allowed destination for namespace "
                f"{namespace}; the platform's setting callbacks.allow decides"
            )

    def check_address(self, namespace: str, host: str, port: int, address: Address) -> None:
        """Check what is about to be connected to.

        :raises DeniedError: this address may not be called.
        """
        for plain in unwrapped(address):
            if plain.is_loopback and self.insecure_loopback:
                continue
            if any(plain in network for network in (*NEVER, *self.denied)):
                raise DeniedError(f"{host} is at {address}, which is never called")
            if plain.is_loopback:
                raise DeniedError(f"{host} is at {address}, a loopback address")
        for rule in self._rules(namespace, port):
            if _matches(host, rule.hosts) or any(address in network for network in rule.cidrs):
                return
        raise DeniedError(
            f"{host}:{port} at {address} is not an allowed destination for namespace {namespace}"
        )

    def _rules(self, namespace: str, port: int) -> list[Rule]:
        return [
            rule
            for rule in self.rules
            if _matches(namespace, rule.namespaces) and (not rule.ports or port in rule.ports)
        ]


def host_of(url: str) -> tuple[str, int]:
    """Host (lower case, no brackets, no final dot) and port of a URL.

    A host that is not ASCII is refused: the client normalizes it (RFC 5895), full-width digits to
    an address that nobody has checked.

    :raises InvalidSpecError: it is no http or https URL, or carries a user name.
    """
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise InvalidSpecError(f"spec.callback.url: {error}") from error
    if parts.scheme not in {"http", "https"} or not host:
        raise InvalidSpecError("spec.callback.url: an http or https URL is required")
    if parts.username or parts.password:
        raise InvalidSpecError("spec.callback.url: user names and passwords are not allowed")
    if not host.isascii():
        raise InvalidSpecError("spec.callback.url: the host must be written in ASCII (xn--…)")
    return host.rstrip(".").lower(), port or (443 if parts.scheme == "https" else 80)


def as_address(host: str) -> Address | None:
    """The address that a host is written as, if it is one."""
    try:
        return ipaddress.ip_address(host.split("%", 1)[0])
    except ValueError:
        return None


def unwrapped(address: Address) -> tuple[Address, ...]:
    """An address and those that it carries inside: IPv4-mapped, 6to4, Teredo, NAT64."""
    if isinstance(address, ipaddress.IPv4Address):
        return (address,)
    inner = [address.ipv4_mapped, address.sixtofour, *(address.teredo or ())]
    if address in NAT64:
        inner.append(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
    return (address, *(each for each in inner if each is not None))


def _matches(value: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(value, pattern) for pattern in patterns)


def _rule(body: Any) -> Rule:
    if not isinstance(body, dict) or set(body) - {"namespaces", "hosts", "cidrs", "ports"}:
        raise ValueError(f"a rule has namespaces, hosts, cidrs, ports: {body!r}")
    return Rule(
        namespaces=tuple(body.get("namespaces") or ("*",)),
        hosts=tuple(str(host).lower() for host in body.get("hosts") or ()),
        cidrs=tuple(ipaddress.ip_network(cidr) for cidr in body.get("cidrs") or ()),
        ports=tuple(int(port) for port in body.get("ports") or ()),
    )
