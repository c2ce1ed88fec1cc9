"""The operator's rights, compared with the requests that the API server has recorded of it."""

import base64
import json
import secrets
import time
from typing import Any

import pytest

from agentjobs.signing import SECRET
from tests import audit
from tests.chart import Document, render, rights
from tests.cluster.binaries import binary
from tests.cluster.local import LocalCluster
from tests.controlplane.installed import OPERATOR
from tests.e2e.installed import DEPLOYMENT, NAMESPACE
from tests.e2e.platform import BUSYBOX, Platform

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180, func_only=True)]

AGENTJOBS = "agentjobs.dev"
OBEYS = "trap 'exit 0' TERM; sleep 600 & wait"
NOWHERE = {"nodeSelector": {"kubernetes.io/hostname": "nowhere"}}
WITHOUT_A_REQUEST = {
    # An admission plugin of some clusters asks for it (OwnerReferencesPermissionEnforcement).
    (AGENTJOBS, "agentjobs/finalizers", "update"),
    # After a write that somebody else's has overtaken: a matter of milliseconds.
    (AGENTJOBS, "agentjobs", "get"),
    # A Job that its queue would resume.
    ("batch", "jobs", "delete"),
    # A question that nobody has answered.
    (AGENTJOBS, "inputrequests/status", "patch"),
    # Approvals and confirmations are declared in the API and not asked yet.
    *((AGENTJOBS, "inputrequests", verb) for verb in ("get", "create", "delete")),
}
"""What the operator may do and is not seen to do here."""


def tool(kind: str, name: str) -> Document:
    container = {
        "name": "tool",
        "image": BUSYBOX,
        "imagePullPolicy": "IfNotPresent",
        "command": ["sh", "-c", "echo last"],
    }
    return {
        "apiVersion": "agentjobs.dev/v1alpha1",
        "kind": kind,
        "metadata": {"name": name},
        "spec": {
            "description": "Prints a line.",
            "resultFrom": "lastLine",
            "template": {"spec": {"template": {"spec": {"containers": [container]}}}},
        },
    }


def of_tool(name: str, kind: str, tool_name: str) -> Document:
    return {
        "apiVersion": "agentjobs.dev/v1alpha1",
        "kind": "AgentJob",
        "metadata": {"name": name},
        "spec": {"toolRef": {"kind": kind, "name": tool_name}},
    }


@pytest.fixture(scope="module")
def used(platform: Platform) -> set[tuple[str, str, str]]:
    """(group, resource, verb) of every request since the installation, after all usual ones."""
    if not isinstance(platform.cluster, LocalCluster):
        pytest.skip("only with CLUSTER=local the audit log can be read")
    here, full = platform.in_namespace(), platform.in_namespace()
    wide = f"wide-{here.namespace}"
    full.kubectl("create", "quota", "none", "--hard=pods=0")
    taken: Document = here.job("taken", "exit 0")["spec"]["template"]["spec"]
    taken["template"]["spec"]["restartPolicy"] = "Never"
    here.create(
        tool("AgentTool", "own"),
        tool("ClusterAgentTool", wide),
        {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "taken-1"}, "spec": taken},
    )
    here.create(
        of_tool("of-own", "AgentTool", "own"),
        of_tool("of-wide", "ClusterAgentTool", wide),
        of_tool("of-none", "AgentTool", "none"),
        of_tool("of-none-wide", "ClusterAgentTool", f"no-{wide}"),
        here.job("goes", "exit 0", ttlSecondsAfterFinished=1),
        here.job("taken", "exit 0"),
        here.job("stopped", OBEYS),
        here.job("deleted", OBEYS),
        here.job("held", "exit 0", pod=NOWHERE),
    )
    full.create(full.job("refused", "exit 0"))
    here.wait_for_all(["stopped", "deleted"], ["running"])
    here.wait_for("held", ["queued"])
    here.stop("stopped")
    here.stop("held")
    here.kubectl("delete", "agentjob", "deleted", "--timeout=60s")
    here.wait_for_all(["of-own", "of-wide", "of-none", "of-none-wide", "stopped", "held"])
    wait_until_refused(full)
    here.kubectl("wait", "--for=delete", "agentjob/goes", "--timeout=60s")
    # A watch is recorded when it ends; the next one shows a key that was added meanwhile.
    with here.operator.replaced():
        add_a_signing_key(here)
    recorded = audit.Tail(platform.cluster.audit_log, start=0).new(OPERATOR)
    found = {
        (each.group, each.resource, each.verb)
        for each in recorded
        if each.user == OPERATOR and each.resource
    }
    for each in (here, full):
        each.kubectl("delete", "agentjobs", "--all", "--wait=false")
    here.kubectl("delete", "clusteragenttool", wide)
    return found


def add_a_signing_key(here: Platform) -> None:
    text = f"whsk_{base64.b64encode(secrets.token_bytes(32)).decode()}"
    patch = json.dumps({"stringData": {"ed25519-next": text}})
    target = ("--namespace", NAMESPACE, "patch", "secret", SECRET)
    here.cluster.kubectl(*target, "--type=merge", "--patch", patch)


def wait_until_refused(here: Platform) -> None:
    end = time.monotonic() + 60
    waiting: Any = {}
    while waiting.get("code") != "quota_exceeded":
        assert time.monotonic() < end, json.dumps(waiting)
        waiting = here.status("refused").get("waiting") or {}
        time.sleep(0.2)


def test_the_operator_has_the_rights_that_it_uses_and_no_other(
    used: set[tuple[str, str, str]],
) -> None:
    rendered = render(binary("helm"))
    allowed = rights(rendered, "ClusterRole", DEPLOYMENT) | rights(rendered, "Role", DEPLOYMENT)
    assert used <= allowed
    assert allowed - used <= WITHOUT_A_REQUEST
