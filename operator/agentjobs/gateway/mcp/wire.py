"""Jobs, questions and refusals as MCP says them: pure, and free of any library of MCP.

Shapes of the Tasks extension `io.modelcontextprotocol/tasks` and of multi-round-trip requests, as
the specification of 2026-07-28 has them.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from http import HTTPStatus
from typing import Any, Final, Self

from agentjobs.api.base import format_time
from agentjobs.api.inputrequest import InputKind, InputRequest
from agentjobs.api.names import CauseCode, State
from agentjobs.contract.calls import Answer, Cause, JobStatus, ResultPage
from agentjobs.domain.jobids import job_id
from agentjobs.gateway.known import JobRecord
from agentjobs.gateway.problems import ProblemError

Json = dict[str, Any]

TASKS: Final = "io.modelcontextprotocol/tasks"
INVALID_PARAMS: Final = -32602
INTERNAL_ERROR: Final = -32603
HEADER_MISMATCH: Final = -32020
MISSING_CAPABILITY: Final = -32021
UNSUPPORTED_VERSION: Final = -32022
ELICIT: Final = "elicitation/create"
SAMPLE: Final = "sampling/createMessage"
ROOTS: Final = "roots/list"
POLL_MS: Final = 2000
"""How often a client should ask for a task that it does not listen to."""
FAULTS: Final = frozenset({CauseCode.INVALID_SPEC, CauseCode.ADMISSION_DENIED, CauseCode.INTERNAL})
"""Causes that are ours or the platform's: the call could not be made."""
SAMPLED_TOKENS: Final = 1024
FREE_ANSWER: Final = "answer"
"""Field of the form where a tool's question says nothing of its answer."""
FLAT: Final = frozenset({"string", "number", "integer", "boolean"})
WORKING: Final = frozenset({State.QUEUED, State.RUNNING, State.INPUT_REQUIRED, State.STOPPING})


@dataclass(frozen=True, slots=True)
class Abilities:
    """What a client has declared with this request."""

    tasks: bool = False
    asked: frozenset[str] = frozenset()
    """Methods of what it can be asked."""

    @classmethod
    def of(cls, capabilities: Any) -> Self:
        """Read ClientCapabilities, whatever a client has put there."""
        given = capabilities if isinstance(capabilities, Mapping) else {}
        extensions = given.get("extensions")
        asked = set()
        elicitation = given.get("elicitation")
        if isinstance(elicitation, Mapping) and ("form" in elicitation or not elicitation):
            asked.add(ELICIT)
        if isinstance(given.get("sampling"), Mapping):
            asked.add(SAMPLE)
        if isinstance(given.get("roots"), Mapping):
            asked.add(ROOTS)
        return cls(isinstance(extensions, Mapping) and TASKS in extensions, frozenset(asked))


