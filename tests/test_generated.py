"""What is generated is what it should be; the chart renders; the examples are valid."""

import json
import re
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import yaml

from agentjobs import __version__
from agentjobs.api.schema import RESOURCES, crd
from agentjobs.contract.operations import REPORT_OUTPUT
from agentjobs.generate import CHART as CHART_PATH
from agentjobs.generate import INSTALL, check, crd_files, crd_template, install_file, main, write
from agentjobs.settings import GatewaySettings, Settings, SettingsError
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
    rights,
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


COMPONENTS = ("operator", "gateway")


def deployment(documents: list[Document], component: str) -> Document:
    return only(documents, "Deployment", f"agentjobs-{component}")


def pod(documents: list[Document], component: str) -> Document:
    found: Document = deployment(documents, component)["spec"]["template"]["spec"]
    return found


def container(helm: Path, component: str, *arguments: str) -> Document:
    (found,) = pod(render(helm, *arguments), component)["containers"]
    assert isinstance(found, dict)
    return found


def environment(helm: Path, component: str, *arguments: str) -> dict[str, str]:
    given = container(helm, component, *arguments)["env"]
    return {item["name"]: item.get("value", "") for item in given}


GATEWAY_URL = "http://agentjobs-gateway.agentjobs-system.svc:8080"


@pytest.mark.parametrize(
    ("component", "settings", "own"),
    [
        pytest.param("operator", Settings, {"AGENTJOBS_GATEWAY_URL": GATEWAY_URL}, id="operator"),
        pytest.param("gateway", GatewaySettings, {}, id="gateway"),
    ],
)
def test_a_program_understands_its_environment(
    helm: Path,
    component: str,
    settings: type[Settings | GatewaySettings],
    own: dict[str, str],
) -> None:
    """Defaults of the chart are the program's own, but for what only the chart can know."""
    given = environment(helm, component)
    assert container(helm, component)["args"] == [component]
    given["AGENTJOBS_NAMESPACE"] = NAMESPACE
    assert settings.from_environment(given) == settings.from_environment(own)


ALLOW = '[{"cidrs": ["10.9.0.0/16"], "ports": [443]}]'
SETTINGS = [
    ("operator.logLevel=debug", "operator", "LOG_LEVEL", "debug"),
    ("operator.logFormat=text", "operator", "LOG_FORMAT", "text"),
    ("operator.defaultDeadlineSeconds=1800000", "operator", "DEFAULT_DEADLINE_SECONDS", "1800000"),
    ("operator.defaultDeadlineSeconds=1800000", "gateway", "DEFAULT_DEADLINE_SECONDS", "1800000"),
    ("operator.defaultTTLSeconds=60", "operator", "DEFAULT_TTL_SECONDS", "60"),
    ("operator.maxArgumentsBytes=65536", "operator", "MAX_ARGUMENTS_BYTES", "65536"),
    ("operator.maxArgumentsBytes=65536", "gateway", "MAX_ARGUMENTS_BYTES", "65536"),
    ("operator.graceCeilingSeconds=30", "operator", "GRACE_CEILING_SECONDS", "30"),
    ("gateway.url=https://jobs.example.com", "operator", "GATEWAY_URL", "https://jobs.example.com"),
    ("gateway.logLevel=warning", "gateway", "LOG_LEVEL", "warning"),
    ("gateway.logFormat=text", "gateway", "LOG_FORMAT", "text"),
    ("gateway.defaultTTLSeconds=31622400", "gateway", "DEFAULT_TTL_SECONDS", "31622400"),
    ("gateway.allowTemplates=true", "gateway", "ALLOW_TEMPLATES", "true"),
    ("gateway.acceptUserTokens=true", "gateway", "ACCEPT_USER_TOKENS", "true"),
    ("gateway.tls.secretName=t", "gateway", "TLS_CERTIFICATE", "/etc/agentjobs/tls/tls.crt"),
    ("gateway.tls.secretName=t", "gateway", "TLS_KEY", "/etc/agentjobs/tls/tls.key"),
]


def test_values_reach_the_programs(helm: Path) -> None:
    values = [f"--set={value}" for value, *_ in SETTINGS]
    given = {component: environment(helm, component, *values) for component in COMPONENTS}
    for value, component, name, expected in SETTINGS:
        assert given[component][f"AGENTJOBS_{name}"] == expected, value


