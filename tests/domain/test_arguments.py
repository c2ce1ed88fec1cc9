"""A tool's arguments: checked, completed, never coerced and never run (R-ARGS)."""

import json
import time
from itertools import pairwise
from typing import Any

import pytest

from agentjobs.domain.accept import accept
from agentjobs.domain.arguments import (
    check_input_schema,
    describe,
    encode,
    environment,
    faults_of,
    fill_defaults,
)
from agentjobs.domain.errors import InvalidSpecError
from agentjobs.domain.observed import Policy
from tests.builders import Json, a_template, a_tool, an_agentjob, observed
from tests.jobs import load


def examples(kind: str) -> list[Any]:
    found = []
    for name in load.names("tools"):
        tool, cases = load.documents("tools", name)
        for number, case in enumerate(cases[kind], start=1):
            schema = tool["spec"]["inputSchema"]
            found.append(pytest.param(schema, case, id=f"{name}, {kind} {number}"))
    return found


@pytest.mark.parametrize("name", load.names("tools"))
def test_r_tool_the_schema_of_each_catalogue_entry_is_usable(name: str) -> None:
    check_input_schema(load.manifest("tools", name)["spec"]["inputSchema"])


@pytest.mark.parametrize(("schema", "case"), examples("valid"))
def test_r_args_valid_arguments_are_taken_and_completed(schema: Json, case: Json) -> None:
    filled = fill_defaults(schema, case["arguments"])
    assert faults_of(schema, filled) == []
    assert filled == case.get("filled", filled)
    assert case["arguments"].items() <= filled.items()


@pytest.mark.parametrize(("schema", "case"), examples("invalid"))
def test_r_args_every_fault_is_named_by_pointer_and_keyword(schema: Json, case: Json) -> None:
    found = faults_of(schema, fill_defaults(schema, case["arguments"]))
    places = {(fault.pointer, fault.keyword) for fault in found}
    assert {tuple(fault) for fault in case["faults"]} <= places


def test_r_args_no_fault_changes_what_was_given() -> None:
    given = {"n": "7", "deep": {"a": [1, None]}}
    schema = {"properties": {"n": {"type": "integer"}, "more": {"default": [1]}}}
    faults_of(schema, fill_defaults(schema, given))
    assert given == {"n": "7", "deep": {"a": [1, None]}}


@pytest.mark.parametrize(
    ("arguments", "pointers"),
    [
        pytest.param({"n": 2**53}, [], id="the largest exact integer"),
        pytest.param({"n": -(2**53)}, [], id="the smallest exact integer"),
        pytest.param({"n": 2**53 + 1}, ["/n"], id="beyond it"),
        pytest.param({"n": -(2**53) - 1}, ["/n"], id="below it"),
        pytest.param({"a/b": [{"~": 2**60}]}, ["/a~1b/0/~0"], id="deep inside, names escaped"),
        pytest.param({"yes": True, "half": 0.5, "text": str(2**60)}, [], id="no integers"),
    ],
)
def test_r_args_integers_that_would_not_stay_exact_are_refused(
    arguments: Json, pointers: list[str]
) -> None:
    assert [fault.pointer for fault in faults_of({}, arguments)] == pointers


