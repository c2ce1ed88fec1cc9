"""A gateway that is played: jobs that a test starts, ends and forgets."""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from agentjobs.client import Backoff, Client
from agentjobs.contract.problems import MEDIA_TYPE, ProblemType
from tests.inbox.events import NOW

QUICK = Backoff(total_seconds=0.5, first_seconds=0.001, largest_seconds=0.02)
ENDS = {"done": "completed", "failed": "completed", "cancelled": "cancelled"}


@dataclass
class PlayedGateway:
    """Answers as the contract has it, but for what a test puts in between."""

    namespace: str = "team-a"
    jobs: dict[str, dict[str, Any]] = field(default_factory=dict)
    starts: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    """Key and body of each start that came in."""
    before_answer: Callable[[str], Awaitable[None]] | None = None
    """Called with the id of a job that was made, before its start is answered."""
    refuse_starts: int = 0
    """A status to refuse starts with."""
    refuses: dict[str, int] = field(default_factory=dict)
    """Statuses to refuse single starts with, by key, and reads, by job id."""
    keys: list[str] = field(default_factory=list)
    """Public keys; none: they are not there."""
    keys_read: int = 0
    epoch: int = 0
    """Cursors of another epoch are not taken."""
    page: int = 500
    reads: int = 0
    port: int = 0
    _version: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self) -> Client:
        return Client(self.url, token="t", backoff=QUICK)  # noqa: S106 - a word

    def make(self, job_id: str, **changes: Any) -> str:
        """A job that somebody has started."""
        self._put(job_id, {"job_id": job_id, "status": "queued", "tool": "crawl", **changes})
        return job_id

    def end(self, job_id: str, status: str = "done", **changes: Any) -> None:
        """End a job; its event gets the id that a callback has."""
        event = f"evt_{job_id}_job_{ENDS[status]}"
        known = self.jobs.get(job_id, {"job_id": job_id, "tool": "crawl"})
        over = {"status": status, "event_id": event, "finished_at": NOW.isoformat()}
        self._put(job_id, {**known, "summary": "3 pages", **over, **changes})

    def forget(self, job_id: str) -> None:
        del self.jobs[job_id]

    def _put(self, job_id: str, job: dict[str, Any]) -> None:
        self._version += 1
        self.jobs[job_id] = {"created_at": NOW.isoformat(), **job, "version": self._version}

    async def _start(self, request: web.Request) -> web.Response:
        key, body = request.headers["Idempotency-Key"], await request.json()
        self.starts.append((key, body))
        refused = self.refuses.get(key) or self.refuse_starts
        if refused:
            return _problem(refused, "about:blank")
        name = hashlib.sha256(key.encode()).hexdigest()[:12]
        job_id = f"job-{name}.{body.get('namespace') or self.namespace}"
        if job_id not in self.jobs:
            self.make(job_id, tool=body.get("tool"))
        if self.before_answer:
            await self.before_answer(job_id)
        return web.json_response({"job_id": job_id, "status": "queued"}, status=202)

    async def _status(self, request: web.Request) -> web.Response:
        self.reads += 1
        job_id = request.match_info["job_id"]
        job = self.jobs.get(job_id)
        if job_id in self.refuses:
            return _problem(self.refuses[job_id], "about:blank")
        if job is None:
            return _problem(404, ProblemType.JOB_NOT_FOUND.uri)
        return web.json_response(job)

    async def _keys(self, _: web.Request) -> web.Response:
        self.keys_read += 1
        if not self.keys:
            return _problem(404, "about:blank")
        return web.json_response({"keys": self.keys})

    async def _result(self, request: web.Request) -> web.Response:
        job = self.jobs[request.match_info["job_id"]]
        page = {"job_id": job["job_id"], "status": job["status"], "data": job["summary"]}
        return web.json_response(page)

    async def _changes(self, request: web.Request) -> web.Response:
        since = request.query.get("since", "")
        epoch, _, position = since.partition("-")
        if since and epoch != str(self.epoch):
            return _problem(400, ProblemType.INVALID_CURSOR.uri)
        end = asyncio.get_running_loop().time() + float(request.query.get("wait", 0))
        namespace = request.query.get("namespace") or self.namespace
        while True:
            found = sorted(
                (
                    job
                    for job in self.jobs.values()
                    if job["version"] > int(position or 0)
                    and job["job_id"].endswith(f".{namespace}")
                ),
                key=lambda job: int(job["version"]),
            )[: self.page]
            if found or asyncio.get_running_loop().time() >= end:
                break
            await asyncio.sleep(0.005)
        reached = found[-1]["version"] if found else self._version
        return web.json_response({"jobs": found, "since": f"{self.epoch}-{reached}"})

    @asynccontextmanager
    async def serving(self) -> AsyncIterator["PlayedGateway"]:
        app = web.Application()
        app.router.add_post("/v1/jobs", self._start)
        app.router.add_get("/.well-known/agentjobs-signing-keys", self._keys)
        app.router.add_get("/v1/jobs", self._changes)
        app.router.add_get("/v1/jobs/{job_id}", self._status)
        app.router.add_get("/v1/jobs/{job_id}/result", self._result)
        runner = web.AppRunner(
            app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True
        )
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            self.port = runner.addresses[0][1]
            yield self
        finally:
            await runner.cleanup()


def _problem(status: int, type_: str) -> web.Response:
    body = {"type": type_, "title": "refused", "status": status, "detail": "no, thank you"}
    return web.json_response(body, status=status, content_type=MEDIA_TYPE)
