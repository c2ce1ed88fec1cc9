"""Tools that ask: the question on record, answered once by whom it is for (R-REPORT, R-MRTR)."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

from tests.apiclient import Document
from tests.chart import ROOT
from tests.controlplane.callers import Answer
from tests.controlplane.installed import inputrequest
from tests.controlplane.reporting import Reporter, known, token_of
from tests.controlplane.stage import Place, Scenario, scenario, told_in
from tests.controlplane.tenants import CALLS, Account, Right, Tenant, use, wait_until
from tests.gateway_process import Reply

pytestmark = pytest.mark.controlplane

SCHEMA: Document = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}
DROP: Document = {"key": "drop", "prompt": "Drop the table?", "answer_schema": SCHEMA}
STATUSES = Right("inputrequests/status", ("patch",))
AUDITED = re.compile(r"agentjobs\.audit.*?(\{.*\})")
YES: Document = {"outcome": "answered", "answer": {"ok": True}}
NO: Document = {"outcome": "answered", "answer": {"ok": False}}


class Town:
    """A namespace with people, an operator, two replicas of the gateway, and tools that ask."""

    def __init__(self, place: Place, *jobs: str) -> None:
        self.place = place
        self.replicas = place.stage.replicas
        self.operator = place.stage.operator(place)
        place.tool("reports", resultFrom="report")
        tenant = Tenant(place.stage, place.namespace)
        self.a = tenant.account("agent-a", CALLS, use("reports"), STATUSES)
        self.b = tenant.account("agent-b", CALLS, STATUSES)
        self.tools: dict[str, Reporter] = {}
        self.pods: dict[str, Document] = {}
        for name in jobs:
            ref = {"kind": "AgentTool", "name": "reports"}
            self.a.create(name, toolRef=ref, requestedBy=self.a.user).object()
        self.pods = place.until_running(*jobs)
        for name in jobs:
            wait_until(f"podUIDs of {name}", partial(known, place, name))
            token = token_of(place, self.pods[name])
            self.tools[name] = Reporter(self.replicas[0], place, name, token)

    def asks(self, name: str, question: Document | None = None, replica: int = 0) -> Reply:
        return self.tool(name, replica).until_taken("ask", question or DROP)

    def tool(self, name: str, replica: int = 0) -> Reporter:
        token = self.tools[name].token
        return Reporter(self.replicas[replica], self.place, name, token)

    def told(self, name: str, key: str = "drop", wait: int = 0, replica: int = 0) -> Document:
        """What the tool is told of its question."""
        reply = self.tool(name, replica).ask(f"ask/{key}" + (f"?wait={wait}" if wait else ""))
        assert reply.code == 200, reply.raw
        return reply.body

    def answers(
        self, who: Account, name: str, body: Any, key: str = "drop", replica: int = 1
    ) -> Reply:
        path = f"/v1/jobs/{name}.{self.place.namespace}/inputs/{key}"
        return who.agent.send(self.replicas[replica], "POST", path, body)

    def on_record(self, name: str) -> list[Document]:
        found = self.place.api.items("InputRequest", self.place.namespace)
        return [each for each in found if each["spec"]["jobName"] == name]

    def patches(self, who: Account, name: str, **status: Any) -> Answer:
        """Answer with kubectl."""
        (question,) = self.on_record(name)
        named = inputrequest(self.place.namespace, question["metadata"]["name"], {})
        return who.kubectl.patch(named, {"status": status}, "status")

    def open(self, name: str) -> list[str]:
        path = f"/v1/jobs/{name}.{self.place.namespace}/inputs"
        return [each["key"] for each in self.a.agent.get(self.replicas[1], path).body["inputs"]]

    def end(self) -> None:
        for name, pod in self.pods.items():
            self.place.kubelet.finish(pod)
            self.place.until_over(name)


@scenario(
    "R-REPORT R-POLICY-INPUT a tool asks, its requester answers, and the tool goes on", own=True
)
def asked_and_answered(place: Place) -> None:
    town = Town(place, "over-http", "by-kubectl", "says-no", "declines", "past-the-schema")
    for name in town.tools:
        asked = town.asks(name)
        assert asked.body["outcome"] == "open"
        assert "answer" not in asked.body
    for name in town.tools:
        place.until_state(name, "input_required")
        (question,) = town.on_record(name)
        assert question["spec"]["requestedBy"] == town.a.user
        (owner,) = question["metadata"]["ownerReferences"]
        assert (owner["kind"], owner["uid"]) == ("AgentJob", place.uid(name))
        wait_until("question", lambda name=name: town.open(name) == ["drop"])
    shown = town.a.agent.status(town.replicas[0], f"over-http.{place.namespace}")
    assert shown.body["status"] == "input_required"

    with ThreadPoolExecutor(len(town.tools)) as pool:
        waiting: dict[str, Future[Document]] = {
            name: pool.submit(town.told, name, wait=60, replica=number % 2)
            for number, name in enumerate(town.tools)
        }
        refuses_what_is_no_answer(town)
        assert town.answers(town.a, "over-http", YES).code == 204
        assert town.answers(town.a, "says-no", NO).code == 204
        assert town.answers(town.a, "declines", {"outcome": "declined"}).code == 204
        town.patches(town.a, "by-kubectl", answeredBy=town.a.user, **YES).object()
        badly = {"outcome": "answered", "answer": {"ok": "certainly"}}
        town.patches(town.a, "past-the-schema", answeredBy=town.a.user, **badly).object()
        told = {name: each.result() for name, each in waiting.items()}
    assert {name: (each["outcome"], each.get("answer")) for name, each in told.items()} == {
        "over-http": ("answered", {"ok": True}),
        "by-kubectl": ("answered", {"ok": True}),
        "says-no": ("answered", {"ok": False}),
        "declines": ("declined", None),
        "past-the-schema": ("invalid", None),
    }
    for name in town.tools:
        place.until_state(name, "running")
        assert town.asks(name).body["outcome"] == told[name]["outcome"], "asked again, no new one"
        late = town.answers(town.a, name, NO)
        assert (late.code, late.problem) == (409, "already-answered")
        (question,) = town.on_record(name)
        assert question["status"]["answeredBy"] == town.a.user
        assert place.states(name)[-3:] == ["running", "input_required", "running"]
    town.end()
    assert {place.state(name) for name in town.tools} == {"done"}
    is_written_down(town)


def refuses_what_is_no_answer(town: Town) -> None:
    """Nothing of it closes a question."""
    for wrong, pointer in (
        ({"outcome": "answered"}, "/answer"),
        ({"outcome": "answered", "answer": {"ok": 1}}, "/answer/ok"),
        ({"outcome": "answered", "answer": {"ok": "yes"}}, "/answer/ok"),
        ({"outcome": "answered", "answer": {"ok": True, "all": True}}, "/answer"),
        ({"outcome": "declined", "answer": {"ok": True}}, "/answer"),
    ):
        refused = town.answers(town.a, "over-http", wrong)
        assert (refused.code, refused.problem) == (422, "invalid-body")
        assert [each["pointer"] for each in refused.body["errors"]] == [pointer]
    refused = town.answers(town.b, "over-http", YES)
    assert (refused.code, refused.problem) == (403, "forbidden")
    assert town.answers(town.a, "over-http", YES, key="other").code == 404
    assert town.told("over-http")["outcome"] == "open"
    assert town.patches(town.b, "by-kubectl", answeredBy=town.b.user, **YES).code in {403, 422}
    assert town.patches(town.a, "by-kubectl", outcome="expired").code in {403, 422}


def is_written_down(town: Town) -> None:
    """Who has asked, and who has answered."""
    place = town.place
    answered = [each for each in audited(town) if each["job_id"].startswith("over-http.")]
    (asked, *_) = answered
    assert (asked["action"], asked["key"]) == ("ask", "drop")
    assert asked["who"] == f"pod {place.namespace}/{town.pods['over-http']['metadata']['name']}"
    (given,) = [each for each in answered if each["action"] == "answer"]
    assert (given["who"], given["outcome"]) == (town.a.user, "answered")
    assert given["digest"].startswith("sha256:")


@scenario(
    "R-REPORT R-STATE-DERIVED what nobody answers expires, or is withdrawn at the end", own=True
)
def nobody_answers(place: Place) -> None:
    town = Town(place, "expires", "ends", "stopped", "alone")
    soon = {**DROP, "expires_seconds": 3}
    town.asks("expires", soon)
    town.asks("expires", {**DROP, "key": "other"})
    for name in ("ends", "stopped"):
        town.asks(name)
        place.until_state(name, "input_required")
    assert town.told("expires", wait=20)["outcome"] == "expired"
    late = town.answers(town.a, "expires", YES)
    assert (late.code, late.problem) == (409, "already-answered")
    wait_until("expired", lambda: outcomes(town, "expires") == {"drop": "expired", "other": ""})
    assert place.state("expires") == "input_required", "the other one is still open"
    assert town.answers(town.a, "expires", YES, key="other").code == 204
    place.until_state("expires", "running")

    place.kubelet.finish(town.pods["ends"])
    place.until_over("ends")
    place.stop("stopped")
    place.until_state("stopped", "stopping")
    place.kubelet.finish(town.pods["stopped"], 143)
    place.until_over("stopped")
    for name in ("ends", "stopped"):
        wait_until(f"end of the question of {name}", partial(is_withdrawn, town, name))
        late = town.answers(town.a, name, YES)
        assert (late.code, late.problem) == (409, "already-answered")
        gone = town.tool(name).tell("ask", {**DROP, "key": "more"})
        assert (gone.code, gone.problem) == (409, "job-over")

    goes_on_without_an_operator(town)
    place.api.delete("AgentJob", place.namespace, "ends").object()
    place.until_gone("AgentJob", "ends")
    wait_until("end of its record", lambda: town.on_record("ends") == [])
    for name in ("expires", "alone"):
        place.kubelet.finish(town.pods[name])
        assert place.until_over(name)["state"] == "done"


@scenario("R-REPORT R-AUTH what a tool may ask is bounded, and asked once under its key", own=True)
def bounds(place: Place) -> None:
    town = Town(place, "busy", "beside")
    busy = town.tool("busy")
    with ThreadPoolExecutor(8) as pool:
        replies = list(pool.map(lambda number: town.asks("busy", replica=number % 2), range(8)))
    assert {reply.body["outcome"] for reply in replies} == {"open"}
    assert len(town.on_record("busy")) == 1
    for change, differs in (
        ({"prompt": "Drop both?"}, ["prompt"]),
        ({"answer_schema": None, "kind": "sampling"}, ["kind", "answer_schema"]),
    ):
        other = busy.tell("ask", {**DROP, **change})
        assert (other.code, other.problem) == (422, "question-differs")
        assert other.body["differs"] == differs
    for change, pointer in (
        ({"kind": "approval"}, "/kind"),
        ({"key": "a/b"}, "/key"),
        ({"prompt": "x" * 4097}, "/prompt"),
        ({"expires_seconds": 0}, "/expires_seconds"),
        ({"approvers": ["user:x"]}, "/approvers"),
        ({"answer_schema": {"type": "string"}}, "/answer_schema"),
        ({"answer_schema": {"properties": {"a": {"$ref": "http://x.example/"}}}}, "/answer_schema"),
        ({"answer_schema": {"description": "x" * 17_000}}, "/answer_schema"),
        ({"answer_schema": {"maxProperties": 2**64 + 1}}, "/answer_schema/maxProperties"),
        ({"answer_schema": {"enum": [{"a": -(2**53) - 1}]}}, "/answer_schema/enum/0/a"),
    ):
        refused = busy.tell("ask", {**DROP, "key": "new", **change})
        assert (refused.code, refused.problem) == (422, "invalid-body"), change
        assert [each["pointer"] for each in refused.body["errors"]] == [pointer]
    more = [{"key": f"more-{number}", "prompt": "?"} for number in range(20)]
    with ThreadPoolExecutor(20) as pool:
        codes = list(pool.map(lambda body: town.tool("busy").tell("ask", body).code, more))
    assert sorted(codes) == [200] * 7 + [409] * 13
    edge = {"type": "object", "properties": {"n": {"enum": [2**53, -(2**53), 0.1, 1.0, 5e-324]}}}
    edge = {"key": "numbers", "prompt": "?", "answer_schema": edge}
    for replica in (0, 0, 1):
        assert town.asks("beside", edge, replica=replica).code == 200, "numbers come back as sent"
    full = busy.tell("ask", {"key": "one-more", "prompt": "?"})
    assert (full.code, full.problem) == (409, "too-many-questions")
    assert town.answers(town.a, "busy", YES).code == 204
    wait_until("room", lambda: busy.tell("ask", {"key": "one-more", "prompt": "?"}).code == 200)

    nothing = {"type": "object", "properties": {"x": {"const": None}}, "required": ["x"]}
    nothing = {"key": "nothing", "prompt": "?", "answer_schema": nothing}
    assert town.asks("beside", nothing).body == town.asks("beside", nothing, replica=1).body
    given = {"outcome": "answered", "answer": {"x": None}}
    assert town.answers(town.a, "beside", given, key="nothing").code == 204
    assert town.told("beside", "nothing", wait=20)["answer"] == {"x": None}, "null is an answer"

    there = f"beside.{place.namespace}"
    for reply in (busy.tell("ask", DROP, there), busy.ask("ask/drop", there)):
        assert (reply.code, reply.problem) == (403, "not-its-pod")
    assert busy.ask("ask/unknown").code == 404
    assert town.tool("beside").ask("ask/drop").code == 404, "questions are the job's own"
    long = {**DROP, "expires_seconds": 366 * 24 * 3600}
    expires_at = town.asks("beside", long).body["expires_at"]
    assert expires_at == place.status("beside")["deadlineAt"]
    town.end()


EXAMPLES = (ROOT / "docs/write-a-tool.md").read_text(encoding="utf-8")
TOLD_IN = {"sh": ("/bin/sh", "-c"), "python": (sys.executable, "-c")}


def example(language: str) -> str:
    """The one example of the page in that language."""
    (block,) = re.findall(rf"```{language}\n(.*?)```", EXAMPLES, re.DOTALL)
    return str(block)


@scenario("R-REPORT R-OUTPUT the examples of docs/write-a-tool.md do what the page says", own=True)
def examples(place: Place) -> None:
    directory = place.stage.directory / f"store-{place.namespace}"
    store = {"OUTPUT_STORE": directory.as_uri()}
    gateway = place.stage.gateway(f"gateway-{place.namespace}", settings=store)
    jobs = {
        f"{language}-{ok}".lower(): (language, ok) for language in TOLD_IN for ok in (True, False)
    }
    town = Town(place, *jobs)
    running: dict[str, subprocess.Popen[str]] = {}
    for name, (language, _) in jobs.items():
        token = place.stage.directory / f"token-{name}"
        token.write_text(town.tools[name].token, encoding="utf-8")
        environment = {
            "PATH": os.environ["PATH"],
            "AGENTJOBS_TOKEN_FILE": str(token),
            "AGENTJOBS_JOB_ID": f"{name}.{place.namespace}",
            "AGENTJOBS_REPORT_URL": f"{gateway.url}/v1/report",
        }
        running[name] = subprocess.Popen(
            [*TOLD_IN[language], example(language)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    for name, (_, ok) in jobs.items():
        wait_until(f"question of {name}", lambda name=name: town.open(name) == ["drop"])
        assert running[name].poll() is None, "it waits"
        answered = YES if ok else {"outcome": "declined"}
        assert town.answers(town.a, name, answered).code == 204
    for name, process in running.items():
        printed, _ = process.communicate(timeout=60)
        assert process.returncode == 0, f"{name}: {printed}"
        place.kubelet.finish(town.pods[name])
    for name, (_, ok) in jobs.items():
        did = "dropped" if ok else "kept"
        status = place.until_over(name)
        assert status["state"] == "done"
        assert status["result"]["text"] == did
        assert status["summary"] == f"the table was {did}"
        assert status["progress"]["percent"] == 10
        path = f"/v1/jobs/{name}.{place.namespace}/output?stream=reported"
        octets = {"Accept": "application/octet-stream"}
        page = town.a.agent.send(gateway, "GET", path, None, octets)
        assert page.raw == b"found: \xff\nthen: " + did.encode() + b"\n"


def audited(town: Town) -> list[dict[str, str]]:
    """What both replicas have written down of this namespace."""
    lines = [line for gateway in town.replicas for line in gateway.log.splitlines()]
    found = [told for line in lines if (told := AUDITED.search(line))]
    told = [json.loads(each[1]) for each in found]
    return [each for each in told if each["job_id"].endswith(f".{town.place.namespace}")]


def goes_on_without_an_operator(town: Town) -> None:
    """Questions are asked and answered; the next operator closes what has expired."""
    town.operator.kill()
    town.asks("alone", {**DROP, "expires_seconds": 3})
    town.asks("alone", {**DROP, "key": "other"})
    assert town.answers(town.a, "alone", YES, key="other").code == 204
    assert town.told("alone", "other", wait=20)["answer"] == {"ok": True}
    began = time.monotonic()
    assert town.told("alone", wait=20)["outcome"] == "expired"
    assert time.monotonic() - began < 10, "its time is over, whoever closes it"
    late = town.answers(town.a, "alone", YES)
    assert (late.code, late.problem) == (409, "already-answered")
    assert town.open("alone") == []
    assert outcomes(town, "alone")["drop"] == ""
    town.operator.start()
    wait_until("expired", lambda: outcomes(town, "alone")["drop"] == "expired")


def outcomes(town: Town, name: str) -> dict[str, str]:
    return {
        each["spec"]["key"]: (each.get("status") or {}).get("outcome", "")
        for each in town.on_record(name)
    }


def is_withdrawn(town: Town, name: str) -> bool:
    return outcomes(town, name) == {"drop": "withdrawn"}


@pytest.mark.parametrize("scenario", told_in(__name__), ids=str)
def test_rule(played: Callable[[Scenario], None], scenario: Scenario) -> None:
    played(scenario)
