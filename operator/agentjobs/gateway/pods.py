"""Which job a pod may speak for: its own, and nothing else (R-REPORT)."""

from typing import Any

from agentjobs.contract.problems import ProblemType
from agentjobs.domain.jobids import parse_job_id
from agentjobs.domain.pods import completion_of
from agentjobs.gateway.known import JobRecord, KnownJobs, Name, record_of
from agentjobs.gateway.problems import ProblemError, try_later
from agentjobs.gateway.reviews import Pod
from agentjobs.kube import AGENTJOBS, Kube, NotFoundError
from agentjobs.store import OutputStore

MAX_PODS = 16
"""So many pods of a job stand in its status and may report."""


class JobsOfPods:
    """Finds the jobs of pods."""

    def __init__(self, kube: Kube, jobs: KnownJobs) -> None:
        self._kube = kube
        self._jobs = jobs

    async def job_of(self, pod: Pod, job_id: str) -> JobRecord:
        """The job of a pod, which the pod must name.

        :raises ProblemError: it is not its job (403); is not known to be yet (503); is over (409).
        """
        place = parse_job_id(job_id)
        if place is None or place[0] != pod.namespace:
            raise not_its_pod()
        record = self._jobs.get(Name(*place))
        if record is None:
            record = record_of(await self.read(Name(*place)))
        if pod.uid in record.pods:
            return record
        if not record.job_name or completion_of(pod.name, record.job_name) is None:
            raise not_its_pod()
        if record.over:
            raise ProblemError(ProblemType.JOB_OVER, f"the job is {record.state}")
        if len(record.pods) >= MAX_PODS:
            raise ProblemError(
                ProblemType.NOT_ITS_POD, f"only {MAX_PODS} pods of a job at once can report"
            )
        raise try_later(ProblemType.POD_NOT_KNOWN, "the job's status does not name this pod yet")

    async def settle(self, job: JobRecord, store: OutputStore) -> None:
        """Make sure that a job was not over when something of it had been stored.

        Only then that is acknowledged: so who reads after the end has it, and the operator had it
        before it when it deleted the output. What came later goes with the job.

        :raises ProblemError: the job is over.
        :raises StoreError: it is gone, and not all of it is deleted.
        """
        try:
            now = await self._kube.get(AGENTJOBS, *job.name)
        except NotFoundError:
            now = {"metadata": {"uid": ""}}
        meta, gone = now["metadata"], now["metadata"]["uid"] != job.uid
        if not gone and not now.get("status", {}).get("finishedAt"):
            return
        if gone or meta.get("deletionTimestamp"):
            await store.delete(job.uid)
        raise ProblemError(ProblemType.JOB_OVER, "it had ended before all was stored")

    async def read(self, name: Name, uid: str = "") -> dict[str, Any]:
        """An AgentJob as it is now.

        :param uid: which it must have; empty: any.
        :raises ProblemError: there is none.
        """
        try:
            body = await self._kube.get(AGENTJOBS, *name)
        except NotFoundError as error:
            raise not_its_pod() from error
        if uid and body["metadata"]["uid"] != uid:
            raise not_its_pod()
        return body


def not_its_pod() -> ProblemError:
    """Refuse a pod, in words that tell nothing of jobs that are not its own."""
    return ProblemError(
        ProblemType.NOT_ITS_POD, "give the pod's own AGENTJOBS_JOB_ID, with the pod's own token"
    )
