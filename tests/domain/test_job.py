"""The Job of an attempt: the template as it was written, and what is added (R-ATTEMPT, R-ARGS)."""

import copy
import json
from typing import Any

import pytest

from agentjobs.domain.accept import accept
from agentjobs.domain.children import JobView
from agentjobs.domain.job import desired_job, job_name, placeholder_job
from agentjobs.domain.observed import Policy
from tests.builders import CREATED, Json, a_template, a_tool, an_agentjob, observed
from tests.jobs import load

ENV = {
    "AGENTJOBS_JOB_ID": "nightly-index.search",
    "AGENTJOBS_ATTEMPT": "1",
    "AGENTJOBS_TOKEN_FILE": "/var/run/agentjobs/token",
}
TOKEN = {
    "serviceAccountToken": {
        "audience": "agentjobs-report",
        "expirationSeconds": 3600,
        "path": "token",
    }
}
ARGUMENTS = {
    "downwardAPI": {
        "items": [
            {
                "path": "arguments.json",
                "fieldRef": {"fieldPath": "metadata.annotations['agentjobs.dev/arguments']"},
            }
        ]
    }
}
MOUNT = {"name": "agentjobs", "mountPath": "/var/run/agentjobs", "readOnly": True}


def built(*, now: float = 0, policy: Policy | None = None, tool: Any = None, **job: Any) -> Json:
    return built_with_warnings(now=now, policy=policy, tool=tool, **job)[0]


def built_with_warnings(
    *, now: float = 0, policy: Policy | None = None, tool: Any = None, **job: Any
) -> tuple[Json, tuple[str, ...]]:
    seen = observed(an_agentjob(**job), now=now, tool=tool, policy=policy or Policy())
    return desired_job(seen.job, accept(seen), attempt=1, now=seen.now, policy=seen.policy)


def run(name: str) -> Json:
    return built(name=name, **load.manifest("runs", name)["spec"])


def variables(job: Json, container: int = 0) -> dict[str, str]:
    env = job["spec"]["template"]["spec"]["containers"][container]["env"]
    return {item["name"]: item.get("value", "") for item in env}


def without_additions(job: Json, template: Json) -> Json:
    """Take out of a Job's spec what is added to every one; it must be that and no more."""
    spec = copy.deepcopy(job["spec"])
    given = template["spec"]
    assert spec.pop("podReplacementPolicy") == "Failed"
    assert spec.pop("activeDeadlineSeconds") > 120
    if "backoffLimit" not in given and "backoffLimitPerIndex" not in given:
        assert spec.pop("backoffLimit") == 0
    pod, given_pod = spec["template"], given["template"]
    labels = pod["metadata"]["labels"]
    assert labels.pop("agentjobs.dev/job")
    if not labels:
        del pod["metadata"]["labels"]
    _without_added_volume(pod["spec"], given_pod["spec"])
    for field, value in (("restartPolicy", "Never"), ("activeDeadlineSeconds", None)):
        if field not in given_pod["spec"]:
            found = pod["spec"].pop(field)
            assert value is None or found == value
    if not pod["metadata"]:
        del pod["metadata"]
    return spec


def _without_added_volume(pod: Json, given: Json) -> None:
    assert pod["volumes"].pop() == {"name": "agentjobs", "projected": {"sources": [TOKEN]}}
    if "volumes" not in given:
        del pod["volumes"]
    touched = [c for c in pod["containers"] if MOUNT in c.get("volumeMounts", ())]
    assert len(touched) == 1
    (tool,) = touched
    original = next(c for c in given["containers"] if c["name"] == tool["name"])
    assert tool["volumeMounts"].pop() == MOUNT
    kept = len(original.get("env", ()))
    assert [item["name"] for item in tool["env"][kept:]] == list(ENV)
    del tool["env"][kept:]
    for field in ("env", "volumeMounts"):
        if field not in original:
            del tool[field]


def expected_spec(template: Json) -> Json:
    """What of a template's spec must reach the Job as it is."""
    spec = copy.deepcopy(template["spec"])
    for taken_over in ("ttlSecondsAfterFinished", "activeDeadlineSeconds", "suspend"):
        spec.pop(taken_over, None)
    meta = spec["template"].get("metadata", {})
    for dropped in set(meta) - {"labels", "annotations"}:
        del meta[dropped]
    return spec


