"""Where scenarios are played: namespaces, the operator that serves them, and a kubelet.

All scenarios that were chosen begin at once, so that a run takes as long as the longest of them.
"""

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from typing_extensions import override

from tests.apiclient import Answer, ApiClient, Document, Record
from tests.chart import only
from tests.cluster import ControlPlane
from tests.cluster.controlplane import free_ports
from tests.cluster.pki import Pki
from tests.controlplane.callers import Server
from tests.controlplane.installed import GATEWAY, OPERATOR
from tests.faulty_proxy import FaultyProxy
from tests.gateway_process import GatewayProcess
from tests.kubelet import Kubelet
from tests.operator_process import OperatorProcess

SHARED = "shared"
SIDE_BY_SIDE = 4
"""Scenarios with operators of their own that are played at the same time."""
ENDS = ("done", "failed", "cancelled", "timed_out")
LOG_SHOWN = 4000
WATCH_DELAY = 0.02
CALLBACKS = json.dumps([{"hosts": ["receiver.example.com", "localhost", "*[0-9:]"]}])
"""Where gateways let events go; operators are told by each scenario."""

TELLS_US: dict[str, str | int] = {
    "CALLBACKS_ALLOW": json.dumps([{"cidrs": ["127.0.0.1/32"]}]),
    "CALLBACKS_INSECURE_LOOPBACK": "true",
}
"""Settings of an operator that may call a receiver on this machine; the shared one has them."""


def template(**pod: Any) -> Document:
    container = {"name": "tool", "image": "registry.invalid/tool:1", "command": ["true"]}
    spec = {"terminationGracePeriodSeconds": 5, "containers": [container], **pod}
    return {"spec": {"template": {"spec": spec}}}


class Place:
    """A namespace whose AgentJobs an operator serves."""

    def __init__(self, stage: "Stage", namespace: str) -> None:
        self.stage = stage
        self.namespace = namespace
        self.api = stage.api
        self.record = stage.record
        self.kubelet = stage.kubelet
        self.operators: list[OperatorProcess] = []
        self.proxy: FaultyProxy | None = None

    @property
    def operator(self) -> OperatorProcess:
        return self.operators[0]

    # --- AgentJobs

    def create(self, name: str, **spec: Any) -> Document:
        """Create an AgentJob: of a tool, or of the usual template."""
        return self.try_create(name, **spec).object()

    def try_create(self, name: str, **spec: Any) -> Answer:
        if "toolRef" not in spec:
            spec.setdefault("template", template())
        return self.api.try_create(
            {
                "apiVersion": "agentjobs.dev/v1alpha1",
                "kind": "AgentJob",
                "metadata": {"name": name, "namespace": self.namespace},
                "spec": spec,
            }
        )

    def patch(self, name: str, change: Document) -> Answer:
        return self.api.patch("AgentJob", self.namespace, name, change)

    def stop(self, name: str, reason: str = "not needed any more") -> None:
        self.patch(name, {"spec": {"stop": {"reason": reason}}}).object()

    def job(self, name: str) -> Document:
        """The AgentJob; empty where there is none."""
        return self.record.latest("AgentJob", self.namespace, name) or {}

    def uid(self, name: str) -> str:
        return str(self.record.until(f"AgentJob {name}", lambda: self.job(name))["metadata"]["uid"])

    def status(self, name: str) -> Document:
        status: Document = self.job(name).get("status") or {}
        return status

    def state(self, name: str) -> str:
        return str(self.status(name).get("state", ""))

    def until_state(self, name: str, *states: str, seconds: float = 30.0) -> Document:
        """Wait for one of these states; return the status."""

        def reached() -> Document | None:
            status = self.status(name)
            return status if status.get("state") in states else None

        return self._until(name, f"{name} in {' or '.join(states)}", reached, seconds)

    def until_waiting(self, name: str, code: str, seconds: float = 30.0) -> Document:
        """Wait until it is queued for that; return `waiting`."""

        def waits() -> Document | None:
            waiting: Document = self.status(name).get("waiting") or {}
            return waiting if waiting.get("code") == code else None

        return self._until(name, f"{name} that waits for {code}", waits, seconds)

    def until_over(self, name: str, seconds: float = 30.0) -> Document:
        return self.until_state(name, *ENDS, seconds=seconds)

    def _until(
        self, name: str, what: str, find: Callable[[], Document | None], seconds: float
    ) -> Document:
        try:
            return self.record.until(what, find, seconds)
        except AssertionError as error:
            error.add_note(f"{name}: {json.dumps(self.status(name))}")
            raise

    def states(self, name: str) -> list[str]:
        """The states that it has gone through, each once for as long as it lasted."""
        seen: list[str] = []
        for version in self.record.history(self.uid(name)):
            state = (version.get("status") or {}).get("state", "")
            if state and seen[-1:] != [state]:
                seen.append(state)
        return seen

    def conditions(self, name: str) -> dict[str, str]:
        return {c["type"]: c["status"] for c in self.status(name).get("conditions", ())}

    # --- their children

    def jobs(self, name: str) -> list[Document]:
        """Jobs that were ever made for an AgentJob, as they were last seen."""
        return [c for c in self.record.children(self.uid(name)) if c["kind"] == "Job"]

    def pods(self, name: str) -> list[Document]:
        """Pods that were ever made for it."""
        return [
            pod
            for job in self.jobs(name)
            for pod in self.record.children(job["metadata"]["uid"])
            if pod["kind"] == "Pod"
        ]

    def until_job(self, name: str) -> Document:
        return self.record.until(f"Job of {name}", lambda: self.jobs(name))[0]

    def until_pod(self, name: str, seconds: float = 30.0) -> Document:
        return self.record.until(f"pod of {name}", lambda: self.pods(name), seconds)[-1]

    def until_running(self, *names: str) -> dict[str, Document]:
        """Start the pods of these jobs, and wait until their status says so."""
        pods = {name: self.until_pod(name) for name in names}
        for pod in pods.values():
            self.kubelet.start(pod)
        for name in names:
            self._until(name, f"start of {name}", partial(self._if_started, name), 30)
        return pods

    def _if_started(self, name: str) -> Document | None:
        status = self.status(name)
        return status if "startedAt" in status else None

    def until_gone(self, kind: str, name: str) -> None:
        self.record.until(
            f"end of {kind} {name}", lambda: not self.record.latest(kind, self.namespace, name)
        )

    def live_job(self, job_name: str) -> Document | None:
        return self.record.latest("Job", self.namespace, job_name)

    def events(self, name: str) -> list[Document]:
        found = self.api.items(
            "Event", self.namespace, fieldSelector=f"involvedObject.uid={self.uid(name)}"
        )
        return list(found)

    # --- tools

    def tool(self, name: str, **spec: Any) -> Document:
        body = {
            "apiVersion": "agentjobs.dev/v1alpha1",
            "kind": "AgentTool",
            "metadata": {"name": name, "namespace": self.namespace},
            "spec": {"description": f"the tool {name}", "template": template(), **spec},
        }
        return self.api.create(body)


