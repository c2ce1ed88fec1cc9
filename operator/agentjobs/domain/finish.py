"""The end of a job, written once (R-STATE-FINAL), with what is owed because of it."""

from datetime import datetime

from agentjobs.api.agentjob import (
    AgentJobStatus,
    Delivery,
    Ending,
    ResultSource,
)
from agentjobs.api.names import (
    CauseCode,
    ConditionType,
    Reason,
    State,
)
from agentjobs.domain import status as st
from agentjobs.domain.callbacks import outbox_of, pending
from agentjobs.domain.errors import InvalidSpecError
from agentjobs.domain.mirror import counts, stamped, with_condition
from agentjobs.domain.observed import Observed, ReadLastLine
from agentjobs.domain.plan import (
    Deliver,
    Note,
    Plan,
)
from agentjobs.domain.pods import PodView
from agentjobs.domain.verdict import Verdict, never_ran


def end_unstarted(seen: Observed, ending: Ending) -> Plan:
    """Write the end of a job whose tool never started."""
    return end(seen, never_ran(ending), ending)


def end(seen: Observed, verdict: Verdict, ending: Ending | None) -> Plan:
    """Write the end, once (R-STATE-FINAL)."""
    pod = verdict.pod
    effective = seen.job.status.effective
    source = effective.result_from if effective else ResultSource.TERMINATION_MESSAGE
    printed = source is ResultSource.LAST_LINE and pod is not None and pod.started and not pod.gone
    if pod and printed and seen.last_line is None:
        return Plan(need=ReadLastLine(pod.name, pod.tool_name))
    text = _handed_in(seen, source, pod)
    finished_at = verdict.finished_at or seen.now
    cause = verdict.cause
    attempts = seen.job.status.attempts or ()
    if cause and not cause.ran and any(st.has_begun(each) for each in attempts):
        cause = cause.model_copy(update={"ran": True})
    status = seen.job.status.model_copy(
        update={
            "state": verdict.state,
            "cause": cause,
            "ending": ending if ending and ending.code in st.ASKED else None,
            "finished_at": finished_at,
            "waiting": None,
            **_result(seen, source, text),
            **_last_pod(seen, pod),
        }
    )
    attempt = st.current_attempt(status)
    if attempt and attempt.cause is None:
        # Otherwise the job ended between two attempts, and the last one has its own end on record.
        status = with_attempt_ended(seen, status, verdict)
    status = _end_conditions(seen, status, verdict.state)
    status = with_outbox(seen, status)
    failed = verdict.state in {State.FAILED, State.TIMED_OUT}
    message = cause.message if cause else f"AgentJob {seen.job.metadata.name} is done"
    note = Note(st.REASON_OF_STATE[verdict.state], message, warning=failed)
    return Plan(
        status=st.fit(stamped(seen, status)),
        actions=tuple(Deliver(owed.id) for owed in owed_by(status)),
        notes=(note,),
        requeue_at=seen.now,
    )


def with_attempt_ended(seen: Observed, status: AgentJobStatus, verdict: Verdict) -> AgentJobStatus:
    """Record how the current attempt ended."""
    child = seen.child
    if child and child.owner_uid == seen.job.metadata.uid:
        status = st.with_attempt(status, job_uid=child.uid)
    return st.with_attempt(
        status,
        started_at=begun_at(seen),
        finished_at=verdict.finished_at,
        cause=verdict.cause.code if verdict.cause else None,
        ran=verdict.cause.ran if verdict.cause else True,
    )


def begun_at(seen: Observed) -> datetime | None:
    """When the tool began in this attempt, as far as that was ever seen."""
    attempt = st.current_attempt(seen.job.status)
    seen_now = (pod.started_at for pod in seen.pods if pod.started_at)
    return (attempt.started_at if attempt else None) or min(seen_now, default=None)


def owed_by(status: AgentJobStatus) -> list[Delivery]:
    """Events that were not delivered yet."""
    return pending(status.callback.deliveries) if status.callback else []


def with_outbox(seen: Observed, status: AgentJobStatus) -> AgentJobStatus:
    """Make what is owed part of the terminal write (R-TWO-WRITES), and nothing else of earlier."""
    status = status.model_copy(update={"callback": None})
    outbox = outbox_of(seen.job, status, seen.now)
    if outbox is None or seen.job.spec.callback is None:
        return status
    try:
        seen.policy.destinations.check_url(seen.job.metadata.namespace, seen.job.spec.callback.url)
    except InvalidSpecError as error:
        return with_condition(
            seen,
            status,
            ConditionType.CALLBACK_DELIVERED,
            Reason.DESTINATION_DENIED,
            holds=False,
            message=str(error),
        )
    return with_condition(
        seen,
        status.model_copy(update={"callback": outbox}),
        ConditionType.CALLBACK_DELIVERED,
        Reason.DELIVERY_PENDING,
        holds=False,
    )


def _result(seen: Observed, source: ResultSource, text: str) -> dict[str, object]:
    """The result and its summary; what was handed in through the report API stays as it is."""
    status = seen.job.status
    said = status.summary or seen.said.summary
    if source is ResultSource.REPORT:
        told = status.result.text if status.result else None
        return {"summary": st.summary_of(told or "", said)}
    return {"result": st.result_of(source, text), "summary": st.summary_of(text, said)}


def _handed_in(seen: Observed, source: ResultSource, pod: PodView | None) -> str:
    if pod is None or pod.tool is None or pod.tool.end is None or not pod.started:
        return ""
    if source is ResultSource.LAST_LINE:
        return seen.last_line or ""
    return pod.tool.end.message if source is ResultSource.TERMINATION_MESSAGE else ""


def _last_pod(seen: Observed, pod: PodView | None) -> dict[str, object]:
    begun = seen.job.status.started_at or begun_at(seen)
    changes: dict[str, object] = {"started_at": begun, "pod_uids": None}
    if seen.child and seen.child.owner_uid == seen.job.metadata.uid and not seen.child.placeholder:
        changes["pods"] = counts(seen.child, seen.pods)
    if pod is not None:
        changes |= {"pod_name": pod.name, "pod_phase": pod.phase}
    return changes


def _end_conditions(seen: Observed, status: AgentJobStatus, state: State) -> AgentJobStatus:
    cause = status.cause
    reason = st.REASON_OF_STATE[state]
    message = cause.message if cause else ""
    if cause and cause.code in {CauseCode.INVALID_SPEC, CauseCode.ADMISSION_DENIED}:
        detail = seen.refusal.message if seen.refusal else message
        refused_as = (
            Reason.INVALID_SPEC if cause.code is CauseCode.INVALID_SPEC else Reason.ADMISSION_DENIED
        )
        status = with_condition(
            seen, status, ConditionType.ACCEPTED, refused_as, holds=False, message=detail
        )
    if status.started_at:
        status = with_condition(seen, status, ConditionType.STARTED, Reason.CONTAINER_STARTED)
    status = with_condition(seen, status, ConditionType.FINISHED, reason, message=message)
    done = state is State.DONE
    return with_condition(
        seen, status, ConditionType.SUCCEEDED, reason, holds=done, message=message
    )
