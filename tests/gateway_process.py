"""The gateway as it is installed: its own process, its own credentials, ended in any case."""

import json
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import urllib3
from typing_extensions import override

from tests.cluster.controlplane import free_ports
from tests.operator_process import OperatorProcess

Document = dict[str, Any]


class GatewayProcess(OperatorProcess):
    """`python -m agentjobs.main gateway`."""

    program = "gateway"
    port_setting = "HTTP_PORT"
    trusted: Path | None = None
    """Who has signed its certificate."""

    @override
    def start(self, *, wait: bool = True, identity: str | None = None) -> None:
        if self._settings.setdefault("MCP", "false") == "true":
            self._settings.setdefault("MCP_PORT", *free_ports(1))
        self._settings.setdefault("DRAIN_SECONDS", 0)
        super().start(wait=wait, identity=identity)

    @property
    def url(self) -> str:
        scheme = "https" if "TLS_CERTIFICATE" in self._settings else "http"
        return f"{scheme}://127.0.0.1:{self.port}"

    @property
    def mcp_url(self) -> str:
        """Where it serves MCP, if it was told to."""
        scheme = self.url.partition(":")[0]
        return f"{scheme}://127.0.0.1:{self._settings['MCP_PORT']}/mcp"

    @cached_property
    def _probes(self) -> urllib3.PoolManager:
        return urllib3.PoolManager(ca_certs=self.trusted, retries=False, timeout=2)

    @override
    def _get(self, path: str) -> str | None:
        try:
            answer = self._probes.request("GET", self.url + path)
        except urllib3.exceptions.HTTPError:
            return None
        return answer.data.decode() if answer.status == 200 else None


@dataclass(frozen=True)
class Reply:
    """What the gateway answered."""

    code: int
    headers: urllib3.HTTPHeaderDict
    raw: bytes

    @property
    def body(self) -> Document:
        value: Document = json.loads(self.raw or b"{}")
        return value

    @property
    def problem(self) -> str:
        """The last word of the problem's type; empty where it is none."""
        if self.headers.get("Content-Type") != "application/problem+json":
            return ""
        assert self.body["status"] == self.code
        return str(self.body["type"]).rpartition("/")[2]


@dataclass(frozen=True)
class Agent:
    """Somebody with a token who calls gateways."""

    token: str
    http: urllib3.PoolManager = field(
        default_factory=lambda: urllib3.PoolManager(maxsize=64, retries=False, timeout=90)
    )

    def send(
        self,
        gateway: GatewayProcess | str,
        method: str,
        path: str,
        body: Any = None,
        headers: dict[str, str] | None = None,
    ) -> Reply:
        url = (gateway if isinstance(gateway, str) else gateway.url) + path
        sent = dict(headers or {})
        if self.token:
            sent["Authorization"] = f"Bearer {self.token}"
        content = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        if content is not None:
            sent.setdefault("Content-Type", "application/json")
        answer = self.http.request(method, url, body=content, headers=sent)
        return Reply(answer.status, answer.headers, answer.data)

    def start(
        self,
        gateway: GatewayProcess | str,
        key: str,
        tool: str = "",
        query: str = "",
        headers: dict[str, str] | None = None,
        **request: Any,
    ) -> Reply:
        body = {**({"tool": tool} if tool else {}), **request}
        sent = {"Idempotency-Key": key, **(headers or {})}
        return self.send(gateway, "POST", f"/v1/jobs{query}", body, sent)

    def get(self, gateway: GatewayProcess | str, path: str, **headers: str) -> Reply:
        return self.send(gateway, "GET", path, headers=headers)

    def status(self, gateway: GatewayProcess | str, job_id: str, query: str = "") -> Reply:
        return self.get(gateway, f"/v1/jobs/{job_id}{query}")

    def stop(self, gateway: GatewayProcess | str, job_id: str, query: str = "") -> Reply:
        return self.send(gateway, "DELETE", f"/v1/jobs/{job_id}{query}")
