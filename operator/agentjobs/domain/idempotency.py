"""How a repeated start is recognised (R-KEY).

The name of the AgentJob is a keyed hash of who asked with which key, so it cannot be guessed, and
two replicas that are asked at once meet in one create. What was asked for is compared by a digest
of JSON values: the order of members, white space and the spelling of a number do not count.
"""

import base64
import hashlib
import hmac
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from agentjobs.api.agentjob import AgentJobSpec
from agentjobs.contract.calls import StartRequest
from agentjobs.domain.jobids import job_id

KEY_HEADER = "Idempotency-Key"
KEY_PATTERN = re.compile(r"[\x21-\x7e]{1,255}")
NAME_PREFIX = "job-"
NAME_BYTES = 16
"""128 bits: guessing a name is hopeless, and the name stays short enough for pods."""


@dataclass(frozen=True, slots=True)
class Payload:
    """What a start asks for, as far as a repetition must ask for the same.

    The namespace is not among it: it is part of the name.
    """

    tool: str | None
    template: Any
    arguments: Any
    depends_on: Any
    deadline_seconds: int | None
    pending_deadline_seconds: int | None
    callback: Any

    @property
    def digest(self) -> str:
        """`sha256:` and 64 hexadecimal digits."""
        members = {field.name: getattr(self, field.name) for field in fields(self)}
        return "sha256:" + hashlib.sha256(_canonical(members)).hexdigest()

    def differs_from(self, other: "Payload") -> tuple[str, ...]:
        """Names of the members that are not the same."""
        return tuple(
            field.name
            for field in fields(self)
            if _canonical(getattr(self, field.name)) != _canonical(getattr(other, field.name))
        )


def payload_of_request(request: StartRequest) -> Payload:
    """What a request asks for: arguments as received, before defaults are filled in."""
    callback = request.callback
    return Payload(
        tool=request.tool,
        template=request.template,
        arguments=request.arguments or {},
        depends_on=sorted(set(request.depends_on or ())),
        deadline_seconds=request.deadline_seconds,
        pending_deadline_seconds=request.pending_deadline_seconds,
        callback=callback and [callback.url, _events(callback.events)],
    )


def payload_of_spec(spec: AgentJobSpec, namespace: str) -> Payload:
    """What the first request asked for, from the AgentJob that it made."""
    callback = spec.callback
    return Payload(
        tool=spec.tool_ref.name if spec.tool_ref else None,
        template=spec.template,
        arguments=spec.arguments or {},
        depends_on=sorted(job_id(namespace, each.name) for each in spec.depends_on or ()),
        deadline_seconds=spec.deadline_seconds,
        pending_deadline_seconds=spec.pending_deadline_seconds,
        callback=callback and [callback.url, _events(callback.events)],
    )


def job_name(name_key: bytes, namespace: str, caller: str, key: str) -> str:
    """The name that this caller's key stands for in this namespace."""
    text = json.dumps([namespace, caller, key]).encode()
    mac = hmac.digest(name_key, text, "sha256")[:NAME_BYTES]
    return NAME_PREFIX + base64.b32encode(mac).decode().rstrip("=").lower()


def _events(events: Any) -> list[str] | None:
    return None if events is None else sorted({str(event) for event in events})


def _canonical(value: Any) -> bytes:
    """One spelling of a JSON value: members sorted, numbers by value, no white space."""
    plain = _plain_numbers(value)
    return json.dumps(plain, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


def _plain_numbers(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, Mapping):
        return {name: _plain_numbers(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain_numbers(item) for item in value]
    return value
