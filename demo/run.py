"""Creates the two AgentJobs, shows them while they run, and prints what came out."""

import asyncio
import json
import shutil
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.cluster import Cluster, ClusterError
from tests.cluster.binaries import binary
from tests.cluster.console import step

from .agent import Agent
from .gateway import Gateway, forwarded
from .job import Job, from_object
from .logs import Followers
from .loop import talk
from .table import Display, Row

NAMESPACE = "agentjobs-demo"
RELEASE_NAMESPACE = "agentjobs-system"
AS_AGENT = f"kubectl -n {NAMESPACE} create token agent --audience=agentjobs"
MANIFESTS = Path(__file__).parent / "manifests"
AGENTJOBS = "agentjobs.agentjobs.dev"
"""The full name: the short one may be a category, which has the tools in it, too."""
DELETE_TIMEOUT = 110
TAKEN_TIMEOUT = 60.0
RUN_TIMEOUT = 720.0
"""Longer than the jobs' own deadline: the operator ends them before we give up."""
POLL_SECONDS = 1.0
READ_FAILURES = 5
"""Reads that may fail one after the other: a busy API server is slow at times."""


def create_jobs(cluster: Cluster) -> None:
    """Create the jobs; those of an earlier run are removed first, with all that they made."""
    if cluster.kubectl("--namespace", NAMESPACE, "get", AGENTJOBS, "--output", "name").strip():
        with step("removing the jobs of the last run"):
            delete = ["delete", AGENTJOBS, "--all", f"--timeout={DELETE_TIMEOUT}s"]
            try:
                cluster.kubectl("--namespace", NAMESPACE, *delete)
            except ClusterError as error:
                raise ClusterError(
                    f"{error}\nlook at: kubectl --namespace {NAMESPACE} describe aj"
                ) from error
    _wait_until_taken(cluster)
    cluster.kubectl("create", "--filename", MANIFESTS / "jobs.yaml")


def _wait_until_taken(cluster: Cluster) -> None:
    """Wait until the API server takes AgentJobs.

    For some seconds after the first install it answers 503: what fills in defaults
    (MutatingAdmissionPolicy) learns of a new kind later than the rest of it.
    """
    deadline = time.monotonic() + TAKEN_TIMEOUT
    while True:
        try:
            cluster.kubectl("create", "--dry-run=server", "--filename", MANIFESTS / "jobs.yaml")
        except ClusterError as error:
            if "ServiceUnavailable" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(POLL_SECONDS)
        else:
            return


def follow(cluster: Cluster, display: Display, followers: Followers) -> list[Job]:
    """Show the jobs until all are over; return them as they ended."""
    deadline, failures = time.monotonic() + RUN_TIMEOUT, 0
    jobs: list[Job] = []
    while not jobs or not all(job.over for job in jobs):
        if time.monotonic() > deadline:
            raise ClusterError(_stuck(jobs))
        try:
            jobs, failures = read_jobs(cluster), 0
        except ClusterError:
            failures += 1
            if failures > READ_FAILURES:
                raise
        display.show([_row(job, followers) for job in jobs])
        time.sleep(POLL_SECONDS)
    return jobs


def read_jobs(cluster: Cluster) -> list[Job]:
    """Return the demo's jobs as they are now."""
    text = cluster.kubectl("--namespace", NAMESPACE, "get", AGENTJOBS, "--output", "json")
    return [from_object(item) for item in json.loads(text)["items"]]


def report(jobs: Sequence[Job], followers: Followers) -> str:
    """Return what the jobs handed in, and the end of their logs."""
    parts: list[str] = []
    for job in jobs:
        ended = f"{job.state} after {job.seconds(datetime.now(UTC))} s"
        parts += ["", f"{job.name}: {ended}"]
        parts += [f"  cause: {job.cause}"] if job.cause else []
        parts += [f"  summary: {job.summary}"] if job.summary else []
        if job.result:
            parts += [f"  result ({job.result_source}):", *_indented(_pretty(job.result))]
        if job.pod_name:
            parts += ["  end of its log:", *_indented(followers.last_lines(job.pod_name))]
    return "\n".join(parts)


def next_commands(cluster: Cluster, jobs: Sequence[Job]) -> str:
    """Return commands to go on with, as they can be typed."""
    folder = binary("kubectl").parent
    commands = [
        f"export KUBECONFIG={cluster.kubeconfig}",
        *([] if shutil.which("kubectl") else [f"export PATH={folder}:$PATH"]),
        "kubectl get aj -A",
        f"kubectl -n {NAMESPACE} describe aj {jobs[0].name}",
        "kubectl explain aj.spec.deadlineSeconds",
        *(
            f"kubectl -n {NAMESPACE} logs {job.pod_name} --tail=5"
            for job in jobs[:1]
            if job.pod_name
        ),
        f"kubectl -n {RELEASE_NAMESPACE} port-forward service/agentjobs-gateway 8080 &",
        f"TOKEN=$({AS_AGENT})",
        'curl -H "Authorization: Bearer $TOKEN" "http://127.0.0.1:8080/v1/jobs?limit=3"',
        "make demo-down",
    ]
    return "\n".join(["", "What to try next:", *(f"  {command}" for command in commands)])


def call_the_gateway(cluster: Cluster, kubectl: Sequence[str]) -> bool:
    """Run jobs over HTTP; whether everything was as it should be."""
    token = cluster.kubectl(*AS_AGENT.split()[1:]).strip()
    _say("\nThe same over HTTP, as an agent does it (through kubectl port-forward):")
    with forwarded(kubectl, RELEASE_NAMESPACE) as port:
        kept = Agent(Gateway(port, token), _say).play()
        _say("\nAn agent that keeps talking while its jobs run (demo/loop.py, docs/inbox.md):")
        with TemporaryDirectory(prefix="agentjobs-demo-") as directory:
            url = f"http://127.0.0.1:{port}"
            talked = asyncio.run(talk(url, token, Path(directory), _say))
    return kept and talked


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def new_display() -> Display:
    """Return a display for this process's standard output."""
    width = shutil.get_terminal_size().columns
    return Display(stream=sys.stdout, terminal=sys.stdout.isatty(), width=width)


def _row(job: Job, followers: Followers) -> Row:
    started = job.pod_name and job.pod_phase in {"Running", "Succeeded", "Failed"}
    progress = followers.of(job.pod_name).progress if started else None
    percent, text = progress or (None, job.waiting)
    if job.over:
        percent, text = None, job.summary or job.cause
    return Row(
        job=job.name,
        state=job.state,
        pod=job.pod_phase,
        seconds=job.seconds(datetime.now(UTC)),
        percent=percent,
        text=text,
    )


def _stuck(jobs: Sequence[Job]) -> str:
    open_jobs = [job for job in jobs if not job.over]
    lines = [f"not over after {RUN_TIMEOUT:.0f} s:"]
    for job in open_jobs:
        lines.append(f"  {job.name} is {job.state}{job.waiting and f' ({job.waiting})'}; look at:")
        lines.append(f"    kubectl --namespace {NAMESPACE} describe agentjob {job.name}")
        if job.pod_name:
            lines.append(f"    kubectl --namespace {NAMESPACE} describe pod {job.pod_name}")
    lines.append("    kubectl --namespace agentjobs-system logs deployment/agentjobs-operator")
    return "\n".join(lines)


def _pretty(result: str) -> list[str]:
    try:
        return json.dumps(json.loads(result), indent=2, ensure_ascii=False).splitlines()
    except ValueError:
        return result.splitlines()


def _indented(lines: Sequence[str]) -> list[str]:
    return [f"    {line}" for line in lines]
