"""A repeated start is the same start, however it is spelt; any other one is not (R-KEY)."""

import json
import re
import string
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentjobs import codec
from agentjobs.api.agentjob import AgentJob
from agentjobs.api.base import LABEL_PATTERN
from agentjobs.api.names import EventType
from agentjobs.contract.calls import StartRequest
from agentjobs.domain.destinations import Destinations, Rule
from agentjobs.domain.idempotency import (
    Payload,
    job_name,
    payload_of_request,
    payload_of_spec,
)
from agentjobs.domain.observed import Policy
from agentjobs.domain.start import Start, agentjob_of
from tests.builders import CREATED, NAMESPACE, Json, a_template, a_tool, stamp

bounded = settings(max_examples=40, derandomize=True, database=None, deadline=None)
"""The same examples on every run."""
POLICY = Policy(destinations=Destinations(rules=(Rule(hosts=("*",)),)))
TOOL = a_tool(inputSchema={"type": "object"})
CALLER = "system:serviceaccount:search:crawler"
A, B = f"first.{NAMESPACE}", f"second.{NAMESPACE}"


def payload(text: str) -> Payload:
    """What a body asks for, read as the gateway reads it."""
    return payload_of_request(StartRequest.model_validate(codec.parse(text.encode())))


def with_tool(members: str) -> str:
    return f'{{"tool": "indexer", {members}}}'


# --- what is the same


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param(
            '{"tool": "a", "deadline_seconds": 5}',
            '{"deadline_seconds": 5, "tool": "a"}',
            id="R-KEY the order of members",
        ),
        pytest.param(
            with_tool('"arguments": {"a": 1, "b": {"c": 2, "d": 3}}'),
            with_tool('"arguments": {"b": {"d": 3, "c": 2}, "a": 1}'),
            id="R-KEY the order of members inside arguments",
        ),
        pytest.param(
            with_tool('"arguments":{"a":[1,2]}'),
            with_tool('\n\t"arguments" : { "a" : [ 1 , 2 ] }\r\n'),
            id="R-KEY white space",
        ),
        pytest.param(
            with_tool('"arguments": {"n": 1.0}'),
            with_tool('"arguments": {"n": 1}'),
            id="R-KEY 1.0 and 1",
        ),
        pytest.param(
            with_tool('"deadline_seconds": 900.0'),
            with_tool('"deadline_seconds": 900'),
            id="R-KEY 900.0 seconds and 900",
        ),
        pytest.param(
            with_tool('"arguments": {"deep": [{"n": 1e2}]}'),
            with_tool('"arguments": {"deep": [{"n": 100}]}'),
            id="R-KEY 1e2 and 100, deep inside",
        ),
        pytest.param(
            with_tool('"arguments": {"n": 0.10}'),
            with_tool('"arguments": {"n": 1e-1}'),
            id="R-KEY 0.10 and 1e-1",
        ),
        pytest.param(
            with_tool('"arguments": {"n": -0.0}'),
            with_tool('"arguments": {"n": 0}'),
            id="R-KEY -0.0 and 0",
        ),
        pytest.param(
            with_tool(r'"arguments": {"name": "K\u00e4fer \ud83d\ude00 \u002f"}'),
            with_tool('"arguments": {"name": "Käfer 😀 /"}'),
            id="R-KEY a letter and its escape",
        ),
        pytest.param(
            with_tool(r'"arguments": {"\u00e4": 1}'),
            with_tool('"arguments": {"ä": 1}'),
            id="R-KEY a member's name and its escape",
        ),
        pytest.param(
            with_tool(f'"depends_on": ["{A}", "{B}"]'),
            with_tool(f'"depends_on": ["{B}", "{A}"]'),
            id="R-KEY the order of depends_on",
        ),
        pytest.param(
            with_tool(f'"depends_on": ["{A}", "{A}"]'),
            with_tool(f'"depends_on": ["{A}"]'),
            id="R-KEY a dependency that is named twice",
        ),
        pytest.param(
            '{"tool": "a", "arguments": {}}', '{"tool": "a"}', id="R-KEY no arguments, or empty"
        ),
        pytest.param(
            '{"tool": "a", "arguments": null, "callback": null, "template": null}',
            '{"tool": "a"}',
            id="R-KEY absent, or null",
        ),
        pytest.param(
            '{"tool": "a", "depends_on": []}', '{"tool": "a"}', id="R-KEY depends on nothing"
        ),
        pytest.param(
            '{"tool": "a", "namespace": "search"}',
            '{"tool": "a"}',
            id="R-KEY the namespace, which is part of the name",
        ),
        pytest.param(
            with_tool(
                '"callback": {"url": "http://a", "events": ["job_cancelled", "job_completed"]}'
            ),
            with_tool(
                '"callback": {"events": ["job_completed", "job_cancelled"], "url": "http://a"}'
            ),
            id="R-KEY the order of a callback's events",
        ),
    ],
)
def test_it_does_not_count(first: str, second: str) -> None:
    one, other = payload(first), payload(second)
    assert one.digest == other.digest
    assert one.differs_from(other) == ()


