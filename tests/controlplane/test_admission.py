"""What the API server itself holds everybody to: the rules of the CRDs and the policies.

Each case is a sentence; its id begins with the rule that it proves.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import pytest

from tests.chart import CHART, NAMESPACE, SERVES_DEFAULTS, Document, only, render
from tests.cluster import ControlPlane
from tests.cluster.binaries import binary
from tests.controlplane.callers import Answer, Caller, Server
from tests.controlplane.installed import (
    GATEWAY,
    OPERATOR,
    agentjob,
    apply,
    inputrequest,
    wait_until,
)

pytestmark = pytest.mark.controlplane

RBAC = "rbac.authorization.k8s.io"
TEAM = "team-a"
NUMBERS = count(1)

TEMPLATE: Document = {
    "spec": {"template": {"spec": {"containers": [{"name": "tool", "image": "tool:1"}]}}}
}
OTHER_TEMPLATE: Document = {
    "spec": {"template": {"spec": {"containers": [{"name": "tool", "image": "tool:2"}]}}}
}
TOOL_SPEC: Document = {"description": "Does what it says.", "template": TEMPLATE}
TOOL_JOB: Document = {"toolRef": {"name": "safe"}, "arguments": {"n": 1}}
TEMPLATE_JOB: Document = {"template": TEMPLATE}
WRITER_VERBS = ["get", "list", "watch", "create", "update", "patch", "delete"]


def case(name: str, *values: object) -> object:
    return pytest.param(*values, id=name)


def check(answer: Answer, refusal: str) -> None:
    """An empty refusal means that the request must be taken."""
    if not refusal:
        assert answer.taken, answer.message
        return
    assert not answer.taken, "it was taken"
    assert refusal in answer.message


@dataclass(frozen=True)
class People:
    """Everybody who appears in the cases."""

    server: Server

    def __call__(self, name: str) -> Caller:
        """A gateway, an operator with its own role alone, or a user who may write everything."""
        if name == "admin":
            return Caller(self.server)
        if name == "operator":
            return Caller(self.server, OPERATOR)
        if name == "gateway":
            return Caller(self.server, GATEWAY, "writers")
        groups = {"steward": ["stewards"]}.get(name, [])
        return Caller(self.server, name, "writers", *groups)


@pytest.fixture(scope="session")
def people(control_plane: ControlPlane, server: Server) -> People:
    """Users with their rights, and the namespaces and tools that they are about."""
    apply(control_plane, rights())
    everybody = People(server)
    admin = everybody("admin")
    for name in ("safe", "other"):
        admin.create(tool(name)).object()
        admin.create(tool(name, kind="ClusterAgentTool")).object()
    # RBAC reaches the authorizer through a watch.
    wait_until(lambda: everybody("agent").create(job(TOOL_JOB), dry_run=True).taken)
    return everybody


def tool(name: str, kind: str = "AgentTool") -> Document:
    place = {} if kind == "ClusterAgentTool" else {"namespace": TEAM}
    meta = {"name": name, **place}
    return {
        "apiVersion": "agentjobs.dev/v1alpha1",
        "kind": kind,
        "metadata": meta,
        "spec": TOOL_SPEC,
    }


def job(spec: Document, name: str = "", namespace: str = TEAM) -> Document:
    return agentjob(namespace, name or f"job-{next(NUMBERS)}", spec)


def role(
    name: str, who: str, group: str, resource: str, *verbs: str, names: tuple[str, ...] = ()
) -> list[Document]:
    """A cluster role and its binding, in all namespaces, or with `@` in one."""
    who, _, namespace = who.partition("@")
    meta = {"name": name, **({"namespace": namespace} if namespace else {})}
    kind = "Role" if namespace else "ClusterRole"
    subject = {"apiGroup": RBAC, "kind": "Group", "name": who.removeprefix("group:")}
    if not who.startswith("group:"):
        subject |= {"kind": "User"}
    rule = {"apiGroups": [group], "resources": [resource], "verbs": list(verbs)}
    if names:
        rule["resourceNames"] = list(names)
    return [
        {"apiVersion": f"{RBAC}/v1", "kind": kind, "metadata": meta, "rules": [rule]},
        {
            "apiVersion": f"{RBAC}/v1",
            "kind": f"{kind}Binding",
            "metadata": meta,
            "roleRef": {"apiGroup": RBAC, "kind": kind, "name": name},
            "subjects": [subject],
        },
    ]


def rights() -> list[Document]:
    ours = "agentjobs.dev"
    here = f"@{TEAM}"
    return [
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": TEAM}},
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "team-b"}},
        *role("writers", "group:writers", ours, "*", *WRITER_VERBS),
        *role("agent-tools", f"agent{here}", ours, "agenttools", "use", names=("safe",)),
        *role("agent-wide", "agent", ours, "clusteragenttools", "use", names=("safe",)),
        *role("builder-jobs", f"builder{here}", "batch", "jobs", "create"),
        *role("platform-jobs", "platform", "batch", "jobs", "create"),
        *role("lead-approves", f"lead{here}", ours, "inputrequests", "approve"),
        *role("steward-approves", f"steward{here}", ours, "inputrequests", "approve"),
        *role("agent-approves", f"agent{here}", ours, "inputrequests", "approve"),
    ]


# Spec and status of AgentJobs


@dataclass(frozen=True)
class Change:
    """A change of the spec of a job that exists."""

    before: Document
    after: Document
    status: Document = field(default_factory=dict)


def cannot(name: str) -> str:
    return f"{name} cannot be changed; create another AgentJob instead"


RETRY: Document = {"maxAttempts": 2, "causes": ["oom"]}
STARTED: Document = {"state": "running", "startedAt": "2026-01-01T00:00:00Z"}
RESOLVED: Document = {"uid": "u", "generation": 1, "digest": "sha256:0"}
SUSPEND_REFUSED = "the tool has begun and may not be repeated, so the job cannot be suspended"

IMMUTABLE = [
    case("toolRef keeps its name", Change(TOOL_JOB, {"toolRef": {"name": "other"}}), "toolRef"),
    case(
        "toolRef keeps its kind",
        Change(TOOL_JOB, {"toolRef": {"kind": "ClusterAgentTool"}}),
        "toolRef",
    ),
    case(
        "toolRef cannot become template",
        Change(TOOL_JOB, {"toolRef": None, "arguments": None, "template": TEMPLATE}),
        "toolRef",
    ),
    case(
        "template cannot become toolRef",
        Change(TEMPLATE_JOB, {"template": None, "toolRef": {"name": "safe"}}),
        "template",
    ),
    case(
        "template stays, deep inside",
        Change(TEMPLATE_JOB, {"template": OTHER_TEMPLATE}),
        "template",
    ),
    case("arguments stay", Change(TOOL_JOB, {"arguments": {"n": 2}}), "arguments"),
    case("arguments cannot go", Change(TOOL_JOB, {"arguments": None}), "arguments"),
    case(
        "arguments cannot come",
        Change({"toolRef": {"name": "safe"}}, {"arguments": {"n": 1}}),
        "arguments",
    ),
    case(
        "pendingDeadlineSeconds cannot come",
        Change(TEMPLATE_JOB, {"pendingDeadlineSeconds": 5}),
        "pendingDeadlineSeconds",
    ),
    case(
        "pendingDeadlineSeconds cannot go",
        Change({**TEMPLATE_JOB, "pendingDeadlineSeconds": 5}, {"pendingDeadlineSeconds": None}),
        "pendingDeadlineSeconds",
    ),
    case(
        "dependsOn cannot come", Change(TEMPLATE_JOB, {"dependsOn": [{"name": "a"}]}), "dependsOn"
    ),
    case(
        "retry stays",
        Change({**TEMPLATE_JOB, "retry": RETRY}, {"retry": {"maxAttempts": 3}}),
        "retry",
    ),
    case(
        "callback stays",
        Change(
            {**TEMPLATE_JOB, "callback": {"url": "https://a.example/"}},
            {"callback": {"url": "https://b.example/"}},
        ),
        "callback",
    ),
    case("queueName cannot come", Change(TEMPLATE_JOB, {"queueName": "q"}), "queueName"),
    case(
        "requestedBy cannot be taken over",
        Change({**TEMPLATE_JOB, "requestedBy": "admin"}, {"requestedBy": "agent"}),
        "requestedBy",
    ),
    case("requestedBy cannot go", Change(TEMPLATE_JOB, {"requestedBy": None}), "requestedBy"),
]


def change(people: People, changing: Change) -> Answer:
    admin = people("admin")
    document = job(changing.before)
    admin.create(document).object()
    if changing.status:
        admin.patch(document, {"status": changing.status}, "status").object()
    return admin.patch(document, {"spec": changing.after})


@pytest.mark.parametrize(("changing", "field_name"), IMMUTABLE)
def test_immutable(people: People, changing: Change, field_name: str) -> None:
    """R-IMMUTABLE: a field keeps its value and its presence."""
    check(change(people, changing), cannot(field_name))


def test_immutable_idempotency_cannot_come_later(people: People) -> None:
    """R-IMMUTABLE: the gateway itself cannot write spec.idempotency later."""
    gateway = people("gateway")
    document = job({"toolRef": {"name": "safe"}, "requestedBy": "agent"})
    gateway.create(document).object()
    answer = gateway.patch(
        document, {"spec": {"idempotency": {"digest": "sha256:1", "caller": "agent"}}}
    )
    check(answer, cannot("idempotency"))


STOP: Document = {"reason": "enough"}

MUTABLE = [
    case("stop can be set", Change(TEMPLATE_JOB, {"stop": STOP}), ""),
    case(
        "stop stays as it is",
        Change({**TEMPLATE_JOB, "stop": STOP}, {"stop": {"reason": "other"}}),
        "a stop cannot be taken back or changed",
    ),
    case(
        "stop cannot be taken back",
        Change({**TEMPLATE_JOB, "stop": STOP}, {"stop": None}),
        "a stop cannot be taken back or changed",
    ),
    case("ttl can come", Change(TEMPLATE_JOB, {"ttlSecondsAfterFinished": 60}), ""),
    case(
        "ttl can change and may be nothing",
        Change({**TEMPLATE_JOB, "ttlSecondsAfterFinished": 60}, {"ttlSecondsAfterFinished": 0}),
        "",
    ),
    case(
        "ttl can go",
        Change({**TEMPLATE_JOB, "ttlSecondsAfterFinished": 60}, {"ttlSecondsAfterFinished": None}),
        "",
    ),
    case(
        "deadlineSeconds can be lowered",
        Change({**TEMPLATE_JOB, "deadlineSeconds": 60}, {"deadlineSeconds": 59}),
        "",
    ),
    case(
        "deadlineSeconds cannot be raised",
        Change({**TEMPLATE_JOB, "deadlineSeconds": 60}, {"deadlineSeconds": 61}),
        "deadlineSeconds can only be lowered",
    ),
    case(
        "deadlineSeconds cannot go",
        Change({**TEMPLATE_JOB, "deadlineSeconds": 60}, {"deadlineSeconds": None}),
        "deadlineSeconds can only be lowered",
    ),
    case(
        "deadlineSeconds cannot come before the default is known",
        Change(TEMPLATE_JOB, {"deadlineSeconds": 60}),
        "the job's deadline is not known yet",
    ),
    case(
        "deadlineSeconds can come to bring a default forward",
        Change(TEMPLATE_JOB, {"deadlineSeconds": 60}, {"deadlineAt": "2100-01-01T00:00:00Z"}),
        "",
    ),
    case(
        "deadlineSeconds cannot come to put a default off",
        Change(TEMPLATE_JOB, {"deadlineSeconds": 60}, {"deadlineAt": "2000-01-01T00:00:00Z"}),
        "deadlineSeconds can only be lowered: the job ends at 2000-01-01T00:00:00Z already",
    ),
    case("suspend can be set before the start", Change(TEMPLATE_JOB, {"suspend": True}), ""),
    case(
        "suspend is refused once the tool has begun",
        Change(TEMPLATE_JOB, {"suspend": True}, STARTED),
        SUSPEND_REFUSED,
    ),
    case(
        "suspend is refused once a tool that may not be repeated has begun",
        Change(TOOL_JOB, {"suspend": True}, {**STARTED, "tool": RESOLVED}),
        SUSPEND_REFUSED,
    ),
    case(
        "suspend is taken from a tool that may be repeated",
        Change(TOOL_JOB, {"suspend": True}, {**STARTED, "tool": {**RESOLVED, "repeatable": True}}),
        "",
    ),
    case(
        "suspend can be taken back at any time",
        Change({**TEMPLATE_JOB, "suspend": True}, {"suspend": None}, STARTED),
        "",
    ),
]


@pytest.mark.parametrize(("changing", "refusal"), MUTABLE)
def test_mutable(people: People, changing: Change, refusal: str) -> None:
    """R-IMMUTABLE: what may change, and how far."""
    check(change(people, changing), refusal)


def test_immutable_applying_the_same_again_changes_nothing(
    people: People, control_plane: ControlPlane
) -> None:
    """R-IMMUTABLE: what the API server filled in is no change, for either kind of apply."""
    document = job({**TEMPLATE_JOB, "dependsOn": [{"name": "a"}]})
    created = people("admin").apply(document).object()
    again = people("admin").apply(document).object()
    assert again["metadata"]["resourceVersion"] == created["metadata"]["resourceVersion"]

    document = job({**TEMPLATE_JOB, "dependsOn": [{"name": "a"}]})
    text = json.dumps(document)
    control_plane.kubectl("apply", "--filename=-", input_text=text)
    assert "unchanged" in control_plane.kubectl("apply", "--filename=-", input_text=text)


DONE: Document = {"state": "done", "finishedAt": "2026-01-01T00:00:00Z"}
FAILED: Document = {
    "state": "failed",
    "finishedAt": "2026-01-01T00:00:00Z",
    "cause": {"code": "tool_error", "retryable": False, "ran": True},
}
END_STAYS = "the job is over; its end cannot be changed"
CAUSE_STAYS = "the job is over; when and why it ended cannot be changed"

FINAL = [
    case("done does not become failed", DONE, {"state": "failed"}, END_STAYS),
    case("done does not become running", DONE, {"state": "running"}, END_STAYS),
    case("done does not vanish", DONE, {"state": None}, END_STAYS),
    case("the time of the end stays", DONE, {"finishedAt": "2026-01-01T00:00:01Z"}, CAUSE_STAYS),
    case("the time of the end does not vanish", DONE, {"finishedAt": None}, "finishedAt"),
    case("the cause stays", FAILED, {"cause": {"code": "oom_killed"}}, CAUSE_STAYS),
    case("no cause is invented later", DONE, {"cause": FAILED["cause"]}, CAUSE_STAYS),
    case("output can be recorded later", DONE, {"output": {"bytes": 5}}, ""),
    case("an end has a time", {"state": "running"}, {"state": "done"}, "has a finishedAt"),
    case("running can become done", {"state": "running"}, DONE, ""),
]


@pytest.mark.parametrize(("before", "after", "refusal"), FINAL)
def test_final(people: People, before: Document, after: Document, refusal: str) -> None:
    """R-STATE-FINAL: the end is written once, for the operator too."""
    document = job(TEMPLATE_JOB)
    people("admin").create(document).object()
    operator = people("operator")
    operator.patch(document, {"status": before}, "status").object()
    check(operator.patch(document, {"status": after}, "status"), refusal)


def test_final_the_whole_status_cannot_be_taken_away(people: People) -> None:
    """R-STATE-FINAL: removing the status is no way around."""
    document = job(TEMPLATE_JOB)
    people("admin").create(document).object()
    people("operator").patch(document, {"status": DONE}, "status").object()
    check(people("operator").patch(document, {"status": None}, "status"), END_STAYS)


LABEL_REFUSED = "the name must be a DNS label of at most 63 characters"

SHAPES = [
    case("neither toolRef nor template", {}, "exactly one of toolRef and template"),
    case(
        "both toolRef and template",
        {**TOOL_JOB, **TEMPLATE_JOB},
        "exactly one of toolRef and template",
    ),
    case(
        "arguments beside a template",
        {**TEMPLATE_JOB, "arguments": {}},
        "arguments belong to a toolRef",
    ),
    case(
        "an unknown field",
        {**TEMPLATE_JOB, "deadlineSecond": 5},
        'unknown field "spec.deadlineSecond"',
    ),
    case("a deadline of nothing", {**TEMPLATE_JOB, "deadlineSeconds": 0}, "spec.deadlineSeconds"),
    case(
        "a negative ttl",
        {**TEMPLATE_JOB, "ttlSecondsAfterFinished": -1},
        "spec.ttlSecondsAfterFinished",
    ),
    case("366 days", {**TEMPLATE_JOB, "deadlineSeconds": 366 * 86400}, ""),
    case(
        "a second more",
        {**TEMPLATE_JOB, "deadlineSeconds": 366 * 86400 + 1},
        "spec.deadlineSeconds",
    ),
    case(
        "a callback that is no address",
        {**TEMPLATE_JOB, "callback": {"url": "ftp://a"}},
        "spec.callback.url",
    ),
    case(
        "one dependency twice",
        {**TEMPLATE_JOB, "dependsOn": [{"name": "a"}, {"name": "a"}]},
        "Duplicate value",
    ),
    case("suspended from the start", {**TEMPLATE_JOB, "suspend": True}, ""),
    case(
        "fields of a template that nobody knows", {"template": {"spec": {"soon": {"new": 1}}}}, ""
    ),
]


@pytest.mark.parametrize(("spec", "refusal"), SHAPES)
def test_shape(people: People, spec: Document, refusal: str) -> None:
    """What an AgentJob may look like."""
    check(people("admin").create(job(spec), dry_run=True), refusal)


@pytest.mark.parametrize(
    ("name", "refusal"),
    [
        case("63 characters", "a" * 63, ""),
        case("64 characters", "a" * 64, LABEL_REFUSED),
        case("a dot", "a.b", LABEL_REFUSED),
    ],
)
@pytest.mark.parametrize("kind", ["AgentJob", "AgentTool", "ClusterAgentTool"])
def test_name(people: People, kind: str, name: str, refusal: str) -> None:
    """Names are DNS labels of at most 63 characters."""
    document = job(TEMPLATE_JOB, name) if kind == "AgentJob" else tool(name, kind)
    check(people("admin").create(document, dry_run=True), refusal)


def test_toolref_is_an_agenttool_unless_told_otherwise(people: People) -> None:
    stored = people("admin").create(job(TOOL_JOB)).object()
    assert stored["spec"]["toolRef"] == {"kind": "AgentTool", "name": "safe"}


def test_resources_of_a_tool_take_numbers_as_kubernetes_does(people: People) -> None:
    spec = {**TOOL_SPEC, "limits": {"resources": {"cpu": 8, "memory": "16Gi"}}}
    people("admin").create({**tool("numbers"), "spec": spec}, dry_run=True).object()


# R-POLICY-TEMPLATE

CLUSTER_TOOL_JOB: Document = {"toolRef": {"kind": "ClusterAgentTool", "name": "safe"}}
OTHER_CLUSTER_JOB: Document = {"toolRef": {"kind": "ClusterAgentTool", "name": "other"}}
NO_JOBS = "must be allowed to create jobs.batch in namespace team-a"

RIGHTS = [
    case("no template without create jobs", "agent", TEMPLATE_JOB, TEAM, f"agent {NO_JOBS}"),
    case("a template with create jobs", "builder", TEMPLATE_JOB, TEAM, ""),
    case(
        "create jobs counts for its namespace only",
        "builder",
        TEMPLATE_JOB,
        "team-b",
        "must be allowed to create jobs.batch in namespace team-b",
    ),
    case("a tool with use", "agent", TOOL_JOB, TEAM, ""),
    case("a cluster tool with use", "agent", CLUSTER_TOOL_JOB, TEAM, ""),
    case(
        "no tool without use",
        "agent",
        {"toolRef": {"name": "other"}},
        TEAM,
        "agent must be allowed to use agenttools.agentjobs.dev other in namespace team-a",
    ),
    case(
        "no cluster tool without use",
        "agent",
        OTHER_CLUSTER_JOB,
        TEAM,
        "agent must be allowed to use clusteragenttools.agentjobs.dev other",
    ),
    case(
        "use counts for its namespace only",
        "agent",
        TOOL_JOB,
        "team-b",
        "agent must be allowed to use agenttools.agentjobs.dev safe in namespace team-b",
    ),
    case("create jobs is not use", "builder", TOOL_JOB, TEAM, "builder must be allowed to use"),
    case("the gateway vouches for use", "gateway", {"toolRef": {"name": "other"}}, TEAM, ""),
]


@pytest.mark.parametrize(("who", "spec", "namespace", "refusal"), RIGHTS)
def test_policy_template(
    people: People, who: str, spec: Document, namespace: str, refusal: str
) -> None:
    """R-POLICY-TEMPLATE: a template needs create jobs, a tool needs use."""
    check(people(who).create(job(spec, namespace=namespace), dry_run=True), refusal)


NO_JOBS_ANYWHERE = "must be allowed to create jobs.batch in all namespaces"

CATALOGUE = [
    case("no tool without create jobs", "curator", "AgentTool", f"curator {NO_JOBS}"),
    case("a tool with create jobs", "builder", "AgentTool", ""),
    case("no cluster tool for one namespace", "builder", "ClusterAgentTool", NO_JOBS_ANYWHERE),
    case("a cluster tool with create jobs in all", "platform", "ClusterAgentTool", ""),
]


@pytest.mark.parametrize(("who", "kind", "refusal"), CATALOGUE)
def test_policy_template_new_tool(people: People, who: str, kind: str, refusal: str) -> None:
    """R-POLICY-TEMPLATE: whoever writes a tool may create Jobs where it runs."""
    check(people(who).create(tool("fresh", kind), dry_run=True), refusal)


@pytest.mark.parametrize("kind", ["AgentTool", "ClusterAgentTool"])
@pytest.mark.parametrize(
    "after",
    [
        case("its description", {"spec": {"description": "x"}}),
        case("its template", {"spec": {"template": OTHER_TEMPLATE}}),
        case("its labels", {"metadata": {"labels": {"a": "b"}}}),
    ],
)
def test_policy_template_change_of_a_tool(people: People, kind: str, after: Document) -> None:
    """R-POLICY-TEMPLATE: the right is asked for whatever is changed."""
    check(
        people("curator").patch(tool("safe", kind), after), "must be allowed to create jobs.batch"
    )
    check(people("platform").patch(tool("safe", kind), after, dry_run=True), "")


def test_policy_template_applied_tool(people: People) -> None:
    """R-POLICY-TEMPLATE: server-side apply is no way around."""
    check(people("curator").apply(tool("applied")), f"curator {NO_JOBS}")


def test_policy_template_a_tool_can_be_let_go(people: People) -> None:
    """R-POLICY-TEMPLATE: whoever takes a finalizer off a deleted tool needs no right to Jobs."""
    document = tool("going")
    document["metadata"]["finalizers"] = ["example.org/wait"]
    people("admin").create(document).object()
    people("admin").delete(document).object()
    free = {"metadata": {"finalizers": None}}
    check(people("curator").patch(document, {**free, "spec": {"description": "x"}}), NO_JOBS)
    check(people("curator").patch(document, free), "")


def test_policy_template_status_of_a_tool_is_the_operators(people: People) -> None:
    """R-POLICY-TEMPLATE: the operator writes status without a right to write tools."""
    for kind in ("AgentTool", "ClusterAgentTool"):
        usable = {"status": {"usable": True}}
        check(people("operator").patch(tool("safe", kind), usable, "status"), "")


# R-POLICY-WHO


@pytest.fixture(scope="session")
def safe_user(people: People) -> str:
    """Who may start the tool safe and is not the gateway."""
    return people("agent").user


WHO = [
    case("one's own name", "agent", {"requestedBy": "agent"}, ""),
    case("no name", "agent", {}, ""),
    case("not somebody else's", "agent", {"requestedBy": "lead"}, "spec.requestedBy must be agent"),
    case(
        "not even the administrator's pick",
        "admin",
        {"requestedBy": "lead"},
        "spec.requestedBy must be",
    ),
    case("the gateway vouches", "gateway", {"requestedBy": "agent"}, ""),
    case(
        "idempotency is the gateway's",
        "agent",
        {"idempotency": {"digest": "d", "caller": "agent"}},
        "spec.idempotency is written by the gateway only",
    ),
    case(
        "the gateway writes idempotency",
        "gateway",
        {"requestedBy": "agent", "idempotency": {"digest": "d", "caller": "agent"}},
        "",
    ),
    case("one's own stop at creation", "agent", {"stop": {"requestedBy": "agent"}}, ""),
    case(
        "not somebody else's stop at creation",
        "agent",
        {"stop": {"requestedBy": "lead"}},
        "spec.stop.requestedBy must be agent",
    ),
    case(
        "a decline is the gateway's",
        "agent",
        {"stop": {"declined": True}},
        "spec.stop.declined is written by the gateway only",
    ),
    case(
        "the gateway declines", "gateway", {"stop": {"declined": True, "requestedBy": "agent"}}, ""
    ),
]


@pytest.mark.parametrize(("who", "more", "refusal"), WHO)
def test_policy_who_on_create(people: People, who: str, more: Document, refusal: str) -> None:
    """R-POLICY-WHO: nobody but the gateway writes somebody else's name."""
    check(people(who).create(job({**TOOL_JOB, **more}), dry_run=True), refusal)


