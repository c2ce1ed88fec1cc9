"""Who may do what through the gateway, and that nobody learns of what is not theirs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import urllib3

from tests import audit
from tests.apiclient import Document
from tests.chart import NAMESPACE, SERVES_DEFAULTS, only, render
from tests.cluster import FAST_LIMITS, ControlPlane
from tests.cluster.binaries import binary
from tests.controlplane.callers import Answer, Caller, Server
from tests.controlplane.installed import GATEWAY, OPERATOR, agentjob, apply, install
from tests.controlplane.stage import (
    Place,
    Scenario,
    Stage,
    open_stage,
    scenario,
    template,
    told_in,
)
from tests.controlplane.tenants import (
    CALLS,
    MAKE_JOBS,
    READ,
    START,
    Account,
    Right,
    Tenant,
    agenttool,
    asked_by,
    functions,
    id_in,
    name_of,
    unknown_id,
    until_offered,
    use,
    wait_until,
)
from tests.gateway_process import Agent, GatewayProcess, Reply

pytestmark = pytest.mark.controlplane

PERSON, PERSON_TOKEN = "person-a", "a-token-that-the-api-server-was-told"
POWERFUL = template(serviceAccountName="powerful")
NEEDS_JOBS = "must be allowed to create jobs.batch in"


def refusal(answer: Answer) -> str:
    """The message of the API server, which must have said no."""
    assert answer.code == 403, (answer.code, answer.message)
    return answer.message


# Templates


@contextmanager
def a_stage_of_its_own(stage: Stage) -> Iterator[Stage]:
    """A control plane whose settings can be changed, and that knows users by their tokens."""
    directory = stage.directory / "a-plane"
    directory.mkdir()
    users = directory / "users.csv"
    users.write_text(f"{PERSON_TOKEN},{PERSON},1\n", encoding="utf-8")
    with ControlPlane(
        directory,
        apiserver_args=[f"--token-auth-file={users}"],
        controller_manager_args=FAST_LIMITS.controller_manager,
    ) as plane:
        install(plane, stage.chart)
        with contextmanager(open_stage)(plane, stage.chart, directory) as own:
            yield own


class Team:
    """Those of team-a: one who may start the tool safe, one who may create Jobs as well."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.place = stage.place("team-a")
        self.tenant = Tenant(stage, "team-a")
        for name in ("powerful", "modest"):
            self.tenant.service_account(name)
        modest = template(serviceAccountName="modest")
        for name in ("safe", "other"):
            self.tenant.usable_tool(name, template=modest)
        stage.api.create(agenttool("anywhere"))
        patch = Right("agentjobs", ("patch",))
        self.agent = self.tenant.account("agent-a", CALLS, patch, use("safe"))
        self.builder = self.tenant.account("builder-a", CALLS, MAKE_JOBS)
        for namespace in ("kube-system", NAMESPACE):
            Tenant(stage, namespace).grant(self.builder, CALLS, MAKE_JOBS)
        self.tenant.grant_user(PERSON, CALLS)
        anywhere = use("anywhere", kind="clusteragenttools")
        for user in (self.builder.user, PERSON):
            self.tenant.grant_user(user, anywhere, everywhere=True)
        self.server = Server.of(stage.plane.kubeconfig)

    def secure(self, token: str) -> Agent:
        """Somebody who calls over TLS."""
        authority = str(self.stage.plane.ca_file)
        return Agent(token, urllib3.PoolManager(ca_certs=authority, retries=False, timeout=30))

    def stored(self) -> set[str]:
        """Names of all AgentJobs, as `name.namespace`."""
        namespaces = ("team-a", "kube-system", NAMESPACE)
        found = (job["metadata"] for n in namespaces for job in Tenant(self.stage, n).agentjobs())
        return {f"{meta['name']}.{meta['namespace']}" for meta in found}

    def requester(self, job_id: str) -> str:
        job = self.stage.api.get("AgentJob", "team-a", name_of(job_id)).object()
        return str(job["spec"]["requestedBy"])


