"""What can go wrong for a caller. No error ever holds the token.

ClientError
├── ProblemError            the gateway refused; `type` says why
│   ├── NotFoundError       no such job, tool or question
│   ├── InvalidArgumentsError
│   ├── KeyReusedError
│   ├── QuotaExceededError
│   ├── NotDoneError
│   └── AlreadyAnsweredError
├── UnavailableError        no answer that means anything, however often it was tried
└── UnexpectedAnswerError   an answer, but not a gateway's
"""

from typing import Final

from agentjobs.contract.calls import Problem
from agentjobs.contract.problems import BASE, ProblemType


class ClientError(Exception):
    """Base of all errors of the client."""


class UnavailableError(ClientError):
    """No answer that means anything came in time. What was asked for may have been done."""

    def __init__(self, message: str, key: str | None = None) -> None:
        super().__init__(message)
        self.key = key
        """Of a start: the key with which it can be repeated safely."""


class UnexpectedAnswerError(ClientError):
    """An answer that no gateway gives: the URL leads elsewhere, or something is in between."""


class ProblemError(ClientError):
    """A refusal: by the gateway, or by what stands before it (`about:blank`)."""

    def __init__(self, problem: Problem, *, repeated: bool = False) -> None:
        super().__init__(_sentence(problem))
        self.problem = problem
        self.repeated = repeated
        """Whether earlier tries of the call got no answer that says what became of them."""

    @property
    def type(self) -> str:
        """The stable word, such as `forbidden`; `about:blank` where no gateway has spoken."""
        return self.problem.type.removeprefix(BASE)


class NotFoundError(ProblemError):
    """There is no such job, tool or question, or the caller may not know of it."""


class InvalidArgumentsError(ProblemError):
    """The arguments do not fit the tool; `problem.errors` has the places, for a model to mend."""


class KeyReusedError(ProblemError):
    """The key has started another job (`problem.job_id`, `problem.differs`)."""


class QuotaExceededError(ProblemError):
    """The namespace has as many jobs as it may have. The key is as good as new."""


class NotDoneError(ProblemError):
    """There is no result: the job is not over, or ended otherwise (`problem.job_status`)."""


class AlreadyAnsweredError(ProblemError):
    """The question is closed."""


_CLASSES: Final[dict[str, type[ProblemError]]] = {
    ProblemType.NOT_FOUND.uri: NotFoundError,
    ProblemType.JOB_NOT_FOUND.uri: NotFoundError,
    ProblemType.TOOL_NOT_FOUND.uri: NotFoundError,
    ProblemType.INVALID_ARGUMENTS.uri: InvalidArgumentsError,
    ProblemType.KEY_REUSED.uri: KeyReusedError,
    ProblemType.QUOTA_EXCEEDED.uri: QuotaExceededError,
    ProblemType.NOT_DONE.uri: NotDoneError,
    ProblemType.ALREADY_ANSWERED.uri: AlreadyAnsweredError,
}


def error_of(problem: Problem, *, repeated: bool = False) -> ProblemError:
    """The error to raise. It goes by the type: a proxy's 404 says nothing about a job."""
    return _CLASSES.get(problem.type, ProblemError)(problem, repeated=repeated)


def _sentence(problem: Problem) -> str:
    faults = "; ".join(f"{each.pointer}: {each.detail}" for each in problem.errors or ())
    detail = f"{problem.detail} ({faults})" if faults else problem.detail
    return f"{problem.title}: {detail}" if detail else problem.title
