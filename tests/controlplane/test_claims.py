"""Nothing runs twice, and nothing that was lost is forgotten."""

from collections.abc import Callable
from datetime import UTC, datetime
from http import HTTPStatus

import pytest

from agentjobs.api.names import ANNOTATION_PLACEHOLDER
from tests import audit
from tests.apiclient import Document, path_of
from tests.controlplane.stage import (
    TELLS_US,
    Place,
    Scenario,
    scenario,
    seconds_between,
    template,
    told_in,
)
from tests.controlplane.test_ends import told_once
from tests.faulty_proxy import Fault, FaultyProxy
from tests.kubelet import settle
from tests.operator_process import OperatorProcess
from tests.receiver import Receiver

pytestmark = pytest.mark.controlplane

RELISTS = 3
SUCCESSION_SECONDS = 20.0
WRITES = ("create", "update", "patch")


def delete_job(place: Place, job: Document) -> None:
    place.api.delete("Job", place.namespace, job["metadata"]["name"]).object()


def assert_deleted_externally(status: Document, *, ran: bool) -> None:
    cause = status["cause"]
    assert (status["state"], cause["code"], cause["ran"]) == ("failed", "deleted_externally", ran)
    assert len(status["attempts"]) == 1


@scenario("R-CLAIM a finished job whose child is gone is not run again", own=True)
def finished_means_never_again(place: Place) -> None:
    operator = place.stage.operator(place, settings={**TELLS_US, "RELIST_SECONDS": 1})
    with Receiver() as receiver:
        place.create("once", ttlSecondsAfterFinished=3600, callback={"url": receiver.url})
        place.kubelet.run(place.until_pod("once"))
        place.until_state("once", "done")
        event = told_once(receiver, place, "once")
        child_is_gone(place, operator)
        assert told_once(receiver, place, "once") == event
    assert (event["type"], event["data"]["status"]) == ("job_completed", "done")


def child_is_gone(place: Place, operator: OperatorProcess) -> None:
    """The end is on record and told; from here on nothing is written or made."""
    (job,) = place.jobs("once")
    assert place.live_job(job["metadata"]["name"])

    tail = audit.Tail(place.stage.plane.audit_log)
    deleted_at = datetime.now(UTC).isoformat()
    delete_job(place, job)
    place.until_gone("Job", job["metadata"]["name"])
    place.patch("once", {"metadata": {"annotations": {"example.com/note": "x"}}}).object()
    before = place.status("once")
    assert operator.terminate() == 0
    operator.start()
    asked: audit.Counter[tuple[str, str]] = audit.Counter()

    def listed() -> bool:
        new = [each for each in tail.new(place.namespace) if each.namespace == place.namespace]
        later = [each for each in new if each.at >= deleted_at and operator.name in each.groups]
        asked.update(audit.count(later))
        return asked["list", "agentjobs"] > RELISTS  # and the one of the start

    place.record.until("third round of lists", listed)
    written = ("agentjobs", "agentjobs/status", "jobs", "pods")
    assert not [each for each in asked if each[0] in WRITES and each[1] in written]
    assert place.status("once") == before
    assert len(place.jobs("once")) == len(place.pods("once")) == 1
    assert len(place.events("once")) <= 3


@scenario("R-CLAIM a child that was deleted while nobody led is not replaced", own=True)
def vanished_child(place: Place) -> None:
    operator = place.stage.operator(place, settings=TELLS_US)
    with Receiver() as receiver:
        place.create("sideeffect", callback={"url": receiver.url})
        vanishes(place, operator)
        event = told_once(receiver, place, "sideeffect")
    assert (event["type"], event["data"]["status"]) == ("job_completed", "failed")
    assert len(place.jobs("sideeffect")) == len(place.pods("sideeffect")) == 1


def vanishes(place: Place, operator: OperatorProcess) -> None:
    pod = place.until_running("sideeffect")["sideeffect"]
    place.kubelet.when_asked_to_end(pod, None)
    assert operator.terminate() == 0
    (job,) = place.jobs("sideeffect")
    delete_job(place, job)
    place.until_gone("Pod", pod["metadata"]["name"])
    operator.start()
    status = place.until_over("sideeffect", seconds=10)
    assert_deleted_externally(status, ran=True)
    assert status["cause"]["evidence"] == "lost"
    assert place.states("sideeffect") == ["queued", "running", "failed"]


@scenario("R-CLAIM a Job that is deleted by hand ends its AgentJob, whether it ran or not")
def job_deleted_by_hand(place: Place) -> None:
    place.create("gone-early")
    place.create("gone-late")
    place.until_pod("gone-early")
    place.until_running("gone-late")
    for name in ("gone-early", "gone-late"):
        delete_job(place, place.jobs(name)[0])
    assert_deleted_externally(place.until_over("gone-early"), ran=False)
    late = place.until_over("gone-late")
    assert_deleted_externally(late, ran=True)
    assert late["cause"]["exitCode"] == 143
    for name in ("gone-early", "gone-late"):
        assert len(place.jobs(name)) == 1


