"""The operator, the API server or the receiver is away for a while; nothing is lost by it."""

import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

import pytest

from tests.apiclient import path_of
from tests.cluster.local import LocalCluster
from tests.e2e.installed import DEPLOYMENT, NAMESPACE
from tests.e2e.platform import LINGER_SECONDS, Platform
from tests.receiver import NO_CONTENT, Request

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180, func_only=True)]

Document = dict[str, Any]
IGNORES = "trap '' TERM; while :; do sleep 1; done"
OBEYS = "trap 'exit 0' TERM; sleep 600 & wait"
DEADLINE, BACKSTOP, GRACE = 8, 15, 3
PATIENCE = 60
UNAVAILABLE, GONE = 503, 410
REFUSALS = 2


@dataclass
class Story:
    """What was done, and what was seen on the way."""

    here: Platform
    doomed: Platform
    """A namespace that is deleted."""
    seen: dict[str, Any] = field(default_factory=dict)

    def at(self, moment: str) -> datetime:
        when: datetime = self.seen[moment]
        return when

    def mark(self, moment: str) -> None:
        self.seen[moment] = datetime.now().astimezone()


@pytest.fixture(scope="module")
def story(platform: Platform) -> Iterator[Story]:
    """Everything in one row, so that waits overlap: tests only look at what came of it."""
    if not isinstance(platform.cluster, LocalCluster):
        pytest.skip("only with CLUSTER=local processes can be killed")
    story = Story(platform.in_namespace(), platform.in_namespace())
    usual = platform.receiver.answer
    platform.receiver.answer = Moods()
    try:
        begin(story)
        api_server_away(story)
        deletions(story)
        operator_away(story)
        yield story
    finally:
        platform.receiver.answer = usual
        story.here.kubectl("delete", "agentjobs", "--all", "--wait=false")


class Moods:
    """Answers of receivers of which some are down at first, or want nothing."""

    def __init__(self) -> None:
        self._tries: Counter[str] = Counter()

    def __call__(self, request: Request) -> int:
        job = str(request.event["subject"])
        self._tries[job] += 1
        if job.startswith("gone."):
            return GONE
        refused = job.startswith("unheard.") and self._tries[job] <= REFUSALS
        return UNAVAILABLE if refused else NO_CONTENT


def begin(story: Story) -> None:
    here, doomed = story.here, story.doomed
    lingering = here.job("lingering", "echo all fine > /dev/termination-log")
    containers = lingering["spec"]["template"]["spec"]["template"]["spec"]["containers"]
    containers.append({**containers[0], "name": "beside", "command": ["sleep", "600"]})
    here.create(
        lingering,
        here.job("unheard", "exit 0"),
        here.job("gone", "exit 0"),
        here.job("denied", "exit 0", callback={"url": "http://192.0.2.1:9/events"}),
        here.job("dead-receiver", OBEYS, callback={"url": closed_port(here)}),
        here.job("stopped-without-api-server", IGNORES, pod={"terminationGracePeriodSeconds": 9}),
    )
    doomed.create(doomed.job("runs", OBEYS), doomed.job("resists", IGNORES))
    here.wait_for_all(["dead-receiver", "stopped-without-api-server"], ["running"])
    doomed.wait_for_all(["runs", "resists"], ["running"])


def closed_port(here: Platform) -> str:
    """An allowed destination where nobody listens."""
    return here.receiver.url.rpartition(":")[0] + ":9/events"


def deletions(story: Story) -> None:
    story.mark("deleted")
    story.here.kubectl("delete", "agentjob", "dead-receiver", "--wait=false")
    story.doomed.kubectl("delete", "namespace", story.doomed.namespace, "--wait=false")
    for what, kind, name in (
        ("dead receiver gone", "AgentJob", "dead-receiver"),
        ("namespace gone", "Namespace", story.doomed.namespace),
    ):
        watcher = threading.Thread(target=wait_until_gone, args=(story, what, kind, name))
        watcher.daemon = True
        watcher.start()
        story.seen[f"{what} watcher"] = watcher
    # Not through the outage of the operator: these are about one that is there.
    story.seen["namespace gone watcher"].join(60)


def wait_until_gone(story: Story, what: str, kind: str, name: str) -> None:
    end = time.monotonic() + GRACE + PATIENCE + 60
    while time.monotonic() < end:
        try:
            answer = story.here.api.get(kind, story.here.namespace, name)
        except OSError:
            continue
        if answer.code == 404:
            story.mark(what)
            return
        story.seen[f"{what} last"] = answer.body
        time.sleep(0.2)


