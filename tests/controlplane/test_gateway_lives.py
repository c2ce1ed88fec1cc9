"""The gateway when the API server is slow or away, when it ends, and when its keys change."""

import asyncio
import json
import secrets
import shutil
import signal
import ssl
import threading
import time
from base64 import b64encode
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import kubernetes.client
import kubernetes.config
import pytest
import urllib3
from cryptography import x509

from agentjobs.gateway.keys import SECRET, Keys, load_keys
from agentjobs.kube import Access, Kube
from agentjobs.main import GATEWAY_CONNECTIONS
from tests.chart import NAMESPACE, only
from tests.cluster.pki import Pki
from tests.controlplane.installed import GATEWAY, USER, USER_TOKEN
from tests.controlplane.stage import Place, Scenario, scenario, told_in
from tests.controlplane.tenants import (
    CALLS,
    Account,
    Tenant,
    id_in,
    name_of,
    until_offered,
    use,
    wait_until,
)
from tests.faulty_proxy import Fault, FaultyProxy, is_watch_of
from tests.gateway_process import Agent, GatewayProcess
from tests.wire import Wire

pytestmark = pytest.mark.controlplane

TOOL = "open"
SLACK = 6.0
"""Seconds that a loaded machine may add."""
ANSWERED_WITHIN = 20.0
"""Seconds after which a caller knows that there is no answer now: their own patience is 30."""
STARTS = 140
"""More than the gateway has connections to the API server."""
REVIEWS_LAST = 10.0


def new_caller(place: Place, *gateways: GatewayProcess, namespace: str = "") -> Account:
    """Somebody who may start the tool, which these gateways know."""
    tenant = Tenant(place.stage, place.namespace)
    if namespace:
        tenant = Tenant.new(place.stage, namespace)
    tenant.usable_tool(TOOL, inputSchema={"type": "object"})
    account = tenant.account("agent", CALLS, use(TOOL))
    until_offered(account.agent, TOOL, *gateways)
    return account


def readiness(gateway: GatewayProcess) -> tuple[int, str]:
    reply = Agent("").get(gateway, "/readyz")
    return reply.code, reply.raw.decode()


def assert_in_order(gateway: GatewayProcess) -> None:
    assert "Traceback" not in gateway.log, gateway.log[-3000:]


# --- an API server that is slow or away


class Switch:
    """Keeps answers back while it is on: those whose path a test chooses."""

    def __init__(self, proxy: FaultyProxy, chosen: Callable[[str], bool]) -> None:
        self.on = False
        self._chosen = chosen
        proxy.hold = self._hold

    def _hold(self, path: str, _: float) -> bool:
        return self.on and self._chosen(path)


def is_start(path: str) -> bool:
    return "/agentjobs?fieldValidation" in path


@scenario("R-LEVEL R-KEY an API server that hangs: 503 in time, no pile, one job a key", own=True)
def api_server_hangs(place: Place) -> None:
    proxy = place.stage.gateway_proxy("hanging")
    switch = Switch(proxy, lambda path: "watch=" not in path)
    gateway = place.stage.gateway("hanging", through=proxy)
    account = new_caller(place, gateway)
    agent = account.agent
    job = id_in(agent.start(gateway, "before", TOOL))
    assert agent.status(gateway, job).code == 200

    switch.on = True
    began = time.monotonic()
    with ThreadPoolExecutor(STARTS) as pool:
        starts = [pool.submit(agent.start, gateway, f"k-{n}", TOOL) for n in range(STARTS)]
        wait_until("starts at the API server", lambda: proxy_under_way(proxy) > 50)
        # What is known is shown, as long as the right to see it is.
        assert agent.status(gateway, job).code == 200
        assert time.monotonic() - began < REVIEWS_LAST
        assert readiness(gateway)[0] == 200
        most = proxy_under_way(proxy)
        replies = [each.result() for each in starts]
        took = time.monotonic() - began
        late = pool.submit(agent.status, gateway, job)
        stranger = pool.submit(Agent(f"{agent.token}x").get, gateway, "/v1/jobs")
        assert late.result().problem == "unavailable", "the review is too old by now"
        assert stranger.result().problem == "unavailable", "nobody has said no to it"
    assert {(each.code, each.problem) for each in replies} == {(503, "unavailable")}
    assert all(int(each.headers["Retry-After"]) >= 1 for each in replies)
    assert most <= GATEWAY_CONNECTIONS
    assert took < ANSWERED_WITHIN + SLACK

    switch.on = False
    with ThreadPoolExecutor(8) as pool:
        again = list(pool.map(lambda n: agent.start(gateway, f"k-{n}", TOOL), range(STARTS)))
    assert len({id_in(reply) for reply in again}) == STARTS
    assert len(place.api.items("AgentJob", place.namespace)) == STARTS + 1
    assert_in_order(gateway)
    gateway.close()


