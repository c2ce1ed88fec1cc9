"""Cursors as callers get them and give them back."""

from typing import Any

from agentjobs.contract.problems import ProblemType
from agentjobs.domain.sealed import BrokenSealError, seal, unseal
from agentjobs.gateway.keys import Keys
from agentjobs.gateway.problems import ProblemError


def seal_cursor(keys: Keys, purpose: str, value: Any) -> str:
    """Make a cursor that is good for one purpose only."""
    return seal(keys.state, purpose, value)


def open_cursor(keys: Keys, purpose: str, token: str) -> Any:
    """Read a cursor.

    :raises ProblemError: it is not ours, or for something else (400).
    """
    try:
        return unseal(keys.state, purpose, token)
    except BrokenSealError as error:
        raise ProblemError(
            ProblemType.INVALID_CURSOR, "use a cursor as it was given, for the same thing"
        ) from error
