"""Bodies of the HTTP API, snake_case on the wire."""

from datetime import datetime
from typing import Annotated, Any, Final, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from agentjobs.api.names import (
    CAUSE_MESSAGE_CHARACTERS,
    MAX_DEPENDENCIES,
    MAX_DURATION_SECONDS,
    SUMMARY_CHARACTERS,
    CauseCode,
    EventType,
    Evidence,
    State,
    WaitingCode,
)

MAX_STATUS_BYTES: Final = 1024
"""The answer to `GET /v1/jobs/{job_id}` is never larger."""
LABEL: Final = "^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$"
"""A DNS label (RFC 1123): name of a namespace, a tool, a job."""
JOB_ID: Final = r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?\.[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$"


QUESTION_KEY: Final = "^[A-Za-z0-9][-._A-Za-z0-9]{0,127}$"


def _whole(value: Any) -> Any:
    """900.0 is 900, as JSON Schema has it; a text and true are no numbers."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Seconds = Annotated[int, Field(ge=1, le=MAX_DURATION_SECONDS, strict=True), BeforeValidator(_whole)]
Percent = Annotated[int, Field(ge=0, le=100, strict=True), BeforeValidator(_whole)]
Label = Annotated[str, Field(pattern=LABEL)]
JobId = Annotated[
    str,
    Field(
        max_length=127,
        pattern=JOB_ID,
        description="Handle of a job. Opaque: pass it on as it was given.",
        examples=["job-c4y2mzq5kx3hvd7w1b9t6r8f0s.team-a"],
    ),
]


class Body(BaseModel):
    """A frozen value. What is sent may hold nothing unknown; what is received may."""

    model_config = ConfigDict(frozen=True, extra="ignore", use_attribute_docstrings=True)

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form, absent fields left out."""
        return self.model_dump(mode="json", exclude_none=True)


class Asked(Body):
    """A body that a caller sends: a misspelt field is refused, not ignored."""

    model_config = ConfigDict(extra="forbid")


class Callback(Asked):
    """Where the agent runtime is told."""

    url: Annotated[str, Field(min_length=1, max_length=2048, pattern=r"^https?://")]
    """Receiver of the signed events. The platform must allow the destination."""
    events: Annotated[tuple[EventType, ...], Field(max_length=5)] | None = None
    """Event types to send. Absent: every end of the job, and job_input_required."""


class StartRequest(Asked):
    """`POST /v1/jobs`: one of `tool` and `template`."""

    model_config = ConfigDict(
        json_schema_extra={
            "oneOf": [
                {
                    "required": ["tool"],
                    "properties": {"tool": {"type": "string"}, "template": {"type": "null"}},
                },
                {
                    "required": ["template"],
                    "properties": {
                        "template": {"type": "object"},
                        "tool": {"type": "null"},
                        "arguments": {"type": "null"},
                    },
                },
            ],
            "examples": [
                {
                    "tool": "crawl-site",
                    "arguments": {"url": "https://docs.example.com/", "max_pages": 600},
                    "deadline_seconds": 900,
                }
            ],
        }
    )

    tool: Label | None = None
    """Name of a tool of the catalogue."""
    arguments: dict[str, Any] | None = None
    """Arguments of the tool, as its schema says."""
    template: dict[str, Any] | None = None
    """A batch/v1 JobTemplateSpec instead of a tool, where the platform allows it."""
    depends_on: Annotated[tuple[JobId, ...], Field(max_length=MAX_DEPENDENCIES)] | None = None
    """Jobs of the same namespace that must end `done` first."""
    deadline_seconds: Seconds | None = None
    """Seconds from now until the job is ended, whatever it is doing."""
    pending_deadline_seconds: Seconds | None = None
    """Seconds that the tool may take to begin, once nothing holds it back."""
    callback: Callback | None = None
    """Where the agent runtime is told that the job is over."""
    namespace: Label | None = None
    """Where the job runs. Absent: the namespace of the caller's ServiceAccount."""

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if (self.tool is None) == (self.template is None):
            raise ValueError("exactly one of tool and template must be given")
        if self.template is not None and self.arguments is not None:
            raise ValueError("arguments belong to a tool; a template has none")
        return self


class Started(Body):
    """The answer to a start, the same for every repetition of it."""

    job_id: JobId
    status: State
    """queued, unless this repeats a start that was made before."""


class Stopped(Body):
    """The answer to a stop that was taken."""

    job_id: JobId
    status: State
    """stopping; the job is over when its status says so."""


class Waiting(Body):
    """What a queued job waits for."""

    code: WaitingCode
    message: str = ""


class Progress(Body):
    """How far the tool says it is. A tool's own words: not to be trusted."""

    percent: Annotated[int, Field(ge=0, le=100)] | None = None
    message: str | None = None
    at: datetime | None = None


class Cause(Body):
    """Why the job ended otherwise than `done`."""

    code: CauseCode
    message: Annotated[str, Field(max_length=CAUSE_MESSAGE_CHARACTERS)] = ""
    retryable: bool
    """Whether the same start, with a new key, may succeed without a change."""
    ran: bool
    """Whether the tool began."""
    exit_code: int | None = None
    signal: int | None = None
    forced: bool = False
    """Whether it had to be killed after its grace period."""
    evidence: Evidence = Evidence.OBSERVED


class JobStatus(Body):
    """One job, in at most 1 KiB; long texts are cut to fit."""

    job_id: JobId
    status: State
    tool: str | None = None
    created_at: datetime
    started_at: datetime | None = None
    finished_at: datetime | None = None
    deadline_at: datetime | None = None
    """When the job is ended at the latest."""
    attempts: int = 0
    waiting: Waiting | None = None
    progress: Progress | None = None
    summary: Annotated[str, Field(max_length=SUMMARY_CHARACTERS)] | None = None
    """One line of the result. A tool's own words: not to be trusted."""
    cause: Cause | None = None
    event_id: str | None = None
    """Once it is over: the id of the event that a callback about this end has."""


class JobPage(Body):
    """Jobs of a namespace, the newest first; with `since`, changes, the oldest first."""

    jobs: tuple[JobStatus, ...]
    next: str | None = None
    """Cursor of the next page; absent on the last one."""
    since: str
    """Cursor of changes: give it as `since` to get what changed after this answer."""


class Gap(Body):
    """A part of the output that is missing."""

    offset: int
    """Bytes of output before the gap."""
    reason: str


class OutputPage(Body):
    """A piece of what the tool printed."""

    data: str
    encoding: Literal["utf-8", "base64"] = "utf-8"
    next: str
    """Cursor of what follows; stays valid."""
    end: bool
    """Nothing follows, now or later."""
    gaps: tuple[Gap, ...] = ()


class ResultPage(Body):
    """A piece of what the tool handed in at its end."""

    job_id: JobId
    status: State
    data: str
    encoding: Literal["utf-8", "base64"] = "utf-8"
    truncated: bool = False
    """Whether the tool's result was larger than what was kept of it."""
    next: str | None = None
    """Cursor of what follows; absent at the end."""


class Question(Body):
    """Something that a job asks."""

    key: str
    kind: str
    prompt: str
    answer_schema: dict[str, Any] | None = None
    """JSON Schema of the answer."""
    consequences: dict[str, str] | None = None
    """Action, object, value and consequence of what is consented to."""
    expires_at: datetime


class QuestionList(Body):
    """Open questions of a job."""

    inputs: tuple[Question, ...]


class Answer(Asked):
    """An answer to a question, once."""

    outcome: Literal["answered", "declined"]
    answer: dict[str, Any] | None = None
    """As the question's schema asks; absent where it was declined."""


class ProgressReport(Asked):
    """How far a tool is."""

    percent: Percent | None = None
    message: Annotated[str, Field(max_length=64 * 1024)] | None = None
    """For people; cut to one line of 256 characters."""


class SummaryReport(Asked):
    """One line about the result."""

    summary: Annotated[str, Field(min_length=1, max_length=64 * 1024)]
    """Cut to one line of 280 characters."""


class AskReport(Asked):
    """A question of a tool to whoever started its job."""

    key: Annotated[str, Field(pattern=QUESTION_KEY)]
    """Names the question within the job: asked again with this key, it is the same one."""
    kind: Literal["elicitation", "sampling", "roots"] = "elicitation"
    """Whether it is for a person, a model, or the caller's program."""
    prompt: Annotated[str, Field(min_length=1, max_length=4096)]
    """What is asked."""
    answer_schema: dict[str, Any] | None = None
    """JSON Schema 2020-12 of the answer, an object. Absent: any object."""
    expires_seconds: Seconds = 600
    """How long an answer is waited for; not beyond the deadline of the job."""


class AskState(Body):
    """How a question stands, for the tool that has asked it."""

    key: str
    outcome: Literal["open", "answered", "declined", "expired", "withdrawn", "invalid"]
    """`answered`: see answer. `open`: not yet. Otherwise it will never be: declined by the person;
    expired; withdrawn because the job is over; or invalid, which is an answer that somebody wrote
    with kubectl and that is not as the schema asks."""
    answer: dict[str, Any] | None = None
    """As the schema asks; present where the outcome is `answered`."""
    expires_at: datetime


class OutputKept(Body):
    """The answer to a piece of output that is kept."""

    offset: int
    """Bytes of this pod's that are kept by now: the offset of the next piece."""


class Function(Body):
    """One function definition for a model."""

    name: str
    description: str
    parameters: dict[str, Any]
    """JSON Schema 2020-12 of the arguments."""


class ToolList(Body):
    """The catalogue as function definitions, and what to do with the jobs they start."""

    tools: tuple[Function, ...]


class SigningKeys(Body):
    """Public keys that events are signed with: any of them may have signed."""

    keys: tuple[str, ...]
    """As Standard Webhooks writes them: `whpk_` and base64."""


class Fault(Body):
    """One place where a request is wrong."""

    pointer: str
    """RFC 6901 pointer into the request's body."""
    detail: str


class Problem(Body):
    """RFC 9457 problem details; `type` is stable and what programs should look at."""

    model_config = ConfigDict(extra="allow")

    type: str
    title: str
    status: int
    detail: str = ""
    errors: tuple[Fault, ...] | None = None
    """Places that are wrong, where it is about a body."""
    differs: tuple[str, ...] | None = None
    """Members that differ from the first request with this key."""
    job_id: str | None = None
    job_status: State | None = None
    """Status of the job that it is about."""
    offset: int | None = None
    """Bytes of output that are kept: where the next piece begins."""
