"""Where events may go (R-CALLBACK)."""

import ipaddress
import json
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from yarl import URL

from agentjobs.domain.destinations import DeniedError, Destinations, host_of
from agentjobs.domain.errors import InvalidSpecError

RULES = """[
  {"namespaces": ["team-*"], "hosts": ["*.runtimes.svc", "runtime.example.com"], "ports": [443]},
  {"namespaces": ["lab"], "cidrs": ["10.0.0.0/8", "fd00::/8"]},
  {"namespaces": ["both"], "hosts": ["*.hooks.example"], "cidrs": ["203.0.113.0/24"]},
  {"namespaces": ["names"], "hosts": ["*"]},
  {"namespaces": ["open"], "hosts": ["*"], "cidrs": ["0.0.0.0/0", "::/0"]}
]"""
ALLOWED = Destinations.from_json(RULES, denied=("10.9.9.9", "8.8.4.0/24"))
PUBLIC = "93.184.216.34"
METADATA = "169.254.169.254"


def allows(namespace: str, host: str, address: str) -> bool:
    """Whether a connection may be made."""
    try:
        ALLOWED.check_address(namespace, host, 443, ipaddress.ip_address(address))
    except DeniedError:
        return False
    return True


@pytest.mark.parametrize(
    ("namespace", "url", "allowed"),
    [
        pytest.param("team-a", "https://runtime.example.com/x", True, id="a named host"),
        pytest.param("team-a", "https://RUNTIME.example.com./x", True, id="its other spellings"),
        pytest.param("team-a", "https://a.runtimes.svc/x", True, id="a pattern"),
        pytest.param("team-a", "http://runtime.example.com/x", False, id="another port"),
        pytest.param("other", "https://runtime.example.com/x", False, id="another namespace"),
        pytest.param("team-a", "https://example.org/x", False, id="an unnamed host"),
        pytest.param("lab", "http://10.1.2.3:8080/x", True, id="an address of a network"),
        pytest.param("lab", "http://11.1.2.3:8080/x", False, id="an address outside of it"),
        pytest.param("lab", "http://somewhere/x", True, id="a name that is looked up later"),
        pytest.param("lab", "http://10.9.9.9/x", False, id="the API server"),
        pytest.param("both", "https://a.hooks.example/", True, id="a name that may be inside"),
        pytest.param("both", "https://203.0.113.9/", False, id="an address without its name"),
        pytest.param("both", "http://kubernetes.default.svc/", False, id="the API server's name"),
        pytest.param("names", f"http://{PUBLIC}/x", True, id="a public address"),
        pytest.param("names", "http://10.1.2.3/x", False, id="a private one that nothing names"),
        pytest.param("open", "http://10.1.2.3/x", True, id="a private one that a rule names"),
        pytest.param("open", "http://[2606:4700::1]/x", True, id="a public address of IPv6"),
    ],
)
def test_r_callback_what_can_be_said_before_a_name_is_looked_up(
    namespace: str, url: str, *, allowed: bool
) -> None:
    try:
        ALLOWED.check_url(namespace, url)
    except InvalidSpecError:
        assert not allowed
    else:
        assert allowed


NEVER = [
    "0.0.0.0",  # noqa: S104 - nobody listens there
    "0.1.2.3",
    "127.0.0.1",
    "127.255.255.254",
    METADATA,
    "169.254.170.2",
    "168.63.129.16",
    "100.100.100.200",
    "192.0.0.192",
    "224.0.0.1",
    "239.255.255.250",
    "240.0.0.1",
    "255.255.255.255",
    "10.9.9.9",
    "8.8.4.4",
    "::",
    "::1",
    "fe80::1",
    "fd00:ec2::254",
    "fd20:ce::254",
    "fd00:c1::a9fe:a9fe",
    "ff02::1",
]
INNER = [
    "10.0.0.5",
    "100.64.0.1",
    "172.16.0.1",
    "172.31.255.255",
    "192.0.0.1",
    "192.0.2.1",
    "192.88.99.1",
    "192.168.1.1",
    "198.18.0.1",
    "198.19.255.255",
    "198.51.100.1",
    "203.0.113.9",
    "fc00::1",
    "fd12:3456::1",
    "fec0::1",
    "5f00::1",
    "100::1",
    "2001:2::1",
    "2001:db8::1",
    "3fff::1",
    "4000::1",
    "64:ff9b:1::808:808",
    "2002:808:808::1",
]
CARRIED = {
    "IPv4-mapped": "::ffff:{a}",
    "IPv4-compatible": "::{a}",
    "IPv4-translated": "::ffff:0:{a}",
    "NAT64": "64:ff9b::{a}",
    "local NAT64, 96 bits": "64:ff9b:1:1::{a}",
    "local NAT64, 64 bits": "64:ff9b:1:1:{ab:.2}:{ab:2}{cd:.2}:{cd:2}00:0",
    "local NAT64, 56 bits": "64:ff9b:1:00{ab:.2}:{ab:2}:{cd}::",
    "local NAT64, 48 bits": "64:ff9b:1:{ab}:{cd:.2}:{cd:2}00::",
    "6to4": "2002:{ab}:{cd}::1",
    "Teredo server": "2001:0:{ab}:{cd}:0:ffff:f7f7:f7f7",
    "Teredo client": "2001:0:808:808:0:ffff:{not_ab}:{not_cd}",
    "ISATAP": "2606:4700::5efe:{a}",
    "ISATAP of a public address": "2606:4700::200:5efe:{a}",
}


