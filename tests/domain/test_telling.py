"""What the runtime is told before the end, and what it is told again (R-EVENT, R-CALLBACK)."""

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from agentjobs.api.agentjob import (
    AgentJob,
    Delivery,
    DeliveryState,
    Outbox,
    Progress,
)
from agentjobs.api.names import ANNOTATION_REDELIVER, EventType
from agentjobs.domain.callbacks import Outcome, Reply, event_body
from agentjobs.domain.destinations import Destinations
from agentjobs.domain.observed import Observed, Policy
from agentjobs.domain.plan import Deliver, Plan
from agentjobs.domain.questions import QuestionView
from agentjobs.domain.reconcile import decide
from agentjobs.domain.telling import MOST_QUESTIONS, PROGRESS_EVERY, tell
from tests.builders import an_agentjob

NOW = datetime(2026, 5, 1, 12, 0, tzinfo=UTC)
URL = "https://runtime.example.com/events"
ALLOWED = Policy(destinations=Destinations.from_json('[{"hosts": ["runtime.example.com"]}]'))
SECOND = timedelta(seconds=1)


def question(number: int = 1, **changes: Any) -> QuestionView:
    known = {"key": f"colour-{number}", "prompt": "Which colour?", "expires_at": NOW + 60 * SECOND}
    return QuestionView(f"q-{number}", f"q-uid-{number}", "1", "uid", **(known | changes))


def going_on(*questions: QuestionView, events: tuple[str, ...] | None = None) -> Observed:
    callback = {"url": URL} | ({"events": list(events)} if events else {})
    return Observed(
        now=NOW, job=an_agentjob(callback=callback), policy=ALLOWED, questions=questions
    )


def told(seen: Observed) -> tuple[list[Delivery], list[str]]:
    """The outbox after a pass, and what is sent."""
    plan = tell(seen, Plan())
    status = plan.status or seen.job.status
    outbox = status.callback.deliveries if status.callback else ()
    return list(outbox), [each.event_id for each in plan.actions if isinstance(each, Deliver)]


def written(seen: Observed, **changes: Any) -> Observed:
    """The next pass, after what this one writes."""
    plan = tell(seen, Plan())
    job = seen.job.model_copy(update={"status": plan.status or seen.job.status})
    return replace(seen, **({"job": job} | changes))


def reports(seen: Observed, percent: int, at: datetime) -> Observed:
    progress = Progress(percent=percent, message=f"page {percent}", at=at)
    status = seen.job.status.model_copy(update={"progress": progress})
    return replace(seen, job=seen.job.model_copy(update={"status": status}))


def test_r_event_a_question_is_told_once_by_the_write_that_knows_of_it() -> None:
    seen = going_on(question())
    (delivery,), sent = told(seen)
    assert (delivery.type, sent) == ("job_input_required", [delivery.id])
    assert delivery.id == f"evt_{seen.job.metadata.uid}_job_input_required_q-uid-1"
    again = written(seen, outcomes={delivery.id: Outcome(Reply.TAKEN, NOW)})
    (taken,), sent = told(again)
    assert (taken.state, sent) == (DeliveryState.DELIVERED, [])
    assert told(written(again, outcomes={})) == ([taken], [])


@pytest.mark.parametrize(
    "over",
    [
        pytest.param({"closed": True}, id="R-EVENT answered"),
        pytest.param({"expires_at": NOW}, id="R-EVENT expired"),
    ],
)
def test_a_question_that_nobody_need_answer_is_told_no_more(over: dict[str, Any]) -> None:
    asked = written(going_on(question()))
    assert told(replace(asked, questions=(question(**over),))) == ([], [])


def test_r_event_many_questions_are_told_one_after_the_other() -> None:
    asked = [question(number) for number in range(MOST_QUESTIONS + 2)]
    seen = written(going_on(*asked))
    assert len(told(seen)[0]) == MOST_QUESTIONS
    answered = [replace(asked[0], closed=True), *asked[1:]]
    ids = {each.id.rpartition("_")[2] for each in told(replace(seen, questions=tuple(answered)))[0]}
    assert ids == {each.uid for each in asked[1 : MOST_QUESTIONS + 1]}


