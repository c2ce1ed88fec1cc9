"""What the API server's audit log alone says of slots (R-SLOTS), counted over one history."""

from collections import Counter
from collections.abc import Iterable

from agentjobs.api.names import ANNOTATION_PLACEHOLDER
from agentjobs.kube import AGENTJOBS, AGENTTOOLS, JOBS, LEASES
from tests.model.apiserver import Event, Json, Line
from tests.model.jobcontroller import condition

TAKEN = "in the audit log: Jobs that took a slot"
WAITS = "in the audit log: jobs that waited for a slot"
CHANGES = "in the audit log: changes of leader while a slot was taken"
CHANGED = "in the audit log: histories with a change of leader while a slot was taken"
CONTENDED = "in the audit log: of these, histories in which others waited for one"
EXCEEDED = "in the audit log: limits exceeded"


class SlotsInLog:
    """Reads the log line by line.

    A slot is taken from the creation of a Job until that Job is over or gone, or the end of its
    AgentJob is written. Claims play no part.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._leader = ""
        self._limits: dict[str, int] = {}
        self._tools: dict[str, str] = {}
        """Name of its tool by uid of the AgentJob."""
        self._taken: dict[str, str] = {}
        """uid of the AgentJob by uid of its Job."""
        self._waited: set[str] = set()

    def read(self, line: Line) -> None:
        """Take in the next line."""
        event = line.event
        if event.resource == LEASES:
            self._read_lease(event.body)
        elif event.resource == AGENTTOOLS:
            limit = event.body["spec"].get("maxConcurrent")
            if limit is not None:
                self._limits[event.body["metadata"]["name"]] = limit
        elif event.resource == AGENTJOBS:
            self._read_agentjob(event)
        elif event.resource == JOBS:
            self._read_job(event)

    def _read_lease(self, lease: Json) -> None:
        holder = lease["spec"].get("holderIdentity") or ""
        if self._leader and holder and holder != self._leader:
            self.counts[CHANGES] += bool(self._taken)
        self._leader = holder or self._leader

    def _read_agentjob(self, event: Event) -> None:
        body, uid = event.body, event.uid
        tool = (body["spec"].get("toolRef") or {}).get("name")
        if tool not in self._limits:
            return
        self._tools[uid] = tool
        status = body.get("status") or {}
        if (status.get("waiting") or {}).get("code") == "slot":
            self._waited.add(uid)
            self.counts[WAITS] = len(self._waited)
        if event.kind == "DELETED" or status.get("finishedAt"):
            self._taken = {job: owner for job, owner in self._taken.items() if owner != uid}

    def _read_job(self, event: Event) -> None:
        body, uid = event.body, event.uid
        meta, status = body["metadata"], body.get("status") or {}
        if event.kind == "ADDED" and ANNOTATION_PLACEHOLDER not in (meta.get("annotations") or {}):
            owner = next((each["uid"] for each in meta.get("ownerReferences") or ()), "")
            if owner in self._tools:
                self._taken[uid] = owner
                self._count(self._tools[owner])
        over = condition(status, "Complete") or condition(status, "Failed")
        if over or event.kind == "DELETED":
            self._taken.pop(uid, None)

    def _count(self, tool: str) -> None:
        users = {owner for owner in self._taken.values() if self._tools[owner] == tool}
        self.counts[TAKEN] += 1
        self.counts[EXCEEDED] += len(users) > self._limits[tool]


def slots_in(log: Iterable[Line]) -> Counter[str]:
    """Count what became of slots in one history, to be added up over histories."""
    slots = SlotsInLog()
    for line in log:
        slots.read(line)
    counts = slots.counts
    counts[CHANGED] = bool(counts[CHANGES])
    counts[CONTENDED] = bool(counts[CHANGES] and counts[WAITS])
    return counts
