"""What cannot be run ends with a sentence, and costs little; what is large stays within bounds."""

import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from tests import audit
from tests.apiclient import Document
from tests.controlplane.stage import CALLBACKS, Place, Scenario, scenario, template, told_in
from tests.kubelet import settle

pytestmark = pytest.mark.controlplane

STATUS_BYTES = 8192
PASSES_PER_JOB = 8
REQUESTS_PER_JOB = 4
LONGEST = "n" * 63
SIXFOLD = {"controls": "\x01", "markup": "<", "separators": "\u2028", "quotes": '"\\', "wide": "é"}
"""Characters of which JSON, or one writer of JSON, makes more bytes than they are."""


def schema(**properties: Document) -> Document:
    return {"type": "object", "properties": properties, "additionalProperties": False}


def of_tool(name: str, **arguments: Any) -> Document:
    return {"toolRef": {"name": name}, **({"arguments": arguments} if arguments else {})}


def to(url: str) -> Document:
    return {"template": template(), "callback": {"url": url}}


UNUSABLE: dict[str, tuple[Document, str]] = {
    "bad-schema": ({"inputSchema": {"type": "nothing"}}, "spec.inputSchema"),
    "key-taken": (
        {"inputSchema": schema(idempotency_key={"type": "string"})},
        "idempotency_key",
    ),
    "remote": ({"inputSchema": {"$ref": "https://example.com/s.json"}}, "spec.inputSchema"),
    "needs-approval": (
        {
            "approval": {
                "action": "delete",
                "object": "all",
                "value": "1",
                "consequence": "gone",
                "approvers": ["group:bosses"],
            }
        },
        "spec.approval",
    ),
    "restarts": ({"template": template(restartPolicy="Always")}, "restartPolicy"),
}

REFUSED: dict[str, tuple[Document, str]] = {
    "unknown-tool": (of_tool("nobody-has-it"), "there is no AgentTool nobody-has-it"),
    "breaks-schema": (of_tool("strict", count="three"), "/count"),
    "one-too-many": (of_tool("strict", count=3, colour="red"), "colour"),
    "huge-integer": (of_tool("open", n=2**53 + 1), "/n"),
    "huge-arguments": (of_tool("open", text="x" * 17000), "16384"),
    "no-containers": ({"template": template(containers=[])}, "containers"),
    "wrong-type": ({"template": template(containers="none")}, "containers"),
    "unknown-field": ({"template": template(restartPolciy="Never")}, "restartPolciy"),
    "bad-image-name": (
        {"template": template(containers=[{"name": "Not_A_Label", "image": "x"}])},
        "name",
    ),
    "no-template": ({"template": {}}, "spec.template.spec"),
    "own-selector": (
        {"template": {"spec": {**template()["spec"], "selector": {"matchLabels": {"a": "b"}}}}},
        "selector",
    ),
    "foreign-namespace": (
        {"template": {"metadata": {"namespace": "kube-system"}, **template()}},
        "namespace",
    ),
    "finalized": (
        {"template": {"metadata": {"finalizers": ["example.com/x"]}, **template()}},
        "finalizers",
    ),
    "reserved-label": (
        {"template": {"metadata": {"labels": {"agentjobs.dev/job": "x"}}, **template()}},
        "agentjobs.dev/",
    ),
    "always": ({"template": template(restartPolicy="Always")}, "restartPolicy"),
    "two-deciders": (
        {
            "template": {"spec": {**template()["spec"], "backoffLimit": 3}},
            "retry": {"maxAttempts": 2, "causes": ["tool_error"]},
        },
        "backoffLimit",
    ),
    "r-callback-nobody-allowed": (to("https://elsewhere.example.com/"), "callbacks.allow"),
    "r-callback-a-number": (to("http://2130706433:19002/"), "is no address"),
    "r-callback-metadata": (to("http://[fd00:ec2::254]/"), "never called"),
    "r-callback-a-name-that-points-inside": (to("http://localhost:9/"), "leads to where no event"),
    "bad-label": (
        {"template": {"metadata": {"labels": {"a": "not a label!"}}, **template()}},
        "labels",
    ),
}


