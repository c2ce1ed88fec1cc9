"""How every cause is provoked: the jobs of `causes.py`, and what is done to them."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from tests.apiclient import path_of
from tests.cluster.local import LocalCluster
from tests.e2e.installed import InstalledGateway
from tests.e2e.platform import BUSYBOX, Platform
from tests.e2e.proof import LINE, MOUNT, Proof

Document = dict[str, Any]
OBEYS = "trap 'exit 0' TERM; sleep 600 & wait"
IGNORES = "trap '' TERM; while :; do sleep 1; done"
DIES = "trap 'exit 143' TERM; sleep 600 & wait"
KILLS_ITSELF = "kill -9 $$$$"
"""Kubernetes makes one dollar of two."""
FIRST_NODE = {"nodeSelector": {"kubernetes.io/hostname": "node1"}}
"""Where pods stay when they are over: the other node is tainted in the end."""
SECOND_NODE = {"nodeSelector": {"kubernetes.io/hostname": "node2"}}
NOWHERE = {"nodeSelector": {"kubernetes.io/hostname": "nowhere"}}
SEAT = "agentjobs.example.com/seat"
"""A resource of which a node has one, so that two pods that want it do not fit."""
ONCE_MORE = {"maxAttempts": 2, "causes": ["disruption"]}
NEVER_PULLED = {"image": "127.0.0.1:1/never:1"}
"""Of a registry whose port is closed."""
PENDING = 25
"""For a kubelet that has forty pods to start this is not long."""
PATIENCE = 90
POLL = 0.2


@dataclass(frozen=True)
class Story:
    """Where everything happens, each in its own namespace."""

    here: Platform
    policed: Platform
    """Policies refuse what is made here."""
    locked: Platform
    """Pod Security `restricted`."""
    full: Platform
    """Out of quota."""
    proof: Proof

    def of(self, name: str) -> Platform:
        """The namespace of a case."""
        places = {
            "policy-on-pods": self.policed,
            "policy-on-jobs": self.policed,
            "pod-security": self.locked,
            "quota-in-vain": self.full,
        }
        return places.get(name, self.here)


@contextmanager
def provoked(platform: Platform, cluster: LocalCluster) -> Iterator[Story]:
    """Everything is created at once, then disturbed."""
    here = platform.in_namespace()
    places = (platform.in_namespace() for _ in range(3))
    story = Story(here, *places, Proof(cluster, here.namespace))
    with ExitStack() as stack:
        stack.enter_context(policies(story.policed))
        stack.enter_context(priority(here))
        begin(story)
        disturb(story)
        yield story
        for place in (story.here, story.policed, story.locked, story.full):
            place.kubectl("delete", "agentjobs", "--all", "--wait=false")


def begin(story: Story) -> None:
    here = story.here
    story.locked.kubectl(
        *("label", "namespace", story.locked.namespace),
        "pod-security.kubernetes.io/enforce=restricted",
    )
    story.full.kubectl("create", "quota", "no-room", "--hard=pods=0")
    story.policed.create(
        *(story.policed.job(f"policy-on-{resource}", "exit 0") for resource in ("pods", "jobs"))
    )
    story.locked.create(story.locked.job("pod-security", "exit 0"))
    story.full.create(
        story.full.job("quota-in-vain", "exit 0", pendingDeadlineSeconds=PENDING),
        story.full.job("quota-freed", "exit 0"),
    )
    here.create(*disturbed(story), *by_themselves(here), *several(here), tool("some-tool"))
    here.cluster.kubectl(
        *("--namespace", here.namespace, "--as", InstalledGateway.ACCOUNT, "create", "-f", "-"),
        input_text=json.dumps(declined(here)),
    )


def disturbed(story: Story) -> list[Document]:
    """Jobs that run until something is done to them."""
    here, proof = story.here, story.proof
    told = f"{LINE}; {OBEYS}"
    again = f'{LINE}; [ "$AGENTJOBS_ATTEMPT" = 2 ] && exit 0; {OBEYS}'
    seat = {"resources": {"requests": {SEAT: 1}, "limits": {SEAT: 1}}}
    return [
        here.job("evicted", told, pod=proof.pod()),
        here.job("evicted-stubborn", IGNORES),
        here.job("evicted-again", again, pod=proof.pod(), retry=ONCE_MORE),
        here.job("drained", OBEYS, pod=SECOND_NODE),
        here.job("drained-before", LINE, pod=waits_once(proof) | SECOND_NODE),
        here.job("drained-unpulled", "exit 0", pod={"container": NEVER_PULLED, **SECOND_NODE}),
        here.job("preempted", OBEYS, pod={"container": seat, **SECOND_NODE}),
        here.job("job-deleted", OBEYS),
        here.job("pod-deleted", OBEYS),
        here.job("pod-force-deleted", IGNORES),
        here.job("pending-pod-deleted", "exit 0", pod=NOWHERE),
    ]


def waits_once(proof: Proof) -> Document:
    """A pod whose init container never ends in the first attempt, and at once in the second."""
    pod = proof.pod()
    mark = f"{MOUNT}/waited"
    script = f"[ -e {mark} ] && exit 0; touch {mark}; {OBEYS}"
    return {**pod, "initContainers": [beside(script, **pod["container"])]}


def by_themselves(here: Platform) -> list[Document]:
    """Jobs that nobody has to disturb."""
    scratch = {"emptyDir": {"sizeLimit": "1Mi"}}
    mount = {"volumeMounts": [{"name": "scratch", "mountPath": "/scratch"}]}
    absent = {"image": "docker.io/local/absent:1", "imagePullPolicy": "Never"}
    missing = {"envFrom": [{"configMapRef": {"name": "missing"}}]}
    nowhere = {"volumeMounts": [{"name": "nowhere", "mountPath": "/nowhere"}]}
    return [
        here.job("init-fails", "exit 0", pod={"initContainers": [beside("exit 5", "before")]}),
        here.job("dependency-fails", "exit 0", dependsOn=[{"name": "init-fails"}]),
        # Not the first process of its namespace, which no signal from inside can kill.
        here.job("killed-without-proof", KILLS_ITSELF, pod={"shareProcessNamespace": True}),
        here.job(
            "never-pulled",
            "exit 0",
            pod={"container": NEVER_PULLED},
            pendingDeadlineSeconds=PENDING,
        ),
        here.job(
            "no-configmap", "exit 0", pod={"container": missing}, pendingDeadlineSeconds=PENDING
        ),
        here.job("misnamed-image", "exit 0", pod={"container": {"image": "local/UPPER:1"}}),
        here.job("absent-image", "exit 0", pod={"container": absent}),
        here.job("refused-template", "exit 0", pod={"container": nowhere}),
        here.job("no-such-command", "exit 0", pod={"container": {"command": ["/no/such/command"]}}),
        here.job(
            "overfull",
            f"head -c 8000000 /dev/zero > /scratch/fill; {DIES}",
            pod={"volumes": [{"name": "scratch", **scratch}], "container": mount},
            retry=ONCE_MORE,
        ),
    ]


def several(here: Platform) -> list[Document]:
    """Jobs of several containers, and of several pods."""
    sidecar = {"initContainers": [beside(IGNORES, restartPolicy="Always")]} | FIRST_NODE
    lingers = here.job("lingers-after-failure", "exit 6", pod=FIRST_NODE)
    containers_of(lingers).append(beside(OBEYS))
    annotated = here.job("second-is-the-tool", OBEYS, pod=FIRST_NODE)
    containers_of(annotated).append(beside("echo mine > /dev/termination-log; exit 0"))
    annotated["spec"]["template"]["spec"]["template"]["metadata"] = {
        "annotations": {"kubectl.kubernetes.io/default-container": "beside"}
    }
    indexed = here.job("index-fails", f'[ "$JOB_COMPLETION_INDEX" = 1 ] && exit 7; {OBEYS}')
    parallel = here.job("parallel", "exit 0")
    stopped = here.job("parallel-stopped", OBEYS)
    of_job(indexed).update(completions=3, parallelism=3, completionMode="Indexed")
    for job in (parallel, stopped):
        of_job(job).update(completions=2, parallelism=2)
    return [
        here.job("sidecar-outlives", "echo mine > /dev/termination-log", pod=sidecar),
        here.job("sidecar-outlives-failure", "exit 4", pod=sidecar),
        *(lingers, annotated, indexed, parallel, stopped),
    ]


def beside(script: str, name: str = "beside", **more: Any) -> Document:
    command = ["sh", "-c", script]
    usual = {"name": name, "image": BUSYBOX, "imagePullPolicy": "IfNotPresent"}
    return {**usual, "command": command, **more}


def of_job(body: Document) -> Document:
    """The spec of the Job that an AgentJob asks for."""
    spec: Document = body["spec"]["template"]["spec"]
    return spec


def containers_of(body: Document) -> list[Document]:
    found: list[Document] = of_job(body)["template"]["spec"]["containers"]
    return found


def tool(name: str) -> Document:
    pod = {"containers": [beside("exit 0", "tool")]}
    return {
        "apiVersion": "agentjobs.dev/v1alpha1",
        "kind": "AgentTool",
        "metadata": {"name": name},
        "spec": {"description": "Does nothing.", "template": {"spec": {"template": {"spec": pod}}}},
    }


def declined(here: Platform) -> Document:
    spec = {
        "toolRef": {"name": "some-tool", "kind": "AgentTool"},
        "stop": {"reason": "not today", "declined": True},
        "callback": {"url": here.receiver.url},
    }
    return {
        "apiVersion": "agentjobs.dev/v1alpha1",
        "kind": "AgentJob",
        "metadata": {"name": "declined"},
        "spec": spec,
    }


@contextmanager
def policies(here: Platform) -> Iterator[None]:
    """Refuse the pods of one job and the Job of another, in this namespace."""
    group = "admissionregistration.k8s.io/v1"
    documents: list[Document] = []
    for name, api, resource, message in (
        ("no-pods", "", "pods", "no pods today"),
        ("no-jobs", "batch", "jobs", "no Jobs today"),
    ):
        rule = {
            "apiGroups": [api],
            "apiVersions": ["v1"],
            "operations": ["CREATE"],
            "resources": [resource],
        }
        label = "object.metadata.labels['agentjobs.dev/job']"
        policy = {
            "failurePolicy": "Fail",
            "matchConstraints": {"resourceRules": [rule]},
            "validations": [
                {"expression": f"{label} != 'policy-on-{resource}'", "message": message}
            ],
        }
        place = {"matchLabels": {"kubernetes.io/metadata.name": here.namespace}}
        binding = {
            "policyName": name,
            "validationActions": ["Deny"],
            "matchResources": {"namespaceSelector": place},
        }
        for kind, spec in (
            ("ValidatingAdmissionPolicy", policy),
            ("ValidatingAdmissionPolicyBinding", binding),
        ):
            meta = {"name": name}
            documents.append({"apiVersion": group, "kind": kind, "metadata": meta, "spec": spec})
    kinds = [f"{each['kind']}/{each['metadata']['name']}" for each in documents]
    here.create(*documents)
    try:
        wait_until("the policies are in force", lambda: refuses(here))
        yield
    finally:
        here.kubectl("delete", "--ignore-not-found", *kinds)


def refuses(here: Platform) -> bool:
    """Whether both policies are in force: the API server compiles them after a while."""
    labels = ({"kind": "Pod", "what": "pods"}, {"kind": "Job", "what": "jobs"})
    codes = []
    for each in labels:
        meta = {
            "name": "probe",
            "namespace": here.namespace,
            "labels": {"agentjobs.dev/job": f"policy-on-{each['what']}"},
        }
        pod = {"restartPolicy": "Never", "containers": [beside("exit 0", "tool")]}
        body: Document = {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": pod}
        if each["kind"] == "Job":
            body |= {"apiVersion": "batch/v1", "kind": "Job", "spec": {"template": {"spec": pod}}}
        path = path_of(each["kind"], here.namespace)
        codes.append(here.api.send("POST", path, body, query={"dryRun": "All"}).code)
    return all(code in {403, 422} for code in codes)


@contextmanager
def priority(here: Platform) -> Iterator[None]:
    """A PriorityClass, and one seat on the second node."""
    name = f"causes-{here.namespace}"
    pointer = f"/status/capacity/{SEAT.replace('/', '~1')}"
    patch = json.dumps([{"op": "add", "path": pointer, "value": "1"}])
    here.kubectl("patch", "node", "node2", "--subresource=status", "--type=json", "-p", patch)
    here.kubectl("create", "priorityclass", name, "--value=1000")
    try:
        yield
    finally:
        here.kubectl("delete", "priorityclass", name)


def disturb(story: Story) -> None:
    here = story.here
    running = ("evicted", "evicted-stubborn", "evicted-again", "drained", "preempted")
    deleted = ("job-deleted", "pod-deleted", "pod-force-deleted", "parallel-stopped")
    here.wait_for_all((*running, *deleted), ["running"], seconds=PATIENCE)
    for name in ("evicted", "evicted-stubborn", "evicted-again"):
        evict(here, name)
    delete_by_hand(here)
    here.stop("parallel-stopped")
    seat = {"resources": {"requests": {SEAT: 1}, "limits": {SEAT: 1}}}
    above = {"priorityClassName": f"causes-{here.namespace}", "container": seat}
    here.create(here.job("above", "exit 0", pod=above))
    drain(here)
    free_quota(story.full)
    taint(here)


def evict(here: Platform, name: str) -> None:
    (pod,) = here.pods_of(name)
    meta = {"name": pod["metadata"]["name"], "namespace": here.namespace}
    body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": meta}
    path = path_of("Pod", here.namespace, meta["name"])
    here.api.send("POST", f"{path}/eviction", body).object()


def delete_by_hand(here: Platform) -> None:
    here.kubectl("delete", "job", "job-deleted-1", "--wait=false")
    for name, *how in (
        ("pod-deleted", "--wait=false"),
        ("pod-force-deleted", "--force", "--grace-period=0"),
        ("pending-pod-deleted", "--wait=false"),
    ):
        (pod,) = here.pods_of(name)
        here.kubectl("delete", "pod", pod["metadata"]["name"], *how)


def drain(here: Platform) -> None:
    """Drain the second node of the jobs that are about it, and let it be used again."""
    wait_until("an init container runs", lambda: runs_init(here, "drained-before"))
    wait_until("an image is missing", lambda: waits_for(here, "drained-unpulled", "image_pull"))
    names = "drained, drained-before, drained-unpulled"
    selector = f"agentjobs.dev/job in ({names})"
    here.kubectl("drain", "node2", "--pod-selector", selector, "--timeout=60s")
    try:
        for name in ("drained-before", "drained-unpulled"):
            waits = partial(waits_for, here, name, "unschedulable")
            wait_until(f"{name} waits for the node", waits)
    finally:
        here.kubectl("uncordon", "node2")
    wait_until("it is pulled again", lambda: waits_for(here, "drained-unpulled", "image_pull"))
    here.stop("drained-unpulled")


def waits_for(here: Platform, name: str, code: str) -> bool:
    status = here.api.get("AgentJob", here.namespace, name).object().get("status", {})
    return bool(status.get("waiting", {}).get("code") == code)


def runs_init(here: Platform, name: str) -> bool:
    found = [
        each["state"]
        for pod in here.pods_of(name)
        for each in pod["status"].get("initContainerStatuses", ())
    ]
    return any("running" in state for state in found)


def free_quota(full: Platform) -> None:
    """Give room when one has waited in vain, and the other one still waits."""
    full.wait_for("quota-in-vain", seconds=PATIENCE)
    assert waits_for(full, "quota-freed", "quota_exceeded"), full.status("quota-freed")
    patch = json.dumps({"spec": {"hard": {"pods": "5"}}})
    full.kubectl("patch", "resourcequota", "no-room", "--type=merge", "-p", patch)


def taint(here: Platform) -> None:
    """Last, when nobody else is left on the second node."""
    others = ("overfull", "drained-before", "drained-unpulled", "above", "evicted-again")
    here.wait_for_all(others, seconds=PATIENCE)
    here.create(here.job("tainted", OBEYS, pod=SECOND_NODE))
    here.wait_for("tainted", ["running"])
    here.kubectl("taint", "node", "node2", "agentjobs.example.com/away:NoExecute")
    try:
        here.wait_for("tainted")
    finally:
        here.kubectl("taint", "node", "node2", "agentjobs.example.com/away:NoExecute-")


def wait_until(what: str, holds: Callable[[], bool], seconds: float = 60) -> None:
    until = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < until, f"not after {seconds} s: {what}"
        time.sleep(POLL)
