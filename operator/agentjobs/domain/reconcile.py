"""The decision: all that was read goes in, what is to be done comes out.

A job goes through stages: nothing is claimed yet, an attempt is claimed, an attempt has ended and
another may follow, it is over. Each
pass finds the stage anew from the stored status and from what is seen of Job and pods; no pass
depends on an earlier one having been made.
"""

from dataclasses import replace

from agentjobs.domain.afterwards import after_end
from agentjobs.domain.asking import close_questions
from agentjobs.domain.attempt import during
from agentjobs.domain.claim import before_start
from agentjobs.domain.keeping import keep_output
from agentjobs.domain.observed import Observed
from agentjobs.domain.plan import Plan
from agentjobs.domain.retries import between
from agentjobs.domain.status import current_attempt
from agentjobs.domain.telling import tell


def decide(seen: Observed) -> Plan:
    """Decide what is to be done for one AgentJob, from what was read and nothing else."""
    plan = close_questions(seen, tell(seen, _stage(seen)))
    if plan.need is not None or not seen.keeps_output or seen.job.metadata.deletion_timestamp:
        # Of an AgentJob that is being deleted nothing is kept.
        return plan
    return replace(plan, actions=(*plan.actions, *keep_output(seen, plan)))


def _stage(seen: Observed) -> Plan:
    status = seen.job.status
    if status.finished_at:
        return after_end(seen)
    attempt = current_attempt(status)
    if attempt is None:
        return before_start(seen)
    if attempt.cause is not None:
        return between(seen, attempt)
    return during(seen, attempt)
