"""What holds for every decision, whatever was read."""

import unicodedata
from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from agentjobs.api.agentjob import AgentJob
from agentjobs.api.names import STATUS_BUDGET_BYTES, TERMINAL_STATES, CauseCode
from agentjobs.domain.job import job_name
from agentjobs.domain.mergepatch import merge_patch
from agentjobs.domain.observed import Observed, ReadLastLine, ReadPods, ReadRefusals
from agentjobs.domain.plan import DeleteAgentJob, DeleteJob, Plan, RemoveFinalizer
from agentjobs.domain.reconcile import decide
from agentjobs.domain.status import current_attempt, size_of
from agentjobs.domain.texts import cut, cut_bytes, one_line
from tests.builders import UID, a_tool, an_agentjob, observed
from tests.domain.worlds import Chance

bounded = settings(max_examples=40, derandomize=True, database=None, deadline=None)
"""The same examples on every run; which ones is decided by the code of the test."""
many = settings(bounded, max_examples=120)
numbers = st.integers(0, 2**32)

READS = 3
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from(["a", "b"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("abc"), inner),
    max_leaves=8,
)
objects = st.dictionaries(st.sampled_from("abc"), json_values)
labels = st.from_regex(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", fullmatch=True)


def settled(seen: Observed) -> tuple[Observed, Plan]:
    """Decide, after the reads that the decision asks for."""
    for _ in range(READS):
        plan = decide(seen)
        if isinstance(plan.need, ReadLastLine):
            seen = replace(seen, last_line="")
        elif isinstance(plan.need, ReadRefusals):
            seen = replace(seen, refusal_known=True)
        elif isinstance(plan.need, ReadPods):
            seen = replace(seen, pods_listed=True)
        else:
            return seen, plan
    raise AssertionError(f"still asks for {plan.need}")


def stored(job: AgentJob, plan: Plan) -> AgentJob:
    """The AgentJob after the status write, as it is read back."""
    if plan.status is None:
        return job
    return AgentJob.from_json({**job.to_json(), "status": plan.status.to_json()})


@many
@given(numbers)
def test_r_template_no_template_makes_a_decision_fail(number: int) -> None:
    template = Chance(number).bad_template()
    plan = decide(observed(an_agentjob(template=template)))
    assert plan.status is not None
    assert plan.status.finished_at or plan.actions or plan.status.waiting


@many
@given(numbers)
def test_r_tool_no_tools_template_makes_a_decision_fail(number: int) -> None:
    tool = a_tool(template=Chance(number).bad_template(), limits={"resources": {"cpu": "2"}})
    job = an_agentjob(toolRef={"kind": "AgentTool", "name": "indexer"})
    assert decide(observed(job, tool=tool)).status


@many
@given(numbers)
def test_every_world_is_decided_by_the_rules(number: int) -> None:
    """R-LEVEL, R-DEAD, R-CAUSE, R-STATE-FINAL; no world makes a decision fail."""
    seen, plan = settled(Chance(number).observation())
    r_dead_nothing_is_terminal_while_a_pod_may_run(seen, plan)
    r_cause_no_memory_kill_and_no_force_without_proof(seen, plan)
    r_level_the_status_stays_within_its_budget(seen, plan)
    r_level_a_decision_made_again_changes_nothing(seen, plan)
    r_state_final_the_end_is_written_once(seen, plan)
    r_attempt_nothing_is_over_that_its_queue_may_resume(seen, plan)


def r_dead_nothing_is_terminal_while_a_pod_may_run(seen: Observed, plan: Plan) -> None:
    if plan.status and plan.status.state in TERMINAL_STATES:
        assert all(pod.dead for pod in seen.pods)
        assert plan.status.finished_at


def r_cause_no_memory_kill_and_no_force_without_proof(seen: Observed, plan: Plan) -> None:
    cause = plan.status.cause if plan.status else None
    if cause is None:
        return
    ends = [pod.tool.end for pod in seen.pods if pod.tool and pod.tool.end]
    if cause.code is CauseCode.OOM_KILLED:
        assert any(e.reason == "OOMKilled" and e.exit_code == 137 for e in ends)
    if cause.forced:
        by_deadline = any(pod.reason == "DeadlineExceeded" for pod in seen.pods)
        by_deadline |= seen.child is not None and seen.child.failed_reason == "DeadlineExceeded"
        assert seen.job.status.ending or by_deadline
    if cause.exit_code is not None:
        assert cause.exit_code in [e.exit_code for e in ends]


def r_level_the_status_stays_within_its_budget(seen: Observed, plan: Plan) -> None:
    if plan.status:
        assert size_of(plan.status) <= STATUS_BUDGET_BYTES
        AgentJob.from_json({**seen.job.to_json(), "status": plan.status.to_json()})


def r_level_a_decision_made_again_changes_nothing(seen: Observed, plan: Plan) -> None:
    """Nothing spins: a status is written once (and once more if it is then over)."""
    again = replace(seen, job=stored(seen.job, plan))
    again, second = settled(again)
    if again.job.status.finished_at:
        return
    over = second.status is not None and second.status.finished_at is not None
    assert second.status is None or over
    if not second.actions and second.status is None and second.requeue_at:
        assert second.requeue_at > seen.now


def r_state_final_the_end_is_written_once(seen: Observed, plan: Plan) -> None:
    if plan.status is None or plan.status.finished_at is None:
        return
    job = stored(seen.job, plan)
    _, after = settled(replace(seen, job=job))
    assert after.status is None
    assert all(isinstance(a, RemoveFinalizer | DeleteAgentJob | DeleteJob) for a in after.actions)


def r_attempt_nothing_is_over_that_its_queue_may_resume(seen: Observed, plan: Plan) -> None:
    attempt = current_attempt(plan.status) if plan.status else None
    child = seen.child
    if child is None or attempt is None or attempt.cause is None or child.placeholder:
        return
    if child.owner_uid != UID or not (child.queued and child.single):
        return
    counts = bool(seen.pods) and all(pod.final and pod.tracked for pod in seen.pods)
    counted = child.over or child.succeeded or child.failed
    assert counted or counts or child.retired or child.deleting


@bounded
@given(objects, objects)
def test_a_merge_patch_makes_the_new_of_the_old(old: Any, new: Any) -> None:
    without_nulls = purged(new)
    assert applied(purged(old), merge_patch(purged(old), without_nulls)) == without_nulls


def purged(value: Any) -> Any:
    """A value without nulls in objects, as statuses are: in a merge patch null means removal."""
    if isinstance(value, dict):
        return {key: purged(item) for key, item in value.items() if item is not None}
    return value


def applied(target: Any, patch: Any) -> Any:
    """MergePatch of RFC 7386, section 2."""
    if not isinstance(patch, dict):
        return patch
    result = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = applied(result.get(key), value)
    return result


@bounded
@given(st.text())
def test_r_event_one_line_leaves_nothing_that_breaks_or_hides(text: str) -> None:
    line = one_line(text)
    assert not [c for c in line if unicodedata.category(c) in {"Cc", "Zl", "Zp", "Cs"}]
    assert not set(line) & set("\u202a\u202b\u202d\u202e\u2066\u2067\u2068\u2069\ufeff\u200b")
    assert line == one_line(line)
    assert len(line.splitlines()) <= 1


@bounded
@given(st.text(), st.integers(1, 60))
def test_r_texts_a_cut_text_is_as_short_as_asked_for(text: str, size: int) -> None:
    assert len(cut(text, size)) <= size
    assert len(cut_bytes(text, size).encode()) <= max(size, 0)
    assert cut(text, size) == text or cut(text, size).endswith("…")


@bounded
@given(labels, st.integers(1, 10), st.none() | st.integers(1, 10**9))
def test_r_attempt_names_of_jobs_are_dns_labels(
    name: str, attempt: int, completions: int | None
) -> None:
    spec = {"completionMode": "Indexed", "completions": completions} if completions else {}
    made = job_name(name, attempt, {"spec": spec})
    longest = f"{made}-{completions - 1}" if completions else made
    assert len(longest) <= 63
    assert made[0] != "-"
    assert set(made) <= set("abcdefghijklmnopqrstuvwxyz0123456789-")
    assert made.endswith(f"-{attempt}")


@bounded
@given(st.text("ab", min_size=1, max_size=6), st.text("ab", min_size=1, max_size=6))
def test_r_attempt_long_names_that_differ_give_jobs_that_differ(one: str, two: str) -> None:
    names = {"x" * 56 + one, "x" * 56 + two}
    assert len({job_name(name, 10, {}) for name in names}) == len(names)
    assert len({job_name(f"{'x' * 56}{one}", attempt, {}) for attempt in range(1, 11)}) == 10
