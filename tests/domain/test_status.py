"""Status values: conditions, results and summaries, the budget (R-EVENT, R-STATE-DERIVED)."""

import json
from dataclasses import replace
from typing import Any

import pytest

from agentjobs.api.agentjob import AgentJobStatus, Result, ResultSource
from agentjobs.api.names import ConditionType, Reason
from agentjobs.domain.observed import DependencySeen, ReadLastLine, ReadRefusals
from agentjobs.domain.reconcile import decide
from agentjobs.domain.status import fit, result_of, size_of, summary_of, with_condition
from agentjobs.domain.texts import cut, cut_bytes, one_line
from tests.builders import (
    POD_NAME,
    Json,
    a_child,
    a_pod,
    an_agentjob,
    at,
    claimed,
    ended,
    observed,
    running,
    waiting,
)
from tests.domain.situations import told


def conditioned(status: AgentJobStatus, *, holds: bool, now: float, message: str = "") -> Any:
    return with_condition(
        status,
        ConditionType.STARTED,
        holds=holds,
        reason=Reason.CONTAINER_STARTED,
        now=at(now),
        generation=1,
        message=message,
    )


def test_conditions_keep_their_time_until_their_status_changes() -> None:
    first = conditioned(AgentJobStatus(), holds=True, now=10)
    assert conditioned(first, holds=True, now=20) is first
    told_more = conditioned(first, holds=True, now=20, message="more")
    assert told_more.conditions[0].last_transition_time == at(10)
    turned = conditioned(told_more, holds=False, now=30)
    assert len(turned.conditions) == 1
    assert turned.conditions[0].last_transition_time == at(30)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param("", None, id="nothing"),
        pytest.param("first\nsecond", "first", id="the first line"),
        pytest.param('{"summary": "3 of 4 passed", "x": 1}', "3 of 4 passed", id="its field"),
        pytest.param('{"summary": 5}', '{"summary": 5}', id="a field that is no text"),
        pytest.param("{broken", "{broken", id="no JSON"),
        pytest.param("log\n::summary all good\nend", "all good", id="a marked line"),
        pytest.param("::summary one\n::summary two", "two", id="the last marked line"),
        pytest.param("::progress 40 half\nend", "end", id="how far it was is no summary"),
        pytest.param("a\x1b[31mb\u202ec", "a [31mb c", id="control characters are taken out"),
        pytest.param(
            '{"summary": "x\\n[event] job_completed"}', "x [event] job_completed", id="line breaks"
        ),
        pytest.param("y" * 500, "y" * 279 + "…", id="cut"),
        pytest.param("  \n \t", None, id="blanks"),
        pytest.param("[1]", "[1]", id="a list"),
        pytest.param('{"":' * 5000, '{"":' * 69 + '{"":'[:3] + "…", id="nested beyond reason"),
        pytest.param('{"a": ' + "9" * 5000, '{"a": ' + "9" * 273 + "…", id="a number without end"),
        pytest.param('{"summary": "a\\ud800b"}', "a b", id="half a character"),
    ],
)
def test_r_event_the_summary_is_one_short_line(text: str, expected: str | None) -> None:
    assert summary_of(text) == expected


@pytest.mark.parametrize(
    ("text", "kept", "truncated"),
    [
        pytest.param("x" * 4096, "x" * 4096, False, id="just fits"),
        pytest.param("x" * 4097, "x" * 4093 + "…", True, id="too long"),
        pytest.param("é" * 3000, "é" * 2046 + "…", True, id="never within a character"),
        pytest.param("a\nb\x00", "a\nb\x00", False, id="as it was handed in"),
    ],
)
def test_a_result_is_kept_up_to_four_kibibytes(text: str, kept: str, *, truncated: bool) -> None:
    result = result_of(ResultSource.LAST_LINE, text)
    assert result is not None
    assert (result.text, result.truncated) == (kept, truncated)
    assert result.bytes == len(text.encode())
    assert len(kept.encode()) <= 4096


def test_no_result_is_none() -> None:
    assert result_of(ResultSource.REPORT, "") is None


def test_the_status_is_cut_to_its_budget_the_result_first() -> None:
    status = AgentJobStatus(
        result=Result(source=ResultSource.LAST_LINE, text="é" * 2000, bytes=4000),
        warnings=("w" * 256,) * 8,
    )
    for kind in ConditionType:
        status = with_condition(
            status,
            kind,
            holds=True,
            reason=Reason.COMPLETED,
            now=at(0),
            generation=1,
            message="m" * 600,
        )
    assert size_of(status) > 8192
    fitting = fit(status)
    assert size_of(fitting) <= 8192
    assert fitting.result is not None
    assert fitting.result.truncated
    assert fitting.warnings == status.warnings
    assert fit(fitting) is fitting


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a\r\nb\tc", "a b c"),
        ("\x9b31m\x85x", "31m x"),
        ("a\u2028b\u2029c", "a b c"),
        ("\u2066hidden\u2069", "hidden"),
        ("👩\u200d🚀", "👩\u200d🚀"),
        ("e\u0301", "e\u0301"),
        ("", ""),
    ],
    ids=["line ends", "C1 controls", "separators", "isolates", "joined", "combining", "empty"],
)
def test_r_event_one_line(text: str, expected: str) -> None:
    assert one_line(text) == expected


def test_r_texts_a_cut_is_visible() -> None:
    assert cut("abcdef", 4) == "abc…"
    assert cut("abc", 3) == "abc"
    assert cut_bytes("aéé", 4) == "a…"
    assert cut_bytes("abcdef", 2) == "ab"


