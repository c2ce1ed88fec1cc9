"""The API server as tests talk to it: plain JSON, as administrator, and what has happened there."""

import http.client
import json
import socket
import ssl
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Self, TypeVar
from urllib.parse import urlencode, urlsplit

from tests.cluster import ControlPlane
from tests.controlplane.callers import Server

Document = dict[str, Any]
T = TypeVar("T")

MERGE = "application/merge-patch+json"
ROOTS = {
    "AgentJob": "/apis/agentjobs.dev/v1alpha1",
    "AgentTool": "/apis/agentjobs.dev/v1alpha1",
    "ClusterAgentTool": "/apis/agentjobs.dev/v1alpha1",
    "ClusterRole": "/apis/rbac.authorization.k8s.io/v1",
    "ClusterRoleBinding": "/apis/rbac.authorization.k8s.io/v1",
    "InputRequest": "/apis/agentjobs.dev/v1alpha1",
    "Job": "/apis/batch/v1",
    "Lease": "/apis/coordination.k8s.io/v1",
    "Role": "/apis/rbac.authorization.k8s.io/v1",
    "RoleBinding": "/apis/rbac.authorization.k8s.io/v1",
}
CLUSTER_WIDE = {"Namespace", "Node"}
POLL = 0.1
CLOSED_WITHIN = 5.0


class RefusedError(AssertionError):
    """The API server said no where the test needs a yes."""


@dataclass(frozen=True)
class Answer:
    """What the API server said, and the bytes in which it did."""

    code: int
    raw: bytes

    @property
    def body(self) -> Document:
        value: Document = json.loads(self.raw or b"{}")
        return value

    @property
    def message(self) -> str:
        return str(self.body.get("message", "")) if self.code >= 400 else ""

    def object(self) -> Document:
        if self.code >= 400:
            raise RefusedError(f"{self.code}: {self.message}")
        return self.body


class ApiClient:
    """Requests as administrator, over a fresh connection each."""

    def __init__(self, url: str, context: ssl.SSLContext) -> None:
        self._host = urlsplit(url).netloc
        self._context = context

    @classmethod
    def of(cls, plane: ControlPlane) -> Self:
        return cls(plane.url, Server.of(plane.kubeconfig).context)

    def get(self, kind: str, namespace: str, name: str) -> Answer:
        return self.send("GET", path_of(kind, namespace, name))

    def items(self, kind: str, namespace: str, **query: str) -> list[Document]:
        found = self.send("GET", path_of(kind, namespace), query=query).object()["items"]
        return list(found)

    def create(self, body: Document) -> Document:
        return self.try_create(body).object()

    def try_create(self, body: Document) -> Answer:
        path = path_of(body["kind"], body["metadata"].get("namespace", ""))
        return self.send("POST", path, body, query={"fieldValidation": "Strict"})

    def patch(
        self, kind: str, namespace: str, name: str, change: Document, subresource: str = ""
    ) -> Answer:
        path = path_of(kind, namespace, name) + (f"/{subresource}" if subresource else "")
        return self.send("PATCH", path, change, content_type=MERGE)

    def delete(self, kind: str, namespace: str, name: str, **options: Any) -> Answer:
        body = {"propagationPolicy": "Background", **options}
        return self.send("DELETE", path_of(kind, namespace, name), body)

    def send(
        self,
        method: str,
        path: str,
        body: Document | None = None,
        *,
        query: dict[str, str] | None = None,
        content_type: str = "application/json",
    ) -> Answer:
        connection = self.connect()
        try:
            connection.request(
                method,
                f"{path}?{urlencode(query)}" if query else path,
                json.dumps(body) if body is not None else None,
                {"Content-Type": content_type, "Accept": "application/json"},
            )
            answer = connection.getresponse()
            return Answer(answer.status, answer.read())
        finally:
            connection.close()

    def connect(self, timeout: float | None = 30) -> http.client.HTTPSConnection:
        return http.client.HTTPSConnection(self._host, timeout=timeout, context=self._context)


def path_of(kind: str, namespace: str, name: str = "") -> str:
    place = f"/namespaces/{namespace}" if namespace and kind not in CLUSTER_WIDE else ""
    path = f"{ROOTS.get(kind, '/api/v1')}{place}/{kind.lower()}s"
    return f"{path}/{name}" if name else path