class WireError(Exception):
    """An error of the protocol."""

    def __init__(self, code: int, message: str, data: Any = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.data = data


def task_of(record: JobRecord, questions: Sequence[InputRequest], client: Abilities) -> Json:
    """A job as a Task, without its result.

    :param questions: open ones, which the caller may answer.
    """
    status = status_of(record)
    live = record.state in WORKING and record.state is not State.STOPPING
    requests = input_requests(questions, client) if live else {}
    told: Json = {
        "taskId": status.job_id,
        "status": "input_required" if requests else _word(record.state, status.cause),
        "createdAt": format_time(status.created_at),
        "lastUpdatedAt": format_time(_last_change(status, questions)),
        "ttlMs": _ttl(record, status),
        "pollIntervalMs": POLL_MS,
    }
    unasked = len(questions) - len(requests) if live else 0
    message = _message(status, unasked)
    if message:
        told["statusMessage"] = message
    if requests:
        told["inputRequests"] = requests
    return told


def created_task(task: Mapping[str, Any]) -> Json:
    """The answer to the call that has made a task: nothing but the Task."""
    return {**{k: v for k, v in task.items() if k != "inputRequests"}, "resultType": "task"}


def status_of(record: JobRecord) -> JobStatus:
    """The status that agents are shown."""
    return JobStatus.model_validate_json(record.body)


def _word(state: State, cause: Cause | None) -> str:
    if state in WORKING:
        return "working"
    # A tool that ran and failed is a completed call whose result is an error.
    if cause and cause.code in FAULTS:
        return "failed"
    return "cancelled" if state is State.CANCELLED else "completed"


def _last_change(status: JobStatus, questions: Iterable[InputRequest]) -> datetime:
    progress = status.progress.at if status.progress else None
    moments = (status.created_at, status.started_at, status.finished_at, progress)
    asked = (each.metadata.creation_timestamp for each in questions)
    return max(each for each in (*moments, *asked) if each)


def _ttl(record: JobRecord, status: JobStatus) -> int | None:
    """Milliseconds from the creation until it may be forgotten; while it lasts, nobody knows."""
    if status.finished_at is None:
        return None
    lived = (status.finished_at - status.created_at).total_seconds()
    return int((lived + record.ttl_seconds) * 1000)


def _message(status: JobStatus, unasked: int) -> str:
    if unasked:
        return f"it asks {unasked} question(s) that this client cannot be asked: answer over HTTP"
    if status.cause:
        return f"{status.cause.code}: {status.cause.message}".rstrip(": ")
    if status.waiting:
        return f"waits ({status.waiting.code}): {status.waiting.message}".rstrip(": ")
    progress = status.progress
    if progress and status.finished_at is None:
        percent = f"{progress.percent} %" if progress.percent is not None else ""
        return " ".join(filter(None, (percent, progress.message)))
    return status.summary or str(status.status)


# --- results


def fault_of(record: JobRecord) -> WireError | None:
    """The error of a call that never got as far as its tool; None for all others."""
    status = status_of(record)
    if not status.cause or status.cause.code not in FAULTS:
        return None
    return WireError(INTERNAL_ERROR, _message(status, 0), _json(record))


def result_of(record: JobRecord, page: ResultPage | None) -> Json:
    """The result of the call whose job is over.

    :param page: the first page of the tool's result, where it is done.
    """
    if page is not None:
        return page_result(page)
    status = status_of(record)
    return _error_result(f"{status.status}: {_message(status, 0)}", _json(record))


def page_result(page: ResultPage) -> Json:
    """A page of a result; a result that is one JSON object is structured content too."""
    meta = {"agentjobs.dev/job_id": page.job_id}
    if page.encoding == "base64":
        uri = f"agentjobs://jobs/{page.job_id}/result"
        octets = {"uri": uri, "mimeType": "application/octet-stream", "blob": page.data}
        content: list[Json] = [{"type": "resource", "resource": octets}]
    else:
        content = [_text(page.data)]
    if page.next:
        more = {"job_id": page.job_id, "cursor": page.next}
        content.append(_text(f"There is more: get_job_result with {json.dumps(more)}"))
        meta["agentjobs.dev/next"] = page.next
    elif page.truncated:
        content.append(_text("The tool's result was larger than what was kept of it."))
    result: Json = {"content": content, "isError": False, "_meta": meta}
    structured = None if page.next or page.encoding == "base64" else _object(page.data)
    if structured is not None:
        result["structuredContent"] = structured
    return result


def handle_result(record: JobRecord, more: str) -> Json:
    """What a call is told whose job goes on."""
    this = job_id(*record.name)
    text = f"Job {this} is {record.state}. {more}"
    told = {"job_id": this, "status": str(record.state)}
    return {"content": [_text(text)], "isError": False, "structuredContent": told}


def status_result(record: JobRecord) -> Json:
    """The status of a job as the result of a tool."""
    return {
        "content": [_text(record.body.decode())],
        "isError": False,
        "structuredContent": _json(record),
    }


def declined_result(tool: str) -> Json:
    """A person did not want to say what the tool needs."""
    text = f"{tool} was not started: the person has not given what it needs."
    return _error_result(text, {"outcome": "declined"})


def problem_result(problem: ProblemError) -> Json:
    """A refusal that a model can do something about."""
    told = problem.problem.to_json()
    return _error_result(json.dumps(told, ensure_ascii=False), told)


def _error_result(text: str, structured: Json) -> Json:
    return {"content": [_text(text)], "isError": True, "structuredContent": structured}


def _json(record: JobRecord) -> Json:
    value: Json = json.loads(record.body)
    return value


def _text(text: str) -> Json:
    return {"type": "text", "text": text}


def _object(text: str) -> Json | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


# --- errors


def error_of(problem: ProblemError) -> WireError:
    """A refusal as an error of JSON-RPC: the caller's fault, or something that passes."""
    data = problem.problem.to_json()
    if "Retry-After" in problem.headers:
        data["retryAfterSeconds"] = int(problem.headers["Retry-After"])
    theirs = problem.kind.status < HTTPStatus.INTERNAL_SERVER_ERROR
    passes = problem.kind.status is HTTPStatus.TOO_MANY_REQUESTS
    return WireError(
        INVALID_PARAMS if theirs and not passes else INTERNAL_ERROR, str(problem), data
    )


def needs_tasks() -> WireError:
    """The client has not declared the extension."""
    needed: Json = {"requiredCapabilities": {"extensions": {TASKS: {}}}}
    return WireError(MISSING_CAPABILITY, "Declare the Tasks extension", needed)


# --- questions


def input_requests(questions: Iterable[InputRequest], client: Abilities) -> Json:
    """Questions as requests, by their keys: those that this client can be asked."""
    found = ((each.spec.key, _request(each)) for each in questions)
    return {key: request for key, request in found if request and request["method"] in client.asked}


def _request(asked: InputRequest) -> Json | None:
    spec = asked.spec
    if spec.kind is InputKind.ROOTS:
        return {"method": ROOTS, "params": {}}
    if spec.kind is InputKind.SAMPLING:
        message = {"role": "user", "content": _text(spec.prompt)}
        return {"method": SAMPLE, "params": {"messages": [message], "maxTokens": SAMPLED_TOKENS}}
    if spec.kind is not InputKind.ELICITATION:
        return None
    schema = form_of(spec.schema_)
    return elicitation(spec.prompt, schema) if schema else None


def elicitation(message: str, schema: Mapping[str, Any]) -> Json:
    """A form to be filled in."""
    return {
        "method": ELICIT,
        "params": {"mode": "form", "message": message, "requestedSchema": schema},
    }


def form_of(schema: Mapping[str, Any] | None) -> Json | None:
    """The schema of a form, which is flat; None where the answer is not."""
    properties = (schema or {}).get("properties") or {}
    if not properties:
        free = {"type": "string"}
        return {"type": "object", "properties": {FREE_ANSWER: free}, "required": [FREE_ANSWER]}
    if not all(is_flat(each) for each in properties.values()):
        return None
    required = [name for name in (schema or {}).get("required") or () if name in properties]
    return {"type": "object", "properties": properties, "required": required}


def is_flat(schema: Any) -> bool:
    """Whether a form can have a field for it."""
    return isinstance(schema, Mapping) and schema.get("type") in FLAT


def answer_of(kind: InputKind, response: Any) -> Answer | None:
    """A client's response as an answer; None where it is none yet: dismissed, or an empty yes."""
    if not isinstance(response, Mapping):
        return None
    if kind is not InputKind.ELICITATION:
        given = {name: value for name, value in response.items() if name not in RESULT_ONLY}
        return Answer(outcome="answered", answer=given) if given else None
    content = response.get("content")
    if response.get("action") == "decline":
        return Answer(outcome="declined")
    if response.get("action") != "accept" or not isinstance(content, dict):
        return None
    return Answer(outcome="answered", answer=content)


RESULT_ONLY: Final = frozenset({"_meta", "resultType"})
