"""Catalogue entries: usable or not, resolved once, limits and defaults (R-TOOL)."""

from typing import Any

import pytest

from agentjobs.api.agenttool import AgentTool
from agentjobs.domain.accept import accept, check_tool, digest_of
from agentjobs.domain.errors import InvalidSpecError
from agentjobs.domain.plan import CreateJob
from agentjobs.domain.quantity import parse_quantity
from agentjobs.domain.reconcile import decide
from tests.builders import Json, a_template, a_tool, an_agentjob, at, observed, stamp
from tests.domain.situations import told
from tests.jobs import load

REF: Json = {"kind": "AgentTool", "name": "indexer"}
ASK = {"action": "a", "object": "b", "value": "c", "consequence": "d"}


def sized(**resources: Json) -> Json:
    """A template whose container has resources."""
    container = {"name": "main", "image": "images.example.net/base:1", "resources": resources}
    return a_template(containers=[container])


def repeating(**spec: Any) -> Json:
    template = a_template()
    template["spec"] |= spec
    return template


def loaded(name: str) -> AgentTool:
    entry = load.manifest("tools", name)
    entry["metadata"] |= {"uid": name, "generation": 1, "creationTimestamp": stamp(0)}
    return AgentTool.from_json(entry)


@pytest.mark.parametrize("name", sorted({*load.names("tools")} - {"table-dump", "stress-run"}))
def test_r_tool_each_entry_is_usable(name: str) -> None:
    check_tool(loaded(name))


@pytest.mark.parametrize("name", ["table-dump", "stress-run"])
def test_r_tool_an_entry_that_asks_people_is_never_run_without_asking(name: str) -> None:
    with pytest.raises(InvalidSpecError, match=r"approval and spec\.confirm.*not supported"):
        check_tool(loaded(name))


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        pytest.param({"template": {"kind": "Job"}}, ["spec.template.kind"], id="no template"),
        pytest.param(
            {"template": sized(requests={"cpu": "9"}), "limits": {"resources": {"cpu": "8"}}},
            ["requests.cpu", "9", "limits.resources.cpu", "8", "main"],
            id="a request above its own limit",
        ),
        pytest.param(
            {
                "template": sized(limits={"memory": "2Gi"}),
                "limits": {"resources": {"memory": "2G"}},
            },
            ["limits.memory", "2Gi"],
            id="a limit above its own limit, by suffix",
        ),
        pytest.param(
            {"template": sized(limits={"cpu": "NaN"}), "limits": {"resources": {"cpu": "8"}}},
            ["NaN", "quantity"],
            id="no quantity",
        ),
        pytest.param(
            {"template": repeating(backoffLimit=2), "retry": {"maxAttempts": 2}},
            ["retry", "backoffLimit"],
            id="retry beside backoffLimit",
        ),
        pytest.param({"inputSchema": {"type": "string"}}, ["inputSchema.type"], id="bad schema"),
        pytest.param(
            {"inputSchema": {"properties": {"idempotency_key": {"type": "string"}}}},
            ["idempotency_key"],
            id="a schema with a reserved property",
        ),
        pytest.param({"confirm": ASK}, ["confirm"], id="a confirmation"),
        pytest.param({"approval": ASK | {"approvers": ["user:a"]}}, ["approval"], id="an approval"),
    ],
)
def test_r_tool_what_makes_an_entry_unusable(spec: Json, words: list[str]) -> None:
    with pytest.raises(InvalidSpecError) as error:
        check_tool(a_tool(**spec))
    assert not [word for word in words if word not in str(error.value)]
    plan = decide(observed(an_agentjob(toolRef=REF), tool=a_tool(**spec)))
    assert told(plan) == "failed invalid_spec unstarted"
    assert plan.status is not None
    assert plan.status.cause is not None
    assert "AgentTool indexer is unusable" in plan.status.cause.message


@pytest.mark.parametrize(
    "spec",
    [
        {
            "template": sized(requests={"cpu": "8", "memory": "1Gi"}),
            "limits": {"resources": {"cpu": 8}},
        },
        {"template": sized(requests={"cpu": "8000m"}), "limits": {"resources": {"cpu": "8"}}},
        {"template": repeating(backoffLimit=2), "retry": {"maxAttempts": 1}},
        {"template": repeating(backoffLimit=0), "retry": {"maxAttempts": 3}},
    ],
    ids=["other resources are free", "the same by another suffix", "one attempt", "no repetition"],
)
def test_r_tool_what_does_not(spec: Json) -> None:
    check_tool(a_tool(**spec))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("500m", "0.5"),
        ("2", "2"),
        pytest.param(2, "2", id="a whole number"),
        ("1.5", "1.5"),
        ("4Gi", str(4 * 2**30)),
        ("1e3", "1000"),
        ("1E", str(10**18)),
        ("1E3", "1000"),
        ("100u", "0.0001"),
    ],
)
def test_quantities_are_read_as_kubernetes_writes_them(text: Any, value: str) -> None:
    assert float(parse_quantity(text)) == float(value)


