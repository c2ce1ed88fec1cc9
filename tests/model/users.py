"""What users do: they create, stop and delete AgentJobs, and meddle with what is not theirs."""

from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from agentjobs.api.agentjob import AgentJob
from agentjobs.contract.calls import AskReport
from agentjobs.domain.questions import question_of
from agentjobs.kube import AGENTJOBS, INPUTREQUESTS, JOBS, PODS
from tests.model.apiserver import Json
from tests.model.kubelets import NAMESPACE
from tests.model.stage import Stage, picked, some, which
from tests.model.wishes import OF_TOOLS, PLAIN, RETRIES, SPECS, wished

NAMES = ("index", "crawl", "build", "audit", "merge", "prune")
CREATIONS = 10

specs = st.integers(0, len(SPECS) - 1)
retries = st.integers(0, len(RETRIES) - 1)


class Users(Stage):
    @initialize(spec=specs, retry=retries, steps=st.integers(0, 3))
    def it_begins(self, spec: int, retry: int, steps: int) -> None:
        """Somebody creates an AgentJob, and something becomes of it before trouble begins."""
        self.somebody_creates(spec, retry, again=False)
        for _ in range(steps):
            self.processes[0].run()
            self.cluster.run(rounds=1)

    # --- users

    @rule(spec=specs, retry=retries, again=st.booleans())
    def somebody_creates(self, spec: int, retry: int, *, again: bool) -> None:
        """Create one, under a new name or under one that was there before."""
        with self._step("creations"):
            if self._created < CREATIONS:
                name = NAMES[0 if again else self._created % len(NAMES)]
                self.cluster.create(name, **wished(spec, retry))
                self._created += 1

    @rule(tool=st.integers(0, len(OF_TOOLS) - 1), several=st.integers(2, 4), number=which)
    def several_want_a_tool(self, tool: int, several: int, number: int) -> None:
        """More than there are slots; one that waits for something else may come first."""
        with self._step("crowds"):
            for one in range(several):
                spec = len(PLAIN) + (tool if one == 0 else tool % 3)
                self.somebody_creates(spec, one, again=False)
            self._working(number).get_so_far(several)

    @rule(number=some, name=st.integers(0, len(NAMES) - 1))
    def somebody_intervenes(self, number: int, name: int) -> None:
        with self._step("interventions"):
            if number < 3:
                self.cluster.stop(NAMES[name])
            elif number < 4:
                self._suspend_or_resume(NAMES[name])
            elif number < 7:
                self.server.delete(AGENTJOBS, NAMESPACE, NAMES[name])
            elif number < 8:
                self.cluster.lower_deadline(NAMES[name], 15)
            else:
                self._by_hand(number - 8, name)

    def _suspend_or_resume(self, name: str) -> None:
        if self.server.get(AGENTJOBS, NAMESPACE, name)["spec"].get("suspend"):
            self.cluster.let_begin(name)
        elif self.cluster.hold_back(name):
            self.counts["jobs held back"] += 1

    @rule(number=some, kind=st.integers(0, 5))
    def a_tool_asks_or_is_answered(self, number: int, kind: int) -> None:
        """It asks while it runs, or in its last moment; maybe what it has asked before."""
        with self._step("questions and answers"):
            if kind < 3:
                self._ask(number, seconds=(2, 30, 400)[kind], again=kind == 2)
            elif kind == 3:
                self._answer(number, "declined")
            else:
                self._ask(number, seconds=2, again=False)
                self._answer_in_the_last_moment(number)

    def _answer_in_the_last_moment(self, number: int) -> None:
        """An operator is about to say that it has expired."""
        leader = self._working(number % 2)
        leader.run()
        self._pass(3)
        leader.get_so_far(number % 3)
        self._answer(-1, "answered")

    def _ask(self, number: int, *, seconds: int, again: bool) -> None:
        jobs = [each for each in self.server.all(AGENTJOBS) if "startedAt" in each["status"]]
        job = picked(jobs, number)
        if job:
            self.counts["questions"] += 1
            key = "again" if again else f"q{self.counts['questions']}"
            asked = AskReport(key=key, prompt="?", expires_seconds=seconds)
            body = question_of(AgentJob.from_json(job), asked, self.clock.now())
            self.server.create(INPUTREQUESTS, NAMESPACE, body)

    def _answer(self, number: int, outcome: str) -> None:
        asked = [each for each in self.server.all(INPUTREQUESTS) if "status" not in each]
        question = picked(asked, number)
        if question:
            self.counts["answers"] += 1
            status = {"outcome": outcome, "answeredBy": "somebody"}
            name = question["metadata"]["name"]
            self.server.patch(INPUTREQUESTS, NAMESPACE, name, {"status": status}, "status")

    def _newest(self) -> int:
        return (self._created - 1) % len(NAMES)

    def _delete_job_of_newest(self) -> None:
        name = f"{NAMES[self._newest()]}-1"
        if name in [job["metadata"]["name"] for job in self._recorded_jobs()]:
            self.counts["Jobs deleted by hand"] += 1
            self.server.delete(JOBS, NAMESPACE, name)

    def _by_hand(self, number: int, name: int) -> None:
        """Somebody deletes what belongs to the operator."""
        job, pod = picked(self._recorded_jobs(), name), picked(self.server.all(PODS), name)
        if number < 2 and job:
            self.counts["Jobs deleted by hand"] += 1
            self.server.delete(JOBS, NAMESPACE, job["metadata"]["name"])
        elif pod:
            self.counts["pods deleted by hand"] += 1
            grace = 0 if number == 3 else None
            self.server.delete(PODS, NAMESPACE, pod["metadata"]["name"], grace=grace)

    def _recorded_jobs(self) -> list[Json]:
        """Jobs that are on record as seen.

        Of another one, deleted by hand before the record and the death of the leader that made
        it, a new leader cannot know; that history is not among these.
        """
        recorded = {
            attempt.get("jobUID")
            for body in self.server.all(AGENTJOBS)
            for attempt in (body["status"].get("attempts") or ())
        }
        return [job for job in self.server.all(JOBS) if job["metadata"]["uid"] in recorded]
