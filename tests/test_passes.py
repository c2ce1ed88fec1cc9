"""The thin shell around a decision: what it reads, and for how long it tries."""

from collections.abc import Iterable
from datetime import datetime
from typing import Any, cast

import pytest

from agentjobs import codec, passes
from agentjobs.cache import Cache, Key
from agentjobs.dispatch import Dispatcher
from agentjobs.domain.callbacks import Outcome, Reply
from agentjobs.domain.errors import AgentJobError
from agentjobs.domain.observed import Policy
from agentjobs.kube import (
    JOBS,
    ConflictError,
    Kube,
    KubeError,
    NotFoundError,
    UnavailableError,
)
from agentjobs.lease import LostLeadershipError
from agentjobs.metrics import Metrics
from agentjobs.notices import Notices
from agentjobs.passes import Passes
from tests.builders import (
    JOB_NAME,
    JOB_UID,
    NAME,
    NAMESPACE,
    Json,
    a_tool,
    an_agentjob,
    at,
    claimed,
    job_json,
    stamp,
)

KEY = Key(NAMESPACE, NAME)


class FakeKube:
    """An API server that takes every status, and asks kubelets in vain."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self.written: list[Json] = []
        self.jobs = Queue({})

    async def last_line(self, *_: Any) -> str:
        raise UnavailableError("500 dial tcp: no route to host")

    async def get(self, *where: Any) -> Json:
        return await self.jobs.get(*where)

    async def patch(self, *where: Any) -> Json:
        body = where[3]
        if where[0] == JOBS:
            return await self.jobs.patch(*where)
        stored: Json = codec.loads(self._cache.records[KEY].body)
        stored["metadata"]["resourceVersion"] = str(self._cache.records[KEY].version + 1)
        stored["status"] |= body["status"]
        self.written.append(stored["status"])
        return stored


class Queue:
    """What has changed the Job before our patch came."""

    def __init__(self, job: Json) -> None:
        self._job = job
        self.patches: list[Json] = []

    async def patch(self, *where: Any) -> Json:
        self.patches.append(where[3])
        raise ConflictError(409, {"message": "the object has been modified"}, "PATCH")

    async def get(self, *_: Any) -> Json:
        return self._job


class Nothing:
    """Notices and a dispatcher that do nothing; every event was refused once."""

    def post(self, *_: Any) -> None:
        return

    def settle(self, *_: Any) -> None:
        return

    def outcomes(self, _: Key) -> dict[str, Outcome]:
        return {"evt_1": Outcome(Reply.FAILED, at(40), "the receiver answered 500")}

    def busy(self, _: str) -> bool:
        return True


def passes_on(kube: Any, cache: Cache, metrics: Metrics | None = None) -> Passes:
    return Passes(
        cast("Kube", kube),
        cache,
        cast("Notices", Nothing()),
        cast("Dispatcher[Key]", Nothing()),
        metrics or Metrics(),
        Policy(),
        fence=lambda: None,
    )


class Stage:
    """Passes over one AgentJob, with a clock to set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *children: Json, **status: Any) -> None:
        self._monkeypatch = monkeypatch
        cache = Cache()
        cache.put_agentjob(an_agentjob(status=status).to_json())
        self.kube = FakeKube(cache)
        self.metrics = Metrics()
        self._children(cache, children)
        self._passes = passes_on(self.kube, cache, self.metrics)

    @staticmethod
    def _children(cache: Cache, children: Iterable[Json]) -> None:
        for body in children:
            (cache.put_pod if "containers" in body["spec"] else cache.put_job)(body)

    async def run(self, seconds: float) -> Json | None:
        """Make a pass at that time; return the last status that was ever written."""

        def now() -> datetime:
            return at(seconds)

        self._monkeypatch.setattr(passes, "utc_now", now)
        await self._passes.run(KEY)
        return self.kube.written[-1] if self.kube.written else None


def finished_pod() -> Json:
    owner = {"kind": "Job", "name": f"{NAME}-1", "uid": "j1", "controller": True}
    state = {"exitCode": 0, "startedAt": stamp(5), "finishedAt": stamp(30), "reason": "Completed"}
    return {
        "metadata": {
            "name": f"{NAME}-1-x",
            "namespace": NAMESPACE,
            "uid": "p1",
            "resourceVersion": "12",
            "creationTimestamp": stamp(2),
            "ownerReferences": [owner],
        },
        "spec": {"containers": [{"name": "main"}], "nodeName": "node-a"},
        "status": {
            "phase": "Succeeded",
            "containerStatuses": [{"name": "main", "state": {"terminated": state}}],
        },
    }


