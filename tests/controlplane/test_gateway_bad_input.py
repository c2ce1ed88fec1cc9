"""What strangers send to the gateway: a problem document or a closed connection, and no more.

Never a 500, a stuck connection, somebody else's data, or a word of theirs in the log.
"""

import json
import resource
import secrets
import sys
import time
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature

from agentjobs.gateway import server
from tests.cluster import ControlPlane
from tests.controlplane.stage import Place, Scenario, Stage, scenario, told_in
from tests.controlplane.tenants import (
    CALLS,
    READ,
    Account,
    Tenant,
    id_in,
    unknown_id,
    until_offered,
    use,
    wait_until,
)
from tests.gateway_process import Agent, GatewayProcess, Reply
from tests.wire import Wire

pytestmark = pytest.mark.controlplane

MARK = "xyzzy"
"""In everything that is sent: it must be in no log."""
TOOL, STRICT = "open", "strict"
LETTERS = {
    "type": "object",
    "additionalProperties": {"type": "array", "items": {"type": "string"}},
}
LARGEST = server.MAX_BODY_BYTES
SHOWN_OUT_WITHIN = 10.0
REMEMBERED_FOR = 10.0
"""Seconds for which a token may be taken that the API server takes no longer."""
SLACK = 4.0
"""Seconds that a loaded machine may add."""
FILES = 4096
SHARE = server.MAX_BUSY // 2
GREEDY = SHARE + 20
POLLS = 1000
POLL_KIB = 40
"""Of memory for each long poll. A connection with its task, request and timer takes some 11 KiB;
what is beyond 40 would let the chart's limit of 512 MiB be reached below the bound on long polls,
5,000, with TLS (another 40 KiB) and 100 MiB of program."""


@dataclass(frozen=True)
class Site:
    """A gateway, and two tenants who know nothing of each other."""

    gateway: GatewayProcess
    alice: Account
    bob: Account
    job: str
    """Of alice."""
    bobs_job: str
    key_file: Path
    """Signs tokens of ServiceAccounts."""

    def wire(self) -> Wire:
        return Wire(self.gateway.port)

    def request(self, line: str, *headers: str, body: bytes = b"") -> bytes:
        """A request of alice."""
        every = (line, "Host: gateway", f"Authorization: Bearer {self.alice.agent.token}", *headers)
        return "\r\n".join((*every, "", "")).encode("latin-1") + body

    def post(self, *headers: str, body: bytes = b"") -> bytes:
        """A start by alice; its length is the caller's to say."""
        key = f"Idempotency-Key: {MARK}-{secrets.token_hex(8)}"
        return self.request("POST /v1/jobs HTTP/1.1", key, *headers, body=body)

    def start(self, body: bytes, content_type: str = "application/json", *headers: str) -> Reply:
        """A start by alice with a body that is sent whole."""
        of_body = (f"Content-Type: {content_type}", f"Content-Length: {len(body)}")
        with self.wire() as wire:
            sent = self.post("Connection: close", *of_body, *headers, body=body)
            return wire.send(sent).until_closed().reply


@pytest.fixture(scope="module")
def site(stage: Stage, control_plane: ControlPlane) -> Iterator[Site]:
    gateway = stage.gateway("bad-input")
    people = []
    for namespace in ("bad-input-alice", "bad-input-bob"):
        tenant = Tenant.new(stage, namespace)
        tenant.usable_tool(TOOL, inputSchema={"type": "object"})
        tenant.usable_tool(STRICT, inputSchema=LETTERS)
        people.append(tenant.account("agent", CALLS, use(TOOL, STRICT)))
        until_offered(people[-1].agent, STRICT, gateway)
    alice, bob = people
    jobs = [id_in(each.agent.start(gateway, f"{MARK}-first", TOOL)) for each in people]
    key_file = control_plane.directory / "pki/service-account.key"
    yield Site(gateway, alice, bob, *jobs, key_file)
    gateway.close()


@pytest.fixture(autouse=True)
def quiet(request: pytest.FixtureRequest) -> Iterator[None]:
    """Hold the gateway to its log: no traceback, no token, nothing that a caller wrote."""
    if "site" not in request.fixturenames:
        yield
        return
    this: Site = request.getfixturevalue("site")
    before = len(this.gateway.log)
    yield
    assert this.gateway.running
    assert_quiet(this.gateway, this.alice.agent.token, this.bob.agent.token, since=before)


def assert_quiet(gateway: GatewayProcess, *tokens: str, since: int = 0) -> None:
    log = gateway.log[since:]
    for word in ("Traceback", MARK, "ERROR", *tokens):
        assert word not in log, log[-3000:]


# --- HTTP that is none


def chunked(*lines: str) -> Callable[[Site], bytes]:
    body = "".join(f"{line}\r\n" for line in lines).encode("latin-1")
    return lambda site: site.post(
        "Content-Type: application/json", "Transfer-Encoding: chunked", body=body
    )


