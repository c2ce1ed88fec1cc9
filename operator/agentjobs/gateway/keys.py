"""The gateway's own keys: one that names jobs and is never changed, one that seals cursors."""

import base64
import binascii
import contextlib
import logging
import secrets
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from agentjobs.contract.problems import ProblemType
from agentjobs.domain.errors import AgentJobError
from agentjobs.expiring import Expiring
from agentjobs.gateway.problems import ProblemError, try_later
from agentjobs.kube import SECRETS, ConflictError, Kube, NotFoundError

log = logging.getLogger(__name__)
T = TypeVar("T")
SECRET = "agentjobs-gateway-keys"  # noqa: S105 - a name
NAME, STATE, OLD_STATE = "name", "state", "state-previous"
KEY_BYTES = 32
REREAD_SECONDS = 5.0
"""How often the keys are read again at most, when a cursor does not open."""


class UnusableKeysError(AgentJobError):
    """The Secret cannot be used as it is; the message says why, and what helps."""


@dataclass(frozen=True, slots=True)
class Keys:
    """Keys of this installation; they appear in no representation."""

    name: bytes = field(repr=False)
    """Names jobs. Under another one the same Idempotency-Key would start a second job."""
    state: tuple[bytes, ...] = field(repr=False)
    """Seal cursors, the newest first. They can be changed: old cursors are refused then."""


def keys_of(secret: Mapping[str, Any], where: str) -> Keys:
    """Read a Secret that has a name key.

    :param where: what the Secret is called.
    :raises UnusableKeysError: a key is no key.
    """
    data = secret.get("data") or {}
    found: dict[str, bytes] = {}
    for name in (NAME, STATE, OLD_STATE):
        try:
            key = base64.b64decode(data.get(name) or "", validate=True)
        except (binascii.Error, ValueError) as error:
            raise UnusableKeysError(f"{where}: field {name} is not base64") from error
        if key and len(key) < KEY_BYTES:
            raise UnusableKeysError(
                f"{where}: field {name} has {len(key)} bytes; a key has {KEY_BYTES} or more. "
                "Restore the Secret from a backup"
            )
        found[name] = key
    state = tuple(key for key in (found[STATE], found[OLD_STATE]) if key)
    # Without one it is derived, so that all replicas have the same without a write.
    return Keys(name=found[NAME], state=state or (b"state\0" + found[NAME],))


async def load_keys(kube: Kube, namespace: str, *, jobs_exist: bool) -> Keys:
    """Read the keys, or make them if there are none; two first starts end with the same ones.

    :param jobs_exist: whether there are AgentJobs that were named by a key.
    :raises UnusableKeysError: a new name key would start jobs twice; or what is there is no key.
    """
    where = f"Secret {namespace}/{SECRET}"
    secret: Mapping[str, Any] = {}
    with contextlib.suppress(NotFoundError):
        secret = await kube.get(SECRETS, namespace, SECRET)
    if not _has(secret, NAME):
        if jobs_exist:
            raise UnusableKeysError(
                f"{where} has no field {NAME}, and AgentJobs with "
                "spec.idempotency exist: with a new key a repeated start would run twice. "
                "Restore the Secret from a backup, or delete these AgentJobs"
            )
        secret = await _make(kube, namespace, secret)
        if not _has(secret, NAME):
            raise UnusableKeysError(f"{where} has no field {NAME}")
    return keys_of(secret, where)


class KeyRing:
    """The keys in use. The name key stays what it was; state keys can be changed meanwhile."""

    def __init__(self, kube: Kube, namespace: str) -> None:
        self._kube = kube
        self._namespace = namespace
        self._where = f"Secret {namespace}/{SECRET}"
        self._latest: Expiring[str, Keys | None] = Expiring(lambda _: REREAD_SECONDS, 1)
        self.keys: Keys | None = None
        """None until they were loaded."""

    async def load(self, *, jobs_exist: bool) -> None:
        """Read or make them, for the first time.

        :raises UnusableKeysError: they cannot be used.
        """
        self.keys = await load_keys(self._kube, self._namespace, jobs_exist=jobs_exist)

    @property
    def current(self) -> Keys:
        """The keys.

        :raises ProblemError: they were not loaded yet (503).
        """
        if self.keys is None:  # pragma: no cover - nobody is served before
            raise try_later(ProblemType.UNAVAILABLE, "the gateway is not ready yet")
        return self.keys

    async def with_cursor(self, read: Callable[[Keys], Awaitable[T]]) -> T:
        """Read with the keys that we have, and if a cursor is not theirs, with those of now.

        Another replica may have sealed it under a state key that was changed since.
        """
        try:
            return await read(self.current)
        except ProblemError as error:
            if error.kind is not ProblemType.INVALID_CURSOR or not await self.refresh():
                raise
        return await read(self.current)

    async def refresh(self) -> bool:
        """Take in state keys that were changed; return whether they were.

        What cannot be read or used leaves the keys as they are.
        """
        latest = await self._latest.get("", self._read)
        if latest is None or self.keys is None or latest.state == self.keys.state:
            return False
        self.keys = Keys(self.keys.name, latest.state)
        log.info("the keys that seal cursors were changed: %s", self._where)
        return True

    async def _read(self) -> Keys | None:
        try:
            latest = keys_of(await self._kube.get(SECRETS, self._namespace, SECRET), self._where)
        except AgentJobError as error:
            log.warning("the keys cannot be read again: %s", error)
            return None
        if self.keys and latest.name != self.keys.name:
            # A replica that starts now gives other names, and a repeated start runs twice.
            log.error(
                "%s: field %s is not what it was when this process began; restore it from a backup",
                self._where,
                NAME,
            )
            return None
        return latest


def _has(secret: Mapping[str, Any], name: str) -> bool:
    return bool((secret.get("data") or {}).get(name))


async def _make(kube: Kube, namespace: str, secret: Mapping[str, Any]) -> Mapping[str, Any]:
    data = {name: _new() for name in (NAME, STATE) if not _has(secret, name)}
    try:
        if secret:
            # Somebody emptied it. Conditional, since another replica may do the same.
            version = secret["metadata"]["resourceVersion"]
            change = {"metadata": {"resourceVersion": version}, "data": data}
            made = await kube.patch(SECRETS, namespace, SECRET, change)
        else:
            body = {
                "apiVersion": "v1",
                "kind": "Secret",
                "metadata": {"name": SECRET, "namespace": namespace},
                "type": "Opaque",
                "data": data,
            }
            made = await kube.create(SECRETS, namespace, body)
    except ConflictError:
        return await kube.get(SECRETS, namespace, SECRET)
    log.info("keys were made: Secret %s/%s", namespace, SECRET)
    return made


def _new() -> str:
    return base64.b64encode(secrets.token_bytes(KEY_BYTES)).decode()