REPORTS = "the gateway writes progress, summary and result"
GATEWAY_STATUS = [
    case("progress", {"progress": {"percent": 40}}, ""),
    case("a summary", {"summary": "3 of 4"}, ""),
    case("a result", {"result": {"source": "report", "text": "x", "bytes": 1}}, ""),
    case("not the state", {"state": "done", "finishedAt": "2026-03-01T12:00:00Z"}, REPORTS),
    case("not a condition", {"conditions": []}, REPORTS),
    case("not the outbox", {"callback": None}, REPORTS),
    case("not who may report", {"podUIDs": ["a", "b"]}, REPORTS),
    case("not an attempt", {"attempts": None}, REPORTS),
    case("not a cause beside progress", {"progress": {"percent": 41}, "waiting": None}, REPORTS),
]


@pytest.mark.parametrize(("status", "refusal"), GATEWAY_STATUS)
def test_policy_places_what_the_gateway_writes_of_a_status(
    people: People, status: Document, refusal: str
) -> None:
    """R-POLICY-PLACES, R-REPORT: what pods report, and nothing that is the operator's."""
    document = job({**TOOL_JOB, "requestedBy": "agent"})
    people("gateway").create(document).object()
    written = {
        "state": "running",
        "waiting": {"code": "creating"},
        "podUIDs": ["a"],
        "attempts": [{"number": 1, "jobName": "x-1"}],
        "callback": {"deliveries": []},
        "conditions": [
            {
                "type": "Accepted",
                "status": "True",
                "reason": "Accepted",
                "lastTransitionTime": "2026-03-01T12:00:00Z",
            }
        ],
    }
    people("operator").patch(document, {"status": written}, "status").object()
    check(people("gateway").patch(document, {"status": status}, "status"), refusal)


