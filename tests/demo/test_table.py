"""The demo's live table, on a terminal and elsewhere."""

import io

import pytest

from demo.table import Display, Row, lines_of, progress_of

QUEUED = Row(job="build", state="queued", pod="", seconds=0, text="slot")
RUNNING = Row(job="build", state="running", pod="Running", seconds=7, percent=40, text="file 4")


def test_columns_are_as_wide_as_their_longest_cell() -> None:
    assert lines_of([QUEUED, RUNNING], width=80) == [
        "JOB    STATE    POD      TIME  PROGRESS",
        "build  queued   -        0s    slot",
        "build  running  Running  7s    40% file 4",
    ]


def test_no_line_is_wider_than_the_terminal() -> None:
    assert all(len(line) <= 20 for line in lines_of([QUEUED, RUNNING], width=20))


def test_what_a_tool_prints_cannot_move_the_cursor() -> None:
    row = Row(job="build", state="running", pod="Running", seconds=1, text="a\x1b[2Jb\rc")
    assert lines_of([row], width=80)[1].endswith("a?[2Jb?c")


def test_on_a_terminal_the_table_is_drawn_over_itself() -> None:
    stream = io.StringIO()
    display = Display(stream=stream, terminal=True, width=80)
    display.show([QUEUED])
    first = stream.getvalue()
    display.show([RUNNING])
    assert not first.startswith("\x1b[2A")
    assert stream.getvalue().removeprefix(first).startswith("\x1b[2A\x1b[2KJOB")


def test_elsewhere_a_line_is_written_when_the_state_changes() -> None:
    stream = io.StringIO()
    display = Display(stream=stream, terminal=False, width=80)
    for row in (QUEUED, QUEUED, RUNNING, RUNNING):
        display.show([row])
    assert stream.getvalue().splitlines() == [
        "   0s  build  queued  -  slot",
        "   7s  build  running  Running  40% file 4",
    ]


def test_elsewhere_progress_is_written_in_steps_of_ten_percent() -> None:
    stream = io.StringIO()
    display = Display(stream=stream, terminal=False, width=80)
    for percent in (40, 41, 49, 50):
        display.show([Row("build", "running", "Running", percent, percent)])
    assert [line.split()[0] for line in stream.getvalue().splitlines()] == ["40s", "50s"]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("::progress 40 file 4 of 10", (40, "file 4 of 10")),
        ("::progress 140 too far", (100, "too far")),
        ("::progress soon", None),
        ("gcc -c a.c", None),
    ],
)
def test_progress_lines_are_told_from_other_output(
    line: str, expected: tuple[int, str] | None
) -> None:
    assert progress_of(line) == expected
