"""What a test on the real cluster does: create, wait, read, as users do with kubectl."""

import json
import subprocess
import time
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tests.apiclient import ApiClient
from tests.cluster import Cluster
from tests.cluster.binaries import binary
from tests.cluster.imagebuild import product_version, recipes
from tests.controlplane.callers import Server
from tests.e2e.installed import NAMESPACE, InstalledGateway, InstalledOperator
from tests.receiver import Receiver

ROOT = Path(__file__).resolve().parents[2]
BUSYBOX = "docker.io/local/busybox:1"
NODE_LOST_SECONDS = 15
LINGER_SECONDS = 4
LOG_PATIENCE_SECONDS = 8
POLL = 0.1
TERMINAL = ("done", "failed", "cancelled", "timed_out")

Document = dict[str, Any]

LOCKED = {
    "runAsNonRoot": True,
    "runAsUser": 65532,
    "runAsGroup": 65532,
    "readOnlyRootFilesystem": True,
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "seccompProfile": {"type": "RuntimeDefault"},
}
"""What a restricted namespace asks of a container."""


@dataclass
class Platform:
    """The cluster, the receiver of events, and one namespace of a test."""

    cluster: Cluster
    receiver: Receiver
    public_key: str
    namespace: str = "default"

    def in_namespace(self) -> "Platform":
        """The same with a namespace of its own."""
        name = f"t-{uuid.uuid4().hex[:8]}"
        self.cluster.kubectl("create", "namespace", name)
        return Platform(self.cluster, self.receiver, self.public_key, name)

    @property
    def operator(self) -> InstalledOperator:
        return InstalledOperator(self.cluster)

    @property
    def gateway(self) -> InstalledGateway:
        return InstalledGateway(self.cluster)

    @cached_property
    def api(self) -> ApiClient:
        """The API server without a kubectl in between, which would cost more than the answer."""
        server = Server.of(self.cluster.kubeconfig)
        return ApiClient(f"https://{server.host}", server.context)

    def kubectl(self, *arguments: str) -> str:
        return self.cluster.kubectl("--namespace", self.namespace, *arguments)

    def create(self, *documents: Document) -> None:
        if not documents:
            return
        body = {"apiVersion": "v1", "kind": "List", "items": list(documents)}
        self.cluster.kubectl(
            "--namespace", self.namespace, "create", "-f", "-", input_text=json.dumps(body)
        )

    def get(self, kind: str, name: str) -> Document:
        """An object; empty when there is none."""
        text = self.kubectl("get", kind, name, "--ignore-not-found", "-o", "json")
        body: Document = json.loads(text) if text.strip() else {}
        return body

    def status(self, name: str) -> Document:
        status: Document = self.get("agentjob", name).get("status") or {}
        return status

    def wait_for(
        self, name: str, states: Iterable[str] = TERMINAL, seconds: float = 40
    ) -> Document:
        """Wait until a job is in one of some states; return its status."""
        wanted = tuple(states)
        until = time.monotonic() + seconds
        status: Document = {}
        while time.monotonic() < until:
            status = self.status(name)
            if status.get("state") in wanted:
                return status
            time.sleep(POLL)
        raise AssertionError(f"{name} is not {'/'.join(wanted)} after {seconds} s: {status}")

    def wait_for_all(
        self, names: Iterable[str], states: Iterable[str] = TERMINAL, seconds: float = 60
    ) -> dict[str, Document]:
        """Wait until each of these jobs is in one of some states; return them by their names."""
        wanted, names = tuple(states), set(names)
        until = time.monotonic() + seconds
        while True:
            found = {
                body["metadata"]["name"]: body
                for body in self.api.items("AgentJob", self.namespace)
                if body["metadata"]["name"] in names
            }
            late = {
                name
                for name in names
                if found.get(name, {}).get("status", {}).get("state") not in wanted
            }
            if not late:
                return found
            shown = {name: found.get(name, {}).get("status") for name in sorted(late)[:3]}
            assert time.monotonic() < until, (
                f"{len(late)} jobs not {'/'.join(wanted)} after {seconds} s, among them {shown}"
            )
            time.sleep(POLL)

    def stop(self, name: str, reason: str = "no longer needed") -> None:
        patch = json.dumps({"spec": {"stop": {"reason": reason}}})
        self.kubectl("patch", "agentjob", name, "--type=merge", "-p", patch)

    def pods_of(self, name: str) -> list[Document]:
        text = self.kubectl("get", "pods", "-l", f"agentjobs.dev/job={name}", "-o", "json")
        items: list[Document] = json.loads(text)["items"]
        return items

    def job(self, name: str, script: str, *, pod: Document | None = None, **spec: Any) -> Document:
        """An AgentJob that runs a shell script and tells the receiver."""
        container = {
            "name": "tool",
            "image": BUSYBOX,
            "imagePullPolicy": "IfNotPresent",
            "command": ["sh", "-c", script],
        }
        more = dict(pod or {})
        container |= more.pop("container", {})
        pod_spec = {"terminationGracePeriodSeconds": 3, "containers": [container], **more}
        return {
            "apiVersion": "agentjobs.dev/v1alpha1",
            "kind": "AgentJob",
            "metadata": {"name": name},
            "spec": {
                "template": {"spec": {"template": {"spec": pod_spec}}},
                "callback": {"url": self.receiver.url},
                **spec,
            },
        }


