"""Follows the logs of pods with `kubectl logs`, for the last progress line and the last lines."""

import subprocess
import threading
from collections import deque
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from .table import progress_of

LINES_KEPT = 6
END_SECONDS = 5.0


class Follower:
    """Reads one pod's log until the pod ends."""

    def __init__(self, command: Sequence[str]) -> None:
        self.progress: tuple[int, str] | None = None
        self.last_lines: deque[str] = deque(maxlen=LINES_KEPT)
        self._process = subprocess.Popen(  # noqa: S603
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            errors="replace",
        )
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    @property
    def ended(self) -> bool:
        """Whether there is nothing more to come."""
        return not self._thread.is_alive()

    def stop(self) -> None:
        """Wait a moment for the rest of the log, then end the process."""
        self._thread.join(END_SECONDS)
        self._process.kill()
        self._process.wait()
        self._thread.join()

    def _read(self) -> None:
        for line in self._process.stdout or ():
            self.last_lines.append(line.rstrip("\n"))
            self.progress = progress_of(line.rstrip("\n")) or self.progress


class Followers:
    """One follower for each pod that was named."""

    def __init__(self, kubectl: Sequence[str], namespace: str) -> None:
        self._command = [*kubectl, "--namespace", namespace, "logs", "--follow"]
        self._by_pod: dict[str, Follower] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for follower in self._by_pod.values():
            follower.stop()

    def of(self, pod: str) -> Follower:
        """Return the pod's follower; one that broke off before it read a line is started anew."""
        known = self._by_pod.get(pod)
        if known is None or (known.ended and not known.last_lines):
            self._by_pod[pod] = Follower([*self._command, pod])
        return self._by_pod[pod]

    def last_lines(self, pod: str) -> list[str]:
        """Return the end of the pod's log; call it after the pod has ended."""
        follower = self.of(pod)
        follower.stop()
        return list(follower.last_lines)
