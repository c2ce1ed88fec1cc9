"""One control plane for the session, with what the chart brings installed."""

from collections.abc import Iterator

import pytest

from tests.chart import SERVES_DEFAULTS, Document, render
from tests.cluster import FAST_LIMITS, ControlPlane
from tests.cluster.binaries import binary
from tests.controlplane.callers import Server
from tests.controlplane.installed import install
from tests.controlplane.playing import played, shared, stage  # noqa: F401 - fixtures


@pytest.fixture(scope="session")
def chart() -> list[Document]:
    """The chart with default values, rendered for the cluster of the tests."""
    return render(binary("helm"), *SERVES_DEFAULTS)


@pytest.fixture(scope="session")
def control_plane(
    tmp_path_factory: pytest.TempPathFactory, chart: list[Document]
) -> Iterator[ControlPlane]:
    """A real API server with CRDs, roles and admission policies; the policies are in force."""
    with ControlPlane(
        tmp_path_factory.mktemp("control-plane"),
        controller_manager_args=FAST_LIMITS.controller_manager,
    ) as plane:
        install(plane, chart)
        yield plane


@pytest.fixture(scope="session")
def server(control_plane: ControlPlane) -> Server:
    """The API server of `control_plane`, for Caller."""
    return Server.of(control_plane.kubeconfig)
