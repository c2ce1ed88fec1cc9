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
    Chunk,
    Chunks,
    Gap,
    Head,
    LogReader,
    Mark,
    Whole,
    encode_page,
    ended_in_the_middle,
    parse_stream_name,
    pieces,
    stream_name,
)

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)
ENTRY = 16
"""Bytes of one entry of the log: the kubelet's are 16 KiB, with a stamp for each."""


class Log:
    """A container's log as the kubelet serves it with timestamps."""

    def __init__(self, lines: list[tuple[bytes, int]]) -> None:
        """Lines with the nanoseconds that pass before each."""
        self.entries: list[tuple[str, bytes]] = []
        passed = 0
        for line, pause in lines:
            whole = line + b"\n"
            for at in range(0, len(whole), ENTRY):
                passed += pause
                moment = NOW + timedelta(seconds=passed // 10**9)
                stamp = f"{moment:%Y-%m-%dT%H:%M:%S}.{passed % 10**9:09d}Z"
                self.entries.append((stamp, whole[at : at + ENTRY]))

    @property
    def output(self) -> bytes:
        return b"".join(content for _, content in self.entries)

    def read(self, since: str | None) -> bytes:
        """Whole seconds; the first entry is taken for the beginning of a line, whatever it is."""
        found = [each for each in self.entries if since is None or each[0][:19] >= since[:19]]
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
@given(lines=lines, data=st.data())
def test_r_output_a_stream_that_breaks_anywhere_is_resumed_without_loss(
    lines: list[tuple[bytes, int]], data: st.DataObject
) -> None:
    log = Log(lines)
    mark, got = Mark(), b""
    for _ in range(data.draw(st.integers(0, 4))):
        reader = LogReader(mark)
        served = log.read(mark.since)
        stop = data.draw(st.integers(0, len(served)))
        for at in range(0, stop, 7):
            got += reader.feed(served[at : min(at + 7, stop)])
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
    assert chunks.cut(Mark()) is None
    chunks.add(b"x", NOW)
    assert not chunks.full(NOW)
    assert chunks.full(NOW + CHUNK_AGE)
    chunks.add(b"y" * CHUNK_BYTES, NOW)
    assert chunks.full(NOW)
    first = chunks.cut(Mark("t", 1, 5))
    assert first is not None
    assert (first.offset, len(first.data), first.name) == (0, CHUNK_BYTES + 1, "0" * 16)
    chunks.miss("rotated")
    chunks.add(b"z", NOW)
    second = chunks.cut(Mark("u", 1, 1))
    assert second is not None
    assert second.head.gaps == (Gap(CHUNK_BYTES + 1, "rotated"),)
    assert Head.decode(second.encode()) == (second.head, b"z")
    assert chunks.size == CHUNK_BYTES + 2


def test_objects_are_read_as_they_were_written() -> None:
    whole = Whole(7, "ab" * 32, (Gap(3, "why"),))
    assert Whole.decode(whole.encode()) == whole
    chunk = Chunk(5, b"a\nb", Head(Mark("t", 2, 3)))
    assert Head.decode(chunk.encode())[1] == b"a\nb"
    assert parse_stream_name(stream_name(2, 11, "u-1")) == (2, 11, "u-1")
    assert parse_stream_name("end") is None
    assert stream_name(9, 0, "b") < stream_name(10, 0, "a")


@pytest.mark.parametrize(
    ("begin", "size", "expected"),
    [
        (0, 5, [(0, 0, 5)]),
        (8, 4, [(0, 8, 10), (1, 0, 2)]),
        (10, 30, [(1, 0, 5), (2, 0, 7)]),
        (22, 5, []),
    ],
)
def test_r_output_a_range_is_put_together_from_chunks(
    begin: int, size: int, expected: list[tuple[int, int, int]]
) -> None:
    assert list(pieces([(0, 10), (10, 5), (15, 7)], begin, size)) == expected


def test_a_character_whose_rest_may_come_is_noticed() -> None:
    assert ended_in_the_middle("ä".encode()[:1])
    assert not ended_in_the_middle(b"\xff")
    assert not ended_in_the_middle(b"a")
