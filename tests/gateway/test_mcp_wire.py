"""Jobs as tasks, refusals as errors, questions as requests: what MCP clients are told."""

from typing import Any

import pytest

from agentjobs.api.inputrequest import InputKind, InputRequest
from agentjobs.contract.calls import Answer, ResultPage
from agentjobs.contract.problems import ProblemType
from agentjobs.gateway.known import JobRecord, record_of
from agentjobs.gateway.mcp import wire
from agentjobs.gateway.mcp.listener import VERSION, VERSION_META, refusal_of_version
from agentjobs.gateway.mcp.tools import definitions
from agentjobs.gateway.mcp.wire import Abilities
from agentjobs.gateway.problems import ProblemError, try_later
from tests.builders import UID, a_tool, an_agentjob, stamp

ALL = Abilities(tasks=True, asked=frozenset({wire.ELICIT, wire.SAMPLE, wire.ROOTS}))
OK = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}


def a_record(**status: Any) -> JobRecord:
    job = an_agentjob(status=status, ttlSecondsAfterFinished=3600)
    body = job.to_json()
    body["metadata"]["creationTimestamp"] = stamp(0)
    return record_of(body)


def a_question(key: str = "drop", kind: str = "elicitation", schema: Any = OK) -> InputRequest:
    spec = {
        "jobName": "nightly-index", "jobUID": UID, "key": key, "kind": kind, "prompt": "Drop it?",
        "schema": schema, "expiresAt": stamp(900),
    }  # fmt: skip
    meta = {
        "name": key, "namespace": "search", "uid": key, "resourceVersion": "1",
        "creationTimestamp": stamp(30),
    }  # fmt: skip
    spec = {name: value for name, value in spec.items() if value is not None}
    return InputRequest.from_json({"metadata": meta, "spec": spec})


FAILED: dict[str, Any] = {
    "code": "tool_error",
    "message": "exit code 3",
    "retryable": False,
    "ran": True,
}


@pytest.mark.parametrize(
    ("status", "word"),
    [
        pytest.param({}, "working", id="accepted"),
        pytest.param({"state": "queued"}, "working", id="queued"),
        pytest.param({"state": "running", "startedAt": stamp(5)}, "working", id="running"),
        pytest.param({"state": "input_required"}, "working", id="nothing is open any more"),
        pytest.param({"state": "stopping"}, "working", id="stopping"),
        pytest.param({"state": "done", "finishedAt": stamp(60)}, "completed", id="done"),
        pytest.param(
            {"state": "failed", "finishedAt": stamp(60), "cause": FAILED}, "completed", id="failed"
        ),
        pytest.param(
            {"state": "failed", "finishedAt": stamp(60), "cause": {**FAILED, "code": "internal"}},
            "failed",
            id="our fault",
        ),
        pytest.param({"state": "timed_out", "finishedAt": stamp(60)}, "completed", id="late"),
        pytest.param({"state": "cancelled", "finishedAt": stamp(60)}, "cancelled", id="stopped"),
    ],
)
def test_r_cause_a_job_as_a_task(status: dict[str, Any], word: str) -> None:
    """A tool that ran and failed is no failure of the protocol."""
    assert wire.task_of(a_record(**status), (), ALL)["status"] == word


def test_a_task_may_be_forgotten_some_time_after_its_end_and_nobody_knows_when_that_is() -> None:
    assert wire.task_of(a_record(state="running"), (), ALL)["ttlMs"] is None
    ended = wire.task_of(a_record(state="done", finishedAt=stamp(60)), (), ALL)
    assert ended["ttlMs"] == 3_660_000
    assert (ended["createdAt"], ended["lastUpdatedAt"]) == (stamp(0), stamp(60))


def test_r_mrtr_open_questions_are_asked_of_clients_that_can_be_asked() -> None:
    asked = [a_question(), a_question("why", "sampling", None), a_question("where", "roots", None)]
    record = a_record(state="running", startedAt=stamp(5))
    task = wire.task_of(record, asked, ALL)
    assert task["status"] == "input_required"
    methods = {key: each["method"] for key, each in task["inputRequests"].items()}
    assert methods == {"drop": wire.ELICIT, "why": wire.SAMPLE, "where": wire.ROOTS}
    assert task["lastUpdatedAt"] == stamp(30)
    assert "inputRequests" not in wire.created_task(task)
    deaf = wire.task_of(record, asked, Abilities(tasks=True))
    assert deaf["status"] == "working"
    assert "3 question(s)" in deaf["statusMessage"]
    stopping = wire.task_of(a_record(state="stopping"), asked, ALL)
    assert stopping["status"] == "working"


def test_r_mrtr_confirmations_and_approvals_are_not_asked_over_mcp_of_a_running_tool() -> None:
    asked = [a_question("a", "approval", None), a_question("b", "confirmation", None)]
    assert wire.input_requests(asked, ALL) == {}


@pytest.mark.parametrize(
    ("schema", "form"),
    [
        pytest.param(OK, OK, id="flat"),
        pytest.param({**OK, "additionalProperties": False}, OK, id="what forms do not know"),
        pytest.param(
            None,
            {
                "type": "object",
                "properties": {"answer": {"type": "string"}},
                "required": ["answer"],
            },
            id="nothing is said",
        ),
        pytest.param({"properties": {"a": {"type": "object"}}}, None, id="nested"),
        pytest.param({"properties": {"a": True}}, None, id="anything"),
    ],
)
def test_r_mrtr_the_form_of_a_question(schema: Any, form: Any) -> None:
    assert wire.form_of(schema) == form


