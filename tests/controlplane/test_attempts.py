"""Attempts after the first, and slots: what runs how often, and never two at once."""

import itertools
from collections.abc import Callable
from functools import partial

import pytest

from tests.apiclient import Document
from tests.controlplane.stage import (
    Place,
    Scenario,
    moment,
    scenario,
    seconds_between,
    told_in,
)
from tests.controlplane.tenants import CALLS, Tenant, wait_until
from tests.controlplane.test_ends import told_once
from tests.kubelet import settle
from tests.receiver import Receiver

pytestmark = pytest.mark.controlplane

PAUSE = 10
"""Between the first attempt and the second of a tool that failed by itself."""
SLOT_STOPPED_WITHIN = 2


def until_attempt(place: Place, name: str, number: int) -> Document:
    """Wait for the pod of an attempt."""

    def find() -> Document | None:
        job = place.live_job(f"{name}-{number}")
        pods = place.record.children(job["metadata"]["uid"]) if job else []
        return pods[-1] if pods else None

    return place.record.until(f"pod of attempt {number} of {name}", find)


def lives(pods: list[Document]) -> list[tuple[str, str]]:
    """From when to when something of these pods ran."""
    spans = []
    for pod in pods:
        for each in pod["status"].get("containerStatuses", ()):
            over = each["state"].get("terminated") or each.get("lastState", {}).get("terminated")
            if over:
                spans.append((over["startedAt"], over["finishedAt"]))
    return sorted(spans)


@scenario("R-ATTEMPT a failed tool begins again after a pause, as often as it may")
def fails_twice(place: Place) -> None:
    retry = {"maxAttempts": 3, "causes": ["tool_error"]}
    place.create("again", retry=retry, deadlineSeconds=600)
    place.kubelet.run(until_attempt(place, "again", 1), 3)
    waiting = place.until_waiting("again", "retry")
    assert "again-1" in waiting["message"]
    assert "exited with 3" in waiting["message"]
    place.kubelet.run(until_attempt(place, "again", 2), 4)
    place.kubelet.run(until_attempt(place, "again", 3), 5)
    status = place.until_over("again", seconds=60)
    assert (status["state"], status["cause"]["exitCode"]) == ("failed", 5)
    attempts = status["attempts"]
    assert [each["cause"] for each in attempts] == ["tool_error"] * 3
    assert [each["jobName"] for each in attempts] == ["again-1", "again-2", "again-3"]
    made = [job["metadata"]["creationTimestamp"] for job in place.jobs("again")]
    assert len(made) == 3
    assert seconds_between(attempts[0]["finishedAt"], made[1]) >= PAUSE - 1
    assert seconds_between(attempts[1]["finishedAt"], made[2]) >= 2 * PAUSE - 1
    assert set(place.states("again")) == {"queued", "running", "failed"}
    spans = lives(place.pods("again"))
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(spans))


@scenario("R-ATTEMPT a stop between two attempts ends the job and nothing follows")
def stopped_between(place: Place) -> None:
    place.create("halfway", retry={"maxAttempts": 3, "causes": ["tool_error"]})
    place.kubelet.run(until_attempt(place, "halfway", 1), 3)
    place.until_waiting("halfway", "retry")
    place.stop("halfway")
    status = place.until_over("halfway")
    assert (status["state"], status["cause"]["code"]) == ("cancelled", "stopped")
    assert status["cause"]["ran"] is True
    settle()
    assert len(place.jobs("halfway")) == len(status["attempts"]) == 1


@scenario("R-ATTEMPT a death between two attempts makes none too many", own=True)
def killed_between(place: Place) -> None:
    operator = place.stage.operator(place)
    names = [f"kill-{number}" for number in range(6)]
    for name in names:
        place.create(name, retry={"maxAttempts": 2, "causes": ["oom", "tool_error"]})
    for name in names:
        place.kubelet.run(until_attempt(place, name, 1), 1)
        operator.kill()
        operator.start(identity=f"{name}-leader")
    for name in names:
        place.kubelet.run(until_attempt(place, name, 2))
        status = place.until_over(name, seconds=60)
        assert (status["state"], len(status["attempts"])) == ("done", 2)
        assert "cause" not in status
        assert len(place.jobs(name)) == len(place.pods(name)) == 2


