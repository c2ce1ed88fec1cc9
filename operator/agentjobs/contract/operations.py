"""The calls of the HTTP API, declared once.

The gateway serves and checks them by this table; the OpenAPI document is written from it.
"""

import re
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from http import HTTPStatus
from typing import Annotated, Any, Final

from pydantic import BaseModel, BeforeValidator, Field, StringConstraints, TypeAdapter

from agentjobs.api.names import MAX_REPORTED_BYTES, State
from agentjobs.contract import calls
from agentjobs.contract.problems import ProblemType as P

KEY: Final = "Idempotency-Key"
OCTETS: Final = "application/octet-stream"
MAX_WAIT_SECONDS: Final = 60
MAX_PAGE_JOBS: Final = 500
DEFAULT_PAGE_JOBS: Final = 50
MAX_PAGE_BYTES: Final = 64 * 1024
MAX_CURSOR: Final = 1024
MAX_RESULT_BYTES: Final = 10 * 1024 * 1024
MAX_PIECE_BYTES: Final = 1024 * 1024
DECIMAL = re.compile(r"[0-9]{1,10}")


def _decimal(text: Any) -> Any:
    """Digits and nothing else: Python's int() also reads `1_0` and ` 1`."""
    if isinstance(text, str) and DECIMAL.fullmatch(text):
        return int(text)
    raise ValueError("must be a whole number in decimal digits")


Cursor = Annotated[
    str, StringConstraints(min_length=1, max_length=MAX_CURSOR, pattern=r"^[-_0-9A-Za-z]+$")
]
Since = Annotated[str, StringConstraints(max_length=MAX_CURSOR, pattern=r"^[-_0-9A-Za-z]*$")]
Wait = Annotated[int, Field(ge=0, le=MAX_WAIT_SECONDS), BeforeValidator(_decimal)]
PageJobs = Annotated[int, Field(ge=1, le=MAX_PAGE_JOBS), BeforeValidator(_decimal)]
Offset = Annotated[int, Field(ge=0, le=MAX_REPORTED_BYTES), BeforeValidator(_decimal)]
Ordinal = Annotated[int, Field(ge=0, le=999_999), BeforeValidator(_decimal)]
PageBytes = Annotated[int, Field(ge=4, le=MAX_PAGE_BYTES), BeforeValidator(_decimal)]
Reason = Annotated[str, StringConstraints(max_length=1024)]


class Stream(StrEnum):
    """Which output of a job."""

    PRINTED = "printed"
    """What its tool wrote to standard output and standard error."""
    REPORTED = "reported"
    """What its tool handed in piece by piece."""


class In(StrEnum):
    """Where a parameter stands."""

    QUERY = "query"
    PATH = "path"
    HEADER = "header"


@dataclass(frozen=True)
class Parameter:
    """One parameter of a call."""

    name: str
    annotation: Any
    description: str
    where: In = In.QUERY
    required: bool = False

    @cached_property
    def adapter(self) -> TypeAdapter[Any]:
        """Checks a value that came as text."""
        return TypeAdapter(self.annotation)


@dataclass(frozen=True)
class Operation:
    """One call."""

    id: str
    method: str
    path: str
    summary: str
    answer: type[BaseModel] | None
    """Body of the answer; None: a document of another kind, or none."""
    parameters: tuple[Parameter, ...] = ()
    body: type[BaseModel] | None = None
    status: HTTPStatus = HTTPStatus.OK
    problems: tuple[P, ...] = ()
    """Beside those that every call can meet."""
    public: bool = False
    """Served without a token."""
    headers: tuple[str, ...] = ()
    """Headers of the answer that callers may rely on."""
    media_type: str = "application/json"
    pod: bool = False
    """Asked by the pod of a job, with its own token; not by callers."""
    raw_limit: int | None = None
    """The body is taken as it is, up to so many bytes."""
    octets: bool = False
    """With `Accept: application/octet-stream` the answer is bytes; what else there is to say stands
    in the headers Agentjobs-Next and Agentjobs-End."""
    also: tuple[HTTPStatus, ...] = field(default=())
    """Further answers: without a body (304), or with a text."""


