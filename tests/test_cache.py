"""What is known of the cluster: the newest of everything, and nothing for longer than needed."""

from datetime import UTC, datetime
from typing import Any

import pytest

from agentjobs.cache import Cache, Key
from agentjobs.controller import Feed
from agentjobs.domain.pods import PodView
from agentjobs.metrics import Metrics

NS = "n"


def meta(name: str, uid: str, version: int, **more: Any) -> dict[str, Any]:
    return {
        "name": name,
        "namespace": NS,
        "uid": uid,
        "resourceVersion": str(version),
        "generation": 1,
        "creationTimestamp": "2026-01-01T00:00:00Z",
        **more,
    }


def agentjob(uid: str, version: int, *, state: str = "", **spec: Any) -> dict[str, Any]:
    status = {"state": state} if state else {}
    if state == "done":
        status["finishedAt"] = "2026-01-01T00:01:00Z"
    return {
        "metadata": meta("a", uid, version),
        "spec": {"template": {"spec": {"x": 1}}, **spec},
        "status": status,
    }


def owner(kind: str, name: str, uid: str) -> dict[str, Any]:
    version = "agentjobs.dev/v1alpha1" if kind == "AgentJob" else "batch/v1"
    reference = {"apiVersion": version, "kind": kind, "name": name, "uid": uid, "controller": True}
    return {"ownerReferences": [reference]}


def job(uid: str, version: int, *, of: str = "u1", failed: int = 0) -> dict[str, Any]:
    return {
        "metadata": meta("a-1", uid, version, **owner("AgentJob", "a", of)),
        "spec": {},
        "status": {"failed": failed},
    }


def left(cache: Cache) -> list[str]:
    """Names of the pods of Job j1 that are there, whatever else is remembered of them."""
    return [each.name for each in cache.remains(("j1", "unknown"))]


def test_r_ttl_of_the_pods_of_a_finished_job_it_is_known_that_they_are_there() -> None:
    cache = Cache()
    for name in ("one", "two", "three"):
        cache.put_pod(pod(name, 3))
    cache.put_pod(pod("three", 4), gone=True)
    assert left(cache) == ["one", "two"]
    cache.reduce_pods("j1")
    assert (left(cache), cache.pods("j1")) == (["one", "two"], ())
    # A list shows them again, and a watch that one is gone.
    cache.put_pod(pod("one", 3))
    cache.put_pod(pod("two", 5), gone=True)
    assert left(cache) == ["one"]
    cache.reduce_pods("j1")
    cache.drop_remains("j1", "one")
    assert left(cache) == []
    assert cache._remains == {}


def waits(
    name: str, *others: str, at: int = 0, state: str = "", version: int = 1
) -> dict[str, Any]:
    body = agentjob(f"uid-{name}", version, state=state, dependsOn=[{"name": n} for n in others])
    body["metadata"] |= {"name": name, "creationTimestamp": f"2026-01-01T00:00:{at:02}Z"}
    return body


def test_r_depends_the_youngest_of_a_ring_has_closed_it() -> None:
    cache = Cache()
    for number, (name, other) in enumerate((("a", "c"), ("b", "a"), ("d", "a"))):
        cache.put_agentjob(waits(name, other, at=number))
        assert cache.find_rings() == []
    cache.put_agentjob(waits("c", "b", at=5))
    assert cache.find_rings() == [Key(NS, "c")]
    assert cache.ring(Key(NS, "c")) == ("c", "b", "a")
    assert [cache.ring(Key(NS, name)) for name in "abd"] == [(), (), ()]
    # Who has closed it is told once.
    assert cache.find_rings() == []
    cache.put_agentjob(waits("c", "b", at=5, state="done", version=2))
    assert (cache.find_rings(), cache.ring(Key(NS, "c"))) == ([], ())
    assert (cache._rings, cache._unlinked) == ({}, set())


def test_r_depends_a_list_in_any_order_shows_all_rings() -> None:
    """Those too that share a job: the second shows when the first is broken."""
    cache = Cache()
    for body in (waits("c", "a", at=3), waits("a", "b", "c", at=1), waits("b", "a", at=2)):
        cache.put_agentjob(body)
    ended: list[str] = []
    while closers := cache.find_rings():
        for closer in closers:
            ended.append(closer.name)
            cache.put_agentjob(waits(closer.name, "a", state="done", version=2))
    assert sorted(ended) == ["b", "c"]


