"""All histories that can be told of a few AgentJobs: hypothesis schedules every move and fault."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar
from unittest import mock

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from agentjobs import passes
from agentjobs.kube import AGENTJOBS, JOBS, PODS, KubeError
from tests.model.apiserver import Json
from tests.model.cluster import Cluster
from tests.model.kubelets import DISRUPTIONS, NAMESPACE, NODE_NAMES
from tests.model.process import IN_FLIGHT_SECONDS, TERMS, Process, Request
from tests.model.truth import RuleBroken
from tests.model.wishes import (
    EXITS,
    LIMITED,
    OF_TOOLS,
    PLAIN,
    RETRIES,
    SPECS,
    SUSPENDED,
    TOOLS,
    wished,
)

T = TypeVar("T")

NAMES = ("index", "crawl", "build", "audit", "merge")
CREATIONS = 9
REPLIES = ("taken", "taken", "failed", "gone", "unreachable", "taken, then the process dies")
PAUSES = (0.5, 1, 1, 2, 5, 12, 35, 130, 310)
PAUSE_OF_RETRIES = 11
DRAIN_SECONDS = 3000
DRAIN_ROUNDS = 500

some = st.integers(0, 11)
which = st.integers(0, 1)
specs = st.integers(0, len(SPECS) - 1)
retries = st.integers(0, len(RETRIES) - 1)
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

    @rule(number=which, trouble=st.integers(0, 4), gated=st.booleans(), rounds=st.integers(0, 2))
    def a_slot_is_fought_for(self, number: int, trouble: int, rounds: int, *, gated: bool) -> None:
        """Who came first may begin only while the claim of another is on its way (R-SLOTS)."""
        with self._step("fights for a slot"):
            if self._created + 2 > CREATIONS:
                return
            leader = self._working(number)
            for uid in self.kubelets.running():
                self.kubelets.ends(uid, *EXITS[0])
            self._go_on_with(leader)
            self.somebody_creates(SUSPENDED if gated else LIMITED, 0, again=False)
            first = NAMES[self._newest()]
            leader.run()
            self._pass(1)
            self.somebody_creates(LIMITED, 0, again=False)
            leader.get_so_far(1)
            claim = leader.request_of(NAMES[self._newest()])
            self.cluster.let_begin(first)
            if claim and trouble == 3:
                leader.frozen = True
                leader = self._other(leader)
                self._take_over(leader)
                leader.know_all()
            elif claim:
                self._trouble_request(leader, claim, trouble)
                leader.learn_of_trouble()
            for _ in range(rounds):
                # The watch tells of the one before it tells of the other.
                leader.attend_to(first)
            for request in (r for process in self.processes for r in process.requests()):
                request.carry_out()
            leader.run()

    def _other(self, process: Process) -> Process:
        return next(each for each in self.processes if each is not process)

    def _go_on_with(self, leader: Process) -> None:
        self.cluster.run()
        leader.run()

    def _trouble_request(self, process: Process, request: Request, kind: int) -> None:
        if kind == 0:
            self.counts["requests lost"] += 1
            request.lose()
        elif kind == 1:
            self.counts["answers lost"] += 1
            request.carry_out()
            request.lose()
        elif kind == 2:
            self.counts["requests given up"] += 1
            process.zombies.append(request.time_out())

    @rule(number=some, name=st.integers(0, len(NAMES) - 1))
    def somebody_intervenes(self, number: int, name: int) -> None:
        with self._step("interventions"):
            if number < 3:
                self.cluster.stop(NAMES[name])
            elif number < 4:
                self.cluster.let_begin(NAMES[name])
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
            move = _picked(self.cluster.single_moves(), number)
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
            pod = _picked(self.server.all(PODS), number)
            if how == 4:
                self.server.full = not self.server.full
            elif pod:
                self._trouble(pod["metadata"]["uid"], how)

    @rule(number=some, how=st.integers(0, len(DISRUPTIONS) - 1))
    def a_pod_is_disrupted(self, number: int, how: int) -> None:
        """The cluster needs its place, before its tool began or after."""
        with self._step("disruptions"):
            pod = _picked(self.server.all(PODS), number)
            if pod:
                self.kubelets.disrupt(pod["metadata"]["uid"], DISRUPTIONS[how])

    @rule(number=some, patient=st.booleans())
    def a_queue_decides(self, number: int, *, patient: bool) -> None:
        """Give a place or take it back."""
        with self._step("decisions of a queue"):
            job = _picked(self.cluster.queued(), number)
            if job and job["spec"].get("suspend"):
                self._admit(job, patient=patient)
            elif job:
                self.cluster.take_back(job)

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

    @rule(number=which, rounds=st.integers(0, 3), requests=st.integers(0, 4), how=st.integers(0, 3))
    def a_queue_changes_its_mind(self, number: int, rounds: int, requests: int, how: int) -> None:
        """It takes a place back from a tool that runs, or is about to, and gives it again."""
        with self._step("changes of a queue's mind"):
            if not self.cluster.queued():
                self.somebody_creates(4 if how % 2 else 8, how + rounds, again=False)
                self._working(number).run()
                self.cluster.run(rounds=1)
            for job in self.cluster.queued():
                self._admit(job, patient=True)
            self.cluster.run(rounds=rounds + 1)
            job = _picked(self.cluster.queued(), requests)
            if job and not job["spec"].get("suspend"):
                self._take_back_and_give(number, job, rounds, requests, how)

    def _take_back_and_give(
        self, number: int, job: Json, rounds: int, requests: int, how: int
    ) -> None:
        self.cluster.take_back(job)
        self.cluster.run(rounds=rounds)
        self._working(number).get_so_far(requests)
        if how == 1:
            self._working(number).die(late=rounds == 1)
        self._end_those_told_to_go()
        for _ in range(how):
            self._working(number).run()
            self.cluster.run(rounds=1)
        found = self.server.by_uid(JOBS, job["metadata"]["uid"])
        if found:
            self._admit(found, patient=how > 1)
            self.cluster.run(rounds=2)

    def _end_those_told_to_go(self) -> None:
        self.cluster.run(rounds=1)
        for uid in self.kubelets.running():
            if self.truth.containers[uid].told_to_go:
                self.kubelets.ends(uid, 143, "Error")
        self.cluster.run(rounds=1)

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
            self.somebody_creates(spec + self._created, spec * self._created, again=False)
        else:
            self._fail_a_tool(spec)
        self.cluster.run(rounds=1)

    def _fail_a_tool(self, how: int) -> None:
        """Let a tool fail, perhaps so long ago that it is about to begin again."""
        uid = _picked(self.kubelets.running(), how)
        if uid:
            self.kubelets.ends(uid, *EXITS[2 + how % 2])
            if how % 3:
                self.cluster.run(rounds=2)
                self._working(0).run()
                self._pass(PAUSE_OF_RETRIES)

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

    @rule(number=which, kind=st.integers(0, 5), choice=some, requests=st.integers(0, 4))
    def an_operator_has_trouble(self, number: int, kind: int, choice: int, requests: int) -> None:
        with self._step("troubles of operators"):
            process = self._working(number)
            if kind in {2, 3, 4}:
                self._give_work(requests, fresh=choice % 2 == 0)
                process.get_so_far(requests)
            front = _picked(process.fronts(), choice)
            request = _picked(process.requests(), choice)
            if kind == 0 and front:
                process.miss(front)
            elif kind == 1:
                process.see_again(choice)
            elif kind in {2, 3, 4} and request:
                self._trouble_request(process, request, kind - 2)
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
            new = self._other(old)
            self._give_work(act, fresh=fresh)
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
        self._take_over(new)
        new.run()

    def _take_over(self, new: Process) -> None:
        new.die()
        new.contend()
        self._pass(TERMS.lease + 1)
        new.contend()

    @rule(number=which, spec=st.sampled_from((0, 1, 3)), stopped=st.booleans())
    def a_claim_is_left_to_another(self, number: int, spec: int, *, stopped: bool) -> None:
        """A leader freezes between claim and creation; both are over when it goes on (R-CLAIM)."""
        with self._step("claims left to another"):
            old = self._working(number)
            new = self._other(old)
            self.somebody_creates(spec, 0, again=False)
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
            self.counts["limits exceeded by a claim that came late"] += self.truth.exceeded
            self.counts += self._attempts()
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
            # Of what is over nothing begins, whatever a queue does.
            self.cluster.admit(job)
        self.cluster.run()


def _picked(values: Sequence[T], number: int) -> T | None:
    return values[number % len(values)] if values else None


def _owes(job: Any) -> bool:
    outbox = job.status.callback
    return any(each.state == "pending" for each in outbox.deliveries) if outbox else False
