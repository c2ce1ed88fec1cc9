"""Agents of a namespace: who calls the gateway, from this machine with curl and from a pod."""

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tests.cluster.binaries import binary
from tests.e2e.installed import InstalledGateway
from tests.e2e.platform import BUSYBOX, IMAGE, LOCKED, RESTRICTED, Platform
from tests.gateway_process import Agent

ACCOUNT = "agent"
TOOL = "greet"
POD = "caller"
AUDIENCE = "agentjobs"
GREETS = """
trap 'exit 3' TERM
sleep "$AGENTJOBS_ARG_SECONDS" & wait $!
printf '{"summary": "hello %s"}' "$AGENTJOBS_ARG_NAME" > /dev/termination-log
"""
FETCHES = """
import sys, urllib.request
with open("/var/run/secrets/agentjobs/token") as file:
    headers = {"Authorization": "Bearer " + file.read()}
with urllib.request.urlopen(urllib.request.Request(sys.argv[1], headers=headers)) as answer:
    sys.stdout.write(answer.read().decode())
"""
PROGRAMS = Path(__file__).parent / "programs"
RBAC = "rbac.authorization.k8s.io"

Document = dict[str, Any]


@dataclass(frozen=True)
class Reply:
    """What curl has got."""

    code: int
    headers: dict[str, str]
    raw: str
    seconds: float

    @property
    def body(self) -> Document:
        value: Document = json.loads(self.raw)
        return value


def curl(token: str, url: str, *options: str) -> Reply:
    """The real one. What it is given on its command line, a person would type."""
    command = ["curl", "--noproxy", "*", "--silent", "--show-error", "--max-time", "90"]
    command += ["--include", "--write-out", "\n%{time_total}", "--header", "@-", *options, url]
    # The token comes on standard input: command lines can be seen by everybody.
    header = f"Authorization: Bearer {token}" if token else ""
    done = subprocess.run(command, input=header, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    # Line ends of HTTP are read as those of text.
    head, _, rest = done.stdout.partition("\n\n")
    raw, _, seconds = rest.rpartition("\n")
    first, *lines = head.splitlines()
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    return Reply(int(first.split()[1]), headers, raw, float(seconds))


@dataclass(frozen=True)
class Agents:
    """The account of one namespace, its tool, and a pod that runs as it."""

    here: Platform

    @property
    def user(self) -> str:
        return f"system:serviceaccount:{self.here.namespace}:{ACCOUNT}"

    @cached_property
    def token(self) -> str:
        return self.here.kubectl(
            "create", "token", ACCOUNT, f"--audience={AUDIENCE}", "--duration=30m"
        ).strip()

    @cached_property
    def agent(self) -> Agent:
        return Agent(self.token)

    def run(self, program: str, *arguments: str) -> Document:
        """Run a program in the pod to its end; return what it says."""
        text = self.here.kubectl("exec", POD, "--", *self._command(program, *arguments))
        said: Document = json.loads(text)
        return said

    def fetch(self, url: str) -> Document:
        """Read an address with the pod's own token."""
        text = self.here.kubectl("exec", POD, "--", "python3", "-c", FETCHES, url)
        said: Document = json.loads(text)
        return said

    @contextmanager
    def running(self, program: str, *arguments: str) -> Iterator[list[Document]]:
        """Run a program in the pod during the block; afterwards what it says is in the list."""
        kubectl = [str(binary("kubectl")), "--kubeconfig", str(self.here.cluster.kubeconfig)]
        place = ["--namespace", self.here.namespace, "exec", "--stdin", POD, "--"]
        said: list[Document] = []
        with subprocess.Popen(
            [*kubectl, *place, *self._command(program, *arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            try:
                assert process.stdout
                assert process.stdout.readline() == "begun\n"
                yield said
            finally:
                # Its standard input ends, and with that the program.
                output, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
        said.append(json.loads(output))

    @staticmethod
    def _command(program: str, *arguments: str) -> list[str]:
        text = (PROGRAMS / f"{program}.py").read_text(encoding="utf-8")
        return ["python3", "-c", text, InstalledGateway.SERVICE, TOOL, *arguments]


def settle(here: Platform) -> Agents:
    """Give a namespace what agents need: an account, its rights, a tool. And their pod."""
    here.kubectl("label", "namespace", here.namespace, *(f"{k}={v}" for k, v in RESTRICTED.items()))
    here.create({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": ACCOUNT}})
    account = f"--serviceaccount={here.namespace}:{ACCOUNT}"
    here.kubectl("create", "rolebinding", ACCOUNT, "--clusterrole=agentjobs-agent", account)
    here.kubectl("create", "rolebinding", "tools", "--role=tools", account)
    here.create(_use(), _tool(), _pod())
    here.kubectl("wait", "--for=condition=Ready", "agenttool", TOOL, "--timeout=30s")
    here.kubectl("wait", "--for=condition=Ready", "pod", POD, "--timeout=60s")
    return Agents(here)


def _use() -> Document:
    rule = {
        "apiGroups": ["agentjobs.dev"],
        "resources": ["agenttools"],
        "resourceNames": [TOOL],
        "verbs": ["use"],
    }
    meta = {"name": "tools"}
    return {"apiVersion": f"{RBAC}/v1", "kind": "Role", "metadata": meta, "rules": [rule]}


def _tool() -> Document:
    container = {
        "name": "tool",
        "image": BUSYBOX,
        "imagePullPolicy": "IfNotPresent",
        "command": ["sh", "-c", GREETS],
        "securityContext": LOCKED,
    }
    pod = {"terminationGracePeriodSeconds": 3, "containers": [container]}
    return {
        "apiVersion": "agentjobs.dev/v1alpha1",
        "kind": "AgentTool",
        "metadata": {"name": TOOL},
        "spec": {
            "description": "Says hello after some seconds.",
            "inputSchema": {
                "type": "object",
                "additionalProperties": False,
                "required": ["name", "seconds"],
                "properties": {
                    "name": {"type": "string"},
                    "seconds": {"type": "integer", "minimum": 0},
                },
            },
            "resultFrom": "terminationMessage",
            "template": {"spec": {"template": {"spec": pod}}},
        },
    }


def _pod() -> Document:
    """The product's image: it holds the client."""
    token = {"serviceAccountToken": {"path": "token", "audience": AUDIENCE}}
    container = {
        "name": "caller",
        "image": f"{IMAGE['repository']}:{IMAGE['tag']}",
        "imagePullPolicy": "IfNotPresent",
        "command": ["python3", "-c", "import signal; signal.pause()"],
        "securityContext": LOCKED,
        "volumeMounts": [{"name": "token", "mountPath": "/var/run/secrets/agentjobs"}],
    }
    spec = {
        "serviceAccountName": ACCOUNT,
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": 1,
        "containers": [container],
        "volumes": [{"name": "token", "projected": {"sources": [token]}}],
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": POD}, "spec": spec}