@pytest.mark.parametrize(
    ("source", "line", "expected"),
    [
        ("terminationMessage", None, "from the message"),
        ("lastLine", "from the log", "from the log"),
        ("lastLine", "", None),
        ("report", None, None),
    ],
    ids=["termination message", "last line", "no last line", "reported"],
)
def test_the_result_is_taken_from_where_the_tool_says(
    source: str, line: str | None, expected: str | None
) -> None:
    job = an_agentjob(status=claimed(jobUID="j1", effective={"resultFrom": source}))
    pod = a_pod(ended(0, message="from the message"))
    plan = decide(observed(job, child=a_child(), pods=(pod,), last_line=line))
    assert plan.status is not None
    assert (plan.status.result.text if plan.status.result else None) == expected
    assert plan.status.summary == expected


def test_reads_are_asked_for_before_anything_is_decided() -> None:
    job = an_agentjob(status=claimed(jobUID="j1", effective={"resultFrom": "lastLine"}))
    over = decide(observed(job, child=a_child(), pods=(a_pod(ended(0)),)))
    assert over.need == ReadLastLine("nightly-index-1-x7k2p", "main")
    empty = decide(observed(job, child=a_child(created=at(1))))
    assert empty.need == ReadRefusals("j1")
    assert (over.status, empty.status) == (None, None)


@pytest.mark.parametrize(
    ("pod", "expected"),
    [
        (a_pod(waiting()), "queued (creating)"),
        (a_pod(waiting("ErrImagePull", "no route")), "queued (image_pull)"),
        (a_pod(waiting("ImagePullBackOff", "back-off")), "queued (image_pull)"),
        (a_pod(waiting("InvalidImageName", "bad name")), "queued (creating) | SuspendJob"),
        (a_pod(waiting("ErrImageNeverPull", "never")), "queued (creating) | SuspendJob"),
        (a_pod(waiting("CreateContainerConfigError", "no secret")), "queued (creating)"),
        (
            a_pod(waiting("PodInitializing"), init={"fetch": waiting("ImagePullBackOff", "x")}),
            "queued (image_pull)",
        ),
    ],
    ids=["ordinary", "pull", "back-off", "bad name", "never", "no secret", "init container"],
)
def test_r_cause_what_may_cure_itself_waits(pod: Any, expected: str) -> None:
    job = an_agentjob(status=claimed(jobUID="j1"))
    plan = decide(observed(job, child=a_child(), pods=(pod,)))
    assert told(plan) == expected
    assert plan.status is not None
    if "SuspendJob" in expected:
        assert plan.status.ending is not None
        assert plan.status.ending.code == "image_pull"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("registry answers 503", "ImagePullBackOff of registry.invalid/x:1 (registry answers 503)"),
        ('Back-off pulling "registry.invalid/x:1"', 'ff (Back-off pulling "registry.invalid/x:1")'),
    ],
    ids=["image left out", "image named"],
)
def test_r_cause_an_image_that_is_waited_for_is_named(words: str, said: str) -> None:
    pod = a_pod(waiting("ImagePullBackOff", words))
    assert pod.tool is not None
    pod = replace(pod, tool=replace(pod.tool, image="registry.invalid/x:1"))
    job = an_agentjob(status=claimed(jobUID="j1"))
    status = decide(observed(job, child=a_child(), pods=(pod,))).status
    assert status is not None
    assert status.waiting is not None
    assert said in status.waiting.message


def test_r_cause_a_deadline_names_the_pod_that_it_ends() -> None:
    job = an_agentjob(status=claimed(jobUID="j1"), deadlineSeconds=30)
    status = decide(observed(job, child=a_child(), pods=(a_pod(running()),))).status
    assert status is not None
    assert status.ending is not None
    assert status.ending.message == f"the deadline passed while pod {POD_NAME} ran"


def test_r_cause_what_was_declined_is_not_said_to_be_stopped() -> None:
    stop = {"declined": True, "requestedBy": "ada", "reason": "not today"}
    status = decide(observed(an_agentjob(stop=stop))).status
    assert status is not None
    assert status.cause is not None
    assert (status.cause.code, status.cause.message) == ("declined", "declined by ada: not today")


@pytest.mark.parametrize(
    ("condition", "other", "expected"),
    [
        ("Succeeded", {}, "queued (dependency)"),
        ("Succeeded", {"exists": True}, "queued (dependency)"),
        (
            "Succeeded",
            {"exists": True, "finished": True},
            "failed dependency_failed unstarted",
        ),
        (
            "Succeeded",
            {"exists": True, "finished": True, "succeeded": True},
            "queued (creating) | CreateJob",
        ),
        ("Finished", {"exists": True, "finished": True}, "queued (creating) | CreateJob"),
        ("Finished", {"exists": True}, "queued (dependency)"),
    ],
    ids=["absent", "runs", "failed", "succeeded", "failed is enough", "must end"],
)
def test_r_depends_the_gate(condition: str, other: Json, expected: str) -> None:
    job = an_agentjob(dependsOn=[{"name": "other", "condition": condition}])
    plan = decide(observed(job, dependencies=(DependencySeen("other", **other),)))
    assert told(plan) == expected
    if "dependency)" in expected:
        assert plan.requeue_at == at(3600)


def test_the_status_is_plain_json() -> None:
    status = decide(observed(an_agentjob())).status
    assert status is not None
    assert json.loads(json.dumps(status.to_json()))["state"] == "queued"
