"""Short histories, told by hand: nodes that fall silent, pods that leave no trace."""

from collections.abc import Iterator

import pytest

from agentjobs.api.agentjob import AgentJob
from agentjobs.api.names import ANNOTATION_RETIRED, CauseCode, Evidence
from agentjobs.kube import AGENTJOBS, JOBS
from tests.model.kubelets import NAMESPACE
from tests.model.machine import Histories
from tests.model.stage import Stage
from tests.model.truth import RuleBroken
from tests.model.wire import Task

NODE = "node-a"
NAME, JOB = "index", "index-1"


@pytest.fixture
def stage() -> Iterator[Histories]:
    """An operator leads. All must end well."""
    stage = Histories()
    stage.counts.clear()
    yield stage
    stage.teardown()


def run_one(stage: Stage, deadline: int) -> None:
    """Let an AgentJob run that got its place from a queue."""
    stage.cluster.create(NAME, deadlineSeconds=deadline, queueName="batch")
    stage._go_on_with(stage.processes[0])
    stage.cluster.admit(stage.server.get(JOBS, NAMESPACE, JOB))
    stage._go_on_with(stage.processes[0])
    assert stage.kubelets.running()


def be_silent(stage: Stage, seconds: int) -> None:
    """A node falls silent for so long; the operator learns of it and looks after its Lease."""
    stage.kubelets.cut(NODE)
    for _ in range(0, seconds, 5):
        stage._pass(5)
        stage.processes[0].run()


def retire(stage: Stage) -> None:
    """Retire the Job, as an operator would that does not look at what runs."""
    job = stage.server.get(JOBS, NAMESPACE, JOB)
    meta = {"uid": job["metadata"]["uid"], "annotations": {ANNOTATION_RETIRED: "true"}}
    body = {"metadata": meta, "spec": {"suspend": True, "parallelism": 0}}
    Task(stage.processes[0].kube.patch(JOBS, NAMESPACE, JOB, body)).run()


@pytest.mark.parametrize(
    ("deadline", "code"),
    [
        pytest.param(200, CauseCode.DEADLINE_EXCEEDED, id="while it is being ended"),
        pytest.param(900, CauseCode.NODE_LOST, id="while it is to run on"),
    ],
)
def test_r_dead_what_is_given_up_with_its_node_never_begins_again(
    stage: Stage, deadline: int, code: CauseCode
) -> None:
    """R-ATTEMPT: its Job is retired, though its tool runs on where nobody can end it."""
    run_one(stage, deadline)
    be_silent(stage, 300)
    stage._go_on_with(stage.processes[0])
    over = AgentJob.from_json(stage.server.get(AGENTJOBS, NAMESPACE, NAME)).status
    assert over.cause
    assert (over.cause.code, over.cause.evidence) == (code, Evidence.LOST)
    assert stage.kubelets.running()
    for job in stage.cluster.queued():
        stage.cluster.admit(job)
    stage.kubelets.mend(NODE)
    stage.cluster.run()
    stage._pass(40)
    stage.cluster.run()
    assert not stage.kubelets.running()
    assert len(stage.truth.containers) == 1


@pytest.mark.parametrize(
    ("silent", "back"),
    [
        pytest.param(0, False, id="its node is heard"),
        pytest.param(295, False, id="its node is silent, but not for long enough"),
        pytest.param(300, True, id="its node was silent for long, and is known to be back"),
    ],
)
def test_r_attempt_the_truth_lets_nobody_retire_what_runs(
    stage: Stage, silent: int, *, back: bool
) -> None:
    run_one(stage, 900)
    stage._broken = True
    if silent:
        stage.kubelets.cut(NODE)
    for _ in range(0, silent, 5):
        stage._pass(5)
        see(stage)
    if back:
        stage.kubelets.mend(NODE)
        see(stage)
    with pytest.raises(RuleBroken, match=f"R-ATTEMPT: {JOB} is retired while it runs"):
        retire(stage)


def see(stage: Stage) -> None:
    """The leader takes in what there is, and does nothing."""
    leader = stage.processes[0]
    for event in leader.fronts():
        leader.see(event)


def test_r_dead_who_does_not_know_that_a_node_is_back_may_give_it_up(stage: Stage) -> None:
    run_one(stage, 900)
    stage._broken = True
    stage.kubelets.cut(NODE)
    see(stage)
    for _ in range(60):
        stage._pass(5)
    stage.kubelets.mend(NODE)
    retire(stage)
    assert stage.kubelets.running()


def test_r_dead_a_list_tells_that_a_node_is_gone(stage: Stage) -> None:
    run_one(stage, 900)
    leader = stage.processes[0]
    stage.kubelets.remove(NODE)
    for event in leader.fronts():
        leader.miss(event)
    leader.begin_list()
    leader.know_all()
    assert leader.life
    assert leader.life.cache.nodes[NODE].gone
    leader.run()
    job = stage.server.get(JOBS, NAMESPACE, JOB)
    assert ANNOTATION_RETIRED in job["metadata"]["annotations"]


def test_r_cause_of_a_pod_that_left_no_trace_nobody_need_know_that_its_tool_began(
    stage: Histories,
) -> None:
    """A queue takes a place back and gives it again before an operator looks, who then dies."""
    stage.it_begins(spec=5, retry=2, steps=2)
    stage.a_queue_changes_its_mind(number=1, rounds=1, requests=0, how=0)
    stage.a_pod_has_trouble(number=1, how=1)
    stage.controllers_catch_up()
    first, second = stage.truth.containers.values()
    assert first.began
    assert not second.began


def test_r_cause_of_a_pod_on_record_that_vanished_nobody_says_that_its_tool_never_began(
    stage: Histories,
) -> None:
    """The same, but its pod was on record before the operator died."""
    leader, server = stage.processes[0], stage.server
    stage.cluster.create(NAME, deadlineSeconds=60, queueName="batch")
    stage._go_on_with(leader)
    stage.cluster.admit(server.get(JOBS, NAMESPACE, JOB))
    stage.cluster.jobs.sync(server.get(JOBS, NAMESPACE, JOB))
    leader.run()
    leader.die()
    stage.cluster.run()
    stage.cluster.take_back(server.get(JOBS, NAMESPACE, JOB))
    stage.cluster.run()
    stage._end_those_told_to_go()
    stage._admit(server.get(JOBS, NAMESPACE, JOB), patient=False)
    stage.cluster.jobs.sync(server.get(JOBS, NAMESPACE, JOB))
    first, second = stage.truth.containers.items()
    stage.kubelets.unpullable[second[0]] = "ErrImagePull"
    stage._only_leader()
    for _ in range(9):
        stage._go_on_with(leader)
        stage._pass(10)
    over = AgentJob.from_json(server.get(AGENTJOBS, NAMESPACE, NAME)).status
    assert (first[1].began, second[1].began) == (True, False)
    assert over.cause
    assert (over.cause.ran, over.cause.evidence) == (True, Evidence.LOST)
