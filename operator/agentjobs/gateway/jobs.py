"""Reading and stopping jobs that exist."""

import asyncio
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from agentjobs.api.agentjob import AgentJob
from agentjobs.api.base import format_time
from agentjobs.api.names import TERMINAL_STATES, State
from agentjobs.contract.problems import ProblemType
from agentjobs.domain.jobids import job_id, parse_job_id
from agentjobs.domain.texts import one_line
from agentjobs.domain.view import state_of
from agentjobs.gateway.cursors import open_cursor, seal_cursor
from agentjobs.gateway.keys import Keys
from agentjobs.gateway.known import JobRecord, KnownJobs, Name, record_of
from agentjobs.gateway.problems import ProblemError, try_later
from agentjobs.gateway.reviews import Caller, Reviews, Right
from agentjobs.kube import AGENTJOBS, ConflictError, Kube, KubeError, NotFoundError

RECHECK_SECONDS = 30.0
"""Rights of a caller who waits are looked at again so often (R-AUTH)."""
STOP_TRIES = 10
CHANGES_IN_PAGE = 500


@dataclass(frozen=True, slots=True)
class Page:
    """Jobs, and where to go on."""

    records: tuple[JobRecord, ...]
    next: str | None
    since: str


@dataclass(frozen=True, slots=True)
class Filter:
    """Which jobs are asked for."""

    state: State | None = None
    tool: str | None = None

    def takes(self, record: JobRecord) -> bool:
        """Whether a job is one of them."""
        return self.state in {None, record.state} and self.tool in {None, record.tool}