WHO_STOPS = [
    case("one's own name", "lead", {"requestedBy": "lead"}, ""),
    case("no name", "lead", {"reason": "enough"}, ""),
    case(
        "not the requester's",
        "lead",
        {"requestedBy": "agent"},
        "spec.stop.requestedBy must be lead",
    ),
    case("the gateway vouches", "gateway", {"requestedBy": "agent"}, ""),
    case("a decline is the gateway's", "lead", {"declined": True}, "spec.stop.declined"),
]


@pytest.mark.parametrize(("who", "stop", "refusal"), WHO_STOPS)
def test_policy_who_on_stop(people: People, who: str, stop: Document, refusal: str) -> None:
    """R-POLICY-WHO: the same for a stop that comes later."""
    document = job({**TOOL_JOB, "requestedBy": "agent"})
    people("gateway").create(document).object()
    check(people(who).patch(document, {"spec": {"stop": stop}}), refusal)


def test_policy_who_looks_at_changed_fields_only(people: People) -> None:
    """R-POLICY-WHO: others may change what is not theirs as long as the names stay."""
    more = {
        "requestedBy": "agent",
        "stop": {"requestedBy": "agent", "declined": True},
        "idempotency": {"digest": "d", "caller": "agent"},
    }
    document = job({**TOOL_JOB, **more})
    people("gateway").create(document).object()
    people("lead").patch(document, {"spec": {"ttlSecondsAfterFinished": 5}}).object()
    people("lead").patch(document, {"metadata": {"labels": {"a": "b"}}}).object()


