"""An agent that can be killed at any moment: `python -m tests.inbox.victim DIRECTORY URL PORT`.

Reads a number from its input, forks an agent (so that each has imported all there is to import),
says its pid, waits for its death, says so. A number above 0 is that of the statement of SQL before
which the agent kills itself; 0: it goes on until it is killed.

What the agent does is in DIRECTORY/journal, a line for each step, on the disk before the next.
"""

import asyncio
import os
import signal
import sqlite3
import sys
from pathlib import Path

from agentjobs.client import Backoff, Client
from agentjobs.contract.calls import StartRequest
from agentjobs.inbox import Inbox, Loop, Verifier, Watcher, schema, serving
from tests.inbox.events import SIGNER

JOBS = 24
MESSAGES = 8
FOLLOW_UPS = 6
TOKENS = 400
"""Small, so that there are many batches."""


class Journal:
    """What an agent has done, this one and those before it."""

    def __init__(self, directory: Path) -> None:
        self._file = (directory / "journal").open("a+b", buffering=0)

    def write(self, *words: str) -> None:
        self._file.write(" ".join(words).encode() + b"\n")
        os.fsync(self._file.fileno())

    def did(self, *words: str) -> bool:
        self._file.seek(0)
        return " ".join(words).encode() + b"\n" in self._file.read()


async def agent(directory: Path, url: str, port: int) -> None:
    journal = Journal(directory)
    backoff = Backoff(total_seconds=2, first_seconds=0.002, largest_seconds=0.02)
    async with (
        Client(url, token="t", backoff=backoff) as client,  # noqa: S106 - a word
        Inbox(
            directory / "inbox.db",
            client,
            verifier=Verifier([SIGNER.public()["ed25519"]]),
            loop=Loop(tokens=TOKENS),
        ) as inbox,
        serving(inbox, port=port),
        asyncio.TaskGroup() as group,
    ):
        group.create_task(Watcher(inbox, client).run())
        group.create_task(loop(inbox, journal))
        group.create_task(starts(inbox, journal))


async def starts(inbox: Inbox, journal: Journal) -> None:
    """The tool calls and the users of this agent, each until it is on record."""
    for n in range(JOBS):
        if not journal.did("started", f"k{n}"):
            await asyncio.sleep(0.02)  # thinking
            job = await inbox.start("crawl", {"n": n}, key=f"k{n}")
            if n < FOLLOW_UPS:
                deploy = StartRequest(tool="deploy", arguments={"n": n})
                await inbox.when_over([job.job_id], f"follow-{n}", start=deploy, key=f"f{n}")
            journal.write("started", f"k{n}")
        if n < MESSAGES and not journal.did("said", f"m{n}"):
            await inbox.say(f"message-{n}", f"m{n}")
            journal.write("said", f"m{n}")


async def loop(inbox: Inbox, journal: Journal) -> None:
    while True:
        batch = await inbox.take()
        journal.write("took", batch.id, *words_of(batch.text))
        await asyncio.sleep(0.01)  # the model
        journal.write("answered", batch.id)
        await inbox.acknowledge(batch)
        journal.write("acknowledged", batch.id)


def words_of(text: str) -> list[str]:
    """Jobs whose end is in a text, follow-ups, and messages."""
    lines = text.split("\n")
    ends = [line.split()[2] for line in lines if line.startswith("[event] job_completed ")]
    notes = [line.split('"')[1] for line in lines if line.startswith("[event] jobs_over ")]
    return ends + notes + [line.split()[1] for line in lines if line.startswith("[user]")]


def killed_before(statement: int) -> None:
    """Let every connection to come count its statements."""
    real, left = schema.connect, statement

    def connect(path: Path | None) -> sqlite3.Connection:
        connection = real(path)

        def count(_: str) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

        connection.set_trace_callback(count)
        return connection

    sys.modules["agentjobs.inbox.store"].connect = connect  # type: ignore[attr-defined]


def main() -> None:
    directory, url, port = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            if int(line):
                killed_before(int(line))
            asyncio.run(agent(directory, url, port))
            os._exit(0)
        print(pid, flush=True)  # noqa: T201 - it is asked
        _, status = os.waitpid(pid, 0)
        print(f"gone {status}", flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