def pod(uid: str, version: int, *, of: str = "j1", phase: str = "Running") -> dict[str, Any]:
    labels = {"labels": {"agentjobs.dev/job": "a"}}
    return {
        "metadata": meta(uid, uid, version, **owner("Job", "a-1", of), **labels),
        "spec": {"containers": [{"name": "tool"}]},
        "status": {"phase": phase},
    }


def state_of(cache: Cache) -> str | None:
    state = cache.records[Key(NS, "a")].parse().status.state
    return state.value if state else None


@pytest.fixture
def cache() -> Cache:
    return Cache()


def test_an_older_version_is_ignored(cache: Cache) -> None:
    cache.put_agentjob(agentjob("u1", 10, state="running"))
    cache.put_agentjob(agentjob("u1", 9, state="queued"))
    assert state_of(cache) == "running"
    cache.put_agentjob(agentjob("u1", 11, state="done"))
    assert state_of(cache) == "done"


def test_a_late_word_about_a_deleted_namesake_is_ignored(cache: Cache) -> None:
    cache.put_agentjob(agentjob("u1", 5))
    cache.put_agentjob(agentjob("u2", 10, state="running"))
    cache.put_agentjob(agentjob("u1", 6, state="done"))
    cache.drop_agentjob(Key(NS, "a"), "u1")
    assert cache.records[Key(NS, "a")].uid == "u2"
    assert state_of(cache) == "running"

    cache.put_job(job("j2", 20, of="u2"))
    cache.put_job(job("j1", 15))
    cache.drop_job(job("j1", 16))
    child = cache.child(NS, "a-1")
    assert child is not None
    assert child.uid == "j2"


def test_versions_are_numbers_and_not_words(cache: Cache) -> None:
    cache.put_agentjob(agentjob("u1", 99, state="queued"))
    cache.put_agentjob(agentjob("u1", 100, state="running"))
    assert state_of(cache) == "running"


def test_a_finished_record_keeps_nothing_of_what_was_run(cache: Cache) -> None:
    cache.put_agentjob(agentjob("u1", 1, arguments={"secret": "x"}))
    assert b"secret" in cache.records[Key(NS, "a")].body
    cache.put_agentjob(agentjob("u1", 2, state="done", arguments={"secret": "x"}))
    assert b"secret" not in cache.records[Key(NS, "a")].body


def test_a_deleted_pod_is_remembered_as_it_was_last_seen(cache: Cache) -> None:
    cache.put_pod(pod("p", 1, phase="Pending"))
    cache.put_pod(pod("p", 3))
    cache.put_pod(pod("p", 4, phase="Failed"), gone=True)
    (view,) = cache.pods("j1")
    assert (view.phase, view.gone, view.dead) == ("Failed", True, True)
    cache.put_pod(pod("p", 2))
    assert cache.pods("j1")[0].gone


def test_when_a_deletion_was_asked_for_outlasts_the_kubelet_s_last_word(cache: Cache) -> None:
    asked = {"deletionTimestamp": "2026-01-01T00:00:15Z", "deletionGracePeriodSeconds": 5}
    last = {"deletionTimestamp": "2026-01-01T00:00:13Z", "deletionGracePeriodSeconds": 0}
    cache.put_pod(pod("p", 1))
    for version, times in ((2, asked), (3, last)):
        body = pod("p", version)
        body["metadata"] |= times
        cache.put_pod(body, gone=version == 3)
    (view,) = cache.pods("j1")
    assert view.gone
    assert view.delete_requested_at == datetime(2026, 1, 1, 0, 0, 10, tzinfo=UTC)


def test_pods_belong_to_the_uid_of_their_job_and_never_to_a_label(cache: Cache) -> None:
    cache.put_pod(pod("p", 1, of="somebody-else"))
    assert cache.pods("j1") == ()
    bare = pod("q", 1)
    del bare["metadata"]["ownerReferences"]
    assert cache.put_pod(bare) is None


def test_what_a_list_does_not_show_any_more_is_lost(cache: Cache) -> None:
    cache.put_agentjob(agentjob("u1", 1))
    cache.put_job(job("j1", 2))
    cache.put_pod(pod("p", 3))
    assert cache.lose_pod("j1", "p") == Key(NS, "a")
    assert cache.pods("j1")[0].gone
    assert not list(cache.live_pods())
    assert cache.lose_job(Key(NS, "a-1", "Job"), "j1") == Key(NS, "a")
    assert cache.child(NS, "a-1") is None


class Wakes:
    """The queue and the passes, as far as a feed knows them."""

    def __init__(self) -> None:
        self.keys: list[Key] = []

    def add(self, key: Key) -> None:
        self.keys.append(key)

    def forget(self, _: object) -> None:
        return


