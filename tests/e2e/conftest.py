"""A real cluster of two nodes with the operator installed from its chart, in its own image."""

import sys
from collections.abc import Callable, Iterator

import pytest

from tests.e2e.causes_seen import SEEN
from tests.e2e.platform import Platform, install
from tests.receiver import Receiver

NODE_MONITOR = ("--node-monitor-grace-period=12s",)
"""A silent kubelet is noticed after seconds, not after most of a minute."""


@pytest.fixture(scope="session")
def platform() -> Iterator[Platform]:
    """A cluster of this run's own, which goes with it."""
    from tests.cluster import Cluster  # noqa: PLC0415 - other tiers need no cluster
    from tests.cluster.temporary import temporary  # noqa: PLC0415

    with temporary() as name:
        cluster = Cluster.up(name, nodes=2, controller_manager_args=NODE_MONITOR)
        with Receiver(cluster.host_address) as receiver:
            yield install(cluster, receiver)


@pytest.fixture(scope="session", autouse=True)
def causes_seen() -> Iterator[None]:
    """Write the table of causes in the end, should that be wanted."""
    yield
    SEEN.write()


@pytest.fixture(scope="session")
def show(pytestconfig: pytest.Config) -> Callable[[str], None]:
    """Write figures where they are seen though the test passes."""
    capture = pytestconfig.pluginmanager.getplugin("capturemanager")

    def write(text: str) -> None:
        with capture.global_and_fixture_disabled():
            sys.stdout.write(f"{text}\n")
            sys.stdout.flush()

    return write