def posted(*headers: str, body: bytes = b"{}") -> Callable[[Site], bytes]:
    return lambda site: site.post("Content-Type: application/json", *headers, body=body)


def got(*headers: str, line: str = f"GET /v1/jobs?tool={MARK} HTTP/1.1") -> Callable[[Site], bytes]:
    return lambda site: site.request(line, *headers)


SECOND = b"GET /healthz HTTP/1.1\r\nHost: gateway\r\n\r\n"
BROKEN: dict[str, Callable[[Site], bytes]] = {
    "no HTTP": lambda _: b"xyzzy\r\n\r\n",
    "TLS": lambda _: b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(100),
    "HTTP/2": lambda _: b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "HTTP/0.9": lambda _: b"GET /healthz\r\n\r\n",
    "HTTP/1.2": lambda _: b"GET /healthz HTTP/1.2\r\nHost: gateway\r\n\r\n",
    "HTTP/2.0 in text": lambda _: b"GET /healthz HTTP/2.0\r\nHost: gateway\r\n\r\n",
    "unknown method": lambda _: b"XYZZY /healthz HTTP/1.1\r\nHost: gateway\r\n\r\n",
    "no host": lambda _: b"GET /healthz HTTP/1.1\r\n\r\n",
    "two hosts": lambda _: b"GET /healthz HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
    "bare line feeds": lambda _: b"GET /healthz HTTP/1.1\nHost: gateway\n\n",
    "carriage return in a header": got("X: xyzzy\ra"),
    "space before the colon": lambda _: b"GET /healthz HTTP/1.1\r\nHost : gateway\r\n\r\n",
    "folded header": got("X: a", " xyzzy"),
    "NUL in a header": got("X: xyzzy\0"),
    "control in a header": got("X: xyzzy\x01"),
    "bytes in the path": got(line="GET /xyzzy\xff\xfe HTTP/1.1"),
    "absolute URL without host": got(line="GET http:// HTTP/1.1"),
    "both lengths": posted("Content-Length: 5", "Transfer-Encoding: chunked", body=b"0\r\n\r\n"),
    "two lengths": posted("Content-Length: 2", "Content-Length: 3"),
    "twice the same length": posted("Content-Length: 2", "Content-Length: 2"),
    "list of lengths": posted("Content-Length: 2, 2"),
    "negative length": posted("Content-Length: -2"),
    "signed length": posted("Content-Length: +2"),
    "hexadecimal length": posted("Content-Length: 0x2"),
    "length beyond 64 bits": posted(f"Content-Length: {2**64}"),
    "empty length": posted("Content-Length: "),
    "unknown coding": posted("Transfer-Encoding: xyzzy"),
    "no coding": posted("Transfer-Encoding: identity"),
    "two codings": posted("Transfer-Encoding: chunked", "Transfer-Encoding: chunked"),
    "two content types": posted("Content-Type: text/plain", "Content-Length: 2"),
    "chunk of no size": chunked("xyzzy", "{}", "0", ""),
    "chunk of negative size": chunked("-2", "{}", "0", ""),
    "chunk of endless size": chunked("f" * 17, "{}"),
    "chunk longer than its size": chunked("2", "{}xyzzy", "0", ""),
    "chunks with bare line feeds": lambda site: chunked("2", "{}", "0", "")(site).replace(
        b"2\r\n{}\r\n", b"2\n{}\n"
    ),
    "trailers without end": chunked("2", "{}", "0", *(f"X{n}: xyzzy" for n in range(500)), ""),
    "header of 100 kB": got("X: " + "x" * 100_000),
    "header name of 100 kB": got("x" * 100_000 + ": a"),
    "500 headers": got(*(f"X{n}: xyzzy" for n in range(500))),
    "70 kB of headers": got(*(f"X{n}: {'x' * 7000}" for n in range(10))),
    "path of 100 kB": got(line=f"GET /{'x' * 100_000} HTTP/1.1"),
    "token of 1 MB": lambda _: (
        b"GET /v1/jobs HTTP/1.1\r\nHost: gateway\r\nAuthorization: Bearer "
        + b"x" * 10**6
        + b"\r\n\r\n"
    ),
}


@pytest.mark.parametrize("follows", [b"", SECOND], ids=["", "with a request behind it"])
@pytest.mark.parametrize("sent", BROKEN.values(), ids=BROKEN.keys())
def test_what_is_no_http_is_refused_and_its_connection_closed(
    site: Site, sent: Callable[[Site], bytes], follows: bytes
) -> None:
    with site.wire() as wire:
        # What follows it is not looked at: a proxy may have thought that it is a body.
        reply = wire.send(sent(site) + follows).until_closed().reply
    assert (reply.code, reply.problem) == (400, "invalid-request")


def test_what_follows_a_body_is_a_request_of_its_own(site: Site) -> None:
    sent = posted("Content-Length: 2", body=b"{}xyzzy\r\n\r\n")(site)
    with site.wire() as wire:
        replies = wire.send(sent).until_closed().replies
    assert [each.code for each in replies][-1] == 400
    assert len(replies) <= 2


