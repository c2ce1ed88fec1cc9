"""Events before the end: what a job asks, and how far it is, if the runtime wants to know that.

What is told of a job that goes on is worth nothing once it is answered, or once there is more
progress: then it is taken out of the outbox, delivered or not. Only its end is told in any case.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import datetime, timedelta

from agentjobs.api.agentjob import Delivery, DeliveryState, Outbox, Progress
from agentjobs.api.names import EventType
from agentjobs.domain import status as st
from agentjobs.domain.callbacks import after, pending
from agentjobs.domain.errors import InvalidSpecError
from agentjobs.domain.mirror import stamped
from agentjobs.domain.observed import Observed
from agentjobs.domain.plan import Deliver, Plan
from agentjobs.domain.questions import QuestionView

PROGRESS_EVERY = timedelta(seconds=30)
"""What is reported in between is not told; the newest is."""
MOST_QUESTIONS = 4
"""Told at a time: the outbox is part of a status of bounded size."""


def tell(seen: Observed, plan: Plan) -> Plan:
    """Owe, try and settle what the runtime is to be told while the job goes on."""
    status = plan.status or seen.job.status
    if plan.need is not None or status.finished_at or not _may_be_told(seen):
        return plan
    old = status.callback.deliveries if status.callback else ()
    kept = [settled(seen, each) for each in old if _is_news(seen, each)]
    kept += _asked(seen, kept)
    kept, again_at = _with_progress(seen, status.progress, kept)
    if tuple(kept) != old:
        # A wish to send the end again that comes before the end is none.
        outbox = Outbox(deliveries=tuple(kept)) if kept else None
        status = st.fit(stamped(seen, status.model_copy(update={"callback": outbox})))
        plan = replace(plan, status=status)
    tries = due(seen, [each for each in pending(kept) if _can_be_sent(each, status.progress)])
    times = [time for time in (plan.requeue_at, tries.requeue_at, again_at) if time]
    return replace(
        plan, actions=(*plan.actions, *tries.actions), requeue_at=min(times, default=None)
    )


def settled(seen: Observed, delivery: Delivery) -> Delivery:
    """A delivery with the outcome of its last try, if one is there."""
    outcome = seen.outcomes.get(delivery.id)
    if outcome is None or delivery.state is not DeliveryState.PENDING:
        return delivery
    return after(delivery, outcome)


def due(seen: Observed, owed: Sequence[Delivery]) -> Plan:
    """Try what is due, and look again when more is."""
    idle = [each for each in owed if each.id not in seen.in_flight]
    now = [each for each in idle if (each.next_attempt_at or seen.now) <= seen.now]
    later = [each.next_attempt_at for each in idle if each not in now and each.next_attempt_at]
    return Plan(
        actions=tuple(Deliver(each.id) for each in now), requeue_at=min(later, default=None)
    )


def question_event_id(owner_uid: str, question: QuestionView) -> str:
    """Identifier of the event that tells of a question."""
    return f"evt_{owner_uid}_{EventType.INPUT_REQUIRED}_{question.uid}"


def _may_be_told(seen: Observed) -> bool:
    callback = seen.job.spec.callback
    if callback is None or seen.job.metadata.deletion_timestamp or seen.job.spec.stop:
        return False
    try:
        seen.policy.destinations.check_url(seen.job.metadata.namespace, callback.url)
    except InvalidSpecError:
        return False
    return True


def _wants(seen: Observed, kind: EventType) -> bool:
    callback = seen.job.spec.callback
    if callback is None:
        return False
    if callback.events is None:
        return kind is not EventType.PROGRESS
    return kind in callback.events


def _open(seen: Observed) -> Iterable[tuple[str, QuestionView]]:
    for each in seen.questions:
        if each.is_open(seen.now):
            yield question_event_id(seen.job.metadata.uid, each), each


def _is_news(seen: Observed, delivery: Delivery) -> bool:
    if delivery.type is EventType.INPUT_REQUIRED:
        return delivery.id in dict(_open(seen))
    return True


def _asked(seen: Observed, told: Sequence[Delivery]) -> list[Delivery]:
    """What is owed of questions that were not told yet."""
    if not _wants(seen, EventType.INPUT_REQUIRED):
        return []
    known = {each.id for each in told}
    room = MOST_QUESTIONS - sum(each.type is EventType.INPUT_REQUIRED for each in told)
    new = [event_id for event_id, _ in _open(seen) if event_id not in known][: max(room, 0)]
    return [_owed(event_id, EventType.INPUT_REQUIRED, seen.now, seen.now) for event_id in new]


def _with_progress(
    seen: Observed, progress: Progress | None, told: Sequence[Delivery]
) -> tuple[list[Delivery], datetime | None]:
    """The deliveries with the newest progress, and when to look whether there is more of it."""
    if progress is None or progress.at is None or not _wants(seen, EventType.PROGRESS):
        return list(told), None
    last = next((each for each in told if each.type is EventType.PROGRESS), None)
    if last and progress.at <= last.time:
        return list(told), None
    if last and seen.now < last.time + PROGRESS_EVERY:
        return list(told), last.time + PROGRESS_EVERY
    uid, kind = seen.job.metadata.uid, EventType.PROGRESS
    new = _owed(f"evt_{uid}_{kind}_{progress.at.timestamp():.0f}", kind, progress.at, seen.now)
    return [*(each for each in told if each is not last), new], None


def _can_be_sent(delivery: Delivery, progress: Progress | None) -> bool:
    """Whether an event says now what it said at its first try."""
    if delivery.type is not EventType.PROGRESS:
        return True
    return progress is not None and progress.at == delivery.time


def _owed(event_id: str, kind: EventType, at: datetime, now: datetime) -> Delivery:
    # Whole seconds, as it is stored: what is compared later was read from there.
    at = at.replace(microsecond=0)
    return Delivery(id=event_id, type=kind, time=at, next_attempt_at=now)
