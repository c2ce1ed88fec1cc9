"""What really happens to tools, beside what objects say of it; and what must hold of both."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from itertools import zip_longest
from typing import Any

import orjson

from agentjobs.api.agentjob import AgentJob, AgentJobStatus, Attempt, DeliveryState, Retry
from agentjobs.api.names import (
    ANNOTATION_PLACEHOLDER,
    ANNOTATION_RETIRED,
    RETIRED_BY_QUEUE,
    CauseCode,
    EventType,
    Evidence,
    State,
    WaitingCode,
)
from agentjobs.domain.callbacks import DELETION_PATIENCE
from agentjobs.domain.mergepatch import merge_patch
from agentjobs.domain.observed import Policy
from agentjobs.domain.retries import GROUP_OF
from agentjobs.domain.status import repeatable
from agentjobs.domain.verdict import OOM_KILLED
from agentjobs.kube import AGENTJOBS, AGENTTOOLS, INPUTREQUESTS, JOBS, LEASES, NODES, PODS
from tests.model.apiserver import TERMINAL, ApiServer, Event, Json
from tests.model.clock import Clock, moment

NODE_LOST_SECONDS = Policy().node_lost
OVER = {"Succeeded", "Failed"}


class RuleBroken(AssertionError):  # noqa: N818 - a verdict on the operator, not an error of ours
    """A rule of the design does not hold."""


@dataclass
class Container:
    """The tool's container of one pod, on its node."""

    pod: str
    """Name of the pod."""
    owner: str
    """uid of the AgentJob."""
    job: str
    """uid of the Job."""
    job_name: str
    running: bool = False
    started_at: datetime | None = None
    ended_at: datetime | None = None
    code: int = 0
    reason: str = ""
    never_started: bool = False
    told_to_go: datetime | None = None
    """When the kubelet took note that the pod must go; a signal reaches what runs then."""
    why: str = ""
    disruption: str = ""
    grace: int = 0
    exited_unasked: bool = False
    """It had ended by itself before any signal."""

    @property
    def began(self) -> bool:
        return self.started_at is not None

    @property
    def over(self) -> bool:
        return not self.running and (
            self.began or self.never_started or self.told_to_go is not None
        )


@dataclass
class Life:
    """All that is known of one AgentJob from its creation on."""

    name: str
    uid: str
    job_creates: Counter[str] = field(default_factory=Counter)
    starts: Counter[str] = field(default_factory=Counter)
    """How often its tool has begun, by uid of the Job."""
    claimed_late: bool = False
    """Its first claim was carried out when another operator led already."""
    end: AgentJob | None = None
    """The AgentJob as its end was first stored."""
    gone: bool = False
    gone_at: datetime | None = None
    deleted: bool = False
    asked_at: datetime | None = None
    """When the operator has recorded that it is to end."""
    received: Counter[str] = field(default_factory=Counter)
    taken: bool = False
    refused_for_good: bool = False
    job: AgentJob | None = None
    """The newest stored one."""

    @property
    def lost(self) -> bool:
        """Whether its end is on record as one that nobody saw."""
        cause = self.end.status.cause if self.end else None
        return cause is not None and cause.evidence is Evidence.LOST