def test_pipelined_requests_are_answered_in_turn(site: Site) -> None:
    requests = site.request("GET /v1/jobs HTTP/1.1") + SECOND
    with site.wire() as wire:
        replies = wire.send(requests * 50 + b"xyzzy\r\n\r\n").until_closed().replies
    # What cannot be read takes what is with it in one piece along.
    assert replies[-1].problem == "invalid-request"
    with site.wire() as wire:
        replies = wire.send(requests * 50).until_answered(100).replies
    assert [each.code for each in replies] == [200] * 100
    assert [each.raw == b"ok\n" for each in replies] == [False, True] * 50


def test_http_1_0_is_served_and_closed(site: Site) -> None:
    with site.wire() as wire:
        sent = site.request("GET /v1/jobs HTTP/1.0")
        assert wire.send(sent).until_closed().reply.code == 200


def test_a_body_is_asked_for_when_it_will_be_read(site: Site) -> None:
    expects = ("Content-Type: application/json", "Expect: 100-continue")
    body = json.dumps({"tool": TOOL}).encode()
    with site.wire() as wire:
        wire.send(site.post(*expects, f"Content-Length: {len(body)}"))
        wait_until("100 Continue", lambda: wire._read(time.monotonic() + 1) and wire.received)
        assert wire.received == b"HTTP/1.1 100 Continue\r\n\r\n"
        assert wire.send(body).until_answered().reply.code == 202
    for sent, code in (
        (site.post(*expects, f"Content-Length: {LARGEST + 1}"), 413),
        (site.post(*expects, "Content-Length: 2").replace(b"Bearer ", b"Bearer x"), 401),
        (site.post("Expect: xyzzy", "Content-Length: 2"), 400),
    ):
        with site.wire() as wire:
            assert wire.send(sent).until_answered().reply.code == code
            assert b"100 Continue" not in wire.received


def test_a_body_that_breaks_off_is_refused_at_once(site: Site) -> None:
    sent = site.post(
        "Content-Type: application/json", "Expect: 100-continue", "Transfer-Encoding: chunked"
    )
    with site.wire() as wire:
        wire.send(sent)
        # It is being read.
        wait_until("100 Continue", lambda: wire._read(time.monotonic() + 1) and wire.received)
        reply = wire.send(b"2\r\n{}\r\nxyzzy\r\n").until_closed(SLACK).replies[0]
    assert (reply.code, reply.problem) == (400, "invalid-request")
    assert b"broken off" in reply.raw


@pytest.mark.parametrize("method", ["PUT", "PATCH", "OPTIONS", "TRACE", "HEAD", "PROPFIND"])
def test_other_methods_are_refused(site: Site, method: str) -> None:
    with site.wire() as wire:
        sent = site.request(f"{method} /v1/jobs HTTP/1.1", "Connection: close")
        wire.send(sent).until_closed()
        assert wire.received.startswith(b"HTTP/1.1 405 ")
        assert b"Allow: GET, POST" in wire.received


# --- bodies


def memory(gateway: GatewayProcess) -> int:
    """What the process holds, in KiB."""
    status = Path(f"/proc/{gateway.pid}/status").read_text(encoding="ascii")
    return int(status.partition("VmRSS:")[2].split()[0])


def test_a_huge_body_is_refused_unread(site: Site) -> None:
    announced = site.post("Content-Type: application/json", f"Content-Length: {10**12}")
    with site.wire() as wire:
        reply = wire.send(announced).until_answered(seconds=2).reply
        assert (reply.code, reply.problem) == (413, "body-too-large")
        assert reply.headers["Connection"] == "close"
        wire.until_closed()


def test_a_body_that_turns_out_huge_is_refused_at_once_and_costs_no_memory(site: Site) -> None:
    begin = site.post("Content-Type: application/json", "Transfer-Encoding: chunked")
    chunk = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
    before = memory(site.gateway)
    with ExitStack() as stack:
        wires = [stack.enter_context(site.wire()) for _ in range(20)]
        for wire in wires:
            wire.send(begin + chunk * 5)
        for wire in wires:
            assert wire.until_answered().reply.code == 413
            # It is read on for two seconds, so that the client sees the answer.
            wire.send(chunk * 100)
        for wire in wires:
            wire.until_closed()
    assert memory(site.gateway) - before < 16 * 1024


def test_a_body_that_is_a_byte_too_large_is_refused_and_its_connection_closed(site: Site) -> None:
    begin = site.post("Content-Type: application/json", "Transfer-Encoding: chunked")
    size = LARGEST + 1
    with site.wire() as wire:
        wire.send(begin + b"%x\r\n" % size + b" " * size + b"\r\n0\r\n\r\n")
        assert wire.until_closed().reply.code == 413


