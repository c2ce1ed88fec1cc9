"""Worlds made by chance from a number: all that a pass may read, likely or not; bad templates.

Hypothesis picks the numbers. One draw for each world keeps hundreds of them within a second.
"""

import copy
import random
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any, TypeVar

from agentjobs.api.names import FINALIZER, CauseCode
from agentjobs.domain.children import JobView
from agentjobs.domain.observed import DependencySeen, Observed
from agentjobs.domain.pods import ContainerEnd, ContainerView, PodView
from agentjobs.domain.refusal import Refusal, RefusalKind
from tests.builders import (
    JOB_NAME,
    JOB_UID,
    NAME,
    UID,
    Json,
    a_tool,
    an_agentjob,
    at,
    claimed,
    stamp,
)

T = TypeVar("T")

NASTY = (
    "",
    "plain",
    "two\nlines",
    "\x1b[2Jcleared",
    "\u202eturned",
    "é" * 3000,
    "😀" * 2000,
    '"\\' * 3000,
    "\x00\x07",
)
GARBAGE = (
    *(None, True, False, 0, -1, 2**53, 1.5, "", "text", "NaN", "1e999999999"),
    *([], [1], ["ab"], [{}], {}, {"a": 1}),
)
ENDINGS = (
    CauseCode.STOPPED,
    CauseCode.DECLINED,
    CauseCode.DEADLINE_EXCEEDED,
    CauseCode.PENDING_DEADLINE_EXCEEDED,
    CauseCode.IMAGE_PULL,
    CauseCode.INVALID_SPEC,
    CauseCode.ADMISSION_DENIED,
)
"""What an attempt can be ended for."""
WAITS = ("", "ContainerCreating", "ErrImagePull", "InvalidImageName", "Odd")
REASONS = ("", "Completed", "Error", "OOMKilled", "ContainerStatusUnknown", "StartError")
EXITS = (0, 1, 2, 99, 128, 137, 143, 255, -1)

RICH: Json = {
    "metadata": {"labels": {"team": "search"}, "annotations": {"example.net/why": "test"}},
    "spec": {
        "backoffLimit": 2,
        "activeDeadlineSeconds": 90,
        "ttlSecondsAfterFinished": 5,
        "suspend": False,
        "completions": 3,
        "completionMode": "Indexed",
        "podReplacementPolicy": "Failed",
        "template": {
            "metadata": {"labels": {"team": "search"}, "annotations": {"example.net/why": "pod"}},
            "spec": {
                "restartPolicy": "Never",
                "activeDeadlineSeconds": 80,
                "terminationGracePeriodSeconds": 300,
                "volumes": [{"name": "scratch", "emptyDir": {}}],
                "containers": [
                    {
                        "name": "main",
                        "image": "images.example.net/base:1",
                        "env": [{"name": "A", "value": "1"}],
                        "volumeMounts": [{"name": "scratch", "mountPath": "/scratch"}],
                        "resources": {"limits": {"cpu": "1"}},
                    }
                ],
            },
        },
    },
}
"""A template with something of everything that is looked at."""


