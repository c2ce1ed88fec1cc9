"""It is over: deliver what is owed, then let the job go when its time comes."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta

from agentjobs.api.agentjob import (
    Delivery,
    DeliveryState,
    Outbox,
)
from agentjobs.api.base import format_time
from agentjobs.api.names import (
    ANNOTATION_REDELIVER,
    FINALIZER,
    REDELIVER_CHARACTERS,
    ConditionType,
    Reason,
)
from agentjobs.domain import status as st
from agentjobs.domain.callbacks import DELETION_PATIENCE, give_up, pending
from agentjobs.domain.children import JobView
from agentjobs.domain.finish import owed_by, with_outbox
from agentjobs.domain.keeping import archived_at, is_archived, with_archived
from agentjobs.domain.mirror import (
    stamped,
    with_condition,
    with_status,
)
from agentjobs.domain.observed import Observed
from agentjobs.domain.plan import (
    DeleteAgentJob,
    DeleteJob,
    DeleteOutput,
    DeletePod,
    Note,
    Plan,
    RemoveFinalizer,
    SuspendJob,
)
from agentjobs.domain.telling import due, settled

AWAITED_RECHECK = timedelta(seconds=10)
TOGETHER = timedelta(seconds=3)
"""What became of output and events is written together where that takes no longer."""


def after_end(seen: Observed) -> Plan:
    """Nothing of the job runs any more: settle deliveries, try those due, keep to the TTL."""
    child = seen.child
    if child is None or child.owner_uid != seen.job.metadata.uid or child.placeholder:
        return _settle(seen)
    if _must_not_run(seen, child) and not child.queued:
        return Plan(actions=(SuspendJob(child.name, child.uid),))
    if _must_not_run(seen, child) or child.waits_in_vain:
        plan = _settle(seen)
        later = seen.now + timedelta(seconds=seen.policy.refusal_recheck)
        again = min(plan.requeue_at or later, later)
        actions = (*plan.actions, DeleteJob(child.name, child.uid))
        return replace(plan, actions=actions, requeue_at=again)
    return _settle(seen)


def _settle(seen: Observed) -> Plan:
    """Go on with deliveries and time to live."""
    outbox = seen.job.status.callback
    if _wants_it_again(seen, outbox):
        return _owe_again(seen)
    deliveries = outbox.deliveries if outbox else ()
    return _record(seen, deliveries) or _go_on(seen, deliveries)


def _wants_it_again(seen: Observed, outbox: Outbox | None) -> bool:
    wish = _wish(seen)
    return bool(
        wish
        and seen.job.spec.callback
        and not seen.job.metadata.deletion_timestamp
        and wish != (outbox.redelivered if outbox else None)
    )


def _wish(seen: Observed) -> str:
    return seen.job.metadata.annotations.get(ANNOTATION_REDELIVER, "")[:REDELIVER_CHARACTERS]


def _owe_again(seen: Observed) -> Plan:
    """Owe the event anew, whatever became of it: the same id, the same bytes, all tries again."""
    status = with_outbox(seen, seen.job.status)
    outbox = (status.callback or Outbox()).model_copy(update={"redelivered": _wish(seen)})
    status = status.model_copy(update={"callback": outbox})
    note = Note(Reason.DELIVERY_PENDING, f"the event is sent again: {_wish(seen)}")
    return Plan(status=st.fit(stamped(seen, status)), notes=(note,), requeue_at=seen.now)


def _record(seen: Observed, deliveries: tuple[Delivery, ...]) -> Plan | None:
    """Write what became of output and deliveries, if that is news."""
    known = tuple(settled(seen, each) for each in deliveries)
    status = with_archived(seen, seen.job.status)
    if known != deliveries:
        soon = (seen.job.status.finished_at or seen.now) + TOGETHER
        waits = seen.keeps_output and seen.job.status.started_at and not is_archived(status)
        if waits and seen.now < soon:
            return Plan(requeue_at=soon)
        return _write(with_status(seen, status), known)
    if status != seen.job.status:
        return Plan(status=st.fit(stamped(seen, status)), requeue_at=seen.now)
    return None


def _go_on(seen: Observed, deliveries: tuple[Delivery, ...]) -> Plan:
    owed = owed_by(seen.job.status)
    if seen.job.metadata.deletion_timestamp:
        return _let_go(seen, owed)
    return _clear_pods(seen, due(seen, owed) if owed else _expire(seen, deliveries))


def _expire(seen: Observed, deliveries: Sequence[Delivery]) -> Plan:
    expires_at = _expires_at(seen, deliveries)
    if seen.now >= expires_at and seen.awaited:
        return Plan(requeue_at=seen.now + AWAITED_RECHECK)
    if seen.now >= expires_at:
        return Plan(actions=(DeleteAgentJob(),))
    return Plan(requeue_at=expires_at)


def _clear_pods(seen: Observed, plan: Plan) -> Plan:
    """Delete what is left of pods, some time after what they printed was archived (R-TTL)."""
    archived = archived_at(seen.job.status)
    if archived is None or not seen.remains:
        return plan
    due_at = archived + timedelta(seconds=seen.policy.pod_retention)
    if seen.now < due_at:
        return replace(plan, requeue_at=min(plan.requeue_at or due_at, due_at))
    actions = tuple(DeletePod(each.name, each.uid, each.job_uid) for each in seen.remains)
    return replace(plan, actions=(*plan.actions, *actions))


def _must_not_run(seen: Observed, child: JobView) -> bool:
    """Whether a Job came to be of an attempt that was over before it began (R-CLAIM)."""
    cause = seen.job.status.cause
    if cause is None or cause.ran:
        return False
    return not (child.suspended or child.over or child.deleting)


def _write(seen: Observed, deliveries: tuple[Delivery, ...]) -> Plan:
    """Record what became of deliveries."""
    before = seen.job.status.callback or Outbox()
    outbox = before.model_copy(update={"deliveries": deliveries})
    status = seen.job.status.model_copy(update={"callback": outbox})
    lost = next((d for d in deliveries if d.state is DeliveryState.GIVEN_UP), None)
    owed = pending(deliveries)
    reason = Reason.DELIVERY_PENDING if owed else Reason.DELIVERED
    status = with_condition(
        seen,
        status,
        ConditionType.CALLBACK_DELIVERED,
        Reason.DELIVERY_FAILED if lost else reason,
        holds=not owed and not lost,
        message=(lost or owed[0]).last_error or "" if lost or owed else "",
    )
    notes = tuple(
        note
        for old, new in zip(before.deliveries, deliveries, strict=True)
        if old != new and (note := _note(new))
    )
    return Plan(status=st.fit(stamped(seen, status)), notes=notes, requeue_at=seen.now)


def _note(tried: Delivery) -> Note | None:
    """Tell people of tries that failed: of the first, and whenever there were twice as many."""
    tries = f"{tried.attempts} {'try' if tried.attempts == 1 else 'tries'}"
    if tried.state is DeliveryState.GIVEN_UP:
        text = f"event {tried.id} was given up after {tries}: {tried.last_error}"
        return Note(Reason.DELIVERY_FAILED, text, warning=True)
    seldom = tried.attempts.bit_count() == 1 and not tried.holds
    if tried.state is DeliveryState.PENDING and tried.next_attempt_at and seldom:
        again = format_time(tried.next_attempt_at)
        text = f"event {tried.id} was not taken, {tries}, next at {again}: {tried.last_error}"
        return Note(Reason.DELIVERY_PENDING, text, warning=True)
    return None


def _let_go(seen: Observed, owed: Sequence[Delivery]) -> Plan:
    """Let a deleted AgentJob go; its owed event gets a last, bounded chance."""
    if FINALIZER not in seen.job.metadata.finalizers:
        return Plan()
    patience = (seen.job.status.finished_at or seen.now) + DELETION_PATIENCE
    asked = seen.job.metadata.deletion_timestamp
    patience = max(patience, asked + DELETION_PATIENCE) if asked else patience
    if owed and seen.now < patience:
        plan = due(seen, owed)
        wake = min(plan.requeue_at, patience) if plan.requeue_at else patience
        return replace(plan, requeue_at=wake)
    if owed:
        why = "the AgentJob was deleted"
        given_up = {each.id: give_up(each, why) for each in owed}
        outbox = seen.job.status.callback
        deliveries = outbox.deliveries if outbox else ()
        return _write(seen, tuple(given_up.get(each.id, each) for each in deliveries))
    kept = (DeleteOutput(),) if seen.keeps_output else ()
    return Plan(actions=(*kept, RemoveFinalizer()))


def _expires_at(seen: Observed, deliveries: Sequence[Delivery]) -> datetime:
    """When a finished and delivered AgentJob is deleted (R-TTL)."""
    effective = seen.job.status.effective
    ttl = seen.job.spec.ttl_seconds_after_finished
    if ttl is None and effective:
        ttl = effective.ttl_seconds_after_finished
    if ttl is None:
        ttl = seen.policy.default_ttl
    ended = [seen.job.status.finished_at or seen.now]
    ended += [each.delivered_at for each in deliveries if each.delivered_at]
    return max(ended) + timedelta(seconds=ttl)