def test_arguments_without_end_are_refused_before_they_are_looked_at(site: Site) -> None:
    # Finding what is wrong with all of them would take seconds, in which nobody is served.
    reply = site.alice.agent.start(site.gateway, "many", STRICT, arguments={MARK: [1] * 60_000})
    assert (reply.code, reply.problem) == (422, "unrunnable")


def arguments(text: str) -> bytes:
    return f'{{"tool": "{TOOL}", "arguments": {{"{MARK}": {text}}}}}'.encode()


def deep(levels: int, opening: str = "[", closing: str = "]") -> bytes:
    return arguments(opening * levels + "1" + closing * levels)


INVALID: dict[str, tuple[bytes, int, str, str]] = {
    "100 levels": (deep(100), 422, "invalid-body", ""),
    "1,000 levels": (deep(1000), 422, "invalid-body", ""),
    "1,000 objects": (deep(1000, '{"a":', "}"), 422, "invalid-body", ""),
    "100,000 levels": (deep(100_000), 400, "invalid-request", ""),
    "200,000 levels without end": (b"[" * 200_000, 400, "invalid-request", ""),
    "NUL": (arguments('"\0"'), 400, "invalid-request", ""),
    "half a surrogate pair": (arguments(r'"\ud800"'), 400, "invalid-request", ""),
    "the other half as a name": (b'{"\\udc00": 1}', 400, "invalid-request", ""),
    "no UTF-8": (arguments('"?"').replace(b"?", b"\xff"), 400, "invalid-request", ""),
    "overlong UTF-8": (arguments('"?"').replace(b"?", b"\xc0\x80"), 400, "invalid-request", ""),
    "UTF-16": ('{"tool": "open"}'.encode("utf-16"), 400, "invalid-request", ""),
    "byte order mark": (b'\xef\xbb\xbf{"tool": "open"}', 400, "invalid-request", ""),
    **{
        text: (arguments(text), 400, "invalid-request", "")
        for text in ("NaN", "Infinity", "-Infinity", "1e400", "01", "+1", "0x1", "1_0", "'a'")
    },
    "number of 5,000 digits": (arguments("1" * 5000), 400, "invalid-request", ""),
    **{
        f"{number}": (
            arguments(f'[{{"a/b~c": {number}}}]'),
            422,
            "invalid-arguments",
            f"/arguments/{MARK}/0/a~1b~0c",
        )
        for number in (2**53 + 1, -(2**53) - 1, 2**63, 2**64, 10**30)
    },
    "a member twice": (b'{"tool": "open", "tool": "xyzzy"}', 400, "invalid-request", ""),
    "an argument twice": (arguments('{"a": 1, "a": 2}'), 400, "invalid-request", ""),
    "nothing": (b"", 400, "invalid-request", ""),
    "no object": (b'["xyzzy"]', 400, "invalid-request", ""),
    "null": (b"null", 400, "invalid-request", ""),
    "two objects": (b'{"tool": "open"}{"tool": "open"}', 400, "invalid-request", ""),
    "unknown member": (b'{"tool": "open", "xyzzy": 1}', 422, "invalid-body", "/xyzzy"),
    "tool of no such name": (b'{"tool": "../xyzzy"}', 422, "invalid-body", "/tool"),
    "namespace with a line feed": (
        b'{"tool": "open", "namespace": "bad-input-alice\\n"}',
        422,
        "invalid-body",
        "/namespace",
    ),
    "deadline as text": (
        b'{"tool": "open", "deadline_seconds": "60"}',
        422,
        "invalid-body",
        "/deadline_seconds",
    ),
    "deadline beyond all bounds": (
        f'{{"tool": "open", "deadline_seconds": {10**30}}}'.encode(),
        422,
        "invalid-body",
        "/deadline_seconds",
    ),
    "dependency elsewhere": (
        b'{"tool": "open", "depends_on": ["a.bad-input-alice", "b.bad-input-bob"]}',
        422,
        "invalid-body",
        "/depends_on/1",
    ),
}


@pytest.mark.parametrize(("body", "code", "problem", "pointer"), INVALID.values(), ids=INVALID)
def test_r_args_a_body_that_somebody_would_stumble_over_is_refused(
    site: Site, body: bytes, code: int, problem: str, pointer: str
) -> None:
    reply = site.start(body)
    assert (reply.code, reply.problem) == (code, problem), reply.raw[:500]
    pointers = [each["pointer"] for each in reply.body.get("errors", ())]
    assert pointer in pointers if pointer else not pointers


TYPES = {
    "text/plain": 415,
    "": 415,
    "application/x-www-form-urlencoded": 415,
    "multipart/form-data; boundary=xyzzy": 415,
    "application/problem+json": 415,
    "application/json, text/plain": 415,
    "application/json; charset=utf-16": 415,
    "application/json; charset=\xff": 415,
    ";;;": 415,
    "application/json": 202,
    "Application/JSON; Charset=UTF-8": 202,
}


