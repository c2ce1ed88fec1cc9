"""What must be open before a job may begin. GATES is their order; the first closed one is shown."""

from collections.abc import Callable
from dataclasses import dataclass

from agentjobs.api.agentjob import DependencyCondition, Ending, Waiting
from agentjobs.api.names import CauseCode, WaitingCode
from agentjobs.domain.accept import Accepted
from agentjobs.domain.observed import Observed


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
    """Hold the job until what it depends on has ended; that is not asked again."""
    if seen.job.status.attempts:
        return None
    wanted = {d.name: d.condition for d in seen.job.spec.depends_on or ()}
    for other in seen.dependencies:
        succeed = wanted.get(other.name) is DependencyCondition.SUCCEEDED
        if other.finished and (other.succeeded or not succeed):
            continue
        if other.finished:
            message = f"AgentJob {other.name} did not succeed, and this job depends on it"
            failed = Ending(code=CauseCode.DEPENDENCY_FAILED, message=message, at=seen.now)
            return Closed(ending=failed)
        state = "to end" if other.exists else "to be created"
        message = f"waits for AgentJob {other.name} {state}"
        return Closed(waiting=Waiting(code=WaitingCode.DEPENDENCY, message=message))
    return None


def slot(seen: Observed, _accepted: Accepted) -> Closed | None:
    """Hold the job until the tool runs less often than it may; first come, first served (R-SLOTS).

    A job that has begun keeps its slot until it is over, between its attempts too.
    """
    limit = seen.tool.spec.max_concurrent if seen.tool else None
    if limit is None or seen.job.status.attempts or seen.slots.taken + seen.slots.ahead < limit:
        return None
    tool = f"tool {seen.tool.metadata.name}" if seen.tool else "the tool"
    message = f"waits for a slot: {tool} runs at most {limit} at once (spec.maxConcurrent)"
    return Closed(waiting=Waiting(code=WaitingCode.SLOT, message=message))


GATES: tuple[Gate, ...] = (suspended, dependencies, slot)
"""The slot comes last: nobody holds one, or a place in the line, while waiting for another gate."""


def closed_gate(seen: Observed, accepted: Accepted) -> Closed | None:
    """The first gate that is closed, if one is."""
    return next((found for gate in GATES if (found := gate(seen, accepted))), None)
