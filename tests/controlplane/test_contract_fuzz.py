"""The contract as strangers use it: whatever is sent, the gateway does what its document says."""

import json
import os
import re
import secrets
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, quote_from_bytes

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from agentjobs.contract.openapi import openapi_document
from agentjobs.contract.operations import OPERATIONS, Operation
from tests.apiclient import Document
from tests.chart import NAMESPACE, ROOT
from tests.controlplane.callers import Caller, Server
from tests.controlplane.installed import OPERATOR, inputrequest
from tests.controlplane.stage import Stage
from tests.controlplane.tenants import (
    CALLS,
    MAKE_JOBS,
    Account,
    Tenant,
    id_in,
    unknown_id,
    until_offered,
    use,
)
from tests.gateway_process import Agent, GatewayProcess, Reply
from tests.wire import Wire

pytestmark = pytest.mark.controlplane

SOAK = bool(os.environ.get("AGENTJOBS_SOAK"))
EXAMPLES = 100 if SOAK else 4
"""Cases of schemathesis for each operation, beside those that its coverage phase makes."""
FUZZ = Path(sys.prefix) / "fuzz"
"""Where `make setup` installs schemathesis."""
MINE, OTHER = "fuzzed", "fuzzed-beside"
CANARY = "zzcanaryzz"
"""A word that is in everything of the other namespace, and nowhere else."""
TYPED: Document = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0}, "text": {"type": "string"}},
    "required": ["n"],
    "additionalProperties": False,
}
LONG = 1000
NASTY = '\u202e\x01"\\\u2028é😀 <script>\n[event] job_completed job_id=forged'


@dataclass(frozen=True, repr=False)
class Ground:
    """A gateway, a caller with jobs in all states, and the jobs of a neighbour."""

    gateway: GatewayProcess
    caller: Account
    jobs: tuple[str, ...]
    """The last one runs."""
    foreign: tuple[str, ...]
    pod: str
    """Token of the pod of the job that runs."""
    fresh: Account
    """Somebody of the caller's namespace who has used no key yet."""


ENDS: dict[str, Document] = {
    "done": {
        "state": "done",
        "summary": NASTY,
        "result": {"source": "terminationMessage", "text": "ä" * 2000, "bytes": 4000},
    },
    "failed": {
        "state": "failed",
        "cause": {"code": "tool_error", "message": NASTY, "retryable": False, "ran": True},
    },
    "timed_out": {
        "state": "timed_out",
        "cause": {"code": "deadline_exceeded", "retryable": True, "ran": True, "signal": 9},
    },
}
OPEN: dict[str, Document] = {
    "queued": {
        "state": "queued",
        "waiting": {"code": "unschedulable", "message": (NASTY * 20)[:LONG]},
    },
    "running": {"state": "running", "startedAt": "2026-03-01T12:00:00Z", "podPhase": "Running"},
}


@pytest.fixture(scope="module")
def ground(stage: Stage) -> Iterator[Ground]:
    store = (stage.directory / "store-fuzzed").as_uri()
    settings = {"ALLOW_TEMPLATES": "true", "OUTPUT_STORE": store}
    gateway = stage.gateway("gateway-fuzzed", settings=settings)
    mine, other = Tenant.new(stage, MINE), Tenant.new(stage, OTHER)
    for tenant in (mine, other):
        tenant.usable_tool("open", inputSchema={"type": "object"})
        tenant.usable_tool("typed", inputSchema=TYPED)
    other.usable_tool(CANARY, description=CANARY)
    caller = mine.account("stranger", CALLS, MAKE_JOBS, use("open", "typed"))
    fresh = mine.account("fresh", CALLS, use("open"))
    neighbour = other.account("neighbour", CALLS, use("open", "typed", CANARY))
    until_offered(caller.agent, "typed", gateway)
    until_offered(neighbour.agent, CANARY, gateway)
    jobs = tuple(started(caller, gateway, name) for name in (*ENDS, *OPEN))
    foreign = tuple(started(neighbour, gateway, name, secret=CANARY) for name in ("a", "b"))
    for this, status in zip(jobs, [*ENDS.values(), *OPEN.values()], strict=True):
        written(mine, this, status)
    for this in foreign:
        written(other, this, {**ENDS["done"], "summary": CANARY})
    for this in jobs:
        ask(stage, mine, this, caller)
    publish_a_key(stage)
    yield Ground(gateway, caller, jobs, foreign, pod_of(mine, jobs[-1], caller), fresh)
    gateway.close()