async def test_r_deadline_a_kubelet_that_is_gone_does_not_hold_up_the_end_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = job_json(namespace=NAMESPACE, resourceVersion="11")
    status = claimed(jobUID="j1", effective={"resultFrom": "lastLine"})
    stage = Stage(monkeypatch, job, finished_pod(), **status)
    for seconds in (31, 60, 90):
        with pytest.raises(UnavailableError):
            await stage.run(seconds)
    assert not stage.kube.written
    written = await stage.run(91)
    assert written is not None
    assert (written["state"], written["finishedAt"]) == ("done", stamp(30))
    assert not written.get("result")


async def test_an_end_is_counted_once_however_often_its_event_is_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    owed = {"id": "evt_1", "type": "job_completed", "time": stamp(30)}
    over = {"state": "done", "finishedAt": stamp(30), "callback": {"deliveries": [owed]}}
    stage = Stage(monkeypatch, **claimed(jobUID="j1", **over))
    written = await stage.run(41)
    assert written is not None
    assert written["callback"]["deliveries"][0]["attempts"] == 1
    assert stage.metrics.finished.labels("done", "")._value.get() == 0


async def test_r_attempt_a_job_is_retired_only_as_it_was_decided_upon(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was resumed before its pod was touched: the tool runs on."""
    queue = {"labels": {"kueue.x-k8s.io/queue-name": "gpus"}, "namespace": NAMESPACE}
    suspended = job_json(resourceVersion="11", spec={"suspend": True}, **queue)
    resumed = job_json(resourceVersion="12", spec={"suspend": False}, **queue)
    pod = finished_pod()
    state = {"running": {"startedAt": stamp(5)}}
    pod["status"] = {
        "phase": "Running",
        "containerStatuses": [{"name": "main", "state": state}],
    }
    attempt = {"number": 1, "jobName": JOB_NAME, "jobUID": JOB_UID, "startedAt": stamp(5)}
    status = claimed(attempts=[attempt], startedAt=stamp(5), podName="x", state="running")
    stage = Stage(monkeypatch, suspended, pod, **status)
    stage.kube.jobs = Queue(resumed)
    await stage.run(31)
    (patch,) = stage.kube.jobs.patches
    retired = {"annotations": {"agentjobs.dev/retired": "true"}}
    assert patch == {
        "metadata": {"uid": JOB_UID, "resourceVersion": "11", **retired},
        "spec": {"suspend": True, "parallelism": 0},
    }
    await stage.run(32)
    assert len(stage.kube.jobs.patches) == 1


class Unanswered:
    """An API server whose answers are lost, or that refuses."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    async def patch(self, *_: Any) -> Json:
        raise self._error

    async def get(self, *_: Any) -> Json:
        raise NotFoundError(404, {}, "GET")


@pytest.mark.parametrize(
    ("error", "keeps"),
    [
        pytest.param(UnavailableError("the connection broke"), True, id="nobody knows"),
        pytest.param(KubeError(422, {}, "PATCH"), False, id="refused"),
        pytest.param(LostLeadershipError("not ours any more"), False, id="never sent"),
    ],
)
async def test_r_slots_a_claim_that_may_be_written_keeps_its_slot(
    monkeypatch: pytest.MonkeyPatch, error: AgentJobError, *, keeps: bool
) -> None:
    cache = Cache()
    cache.put_tool({"kind": "AgentTool", **a_tool(maxConcurrent=1).to_json()})
    ref = {"kind": "AgentTool", "name": "indexer"}
    for name, uid in ((NAME, "u1"), ("zz-later", "u2")):
        cache.put_agentjob(an_agentjob(name=name, uid=uid, toolRef=ref).to_json())
    pass_maker = passes_on(Unanswered(error), cache)
    monkeypatch.setattr(passes, "utc_now", lambda: at(1))
    with pytest.raises(AgentJobError):
        await pass_maker.run(KEY)
    assert cache.slots(Key(NAMESPACE, "zz-later")).taken == int(keeps)
