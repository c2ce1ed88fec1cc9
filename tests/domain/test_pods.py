"""When a pod is over."""

from typing import Any

import pytest

from agentjobs.domain.pods import PodView, completion_of

RUNNING = {"name": "tool", "state": {"running": {"startedAt": "2026-01-01T00:00:00Z"}}}
ENDED = {
    "name": "tool",
    "state": {
        "terminated": {
            "exitCode": 0,
            "startedAt": "2026-01-01T00:00:00Z",
            "finishedAt": "2026-01-01T00:00:05Z",
        }
    },
}


def a_pod(**status: Any) -> PodView:
    return PodView.from_json(
        {
            "metadata": {"uid": "u", "name": "p", "creationTimestamp": "2026-01-01T00:00:00Z"},
            "spec": {"containers": [{"name": "tool"}]},
            "status": status,
        }
    )


@pytest.mark.parametrize(
    ("status", "dead"),
    [
        pytest.param(
            {"phase": "Failed", "reason": "DeadlineExceeded", "containerStatuses": [RUNNING]},
            False,
            id="R-DEAD a phase that runs ahead of its container proves nothing",
        ),
        pytest.param(
            {"phase": "Failed", "reason": "DeadlineExceeded", "containerStatuses": [ENDED]},
            True,
            id="R-DEAD a terminated container in a failed pod is dead",
        ),
        pytest.param(
            {"phase": "Failed", "reason": "Evicted"},
            True,
            id="R-DEAD an eviction without container states is believed",
        ),
        pytest.param(
            {"phase": "Running", "containerStatuses": [ENDED]},
            False,
            id="R-DEAD a pod that the kubelet has not declared over is alive",
        ),
    ],
)
def test_when_a_pod_is_dead(status: dict[str, Any], *, dead: bool) -> None:
    assert a_pod(**status).dead is dead


@pytest.mark.parametrize(
    ("job", "made_from", "index"),
    [
        pytest.param("crawl-1", "crawl-1-", 0, id="not indexed"),
        pytest.param("crawl-1", "crawl-1-12-", 12, id="indexed"),
        pytest.param("j" * 57, "j" * 57 + "-", 0, id="as long as it stays whole"),
        pytest.param("j" * 58, "j" * 58, 0, id="a long name has no dash"),
        pytest.param("j" * 63, "j" * 58, 0, id="the longest"),
        pytest.param("j" * 56, "j" * 55 + "-3-", 3, id="indexed it is cut earlier"),
        pytest.param("j" * 61, "j" * 54 + "-12-", 12, id="indexed, a long name and index"),
        pytest.param("crawl-1", "crawl-11-", None, id="another Job"),
        pytest.param("crawl-1", "crawl-1-x-", None, id="no index"),
        pytest.param("crawl-1", "crawl-1", None, id="no dash"),
        pytest.param("j" * 58, "j" * 57, None, id="a shorter name"),
        pytest.param("crawl-1", "", None, id="nothing"),
    ],
)
def test_r_report_of_which_job_a_pod_is_by_its_name(
    job: str, made_from: str, index: int | None
) -> None:
    assert completion_of(f"{made_from}x7k2p", job) == index
