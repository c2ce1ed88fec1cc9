"""All histories that can be told of a few AgentJobs: hypothesis schedules every move and fault."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar
from unittest import mock

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from agentjobs import passes
from agentjobs.domain.verdict import OOM_KILLED
from agentjobs.kube import AGENTJOBS, JOBS, PODS, KubeError
from tests.model.apiserver import Json
from tests.model.cluster import NAMESPACE, NODE_NAMES, Cluster, is_queued
from tests.model.process import IN_FLIGHT_SECONDS, TERMS, Process
from tests.model.truth import RuleBroken

T = TypeVar("T")

CALLBACK = {"url": "https://agents.example.net/events"}
SPECS: tuple[Json, ...] = (
    {"deadlineSeconds": 60, "callback": CALLBACK},
    {"deadlineSeconds": 600, "callback": CALLBACK, "ttlSecondsAfterFinished": 0},
    {"deadlineSeconds": 20},
    {"deadlineSeconds": 90, "pendingDeadlineSeconds": 10, "callback": CALLBACK},
    {"deadlineSeconds": 120, "queueName": "batch", "callback": CALLBACK},
    {"deadlineSeconds": 30, "suspend": True, "callback": CALLBACK},
)
NAMES = ("index", "crawl", "build", "audit")
CREATIONS = 6
EXITS = (
    *((0, "Completed"), (0, "Completed"), (3, "Error"), (137, OOM_KILLED), (143, "Error")),
    (137, "Error"),
)
REPLIES = ("taken", "taken", "failed", "gone", "unreachable", "taken, then the process dies")
PAUSES = (0.5, 1, 1, 2, 5, 12, 35, 130, 310)
DRAIN_SECONDS = 3000
DRAIN_ROUNDS = 500

some = st.integers(0, 11)
which = st.integers(0, 1)
total: Counter[str] = Counter()
"""What happened over all histories."""


class Histories(RuleBasedStateMachine):
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
        self.server.before_a_job_goes = self._carry_out_all
        self.counts: Counter[str] = Counter(histories=1)
        self._created = 0
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

    @initialize(spec=st.integers(0, len(SPECS) - 1), steps=st.integers(0, 3))
    def it_begins(self, spec: int, steps: int) -> None:
        """Somebody creates an AgentJob, and something becomes of it before trouble begins."""
        self.somebody_creates(spec, again=False)
        for _ in range(steps):
            self.processes[0].run()
            self.cluster.run(rounds=1)

    # --- users

    @rule(spec=st.integers(0, len(SPECS) - 1), again=st.booleans())
    def somebody_creates(self, spec: int, *, again: bool) -> None:
        """Create one, under a new name or under one that was there before."""
        with self._step("creations"):
            if self._created < CREATIONS:
                name = NAMES[0 if again else self._created % len(NAMES)]
                self.cluster.create(name, **SPECS[spec])
                self._created += 1
                self.cluster.jobs.forgiving = spec % 2 == 0

    @rule(number=some, name=st.integers(0, len(NAMES) - 1))
    def somebody_intervenes(self, number: int, name: int) -> None:
        with self._step("interventions"):
            if number < 4:
                self.cluster.stop(NAMES[name])
            elif number < 7:
                self.server.delete(AGENTJOBS, NAMESPACE, NAMES[name])
            elif number < 8:
                self.cluster.lower_deadline(NAMES[name], 15)
            else:
                self._by_hand(number - 8, name)

    def _newest(self) -> int:
        return (self._created - 1) % len(NAMES)

    def _delete_job_of_newest(self) -> None:
        name = f"{NAMES[self._newest()]}-1"
        if name in [job["metadata"]["name"] for job in self._recorded_jobs()]:
            self.counts["Jobs deleted by hand"] += 1
            self.server.delete(JOBS, NAMESPACE, name)

    def _by_hand(self, number: int, name: int) -> None:
        """Somebody deletes what belongs to the operator."""
        job, pod = _picked(self._recorded_jobs(), name), _picked(self.server.all(PODS), name)
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

    # --- the cluster

    @rule(number=st.integers(0, 40))
    def one_controller_moves(self, number: int) -> None:
        with self._step("single moves of the cluster"):
            move = _picked(self.cluster.moves(), number)
            if move:
                move()

    @rule()
    def controllers_catch_up(self) -> None:
        with self._step("catching up of the cluster"):
            self.cluster.run()

    @rule(number=some, how=st.integers(0, len(EXITS) - 1))
    def a_tool_ends(self, number: int, how: int) -> None:
        with self._step("exits"):
            uid = _picked(self.kubelets.running(), number)
            if uid:
                self.kubelets.ends(uid, *EXITS[how])

    @rule(number=some, how=st.integers(0, 4))
    def a_pod_has_trouble(self, number: int, how: int) -> None:
        with self._step("troubles of pods"):
            queued = [job for job in self.server.all(JOBS) if is_queued(job)]
            pod = _picked(self.server.all(PODS), number)
            if queued and how < 3:
                self.cluster.admit(queued[number % len(queued)]["metadata"]["name"])
            elif how == 4:
                self.server.full = not self.server.full
            elif pod:
                self._trouble(pod["metadata"]["uid"], how)

    def _trouble(self, uid: str, how: int) -> None:
        reasons = self.kubelets.unpullable
        if how == 0:
            self.kubelets.fails_to_start(uid)
        elif how == 1:
            reasons[uid] = "" if uid in reasons else "ErrImagePull"
            if not reasons[uid]:
                del reasons[uid]
        elif how == 2:
            reasons[uid] = "InvalidImageName"
        else:
            self.kubelets.unschedulable ^= {uid}

    @rule(number=some)
    def a_node_has_trouble(self, number: int) -> None:
        with self._step("troubles of nodes"):
            node = NODE_NAMES[number % 2]
            if number < 6:
                self.kubelets.cut(node)
            elif number < 10:
                self.kubelets.mend(node)
            else:
                self.kubelets.remove(node)

    @rule(pause=st.sampled_from(PAUSES), carried=st.booleans())
    def time_passes(self, pause: float, *, carried: bool) -> None:
        with self._step("pauses"):
            self._pass(pause, carried=carried)

    def _carry_out_all(self) -> None:
        for process in self.processes:
            for request in process.requests():
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

    # --- operators

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

    @rule(number=which, choice=st.integers(0, 40))
    def an_operator_moves(self, number: int, choice: int) -> None:
        with self._step("single moves of operators"):
            move = _picked(self._working(number).moves(), choice)
            if move:
                move()

    @rule(number=which, requests=st.integers(0, 4), fresh=st.booleans())
    def an_operator_gets_so_far(self, number: int, requests: int, *, fresh: bool) -> None:
        """It sees all that is there to be seen, and stands amid its passes."""
        with self._step("passes left half done"):
            self._give_work(requests, fresh=fresh)
            self._working(number).get_so_far(requests)

    def _give_work(self, spec: int, *, fresh: bool) -> None:
        """Let something happen that an operator must act upon."""
        if fresh:
            self.somebody_creates(spec, again=False)
        self.cluster.run(rounds=1)

    @rule(number=which)
    def an_operator_catches_up(self, number: int) -> None:
        with self._step("catching up of operators"):
            self._working(number).run()

    @rule(number=which)
    def an_operator_contends(self, number: int) -> None:
        with self._step("contentions"):
            self.processes[number].contend()

    @rule(number=which)
    def all_goes_well(self, number: int) -> None:
        with self._step("times when all goes well"):
            for _ in range(3):
                self._working(number).run()
                self.cluster.run()

    @rule(number=which, kind=st.integers(0, 4), choice=some, requests=st.integers(0, 4))
    def an_operator_has_trouble(self, number: int, kind: int, choice: int, requests: int) -> None:
        with self._step("troubles of operators"):
            process = self._working(number)
            if kind in {2, 3}:
                self._give_work(requests, fresh=choice % 2 == 0)
                process.get_so_far(requests)
            front = _picked(process.fronts(), choice)
            request = _picked(process.requests(), choice)
            if kind == 0 and front:
                process.miss(front)
            elif kind == 1:
                process.see_again(choice)
            elif kind == 2 and request:
                self.counts["requests lost"] += 1
                request.lose()
            elif kind == 3 and request:
                self.counts["answers lost"] += 1
                request.carry_out()
                request.lose()
            else:
                process.begin_list()

    @rule(number=which, how=st.integers(0, 2), requests=st.integers(0, 4))
    def an_operator_dies(self, number: int, how: int, requests: int) -> None:
        """It dies with requests on their way, which were, were not, or are yet to be done."""
        with self._step("deaths"):
            self._give_work(requests, fresh=number == 0)
            process = self._working(number)
            process.get_so_far(requests)
            writes = [request for request in process.requests() if request.writes]
            if how == 0:
                for request in writes:
                    request.carry_out()
            self.counts["crashes"] += 1
            kind = ("after", "before", "during")[how]
            self.counts[f"crashes {kind} a write"] += bool(writes)
            process.die(late=how == 2)

    @rule(number=which, gone=st.booleans())
    def an_operator_freezes(self, number: int, *, gone: bool) -> None:
        """It stops where it stands, or only its Lease can reach the API server no more."""
        with self._step("freezes"):
            process = self.processes[number]
            if gone:
                process.cut_off = True
            elif process.life:
                process.frozen = True

    @rule(number=which)
    def an_operator_thaws(self, number: int) -> None:
        """It goes on where it stood; its passes are quicker than its Lease."""
        with self._step("thaws"):
            process = self.processes[number]
            process.cut_off = False
            if process.frozen:
                process.frozen = False
                busy = list(process.life.tasks) if process.life else []
                self.counts["former leaders that go on"] += bool(busy) and not process.lease.held
                for key in busy:
                    process.finish(key)
                process.time_has_passed()

    @rule(
        number=which,
        requests=st.integers(0, 4),
        rounds=st.integers(0, 2),
        act=some,
        fresh=st.booleans(),
        thaws=st.booleans(),
    )
    def the_other_takes_over(
        self, number: int, requests: int, rounds: int, act: int, *, fresh: bool, thaws: bool
    ) -> None:
        """A leader freezes amid its passes; the other one leads and goes on with its work."""
        with self._step("takeovers"):
            old = self._working(number)
            new = next(each for each in self.processes if each is not old)
            self._give_work(act % len(SPECS), fresh=fresh)
            if act % 2 and act < 8:
                self.somebody_intervenes(act, self._newest())
            old.get_so_far(requests, unanswered=act % 2 == 0)
            old.frozen = old.life is not None
            if act % 2 == 0 and act < 8:
                self.somebody_intervenes(act, self._newest())
            self._succeed(new)
            for _ in range(rounds):
                self.cluster.run()
                new.run()
            if rounds and act % 3 == 2:
                self._delete_job_of_newest()
                self.cluster.run()
                new.run()
        if thaws:
            self.an_operator_thaws(self.processes.index(old))

    def _succeed(self, new: Process) -> None:
        new.die()
        new.contend()
        self._pass(TERMS.lease + 1)
        new.contend()
        new.run()

    @rule(number=which, spec=st.sampled_from((0, 1, 3)), stopped=st.booleans())
    def a_claim_is_left_to_another(self, number: int, spec: int, *, stopped: bool) -> None:
        """A leader freezes between claim and creation; both are over when it goes on (R-CLAIM)."""
        with self._step("claims left to another"):
            old = self._working(number)
            new = next(each for each in self.processes if each is not old)
            self.somebody_creates(spec, again=False)
            # Finalizer and claim; then the creation is on its way, or not even sent.
            old.get_so_far(2 if stopped else 1, unanswered=not stopped)
            old.frozen = old.life is not None
            if stopped:
                self.cluster.stop(NAMES[self._newest()])
            self._succeed(new)
            self.cluster.run()
            new.run()
            if not stopped:
                self._delete_job_of_newest()
                self.cluster.run()
                new.run()
        self.an_operator_thaws(self.processes.index(old))

    @rule(number=which, choice=some, how=st.integers(0, len(REPLIES) - 1))
    def an_event_arrives(self, number: int, choice: int, how: int) -> None:
        with self._step("tries to deliver"):
            process = self._working(number)
            if process.life and not process.life.post.flying:
                self._end_a_tool(process)
            event = _picked(sorted(process.life.post.flying) if process.life else [], choice)
            if event and not process.frozen:
                process.deliver(event, REPLIES[how])

    def _end_a_tool(self, process: Process) -> None:
        """Let there be an end to tell of."""
        for uid in self.kubelets.running()[:1]:
            self.kubelets.ends(uid, *EXITS[0])
        self.cluster.run()
        process.run()

    # --- the end

    def teardown(self) -> None:
        try:
            if not self._broken:
                with self._told():
                    self._drain()
        finally:
            self._patch.stop()
            for process in self.processes:
                self.counts += process.counts
            self.counts["conflicts"] += self.server.answers[409]
            total.update(self.counts)

    def _drain(self) -> None:
        """One healthy leader goes on until all is over; then it has nothing left to do."""
        leader = self._only_leader()
        limit = self.clock.monotonic() + DRAIN_SECONDS
        for _ in range(DRAIN_ROUNDS):
            self._deliver_all(leader)
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


def _picked(values: Sequence[T], number: int) -> T | None:
    return values[number % len(values)] if values else None


def _owes(job: Any) -> bool:
    outbox = job.status.callback
    return any(each.state == "pending" for each in outbox.deliveries) if outbox else False