@scenario(
    "R-POLICY-TEMPLATE R-POLICY-PLACES R-POLICY-WHO R-NAMESPACE R-AUTH templates need the right to "
    "create Jobs, and are not taken over HTTP unless that is allowed",
    own=True,
)
def template_needs_job_rights(place: Place) -> None:
    with a_stage_of_its_own(place.stage) as stage:
        team = Team(stage)
        stage.operator(team.place)
        made = denied_by_default(team)
        made |= denied_places(team)
        allow_templates(team)
        made |= by_kubectl(team)
        made |= over_http(team)
        assert team.stored() == made
        owners = {job["metadata"]["name"].rpartition("-")[0] for job in jobs_of(stage)}
        assert owners <= {name_of(each) for each in made}
        safe = team.place.until_pod("of-a-tool")
        assert safe["spec"]["serviceAccountName"] == "modest"


def jobs_of(stage: Stage) -> list[Document]:
    return [job for n in ("team-a", "kube-system", NAMESPACE) for job in stage.record.all("Job", n)]


def denied_by_default(team: Team) -> set[str]:
    """Row g: the policy holds the gateway to the setting too, and nobody else."""
    plain = team.stage.gateway("gateway-plain")
    denied = team.builder.agent.start(plain, "k-g", template=template())
    assert (denied.code, denied.problem) == (403, "templates-denied")
    assert "gateway.allowTemplates" in denied.body["detail"]
    spec = {"template": template(), "requestedBy": team.builder.user}
    gateway = Caller(team.server, GATEWAY)
    words = refusal(gateway.create(agentjob("team-a", "by-the-gateway", spec)))
    assert "templates are not allowed through the gateway" in words
    team.builder.create("by-builder", template=template()).object()

    # Users' tokens are for TLS, the API server's audience is for users.
    assert Agent(PERSON_TOKEN).get(plain, "/v1/jobs?namespace=team-a").code == 401
    plain.close()
    return {"by-builder.team-a"}


def denied_places(team: Team) -> set[str]:
    """Row h: nothing is run where the platform itself runs; no namespace is made up."""
    settings = {"ACCEPT_USER_TOKENS": "true", **team.stage.certificate("gateway-secure")}
    gateway = team.stage.gateway("gateway-secure", settings=settings)
    builder = team.secure(team.builder.agent.token)
    for namespace in ("kube-system", NAMESPACE):
        for asked in ({"namespace": namespace}, {"query": f"?namespace={namespace}"}):
            denied = builder.start(gateway, "k-h", "anywhere", **asked)  # type: ignore[arg-type]
            assert (denied.code, denied.problem) == (403, "namespace-denied")
        spec = {"toolRef": {"kind": "ClusterAgentTool", "name": "anywhere"}}
        words = refusal(Caller(team.server, GATEWAY).create(agentjob(namespace, "denied", spec)))
        assert f"the gateway runs nothing in namespace {namespace}" in words
    home = id_in(builder.start(gateway, "k-h", "anywhere"))
    assert home.endswith(".team-a")
    assert team.requester(home) == team.builder.user

    person = team.secure(PERSON_TOKEN)
    nowhere = person.start(gateway, "k-h", "anywhere")
    assert (nowhere.code, nowhere.problem) == (422, "namespace-required")
    assert "namespace" in nowhere.body["detail"]
    theirs = id_in(person.start(gateway, "k-h", "anywhere", namespace="team-a"))
    assert theirs != home
    assert team.requester(theirs) == PERSON
    mounted = team.secure(team.tenant.token("builder-a", audience=""))
    assert mounted.get(gateway, "/v1/jobs").code == 401
    gateway.close()
    return {home, theirs}


def allow_templates(team: Team) -> None:
    """Change the chart's value gateway.allowTemplates, and wait until it is in force."""
    allowing = render(binary("helm"), *SERVES_DEFAULTS, "--set=gateway.allowTemplates=true")
    policy = only(allowing, "ValidatingAdmissionPolicy", "agentjobs-gateway")
    apply(team.stage.plane, [policy])
    spec = {"template": template(), "requestedBy": team.builder.user}
    probe = agentjob("team-a", "probe", spec)
    wait_until("template", lambda: Caller(team.server, GATEWAY).create(probe, dry_run=True).taken)


