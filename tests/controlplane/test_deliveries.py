"""Events on their way: crashes around a try, tries again, questions, changed keys (R-CALLBACK)."""

import base64
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial

import pytest
from standardwebhooks.webhooks import Webhook

from agentjobs.api.agentjob import AgentJob
from agentjobs.api.names import ANNOTATION_REDELIVER
from agentjobs.contract.calls import AskReport
from agentjobs.domain.questions import question_of
from tests.apiclient import Document
from tests.controlplane.callers import Caller, Server
from tests.controlplane.installed import GATEWAY
from tests.controlplane.stage import TELLS_US, Place, Scenario, scenario, seconds_between, told_in
from tests.controlplane.tenants import CALLS, Tenant
from tests.receiver import Receiver, Request

pytestmark = pytest.mark.controlplane

SECONDS = 60.0
"""A leader that was killed leaves its Lease behind, for some ten seconds."""
SHARED = "whsec_" + base64.b64encode(b"shared-by-the-platform-00").decode()
NEWER = "whsk_" + base64.b64encode(b"n" * 32).decode()
KEYS = "agentjobs-signing-key"
SHOWN = "https://agentjobs.example.com"
"""Where agents find the gateway."""
FIRST_PAUSE = range(3, 8)
"""Between a first try and the second: 5 s, give or take a fifth, and times are whole seconds."""


def until_told(place: Place, name: str) -> Document:
    """The outbox, once the event about a job is on record as delivered."""
    place.record.until(
        f"delivery about {name}",
        lambda: place.conditions(name).get("CallbackDelivered") == "True",
        SECONDS,
    )
    outbox: Document = place.status(name)["callback"]
    return outbox


def requests(receiver: Receiver, place: Place, name: str) -> list[Request]:
    return receiver.of(f"{name}.{place.namespace}")


def same_event(tries: list[Request]) -> bool:
    return len({each.id for each in tries}) == 1 and len({each.body for each in tries}) == 1


@scenario(
    "R-EVENT R-CALLBACK R-STOP every-way-to-end-tells-the-runtime", GATEWAY_URL=SHOWN, **TELLS_US
)
def ways_to_end(place: Place) -> None:
    with Receiver() as receiver:
        callback = {"url": receiver.url}
        place.create("way-stopped", deadlineSeconds=600, callback=callback)
        place.create("way-held", deadlineSeconds=600, suspend=True, callback=callback)
        place.create("way-deleted", deadlineSeconds=600, callback=callback)
        place.create("way-late", deadlineSeconds=10, callback=callback)
        running = place.until_running("way-stopped", "way-deleted", "way-late")
        for pod in running.values():
            place.kubelet.when_asked_to_end(pod, 0, after=1)
        place.until_state("way-held", "queued")
        agent = Tenant(place.stage, place.namespace).account("agent-a", CALLS).agent
        stopped = agent.stop(place.stage.replicas[0], f"way-stopped.{place.namespace}")
        assert (stopped.code, stopped.body["status"]) == (202, "stopping")
        place.stop("way-held")
        place.api.delete("AgentJob", place.namespace, "way-deleted").object()
        place.until_gone("AgentJob", "way-deleted")
        told = {name: requests(receiver, place, name) for name in WAYS if name == "way-deleted"}
        for name in WAYS:
            if name != "way-deleted":
                until_told(place, name)
                told[name] = requests(receiver, place, name)
    assert {name: [each.event["type"] for each in tries] for name, tries in told.items()} == WAYS
    for name, tries in told.items():
        event, this = tries[0].event, f"{name}.{place.namespace}"
        data = event["data"]
        assert event.keys() >= {"id", "type", "time"}
        assert data.keys() == {"job_id", "tool", "status", "summary", "cause", "result_url"}
        assert (data["job_id"], data["result_url"]) == (this, f"{SHOWN}/v1/jobs/{this}/result")
        assert (data["status"], data["cause"]) == FINAL[name][:2]
        assert len(data["summary"]) <= 280
        assert len(tries[0].body) < 4096
    for name, final in FINAL.items():
        if name != "way-deleted":
            status = place.status(name)
            assert (status["state"], status["cause"]["code"], status["cause"]["ran"]) == final


