"""The contract over HTTP: two replicas of the gateway, the operator beside them."""

import itertools
import json
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import pytest
import urllib3
from typing_extensions import override

from agentjobs.api.names import ANNOTATION_ARGUMENTS
from tests import audit
from tests.apiclient import Document
from tests.controlplane.callers import Caller, Server
from tests.controlplane.installed import OPERATOR, inputrequest
from tests.controlplane.stage import CALLBACKS, ENDS, Place, Scenario, scenario, told_in
from tests.controlplane.tenants import (
    CALLS,
    READ,
    STOP,
    Account,
    Right,
    Tenant,
    asked_by,
    functions,
    id_in,
    name_of,
    unknown_id,
    until_offered,
    use,
    wait_until,
)
from tests.faulty_proxy import Fault, is_watch_of
from tests.gateway_process import Agent, GatewayProcess, Reply

pytestmark = pytest.mark.controlplane

T = TypeVar("T")
SOAK = bool(os.environ.get("AGENTJOBS_SOAK"))
STARTS = 500 if SOAK else 100
CALLERS = 8
LATE_WATCH = 0.5
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}}
RECEIVERS = ("https://receiver.example.com/u1", "https://receiver.example.com/u2")


def at_once(calls: Iterable[Callable[[], T]]) -> list[T]:
    """Make all calls at the same moment."""
    waiting = list(calls)
    barrier = threading.Barrier(len(waiting))

    def call(each: Callable[[], T]) -> T:
        barrier.wait()
        return each()

    with ThreadPoolExecutor(len(waiting)) as pool:
        return list(pool.map(call, waiting))


def in_turns(number: int, call: Callable[[int], T]) -> list[T]:
    """Make calls, some at a time."""
    with ThreadPoolExecutor(CALLERS) as pool:
        return list(pool.map(call, range(number)))


def start_and_hang_up(gateway: GatewayProcess, token: str, key: str, body: Document) -> None:
    """Send a whole start, and reset the connection at once."""
    content = json.dumps(body).encode()
    head = (
        "POST /v1/jobs HTTP/1.1\r\nHost: gateway\r\nContent-Type: application/json\r\n"
        f"Authorization: Bearer {token}\r\nIdempotency-Key: {key}\r\n"
        f"Content-Length: {len(content)}\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", gateway.port)) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.sendall(head.encode() + content)


def requested_by(place: Place, account: Account) -> list[Document]:
    """AgentJobs of one requester, as the API server has them."""
    found = place.api.items("AgentJob", place.namespace)
    return [job for job in found if job["spec"].get("requestedBy") == account.user]


def by_gateways(tail: audit.Tail, namespace: str) -> list[audit.Request]:
    """What replicas of the gateway have asked for in a namespace: reviews have none."""
    return [
        each
        for each in tail.new(holding=namespace)
        if each.namespace == namespace and any("gateway" in group for group in each.groups)
    ]


# R-KEY


@scenario("R-KEY R-NAMESPACE fifty equal starts at two replicas make one job")
def fifty_at_once(place: Place) -> None:
    replicas = place.stage.replicas
    tenant = Tenant(place.stage, place.namespace)
    place.tool("count", inputSchema=SCHEMA)
    caller = tenant.account("counter", CALLS, use("count"))
    until_offered(caller.agent, "count", *replicas)
    request: Document = {"tool": "count", "arguments": {"n": 3}}

    def send(number: int) -> Reply | None:
        gateway = replicas[number % 2]
        if number < 10:
            start_and_hang_up(gateway, caller.agent.token, "k-1", request)
            return None
        return caller.agent.start(gateway, "k-1", **request)

    replies = [each for each in at_once(partial(send, n) for n in range(50)) if each]
    assert len(replies) == 40
    (this,) = {id_in(reply) for reply in replies}
    assert this.endswith(f".{place.namespace}")

    name = name_of(this)
    place.kubelet.run(place.until_pod(name), message="three")
    assert place.until_over(name)["state"] == "done"
    wait_until("end", partial(is_done, caller.agent, replicas[0], this))
    late = caller.agent.start(replicas[0], "k-1", **request)
    assert (id_in(late), late.body["status"]) == (this, "done")
    assert late.headers["Idempotency-Replayed"] == "true"
    assert [job["metadata"]["name"] for job in requested_by(place, caller)] == [name]
    assert len(place.jobs(name)) == len(place.pods(name)) == 1
    assert len(place.status(name)["attempts"]) == 1
    for gateway in replicas:
        wait_until("end", partial(is_done, caller.agent, gateway, this))
        result = caller.agent.get(gateway, f"/v1/jobs/{this}/result")
        assert (result.code, result.body["data"]) == (200, "three")


