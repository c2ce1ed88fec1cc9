"""The OpenAPI 3.1 document, written from the table of operations and the models."""

from collections.abc import Iterable, Sequence
from http import HTTPStatus
from typing import Any

from pydantic.json_schema import models_json_schema

from agentjobs import __version__
from agentjobs.contract.calls import MAX_STATUS_BYTES, Problem
from agentjobs.contract.operations import (
    ANYWHERE,
    AUTHENTICATED,
    OCTETS,
    OPERATIONS,
    Operation,
    Parameter,
)
from agentjobs.contract.problems import MEDIA_TYPE, ProblemType

REF = "#/components/schemas/{model}"
HEADERS: dict[str, dict[str, Any]] = {
    "Location": {
        "description": "Where the job is.",
        "required": True,
        "schema": {"type": "string", "format": "uri-reference"},
    },
    "Retry-After": {
        "description": "Seconds after which it makes sense to ask again.",
        "required": True,
        "schema": {"type": "integer", "minimum": 1},
    },
    "ETag": {
        "description": "Names the status of the job as of this answer; give it in If-None-Match.",
        "required": True,
        "schema": {"type": "string"},
    },
    "Idempotency-Replayed": {
        "description": "true where the job was there before this request.",
        "schema": {"type": "string", "enum": ["true"]},
    },
    "WWW-Authenticate": {
        "description": "How to authenticate.",
        "required": True,
        "schema": {"type": "string"},
    },
}
PROBLEM_HEADERS = {
    HTTPStatus.UNAUTHORIZED: ("WWW-Authenticate",),
    HTTPStatus.TOO_MANY_REQUESTS: ("Retry-After",),
    HTTPStatus.SERVICE_UNAVAILABLE: ("Retry-After",),
}
JOB_ID = {"job_id": "$response.body#/job_id"}
SAME_JOB = {"job_id": "$request.path.job_id"}
LINKS: dict[str, dict[str, tuple[str, dict[str, str]]]] = {
    "startJob": {
        "status": ("getJob", JOB_ID),
        "stop": ("stopJob", JOB_ID),
        "output": ("getJobOutput", JOB_ID),
        "result": ("getJobResult", JOB_ID),
        "inputs": ("listInputs", JOB_ID),
    },
    "stopJob": {"status": ("getJob", JOB_ID)},
    "getJob": {
        "change": ("getJob", {**JOB_ID, "If-None-Match": "$response.header.ETag"}),
        "stop": ("stopJob", JOB_ID),
        "result": ("getJobResult", JOB_ID),
    },
    "listJobs": {
        "next": ("listJobs", {"cursor": "$response.body#/next"}),
        "changes": ("listJobs", {"since": "$response.body#/since"}),
        "newest": ("getJob", {"job_id": "$response.body#/jobs/0/job_id"}),
    },
    "getJobOutput": {"next": ("getJobOutput", {**SAME_JOB, "cursor": "$response.body#/next"})},
    "getJobResult": {"next": ("getJobResult", {**SAME_JOB, "cursor": "$response.body#/next"})},
    "listInputs": {"answer": ("answerInput", {**SAME_JOB, "key": "$response.body#/inputs/0/key"})},
}
"""By operation: which calls its answer leads to, and what they take from it."""
DESCRIPTION = f"""\
Long tool runs as jobs with a handle. `POST /v1/jobs` answers at once with a job_id; a status is at
most {MAX_STATUS_BYTES} bytes; a stop is honest: the status says how the job really ended; results
come in pages; an event tells the agent runtime once that a job is over.

A job is known to every replica from the answer to its start. What a replica says of it may be as
old as its watch is late, a moment as a rule; who gives the `ETag` of an earlier answer in
`If-None-Match` is never told anything older. Lists and `since` are as old as the watch.

Refusals are problem documents (RFC 9457) whose `type` is stable.
"""


