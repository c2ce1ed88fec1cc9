"""Where events may be sent: nowhere, unless the platform says so (R-CALLBACK)."""

import fnmatch
import ipaddress
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self
from urllib.parse import urlsplit

from agentjobs.domain.errors import AgentJobError, InvalidSpecError

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network


def _networks(*texts: str) -> tuple[Network, ...]:
    return tuple(ipaddress.ip_network(text) for text in texts)


NEVER: Final = _networks(
    "0.0.0.0/8",
    "169.254.0.0/16",  # link-local; metadata of most clouds
    "168.63.129.16/32",  # Azure's agent
    "100.100.100.200/32",  # metadata: Alibaba
    "192.0.0.192/32",  # metadata: Oracle
    "224.0.0.0/4",
    "240.0.0.0/4",
    "::/128",
    "fe80::/10",
    "fd00:ec2::/32",  # metadata and other services of a machine: AWS
    "fd20:ce::254/128",  # Google
    "fd00:c1::a9fe:a9fe/128",  # Oracle
    "ff00::/8",
)
"""Denied whatever the platform allows. Loopback has a setting of its own."""
INNER: Final = _networks(
    # The registries of special purposes (RFC 6890): not of the public network.
    "10.0.0.0/8",
    "100.64.0.0/10",
    "172.16.0.0/12",
    "192.0.0.0/24",
    "192.0.2.0/24",
    "192.88.99.0/24",
    "192.168.0.0/16",
    "198.18.0.0/15",
    "198.51.100.0/24",
    "203.0.113.0/24",
    "2001::/23",  # Teredo, benchmarks, identifiers
    "2001:db8::/32",
    "2002::/16",  # 6to4
    "3fff::/20",
)
"""Denied unless a rule names them among its networks."""
NAT64: Final = ipaddress.IPv6Network("64:ff9b::/96")
LOCAL_NAT64: Final = ipaddress.IPv6Network("64:ff9b:1::/48")
PUBLIC: Final = (ipaddress.IPv6Network("2000::/3"), NAT64)
"""All of IPv6 that is not private, reserved or unknown: the rest is INNER, too."""
CARRIERS: Final = (
    NAT64,
    ipaddress.IPv6Network("::/96"),  # IPv4-compatible
    ipaddress.IPv6Network("::ffff:0:0:0/96"),  # IPv4-translated (RFC 2765)
)
"""Their last 32 bits are an address of IPv4."""
ISATAP: Final = frozenset({0x0000_5EFE, 0x0200_5EFE})
"""The third quarter of an address of any network whose last quarter is one of IPv4 (RFC 5214)."""
AUTHORITY: Final = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(:[0-9]{1,5})?", re.IGNORECASE)
"""Host and port, nothing else: no user, no percent-encoding, no zone."""
UNPRINTABLE: Final = re.compile(r"[\x00-\x20\x7f\\]")
"""Some parsers pass over these, others end the host there."""
LABEL: Final = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?")
NUMBER: Final = re.compile(r"[0-9]+|0x[0-9a-f]*")
LONGEST_HOST: Final = 253
DEFAULT_PORTS: Final = {"http": 80, "https": 443}


class DeniedError(AgentJobError):
    """An address that no event may be sent to."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One permission of the platform: all that it names has to fit."""

    namespaces: tuple[str, ...] = ("*",)
    """Patterns of namespaces whose jobs it is for."""
    hosts: tuple[str, ...] = ()
    """Patterns of host names; none: any, by its address alone."""
    cidrs: tuple[Network, ...] = ()
    """Networks that the address must be of; none: the public network."""
    ports: tuple[int, ...] = ()
    """Ports; none: any."""

    def names(self, host: str) -> bool:
        """Whether it may be for a host, whatever its address."""
        return not self.hosts or _matches(host, self.hosts)

    def reaches(self, address: Address) -> bool:
        """Whether it is for an address, and for all that this carries inside."""
        if self.cidrs:
            return _within(address, self.cidrs) and all(
                _within(each, self.cidrs) for each in unwrapped(address) if _inner(each)
            )
        return not any(_inner(each) for each in unwrapped(address))