def proxy_under_way(proxy: FaultyProxy) -> int:
    return sum("watch=" not in each.path_qs for each in list(proxy._open.values()))


@scenario("R-LEVEL an API server that was away: all is well again by itself", own=True)
def api_server_away(place: Place) -> None:
    proxy = place.stage.gateway_proxy("away")
    gateway = place.stage.gateway("away", through=proxy)
    agent = new_caller(place, gateway).agent
    kept, deleted = (id_in(agent.start(gateway, key, TOOL)) for key in ("kept", "deleted"))
    assert agent.status(gateway, kept).code == 200
    proxy.choose = lambda _method, _path: Fault.CUT
    proxy.break_connections()
    began = time.monotonic()
    with ThreadPoolExecutor(1) as pool:
        start = pool.submit(agent.start, gateway, "meanwhile", TOOL)
        assert agent.status(gateway, kept).code == 200
        refused = start.result()
    assert (refused.code, refused.problem) == (503, "unavailable")
    assert time.monotonic() - began < ANSWERED_WITHIN + SLACK
    remove(place, name_of(deleted))
    place.create("by-kubectl")

    # It comes back having forgotten the versions that the watches were at.
    expired: set[str] = set()

    def choose(_: str, path: str) -> Fault:
        stream = path.partition("?")[0]
        if "watch=" not in path or stream in expired:
            return Fault.NONE
        expired.add(stream)
        return Fault.EXPIRED

    proxy.choose = choose
    wait_until(
        "second list", lambda: any(is_watch_of(path, "agentjobs") for path in watched(proxy))
    )
    assert expired
    started = id_in(agent.start(gateway, "meanwhile", TOOL))
    wait_until(
        "news of all",
        lambda: ids_at(agent, gateway) == {kept, started, f"by-kubectl.{place.namespace}"},
    )
    poll = threading.Thread(target=agent.status, args=(gateway, kept, "?wait=30"))
    poll.start()
    wait_until("a long poll", lambda: gateway.metric("agentjobs_gateway_waiting") == 1)
    assert agent.stop(gateway, kept).code == 202
    poll.join(SLACK)
    assert not poll.is_alive(), "the watch works again"
    assert_in_order(gateway)
    gateway.close()


def watched(proxy: FaultyProxy) -> list[str]:
    return [each.path_qs for each in list(proxy._open.values())]


def ids_at(agent: Agent, gateway: GatewayProcess) -> set[str]:
    """What a list shows: it is read from the cache alone."""
    reply = agent.get(gateway, "/v1/jobs")
    return {job["job_id"] for job in reply.body["jobs"]} if reply.code == 200 else set()


def remove(place: Place, name: str) -> None:
    """Delete an AgentJob that no operator holds."""
    place.api.patch("AgentJob", place.namespace, name, {"metadata": {"finalizers": None}}).object()
    place.api.delete("AgentJob", place.namespace, name).object()


# --- its end, and what is under way then


