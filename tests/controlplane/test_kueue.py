"""Jobs that a real Kueue admits, evicts, preempts and deactivates."""

import json
import os
from collections.abc import Iterator
from typing import Any

import pytest

from agentjobs.api.agentjob import AgentJob
from agentjobs.domain.job import placeholder_job
from tests.apiclient import Document
from tests.chart import Document as ChartDocument
from tests.cluster import FAST_LIMITS, ControlPlane
from tests.controlplane.installed import install
from tests.controlplane.stage import Place, Stage, open_stage, template
from tests.kubelet import settle
from tests.kueue import Kueue, kueue

pytestmark = [
    pytest.mark.controlplane,
    pytest.mark.soak,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        not os.environ.get("AGENTJOBS_SOAK"), reason="builds Kueue: set AGENTJOBS_SOAK=1"
    ),
]

NAMESPACE = "queued"
QUEUE = "kueue.x-k8s.io/queue-name"
PRIORITY = "kueue.x-k8s.io/priority-class"
ONCE_MORE = {"maxAttempts": 2, "causes": ["disruption"]}


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory, chart: list[ChartDocument]) -> Iterator[Stage]:
    """A control plane of its own: Kueue's webhooks answer for all Jobs of a cluster."""
    directory = tmp_path_factory.mktemp("kueue")
    arguments = FAST_LIMITS.controller_manager
    with ControlPlane(directory / "plane", controller_manager_args=arguments) as plane:
        install(plane, chart)
        yield from open_stage(plane, chart, directory)


@pytest.fixture(scope="module")
def queues(stage: Stage) -> Iterator[Kueue]:
    with kueue(stage.plane, stage.directory) as queues:
        queues.flavor("any")
        queues.priority("urgent", 1000)
        yield queues


@pytest.fixture(scope="module")
def place(stage: Stage, queues: Kueue) -> Place:  # noqa: ARG001 - Jobs are made once it is there
    place = stage.place(NAMESPACE)
    stage.operator(place)
    return place


@pytest.fixture
def queue(request: pytest.FixtureRequest, queues: Kueue, place: Place) -> str:
    """A queue with a quota of one processor, called like its test."""
    name = request.node.originalname.removeprefix("test_").replace("_", "-")[-50:].strip("-")
    name = f"{name}-{len(queues.workloads(NAMESPACE))}"
    queues.cluster_queue(name, cpus=1)
    queues.local_queue(place.namespace, name, name)
    return name


def one_cpu(labels: dict[str, str] | None = None, **pod: Any) -> Document:
    """A template whose pod takes all of a queue's quota."""
    body = template(**pod)
    body["spec"]["template"]["spec"]["containers"][0]["resources"] = {"requests": {"cpu": "1"}}
    return {"metadata": {"labels": labels or {}}, **body}


def create(place: Place, name: str, queue: str, **spec: Any) -> None:
    place.create(name, **{"template": one_cpu(), "queueName": queue, **spec})


def until_queued(place: Place, name: str, queue: str) -> None:
    waiting = place.until_waiting(name, "kueue")
    assert f"LocalQueue {queue}" in waiting["message"]
    assert f"{name}-" in waiting["message"]


def drain(queues: Kueue, queue: str) -> None:
    """Evict all that the queue has admitted, and admit nothing."""
    queues.change("ClusterQueue", "", queue, {"stopPolicy": "HoldAndDrain"})


def reopen(queues: Kueue, queue: str) -> None:
    queues.change("ClusterQueue", "", queue, {"stopPolicy": "None"})


def other_pod(place: Place, name: str, than: Document) -> Document:
    """Wait for a pod of the same AgentJob that is not that one."""
    uid = than["metadata"]["uid"]
    found = place.record.until(
        f"another pod of {name}",
        lambda: [pod for pod in place.pods(name) if pod["metadata"]["uid"] != uid],
    )
    return found[0]


def until_free(queues: Kueue, place: Place, name: str) -> None:
    """Wait until the queue counts nothing of a job that is over, and would resume nothing of it."""
    uids = {job["metadata"]["uid"] for job in place.jobs(name)}

    def counted() -> list[Document]:
        workloads = queues.workloads(place.namespace)
        owned = [
            each
            for each in workloads
            if uids & {owner["uid"] for owner in each["metadata"].get("ownerReferences") or ()}
        ]
        return [each for each in owned if not holds(each, "Finished")]

    place.record.until(f"end of the Workloads of {name}", lambda: not counted())


