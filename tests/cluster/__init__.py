"""A real Kubernetes on this machine, for tests and the demo: `python -m tests.cluster`."""

from .cluster import Cluster
from .components import FAST_LIMITS
from .controlplane import ControlPlane
from .errors import ClusterError
from .existing import ExistingCluster
from .kind import KindCluster
from .local import LocalCluster

__all__ = [
    "FAST_LIMITS",
    "Cluster",
    "ClusterError",
    "ControlPlane",
    "ExistingCluster",
    "KindCluster",
    "LocalCluster",
]