@pytest.mark.parametrize("component", COMPONENTS)
def test_both_programs_know_where_events_may_go(helm: Path, component: str) -> None:
    """R-CALLBACK: the gateway refuses what the operator would not send."""
    given = environment(helm, component, f"--set-json=callbacks.allow={ALLOW}")
    assert json.loads(given["AGENTJOBS_CALLBACKS_ALLOW"]) == json.loads(ALLOW)
    assert "AGENTJOBS_CALLBACKS_ALLOW" not in environment(helm, component)
    denied = environment(helm, component, '--set-json=callbacks.deny=["10.1.0.0/16", "fd01::/64"]')
    assert denied["AGENTJOBS_CALLBACKS_DENY"] == "10.1.0.0/16,fd01::/64"


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        pytest.param([], GATEWAY_URL, id="its Service"),
        pytest.param(
            ["--set=gateway.tls.secretName=t"],
            GATEWAY_URL.replace("http:", "https:"),
            id="its Service over TLS",
        ),
        pytest.param(
            ["--set=gateway.tls.secretName=t,gateway.url=http://a:1"], "http://a:1", id="as given"
        ),
    ],
)
def test_events_lead_to_the_gateway(helm: Path, values: list[str], expected: str) -> None:
    """R-EVENT: the operator writes result_url, so it must know where agents reach the gateway."""
    assert environment(helm, "operator", *values)["AGENTJOBS_GATEWAY_URL"] == expected


def claim(helm: Path, *values: str) -> Document:
    return only(render(helm, *values), "PersistentVolumeClaim", "agentjobs-output")


VOLUME = "--set=output.persistence.enabled=true"
ONE_EACH = "--set=operator.replicas=1,gateway.replicas=1"
MANY = "--set=output.persistence.accessModes={ReadWriteMany}"


@pytest.mark.parametrize("component", COMPONENTS)
def test_r_output_is_kept_nowhere_unless_the_chart_is_told_where(
    helm: Path, component: str
) -> None:
    """A cluster without a default StorageClass would never start pods that wait for a volume."""
    assert "AGENTJOBS_OUTPUT_STORE" not in environment(helm, component)
    assert "PersistentVolumeClaim" not in {each["kind"] for each in render(helm)}


@pytest.mark.parametrize("component", COMPONENTS)
def test_r_output_is_kept_in_a_store_by_its_url(helm: Path, component: str) -> None:
    """Its credentials come from a Secret, as the clouds' own variables."""
    values = "--set=output.url=s3://bucket/prefix,output.secretName=output"
    assert environment(helm, component, values)["AGENTJOBS_OUTPUT_STORE"] == "s3://bucket/prefix"
    given = container(helm, component, values, "--set=gateway.replicas=3,operator.replicas=2")
    assert given["envFrom"] == [{"secretRef": {"name": "output"}}]
    assert "envFrom" not in container(helm, component)


@pytest.mark.parametrize("component", COMPONENTS)
def test_r_output_is_kept_on_a_volume_that_both_programs_share(helm: Path, component: str) -> None:
    values = (VOLUME, ONE_EACH)
    store = environment(helm, component, *values)["AGENTJOBS_OUTPUT_STORE"]
    given = container(helm, component, *values)
    (mount,) = [each for each in given["volumeMounts"] if each["name"] == "output"]
    assert store == f"file://{mount['mountPath']}"
    found = pod(render(helm, *values), component)
    (volume,) = [each for each in found["volumes"] if each["name"] == "output"]
    assert volume["persistentVolumeClaim"] == {"claimName": "agentjobs-output"}


def test_r_ttl_how_long_pods_stay_after_the_archive_is_a_value(helm: Path) -> None:
    name = "AGENTJOBS_POD_RETENTION_SECONDS"
    assert environment(helm, "operator")[name] == "600"
    assert environment(helm, "operator", "--set=output.podRetentionSeconds=0")[name] == "0"


def test_r_report_how_much_a_pod_may_hand_in(helm: Path) -> None:
    name = "AGENTJOBS_MAX_REPORTED_OUTPUT_BYTES"
    assert environment(helm, "gateway")[name] == "67108864"
    assert environment(helm, "gateway", "--set=output.maxReportedBytes=0")[name] == "0"


