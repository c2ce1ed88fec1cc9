"""Job ids: `<name>.<namespace>` of an AgentJob, opaque to agents."""

import re

from agentjobs.contract.calls import JOB_ID

PATTERN = re.compile(JOB_ID)
LONGEST = 127


def job_id(namespace: str, name: str) -> str:
    """The handle of an AgentJob."""
    return f"{name}.{namespace}"


def parse_job_id(text: str) -> tuple[str, str] | None:
    """Namespace and name; None where no AgentJob can have such a handle."""
    if len(text) > LONGEST or not PATTERN.fullmatch(text):
        return None
    name, _, namespace = text.partition(".")
    return namespace, name