@scenario("R-ATTEMPT a pod that is deleted by hand is not replaced")
def pod_deleted_by_hand(place: Place) -> None:
    place.create("pod-gone")
    pod = place.until_running("pod-gone")["pod-gone"]
    place.api.delete("Pod", place.namespace, pod["metadata"]["name"]).object()
    assert_deleted_externally(place.until_over("pod-gone"), ran=True)
    assert len(place.jobs("pod-gone")) == len(place.pods("pod-gone")) == 1


@scenario("R-LEVEL what happened while no operator ran is found by the first list", own=True)
def while_away(place: Place) -> None:
    operator = place.stage.operator(place)
    names = ("ends", "stops", "goes")
    for name in names:
        place.create(name)
    pods = place.until_running(*names)
    assert operator.terminate() == 0
    place.kubelet.finish(pods["ends"], 7)
    place.stop("stops")
    place.api.delete("AgentJob", place.namespace, "goes").object()
    place.create("new")
    goes = place.uid("goes")
    operator.start()
    assert place.until_over("ends")["cause"]["exitCode"] == 7
    assert place.until_over("stops")["state"] == "cancelled"
    place.until_gone("AgentJob", "goes")
    assert place.record.history(goes)[-1]["status"]["state"] == "cancelled"
    place.kubelet.run(place.until_pod("new"))
    assert place.until_over("new")["state"] == "done"
    for name in ("ends", "stops", "new"):
        assert len(place.jobs(name)) == len(place.pods(name)) == 1


@scenario("R-CLAIM a name that is somebody else's Job's is never taken over")
def name_taken(place: Place) -> None:
    foreign: Document = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": "taken-1", "namespace": place.namespace},
        "spec": {"suspend": True, **template(restartPolicy="Never")["spec"]},
    }
    place.api.create(foreign)
    other = place.api.create(
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": "owner", "namespace": place.namespace},
        }
    )
    owner = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "name": "owner",
        "uid": other["metadata"]["uid"],
        "controller": True,
    }
    meta = {"name": "lent-1", "namespace": place.namespace, "ownerReferences": [owner]}
    place.api.create({**foreign, "metadata": meta})
    for name, words in (("taken", "belongs to nobody"), ("lent", "belongs to ConfigMap owner")):
        place.create(name)
        cause = place.until_state(name, "failed")["cause"]
        assert (cause["code"], cause["ran"]) == ("invalid_spec", False)
        assert f"{name}-1" in cause["message"]
        assert words in cause["message"]
        job = place.live_job(f"{name}-1") or {}
        assert "agentjobs.dev/job" not in job["metadata"].get("labels", {})
        assert not place.jobs(name)


class Underway:
    """Writes of the operator behind the proxy of a place that have not come in yet."""

    def __init__(self, place: Place, proxy: FaultyProxy, *names: str) -> None:
        """Keep back the claims of these AgentJobs, and whatever creates a Job."""
        self._place = place
        self._proxy = proxy
        self.creation = ("POST", path_of("Job", place.namespace))
        self.claims = {
            name: ("PATCH", path_of("AgentJob", place.namespace, name) + "/status")
            for name in names
        }
        self._late = {self.creation, *self.claims.values()}
        proxy.delay = lambda method, path: (method, path.partition("?")[0]) in self._late

    def until_sent(self, request: tuple[str, str]) -> None:
        self._place.record.until(
            f"{request} on its way",
            lambda: (
                request
                in [(each.method, each.path.partition("?")[0]) for each in list(self._proxy.passed)]
            ),
        )

    def let_in(self, request: tuple[str, str]) -> None:
        self._late.discard(request)

    def until_refused(self, resource: str, name: str) -> None:
        """Wait until the API server has answered with 409, as its audit log says."""
        self._place.record.until(
            f"409 for {resource} {name}",
            lambda: any(
                each.code == HTTPStatus.CONFLICT
                and each.resource == resource
                and (each.name or each.sent["metadata"]["name"]) == name
                and f"{self._place.namespace}-proxied" in each.groups
                for each in requests(self._place)
            ),
        )


def requests(place: Place) -> list[audit.Request]:
    log = audit.read(place.stage.plane.audit_log)
    return [each for each in log if each.namespace == place.namespace]


@scenario("R-CLAIM a claim that meets an edit is refused and decided anew", own=True)
def claim_meets_an_edit(place: Place) -> None:
    proxy = place.stage.proxy(place)
    underway = Underway(place, proxy, "edited")
    underway.let_in(underway.creation)
    place.stage.operator(place, through=proxy)
    place.create("edited")
    underway.until_sent(underway.claims["edited"])
    place.patch("edited", {"metadata": {"annotations": {"example.com/note": "x"}}}).object()
    underway.let_in(underway.claims["edited"])
    underway.until_refused("agentjobs/status", "edited")
    place.kubelet.run(place.until_pod("edited"))
    place.until_state("edited", "done")
    assert audit.jobs_made(requests(place)) == {(place.uid("edited"), "1"): 1}
    assert len(place.pods("edited")) == 1


