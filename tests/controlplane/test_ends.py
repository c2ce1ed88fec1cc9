"""How jobs end that run, that never run, and that are asked to end."""

from collections.abc import Callable
from functools import partial

import pytest

from tests.apiclient import Document
from tests.controlplane.stage import (
    TELLS_US,
    Place,
    Scenario,
    moment,
    scenario,
    seconds_between,
    template,
    told_in,
)
from tests.controlplane.tenants import CALLS, Tenant, wait_until
from tests.gateway_process import Reply
from tests.kubelet import settle
from tests.operator_process import OperatorProcess
from tests.receiver import Receiver

pytestmark = pytest.mark.controlplane

LATE_SECONDS = 10
LOADED_SECONDS = 4
"""How late a deadline may be noticed while everything else is played on the same cores."""
QUOTA_SEEN_WITHIN = 10


def told_once(receiver: Receiver, place: Place, name: str) -> Document:
    """The one event about a job, after it is on record as delivered."""
    place.record.until(
        f"delivery about {name}",
        lambda: place.conditions(name).get("CallbackDelivered") == "True",
    )
    (request,) = receiver.of(f"{name}.{place.namespace}")
    return request.event


@scenario(
    "R-CAUSE a pull that heals runs, a hopeless one fails, an endless one times out", **TELLS_US
)
def pulls(place: Place) -> None:
    with Receiver() as receiver:
        callback = {"url": receiver.url}
        for name, limit in (("heals", 120), ("hopeless", 120), ("endless", 15)):
            place.create(
                f"pull-{name}",
                pendingDeadlineSeconds=limit,
                deadlineSeconds=600,
                callback=callback,
            )
        pulls_end(place)
        events = {name: told_once(receiver, place, f"pull-{name}") for name in PULLS}
    assert {name: (each["type"], each["data"]["status"]) for name, each in events.items()} == {
        "heals": ("job_completed", "done"),
        "hopeless": ("job_completed", "failed"),
        "endless": ("job_timed_out", "timed_out"),
    }


PULLS = ("heals", "hopeless", "endless")


def pulls_end(place: Place) -> None:
    pods = {name: place.until_pod(f"pull-{name}") for name in ("heals", "hopeless", "endless")}
    place.kubelet.waits(pods["hopeless"], "InvalidImageName", "cannot parse image name")
    for name in ("heals", "endless"):
        place.kubelet.waits(pods[name], "ErrImagePull", "registry answers 503")
    for name in ("heals", "endless"):
        place.kubelet.waits(pods[name], "ImagePullBackOff", "registry answers 503")
    waiting = place.until_waiting("pull-heals", "image_pull")
    assert "ImagePull" in waiting["message"]
    assert "registry answers 503" in waiting["message"]

    cause = place.until_state("pull-hopeless", "failed", seconds=10)["cause"]
    assert (cause["code"], cause["ran"], cause["retryable"]) == ("image_pull", False, False)
    assert "InvalidImageName of registry.invalid/tool:1" in cause["message"]

    status = place.until_state("pull-endless", "timed_out")
    cause = status["cause"]
    assert (cause["code"], cause["ran"]) == ("pending_deadline_exceeded", False)
    assert "ImagePullBackOff of registry.invalid/tool:1" in cause["message"]
    assert "registry answers 503" in cause["message"]
    made = place.jobs("pull-endless")[0]["metadata"]["creationTimestamp"]
    assert 15 <= seconds_between(made, status["finishedAt"]) <= 15 + LATE_SECONDS

    assert place.state("pull-heals") == "queued"
    place.kubelet.run(pods["heals"])
    status = place.until_over("pull-heals")
    assert (status["state"], len(status["attempts"])) == ("done", 1)
    assert "failed" not in place.states("pull-heals")
    for name in pods:
        assert len(place.jobs(f"pull-{name}")) == len(place.pods(f"pull-{name}")) == 1


@scenario("R-CAUSE an eviction that only the pod's status knows is a failure, once", **TELLS_US)
def evicted(place: Place) -> None:
    words = "volume scratch is over its limit of 1Gi"
    once_more = {"maxAttempts": 3, "causes": ["disruption"]}
    with Receiver() as receiver:
        place.create("evicted", retry=once_more, callback={"url": receiver.url})
        pods = place.until_running("evicted")
        place.kubelet.evict(pods["evicted"], words)
        status = place.until_state("evicted", "failed")
        event = told_once(receiver, place, "evicted")
    assert (event["type"], event["data"]["status"]) == ("job_completed", "failed")
    assert words in event["data"]["summary"]
    cause = status["cause"]
    assert (cause["code"], cause["ran"], cause["retryable"]) == ("evicted", True, False)
    assert words in cause["message"]
    assert "exitCode" not in cause
    assert len(status["attempts"]) == len(place.jobs("evicted")) == len(place.pods("evicted")) == 1


