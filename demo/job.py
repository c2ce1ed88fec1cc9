"""What the demo reads of an AgentJob."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

ENDS = frozenset({"done", "failed", "cancelled", "timed_out"})


@dataclass(frozen=True)
class Job:
    """One AgentJob as it was last read."""

    name: str
    state: str
    waiting: str
    """Why it is queued: a code, and a sentence with the object to look at."""
    pod_name: str
    pod_phase: str
    created: datetime
    finished: datetime | None
    cause: str
    summary: str
    result: str
    result_source: str

    @property
    def over(self) -> bool:
        """Whether it has ended, one way or the other."""
        return self.state in ENDS

    def seconds(self, now: datetime) -> int:
        """Return how long it has taken until now, or until it ended."""
        return max(0, int(((self.finished or now) - self.created).total_seconds()))


def from_object(body: Mapping[str, Any]) -> Job:
    """Read an AgentJob as the API server returns it; nearly all of its status may be absent."""
    status = body.get("status", {})
    result = status.get("result", {})
    finished = status.get("finishedAt")
    return Job(
        name=body["metadata"]["name"],
        state=status.get("state", "created"),
        waiting=_joined(status.get("waiting")),
        pod_name=status.get("podName", ""),
        pod_phase=status.get("podPhase", ""),
        created=datetime.fromisoformat(body["metadata"]["creationTimestamp"]),
        finished=datetime.fromisoformat(finished) if finished else None,
        cause=_joined(status.get("cause")),
        summary=status.get("summary", ""),
        result=result.get("text", ""),
        result_source=result.get("source", ""),
    )


def _joined(reason: Mapping[str, Any] | None) -> str:
    parts = (reason or {}).get("code", ""), (reason or {}).get("message", "")
    return ": ".join(part for part in parts if part)
