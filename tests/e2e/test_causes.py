"""Why jobs end, provoked on real kubelets (R-CAUSE, R-HONEST, R-DEAD, R-ATTEMPT, R-CONTAINER)."""

from collections import Counter
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import pytest

from tests.cluster.local import LocalCluster
from tests.e2e.causes import BY_JOB
from tests.e2e.causes_seen import wait_for_case
from tests.e2e.platform import LINGER_SECONDS, Platform
from tests.e2e.provoked import PATIENCE, Story, provoked

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240, func_only=True)]

Document = dict[str, Any]


@pytest.fixture(scope="module")
def story(platform: Platform) -> Iterator[Story]:
    """Tests only look at what came of it."""
    if not isinstance(platform.cluster, LocalCluster):
        pytest.skip("only with CLUSTER=local a node may be disturbed")
    with provoked(platform, platform.cluster) as story:
        yield story


def moment(text: str) -> datetime:
    return datetime.fromisoformat(text)


def ends_of(here: Platform, name: str) -> dict[str, datetime]:
    """When the containers of a job's one pod ended, sidecars included."""
    (pod,) = here.pods_of(name)
    found = (
        *pod["status"].get("initContainerStatuses", ()),
        *pod["status"]["containerStatuses"],
    )
    return {each["name"]: moment(each["state"]["terminated"]["finishedAt"]) for each in found}


def written(status: Document) -> datetime:
    """When the end was written."""
    return next(
        moment(each["lastTransitionTime"])
        for each in status["conditions"]
        if each["type"] == "Finished"
    )


ELSEWHERE = {
    "exit-3",
    "out-of-memory",
    "deadline",
    "pending-deadline",
    "node-lost",
    "obeys-sigterm",
    "ignores-sigterm",
    "unschedulable-then-stopped",
}
"""Cases that test_endings.py holds its jobs to."""


@pytest.mark.parametrize("name", [name for name in BY_JOB if name not in ELSEWHERE])
def test_the_cause_is_named(story: Story, name: str) -> None:
    """R-CAUSE: every fact of it, one sentence that names the object to look at, three Events."""
    here = story.of(name)
    wait_for_case(here, name)
    job_id = f"{name}.{here.namespace}"
    request = here.receiver.wait_for(job_id)
    request.verify(here.public_key)
    assert request.event["data"]["cause"] == BY_JOB[name].code


def test_an_eviction_is_followed_by_one_more_attempt_where_that_is_allowed(story: Story) -> None:
    """R-ATTEMPT."""
    status = story.here.wait_for("evicted-again", seconds=PATIENCE)
    assert status["state"] == "done"
    assert [each.get("cause") for each in status["attempts"]] == ["evicted", None]
    assert "cause" not in status


def test_a_tool_begins_as_often_as_it_may_and_not_once_more(story: Story) -> None:
    """R-ATTEMPT, R-CLAIM: as the tools themselves say."""
    for name in ("evicted", "evicted-again", "drained-before"):
        story.here.wait_for(name, seconds=PATIENCE)
    place = story.here.namespace
    assert story.proof.began() == Counter(
        {f"evicted.{place}": 1, f"evicted-again.{place}": 2, f"drained-before.{place}": 1}
    )


def test_a_limit_that_the_tool_broke_itself_is_not_tried_again(story: Story) -> None:
    """R-ATTEMPT: for all that `retry` names disruptions."""
    status = story.here.wait_for("overfull", seconds=PATIENCE)
    assert len(status["attempts"]) == 1


def test_what_had_not_begun_when_its_node_was_drained_waits_again(story: Story) -> None:
    """R-ATTEMPT: without a rule, and the deadline stays."""
    status = story.here.wait_for("drained-before", seconds=PATIENCE)
    assert status["state"] == "done"
    attempts = status["attempts"]
    assert [each.get("cause") for each in attempts] == ["evicted", None]
    assert [("startedAt" in each) for each in attempts] == [False, True]


def test_what_was_being_pulled_when_its_node_was_drained_waits_again(story: Story) -> None:
    """R-ATTEMPT, R-HONEST: it never began in either attempt."""
    status = story.here.wait_for("drained-unpulled", seconds=PATIENCE)
    cause = status["cause"]
    assert (status["state"], cause["code"], cause["ran"]) == ("cancelled", "stopped", False)
    assert "startedAt" not in status
    assert [each["cause"] for each in status["attempts"]] == ["evicted", "stopped"]


def test_a_full_quota_is_waited_for_and_the_tool_runs_when_there_is_room(story: Story) -> None:
    """R-CAUSE: it is never failed for it."""
    status = story.full.wait_for("quota-freed", seconds=PATIENCE)
    assert (status["state"], len(status["attempts"])) == ("done", 1)


def test_a_sidecar_that_ignores_sigterm_is_outlived_by_the_record_not_the_verdict(
    story: Story,
) -> None:
    """R-CONTAINER, R-DEAD: over when the sidecar is dead, with the tool's end."""
    for name, code in (("sidecar-outlives", None), ("sidecar-outlives-failure", 4)):
        status = story.here.wait_for(name, seconds=PATIENCE)
        assert status["state"] == ("failed" if code else "done")
        assert (status.get("cause") or {}).get("exitCode") == code
        ends = ends_of(story.here, name)
        assert moment(status["finishedAt"]) == ends["tool"]
        # Whole seconds.
        assert written(status) >= ends["beside"] >= ends["tool"]
    assert story.here.status("sidecar-outlives")["result"]["text"] == "mine\n"


def test_a_container_that_outlives_a_failed_tool_is_ended_and_the_failure_counts(
    story: Story,
) -> None:
    """R-CONTAINER."""
    status = story.here.wait_for("lingers-after-failure", seconds=PATIENCE)
    cause = status["cause"]
    assert (status["state"], cause["code"], cause["exitCode"]) == ("failed", "tool_error", 6)
    assert cause["forced"] is False
    ends = ends_of(story.here, "lingers-after-failure")
    assert (ends["beside"] - ends["tool"]).total_seconds() >= LINGER_SECONDS


def test_the_annotated_container_is_the_tool(story: Story) -> None:
    """R-CONTAINER."""
    status = story.here.wait_for("second-is-the-tool", seconds=PATIENCE)
    assert (status["state"], status["result"]["text"]) == ("done", "mine\n")
    assert moment(status["finishedAt"]) == ends_of(story.here, "second-is-the-tool")["beside"]


def test_several_pods_are_counted(story: Story) -> None:
    """R-CONTAINER: the first that fails ends the others."""
    done = story.here.wait_for("parallel", seconds=PATIENCE)
    assert (done["state"], done["pods"]) == ("done", {"active": 0, "succeeded": 2, "failed": 0})
    failed = story.here.wait_for("index-fails", seconds=PATIENCE)
    assert failed["pods"]["active"] == 0
    assert failed["pods"]["failed"] >= 1
    assert failed["podName"] in failed["cause"]["message"]


def test_several_pods_are_stopped_together(story: Story) -> None:
    """R-STOP, R-DEAD: the Job stays, suspended, and no pod of it runs or follows."""
    status = story.here.wait_for("parallel-stopped", seconds=PATIENCE)
    cause = status["cause"]
    assert (status["state"], cause["code"], cause["ran"]) == ("cancelled", "stopped", True)
    assert story.here.get("job", "parallel-stopped-1")["spec"]["suspend"] is True
    assert not [
        pod
        for pod in story.here.pods_of("parallel-stopped")
        if pod["status"]["phase"] in {"Pending", "Running"}
    ]