@pytest.mark.parametrize(
    ("rule", "value"),
    [
        ({"format": "date-time"}, "yesterday"),
        ({"format": "date"}, "2026-02-30"),
        ({"format": "uri"}, "no uri"),
        ({"format": "email"}, "nobody"),
        ({"format": "uuid"}, "1234"),
        ({"format": "ipv4"}, "300.1.1.1"),
    ],
    ids=str,
)
def test_r_args_formats_are_asserted(rule: Json, value: str) -> None:
    (fault,) = faults_of({"properties": {"x": rule}}, {"x": value})
    assert (fault.pointer, fault.keyword) == ("/x", "format")


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        pytest.param({"type": "array"}, ["type", "object"], id="not for objects"),
        pytest.param({"properties": 5}, ["inputSchema"], id="no schema"),
        pytest.param({"properties": {"a": {"type": "objekt"}}}, ["objekt"], id="no type"),
        pytest.param(
            {"properties": {"idempotency_key": {}}},
            ["idempotency_key", "otherwise"],
            id="a name that the catalogue needs",
        ),
        pytest.param(
            {"$ref": "https://elsewhere.example.net/s.json"},
            ["https://elsewhere.example.net/s.json"],
            id="a remote reference",
        ),
        pytest.param(
            {"properties": {"a": {"$ref": "file:///etc/passwd"}}}, ["file:"], id="a local file"
        ),
        pytest.param({"properties": {"a": {"$ref": "#/$defs/b"}}}, ["$defs"], id="no definition"),
        pytest.param(
            {"properties": {"a": {"pattern": "(x)\\1"}}}, ["regex"], id="a back-reference"
        ),
        pytest.param({"properties": {"a": {"pattern": "(?=x)"}}}, ["regex"], id="a look-ahead"),
    ],
)
def test_r_tool_a_schema_that_cannot_be_used_says_why(schema: Json, words: list[str]) -> None:
    with pytest.raises(InvalidSpecError) as error:
        check_input_schema(schema)
    assert not [word for word in words if word not in str(error.value)]
    assert len(str(error.value)) < 300
    assert str(error.value).isprintable()


def doubled(levels: int) -> Json:
    """A chain of definitions of which each refers twice to the next: 2 ** levels in all."""
    names = [f"d{number}" for number in range(levels)]
    definitions: Json = {
        name: {"allOf": [{"$ref": f"#/$defs/{after}"}] * 2}
        for name, after in pairwise([*names, "last"])
    }
    return {"$defs": definitions | {"last": {"minLength": 1}}, "$ref": "#/$defs/d0"}


@pytest.mark.parametrize(
    "schema",
    [
        pytest.param({"$ref": "#"}, id="R-ARGS a schema that is itself"),
        pytest.param(
            {"properties": {"a": {"allOf": [{"$ref": "#"}, {"$ref": "#"}]}}},
            id="R-ARGS a schema that doubles with each level of the arguments",
        ),
        pytest.param(doubled(40), id="R-ARGS a chain of references that doubles at each link"),
    ],
)
def test_a_schema_that_would_take_for_ever_is_refused_at_once(schema: Json) -> None:
    began = time.perf_counter()
    with pytest.raises(InvalidSpecError, match="for ever"):
        check_input_schema(schema)
    assert time.perf_counter() - began < 1


def test_r_args_a_chain_of_references_of_ordinary_length_is_taken() -> None:
    check_input_schema(doubled(8))


@pytest.mark.parametrize("pointer", ["#name", "other.json", "#/$defs/none"])
def test_r_args_a_reference_that_leads_nowhere_says_so(pointer: str) -> None:
    with pytest.raises(InvalidSpecError, match=r"\$ref"):
        check_input_schema({"properties": {"a": {"$ref": pointer}}})


def test_r_args_a_catastrophic_pattern_takes_linear_time() -> None:
    schema = {"properties": {"a": {"pattern": "^(a+)+$"}}}
    began = time.perf_counter()
    (fault,) = faults_of(schema, {"a": "a" * 10_000 + "!"})
    assert fault.keyword == "pattern"
    assert time.perf_counter() - began < 2


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"text": "a"}, {"TEXT": "a"}),
        ({"two-words": 5}, {"TWO_WORDS": "5"}),
        ({"_x9": 0.5}, {"_X9": "0.5"}),
        ({"on": True, "off": False}, {"ON": "true", "OFF": "false"}),
        ({"none": None, "list": [1], "map": {"a": 1}}, {}),
        ({"cost": "$5 $(HOME) $$(X) $$"}, {"COST": "$$5 $$(HOME) $$$$(X) $$$$"}),
        ({"Größe": "x", "语言": "y", "\u017f": "z"}, {}),
        ({"9lives": "x", "with space": "y", "a.b": "z", "": "w", "new\n": "v"}, {}),
        ({"zero": "a\0b"}, {}),
        ({"lines": "one\ntwo\t'\"\\ "}, {"LINES": "one\ntwo\t'\"\\ "}),
    ],
    ids=lambda value: "" if value is None else str(sorted(value))[:50],
)
def test_r_args_scalars_have_a_variable_with_dollars_doubled(
    arguments: Json, expected: dict[str, str]
) -> None:
    values, warnings = environment(arguments)
    assert values == {f"AGENTJOBS_ARG_{name}": value for name, value in expected.items()}
    assert warnings == []