class Record:
    """Everything that happens to AgentJobs, Jobs and pods, from watches that miss nothing."""

    KINDS = ("AgentJob", "Job", "Pod")

    def __init__(self, api: ApiClient) -> None:
        self._api = api
        self._changed = threading.Condition()
        self._latest: dict[tuple[str, str, str], Document] = {}
        self._history: dict[str, list[Document]] = defaultdict(list)
        self._children: dict[str, dict[str, Document]] = defaultdict(dict)
        self._listeners: list[Callable[[str, Document], None]] = []
        self._streams: dict[str, http.client.HTTPSConnection] = {}
        self._closed = False
        self._threads = [
            threading.Thread(target=self._follow, args=(kind, self._begin(kind)), daemon=True)
            for kind in self.KINDS
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        self._closed = True
        for stream in list(self._streams.values()):
            if stream.sock:
                with suppress(OSError):
                    stream.sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(CLOSED_WITHIN)

    def listen(self, listener: Callable[[str, Document], None]) -> None:
        """Call with every change of a pod; `ADDED`, `MODIFIED` or `DELETED` comes first."""
        self._listeners.append(listener)

    def latest(self, kind: str, namespace: str, name: str) -> Document | None:
        """The object as it is; None when there is none."""
        return self._latest.get((kind, namespace, name))

    def all(self, kind: str, namespace: str) -> list[Document]:
        with self._changed:
            return [body for (k, n, _), body in self._latest.items() if (k, n) == (kind, namespace)]

    def history(self, uid: str) -> list[Document]:
        """Every version of an object that was seen, its last one included."""
        with self._changed:
            return list(self._history[uid])

    def children(self, uid: str) -> list[Document]:
        """Everything that was ever controlled by that object, as it was last seen."""
        with self._changed:
            return sorted(
                self._children[uid].values(),
                key=lambda body: (
                    int(body["metadata"]["generation"]) if body["kind"] == "Job" else 0
                ),
            )

    def until(self, what: str, find: Callable[[], T | None], seconds: float = 30.0) -> T:
        """Wait until `find` returns something true; `what` completes "there is still no ..."."""
        end = time.monotonic() + seconds
        while True:
            if found := find():
                return found
            left = end - time.monotonic()
            if left <= 0:
                raise AssertionError(f"after {seconds:.0f} s there is still no {what}")
            with self._changed:
                self._changed.wait(min(left, POLL))

    def _begin(self, kind: str) -> str:
        listed = self._api.send("GET", path_of(kind, "")).object()
        there = {body["metadata"]["uid"] for body in listed["items"]}
        gone = [b for b in list(self._latest.values()) if b["kind"] == kind]
        for body in gone:
            if body["metadata"]["uid"] not in there:
                self._take("DELETED", body)
        for body in listed["items"]:
            self._take("ADDED", {**body, "kind": kind})
        return str(listed["metadata"]["resourceVersion"])

    def _follow(self, kind: str, version: str) -> None:
        while not self._closed:
            try:
                for event in self._events(kind, version):
                    if event["type"] == "ERROR":
                        # An API server that was restarted knows nothing of the time before.
                        version = self._begin(kind)
                        break
                    version = event["object"]["metadata"]["resourceVersion"]
                    self._take(event["type"], event["object"])
            except (OSError, http.client.HTTPException, ValueError, AttributeError, RefusedError):
                # Closed by us, or by the API server; the next stream begins where this one ended.
                time.sleep(POLL)

    def _events(self, kind: str, version: str) -> Iterable[Document]:
        stream = self._streams[kind] = self._api.connect(timeout=None)
        query = urlencode({"watch": "true", "resourceVersion": version})
        try:
            stream.request("GET", f"{path_of(kind, '')}?{query}")
            with stream.getresponse() as answer:
                if answer.status >= 400:
                    # Without its etcd, or just started, it refuses in one document: no event.
                    raise RefusedError(f"{answer.status}: a watch of {kind}")
                while line := answer.readline():
                    yield json.loads(line)
        finally:
            stream.close()

    def _take(self, event: str, body: Document) -> None:
        meta = body["metadata"]
        key = (body["kind"], meta["namespace"], meta["name"])
        with self._changed:
            if event != "DELETED":
                self._latest[key] = body
            elif self._latest.get(key, body)["metadata"]["uid"] == meta["uid"]:
                self._latest.pop(key, None)
            self._history[meta["uid"]].append(body)
            for owner in meta.get("ownerReferences", ()):
                if owner.get("controller"):
                    self._children[owner["uid"]][meta["uid"]] = body
            self._changed.notify_all()
        if body["kind"] == "Pod":
            for listener in self._listeners:
                listener(event, body)
