"""What the API server's audit log says: who asked for what, how often, and what was made of it."""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Document = Mapping[str, Any]
DONE = "ResponseComplete"
ATTEMPT = "agentjobs.dev/attempt"


@dataclass(frozen=True)
class Request:
    """One request that was answered."""

    user: str
    groups: tuple[str, ...]
    verb: str
    group: str
    """API group of the resource; empty for the oldest ones."""
    resource: str
    """With its subresource: `agentjobs/status`."""
    namespace: str
    name: str
    code: int
    at: str
    """When it was received, in RFC 3339 with microseconds: it sorts."""
    answered: str
    """When it was answered, likewise."""
    sent: Document
    returned: Document

    @property
    def taken(self) -> bool:
        return self.code < 300

    @classmethod
    def of(cls, event: Document) -> "Request":
        target = event.get("objectRef") or {}
        resource = target.get("resource", "")
        if target.get("subresource"):
            resource += "/" + target["subresource"]
        return cls(
            user=event["user"].get("username", ""),
            groups=tuple(event["user"].get("groups") or ()),
            verb=event["verb"],
            group=target.get("apiGroup", ""),
            resource=resource,
            namespace=target.get("namespace", ""),
            name=target.get("name", ""),
            code=int((event.get("responseStatus") or {}).get("code", 0)),
            at=event["requestReceivedTimestamp"],
            answered=event.get("stageTimestamp", event["requestReceivedTimestamp"]),
            sent=event.get("requestObject") or {},
            returned=event.get("responseObject") or {},
        )


def read(log: Path) -> Iterator[Request]:
    """Every answered request, in the order of the answers; a line that is still written is left."""
    return Tail(log, start=0).new()


class Tail:
    """Reads on where it had stopped; at first at the present end of the log, or at `start`."""

    def __init__(self, log: Path, *, start: int | None = None) -> None:
        self._log = log
        self.position = log.stat().st_size if start is None else start

    def new(self, holding: str = "") -> Iterator[Request]:
        """What was answered since; only from lines that hold this text: that is quick."""
        wanted = holding.encode()
        with self._log.open("rb") as lines:
            lines.seek(self.position)
            for line in lines:
                if not line.endswith(b"\n"):
                    return
                self.position += len(line)
                if wanted in line:
                    event = json.loads(line)
                    if event.get("stage") == DONE:
                        yield Request.of(event)


def count(
    requests: Iterable[Request], chosen: Callable[[Request], bool] = lambda _: True
) -> Counter[tuple[str, str]]:
    """Requests by verb and resource, refused ones included: they cost as much."""
    return Counter((each.verb, each.resource) for each in requests if chosen(each))


def jobs_made(requests: Iterable[Request]) -> Counter[tuple[str, str]]:
    """Jobs that were made, by the uid of their AgentJob and the number of the attempt."""
    made: Counter[tuple[str, str]] = Counter()
    for each in requests:
        if each.taken and (each.verb, each.resource) == ("create", "jobs"):
            meta = each.returned.get("metadata") or each.sent["metadata"]
            attempt = (meta.get("annotations") or {}).get(ATTEMPT, "placeholder")
            made[controller_of(meta), attempt] += 1
    return made


def pods_made(requests: Iterable[Request]) -> Counter[str]:
    """Pods that were made, by the uid of their Job."""
    made: Counter[str] = Counter()
    for each in requests:
        if each.taken and (each.verb, each.resource) == ("create", "pods"):
            made[controller_of(each.returned.get("metadata") or each.sent["metadata"])] += 1
    return made


def controller_of(meta: Document) -> str:
    """The uid of the controlling owner, or nothing."""
    owners = meta.get("ownerReferences") or ()
    return next((str(owner["uid"]) for owner in owners if owner.get("controller")), "")


def table(counts: Mapping[tuple[str, str], int], jobs: int) -> str:
    """The counts for people: in all, and for each job."""
    lines = [f"{'verb':<8}{'resource':<26}{'requests':>9}{'per job':>9}"]
    lines += [
        f"{verb:<8}{resource:<26}{number:>9}{number / jobs:>9.2f}"
        for (verb, resource), number in sorted(counts.items())
    ]
    return "\n".join(lines)