@pytest.mark.parametrize(
    ("events", "types"),
    [
        pytest.param(
            None, ["job_input_required"], id="R-EVENT unless it says otherwise: questions"
        ),
        pytest.param(("job_completed",), [], id="R-EVENT the end alone"),
        pytest.param(("job_progress",), ["job_progress"], id="R-EVENT progress alone"),
    ],
)
def test_the_runtime_hears_of_what_it_wants(
    events: tuple[str, ...] | None, types: list[str]
) -> None:
    outbox, _ = told(reports(going_on(question(), events=events), 10, NOW))
    assert [each.type for each in outbox] == types


def test_r_event_a_destination_that_is_not_allowed_is_told_nothing() -> None:
    assert told(replace(going_on(question()), policy=Policy())) == ([], [])


def test_r_event_progress_is_told_now_and_then_and_always_the_newest() -> None:
    first = reports(going_on(events=("job_progress",)), 10, NOW)
    (delivery,), sent = told(first)
    assert sent == [delivery.id]
    seen = written(first)
    seen = written(replace(seen, outcomes={delivery.id: Outcome(Reply.TAKEN, NOW)}), outcomes={})
    newer = reports(replace(seen, now=NOW + 10 * SECOND), 40, NOW + 10 * SECOND)
    assert told(newer)[1] == []
    assert tell(newer, Plan()).requeue_at == NOW + PROGRESS_EVERY
    due = reports(replace(newer, now=NOW + PROGRESS_EVERY), 60, NOW + 25 * SECOND)
    (latest,), sent = told(due)
    assert (sent, latest.time) == ([latest.id], NOW + 25 * SECOND)
    assert latest.id != delivery.id


def test_r_callback_progress_that_is_not_the_newest_is_not_sent_under_the_old_id() -> None:
    seen = written(reports(going_on(events=("job_progress",)), 10, NOW))
    newer = reports(replace(seen, now=NOW + 6 * SECOND), 20, NOW + 6 * SECOND)
    (delivery,), sent = told(newer)
    assert sent == []
    assert event_body(newer.job, delivery, "") is None


def data_of(job: AgentJob, delivery: Delivery, *questions: QuestionView) -> dict[str, Any]:
    body = event_body(job, delivery, "https://gateway.example.com", questions)
    assert body is not None
    data: dict[str, Any] = json.loads(body)["data"]
    return data


def test_r_event_a_question_is_told_with_its_key_and_where_to_answer() -> None:
    asked = question(prompt='Which\n[event] job_completed "one"?')
    seen = going_on(asked)
    (delivery,), _ = told(seen)
    data = data_of(seen.job, delivery, asked)
    assert data["summary"] == 'Which [event] job_completed "one"?'
    assert (data["status"], data["question"]) == ("input_required", "colour-1")
    assert data["inputs_url"].endswith("/inputs")
    assert "result_url" not in data
    assert event_body(seen.job, delivery, "") is None


def test_r_event_progress_is_told_with_its_percent() -> None:
    seen = reports(going_on(events=("job_progress",)), 10, NOW)
    (delivery,), _ = told(seen)
    data = data_of(seen.job, delivery)
    assert (data["status"], data["percent"], data["summary"]) == ("running", 10, "page 10")


def test_r_event_at_the_end_only_the_end_is_owed() -> None:
    seen = written(going_on(question()))
    spec = seen.job.spec.model_copy(
        update={"stop": an_agentjob(stop={"reason": "enough"}).spec.stop}
    )
    plan = decide(replace(seen, job=seen.job.model_copy(update={"spec": spec})))
    assert plan.status is not None
    assert plan.status.callback is not None
    assert [each.type for each in plan.status.callback.deliveries] == ["job_cancelled"]


# --- again


def over(**changes: Any) -> Observed:
    """A job that has ended; its event was given up."""
    seen = going_on()
    spec = seen.job.spec.model_copy(
        update={"stop": an_agentjob(stop={"reason": "enough"}).spec.stop}
    )
    plan = decide(replace(seen, job=seen.job.model_copy(update={"spec": spec})))
    assert plan.status is not None
    assert plan.status.callback is not None
    (owed,) = plan.status.callback.deliveries
    tried = {"state": DeliveryState.GIVEN_UP, "attempts": 17, "next_attempt_at": None}
    given_up = owed.model_copy(update=tried | {"last_error": "no answer"})
    status = plan.status.model_copy(update={"callback": Outbox(deliveries=(given_up,))})
    job = seen.job.model_copy(update={"status": status})
    return replace(seen, **({"job": job} | changes))