@pytest.mark.parametrize(("content_type", "code"), TYPES.items(), ids=TYPES)
def test_only_json_in_utf_8_is_read(site: Site, content_type: str, code: int) -> None:
    reply = site.start(b'{"tool": "open"}', content_type)
    assert reply.code == code
    assert reply.problem == ("" if code == 202 else "unsupported-media-type")


@pytest.mark.parametrize(
    "header", ["Content-Encoding: gzip", "Content-Encoding: zstd", "Content-Encoding: xyzzy"]
)
def test_a_compressed_body_is_not_inflated(site: Site, header: str) -> None:
    reply = site.start(b"\x1f\x8b\x08xyzzy", "application/json", header)
    assert (reply.code, reply.problem) == (415, "unsupported-media-type")
    coded = site.post("Content-Type: application/json", "Transfer-Encoding: gzip, chunked")
    with site.wire() as wire:
        assert wire.send(coded + b"0\r\n\r\n").until_answered().reply.code == 415


# --- ids, parameters, cursors


IDS = {
    "dots": "%2e%2e",
    "a path": "%2e%2e%2fnamespaces%2fkube-system",
    "a slash": "{name}%2f{namespace}",
    "upper case": "{NAME}.{namespace}",
    "trailing dot": "{id}.",
    "leading dot": ".{id}",
    "no namespace": "{name}",
    "no name": ".{namespace}",
    "digits of another script": "{name}%D9%A3.{namespace}",
    "wide dot": "{name}%EF%BC%8E{namespace}",
    "NUL": "{id}%00",
    "line feed": "{id}%0a",
    "no UTF-8": "{id}%ff",
    "no escape": "{id}%zz",
    "300 characters": "{name}" + "a" * 300 + ".{namespace}",
    "semicolon": "{id};v=1",
    "somebody else's": "{bobs}",
    "somebody else's that is none": "{unknown}",
}


@pytest.mark.parametrize("path", IDS.values(), ids=IDS)
@pytest.mark.parametrize(
    ("method", "rest"),
    [("GET", ""), ("GET", "?wait=1"), ("GET", "/output"), ("GET", "/result"), ("DELETE", "")],
    ids=str.strip,
)
def test_r_auth_an_id_with_tricks_is_unknown_like_any_other(
    site: Site, path: str, method: str, rest: str
) -> None:
    name, _, namespace = site.job.partition(".")
    words = {"id": site.job, "name": name, "NAME": name.upper(), "namespace": namespace}
    unknown = unknown_id(site.bob.namespace)
    shown = path.format(**words, bobs=site.bobs_job, unknown=unknown)
    with site.wire() as wire:
        sent = site.request(f"{method} /v1/jobs/{shown}{rest} HTTP/1.1")
        reply = wire.send(sent).until_answered().reply
    asked = site.alice.agent.send(site.gateway, method, f"/v1/jobs/{unknown}{rest}")
    assert (asked.code, asked.problem) == (404, "job-not-found")
    assert (reply.code, reply.raw) == (asked.code, asked.raw)


@pytest.mark.parametrize(
    "path", ["/v1//jobs", "/v1/jobs/", "/v1/./jobs", "/V1/jobs", "/v1/jobs/a.b/c", "//v1/jobs"]
)
def test_other_paths_are_not_found(site: Site, path: str) -> None:
    with site.wire() as wire:
        sent = site.request(f"GET {path} HTTP/1.1")
        assert wire.send(sent).until_answered().reply.problem in {"not-found", "job-not-found"}


QUERIES = [
    "limit=1&limit=1", "wait=1&wait=2", "namespace=bad-input-alice&namespace=bad-input-bob",
    "xyzzy=1", "=1", "limit", "limit=", "limit=0", "limit=501", "limit=1e1", "limit=%D9%A3",
    "limit=1_0", "limit=+1", "limit=-1", "limit=1.0", "limit=9" + "9" * 400, "wait=61", "wait=-1",
    "wait=%00", "wait=", "status=xyzzy", "status=", "status=Done", "tool=%ff", "tool=xyzzy%00",
    "tool=", "tool=" + "x" * 5000, "namespace=", "namespace=%2e%2e", "namespace=a/b", "cursor=",
    "cursor=xyzzy", "since=xyzzy", "since=%ed%a0%80", "limit=1;wait=1", "Limit=1",
]  # fmt: skip


@pytest.mark.parametrize("query", QUERIES, ids=lambda query: query[:40])
def test_parameters_that_are_doubled_unknown_or_malformed_are_refused(
    site: Site, query: str
) -> None:
    with site.wire() as wire:
        sent = site.request(f"GET /v1/jobs?{query} HTTP/1.1")
        reply = wire.send(sent).until_answered().reply
    assert reply.code == 400
    assert reply.problem in {"invalid-request", "invalid-cursor"}