def is_done(agent: Agent, gateway: GatewayProcess, job_id: str) -> bool:
    return bool(agent.status(gateway, job_id).body["status"] == "done")


SUM_SCHEMA: Document = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "object"}, "c": {"default": 0}},
    "required": ["a"],
    "additionalProperties": False,
}
BASE: Document = {
    "tool": "sum",
    "arguments": {"a": 1, "b": {"x": [1, 2], "y": "ä"}},
    "callback": {"url": RECEIVERS[0]},
}
REWRITTEN = b"""{ "callback" : {"url":"%s"},
 "arguments": {"b": {"y": "\\u00e4", "x": [1.0, 2]},   "a": 1.0}, "tool":"sum"}
""" % RECEIVERS[0].encode()
TRACED = {"traceparent": "00-" + 32 * "a" + "-" + 16 * "b" + "-01", "tracestate": "x=y"}


@dataclass(frozen=True)
class Sums:
    """Starts of the tool sum with the key k-2, at one replica after the other."""

    place: Place
    a: Account
    b: Account
    elsewhere: Tenant
    turns: "itertools.cycle[GatewayProcess]"

    @classmethod
    def of(cls, place: Place) -> "Sums":
        replicas, here = place.stage.replicas, place.namespace
        tenant, other = Tenant(place.stage, here), Tenant.new(place.stage, f"{here}-b")
        for each in (tenant, other):
            each.usable_tool("sum", inputSchema=SUM_SCHEMA)
        a = tenant.account("agent-a", CALLS, use("sum"))
        b = tenant.account("agent-b", CALLS, use("sum"))
        other.grant(a, CALLS, use("sum"))
        for namespace in (here, other.namespace):
            until_offered(a.agent, "sum", *replicas, namespace=namespace)
        return cls(place, a, b, other, itertools.cycle(replicas))

    def start(
        self, who: Account | None = None, key: str = "k-2", query: str = "", **changes: Any
    ) -> Reply:
        agent = (who or self.a).agent
        return agent.start(next(self.turns), key, query=query, **{**BASE, **changes})

    def raw(self, body: Any, **headers: str) -> Reply:
        return self.a.agent.send(next(self.turns), "POST", "/v1/jobs", body, headers)


@scenario(
    "R-KEY R-NAMESPACE R-ARGS R-CALLBACK what counts as the same start, and what does not",
    CALLBACKS_ALLOW=CALLBACKS,
)
def same_words(place: Place) -> None:
    sums = Sums.of(place)
    start, here = sums.start, place.namespace
    this = id_in(start())
    for _ in range(2):
        # b: other order, other spelling
        assert id_in(sums.raw(REWRITTEN, **{"Idempotency-Key": "k-2"})) == this
        # c, d: other contents
        changed = {"a": 1, "b": {"x": [2, 1], "y": "ä"}}
        assert_reused(start(arguments=changed), this, "arguments")
        assert_reused(start(callback={"url": RECEIVERS[1]}), this, "callback")
    # e: another caller
    theirs = id_in(start(sums.b))
    # f: no key
    refused = sums.raw(BASE)
    assert (refused.code, refused.problem) == (400, "key-required")
    # g: a refused start does not use its key up
    refused = start(key="k-3", arguments={"a": "one"})
    assert (refused.code, refused.problem) == (422, "invalid-arguments")
    assert [each["pointer"] for each in refused.body["errors"]] == ["/arguments/a"]
    third = id_in(start(key="k-3"))
    for inside in ("http://localhost:9/", "http://2130706433:9/", "http://[fd00:ec2::254]/"):
        refused = start(key="k-4", callback={"url": inside})
        assert (refused.code, refused.problem) == (422, "unrunnable"), refused.body
    # h: the namespace counts as resolved; headers do not count
    assert id_in(start(namespace=here)) == this
    assert id_in(start(query=f"?namespace={here}")) == this
    assert id_in(start(namespace=here, query=f"?namespace={here}")) == this
    assert id_in(sums.raw(BASE, **{"Idempotency-Key": "k-2"}, **TRACED)) == this
    # i: arguments count as received; the other members and the namespace count too
    assert_reused(start(arguments={**BASE["arguments"], "c": 0}), this, "arguments")
    assert_reused(start(deadline_seconds=600), this, "deadline_seconds")
    assert_reused(start(depends_on=[third]), this, "depends_on")
    elsewhere = id_in(start(namespace=sums.elsewhere.namespace))

    made = place.api.items("AgentJob", here) + sums.elsewhere.agentjobs()
    ids = {f"{job['metadata']['name']}.{job['metadata']['namespace']}" for job in made}
    assert ids == {this, theirs, third, elsewhere}
    assert len(ids) == len(made) == 4
    a_changed_default(sums, this)


