"""Sets up what the demo needs, and takes it away again."""

import json
from pathlib import Path

from tests.cluster import Cluster, ClusterError, ExistingCluster
from tests.cluster.binaries import binary
from tests.cluster.console import say, step
from tests.cluster.imagebuild import product_version, recipes
from tests.cluster.processes import run

from .run import MANIFESTS, NAMESPACE, RELEASE_NAMESPACE

CLUSTER_NAME = "agentjobs-demo"
"""A cluster of its own: tests may use another at the same time."""
RELEASE = "agentjobs"
CHART = Path(__file__).parents[1] / "charts" / "agentjobs"
LABEL = "installed-by=agentjobs-demo"
"""Of the Helm release, so that somebody else's is left alone."""
HELM_TIMEOUT = 180
ROLLOUT_TIMEOUT = 110
TOOLS_TIMEOUT = 60
DELETE_TIMEOUT = 110


def up() -> Cluster:
    """Bring up cluster, images, operator and the demo's tools; what is there already stays."""
    archives = {name: recipe.archive() for name, recipe in recipes().items()}
    cluster = Cluster.up(CLUSTER_NAME)
    for name, archive in archives.items():
        with step(f"loading the image of the {name}"):
            cluster.load_image(archive)
    if _foreign_release(cluster):
        say(f"using the release {RELEASE} that is installed already")
    else:
        with step("installing operator and gateway with helm"):
            _install_chart(cluster, archives["operator"])
    with step("setting up the demo's tools and the site to crawl"):
        _apply_manifests(cluster, archives["demo"])
        _wait_for_rollout(cluster, NAMESPACE, "docs-site")
        _wait_for_tools(cluster)
    return cluster


def down() -> None:
    """Remove what the demo has installed, and the cluster if it was made for the demo."""
    cluster = Cluster.find(CLUSTER_NAME)
    if isinstance(cluster, ExistingCluster):
        # Only here it matters: a cluster of our own goes as a whole.
        cluster.start(None, None, (), ())
        _uninstall(cluster)
    cluster.down()


def _install_chart(cluster: Cluster, archive: Path) -> None:
    repository, _, _ = recipes()["operator"].name.rpartition(":")
    values = {
        "image.repository": repository,
        "image.tag": product_version(),
        "image.pullPolicy": "IfNotPresent",
        "crds.keep": "false",
        "gateway.replicas": "1",
        "output.persistence.enabled": "true",
        "output.persistence.size": "1Gi",
    }
    settings = [word for pair in values.items() for word in ("--set", "=".join(pair))]
    # The tag stays when the image changes; the name of its archive does not.
    for program in ("operator", "gateway"):
        settings += ["--set-string", f"{program}.podAnnotations.image-archive={archive.stem}"]
    command: list[str | Path] = [
        "upgrade",
        "--install",
        RELEASE,
        CHART,
        "--create-namespace",
        "--labels",
        LABEL,
    ]
    try:
        _helm(cluster, *command, *settings, "--wait", f"--timeout={HELM_TIMEOUT}s")
    except ClusterError as error:
        look = f"kubectl --namespace {RELEASE_NAMESPACE}"
        raise ClusterError(
            f"{error}\noperator or gateway did not get ready; look at:\n"
            f"  export KUBECONFIG={cluster.kubeconfig}\n"
            f"  {look} describe pods\n  {look} logs deployment/agentjobs-operator\n"
            f"  {look} logs deployment/agentjobs-gateway"
        ) from error


def _foreign_release(cluster: Cluster) -> bool:
    ours = json.loads(_helm(cluster, "list", "--output", "json", "--selector", LABEL))
    all_of_them = json.loads(_helm(cluster, "list", "--output", "json"))
    names = [{release["name"] for release in found} for found in (all_of_them, ours)]
    return RELEASE in names[0] - names[1]


def _uninstall(cluster: Cluster) -> None:
    with step(f"removing the namespace {NAMESPACE}"):
        # The operator has to see its jobs end, so it goes last.
        delete = ["delete", "namespace", NAMESPACE, "--ignore-not-found"]
        cluster.kubectl(*delete, f"--timeout={DELETE_TIMEOUT}s")
    if _foreign_release(cluster):
        say(f"the release {RELEASE} was not installed by the demo and stays")
        return
    with step(f"removing the release {RELEASE}"):
        _helm(cluster, "uninstall", RELEASE, "--ignore-not-found", "--wait")
        cluster.kubectl("delete", "namespace", RELEASE_NAMESPACE, "--ignore-not-found")


def _apply_manifests(cluster: Cluster, archive: Path) -> None:
    """Create or update what the jobs need. The image's tag stays, so its archive is named, too."""
    for name in ("namespace", "docs-site", "tools", "agent"):
        text = (MANIFESTS / f"{name}.yaml").read_text(encoding="utf-8")
        text = text.replace("IMAGE_ARCHIVE", archive.stem.replace("@", "-"))
        cluster.kubectl("apply", "--filename", "-", input_text=text)


def _wait_for_tools(cluster: Cluster) -> None:
    wait = ["wait", "agenttools", "--all", "--for=condition=Ready", f"--timeout={TOOLS_TIMEOUT}s"]
    try:
        cluster.kubectl("--namespace", NAMESPACE, *wait)
    except ClusterError as error:
        raise ClusterError(
            f"{error}\nlook at: KUBECONFIG={cluster.kubeconfig} "
            f"kubectl --namespace {NAMESPACE} describe agenttools"
        ) from error


def _wait_for_rollout(cluster: Cluster, namespace: str, deployment: str) -> None:
    wait = ["rollout", "status", f"deployment/{deployment}", f"--timeout={ROLLOUT_TIMEOUT}s"]
    try:
        cluster.kubectl("--namespace", namespace, *wait)
    except ClusterError as error:
        raise ClusterError(
            f"{error}\nlook at: KUBECONFIG={cluster.kubeconfig} "
            f"kubectl --namespace {namespace} describe deployment/{deployment} pods"
        ) from error


def _helm(cluster: Cluster, *arguments: str | Path) -> str:
    options: list[str | Path] = [
        "--kubeconfig",
        cluster.kubeconfig,
        "--namespace",
        RELEASE_NAMESPACE,
    ]
    return run([binary("helm"), *options, *arguments], timeout=HELM_TIMEOUT + 60)
