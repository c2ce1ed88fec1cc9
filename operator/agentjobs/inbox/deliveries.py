"""Judges deliveries of a callback by headers and body alone: is it an event of the platform."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from http import HTTPStatus
from typing import Final

from pydantic import ValidationError

from agentjobs.contract.events import JobEvent
from agentjobs.inbox.acceptance import LARGEST_EVENT_BYTES
from agentjobs.inbox.heard import Heard, heard_from_event
from agentjobs.inbox.signatures import Verifier

TOLERANCE_SECONDS: Final = 300
EVENT_ID: Final = re.compile(r"[\x21-\x7e]{1,255}")
SECONDS: Final = re.compile(r"[0-9]{1,12}")
LONGEST_HEADER: Final = 4096


@dataclass(frozen=True, slots=True)
class Refused:
    """A delivery that is none of the platform's, or nothing that can be read."""

    status: HTTPStatus
    reason: str
    """For the log and the sender; holds nothing of what was sent."""


def judge(
    headers: Mapping[str, str], body: bytes, verifier: Verifier, now: datetime
) -> Heard | Refused:
    """Judge one delivery; the same for any web framework.

    :param headers: of the request; their names in any case.
    :param body: as it came, not one byte changed.
    """
    if len(body) > LARGEST_EVENT_BYTES:
        return Refused(
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"an event has at most {LARGEST_EVENT_BYTES} B"
        )
    sent = {name.lower(): value for name, value in headers.items()}
    event_id, stamp = sent.get("webhook-id", ""), sent.get("webhook-timestamp", "")
    signatures = sent.get("webhook-signature", "")
    if not EVENT_ID.fullmatch(event_id) or not SECONDS.fullmatch(stamp) or not signatures:
        return Refused(
            HTTPStatus.BAD_REQUEST, "webhook-id, webhook-timestamp and webhook-signature are needed"
        )
    content = f"{event_id}.{stamp}.".encode() + body
    if len(signatures) > LONGEST_HEADER or not verifier.signed(signatures, content):
        return Refused(HTTPStatus.UNAUTHORIZED, "no signature of a known key fits")
    if abs(now.timestamp() - int(stamp)) > TOLERANCE_SECONDS:
        return Refused(
            HTTPStatus.UNAUTHORIZED,
            f"webhook-timestamp is more than {TOLERANCE_SECONDS} s away from the clock here",
        )
    return _read(event_id, body)


def _read(event_id: str, body: bytes) -> Heard | Refused:
    try:
        event = heard_from_event(JobEvent.model_validate_json(body))
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = ".".join(str(step) for step in first["loc"])
        return Refused(HTTPStatus.BAD_REQUEST, f"no event: {place}: {first['msg']}")
    except ValueError as error:
        return Refused(HTTPStatus.BAD_REQUEST, f"no event: {error}")
    if event.id != event_id:
        return Refused(HTTPStatus.BAD_REQUEST, "webhook-id is not the id of the event")
    if event.time.tzinfo is None:
        return Refused(HTTPStatus.BAD_REQUEST, "no event: time: has no time zone")
    return event
