"""Types of problems (RFC 9457), declared once: the word that programs compare, status, title."""

from enum import Enum
from http import HTTPStatus
from typing import Final

BASE: Final = "https://agentjobs.dev/problems/"
"""Identifiers, not addresses: nothing need be served there."""
MEDIA_TYPE: Final = "application/problem+json"


class ProblemType(Enum):
    """Every refusal of the gateway."""

    INVALID_REQUEST = "invalid-request", HTTPStatus.BAD_REQUEST, "The request cannot be read"
    KEY_REQUIRED = "key-required", HTTPStatus.BAD_REQUEST, "An Idempotency-Key is required"
    INVALID_CURSOR = "invalid-cursor", HTTPStatus.BAD_REQUEST, "The cursor is not one of ours"
    UNAUTHENTICATED = "unauthenticated", HTTPStatus.UNAUTHORIZED, "A valid token is required"
    FORBIDDEN = "forbidden", HTTPStatus.FORBIDDEN, "Not allowed"
    NAMESPACE_DENIED = "namespace-denied", HTTPStatus.FORBIDDEN, "Nothing is run in this namespace"
    TEMPLATES_DENIED = "templates-denied", HTTPStatus.FORBIDDEN, "Templates are not allowed"
    NOT_FOUND = "not-found", HTTPStatus.NOT_FOUND, "There is nothing here"
    JOB_NOT_FOUND = "job-not-found", HTTPStatus.NOT_FOUND, "There is no such job"
    TOOL_NOT_FOUND = "tool-not-found", HTTPStatus.NOT_FOUND, "There is no such tool"
    METHOD_NOT_ALLOWED = "method-not-allowed", HTTPStatus.METHOD_NOT_ALLOWED, "No such method here"
    TIMEOUT = "request-timeout", HTTPStatus.REQUEST_TIMEOUT, "The request did not arrive in time"
    NOT_DONE = "not-done", HTTPStatus.CONFLICT, "The job has no result"
    ALREADY_STOPPED = "already-stopped", HTTPStatus.CONFLICT, "The job is stopping or over"
    ALREADY_ANSWERED = "already-answered", HTTPStatus.CONFLICT, "The question is closed"
    JOB_OVER = "job-over", HTTPStatus.CONFLICT, "The job is over"
    RESULT_EXISTS = "result-exists", HTTPStatus.CONFLICT, "Another result was handed in before"
    RESULT_ELSEWHERE = (
        "result-elsewhere",
        HTTPStatus.CONFLICT,
        "The tool's result is not taken from reports",
    )
    QUESTION_DIFFERS = (
        "question-differs",
        HTTPStatus.UNPROCESSABLE_ENTITY,
        "Another question was asked with this key",
    )
    TOO_MANY_QUESTIONS = "too-many-questions", HTTPStatus.CONFLICT, "The job asks too much"
    NOBODY_TO_ASK = "nobody-to-ask", HTTPStatus.CONFLICT, "Nobody could answer"
    OUTPUT_ELSEWHERE = (
        "output-elsewhere",
        HTTPStatus.CONFLICT,
        "This is not where the output goes on",
    )
    OUTPUT_FULL = "output-full", HTTPStatus.CONFLICT, "There is no more room for output of this job"
    OUTPUT_NOT_KEPT = "output-not-kept", HTTPStatus.CONFLICT, "No output is kept here"
    NOT_ITS_POD = "not-its-pod", HTTPStatus.FORBIDDEN, "Only a job's own pods report for it"
    POD_NOT_KNOWN = "pod-not-known", HTTPStatus.SERVICE_UNAVAILABLE, "The pod is not known yet"
    BODY_TOO_LARGE = (
        "body-too-large",
        HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
        "The body is too large",
    )
    UNSUPPORTED_MEDIA_TYPE = (
        "unsupported-media-type",
        HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
        "The body must be JSON",
    )
    INVALID_BODY = "invalid-body", HTTPStatus.UNPROCESSABLE_ENTITY, "The body is not valid"
    INVALID_ARGUMENTS = (
        "invalid-arguments",
        HTTPStatus.UNPROCESSABLE_ENTITY,
        "The arguments do not fit the tool",
    )
    NAMESPACE_REQUIRED = (
        "namespace-required",
        HTTPStatus.UNPROCESSABLE_ENTITY,
        "A namespace is required",
    )
    UNRUNNABLE = "unrunnable", HTTPStatus.UNPROCESSABLE_ENTITY, "The job could never run"
    KEY_REUSED = (
        "key-reused",
        HTTPStatus.UNPROCESSABLE_ENTITY,
        "The Idempotency-Key was used for another request",
    )
    QUOTA_EXCEEDED = (
        "quota-exceeded",
        HTTPStatus.TOO_MANY_REQUESTS,
        "The namespace has as many jobs as it may have",
    )
    BUSY = "busy", HTTPStatus.SERVICE_UNAVAILABLE, "Too much is going on"
    UNAVAILABLE = "unavailable", HTTPStatus.SERVICE_UNAVAILABLE, "The cluster does not answer"
    INTERNAL = "internal", HTTPStatus.INTERNAL_SERVER_ERROR, "Something broke"

    def __init__(self, word: str, status: HTTPStatus, title: str) -> None:
        self.uri = BASE + word
        self.status = status
        self.title = title
