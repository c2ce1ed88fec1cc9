"""Destinations that fail time after time are left alone, each by itself (R-CALLBACK)."""

from datetime import UTC, datetime, timedelta

import pytest

from agentjobs.domain.breaker import (
    FIRST_PAUSE_SECONDS,
    LARGEST_PAUSE_SECONDS,
    OPENS_AFTER,
    Breaker,
    Standing,
)
from agentjobs.domain.callbacks import Outcome, Reply, answered

NOW = datetime(2026, 5, 1, 12, 0, tzinfo=UTC)


def silence(at: datetime = NOW) -> Outcome:
    return Outcome(Reply.FAILED, at, "no answer", works=False)


def after(*outcomes: Outcome, breaker: Breaker | None = None) -> Breaker:
    breaker = breaker or Breaker()
    for each in outcomes:
        breaker = breaker.after(each)
    return breaker


@pytest.mark.parametrize(
    ("outcomes", "standing"),
    [
        pytest.param([silence()] * (OPENS_AFTER - 1), Standing.CLOSED, id="R-CALLBACK a few"),
        pytest.param([silence()] * OPENS_AFTER, Standing.OPEN, id="R-CALLBACK many in a row"),
        pytest.param(
            [*[silence()] * (OPENS_AFTER - 1), answered(204, "", NOW), silence()],
            Standing.CLOSED,
            id="R-CALLBACK a success begins anew",
        ),
        pytest.param(
            [*[silence()] * (OPENS_AFTER - 1), answered(404, "", NOW), silence()],
            Standing.CLOSED,
            id="R-CALLBACK who says 404 is there",
        ),
        pytest.param(
            [answered(500, "", NOW)] * OPENS_AFTER, Standing.OPEN, id="R-CALLBACK 500 is a failure"
        ),
        pytest.param([answered(503, "9", NOW)], Standing.OPEN, id="R-CALLBACK asked for a pause"),
        pytest.param([answered(404, "9", NOW)], Standing.CLOSED, id="R-CALLBACK 404 asks nothing"),
        pytest.param(
            [Outcome(Reply.FAILED, NOW, "not allowed")] * 9,
            Standing.CLOSED,
            id="R-CALLBACK what was not sent says nothing",
        ),
    ],
)
def test_a_breaker_opens_after(outcomes: list[Outcome], standing: Standing) -> None:
    assert after(*outcomes).standing(NOW) is standing


def test_r_callback_pauses_double_up_to_their_bound_and_end_with_one_success() -> None:
    breaker, at, pauses = after(*[silence()] * OPENS_AFTER), NOW, []
    for _ in range(9):
        assert breaker.open_until is not None
        pauses.append((breaker.open_until - at).total_seconds())
        at = breaker.open_until
        assert breaker.standing(at) is Standing.HALF_OPEN
        breaker = breaker.after(silence(at))
    assert pauses[:3] == [FIRST_PAUSE_SECONDS, 2 * FIRST_PAUSE_SECONDS, 4 * FIRST_PAUSE_SECONDS]
    assert pauses[-1] == LARGEST_PAUSE_SECONDS
    assert breaker.after(answered(200, "", at)) == Breaker()


def test_r_callback_what_was_under_way_when_it_opened_makes_no_pause_longer() -> None:
    opened = after(*[silence()] * OPENS_AFTER)
    later = after(*[silence(NOW + timedelta(seconds=1))] * 3, breaker=opened)
    assert (later.open_until, later.pauses) == (opened.open_until, opened.pauses)


def test_r_callback_a_receiver_may_ask_for_an_hour_and_no_more() -> None:
    asked = after(answered(429, "999999", NOW))
    assert asked.open_until == NOW + timedelta(hours=1)