@scenario("R-KEY what was accepted is finished and answered before the end", own=True)
def graceful_end(place: Place) -> None:
    proxy = place.stage.gateway_proxy("ending")
    switch = Switch(proxy, is_start)
    gateway = place.stage.gateway(
        "ending", through=proxy, settings={"DRAIN_SECONDS": 2, "END_SECONDS": 15}
    )
    agent = new_caller(place, gateway).agent
    job = id_in(agent.start(gateway, "before", TOOL))
    with ThreadPoolExecutor(4) as pool, Wire(gateway.port) as idle:
        idle.send(b"GET /healthz HTTP/1.1\r\nHost: gateway\r\n\r\n").until_answered()
        changes = f"/v1/jobs?wait=60&tool=other&since={since(agent, gateway)}"
        polls = [
            pool.submit(agent.get, gateway, path) for path in (f"/v1/jobs/{job}?wait=60", changes)
        ]
        switch.on = True
        start = pool.submit(agent.start, gateway, "under-way", TOOL)
        wait_until("long polls", lambda: gateway.metric("agentjobs_gateway_waiting") == 2)
        wait_until("start under way", lambda: any(map(is_start, watched(proxy))))

        began = time.monotonic()
        gateway.send(signal.SIGTERM)
        for poll in polls:
            reply = poll.result(SLACK)
            assert reply.code == 200
            assert reply.headers["Connection"] == "close"
        assert polls[0].result().body["status"] == "queued"
        assert readiness(gateway) == (503, "ending\n")
        # Those who have not heard of it yet are served as before.
        assert agent.status(gateway, job).code == 200
        assert agent.status(gateway, job, "?wait=60").code == 200
        gateway.send(signal.SIGTERM)
        assert not start.done()
        wait_until("end of the waiting for callers", lambda: not accepts(gateway))
        idle.until_closed()
        switch.on = False
        started = id_in(start.result(SLACK))
    assert gateway.exit_code() == 0
    assert time.monotonic() - began < 2 + 15 + SLACK
    assert_in_order(gateway)

    gateway.start()
    again = agent.start(gateway, "under-way", TOOL)
    assert (id_in(again), again.headers["Idempotency-Replayed"]) == (started, "true")
    gateway.close()


def since(agent: Agent, gateway: GatewayProcess) -> str:
    return str(agent.get(gateway, "/v1/jobs").body["since"])


def accepts(gateway: GatewayProcess) -> bool:
    try:
        Wire(gateway.port).hang_up()
    except OSError:
        return False
    return True


@scenario("R-KEY an end that cannot wait leaves whole jobs or none, and so does a kill", own=True)
def sudden_end(place: Place) -> None:
    proxy = place.stage.gateway_proxy("sudden")
    switch = Switch(proxy, is_start)
    gateway = place.stage.gateway("sudden", through=proxy, settings={"END_SECONDS": 1})
    agent = new_caller(place, gateway).agent
    for number, end in enumerate((gateway.terminate, gateway.kill)):
        switch.on = True
        with ThreadPoolExecutor(1) as pool:
            start = pool.submit(agent.start, gateway, f"held-{number}", TOOL)
            wait_until("start under way", lambda: any(map(is_start, watched(proxy))))
            began = time.monotonic()
            assert end() in {0, None}
            assert time.monotonic() - began < 1 + SLACK
            with pytest.raises(urllib3.exceptions.HTTPError):
                start.result()
        switch.on = False
        gateway.start()
        id_in(agent.start(gateway, f"held-{number}", TOOL))
        assert len(place.api.items("AgentJob", place.namespace)) == number + 1
    assert_in_order(gateway)

    # Whoever hangs up while the API server has the start gets it all the same.
    switch.on = True
    with Wire(gateway.port) as wire:
        body = json.dumps({"tool": TOOL}).encode()
        lines = (
            "POST /v1/jobs HTTP/1.1",
            "Host: gateway",
            f"Authorization: Bearer {agent.token}",
            "Idempotency-Key: hung-up",
            "Content-Type: application/json",
            f"Content-Length: {len(body)}",
        )
        wire.send("\r\n".join((*lines, "", "")).encode() + body)
        wait_until("start under way", lambda: any(map(is_start, watched(proxy))))
    switch.on = False
    again = agent.start(gateway, "hung-up", TOOL)
    assert again.code == 202
    whole = place.api.get("AgentJob", place.namespace, name_of(id_in(again))).object()
    assert whole["metadata"]["finalizers"]
    assert whole["spec"]["idempotency"]["digest"].startswith("sha256:")
    assert len(place.api.items("AgentJob", place.namespace)) == 3
    gateway.close()


