"""Questions of jobs: shown to who may see the job, answered once by who may answer."""

from datetime import UTC, datetime

from agentjobs.api.base import format_time
from agentjobs.api.inputrequest import InputKind, InputRequest, Outcome
from agentjobs.contract.calls import Answer, Fault, Question
from agentjobs.contract.problems import ProblemType
from agentjobs.domain.arguments import check_size, faults_of
from agentjobs.domain.errors import InvalidSpecError
from agentjobs.domain.questions import question_name
from agentjobs.gateway.jobs import Jobs
from agentjobs.gateway.known import JobRecord, KnownInputs
from agentjobs.gateway.problems import ProblemError
from agentjobs.gateway.reviews import Caller, Reviews, Right
from agentjobs.kube import INPUTREQUESTS, ConflictError, Kube, KubeError, NotFoundError

MAX_ANSWER_BYTES = 16 * 1024


class Inputs:
    """Open questions, and their answers."""

    def __init__(self, kube: Kube, known: KnownInputs, jobs: Jobs, reviews: Reviews) -> None:
        self._kube = kube
        self._known = known
        self._jobs = jobs
        self._reviews = reviews

    async def open(self, caller: Caller, job_id: str) -> tuple[Question, ...]:
        """Questions of a job that nobody has answered.

        :raises ProblemError: no such job, for this caller.
        """
        record = await self._jobs.find(caller, job_id)
        return tuple(
            _question(each)
            for each in self._known.of(record.uid)
            if each.status.outcome is None and datetime.now(UTC) < each.spec.expires_at
        )

    async def answer(self, caller: Caller, job_id: str, key: str, answer: Answer) -> None:
        """Answer a question.

        :raises ProblemError: no such job or question; not the caller's to answer; closed (409); not
            as the question's schema asks (422).
        """
        record = await self._jobs.find(caller, job_id)
        asked = await self.question(record, key)
        await self._check_right(caller, asked)
        if asked.status.outcome is not None or datetime.now(UTC) >= asked.spec.expires_at:
            raise _closed(asked)
        _check_answer(asked, answer)
        status = {
            "outcome": answer.outcome,
            "answeredBy": caller.name,
            "answeredAt": format_time(datetime.now(UTC)),
            **({"answer": answer.answer} if answer.answer is not None else {}),
        }
        meta = asked.metadata
        try:
            written = await self._kube.put_status(
                INPUTREQUESTS, meta.namespace, meta.name, meta.resource_version, status
            )
        except (ConflictError, NotFoundError) as error:
            # A question changes once: when it is closed.
            raise _closed(asked) from error
        except KubeError as error:
            message = str(error.status.get("message") or "")
            raise ProblemError(ProblemType.FORBIDDEN, message) from error
        self._known.put(written)

    async def question(self, record: JobRecord, key: str) -> InputRequest:
        """A question of a job.

        :raises ProblemError: there is none.
        """
        return self._known.get(record.uid, key) or await self._read(record, key)

    async def _read(self, record: JobRecord, key: str) -> InputRequest:
        """A question that was asked at another replica a moment ago.

        :raises ProblemError: there is none.
        """
        namespace, job = record.name
        name = question_name(job, record.uid, key)
        try:
            body = await self._kube.get(INPUTREQUESTS, namespace, name)
        except NotFoundError as error:
            raise ProblemError(ProblemType.NOT_FOUND, "the job asks no such question") from error
        self._known.put(body)
        return InputRequest.from_json(body)

    async def _check_right(self, caller: Caller, asked: InputRequest) -> None:
        """Ask what the policy on answers would ask a user, for whom the gateway vouches."""
        requester = asked.spec.requested_by
        if asked.spec.kind is not InputKind.APPROVAL:
            if caller.name != requester:
                raise ProblemError(
                    ProblemType.FORBIDDEN, "only the requester of the job can answer this"
                )
            return
        if caller.name == requester:
            raise ProblemError(
                ProblemType.FORBIDDEN, "an approval cannot be given by the requester of the job"
            )
        meta = asked.metadata
        right = Right("approve", "inputrequests", meta.namespace, meta.name)
        await self._reviews.require(caller, right)
        approvers = set(asked.spec.approvers or ())
        names = {f"user:{caller.name}", *(f"group:{group}" for group in caller.groups)}
        if approvers and not approvers & names:
            raise ProblemError(
                ProblemType.FORBIDDEN, f"{caller.name} is not among the approvers of this tool"
            )


def _question(asked: InputRequest) -> Question:
    spec = asked.spec
    return Question(
        key=spec.key,
        kind=spec.kind.value,
        prompt=spec.prompt,
        answer_schema=spec.schema_,
        consequences=spec.consequences.to_json() if spec.consequences else None,
        expires_at=spec.expires_at,
    )


def _check_answer(asked: InputRequest, answer: Answer) -> None:
    if answer.outcome == "declined":
        if answer.answer is not None:
            raise ProblemError(
                ProblemType.INVALID_BODY,
                "what is declined has no answer",
                faults=[Fault(pointer="/answer", detail="must be absent")],
            )
        return
    try:
        check_size(answer.answer or {}, MAX_ANSWER_BYTES, "answer")
        faults = faults_of(asked.spec.schema_ or {}, answer.answer or {}, "answer_schema")
    except InvalidSpecError as error:
        raise ProblemError(ProblemType.UNRUNNABLE, str(error)) from error
    if faults:
        raise ProblemError(
            ProblemType.INVALID_BODY,
            "the answer is not as the question's schema asks",
            faults=[
                Fault(pointer=f"/answer{each.pointer}", detail=each.message) for each in faults
            ],
        )


def _closed(asked: InputRequest) -> ProblemError:
    outcome = asked.status.outcome
    expired = outcome is None and datetime.now(UTC) >= asked.spec.expires_at
    outcome = Outcome.EXPIRED if expired else outcome
    detail = f"the question {asked.spec.key} was {outcome}" if outcome else "it was closed just now"
    return ProblemError(ProblemType.ALREADY_ANSWERED, detail)