def operator_away(story: Story) -> None:
    """Killed while tools run; one meets its deadline and its pod's backstop, one just ends."""
    here = story.here
    here.create(
        here.job("overdue", "echo first; sleep 600", deadlineSeconds=DEADLINE),
        here.job("ends", 'sleep 5; echo \'{"summary": "made it"}\' > /dev/termination-log'),
    )
    here.wait_for_all(["overdue", "ends"], ["running"])
    with here.operator.away():
        story.mark("operator away")
        story.seen["deadlineAt"] = here.status("overdue")["deadlineAt"]
        wait_for_pod(here, "overdue", "Failed")
        wait_for_pod(here, "ends", "Succeeded")
        story.seen["states away"] = {
            name: here.status(name)["state"] for name in ("overdue", "ends")
        }
        story.mark("operator back")
    story.mark("operator ready")
    here.wait_for_all(["overdue", "ends"], seconds=30)
    lease = here.cluster.kubectl(
        *(
            "--namespace",
            NAMESPACE,
            "get",
            "lease",
            DEPLOYMENT,
            "-o",
            "jsonpath={.spec.acquireTime}",
        )
    )
    story.seen["leads"] = seconds(lease)


def wait_for_pod(here: Platform, job: str, phase: str) -> None:
    until = time.monotonic() + 60
    while time.monotonic() < until:
        (pod,) = here.pods_of(job)
        states = [each["state"] for each in pod["status"].get("containerStatuses", ())]
        if pod["status"]["phase"] == phase and all("terminated" in state for state in states):
            return
        time.sleep(0.3)
    raise AssertionError(f"the pod of {job} is not {phase}")


def api_server_away(story: Story) -> None:
    here = story.here
    name = "stopped-without-api-server"
    here.stop(name)
    here.wait_for(name, ["stopping"])
    here.cluster.restart_apiserver()
    here.wait_for(name, seconds=60)


def seconds(text: str) -> datetime:
    return datetime.fromisoformat(text)


def events_of(story: Story, name: str, count: int = 1, within: float = 60) -> list[Request]:
    """All requests about a job; every one truly signed, with one id and one body."""
    job_id = f"{name}.{story.here.namespace}"
    until = time.monotonic() + within
    while len(found := story.here.receiver.of(job_id)) < count:
        assert time.monotonic() < until, f"{len(found)} of {count} requests about {name}"
        time.sleep(0.1)
    for each in found:
        each.verify(story.here.public_key)
    assert len({(each.id, each.body) for each in found}) == 1
    return found


def condition(status: Document, kind: str) -> tuple[str, str]:
    (found,) = [each for each in status["conditions"] if each["type"] == kind]
    return found["status"], found["reason"]


def jobs_of(story: Story, name: str) -> list[Document]:
    items = story.here.api.send("GET", path_of("Job", story.here.namespace)).object()["items"]
    return [each for each in items if each["metadata"]["labels"]["agentjobs.dev/job"] == name]


def test_a_deadline_is_kept_by_the_pod_while_the_operator_is_away(story: Story) -> None:
    """R-DEADLINE, R-HONEST: told with its evidence as soon as there is a leader again."""
    body = story.here.get("agentjob", "overdue")
    status, cause = body["status"], body["status"]["cause"]
    assert (status["state"], cause["code"]) == ("timed_out", "deadline_exceeded")
    assert (cause["ran"], cause["forced"], cause["exitCode"], cause["signal"]) == (
        True,
        True,
        137,
        9,
    )
    assert cause["evidence"] == "observed"
    created = seconds(body["metadata"]["creationTimestamp"])
    deadline = created + timedelta(seconds=DEADLINE)
    assert seconds(status["deadlineAt"]) == seconds(story.seen["deadlineAt"]) == deadline
    ended = seconds(status["finishedAt"])
    latest = deadline + timedelta(seconds=BACKSTOP + GRACE + 6)
    assert deadline + timedelta(seconds=BACKSTOP) - timedelta(seconds=1) <= ended <= latest
    assert ended <= story.at("operator back")
    (request,) = events_of(story, "overdue")
    assert request.event["type"] == "job_timed_out"
    # Whoever comes as another pod waits until the Lease of the dead one has run out.
    assert story.seen["leads"] <= story.at("operator ready") + timedelta(seconds=15)
    assert request.at <= story.seen["leads"].timestamp() + 5


def test_a_deadline_during_an_outage_leaves_one_pod_and_its_log(story: Story) -> None:
    """R-CLAIM: and no second attempt."""
    (pod,) = story.here.pods_of("overdue")
    assert len(jobs_of(story, "overdue")) == 1
    assert story.here.kubectl("logs", pod["metadata"]["name"]) == "first\n"
    assert story.seen["states away"]["overdue"] == "running"