class Truth:
    """Watches the API server and the nodes, and says at once when a rule is broken."""

    def __init__(self, server: ApiServer, clock: Clock) -> None:
        self._server = server
        self._clock = clock
        self.lives: dict[str, Life] = {}
        self.containers: dict[str, Container] = {}
        self._witnesses: dict[str, set[str]] = {}
        """Which operator processes got to know a pod, by its uid."""
        self._let_go: set[str] = set()
        """uids of pods that the Job controller let go uncounted: they leave no trace when gone."""
        self._end_witnesses: dict[str, set[str]] = {}
        """Which got to know its end; others know of a pod that is gone what the Job says."""
        self.placed_again: set[str] = set()
        """uids of Jobs that a queue gave another place after their tool had begun, before an
        operator could know it: the tool begins again, and nothing could prevent it."""
        self.held_back: set[str] = set()
        """uids of Jobs that were ended because their AgentJob was suspended."""
        self.closed: Counter[str] = Counter()
        """How questions were closed."""
        self.exceeded = 0
        """How often a claim that came late went beyond a limit."""
        self._were_lost: set[str] = set()
        """Nodes that were gone or silent for long; that they are back may not be known yet."""
        self._words: dict[str, dict[str, Event]] = {}
        """The newest that each operator process was told of each node."""
        self._lost_when_sent: dict[tuple[str, str], set[str]] = {}
        """Nodes that were lost, by what its sender had been told, when the last request about a
        Job was sent; by sender and name of the Job."""
        self._story: list[tuple[float, str, Event | None, Json | None]] = []
        server.observers.append(self._observe)

    def witness(self, pod: Json, process: str) -> None:
        """Take note that an operator process got to know a pod's state."""
        uid = pod["metadata"]["uid"]
        self._witnesses.setdefault(uid, set()).add(process)
        if pod["status"].get("phase") in OVER:
            self._end_witnesses.setdefault(uid, set()).add(process)

    def is_told(self, node: Json, process: str, *, gone: bool) -> None:
        """Take note of what an operator process gets to know of a node, old or new."""
        word = Event(NODES, "DELETED" if gone else "MODIFIED", node)
        words, name = self._words.setdefault(process, {}), node["metadata"]["name"]
        known = words.get(name)
        if known is None or known.uid != word.uid or _version(known) <= _version(word):
            words[name] = word

    # --- what happens

    def starts(self, pod_uid: str) -> None:
        container = self.containers[pod_uid]
        life = self.lives[container.owner]
        others = self._running(life)
        container.running = True
        container.started_at = self._clock.now()
        life.starts[container.job] += 1
        self._tell(f"the tool in {pod_uid} begins")
        if life.starts[container.job] > 1 and container.job not in self.placed_again:
            raise RuleBroken(f"R-ATTEMPT: the tool of {life.uid} begins again in {container.job}")
        if others and not self._may_run_beside(life, others):
            raise RuleBroken(f"R-ATTEMPT: two pods of {life.uid} run at once")
        counted = [uid for uid in life.starts if not self._held_back(life, uid)]
        if life.job and len(counted) > _retry(life.job).max_attempts:
            raise RuleBroken(f"R-ATTEMPT: {life.uid} begins more often than it may")
        if (life.end or life.gone) and not life.lost:
            raise RuleBroken(f"R-DEAD: the tool of {life.uid} begins though its job is over")
        if self._is_on_record_as_over(life, container) and not self._given_up(pod_uid):
            raise RuleBroken(f"R-DEAD: an attempt of {life.uid} begins after its recorded end")

    def begun_in(self, job_uid: str) -> list[str]:
        """uids of pods of a Job whose tool has begun."""
        return [uid for uid, each in self.containers.items() if each.job == job_uid and each.began]

    def _running(self, life: Life) -> list[str]:
        return [uid for uid, c in self.containers.items() if c.owner == life.uid and c.running]

    def _held_back(self, life: Life, job_uid: str) -> bool:
        """Whether a tool that may be repeated was ended because its AgentJob was suspended."""
        return job_uid in self.held_back and life.job is not None and repeatable(life.job.status)

    def _may_run_beside(self, life: Life, others: list[str]) -> bool:
        """Whether a tool that may be repeated runs on only where nobody can end it any more."""
        forgiving = life.job is not None and repeatable(life.job.status)
        placed_again = all(self.containers[uid].job in self.placed_again for uid in others)
        return (forgiving or placed_again) and all(self._given_up(uid) for uid in others)

    @staticmethod
    def _is_on_record_as_over(life: Life, container: Container) -> bool:
        attempts = (life.job.status.attempts if life.job else None) or ()
        return any(each.job_name == container.job_name and each.cause for each in attempts)

    def ends(self, pod_uid: str, code: int, reason: str = "Error") -> None:
        container = self.containers[pod_uid]
        container.running = False
        container.ended_at = self._clock.now()
        container.code, container.reason = code, reason
        container.exited_unasked = container.told_to_go is None
        self._tell(f"the tool in {pod_uid} ends with {code}")

    def receives(self, body: bytes, *, taken: bool, gone: bool) -> None:
        """Take note of an event that reached the receiver."""
        event = orjson.loads(body)
        name = event["subject"].split(".")[0]
        uid = event["id"].split("_")[1]
        life = self.lives[uid]
        if event["type"] == EventType.INPUT_REQUIRED:
            # It may come late. Where it is refused for good, so will be the end.
            self._check_question_told(event)
            return
        if life.end is None:
            raise RuleBroken(f"R-CALLBACK: an event of {name} before its end is stored")
        status = life.end.status
        if event["data"]["status"] != status.state:
            raise RuleBroken(f"R-EVENT: {name} ended {status.state}, its event says otherwise")
        life.received[event["id"]] += 1
        life.taken |= taken
        life.refused_for_good |= gone
        if len(life.received) > 1:
            raise RuleBroken(f"R-EVENT: events of {name} have several ids: {life.received}")

    def _check_question_told(self, event: Any) -> None:
        asked = self._server.by_uid(INPUTREQUESTS, event["id"].rpartition("_")[2])
        if asked and asked["spec"]["prompt"] != event["data"]["summary"]:
            raise RuleBroken(f"R-EVENT: {event['subject']} asked {asked}, the event: {event}")

    def _tell(self, line: str) -> None:
        self._story.append((self._clock.monotonic(), line, None, None))

    @property
    def story(self) -> list[str]:
        """What happened, line by line, for whoever must find out why."""
        return [
            f"{at:7.1f}  {_line(event, old) if event else line}"
            for at, line, event, old in self._story
        ]

    # --- what is sent

    def sends(self, namespace: str, name: str, body: Mapping[str, Any]) -> bool:
        """Tell whether a status that an operator sends claims an attempt; it must be in time."""
        stored = self._server.find(AGENTJOBS, namespace, name) or {}
        known, new = stored.get("status") or {}, body.get("status") or {}
        if len(new.get("attempts") or ()) <= len(known.get("attempts") or ()):
            return False
        deadline = new.get("deadlineAt") or known.get("deadlineAt")
        if deadline and self._clock.now() >= moment(deadline):
            raise RuleBroken(f"R-DEADLINE: an attempt of {name} is claimed after the deadline")
        return True

    def sends_to_job(self, process: str, name: str) -> None:
        """Take note of which nodes an operator process has to give up when it writes to a Job."""
        words = self._words.get(process, {}).items()
        lost = {node for node, w in words if w.kind == "DELETED" or self._is_silent(w.body)}
        self._lost_when_sent[process, name] = lost

    # --- what is stored

    def _observe(self, event: Event, old: Json | None) -> None:
        if event.resource != LEASES:
            self._story.append((self._clock.monotonic(), "", event, old))
        if event.resource == NODES and old and (event.kind == "DELETED" or self._is_silent(old)):
            self._were_lost.add(event.body["metadata"]["name"])
        elif event.resource == AGENTJOBS:
            self._observe_agentjob(event, old)
        elif event.resource == JOBS:
            self._observe_job(event.body, old)
        elif event.resource == PODS:
            self._observe_pod(event, old)
        elif event.resource == INPUTREQUESTS and old and event.kind != "DELETED":
            self._observe_answer(event.body, old)

    def _observe_answer(self, new: Json, old: Json) -> None:
        """R-POLICY-INPUT: closed once; without an answer only when none can come any more."""
        name = new["metadata"]["name"]
        before, outcome = (each.get("status", {}).get("outcome") for each in (old, new))
        if before and before != outcome:
            raise RuleBroken(f"R-POLICY-INPUT: {name} was {before} and becomes {outcome}")
        if before != outcome:
            self.closed[outcome] += 1
        if outcome == "expired" and self._clock.now() < moment(new["spec"]["expiresAt"]):
            raise RuleBroken(f"R-REPORT: {name} is closed before its time is over")
        life = self.lives[new["spec"]["jobUID"]]
        if outcome == "withdrawn" and life.end is None and not life.gone:
            raise RuleBroken(f"R-REPORT: {name} is withdrawn though {life.uid} goes on")

    def _observe_agentjob(self, event: Event, old: Json | None) -> None:
        job = AgentJob.from_json(event.body)
        uid = job.metadata.uid
        life = self.lives.setdefault(uid, Life(job.metadata.name, uid))
        known, life.job = life.job, job
        life.deleted |= job.metadata.deletion_timestamp is not None
        if event.kind == "DELETED":
            life.gone, life.gone_at = True, self._clock.now()
        before = (old or {}).get("status") or {}
        if life.asked_at is None and "ending" in before:
            life.asked_at = moment(before["ending"]["at"])
        if known is not None:
            _check_course(known, job)
            if len(job.status.attempts or ()) > len(known.status.attempts or ()):
                self._check_claim(life, known, job)
        if job.status.state in TERMINAL and before.get("state") not in TERMINAL:
            life.end = job
            self._check_end(life, known or job, job)

    def _observe_job(self, body: Json, old: Json | None) -> None:
        if old is None:
            self._observe_new_job(body)
        elif _is_retired(body) and not _is_retired(old):
            if body["metadata"]["annotations"][ANNOTATION_RETIRED] != RETIRED_BY_QUEUE:
                self.held_back.add(body["metadata"]["uid"])
            else:
                self._check_retirement(old)

    def _observe_pod(self, event: Event, old: Json | None) -> None:
        if old is None:
            self._observe_new_pod(event.body)
            return
        over = old["status"].get("phase") in OVER
        if _is_tracked(old) and not _is_tracked(event.body) and not over:
            self._let_go.add(event.uid)

    def _observe_new_job(self, body: Json) -> None:
        meta = body["metadata"]
        owner = (meta.get("ownerReferences") or [{}])[0].get("uid", "")
        life = self.lives.get(owner)
        if life is None:
            return
        life.job_creates[meta["name"]] += 1
        if life.job_creates[meta["name"]] > 1:
            raise RuleBroken(f"R-CLAIM: Job {meta['name']} of {owner} is created a second time")
        stored = self._server.by_uid(AGENTJOBS, owner)
        attempts = ((stored or {}).get("status") or {}).get("attempts") or ()
        if stored and meta["name"] not in [each["jobName"] for each in attempts]:
            raise RuleBroken(f"R-CLAIM: Job {meta['name']} is created without a claim")
        if ANNOTATION_PLACEHOLDER not in (meta.get("annotations") or {}) and life.end:
            raise RuleBroken(f"R-STATE-FINAL: Job {meta['name']} is created after the end")

    def _check_retirement(self, job: Json) -> None:
        """A tool that has its place runs on: only what loses it is retired.

        So is what is given up with its node (R-DEAD): before its end is written, a queue must not
        be able to have it run again. Whoever writes need not know yet that the node is back.
        """
        name = job["metadata"]["name"]
        lost = self._lost_when_sent.get((self._server.written_by, name), set())
        for uid in self.begun_in(job["metadata"]["uid"]):
            pod = self._server.by_uid(PODS, uid)
            goes = job["spec"].get("suspend") or not pod or "deletionTimestamp" in pod["metadata"]
            if self.containers[uid].running and not goes and pod["spec"]["nodeName"] not in lost:
                raise RuleBroken(f"R-ATTEMPT: {name} is retired while it runs")

    def _observe_new_pod(self, body: Json) -> None:
        job = self._server.by_uid(JOBS, body["metadata"]["ownerReferences"][0]["uid"])
        owner = (job or {"metadata": {}})["metadata"].get("ownerReferences") or [{}]
        uid = owner[0].get("uid", "")
        if uid in self.lives:
            pod, meta = body["metadata"], (job or body)["metadata"]
            self.containers[pod["uid"]] = Container(pod["name"], uid, meta["uid"], meta["name"])

    def _check_claim(self, life: Life, before: AgentJob, after: AgentJob) -> None:
        """An attempt may follow, and there is room for it."""
        spec, status = before.spec, before.status
        if spec.stop or before.metadata.deletion_timestamp or status.ending or status.finished_at:
            raise RuleBroken(f"R-CLAIM: {life.uid} was to end and claims another attempt")
        running = self._running(life)
        if running and not self._may_run_beside(life, running):
            raise RuleBroken(f"R-ATTEMPT: {life.uid} claims an attempt while another one runs")
        if status.attempts:
            self._check_retry(life, status.attempts[-1], _retry(after))
        else:
            self._check_slots(life, after)

    def _check_retry(self, life: Life, last: Attempt, retry: Retry) -> None:
        group = GROUP_OF.get(last.cause) if last.cause else None
        if group is None:
            raise RuleBroken(f"R-ATTEMPT: {life.uid} claims an attempt after {last.cause}")
        began = [c for c in self._of(life, last.job_name) if c.began]
        held_back = last.job_uid and self._held_back(life, last.job_uid)
        if began and group not in retry.causes and not held_back:
            raise RuleBroken(f"R-ATTEMPT: {life.uid} may not be repeated after {last.cause}")
        if last.cause is CauseCode.OOM_KILLED and not any(c.reason == OOM_KILLED for c in began):
            raise RuleBroken(f"R-CAUSE: {life.uid} was oom_killed, which nothing shows")

    def _of(self, life: Life, job_name: str) -> list[Container]:
        mine = (c for c in self.containers.values() if c.owner == life.uid)
        return [c for c in mine if c.job_name == job_name]

    def _check_slots(self, life: Life, job: AgentJob) -> None:
        """R-SLOTS: no leader claims too many. What a former one had sent may be one too many; its
        Job has to wait then, which the audit log shows."""
        limit = self._limit(job)
        if limit is None or job.spec.tool_ref is None:
            return
        life.claimed_late = self._server.written_by != self._leader()
        holders = [each for each in self._users(job.spec.tool_ref.name) if _holds(each.job)]
        if len(holders) > limit:
            self.exceeded += 1
            if sum(not each.claimed_late for each in holders) > limit:
                raise RuleBroken(f"R-SLOTS: {life.uid} is one too many of {limit}")

    def _leader(self) -> str:
        lease = self._server.all(LEASES)[0]
        return str(lease["spec"]["holderIdentity"])

    def _users(self, tool: str) -> list[Life]:
        """AgentJobs of a tool that are there and not over."""
        lives = (life for life in self.lives.values() if life.job and not life.gone)
        return [
            life
            for life in lives
            if life.job
            and life.job.spec.tool_ref
            and life.job.spec.tool_ref.name == tool
            and not life.job.status.finished_at
        ]

    def _limit(self, job: AgentJob) -> int | None:
        ref, namespace = job.spec.tool_ref, job.metadata.namespace
        tool = self._server.find(AGENTTOOLS, namespace, ref.name) if ref else None
        return tool["spec"].get("maxConcurrent") if tool else None

    def _check_end(self, life: Life, before: AgentJob, job: AgentJob) -> None:
        status, cause = job.status, job.status.cause
        last = status.attempts[-1] if status.attempts else None
        mine = self._of(life, last.job_name) if last else []
        lost = cause is not None and cause.evidence is Evidence.LOST
        runs = [uid for uid in self._running(life) if self.containers[uid] in mine]
        if runs and not (lost and all(self._given_up(uid) for uid in runs)):
            raise RuleBroken(f"R-DEAD: {life.uid} ends {status.state} while its tool runs")
        earlier = [uid for uid in self._running(life) if uid not in runs]
        if earlier and not self._may_run_beside(life, earlier):
            raise RuleBroken(f"R-DEAD: {life.uid} ends while an earlier attempt runs")
        began = [uid for uid, c in self.containers.items() if c.owner == life.uid and c.began]
        if cause and not cause.ran and any(self._is_known(uid, before) for uid in began):
            raise RuleBroken(f"R-CAUSE: {life.uid} ends with ran=false, but its tool began")
        if status.state is State.DONE and not any(self._did_well(life, c) for c in mine):
            raise RuleBroken(f"R-HONEST: {life.uid} is done without an unasked exit 0")
        out_of_memory = any(c.reason == OOM_KILLED for c in mine)
        if cause and cause.code is CauseCode.OOM_KILLED and not out_of_memory:
            raise RuleBroken(f"R-CAUSE: {life.uid} is oom_killed, which nothing shows")
        if cause and cause.exit_code is not None:
            self._check_exit_code(life, cause.exit_code, mine)

    def _is_known(self, uid: str, before: AgentJob) -> bool:
        """Whether a pod was known to whoever writes of it: seen, on record, or there to be seen.

        What is on record of the pod that replaced it says nothing of one that left no trace.
        """
        witnesses = self._witnesses.get(uid, set())
        if uid not in self._let_go or self._server.written_by in witnesses:
            return bool(witnesses)
        status, name = before.status, self.containers[uid].pod
        on_record = uid in (status.pod_uids or ()) or status.pod_name == name
        return on_record or status.started_at is not None

    def _did_well(self, life: Life, container: Container) -> bool:
        """Whether a tool exited 0 before any signal, as far as the operator could know.

        Where the operator did not ask it to go and nobody saw its pod end, the Job's word counts.
        That the pod's own deadline came before the operator's request is not told by the pod.
        """
        uid = next(uid for uid, each in self.containers.items() if each is container)
        told, asked = container.told_to_go, life.asked_at
        saw = self._server.by_uid(PODS, uid) or (
            self._server.written_by in self._end_witnesses.get(uid, set())
        )
        unseen = not saw and not asked
        by_backstop = bool(container.why and told and asked and told < asked)
        well = container.ended_at is not None and container.code == 0
        return well and (container.exited_unasked or unseen or by_backstop)

    def _given_up(self, uid: str) -> bool:
        """Whether a pod is gone, or its node is gone or was silent for long enough."""
        pod = self._server.by_uid(PODS, uid)
        name = pod["spec"].get("nodeName", "") if pod else ""
        node = self._server.find(NODES, "", name)
        return node is None or name in self._were_lost or self._is_silent(node)

    def _is_silent(self, node: Json) -> bool:
        for ready in (node.get("status") or {}).get("conditions") or ():
            silent = self._clock.now() - moment(ready["lastTransitionTime"])
            return bool(ready["status"] != "True" and silent.total_seconds() >= NODE_LOST_SECONDS)
        return False

    @staticmethod
    def _check_exit_code(life: Life, code: int, mine: list[Container]) -> None:
        if code not in [c.code for c in mine if c.ended_at]:
            raise RuleBroken(f"R-CAUSE: {life.uid} has exit code {code}, its tool has not")

    # --- what must hold in the end

    def check_all_is_over(self) -> None:
        for life in self.lives.values():
            if life.end is None and not life.gone:
                raise RuleBroken(f"R-DEADLINE: {life.uid} never ends: {_short(life)}")
            if life.deleted and not life.gone:
                raise RuleBroken(f"R-STOP: {life.uid} was deleted and never goes: {_short(life)}")
            self._check_told(life)
        for question in self._questions():
            if not self.lives[question["spec"]["jobUID"]].gone:
                name = question["metadata"]["name"]
                raise RuleBroken(f"R-REPORT: {name} is never closed")

    def check_states_tell_of_questions(self) -> None:
        """R-STATE-DERIVED: where all is seen, who runs and asks requires input, and nobody else."""
        now = self._clock.now()
        asking = {
            each["spec"]["jobUID"]
            for each in self._questions()
            if now < moment(each["spec"]["expiresAt"])
        }
        for life in self.lives.values():
            state = life.job.status.state if life.job and not life.gone else None
            wrong = State.RUNNING if life.uid in asking else State.INPUT_REQUIRED
            if state is wrong:
                raise RuleBroken(f"R-STATE-DERIVED: {life.uid} is {state}: {_short(life)}")

    def _questions(self) -> list[Json]:
        """Those that are not closed."""
        found = self._server.all(INPUTREQUESTS)
        return [each for each in found if not each.get("status", {}).get("outcome")]

    def check_nobody_waits_in_vain(self) -> None:
        """R-SLOTS: where all is at rest, who waits for a slot waits because none is free."""
        for life in self.lives.values():
            job = life.job
            waiting = job.status.waiting if job and not life.gone else None
            if job is None or waiting is None or waiting.code is not WaitingCode.SLOT:
                continue
            users = self._users(job.spec.tool_ref.name) if job.spec.tool_ref else []
            if sum(_runs(each.job) for each in users) < (self._limit(job) or 0):
                raise RuleBroken(f"R-SLOTS: {life.uid} waits though there is a slot")
        for job in self._server.all(JOBS):
            self._check_not_forgotten(job)

    def _check_not_forgotten(self, job: Json) -> None:
        """R-ATTEMPT: what is retired is over as soon as its pods are."""
        uid = job["metadata"]["uid"]
        owned = (
            p for p in self._server.all(PODS) if self.containers[p["metadata"]["uid"]].job == uid
        )
        if not _is_retired(job) or any(p["status"].get("phase") not in OVER for p in owned):
            return
        for life in self.lives.values():
            attempts = (life.job.status.attempts if life.job else None) or ()
            if life.end is None and any(a.job_uid == uid and a.cause is None for a in attempts):
                raise RuleBroken(f"R-ATTEMPT: {life.uid} goes on with a Job that is retired")

    @staticmethod
    def _check_told(life: Life) -> None:
        """Every end that somebody asked to be told of was told (R-CALLBACK).

        Given up are events that a receiver wants no more, and those that a deleted AgentJob
        still owed when its patience was over.
        """
        if life.end is None or life.end.spec.callback is None or life.taken:
            return
        outbox = life.job.status.callback if life.job else None
        given_up = outbox and all(d.state is DeliveryState.GIVEN_UP for d in outbox.deliveries)
        asked_at = life.job.metadata.deletion_timestamp if life.job else None
        patient = asked_at and life.gone_at and life.gone_at >= asked_at + DELETION_PATIENCE
        if life.refused_for_good or (given_up and patient):
            return
        raise RuleBroken(f"R-CALLBACK: nobody was told of the end of {life.uid}: {_short(life)}")


