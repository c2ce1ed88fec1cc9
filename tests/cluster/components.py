"""The command lines of the control plane's components."""

from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import IPv4Network
from pathlib import Path
from typing import Any

from . import programs
from .binaries import directory_of
from .pki import Pki

ISSUER = "https://kubernetes.default.svc.cluster.local"


@dataclass(frozen=True)
class FastLimits:
    """Arguments that lift the limits which components put on themselves."""

    controller_manager: tuple[str, ...]
    scheduler: tuple[str, ...]


FAST_LIMITS = FastLimits(
    controller_manager=(
        "--kube-api-qps=1000",
        "--kube-api-burst=2000",
        "--concurrent-job-syncs=20",
        "--concurrent-gc-syncs=40",
    ),
    scheduler=("--kube-api-qps=1000", "--kube-api-burst=2000"),
)
"""With them about fourteen times as many Jobs finish in a second; pass them where that counts."""


@dataclass(frozen=True)
class Ports:
    """Where the components listen."""

    apiserver: int = 6443
    etcd: int = 2379
    etcd_peer: int = 2380
    controller_manager: int = 10257
    scheduler: int = 10259


@dataclass(frozen=True)
class Site:
    """What the components of one control plane know of each other."""

    directory: Path
    pki: Pki
    address: str
    ports: Ports
    services: IPv4Network

    @property
    def url(self) -> str:
        """The API server's address."""
        return f"https://{self.address}:{self.ports.apiserver}"

    @property
    def audit_log(self) -> Path:
        """One JSON event on each line."""
        return self.directory / "audit.log"

    def kubeconfig(self, component: str) -> Path:
        """The credentials of a component."""
        return self.directory / f"{component}.kubeconfig"


def etcd(site: Site) -> list[str | Path]:
    """A single member, which loses its last writes in a power cut but not in a kill."""
    client = f"http://127.0.0.1:{site.ports.etcd}"
    peer = f"http://127.0.0.1:{site.ports.etcd_peer}"
    return [
        directory_of(programs.ETCD) / "etcd",
        "--name=etcd",
        f"--data-dir={site.directory / 'etcd'}",
        f"--listen-client-urls={client}",
        f"--advertise-client-urls={client}",
        f"--listen-peer-urls={peer}",
        f"--initial-advertise-peer-urls={peer}",
        f"--initial-cluster=etcd={peer}",
        "--unsafe-no-fsync",
        "--quota-backend-bytes=8589934592",
        "--log-level=warn",
    ]


def apiserver(site: Site) -> list[str | Path]:
    """RBAC for everybody, an audit log, and everything else at its default."""
    pki = site.pki
    certificate, key = pki.server(
        "kube-apiserver",
        [
            "kubernetes",
            "kubernetes.default",
            "kubernetes.default.svc",
            "kubernetes.default.svc.cluster.local",
            "localhost",
            "127.0.0.1",
            site.address,
            str(site.services[1]),
        ],
    )
    kubelet_certificate, kubelet_key = pki.client("kube-apiserver", ("system:masters",))
    return [
        directory_of(programs.KUBERNETES) / "kube-apiserver",
        f"--etcd-servers=http://127.0.0.1:{site.ports.etcd}",
        f"--bind-address={site.address}",
        f"--advertise-address={site.address}",
        f"--secure-port={site.ports.apiserver}",
        f"--cert-dir={site.directory}",
        f"--tls-cert-file={certificate}",
        f"--tls-private-key-file={key}",
        f"--client-ca-file={pki.ca_file}",
        f"--kubelet-client-certificate={kubelet_certificate}",
        f"--kubelet-client-key={kubelet_key}",
        f"--kubelet-certificate-authority={pki.ca_file}",
        "--kubelet-preferred-address-types=InternalIP",
        f"--service-account-issuer={ISSUER}",
        f"--service-account-signing-key-file={pki.service_account_key}",
        f"--service-account-key-file={pki.service_account_key}",
        f"--service-cluster-ip-range={site.services}",
        "--authorization-mode=Node,RBAC",
        "--enable-admission-plugins=NodeRestriction",
        "--anonymous-auth=true",
        "--endpoint-reconciler-type=lease",
        "--allow-privileged=true",
        "--profiling=false",
        f"--audit-policy-file={site.directory / 'audit-policy.yaml'}",
        f"--audit-log-path={site.audit_log}",
        # One file, however long a test goes on: a count must not miss a rotated part.
        "--audit-log-maxsize=10000",
    ]


def controller_manager(site: Site) -> list[str | Path]:
    """All controllers, each as its own user, so that the audit log tells them apart."""
    return [
        directory_of(programs.KUBERNETES) / "kube-controller-manager",
        f"--kubeconfig={site.kubeconfig('kube-controller-manager')}",
        f"--service-account-private-key-file={site.pki.service_account_key}",
        f"--root-ca-file={site.pki.ca_file}",
        "--use-service-account-credentials=true",
        "--leader-elect=false",
        "--bind-address=127.0.0.1",
        f"--secure-port={site.ports.controller_manager}",
        f"--cert-dir={site.directory}",
    ]


def scheduler(site: Site) -> list[str | Path]:
    """Return the default scheduler's command line."""
    return [
        directory_of(programs.KUBERNETES) / "kube-scheduler",
        f"--kubeconfig={site.kubeconfig('kube-scheduler')}",
        "--leader-elect=false",
        "--bind-address=127.0.0.1",
        f"--secure-port={site.ports.scheduler}",
        f"--cert-dir={site.directory}",
    ]


USERS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "kube-controller-manager": ("system:kube-controller-manager", ()),
    "kube-scheduler": ("system:kube-scheduler", ()),
    "kwok": ("kwok", ("system:masters",)),
}
"""As which user each component writes: those of Kubernetes have their RBAC rules built in."""

AUDIT_POLICY: dict[str, Any] = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "omitManagedFields": True,
    "rules": [
        {"level": "None", "nonResourceURLs": ["/healthz*", "/livez*", "/readyz*", "/openapi*"]},
        # Leases are renewed every few seconds by everybody and prove nothing.
        {
            "level": "None",
            "verbs": ["get", "update", "patch"],
            "resources": [{"group": "coordination.k8s.io", "resources": ["leases"]}],
            "userGroups": ["system:nodes"],
        },
        {"level": "Metadata", "verbs": ["get", "list", "watch"]},
        {
            "level": "RequestResponse",
            "resources": [
                {"group": "agentjobs.dev"},
                {"group": "batch"},
                {"group": "", "resources": ["pods", "pods/status", "pods/eviction"]},
            ],
        },
        {"level": "Metadata"},
    ],
}
"""Writes of what the product is about in full, so that tests can count and attribute them."""
