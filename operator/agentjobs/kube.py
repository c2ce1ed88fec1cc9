"""The Kubernetes API: the one door for reads and writes, where its errors get our names.

`kubernetes` finds the cluster and its credentials (kubeconfig or service account); requests are
made by aiohttp on plain JSON, since every object here is either passed on as it was given or
parsed into a small view at once.
"""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

import aiohttp
import kubernetes.client
import kubernetes.config

from agentjobs import codec
from agentjobs.api.names import GROUP, VERSION
from agentjobs.domain.errors import AgentJobError

MERGE_PATCH = "application/merge-patch+json"
JSON_PATCH = "application/json-patch+json"
CONNECTIONS = 32
TOTAL_SECONDS = 30
CONNECT_SECONDS = 5
PAGE = 500
WATCH_SECONDS = 290
"""After which the API server ends a watch, so that load balancers do not."""
LOG_IDLE_SECONDS = 2.0
"""After which a reader of a silent log is told so."""
LOG_SILENCE_SECONDS = 300
"""A log may be silent; a connection that broke unheard is silent, too. It is opened anew."""
WATCH_SILENCE_SECONDS = 120
"""Bookmarks come about once a minute; a watch without them is dead."""
ERROR_BODY_BYTES = 64 * 1024
LINES_LOOKED_AT = 20


class KubeError(AgentJobError):
    """An answer of the API server that is not a success."""

    def __init__(self, code: int, status: Mapping[str, Any], what: str) -> None:
        self.code = code
        self.status = status
        super().__init__(f"{what}: {code} {status.get('message') or status.get('reason') or ''}")


class NotFoundError(KubeError):
    """The object does not exist (404)."""


class ConflictError(KubeError):
    """The object exists already, or was changed since it was read (409)."""


class GoneError(KubeError):
    """What was asked for is too old (410): list again."""


class UnavailableError(AgentJobError):
    """No answer that means anything: try again later (network, 429, 5xx)."""

    def __init__(self, message: str, retry_after: float | None = None) -> None:
        self.retry_after = retry_after
        super().__init__(message)


class NoClusterError(AgentJobError):
    """No credentials for a cluster were found."""


@dataclass(frozen=True, slots=True)
class Resource:
    """A kind of object, by its place in the API."""

    group: str
    version: str
    plural: str
    namespaced: bool = True

    def path(self, namespace: str = "", name: str = "", subresource: str = "") -> str:
        """URL path of an object, or of a collection."""
        parts = ["api", self.version] if not self.group else ["apis", self.group, self.version]
        if namespace:
            parts += ["namespaces", namespace]
        parts += [part for part in (self.plural, name, subresource) if part]
        return "/" + "/".join(parts)


AGENTJOBS = Resource(GROUP, VERSION, "agentjobs")
AGENTTOOLS = Resource(GROUP, VERSION, "agenttools")
CLUSTERAGENTTOOLS = Resource(GROUP, VERSION, "clusteragenttools", namespaced=False)
JOBS = Resource("batch", "v1", "jobs")
PODS = Resource("", "v1", "pods")
NODES = Resource("", "v1", "nodes", namespaced=False)
EVENTS = Resource("", "v1", "events")
CONFIGMAPS = Resource("", "v1", "configmaps")
SECRETS = Resource("", "v1", "secrets")
LEASES = Resource("coordination.k8s.io", "v1", "leases")
INPUTREQUESTS = Resource(GROUP, VERSION, "inputrequests")
TOKENREVIEWS = Resource("authentication.k8s.io", "v1", "tokenreviews", namespaced=False)
ACCESSREVIEWS = Resource("authorization.k8s.io", "v1", "subjectaccessreviews", namespaced=False)


