"""Containers that the kubelet could not find when their pod was ended (R-CAUSE: `ran`)."""

import pytest

from agentjobs.domain.verdict import may_have_begun
from tests.builders import a_pod, ended

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
