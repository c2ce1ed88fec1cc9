"""Refusals as they are raised here and rendered for callers (RFC 9457)."""

from collections.abc import Iterable, Mapping
from typing import Any

from aiohttp import web

from agentjobs import codec
from agentjobs.contract.calls import Fault, Problem
from agentjobs.contract.problems import MEDIA_TYPE, ProblemType
from agentjobs.domain.errors import AgentJobError

MAX_FAULTS = 20


class ProblemError(AgentJobError):
    """A refusal; its detail is written for the caller and holds nothing that is not theirs."""

    def __init__(
        self,
        kind: ProblemType,
        detail: str = "",
        *,
        headers: Mapping[str, str] | None = None,
        faults: Iterable[Fault] = (),
        **members: Any,
    ) -> None:
        super().__init__(f"{kind.title}: {detail}" if detail else kind.title)
        self.kind = kind
        self.headers = dict(headers or {})
        self.problem = Problem(
            type=kind.uri,
            title=kind.title,
            status=kind.status.value,
            detail=detail,
            errors=tuple(faults)[:MAX_FAULTS] or None,
            **members,
        )

    def response(self) -> web.Response:
        """The problem document."""
        response = web.Response(
            body=codec.dumps(self.problem.to_json()),
            status=self.kind.status,
            headers={"Cache-Control": "no-store", **self.headers, "Content-Type": MEDIA_TYPE},
        )
        if "Connection" in self.headers:
            # Saying so is not enough for aiohttp.
            response.force_close()
        return response


def try_later(kind: ProblemType, detail: str, seconds: float = 1) -> ProblemError:
    """A refusal that may be gone in some seconds."""
    return ProblemError(kind, detail, headers={"Retry-After": str(max(1, round(seconds)))})
