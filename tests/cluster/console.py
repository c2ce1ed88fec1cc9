"""What a person at a terminal sees; always on standard error, so that output can be piped."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager


def say(text: str) -> None:
    """Write one line of progress."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


@contextmanager
def step(text: str) -> Iterator[None]:
    """Write `text ... `, and after the block how long it took (or that it failed)."""
    sys.stderr.write(f"{text} ... ")
    sys.stderr.flush()
    began = time.monotonic()
    try:
        yield
    except BaseException:
        say("failed")
        raise
    say(duration(time.monotonic() - began))


def duration(seconds: float) -> str:
    """`4m52s`, `12s` or `0.8s`, whichever reads best."""
    if seconds < 10:
        return f"{seconds:.1f}s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"