@pytest.fixture
def wakes() -> Wakes:
    return Wakes()


@pytest.fixture
def feed(cache: Cache, wakes: Wakes) -> Feed:
    return Feed(cache, wakes, wakes, Metrics())  # type: ignore[arg-type] # two methods of each


def test_r_level_the_silence_of_each_resource_is_told() -> None:
    now, metrics = [100.0], Metrics()
    feed = Feed(Cache(), Wakes(), Wakes(), metrics, lambda: now[0])  # type: ignore[arg-type]

    def silence(resource: str) -> float | None:
        feed.measure()
        labels = {"resource": resource}
        return metrics.registry.get_sample_value("agentjobs_watch_silence_seconds", labels)

    now[0] = 170.0
    assert silence("jobs") == silence("clusteragenttools") == 70
    feed.follow("jobs", "MODIFIED")
    feed.heard("agentjobs")
    now[0] = 175.0
    assert (silence("jobs"), silence("agentjobs"), silence("pods")) == (5, 5, 75)


def test_an_event_of_a_child_wakes_its_agentjob(feed: Feed, wakes: Wakes) -> None:
    feed.agentjob(agentjob("u1", 1))
    feed.job(job("j1", 2))
    feed.pod(pod("p", 3))
    assert wakes.keys == [Key(NS, "a")] * 3
    feed.job({**job("x", 4), "metadata": meta("x", "x", 4)})
    assert len(wakes.keys) == 3


def test_a_dependency_wakes_those_that_wait_for_it(feed: Feed, wakes: Wakes) -> None:
    waiting = agentjob("u2", 1, dependsOn=[{"name": "a"}])
    waiting["metadata"]["name"] = "b"
    feed.agentjob(waiting)
    wakes.keys.clear()
    feed.agentjob(agentjob("u1", 2, state="done"))
    assert wakes.keys == [Key(NS, "a"), Key(NS, "b")]


def test_nothing_is_left_of_an_agentjob_that_is_gone_with_all_it_had(
    feed: Feed, cache: Cache
) -> None:
    feed.agentjob(agentjob("u1", 1))
    feed.job(job("j1", 2))
    feed.pod(pod("p", 3))
    feed.agentjob(agentjob("u1", 4, state="done"), gone=True)
    feed.job(job("j1", 5), gone=True)
    feed.pod(pod("p", 6), gone=True)
    left = {name: value for name, value in vars(cache).items() if value}
    assert not left


def test_a_pod_that_goes_after_its_job_is_remembered_while_its_agentjob_lives(
    feed: Feed, cache: Cache
) -> None:
    feed.agentjob(agentjob("u1", 1, state="running"))
    feed.job(job("j1", 2))
    feed.pod(pod("p", 3))
    feed.job(job("j1", 4), gone=True)
    feed.pod(pod("p", 5), gone=True)
    assert [view.gone for view in cache.pods("j1")] == [True]
    assert isinstance(cache.pods("j1")[0], PodView)


async def test_the_first_list_is_no_loss(feed: Feed) -> None:
    for event in (None, None, "ADDED", "MODIFIED"):
        feed.follow("pods", event)
    assert not feed.lost_place.is_set()


async def test_a_list_after_events_is_a_watch_that_lost_its_place(feed: Feed) -> None:
    feed.follow("jobs", None)
    for event in (None, "ADDED", None, None):
        feed.follow("pods", event)
    assert feed.lost_place.is_set()
    feed.lost_place.clear()
    feed.follow("pods", None)
    assert not feed.lost_place.is_set(), "the same list"


def test_r_dead_a_pod_that_its_job_left_behind_is_still_seen_to_end(cache: Cache) -> None:
    """`kubectl delete job --cascade=orphan` takes the owner out of the pod."""
    cache.put_pod(pod("p", 3))
    orphan = pod("p", 4, phase="Succeeded")
    del orphan["metadata"]["ownerReferences"]
    cache.put_pod(orphan)
    (seen,) = cache.pods("j1")
    assert seen.phase == "Succeeded"


def tool(uid: str, version: int) -> dict[str, Any]:
    return {
        "kind": "AgentTool",
        "metadata": meta("t", uid, version),
        "spec": {"description": "d", "template": {}},
    }


def test_a_late_deletion_does_not_take_a_tool_that_was_made_anew(cache: Cache) -> None:
    key = cache.put_tool(tool("new", 9))
    cache.drop_tool(key, "old")
    assert key in cache.tools
    cache.drop_tool(key, "new")
    assert key not in cache.tools