@dataclass(frozen=True, slots=True)
class Destinations:
    """All permissions."""

    rules: tuple[Rule, ...] = ()
    denied: tuple[Network, ...] = ()
    """Denied besides: the API server, and what the platform says."""
    insecure_loopback: bool = False
    """Loopback addresses are like public ones. For tests on one machine only."""

    @classmethod
    def from_json(
        cls, text: str, *, denied: Iterable[str] = (), insecure_loopback: bool = False
    ) -> Self:
        """Read rules: a JSON list of {namespaces, hosts, cidrs, ports}.

        :param denied: networks and addresses that are never called.
        :raises ValueError: it is none; the message says where.
        """
        rules = json.loads(text) if text else []
        if not isinstance(rules, list):
            raise ValueError("a JSON list of rules is required")  # noqa: TRY004 - text, not a type
        return cls(
            rules=tuple(_rule(rule) for rule in rules),
            denied=_networks(*denied),
            insecure_loopback=insecure_loopback,
        )

    def check_url(self, namespace: str, url: str) -> None:
        """Check at acceptance what can be said without looking up a name.

        :raises InvalidSpecError: nothing allows this destination.
        """
        host, port = host_of(url)
        literal = as_address(host)
        if literal is not None:
            try:
                self.check_address(namespace, host, port, literal)
            except DeniedError as error:
                raise InvalidSpecError(f"spec.callback.url: {error}") from error
        elif not any(rule.names(host) for rule in self._rules(namespace, port)):
            raise InvalidSpecError(
                f"spec.callback.url: {host}:{port} is not an allowed destination for namespace "
                f"{namespace}; the platform's setting callbacks.allow decides"
            )

    def check_found(self, namespace: str, url: str, addresses: Iterable[Address]) -> None:
        """Check at acceptance what a name resolves to now; at connect that is checked again.

        :raises InvalidSpecError: one of the addresses may not be called. Which, and why, is not
            said: what names have inside is not for tenants.
        """
        host, port = host_of(url)
        try:
            for address in addresses:
                self.check_address(namespace, host, port, address)
        except DeniedError as error:
            raise InvalidSpecError(
                f"spec.callback.url: {host}:{port} leads to where no event of namespace "
                f"{namespace} may be sent"
            ) from error

    def check_address(self, namespace: str, host: str, port: int, address: Address) -> None:
        """Check what is about to be connected to.

        :raises DeniedError: this address may not be called.
        """
        for each in unwrapped(address):
            if each.is_loopback:
                if not self.insecure_loopback:
                    raise DeniedError(f"{host} is at {address}, a loopback address")
            elif _within(each, NEVER) or _within(each, self.denied):
                raise DeniedError(f"{host} is at {address}, which is never called")
        plain = unwrapped(address)[0]
        rules = self._rules(namespace, port)
        if not any(rule.names(host) and rule.reaches(plain) for rule in rules):
            raise DeniedError(
                f"{host}:{port} at {address} is not an allowed destination for namespace "
                f"{namespace}"
            )

    def _rules(self, namespace: str, port: int) -> list[Rule]:
        return [
            rule
            for rule in self.rules
            if _matches(namespace, rule.namespaces) and (not rule.ports or port in rule.ports)
        ]


