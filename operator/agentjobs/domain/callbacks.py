"""Events to the agent runtime: which are owed, what they say, when they are tried again.

The outbox is part of the terminal status write, so what is owed survives any crash; an event is
marked as delivered only after its receiver took it. At least once, the same id every time
(R-EVENT, R-CALLBACK).
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from enum import StrEnum
from http import HTTPStatus
from typing import Any

from agentjobs.api.agentjob import (
    AgentJob,
    AgentJobStatus,
    Delivery,
    DeliveryState,
    Outbox,
    Progress,
)
from agentjobs.api.base import format_time
from agentjobs.api.names import API_VERSION, SUMMARY_CHARACTERS, EventType, State
from agentjobs.domain.questions import QuestionView
from agentjobs.domain.texts import cut, one_line

FIRST_RETRY_SECONDS = 5
RETRY_FACTOR = 3
LARGEST_RETRY_SECONDS = 6 * 3600
RETRY_WINDOW = timedelta(hours=72)
"""Counted from the first try: an operator that was away does not use it up."""
LARGEST_RETRY_AFTER = 3600.0
DELETION_PATIENCE = timedelta(seconds=60)
"""How long the deletion of an AgentJob waits for what is owed."""
ERROR_CHARACTERS = 256
JITTER = 0.2

EVENT_OF_STATE = {
    State.DONE: EventType.COMPLETED,
    State.FAILED: EventType.COMPLETED,
    State.CANCELLED: EventType.CANCELLED,
    State.TIMED_OUT: EventType.TIMED_OUT,
}


class Reply(StrEnum):
    """What became of one try."""

    TAKEN = "taken"
    """2xx."""
    GONE = "gone"
    """410: the receiver wants no more."""
    FAILED = "failed"
    """Anything else; tried again."""
    HELD = "held"
    """It was due and not sent: nothing is, to a destination that fails time after time."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one try to deliver an event."""

    reply: Reply
    at: datetime
    error: str = ""
    retry_after: float | None = None
    """Seconds that the receiver asked for, or that an event is held back."""
    works: bool | None = None
    """Whether somebody is there who can take events; None: the try says nothing of that."""


def answered(code: int, retry_after: str, now: datetime) -> Outcome:
    """What a receiver's answer means.

    :param code: HTTP status code.
    :param retry_after: the header of that name (RFC 9110, 10.2.3), empty where there is none.
    """
    if HTTPStatus.OK <= code < HTTPStatus.MULTIPLE_CHOICES:
        return Outcome(Reply.TAKEN, now, works=True)
    text = f"the receiver answered {code}"
    if code == HTTPStatus.GONE:
        return Outcome(Reply.GONE, now, text, works=True)
    if HTTPStatus.MULTIPLE_CHOICES <= code < HTTPStatus.BAD_REQUEST:
        text = f"{text}, a redirect; redirects are not followed"
        return Outcome(Reply.FAILED, now, text, works=True)
    works = code < HTTPStatus.INTERNAL_SERVER_ERROR and code != HTTPStatus.TOO_MANY_REQUESTS
    asked = _seconds_asked(retry_after.strip(), now)
    return Outcome(Reply.FAILED, now, text, asked, works=works)


def _seconds_asked(retry_after: str, now: datetime) -> float | None:
    """How long a receiver wants to be left alone: whole seconds, or until a date."""
    if retry_after.isdecimal():
        return float(retry_after)
    try:
        until = parsedate_to_datetime(retry_after)
    except (ValueError, OverflowError):
        return None
    # A date without a zone is one of HTTP's old forms, which are in GMT too.
    until = until if until.tzinfo else until.replace(tzinfo=UTC)
    return max((until - now).total_seconds(), 0.0)


def outbox_of(job: AgentJob, status: AgentJobStatus, now: datetime) -> Outbox | None:
    """What the runtime must be told of this end; None where it did not ask."""
    callback = job.spec.callback
    if callback is None or status.state is None or status.finished_at is None:
        return None
    kind = EVENT_OF_STATE[status.state]
    if callback.events is not None and kind not in callback.events:
        return None
    delivery = Delivery(
        id=f"evt_{job.metadata.uid}_{kind.value}",
        type=kind,
        time=status.finished_at,
        next_attempt_at=now,
    )
    return Outbox(deliveries=(delivery,))


