"""The object store that output is kept in: a directory, or anything that obstore reaches by URL."""

import asyncio
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal, Self
from urllib.parse import unquote, urlsplit

import obstore
from obstore.store import LocalStore, from_url

from agentjobs.domain.errors import AgentJobError

ROOT: Final = "output"
PATIENCE_SECONDS: Final = 30.0
"""How long the store may take for one object, its own retries included."""
FAILURES: Final = (obstore.exceptions.BaseError, OSError, TimeoutError)
ABSENT: Final = (obstore.exceptions.NotFoundError, FileNotFoundError)
TAKEN: Final = (obstore.exceptions.AlreadyExistsError, obstore.exceptions.PreconditionError)
NO_LINKS: Final = ("(os error 1)", "(os error 38)", "(os error 95)")
"""EPERM, ENOSYS, EOPNOTSUPP: how file systems say that they have no hard links."""


class StoreError(AgentJobError):
    """The store cannot be used just now: unreachable, full, not allowed."""


class MissingObjectError(StoreError):
    """There is no such object."""


class OutputStore:
    """Objects of streams: `output/<uid of the AgentJob>/<stream>/<object>`."""

    def __init__(self, store: Any, url: str, directory: Path | None = None) -> None:
        """Prepare.

        :param directory: that the objects are files of.
        """
        self._store = store
        self._directory = directory
        self.url = url

    @classmethod
    def open(cls, url: str) -> Self:
        """Open a store by its URL, such as `file:///a/directory` or `s3://bucket/prefix`.

        Credentials and endpoints of clouds come from their own environment variables.

        :raises ValueError: it is no URL of a store; the message does not repeat credentials.
        """
        try:
            if urlsplit(url).scheme == "file":
                path = Path(unquote(urlsplit(url).path))
                return cls(LocalStore(path, mkdir=True, automatic_cleanup=True), url, path)
            return cls(from_url(url), url)
        except (obstore.exceptions.BaseError, OSError, ValueError) as error:
            raise ValueError(f"no store can be opened: {type(error).__name__}") from error

    async def put(self, path: str, content: bytes) -> None:
        """Write an object, whole or not at all.

        :raises StoreError: it is not known to be stored.
        """
        await self._put(path, content, "overwrite")

    async def create(self, path: str, content: bytes) -> bool:
        """Write an object unless there is one; return whether it was written.

        Of two that race the store takes one (S3's `If-None-Match`, a hard link). Where it cannot,
        the last one stays: file systems without links, S3 with `AWS_CONDITIONAL_PUT=disabled`.

        :raises StoreError: it is not known to be stored.
        """
        try:
            await self._put(path, content, "create")
        except NotImplementedError:
            await self.put(path, content)
        except StoreError as error:
            if isinstance(error.__cause__, TAKEN):
                return False
            if not any(number in str(error) for number in NO_LINKS):
                raise
            await self.put(path, content)
        return True

    async def _put(self, path: str, content: bytes, mode: Literal["create", "overwrite"]) -> None:
        writing = asyncio.ensure_future(
            obstore.put_async(self._store, f"{ROOT}/{path}", content, mode=mode)
        )
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                await asyncio.shield(writing)
        except FAILURES as error:
            raise StoreError(f"{path} cannot be written: {_words(error)}") from error
        except asyncio.CancelledError:
            # A thread writes on; what follows may be the deletion of all this.
            await asyncio.wait({writing}, timeout=PATIENCE_SECONDS)
            raise
        finally:
            # Nobody asks any more what became of one that was given up.
            writing.add_done_callback(_take_note)

    async def get(self, path: str) -> bytes:
        """Read an object.

        :raises MissingObjectError: there is none.
        :raises StoreError: it cannot be read now.
        """
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                found = await obstore.get_async(self._store, f"{ROOT}/{path}")
                return bytes(await found.bytes_async())
        except ABSENT as error:
            raise MissingObjectError(f"{path} is not there") from error
        except FAILURES as error:
            raise StoreError(f"{path} cannot be read: {_words(error)}") from error

    async def get_range(self, path: str, start: int, length: int) -> bytes:
        """Read a part of an object that lies within it.

        :raises StoreError: it cannot be read now, or is not there.
        """
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                found = await obstore.get_range_async(
                    self._store, f"{ROOT}/{path}", start=start, length=length
                )
                return bytes(found)
        except FAILURES as error:
            raise StoreError(f"{path} cannot be read: {_words(error)}") from error

    async def names(self, prefix: str) -> Mapping[str, int]:
        """Names and sizes of the objects below a prefix, relative to it, sorted by name.

        :raises StoreError: they cannot be listed now.
        """
        whole = f"{ROOT}/{prefix}"
        found: dict[str, int] = {}
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                async for page in obstore.list(self._store, prefix=whole):
                    for each in page:
                        found[str(each["path"]).removeprefix(f"{whole}/")] = int(each["size"])
        except FAILURES as error:
            raise StoreError(f"{prefix} cannot be listed: {_words(error)}") from error
        return dict(sorted(found.items()))

    async def delete(self, prefix: str) -> None:
        """Delete all objects below a prefix.

        :raises StoreError: not all are deleted.
        """
        names = [f"{ROOT}/{prefix}/{name}" for name in await self.names(prefix)]
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                if names:
                    await obstore.delete_async(self._store, names)
                if self._directory:
                    # Also what is no object: the beginning of one whose writer died.
                    await asyncio.to_thread(_remove, self._directory / ROOT / prefix)
        except ABSENT:
            return
        except FAILURES as error:
            raise StoreError(f"{prefix} cannot be deleted: {_words(error)}") from error


def _remove(directory: Path) -> None:
    if directory.exists():
        shutil.rmtree(directory)


def _take_note(done: asyncio.Future[Any]) -> None:
    if not done.cancelled():
        done.exception()


def _words(error: BaseException) -> str:
    """One line of the library's words, without its debug output."""
    said = " ".join(str(error).split("Debug source:")[0].split())[:300]
    return said or "it does not answer"
