"""Starts, finds again and stops the processes of one directory, and never anybody else's.

A process is recorded as pid and identity in `run/<name>.json`. Pids are reused: before
anything is signalled, the identity must still be that of the process we had started.
"""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from .errors import ClusterError
from .keeper import Keeper, identity

POLL_SECONDS = 0.02
KILL_TIMEOUT = 20.0


@dataclass(frozen=True)
class Process:
    """A process that was started at some time, and may have ended since."""

    name: str
    pid: int
    identity: str

    @property
    def alive(self) -> bool:
        """Whether it is still there, and still the one we had started."""
        return identity(self.pid) == self.identity

    def send(self, number: signal.Signals) -> None:
        """Signal the process, if it is still ours."""
        if self.alive:
            try:
                os.kill(self.pid, number)
            except ProcessLookupError:
                return


class Processes:
    """The processes of one directory: records in `run/`, logs in `logs/`.

    With a keeper they end with the Python process that started them, however it ends;
    without one they go on, and another Python process may take them over.
    """

    def __init__(self, directory: Path, keeper: Keeper | None = None) -> None:
        self.directory = directory
        self._keeper = keeper
        self._children: set[int] = set()

    def start(
        self, name: str, command: Sequence[str | Path], environment: Mapping[str, str] | None = None
    ) -> Process:
        """Start `command` under `name`; what it writes goes to the end of its log."""
        if (running := self.get(name)) and running.alive:
            raise ClusterError(f"{name} runs already, with pid {running.pid}: stop it first")
        log = self.log(name)
        log.parent.mkdir(parents=True, exist_ok=True)
        pid = _spawn([str(part) for part in command], log, {**os.environ, **(environment or {})})
        self._children.add(pid)
        process = Process(name, pid, identity(pid) or "ended at once")
        if self._keeper:
            self._keeper.keep(process.pid, process.identity)
        self._record(process)
        return process

    def get(self, name: str) -> Process | None:
        """Return the process last started under `name`, unless it was stopped by `stop`."""
        try:
            return Process(**json.loads(self._file(name).read_text(encoding="utf-8")))
        except (FileNotFoundError, ValueError, TypeError):
            return None

    def all(self) -> list[Process]:
        """Return every process on record, in the order in which they were started."""
        files = sorted(self._file("x").parent.glob("*.json"), key=lambda file: file.stat().st_mtime)
        return [process for file in files if (process := self.get(file.stem))]

    def log(self, name: str) -> Path:
        """Return the file that holds what `name` has written."""
        return self.directory / "logs" / f"{name}.log"

    def stop(self, name: str, grace: float = 0.0) -> None:
        """End `name` and wait until it is gone: SIGTERM, and SIGKILL after `grace` seconds.

        Without a grace period it is killed at once. One that does not run is no error.
        """
        if process := self.get(name):
            self._end([process], grace)

    def stop_all(self) -> None:
        """Kill everything on record and wait until all of it is gone."""
        self._end(self.all(), grace=0.0)

    def wait_until(self, what: str, condition: Callable[[], bool], timeout: float) -> None:
        """Wait until `condition` holds; fail early when a recorded process has ended.

        `what` completes the sentence "... after 60 s".
        """
        deadline = time.monotonic() + timeout
        while not condition():
            for process in self.all():
                if not self._alive(process):
                    raise ClusterError(f"{process.name} has ended: {self._end_of_log(process)}")
            if time.monotonic() > deadline:
                raise ClusterError(f"{what} after {timeout:.0f} s; logs are in {self._logs}")
            time.sleep(POLL_SECONDS)

    @property
    def _logs(self) -> Path:
        return self.directory / "logs"

    def _end_of_log(self, process: Process) -> str:
        lines = self.log(process.name).read_text(encoding="utf-8", errors="replace").splitlines()
        end = "\n".join(f"  {line[:300]}" for line in lines[-4:])
        return f"the log is {self.log(process.name)}, its end:\n{end}"

    def _end(self, processes: Iterable[Process], grace: float) -> None:
        processes = list(processes)
        if grace:
            for process in processes:
                process.send(signal.SIGTERM)
            self._await_end(processes, grace)
        for process in processes:
            process.send(signal.SIGKILL)
        if left := self._await_end(processes, KILL_TIMEOUT):
            names = ", ".join(f"{process.name} (pid {process.pid})" for process in left)
            raise ClusterError(f"still there {KILL_TIMEOUT:.0f} s after SIGKILL: {names}")
        for process in processes:
            self._file(process.name).unlink(missing_ok=True)

    def _await_end(self, processes: Iterable[Process], timeout: float) -> list[Process]:
        deadline = time.monotonic() + timeout
        while left := [process for process in processes if self._alive(process)]:
            if time.monotonic() > deadline:
                break
            time.sleep(POLL_SECONDS)
        return left

    def _alive(self, process: Process) -> bool:
        if process.pid in self._children:
            # Collects a child that has ended, which would stay a zombie.
            try:
                ended, _ = os.waitpid(process.pid, os.WNOHANG)
            except ChildProcessError:
                ended = process.pid
            if ended:
                self._children.discard(process.pid)
        return process.alive

    def _file(self, name: str) -> Path:
        return self.directory / "run" / f"{name}.json"

    def _record(self, process: Process) -> None:
        file = self._file(process.name)
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(".partial")
        partial.write_text(json.dumps(asdict(process)), encoding="utf-8")
        partial.replace(file)


def _spawn(command: list[str], log: Path, environment: Mapping[str, str]) -> int:
    """Start a command in a session of its own and return its pid.

    Not a Popen object: that warns when it goes while its process does not, which is the point.
    """
    append = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    try:
        return os.posix_spawnp(
            command[0],
            command,
            environment,
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_OPEN, 1, str(log), append, 0o644),
                (os.POSIX_SPAWN_DUP2, 1, 2),
            ],
            setsid=True,
            # Python ignores these, and a started program would go on ignoring them.
            setsigdef=[signal.SIGPIPE, signal.SIGXFSZ],
        )
    except FileNotFoundError as error:
        raise ClusterError(f"there is no {command[0]} to start: install it") from error


def run(
    command: Sequence[str | Path], *, input_text: str | None = None, timeout: float = 120.0
) -> str:
    """Run a command to its end and return what it wrote; its errors become ours."""
    words = [str(part) for part in command]
    try:
        done = subprocess.run(
            words, input=input_text, capture_output=True, text=True, timeout=timeout, check=False
        )
    except FileNotFoundError as error:
        raise ClusterError(f"there is no {words[0]} on the PATH: install it") from error
    except subprocess.TimeoutExpired as error:
        raise ClusterError(f"`{' '.join(words)}` took longer than {timeout:.0f} s") from error
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip()
        raise ClusterError(f"`{' '.join(words)}` failed: {said}")
    return done.stdout
