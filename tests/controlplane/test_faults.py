"""An API server that is away, refuses for a while, or forgets; leaders that sleep or die."""

import os
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable

import pytest

from tests import audit
from tests.apiclient import Document
from tests.controlplane.stage import ENDS, Place, Scenario, scenario, told_in
from tests.faulty_proxy import Fault, FaultyProxy, is_watch_of
from tests.operator_process import OperatorProcess

pytestmark = pytest.mark.controlplane

LEASES = "/leases"
CUT_SECONDS = 90.0 if os.environ.get("AGENTJOBS_SOAK") else 12.0
HEARD_SECONDS = 5.0
SETTLED_SECONDS = 30.0
BAD_SECONDS = 20.0
SLEEP_SECONDS = 25.0
SUCCESSION_SECONDS = 20.0


def assert_ran_once(place: Place, *names: str) -> None:
    """One Job and one pod for each, and no end that changes."""
    for name in names:
        assert [job["metadata"]["name"] for job in place.jobs(name)] == [f"{name}-1"]
        assert len(place.pods(name)) == 1
        assert_ends_once(place, name)


def assert_ends_once(place: Place, name: str) -> None:
    states = place.states(name)
    assert states[-1] in ENDS
    assert not set(states[:-1]) & set(ENDS), states
    assert states == sorted(states, key=("queued", "running", "stopping", *ENDS).index), states


def run_pods(place: Place, names: list[str], until: Callable[[], bool], code: int = 0) -> None:
    """Run every pod of these jobs to its end as it appears."""
    ran: set[str] = set()
    while not until():
        for name in names:
            for pod in place.pods(name):
                uid = pod["metadata"]["uid"]
                if uid not in ran and "deletionTimestamp" not in pod["metadata"]:
                    ran.add(uid)
                    place.kubelet.run(pod, code)
        time.sleep(0.1)


@scenario(
    "R-LEVEL what vanished or ended while the watches were cut is noticed, and its slots given",
    own=True,
)
def gone_during_the_gap(place: Place) -> None:
    proxy = place.stage.proxy(place)
    operator = place.stage.operator(place, through=proxy)
    ended = [f"ended-{n}" for n in range(10)]
    removed = [f"removed-{n}" for n in range(10)]
    queued = [f"queued-{n}" for n in range(5)]
    pods = fill_slots(place, ended + removed, queued)
    for name in removed:
        place.kubelet.when_asked_to_end(pods[name], None)

    cut(place, proxy, lambda: end_unseen(place, pods, ended, removed))
    assert {place.state(name) for name in ended + removed} == {"running"}
    assert min(silences(operator)) > CUT_SECONDS - 2
    proxy.choose = compacted()
    restored = time.monotonic()
    for name in ended:
        assert place.until_over(name)["state"] == "done"
    for name in removed:
        cause = place.until_over(name)["cause"]
        assert (cause["code"], cause["ran"]) == ("deleted_externally", True)
        assert cause["evidence"] == "lost"
    for name in queued:
        place.until_job(name)
    assert time.monotonic() - restored < SETTLED_SECONDS
    place.record.until("word of all", lambda: max(silences(operator)) < HEARD_SECONDS)
    assert_ran_once(place, *ended, *removed)
    assert operator.starts == 1
    assert operator.running
    place.create("after")
    run_pods(place, ["after"], lambda: place.state("after") == "done")


def fill_slots(place: Place, running: list[str], queued: list[str]) -> dict[str, Document]:
    """Take all slots of a tool, with others in line; return the pods that run."""
    place.tool("limited", maxConcurrent=len(running))
    for name in running:
        place.create(name, toolRef={"name": "limited"})
    pods = place.until_running(*running)
    for name in queued:
        place.create(name, toolRef={"name": "limited"})
    for name in queued:
        place.until_waiting(name, "slot")
    return pods


def cut(place: Place, proxy: FaultyProxy, happens: Callable[[], None]) -> None:
    """Keep the operator from all but its Lease for a while, in which something happens."""
    proxy.choose = lambda _, path: Fault.NONE if LEASES in path else Fault.CUT
    proxy.break_connections(lambda path: LEASES not in path)
    began = time.monotonic()
    happens()
    place.record.until(
        "end of the cut", lambda: time.monotonic() > began + CUT_SECONDS, 2 * CUT_SECONDS
    )


def end_unseen(
    place: Place, pods: dict[str, Document], ended: list[str], removed: list[str]
) -> None:
    for name in ended:
        place.kubelet.finish(pods[name])
    for name in removed:
        place.api.delete("Job", place.namespace, f"{name}-1").object()
    for name in removed:
        place.until_gone("Pod", pods[name]["metadata"]["name"])


def silences(operator: OperatorProcess) -> list[float]:
    return [
        operator.metric("agentjobs_watch_silence_seconds", resource=resource)
        for resource in ("agentjobs", "jobs", "pods")
    ]


@scenario("R-LEVEL a process whose watch has died ends, and the next one sees all", own=True)
def dead_watch(place: Place) -> None:
    proxy = place.stage.proxy(place)
    operator = place.stage.operator(place, through=proxy)
    place.create("watched")
    pod = place.until_running("watched")["watched"]
    proxy.choose = lambda _, path: Fault.DEAD_END if is_watch_of(path, "pods") else Fault.NONE
    proxy.break_connections(lambda path: is_watch_of(path, "pods"))
    assert operator.exit_code() == 1
    place.kubelet.finish(pod)
    proxy.choose = lambda _method, _path: Fault.NONE
    operator.start()
    assert place.until_over("watched")["state"] == "done"


