"""One node: containerd, kubelet and kube-proxy in namespaces of their own.

A node has a network namespace and a mount namespace. In the latter `/var/lib` is a file
system of its own, and `/run`, `/opt` and `/var/log` are empty, so that everything finds its
usual paths, none of it touches the host's, and all of it is gone with the last process.
"""

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import cgroups, programs
from .binaries import directory_of
from .components import Site
from .errors import ClusterError
from .network import NAMED_NAMESPACES, Network
from .packages import CNI_PLUGINS
from .processes import Processes, run

DISK_BYTES = 40 << 30
"""The size of a node's file system; the file is sparse and takes what is used."""
VOLUMES = 8
VOLUME_DIRECTORY = "/var/lib/agentjobs-volumes"
HIDDEN = ("/var/lib", "/var/log", "/opt", "/run")
"""What a node does not see of the host."""
READY_TIMEOUT = 120.0
CONTAINERD_SOCKET = "/run/containerd/containerd.sock"

_ENTER = f"""
set -e
mount -o loop,noatime "$1" /var/lib
for place in /var/log /opt /run; do mount -t tmpfs -o mode=0755 tmpfs "$place"; done
mkdir -p /run/netns /run/lock
for number in $(seq {VOLUMES}); do mkdir -p -m 0777 "{VOLUME_DIRECTORY}/$number"; done
mount --make-rshared /
echo mounted > "$2"
exec sleep infinity
"""
_CONTAINERD = """\
version = 3
root = "/var/lib/containerd"
state = "/run/containerd"

[grpc]
address = "{socket}"

[plugins."io.containerd.cri.v1.images".pinned_images]
sandbox = "docker.io/local/pause:1"

[plugins."io.containerd.cri.v1.runtime"]
# Where root lacks CAP_SYS_RESOURCE, lowering the score fails, and with it every pod.
restrict_oom_score_adj = true

[plugins."io.containerd.cri.v1.runtime".cni]
bin_dirs = ["{plugins}"]
conf_dir = "{cni}"
"""