# --- what is not


@pytest.mark.parametrize(
    ("first", "second", "members"),
    [
        pytest.param('{"tool": "a"}', '{"tool": "b"}', ["tool"], id="R-KEY another tool"),
        pytest.param(
            with_tool('"arguments": {"a": [1, 2]}'),
            with_tool('"arguments": {"a": [2, 1]}'),
            ["arguments"],
            id="R-KEY the order of a list",
        ),
        pytest.param(
            with_tool('"arguments": {"a": 1}'),
            with_tool('"arguments": {"a": "1"}'),
            ["arguments"],
            id="R-KEY a number and its digits",
        ),
        pytest.param(
            with_tool('"arguments": {"a": 1}'),
            with_tool('"arguments": {"a": true}'),
            ["arguments"],
            id="R-KEY 1 and true, which Python takes for equal",
        ),
        pytest.param(
            with_tool('"arguments": {"a": null}'),
            with_tool('"arguments": {}'),
            ["arguments"],
            id="R-KEY an argument that is null, or absent",
        ),
        pytest.param(
            with_tool('"arguments": {"a": {}}'),
            with_tool('"arguments": {"a": []}'),
            ["arguments"],
            id="R-KEY an empty object and an empty list",
        ),
        pytest.param(
            with_tool('"arguments": {"a": ""}'),
            with_tool('"arguments": {"a": null}'),
            ["arguments"],
            id="R-KEY an empty text and null",
        ),
        pytest.param(
            with_tool('"arguments": {"a": "ä"}'),
            with_tool(r'"arguments": {"a": "a\u0308"}'),
            ["arguments"],
            id="R-KEY a letter and its parts",
        ),
        pytest.param(
            with_tool('"arguments": {"a": 9007199254740993.5}'),
            with_tool('"arguments": {"a": 9007199254740995.5}'),
            ["arguments"],
            id="R-KEY large numbers that are close",
        ),
        pytest.param(
            with_tool('"arguments": {"a": "1.0"}'),
            with_tool('"arguments": {"a": "1"}'),
            ["arguments"],
            id="R-KEY texts that look like numbers",
        ),
        pytest.param(
            with_tool(f'"depends_on": ["{A}"]'),
            with_tool(f'"depends_on": ["{A}", "{B}"]'),
            ["depends_on"],
            id="R-KEY one dependency more",
        ),
        pytest.param(
            with_tool('"deadline_seconds": 5'),
            with_tool('"pending_deadline_seconds": 5'),
            ["deadline_seconds", "pending_deadline_seconds"],
            id="R-KEY the same number for another deadline",
        ),
        pytest.param(
            with_tool('"callback": {"url": "http://a"}'),
            with_tool('"callback": {"url": "http://a", "events": []}'),
            ["callback"],
            id="R-KEY a callback for no events, or for the usual ones",
        ),
        pytest.param(
            with_tool('"callback": {"url": "http://a"}'),
            with_tool('"callback": {"url": "http://b"}, "deadline_seconds": 9'),
            ["callback", "deadline_seconds"],
            id="R-KEY two members at once",
        ),
        pytest.param(
            '{"template": {"spec": {"parallelism": 1}}}',
            '{"template": {"spec": {"parallelism": 2}}}',
            ["template"],
            id="R-KEY another template",
        ),
        pytest.param(
            '{"tool": "a"}',
            '{"template": {}}',
            ["tool", "template"],
            id="R-KEY a tool and a template",
        ),
    ],
)
def test_it_counts_and_is_named(first: str, second: str, members: list[str]) -> None:
    one, other = payload(first), payload(second)
    assert one.digest != other.digest
    assert set(one.differs_from(other)) == set(members)
    assert set(other.differs_from(one)) == set(members)


def test_r_key_a_digest_is_what_the_custom_resource_says() -> None:
    assert re.fullmatch(r"sha256:[0-9a-f]{64}", payload('{"tool": "a"}').digest)


# --- for all requests

TEXTS = st.text(st.characters(codec="utf-8"), max_size=12)
NUMBERS = st.one_of(
    st.integers(-(2**53), 2**53), st.floats(allow_nan=False, allow_infinity=False, width=64)
)
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(TEXTS, inner, max_size=4)),
    max_leaves=12,
)
OBJECTS = st.dictionaries(TEXTS, VALUES, max_size=4)
LABELS = st.from_regex(r"[a-z0-9]([-a-z0-9]{0,20}[a-z0-9])?", fullmatch=True)
SECONDS = st.integers(1, 366 * 24 * 3600)
IDS = LABELS.map(lambda name: f"{name}.{NAMESPACE}")
TEMPLATES = st.dictionaries(
    st.text(string.ascii_lowercase, min_size=1, max_size=8),
    st.text(string.ascii_letters, max_size=8),
    max_size=3,
).map(lambda annotations: {**a_template(), "metadata": {"annotations": annotations}})


