"""Every manifest of tests/jobs on a real API server, through the operator as it is installed."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tests.chart import Document
from tests.cluster import ControlPlane
from tests.cluster.errors import ClusterError
from tests.controlplane.stage import Place, Stage
from tests.jobs import load

pytestmark = pytest.mark.controlplane

NAMESPACE = "manifests"
NEVER_STORED = {"negative-durations"}
ENDED_FIRST = "sealed-backup"
"""Another run waits for its end."""
MOUNT = "/var/run/agentjobs"
APPENDED = {"env", "volumeMounts", "volumes"}
"""Lists that have one of ours, or more, behind their own."""
TAKEN_OVER = {"ttlSecondsAfterFinished", "activeDeadlineSeconds", "suspend"}
BASICS: list[Document] = [
    *(
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": name}}
        for name in ("migrator", "exporter", "applier")
    ),
    {
        "apiVersion": "node.k8s.io/v1",
        "kind": "RuntimeClass",
        "metadata": {"name": "boxed"},
        "handler": "boxed",
    },
    {
        "apiVersion": "scheduling.k8s.io/v1",
        "kind": "PriorityClass",
        "metadata": {"name": "cheap"},
        "value": 5,
    },
]


@pytest.fixture(scope="module")
def place(stage: Stage) -> Iterator[Place]:
    """A namespace with all manifests in it, written by kubectl before its operator starts."""
    place = stage.place(NAMESPACE)
    kubectl(stage.plane, yaml.safe_dump_all(BASICS))
    for kind in ("tools", "runs", "refused"):
        kubectl(
            stage.plane,
            *(
                load.path_of(kind, name).read_text(encoding="utf-8").split("\n---\n")[0]
                for name in load.names(kind)
                if name not in NEVER_STORED
            ),
        )
    stage.operator(place)
    place.until_job(ENDED_FIRST)
    place.stop(ENDED_FIRST)
    yield place
    place.operator.close()


def kubectl(plane: ControlPlane, *documents: str) -> str:
    text = "\n---\n".join(documents)
    return plane.kubectl("create", "--namespace", NAMESPACE, "-f", "-", input_text=text)


def first_job_of(place: Place, name: str) -> Document:
    """The Job of an AgentJob as it was created."""
    uid = place.until_job(name)["metadata"]["uid"]
    return place.record.history(uid)[0]


def differences(given: Any, found: Any, path: str = "") -> Iterator[str]:
    """Where something that was given is not there as it was given. More may be there."""
    if isinstance(given, dict) and isinstance(found, dict):
        for key, value in given.items():
            yield from differences(value, found.get(key), f"{path}.{key}")
    elif isinstance(given, list) and isinstance(found, list):
        more = path.rpartition(".")[2] in APPENDED
        if len(found) < len(given) or (len(found) > len(given) and not more):
            yield f"{path}: {len(given)} items became {len(found)}"
        for index, value in enumerate(given[: len(found)]):
            yield from differences(value, found[index], f"{path}[{index}]")
    elif not same(given, found, path):
        yield f"{path}: {given!r} became {found!r}"


def same(given: Any, found: Any, path: str) -> bool:
    """Equal, but for what the API server writes otherwise: `false` by absence, 2 devices as "2"."""
    if given is False and found is None:
        return True
    return bool((str(given) if ".resources." in path else given) == found)


def kept(template: Document) -> Document:
    """What of a stored template must be in the Job: all but what becomes the AgentJob's."""
    spec = copy.deepcopy(template["spec"])
    for field in TAKEN_OVER:
        spec.pop(field, None)
    pod = spec["template"]
    for metadata in (pod.get("metadata", {}), template.get("metadata", {})):
        for dropped in set(metadata) - {"labels", "annotations"}:
            del metadata[dropped]
    grace = pod["spec"].get("terminationGracePeriodSeconds")
    if grace:
        pod["spec"]["terminationGracePeriodSeconds"] = min(grace, 120)
    return {"metadata": template.get("metadata", {}), "spec": spec}