ANYWHERE: Final = (P.INVALID_REQUEST,)
AUTHENTICATED: Final = (P.UNAUTHENTICATED, P.FORBIDDEN, P.BUSY, P.UNAVAILABLE)

NAMESPACE = Parameter(
    "namespace",
    calls.Label,
    "Namespace. Absent: that of the caller's ServiceAccount.",
)
JOB = Parameter("job_id", calls.JobId, "Handle of the job.", In.PATH, required=True)
CURSOR = Parameter("cursor", Cursor, "Where to go on: `next` of the answer before.")
LIMIT_BYTES = Parameter("limit", PageBytes, "Bytes of data in the page at most.")
WAIT = Parameter(
    "wait",
    Wait,
    "Seconds to wait for a change before answering (long poll).",
)

START = Operation(
    "startJob",
    "POST",
    "/v1/jobs",
    "Start a job. Answers at once; the same key and payload always give the same job.",
    calls.Started,
    parameters=(
        Parameter(
            KEY,
            Annotated[str, StringConstraints(pattern=r"^[\x21-\x7e]{1,255}$")],
            "Names this start. Repeat it with the same key after a lost answer.",
            In.HEADER,
            required=True,
        ),
        NAMESPACE,
    ),
    body=calls.StartRequest,
    status=HTTPStatus.ACCEPTED,
    problems=(
        P.KEY_REQUIRED,
        P.NAMESPACE_DENIED,
        P.TEMPLATES_DENIED,
        P.TOOL_NOT_FOUND,
        P.TIMEOUT,
        P.BODY_TOO_LARGE,
        P.UNSUPPORTED_MEDIA_TYPE,
        P.INVALID_BODY,
        P.INVALID_ARGUMENTS,
        P.NAMESPACE_REQUIRED,
        P.UNRUNNABLE,
        P.KEY_REUSED,
        P.QUOTA_EXCEEDED,
    ),
    headers=("Location", "Retry-After", "ETag", "Idempotency-Replayed"),
)
LIST = Operation(
    "listJobs",
    "GET",
    "/v1/jobs",
    "List jobs, the newest first; with `since`, what changed, each job in its newest state.",
    calls.JobPage,
    parameters=(
        NAMESPACE,
        Parameter("status", State, "Only jobs with this status."),
        Parameter("tool", calls.Label, "Only jobs of this tool."),
        Parameter("limit", PageJobs, f"Jobs in the page; {DEFAULT_PAGE_JOBS} where absent."),
        CURSOR,
        Parameter(
            "since",
            Since,
            "Only what changed after the answer that gave this cursor; empty: from the beginning.",
        ),
        WAIT,
    ),
    problems=(P.INVALID_CURSOR, P.NAMESPACE_REQUIRED),
)
STATUS = Operation(
    "getJob",
    "GET",
    "/v1/jobs/{job_id}",
    "Status of a job, at most 1 KiB.",
    calls.JobStatus,
    parameters=(
        JOB,
        WAIT,
        Parameter(
            "If-None-Match",
            Annotated[str, StringConstraints(max_length=1024)],
            "ETag of a status, a start or a stop: answered 304 while the status is still that one, "
            "and never from before it, whichever replica answers.",
            In.HEADER,
        ),
    ),
    problems=(P.JOB_NOT_FOUND,),
    headers=("ETag",),
    also=(HTTPStatus.NOT_MODIFIED,),
)
STOP = Operation(
    "stopJob",
    "DELETE",
    "/v1/jobs/{job_id}",
    "Ask for the end of a job. Its status says how it really ended.",
    calls.Stopped,
    parameters=(JOB, Parameter("reason", Reason, "Why, for the record.")),
    status=HTTPStatus.ACCEPTED,
    problems=(P.JOB_NOT_FOUND, P.ALREADY_STOPPED),
    headers=("ETag",),
)
OUTPUT = Operation(
    "getJobOutput",
    "GET",
    "/v1/jobs/{job_id}/output",
    "What the tool has printed, or handed in piece by piece, so far.",
    calls.OutputPage,
    parameters=(
        JOB,
        Parameter("stream", Stream, "Which of both. Absent: what it has printed."),
        CURSOR,
        LIMIT_BYTES,
        Parameter("attempt", Ordinal, "Which attempt. Absent: all, one after the other."),
        Parameter("index", Ordinal, "Of an indexed Job: which completion. Absent: 0."),
    ),
    problems=(P.JOB_NOT_FOUND, P.INVALID_CURSOR),
    octets=True,
)
RESULT = Operation(
    "getJobResult",
    "GET",
    "/v1/jobs/{job_id}/result",
    "The result of a job that is done.",
    calls.ResultPage,
    parameters=(JOB, CURSOR, LIMIT_BYTES),
    problems=(P.JOB_NOT_FOUND, P.NOT_DONE, P.INVALID_CURSOR),
)
INPUTS = Operation(
    "listInputs",
    "GET",
    "/v1/jobs/{job_id}/inputs",
    "Open questions of a job.",
    calls.QuestionList,
    parameters=(JOB,),
    problems=(P.JOB_NOT_FOUND,),
)
ANSWER = Operation(
    "answerInput",
    "POST",
    "/v1/jobs/{job_id}/inputs/{key}",
    "Answer a question of a job, once.",
    None,
    parameters=(
        JOB,
        Parameter(
            "key",
            Annotated[str, StringConstraints(min_length=1, max_length=128)],
            "Name of the question.",
            In.PATH,
            required=True,
        ),
    ),
    body=calls.Answer,
    status=HTTPStatus.NO_CONTENT,
    problems=(
        P.NOT_FOUND,
        P.JOB_NOT_FOUND,
        P.ALREADY_ANSWERED,
        P.TIMEOUT,
        P.BODY_TOO_LARGE,
        P.UNSUPPORTED_MEDIA_TYPE,
        P.INVALID_BODY,
    ),
)
TOOLS = Operation(
    "listTools",
    "GET",
    "/v1/tools",
    "The catalogue as function definitions for a model.",
    calls.ToolList,
    parameters=(NAMESPACE,),
    problems=(P.NAMESPACE_REQUIRED,),
)
REPORTING_JOB = Parameter(
    "Agentjobs-Job",
    Annotated[str, StringConstraints(max_length=127)],
    "The pod's AGENTJOBS_JOB_ID.",
    In.HEADER,
    required=True,
)
REPORT_PROBLEMS: Final = (
    P.NOT_ITS_POD,
    P.POD_NOT_KNOWN,
    P.JOB_OVER,
    P.TIMEOUT,
    P.BODY_TOO_LARGE,
    P.UNSUPPORTED_MEDIA_TYPE,
    P.INVALID_BODY,
)
REPORT_PROGRESS = Operation(
    "reportProgress",
    "POST",
    "/v1/report/progress",
    "Tell how far the tool is. Often told, the newest is kept, every five seconds.",
    None,
    parameters=(REPORTING_JOB,),
    body=calls.ProgressReport,
    status=HTTPStatus.NO_CONTENT,
    problems=REPORT_PROBLEMS,
    pod=True,
)
REPORT_SUMMARY = Operation(
    "reportSummary",
    "POST",
    "/v1/report/summary",
    "Say in one line what came out.",
    None,
    parameters=(REPORTING_JOB,),
    body=calls.SummaryReport,
    status=HTTPStatus.NO_CONTENT,
    problems=REPORT_PROBLEMS,
    pod=True,
)
ASK = Operation(
    "ask",
    "POST",
    "/v1/report/ask",
    "Ask whoever started the job; the same question asked again is the same. Wait for the answer "
    "with the next call.",
    calls.AskState,
    parameters=(REPORTING_JOB,),
    body=calls.AskReport,
    problems=(
        *REPORT_PROBLEMS,
        P.UNRUNNABLE,
        P.QUESTION_DIFFERS,
        P.TOO_MANY_QUESTIONS,
        P.NOBODY_TO_ASK,
    ),
    pod=True,
)
ASKED = Operation(
    "getAsked",
    "GET",
    "/v1/report/ask/{key}",
    "How a question of this job stands: open, or closed with an answer or without.",
    calls.AskState,
    parameters=(
        REPORTING_JOB,
        Parameter(
            "key",
            Annotated[str, StringConstraints(pattern=calls.QUESTION_KEY)],
            "Name of the question.",
            In.PATH,
            required=True,
        ),
        Parameter("wait", Wait, "Seconds to wait for the answer (long poll)."),
    ),
    problems=(P.NOT_FOUND, P.NOT_ITS_POD, P.POD_NOT_KNOWN, P.JOB_OVER),
    pod=True,
)
REPORT_OUTPUT = Operation(
    "reportOutput",
    "POST",
    "/v1/report/output",
    "Hand in a piece of output, as it is: kept beside what is printed. Pieces are sent in order; "
    "the same piece sent again, after a lost answer, is kept once.",
    calls.OutputKept,
    parameters=(
        REPORTING_JOB,
        Parameter(
            "offset",
            Offset,
            "Bytes that this pod has handed in before this piece.",
            required=True,
        ),
    ),
    problems=(*REPORT_PROBLEMS, P.OUTPUT_ELSEWHERE, P.OUTPUT_FULL, P.OUTPUT_NOT_KEPT),
    pod=True,
    raw_limit=MAX_PIECE_BYTES,
)
REPORT_RESULT = Operation(
    "reportResult",
    "POST",
    "/v1/report/result",
    "Hand in the final result, once; the body is the result, of any media type.",
    None,
    parameters=(REPORTING_JOB,),
    status=HTTPStatus.NO_CONTENT,
    problems=(*REPORT_PROBLEMS, P.RESULT_EXISTS, P.RESULT_ELSEWHERE),
    pod=True,
    raw_limit=MAX_RESULT_BYTES,
)
SIGNING_KEYS = Operation(
    "getSigningKeys",
    "GET",
    "/.well-known/agentjobs-signing-keys",
    "Public keys that events are signed with (Standard Webhooks, v1a).",
    calls.SigningKeys,
    public=True,
    problems=(P.UNAVAILABLE,),
)
OPENAPI = Operation(
    "getOpenApi", "GET", "/openapi.json", "This API (OpenAPI 3.1).", None, public=True
)
ASYNCAPI = Operation(
    "getAsyncApi", "GET", "/asyncapi.json", "The events (AsyncAPI 3.0).", None, public=True
)
HEALTHZ = Operation(
    "healthz",
    "GET",
    "/healthz",
    "Whether the process lives.",
    None,
    public=True,
    media_type="text/plain",
)
READYZ = Operation(
    "readyz",
    "GET",
    "/readyz",
    "Whether it can serve; 503 with the reason where not.",
    None,
    public=True,
    media_type="text/plain",
    also=(HTTPStatus.SERVICE_UNAVAILABLE,),
)
METRICS = Operation(
    "metrics",
    "GET",
    "/metrics",
    "Prometheus metrics.",
    None,
    public=True,
    media_type="text/plain",
)

OPERATIONS: Final = (
    START,
    LIST,
    STATUS,
    STOP,
    OUTPUT,
    RESULT,
    INPUTS,
    ANSWER,
    TOOLS,
    REPORT_PROGRESS,
    REPORT_SUMMARY,
    REPORT_OUTPUT,
    REPORT_RESULT,
    ASK,
    ASKED,
    SIGNING_KEYS,
    OPENAPI,
    ASYNCAPI,
    HEALTHZ,
    READYZ,
    METRICS,
)