@scenario("an end during the first list is an end like any other", own=True)
def ended_before_ready(place: Place) -> None:
    proxy = place.stage.gateway_proxy("never-ready")
    Switch(proxy, lambda path: "agentjobs?limit" in path).on = True
    gateway = place.stage.gateway("never-ready", through=proxy, wait=False)
    wait_until("list", lambda: any("agentjobs?limit" in path for path in watched(proxy)))
    code, reason = readiness(gateway)
    assert (code, bool(reason.strip())) == (503, True)
    early = Agent("x").get(gateway, "/v1/jobs")
    assert (early.code, early.problem) == (503, "unavailable")
    assert gateway.terminate() == 0
    assert_in_order(gateway)
    gateway.close()


# --- keys


def home(place: Place) -> dict[str, str]:
    """Settings of a gateway that keeps its keys in this namespace.

    The other gateways have theirs already: once there are jobs, they would not make any.
    """
    write_keys(place, NAMESPACE, name=secrets.token_bytes(32))
    for kind in ("Role", "RoleBinding"):
        body = only(place.stage.chart, kind, "agentjobs-gateway")
        place.api.create(
            {**body, "metadata": {"name": "agentjobs-gateway", "namespace": place.namespace}}
        )
    return {"NAMESPACE": place.namespace}


def write_keys(place: Place, namespace: str = "", **keys: bytes) -> None:
    """Make the Secret; in the namespace of a story, change it."""
    namespace = namespace or place.namespace
    data = {name.replace("_", "-"): b64encode(key).decode() for name, key in keys.items()}
    body = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": SECRET, "namespace": namespace},
        "data": data,
    }
    if place.api.try_create(body).code == 409 and namespace == place.namespace:
        place.api.patch("Secret", namespace, SECRET, {"data": data}).object()


@scenario(
    "R-KEY without the name key of existing jobs nobody is served, until it is back", own=True
)
def keys_are_gone(place: Place) -> None:
    settings = home(place)
    first, second = b"n" * 32, b"s" * 32
    write_keys(place, name=first, state=second)
    gateway = place.stage.gateway("keys", settings=settings)
    account = new_caller(place, gateway, namespace=f"{place.namespace}-tenant")
    job = id_in(account.agent.start(gateway, "k", TOOL))
    assert gateway.terminate() == 0

    place.api.delete("Secret", place.namespace, SECRET).object()
    gateway.start(wait=False)
    until_unready(gateway, f"Secret {place.namespace}/{SECRET} has no field name", "Restore")
    refused = account.agent.start(gateway, "k", TOOL)
    assert (refused.code, refused.problem) == (503, "unavailable")
    assert place.api.get("Secret", place.namespace, SECRET).code == 404, "it must not be made anew"
    write_keys(place, name=b"short")
    until_unready(gateway, "field name has 5 bytes")
    write_keys(place, name=first, state=second)
    gateway.wait_until_ready()
    assert id_in(account.agent.start(gateway, "k", TOOL)) == job

    # A process that runs keeps the name key, whatever becomes of the Secret.
    write_keys(place, name=b"m" * 32)
    cursor = since(account.agent, gateway)
    garbage = account.agent.get(gateway, f"/v1/jobs?since={cursor[::-1]}")
    assert garbage.problem == "invalid-cursor"
    wait_until("word of the other key", lambda: "is not what it was" in gateway.log)
    assert id_in(account.agent.start(gateway, "k", TOOL)) == job
    assert_in_order(gateway)
    for key in (first, second):
        assert b64encode(key).decode() not in gateway.log
    gateway.close()


