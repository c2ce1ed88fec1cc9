"""What agents are shown: small whatever a tool or the API server says, and never wrong."""

import json
from datetime import UTC, datetime
from typing import Any

import jsonschema_rs
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from agentjobs.api.agentjob import AgentJob
from agentjobs.api.names import (
    CAUSE_MESSAGE_CHARACTERS,
    SUMMARY_CHARACTERS,
    TERMINAL_STATES,
    CauseCode,
    Evidence,
    State,
    WaitingCode,
)
from agentjobs.contract.calls import MAX_STATUS_BYTES, JobStatus
from agentjobs.domain.callbacks import outbox_of
from agentjobs.domain.view import render_status, state_of
from tests.builders import Json, an_agentjob

bounded = settings(max_examples=40, derandomize=True, database=None, deadline=None)
SCHEMA = jsonschema_rs.Draft202012Validator(JobStatus.model_json_schema(), validate_formats=True)
LONGEST = "n" * 63
UID = "0b7e6a0f-1f0e-4d0c-9a55-7c1d2f3e4a5b"
WORST = ["\x01", "\x00", '"', "\\", "\u2028", "é", "😀", "\u202e", "\x7f", "\n", "a"]
"""Characters of which JSON makes up to six bytes, or UTF-8 up to four."""


def texts(characters: int) -> st.SearchStrategy[str]:
    """Texts of up to that many characters, mostly as long and as bad as can be."""
    words = st.text(st.sampled_from(WORST), min_size=1, max_size=3)
    return st.one_of(
        words.map(lambda word: (word * characters)[:characters]),
        st.text(st.characters(codec="utf-8"), max_size=min(characters, 20)),
    )


TIMES = st.builds(
    lambda moment, offset: f"{moment.isoformat()}{offset}",
    st.datetimes(datetime(2000, 1, 1), datetime(2100, 1, 1)),  # noqa: DTZ001 - offsets follow
    st.sampled_from(["Z", "+00:00", "+05:30", "-12:00", "+14:00"]),
)
LABELS = st.one_of(st.just(LONGEST), st.from_regex(r"[a-z]{1,20}", fullmatch=True))
INT64 = st.integers(-(2**63), 2**63 - 1)


def filled(**optional: st.SearchStrategy[Any]) -> st.SearchStrategy[Json]:
    """All of these members, or some."""
    return st.one_of(st.fixed_dictionaries(optional), st.fixed_dictionaries({}, optional=optional))


STATUSES = filled(
    state=st.sampled_from([state.value for state in State]),
    waiting=st.fixed_dictionaries(
        {"code": st.sampled_from(list(WaitingCode)), "message": texts(1024)}
    ),
    attempts=st.lists(
        st.fixed_dictionaries({"number": st.integers(1, 10), "jobName": LABELS}), max_size=10
    ),
    startedAt=TIMES,
    finishedAt=TIMES,
    deadlineAt=TIMES,
    progress=filled(percent=st.integers(0, 100), message=texts(256), at=TIMES),
    summary=texts(SUMMARY_CHARACTERS),
    cause=st.fixed_dictionaries(
        {
            "code": st.sampled_from(list(CauseCode)),
            "message": texts(CAUSE_MESSAGE_CHARACTERS),
            "retryable": st.booleans(),
            "ran": st.booleans(),
        },
        optional={
            "exitCode": INT64,
            "signal": st.integers(1, 127),
            "forced": st.booleans(),
            "evidence": st.sampled_from(list(Evidence)),
        },
    ),
)
SPECS = st.one_of(
    st.fixed_dictionaries(
        {"toolRef": LABELS.map(lambda name: {"name": name})},
        optional={"stop": st.fixed_dictionaries({}, optional={"reason": texts(1024)})},
    ),
    st.just({}),
)
JOBS = st.builds(
    lambda name, namespace, status, spec, deleted: an_agentjob(
        name=name, namespace=namespace, uid=UID, status=status, deleted=deleted, **spec
    ),
    LABELS,
    LABELS,
    STATUSES,
    SPECS,
    st.none() | st.just(5.0),
)


def worst(character: str, state: str) -> AgentJob:
    """The largest status that there is, all texts of one character."""
    return an_agentjob(
        name=LONGEST,
        namespace=LONGEST,
        uid=UID,
        toolRef={"name": LONGEST},
        status={
            "state": state,
            "waiting": {"code": "unschedulable", "message": character * 1024},
            "attempts": [{"number": n, "jobName": LONGEST} for n in range(1, 11)],
            "startedAt": "2026-03-01T12:00:00.123456+05:30",
            "finishedAt": "2026-03-01T12:00:00.123456+05:30",
            "deadlineAt": "2026-03-01T12:00:00.123456+05:30",
            "progress": {
                "percent": 100,
                "message": character * 256,
                "at": "2026-03-01T12:00:00.123456+05:30",
            },
            "summary": character * SUMMARY_CHARACTERS,
            "cause": {
                "code": "pending_deadline_exceeded",
                "message": character * CAUSE_MESSAGE_CHARACTERS,
                "retryable": False,
                "ran": False,
                "exitCode": -(2**63),
                "signal": 127,
                "evidence": "observed",
            },
        },
    )


