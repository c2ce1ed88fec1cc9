"""Where a history is told: the cluster, two operator processes, time, and how it ends."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar
from unittest import mock

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine

from agentjobs import passes
from agentjobs.kube import PODS, KubeError
from tests.model.apiserver import Json
from tests.model.audit import EXCEEDED, slots_in
from tests.model.cluster import Cluster
from tests.model.process import TERMS, Process
from tests.model.truth import RuleBroken
from tests.model.wire import IN_FLIGHT_SECONDS
from tests.model.wishes import EXITS, TOOLS

T = TypeVar("T")

DRAIN_SECONDS = 3000
DRAIN_ROUNDS = 500

some = st.integers(0, 11)
which = st.integers(0, 1)
total: Counter[str] = Counter()
"""What happened over all histories."""


class Stage(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.cluster = Cluster()
        self.server, self.truth = self.cluster.server, self.cluster.truth
        self.clock, self.kubelets = self.cluster.clock, self.cluster.kubelets
        self.processes = [
            Process(name, self.server, self.truth, self.clock) for name in ("first", "second")
        ]
        self._patch = mock.patch.object(passes, "utc_now", self.clock.now)
        self._patch.start()
        self._broken = False
        self.server.before_a_job_goes = self._carry_out_creations
        self.counts: Counter[str] = Counter(histories=1)
        self._created = 0
        for name, spec in TOOLS.items():
            self.cluster.offer(name, **spec)
        self.processes[0].contend()

    @contextmanager
    def _step(self, what: str) -> Iterator[None]:
        self.counts["steps"] += 1
        self.counts[what] += 1
        broken, self._broken = self._broken, True
        with self._told(), self._tolerant():
            yield
        self._broken = broken

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Add what was stored, write by write, to the message of a failure."""
        try:
            yield
        except Exception as error:
            error.add_note("\n".join(self.truth.story))
            raise

    @contextmanager
    def _tolerant(self) -> Iterator[None]:
        """Users and controllers come too late, or ask for what is refused."""
        try:
            yield
        except KubeError as error:
            if error.code not in {403, 404, 409, 422}:
                raise

    # --- time and leadership

    def _carry_out_creations(self) -> None:
        for process in self.processes:
            for request in process.requests():
                if request.verb == "create a Job":
                    request.carry_out()

    def _pass(self, seconds: float, *, carried: bool = True) -> None:
        limit = self.clock.monotonic() + seconds - IN_FLIGHT_SECONDS
        for process in self.processes:
            for request in process.requests():
                if request.sent_at < limit:
                    request.carry_out() if carried else request.lose()
            process.zombies = [request for request in process.zombies if not request.done]
        self.clock.move(seconds)
        for process in self.processes:
            process.time_has_passed()

    def _working(self, number: int) -> Process:
        """That process if it leads, else another that does; there is one before long."""
        both = (self.processes[number], self.processes[1 - number])
        for process in both:
            if process.life and not process.frozen:
                return process
        for process in both:
            if not process.frozen:
                process.contend()
                self._pass(TERMS.lease + 1)
                process.contend()
                return process
        return both[0]

    def _other(self, process: Process) -> Process:
        return next(each for each in self.processes if each is not process)

    def _go_on_with(self, leader: Process) -> None:
        self.cluster.run()
        leader.run()

    # --- places that a queue gives

    def _admit(self, job: Json, *, patient: bool) -> None:
        """Give a Job its place; a patient queue lets operators first know what has become of it."""
        uid = job["metadata"]["uid"]
        known = any(process.knows(job) for process in self.processes)
        if self.truth.begun_in(uid) and not known:
            if patient:
                return
            self.truth.placed_again.add(uid)
            self.counts["places given again too early"] += 1
        self.cluster.admit(job)

    # --- the end

    def teardown(self) -> None:
        try:
            if not self._broken:
                with self._told():
                    self._drain()
                    if slots_in(self.server.audit)[EXCEEDED]:
                        raise RuleBroken("R-SLOTS: a limit is exceeded, as the audit log has it")
        finally:
            self._patch.stop()
            for process in self.processes:
                self.counts += process.counts
            self.counts["conflicts"] += self.server.answers[409]
            self.counts["questions that expired"] += self.truth.closed["expired"]
            self.counts["questions withdrawn"] += self.truth.closed["withdrawn"]
            self.counts["claims beyond a limit, sent by a former leader"] += self.truth.exceeded
            self.counts += self._attempts()
            self.counts += slots_in(self.server.audit)
            total.update(self.counts)

    def _attempts(self) -> Counter[str]:
        """What became of attempts, for the record."""
        found: Counter[str] = Counter()
        for life in self.truth.lives.values():
            attempts = (life.job.status.attempts if life.job else None) or ()
            found["attempts after the first"] += max(len(attempts) - 1, 0)
            found["jobs that began more than once"] += len(life.starts) > 1
            found["jobs of limited tools that were claimed"] += bool(
                attempts and life.job and life.job.spec.tool_ref
            )
        return found

    def _drain(self) -> None:
        """One healthy leader goes on until all is over; then it has nothing left to do."""
        leader = self._only_leader()
        limit = self.clock.monotonic() + DRAIN_SECONDS
        for _ in range(DRAIN_ROUNDS):
            self._deliver_all(leader)
            self.truth.check_nobody_waits_in_vain()
            self.truth.check_states_tell_of_questions()
            self._let_others_go_on()
            if self._settled() or self.clock.monotonic() > limit:
                break
            self._pass(self._next_pause(leader))
            leader.begin_list()
        self.truth.check_all_is_over()
        self._check_rest(leader)

    def _only_leader(self) -> Process:
        for process in self.processes:
            process.die()
            for request in process.zombies:
                request.carry_out()
            process.zombies = []
        leader = self.processes[0]
        leader.contend()
        self._pass(TERMS.lease + 1)
        leader.contend()
        self.server.full = False
        return leader

    def _deliver_all(self, leader: Process) -> None:
        for _ in range(20):
            before = len(self.server.history)
            leader.run()
            with self._tolerant():
                self.cluster.run()
            flying = list(leader.life.post.flying) if leader.life else []
            for event in flying:
                leader.deliver(event, "taken")
            leader.run()
            if len(self.server.history) == before:
                return
        raise RuleBroken("R-LEVEL: operator and cluster never come to rest")

    def _let_others_go_on(self) -> None:
        """Tools that end and a queue that has room, in some histories."""
        if self._created % 2:
            for uid in self.kubelets.running():
                self.kubelets.ends(uid, *EXITS[0])
        if self._created % 3:
            for job in self.cluster.queued():
                self._admit(job, patient=True)

    def _settled(self) -> bool:
        for life in self.truth.lives.values():
            if life.gone:
                continue
            if life.end is None or life.deleted or _owes(life.job):
                return False
        return not any(container.running for container in self._within_reach())

    def _within_reach(self) -> Iterator[Any]:
        for pod in self.server.all(PODS):
            container = self.truth.containers.get(pod["metadata"]["uid"])
            must_go = container and container.told_to_go
            if must_go and pod["spec"].get("nodeName") not in self.kubelets.cut_off:
                yield container

    def _next_pause(self, leader: Process) -> float:
        now = self.clock.monotonic()
        due = [at - now for at in leader.life.queue.due.values()] if leader.life else []
        return min(max(min(due, default=20), 0.5), 20)

    def _check_rest(self, leader: Process) -> None:
        """R-LEVEL: where nothing happens nothing is written."""
        self._deliver_all(leader)
        before = leader.kube.writes
        for seconds in (1, 15, 60):
            self._pass(seconds)
            leader.begin_list()
            leader.run()
        if leader.kube.writes != before:
            raise RuleBroken("R-LEVEL: the operator writes though nothing happens any more")
        for job in self.cluster.queued():
            if job["spec"].get("suspend"):
                raise RuleBroken(f"a queue goes on counting {job['metadata']['name']}")
            # Of what is over nothing begins, whatever a queue does.
            self.cluster.take_back(job)
        self.cluster.run()
        for job in self.cluster.queued():
            self.cluster.admit(job)
        self.cluster.run()


def picked(values: Sequence[T], number: int) -> T | None:
    return values[number % len(values)] if values else None


def _owes(job: Any) -> bool:
    outbox = job.status.callback
    return any(each.state == "pending" for each in outbox.deliveries) if outbox else False
