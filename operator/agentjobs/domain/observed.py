"""All that one pass has read, frozen, with the time of the reading."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from agentjobs.api.agentjob import AgentJob
from agentjobs.api.agenttool import AgentTool
from agentjobs.domain.callbacks import Outcome
from agentjobs.domain.children import JobView
from agentjobs.domain.destinations import Address, Destinations
from agentjobs.domain.output import Archived
from agentjobs.domain.pods import PodView
from agentjobs.domain.questions import QuestionView
from agentjobs.domain.refusal import Refusal
from agentjobs.domain.said import Said


@dataclass(frozen=True, slots=True)
class Policy:
    """The platform's settings that decisions depend on. Durations in seconds, sizes in bytes."""

    default_deadline: int = 3600
    default_ttl: int = 86400
    max_arguments: int = 16 * 1024
    grace_ceiling: int = 120
    node_lost: int = 300
    """How long a node must be silent until what ran on it is given up."""
    linger: int = 30
    """How long other containers may outlive the tool's."""
    pod_grace: int = 3
    """How long a Job may have no pod before its Events are asked why."""
    refusal_recheck: int = 10
    """How often a refused pod or Job is looked at again."""
    destinations: Destinations = field(default_factory=Destinations)
    """Where events may be sent."""
    gateway_url: str = ""
    """Where agents read results; part of events. Empty: events do not say."""
    pod_retention: int = 600
    """How long pods stay after their output is archived, for kubectl."""
    store_patience: int = 60
    """How long a store that fails may hold up the deletion of an AgentJob that has ended."""
    mirror_interval: int = 10
    """Changes that nobody waits for are written at most this often."""


@dataclass(frozen=True, slots=True)
class ReadLastLine:
    """Read the last line that the tool printed, then decide again."""

    pod: str
    container: str


@dataclass(frozen=True, slots=True)
class ReadRefusals:
    """Read the Events of a Job that has no pod, then decide again."""

    job_uid: str


@dataclass(frozen=True, slots=True)
class ReadPods:
    """List the pods of the Job, then decide again: watches may lag behind each other."""


@dataclass(frozen=True, slots=True)
class ReadTool:
    """Read the tool, then decide again: it may be newer than what its watch has shown."""


@dataclass(frozen=True, slots=True)
class LookUp:
    """Look up the addresses of the receiver's name, then decide again."""

    host: str


Need = ReadLastLine | ReadRefusals | ReadPods | ReadTool | LookUp
"""A read that a decision asks for."""


@dataclass(frozen=True, slots=True)
class DependencySeen:
    """Another AgentJob that this one waits for."""

    name: str
    exists: bool = False
    finished: bool = False
    succeeded: bool = False
    state: str = ""


@dataclass(frozen=True, slots=True)
class SlotsSeen:
    """Who else uses the tool, counted from the AgentJobs themselves (R-SLOTS)."""

    taken: int = 0
    """Other jobs of the tool that have claimed an attempt and are not over."""
    ahead: int = 0
    """Jobs that came earlier and wait for a slot too."""


@dataclass(frozen=True, slots=True)
class Remains:
    """A pod that is still there though its job is over."""

    name: str
    uid: str
    job_uid: str
    """Of the batch/v1 Job."""


@dataclass(frozen=True, slots=True)
class Observed:
    """The input of a decision."""

    now: datetime
    job: AgentJob
    policy: Policy = field(default_factory=Policy)
    tool: AgentTool | None = None
    """The tool that spec.toolRef names."""
    tool_known: bool = True
    """Whether there is such a tool was asked of the API server, not only of the watch."""
    receiver_at: tuple[Address, ...] | None = None
    """What the name in spec.callback.url resolves to; None: not looked up; empty: unknown."""
    child: JobView | None = None
    """The Job of the claimed name, whoever owns it."""
    child_seen: bool = False
    """A Job of ours with the claimed name was seen before, by this process."""
    pods: tuple[PodView, ...] = ()
    """Pods of the child, those that are gone or lost included, oldest first."""
    pods_listed: bool = False
    """Whether the pods were listed in this very pass, not only watched."""
    pods_lost_at: datetime | None = None
    """When the next pod would be given up because its node is silent."""
    refusal: Refusal | None = None
    """How the API server refused the claimed Job, or the Job controller's pods."""
    refusal_known: bool = False
    """Whether there is a refusal was looked up so lately that it need not be asked again."""
    dependencies: tuple[DependencySeen, ...] = ()
    ring: tuple[str, ...] = ()
    """Names of AgentJobs that wait for each other, this one first, each for the next and the last
    for this one: the ring that this one has closed. Empty: it has closed none."""
    awaited: bool = False
    """Whether others that depend on this one have not begun yet, and have to see its end."""
    slots: SlotsSeen = field(default_factory=SlotsSeen)
    questions: tuple[QuestionView, ...] = ()
    """What the job asks and has asked."""
    last_line: str | None = None
    """Last line of the tool's log; None: not read yet; empty: there is none."""
    outcomes: Mapping[str, Outcome] = field(default_factory=dict)
    """Tries to deliver events that ended since the last status write, by event id."""
    in_flight: frozenset[str] = frozenset()
    """Events that are being tried."""
    keeps_output: bool = False
    """Whether there is a store that output is kept in."""
    said: Said = field(default_factory=Said)
    """What the tool has said on lines of its output."""
    heard: frozenset[str] = frozenset()
    """Pods of which all was read that they had printed, or was waited for long enough."""
    archived: Archived | None = None
    """What was kept of the output, once that is all."""
    remains: tuple[Remains, ...] = ()
    """Pods of all attempts, once the job is over."""
    written_at: datetime | None = None
    """When this process last wrote the status."""
