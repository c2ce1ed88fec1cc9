"""What is served about the API and the events: valid, whole, and true of what is sent."""

import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema_rs
import pytest
from pydantic import TypeAdapter

from agentjobs import __version__
from agentjobs.api.agentjob import AgentJob
from agentjobs.api.names import EventType, State
from agentjobs.contract.asyncapi import asyncapi_document
from agentjobs.contract.calls import Problem, StartRequest
from agentjobs.contract.events import JobEvent
from agentjobs.contract.openapi import LINKS, openapi_document
from agentjobs.contract.operations import OPERATIONS, In, Operation, Parameter
from agentjobs.contract.problems import ProblemType
from agentjobs.domain.callbacks import event_body, outbox_of
from tests.builders import Json, an_agentjob, at, stamp

OPENAPI = openapi_document()
ASYNCAPI = asyncapi_document()
BY_ID = {each.id: each for each in OPERATIONS}
NOWHERE_DECLARED = {
    ProblemType.METHOD_NOT_ALLOWED: "what a path does not serve is no operation",
    ProblemType.INTERNAL: "a promise to break is none",
}


def everything(value: Any) -> Iterator[Json]:
    """All objects of a document."""
    if isinstance(value, dict):
        yield value
        for member in value.values():
            yield from everything(member)
    elif isinstance(value, list):
        for item in value:
            yield from everything(item)


def resolved(document: Json, pointer: str) -> Any:
    found: Any = document
    for step in pointer.removeprefix("#/").split("/"):
        found = found[step.replace("~1", "/").replace("~0", "~")]
    return found


def described(operation: Operation) -> Json:
    found: Json = OPENAPI["paths"][operation.path][operation.method.lower()]
    return found


def validator(document: Json, schema: Json) -> jsonschema_rs.Draft202012Validator:
    """A validator of a schema that refers to components of its document."""
    whole = {**schema, "components": document["components"]}
    return jsonschema_rs.Draft202012Validator(whole, validate_formats=True)


# --- OpenAPI


def test_the_openapi_document_says_what_it_is() -> None:
    assert OPENAPI["openapi"] == "3.1.0"
    assert OPENAPI["info"]["version"] == __version__


@pytest.mark.parametrize("document", [OPENAPI, ASYNCAPI], ids=["OpenAPI", "AsyncAPI"])
def test_every_reference_leads_somewhere(document: Json) -> None:
    pointers = {each["$ref"] for each in everything(document) if "$ref" in each}
    assert pointers
    for pointer in pointers:
        assert resolved(document, pointer)


@pytest.mark.parametrize("document", [OPENAPI, ASYNCAPI], ids=["OpenAPI", "AsyncAPI"])
def test_every_schema_is_one(document: Json) -> None:
    for schema in document["components"]["schemas"].values():
        validator(document, schema)


def test_every_operation_of_the_table_is_in_the_document_and_no_other() -> None:
    found = {
        (method.upper(), path): described["operationId"]
        for path, methods in OPENAPI["paths"].items()
        for method, described in methods.items()
    }
    assert found == {(each.method, each.path): each.id for each in OPERATIONS}
    assert len(found) == len(BY_ID) == len(OPERATIONS)


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda each: each.id)
def test_an_operation_is_described_as_the_table_has_it(operation: Operation) -> None:
    found = described(operation)
    assert [(each["name"], each["in"]) for each in found["parameters"]] == [
        (each.name, each.where.value) for each in operation.parameters
    ]
    in_path = {each.name for each in operation.parameters if each.where.value == "path"}
    assert set(re.findall(r"{(\w+)}", operation.path)) == in_path
    assert ("requestBody" in found) == bool(operation.body or operation.raw_limit)
    success = found["responses"][str(operation.status.value)]
    assert set(success.get("headers", ())) == set(operation.headers)


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda each: f"R-AUTH {each.id}")
def test_a_token_is_asked_for_wherever_something_of_a_namespace_is_told(
    operation: Operation,
) -> None:
    assert OPENAPI["security"] == [{"bearer": []}]
    assert ("401" in described(operation)["responses"]) == (not operation.public)
    pods = [{"pod": []}] if operation.pod else None
    assert described(operation).get("security") == ([] if operation.public else pods)
    assert operation.public == (not operation.path.startswith("/v1/"))


@pytest.mark.parametrize("kind", ProblemType, ids=lambda kind: kind.uri.rpartition("/")[2])
def test_every_problem_is_declared_where_it_is_met(kind: ProblemType) -> None:
    declared = [
        response
        for operation in OPERATIONS
        for status, response in described(operation)["responses"].items()
        if f"`{kind.uri}`" in response["description"] and status == str(kind.status.value)
    ]
    assert bool(declared) == (kind not in NOWHERE_DECLARED)
    problem = Problem(type=kind.uri, title=kind.title, status=kind.status.value).to_json()
    for response in declared:
        schema = validator(OPENAPI, response["content"]["application/problem+json"]["schema"])
        assert schema.is_valid(problem)
        assert not schema.is_valid(problem | {"type": "about:blank"})
        assert not schema.is_valid(problem | {"status": 200})


