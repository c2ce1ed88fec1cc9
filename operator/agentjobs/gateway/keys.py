"""The gateway's own keys: one that names jobs and is never changed, one that seals cursors."""

import base64
import contextlib
import logging
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from agentjobs.domain.errors import AgentJobError
from agentjobs.kube import SECRETS, ConflictError, Kube, NotFoundError

log = logging.getLogger(__name__)
SECRET = "agentjobs-gateway-keys"  # noqa: S105 - a name
NAME, STATE, OLD_STATE = "name", "state", "state-previous"
KEY_BYTES = 32


class MissingKeyError(AgentJobError):
    """The name key is gone while jobs that were named by it exist."""


@dataclass(frozen=True, slots=True)
class Keys:
    """Keys of this installation; they appear in no representation."""

    name: bytes = field(repr=False)
    """Names jobs. Under another one the same Idempotency-Key would start a second job."""
    state: tuple[bytes, ...] = field(repr=False)
    """Seal cursors, the newest first. They can be changed: old cursors are refused then."""


async def load_keys(kube: Kube, namespace: str, *, jobs_exist: bool) -> Keys:
    """Read the keys, or make them if there are none; two first starts end with the same ones.

    :param jobs_exist: whether there are AgentJobs that were named by a key.
    :raises MissingKeyError: a new name key would start jobs twice.
    """
    secret: Mapping[str, Any] = {}
    with contextlib.suppress(NotFoundError):
        secret = await kube.get(SECRETS, namespace, SECRET)
    if not (secret.get("data") or {}).get(NAME):
        if jobs_exist:
            raise MissingKeyError(
                f"Secret {namespace}/{SECRET} has no field {NAME}, and AgentJobs with "
                "spec.idempotency exist: with a new key a repeated start would run twice. "
                "Restore the Secret from a backup, or delete these AgentJobs"
            )
        secret = await _make(kube, namespace, secret)
    return _keys(secret)


async def _make(kube: Kube, namespace: str, secret: Mapping[str, Any]) -> Mapping[str, Any]:
    data = {NAME: _new(), STATE: _new()}
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


def _keys(secret: Mapping[str, Any]) -> Keys:
    data = secret.get("data") or {}
    name = base64.b64decode(data[NAME])
    state = [base64.b64decode(data[field]) for field in (STATE, OLD_STATE) if data.get(field)]
    if not state:
        # Derived, so that all replicas have the same one without a write.
        state = [b"state\0" + name]
    return Keys(name=name, state=tuple(state))