def test_policy_who_fills_in_the_requester(people: People) -> None:
    """R-POLICY-WHO: the API server knows who asked, and keeps the record for the operator."""
    for who, requester in (("agent", "agent"), ("gateway", None)):
        stored = people(who).create(job(TOOL_JOB)).object()
        assert stored["spec"].get("requestedBy") == requester
        assert stored["metadata"]["finalizers"] == ["agentjobs.dev/finalizer"]


def test_policy_who_fills_in_the_full_name_of_an_account(people: People) -> None:
    """R-POLICY-WHO: a ServiceAccount is named as the API server names it."""
    account = Caller(people.server, "system:serviceaccount:team-a:default", "writers")
    stored = account.create(job(OTHER_CLUSTER_JOB), dry_run=True)
    check(stored, "system:serviceaccount:team-a:default must be allowed to use")
    admin = people("admin").create(job(TEMPLATE_JOB)).object()
    assert admin["spec"]["requestedBy"] == "admin"


@pytest.mark.parametrize("kept", [["example.org/x"], ["agentjobs.dev/finalizer"]])
def test_finalizers_of_others_are_kept(people: People, kept: list[str]) -> None:
    document = job(TEMPLATE_JOB)
    document["metadata"]["finalizers"] = kept
    stored = people("admin").create(document, dry_run=True).object()
    assert set(stored["metadata"]["finalizers"]) == {*kept, "agentjobs.dev/finalizer"}
    assert len(stored["metadata"]["finalizers"]) == len({*kept, "agentjobs.dev/finalizer"})


