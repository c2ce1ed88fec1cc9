"""A real Kubernetes on this machine, for tests and the demo: `python -m tests.cluster`."""

from .components import FAST_LIMITS
from .controlplane import ControlPlane
from .errors import ClusterError

__all__ = ["FAST_LIMITS", "ClusterError", "ControlPlane"]
