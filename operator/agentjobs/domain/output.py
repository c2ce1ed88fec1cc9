"""A tool's output: cut into chunks as it comes, joined again in pages (R-OUTPUT).

A chunk is one object: a head on a line of its own, then the bytes as they were printed. Its name is
the offset of its first byte, so a list shows what is there. Chunks are written once and in order;
the head of the last one says where to go on in the container's log.
"""

import base64
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Final, Literal, Self

CHUNK_BYTES: Final = 1024 * 1024
CHUNK_AGE: Final = timedelta(seconds=5)
"""Output is readable this long after it was printed, at the latest."""
OFFSET_DIGITS: Final = 16
END: Final = "end"
"""Name of the object that says that a stream is whole."""
LONGEST_STAMP: Final = 64
LINE_END: Final = 0x0A
STAMP: Final = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}")
STAMPS: Final = re.compile(
    rb"^([0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}[^ \n]{1,40} )", re.MULTILINE
)
"""The stamps of whole lines."""
HELD_BYTES: Final = 4 * 1024 * 1024
"""What is held, at most, while the place to go on at is looked for."""
OUT_OF_ORDER: Final = timedelta(seconds=1)
"""The runtime stamps a line before it writes it, so lines of both streams may overtake."""


@dataclass(frozen=True, slots=True)
class Mark:
    """A place in the log of a container, as far as the kubelet lets one find it again.

    The kubelet stamps each line; a log is read again from a time with whole seconds.
    """

    stamp: str = ""
    """RFC 3339 time of the last line that was taken in, with nanoseconds; empty: none was."""
    same: int = 0
    """How many lines with this very stamp were taken in, the last one included."""
    taken: int = 0
    """Bytes of the last line that were taken in."""

    @property
    def since(self) -> str | None:
        """`sinceTime` of a log that holds this place. A node's stamps have the zone of the node."""
        return f"{self.stamp[:19]}{self.stamp[29:]}" if self.stamp else None


@dataclass(frozen=True, slots=True)
class Gap:
    """A place where output is missing."""

    offset: int
    """Bytes of output before it."""
    reason: str


ROTATED: Final = "the log went on in another file or container while nobody read it"
LATE: Final = "the log was read late; what was rotated away until then is missing, if anything was"
OVERTAKEN: Final = (
    "the log was rotated faster than it was read; what was between is missing, if anything was"
)
LOST: Final = "the container's log was gone before it could be read to its end"
MISSING: Final = "it was kept, and is not in the store any more"
LEFT: Final = "it was not in the store when it was passed over; once the job is over it may be"


class NoLogError(ValueError):
    """What was served as a log with timestamps is none."""


