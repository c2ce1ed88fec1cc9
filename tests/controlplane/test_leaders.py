"""Leaders that are killed, frozen and cut off under load: nothing is lost, nothing runs twice."""

import http.client
import os
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest

from tests import audit
from tests.apiclient import ApiClient, Record
from tests.chart import Document as ChartDocument
from tests.cluster import FAST_LIMITS, ControlPlane
from tests.cluster.controlplane import free_ports
from tests.controlplane.callers import Server
from tests.controlplane.installed import OPERATOR, install
from tests.controlplane.stage import ENDS, rewired, template
from tests.faulty_proxy import Fault, FaultyProxy
from tests.operator_process import OperatorEndedError, OperatorProcess

pytestmark = pytest.mark.controlplane

SOAK = bool(os.environ.get("AGENTJOBS_SOAK"))
CHANGES = 51 if SOAK else 3
LIVE = 100 if SOAK else 40
NAMESPACE = "leaders"
TAKEOVER_SECONDS = 20.0
"""Of the budget: the lease lasts 10 s, and it is asked for every 2 s."""
FROZEN_SECONDS = 13.0
"""Longer than the lease."""
POD_SECONDS = 3.0
POLL = 0.1


@pytest.fixture(scope="module")
def plane(
    tmp_path_factory: pytest.TempPathFactory, chart: list[ChartDocument]
) -> Iterator[ControlPlane]:
    with ControlPlane(
        tmp_path_factory.mktemp("leaders"),
        kwok=True,
        controller_manager_args=FAST_LIMITS.controller_manager,
        scheduler_args=FAST_LIMITS.scheduler,
        pod_seconds=POD_SECONDS,
    ) as plane:
        install(plane, chart)
        plane.add_fake_nodes(4)
        yield plane


@dataclass
class Replica:
    """One of two operators, behind a proxy of its own."""

    operator: OperatorProcess
    proxy: FaultyProxy

    @property
    def leads(self) -> bool:
        try:
            return self.operator.running and self.operator.metric("agentjobs_leader") == 1
        except OperatorEndedError:
            return False

    def cut_off(self) -> None:
        self.proxy.choose = lambda _method, _path: Fault.AWAY
        self.proxy.break_connections(lambda _path: True)

    def join(self) -> None:
        self.proxy.choose = lambda _method, _path: Fault.NONE


@dataclass
class Load:
    """Keeps so many AgentJobs alive until told to stop."""

    api: ApiClient
    record: Record
    made: int = 0
    _ended: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        while not self._ended.is_set():
            if self.made - self.over() < LIVE and self._create(f"job-{self.made}"):
                self.made += 1
            else:
                time.sleep(POLL)

    def end(self) -> None:
        self._ended.set()

    def over(self) -> int:
        jobs = self.record.all("AgentJob", NAMESPACE)
        return sum((job.get("status") or {}).get("state") in ENDS for job in jobs)

    def _create(self, name: str) -> bool:
        """Create one; whether it is there. The API server may be away."""
        meta = {"name": name, "namespace": NAMESPACE}
        body = {
            "apiVersion": "agentjobs.dev/v1alpha1",
            "kind": "AgentJob",
            "metadata": meta,
            "spec": {"template": template(), "ttlSecondsAfterFinished": 86400},
        }
        try:
            return self.api.try_create(body).code in {201, 409}
        except (OSError, http.client.HTTPException):
            return False


@pytest.mark.timeout(2400)
def test_rule_r_claim_leaders_change_under_load_and_nothing_is_lost_or_doubled(
    plane: ControlPlane, tmp_path: Path
) -> None:
    api = ApiClient.of(plane)
    api.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}})
    record = Record(api)
    replicas = [_replica(plane, tmp_path, name) for name in ("one", "two")]
    load = Load(api, record)
    worker = threading.Thread(target=load.run, daemon=True)
    takeovers: dict[str, list[float]] = {}
    try:
        for each in replicas:
            each.operator.start(wait=False)
            each.operator.keep_running()
        record.until("leader", partial(_leader, replicas), 60)
        worker.start()
        record.until("load", lambda: load.over() > LIVE // 4, 120)
        dice = random.Random(20261130)  # noqa: S311 - no secret
        for number in range(CHANGES):
            how = ("killed", "frozen", "cut off")[number % 3]
            took = _change(record, replicas, how)
            takeovers.setdefault(how, []).append(took)
            time.sleep(dice.uniform(0, 2))  # when the next one strikes is left to chance
        load.end()
        worker.join()
        record.until("end of all jobs", lambda: load.over() == load.made, 300)
        _assert_all_ran_once(plane, record, load.made)
    finally:
        load.end()
        for each in replicas:
            each.operator.close()
            each.proxy.__exit__(None, None, None)
        record.close()
    told = {how: f"{len(t)} times, at most {max(t):.1f} s" for how, t in takeovers.items()}
    sys.stdout.write(f"\n{load.made} jobs, {CHANGES} changes of leader: {told}\n")
    assert max(max(each) for each in takeovers.values()) <= TAKEOVER_SECONDS


def _replica(plane: ControlPlane, directory: Path, name: str) -> Replica:
    kubeconfig = plane.kubeconfig_for(OPERATOR, [f"leader-{name}"])
    (port,) = free_ports(1)
    proxy = FaultyProxy(plane.url, Server.of(kubeconfig).context, port)
    proxy.__enter__()
    operator = OperatorProcess(name, rewired(kubeconfig, proxy.url), directory)
    return Replica(operator, proxy)


def _leader(replicas: list[Replica]) -> Replica | None:
    return next((each for each in replicas if each.leads), None)


def _change(record: Record, replicas: list[Replica], how: str) -> float:
    """Take the leader away; return the seconds until somebody leads again.

    One that was killed may come back first: under its own name it need not wait for its Lease.
    """
    first = record.until("leader", partial(_leader, replicas), 60)
    other = next(each for each in replicas if each is not first)
    starts = first.operator.starts
    began = time.monotonic()
    if how == "killed":
        first.operator.kill()
    elif how == "frozen":
        first.operator.freeze()
    else:
        first.cut_off()
    try:
        record.until(
            f"leader after one was {how}",
            lambda: other.leads or (first.operator.starts > starts and first.leads),
            60,
        )
        took = time.monotonic() - began
        if how == "frozen":
            # It wakes up beside its successor, and has to find out.
            time.sleep(max(0.0, FROZEN_SECONDS - took))
    finally:
        if how == "frozen":
            first.operator.resume()
        elif how == "cut off":
            first.join()
    return took


def _assert_all_ran_once(plane: ControlPlane, record: Record, made: int) -> None:
    jobs = record.all("AgentJob", NAMESPACE)
    assert len(jobs) == made
    assert Counter(job["status"]["state"] for job in jobs) == {"done": made}
    assert {len(job["status"]["attempts"]) for job in jobs} == {1}
    log = [each for each in audit.read(plane.audit_log) if each.namespace == NAMESPACE]
    uids = {job["metadata"]["uid"] for job in jobs}
    assert audit.jobs_made(log).items() <= {(uid, "1"): 1 for uid in uids}.items()
    assert set(audit.pods_made(log).values()) == {1}
    for job in jobs:
        states = [
            (version.get("status") or {}).get("state")
            for version in record.history(job["metadata"]["uid"])
        ]
        first_end = next(n for n, state in enumerate(states) if state in ENDS)
        assert set(states[first_end:]) == {"done"}