def holds(workload: Document, condition: str) -> bool:
    conditions = (workload.get("status") or {}).get("conditions") or ()
    return any(each["type"] == condition and each["status"] == "True" for each in conditions)


def workload_of(queues: Kueue, place: Place, name: str) -> Document:
    job = place.until_job(name)
    return place.record.until(
        f"Workload of {name}", lambda: queues.workload_of(place.namespace, job)
    )


def test_rule_r_slots_two_queues_admit_each_within_its_own_quota(
    place: Place, queues: Kueue, queue: str
) -> None:
    queues.cluster_queue("other", cpus=1)
    queues.local_queue(place.namespace, "other", "other")
    create(place, "first", queue)
    pod = place.until_running("first")["first"]
    create(place, "second", queue)
    until_queued(place, "second", queue)
    create(place, "elsewhere", "other")
    place.kubelet.run(place.until_pod("elsewhere"))
    assert place.until_over("elsewhere")["state"] == "done"
    assert not place.pods("second")
    place.kubelet.finish(pod)
    place.kubelet.run(place.until_pod("second"))
    assert place.until_over("second")["state"] == "done"
    for name in ("first", "second", "elsewhere"):
        assert len(place.pods(name)) == len(place.status(name)["attempts"]) == 1
        assert place.states(name) == ["queued", "running", "done"]


def test_rule_r_attempt_an_eviction_before_the_tool_began_does_not_count(
    place: Place, queues: Kueue, queue: str
) -> None:
    create(place, "unbegun", queue)
    first = place.until_pod("unbegun")
    drain(queues, queue)
    place.until_gone("Pod", first["metadata"]["name"])
    until_queued(place, "unbegun", queue)
    reopen(queues, queue)
    place.kubelet.run(other_pod(place, "unbegun", first))
    status = place.until_over("unbegun")
    assert (status["state"], len(status["attempts"])) == ("done", 1)
    assert len(place.jobs("unbegun")) == 1


def test_rule_r_attempt_an_eviction_after_the_tool_began_is_the_end_of_the_attempt(
    place: Place, queues: Kueue, queue: str
) -> None:
    create(place, "begun", queue)
    place.until_running("begun")
    drain(queues, queue)
    status = place.until_over("begun")
    cause = status["cause"]
    assert (status["state"], cause["code"]) == ("failed", "preempted")
    assert (cause["ran"], cause["retryable"], cause["exitCode"]) == (True, True, 143)
    assert "begun-1" in cause["message"]
    reopen(queues, queue)
    until_free(queues, place, "begun")
    create(place, "begun-next", queue)
    place.kubelet.run(place.until_pod("begun-next"))
    assert place.until_over("begun-next")["state"] == "done"
    assert len(place.pods("begun")) == len(status["attempts"]) == 1


def test_rule_r_attempt_who_may_be_repeated_gets_another_job_in_the_same_queue(
    place: Place, queues: Kueue, queue: str
) -> None:
    create(place, "again", queue, retry=ONCE_MORE)
    first = place.until_running("again")["again"]
    deadline = place.status("again")["deadlineAt"]
    drain(queues, queue)
    second = place.record.until("second Job", lambda: place.live_job("again-2"))
    assert second["metadata"]["labels"][QUEUE] == queue
    until_queued(place, "again", queue)
    assert place.status("again")["deadlineAt"] == deadline
    reopen(queues, queue)
    place.kubelet.run(other_pod(place, "again", first))
    status = place.until_over("again")
    assert status["state"] == "done"
    assert [each.get("cause") for each in status["attempts"]] == ["preempted", None]
    until_free(queues, place, "again")
    assert len(place.pods("again")) == 2


