"""Hundreds of logs that are followed at once: memory and connections of the operator (R-OUTPUT)."""

import asyncio
import os
import ssl
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import pytest
from aiohttp import web

from tests.controlplane.stage import Stage
from tests.kubelet import NODE

pytestmark = [pytest.mark.controlplane, pytest.mark.timeout(900, func_only=True)]

SOAK = bool(os.environ.get("AGENTJOBS_SOAK"))
STREAMS = 500 if SOAK else 40
LINES = 20
MOST_EACH = 512 * 1024
"""What one stream may cost in memory: half of it is what asyncio reads TLS into."""
MEBIBYTE = 1 << 20
ESTABLISHED = "01"
OUTPUT = "".join(f"line {number}\n" for number in range(LINES))
WITHIN = 300.0
POLL = 0.2
LEAVE_SECONDS = 1.0


class Logs:
    """The port of a kubelet at which the API server reads logs: a line now and then until told."""

    def __init__(self, certificate: Path, key: Path) -> None:
        self.open = 0
        self.most = 0
        self.over = threading.Event()
        self.port = 0
        self._lines: dict[str, str] = {}
        self._tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self._tls.load_cert_chain(certificate, key)

    async def serve(self, ready: threading.Event, closed: asyncio.Event) -> None:
        app = web.Application()
        app.router.add_get("/containerLogs/{namespace}/{pod}/{container}", self._log)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=self._tls)
        await site.start()
        self.port = runner.addresses[0][1]
        ready.set()
        await closed.wait()
        await runner.cleanup()
        # Connections over TLS take leave of each other before they close.
        await asyncio.sleep(LEAVE_SECONDS)

    async def _log(self, request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse()
        await answer.prepare(request)
        self.open += 1
        self.most = max(self.most, self.open)
        try:
            # Whoever asks again gets the same.
            stamp = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%S.%f}000Z"
            lines = "".join(f"{stamp} line {number}\n" for number in range(LINES))
            await answer.write(self._lines.setdefault(request.path, lines).encode())
            while not self.over.is_set():  # noqa: ASYNC110 - told by another thread
                await asyncio.sleep(POLL)
        finally:
            self.open -= 1
        return answer


@contextmanager
def logs(certificate: Path, key: Path) -> Iterator[Logs]:
    """Serve on a thread of its own."""
    served, ready = Logs(certificate, key), threading.Event()
    loop, closed = asyncio.new_event_loop(), asyncio.Event()
    thread = threading.Thread(target=loop.run_until_complete, args=(served.serve(ready, closed),))
    thread.start()
    try:
        assert ready.wait(10)
        yield served
    finally:
        served.over.set()
        loop.call_soon_threadsafe(closed.set)
        thread.join()
        loop.close()


def memory(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    return next(int(line.split()[1]) for line in status.splitlines() if "VmRSS" in line) * 1024


def connections(pid: int, port: int) -> int:
    """Connections of a process to a port."""
    held = {str(each.readlink()) for each in Path(f"/proc/{pid}/fd").iterdir() if each.is_symlink()}
    lines = Path(f"/proc/{pid}/net/tcp").read_text(encoding="utf-8").splitlines()[1:]
    there = [line.split() for line in lines]
    return sum(
        words[3] == ESTABLISHED
        and int(words[2].rpartition(":")[2], 16) == port
        and f"socket:[{words[9]}]" in held
        for words in there
    )


def test_r_output_many_streams_at_once(
    stage: Stage, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    certificate, key = stage.plane._site.pki.server("logs", ["127.0.0.1"])
    place = stage.place("many-streams")
    operator = stage.operator(place, settings={"OUTPUT_STORE": tmp_path.as_uri()})
    with logs(certificate, key) as served:
        endpoint = {
            "addresses": [{"type": "InternalIP", "address": "127.0.0.1"}],
            "daemonEndpoints": {"kubeletEndpoint": {"Port": served.port}},
        }
        stage.api.patch("Node", "", NODE, {"status": endpoint}, "status").object()
        names = [f"many-{number}" for number in range(STREAMS)]
        for name in names:
            place.create(name)
        for name in names:
            place.until_pod(name, WITHIN)
        before = memory(operator.pid)
        place.until_running(*names)
        stage.record.until("all streams", lambda: served.open >= STREAMS, WITHIN)
        assert operator.metric("agentjobs_output_streams") == STREAMS
        after = memory(operator.pid)
        held = connections(operator.pid, stage.plane._site.ports.apiserver)
        # Whatever else it does goes on meanwhile.
        place.create("one-more")
        place.until_job("one-more")
        with capsys.disabled():
            sys.stdout.write(
                f"\n{STREAMS} streams at once: operator {before / MEBIBYTE:.0f} MiB before, "
                f"{after / MEBIBYTE:.0f} MiB with them; {held} connections to the API server\n"
            )
        assert STREAMS <= held <= STREAMS + 40
        assert after - before < STREAMS * MOST_EACH
        served.over.set()
        for name in names:
            place.kubelet.finish(place.until_pod(name), 0)
        for name in names:
            place.until_over(name, WITHIN)
            stage.record.until(f"output of {name}", lambda n=name: "output" in place.status(n))
            kept = place.status(name)["output"]
            assert (kept["gaps"], kept["bytes"]) == (
                0,
                sum(len(f"line {n}\n") for n in range(LINES)),
            )
    assert served.most == STREAMS
