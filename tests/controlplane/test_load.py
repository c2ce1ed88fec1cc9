"""Many jobs, counted: what one costs, and that none runs twice when the leader dies."""

import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from tests import audit
from tests.apiclient import ApiClient, Document, Record
from tests.chart import Document as ChartDocument
from tests.cluster import FAST_LIMITS, ControlPlane
from tests.cluster.kwok import POD_SECONDS
from tests.controlplane.installed import OPERATOR, install
from tests.controlplane.stage import ENDS, template
from tests.operator_process import OperatorProcess

SMALL, LARGE = 100, 1000
SOAK = bool(os.environ.get("AGENTJOBS_SOAK"))
NAMESPACE = "load"
WRITES_PER_JOB = 4.0
BESIDE = {"events", "leases", "secrets", "configmaps"}
"""Requests that are no part of a job's own way."""


@pytest.fixture(scope="module")
def plane(
    tmp_path_factory: pytest.TempPathFactory, chart: list[ChartDocument]
) -> Iterator[ControlPlane]:
    """A control plane whose limits are lifted, with nodes that run pods by themselves."""
    with ControlPlane(
        tmp_path_factory.mktemp("load"),
        kwok=True,
        controller_manager_args=FAST_LIMITS.controller_manager,
        scheduler_args=FAST_LIMITS.scheduler,
    ) as plane:
        install(plane, chart)
        plane.add_fake_nodes(4)
        yield plane


@pytest.fixture(scope="module")
def record(plane: ControlPlane) -> Iterator[Record]:
    record = Record(ApiClient.of(plane))
    yield record
    record.close()


@pytest.fixture
def operator(plane: ControlPlane, tmp_path: Path) -> Iterator[OperatorProcess]:
    kubeconfig = plane.kubeconfig_for(OPERATOR, ["operator-under-load"])
    with OperatorProcess("operator", kubeconfig, tmp_path) as operator:
        # A machine that is busy enough loses leases.
        operator.keep_running()
        yield operator


class Crowd:
    """AgentJobs of one namespace that all run to their end on fake nodes."""

    def __init__(
        self,
        plane: ControlPlane,
        record: Record,
        namespace: str,
        count: int,
        needs: Callable[[int], Iterable[int]] = lambda _: (),
        run_for: str = "1s",
    ) -> None:
        """Prepare.

        :param needs: the numbers of the jobs that one waits for, by its own.
        :param run_for: how long each runs, in KWOK's words.
        """
        self.namespace = namespace
        self._needs = needs
        self._template = template()
        pods = self._template["spec"]["template"]
        pods["metadata"] = {"annotations": {POD_SECONDS: run_for}}
        self.names = [f"job-{number}" for number in range(count)]
        self._plane = plane
        self._record = record
        self._api = ApiClient.of(plane)
        self._api.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}})

    def create(self) -> None:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(self._create, self.names))

    def over(self) -> int:
        jobs = self._record.all("AgentJob", self.namespace)
        return sum((job.get("status") or {}).get("state") in ENDS for job in jobs)

    def until_over(self, number: int, seconds: float) -> None:
        self._record.until(
            f"{number}th end in {self.namespace}", lambda: self.over() >= number, seconds
        )

    def requests(self) -> list[audit.Request]:
        """What was asked for in the namespace since it was made."""
        log = audit.read(self._plane.audit_log)
        return [each for each in log if each.namespace == self.namespace]

    def assert_all_ran_once(self, requests: list[audit.Request]) -> None:
        jobs = self._record.all("AgentJob", self.namespace)
        assert {job["status"]["state"] for job in jobs} == {"done"}
        assert {len(job["status"]["attempts"]) for job in jobs} == {1}
        uids = {job["metadata"]["uid"] for job in jobs}
        # A request whose sender was killed stands in the log without its answer: at most one each.
        assert audit.jobs_made(requests).items() <= {(uid, "1"): 1 for uid in uids}.items()
        assert set(audit.pods_made(requests).values()) == {1}
        for uid in uids:
            (child,) = self._record.children(uid)
            assert len(self._record.children(child["metadata"]["uid"])) == 1
        self._assert_claimed_first(jobs)
        for job in jobs:
            history = self._record.history(job["metadata"]["uid"])
            states = [(each.get("status") or {}).get("state") for each in history]
            first_end = next(n for n, state in enumerate(states) if state in ENDS)
            assert set(states[first_end:]) == {"done"}

    def _assert_claimed_first(self, jobs: list[Document]) -> None:
        """Every Job is younger than the status that names it: versions of one server compare."""
        for job in jobs:
            uid = job["metadata"]["uid"]
            claim = next(
                version
                for version in self._record.history(uid)
                if (version.get("status") or {}).get("jobName")
            )
            for child in self._record.children(uid):
                made = self._record.history(child["metadata"]["uid"])[0]
                assert version_of(claim) < version_of(made), job["metadata"]["name"]

    def _create(self, name: str) -> Document:
        return self._api.create(
            {
                "apiVersion": "agentjobs.dev/v1alpha1",
                "kind": "AgentJob",
                "metadata": {"name": name, "namespace": self.namespace},
                "spec": {"template": self._template, **self._depends_on(name)},
            }
        )

    def _depends_on(self, name: str) -> Document:
        needs = [{"name": f"job-{each}"} for each in self._needs(int(name.rpartition("-")[2]))]
        return {"dependsOn": needs} if needs else {}

    def assert_in_order(self) -> None:
        """No tool began before what it waits for had ended."""
        jobs = {
            job["metadata"]["name"]: job["status"]
            for job in self._record.all("AgentJob", self.namespace)
        }
        for number, name in enumerate(self.names):
            for other in self._needs(number):
                assert jobs[f"job-{other}"]["finishedAt"] <= jobs[name]["startedAt"], (name, other)


