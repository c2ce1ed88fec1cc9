"""Events as the platform sends them, signed, and the smallest variations of them."""

import base64
import json
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from agentjobs.api.names import EventType, State
from agentjobs.inbox.heard import Heard
from agentjobs.signing import Signer

NOW = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)
SIGNER = Signer({"ed25519": Ed25519PrivateKey.from_private_bytes(b"\x01" * 32)})
OTHER = Signer({"ed25519": Ed25519PrivateKey.from_private_bytes(b"\x02" * 32)})
SECRET = "whsec_" + base64.b64encode(b"\x03" * 32).decode()

HEARD = Heard(
    id="evt_1_job_completed",
    type=EventType.COMPLETED,
    job_id="a.team-a",
    tool="crawl",
    status=State.DONE,
    summary="3 pages",
    cause="",
    time=NOW,
)


def heard(**changes: Any) -> Heard:
    return replace(HEARD, **changes)


def heard_of(job_id: str, **changes: Any) -> Heard:
    """An end of a job, under an id of its own."""
    return heard(**{"id": f"evt_{job_id}_job_completed", "job_id": job_id, **changes})


def body_of(event: Heard, **changes: Any) -> bytes:
    """The event as the operator words it."""
    name, _, namespace = event.job_id.partition(".")
    value = {
        "specversion": "1.0",
        "id": event.id,
        "source": f"/apis/agentjobs.dev/v1alpha1/namespaces/{namespace}/agentjobs/{name}",
        "type": event.type.value,
        "subject": event.job_id,
        "time": event.time.isoformat().replace("+00:00", "Z"),
        "datacontenttype": "application/json",
        "data": {
            "job_id": event.job_id,
            "tool": event.tool or None,
            "status": event.status.value,
            "summary": event.summary,
            "cause": event.cause or None,
        },
    }
    return json.dumps({**value, **changes}).encode()


def headers_of(body: bytes, signer: Signer = SIGNER, at: datetime = NOW) -> dict[str, str]:
    """The headers of one try at a moment."""
    return signer.headers(json.loads(body)["id"], int(at.timestamp()), body)
