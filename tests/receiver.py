"""A receiver of events: it records every request as it came, and answers as it is told."""

import base64
import contextlib
import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from typing_extensions import override

NO_CONTENT = 204
POLL = 0.02


@dataclass(frozen=True)
class Request:
    """One request."""

    at: float
    """Unix time of its arrival."""
    headers: dict[str, str]
    body: bytes

    @property
    def id(self) -> str:
        return self.headers["webhook-id"]

    @property
    def event(self) -> dict[str, Any]:
        value: dict[str, Any] = json.loads(self.body)
        return value

    def verify(self, public_key: str) -> None:
        """Check the signature as a receiver must (Standard Webhooks 1.0.0, `v1a`).

        :param public_key: `whpk_` and the base64 of the raw key.
        :raises InvalidSignature: it is not the sender's.
        """
        key = Ed25519PublicKey.from_public_bytes(base64.b64decode(public_key[len("whpk_") :]))
        signed = f"{self.id}.{self.headers['webhook-timestamp']}.".encode() + self.body
        signatures = [each.split(",", 1) for each in self.headers["webhook-signature"].split(" ")]
        assert ["v1a"] in [each[:1] for each in signatures]
        for version, signature in signatures:
            if version == "v1a":
                with contextlib.suppress(InvalidSignature):
                    key.verify(base64.b64decode(signature), signed)
                    return
        raise InvalidSignature


class Receiver:
    """Listens on one address. Use as a context manager."""

    def __init__(self, address: str = "127.0.0.1") -> None:
        self.requests: list[Request] = []
        self.answer: Callable[[Request], int] = lambda _request: NO_CONTENT
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                headers = {name.lower(): value for name, value in self.headers.items()}
                request = Request(time.time(), headers, body)
                receiver.requests.append(request)
                self.send_response(receiver.answer(request))
                self.send_header("Content-Length", "0")
                self.end_headers()

            @override
            def log_message(self, *_: Any) -> None:
                return

        self._server = ThreadingHTTPServer((address, 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def url(self) -> str:
        host, port = self._server.server_address[:2]
        return f"http://{host!s}:{port}/events"

    def of(self, job_id: str) -> list[Request]:
        """Requests about one job, in the order of their arrival."""
        return [each for each in list(self.requests) if each.event["subject"] == job_id]

    def wait_for(self, job_id: str, seconds: float = 20.0) -> Request:
        """Wait for the first event about a job."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            found = self.of(job_id)
            if found:
                return found[0]
            time.sleep(POLL)
        raise AssertionError(f"no event about {job_id} within {seconds} s")