WAYS = {
    "way-stopped": ["job_cancelled"],
    "way-held": ["job_cancelled"],
    "way-deleted": ["job_cancelled"],
    "way-late": ["job_timed_out"],
}
FINAL = {
    "way-stopped": ("cancelled", "stopped", True),
    "way-held": ("cancelled", "stopped", False),
    "way-deleted": ("cancelled", "stopped", True),
    "way-late": ("timed_out", "deadline_exceeded", True),
}
"""State, cause, and whether the tool ran."""


@scenario("R-CALLBACK R-TWO-WRITES R-STATE-FINAL crash-around-the-first-send", own=True)
def crashes(place: Place) -> None:
    operator = place.stage.operator(place, settings=TELLS_US)
    with Receiver() as receiver, Receiver() as silent:
        callback = {"url": receiver.url}
        silent.answer = lambda _: 503
        place.create("crash-before-send", callback={"url": silent.url})
        place.create("crash-after-answer", callback=callback)
        place.create("crash-before-end", callback=callback)
        pods = place.until_running("crash-before-send", "crash-after-answer", "crash-before-end")

        # The end is on record, and no receiver has taken it.
        place.kubelet.finish(pods["crash-before-send"])
        ended = place.until_over("crash-before-send")["finishedAt"]
        operator.kill()
        silent.answer = lambda _: 204
        operator.start()
        until_told(place, "crash-before-send")
        assert place.status("crash-before-send")["finishedAt"] == ended

        # It is with the receiver, and the operator does not live to hear that.
        receiver.answer = _and_dies(operator.kill)
        place.kubelet.finish(pods["crash-after-answer"])
        place.record.until("the crash", lambda: not operator.running, SECONDS)
        receiver.answer = lambda _: 204
        ended = place.status("crash-after-answer")["finishedAt"]

        # Nobody is there to see the end.
        place.kubelet.finish(pods["crash-before-end"])
        operator.start()
        for name in ("crash-after-answer", "crash-before-end"):
            until_told(place, name)
        assert place.status("crash-after-answer")["finishedAt"] == ended
        twice = requests(receiver, place, "crash-after-answer")
        assert len(twice) == 2
        assert same_event(twice)
        assert len(requests(receiver, place, "crash-before-end")) == 1
        assert same_event(requests(silent, place, "crash-before-send"))
    for name in pods:
        assert place.state(name) == "done"


def _and_dies(kill: Callable[[], None]) -> Callable[[Request], int]:
    def answer(_: Request) -> int:
        kill()
        return 204

    return answer


