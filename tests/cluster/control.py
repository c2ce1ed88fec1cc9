"""Starts and stops the components of a control plane, and talks to its API server."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from . import components, programs
from .api import Api
from .binaries import directory_of
from .components import Site
from .errors import ClusterError
from .pki import ADMIN
from .processes import Processes, run

READY_TIMEOUT = 120.0
STOP_GRACE = 2.0


@dataclass(frozen=True)
class Arguments:
    """More arguments for the components, after their own: the last one of a name counts."""

    apiserver: tuple[str, ...] = ()
    controller_manager: tuple[str, ...] = ()
    scheduler: tuple[str, ...] = ()


class Control:
    """The components at `site`, each of which can be ended and started by itself.

    `prefix` is put before every command, for a control plane in a network namespace.
    """

    def __init__(
        self,
        site: Site,
        processes: Processes,
        arguments: Arguments,
        prefix: tuple[str, ...] = (),
    ) -> None:
        self._site = site
        self._processes = processes
        self._arguments = arguments
        self._prefix = prefix
        self.kubeconfig = site.directory / "kubeconfig"

    @property
    def url(self) -> str:
        """Where the API server listens."""
        return self._site.url

    @property
    def ca_file(self) -> Path:
        """What the API server's certificate is verified with."""
        return self._site.pki.ca_file

    @property
    def audit_log(self) -> Path:
        """The API server's audit events, one JSON object on each line."""
        return self._site.audit_log

    @property
    def pids(self) -> dict[str, int]:
        """Component to process id, of what runs now."""
        return {process.name: process.pid for process in self._processes.all() if process.alive}

    @property
    def api(self) -> Api:
        """Quick reads as cluster administrator."""
        certificate, key = (self._site.pki.directory / f"admin.{end}" for end in ("crt", "key"))
        return Api(self.url, self.ca_file, certificate, key)

    def kubectl(self, *arguments: str | Path, input_text: str | None = None) -> str:
        """Run kubectl as cluster administrator and return what it writes.

        Raises ClusterError with kubectl's own words when it fails.
        """
        return kubectl(self.kubeconfig, *arguments, input_text=input_text)

    def kubeconfig_for(self, user: str, groups: Iterable[str] = ()) -> Path:
        """Return a kubeconfig of any user; what that user may do is up to RBAC."""
        groups = tuple(groups)
        certificate, _ = self._site.pki.client(user, groups)
        file = self._site.directory / f"{certificate.stem}.kubeconfig"
        return self._site.pki.kubeconfig(file, self.url, user, groups)

    def start_etcd(self) -> None:
        """Start etcd with the data that it had."""
        self._start("etcd", components.etcd(self._site))

    def stop_etcd(self) -> None:
        """Kill etcd; the API server answers errors until it is started again."""
        self._processes.stop("etcd")

    def start_apiserver(self) -> None:
        """Start the API server and return when it is ready."""
        command = [*components.apiserver(self._site), *self._arguments.apiserver]
        self._start("kube-apiserver", command)
        self._processes.wait_until("the API server is not ready", self.api.ready, READY_TIMEOUT)

    def kill_apiserver(self) -> None:
        """Kill the API server, with no chance to end what it is doing."""
        self._processes.stop("kube-apiserver")

    def restart_apiserver(self) -> None:
        """End the API server (politely, for a few seconds), start it, wait until ready."""
        self._processes.stop("kube-apiserver", grace=STOP_GRACE)
        self.start_apiserver()

    def start_controller_manager(self) -> None:
        """Start kube-controller-manager."""
        own = components.controller_manager(self._site)
        self._start("kube-controller-manager", [*own, *self._arguments.controller_manager])

    def stop_controller_manager(self) -> None:
        """Kill kube-controller-manager: Jobs stand still."""
        self._processes.stop("kube-controller-manager")

    def start_scheduler(self) -> None:
        """Start kube-scheduler."""
        own = components.scheduler(self._site)
        self._start("kube-scheduler", [*own, *self._arguments.scheduler])

    def stop_scheduler(self) -> None:
        """Kill kube-scheduler: new pods stay Pending."""
        self._processes.stop("kube-scheduler")

    def _create_credentials(self) -> None:
        """Make new keys, and the files that the components authenticate with."""
        site = self._site
        site.directory.mkdir(parents=True, exist_ok=True)
        policy = json.dumps(components.AUDIT_POLICY, indent=2)
        (site.directory / "audit-policy.yaml").write_text(policy, encoding="utf-8")
        site.pki.create()
        for component, (user, groups) in components.USERS.items():
            site.pki.kubeconfig(site.kubeconfig(component), site.url, user, groups)
        for made, kept in zip(site.pki.client(*ADMIN), ("admin.crt", "admin.key"), strict=True):
            made.replace(site.pki.directory / kept)
        site.pki.kubeconfig(self.kubeconfig, site.url, *ADMIN)

    def _wait_for_service_accounts(self) -> None:
        """Wait until pods can be created: without the default service account they cannot."""
        self._processes.wait_until(
            "there is no default service account",
            lambda: bool(self.api.text("/api/v1/namespaces/default/serviceaccounts/default")),
            READY_TIMEOUT,
        )

    def _start(self, name: str, command: list[str | Path]) -> None:
        self._processes.start(name, [*self._prefix, *command])


def kubectl(kubeconfig: Path, *arguments: str | Path, input_text: str | None = None) -> str:
    """Run kubectl and return what it writes."""
    program = directory_of(programs.KUBERNETES) / "kubectl"
    if not kubeconfig.is_file():
        raise ClusterError(f"there is no {kubeconfig}: start the control plane first")
    return run([program, "--kubeconfig", kubeconfig, *arguments], input_text=input_text)
