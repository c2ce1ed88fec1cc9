"""What a refusal of the API server means: the job ends, it waits, or a person acts (R-CAUSE)."""

from typing import Any

import pytest

from agentjobs.domain.reconcile import decide
from agentjobs.domain.refusal import Refusal, RefusalKind, refusal_in_events, refusal_of
from tests.builders import Json, a_child, an_agentjob, at, claimed, observed
from tests.domain.situations import told

POLICY = (
    "jobs.batch \"a-1\" is forbidden: ValidatingAdmissionPolicy 'images' with binding 'images' "
    "denied request: only images of images.example.net"
)
WEBHOOK = 'admission webhook "check.example.net" denied the request: no such team'
SECURITY = 'pods "a-1-x" is forbidden: violates PodSecurity "restricted:latest": privileged'
QUOTA = 'pods "a-1-x" is forbidden: exceeded quota: small, requested: pods=1, used: pods=0'
RIGHTS = (
    'jobs.batch is forbidden: User "system:serviceaccount:agentjobs-system:agentjobs-operator" '
    'cannot create resource "jobs" in API group "batch" in the namespace "search"'
)
INVALID: Json = {
    "message": 'Job.batch "a-1" is invalid: spec.completions: Required value',
    "details": {
        "causes": [
            {"field": "spec.completions", "message": "Required value: when indexed"},
            {"field": "spec.template.spec.restartPolicy", "message": "Required value: Never"},
        ]
    },
}
STRICT = (
    'Job in version "v1" cannot be handled as a Job: strict decoding error: '
    'unknown field "spec.activeDeadlineSecs", unknown field "spec.template.spec.gracePeriod"'
)
FIELDS = [
    "spec.template.spec.completions: Required value: when indexed",
    "spec.template.spec.template.spec.restartPolicy",
]


@pytest.mark.parametrize(
    ("code", "body", "kind", "words"),
    [
        pytest.param(422, INVALID, "invalid", FIELDS, id="422: fields of the AgentJob"),
        pytest.param(
            400,
            {"message": STRICT},
            "invalid",
            ['"spec.template.spec.activeDeadlineSecs"', "spec.template.spec.template.spec.grace"],
            id="400: unknown fields, of the AgentJob",
        ),
        pytest.param(413, {"message": "too large"}, "invalid", ["too large"], id="413: too large"),
        pytest.param(403, {"message": POLICY}, "denied", ["only images"], id="403: a policy"),
        pytest.param(422, {"message": POLICY}, "denied", ["only images"], id="422: a policy"),
        pytest.param(403, {"message": WEBHOOK}, "denied", ["no such team"], id="403: a webhook"),
        pytest.param(400, {"message": WEBHOOK}, "denied", ["no such team"], id="400: a webhook"),
        pytest.param(
            422,
            {"message": f'Job.batch "a-1" is invalid: spec: Invalid value: {POLICY}'},
            "invalid",
            ["Invalid value"],
            id="422: a field that quotes a policy",
        ),
        pytest.param(403, {"message": QUOTA}, "quota", ["small"], id="403: quota"),
        pytest.param(403, {"message": RIGHTS}, "rights", ["cannot create"], id="403: our rights"),
    ],
)
def test_r_cause_an_answer_is_sorted(code: int, body: Json, kind: str, words: list[str]) -> None:
    refusal = refusal_of(code, body)
    assert refusal is not None
    assert str(refusal.kind) == kind
    assert not [word for word in words if word not in refusal.message]
    assert refusal.message.isprintable()


@pytest.mark.parametrize("code", [401, 404, 408, 409, 429, 500, 502, 503, 504], ids=str)
def test_r_cause_what_a_later_try_may_not_get_is_no_refusal(code: int) -> None:
    assert refusal_of(code, {"message": "later"}) is None


def event(message: str, time: str, reason: str = "FailedCreate") -> Json:
    return {"reason": reason, "message": f"Error creating: {message}", "lastTimestamp": time}


@pytest.mark.parametrize(
    ("events", "kind"),
    [
        pytest.param([], None, id="none"),
        pytest.param([event(QUOTA, "1", "SuccessfulCreate")], None, id="no failure"),
        pytest.param([event(QUOTA, "1")], "quota", id="quota"),
        pytest.param([event(SECURITY, "1")], "denied", id="pod security"),
        pytest.param([event(WEBHOOK, "1")], "denied", id="a webhook"),
        pytest.param([event('Pod "a-1-x" is invalid: x', "1")], "invalid", id="an invalid pod"),
        pytest.param([event("timeout", "1")], None, id="what may pass by itself"),
        pytest.param([event(SECURITY, "1"), event(QUOTA, "2")], "quota", id="the newest counts"),
        pytest.param([event(QUOTA, "2"), event(SECURITY, "1")], "quota", id="in any order"),
    ],
)
def test_r_cause_events_of_a_job_without_pods(events: list[Json], kind: str | None) -> None:
    refusal = refusal_in_events(events)
    assert (str(refusal.kind) if refusal else None) == kind


@pytest.mark.parametrize(
    ("kind", "child", "expected"),
    [
        ("invalid", None, "failed invalid_spec unstarted"),
        ("denied", None, "failed admission_denied unstarted"),
        ("quota", None, "queued (quota_exceeded)"),
        ("rights", None, "queued (creating)"),
        ("denied", a_child(), "queued (creating) | SuspendJob"),
        ("quota", a_child(), "queued (quota_exceeded)"),
    ],
    ids=lambda value: "of the Job's pods" if value and not isinstance(value, str) else value,
)
def test_r_cause_what_cannot_cure_itself_ends_and_the_rest_waits(
    kind: str, child: Any, expected: str
) -> None:
    seen = observed(
        an_agentjob(status=claimed(**({"jobUID": "j1"} if child else {}))),
        child=child,
        refusal=Refusal(RefusalKind(kind), "the server's words"),
        refusal_known=True,
    )
    plan = decide(seen)
    assert told(plan) == expected
    assert plan.status is not None
    said = [plan.status.cause, plan.status.waiting, plan.status.ending]
    assert [each for each in said if each and "the server's words" in each.message]
    if not plan.status.finished_at and not plan.status.ending:
        assert plan.requeue_at is not None
        assert at(60) < plan.requeue_at <= at(70)


def test_r_cause_a_person_must_act_where_the_operator_may_not() -> None:
    refusal = Refusal(RefusalKind.RIGHTS, RIGHTS)
    seen = observed(an_agentjob(status=claimed()), refusal=refusal, refusal_known=True)
    status = decide(seen).status
    assert status is not None
    (stalled,) = [c for c in status.conditions if c.type == "Stalled"]
    assert (stalled.status, stalled.reason) == ("True", "OperatorForbidden")


def test_r_cause_a_long_refusal_goes_into_the_condition() -> None:
    refusal = Refusal(RefusalKind.INVALID, "word " * 400)
    seen = observed(an_agentjob(status=claimed()), refusal=refusal, refusal_known=True)
    status = decide(seen).status
    assert status is not None
    assert status.cause is not None
    assert len(status.cause.message) == 256
    (accepted,) = [c for c in status.conditions if c.type == "Accepted"]
    assert 1000 < len(accepted.message.encode()) <= 1024
