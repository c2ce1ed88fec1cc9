"""Where the tooling keeps what it makes: everything is below one cache directory."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .console import say


def cache_directory() -> Path:
    """`$AGENTJOBS_CACHE`, by default `${XDG_CACHE_HOME:-~/.cache}/agentjobs`."""
    if chosen := os.environ.get("AGENTJOBS_CACHE"):
        return Path(chosen).expanduser().resolve()
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base).expanduser().resolve() / "agentjobs"


def clusters_directory() -> Path:
    """One directory for each cluster that was brought up and not yet down."""
    return cache_directory() / "clusters"


@contextmanager
def lock(name: str) -> Iterator[None]:
    """Hold the lock `name` of this cache directory; say so when somebody else has it."""
    directory = cache_directory() / "locks"
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / f"{name}.lock").open("w", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another run that holds {file.name}")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