@dataclass(slots=True)
class Access:
    """Where the API server is and how to prove who we are."""

    server: str
    configuration: kubernetes.client.Configuration

    @classmethod
    def find(cls) -> Self:
        """Find the cluster: KUBECONFIG or its default place, else the pod's service account.

        :raises NoClusterError: if there is neither.
        """
        configuration = kubernetes.client.Configuration()
        try:
            kubernetes.config.load_kube_config(  # type: ignore[no-untyped-call]
                client_configuration=configuration
            )
        except kubernetes.config.ConfigException as no_file:
            try:
                kubernetes.config.load_incluster_config(  # type: ignore[no-untyped-call]
                    client_configuration=configuration
                )
            except kubernetes.config.ConfigException as no_pod:
                raise NoClusterError(
                    f"no cluster found ({no_file} {no_pod}); set KUBECONFIG, or run in a pod"
                ) from no_pod
        return cls(server=configuration.host.rstrip("/"), configuration=configuration)

    @property
    def host(self) -> str:
        """Name or address of the API server."""
        return urlsplit(self.server).hostname or ""

    def token(self) -> str | None:
        """The bearer token of now; a service account's is read again when it was rotated."""
        value = self.configuration.get_api_key_with_prefix("BearerToken", "authorization") or ""
        scheme, _, token = value.partition(" ")
        return token.strip() if scheme.lower() == "bearer" else value or None

    def tls(self) -> ssl.SSLContext | None:
        """Trust and client certificate."""
        if not self.server.startswith("https"):
            return None
        context = ssl.create_default_context(cafile=self.configuration.ssl_ca_cert)
        if not self.configuration.verify_ssl:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        if self.configuration.cert_file:
            context.load_cert_chain(self.configuration.cert_file, self.configuration.key_file)
        return context