def test_rule_r_attempt_a_queue_that_opens_again_at_once_resumes_nothing_that_has_begun(
    place: Place, queues: Kueue, queue: str
) -> None:
    for number in range(5):
        name = f"quick-{number}"
        create(place, name, queue)
        place.until_running(name)
        drain(queues, queue)
        job = place.until_job(name)["metadata"]["name"]
        place.record.until(
            f"suspension of {job}",
            lambda job=job: not (now := place.live_job(job)) or now["spec"]["suspend"],
        )
        reopen(queues, queue)
        status = place.until_over(name)
        assert (status["state"], status["cause"]["code"]) == ("failed", "preempted")
        until_free(queues, place, name)
        assert len(place.pods(name)) == 1


@pytest.mark.parametrize("how", ["WorkloadPriorityClass", "PriorityClass"])
def test_rule_r_attempt_a_job_of_higher_priority_takes_the_place_of_a_lower_one(
    place: Place, queues: Kueue, queue: str, how: str
) -> None:
    low, high = f"low-{how.lower()}", f"high-{how.lower()}"
    if how == "PriorityClass":
        body = {"metadata": {"name": "pods-first"}, "value": 1000}
        text = json.dumps({"apiVersion": "scheduling.k8s.io/v1", "kind": how, **body})
        place.stage.plane.kubectl("create", "--filename=-", input_text=text)
        urgent = one_cpu(priorityClassName="pods-first")
    else:
        urgent = one_cpu({PRIORITY: "urgent"})
    create(place, low, queue)
    victim = place.until_running(low)[low]
    place.kubelet.when_asked_to_end(victim, 143, after=2)
    create(place, high, queue, template=urgent)
    status = place.until_over(low)
    assert (status["state"], status["cause"]["code"]) == ("failed", "preempted")
    place.kubelet.run(place.until_pod(high))
    assert place.until_over(high)["state"] == "done"
    assert len(place.pods(low)) == 1
    until_free(queues, place, low)


def test_rule_r_attempt_what_is_deactivated_before_it_began_waits_and_can_be_activated(
    place: Place, queues: Kueue, queue: str
) -> None:
    create(place, "inactive", queue)
    first = place.until_pod("inactive")
    workload = workload_of(queues, place, "inactive")["metadata"]["name"]
    queues.change("Workload", place.namespace, workload, {"active": False})
    place.until_gone("Pod", first["metadata"]["name"])
    until_queued(place, "inactive", queue)
    queues.change("Workload", place.namespace, workload, {"active": True})
    place.kubelet.run(other_pod(place, "inactive", first))
    status = place.until_over("inactive")
    assert (status["state"], len(status["attempts"])) == ("done", 1)


def test_rule_r_attempt_what_is_deactivated_while_it_runs_has_been_preempted(
    place: Place, queues: Kueue, queue: str
) -> None:
    create(place, "switched-off", queue)
    place.until_running("switched-off")
    workload = workload_of(queues, place, "switched-off")["metadata"]["name"]
    queues.change("Workload", place.namespace, workload, {"active": False})
    status = place.until_over("switched-off")
    assert (status["state"], status["cause"]["code"]) == ("failed", "preempted")
    until_free(queues, place, "switched-off")
    assert len(place.pods("switched-off")) == 1


@pytest.mark.parametrize("admitted", [False, True], ids=["in line", "admitted"])
def test_rule_r_attempt_a_job_that_is_suspended_leaves_its_queue_and_joins_it_again(
    place: Place, queues: Kueue, queue: str, *, admitted: bool
) -> None:
    name = f"leaves-{admitted}".lower()
    if not admitted:
        drain(queues, queue)
    create(place, name, queue)
    if admitted:
        place.until_pod(name)
    else:
        until_queued(place, name, queue)
    place.patch(name, {"spec": {"suspend": True}}).object()
    place.until_waiting(name, "suspended")
    reopen(queues, queue)
    until_free(queues, place, name)
    create(place, f"{name}-next", queue)
    place.kubelet.run(place.until_pod(f"{name}-next"))
    place.patch(name, {"spec": {"suspend": False}}).object()
    second = place.record.until("second Job", lambda: place.live_job(f"{name}-2"))
    assert second["metadata"]["labels"][QUEUE] == queue
    pods = place.record.until("its pod", lambda: place.record.children(second["metadata"]["uid"]))
    place.kubelet.run(next(pod for pod in pods if pod["kind"] == "Pod"))
    status = place.until_over(name)
    assert status["state"] == "done"
    assert [each.get("cause") for each in status["attempts"]] == ["preempted", None]


