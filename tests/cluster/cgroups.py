"""The control groups of nodes: made before a kubelet starts, emptied and removed after it."""

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from .errors import ClusterError

EMPTY_TIMEOUT = 30.0
POLL_SECONDS = 0.05


def create(name: str) -> None:
    """Make the group `name` in every hierarchy, ready for processes."""
    for kind, root in hierarchies():
        group = root / name
        group.mkdir(exist_ok=True)
        if kind == "cgroup2":
            _delegate(root)
            _delegate(group)
        for file in ("cpuset.cpus", "cpuset.mems"):
            # In version 1 a group without these takes no process.
            if kind == "cgroup" and (group / file).exists():
                (group / file).write_text((root / file).read_text())


def remove(cluster: str) -> None:
    """Kill whatever is in the groups of the nodes of `cluster`, and remove them.

    Nobody but a node's kubelet and its containers puts a process there.
    """
    own = re.compile(rf"agentjobs-{re.escape(cluster)}-node\d+")
    groups = [
        entry
        for _, root in hierarchies()
        for entry in root.iterdir()
        if entry.is_dir() and own.fullmatch(entry.name)
    ]
    deadline = time.monotonic() + EMPTY_TIMEOUT
    while pids := {pid for group in groups for pid in _processes(group)}:
        for pid in pids:
            _kill(pid)
        if time.monotonic() > deadline:
            raise ClusterError(f"processes in control groups of {cluster} do not end: {pids}")
        time.sleep(POLL_SECONDS)
    for group in groups:
        _remove_tree(group, deadline)


def hierarchies() -> list[tuple[str, Path]]:
    """Version 1 has one for each controller, version 2 has one; some systems have both."""
    mounts = [
        line.split() for line in Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines()
    ]
    return [(kind, Path(where)) for _, where, kind, *_ in mounts if kind in ("cgroup", "cgroup2")]


def _delegate(group: Path) -> None:
    """Hand every controller of a version 2 group down to its children."""
    controllers = (group / "cgroup.controllers").read_text().split()
    if controllers:
        text = " ".join(f"+{controller}" for controller in controllers)
        (group / "cgroup.subtree_control").write_text(text)


def _processes(group: Path) -> Iterator[int]:
    for directory, _, files in os.walk(group):
        if "cgroup.procs" in files:
            try:
                text = (Path(directory) / "cgroup.procs").read_text()
            except OSError:
                continue
            # A process of another pid namespace shows as 0, which would signal ourselves.
            yield from (int(pid) for pid in text.split() if pid != "0")


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _remove_tree(group: Path, deadline: float) -> None:
    """Remove a group from the inside out; one that was just emptied can be busy for a moment."""
    for directory, _, _ in os.walk(group, topdown=False):
        while True:
            try:
                Path(directory).rmdir()
            except FileNotFoundError:
                break
            except OSError as error:
                if time.monotonic() > deadline:
                    raise ClusterError(f"cannot remove {directory}: {error}") from error
                time.sleep(POLL_SECONDS)
            else:
                break
