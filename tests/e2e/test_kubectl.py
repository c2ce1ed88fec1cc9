"""What a platform engineer does with kubectl, and what a tool finds in its container."""

import base64
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.cluster import ClusterError
from tests.e2e.platform import BUSYBOX, LOCKED, Platform

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180, func_only=True)]

Document = dict[str, Any]
HOSTILE = {
    "quotes": """ 'single' "double" `back` """,
    "reference": "$(HOSTNAME) $$(HOSTNAME) $HOSTNAME ${HOSTNAME} $$ $$$",
    "lines": "one\ntwo\r\n\tthree\n",
    "backslashes": "\\n \\\\ \\",
    "unicode": "naïve 漢字 🙂 \u2028 \u202e ",
    "blank": " trailing ",
    "empty": "",
    "dashes": "--flag=-1 -- ; rm -rf / | & > < * ? [a] {b} # !",
    "number": 0.1,
    "large": 9007199254740991,
    "flag": True,
    "nested": {"list": [1, None, "$(X)", {"": "\\"}]},
}
"""Everything that a shell, the kubelet or a careless program would change on the way."""
FILES = ("arguments", "environment", "token", "who")
TELLS = """
exec 2>&1
set -e
! touch /outside 2>/dev/null
for name in arguments environment token who; do
  case $name in
    arguments) data=$(base64 -w0 < "$AGENTJOBS_ARGUMENTS_FILE");;
    environment) data=$(env -0 | base64 -w0);;
    token) data=$(base64 -w0 < "$AGENTJOBS_TOKEN_FILE");;
    who) data=$(id -u | base64 -w0);;
  esac
  echo "$name $data"
done
"""


def tool() -> Document:
    """A catalogue entry that takes everything and prints what it got."""
    container = {
        "name": "tool",
        "image": BUSYBOX,
        "imagePullPolicy": "IfNotPresent",
        "command": ["sh", "-c", TELLS],
        "securityContext": LOCKED,
    }
    return {
        "apiVersion": "agentjobs.dev/v1alpha1",
        "kind": "AgentTool",
        "metadata": {"name": "tells"},
        "spec": {
            "description": "Prints what it was given.",
            "inputSchema": {"type": "object"},
            "template": {"spec": {"template": {"spec": {"containers": [container]}}}},
        },
    }


@pytest.fixture(scope="module")
def here(platform: Platform) -> Iterator[Platform]:
    """One job each that is done, has failed, runs."""
    here = platform.in_namespace()
    here.create(
        here.job("fine", 'echo working; echo \'{"summary": "all fine"}\' > /dev/termination-log'),
        here.job("broken", "exit 3"),
        here.job("long", "trap 'exit 0' TERM; sleep 600 & wait"),
    )
    here.wait_for_all(["fine", "broken"])
    here.wait_for_all(["long"], ["running"])
    yield here
    here.kubectl("delete", "agentjobs", "--all", "--wait=false")


@pytest.fixture(scope="module")
def told(platform: Platform) -> dict[str, bytes]:
    """What the tool was given, as it printed it, in a namespace that admits only locked pods."""
    here = platform.in_namespace()
    level = "pod-security.kubernetes.io/enforce=restricted"
    here.kubectl("label", "namespace", here.namespace, level)
    job = {
        "apiVersion": "agentjobs.dev/v1alpha1",
        "kind": "AgentJob",
        "metadata": {"name": "told"},
        "spec": {"toolRef": {"name": "tells"}, "arguments": HOSTILE},
    }
    here.create(tool(), job)
    status = here.wait_for("told")
    text = here.kubectl("logs", "-l", "agentjobs.dev/job=told", "--tail=-1")
    assert status["state"] == "done", (status, text)
    lines = [line.partition(" ") for line in text.splitlines()]
    return {name: base64.b64decode(data) for name, _, data in lines}


def table(text: str) -> list[list[str]]:
    """Rows of cells; columns are two blanks apart at least."""
    return [re.split(r"\s{2,}", line.strip()) for line in text.splitlines()]


def row(text: str, name: str) -> dict[str, str]:
    head, *rows = table(text)
    (found,) = [dict(zip(head, each, strict=False)) for each in rows if name in each]
    return found


def test_get_shows_state_tool_progress_cause_deadline_age(here: Platform) -> None:
    head, *_ = table(here.cluster.kubectl("get", "aj", "-A"))
    assert head == ["NAMESPACE", "NAME", "STATE", "TOOL", "PROGRESS", "CAUSE", "DEADLINE", "AGE"]
    columns = "NAME:.metadata.name,STATE:.status.state,CAUSE:.status.cause.code"
    text = here.kubectl("get", "agentjobs", "-o", f"custom-columns={columns}")
    assert row(text, "broken") == {"NAME": "broken", "STATE": "failed", "CAUSE": "tool_error"}
    # A deadline lies ahead, and kubectl shows ages of what was.
    (line,) = [each for each in here.kubectl("get", "aj").splitlines() if "broken" in each]
    assert line.split()[:3] == ["broken", "failed", "tool_error"]
    assert "long" in here.kubectl("get", "agentjobs.agentjobs.dev", "long")
    assert "long" in here.kubectl("get", "all,agentjobs,jobs", "--no-headers")