def has_started(operator: OperatorProcess, starts: int) -> bool:
    return operator.starts > starts


def version_of(body: Document) -> int:
    return int(body["metadata"]["resourceVersion"])


def own_requests(requests: list[audit.Request]) -> Counter[tuple[str, str]]:
    """The operator's requests about jobs; what goes beside them is counted apart."""
    return audit.count(
        requests,
        lambda each: (
            each.user == OPERATOR
            and each.verb not in {"list", "watch"}
            and each.resource not in BESIDE
        ),
    )


@pytest.mark.controlplane
@pytest.mark.timeout(280)
def test_rule_r_level_a_job_costs_four_requests_whatever_their_number(
    plane: ControlPlane, record: Record, operator: OperatorProcess
) -> None:
    crowd = Crowd(plane, record, f"{NAMESPACE}-calm", SMALL)
    began = time.monotonic()
    crowd.create()
    crowd.until_over(SMALL, 120)
    took = time.monotonic() - began
    requests = crowd.requests()
    crowd.assert_all_ran_once(requests)
    counts = own_requests(requests)
    everything = audit.count(requests, lambda each: each.user == OPERATOR)
    sys.stdout.write(f"\n{SMALL} jobs in {took:.1f} s\n{audit.table(everything, SMALL)}\n")
    assert sum(counts.values()) <= WRITES_PER_JOB * SMALL
    assert everything["create", "events"] <= 3 * SMALL
    assert operator.starts <= 2


@pytest.mark.controlplane
@pytest.mark.timeout(280)
def test_rule_r_claim_a_leader_that_is_killed_in_the_middle_makes_nothing_twice(
    plane: ControlPlane, record: Record, operator: OperatorProcess
) -> None:
    die_and_go_on(plane, record, operator, count=SMALL, kills=3)


@pytest.mark.controlplane
@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.skipif(not SOAK, reason="large counts: set AGENTJOBS_SOAK=1")
def test_rule_r_claim_a_leader_that_is_killed_ten_times_makes_nothing_twice(
    plane: ControlPlane, record: Record, operator: OperatorProcess
) -> None:
    die_and_go_on(plane, record, operator, count=LARGE, kills=10)


