"""Jobs of every kind, an operator that is killed again and again, and what is counted at the end.

All that is random comes from one seed. Kills are aimed: the killer reads the audit log as it is
written, and strikes right after a request of the kind that it has chosen.
"""

import http.client
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from typing_extensions import override

from tests import audit
from tests.apiclient import Record
from tests.cluster import ClusterError
from tests.e2e.platform import TERMINAL, Platform
from tests.e2e.proof import LINE, Proof
from tests.inbox.feeding import lines_of
from tests.operator_process import OperatorProcess
from tests.receiver import NO_CONTENT, Request

OBEYS = f"{LINE}; trap 'exit 0' TERM; sleep 600 & wait"
IGNORES = f"{LINE}; trap '' TERM; while :; do sleep 1; done"
USER = "system:serviceaccount:agentjobs-system:agentjobs-operator"
AIM_SECONDS = 4.0
"""How long the killer waits for the request that it has chosen."""
POLL = 0.004
LOOK = 0.5

Document = dict[str, Any]


@dataclass(frozen=True)
class Size:
    """How much is done."""

    jobs: int
    kills: int
    restarts: int
    in_flight: int
    seconds: float
    """After which no more is begun."""


@dataclass(frozen=True)
class Kind:
    """A kind of job: how it is made, what is done to it, and how it may end."""

    name: str
    ends: tuple[str, ...]
    make: Callable[[random.Random], Document]
    """Its script and what else its spec has."""
    act: str = ""
    """`stop` or `delete`: soon after its creation, or soon after it was seen running."""


def script(text: str) -> Callable[[random.Random], Document]:
    return lambda dice: {"script": text.replace("SOME", str(dice.randint(0, 4)))}


KINDS = (
    Kind("ends", ("done",), script(f"{LINE}; sleep SOME; echo all good > /dev/termination-log")),
    Kind("fails", ("failed",), script(f"{LINE}; sleep SOME; exit 3")),
    Kind("obeys", ("cancelled",), script(OBEYS), "stop"),
    Kind("ignores", ("cancelled",), script(IGNORES), "stop"),
    Kind(
        "overdue",
        ("timed_out",),
        lambda dice: {"script": IGNORES, "deadlineSeconds": dice.randint(5, 11)},
    ),
    Kind("races", ("done", "cancelled"), script(f"{LINE}; sleep 2"), "stop"),
    Kind("deleted", ("cancelled",), script(OBEYS), "delete"),
    Kind("held", ("cancelled",), lambda _: {"script": OBEYS, "suspend": True}, "stop"),
)


def is_status(request: audit.Request, *states: str) -> bool:
    state = (request.returned.get("status") or {}).get("state")
    return request.resource == "agentjobs/status" and state in states


def delivered(request: audit.Request) -> bool:
    outbox = (request.returned.get("status") or {}).get("callback") or {}
    return any(each.get("state") == "delivered" for each in outbox.get("deliveries", ()))


AIMS: dict[str, Callable[[audit.Request], bool]] = {
    "claim": lambda r: is_status(r, "queued") and bool(r.returned["status"].get("attempts")),
    "job created": lambda r: (r.verb, r.resource) == ("create", "jobs"),
    "stop recorded": lambda r: is_status(r, "stopping"),
    "pod asked to end": lambda r: (r.verb, r.resource) == ("patch", "pods"),
    "end written": lambda r: is_status(r, *TERMINAL) and not delivered(r),
    "delivery recorded": lambda r: is_status(r, *TERMINAL) and delivered(r),
}
RECEIVED = "event received"
"""The operator is dead before it is answered."""
ANY = "any time"


class Watched(Record):
    """What watches saw: they outlive the API server, and a client that dies before its answer.

    The audit log says 504 of a request whose client was killed, though it was carried out.
    """

    @override
    def _events(self, kind: str, version: str) -> Iterator[Document]:
        for event in super()._events(kind, version):
            # An API server that has just begun refuses; one that forgot our place says so for ever.
            if event.get("type") not in {"ADDED", "MODIFIED", "DELETED"}:
                raise http.client.HTTPException(str(event))
            yield event


