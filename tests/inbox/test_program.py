"""`python -m agentjobs.inbox`, a process beside the loop."""

import asyncio
import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path

import aiohttp
import pytest

from agentjobs.inbox import Inbox
from tests.inbox.events import SIGNER, body_of, headers_of, heard_of
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
