"""An API server in memory: what of its behaviour the operator rests on, and nothing else.

Bodies are never changed in place: who holds one holds what it was, as a watcher does.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import orjson

from agentjobs.api.names import LABEL_JOB, TERMINAL_STATES
from agentjobs.kube import (
    AGENTJOBS,
    INPUTREQUESTS,
    JOBS,
    PODS,
    ConflictError,
    KubeError,
    NotFoundError,
    Resource,
)
from tests.model.clock import Clock

Json = dict[str, Any]
SPECIAL = {"metadata", "status"}
TERMINAL = {state.value for state in TERMINAL_STATES}
MAX_ATTEMPTS = 10


class Event(NamedTuple):
    """One watch event."""

    resource: Resource
    kind: str
    body: Json

    @property
    def uid(self) -> str:
        return str(self.body["metadata"]["uid"])


class Place(NamedTuple):
    plural: str
    namespace: str
    name: str


class Line(NamedTuple):
    """One line of the audit log: a request that changed something, and what was stored."""

    by: str
    """Identity, in its Lease, of the operator that asked; empty: somebody else."""
    event: Event


Observer = Callable[[Event, Json | None], None]
"""Called with what happened and with what the object was before."""


def copied(body: Any) -> Any:
    return orjson.loads(orjson.dumps(body))


def merged(target: Any, patch: Any) -> Any:
    """MergePatch of RFC 7386."""
    if not isinstance(patch, Mapping):
        return patch
    result = dict(target) if isinstance(target, Mapping) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = merged(result.get(key), value)
    return result


class ApiServer:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._objects: dict[str, dict[Place, Json]] = {}
        """By the plural of their resource."""
        self._places: dict[str, Place] = {}
        """By uid."""
        self._version = 100
        self._serial = 0
        self.history: list[Event] = []
        self.audit: list[Line] = []
        self.observers: list[Observer] = []
        self.answers: Counter[int] = Counter()
        """Refusals by HTTP status code."""
        self.before_a_job_goes: Callable[[], None] = lambda: None
        """Carries out creations on their way: one that was sent before a Job of its name was
        made and deleted again would make another, and nothing but its timeout prevents that."""
        self.written_by = ""
        """Identity, in its Lease, of the operator whose request is being carried out."""
        self.full = False
        """The namespace's quota leaves no room for another Job."""

    # --- reading

    def find(self, resource: Resource, namespace: str, name: str) -> Json | None:
        return self._of(resource).get(Place(resource.plural, namespace, name))

    def all(self, resource: Resource) -> list[Json]:
        return list(self._of(resource).values())

    def get(self, resource: Resource, namespace: str, name: str) -> Json:
        body = self.find(resource, namespace, name)
        if body is None:
            raise self._refusal(404, f"{resource.plural} {name} not found")
        return body

    def by_uid(self, resource: Resource, uid: str) -> Json | None:
        place = self._places.get(uid)
        return self._of(resource).get(place) if place else None

    def listed(self, resource: Resource, params: Mapping[str, str] | None) -> Json:
        items = self.all(resource)
        if params and params.get("labelSelector"):
            items = [b for b in items if LABEL_JOB in (b["metadata"].get("labels") or {})]
        if params and params.get("fieldSelector"):
            items = []
        return {"metadata": {"resourceVersion": str(self._version)}, "items": items}

    # --- writing

    def create(self, resource: Resource, namespace: str, body: Mapping[str, Any]) -> Json:
        made = copied(body)
        name = made["metadata"]["name"]
        if self.find(resource, namespace, name):
            raise self._refusal(409, f"{resource.plural} {name} already exists")
        if resource == JOBS and self.full:
            raise self._refusal(403, 'jobs "x" is forbidden: exceeded quota: jobs')
        self._serial += 1
        made["metadata"] |= {
            "namespace": namespace,
            "uid": f"{resource.plural}-{self._serial}",
            "generation": 1,
            "creationTimestamp": self._clock.stamp(),
        }
        if resource in {AGENTJOBS, JOBS}:
            made["status"] = {}
        if resource == JOBS:
            made["spec"] = {"completions": 1, "parallelism": 1, "backoffLimit": 6} | made["spec"]
        return self._store(resource, made, None)

    def patch(
        self, resource: Resource, namespace: str, name: str, body: Mapping[str, Any], sub: str = ""
    ) -> Json:
        old = self.get(resource, namespace, name)
        meta = dict(body.get("metadata") or {})
        self._hold_to(old, meta)
        patch = {"metadata": meta, "status": body.get("status", {})} if sub else dict(body)
        if sub:
            meta.pop("finalizers", None)
        elif resource in {AGENTJOBS, JOBS}:
            patch.pop("status", None)
        new = merged(old, copied(patch))
        return self._update(resource, old, new)

    def replace(
        self, resource: Resource, namespace: str, name: str, body: Mapping[str, Any]
    ) -> Json:
        old = self.get(resource, namespace, name)
        self._hold_to(old, body["metadata"])
        return self._update(resource, old, copied(body))

    def delete(
        self,
        resource: Resource,
        namespace: str,
        name: str,
        uid: str = "",
        grace: int | None = None,
    ) -> None:
        """Delete in the background; of a pod, gracefully unless it never got to a node."""
        if resource == JOBS:
            self.before_a_job_goes()
        old = self.get(resource, namespace, name)
        meta = old["metadata"]
        if uid and meta["uid"] != uid:
            raise self._refusal(409, f"{resource.plural} {name}: the uid is another")
        grace = _grace(resource, old, grace)
        before = meta.get("deletionGracePeriodSeconds")
        if "deletionTimestamp" in meta and (resource != PODS or before is None or grace >= before):
            return
        change: Json = {"deletionTimestamp": self._clock.stamp(grace)}
        if resource == PODS:
            change["deletionGracePeriodSeconds"] = grace
        else:
            change["generation"] = meta["generation"] + 1
        self._update(resource, old, merged(old, {"metadata": change}))

    def _hold_to(self, old: Json, meta: Mapping[str, Any]) -> None:
        for field in ("uid", "resourceVersion"):
            wanted = meta.get(field)
            if wanted is not None and wanted != old["metadata"][field]:
                raise self._refusal(409, f"{old['metadata']['name']}: the {field} is another")

    def _update(self, resource: Resource, old: Json, new: Json) -> Json:
        meta = new["metadata"]
        if resource == AGENTJOBS:
            self._check(old, new)
        if resource in {AGENTJOBS, JOBS} and new.get("spec") != old.get("spec"):
            meta["generation"] = old["metadata"]["generation"] + 1
        if new == old:
            return old
        return self._store(resource, new, old)

    def _store(self, resource: Resource, new: Json, old: Json | None) -> Json:
        self._version += 1
        meta = new["metadata"] = dict(new["metadata"], resourceVersion=str(self._version))
        place = Place(resource.plural, meta.get("namespace", ""), meta["name"])
        if "deletionTimestamp" in meta and not meta.get("finalizers") and not _held(resource, meta):
            del self._of(resource)[place], self._places[meta["uid"]]
            event = Event(resource, "DELETED", new)
        else:
            self._of(resource)[place], self._places[meta["uid"]] = new, place
            event = Event(resource, "MODIFIED" if old else "ADDED", new)
        self.history.append(event)
        self.audit.append(Line(self.written_by, event))
        for observer in self.observers:
            observer(event, old)
        return new

    def _of(self, resource: Resource) -> dict[Place, Json]:
        return self._objects.setdefault(resource.plural, {})

    def _check(self, old: Json, new: Json) -> None:
        """The rules of the CRD that hold an end, and finalizers of what is being deleted."""
        before, after = old.get("status") or {}, new.get("status") or {}
        if before.get("state") in TERMINAL:
            for field in ("state", "finishedAt", "cause"):
                if before.get(field) != after.get(field):
                    raise self._refusal(422, f"the job is over; {field} cannot be changed")
        if len(after.get("attempts") or ()) > MAX_ATTEMPTS:
            raise self._refusal(422, "too many attempts")
        if after.get("state") in TERMINAL and not after.get("finishedAt"):
            raise self._refusal(422, "a job that is over has a finishedAt")
        added = set(new["metadata"].get("finalizers") or ()) - set(
            old["metadata"].get("finalizers") or ()
        )
        if "deletionTimestamp" in old["metadata"] and added:
            raise self._refusal(422, "no new finalizers while the object is being deleted")

    def _refusal(self, code: int, message: str) -> KubeError:
        self.answers[code] += 1
        kind = {404: NotFoundError, 409: ConflictError}.get(code, KubeError)
        return kind(code, {"message": message}, "model")

    def orphans(self) -> Iterator[tuple[Resource, Json]]:
        """Objects whose owner is gone, which the garbage collector would delete."""
        for resource, owners in ((JOBS, AGENTJOBS), (PODS, JOBS), (INPUTREQUESTS, AGENTJOBS)):
            alive = {body["metadata"]["uid"] for body in self.all(owners)}
            for body in self.all(resource):
                meta = body["metadata"]
                if "deletionTimestamp" in meta:
                    continue
                if not any(owner["uid"] in alive for owner in meta.get("ownerReferences") or ()):
                    yield resource, body


def _grace(resource: Resource, body: Json, asked: int | None) -> int:
    if resource != PODS:
        return 0
    if "nodeName" not in body["spec"] or body["status"].get("phase") in {"Succeeded", "Failed"}:
        return 0
    own = body["spec"].get("terminationGracePeriodSeconds", 30)
    return int(own if asked is None else asked)


def _held(resource: Resource, meta: Json) -> bool:
    """Whether a pod that is being deleted waits for its kubelet."""
    return resource == PODS and meta.get("deletionGracePeriodSeconds", 0) > 0
