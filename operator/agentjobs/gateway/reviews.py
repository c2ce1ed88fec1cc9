"""Who calls, and what they may do: asked of the API server, never decided here (R-AUTH)."""

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from typing_extensions import override

from agentjobs.api.names import REPORT_AUDIENCE
from agentjobs.contract.problems import ProblemType
from agentjobs.expiring import Expiring
from agentjobs.gateway.problems import ProblemError
from agentjobs.kube import ACCESSREVIEWS, TOKENREVIEWS, Kube, KubeError
from agentjobs.metrics import GatewayMetrics

AUDIENCE = "agentjobs"
"""Audience of callers' tokens. Pods' tokens have another one and are of no use here."""
ALLOWED_SECONDS = 10.0
DENIED_SECONDS = 5.0
REMEMBERED = 10_000
TOKEN = re.compile(r"[\x21-\x7e]{1,16384}")
SERVICE_ACCOUNT = "system:serviceaccount:"
AGENTJOBS = "agentjobs.dev"
POD_NAME = "authentication.kubernetes.io/pod-name"
POD_UID = "authentication.kubernetes.io/pod-uid"


@dataclass(frozen=True, slots=True)
class Caller:
    """A user as the API server knows them."""

    name: str
    uid: str = ""
    groups: tuple[str, ...] = ()
    extra: tuple[tuple[str, tuple[str, ...]], ...] = ()

    @property
    def is_service_account(self) -> bool:
        """Whether it is a ServiceAccount."""
        return self.name.startswith(SERVICE_ACCOUNT)

    @property
    def home(self) -> str | None:
        """The namespace of the caller's ServiceAccount."""
        parts = self.name.split(":")
        is_account = self.is_service_account and len(parts) == 4  # noqa: PLR2004
        return parts[2] if is_account else None


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod, by the token that is bound to it."""

    namespace: str
    name: str
    uid: str


@dataclass(frozen=True, slots=True)
class Right:
    """Exactly one right, as RBAC names it."""

    verb: str
    resource: str
    namespace: str
    name: str = ""
    group: str = AGENTJOBS
    subresource: str = ""

    @override
    def __str__(self) -> str:
        """Say it as a platform team would."""
        what = f"{self.resource}.{self.group}" + (f" {self.name}" if self.name else "")
        where = f" in namespace {self.namespace}" if self.namespace else ""
        return f"{self.verb} {what}{where}"


@dataclass(frozen=True, slots=True)
class _Identity:
    caller: Caller | None
    reason: str = field(default="", compare=False)


class Reviews:
    """Asks TokenReview and SubjectAccessReview, and remembers the answers for some seconds."""

    def __init__(self, kube: Kube, metrics: GatewayMetrics, *, user_tokens: bool) -> None:
        """Prepare.

        :param user_tokens: whether tokens of the API server's own audience are taken over TLS.
        """
        self._kube = kube
        self._metrics = metrics
        self._user_tokens = user_tokens
        self._identities: Expiring[tuple[bytes, bool], _Identity] = Expiring(
            lambda identity: ALLOWED_SECONDS if identity.caller else DENIED_SECONDS, REMEMBERED
        )
        self._pods: Expiring[bytes, _Identity] = Expiring(
            lambda identity: ALLOWED_SECONDS if identity.caller else DENIED_SECONDS, REMEMBERED
        )
        self._rights: Expiring[tuple[Caller, Right], bool] = Expiring(
            lambda allowed: ALLOWED_SECONDS if allowed else DENIED_SECONDS, REMEMBERED
        )

    async def authenticate(self, header: str, *, secure: bool) -> Caller:
        """Find out who calls.

        :param header: of the request: `Authorization`.
        :param secure: whether the request came over TLS.
        :raises ProblemError: no token, or none that is valid here (401).
        :raises UnavailableError: the API server does not answer.
        """
        scheme, _, token = header.partition(" ")
        token = token.strip()
        if scheme.lower() != "bearer" or not TOKEN.fullmatch(token):
            raise _unauthenticated()
        users = self._user_tokens and secure
        key = hashlib.sha256(token.encode()).digest(), users
        identity = await self._identities.get(key, lambda: self._review_token(token, users=users))
        if identity.caller is None:
            raise _unauthenticated()
        return identity.caller

    async def authenticate_pod(self, header: str) -> Pod:
        """Find out which pod calls, by a token of the audience for reports.

        :param header: of the request: `Authorization`.
        :raises ProblemError: no such token (401); one that is bound to no pod (403).
        :raises UnavailableError: the API server does not answer.
        """
        scheme, _, token = header.partition(" ")
        token = token.strip()
        if scheme.lower() != "bearer" or not TOKEN.fullmatch(token):
            raise _unauthenticated(REPORT_AUDIENCE)
        key = hashlib.sha256(token.encode()).digest()
        identity = await self._pods.get(key, lambda: self._token_review(token, [REPORT_AUDIENCE]))
        if identity.caller is None:
            raise _unauthenticated(REPORT_AUDIENCE)
        extra = dict(identity.caller.extra)
        (name, *_), (uid, *_) = extra.get(POD_NAME, ("",)), extra.get(POD_UID, ("",))
        if not name or not uid or not identity.caller.home:
            raise ProblemError(ProblemType.NOT_ITS_POD, "the token is bound to no pod")
        return Pod(identity.caller.home, name, uid)

    async def allowed(self, caller: Caller, right: Right) -> bool:
        """Whether a caller has a right.

        A right to all objects of a kind is asked for first, so that a caller with many jobs costs
        one review for each namespace and not one for each job.
        """
        wide = Right(
            right.verb, right.resource, right.namespace, "", right.group, right.subresource
        )
        if await self._ask(caller, wide):
            return True
        return bool(right.name) and await self._ask(caller, right)

    async def require(self, caller: Caller, right: Right) -> None:
        """Insist on a right that the caller may be told about.

        :raises ProblemError: they do not have it (403).
        """
        if not await self.allowed(caller, right):
            raise ProblemError(ProblemType.FORBIDDEN, f"{caller.name} must be allowed to {right}")

    async def _ask(self, caller: Caller, right: Right) -> bool:
        return await self._rights.get((caller, right), lambda: self._review_access(caller, right))

    async def _review_token(self, token: str, *, users: bool) -> _Identity:
        identity = await self._token_review(token, [AUDIENCE])
        if identity.caller or not users:
            return identity
        identity = await self._token_review(token, [])
        if identity.caller and identity.caller.is_service_account:
            # Whoever can read a pod's mounted token would be its account here.
            return _Identity(None, "a ServiceAccount's token needs our audience")
        return identity

    async def _token_review(self, token: str, audiences: Sequence[str]) -> _Identity:
        self._metrics.reviews.labels("token").inc()
        spec: dict[str, Any] = {"token": token}
        if audiences:
            spec["audiences"] = list(audiences)
        body = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenReview",
            "metadata": {},
            "spec": spec,
        }
        try:
            answer = await self._kube.create(TOKENREVIEWS, "", body)
        except KubeError as error:
            if error.code == 403:  # noqa: PLR2004 - our own rights are missing, not the caller's
                raise
            return _Identity(None, str(error))
        status = answer.get("status") or {}
        if not status.get("authenticated"):
            return _Identity(None, str(status.get("error") or ""))
        if audiences and not set(audiences) & set(status.get("audiences") or ()):
            # An authenticator that knows nothing of audiences says yes to any.
            return _Identity(None, "another audience")
        return _Identity(_caller(status.get("user") or {}))

    async def _review_access(self, caller: Caller, right: Right) -> bool:
        self._metrics.reviews.labels("access").inc()
        body = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SubjectAccessReview",
            "metadata": {},
            "spec": {
                "user": caller.name,
                "uid": caller.uid,
                "groups": list(caller.groups),
                "extra": {name: list(values) for name, values in caller.extra},
                "resourceAttributes": {
                    "verb": right.verb,
                    "group": right.group,
                    "resource": right.resource,
                    "subresource": right.subresource,
                    "namespace": right.namespace,
                    "name": right.name,
                },
            },
        }
        answer = await self._kube.create(ACCESSREVIEWS, "", body)
        return bool((answer.get("status") or {}).get("allowed"))


def _caller(user: Mapping[str, Any]) -> Caller:
    extra = user.get("extra") or {}
    return Caller(
        name=str(user.get("username") or ""),
        uid=str(user.get("uid") or ""),
        groups=tuple(user.get("groups") or ()),
        # The token's own id differs from token to token; no right depends on it.
        extra=tuple(
            (name, tuple(values))
            for name, values in sorted(extra.items())
            if name != "authentication.kubernetes.io/credential-id"
        ),
    )


def _unauthenticated(audience: str = AUDIENCE) -> ProblemError:
    return ProblemError(
        ProblemType.UNAUTHENTICATED,
        f"send Authorization: Bearer with a token of the audience {audience}",
        headers={"WWW-Authenticate": 'Bearer realm="agentjobs"'},
    )
