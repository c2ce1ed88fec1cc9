"""Finds and removes what is left of a cluster, with or without its records."""

import os
import shutil
import signal
import time
from pathlib import Path

from . import cgroups, network
from .errors import ClusterError
from .paths import clusters_directory
from .processes import Processes

END_TIMEOUT = 30.0
POLL_SECONDS = 0.05


def remove(cluster: str) -> None:
    """Remove every process, control group, namespace, interface and file of `cluster`.

    What the cluster has started is on record, or in a control group or a network namespace
    that bears its name; nothing else is touched. What is gone already is no error.
    """
    directory = clusters_directory() / cluster
    # First what would start things again, then the containers, then whatever is left over.
    Processes(directory).stop_all()
    cgroups.remove(cluster)
    _end_processes_in_namespaces(cluster)
    network.remove(cluster)
    if directory.exists():
        shutil.rmtree(directory)


def there(cluster: str) -> bool:
    """Whether anything of `cluster` can be seen: its directory or one of its namespaces."""
    return (clusters_directory() / cluster).exists() or bool(network.namespaces(cluster))


def _end_processes_in_namespaces(cluster: str) -> None:
    inodes = {file.stat().st_ino for file in network.namespaces(cluster)}
    # A namespace file that lost its mount is an empty file of another file system, whose
    # number could be anything: a process of the host is never meant.
    inodes.discard(Path("/proc/self/ns/net").stat().st_ino)
    deadline = time.monotonic() + END_TIMEOUT
    while pids := _processes_in(inodes):
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        if time.monotonic() > deadline:
            raise ClusterError(f"processes of the cluster {cluster} do not end: {pids}")
        time.sleep(POLL_SECONDS)


def _processes_in(inodes: set[int]) -> list[int]:
    if not inodes:
        return []
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                # A zombie has no namespaces any more, so one does not count.
                inode = (entry / "ns" / "net").stat().st_ino
            except OSError:
                continue
            if inode in inodes:
                found.append(int(entry.name))
    return found
