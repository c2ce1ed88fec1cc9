"""Batches: in order, folded, within the budget, nothing left out."""

import re

from hypothesis import given, settings
from hypothesis import strategies as st

from agentjobs.api.names import EventType, State
from agentjobs.inbox.batch import Item, Role, compose, estimate_tokens
from tests.inbox.events import heard_of

bounded = settings(max_examples=200, derandomize=True, database=None, deadline=None)
KINDS = {
    EventType.COMPLETED: State.DONE,
    EventType.PROGRESS: State.RUNNING,
    EventType.INPUT_REQUIRED: State.INPUT_REQUIRED,
}


def ended(job: str, summary: str = "ok") -> Item:
    return Item(Role.EVENT, heard_of(f"{job}.team-a", summary=summary))


def told(job: str, kind: EventType) -> Item:
    return Item(Role.EVENT, heard_of(f"{job}.team-a", type=kind, status=KINDS[kind]))


def said(text: str) -> Item:
    return Item(Role.USER, text=text)


ITEMS = st.lists(
    st.one_of(
        st.builds(
            lambda job, kind, size: Item(
                Role.EVENT,
                heard_of(f"{job}.team-a", type=kind, status=KINDS[kind], summary="s" * size),
            ),
            st.sampled_from("abc"),
            st.sampled_from(list(KINDS)),
            st.integers(0, 280),
        ),
        st.text(min_size=1, max_size=80).map(said),
    ),
    min_size=1,
    max_size=12,
)


def lines(items: list[Item], budget: int = 10_000) -> list[str]:
    return [line for part in compose(items, budget).parts for line in part.text.split("\n")]


def test_users_and_events_keep_the_order_of_their_arrival() -> None:
    batch = compose([ended("a"), said("hi"), ended("b"), ended("c"), said("and?")], 10_000)
    assert [part.role for part in batch.parts] == [Role.EVENT, Role.USER, Role.EVENT, Role.USER]
    assert re.findall(r"job_id=(\w)", batch.parts[2].text) == ["b", "c"]
    assert batch.items == 5


def test_a_finished_job_folds_into_one_line() -> None:
    progress, asked = EventType.PROGRESS, EventType.INPUT_REQUIRED
    shown = lines([told("a", progress), told("a", asked), told("b", progress), ended("a")])
    assert len(shown) == 2
    assert "job_progress job_id=b" in shown[0]
    assert "job_completed job_id=a.team-a tool=crawl status=done earlier_events=2 " in shown[1]


def test_progress_hides_no_open_question() -> None:
    shown = lines([told("a", EventType.INPUT_REQUIRED), *[told("a", EventType.PROGRESS)] * 3])
    assert [line.split()[1] for line in shown] == ["job_input_required", "job_progress"]
    assert "earlier_events=2" in shown[1]


def test_two_ends_of_one_name_are_two_lines() -> None:
    # Names live again after their time to live.
    assert len(lines([ended("a"), ended("a")])) == 2


def test_the_longest_summaries_are_cut_first() -> None:
    items = [ended("a", "x" * 20), ended("b", "y" * 200), ended("c", "z" * 250)]
    whole = compose(items, 10_000)
    budget = whole.tokens - 60
    cut = compose(items, budget)
    shown = [
        re.findall(r'summary: "(.*)" details', line)[0] for line in cut.parts[0].text.split("\n")
    ]
    assert cut.items == 3
    assert cut.tokens <= budget
    assert shown[0] == "x" * 20
    assert len(shown[1]) == len(shown[2]) < 200
    assert shown[1].endswith("…")


def test_what_does_not_fit_waits_for_the_next_batch() -> None:
    items = [ended(job) for job in "abcdef"]
    budget = 2 * estimate_tokens(lines(items[:1])[0])
    taken = compose(items, budget).items
    assert 1 <= taken < 6


def test_a_message_that_is_too_long_comes_alone_and_whole() -> None:
    batch = compose([said("w" * 9000), ended("a")], 100)
    assert (batch.items, batch.parts[0].text) == (1, "w" * 9000)


@bounded
@given(ITEMS, st.integers(1, 1500))
def test_no_item_is_left_out_and_the_budget_holds(items: list[Item], budget: int) -> None:
    """Batch after batch, every end and every message comes exactly once, in order."""
    left, shown = list(items), []
    while left:
        batch = compose(left, budget)
        assert batch.items >= 1
        assert batch.items == 1 or batch.tokens <= budget
        shown += [
            line
            for part in batch.parts
            for line in ([part.text] if part.role is Role.USER else part.text.split("\n"))
        ]
        left = left[batch.items :]
    ends = [i.event.job_id if i.event else i.text for i in items if not i.event or i.event.over]
    found = [
        line.split("job_id=")[1].split()[0] if line.startswith("[event] job_completed") else line
        for line in shown
        if not line.startswith(("[event] job_progress", "[event] job_input"))
    ]
    assert found == ends
    events = sum(1 for item in items if item.event)
    folded = sum(int(n) for line in shown for n in re.findall(r"earlier_events=(\d+)", line))
    assert folded + sum(line.startswith("[event] ") for line in shown) == events


@bounded
@given(ITEMS, st.integers(1, 1500))
def test_the_same_items_make_the_same_batch(items: list[Item], budget: int) -> None:
    assert compose(items, budget) == compose(items, budget)
