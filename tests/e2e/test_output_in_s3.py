"""Output in an S3 server, through the chart, with two of each program (R-OUTPUT)."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import obstore
import pytest
from obstore.store import S3Store, from_url

from tests.cluster.local import LocalCluster
from tests.e2e.installed import NAMESPACE
from tests.e2e.outputs import Readers
from tests.e2e.platform import Platform, install
from tests.s3 import S3Server, s3_server

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.soak,
    pytest.mark.timeout(400, func_only=True),
    pytest.mark.skipif(
        not os.environ.get("AGENTJOBS_SOAK"), reason="an S3 server of its own: set AGENTJOBS_SOAK"
    ),
]

URL = "s3://tools/of/platform"
SECRET = "output"  # noqa: S105 - a name
WITHIN = 60.0
POLL = 0.2
STEPS = 150
COUNTS = f"i=0; while [ $i -lt {STEPS} ]; do i=$((i+1)); echo step $i; sleep 0.1; done"
COUNTED = b"".join(f"step {n}\n".encode() for n in range(1, STEPS + 1))


@pytest.fixture(scope="module")
def server(platform: Platform, tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    if not isinstance(platform.cluster, LocalCluster):
        pytest.skip("its pods reach this machine")
    directory = tmp_path_factory.mktemp("s3")
    with s3_server(Path(directory), platform.cluster.host_address) as server:
        yield server


@pytest.fixture(scope="module")
def readers(platform: Platform, server: S3Server) -> Iterator[Readers]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment.items():
            patch.setenv(name, value)
        # The bucket comes to be.
        obstore.put(from_url(URL), "first", b"")
    words = [f"--from-literal={name}={value}" for name, value in server.environment.items()]
    platform.cluster.kubectl(
        "--namespace", NAMESPACE, "create", "secret", "generic", SECRET, *words
    )
    output = {"url": URL, "secretName": SECRET, "persistence": {"enabled": False}}
    readers = Readers(
        install(platform.cluster, platform.receiver, output=output, operators=2).in_namespace()
    )
    readers.settle()
    yield readers
    readers.here.kubectl("delete", "agentjobs", "--all", "--timeout=90s")
    install(platform.cluster, platform.receiver)
    platform.cluster.kubectl("--namespace", NAMESPACE, "delete", "secret", SECRET)


@pytest.fixture
def bucket(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Store:
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    store = from_url(URL)
    assert isinstance(store, S3Store)
    return store


def objects(bucket: S3Store, uid: str) -> list[str]:
    return [str(each["path"]) for each in obstore.list(bucket, prefix=f"output/{uid}").collect()]


def test_r_output_in_s3_is_whole_through_a_change_of_leader_and_a_server_that_is_silent(
    readers: Readers, server: S3Server, bucket: S3Store
) -> None:
    here = readers.here
    names = ("leaderless", "silenced")
    here.create(here.job(names[0], COUNTS))
    readers.until(names[0], "step 30\n")
    for pod in here.operator._pods():
        here.cluster.kubectl("--namespace", NAMESPACE, "delete", "pod", pod["metadata"]["name"])
        break
    assert readers.read(names[0]).data == COUNTED
    here.create(here.job(names[1], COUNTS))
    readers.until(names[1], "step 30\n")
    server.process.send_signal(signal.SIGSTOP)
    try:
        # The end of the job does not wait for its output.
        assert here.wait_for(names[1])["state"] == "done"
    finally:
        server.process.send_signal(signal.SIGCONT)
    for name in names:
        kept = readers.wait_until_archived(name, 120)["output"]
        reading = readers.read(name)
        assert reading.data == COUNTED
        assert kept == {"bytes": len(COUNTED), "sha256": reading.sha256, "gaps": 0}
        assert objects(bucket, here.get("agentjob", name)["metadata"]["uid"])


def test_r_ttl_output_in_s3_goes_with_its_agentjob(readers: Readers, bucket: S3Store) -> None:
    here = readers.here
    here.create(here.job("short", "echo hello"))
    readers.wait_until_archived("short")
    uid = here.get("agentjob", "short")["metadata"]["uid"]
    assert objects(bucket, uid)
    here.kubectl("delete", "agentjob", "short", "--timeout=60s")
    end = time.monotonic() + WITHIN
    while objects(bucket, uid):
        assert time.monotonic() < end, "its objects are still there"
        time.sleep(POLL)