@dataclass(frozen=True)
class Node:
    """Node 1, 2, ... of a cluster whose control plane is at `site`."""

    number: int
    network: Network
    site: Site
    processes: Processes

    @property
    def name(self) -> str:
        """The name that the node has in the API."""
        return f"node{self.number}"

    @property
    def address(self) -> str:
        """The node's address, which the host and all pods can reach."""
        return str(self.network.address(self.number))

    @property
    def cgroup(self) -> str:
        """The control group that holds the node's pods."""
        return self.network.namespace(self.number)

    @property
    def directory(self) -> Path:
        """Configuration and disk of the node."""
        return self.site.directory / self.name

    @property
    def parts(self) -> set[str]:
        """The names of the node's processes."""
        parts = ("namespace", "containerd", "kubelet", "kube-proxy")
        return {f"{self.name}-{part}" for part in parts}

    def create(self) -> None:
        """Write the node's configuration and make its disk, its groups and its namespaces."""
        self.directory.mkdir(parents=True, exist_ok=True)
        self._write_configuration()
        cgroups.create(self.cgroup)
        disk, mounted = self.directory / "disk.img", self.directory / "mounted"
        with disk.open("wb") as file:
            file.truncate(DISK_BYTES)
        run(["mkfs.ext4", "-q", "-F", "-m", "0", "-E", "lazy_itable_init=1,nodiscard", disk])
        network = f"--net={NAMED_NAMESPACES / self.network.namespace(self.number)}"
        unshare = ["unshare", "--mount", "--propagation=private", "sh", "-c", _ENTER]
        self.processes.start(
            f"{self.name}-namespace", ["nsenter", network, *unshare, self.cgroup, disk, mounted]
        )
        self.processes.wait_until("the node's disk is not mounted", mounted.exists, READY_TIMEOUT)

    def start_containerd(self) -> None:
        """Start containerd and return when it answers."""
        command = self.inside(_containerd("containerd"), "--config", self._file("containerd.toml"))
        # It starts its shim from the PATH.
        path = f"{directory_of(programs.CONTAINERD)}:{os.environ['PATH']}"
        self.processes.start(f"{self.name}-containerd", command, {"PATH": path})
        self.processes.wait_until("containerd does not answer", self._answers, READY_TIMEOUT)

    def start_kubelet(self) -> None:
        """Start the kubelet."""
        command = self.inside(
            directory_of(programs.KUBERNETES_NODE) / "kubelet",
            f"--config={self._file('kubelet.json')}",
            f"--kubeconfig={self.site.kubeconfig(self.name)}",
            f"--hostname-override={self.name}",
            f"--node-ip={self.address}",
            "--cert-dir=/var/lib/kubelet/pki",
        )
        self.processes.start(f"{self.name}-kubelet", command)

    def start_kube_proxy(self) -> None:
        """Start kube-proxy, which makes Services reachable from the node and its pods."""
        proxy = directory_of(programs.KUBERNETES_NODE) / "kube-proxy"
        command = self.inside(proxy, f"--config={self._file('kube-proxy.json')}")
        self.processes.start(f"{self.name}-kube-proxy", command)

    def kill_kubelet(self) -> None:
        """Kill the kubelet; the node's containers go on, its status stops."""
        self.processes.stop(f"{self.name}-kubelet")

    def load_image(self, file: Path) -> None:
        """Import every image of an OCI or Docker archive."""
        # From standard input: the file may be where the node sees nothing of the host.
        with file.open("rb") as archive:
            done = subprocess.run(
                [str(part) for part in self._ctr("images", "import", "--no-unpack=false", "-")],
                stdin=archive,
                capture_output=True,
                text=True,
                check=False,
            )
        if done.returncode != 0:
            raise ClusterError(f"{self.name} cannot import {file}: {done.stderr.strip()}")

    def inside(self, *command: str | Path) -> list[str | Path]:
        """Return a command that runs `command` in the node's namespaces."""
        holder = self.processes.get(f"{self.name}-namespace")
        if holder is None or not holder.alive:
            raise ClusterError(f"{self.name} is gone: `down` and `up` make the cluster anew")
        return ["nsenter", f"--target={holder.pid}", "--net", "--mount", "--", *command]

    def _ctr(self, *arguments: str) -> list[str | Path]:
        address = ["--address", CONTAINERD_SOCKET, "--namespace", "k8s.io"]
        return self.inside(_containerd("ctr"), *address, *arguments)

    def _answers(self) -> bool:
        try:
            run(self._ctr("version"))
        except ClusterError:
            return False
        return True

    def _file(self, name: str) -> Path:
        return self.directory / name

    def _write_configuration(self) -> None:
        pki, site = self.site.pki, self.site
        user = f"system:node:{self.name}"
        pki.kubeconfig(site.kubeconfig(self.name), site.url, user, ("system:nodes",))
        proxy = site.kubeconfig("kube-proxy")
        pki.kubeconfig(proxy, site.url, "system:kube-proxy")
        cni = self.directory / "cni"
        cni.mkdir(exist_ok=True)
        documents = {
            "kubelet.json": self._kubelet(),
            "kube-proxy.json": self._kube_proxy(proxy),
            "cni/10-agentjobs.conflist": self._cni(),
        }
        for name, document in documents.items():
            self._file(name).write_text(json.dumps(document, indent=2), encoding="utf-8")
        text = _CONTAINERD.format(socket=CONTAINERD_SOCKET, plugins=CNI_PLUGINS, cni=cni)
        self._file("containerd.toml").write_text(text, encoding="utf-8")

    def _kubelet(self) -> dict[str, Any]:
        certificate, key = self.site.pki.server(self.name, [self.name, self.address])
        return {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "address": self.address,
            "authentication": {
                "anonymous": {"enabled": False},
                "webhook": {"enabled": True},
                "x509": {"clientCAFile": str(self.site.pki.ca_file)},
            },
            "authorization": {"mode": "Webhook"},
            "tlsCertFile": str(certificate),
            "tlsPrivateKeyFile": str(key),
            "clusterDNS": [str(self.network.dns)],
            "clusterDomain": "cluster.local",
            "resolvConf": "",
            "containerRuntimeEndpoint": f"unix://{CONTAINERD_SOCKET}",
            "cgroupDriver": "cgroupfs",
            # Kubelets that share one root would each remove the other's pods.
            "cgroupRoot": f"/{self.cgroup}",
            "failCgroupV1": False,
            "failSwapOn": False,
            "volumePluginDir": "/var/lib/kubelet/volume-plugins",
            "podLogsDir": "/var/lib/pod-logs",
            "serializeImagePulls": False,
            # The disk is sparse: how full it is says nothing about the host's.
            "evictionHard": {"memory.available": "100Mi"},
            "imageGCHighThresholdPercent": 100,
            # How soon it notices that a volume is over its limit.
            "volumeStatsAggPeriod": "10s",
        }

    def _kube_proxy(self, kubeconfig: Path) -> dict[str, Any]:
        return {
            "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
            "kind": "KubeProxyConfiguration",
            "mode": "nftables",
            "clientConnection": {"kubeconfig": str(kubeconfig)},
            "hostnameOverride": self.name,
            "conntrack": {"maxPerCore": 0},
            "healthzBindAddress": "127.0.0.1:10256",
            "metricsBindAddress": "127.0.0.1:10249",
        }

    def _cni(self) -> dict[str, Any]:
        ranges = [[{"subnet": str(self.network.pods(self.number))}]]
        bridge = {
            "type": "bridge",
            "bridge": "cni0",
            "isGateway": True,
            "ipMasq": True,
            "hairpinMode": True,
            "ipam": {
                "type": "host-local",
                "ranges": ranges,
                "routes": [{"dst": "0.0.0.0/0"}],
            },
        }
        portmap = {"type": "portmap", "capabilities": {"portMappings": True}}
        return {"cniVersion": "0.4.0", "name": "agentjobs", "plugins": [bridge, portmap]}


def _containerd(name: str) -> Path:
    return directory_of(programs.CONTAINERD) / name
