"""What holds of every history of AgentJobs, operators, cluster and receivers.

Rules that are checked after every write and at the end, each by its name in a failure's message:
R-LEVEL, R-CLAIM, R-ATTEMPT, R-SLOTS, R-DEAD, R-HONEST, R-CAUSE, R-STATE-FINAL, R-STOP, R-DEADLINE,
R-EVENT, R-CALLBACK, R-TWO-WRITES, R-REPORT and R-POLICY-INPUT (questions), R-STATE-DERIVED.
"""

import os
import random
import time

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.model.audit import CHANGED, EXCEEDED
from tests.model.machine import Histories
from tests.model.stage import total

SOAK = bool(os.environ.get("AGENTJOBS_SOAK"))
COUNT = int(os.environ.get("AGENTJOBS_HISTORIES") or (2000 if SOAK else 300))
FAULTS = (
    "conflicts",
    "crashes",
    "crashes before a write",
    "crashes during a write",
    "crashes after a write",
    "requests lost",
    "answers lost",
    "events lost",
    "events seen again",
    "leaderships lost",
    "former leaders that go on",
    "takeovers",
    "Jobs deleted by hand",
    "pods deleted by hand",
    "requests given up",
    "questions",
    "answers",
    "questions that expired",
    "questions withdrawn",
    "disruptions",
    "decisions of a queue",
    "jobs held back",
    "places given again too early",
    "attempts after the first",
    "jobs that began more than once",
    "jobs of limited tools that were claimed",
    "receiver: taken",
    "receiver: failed",
    "receiver: gone",
    "receiver: unreachable",
    "receiver: taken, then the process dies",
)

quick = settings(
    max_examples=COUNT,
    stateful_step_count=40,
    derandomize=not SOAK,
    database=None,
    deadline=None,
    print_blob=False,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.generate, *([Phase.shrink] if os.environ.get("AGENTJOBS_SHRINK") else [])],
)


@pytest.mark.timeout(3600 if SOAK else 300)
def test_r_level_every_history_ends_well(capsys: pytest.CaptureFixture[str]) -> None:
    total.clear()
    machine = Histories
    number = random.SystemRandom().randrange(2**32) if SOAK else 0
    began = time.perf_counter()
    if SOAK:
        machine = seed(number)(type("Histories", (Histories,), {}))
    run_state_machine_as_test(machine, settings=quick)
    report = ", ".join(f"{count} {what}" for what, count in sorted(total.items()))
    with capsys.disabled():
        print(f"\n{report}; {time.perf_counter() - began:.0f} s, seed {number}")  # noqa: T201
    assert total["histories"] >= COUNT
    assert total[EXCEEDED] == 0, "R-SLOTS: counted from the audit log"
    assert total[CHANGED] >= COUNT / 2, "R-SLOTS: leaders must change while slots are taken"
    assert [fault for fault in FAULTS if not total[fault]] == []
