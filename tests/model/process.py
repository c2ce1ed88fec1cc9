"""One operator process, step by step: the real passes, cache, feed, lists and lease.

Its requests are objects that the test carries to the API server and back, late or never.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import orjson
from typing_extensions import override

from agentjobs.cache import Cache, Key
from agentjobs.controller import Feed
from agentjobs.dispatch import Dispatcher, Letter
from agentjobs.domain.callbacks import Outcome, Reply
from agentjobs.domain.destinations import Destinations, Rule
from agentjobs.domain.errors import AgentJobError
from agentjobs.domain.observed import Policy
from agentjobs.kube import (
    AGENTJOBS,
    AGENTTOOLS,
    INPUTREQUESTS,
    JOBS,
    NODES,
    PODS,
    Kube,
    Resource,
)
from agentjobs.lease import Lease, Terms
from agentjobs.metrics import Metrics
from agentjobs.notices import Notices
from agentjobs.passes import Passes
from agentjobs.relist import Relist
from agentjobs.workqueue import WorkQueue
from tests.model.apiserver import ApiServer, Event, Json
from tests.model.clock import Clock
from tests.model.kubelets import NAMESPACE
from tests.model.parts import Post, Queue
from tests.model.truth import RuleBroken, Truth
from tests.model.wire import ModelKube, Request, Task

TERMS = Terms()
POLICY = Policy(destinations=Destinations(rules=(Rule(hosts=("agents.example.net",)),)))
WATCHED = (AGENTJOBS, AGENTTOOLS, INPUTREQUESTS, JOBS, PODS, NODES)
SHARED_METRICS = Metrics()
"""One for all processes: making one is slow, and nothing here reads it."""


class AttentiveFeed(Feed):
    """Tells the truth what a process got to know of pods and nodes: of others it cannot speak."""

    def __init__(self, truth: Truth, process: str, *parts: Any) -> None:
        super().__init__(*parts)
        self._truth = truth
        self._process = process

    @override
    def pod(self, body: Json, *, gone: bool = False) -> None:
        self._truth.witness(body, self._process)
        super().pod(body, gone=gone)

    @override
    def node(self, body: Json, *, gone: bool = False) -> None:
        self._truth.is_told(body, self._process, gone=gone)
        super().node(body, gone=gone)


class NoNotices:
    def post(self, *_: object) -> None:
        return


@dataclass
class Life:
    """What a process has from the moment it leads until it dies."""

    cache: Cache
    queue: Queue
    post: Post
    passes: Passes
    feed: Feed
    relist: Relist
    seen_until: int
    """Length of the API server's history when watching began."""
    unseen: list[Event] = field(default_factory=list)
    """Watch events on their way."""
    tasks: dict[Key, Task] = field(default_factory=dict)
    listing: Task | None = None
    ready: bool = False
    """The first list is complete: passes begin."""


