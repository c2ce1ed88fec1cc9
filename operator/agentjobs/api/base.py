"""What all models share: camelCase on the wire, frozen values, metadata, conditions."""

from datetime import UTC, datetime
from enum import StrEnum
from typing import Annotated, Any, Final, Self

from pydantic import BaseModel, ConfigDict, Field, PlainSerializer
from pydantic.alias_generators import to_camel

from agentjobs.api.names import CONDITION_MESSAGE_BYTES, MAX_DURATION_SECONDS


def format_time(value: datetime) -> str:
    """RFC 3339 in UTC with whole seconds, as metav1.Time writes it."""
    return value.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


LABEL_PATTERN: Final = "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
"""A DNS label."""
SERVER_DEFAULT: Final = "x-server-default"
"""Mark of a field whose default the API server fills in. Others stay absent where not given."""
ServerDefault = Field(json_schema_extra={SERVER_DEFAULT: True})

SET: Final = {"x-kubernetes-list-type": "set"}
"""Schema of a list without duplicates, which several appliers may fill together."""


def keyed_by(key: str) -> dict[str, Any]:
    """Describe a list whose items have an identity of their own, so that appliers share it."""
    return {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [key]}


def cel(rule: str, message: str, field: str = "") -> dict[str, Any]:
    """Return a rule that the API server holds writers to; `field` is what a refusal points at."""
    return {"rule": rule, "message": message, **({"fieldPath": f".{field}"} if field else {})}


def held_to(*rules: dict[str, Any]) -> dict[str, Any]:
    """Describe an object by rules that every write of it must satisfy."""
    return {"x-kubernetes-validations": list(rules)}


def name_rule(why: str) -> dict[str, Any]:
    """Keep the name of an object to one DNS label."""
    return cel(
        f"size(self.metadata.name) <= 63 && self.metadata.name.matches('{LABEL_PATTERN}')",
        f"the name must be a DNS label of at most 63 characters (a-z, 0-9, '-'): {why}",
    )


Time = Annotated[datetime, PlainSerializer(format_time, return_type=str)]
Seconds = Annotated[int, Field(ge=1, le=MAX_DURATION_SECONDS)]
ResourceName = Annotated[str, Field(min_length=1, max_length=63, pattern=LABEL_PATTERN)]


def readable_time(value: Any) -> Any:
    """A time of a user's, or None: the API server takes some that Python cannot hold (`+24:00`)."""
    if not isinstance(value, str):
        return value
    try:
        return datetime.fromisoformat(value)
    except ValueError:
        return None


class Model(BaseModel):
    """A frozen value; reading tolerates unknown fields, the CRD's schema refuses them."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        populate_by_name=True,
        frozen=True,
        extra="ignore",
        use_attribute_docstrings=True,
        use_enum_values=False,
    )

    @classmethod
    def from_json(cls, body: Any) -> Self:
        """Parse a decoded JSON value.

        :raises pydantic.ValidationError: if it does not have the model's shape.
        """
        return cls.model_validate(body)

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form: camelCase, absent fields left out."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)


class ConditionStatus(StrEnum):
    """Status of a condition, as in metav1.Condition."""

    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"


class Condition(Model):
    """One aspect of the state of an object, in the shape of metav1.Condition."""

    type: Annotated[str, Field(max_length=64)]
    """Type of the condition, in CamelCase."""
    status: ConditionStatus
    """True, False or Unknown."""
    reason: Annotated[str, Field(min_length=1, max_length=128)]
    """Why the condition has this status, in one CamelCase word."""
    message: Annotated[str, Field(max_length=CONDITION_MESSAGE_BYTES)] = ""
    """The same for people, with the names of the objects to look at."""
    last_transition_time: Time
    """When the status last changed."""
    observed_generation: Annotated[int, Field(ge=0)] | None = None
    """The metadata.generation that this condition is about."""


class ObjectMeta(Model):
    """The part of metav1.ObjectMeta that is read."""

    name: str = ""
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    generation: int = 0
    creation_timestamp: Time
    deletion_timestamp: Time | None = None
    finalizers: tuple[str, ...] = ()
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
