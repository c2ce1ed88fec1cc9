"""What pods report of their own jobs: progress, a summary, the final result (R-REPORT)."""

import asyncio
import hashlib
import logging
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from agentjobs.api.agentjob import AgentJob, ResultSource
from agentjobs.api.base import format_time
from agentjobs.api.names import INLINE_RESULT_BYTES, SUMMARY_CHARACTERS
from agentjobs.contract.calls import ProgressReport
from agentjobs.contract.problems import ProblemType
from agentjobs.domain.output import result_path
from agentjobs.domain.texts import cut, one_line
from agentjobs.gateway.known import NEVER, JobRecord, KnownJobs, Name
from agentjobs.gateway.pods import MAX_PODS, JobsOfPods, not_its_pod
from agentjobs.gateway.problems import ProblemError, try_later
from agentjobs.gateway.reviews import Pod
from agentjobs.kube import (
    AGENTJOBS,
    ConflictError,
    Kube,
    KubeError,
    UnavailableError,
)
from agentjobs.store import OutputStore, StoreError

log = logging.getLogger(__name__)
PROGRESS_EVERY = timedelta(seconds=5)
"""Of one job, whoever reports it and to whichever replica."""
SUMMARY_EVERY_SECONDS = 1.0
SUMMARY_PATIENCE_SECONDS = 5.0
MESSAGE_CHARACTERS = 256
TRIES = 10


@dataclass(slots=True)
class _Waiting:
    """The newest of a job of which something was written too lately."""

    news: dict[str, Any]
    task: "asyncio.Task[None]"


class Reports:
    """Takes reports of pods, each for its own job and nothing else."""

    def __init__(
        self, kube: Kube, jobs: KnownJobs, pods: JobsOfPods, store: OutputStore | None
    ) -> None:
        self._kube = kube
        self._jobs = jobs
        self._pods = pods
        self._store = store
        self._written: dict[str, datetime] = {}
        self._waiting: dict[str, _Waiting] = {}
        self._turns: dict[str, float] = {}
        """When the next summary of a job may be written, by the loop's clock."""

    async def progress(self, pod: Pod, job_id: str, report: ProgressReport) -> None:
        """Keep how far a tool is: the newest, every five seconds at most.

        :raises ProblemError: not a pod of that job; the job is over.
        """
        record = await self._pods.job_of(pod, job_id)
        progress: dict[str, Any] = {"at": format_time(datetime.now(UTC))}
        # What is not told this time is not known any more.
        progress["percent"] = report.percent
        progress["message"] = cut(one_line(report.message or ""), MESSAGE_CHARACTERS) or None
        await self._soon(record, pod, {"progress": progress})

    async def summary(self, pod: Pod, job_id: str, summary: str) -> None:
        """Keep one line about the result; return when it is kept, for tools end soon after.

        :raises ProblemError: not a pod of that job; the job is over; too many at once (503).
        """
        record = await self._pods.job_of(pod, job_id)
        now = asyncio.get_running_loop().time()
        turn = max(now, self._turns.get(record.uid, 0.0))
        if turn - now > SUMMARY_PATIENCE_SECONDS:
            raise try_later(ProblemType.BUSY, "one summary each second is kept")
        self._turns = {uid: at for uid, at in self._turns.items() if at > now}
        self._turns[record.uid] = turn + SUMMARY_EVERY_SECONDS
        await asyncio.sleep(turn - now)
        line = cut(one_line(summary), SUMMARY_CHARACTERS)
        await self._patch(record.name, record.uid, {"summary": line or None})

    async def result(self, pod: Pod, job_id: str, content: bytes) -> None:
        """Keep the final result; return only when its mark is in the status.

        The verdict rests on the mark: a tool that hands in its result and is stopped then is done.

        :raises ProblemError: not a pod of that job; the job is over; another result is there.
        """
        record = await self._pods.job_of(pod, job_id)
        mark: dict[str, Any] | None = None
        for _ in range(TRIES):
            # The attempt may have changed since the pod was looked up, and is no one else's.
            job = AgentJob.from_json(await self._pods.read(record.name, record.uid))
            if mark is None:
                _check_open(job, pod, content)
                # Only now: what is refused must not fill the store.
                mark = await self._stored(record, content)
                continue
            _check_open(job, pod, content)
            if job.status.result is not None:
                # The answer to it was lost.
                return
            version = job.metadata.resource_version
            try:
                await self._patch(record.name, record.uid, {"result": mark}, version)
            except ConflictError:
                continue
            return
        raise try_later(ProblemType.BUSY, "the job changes too quickly; report again")

    async def close(self) -> None:
        """Write what waits to be written."""
        for waiting in list(self._waiting.values()):
            waiting.task.cancel()
        for uid, waiting in list(self._waiting.items()):
            record = next((each for each in self._jobs if each.uid == uid), None)
            if record:
                await self._write(record.name, uid, waiting.news)

    async def _stored(self, job: JobRecord, content: bytes) -> dict[str, Any]:
        """What the status says of a result; a large one is stored before.

        :raises ProblemError: too large for the status, and there is no store, or it fails; the job
            is over.
        """
        mark = _mark(content)
        if "text" in mark:
            return mark
        if self._store is None:
            raise ProblemError(
                ProblemType.BODY_TOO_LARGE,
                f"more than {INLINE_RESULT_BYTES} bytes of text, and there is no store for them",
            )
        try:
            try:
                await self._store.put(f"{job.uid}/{mark['uri']}", content)
            finally:
                await self._pods.settle(job, self._store)
        except StoreError as error:
            log.warning("a result cannot be stored: %s", error)
            raise try_later(ProblemType.UNAVAILABLE, "the store does not answer", 5) from error
        return mark

    async def _soon(self, record: JobRecord, pod: Pod, news: dict[str, Any]) -> None:
        """Write what a tool says of itself, together with what else it says within seconds."""
        waiting = self._waiting.get(record.uid)
        if waiting:
            waiting.news |= news
            return
        last = max(self._written.get(record.uid, NEVER), record.told_at)
        pause = (last + PROGRESS_EVERY - datetime.now(UTC)).total_seconds()
        if pause <= 0:
            await self._write(record.name, record.uid, news)
            return
        task = asyncio.create_task(self._later(record.name, record.uid, pod, pause))
        self._waiting[record.uid] = _Waiting(news, task)

    async def _later(self, name: Name, uid: str, pod: Pod, pause: float) -> None:
        await asyncio.sleep(pause)
        waiting = self._waiting.pop(uid)
        record = self._jobs.get(name)
        if record and record.uid == uid and pod.uid in record.pods:
            # Otherwise another attempt has begun, or the job is over.
            await self._write(name, uid, waiting.news)

    async def _write(self, name: Name, uid: str, news: dict[str, Any]) -> None:
        self._written[uid] = datetime.now(UTC)
        if len(self._written) > len(self._jobs) + MAX_PODS:
            known = {record.uid for record in self._jobs}
            self._written = {each: at for each, at in self._written.items() if each in known}
        try:
            await self._patch(name, uid, news)
        except (KubeError, UnavailableError) as error:
            # The next report says more.
            log.info("what AgentJob %s/%s says of itself is not kept: %s", *name, error)

    async def _patch(self, name: Name, uid: str, status: dict[str, Any], version: str = "") -> None:
        meta = {"uid": uid, **({"resourceVersion": version} if version else {})}
        body = {"metadata": meta, "status": status}
        self._jobs.wrote(await self._kube.patch(AGENTJOBS, *name, body, "status"))