@scenario("R-ATTEMPT a queue's eviction never runs a tool twice that may run once")
def evicted_by_a_queue(place: Place) -> None:
    with Receiver() as receiver:
        told = {"deadlineSeconds": 900, "callback": {"url": receiver.url}}
        once_more = {"maxAttempts": 2, "causes": ["disruption"]}
        place.create("queue-a", queueName="q1", **told)
        place.create("queue-b", queueName="q1", **told, retry=once_more)
        place.create("queue-c", queueName="q1", **told)
        place.create("queue-d", **told)
        queue_evicts(place)
        events = {name: told_once(receiver, place, name) for name in BEGUN}
    assert {each["type"] for each in events.values()} == {"job_completed"}
    ends = {name: each["data"]["status"] for name, each in events.items()}
    assert ends == {**dict.fromkeys(BEGUN, "done"), "queue-a": "failed"}
    spans = {name: lives(place.pods(name)) for name in BEGUN}
    assert {name: len(each) for name, each in spans.items()} == BEGUN
    for name in ("queue-b", "queue-c"):
        ended = max([over for _, over in spans[name][:-1]], default="")
        made = max(pod["metadata"]["creationTimestamp"] for pod in place.pods(name))
        assert ended <= made <= spans[name][-1][0], "never two at once"
    assert {job["metadata"]["name"] for job in place.jobs("queue-b")} == {"queue-b-1", "queue-b-2"}
    assert [job["metadata"]["name"] for job in place.jobs("queue-c")] == ["queue-c-1"]


BEGUN = {"queue-a": 1, "queue-b": 2, "queue-c": 1, "queue-d": 1}
"""How often the tool of each began."""


def queue_evicts(place: Place) -> None:
    held = ("queue-a", "queue-b", "queue-c")
    for name in held:
        assert place.until_job(name)["spec"]["suspend"] is True
        _suspend(place, f"{name}-1", on=False)
    place.until_running("queue-a", "queue-b", "queue-d")
    place.until_pod("queue-c")
    deadlines = {name: place.status(name)["deadlineAt"] for name in held}
    for name in held:
        _suspend(place, f"{name}-1", on=True)
    refused = place.patch("queue-d", {"spec": {"suspend": True}})
    assert refused.code == 422
    assert "may not be repeated" in refused.message

    status = place.until_over("queue-a")
    cause = status["cause"]
    assert (status["state"], cause["code"]) == ("failed", "preempted")
    assert (cause["ran"], cause["retryable"], len(status["attempts"])) == (True, True, 1)
    second = place.record.until("second Job of queue-b", lambda: place.live_job("queue-b-2"))
    assert second["spec"]["suspend"] is True
    assert second["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "q1"
    for name in ("queue-b", "queue-c"):
        assert place.state(name) == "queued"
        assert place.status(name)["deadlineAt"] == deadlines[name]

    for name in ("queue-a-1", "queue-b-1", "queue-c-1", "queue-b-2"):
        if place.live_job(name):
            _suspend(place, name, on=False)
    place.kubelet.run(until_attempt(place, "queue-b", 2))
    first_of_c = place.pods("queue-c")[0]["metadata"]["uid"]
    place.kubelet.run(
        place.record.until(
            "another pod of queue-c",
            lambda: [p for p in place.pods("queue-c") if p["metadata"]["uid"] != first_of_c],
        )[0]
    )
    for pod in place.pods("queue-d"):
        place.kubelet.finish(pod)
    ends = {name: place.until_over(name) for name in ("queue-b", "queue-c", "queue-d")}
    assert {name: end["state"] for name, end in ends.items()} == dict.fromkeys(ends, "done")
    assert [len(ends[name]["attempts"]) for name in ends] == [2, 1, 1]
    settle()
    assert [len(place.pods(name)) for name in ("queue-a", "queue-b", "queue-c", "queue-d")] == [
        1,
        2,
        2,
        1,
    ]


@scenario("R-ATTEMPT R-STATE-DERIVED a job that is suspended before it began waits, then goes on")
def held_back_before_it_began(place: Place) -> None:
    for name in ("held-before", "held-stopped", "held-late"):
        place.create(name, deadlineSeconds=8 if name == "held-late" else 600)
        first = place.until_pod(name)
        place.patch(name, {"spec": {"suspend": True}}).object()
        place.until_gone("Pod", first["metadata"]["name"])
        place.until_waiting(name, "suspended")
    place.stop("held-stopped")
    ends = {name: place.until_over(name) for name in ("held-stopped", "held-late")}
    assert [end["state"] for end in ends.values()] == ["cancelled", "timed_out"]
    assert [end["cause"]["ran"] for end in ends.values()] == [False, False]
    deadline = place.status("held-before")["deadlineAt"]
    place.patch("held-before", {"spec": {"suspend": False}}).object()
    place.kubelet.run(until_attempt(place, "held-before", 2))
    status = place.until_over("held-before")
    assert (status["state"], status["deadlineAt"]) == ("done", deadline)
    assert [each.get("cause") for each in status["attempts"]] == ["preempted", None]
    assert place.states("held-before") == ["queued", "running", "done"]


@scenario("R-ATTEMPT a tool that may be repeated is ended by a suspension, and begins again later")
def held_back_while_it_ran(place: Place) -> None:
    place.tool("patient", idempotent=True)
    place.create("pausing", toolRef={"kind": "AgentTool", "name": "patient"})
    first = place.until_running("pausing")["pausing"]
    place.kubelet.when_asked_to_end(first, 143, after=1)
    place.patch("pausing", {"spec": {"suspend": True}}).object()
    place.until_waiting("pausing", "suspended")
    place.until_gone("Pod", first["metadata"]["name"])
    settle()
    assert len(place.jobs("pausing")) == 1
    place.patch("pausing", {"spec": {"suspend": False}}).object()
    place.kubelet.run(until_attempt(place, "pausing", 2))
    status = place.until_over("pausing")
    assert status["state"] == "done"
    assert [each.get("cause") for each in status["attempts"]] == ["preempted", None]
    spans = lives(place.pods("pausing"))
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(spans))


