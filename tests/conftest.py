"""What all tests share: the tier of each, and where helm is."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.s3 import S3Server

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


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator["S3Server"]:
    """A real S3 server; building it takes minutes."""
    from tests.s3 import s3_server  # noqa: PLC0415 unit tests need none

    if not os.environ.get("AGENTJOBS_SOAK"):
        pytest.skip("an S3 server of its own: set AGENTJOBS_SOAK")
    with s3_server(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture(
    params=[
        pytest.param("file", id="directory"),
        pytest.param("s3", id="s3", marks=[pytest.mark.cluster, pytest.mark.soak]),
    ]
)
def store_url(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> str:
    """Where output is kept: an empty directory, an empty part of a bucket."""
    if request.param == "file":
        return tmp_path.as_uri()
    server: S3Server = request.getfixturevalue("s3")
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    return f"s3://output/{tmp_path.name}"
