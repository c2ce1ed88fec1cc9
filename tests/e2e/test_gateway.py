"""The contract over HTTP on the real cluster: with curl, with the client, across a rollout."""

import json
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests import audit
from tests.chart import Document, only, render, rights
from tests.cluster import ClusterError
from tests.cluster.binaries import binary
from tests.cluster.local import LocalCluster
from tests.cluster.pki import Pki
from tests.e2e.agents import ACCOUNT, TOOL, Agents, Reply, curl, settle
from tests.e2e.installed import NAMESPACE, InstalledGateway
from tests.e2e.platform import IMAGE, STAYS, Platform

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180, func_only=True)]

SHORT = {"name": "agent", "seconds": 2}
LONG = {"name": "nobody", "seconds": 7200}
GREETING = '{"summary": "hello agent"}'
KEY = "Idempotency-Key"
WITHIN = 60
"""Seconds from a start to `done`."""
FEWEST = 20
"""Starts during a rollout that say something."""


@pytest.fixture(scope="module")
def agents(platform: Platform) -> Agents:
    """A namespace whose account may start one tool.

    Its jobs stay as they are: to delete hundreds would cost the tests that follow their quiet.
    """
    return settle(platform.in_namespace())


@dataclass(frozen=True)
class Seen:
    """What an agent sees of one job that it lets end and of one that it stops."""

    job_id: str
    status: str
    answered_in: float
    again: list[str]
    ended: str
    ended_in: float
    result: str
    stopped: str
    refused: list[Any]
    """Status, type and `job_status` of the answer to who asks for the result of a stopped job."""


@pytest.fixture(scope="module")
def seen(keys_before: Document, agents: Agents, show: Callable[[str], None]) -> dict[str, Seen]:
    """The same, seen with curl from this machine and with the client from a pod, side by side."""
    del keys_before
    with ThreadPoolExecutor() as pool:
        in_pod = pool.submit(agents.run, "contract", json.dumps(SHORT), json.dumps(LONG))
        found = {"curl": with_curl(agents), "client": Seen(**in_pod.result())}
    for form, each in found.items():
        show(f"\n{form}: answered in {each.answered_in:.3f} s, done in {each.ended_in:.1f} s")
    return found


@pytest.fixture(scope="module")
def keys_before(platform: Platform) -> Document:
    """The gateway's keys before they were emptied, while they were of no use to anybody yet."""
    jobs = platform.cluster.kubectl("get", "agentjobs", "-A", "-o", "jsonpath={..idempotency}")
    if jobs or not isinstance(platform.cluster, LocalCluster):
        pytest.skip("only in a cluster of its own, before the first start through the gateway")
    before = platform.gateway.keys()
    platform.gateway.renew_keys()
    return before


def start(agents: Agents, url: str, key: str, arguments: Document, **more: Any) -> Reply:
    body = json.dumps({"tool": TOOL, "arguments": arguments, **more})
    headers = ["--header", f"{KEY}: {key}", "--header", "Content-Type: application/json"]
    return curl(agents.token, f"{url}/v1/jobs", *headers, "--data", body)


def follow(agents: Agents, url: str, job_id: str) -> str:
    """Long-poll until a job is over; return its status then."""
    end = time.monotonic() + WITHIN
    etag = ""
    while time.monotonic() < end:
        reply = curl(
            agents.token,
            f"{url}/v1/jobs/{job_id}?wait=20",
            *(["--header", f"If-None-Match: {etag}"] if etag else []),
        )
        etag = reply.headers["etag"]
        if reply.code == 200 and "finished_at" in reply.body:
            return str(reply.body["status"])
        assert reply.code in {200, 304}, reply
    raise AssertionError(f"{job_id} is not over after {WITHIN} s")


def with_curl(agents: Agents) -> Seen:
    first, second = agents.here.gateway.urls
    began = time.monotonic()
    callback = {"url": agents.here.receiver.url}
    reply = start(agents, first, "by-curl", SHORT, callback=callback)
    assert reply.code == 202, reply
    job_id = reply.body["job_id"]
    assert reply.headers["location"] == f"/v1/jobs/{job_id}"
    assert set(reply.body) == {"job_id", "status"}
    again = start(agents, second, "by-curl", SHORT, callback=callback)
    assert (again.code, again.headers["idempotency-replayed"]) == (202, "true")
    ended = follow(agents, second, job_id)
    ended_in = time.monotonic() - began
    result = curl(agents.token, f"{second}/v1/jobs/{job_id}/result")
    assert result.code == 200, result
    late = start(agents, first, "by-curl", SHORT, callback=callback)
    return Seen(
        job_id=job_id,
        status=reply.body["status"],
        answered_in=reply.seconds,
        again=[again.body["job_id"], late.body["job_id"]],
        ended=ended,
        ended_in=ended_in,
        result=result.body["data"],
        **stopped_with_curl(agents, first, second),
    )