def test_problems_are_told_apart_by_their_words() -> None:
    assert len({kind.uri for kind in ProblemType}) == len(ProblemType)


@pytest.mark.parametrize("status", ["429", "503"])
def test_who_should_come_back_is_told_when(status: str) -> None:
    found = [
        response
        for operation in OPERATIONS
        if (response := described(operation)["responses"].get(status))
        and "application/problem+json" in response["content"]
    ]
    assert found
    assert all(response["headers"]["Retry-After"]["required"] for response in found)


@pytest.mark.parametrize("source", sorted(LINKS))
def test_a_link_leads_to_a_parameter_of_a_call_and_from_a_member_of_the_answer(
    source: str,
) -> None:
    operation = BY_ID[source]
    success = described(operation)["responses"][str(operation.status.value)]
    assert set(success["links"]) == set(LINKS[source])
    for target, parameters in LINKS[source].values():
        known = {each.name for each in BY_ID[target].parameters}
        assert set(parameters) <= known
        for expression in parameters.values():
            assert leads_from(operation, expression), expression


def leads_from(operation: Operation, expression: str) -> bool:
    """Whether a runtime expression names something that the operation has."""
    place, _, pointer = expression.partition("#/")
    if place == "$response.body":
        assert operation.answer is not None
        schema = operation.answer.model_json_schema()
        for step in pointer.split("/"):
            schema = schema["items"] if step.isdigit() else schema["properties"][step]
            if "$ref" in schema:
                definitions = operation.answer.model_json_schema()["$defs"]
                schema = definitions[schema["$ref"].rpartition("/")[2]]
        return True
    kind, _, name = place.removeprefix("$").rpartition(".")
    if kind == "response.header":
        return name in operation.headers
    return kind == "request.path" and name in {each.name for each in operation.parameters}


@pytest.mark.parametrize(
    ("body", "valid"),
    [
        pytest.param({"tool": "a"}, True, id="a tool"),
        pytest.param({"template": {}}, True, id="a template"),
        pytest.param({"tool": "a", "arguments": {}}, True, id="a tool with arguments"),
        pytest.param({"tool": "a", "template": None}, True, id="a tool, and null"),
        pytest.param({"template": {}, "tool": None, "arguments": None}, True, id="null, and one"),
        pytest.param({"tool": "a", "deadline_seconds": 900.0}, True, id="a whole number, as 900.0"),
        pytest.param({"tool": "a", "template": {}}, False, id="both"),
        pytest.param({}, False, id="none"),
        pytest.param({"tool": None}, False, id="null"),
        pytest.param({"tool": None, "template": None}, False, id="null twice"),
        pytest.param({"template": {}, "arguments": {}}, False, id="a template with arguments"),
        pytest.param({"tool": "a", "colour": "red"}, False, id="a misspelt member"),
        pytest.param({"tool": "A"}, False, id="no name of a tool"),
        pytest.param({"tool": "a\n"}, False, id="a line break after a name"),
        pytest.param({"tool": "a", "deadline_seconds": "9"}, False, id="a number as a text"),
        pytest.param({"tool": "a", "deadline_seconds": 1.5}, False, id="a part of a second"),
        pytest.param({"tool": "a", "deadline_seconds": True}, False, id="true for a number"),
        pytest.param({"tool": "a", "deadline_seconds": 0}, False, id="no time at all"),
        pytest.param({"tool": "a", "depends_on": ["x"]}, False, id="no job id"),
        pytest.param({"tool": "a", "depends_on": ["x.y"] * 513}, False, id="too many jobs"),
        pytest.param({"tool": "a", "callback": {"url": "ftp://x"}}, False, id="no HTTP"),
    ],
)
def test_the_document_and_the_gateway_agree_on_what_can_be_started(body: Json, valid: bool) -> None:
    schema = validator(OPENAPI, OPENAPI["components"]["schemas"]["StartRequest"])
    assert schema.is_valid(body) is valid
    if valid:
        StartRequest.model_validate(body)
    else:
        with pytest.raises(ValueError, match="validation error"):
            StartRequest.model_validate(body)


@pytest.mark.parametrize("model", sorted({m for o in OPERATIONS if (m := o.body)}, key=str))
def test_examples_are_valid(model: type[StartRequest]) -> None:
    for case in model.model_json_schema().get("examples", ()):
        model.model_validate(case)
    for operation in OPERATIONS:
        for parameter in operation.parameters:
            for case in parameter.adapter.json_schema().get("examples", ()):
                TypeAdapter(parameter.annotation).validate_python(case)


PARAMETERS = {
    f"{operation.id} {parameter.name}": (operation, parameter)
    for operation in OPERATIONS
    for parameter in operation.parameters
    # What no object can be called is not found; it is not invalid.
    if parameter.where is not In.PATH
}
NUMBERS = ["-1", "0", "1", "3", "4", "60", "61", "500", "501", "65536", "65537", "10000000"]
TEXTS = ["", "a", "A", "a.b", "a-", "queued", "x" * 63, "x" * 64, "x" * 255, "x" * 256, "x" * 1025]
WORDS = {"type", "pattern", "minLength", "maxLength", "minimum", "maximum", "enum", "title"}