class Jobs:
    """Jobs of callers who may see them. Unknown and forbidden ids look the same."""

    def __init__(self, kube: Kube, known: KnownJobs, reviews: Reviews) -> None:
        self._kube = kube
        self._known = known
        self._reviews = reviews

    async def status(
        self, caller: Caller, text: str, *, seen: str = "", wait: float = 0
    ) -> JobRecord:
        """The status of a job; waits for a change of what was `seen`, or of what it is now.

        :param text: a job id, whatever the caller wrote.
        :param seen: ETag that the caller knows.
        :raises ProblemError: no such job, for this caller.
        """
        name = await self._visible(caller, text)
        record = await self._known_or_read(name, _version_in(seen))
        tag = _tag_in(seen) or record.tag
        if wait and record.tag == tag and not record.over:
            await self._wait(caller, name, tag, wait)
            record = await self._known_or_read(name)
        return record

    async def page(
        self, keys: Keys, caller: Caller, namespace: str, wanted: Filter, *, limit: int, cursor: str
    ) -> Page:
        """Jobs of a namespace, the newest first.

        :raises ProblemError: not allowed; a cursor that is not ours.
        """
        await self._reviews.require(caller, Right("list", "agentjobs", namespace))
        since = self._seal_position(keys, namespace, self._known.position)
        after = tuple(open_cursor(keys, f"page {namespace}", cursor)) if cursor else None
        found = [
            record
            for record in self._known.of(namespace)
            if wanted.takes(record) and (after is None or _order(record) < after)
        ]
        found.sort(key=_order, reverse=True)
        page = found[:limit]
        more = len(found) > limit
        token = seal_cursor(keys, f"page {namespace}", _order(page[-1])) if more else None
        return Page(tuple(page), token, since)

    async def changes(
        self, keys: Keys, caller: Caller, namespace: str, wanted: Filter, *, since: str, wait: float
    ) -> Page:
        """Jobs that changed after a position, each as it is now, in the order of their changes.

        :raises ProblemError: not allowed; a cursor that is not ours.
        """
        await self._reviews.require(caller, Right("list", "agentjobs", namespace))
        position = int(open_cursor(keys, f"since {namespace}", since)) if since else 0
        end = asyncio.get_running_loop().time() + wait
        found = self._changed(namespace, position, wanted)
        checked = asyncio.get_running_loop().time()
        while not found and (left := end - asyncio.get_running_loop().time()) > 0:
            if self._known.namespaces.closed:
                break
            await self._known.namespaces.wait(namespace, min(left, RECHECK_SECONDS))
            if asyncio.get_running_loop().time() - checked >= RECHECK_SECONDS:
                await self._reviews.require(caller, Right("list", "agentjobs", namespace))
                checked = asyncio.get_running_loop().time()
            found = self._changed(namespace, position, wanted)
        page = found[:CHANGES_IN_PAGE]
        # A full page ends at its last change; otherwise all is told up to where the watch is.
        reached = page[-1].version if len(found) > len(page) else self._known.position
        return Page(tuple(page), None, self._seal_position(keys, namespace, max(position, reached)))

    async def stop(self, caller: Caller, text: str, reason: str) -> JobRecord:
        """Ask for the end of a job; return it as it is then.

        :raises ProblemError: no such job; not allowed; stopping or over already (409).
        """
        name = await self._visible(caller, text)
        await self._reviews.require(caller, Right("delete", "agentjobs", *name))
        record = await self._known_or_read(name)
        stop = {"requestedBy": caller.name, "at": format_time(datetime.now(UTC))}
        if reason:
            stop["reason"] = one_line(reason)
        version = record.version
        for _ in range(STOP_TRIES):
            if record.state in TERMINAL_STATES or record.state is State.STOPPING:
                raise _stopped_already(record)
            body = {"metadata": {"resourceVersion": str(version)}, "spec": {"stop": stop}}
            try:
                written = await self._kube.patch(AGENTJOBS, *name, body)
            except ConflictError:
                # It was changed since it was seen, maybe by another stop: the first one stays.
                record = await self._read(name)
                version = record.version
            except NotFoundError as error:
                raise _no_such_job() from error
            except KubeError as error:
                raise ProblemError(
                    ProblemType.FORBIDDEN, str(error.status.get("message") or "")
                ) from error
            else:
                self._known.wrote(written)
                return record_of(written)
        raise try_later(ProblemType.BUSY, "the job changes too quickly; ask again")

    async def done(self, caller: Caller, text: str) -> AgentJob:
        """A job that is done, whole: few ask for a result, and it can be large.

        :raises ProblemError: no such job; no result (409, with the status).
        """
        name = await self._visible(caller, text)
        record = await self._known_or_read(name)
        if record.over and record.state is not State.DONE:
            raise _no_result(record)
        body = await self._get(name)
        job = AgentJob.from_json(body)
        if state_of(job) is not State.DONE:
            raise _no_result(record_of(body))
        return job

    async def find(self, caller: Caller, text: str) -> JobRecord:
        """A job that the caller may see.

        :raises ProblemError: no such job, for this caller.
        """
        return await self._known_or_read(await self._visible(caller, text))

    async def _visible(self, caller: Caller, text: str) -> Name:
        place = parse_job_id(text)
        if place is None or not await self._reviews.allowed(
            caller, Right("get", "agentjobs", *place)
        ):
            raise _no_such_job()
        return Name(*place)

    async def _known_or_read(self, name: Name, version: int = 0) -> JobRecord:
        """Read the cache; for what is not there, or is older than what the caller saw, the server.

        Another replica may have made or changed it a moment ago.
        """
        record = self._known.get(name)
        if record and record.version >= version:
            return record
        return await self._read(name)

    async def _read(self, name: Name) -> JobRecord:
        body = await self._get(name)
        self._known.wrote(body)
        return record_of(body)

    async def _get(self, name: Name) -> dict[str, Any]:
        try:
            return await self._kube.get(AGENTJOBS, *name)
        except NotFoundError as error:
            raise _no_such_job() from error

    async def _wait(self, caller: Caller, name: Name, tag: str, seconds: float) -> None:
        """Wait until the status is another one than the caller knows."""
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        while (left := end - loop.time()) > 0 and not self._known.changes.closed:
            record = self._known.get(name)
            if record is None or record.tag != tag:
                return
            began = loop.time()
            await self._known.changes.wait(name, min(left, RECHECK_SECONDS))
            if loop.time() - began >= RECHECK_SECONDS:
                await self._visible(caller, job_id(*name))

    def _changed(self, namespace: str, position: int, wanted: Filter) -> list[JobRecord]:
        found = [
            record
            for record in self._known.of(namespace)
            if position < record.version <= self._known.position and wanted.takes(record)
        ]
        return sorted(found, key=lambda record: record.version)

    @staticmethod
    def _seal_position(keys: Keys, namespace: str, position: int) -> str:
        return seal_cursor(keys, f"since {namespace}", position)


def _order(record: JobRecord) -> tuple[str, str]:
    return record.created, record.uid


def _tag_in(etag: str) -> str:
    """The digest in an ETag of ours; empty for anything else."""
    return etag.strip().removeprefix("W/").strip('"').partition("-")[2]


def _version_in(etag: str) -> int:
    digits = etag.strip().removeprefix("W/").strip('"').partition("-")[0]
    return int(digits) if digits.isascii() and digits.isdigit() and len(digits) < 20 else 0  # noqa: PLR2004


def _no_such_job() -> ProblemError:
    return ProblemError(ProblemType.JOB_NOT_FOUND, "it was never started, or was deleted since")


def _stopped_already(record: JobRecord) -> ProblemError:
    how = "is being stopped already" if record.state is State.STOPPING else "is over"
    return ProblemError(
        ProblemType.ALREADY_STOPPED,
        f"the job {how}: {record.state}",
        job_id=job_id(*record.name),
        job_status=record.state,
    )


def _no_result(record: JobRecord) -> ProblemError:
    this = job_id(*record.name)
    if record.over:
        detail = f"the job ended {record.state}; what it printed: /v1/jobs/{this}/output"
    else:
        detail = f"the job is {record.state}; wait for its event, or: /v1/jobs/{this}?wait=30"
    return ProblemError(ProblemType.NOT_DONE, detail, job_id=this, job_status=record.state)
