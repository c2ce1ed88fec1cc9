"""What is generated is what it should be; the chart renders; the examples are valid."""

import json
import re
import shutil
from itertools import pairwise
from pathlib import Path

import jsonschema_rs
import pytest
import yaml

from agentjobs import __version__
from agentjobs.api.schema import RESOURCES, crd
from agentjobs.generate import CHART as CHART_PATH
from agentjobs.generate import INSTALL, check, crd_files, crd_template, install_file, main, write
from agentjobs.settings import Settings
from tests.chart import (
    CHART,
    NAMESPACE,
    ROOT,
    SERVES_DEFAULTS,
    Document,
    RefusedError,
    only,
    render,
    render_text,
)

MODELS = {resource.kind: resource.model for resource in RESOURCES}
EXAMPLES = sorted((ROOT / "manifests/examples").glob("*.yaml"))
VALUES: Document = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
SCHEMA: Document = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
UNSERVED = "admissionregistration.k8s.io/v1/MutatingAdmissionPolicy"


def test_what_comes_from_the_models_is_up_to_date() -> None:
    assert check(ROOT, crd_files())


def test_the_install_manifest_is_up_to_date(helm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HELM", str(helm))
    assert check(ROOT, {INSTALL: install_file(ROOT)})


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of what the generator reads and writes, where no helm is asked for."""
    monkeypatch.delenv("CI", raising=False)
    shutil.copytree(CHART, tmp_path / CHART_PATH)
    write(tmp_path, crd_files())
    return tmp_path


def test_a_stale_file_is_named_with_the_command_to_run(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HELM", "no-such-helm")
    assert main(["--check"], checkout) == 0
    (checkout / "crds/agentjobs.dev_agentjobs.yaml").write_text("{}", encoding="utf-8")
    assert main(["--check"], checkout) == 1
    said = capsys.readouterr().err
    assert "crds/agentjobs.dev_agentjobs.yaml is stale" in said
    assert "python -m agentjobs.generate" in said
    assert main([], checkout) == 0
    assert main(["--check"], checkout) == 0


def test_a_missing_helm_fails_only_where_it_is_required(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HELM", "no-such-helm")
    assert main(["--check"], checkout) == 0
    assert "manifests/install.yaml was left alone: no helm" in capsys.readouterr().err
    assert main(["--check", "--require-helm"], checkout) == 1
    monkeypatch.setenv("CI", "true")
    assert main(["--check"], checkout) == 1


def test_braces_in_a_description_survive_the_chart(
    helm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Helm must not take a description for a template."""
    odd = crd(RESOURCES[0])
    odd["spec"]["names"]["singular"] = "{{ .Odd }}"
    monkeypatch.setattr("agentjobs.generate.crd", lambda _: odd)
    shutil.copytree(CHART, tmp_path / "chart")
    template = tmp_path / "chart/templates/crds/agentjobs.yaml"
    template.write_text(crd_template(RESOURCES[0]), encoding="utf-8")
    rendered = render(helm, chart=tmp_path / "chart")
    found = only(rendered, "CustomResourceDefinition", RESOURCES[0].crd_name)
    assert found["spec"] == odd["spec"]


# The chart


def test_the_charts_definitions_are_the_generated_ones(helm: Path) -> None:
    rendered = render(helm)
    for resource in RESOURCES:
        found = only(rendered, "CustomResourceDefinition", resource.crd_name)
        assert found["spec"] == crd(resource)["spec"]
        assert found["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}


def test_definitions_can_go_with_the_release_or_be_left_out(helm: Path) -> None:
    going = only(
        render(helm, "--set=crds.keep=false"), "CustomResourceDefinition", "agentjobs.agentjobs.dev"
    )
    assert "annotations" not in going["metadata"]
    kinds = {document["kind"] for document in render(helm, "--set=crds.enabled=false")}
    assert "CustomResourceDefinition" not in kinds


def test_the_chart_has_the_version_of_the_package() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
    assert (chart["version"], chart["appVersion"]) == (__version__, __version__)


def container(helm: Path, *arguments: str) -> Document:
    deployment = only(render(helm, *arguments), "Deployment")
    (found,) = deployment["spec"]["template"]["spec"]["containers"]
    assert isinstance(found, dict)
    return found


def environment(helm: Path, *arguments: str) -> dict[str, str]:
    return {item["name"]: item.get("value", "") for item in container(helm, *arguments)["env"]}


def test_the_operator_understands_its_environment(helm: Path) -> None:
    """Defaults of the chart are the operator's own."""
    given = environment(helm)
    given["AGENTJOBS_NAMESPACE"] = NAMESPACE
    read, own = Settings.from_environment(given), Settings.from_environment({})
    assert read == own


SETTINGS = [
    ("operator.logLevel=debug", "AGENTJOBS_LOG_LEVEL", "debug"),
    ("operator.logFormat=text", "AGENTJOBS_LOG_FORMAT", "text"),
    ("operator.defaultDeadlineSeconds=1800000", "AGENTJOBS_DEFAULT_DEADLINE_SECONDS", "1800000"),
    ("operator.defaultTTLSeconds=60", "AGENTJOBS_DEFAULT_TTL_SECONDS", "60"),
    ("operator.maxArgumentsBytes=65536", "AGENTJOBS_MAX_ARGUMENTS_BYTES", "65536"),
    ("operator.graceCeilingSeconds=30", "AGENTJOBS_GRACE_CEILING_SECONDS", "30"),
]


def test_values_reach_the_operator(helm: Path) -> None:
    given = environment(helm, *(f"--set={value}" for value, *_ in SETTINGS))
    for _, name, expected in SETTINGS:
        assert given[name] == expected


POD = [
    ("operator.replicas=2", ("replicas",), 2),
    ("operator.nodeSelector.disk=ssd", ("template", "spec", "nodeSelector"), {"disk": "ssd"}),
    ("operator.priorityClassName=high", ("template", "spec", "priorityClassName"), "high"),
    ("operator.tolerations[0].key=k", ("template", "spec", "tolerations"), [{"key": "k"}]),
    ("imagePullSecrets[0].name=s", ("template", "spec", "imagePullSecrets"), [{"name": "s"}]),
    ("operator.podLabels.team=a", ("template", "metadata", "labels", "team"), "a"),
    ("operator.podAnnotations.note=a", ("template", "metadata", "annotations", "note"), "a"),
    (
        "operator.affinity.podAffinity.x=y",
        ("template", "spec", "affinity"),
        {"podAffinity": {"x": "y"}},
    ),
]


def test_values_reach_the_pod(helm: Path) -> None:
    deployment = only(render(helm, *(f"--set={value}" for value, *_ in POD)), "Deployment")
    for value, path, expected in POD:
        found = deployment["spec"]
        for step in path:
            found = found[step]
        assert found == expected, value


def test_values_of_the_container(helm: Path) -> None:
    digest = "sha256:" + "0" * 64
    given = container(
        helm,
        f"--set=image.digest={digest},image.repository=here/agentjobs,image.pullPolicy=Never",
        "--set=operator.resources.limits.memory=1Gi,operator.extraEnv[0].name=A",
    )
    assert given["image"] == f"here/agentjobs@{digest}"
    assert given["imagePullPolicy"] == "Never"
    assert given["resources"]["limits"]["memory"] == "1Gi"
    assert {"name": "A"} in given["env"]
    assert container(helm, "--set=image.tag=t")["image"] == "agentjobs:t"


def test_the_pod_is_restricted(helm: Path) -> None:
    pod = only(render(helm), "Deployment")["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] == 65532
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for one in pod["containers"]:
        assert one["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert one["resources"]["requests"]
        assert one["resources"]["limits"]["memory"]


def test_probes_and_metrics_share_a_port(helm: Path) -> None:
    given = container(helm)
    assert given["ports"] == [{"name": "http-metrics", "containerPort": 9090}]
    assert given["livenessProbe"]["httpGet"] == {"path": "/healthz", "port": "http-metrics"}
    assert given["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": "http-metrics"}
    service = only(render(helm), "Service", "agentjobs-operator")
    (port,) = service["spec"]["ports"]
    assert (port["port"], port["targetPort"]) == (9090, "http-metrics")


def test_the_service_selects_the_pods(helm: Path) -> None:
    rendered = render(helm)
    labels = only(rendered, "Deployment")["spec"]["template"]["metadata"]["labels"]
    selectors = (
        only(rendered, "Service")["spec"]["selector"],
        only(rendered, "Deployment")["spec"]["selector"]["matchLabels"],
    )
    for selector in selectors:
        assert selector.items() <= labels.items()
        # What changes from version to version cannot be in a selector.
        assert not any("version" in key or "chart" in key for key in selector)


def test_names_follow_the_release(helm: Path) -> None:
    assert only(render(helm), "Deployment")["metadata"]["name"] == "agentjobs-operator"
    named = render(helm, release="blue")
    assert only(named, "Deployment")["metadata"]["name"] == "blue-agentjobs-operator"
    assert "'system:serviceaccount:agentjobs-system:blue-agentjobs-gateway'" in str(named)
    given = render(helm, "--set=fullnameOverride=jobs")
    assert only(given, "Deployment")["metadata"]["name"] == "jobs-operator"


def rules(documents: list[Document], kind: str, name: str) -> set[tuple[str, str, str]]:
    """(group, resource, verb) of everything that a role allows."""
    return {
        (group, resource, verb)
        for rule in only(documents, kind, name)["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def test_the_operator_has_no_right_that_it_should_not_have(helm: Path) -> None:
    rendered = render(helm)
    allowed = rules(rendered, "ClusterRole", "agentjobs-operator")
    assert not any("*" in part for right in allowed for part in right)
    resources = {resource for _, resource, _ in allowed}
    assert not resources & {"secrets", "configmaps", "namespaces", "serviceaccounts"}
    assert {verb for _, name, verb in allowed if name == "nodes"} <= {"get", "list", "watch"}
    assert ("", "pods", "create") not in allowed
    assert ("agentjobs.dev", "agentjobs", "create") not in allowed
    assert not any(
        verb in {"use", "approve", "escalate", "bind", "impersonate"} for *_, verb in allowed
    )
    for rule in only(rendered, "Role", "agentjobs-operator")["rules"]:
        assert set(rule["resources"]) <= {"leases", "secrets", "configmaps"}
        # RBAC cannot bind "create" to a name; everything else is bound to one.
        assert rule["verbs"] == ["create"] or rule["resourceNames"]


def test_users_are_not_given_what_is_handed_out_by_name(helm: Path) -> None:
    rendered = render(helm)
    edit = rules(rendered, "ClusterRole", "agentjobs-edit")
    view = rules(rendered, "ClusterRole", "agentjobs-view")
    for *_, verb in edit | view:
        assert verb not in {"use", "approve"}
    assert {verb for *_, verb in view} == {"get", "list", "watch"}
    for status in ("agentjobs/status", "agenttools/status"):
        assert not any(resource == status for _, resource, _ in edit)
    none = render(helm, "--set=rbac.aggregate=false")
    assert "agentjobs-edit" not in [document["metadata"]["name"] for document in none]


def test_every_policy_is_in_force(helm: Path) -> None:
    rendered = render(helm, *SERVES_DEFAULTS)
    for kind in ("ValidatingAdmissionPolicy", "MutatingAdmissionPolicy"):
        names = {d["metadata"]["name"] for d in rendered if d["kind"] == kind}
        bound = {d["spec"]["policyName"] for d in rendered if d["kind"] == f"{kind}Binding"}
        assert names
        assert names == bound


@pytest.mark.parametrize(
    ("arguments", "there"),
    [
        pytest.param(SERVES_DEFAULTS, True, id="a cluster that serves it"),
        pytest.param((f"--api-versions={UNSERVED}", "--kube-version=1.34.0"), False, id="1.34"),
        pytest.param(("--kube-version=1.36.0",), False, id="switched off in the cluster"),
        pytest.param((*SERVES_DEFAULTS, "--set=policies.defaults=never"), False, id="not wanted"),
    ],
)
def test_defaults_are_filled_in_where_the_cluster_can(
    helm: Path, arguments: tuple[str, ...], there: bool
) -> None:
    kinds = {document["kind"] for document in render(helm, *arguments)}
    assert ("MutatingAdmissionPolicy" in kinds) == there


MISSPELT = [
    "operator.replica=2",
    "operators.replicas=2",
    "operator.resources.limit.memory=1Gi",
    "image.tagg=1",
    "crds.keeps=false",
    "gateway.allowTemplate=true",
    "operator.logLevel=loud",
    "operator.defaultDeadlineSeconds=0",
    "operator.maxArgumentsBytes=65537",
    "image.digest=latest",
]


@pytest.mark.parametrize("value", MISSPELT)
def test_a_misspelt_or_impossible_value_is_not_in_the_schema(value: str) -> None:
    path, _, text = value.partition("=")
    given: object = yaml.safe_load(text)
    for step in reversed(path.split(".")):
        given = {step: given}
    assert not jsonschema_rs.is_valid(SCHEMA, given)


def test_the_default_values_are_in_the_schema() -> None:
    assert jsonschema_rs.is_valid(SCHEMA, VALUES)


def test_helm_refuses_a_misspelt_value(helm: Path) -> None:
    with pytest.raises(RefusedError, match="replica"):
        render(helm, "--set=operator.replica=2")


def test_global_values_are_let_through(helm: Path) -> None:
    render(helm, "--set=global.anything=x")


def test_old_clusters_are_refused(helm: Path) -> None:
    with pytest.raises(RefusedError, match=re.escape("1.34")):
        render(helm, "--kube-version=1.33.0")


def leaves(values: Document, path: tuple[str, ...] = ()) -> set[tuple[str, ...]]:
    found: set[tuple[str, ...]] = set()
    for key, value in values.items():
        here = (*path, key)
        found |= leaves(value, here) if isinstance(value, dict) and value else {here}
    return found


def test_every_value_is_in_the_schema_and_read_by_a_template() -> None:
    files = [path for path in (CHART / "templates").rglob("*") if path.is_file()]
    templates = "".join(path.read_text(encoding="utf-8") for path in files)
    for path in leaves(VALUES):
        # Below this depth (resources) a template writes the whole value.
        assert ".".join((".Values", *path[:2])) in templates, path
    assert set(SCHEMA["properties"]) == {*VALUES, "global"}
    for name, node in SCHEMA["properties"].items():
        if "properties" in node:
            assert set(node["properties"]) == set(VALUES[name]), name


def test_every_value_is_explained() -> None:
    lines = (CHART / "values.yaml").read_text(encoding="utf-8").splitlines()
    for before, line in pairwise(lines):
        if re.match(r"^ *[a-zA-Z]+: *\S", line):
            assert before.lstrip().startswith("#"), line


def test_the_readme_names_every_value() -> None:
    text = (CHART / "README.md").read_text(encoding="utf-8")
    for path in leaves(VALUES):
        assert f"`{'.'.join(path[:2])}`" in text or f"`.{path[1]}`" in text, path


def test_notes_say_the_next_command(helm: Path) -> None:
    del helm
    notes = (CHART / "templates/NOTES.txt").read_text(encoding="utf-8")
    assert "rollout status deployment/" in notes
    assert "verbs: [use]" in notes


def test_no_key_material_is_rendered(helm: Path) -> None:
    text = render_text(helm, *SERVES_DEFAULTS)
    assert "kind: Secret" not in text
    assert render_text(helm, *SERVES_DEFAULTS) == text


# The examples


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_an_example_is_what_the_models_say(file: Path) -> None:
    """Reading and writing it again loses nothing: no field is misspelt."""
    text = file.read_text(encoding="utf-8")
    assert text.startswith("# ")
    for document in yaml.safe_load_all(text):
        model = MODELS.get(document["kind"])
        if model is None:
            assert document["apiVersion"].startswith("rbac.authorization.k8s.io/")
            continue
        meta = {**document["metadata"], "creationTimestamp": "2026-01-01T00:00:00Z"}
        read = model.from_json({**document, "metadata": meta}).to_json()
        assert contains(read["spec"], document["spec"]), file


def contains(whole: object, part: object) -> bool:
    if isinstance(part, dict) and isinstance(whole, dict):
        return all(key in whole and contains(whole[key], part[key]) for key in part)
    return whole == part


def test_there_is_an_example_for_each_kind_that_people_write() -> None:
    kinds = {
        document["kind"]
        for file in EXAMPLES
        for document in yaml.safe_load_all(file.read_text(encoding="utf-8"))
    }
    assert kinds >= {"AgentJob", "AgentTool", "ClusterAgentTool"}
