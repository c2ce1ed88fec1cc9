"""Status values: conditions that keep their times, the state derived, the budget kept."""

import json
import re
from datetime import datetime
from typing import Any

from agentjobs.api.agentjob import AgentJobStatus, Attempt, Result, ResultSource
from agentjobs.api.base import Condition, ConditionStatus
from agentjobs.api.names import (
    CONDITION_MESSAGE_BYTES,
    INLINE_RESULT_BYTES,
    STATUS_BUDGET_BYTES,
    SUMMARY_CHARACTERS,
    CauseCode,
    ConditionType,
    Reason,
    State,
)
from agentjobs.domain.said import is_marked
from agentjobs.domain.texts import cut, cut_bytes, one_line

SUMMARY_MARK = "::summary "
ESCAPED_BY_GO = re.compile("[<>&\u2028\u2029]")
ASKED = frozenset(
    {
        CauseCode.STOPPED,
        CauseCode.DECLINED,
        CauseCode.DEADLINE_EXCEEDED,
        CauseCode.PENDING_DEADLINE_EXCEEDED,
    }
)
"""Endings by request or deadline; while they are carried out the state is `stopping`."""
REASON_OF_STATE = {
    State.DONE: Reason.COMPLETED,
    State.FAILED: Reason.FAILED,
    State.CANCELLED: Reason.CANCELLED,
    State.TIMED_OUT: Reason.TIMED_OUT,
}


def with_condition(
    status: AgentJobStatus,
    kind: ConditionType,
    *,
    holds: bool,
    reason: Reason,
    now: datetime,
    generation: int,
    message: str = "",
) -> AgentJobStatus:
    """Set a condition; its transition time changes only with its status."""
    value = ConditionStatus.TRUE if holds else ConditionStatus.FALSE
    old = condition(status, kind)
    new = Condition(
        type=kind,
        status=value,
        reason=reason,
        message=cut_bytes(one_line(message), CONDITION_MESSAGE_BYTES),
        last_transition_time=old.last_transition_time if old and old.status == value else now,
        observed_generation=generation,
    )
    if old and (old.status, old.reason, old.message) == (new.status, new.reason, new.message):
        return status
    others = tuple(c for c in status.conditions if c.type != kind)
    return status.model_copy(update={"conditions": (*others, new)})


def condition(status: AgentJobStatus, kind: ConditionType) -> Condition | None:
    """The condition of that type, if it was ever set."""
    return next((c for c in status.conditions if c.type == kind), None)


def live_state(status: AgentJobStatus, *, running: bool, asks: bool = False) -> State:
    """The state of a job that is not over (R-STATE-DERIVED)."""
    if status.ending and status.ending.code in ASKED and status.attempts:
        return State.STOPPING
    if not running:
        return State.QUEUED
    return State.INPUT_REQUIRED if asks else State.RUNNING


def current_attempt(status: AgentJobStatus) -> Attempt | None:
    """The last attempt that was claimed, be it over or not."""
    return status.attempts[-1] if status.attempts else None


def has_begun(attempt: Attempt) -> bool:
    """Whether the tool began in an attempt, or nobody can say that it did not."""
    return bool(attempt.ran) or attempt.started_at is not None


def repeatable(status: AgentJobStatus) -> bool:
    """Whether the tool says that it does not mind to be begun again."""
    return status.tool is not None and status.tool.repeatable


def with_attempt(status: AgentJobStatus, **changes: Any) -> AgentJobStatus:
    """Change the current attempt."""
    current = current_attempt(status)
    if current is None:
        return status
    earlier = (status.attempts or ())[:-1]
    changed = current.model_copy(update=changes)
    return status.model_copy(update={"attempts": (*earlier, changed)})


def result_of(source: ResultSource, text: str) -> Result | None:
    """What the tool handed in, cut to what is kept inline."""
    if not text:
        return None
    kept = cut_bytes(text, INLINE_RESULT_BYTES)
    size = len(text.encode("utf-8", "replace"))
    return Result(source=source, text=kept, bytes=size, truncated=kept != text)


def summary_of(text: str, said: str = "") -> str | None:
    """One line about a result (R-EVENT): its `summary`, a `::summary` line, else its first line.

    :param said: what the tool said of it elsewhere: reported, or printed on such a line.
    """
    return cut(one_line(_summary(text, said)), SUMMARY_CHARACTERS) or None


def fit(status: AgentJobStatus) -> AgentJobStatus:
    """Hold the status to its budget, always: the result is cut first, then long messages."""
    while size_of(status) > STATUS_BUDGET_BYTES:
        shorter = _shorter(status)
        if shorter is None:
            break
        status = shorter
    return status


def size_of(status: AgentJobStatus) -> int:
    """Bytes of the status as the API server writes it: Go's JSON escapes a few characters more."""
    text = json.dumps(status.to_json(), ensure_ascii=False, separators=(",", ":"))
    return len(ESCAPED_BY_GO.sub("\\\\u0000", text).encode())


def _summary(text: str, said: str) -> str:
    stripped = text.strip()
    if stripped.startswith("{"):
        try:
            value = json.loads(stripped).get("summary")
        except (ValueError, RecursionError):
            value = None
        if isinstance(value, str):
            return value
    lines = stripped.splitlines()
    marked = [line for line in lines if line.startswith(SUMMARY_MARK)]
    if marked:
        return marked[-1].removeprefix(SUMMARY_MARK)
    return said or next((line for line in lines if not is_marked(line)), "")


def _shorter(status: AgentJobStatus) -> AgentJobStatus | None:
    """Cut the longest text by half; None when nothing is left to cut."""
    result = status.result
    if result and result.text:
        half = cut_bytes(result.text, len(result.text.encode()) // 2)
        kept = half if len(result.text) > 1 else None
        return status.model_copy(
            update={"result": result.model_copy(update={"text": kept, "truncated": True})}
        )
    if status.waiting and len(status.waiting.message) > 1:
        message = cut(status.waiting.message, len(status.waiting.message) // 2)
        return status.model_copy(
            update={"waiting": status.waiting.model_copy(update={"message": message})}
        )
    longest = max(status.conditions, key=lambda c: len(c.message), default=None)
    if longest is None or len(longest.message) <= 1:
        return None
    shorter = longest.model_copy(
        update={"message": cut(longest.message, len(longest.message) // 2)}
    )
    conditions = tuple(shorter if c is longest else c for c in status.conditions)
    return status.model_copy(update={"conditions": conditions})


def urgent(old: AgentJobStatus, new: AgentJobStatus) -> bool:
    """Whether somebody waits for this change; others are written at leisure.

    A pod's name on record says that a tool may have begun: it goes as soon as it did not.
    """
    return _essence(old) != _essence(new) or bool(old.pod_name and not new.pod_name)


def _essence(status: AgentJobStatus) -> tuple[object, ...]:
    return (
        status.state,
        status.waiting and status.waiting.code,
        status.started_at,
        status.ending,
        status.job_name,
        status.finished_at,
        status.deadline_at,
        status.warnings,
        tuple((c.type, c.status, c.reason) for c in status.conditions),
    )