@pytest.mark.parametrize(
    "names",
    [("max-words", "max_words"), ("a", "A"), ("x-y", "x_y", "X-Y")],
    ids=" ".join,
)
def test_r_args_names_that_collide_have_no_variable_and_a_warning(names: tuple[str, ...]) -> None:
    values, (warning,) = environment(dict.fromkeys(names, 1) | {"other": 2})
    assert values == {"AGENTJOBS_ARG_OTHER": "2"}
    assert all(name in warning for name in names)


def test_r_args_a_warning_is_never_longer_than_the_status_allows() -> None:
    long = "a" * 5000
    _, (warning,) = environment({f"{long}-x": 1, f"{long}_x": 2})
    assert len(warning) <= 256


def test_r_args_the_file_has_every_byte() -> None:
    arguments = {"q": "'$(X)' \"$HOME\" `id` \\ \u2028 😀\n ", "n": [1, None, {"ü": 0.1}]}
    assert json.loads(encode(arguments)) == arguments
    assert list(json.loads(encode({"b": 1, "a": 2}))) == ["b", "a"]


def test_r_args_a_refusal_is_one_short_sentence_with_every_pointer() -> None:
    schema = load.manifest("tools", "site-snapshot")["spec"]["inputSchema"]
    given = load.manifest("refused", "broken-arguments")["spec"]["arguments"]
    text = describe(faults_of(schema, fill_defaults(schema, given)))
    assert text.startswith("spec.arguments: 6 faults at ")
    for pointer in ("/limit", "/follow", "/headers/X-Id", "/starts/1", "/starts", '""'):
        assert pointer in text
    assert len(text) <= 256


def test_r_args_a_refusal_does_not_echo_long_values() -> None:
    secret = "s3cr3t" * 1000
    schema = {"additionalProperties": {"type": "integer"}}
    text = describe(faults_of(schema, {f"name{n}": secret for n in range(50)}))
    assert text.startswith("spec.arguments: 50 faults at /name0, /name1")
    assert len(text) <= 256


@pytest.mark.parametrize(
    ("size", "taken"),
    [pytest.param(100, True, id="exactly the limit"), pytest.param(101, False, id="one more")],
)
def test_r_args_their_size_is_limited(size: int, taken: bool) -> None:
    arguments = {"a": "é" * 4}
    arguments["a"] += "x" * (size - len(encode(arguments).encode()))
    tool = a_tool(inputSchema={})
    job = an_agentjob(toolRef={"name": "indexer"}, arguments=arguments)
    seen = observed(job, tool=tool, policy=Policy(max_arguments=100))
    if taken:
        assert accept(seen).arguments == arguments
        return
    with pytest.raises(InvalidSpecError, match=r"spec\.arguments: 101 bytes .* 100 .*reference"):
        accept(seen)


def test_r_args_a_tool_without_a_schema_takes_none() -> None:
    job = an_agentjob(toolRef={"name": "indexer"}, arguments={"a": 1})
    with pytest.raises(InvalidSpecError, match=r"spec\.arguments: 1 fault"):
        accept(observed(job, tool=a_tool(template=a_template())))
