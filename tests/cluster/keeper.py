"""Ends processes when the Python process that started them ends, even by SIGKILL.

A small process reads `pid identity` lines from a pipe. When the writer is gone, for
whatever reason, it kills those of them that are still the same processes. (The kernel's
own parent-death signal is bound to a thread, and tests start things from short ones.)
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

_ENDED = ("Z", "X")


def identity(pid: int) -> str | None:
    """Tell a process apart from a later one with the same pid; None when there is none.

    It is the boot and the clock tick at which the process began.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The second field is the command in brackets and may hold anything, also brackets.
    fields = stat.rpartition(")")[2].split()
    state, started = fields[0], fields[19]
    return None if state in _ENDED else f"{boot}/{started}"


class Keeper:
    """The writing end: processes told to `keep` are killed when this process ends."""

    def __init__(self) -> None:
        self._child = subprocess.Popen(
            [sys.executable, "-S", "-E", __file__],
            stdin=subprocess.PIPE,
            start_new_session=True,
            text=True,
        )

    def keep(self, pid: int, known_as: str) -> None:
        """Kill this process, if it still has this identity, when we end."""
        if self._child.stdin:
            self._child.stdin.write(f"{pid} {known_as}\n")
            self._child.stdin.flush()

    def close(self) -> None:
        """Kill what is left of the kept processes now."""
        self._child.communicate()


def _main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    kept = [line.split() for line in sys.stdin]
    for pid, known_as in kept:
        if identity(int(pid)) == known_as:
            os.kill(int(pid), signal.SIGKILL)


if __name__ == "__main__":
    _main()
