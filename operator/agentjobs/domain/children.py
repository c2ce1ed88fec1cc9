"""A batch/v1 Job as far as decisions need it: small, frozen, parsed once."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Self

from agentjobs.api.names import (
    ANNOTATION_PLACEHOLDER,
    ANNOTATION_RETIRED,
    API_VERSION,
    LABEL_QUEUE,
    RETIRED_SUSPENDED,
    RETIRED_UNBEGUN,
)
from agentjobs.domain.pods import controller_uid, parse_time


@dataclass(frozen=True, slots=True)
class JobView:
    """One Job, ours or not."""

    uid: str
    name: str
    owner_uid: str = ""
    """The uid of the AgentJob that controls it, or nothing."""
    owner: str = ""
    """Whoever controls it, for messages: kind and name."""
    created: datetime | None = None
    version: str = ""
    """metadata.resourceVersion."""
    deleting: bool = False
    placeholder: bool = False
    queue: str = ""
    """Kueue's LocalQueue that suspends and resumes it, or nothing."""
    suspended: bool = False
    """spec.suspend."""
    halted: bool = False
    """The Job controller makes no pod any more: it took note of the suspension, or gave up."""
    retired: bool = False
    """We have seen to it that it makes no pod, whoever resumes it."""
    held_back: bool = False
    """It is retired because its AgentJob was suspended."""
    unbegun: bool = False
    """When it was held back it had no pod, and no queue had let it make one."""
    single: bool = True
    """One pod, once: no replacement can follow."""
    completions: int | None = 1
    active: int = 0
    succeeded: int = 0
    failed: int = 0
    terminating: int = 0
    complete: bool = False
    completed_at: datetime | None = None
    failed_reason: str = ""
    """Reason of a true Failed condition."""
    failed_message: str = ""
    failed_at: datetime | None = None

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Self:
        """Parse a batch/v1 Job as the API server returns it, defaults filled in."""
        meta, spec, status = body["metadata"], body.get("spec") or {}, body.get("status") or {}
        conditions = {
            c["type"]: c for c in status.get("conditions") or () if c.get("status") == "True"
        }
        failed = conditions.get("Failed") or {}
        return cls(
            uid=meta["uid"],
            name=meta["name"],
            owner_uid=agentjob_uid(meta),
            owner=controller_name(meta),
            created=parse_time(meta.get("creationTimestamp")),
            version=meta.get("resourceVersion") or "",
            deleting=bool(meta.get("deletionTimestamp")),
            placeholder=ANNOTATION_PLACEHOLDER in (meta.get("annotations") or {}),
            queue=(meta.get("labels") or {}).get(LABEL_QUEUE) or "",
            suspended=bool(spec.get("suspend")),
            halted="FailureTarget" in conditions
            or (bool(spec.get("suspend")) and "Suspended" in conditions),
            retired=is_retired(meta, spec),
            held_back=_held_back(meta, spec),
            unbegun=_held_back(meta, spec) and _retired_by(meta) == RETIRED_UNBEGUN,
            single=is_single(spec) or is_retired(meta, spec),
            completions=spec.get("completions"),
            active=status.get("active") or 0,
            succeeded=status.get("succeeded") or 0,
            failed=status.get("failed") or 0,
            terminating=status.get("terminating") or 0,
            complete="Complete" in conditions,
            completed_at=parse_time((conditions.get("Complete") or {}).get("lastTransitionTime")),
            failed_reason=(failed.get("reason") or "Failed") if failed else "",
            failed_message=failed.get("message") or "",
            failed_at=parse_time(failed.get("lastTransitionTime")),
        )

    @property
    def queued(self) -> bool:
        """Whether Kueue decides when it runs."""
        return bool(self.queue)

    @property
    def waits_in_vain(self) -> bool:
        """Whether a queue counts it, though it is to run no more."""
        held = self.retired or self.suspended
        return self.queued and held and not (self.over or self.deleting)

    @property
    def over(self) -> bool:
        """Whether the Job controller has declared it over, with none of its pods left running."""
        return self.complete or bool(self.failed_reason)


def is_single(spec: Mapping[str, Any]) -> bool:
    """Whether a Job makes one pod and never another, so that ending the pod ends the Job."""
    pod = (spec.get("template") or {}).get("spec") or {}
    return (
        spec.get("completions") == 1
        and spec.get("parallelism") == 1
        and spec.get("backoffLimit") == 0
        and spec.get("backoffLimitPerIndex") is None
        and not spec.get("podFailurePolicy")
        and pod.get("restartPolicy") == "Never"
    )


def is_retired(meta: Mapping[str, Any], spec: Mapping[str, Any]) -> bool:
    """Whether we have kept a Job from making pods."""
    return _retired_by(meta) is not None and spec.get("parallelism") == 0


def _held_back(meta: Mapping[str, Any], spec: Mapping[str, Any]) -> bool:
    return is_retired(meta, spec) and _retired_by(meta) in {RETIRED_SUSPENDED, RETIRED_UNBEGUN}


def _retired_by(meta: Mapping[str, Any]) -> str | None:
    why: str | None = (meta.get("annotations") or {}).get(ANNOTATION_RETIRED)
    return why


def agentjob_uid(meta: Mapping[str, Any]) -> str:
    """The uid of the controlling AgentJob, or nothing."""
    for owner in meta.get("ownerReferences") or ():
        if owner.get("apiVersion") == API_VERSION:
            return controller_uid(meta, "AgentJob")
    return ""


def controller_name(meta: Mapping[str, Any]) -> str:
    """Kind and name of the controlling owner, for messages."""
    for owner in meta.get("ownerReferences") or ():
        if owner.get("controller"):
            return f"{owner.get('kind')} {owner.get('name')}"
    return ""
