"""A tool in a real pod asks, its requester answers, and it goes on (R-REPORT, R-POLICY-INPUT)."""

import json
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.chart import ROOT
from tests.e2e.agents import ACCOUNT, RBAC, Agents, curl, settle
from tests.e2e.platform import IMAGE, LOCKED, Platform

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180, func_only=True)]

Document = dict[str, Any]

ASKS = "asks"
PAGE = ROOT / "docs/write-a-tool.md"
WITHIN = 60.0
POLL = 0.2


def example(page: Path) -> str:
    """The tool in Python that the page shows."""
    (block,) = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    return str(block)


def tool() -> Document:
    """The product's image: it holds Python."""
    container = {
        "name": "tool",
        "image": f"{IMAGE['repository']}:{IMAGE['tag']}",
        "imagePullPolicy": "IfNotPresent",
        "command": ["python3", "-c", example(PAGE)],
        "securityContext": LOCKED,
    }
    pod = {"terminationGracePeriodSeconds": 3, "containers": [container]}
    return {
        "apiVersion": "agentjobs.dev/v1alpha1",
        "kind": "AgentTool",
        "metadata": {"name": ASKS},
        "spec": {
            "description": "Asks before it drops a table.",
            "resultFrom": "report",
            "template": {"spec": {"template": {"spec": pod}}},
        },
    }


def may_use() -> list[Document]:
    rule = {
        "apiGroups": ["agentjobs.dev"],
        "resources": ["agenttools"],
        "resourceNames": [ASKS],
        "verbs": ["use"],
    }
    role = {"apiGroup": RBAC, "kind": "Role", "name": ASKS}
    subject = {"kind": "ServiceAccount", "name": ACCOUNT}
    return [
        {"apiVersion": f"{RBAC}/v1", "kind": "Role", "metadata": {"name": ASKS}, "rules": [rule]},
        {
            "apiVersion": f"{RBAC}/v1",
            "kind": "RoleBinding",
            "metadata": {"name": ASKS},
            "roleRef": role,
            "subjects": [subject],
        },
    ]


@dataclass(frozen=True)
class Story:
    """What an agent sees of a tool that asks."""

    asked: Document
    code: int
    ended: Document
    result: str
    output: Document
    question: Document
    seconds: float
    """From the answer to the end of the job."""


@pytest.fixture(scope="module")
def story(platform: Platform) -> Story:
    agents = settle(platform.in_namespace())
    here = agents.here
    here.create(tool(), *may_use())
    here.kubectl("wait", "--for=condition=Ready", "agenttool", ASKS, "--timeout=30s")
    first, second = here.gateway.urls
    job = start(agents, first)
    name = job.partition(".")[0]
    here.wait_for(name, ["input_required"], WITHIN)
    inputs = f"{second}/v1/jobs/{job}/inputs"
    (asked,) = curl(agents.token, inputs).body["inputs"]
    yes = json.dumps({"outcome": "answered", "answer": {"ok": True}})
    options = ["--header", "Content-Type: application/json", "--data", yes]
    began = time.monotonic()
    code = curl(agents.token, f"{inputs}/{asked['key']}", *options).code
    ended = here.wait_for(name, seconds=WITHIN)
    seconds = time.monotonic() - began
    (question,) = here.api.items("InputRequest", here.namespace)
    return Story(
        asked=asked,
        code=code,
        ended=ended,
        result=curl(agents.token, f"{second}/v1/jobs/{job}/result").body["data"],
        output=curl(agents.token, f"{first}/v1/jobs/{job}/output?stream=reported").body,
        question=question,
        seconds=seconds,
    )


def start(agents: Agents, url: str) -> str:
    """Start the tool once this replica knows it; return the job id."""
    end = time.monotonic() + WITHIN
    while (reply := agents.agent.start(url, "asks", ASKS)).code != 202:
        assert time.monotonic() < end, reply.body
        time.sleep(POLL)
    return str(reply.body["job_id"])


def test_r_report_a_tool_asks_is_answered_and_goes_on(story: Story) -> None:
    assert (story.asked["key"], story.asked["prompt"]) == ("drop", "Drop the table?")
    assert story.code == 204
    assert story.ended["state"] == "done"
    assert story.result == "dropped"
    assert story.seconds < 20, "the answer is not polled for"


def test_r_policy_input_the_answer_is_on_record_with_who_gave_it(story: Story) -> None:
    status = story.question["status"]
    assert (status["outcome"], status["answer"]) == ("answered", {"ok": True})
    assert status["answeredBy"] == story.question["spec"]["requestedBy"]
    assert status["answeredBy"].endswith(f":{ACCOUNT}")


def test_r_output_what_it_handed_in_is_kept(story: Story) -> None:
    assert story.output["data"].startswith("found: ")
