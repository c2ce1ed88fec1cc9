"""Output where kubelets do not answer and stores fail: no end waits for it (R-OUTPUT)."""

from pathlib import Path
from typing import Any

import pytest

from agentjobs.domain.output import LOST
from tests.controlplane.stage import Place, Scenario, scenario, told_in

pytestmark = pytest.mark.controlplane

PATIENCE = 3
RETENTION = 2
LET_GO_WITHIN = 100.0


def store_of(place: Place) -> Path:
    return Path(place.stage.directory) / f"output-of-{place.namespace}"


def serve(place: Place) -> None:
    store = {
        "OUTPUT_STORE": store_of(place).as_uri(),
        "LOG_PATIENCE_SECONDS": PATIENCE,
        "STORE_PATIENCE_SECONDS": PATIENCE,
        "POD_RETENTION_SECONDS": RETENTION,
    }
    place.stage.operator(place, settings=store)


def condition(place: Place, name: str) -> dict[str, Any]:
    """OutputArchived; empty while there is none."""
    found = place.status(name).get("conditions", ())
    return next((each for each in found if each["type"] == "OutputArchived"), {})


def run(place: Place, name: str) -> None:
    place.create(name)
    place.until_running(name)
    place.kubelet.finish(place.until_pod(name), 0)
    assert place.until_over(name)["state"] == "done"


@scenario("R-TWO-WRITES a log that nobody can read ends as a gap, after the end", own=True)
def unread(place: Place) -> None:
    serve(place)
    run(place, "unread")
    place.record.until(
        "OutputArchived", lambda: condition(place, "unread").get("status") == "True", PATIENCE + 20
    )
    assert place.status("unread")["output"]["gaps"] == 1
    assert "one gap" in condition(place, "unread")["message"]
    ends = [
        "output" in version["status"]
        for version in place.record.history(place.uid("unread"))
        if "finishedAt" in (version.get("status") or {})
    ]
    assert ends[0] is False, "the end was written before"
    (end,) = store_of(place).rglob("end")
    assert LOST in end.read_text(encoding="utf-8")
    # R-TTL: pods go some time after the archive, the Job stays.
    selector = {"labelSelector": "agentjobs.dev/job=unread"}
    place.record.until(
        "end of the pod",
        lambda: not place.api.items("Pod", place.namespace, **selector),
        RETENTION + 10,
    )
    assert place.api.get("Job", place.namespace, "unread-1").code == 200


@scenario("R-OUTPUT a store that fails is told, tried on, and blocks no deletion", own=True)
def broken(place: Place) -> None:
    serve(place)
    in_the_way = store_of(place) / "output"
    in_the_way.parent.mkdir(exist_ok=True)
    in_the_way.write_text("no directory")
    for name in ("kept", "deleted"):
        run(place, name)
    uid = place.uid("deleted")
    place.api.delete("AgentJob", place.namespace, "deleted")
    place.record.until(
        "word of what is missing",
        lambda: condition(place, "kept").get("status") == "False",
        LET_GO_WITHIN,
    )
    told = condition(place, "kept")
    assert told["reason"] == "ArchivePending"
    assert "output is missing until it can be stored" in told["message"]
    assert place.state("kept") == "done"
    place.record.until(
        "end of the deleted one",
        lambda: not place.record.latest("AgentJob", place.namespace, "deleted"),
        LET_GO_WITHIN,
    )
    selector = {"fieldSelector": f"involvedObject.uid={uid}"}
    reasons = {each["reason"] for each in place.api.items("Event", place.namespace, **selector)}
    assert "OutputLeftBehind" in reasons
    in_the_way.unlink()
    place.record.until("OutputArchived", lambda: condition(place, "kept")["status"] == "True", 40)
    assert place.status("kept")["output"]["gaps"] == 1, "of a kubelet that is none"


@pytest.mark.parametrize("scenario", told_in(__name__), ids=str)
def test_rule(played: Any, scenario: Scenario) -> None:
    played(scenario)
