"""What is known of the cluster: the newest of every object seen, small, with the indexes needed.

An AgentJob is kept as JSON bytes, of a finished one without what was to be run: ten thousand
finished records are then a few tens of megabytes.
"""

import heapq
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

from agentjobs import codec
from agentjobs.api.agentjob import AgentJob, ToolKind
from agentjobs.api.agenttool import AgentTool
from agentjobs.api.names import ANNOTATION_REDELIVER, API_VERSION, LABEL_JOB
from agentjobs.domain.children import JobView
from agentjobs.domain.gates import EXACT_PLACES
from agentjobs.domain.nodes import NodeView
from agentjobs.domain.observed import DependencySeen, Remains, SlotsSeen
from agentjobs.domain.pods import PodView
from agentjobs.domain.questions import QuestionView
from agentjobs.domain.rings import find_rings

KEPT_METADATA = (
    "name",
    "namespace",
    "uid",
    "resourceVersion",
    "generation",
    "creationTimestamp",
    "deletionTimestamp",
    "finalizers",
)


def _kept_annotations(meta: Mapping[str, Any]) -> dict[str, str]:
    annotations = meta.get("annotations") or {}
    return {name: annotations[name] for name in (ANNOTATION_REDELIVER,) if name in annotations}


class Key(NamedTuple):
    """Names one AgentJob, or one tool."""

    namespace: str
    name: str
    kind: str = "AgentJob"


@dataclass(slots=True)
class Record:
    """One AgentJob as it is kept."""

    uid: str
    version: int
    finished: bool
    succeeded: bool
    body: bytes
    tool: Key | None
    """The tool that it names."""
    claimed: bool
    """Whether it has claimed an attempt."""
    in_line: bool
    """Whether nothing but a slot keeps it from beginning, as far as is known."""
    came: tuple[str, str, str]
    """Its place in a line: creation time, namespace, name."""
    state: str
    waits_for: tuple[str, ...]
    """Names of AgentJobs that it depends on, as long as it has not begun."""

    def parse(self) -> AgentJob:
        """Return it as a model.

        :raises pydantic.ValidationError: the stored object has not the shape of an AgentJob.
        """
        return AgentJob.from_json(codec.loads(self.body))