def stopped_with_curl(agents: Agents, first: str, second: str) -> dict[str, Any]:
    """Stop a job at the replica that has not started it."""
    job_id = start(agents, first, "by-curl-2", LONG).body["job_id"]
    taken = curl(agents.token, f"{second}/v1/jobs/{job_id}", "--request", "DELETE")
    assert (taken.code, taken.body) == (202, {"job_id": job_id, "status": "stopping"})
    stopped = follow(agents, first, job_id)
    refused = curl(agents.token, f"{second}/v1/jobs/{job_id}/result")
    assert refused.headers["content-type"] == "application/problem+json"
    problem = refused.body
    kind = problem["type"].rpartition("/")[2]
    return {"stopped": stopped, "refused": [refused.code, kind, problem["job_status"]]}


FORMS = pytest.mark.parametrize("form", ["curl", "client"])


def test_keys_that_no_job_was_named_by_are_made_again(
    keys_before: Document, platform: Platform
) -> None:
    """R-KEY: both replicas start with an empty Secret and end with the same keys."""
    keys = platform.gateway.keys()
    assert keys.keys() == keys_before.keys() == {"name", "state"}
    assert keys["name"] != keys_before["name"]


@FORMS
def test_a_start_is_answered_at_once_with_a_handle(seen: dict[str, Seen], form: str) -> None:
    """R-KEY: before the tool can have ended; 202 and Location are looked at on the way."""
    each = seen[form]
    assert each.status == "queued"
    assert each.answered_in < SHORT["seconds"]
    name, _, namespace = each.job_id.partition(".")
    assert name
    assert namespace


@FORMS
def test_a_job_is_done_within_a_minute_with_its_result(seen: dict[str, Seen], form: str) -> None:
    """R-HONEST."""
    each = seen[form]
    assert (each.ended, each.result) == ("done", GREETING)
    assert SHORT["seconds"] <= each.ended_in <= WITHIN


@FORMS
def test_a_repeated_key_gives_the_same_job(seen: dict[str, Seen], form: str) -> None:
    """R-KEY: at the other replica, and after the end."""
    each = seen[form]
    assert each.again
    assert set(each.again) == {each.job_id}


def test_other_keys_and_callers_have_other_jobs(seen: dict[str, Seen]) -> None:
    assert seen["curl"].job_id != seen["client"].job_id


@FORMS
def test_a_stopped_job_has_no_result(seen: dict[str, Seen], form: str) -> None:
    """R-STOP."""
    each = seen[form]
    assert each.stopped == "cancelled"
    assert each.refused == [409, "not-done", "cancelled"]


def test_the_record_says_who_asked(seen: dict[str, Seen], agents: Agents) -> None:
    """R-POLICY-WHO: the gateway vouches for the account that it reviewed."""
    name = seen["client"].job_id.partition(".")[0]
    spec = agents.here.get("agentjob", name)["spec"]
    assert spec["requestedBy"] == agents.user
    assert spec["idempotency"]["caller"] == agents.user


def test_the_event_leads_to_the_result_at_the_gateway(
    seen: dict[str, Seen], agents: Agents
) -> None:
    """R-EVENT: its address is good for a pod, as it is."""
    request = agents.here.receiver.wait_for(seen["curl"].job_id)
    request.verify(agents.here.public_key)
    data = request.event["data"]
    assert (data["status"], data["summary"]) == ("done", "hello agent")
    assert data["result_url"].startswith(InstalledGateway.SERVICE)
    assert agents.fetch(data["result_url"])["data"] == GREETING


@pytest.fixture(scope="module")
def shown(agents: Agents) -> Document:
    """What is shown to anybody, without a token."""
    url = f"{agents.here.gateway.urls[0]}/.well-known/agentjobs-signing-keys"
    return curl("", url).body


def test_events_can_be_verified_with_what_the_gateway_shows(
    shown: Document, seen: dict[str, Seen], agents: Agents
) -> None:
    """R-CALLBACK."""
    (key,) = shown["keys"]
    agents.here.receiver.wait_for(seen["curl"].job_id).verify(key)


def test_somebody_without_rights_sees_no_job(seen: dict[str, Seen], agents: Agents) -> None:
    """R-AUTH: as if there were none."""
    stranger = agents.here.in_namespace()
    stranger.kubectl("create", "serviceaccount", ACCOUNT)
    token = stranger.kubectl("create", "token", ACCOUNT, "--audience=agentjobs").strip()
    url = agents.here.gateway.urls[0]
    there = curl(token, f"{url}/v1/jobs/{seen['curl'].job_id}")
    nowhere = curl(token, f"{url}/v1/jobs/nothing.{agents.here.namespace}")
    assert there.code == nowhere.code == 404
    assert there.body == nowhere.body


