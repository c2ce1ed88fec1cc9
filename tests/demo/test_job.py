"""What the demo reads of an AgentJob's status, however little of it is there."""

from datetime import UTC, datetime

from demo.job import from_object

META = {"name": "build", "creationTimestamp": "2026-01-01T00:00:00Z"}
NOW = datetime(2026, 1, 1, 0, 1, tzinfo=UTC)


def test_a_new_job_has_no_status_yet() -> None:
    job = from_object({"metadata": META})
    assert (job.state, job.over, job.pod_name, job.seconds(NOW)) == ("created", False, "", 60)


def test_a_queued_job_says_what_it_waits_for() -> None:
    waiting = {"code": "slot", "message": "build-1 runs"}
    job = from_object({"metadata": META, "status": {"state": "queued", "waiting": waiting}})
    assert (job.over, job.waiting) == (False, "slot: build-1 runs")


def test_a_finished_job_has_taken_until_it_ended() -> None:
    status = {
        "state": "failed",
        "finishedAt": "2026-01-01T00:00:30Z",
        "cause": {"code": "tool_error", "message": "exit code 1"},
    }
    job = from_object({"metadata": META, "status": status})
    assert (job.over, job.cause, job.seconds(NOW)) == (True, "tool_error: exit code 1", 30)


def test_a_result_comes_with_its_source() -> None:
    status = {"state": "done", "result": {"source": "lastLine", "text": "{}"}, "summary": "fine"}
    job = from_object({"metadata": META, "status": status})
    assert (job.result_source, job.result, job.summary) == ("lastLine", "{}", "fine")