@dataclass
class Killer:
    """Kills the operator process and starts it again."""

    platform: Platform
    process: OperatorProcess
    dice: random.Random
    kills: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._tail = audit.Tail(self.platform.cluster.audit_log)
        self._armed = False
        self._hit = threading.Event()
        self._dead = threading.Event()

    def answer(self, _: Request) -> int:
        """The receiver's answer; while an event is aimed at, it comes after the kill."""
        if self._armed:
            self._armed = False
            self._dead.clear()
            self._hit.set()
            self._dead.wait(2)
        return NO_CONTENT

    def strike(self, *, successor: bool) -> None:
        """Kill it at an aimed moment; another one, or itself again, takes over."""
        aim = self.dice.choice([*AIMS, RECEIVED, ANY])
        struck = self._wait_for_event() if aim == RECEIVED else self._wait_for_request(aim)
        if struck and aim != RECEIVED:
            # Half of the kills come at once, half while the next steps are under way.
            time.sleep(self.dice.choice((0.0, self.dice.uniform(0, 0.06))))
        self.process.kill()
        self._dead.set()
        self.kills[aim if struck else ANY] += 1
        time.sleep(self.dice.choice((0.0, self.dice.uniform(0, 2.0))))
        name = f"successor-{sum(self.kills.values())}"
        self.process.start(wait=False, identity=name if successor else None)

    def keep_up(self) -> None:
        """Start it if it has ended by itself, as the kubelet would."""
        if not self.process.running:
            self.process.start(wait=False)

    def _wait_for_event(self) -> bool:
        self._hit.clear()
        self._armed = True
        struck = self._hit.wait(AIM_SECONDS)
        self._armed = False
        return struck

    def _wait_for_request(self, aim: str) -> bool:
        chosen = AIMS.get(aim)
        if chosen is None:
            time.sleep(self.dice.uniform(0, 2))
            return False
        list(self._tail.new("never in a line"))
        end = time.monotonic() + AIM_SECONDS
        while time.monotonic() < end:
            if any(r.taken and chosen(r) for r in self._tail.new(f'"username":"{USER}"')):
                return True
            time.sleep(POLL)
        return False


@dataclass
class Job:
    """A job of the run."""

    kind: Kind
    name: str
    uid: str
    act_at: float | None
    """When its act is due; None until it is seen running."""


