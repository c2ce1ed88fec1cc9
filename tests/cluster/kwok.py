"""KWOK: fake nodes, on which pods change their status as if they ran.

The stages (what a pod goes through) are KWOK's own; only how long a Job's pod runs is ours.
"""

import copy
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from . import programs
from .binaries import directory_of

MANAGED = {"kwok.x-k8s.io/node": "fake"}
"""The annotation of the nodes that KWOK looks after."""
POD_SECONDS = "tests.agentjobs.dev/runs-for"
"""A pod's annotation: how long it runs on a fake node, as a Go duration such as `1.5s`."""
EXIT_CODE = "tests.agentjobs.dev/exit-code"
"""A pod's annotation: the exit code of its containers on a fake node, when it is not 0."""
FAILED_STATUS = f"""
{{{{ $now := Now }}}}
{{{{ $code := index .metadata.annotations "{EXIT_CODE}" }}}}
{{{{ $before := .status.containerStatuses }}}}
phase: Failed
containerStatuses:
{{{{ range $index, $container := .spec.containers }}}}
- name: {{{{ $container.name | Quote }}}}
  image: {{{{ $container.image | Quote }}}}
  ready: false
  started: false
  restartCount: 0
  state:
    terminated:
      reason: Error
      exitCode: {{{{ $code }}}}
      startedAt: {{{{ (index $before $index).state.running.startedAt | Quote }}}}
      finishedAt: {{{{ $now | Quote }}}}
{{{{ end }}}}
"""


def command(configuration_file: Path, kubeconfig: Path) -> list[str | Path]:
    """Return KWOK's command line."""
    return [
        directory_of(programs.KWOK) / "kwok",
        f"--config={configuration_file}",
        f"--kubeconfig={kubeconfig}",
    ]


def configuration(pod_seconds: float) -> str:
    """Return KWOK's configuration, in which a Job's pod runs for `pod_seconds`."""
    options = {
        "apiVersion": "config.kwok.x-k8s.io/v1alpha1",
        "kind": "KwokConfiguration",
        "options": {
            "manageNodesWithAnnotationSelector": ",".join(
                f"{name}={value}" for name, value in MANAGED.items()
            ),
            "cidr": "10.244.0.0/16",
            "nodeLeaseDurationSeconds": 40,
            "nodeLeaseParallelism": 4,
            "nodePlayStageParallelism": 4,
            "podPlayStageParallelism": 16,
        },
    }
    stages = [_stage(name) for name in ("node-initialize", "pod-ready", "pod-delete")]
    complete = _stage("pod-complete")
    complete["spec"]["delay"] = {
        "durationMilliseconds": round(pod_seconds * 1000),
        "durationFrom": {"jq": {"expression": f'.metadata.annotations["{POD_SECONDS}"]'}},
    }
    fail = copy.deepcopy(complete)
    fail["metadata"]["name"] = "pod-fail"
    fail["spec"]["next"]["statusTemplate"] = FAILED_STATUS
    code = f'.metadata.annotations["{EXIT_CODE}"]'
    for stage, operator in ((complete, "DoesNotExist"), (fail, "Exists")):
        expressions = stage["spec"]["selector"]["matchExpressions"]
        expressions.append({"key": code, "operator": operator})
    return yaml.safe_dump_all([options, *stages, complete, fail], sort_keys=False)


def node_list(names: Iterable[str]) -> dict[str, Any]:
    """Return nodes for KWOK, which gives them plenty of everything."""
    nodes = [
        {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {
                "name": name,
                "annotations": MANAGED,
                "labels": {"kubernetes.io/hostname": name, "kubernetes.io/os": "linux"},
            },
        }
        for name in names
    ]
    return {"apiVersion": "v1", "kind": "List", "items": nodes}


def _stage(name: str) -> Any:
    file = directory_of(programs.KWOK) / f"{name}.yaml"
    return yaml.safe_load(file.read_text(encoding="utf-8"))
