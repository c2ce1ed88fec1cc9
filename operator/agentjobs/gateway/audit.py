"""Who did what through the gateway: a line of the log for each, never with what was said."""

import hashlib
import json
import logging
from typing import Any

from agentjobs.gateway.reviews import Caller, Pod

log = logging.getLogger("agentjobs.audit")
log.setLevel(logging.INFO)


def record(action: str, who: Caller | Pod, job_id: str, **what: str) -> None:
    """Write down that something was done.

    :param action: start, stop, ask or answer.
    :param what: more about it; of contents a digest.
    """
    name = f"pod {who.namespace}/{who.name}" if isinstance(who, Pod) else who.name
    told = {"action": action, "who": name, "job_id": job_id, **{k: v for k, v in what.items() if v}}
    # A line of JSON has no room for forged ones, whatever a name holds.
    log.info("%s", json.dumps(told), extra={"audit": told})


def digest_of(value: Any) -> str:
    """Digest by which one who has the content can recognise it."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return f"sha256:{hashlib.sha256(text.encode('utf-8', 'surrogatepass')).hexdigest()}"
