"""`python -m agentjobs.inbox`, a process beside the loop."""

import asyncio
import os
import random
import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path

import aiohttp
import pytest

from agentjobs.inbox import Inbox, Rules
from tests.inbox.events import SIGNER, body_of, headers_of, heard_of
from tests.inbox.place import free_port
from tests.inbox.played import PlayedGateway


@asynccontextmanager
async def program(*words: str | Path) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "agentjobs.inbox", *words), stderr=asyncio.subprocess.PIPE
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        await process.communicate()


async def line(process: asyncio.subprocess.Process) -> str:
    assert process.stderr
    return (await process.stderr.readline()).decode()


@pytest.mark.parametrize("how", ["callback", "watch"])
async def test_what_comes_in_beside_the_loop_reaches_it(tmp_path: Path, how: str) -> None:
    token, file = tmp_path / "token", tmp_path / "inbox.db"
    token.write_text("t")
    async with PlayedGateway(keys=[SIGNER.public()["ed25519"]]).serving() as gateway:
        words = [file, "--gateway", gateway.url, "--token", token]
        words += ["--port", "0"] if how == "callback" else ["--watch"]
        async with (
            program(*words) as process,
            gateway.client() as client,
            Inbox(file, client) as inbox,
        ):
            ours = (await inbox.start("crawl")).job_id
            if how == "callback":
                (port,) = re.findall(r"at 127\.0\.0\.1:(\d+)/events", await line(process))
                body = body_of(heard_of(ours, time=datetime.now(UTC)))
                headers = headers_of(body, at=datetime.now(UTC))
                url = f"http://127.0.0.1:{port}/events"
                async with (
                    aiohttp.ClientSession() as http,
                    http.post(url, data=body, headers=headers) as response,
                ):
                    assert response.status == 204
            else:
                gateway.end(ours, finished_at=datetime.now(UTC).isoformat())
            batch = await inbox.take()
            assert f"job_completed job_id={ours} " in batch.text
        assert process.returncode == 0


async def test_a_file_that_cannot_be_used_is_told(tmp_path: Path) -> None:
    (tmp_path / "inbox.db").write_text("no database, whatever its name says, and long enough")
    words = (tmp_path / "inbox.db", "--gateway", "http://127.0.0.1:1", "--token", tmp_path / "t")
    async with program(*words, "--watch") as process:
        assert re.search(r"inbox\.db cannot be served: file is not a database", await line(process))
        assert await process.wait() == 1


async def test_a_program_without_a_task_says_what_it_needs(tmp_path: Path) -> None:
    words = (tmp_path / "inbox.db", "--gateway", "http://127.0.0.1:1", "--token", tmp_path / "t")
    async with program(*words) as process:
        assert process.stderr
        assert b"one of --port and --watch is needed" in await process.stderr.read()
        assert await process.wait() == 2


KILLS = 40 if os.environ.get("AGENTJOBS_SOAK") else 3
EVENTS_PER_LIFE = 20


async def sent_until_taken(url: str, job_id: str) -> None:
    """As the platform sends: until it is taken, and then once more, as after a crash of its own."""
    body = body_of(heard_of(job_id, time=datetime.now(UTC)))
    async with aiohttp.ClientSession() as http:
        for _ in range(2):
            while True:
                headers = headers_of(body, at=datetime.now(UTC))
                try:
                    async with http.post(url, data=body, headers=headers) as response:
                        if response.status == 204:
                            break
                except aiohttp.ClientError:
                    pass
                await asyncio.sleep(0.02)


async def heard_by_the_loop(inbox: Inbox, wanted: set[str]) -> list[str]:
    """Ends in the order of their lines, until all came in and nothing waits."""
    found: list[str] = []
    while wanted - set(found):
        batch = await inbox.take()
        found += re.findall(r"job_completed job_id=(\S+)", batch.text)
        assert await inbox.acknowledge(batch)
    return found


async def test_r_inbox_own_nothing_is_lost_or_told_twice_when_it_is_killed(
    tmp_path: Path,
) -> None:
    """kill -9 in the middle of deliveries, again and again; the loop goes on beside it."""
    token, file = tmp_path / "token", tmp_path / "inbox.db"
    token.write_text("t")
    chance = random.Random(8)  # noqa: S311 - moments of death, no secrets
    port = free_port()
    url = f"http://127.0.0.1:{port}/events"
    wanted = {f"j{n}.team-a" for n in range(KILLS * EVENTS_PER_LIFE)}
    waiting = sorted(wanted)
    async with PlayedGateway(keys=[SIGNER.public()["ed25519"]]).serving() as gateway:
        words = [file, "--gateway", gateway.url, "--token", token, "--port", str(port)]
        words += ["--namespace", "team-a", "--watch"]
        rules = Rules(namespaces=frozenset({"team-a"}))
        async with gateway.client() as client, Inbox(file, client, rules=rules) as inbox:
            hearing = asyncio.create_task(heard_by_the_loop(inbox, wanted))
            senders: list[asyncio.Task[None]] = []
            for _ in range(KILLS):
                async with program(*words) as process:
                    await line(process)
                    for job_id in waiting[:EVENTS_PER_LIFE]:
                        gateway.end(job_id, finished_at=datetime.now(UTC).isoformat())
                        senders.append(asyncio.create_task(sent_until_taken(url, job_id)))
                    del waiting[:EVENTS_PER_LIFE]
                    await asyncio.sleep(chance.random() * 0.1)
                    process.kill()
            async with program(*words), asyncio.timeout(30):
                found = await hearing
                await asyncio.gather(*senders)
            assert sorted(found) == sorted(wanted), "each once"
            assert await inbox.take_now() is None
            assert (await inbox.counts())["duplicate"] >= len(wanted)
