"""One control plane for the session, with what the chart brings installed."""

import secrets
from collections.abc import Iterator

import pytest

from agentjobs.gateway.keys import SECRET as KEYS
from tests.chart import NAMESPACE, SERVES_DEFAULTS, Document, render
from tests.cluster import FAST_LIMITS, ControlPlane
from tests.cluster.binaries import binary
from tests.controlplane.callers import Server
from tests.controlplane.installed import USER, USER_TOKEN, install
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
    directory = tmp_path_factory.mktemp("control-plane")
    tokens = directory / "tokens.csv"
    tokens.write_text(f"{USER_TOKEN},{USER},1\n", encoding="utf-8")
    with ControlPlane(
        directory,
        apiserver_args=(f"--token-auth-file={tokens}",),
        controller_manager_args=FAST_LIMITS.controller_manager,
    ) as plane:
        install(plane, chart)
        # Tests of admission write AgentJobs as a gateway does; one that starts later must find the
        # keys that they could have been named with.
        keys = [f"--from-literal={name}={secrets.token_hex(16)}" for name in ("name", "state")]
        plane.kubectl("create", "secret", "generic", KEYS, f"--namespace={NAMESPACE}", *keys)
        yield plane


@pytest.fixture(scope="session")
def server(control_plane: ControlPlane) -> Server:
    """The API server of `control_plane`, for Caller."""
    return Server.of(control_plane.kubeconfig)