def test_r_report_all_that_a_pod_may_hand_in_has_an_offset(helm: Path) -> None:
    name = "AGENTJOBS_MAX_REPORTED_OUTPUT_BYTES"
    most = SCHEMA["properties"]["output"]["properties"]["maxReportedBytes"]["maximum"]
    (offset,) = [each for each in REPORT_OUTPUT.parameters if each.name == "offset"]
    assert environment(helm, "gateway", f"--set=output.maxReportedBytes={most}")[name] == str(most)
    assert GatewaySettings.from_environment({name: str(most)}).max_reported_output_bytes == most
    assert offset.adapter.validate_python(str(most)) == most
    with pytest.raises(SettingsError):
        GatewaySettings.from_environment({name: str(most + 1)})
    with pytest.raises(ValueError, match="less than or equal"):
        offset.adapter.validate_python(str(most + 1))


def test_r_output_the_claim_is_made_as_it_is_wanted_and_outlives_the_release(helm: Path) -> None:
    made = claim(helm, VOLUME, ONE_EACH)
    assert made["spec"] == {
        "accessModes": ["ReadWriteOnce"],
        "resources": {"requests": {"storage": "10Gi"}},
    }
    assert made["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    wanted = "--set=output.persistence.storageClassName=fast,output.persistence.size=1Ti"
    assert claim(helm, VOLUME, MANY, wanted)["spec"] == {
        "accessModes": ["ReadWriteMany"],
        "storageClassName": "fast",
        "resources": {"requests": {"storage": "1Ti"}},
    }
    there = render(helm, VOLUME, ONE_EACH, "--set=output.persistence.existingClaim=mine")
    assert "PersistentVolumeClaim" not in {each["kind"] for each in there}
    for component in COMPONENTS:
        assert {"claimName": "mine"} in [
            each.get("persistentVolumeClaim") for each in pod(there, component)["volumes"]
        ]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        pytest.param(["operator.replicas=2,gateway.replicas=1"], "operator.replicas is 2", id="op"),
        pytest.param(["gateway.replicas=2"], "set gateway.replicas=1", id="gateway"),
        pytest.param(
            ["gateway.replicas=1,output.url=s3://b"], "in one place, so set one of them", id="both"
        ),
    ],
)
def test_r_output_replicas_that_cannot_share_a_volume_are_refused(
    helm: Path, values: list[str], said: str
) -> None:
    with pytest.raises(RefusedError, match=said):
        render(helm, VOLUME, *(f"--set={value}" for value in values))
    render(helm, VOLUME, MANY, "--set=operator.replicas=2,gateway.replicas=3")


@pytest.mark.parametrize("component", COMPONENTS)
def test_r_output_pods_that_share_a_volume_for_one_node_run_there(
    helm: Path, component: str
) -> None:
    """Each follows any that is there already, its own predecessor in a rollout too."""
    wish = {"topologyKey": "zone", "labelSelector": {"matchLabels": {"a": "b"}}}
    required = "requiredDuringSchedulingIgnoredDuringExecution"
    given = {"podAffinity": {required: [wish]}, "nodeAffinity": {"x": "y"}}
    values = (VOLUME, f"--set-json={component}.affinity={json.dumps(given)}")
    rendered = render(helm, *values, ONE_EACH)
    affinity = pod(rendered, component)["affinity"]
    first, together = affinity["podAffinity"][required]
    assert (first, affinity["nodeAffinity"]) == (wish, {"x": "y"})
    assert together["topologyKey"] == "kubernetes.io/hostname"
    for other in COMPONENTS:
        labels = deployment(rendered, other)["spec"]["template"]["metadata"]["labels"]
        assert together["labelSelector"]["matchLabels"].items() <= labels.items()
    assert pod(render(helm, *values, MANY), component)["affinity"] == given


