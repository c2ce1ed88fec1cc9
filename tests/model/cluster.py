"""A cluster in memory, move by move: Job controller, garbage collector, scheduler, kubelets, users.

Every controller's work is cut into moves that may come in any order and as late as one likes.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

from agentjobs.api.names import API_VERSION, LABEL_QUEUE
from agentjobs.kube import AGENTJOBS, AGENTTOOLS, JOBS, PODS, NotFoundError
from tests.model.apiserver import ApiServer, Json
from tests.model.clock import Clock
from tests.model.jobcontroller import JobController, condition
from tests.model.kubelets import NAMESPACE, Kubelets, Move
from tests.model.truth import Truth

TEMPLATE: Json = {
    "spec": {
        "template": {"spec": {"containers": [{"name": "main", "image": "images.example.net/a:1"}]}}
    }
}


class Cluster:
    def __init__(self) -> None:
        self.clock = Clock()
        self.server = ApiServer(self.clock)
        self.truth = Truth(self.server, self.clock)
        self.kubelets = Kubelets(self.server, self.truth, self.clock)
        self.jobs = JobController(self.server, self.clock)

    def moves(self) -> list[Move]:
        """What controllers and kubelets could do next, exits of tools left out."""
        moves: list[Move] = [partial(self.jobs.sync, b) for b in self.server.all(JOBS)]
        moves += [partial(self.jobs.release, b) for b in self._ownerless_pods()]
        moves += [partial(self._collect, r, b) for r, b in self.server.orphans()]
        for pod in self.server.all(PODS):
            moves += self.kubelets.moves(pod)
        return moves

    def single_moves(self) -> list[Move]:
        """The same, and passes of the Job controller that fail halfway."""
        jobs = self.server.all(JOBS)
        return self.moves() + [partial(self.jobs.sync, b, recorded=False) for b in jobs]

    def run(self, rounds: int = 6) -> None:
        """Let everything but tools go on until nothing changes."""
        for _ in range(rounds):
            before = len(self.server.history)
            for move in self.moves():
                move()
            if len(self.server.history) == before:
                return

    def _ownerless_pods(self) -> Iterator[Json]:
        alive = {body["metadata"]["uid"] for body in self.server.all(JOBS)}
        for pod in self.server.all(PODS):
            if pod["metadata"]["ownerReferences"][0]["uid"] not in alive:
                yield pod

    def _collect(self, resource: Any, body: Json) -> None:
        meta = body["metadata"]
        try:
            self.server.delete(resource, meta["namespace"], meta["name"], meta["uid"])
        except NotFoundError:
            return

    # --- users

    def create(self, name: str, **spec: Any) -> None:
        what: Json = {} if "toolRef" in spec else {"template": TEMPLATE}
        body = {
            "apiVersion": API_VERSION,
            "kind": "AgentJob",
            "metadata": {"name": name},
            "spec": what | spec,
        }
        self.server.create(AGENTJOBS, NAMESPACE, body)

    def offer(self, name: str, **spec: Any) -> None:
        """Put a tool into the catalogue."""
        body = {
            "apiVersion": API_VERSION,
            "kind": "AgentTool",
            "metadata": {"name": name},
            "spec": {"description": "Does things.", "template": TEMPLATE} | spec,
        }
        self.server.create(AGENTTOOLS, NAMESPACE, body)

    def stop(self, name: str) -> None:
        self.server.patch(AGENTJOBS, NAMESPACE, name, {"spec": {"stop": {"reason": "enough"}}})

    def lower_deadline(self, name: str, seconds: int) -> None:
        spec = self.server.get(AGENTJOBS, NAMESPACE, name)["spec"]
        if seconds < spec.get("deadlineSeconds", 10**9):
            patch = {"spec": {"deadlineSeconds": seconds}}
            self.server.patch(AGENTJOBS, NAMESPACE, name, patch)

    def let_begin(self, name: str) -> None:
        """Lift the suspension of an AgentJob."""
        if self.server.get(AGENTJOBS, NAMESPACE, name)["spec"].get("suspend"):
            self.server.patch(AGENTJOBS, NAMESPACE, name, {"spec": {"suspend": False}})

    def hold_back(self, name: str) -> bool:
        """Suspend an AgentJob, where the API server allows that; return whether it was done."""
        found = self.server.get(AGENTJOBS, NAMESPACE, name)
        tool = found["status"].get("tool") or {}
        allowed = "startedAt" not in found["status"] or tool.get("repeatable", False)
        if allowed and not found["spec"].get("suspend"):
            self.server.patch(AGENTJOBS, NAMESPACE, name, {"spec": {"suspend": True}})
        return bool(allowed)

    # --- a queue, as Kueue is one

    def queued(self) -> list[Json]:
        """Jobs that a queue holds and that are not over."""
        return [
            job
            for job in self.server.all(JOBS)
            if LABEL_QUEUE in (job["metadata"].get("labels") or {})
            and not condition(job["status"], "Complete")
            and not condition(job["status"], "Failed")
        ]

    def admit(self, job: Json) -> None:
        """Give a Job its place, for the first time or again."""
        self._suspend(job, suspend=False)

    def take_back(self, job: Json) -> None:
        """Take the place of a Job back for another."""
        self._suspend(job, suspend=True)

    def _suspend(self, job: Json, *, suspend: bool) -> None:
        meta = job["metadata"]
        patch = {"metadata": {"uid": meta["uid"]}, "spec": {"suspend": suspend}}
        self.server.patch(JOBS, NAMESPACE, meta["name"], patch)
