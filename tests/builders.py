"""Smallest valid values for tests, with keyword overrides: say only what the test is about."""

from datetime import UTC, datetime, timedelta
from typing import Any

from agentjobs.api.agentjob import AgentJob
from agentjobs.api.agenttool import AgentTool
from agentjobs.api.names import API_VERSION, FINALIZER
from agentjobs.domain.children import JobView
from agentjobs.domain.observed import Observed
from agentjobs.domain.pods import TRACKING, PodView

Json = dict[str, Any]

CREATED = datetime(2026, 3, 1, 12, 0, 0, tzinfo=UTC)
"""When the AgentJob of a test is created, unless told otherwise."""
NAME, NAMESPACE, UID = "nightly-index", "search", "a1b2"
JOB_NAME, JOB_UID = f"{NAME}-1", "j1"
POD_NAME, POD_UID = f"{JOB_NAME}-x7k2p", "p1"


def at(seconds: float) -> datetime:
    """The moment that many seconds after the creation of the AgentJob."""
    return CREATED + timedelta(seconds=seconds)


def stamp(moment: float | datetime | None) -> str | None:
    """A moment as the API server writes it; a number counts from the creation."""
    if moment is None:
        return None
    value = moment if isinstance(moment, datetime) else at(moment)
    return value.strftime("%Y-%m-%dT%H:%M:%SZ")


def a_template(**pod_spec: Any) -> Json:
    """The smallest JobTemplateSpec that is accepted; arguments go into the pod spec."""
    spec: Json = {"containers": [{"name": "main", "image": "images.example.net/base:1"}]}
    return {"spec": {"template": {"spec": spec | pod_spec}}}


def an_agentjob(
    *,
    name: str = NAME,
    namespace: str = NAMESPACE,
    uid: str = UID,
    deleted: float | None = None,
    finalizers: tuple[str, ...] = (FINALIZER,),
    status: Json | None = None,
    **spec: Any,
) -> AgentJob:
    """An AgentJob; other keywords are fields of its spec as they are written in YAML."""
    if not {"template", "toolRef"} & set(spec):
        spec["template"] = a_template()
    meta: Json = {
        "name": name,
        "namespace": namespace,
        "uid": uid,
        "generation": 1,
        "resourceVersion": "10",
        "creationTimestamp": stamp(0),
        "finalizers": list(finalizers),
    }
    if deleted is not None:
        meta["deletionTimestamp"] = stamp(deleted)
    return AgentJob.from_json({"metadata": meta, "spec": spec, "status": status or {}})


def a_tool(
    *, name: str = "indexer", namespace: str = NAMESPACE, generation: int = 4, **spec: Any
) -> AgentTool:
    """A catalogue entry; other keywords are fields of its spec."""
    spec = {"description": "Builds an index.", "template": a_template()} | spec
    meta = {
        "name": name,
        "namespace": namespace,
        "uid": f"tool-{name}",
        "generation": generation,
        "creationTimestamp": stamp(-3600),
    }
    return AgentTool.from_json({"metadata": meta, "spec": spec})


def claimed(**status: Any) -> Json:
    """Status of an AgentJob whose first attempt is claimed; keywords are more of its fields."""
    attempt = {"number": 1, "jobName": JOB_NAME}
    if "jobUID" in status:
        attempt["jobUID"] = status.pop("jobUID")
    return {
        "state": "queued",
        "jobName": JOB_NAME,
        "attempts": [attempt],
        "deadlineAt": stamp(600),
        "effective": {"resultFrom": "terminationMessage"},
    } | status


def a_child(**fields: Any) -> JobView:
    """The Job of the first attempt; keywords are fields of the view."""
    return JobView(
        **{
            "uid": JOB_UID,
            "name": JOB_NAME,
            "owner_uid": UID,
            "owner": f"AgentJob {NAME}",
            "created": at(1),
        }
        | fields
    )


def job_json(*, spec: Json | None = None, status: Json | None = None, **meta: Any) -> Json:
    """A batch/v1 Job as the API server returns it."""
    owner = {"apiVersion": API_VERSION, "kind": "AgentJob", "name": NAME, "uid": UID}
    return {
        "metadata": {
            "name": JOB_NAME,
            "uid": JOB_UID,
            "creationTimestamp": stamp(1),
            "ownerReferences": [owner | {"controller": True}],
        }
        | meta,
        "spec": {
            "completions": 1,
            "parallelism": 1,
            "backoffLimit": 0,
            "template": {"spec": {"restartPolicy": "Never"}},
        }
        | (spec or {}),
        "status": status or {},
    }


