"""What a reader of a container's log can know of rotations, of which the kubelet says nothing.

The kubelet rotates a log that has become large (10 MiB by default) every ten seconds. Who follows
the log reads the file that was the newest when it was opened; from its end on the newest file at
each rotation that is heard of; and of a container that is over no further file (`ReadLogs` of
k8s.io/cri-client v0.36). So a reader who is behind may come to wait at the end of a file that
nobody writes any more, pass over files, and miss the last one. What helps: to open the log anew
where that may be so, and to tell by times whether there is room for a file between two lines.
"""

from datetime import datetime, timedelta
from math import inf
from typing import Final

from agentjobs.domain.output import LogReader, Mark, moment

ONE_FILE: Final = timedelta(seconds=5)
"""What a file is written for at least: rotations come late, while the last file is packed."""
LARGE_BYTES: Final = 1 << 20
"""From how much on a log may have been rotated."""
IDLE_SECONDS: Final = 1.0
"""How long a stream that has brought so much may bring nothing before it is opened anew."""
CHECKS: Final = 4
CHECK_SECONDS: Final = 4.0
"""How often, and at what intervals, it is opened anew then: until it was rotated, or will not be
for now. No two rotations are so close together."""
USUAL_LAG: Final = timedelta(seconds=0.5)
"""What lines come behind the clock at most, unless the node's clock is behind."""
UNKNOWN_LAG: Final = timedelta(days=1)


class Rotation:
    """What is known, from read to read. Times are seconds of a clock that only goes forward."""

    def __init__(self) -> None:
        self.follows_on = False
        """Whether a file that holds nothing of what was read holds what follows upon it: it is the
        next one unless two were begun since."""
        self.was_large = False
        """Whether the log was ever so long that it may have been rotated."""
        self._large = False
        self._size = 0
        self._opened_at = 0.0
        self._read_at = 0.0
        self._sure_at = -inf
        """Up to when all that was printed was read, or will be by this read, as far as is known."""
        self._checks = 0
        """How often the log is to be opened anew."""
        self._lag = USUAL_LAG
        """The least that lines were behind the clock: what the node's clock is off, and the way."""
        self._behind = UNKNOWN_LAG
        """How long after it was printed the last line was read."""

    def begin(self, now: float, *, over: bool) -> None:
        """The log is opened.

        :param over: its container has ended, so it is rotated no more.
        """
        if not over or self._sure_at == -inf:
            self._note(now)
        self._opened_at = now
        self._size, self._large = 0, False

    def take(self, size: int, before: Mark, mark: Mark, now: float, clock: datetime) -> bool:
        """So many bytes were served, and led from one mark to another.

        :return: whether a file was passed over on the way, if the log is being followed.
        """
        overtaken = False
        if mark.stamp and mark.stamp != before.stamp:
            jumped = bool(before.stamp) and has_room(before.stamp, mark.stamp)
            overtaken = jumped and self._large and self._behind > ONE_FILE
            lag = clock - moment(mark.stamp)
            self._lag = min(self._lag, lag)
            self._behind = lag - self._lag
            self._sure_at = max(self._sure_at, now - self._behind.total_seconds())
        self._size += size
        self._large = self._size >= LARGE_BYTES
        self.was_large |= self._large
        self._read_at = now
        return overtaken

    def is_to_be_opened_anew(self, reader: LogReader, now: float) -> bool:
        """Whether a log that is followed, and brings nothing just now, may be at an old file."""
        if reader.settled:
            # All was served that there was when it was opened.
            self._sure_at = max(self._sure_at, self._opened_at)
        if self._large:
            self._checks = CHECKS
            return now - self._read_at > IDLE_SECONDS
        if not reader.settled:
            # Its file is still gone through for the place, or is new and empty.
            return False
        if self._checks and now - self._opened_at > CHECK_SECONDS:
            # A file that does not hold the mark is a new one, and small: its end was reached.
            self._checks = 0 if reader.rotated else self._checks - 1
            return self._checks > 0
        if not self._checks:
            self._sure_at = now
        return False

    def end(self, reader: LogReader, now: float) -> None:
        """A log that was followed has come to an end, or is not followed any more."""
        if reader.settled:
            self._sure_at = max(self._sure_at, self._opened_at)
        if reader.first:
            # Of an empty file it is known what it follows.
            self._note(now)

    def _note(self, now: float) -> None:
        self.follows_on = now - self._sure_at < ONE_FILE.total_seconds()


def has_room(before: str, after: str) -> bool:
    """Whether a file may lie between two lines, by their stamps."""
    return moment(after) - moment(before) > ONE_FILE
