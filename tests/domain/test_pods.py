"""When a pod is over."""

from typing import Any

import pytest

from agentjobs.domain.pods import PodView

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
