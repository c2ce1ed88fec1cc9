"""An inbox beside a gateway that is played, and a clock to set."""

import re
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from agentjobs.inbox import Heard, Inbox, KeyRing, Rules, Verifier
from tests.inbox.events import NOW, SIGNER, body_of, headers_of
from tests.inbox.played import PlayedGateway

DAY = timedelta(days=1)


class Clock:
    """Tells what a test says."""

    def __init__(self) -> None:
        self.now = NOW

    def __call__(self) -> datetime:
        return self.now


class Place:
    """An inbox beside a gateway that is played; it can be left and opened again."""

    def __init__(self, path: Path, gateway: PlayedGateway) -> None:
        self.path = path / "inbox.db"
        self.gateway = gateway
        self.clock = Clock()
        self.verifier: Verifier | KeyRing = Verifier([SIGNER.public()["ed25519"]])

    @asynccontextmanager
    async def open(self, rules: Rules | None = None, **settings: Any) -> AsyncIterator[Inbox]:
        async with (
            self.gateway.client() as client,
            Inbox(
                self.path,
                client,
                verifier=self.verifier,
                rules=rules,
                clock=self.clock,
                **settings,
            ) as inbox,
        ):
            yield inbox

    async def deliver(self, inbox: Inbox, event: Heard) -> int:
        body = body_of(event)
        return (await inbox.receive(headers_of(body, at=self.clock.now), body)).status


async def everything(inbox: Inbox) -> list[str]:
    """All lines that wait, acknowledged."""
    lines: list[str] = []
    while batch := await inbox.take_now():
        lines += batch.text.split("\n")
        assert await inbox.acknowledge(batch)
    return lines


def jobs_in(lines: list[str]) -> list[str]:
    return re.findall(r"job_completed job_id=(\S+)", "\n".join(lines))


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
