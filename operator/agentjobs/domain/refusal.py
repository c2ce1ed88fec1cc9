"""What a refusal of the API server means for a job (R-CAUSE)."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from agentjobs.domain.texts import one_line

UNPROCESSABLE = frozenset({400, 413, 422})
FORBIDDEN = 403
DENIALS = re.compile(
    r"denied the request|denied request|violates PodSecurity|is forbidden: .*policy"
)
DENIAL = re.compile(r'admission webhook "[^"]*" denied the request|\S+ "[^"]*" is forbidden: ')
"""How the answer of an admission begins, whose code is the policy's choice: 422 by default."""
QUOTA = "exceeded quota"
NO_JOB = 'Job in version "v1" cannot be handled as a Job: '
UNKNOWN_FIELD = re.compile(r'unknown field "(spec|metadata)\b')
RIGHTS = re.compile(r'cannot \w+ resource "')


class RefusalKind(StrEnum):
    """What follows from a refusal."""

    INVALID = "invalid"
    """The template cannot be right: the job ends."""
    DENIED = "denied"
    """An admission policy says no: the job ends."""
    QUOTA = "quota"
    """No room in the namespace: the job waits."""
    RIGHTS = "rights"
    """The operator itself may not: a person must act, the job waits."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """One refusal, sorted."""

    kind: RefusalKind
    message: str
    """The API server's words on one line, field paths in terms of the AgentJob."""


def refusal_of(code: int, body: Mapping[str, Any]) -> Refusal | None:
    """Sort the API server's answer to the creation of a Job.

    :param code: HTTP status code of the answer.
    :param body: the metav1.Status of the answer.
    :return: None for answers that a later try may not get (429, 5xx, 404, 409).
    """
    message = str(body.get("message") or "")
    if code == FORBIDDEN or (code in UNPROCESSABLE and DENIAL.match(message)):
        return Refusal(_kind_of_denial(message), one_line(message))
    if code in UNPROCESSABLE:
        return Refusal(RefusalKind.INVALID, _invalid_fields(body) or _undecodable(message))
    return None


def refusal_in_events(events: Iterable[Mapping[str, Any]]) -> Refusal | None:
    """Find out from the Events of a Job why it has no pod; the newest refusal counts."""
    refused = [e for e in events if e.get("reason") == "FailedCreate"]
    if not refused:
        return None
    newest = max(refused, key=_event_time)
    message = str(newest.get("message") or "")
    if "forbidden" in message or DENIALS.search(message):
        return Refusal(_kind_of_denial(message), one_line(message))
    if "is invalid" in message:
        return Refusal(RefusalKind.INVALID, one_line(message))
    return None


def _kind_of_denial(message: str) -> RefusalKind:
    if QUOTA in message:
        return RefusalKind.QUOTA
    return RefusalKind.RIGHTS if RIGHTS.search(message) else RefusalKind.DENIED


def _event_time(event: Mapping[str, Any]) -> str:
    series = event.get("series") or {}
    return str(
        series.get("lastObservedTime")
        or event.get("lastTimestamp")
        or event.get("eventTime")
        or event.get("firstTimestamp")
        or ""
    )


def _undecodable(message: str) -> str:
    """What a 400 says, which has no list of fields, with its paths in terms of the AgentJob."""
    words = one_line(message).removeprefix(NO_JOB)
    return UNKNOWN_FIELD.sub(r'unknown field "spec.template.\1', words)


def _invalid_fields(body: Mapping[str, Any]) -> str:
    """Name the fields as the author of the AgentJob knows them."""
    causes = (body.get("details") or {}).get("causes") or ()
    texts = [
        f"spec.template.{c['field']}: {c.get('message', '')}"
        for c in causes
        if str(c.get("field", "")).startswith(("spec", "metadata"))
    ]
    return one_line("; ".join(dict.fromkeys(texts)))