@pytest.mark.parametrize("name", load.names("runs"))
def test_r_template_what_kubectl_wrote_reaches_the_job(place: Place, name: str) -> None:
    job = first_job_of(place, name)
    template = place.job(name)["spec"]["template"]
    assert list(differences(kept(template), job)) == []
    meta, spec = job["metadata"], job["spec"]
    assert meta["name"].endswith("-1")
    assert len(meta["name"]) <= 63
    assert meta["labels"]["agentjobs.dev/job"] == name
    (owner,) = meta["ownerReferences"]
    assert owner["uid"] == place.uid(name)
    assert "ttlSecondsAfterFinished" not in spec
    assert spec["podReplacementPolicy"] == "Failed"
    given = template["spec"]
    if "backoffLimit" not in given and "backoffLimitPerIndex" not in given:
        assert spec["backoffLimit"] == 0
    assert ("podFailurePolicy" in spec) is ("podFailurePolicy" in given)
    assert ("completions" in spec) is ("parallelism" not in given or "completions" in given)
    mounted = [
        container["name"]
        for container in spec["template"]["spec"]["containers"]
        if any(mount["mountPath"] == MOUNT for mount in container["volumeMounts"])
    ]
    assert len(mounted) == 1
    assert [v["name"] for v in spec["template"]["spec"]["volumes"]].count("agentjobs") == 1


def test_r_template_the_last_shard_has_a_host_name(place: Place) -> None:
    (name,) = [each for each in load.names("runs") if each.startswith("shards")]
    job = first_job_of(place, name)
    assert len(f"{job['metadata']['name']}-31") <= 63


def test_r_template_plain_scalars_are_what_kubectl_reads(place: Place) -> None:
    pod = first_job_of(place, "report-by-hand")["spec"]["template"]["spec"]
    args = "--until 21:45:00 --day 2026-02-28 --tag 2e5x --mask 0o27 --home ~"
    assert pod["initContainers"][0]["args"] == args.split()
    assert pod["volumes"][1]["secret"]["defaultMode"] == 0o400
    render = pod["containers"][0]
    assert render["resources"]["requests"] == {"cpu": "500m", "memory": "128Mi"}
    assert [item["name"] for item in render["env"][:3]] == ["TZ", "QUERY", "HEAD"]


def test_r_deadline_the_status_says_that_a_grace_period_was_cut(place: Place) -> None:
    first_job_of(place, ENDED_FIRST)
    (warning,) = place.status(ENDED_FIRST)["warnings"]
    assert "terminationGracePeriodSeconds 400 was cut" in warning


def test_r_template_a_queue_resumes_its_job_and_nobody_else(place: Place) -> None:
    job = first_job_of(place, "queued-for-gpus")
    assert job["spec"]["suspend"] is True
    place.until_waiting("queued-for-gpus", "kueue")
    assert place.live_job(job["metadata"]["name"])["spec"]["suspend"] is True  # type: ignore[index]


ENDS = {
    "indexed-without-completions": ["spec.template.spec.completions"],
    "restart-always": ["spec.template.spec.template.spec.restartPolicy", "OnFailure", "Never"],
    "mistyped-fields": ["spec.template.spec.activeDeadlineSecs", "gracePeriod", "imagePullpolicy"],
    "numbers-for-strings": ["containers.args"],
    "selector-of-its-own": ["spec.template.spec.manualSelector"],
    "owners-and-finalizers": ["spec.template.metadata.finalizers"],
    "reserved-names": ["spec.template.metadata.labels[agentjobs.dev/job]"],
    "broken-arguments": ["6 faults", "/limit", "/follow", "/headers/X-Id", "/starts/1"],
    "whole-manifest": ["spec.template.apiVersion"],
}


def test_each_refused_manifest_has_its_end() -> None:
    assert {*ENDS, *NEVER_STORED} == set(load.names("refused"))


@pytest.mark.parametrize(("name", "words"), ENDS.items(), ids=ENDS)
def test_r_template_what_is_wrong_ends_at_once(place: Place, name: str, words: list[str]) -> None:
    status = place.until_over(name)
    cause = status["cause"]
    assert (status["state"], cause["code"], cause["ran"]) == ("failed", "invalid_spec", False)
    assert cause["retryable"] is False
    assert not [word for word in words if word not in cause["message"]]
    assert place.conditions(name)["Accepted"] == "False"
    assert place.jobs(name) == []


