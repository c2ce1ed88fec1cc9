"""The gateway: starts against bare creations, status reads, and long polls that wait.

Starts and bare creations take turns on one control plane, from the same callers, so that a noisy
machine slows both. Reads are counted against the processor time of the gateway's process.
"""

import asyncio
import os
import resource
import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp

from tests import audit
from tests.apiclient import ApiClient, Document
from tests.chart import NAMESPACE, SERVES_DEFAULTS, render
from tests.cluster import FAST_LIMITS, ControlPlane
from tests.cluster.binaries import binary
from tests.controlplane.callers import Server
from tests.controlplane.installed import GATEWAY, agentjob, install
from tests.controlplane.stage import template
from tests.gateway_process import GatewayProcess

TEAM = "team-a"
TOOL = "count"
CALLERS = 50
ROUNDS = 6
SETTLE_SECONDS = 3.0
TICKS = os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGE_SIZE")
OPEN_FILES = 8192


@dataclass(frozen=True)
class Figures:
    """What one run showed. Times in milliseconds."""

    starts: int
    start_p50: float
    start_p99: float
    bare_p50: float
    bare_p99: float
    reads: int
    reads_per_core_second: float
    api_requests_during_reads: int
    reviews_during_reads: int
    polls: int
    poll_kilobytes: float
    """Memory of the process for each long poll that waits."""
    poll_answered_ms: float
    """From the change until the last of the polls was answered."""

    @property
    def start_ratios(self) -> tuple[float, float]:
        """A start against a bare creation: p50, p99."""
        return self.start_p50 / self.bare_p50, self.start_p99 / self.bare_p99

    def to_json(self) -> dict[str, Any]:
        """The figures for files."""
        return asdict(self)


def measure(directory: Path, starts: int, reads: int, polls: int) -> Figures:
    """Bring up a control plane and one gateway, and measure."""
    _allow_open_files()
    with ControlPlane(
        directory / "control-plane", controller_manager_args=FAST_LIMITS.controller_manager
    ) as plane:
        install(plane, render(binary("helm"), *SERVES_DEFAULTS))
        token = _set_up(plane)
        kubeconfig = plane.kubeconfig_for(GATEWAY, ["bench"])
        with GatewayProcess("gateway", kubeconfig, directory, {"NAMESPACE": NAMESPACE}) as gateway:
            return asyncio.run(_measure(plane, gateway, token, starts, reads, polls))


def _set_up(plane: ControlPlane) -> str:
    """A tenant with a tool; return the agent's token."""
    api = ApiClient.of(plane)
    api.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": TEAM}})
    plane.kubectl("create", "serviceaccount", "agent", "-n", TEAM)
    for name, rules in (
        ("jobs", {"resources": ["agentjobs"], "verbs": ["create", "get", "list", "delete"]}),
        ("tool", {"resources": ["agenttools"], "verbs": ["use"]}),
    ):
        meta = {"name": name, "namespace": TEAM}
        rbac = "rbac.authorization.k8s.io"
        rule = {"apiGroups": ["agentjobs.dev"], **rules}
        api.create({"apiVersion": f"{rbac}/v1", "kind": "Role", "metadata": meta, "rules": [rule]})
        account = f"--serviceaccount={TEAM}:agent"
        plane.kubectl("create", "rolebinding", name, "-n", TEAM, f"--role={name}", account)
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}}
    spec = {"description": "Counts.", "inputSchema": schema, "template": template()}
    meta = {"name": TOOL, "namespace": TEAM}
    tool = {"apiVersion": "agentjobs.dev/v1alpha1", "kind": "AgentTool", "metadata": meta}
    api.create({**tool, "spec": spec})
    return plane.kubectl("create", "token", "agent", "-n", TEAM, "--audience=agentjobs").strip()


async def _measure(
    plane: ControlPlane, gateway: GatewayProcess, token: str, starts: int, reads: int, polls: int
) -> Figures:
    tls = Server.of(plane.kubeconfig).context
    headers = {"Authorization": f"Bearer {token}"}
    connector = aiohttp.TCPConnector(limit=0)
    async with (
        aiohttp.ClientSession(headers=headers, connector=connector) as agent,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, ssl=tls)) as admin,
    ):
        caller = _Caller(gateway.url, agent)
        await caller.start("warm")
        through, bare = await _compare(plane, admin, caller, starts)
        job = await caller.start("read")
        per_second, requests, reviews = await _read(plane, gateway, caller, job, reads)
        kilobytes, answered = await _poll(gateway, caller, job, polls)
    return Figures(
        starts=starts,
        start_p50=_percentile(through, 50),
        start_p99=_percentile(through, 99),
        bare_p50=_percentile(bare, 50),
        bare_p99=_percentile(bare, 99),
        reads=reads,
        reads_per_core_second=per_second,
        api_requests_during_reads=requests,
        reviews_during_reads=reviews,
        polls=polls,
        poll_kilobytes=kilobytes,
        poll_answered_ms=answered,
    )