# R-POLICY-INPUT


def question(kind: str = "elicitation", **more: object) -> Document:
    spec = {
        "jobName": "j",
        "jobUID": "u",
        "key": "k",
        "kind": kind,
        "prompt": "Which one?",
        "requestedBy": "agent",
        "expiresAt": "2100-01-01T00:00:00Z",
        **more,
    }
    return inputrequest(TEAM, f"input-{next(NUMBERS)}", spec)


NOBODY_ELSE = "created by the operator and the gateway only"
OWNED = "belongs to the AgentJob that asks it"
ASKS = "the gateway asks what tools ask"


@pytest.mark.parametrize(
    ("who", "kind", "owner", "refusal"),
    [
        case("the operator asks", "operator", "elicitation", "", ""),
        case("the operator asks to approve", "operator", "approval", "", ""),
        case("the gateway asks", "gateway", "elicitation", "u", ""),
        case("the gateway asks for a model", "gateway", "sampling", "u", ""),
        case("the gateway does not ask to approve", "gateway", "approval", "u", ASKS),
        case("nor to confirm", "gateway", "confirmation", "u", ASKS),
        case("the gateway asks for a job", "gateway", "elicitation", "", OWNED),
        case("and for the one that owns it", "gateway", "elicitation", "another", OWNED),
        case("nobody else", "lead", "elicitation", "u", NOBODY_ELSE),
        case("not even the administrator", "admin", "elicitation", "u", NOBODY_ELSE),
    ],
)
def test_policy_input_create(people: People, who: str, kind: str, owner: str, refusal: str) -> None:
    """R-POLICY-INPUT: only operator and gateway ask; the gateway what tools ask."""
    document = question(kind)
    if owner:
        named = {"apiVersion": "agentjobs.dev/v1alpha1", "kind": "AgentJob", "name": "j"}
        document["metadata"]["ownerReferences"] = [{**named, "uid": owner}]
    check(people(who).create(document, dry_run=True), refusal)


