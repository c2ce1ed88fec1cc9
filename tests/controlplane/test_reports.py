"""What pods report, each for its own job and nothing else (R-REPORT)."""

import base64
import hashlib
from collections.abc import Callable
from functools import partial

import pytest

from agentjobs.domain.pods import COMPLETION_INDEX, completion_of
from tests.controlplane.reporting import Reporter, running, token_of
from tests.controlplane.stage import Place, Scenario, scenario, told_in
from tests.controlplane.tenants import CALLS, Tenant, wait_until
from tests.gateway_process import Agent, GatewayProcess

pytestmark = pytest.mark.controlplane

LARGE = 5 * 1024 * 1024
STATUS_BYTES = 8192


class Pages:
    """An output as an agent reads it, page by page."""

    def __init__(self, agent: Agent, gateway: GatewayProcess, path: str) -> None:
        self._agent, self._gateway, self._path = agent, gateway, path
        self._end = False

    def read(self) -> bytes:
        got, cursor = b"", ""
        while True:
            after = f"&cursor={cursor}" if cursor else ""
            octets = {"Accept": "application/octet-stream"}
            page = self._agent.send(self._gateway, "GET", self._path + after, None, octets)
            assert page.code == 200, page.raw
            got, cursor = got + page.raw, page.headers["Agentjobs-Next"]
            self._end = page.headers["Agentjobs-End"] == "true"
            if self._end or not page.raw:
                return got

    def ended(self) -> bool:
        self.read()
        return self._end


@scenario("R-REPORT R-AUTH a pod speaks for its own job and nothing else", own=True)
def only_for_itself(place: Place) -> None:
    gateway = place.stage.replicas[0]
    place.stage.operator(place)
    place.tool("reports", resultFrom="report")
    pods = running(place, "a", "b")
    tenant = Tenant(place.stage, place.namespace)
    agent = tenant.account("agent-a", CALLS)
    a = Reporter(gateway, place, "a", token_of(place, pods["a"]))
    before = place.status("b")

    for what, body in (
        ("result", b"of a"),
        ("progress", {"percent": 1}),
        ("summary", {"summary": "x"}),
    ):
        refused = a.tell(what, body, f"b.{place.namespace}")
        assert (refused.code, refused.problem) == (403, "not-its-pod")
        for job in ("a.other", "nothing.shared", "../a", "a"):
            assert a.tell(what, body, job).code == 403

    stray = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "stray", "namespace": place.namespace},
        "spec": {"containers": [{"name": "x", "image": "registry.invalid/x:1"}]},
    }
    for token in (token_of(place, place.api.create(stray)), token_of(place, None)):
        refused = Reporter(gateway, place, "a", token).tell("progress", {"percent": 1})
        assert (refused.code, refused.problem) == (403, "not-its-pod")

    for token in (agent.agent.token, token_of(place, pods["a"], "agentjobs")):
        refused = Reporter(gateway, place, "a", token).tell("progress", {"percent": 1})
        assert (refused.code, refused.problem) == (401, "unauthenticated")
    with_pods_token = Agent(token_of(place, pods["a"]))
    assert with_pods_token.get(gateway, "/v1/jobs").code == 401
    assert with_pods_token.start(gateway, "k", "reports").code == 401

    a.until_taken("result", b"the first")
    assert a.tell("result", b"the first").code == 204, "a lost answer is repeated"
    second = a.tell("result", b"the second")
    assert (second.code, second.problem) == (409, "result-exists")
    place.kubelet.finish(pods["a"])
    assert place.until_over("a")["state"] == "done"
    late = a.tell("result", b"too late")
    assert (late.code, late.problem) == (409, "job-over")
    job = f"a.{place.namespace}"
    wait_until(
        "result of a", lambda: agent.agent.get(gateway, f"/v1/jobs/{job}/result").code == 200
    )
    assert agent.agent.get(gateway, f"/v1/jobs/{job}/result").body["data"] == "the first"
    assert place.status("b") == before

    # A token goes with its pod, as soon as the gateway has forgotten it.
    b = Reporter(gateway, place, "b", token_of(place, pods["b"]))
    place.api.delete("Pod", place.namespace, pods["b"]["metadata"]["name"]).object()
    place.until_gone("Pod", pods["b"]["metadata"]["name"])
    wait_until("end of the token", lambda: b.tell("progress", {"percent": 1}).code == 401)


