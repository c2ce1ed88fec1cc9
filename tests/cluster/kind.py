"""A cluster made by kind in Docker. Untested: written from kind's manual."""

import json
import shutil
from pathlib import Path

from typing_extensions import override

from . import programs
from .binaries import ensure
from .cluster import Cluster
from .console import say
from .errors import ClusterError
from .paths import cache_directory
from .processes import run

CREATE_TIMEOUT = 600.0


class KindCluster(Cluster, kind="kind"):
    """kind's own nodes and network; only images and the kubeconfig are ours."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.kubeconfig = cache_directory() / "kind" / f"{name}.kubeconfig"

    @override
    def start(
        self,
        nodes: int | None,
        network: str | None,
        apiserver_args: tuple[str, ...],
        controller_manager_args: tuple[str, ...],
    ) -> None:
        _check_docker()
        ensure([programs.KUBERNETES])
        if self.name in run(["kind", "get", "clusters"]).split():
            say(f"the cluster {self.name} is up already")
            return
        configuration = {
            "apiVersion": "kind.x-k8s.io/v1alpha4",
            "kind": "Cluster",
            "nodes": [{"role": "control-plane"}, *[{"role": "worker"}] * ((nodes or 1) - 1)],
        }
        self.kubeconfig.parent.mkdir(parents=True, exist_ok=True)
        run(
            [
                *("kind", "create", "cluster", "--name", self.name, "--config", "-"),
                *("--kubeconfig", self.kubeconfig, "--wait", "120s"),
            ],
            input_text=json.dumps(configuration),
            timeout=CREATE_TIMEOUT,
        )

    @override
    def down(self) -> None:
        _check_docker()
        run(["kind", "delete", "cluster", "--name", self.name, "--kubeconfig", self.kubeconfig])
        self.kubeconfig.unlink(missing_ok=True)

    @override
    def load_image(self, file: Path) -> None:
        run(["kind", "load", "image-archive", file, "--name", self.name], timeout=CREATE_TIMEOUT)

    @override
    def status(self) -> str:
        return self.kubectl("get", "nodes")


def _check_docker() -> None:
    missing = [name for name in ("docker", "kind") if shutil.which(name) is None]
    if missing:
        raise ClusterError(f"CLUSTER=kind needs {' and '.join(missing)} on the PATH")
    try:
        run(["docker", "info"], timeout=20)
    except ClusterError as error:
        raise ClusterError(f"CLUSTER=kind needs a running Docker: {error}") from error
