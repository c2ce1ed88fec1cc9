"""Clusters that last as long as the Python process that uses them, however that ends.

Each is called after its process, so that two runs on one machine never share one. A small process
of its own takes the cluster away when the other one is gone; should it be killed too, the next run
removes what is left.
"""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from . import remains
from .cluster import Cluster
from .console import say
from .errors import ClusterError
from .imagebuild import REPOSITORY
from .keeper import identity
from .paths import clusters_directory, lock

PREFIX = "agentjobs-test"
DIGITS = 7
"""Of a process id on Linux at most: with leading zeros no name is part of another one."""
_OWN = re.compile(rf"{PREFIX}(?:-[a-z]+)?-(\d{{{DIGITS}}})")


@contextmanager
def temporary(purpose: str = "") -> Iterator[str]:
    """Name a cluster for the block; what is there under that name at its end is taken away."""
    name = name_for(os.getpid(), purpose)
    # One that had our process id before us may have left the same name.
    for left in [*orphans(), name]:
        with lock(f"cluster-{left}"):
            if remains.there(left):
                remains.remove(left)
    with subprocess.Popen(
        [sys.executable, "-m", __name__, name],
        cwd=REPOSITORY,
        stdin=subprocess.PIPE,
        start_new_session=True,
    ) as keeper:
        try:
            yield name
        finally:
            keeper.communicate()
    if keeper.returncode:
        raise ClusterError(f"the cluster {name} could not be taken away; the reason is above")


def name_for(process: int, purpose: str = "") -> str:
    """Return the name of the cluster that a process may have for a purpose."""
    return "-".join(part for part in (PREFIX, purpose, f"{process:0{DIGITS}d}") if part)


def orphans() -> list[str]:
    """Return the clusters in this cache whose processes are gone."""
    directory = clusters_directory()
    names = sorted(file.name for file in directory.iterdir()) if directory.is_dir() else []
    own = [found for name in names if (found := _OWN.fullmatch(name))]
    return [found[0] for found in own if identity(int(found[1])) is None]


def _main() -> int:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    (name,) = sys.argv[1:]
    sys.stdin.read()
    try:
        Cluster.find(name).down()
    except ClusterError as error:
        say(f"error: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(_main())
