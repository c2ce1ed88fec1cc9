"""What the cluster does beside operators: controllers, tools, nodes, a queue, time."""

from hypothesis import strategies as st
from hypothesis.stateful import rule

from agentjobs.kube import JOBS, PODS
from tests.model.apiserver import Json
from tests.model.kubelets import DISRUPTIONS, NODE_NAMES
from tests.model.stage import picked, some, which
from tests.model.users import Users
from tests.model.wishes import EXITS

MINDS = (0, 1, 2, 3, 4, 4)
PAUSES = (0.5, 1, 1, 2, 5, 12, 35, 130, 310)


class Surroundings(Users):
    # --- the cluster

    @rule(number=st.integers(0, 40))
    def one_controller_moves(self, number: int) -> None:
        with self._step("single moves of the cluster"):
            move = picked(self.cluster.single_moves(), number)
            if move:
                move()

    @rule()
    def controllers_catch_up(self) -> None:
        with self._step("catching up of the cluster"):
            self.cluster.run()

    @rule(number=some, how=st.integers(0, len(EXITS) - 1))
    def a_tool_ends(self, number: int, how: int) -> None:
        with self._step("exits"):
            uid = picked(self.kubelets.running(), number)
            if uid:
                self.kubelets.ends(uid, *EXITS[how])

    @rule(number=some, how=st.integers(0, 4))
    def a_pod_has_trouble(self, number: int, how: int) -> None:
        with self._step("troubles of pods"):
            pod = picked(self.server.all(PODS), number)
            if how == 4:
                self.server.full = not self.server.full
            elif pod:
                self._trouble(pod["metadata"]["uid"], how)

    @rule(number=some, how=st.integers(0, len(DISRUPTIONS) - 1))
    def a_pod_is_disrupted(self, number: int, how: int) -> None:
        """The cluster needs its place, before its tool began or after."""
        with self._step("disruptions"):
            pod = picked(self.server.all(PODS), number)
            if pod:
                self.kubelets.disrupt(pod["metadata"]["uid"], DISRUPTIONS[how])

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

    # --- a queue

    @rule(number=some, patient=st.booleans())
    def a_queue_decides(self, number: int, *, patient: bool) -> None:
        """Give a place or take it back."""
        with self._step("decisions of a queue"):
            job = picked(self.cluster.queued(), number)
            if job and job["spec"].get("suspend"):
                self._admit(job, patient=patient)
            elif job:
                self.cluster.take_back(job)

    @rule(
        number=which,
        rounds=st.integers(0, 3),
        requests=st.integers(0, 2),
        how=st.sampled_from(MINDS),
    )
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
            job = picked(self.cluster.queued(), requests)
            if job and not job["spec"].get("suspend"):
                self._take_back_and_give(number, job, rounds, requests, how)

    def _take_back_and_give(
        self, number: int, job: Json, rounds: int, requests: int, how: int
    ) -> None:
        if how == 3:
            self.cluster.stop(job["metadata"]["ownerReferences"][0]["name"])
        self.cluster.take_back(job)
        self.cluster.run(rounds=rounds)
        if requests:
            self._working(number).get_so_far(requests)
        if how == 1:
            self._working(number).die(late=rounds == 1)
        self._end_those_told_to_go()
        if how == 4:
            self._working(number).get_so_far(1 + rounds % 2)
            self._working(number).die(late=False)
        for _ in range(how % 4):
            self._working(number).run()
            self.cluster.run(rounds=1)
        found = self.server.by_uid(JOBS, job["metadata"]["uid"])
        if found:
            self._admit(found, patient=how in {2, 3})
            self.cluster.run(rounds=2)
            if rounds == 0:
                self._working(number).see_only(JOBS)

    def _end_those_told_to_go(self) -> None:
        self.cluster.run(rounds=1)
        for uid in self.kubelets.running():
            if self.truth.containers[uid].told_to_go:
                self.kubelets.ends(uid, 143, "Error")
        self.cluster.run(rounds=1)
