"""What the evidence says of how an attempt ended (R-HONEST, R-DEAD, R-CAUSE)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from agentjobs.api.agentjob import Cause, Ending
from agentjobs.api.names import CAUSE_MESSAGE_CHARACTERS, CauseCode, Evidence, State
from agentjobs.domain.children import JobView
from agentjobs.domain.pods import ContainerEnd, PodView
from agentjobs.domain.texts import cut, one_line

SIGNAL_BASE = 128
SIGKILL_EXIT = 137
MAX_SIGNAL = 64
OOM_KILLED = "OOMKilled"
DEADLINE = "DeadlineExceeded"
"""Reason of a pod whose activeDeadlineSeconds passed: the template's, our backstop, or our stop."""

STATE_OF_ENDING = {
    CauseCode.STOPPED: State.CANCELLED,
    CauseCode.DECLINED: State.CANCELLED,
    CauseCode.DEADLINE_EXCEEDED: State.TIMED_OUT,
    CauseCode.PENDING_DEADLINE_EXCEEDED: State.TIMED_OUT,
}
"""Endings that are asked for; all other causes are failures."""

DISRUPTIONS = {
    "PreemptionByScheduler": CauseCode.PREEMPTED,
    "EvictionByEvictionAPI": CauseCode.EVICTED,
    "DeletionByTaintManager": CauseCode.EVICTED,
    "TerminationByKubelet": CauseCode.EVICTED,
    "DeletionByPodGC": CauseCode.NODE_LOST,
}
"""Reasons of the DisruptionTarget condition (KEP-3329)."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a job ended."""

    state: State
    cause: Cause | None
    finished_at: datetime | None
    pod: PodView | None = None
    """The pod that the verdict rests on."""


def judge_pod(
    pod: PodView, ending: Ending | None, *, linger: int, handed_in: bool = False
) -> Verdict:
    """Judge a single pod that is dead.

    :param ending: why it was asked to go, if it was.
    :param linger: seconds after which containers that outlive the tool's are ended.
    :param handed_in: its tool had handed in its final result; it was done then.
    """
    end = _last_end(pod, ending)
    if end is not None and ended_by_itself(pod, ending, linger=linger):
        return _own_end(pod, end)
    if handed_in and end is not None and end.seen and end.exit_code == 0:
        return _own_end(pod, end)
    if ending is not None:
        return _asked_end(pod, end, ending)
    return _foreign_end(pod, end)


def ended_by_itself(pod: PodView, ending: Ending | None, *, linger: int) -> bool:
    """Whether the tool came to its end before any signal reached it.

    Of two pods that the Job controller made of a single Job, when an answer of the API server was
    lost to it, it deletes one when it sees both; the other one's end is the attempt's.
    """
    end = _last_end(pod, ending)
    return end is not None and end.seen and finished_first(pod, end, ending, linger)


def finished_first(pod: PodView, end: ContainerEnd, ending: Ending | None, linger: int) -> bool:
    """Whether the tool had finished before any signal of ours or of others reached it."""
    if pod.reason == "Evicted":
        return False
    if pod.disruption and not (pod.disrupted_at and _before(end, pod.disrupted_at)):
        return False
    asked_at = pod.delete_requested_at
    if asked_at is not None and ending is not None:
        # Of a pod that was seen only as it went, the time of the request is not known any more.
        asked_at = min(asked_at, ending.at)
    if asked_at is not None and not _before(end, asked_at):
        return False
    if pod.reason != DEADLINE:
        return True
    if ending is not None and _before(end, ending.at):
        return True
    # Only a lingering container was ended by us: the tool was over long before it.
    others = [c.end.finished_at for c in pod.others if c.end and c.end.finished_at]
    gap = timedelta(seconds=linger)
    return end.finished_at is not None and any(t - end.finished_at >= gap for t in others)


