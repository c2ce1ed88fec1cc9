"""One pass over one AgentJob: gather, decide, write the status once, then do the rest (R-LEVEL)."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from pydantic import ValidationError

from agentjobs import codec
from agentjobs.api.agentjob import AgentJob, AgentJobStatus, DeliveryState, ToolKind
from agentjobs.api.agenttool import AgentTool
from agentjobs.api.names import ANNOTATION_RETIRED, FINALIZER, LABEL_JOB, Reason
from agentjobs.cache import Cache, Key, Record
from agentjobs.dispatch import Dispatcher, Letter
from agentjobs.domain.callbacks import event_body, pending
from agentjobs.domain.ending import EXPIRED
from agentjobs.domain.errors import AgentJobError
from agentjobs.domain.keeping import is_archived
from agentjobs.domain.mergepatch import merge_patch
from agentjobs.domain.nodes import lose_pods
from agentjobs.domain.observed import (
    LookUp,
    Need,
    Observed,
    Policy,
    ReadLastLine,
    ReadPods,
    ReadTool,
    Remains,
)
from agentjobs.domain.output import stream_name
from agentjobs.domain.plan import (
    Action,
    AddFinalizer,
    ArchiveOutput,
    CloseQuestion,
    CreateJob,
    DeleteAgentJob,
    DeleteJob,
    DeleteOutput,
    DeletePod,
    Deliver,
    ExpirePod,
    FollowOutput,
    Note,
    Plan,
    RemoveFinalizer,
    RetireJob,
    SuspendJob,
)
from agentjobs.domain.reconcile import decide
from agentjobs.domain.refusal import Refusal, refusal_in_events, refusal_of
from agentjobs.domain.said import Said, is_marked
from agentjobs.domain.status import current_attempt
from agentjobs.kube import (
    AGENTJOBS,
    AGENTTOOLS,
    CLUSTERAGENTTOOLS,
    EVENTS,
    INPUTREQUESTS,
    JOBS,
    PODS,
    ConflictError,
    Kube,
    KubeError,
    NotFoundError,
    UnavailableError,
)
from agentjobs.lookups import LookUps
from agentjobs.metrics import Metrics
from agentjobs.notices import Notices
from agentjobs.store import StoreError
from agentjobs.streams import Source, Streams

log = logging.getLogger(__name__)
READS_PER_PASS = 3
LOG_PATIENCE = timedelta(seconds=60)
"""How long a kubelet that does not answer is asked for the last line of a log."""


def utc_now() -> datetime:
    """The clock of the shell; the core gets its value."""
    return datetime.now(UTC)


@dataclass(frozen=True, slots=True)
class _LookedUp:
    """How the API server refused a Job of that name or its pods, and when that was looked up."""

    job_name: str | None
    at: datetime
    refusal: Refusal | None


class Passes:
    """Makes passes. What it remembers between them only saves requests, and may be lost."""

    def __init__(  # noqa: PLR0913 - all that a pass reads and writes with
        self,
        kube: Kube,
        cache: Cache,
        notices: Notices,
        dispatcher: Dispatcher[Key],
        metrics: Metrics,
        policy: Policy,
        *,
        fence: Callable[[], None],
        streams: Streams[Key] | None = None,
        lookups: LookUps | None = None,
    ) -> None:
        """Prepare.

        :param fence: raises when this process may not write any more (R-CLAIM).
        :param streams: keeps output, where there is a store for it.
        :param lookups: of receivers' names at acceptance; absent: only at connect are they checked.
        """
        self._kube = kube
        self._cache = cache
        self._notices = notices
        self._dispatcher = dispatcher
        self._metrics = metrics
        self._policy = policy
        self._fence = fence
        self._streams = streams
        self._lookups = lookups
        self._refusals: dict[str, _LookedUp] = {}
        self._children_seen: dict[str, tuple[str, str]] = {}
        self._written_at: dict[str, datetime] = {}
        self._log_asked_at: dict[str, datetime] = {}

    async def run(self, key: Key) -> float | None:
        """Make one pass; return after how many seconds another is wanted.

        :raises AgentJobError: a call failed; the queue tries again with back-off.
        """
        record = self._cache.records.get(key)
        if record is None:
            self._dispatcher.forget(key)
            return None
        began = time.perf_counter()
        outcome = "error"
        try:
            delay = await self._pass(key, record)
            outcome = "ok"
        except ConflictError:
            outcome, delay = "conflict", 0.0
            await self._read_again(key)
        except AgentJobError as error:
            log.warning(
                "the pass over AgentJob %s/%s failed and is tried again: %s",
                key.namespace, key.name, error,
            )  # fmt: skip
            raise
        except Exception:
            log.exception("the pass over AgentJob %s/%s broke", key.namespace, key.name)
            raise
        finally:
            self._metrics.passes.labels(outcome).inc()
            self._metrics.pass_seconds.observe(time.perf_counter() - began)
        return delay

    def forget(self, uid: str) -> None:
        """Drop what is remembered of an AgentJob that is gone."""
        self._refusals.pop(uid, None)
        self._children_seen.pop(uid, None)
        self._written_at.pop(uid, None)
        self._log_asked_at.pop(uid, None)
        if self._streams:
            self._streams.forget(uid)

    async def _pass(self, key: Key, record: Record) -> float | None:
        try:
            job = record.parse()
        except ValidationError as error:
            # Stored before the CRD's schema was what it is now: nothing can be done with it.
            log.error("AgentJob %s/%s cannot be read: %s", key.namespace, key.name, error)
            return None
        seen = self._gather(job)
        plan = decide(seen)
        for _ in range(READS_PER_PASS):
            if plan.need is None:
                break
            seen = await self._read(seen, plan.need)
            # Others may have taken a slot meanwhile; from here to the write nothing is awaited.
            seen = replace(seen, slots=self._cache.slots(key))
            plan = decide(seen)
        self._cache.postpone(key, yes=plan.postponed)
        if plan.status:
            if plan.status.attempts and not record.claimed:
                self._cache.reserve(key)
            await self._write_status(key, record, job, plan.status)
            self._settle(key, seen)
        for note in plan.notes:
            self._notices.post(job, note)
        again = False
        for action in plan.actions:
            again |= await self._act(key, job, action)
        self._tidy(key, job)
        return 0.0 if again else self._delay(plan)

    def _gather(self, job: AgentJob) -> Observed:
        meta, status = job.metadata, job.status
        child = self._cache.child(meta.namespace, status.job_name) if status.job_name else None
        ours = child is not None and child.owner_uid == meta.uid
        if child and ours:
            self._children_seen[meta.uid] = child.name, child.uid
        attempt = current_attempt(status)
        name_seen, uid_seen = self._children_seen.get(meta.uid, ("", ""))
        child_seen = bool(name_seen) and name_seen == status.job_name
        job_uid = uid_seen if child_seen else (attempt.job_uid if attempt else None)
        now = utc_now()
        looked_up = self._refusals.get(meta.uid)
        if looked_up and looked_up.job_name != status.job_name:
            # Of an earlier attempt.
            looked_up = None
        lately = timedelta(seconds=self._policy.refusal_recheck)
        pods = self._cache.pods(job_uid) if job_uid else ()
        patience = timedelta(seconds=self._policy.node_lost)
        pods, pods_lost_at = lose_pods(pods, self._cache.nodes_of(pods), now, patience)
        owed = [each.id for each in status.callback.deliveries] if status.callback else []
        return Observed(
            now=now,
            job=job,
            policy=self._policy,
            tool=self._cache.tool_of(job),
            tool_known=False,
            child=child,
            child_seen=child_seen,
            pods=pods,
            pods_lost_at=pods_lost_at,
            refusal=looked_up.refusal if looked_up else None,
            refusal_known=looked_up is not None and now < looked_up.at + lately,
            dependencies=self._cache.dependencies(job),
            ring=self._cache.ring(Key(meta.namespace, meta.name)),
            awaited=self._cache.is_awaited(Key(meta.namespace, meta.name)),
            slots=self._cache.slots(Key(meta.namespace, meta.name)),
            questions=self._cache.questions(meta.uid),
            outcomes=dict(self._dispatcher.outcomes(Key(meta.namespace, meta.name))),
            in_flight=frozenset(each for each in owed if self._dispatcher.busy(each)),
            keeps_output=self._streams is not None,
            said=self._streams.said(meta.uid) if self._streams else Said(),
            heard=self._streams.heard(meta.uid) if self._streams else frozenset(),
            archived=self._streams.archived(meta.uid) if self._streams else None,
            remains=self._remains(status),
            written_at=self._written_at.get(meta.uid),
        )

    def _remains(self, status: AgentJobStatus) -> tuple[Remains, ...]:
        if not status.finished_at:
            return ()
        return self._cache.remains(
            each.job_uid for each in status.attempts or () if each.job_uid is not None
        )

    async def _read(self, seen: Observed, need: Need) -> Observed:
        namespace = seen.job.metadata.namespace
        if isinstance(need, ReadLastLine):
            return replace(seen, last_line=await self._last_line(seen, need))
        if isinstance(need, ReadPods):
            selector = f"{LABEL_JOB}={seen.job.metadata.name}"
            async for page in self._kube.pages(PODS, namespace, {"labelSelector": selector}):
                for body in page["items"]:
                    self._cache.put_pod(body)
            return replace(self._gather(seen.job), pods_listed=True)
        if isinstance(need, ReadTool):
            return replace(seen, tool=await self._tool(seen.job), tool_known=True)
        if isinstance(need, LookUp):
            found = await self._lookups.addresses_of(need.host) if self._lookups else ()
            return replace(seen, receiver_at=found)
        selector = f"involvedObject.uid={need.job_uid}"
        events: list[dict[str, Any]] = []
        async for page in self._kube.pages(EVENTS, namespace, {"fieldSelector": selector}):
            events += page["items"]
        refusal = refusal_in_events(events)
        name = seen.job.status.job_name
        self._refusals[seen.job.metadata.uid] = _LookedUp(name, seen.now, refusal)
        return replace(seen, refusal=refusal, refusal_known=True)

    async def _tool(self, job: AgentJob) -> AgentTool | None:
        """Ask for the tool that a job names."""
        ref = job.spec.tool_ref
        if ref is None:
            return None
        namespaced = ref.kind is ToolKind.AGENT_TOOL
        resource = AGENTTOOLS if namespaced else CLUSTERAGENTTOOLS
        namespace = job.metadata.namespace if namespaced else ""
        try:
            self._cache.put_tool(await self._kube.get(resource, namespace, ref.name))
        except NotFoundError:
            return None
        return self._cache.tool_of(job)

    async def _last_line(self, seen: Observed, need: ReadLastLine) -> str:
        """Read the tool's last line; one that nobody can give must not hold up the end for ever.

        :raises UnavailableError: try again later.
        """
        meta = seen.job.metadata
        asked_at = self._log_asked_at.setdefault(meta.uid, seen.now)
        try:
            return await self._kube.last_line(meta.namespace, need.pod, need.container, is_marked)
        except (KubeError, UnavailableError) as error:
            # The node of a finished pod may be off: the API server answers 500 as long as it is.
            if isinstance(error, UnavailableError) and seen.now < asked_at + LOG_PATIENCE:
                raise
            log.info("the last line of pod %s/%s is lost: %s", meta.namespace, need.pod, error)
            return ""

    async def _write_status(
        self, key: Key, record: Record, job: AgentJob, status: AgentJobStatus
    ) -> None:
        old = codec.loads(record.body)["status"]
        patch = merge_patch(old, status.to_json())
        if not patch:
            return
        body = {"metadata": {"resourceVersion": job.metadata.resource_version}, "status": patch}
        try:
            self._fence()
            answer = await self._kube.patch(AGENTJOBS, key.namespace, key.name, body, "status")
        except UnavailableError:
            # It may be written all the same, now or later: a claim keeps its slot until its
            # AgentJob is seen again.
            raise
        except AgentJobError:
            self._cache.release(key)
            raise
        self._metrics.writes.labels("status").inc()
        self._cache.put_agentjob(answer)
        self._written_at[job.metadata.uid] = utc_now()
        self._measure(job, status)

    async def _read_again(self, key: Key) -> None:
        """Somebody else has written the AgentJob, or another program holds the Job's name."""
        try:
            self._cache.put_agentjob(await self._kube.get(AGENTJOBS, key.namespace, key.name))
        except NotFoundError:
            record = self._cache.records.get(key)
            if record:
                self._cache.drop_agentjob(key, record.uid)
                self.forget(record.uid)

    def _settle(self, key: Key, seen: Observed) -> None:
        """Forget what was written into the status."""
        self._dispatcher.settle(key, seen.outcomes)
        if self._streams and seen.archived:
            self._streams.settle(seen.job.metadata.uid)

    async def _act(self, key: Key, job: AgentJob, action: Action) -> bool:
        """Do one thing; return whether the result should be looked at right away."""
        self._fence()
        self._metrics.writes.labels(type(action).__name__).inc()
        match action:
            case CreateJob() | SuspendJob() | RetireJob() | DeleteJob() | ExpirePod() | DeletePod():
                return await self._act_on_child(key, job, action)
            case FollowOutput() | ArchiveOutput() | DeleteOutput():
                await self._output(key, job, action)
            case CloseQuestion():
                await self._close_question(key, action)
            case Deliver():
                self._deliver(key, action)
            case AddFinalizer() | RemoveFinalizer():
                return await self._finalizers(key, job, held=isinstance(action, AddFinalizer))
            case DeleteAgentJob():
                await self._kube.delete(AGENTJOBS, key.namespace, key.name, job.metadata.uid)
        return False

    async def _act_on_child(
        self,
        key: Key,
        job: AgentJob,
        action: CreateJob | SuspendJob | RetireJob | DeleteJob | ExpirePod | DeletePod,
    ) -> bool:
        match action:
            case CreateJob():
                return await self._create(key, job, action.body)
            case SuspendJob() | RetireJob():
                return await self._hold_child(key, action)
            case DeleteJob():
                await self._kube.delete(JOBS, key.namespace, action.name, action.uid)
            case ExpirePod():
                await self._expire(key, action)
            case DeletePod():
                await self._kube.delete(PODS, key.namespace, action.name, action.uid)
                self._cache.drop_remains(action.job_uid, action.uid)
        return False

    async def _create(self, key: Key, job: AgentJob, body: dict[str, Any]) -> bool:
        """Create a Job, or find out why not; the next pass decides what follows."""
        name = body["metadata"]["name"]
        try:
            made = await self._kube.create(JOBS, key.namespace, body)
        except ConflictError:
            made = await self._kube.get(JOBS, key.namespace, name)
            self._cache.put_job(made)
            return True
        except KubeError as error:
            refusal = refusal_of(error.code, error.status)
            if refusal is None:
                raise
            log.info("Job %s/%s was refused: %s", key.namespace, name, refusal.message)
            self._refusals[job.metadata.uid] = _LookedUp(name, utc_now(), refusal)
            return True
        self._refusals.pop(job.metadata.uid, None)
        self._cache.put_job(made)
        self._children_seen[job.metadata.uid] = name, made["metadata"]["uid"]
        return False

    async def _expire(self, key: Key, action: ExpirePod) -> None:
        body = {"metadata": {"uid": action.uid}, "spec": {"activeDeadlineSeconds": EXPIRED}}
        try:
            answer = await self._kube.patch(PODS, key.namespace, action.name, body)
        except (NotFoundError, ConflictError):
            # The pod of that uid is gone; its end comes by the watch.
            return
        # The next pass may come before the watch, and would ask again.
        self._cache.put_pod(answer)

    async def _hold_child(self, key: Key, action: SuspendJob | RetireJob) -> bool:
        """Keep a Job from making pods; return whether the result should be looked at right away."""
        body: dict[str, Any] = {"metadata": {"uid": action.uid}, "spec": {"suspend": True}}
        retires = isinstance(action, RetireJob)
        if isinstance(action, RetireJob):
            body["metadata"]["resourceVersion"] = action.version
            body["metadata"]["annotations"] = {ANNOTATION_RETIRED: action.why}
            body["spec"]["parallelism"] = 0
        try:
            answer = await self._kube.patch(JOBS, key.namespace, action.name, body)
        except (NotFoundError, ConflictError):
            # It is another by now, or changed or gone, and nobody has told.
            await self._read_child(key, action)
            return True
        self._cache.put_job(answer)
        return retires

    async def _read_child(self, key: Key, action: SuspendJob | RetireJob) -> None:
        try:
            self._cache.put_job(await self._kube.get(JOBS, key.namespace, action.name))
        except NotFoundError:
            self._cache.lose_job(Key(key.namespace, action.name, "Job"), action.uid)

    async def _output(
        self, key: Key, job: AgentJob, action: FollowOutput | ArchiveOutput | DeleteOutput
    ) -> None:
        """Follow, put together or delete what a job's tool prints."""
        if self._streams is None:
            return
        uid = job.metadata.uid
        match action:
            case FollowOutput():
                self._streams.follow(key, _source(key, uid, action))
            case ArchiveOutput():
                sources = [_source(key, uid, each) for each in action.sources]
                self._streams.archive(key, uid, sources, action.attempts)
            case DeleteOutput():
                await self._delete_output(job)

    async def _close_question(self, key: Key, action: CloseQuestion) -> None:
        meta = {"resourceVersion": action.version}
        body = {"metadata": meta, "status": {"outcome": action.outcome.value}}
        try:
            written = await self._kube.patch(
                INPUTREQUESTS, key.namespace, action.name, body, "status"
            )
        except (ConflictError, NotFoundError):
            # Somebody has answered; the watch tells what.
            return
        self._cache.put_question(written)

    async def _delete_output(self, job: AgentJob) -> None:
        """Delete what was kept; a store that fails must not hold up a deletion for ever.

        :raises StoreError: try again later.
        """
        now = utc_now()
        since = max(job.metadata.deletion_timestamp or now, job.status.finished_at or now)
        try:
            if self._streams:
                await self._streams.delete(job.metadata.uid)
        except StoreError as error:
            if now < since + timedelta(seconds=self._policy.store_patience):
                raise
            text = f"output of {job.metadata.uid} is left behind in the store: {error}"
            log.error("AgentJob %s/%s: %s", job.metadata.namespace, job.metadata.name, text)
            self._notices.post(job, Note(Reason.OUTPUT_LEFT_BEHIND, text, warning=True))

    def _deliver(self, key: Key, action: Deliver) -> None:
        """Hand an event of the stored outbox to the dispatcher."""
        record = self._cache.records.get(key)
        job = record.parse() if record else None
        if job is None or job.spec.callback is None or job.status.callback is None:
            return
        for owed in job.status.callback.deliveries:
            if owed.id == action.event_id:
                questions = self._cache.questions(job.metadata.uid)
                body = event_body(job, owed, self._policy.gateway_url, questions)
                if body is not None:
                    letter = Letter(owed.id, key.namespace, job.spec.callback.url, body)
                    self._dispatcher.submit(key, letter)

    async def _finalizers(self, key: Key, job: AgentJob, *, held: bool) -> bool:
        """Hold the AgentJob, or let it go; return whether it is there to be looked at."""
        names = [name for name in job.metadata.finalizers if name != FINALIZER]
        names += [FINALIZER] if held else []
        meta = {"resourceVersion": job.metadata.resource_version, "finalizers": names}
        try:
            answer = await self._kube.patch(AGENTJOBS, key.namespace, key.name, {"metadata": meta})
        except NotFoundError:
            return False
        if held or answer["metadata"].get("finalizers"):
            # Otherwise it is gone, and its deletion may have been seen already.
            self._cache.put_agentjob(answer)
        return held

    def _tidy(self, key: Key, job: AgentJob) -> None:
        record = self._cache.records.get(key)
        if record is None or not record.finished:
            return
        if self._streams and job.status.started_at and not is_archived(job.status):
            # What is to be read of their logs is found by their pods.
            return
        self._refusals.pop(job.metadata.uid, None)
        self._cache.forget_dependent(job, key)
        for attempt in job.status.attempts or ():
            child = self._cache.child(key.namespace, attempt.job_name)
            if child and child.owner_uid == job.metadata.uid:
                # Without a store pods are never deleted before their AgentJob.
                reduce = self._cache.reduce_pods if self._streams else self._cache.forget_pods
                reduce(child.uid)

    def _delay(self, plan: Plan) -> float | None:
        if plan.requeue_at is None:
            return None
        return max((plan.requeue_at - utc_now()).total_seconds(), 0.0)

    def _measure(self, job: AgentJob, status: AgentJobStatus) -> None:
        now = utc_now()
        if status.started_at and not job.status.started_at:
            waited = status.started_at - job.metadata.creation_timestamp
            self._metrics.start_seconds.observe(max(waited.total_seconds(), 0))
        if status.finished_at and status.state and not job.status.finished_at:
            cause = status.cause.code.value if status.cause else ""
            self._metrics.finished.labels(status.state.value, cause).inc()
            self._metrics.end_seconds.observe(max((now - status.finished_at).total_seconds(), 0))
        self._measure_events(job.status, status)

    def _measure_events(self, old: AgentJobStatus, new: AgentJobStatus) -> None:
        owed = {each.id for each in pending(old.callback.deliveries)} if old.callback else set()
        for each in new.callback.deliveries if new.callback else ():
            if each.id not in owed or each.state is DeliveryState.PENDING:
                continue
            self._metrics.events.labels(each.type.value, each.state.value).inc()
            if each.delivered_at and new.finished_at:
                waited = (each.delivered_at - each.time).total_seconds()
                self._metrics.told_seconds.observe(max(waited, 0))


def _source(key: Key, uid: str, action: FollowOutput) -> Source:
    stream = stream_name(action.attempt, action.index, action.pod_uid)
    return Source(
        namespace=key.namespace,
        pod=action.pod,
        pod_uid=action.pod_uid,
        job_uid=action.job_uid,
        container=action.container,
        started_at=action.started_at,
        path=f"{uid}/{stream}",
    )