class Half(str):
    """Four hexadecimal digits; formatted with `.2` the first two, with `2` the others."""

    __slots__ = ()

    def __format__(self, spec: str) -> str:
        return {"": self[:], ".2": self[:2], "2": self[2:]}[spec]


def carried(form: str, address: str) -> str:
    """An address of IPv6 that carries one of IPv4."""
    number = int(ipaddress.IPv4Address(address))
    ab, cd = (Half(f"{half:04x}") for half in (number >> 16, number & 0xFFFF))
    not_ab, not_cd = (f"{int(half, 16) ^ 0xFFFF:04x}" for half in (ab, cd))
    text = form.format(a=address, ab=ab, cd=cd, not_ab=not_ab, not_cd=not_cd)
    return str(ipaddress.IPv6Address(text))


@pytest.mark.parametrize("address", NEVER)
@pytest.mark.parametrize("namespace", ["open", "names"])
def test_r_callback_never_called_whatever_is_allowed(namespace: str, address: str) -> None:
    assert not allows(namespace, "innocent.example.com", address)


@pytest.mark.parametrize("address", INNER)
def test_r_callback_what_is_not_public_is_called_only_where_a_rule_names_it(address: str) -> None:
    assert not allows("names", "innocent.example.com", address)
    assert allows("open", "innocent.example.com", address)


@pytest.mark.parametrize("form", CARRIED.values(), ids=CARRIED)
@pytest.mark.parametrize("address", ["127.0.0.1", METADATA, "168.63.129.16", "8.8.4.4", "10.9.9.9"])
def test_r_callback_never_called_inside_of_another_address(form: str, address: str) -> None:
    assert not allows("open", "innocent.example.com", carried(form, address))


@pytest.mark.parametrize("form", CARRIED.values(), ids=CARRIED)
def test_r_callback_who_names_the_outer_address_has_not_named_the_inner(form: str) -> None:
    inside = carried(form, "192.168.7.7")
    rules = [{"cidrs": ["::/0"]}]
    with pytest.raises(DeniedError):
        Destinations.from_json(json.dumps(rules)).check_address(
            "a", "x", 443, ipaddress.ip_address(inside)
        )
    assert allows("open", "x", inside)


@pytest.mark.parametrize(
    "address", [PUBLIC, "2606:4700::1", f"::ffff:{PUBLIC}", f"64:ff9b::{PUBLIC}"]
)
def test_r_callback_the_public_network_is_open_to_names_that_are_allowed(address: str) -> None:
    assert allows("names", "innocent.example.com", address)


@pytest.mark.parametrize(
    ("host", "address", "allowed"),
    [
        ("a.hooks.example", "203.0.113.9", True),
        ("a.hooks.example", "::ffff:203.0.113.9", True),
        ("a.hooks.example", PUBLIC, False),
        ("a.hooks.example", "10.0.0.5", False),
        ("a.hooks.example", METADATA, False),
        ("elsewhere.example", "203.0.113.9", False),
    ],
)
def test_r_callback_name_and_network_of_a_rule_both_have_to_fit(
    host: str, address: str, *, allowed: bool
) -> None:
    """name-that-points-inside"""
    assert allows("both", host, address) is allowed