POD = [
    ("replicas=3", ("replicas",), 3),
    ("nodeSelector.disk=ssd", ("template", "spec", "nodeSelector"), {"disk": "ssd"}),
    ("priorityClassName=high", ("template", "spec", "priorityClassName"), "high"),
    ("tolerations[0].key=k", ("template", "spec", "tolerations"), [{"key": "k"}]),
    ("podLabels.team=a", ("template", "metadata", "labels", "team"), "a"),
    ("podAnnotations.note=a", ("template", "metadata", "annotations", "note"), "a"),
    ("affinity.podAffinity.x=y", ("template", "spec", "affinity"), {"podAffinity": {"x": "y"}}),
]


@pytest.mark.parametrize("component", COMPONENTS)
def test_values_reach_the_pods_of_their_program(helm: Path, component: str) -> None:
    rendered = render(helm, *(f"--set={component}.{value}" for value, *_ in POD))
    (other,) = set(COMPONENTS) - {component}
    for value, path, expected in POD:
        assert at(deployment(rendered, component)["spec"], path) == expected, value
        assert at(deployment(rendered, other)["spec"], path) != expected, value


def at(found: Any, path: tuple[str, ...]) -> Any:
    for step in path:
        found = (found or {}).get(step)
    return found


@pytest.mark.parametrize("component", COMPONENTS)
def test_values_of_the_containers(helm: Path, component: str) -> None:
    digest = "sha256:" + "0" * 64
    values = (
        f"--set=image.digest={digest},image.repository=here/agentjobs,image.pullPolicy=Never",
        f"--set={component}.resources.limits.memory=1Gi,{component}.extraEnv[0].name=A",
        "--set=imagePullSecrets[0].name=s",
    )
    given = container(helm, component, *values)
    assert given["image"] == f"here/agentjobs@{digest}"
    assert given["imagePullPolicy"] == "Never"
    assert given["resources"]["limits"]["memory"] == "1Gi"
    assert {"name": "A"} in given["env"]
    assert pod(render(helm, *values), component)["imagePullSecrets"] == [{"name": "s"}]
    assert container(helm, component, "--set=image.tag=t")["image"] == "agentjobs:t"


