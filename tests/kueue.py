"""A real Kueue beside a control plane, for as long as a test lasts."""

import base64
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from tests.apiclient import ApiClient, Document, path_of
from tests.cluster import ControlPlane
from tests.cluster.binaries import binary
from tests.cluster.controlplane import free_ports

READY_WITHIN = 60.0
POLL = 0.1
NAMESPACE = "kueue-system"
SERVICE = "kueue-webhook-service"
SECRET = "kueue-webhook-server-cert"  # noqa: S105 - the name of one
WANTED = {
    "Namespace",
    "CustomResourceDefinition",
    "Secret",
    "MutatingWebhookConfiguration",
    "ValidatingWebhookConfiguration",
}
"""Of its own manifests; the rest is for a Kueue that runs in a pod."""
RESOURCES = "/apis/kueue.x-k8s.io/v1beta2"


class Kueue:
    """Its resources, as a platform team writes them."""

    def __init__(self, api: ApiClient) -> None:
        self._api = api

    def cluster_queue(self, name: str, cpus: int, **spec: Any) -> None:
        """A quota of whole processors; jobs of higher priority take it from lower ones."""
        quota = {"name": "cpu", "nominalQuota": str(cpus)}
        group = {"coveredResources": ["cpu"], "flavors": [{"name": "any", "resources": [quota]}]}
        body = {
            "resourceGroups": [group],
            "namespaceSelector": {},
            "preemption": {"withinClusterQueue": "LowerPriority"},
            **spec,
        }
        self._create("ClusterQueue", name, "", spec=body)

    def local_queue(self, namespace: str, name: str, cluster_queue: str) -> None:
        self._create("LocalQueue", name, namespace, spec={"clusterQueue": cluster_queue})

    def priority(self, name: str, value: int) -> None:
        self._create("WorkloadPriorityClass", name, "", value=value)

    def flavor(self, name: str) -> None:
        self._create("ResourceFlavor", name, "", spec={})

    def workload_of(self, namespace: str, job: Document) -> Document | None:
        """The Workload that Kueue has made for a Job."""
        found = self._api.send("GET", _path("Workload", namespace)).object()["items"]
        uid = job["metadata"]["uid"]
        owned = [each for each in found if uid in _owners(each)]
        return owned[0] if owned else None

    def workloads(self, namespace: str) -> list[Document]:
        return list(self._api.send("GET", _path("Workload", namespace)).object()["items"])

    def change(self, kind: str, namespace: str, name: str, spec: Document) -> None:
        self._api.send(
            "PATCH",
            _path(kind, namespace, name),
            {"spec": spec},
            content_type="application/merge-patch+json",
        ).object()

    def _create(self, kind: str, name: str, namespace: str, **body: Any) -> None:
        meta = {"name": name, **({"namespace": namespace} if namespace else {})}
        whole = {"apiVersion": "kueue.x-k8s.io/v1beta2", "kind": kind, "metadata": meta, **body}
        self._api.send("POST", _path(kind, namespace), whole).object()


@contextmanager
def kueue(plane: ControlPlane, directory: Path) -> Iterator[Kueue]:
    """Install its resources and webhooks, and run it until the block ends."""
    program = binary("kueue")
    api = ApiClient.of(plane)
    webhooks, health = free_ports(2)
    manifests = _manifests(plane, program.parent / "config/default", webhooks)
    plane.kubectl("create", "--filename=-", input_text=yaml.safe_dump_all(manifests))
    config = directory / "kueue.yaml"
    configuration = _configuration(directory, webhooks, health)
    config.write_text(yaml.safe_dump(configuration), encoding="utf-8")
    log = directory / "kueue.log"
    credentials = plane.kubeconfig_for("kueue", ["system:masters"])
    with log.open("wb") as output:
        process = subprocess.Popen(
            [program, f"--config={config}", f"--kubeconfig={credentials}"],
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        _mount(api, directory / "certificates", process, log)
        _wait_until_ready(f"http://127.0.0.1:{health}/readyz", process, log)
        yield Kueue(api)
    finally:
        process.kill()
        process.wait()


def _manifests(plane: ControlPlane, directory: Path, port: int) -> Iterable[Document]:
    """What the API server must know of it; it is found where a Service leads out of the cluster."""
    for body in yaml.safe_load_all(plane.kubectl("kustomize", directory)):
        if body["kind"] in WANTED:
            for client in _clients(body):
                client["service"]["port"] = port
            yield body
    yield {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": SERVICE, "namespace": NAMESPACE},
        "spec": {"type": "ExternalName", "externalName": "localhost"},
    }


def _clients(body: Document) -> Iterator[Document]:
    """Where the API server asks it something: admission and conversion."""
    for webhook in body.get("webhooks") or ():
        yield webhook["clientConfig"]
    conversion = (body.get("spec") or {}).get("conversion") or {}
    if "webhook" in conversion:
        yield conversion["webhook"]["clientConfig"]


def _configuration(directory: Path, webhooks: int, health: int) -> Document:
    return {
        "apiVersion": "config.kueue.x-k8s.io/v1beta2",
        "kind": "Configuration",
        "namespace": NAMESPACE,
        "health": {"healthProbeBindAddress": f"127.0.0.1:{health}"},
        "metrics": {"bindAddress": "0"},
        "webhook": {"port": webhooks, "certDir": str(directory / "certificates")},
        "leaderElection": {"leaderElect": False},
        "internalCertManagement": {"enable": True},
        "featureGates": {"VisibilityOnDemand": False},
        "integrations": {"frameworks": ["batch/job"]},
    }


def _mount(api: ApiClient, directory: Path, process: "subprocess.Popen[bytes]", log: Path) -> None:
    """Do what a kubelet does for a pod: write the Secret that Kueue fills into its directory."""
    path = path_of("Secret", NAMESPACE, SECRET)
    end = time.monotonic() + READY_WITHIN
    while not (data := api.send("GET", path).object().get("data")):
        _go_on(process, log, end)
    directory.mkdir(mode=0o700)
    for name, value in data.items():
        (directory / name).write_bytes(base64.b64decode(value))


def _wait_until_ready(url: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    end = time.monotonic() + READY_WITHIN
    while True:
        try:
            urllib.request.urlopen(url, timeout=2).close()  # noqa: S310 - our own
        except (OSError, urllib.error.HTTPError):
            _go_on(process, log, end)
        else:
            return


def _go_on(process: "subprocess.Popen[bytes]", log: Path, end: float) -> None:
    last_words = log.read_text(errors="replace")[-1500:]
    assert process.poll() is None, last_words
    assert time.monotonic() < end, last_words
    time.sleep(POLL)


def _owners(body: Document) -> list[str]:
    return [owner["uid"] for owner in body["metadata"].get("ownerReferences") or ()]


def _path(kind: str, namespace: str, name: str = "") -> str:
    place = f"/namespaces/{namespace}" if namespace else ""
    plural = f"{kind.lower()}es" if kind.endswith("s") else f"{kind.lower()}s"
    return f"{RESOURCES}{place}/{plural}" + (f"/{name}" if name else "")