def a_changed_default(sums: Sums, this: str) -> None:
    """Row j: it changes nothing of what was started."""
    place = sums.place
    before = place.until_pod(name_of(this))["metadata"]["annotations"][ANNOTATION_ARGUMENTS]
    assert json.loads(before)["c"] == 0
    schema = {**SUM_SCHEMA, "properties": {**SUM_SCHEMA["properties"], "c": {"default": 5}}}
    change = {"spec": {"inputSchema": schema}}
    place.api.patch("AgentTool", place.namespace, "sum", change).object()
    for gateway in place.stage.replicas:
        wait_until("new default", partial(takes_five, sums.a.agent, gateway))
        assert id_in(sums.a.agent.start(gateway, "k-2", **BASE)) == this
    (pod,) = place.pods(name_of(this))
    assert pod["metadata"]["annotations"][ANNOTATION_ARGUMENTS] == before


def assert_reused(reply: Reply, first: str, *members: str) -> None:
    """It says which members differ, and nothing of what is in them."""
    assert (reply.code, reply.problem) == (422, "key-reused")
    assert (reply.body["differs"], reply.body["job_id"]) == ([*members], first)
    told = reply.raw.decode().replace(first, "")
    assert not [
        value for value in ("ä", "u1", "u2", "[", "600") if value in told.split("differs")[0]
    ]


def takes_five(agent: Agent, gateway: GatewayProcess) -> bool:
    parameters = functions(agent, gateway)["sum"]["parameters"]
    return bool(parameters["properties"]["c"]["default"] == 5)


