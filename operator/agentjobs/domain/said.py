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
    """Listens to an output as it comes, in pieces of any size; a line is never held whole.

    Of many such lines in one piece the last of each kind is read: a tool may print nothing else.
    """

    def __init__(self) -> None:
        self.said = Said()
        self._line = bytearray()
        """The beginning of a line whose end is still to come."""

    def feed(self, data: bytes) -> None:
        """Take the next bytes of the output."""
        first, last = data.find(b"\n"), data.rfind(b"\n")
        room = max(LONGEST - len(self._line), 0)
        self._line += data[: room if first < 0 else min(first, room)]
        if first < 0:
            return
        self.said = _with(self.said, bytes(self._line))
        for kind in (SUMMARY, PROGRESS):
            begin = data.rfind(b"\n" + kind, first, last) + 1
            if begin:
                end = data.find(b"\n", begin)
                self.said = _with(self.said, data[begin : min(end, begin + LONGEST)])
        self._line[:] = data[last + 1 : last + 1 + LONGEST]

    def at_end(self) -> Said:
        """What was said if nothing more comes: a last line may have no end."""
        return _with(self.said, bytes(self._line))


def _with(said: Said, line: bytes) -> Said:
    """What was said once this line was, too."""
    if line.startswith(SUMMARY):
        text = one_line(line.removeprefix(SUMMARY).decode("utf-8", "replace"))
        return replace(said, summary=cut(text, SUMMARY_CHARACTERS))
    if line.startswith(PROGRESS):
        text = line.removeprefix(PROGRESS).decode("utf-8", "replace").strip()
        number, _, message = text.partition(" ")
        number = number.removesuffix("%")
        percent = int(number) if number.isascii() and number.isdecimal() else None
        if percent is None or percent > LARGEST_PERCENT:
            percent, message = None, text
        return replace(said, percent=percent, message=cut(one_line(message), MESSAGE_CHARACTERS))
    return said