class LogReader:
    """Takes the stamps out of a log, and passes over what was taken in before.

    That is what an earlier read has taken in, and what a kubelet serves twice: it opens a file anew
    for each rotation that it hears of, late too. Memory does not grow with the length of a line.
    """

    def __init__(self, mark: Mark) -> None:
        self._begin = mark
        self._passed = 0
        """Lines seen that have the stamp of the mark."""
        self._stamp = bytearray()
        self._in_line = False
        self._skip = 0
        """Bytes of this line that were taken in before; -1: all of them."""
        self._held: list[bytes] = []
        """Lines that are younger than the mark, until it is known whether that lies behind them."""
        self._held_size = 0
        self._holds = False
        """Whether this line is to be held."""
        self._held_mark = mark
        self._top = mark.stamp
        """The youngest stamp that was taken in."""
        self._near = False
        """Whether it is but a line of the other stream that came late, or a file served again."""
        self.mark = mark
        self.first = ""
        """Stamp of the first line that was served."""
        self.settled = not mark.stamp
        """Whether the mark lies behind."""
        self.rotated = False
        """Whether the place of the mark was not there any more."""

    def feed(self, data: bytes) -> bytes:
        """Take the next bytes of a log with timestamps; return what is new of the output.

        :raises NoLogError: it is none.
        """
        kept: list[bytes] = []
        view = memoryview(data)
        at, size = 0, len(data)
        # Up to where lines are taken singly: they are not in order, and to try that again for each
        # would take the square of their number.
        one_by_one = 0
        while at < size:
            if not self._in_line:
                whole = self.settled and not self._stamp and at >= one_by_one
                stop = self._take_whole_lines(data, at, kept) if whole else at
                if whole and stop == at:
                    one_by_one = data.rfind(LINE_END) + 1
                at = stop if stop > at else self._read_stamp(data, at, kept)
                continue
            end = data.find(LINE_END, at)
            stop = size if end < 0 else end + 1
            self._take(view[at:stop], kept)
            self._in_line = end < 0
            at = stop
        return b"".join(kept)

    def finish(self) -> bytes:
        """Return what was held of a log that was served to its end: its mark is not there."""
        kept: list[bytes] = []
        if self._held:
            self._release(kept)
        return b"".join(kept)

    def _take_whole_lines(self, data: bytes, at: int, kept: list[bytes]) -> int:
        """Take lines that are there whole, all at once; return where they end.

        It does what is done line by line otherwise, an order of magnitude faster.
        """
        stop = data.rfind(LINE_END) + 1
        if stop <= at:
            return at
        block = data[at:stop]
        _, *parts = STAMPS.split(block)
        stamps = parts[0::2]
        in_order = stamps == sorted(stamps) and stamps[:1] >= [self._top.encode()]
        if len(stamps) != block.count(LINE_END) or not in_order:
            return at
        last = stamps[-1]
        stamp = last.rstrip(b" ").decode()
        content = block[block.rfind(LINE_END, 0, -1) + 1 + len(last) :]
        same = stamps.count(last)
        if same == len(stamps) and stamp == self.mark.stamp:
            same += self.mark.same
        self.first = self.first or stamps[0].rstrip(b" ").decode()
        self.mark = Mark(stamp, same, len(content))
        self._top = stamp
        kept += parts[1::2]
        return stop

    def _read_stamp(self, data: bytes, at: int, kept: list[bytes]) -> int:
        end = data.find(b" ", at)
        stop = len(data) if end < 0 else end
        self._stamp += data[at : min(stop, at + LONGEST_STAMP)]
        if end < 0 and len(self._stamp) < LONGEST_STAMP:
            return stop
        self._begin_line(bytes(self._stamp).decode("ascii", "replace"), kept)
        self._stamp.clear()
        return end + 1

    def _begin_line(self, stamp: str, kept: list[bytes]) -> None:
        if not STAMP.match(stamp) or len(stamp) >= LONGEST_STAMP:
            # A kubelet that finds no log answers 200 with a sentence.
            raise NoLogError(stamp)
        self._in_line = True
        self.first = self.first or stamp
        self._skip, self._holds = 0, False
        if self.settled and self._top and _order(stamp) < _order(self._top):
            self._begin, self._held_mark, self._passed = self.mark, self.mark, 0
            self.settled = False
            self._near = moment(stamp) >= moment(self._top) - OUT_OF_ORDER
        if self.settled or self._is_behind_mark(stamp, kept):
            self.mark = _next_mark(self.mark, stamp)
            self._top = max(self._top, stamp, key=_order) if self._top else stamp

    def _is_behind_mark(self, stamp: str, kept: list[bytes]) -> bool:
        """Whether a line is new; if not it is passed over, or held until that is known."""
        if stamp == self._begin.stamp:
            self._skip = -1
            self._passed += 1
            if self._passed == self._begin.same:
                self.settled = True
                self._skip = self._begin.taken
                self._drop_held()
            return False
        if self._is_past(stamp):
            self._release(kept)
            return True
        if not self._near and moment(stamp) < moment(self._begin.stamp):
            self._skip = -1
        else:
            self._holds = True
            self._held_mark = _next_mark(self._held_mark, stamp)
        return False

    def _is_past(self, stamp: str) -> bool:
        """Whether the mark would have come before a line, were it there."""
        if self._held_size > HELD_BYTES:
            return True
        if self._near:
            return _order(stamp) > _order(self._top)
        return moment(stamp) > moment(self._begin.stamp) + OUT_OF_ORDER

    def _release(self, kept: list[bytes]) -> None:
        """Take what was held: the log goes on in another file than that of the mark."""
        self.settled = True
        self.rotated |= not self._near
        kept += self._held
        self.mark = self._held_mark
        self._drop_held()

    def _drop_held(self) -> None:
        self._held.clear()
        self._held_size = 0
        self._near = False

    def _take(self, piece: memoryview, kept: list[bytes]) -> None:
        if self._skip < 0:
            return
        if self._skip:
            passed = min(self._skip, len(piece))
            self._skip -= passed
            piece = piece[passed:]
        if not len(piece):
            return
        if self._holds:
            self._held.append(bytes(piece))
            self._held_size += len(piece)
            self._held_mark = _longer(self._held_mark, len(piece))
        else:
            kept.append(bytes(piece))
            self.mark = _longer(self.mark, len(piece))


def _order(stamp: str) -> tuple[datetime, str]:
    """By what stamps are compared: a time of Python's has no nanoseconds."""
    return moment(stamp), stamp


