"""Whose events are handed to the agent, and what becomes of the others (R-INBOX-OWN).

A signature proves that the platform speaks. It does not prove that the event is for this agent: the
platform signs for all tenants, and any of them may name this receiver as its own.
"""

from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Final

from agentjobs.inbox.heard import Heard

CAPACITY: Final = 10_000
RETENTION: Final = timedelta(days=30)
LARGEST_EVENT_BYTES: Final = 64 * 1024
"""Far more than an event has: less than 4 KiB."""


class Ruling(StrEnum):
    """What becomes of an event."""

    TAKEN = "taken"
    """It waits for the agent."""
    HELD = "held"
    """Kept until a start that is under way has told its job's id: it may be this one."""
    DUPLICATE = "duplicate"
    """It was taken before."""
    NOT_OURS = "not_ours"
    """Of a job that this agent has not started."""
    STALE = "stale"
    """Older than what is remembered of those that were taken, so maybe one of them."""
    FULL = "full"
    """There is no room; the sender has to come again."""


KEPT: Final = frozenset({Ruling.TAKEN, Ruling.HELD})


@dataclass(frozen=True, slots=True)
class Rules:
    """What an inbox takes, and how much of it."""

    namespaces: frozenset[str] = field(default_factory=frozenset)
    """Namespaces of which every job's events are taken, whoever has started it."""
    capacity: int = CAPACITY
    """Items that may wait for the agent, and held ones beside them: those may be of strangers, and
    must not take the room of the agent's own."""
    retention: timedelta = RETENTION
    """How long ids of events are remembered, and ends of jobs. Senders try for three days."""


@dataclass(frozen=True, slots=True)
class Known:
    """What is on record about an event and its job."""

    seen: bool
    """An event of this id was taken or held."""
    own: bool
    """The job was started through this inbox."""
    unheard: bool
    """Its end is awaited, by the agent that has started it or by a follow-up, and has not come."""
    starting: bool
    """A start is under way whose job this may be."""
    waiting: int
    """Items that wait for the agent."""
    held: int
    """Items that are held."""


def rule(event: Heard, known: Known, rules: Rules, now: datetime) -> Ruling:
    """What becomes of an event that is known to be the platform's."""
    if known.seen:
        return Ruling.DUPLICATE
    named = event.namespace in rules.namespaces
    if not (named or known.own or known.starting):
        return Ruling.NOT_OURS
    if event.time < now - rules.retention and not known.unheard:
        return Ruling.STALE
    ours = named or known.own
    if (known.waiting if ours else known.held) >= rules.capacity:
        return Ruling.FULL
    return Ruling.TAKEN if ours else Ruling.HELD
