"""The twelve endings on a real kubelet, each by its name (R-HONEST, R-STOP, R-DEAD, R-DEADLINE)."""

from collections.abc import Iterator
from datetime import datetime
from typing import Any

import pytest

from tests.e2e.causes import BY_JOB
from tests.e2e.causes_seen import wait_for_case
from tests.e2e.platform import NODE_LOST_SECONDS, Platform

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180, func_only=True)]

OBEYS = "trap 'echo tidy; exit 0' TERM; echo begin; sleep 600 & wait"
IGNORES = "trap '' TERM; while :; do sleep 1; done"
NOWHERE = {"nodeSelector": {"kubernetes.io/hostname": "nowhere"}}
GREEDY = "x=$(head -c 200000000 /dev/zero | tr '\\0' x); echo ${#x}"


@pytest.fixture(scope="module")
def endings(platform: Platform) -> Iterator[Platform]:
    """All jobs, created together: they end while others are waited for."""
    here = platform.in_namespace()
    here.create(
        here.job("exit-0", 'echo \'{"summary": "all fine", "n": 3}\' > /dev/termination-log'),
        here.job("exit-3", "exit 3"),
        here.job("obeys-sigterm", OBEYS),
        here.job("ignores-sigterm", IGNORES),
        here.job("stopped-after-it-had-finished", "exit 0"),
        here.job("stopped-before-it-started", "exit 0", suspend=True),
        here.job("unschedulable-then-stopped", "exit 0", pod=NOWHERE),
        here.job("deadline", IGNORES, deadlineSeconds=12),
        here.job("pending-deadline", "exit 0", pod=NOWHERE, pendingDeadlineSeconds=6),
        here.job(
            "out-of-memory",
            GREEDY,
            pod={"container": {"resources": {"limits": {"memory": "32Mi"}}}},
        ),
        here.job("deleted-while-running", OBEYS),
        here.job(
            "node-lost", "sleep 600", pod={"nodeSelector": {"kubernetes.io/hostname": "node2"}}
        ),
    )
    yield here
    here.kubectl("delete", "agentjobs", "--all", "--wait=false")


def ended(here: Platform, name: str, kind: str, status: str) -> dict[str, Any]:
    """The final status of a job, whose one event says the same and is truly signed."""
    final = wait_for_case(here, name) if name in BY_JOB else here.wait_for(name, seconds=90)
    check_event(here, name, kind, status)
    return final


def check_event(here: Platform, name: str, kind: str, status: str) -> None:
    job_id = f"{name}.{here.namespace}"
    request = here.receiver.wait_for(job_id)
    request.verify(here.public_key)
    assert (request.event["type"], request.event["data"]["status"]) == (kind, status)
    assert {each.id for each in here.receiver.of(job_id)} == {request.id}


def conditions(status: dict[str, Any]) -> dict[str, str]:
    return {each["type"]: each["status"] for each in status["conditions"]}


def seconds(earlier: str, later: str) -> float:
    return (datetime.fromisoformat(later) - datetime.fromisoformat(earlier)).total_seconds()


def test_exit_0_is_done_with_its_result(endings: Platform) -> None:
    status = ended(endings, "exit-0", "job_completed", "done")
    assert (status["state"], status.get("cause")) == ("done", None)
    assert status["summary"] == "all fine"
    assert status["result"]["text"] == '{"summary": "all fine", "n": 3}\n'
    assert conditions(status)["Succeeded"] == "True"


def test_exit_3_is_a_tool_error(endings: Platform) -> None:
    status = ended(endings, "exit-3", "job_completed", "failed")
    assert status["state"] == "failed"
    assert status["cause"] | {"message": ""} == {
        "code": "tool_error",
        "message": "",
        "exitCode": 3,
        "ran": True,
        "retryable": False,
        "forced": False,
        "evidence": "observed",
    }
    assert status["podName"] in status["cause"]["message"]


def test_a_tool_that_obeys_sigterm_with_exit_0_is_cancelled(endings: Platform) -> None:
    endings.wait_for("obeys-sigterm", ["running"])
    endings.stop("obeys-sigterm")
    status = ended(endings, "obeys-sigterm", "job_cancelled", "cancelled")
    cause = status["cause"]
    assert (cause["code"], cause["ran"], cause["forced"]) == ("stopped", True, False)
    assert cause["exitCode"] == 0
    said = conditions(status)
    assert (said["StopRequested"], said["Finished"], said["Succeeded"]) == ("True", "True", "False")
    (pod,) = endings.pods_of("obeys-sigterm")
    assert "tidy" in endings.kubectl("logs", pod["metadata"]["name"])