def may_have_begun(pod: PodView) -> bool:
    """Whether its tool began, or nobody can say that it did not (R-CAUSE: `ran`).

    Of a pod that reached a node only the kubelet's last word shows that. A pod that was merely
    missed in a list may have reached one since it was last seen.
    """
    if pod.started:
        return True
    if not pod.node:
        return pod.gone and pod.delete_by is None
    end = pod.tool.end if pod.tool else None
    if end is not None:
        return not (end.never_started or (end.unlocated and pod.delete_by is not None))
    unheard = (pod.gone or pod.lost) and not pod.final
    return unheard or pod.disruption == "DeletionByPodGC"


def judge_job(
    job: JobView, pods: Sequence[PodView], ending: Ending | None, *, linger: int
) -> Verdict:
    """Judge a Job that is over and made several pods, or whose pods nobody saw."""
    seen = [pod for pod in pods if pod.tool is not None and pod.tool.end is not None]
    late = ending is not None and job.completed_at is not None and job.completed_at >= ending.at
    if job.complete and (seen or not late):
        last = max((p.finished_at for p in seen if p.finished_at), default=None)
        return Verdict(State.DONE, None, last, seen[-1] if seen else None)
    if ending is not None:
        if not seen:
            return ended_unseen(ending)
        return _asked_end(seen[-1], seen[-1].tool.end if seen[-1].tool else None, ending)
    if job.failed_reason == DEADLINE:
        return _ended_by_its_deadline(job, seen)
    broken = [pod for pod in seen if _failed(pod)]
    if broken:
        return judge_pod(min(broken, key=_finished), None, linger=linger)
    message = f"Job {job.name} failed ({job.failed_reason}: {job.failed_message})"
    return _lost(State.FAILED, CauseCode.TOOL_ERROR, message, job.failed_at)


def _ended_by_its_deadline(job: JobView, seen: Sequence[PodView]) -> Verdict:
    """Judge a Job whose own backstop passed: its pods were deleted because of it."""
    message = f"Job {job.name} was ended by its deadline"
    pod = seen[-1] if seen else None
    end = pod.tool.end if pod and pod.tool else None
    if end is None:
        return _lost(State.TIMED_OUT, CauseCode.DEADLINE_EXCEEDED, message, job.failed_at)
    cause = _cause(CauseCode.DEADLINE_EXCEEDED, message, end, ran=True)
    cause = cause.model_copy(update={"forced": end.exit_code == SIGKILL_EXIT})
    return Verdict(State.TIMED_OUT, cause, end.finished_at, pod)


def never_ran(ending: Ending) -> Verdict:
    """Judge an attempt whose tool container never started."""
    return Verdict(
        state=STATE_OF_ENDING.get(ending.code, State.FAILED),
        cause=Cause(
            code=ending.code,
            message=_sentence(ending.message),
            retryable=ending.code == CauseCode.PENDING_DEADLINE_EXCEEDED,
            ran=False,
        ),
        finished_at=None,
    )


def ended_unseen(ending: Ending) -> Verdict:
    """Judge an attempt whose tool may have begun, and nobody saw how it ended."""
    verdict = never_ran(ending)
    lost = {"ran": True, "retryable": False, "evidence": Evidence.LOST}
    cause = verdict.cause.model_copy(update=lost) if verdict.cause else None
    return replace(verdict, cause=cause)


def preempted(verdict: Verdict, job: JobView) -> Verdict:
    """Say who had the pod of a retired Job deleted."""
    if verdict.cause is None or verdict.cause.code is not CauseCode.DELETED_EXTERNALLY:
        return verdict
    message = f"{_taken_back(job)} and its pod was ended"
    changes = {"code": CauseCode.PREEMPTED, "message": message, "retryable": True}
    return replace(verdict, cause=verdict.cause.model_copy(update=changes))