def by_kubectl(team: Team) -> set[str]:
    """Rows a to e."""
    agent, place = team.agent, team.place
    old_field = template(serviceAccount="powerful")
    for name, body in (("a", template()), ("b", POWERFUL), ("b-old", old_field)):
        assert f"{NEEDS_JOBS} namespace team-a" in refusal(agent.create(name, template=body))
    tool = agent.create("of-a-tool", toolRef={"name": "safe"}).object()
    changed = agent.kubectl.patch(tool, {"spec": {"toolRef": None, "template": POWERFUL}})
    assert (changed.code, "toolRef cannot be changed" in changed.message) == (422, True)
    words = refusal(agent.create("d", toolRef={"name": "other"}))
    assert "must be allowed to use agenttools.agentjobs.dev other" in words
    wide = {"kind": "ClusterAgentTool", "name": "anywhere"}
    words = refusal(agent.create("d-wide", toolRef=wide))
    assert "must be allowed to use clusteragenttools.agentjobs.dev anywhere" in words
    team.builder.create("e", template=POWERFUL).object()
    assert place.until_pod("e")["spec"]["serviceAccountName"] == "powerful"
    return {"of-a-tool.team-a", "e.team-a"}


def over_http(team: Team) -> set[str]:
    """Row f: the gateway reviews what the policy would ask, and vouches for the user."""
    gateway = team.stage.gateway("gateway-open", settings={"ALLOW_TEMPLATES": "true"})
    agent, builder = team.agent.agent, team.builder.agent
    other, nothing = (agent.start(gateway, "k-f", tool) for tool in ("other", "never-was"))
    assert (other.code, other.problem) == (404, "tool-not-found")
    assert other.raw.replace(b"other", b"never-was") == nothing.raw
    safe = id_in(agent.start(gateway, "k-f", "safe"))
    denied = agent.start(gateway, "k-t", template=POWERFUL)
    assert (denied.code, denied.problem) == (403, "forbidden")
    assert "must be allowed to create jobs.batch in namespace team-a" in denied.body["detail"]
    built = id_in(builder.start(gateway, "k-t", template=POWERFUL))
    assert team.requester(safe) == team.agent.user
    assert team.requester(built) == team.builder.user
    gateway.close()
    return {safe, built}


# The catalogue


@scenario("R-POLICY-TEMPLATE who writes a tool must be allowed to create Jobs; who starts it, not")
def tool_author(place: Place) -> None:
    stage, here = place.stage, place.namespace
    tail = audit.Tail(stage.plane.audit_log)
    tenant = Tenant(stage, here)
    tenant.service_account("powerful")
    writes = Right("agenttools", ("create", "update", "patch", "get"))
    curator = tenant.account("curator-a", writes)
    builder = tenant.account("builder-a", writes)
    wide = Right("clusteragenttools", ("create", "patch"))
    makes_jobs = tenant.grant(builder, MAKE_JOBS)
    tenant.grant(builder, wide, everywhere=True)
    platform = tenant.account("platform")
    tenant.grant(platform, wide, MAKE_JOBS, everywhere=True)
    agent = tenant.account("starter", CALLS, use("x1", "x2"))
    tenant.grant(agent, use("gw-wide", kind="clusteragenttools"), everywhere=True)

    # a, b: who may not create Jobs writes no tool
    x1 = agenttool("x1", namespace=here, template=POWERFUL)
    assert f"{NEEDS_JOBS} namespace {here}" in refusal(curator.kubectl.create(x1))
    assert place.api.get("AgentTool", here, "x1").code == 404
    first = builder.kubectl.create(x1).object()
    # c: nor changes one, whatever is touched
    by_curator = template()
    by_curator["spec"]["template"]["spec"]["containers"][0]["command"] = ["by-curator"]
    for answer in (
        curator.kubectl.patch(x1, {"spec": {"description": "harmless"}}),
        curator.kubectl.patch(x1, {"spec": {"template": by_curator}}),
        curator.kubectl.apply(agenttool("x1", namespace=here, template=by_curator)),
        curator.kubectl.create(agenttool("x2", namespace=here), dry_run=True),
    ):
        assert f"{NEEDS_JOBS} namespace {here}" in refusal(answer)
    # d: a tool of the cluster needs the right everywhere
    cluster_tool = agenttool("gw-wide", template=POWERFUL)
    assert f"{NEEDS_JOBS} all namespaces" in refusal(builder.kubectl.create(cluster_tool))
    platform.kubectl.create(cluster_tool).object()
    # e: use is enough to start them
    names = started_both_ways(place, agent)
    # f: what was written stays usable when its author may write no more
    tenant.revoke(makes_jobs, builder.user, MAKE_JOBS)
    names.append(name_of(id_in(agent.agent.start(stage.replicas[0], "k-f", "x1"))))
    change = {"spec": {"limits": {"deadlineSeconds": 60}}}
    assert f"{NEEDS_JOBS} namespace {here}" in refusal(builder.kubectl.patch(x1, change))

    for name in names:
        place.kubelet.run(place.until_pod(name))
    for name in names:
        status = place.until_over(name)
        assert (status["state"], len(status["attempts"])) == ("done", 1)
        (pod,) = place.pods(name)
        assert pod["spec"]["serviceAccountName"] == "powerful"
        assert pod["spec"]["containers"][0]["command"] == ["true"]
    last = place.api.get("AgentTool", here, "x1").object()["metadata"]
    assert (last["uid"], last["generation"]) == (first["metadata"]["uid"], 1)
    judged = [
        each
        for each in tail.new(holding="agenttools/")
        if each.user == OPERATOR and each.name in {"x1", "gw-wide"}
    ]
    assert {each.resource for each in judged} == {"agenttools/status", "clusteragenttools/status"}
    assert all(each.taken or each.code == 409 for each in judged)


