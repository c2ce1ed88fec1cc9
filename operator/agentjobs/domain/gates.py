"""What must be open before a job may begin. GATES is their order; the first closed one is shown."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from agentjobs.api.agentjob import DependencyCondition, Ending, Waiting
from agentjobs.api.names import CAUSE_MESSAGE_CHARACTERS, CauseCode, WaitingCode
from agentjobs.domain.accept import Accepted
from agentjobs.domain.observed import Observed
from agentjobs.domain.texts import cut

LONGEST_RING = 6
"""Names of a ring that are spelt out."""
EXACT_PLACES = 3
ROUGH_PLACES = (3, 10, 30, 100, 300, 1000, 3000)


@dataclass(frozen=True, slots=True)
class Closed:
    """A gate that is closed: the job waits, or it ends because the gate can never open."""

    waiting: Waiting | None = None
    ending: Ending | None = None


Gate = Callable[[Observed, Accepted], Closed | None]


def suspended(seen: Observed, accepted: Accepted) -> Closed | None:
    """Hold the job while it is suspended. A queue suspends Jobs, not AgentJobs."""
    if not accepted.suspend or (accepted.queue and not seen.job.spec.suspend):
        return None
    message = "spec.suspend is true; set it to false to let the job begin"
    return Closed(waiting=Waiting(code=WaitingCode.SUSPENDED, message=message))


def dependencies(seen: Observed, _accepted: Accepted) -> Closed | None:
    """Hold the job until what it depends on has ended; that is not asked again (R-DEPENDS)."""
    if seen.job.status.attempts:
        return None
    if seen.ring:
        message = cut(f"dependencies form a ring: {_ring(seen.ring)}", CAUSE_MESSAGE_CHARACTERS)
        return Closed(ending=Ending(code=CauseCode.INVALID_SPEC, message=message, at=seen.now))
    waits: Closed | None = None
    wanted = {d.name: d.condition for d in seen.job.spec.depends_on or ()}
    for other in seen.dependencies:
        succeed = wanted.get(other.name) is DependencyCondition.SUCCEEDED
        if other.finished and (other.succeeded or not succeed):
            continue
        if other.finished:
            message = f"AgentJob {other.name} is {other.state}, and this job needs it done"
            failed = Ending(code=CauseCode.DEPENDENCY_FAILED, message=message, at=seen.now)
            return Closed(ending=failed)
        state = " to end" if other.exists else ", which does not exist"
        message = f"waits for AgentJob {other.name}{state}"
        waits = waits or Closed(waiting=Waiting(code=WaitingCode.DEPENDENCY, message=message))
    return waits


def _ring(names: Sequence[str]) -> str:
    """A ring as a chain that comes back, the middle of a long one left out."""
    if len(names) > LONGEST_RING:
        left_out = f"… {len(names) - LONGEST_RING} more …"
        names = (*names[: LONGEST_RING - 1], left_out, names[-1])
    return " waits for ".join((*names, names[0]))


def slot(seen: Observed, _accepted: Accepted) -> Closed | None:
    """Hold the job until the tool runs less often than it may; first come, first served (R-SLOTS).

    A job that has begun keeps its slot until it is over, between its attempts too.
    """
    if seen.job.status.attempts:
        return None
    waiting = no_slot(seen, ahead=seen.slots.ahead)
    return Closed(waiting=waiting) if waiting else None


def no_slot(seen: Observed, *, ahead: int = 0) -> Waiting | None:
    """What a job waits for that finds no slot of its tool free, with so many before it."""
    limit = seen.tool.spec.max_concurrent if seen.tool else None
    if seen.tool is None or limit is None or seen.slots.taken + ahead < limit:
        return None
    message = (
        f"waits for a slot: tool {seen.tool.metadata.name} runs at most {limit} at once "
        f"(spec.maxConcurrent); {_place(ahead)}"
    )
    return Waiting(code=WaitingCode.SLOT, message=message)


def _place(ahead: int) -> str:
    """A place in a line, the more roughly the longer it is: each change of it is a write."""
    if ahead <= EXACT_PLACES:
        return "next in line" if ahead == 0 else f"{ahead} before it"
    return f"more than {max(size for size in ROUGH_PLACES if size < ahead)} before it"


GATES: tuple[Gate, ...] = (suspended, dependencies, slot)
"""The slot comes last: nobody holds one, or a place in the line, while waiting for another gate."""


def closed_gate(seen: Observed, accepted: Accepted) -> Closed | None:
    """The first gate that is closed for good, else the first that is closed."""
    closed = [found for gate in GATES if (found := gate(seen, accepted))]
    ends = (each for each in closed if each.ending)
    return next(ends, closed[0] if closed else None)