@scenario(
    "R-CAUSE a full quota is waited for, with its name in sight", RELIST_SECONDS=300, **TELLS_US
)
def quota_full(place: Place) -> None:
    with Receiver() as receiver:
        fill_quota(place)
        for name, more in (("patient", {}), ("hasty", {"pendingDeadlineSeconds": 30})):
            place.create(name, deadlineSeconds=600, callback={"url": receiver.url}, **more)
        quota_ends(place)
        patient, hasty = (told_once(receiver, place, name) for name in ("patient", "hasty"))
    assert (patient["type"], patient["data"]["status"]) == ("job_completed", "done")
    assert (hasty["type"], hasty["data"]["status"]) == ("job_timed_out", "timed_out")


def fill_quota(place: Place) -> None:
    place.api.create(
        {
            "apiVersion": "v1",
            "kind": "ResourceQuota",
            "metadata": {"name": "no-room", "namespace": place.namespace},
            "spec": {"hard": {"pods": "0"}},
        }
    )
    place.record.until(
        "quota in force",
        lambda: place.api.get("ResourceQuota", place.namespace, "no-room").body.get("status"),
    )


def quota_ends(place: Place) -> None:
    for name in ("patient", "hasty"):
        assert "no-room" in place.until_waiting(name, "quota_exceeded", seconds=28)["message"]
        assert place.state(name) == "queued"
    for name in ("patient", "hasty"):
        (event,) = place.record.until(f"Event about {name}", partial(waiting_events, place, name))
        created = place.job(name)["metadata"]["creationTimestamp"]
        took = seconds_between(created, event["metadata"]["creationTimestamp"])
        assert took <= QUOTA_SEEN_WITHIN + LOADED_SECONDS
    status = place.until_state("hasty", "timed_out", seconds=60)
    cause = status["cause"]
    assert (cause["code"], cause["ran"]) == ("pending_deadline_exceeded", False)
    assert "no-room" in cause["message"]
    assert "pods" in cause["message"]
    made = place.jobs("hasty")[0]["metadata"]["creationTimestamp"]
    assert 30 <= seconds_between(made, status["finishedAt"]) <= 30 + LATE_SECONDS

    place.api.patch(
        "ResourceQuota", place.namespace, "no-room", {"spec": {"hard": {"pods": "5"}}}
    ).object()
    place.kubelet.run(place.until_pod("patient", seconds=90))
    status = place.until_over("patient")
    assert (status["state"], len(status["attempts"])) == ("done", 1)
    for name in ("patient", "hasty"):
        assert "failed" not in place.states(name)
        assert 0 < len(place.events(name)) <= 3


def waiting_events(place: Place, name: str) -> list[Document]:
    return [each for each in place.events(name) if each["reason"] == "Waiting"]


@scenario("R-HONEST a container that cannot be started is a start_error that never ran")
def start_error(place: Place) -> None:
    place.create("start-error")
    pod = place.until_pod("start-error")
    place.kubelet.bind(pod)
    place.kubelet.finish(pod, 128, reason="StartError", message="no such file: tool")
    cause = place.until_state("start-error", "failed")["cause"]
    assert (cause["code"], cause["ran"]) == ("start_error", False)
    assert "no such file" in cause["message"]


@scenario("R-HONEST what the tool wrote and how it exited is what the status says")
def own_ends(place: Place) -> None:
    for name in ("own-zero", "own-three", "own-oom", "own-killed"):
        place.create(name)
    pods = place.until_running("own-zero", "own-three", "own-oom", "own-killed")
    place.kubelet.finish(pods["own-zero"], 0, message="all good\nmore")
    place.kubelet.finish(pods["own-three"], 3)
    place.kubelet.finish(pods["own-oom"], 137, reason="OOMKilled")
    place.kubelet.finish(pods["own-killed"], 137)
    done = place.until_state("own-zero", "done")
    assert done["summary"] == "all good"
    assert done["result"]["text"] == "all good\nmore"
    assert "cause" not in done
    for name, code, exit_code in (
        ("own-three", "tool_error", 3),
        ("own-oom", "oom_killed", 137),
        ("own-killed", "tool_error", 137),
    ):
        cause = place.until_state(name, "failed")["cause"]
        assert (cause["code"], cause["exitCode"], cause.get("forced", False)) == (
            code,
            exit_code,
            False,
        )