def test_a_tool_that_ends_while_the_operator_is_away_is_done_with_its_result(story: Story) -> None:
    """R-LEVEL: the end is found, with the time that it had."""
    assert story.seen["states away"]["ends"] == "running"
    status = story.here.status("ends")
    assert (status["state"], status["summary"]) == ("done", "made it")
    assert seconds(status["finishedAt"]) <= story.at("operator back")
    (request,) = events_of(story, "ends")
    assert request.event["data"]["summary"] == "made it"


def test_a_stop_survives_a_restart_of_the_api_server(story: Story) -> None:
    """R-STOP."""
    status = story.here.status("stopped-without-api-server")
    cause = status["cause"]
    assert (status["state"], cause["code"], cause["forced"]) == ("cancelled", "stopped", True)
    assert (cause["exitCode"], cause["evidence"]) == (137, "observed")
    assert len(jobs_of(story, "stopped-without-api-server")) == 1
    events_of(story, "stopped-without-api-server")


def test_an_event_is_tried_again_with_the_same_id_and_a_new_time(story: Story) -> None:
    """R-CALLBACK."""
    requests = events_of(story, "unheard", REFUSALS + 1)
    assert len(requests) == REFUSALS + 1
    stamps = [int(each.headers["webhook-timestamp"]) for each in requests]
    assert stamps == sorted(set(stamps))
    assert all(abs(stamp - each.at) <= 2 for stamp, each in zip(stamps, requests, strict=True))
    until = time.monotonic() + 5
    while condition(status := story.here.status("unheard"), "CallbackDelivered")[0] != "True":
        assert time.monotonic() < until, status
    (delivery,) = status["callback"]["deliveries"]
    assert (delivery["state"], delivery["attempts"]) == ("delivered", REFUSALS + 1)


def test_410_ends_the_delivery_and_not_the_job(story: Story) -> None:
    """R-CALLBACK."""
    assert len(events_of(story, "gone")) == 1
    status = story.here.status("gone")
    assert status["state"] == "done"
    assert condition(status, "CallbackDelivered") == ("False", "DeliveryFailed")
    (delivery,) = status["callback"]["deliveries"]
    assert (delivery["state"], delivery["attempts"]) == ("given_up", 1)
    assert "410" in delivery["lastError"]


def test_a_denied_destination_ends_the_job_before_anything_runs(story: Story) -> None:
    """R-CALLBACK, R-CAUSE."""
    status = story.here.status("denied")
    cause = status["cause"]
    assert (status["state"], cause["code"], cause["ran"]) == ("failed", "invalid_spec", False)
    assert condition(status, "CallbackDelivered")[0] == "False"
    assert jobs_of(story, "denied") == []


def test_a_deleted_job_does_not_wait_for_a_dead_receiver_for_ever(story: Story) -> None:
    """R-STOP: its pod ends at once; the record stays for at most grace and a minute."""
    story.seen["dead receiver gone watcher"].join(GRACE + PATIENCE + 20)
    last = story.seen["dead receiver gone last"]
    assert "dead receiver gone" in story.seen, json.dumps(last)[:2000]
    assert last["status"]["state"] == "cancelled"
    took = (story.at("dead receiver gone") - story.at("deleted")).total_seconds()
    assert 15 <= took <= GRACE + PATIENCE + 8


def test_the_namespace_of_running_jobs_can_be_deleted(story: Story) -> None:
    """R-STOP: no finalizer holds it."""
    assert "namespace gone" in story.seen, story.seen["namespace gone last"]
    took = (story.at("namespace gone") - story.at("deleted")).total_seconds()
    assert took <= GRACE + 40


def test_a_container_that_outlives_the_tool_is_ended_and_the_tool_is_done(story: Story) -> None:
    """R-CONTAINER: the verdict is the tool's."""
    status = story.here.status("lingering")
    assert (status["state"], status["summary"]) == ("done", "all fine")
    (pod,) = story.here.pods_of("lingering")
    tool, beside = (
        next(
            c["state"]["terminated"]
            for c in pod["status"]["containerStatuses"]
            if c["name"] == name
        )
        for name in ("tool", "beside")
    )
    assert status["finishedAt"] == tool["finishedAt"]
    gap = seconds(beside["finishedAt"]) - seconds(tool["finishedAt"])
    assert gap >= timedelta(seconds=LINGER_SECONDS)
    events_of(story, "lingering")
