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

from . import components, kwok, programs
from .api import Api
from .binaries import directory_of, ensure
from .components import Ports, Site
from .errors import ClusterError
from .keeper import Keeper
from .pki import ADMIN, Pki
from .processes import Processes, run

READY_TIMEOUT = 60.0
STOP_GRACE = 3.0
LOOPBACK_SERVICES = ipaddress.IPv4Network("10.96.0.0/16")


class ControlPlane:
    """A control plane that lives in `directory` and ends, at the latest, with this process.

    `kwok` adds fake nodes' runtime and, unless told otherwise, the scheduler. More arguments
    go to the components as they are; those of `FAST_LIMITS` lift their client-side limits.
    `pod_seconds` is how long a Job's pod runs on a fake node; its annotation
    `kwok.POD_SECONDS` ("1.5s") says otherwise for one pod.
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
        self.kubeconfig = self.directory / "kubeconfig"
        self._kwok = kwok
        self._scheduler = kwok if scheduler is None else scheduler
        self._apiserver_args = tuple(apiserver_args)
        self._controller_manager_args = tuple(controller_manager_args)
        self._scheduler_args = tuple(scheduler_args)
        self._pod_seconds = pod_seconds
        self._pki = Pki(self.directory / "pki")
        self._processes = Processes(self.directory)
        self._site = self._new_site()
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

    @property
    def url(self) -> str:
        """Where the API server listens."""
        return self._site.url

    @property
    def ca_file(self) -> Path:
        """What the API server's certificate is verified with."""
        return self._pki.ca_file

    @property
    def audit_log(self) -> Path:
        """The API server's audit events, one JSON object on each line."""
        return self._site.audit_log

    @property
    def pids(self) -> dict[str, int]:
        """Component to process id, of what runs now."""
        return {process.name: process.pid for process in self._processes.all() if process.alive}

    def start(self) -> None:
        """Start everything anew and return when it is ready. Earlier data is discarded."""
        ensure([*programs.CONTROL_PLANE, *([programs.KWOK] if self._kwok else [])])
        self._clear()
        self._keeper = Keeper()
        self._processes = Processes(self.directory, self._keeper)
        self._site = self._new_site()
        self._pki.create()
        write_credentials(self._site)
        self._pki.kubeconfig(self.kubeconfig, self.url, *ADMIN)
        try:
            self.start_etcd()
            self.start_apiserver()
            self.start_controller_manager()
            if self._scheduler:
                self.start_scheduler()
            if self._kwok:
                self.start_kwok()
            wait_for_service_accounts(self._processes, self.api)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Kill everything. What was written (logs, the audit log) stays in the directory."""
        self._processes.stop_all()
        if self._keeper:
            self._keeper.close()
            self._keeper = None

    @property
    def api(self) -> Api:
        """Quick reads as cluster administrator."""
        certificate, key = (self._pki.directory / f"admin.{end}" for end in ("crt", "key"))
        return Api(self.url, self.ca_file, certificate, key)

    def kubectl(self, *arguments: str | Path, input_text: str | None = None) -> str:
        """Run kubectl as cluster administrator and return what it writes.

        Raises ClusterError with kubectl's own words when it fails.
        """
        return kubectl(self.kubeconfig, *arguments, input_text=input_text)

    def kubeconfig_for(self, user: str, groups: Iterable[str] = ()) -> Path:
        """Return a kubeconfig of any user; what that user may do is up to RBAC."""
        groups = tuple(groups)
        certificate, _ = self._pki.client(user, groups)
        file = self.directory / f"{certificate.stem}.kubeconfig"
        return self._pki.kubeconfig(file, self.url, user, groups)

    def add_fake_nodes(self, count: int) -> None:
        """Make that many more nodes for KWOK to run pods on, and wait until they are Ready."""
        if not self._kwok:
            raise ClusterError("fake nodes need KWOK: make the control plane with kwok=True")
        there = len(self.api.json("/api/v1/nodes")["items"])
        names = [f"fake-{number}" for number in range(there, there + count)]
        self.kubectl("create", "-f", "-", input_text=json.dumps(kwok.node_list(names)))
        self._processes.wait_until(
            "the fake nodes are not Ready",
            lambda: set(names) <= self.api.ready_nodes(),
            READY_TIMEOUT,
        )

    def start_etcd(self) -> None:
        """Start etcd with the data that it had."""
        self._processes.start("etcd", components.etcd(self._site))

    def stop_etcd(self) -> None:
        """Kill etcd; the API server answers errors until it is started again."""
        self._processes.stop("etcd")

    def start_apiserver(self) -> None:
        """Start the API server and return when it is ready."""
        self._processes.start(
            "kube-apiserver", [*components.apiserver(self._site), *self._apiserver_args]
        )
        self._processes.wait_until(
            "the API server is not ready", self.api.ready, READY_TIMEOUT
        )

    def kill_apiserver(self) -> None:
        """Kill the API server, with no chance to end what it is doing."""
        self._processes.stop("kube-apiserver")

    def restart_apiserver(self) -> None:
        """End the API server (politely, for a few seconds), start it, wait until ready."""
        self._processes.stop("kube-apiserver", grace=STOP_GRACE)
        self.start_apiserver()

    def start_controller_manager(self) -> None:
        """Start kube-controller-manager."""
        self._processes.start(
            "kube-controller-manager",
            [*components.controller_manager(self._site), *self._controller_manager_args],
        )

    def stop_controller_manager(self) -> None:
        """Kill kube-controller-manager: Jobs stand still."""
        self._processes.stop("kube-controller-manager")

    def start_scheduler(self) -> None:
        """Start kube-scheduler."""
        self._processes.start(
            "kube-scheduler", [*components.scheduler(self._site), *self._scheduler_args]
        )

    def stop_scheduler(self) -> None:
        """Kill kube-scheduler: new pods stay Pending."""
        self._processes.stop("kube-scheduler")

    def start_kwok(self) -> None:
        """Start KWOK."""
        configuration = self.directory / "kwok.yaml"
        configuration.write_text(kwok.configuration(self._pod_seconds), encoding="utf-8")
        command = kwok.command(configuration, self.kubeconfig)
        self._processes.start("kwok", command)

    def stop_kwok(self) -> None:
        """Kill KWOK: pods stay as they are."""
        self._processes.stop("kwok")

    def _clear(self) -> None:
        """End what an earlier run left here, and remove its data but not its logs."""
        self._processes.stop_all()
        for old in ("etcd", "pki"):
            shutil.rmtree(self.directory / old, ignore_errors=True)
        self.audit_log.unlink(missing_ok=True)

    def _new_site(self) -> Site:
        ports = Ports(*free_ports(5))
        return Site(self.directory, self._pki, "127.0.0.1", ports, LOOPBACK_SERVICES)


def kubectl(kubeconfig: Path, *arguments: str | Path, input_text: str | None = None) -> str:
    """Run kubectl and return what it writes."""
    program = directory_of(programs.KUBERNETES) / "kubectl"
    return run([program, "--kubeconfig", kubeconfig, *arguments], input_text=input_text)


def write_credentials(site: Site) -> None:
    """Write the audit policy and what the components authenticate with."""
    site.directory.mkdir(parents=True, exist_ok=True)
    policy = json.dumps(components.AUDIT_POLICY, indent=2)
    (site.directory / "audit-policy.yaml").write_text(policy, encoding="utf-8")
    for component, (user, groups) in components.USERS.items():
        site.pki.kubeconfig(site.kubeconfig(component), site.url, user, groups)
    site.pki.client(*ADMIN)
    for end in ("crt", "key"):
        (site.pki.directory / f"user-admin+system-masters.{end}").replace(
            site.pki.directory / f"admin.{end}"
        )


def wait_for_service_accounts(processes: Processes, api: Api) -> None:
    """Wait until pods can be created: without the default service account they cannot."""
    processes.wait_until(
        "there is no default service account",
        lambda: api.text("/api/v1/namespaces/default/serviceaccounts/default") is not None,
        READY_TIMEOUT,
    )


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