@scenario("R-STOP a job that only waits is cancelled at once and nothing is made for it")
def stop_before_claim(place: Place) -> None:
    place.create("stop-held", suspend=True)
    place.until_waiting("stop-held", "suspended")
    place.stop("stop-held")
    status = place.until_state("stop-held", "cancelled", seconds=5)
    cause = status["cause"]
    assert (cause["code"], cause["ran"], cause.get("forced", False)) == ("stopped", False, False)
    assert not status.get("attempts")
    assert not place.jobs("stop-held")


@scenario("R-STOP a job whose pod has no node is cancelled and never ran")
def stop_unscheduled(place: Place) -> None:
    place.create("stop-unplaced")
    place.kubelet.unschedulable(place.until_pod("stop-unplaced"), "no node fits")
    assert "no node fits" in place.until_waiting("stop-unplaced", "unschedulable")["message"]
    place.stop("stop-unplaced", "changed my mind")
    status = place.until_state("stop-unplaced", "cancelled")
    cause = status["cause"]
    assert (cause["code"], cause["ran"]) == ("stopped", False)
    assert "changed my mind" in cause["message"]
    assert place.jobs("stop-unplaced")[0]["spec"]["suspend"]
    assert len(place.pods("stop-unplaced")) == 1


@scenario("R-DEAD a stopped job is stopping until its container is seen dead")
def stop_running(place: Place) -> None:
    names = {"stop-polite": 143, "stop-tidy": 0, "stop-stubborn": 137}
    for name in names:
        place.create(name)
    pods = place.until_running(*names)
    for name, code in names.items():
        place.kubelet.when_asked_to_end(pods[name], code, after=1.5)
    settle()
    for name in names:
        place.stop(name)
    for name, code in names.items():
        status = place.until_over(name)
        cause = status["cause"]
        assert (status["state"], cause["code"], cause["exitCode"]) == ("cancelled", "stopped", code)
        assert cause["ran"]
        assert cause.get("forced", False) == (code == 137)
        assert place.states(name) == ["queued", "running", "stopping", "cancelled"]
        assert place.conditions(name)["StopRequested"] == "True"
        assert place.record.latest("Pod", place.namespace, pods[name]["metadata"]["name"]), (
            "the pod keeps the evidence"
        )


@scenario("R-HONEST a stop that comes after the exit does not change what happened", own=True)
def stop_after_exit(place: Place) -> None:
    first = place.stage.operator(place, settings=TELLS_US)
    agent = Tenant(place.stage, place.namespace).account("agent-a", CALLS).agent
    this = f"quick.{place.namespace}"
    with Receiver() as receiver:
        place.create("quick", deadlineSeconds=600, callback={"url": receiver.url})
        exits_and_is_stopped(place, first, lambda: agent.stop(place.stage.replicas[0], this))
        gateway = place.stage.replicas[0]
        event = told_once(receiver, place, "quick")
        wait_until("end", lambda: agent.status(gateway, this).body["status"] == "done")
        late = agent.stop(gateway, this)
        assert (late.code, late.body["job_status"]) == (409, "done")
        result = agent.get(gateway, f"/v1/jobs/{this}/result")
        assert (result.code, result.body["data"]) == (200, "all good")
        assert told_once(receiver, place, "quick") == event
    assert (event["type"], event["data"]["status"]) == ("job_completed", "done")
    assert place.states("quick") == ["queued", "running", "done"]


def exits_and_is_stopped(
    place: Place, operator: OperatorProcess, stop: Callable[[], Reply]
) -> None:
    """Both while no operator runs; then it starts."""
    pod = place.until_running("quick")["quick"]
    assert operator.terminate() == 0
    place.kubelet.finish(pod, 0, message="all good")
    (job,) = place.jobs("quick")
    place.record.until(
        "Complete condition",
        lambda: (place.live_job(job["metadata"]["name"]) or {})["status"].get("completionTime"),
    )
    settle()
    settle()
    assert stop().code == 202
    operator.start()
    status = place.until_over("quick", seconds=5)
    assert (status["state"], len(status["attempts"])) == ("done", 1)
    assert "cause" not in status
    ended = place.pods("quick")[0]["status"]["containerStatuses"][0]["state"]["terminated"]
    assert moment(status["finishedAt"]) == moment(ended["finishedAt"])
    conditions = place.conditions("quick")
    wanted = {"StopRequested": "True", "Finished": "True", "Succeeded": "True"}
    assert conditions | wanted == conditions


