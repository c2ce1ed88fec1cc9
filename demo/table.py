"""Shows jobs while they run: a table that is drawn over itself, or lines where that cannot be."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TextIO

HEADINGS = ("JOB", "STATE", "POD", "TIME", "PROGRESS")
GAP = "  "
PERCENT_STEP = 10
"""Where output is not a terminal, progress is worth a line only every so often."""
PROGRESS_LINE = re.compile(r"^::progress (\d{1,3}) (.*)$")
UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f]")


@dataclass(frozen=True)
class Row:
    """One job, in words."""

    job: str
    state: str
    pod: str
    seconds: int
    percent: int | None = None
    text: str = ""

    @property
    def cells(self) -> tuple[str, ...]:
        """Return the texts of the columns."""
        percent = "" if self.percent is None else f"{self.percent}% "
        return (self.job, self.state, self.pod or "-", f"{self.seconds}s", percent + self.text)


def progress_of(line: str) -> tuple[int, str] | None:
    """Return percent and text if this line of a log tells progress."""
    found = PROGRESS_LINE.match(line)
    return (min(int(found[1]), 100), found[2]) if found else None


def lines_of(rows: Sequence[Row], width: int) -> list[str]:
    """Return the table; no line is longer than the terminal is wide."""
    cells = [HEADINGS, *(row.cells for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    padded = (GAP.join(map(str.ljust, line, widths)).rstrip() for line in cells)
    # What a tool printed must not move the cursor.
    return [UNPRINTABLE.sub("?", line)[:width] for line in padded]


@dataclass
class Display:
    """Writes the rows each time they are given."""

    stream: TextIO
    terminal: bool
    width: int
    _drawn: int = 0
    _said: dict[str, tuple[str, str, int]] = field(default_factory=dict)

    def show(self, rows: Sequence[Row]) -> None:
        """Draw the table anew, or write a line for each job that has moved."""
        if self.terminal:
            self._draw(lines_of(rows, self.width))
        else:
            self._say(rows)
        self.stream.flush()

    def _draw(self, lines: Sequence[str]) -> None:
        up = f"\x1b[{self._drawn}A" if self._drawn else ""
        self.stream.write(up + "".join(f"\x1b[2K{line}\n" for line in lines))
        self._drawn = len(lines)

    def _say(self, rows: Sequence[Row]) -> None:
        for row in rows:
            now = (row.state, row.pod, (row.percent or 0) // PERCENT_STEP)
            if self._said.get(row.job) != now:
                self._said[row.job] = now
                line = GAP.join((f"{row.seconds:>4}s", *row.cells[:3], row.cells[4])).rstrip()
                self.stream.write(f"{UNPRINTABLE.sub('?', line)}\n")