@pytest.mark.parametrize("name", load.names("runs"))
def test_r_template_what_was_written_reaches_the_job_unchanged(name: str) -> None:
    template = load.manifest("runs", name)["spec"]["template"]
    before = copy.deepcopy(template)
    job = run(name)
    given = load.manifest("runs", name)["spec"]["template"]
    assert template == before
    found = without_additions(job, given)
    expected = expected_spec(given)
    grace = expected["template"]["spec"].get("terminationGracePeriodSeconds", 0)
    if grace > 120:
        expected["template"]["spec"]["terminationGracePeriodSeconds"] = 120
    if "queue" in name:
        found.pop("suspend", None)
    assert found == expected
    kept = given.get("metadata", {})
    ours = {"agentjobs.dev/job": name}
    assert job["metadata"]["labels"] == kept.get("labels", {}) | ours
    attempt = {"agentjobs.dev/attempt": "1"}
    assert job["metadata"]["annotations"] == kept.get("annotations", {}) | attempt


def test_r_attempt_the_smallest_job_whole() -> None:
    assert built(deadlineSeconds=500) == {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {
            "name": "nightly-index-1",
            "namespace": "search",
            "labels": {"agentjobs.dev/job": "nightly-index"},
            "annotations": {"agentjobs.dev/attempt": "1"},
            "ownerReferences": [
                {
                    "apiVersion": "agentjobs.dev/v1alpha1",
                    "kind": "AgentJob",
                    "name": "nightly-index",
                    "uid": "a1b2",
                    "controller": True,
                    "blockOwnerDeletion": True,
                }
            ],
        },
        "spec": {
            "activeDeadlineSeconds": 500 + 120,
            "podReplacementPolicy": "Failed",
            "backoffLimit": 0,
            "template": {
                "metadata": {"labels": {"agentjobs.dev/job": "nightly-index"}},
                "spec": {
                    "restartPolicy": "Never",
                    "activeDeadlineSeconds": 500 + 15,
                    "containers": [
                        {
                            "name": "main",
                            "image": "images.example.net/base:1",
                            "env": [{"name": k, "value": v} for k, v in ENV.items()],
                            "volumeMounts": [MOUNT],
                        }
                    ],
                    "volumes": [{"name": "agentjobs", "projected": {"sources": [TOKEN]}}],
                },
            },
        },
    }


def test_r_args_the_job_of_a_tool_whole() -> None:
    tool = a_tool(inputSchema={"properties": {"depth": {"default": 2}}})
    arguments = {"depth": 3, "query": "cost $(SECRET)", "list": [1]}
    job = built(tool=tool, toolRef={"name": "indexer"}, arguments=arguments, deadlineSeconds=500)
    labels = {"agentjobs.dev/job": "nightly-index", "agentjobs.dev/tool": "indexer"}
    assert job["metadata"]["labels"] == labels
    pod = job["spec"]["template"]
    assert pod["metadata"]["labels"] == labels
    assert list(pod["metadata"]["annotations"]) == ["agentjobs.dev/arguments"]
    assert json.loads(pod["metadata"]["annotations"]["agentjobs.dev/arguments"]) == arguments
    assert variables(job) == ENV | {
        "AGENTJOBS_ARGUMENTS_FILE": "/var/run/agentjobs/arguments.json",
        "AGENTJOBS_ARG_DEPTH": "3",
        "AGENTJOBS_ARG_QUERY": "cost $$(SECRET)",
    }
    (volume,) = pod["spec"]["volumes"]
    assert volume == {"name": "agentjobs", "projected": {"sources": [TOKEN, ARGUMENTS]}}


def test_r_args_hostile_text_is_in_one_annotation_and_doubled_in_the_environment() -> None:
    text = "$(DB_SECRET) $HOME $$(X) `id`\nsecond; rm -rf /x && echo \"%s\" '\\' "
    job = built(tool=a_tool(inputSchema={}), toolRef={"name": "indexer"}, arguments={"note": text})
    assert variables(job)["AGENTJOBS_ARG_NOTE"] == text.replace("$", "$$")
    annotation = job["spec"]["template"]["metadata"]["annotations"].pop("agentjobs.dev/arguments")
    assert json.loads(annotation) == {"note": text}
    assert "$$(X)" in annotation
    container = job["spec"]["template"]["spec"]["containers"][0]
    container["env"] = [e for e in container["env"] if e["name"] != "AGENTJOBS_ARG_NOTE"]
    assert "rm -rf" not in json.dumps(job)


def test_r_args_a_name_that_is_no_variable_never_reaches_the_environment() -> None:
    arguments = {"Größe": "groß", "语言": "日本語", "max-words": 1, "max_words": 2, "Text": "a"}
    ref = {"name": "indexer"}
    job, warnings = built_with_warnings(
        tool=a_tool(inputSchema={}), toolRef=ref, arguments=arguments
    )
    ours = {name for name in variables(job) if name.startswith("AGENTJOBS_ARG_")}
    assert ours == {"AGENTJOBS_ARG_TEXT"}
    assert [w for w in warnings if "max-words" in w and "max_words" in w]


