"""The difference of two JSON objects as a merge patch (RFC 7386)."""

from collections.abc import Mapping
from typing import Any


def merge_patch(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Return the patch that makes `new` of `old`; empty if they are equal.

    Lists are replaced as a whole. What is absent from `new` is removed.
    """
    patch: dict[str, Any] = {}
    for key, value in new.items():
        before = old.get(key)
        if before == value:
            continue
        if isinstance(before, Mapping) and isinstance(value, Mapping):
            patch[key] = merge_patch(before, value)
        else:
            patch[key] = value
    patch |= dict.fromkeys(key for key in old if key not in new)
    return patch