@pytest.mark.parametrize(
    ("headers", "problem"),
    [
        pytest.param((), "key-required", id="no key"),
        pytest.param(("Idempotency-Key: ",), "key-required", id="an empty key"),
        pytest.param(("Idempotency-Key: a", "Idempotency-Key: a"), "invalid-request", id="two"),
        pytest.param(("Idempotency-Key: xyzzy\xe9",), "key-required", id="no ASCII"),
        pytest.param(("Idempotency-Key: a xyzzy",), "key-required", id="with a blank"),
        pytest.param(("Idempotency-Key: " + "x" * 256,), "key-required", id="256 characters"),
        pytest.param(
            ("Idempotency-Key: a", "Authorization: Bearer xyzzy"), "invalid-request", id="2 tokens"
        ),
    ],
)
def test_r_key_a_start_without_exactly_one_key_is_refused(
    site: Site, headers: tuple[str, ...], problem: str
) -> None:
    body = b'{"tool": "open"}'
    of_body = ("Content-Type: application/json", f"Content-Length: {len(body)}")
    with site.wire() as wire:
        sent = site.request("POST /v1/jobs HTTP/1.1", *headers, *of_body, body=body)
        reply = wire.send(sent).until_answered().reply
    assert (reply.code, reply.problem) == (400, problem)


def test_r_auth_a_cursor_opens_only_what_it_was_given_for(site: Site, stage: Stage) -> None:
    gateway, alice, bob = site.gateway, site.alice.agent, site.bob.agent
    site.alice.agent.start(gateway, f"{MARK}-second", TOOL)
    page = alice.get(gateway, "/v1/jobs?limit=1").body
    output = alice.get(gateway, f"/v1/jobs/{site.job}/output").body["next"]
    bobs = bob.get(gateway, "/v1/jobs").body["since"]
    cursors = {"next": page["next"], "since": page["since"], "output": output, "bobs": bobs}
    taken = {
        (f"/v1/jobs?{parameter}", kind)
        for parameter in ("cursor=", "since=")
        for kind in cursors
        if alice.get(gateway, f"/v1/jobs?{parameter}{cursors[kind]}").code == 200
    }
    assert taken == {("/v1/jobs?cursor=", "next"), ("/v1/jobs?since=", "since")}
    # It is of a namespace, not of a caller: rights are looked at for each call.
    colleague = Tenant(stage, site.alice.namespace).account("colleague", READ).agent
    assert colleague.get(gateway, f"/v1/jobs?cursor={cursors['next']}").code == 200
    for path in ("output", "result"):
        for kind, cursor in cursors.items():
            reply = alice.get(gateway, f"/v1/jobs/{site.job}/{path}?cursor={cursor}")
            allowed = (path, kind) == ("output", "output")
            assert reply.code in ({200} if allowed else {400, 409}), (path, kind, reply.raw)


@pytest.mark.parametrize("kind", ["cursor", "since"])
def test_a_tampered_cursor_is_refused(site: Site, kind: str) -> None:
    page = site.alice.agent.get(site.gateway, "/v1/jobs?limit=1").body
    cursor: str = page["next" if kind == "cursor" else "since"]
    flipped = [
        cursor[:at] + ("A" if cursor[at] != "A" else "B") + cursor[at + 1 :]
        for at in range(len(cursor))
    ]
    tampered = [*flipped, cursor[:-1], cursor + "A", cursor + "=", cursor.swapcase(), "A" * 1025]
    for each in tampered:
        reply = site.alice.agent.get(site.gateway, f"/v1/jobs?{kind}={each}")
        assert (reply.code, reply.problem) == (400, "invalid-cursor"), each


# --- tokens


def signed(key: ec.EllipticCurvePrivateKey, token: str, **claims: Any) -> str:
    """A token like another, with other claims, signed by a key."""
    head, body, _ = token.split(".")
    content = json.loads(_decoded(body))
    parts = f"{head}.{_encoded(json.dumps({**content, **claims}).encode())}"
    r, s = decode_dss_signature(key.sign(parts.encode(), ec.ECDSA(hashes.SHA256())))
    return f"{parts}.{_encoded(r.to_bytes(32, 'big') + s.to_bytes(32, 'big'))}"


def _encoded(raw: bytes) -> str:
    return urlsafe_b64encode(raw).decode().rstrip("=")


def _decoded(text: str) -> bytes:
    return urlsafe_b64decode(text + "=" * (-len(text) % 4))