def fan_in(count: int) -> Callable[[int], Iterable[int]]:
    """The first waits for all others."""
    return lambda number: () if number else range(1, min(count, 501))


def chain(_: int) -> Callable[[int], Iterable[int]]:
    """Each waits for the one that is created after it."""
    return lambda number: (number - 1,) if number else ()


def at_random(count: int) -> Callable[[int], Iterable[int]]:
    """Each waits for up to three others, created before or after it; there is no ring."""
    chance = random.Random(count)  # noqa: S311 - no secret
    rank = chance.sample(range(count), count)
    place = sorted(range(count), key=rank.__getitem__)
    picks = {
        number: {place[chance.randrange(rank[number])] for _ in range(chance.randint(0, 3))}
        if rank[number]
        else set()
        for number in range(count)
    }
    return lambda number: sorted(picks[number])


SHAPES = [
    pytest.param(fan_in, 20, id="fan-in of 20"),
    pytest.param(chain, 8, id="chain of 8"),
    pytest.param(at_random, 40, id="40 at random"),
]
LARGE_SHAPES = [
    pytest.param(fan_in, 500, id="fan-in of 500"),
    pytest.param(chain, 200, id="chain of 200"),
    pytest.param(at_random, 625, id="625 at random"),
    pytest.param(at_random, 5000, id="5000 at random"),
]


@pytest.mark.controlplane
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("shape", "count"), LARGE_SHAPES if SOAK else SHAPES)
def test_rule_r_depends_waiting_costs_as_much_as_what_changes(
    plane: ControlPlane,
    record: Record,
    operator: OperatorProcess,
    shape: Callable[[int], Callable[[int], Iterable[int]]],
    count: int,
) -> None:
    """Requests grow with the jobs and with what they wait for, not faster."""
    needs = shape(count)
    namespace = f"{NAMESPACE}-{shape.__name__.replace('_', '-')}-{count}"
    # They run one after the other, and what is counted is the waiting.
    crowd = Crowd(plane, record, namespace, count, needs, run_for="200ms")
    before = operator.metric("agentjobs_passes_total", outcome="ok")
    began = time.monotonic()
    crowd.create()
    crowd.until_over(count, 1000)
    took = time.monotonic() - began
    passes = operator.metric("agentjobs_passes_total", outcome="ok") - before
    requests = crowd.requests()
    crowd.assert_all_ran_once(requests)
    crowd.assert_in_order()
    links = sum(len(list(needs(number))) for number in range(count))
    counts = own_requests(requests)
    costs = f"{sum(counts.values()) / count:.2f} requests and {passes / count:.1f} passes a job"
    sys.stdout.write(f"\n{count} jobs, {links} dependencies, {took:.0f} s: {costs}\n")
    sys.stdout.write(f"{audit.table(counts, count)}\n")
    # One more write for each: that it waits, and for whom it still does.
    assert sum(counts.values()) <= (WRITES_PER_JOB + 1) * count + links


def die_and_go_on(
    plane: ControlPlane, record: Record, operator: OperatorProcess, *, count: int, kills: int
) -> None:
    crowd = Crowd(plane, record, f"{NAMESPACE}-{count}", count)
    with ThreadPoolExecutor(1) as pool:
        creation = pool.submit(crowd.create)
        for number in range(kills):
            crowd.until_over(count * number // (kills + 1) + 1, 120)
            starts = operator.starts
            operator.kill()
            record.until("start of the next", partial(has_started, operator, starts))
            operator.wait_until_ready()
        creation.result()
        crowd.until_over(count, 300)
    requests = crowd.requests()
    crowd.assert_all_ran_once(requests)
    counts = own_requests(requests)
    sys.stdout.write(f"\n{count} jobs, {kills} kills\n{audit.table(counts, count)}\n")
    # What was under way at a kill is done again.
    assert sum(counts.values()) <= (WRITES_PER_JOB + 1) * count
