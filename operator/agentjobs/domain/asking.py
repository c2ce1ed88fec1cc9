"""Questions that nobody will answer are closed; whoever answers first counts (R-REPORT)."""

from dataclasses import replace

from agentjobs.api.inputrequest import Outcome
from agentjobs.domain.observed import Observed
from agentjobs.domain.plan import CloseQuestion, Plan


def asks(seen: Observed) -> bool:
    """Whether an answer is waited for."""
    return any(each.is_open(seen.now) for each in seen.questions)


def close_questions(seen: Observed, plan: Plan) -> Plan:
    """Close what has expired, and when the job is over, all that it still asks."""
    left = [each for each in seen.questions if not each.closed]
    if plan.need is not None or not left:
        return plan
    over = bool((plan.status or seen.job.status).finished_at)
    actions, times = [], [plan.requeue_at] if plan.requeue_at else []
    for each in left:
        if not each.is_open(seen.now):
            actions.append(CloseQuestion(each.name, each.version, Outcome.EXPIRED))
        elif over:
            actions.append(CloseQuestion(each.name, each.version, Outcome.WITHDRAWN))
        else:
            times.append(each.expires_at)
    wake = min(times, default=None)
    return replace(plan, actions=(*plan.actions, *actions), requeue_at=wake)
