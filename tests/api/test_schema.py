"""CRD schemas are structural, described, bounded, and say what the models say."""

from collections.abc import Iterator
from typing import Annotated, Any

import pytest
from pydantic import Field

from agentjobs.api.agentjob import AgentJob
from agentjobs.api.agenttool import AgentTool, ClusterAgentTool, ResourceRequirements
from agentjobs.api.base import Model
from agentjobs.api.inputrequest import InputRequest
from agentjobs.api.schema import RESOURCES, Schema, crd, root_schema, structural_schema

MODELS = (AgentJob, AgentTool, ClusterAgentTool, InputRequest)
UNBOUNDED = {
    # The API server bounds these two itself.
    ".apiVersion",
    ".kind",
}

each_model = pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)


def nodes(schema: Schema, path: str = "") -> Iterator[tuple[str, Schema]]:
    """Every schema in a schema, with the path of what it describes."""
    yield path, schema
    for name, child in schema.get("properties", {}).items():
        yield from nodes(child, f"{path}.{name}")
    if "items" in schema:
        yield from nodes(schema["items"], f"{path}[]")
    if "additionalProperties" in schema:
        yield from nodes(schema["additionalProperties"], f"{path}.*")


def node(model: type[Model], path: str) -> Schema:
    return dict(nodes(root_schema(model)))[path]


def rules(model: type[Model]) -> dict[str, list[str]]:
    """Path to the messages of the rules there."""
    return {
        path: [rule["message"] for rule in schema["x-kubernetes-validations"]]
        for path, schema in nodes(root_schema(model))
        if "x-kubernetes-validations" in schema
    }


@each_model
def test_every_node_is_typed(model: type[Model]) -> None:
    for path, schema in nodes(root_schema(model)):
        assert "type" in schema or schema.get("x-kubernetes-int-or-string"), path


@each_model
def test_nothing_is_left_that_structural_schemas_refuse(model: type[Model]) -> None:
    refused = {"$ref", "$defs", "title", "const", "definitions", "x-server-default", "oneOf"}
    for path, schema in nodes(root_schema(model)):
        assert not refused & set(schema), path
        assert "anyOf" not in schema or "x-kubernetes-int-or-string" in schema, path
        assert not ({"properties", "additionalProperties"} <= set(schema)), path
        assert not isinstance(schema.get("additionalProperties"), bool), path


@each_model
def test_every_field_is_described_on_one_line(model: type[Model]) -> None:
    for path, schema in nodes(root_schema(model)):
        if path == ".metadata" or path.endswith(("[]", ".*")):
            continue
        assert schema.get("description", "").strip(), path
        assert "\n" not in schema["description"], path


@each_model
def test_everything_is_bounded(model: type[Model]) -> None:
    """The API server weighs rules by the largest object that the schema lets through."""
    for path, schema in nodes(root_schema(model)):
        if path in UNBOUNDED:
            continue
        kind = schema.get("type")
        if kind == "string":
            assert schema.keys() & {"maxLength", "enum", "format"}, path
        if kind == "array":
            assert "maxItems" in schema, path
        if "additionalProperties" in schema:
            assert "maxProperties" in schema, path


@each_model
def test_the_api_server_fills_in_only_the_kind_of_a_tool(model: type[Model]) -> None:
    filled = {path for path, schema in nodes(root_schema(model)) if "default" in schema}
    assert filled == ({".spec.toolRef.kind"} if model is AgentJob else set())


@each_model
def test_the_top_level_is_that_of_a_kubernetes_object(model: type[Model]) -> None:
    schema = root_schema(model)
    assert list(schema["properties"]) == ["apiVersion", "kind", "metadata", "spec", "status"]
    assert schema["required"] == ["spec"]
    # The API server refuses a CRD that says more about metadata.
    assert schema["properties"]["metadata"] == {"type": "object"}


@pytest.mark.parametrize(
    ("model", "path", "expected"),
    [
        pytest.param(
            AgentJob,
            ".spec.toolRef.kind",
            {
                "description": "AgentTool (of the same namespace) or ClusterAgentTool.",
                "type": "string",
                "enum": ["AgentTool", "ClusterAgentTool"],
                "default": "AgentTool",
            },
            id="an enum with a server-side default",
        ),
        pytest.param(
            AgentJob,
            ".spec.template",
            {
                "description": "A batch/v1 JobTemplateSpec (metadata.labels, metadata.annotations,"
                " spec) to run as it is.",
                "type": "object",
                "x-kubernetes-preserve-unknown-fields": True,
            },
            id="a template keeps fields that are unknown here",
        ),
        pytest.param(
            AgentJob,
            ".spec.pendingDeadlineSeconds",
            {
                "description": "Seconds that may pass from the creation of the Job until its tool"
                " container starts. Absent: only deadlineSeconds counts.",
                "type": "integer",
                "format": "int64",
                "maximum": 31622400,
                "minimum": 1,
            },
            id="an optional number is a number; a docstring over two lines is one line",
        ),
        pytest.param(
            AgentJob,
            ".status.podUIDs",
            {
                "description": "Pods that may report for this job.",
                "type": "array",
                "maxItems": 16,
                "x-kubernetes-list-type": "set",
                "items": {"type": "string", "maxLength": 64},
            },
            id="a set",
        ),
        pytest.param(
            AgentTool,
            ".spec.defaults.resources.requests",
            {
                "description": "What the scheduler sets aside.",
                "type": "object",
                "maxProperties": 16,
                "additionalProperties": {
                    "anyOf": [{"type": "integer"}, {"type": "string"}],
                    "maxLength": 32,
                    "pattern": "^[0-9]+(\\.[0-9]+)?(m|k|Ki|M|Mi|G|Gi|T|Ti|P|Pi|E|Ei)?$",
                    "x-kubernetes-int-or-string": True,
                },
            },
            id="quantities are numbers or strings",
        ),
    ],
)
def test_golden(model: type[Model], path: str, expected: Schema) -> None:
    assert node(model, path) == expected