class Kube:
    """A connection to one API server. Use as an async context manager."""

    def __init__(
        self, access: Access, connections: int = CONNECTIONS, seconds: float = TOTAL_SECONDS
    ) -> None:
        """Prepare.

        :param connections: how many requests may be under way at once, watches included.
        :param seconds: how long a request may take, the wait for its turn included.
        """
        self.access = access
        self._connections = connections
        self._seconds = seconds
        self._session: aiohttp.ClientSession | None = None
        self._logs: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=self._connections, ssl=self.access.tls() or True, keepalive_timeout=60
            ),
            timeout=aiohttp.ClientTimeout(total=self._seconds, sock_connect=CONNECT_SECONDS),
        )
        # Logs that are followed hold their connections: whoever asks for them bounds their number.
        self._logs = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=self.access.tls() or True),
            timeout=aiohttp.ClientTimeout(
                total=None, sock_connect=CONNECT_SECONDS, sock_read=LOG_SILENCE_SECONDS
            ),
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for session in (self._session, self._logs):
            if session:
                await session.close()

    async def get(self, resource: Resource, namespace: str, name: str) -> dict[str, Any]:
        """Read one object.

        :raises NotFoundError: it does not exist.
        :raises UnavailableError: try again later.
        """
        return await self._json("GET", resource.path(namespace, name))

    async def create(
        self, resource: Resource, namespace: str, body: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Create an object; unknown fields are refused (fieldValidation=Strict).

        :raises ConflictError: the name is taken.
        :raises KubeError: refused for good.
        :raises UnavailableError: try again later; it may have been created all the same.
        """
        params = {"fieldValidation": "Strict"}
        return await self._json("POST", resource.path(namespace), body=body, params=params)

    async def patch(
        self,
        resource: Resource,
        namespace: str,
        name: str,
        body: Mapping[str, Any],
        subresource: str = "",
    ) -> dict[str, Any]:
        """Apply a JSON merge patch (RFC 7386). With metadata.resourceVersion it is conditional.

        :raises ConflictError: the object was changed since it was read.
        :raises NotFoundError: it is gone.
        """
        path = resource.path(namespace, name, subresource)
        return await self._json("PATCH", path, body=body, content_type=MERGE_PATCH)

    async def put_status(
        self,
        resource: Resource,
        namespace: str,
        name: str,
        version: str,
        status: Mapping[str, Any],
    ) -> dict[str, Any]:
        """Replace a status as a whole by a JSON patch (RFC 6902); a merge patch takes nulls out.

        :param version: metadata.resourceVersion on which it is conditional.
        :raises ConflictError: the object was changed since it was read.
        :raises NotFoundError: it is gone.
        """
        operations = [
            {"op": "replace", "path": "/metadata/resourceVersion", "value": version},
            {"op": "add", "path": "/status", "value": status},
        ]
        path = resource.path(namespace, name, "status")
        return await self._json("PATCH", path, body=operations, content_type=JSON_PATCH)

    async def replace(
        self, resource: Resource, namespace: str, name: str, body: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Replace an object as a whole, conditional on its metadata.resourceVersion."""
        return await self._json("PUT", resource.path(namespace, name), body=body)

    async def delete(self, resource: Resource, namespace: str, name: str, uid: str) -> None:
        """Delete the object with that uid, its dependents in the background; gone is fine too."""
        body = {"preconditions": {"uid": uid}, "propagationPolicy": "Background"}
        try:
            await self._json("DELETE", resource.path(namespace, name), body=body)
        except (NotFoundError, ConflictError):
            # Not there any more, or the name is another object's by now.
            return

    async def pages(
        self, resource: Resource, namespace: str = "", params: Mapping[str, str] | None = None
    ) -> AsyncIterator[dict[str, Any]]:
        """List consistently, in pages: every page is a List of the same resourceVersion."""
        token = ""
        while True:
            query = {"limit": str(PAGE), **(params or {})}
            if token:
                query["continue"] = token
            page = await self._json("GET", resource.path(namespace), params=query)
            yield page
            token = (page.get("metadata") or {}).get("continue") or ""
            if not token:
                return

    async def watch(self, resource: Resource, version: str) -> AsyncIterator[dict[str, Any]]:
        """Yield what changes after a version, in the order in which it happened.

        Ends when the API server ends it; bookmarks come as events of type BOOKMARK.

        :raises GoneError: the version is too old; list again.
        :raises UnavailableError: try again later.
        """
        params = {
            "watch": "true",
            "resourceVersion": version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(WATCH_SECONDS),
        }
        timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=CONNECT_SECONDS, sock_read=WATCH_SILENCE_SECONDS
        )
        path = resource.path()
        try:
            async with self._open("GET", path, params=params, timeout=timeout) as answer:
                if answer.status >= HTTPStatus.BAD_REQUEST:
                    content = await answer.read()
                    raise _error(answer.status, answer.headers, content, f"WATCH {path}")
                rest = b""
                async for piece in answer.content.iter_any():
                    *lines, rest = (rest + piece).split(b"\n")
                    for line in lines:
                        yield _event(line, path)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise UnavailableError(f"WATCH {path}: {error or type(error).__name__}") from error

    async def follow_log(
        self, namespace: str, pod: str, container: str, *, since: str | None, follow: bool
    ) -> AsyncGenerator[bytes]:
        """Yield a container's log with timestamps, as it comes; an empty piece now and then.

        :param since: RFC 3339 time in whole seconds from which on; None: all that there is.
        :raises NotFoundError: the pod is gone.
        :raises UnavailableError: try again later.
        """
        params = {"container": container, "timestamps": "true", "follow": str(follow).lower()}
        if since:
            params["sinceTime"] = since
        path = PODS.path(namespace, pod, "log")
        try:
            async with self._open("GET", path, session=self._logs, params=params) as answer:
                if answer.status >= HTTPStatus.BAD_REQUEST:
                    content = await answer.read()
                    raise _error(answer.status, answer.headers, content, f"LOG {path}")
                while not answer.content.at_eof():
                    piece = b""
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(LOG_IDLE_SECONDS):
                            piece = await answer.content.readany()
                    yield piece
        except (aiohttp.ClientError, TimeoutError) as error:
            raise UnavailableError(f"LOG {path}: {error or type(error).__name__}") from error

    async def last_line(
        self, namespace: str, pod: str, container: str, skip: Callable[[str], bool]
    ) -> str:
        """The last line that a container printed, however long; empty where there is none.

        :param skip: whether a line does not count; one before it is looked for, not far.
        :raises KubeError: the log is not there any more.
        """
        path = PODS.path(namespace, pod, "log")
        for tail in (1, LINES_LOOKED_AT):
            # Of more lines the bytes are counted from the first: only where it must be.
            limits = {"tailLines": str(tail), "limitBytes": str(tail * ERROR_BODY_BYTES)}
            raw = await self._raw("GET", path, params={"container": container, **limits})
            # Not splitlines(): JSON may hold U+2028 and the like.
            lines = raw.decode("utf-8", "replace").removesuffix("\n").split("\n") if raw else []
            found = next((line for line in reversed(lines) if not skip(line)), None)
            if found is not None or not lines:
                return (found or "").removesuffix("\r")
        return ""

    async def _json(self, method: str, path: str, **request: Any) -> dict[str, Any]:
        content = await self._raw(method, path, **request)
        try:
            value = codec.loads(content)
        except ValueError as error:
            raise UnavailableError(f"{method} {path}: the answer is no JSON: {error}") from error
        if not isinstance(value, dict):
            raise UnavailableError(f"{method} {path}: the answer is no JSON object")
        return value

    async def _raw(
        self,
        method: str,
        path: str,
        *,
        body: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        params: Mapping[str, str] | None = None,
        content_type: str = "application/json",
    ) -> bytes:
        data = codec.dumps(body) if body is not None else None
        try:
            async with self._open(
                method, path, params=params, data=data, headers={"Content-Type": content_type}
            ) as answer:
                content: bytes = await answer.read()
                if answer.status < HTTPStatus.BAD_REQUEST:
                    return content
                raise _error(answer.status, answer.headers, content, f"{method} {path}")
        except (aiohttp.ClientError, TimeoutError) as error:
            raise UnavailableError(f"{method} {path}: {error or type(error).__name__}") from error

    def _open(
        self,
        method: str,
        path: str,
        *,
        session: aiohttp.ClientSession | None = None,
        headers: Mapping[str, str] | None = None,
        **request: Any,
    ) -> Any:
        session = session or self._session
        if session is None:
            raise RuntimeError("use Kube as an async context manager")
        sent = {"Accept": "application/json", **(headers or {})}
        token = self.access.token()
        if token:
            sent["Authorization"] = f"Bearer {token}"
        return session.request(method, self.access.server + path, headers=sent, **request)