def node(version: int, *, ready: bool) -> dict[str, Any]:
    condition = {
        "type": "Ready",
        "status": "True" if ready else "Unknown",
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    }
    metadata = {"name": "node", "uid": "n1", "resourceVersion": str(version)}
    return {"metadata": metadata, "status": {"conditions": [condition]}}


def test_r_dead_an_older_word_about_a_node_does_not_count(cache: Cache) -> None:
    cache.put_node(node(9, ready=True))
    cache.put_node(node(8, ready=False))
    assert cache.nodes["node"].not_ready_since is None


def test_r_stop_a_time_that_nobody_can_read_does_not_hide_the_stop(cache: Cache) -> None:
    key = cache.put_agentjob(agentjob("u1", 1, stop={"at": "2026-01-01T00:00:00+24:00"}))
    stop = cache.records[key].parse().spec.stop
    assert stop is not None
    assert stop.at is None


def user(name: str, version: int, *, at: int = 0, **status: Any) -> dict[str, Any]:
    body = agentjob(f"u-{name}", version, toolRef={"kind": "AgentTool", "name": "t"})
    body["spec"].pop("template")
    body["metadata"] |= {"name": name, "creationTimestamp": f"2026-01-01T00:00:{at:02}Z"}
    return {**body, "status": status}


def limited(maximum: int) -> dict[str, Any]:
    spec = {"description": "d", "template": {}, "maxConcurrent": maximum}
    return {"kind": "AgentTool", "metadata": meta("t", "t1", 1), "spec": spec}


CLAIMED = {"attempts": [{"number": 1, "jobName": "x-1"}], "state": "queued"}
IN_LINE = {"state": "queued", "waiting": {"code": "slot"}}
TOOL = Key(NS, "t", "AgentTool")


def slots(cache: Cache, name: str) -> tuple[int, int]:
    seen = cache.slots(Key(NS, name))
    return seen.taken, seen.ahead


def test_r_slots_are_counted_from_the_agentjobs() -> None:
    cache = Cache()
    cache.put_tool(limited(2))
    cache.put_agentjob(user("runs", 1, at=3, **CLAIMED))
    cache.put_agentjob(user("over", 2, finishedAt="2026-01-01T00:01:00Z", **CLAIMED))
    cache.put_agentjob(user("early", 3, at=1, **IN_LINE))
    cache.put_agentjob(user("new", 4, at=2))
    held_up = {"state": "queued", "waiting": {"code": "dependency"}}
    cache.put_agentjob(user("elsewhere", 5, at=0, **held_up))
    cache.put_agentjob(user("late", 6, at=9, **IN_LINE))
    assert slots(cache, "early") == (1, 0)
    assert slots(cache, "new") == (1, 1)
    assert slots(cache, "late") == (1, 2)
    moves_up = [Key(NS, "early"), Key(NS, "new"), Key(NS, "late")]
    assert cache.next_in_line(TOOL) == moves_up
    for number in range(9):
        cache.put_agentjob(user(f"later-{number}", 9, at=10, **IN_LINE))
    assert cache.next_in_line(TOOL)[:3] == moves_up
    assert len(cache.next_in_line(TOOL)) == 4, "not all who wait, when one may begin"
    cache.drop_agentjob(Key(NS, "runs"), "u-runs")
    assert len(cache.next_in_line(TOOL)) == 5


def test_r_slots_a_claim_counts_while_it_is_being_written() -> None:
    cache = Cache()
    cache.put_tool(limited(1))
    cache.put_agentjob(user("a", 1, at=1))
    cache.put_agentjob(user("b", 2, at=2, **IN_LINE))
    cache.reserve(Key(NS, "a"))
    assert slots(cache, "b") == (1, 0)
    assert cache.next_in_line(TOOL) == []
    assert slots(cache, "a") == (0, 0), "its own claim does not stand in its way"
    cache.release(Key(NS, "a"))
    assert slots(cache, "b") == (0, 1)


def test_r_slots_a_claim_that_may_be_written_keeps_its_slot_until_it_is_seen() -> None:
    cache = Cache()
    cache.put_tool(limited(1))
    cache.put_agentjob(user("late", 1, at=9, **IN_LINE))
    cache.reserve(Key(NS, "late"))
    cache.put_agentjob(user("early", 2, at=1, **IN_LINE))
    assert slots(cache, "early") == (1, 0)
    assert slots(cache, "late") == (0, 0), "who came into line since waits behind it"
    cache.put_agentjob(user("late", 3, at=9, **IN_LINE))
    assert slots(cache, "early") == (0, 0), "a newer version tells that it was not written"
    assert slots(cache, "late") == (0, 1)