def test_get_wide_shows_the_pod(here: Platform) -> None:
    head, *_ = table(here.kubectl("get", "aj", "-o", "wide"))
    assert [each for each in head if each in {"POD PHASE", "POD", "ATTEMPTS"}] == [
        "POD PHASE",
        "POD",
        "ATTEMPTS",
    ]
    (line,) = here.kubectl("get", "aj", "long", "-o", "wide", "--no-headers").splitlines()
    pod = here.pods_of("long")[0]["metadata"]["name"]
    assert {"running", "Running", pod, "1"} <= set(line.split())


def test_describe_shows_conditions_and_events(here: Platform) -> None:
    text = here.kubectl("describe", "aj", "broken")
    for word in ("Conditions:", "Accepted", "Started", "Finished", "Succeeded", "Events:"):
        assert word in text
    (event,) = [line for line in text.partition("Events:")[2].splitlines() if "Warning" in line]
    assert "exited with 3" in event
    assert "agentjobs-operator" in event


def test_explain_says_what_a_field_means(here: Platform) -> None:
    text = " ".join(here.kubectl("explain", "aj.spec.deadlineSeconds").split())
    assert "until it is ended" in text
    assert "integer" in text
    assert "What a queued job waits for" in here.kubectl("explain", "aj.status.waiting")


def test_wait_tells_success_from_failure(here: Platform) -> None:
    """R-STATE-DERIVED: conditions are what programs wait for."""
    here.kubectl("wait", "--for=condition=Succeeded", "aj/fine", "--timeout=5s")
    here.kubectl("wait", "--for=condition=Finished", "aj/fine", "aj/broken", "--timeout=5s")
    here.kubectl("wait", "--for=condition=Succeeded=False", "aj/broken", "--timeout=5s")
    here.kubectl("wait", "--for=jsonpath={.status.state}=running", "aj/long", "--timeout=5s")
    for name in ("broken", "long"):
        with pytest.raises(ClusterError, match="timed out"):
            here.kubectl("wait", "--for=condition=Succeeded", f"aj/{name}", "--timeout=1s")


def test_jobs_are_selected_by_state_and_tool(here: Platform) -> None:
    names = "jsonpath={.items[*].metadata.name}"
    for state, name in (("running", "long"), ("done", "fine"), ("failed", "broken")):
        field = f"--field-selector=status.state={state}"
        assert here.kubectl("get", "aj", field, "-o", names) == name


def test_logs_and_pods_are_found_by_the_name_of_the_job(here: Platform) -> None:
    assert here.kubectl("logs", "-l", "agentjobs.dev/job=fine") == "working\n"
    names = here.kubectl("get", "jobs", "-l", "agentjobs.dev/job=fine", "-o", "name")
    assert names == "job.batch/fine-1\n"


def test_arguments_arrive_byte_for_byte_in_their_file(told: dict[str, bytes]) -> None:
    """R-ARGS: the file is the compact JSON of what was given."""
    arrived = told["arguments"].decode()
    assert json.loads(arrived) == HOSTILE
    # The API server keeps objects with their names sorted.
    assert arrived == json.dumps(HOSTILE, ensure_ascii=False, separators=(",", ":"), sort_keys=True)


def test_scalar_arguments_arrive_byte_for_byte_in_the_environment(told: dict[str, bytes]) -> None:
    """R-ARGS: nothing is expanded, cut or quoted."""
    variables = dict(
        each.split("=", 1) for each in told["environment"].decode().split("\0") if "=" in each
    )
    for name, value in HOSTILE.items():
        if name != "nested":
            text = value if isinstance(value, str) else json.dumps(value)
            assert variables[f"AGENTJOBS_ARG_{name.upper()}"] == text
    assert "AGENTJOBS_ARG_NESTED" not in variables
    assert variables["AGENTJOBS_ATTEMPT"] == "1"
    assert variables["AGENTJOBS_JOB_ID"].startswith("told.")


def test_the_token_is_the_pods_own_and_good_for_reports_only(
    told: dict[str, bytes], platform: Platform
) -> None:
    """R-REPORT: of another audience than the API server's, which therefore refuses it."""
    payload = told["token"].decode().split(".")[1]
    claims = json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
    assert claims["aud"] == ["agentjobs-report"]
    assert claims["kubernetes.io"]["pod"]["name"].startswith("told-1-")
    review = {
        "apiVersion": "authentication.k8s.io/v1",
        "kind": "TokenReview",
        "spec": {"token": told["token"].decode(), "audiences": ["agentjobs-report"]},
    }
    path = "/apis/authentication.k8s.io/v1/tokenreviews"
    assert platform.api.send("POST", path, review).object()["status"]["authenticated"] is True
    review["spec"] = {"token": told["token"].decode()}
    assert not platform.api.send("POST", path, review).object()["status"].get("authenticated")


def test_a_locked_container_can_read_what_it_is_given(told: dict[str, bytes]) -> None:
    """Not root, with a root file system that it cannot write to."""
    assert told["who"] == b"65532\n"
    assert set(told) == set(FILES)