def _suspend(place: Place, job_name: str, *, on: bool) -> None:
    answer = place.api.patch("Job", place.namespace, job_name, {"spec": {"suspend": on}})
    assert answer.code in {200, 404}, answer.message  # gone: so much the better


@scenario("R-SLOTS a job that waits for a slot is stopped at once and never starts")
def stopped_in_line(place: Place) -> None:
    place.tool("single", maxConcurrent=1)
    gateway = place.stage.replicas[0]
    agent = Tenant(place.stage, place.namespace).account("stops-in-line", CALLS).agent
    ref = {"toolRef": {"kind": "AgentTool", "name": "single"}, "deadlineSeconds": 900}
    this = f"slot-b.{place.namespace}"
    place.create("slot-a", **ref)
    pod = place.until_running("slot-a")["slot-a"]
    with Receiver() as receiver:
        place.create("slot-b", **ref, callback={"url": receiver.url})
        waiting = place.until_waiting("slot-b", "slot")
        assert "single" in waiting["message"]
        before = versions(place, "slot-a")
        assert agent.stop(gateway, this).code == 202
        status = place.until_over("slot-b", seconds=SLOT_STOPPED_WITHIN)
        cause = status["cause"]
        assert (status["state"], cause["code"]) == ("cancelled", "stopped")
        assert (cause["ran"], cause["forced"]) == (False, False)
        assert "attempts" not in status
        event = told_once(receiver, place, "slot-b")
        wait_until("end", lambda: agent.status(gateway, this).body["status"] == "cancelled")
        late = agent.stop(gateway, this)
        assert (late.code, late.body["job_status"]) == (409, "cancelled")
        assert told_once(receiver, place, "slot-b") == event
    assert (event["type"], event["data"]["status"]) == ("job_cancelled", "cancelled")
    assert not place.jobs("slot-b")
    assert versions(place, "slot-a") == before
    place.kubelet.finish(pod)
    place.until_over("slot-a")


def versions(place: Place, name: str) -> list[str]:
    """Of the Jobs and pods of an AgentJob: they change with every write."""
    return [each["metadata"]["resourceVersion"] for each in place.jobs(name) + place.pods(name)]


@scenario("R-SLOTS R-DEAD a slot is free when the tool is dead, not when it was asked to go")
def slot_of_a_stopped_job(place: Place) -> None:
    place.tool("stubborn", maxConcurrent=1)
    ref = {"toolRef": {"kind": "AgentTool", "name": "stubborn"}}
    place.create("held-a", **ref)
    pod = place.until_running("held-a")["held-a"]
    place.create("held-b", **ref)
    place.until_waiting("held-b", "slot")
    place.kubelet.when_asked_to_end(pod, 137, after=3)
    place.stop("held-a")
    place.until_state("held-a", "stopping")
    assert not place.jobs("held-b")
    over = place.until_over("held-a")
    assert over["state"] == "cancelled"
    made = place.until_job("held-b")["metadata"]["creationTimestamp"]
    assert moment(made) >= moment(over["finishedAt"])
    place.kubelet.run(place.until_pod("held-b"))
    assert place.until_over("held-b")["state"] == "done"


@scenario("R-SLOTS a limit is never exceeded, by whoever leads, and the first come first", own=True)
def many_for_few_slots(place: Place) -> None:
    operator = place.stage.operator(place)
    place.tool("few", maxConcurrent=2)
    names = [f"few-{number:02}" for number in range(12)]
    for name in names:
        place.create(name, toolRef={"kind": "AgentTool", "name": "few"})
    for round_number in range(len(names)):
        name = place.record.until("running job", partial(_next_with_pod, place, names), seconds=60)
        if round_number % 4 == 2:
            operator.kill()
            operator.start(identity=f"leader-{round_number}")
        place.kubelet.run(place.pods(name)[0])
        place.until_over(name, seconds=60)
    held: list[tuple[str, str]] = []
    for name in names:
        status = place.status(name)
        assert status["state"] == "done"
        (job,) = place.jobs(name)
        held.append((job["metadata"]["creationTimestamp"], status["finishedAt"]))
    for begin, _ in held:
        # Times are whole seconds: who ends in the second in which another begins counts once.
        assert sum(b <= begin < e for b, e in held) <= 2


def _next_with_pod(place: Place, names: list[str]) -> str | None:
    there = [name for name in names if place.pods(name) and place.state(name) != "done"]
    assert len(there) <= 2, there
    return there[0] if there else None


@pytest.mark.parametrize("scenario", told_in(__name__), ids=str)
def test_rule(played: Callable[[Scenario], None], scenario: Scenario) -> None:
    played(scenario)