@scenario("R-KEY a replica that is killed in the middle of many starts: one job a key", own=True)
def killed_in_the_middle(place: Place) -> None:
    stage = place.stage
    tail = audit.Tail(stage.plane.audit_log)
    survivor = stage.replicas[0]
    victim = stage.gateway("gateway-that-dies")
    tenant = Tenant(stage, place.namespace)
    tenant.usable_tool("count", inputSchema=SCHEMA)
    caller = tenant.account("agent-a", CALLS, use("count"))
    until_offered(caller.agent, "count", survivor, victim)
    answered = threading.Semaphore(0)
    broken: list[Exception] = []

    def start(number: int) -> str:
        key = f"k-{number}"
        request: Document = {"tool": "count", "arguments": {"n": number}}
        turns = itertools.cycle((victim, survivor) if number % 4 else (survivor, victim))
        for _ in range(20):
            try:
                reply = caller.agent.start(next(turns), key, **request)
            except urllib3.exceptions.HTTPError as error:
                broken.append(error)
                continue
            if reply.code != 503:
                answered.release()
                return id_in(reply)
        raise AssertionError(f"no answer for {key}")

    def kill() -> None:
        for _ in range(STARTS // 3):
            answered.acquire()
        victim.kill()

    killer = threading.Thread(target=kill)
    killer.start()
    ids = in_turns(STARTS, start)
    killer.join()
    assert len(set(ids)) == STARTS
    cut_off = [e for e in broken if not isinstance(e, urllib3.exceptions.NewConnectionError)]
    assert cut_off, "nobody was cut off: it did not die in the middle"
    assert in_turns(STARTS, start) == ids

    assert {job["metadata"]["name"] for job in tenant.agentjobs()} == {name_of(i) for i in ids}
    uids = {job["metadata"]["uid"] for job in place.record.all("AgentJob", place.namespace)}
    assert len(uids) == STARTS
    made = [
        each.returned["metadata"]["name"]
        for each in by_gateways(tail, place.namespace)
        if (each.verb, each.resource) == ("create", "agentjobs") and each.taken
    ]
    # A request whose sender was killed stands in the log without its answer.
    assert len(made) == len(set(made)) >= STARTS - len(cut_off)


@scenario("R-KEY an answer of the API server that is lost makes no second job", own=True)
def lost_answers(place: Place) -> None:
    proxy = place.stage.gateway_proxy("gateway-unlucky")
    gateway = place.stage.gateway("gateway-unlucky", through=proxy)
    tenant = Tenant(place.stage, place.namespace)
    tenant.usable_tool("count", inputSchema=SCHEMA)
    agent = tenant.account("agent-a", CALLS, use("count")).agent
    until_offered(agent, "count", gateway)
    bad = [Fault.TOO_MANY, Fault.BROKEN, Fault.CUT, Fault.LOST_ANSWER, Fault.AWAY]
    ids = []
    for number in range(len(bad)):
        # Each comes first once, so that faults lie before and after the lost answer.
        faults = iter(bad[number:] + bad[:number])
        proxy.choose = lambda method, path, faults=faults: (  # type: ignore[misc]
            next(faults, Fault.NONE)
            if method == "POST" and path.partition("?")[0].endswith("/agentjobs")
            else Fault.NONE
        )
        ids.append(id_in(agent.start(gateway, f"k-{number}", "count", arguments={"n": number})))
    proxy.choose = lambda _method, _path: Fault.NONE
    made = {f"{job['metadata']['name']}.{place.namespace}" for job in tenant.agentjobs()}
    assert made == set(ids)
    assert len(made) == len(bad)
    lost = [each for each in proxy.passed if each.fault is Fault.LOST_ANSWER]
    assert len(lost) == len(bad)


@scenario("R-KEY a start is one write, its status is read from the cache", own=True)
def requests_for_each_start(place: Place) -> None:
    stage, number = place.stage, 20
    tail = audit.Tail(stage.plane.audit_log)
    gateway = stage.replicas[0]
    tenant = Tenant(stage, place.namespace)
    tenant.usable_tool("count", inputSchema=SCHEMA)
    caller = tenant.account("agent-a", CALLS, use("count"))
    until_offered(caller.agent, "count", gateway)

    def live(n: int) -> None:
        request: Document = {"tool": "count", "arguments": {"n": n}}
        this = id_in(caller.agent.start(gateway, f"k-{n}", **request))
        for _ in range(3):
            assert caller.agent.status(gateway, this).body["status"] == "queued"
        assert id_in(caller.agent.start(gateway, f"k-{n}", **request)) == this
        assert caller.agent.get(gateway, "/v1/jobs").code == 200
        assert caller.agent.stop(gateway, this).code == 202
        assert caller.agent.status(gateway, this).body["status"] == "stopping"

    in_turns(number, live)
    asked = [each for each in asked_by(gateway, tail, tenant) if each.namespace == tenant.namespace]
    assert audit.count(asked) == {("create", "agentjobs"): number, ("patch", "agentjobs"): number}
    assert all(each.taken for each in asked)


# A caller always sees their own writes


@scenario("R-AUTH R-OUTPUT R-STOP an id is known to the other replica at once", own=True)
def read_right_after_the_start(place: Place) -> None:
    first, second = place.stage.replicas
    tenant = Tenant(place.stage, place.namespace)
    tenant.usable_tool("count", inputSchema=SCHEMA)
    caller = tenant.account("agent-a", CALLS, use("count"))
    until_offered(caller.agent, "count", first, second)

    def live(number: int) -> None:
        this = id_in(caller.agent.start(first, f"k-{number}", "count", arguments={"n": number}))
        status = caller.agent.status(second, this)
        assert (status.code, status.body["status"]) == (200, "queued")
        output = caller.agent.get(second, f"/v1/jobs/{this}/output")
        assert (output.code, output.body["data"], output.body["end"]) == (200, "", False)
        assert caller.agent.stop(second, this).code == 202

    in_turns(STARTS, live)
    for code in in_turns(
        STARTS, lambda _: caller.agent.status(second, unknown_id(place.namespace)).code
    ):
        assert code == 404


def a_replica_behind(place: Place, name: str) -> tuple[GatewayProcess, threading.Event]:
    """A replica that no watch tells of AgentJobs until the event is set."""
    released = threading.Event()
    proxy = place.stage.gateway_proxy(name)
    gateway = place.stage.gateway(name, through=proxy)
    proxy.hold = lambda path, _: is_watch_of(path, "agentjobs") and not released.is_set()
    return gateway, released


@scenario("R-AUTH a caller sees their own writes at a replica whose watch stands still", own=True)
def own_writes(place: Place) -> None:
    first = place.stage.replicas[0]
    behind, released = a_replica_behind(place, "gateway-behind")
    tenant = Tenant(place.stage, place.namespace)
    tenant.usable_tool("count", inputSchema=SCHEMA)
    agent = tenant.account("agent-a", CALLS, use("count")).agent
    until_offered(agent, "count", first, behind)
    try:
        started = agent.start(first, "k-1", "count")
        this = id_in(started)
        assert id_in(agent.start(behind, "k-1", "count")) == this
        same = agent.get(behind, f"/v1/jobs/{this}", **{"If-None-Match": started.headers["ETag"]})
        assert same.code == 304

        stopped = agent.stop(first, this)
        assert (stopped.code, stopped.body["status"]) == (202, "stopping")
        # Its watch has not told it; who says what they know is not told anything older.
        assert agent.status(behind, this).body["status"] == "queued"
        seen = {"If-None-Match": stopped.headers["ETag"]}
        assert agent.get(behind, f"/v1/jobs/{this}", **seen).code == 304
        assert agent.status(behind, this).body["status"] == "stopping"
        again = agent.stop(behind, this)
        assert (again.code, again.body["job_status"]) == (409, "stopping")

        # A tool that has gone since takes nothing from what was started with it.
        second = id_in(agent.start(first, "k-2", "count"))
        place.api.delete("AgentTool", place.namespace, "count").object()
        wait_until("end of the tool", lambda: "count" not in functions(agent, behind))
        refused = agent.start(behind, "k-3", "count")
        assert (refused.code, refused.problem) == (404, "tool-not-found")
        assert id_in(agent.start(behind, "k-2", "count")) == second
    finally:
        released.set()


@scenario("R-STOP repeated and late stops are told how it stands; the first one stays", own=True)
def stop_call_repeats(place: Place) -> None:
    stage = place.stage
    first, second = stage.replicas
    tenant = Tenant(stage, place.namespace)
    operator = stage.operator(place)
    place.tool("t")
    patch = Right("agentjobs", ("patch",))
    a = tenant.account("agent-a", CALLS, use("t"), patch)
    lead = tenant.account("lead-a", READ, STOP, patch)
    kind = {"kind": "AgentTool", "name": "t"}
    made = a.create("stubborn", toolRef=kind, deadlineSeconds=600).object()
    assert made["spec"]["requestedBy"] == a.user
    pod = place.until_running("stubborn")["stubborn"]
    place.kubelet.when_asked_to_end(pod, 137, after=3)
    this = f"stubborn.{place.namespace}"
    wait_until("run", lambda: a.agent.status(first, this).body["status"] == "running")

    assert operator.terminate() == 0
    taken = a.agent.stop(first, this, "?reason=changed%20my%20mind")
    assert (taken.code, taken.body) == (202, {"job_id": this, "status": "stopping"})
    stop = place.api.get("AgentJob", place.namespace, "stubborn").object()["spec"]["stop"]
    assert (stop["requestedBy"], stop["reason"]) == (a.user, "changed my mind")
    late = lead.agent.stop(second, this, "?reason=other")
    assert (late.code, late.problem) == (409, "already-stopped")
    assert late.body["job_status"] == "stopping"

    operator.start()
    place.until_state("stubborn", "stopping")
    late = a.agent.stop(second, this)
    assert (late.code, late.body["job_status"]) == (409, "stopping")

    status = place.until_over("stubborn")
    assert (status["state"], status["cause"]["code"]) == ("cancelled", "stopped")
    assert status["cause"]["forced"]
    stops_after_the_end(place, a, this)
    job = place.api.get("AgentJob", place.namespace, "stubborn").object()
    assert job["spec"]["stop"] == stop
    for change in ({"reason": "other"}, {"requestedBy": lead.user}, None):
        for who in (a, lead):
            assert not who.kubectl.patch(made, {"spec": {"stop": change}}).taken
    kept = lead.kubectl.patch(made, {"spec": {"ttlSecondsAfterFinished": 7200}}).object()
    assert kept["spec"]["requestedBy"] == a.user


def stops_after_the_end(place: Place, a: Account, this: str) -> None:
    """They are told how it ended, and change nothing."""
    version = until_at_rest(place, name_of(this))
    for gateway in place.stage.replicas:
        late = a.agent.stop(gateway, this)
        assert (late.code, late.problem) == (409, "already-stopped")
        assert late.body["job_status"] == "cancelled"
        result = a.agent.get(gateway, f"/v1/jobs/{this}/result")
        assert (result.code, result.body["job_status"]) == (409, "cancelled")
        unknown = a.agent.stop(gateway, unknown_id(place.namespace))
        assert (unknown.code, unknown.problem) == (404, "job-not-found")
    job = place.api.get("AgentJob", place.namespace, name_of(this)).object()
    assert job["metadata"]["resourceVersion"] == version


def until_at_rest(place: Place, name: str) -> str:
    """Wait until nothing is owed for a job; return its version."""
    place.record.until(
        f"rest of {name}",
        lambda: place.conditions(name).get("CallbackDelivered", "True") != "False",
    )
    seen = ""
    while seen != (seen := str(place.job(name)["metadata"]["resourceVersion"])):
        time.sleep(0.5)
    return seen


# Quota


@dataclass(frozen=True)
class Limited:
    """A tenant with room for five jobs, and another one."""

    place: Place
    a: Account
    other: Tenant

    @classmethod
    def of(cls, place: Place) -> "Limited":
        stage, here = place.stage, place.namespace
        tenant, other = Tenant(stage, here), Tenant.new(stage, f"{here}-b")
        stage.operator(place)
        a = tenant.account("agent-a", CALLS, use("t"))
        other.grant(a, CALLS, use("t"))
        for each in (tenant, other):
            each.usable_tool("t")
            until_offered(a.agent, "t", *stage.replicas, namespace=each.namespace)
        limit_to(place, 5)
        return cls(place, a, other)

    def start(self, number: int, gateway: GatewayProcess, **more: Any) -> Reply:
        return self.a.agent.start(gateway, f"q-{number}", "t", **more)

    def assert_full(self, reply: Reply) -> None:
        assert (reply.code, reply.problem) == (429, "quota-exceeded"), reply.raw
        assert int(reply.headers["Retry-After"]) >= 1
        assert "count/agentjobs.agentjobs.dev=5" in reply.body["detail"]
        assert self.other.namespace not in reply.body["detail"]


@scenario("R-KEY R-TTL a tenant at its quota gets 429, keeps its keys, and harms nobody", own=True)
def tenant_quota(place: Place) -> None:
    limited = Limited.of(place)
    replicas = place.stage.replicas
    metric = "agentjobs_gateway_quota_refusals_total"
    counted = sum(gateway.metric(metric) for gateway in replicas)
    behind, released = a_replica_behind(place, "gateway-behind-a-quota")
    replies = at_once(partial(limited.start, n, replicas[n % 2]) for n in range(20))
    taken = {n: id_in(reply) for n, reply in enumerate(replies) if reply.code == 202}
    refused = [n for n in range(20) if n not in taken]
    assert len(taken) == len(set(taken.values())) == 5
    for n in refused:
        limited.assert_full(replies[n])
    assert sum(gateway.metric(metric) for gateway in replicas) == counted + 15
    pods = place.until_running(*map(name_of, taken.values()))

    for gateway in (behind, *replicas):
        for n, this in taken.items():
            again = limited.start(n, gateway)
            assert (id_in(again), again.headers["Idempotency-Replayed"]) == (this, "true")
        limited.assert_full(limited.start(refused[0], gateway))
    released.set()
    id_in(limited.start(99, replicas[0], namespace=limited.other.namespace))
    by_kubectl = limited.a.create("by-kubectl", toolRef={"name": "t"})
    assert (by_kubectl.code, "exceeded quota" in by_kubectl.message) == (403, True)
    first, *kept = taken.values()
    goes_on_as_without(limited, first)

    for this in kept:
        place.kubelet.finish(pods[name_of(this)])
    for this in kept:
        status = place.until_over(name_of(this))
        assert (status["state"], len(status["attempts"])) == ("done", 1)
    assert place.until_over(name_of(first))["state"] == "cancelled"
    # A job that is over counts until it is gone.
    limited.assert_full(limited.start(refused[0], replicas[0]))
    place.api.delete("AgentJob", place.namespace, name_of(kept[0])).object()
    place.until_gone("AgentJob", name_of(kept[0]))
    last = until_there_is_room(limited, refused[0])
    place.until_job(name_of(last))

    names = {job["metadata"]["name"] for job in place.record.all("AgentJob", place.namespace)}
    assert names == {name_of(each) for each in (first, *kept[1:], last)}
    jobs = {job["metadata"]["name"] for job in place.record.all("Job", place.namespace)}
    assert {name.rpartition("-")[0] for name in jobs} <= {*names, name_of(kept[0])}
    # Nothing was made for a refused start.
    assert len(place.api.items("InputRequest", place.namespace)) == 1
    secrets = place.api.items("Secret", place.namespace)
    assert [each["metadata"]["name"] for each in secrets] == ["agentjobs-signing-key"]


def goes_on_as_without(limited: Limited, this: str) -> None:
    """A full quota changes nothing for a job that was accepted."""
    place, agent = limited.place, limited.a.agent
    replicas = place.stage.replicas
    ask(place, this, limited.a)
    for gateway in replicas:
        assert agent.status(gateway, this).code == 200
        assert agent.get(gateway, f"/v1/jobs/{this}/output").code == 200
        wait_until("question", partial(open_questions, agent, gateway, this))
    path = f"/v1/jobs/{this}/inputs/colour"
    wrong = agent.send(replicas[0], "POST", path, {"outcome": "answered", "answer": {"colour": 5}})
    assert (wrong.code, wrong.problem) == (422, "invalid-body")
    assert [each["pointer"] for each in wrong.body["errors"]] == ["/answer/colour"]
    answer = {"outcome": "answered", "answer": {"colour": "red"}}
    assert agent.send(replicas[0], "POST", path, answer).code == 204
    late = agent.send(replicas[1], "POST", path, {"outcome": "declined"})
    assert (late.code, late.problem) == (409, "already-answered")
    (question,) = place.api.items("InputRequest", place.namespace)
    assert question["status"]["answer"] == {"colour": "red"}
    assert question["status"]["answeredBy"] == limited.a.user
    assert agent.stop(replicas[1], this).code == 202


def until_there_is_room(limited: Limited, number: int) -> str:
    """Repeat a refused start: the API server counts again in its own time."""
    replies: list[Reply] = []

    def taken() -> bool:
        replies.append(limited.start(number, limited.place.stage.replicas[1]))
        if replies[-1].code == 429:
            limited.assert_full(replies[-1])
        return replies[-1].code != 429

    wait_until("room", taken, 60)
    return id_in(replies[-1])


def limit_to(place: Place, number: int) -> None:
    """Limit AgentJobs, and wait until they are counted.

    The controller manager finds new kinds within half a minute, and does not count anew then.
    """
    hard = {"count/agentjobs.agentjobs.dev": str(number)}
    quota = {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "few", "namespace": place.namespace},
        "spec": {"hard": hard},
    }

    def counted() -> bool:
        place.api.create(quota)
        try:
            wait_until("count", lambda: used_of(place).keys() == hard.keys(), 2)
        except AssertionError:
            place.api.delete("ResourceQuota", place.namespace, "few").object()
            return False
        return True

    wait_until("count of the quota", counted, 60)