def test_r_container_only_the_annotated_container_is_changed() -> None:
    first, second = run("second-is-the-tool")["spec"]["template"]["spec"]["containers"]
    assert "env" not in first
    assert first["volumeMounts"] == [{"name": "heap", "mountPath": "/heap"}]
    assert second["name"] == "ship"
    assert MOUNT in second["volumeMounts"]


def test_r_container_an_annotation_that_names_nothing_means_the_first() -> None:
    template = a_template(containers=[{"name": "one"}, {"name": "two"}])
    annotation = {"kubectl.kubernetes.io/default-container": "three"}
    template["spec"]["template"]["metadata"] = {"annotations": annotation}
    one, two = built(template=template)["spec"]["template"]["spec"]["containers"]
    assert (set(one), set(two)) == ({"name", "env", "volumeMounts"}, {"name"})


def test_r_template_the_environment_keeps_its_order_and_what_it_has_wins() -> None:
    own = [{"name": "B", "value": "1"}, {"name": "AGENTJOBS_ATTEMPT", "value": "mine"}]
    job = built(template=a_template(containers=[{"name": "main", "env": own}]))
    found = variables(job)
    assert list(found) == ["B", "AGENTJOBS_ATTEMPT", "AGENTJOBS_JOB_ID", "AGENTJOBS_TOKEN_FILE"]
    assert found["AGENTJOBS_ATTEMPT"] == "mine"


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        pytest.param(None, 515, id="none: our backstop"),
        pytest.param(200, 200, id="an earlier one stays"),
        pytest.param(9000, 515, id="a later one does not"),
        pytest.param(-1, -1, id="what is wrong is left to be refused"),
        pytest.param("200", "200", id="what is no number too"),
    ],
)
def test_r_deadline_the_pods_own_deadline(own: Any, expected: Any) -> None:
    template = a_template(**({} if own is None else {"activeDeadlineSeconds": own}))
    job = built(template=template, deadlineSeconds=500)
    assert job["spec"]["template"]["spec"]["activeDeadlineSeconds"] == expected


@pytest.mark.parametrize(
    ("now", "pod", "job"),
    [
        pytest.param(0, 515, 620, id="at once"),
        pytest.param(200, 315, 420, id="after it has waited"),
        pytest.param(499.9, 16, 120, id="just before the deadline"),
    ],
)
def test_r_deadline_backstops_are_made_of_what_remains(now: float, pod: int, job: int) -> None:
    made = built(now=now, deadlineSeconds=500)["spec"]
    assert made["activeDeadlineSeconds"] == job
    assert made["template"]["spec"]["activeDeadlineSeconds"] == pod


@pytest.mark.parametrize(
    ("asked", "expected", "told"),
    [(400, 120, True), (121, 120, True), (120, 120, False), (5, 5, False), ("9", "9", False)],
    ids=["far above", "just above", "at the ceiling", "below", "no number"],
)
def test_r_deadline_grace_periods_are_cut_to_the_ceiling(
    asked: Any, expected: Any, told: bool
) -> None:
    template = a_template(terminationGracePeriodSeconds=asked)
    job, warnings = built_with_warnings(template=template)
    assert job["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] == expected
    assert [f"{asked} was cut" in w and "120" in w for w in warnings] == [True] * told
    higher, none = built_with_warnings(template=template, policy=Policy(grace_ceiling=600))
    assert higher["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] == asked
    assert none == ()


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ({}, 0),
        ({"backoffLimit": 3}, 3),
        ({"backoffLimit": 0}, 0),
        ({"backoffLimit": None}, 0),
        ({"backoffLimitPerIndex": 1}, None),
        ({"backoffLimitPerIndex": 1, "backoffLimit": 9}, 9),
    ],
    ids=["absent", "given", "zero", "null", "per index", "both"],
)
def test_r_attempt_backoff_limit(spec: Json, expected: int | None) -> None:
    template = a_template()
    template["spec"] |= spec
    assert built(template=template)["spec"].get("backoffLimit") == expected


@pytest.mark.parametrize(
    ("given", "expected"),
    [({}, "Never"), ({"restartPolicy": None}, "Never"), ({"restartPolicy": ""}, "")]
    + [({"restartPolicy": value}, value) for value in ("Never", "OnFailure")],
    ids=["absent", "null", "empty: left to be refused", "Never", "OnFailure"],
)
def test_r_attempt_restart_policy(given: Json, expected: str) -> None:
    job = built(template=a_template(**given))
    assert job["spec"]["template"]["spec"]["restartPolicy"] == expected


