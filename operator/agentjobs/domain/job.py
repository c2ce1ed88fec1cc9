"""The batch/v1 Job of an attempt, whole (R-ATTEMPT, R-TEMPLATE, R-ARGS)."""

import copy
import hashlib
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from agentjobs.api.agentjob import AgentJob
from agentjobs.api.names import (
    ANNOTATION_ARGUMENTS,
    ANNOTATION_ATTEMPT,
    ANNOTATION_PLACEHOLDER,
    API_VERSION,
    ARGUMENTS_FILE,
    LABEL_JOB,
    LABEL_QUEUE,
    LABEL_TOOL,
    MOUNT_PATH,
    REPORT_AUDIENCE,
    TOKEN_FILE,
    VOLUME,
)
from agentjobs.domain import arguments as args
from agentjobs.domain.accept import Accepted
from agentjobs.domain.observed import Policy
from agentjobs.domain.pods import tool_container

POD_BACKSTOP_SECONDS = 15
"""How long after the deadline the kubelet ends the pod if nobody else has: keeps the evidence."""
JOB_BACKSTOP_SECONDS = 120
"""How long after the deadline the Job controller deletes what is left."""
TOKEN_SECONDS = 3600
LABEL_LENGTH = 63
HASH_LENGTH = 8


def job_name(name: str, attempt: int, template: Mapping[str, Any]) -> str:
    """Name of an attempt's Job: `<name>-<n>`, cut with a hash where index digits would not fit.

    The pods of an indexed Job have `<job>-<index>` as host name, a DNS label of at most 63.
    """
    spec = template.get("spec") or {}
    room = LABEL_LENGTH
    if spec.get("completionMode") == "Indexed" and isinstance(spec.get("completions"), int):
        room -= 1 + len(str(max(spec["completions"] - 1, 0)))
    whole = f"{name}-{attempt}"
    if len(whole) <= room:
        return whole
    digest = hashlib.sha256(name.encode()).hexdigest()[:HASH_LENGTH]
    tail = f"-{digest}-{attempt}"
    return name[: room - len(tail)].rstrip("-") + tail