def negative(**spec: Any) -> Document:
    """The manifest with negative durations, some of them repaired."""
    manifest = load.manifest("refused", "negative-durations")
    manifest["metadata"] = {"name": "repaired"}
    template = manifest["spec"]["template"]
    template["spec"]["activeDeadlineSeconds"] = spec.pop("template", -1)
    manifest["spec"] |= spec
    return manifest


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        pytest.param(
            {},
            ["spec.deadlineSeconds", "spec.pendingDeadlineSeconds"],
            id="all three of ours",
        ),
        pytest.param({"deadlineSeconds": 600}, ["spec.pendingDeadlineSeconds"], id="two of ours"),
        pytest.param(
            {"deadlineSeconds": 600, "pendingDeadlineSeconds": 60},
            ["spec.ttlSecondsAfterFinished"],
            id="one of ours",
        ),
        pytest.param(
            {"deadlineSeconds": 366 * 86400 + 1}, ["spec.deadlineSeconds"], id="more than 366 days"
        ),
    ],
)
def test_r_deadline_durations_out_of_bounds_are_never_stored(
    place: Place, spec: Document, words: list[str]
) -> None:
    with pytest.raises(ClusterError) as error:
        kubectl(place.stage.plane, yaml.safe_dump(negative(**spec)))
    assert not [word for word in words if word not in str(error.value)]


REPAIRED = {"deadlineSeconds": 600, "pendingDeadlineSeconds": 60, "ttlSecondsAfterFinished": 600}


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        pytest.param(-1, ("failed", "invalid_spec"), id="below zero"),
        pytest.param(0, ("timed_out", "deadline_exceeded"), id="zero has passed"),
    ],
)
def test_r_deadline_a_templates_own_deadline(
    place: Place, seconds: int, expected: tuple[str, str]
) -> None:
    body = negative(template=seconds, **REPAIRED)
    name = body["metadata"]["name"] = f"repaired-{abs(seconds)}"
    kubectl(place.stage.plane, yaml.safe_dump(body))
    status = place.until_over(name)
    assert (status["state"], status["cause"]["code"]) == expected
    assert status["cause"]["ran"] is False
    assert ("activeDeadlineSeconds" in status["cause"]["message"]) is (seconds < 0)
    assert place.jobs(name) == []


def with_variable(size: int) -> Document:
    """A template that passes a whole file in one variable."""
    env = [{"name": "INPUT", "value": "x" * size}]
    container = {"name": "sort", "image": "images.example.net/sort:1", "env": env}
    return {"spec": {"template": {"spec": {"containers": [container]}}}}


def test_r_template_two_megabytes_do_not_fit_and_one_does(place: Place) -> None:
    answer = place.try_create("two-megabytes", template=with_variable(2 * 2**20))
    assert answer.code >= 400
    place.create("one-megabyte", template=with_variable(1_300_000))
    job = first_job_of(place, "one-megabyte")
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert len(container["env"][0]["value"]) == 1_300_000


def test_r_attempt_a_name_that_is_no_dns_label_is_never_stored(place: Place) -> None:
    answer = place.try_create("index.2026-q1")
    assert answer.code == 422
    assert "DNS label" in answer.message


def test_r_tool_an_entry_that_asks_people_runs_nothing(place: Place) -> None:
    arguments = load.documents("tools", "table-dump")[1]["valid"][0]["arguments"]
    ref = {"kind": "AgentTool", "name": "table-dump"}
    place.create("unasked", toolRef=ref, arguments=arguments)
    cause = place.until_over("unasked")["cause"]
    assert cause["code"] == "invalid_spec"
    assert "approval" in cause["message"]
    assert place.jobs("unasked") == []


HOSTILE = "$(DB_SECRET) $HOME $$(X) ${arguments.as} `id`\nsecond; rm -rf /x && echo \"%s\" '\\' "


