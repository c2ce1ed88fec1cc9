"""A way to the gateway from this machine, and calls as its account: `kubectl port-forward`."""

import http.client
import json
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tests.cluster import ClusterError

SERVICE = "service/agentjobs-gateway"
PORT = 8080
FORWARDING = re.compile(r"^Forwarding from 127\.0\.0\.1:(\d+) -> ")
CALL_TIMEOUT = 60.0


@dataclass(frozen=True)
class Answer:
    """What the gateway answered."""

    code: int
    headers: Mapping[str, str]
    text: str

    @property
    def body(self) -> dict[str, Any]:
        """The JSON object in it."""
        value: dict[str, Any] = json.loads(self.text)
        return value


@dataclass(frozen=True)
class Gateway:
    """The gateway, called with one token."""

    port: int
    token: str

    def call(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, **headers: str
    ) -> Answer:
        """Send one request; names of headers are given with `_` for `-`."""
        sent = {"Authorization": f"Bearer {self.token}"}
        sent |= {name.replace("_", "-"): value for name, value in headers.items()}
        content = None
        if body is not None:
            content, sent["Content-Type"] = json.dumps(body), "application/json"
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=CALL_TIMEOUT)
        try:
            connection.request(method, path, content, sent)
            answer = connection.getresponse()
            return Answer(answer.status, dict(answer.headers), answer.read().decode())
        except (OSError, http.client.HTTPException) as error:
            raise ClusterError(f"{method} {path}: the gateway does not answer: {error}") from error
        finally:
            connection.close()


def port_of(line: str) -> int | None:
    """Return the local port if this is the line of `kubectl port-forward` that tells it."""
    found = FORWARDING.match(line)
    return int(found[1]) if found else None


@contextmanager
def forwarded(kubectl: Sequence[str], namespace: str) -> Iterator[int]:
    """Forward a local port to the gateway for the block; yield the port."""
    command = [*kubectl, "--namespace", namespace, "port-forward", SERVICE, f":{PORT}"]
    with subprocess.Popen(  # noqa: S603
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            port = port_of(process.stdout.readline() if process.stdout else "")
            if port is None:
                process.kill()
                said = process.stderr.read().strip() if process.stderr else ""
                raise ClusterError(f"`{' '.join(command)}` failed: {said}")
            yield port
        finally:
            process.kill()