def event_body(
    job: AgentJob, delivery: Delivery, gateway_url: str, questions: Iterable[QuestionView] = ()
) -> bytes | None:
    """The event as a structured CloudEvent 1.0.2, byte for byte the same on every try.

    :param gateway_url: where results are read; empty: the event has no URLs.
    :param questions: what the job asks.
    :return: None: what it would tell is not known any more.
    """
    meta = job.metadata
    job_id = f"{meta.name}.{meta.namespace}"
    if delivery.type is EventType.INPUT_REQUIRED:
        asked = next((each for each in questions if delivery.id.endswith(f"_{each.uid}")), None)
        told = _question_told(asked) if asked else None
    elif delivery.type is EventType.PROGRESS:
        told = _progress_told(job.status.progress, delivery.time)
    else:
        told = _end_told(job.status)
    if told is None:
        return None
    path = "inputs" if delivery.type is EventType.INPUT_REQUIRED else "result"
    data: dict[str, Any] = {
        "job_id": job_id,
        "tool": job.spec.tool_ref.name if job.spec.tool_ref else None,
        **told,
        "summary": cut(one_line(told["summary"]), SUMMARY_CHARACTERS),
    }
    if gateway_url and delivery.type is not EventType.PROGRESS:
        data[f"{path}_url"] = f"{gateway_url.rstrip('/')}/v1/jobs/{job_id}/{path}"
    event = {
        "specversion": "1.0",
        "id": delivery.id,
        "source": f"/apis/{API_VERSION}/namespaces/{meta.namespace}/agentjobs/{meta.name}",
        "type": delivery.type.value,
        "subject": job_id,
        "time": format_time(delivery.time),
        "datacontenttype": "application/json",
        "data": data,
    }
    return json.dumps(event, ensure_ascii=False, separators=(",", ":")).encode()


def _end_told(status: AgentJobStatus) -> dict[str, Any]:
    return {
        "status": status.state.value if status.state else None,
        "summary": status.summary or (status.cause.message if status.cause else ""),
        "cause": status.cause.code.value if status.cause else None,
    }


def _question_told(asked: QuestionView) -> dict[str, Any]:
    """What is told of a question: the same, whatever the job does meanwhile."""
    return {
        "status": State.INPUT_REQUIRED.value,
        "summary": asked.prompt,
        "cause": None,
        "question": asked.key,
    }


def _progress_told(progress: Progress | None, at: datetime) -> dict[str, Any] | None:
    """What is told of progress, as long as no later one has taken its place."""
    if progress is None or progress.at != at:
        return None
    told = {"status": State.RUNNING.value, "summary": progress.message or "", "cause": None}
    return told if progress.percent is None else told | {"percent": progress.percent}


def after(delivery: Delivery, outcome: Outcome) -> Delivery:
    """The delivery after one more try, or after it was held back."""
    held = outcome.reply is Reply.HELD
    attempts, holds = delivery.attempts + (not held), delivery.holds + held
    first_at = delivery.first_attempt_at or outcome.at
    tried = {
        "attempts": attempts,
        "holds": holds,
        "first_attempt_at": first_at,
        "next_attempt_at": None,
        "last_error": None,
    }
    if outcome.reply is Reply.TAKEN:
        done = {"state": DeliveryState.DELIVERED, "delivered_at": outcome.at}
        return delivery.model_copy(update=tried | done)
    error = cut(one_line(outcome.error), ERROR_CHARACTERS)
    seconds = pause(delivery.id, attempts + holds, outcome.retry_after)
    next_at = outcome.at + timedelta(seconds=seconds)
    if outcome.reply is Reply.GONE or next_at > first_at + RETRY_WINDOW:
        given_up = {"state": DeliveryState.GIVEN_UP, "last_error": error}
        return delivery.model_copy(update=tried | given_up)
    return delivery.model_copy(update=tried | {"next_attempt_at": next_at, "last_error": error})


def pause(event_id: str, times: int, retry_after: float | None) -> float:
    """Seconds until the next try: growing, spread by the event's id, and no less than asked for."""
    grown: int = FIRST_RETRY_SECONDS * RETRY_FACTOR ** min(times - 1, 20)
    base = min(grown, LARGEST_RETRY_SECONDS)
    spread = hashlib.sha256(f"{event_id}/{times}".encode()).digest()[0] / 255
    asked = min(retry_after or 0.0, LARGEST_RETRY_AFTER)
    return max(base * (1 - JITTER + 2 * JITTER * spread), asked)


def pending(deliveries: Sequence[Delivery]) -> list[Delivery]:
    """What is still owed."""
    return [delivery for delivery in deliveries if delivery.state is DeliveryState.PENDING]


def give_up(delivery: Delivery, why: str) -> Delivery:
    """Stop trying, for the record."""
    return delivery.model_copy(
        update={"state": DeliveryState.GIVEN_UP, "next_attempt_at": None, "last_error": why}
    )