@scenario("R-DEADLINE a deadline ends what runs, what waits and what is held back")
def deadlines(place: Place) -> None:
    place.create("late-runs", deadlineSeconds=10)
    place.create("late-waits", deadlineSeconds=10)
    place.create("late-held", deadlineSeconds=10, suspend=True)
    place.until_running("late-runs")
    place.kubelet.unschedulable(place.until_pod("late-waits"), "no node fits")
    for name, ran in (("late-runs", True), ("late-waits", False), ("late-held", False)):
        status = place.until_state(name, "timed_out", seconds=20)
        cause = status["cause"]
        assert (cause["code"], cause["ran"]) == ("deadline_exceeded", ran)
        created = place.job(name)["metadata"]["creationTimestamp"]
        assert seconds_between(created, status["deadlineAt"]) == 10
        assert 10 <= seconds_between(created, status["finishedAt"]) <= 10 + LATE_SECONDS
    assert "no node fits" in place.status("late-waits")["cause"]["message"]
    assert place.status("late-runs")["cause"]["exitCode"] == 143
    assert not place.jobs("late-held")


@scenario("R-DEADLINE time that a job is held back counts, in the backstops too")
def held_time_counts(place: Place) -> None:
    with Receiver() as receiver:
        callback = {"url": receiver.url}
        place.create("held", suspend=True, deadlineSeconds=18, callback=callback)
        held_ends(place)
        event = told_once(receiver, place, "held")
    assert (event["type"], event["data"]["status"]) == ("job_timed_out", "timed_out")


def held_ends(place: Place) -> None:
    place.until_waiting("held", "suspended")
    settle()
    for _ in range(4):
        settle()
    deadline_at = place.status("held")["deadlineAt"]
    place.patch("held", {"spec": {"suspend": False}}).object()
    place.until_running("held")
    (job,) = place.jobs("held")
    left = seconds_between(job["metadata"]["creationTimestamp"], deadline_at)
    assert left < 15
    # Decided before it was created, by what a loaded API server takes for a write and a creation.
    assert -1 <= job["spec"]["activeDeadlineSeconds"] - (left + 120) <= LOADED_SECONDS
    pod = job["spec"]["template"]["spec"]
    assert -1 <= pod["activeDeadlineSeconds"] - (left + 15) <= LOADED_SECONDS
    status = place.until_state("held", "timed_out")
    assert status["deadlineAt"] == deadline_at
    cause = status["cause"]
    assert (cause["code"], cause["ran"]) == ("deadline_exceeded", True)
    assert cause["exitCode"] == 143
    assert 0 <= seconds_between(deadline_at, status["finishedAt"]) <= LATE_SECONDS


@scenario("R-DEADLINE no attempt follows a deadline")
def no_retry_after_deadline(place: Place) -> None:
    causes = ["tool_error", "oom", "disruption"]
    retry = {"maxAttempts": 5, "causes": causes}
    with Receiver() as receiver:
        callback = {"url": receiver.url}
        place.create("late-retry", deadlineSeconds=12, retry=retry, callback=callback)
        place.create("in-time", deadlineSeconds=600, retry=retry)
        pods = place.until_running("late-retry", "in-time")
        status = place.until_state("late-retry", "timed_out")
        cause = status["cause"]
        assert (cause["code"], cause["ran"]) == ("deadline_exceeded", True)
        assert (cause["exitCode"], len(status["attempts"])) == (143, 1)
        event = told_once(receiver, place, "late-retry")
        assert (event["type"], event["data"]["status"]) == ("job_timed_out", "timed_out")

        # Who failed by itself a moment later begins again: the pause is over for both.
        final = place.status("late-retry")
        place.kubelet.finish(pods["in-time"], 143)
        place.record.until("second attempt in time", lambda: len(place.pods("in-time")) == 2)
        assert place.status("late-retry") == final
        assert told_once(receiver, place, "late-retry") == event
    assert len(place.jobs("late-retry")) == len(place.pods("late-retry")) == 1