def test_a_tool_that_ignores_sigterm_is_cancelled_by_force(endings: Platform) -> None:
    endings.wait_for("ignores-sigterm", ["running"])
    endings.stop("ignores-sigterm")
    stopping = endings.wait_for("ignores-sigterm", ["stopping", "cancelled"])
    assert stopping["state"] == "stopping"
    status = ended(endings, "ignores-sigterm", "job_cancelled", "cancelled")
    cause = status["cause"]
    assert (cause["forced"], cause["exitCode"], cause["signal"]) == (True, 137, 9)


def test_a_stop_after_the_end_changes_nothing(endings: Platform) -> None:
    before = ended(endings, "stopped-after-it-had-finished", "job_completed", "done")
    endings.stop("stopped-after-it-had-finished")
    endings.kubectl("annotate", "agentjob", "stopped-after-it-had-finished", "poke=1")
    after = endings.status("stopped-after-it-had-finished")
    assert (after["state"], after["finishedAt"]) == ("done", before["finishedAt"])


def test_a_stop_before_the_start_cancels_a_job_that_never_ran(endings: Platform) -> None:
    endings.wait_for("stopped-before-it-started", ["queued"])
    endings.stop("stopped-before-it-started")
    status = ended(endings, "stopped-before-it-started", "job_cancelled", "cancelled")
    assert (status["cause"]["ran"], status.get("attempts")) == (False, None)
    assert not endings.get("job", "stopped-before-it-started-1")


def test_an_unschedulable_job_that_is_stopped_never_ran(endings: Platform) -> None:
    status = endings.wait_for("unschedulable-then-stopped", ["queued"])
    endings.stop("unschedulable-then-stopped")
    status = ended(endings, "unschedulable-then-stopped", "job_cancelled", "cancelled")
    assert (status["cause"]["code"], status["cause"]["ran"]) == ("stopped", False)
    assert endings.get("job", "unschedulable-then-stopped-1")["spec"]["suspend"] is True


def test_a_deadline_ends_a_running_tool(endings: Platform) -> None:
    status = ended(endings, "deadline", "job_timed_out", "timed_out")
    cause = status["cause"]
    assert (cause["code"], cause["ran"], cause["forced"]) == ("deadline_exceeded", True, True)
    created = endings.get("agentjob", "deadline")["metadata"]["creationTimestamp"]
    assert seconds(created, status["deadlineAt"]) == 12
    # The tool ignores SIGTERM, so its grace period of 3 s follows the deadline.
    assert 12 <= seconds(created, status["finishedAt"]) <= 12 + 3 + 3


def test_a_pending_deadline_ends_a_job_that_cannot_start(endings: Platform) -> None:
    status = ended(endings, "pending-deadline", "job_timed_out", "timed_out")
    cause = status["cause"]
    assert (cause["code"], cause["ran"]) == ("pending_deadline_exceeded", False)
    assert "cannot be scheduled" in cause["message"]


def test_out_of_memory_is_told_with_its_proof(endings: Platform) -> None:
    status = ended(endings, "out-of-memory", "job_completed", "failed")
    cause = status["cause"]
    assert (cause["code"], cause["exitCode"], cause["forced"]) == ("oom_killed", 137, False)


def test_kubectl_delete_ends_the_pod_and_tells_before_the_record_goes(endings: Platform) -> None:
    endings.wait_for("deleted-while-running", ["running"])
    endings.kubectl("delete", "agentjob", "deleted-while-running", "--timeout=60s")
    check_event(endings, "deleted-while-running", "job_cancelled", "cancelled")
    assert not endings.get("agentjob", "deleted-while-running")


def test_a_lost_node_is_told_with_lost_evidence(endings: Platform) -> None:
    """Last: its node does not come back by itself."""
    endings.wait_for("node-lost", ["running"])
    endings.cluster.kill_kubelet("node2")
    try:
        status = ended(endings, "node-lost", "job_completed", "failed")
        cause = status["cause"]
        assert (cause["code"], cause["evidence"], cause["ran"]) == ("node_lost", "lost", True)
        assert "node2" in cause["message"]
        assert NODE_LOST_SECONDS >= 15
    finally:
        endings.cluster.start_kubelet("node2")