def openapi_document() -> dict[str, Any]:
    """The document as a JSON value."""
    models: set[Any] = {Problem}
    models |= {each.answer for each in OPERATIONS if each.answer}
    models |= {each.body for each in OPERATIONS if each.body}
    ordered = sorted(models, key=lambda model: str(model.__name__))
    _, schemas = models_json_schema([(model, "validation") for model in ordered], ref_template=REF)
    paths: dict[str, dict[str, Any]] = {}
    for each in OPERATIONS:
        paths.setdefault(each.path, {})[each.method.lower()] = _operation(each)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "agentjobs",
            "version": __version__,
            "description": DESCRIPTION,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "jsonSchemaDialect": "https://json-schema.org/draft/2020-12/schema",
        "security": [{"bearer": []}],
        "paths": paths,
        "components": {
            "schemas": schemas["$defs"],
            "securitySchemes": {
                "bearer": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "Token of a Kubernetes ServiceAccount for the audience "
                    "agentjobs.",
                },
                "pod": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "Token of a job's own pod (AGENTJOBS_TOKEN_FILE).",
                },
            },
        },
    }


def _operation(each: Operation) -> dict[str, Any]:
    described: dict[str, Any] = {
        "operationId": each.id,
        "summary": each.summary,
        "parameters": [_parameter(parameter) for parameter in each.parameters],
        "responses": _responses(each),
    }
    if each.body:
        schema = {"$ref": REF.format(model=each.body.__name__)}
        described["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": schema}},
        }
    if each.raw_limit is not None:
        described["requestBody"] = {"required": True, "content": {OCTETS: {}}}
    if each.pod:
        described["security"] = [{"pod": []}]
    if each.public:
        described["security"] = []
    return described


def _parameter(each: Parameter) -> dict[str, Any]:
    schema = each.adapter.json_schema()
    # Described where it is used; a parameter's own words win.
    schema.pop("description", None)
    return {
        "name": each.name,
        "in": each.where.value,
        "required": each.required,
        "description": each.description,
        "schema": schema,
    }


def _responses(each: Operation) -> dict[str, Any]:
    success: dict[str, Any] = {"description": each.summary, **_headers(each.headers)}
    if each.answer:
        schema: dict[str, Any] = {"$ref": REF.format(model=each.answer.__name__)}
        success["content"] = {each.media_type: {"schema": schema}}
        if each.octets:
            success["content"][OCTETS] = {}
    elif each.status is not HTTPStatus.NO_CONTENT:
        kind = "object" if each.media_type == "application/json" else "string"
        success["content"] = {each.media_type: {"schema": {"type": kind}}}
    if each.id in LINKS:
        success["links"] = {
            name: {"operationId": target, "parameters": parameters}
            for name, (target, parameters) in LINKS[each.id].items()
        }
    responses = {str(each.status.value): success}
    for status in each.also:
        responses[str(status.value)] = _also(each, status)
    problems = (*each.problems, *ANYWHERE, *(() if each.public else AUTHENTICATED))
    for status in sorted({problem.status for problem in problems}):
        if str(status.value) not in responses:
            kinds = list(dict.fromkeys(p for p in problems if p.status is status))
            responses[str(status.value)] = _problem(status, kinds)
    return responses


def _also(each: Operation, status: HTTPStatus) -> dict[str, Any]:
    """A further answer: the same headers, and no body or a text."""
    described = {"description": status.phrase, **_headers(each.headers)}
    if status is not HTTPStatus.NOT_MODIFIED:
        described["content"] = {each.media_type: {"schema": {"type": "string"}}}
    return described


def _problem(status: HTTPStatus, kinds: Sequence[ProblemType]) -> dict[str, Any]:
    narrowed = {
        "properties": {
            "type": {"enum": [kind.uri for kind in kinds]},
            "status": {"const": status.value},
        }
    }
    schema = {"allOf": [{"$ref": REF.format(model="Problem")}, narrowed]}
    return {
        "description": "; ".join(f"{kind.title} (`{kind.uri}`)" for kind in kinds),
        **_headers(PROBLEM_HEADERS.get(status, ())),
        "content": {MEDIA_TYPE: {"schema": schema}},
    }


def _headers(names: Iterable[str]) -> dict[str, Any]:
    described = {name: HEADERS[name] for name in names}
    return {"headers": described} if described else {}