@pytest.mark.parametrize(
    "spec",
    [{"managedBy": "example.net/other"}, {"completions": 0}, {"parallelism": 3}],
    ids=["managedBy", "completions 0", "parallelism alone"],
)
def test_r_template_what_passes(spec: Json) -> None:
    template = a_template()
    template["spec"] |= spec
    made = built(template=template)["spec"]
    assert spec.items() <= made.items()
    assert ("completions" in made) is ("completions" in spec)


def test_r_template_the_jobs_own_time_to_live_is_taken_over() -> None:
    job = run("gone-at-once")
    assert "ttlSecondsAfterFinished" not in job["spec"]
    assert job["metadata"]["name"] == "gone-at-once-1"
    assert "generateName" not in job["metadata"]
    assert job["spec"]["activeDeadlineSeconds"] == 480 + 120
    assert job["spec"]["template"]["spec"]["activeDeadlineSeconds"] == 480 + 15
    seen = observed(an_agentjob(**load.manifest("runs", "gone-at-once")["spec"]))
    assert accept(seen).effective.ttl_seconds_after_finished == 0


@pytest.mark.parametrize(
    ("spec", "template", "queue"),
    [
        pytest.param({}, {}, None, id="none"),
        pytest.param({"queueName": "ours"}, {}, "ours", id="the AgentJob's"),
        pytest.param({}, {"kueue.x-k8s.io/queue-name": "theirs"}, "theirs", id="the template's"),
        pytest.param(
            {"queueName": "ours"}, {"kueue.x-k8s.io/queue-name": "theirs"}, "ours", id="ours wins"
        ),
    ],
)
def test_r_template_the_queue(spec: Json, template: Json, queue: str | None) -> None:
    body = a_template() | {"metadata": {"labels": template}}
    job = built(template=body, **spec)
    assert job["metadata"]["labels"].get("kueue.x-k8s.io/queue-name") == queue
    assert job["spec"].get("suspend") is (True if queue else None)


@pytest.mark.parametrize(
    ("name", "completions", "expected"),
    [
        pytest.param("short", None, "short-1", id="as it is"),
        pytest.param("a" * 61, None, "a" * 61 + "-1", id="just fits"),
        pytest.param("a" * 62, None, "a" * 52 + "-", id="one too long"),
        pytest.param("a" * 58, 10, "a" * 58 + "-1", id="with a digit of an index"),
        pytest.param("a" * 59, 32, "a" * 49 + "-", id="with two digits"),
        pytest.param("a" * 58, 1, "a" * 58 + "-1", id="one index"),
    ],
)
def test_r_attempt_names_leave_room_for_the_index(
    name: str, completions: int | None, expected: str
) -> None:
    spec = {"completionMode": "Indexed", "completions": completions} if completions else {}
    made = job_name(name, 1, {"spec": spec})
    assert made.startswith(expected)
    assert len(made) + (1 + len(str(completions - 1)) if completions else 0) <= 63
    assert made.endswith("-1")


def test_r_attempt_a_cut_name_does_not_end_in_two_hyphens() -> None:
    made = job_name("a" * 51 + "-" * 4 + "b" * 8, 1, {})
    assert "--" not in made


def test_r_claim_the_placeholder_can_never_run() -> None:
    job = placeholder_job(an_agentjob(), "nightly-index-1")
    assert job["spec"]["suspend"] is True
    assert job["spec"]["parallelism"] == 0, "a queue that takes in every Job would resume it"
    assert job["metadata"]["name"] == "nightly-index-1"
    assert job["metadata"]["ownerReferences"][0]["uid"] == "a1b2"
    stored = job | {"metadata": job["metadata"] | {"uid": "j1"}}
    assert JobView.from_json(stored).placeholder


@pytest.mark.parametrize(
    ("name", "single"),
    [
        ("rootless-build", True),
        ("apply-with-lock", True),
        ("image-from-git", False),
        ("load-with-policy", False),
        ("migrate-in-place", False),
        ("worker-queue", False),
    ],
)
def test_r_stop_which_jobs_can_be_ended_through_their_pod(name: str, single: bool) -> None:
    job = run(name)
    spec = {"completions": 1, "parallelism": 1} | job["spec"]
    body = {"metadata": job["metadata"] | {"uid": "j1"}, "spec": spec}
    assert JobView.from_json(body).single is single


def test_the_template_is_never_changed_in_place() -> None:
    template = a_template()
    before = copy.deepcopy(template)
    built(template=template)
    assert template == before
    assert CREATED.tzinfo is not None