IMAGE = {"repository": "docker.io/local/agentjobs", "tag": product_version()}
STAYS = {"kubernetes.io/hostname": "node1"}
"""The second node is lost in a test; operator and gateway must not go with it."""
RESTRICTED = {"pod-security.kubernetes.io/enforce": "restricted"}


# All pods stay on one node, so they can share a volume of it whatever its modes say.
VOLUME = {
    "persistence": {"enabled": True, "accessModes": ["ReadWriteMany"], "size": "2Gi"},
    # Long enough for a test that looks at its pods.
    "podRetentionSeconds": 180,
}


def install(
    cluster: Cluster, receiver: Receiver, *, output: Document = VOLUME, operators: int = 1
) -> Platform:
    """Install the chart with the image of this work tree, allowed to call the receiver.

    Its namespace admits restricted pods only.
    """
    cluster.load_image(recipes()["operator"].archive())
    meta = {"name": NAMESPACE, "labels": RESTRICTED}
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": meta}
    cluster.kubectl("apply", "-f", "-", input_text=json.dumps(namespace))
    values = {
        "image": IMAGE,
        "callbacks": {"allow": [{"cidrs": [f"{cluster.host_address}/32"]}]},
        "output": output,
        "gateway": {"nodeSelector": STAYS, "replicas": InstalledGateway.REPLICAS},
        "operator": {
            "replicas": operators,
            "nodeSelector": STAYS,
            "extraEnv": [
                {"name": "AGENTJOBS_NODE_LOST_SECONDS", "value": str(NODE_LOST_SECONDS)},
                {"name": "AGENTJOBS_LINGER_SECONDS", "value": str(LINGER_SECONDS)},
                {"name": "AGENTJOBS_LOG_PATIENCE_SECONDS", "value": str(LOG_PATIENCE_SECONDS)},
            ],
        },
    }
    command = [
        *(str(binary("helm")), "upgrade", "--install", "agentjobs", str(ROOT / "charts/agentjobs")),
        *("--kubeconfig", str(cluster.kubeconfig), "--namespace", NAMESPACE),
        *("--values", "-", "--wait", "--timeout", "90s"),
    ]
    done = subprocess.run(
        command, input=json.dumps(values), capture_output=True, text=True, check=False, timeout=180
    )
    assert done.returncode == 0, done.stderr
    text = cluster.kubectl(
        *("--namespace", NAMESPACE, "get", "configmap", "agentjobs-signing-key"),
        *("-o", "jsonpath={.data.ed25519}"),
    )
    return Platform(cluster, receiver, text)