def test_r_slots_claims_beyond_the_limit_get_their_slots_one_after_the_other() -> None:
    cache = Cache()
    cache.put_tool(limited(1))
    for number, name in enumerate("abc", 1):
        cache.put_agentjob(user(name, number, **CLAIMED))
    assert slots(cache, "b") == (2, 0)
    cache.postpone(Key(NS, "b"))
    cache.postpone(Key(NS, "c"))
    assert slots(cache, "a") == (0, 0)
    assert sorted(cache.next_in_line(TOOL)) == [Key(NS, "b"), Key(NS, "c")]
    assert sorted(cache.in_line(TOOL)) == [Key(NS, "b"), Key(NS, "c")]
    cache.put_agentjob(user("new", 4, **IN_LINE))
    assert slots(cache, "new") == (3, 0), "who has claimed comes before who has not"
    cache.drop_agentjob(Key(NS, "a"), "u-a")
    assert slots(cache, "b") == (0, 0)
    cache.postpone(Key(NS, "b"), yes=False)
    assert slots(cache, "c") == (1, 0)


def test_r_slots_an_agentjob_that_is_gone_keeps_none() -> None:
    cache = Cache()
    cache.put_tool(limited(1))
    cache.put_agentjob(user("a", 1))
    cache.put_agentjob(user("b", 2, **IN_LINE))
    cache.reserve(Key(NS, "a"))
    cache.drop_agentjob(Key(NS, "a"), "u-a")
    assert slots(cache, "b") == (0, 0)


def test_r_slots_nothing_is_counted_for_a_tool_without_a_limit() -> None:
    cache = Cache()
    tool = limited(1)
    del tool["spec"]["maxConcurrent"]
    cache.put_tool(tool)
    cache.put_agentjob(user("a", 1, **CLAIMED))
    cache.put_agentjob(user("b", 2, **IN_LINE))
    assert slots(cache, "b") == (0, 0)
    assert cache.next_in_line(TOOL) == []


def test_r_depends_an_end_is_kept_for_those_that_have_not_begun() -> None:
    cache = Cache()
    waiting = agentjob("w", 1, dependsOn=[{"name": "first"}])
    cache.put_agentjob(waiting)
    first = Key(NS, "first")
    assert cache.is_awaited(first)
    cache.put_agentjob({**waiting, "metadata": meta("a", "w", 2), "status": CLAIMED})
    assert not cache.is_awaited(first), "it has seen the end, and begun"
    cache.drop_agentjob(Key(NS, "a"), "w")
    assert cache._dependents == {}


def test_r_slots_all_in_line_are_found_when_the_limit_goes() -> None:
    cache = Cache()
    cache.put_tool(limited(1))
    cache.put_agentjob(user("a", 1, at=1, **CLAIMED))
    cache.put_agentjob(user("b", 2, at=2, **IN_LINE))
    assert cache.next_in_line(TOOL) == []
    assert cache.in_line(TOOL) == [Key(NS, "b")]


def question(uid: str, version: int, *, of: str = "u1", outcome: str = "") -> dict[str, Any]:
    return {
        "metadata": meta(f"q-{uid}", uid, version, **owner("AgentJob", "a", of)),
        "spec": {"jobUID": of, "expiresAt": "2026-01-01T01:00:00Z"},
        "status": {"outcome": outcome} if outcome else {},
    }


def test_r_level_an_old_word_of_a_question_does_not_open_it_again() -> None:
    cache = Cache()
    cache.put_agentjob(agentjob("u1", 1))
    assert cache.put_question(question("q1", 5, outcome="answered")) == Key(NS, "a")
    cache.put_question(question("q1", 4))
    assert [each.closed for each in cache.questions("u1")] == [True]


def test_r_level_questions_are_forgotten_with_themselves_and_with_their_job() -> None:
    cache = Cache()
    cache.put_question(question("q1", 4))
    cache.put_question(question("q2", 5))
    cache.put_agentjob(agentjob("u1", 1))
    assert cache.drop_question("u1", "q1") == Key(NS, "a")
    assert [each.uid for each in cache.questions("u1")] == ["q2"]
    cache.drop_agentjob(Key(NS, "a"), "u1")
    assert list(cache.all_questions()) == []
