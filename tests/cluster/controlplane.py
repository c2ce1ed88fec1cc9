"""A control plane without nodes: etcd, kube-apiserver, kube-controller-manager.

It needs no root, listens on 127.0.0.1 and is ready in a few seconds. With KWOK it gets
nodes that only pretend, on which the pods of Jobs run to completion by themselves.
"""

import ipaddress
import json
import random
import shutil
import socket
import time
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Self

from . import kwok as fake
from . import programs
from .binaries import ensure
from .components import Ports, Site
from .control import READY_TIMEOUT, Arguments, Control
from .errors import ClusterError
from .keeper import Keeper
from .pki import Pki
from .processes import Processes

SERVICES = ipaddress.IPv4Network("10.96.0.0/16")


class ControlPlane(Control):
    """A control plane that lives in `directory` and ends, at the latest, with this process.

    `kwok` adds the runtime of fake nodes and, unless told otherwise, the scheduler. More
    arguments go to the components as they are; those of `FAST_LIMITS` lift their client-side
    limits. `pod_seconds` is how long a Job's pod runs on a fake node; a pod's annotations
    `tests.agentjobs.dev/runs-for` ("1.5s") and `tests.agentjobs.dev/exit-code` ("3") say
    otherwise for that pod.
    """

    def __init__(
        self,
        directory: Path,
        *,
        kwok: bool = False,
        scheduler: bool | None = None,
        apiserver_args: Iterable[str] = (),
        controller_manager_args: Iterable[str] = (),
        scheduler_args: Iterable[str] = (),
        pod_seconds: float = 0.0,
    ) -> None:
        self.directory = directory.resolve()
        super().__init__(
            self._new_site(),
            Processes(self.directory),
            Arguments(tuple(apiserver_args), tuple(controller_manager_args), tuple(scheduler_args)),
        )
        self._kwok = kwok
        self._scheduler = kwok if scheduler is None else scheduler
        self._pod_seconds = pod_seconds
        self._keeper: Keeper | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start everything anew and return when it is ready. Earlier data is discarded."""
        ensure([*programs.CONTROL_PLANE, *([programs.KWOK] if self._kwok else [])])
        self._clear()
        self._keeper = Keeper()
        self._processes = Processes(self.directory, self._keeper)
        self._site = self._new_site()
        self._create_credentials()
        try:
            self.start_etcd()
            self.start_apiserver()
            self.start_controller_manager()
            if self._scheduler:
                self.start_scheduler()
            if self._kwok:
                self.start_kwok()
            self._wait_for_service_accounts()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Kill everything. What was written (logs, the audit log) stays in the directory."""
        self._processes.stop_all()
        if self._keeper:
            self._keeper.close()
            self._keeper = None

    def start_kwok(self) -> None:
        """Start KWOK."""
        configuration = self.directory / "kwok.yaml"
        configuration.write_text(fake.configuration(self._pod_seconds), encoding="utf-8")
        self._start("kwok", fake.command(configuration, self._site.kubeconfig("kwok")))

    def stop_kwok(self) -> None:
        """Kill KWOK: pods stay as they are."""
        self._processes.stop("kwok")

    def add_fake_nodes(self, count: int) -> None:
        """Make that many more nodes for KWOK to run pods on, and wait until they are Ready."""
        if not self._kwok:
            raise ClusterError("fake nodes need KWOK: make the control plane with kwok=True")
        there = len(self.api.json("/api/v1/nodes")["items"])
        names = [f"fake-{number}" for number in range(there, there + count)]
        self.kubectl("create", "-f", "-", input_text=json.dumps(fake.node_list(names)))
        self._processes.wait_until(
            "the fake nodes are not Ready",
            lambda: set(names) <= self.api.ready_nodes(),
            READY_TIMEOUT,
        )

    def _clear(self) -> None:
        """End what an earlier run left here, and remove its data but not its logs."""
        self._processes.stop_all()
        for old in ("etcd", "pki"):
            shutil.rmtree(self.directory / old, ignore_errors=True)
        self.audit_log.unlink(missing_ok=True)

    def _new_site(self) -> Site:
        pki = Pki(self.directory / "pki")
        return Site(self.directory, pki, "127.0.0.1", Ports(*free_ports(5)), SERVICES)


def free_ports(count: int) -> list[int]:
    """Return ports that are free on 127.0.0.1.

    They lie below the range from which the kernel takes ports for outgoing connections, and
    are picked at random, so that two control planes starting at once do not meet.
    """
    pick = random.Random(time.time_ns())  # noqa: S311 - no secret
    ports: list[int] = []
    while len(ports) < count:
        port = pick.randrange(20000, 32000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        if port not in ports:
            ports.append(port)
    return ports
