"""Containers that the kubelet could not find when their pod was ended (R-CAUSE: `ran`)."""

import pytest

from agentjobs.domain.verdict import judge_pod, may_have_begun
from tests.builders import a_pod, disrupted, ended

NOT_FOUND = "The container could not be located when the pod was terminated"
WAS_RUNNING = "The container could not be located. The container used to be Running"


@pytest.mark.parametrize(
    ("message", "deleted", "ran"),
    [
        pytest.param(NOT_FOUND, 50, False, id="R-CAUSE deleted while its image was pulled"),
        pytest.param(WAS_RUNNING, 50, True, id="R-CAUSE one that used to run has run"),
        pytest.param(NOT_FOUND, None, True, id="R-CAUSE without a deletion nobody can say"),
    ],
)
def test_whether_a_container_that_was_not_found_had_begun(
    message: str, deleted: float | None, *, ran: bool
) -> None:
    state = ended(137, reason="ContainerStatusUnknown", message=message)
    state["terminated"].pop("startedAt", None)
    assert may_have_begun(a_pod(state, node="n1", phase="Failed", deleted_at=deleted)) is ran


@pytest.mark.parametrize(
    ("message", "ran"),
    [
        pytest.param(NOT_FOUND, False, id="R-CAUSE drained while its image was pulled"),
        pytest.param(WAS_RUNNING, True, id="R-CAUSE drained while it ran, as is remembered"),
    ],
)
def test_an_eviction_says_the_same_of_a_container_that_was_not_found(
    message: str, *, ran: bool
) -> None:
    state = ended(137, reason="ContainerStatusUnknown", message=message)
    state["terminated"].pop("startedAt", None)
    evicted = disrupted("EvictionByEvictionAPI")
    pod = a_pod(state, node="n1", phase="Failed", deleted_at=50, conditions=(evicted,))
    cause = judge_pod(pod, None, linger=30).cause
    assert cause is not None
    assert (cause.code, cause.ran, cause.retryable) == ("evicted", ran, True)
    assert cause.evidence == ("lost" if ran else "observed")
