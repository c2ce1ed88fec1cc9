"""What a tool and the operator agree on: arguments in, progress lines and one result out."""

import json
import os
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

DEFAULT_ARGUMENTS_FILE = "/var/run/agentjobs/arguments.json"
TERMINATION_MESSAGE = Path("/dev/termination-log")
TERMINATION_MESSAGE_BYTES = 4096
EXIT_FAILED = 1
EXIT_BAD_ARGUMENTS = 2
EXIT_STOPPED = 128 + signal.SIGTERM


class ToolError(Exception):
    """The tool could not do what it was asked for."""


class ArgumentError(ToolError):
    """What it was asked for makes no sense."""


def run(tool: Callable[[Mapping[str, Any]], Mapping[str, Any]], *, terminate: bool) -> NoReturn:
    """Run the tool with its arguments, print its result as the last line, and exit.

    With `terminate` the result is also the container's termination message.
    """
    # The first process of a container ignores SIGTERM unless it asks for it.
    signal.signal(signal.SIGTERM, lambda _signal, _frame: sys.exit(EXIT_STOPPED))
    try:
        result = tool(read_arguments())
    except ToolError as error:
        _write_termination_message(str(error))
        sys.stderr.write(f"error: {error}\n")
        sys.exit(EXIT_BAD_ARGUMENTS if isinstance(error, ArgumentError) else EXIT_FAILED)
    text = json.dumps(result, ensure_ascii=False, separators=(",", ":"))
    if terminate:
        _write_termination_message(text)
    say(f"::summary {result['summary']}")
    say(text)
    sys.exit(0)


def read_arguments() -> dict[str, Any]:
    """Return the arguments of this run; the operator has checked them against the schema."""
    path = Path(os.environ.get("AGENTJOBS_ARGUMENTS_FILE", DEFAULT_ARGUMENTS_FILE))
    try:
        arguments = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ArgumentError(f"cannot read the arguments from {path}: {error}") from error
    if not isinstance(arguments, dict):
        raise ArgumentError(f"the arguments in {path} are not a JSON object")
    return arguments


def progress(percent: int, text: str) -> None:
    """Say how far the tool is."""
    say(f"::progress {percent} {text}")


def say(text: str) -> None:
    """Print one line at once, also where standard output is a pipe."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _write_termination_message(text: str) -> None:
    encoded = text.encode()
    if len(encoded) > TERMINATION_MESSAGE_BYTES:
        message = f"the result has {len(encoded)} bytes, {TERMINATION_MESSAGE_BYTES} are possible"
        raise ValueError(message)
    if TERMINATION_MESSAGE.exists():  # outside a pod it does not
        TERMINATION_MESSAGE.write_bytes(encoded)