def some(**members: st.SearchStrategy[Any]) -> st.SearchStrategy[Json]:
    """Some of these members."""
    return st.fixed_dictionaries({}, optional=members)


LIMITS = some(
    depends_on=st.lists(IDS, max_size=4),
    deadline_seconds=SECONDS,
    pending_deadline_seconds=SECONDS,
    callback=st.fixed_dictionaries(
        {"url": LABELS.map(lambda host: f"https://{host}.example.net/events")},
        optional={"events": st.none() | st.lists(st.sampled_from(list(EventType)), max_size=4)},
    ),
)
STARTS = st.one_of(
    st.tuples(st.just({"tool": TOOL.metadata.name}), some(arguments=OBJECTS), LIMITS),
    st.tuples(TEMPLATES.map(lambda each: {"template": each}), LIMITS),
).map(lambda parts: {name: value for part in parts for name, value in part.items()})


def request(body: Json) -> StartRequest:
    return StartRequest.model_validate(codec.parse(json.dumps(body).encode()))


def shuffled(value: Any, order: Any) -> Any:
    """The same JSON value, members in another order."""
    if isinstance(value, dict):
        names = list(value)
        order.shuffle(names)
        return {name: shuffled(value[name], order) for name in names}
    return [shuffled(each, order) for each in value] if isinstance(value, list) else value


@bounded
@given(STARTS, st.randoms(use_true_random=False), st.booleans(), st.sampled_from([None, 1]))
def test_r_key_no_spelling_of_a_request_counts(
    body: Json, order: Any, escaped: bool, indent: int | None
) -> None:
    text = json.dumps(shuffled(body, order), ensure_ascii=escaped, indent=indent)
    assert payload(text).digest == payload_of_request(request(body)).digest


@bounded
@given(STARTS, STARTS)
def test_r_key_digests_are_equal_exactly_if_nothing_differs(first: Json, second: Json) -> None:
    one, other = payload_of_request(request(first)), payload_of_request(request(second))
    assert (one.digest == other.digest) == (not one.differs_from(other))


@bounded
@given(STARTS, st.sampled_from([field.name for field in fields(Payload)]))
def test_r_key_exactly_what_was_changed_is_named(body: Json, member: str) -> None:
    first = payload_of_request(request(body))
    values = {field.name: getattr(first, field.name) for field in fields(Payload)}
    second = Payload(**{**values, member: ["changed", values[member]]})
    assert second.differs_from(first) == (member,)


@bounded
@given(STARTS)
def test_r_key_what_was_asked_first_is_read_back_from_the_agentjob(body: Json) -> None:
    asked = request(body)
    tool = TOOL if asked.tool else None
    made = agentjob_of(Start(asked, NAMESPACE, "job-a", CALLER, tool), POLICY, CREATED)
    made["metadata"]["creationTimestamp"] = stamp(0)
    kept = AgentJob.from_json(codec.loads(codec.dumps(made)))
    first, again = payload_of_spec(kept.spec, NAMESPACE), payload_of_request(asked)
    assert again.differs_from(first) == ()
    assert kept.spec.idempotency is not None
    assert kept.spec.idempotency.digest == first.digest == again.digest
    assert kept.spec.idempotency.caller == kept.spec.requested_by == CALLER


# --- names

KEYS = st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E), min_size=1, max_size=255)
NAMED = st.tuples(st.binary(min_size=1, max_size=2), LABELS, st.text(min_size=1), KEYS)


@bounded
@given(NAMED, NAMED)
def test_r_key_every_key_of_every_caller_has_a_name_of_its_own(
    first: tuple[bytes, str, str, str], second: tuple[bytes, str, str, str]
) -> None:
    name = job_name(*first)
    assert re.fullmatch(LABEL_PATTERN, name)
    assert len(name) <= 63 - len("-1-abcde"), "its Jobs and pods have names that are made of it"
    assert (name == job_name(*second)) == (first == second)


@pytest.mark.parametrize(
    "other",
    [
        pytest.param((b"other", "search", "anna", "key-1"), id="R-KEY another name key"),
        pytest.param((b"secret", "shop", "anna", "key-1"), id="R-KEY another namespace"),
        pytest.param((b"secret", "search", "berta", "key-1"), id="R-KEY another caller"),
        pytest.param((b"secret", "search", "anna", "key-2"), id="R-KEY another key"),
        pytest.param((b"secret", "search", "ann", "akey-1"), id="R-KEY the same letters"),
        pytest.param((b"secret", "search", 'anna","key-1', ""), id="R-KEY the same JSON"),
    ],
)
def test_a_name_differs_for(other: tuple[bytes, str, str, str]) -> None:
    assert job_name(b"secret", "search", "anna", "key-1") != job_name(*other)


def test_r_key_a_name_never_changes() -> None:
    """A release that named jobs otherwise would start what runs already."""
    name = job_name(b"\0" * 32, "search", CALLER, "key-1")
    assert name == "job-yt62hbxctg5sr646wfxap6laum"