def answer(by: str = "", outcome: str = "answered", **more: object) -> Document:
    return {"outcome": outcome, **({"answeredBy": by} if by else {}), **more}


NOT_REQUESTER = "this can be answered by the requester of the job only, agent"
OWN_APPROVAL = "an approval cannot be given by the requester of the job, agent"
CLOSED_BY = "the operator, and nobody else, closes a question as expired or withdrawn"
APPROVAL: Document = {"kind": "approval", "approvers": ["user:lead", "group:stewards"]}
CONFIRMATION: Document = {"kind": "confirmation"}
QUESTION: Document = {"kind": "elicitation"}
NOBODY: Document = {"requestedBy": None}

ANSWERS = [
    case("the requester answers", QUESTION, "agent", answer("agent", answer={"ok": True}), ""),
    case("the requester declines", QUESTION, "agent", answer("agent", "declined"), ""),
    case("the requester confirms", CONFIRMATION, "agent", answer("agent"), ""),
    case("nobody else answers", QUESTION, "lead", answer("lead"), NOT_REQUESTER),
    case("nobody else confirms", CONFIRMATION, "lead", answer("lead"), NOT_REQUESTER),
    case(
        "not under another name",
        QUESTION,
        "lead",
        answer("agent"),
        "status.answeredBy must be lead",
    ),
    case("the gateway answers for the requester", QUESTION, "gateway", answer("agent"), ""),
    case("the gateway answers for nobody else", QUESTION, "gateway", answer("lead"), NOT_REQUESTER),
    case(
        "no requester on record, no answer",
        QUESTION | NOBODY,
        "agent",
        answer("agent"),
        "nobody is on record as the requester",
    ),
    case("an approver approves", APPROVAL, "lead", answer("lead"), ""),
    case("an approver declines", APPROVAL, "lead", answer("lead", "declined"), ""),
    case("a group's approver approves", APPROVAL, "steward", answer("steward"), ""),
    case("the requester never approves", APPROVAL, "agent", answer("agent"), OWN_APPROVAL),
    case(
        "the requester does not approve as an approver",
        APPROVAL | {"approvers": ["user:agent"]},
        "agent",
        answer("agent"),
        OWN_APPROVAL,
    ),
    case("not through the gateway either", APPROVAL, "gateway", answer("agent"), OWN_APPROVAL),
    case("the gateway approves for an approver", APPROVAL, "gateway", answer("lead"), ""),
    case(
        "approve is needed",
        APPROVAL | {"approvers": ["user:builder"]},
        "builder",
        answer("builder"),
        "builder must be allowed to approve inputrequests.agentjobs.dev in namespace team-a",
    ),
    case(
        "approve is not enough where others are named",
        APPROVAL | {"approvers": ["user:builder", "group:boss"]},
        "lead",
        answer("lead"),
        "lead is not among the approvers of this tool: user:builder, group:boss",
    ),
    case(
        "no requester on record, no approval",
        APPROVAL | NOBODY,
        "lead",
        answer("lead"),
        "nobody is on record as the requester",
    ),
    case("the operator lets expire", APPROVAL, "operator", answer(outcome="expired"), ""),
    case("the operator withdraws", QUESTION, "operator", answer(outcome="withdrawn"), ""),
    case("the operator answers nothing", APPROVAL, "operator", answer("lead"), CLOSED_BY),
    case("nobody else lets expire", APPROVAL, "lead", answer(outcome="expired"), CLOSED_BY),
    case(
        "the requester does not withdraw", QUESTION, "agent", answer(outcome="withdrawn"), CLOSED_BY
    ),
    case(
        "the gateway does not let expire", QUESTION, "gateway", answer(outcome="expired"), CLOSED_BY
    ),
    case(
        "an answer has an author", QUESTION, "gateway", answer(), "name who answered in answeredBy"
    ),
    case(
        "no answer without an outcome",
        QUESTION,
        "agent",
        {"answer": {"ok": True}, "answeredBy": "agent"},
        "an answer is written together with its outcome",
    ),
    case(
        "no value with a decline",
        QUESTION,
        "agent",
        answer("agent", "declined", answer={"ok": True}),
        "only the outcome answered carries an answer",
    ),
]