def started(account: Account, gateway: GatewayProcess, key: str, **arguments: Any) -> str:
    return id_in(account.agent.start(gateway, key, "open", arguments=arguments))


def written(tenant: Tenant, job_id: str, status: Document) -> None:
    """Write a status as the operator would; nobody serves these namespaces."""
    if status["state"] in ENDS:
        status = {**status, "finishedAt": "2026-03-01T12:00:00Z"}
    name = job_id.partition(".")[0]
    tenant.api.patch("AgentJob", tenant.namespace, name, {"status": status}, "status").object()


def pod_of(tenant: Tenant, job_id: str, account: Account) -> str:
    """Make a pod that may report for a job; return its token."""
    body = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "reporter", "namespace": tenant.namespace},
        "spec": {
            "serviceAccountName": account.name,
            "containers": [{"name": "tool", "image": "registry.invalid/tool:1"}],
        },
    }
    pod = tenant.api.create(body)
    uids = {"podUIDs": [pod["metadata"]["uid"]], "effective": {"resultFrom": "report"}}
    written(tenant, job_id, {**OPEN["running"], **uids})
    return tenant.token(account.name, "agentjobs-report", pod)


def ask(stage: Stage, tenant: Tenant, job_id: str, requester: Account) -> None:
    """Ask for a colour, as the operator."""
    name = job_id.partition(".")[0]
    job = tenant.api.get("AgentJob", tenant.namespace, name).object()
    spec = {
        "jobName": name,
        "jobUID": job["metadata"]["uid"],
        "key": "colour",
        "kind": "elicitation",
        "prompt": "Which colour?",
        "schema": {"type": "object", "properties": {"colour": {"type": "string"}}},
        "requestedBy": requester.user,
        "expiresAt": "2100-01-01T00:00:00Z",
    }
    operator = Caller(Server.of(stage.plane.kubeconfig), OPERATOR, "system:masters")
    operator.create(inputrequest(tenant.namespace, f"{name}-colour", spec)).object()


def publish_a_key(stage: Stage) -> None:
    """Publish a key that events are signed with, as the operator would."""
    meta = {"name": "agentjobs-signing-key", "namespace": NAMESPACE}
    data = {"whpk": "whpk_AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA="}
    body = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta, "data": data}
    assert stage.api.try_create(body).code in {201, 409}


SETTINGS = """\
base-url = {url}
hooks = "tests.controlplane.fuzzing"
continue-on-failure = true
request-timeout = 20.0
headers = {{ Authorization = "Bearer ${{AGENTJOBS_FUZZ_TOKEN}}" }}
generation.database = "none"
cache.enabled = false
# A run that never gets beyond the door is no run.
warnings.fail-on = ["missing_auth", "method_not_allowed", "unused_openapi_auth"]

[dictionaries]
running = {{ values = [{running}] }}
jobs = {{ values = {jobs} }}
tools = {{ values = ["open", "typed"] }}
receivers = {{ values = ["https://receiver.example.com/events"] }}
namespaces = {{ values = {namespaces} }}
questions = {{ values = ["colour"] }}

# Half of what is asked for exists.
[parameters]
"path.job_id" = {{ dictionary = "jobs", probability = 0.6 }}
"header.Agentjobs-Job" = {{ dictionary = "running", probability = 0.8 }}
"path.key" = {{ dictionary = "questions", probability = 0.8 }}
"query.namespace" = {{ dictionary = "namespaces", probability = 0.7 }}
"query.tool" = {{ dictionary = "tools", probability = 0.5 }}
"body.namespace" = {{ dictionary = "namespaces", probability = 0.7 }}
"body.depends_on[*]" = {{ dictionary = "jobs", probability = 0.8 }}
"body.callback.url" = {{ dictionary = "receivers", probability = 0.8 }}

# Too large is refused too (413), and no refusal is a fault of ours (5xx).
[checks.negative_data_rejection]
expected-statuses = ["400", "401", "403", "404", "405", "409", "413", "415", "422"]

# DELETE asks for the end of a job, whose record stays: no use after free. What must hold instead
# is a check of our own, tests/controlplane/fuzzing.py.
[checks.use_after_free]
enabled = false

# Pods have tokens of their own.
[[operations]]
include-path-regex = "^/v1/report/"
headers = {{ Authorization = "Bearer ${{AGENTJOBS_FUZZ_POD}}" }}

# What a schema cannot say: that tool, arguments, dependencies and destination fit each other
# (422), and that body and query do not name two namespaces (400).
[[operations]]
include-operation-id = "startJob"
checks.positive_data_acceptance.expected-statuses = ["2xx", "400", "403", "404", "422"]

# A cursor has the right shape and is none of ours (400).
[[operations]]
include-operation-id = ["listJobs", "getJobOutput", "getJobResult"]
checks.positive_data_acceptance.expected-statuses = ["2xx", "400", "403", "404", "409"]

# The answer breaks the schema that the question has (422).
[[operations]]
include-operation-id = "answerInput"
checks.positive_data_acceptance.expected-statuses = ["2xx", "404", "409", "422"]

# No schema of answers is one (422), or another question has that key.
[[operations]]
include-operation-id = "ask"
headers = {{ Authorization = "Bearer ${{AGENTJOBS_FUZZ_POD}}" }}
checks.positive_data_acceptance.expected-statuses = ["2xx", "403", "409", "422"]
"""