@dataclass
class Stage:
    """One control plane with a kubelet, a record of everything, and operators on demand."""

    plane: ControlPlane
    chart: list[Document]
    directory: Path
    api: ApiClient
    record: Record
    kubelet: Kubelet
    _stack: ExitStack = field(default_factory=ExitStack)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _once: threading.Lock = field(default_factory=threading.Lock)
    room: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(SIDE_BY_SIDE))

    def place(self, namespace: str) -> Place:
        """A new namespace in which an operator may keep its Lease."""
        self.api.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}})
        for kind in ("Role", "RoleBinding"):
            body = only(self.chart, kind, "agentjobs-operator")
            body = {**body, "metadata": {"name": "operator", "namespace": namespace}}
            if kind == "RoleBinding":
                body["roleRef"] = {**body["roleRef"], "name": "operator"}
            self.api.create(body)
        return Place(self, namespace)

    def operator(
        self,
        place: Place,
        name: str = "",
        *,
        through: FaultyProxy | None = None,
        wait: bool = True,
        settings: Mapping[str, str | int] | None = None,
    ) -> OperatorProcess:
        """Start an operator for a place. It is ended with the stage at the latest."""
        name = name or f"operator-of-{place.namespace}"
        kubeconfig = self._credentials(OPERATOR, name, through)
        scope = {"NAMESPACE": place.namespace, "WATCH_NAMESPACES": place.namespace}
        operator = OperatorProcess(name, kubeconfig, self.directory, {**scope, **(settings or {})})
        with self._lock:
            self._stack.callback(operator.close)
        operator.start(wait=wait)
        place.operators.append(operator)
        return operator

    def proxy(self, place: Place) -> FaultyProxy:
        """A proxy that acts for the operator of a place."""
        place.proxy = self._proxy_as(OPERATOR, f"{place.namespace}-proxied")
        return place.proxy

    def gateway(
        self,
        name: str,
        *,
        through: FaultyProxy | None = None,
        wait: bool = True,
        settings: Mapping[str, str | int] | None = None,
    ) -> GatewayProcess:
        """Start a replica of the gateway. It is ended with the stage at the latest.

        The audit log knows it by its name, as one of its groups.
        """
        kubeconfig = self._credentials(GATEWAY, name, through)
        gateway = GatewayProcess(
            name, kubeconfig, self.directory, {"CALLBACKS_ALLOW": CALLBACKS, **(settings or {})}
        )
        gateway.trusted = self.plane.ca_file
        with self._lock:
            self._stack.callback(gateway.close)
        gateway.start(wait=wait)
        return gateway

    def gateway_proxy(self, name: str) -> FaultyProxy:
        """A proxy that acts for a replica of the gateway."""
        return self._proxy_as(GATEWAY, name)

    def certificate(self, name: str) -> dict[str, str]:
        """Settings of a gateway that serves TLS."""
        with self._lock:
            certificate, key = Pki(self.plane.ca_file.parent).server(name, ["127.0.0.1"])
        return {"TLS_CERTIFICATE": str(certificate), "TLS_KEY": str(key)}

    @cached_property
    def _replicas(self) -> tuple[GatewayProcess, GatewayProcess]:
        proxy = self.gateway_proxy("gateway-2")
        proxy.hold = lambda path, age: "watch=" in path and age < WATCH_DELAY
        first = self.gateway("gateway-1", wait=False)
        second = self.gateway("gateway-2", through=proxy, wait=False)
        for each in (first, second):
            each.wait_until_ready()
        return first, second

    @property
    def replicas(self) -> tuple[GatewayProcess, GatewayProcess]:
        """Two replicas of the gateway for everybody; the second one's watches are late."""
        with self._once:
            return self._replicas

    @cached_property
    def mcp_proxy(self) -> FaultyProxy:
        """What the second replica that serves MCP speaks through."""
        return self.gateway_proxy("mcp-2")

    @cached_property
    def _mcp_replicas(self) -> tuple[GatewayProcess, GatewayProcess]:
        settings = {"MCP": "true", "MCP_SYNC_SECONDS": 2}
        first = self.gateway("mcp-1", wait=False, settings=settings)
        second = self.gateway("mcp-2", through=self.mcp_proxy, wait=False, settings=settings)
        for each in (first, second):
            each.wait_until_ready()
        return first, second

    @property
    def mcp_replicas(self) -> tuple[GatewayProcess, GatewayProcess]:
        """Two replicas that serve MCP too."""
        with self._once:
            return self._mcp_replicas

    def close(self) -> None:
        self._stack.close()

    def _proxy_as(self, user: str, name: str) -> FaultyProxy:
        context = Server.of(self._credentials(user, name, None)).context
        (port,) = free_ports(1)
        proxy = FaultyProxy(self.plane.url, context, port)
        with self._lock:
            self._stack.enter_context(proxy)
        return proxy

    def _credentials(self, user: str, group: str, through: FaultyProxy | None) -> Path:
        with self._lock:
            kubeconfig = self.plane.kubeconfig_for(user, [group])
        return rewired(kubeconfig, through.url) if through else kubeconfig


