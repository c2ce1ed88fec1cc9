"""Virtual time: it stands still until it is moved."""

from datetime import UTC, datetime, timedelta

BEGIN = datetime(2026, 3, 1, 12, 0, 0, tzinfo=UTC)


class Clock:
    def __init__(self) -> None:
        self._passed = 0.0

    def now(self) -> datetime:
        return BEGIN + timedelta(seconds=self._passed)

    def monotonic(self) -> float:
        return self._passed

    def move(self, seconds: float) -> None:
        self._passed += seconds

    def stamp(self, later: float = 0) -> str:
        """Now as metav1.Time writes it: whole seconds."""
        return (self.now() + timedelta(seconds=later)).strftime("%Y-%m-%dT%H:%M:%SZ")


def moment(text: str) -> datetime:
    return datetime.fromisoformat(text)
