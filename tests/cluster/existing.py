"""The cluster of the user's own kubeconfig."""

import os
import shlex
from pathlib import Path

from typing_extensions import override

from . import programs
from .binaries import ensure
from .cluster import Cluster
from .console import say
from .errors import ClusterError
from .processes import run


class ExistingCluster(Cluster, kind="existing"):
    """Used as it is: `up` and `down` neither make nor remove anything."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.kubeconfig = Path(os.environ.get("KUBECONFIG") or "~/.kube/config").expanduser()

    @override
    def start(
        self,
        nodes: int | None,
        network: str | None,
        apiserver_args: tuple[str, ...],
        controller_manager_args: tuple[str, ...],
    ) -> None:
        if not self.kubeconfig.is_file():
            raise ClusterError(f"there is no {self.kubeconfig}: set KUBECONFIG to your cluster's")
        ensure([programs.KUBERNETES])
        self.kubectl("version", "--request-timeout=10s")
        ready = self.kubectl("get", "nodes", "--no-headers").count(" Ready")
        if ready < (nodes or 1):
            raise ClusterError(f"the cluster of {self.kubeconfig} has {ready} Ready nodes, too few")
        say(f"using the cluster of {self.kubeconfig}")

    @override
    def down(self) -> None:
        say(f"the cluster of {self.kubeconfig} is yours and stays")

    @override
    def load_image(self, file: Path) -> None:
        command = os.environ.get("CLUSTER_LOAD_IMAGE_COMMAND")
        if not command:
            raise ClusterError(
                f"how your cluster gets the images of {file} is up to you: push them to a registry "
                "that it reads, or set CLUSTER_LOAD_IMAGE_COMMAND to a command that loads the "
                "archive given as its last argument"
            )
        run([*shlex.split(command), file], timeout=600)

    @override
    def status(self) -> str:
        return self.kubectl("get", "nodes")
