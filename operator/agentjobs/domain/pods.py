"""A pod as far as decisions need it: small, frozen, parsed once."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Self

from agentjobs.api.names import ANNOTATION_DEFAULT_CONTAINER

NEVER = datetime(1970, 1, 1, tzinfo=UTC)
"""What the kubelet writes as start of a container that could not be started."""
STATUS_UNKNOWN = "ContainerStatusUnknown"
"""The kubelet's stand-in for an end that it did not see; its exit code is made up."""
COMPLETION_INDEX = "batch.kubernetes.io/job-completion-index"
TRACKING = "batch.kubernetes.io/job-tracking"
START_FAILURES = frozenset({"StartError", "ContainerCannotRun", "CreateContainerError"})


RANDOM_CHARACTERS = 5
GENERATED_PREFIX = 63 - RANDOM_CHARACTERS
"""What a generated name keeps of what it is made from (k8s.io/apiserver, storage/names)."""


def completion_of(pod_name: str, job_name: str) -> int | None:
    """Which completion of a Job a pod is, by its name; None: it is none of its pods.

    0 where the Job is not indexed. Names are `<job>-<random>`, or `<job>-<index>-<random>` where it
    is. Both are cut: the first at its end, so that a long name has no dash; the second before the
    index (`podGenerateNameWithIndex` of the Job controller).
    """
    made_from = pod_name[:-RANDOM_CHARACTERS]
    if made_from == f"{job_name}-"[:GENERATED_PREFIX]:
        return 0
    index = made_from.removesuffix("-").rpartition("-")[2]
    tail = f"-{index}-"
    indexed = index.isascii() and index.isdecimal()
    if indexed and made_from == job_name[: GENERATED_PREFIX - len(tail)] + tail:
        return int(index)
    return None


def parse_time(text: str | None) -> datetime | None:
    """Read an RFC 3339 time; absent and epoch are None."""
    if not text:
        return None
    value = datetime.fromisoformat(text)
    return None if value == NEVER else value


@dataclass(frozen=True, slots=True)
class ContainerEnd:
    """The terminated state of a container."""

    exit_code: int
    reason: str
    message: str
    started_at: datetime | None
    finished_at: datetime | None

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Self:
        """Parse a ContainerStateTerminated."""
        return cls(
            exit_code=int(body.get("exitCode", 0)),
            reason=body.get("reason") or "",
            message=body.get("message") or "",
            started_at=parse_time(body.get("startedAt")),
            finished_at=parse_time(body.get("finishedAt")),
        )

    @property
    def never_started(self) -> bool:
        """Whether the runtime failed to start the process at all."""
        return self.reason in START_FAILURES

    @property
    def unlocated(self) -> bool:
        """Whether the kubelet found no container of that name at the end, and had none before.

        It asks the runtime after it has killed what was there; what had run would be found. Of one
        that it remembers it says "used to be Running".
        """
        return self.reason == STATUS_UNKNOWN and "used to be" not in self.message

    @property
    def seen(self) -> bool:
        """Whether it is the end of a process that ran, as somebody saw it."""
        return not self.never_started and self.reason != STATUS_UNKNOWN


@dataclass(frozen=True, slots=True)
class ContainerView:
    """One container of a pod."""

    name: str
    image: str = ""
    running_since: datetime | None = None
    running: bool = False
    waiting_reason: str = ""
    waiting_message: str = ""
    end: ContainerEnd | None = None
    """Its terminated state: the current one, else that of the run before a restart."""
    restarting: bool = False
    """`end` belongs to an earlier run."""

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Self:
        """Parse a ContainerStatus."""
        state = body.get("state") or {}
        last = (body.get("lastState") or {}).get("terminated")
        current = state.get("terminated")
        waiting = state.get("waiting") or {}
        end = current or last
        return cls(
            name=body.get("name", ""),
            image=body.get("image") or "",
            running="running" in state,
            running_since=parse_time((state.get("running") or {}).get("startedAt")),
            waiting_reason=waiting.get("reason") or "",
            waiting_message=waiting.get("message") or "",
            end=ContainerEnd.from_json(end) if end else None,
            restarting=current is None and last is not None,
        )

    @property
    def started(self) -> bool:
        """Whether its process was ever seen to run."""
        return self.running or (self.end is not None and self.end.seen)

    @property
    def started_at(self) -> datetime | None:
        """When its process (or the run before a restart) began."""
        if self.end is not None:
            return self.end.started_at
        return self.running_since