def host_of(url: str) -> tuple[str, int]:
    """Host (lower case, no brackets, no final dot) and port of a URL.

    Refused is whatever one parser reads in another way than the next, so that the host that is
    checked is the host that is called: what is not ASCII, which clients normalize (RFC 5895) to
    digits and dots, and the numbers that inet_aton takes for addresses (`127.1`, `0x7f.1`).

    :raises InvalidSpecError: it is no http or https URL of a plain host.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise _no_host(str(error)) from error
    if parts.scheme not in DEFAULT_PORTS or not parts.netloc:
        raise _no_host("an http or https URL is required")
    if "@" in parts.netloc:
        raise _no_host("user names and passwords are not allowed")
    if not parts.netloc.isascii():
        raise _no_host("the host must be written in ASCII (xn--…)")
    written = AUTHORITY.fullmatch(parts.netloc)
    if UNPRINTABLE.search(url) or not written or port == 0:
        raise _no_host("a plain host name or address is required, and no port but 1 to 65535")
    return _host(written[1].lower()), port or DEFAULT_PORTS[parts.scheme]


def as_address(host: str) -> Address | None:
    """The address that a host is written as, if it is one."""
    try:
        return ipaddress.ip_address(host.split("%", 1)[0])
    except ValueError:
        return None


def unwrapped(address: Address) -> tuple[Address, ...]:
    """What is connected to, and the addresses that it carries inside, where translators send it.

    An IPv4-mapped address is one of IPv4, for the kernel too.
    """
    if isinstance(address, ipaddress.IPv6Address):
        return (address.ipv4_mapped,) if address.ipv4_mapped else (address, *_carried(address))
    return (address,)


def _carried(address: ipaddress.IPv6Address) -> Iterator[Address]:
    """IPv4-compatible, -translated, ISATAP, NAT64, 6to4, Teredo."""
    number = int(address)
    carries = _within(address, CARRIERS) or number >> 32 & 0xFFFF_FFFF in ISATAP
    if carries and not (address.is_unspecified or address.is_loopback):
        yield ipaddress.IPv4Address(number & 0xFFFF_FFFF)
    if address in LOCAL_NAT64:
        yield from _layouts(number)
    if address.sixtofour:
        yield address.sixtofour
    yield from address.teredo or ()


def _layouts(number: int) -> Iterator[ipaddress.IPv4Address]:
    """What a translator with a prefix of 48, 56, 64 or 96 bits would read (RFC 6052, 2.2).

    Bits 64 to 71 are left out. What begins with a zero is part of a longer prefix, or of the zeros
    after a shorter one.
    """
    bits = number >> 64 << 56 | number & (1 << 56) - 1
    for at in (48, 56, 64, 88):
        found = ipaddress.IPv4Address(bits >> (120 - at - 32) & 0xFFFF_FFFF)
        if int(found) >> 24:
            yield found


def _inner(address: Address) -> bool:
    """Whether an address is of no public network. Loopback is told apart before."""
    if address.is_loopback:
        return False
    outside = address.version == 6 and not _within(address, PUBLIC)  # noqa: PLR2004 - IPv6
    return outside or _within(address, INNER)


def _within(address: Address, networks: Iterable[Network]) -> bool:
    return any(address in network for network in networks)


def _host(written: str) -> str:
    """A host as it is compared.

    :raises InvalidSpecError: it is no name, and no address as ipaddress writes them.
    """
    if written.startswith("["):
        address = as_address(written[1:-1])
        if not isinstance(address, ipaddress.IPv6Address):
            raise _no_host(f"{written} is no address")
        return str(address)
    host = written.removesuffix(".")
    labels = host.split(".")
    if NUMBER.fullmatch(labels[-1]):
        if host != written or not isinstance(as_address(host), ipaddress.IPv4Address):
            raise _no_host(f"{written} is no address; four decimal numbers are")
    elif len(host) > LONGEST_HOST or not all(LABEL.fullmatch(label) for label in labels):
        raise _no_host(f"{written} is no host name")
    return host


def _no_host(why: str) -> InvalidSpecError:
    return InvalidSpecError(f"spec.callback.url: {why}")


def _matches(value: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(value, pattern) for pattern in patterns)


def _rule(body: Any) -> Rule:
    if not isinstance(body, dict) or set(body) - {"namespaces", "hosts", "cidrs", "ports"}:
        raise ValueError(f"a rule has namespaces, hosts, cidrs, ports: {body!r}")
    if not body.get("hosts") and not body.get("cidrs"):
        raise ValueError(f"a rule names hosts, cidrs, or both: {body!r}")
    return Rule(
        namespaces=tuple(body.get("namespaces") or ("*",)),
        hosts=tuple(str(host).lower() for host in body.get("hosts") or ()),
        cidrs=_networks(*(body.get("cidrs") or ())),
        ports=tuple(int(port) for port in body.get("ports") or ()),
    )
