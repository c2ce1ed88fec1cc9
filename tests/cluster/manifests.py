"""What a new cluster holds besides Kubernetes itself: DNS and volumes."""

from collections.abc import Iterable
from typing import Any

from .network import Network
from .node import VOLUME_DIRECTORY, VOLUMES, Node

STORAGE_CLASS = "local-static"
DEFAULT_CLASS = "storageclass.kubernetes.io/is-default-class"
VOLUME_SIZE = "5Gi"
DNS_USER = "system:coredns"
DNS_PORT = 53


def corefile(network: Network, kubeconfig: str) -> str:
    """Return CoreDNS's configuration: the cluster's names only, for there is no way out."""
    return f"""\
.:{DNS_PORT} {{
    bind {network.address(1)}
    errors
    kubernetes cluster.local in-addr.arpa {{
        kubeconfig {kubeconfig}
        ttl 5
    }}
}}
"""


def base_objects(network: Network, nodes: Iterable[Node]) -> dict[str, Any]:
    """Return what is applied to every new cluster."""
    items = [*_dns(network), _storage_class()]
    for node in nodes:
        items += [_volume(node, number) for number in range(1, VOLUMES + 1)]
    return {"apiVersion": "v1", "kind": "List", "items": items}


def _dns(network: Network) -> list[dict[str, Any]]:
    """CoreDNS runs beside the control plane, so its Service has no pods to select."""
    meta = {"name": "kube-dns", "namespace": "kube-system"}
    ports = [
        {"name": f"dns-{protocol.lower()}", "port": DNS_PORT, "protocol": protocol}
        for protocol in ("UDP", "TCP")
    ]
    labels = {"kubernetes.io/service-name": "kube-dns"}
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": DNS_USER}
    return [
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": meta,
            "spec": {"clusterIP": str(network.dns), "ports": ports},
        },
        {
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": {**meta, "labels": labels},
            "addressType": "IPv4",
            "endpoints": [{"addresses": [str(network.address(1))], "conditions": {"ready": True}}],
            "ports": ports,
        },
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "ClusterRole",
            "metadata": {"name": DNS_USER},
            "rules": [
                {
                    "apiGroups": [group],
                    "resources": resources,
                    "verbs": ["list", "watch"],
                }
                for group, resources in (
                    ("", ["namespaces", "pods", "services"]),
                    ("discovery.k8s.io", ["endpointslices"]),
                )
            ],
        },
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "ClusterRoleBinding",
            "metadata": {"name": DNS_USER},
            "roleRef": role,
            "subjects": [
                {"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": DNS_USER}
            ],
        },
    ]


def _storage_class() -> dict[str, Any]:
    return {
        "apiVersion": "storage.k8s.io/v1",
        "kind": "StorageClass",
        "metadata": {"name": STORAGE_CLASS, "annotations": {DEFAULT_CLASS: "true"}},
        "provisioner": "kubernetes.io/no-provisioner",
        "volumeBindingMode": "WaitForFirstConsumer",
    }


def _volume(node: Node, number: int) -> dict[str, Any]:
    here = {"key": "kubernetes.io/hostname", "operator": "In", "values": [node.name]}
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": f"{node.name}-{number}"},
        "spec": {
            "capacity": {"storage": VOLUME_SIZE},
            "accessModes": ["ReadWriteOnce", "ReadWriteMany"],
            # Nobody empties a local volume, so none is used twice.
            "persistentVolumeReclaimPolicy": "Retain",
            "storageClassName": STORAGE_CLASS,
            "local": {"path": f"{VOLUME_DIRECTORY}/{number}"},
            "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [here]}]}},
        },
    }
