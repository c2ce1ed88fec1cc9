"""What the gateway knows of the cluster: jobs as agents see them, tools, open questions.

Read by every call, written by the watches and, right after a write of our own, by its answer.
"""

import hashlib
import logging
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, NamedTuple

from pydantic import ValidationError

from agentjobs.api.agentjob import AgentJob, Attempt, ToolKind
from agentjobs.api.agenttool import AgentTool
from agentjobs.api.inputrequest import InputRequest
from agentjobs.api.names import TERMINAL_STATES, State
from agentjobs.domain.keeping import is_archived
from agentjobs.domain.view import render_status, state_of
from agentjobs.gateway.changes import Changes

log = logging.getLogger(__name__)
TAG_CHARACTERS = 16
NEVER = datetime.min.replace(tzinfo=UTC)


class Name(NamedTuple):
    """Namespace and name of an object."""

    namespace: str
    name: str


@dataclass(frozen=True, slots=True)
class JobRecord:
    """One AgentJob, ready to be shown."""

    name: Name
    uid: str
    version: int
    created: str
    state: State
    tool: str
    digest: str
    caller: str
    body: bytes
    """Its status as JSON."""
    tag: str
    """Digest of the body."""
    archived: bool
    """Whether all of its output that is kept is in the store."""
    job_name: str = ""
    """The current attempt's Job."""
    attempt: int = 0
    """Its number; 0: there is none yet."""
    told_at: datetime = NEVER
    """When its tool last told how far it is."""
    pods: tuple[str, ...] = ()
    """Uids of the pods that may report for it."""
    ttl_seconds: int = 0
    """How long it is kept after its end."""
    ended: tuple[tuple[int, datetime], ...] = ()
    """Numbers of the attempts that have ended, and when they had at the latest."""

    @property
    def over(self) -> bool:
        """Whether its state will not change any more."""
        return self.state in TERMINAL_STATES

    @property
    def etag(self) -> str:
        """Names this body and the version that it is of."""
        return f'"{self.version}-{self.tag}"'


def record_of(body: dict[str, Any]) -> JobRecord:
    """Read an AgentJob.

    :raises pydantic.ValidationError: it has not the shape of one.
    """
    job = AgentJob.from_json(body)
    shown = render_status(job)
    made = job.spec.idempotency
    began = job.status.started_at is not None
    return JobRecord(
        name=Name(job.metadata.namespace, job.metadata.name),
        uid=job.metadata.uid,
        version=int(job.metadata.resource_version),
        created=body["metadata"]["creationTimestamp"],
        state=state_of(job),
        tool=job.spec.tool_ref.name if job.spec.tool_ref else "",
        digest=made.digest if made else "",
        caller=made.caller if made else "",
        body=shown,
        tag=hashlib.sha256(shown).hexdigest()[:TAG_CHARACTERS],
        job_name=job.status.job_name or "",
        attempt=job.status.attempts[-1].number if job.status.attempts else 0,
        told_at=(job.status.progress and job.status.progress.at) or NEVER,
        pods=job.status.pod_uids or (),
        ttl_seconds=job.spec.ttl_seconds_after_finished or 0,
        archived=is_archived(job.status) or (bool(job.status.finished_at) and not began),
        ended=tuple(_ends(job.status.attempts or ())),
    )


def _ends(attempts: Sequence[Attempt]) -> Iterator[tuple[int, datetime]]:
    """When attempts had ended; of a lost one nobody knows, but the next began after it."""
    for at, each in enumerate(attempts):
        later = (other.started_at for other in attempts[at + 1 :])
        ended = each.finished_at or next(filter(None, later), None)
        if ended:
            yield each.number, ended