def _next_mark(mark: Mark, stamp: str) -> Mark:
    """Where a line with that stamp begins."""
    return Mark(stamp, mark.same + 1 if stamp == mark.stamp else 1, 0)


def _longer(mark: Mark, size: int) -> Mark:
    return Mark(mark.stamp, mark.same, mark.taken + size)


def moment(stamp: str) -> datetime:
    """The time that a line was stamped with.

    :raises NoLogError: it is none.
    """
    try:
        return datetime.fromisoformat(stamp)
    except ValueError as error:
        raise NoLogError(stamp) from error


@dataclass(frozen=True, slots=True)
class Head:
    """What is known of a chunk beside its bytes."""

    mark: Mark
    """Where its last byte stands in the log."""
    gaps: tuple[Gap, ...] = ()
    """All gaps of the stream up to its end."""

    def encode(self) -> bytes:
        """One line of JSON."""
        gaps = [[gap.offset, gap.reason] for gap in self.gaps]
        mark = [self.mark.stamp, self.mark.same, self.mark.taken]
        return json.dumps({"mark": mark, "gaps": gaps}).encode() + b"\n"

    @classmethod
    def decode(cls, content: bytes) -> tuple[Self, bytes]:
        """Head and bytes of a chunk.

        :raises ValueError: it is none.
        """
        line, _, data = content.partition(b"\n")
        head = json.loads(line)
        gaps = tuple(Gap(int(offset), str(reason)) for offset, reason in head["gaps"])
        return cls(Mark(*head["mark"]), gaps), data


def chunk_name(offset: int) -> str:
    """Name of the object of a chunk within its stream."""
    return f"{offset:0{OFFSET_DIGITS}d}"


@dataclass(slots=True)
class Chunks:
    """Collects output until there is enough of it, or it has waited long enough."""

    offset: int = 0
    """Bytes of the stream that were cut so far."""
    gaps: list[Gap] = field(default_factory=list)
    _waiting: bytearray = field(default_factory=bytearray)
    _since: datetime | None = None

    @property
    def size(self) -> int:
        """Bytes of the stream so far."""
        return self.offset + len(self._waiting)

    @property
    def due_at(self) -> datetime | None:
        """When what waits is to be cut off though it is little."""
        return self._since + CHUNK_AGE if self._since else None

    def add(self, data: bytes, now: datetime) -> None:
        """Take in output."""
        if data:
            self._waiting += data
            self._since = self._since or now

    def miss(self, reason: str) -> None:
        """Note that output is missing here."""
        self.gaps.append(Gap(self.size, reason))

    def full(self, now: datetime) -> bool:
        """Whether what waits is to be cut off."""
        due = self.due_at
        return len(self._waiting) >= CHUNK_BYTES or (due is not None and now >= due)

    @property
    def name(self) -> str:
        """Name of the next chunk's object."""
        return chunk_name(self.offset)

    @property
    def waiting(self) -> bytearray:
        """The bytes of the next chunk."""
        return self._waiting

    def content(self, mark: Mark) -> bytes:
        """Content of the next chunk's object; its last byte stands at that mark."""
        return Head(mark, tuple(self.gaps)).encode() + self._waiting

    def clear(self) -> None:
        """Forget what waited: it is stored."""
        self.offset += len(self._waiting)
        self._waiting.clear()
        self._since = None


@dataclass(frozen=True, slots=True)
class Whole:
    """What a stream came to in the end."""

    size: int
    """Bytes."""
    sha256: str
    gaps: tuple[Gap, ...] = ()

    def encode(self) -> bytes:
        """Content of the END object."""
        gaps = [[gap.offset, gap.reason] for gap in self.gaps]
        value = {"bytes": self.size, "sha256": self.sha256, "gaps": gaps}
        return json.dumps(value).encode()

    @classmethod
    def decode(cls, content: bytes) -> Self:
        """Read an END object.

        :raises ValueError: it is none.
        """
        value = json.loads(content)
        gaps = tuple(Gap(int(offset), str(reason)) for offset, reason in value["gaps"])
        return cls(int(value["bytes"]), str(value["sha256"]), gaps)


@dataclass(frozen=True, slots=True)
class Archived:
    """What all streams of a job came to."""

    size: int = 0
    """Bytes."""
    sha256: str = ""
    """Digest of the only stream; empty where there are several."""
    gaps: int = 0
    trouble: str = ""
    """Why it is not all stored yet; empty: it is."""