def preempted_unseen(job: JobView, *, ran: bool) -> Verdict:
    """Judge a retired Job of which no pod is left.

    :param ran: its tool may have begun, and nobody saw how that ended.
    """
    if not ran:
        cause = _cause(CauseCode.PREEMPTED, _taken_back(job), None, ran=False, retryable=True)
        return Verdict(State.FAILED, cause, None)
    verdict = _lost(
        State.FAILED, CauseCode.PREEMPTED, f"{_taken_back(job)} and its pod is gone", None
    )
    lost = verdict.cause.model_copy(update={"retryable": True}) if verdict.cause else None
    return replace(verdict, cause=lost)


def _taken_back(job: JobView) -> str:
    if job.held_back:
        return f"Job {job.name} was suspended on request"
    return f"Job {job.name} lost its place: its queue suspended it"


def vanished(job_name: str, pods: Sequence[PodView], *, ran: bool) -> Verdict:
    """Judge an attempt whose Job was deleted by somebody else."""
    message = f"Job {job_name} was deleted by somebody else; it is not started again"
    pod = next((p for p in reversed(pods) if p.tool and p.tool.end), None)
    end = pod.tool.end if pod and pod.tool else None
    cause = _cause(
        CauseCode.DELETED_EXTERNALLY, message, end, ran=ran or any(may_have_begun(p) for p in pods)
    )
    if end is None:
        lost = Evidence.LOST if cause.ran else Evidence.OBSERVED
        cause = cause.model_copy(update={"evidence": lost})
    return Verdict(State.FAILED, cause, end.finished_at if end else None, pod)


def _last_end(pod: PodView, ending: Ending | None) -> ContainerEnd | None:
    """How the tool ended, unless that was followed by another run, or would have been."""
    again = pod.tool and (pod.tool.running or (ending and pod.tool.restarting))
    return pod.tool.end if pod.tool and not again else None


def _own_end(pod: PodView, end: ContainerEnd) -> Verdict:
    if end.exit_code == 0:
        return Verdict(State.DONE, None, end.finished_at, pod)
    if end.reason == OOM_KILLED and end.exit_code == SIGKILL_EXIT:
        message = (
            f"container {pod.tool_name} of pod {pod.name} was killed for using too much memory"
        )
        cause = _cause(CauseCode.OOM_KILLED, message, end, ran=True)
    else:
        cause = _cause(CauseCode.TOOL_ERROR, _exit_message(pod, end), end, ran=True)
    return Verdict(State.FAILED, cause, end.finished_at, pod)


def _asked_end(pod: PodView, end: ContainerEnd | None, ending: Ending) -> Verdict:
    if not may_have_begun(pod):
        verdict = never_ran(ending)
        return Verdict(verdict.state, verdict.cause, None, pod)
    cause = _cause(ending.code, ending.message, end, ran=True).model_copy(
        update={
            "forced": end is not None and end.exit_code == SIGKILL_EXIT,
            "evidence": Evidence.OBSERVED if end and end.seen else Evidence.LOST,
        }
    )
    state = STATE_OF_ENDING.get(ending.code, State.FAILED)
    return Verdict(state, cause, end.finished_at if end else None, pod)


def _foreign_end(pod: PodView, end: ContainerEnd | None) -> Verdict:
    """Judge a pod that was ended neither by its tool nor by us, or whose tool never started."""
    finished_at = end.finished_at if end else None
    state = State.FAILED
    if pod.lost:
        message = f"node {pod.node} of pod {pod.name} is lost; the tool may still run there"
        cause = _cause(CauseCode.NODE_LOST, message, end, ran=may_have_begun(pod), retryable=True)
    elif pod.disruption or pod.reason == "Evicted":
        cause = _disrupted(pod, end)
    elif pod.reason == DEADLINE:
        message = f"pod {pod.name} was ended by its activeDeadlineSeconds"
        cause = _cause(CauseCode.DEADLINE_EXCEEDED, message, end, ran=may_have_begun(pod))
        cause = cause.model_copy(
            update={"forced": end is not None and end.exit_code == SIGKILL_EXIT}
        )
        state = State.TIMED_OUT
    elif end is not None and end.never_started:
        message = f"container {pod.tool_name} of pod {pod.name} could not be started: {end.message}"
        cause = _cause(CauseCode.START_ERROR, message, end, ran=False)
    elif pod.gone or pod.delete_by is not None:
        message = f"pod {pod.name} was deleted by somebody else; it is not started again"
        cause = _cause(CauseCode.DELETED_EXTERNALLY, message, end, ran=may_have_begun(pod))
    else:
        cause = _without_tool(pod)
    if cause.ran and not (end and end.seen):
        cause = cause.model_copy(update={"evidence": Evidence.LOST})
    return Verdict(state, cause, finished_at, pod)


