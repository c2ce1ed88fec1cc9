"""What an agent does over HTTP: starts a job, repeats the start, reads its end; stops another."""

import json
import secrets
import time
from collections.abc import Callable, Mapping
from typing import Any

from tests.cluster import ClusterError

from .gateway import Answer, Gateway
from .table import UNPRINTABLE

CRAWL = {
    "tool": "crawl-site",
    "arguments": {"start": "http://docs-site.agentjobs-demo.svc/index.html", "max_pages": 40},
}
BUILD = {"tool": "build-c-project", "arguments": {"project": "zstd"}}
WAIT_SECONDS = 60.0
SHOWN = 300
"""Characters of an answer."""

Say = Callable[[str], None]


class Agent:
    """Calls the gateway and shows what it sends and what is answered."""

    def __init__(self, gateway: Gateway, say: Say) -> None:
        self._gateway = gateway
        self._say = say
        # The keys of an earlier demo are as good as their jobs, which are gone.
        self._run = secrets.token_hex(4)

    def play(self) -> bool:
        """Do it all; whether everything was as the contract has it."""
        crawl = self._start("crawl", CRAWL)
        again = self._start("crawl", CRAWL)
        build = self._start("build", BUILD)
        crawled = self._until_over(crawl)
        result = self._call("GET", f"/v1/jobs/{crawl}/result")
        self._call("DELETE", f"/v1/jobs/{build}?reason=the+demo+is+over")
        stopped = self._until_over(build)
        refused = self._call("GET", f"/v1/jobs/{build}/result")
        return (crawl == again, crawled, result.code, stopped, refused.code) == (
            True,
            "done",
            200,
            "cancelled",
            409,
        )

    def _start(self, key: str, request: Mapping[str, Any]) -> str:
        answer = self._call("POST", "/v1/jobs", request, Idempotency_Key=f"{key}-{self._run}")
        if answer.code != 202:  # noqa: PLR2004
            raise ClusterError(f"the gateway did not start {request['tool']}: {answer.text}")
        return str(answer.body["job_id"])

    def _until_over(self, job_id: str) -> str:
        """Long-poll; only the last answer is shown."""
        path = f"/v1/jobs/{job_id}?wait=30"
        until = time.monotonic() + WAIT_SECONDS
        answer = self._gateway.call("GET", path)
        while answer.code == 200 and "finished_at" not in answer.body:  # noqa: PLR2004
            if time.monotonic() > until:
                raise ClusterError(f"{job_id} is not over after {WAIT_SECONDS:.0f} s")
            answer = self._gateway.call("GET", path)
        self._show("GET", path, answer)
        return str(answer.body.get("status"))

    def _call(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, **headers: str
    ) -> Answer:
        answer = self._gateway.call(method, path, body, **headers)
        self._show(method, path, answer, body, **headers)
        return answer

    def _show(
        self,
        method: str,
        path: str,
        answer: Answer,
        body: Mapping[str, Any] | None = None,
        **headers: str,
    ) -> None:
        sent = [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        self._say(f"  {'  '.join([f'{method} {path}', *sent])}")
        if body is not None:
            self._say(f"      {json.dumps(body)}")
        location = answer.headers.get("Location")
        got = [str(answer.code), *([f"Location: {location}"] if location else [])]
        self._say(f"    {'  '.join(got)}")
        text = UNPRINTABLE.sub(" ", answer.text)
        self._say(f"      {text if len(text) <= SHOWN else text[:SHOWN] + '…'}")
