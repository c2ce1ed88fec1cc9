"""The cluster that tests and the demo use, whatever kind it is of.

`$CLUSTER` chooses: unset or `local` makes one on this machine, `existing` takes the one of
the user's kubeconfig, `kind` makes one with kind and Docker.
"""

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import ClassVar

from typing_extensions import override

from .control import kubectl
from .errors import ClusterError

DEFAULT_NAME = "agentjobs"


class Cluster(ABC):
    """A cluster with at least one real node."""

    kubeconfig: Path
    _kinds: ClassVar[dict[str, type["Cluster"]]] = {}

    @override
    def __init_subclass__(cls, kind: str) -> None:
        """Make the subclass the one that `CLUSTER=kind` chooses."""
        Cluster._kinds[kind] = cls

    def __init__(self, name: str) -> None:
        if not re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,28}[a-z0-9])?", name):
            raise ClusterError(
                f"{name!r} is no name for a cluster: up to 30 lower-case letters, digits, dashes"
            )
        self.name = name

    @classmethod
    def find(cls, name: str = DEFAULT_NAME) -> "Cluster":
        """Return the cluster called `name`, whether it is up or not."""
        chosen = os.environ.get("CLUSTER") or "local"
        if chosen not in cls._kinds:
            raise ClusterError(f"CLUSTER={chosen} is unknown; it can be {', '.join(cls._kinds)}")
        return cls._kinds[chosen](name)

    @classmethod
    def up(
        cls,
        name: str = DEFAULT_NAME,
        nodes: int | None = None,
        network: str | None = None,
        *,
        apiserver_args: Iterable[str] = (),
        controller_manager_args: Iterable[str] = (),
    ) -> "Cluster":
        """Return the cluster called `name`, after bringing it up if it is not.

        It gets one node unless more are asked for. `network` is the /16 that it uses; by default
        one is found. More arguments go to the components as they are; only the local cluster
        takes them.
        """
        cluster = cls.find(name)
        cluster.start(nodes, network, tuple(apiserver_args), tuple(controller_manager_args))
        return cluster

    @abstractmethod
    def start(
        self,
        nodes: int | None,
        network: str | None,
        apiserver_args: tuple[str, ...],
        controller_manager_args: tuple[str, ...],
    ) -> None:
        """Bring the cluster up; one that is up already stays as it is."""

    @abstractmethod
    def down(self) -> None:
        """Remove the cluster with all that belongs to it; caches stay."""

    @abstractmethod
    def load_image(self, file: Path) -> None:
        """Make the images of an OCI or Docker archive known to every node."""

    @abstractmethod
    def status(self) -> str:
        """Return a table of the cluster's parts and what to do next."""

    def kubectl(self, *arguments: str | Path, input_text: str | None = None) -> str:
        """Run kubectl as cluster administrator and return what it writes."""
        return kubectl(self.kubeconfig, *arguments, input_text=input_text)

    @property
    def host_address(self) -> str:
        """The address at which pods reach a server on this machine."""
        raise self._only_local("the address of this machine is known")

    @property
    def audit_log(self) -> Path:
        """The API server's audit events, one JSON object on each line."""
        raise self._only_local("the audit log can be read")

    def kill_kubelet(self, node: str) -> None:
        """Kill the kubelet of `node`: its containers go on, its status stops."""
        raise self._only_local(f"the kubelet of {node} can be killed")

    def start_kubelet(self, node: str) -> None:
        """Start the kubelet of `node` again."""
        raise self._only_local(f"the kubelet of {node} can be started")

    def restart_apiserver(self) -> None:
        """End the API server, start it, and wait until it is ready."""
        raise self._only_local("the API server can be restarted")

    def _only_local(self, what: str) -> ClusterError:
        return ClusterError(f"only with CLUSTER=local {what}")