def schemathesis(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A Python process that has schemathesis, and what that needs before what we need."""
    path = os.pathsep.join((str(FUZZ), str(ROOT)))
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, **environment, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )


VALIDATE = """
import json, sys
from schemathesis.specs.openapi.definitions import OPENAPI_31_VALIDATOR
faults = [error.message for error in OPENAPI_31_VALIDATOR.iter_errors(json.loads(sys.argv[1]))]
sys.exit("\\n".join(faults) or 0)
"""


def test_the_document_that_is_served_is_openapi(ground: Ground) -> None:
    reply = Agent("").get(ground.gateway, "/openapi.json")
    assert reply.code == 200
    assert reply.body == openapi_document()
    assert schemathesis("-c", VALIDATE, reply.raw.decode()).stderr == ""
    broken = {**reply.body, "info": {}}
    assert "required" in schemathesis("-c", VALIDATE, json.dumps(broken)).stderr


def test_r_auth_r_key_schemathesis_finds_nothing(ground: Ground, tmp_path: Path) -> None:
    """All its phases, stateful among them, and all its checks but one; see SETTINGS for reasons."""
    file = tmp_path / "schemathesis.toml"
    file.write_text(
        SETTINGS.format(
            url=json.dumps(ground.gateway.url),
            running=json.dumps(ground.jobs[-1]),
            jobs=json.dumps([*ground.jobs, *ground.foreign]),
            namespaces=json.dumps([MINE, MINE, MINE, OTHER]),
        ),
        encoding="utf-8",
    )
    seed = os.environ.get("AGENTJOBS_FUZZ_SEED") or str(secrets.randbelow(2**32))
    done = schemathesis(
        *("-m", "schemathesis.cli", f"--config-file={file}", "--no-color", "run"),
        *(f"{ground.gateway.url}/openapi.json", f"--max-examples={EXAMPLES}", f"--seed={seed}"),
        AGENTJOBS_FUZZ_TOKEN=ground.caller.agent.token,
        AGENTJOBS_FUZZ_POD=ground.pod,
        AGENTJOBS_FUZZ_OTHERS=CANARY,
    )
    report = re.sub(r" +$", "", f"{done.stdout}\n{done.stderr}", flags=re.MULTILINE)
    print(f"AGENTJOBS_FUZZ_SEED={seed}\n{report}\n{ground.gateway.log[-4000:]}")  # noqa: T201
    assert done.returncode == 0, "see what was printed; the seed goes into the environment"
    # Whoever is turned away at the door finds nothing.
    assert [each.id for each in OPERATIONS if not reached(ground.gateway, each)] == []


def reached(gateway: GatewayProcess, operation: Operation) -> bool:
    """Whether it was answered as asked."""
    labels = {"operation": operation.id, "code": str(operation.status.value)}
    return gateway.metric("agentjobs_gateway_requests_total", **labels) > 0


# --- what no schema says


BODY = b'{"tool": "open"}'
UNSAFE = st.characters(codec="latin-1", exclude_characters="\r\n")
"""What can stand in a line of a head: anything but its end."""
found = settings(
    max_examples=300 if SOAK else 30,
    deadline=None,
    database=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)


def send(ground: Ground, method: str, target: str, *headers: str, body: bytes = b"") -> Reply:
    """A request of the caller, every byte of it as it is given."""
    lines = [f"{method} {target} HTTP/1.1", "Host: gateway", *headers]
    if not any(line.lower().startswith("authorization") for line in headers):
        lines.append(f"Authorization: Bearer {ground.caller.agent.token}")
    if body:
        lines += [f"Content-Length: {len(body)}", "Content-Type: application/json"]
    with Wire(ground.gateway.port) as wire:
        wire.send("\r\n".join((*lines, "", "")).encode("latin-1") + body)
        return harmless(wire.until_answered().reply)


def harmless(reply: Reply) -> Reply:
    """What holds for every answer."""
    assert reply.code < 500 or (reply.code == 503 and "Retry-After" in reply.headers), reply.raw
    assert reply.code < 400 or reply.problem, reply.raw
    assert CANARY.encode() not in reply.raw
    return reply


def escaped(text: str) -> str:
    return quote(text, safe="")


IDS = st.one_of(
    st.text(max_size=200).map(lambda text: quote(text, safe="", errors="surrogatepass")),
    st.text(st.sampled_from("abc019.-%2FeE/\\;:@~$&'()+,=_"), min_size=1, max_size=140),
    st.binary(max_size=80).map(quote_from_bytes),
)
OF_A_JOB = [("GET", ""), ("GET", "/output"), ("GET", "/result"), ("GET", "/inputs"), ("DELETE", "")]


@found
@given(IDS, st.sampled_from(OF_A_JOB))
def test_r_auth_an_id_of_no_job_tells_nothing(
    ground: Ground, this: str, call: tuple[str, str]
) -> None:
    method, rest = call
    reply = send(ground, method, f"/v1/jobs/{this}{rest}")
    assert reply.code in {400, 404, 405} or not this.strip("./")


@st.composite
def near(draw: st.DrawFn, text: str) -> str:
    """A text that is nearly this one."""
    begin = draw(st.integers(0, len(text)))
    end = draw(st.integers(begin, min(begin + 3, len(text))))
    return text[:begin] + draw(st.text(max_size=3)) + text[end:]


@found
@given(st.data(), st.sampled_from(OF_A_JOB))
def test_r_auth_what_is_nearly_an_id_is_unknown_as_any_other(
    ground: Ground, data: st.DataObject, call: tuple[str, str]
) -> None:
    this = data.draw(st.sampled_from([*ground.jobs, *ground.foreign]).flatmap(near))
    assume(this not in ground.jobs and not unsendable(this))
    method, rest = call
    reply = send(ground, method, f"/v1/jobs/{escaped(this)}{rest}")
    unknown = send(ground, method, f"/v1/jobs/{unknown_id(MINE)}{rest}")
    assert (reply.code, reply.raw) == (unknown.code, unknown.raw)
    assert unknown.problem == "job-not-found"


def unsendable(text: str) -> bool:
    """Whether a path of it would be another path: RFC 3986 takes dots out of it."""
    return text in {"", ".", ".."} or any("\ud800" <= each <= "\udfff" for each in text)


def sendable(text: str) -> bool:
    """Whether it can stand in a line of a head."""
    return all(each <= "\xff" and each not in "\r\n" for each in text)


@dataclass(frozen=True)
class Opener:
    """A place for cursors, and the only one that it takes of those that were ever given."""

    path: str
    cursor: str


@pytest.fixture(scope="module")
def openers(ground: Ground) -> list[Opener]:
    agent, gateway, (done, *_) = ground.caller.agent, ground.gateway, ground.jobs
    page = agent.get(gateway, "/v1/jobs?limit=1").body
    output = agent.get(gateway, f"/v1/jobs/{done}/output").body
    result = agent.get(gateway, f"/v1/jobs/{done}/result?limit=10").body
    return [
        Opener("/v1/jobs?cursor=", page["next"]),
        Opener("/v1/jobs?since=", page["since"]),
        Opener(f"/v1/jobs/{done}/output?cursor=", output["next"]),
        Opener(f"/v1/jobs/{done}/result?cursor=", result["next"]),
    ]


@found
@given(st.data())
def test_r_auth_only_the_right_cursor_opens_anything(
    ground: Ground, openers: list[Opener], data: st.DataObject
) -> None:
    place, source = data.draw(st.sampled_from(openers)), data.draw(st.sampled_from(openers))
    cursor = data.draw(st.just(source.cursor) | near(source.cursor) | st.text(max_size=80))
    assume(cursor or "since" not in place.path)
    reply = send(ground, "GET", place.path + quote(cursor, safe="", errors="surrogatepass"))
    if cursor == place.cursor:
        assert reply.code == 200
    else:
        assert (reply.code, reply.problem) == (400, "invalid-cursor")


@found
@given(st.text(UNSAFE, max_size=300))
def test_r_key_a_key_is_taken_as_it_is_or_refused(ground: Ground, key: str) -> None:
    agent = ground.fresh.agent
    token = f"Authorization: Bearer {agent.token}"
    reply = send(ground, "POST", "/v1/jobs", token, f"Idempotency-Key: {key}", body=BODY)
    shown = key.strip(" \t")
    if re.fullmatch(r"[\x21-\x7e]{1,255}", shown):
        again = agent.start(ground.gateway, shown, "open")
        assert id_in(reply) == id_in(again)
    else:
        assert reply.problem in {"key-required", "invalid-request"}


@found
@given(st.data())
def test_a_status_is_not_modified_only_for_who_knows_it(
    ground: Ground, data: st.DataObject
) -> None:
    (done, *_) = ground.jobs
    path = f"/v1/jobs/{done}"
    etag = ground.caller.agent.get(ground.gateway, path).headers["ETag"]
    tag = data.draw(
        st.sampled_from([etag, f"W/{etag}", f'"x", {etag}'])
        | near(etag).filter(sendable)
        | st.text(UNSAFE, max_size=200)
    )
    reply = send(ground, "GET", path, f"If-None-Match: {tag}")
    digest = etag.strip('"').partition("-")[2]
    assert reply.code != 304 or digest in tag or "*" in tag
    assert reply.code in {304, 400} or etag not in tag


@found
@given(st.data())
def test_r_auth_only_a_whole_token_is_one(ground: Ground, data: st.DataObject) -> None:
    token = ground.caller.agent.token
    # Its last character may have bits that say nothing.
    forged = near(token[:-1]).filter(sendable).map(lambda begin: begin + token[-1])
    header = data.draw(
        forged.map(lambda each: f"Bearer {each}") | st.text(UNSAFE, max_size=100)
        | st.tuples(st.text(UNSAFE, max_size=9), st.just(token)).map(" ".join)
    )  # fmt: skip
    words = header.split()
    assume(words[1:] != [token] or words[0].lower() != "bearer")
    reply = send(ground, "GET", f"/v1/jobs?namespace={MINE}", f"Authorization: {header}")
    assert (reply.code, reply.problem) in {(401, "unauthenticated"), (400, "invalid-request")}
    assert reply.code == 400 or reply.headers["WWW-Authenticate"].startswith("Bearer")


HEADERS = [
    "Accept", "Accept-Encoding", "Connection", "Content-Encoding", "Content-Type", "Cookie",
    "Expect", "Forwarded", "Idempotency-Key", "If-None-Match", "Impersonate-User", "Origin",
    "Range", "TE", "Trailer", "Upgrade", "X-Forwarded-For", "X-HTTP-Method-Override",
    "X-Remote-User",
]  # fmt: skip


@found
@given(
    st.lists(st.tuples(st.sampled_from(HEADERS), st.text(UNSAFE, max_size=40)), max_size=6),
    st.sampled_from([("GET", b""), ("POST", BODY)]),
)
def test_r_auth_no_header_does_harm(
    ground: Ground, headers: list[tuple[str, str]], call: tuple[str, bytes]
) -> None:
    method, body = call
    lines = [f"{name}: {value}" for name, value in headers]
    reply = send(ground, method, "/v1/jobs", *lines, body=body)
    if method == "GET" and reply.code == 200:
        told = {each["job_id"] for each in reply.body["jobs"]}
        assert told
        assert all(each.endswith(f".{MINE}") for each in told)
