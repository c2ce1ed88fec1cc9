"""JSON of any depth that the API server stores passes through (R-LEVEL)."""

import sys

import pytest

from agentjobs import codec
from agentjobs.cache import Cache, Key
from agentjobs.domain.observed import Observed
from agentjobs.domain.reconcile import decide
from tests.builders import an_agentjob, at


def nested(levels: int) -> dict[str, object]:
    value: dict[str, object] = {}
    for _ in range(levels):
        value = {"a": value}
    return value


@pytest.fixture(autouse=True)
def deep() -> None:
    codec.allow_depth()
    assert sys.getrecursionlimit() >= 2 * codec.DEEPEST


@pytest.mark.parametrize("levels", [1, 253, 300, 1500, 9_900])
def test_r_level_json_of_any_depth_is_read_as_it_was_written(levels: int) -> None:
    raw = b'{"a":' * levels + b"{}" + b"}" * levels
    assert codec.dumps(codec.loads(raw)) == raw


def test_what_is_no_json_is_refused() -> None:
    with pytest.raises(ValueError, match=r"."):
        codec.loads(b"{")
    with pytest.raises(TypeError):
        codec.dumps({"a": object()})


@pytest.mark.parametrize(
    "number", [2**53 + 1, 2**63, 2**64, -(2**63) - 1, 10**300], ids=lambda n: f"{n:.3g}"
)
def test_r_args_an_integer_that_a_stranger_sends_stays_what_it_is(number: int) -> None:
    read = codec.parse(b'{"n": %d}' % number)["n"]
    assert (type(read), read) == (int, number)


@pytest.mark.parametrize(
    "raw",
    [
        pytest.param(b'{"n": %s}' % (b"1" * 5000), id="a number that takes for ever"),
        pytest.param(b"[" * 1025 + b"]" * 1025, id="deeper than anybody needs"),
        pytest.param(b"[1e999, 1111111111111111111]", id="an infinite number"),
        pytest.param(b"[NaN, 1111111111111111111]", id="no number"),
        pytest.param(b'["\\ud800", 1111111111111111111]', id="half a character"),
        pytest.param(b"\xff", id="no UTF-8"),
        pytest.param(b'{"a": 1, "b": {"c": 1, "c": 1}}', id="a member twice"),
        pytest.param(rb'{"a": 1, "\u0061": 2}', id="a member twice, spelled otherwise"),
    ],
)
def test_what_a_stranger_sends_is_refused_if_anybody_would_stumble_over_it(raw: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        codec.parse(raw)


def test_what_is_deep_and_holds_a_large_number_is_refused_as_such() -> None:
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(400)
    try:
        with pytest.raises(ValueError, match="nested too deeply"):
            codec.parse(b"[" * 900 + b"11111111111111111111" + b"]" * 900)
    finally:
        sys.setrecursionlimit(limit)


@pytest.mark.parametrize("levels", [300, 9_900])
def test_r_level_one_object_nested_beyond_reason_ends_by_itself_and_stops_nobody(
    levels: int,
) -> None:
    job = an_agentjob()
    body = job.to_json() | {"spec": {"template": {"spec": nested(levels)}}}
    cache = Cache()
    cache.put_agentjob(codec.loads(codec.dumps(body)))
    kept = cache.records[Key(job.metadata.namespace, job.metadata.name)].parse()
    plan = decide(Observed(now=at(1), job=kept))
    assert plan.status is not None
    assert plan.status.cause is not None
    assert plan.status.cause.code == "invalid_spec"
    assert "levels deep" in plan.status.cause.message
