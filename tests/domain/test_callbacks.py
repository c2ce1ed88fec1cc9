"""Events: what is owed, what it says, when it is tried again."""

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address

import pytest

from agentjobs.api.agentjob import AgentJob, Callback, Delivery, DeliveryState
from agentjobs.api.names import EventType, State
from agentjobs.domain.callbacks import (
    RETRY_WINDOW,
    Outcome,
    Reply,
    after,
    answered,
    event_body,
    outbox_of,
    pause,
)
from agentjobs.domain.destinations import Address, Destinations
from agentjobs.domain.observed import LookUp, Observed, Policy
from agentjobs.domain.plan import CreateJob, Deliver, RemoveFinalizer
from agentjobs.domain.reconcile import decide
from tests.builders import an_agentjob, at

NOW = datetime(2026, 5, 1, 12, 0, tzinfo=UTC)
URL = "https://runtime.example.com/events"
ALLOWED = Policy(destinations=Destinations.from_json('[{"hosts": ["runtime.example.com"]}]'))


def finished(state: State, **status: object) -> AgentJob:
    job = an_agentjob()
    spec = job.spec.model_copy(update={"callback": Callback(url=URL)})
    changed = job.status.model_copy(update={"state": state, "finished_at": NOW, **status})
    return job.model_copy(update={"spec": spec, "status": changed})


def owed(**changes: object) -> Delivery:
    return Delivery(
        id="evt_u_job_completed", type=EventType.COMPLETED, time=NOW, next_attempt_at=NOW
    ).model_copy(update=changes)


@pytest.mark.parametrize(
    ("state", "kind"),
    [
        pytest.param(State.DONE, "job_completed", id="R-EVENT done is completed"),
        pytest.param(State.FAILED, "job_completed", id="R-EVENT failed is completed"),
        pytest.param(State.CANCELLED, "job_cancelled", id="R-EVENT cancelled is cancelled"),
        pytest.param(State.TIMED_OUT, "job_timed_out", id="R-EVENT timed out is timed out"),
    ],
)
def test_every_end_owes_one_event_whose_id_carries_the_uid(state: State, kind: str) -> None:
    job = finished(state)
    outbox = outbox_of(job, job.status, NOW)
    assert outbox is not None
    (delivery,) = outbox.deliveries
    assert (delivery.type, delivery.id) == (kind, f"evt_{job.metadata.uid}_{kind}")


def test_r_event_only_the_types_that_were_asked_for_are_owed() -> None:
    job = finished(State.DONE)
    callback = Callback(url=URL, events=(EventType.CANCELLED,))
    job = job.model_copy(update={"spec": job.spec.model_copy(update={"callback": callback})})
    assert outbox_of(job, job.status, NOW) is None


def test_r_event_a_tool_cannot_forge_a_second_event_or_line() -> None:
    words = 'fine\n[event] job_completed job_id=other\r\u2028"}]\u202e'
    job = finished(State.DONE, summary=words)
    body = event_body(job, owed(), "https://gateway.example.com/")
    assert b"\n" not in body
    data = json.loads(body)["data"]
    assert data["summary"] == 'fine [event] job_completed job_id=other "}]'
    assert data["result_url"].startswith("https://gateway.example.com/v1/jobs/")


def test_r_callback_the_bytes_are_the_same_on_every_try() -> None:
    job = finished(State.DONE)
    tried = after(owed(), Outcome(Reply.FAILED, NOW, "500"))
    assert event_body(job, owed(), "") == event_body(job, tried, "")


def test_r_callback_tries_grow_apart_and_end_after_72_hours() -> None:
    delivery, now, tries = owed(), NOW, 0
    while delivery.state is DeliveryState.PENDING:
        delivery = after(delivery, Outcome(Reply.FAILED, now, "no connection"))
        tries += 1
        if delivery.next_attempt_at:
            assert delivery.next_attempt_at > now
            now = delivery.next_attempt_at
        assert delivery.id == owed().id
    assert delivery.state is DeliveryState.GIVEN_UP
    assert timedelta(hours=60) < now - NOW <= RETRY_WINDOW
    assert 15 <= tries <= 25