def test_r_auth_only_tokens_for_our_audience_that_the_cluster_signed_are_taken(
    site: Site, stage: Stage
) -> None:
    tenant = Tenant(stage, site.alice.namespace)
    token = site.alice.agent.token
    own = serialization.load_pem_private_key(site.key_file.read_bytes(), password=None)
    assert isinstance(own, ec.EllipticCurvePrivateKey)
    stranger = ec.generate_private_key(ec.SECP256R1())
    now = int(time.time())
    head, body, signature = token.split(".")
    none = _encoded(json.dumps({"alg": "none", "typ": "JWT"}).encode())
    refused = {
        "none": "",
        "forged": signed(stranger, token),
        "expired": signed(own, token, exp=now - 60, iat=now - 700, nbf=now - 700),
        "not yet valid": signed(own, token, nbf=now + 600, iat=now + 600, exp=now + 1200),
        "of another issuer": signed(own, token, iss="https://xyzzy.example.com"),
        "unsigned": f"{none}.{body}.",
        "cut": f"{head}.{body}",
        "tampered": f"{head}.{body}.{signature[:-4]}AAAA",
        "of another audience": tenant.token("agent", "xyzzy"),
        "of pods": tenant.token("agent", "agentjobs-report"),
        "of the API server": tenant.token("agent", ""),
        "no ASCII": "xyzzy\xe9\xff",
        "two": f"{token} {token}",
        "junk": "xyzzy" * 1000,
    }
    # The signature of ours is as good as the cluster's: what is refused is refused for its claims.
    good = signed(own, token)
    for scheme in ("Bearer", "bearer", "BEARER"):
        assert whoami(site, f"{scheme} {good}").code == 200
    for what, each in refused.items():
        reply = whoami(site, f"Bearer {each}")
        assert (reply.code, reply.problem) == (401, "unauthenticated"), what
        assert reply.headers["WWW-Authenticate"].startswith("Bearer")
        assert not each or each.encode("latin-1") not in reply.raw, what
    for header in (f"Basic {token}", token, "Bearer", f"Bearer{token}"):
        assert whoami(site, header).code == 401, header[:20]
    assert_quiet(site.gateway, *(each for each in refused.values() if each), good)


def whoami(site: Site, authorization: str) -> Reply:
    lines = ("GET /v1/jobs HTTP/1.1", "Host: gateway", f"Authorization: {authorization}")
    with site.wire() as wire:
        sent = "\r\n".join((*lines, "", "")).encode("latin-1")
        return wire.send(sent).until_answered().reply


@scenario("R-AUTH the token of a deleted account is refused within ten seconds", own=True)
def deleted_account(place: Place) -> None:
    gateway = place.stage.gateway("deleted-account")
    account = Tenant(place.stage, place.namespace).account("leaver", CALLS)
    assert account.agent.get(gateway, "/v1/jobs").code == 200
    place.api.delete("ServiceAccount", place.namespace, "leaver").object()
    # Asked all the time: an answer that is remembered must not live longer by being used. The API
    # server too remembers tokens for ten seconds.
    refused_by_api_server = 0.0

    def refused() -> bool:
        nonlocal refused_by_api_server
        if not refused_by_api_server and not is_valid(place, account.agent.token):
            refused_by_api_server = time.monotonic()
        return account.agent.get(gateway, "/v1/jobs").code == 401

    wait_until("refusal", refused)
    # The gateway may have asked in the very moment in which the API server forgot.
    asked_first = not refused_by_api_server
    assert asked_first or time.monotonic() - refused_by_api_server < REMEMBERED_FOR + SLACK
    assert_quiet(gateway, account.agent.token)
    gateway.close()


def is_valid(place: Place, token: str) -> bool:
    """What the API server says of a token."""
    review = {
        "apiVersion": "authentication.k8s.io/v1",
        "kind": "TokenReview",
        "spec": {"token": token, "audiences": ["agentjobs"]},
    }
    path = "/apis/authentication.k8s.io/v1/tokenreviews"
    return bool(place.api.send("POST", path, review).object()["status"].get("authenticated"))


# --- slowly, and many at once


def trickle(wire: Wire, content: bytes, pause: float) -> float:
    """Send byte by byte until the other side closes; return for how long it did not."""
    began = time.monotonic()
    for at in range(len(content)):
        wire.send(content[at : at + 1])
        if wire.closed or not wire.stays_open(pause):
            break
    return time.monotonic() - began


@scenario("slow heads and bodies are shown out, and nobody waits for them", own=True)
def slow_senders(place: Place) -> None:
    gateway = place.stage.gateway("slow-senders")
    tenant = Tenant(place.stage, place.namespace)
    tenant.usable_tool(TOOL, inputSchema={"type": "object"})
    other = Tenant.new(place.stage, f"{place.namespace}-b")
    slow, quick = tenant.account("slow", CALLS, use(TOOL)), other.account("quick", CALLS)
    until_offered(slow.agent, TOOL, gateway)
    head = start_head(slow.agent.token, 1000)
    with ExitStack() as stack, ThreadPoolExecutor(4) as pool:
        # More than one namespace may have under way; none of their bodies will ever be whole.
        greedy = [stack.enter_context(Wire(gateway.port)) for _ in range(GREEDY)]
        for wire in greedy:
            wire.send(head + b"{")
        wait_until("refusal of one too many", lambda: any(map(is_refused, greedy)))
        assert quick.agent.get(gateway, "/v1/jobs").code == 200

        silent, slow_head, slow_body, cut = (
            stack.enter_context(Wire(gateway.port)) for _ in range(4)
        )
        slow_body.send(start_head(quick.agent.token, 1000))
        slowly = [
            pool.submit(trickle, slow_head, head[:200], 0.2),
            pool.submit(trickle, slow_body, b" " * 200, 0.2),
        ]
        cut.send(head + b'{"tool": "open"')
        cut.hang_up()
        silent.until_closed(SHOWN_OUT_WITHIN + SLACK)
        assert max(each.result() for each in slowly) < SHOWN_OUT_WITHIN + SLACK
        assert silent.received == slow_head.received == b""
        assert slow_body.until_closed().reply.problem == "request-timeout"
        replies = [wire.until_closed(SHOWN_OUT_WITHIN + SLACK).reply for wire in greedy]
        ends = Counter((reply.code, reply.problem) for reply in replies)
        assert set(ends) == {(408, "request-timeout"), (503, "busy")}
        assert ends[408, "request-timeout"] <= SHARE
    assert slow.agent.get(gateway, "/v1/jobs").body["jobs"] == []
    assert_quiet(gateway, slow.agent.token, quick.agent.token)
    gateway.close()