@dataclass(frozen=True)
class _Caller:
    url: str
    session: aiohttp.ClientSession

    async def start(self, key: str) -> str:
        body = {"tool": TOOL, "arguments": {"n": 3}}
        headers = {"Idempotency-Key": key}
        url = f"{self.url}/v1/jobs"
        async with self.session.post(url, json=body, headers=headers) as answer:
            answer.raise_for_status()
            return str((await answer.json())["job_id"])

    async def status(self, job: str, query: str = "", tag: str = "") -> str:
        headers = {"If-None-Match": tag} if tag else {}
        url = f"{self.url}/v1/jobs/{job}{query}"
        async with self.session.get(url, headers=headers) as answer:
            await answer.read()
            answer.raise_for_status()
            return answer.headers["ETag"]

    async def stop(self, job: str) -> None:
        async with self.session.delete(f"{self.url}/v1/jobs/{job}") as answer:
            answer.raise_for_status()


async def _compare(
    plane: ControlPlane, admin: aiohttp.ClientSession, caller: _Caller, starts: int
) -> tuple[list[float], list[float]]:
    """Starts and bare creations in turns; seconds of each."""
    through: list[float] = []
    bare: list[float] = []
    url = f"{plane.url}/apis/agentjobs.dev/v1alpha1/namespaces/{TEAM}/agentjobs"
    each = starts // ROUNDS

    async def create(number: int) -> None:
        spec: Document = {
            "toolRef": {"kind": "AgentTool", "name": TOOL},
            "arguments": {"n": 3},
            "ttlSecondsAfterFinished": 86400,
        }
        body = agentjob(TEAM, f"bare-{number}", spec)
        async with admin.post(f"{url}?fieldValidation=Strict", json=body) as answer:
            await answer.read()
            answer.raise_for_status()

    async def start(number: int) -> None:
        await caller.start(f"key-{number}")

    for turn in range(ROUNDS):
        numbers = range(turn * each, (turn + 1) * each)
        bare += await _by_callers(create, numbers)
        through += await _by_callers(start, numbers)
    return through, bare


async def _by_callers(call: Callable[[int], Awaitable[None]], numbers: range) -> list[float]:
    """Make calls, so many callers at once, each one after the other; seconds of each."""
    seconds: list[float] = []
    waiting = iter(numbers)

    async def work() -> None:
        for number in waiting:
            began = time.perf_counter()
            await call(number)
            seconds.append(time.perf_counter() - began)

    await asyncio.gather(*(work() for _ in range(CALLERS)))
    return seconds


async def _read(
    plane: ControlPlane, gateway: GatewayProcess, caller: _Caller, job: str, reads: int
) -> tuple[float, int, int]:
    """Reads for each second of the gateway's processor; requests that they cost."""
    await caller.status(job)
    tail = audit.Tail(plane.audit_log)
    reviews = gateway.metric("agentjobs_gateway_reviews_total")
    before = _processor_seconds(gateway.pid)

    async def read(_: int) -> None:
        await caller.status(job)

    await _by_callers(read, range(reads))
    spent = _processor_seconds(gateway.pid) - before
    reviewed = gateway.metric("agentjobs_gateway_reviews_total") - reviews
    await asyncio.sleep(SETTLE_SECONDS)
    ours = [each for each in tail.new() if any("bench" in group for group in each.groups)]
    others = [each for each in ours if "review" not in each.resource and each.verb != "watch"]
    return reads / spent, len(others), int(reviewed)


async def _poll(
    gateway: GatewayProcess, caller: _Caller, job: str, polls: int
) -> tuple[float, float]:
    """Memory of each long poll, and how long a change takes to reach all of them."""
    tag = await caller.status(job)
    await asyncio.sleep(SETTLE_SECONDS)
    before = _resident_bytes(gateway.pid)
    waiting = [asyncio.create_task(caller.status(job, "?wait=60", tag)) for _ in range(polls)]
    while gateway.metric("agentjobs_gateway_waiting") < polls:  # noqa: ASYNC110 - of a process
        await asyncio.sleep(0.1)
    grown = _resident_bytes(gateway.pid) - before
    began = time.perf_counter()
    await caller.stop(job)
    await asyncio.gather(*waiting)
    return grown / polls / 1024, (time.perf_counter() - began) * 1000


def _processor_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def _resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE


def _percentile(seconds: list[float], percent: int) -> float:
    """In milliseconds."""
    return statistics.quantiles(seconds, n=100)[percent - 1] * 1000


def _allow_open_files() -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(OPEN_FILES, most), most))
