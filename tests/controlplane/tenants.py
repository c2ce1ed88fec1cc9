"""People of a namespace: ServiceAccounts with exactly the rights that a story gives them."""

import secrets
import time
from base64 import b32encode
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from tests.apiclient import Document, RefusedError
from tests.audit import Request, Tail
from tests.controlplane.callers import Answer, Caller, Server
from tests.controlplane.installed import agentjob
from tests.controlplane.stage import Stage, template
from tests.gateway_process import Agent, GatewayProcess, Reply

RBAC = "rbac.authorization.k8s.io"
OURS = "agentjobs.dev"
SOON = 40.0
POLL = 0.05


@dataclass(frozen=True)
class Right:
    """One rule of RBAC."""

    resource: str
    verbs: tuple[str, ...]
    names: tuple[str, ...] = ()
    group: str = OURS

    @property
    def rule(self) -> Document:
        rule = {"apiGroups": [self.group], "resources": [self.resource], "verbs": [*self.verbs]}
        return {**rule, "resourceNames": [*self.names]} if self.names else rule


START = Right("agentjobs", ("create",))
READ = Right("agentjobs", ("get", "list"))
STOP = Right("agentjobs", ("delete",))
CALLS = Right("agentjobs", ("create", "get", "list", "delete"))
"""All that an agent does."""
MAKE_JOBS = Right("jobs", ("create",), group="batch")


def use(*names: str, kind: str = "agenttools") -> Right:
    return Right(kind, ("use",), names)


@dataclass(frozen=True)
class Account:
    """A ServiceAccount: with its token at gateways, and as kubectl would be."""

    namespace: str
    name: str
    agent: Agent
    kubectl: Caller

    @property
    def user(self) -> str:
        return f"system:serviceaccount:{self.namespace}:{self.name}"

    def create(self, name: str, **spec: Any) -> Answer:
        """Create an AgentJob at the API server."""
        return self.kubectl.create(agentjob(self.namespace, name, spec))


