"""The network of one cluster: a bridge on the host, a network namespace for each node.

Everything is called after the cluster, so that it is found and removed without any record.
"""

import fcntl
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from ipaddress import IPv4Address, IPv4Network, ip_network
from pathlib import Path

from .errors import ClusterError
from .processes import run

CANDIDATES = tuple(IPv4Network(f"10.{second}.0.0/16") for second in range(201, 221))
"""Where a network is looked for when none is asked for: the first that nothing uses."""
NAMED_NAMESPACES = Path("/run/netns")


@dataclass(frozen=True)
class Network:
    """The addresses of one cluster, all of them within one /16.

    `.0.1` is the host, `.0.11` the first node; the pods of the first node are in `.11.0/24`,
    those of the second in `.12.0/24`; Services are in `.128.0/20`.
    """

    cluster: str
    range: IPv4Network

    @property
    def host(self) -> IPv4Address:
        """The host's address, which pods and nodes can reach."""
        return self.range[1]

    @property
    def services(self) -> IPv4Network:
        """Where Services get their addresses."""
        return IPv4Network((self.range[128 << 8], 20))

    @property
    def dns(self) -> IPv4Address:
        """The address of the cluster's DNS Service."""
        return self.services[10]

    @property
    def bridge(self) -> str:
        """The bridge on the host: interface names have 15 characters at most."""
        return f"aj{sha256(self.cluster.encode()).hexdigest()[:8]}"

    def address(self, node: int) -> IPv4Address:
        """The address of node 1, 2, ..."""
        return self.range[10 + node]

    def pods(self, node: int) -> IPv4Network:
        """Where the pods of node 1, 2, ... get their addresses."""
        return IPv4Network((self.range[(10 + node) << 8], 24))

    def namespace(self, node: int) -> str:
        """The network namespace of node 1, 2, ..."""
        return f"agentjobs-{self.cluster}-node{node}"


def find_network(cluster: str, wanted: str | None) -> Network:
    """Return a network that overlaps nothing here; `wanted` is one that the user chose."""
    used = _used()
    if wanted is None:
        for candidate in CANDIDATES:
            if not any(candidate.overlaps(other) for other in used):
                return Network(cluster, candidate)
        raise ClusterError(
            f"every network from {CANDIDATES[0]} to {CANDIDATES[-1]} is in use: "
            "name a free /16 with --network"
        )
    chosen = _parse(wanted)
    for other in used:
        if chosen.overlaps(other):
            raise ClusterError(
                f"the network {chosen} overlaps {other}, which this machine uses: "
                "name another /16 with --network, or leave it out"
            )
    return Network(cluster, chosen)


@contextmanager
def alone() -> Iterator[None]:
    """Let nobody else on this machine look for a network before the one that was found is made.

    The lock is the host's network namespace: runs with different caches share no other place.
    """
    with Path("/proc/self/ns/net").open("rb") as namespace:
        fcntl.flock(namespace, fcntl.LOCK_EX)
        yield


def create(network: Network, nodes: int) -> None:
    """Make the bridge, the namespaces, and the routes that join pods, nodes and the host."""
    run(["ip", "link", "add", network.bridge, "type", "bridge"])
    run(["ip", "address", "add", f"{network.host}/24", "dev", network.bridge])
    run(["ip", "link", "set", network.bridge, "up"])
    for node in range(1, nodes + 1):
        _create_namespace(network, node)
    for node in range(1, nodes + 1):
        way = [str(network.pods(node)), "via", str(network.address(node))]
        run(["ip", "route", "add", *way, "dev", network.bridge])
        for other in range(1, nodes + 1):
            if other != node:
                run(["ip", "-n", network.namespace(other), "route", "add", *way])


def remove(cluster: str) -> None:
    """Remove every namespace and interface of `cluster` that there is."""
    bridge = Network(cluster, CANDIDATES[0]).bridge
    for link in _links(bridge):
        run(["ip", "link", "delete", link])
    for namespace in namespaces(cluster):
        run(["ip", "netns", "delete", namespace.name])
    _remove_empty_namespace_directory()


def namespaces(cluster: str) -> list[Path]:
    """Return the files of the cluster's network namespaces, of which some may be left over."""
    own = re.compile(rf"agentjobs-{re.escape(cluster)}-node\d+")
    if not NAMED_NAMESPACES.is_dir():
        return []
    return sorted(file for file in NAMED_NAMESPACES.iterdir() if own.fullmatch(file.name))


def _create_namespace(network: Network, node: int) -> None:
    namespace = network.namespace(node)
    veth = f"{network.bridge}n{node}"
    run(["ip", "netns", "add", namespace])
    peer = ["peer", "name", "eth0", "netns", namespace]
    run(["ip", "link", "add", veth, "type", "veth", *peer])
    run(["ip", "link", "set", veth, "master", network.bridge, "up"])
    inside = ["ip", "-n", namespace]
    run([*inside, "address", "add", f"{network.address(node)}/24", "dev", "eth0"])
    run([*inside, "link", "set", "lo", "up"])
    run([*inside, "link", "set", "eth0", "up"])
    run([*inside, "route", "add", "default", "via", str(network.host)])


def _remove_empty_namespace_directory() -> None:
    """`ip netns` mounts its directory and leaves it; it comes back with the next namespace."""
    if not NAMED_NAMESPACES.is_dir() or any(NAMED_NAMESPACES.iterdir()):
        return
    while str(NAMED_NAMESPACES) in _mount_points():
        run(["umount", NAMED_NAMESPACES])
    NAMED_NAMESPACES.rmdir()


def _mount_points() -> list[str]:
    lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines()
    return [line.split()[4] for line in lines]


def _links(bridge: str) -> list[str]:
    """The bridge last: its ports go first."""
    links = [link["ifname"] for link in json.loads(run(["ip", "-j", "link", "show"]))]
    own = re.compile(rf"{bridge}(n\d+)?")
    return sorted((link for link in links if own.fullmatch(link)), key=len, reverse=True)


def _used() -> list[IPv4Network]:
    """Every network that an interface or a route of this machine has, but the default."""
    used: set[IPv4Network] = set()
    for link in json.loads(run(["ip", "-4", "-j", "address", "show"])):
        for info in link.get("addr_info", ()):
            used.add(IPv4Network((info["local"], info["prefixlen"]), strict=False))
    for route in json.loads(run(["ip", "-4", "-j", "route", "show"])):
        if route["dst"] != "default":
            used.add(IPv4Network(route["dst"]))
    return sorted(used)


def _parse(text: str) -> IPv4Network:
    try:
        network = ip_network(text)
    except ValueError as error:
        raise ClusterError(f"{text!r} is no network such as 10.201.0.0/16: {error}") from error
    if not isinstance(network, IPv4Network) or network.prefixlen != 16:
        raise ClusterError(f"the network of a cluster is an IPv4 /16, which {text} is not")
    return network
