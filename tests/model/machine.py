"""All histories that can be told of a few AgentJobs: hypothesis schedules every move and fault."""

from hypothesis import strategies as st
from hypothesis.stateful import rule

from tests.model.process import TERMS, WATCHED, Process
from tests.model.stage import picked, some, which
from tests.model.surroundings import Surroundings
from tests.model.users import CREATIONS, NAMES
from tests.model.wire import Request
from tests.model.wishes import EXITS, LIMITED, SUSPENDED

REPLIES = ("taken", "taken", "failed", "gone", "unreachable", "taken, then the process dies")
PAUSE_OF_RETRIES = 11
TURNS = (0, 1, 1, 2)


class Histories(Surroundings):
    @rule(number=which, choice=st.integers(0, 40))
    def an_operator_moves(self, number: int, choice: int) -> None:
        with self._step("single moves of operators"):
            move = picked(self._working(number).moves(), choice)
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
        uid = picked(self.kubelets.running(), how)
        if uid:
            self.kubelets.ends(uid, *EXITS[2 + how % 2])
            if how % 3:
                self.cluster.run(rounds=2)
                self._working(0).run()
                self._pass(PAUSE_OF_RETRIES)

    @rule(number=which, kind=st.integers(0, len(WATCHED) - 1), rounds=st.integers(0, 2))
    def a_watch_is_ahead_of_the_others(self, number: int, kind: int, rounds: int) -> None:
        """All that is new of one kind is seen and acted upon, and nothing of the others."""
        with self._step("watches ahead of others"):
            self.cluster.run(rounds=rounds)
            self._working(number).see_only(WATCHED[kind])

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
            front = picked(process.fronts(), choice)
            request = picked(process.requests(), choice)
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
            event = picked(sorted(process.life.post.flying) if process.life else [], choice)
            if event and not process.frozen:
                process.deliver(event, REPLIES[how])

    def _end_a_tool(self, process: Process) -> None:
        """Let there be an end to tell of."""
        for uid in self.kubelets.running()[:1]:
            self.kubelets.ends(uid, *EXITS[0])
        self.cluster.run()
        process.run()

    # --- slots

    @rule(
        number=which, trouble=st.integers(0, 4), gated=st.booleans(), rounds=st.sampled_from(TURNS)
    )
    def a_slot_is_fought_for(self, number: int, trouble: int, rounds: int, *, gated: bool) -> None:
        """Who came first may begin only while the claim of another is on its way (R-SLOTS)."""
        with self._step("fights for a slot"):
            if self._created + 3 > CREATIONS:
                return
            leader = self._working(number)
            first = self._two_want_a_slot(leader, gated=gated, waits=rounds == 2)
            claim = leader.get_to_claim(NAMES[self._newest()])
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
            self._nobody_waits_in_vain(leader)

    def _nobody_waits_in_vain(self, leader: Process) -> None:
        """After a while in which all goes well, the slot is somebody's."""
        for _ in range(3):
            self._pass(1)
            leader.begin_list()
            self._go_on_with(leader)
        if leader.life and not leader.life.queue.failing():
            self.truth.check_nobody_waits_in_vain()

    def _two_want_a_slot(self, leader: Process, *, gated: bool, waits: bool) -> str:
        """Let two come that want the same slot, which is free then; return who came first.

        :param gated: the first one may not begin yet.
        :param waits: the other one has waited in line for somebody else to end.
        """
        if waits:
            self.somebody_creates(LIMITED, 0, again=False)
            self._go_on_with(leader)
        self.somebody_creates(SUSPENDED if gated else LIMITED, 0, again=False)
        first = NAMES[self._newest()]
        self._go_on_with(leader)
        self._pass(1)
        self.somebody_creates(LIMITED, 0, again=False)
        if waits:
            leader.run()
        for uid in self.kubelets.running():
            self.kubelets.ends(uid, *EXITS[0])
        self.cluster.run()
        return first

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