@pytest.mark.parametrize("attempts", range(1, 30))
def test_r_callback_retry_after_is_honoured_up_to_an_hour(attempts: int) -> None:
    assert pause("evt_a", attempts, 1800) >= 1800
    assert pause("evt_a", attempts, 10**9) <= max(3600, 6 * 3600 * 1.2)


def test_r_callback_410_ends_it() -> None:
    given_up = after(owed(), Outcome(Reply.GONE, NOW, "the receiver answered 410"))
    assert given_up.state is DeliveryState.GIVEN_UP


def end_of(policy: Policy) -> Observed:
    """A job that was stopped before anything ran: its next pass writes the end."""
    job = an_agentjob(stop={"reason": "enough"}, callback={"url": URL})
    return Observed(now=NOW, job=job, policy=policy)


def test_r_two_writes_the_event_is_owed_by_the_same_write_that_records_the_end() -> None:
    plan = decide(end_of(ALLOWED))
    assert plan.status is not None
    assert plan.status.finished_at is not None
    assert plan.status.callback is not None
    (delivery,) = plan.status.callback.deliveries
    assert plan.actions == (Deliver(delivery.id),)


def test_r_callback_a_destination_that_nobody_allowed_is_told_nothing() -> None:
    plan = decide(end_of(Policy()))
    assert plan.status is not None
    assert plan.status.callback is None
    (told,) = [c for c in plan.status.conditions if c.type == "CallbackDelivered"]
    assert (told.status, told.reason) == ("False", "DestinationDenied")


def given(**changes: object) -> Observed:
    """A job that nobody has looked at yet, with a receiver that is allowed by its name."""
    job = an_agentjob(callback={"url": URL})
    return replace(Observed(now=at(1), job=job, policy=ALLOWED), **changes)


@pytest.mark.parametrize("inside", ["10.0.0.5", "169.254.169.254", "::ffff:127.0.0.1"])
def test_r_callback_a_name_that_points_inside_ends_the_job_before_anything_runs(
    inside: str,
) -> None:
    assert decide(given()).need == LookUp("runtime.example.com")
    plan = decide(given(receiver_at=(ip_address("93.184.216.34"), ip_address(inside))))
    assert plan.status is not None
    assert plan.status.cause is not None
    assert plan.status.cause.code == "invalid_spec"
    assert not any(isinstance(action, CreateJob) for action in plan.actions)
    assert "runtime.example.com:443 leads to where no event" in plan.status.cause.message
    assert inside not in plan.status.model_dump_json(), "no tenant is told what is inside"


@pytest.mark.parametrize("found", [(), (ip_address("93.184.216.34"),)], ids=["unknown", "public"])
def test_r_callback_a_name_that_may_be_called_or_that_nobody_knows_is_no_hindrance(
    found: tuple[Address, ...],
) -> None:
    plan = decide(given(receiver_at=found))
    assert any(isinstance(action, CreateJob) for action in plan.actions)


def after_the_end(**changes: object) -> Observed:
    seen = end_of(ALLOWED)
    plan = decide(seen)
    job = seen.job.model_copy(update={"status": plan.status})
    return replace(seen, job=job, **changes)  # type: ignore[arg-type]


def test_r_callback_an_event_in_flight_is_not_sent_again() -> None:
    seen = after_the_end()
    assert seen.job.status.callback is not None
    (delivery,) = seen.job.status.callback.deliveries
    assert decide(seen).actions == (Deliver(delivery.id),)
    assert decide(replace(seen, in_flight=frozenset({delivery.id}))).actions == ()


def test_r_callback_a_taken_event_is_recorded_and_never_sent_again() -> None:
    seen = after_the_end()
    assert seen.job.status.callback is not None
    (delivery,) = seen.job.status.callback.deliveries
    plan = decide(replace(seen, outcomes={delivery.id: Outcome(Reply.TAKEN, NOW)}))
    assert plan.status is not None
    assert plan.status.callback is not None
    assert plan.status.callback.deliveries[0].state is DeliveryState.DELIVERED
    settled = replace(seen, job=seen.job.model_copy(update={"status": plan.status}))
    assert not any(isinstance(each, Deliver) for each in decide(settled).actions)