def started_both_ways(place: Place, agent: Account) -> list[str]:
    """Four jobs: of a tool of the namespace and of the cluster, by kubectl and over HTTP."""
    names = []
    for tool, kind in (("x1", "AgentTool"), ("gw-wide", "ClusterAgentTool")):
        until_offered(agent.agent, tool, *place.stage.replicas)
        agent.create(f"kubectl-{tool}", toolRef={"kind": kind, "name": tool}).object()
        names.append(f"kubectl-{tool}")
        names.append(name_of(id_in(agent.agent.start(place.stage.replicas[0], tool, tool))))
        spec = place.api.get("AgentJob", place.namespace, names[-1]).object()["spec"]
        assert spec["toolRef"] == {"kind": kind, "name": tool}
        assert spec["requestedBy"] == agent.user
    return names


OWN = {"type": "object", "properties": {"own": {"type": "string"}}, "required": ["own"]}
WIDE = {"type": "object", "properties": {"wide": {"type": "string"}}, "required": ["wide"]}


@scenario("R-TOOL a tool of the namespace hides one of the cluster, also where it may not be used")
def hidden_tools(place: Place) -> None:
    stage, here, gateway = place.stage, place.namespace, place.stage.replicas[0]
    tenant, other = Tenant(stage, here), Tenant.new(stage, f"{here}-hidden")
    stage.api.create(agenttool("gw-both", inputSchema=WIDE, description="the wide one"))
    place.tool("gw-both", inputSchema=OWN, description="the own one")
    wide = use("gw-both", kind="clusteragenttools")
    both = tenant.account("uses-both", CALLS, use("gw-both"))
    only_wide = tenant.account("uses-wide", CALLS)
    for account in (both, only_wide):
        tenant.grant(account, wide, everywhere=True)
        other.grant(account, CALLS)
    until_offered(only_wide.agent, "gw-both", gateway, namespace=other.namespace)
    until_offered(both.agent, "gw-both", gateway)

    offered = functions(both.agent, gateway)["gw-both"]
    assert offered["description"].startswith("the own one")
    assert set(offered["parameters"]["properties"]) == {"own", "idempotency_key"}
    own = name_of(id_in(both.agent.start(gateway, "k-1", "gw-both", arguments={"own": "x"})))
    job = place.api.get("AgentJob", here, own).object()
    assert job["spec"]["toolRef"]["kind"] == "AgentTool"
    wrong = both.agent.start(gateway, "k-2", "gw-both", arguments={"wide": "x"})
    assert (wrong.code, wrong.problem) == (422, "invalid-arguments")

    assert "gw-both" not in functions(only_wide.agent, gateway)
    hidden = only_wide.agent.start(gateway, "k-1", "gw-both", arguments={"wide": "x"})
    assert (hidden.code, hidden.problem) == (404, "tool-not-found")
    there = functions(only_wide.agent, gateway, f"namespace={other.namespace}")["gw-both"]
    assert there["description"].startswith("the wide one")
    elsewhere = only_wide.agent.start(
        gateway, "k-1", "gw-both", arguments={"wide": "x"}, namespace=other.namespace
    )
    (job,) = other.agentjobs()
    assert job["metadata"]["name"] == name_of(id_in(elsewhere))
    assert job["spec"]["toolRef"]["kind"] == "ClusterAgentTool"