def test_r_args_hostile_text_arrives_as_it_is_and_is_nowhere_run(place: Place) -> None:
    entry = load.manifest("tools", "table-dump")["spec"]
    del entry["approval"]
    place.tool("dump-unasked", **entry)
    source = {"kind": "query", "sql": f"select '{HOSTILE}'"}
    arguments = {
        "source": source,
        "as": "csv",
        "to": {"bucket": "dumps", "prefix": "../$(hostname)"},
        "note": HOSTILE,
    }
    ref = {"kind": "AgentTool", "name": "dump-unasked"}
    place.create("hostile", toolRef=ref, arguments=arguments)
    pod = first_job_of(place, "hostile")["spec"]["template"]
    file = yaml.safe_load(pod["metadata"]["annotations"].pop("agentjobs.dev/arguments"))
    assert file == arguments | {"since": None}
    (container,) = pod["spec"]["containers"]
    env = {item["name"]: item.get("value") for item in container.pop("env")}
    assert env["AGENTJOBS_ARG_NOTE"] == HOSTILE.replace("$", "$$")
    assert env["AGENTJOBS_ARG_AS"] == "csv"
    assert not {"AGENTJOBS_ARG_SOURCE", "AGENTJOBS_ARG_TO"} & set(env)
    assert "rm -rf" not in str(pod)


def test_r_args_names_of_all_scripts_make_a_job_that_is_accepted(place: Place) -> None:
    arguments = load.documents("tools", "note-translator")[1]["valid"][1]["arguments"]
    ref = {"kind": "ClusterAgentTool", "name": "note-translator"}
    place.create("translated", toolRef=ref, arguments=arguments)
    pod = first_job_of(place, "translated")["spec"]["template"]
    file = yaml.safe_load(pod["metadata"]["annotations"]["agentjobs.dev/arguments"])
    assert file == arguments
    env = {item["name"] for item in pod["spec"]["containers"][0]["env"]}
    assert {name for name in env if name.startswith("AGENTJOBS_ARG_")} == {"AGENTJOBS_ARG_TEXT"}
    (warning,) = place.status("translated")["warnings"]
    assert "max-words" in warning


def test_r_template_null_counts_as_absent(place: Place) -> None:
    """The API server's own default of backoffLimit would repeat the tool six times."""
    template = with_variable(1)
    template["spec"]["backoffLimit"] = None
    template["spec"]["template"]["spec"]["restartPolicy"] = None
    place.create("nulls", template=template)
    spec = first_job_of(place, "nulls")["spec"]
    assert spec["backoffLimit"] == 0
    assert spec["template"]["spec"]["restartPolicy"] == "Never"


@pytest.mark.parametrize(
    ("name", "broken"),
    [
        ("labels-in-a-list", {"metadata": {"labels": ["app"]}}),
        ("a-number-of-containers", {"spec": {"template": {"spec": {"containers": 5}}}}),
        (
            "names-in-a-list",
            {
                "spec": {
                    "template": {
                        "spec": {
                            "containers": [{"name": "a", "image": "b", "env": [{"name": ["c"]}]}]
                        }
                    }
                }
            },
        ),
    ],
    ids=["labels in a list", "a number of containers", "a variable's name in a list"],
)
def test_r_template_damaged_templates_end(place: Place, name: str, broken: Document) -> None:
    place.create(name, template=with_variable(1) | broken)
    cause = place.until_over(name)["cause"]
    assert (cause["code"], cause["ran"]) == ("invalid_spec", False)


def test_r_template_a_poisoned_object_disturbs_nobody_after_a_restart(place: Place) -> None:
    place.until_over("numbers-for-strings")
    before = place.job("numbers-for-strings")
    place.operator.terminate()
    place.create("poisoned-meanwhile", **load.manifest("refused", "numbers-for-strings")["spec"])
    place.create("beside-it")
    place.operator.start()
    assert first_job_of(place, "beside-it")
    assert place.until_over("poisoned-meanwhile")["cause"]["code"] == "invalid_spec"
    assert place.job("numbers-for-strings") == before
