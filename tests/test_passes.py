"""The thin shell around a decision: what it reads, and for how long it tries."""

from collections.abc import Iterable
from datetime import datetime
from typing import Any, cast

import pytest

from agentjobs import codec, passes
from agentjobs.cache import Cache, Key
from agentjobs.dispatch import Dispatcher
from agentjobs.domain.callbacks import Outcome, Reply
from agentjobs.domain.observed import Policy
from agentjobs.kube import Kube, UnavailableError
from agentjobs.metrics import Metrics
from agentjobs.notices import Notices
from agentjobs.passes import Passes
from tests.builders import NAME, NAMESPACE, Json, an_agentjob, at, claimed, job_json, stamp

KEY = Key(NAMESPACE, NAME)


class FakeKube:
    """An API server that takes every status, and asks kubelets in vain."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self.written: list[Json] = []

    async def last_line(self, *_: Any) -> str:
        raise UnavailableError("500 dial tcp: no route to host")

    async def patch(self, *where: Any) -> Json:
        body = where[3]
        stored: Json = codec.loads(self._cache.records[KEY].body)
        stored["metadata"]["resourceVersion"] = str(self._cache.records[KEY].version + 1)
        stored["status"] |= body["status"]
        self.written.append(stored["status"])
        return stored


class Nothing:
    """Notices and a dispatcher that do nothing; every event was refused once."""

    def post(self, *_: Any) -> None:
        return

    def settle(self, _: str) -> None:
        return

    def outcome(self, _: str) -> Outcome:
        return Outcome(Reply.FAILED, at(40), "the receiver answered 500")

    def busy(self, _: str) -> bool:
        return True


class Stage:
    """Passes over one AgentJob, with a clock to set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *children: Json, **status: Any) -> None:
        self._monkeypatch = monkeypatch
        cache = Cache()
        cache.put_agentjob(an_agentjob(status=status).to_json())
        self.kube = FakeKube(cache)
        self.metrics = Metrics()
        self._children(cache, children)
        self._passes = Passes(
            cast("Kube", self.kube),
            cache,
            cast("Notices", Nothing()),
            cast("Dispatcher[Key]", Nothing()),
            self.metrics,
            Policy(),
            fence=lambda: None,
        )

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