class Chance:
    """Picks values; the same number picks the same ones."""

    def __init__(self, number: int) -> None:
        self._random = random.Random(number)  # noqa: S311 - no secret

    def one(self, values: Sequence[T]) -> T:
        return self._random.choice(values)

    def yes(self, share: float = 0.5) -> bool:
        return self._random.random() < share

    def maybe(self, value: T) -> T | None:
        return value if self.yes() else None

    def moment(self) -> datetime:
        return at(self._random.randrange(0, 120, 2))

    def text(self) -> str:
        return self.one(NASTY)

    def container(self, name: str) -> ContainerView:
        is_running = self.yes(0.3)
        end = None
        if self.yes():
            end = ContainerEnd(
                exit_code=self.one(EXITS),
                reason=self.one(REASONS),
                message=self.text(),
                started_at=self.maybe(self.moment()),
                finished_at=self.maybe(self.moment()),
            )
        return ContainerView(
            name=name,
            running=is_running,
            running_since=self.moment() if is_running else None,
            waiting_reason="" if is_running or end else self.one(WAITS),
            waiting_message=self.text(),
            end=end,
            restarting=end is not None and (is_running or self.yes(0.2)),
        )

    def pod(self, uid: str) -> PodView:
        return PodView(
            uid=uid,
            name=f"{JOB_NAME}-{uid}",
            job_uid=JOB_UID,
            phase=self.one(["Pending", "Running", "Succeeded", "Failed", "Unknown"]),
            reason=self.one(["", "", "Evicted", "DeadlineExceeded", "NodeLost"]),
            message=self.text(),
            created=self.moment(),
            delete_by=self.maybe(self.moment()),
            delete_grace=self.one([0, 30]),
            node=self.one(["", "node-a"]),
            unschedulable=self.text() if self.yes(0.2) else "",
            disruption=self.one(["", "", "PreemptionByScheduler", "Unheard"]),
            disruption_message=self.text(),
            tool_name="main",
            tool=self.maybe(self.container("main")),
            others=(self.container("helper"),) if self.yes(0.3) else (),
            init=(self.container("setup"),) if self.yes(0.3) else (),
            active_deadline=self.one([None, 1, 615]),
            tracked=self.yes(),
            gone=self.yes(0.3),
        )

    def child(self) -> JobView:
        return JobView(
            uid=JOB_UID,
            name=JOB_NAME,
            owner_uid=UID if self.yes(0.8) else "another",
            owner=self.one([f"AgentJob {NAME}", "CronJob sweeper", ""]),
            created=self.moment(),
            deleting=self.yes(0.2),
            placeholder=self.yes(0.2),
            queue="batch" if self.yes(0.3) else "",
            suspended=self.yes(),
            halted=self.yes(),
            retired=self.yes(0.2),
            single=self.yes(),
            completions=self.one([None, 0, 1, 24]),
            active=self.one([0, 1, 2]),
            succeeded=self.one([0, 1]),
            failed=self.one([0, 1]),
            terminating=self.one([0, 1]),
            complete=self.yes(0.3),
            failed_reason=self.one(["", "", "BackoffLimitExceeded", "DeadlineExceeded"]),
            failed_message=self.text(),
            failed_at=self.maybe(self.moment()),
        )

    def spec(self) -> Json:
        spec: Json = {}
        if self.yes():
            spec["toolRef"] = {"kind": "AgentTool", "name": "indexer"}
            spec["arguments"] = self.one([{}, {"depth": 3}, {"depth": "3"}])
        if self.yes(0.4):
            spec["stop"] = {
                "reason": self.text()[:1024],
                "at": self.maybe(stamp(self.moment())),
                "declined": self.one([None, True, False]),
            }
        optional: Json = {
            "deadlineSeconds": self.one([1, 30, 3600]),
            "pendingDeadlineSeconds": self.one([1, 30]),
            "ttlSecondsAfterFinished": self.one([0, 20]),
            "suspend": self.yes(),
            "queueName": "batch",
            "dependsOn": [{"name": "other", "condition": "Succeeded"}],
        }
        return spec | {field: value for field, value in optional.items() if self.yes(0.3)}

    def claim(self) -> Json:
        """The status of a claimed attempt, as earlier passes may have left it."""
        status = claimed(
            waiting={"code": "creating", "message": self.text()[:1024]},
            effective={
                "resultFrom": self.one(["report", "terminationMessage", "lastLine"]),
                "pendingDeadlineSeconds": self.one([None, 1, 30]),
            },
        )
        if self.yes():
            status["attempts"][0]["jobUID"] = JOB_UID
        if self.yes():
            status["startedAt"] = stamp(self.moment())
        if self.yes():
            status["deadlineAt"] = stamp(self.moment())
        if self.yes():
            message, moment = self.text()[:256], stamp(self.moment())
            status["ending"] = {"code": self.one(ENDINGS), "message": message, "at": moment}
        if self.yes(0.3):
            status["warnings"] = [self.text()[:256] for _ in range(8)]
        return status

    def observation(self) -> Observed:
        """All that a pass may read of an AgentJob that is not over."""
        status = self.claim() if self.yes(0.8) else {}
        job = an_agentjob(
            deleted=self.one([None, None, 20]),
            finalizers=self.one([(FINALIZER,), (FINALIZER,), ()]),
            status=status,
            **self.spec(),
        )
        child = self.child() if status and self.yes(0.8) else None
        known = bool(status) and "jobUID" in status["attempts"][0]
        known |= child is not None and child.owner_uid == UID
        refusal = Refusal(self.one(list(RefusalKind)), self.text())
        depends = DependencySeen("other", self.yes(), self.yes(), self.yes())
        return Observed(
            now=self.moment(),
            job=job,
            tool=self.maybe(a_tool(inputSchema={"properties": {"depth": {"type": "integer"}}})),
            child=child,
            child_seen=bool(status) and self.yes(0.3),
            pods=tuple(self.pod(f"p{n}") for n in range(self.one([0, 1, 1, 2]))) if known else (),
            refusal=refusal if status and self.yes(0.3) else None,
            refusal_known=self.yes(),
            dependencies=(depends,) if self.yes(0.3) else (),
            last_line=self.maybe(self.text()),
            written_at=self.maybe(self.moment()),
        )

    def bad_template(self) -> Json:
        """A good template with one or two values that are something else."""
        template = copy.deepcopy(RICH)
        for _ in range(self.one([1, 2])):
            *way, last = self.one(list(places(template)))
            owner: Any = template
            for key in way:
                owner = owner[key]
            owner[last] = copy.deepcopy(self.one(GARBAGE))
        return template


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of everything in a JSON value."""
    items: Any = enumerate(value) if isinstance(value, list) else ()
    for key, below in value.items() if isinstance(value, dict) else items:
        yield (*path, key)
        yield from places(below, (*path, key))
