"""Where events may go (R-CALLBACK)."""

import ipaddress

import pytest

from agentjobs.domain.destinations import DeniedError, Destinations, host_of
from agentjobs.domain.errors import InvalidSpecError

RULES = """[
  {"namespaces": ["team-*"], "hosts": ["*.runtimes.svc", "runtime.example.com"], "ports": [443]},
  {"namespaces": ["lab"], "cidrs": ["10.0.0.0/8", "fd00::/8"]},
  {"namespaces": ["open"], "hosts": ["*"], "cidrs": ["0.0.0.0/0", "::/0"]}
]"""
ALLOWED = Destinations.from_json(RULES, denied=("10.9.9.9",))


@pytest.mark.parametrize(
    ("namespace", "url", "allowed"),
    [
        pytest.param("team-a", "https://runtime.example.com/x", True, id="a named host"),
        pytest.param("team-a", "https://RUNTIME.example.com./x", True, id="its other spellings"),
        pytest.param("team-a", "https://a.runtimes.svc/x", True, id="a pattern"),
        pytest.param("team-a", "http://runtime.example.com/x", False, id="another port"),
        pytest.param("other", "https://runtime.example.com/x", False, id="another namespace"),
        pytest.param("team-a", "https://example.org/x", False, id="an unnamed host"),
        pytest.param("team-a", "https://u:p@runtime.example.com/x", False, id="a password"),
        pytest.param("lab", "http://10.1.2.3:8080/x", True, id="an address of a network"),
        pytest.param("lab", "http://11.1.2.3:8080/x", False, id="an address outside of it"),
        pytest.param("lab", "http://somewhere/x", True, id="a name that is looked up later"),
        pytest.param("lab", "http://10.9.9.9/x", False, id="the API server"),
        pytest.param("open", "http://169.254.169.254/latest", False, id="cloud metadata"),
        pytest.param("open", "http://127.0.0.1/x", False, id="loopback"),
        pytest.param("open", "http://[::1]/x", False, id="loopback of IPv6"),
        pytest.param("open", "http://[::ffff:127.0.0.1]/x", False, id="loopback inside of IPv6"),
        pytest.param("open", "http://[64:ff9b::a9fe:a9fe]/x", False, id="metadata behind NAT64"),
        pytest.param("open", "http://[2002:7f00:1::]/x", False, id="loopback behind 6to4"),
        pytest.param("open", "http://[fe80::1]/x", False, id="link-local"),
        pytest.param("open", "http://0.0.0.0/x", False, id="any"),
        pytest.param("open", "http://[::]/x", False, id="any of IPv6"),
        pytest.param("open", "http://93.184.216.34/x", True, id="a public address"),
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


@pytest.mark.parametrize(
    "address", ["169.254.169.254", "127.0.0.1", "10.9.9.9", "::ffff:169.254.169.254", "fe80::1"]
)
def test_r_callback_a_name_that_points_inside_is_refused_at_connect(address: str) -> None:
    with pytest.raises(DeniedError):
        ALLOWED.check_address("open", "innocent.example.com", 443, ipaddress.ip_address(address))


def test_r_callback_nothing_is_allowed_by_default() -> None:
    with pytest.raises(InvalidSpecError, match=r"callbacks\.allow"):
        Destinations().check_url("default", "https://runtime.example.com/")


@pytest.mark.parametrize("namespace", ["lab", "open"])
@pytest.mark.parametrize("host", ["\uff11\uff16\uff19.254.169.254", "169\u3002254\u3002169.254"])
def test_r_callback_digits_that_the_client_would_make_an_address_of_are_refused(
    namespace: str, host: str
) -> None:
    with pytest.raises(InvalidSpecError, match="ASCII"):
        ALLOWED.check_url(namespace, f"http://{host}/latest")


@pytest.mark.parametrize("url", ["ftp://a/b", "https://", "https://a:99999/", "https://[::1/"])
def test_a_url_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(InvalidSpecError):
        host_of(url)


@pytest.mark.parametrize("text", ["{}", "[1]", '[{"host": ["a"]}]', '[{"cidrs": ["x"]}]', "{"])
def test_a_setting_that_is_wrong_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        Destinations.from_json(text)