class Odd(Model):
    """Keywords that the models do not use yet."""

    more_than: Annotated[int, Field(gt=1, lt=9)]
    """More than one."""
    default: Annotated[str, Field(max_length=3)] = "x"
    """A field that is called like a keyword."""


def test_open_bounds_are_flags() -> None:
    assert structural_schema(Odd)["properties"]["moreThan"] == {
        "description": "More than one.",
        "type": "integer",
        "format": "int64",
        "minimum": 1,
        "exclusiveMinimum": True,
        "maximum": 9,
        "exclusiveMaximum": True,
    }


def test_a_field_may_be_called_like_a_keyword() -> None:
    assert structural_schema(Odd)["properties"]["default"] == {
        "description": "A field that is called like a keyword.",
        "type": "string",
        "maxLength": 3,
    }


def test_a_union_is_refused() -> None:
    class Union(Model):
        """Two things at once."""

        value: int | str

    with pytest.raises(ValueError, match="no unions"):
        structural_schema(Union)


def test_rules_of_agentjob() -> None:
    immutable = [
        "toolRef",
        "arguments",
        "template",
        "pendingDeadlineSeconds",
        "dependsOn",
        "retry",
        "callback",
        "queueName",
        "requestedBy",
        "idempotency",
    ]
    found = rules(AgentJob)
    assert set(found) == {"", ".spec"}
    assert found[".spec"] == [
        "exactly one of toolRef and template must be given",
        "arguments belong to a toolRef; a template has none",
        *(f"{name} cannot be changed; create another AgentJob instead" for name in immutable),
        "a stop cannot be taken back or changed",
        "deadlineSeconds can only be lowered",
    ]
    assert found[""][1:] == [
        "a job cannot depend on itself",
        "the job is over; its end cannot be changed",
        "the job is over; when and why it ended cannot be changed",
        "a job that is over has a finishedAt",
        (
            "the tool has begun and may not be repeated, so the job cannot be suspended; "
            "stop it instead"
        ),
    ]


def test_every_field_of_an_agentjob_has_a_rule_for_changes() -> None:
    """R-IMMUTABLE: a new field of the spec is immutable, or named here as one that may change."""
    may_change = {"ttlSecondsAfterFinished", "stop", "suspend", "deadlineSeconds"}
    text = str(root_schema(AgentJob)["properties"]["spec"]["x-kubernetes-validations"])
    fields = root_schema(AgentJob)["properties"]["spec"]["properties"]
    unguarded = {name for name in fields if f"has(oldSelf.{name})" not in text}
    assert unguarded <= may_change


def test_rules_of_inputrequest() -> None:
    assert rules(InputRequest) == {
        "": ["the question is closed; its answer cannot be taken back"],
        ".spec": ["a question cannot be changed"],
        ".status": [
            "the question is closed; its answer cannot be changed",
            "an answer is written together with its outcome",
            (
                "answered and declined name who answered in answeredBy; "
                "expired and withdrawn name nobody"
            ),
            "only the outcome answered carries an answer",
        ],
    }


def test_names_do_not_clash() -> None:
    names = [crd(resource)["spec"]["names"] for resource in RESOURCES]
    spoken = [
        word for name in names for word in (name["plural"], name["singular"], *name["shortNames"])
    ]
    assert len(spoken) == len(set(spoken))
    assert [name["shortNames"] for name in names] == [["aj"], ["atool"], ["catool"], ["ireq"]]


def test_columns_of_agentjob() -> None:
    version = crd(RESOURCES[0])["spec"]["versions"][0]
    columns: list[dict[str, Any]] = version["additionalPrinterColumns"]
    assert [column["name"] for column in columns if "priority" not in column] == [
        "State",
        "Tool",
        "Progress",
        "Cause",
        "Deadline",
        "Age",
    ]
    assert [column["name"] for column in columns if "priority" in column] == [
        "Pod phase",
        "Pod",
        "Attempts",
    ]


@pytest.mark.parametrize("resource", RESOURCES, ids=lambda resource: resource.kind)
def test_columns_and_selectors_point_at_fields_that_exist(resource: Any) -> None:
    version = crd(resource)["spec"]["versions"][0]
    known = {path for path, _ in nodes(version["schema"]["openAPIV3Schema"])}
    known.add(".metadata.creationTimestamp")
    pointed = [
        item["jsonPath"]
        for key in ("additionalPrinterColumns", "selectableFields")
        for item in version.get(key, [])
    ]
    assert {path.replace("[-1:]", "[]") for path in pointed} <= known


def test_whole_numbers_are_quantities() -> None:
    read = ResourceRequirements.from_json({"requests": {"cpu": 2, "memory": "1Gi"}})
    assert read.to_json() == {"requests": {"cpu": "2", "memory": "1Gi"}}
