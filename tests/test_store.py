"""The store of output: a directory, and a real S3 server where there is time for one (R-OUTPUT)."""

import asyncio
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import obstore
import pytest

from agentjobs.store import MissingObjectError, OutputStore, StoreError


@pytest.fixture
def store(store_url: str) -> OutputStore:
    return OutputStore.open(store_url)


async def test_r_output_objects_are_read_as_they_were_written(store: OutputStore) -> None:
    content = bytes(range(256)) * 4096
    await store.put("u1/s1/0", content)
    await store.put("u1/s1/end", b"")
    assert await store.get("u1/s1/0") == content
    assert await store.get("u1/s1/end") == b""
    assert await store.get_range("u1/s1/0", 256, 10) == content[256:266]
    await store.put("u1/s1/0", b"again")
    assert await store.get("u1/s1/0") == b"again"


async def test_r_report_of_two_that_write_the_same_object_the_store_takes_one(
    store: OutputStore,
) -> None:
    contents = [bytes([65 + number]) * 1000 for number in range(5)]
    took = await asyncio.gather(*(store.create("u1/s1/0", each) for each in contents))
    assert sorted(took) == [False] * 4 + [True]
    assert await store.get("u1/s1/0") == contents[took.index(True)]
    assert not await store.create("u1/s1/0", contents[0])


async def test_r_report_a_store_that_cannot_take_one_of_two_takes_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, put = OutputStore.open(tmp_path.as_uri()), obstore.put_async

    async def without_links(*given: Any, mode: str) -> None:
        if mode == "create":
            raise OSError("Operation not supported (os error 95)")
        await put(*given, mode="overwrite")

    monkeypatch.setattr("agentjobs.store.obstore.put_async", without_links)
    assert await store.create("u1/s1/0", b"first")
    assert await store.create("u1/s1/0", b"last")
    assert await store.get("u1/s1/0") == b"last"


async def test_r_output_objects_are_listed_by_their_job_in_order(store: OutputStore) -> None:
    for number in reversed(range(120)):
        await store.put(f"u1/s{number % 2}/{number:016d}", b"x" * number)
    await store.put("u11/s0/0", b"of another job")
    names = await store.names("u1")
    assert list(names) == sorted(f"s{n % 2}/{n:016d}" for n in range(120))
    assert names[f"s1/{77:016d}"] == 77
    assert len(await store.names("u1/s0")) == 60
    assert await store.names("nobody") == {}


async def test_r_ttl_what_is_deleted_is_gone_and_nothing_else(store: OutputStore) -> None:
    for name in ("u1/s1/0", "u1/s2/0", "u1/result/abc", "u11/s1/0"):
        await store.put(name, b"x")
    await store.delete("u1")
    assert await store.names("u1") == {}
    assert list(await store.names("u11")) == ["s1/0"]
    await store.delete("u1")


async def test_what_is_not_there_is_told_from_what_cannot_be_read(store: OutputStore) -> None:
    with pytest.raises(MissingObjectError):
        await store.get("u1/s1/0")


async def test_r_ttl_the_beginning_of_an_object_whose_writer_died_is_deleted_too(
    tmp_path: Path,
) -> None:
    store = OutputStore.open(tmp_path.as_uri())
    await store.put("u1/s1/0", b"x")
    await store.put("u11/s1/0", b"x")
    for name in ("u1/s1/16#1", "u1/s2/0#1", "u2/s1/0#1"):
        leftover = tmp_path / "output" / name
        leftover.parent.mkdir(parents=True, exist_ok=True)
        leftover.write_bytes(b"half of")
    assert list(await store.names("u1")) == ["s1/0"]
    for job in ("u1", "u2"):
        await store.delete(job)
    assert [each.name for each in (tmp_path / "output").iterdir()] == ["u11"]


def test_r_ttl_an_empty_directory_is_left_behind_by_nothing(tmp_path: Path) -> None:
    async def play() -> None:
        store = OutputStore.open(tmp_path.as_uri())
        await store.put("u1/s1/0", b"x")
        await store.delete("u1")

    asyncio.run(play())
    assert not list(tmp_path.rglob("*"))


@pytest.mark.parametrize("url", ["nonsense", "nothing://bucket", "s3:/", ""])
def test_a_url_of_no_store_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="no store can be opened"):
        OutputStore.open(url)


# A store that fails


@contextmanager
def tiny(directory: Path) -> Iterator[Path]:
    """A file system with room for little."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(directory)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("only root can mount one")
    try:
        yield directory
    finally:
        subprocess.run(["umount", str(directory)], check=True)


def remount_read_only(directory: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(directory)], check=True)


@pytest.fixture
async def full(tmp_path: Path) -> AsyncIterator[OutputStore]:
    with tiny(tmp_path) as directory:
        yield OutputStore.open(directory.as_uri())


async def test_r_output_a_full_store_says_so_and_takes_more_when_there_is_room(
    full: OutputStore,
) -> None:
    await full.put("u1/s1/0", b"x" * 100_000)
    with pytest.raises(StoreError, match="No space left on device"):
        await full.put("u1/s1/1", b"x" * 300_000)
    assert list(await full.names("u1")) == ["s1/0"], "nothing of it is taken for an object"
    await full.put("u1/s1/1", b"x" * 50_000)
    await full.delete("u1")
    await full.put("u1/s1/1", b"x" * 200_000)


async def test_r_output_a_store_that_may_not_be_written_to_says_so(tmp_path: Path) -> None:
    with tiny(tmp_path):
        store = OutputStore.open(tmp_path.as_uri())
        await store.put("u1/s1/0", b"x")
        await asyncio.to_thread(remount_read_only, tmp_path)
        with pytest.raises(StoreError, match=r"cannot be written: .*Read-only file system"):
            await store.put("u1/s1/1", b"x")
        assert await store.get("u1/s1/0") == b"x"
        with pytest.raises(StoreError, match="cannot be deleted"):
            await store.delete("u1")


async def test_r_output_a_store_that_hangs_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentjobs.store.PATIENCE_SECONDS", 0.05)
    store = OutputStore.open(tmp_path.as_uri())
    answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    monkeypatch.setattr("agentjobs.store.obstore.put_async", lambda *_, **__: answer)
    with pytest.raises(StoreError, match="it does not answer"):
        await store.put("u1/s1/0", b"x")
