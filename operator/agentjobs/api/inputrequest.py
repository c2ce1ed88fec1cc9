"""InputRequest: a question to a person or a runtime, and its answer, as a record."""

from enum import StrEnum
from typing import Annotated

from pydantic import ConfigDict, Field

from agentjobs.api.agentjob import Preserved, Text, UserName
from agentjobs.api.base import SET, Model, ObjectMeta, ResourceName, Time, cel, held_to


class InputKind(StrEnum):
    """What is asked for."""

    ELICITATION = "elicitation"
    SAMPLING = "sampling"
    ROOTS = "roots"
    CONFIRMATION = "confirmation"
    APPROVAL = "approval"


class Consequences(Model):
    """What a person is shown before they consent."""

    action: Text
    """What will be done."""
    object: Text
    """To what."""
    value: Text
    """With which values."""
    consequence: Text
    """What follows from it."""


class InputRequestSpec(Model):
    """The question. Immutable."""

    model_config = ConfigDict(
        json_schema_extra=held_to(cel("self == oldSelf", "a question cannot be changed"))
    )

    job_name: ResourceName
    """The AgentJob that asks."""
    job_uid: Annotated[str, Field(max_length=64, alias="jobUID")]
    """Its metadata.uid."""
    key: Annotated[str, Field(min_length=1, max_length=128)]
    """Name of the question within the job."""
    kind: InputKind
    """elicitation, sampling, roots, confirmation or approval."""
    prompt: Annotated[str, Field(max_length=4096)]
    """What is asked."""
    schema_: Annotated[Preserved | None, Field(alias="schema")] = None
    """JSON Schema of the answer."""
    consequences: Consequences | None = None
    """What is consented to, for confirmations and approvals."""
    requested_by: UserName | None = None
    """Requester of the job; never approves it."""
    approvers: (
        Annotated[
            tuple[Annotated[str, Field(max_length=256)], ...],
            Field(max_length=16, json_schema_extra=SET),
        ]
        | None
    ) = None
    """Who may answer an approval: `user:NAME` or `group:NAME`."""
    digest: Annotated[str, Field(max_length=128)] | None = None
    """Digest of template and arguments that is consented to."""
    expires_at: Time
    """Until when an answer is waited for."""


class Outcome(StrEnum):
    """How a question ended."""

    ANSWERED = "answered"
    DECLINED = "declined"
    EXPIRED = "expired"
    WITHDRAWN = "withdrawn"


class InputRequestStatus(Model):
    """The answer. Written once."""

    model_config = ConfigDict(
        json_schema_extra=held_to(
            cel(
                "!has(oldSelf.outcome) || self == oldSelf",
                "the question is closed; its answer cannot be changed",
            ),
            cel(
                "has(self.outcome) || "
                "!(has(self.answer) || has(self.answeredBy) || has(self.answeredAt))",
                "an answer is written together with its outcome",
            ),
            cel(
                "!has(self.outcome) || "
                "(self.outcome in ['answered', 'declined']) == has(self.answeredBy)",
                "answered and declined name who answered in answeredBy; "
                "expired and withdrawn name nobody",
            ),
            cel(
                "!has(self.answer) || (has(self.outcome) && self.outcome == 'answered')",
                "only the outcome answered carries an answer",
                "answer",
            ),
        )
    )

    outcome: Outcome | None = None
    """answered, declined, expired or withdrawn."""
    answer: Preserved | None = None
    """The answer, as the schema asks."""
    answered_by: UserName | None = None
    """Who answered."""
    answered_at: Time | None = None
    """When."""


class InputRequest(Model):
    """A question (elicitation, sampling, roots), a confirmation or an approval of an AgentJob."""

    model_config = ConfigDict(
        json_schema_extra=held_to(
            cel(
                "!has(oldSelf.status) || !has(oldSelf.status.outcome) || "
                "(has(self.status) && has(self.status.outcome))",
                "the question is closed; its answer cannot be taken back",
            )
        )
    )

    metadata: ObjectMeta
    spec: InputRequestSpec
    """The question."""
    status: InputRequestStatus = InputRequestStatus()
    """The answer."""