def desired_job(
    job: AgentJob, accepted: Accepted, *, attempt: int, now: datetime, policy: Policy
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Build the Job of an attempt.

    :param now: the backstops are made from what then remains until the deadline.
    :return: the Job as it is sent to the API server, and warnings about what was changed.
    """
    template = copy.deepcopy(dict(accepted.template.body))
    spec = template["spec"]
    name = job_name(job.metadata.name, attempt, template)
    remaining = max(int((accepted.deadline_at - now).total_seconds()), 0)
    pod = spec["template"]
    warnings = _pod(pod, job, accepted, attempt, remaining, policy)
    for taken_over in ("ttlSecondsAfterFinished", "suspend"):
        spec.pop(taken_over, None)
    spec["activeDeadlineSeconds"] = remaining + JOB_BACKSTOP_SECONDS
    spec["podReplacementPolicy"] = "Failed"
    # A null is an absent field to the API server, and its own default would be six repetitions.
    if spec.get("backoffLimit") is None and spec.get("backoffLimitPerIndex") is None:
        spec["backoffLimit"] = 0
    labels = _kept(template, "labels") | _our_labels(job, accepted)
    if accepted.queue:
        labels[LABEL_QUEUE] = accepted.queue
        spec["suspend"] = True
    annotations = _kept(template, "annotations") | {ANNOTATION_ATTEMPT: str(attempt)}
    return _document(job, name, labels, annotations, spec), tuple(warnings)


def placeholder_job(job: AgentJob, name: str) -> dict[str, Any]:
    """Build a suspended Job that only takes the name of an attempt that must never begin (R-CLAIM).

    A paused former leader that wakes up after its claim finds the name taken. It makes no pod
    even where it is resumed: a Kueue with a default queue takes it in, and admits it.
    """
    spec = {
        "suspend": True,
        "parallelism": 0,
        "backoffLimit": 0,
        "template": {
            "spec": {
                "restartPolicy": "Never",
                "automountServiceAccountToken": False,
                "containers": [{"name": "placeholder", "image": "placeholder.invalid/none"}],
            }
        },
    }
    labels = {LABEL_JOB: job.metadata.name}
    return _document(job, name, labels, {ANNOTATION_PLACEHOLDER: "true"}, spec)


def _document(
    job: AgentJob,
    name: str,
    labels: dict[str, str],
    annotations: dict[str, str],
    spec: dict[str, Any],
) -> dict[str, Any]:
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {
            "name": name,
            "namespace": job.metadata.namespace,
            "labels": labels,
            "annotations": annotations,
            "ownerReferences": [
                {
                    "apiVersion": API_VERSION,
                    "kind": "AgentJob",
                    "name": job.metadata.name,
                    "uid": job.metadata.uid,
                    "controller": True,
                    "blockOwnerDeletion": True,
                }
            ],
        },
        "spec": spec,
    }


def _kept(owner: Mapping[str, Any], field: str) -> dict[str, Any]:
    """Labels or annotations as given."""
    return dict((owner.get("metadata") or {}).get(field) or {})


def _our_labels(job: AgentJob, accepted: Accepted) -> dict[str, str]:
    labels = {LABEL_JOB: job.metadata.name}
    if accepted.tool_name:
        labels[LABEL_TOOL] = accepted.tool_name
    return labels


def _pod(
    pod: dict[str, Any],
    job: AgentJob,
    accepted: Accepted,
    attempt: int,
    remaining: int,
    policy: Policy,
) -> list[str]:
    """Complete a pod template in place; return warnings."""
    spec = pod["spec"]
    annotations = _kept(pod, "annotations")
    if accepted.arguments is not None:
        annotations[ANNOTATION_ARGUMENTS] = args.encode(accepted.arguments)
    pod["metadata"] = {"labels": _kept(pod, "labels") | _our_labels(job, accepted)}
    if annotations:
        pod["metadata"]["annotations"] = annotations
    if spec.get("restartPolicy") is None:
        spec["restartPolicy"] = "Never"
    own = spec.get("activeDeadlineSeconds")
    backstop = max(remaining, 1) + POD_BACKSTOP_SECONDS
    # What is no number stays, for the API server to refuse: it is not ours to repair.
    if own is None or (isinstance(own, int) and own > backstop):
        spec["activeDeadlineSeconds"] = backstop
    ours = _environment(job, accepted, attempt, policy)
    _tool_container(spec, _kept(pod, "annotations"), accepted, ours)
    return _grace(spec, policy) + list(accepted.warnings)


def _grace(spec: dict[str, Any], policy: Policy) -> list[str]:
    asked = spec.get("terminationGracePeriodSeconds")
    if not isinstance(asked, int) or asked <= policy.grace_ceiling:
        return []
    spec["terminationGracePeriodSeconds"] = policy.grace_ceiling
    ceiling = policy.grace_ceiling
    return [f"terminationGracePeriodSeconds {asked} was cut to the platform's ceiling, {ceiling}"]


def _tool_container(
    spec: dict[str, Any],
    annotations: Mapping[str, str],
    accepted: Accepted,
    ours: Mapping[str, str],
) -> None:
    """Give the tool's container, and no other, its environment and volume."""
    given = spec.get("containers")
    containers = [c for c in given if isinstance(c, dict)] if isinstance(given, list) else []
    name = tool_container(annotations, containers)
    container = next((c for c in containers if c.get("name", "") == name), None)
    if container is None:
        return
    if accepted.default_resources and not container.get("resources"):
        container["resources"] = accepted.default_resources.to_json()
    own = container.get("env")
    if own is None or isinstance(own, list):
        taken = [e.get("name") for e in own or () if isinstance(e, dict)]
        container["env"] = list(own or ()) + [
            {"name": key, "value": value} for key, value in ours.items() if key not in taken
        ]
    mounts = container.get("volumeMounts")
    if mounts is None or isinstance(mounts, list):
        container["volumeMounts"] = [
            *(mounts or ()),
            {"name": VOLUME, "mountPath": MOUNT_PATH, "readOnly": True},
        ]
    volumes = spec.get("volumes")
    if volumes is None or isinstance(volumes, list):
        spec["volumes"] = [*(volumes or ()), _volume(accepted)]


def _environment(job: AgentJob, accepted: Accepted, attempt: int, policy: Policy) -> dict[str, str]:
    values = {
        "AGENTJOBS_JOB_ID": f"{job.metadata.name}.{job.metadata.namespace}",
        "AGENTJOBS_ATTEMPT": str(attempt),
        "AGENTJOBS_TOKEN_FILE": TOKEN_FILE,
    }
    if policy.gateway_url:
        values["AGENTJOBS_REPORT_URL"] = f"{policy.gateway_url.rstrip('/')}/v1/report"
    if accepted.arguments is not None:
        values["AGENTJOBS_ARGUMENTS_FILE"] = ARGUMENTS_FILE
        values |= args.environment(accepted.arguments)[0]
    return values


def _volume(accepted: Accepted) -> dict[str, Any]:
    sources: list[dict[str, Any]] = [
        {
            "serviceAccountToken": {
                "audience": REPORT_AUDIENCE,
                "expirationSeconds": TOKEN_SECONDS,
                "path": "token",
            }
        }
    ]
    if accepted.arguments is not None:
        field = {"fieldPath": f"metadata.annotations['{ANNOTATION_ARGUMENTS}']"}
        sources.append({"downwardAPI": {"items": [{"path": "arguments.json", "fieldRef": field}]}})
    return {"name": VOLUME, "projected": {"sources": sources}}