def until_unready(gateway: GatewayProcess, *words: str) -> None:
    """Wait until it says why it is not ready: to probes, and in its log."""

    def says() -> bool:
        try:
            code, reason = readiness(gateway)
        except urllib3.exceptions.HTTPError:
            return False
        return code == 503 and all(word in reason and word in gateway.log for word in words)

    wait_until(f"readiness that says {words}", says)


@scenario("cursors survive a change of the key that seals them, at every replica", own=True)
def state_key_changes(place: Place) -> None:
    settings = home(place)
    write_keys(place, name=b"n" * 32, state=b"1" * 32)
    old, new = (place.stage.gateway(name, settings=settings) for name in ("old", "new"))
    account = new_caller(place, old, new, namespace=f"{place.namespace}-tenant")
    agent = account.agent
    job = id_in(agent.start(old, "k", TOOL))
    before = since(agent, old)

    write_keys(place, name=b"n" * 32, state=b"2" * 32, state_previous=b"1" * 32)
    new.terminate()
    new.start()
    sealed_anew = since(agent, new)
    assert agent.get(old, f"/v1/jobs?since={sealed_anew}").code == 200, "without a restart"
    assert agent.get(new, f"/v1/jobs?since={before}").code == 200, "the key before still opens"
    assert agent.get(new, f"/v1/jobs?since={since(agent, old)}").code == 200
    assert {id_in(agent.start(each, "k", TOOL)) for each in (old, new)} == {job}
    for each in (old, new):
        assert_in_order(each)
        each.close()


@scenario("R-KEY first starts at the same time end with the same keys", own=True)
def first_starts(place: Place) -> None:
    home(place)
    kubeconfig = place.stage._credentials(GATEWAY, "first", None)

    async def race() -> set[Keys]:
        async with Kube(access(kubeconfig)) as kube:
            loads = (load_keys(kube, place.namespace, jobs_exist=False) for _ in range(8))
            return set(await asyncio.gather(*loads))

    for _ in range(5):
        (keys,) = asyncio.run(race())
        assert len(keys.name) == 32
        place.api.delete("Secret", place.namespace, SECRET).object()
        # Emptied by somebody, it is filled again by one of them.
        write_keys(place)
        (refilled,) = asyncio.run(race())
        assert refilled != keys
        place.api.delete("Secret", place.namespace, SECRET).object()


def access(kubeconfig: Path) -> Access:
    configuration = kubernetes.client.Configuration()
    kubernetes.config.load_kube_config(str(kubeconfig), client_configuration=configuration)
    return Access(configuration.host, configuration)


# --- TLS, and the tokens that need it