@pytest.mark.parametrize(("spec", "who", "status", "refusal"), ANSWERS)
def test_policy_input_answer(
    people: People, spec: Document, who: str, status: Document, refusal: str
) -> None:
    """R-POLICY-INPUT: who may close which question, and how."""
    kept = {key: value for key, value in spec.items() if value is not None}
    document = question(**kept)
    if "requestedBy" in spec:
        del document["spec"]["requestedBy"]
    people("operator").create(document).object()
    check(people(who).patch(document, {"status": status}, "status"), refusal)


AFTERWARDS = [
    case(
        "the requester does not answer again",
        "agent",
        {"answer": {"ok": False}},
        "cannot be changed",
    ),
    case("the requester does not take it back", "agent", {"outcome": None}, "refused"),
    case(
        "the operator does not withdraw it",
        "operator",
        {"outcome": "withdrawn"},
        "cannot be changed",
    ),
]


@pytest.mark.parametrize(("who", "status", "refusal"), AFTERWARDS)
def test_policy_input_answered_once(
    people: People, who: str, status: Document, refusal: str
) -> None:
    """R-POLICY-INPUT: an answer is written once."""
    document = question()
    people("operator").create(document).object()
    given = {"status": answer("agent", answer={"ok": True})}
    people("agent").patch(document, given, "status").object()
    after = people(who).patch(document, {"status": status}, "status")
    check(after, "" if refusal == "" else after.message if refusal == "refused" else refusal)
    assert people("admin").get(document).object()["status"] == given["status"]


def test_policy_input_an_answer_cannot_be_taken_back(people: People) -> None:
    """R-POLICY-INPUT: removing the status is no way around."""
    document = question()
    people("operator").create(document).object()
    people("agent").patch(document, {"status": answer("agent")}, "status").object()
    taken_back = people("operator").patch(document, {"status": None}, "status")
    check(taken_back, "the question is closed; its answer cannot be taken back")


def test_policy_input_a_question_stays(people: People) -> None:
    """R-POLICY-INPUT: what was asked cannot be changed, by the gateway neither."""
    document = question()
    people("operator").create(document).object()
    reworded = people("gateway").patch(document, {"spec": {"prompt": "Anything?"}})
    check(reworded, "a question cannot be changed")


# R-POLICY-PLACES

NO_TEMPLATES = "templates are not allowed through the gateway"

