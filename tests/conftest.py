"""What all tests share: the tier of each, and where helm is."""

import os
import shutil
from pathlib import Path

import pytest

TIERS = ("unit", "controlplane", "cluster")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort into tiers what has no mark of its own; what renders the chart waits for helm."""
    for item in items:
        if not any(item.get_closest_marker(tier) for tier in TIERS):
            needs_helm = "helm" in getattr(item, "fixturenames", ())
            item.add_marker("controlplane" if needs_helm else "unit")


@pytest.fixture(scope="session")
def helm() -> Path:
    """helm: the one in HELM, on PATH, or built for the cluster tests already. Never builds it."""
    from tests.cluster.binaries import directory_of  # noqa: PLC0415 unit tests need no cluster
    from tests.cluster.programs import HELM  # noqa: PLC0415

    for candidate in (os.environ.get("HELM"), "helm", str(directory_of(HELM) / "helm")):
        if candidate and (found := shutil.which(candidate)):
            return Path(found)
    if os.environ.get("CI"):
        pytest.fail("no helm: run `python -m tests.cluster build`, or name one in HELM")
    pytest.skip("no helm: run `python -m tests.cluster build`, or name one in HELM")
