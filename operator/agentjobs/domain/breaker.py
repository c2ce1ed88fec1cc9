"""A circuit breaker: a destination that fails time after time is left alone for a while.

It is kept for each destination of each namespace. What one tenant's receiver does never holds back
the events of another, though both may go to the same host.
"""

from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from enum import StrEnum

from agentjobs.domain.callbacks import LARGEST_RETRY_AFTER, Outcome

OPENS_AFTER = 5
"""Failures in a row, of whichever events."""
FIRST_PAUSE_SECONDS = 10.0
LARGEST_PAUSE_SECONDS = 600.0


class Standing(StrEnum):
    """What may be sent to a destination."""

    CLOSED = "closed"
    """All that is due."""
    OPEN = "open"
    """Nothing."""
    HALF_OPEN = "half_open"
    """One try, whose outcome decides."""


@dataclass(frozen=True, slots=True)
class Breaker:
    """What is remembered of a destination that failed lately; of all others, nothing."""

    failures: int = 0
    """In a row."""
    pauses: int = 0
    """In a row."""
    open_until: datetime | None = None

    def standing(self, now: datetime) -> Standing:
        """What may be sent now."""
        if self.open_until is None:
            return Standing.CLOSED
        return Standing.OPEN if now < self.open_until else Standing.HALF_OPEN

    def after(self, outcome: Outcome) -> "Breaker":
        """Return the breaker after one more try."""
        if outcome.works is None:
            return self
        if outcome.works:
            return Breaker()
        failures = self.failures + 1
        if self.standing(outcome.at) is Standing.OPEN:
            # It was sent before the breaker opened, and says nothing new.
            return replace(self, failures=failures)
        asked = min(outcome.retry_after or 0.0, LARGEST_RETRY_AFTER)
        if failures < OPENS_AFTER and self.open_until is None:
            until = outcome.at + timedelta(seconds=asked) if asked else None
            return Breaker(failures, open_until=until)
        pause = min(FIRST_PAUSE_SECONDS * 2 ** min(self.pauses, 20), LARGEST_PAUSE_SECONDS)
        until = outcome.at + timedelta(seconds=max(pause, asked))
        return Breaker(failures, self.pauses + 1, until)