PLACES = [
    case("no template", TEMPLATE_JOB, TEAM, NO_TEMPLATES),
    case("a tool", TOOL_JOB, TEAM, ""),
    case(
        "never kube-system",
        TOOL_JOB,
        "kube-system",
        "the gateway runs nothing in namespace kube-system",
    ),
    case("never the release's namespace", TOOL_JOB, NAMESPACE, f"nothing in namespace {NAMESPACE}"),
]


@pytest.mark.parametrize(("spec", "namespace", "refusal"), PLACES)
def test_policy_places(people: People, spec: Document, namespace: str, refusal: str) -> None:
    """R-POLICY-PLACES: where the gateway may start what."""
    document = job({**spec, "requestedBy": "builder"}, namespace=namespace)
    check(people("gateway").create(document, dry_run=True), refusal)


@pytest.mark.parametrize("namespace", ["kube-system", NAMESPACE])
def test_policy_places_nothing_of_others_is_touched(people: People, namespace: str) -> None:
    """R-POLICY-PLACES: the gateway neither stops nor deletes nor reports there."""
    document = job(TEMPLATE_JOB, namespace=namespace)
    people("admin").create(document).object()
    gateway, refusal = people("gateway"), f"nothing in namespace {namespace}"
    check(gateway.patch(document, {"spec": {"stop": {}}}), refusal)
    check(gateway.patch(document, {"status": {"progress": {"percent": 1}}}, "status"), refusal)
    check(gateway.delete(document), refusal)


@pytest.fixture
def templates_allowed(
    control_plane: ControlPlane, people: People, chart: list[Document]
) -> Iterator[None]:
    """The chart with gateway.allowTemplates=true, for one test."""
    allowing = render(binary("helm"), *SERVES_DEFAULTS, "--set=gateway.allowTemplates=true")
    kind, name = "ValidatingAdmissionPolicy", "agentjobs-gateway"

    def start() -> Answer:
        document = job({**TEMPLATE_JOB, "requestedBy": "builder"})
        return people("gateway").create(document, dry_run=True)

    apply(control_plane, [only(allowing, kind, name)])
    wait_until(lambda: start().taken)
    yield
    apply(control_plane, [only(chart, kind, name)])
    wait_until(lambda: not start().taken)


@pytest.mark.usefixtures("templates_allowed")
def test_policy_places_templates_can_be_allowed(people: People) -> None:
    """R-POLICY-PLACES: the setting allows templates, and nothing else."""
    document = job({**TEMPLATE_JOB, "requestedBy": "builder"}, namespace="kube-system")
    check(people("gateway").create(document), "the gateway runs nothing in namespace kube-system")


# What people see


def test_explain(control_plane: ControlPlane) -> None:
    text = control_plane.kubectl("explain", "aj.spec.deadlineSeconds")
    assert "Seconds from the creation of this AgentJob until it is ended" in " ".join(text.split())


def test_short_names_and_category(control_plane: ControlPlane) -> None:
    for name in ("aj", "atool", "catool", "ireq", "agentjobs"):
        control_plane.kubectl("get", name, "--all-namespaces")
    listed = control_plane.kubectl("api-resources", "--categories=agentjobs-all", "--output=name")
    assert set(listed.split()) == {
        "agentjobs.agentjobs.dev",
        "agenttools.agentjobs.dev",
        "clusteragenttools.agentjobs.dev",
        "inputrequests.agentjobs.dev",
    }


@pytest.fixture(scope="session")
def shown(people: People) -> Document:
    """A job with something in every column."""
    document = job(TOOL_JOB)
    people("admin").create(document).object()
    status = {
        **FAILED,
        "progress": {"percent": 40},
        "deadlineAt": "2100-01-01T00:00:00Z",
        "podPhase": "Failed",
        "podName": "pod-2",
        "attempts": [{"number": 1, "jobName": "j-1"}, {"number": 2, "jobName": "j-2"}],
    }
    people("operator").patch(document, {"status": status}, "status").object()
    return document


def table(control_plane: ControlPlane, *arguments: str) -> list[list[str]]:
    text = control_plane.kubectl("get", "aj", f"--namespace={TEAM}", *arguments)
    return [line.replace("POD PHASE", "POD-PHASE").split() for line in text.splitlines()]


def test_columns(control_plane: ControlPlane, shown: Document) -> None:
    name = shown["metadata"]["name"]
    heading, row = table(control_plane, name)
    assert heading == ["NAME", "STATE", "TOOL", "PROGRESS", "CAUSE", "DEADLINE", "AGE"]
    assert row[:-1] == [name, "failed", "safe", "40", "tool_error", "2100-01-01T00:00:00Z"]
    heading, row = table(control_plane, name, "--output=wide")
    assert heading[6:] == ["POD-PHASE", "POD", "ATTEMPTS", "AGE"]
    assert row[6:-1] == ["Failed", "pod-2", "2"]


@pytest.mark.parametrize(
    ("selector", "found"),
    [
        ("status.state=failed,spec.toolRef.name=safe", True),
        ("status.state=done", False),
        ("spec.toolRef.name=other", False),
    ],
)
def test_field_selectors(
    control_plane: ControlPlane, shown: Document, selector: str, found: bool
) -> None:
    rows = table(control_plane, f"--field-selector={selector}", "--no-headers")
    assert (shown["metadata"]["name"] in [row[0] for row in rows]) == found


def example_files() -> list[Path]:
    return sorted((CHART.parents[1] / "manifests/examples").glob("*.yaml"))


@pytest.mark.parametrize("file", example_files(), ids=lambda file: file.stem)
def test_examples_are_taken(control_plane: ControlPlane, file: Path) -> None:
    control_plane.kubectl("create", "--dry-run=server", "--validate=strict", f"--filename={file}")