def start_head(token: str, length: int) -> bytes:
    lines = (
        "POST /v1/jobs HTTP/1.1",
        "Host: gateway",
        f"Authorization: Bearer {token}",
        f"Idempotency-Key: {MARK}",
        "Content-Type: application/json",
        f"Content-Length: {length}",
    )
    return "\r\n".join((*lines, "", "")).encode()


def is_refused(wire: Wire) -> bool:
    wire.stays_open(0.001)
    return any(int(reply.headers["Retry-After"]) >= 1 for reply in wire.replies)


@scenario("a thousand long polls are cheap, answered at once, and bounded", own=True)
def many_polls(place: Place) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(max(soft, FILES), hard), hard))
    gateway = place.stage.gateway("many-polls")
    tenant = Tenant(place.stage, place.namespace)
    tenant.usable_tool(TOOL, inputSchema={"type": "object"})
    agent = tenant.account("poller", CALLS, use(TOOL)).agent
    until_offered(agent, TOOL, gateway)
    job = id_in(agent.start(gateway, "polled", TOOL))
    before = memory(gateway)

    polls = Polls(gateway, agent, f"/v1/jobs/{job}?wait=60")
    polls.open(POLLS)
    each = (memory(gateway) - before) / POLLS
    began = time.monotonic()
    assert agent.get(gateway, "/v1/jobs").code == 200
    meanwhile = time.monotonic() - began
    more = server.MAX_WAITING // 2 - POLLS
    polls.open(more)
    refused = agent.status(gateway, job, "?wait=60")
    assert (refused.code, refused.problem) == (503, "busy")
    assert int(refused.headers["Retry-After"]) >= 1
    assert agent.status(gateway, job).code == 200

    # Who hangs up waits no more: their places are free again, long before their minute is over.
    polls.hang_up(more)
    wait_until("end of the waiting of those who hung up", lambda: polls.waiting == POLLS)
    began = time.monotonic()
    assert agent.stop(gateway, job).code == 202
    answered = polls.answers()
    took = time.monotonic() - began
    assert answered == {(200, "stopping")}
    sys.stdout.write(
        f"\n{POLLS} long polls: {each:.1f} KiB each; another request meanwhile took "
        f"{meanwhile * 1000:.0f} ms; all were answered {took:.2f} s after the change\n"
    )
    assert each < POLL_KIB
    assert meanwhile < SLACK
    assert took < 2 * SLACK
    assert_quiet(gateway, agent.token)
    gateway.close()


class Polls:
    """Long polls, each on a connection of its own."""

    def __init__(self, gateway: GatewayProcess, agent: Agent, path: str) -> None:
        self._gateway = gateway
        self._wires: list[Wire] = []
        lines = (f"GET {path} HTTP/1.1", "Host: gateway", f"Authorization: Bearer {agent.token}")
        self._request = "\r\n".join((*lines, "", "")).encode()

    @property
    def waiting(self) -> int:
        return int(self._gateway.metric("agentjobs_gateway_waiting"))

    def open(self, count: int) -> None:
        """Begin to wait, and see that the gateway has them all."""
        self._wires += [Wire(self._gateway.port).send(self._request) for _ in range(count)]
        wait_until(f"{len(self._wires)} long polls", lambda: self.waiting == len(self._wires))

    def hang_up(self, count: int) -> None:
        for wire in self._wires[:count]:
            wire.hang_up()
        del self._wires[:count]

    def answers(self) -> set[tuple[int, str]]:
        """What all of them were told."""
        found = set()
        for wire in self._wires:
            reply = wire.until_answered().reply
            found.add((reply.code, str(reply.body["status"])))
            wire.hang_up()
        return found


@pytest.mark.parametrize("scenario", told_in(__name__), ids=str)
def test_rule(played: Callable[[Scenario], None], scenario: Scenario) -> None:
    played(scenario)
