"""The counting that other tests rest on."""

import json
from pathlib import Path
from typing import Any

from tests import audit

OPERATOR = "system:serviceaccount:agentjobs-system:agentjobs-operator"


def event(verb: str, resource: str, **more: Any) -> dict[str, Any]:
    kind, _, sub = resource.partition("/")
    target = {"resource": kind, "namespace": "n", "name": "x"}
    return {
        "stage": "ResponseComplete",
        "verb": verb,
        "user": {"username": OPERATOR, "groups": ["g"]},
        "objectRef": target | ({"subresource": sub} if sub else {}),
        "responseStatus": {"code": 200},
        "requestReceivedTimestamp": "2026-01-01T00:00:00.000000Z",
        **more,
    }


def owned(uid: str, attempt: str | None = None) -> dict[str, Any]:
    notes = {"annotations": {"agentjobs.dev/attempt": attempt}} if attempt else {}
    return {"metadata": {"ownerReferences": [{"uid": uid, "controller": True}], **notes}}


def write(file: Path, *events: dict[str, Any], end: str = "\n") -> Path:
    file.write_text("\n".join(json.dumps(each) for each in events) + end, encoding="utf-8")
    return file


def test_answered_requests_are_counted_once_and_refused_ones_too(tmp_path: Path) -> None:
    log = write(
        tmp_path / "audit.log",
        event("watch", "jobs", stage="ResponseStarted"),
        event("patch", "agentjobs/status"),
        event("patch", "agentjobs/status", responseStatus={"code": 409}),
        event("get", "agentjobs"),
    )
    counts = audit.count(audit.read(log), lambda each: each.user == OPERATOR)
    assert counts == {("patch", "agentjobs/status"): 2, ("get", "agentjobs"): 1}
    assert "patch   agentjobs/status                  2     0.50" in audit.table(counts, jobs=4)


def test_only_jobs_that_were_made_count_by_owner_and_attempt(tmp_path: Path) -> None:
    log = write(
        tmp_path / "audit.log",
        event("create", "jobs", responseObject=owned("a", "1")),
        event("create", "jobs", responseObject=owned("a", "1"), responseStatus={"code": 409}),
        event("create", "jobs", responseObject=owned("a", "2")),
        event("create", "jobs", responseObject=owned("b")),
        event("create", "pods", responseObject=owned("j")),
        event("create", "pods/binding", responseObject=owned("j")),
    )
    requests = list(audit.read(log))
    made = {("a", "1"): 1, ("a", "2"): 1, ("b", "placeholder"): 1}
    assert audit.jobs_made(requests) == made
    assert audit.pods_made(requests) == {"j": 1}


def test_a_line_that_is_still_written_is_left(tmp_path: Path) -> None:
    log = write(tmp_path / "audit.log", event("get", "pods"), event("get", "jobs"), end="")
    assert audit.count(audit.read(log)) == {("get", "pods"): 1}


def test_a_tail_reads_on_and_only_what_holds_a_text(tmp_path: Path) -> None:
    log = write(tmp_path / "audit.log", event("get", "pods"))
    tail, whole = audit.Tail(log), audit.Tail(log, start=0)
    assert list(tail.new()) == []
    with log.open("a", encoding="utf-8") as file:
        for verb in ("list", "create"):
            file.write(json.dumps(event(verb, "jobs", stageTimestamp="later")) + "\n")
    (found,) = tail.new('"create"')
    assert (found.verb, found.answered) == ("create", "later")
    assert list(tail.new()) == []
    assert [each.verb for each in whole.new()] == ["get", "list", "create"]
