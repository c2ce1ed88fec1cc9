"""HTTP as bytes on a connection: what no client library would send."""

import socket
import ssl
import time
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import urllib3

from tests.gateway_process import Reply

SOON = 8.0
PIECE = 65536


@dataclass
class Wire:
    """One connection, and what came back on it."""

    port: int
    tls: ssl.SSLContext | None = None
    received: bytes = b""
    closed: bool = False
    """By the other side."""
    _socket: socket.socket = field(init=False)

    def __post_init__(self) -> None:
        self._socket = socket.create_connection(("127.0.0.1", self.port), SOON)
        if self.tls:
            self._socket = self.tls.wrap_socket(self._socket, server_hostname="localhost")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._socket.close()

    def send(self, content: bytes) -> Self:
        """Send, unless the other side has closed already."""
        try:
            self._socket.sendall(content)
        except ConnectionError:
            self.closed = True
        return self

    def hang_up(self) -> None:
        self._socket.close()

    def until_closed(self, seconds: float = SOON) -> Self:
        """Read until the other side closes; fail if it does not."""
        end = time.monotonic() + seconds
        while self._read(end):
            pass
        assert self.closed, f"still open after {seconds:.0f} s; came: {self.received[:300]!r}"
        return self

    def stays_open(self, seconds: float) -> bool:
        """Read for some time; return whether the other side has not closed by then."""
        end = time.monotonic() + seconds
        while self._read(end):
            pass
        return not self.closed

    def until_answered(self, count: int = 1, seconds: float = SOON) -> Self:
        """Read until so many answers are here whole; fail if they do not come."""
        end = time.monotonic() + seconds
        while len(self.replies) < count and self._read(end):
            pass
        assert len(self.replies) >= count, f"came: {self.received[:300]!r}"
        return self

    @property
    def replies(self) -> list[Reply]:
        """The answers that came whole; `100 Continue` is none."""
        found = []
        rest = self.received
        while b"\r\n\r\n" in rest:
            head, _, rest = rest.partition(b"\r\n\r\n")
            first, *lines = head.decode("latin-1").split("\r\n")
            code = int(first.split(" ")[1])
            if code == 100:
                continue
            headers = urllib3.HTTPHeaderDict(
                (name, value.strip()) for name, _, value in (line.partition(":") for line in lines)
            )
            length = int(headers.get("Content-Length", "0"))
            if len(rest) < length:
                break
            found.append(Reply(code, headers, rest[:length]))
            rest = rest[length:]
        return found

    @property
    def reply(self) -> Reply:
        """The only answer."""
        (reply,) = self.replies
        return reply

    def _read(self, end: float) -> bool:
        left = end - time.monotonic()
        if left <= 0:
            return False
        self._socket.settimeout(left)
        try:
            piece = self._socket.recv(PIECE)
        except TimeoutError:
            return False
        except ConnectionError:
            piece = b""
        self.closed = not piece
        self.received += piece
        return not self.closed