def ended(
    exit_code: int = 0,
    *,
    reason: str | None = None,
    message: str = "",
    started: float | None = 5,
    finished: float = 30,
) -> Json:
    """State of a container that is over."""
    told = reason if reason is not None else ("Error" if exit_code else "Completed")
    return {
        "terminated": {
            "exitCode": exit_code,
            "reason": told,
            "message": message,
            "startedAt": stamp(started) or "1970-01-01T00:00:00Z",
            "finishedAt": stamp(finished),
        }
    }


def running(since: float = 5) -> Json:
    """State of a container that runs."""
    return {"running": {"startedAt": stamp(since)}}


def waiting(reason: str = "ContainerCreating", message: str = "") -> Json:
    """State of a container that is yet to start."""
    return {"waiting": {"reason": reason, "message": message}}


def a_pod(  # noqa: PLR0913 - a keyword for everything that a pod can show
    state: Json | None = None,
    *,
    others: dict[str, Json] | None = None,
    init: dict[str, Json] | None = None,
    tool: str = "main",
    last_state: Json | None = None,
    conditions: tuple[Json, ...] = (),
    deleted_at: float | None = None,
    grace: int = 30,
    active_deadline: int | None = 615,
    annotations: Json | None = None,
    tracked: bool = False,
    gone: bool = False,
    name: str = POD_NAME,
    uid: str = POD_UID,
    node: str = "node-a",
    **status: Any,
) -> PodView:
    """A pod of the first attempt, parsed from what the API server would return.

    :param state: of the tool's container; None: the kubelet has not said anything about it.
    :param others: states of further containers by name; `init` of init containers.
    :param deleted_at: when its deletion was asked for.
    :param tracked: the Job controller has yet to count it.
    :param status: further fields of its status, such as phase and reason.
    """
    others, init = others or {}, init or {}
    meta: Json = {
        "name": name,
        "uid": uid,
        "creationTimestamp": stamp(2),
        "annotations": annotations or {},
        "finalizers": [TRACKING] if tracked else [],
        "ownerReferences": [{"kind": "Job", "name": JOB_NAME, "uid": JOB_UID, "controller": True}],
    }
    if deleted_at is not None:
        meta["deletionTimestamp"] = stamp(deleted_at + grace)
        meta["deletionGracePeriodSeconds"] = grace
    statuses = [] if state is None else [{"name": tool, "state": state}]
    if last_state is not None:
        statuses[0]["lastState"] = last_state
    statuses += [{"name": other, "state": value} for other, value in others.items()]
    body: Json = {
        "metadata": meta,
        "spec": {
            "containers": [{"name": tool}, *({"name": other} for other in others)],
            "initContainers": [{"name": each} for each in init],
            "nodeName": node,
            "activeDeadlineSeconds": active_deadline,
        },
        "status": {
            "phase": _phase(state, others),
            "conditions": list(conditions),
            "containerStatuses": statuses,
            "initContainerStatuses": [
                {"name": each, "state": value} for each, value in init.items()
            ],
        }
        | status,
    }
    pod = PodView.from_json(body)
    return pod.as_gone() if gone else pod


def disrupted(reason: str, message: str = "") -> Json:
    """The condition of a pod that the cluster itself ends."""
    return {"type": "DisruptionTarget", "status": "True", "reason": reason, "message": message}


def observed(job: AgentJob | None = None, *, now: float = 60, **fields: Any) -> Observed:
    """What one pass has read, `now` in seconds from the creation of the AgentJob."""
    fields = {"pods_listed": True} | fields
    return Observed(now=at(now), job=job or an_agentjob(), **fields)


def _phase(state: Json | None, others: dict[str, Json]) -> str:
    """The phase that a kubelet would write."""
    states = [*([state] if state else []), *others.values()]
    if any("running" in each for each in states):
        return "Running"
    if not states or any("waiting" in each for each in states):
        return "Pending"
    exits = [each["terminated"]["exitCode"] for each in states]
    return "Failed" if any(exits) else "Succeeded"
