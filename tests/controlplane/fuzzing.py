"""What schemathesis is told of us: loaded by the process that fuzzes, by `hooks` of its settings.

Checks of ours stand beside its own: they hold for every answer to every request that it makes.
"""

import json
import os
from typing import Any

import schemathesis

from agentjobs.api.names import TERMINAL_STATES, State
from agentjobs.contract.calls import MAX_STATUS_BYTES, Problem
from agentjobs.contract.problems import BASE, MEDIA_TYPE, ProblemType

OTHERS = os.environ["AGENTJOBS_FUZZ_OTHERS"]
"""A word that is in everything of the other namespace."""
LONGEST_WAIT = 1
TOOLS = ("open", "open", "open", "typed")
UNSAID = {
    ProblemType.INVALID_ARGUMENTS.uri,
    ProblemType.INVALID_CURSOR.uri,
    ProblemType.KEY_REUSED.uri,
    ProblemType.UNRUNNABLE.uri,
}
"""What a schema cannot say: it needs the tool, the seal, the first request, the platform."""
OVER = {*TERMINAL_STATES, State.STOPPING}

waited: set[str] = set()
"""Where it was waited once, which is enough for what takes a second each time."""
stopped: set[str] = set()
"""Jobs whose stop was taken."""


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: dict[str, Any]) -> None:  # noqa: ARG001 - given
    """Wait no minute for what never changes, and start what there is.

    What is no number, or too large, stays so; so does what breaks the document.
    """
    query = case.query or {}
    wait = str(query.get("wait", ""))
    if wait.isascii() and wait.isdigit() and LONGEST_WAIT < int(wait) <= 60:
        query["wait"] = 0 if case.path in waited else LONGEST_WAIT
        waited.add(case.path)
    # A dictionary of schemathesis would give a tool to templates too.
    tool = case.body.get("tool") if isinstance(case.body, dict) else None
    if isinstance(tool, str) and is_positive(case):
        case.body["tool"] = TOOLS[len(tool) % len(TOOLS)]


def is_positive(case: Any) -> bool:
    """Whether it is as the document says."""
    return bool(case.meta and case.meta.generation.mode.is_positive)


@schemathesis.check
def an_error_is_a_problem(ctx: Any, response: Any, case: Any) -> None:  # noqa: ARG001 - given
    if response.status_code < 400 or case.path == "/readyz":
        return
    assert response.headers["content-type"] == [MEDIA_TYPE], "an error without a problem"
    problem = Problem.model_validate_json(response.content)
    assert problem.status == response.status_code, "a problem with another status"
    assert problem.type.startswith(BASE), "a problem of no type of ours"
    assert "traceback" not in response.text.lower(), "a problem that tells of our insides"


@schemathesis.check
def what_the_document_allows_is_refused_only_for_what_it_cannot_say(
    ctx: Any,  # noqa: ARG001 - given
    response: Any,
    case: Any,
) -> None:
    """Where `positive_data_acceptance` is told to take a 400 or 422 for an answer."""
    if response.status_code not in {400, 422} or not is_positive(case):
        return
    problem = Problem.model_validate_json(response.content)
    if problem.type == ProblemType.INVALID_BODY.uri:
        places = {fault.pointer[1:].partition("/")[0] for fault in problem.errors or ()}
        assert places, response.text
        assert places <= {"depends_on", "answer"}, response.text
    elif problem.type == ProblemType.INVALID_REQUEST.uri:
        assert "different namespaces" in problem.detail, problem.detail
    else:
        assert problem.type in UNSAID, problem.type


@schemathesis.check
def r_auth_nothing_of_another_namespace_is_told(
    ctx: Any,  # noqa: ARG001 - given
    response: Any,
    case: Any,  # noqa: ARG001 - given
) -> None:
    told = response.text + json.dumps(dict(response.headers))
    assert OTHERS not in told, "something of another namespace"


@schemathesis.check
def r_honest_a_stop_that_was_taken_is_seen(ctx: Any, response: Any, case: Any) -> None:  # noqa: ARG001 - given
    """Instead of `use_after_free`: DELETE asks for the end of a job, whose record stays."""
    if case.path != "/v1/jobs/{job_id}" or response.status_code not in {200, 202}:
        return
    told = response.json()
    if response.status_code == 202:
        stopped.add(told["job_id"])
    assert len(response.content) <= MAX_STATUS_BYTES, "a status that is too large"
    assert told["job_id"] not in stopped or told["status"] in OVER, "a stop that is forgotten"
