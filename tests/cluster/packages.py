"""The system's own tools that nodes are made with; Debian's packages where one is missing."""

import os
import shutil
from pathlib import Path

from .console import say, step
from .errors import ClusterError
from .processes import run

PACKAGES = {
    "buildah": "buildah",
    "busybox-static": "/bin/busybox",
    "conntrack": "conntrack",
    "containernetworking-plugins": "/usr/lib/cni/bridge",
    "e2fsprogs": "mkfs.ext4",
    "iproute2": "ip",
    "iptables": "iptables",
    "kmod": "modprobe",
    "mmdebstrap": "mmdebstrap",
    "nftables": "nft",
    "runc": "runc",
    "util-linux": "nsenter",
}
"""Debian package to a program (on the PATH, or the whole path) that shows it is there."""
CNI_PLUGINS = Path("/usr/lib/cni")
BUSYBOX = Path("/bin/busybox")


def ensure_packages() -> None:
    """Install what is missing with apt-get, or say exactly what to install."""
    missing = sorted(name for name, proof in PACKAGES.items() if not _is_there(proof))
    if not missing:
        return
    names = " ".join(missing)
    if shutil.which("apt-get") is None or os.geteuid() != 0:
        raise ClusterError(f"these programs are missing; install their Debian packages: {names}")
    say(f"missing Debian packages: {names}")
    environment = ["env", "DEBIAN_FRONTEND=noninteractive"]
    try:
        with step("apt-get update"):
            run([*environment, "apt-get", "update", "-qq"], timeout=300)
        with step(f"apt-get install {names}"):
            options = ["-y", "-qq", "--no-install-recommends", "-o", "DPkg::Lock::Timeout=300"]
            run([*environment, "apt-get", "install", *options, *missing], timeout=900)
    except ClusterError as error:
        raise ClusterError(f"{error}\ninstall these yourself, then try again: {names}") from error


def _is_there(proof: str) -> bool:
    if proof == str(BUSYBOX):
        return BUSYBOX.is_file() and is_static(BUSYBOX)
    return shutil.which(proof) is not None


def is_static(program: Path) -> bool:
    """Whether a program names no dynamic loader, so that it runs in an empty image."""
    with program.open("rb") as file:
        return b"/ld-linux" not in file.read(4096)
