"""Jobs that wait for each other (R-DEPENDS)."""

import time
from datetime import datetime
from typing import Any

import pytest

from tests.controlplane.stage import CALLBACKS, Place, Scenario, scenario, told_in

pytestmark = pytest.mark.controlplane

RECEIVER = "https://receiver.example.com/hook"
BURST = 25
DEPENDENTS = [f"late-{number:02}" for number in range(2 * BURST)]
WITHIN = 5.0
LOADED = 5.0
"""Seconds that a busy machine may add."""


def needs(*names: str, condition: str = "Succeeded") -> list[dict[str, str]]:
    return [{"name": name, "condition": condition} for name in names]


def owed(place: Place, name: str) -> list[str]:
    """What its runtime is to be told: part of the terminal write, whoever may be reached."""
    deliveries = place.status(name)["callback"]["deliveries"]
    return [each["type"] for each in deliveries]


def moment(text: str) -> datetime:
    return datetime.fromisoformat(text)


@scenario("R-DEPENDS R-CAUSE R-EVENT late-dependent-of-a-failed-job", CALLBACKS_ALLOW=CALLBACKS)
def late_dependents(place: Place) -> None:
    callback = {"callback": {"url": RECEIVER}}
    place.create("bad", deadlineSeconds=600)
    pod = place.until_running("bad")["bad"]
    for number, name in enumerate(DEPENDENTS[:BURST]):
        place.create(name, dependsOn=needs("bad"), deadlineSeconds=600, **callback)
        if number == BURST // 2:
            place.kubelet.finish(pod, 3)
    ended = place.until_over("bad")
    assert (ended["cause"]["code"], ended["cause"]["exitCode"]) == ("tool_error", 3)
    for name in DEPENDENTS[BURST:]:
        place.create(name, dependsOn=needs("bad"), deadlineSeconds=600, **callback)
    for name in DEPENDENTS:
        status = place.until_over(name)
        cause = status["cause"]
        assert (status["state"], cause["code"]) == ("failed", "dependency_failed")
        assert cause["ran"] is False
        assert "AgentJob bad is failed" in cause["message"]
        assert not status.get("attempts")
        assert not place.jobs(name)
        created = place.job(name)["metadata"]["creationTimestamp"]
        since = max(moment(created), moment(ended["finishedAt"]))
        late = (moment(status["finishedAt"]) - since).total_seconds()
        assert late <= WITHIN + LOADED
        assert owed(place, name) == ["job_completed"]


@scenario("R-DEPENDS R-DEADLINE ring-of-dependencies", CALLBACKS_ALLOW=CALLBACKS)
def ring(place: Place) -> None:
    callback = {"callback": {"url": RECEIVER}, "deadlineSeconds": 3600}
    refused = place.try_create("s", dependsOn=needs("s", condition="Finished"))
    assert (refused.code, "itself" in refused.message) == (422, True)
    assert place.stage.api.get("AgentJob", place.namespace, "s").code == 404
    place.create("a", dependsOn=needs("c"), **callback)
    place.create("b", dependsOn=needs("a"), **callback)
    place.create("d", dependsOn=needs("not-there-yet"), **{**callback, "deadlineSeconds": 8})
    waiting = place.until_waiting("d", "dependency")
    assert "not-there-yet, which does not exist" in waiting["message"]
    for name in "ab":
        place.until_waiting(name, "dependency")
    _pass_the_second(place.job("b")["metadata"]["creationTimestamp"])
    place.create("c", dependsOn=needs("b", condition="Finished"), **callback)
    status = {name: place.until_over(name) for name in "abcd"}
    causes = {name: status[name]["cause"] for name in status}
    assert causes["c"]["code"] == "invalid_spec"
    assert (causes["c"]["ran"], causes["c"]["retryable"]) == (False, False)
    assert "c waits for b waits for a waits for c" in causes["c"]["message"]
    for name in "ab":
        assert (status[name]["state"], causes[name]["code"]) == ("failed", "dependency_failed")
        assert causes[name]["ran"] is False
    made = moment(place.job("c")["metadata"]["creationTimestamp"])
    for name in "abc":
        took = (moment(status[name]["finishedAt"]) - made).total_seconds()
        assert took <= 10 + LOADED
    assert status["d"]["state"] == "timed_out"
    assert (causes["d"]["code"], causes["d"]["ran"]) == ("deadline_exceeded", False)
    assert "not-there-yet, which does not exist" in causes["d"]["message"]
    late = moment(status["d"]["finishedAt"]) - moment(status["d"]["deadlineAt"])
    assert 0 <= late.total_seconds() <= 1 + LOADED
    kinds = {"a": "job_completed", "b": "job_completed", "c": "job_completed", "d": "job_timed_out"}
    for name, kind in kinds.items():
        assert owed(place, name) == [kind]
        assert not place.jobs(name)


def _pass_the_second(stamp: str) -> None:
    """Creation times are whole seconds; who of a ring is the youngest is told by them."""
    while moment(stamp).timestamp() + 1 > time.time():
        time.sleep(0.05)


@scenario("R-DEPENDS a dependency that is deleted has ended, for those who wait for it")
def deleted_dependency(place: Place) -> None:
    place.create("first")
    place.until_running("first")
    place.create("strict", dependsOn=needs("first"))
    place.create("lenient", dependsOn=needs("first", condition="Finished"))
    for name in ("strict", "lenient"):
        place.until_waiting(name, "dependency")
    place.stage.api.delete("AgentJob", place.namespace, "first")
    assert place.until_over("strict")["cause"]["code"] == "dependency_failed"
    assert place.until_pod("lenient")
    place.until_gone("AgentJob", "first")


@scenario("R-DEPENDS R-TTL a job is not collected before all who wait for it have seen its end")
def kept_for_its_dependents(place: Place) -> None:
    place.create("early", ttlSecondsAfterFinished=0)
    place.create("slow")
    place.create("of-both", dependsOn=needs("early", "slow"))
    place.kubelet.run(place.until_pod("early"))
    place.until_over("early")
    _pass_the_second(place.status("early")["finishedAt"])
    slow = place.until_running("slow")["slow"]
    assert place.job("early"), "its end is still to be seen"
    place.kubelet.finish(slow)
    place.kubelet.run(place.until_pod("of-both"))
    assert place.until_over("of-both")["state"] == "done"
    place.until_gone("AgentJob", "early")


@pytest.mark.parametrize("scenario", told_in(__name__), ids=str)
def test_rule(played: Any, scenario: Scenario) -> None:
    played(scenario)
