"""Requests to the API server as anybody: the administrator impersonates the caller."""

import http.client
import json
import ssl
from base64 import b64decode
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, Self
from urllib.parse import urlencode, urlsplit

import yaml

Document = dict[str, Any]

PLURALS = {
    "AgentJob": "agentjobs",
    "AgentTool": "agenttools",
    "ClusterAgentTool": "clusteragenttools",
    "InputRequest": "inputrequests",
}
MERGE = "application/merge-patch+json"
APPLY = "application/apply-patch+yaml"


@dataclass(frozen=True)
class Answer:
    """What the API server said."""

    code: int
    body: Document

    @property
    def message(self) -> str:
        return str(self.body.get("message", ""))

    @property
    def taken(self) -> bool:
        return self.code < 300

    def object(self) -> Document:
        """The object of an answer that must be good."""
        assert self.taken, f"{self.code}: {self.message}"
        return self.body


@dataclass(frozen=True)
class Server:
    """Where the API server is, and the administrator's certificate."""

    host: str
    context: ssl.SSLContext

    @classmethod
    def of(cls, kubeconfig: Path) -> Self:
        """Read a kubeconfig that holds its certificates inline."""
        config = yaml.safe_load(kubeconfig.read_text(encoding="utf-8"))
        cluster, user = config["clusters"][0]["cluster"], config["users"][0]["user"]
        authority, certificate, key = (
            b64decode(where[f"{name}-data"])
            for where, name in (
                (cluster, "certificate-authority"),
                (user, "client-certificate"),
                (user, "client-key"),
            )
        )
        context = ssl.create_default_context(cadata=authority.decode())
        with NamedTemporaryFile() as file:
            file.write(certificate + b"\n" + key)
            file.flush()
            context.load_cert_chain(file.name)
        return cls(urlsplit(cluster["server"]).netloc, context)


class Caller:
    """Somebody who sends requests. Without a name: the administrator."""

    def __init__(self, server: Server, user: str = "", *groups: str) -> None:
        self._server = server
        self.user = user
        self._headers = [("Impersonate-User", user)] if user else []
        self._headers += [("Impersonate-Group", group) for group in groups]

    def create(self, document: Document, *, dry_run: bool = False) -> Answer:
        return self._send("POST", _path(document, named=False), document, dry_run=dry_run)

    def get(self, document: Document) -> Answer:
        return self._send("GET", _path(document))

    def delete(self, document: Document) -> Answer:
        return self._send("DELETE", _path(document))

    def patch(
        self, document: Document, change: Document, subresource: str = "", *, dry_run: bool = False
    ) -> Answer:
        path = _path(document) + (f"/{subresource}" if subresource else "")
        return self._send("PATCH", path, change, MERGE, dry_run=dry_run)

    def apply(self, document: Document, *, dry_run: bool = False) -> Answer:
        """Apply on the server's side, against whoever else wrote there."""
        path = f"{_path(document)}?force=true"
        return self._send("PATCH", path, document, APPLY, dry_run=dry_run)

    def _send(
        self,
        method: str,
        path: str,
        body: Document | None = None,
        content_type: str = "application/json",
        *,
        dry_run: bool = False,
    ) -> Answer:
        query = {"fieldValidation": "Strict", "fieldManager": "test"} if body else {}
        query |= {"dryRun": "All"} if dry_run else {}
        connection = http.client.HTTPSConnection(
            self._server.host, timeout=30, context=self._server.context
        )
        try:
            glue = "&" if "?" in path else "?"
            connection.putrequest(method, f"{path}{glue}{urlencode(query)}")
            payload = json.dumps(body).encode() if body is not None else b""
            for name, value in (
                ("Content-Type", content_type),
                ("Content-Length", str(len(payload))),
                *self._headers,
            ):
                connection.putheader(name, value)
            connection.endheaders(payload)
            answer = connection.getresponse()
            return Answer(answer.status, json.loads(answer.read() or b"{}"))
        finally:
            connection.close()


def _path(document: Document, *, named: bool = True) -> str:
    kind, version, meta = document["kind"], document["apiVersion"], document["metadata"]
    root = f"/apis/{version}" if "/" in version else f"/api/{version}"
    place = f"/namespaces/{meta['namespace']}" if "namespace" in meta else ""
    path = f"{root}{place}/{PLURALS.get(kind, kind.lower() + 's')}"
    return f"{path}/{meta['name']}" if named else path