def _disrupted(pod: PodView, end: ContainerEnd | None) -> Cause:
    code = DISRUPTIONS.get(pod.disruption, CauseCode.EVICTED)
    words = pod.message or pod.disruption_message or pod.reason or pod.disruption
    message = f"pod {pod.name} was {code.value.replace('_', ' ')}: {words}"
    # An eviction for a limit that the tool broke itself is no disruption: it would break it again.
    # Without a container status nobody can say that the tool had not begun.
    ran = may_have_begun(pod) or (pod.tool is None and bool(pod.node))
    return _cause(code, message, end, ran=ran, retryable=bool(pod.disruption))


def _without_tool(pod: PodView) -> Cause:
    """Judge a pod that failed before its tool began: an init container did, or the kubelet."""
    broken = next((c for c in pod.init if c.end and c.end.exit_code != 0), None)
    if broken and broken.end:
        message = (
            f"init container {broken.name} of pod {pod.name} exited with "
            f"{broken.end.exit_code}, so {pod.tool_name} did not start"
        )
        return _cause(CauseCode.TOOL_ERROR, message, None, ran=False)
    words = pod.message or pod.reason or "without a reason"
    message = f"pod {pod.name} failed before {pod.tool_name} started: {words}"
    return _cause(CauseCode.START_ERROR, message, None, ran=pod.started)


def _exit_message(pod: PodView, end: ContainerEnd) -> str:
    if end.exit_code == SIGKILL_EXIT:
        return (
            f"container {pod.tool_name} of pod {pod.name} was killed (exit code 137); "
            "a kill for memory is suspected, not proven"
        )
    return f"container {pod.tool_name} of pod {pod.name} exited with {end.exit_code}"


def _cause(
    code: CauseCode,
    message: str,
    end: ContainerEnd | None,
    *,
    ran: bool,
    retryable: bool = False,
) -> Cause:
    exit_code = end.exit_code if end and end.seen else None
    signal = exit_code - SIGNAL_BASE if exit_code is not None else 0
    return Cause(
        code=code,
        message=_sentence(message),
        retryable=retryable,
        ran=ran,
        exit_code=exit_code,
        signal=signal if 0 < signal <= MAX_SIGNAL else None,
    )


def _lost(state: State, code: CauseCode, message: str, at: datetime | None) -> Verdict:
    cause = Cause(
        code=code,
        message=_sentence(message),
        retryable=False,
        ran=True,
        evidence=Evidence.LOST,
    )
    return Verdict(state, cause, at)


def _sentence(text: str) -> str:
    return cut(one_line(text), CAUSE_MESSAGE_CHARACTERS)


def _failed(pod: PodView) -> bool:
    return pod.phase == "Failed" or bool(pod.tool and pod.tool.end and pod.tool.end.exit_code)


def _finished(pod: PodView) -> datetime:
    at = pod.finished_at or pod.created
    if at is None:  # pragma: no cover - the API server always sets creationTimestamp
        raise ValueError(f"pod {pod.name} has no times")
    return at


def _before(end: ContainerEnd, moment: datetime) -> bool:
    return end.finished_at is not None and end.finished_at < moment.replace(microsecond=0)
