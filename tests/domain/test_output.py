"""Output cut into chunks and joined again: every byte once, or an explicit gap (R-OUTPUT)."""

import base64
import json
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentjobs.domain.output import (
    CHUNK_AGE,
    CHUNK_BYTES,
    Chunks,
    Gap,
    Head,
    LogReader,
    Mark,
    NoLogError,
    Whole,
    encode_page,
    ended_in_the_middle,
    parse_stream_name,
    stream_name,
)

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)
ENTRY = 16
"""Bytes of one entry of the log: the kubelet's are 16 KiB, with a stamp for each."""


class Log:
    """A container's log as the kubelet serves it with timestamps."""

    def __init__(self, lines: list[tuple[bytes, int]], zone: str = "Z") -> None:
        """Lines with the nanoseconds that pass before each; of a node in some time zone."""
        self.zone = zone
        self.entries: list[tuple[str, bytes]] = []
        passed, apart = 0, 0
        for line, pause in lines:
            whole = line + b"\n"
            for at in range(0, len(whole), ENTRY):
                # Lines may have one stamp, parts of a line are written one after the other.
                passed += max(pause, apart)
                apart = int(len(whole) > ENTRY)
                moment = NOW + timedelta(seconds=passed // 10**9)
                stamp = f"{moment:%Y-%m-%dT%H:%M:%S}.{passed % 10**9:09d}{zone}"
                self.entries.append((stamp, whole[at : at + ENTRY]))

    @property
    def output(self) -> bytes:
        return b"".join(content for _, content in self.entries)

    def read(self, since: str | None) -> bytes:
        """Whole seconds; the first entry is taken for the beginning of a line, whatever it is."""
        found = [each for each in self.entries if since is None or each[0][:19] >= since[:19]]
        assert since is None or since.endswith(self.zone)
        served, fresh = [], True
        for stamp, content in found:
            served.append((stamp.encode() + b" " if fresh else b"") + content)
            fresh = content.endswith(b"\n")
        return b"".join(served)


lines = st.lists(
    st.tuples(
        st.binary(max_size=60).filter(lambda line: b"\n" not in line),
        st.sampled_from([0, 1, 1000, 400_000_000, 999_999_999, 3_000_000_000]),
    ),
    max_size=30,
)


@settings(max_examples=300)
@given(lines=lines, size=st.integers(1, 200), zone=st.sampled_from(["Z", "+02:00"]), data=st.data())
def test_r_output_a_stream_that_breaks_anywhere_is_resumed_without_loss(
    lines: list[tuple[bytes, int]], size: int, zone: str, data: st.DataObject
) -> None:
    log = Log(lines, zone)
    mark, got = Mark(), b""
    for _ in range(data.draw(st.integers(0, 4))):
        reader = LogReader(mark)
        served = log.read(mark.since)
        stop = data.draw(st.integers(0, len(served)))
        for at in range(0, stop, size):
            got += reader.feed(served[at : min(at + size, stop)])
        assert not reader.rotated
        mark = reader.mark
    reader = LogReader(mark)
    got += reader.feed(log.read(mark.since))
    assert got == log.output
    assert not reader.rotated


def test_r_output_what_rotation_swallowed_is_noticed() -> None:
    log = Log([(b"one", 1), (b"two", 10**9), (b"three", 10**9)])
    reader = LogReader(Mark())
    reader.feed(log.read(None)[:33])
    rotated = LogReader(reader.mark)
    log.entries = log.entries[2:]
    assert rotated.feed(log.read(rotated.mark.since)) == b"three\n"
    assert rotated.rotated


def test_r_output_lines_of_both_streams_may_overtake_each_other() -> None:
    """The runtime stamps a line of stderr, then writes one of stdout before it."""
    served = (
        b"2026-03-01T12:00:00.000000200Z one\n"
        b"2026-03-01T12:00:00.000000100Z two\n"
        b"2026-03-01T12:00:00.000000300Z three\n"
    )
    reader = LogReader(Mark())
    first = reader.feed(served[: served.index(b"2026-03-01T12:00:00.000000300Z")])
    again = LogReader(reader.mark)
    assert first + again.feed(served) == b"one\ntwo\nthree\n"
    assert (again.settled, again.rotated) == (True, False)


def test_r_output_lines_out_of_order_cost_no_more_than_their_number() -> None:
    """One late line in each hundred: a piece of them is split once, not once for each."""
    stamps = [f"2026-03-01T12:00:00.{n:09d}Z " for n in range(20_000)]
    for n in range(0, len(stamps) - 1, 100):
        stamps[n], stamps[n + 1] = stamps[n + 1], stamps[n]
    served = "".join(f"{stamp}x\n" for stamp in stamps).encode()

    class Counting(LogReader):
        tries = 0

        def _take_whole_lines(self, data: bytes, at: int, kept: list[bytes]) -> int:
            self.tries += 1
            return super()._take_whole_lines(data, at, kept)

    reader = Counting(Mark())
    pieces = [served[at : at + 65536] for at in range(0, len(served), 65536)]
    assert b"".join(reader.feed(piece) for piece in pieces) == b"x\n" * len(stamps)
    assert reader.tries <= 2 * len(pieces)


def test_r_output_a_log_without_the_place_that_is_looked_for_is_not_taken_for_whole() -> None:
    reader = LogReader(Mark("2026-03-01T12:00:00.000000200Z", 1, 4))
    assert reader.feed(b"2026-03-01T12:00:00.000000900Z other\n") == b""
    assert not reader.settled


@pytest.mark.parametrize(
    "served",
    [
        b"unable to retrieve container logs for containerd://0123456789",
        b"unable to retrieve\n",
        b"2026-03-01T12:00:00.000000200Z fine\nfailed to try resolving symlinks\n",
        b"x" * 10_000,
    ],
)
@pytest.mark.parametrize("size", [1, 50, 20_000])
def test_r_output_a_sentence_of_the_kubelet_is_no_output(served: bytes, size: int) -> None:
    with pytest.raises(NoLogError):
        read_in_pieces(served + b" \n", size)


def read_in_pieces(served: bytes, size: int) -> bytes:
    reader = LogReader(Mark())
    return b"".join(reader.feed(served[at : at + size]) for at in range(0, len(served), size))


def test_r_output_a_line_without_an_end_needs_no_memory() -> None:
    reader = LogReader(Mark())
    reader.feed(b"2026-03-01T12:00:00.000000000Z ")
    for _ in range(100):
        assert reader.feed(b"a" * 1000) == b"a" * 1000
    assert reader.mark == Mark("2026-03-01T12:00:00.000000000Z", 1, 100_000)


@given(data=st.binary(max_size=300), limit=st.integers(16, 80))
def test_r_output_pages_join_to_what_was_printed(data: bytes, limit: int) -> None:
    got, rest = b"", data
    while rest:
        text, encoding, used = encode_page(rest, limit)
        assert used > 0
        assert len(json.dumps(text, ensure_ascii=False).encode()) <= limit
        piece = base64.b64decode(text) if encoding == "base64" else text.encode()
        assert piece == rest[:used]
        got, rest = got + piece, rest[used:]
    assert got == data


def test_r_output_only_the_page_with_other_bytes_is_base64() -> None:
    text, encoding, used = encode_page(b"a" * 100 + b"\xff\xfeend\n", 1000)
    assert (text, encoding, used) == ("a" * 100, "utf-8", 100)
    assert encode_page(b"\xff\xfeend\n", 1000)[1:] == ("base64", 6)


def test_r_output_a_chunk_is_cut_when_it_is_large_or_old() -> None:
    chunks = Chunks()
    assert not chunks.waiting
    chunks.add(b"x", NOW)
    assert not chunks.full(NOW)
    assert chunks.full(NOW + CHUNK_AGE)
    chunks.add(b"y" * CHUNK_BYTES, NOW)
    assert chunks.full(NOW)
    assert chunks.name == "0" * 16
    first = Mark("t", 1, 5)
    assert Head.decode(chunks.content(first)) == (Head(first), b"x" + b"y" * CHUNK_BYTES)
    chunks.clear()
    assert not chunks.full(NOW + CHUNK_AGE)
    chunks.miss("rotated")
    chunks.add(b"z", NOW)
    assert chunks.name == f"{CHUNK_BYTES + 1:016d}"
    head, data = Head.decode(chunks.content(Mark("u", 1, 1)))
    assert head.gaps == (Gap(CHUNK_BYTES + 1, "rotated"),)
    assert data == b"z"
    assert chunks.size == CHUNK_BYTES + 2


def test_objects_are_read_as_they_were_written() -> None:
    whole = Whole(7, "ab" * 32, (Gap(3, "why"),))
    assert Whole.decode(whole.encode()) == whole
    head = Head(Mark("t", 2, 3), (Gap(1, "why"),))
    assert Head.decode(head.encode() + b"a\nb") == (head, b"a\nb")
    assert parse_stream_name(stream_name(2, 11, "u-1")) == (2, 11, "u-1")
    assert parse_stream_name("end") is None
    assert stream_name(9, 0, "b") < stream_name(10, 0, "a")


def test_a_character_whose_rest_may_come_is_noticed() -> None:
    assert ended_in_the_middle("ä".encode()[:1])
    assert not ended_in_the_middle(b"\xff")
    assert not ended_in_the_middle(b"a")
