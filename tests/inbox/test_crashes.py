"""kill -9 of an agent with its inbox at any moment: nothing lost, nothing twice after it is done.

The agent is a process of its own, with receiver, watcher and loop; the platform is played here, and
sends each event until it is taken, now and then twice.
"""

import asyncio
import os
import random
import signal
import sys
from collections import Counter, defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import aiohttp
import pytest

from agentjobs.inbox.store import Store
from tests.inbox.events import body_of, headers_of, heard_of
from tests.inbox.place import free_port
from tests.inbox.played import PlayedGateway
from tests.inbox.victim import FOLLOW_UPS, JOBS, MESSAGES
from tests.until import until

SOAK = bool(os.environ.get("AGENTJOBS_SOAK"))
ROUNDS = 20 if SOAK else 1
KILLS = 32 if SOAK else 16
"""In each round."""
ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Platform:
    """Ends each job soon after it was started, and tells so until it is heard."""

    gateway: PlayedGateway
    url: str
    chance: random.Random
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    known: set[str] = field(default_factory=set)

    async def started(self, job_id: str) -> None:
        if job_id in self.known:
            return
        self.known.add(job_id)
        task = asyncio.create_task(self._end(job_id))
        self.tasks.add(task)
        if self.chance.random() < 0.3:  # the event overtakes the answer
            await asyncio.sleep(0.01)

    async def _end(self, job_id: str) -> None:
        await asyncio.sleep(self.chance.random() * 0.03)
        now = datetime.now(UTC)
        self.gateway.end(job_id, finished_at=now.isoformat())
        if self.chance.random() < 0.2:
            return  # only the watcher brings it
        body = body_of(heard_of(job_id, time=now))
        async with aiohttp.ClientSession() as http:
            for _ in range(self.chance.choice([1, 1, 2])):
                while not await self._sent(http, body):  # noqa: ASYNC110 - as senders do
                    await asyncio.sleep(0.01)

    async def _sent(self, http: aiohttp.ClientSession, body: bytes) -> bool:
        headers = headers_of(body, at=datetime.now(UTC))
        try:
            async with http.post(self.url, data=body, headers=headers) as response:
                return response.status == 204
        except (aiohttp.ClientError, OSError):
            return False


@dataclass
class Agents:
    """Agents, one after the other."""

    process: asyncio.subprocess.Process

    @asynccontextmanager
    async def one(self, statement: int = 0) -> AsyncIterator[asyncio.Future[bytes]]:
        """An agent for the block, killed at its end if not before; yields its death."""
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(f"{statement}\n".encode())
        pid = int(await self.process.stdout.readline())
        gone = asyncio.ensure_future(self.process.stdout.readline())
        try:
            yield gone
        finally:
            if not gone.done():
                os.kill(pid, signal.SIGKILL)
            assert (await gone).split() == [b"gone", b"9"], "it died otherwise"


@asynccontextmanager
async def agents(directory: Path, url: str, port: int) -> AsyncIterator[Agents]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.inbox.victim", directory, url, str(port)),
        cwd=ROOT,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        yield Agents(process)
    finally:
        assert process.stdin
        process.stdin.close()
        await process.wait()


def faults(journal: str, expected: set[str]) -> list[str]:
    """What the journal says that must not be."""
    found: list[str] = []
    batch_of: dict[str, set[str]] = defaultdict(set)
    answered: set[str] = set()
    acknowledged: set[str] = set()
    for line in journal.splitlines():
        verb, batch, *words = line.split()
        if verb == "took":
            found += [f"{batch} again after its acknowledgement"] * (batch in acknowledged)
            for word in words:
                found += [f"{word} twice in {batch}"] * (words.count(word) > 1)
                batch_of[word].add(batch)
        elif verb == "answered":
            answered.add(batch)
        elif verb == "acknowledged":
            acknowledged.add(batch)
    found += [f"{word} in {batches}" for word, batches in batch_of.items() if len(batches) > 1]
    # What nobody has answered was lost, even if it was taken.
    heard = {word for word, batches in batch_of.items() if batches & answered}
    found += [f"{word} was lost" for word in expected - heard]
    found += [f"{word} is nobody's" for word in set(batch_of) - expected]
    return found


@pytest.mark.parametrize("seed", range(ROUNDS))
async def test_r_inbox_own_nothing_is_lost_and_nothing_twice_whenever_it_is_killed(
    tmp_path: Path, seed: int
) -> None:
    chance = random.Random(seed)  # noqa: S311 - histories, no secrets
    port = free_port()
    async with PlayedGateway().serving() as gateway:
        platform = Platform(gateway, f"http://127.0.0.1:{port}/events", chance)
        gateway.before_answer = platform.started
        async with agents(tmp_path, gateway.url, port) as killed:
            for n in range(KILLS):
                # Before a statement of its SQL, or whenever it happens to be.
                statement = chance.randrange(1, 120) if n % 2 else 0
                seconds = 0.5 if statement else 0.02 + chance.random() * 0.15
                async with killed.one(statement) as gone:
                    await asyncio.wait({gone}, timeout=seconds)
            store = Store(tmp_path / "inbox.db")
            async with killed.one():
                # What is missing then, the assertions tell.
                with suppress(TimeoutError):
                    await until(lambda: done(tmp_path, platform, store))
            counts = store.counts()
            store.close()
    journal = (tmp_path / "journal").read_text()
    steps = dict(Counter(line.split()[0] for line in journal.splitlines()))
    print(f"{KILLS} kills, {steps}, {counts}")  # noqa: T201 - figures of the large runs
    assert faults(journal, expected(gateway)) == []
    assert counts["waiting"] == 0
    assert len(gateway.jobs) == JOBS + FOLLOW_UPS, "no start made two jobs"


def done(directory: Path, platform: Platform, store: Store) -> bool:
    if len(platform.known) < JOBS + FOLLOW_UPS or not all(task.done() for task in platform.tasks):
        return False
    missing = faults((directory / "journal").read_text(), expected(platform.gateway))
    return not missing and store.counts()["waiting"] == 0


def expected(gateway: PlayedGateway) -> set[str]:
    words = {f"message-{n}" for n in range(MESSAGES)} | {f"follow-{n}" for n in range(FOLLOW_UPS)}
    return words | {f"job_id={job}" for job in gateway.jobs}