def test_rule_r_stop_while_it_waits_in_a_queue(place: Place, queues: Kueue, queue: str) -> None:
    create(place, "holder", queue)
    pod = place.until_running("holder")["holder"]
    create(place, "never", queue)
    until_queued(place, "never", queue)
    place.stop("never")
    status = place.until_over("never")
    assert (status["state"], status["cause"]["code"]) == ("cancelled", "stopped")
    assert status["cause"]["ran"] is False
    place.kubelet.finish(pod)
    until_free(queues, place, "never")
    settle()
    assert not place.pods("never")


@pytest.mark.parametrize("begun", [True, False], ids=["running", "not begun"])
def test_rule_r_stop_after_its_admission(
    place: Place, queues: Kueue, queue: str, *, begun: bool
) -> None:
    name = f"admitted-{begun}".lower()
    create(place, name, queue)
    pod = place.until_running(name)[name] if begun else place.until_pod(name)
    place.stop(name)
    status = place.until_over(name)
    assert (status["state"], status["cause"]["code"]) == ("cancelled", "stopped")
    assert status["cause"]["ran"] is begun
    until_free(queues, place, name)
    create(place, f"{name}-next", queue)
    place.kubelet.run(place.until_pod(f"{name}-next"))
    assert place.until_over(f"{name}-next")["state"] == "done"
    assert [each["metadata"]["uid"] for each in place.pods(name)] == [pod["metadata"]["uid"]]


def test_rule_r_deadline_passes_in_a_queue_too(place: Place, queues: Kueue, queue: str) -> None:
    drain(queues, queue)
    create(place, "late", queue, deadlineSeconds=4)
    until_queued(place, "late", queue)
    status = place.until_over("late")
    cause = status["cause"]
    assert (status["state"], cause["code"], cause["ran"]) == (
        "timed_out",
        "deadline_exceeded",
        False,
    )
    assert f"LocalQueue {queue}" in cause["message"]
    until_free(queues, place, "late")
    assert not place.pods("late")


def a_place_with_a_default(stage: Stage, queues: Kueue, namespace: str) -> Place:
    """A namespace whose LocalQueue `default` takes in each Job that names none."""
    place = stage.place(namespace)
    queues.cluster_queue(namespace, cpus=1)
    queues.local_queue(place.namespace, "default", namespace)
    probe = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"generateName": "probe-"},
        "spec": one_cpu(restartPolicy="Never")["spec"],
    }
    path = f"/apis/batch/v1/namespaces/{namespace}/jobs"

    def in_force() -> bool:
        made = stage.api.send("POST", path, probe, query={"dryRun": "All"}).object()
        return QUEUE in (made["metadata"].get("labels") or {})

    place.record.until("the default queue in force", in_force)
    return place


def test_rule_r_attempt_a_default_queue_is_a_queue_like_any_other(
    stage: Stage, queues: Kueue
) -> None:
    place = a_place_with_a_default(stage, queues, "by-default")
    stage.operator(place)
    place.create("taken-in", template=one_cpu())
    place.until_running("taken-in")
    place.create("behind", template=one_cpu())
    until_queued(place, "behind", "default")
    drain(queues, "by-default")
    assert place.until_over("taken-in")["cause"]["code"] == "preempted"
    reopen(queues, "by-default")
    place.kubelet.run(place.until_pod("behind"))
    assert place.until_over("behind")["state"] == "done"
    assert len(place.pods("taken-in")) == 1


def test_rule_r_claim_a_placeholder_makes_no_pod_though_a_default_queue_admits_it(
    stage: Stage, queues: Kueue
) -> None:
    place = a_place_with_a_default(stage, queues, "with-default")
    place.create("owner", suspend=True)
    owner = place.api.get("AgentJob", place.namespace, "owner").object()
    place.api.create(placeholder_job(AgentJob.from_json(owner), "owner-1"))

    def resumed() -> bool:
        job = place.live_job("owner-1")
        return job is not None and not job["spec"]["suspend"]

    place.record.until("its resumption", resumed)
    settle()
    assert not place.pods("owner")