def _check_open(job: AgentJob, pod: Pod, content: bytes) -> None:
    """Refuse a result that is not to be kept.

    :raises ProblemError: the job is over; it is not that pod's any more; its result is taken from
        elsewhere, or another one is there.
    """
    status = job.status
    if status.finished_at:
        raise ProblemError(ProblemType.JOB_OVER, "its result cannot be changed any more")
    if pod.uid not in (status.pod_uids or ()):
        raise not_its_pod()
    effective = status.effective
    if effective and effective.result_from is not ResultSource.REPORT:
        raise ProblemError(
            ProblemType.RESULT_ELSEWHERE,
            f"the tool's resultFrom is {effective.result_from}; set it to report",
        )
    if status.result is not None and status.result.to_json() != _mark(content):
        raise ProblemError(ProblemType.RESULT_EXISTS, "the first one stays")


def _mark(content: bytes) -> dict[str, Any]:
    """What the status says of a result: the text itself, or where it is."""
    mark: dict[str, Any] = {
        "source": ResultSource.REPORT.value,
        "bytes": len(content),
        "truncated": False,
    }
    text = _as_text(content)
    if text is not None:
        return {**mark, "text": text}
    # Named by its content: another result does not take its place.
    return {**mark, "uri": result_path(hashlib.sha256(content).hexdigest())}


def _as_text(content: bytes) -> str | None:
    """A result that fits into the status; None for a larger one, or one that is no text."""
    if len(content) > INLINE_RESULT_BYTES:
        return None
    try:
        return content.decode()
    except UnicodeDecodeError:
        return None
