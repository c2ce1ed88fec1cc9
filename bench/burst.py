"""A burst: as many jobs as asked for, created at once, run to their end on fake nodes (KWOK).

First as bare batch/v1 Jobs, which is the limit, then as AgentJobs, on the same control plane.
"""

import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests import audit
from tests.apiclient import ApiClient, Document
from tests.chart import SERVES_DEFAULTS, render
from tests.cluster import ControlPlane
from tests.cluster.binaries import binary
from tests.controlplane.installed import OPERATOR, install
from tests.controlplane.stage import template
from tests.operator_process import OperatorProcess

CREATORS = 8
POLL = 0.2
WITHIN = 900.0
NODES = 4
NOISE = {"list", "watch"}


@dataclass(frozen=True)
class Figures:
    """What one run showed."""

    jobs: int
    bare_seconds: float
    ours_seconds: float
    requests: Counter[tuple[str, str]]

    @property
    def ratio(self) -> float:
        """AgentJobs finished per second against bare Jobs."""
        return self.bare_seconds / self.ours_seconds

    def to_json(self) -> dict[str, Any]:
        """The figures for files."""
        return {
            "jobs": self.jobs,
            "bareSeconds": round(self.bare_seconds, 2),
            "oursSeconds": round(self.ours_seconds, 2),
            "ratio": round(self.ratio, 3),
            "requestsPerJob": {
                f"{verb} {resource}": round(count / self.jobs, 3)
                for (verb, resource), count in sorted(self.requests.items())
            },
        }


def measure(directory: Path, jobs: int, limits: Any) -> Figures:
    """Run both bursts on one control plane."""
    with ControlPlane(
        directory,
        kwok=True,
        controller_manager_args=limits.controller_manager if limits else (),
        scheduler_args=limits.scheduler if limits else (),
    ) as plane:
        install(plane, render(binary("helm"), *SERVES_DEFAULTS))
        plane.add_fake_nodes(NODES)
        api = ApiClient.of(plane)
        for namespace in ("bare", "ours"):
            meta = {"name": namespace}
            api.create({"apiVersion": "v1", "kind": "Namespace", "metadata": meta})
        bare = burst(api, jobs, bare_job, ("Job", "bare"), is_complete)
        remove(api, jobs)
        kubeconfig = plane.kubeconfig_for(OPERATOR, ["measured"])
        with OperatorProcess("operator", kubeconfig, directory):
            ours = burst(api, jobs, agent_job, ("AgentJob", "ours"), is_done)
        requests = audit.count(
            audit.read(plane.audit_log),
            lambda each: (
                each.user == OPERATOR and each.namespace == "ours" and each.verb not in NOISE
            ),
        )
    return Figures(jobs, bare, ours, requests)


def burst(
    api: ApiClient,
    jobs: int,
    make: Callable[[int], Document],
    place: tuple[str, str],
    over: Callable[[Document], bool],
) -> float:
    """Create all at once and wait until the last is over; return the seconds."""
    began = time.monotonic()
    with ThreadPoolExecutor(CREATORS) as pool:
        list(pool.map(lambda number: api.create(make(number)), range(jobs)))
    wait(lambda: sum(over(each) for each in api.items(*place)) == jobs, f"{jobs} of {place[0]}")
    return time.monotonic() - began


def remove(api: ApiClient, jobs: int) -> None:
    """Let the first burst go: what is left of it would slow the second down."""
    for number in range(jobs):
        path = f"/apis/batch/v1/namespaces/bare/jobs/bare-{number}"
        api.send("DELETE", path, body={"propagationPolicy": "Background"})
    wait(lambda: not api.items("Pod", "bare"), "the pods of the first burst to go")


def wait(condition: Callable[[], bool], what: str) -> None:
    """Poll until something holds."""
    until = time.monotonic() + WITHIN
    while not condition():
        if time.monotonic() > until:
            raise TimeoutError(f"waited {WITHIN:.0f} s for {what}")
        time.sleep(POLL)


def bare_job(number: int) -> Document:
    """A Job like those that the operator makes."""
    spec = {**template()["spec"], "backoffLimit": 0}
    spec["template"]["spec"].setdefault("restartPolicy", "Never")
    meta = {"name": f"bare-{number}", "namespace": "bare"}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": meta, "spec": spec}


def agent_job(number: int) -> Document:
    """The same as an AgentJob."""
    return {
        "apiVersion": "agentjobs.dev/v1alpha1",
        "kind": "AgentJob",
        "metadata": {"name": f"ours-{number}", "namespace": "ours"},
        "spec": {"template": template()},
    }


def is_complete(job: Document) -> bool:
    """Whether a Job is over."""
    conditions = (job.get("status") or {}).get("conditions") or ()
    return any(each["type"] == "Complete" and each["status"] == "True" for each in conditions)


def is_done(job: Document) -> bool:
    """Whether an AgentJob is over."""
    return (job.get("status") or {}).get("state") == "done"
