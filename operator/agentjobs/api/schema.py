"""The models as CustomResourceDefinitions: pydantic's JSON schema made structural.

Kubernetes takes a subset of OpenAPI v3: nothing referenced, every node typed, no unions. What the
models say about Kubernetes (`x-kubernetes-…`) passes through.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from agentjobs.api.agentjob import AgentJob
from agentjobs.api.agenttool import AgentTool, ClusterAgentTool
from agentjobs.api.base import SERVER_DEFAULT, Model
from agentjobs.api.inputrequest import InputRequest
from agentjobs.api.names import CATEGORY, GROUP, VERSION

Schema = dict[str, Any]

INT_OR_STRING: Final = "x-kubernetes-int-or-string"

DROPPED: Final = frozenset({"$defs", "title", "default", SERVER_DEFAULT})
"""Keywords that structural schemas refuse or that would make the API server fill fields in."""

TYPE_META: Final[Schema] = {
    "apiVersion": {
        "description": f"Group and version of the resource: {GROUP}/{VERSION}.",
        "type": "string",
    },
    "kind": {
        "description": "Kind of the resource, in CamelCase.",
        "type": "string",
    },
    # The API server puts in the rest, and refuses a description.
    "metadata": {"type": "object"},
}


@dataclass(frozen=True)
class Column:
    """A column of `kubectl get`; wide ones show with `-o wide` only."""

    name: str
    path: str
    type: str = "string"
    wide: bool = False
    format: str = ""

    def to_json(self) -> Schema:
        """Return the column as a CustomResourceDefinition writes it."""
        return {
            "name": self.name,
            "type": self.type,
            **({"format": self.format} if self.format else {}),
            "jsonPath": self.path,
            **({"priority": 1} if self.wide else {}),
        }


AGE: Final = Column("Age", ".metadata.creationTimestamp", "date")
TOOL_COLUMNS: Final = (
    Column("Usable", ".status.usable", "boolean"),
    Column("Description", ".spec.description", wide=True),
    AGE,
)


@dataclass(frozen=True)
class Resource:
    """What the API server is told about a kind beside its schema."""

    model: type[Model]
    plural: str
    short_name: str
    columns: tuple[Column, ...]
    selectable: tuple[str, ...] = ()
    namespaced: bool = True

    @property
    def kind(self) -> str:
        """Kind of the resource: the name of its model."""
        return self.model.__name__

    @property
    def crd_name(self) -> str:
        """Name of the CustomResourceDefinition."""
        return f"{self.plural}.{GROUP}"


RESOURCES: Final = (
    Resource(
        AgentJob,
        plural="agentjobs",
        short_name="aj",
        columns=(
            Column("State", ".status.state"),
            Column("Tool", ".spec.toolRef.name"),
            Column("Progress", ".status.progress.percent", "integer"),
            Column("Cause", ".status.cause.code"),
            # Not of type date: kubectl would show a moment to come as <invalid>.
            Column("Deadline", ".status.deadlineAt", format="date-time"),
            Column("Pod phase", ".status.podPhase", wide=True),
            Column("Pod", ".status.podName", wide=True),
            Column("Attempts", ".status.attempts[-1:].number", "integer", wide=True),
            AGE,
        ),
        selectable=(".spec.toolRef.name", ".status.state"),
    ),
    Resource(AgentTool, plural="agenttools", short_name="atool", columns=TOOL_COLUMNS),
    Resource(
        ClusterAgentTool,
        plural="clusteragenttools",
        short_name="catool",
        columns=TOOL_COLUMNS,
        namespaced=False,
    ),
    Resource(
        InputRequest,
        plural="inputrequests",
        short_name="ireq",
        columns=(
            Column("Job", ".spec.jobName"),
            Column("Kind", ".spec.kind"),
            Column("Outcome", ".status.outcome"),
            Column("Answered by", ".status.answeredBy"),
            AGE,
        ),
        selectable=(".spec.jobName", ".spec.kind", ".status.outcome"),
    ),
)
"""Every kind of this group."""


def crd(resource: Resource) -> Schema:
    """Return the CustomResourceDefinition of a kind."""
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": resource.crd_name},
        "spec": {
            "group": GROUP,
            "names": {
                "kind": resource.kind,
                "listKind": f"{resource.kind}List",
                "plural": resource.plural,
                "singular": resource.kind.lower(),
                "shortNames": [resource.short_name],
                "categories": [CATEGORY],
            },
            "scope": "Namespaced" if resource.namespaced else "Cluster",
            "versions": [_version(resource)],
        },
    }


def _version(resource: Resource) -> Schema:
    selectable = [{"jsonPath": path} for path in resource.selectable]
    return {
        "name": VERSION,
        "served": True,
        "storage": True,
        "subresources": {"status": {}},
        "additionalPrinterColumns": [column.to_json() for column in resource.columns],
        **({"selectableFields": selectable} if selectable else {}),
        "schema": {"openAPIV3Schema": root_schema(resource.model)},
    }


def root_schema(model: type[Model]) -> Schema:
    """Return the structural schema of a whole object."""
    schema = structural_schema(model)
    schema["properties"] |= TYPE_META
    schema["properties"] = {
        name: schema["properties"][name] for name in (*TYPE_META, "spec", "status")
    }
    schema["required"] = ["spec"]
    return schema


def structural_schema(model: type[Model]) -> Schema:
    """Return the structural schema of a model."""
    source = model.model_json_schema(by_alias=True, mode="validation")
    return _structural(source, source.get("$defs", {}))


def _structural(node: Mapping[str, Any], definitions: Mapping[str, Any]) -> Schema:
    """Rewrite one node and those below it."""
    flat = _flat(node, definitions)
    schema = {key: value for key, value in flat.items() if key not in DROPPED}
    if flat.get(SERVER_DEFAULT):
        schema["default"] = flat["default"]
    if "description" in schema:
        schema["description"] = " ".join(schema["description"].split())
    if "const" in schema:
        schema["enum"] = [schema.pop("const")]
    if schema.get("type") == "integer":
        schema["format"] = "int64"
    for bound in ("Minimum", "Maximum"):
        if f"exclusive{bound}" in schema:
            schema[bound.lower()] = schema[f"exclusive{bound}"]
            schema[f"exclusive{bound}"] = True
    return _ordered(schema | _children(schema, definitions))


def _flat(node: Mapping[str, Any], definitions: Mapping[str, Any]) -> Schema:
    """Resolve a reference or an optional value; what the field says wins over its type."""
    rest = {key: value for key, value in node.items() if key not in {"$ref", "anyOf"}}
    if "$ref" in node:
        return _flat(definitions[node["$ref"].rpartition("/")[2]], definitions) | rest
    if "anyOf" not in node or INT_OR_STRING in node:
        return dict(node)
    options = [option for option in node["anyOf"] if option != {"type": "null"}]
    if len(options) != 1:
        raise ValueError(f"a structural schema has no unions: {node}")
    return _flat(options[0], definitions) | rest


def _children(schema: Schema, definitions: Mapping[str, Any]) -> Schema:
    """Return the rewritten keywords that hold schemas."""
    children: Schema = {}
    if "properties" in schema:
        children["properties"] = {
            name: _structural(child, definitions) for name, child in schema["properties"].items()
        }
    if "items" in schema:
        children["items"] = _structural(schema["items"], definitions)
    if isinstance(schema.get("additionalProperties"), dict):
        children["additionalProperties"] = _structural(schema["additionalProperties"], definitions)
    return children


def _ordered(schema: Schema) -> Schema:
    """Put what people read first in front; drop `additionalProperties` that holds no schema."""
    if isinstance(schema.get("additionalProperties"), bool):
        del schema["additionalProperties"]
    first = ("description", "type", "format", "enum", "default")
    last = ("required", "properties", "x-kubernetes-validations")
    middle = [key for key in schema if key not in first + last]
    return {key: schema[key] for key in (*first, *middle, *last) if key in schema}
