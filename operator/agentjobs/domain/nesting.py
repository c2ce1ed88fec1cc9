"""How deeply JSON may be nested: recursive readers and writers give up, some of them hard."""

from typing import Any

from agentjobs.domain.errors import InvalidSpecError

MAX_DEPTH = 100
"""A pod template is some twenty levels deep; orjson writes 254, Python's json reads about 1000."""


def check_depth(value: Any, path: str) -> None:
    """Refuse a value that nobody can handle safely.

    :raises InvalidSpecError: it is nested more deeply than MAX_DEPTH.
    """
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [item for each in level for item in _items(each)]
        if not level:
            return
    raise InvalidSpecError(f"{path}: nested more than {MAX_DEPTH} levels deep")


def _items(value: Any) -> Any:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()
