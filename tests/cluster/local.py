"""A cluster on this machine: a control plane and one or two nodes, without Docker."""

import json
import os
import shutil
import sys
import time
from dataclasses import asdict, dataclass
from ipaddress import IPv4Network
from pathlib import Path

from typing_extensions import override

from . import images, manifests, network, programs, remains
from .binaries import directory_of, ensure
from .cluster import Cluster
from .components import Ports, Site
from .console import duration, say, step
from .control import Arguments, Control
from .errors import ClusterError
from .network import Network
from .node import HIDDEN, Node
from .packages import ensure_packages
from .paths import cache_directory, clusters_directory, lock
from .pki import Pki
from .processes import Processes

MOST_NODES = 9
NODES_TIMEOUT = 90.0
PATIENCE = 30.0
POLL_SECONDS = 0.2
SPACE_TO_RUN = 4 << 30


@dataclass(frozen=True)
class Plan:
    """What a cluster was made with; kept in its directory."""

    range: str
    nodes: int
    arguments: Arguments


class LocalCluster(Cluster, Control, kind="local"):
    """The control plane runs in the first node's network namespace, on fixed ports there."""

    def __init__(self, name: str) -> None:
        Cluster.__init__(self, name)
        self.directory = clusters_directory() / name
        # Before it is up a cluster has no network; any will do to look for its processes.
        self._settle(self._load_plan() or Plan(str(network.CANDIDATES[0]), 0, Arguments()))

    @override
    def start(
        self,
        nodes: int | None,
        network: str | None,
        apiserver_args: tuple[str, ...],
        controller_manager_args: tuple[str, ...],
    ) -> None:
        _check_machine(nodes or 1)
        arguments = Arguments(apiserver_args, controller_manager_args)
        with lock(f"cluster-{self.name}"):
            if self._load_plan() and self._recovers():
                self._check_same(nodes, network, arguments)
                say(f"the cluster {self.name} is up already")
                return
            if remains.there(self.name):
                say(f"removing what is left of an earlier cluster {self.name}")
                remains.remove(self.name)
            ensure_packages()
            ensure(programs.NODE)
            began = time.monotonic()
            try:
                self._create(nodes or 1, network, arguments)
            except BaseException:
                # The logs say why; the next `up` removes the rest.
                Processes(self.directory).stop_all()
                raise
            say(f"the cluster {self.name} is up after {duration(time.monotonic() - began)}")

    @override
    def down(self) -> None:
        _check_root()
        with lock(f"cluster-{self.name}"):
            if not remains.there(self.name):
                say(f"there is no cluster {self.name}")
                return
            with step(f"removing the cluster {self.name}"):
                remains.remove(self.name)

    @override
    def load_image(self, file: Path) -> None:
        if not file.is_file():
            raise ClusterError(f"there is no image archive {file}")
        self._check_up()
        for node in self.nodes:
            node.load_image(file)

    @override
    def status(self) -> str:
        if self._load_plan() is None:
            up = f"python -m tests.cluster up --name {self.name}"
            return f"there is no cluster {self.name}\nnext: {up}\n"
        ready = self.api.ready_nodes()
        rows = [("COMPONENT", "PID", "STATE")]
        rows += [
            (process.name, str(process.pid), "running" if process.alive else "ended")
            for process in self._processes.all()
        ]
        rows += [
            (node.name, "-", "Ready" if node.name in ready else "not Ready") for node in self.nodes
        ]
        table = "".join(f"{name:30}{pid:>8}  {state}\n" for name, pid, state in rows)
        repair = f"python -m tests.cluster up --name {self.name}  (it makes the cluster anew)"
        advice = f"export KUBECONFIG={self.kubeconfig}" if self.healthy() else repair
        return (
            f"{table}kubeconfig: {self.kubeconfig}\n"
            f"address of this machine for pods: {self.host_address}\nnext: {advice}\n"
        )

    @property
    @override
    def host_address(self) -> str:
        return str(self._network.host)

    @property
    @override
    def audit_log(self) -> Path:
        return self._site.audit_log

    @override
    def kill_kubelet(self, node: str) -> None:
        self._node(node).kill_kubelet()

    @override
    def start_kubelet(self, node: str) -> None:
        self._node(node).start_kubelet()

    @override
    def restart_apiserver(self) -> None:
        Control.restart_apiserver(self)

    @override
    def kubectl(self, *arguments: str | Path, input_text: str | None = None) -> str:
        return Control.kubectl(self, *arguments, input_text=input_text)

    def healthy(self) -> bool:
        """Whether every process runs, the API server answers and every node is Ready."""
        return self._complete() and self.api.ready() and self._all_ready()

    def _complete(self) -> bool:
        """Whether every process of the cluster runs."""
        parts = {"etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "coredns"}
        return self.pids.keys() >= parts.union(*(node.parts for node in self.nodes))

    def _recovers(self) -> bool:
        """Whether the cluster is healthy, or becomes so soon: under load it may be slow."""
        deadline = time.monotonic() + PATIENCE
        while self._complete():
            if self.api.ready() and self._all_ready():
                return True
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_SECONDS)
        return False

    def _create(self, nodes: int, wanted: str | None, arguments: Arguments) -> None:
        # Two clusters that start at once must not find the same network free.
        with network.alone():
            found = network.find_network(self.name, wanted)
            self._settle(Plan(str(found.range), nodes, arguments))
            self._save_plan()
            network.create(found, nodes)
        self._create_credentials()
        with step(f"creating {nodes} node{'s' if nodes > 1 else ''}"):
            archives = images.write_base_images(self.directory / "images")
            for node in self.nodes:
                node.create()
        # Its namespace exists from here on, and with it the way into it.
        self._settle(self._plan)
        with step("starting the control plane"):
            self.start_etcd()
            self.start_apiserver()
            self.start_controller_manager()
            self.start_scheduler()
        with step("starting the nodes"):
            for node in self.nodes:
                node.start_containerd()
                for archive in archives:
                    node.load_image(archive)
                node.start_kubelet()
                node.start_kube_proxy()
            self._start_dns()
            objects = manifests.base_objects(self._network, self.nodes)
            self.kubectl("apply", "-f", "-", input_text=json.dumps(objects))
            self._wait_for_service_accounts()
            self._processes.wait_until("the nodes are not Ready", self._all_ready, NODES_TIMEOUT)

    def _start_dns(self) -> None:
        kubeconfig = self._site.kubeconfig("coredns")
        self._site.pki.kubeconfig(kubeconfig, self.url, manifests.DNS_USER)
        corefile = self.directory / "Corefile"
        text = manifests.corefile(self._network, str(kubeconfig))
        corefile.write_text(text, encoding="utf-8")
        self._start("coredns", [directory_of(programs.COREDNS) / "coredns", "-conf", corefile])

    def _settle(self, plan: Plan) -> None:
        """Take `plan` as what this cluster is."""
        self._plan = plan
        self._network = Network(self.name, IPv4Network(plan.range))
        address = str(self._network.address(1))
        pki = Pki(self.directory / "pki")
        site = Site(self.directory, pki, address, Ports(), self._network.services)
        processes = Processes(self.directory)
        inside = ("nsenter", f"--net={network.NAMED_NAMESPACES / self._network.namespace(1)}", "--")
        Control.__init__(self, site, processes, plan.arguments, inside)
        self.nodes = [
            Node(number, self._network, site, processes) for number in range(1, plan.nodes + 1)
        ]

    def _node(self, name: str) -> Node:
        for node in self.nodes:
            if node.name == name:
                return node
        known = ", ".join(node.name for node in self.nodes)
        raise ClusterError(f"the cluster {self.name} has no node {name!r}; it has {known}")

    def _all_ready(self) -> bool:
        return {node.name for node in self.nodes} <= self.api.ready_nodes()

    def _check_up(self) -> None:
        if self._load_plan() is None:
            raise ClusterError(
                f"there is no cluster {self.name}: make one with `python -m tests.cluster up`"
            )

    def _check_same(self, nodes: int | None, wanted: str | None, arguments: Arguments) -> None:
        plan = self._plan
        if Plan(wanted or plan.range, nodes or plan.nodes, arguments) != plan:
            raise ClusterError(
                f"the cluster {self.name} is up with other settings ({plan.nodes} nodes in "
                f"{plan.range}, {plan.arguments}): take it down first, or choose another --name"
            )

    def _load_plan(self) -> Plan | None:
        try:
            kept = json.loads((self.directory / "plan.json").read_text(encoding="utf-8"))
            lists = {key: tuple(value) for key, value in kept.pop("arguments").items()}
            return Plan(**kept, arguments=Arguments(**lists))
        except (FileNotFoundError, ValueError, TypeError, KeyError):
            return None

    def _save_plan(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        text = json.dumps(asdict(self._plan))
        (self.directory / "plan.json").write_text(text, encoding="utf-8")


def _check_machine(nodes: int) -> None:
    if sys.platform != "linux":
        raise ClusterError(
            "a local cluster needs Linux: use CLUSTER=kind with Docker, or CLUSTER=existing"
        )
    _check_root()
    if not 1 <= nodes <= MOST_NODES:
        raise ClusterError(f"a cluster has 1 to {MOST_NODES} nodes, not {nodes}")
    cache = cache_directory()
    for place in HIDDEN:
        if cache.is_relative_to(place):
            raise ClusterError(
                f"the cache {cache} lies in {place}, of which a node sees nothing: "
                "set AGENTJOBS_CACHE to a directory elsewhere"
            )
    cache.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(cache).free
    if free < SPACE_TO_RUN:
        raise ClusterError(
            f"{cache} has {free >> 30} GiB free, a cluster needs {SPACE_TO_RUN >> 30}: "
            "free some, or set AGENTJOBS_CACHE to another disk"
        )


def _check_root() -> None:
    if os.geteuid() != 0:
        raise ClusterError(
            "a local cluster needs root, for namespaces, mounts and control groups: run this "
            "with sudo -E, or use CLUSTER=existing (your kubeconfig) or CLUSTER=kind (Docker)"
        )
