"""JSON as it is sent, received and kept: orjson, and for what it refuses the standard library.

What users may nest is refused above a hundred levels, but only the core can say so to them. Until
then an object of any depth that the API server stores must pass through without harm: orjson gives
up at 254 levels when it writes and at 1024 when it reads, kopf reads with the standard library.
"""

import json
import sys
from typing import Any

import orjson

DEEPEST = 10_000
"""The API server's own reader gives up there (Go's encoding/json)."""
FRAMES = 2


def loads(content: bytes) -> Any:
    """Read JSON.

    :raises ValueError: it is none.
    """
    try:
        return orjson.loads(content)
    except orjson.JSONDecodeError:
        return json.loads(content)


def dumps(value: Any) -> bytes:
    """Write JSON, compactly.

    :raises TypeError: the value holds something that JSON has not.
    """
    try:
        return orjson.dumps(value)
    except TypeError:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def allow_depth() -> None:
    """Let the standard library read and write whatever the API server does."""
    sys.setrecursionlimit(max(sys.getrecursionlimit(), FRAMES * DEEPEST))


def parse(content: bytes) -> Any:
    """Read JSON that a stranger sent: nothing deeper than orjson takes, no lone surrogates.

    Orjson is the stricter reader. But it makes floats of integers beyond 64 bits, which are other
    numbers, and takes the last of two equal members, where another reader may take the first.

    :raises ValueError: it is none.
    """
    orjson.loads(content)
    try:
        return json.loads(content, object_pairs_hook=_members)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        raise ValueError("an object has two members of the same name")
    return members