def _version(event: Event) -> int:
    return int(event.body["metadata"]["resourceVersion"])


def _is_retired(job: Json) -> bool:
    return ANNOTATION_RETIRED in (job["metadata"].get("annotations") or {})


def _is_tracked(pod: Json) -> bool:
    return bool(pod["metadata"].get("finalizers"))


def _holds(job: AgentJob | None) -> bool:
    return bool(job and job.status.attempts)


def _runs(job: AgentJob | None) -> bool:
    """Whether it has a slot and makes use of it."""
    waiting = job.status.waiting if job else None
    return _holds(job) and not (waiting and waiting.code is WaitingCode.SLOT)


def _retry(job: AgentJob) -> Retry:
    return (job.status.effective and job.status.effective.retry) or Retry()


def _check_course(before: AgentJob, after: AgentJob) -> None:
    """What was written once and holds for good is not written over by somebody who did not know."""
    old, new, uid = before.status, after.status, after.metadata.uid
    if (new.observed_generation or 0) < (old.observed_generation or 0):
        raise RuleBroken(f"R-CLAIM: the status of {uid} is about an older generation than before")
    if old.started_at and new.started_at != old.started_at:
        raise RuleBroken(f"R-CLAIM: the start of {uid} is written over")
    if old.ending and not new.finished_at and new.ending != old.ending:
        raise RuleBroken(f"R-HONEST: the first reason why {uid} must end is written over")
    claims = [(each.job_name, each.job_uid) for each in old.attempts or ()]
    kept = [(each.job_name, each.job_uid) for each in new.attempts or ()]
    for (name, job_uid), known in zip_longest(claims, kept[: len(claims)], fillvalue=("", None)):
        if known != (name, job_uid or known[1]):
            raise RuleBroken(f"R-CLAIM: the claim of {uid} is written over")
    over = [each for each in old.attempts or () if each.cause]
    if any(each not in (new.attempts or ()) for each in over):
        raise RuleBroken(f"R-ATTEMPT: the end of an attempt of {uid} is written over")
    _check_outbox(uid, old, new)


def _check_outbox(uid: str, old: AgentJobStatus, new: AgentJobStatus) -> None:
    known = {each.id: each for each in (new.callback.deliveries if new.callback else ())}
    for owed in old.callback.deliveries if old.callback else ():
        if owed.type is EventType.INPUT_REQUIRED:
            # Nobody needs it once the question is closed.
            continue
        now = known.get(owed.id)
        settled = owed.state is not DeliveryState.PENDING
        if now is None or now.attempts < owed.attempts or (settled and now.state != owed.state):
            raise RuleBroken(f"R-CALLBACK: what became of an event of {uid} is written over")


def _line(event: Event, old: Json | None) -> str:
    """One write: what is new, by field."""
    meta, body = event.body["metadata"], event.body
    changes = merge_patch(old or {}, body)
    changes.pop("metadata", None)
    if old is None:
        changes = {}
    going = " (being deleted)" if "deletionTimestamp" in meta else ""
    text = orjson.dumps(changes).decode()
    return f"{event.kind} {meta['uid']} {meta['name']}{going} {text}"


def _short(life: Life) -> Any:
    return life.job and life.job.status.to_json()
