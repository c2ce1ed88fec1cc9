"""The demo's agent loop, against a gateway that is played."""

import asyncio
from pathlib import Path

import pytest

from demo import loop
from demo.loop import BUILD, CRAWL, QUESTION, TASK, talk
from tests.cluster import ClusterError
from tests.inbox.played import PlayedGateway
from tests.until import until


async def play(tmp_path: Path, *statuses: str) -> tuple[bool, list[str]]:
    """Talk while the build and the crawl end like this."""
    lines: list[str] = []
    async with PlayedGateway().serving() as gateway:
        talking = asyncio.create_task(talk(gateway.url, "t", tmp_path, lines.append))
        await until(lambda: any(line.startswith("  [agent] 42") for line in lines))
        for job_id, status in zip(list(gateway.jobs), statuses, strict=True):
            gateway.end(job_id, status, tool=gateway.jobs[job_id]["tool"])
        return await talking, lines


async def test_the_agent_talks_while_its_jobs_run_and_hears_of_both(tmp_path: Path) -> None:
    kept, lines = await play(tmp_path, "done", "done")
    assert kept
    order = [TASK, f"{BUILD[0]} -> job-", "under way", QUESTION, "42.", "jobs_over", "That was all"]
    found = [next(n for n, line in enumerate(lines) if words in line) for words in order]
    assert found == sorted(found)
    assert sum("[event] job_completed" in line for line in lines) == 2
    assert sum("[result] 3 pages" in line for line in lines) == 2


async def test_a_job_that_fails_fails_the_demo(tmp_path: Path) -> None:
    kept, lines = await play(tmp_path, "done", "failed")
    assert not kept
    assert f"  [agent] {CRAWL[0]} is over: failed." in lines


async def test_silence_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "WAIT_SECONDS", 0.05)
    async with PlayedGateway().serving() as gateway:
        with pytest.raises(ClusterError, match="nothing came into the inbox"):
            await talk(gateway.url, "t", tmp_path, lambda _: None)


async def test_a_refusal_is_told_with_the_gateways_words(tmp_path: Path) -> None:
    async with PlayedGateway(refuse_starts=404).serving() as gateway:
        with pytest.raises(ClusterError, match="no, thank you"):
            await talk(gateway.url, "t", tmp_path, lambda _: None)