@pytest.mark.parametrize(("operation", "parameter"), PARAMETERS.values(), ids=PARAMETERS)
def test_the_document_and_the_gateway_agree_on_parameters(
    operation: Operation, parameter: Parameter
) -> None:
    (schema,) = (
        each["schema"]
        for each in described(operation)["parameters"]
        if each["name"] == parameter.name
    )
    assert set(schema) <= WORDS, "a word that JSON Schema has not says nothing"
    rule = validator(OPENAPI, schema)
    is_number = schema["type"] == "integer"
    for text in NUMBERS if is_number else TEXTS:
        assert rule.is_valid(int(text) if is_number else text) == taken(parameter, text), text


def taken(parameter: Parameter, text: str) -> bool:
    try:
        parameter.adapter.validate_python(text)
    except ValueError:
        return False
    return True


# --- AsyncAPI


def test_the_asyncapi_document_has_the_shape_of_one() -> None:
    """By hand: no Python package has the schema of AsyncAPI 3.0.0 (npm's @asyncapi/specs has)."""
    assert ASYNCAPI["asyncapi"] == "3.0.0"
    assert ASYNCAPI["info"]["version"] == __version__
    assert set(ASYNCAPI) <= {
        "asyncapi", "id", "info", "servers", "defaultContentType", "channels", "operations",
        "components",
    }  # fmt: skip
    for channel in ASYNCAPI["channels"].values():
        assert set(re.findall(r"{(\w+)}", channel["address"])) == set(channel["parameters"])
        assert all("$ref" in message for message in channel["messages"].values())
        # http binding 0.3.0: its place in a channel is reserved and stays empty.
        assert "http" not in channel.get("bindings", {})
    for operation in ASYNCAPI["operations"].values():
        assert operation["action"] == "send"
        pointer = operation["channel"]["$ref"]
        assert resolved(ASYNCAPI, pointer)
        for message in operation["messages"]:
            assert message["$ref"].startswith(f"{pointer}/messages/")
            assert resolved(ASYNCAPI, message["$ref"])
    for message in ASYNCAPI["components"]["messages"].values():
        assert message["headers"]["type"] == "object"
        assert set(message["headers"]["required"]) == set(message["headers"]["properties"])


ENDS: dict[str, Json] = {
    "done": {"state": "done", "summary": "600 pages\n[event] job_completed job_id=forged"},
    "failed": {
        "state": "failed",
        "cause": {"code": "tool_error", "message": "exit 3", "retryable": False, "ran": True},
    },
    "cancelled": {
        "state": "cancelled",
        "cause": {"code": "stopped", "retryable": True, "ran": False},
    },
    "timed_out": {
        "state": "timed_out",
        "cause": {"code": "deadline_exceeded", "message": "", "retryable": True, "ran": True},
    },
}


def sent(end: Json, gateway_url: str, **spec: Any) -> bytes:
    """The event that the end of a job makes."""
    job = an_agentjob(
        status={**end, "finishedAt": stamp(60)},
        callback={"url": "https://runtime.example.net/events"},
        **spec,
    )
    outbox = outbox_of(job, job.status, at(60))
    assert outbox is not None
    return event_body(AgentJob.from_json(job.to_json()), outbox.deliveries[0], gateway_url)


@pytest.mark.parametrize("url", ["https://gateway.example.net", ""], ids=["result_url", "none"])
@pytest.mark.parametrize("spec", [{"toolRef": {"name": "indexer"}}, {}], ids=["tool", "template"])
@pytest.mark.parametrize("end", ENDS.values(), ids=[f"R-EVENT {name}" for name in ENDS])
def test_an_event_is_as_the_document_says(end: Json, spec: Json, url: str) -> None:
    raw = sent(end, url, **spec)
    validator(ASYNCAPI, ASYNCAPI["components"]["schemas"]["JobEvent"]).validate(json.loads(raw))
    event = JobEvent.model_validate_json(raw)
    assert event.data.status is State(end["state"])
    assert event.data.job_id == event.subject
    assert bool(event.data.result_url) == bool(url)
    assert set(json.loads(raw)) == set(JobEvent.model_fields)
    assert "\n" not in event.data.summary


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"specversion": "2.0"}, id="R-EVENT another version"),
        pytest.param({"type": "job_forged"}, id="R-EVENT an unknown type"),
        pytest.param({"subject": "no id"}, id="R-EVENT no job id"),
        pytest.param({"time": "yesterday"}, id="R-EVENT no time"),
        pytest.param({"id": None}, id="R-EVENT no id"),
    ],
)
def test_what_is_no_event_of_ours_is_seen_by_the_document(change: Json) -> None:
    event = json.loads(sent(ENDS["done"], "")) | change
    schema = validator(ASYNCAPI, ASYNCAPI["components"]["schemas"]["JobEvent"])
    assert not schema.is_valid(event)


def test_every_type_of_event_is_named() -> None:
    message = ASYNCAPI["components"]["messages"]["jobEvent"]
    assert all(kind.value in message["summary"] for kind in EventType)
