"""What kubectl shows of the causes: the table `docs/causes.md`, recorded from a real cluster."""

import os
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.e2e.causes import BY_JOB, CASES, NOT_YET
from tests.e2e.platform import Platform

RECORD = "AGENTJOBS_RECORD_CAUSES"
"""Names the file to write the table to."""
MOST_EVENTS = 3
EVENTS_WITHIN = 15
POLL = 0.2

Document = dict[str, Any]


def wait_for_case(here: Platform, name: str, seconds: float = 90) -> Document:
    """Wait until the job of a case is over, hold it to its case, and return its status.

    What kubectl shows of it is taken down for the table.
    """
    case = BY_JOB[name]
    status = here.wait_for(name, seconds=seconds)
    found = {"state": status["state"], **(status.get("cause") or {})}
    message = str(found.pop("message", ""))
    assert case.fits(found), f"{found}: {message}"
    assert re.search(case.pattern, message), message
    events = wait_for_events(here, name, message)
    assert len(events) <= MOST_EVENTS + 2 * (len(status.get("attempts", ())) > 1), events
    SEEN.take(here, name)
    return status


def wait_for_events(here: Platform, name: str, message: str) -> list[Document]:
    """Wait until the end of the job is told in an Event; return all Events about it."""
    until = time.monotonic() + EVENTS_WITHIN
    selector = f"involvedObject.kind=AgentJob,involvedObject.name={name}"
    while True:
        events = here.api.items("Event", here.namespace, fieldSelector=selector)
        if any(message in each["message"] for each in events):
            return events
        assert time.monotonic() < until, events
        time.sleep(POLL)


@dataclass
class Seen:
    """What kubectl showed of the cases, in a form that is the same after every run."""

    shown: dict[str, str] = field(default_factory=dict)

    def take(self, here: Platform, name: str) -> None:
        """Take down what `kubectl describe` shows of a job that is over."""
        if os.environ.get(RECORD):
            text = here.kubectl("describe", "agentjob", name)
            self.shown[name] = "<br>".join(excerpt(plain(text, name, here.namespace)))

    def write(self) -> None:
        """Write the table, should that be wanted; only ever all of it."""
        place = os.environ.get(RECORD)
        if not place:
            return
        missing = [case.job for case in CASES if case.job not in self.shown]
        assert not missing, f"the table wants all cases, and these were not seen: {missing}"
        Path(place).write_text(table(self.shown), encoding="utf-8")


SEEN = Seen()
"""What was seen in this run."""


def plain(text: str, name: str, namespace: str) -> str:
    """Without what is different in every run."""
    text = re.sub(rf"\b({name}-\d+(?:-\d+)?)-[a-z0-9]{{5}}\b", r"\1-xxxxx", text)
    text = re.sub(r"\bt-[0-9a-f]{8}\b", "team-a", text.replace(namespace, "team-a"))
    return re.sub(r"\b[0-9a-f]{32,64}\b", "…", text)


def excerpt(described: str) -> list[str]:
    """The lines of `kubectl describe` that say how a job ended."""
    body, _, events = described.partition("\nEvents:\n")
    state = re.search(r"^  State:\s+(\S+)", body, re.MULTILINE)
    cause = re.search(r"^  Cause:\n((?:    .*\n)+)", body, re.MULTILINE)
    assert state, body
    assert cause, body
    fields = [_field(line) for line in cause[1].splitlines()]
    lines = [f"State: {state[1]}", "Cause:", *(f"  {name}: {value}" for name, value in fields)]
    rows = [re.split(r"\s{2,}", line.strip(), maxsplit=4) for line in events.splitlines()]
    told = [f"  {row[0]} {row[1]}: {row[4]}" for row in rows if row[0] in {"Normal", "Warning"}]
    return [_code(line) for line in (*lines, "Events:", *told)]


def table(shown: Mapping[str, str]) -> str:
    """`docs/causes.md`."""
    rows = [f"| `{case.code}` | {case.how} | {shown[case.job]} |" for case in CASES]
    rows += [f"| `{code}` | {why} | nothing |" for code, why in NOT_YET.items()]
    return f"{HEAD}{_lines(rows)}{FOOT}"


HEAD = """\
# Why a job ended

<!-- Written by `make causes` from what the tests saw on a real cluster of two nodes. -->

Every way to end otherwise than `done` that can be provoked: the cause, what was done to provoke it,
and what `kubectl describe aj NAME` then shows. The tests that do so are `tests/e2e/test_causes.py`
and `tests/e2e/test_endings.py`.

| cause | provoked by | `kubectl describe` shows |
|---|---|---|
"""
FOOT = """
* `Ran`: the tool's container began. `false` is said only where that is certain.
* `Retryable`: the same job may end otherwise the next time; nothing about the tool was at fault.
* `Forced`: it was killed after its grace period, and a stop or a deadline of ours was the reason.
* `Evidence: lost`: nobody saw how the container ended.
* `oom_killed` is said only with the kernel's word *and* exit code 137; a bare 137 proves nothing.
* A full quota, a node that is missing, a registry that does not answer are waited for: the state
  is `queued`, and `status.waiting` says why. Only a deadline ends that, with the reason in its
  message.
* A tool that exits 0 on SIGTERM when the kubelet evicts it for a limit is `done`: the kubelet then
  calls the pod Succeeded and leaves nothing in it that tells of the eviction.
"""


def _lines(rows: Iterable[str]) -> str:
    return "".join(f"{row}\n" for row in rows)


def _field(line: str) -> tuple[str, str]:
    name, _, value = line.strip().partition(":")
    return name, value.strip()


def _code(line: str) -> str:
    indent = len(line) - len(line.lstrip())
    text = line.strip().replace("|", "\\|")
    fence = "``" if "`" in text else "`"
    return "&nbsp;" * indent + f"{fence}{text}{fence}"