@pytest.fixture(scope="module")
def gate(seen: dict[str, Seen], agents: Agents) -> str:
    """A job that runs on and on, for others to wait for."""
    del seen
    reply = agents.agent.start(agents.here.gateway.urls[0], "gate", TOOL, arguments=LONG)
    return str(reply.body["job_id"])


def token_of_pod(agents: Agents, name: str) -> str:
    """The token that the pod of a job was given."""
    agents.here.wait_for(name, ["running"])
    (pod,) = [each["metadata"]["name"] for each in agents.here.pods_of(name)]
    return agents.here.kubectl("exec", pod, "--", "sh", "-c", 'cat "$AGENTJOBS_TOKEN_FILE"')


@pytest.fixture(scope="module")
def reported(gate: str, agents: Agents) -> Document:
    """What is shown of a job after its pod, with the token that it was given, has reported."""
    token = token_of_pod(agents, gate.partition(".")[0])
    url = agents.here.gateway.urls[0]
    options = ["--header", "Content-Type: application/json", "--header", f"Agentjobs-Job: {gate}"]
    progress = json.dumps({"percent": 40, "message": "two of five"})
    reply = curl(token, f"{url}/v1/report/progress", *options, "--data", progress)
    assert reply.code < 300, reply
    assert curl(token, f"{url}/v1/jobs/{gate}").code == 401
    return curl(agents.token, f"{url}/v1/jobs/{gate}").body


def test_a_pod_reports_with_its_token_which_is_good_for_nothing_else(reported: Document) -> None:
    """R-REPORT, R-AUTH."""
    progress = reported["progress"]
    assert (progress["percent"], progress["message"]) == (40, "two of five")


@dataclass(frozen=True)
class Asked:
    """A question of a job."""

    prompts: list[str]
    codes: list[int]
    """What two equal answers were answered."""
    status: Document


@pytest.fixture(scope="module")
def asked(gate: str, agents: Agents) -> Asked:
    """It comes from the pod, with its own token."""
    here = agents.here
    url = f"{here.gateway.urls[0]}/v1/jobs/{gate}/inputs"
    question = json.dumps({"key": "language", "prompt": "Which language?"})
    options = ["--header", "Content-Type: application/json", "--header", f"Agentjobs-Job: {gate}"]
    token = token_of_pod(agents, gate.partition(".")[0])
    there = f"{here.gateway.urls[1]}/v1/report/ask"
    assert curl(token, there, *options, "--data", question).body["outcome"] == "open"
    assert curl(token, f"{there}/another", *options).code == 404
    end = time.monotonic() + 10
    while not (shown := curl(agents.token, url).body["inputs"]):
        assert time.monotonic() < end, "the question is not shown"
    answer = json.dumps({"outcome": "answered", "answer": {"language": "en"}})
    options = ["--header", "Content-Type: application/json", "--data", answer]
    return Asked(
        prompts=[each["prompt"] for each in shown],
        codes=[curl(agents.token, f"{url}/language", *options).code for _ in range(2)],
        status=here.api.items("InputRequest", here.namespace)[0]["status"],
    )


def test_a_question_is_answered_through_the_gateway(asked: Asked, agents: Agents) -> None:
    """R-POLICY-INPUT: once, by the requester of the job, whose name is written down."""
    assert asked.prompts == ["Which language?"]
    assert asked.codes == [204, 409]
    assert (asked.status["outcome"], asked.status["answeredBy"]) == ("answered", agents.user)
    assert asked.status["answer"] == {"language": "en"}


@dataclass(frozen=True)
class Rollout:
    """What was started while every replica was replaced."""

    jobs: dict[str, str]
    """Job by key."""
    replaced: bool


@pytest.fixture(scope="module")
def rollout(gate: str, agents: Agents, show: Callable[[str], None]) -> Rollout:
    gateway = agents.here.gateway
    before = {each["metadata"]["uid"] for each in gateway.pods()}
    began = time.monotonic()
    with agents.running("starts", json.dumps(SHORT), gate) as said:
        gateway.restart()
    (told,) = said
    show(
        f"\n{len(told['jobs'])} starts during a rollout of {time.monotonic() - began:.0f} s, "
        f"the longest took {told['longest']:.2f} s"
    )
    after = {each["metadata"]["uid"] for each in gateway.pods()}
    return Rollout(told["jobs"], replaced=not before & after and len(after) == len(before))