@scenario(
    "R-CAUSE R-CALLBACK what can never run ends as invalid_spec and says where",
    RELIST_SECONDS=300,
    CALLBACKS_ALLOW=CALLBACKS,
)
def refused(place: Place) -> None:
    place.tool("strict", inputSchema=schema(count={"type": "integer"}))
    place.tool("open", inputSchema={"type": "object"})
    words: dict[str, str] = {}
    for name, (spec, word) in UNUSABLE.items():
        place.tool(name, **spec)
        words[f"with-{name}"] = word
    for name in ("strict", "open", *UNUSABLE):
        tool = place.record.until(f"verdict on {name}", partial(judged, place, name))
        assert tool["usable"] == (name not in UNUSABLE), tool
    for name in UNUSABLE:
        assert place.try_create(f"with-{name}", **of_tool(name)).code == 201
    for name, (spec, word) in REFUSED.items():
        place.create(name, **spec)
        words[name] = word
    for name, word in words.items():
        status = place.until_state(name, "failed")
        cause = status["cause"]
        assert (name, cause["code"], cause["ran"]) == (name, "invalid_spec", False)
        assert word in cause["message"] or word in str(status["conditions"]), (name, status)
        assert len(cause["message"]) <= 256
        assert not place.jobs(name)
        assert place.conditions(name)["Accepted"] == "False"
    settle()
    passes = place.operator.metric("agentjobs_passes_total")
    assert passes <= PASSES_PER_JOB * (len(words) + len(UNUSABLE) + 2)
    assert not place.operator.metric("agentjobs_passes_total", outcome="error")
    counts = audit.count(
        audit.read(place.stage.plane.audit_log),
        lambda each: (
            each.namespace == place.namespace
            and place.operator.name in each.groups
            and each.resource in {"agentjobs", "agentjobs/status", "jobs"}
            and each.verb not in {"list", "watch"}
        ),
    )
    sys.stdout.write(f"\n{audit.table(counts, len(words))}\n")
    assert sum(counts.values()) <= REQUESTS_PER_JOB * len(words)
    assert place.operator.starts == 1


def judged(place: Place, name: str) -> Document | None:
    status: Document = place.api.get("AgentTool", place.namespace, name).body.get("status") or {}
    return status if "usable" in status else None


@scenario("R-CAUSE what an admission policy refuses ends as admission_denied")
def denied(place: Place) -> None:
    namespace = "restricted-pods"
    place.api.create(
        {
            "apiVersion": "v1",
            "kind": "LimitRange",
            "metadata": {"name": "small-only", "namespace": place.namespace},
            "spec": {"limits": [{"type": "Container", "max": {"memory": "1Gi"}}]},
        }
    )
    container = {
        "name": "tool",
        "image": "x",
        "resources": {"limits": {"memory": "2Gi"}, "requests": {"memory": "2Gi"}},
    }
    place.create("too-large", template=template(containers=[container]))
    status = place.until_over("too-large")
    cause = status["cause"]
    assert (cause["code"], cause["ran"]) == ("admission_denied", False), namespace
    assert "memory" in cause["message"]
    place.api.delete("LimitRange", place.namespace, "small-only").object()


@scenario("R-HONEST the status keeps its bounds, whatever a tool writes")
def large_results(place: Place) -> None:
    for name, character in SIXFOLD.items():
        text = (character * 4096).encode()[:4096].decode(errors="ignore")
        place.create(f"large-{name}", retry={"maxAttempts": 1})
        place.kubelet.run(place.until_pod(f"large-{name}"), message=text)
    place.create("long-wait")
    pod = place.until_pod("long-wait")
    place.kubelet.waits(pod, "ErrImagePull", "\x02<&é" * 4000)
    place.until_waiting("long-wait", "image_pull")
    place.stop("long-wait", "\x03<" * 500)
    for name in (*(f"large-{each}" for each in SIXFOLD), "long-wait"):
        place.until_over(name)
        raw = place.api.get("AgentJob", place.namespace, name).raw
        size = len(status_in(raw))
        assert size <= STATUS_BYTES, f"{name}: {size} bytes of status"
        assert len(json.dumps(place.status(name))) <= 4 * STATUS_BYTES
        if name != "long-wait":
            result = place.status(name)["result"]
            assert result["bytes"] >= len((result.get("text") or "").encode())
            assert len(result["text"]) >= 500
    for version in place.record.history(place.uid("long-wait")):
        compact = json.dumps(version.get("status") or {}, ensure_ascii=False, separators=(",", ":"))
        assert len(compact.encode()) <= STATUS_BYTES


def status_in(raw: bytes) -> bytes:
    """The status as the API server wrote it."""
    body = raw.decode()
    begin = body.index('"status":{"') + len('"status":')
    _, end = json.JSONDecoder().raw_decode(body, begin)
    return body[begin:end].encode()


@scenario("R-ATTEMPT names at their limits make Jobs and pods that exist")
def longest_names(place: Place) -> None:
    indexed = {
        "spec": {
            **template(restartPolicy="Never")["spec"],
            "completions": 10000,
            "parallelism": 2,
            "completionMode": "Indexed",
        }
    }
    names = {LONGEST: None, "i" * 63: indexed, "m" * 61: None, "k" * 62: None}
    for name, body in names.items():
        place.create(name, **({"template": body} if body else {}))
    for name in names:
        pod = place.until_pod(name)
        (job,) = place.jobs(name)
        assert len(job["metadata"]["name"]) <= 63
        assert job["metadata"]["name"].startswith(name[:40])
        assert len(pod["spec"].get("hostname", "")) <= 63
        place.kubelet.start(pod)
        place.until_state(name, "running")
    for name in names:
        place.stop(name)
        assert place.until_over(name)["state"] == "cancelled"
    assert place.jobs(LONGEST)[0]["metadata"]["labels"]["agentjobs.dev/job"] == LONGEST


@pytest.mark.parametrize("scenario", told_in(__name__), ids=str)
def test_rule(played: Callable[[Scenario], None], scenario: Scenario) -> None:
    played(scenario)
