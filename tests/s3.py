"""A real S3 server on this machine for as long as a test lasts: seaweedfs."""

import json
import os
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.binaries import binary
from tests.cluster.controlplane import free_ports

READY_WITHIN = 60.0
POLL = 0.1
REGION = "us-east-1"
KEY, SECRET = "test-key", "test-secret"


@dataclass(frozen=True)
class S3Server:
    """Where it is, and with what environment programs reach it."""

    endpoint: str
    process: "subprocess.Popen[bytes]"

    @property
    def environment(self) -> dict[str, str]:
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ALLOW_HTTP": "true",
            "AWS_REGION": REGION,
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
        }


@contextmanager
def s3_server(directory: Path, address: str = "127.0.0.1") -> Iterator[S3Server]:
    """Its process ends with the block; buckets come to be when something is put into them."""
    identity = {
        "name": "agentjobs",
        "credentials": [{"accessKey": KEY, "secretKey": SECRET}],
        "actions": ["Admin", "Read", "Write", "List", "Tagging"],
    }
    config = directory / "s3.json"
    config.write_text(json.dumps({"identities": [identity]}), encoding="utf-8")
    s3, master, volume, filer, *grpc = free_ports(8)
    arguments = {
        "dir": directory,
        "ip": address,
        "ip.bind": address,
        "filer": "true",
        "s3": "true",
        "s3.config": config,
        "s3.port": s3,
        "master.port": master,
        "volume.port": volume,
        "filer.port": filer,
        "s3.port.grpc": grpc[0],
        "master.port.grpc": grpc[1],
        "volume.port.grpc": grpc[2],
        "filer.port.grpc": grpc[3],
        "master.volumeSizeLimitMB": 64,
        "volume.max": 20,
    }
    command = [str(binary("weed")), "server", *(f"-{key}={arguments[key]}" for key in arguments)]
    log = directory / "weed.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, cwd=directory, env={**os.environ}
        )
    server = S3Server(f"http://{address}:{s3}", process)
    try:
        _wait_until_ready(server, log)
        yield server
    finally:
        process.kill()
        process.wait()


def _wait_until_ready(server: S3Server, log: Path) -> None:
    end = time.monotonic() + READY_WITHIN
    while True:
        try:
            urllib.request.urlopen(server.endpoint, timeout=2).close()  # noqa: S310 - our own
        except urllib.error.HTTPError:
            # It refuses strangers: it is there.
            return
        except OSError:
            assert server.process.poll() is None, log.read_text(errors="replace")[-1500:]
            assert time.monotonic() < end, log.read_text(errors="replace")[-1500:]
            time.sleep(POLL)
        else:
            return