def rewired(kubeconfig: Path, url: str) -> Path:
    """A kubeconfig that leads to a proxy, which has the credentials."""
    config = json.loads(kubeconfig.read_text(encoding="utf-8"))
    config["clusters"][0]["cluster"] = {"server": url}
    config["users"][0]["user"] = {}
    file = kubeconfig.with_suffix(".proxied")
    file.write_text(json.dumps(config), encoding="utf-8")
    return file


@dataclass(frozen=True)
class Scenario:
    """A story with its rule, told in one function."""

    title: str
    play: Callable[[Place], None]
    own: bool
    """It has a namespace and operators of its own, and starts these itself."""
    settings: Mapping[str, str | int]

    @override
    def __str__(self) -> str:
        return self.title

    @override
    def __hash__(self) -> int:
        return hash(self.title)


SCENARIOS: list[Scenario] = []


def scenario(
    title: str, *, own: bool = False, **settings: str | int
) -> Callable[[Callable[[Place], None]], Callable[[Place], None]]:
    """Register a story. With settings, or `own`, it is served by an operator of its own.

    `own` alone leaves it to the story to start operators.
    """

    def register(play: Callable[[Place], None]) -> Callable[[Place], None]:
        SCENARIOS.append(Scenario(title, play, own or bool(settings), settings))
        return play

    return register


def told_in(module: str) -> list[Scenario]:
    return [each for each in SCENARIOS if each.play.__module__ == module]


def play(each: Scenario, stage: Stage, shared: Callable[[], Place]) -> None:
    """Play one scenario."""
    if not each.own:
        _tell(each, shared())
        return
    with stage.room:
        place = stage.place(each.play.__name__.replace("_", "-")[:50])
        try:
            if each.settings:
                stage.operator(place, settings=each.settings)
            _tell(each, place)
        finally:
            for operator in place.operators:
                operator.close()


def _tell(each: Scenario, place: Place) -> None:
    """What fails is told with the operator's last words."""
    try:
        each.play(place)
    except BaseException as error:
        for operator in place.operators:
            error.add_note(f"--- {operator.name}:\n{operator.log[-LOG_SHOWN:]}")
        raise


def open_stage(plane: ControlPlane, chart: list[Document], directory: Path) -> Iterator[Stage]:
    api = ApiClient.of(plane)
    record = Record(api)
    kubelet = Kubelet(api, record)
    stage = Stage(plane, chart, directory, api, record, kubelet)
    try:
        yield stage
    finally:
        stage.close()
        kubelet.close()
        record.close()


def moment(text: str) -> datetime:
    return datetime.fromisoformat(text)


def seconds_between(first: str, second: str) -> float:
    return (moment(second) - moment(first)).total_seconds()