FORMS = [
    "2130706433",
    "017700000001",
    "0x7f000001",
    "0x7f.1",
    "0X7F.0.0.1",
    "127.1",
    "127.0.1",
    "0177.0.0.1",
    "127.0.0.01",
    "93.184.216.34.",
    "1.2.3.4.5",
    "256.1.1.1",
    "a.0x",
    "runtime.example.com..",
    "runtime..example.com",
    ".example.com",
    "-a.example.com",
    f"{'a' * 64}.example.com",
    f"{'a.' * 127}example.com",
    "\uff11\uff12\uff17.0.0.1",
    "169\u3002254\u3002169.254",
    "\u2460\u2461\u2466.0.0.1",
    "loc\u0430lhost",
    "%31%32%37.0.0.1",
    "127.0.0.1%20",
    "[fe80::1%25eth0]",
    "[fe80::1%eth0]",
    "[::1]x",
    "[127.0.0.1]",
    "[v1.127]",
    "[::1",
    "::1",
    "u@runtime.example.com",
    "u:p@runtime.example.com",
    "@runtime.example.com",
    "runtime.example.com:443@127.0.0.1",
    "runtime.example.com\\@127.0.0.1",
    "127.0.0.1\\.example.com",
    "127.0.0.1\t",
    "127.0.0.1 x",
    "run\ntime.example.com",
    "runtime.example.com\x00.evil.example",
    "runtime.example.com\x7f",
    "run,time.example.com",
    "runtime.example.com:",
    "runtime.example.com:0",
    "runtime.example.com:+80",
    "runtime.example.com:65536",
    "runtime.example.com:8080:80",
    "",
]


@pytest.mark.parametrize("scheme", ["http", "https"])
@pytest.mark.parametrize("host", FORMS, ids=[ascii(host) for host in FORMS])
def test_r_callback_a_host_that_parsers_read_differently_is_refused(host: str, scheme: str) -> None:
    with pytest.raises(InvalidSpecError, match=r"spec\.callback\.url"):
        ALLOWED.check_url("open", f"{scheme}://{host}/latest")


@pytest.mark.parametrize(
    "url", ["ftp://a/b", "https://", "file:///etc/passwd", "gopher://a/", "//a/b", "http:/a", "a"]
)
def test_r_callback_a_url_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(InvalidSpecError):
        host_of(url)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("https://Runtime.Example.COM.", ("runtime.example.com", 443)),
        ("http://_a.b-c.xn--p1ai:65535/x?y=\u00fc#z", ("_a.b-c.xn--p1ai", 65535)),
        ("http://[2606:4700:0::1]:80", ("2606:4700::1", 80)),
        ("http://10.0.0.1", ("10.0.0.1", 80)),
        ("http://0x.example", ("0x.example", 80)),
    ],
)
def test_r_callback_the_host_of_a_plain_url(url: str, expected: tuple[str, int]) -> None:
    assert host_of(url) == expected


PIECES = st.one_of(
    st.sampled_from(["example.com", "127.0.0.1", "[::1]", "a.b", "0x7f", "1", "localhost"]),
    st.sampled_from([*"@:/\\?#[]%.;&=,+-_ \t\n\0", "%2e", "%40", "//", "xn--", "\u3002"]),
    st.text(max_size=3),
)


@settings(max_examples=20_000 if os.environ.get("AGENTJOBS_SOAK") else 500, deadline=None)
@given(st.sampled_from(["http://", "https://"]), st.lists(PIECES, max_size=8).map("".join))
def test_r_callback_the_host_that_is_checked_is_the_host_that_the_client_calls(
    scheme: str, rest: str
) -> None:
    """Whatever is let through, aiohttp's own reader of URLs reads in the same way."""
    try:
        host, port = host_of(scheme + rest)
    except InvalidSpecError:
        return
    called = URL(scheme + rest)
    assert called.raw_host is not None
    assert called.user is called.password is None
    assert (called.raw_host.removesuffix("."), called.port) == (host, port)


def test_r_callback_nothing_is_allowed_by_default() -> None:
    with pytest.raises(InvalidSpecError, match=r"callbacks\.allow"):
        Destinations().check_url("default", "https://runtime.example.com/")


@pytest.mark.parametrize(
    "text",
    ["{}", "[1]", '[{"host": ["a"]}]', '[{"cidrs": ["x"]}]', "{", '[{"namespaces": ["a"]}]'],
)
def test_a_setting_that_is_wrong_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        Destinations.from_json(text)