class Process:
    def __init__(self, name: str, server: ApiServer, truth: Truth, clock: Clock) -> None:
        self.name = name
        self._server = server
        self._truth = truth
        self._clock = clock
        self.kube = ModelKube(server, truth, clock, lambda: self.lease._identity)
        self.frozen = False
        self.cut_off = False
        """No request of its Lease gets through."""
        self.zombies: list[Request] = []
        """Requests on their way whose sender has died."""
        self.life: Life | None = None
        self.counts: Counter[str] = Counter()
        self.lease = self._new_lease()
        server.observers.append(self._watch)

    # --- leadership

    def contend(self) -> None:
        """Try to get or to renew the Lease; begin to lead when it is ours."""
        if self.frozen or self.cut_off:
            return
        won = Task(self.lease._try()).run()
        if won and self.life is None:
            self._lead()

    def time_has_passed(self) -> None:
        """Renew, or notice that it is too late for that and start again as a follower."""
        if self.frozen or self.life is None:
            return
        self.contend()
        if not self.lease.held:
            self.counts["leaderships lost"] += 1
            self.die()

    def die(self, *, late: bool = True) -> None:
        """End at once and start again; what was sent may still be carried out.

        :param late: requests on their way stay there; otherwise they are lost.
        """
        life, self.life = self.life, None
        self.frozen = self.cut_off = False
        self.lease = self._new_lease()
        if life is None:
            return
        for task in [*life.tasks.values(), *([life.listing] if life.listing else [])]:
            request = task.abandon()
            if request and late:
                self.zombies.append(request)

    def _new_lease(self) -> Lease:
        self.counts["lives"] += 1
        identity = f"{self.name}-{self.counts['lives']}"
        kube = cast("Kube", self.kube)
        return Lease(kube, NAMESPACE, "leader", identity, TERMS, self._clock.monotonic)

    def _lead(self) -> None:
        kube, cache = cast("Kube", self.kube), Cache()
        queue = Queue(self._clock)
        post = Post(queue.add)
        passes = Passes(
            kube,
            cache,
            cast("Notices", NoNotices()),
            cast("Dispatcher[Key]", post),
            SHARED_METRICS,
            POLICY,
            fence=self.lease.fence,
        )
        waiting = cast("WorkQueue[Key]", queue)
        identity = self.lease._identity
        feed = AttentiveFeed(self._truth, identity, cache, waiting, passes, SHARED_METRICS)
        relist = Relist(kube, cache, feed, SHARED_METRICS)
        begun = len(self._server.history)
        self.life = Life(cache, queue, post, passes, feed, relist, seen_until=begun)
        self.begin_list()

    # --- what it sees

    def _watch(self, event: Event, _old: Json | None) -> None:
        if self.life and event.resource in WATCHED:
            self.life.unseen.append(event)

    def fronts(self) -> list[Event]:
        """Of every object the oldest event that is on its way: objects overtake each other."""
        fronts: dict[str, Event] = {}
        for event in self.life.unseen if self.life else ():
            fronts.setdefault(event.uid, event)
        return list(fronts.values())

    def see(self, event: Event) -> None:
        self.take(event)
        if self.life:
            self.life.unseen.remove(event)

    def take(self, event: Event) -> None:
        """Take in an event, wherever it comes from."""
        if self.life is None:
            return
        feed = self.life.feed
        into = {
            AGENTJOBS: feed.agentjob,
            AGENTTOOLS: feed.tool,
            INPUTREQUESTS: feed.question,
            JOBS: feed.job,
            PODS: feed.pod,
            NODES: feed.node,
        }
        into[event.resource](event.body, gone=event.kind == "DELETED")

    def see_again(self, number: int) -> None:
        """See an older state of an object once more, before the news of its deletion."""
        if self.life is None:
            return
        unseen = {event.uid for event in self.life.unseen if event.kind == "DELETED"}
        gone = {event.uid for event in self._server.history if event.kind == "DELETED"}
        known = [
            event
            for event in self._server.history[self.life.seen_until :]
            if event.resource in WATCHED
            and event.kind != "DELETED"
            and event not in self.life.unseen
            and (event.uid not in gone or event.uid in unseen)
        ]
        if known:
            self.counts["events seen again"] += 1
            before = self._versions()
            self.take(known[-1 - number % len(known)])
            after = self._versions()
            if any(after[uid] < before[uid] for uid in before.keys() & after.keys()):
                raise RuleBroken("R-LEVEL: an old event made what is known older")

    def _versions(self) -> dict[str, int]:
        """Versions of all that is known, by uid."""
        if self.life is None:
            return {}
        cache = self.life.cache
        versions = {uid: version for _, uid, version in cache.agentjob_keys()}
        versions |= {job.uid: version for _, job, version in cache.job_keys()}
        return versions | {pod.uid: version for _, pod, version in cache.live_pods()}

    def miss(self, event: Event) -> None:
        """Never see what happened to one object."""
        if self.life:
            self.counts["events lost"] += 1
            self.life.unseen = [e for e in self.life.unseen if e.uid != event.uid]

    def knows(self, job: Json) -> bool:
        """Whether it leads, has seen all that there is of a Job and its pods, and has acted."""
        life, meta = self.life, job["metadata"]
        if life is None or self.frozen or not life.ready or life.tasks:
            return False
        if life.queue.ready() or life.queue.failing():
            return False
        child = life.cache.child(meta["namespace"], meta["name"])
        if child is None or child.version != meta["resourceVersion"]:
            return False
        pods = life.cache._pods.get(meta["uid"], {})
        for uid in self._truth.begun_in(meta["uid"]):
            stored = self._server.by_uid(PODS, uid)
            version, view = pods.get(uid, (0, None))
            if view is None or not view.started:
                return False
            newest = int(stored["metadata"]["resourceVersion"]) if stored else version
            if version != newest or not (stored or view.gone):
                return False
        return True

    def begin_list(self) -> None:
        if self.life and self.life.listing is None:
            self.life.listing = Task(self.life.relist.run())

    # --- what it does

    def moves(self) -> list[Callable[[], object]]:
        """What could happen next in it or to its requests."""
        moves: list[Callable[[], object]] = [request.carry_out for request in self.zombies]
        if self.life is None or self.frozen:
            return moves + self._late_requests()
        moves += [partial(self.see, event) for event in self.fronts()]
        if self.life.listing:
            moves.append(self._go_on_listing)
        if self.life.ready:
            moves += [partial(self.begin_pass, key) for key in self.idle_keys()]
        for key, task in self.life.tasks.items():
            if task.request and not task.request.done:
                moves.append(task.carry_out)
            moves.append(partial(self.go_on, key))
        return moves

    def _late_requests(self) -> list[Callable[[], object]]:
        return [request.carry_out for request in self.requests()]

    def requests(self) -> list[Request]:
        """All requests that were sent and not carried out."""
        tasks = list(self.life.tasks.values()) if self.life else []
        sent = [task.request for task in tasks if task.request]
        return [request for request in (*sent, *self.zombies) if not request.done]

    def see_only(self, resource: Resource) -> None:
        """See all that is new of one kind, and make the passes that it asks for."""
        if self.life is None or self.frozen:
            return
        for event in [event for event in self.life.unseen if event.resource == resource]:
            self.see(event)
        for key in self.idle_keys() if self.life.ready else []:
            self.begin_pass(key)
            self.finish(key)

    def know_all(self) -> None:
        """Complete the first list."""
        while self.life and self.life.listing and not self.frozen:
            self._go_on_listing()

    def learn_of_trouble(self) -> None:
        """Go on with passes whose request has ended."""
        if self.life is None or self.frozen:
            return
        for key, task in list(self.life.tasks.items()):
            if task.request and task.request.done:
                self.go_on(key)

    def attend_to(self, name: str) -> None:
        """See what became of one AgentJob, and make its pass."""
        key = Key(NAMESPACE, name)
        for event in self.fronts():
            if event.resource == AGENTJOBS and event.body["metadata"]["name"] == name:
                self.see(event)
        if self.life and self.life.ready and not self.frozen and key in self.idle_keys():
            self.begin_pass(key)
            self.finish(key)

    def get_to_claim(self, name: str) -> Request | None:
        """Go on until the claim of an AgentJob is on its way."""
        for _ in range(10):
            if self.life is None or self.frozen or not self.life.ready:
                break
            for event in list(self.life.unseen):
                self.see(event)
            for key in self.idle_keys():
                self.begin_pass(key)
            task = self.life.tasks.get(Key(NAMESPACE, name))
            if task and task.request and task.request.verb == "claim" and not task.request.done:
                return task.request
            for key in list(self.life.tasks):
                self.go_on(key)
        return None

    def idle_keys(self) -> list[Key]:
        if self.life is None:
            return []
        return [key for key in self.life.queue.ready() if key not in self.life.tasks]

    def begin_pass(self, key: Key) -> None:
        if self.life is None:
            return
        del self.life.queue.due[key]
        self.counts["passes"] += 1
        self.life.tasks[key] = Task(self.life.passes.run(key))
        self._settle(key)

    def go_on(self, key: Key) -> None:
        if self.life and key in self.life.tasks:
            task = self.life.tasks[key]
            task.answer()
            self._settle(key)

    def finish(self, key: Key) -> None:
        """Let a pass go on to its end, unless the process dies of it."""
        while self.life and key in self.life.tasks:
            self.go_on(key)

    def get_so_far(self, requests: int, *, unanswered: bool = False) -> None:
        """See what there is, make passes, and stop when some of their requests were answered.

        :param unanswered: the requests that are on their way then are carried out.
        """
        if self.life is None or self.frozen or not self.life.ready:
            return
        for event in list(self.life.unseen):
            self.see(event)
        for _ in range(requests + 1):
            for key in list(self.life.tasks):
                self.go_on(key)
            for key in self.idle_keys():
                self.begin_pass(key)
        if unanswered:
            for task in self.life.tasks.values():
                task.carry_out()

    def _settle(self, key: Key) -> None:
        """Put a pass that has ended away."""
        if self.life is None or not self.life.tasks[key].finished:
            return
        task = self.life.tasks.pop(key)
        if task.error and not isinstance(task.error, AgentJobError):
            raise RuleBroken(f"R-LEVEL: a pass broke: {task.error!r}") from task.error
        self.life.queue.ended(key, task)

    def _go_on_listing(self) -> None:
        life = self.life
        if life is None or life.listing is None:
            return
        life.listing.answer()
        if life.listing.finished:
            failed, life.listing = life.listing.error, None
            if failed is None:
                life.ready = True
            elif not life.ready:
                self.begin_list()

    def run(self, rounds: int = 60) -> None:
        """Go on without trouble until nothing is left to do now."""
        for _ in range(rounds):
            if self.life is None or self.frozen:
                return
            if not self._work():
                return
        raise RuleBroken(f"R-LEVEL: passes spin: {self.idle_keys()}")

    def _work(self) -> bool:
        life = self.life
        if life is None:
            return False
        fronts, listing = self.fronts(), life.listing
        for event in fronts:
            self.see(event)
        self.know_all()
        for key in list(life.tasks):
            self.finish(key)
        keys = self.idle_keys() if life.ready else []
        for key in keys:
            self.begin_pass(key)
            self.finish(key)
        return bool(fronts or listing or keys)

    # --- deliveries

    def deliver(self, event_id: str, how: str) -> None:
        """Let an event reach its receiver, or not."""
        if self.life is None:
            return
        _, letter = self.life.post.flying[event_id]
        self.counts[f"receiver: {how}"] += 1
        if how != "unreachable":
            taken = how in {"taken", "taken, then the process dies"}
            self._truth.receives(letter.body, taken=taken, gone=how == "gone")
        if how == "taken, then the process dies":
            self.counts["crashes"] += 1
            self.die()
            return
        reply = {"taken": Reply.TAKEN, "gone": Reply.GONE}.get(how, Reply.FAILED)
        self.life.post.arrives(event_id, Outcome(reply, self._clock.now(), how))


def subject_of(letter: Letter) -> str:
    return str(orjson.loads(letter.body)["subject"])
