"""Signatures of Standard Webhooks 1.0.0: Ed25519 (`v1a`) and HMAC-SHA256 (`v1`)."""

import base64
import binascii
import hashlib
import hmac
from collections.abc import Iterable
from typing import Final

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

PUBLIC_PREFIX: Final = "whpk_"
SECRET_PREFIX: Final = "whsec_"  # noqa: S105 - how one begins
ASYMMETRIC: Final = "v1a"
SYMMETRIC: Final = "v1"
MOST_SIGNATURES: Final = 16
"""In one header; a sender signs with the few keys of a rotation."""
SHORTEST_SECRET: Final = 24
"""Bytes, as the standard asks for."""


class Verifier:
    """Knows the keys of a sender. Any of them may have signed, so that keys can be changed."""

    def __init__(self, keys: Iterable[str] = (), *, secrets: Iterable[str] = ()) -> None:
        """Read the keys.

        :param keys: public Ed25519 keys, `whpk_` and base64.
        :param secrets: shared secrets for HMAC, `whsec_` and base64.
        :raises ValueError: one of them is no key; or there is none at all.
        """
        self._keys = tuple(_public_key(text) for text in keys)
        self._secrets = tuple(_secret(text) for text in secrets)
        if not self._keys and not self._secrets:
            raise ValueError("no key to verify events with; the gateway serves its public keys")

    def signed(self, header: str, content: bytes) -> bool:
        """Whether one of the signatures in a header was made of the content with one of the keys.

        :param header: `webhook-signature`: `v1a,<base64>` and `v1,<base64>`, blanks between them.
        """
        for each in header.split(" ")[:MOST_SIGNATURES]:
            version, _, text = each.partition(",")
            signature = _decoded(text)
            if version == ASYMMETRIC and any(_fits(key, signature, content) for key in self._keys):
                return True
            if version == SYMMETRIC and any(
                hmac.compare_digest(hmac.digest(secret, content, hashlib.sha256), signature)
                for secret in self._secrets
            ):
                return True
        return False


def _fits(key: Ed25519PublicKey, signature: bytes, content: bytes) -> bool:
    try:
        key.verify(signature, content)
    except InvalidSignature:
        return False
    return True


def _public_key(text: str) -> Ed25519PublicKey:
    raw = _decoded(text.removeprefix(PUBLIC_PREFIX))
    if not text.startswith(PUBLIC_PREFIX):
        raise ValueError(f"a public key begins with {PUBLIC_PREFIX}")
    try:
        return Ed25519PublicKey.from_public_bytes(raw)
    except ValueError as error:
        raise ValueError(f"{PUBLIC_PREFIX}… is no Ed25519 key: {error}") from error


def _secret(text: str) -> bytes:
    raw = _decoded(text.removeprefix(SECRET_PREFIX))
    if not text.startswith(SECRET_PREFIX) or len(raw) < SHORTEST_SECRET:
        # Without the text: it may be a secret all the same.
        raise ValueError(
            f"a secret is {SECRET_PREFIX} and the base64 of at least {SHORTEST_SECRET} bytes"
        )
    return raw


def _decoded(text: str) -> bytes:
    """The bytes of base64; none where it is not."""
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return b""
