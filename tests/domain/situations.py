"""What was asked of a job, crossed with what is seen of it.

One time line for all: created at 0, Job at 1, pod at 2, the tool starts at 5 and would end at 30.
A stop comes at 40, the pending deadline passes at 46, the deadline at 50, a late stop comes at 55;
what obeys a signal ends at 58, and the pass is made at 60.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from agentjobs.domain.children import JobView
from agentjobs.domain.observed import Observed
from agentjobs.domain.plan import Plan
from agentjobs.domain.pods import PodView
from tests.builders import (
    JOB_UID,
    Json,
    a_child,
    a_pod,
    an_agentjob,
    at,
    claimed,
    ended,
    observed,
    running,
    stamp,
    waiting,
)

STOP: Json = {"requestedBy": "ada", "reason": "wrong branch"}
PENDING_SECONDS = 45


@dataclass(frozen=True)
class Asked:
    """A request or deadline: where it stands in the spec, and what a pass records of it."""

    spec: Json
    code: str = ""
    recorded_at: float = 0
    deleted: float | None = None
    deadline_at: float = 600
    pending: bool = False


@dataclass(frozen=True)
class Seen:
    """What is seen, and whether an earlier pass has recorded and carried out the request."""

    child: JobView | None = None
    pods: tuple[PodView, ...] = ()
    acted: bool = False
    claim: bool = True
    known: bool = True
    """The Job's uid is on record."""
    status: Json | None = None


def _stop(moment: float, **more: Any) -> Json:
    return {"stop": STOP | {"at": stamp(moment)} | more}


ASKED: dict[str, Asked] = {
    "nothing": Asked({}),
    "stop": Asked(_stop(40), "stopped", 41),
    "kubectl delete": Asked({}, "stopped", 41, deleted=40),
    "deadline": Asked({"deadlineSeconds": 50}, "deadline_exceeded", 50, deadline_at=50),
    "pending deadline": Asked(
        {"pendingDeadlineSeconds": PENDING_SECONDS}, "pending_deadline_exceeded", 46, pending=True
    ),
    "stop then deadline": Asked(_stop(40) | {"deadlineSeconds": 50}, "stopped", 41, deadline_at=50),
    "deadline then stop": Asked(
        _stop(55) | {"deadlineSeconds": 50}, "deadline_exceeded", 50, deadline_at=50
    ),
    "declined": Asked(_stop(40, declined=True), "declined", 41),
}

HALTED = {"suspended": True, "halted": True}


def _obeyed(exit_code: int) -> PodView:
    """A pod that the kubelet ended because its own deadline was lowered, or passed."""
    return a_pod(
        ended(exit_code, finished=58), phase="Failed", reason="DeadlineExceeded", active_deadline=1
    )


SEEN: dict[str, Callable[[], Seen]] = {
    "unclaimed": lambda: Seen(claim=False),
    "claimed, Job unseen": lambda: Seen(known=False),
    "Job without pod": lambda: Seen(a_child(created=at(1))),
    "pod pending": lambda: Seen(a_child(), (a_pod(waiting()),)),
    "unschedulable": lambda: Seen(
        a_child(),
        (
            a_pod(
                node="",
                conditions=(
                    {
                        "type": "PodScheduled",
                        "status": "False",
                        "reason": "Unschedulable",
                        "message": "0/3 nodes have enough memory",
                    },
                ),
            ),
        ),
    ),
    "pulling": lambda: Seen(a_child(), (a_pod(waiting("ImagePullBackOff", "registry is down")),)),
    "running": lambda: Seen(a_child(), (a_pod(running()),)),
    "tool ended, other lingers": lambda: Seen(
        a_child(), (a_pod(ended(0, finished=35), others={"helper": running()}),)
    ),
    "succeeded before the signal": lambda: Seen(a_child(), (a_pod(ended(0)),), acted=True),
    "ended by signal, exit 0": lambda: Seen(a_child(), (_obeyed(0),), acted=True),
    "ended by signal, exit 143": lambda: Seen(a_child(), (_obeyed(143),), acted=True),
    "ended by signal, exit 137": lambda: Seen(a_child(), (_obeyed(137),), acted=True),
    "ended by deletion": lambda: Seen(
        a_child(failed=1),
        (a_pod(ended(143, finished=58), deleted_at=52, gone=True),),
        acted=True,
    ),
    "pod gone, end unseen": lambda: Seen(
        a_child(), (a_pod(running(), deleted_at=52, gone=True),), acted=True
    ),
    "Job gone": lambda: Seen(None, (a_pod(running(), gone=True),), acted=True),
    "Job halted, no pod left": lambda: Seen(a_child(**HALTED), acted=True),
    "already over": lambda: Seen(
        a_child(complete=True),
        (a_pod(ended(0)),),
        status={"state": "done", "finishedAt": stamp(30)},
    ),
}


def situation(asked: Asked, seen: Seen) -> Observed:
    """One pair, as a pass reads it."""
    status: Json = {}
    if seen.claim:
        status = claimed(
            deadlineAt=stamp(asked.deadline_at),
            effective={
                "resultFrom": "terminationMessage",
                "pendingDeadlineSeconds": PENDING_SECONDS if asked.pending else None,
            },
        )
        if seen.known:
            status["attempts"][0]["jobUID"] = JOB_UID
        if seen.acted and asked.code:
            status["ending"] = {
                "code": asked.code,
                "message": "as asked",
                "at": stamp(asked.recorded_at),
            }
        status |= seen.status or {}
    job = an_agentjob(deleted=asked.deleted, status=status, **asked.spec)
    return observed(job, now=60, child=seen.child, pods=seen.pods, refusal_known=seen.known)


def told(plan: Plan) -> str:
    """A decision in short: the state with what explains it, then what is done."""
    status, words = plan.status, []
    if status is not None:
        words.append(str(status.state))
        if status.waiting:
            words.append(f"({status.waiting.code})")
        if status.cause:
            words.append(str(status.cause.code))
            words.append("ran" if status.cause.ran else "unstarted")
            words += ["forced"] if status.cause.forced else []
            words += ["lost"] if status.cause.evidence == "lost" else []
            words += [f"exit={status.cause.exit_code}"] if status.cause.exit_code else []
    did = [type(action).__name__ for action in plan.actions]
    return " ".join(words or ["-"]) + (f" | {' '.join(did)}" if did else "")
