"""A client of the gateway: async, typed, patient where a repetition is safe. No Kubernetes in it.

    async with Client(url, token=Path("/var/run/secrets/agentjobs/token")) as client:
        started = await client.start("crawl-site", {"url": "http://docs-site/"})
        ended = await client.wait(started.job_id)

Bodies are those of `agentjobs.contract.calls`; everything that goes wrong is a ClientError.
"""

from agentjobs.client.calls import Client, Result, content_of
from agentjobs.client.errors import (
    AlreadyAnsweredError,
    ClientError,
    InvalidArgumentsError,
    KeyReusedError,
    NotDoneError,
    NotFoundError,
    ProblemError,
    QuotaExceededError,
    UnavailableError,
    UnexpectedAnswerError,
)
from agentjobs.client.exchange import Backoff, Token

__all__ = [
    "AlreadyAnsweredError",
    "Backoff",
    "Client",
    "ClientError",
    "InvalidArgumentsError",
    "KeyReusedError",
    "NotDoneError",
    "NotFoundError",
    "ProblemError",
    "QuotaExceededError",
    "Result",
    "Token",
    "UnavailableError",
    "UnexpectedAnswerError",
    "content_of",
]
