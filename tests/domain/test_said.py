"""Lines of a tool's output that say how far it is (R-REPORT's fallback)."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentjobs.domain.said import LONGEST, Listener, Said

TEXT = (
    b"starting\n::progress 10 unpacking\nnoise ::progress 90 not at the beginning\n"
    b"::progress 40% half \x1b[31mred\x1b[0m\n::summary 3 of 4 passed\nbye\n"
)


def heard(*pieces: bytes) -> Said:
    listener = Listener()
    for piece in pieces:
        listener.feed(piece)
    return listener.at_end()


@given(cuts=st.lists(st.integers(0, len(TEXT)), max_size=6).map(sorted))
def test_r_report_lines_are_heard_however_they_come(cuts: list[int]) -> None:
    edges = [0, *cuts, len(TEXT)]
    said = heard(*(TEXT[a:b] for a, b in itertools.pairwise(edges)))
    assert said == Said(percent=40, message="half [31mred [0m", summary="3 of 4 passed")


@pytest.mark.parametrize(
    ("line", "percent", "message"),
    [
        (b"::progress 100", 100, ""),
        (b"::progress 101 too much", None, "101 too much"),
        (b"::progress half way", None, "half way"),
        (b"::progress \xff", None, "\ufffd"),
        ("::progress ٣ x".encode(), None, "٣ x"),
    ],
)
def test_r_report_what_is_no_number_is_a_message(
    line: bytes, percent: int | None, message: str
) -> None:
    said = heard(line)
    assert (said.percent, said.message) == (percent, message)


def test_r_report_a_long_line_is_not_held() -> None:
    listener = Listener()
    for _ in range(1000):
        listener.feed(b"::summary " + b"x" * 10_000)
    assert len(listener._line) <= LONGEST
    said = listener.at_end()
    assert said.summary.startswith("xxx")
    assert len(said.summary) == 280


def test_r_report_a_tool_that_prints_nothing_else_costs_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read: list[bytes] = []
    monkeypatch.setattr("agentjobs.domain.said._with", lambda said, line: read.append(line) or said)
    lines = b"".join(b"::progress %d x\n::summary %d\n" % (n % 100, n) for n in range(10_000))
    Listener().feed(lines)
    assert read == [b"::progress 0 x", b"::summary 9999", b"::progress 99 x"]


def test_r_report_a_line_that_goes_on_after_its_end_seemed_to_be_there_is_heard_whole() -> None:
    listener = Listener()
    listener.feed(b"::progress 4")
    assert listener.at_end().percent == 4
    listener.feed(b"0 unpacking\n")
    assert listener.said == listener.at_end() == Said(40, "unpacking")