def used_of(place: Place) -> Document:
    quota = place.api.get("ResourceQuota", place.namespace, "few").object()
    return (quota.get("status") or {}).get("used") or {}


def ask(place: Place, job_id: str, requester: Account) -> None:
    """Ask for a colour, as the operator."""
    job = place.job(name_of(job_id))
    spec = {
        "jobName": job["metadata"]["name"],
        "jobUID": job["metadata"]["uid"],
        "key": "colour",
        "kind": "elicitation",
        "prompt": "Which colour?",
        "schema": {"type": "object", "properties": {"colour": {"type": "string"}}},
        "requestedBy": requester.user,
        "expiresAt": "2100-01-01T00:00:00Z",
    }
    operator = Caller(Server.of(place.stage.plane.kubeconfig), OPERATOR, "system:masters")
    operator.create(inputrequest(place.namespace, f"{spec['jobName']}-colour", spec)).object()


def open_questions(agent: Agent, gateway: GatewayProcess, job_id: str) -> list[Document]:
    found: list[Document] = agent.get(gateway, f"/v1/jobs/{job_id}/inputs").body["inputs"]
    return found


# Changes


class Follower(threading.Thread):
    """Follows the changes of a namespace at one gateway, and at the next when that one breaks."""

    def __init__(self, agent: Agent, namespace: str, *gateways: GatewayProcess) -> None:
        super().__init__(daemon=True)
        self.seen: dict[str, str] = {}
        self.polls: dict[str, int] = dict.fromkeys((each.name for each in gateways), 0)
        self.broken = 0
        self.wrong: list[str] = []
        self._agent = agent
        self._namespace = namespace
        self._gateways = list(gateways)
        self._since = ""
        self._ended = threading.Event()

    def turn(self) -> None:
        """Go to the next gateway with the next poll."""
        self._gateways.append(self._gateways.pop(0))

    def end(self) -> None:
        self._ended.set()
        self.join(30)

    @property
    def over(self) -> int:
        return sum(state in ENDS for state in list(self.seen.values()))

    @override
    def run(self) -> None:
        while not self._ended.is_set():
            gateway = self._gateways[0]
            query = f"namespace={self._namespace}&since={self._since}&wait=2"
            try:
                reply = self._agent.get(gateway, f"/v1/jobs?{query}")
            except urllib3.exceptions.HTTPError:
                self.broken += 1
                self.turn()
                continue
            if reply.code != 200:
                self.wrong.append(f"{reply.code} {reply.raw!r}")
                return
            self._take(reply.body)
            self.polls[gateway.name] += 1

    def _take(self, page: Document) -> None:
        self._since = page["since"]
        for each in page["jobs"]:
            before, after = self.seen.get(each["job_id"]), each["status"]
            order = ("queued", "running", "stopping", *ENDS).index
            backwards = before in ENDS or (before and order(after) < order(before))
            if backwards and before != after:
                self.wrong.append(f"{each['job_id']} went from {before} to {after}")
            self.seen[each["job_id"]] = after