def _event(line: bytes, path: str) -> dict[str, Any]:
    try:
        event = codec.loads(line)
    except ValueError as error:
        raise UnavailableError(f"WATCH {path}: an event is no JSON: {error}") from error
    if event["type"] == "ERROR":
        raise _error(int(event["object"].get("code") or 0), {}, codec.dumps(event["object"]), path)
    return dict(event)


def _error(code: int, headers: Mapping[str, str], content: bytes, what: str) -> AgentJobError:
    try:
        status = codec.loads(content)
    except ValueError:
        status = {"message": content[:200].decode("utf-8", "replace")}
    if not isinstance(status, dict):
        status = {"message": str(status)}
    if code == HTTPStatus.NOT_FOUND:
        return NotFoundError(code, status, what)
    if code == HTTPStatus.CONFLICT:
        return ConflictError(code, status, what)
    if code == HTTPStatus.GONE:
        return GoneError(code, status, what)
    retriable = {HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.UNAUTHORIZED, HTTPStatus.REQUEST_TIMEOUT}
    if code >= HTTPStatus.INTERNAL_SERVER_ERROR or code in retriable:
        message = f"{what}: {code} {status.get('message', '')}"
        return UnavailableError(message, _retry_after(headers))
    return KubeError(code, status, what)


def _retry_after(headers: Mapping[str, str]) -> float | None:
    value = headers.get("Retry-After", "")
    return float(value) if value.isdigit() else None