class Run:
    """Makes jobs, does to them what their kind says, and has the operator killed meanwhile."""

    def __init__(self, platform: Platform, killer: Killer, proof: Proof, size: Size) -> None:
        self.platform = platform
        self.watched = Watched(platform.api)
        self.killer = killer
        self.proof = proof
        self.size = size
        self.jobs: list[Job] = []
        self.restarts = 0
        self._started = time.monotonic()
        self._dice = random.Random(killer.dice.random())  # noqa: S311 - dice
        self._errors: list[BaseException] = []
        self._unfinished = 0
        self._looked_at = 0.0

    def play(self) -> None:
        """Do it all, and wait until every job has ended and was told about."""
        violence = threading.Thread(target=self._guarded, args=(self._violence,), daemon=True)
        violence.start()
        waiting: list[Job] = []
        while self._goes_on(violence, waiting):
            self._look(waiting)
            waiting += self._create_some()
            now = time.monotonic()
            for job in [each for each in waiting if each.act_at and each.act_at <= now]:
                self._act(job)
                waiting.remove(job)
            time.sleep(POLL * 25)
        violence.join(60)
        if self._errors:
            raise self._errors[0]
        self._settle()

    def _goes_on(self, violence: threading.Thread, waiting: list[Job]) -> bool:
        more = len(self.jobs) < self.size.jobs and not self._late
        return violence.is_alive() or bool(waiting) or more

    @property
    def _late(self) -> bool:
        return time.monotonic() - self._started > self.size.seconds

    def _create_some(self) -> list[Job]:
        """One more job in step with the kills, if not too many are unfinished."""
        killed = sum(self.killer.kills.values())
        if self._late or len(self.jobs) >= self.size.jobs * (killed + 2) / self.size.kills:
            return []
        if len(self.jobs) >= self.size.jobs or self._unfinished >= self.size.in_flight:
            return []
        if self._dice.random() < 0.5:
            return []
        job = self._create(KINDS[len(self.jobs) % len(KINDS)])
        self.jobs.append(job)
        return [job] if job.kind.act else []

    def _create(self, kind: Kind) -> Job:
        name = f"{kind.name}-{len(self.jobs)}"
        made = kind.make(self._dice)
        pod = self.proof.pod() | {"terminationGracePeriodSeconds": 2}
        body = self.platform.job(name, made.pop("script"), pod=pod, **made)
        body["metadata"]["namespace"] = self.platform.namespace
        answer = self._patiently(lambda: self.platform.api.try_create(body))
        if answer.code == 409:
            answer = self._patiently(lambda: self._get(name))
        uid = str(answer.object()["metadata"]["uid"])
        early = kind.name == "held" or self._dice.random() < 0.4
        return Job(kind, name, uid, self._soon(4) if early else None)

    def _soon(self, seconds: float) -> float:
        return time.monotonic() + self._dice.uniform(0, seconds)

    def _get(self, name: str) -> Any:
        return self.platform.api.get("AgentJob", self.platform.namespace, name)

    def _act(self, job: Job) -> None:
        api, place = self.platform.api, ("AgentJob", self.platform.namespace, job.name)
        stop = {"spec": {"stop": {"reason": "no longer needed"}}}
        if job.kind.act == "stop":
            self._patiently(lambda: api.patch(*place, stop)).object()
        else:
            answer = self._patiently(lambda: api.delete(*place))
            assert answer.code in {200, 202, 404}, answer

    def _look(self, waiting: list[Job]) -> None:
        """See now and then which jobs run by now, or have ended."""
        if time.monotonic() < self._looked_at + LOOK:
            return
        bodies = self._bodies()
        self._looked_at = time.monotonic()
        self._unfinished = sum(not ended(body) for body in bodies.values())
        for job in waiting:
            state = bodies.get(job.uid, {}).get("status", {}).get("state")
            if job.act_at is None and state in {"running", *TERMINAL}:
                job.act_at = self._soon(1.5)

    def _bodies(self) -> dict[str, Document]:
        items = self._patiently(
            lambda: self.platform.api.send(
                "GET",
                f"/apis/agentjobs.dev/v1alpha1/namespaces/{self.platform.namespace}/agentjobs",
            )
        ).object()["items"]
        return {body["metadata"]["uid"]: body for body in items}

    def _patiently(self, call: Callable[[], Any]) -> Any:
        """Ask again while the API server is away."""
        end = time.monotonic() + 60
        while True:
            try:
                answer = call()
            except (OSError, http.client.HTTPException):
                if time.monotonic() > end:
                    raise
            else:
                # 403 too: right after its start it does not know all rights yet.
                if answer.code not in {403, 429} and answer.code < 500:
                    return answer
                assert time.monotonic() < end, answer
            time.sleep(0.2)

    def _violence(self) -> None:
        """Kill the operator, and now and then restart the API server, while jobs live."""
        size, dice = self.size, self.killer.dice
        every = size.kills // (size.restarts + 1)
        for number in range(1, size.kills + 1):
            if self._late:
                return
            self._wait_until_up()
            self.killer.strike(successor=number % 10 == size.kills % 10)
            if number % every == 0 and self.restarts < size.restarts:
                time.sleep(dice.uniform(0, 1))
                self.platform.cluster.restart_apiserver()
                self.restarts += 1

    def _wait_until_up(self) -> None:
        """Wait until it leads, most times; now and then it dies before that."""
        end = time.monotonic() + (30 if self.killer.dice.random() < 0.9 else 1)
        while time.monotonic() < end and not self.killer.process.leads:
            self.killer.keep_up()
            time.sleep(0.05)

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except (AssertionError, ClusterError, OSError) as error:
            self._errors.append(error)

    def _settle(self) -> None:
        """Wait until everything has ended and nothing is owed; what does not is found later."""
        end = time.monotonic() + 90
        while time.monotonic() < end:
            self.killer.keep_up()
            if all(ended(body) and told(body) for body in self._bodies().values()):
                return
            time.sleep(LOOK)