@scenario("R-LEVEL changes since a cursor: none is missed, whichever replica is asked", own=True)
def changes_since(place: Place) -> None:
    stage, number = place.stage, 200
    late = stage.replicas[1]
    mortal = stage.gateway("gateway-followed")
    tenant = Tenant(stage, place.namespace)
    agent = tenant.account("watcher", READ).agent
    stage.operator(place)
    follower = Follower(agent, place.namespace, mortal, late)
    follower.start()

    half, names = number // 2, [f"job-{n}" for n in range(number)]
    in_turns(half, lambda n: begin(place, names[n], n))
    in_turns(half, lambda n: end(place, names[n], n))
    place.record.until("change seen", lambda: follower.over > number // 8)
    follower.turn()
    in_turns(half, lambda n: begin(place, names[half + n], n))
    place.record.until("poll at the second", lambda: follower.polls[late.name] > 1)
    follower.turn()
    polls = follower.polls[mortal.name]
    place.record.until("poll at the first", lambda: follower.polls[mortal.name] > polls)
    victim = threading.Timer(0.3, mortal.kill)
    victim.start()
    in_turns(half, lambda n: end(place, names[half + n], n))
    victim.join()
    for name in names:
        place.until_over(name, 60)
    with suppress(AssertionError):
        place.record.until("last end", lambda: follower.over == number, 20)
    follower.end()
    assert not follower.wrong
    assert follower.broken
    now = {
        f"{job['metadata']['name']}.{place.namespace}": job["status"]["state"]
        for job in tenant.agentjobs()
    }
    assert len(now) == number
    assert follower.seen == now
    assert {"done", "failed", "cancelled"} == set(now.values())


def begin(place: Place, name: str, n: int) -> None:
    """One in ten runs, the others wait to be stopped or can never run."""
    if n % 10 == 0:
        place.create(name)
    elif n % 10 < 7:
        place.create(name, suspend=True)
    else:
        place.create(name, toolRef={"name": "nobody-has-it"})


def end(place: Place, name: str, n: int) -> None:
    if n % 10 == 0:
        place.kubelet.run(place.until_pod(name), n % 3)
    elif n % 10 < 7:
        place.stop(name)


@scenario("R-LEVEL who follows changes is told of a start at once", own=True)
def told_at_once(place: Place) -> None:
    """Also when its own write is known before the watch has told it."""
    proxy = place.stage.gateway_proxy("gateway-late")
    gateway = place.stage.gateway("gateway-late", through=proxy)
    proxy.hold = lambda path, age: is_watch_of(path, "agentjobs") and age < LATE_WATCH
    tenant = Tenant(place.stage, place.namespace)
    tenant.usable_tool("count", inputSchema=SCHEMA)
    agent = tenant.account("agent-a", CALLS, use("count")).agent
    until_offered(agent, "count", gateway)
    since = agent.get(gateway, "/v1/jobs").body["since"]
    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(agent.get, gateway, f"/v1/jobs?since={since}&wait=30")
        metric = "agentjobs_gateway_waiting"
        wait_until("long poll", lambda: gateway.metric(metric) > 0)
        began = time.monotonic()
        started = agent.start(gateway, "k-1", "count")
        page = waiting.result().body
        assert time.monotonic() - began < 15
        assert [each["job_id"] for each in page["jobs"]] == [id_in(started)]

        this = id_in(started)
        path = f"/v1/jobs/{this}?wait=30"
        seen = {"If-None-Match": started.headers["ETag"]}
        waiting = pool.submit(agent.get, gateway, path, **seen)
        wait_until("long poll", lambda: gateway.metric(metric) > 0)
        began = time.monotonic()
        assert agent.stop(gateway, this).code == 202
        assert waiting.result().body["status"] == "stopping"
        assert time.monotonic() - began < 15
    ahead = agent.get(gateway, f"/v1/jobs?since={page['since']}&wait=30").body
    assert [each["status"] for each in ahead["jobs"]] == ["stopping"]
    assert not agent.get(gateway, f"/v1/jobs?since={ahead['since']}").body["jobs"]


@pytest.mark.parametrize("scenario", told_in(__name__), ids=str)
def test_rule(played: Callable[[Scenario], None], scenario: Scenario) -> None:
    played(scenario)