@pytest.mark.parametrize(
    ("kind", "response", "answer"),
    [
        pytest.param(
            "elicitation",
            {"action": "accept", "content": {"ok": True}},
            Answer(outcome="answered", answer={"ok": True}),
            id="accept",
        ),
        pytest.param("elicitation", {"action": "accept"}, None, id="accept, but what"),
        pytest.param("elicitation", {"action": "accept", "content": None}, None, id="null"),
        pytest.param(
            "elicitation",
            {"action": "decline", "content": {"ok": True}},
            Answer(outcome="declined"),
            id="decline",
        ),
        pytest.param("elicitation", {"action": "cancel"}, None, id="dismissed"),
        pytest.param("elicitation", "yes", None, id="no object"),
        pytest.param(
            "roots", {"roots": [], "_meta": {}}, Answer(outcome="answered", answer={"roots": []}),
            id="roots",
        ),
        pytest.param("sampling", {}, None, id="empty"),
    ],
)  # fmt: skip
def test_r_mrtr_an_accept_without_content_is_not_yet_a_yes(
    kind: str, response: Any, answer: Answer | None
) -> None:
    assert wire.answer_of(InputKind(kind), response) == answer


@pytest.mark.parametrize(
    ("problem", "code"),
    [
        pytest.param(ProblemError(ProblemType.TOOL_NOT_FOUND), -32602, id="unknown tool"),
        pytest.param(ProblemError(ProblemType.FORBIDDEN), -32602, id="forbidden"),
        pytest.param(try_later(ProblemType.UNAVAILABLE, "no contact", 5), -32603, id="later"),
        pytest.param(try_later(ProblemType.QUOTA_EXCEEDED, "full", 30), -32603, id="quota"),
    ],
)
def test_a_refusal_as_an_error_of_json_rpc(problem: ProblemError, code: int) -> None:
    error = wire.error_of(problem)
    assert (error.code, error.data["type"]) == (code, problem.kind.uri)
    later = problem.headers.get("Retry-After")
    assert error.data.get("retryAfterSeconds") == (int(later) if later else None)


def test_r_cause_the_result_of_a_tool_that_failed_is_an_error_with_its_cause() -> None:
    result = wire.result_of(a_record(state="failed", finishedAt=stamp(9), cause=FAILED), None)
    assert result["isError"] is True
    assert result["content"][0]["text"] == "failed: tool_error: exit code 3"
    assert result["structuredContent"]["cause"]["code"] == "tool_error"


def test_r_cause_a_call_that_never_got_to_its_tool_is_an_error_of_the_protocol() -> None:
    cause = {**FAILED, "code": "admission_denied", "ran": False}
    fault = wire.fault_of(a_record(state="failed", finishedAt=stamp(9), cause=cause))
    assert fault is not None
    assert (fault.code, fault.data["cause"]["code"]) == (-32603, "admission_denied")
    assert wire.fault_of(a_record(state="failed", finishedAt=stamp(9), cause=FAILED)) is None


@pytest.mark.parametrize(
    ("header", "params", "code"),
    [
        pytest.param("", {"_meta": {VERSION_META: VERSION}}, -32020, id="header forgotten"),
        pytest.param("2025-06-18", {"_meta": {VERSION_META: VERSION}}, -32020, id="two versions"),
        pytest.param(
            "2025-06-18", {"_meta": {VERSION_META: "2025-06-18"}}, -32022, id="an old one"
        ),
        pytest.param("2025-06-18", {}, -32022, id="in a session"),
        pytest.param("", {"protocolVersion": "2025-06-18"}, -32022, id="handshake"),
        pytest.param("", None, -32022, id="nothing"),
        pytest.param("", {"_meta": []}, -32022, id="nonsense"),
    ],
)
def test_versions_that_are_not_spoken(header: str, params: Any, code: int) -> None:
    error = refusal_of_version(header, params)
    assert error["code"] == code
    if code == -32022:
        given = header or (params or {}).get("protocolVersion", "")
        assert error["data"] == {"supported": [VERSION], "requested": given}


def test_a_result_that_is_one_object_is_structured_and_a_long_one_goes_on() -> None:
    page = ResultPage(job_id="a.b", status="done", data='{"a": 1}')
    assert wire.page_result(page)["structuredContent"] == {"a": 1}
    for text in ("[1]", "a", "{"):
        assert "structuredContent" not in wire.page_result(page.model_copy(update={"data": text}))
    first = wire.page_result(page.model_copy(update={"next": "c1"}))
    assert "structuredContent" not in first
    assert '"cursor": "c1"' in first["content"][1]["text"]
    octets = wire.page_result(page.model_copy(update={"data": "/w==", "encoding": "base64"}))
    assert octets["content"][0]["resource"]["blob"] == "/w=="


@pytest.mark.parametrize(
    ("capabilities", "abilities"),
    [
        pytest.param({}, Abilities(), id="nothing"),
        pytest.param(None, Abilities(), id="null"),
        pytest.param({"extensions": {wire.TASKS: {}}}, Abilities(tasks=True), id="tasks"),
        pytest.param({"extensions": [wire.TASKS]}, Abilities(), id="a list"),
        pytest.param({"elicitation": {}}, Abilities(asked=frozenset({wire.ELICIT})), id="forms"),
        pytest.param({"elicitation": {"url": {}}}, Abilities(), id="pages alone"),
    ],
)
def test_what_a_client_declares(capabilities: Any, abilities: Abilities) -> None:
    assert Abilities.of(capabilities) == abilities


def test_r_key_every_tool_takes_a_key_and_needs_none() -> None:
    (only,) = definitions([a_tool(inputSchema=OK)], plain=False)
    assert set(only["inputSchema"]["properties"]) == {"ok", "idempotency_key"}
    assert only["inputSchema"]["required"] == ["ok"]
    names = [each["name"] for each in definitions([a_tool()], plain=True)]
    assert names == ["get_job_result", "get_job_status", "indexer", "start_indexer", "stop_job"]