def ended(body: Document) -> bool:
    deleted = "deletionTimestamp" in body["metadata"]
    return body.get("status", {}).get("state") in TERMINAL and not deleted


def told(body: Document) -> bool:
    conditions = {c["type"]: c["status"] for c in body["status"].get("conditions", ())}
    return conditions.get("CallbackDelivered") == "True"


@dataclass
class Tally:
    """The counts."""

    jobs: int
    ends: Counter[str]
    lost: list[str]
    unseen: list[str]
    wrong: list[str]
    twice: list[str]
    changed: list[str]
    owed: int
    received: int
    requests: int
    missing: list[str]
    several_ids: list[str]
    forged: list[str]
    """Jobs of whose requests a signature is wrong, or the body differs from try to try."""
    not_told_once: dict[str, int]
    """Jobs of which an agent's inbox, given all these requests, hands over more lines or fewer than
    one."""
    kills: Counter[str]
    restarts: int
    seconds: float

    def table(self) -> str:
        rows: list[tuple[str, object]] = [
            ("seconds", f"{self.seconds:.0f}"),
            ("SIGKILLs of the operator", sum(self.kills.values())),
            *((f"  {aim}", count) for aim, count in sorted(self.kills.items())),
            ("restarts of the API server", self.restarts),
            ("jobs", self.jobs),
            *((f"  {state}", count) for state, count in sorted(self.ends.items())),
            ("lost (no end)", len(self.lost)),
            ("pods that nobody saw end", len(self.unseen)),
            ("ended otherwise than they should", len(self.wrong)),
            ("run, or made, twice", len(self.twice)),
            ("ends that changed", len(self.changed)),
            ("events owed", self.owed),
            ("events received, distinct ids", self.received),
            ("requests to the receiver", self.requests),
            ("events missing", len(self.missing)),
            ("jobs with several ids", len(self.several_ids)),
            ("jobs not told to an agent once", len(self.not_told_once)),
        ]
        return "\n".join(f"{name:<36}{value!s:>8}" for name, value in rows)