@pytest.mark.parametrize("text", ["NaN", "Infinity", "1_000", " 5", "1e9999999999", "", "Gi", "x"])
def test_what_is_no_quantity_is_refused(text: str) -> None:
    with pytest.raises(InvalidSpecError, match="quantity"):
        parse_quantity(text)


@pytest.mark.parametrize(
    ("job", "words"),
    [
        pytest.param({"deadlineSeconds": 61}, ["deadlineSeconds", "61", "60"], id="deadline"),
        pytest.param(
            {"pendingDeadlineSeconds": 31},
            ["pendingDeadlineSeconds", "31", "30"],
            id="pending deadline",
        ),
        pytest.param({"retry": {"maxAttempts": 2}}, ["retry", "backoffLimit"], id="retry"),
    ],
)
def test_r_tool_more_than_the_entry_allows_is_refused_not_cut(job: Json, words: list[str]) -> None:
    limits = {"deadlineSeconds": 60, "pendingDeadlineSeconds": 30}
    tool = a_tool(template=repeating(backoffLimit=1), limits=limits)
    with pytest.raises(InvalidSpecError) as error:
        accept(observed(an_agentjob(toolRef=REF, **job), tool=tool))
    assert not [word for word in words if word not in str(error.value)]


@pytest.mark.parametrize(
    ("tool", "expected"),
    [
        pytest.param({}, 60, id="the platform's default is above it"),
        pytest.param({"defaults": {"deadlineSeconds": 50}}, 50, id="its own default is below it"),
        pytest.param({"defaults": {"deadlineSeconds": 70}}, 60, id="its own default is above it"),
    ],
)
def test_r_tool_its_largest_deadline_holds_where_the_job_says_nothing(
    tool: Json, expected: int
) -> None:
    limited = a_tool(limits={"deadlineSeconds": 60}, **tool)
    assert accept(observed(an_agentjob(toolRef=REF), tool=limited)).deadline_at == at(expected)


def test_r_tool_its_defaults_hold_where_the_job_says_nothing() -> None:
    defaults = {
        "deadlineSeconds": 50,
        "pendingDeadlineSeconds": 20,
        "ttlSecondsAfterFinished": 9,
        "resources": {"limits": {"cpu": 1}},
    }
    accepted = accept(observed(an_agentjob(toolRef=REF), tool=a_tool(defaults=defaults)))
    assert accepted.deadline_at == at(50)
    assert accepted.effective.pending_deadline_seconds == 20
    assert accepted.effective.ttl_seconds_after_finished == 9
    own = an_agentjob(toolRef=REF, deadlineSeconds=70, pendingDeadlineSeconds=7)
    accepted = accept(observed(own, tool=a_tool(defaults=defaults)))
    assert accepted.deadline_at == at(70)
    assert accepted.effective.pending_deadline_seconds == 7


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        pytest.param(a_template(), {"limits": {"cpu": "1"}}, id="none in the template"),
        pytest.param(sized(limits={"cpu": "2"}), {"limits": {"cpu": "2"}}, id="the template's own"),
    ],
)
def test_r_tool_default_resources(template: Json, expected: Json) -> None:
    tool = a_tool(template=template, defaults={"resources": {"limits": {"cpu": 1}}})
    (action,) = decide(observed(an_agentjob(toolRef=REF), tool=tool)).actions
    assert isinstance(action, CreateJob)
    pod = action.body["spec"]["template"]["spec"]
    assert pod["containers"][0]["resources"] == expected


@pytest.mark.parametrize(
    ("tool", "words"),
    [
        pytest.param(None, ["no AgentTool indexer", "namespace search"], id="it is gone"),
        pytest.param(
            a_tool(template=sized(limits={"cpu": "2"}), generation=5),
            ["generation 4", "generation 5", "indexer"],
            id="its template was changed",
        ),
    ],
)
def test_r_tool_what_was_accepted_is_what_starts(tool: AgentTool | None, words: list[str]) -> None:
    digest = digest_of(a_tool().spec.template, {})
    was = {"uid": "tool-indexer", "generation": 4, "digest": digest}
    job = an_agentjob(toolRef=REF, status={"state": "queued", "tool": was})
    plan = decide(observed(job, tool=tool))
    assert told(plan) == "failed invalid_spec unstarted"
    assert plan.status is not None
    assert plan.status.cause is not None
    assert not [word for word in words if word not in plan.status.cause.message]


def test_r_tool_a_change_that_does_not_matter_to_this_job_is_none() -> None:
    digest = digest_of(a_tool().spec.template, {})
    was = {"uid": "tool-indexer", "generation": 4, "digest": digest}
    job = an_agentjob(toolRef=REF, status={"state": "queued", "tool": was})
    later = a_tool(description="Another text.", generation=9)
    assert told(decide(observed(job, tool=later))) == "queued (creating) | CreateJob"


def test_r_tool_the_digest_is_of_template_and_arguments_in_any_order_of_names() -> None:
    assert digest_of({"a": 1, "b": 2}, {}) == digest_of({"b": 2, "a": 1}, {})
    different = [digest_of(t, a) for t in ({}, {"a": 1}) for a in ({}, {"a": 1})]
    assert len(set(different)) == 4
