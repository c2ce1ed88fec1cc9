"""Questions of tools: each asked once under its key, its answer waited for (R-REPORT)."""

import asyncio
from datetime import UTC, datetime
from typing import Any
from weakref import WeakValueDictionary

from agentjobs.api.agentjob import AgentJob
from agentjobs.api.inputrequest import InputRequest, Outcome
from agentjobs.contract.calls import AskReport, AskState, Fault
from agentjobs.contract.problems import ProblemType
from agentjobs.domain.arguments import check_schema, check_size, faults_of, inexact_numbers
from agentjobs.domain.errors import InvalidSpecError
from agentjobs.domain.questions import question_name, question_of
from agentjobs.gateway.known import JobRecord, KnownInputs
from agentjobs.gateway.pods import JobsOfPods, not_its_pod
from agentjobs.gateway.problems import ProblemError
from agentjobs.gateway.reviews import Pod
from agentjobs.kube import INPUTREQUESTS, ConflictError, Kube, KubeError, NotFoundError

MAX_SCHEMA_BYTES = 16 * 1024
MAX_OPEN = 8
"""Questions of one job that wait for an answer at once, about: replicas count what they know, so
each may let one in while another does."""
MAX_ASKED = 64
"""Questions of one job in all, about; they stay on record with it."""
RECHECK_SECONDS = 30.0
FORBIDDEN = 403


class Asks:
    """Takes questions of pods, each for its own job and nothing else."""

    def __init__(self, kube: Kube, known: KnownInputs, pods: JobsOfPods) -> None:
        self._kube = kube
        self._known = known
        self._pods = pods
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def ask(self, pod: Pod, job_id: str, asked: AskReport) -> AskState:
        """Ask a question; return how it stands, for it may have been asked before.

        :raises ProblemError: not a pod of that job; the job is over; a schema that is none (422);
            another question has that key (422); too many; nobody could answer (409).
        """
        record = await self._pods.job_of(pod, job_id)
        # One after the other, so that they can be counted.
        async with self._turns.setdefault(record.uid, asyncio.Lock()):
            known = self._known.get(record.uid, asked.key)
            if known is None:
                _check_answer_schema(asked)
                known = await self._create(record, pod, asked)
        _check_same(known, asked)
        return _state(known)

    async def state(self, pod: Pod, job_id: str, key: str, wait: float) -> AskState:
        """How a question stands, once it is closed or the time is over.

        :param wait: seconds.
        :raises ProblemError: not a pod of that job; the job is over; no such question (404).
        """
        clock = asyncio.get_running_loop().time
        end = clock() + wait
        while True:
            record = await self._pods.job_of(pod, job_id)
            found = self._known.get(record.uid, key) or await self._read(record, key)
            state, left = _state(found), end - clock()
            if state.outcome != "open" or left <= 0 or self._known.changes.closed:
                return state
            # Its time may be over without a change: no operator may be there to say so.
            expires = (found.spec.expires_at - datetime.now(UTC)).total_seconds()
            pause = min(left, RECHECK_SECONDS, max(expires, 0))
            await self._known.changes.wait(record.uid, pause)

    async def _create(self, record: JobRecord, pod: Pod, asked: AskReport) -> InputRequest:
        # The attempt may have changed since the pod was looked up, and the job have ended.
        job = AgentJob.from_json(await self._pods.read(record.name, record.uid))
        if job.status.finished_at:
            raise ProblemError(ProblemType.JOB_OVER, "it can ask nothing any more")
        if pod.uid not in (job.status.pod_uids or ()):
            raise not_its_pod()
        if not job.spec.requested_by:
            raise ProblemError(
                ProblemType.NOBODY_TO_ASK, "nobody is on record as the requester of this job"
            )
        self._check_room(record)
        body = question_of(job, asked, datetime.now(UTC))
        try:
            made = await self._kube.create(INPUTREQUESTS, record.name.namespace, body)
        except ConflictError:
            # Asked at another replica, or the answer to it was lost.
            return await self._read(record, asked.key)
        except KubeError as error:
            if error.code != FORBIDDEN:
                raise
            # A quota of the namespace, or its end.
            message = str(error.status.get("message") or "")
            raise ProblemError(ProblemType.FORBIDDEN, message) from error
        return self._keep(made)

    def _check_room(self, record: JobRecord) -> None:
        asked = self._known.of(record.uid)
        if sum(_state(each).outcome == "open" for each in asked) >= MAX_OPEN:
            raise ProblemError(
                ProblemType.TOO_MANY_QUESTIONS, f"at most {MAX_OPEN} wait for an answer at once"
            )
        if len(asked) >= MAX_ASKED:
            raise ProblemError(
                ProblemType.TOO_MANY_QUESTIONS, f"a job asks at most {MAX_ASKED} questions"
            )

    async def _read(self, record: JobRecord, key: str) -> InputRequest:
        namespace, job = record.name
        name = question_name(job, record.uid, key)
        try:
            body = await self._kube.get(INPUTREQUESTS, namespace, name)
        except NotFoundError as error:
            raise ProblemError(ProblemType.NOT_FOUND, "the job asks no such question") from error
        return self._keep(body)

    def _keep(self, body: dict[str, Any]) -> InputRequest:
        self._known.put(body)
        return InputRequest.from_json(body)


def _check_answer_schema(asked: AskReport) -> None:
    """Refuse a schema that no answer could be held to.

    :raises ProblemError: it is none, too large, or has numbers that would come back as others:
        asked again, the question would be another one.
    """
    schema = asked.answer_schema or {}
    try:
        check_size(schema, MAX_SCHEMA_BYTES, "answer_schema")
        check_schema(schema, "answer_schema")
    except InvalidSpecError as error:
        fault = Fault(pointer="/answer_schema", detail=str(error))
        raise ProblemError(ProblemType.INVALID_BODY, str(error), faults=[fault]) from error
    inexact = [
        Fault(pointer=f"/answer_schema{fault.pointer}", detail=fault.message)
        for fault in inexact_numbers(schema)
    ]
    if inexact:
        raise ProblemError(ProblemType.INVALID_BODY, inexact[0].detail, faults=inexact)


def _check_same(known: InputRequest, asked: AskReport) -> None:
    """Refuse another question under a key that is taken.

    :raises ProblemError: it is another one.
    """
    spec = known.spec
    pairs = {
        "kind": (spec.kind.value, asked.kind),
        "prompt": (spec.prompt, asked.prompt),
        "answer_schema": (spec.schema_, asked.answer_schema),
    }
    differs = tuple(name for name, (before, now) in pairs.items() if before != now)
    if differs:
        raise ProblemError(
            ProblemType.QUESTION_DIFFERS, "ask it under another key", differs=differs
        )


def _state(found: InputRequest) -> AskState:
    """What the tool is told; never an answer that is not as it has asked for."""
    spec, status = found.spec, found.status
    outcome = status.outcome.value if status.outcome else "open"
    answer = status.answer or {}
    if status.outcome is None and datetime.now(UTC) >= spec.expires_at:
        outcome = "expired"
    elif status.outcome is Outcome.ANSWERED and not _fits(found, answer):
        outcome = "invalid"
    return AskState(
        key=spec.key,
        outcome=outcome,
        answer=answer if outcome == "answered" else None,
        expires_at=spec.expires_at,
    )


def _fits(found: InputRequest, answer: dict[str, Any]) -> bool:
    try:
        return not faults_of(found.spec.schema_ or {}, answer, "answer_schema")
    except InvalidSpecError:
        return False