@scenario("R-CLAIM what a former leader sent and comes in late is refused", own=True)
def sent_by_a_former_leader(place: Place) -> None:
    proxy = place.stage.proxy(place)
    underway = Underway(place, proxy, "claimed")
    first = place.stage.operator(place, "former", through=proxy)
    place.record.until("leader", lambda: first.leads)
    second = place.stage.operator(place, "present")
    place.create("claimed")
    place.create("stopped")
    underway.until_sent(underway.claims["claimed"])
    underway.until_sent(underway.creation)
    assert not place.status("claimed").get("jobName")
    assert place.status("stopped")["jobName"] == "stopped-1"
    place.stop("stopped")
    proxy.choose = lambda _, path: Fault.AWAY if "/leases" in path else Fault.NONE
    place.record.until("successor", lambda: second.leads, SUCCESSION_SECONDS)
    assert first.exit_code() == 1
    stopped = place.until_over("stopped")
    assert (stopped["state"], stopped["cause"]["ran"]) == ("cancelled", False)
    pod = place.until_pod("claimed")

    for request in (underway.claims["claimed"], underway.creation):
        underway.let_in(request)
    underway.until_refused("agentjobs/status", "claimed")
    underway.until_refused("jobs", "stopped-1")
    place.kubelet.run(pod)
    place.until_state("claimed", "done")
    assert len(place.pods("claimed")) == 1
    (placeholder,) = place.jobs("stopped")
    assert placeholder["metadata"]["name"] == "stopped-1"
    assert placeholder["metadata"]["annotations"][ANNOTATION_PLACEHOLDER] == "true"
    assert not place.pods("stopped")
    assert place.states("stopped") == ["queued", "stopping", "cancelled"]
    assert audit.jobs_made(requests(place)) == {
        (place.uid("claimed"), "1"): 1,
        (place.uid("stopped"), "placeholder"): 1,
    }


@scenario("R-ATTEMPT a Job of an earlier AgentJob of the same name is waited for")
def earlier_uid(place: Place) -> None:
    place.create("reborn")
    first = place.uid("reborn")
    place.kubelet.run(place.until_pod("reborn"))
    place.until_state("reborn", "done")
    held = ["example.com/held"]
    job_name = place.jobs("reborn")[0]["metadata"]["name"]
    place.api.patch("Job", place.namespace, job_name, {"metadata": {"finalizers": held}}).object()
    place.api.delete("AgentJob", place.namespace, "reborn").object()
    place.until_gone("AgentJob", "reborn")
    place.create("reborn")
    second = place.record.until("successor", lambda: place.job("reborn"))["metadata"]["uid"]
    assert first != second
    place.record.until(
        "message about the earlier one",
        lambda: (
            "earlier AgentJob"
            in (place.status("reborn").get("waiting") or {"message": ""})["message"]
        ),
    )
    assert not place.jobs("reborn")
    place.api.patch("Job", place.namespace, job_name, {"metadata": {"finalizers": None}}).object()
    place.kubelet.run(place.until_pod("reborn"))
    assert place.until_over("reborn")["state"] == "done"
    assert len(place.jobs("reborn")) == 1


@scenario("R-LEVEL an edit that changes nothing costs nothing")
def harmless_edits(place: Place) -> None:
    place.create("edited", deadlineSeconds=600)
    place.until_running("edited")
    settle()
    before = place.job("edited")["metadata"]["resourceVersion"]
    for number in range(5):
        note = {"metadata": {"annotations": {"example.com/note": str(number)}}}
        place.patch("edited", note).object()
    for change in (
        {"template": template(nodeName="x")},
        {"deadlineSeconds": 900},
        {"queueName": "q"},
        {"suspend": True},
        {"template": None, "toolRef": {"name": "t"}},
    ):
        assert place.patch("edited", {"spec": change}).code in {400, 422}
    lower = place.patch("edited", {"spec": {"deadlineSeconds": 300}}).object()["metadata"]
    place.record.until(
        "lower deadline",
        lambda: place.status("edited")["observedGeneration"] == lower["generation"],
    )
    history = place.record.history(place.uid("edited"))
    later = [v for v in history if int(v["metadata"]["resourceVersion"]) > int(before)]
    statuses = []
    for version in later:
        if version["status"] not in statuses:
            statuses.append(version["status"])
    assert len(statuses) == 2, "only the lower deadline is worth a write"
    first, last = (each["deadlineAt"] for each in statuses)
    assert seconds_between(last, first) == 300
    assert place.states("edited") == ["queued", "running"]
    assert len(place.jobs("edited")) == 1


@pytest.mark.parametrize("scenario", told_in(__name__), ids=str)
def test_rule(played: Callable[[Scenario], None], scenario: Scenario) -> None:
    played(scenario)