@scenario(
    "R-CALLBACK second-try-is-fresh, signed by all keys; the event again by annotation", own=True
)
def tries_again(place: Place) -> None:
    operator = place.stage.operator(place, settings=TELLS_US)
    operator.terminate()
    fields = {"ed25519-newer": NEWER, "hmac": SHARED}
    place.api.patch("Secret", place.namespace, KEYS, {"stringData": fields}).object()
    operator.start()
    shown = place.api.get("ConfigMap", place.namespace, KEYS).object()["data"]
    assert sorted(shown) == ["ed25519", "ed25519-newer"]
    with Receiver() as receiver:
        codes = [500]
        receiver.answer = lambda _: codes.pop(0) if codes else 204
        place.create("again", callback={"url": receiver.url})
        place.kubelet.run(place.until_pod("again"))
        first = place.record.until("a first try", lambda: _with_tries(place, 1))
        assert first["lastError"] == "the receiver answered 500"
        pause = seconds_between(first["firstAttemptAt"], first["nextAttemptAt"])
        assert pause in FIRST_PAUSE
        assert place.conditions("again")["CallbackDelivered"] == "False"
        (delivery,) = until_told(place, "again")["deliveries"]
        assert delivery["attempts"] == 2
        tries = requests(receiver, place, "again")
        assert same_event(tries)
        for each in tries:
            assert abs(each.at - int(each.headers["webhook-timestamp"])) <= 2
            Webhook(SHARED).verify(each.body, each.headers)
            for key in shown.values():
                each.verify(key)
        failures = [each for each in place.events("again") if each["type"] == "Warning"]
        assert [each["reason"] for each in failures] == ["DeliveryPending"]
        assert "nextAttemptAt" not in delivery
        tried = partial(operator.metric, "agentjobs_deliveries_total")
        assert (tried(outcome="failed"), tried(outcome="taken"), tried()) == (1, 1, 2)
        settled = {"type": "job_completed", "state": "delivered"}
        assert operator.metric("agentjobs_events_total", **settled) == 1
        assert operator.metric("agentjobs_told_seconds_count") == 1

        for wish in ("once", "twice"):
            before = len(requests(receiver, place, "again"))
            wishes = {"metadata": {"annotations": {ANNOTATION_REDELIVER: wish}}}
            place.patch("again", wishes).object()
            place.record.until(wish, partial(_redelivered, place, wish))
            assert len(requests(receiver, place, "again")) == before + 1
        assert same_event(requests(receiver, place, "again"))
        assert (tried(outcome="failed"), tried(outcome="taken"), tried()) == (1, 3, 4)


def _with_tries(place: Place, least: int) -> Document | None:
    for each in (place.status("again").get("callback") or {}).get("deliveries") or ():
        if each["attempts"] >= least:
            found: Document = each
            return found
    return None


def _redelivered(place: Place, wish: str) -> bool:
    outbox = place.status("again")["callback"]
    (delivery,) = outbox["deliveries"]
    return outbox.get("redelivered") == wish and delivery["state"] == "delivered"


@scenario("R-EVENT what a job asks, and how far it is, is told while it goes on", **TELLS_US)
def goes_on(place: Place) -> None:
    gateway = Caller(Server.of(place.stage.plane.kubeconfig), GATEWAY, "system:masters")
    with Receiver() as receiver:
        ends = ["job_completed", "job_progress"]
        place.create("asks", callback={"url": receiver.url})
        place.create("reports", callback={"url": receiver.url, "events": ends})
        pods = place.until_running("asks", "reports")
        for name in pods:
            asked = AskReport(
                key="colour", prompt="Which colour?", answer_schema={"type": "object"}
            )
            job = AgentJob.from_json(place.job(name))
            gateway.create(question_of(job, asked, datetime.now(UTC))).object()
        progress = {"percent": 40, "message": "page 4 of 10", "at": "2026-11-30T17:14:35Z"}
        status = {"status": {"progress": progress}}
        place.api.patch("AgentJob", place.namespace, "reports", status, "status").object()
        question = receiver.wait_for(f"asks.{place.namespace}")
        report = receiver.wait_for(f"reports.{place.namespace}")
        for pod in pods.values():
            place.kubelet.finish(pod)
        for name in pods:
            until_told(place, name)
        types = {name: [e.event["type"] for e in requests(receiver, place, name)] for name in pods}
    assert types == {
        "asks": ["job_input_required", "job_completed"],
        "reports": ["job_progress", "job_completed"],
    }
    told = question.event["data"]
    assert (told["status"], told["question"]) == ("input_required", "colour")
    assert told["summary"] == "Which colour?"
    told = report.event["data"]
    assert (told["percent"], told["summary"]) == (40, "page 4 of 10")


@pytest.mark.parametrize("scenario", told_in(__name__), ids=str)
def test_rule(played: Callable[[Scenario], None], scenario: Scenario) -> None:
    played(scenario)