@scenario("R-DEADLINE the pending deadline begins with the Job and ends with the first container")
def pending_deadline(place: Place) -> None:
    with Receiver() as receiver:
        callback = {"url": receiver.url}
        place.create("pend-a", pendingDeadlineSeconds=10, deadlineSeconds=120)
        place.create("pend-b", pendingDeadlineSeconds=10, deadlineSeconds=120, callback=callback)
        pending_ends(place)
        event = told_once(receiver, place, "pend-b")
    assert (event["type"], event["data"]["status"]) == ("job_timed_out", "timed_out")
    assert event["data"]["cause"] == "pending_deadline_exceeded"


def pending_ends(place: Place) -> None:
    place.create(
        "pend-c",
        dependsOn=[{"name": "pend-a", "condition": "Succeeded"}],
        pendingDeadlineSeconds=10,
        deadlineSeconds=120,
    )
    running = place.until_running("pend-a")
    place.kubelet.unschedulable(place.until_pod("pend-b"), "no node fits")
    status = place.until_state("pend-b", "timed_out")
    assert status["cause"]["code"] == "pending_deadline_exceeded"
    assert not status["cause"]["ran"]
    assert "no node fits" in status["cause"]["message"]
    made = place.jobs("pend-b")[0]["metadata"]["creationTimestamp"]
    assert 10 <= seconds_between(made, status["finishedAt"]) <= 10 + LATE_SECONDS
    assert place.state("pend-a") == "running"
    assert "pend-a" in place.until_waiting("pend-c", "dependency")["message"]
    assert not place.jobs("pend-c")
    place.kubelet.finish(running["pend-a"])
    place.until_state("pend-a", "done")
    place.kubelet.run(place.until_pod("pend-c"))
    assert place.until_over("pend-c")["state"] == "done"
    for name in ("pend-a", "pend-c"):
        assert "stopping" not in place.states(name)


@scenario("R-STOP a deleted AgentJob ends its pod before it goes")
def deleted_while_running(place: Place) -> None:
    place.create("deleted")
    pod = place.until_running("deleted")["deleted"]
    uid = place.uid("deleted")
    place.kubelet.when_asked_to_end(pod, 143, after=1)
    place.api.delete("AgentJob", place.namespace, "deleted").object()
    place.until_gone("AgentJob", "deleted")
    last = place.record.history(uid)[-1]["status"]
    assert (last["state"], last["cause"]["code"]) == ("cancelled", "stopped")
    assert last["cause"]["exitCode"] == 143
    (job,) = place.record.children(uid)
    name = job["metadata"]["name"]
    # The garbage collector looks for new kinds twice a minute.
    place.record.until(f"end of Job {name}", lambda: not place.live_job(name), 90)


@scenario(
    "R-CONTAINER a container that outlives the tool is ended and the tool's end counts",
    LINGER_SECONDS=2,
)
def lingering(place: Place) -> None:
    containers = [
        {"name": name, "image": "registry.invalid/x:1", "command": ["true"]}
        for name in ("tool", "sidecar")
    ]
    place.create("lingers", template=template(containers=containers))
    pod = place.until_running("lingers")["lingers"]
    place.kubelet.finish_container(pod, "tool", 0)
    status = place.until_over("lingers")
    assert status["state"] == "done"


@scenario("R-TTL a finished AgentJob goes when its time is over, its Job with it")
def ttl(place: Place) -> None:
    uids = {}
    for name, seconds in (("ttl-zero", 0), ("ttl-one", 1), ("ttl-kept", 600)):
        place.create(name, ttlSecondsAfterFinished=seconds)
        uids[name] = place.uid(name)
    for name in uids:
        place.kubelet.run(place.until_pod(name))
    for name in ("ttl-zero", "ttl-one"):
        place.until_gone("AgentJob", name)
        last = place.record.history(uids[name])[-1]["status"]
        assert last["state"] == "done"
        (job,) = [c for c in place.record.children(uids[name]) if c["kind"] == "Job"]
        place.until_gone("Job", job["metadata"]["name"])
    assert place.until_over("ttl-kept")["state"] == "done"
    assert place.live_job(place.jobs("ttl-kept")[0]["metadata"]["name"])


@pytest.mark.parametrize("scenario", told_in(__name__), ids=str)
def test_rule(played: Callable[[Scenario], None], scenario: Scenario) -> None:
    played(scenario)