APPROVAL = {
    "action": "delete",
    "object": "all",
    "value": "1",
    "consequence": "gone",
    "approvers": ["group:bosses"],
}
UNUSABLE: dict[str, tuple[Document, str]] = {
    "gw-always": ({"template": template(restartPolicy="Always")}, "restartPolicy"),
    "gw-asks": ({"approval": APPROVAL}, "spec.approval"),
    "gw-empty": ({"template": {"spec": {}}}, "spec.template"),
    "gw-key": (
        {"inputSchema": {"type": "object", "properties": {"idempotency_key": {}}}},
        "idempotency_key",
    ),
    "gw-schema": ({"inputSchema": {"type": "no-such-type"}}, "inputSchema"),
}


@scenario("R-TOOL a tool that cannot be run is refused with the reason, and is not offered")
def unusable_tools(place: Place) -> None:
    stage, gateway = place.stage, place.stage.replicas[0]
    tenant = Tenant(stage, place.namespace)
    for name, (spec, _) in UNUSABLE.items():
        place.tool(name, **spec)
    place.tool("gw-good")
    agent = tenant.account("hopes", CALLS, use("gw-good", *UNUSABLE)).agent
    until_offered(agent, "gw-good", gateway)
    for name, (_, word) in UNUSABLE.items():
        wait_until(f"verdict on {name}", partial(judged_unusable, place, name))
        refused = agent.start(gateway, "k-1", name)
        assert (refused.code, refused.problem) == (422, "unrunnable"), (name, refused.raw)
        assert f"AgentTool {name} is unusable" in refused.body["detail"]
        assert word in refused.body["detail"]
    assert not set(functions(agent, gateway)) & set(UNUSABLE)
    # The key was not used up.
    assert agent.start(gateway, "k-1", "gw-good").code == 202


def judged_unusable(place: Place, name: str) -> bool:
    status = place.api.get("AgentTool", place.namespace, name).object().get("status") or {}
    return status.get("usable") is False


# Nobody learns of what is not theirs


def calls_about(agent: Agent, gateway: GatewayProcess, job_id: str) -> list[Reply]:
    """Every call that names a job."""
    path = f"/v1/jobs/{job_id}"
    answer = {"outcome": "declined"}
    return [
        agent.get(gateway, path),
        agent.get(gateway, f"{path}?wait=1"),
        agent.get(gateway, path, **{"If-None-Match": '"99999999-0"'}),
        agent.get(gateway, f"{path}/output"),
        agent.get(gateway, f"{path}/result"),
        agent.get(gateway, f"{path}/inputs"),
        agent.send(gateway, "POST", f"{path}/inputs/colour", answer),
        agent.stop(gateway, job_id, "?reason=curious"),
    ]


def shown(reply: Reply, *words: str) -> tuple[Any, ...]:
    """All of an answer, but for the date and for what the caller named."""
    raw = reply.raw.decode()
    for word in words:
        raw = raw.replace(word, "NAMED")
    headers = {name: value for name, value in reply.headers.items() if name != "Date"}
    return reply.code, raw, headers if not words else {**headers, "Content-Length": ""}


@scenario("R-AUTH R-NAMESPACE a foreign id and one that never was are answered alike", own=True)
def foreign_ids(place: Place) -> None:
    stage = place.stage
    gateway = stage.gateway("gateway-of-strangers")
    tenant, other = Tenant(stage, place.namespace), Tenant.new(stage, f"{place.namespace}-b")
    owner = other.account("owner", CALLS, use("t"))
    other.usable_tool("t")
    until_offered(owner.agent, "t", gateway)
    foreign = id_in(owner.agent.start(gateway, "k-1", "t"))
    strangers = [tenant.account(f"stranger-{n}", CALLS) for n in range(3)]
    ids = (foreign, unknown_id(other.namespace), unknown_id("there-is-no-such-namespace"))

    answers, costs = [], []
    for stranger, this in zip(strangers, ids, strict=True):
        tail = audit.Tail(stage.plane.audit_log)
        replies = calls_about(stranger.agent, gateway, this)
        assert {(each.code, each.problem) for each in replies} == {(404, "job-not-found")}
        answers.append([shown(each) for each in replies])
        costs.append(set(audit.count(asked_by(gateway, tail, tenant))))
    assert answers[0] == answers[1] == answers[2]
    reviews = {("create", "tokenreviews"), ("create", "subjectaccessreviews")}
    assert costs == [reviews, reviews, reviews]
    # Who may look is looked up for.
    tail = audit.Tail(stage.plane.audit_log)
    assert owner.agent.status(gateway, unknown_id(other.namespace)).code == 404
    assert ("get", "agentjobs") in audit.count(asked_by(gateway, tail, tenant))
    assert owner.agent.status(gateway, foreign).body["status"] == "queued"