def compacted() -> Callable[[str, str], Fault]:
    """Let every watch that goes on from before the cut begin anew."""
    expired: set[str] = set()

    def choose(_: str, path: str) -> Fault:
        stream = path.partition("?")[0]
        if "watch=" not in path or "resourceVersion=" not in path or stream in expired:
            return Fault.NONE
        expired.add(stream)
        return Fault.EXPIRED

    return choose


@scenario("R-LEVEL an API server that throttles, fails and hangs fails no job", own=True)
def throttled_is_not_failed(place: Place) -> None:
    proxy = place.stage.proxy(place)
    operator = place.stage.operator(place, through=proxy)
    operator.keep_running()
    first = [f"first-{n}" for n in range(10)]
    new = [f"new-{n}" for n in range(25)]
    stopped, others = new[:5], new[5:]
    for name in first:
        place.create(name)
    pods = place.until_running(*first)

    chance = random.Random(7)  # noqa: S311 - no secret
    faults = (
        [Fault.TOO_MANY] * 40
        + [Fault.BROKEN] * 10
        + [Fault.AWAY] * 10
        + [Fault.HANG] * 10
        + [Fault.LOST_ANSWER] * 5
        + [Fault.NONE] * 25
    )
    proxy.choose = lambda _, path: Fault.NONE if LEASES in path else chance.choice(faults)
    proxy.break_connections(lambda path: LEASES not in path)
    began = time.monotonic()
    for name in new:
        place.create(name)
    for name in first:
        place.kubelet.finish(pods[name])
    for name in stopped:
        place.stop(name)
    place.record.until(
        "end of the bad time", lambda: time.monotonic() > began + BAD_SECONDS, 2 * BAD_SECONDS
    )
    proxy.choose = lambda _method, _path: Fault.NONE
    ended = time.monotonic()
    run_pods(
        place,
        others,
        lambda: (
            all(place.state(name) in ENDS for name in first + new) or time.monotonic() > ended + 45
        ),
    )
    assert {place.state(name) for name in first + others} == {"done"}
    assert {place.state(name) for name in stopped} == {"cancelled"}
    assert_ran_once(place, *first, *others)
    for name in stopped:
        assert len(place.jobs(name)) <= 1
        assert not place.status(name)["cause"]["ran"]
        assert_ends_once(place, name)
    assert operator.starts <= 2
    rate = len(proxy.between(began, ended)) / (ended - began)
    seen = Counter(each.fault.name for each in proxy.between(began, ended))
    sys.stdout.write(f"\n{rate:.1f} requests per second in the bad time: {dict(seen)}\n")
    assert rate < 50
    assert seen["LOST_ANSWER"]


@scenario("R-CLAIM a leader that wakes up beside its successor does no harm", own=True)
def sleeper_wakes(place: Place) -> None:
    first = place.stage.operator(place, "sleeper")
    second = place.stage.operator(place, "successor")
    place.record.until("leader", lambda: first.leads)
    early = [f"early-{n}" for n in range(15)]
    late = [f"late-{n}" for n in range(30)]
    stopped = early[:5]
    others = early[5:] + late
    for name in early:
        place.create(name)
    over = threading.Event()
    player = threading.Thread(target=run_pods, args=(place, others, over.is_set))
    for name in stopped:
        place.kubelet.start(place.until_pod(name))
    first.freeze()
    frozen = time.monotonic()
    player.start()
    try:
        for name in late:
            place.create(name)
        for name in stopped:
            place.stop(name)
        place.record.until("successor", lambda: second.leads, SUCCESSION_SECONDS)
        place.record.until(
            "end of the sleep", lambda: time.monotonic() > frozen + SLEEP_SECONDS, 60
        )
        first.resume()
        woken = audit_now()
        assert first.exit_code() == 1, "it must notice that it leads no more"
        ended = audit_now()
        first.start()
        place.create("after")
        for name in (*others, *stopped):
            place.until_over(name)
        run_pods(place, ["after"], lambda: place.state("after") == "done")
    finally:
        over.set()
        player.join()
    assert {place.state(name) for name in others} == {"done"}
    assert {place.state(name) for name in stopped} == {"cancelled"}
    assert_ran_once(place, *others, *stopped, "after")
    late_writes = [
        each
        for each in audit.read(place.stage.plane.audit_log)
        if "sleeper" in each.groups
        and woken < each.at < ended
        and each.verb not in {"get", "list", "watch"}
        and each.taken
    ]
    assert not late_writes, [(each.verb, each.resource, each.name) for each in late_writes]
    assert second.leads
    assert not first.leads


def audit_now() -> str:
    """Now, as the audit log writes it."""
    now = time.time()
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now)) + f".{int(now % 1 * 1e6):06d}Z"


@scenario(
    "R-CLAIM one operator leads, one follows; a leader that ends hands over at once", own=True
)
def succession(place: Place) -> None:
    first = place.stage.operator(place, "first")
    place.record.until("leader", lambda: first.leads)
    second = place.stage.operator(place, "second")
    assert second.ready
    assert not second.leads

    assert first.terminate() == 0
    place.record.until("second leader", lambda: second.leads, 8)
    first.start()
    assert not first.leads

    second.kill()
    place.record.until("first leader again", lambda: first.leads, SUCCESSION_SECONDS)
    place.create("served")
    run_pods(place, ["served"], lambda: place.state("served") == "done")
    lease = place.api.get("Lease", place.namespace, "agentjobs-operator").object()
    assert lease["spec"]["holderIdentity"] == "first"
    assert lease["spec"]["leaseTransitions"] >= 2


@pytest.mark.parametrize("scenario", told_in(__name__), ids=str)
def test_rule(played: Callable[[Scenario], None], scenario: Scenario) -> None:
    played(scenario)