class Cache:
    """Everything that passes read. Only this process's loop touches it."""

    def __init__(self) -> None:
        self.records: dict[Key, Record] = {}
        self.tools: dict[Key, AgentTool] = {}
        self._keys: dict[str, Key] = {}
        self._children: dict[Key, tuple[int, JobView]] = {}
        self._child_uids: dict[str, Key] = {}
        self._pods: dict[str, dict[str, tuple[int, PodView]]] = {}
        self._remains: dict[str, dict[str, str]] = {}
        self._questions: dict[str, dict[str, QuestionView]] = {}
        """By the uid of the AgentJob that asks, and their own."""
        self._dependents: dict[Key, set[Key]] = {}
        self._users: dict[Key, set[Key]] = {}
        self._claiming: set[Key] = set()
        self._postponed: set[Key] = set()
        self._unlinked: set[Key] = set()
        """AgentJobs with dependencies that were not looked at for rings yet."""
        self._rings: dict[Key, tuple[Key, ...]] = {}
        """By the AgentJob that has closed it, which comes first."""
        self.nodes: dict[str, NodeView] = {}

    # --- AgentJobs

    def put_agentjob(self, body: Mapping[str, Any]) -> Key:
        """Keep an AgentJob if it is newer than what is known; return its key."""
        meta = body["metadata"]
        key = Key(meta["namespace"], meta["name"])
        known = self.records.get(key)
        version = int(meta["resourceVersion"])
        if known and known.version >= version:
            # Versions of one resource compare, also those of a namesake that was deleted.
            return key
        status = body.get("status") or {}
        finished = bool(status.get("finishedAt"))
        spec = dict(body.get("spec") or {})
        if finished:
            spec.pop("arguments", None)
            if "template" in spec:
                spec["template"] = {}
        names = tuple(each["name"] for each in spec.get("dependsOn") or ())
        for name in names:
            self._dependents.setdefault(Key(key.namespace, name), set()).add(key)
        kept = {
            "metadata": {
                **{field: meta[field] for field in KEPT_METADATA if field in meta},
                "annotations": _kept_annotations(meta),
            },
            "spec": spec,
            "status": status,
        }
        waits_for = (status.get("waiting") or {}).get("code")
        claimed = bool(status.get("attempts"))
        self._leave(key)
        record = self.records[key] = Record(
            uid=meta["uid"],
            version=version,
            finished=finished,
            succeeded=status.get("state") == "done",
            body=codec.dumps(kept),
            tool=_tool_key(spec, key.namespace),
            claimed=claimed,
            in_line=not claimed and not spec.get("stop") and waits_for in {None, "slot"},
            came=(meta["creationTimestamp"], key.namespace, key.name),
            state=status.get("state") or "",
            waits_for=() if finished or claimed else names,
        )
        if names and (known is None or known.uid != record.uid):
            self._unlinked.add(key)
        if record.tool and not finished:
            self._users.setdefault(record.tool, set()).add(key)
        self._keys[meta["uid"]] = key
        # A claim on its way was written with this version, or is refused because of it.
        self.release(key)
        return key

    def drop_agentjob(self, key: Key, uid: str) -> None:
        """Forget a deleted AgentJob."""
        record = self.records.get(key)
        if record and record.uid == uid:
            self._leave(key)
            self.release(key)
            self.postpone(key, yes=False)
            self._unlinked.discard(key)
            self._rings.pop(key, None)
            del self.records[key]
            for dependency in codec.loads(record.body)["spec"].get("dependsOn") or ():
                self._forget_dependent(Key(key.namespace, dependency["name"]), key)
        self._keys.pop(uid, None)
        self._questions.pop(uid, None)

    def dependents(self, key: Key) -> Iterable[Key]:
        """AgentJobs that wait for this one."""
        return tuple(self._dependents.get(key, ()))

    def forget_dependent(self, job: AgentJob, key: Key) -> None:
        """Take an AgentJob that waits no more out of the index."""
        for dependency in job.spec.depends_on or ():
            self._forget_dependent(Key(key.namespace, dependency.name), key)

    def is_awaited(self, key: Key) -> bool:
        """Whether others that have not begun have to see how an AgentJob ended (R-DEPENDS)."""
        found = (self.records.get(each) for each in self._dependents.get(key, ()))
        return any(each and not each.finished and not each.claimed for each in found)

    def _forget_dependent(self, dependency: Key, key: Key) -> None:
        waiting = self._dependents.get(dependency, set())
        waiting.discard(key)
        if not waiting:
            self._dependents.pop(dependency, None)

    def dependencies(self, job: AgentJob) -> tuple[DependencySeen, ...]:
        """What is known of the AgentJobs that one waits for, in its order."""
        seen = []
        for dependency in job.spec.depends_on or ():
            record = self.records.get(Key(job.metadata.namespace, dependency.name))
            seen.append(
                DependencySeen(
                    name=dependency.name,
                    exists=record is not None,
                    finished=record is not None and record.finished,
                    succeeded=record is not None and record.succeeded,
                    state=record.state if record else "",
                )
            )
        return tuple(seen)

    def find_rings(self) -> list[Key]:
        """Look for rings that new AgentJobs have closed; return who of each has closed it.

        That is the youngest, by the time of its creation and then by its name.
        """
        # A ring goes through its newest member, for which another must wait.
        starts = [key for key in self._unlinked if self._dependents.get(key)]
        self._unlinked.clear()
        found = []
        for ring in find_rings(starts, self._waits_for):
            youngest = max(range(len(ring)), key=lambda place: self.records[ring[place]].came)
            closer, *others = (*ring[youngest:], *ring[:youngest])
            # They may be part of another ring too, which shows when this one is broken.
            self._unlinked.update(others)
            if self._rings.get(closer) != (closer, *others):
                self._rings[closer] = (closer, *others)
                found.append(closer)
        return found

    def ring(self, key: Key) -> tuple[str, ...]:
        """Names of the ring that an AgentJob has closed, itself first; empty if it has none."""
        ring = self._rings.get(key, ())
        if not all(b in self._waits_for(a) for a, b in pairwise((*ring, *ring[:1]))):
            del self._rings[key]
            return ()
        return tuple(each.name for each in ring)

    def _waits_for(self, key: Key) -> list[Key]:
        record = self.records.get(key)
        names = record.waits_for if record else ()
        return [Key(key.namespace, name) for name in names]

    # --- slots of tools

    def reserve(self, key: Key) -> None:
        """Count an AgentJob as one that has claimed an attempt, from before that is written."""
        self._claiming.add(key)

    def release(self, key: Key) -> None:
        """Count an AgentJob as what it is known to be: its claim was refused, or it was seen."""
        self._claiming.discard(key)

    def postpone(self, key: Key, *, yes: bool = True) -> None:
        """Say whether an AgentJob that has claimed an attempt waits for a slot all the same.

        A claim that a former leader had sent may come when the slot has been given to another.
        """
        (self._postponed.add if yes else self._postponed.discard)(key)

    def slots(self, key: Key) -> SlotsSeen:
        """Who else uses the tool of an AgentJob."""
        record = self.records.get(key)
        if record is None or record.tool is None or self._limit(record.tool) is None:
            return SlotsSeen()
        others = self._users.get(record.tool, set()) - {key}
        taken = {other for other in others if self._holds(other)}
        if record.claimed:
            # Of those that may not all have a slot, one after the other.
            taken -= self._postponed
        ahead = sum(
            self.records[other].in_line and self.records[other].came < record.came
            for other in others - taken
        )
        # Whose claim may be written has its slot already, whoever has come into line since.
        return SlotsSeen(taken=len(taken), ahead=0 if key in self._claiming else ahead)

    def next_in_line(self, tool: Key | None) -> list[Key]:
        """AgentJobs that a free slot of a tool is for, and the next ones, who move up."""
        limit = self._limit(tool) if tool else None
        if tool is None or limit is None:
            return []
        users = self._users.get(tool, set())
        postponed = users & self._postponed
        free = limit - sum(self._holds(user) for user in users)
        if postponed or free <= 0:
            return list(postponed)
        waiting = (user for user in users if self.records[user].in_line and not self._holds(user))
        told = free + EXACT_PLACES
        return heapq.nsmallest(told, waiting, key=lambda user: self.records[user].came)

    def in_line(self, tool: Key) -> list[Key]:
        """All that wait for a slot of a tool, or were not looked at yet."""
        users = self._users.get(tool, set())
        return [user for user in users if self.records[user].in_line or user in self._postponed]

    def _limit(self, tool: Key) -> int | None:
        known = self.tools.get(tool)
        return known.spec.max_concurrent if known else None

    def _holds(self, key: Key) -> bool:
        return self.records[key].claimed or key in self._claiming

    def _leave(self, key: Key) -> None:
        """Take an AgentJob out of the users of its tool."""
        known = self.records.get(key)
        users = self._users.get(known.tool) if known and known.tool else None
        if known and known.tool and users is not None:
            users.discard(key)
            if not users:
                del self._users[known.tool]

    # --- Jobs and pods

    def put_job(self, body: Mapping[str, Any]) -> Key | None:
        """Keep a Job if it is newer than what is known; return the key of its AgentJob."""
        meta = body["metadata"]
        name = Key(meta["namespace"], meta["name"], "Job")
        version = int(meta["resourceVersion"])
        known = self._children.get(name)
        if known is None or known[0] < version:
            view = JobView.from_json(body)
            self._children[name] = (version, view)
            self._child_uids[view.uid] = name
        return self._owner_key(meta)

    def drop_job(self, body: Mapping[str, Any]) -> Key | None:
        """Forget a deleted Job; return the key of its AgentJob."""
        meta = body["metadata"]
        name = Key(meta["namespace"], meta["name"], "Job")
        known = self._children.get(name)
        if known and known[1].uid == meta["uid"]:
            del self._children[name]
        return self._owner_key(meta)

    def child(self, namespace: str, name: str) -> JobView | None:
        """The Job of that name."""
        known = self._children.get(Key(namespace, name, "Job"))
        return known[1] if known else None

    def put_pod(self, body: Mapping[str, Any], *, gone: bool = False) -> Key | None:
        """Keep a pod, after its deletion what was last seen of it; return its AgentJob's key."""
        view = PodView.from_json(body)
        meta = body["metadata"]
        key = self._key_of_label(meta)
        if not view.job_uid:
            # Its Job was deleted and left it behind; it is still the pod of that attempt.
            view = replace(view, job_uid=self._job_of_orphan(view.uid))
        if not view.job_uid:
            return None
        pods = self._pods.setdefault(view.job_uid, {})
        version = int(meta["resourceVersion"])
        known = pods.get(view.uid)
        if known is None or known[0] < version:
            if known and known[1].delete_by:
                # The kubelet's last word moves the time of the deletion; when it was asked counts.
                by, grace = known[1].delete_by, known[1].delete_grace
                view = replace(view, delete_by=by, delete_grace=grace)
            pods[view.uid] = (version, view.as_gone() if gone else view)
        elif gone:
            pods[view.uid] = (known[0], known[1].as_gone())
        return key

    def _job_of_orphan(self, uid: str) -> str:
        return next((job_uid for job_uid, pods in self._pods.items() if uid in pods), "")

    def pods(self, job_uid: str) -> tuple[PodView, ...]:
        """Pods of a Job, the oldest first."""
        views = [view for _, view in self._pods.get(job_uid, {}).values()]
        return tuple(sorted(views, key=lambda pod: (pod.created is None, pod.created, pod.name)))

    def remains(self, job_uids: Iterable[str]) -> tuple[Remains, ...]:
        """Pods of some Jobs that are there and are not being deleted."""
        return tuple(
            Remains(name, uid, job_uid)
            for job_uid in job_uids
            for uid, name in self._left(job_uid).items()
        )

    def _left(self, job_uid: str) -> dict[str, str]:
        views = [view for _, view in self._pods.get(job_uid, {}).values()]
        going = {view.uid for view in views if view.gone or view.delete_by}
        known = self._remains.get(job_uid, {}) | {view.uid: view.name for view in views}
        return {uid: name for uid, name in known.items() if uid not in going}

    def reduce_pods(self, job_uid: str) -> None:
        """Keep of the pods of a Job that is over no more than that they are there."""
        left = self._left(job_uid)
        self.forget_pods(job_uid)
        if left:
            self._remains[job_uid] = left

    def drop_remains(self, job_uid: str, uid: str) -> None:
        """Note that a pod that was left of a Job was deleted."""
        left = self._remains.get(job_uid, {})
        left.pop(uid, None)
        if not left:
            self._remains.pop(job_uid, None)

    def forget_pods(self, job_uid: str) -> None:
        """Drop what is remembered of the pods of a Job that matters no more."""
        self._pods.pop(job_uid, None)
        self._remains.pop(job_uid, None)
        self._child_uids.pop(job_uid, None)

    def forget_pod(self, body: Mapping[str, Any]) -> None:
        """Drop a pod of a Job that nobody will ask about."""
        job_uid = PodView.from_json(body).job_uid
        self.drop_remains(job_uid, body["metadata"]["uid"])
        pods = self._pods.get(job_uid, {})
        pods.pop(body["metadata"]["uid"], None)
        if not pods:
            self.forget_pods(job_uid)

    # --- questions

    def put_question(self, body: Mapping[str, Any]) -> Key | None:
        """Keep a question if it is newer than what is known; return the key of its AgentJob."""
        view = QuestionView.from_json(body)
        if not view.owner_uid:
            return None
        questions = self._questions.setdefault(view.owner_uid, {})
        known = questions.get(view.uid)
        if known is None or int(known.version) < int(view.version):
            questions[view.uid] = view
        return self._keys.get(view.owner_uid)

    def drop_question(self, owner_uid: str, uid: str) -> Key | None:
        """Forget a question that is not there any more; return the key of its AgentJob."""
        questions = self._questions.get(owner_uid, {})
        questions.pop(uid, None)
        if not questions:
            self._questions.pop(owner_uid, None)
        return self._keys.get(owner_uid)

    def questions(self, owner_uid: str) -> tuple[QuestionView, ...]:
        """What an AgentJob asks and has asked."""
        return tuple(self._questions.get(owner_uid, {}).values())

    def all_questions(self) -> Iterator[QuestionView]:
        """Every question known."""
        for questions in list(self._questions.values()):
            yield from list(questions.values())

    # --- nodes

    def put_node(self, body: Mapping[str, Any], *, gone: bool = False) -> tuple[Key, ...]:
        """Keep a node; return the AgentJobs that its fate concerns."""
        view = NodeView.from_json(body)
        view = replace(view, gone=True) if gone else view
        known = self.nodes.get(view.name)
        if known and known.uid == view.uid and known.version > view.version:
            return ()
        self.nodes[view.name] = view
        told = known and replace(known, version=view.version)
        if told == view or (known is None and view.not_ready_since is None):
            return ()
        return tuple(self._keys_on(view.name))

    def nodes_of(self, pods: Iterable[PodView]) -> dict[str, NodeView]:
        """What is known of the nodes of some pods."""
        return {pod.node: self.nodes[pod.node] for pod in pods if pod.node in self.nodes}

    def _keys_on(self, node: str) -> Iterator[Key]:
        for job_uid, pods in self._pods.items():
            if any(view.node == node and not view.dead for _, view in pods.values()):
                key = self._key_of_job(job_uid)
                if key:
                    yield key

    # --- tools

    def put_tool(self, body: Mapping[str, Any]) -> Key:
        """Keep a tool; return its key.

        :raises pydantic.ValidationError: the stored object has not the shape of a tool.
        """
        tool = AgentTool.from_json(body)
        kind = str(body.get("kind") or ToolKind.AGENT_TOOL)
        key = Key(tool.metadata.namespace, tool.metadata.name, kind)
        known = self.tools.get(key)
        if known and known.metadata.uid == tool.metadata.uid:
            tool = max(known, tool, key=lambda each: int(each.metadata.resource_version))
        self.tools[key] = tool
        return key

    def drop_tool(self, key: Key, uid: str) -> None:
        """Forget a deleted tool, unless another has taken its name."""
        known = self.tools.get(key)
        if known and known.metadata.uid == uid:
            del self.tools[key]

    def tool_of(self, job: AgentJob) -> AgentTool | None:
        """The tool that an AgentJob names."""
        ref = job.spec.tool_ref
        if ref is None:
            return None
        if ref.kind is ToolKind.CLUSTER_AGENT_TOOL:
            return self.tools.get(Key("", ref.name, ref.kind.value))
        return self.tools.get(Key(job.metadata.namespace, ref.name, ref.kind.value))

    # --- repair

    def agentjob_keys(self) -> Iterator[tuple[Key, str, int]]:
        """Every AgentJob known: key, uid, version."""
        for key, record in list(self.records.items()):
            yield key, record.uid, record.version

    def job_keys(self) -> Iterator[tuple[Key, JobView, int]]:
        """Every Job known: its own key, view, version."""
        for name, (version, view) in list(self._children.items()):
            yield name, view, version

    def live_pods(self) -> Iterator[tuple[str, PodView, int]]:
        """Every pod known that is not gone: uid of its Job, view, version."""
        for job_uid, pods in list(self._pods.items()):
            for version, view in list(pods.values()):
                if not view.gone:
                    yield job_uid, view, version

    def lose_job(self, name: Key, uid: str) -> Key | None:
        """Note that a Job is not there any more; return its AgentJob's key."""
        known = self._children.get(name)
        if known is None or known[1].uid != uid:
            return None
        del self._children[name]
        return self._keys.get(known[1].owner_uid)

    def lose_pod(self, job_uid: str, uid: str) -> Key | None:
        """Note that a pod is not listed any more; return its AgentJob's key."""
        version, view = self._pods[job_uid][uid]
        self._pods[job_uid][uid] = (version, view.as_gone())
        return self._key_of_job(job_uid)

    def _key_of_job(self, job_uid: str) -> Key | None:
        job = self._children.get(self._child_uids.get(job_uid, Key("", "", "Job")))
        return self._keys.get(job[1].owner_uid) if job else None

    def _owner_key(self, meta: Mapping[str, Any]) -> Key | None:
        for owner in meta.get("ownerReferences") or ():
            if owner.get("controller") and owner.get("apiVersion") == API_VERSION:
                return Key(meta["namespace"], owner["name"])
        return None

    @staticmethod
    def _key_of_label(meta: Mapping[str, Any]) -> Key | None:
        """Whom to wake for a pod. A label proves nothing; the pass goes by uids."""
        name = (meta.get("labels") or {}).get(LABEL_JOB)
        return Key(meta["namespace"], name) if name else None


def _tool_key(spec: Mapping[str, Any], namespace: str) -> Key | None:
    ref = spec.get("toolRef")
    if not ref:
        return None
    kind = ref.get("kind") or ToolKind.AGENT_TOOL.value
    return Key("" if kind == ToolKind.CLUSTER_AGENT_TOOL else namespace, ref["name"], kind)
