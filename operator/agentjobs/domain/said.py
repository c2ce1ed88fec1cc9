"""What a tool that cannot speak HTTP says in its output: `::progress 40 text`, `::summary text`."""

from dataclasses import dataclass, replace

from agentjobs.api.names import SUMMARY_CHARACTERS
from agentjobs.domain.texts import cut, one_line

PROGRESS = b"::progress "
SUMMARY = b"::summary "
LONGEST = 2048
"""Of a line that is looked at, in bytes; of a longer one the beginning counts."""
MESSAGE_CHARACTERS = 256
LARGEST_PERCENT = 100


def is_marked(line: str) -> bool:
    """Whether a line is one of these, and no result."""
    return line.startswith((PROGRESS.decode(), SUMMARY.decode()))


@dataclass(frozen=True, slots=True)
class Said:
    """The newest of both."""

    percent: int | None = None
    message: str = ""
    summary: str = ""


class Listener:
    """Listens to an output as it comes, in pieces of any size; a line is never held whole."""

    def __init__(self) -> None:
        self.said = Said()
        self._line = bytearray()

    def feed(self, data: bytes) -> None:
        """Take the next bytes of the output."""
        # Most output says nothing; only what may be a line of ours is looked at.
        if not self._line and b"::" not in data:
            data = data[data.rfind(b"\n") + 1 :]
        for piece in data.splitlines(keepends=True):
            room = LONGEST - len(self._line)
            self._line += piece[: max(room, 0)]
            if piece.endswith(b"\n"):
                self._hear(bytes(self._line))
                self._line.clear()

    def end(self) -> None:
        """Take what was said in a last line that has no end."""
        self._hear(bytes(self._line))
        self._line.clear()

    def _hear(self, line: bytes) -> None:
        if line.startswith(SUMMARY):
            text = one_line(line.removeprefix(SUMMARY).decode("utf-8", "replace"))
            self.said = replace(self.said, summary=cut(text, SUMMARY_CHARACTERS))
        elif line.startswith(PROGRESS):
            self._hear_progress(line.removeprefix(PROGRESS).decode("utf-8", "replace").strip())

    def _hear_progress(self, text: str) -> None:
        number, _, message = text.partition(" ")
        number = number.removesuffix("%")
        percent = int(number) if number.isascii() and number.isdecimal() else None
        if percent is None or percent > LARGEST_PERCENT:
            percent, message = None, text
        short = cut(one_line(message), MESSAGE_CHARACTERS)
        self.said = replace(self.said, percent=percent, message=short)
