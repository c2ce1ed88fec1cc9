"""A tool's arguments: checked by its inputSchema, never coerced, never in a shell line (R-ARGS)."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from urllib.parse import unquote

import jsonschema_rs

from agentjobs.api.names import ENV_ARGUMENT_PREFIX
from agentjobs.domain.errors import InvalidSpecError
from agentjobs.domain.nesting import check_depth
from agentjobs.domain.texts import cut, one_line

MAX_EXACT_INTEGER = 2**53
"""Beyond it, JSON readers that use binary64 change the number (RFC 8259 section 6)."""
MAX_FOLLOWED = 400
"""How deep a schema may be, references followed."""
ENVIRONMENT_NAME = re.compile(r"[A-Z_][A-Z0-9_]*\Z")
WARNING_CHARACTERS = 256
MAX_UNFOLDED = 20_000
"""How large a schema may be with every reference replaced by what it means. Validation costs that
much for each value, and two references to a parent double it with each level of the arguments."""
INPUT_SCHEMA = "spec.inputSchema"
RESERVED_ARGUMENT = "idempotency_key"
"""Name that the catalogue adds to every tool's schema."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One place where arguments break a schema."""

    pointer: str
    """RFC 6901 pointer to the value that is wrong."""
    keyword: str
    """The schema's keyword that it breaks."""
    message: str
    """What is wrong, on one line, long values cut."""


def check_input_schema(schema: Mapping[str, Any]) -> None:
    """Check that a schema can be used for arguments.

    :raises InvalidSpecError: it is none, as `check_schema` says; or it has a property that the
        catalogue needs itself.
    """
    properties = schema.get("properties")
    if isinstance(properties, Mapping) and RESERVED_ARGUMENT in properties:
        raise InvalidSpecError(
            f"{INPUT_SCHEMA}.properties.{RESERVED_ARGUMENT}: the catalogue adds this argument; "
            "name it otherwise"
        )
    check_schema(schema, INPUT_SCHEMA)


def check_schema(schema: Mapping[str, Any], path: str) -> None:
    """Check that objects can be held to a schema.

    :param path: where it stands, for messages.
    :raises InvalidSpecError: not a JSON Schema 2020-12, not for objects, a remote reference, a
        pattern that cannot be matched in linear time.
    """
    check_depth(schema, path)
    if schema.get("type", "object") != "object":
        raise InvalidSpecError(f"{path}.type: must be object; what it is for has names")
    if _unfolded(schema, path) > MAX_UNFOLDED:
        raise InvalidSpecError(
            f"{path}: its references unfold to more than "
            f"{MAX_UNFOLDED} schemas, or to themselves; checking a value would take for ever"
        )
    _validator(_canonical(schema), path)


