"""Pods that report, as tests play them."""

from functools import partial
from typing import Any

from tests.apiclient import Document
from tests.controlplane.stage import Place
from tests.controlplane.tenants import wait_until
from tests.gateway_process import Agent, GatewayProcess, Reply


def token_of(place: Place, pod: Document | None, audience: str = "agentjobs-report") -> str:
    """A token of the pod's ServiceAccount, bound to the pod."""
    spec: Document = {"audiences": [audience]}
    if pod:
        meta = pod["metadata"]
        bound = {"apiVersion": "v1", "kind": "Pod", "name": meta["name"], "uid": meta["uid"]}
        spec["boundObjectRef"] = bound
    path = f"/api/v1/namespaces/{place.namespace}/serviceaccounts/default/token"
    body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec}
    return str(place.api.send("POST", path, body).object()["status"]["token"])


class Reporter:
    """A tool, as its pod."""

    def __init__(self, gateway: GatewayProcess, place: Place, job: str, token: str) -> None:
        self._gateway = gateway
        self._job = f"{job}.{place.namespace}"
        self.token = token
        self._agent = Agent(token)

    def tell(self, what: str, body: Any, job: str = "") -> Reply:
        headers = {"Agentjobs-Job": job or self._job}
        return self._agent.send(self._gateway, "POST", f"/v1/report/{what}", body, headers)

    def ask(self, what: str, job: str = "") -> Reply:
        headers = {"Agentjobs-Job": job or self._job}
        return self._agent.send(self._gateway, "GET", f"/v1/report/{what}", None, headers)

    def until_taken(self, what: str, body: Any) -> Reply:
        """Report, and again as told while the pod is not known yet."""
        replies: list[Reply] = []

        def taken() -> bool:
            replies.append(self.tell(what, body))
            if replies[-1].code == 503:
                assert replies[-1].headers["Retry-After"] == "1"
            return replies[-1].code < 300

        wait_until(f"report of {what}", taken)
        return replies[-1]


def known(place: Place, name: str) -> bool:
    return bool(place.status(name).get("podUIDs"))


def running(place: Place, *names: str) -> dict[str, Document]:
    """Start jobs of a tool that reports; return their pods, which their status names."""
    for name in names:
        place.create(name, toolRef={"kind": "AgentTool", "name": "reports"})
    pods = place.until_running(*names)
    for name in names:
        wait_until(f"podUIDs of {name}", partial(known, place, name))
    return pods