@scenario("R-REPORT a pod that its job's status does not name yet is asked to come again", own=True)
def not_mirrored_yet(place: Place) -> None:
    gateway = place.stage.replicas[0]
    operator = place.stage.operator(place)
    place.tool("reports", resultFrom="report")
    # The names of its pods have its name's beginning alone.
    name = "c" * 61
    place.create(name, toolRef={"kind": "AgentTool", "name": "reports"})
    job = place.until_job(name)
    operator.freeze()
    try:
        pod = place.until_pod(name)
        place.kubelet.start(pod)
        c = Reporter(gateway, place, name, token_of(place, pod))
        early = c.tell("result", b"early")
        assert (early.code, early.problem) == (503, "pod-not-known")
        assert early.headers["Retry-After"] == "1"
        assert "result" not in place.status(name)
    finally:
        operator.resume()
    c.until_taken("result", b"early")
    kept = place.api.get("AgentJob", place.namespace, name).object()
    assert kept["status"]["result"]["text"] == "early"
    place.kubelet.finish(pod)
    assert place.until_over(name)["state"] == "done"
    assert job["metadata"]["name"] == f"{name}-1"


@scenario("R-REPORT the completion that a pod is of is read from its name, however long", own=True)
def names_of_pods(place: Place) -> None:
    pod = {"containers": [{"name": "x", "image": "registry.invalid/x:1"}], "restartPolicy": "Never"}
    for length in range(54, 64):
        indexed = length <= 61
        body = {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {"name": "j" * length, "namespace": place.namespace},
            "spec": {"template": {"spec": pod}},
        }
        if indexed:
            body["spec"] |= {"completionMode": "Indexed", "completions": 2, "parallelism": 2}
        place.api.create(body)
    wait_until("pods", lambda: len(place.api.items("Pod", place.namespace)) == 8 * 2 + 2)
    for pod in place.api.items("Pod", place.namespace):
        meta = pod["metadata"]
        index = (meta.get("annotations") or {}).get(COMPLETION_INDEX, 0)
        job = meta["labels"]["batch.kubernetes.io/job-name"]
        assert completion_of(meta["name"], job) == int(index)


@scenario("R-REPORT R-EVENT large results and long words never make the status too large", own=True)
def five_megabytes(place: Place) -> None:
    store = (place.stage.directory / f"store-{place.namespace}").as_uri()
    gateway = place.stage.gateway(f"gateway-{place.namespace}", settings={"OUTPUT_STORE": store})
    place.stage.operator(place)
    place.tool("reports", resultFrom="report")
    pods = running(place, "large", "wordy")
    tenant = Tenant(place.stage, place.namespace)
    agent = tenant.account("agent-a", CALLS).agent
    whole = base64.b64encode(hashlib.shake_256(b"seed").digest(LARGE))[:LARGE]
    large = Reporter(gateway, place, "large", token_of(place, pods["large"]))
    large.until_taken("result", whole)
    assert large.tell("result", whole + b"x" * (6 * 1024 * 1024)).code == 413
    place.kubelet.finish(pods["large"])
    status = place.until_over("large")
    assert status["state"] == "done"
    assert "text" not in status["result"]
    assert status["result"]["bytes"] == LARGE

    wordy = Reporter(gateway, place, "wordy", token_of(place, pods["wordy"]))
    wordy.until_taken("progress", {"percent": 40, "message": "m" * 50_000})
    wordy.until_taken("summary", {"summary": "line\n[event] job_completed " + "s" * 50_000})
    wait_until("both", lambda: place.status("wordy").keys() >= {"progress", "summary"})
    assert len(place.status("wordy")["progress"]["message"]) == 256
    assert "\n" not in place.status("wordy")["summary"]
    place.kubelet.finish(pods["wordy"], 1, message="e" * 4096)
    assert place.until_over("wordy")["state"] == "failed"

    got, cursor = b"", ""
    path = f"/v1/jobs/large.{place.namespace}/result"
    wait_until("result", lambda: agent.get(gateway, path).code == 200)
    while True:
        page = agent.get(gateway, path + (f"?cursor={cursor}" if cursor else ""))
        assert page.code == 200
        assert len(page.raw) <= 64 * 1024
        got += page.body["data"].encode()
        cursor = page.body.get("next", "")
        if not cursor:
            break
    assert hashlib.sha256(got).digest() == hashlib.sha256(whole).digest()
    for name in ("large", "wordy"):
        for version in place.record.history(place.uid(name)):
            assert len(str(version.get("status", {})).encode()) <= STATUS_BYTES
        assert len(agent.status(gateway, f"{name}.{place.namespace}").raw) <= 1024