def with_worst(test: Any) -> Any:
    for character in WORST:
        for state in ("queued", "timed_out"):
            test = example(worst(character, state))(test)
    return test


@with_worst
@bounded
@given(JOBS)
def test_r_honest_any_status_is_small_and_as_the_contract_says(job: AgentJob) -> None:
    raw = render_status(job)
    assert len(raw) <= MAX_STATUS_BYTES
    shown = json.loads(raw)
    SCHEMA.validate(shown)
    status = JobStatus.model_validate(shown)
    assert status.status is state_of(job)
    assert status.job_id == f"{job.metadata.name}.{job.metadata.namespace}"
    assert status.started_at == job.status.started_at
    assert status.finished_at == job.status.finished_at
    assert (status.cause is None) == (job.status.cause is None)
    assert status.cause is None or status.cause.code is job.status.cause.code


@bounded
@given(JOBS)
def test_r_honest_a_text_is_cut_and_never_changed(job: AgentJob) -> None:
    status = JobStatus.model_validate_json(render_status(job))
    pairs = [
        (status.summary, job.status.summary),
        (status.cause and status.cause.message, job.status.cause and job.status.cause.message),
        (
            status.progress and status.progress.message,
            job.status.progress and job.status.progress.message,
        ),
    ]
    for shown, whole in pairs:
        assert whole in {shown, "", None} or whole.startswith(str(shown).removesuffix("…"))


@settings(bounded, max_examples=25)
@given(JOBS)
def test_r_state_final_an_end_is_shown_as_it_is_whatever_is_asked_afterwards(job: AgentJob) -> None:
    asked = job.spec.stop is not None or job.metadata.deletion_timestamp is not None
    written = job.status.state or State.QUEUED
    if written in TERMINAL_STATES:
        assert state_of(job) is written
    else:
        assert state_of(job) is (State.STOPPING if asked else written)


@pytest.mark.parametrize("state", sorted(State))
@pytest.mark.parametrize(
    ("spec", "deleted"), [({"stop": {"reason": "enough"}}, None), ({}, 5.0)], ids=["stop", "delete"]
)
def test_r_state_final_a_stop_counts_from_when_it_is_on_record(
    state: State, spec: Json, deleted: float | None
) -> None:
    job = an_agentjob(status={"state": state.value}, deleted=deleted, **spec)
    assert state_of(job) is (state if state in TERMINAL_STATES else State.STOPPING)


def test_r_honest_a_job_that_nobody_has_looked_at_is_queued() -> None:
    assert state_of(an_agentjob()) is State.QUEUED


WAITS = {"waiting": {"code": "image_pull", "message": "pod search/x: no such image"}}


def shown(**fields: Any) -> Json:
    value: Json = json.loads(render_status(an_agentjob(**fields)))
    return value


def test_r_honest_what_a_job_waits_for_is_shown_while_it_waits() -> None:
    queued = shown(status={"state": "queued", **WAITS})
    assert queued["waiting"] == WAITS["waiting"]
    assert "waiting" not in shown(status={"state": "queued", **WAITS}, stop={"reason": "enough"})
    assert "waiting" not in shown(status={"state": "running", **WAITS})


def test_r_honest_a_text_of_ordinary_length_is_shown_whole() -> None:
    text = "ä" * 140
    status = {"state": "done", "summary": text, "progress": {"percent": 50, "message": text}}
    assert shown(status=status)["summary"] == text
    assert shown(status=status)["progress"]["message"] == text


def test_r_honest_a_cut_can_be_seen() -> None:
    status = shown(status={"state": "queued", "waiting": {"code": "kueue", "message": "x" * 1000}})
    assert status["waiting"]["message"].endswith("x…")


@pytest.mark.parametrize("state", list(State))
def test_r_event_the_end_of_a_job_is_told_under_the_id_of_its_callback(state: State) -> None:
    status = {"state": state.value, "finishedAt": "2026-03-01T12:00:00Z"}
    job = an_agentjob(callback={"url": "https://runtime.example.com/"}, status=status)
    shown = json.loads(render_status(job)).get("event_id")
    if state not in TERMINAL_STATES:
        assert shown is None
        return
    outbox = outbox_of(job, job.status, datetime(2026, 3, 1, tzinfo=UTC))
    assert outbox is not None
    assert [shown] == [delivery.id for delivery in outbox.deliveries]