def fill_defaults(schema: Mapping[str, Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments with the defaults of the schema's own properties filled in."""
    properties = schema.get("properties")
    filled = dict(arguments)
    for name, rule in properties.items() if isinstance(properties, Mapping) else ():
        if name not in filled and isinstance(rule, Mapping) and "default" in rule:
            filled[name] = rule["default"]
    return filled


def check_size(arguments: Mapping[str, Any], limit: int, path: str = "spec.arguments") -> None:
    """Refuse what is too large to be passed by value. It costs little, and goes before the schema.

    Each fault costs some 30 µs to find, and a quarter of a megabyte has room for 60,000 of them.

    :raises InvalidSpecError: it has more bytes of JSON than that.
    """
    size = len(encode(arguments).encode("utf-8", "surrogatepass"))
    if size > limit:
        raise InvalidSpecError(
            f"{path}: {size} bytes of JSON, at most {limit} are allowed; "
            "pass large data by reference"
        )


def faults_of(
    schema: Mapping[str, Any], arguments: Mapping[str, Any], path: str = INPUT_SCHEMA
) -> list[Fault]:
    """List every place where arguments break the schema, or hold a number that JSON cannot keep.

    :param path: where the schema stands, for messages.
    :raises InvalidSpecError: the schema is none.
    """
    found = [
        Fault(_pointer(error.instance_path), _keyword(error), _message(error))
        for error in _validator(_canonical(schema), path).iter_errors(dict(arguments))
    ]
    return [*found, *inexact_numbers(arguments)]


def inexact_numbers(value: Any) -> list[Fault]:
    """List the numbers that a reader of JSON may change: the API server does beyond 64 bits."""
    return [
        Fault(pointer, "maximum", f"{number} is beyond ±2^53 and would not stay exact")
        for pointer, number in _inexact(value, "")
    ]


def describe(faults: list[Fault]) -> str:
    """One sentence of bounded length that names the pointers."""
    places = ", ".join(dict.fromkeys(fault.pointer or '""' for fault in faults))
    first = faults[0]
    count = "1 fault" if len(faults) == 1 else f"{len(faults)} faults"
    detail = cut(first.message, 90)
    return cut(f"spec.arguments: {count} at {cut(places, 130)}; {detail}", 250)


def environment(arguments: Mapping[str, Any]) -> tuple[dict[str, str], list[str]]:
    """Return AGENTJOBS_ARG_* for scalars, and warnings.

    Every `$` is doubled, since the kubelet expands `$(NAME)` in values. Names that are not ASCII
    and two names that would collide have no variable; the arguments file has them all.
    """
    named: dict[str, list[str]] = {}
    for name in arguments:
        variable = name.upper().replace("-", "_")
        if name.isascii() and ENVIRONMENT_NAME.match(variable):
            named.setdefault(variable, []).append(name)
    values: dict[str, str] = {}
    warnings = []
    for variable, names in named.items():
        if len(names) > 1:
            listed = " and ".join(sorted(names))
            warning = f"arguments {listed} have no variable: both would be {variable}"
            warnings.append(cut(warning, WARNING_CHARACTERS))
            continue
        text = _scalar(arguments[names[0]])
        if text is not None and "\0" not in text:
            values[ENV_ARGUMENT_PREFIX + variable] = text.replace("$", "$$")
    return values, warnings


def encode(arguments: Mapping[str, Any]) -> str:
    """Return the arguments as compact JSON, names in the given order."""
    return json.dumps(arguments, ensure_ascii=False, separators=(",", ":"))


def _scalar(value: Any) -> str | None:
    if isinstance(value, str):
        return value
    if isinstance(value, bool | int | float):
        return json.dumps(value)
    return None


def _canonical(schema: Mapping[str, Any]) -> str:
    return json.dumps(schema, sort_keys=True)


def _unfolded(schema: Mapping[str, Any], path: str) -> int:
    """Values in a schema with its references replaced; beyond the limit where they go in circles.

    :raises InvalidSpecError: a reference that is not a pointer into the schema.
    """
    sizes: dict[str, int] = {}

    def size(value: Any, depth: int) -> int:
        if depth > MAX_FOLLOWED:
            return MAX_UNFOLDED + 1
        if isinstance(value, list):
            return 1 + sum(size(item, depth + 1) for item in value)
        if not isinstance(value, Mapping):
            return 1
        target = value.get("$ref", value.get("$dynamicRef"))
        own = 1 + sum(size(item, depth + 1) for item in value.values())
        return own + (of(target, depth + 1) if isinstance(target, str) else 0)

    def of(pointer: str, depth: int) -> int:
        if pointer not in sizes:
            sizes[pointer] = MAX_UNFOLDED + 1  # what it is while it refers to itself
            sizes[pointer] = min(size(_resolve(schema, pointer, path), depth), MAX_UNFOLDED + 1)
        return sizes[pointer]

    return size(schema, 0)


def _resolve(schema: Mapping[str, Any], pointer: str, path: str) -> Any:
    """What a `$ref` means (RFC 6901 pointers in URI fragments only)."""
    if not pointer.startswith("#") or (len(pointer) > 1 and pointer[1] != "/"):
        raise InvalidSpecError(
            f"{path}: $ref {cut(one_line(pointer), 80)} is not supported; "
            "use a pointer such as #/$defs/NAME"
        )
    found: Any = schema
    for step in unquote(pointer).split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and name.isdigit() and int(name) < len(found):
            found = found[int(name)]
        else:
            found = found.get(name) if isinstance(found, Mapping) else None
        if found is None:
            raise InvalidSpecError(f"{path}: $ref {pointer} leads nowhere")
    return found


def _refuse_remote(uri: str) -> Any:
    raise ValueError(f"remote reference {uri} is never fetched")


@lru_cache(maxsize=256)
def _validator(schema: str, path: str) -> jsonschema_rs.Draft202012Validator:
    """Compile a schema once; catalogues are small and starts are many."""
    try:
        return jsonschema_rs.Draft202012Validator(
            json.loads(schema),
            validate_formats=True,
            retriever=_refuse_remote,
            pattern_options=jsonschema_rs.RegexOptions(),
        )
    except (ValueError, jsonschema_rs.ReferencingError) as error:
        raise InvalidSpecError(f"{path}: {cut(one_line(str(error)), 200)}") from error


def _pointer(path: list[str | int]) -> str:
    return "".join("/" + str(step).replace("~", "~0").replace("/", "~1") for step in path)


def _keyword(error: jsonschema_rs.ValidationError) -> str:
    """The keyword that fails at the pointer: for a bad name it is the one about names."""
    if isinstance(error.kind, jsonschema_rs.ValidationErrorKind.PropertyNames):
        return "propertyNames"
    return str(error.schema_path[-1])


def _message(error: jsonschema_rs.ValidationError) -> str:
    return cut(one_line(error.message), 200)


def _inexact(value: Any, pointer: str) -> Iterator[tuple[str, int]]:
    if isinstance(value, bool):
        return
    if isinstance(value, int) and abs(value) > MAX_EXACT_INTEGER:
        yield pointer, value
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield from _inexact(item, pointer + _pointer([name]))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _inexact(item, f"{pointer}/{index}")
