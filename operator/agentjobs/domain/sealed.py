"""Cursors: small values that callers carry for us and cannot change."""

import base64
import binascii
import hmac
import json
from collections.abc import Sequence
from typing import Any

MAC_BYTES = 16
LONGEST = 1024


class BrokenSealError(ValueError):
    """Not sealed by us, or for something else."""


def seal(keys: Sequence[bytes], purpose: str, value: Any) -> str:
    """Return a token that only `unseal` with the same purpose accepts.

    :param keys: the newest first; older ones still open what they sealed.
    """
    content = json.dumps(value, separators=(",", ":")).encode()
    return _encode(_mac(keys[0], purpose, content) + content)


def unseal(keys: Sequence[bytes], purpose: str, token: str) -> Any:
    """Return what was sealed.

    :raises BrokenSealError: it was not, or not for this purpose.
    """
    if len(token) > LONGEST or not token.isascii():
        raise BrokenSealError(purpose)
    try:
        raw = base64.b64decode(token + "=" * (-len(token) % 4), altchars=b"-_", validate=True)
    except binascii.Error as error:
        raise BrokenSealError(purpose) from error
    mac, content = raw[:MAC_BYTES], raw[MAC_BYTES:]
    if _encode(raw) != token:
        # Two spellings of the same bytes: only ours is taken.
        raise BrokenSealError(purpose)
    if not any(hmac.compare_digest(mac, _mac(key, purpose, content)) for key in keys):
        raise BrokenSealError(purpose)
    return json.loads(content)


def _encode(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).decode().rstrip("=")


def _mac(key: bytes, purpose: str, content: bytes) -> bytes:
    return hmac.digest(key, purpose.encode() + b"\0" + content, "sha256")[:MAC_BYTES]