@scenario("R-AUTH R-NAMESPACE lists, dependencies and cursors tell nothing of others", own=True)
def nothing_of_others(place: Place) -> None:
    stage, gateway = place.stage, place.stage.replicas[0]
    tenant, other = Tenant(stage, place.namespace), Tenant.new(stage, f"{place.namespace}-b")
    for each in (tenant, other):
        each.usable_tool("t")
    owner = other.account("owner", CALLS, use("t")).agent
    caller = tenant.account("caller", CALLS, use("t")).agent
    blind = tenant.account("blind", START, use("t")).agent
    reader = tenant.account("reader", READ).agent
    for agent in (owner, caller):
        until_offered(agent, "t", gateway)
    foreign = id_in(owner.start(gateway, "k-1", "t"))
    own = id_in(caller.start(gateway, "k-1", "t"))
    assert foreign.partition(".")[0] != own.partition(".")[0]

    absent = "there-is-no-such-namespace"
    for path in ("/v1/jobs", "/v1/jobs?since="):
        glue = "&" if "?" in path else "?"
        theirs, none = (
            caller.get(gateway, f"{path}{glue}namespace={namespace}")
            for namespace in (other.namespace, absent)
        )
        assert (theirs.code, theirs.problem) == (403, "forbidden")
        assert shown(theirs, other.namespace) == shown(none, absent)
    theirs, none = (
        caller.start(gateway, "k-2", "t", namespace=namespace)
        for namespace in (other.namespace, absent)
    )
    assert (theirs.code, theirs.problem) == (403, "forbidden")
    assert shown(theirs, other.namespace) == shown(none, absent)
    listed = caller.get(gateway, "/v1/jobs").body
    assert [each["job_id"] for each in listed["jobs"]] == [own]
    foreign_since = owner.get(gateway, "/v1/jobs").body["since"]
    refused = caller.get(gateway, f"/v1/jobs?since={foreign_since}")
    assert (refused.code, refused.problem) == (400, "invalid-cursor")

    # Who may not see a job of their own namespace does not learn of it by depending on it.
    missing = unknown_id(place.namespace)
    for this in (own, foreign):
        there, gone = (blind.start(gateway, "k-3", "t", depends_on=[i]) for i in (this, missing))
        assert (there.code, there.problem) == (422, "invalid-body")
        assert shown(there) == shown(gone)
    # Who may look and no more is told so.
    assert reader.status(gateway, own).code == 200
    denied = reader.stop(gateway, own)
    assert (denied.code, denied.problem) == (403, "forbidden")
    assert reader.start(gateway, "k-4", "t").code == 403
    assert caller.status(gateway, own).body["status"] == "queued"


@scenario("R-AUTH a pod's token is of no use to callers")
def token_of_a_pod(place: Place) -> None:
    gateway = place.stage.replicas[0]
    tenant = Tenant(place.stage, place.namespace)
    runs_as = tenant.account("runs-pods", CALLS, use("gw-any"))
    place.create("with-a-token", template=template(serviceAccountName="runs-pods"))
    pod = place.until_running("with-a-token")["with-a-token"]
    reports = Agent(tenant.token("runs-pods", "agentjobs-report", pod))
    for reply in (
        reports.get(gateway, "/v1/jobs"),
        reports.start(gateway, "k-1", "gw-any"),
        reports.status(gateway, f"with-a-token.{place.namespace}"),
        Agent(tenant.token("runs-pods", "")).get(gateway, "/v1/jobs"),
        Agent("").get(gateway, "/v1/jobs"),
        Agent(runs_as.agent.token[:-8] + "AAAAAAAA").get(gateway, "/v1/jobs"),
    ):
        assert (reply.code, reply.problem) == (401, "unauthenticated")
        assert reply.headers["WWW-Authenticate"].startswith("Bearer")
    assert Agent(tenant.token("runs-pods", "agentjobs", pod)).get(gateway, "/v1/jobs").code == 200
    place.kubelet.finish(pod)


@pytest.mark.parametrize("scenario", told_in(__name__), ids=str)
def test_rule(played: Callable[[Scenario], None], scenario: Scenario) -> None:
    played(scenario)
