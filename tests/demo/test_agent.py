"""What the demo does over HTTP, against a gateway that is played."""

import json
from collections.abc import Mapping
from typing import Any

import pytest

from demo.agent import BUILD, CRAWL, Agent
from demo.gateway import Answer, Gateway, port_of
from tests.cluster import ClusterError


class Played(Gateway):
    """Answers as the contract has it, but for what a test changes."""

    def __init__(self, changed: Mapping[tuple[str, str], Answer] | None = None) -> None:
        super().__init__(port=0, token="t")  # noqa: S106 - a word
        self._changed = dict(changed or {})
        self._keys: dict[str, str] = {}

    def call(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, **headers: str
    ) -> Answer:
        if body is not None:
            job_id = self._keys.setdefault(headers["Idempotency_Key"], str(body["tool"]) + ".n")
            usual = reply(202, {"job_id": job_id, "status": "queued"}, f"/v1/jobs/{job_id}")
        else:
            usual = ANSWERS[method, path.partition("?")[0]]
        return self._changed.pop((method, path.partition("?")[0]), usual)


def reply(code: int, body: Any, location: str = "") -> Answer:
    return Answer(code, {"Location": location} if location else {}, json.dumps(body))


def status(state: str, **more: Any) -> Answer:
    return reply(200, {"status": state, **more})


CRAWLED, BUILT = f"/v1/jobs/{CRAWL['tool']}.n", f"/v1/jobs/{BUILD['tool']}.n"
OVER = {"finished_at": "2026-01-01T00:00:00Z"}
ANSWERS = {
    ("GET", CRAWLED): status("done", **OVER),
    ("GET", "/v1/jobs/other.n"): status("done", **OVER),
    ("GET", "/v1/jobs/other.n/result"): status("done", data="3 pages"),
    ("GET", f"{CRAWLED}/result"): status("done", data="3 pages"),
    ("DELETE", BUILT): reply(202, {"status": "stopping"}),
    ("GET", BUILT): status("cancelled", **OVER),
    ("GET", f"{BUILT}/result"): reply(409, {"job_status": "cancelled"}),
}


def play(changed: Mapping[tuple[str, str], Answer] | None = None) -> tuple[bool, list[str]]:
    lines: list[str] = []
    return Agent(Played(changed), lines.append).play(), lines


def test_everything_is_shown_and_as_it_should_be() -> None:
    kept, lines = play()
    assert kept
    starts = [line for line in lines if line.strip().startswith("POST")]
    assert len(starts) == 3
    assert starts[0] == starts[1] != starts[2]
    assert f"    202  Location: {CRAWLED}" in lines
    assert "    409" in lines


@pytest.mark.parametrize(
    ("where", "answer"),
    [
        pytest.param(
            ("POST", "/v1/jobs"),
            reply(202, {"job_id": "other.n", "status": "queued"}),
            id="R-KEY: another job for the same key",
        ),
        pytest.param(("GET", CRAWLED), status("failed", **OVER), id="a crawl that fails"),
        pytest.param(("GET", BUILT), status("done", **OVER), id="a stop that comes too late"),
        pytest.param(
            ("GET", f"{BUILT}/result"), status("done", data="x"), id="a result after a stop"
        ),
    ],
)
def test_what_is_not_as_it_should_be_fails_the_demo(where: tuple[str, str], answer: Answer) -> None:
    kept, _ = play({where: answer})
    assert not kept


def test_a_job_that_goes_on_is_asked_for_again() -> None:
    kept, lines = play({("GET", CRAWLED): status("running")})
    assert kept
    assert not any("running" in line for line in lines)


def test_a_refused_start_is_told_with_the_gateways_words() -> None:
    refusal = reply(404, {"detail": "no such tool"})
    with pytest.raises(ClusterError, match="no such tool"):
        play({("POST", "/v1/jobs"): refusal})


def test_what_a_tool_hands_in_cannot_move_the_cursor() -> None:
    result = Answer(200, {}, "a\x1b[2Jb")
    _, lines = play({("GET", f"{CRAWLED}/result"): result})
    assert "      a [2Jb" in lines


@pytest.mark.parametrize(
    ("line", "port"),
    [
        ("Forwarding from 127.0.0.1:43211 -> 8080\n", 43211),
        ("Forwarding from [::1]:43211 -> 8080\n", None),
        ("", None),
    ],
)
def test_the_port_is_read_from_what_kubectl_says(line: str, port: int | None) -> None:
    assert port_of(line) == port
