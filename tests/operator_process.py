"""The operator as it is installed: its own process, its own credentials, ended in any case."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.cluster.controlplane import free_ports
from tests.cluster.keeper import Keeper
from tests.cluster.keeper import identity as identity_of

READY_WITHIN = 40.0
ENDS_WITHIN = 20.0
POLL = 0.05
SAMPLE = re.compile(r"^(\w+)(?:\{(.*)\})? ([0-9.e+-]+)$")


class OperatorEndedError(AssertionError):
    """The operator is not there though nobody ended it; the message has the end of its log."""


class OperatorProcess:
    """`python -m agentjobs.main operator`. It is killed with this process, whatever happens."""

    program = "operator"
    port_setting = "PORT"

    def __init__(
        self,
        name: str,
        kubeconfig: Path,
        directory: Path,
        settings: Mapping[str, str | int] | None = None,
    ) -> None:
        self.name = name
        self.log_file = directory / f"{name}.log"
        self.starts = 0
        self._kubeconfig = kubeconfig
        self._settings = {"IDENTITY": name, **(settings or {})}
        self._keeper: Keeper | None = None
        self._child: subprocess.Popen[bytes] | None = None
        self._guard: threading.Thread | None = None
        self._wanted = False
        (self.port,) = free_ports(1)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # --- life and death

    def start(self, *, wait: bool = True, identity: str | None = None) -> None:
        """Start it and wait until it is ready: it leads, or it waits for the leader to go.

        Under a new identity it is somebody else, who must wait for the old one's Lease.
        """
        assert self._child is None or self._child.poll() is not None, "it runs already"
        if identity:
            self._settings["IDENTITY"] = identity
        self._keeper = self._keeper or Keeper()
        environment = {
            **{name: value for name, value in os.environ.items() if name[:10] != "AGENTJOBS_"},
            "KUBECONFIG": str(self._kubeconfig),
            "AGENTJOBS_LISTEN": "127.0.0.1",
            f"AGENTJOBS_{self.port_setting}": str(self.port),
            "AGENTJOBS_LOG_FORMAT": "text",
            **{f"AGENTJOBS_{name}": str(value) for name, value in self._settings.items()},
        }
        with self.log_file.open("ab") as output:
            self._child = subprocess.Popen(
                [sys.executable, "-m", "agentjobs.main", self.program],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        self.starts += 1
        self._keeper.keep(self._child.pid, identity_of(self._child.pid) or "ended at once")
        if wait:
            self.wait_until_ready()

    def wait_until_ready(self) -> None:
        end = time.monotonic() + READY_WITHIN
        while not self.ready:
            if self._child is None or self._child.poll() is not None:
                raise OperatorEndedError(f"{self.name} has ended: {self.log[-1500:]}")
            assert time.monotonic() < end, f"{self.name} is not ready: {self.log[-1500:]}"
            time.sleep(POLL)

    def terminate(self) -> int:
        """SIGTERM; return the exit code."""
        return self._signal_to_end(signal.SIGTERM)

    def send(self, number: signal.Signals) -> None:
        """Send a signal and wait for nothing."""
        self._process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL."""
        self._signal_to_end(signal.SIGKILL)

    def freeze(self) -> None:
        """SIGSTOP."""
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        self._process.send_signal(signal.SIGCONT)

    def keep_running(self) -> None:
        """Start it again when it ends by itself, as a Deployment would."""
        self._wanted = True
        self._guard = threading.Thread(target=self._restart_when_it_ends, daemon=True)
        self._guard.start()

    def close(self) -> None:
        """End it, in whatever state it is."""
        self._wanted = False
        if self._guard:
            self._guard.join()
        if self._child and self._child.poll() is None:
            self._child.kill()
            self._child.wait()
        if self._keeper:
            self._keeper.close()
            self._keeper = None

    def exit_code(self, within: float = ENDS_WITHIN) -> int:
        """Wait until it has ended by itself."""
        return self._process.wait(within)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._child is not None and self._child.poll() is None

    # --- what it says

    @property
    def log(self) -> str:
        return self.log_file.read_text(encoding="utf-8", errors="replace")

    @property
    def ready(self) -> bool:
        return self._get("/readyz") is not None

    @property
    def leads(self) -> bool:
        text = self._get("/metrics")
        return text is not None and sum_of(text, "agentjobs_leader") == 1

    def metric(self, name: str, **labels: str) -> float:
        """The sum of all samples of that name with these labels; 0 where there is none."""
        text = self._get("/metrics")
        if text is None:
            raise OperatorEndedError(f"{self.name} serves no metrics: {self.log[-1500:]}")
        return sum_of(text, name, **labels)

    @property
    def _process(self) -> subprocess.Popen[bytes]:
        assert self._child is not None, "it was never started"
        return self._child

    def _signal_to_end(self, number: signal.Signals) -> int:
        self._process.send_signal(number)
        return self._process.wait(ENDS_WITHIN)

    def _restart_when_it_ends(self) -> None:
        while self._wanted:
            if self._child and self._child.poll() is not None:
                self.start(wait=False)
            time.sleep(POLL)

    def _get(self, path: str) -> str | None:
        try:
            url = f"http://127.0.0.1:{self.port}{path}"
            with urllib.request.urlopen(url, timeout=2) as answer:
                return str(answer.read().decode())
        except (urllib.error.URLError, OSError):
            return None


def sum_of(text: str, name: str, **labels: str) -> float:
    """Add up samples of the Prometheus text format."""
    wanted = {f'{key}="{value}"' for key, value in labels.items()}
    return sum(
        float(found[3])
        for line in text.splitlines()
        if (found := SAMPLE.match(line))
        and found[1] == name
        and wanted <= set((found[2] or "").split(","))
    )