def test_a_rollout_loses_no_start(rollout: Rollout, gate: str, agents: Agents) -> None:
    """R-KEY: every start is answered, and has made exactly one job."""
    assert rollout.replaced
    assert len(rollout.jobs) >= FEWEST
    gate_name = gate.partition(".")[0]
    made = {
        f"{body['metadata']['name']}.{agents.here.namespace}"
        for body in agents.here.api.items("AgentJob", agents.here.namespace)
        if [each["name"] for each in body["spec"].get("dependsOn", ())] == [gate_name]
    }
    assert len(set(rollout.jobs.values())) == len(rollout.jobs)
    assert made == set(rollout.jobs.values())


def test_new_replicas_know_the_keys_of_the_old(rollout: Rollout, gate: str, agents: Agents) -> None:
    """R-KEY."""
    first, second = agents.here.gateway.urls
    for number, (key, job_id) in enumerate(sorted(rollout.jobs.items())[:10]):
        reply = agents.agent.start(
            (first, second)[number % 2], key, TOOL, arguments=SHORT, depends_on=[gate]
        )
        assert (reply.code, reply.body["job_id"]) == (202, job_id)


@pytest.mark.usefixtures("rollout", "asked", "reported", "shown")
def test_the_gateway_has_the_rights_that_it_uses_and_no_other(platform: Platform) -> None:
    """R-AUTH: by what the API server has recorded of it since it was installed."""
    recorded = [
        each
        for each in audit.Tail(platform.cluster.audit_log, start=0).new(InstalledGateway.ACCOUNT)
        if each.user == InstalledGateway.ACCOUNT and each.resource
    ]
    rendered = render(binary("helm"))
    name = InstalledGateway.DEPLOYMENT
    used = {(each.group, each.resource, each.verb) for each in recorded}
    allowed = rights(rendered, "ClusterRole", name) | rights(rendered, "Role", name)
    assert used == allowed
    # What the Role allows is used of its own objects in its own namespace alone.
    own = {(e.namespace, e.name) for e in recorded if e.group == "" and e.verb != "create"}
    assert own == {(NAMESPACE, InstalledGateway.KEYS), (NAMESPACE, "agentjobs-signing-key")}


def test_the_pods_are_admitted_where_pods_are_restricted(platform: Platform) -> None:
    """Pod Security was enforced before they came."""
    labels = json.loads(platform.cluster.kubectl("get", "namespace", NAMESPACE, "-o", "json"))
    level = labels["metadata"]["labels"]["pod-security.kubernetes.io/enforce"]
    assert level == "restricted"
    with pytest.raises(ClusterError, match="violates PodSecurity"):
        platform.cluster.kubectl(
            *("--namespace", NAMESPACE, "run", "loose", "--image=none", "--dry-run=server"),
            "--privileged",
        )
    assert len(platform.gateway.urls) == InstalledGateway.REPLICAS


@pytest.fixture
def over_tls(platform: Platform, tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """A pod of the gateway as the chart makes it with `gateway.tls`; its address, and the CA."""
    pki = Pki(tmp_path)
    pki.create()
    certificate, key = pki.server("gateway.test", ["gateway.test"])
    secret = f"gateway-tls-{uuid.uuid4().hex[:6]}"
    image = ",".join(f"image.{name}={value}" for name, value in IMAGE.items())
    tls = f"gateway.tls.secretName={secret},gateway.acceptUserTokens=true"
    rendered = render(binary("helm"), f"--set={image},{tls}")
    template = only(rendered, "Deployment", InstalledGateway.DEPLOYMENT)["spec"]["template"]
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": secret, "namespace": NAMESPACE},
        "spec": template["spec"] | {"nodeSelector": STAYS, "terminationGracePeriodSeconds": 1},
    }
    place = ["--namespace", NAMESPACE]
    platform.cluster.kubectl(
        *place, "create", "secret", "tls", secret, f"--cert={certificate}", f"--key={key}"
    )
    try:
        platform.cluster.kubectl("create", "-f", "-", input_text=json.dumps(pod))
        platform.cluster.kubectl(
            *place, "wait", "--for=condition=Ready", f"pod/{secret}", "--timeout=60s"
        )
        address = platform.cluster.kubectl(
            *place, "get", "pod", secret, "-o", "jsonpath={.status.podIP}"
        )
        yield address, pki.ca_file
    finally:
        platform.cluster.kubectl(*place, "delete", f"pod/{secret}", f"secret/{secret}")


def test_with_tls_probes_and_callers_speak_https(
    over_tls: tuple[str, Path], agents: Agents
) -> None:
    """R-AUTH: the kubelet's probe has found it ready already."""
    address, authority = over_tls
    options = ["--cacert", str(authority), "--resolve", f"gateway.test:8080:{address}"]
    listed = curl(agents.token, "https://gateway.test:8080/v1/jobs", *options)
    assert listed.code == 200, listed
    assert "since" in listed.body