@scenario("R-REPORT progress is written every five seconds at most, the newest of it", own=True)
def often_told(place: Place) -> None:
    gateway = place.stage.replicas[0]
    place.stage.operator(place)
    place.tool("reports", resultFrom="report")
    pods = running(place, "busy")
    busy = Reporter(gateway, place, "busy", token_of(place, pods["busy"]))
    busy.until_taken("progress", {"percent": 1})
    for percent in range(2, 60):
        assert busy.tell("progress", {"percent": percent}).code == 204
    wait_until(
        "newest progress", lambda: place.status("busy").get("progress", {}).get("percent") == 59
    )
    versions = place.record.history(place.uid("busy"))
    shown = [version.get("status", {}).get("progress", {}).get("percent") for version in versions]
    assert set(shown) <= {None, 1, 59}, "what came between is not written"
    place.kubelet.finish(pods["busy"])
    place.until_over("busy")


@scenario(
    "R-REPORT R-OUTPUT output handed in piece by piece is kept once and outlives it", own=True
)
def pieces_of_output(place: Place) -> None:
    directory = place.stage.directory / f"store-{place.namespace}"
    settings = {"OUTPUT_STORE": directory.as_uri(), "MAX_REPORTED_OUTPUT_BYTES": 3_000_000}
    first, second = (
        place.stage.gateway(f"gateway-{n}-{place.namespace}", settings=settings) for n in "ab"
    )
    place.stage.operator(place, settings={"OUTPUT_STORE": directory.as_uri()})
    place.tool("reports", resultFrom="report")
    pods = running(place, "pieces", "beside")
    agent = Tenant(place.stage, place.namespace).account("agent-a", CALLS).agent
    token = token_of(place, pods["pieces"])
    here, there = (Reporter(each, place, "pieces", token) for each in (first, second))
    whole = hashlib.shake_256(b"pieces").digest(3_000_000)
    path = f"/v1/jobs/pieces.{place.namespace}/output?stream=reported"

    here.until_taken("output?offset=0", whole[:1_000_000])
    again = there.tell("output?offset=0", whole[:1_000_000])
    assert (again.code, again.body) == (200, {"offset": 1_000_000}), "a lost answer is repeated"
    for code, problem, query, content in (
        (409, "output-elsewhere", "offset=1000001", b"x"),
        (409, "output-elsewhere", "offset=0", b"x"),
        (400, "invalid-request", "offset=-1", b"x"),
        (400, "invalid-request", "", b"x"),
        (413, "body-too-large", "offset=1000000", whole[: 1024 * 1024 + 1]),
    ):
        refused = here.tell(f"output?{query}", content)
        assert (refused.code, refused.problem) == (code, problem)
    refused = here.tell("output?offset=0", b"x", f"beside.{place.namespace}")
    assert (refused.code, refused.problem) == (403, "not-its-pod")
    assert len(Pages(agent, first, path).read()) == 1_000_000, "it can be read while the tool runs"
    for at in (1_000_000, 2_000_000):
        assert there.tell(f"output?offset={at}", whole[at : at + 1_000_000]).code == 200
    full = here.tell("output?offset=3000000", b"x")
    assert (full.code, full.problem) == (409, "output-full")
    without = Reporter(place.stage.replicas[0], place, "pieces", token)
    refused = without.tell("output?offset=0", b"x")
    assert (refused.code, refused.problem) == (409, "output-not-kept")

    place.kubelet.finish(pods["pieces"])
    place.until_over("pieces")
    wait_until(
        "word that it is over",
        lambda: here.tell("output?offset=3000000", b"x").problem == "job-over",
    )
    place.api.delete("Pod", place.namespace, pods["pieces"]["metadata"]["name"]).object()
    for gateway in (first, second):
        pages = Pages(agent, gateway, path)
        wait_until("end of the output", partial(pages.ended))
        assert hashlib.sha256(pages.read()).digest() == hashlib.sha256(whole).digest()
    kept = directory / "output" / place.uid("pieces")
    assert list(kept.glob("reported/*/*"))
    place.api.delete("AgentJob", place.namespace, "pieces").object()
    place.until_gone("AgentJob", "pieces")
    assert not list(kept.rglob("*/*/*"))
    place.kubelet.finish(pods["beside"])
    place.until_over("beside")


@pytest.mark.parametrize("scenario", told_in(__name__), ids=str)
def test_rule(played: Callable[[Scenario], None], scenario: Scenario) -> None:
    played(scenario)