class Tenant:
    """A namespace and its people."""

    def __init__(self, stage: Stage, namespace: str) -> None:
        self.namespace = namespace
        self.api = stage.api
        self._server = Server.of(stage.plane.kubeconfig)

    @classmethod
    def new(cls, stage: Stage, namespace: str) -> "Tenant":
        """Make a namespace that no operator serves."""
        stage.api.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}})
        return cls(stage, namespace)

    def usable_tool(self, name: str, **spec: Any) -> None:
        """A new tool, judged as the operator would."""
        self.api.create(agenttool(name, namespace=self.namespace, **spec))
        status = {"usable": True, "observedGeneration": 1}
        self.api.patch("AgentTool", self.namespace, name, {"status": status}, "status").object()

    def service_account(self, name: str) -> None:
        meta = {"name": name, "namespace": self.namespace}
        self.api.create({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": meta})

    def account(self, name: str, *rights: Right) -> Account:
        """A new ServiceAccount with these rights in this namespace, which are in force."""
        self.service_account(name)
        user = f"system:serviceaccount:{self.namespace}:{name}"
        account = Account(
            self.namespace,
            name,
            Agent(self.token(name)),
            Caller(self._server, user),
        )
        if rights:
            self.grant(account, *rights)
        return account

    def grant(self, account: Account, *rights: Right, everywhere: bool = False) -> str:
        """Give rights in this namespace, or everywhere; return the name of the binding."""
        return self.grant_user(account.user, *rights, everywhere=everywhere)

    def grant_user(self, user: str, *rights: Right, everywhere: bool = False) -> str:
        kind = "ClusterRole" if everywhere else "Role"
        name = f"{user.rpartition(':')[2]}-{secrets.token_hex(4)}"
        meta = {"name": name} if everywhere else {"name": name, "namespace": self.namespace}
        self.api.create(
            {
                "apiVersion": f"{RBAC}/v1",
                "kind": kind,
                "metadata": meta,
                "rules": [right.rule for right in rights],
            }
        )
        self.api.create(
            {
                "apiVersion": f"{RBAC}/v1",
                "kind": f"{kind}Binding",
                "metadata": meta,
                "roleRef": {"apiGroup": RBAC, "kind": kind, "name": name},
                "subjects": [{"apiGroup": RBAC, "kind": "User", "name": user}],
            }
        )
        for right in rights:
            # RBAC reaches the authorizer through a watch; gateways remember a no for seconds.
            wait_until(
                f"right of {user} to {right}",
                partial(self.may, user, right, everywhere=everywhere),
            )
        return name

    def revoke(self, binding: str, user: str, right: Right) -> None:
        """Take a binding away, and wait until the right is."""
        self.api.delete("RoleBinding", self.namespace, binding).object()
        wait_until(f"end of the right of {user} to {right}", lambda: not self.may(user, right))

    def may(self, user: str, right: Right, *, everywhere: bool = False) -> bool:
        """Whether the API server allows it."""
        answer = self.api.send(
            "POST",
            "/apis/authorization.k8s.io/v1/subjectaccessreviews",
            {
                "apiVersion": "authorization.k8s.io/v1",
                "kind": "SubjectAccessReview",
                "spec": {
                    "user": user,
                    "resourceAttributes": {
                        "verb": right.verbs[0],
                        "group": right.group,
                        "resource": right.resource,
                        "namespace": "" if everywhere else self.namespace,
                        "name": right.names[0] if right.names else "",
                    },
                },
            },
        ).object()
        return bool(answer["status"]["allowed"])

    def token(self, account: str, audience: str = "agentjobs", pod: Document | None = None) -> str:
        """A token of an account; without an audience: for the API server; bound to a pod."""
        spec: Document = {"expirationSeconds": 3600}
        if audience:
            spec["audiences"] = [audience]
        if pod:
            meta = pod["metadata"]
            spec["boundObjectRef"] = {
                "apiVersion": "v1",
                "kind": "Pod",
                "name": meta["name"],
                "uid": meta["uid"],
            }
        answer = self.api.send(
            "POST",
            f"/api/v1/namespaces/{self.namespace}/serviceaccounts/{account}/token",
            {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec},
        ).object()
        return str(answer["status"]["token"])

    def agentjobs(self) -> list[Document]:
        """All AgentJobs of the namespace, as the API server has them now."""
        return self.api.items("AgentJob", self.namespace)


def agenttool(name: str, *, namespace: str = "", **spec: Any) -> Document:
    """A tool of a namespace; without one, of the cluster."""
    return {
        "apiVersion": f"{OURS}/v1alpha1",
        "kind": "AgentTool" if namespace else "ClusterAgentTool",
        "metadata": {"name": name, **({"namespace": namespace} if namespace else {})},
        "spec": {"description": f"the tool {name}", "template": template(), **spec},
    }


def wait_until(what: str, condition: Callable[[], object], seconds: float = SOON) -> None:
    end = time.monotonic() + seconds
    while True:
        try:
            if condition():
                return
        except RefusedError as error:
            what = f"{what} ({error})"
        assert time.monotonic() < end, f"after {seconds:.0f} s there is still no {what}"
        time.sleep(POLL)


def until_offered(agent: Agent, tool: str, *gateways: GatewayProcess, **query: str) -> None:
    """Wait until these gateways know a tool."""
    where = "&".join(f"{name}={value}" for name, value in query.items())
    for gateway in gateways:
        wait_until(f"tool {tool} at {gateway.name}", partial(offers, tool, agent, gateway, where))


def offers(tool: str, agent: Agent, gateway: GatewayProcess, query: str) -> bool:
    return tool in functions(agent, gateway, query)


def functions(agent: Agent, gateway: GatewayProcess, query: str = "") -> dict[str, Document]:
    """The catalogue that a gateway offers, by name."""
    reply = agent.get(gateway, f"/v1/tools?{query}")
    return {each["name"]: each for each in reply.body["tools"]} if reply.code == 200 else {}


def asked_by(gateway: GatewayProcess, tail: Tail, tenant: Tenant) -> list[Request]:
    """What a gateway has asked for since then, its watches aside; the log is a moment late."""
    name = f"mark-{secrets.token_hex(8)}"
    meta = {"name": name, "namespace": tenant.namespace}
    tenant.api.create({"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta})
    seen: list[Request] = []

    def marked() -> bool:
        new = list(tail.new())
        seen.extend(new)
        return any(tenant.namespace == each.namespace and name == each.name for each in new)

    wait_until("audit log", marked)
    return [each for each in seen if gateway.name in each.groups and each.verb != "watch"]


def id_in(reply: Reply) -> str:
    """The job id in the answer to a start, which must be good."""
    assert reply.code == 202, (reply.code, reply.raw)
    body = reply.body
    assert set(body) == {"job_id", "status"}, body
    assert reply.headers["Location"] == f"/v1/jobs/{body['job_id']}"
    assert int(reply.headers["Retry-After"]) >= 1
    return str(body["job_id"])


def name_of(job_id: str) -> str:
    """Name of the AgentJob."""
    return job_id.partition(".")[0]


def unknown_id(namespace: str) -> str:
    """An id as a gateway would make it, of no job."""
    name = b32encode(secrets.token_bytes(16)).decode().rstrip("=").lower()
    return f"job-{name}.{namespace}"
