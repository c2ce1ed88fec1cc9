"""The operator's own Ed25519 key: made at first start, kept in a Secret, its public half shown.

Signatures are those of Standard Webhooks 1.0.0, `v1a`: Ed25519 over `id.timestamp.body`.
"""

import base64
import logging
from dataclasses import dataclass

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from agentjobs.kube import CONFIGMAPS, SECRETS, ConflictError, Kube, NotFoundError

log = logging.getLogger(__name__)
SECRET = "agentjobs-signing-key"  # noqa: S105 - a name
PRIVATE_PREFIX = "whsk_"
PUBLIC_PREFIX = "whpk_"
FIELD = "ed25519"


@dataclass(frozen=True, slots=True)
class Signer:
    """Signs events. The key appears in no representation of it."""

    key: Ed25519PrivateKey

    def headers(self, event_id: str, timestamp: int, body: bytes) -> dict[str, str]:
        """The Standard Webhooks headers of one try.

        :param timestamp: of the try, in whole seconds since 1970.
        """
        signed = f"{event_id}.{timestamp}.".encode() + body
        signature = base64.b64encode(self.key.sign(signed)).decode()
        return {
            "webhook-id": event_id,
            "webhook-timestamp": str(timestamp),
            "webhook-signature": f"v1a,{signature}",
        }

    def public(self) -> str:
        """The public half, as Standard Webhooks writes it."""
        raw = self.key.public_key().public_bytes_raw()
        return PUBLIC_PREFIX + base64.b64encode(raw).decode()


async def load_signer(kube: Kube, namespace: str) -> Signer:
    """Read the key, or make it if there is none; two first starts end with one key.

    :raises KubeError: the Secret can be neither read nor made.
    :raises ValueError: the Secret holds something else.
    """
    try:
        secret = await kube.get(SECRETS, namespace, SECRET)
    except NotFoundError:
        secret = await _make(kube, namespace)
    text = base64.b64decode((secret.get("data") or {}).get(FIELD, "")).decode()
    if not text.startswith(PRIVATE_PREFIX):
        raise ValueError(
            f"Secret {namespace}/{SECRET} has no {FIELD} key; delete it to get a new one"
        )
    seed = base64.b64decode(text.removeprefix(PRIVATE_PREFIX))
    signer = Signer(Ed25519PrivateKey.from_private_bytes(seed))
    await _publish(kube, namespace, signer)
    return signer


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


async def _publish(kube: Kube, namespace: str, signer: Signer) -> None:
    """Show the public half to whoever verifies."""
    data = {FIELD: signer.public()}
    meta = {"name": SECRET, "namespace": namespace}
    body = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta, "data": data}
    try:
        await kube.create(CONFIGMAPS, namespace, body)
    except ConflictError:
        await kube.patch(CONFIGMAPS, namespace, SECRET, {"data": data})
