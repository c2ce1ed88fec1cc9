"""The operator's own keys: made at first start, kept in a Secret, their public halves shown.

Signatures are those of Standard Webhooks 1.0.0 over `id.timestamp.body`: Ed25519 (`v1a`), and
HMAC-SHA256 (`v1`) where the platform has put a secret beside the key. Each event is signed with all
keys that are there, so that a key can be changed without a moment in which receivers know none.
"""

import base64
import binascii
import hashlib
import hmac
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from agentjobs.kube import CONFIGMAPS, SECRETS, ConflictError, Kube, NotFoundError

log = logging.getLogger(__name__)
SECRET = "agentjobs-signing-key"  # noqa: S105 - a name
PRIVATE_PREFIX = "whsk_"
PUBLIC_PREFIX = "whpk_"
SHARED_PREFIX = "whsec_"
FIELD = "ed25519"
"""Begins the names of the Secret's fields that hold keys; it is the name of the first one."""
SHARED_FIELD = "hmac"
"""Begins the names of the Secret's fields that hold secrets which receivers share."""
SHARED_BYTES = range(24, 65)
"""What Standard Webhooks asks of a shared secret."""
MOST_KEYS = 4
"""Of each kind: a rotation needs two."""


@dataclass(frozen=True, slots=True)
class Signer:
    """Signs events. No key appears in a representation of it."""

    keys: Mapping[str, Ed25519PrivateKey] = field(repr=False)
    """By their names, newest first."""
    secrets: tuple[bytes, ...] = field(default=(), repr=False)

    @classmethod
    def from_secret(cls, fields: Mapping[str, str]) -> "Signer":
        """Read the decoded fields of the Secret; of two keys the later name is the newer one.

        :raises ValueError: there is no key, or something else in its place; never with its text.
        """
        names = sorted(fields, reverse=True)
        keys = {name: _private_key(name, fields[name]) for name in names if name.startswith(FIELD)}
        shared = [_shared(n, fields[n]) for n in names if n.startswith(SHARED_FIELD)]
        if not keys:
            raise ValueError(f"there is no {FIELD} key; delete the Secret to get a new one")
        if max(len(keys), len(shared)) > MOST_KEYS:
            raise ValueError(f"there are more than {MOST_KEYS} keys of a kind; take old ones out")
        return cls(keys, tuple(shared))

    def headers(self, event_id: str, timestamp: int, body: bytes) -> dict[str, str]:
        """The Standard Webhooks headers of one try.

        :param timestamp: of the try, in whole seconds since 1970.
        """
        signed = f"{event_id}.{timestamp}.".encode() + body
        signatures = [("v1a", key.sign(signed)) for key in self.keys.values()]
        signatures += [("v1", hmac.digest(each, signed, hashlib.sha256)) for each in self.secrets]
        return {
            "webhook-id": event_id,
            "webhook-timestamp": str(timestamp),
            "webhook-signature": " ".join(
                f"{version},{base64.b64encode(signature).decode()}"
                for version, signature in signatures
            ),
        }

    def public(self) -> dict[str, str]:
        """The public halves by name, as Standard Webhooks writes them."""
        return {
            name: PUBLIC_PREFIX + base64.b64encode(key.public_key().public_bytes_raw()).decode()
            for name, key in self.keys.items()
        }


async def load_signer(kube: Kube, namespace: str, known: Signer | None = None) -> Signer:
    """Read the keys, or make one if there is none; two first starts end with one key.

    :param known: what was read before; its public halves are shown already.
    :raises AgentJobError: the Secret can be neither read nor made.
    :raises ValueError: the Secret holds something else.
    """
    try:
        secret = await kube.get(SECRETS, namespace, SECRET)
    except NotFoundError:
        secret = await _make(kube, namespace)
    data: dict[str, str] = secret.get("data") or {}
    try:
        signer = Signer.from_secret({name: _text(value) for name, value in data.items()})
    except ValueError as error:
        raise ValueError(f"Secret {namespace}/{SECRET}: {error}") from error
    if known is None or known.public() != signer.public():
        await _publish(kube, namespace, signer.public())
    return signer


def _private_key(name: str, text: str) -> Ed25519PrivateKey:
    try:
        return Ed25519PrivateKey.from_private_bytes(_decoded(PRIVATE_PREFIX, text))
    except ValueError:
        raise ValueError(
            f"{name} is not {PRIVATE_PREFIX} and the base64 of the 32 bytes of an Ed25519 key"
        ) from None


def _shared(name: str, text: str) -> bytes:
    try:
        raw = _decoded(SHARED_PREFIX, text)
    except ValueError:
        raw = b""
    if len(raw) not in SHARED_BYTES:
        raise ValueError(
            f"{name} is not {SHARED_PREFIX} and the base64 of {SHARED_BYTES.start} to "
            f"{SHARED_BYTES.stop - 1} bytes"
        )
    return raw


def _decoded(prefix: str, text: str) -> bytes:
    if not text.startswith(prefix):
        raise ValueError(prefix)
    return base64.b64decode(text.removeprefix(prefix).strip(), validate=True)


def _text(value: str) -> str:
    """What a field of a Secret holds; empty where it is no text."""
    try:
        return base64.b64decode(value).decode("ascii")
    except (binascii.Error, UnicodeDecodeError):
        return ""


async def _make(kube: Kube, namespace: str) -> dict[str, object]:
    seed = Ed25519PrivateKey.generate().private_bytes_raw()
    text = PRIVATE_PREFIX + base64.b64encode(seed).decode()
    body = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": SECRET, "namespace": namespace},
        "type": "Opaque",
        "data": {FIELD: base64.b64encode(text.encode()).decode()},
    }
    try:
        made = await kube.create(SECRETS, namespace, body)
    except ConflictError:
        return await kube.get(SECRETS, namespace, SECRET)
    log.info("a signing key was made: Secret %s/%s", namespace, SECRET)
    return made


async def _publish(kube: Kube, namespace: str, keys: Mapping[str, str]) -> None:
    """Show the public halves, and none but those, to whoever verifies."""
    try:
        shown = (await kube.get(CONFIGMAPS, namespace, SECRET)).get("data") or {}
    except NotFoundError:
        meta = {"name": SECRET, "namespace": namespace}
        body = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta, "data": keys}
        try:
            await kube.create(CONFIGMAPS, namespace, body)
        except ConflictError:
            shown = {}
        else:
            return
    if shown != keys:
        retired = dict.fromkeys(set(shown) - set(keys))
        await kube.patch(CONFIGMAPS, namespace, SECRET, {"data": {**keys, **retired}})
        log.info("public signing keys are shown: %s", ", ".join(keys))