class Files:
    """The files of a certificate, as a mounted Secret has them."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir()
        self.certificate, self.key = directory / "tls.crt", directory / "tls.key"
        self._pki = Pki(directory / "pki")
        self._pki.create()
        self.context = ssl.create_default_context(cafile=str(self._pki.ca_file))
        self._number = 0

    @property
    def settings(self) -> dict[str, str]:
        return {"TLS_CERTIFICATE": str(self.certificate), "TLS_KEY": str(self.key)}

    def renew(self) -> int:
        """Write another certificate with its key; return its serial number."""
        self._number += 1
        certificate, key = self._pki.server(f"server-{self._number}", ["localhost", "127.0.0.1"])
        shutil.copy(key, self.key)
        shutil.copy(certificate, self.certificate)
        return x509.load_pem_x509_certificate(certificate.read_bytes()).serial_number

    def served_by(self, gateway: GatewayProcess) -> int:
        """The serial number of the certificate that new connections get."""
        with Wire(gateway.port, self.context) as wire:
            assert isinstance(wire._socket, ssl.SSLSocket)
            certificate = wire._socket.getpeercert(binary_form=True)
        assert certificate
        return x509.load_der_x509_certificate(certificate).serial_number

    def gateway(self, place: Place, name: str, **settings: str) -> GatewayProcess:
        """Start a gateway with them."""
        gateway = place.stage.gateway(name, wait=False, settings={**self.settings, **settings})
        gateway.trusted = self._pki.ca_file
        gateway.wait_until_ready()
        return gateway

    def agent(self, token: str) -> Agent:
        return Agent(token, urllib3.PoolManager(ssl_context=self.context, retries=False))


HEALTH = b"GET /healthz HTTP/1.1\r\nHost: gateway\r\n\r\n"


@scenario(
    "R-AUTH TLS with a certificate that is renewed, and users' tokens over it alone", own=True
)
def tls(place: Place) -> None:
    files = Files(place.stage.directory / place.namespace)
    missing = place.stage.gateway("missing", wait=False, settings=files.settings)
    assert missing.exit_code(20) == 2
    assert "AGENTJOBS_TLS_CERTIFICATE" in missing.log
    assert str(files.certificate) in missing.log
    assert_in_order(missing)

    first = files.renew()
    gateway = files.gateway(place, "tls", ACCEPT_USER_TOKENS="true")
    with Wire(gateway.port, files.context) as old:
        assert old.send(HEALTH).until_answered().reply.code == 200
        assert files.served_by(gateway) == first
        second = files.renew()
        wait_until("new certificate", lambda: files.served_by(gateway) == second)
        files.key.write_text("xyzzy", encoding="utf-8")
        wait_until("word of the broken one", lambda: "is not used" in gateway.log)
        assert files.served_by(gateway) == second
        old.send(HEALTH).until_answered(2)
        assert [reply.code for reply in old.replies] == [200, 200]
    for nonsense in (HEALTH, b"\x16\x03\x01\x00\x05xyzzy", b"xyzzy\r\n\r\n"):
        with Wire(gateway.port) as wire:
            wire.send(nonsense).until_closed()
            assert b"HTTP" not in wire.received
    users_tokens(place, files, gateway)
    assert_in_order(gateway)
    assert USER_TOKEN not in gateway.log
    assert gateway.terminate() == 0

    files.renew()
    gateway = files.gateway(place, "no-users")
    here = f"/v1/jobs?namespace={place.namespace}"
    assert files.agent(USER_TOKEN).get(gateway, here).code == 401, "nobody has allowed it"
    gateway.close()


def users_tokens(place: Place, files: Files, gateway: GatewayProcess) -> None:
    """What a gateway that takes users' tokens takes, and what it does not."""
    tenant = Tenant(place.stage, place.namespace)
    tenant.usable_tool(TOOL, inputSchema={"type": "object"})
    tenant.grant_user(USER, CALLS)
    tenant.grant_user(USER, use(TOOL))
    account = tenant.account("agent", CALLS)
    here = f"/v1/jobs?namespace={place.namespace}"
    alice = files.agent(USER_TOKEN)
    assert alice.get(gateway, here).code == 200
    nowhere = alice.get(gateway, "/v1/jobs")
    assert (nowhere.code, nowhere.problem) == (422, "namespace-required")
    until_offered(alice, TOOL, gateway, namespace=place.namespace)
    started = alice.start(gateway, "k", TOOL, namespace=place.namespace)
    made = place.api.get("AgentJob", place.namespace, name_of(id_in(started))).object()
    assert made["spec"]["requestedBy"] == USER
    assert files.agent(account.agent.token).get(gateway, here).code == 200
    # Whoever can read a pod's mounted token would be its account here.
    assert files.agent(tenant.token("agent", "")).get(gateway, here).code == 401
    assert files.agent(f"{USER_TOKEN}x").get(gateway, here).code == 401

    plain = place.stage.gateway("plain", settings={"ACCEPT_USER_TOKENS": "true"}, wait=False)
    assert plain.exit_code(20) == 2
    assert "AGENTJOBS_ACCEPT_USER_TOKENS" in plain.log


@pytest.mark.parametrize("scenario", told_in(__name__), ids=str)
def test_rule(played: Callable[[Scenario], None], scenario: Scenario) -> None:
    played(scenario)
