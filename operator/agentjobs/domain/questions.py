"""InputRequests: as far as decisions need them, and as they are made of what a tool asks."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Self

from agentjobs.api.agentjob import AgentJob
from agentjobs.api.base import format_time
from agentjobs.api.names import API_VERSION, LABEL_JOB
from agentjobs.contract.calls import AskReport
from agentjobs.domain.pods import NEVER, parse_time

NAME_LENGTH = 63
HASH_LENGTH = 16
PROMPT_CHARACTERS = 1000
"""As much as the line about it is made of."""


@dataclass(frozen=True, slots=True)
class QuestionView:
    """One question of a job."""

    name: str
    uid: str
    version: str = ""
    """metadata.resourceVersion."""
    owner_uid: str = ""
    """Of the AgentJob that asks and owns it; empty: of none, whatever it says."""
    expires_at: datetime = NEVER
    closed: bool = False
    """Whether it was answered, or is over without an answer."""
    key: str = ""
    """Its name within the job."""
    prompt: str = ""
    """The beginning of what is asked."""

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Self:
        """Parse an InputRequest."""
        meta, spec = body["metadata"], body["spec"]
        owners = {
            each["uid"]
            for each in meta.get("ownerReferences") or ()
            if each.get("apiVersion") == API_VERSION and each.get("kind") == "AgentJob"
        }
        return cls(
            name=meta["name"],
            uid=meta["uid"],
            version=meta["resourceVersion"],
            owner_uid=spec["jobUID"] if spec["jobUID"] in owners else "",
            expires_at=parse_time(spec.get("expiresAt")) or NEVER,
            closed=bool((body.get("status") or {}).get("outcome")),
            key=spec.get("key", ""),
            prompt=spec.get("prompt", "")[:PROMPT_CHARACTERS],
        )

    def is_open(self, now: datetime) -> bool:
        """Whether an answer is waited for."""
        return not self.closed and now < self.expires_at


def question_name(job: str, job_uid: str, key: str) -> str:
    """Name of the InputRequest of a question: whoever asks it again meets the same one.

    :param job: name of the AgentJob, for people.
    """
    digest = hashlib.sha256(f"{job_uid}/{key}".encode()).hexdigest()[:HASH_LENGTH]
    return f"{job[: NAME_LENGTH - HASH_LENGTH - 1].rstrip('-')}-{digest}"


def question_of(job: AgentJob, asked: AskReport, now: datetime) -> dict[str, Any]:
    """Build the InputRequest of what a tool asks, whole; it goes with its AgentJob.

    :param now: from when its time counts, which ends with that of the job.
    """
    meta = job.metadata
    expires_at = now + timedelta(seconds=asked.expires_seconds)
    if job.status.deadline_at:
        expires_at = min(expires_at, job.status.deadline_at)
    spec = {
        "jobName": meta.name,
        "jobUID": meta.uid,
        "key": asked.key,
        "kind": asked.kind,
        "prompt": asked.prompt,
        "schema": asked.answer_schema,
        "requestedBy": job.spec.requested_by,
        "expiresAt": format_time(expires_at),
    }
    return {
        "apiVersion": API_VERSION,
        "kind": "InputRequest",
        "metadata": {
            "name": question_name(meta.name, meta.uid, asked.key),
            "namespace": meta.namespace,
            "labels": {LABEL_JOB: meta.name},
            "ownerReferences": [
                {
                    "apiVersion": API_VERSION,
                    "kind": "AgentJob",
                    "name": meta.name,
                    "uid": meta.uid,
                    "controller": True,
                }
            ],
        },
        "spec": {name: value for name, value in spec.items() if value is not None},
    }
