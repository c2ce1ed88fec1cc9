"""The chart's documents in a control plane, and when they are in force."""

import time
from collections.abc import Callable

import yaml

from tests.chart import NAMESPACE, Document
from tests.cluster import ControlPlane
from tests.controlplane.callers import Answer, Caller, Server

NOT_INSTALLED = {"Deployment", "Service"}
"""No node runs them; tests start the operator themselves."""

OPERATOR = f"system:serviceaccount:{NAMESPACE}:agentjobs-operator"
GATEWAY = f"system:serviceaccount:{NAMESPACE}:agentjobs-gateway"

USER = "alice@example.com"
USER_TOKEN = "the-token-that-alice-uses-with-kubectl"  # noqa: S105 - of this control plane alone
"""Somebody whom the API server knows by a token of its own audience."""

ENFORCED_WITHIN = 60.0
POLL = 0.2
PROBE = "policy-probe"


def install(plane: ControlPlane, chart: list[Document]) -> None:
    """Apply the chart's documents and wait until the API server holds writers to them."""
    plane.kubectl("create", "namespace", NAMESPACE)
    apply(plane, [document for document in chart if document["kind"] not in NOT_INSTALLED])
    plane.kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=30s")
    wait_for_policies(plane)


def apply(plane: ControlPlane, documents: list[Document]) -> None:
    plane.kubectl(
        "apply",
        "--server-side",
        "--force-conflicts",
        "--filename=-",
        input_text=yaml.safe_dump_all(documents),
    )


def agentjob(namespace: str, name: str, spec: Document) -> Document:
    return _object("AgentJob", namespace, name, spec)


def inputrequest(namespace: str, name: str, spec: Document) -> Document:
    return _object("InputRequest", namespace, name, spec)


def _object(kind: str, namespace: str, name: str, spec: Document) -> Document:
    meta = {"name": name, "namespace": namespace}
    return {"apiVersion": "agentjobs.dev/v1alpha1", "kind": kind, "metadata": meta, "spec": spec}


def wait_for_policies(plane: ControlPlane) -> None:
    """Wait until each policy shows: a new one is not in force at once.

    Every probe is a dry run by somebody whom RBAC would let through, so that only the policy can
    refuse it.
    """
    server = Server.of(plane.kubeconfig)
    admin = Caller(server)
    anybody = Caller(server, "anybody", "probers")
    operator = Caller(server, OPERATOR, "probers")
    gateway = Caller(server, GATEWAY, "probers")
    apply(plane, probing_rights())
    job = agentjob(PROBE, "probe", {"template": {}})
    question = inputrequest(
        PROBE,
        "probe",
        {
            "jobName": "probe",
            "jobUID": "0",
            "key": "k",
            "kind": "elicitation",
            "prompt": "?",
            "expiresAt": "2100-01-01T00:00:00Z",
        },
    )
    tool = {**job, "kind": "AgentTool", "spec": {"description": "d", "template": {}}}
    # An established kind is served a moment later.
    wait_until(lambda: admin.create(job).taken)
    wait_until(lambda: operator.create(question).taken)
    copy = {**job, "metadata": {"name": "copy", "namespace": PROBE}}
    named = {**copy, "spec": {"template": {}, "requestedBy": "somebody-else"}}
    asked = {**question, "metadata": copy["metadata"]}
    expired = {"status": {"outcome": "expired"}}
    for refused in (
        lambda: anybody.create(tool, dry_run=True),
        lambda: anybody.create(copy, dry_run=True),
        lambda: admin.create(named, dry_run=True),
        lambda: admin.create(asked, dry_run=True),
        lambda: gateway.create(copy, dry_run=True),
        lambda: admin.patch(question, expired, "status", dry_run=True),
        lambda: admin.patch(job, {"spec": {"deadlineSeconds": 1}}, dry_run=True),
    ):
        wait_until_refused(refused)
    wait_until(lambda: "finalizers" in admin.create(copy, dry_run=True).object()["metadata"])
    admin.patch(job, {"metadata": {"finalizers": None}})
    plane.kubectl("delete", "namespace", PROBE, "--wait=false")


def is_policys(answer: Answer) -> bool:
    return "ValidatingAdmissionPolicy" in answer.message


def wait_until_refused(request: Callable[[], Answer]) -> None:
    wait_until(lambda: is_policys(request()))


def wait_until(condition: Callable[[], bool], seconds: float = ENFORCED_WITHIN) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"still not after {seconds:.0f} s"
        time.sleep(POLL)


def probing_rights() -> list[Document]:
    """Everything about AgentJobs but `use` and `approve`, for the group probers."""
    rbac = "rbac.authorization.k8s.io"
    verbs = ["get", "list", "watch", "create", "update", "patch", "delete"]
    rule = {"apiGroups": ["agentjobs.dev"], "resources": ["*"], "verbs": verbs}
    meta = {"name": "probers"}
    return [
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": PROBE}},
        {"apiVersion": f"{rbac}/v1", "kind": "ClusterRole", "metadata": meta, "rules": [rule]},
        {
            "apiVersion": f"{rbac}/v1",
            "kind": "ClusterRoleBinding",
            "metadata": meta,
            "roleRef": {"apiGroup": rbac, "kind": "ClusterRole", "name": "probers"},
            "subjects": [{"apiGroup": rbac, "kind": "Group", "name": "probers"}],
        },
    ]
