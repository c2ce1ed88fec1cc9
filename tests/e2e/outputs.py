"""What tests of output do: agents that read it page by page, and the processes that keep it."""

import base64
import hashlib
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from itertools import cycle
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from tests.e2e.platform import Platform
from tests.gateway_process import Agent

ACCOUNT = "reader"
PAGE_BYTES = 64 * 1024
PAUSE = 0.2
WITHIN = 120.0

Document = dict[str, Any]


@dataclass
class Reading:
    """All pages of one output, from its beginning."""

    data: bytearray = field(default_factory=bytearray)
    gaps: list[tuple[int, str]] = field(default_factory=list)
    encodings: list[str] = field(default_factory=list)
    cursors: list[str] = field(default_factory=list)
    """By which each page was asked for."""
    largest: int = 0
    """Bytes of the largest page as JSON."""
    ended: bool = False
    seconds: float = 0.0
    """From the first page to the last."""

    def add(self, page: Document, size: int, cursor: str) -> None:
        raw = page["data"].encode()
        encoding = page.get("encoding") or "utf-8"
        self.data += base64.b64decode(raw) if encoding == "base64" else raw
        self.encodings += [encoding] if raw else []
        self.gaps += [(gap["offset"], gap["reason"]) for gap in page.get("gaps") or ()]
        self.cursors.append(cursor)
        self.largest = max(self.largest, size)
        self.ended = page["end"]

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.data).hexdigest()


@dataclass(frozen=True)
class Readers:
    """The account of a namespace that may see its jobs, and replicas that it asks by turns."""

    here: Platform

    @cached_property
    def agent(self) -> Agent:
        words = (ACCOUNT, "--audience=agentjobs", "--duration=1h")
        return Agent(self.here.kubectl("create", "token", *words).strip())

    @cached_property
    def urls(self) -> list[str]:
        return self.here.gateway.urls

    def settle(self) -> None:
        self.here.kubectl("create", "serviceaccount", ACCOUNT)
        account = f"--serviceaccount={self.here.namespace}:{ACCOUNT}"
        self.here.kubectl(
            "create", "rolebinding", ACCOUNT, "--clusterrole=agentjobs-agent", account
        )

    def path(self, name: str, part: str = "output") -> str:
        return f"/v1/jobs/{name}.{self.here.namespace}/{part}"

    def page(self, url: str, name: str, cursor: str = "", **query: int) -> tuple[Document, int]:
        """A page, and its size as JSON."""
        reply = self.agent.get(url, self._query(name, cursor, query))
        assert reply.code == 200, (reply.code, reply.body)
        return reply.body, len(reply.raw)

    def _query(self, name: str, cursor: str, query: dict[str, int]) -> str:
        words = {"cursor": cursor} if cursor else {}
        return f"{self.path(name)}?{urlencode({**words, **query})}"

    def read(self, name: str, seconds: float = WITHIN, **query: int) -> Reading:
        """Read to the end, at another replica each time, as it comes; or until time is up."""
        reading = Reading()
        cursor, began = "", time.monotonic()
        for url in cycle(self.urls):
            page, size = self.page(url, name, cursor, **query)
            reading.add(page, size, cursor)
            cursor = page["next"]
            reading.seconds = time.monotonic() - began
            if page["end"] or reading.seconds > seconds:
                return reading
            if not page["data"]:
                time.sleep(PAUSE)
        raise AssertionError("no replica is ready")

    def until(self, name: str, text: str, seconds: float = WITHIN) -> None:
        """Wait until this is among what can be read of an output."""
        data, cursor, end = "", "", time.monotonic() + seconds
        while text not in data:
            assert time.monotonic() < end, f"{name} has not printed {text!r}"
            page, _ = self.page(self.urls[0], name, cursor)
            data, cursor = data + page["data"], page["next"]
            if not page["data"]:
                time.sleep(PAUSE)

    def octets(self, name: str) -> bytearray:
        """All of a finished output, as it was printed."""
        data, cursor = bytearray(), ""
        while True:
            path = self._query(name, cursor, {})
            reply = self.agent.get(self.urls[0], path, Accept="application/octet-stream")
            assert reply.code == 200, reply.body
            data += reply.raw
            cursor = reply.headers["Agentjobs-Next"]
            if reply.headers["Agentjobs-End"] == "true":
                return data

    def read_all(self, names: list[str], seconds: float) -> dict[str, Reading]:
        """Read several to their ends, side by side."""
        with ThreadPoolExecutor(len(names)) as pool:
            readings = pool.map(lambda name: self.read(name, seconds), names)
            return dict(zip(names, readings, strict=True))

    def wait_until_archived(self, name: str, seconds: float = WITHIN) -> Document:
        """Wait until the record says what was kept; return the status."""
        end = time.monotonic() + seconds
        while True:
            status = self.here.status(name)
            if archived(status):
                return status
            assert time.monotonic() < end, f"{name} has no OutputArchived: {status}"
            time.sleep(PAUSE)


def archived(status: Document) -> bool:
    return any(
        (each["type"], each["status"]) == ("OutputArchived", "True")
        for each in status.get("conditions", ())
    )


@dataclass(frozen=True)
class Program:
    """A process of ours in a pod, as this machine sees it."""

    process: Path

    @classmethod
    def find(cls, pod_uid: str, name: str) -> "Program":
        for process in Path("/proc").glob("[0-9]*"):
            try:
                words = (process / "cmdline").read_bytes().split(b"\0")
                inside = f"pod{pod_uid}/" in (process / "cgroup").read_text(encoding="utf-8")
            except OSError:
                continue
            if inside and tuple(words[1:4]) == (b"-m", b"agentjobs.main", name.encode()):
                return cls(process)
        raise AssertionError(f"there is no {name} in pod {pod_uid}")

    def forget_peak(self) -> None:
        (self.process / "clear_refs").write_text("5")

    @property
    def memory(self) -> int:
        return self._bytes("VmRSS")

    @property
    def peak(self) -> int:
        return self._bytes("VmHWM")

    def _bytes(self, field_name: str) -> int:
        for line in (self.process / "status").read_text(encoding="utf-8").splitlines():
            if line.startswith(f"{field_name}:"):
                return int(line.split()[1]) * 1024
        raise AssertionError(f"{self.process} says nothing of {field_name}")


def programs(here: Platform) -> dict[str, Program]:
    """Operator and gateways by their pods' names."""
    found = {}
    for name, pods in (("operator", here.operator._pods()), ("gateway", here.gateway.pods())):
        for pod in pods:
            if "deletionTimestamp" not in pod["metadata"]:
                meta = pod["metadata"]
                found[meta["name"]] = Program.find(meta["uid"], name)
    return found
