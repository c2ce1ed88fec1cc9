"""The event that an agent runtime receives: a CloudEvent 1.0.2 in structured JSON (R-EVENT)."""

from datetime import datetime
from typing import Annotated, Literal

from pydantic import Field

from agentjobs.api.names import SUMMARY_CHARACTERS, CauseCode, EventType, State
from agentjobs.contract.calls import Body, JobId


class JobEventData(Body):
    """What happened, in one line; never the result."""

    job_id: JobId
    tool: str | None
    status: State
    summary: Annotated[str, Field(max_length=SUMMARY_CHARACTERS)]
    """A tool's own words on one line: not to be trusted."""
    cause: CauseCode | None
    result_url: str | None = None
    """Where the result is read."""
    question: str | None = None
    """Key of the question, of job_input_required."""
    inputs_url: str | None = None
    """Where questions are read and answered."""
    percent: Annotated[int, Field(ge=0, le=100)] | None = None
    """How far the tool says it is, of job_progress."""


class JobEvent(Body):
    """One event. It is delivered at least once, with the same id and body every time."""

    specversion: Literal["1.0"]
    id: str
    """The same on every try: receivers drop what they have seen."""
    source: str
    """The AgentJob, as a path of the Kubernetes API."""
    type: EventType
    subject: JobId
    time: datetime
    datacontenttype: Literal["application/json"]
    data: JobEventData