@dataclass(frozen=True, slots=True)
class PodView:
    """One pod of a Job."""

    uid: str
    name: str
    job_uid: str = ""
    index: int = 0
    """Of an indexed Job: which of its completions."""
    phase: str = "Pending"
    reason: str = ""
    message: str = ""
    created: datetime | None = None
    delete_by: datetime | None = None
    """metadata.deletionTimestamp: the request plus the grace period."""
    delete_grace: int = 0
    node: str = ""
    unschedulable: str = ""
    """The scheduler's sentence, while it finds no node."""
    disruption: str = ""
    """Reason of a true DisruptionTarget condition."""
    disruption_message: str = ""
    disrupted_at: datetime | None = None
    """Since when that condition is true."""
    tool_name: str = ""
    tool: ContainerView | None = None
    others: tuple[ContainerView, ...] = ()
    init: tuple[ContainerView, ...] = ()
    active_deadline: int | None = None
    tracked: bool = False
    """The Job controller has not counted it yet, and will when it is over. It lets a pod go
    uncounted that it deletes because its Job was suspended."""
    gone: bool = False
    """It was deleted; this is what was last seen of it."""
    lost: bool = False
    """Its node is gone or silent for too long; this is what was last seen of it."""

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Self:
        """Parse a core/v1 Pod."""
        meta, spec, status = body["metadata"], body.get("spec") or {}, body.get("status") or {}
        annotations = meta.get("annotations") or {}
        tool_name = tool_container(annotations, spec.get("containers") or ())
        containers = [ContainerView.from_json(c) for c in status.get("containerStatuses") or ()]
        conditions = {c["type"]: c for c in status.get("conditions") or ()}
        disruption = conditions.get("DisruptionTarget") or {}
        disrupted = disruption.get("status") == "True"
        return cls(
            uid=meta["uid"],
            name=meta["name"],
            job_uid=controller_uid(meta, "Job"),
            index=_index(annotations),
            phase=status.get("phase") or "Pending",
            reason=status.get("reason") or "",
            message=status.get("message") or "",
            created=parse_time(meta.get("creationTimestamp")),
            delete_by=parse_time(meta.get("deletionTimestamp")),
            delete_grace=int(meta.get("deletionGracePeriodSeconds") or 0),
            node=spec.get("nodeName") or "",
            unschedulable=unschedulable(conditions.get("PodScheduled") or {}),
            disruption=(disruption.get("reason") or "Unknown") if disrupted else "",
            disruption_message=(disruption.get("message") or "") if disrupted else "",
            disrupted_at=parse_time(disruption.get("lastTransitionTime")) if disrupted else None,
            tool_name=tool_name,
            tool=next((c for c in containers if c.name == tool_name), None),
            others=tuple(c for c in containers if c.name != tool_name),
            init=tuple(
                ContainerView.from_json(c) for c in status.get("initContainerStatuses") or ()
            ),
            active_deadline=spec.get("activeDeadlineSeconds"),
            tracked=TRACKING in (meta.get("finalizers") or ()),
        )

    @property
    def final(self) -> bool:
        """Whether the kubelet has declared it over and no container of it runs any more.

        The phase alone proves nothing: a kubelet was seen to publish Failed, DeadlineExceeded
        while the container was still within its grace period.
        """
        containers = (self.tool, *self.others, *self.init)
        return self.phase in {"Succeeded", "Failed"} and not any(
            c and c.running for c in containers
        )

    @property
    def dead(self) -> bool:
        """Whether nothing of it can run any more (R-DEAD)."""
        return self.final or self.gone or self.lost

    @property
    def started(self) -> bool:
        """Whether the tool's container ever ran. Init containers do not count."""
        return self.tool is not None and self.tool.started

    @property
    def started_at(self) -> datetime | None:
        """When the tool's container started."""
        return self.tool.started_at if self.tool else None

    @property
    def finished_at(self) -> datetime | None:
        """When the tool's container ended."""
        return self.tool.end.finished_at if self.tool and self.tool.end else None

    @property
    def delete_requested_at(self) -> datetime | None:
        """When its deletion was asked for."""
        return self.delete_by - timedelta(seconds=self.delete_grace) if self.delete_by else None

    def as_gone(self) -> "PodView":
        """Return what is remembered of it after its deletion."""
        return replace(self, gone=True)


def _index(annotations: Mapping[str, str]) -> int:
    text = annotations.get(COMPLETION_INDEX) or ""
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else 0  # noqa: PLR2004


def tool_container(annotations: Mapping[str, str], containers: Iterable[Any]) -> str:
    """Name of the tool's container (R-CONTAINER): the annotated one, else the first."""
    names = [c.get("name", "") for c in containers if isinstance(c, Mapping)]
    wanted = annotations.get(ANNOTATION_DEFAULT_CONTAINER, "")
    return wanted if wanted in names else next(iter(names), "")


def controller_uid(meta: Mapping[str, Any], kind: str) -> str:
    """The uid of the controlling owner of that kind, or nothing."""
    for owner in meta.get("ownerReferences") or ():
        if owner.get("controller") and owner.get("kind") == kind:
            return str(owner["uid"])
    return ""


def unschedulable(condition: Mapping[str, Any]) -> str:
    """The scheduler's sentence of a PodScheduled condition, while it finds no node."""
    if condition.get("status") == "False" and condition.get("reason") in {
        "Unschedulable",
        "SchedulerError",
    }:
        return condition.get("message") or "no node fits"
    return ""