def total(wholes: Sequence[Whole]) -> Archived:
    """Put together what the streams of a job came to."""
    return Archived(
        size=sum(whole.size for whole in wholes),
        sha256=wholes[0].sha256 if len(wholes) == 1 else "",
        gaps=sum(len(whole.gaps) for whole in wholes),
    )


@dataclass(frozen=True, slots=True)
class Stored:
    """What a store has of one stream."""

    starts: tuple[int, ...] = ()
    """Offsets of its chunks, in order."""
    ended: bool = False
    """Whether it is said what it came to."""


def stored_streams(names: Iterable[str]) -> dict[str, Stored]:
    """The streams of a job, in order, from the names of its objects (`<stream>/<object>`)."""
    starts: dict[str, list[int]] = {}
    ended: set[str] = set()
    for name in names:
        stream, _, of_it = name.partition("/")
        if parse_stream_name(stream) is None:
            continue
        starts.setdefault(stream, [])
        if of_it == END:
            ended.add(stream)
        elif of_it.isdigit():
            starts[stream].append(int(of_it))
    return {
        stream: Stored(tuple(sorted(starts[stream])), stream in ended) for stream in sorted(starts)
    }


def result_path(sha256: str) -> str:
    """Where a result is kept, below its job; no stream is called so."""
    return f"result/{sha256}"


REPORTED: Final = "reported"
"""Below a job: streams that tools handed in; what they printed stands beside it. No printed stream
is called so."""
REPORTED_HEAD: Final = Head(Mark()).encode()
"""Of a piece that a tool handed in: there is no log that it stands in."""


@dataclass(frozen=True, slots=True)
class Reported:
    """What the pods of a job have handed in, by the objects that there are."""

    sizes: Mapping[str, int]
    """Bytes of each piece, by `<stream>/<offset>`."""

    @classmethod
    def of(cls, objects: Mapping[str, int]) -> Self:
        """Read names and sizes of the objects below a job's REPORTED."""
        pieces = {name: size for name, size in objects.items() if name.rpartition("/")[2].isdigit()}
        return cls({name: size - len(REPORTED_HEAD) for name, size in pieces.items()})

    @property
    def total(self) -> int:
        """Bytes of all pods."""
        return sum(self.sizes.values())

    def kept(self, stream: str) -> int:
        """Bytes of one stream: where it goes on."""
        ends = (
            int(name.removeprefix(f"{stream}/")) + size
            for name, size in self.sizes.items()
            if name.startswith(f"{stream}/")
        )
        return max(ends, default=0)


def stream_name(attempt: int, index: int, pod_uid: str) -> str:
    """Name of the stream of a pod: sorted, they stand in the order of attempts and pods."""
    return f"{attempt:04d}.{index:06d}.{pod_uid}"


def parse_stream_name(name: str) -> tuple[int, int, str] | None:
    """Attempt, index and pod of a stream; None where it is no name of one."""
    attempt, _, rest = name.partition(".")
    index, _, pod_uid = rest.partition(".")
    if not (attempt.isdigit() and index.isdigit() and pod_uid):
        return None
    return int(attempt), int(index), pod_uid


Encoding = Literal["utf-8", "base64"]


def encode_page(data: bytes, limit: int) -> tuple[str, Encoding, int]:
    """Make a page that is at most so many bytes of JSON; return text, encoding, bytes used.

    Text as long as it is UTF-8, in whole characters; what is not goes in base64, on a page of its
    own that begins with it.

    :param data: what there is.
    """
    text, used = _utf8_prefix(data)
    if not data:
        return "", "utf-8", 0
    if not used:
        raw = data[: max(1, (limit - 2) * 3 // 4 // 3 * 3)]
        return base64.b64encode(raw).decode(), "base64", len(raw)
    while len(_json(text)) > limit:
        # Control characters take six bytes in JSON.
        text = text[: max(1, len(text) * limit // len(_json(text)) - 1)]
        used = len(text.encode())
    return text, "utf-8", used


def _utf8_prefix(data: bytes) -> tuple[str, int]:
    """The beginning of some bytes that is UTF-8, in whole characters."""
    try:
        return data.decode(), len(data)
    except UnicodeDecodeError as error:
        return data[: error.start].decode(), error.start


def _json(text: str) -> bytes:
    return json.dumps(text, ensure_ascii=False).encode()


def ended_in_the_middle(data: bytes) -> bool:
    """Whether some bytes end within a character, whose rest may still come."""
    try:
        data.decode()
    except UnicodeDecodeError as error:
        return error.reason == "unexpected end of data" and error.end == len(data)
    return False