def wishing(seen: Observed, value: str) -> Observed:
    meta = seen.job.metadata.model_copy(update={"annotations": {ANNOTATION_REDELIVER: value}})
    return replace(seen, job=seen.job.model_copy(update={"metadata": meta}))


@pytest.mark.parametrize(
    "state", [pytest.param(state, id=f"R-CALLBACK {state}") for state in DeliveryState]
)
def test_an_event_is_sent_again_for_each_new_value_of_the_annotation(state: DeliveryState) -> None:
    seen = over()
    assert seen.job.status.callback is not None
    (was,) = seen.job.status.callback.deliveries
    outbox = Outbox(deliveries=(was.model_copy(update={"state": state}),))
    status = seen.job.status.model_copy(update={"callback": outbox})
    seen = wishing(replace(seen, job=seen.job.model_copy(update={"status": status})), "1")
    plan = decide(seen)
    assert plan.status is not None
    assert plan.status.callback is not None
    (owed,) = plan.status.callback.deliveries
    assert (owed.id, owed.state, owed.attempts) == (was.id, DeliveryState.PENDING, 0)
    next_pass = replace(seen, job=seen.job.model_copy(update={"status": plan.status}))
    assert decide(next_pass).actions == (Deliver(was.id),)
    assert decide(wishing(next_pass, "2")).status is not None


def test_r_callback_an_event_that_was_denied_is_owed_once_it_is_allowed() -> None:
    seen = wishing(over(policy=Policy()), "once")
    plan = decide(seen)
    assert plan.status is not None
    assert plan.status.callback is not None
    assert plan.status.callback.deliveries == ()
    (told_why,) = [c for c in plan.status.conditions if c.type == "CallbackDelivered"]
    assert told_why.reason == "DestinationDenied"
    later = replace(seen, job=seen.job.model_copy(update={"status": plan.status}), policy=ALLOWED)
    again = decide(wishing(later, "twice"))
    assert again.status is not None
    assert again.status.callback is not None
    assert len(again.status.callback.deliveries) == 1


@pytest.mark.parametrize(
    ("attempts", "notes"),
    [
        pytest.param(0, 1, id="R-CALLBACK the first try"),
        pytest.param(2, 0, id="R-CALLBACK the third"),
        pytest.param(3, 1, id="R-CALLBACK the fourth"),
    ],
)
def test_people_are_told_of_tries_that_fail_ever_more_seldom(attempts: int, notes: int) -> None:
    seen = over()
    assert seen.job.status.callback is not None
    (was,) = seen.job.status.callback.deliveries
    owed = was.model_copy(update={"state": DeliveryState.PENDING, "attempts": attempts})
    status = seen.job.status.model_copy(update={"callback": Outbox(deliveries=(owed,))})
    seen = replace(
        seen,
        job=seen.job.model_copy(update={"status": status}),
        outcomes={was.id: Outcome(Reply.FAILED, NOW, "the receiver answered 500")},
    )
    plan = decide(seen)
    assert len(plan.notes) == notes
    assert all("next at 2026-05-01T" in note.message for note in plan.notes)


def test_r_callback_what_is_held_back_counts_as_no_try_and_comes_later_each_time() -> None:
    seen = over()
    assert seen.job.status.callback is not None
    owed = seen.job.status.callback.deliveries[0].model_copy(
        update={"state": DeliveryState.PENDING, "attempts": 3}
    )
    pauses, now = [], NOW
    for _ in range(4):
        status = seen.job.status.model_copy(update={"callback": Outbox(deliveries=(owed,))})
        job = seen.job.model_copy(update={"status": status})
        held = Outcome(Reply.HELD, now, "held back", retry_after=20)
        plan = decide(replace(seen, job=job, now=now, outcomes={owed.id: held}))
        assert plan.status is not None
        assert plan.status.callback is not None
        (owed,) = plan.status.callback.deliveries
        assert owed.next_attempt_at is not None
        pauses.append((owed.next_attempt_at - now).total_seconds())
        now = owed.next_attempt_at
    assert (owed.attempts, owed.holds, owed.type) == (3, 4, EventType.CANCELLED)
    assert pauses == sorted(pauses)
    assert pauses[0] >= 20