class KnownJobs:
    """AgentJobs: the newest that was seen of each."""

    def __init__(self) -> None:
        self._jobs: dict[str, dict[str, JobRecord]] = {}
        self.position = 0
        """Everything up to this version is here."""
        self.changes: Changes[Name] = Changes()
        """Of the status of one job."""
        self.namespaces: Changes[str] = Changes()
        """Of any job of a namespace."""

    def __len__(self) -> int:
        """How many."""
        return sum(len(jobs) for jobs in self._jobs.values())

    def get(self, name: Name) -> JobRecord | None:
        """One job."""
        return self._jobs.get(name.namespace, {}).get(name.name)

    def of(self, namespace: str) -> list[JobRecord]:
        """All jobs of a namespace."""
        return list(self._jobs.get(namespace, {}).values())

    @property
    def any_named_by_key(self) -> bool:
        """Whether there are jobs whose names come from the name key."""
        return any(record.digest for jobs in self._jobs.values() for record in jobs.values())

    def put(self, body: dict[str, Any]) -> None:
        """Take in a version of an AgentJob; an older one than is known does nothing."""
        meta = body["metadata"]
        name = Name(meta["namespace"], meta["name"])
        known = self.get(name)
        if known and known.version >= int(meta["resourceVersion"]):
            # A write of our own, which the watch shows only now to who follows changes.
            self.namespaces.tell(name.namespace)
            return
        try:
            record = record_of(body)
        except ValidationError as error:
            log.error("AgentJob %s/%s cannot be read: %s", *name, error)
            return
        self._jobs.setdefault(name.namespace, {})[name.name] = record
        if known is None or known.tag != record.tag or known.uid != record.uid:
            self.changes.tell(name)
        # Also without a difference: who follows changes has to get past this version.
        self.namespaces.tell(name.namespace)

    def wrote(self, body: dict[str, Any]) -> None:
        """Take in the answer to a write of our own, before the watch shows it."""
        # What the watch has passed already is known, or was deleted since.
        if int(body["metadata"]["resourceVersion"]) > self.position:
            self.put(body)

    def drop(self, body: dict[str, Any]) -> None:
        """Forget a deleted AgentJob."""
        meta = body["metadata"]
        name = Name(meta["namespace"], meta["name"])
        known = self.get(name)
        if known and known.uid == meta["uid"]:
            self.forget(name)

    def forget(self, name: Name) -> None:
        """Forget an AgentJob that is not there any more."""
        jobs = self._jobs.get(name.namespace, {})
        jobs.pop(name.name, None)
        if not jobs:
            self._jobs.pop(name.namespace, None)
        self.changes.tell(name)

    def listed(self, uids: Collection[str], version: int) -> None:
        """Forget what was deleted while nobody watched."""
        for record in list(self):
            if record.uid not in uids and record.version <= version:
                self.forget(record.name)

    def reached(self, version: int) -> None:
        """Everything up to this version is here."""
        self.position = max(self.position, version)

    def __iter__(self) -> Iterator[JobRecord]:
        """All jobs."""
        for jobs in self._jobs.values():
            yield from jobs.values()

    def close(self) -> None:
        """Answer everybody who waits."""
        self.changes.close()
        self.namespaces.close()


class KnownTools:
    """The catalogue."""

    def __init__(self, kind: ToolKind) -> None:
        self.kind = kind
        self._tools: dict[Name, AgentTool] = {}

    def get(self, namespace: str, name: str) -> AgentTool | None:
        """One tool; the namespace of a cluster-wide one is empty."""
        return self._tools.get(Name(namespace, name))

    def of(self, namespace: str) -> list[AgentTool]:
        """All tools of a namespace, by name."""
        return [tool for name, tool in sorted(self._tools.items()) if name.namespace == namespace]

    def put(self, body: dict[str, Any]) -> None:
        """Take in a tool."""
        try:
            tool = AgentTool.from_json(body)
        except ValidationError as error:
            log.error("%s %s cannot be read: %s", self.kind, body["metadata"]["name"], error)
            return
        self._tools[Name(tool.metadata.namespace, tool.metadata.name)] = tool

    def drop(self, body: dict[str, Any]) -> None:
        """Forget a deleted tool."""
        meta = body["metadata"]
        self._tools.pop(Name(meta.get("namespace", ""), meta["name"]), None)

    def listed(self, uids: Collection[str], version: int) -> None:  # noqa: ARG002 - only watched
        """Forget what was deleted while nobody watched."""
        for name, tool in list(self._tools.items()):
            if tool.metadata.uid not in uids:
                del self._tools[name]

    def reached(self, version: int) -> None:
        """Nothing depends on it here."""


class KnownInputs:
    """Questions of jobs."""

    def __init__(self) -> None:
        self._inputs: dict[str, dict[str, InputRequest]] = {}
        self.changes: Changes[str] = Changes()
        """Of the questions of one job, by its uid."""

    def of(self, job_uid: str) -> list[InputRequest]:
        """Questions of one job, by the time they were asked."""
        found = self._inputs.get(job_uid, {}).values()
        return sorted(found, key=lambda each: (each.metadata.creation_timestamp, each.spec.key))

    def get(self, job_uid: str, key: str) -> InputRequest | None:
        """One question of a job."""
        found = self._inputs.get(job_uid, {}).values()
        return next((each for each in found if each.spec.key == key), None)

    def put(self, body: dict[str, Any]) -> None:
        """Take in a question; an older version than is known does nothing."""
        try:
            question = InputRequest.from_json(body)
        except ValidationError as error:
            log.error("InputRequest %s cannot be read: %s", body["metadata"]["name"], error)
            return
        questions = self._inputs.setdefault(question.spec.job_uid, {})
        known = questions.get(question.metadata.uid)
        version = int(question.metadata.resource_version)
        if known is None or int(known.metadata.resource_version) < version:
            questions[question.metadata.uid] = question
            self.changes.tell(question.spec.job_uid)

    def drop(self, body: dict[str, Any]) -> None:
        """Forget a deleted question."""
        self._forget(body["spec"]["jobUID"], body["metadata"]["uid"])

    def listed(self, uids: Collection[str], version: int) -> None:
        """Forget what was deleted while nobody watched."""
        for job_uid, questions in list(self._inputs.items()):
            for uid, question in list(questions.items()):
                if uid not in uids and int(question.metadata.resource_version) <= version:
                    self._forget(job_uid, uid)

    def reached(self, version: int) -> None:
        """Nothing depends on it here."""

    def _forget(self, job_uid: str, uid: str) -> None:
        questions = self._inputs.get(job_uid, {})
        questions.pop(uid, None)
        if not questions:
            self._inputs.pop(job_uid, None)
        self.changes.tell(job_uid)

    def close(self) -> None:
        """Answer everybody who waits."""
        self.changes.close()
