"""What of a template is refused, and that it is said where the author looks (R-TEMPLATE)."""

import copy
from typing import Any

import pytest

from agentjobs.api.names import MAX_DURATION_SECONDS
from agentjobs.domain.errors import InvalidSpecError
from agentjobs.domain.plan import CreateJob
from agentjobs.domain.reconcile import decide
from agentjobs.domain.template import read_template
from tests.builders import Json, a_template, a_tool, an_agentjob, at, observed
from tests.domain.situations import told
from tests.jobs import load

POD = "spec.template.spec.template"


def changed(*changes: tuple[str, Any], base: Json | None = None) -> Json:
    """A template with some places set; None as a value removes."""
    template = copy.deepcopy(base) if base else a_template()
    for place, value in changes:
        *way, last = place.split("/")
        owner = template
        for key in way:
            owner = owner[int(key)] if isinstance(owner, list) else owner.setdefault(key, {})
        if value is None:
            owner.pop(last)
        else:
            owner[last] = value
    return template


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("restart-always", [f"{POD}.spec.restartPolicy", "OnFailure", "Never"]),
        ("selector-of-its-own", ["spec.template.spec.manualSelector"]),
        ("owners-and-finalizers", ["spec.template.metadata.finalizers"]),
        ("reserved-names", ["spec.template.metadata.labels[agentjobs.dev/job]"]),
        ("negative-durations", ["spec.template.spec.activeDeadlineSeconds", "-1"]),
        ("whole-manifest", ["spec.template.apiVersion", "metadata and spec"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_r_template_what_we_refuse_ends_at_once(name: str, words: list[str]) -> None:
    template = load.manifest("refused", name)["spec"]["template"]
    plan = decide(observed(an_agentjob(template=template)))
    assert told(plan) == "failed invalid_spec unstarted"
    status = plan.status
    assert status is not None
    assert status.cause is not None
    assert not status.cause.retryable
    assert not [word for word in words if word not in status.cause.message]
    (accepted,) = [c for c in status.conditions if c.type == "Accepted"]
    assert (accepted.status, accepted.message) == ("False", status.cause.message)


@pytest.mark.parametrize(
    ("template", "field"),
    [
        pytest.param(None, "spec.template", id="nothing"),
        pytest.param([], "spec.template", id="a list"),
        pytest.param({}, "spec.template.spec", id="no spec"),
        pytest.param({"spec": {}}, f"{POD}", id="no pod template"),
        pytest.param({"spec": {"template": {}}}, f"{POD}.spec", id="no pod spec"),
        pytest.param(a_template() | {"status": {}}, "spec.template.status", id="a status"),
        pytest.param(
            a_template() | {"kind": "Job", "apiVersion": "batch/v1"},
            "spec.template.kind",
            id="a whole Job, otherwise good",
        ),
        *[
            pytest.param(
                changed((f"{prefix}metadata/{field}", value)),
                f"spec.template.{prefix.replace('/', '.')}metadata.{field}",
                id=f"{field} of the {'pod' if prefix else 'Job'}",
            )
            for prefix in ("", "spec/template/")
            for field, value in (
                ("finalizers", ["example.net/stay"]),
                ("ownerReferences", [{"kind": "Node"}]),
                ("namespace", "elsewhere"),
                ("labels", ["app"]),
                ("labels", "app"),
                ("annotations", 5),
            )
            if (field, value) != ("labels", "app")
        ],
        *[
            pytest.param(
                changed((f"{prefix}metadata/{field}", {"agentjobs.dev/x": "1"})),
                f"metadata.{field}[agentjobs.dev/x]",
                id=f"a reserved name among {field} of the {'pod' if prefix else 'Job'}",
            )
            for prefix in ("", "spec/template/")
            for field in ("labels", "annotations")
        ],
        pytest.param(
            changed(("spec/selector", {"matchLabels": {}})),
            "spec.template.spec.selector",
            id="a selector alone",
        ),
        pytest.param(
            changed(("spec/template/spec/containers/0/restartPolicy", "Always")),
            f"{POD}.spec.containers[main].restartPolicy",
            id="one container that never ends",
        ),
        pytest.param(
            changed(("spec/template/spec/volumes", [{"name": "agentjobs", "emptyDir": {}}])),
            f"{POD}.spec.volumes[agentjobs]",
            id="a volume of our name",
        ),
        *[
            pytest.param(
                changed((f"spec/{field}", value)),
                f"spec.template.spec.{field}",
                id=f"{field} {value!r}",
            )
            for field, value in (
                ("activeDeadlineSeconds", -1),
                ("activeDeadlineSeconds", "600"),
                ("activeDeadlineSeconds", 1.5),
                ("activeDeadlineSeconds", True),
                ("activeDeadlineSeconds", MAX_DURATION_SECONDS + 1),
                ("ttlSecondsAfterFinished", -1),
                ("ttlSecondsAfterFinished", MAX_DURATION_SECONDS + 1),
                ("suspend", "yes"),
            )
        ],
    ],
)
def test_r_template_each_refusal_names_its_field(template: Any, field: str) -> None:
    with pytest.raises(InvalidSpecError) as error:
        read_template(template, namespace="search")
    assert field in str(error.value)


@pytest.mark.parametrize(
    "template",
    [
        pytest.param(changed(("spec/manualSelector", False)), id="no selector of its own"),
        pytest.param(changed(("metadata/namespace", "search")), id="the same namespace"),
        pytest.param(changed(("metadata/finalizers", [])), id="an empty list"),
        pytest.param(
            changed(
                (
                    "spec/template/spec/initContainers",
                    [{"name": "db", "restartPolicy": "Always"}],
                )
            ),
            id="a sidecar among the init containers",
        ),
        pytest.param(
            changed(("metadata/labels", {"agentjobs.devices.example.net/a": "b"})),
            id="a domain that only looks like ours",
        ),
        pytest.param(changed(("spec/activeDeadlineSeconds", MAX_DURATION_SECONDS)), id="366 days"),
    ],
)
def test_r_template_what_is_harmless_passes(template: Json) -> None:
    assert read_template(template, namespace="search").body == template


def test_r_template_a_cluster_wide_tool_can_name_no_namespace() -> None:
    with pytest.raises(InvalidSpecError, match=r"metadata\.namespace"):
        read_template(changed(("metadata/namespace", "search")), namespace="")


def test_r_template_what_was_hostile_is_run_without_it() -> None:
    """Labels and annotations of both metadata are carried, nothing else."""
    base = load.manifest("refused", "owners-and-finalizers")["spec"]["template"]
    cleaned = changed(
        ("metadata/finalizers", None),
        ("metadata/ownerReferences", None),
        ("spec/template/metadata/finalizers", None),
        ("spec/template/metadata/ownerReferences", None),
        base=base,
    )
    (action,) = decide(observed(an_agentjob(template=cleaned))).actions
    assert isinstance(action, CreateJob)
    meta = action.body["metadata"]
    assert meta["name"] == "nightly-index-1"
    assert meta["labels"] == {"app": "thumbs", "agentjobs.dev/job": "nightly-index"}
    assert meta["annotations"] == {"example.net/contact": "media", "agentjobs.dev/attempt": "1"}
    assert {"uid", "resourceVersion", "generation", "creationTimestamp"}.isdisjoint(meta)
    (owner,) = meta["ownerReferences"]
    assert (owner["kind"], owner["uid"]) == ("AgentJob", "a1b2")
    assert owner["controller"] is owner["blockOwnerDeletion"] is True
    assert "finalizers" not in meta
    pod = action.body["spec"]["template"]["metadata"]
    assert pod == {"labels": {"app": "thumbs", "agentjobs.dev/job": "nightly-index"}}


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (("spec/backoffLimit", 1), "backoffLimit"),
        (("spec/backoffLimitPerIndex", 0), "backoffLimitPerIndex"),
        (("spec/podFailurePolicy", {"rules": []}), "podFailurePolicy"),
        (("spec/template/spec/restartPolicy", "OnFailure"), "OnFailure"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_r_attempt_retry_beside_the_authors_own_repetitions_is_refused(
    change: tuple[str, Any], word: str
) -> None:
    retry = {"maxAttempts": 2, "causes": ["disruption"]}
    plan = decide(observed(an_agentjob(template=changed(change), retry=retry)))
    assert told(plan) == "failed invalid_spec unstarted"
    assert plan.status is not None
    assert plan.status.cause is not None
    assert "retry" in plan.status.cause.message
    assert word in plan.status.cause.message
    alone = decide(observed(an_agentjob(template=changed(change))))
    assert told(alone) == "queued (creating) | CreateJob"


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [
        pytest.param(900, 2400, 900, id="ours is earlier"),
        pytest.param(3000, 480, 480, id="theirs is earlier"),
        pytest.param(None, 480, 480, id="theirs alone"),
        pytest.param(900, None, 900, id="ours alone"),
        pytest.param(None, None, 3600, id="neither: the platform's"),
    ],
)
def test_r_deadline_the_earlier_one_wins(
    ours: int | None, theirs: int | None, expected: int
) -> None:
    template = changed(*([("spec/activeDeadlineSeconds", theirs)] if theirs else []))
    spec = {"deadlineSeconds": ours} if ours else {}
    status = decide(observed(an_agentjob(template=template, **spec))).status
    assert status is not None
    assert status.deadline_at == at(expected)


def test_r_deadline_a_deadline_of_zero_has_passed() -> None:
    template = changed(("spec/activeDeadlineSeconds", 0))
    plan = decide(observed(an_agentjob(template=template)))
    assert told(plan) == "timed_out deadline_exceeded unstarted"


def test_r_template_what_is_refused_is_cancelled_if_it_was_stopped_before() -> None:
    job = an_agentjob(template={"kind": "Job"}, stop={})
    assert told(decide(observed(job))) == "cancelled stopped unstarted"


def test_r_args_bad_arguments_end_before_any_job_is_made() -> None:
    spec = load.manifest("refused", "broken-arguments")["spec"]
    entry = load.manifest("tools", "site-snapshot")["spec"]
    tool = a_tool(name="site-snapshot", **entry)
    plan = decide(observed(an_agentjob(**spec), tool=tool))
    assert told(plan) == "failed invalid_spec unstarted"
    assert plan.status is not None
    assert plan.status.cause is not None
    assert "/limit" in plan.status.cause.message


def nested(depth: int, *, listed: bool = False) -> Json:
    value: Any = 1
    for _ in range(depth):
        value = [value] if listed else {"a": value}
    return {"a": value}


@pytest.mark.parametrize("listed", [True, False], ids=["lists", "objects"])
@pytest.mark.parametrize("depth", [100, 900], ids=str)
def test_r_template_what_is_nested_too_deeply_ends(depth: int, *, listed: bool) -> None:
    ref = {"name": "indexer"}
    deep = nested(depth, listed=listed)
    for job, tool in (
        (an_agentjob(template=a_template() | {"metadata": deep}), None),
        (an_agentjob(toolRef=ref, arguments=deep), a_tool(inputSchema={})),
        (an_agentjob(toolRef=ref), a_tool(inputSchema=deep)),
    ):
        plan = decide(observed(job, tool=tool))
        assert told(plan) == "failed invalid_spec unstarted"
        assert plan.status is not None
        assert plan.status.cause is not None
        assert "levels deep" in plan.status.cause.message


def test_r_args_arguments_as_deep_as_anybody_writes_them_are_taken() -> None:
    job = an_agentjob(toolRef={"name": "indexer"}, arguments=nested(98))
    plan = decide(observed(job, tool=a_tool(inputSchema={})))
    assert told(plan) == "queued (creating) | CreateJob"
