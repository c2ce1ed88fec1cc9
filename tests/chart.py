"""The chart as tests see it: rendered documents, found by kind and name."""

import subprocess
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
CHART = ROOT / "charts/agentjobs"
NAMESPACE = "agentjobs-system"
SERVES_DEFAULTS = (
    "--kube-version=1.36.0",
    "--api-versions=admissionregistration.k8s.io/v1/MutatingAdmissionPolicy",
)
"""What helm is told of a cluster that serves MutatingAdmissionPolicy."""

LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""The fast one where there is one: the definitions are long."""

Document = dict[str, Any]


class RefusedError(Exception):
    """Helm did not render the chart; the message is helm's."""


@lru_cache
def render_text(
    helm: Path, *arguments: str, release: str = "agentjobs", chart: Path = CHART
) -> str:
    command = [str(helm), "template", release, str(chart), "--namespace", NAMESPACE, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RefusedError(done.stderr)
    return done.stdout


def render(
    helm: Path, *arguments: str, release: str = "agentjobs", chart: Path = CHART
) -> list[Document]:
    text = render_text(helm, *arguments, release=release, chart=chart)
    return [document for document in yaml.load_all(text, LOADER) if document]


def only(documents: list[Document], kind: str, name: str = "") -> Document:
    (found,) = [
        document
        for document in documents
        if document["kind"] == kind and name in {"", document["metadata"]["name"]}
    ]
    return found


def rights(documents: list[Document], kind: str, name: str) -> set[tuple[str, str, str]]:
    """(group, resource, verb) of everything that a role allows."""
    return {
        (group, resource, verb)
        for rule in only(documents, kind, name)["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