def tally(run: Run, log: list[audit.Request]) -> Tally:
    """Count what became of the jobs of a run, from records that are not the operator's."""
    platform = run.platform
    begun = run.proof.began()
    writes = [r for r in log if r.taken and r.resource == "agentjobs/status"]
    written: dict[str, list[Document]] = {job.uid: [] for job in run.jobs}
    for each in writes:
        uid = each.returned["metadata"]["uid"]
        if uid in written and each.returned["status"].get("state") in TERMINAL:
            written[uid].append(each.returned["status"])
    bodies = run._bodies()
    for uid, statuses in written.items():
        for body in [*run.watched.history(uid), *([bodies[uid]] if uid in bodies else [])]:
            if body.get("status", {}).get("state") in TERMINAL:
                statuses.append(body["status"])
    ends = {job.name: last(written[job.uid]) for job in run.jobs}
    requests = {job.name: platform.receiver.of(job_id(run, job)) for job in run.jobs}
    ids = {name: {each.id for each in of} for name, of in requests.items()}
    right = {
        job.name: f"evt_{job.uid}_{EVENTS[ends[job.name]['state']]}"
        for job in run.jobs
        if ends[job.name]
    }
    arrived = sorted((each for of in requests.values() for each in of), key=lambda each: each.at)
    told = lines_of(arrived, platform.public_key, platform.namespace)
    return Tally(
        jobs=len(run.jobs),
        ends=Counter(status["state"] for status in ends.values() if status),
        lost=[
            job.name
            for job in run.jobs
            if not ends[job.name] or (job.kind.act == "delete" and job.uid in bodies)
        ],
        unseen=[
            name
            for name, status in ends.items()
            if (status.get("cause") or {}).get("evidence") == "lost"
        ],
        wrong=[
            f"{j.name}: {why}"
            for j in run.jobs
            if (why := fault(j, ends[j.name], begun[job_id(run, j)]))
        ],
        twice=twice(run, log, begun),
        changed=[job.name for job in run.jobs if len({what(s) for s in written[job.uid]}) > 1],
        owed=len(run.jobs),
        received=len(set().union(*ids.values())),
        requests=sum(len(of) for of in requests.values()),
        missing=[job.name for job in run.jobs if right.get(job.name) not in ids[job.name]],
        several_ids=[name for name, of in ids.items() if len(of) > 1],
        forged=[name for name, of in requests.items() if not genuine(of, platform.public_key)],
        not_told_once={
            job.name: told[job_id(run, job)] for job in run.jobs if told[job_id(run, job)] != 1
        },
        kills=run.killer.kills,
        restarts=run.restarts,
        seconds=time.monotonic() - run._started,
    )


def genuine(requests: list[Request], public_key: str) -> bool:
    """Whether every try is signed, and says the same."""
    for each in requests:
        each.verify(public_key)
    return len({each.body for each in requests}) <= 1


EVENTS = {
    "done": "job_completed",
    "failed": "job_completed",
    "cancelled": "job_cancelled",
    "timed_out": "job_timed_out",
}


def last(statuses: list[Document]) -> Document:
    return statuses[-1] if statuses else {}


def what(status: Document) -> tuple[str, str, str]:
    """What of an end must never change."""
    return status["state"], str(status.get("finishedAt")), str(status.get("cause"))


def job_id(run: Run, job: Job) -> str:
    return f"{job.name}.{run.platform.namespace}"


def twice(run: Run, log: list[audit.Request], begun: Counter[str]) -> list[str]:
    """Jobs of which anything was made or begun more than once."""
    names = {job.uid: job.name for job in run.jobs}
    made = Counter(uid for uid, _ in audit.jobs_made(log).elements() if uid in names)
    found = [f"{names[uid]}: {count} Jobs" for uid, count in made.items() if count > 1]
    owners = {
        r.returned["metadata"]["uid"]: audit.controller_of(r.returned["metadata"])
        for r in log
        if r.taken and (r.verb, r.resource) == ("create", "jobs")
    }
    for job_uid, count in audit.pods_made(log).items():
        if count > 1 and owners.get(job_uid) in names:
            found.append(f"{names[owners[job_uid]]}: {count} pods")
    for uid, name in names.items():
        jobs = run.watched.children(uid)
        pods = [pod for job in jobs for pod in run.watched.children(job["metadata"]["uid"])]
        if len(jobs) > 1 or len(pods) > 1:
            found.append(f"{name}: {len(jobs)} Jobs and {len(pods)} pods were watched")
    return found + [f"{name}: began {count} times" for name, count in begun.items() if count > 1]


def fault(job: Job, status: Document, begun: int) -> str:
    """What is wrong with how a job ended; nothing if nothing is."""
    if not status:
        return ""
    if status["state"] not in job.kind.ends:
        return f"ended {status['state']}: {status.get('cause')}"
    cause = status.get("cause") or {"ran": True, "evidence": "observed"}
    if cause["evidence"] != "observed" and status["state"] in {"done", "failed"}:
        # Only a pod that was asked to go before its tool was seen running may go unseen.
        return f"evidence lost: {cause}"
    if begun and not cause["ran"]:
        return "its tool began, its end says that it did not"
    if not begun and status["state"] in {"done", "failed"}:
        return "its tool never began"
    return ""