def test_r_ttl_a_job_is_kept_while_its_event_is_owed() -> None:
    seen = after_the_end(now=NOW + timedelta(days=2))
    assert seen.job.status.callback is not None
    (delivery,) = seen.job.status.callback.deliveries
    plan = decide(replace(seen, in_flight=frozenset({delivery.id})))
    assert plan.actions == ()


def test_r_stop_a_deleted_job_gives_its_event_a_minute_and_then_goes() -> None:
    seen = after_the_end()
    meta = seen.job.metadata.model_copy(update={"deletion_timestamp": NOW})
    seen = replace(seen, job=seen.job.model_copy(update={"metadata": meta}))
    assert isinstance(decide(seen).actions[0], Deliver)
    late = replace(seen, now=NOW + timedelta(seconds=61))
    plan = decide(late)
    assert plan.status is not None
    gone = replace(late, job=late.job.model_copy(update={"status": plan.status}))
    assert decide(gone).actions == (RemoveFinalizer(),)


@pytest.mark.parametrize(
    ("code", "header", "reply", "retry_after"),
    [
        pytest.param(204, "", Reply.TAKEN, None, id="R-CALLBACK 2xx takes it"),
        pytest.param(410, "9", Reply.GONE, None, id="R-CALLBACK 410 ends it at once"),
        pytest.param(302, "9", Reply.FAILED, None, id="R-CALLBACK a redirect takes nothing"),
        pytest.param(429, "7", Reply.FAILED, 7.0, id="R-CALLBACK 429 in seconds"),
        pytest.param(503, " 120 ", Reply.FAILED, 120.0, id="R-CALLBACK 503 in seconds"),
        pytest.param(
            503, "Fri, 01 May 2026 12:01:30 GMT", Reply.FAILED, 90.0, id="R-CALLBACK until a date"
        ),
        pytest.param(
            503, "Friday, 01-May-26 12:01:30 GMT", Reply.FAILED, 90.0, id="R-CALLBACK an old date"
        ),
        pytest.param(
            429, "Fri, 01 May 2026 11:00:00 GMT", Reply.FAILED, 0.0, id="R-CALLBACK a past date"
        ),
        pytest.param(429, "9" * 400, Reply.FAILED, float("inf"), id="R-CALLBACK for ever"),
        pytest.param(429, "-5", Reply.FAILED, None, id="R-CALLBACK less than nothing"),
        pytest.param(503, "soon", Reply.FAILED, None, id="R-CALLBACK in odd words"),
        pytest.param(503, "\u00b2", Reply.FAILED, None, id="R-CALLBACK in odd digits"),
        pytest.param(
            503,
            f"Wed, 21 Oct {'9' * 30} 07:28:00 GMT",
            Reply.FAILED,
            None,
            id="R-CALLBACK a far year",
        ),
    ],
)
def test_what_an_answer_means(
    code: int, header: str, reply: Reply, retry_after: float | None
) -> None:
    outcome = answered(code, header, NOW)
    assert (outcome.reply, outcome.retry_after) == (reply, retry_after)
    assert pause("evt_a", 1, outcome.retry_after) <= 3600
    assert outcome.reply is Reply.TAKEN or str(code) in outcome.error


def test_r_callback_a_redirect_says_that_nobody_follows_it() -> None:
    assert answered(308, "", NOW).error.endswith("redirects are not followed")


def test_r_callback_72_hours_count_from_the_first_try_not_from_the_end() -> None:
    """An operator that was away for a week tells all the same, and tries more than once."""
    late = NOW + timedelta(days=7)
    tried = after(owed(), Outcome(Reply.FAILED, late, "500"))
    assert (tried.state, tried.first_attempt_at) == (DeliveryState.PENDING, late)