@pytest.mark.parametrize("component", COMPONENTS)
def test_the_pods_are_restricted(helm: Path, component: str) -> None:
    found = pod(render(helm, "--set=gateway.tls.secretName=t"), component)
    assert found["securityContext"]["runAsNonRoot"] is True
    assert found["securityContext"]["runAsUser"] == 65532
    assert found["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not any("hostPath" in volume for volume in found["volumes"])
    for one in found["containers"]:
        assert one["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert one["resources"]["requests"]
        assert one["resources"]["limits"]["memory"]


def test_probes_and_metrics_of_the_operator_share_a_port(helm: Path) -> None:
    given = container(helm, "operator")
    assert given["ports"] == [{"name": "http-metrics", "containerPort": 9090}]
    assert given["livenessProbe"]["httpGet"] == {"path": "/healthz", "port": "http-metrics"}
    assert given["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": "http-metrics"}
    service = only(render(helm), "Service", "agentjobs-operator")
    (port,) = service["spec"]["ports"]
    assert (port["port"], port["targetPort"]) == (9090, "http-metrics")


def test_the_gateway_serves_http_and_mcp(helm: Path) -> None:
    given = container(helm, "gateway")
    assert given["ports"] == [
        {"name": "http", "containerPort": 8080},
        {"name": "mcp", "containerPort": 8081},
    ]
    assert given["livenessProbe"]["httpGet"] == {"path": "/healthz", "port": "http"}
    assert given["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": "http"}
    ports = only(render(helm), "Service", "agentjobs-gateway")["spec"]["ports"]
    assert [(each["name"], each["port"], each["targetPort"]) for each in ports] == [
        ("http", 8080, "http"),
        ("mcp", 8081, "mcp"),
    ]


def test_mcp_can_be_set_up_and_switched_off(helm: Path) -> None:
    """The values gateway.mcp: enabled, plainTools, syncSeconds, allowedOrigins."""
    names = {"_PLAIN_TOOLS": "true", "_SYNC_SECONDS": "25", "": "true"}
    given = environment(helm, "gateway")
    assert {name: given[f"AGENTJOBS_MCP{name}"] for name in names} == names
    assert "AGENTJOBS_MCP_ALLOWED_ORIGINS" not in given
    changed = environment(
        helm,
        "gateway",
        "--set=gateway.mcp.plainTools=false",
        "--set=gateway.mcp.syncSeconds=0",
        "--set=gateway.mcp.allowedOrigins={https://a.example.com,https://b.example.com}",
    )
    assert changed["AGENTJOBS_MCP_PLAIN_TOOLS"] == "false"
    assert changed["AGENTJOBS_MCP_SYNC_SECONDS"] == "0"
    origins = "https://a.example.com,https://b.example.com"
    assert changed["AGENTJOBS_MCP_ALLOWED_ORIGINS"] == origins
    off = "--set=gateway.mcp.enabled=false"
    assert environment(helm, "gateway", off)["AGENTJOBS_MCP"] == "false"
    assert [each["name"] for each in container(helm, "gateway", off)["ports"]] == ["http"]
    ports = only(render(helm, off), "Service", "agentjobs-gateway")["spec"]["ports"]
    assert [each["name"] for each in ports] == ["http"]


def test_with_tls_the_secret_is_mounted_and_probes_speak_https(helm: Path) -> None:
    """R-AUTH: tokens are worth stealing."""
    values = "--set=gateway.tls.secretName=gateway-tls"
    found, given = pod(render(helm, values), "gateway"), container(helm, "gateway", values)
    for probe in ("livenessProbe", "readinessProbe"):
        assert given[probe]["httpGet"]["scheme"] == "HTTPS"
    (mount,) = [each for each in given["volumeMounts"] if each["name"] == "tls"]
    assert (mount["mountPath"], mount["readOnly"]) == ("/etc/agentjobs/tls", True)
    (volume,) = [each for each in found["volumes"] if each["name"] == "tls"]
    assert volume["secret"] == {"secretName": "gateway-tls"}
    plain = pod(render(helm), "gateway")
    assert [each["name"] for each in plain["volumes"]] == ["tmp"]


def test_tokens_of_users_are_refused_without_tls(helm: Path) -> None:
    """R-AUTH."""
    with pytest.raises(RefusedError, match=r"acceptUserTokens needs gateway\.tls\.secretName"):
        render(helm, "--set=gateway.acceptUserTokens=true")


def test_a_rollout_of_the_gateway_takes_no_replica_away_before_another_serves(helm: Path) -> None:
    spec = deployment(render(helm), "gateway")["spec"]
    assert spec["strategy"]["rollingUpdate"] == {"maxUnavailable": 0, "maxSurge": 1}
    settings = GatewaySettings.from_environment({})
    ends = settings.drain_seconds + settings.end_seconds
    assert spec["template"]["spec"]["terminationGracePeriodSeconds"] > ends


@pytest.mark.parametrize("component", COMPONENTS)
def test_a_service_selects_the_pods_of_its_program(helm: Path, component: str) -> None:
    rendered = render(helm)
    labels = {
        each: deployment(rendered, each)["spec"]["template"]["metadata"]["labels"]
        for each in COMPONENTS
    }
    selectors = (
        only(rendered, "Service", f"agentjobs-{component}")["spec"]["selector"],
        deployment(rendered, component)["spec"]["selector"]["matchLabels"],
    )
    for selector in selectors:
        chosen = [each for each in COMPONENTS if selector.items() <= labels[each].items()]
        assert chosen == [component]
        # What changes from version to version cannot be in a selector.
        assert not any("version" in key or "chart" in key for key in selector)


@pytest.mark.parametrize("component", COMPONENTS)
def test_names_follow_the_release(helm: Path, component: str) -> None:
    def names(rendered: list[Document]) -> set[str]:
        kinds = {"Deployment", "Service", "ServiceAccount", "ClusterRole", "Role", "RoleBinding"}
        found = [each["metadata"]["name"] for each in rendered if each["kind"] in kinds]
        return {name for name in found if name.endswith(component)}

    assert names(render(helm)) == {f"agentjobs-{component}"}
    assert names(render(helm, release="blue")) == {f"blue-agentjobs-{component}"}
    assert names(render(helm, "--set=fullnameOverride=jobs")) == {f"jobs-{component}"}
    assert names(render(helm, "--set=nameOverride=runs", release="blue")) == {
        f"blue-runs-{component}"
    }


def test_the_policies_know_the_accounts_by_the_names_of_the_release(helm: Path) -> None:
    """R-POLICY-WHO: the gateway vouches for others; nobody else may."""
    rendered = render(helm, release="blue")
    assert "'system:serviceaccount:agentjobs-system:blue-agentjobs-gateway'" in str(rendered)
    assert "agentjobs-system:agentjobs-gateway" not in str(rendered)


def test_the_operator_has_no_right_that_it_should_not_have(helm: Path) -> None:
    rendered = render(helm)
    allowed = rights(rendered, "ClusterRole", "agentjobs-operator")
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


def test_the_gateway_has_no_right_that_it_should_not_have(helm: Path) -> None:
    """R-AUTH: AgentJobs, questions, reviews, its own Secret. Never delete, never Jobs or pods."""
    rendered = render(helm)
    allowed = rights(rendered, "ClusterRole", "agentjobs-gateway")
    assert not any("*" in part for right in allowed for part in right)
    assert {resource for _, resource, _ in allowed} == {
        "agentjobs",
        "agentjobs/status",
        "agenttools",
        "clusteragenttools",
        "inputrequests",
        "inputrequests/status",
        "tokenreviews",
        "subjectaccessreviews",
    }
    forbidden = {"delete", "deletecollection", "use", "approve", "escalate", "bind", "impersonate"}
    assert not {verb for *_, verb in allowed} & forbidden
    # What pods report; the state in there is the operator's to write.
    assert {verb for _, name, verb in allowed if name == "agentjobs/status"} == {"patch"}
    for rule in only(rendered, "Role", "agentjobs-gateway")["rules"]:
        assert rule["verbs"] == ["create"] or rule["resourceNames"]
        assert set(rule["resources"]) <= {"secrets", "configmaps"}


def test_agents_get_their_rights_but_for_tools_by_one_binding(helm: Path) -> None:
    """R-POLICY-TEMPLATE: a tool is handed out by its name, so `use` is not among them."""
    for aggregate in ("true", "false"):
        rendered = render(helm, f"--set=rbac.aggregate={aggregate}")
        assert rights(rendered, "ClusterRole", "agentjobs-agent") == {
            ("agentjobs.dev", "agentjobs", verb)
            for verb in ("create", "get", "list", "watch", "delete")
        } | {
            *(("agentjobs.dev", "inputrequests", verb) for verb in ("get", "list", "watch")),
            ("agentjobs.dev", "inputrequests/status", "patch"),
        }
        labels = only(rendered, "ClusterRole", "agentjobs-agent")["metadata"]["labels"]
        assert not any("aggregate-to" in label for label in labels)


def test_users_are_not_given_what_is_handed_out_by_name(helm: Path) -> None:
    rendered = render(helm)
    edit = rights(rendered, "ClusterRole", "agentjobs-edit")
    view = rights(rendered, "ClusterRole", "agentjobs-view")
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
    "gateway.replica=2",
    "gateway.replicas=-1",
    "gateway.url=ftp://a",
    "gateway.logFormat=xml",
    "gateway.acceptUserTokens=yes please",
    "gateway.tls.secret=t",
    "output.persistence.accessModes=[ReadWriteOncePod]",
    "output.persistence.accessModes=[]",
    "output.persistence.size=much",
    "output.persistence.enable=true",
    "output.url=bucket",
    "output.secret=s",
    "gateway.tls.secretName=1",
    "gateway.resources.request.cpu=1",
    "gateway.extraEnv=A",
    # A key is remembered as long as its job: at least an hour.
    "gateway.defaultTTLSeconds=3599",
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


def test_every_value_is_set_by_a_test() -> None:
    text = Path(__file__).read_text(encoding="utf-8")
    both = {value.partition("=")[0].partition(".")[0].partition("[")[0] for value, *_ in POD}
    for path in leaves(VALUES):
        # Those of both programs are in tables without the program's name.
        known = path[0] in COMPONENTS and path[1] in {*both, "resources", "extraEnv"}
        assert known or ".".join(path[:3]) in text, path


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
    for component in COMPONENTS:
        name = f'{{{{ include "agentjobs.{component}" . }}}}'
        assert f"rollout status deployment/{name}" in notes
    role = '{{ include "agentjobs.fullname" . }}-agent'
    assert f"create rolebinding agent --clusterrole={role}" in notes
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
