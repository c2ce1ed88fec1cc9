"""Output that outlives its pod, on a real kubelet (R-OUTPUT, R-TWO-WRITES, R-TTL)."""

import hashlib
import json
import os
import subprocess
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from typing import Any

import pytest

from agentjobs.domain.output import LOST
from tests import audit
from tests.cluster.local import LocalCluster
from tests.cluster.node import VOLUME_DIRECTORY
from tests.e2e.installed import NAMESPACE
from tests.e2e.outputs import PAGE_BYTES, Readers, Reading, archived, programs
from tests.e2e.platform import STAYS, Platform

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240, func_only=True)]

SOAK = bool(os.environ.get("AGENTJOBS_SOAK"))
OPERATOR = "system:serviceaccount:agentjobs-system:agentjobs-operator"
GATEWAY = "system:serviceaccount:agentjobs-system:agentjobs-gateway"
MEBIBYTE = 1 << 20
MORE_BYTES = 64 * MEBIBYTE
"""What a process of ours may take for output, however much there is of it."""
HURRIES_BYTES = (200 if SOAK else 20) * 10**6
READ_WITHIN = 480.0 if SOAK else 120.0
BUDGET = 7
"""Requests of the operator for one job, Events aside."""
POLL = 0.1
WITHIN = 60.0

CHATTY = """
trap 'for i in 1 2 3 4 5; do echo tidy $i; sleep 0.2; done; exit 0' TERM
i=0; while [ $i -lt 1000 ]; do i=$((i+1)); echo line $i; done
sleep 300 & wait
"""
CHATTY_GRACE = 20
TICKS = "i=0; while :; do i=$((i+1)); echo tick $i; sleep 0.2; done"
TELLS_TICKS = "i=0; while :; do i=$((i+1)); echo tick $i; echo $i >> $t; sleep 0.2; done"
LINE_BYTES = 64
HURRIES_LINE = "%09d a line like many others, with its number before it...\n"
HURRIES = f"""
awk 'BEGIN {{ for (i = 0; i < {HURRIES_BYTES // LINE_BYTES}; i++)
  printf "{HURRIES_LINE[:-1]}\\n", i }}' > /o
cat /o
printf '{{"sha256": "%s", "bytes": %d}}' $(sha256sum < /o | cut -c1-64) $(wc -c < /o) \\
  > /dev/termination-log
"""
GREEDY = "echo before; x=$(head -c 200000000 /dev/zero | tr '\\0' x); echo ${#x}"
ENDLESS = "head -c 8388608 /dev/zero | tr '\\000' a; printf '\\377\\376end\\n'"
WITHOUT_END = b"a" * 8388608 + b"\xff\xfeend\n"
PARTS = {"completions": 2, "parallelism": 2, "completionMode": "Indexed"}
OTHER_NODE = {"kubernetes.io/hostname": "node2"}


def steps(to: int, pause: float, word: str = "step") -> str:
    return f"i=0; while [ $i -lt {to} ]; do i=$((i+1)); echo {word} $i; sleep {pause}; done"


def counted(to: int, word: str = "step") -> bytes:
    return b"".join(f"{word} {n}\n".encode() for n in range(1, to + 1))


JOBS: dict[str, tuple[str, dict[str, Any]]] = {
    "ends": (steps(100, 0.1), {}),
    "prints-both": (f"{steps(40, 0.05)} & ({steps(40, 0.05, 'wrong')}) 1>&2; wait", {}),
    "overdue": (f"trap '' TERM; t=/dev/termination-log; {TELLS_TICKS}", {"deadlineSeconds": 15}),
    "greedy": (GREEDY, {"pod": {"container": {"resources": {"limits": {"memory": "32Mi"}}}}}),
    "taken-away": (TICKS, {}),
    "unattended": (steps(250, 0.1), {}),
    "hurries": (HURRIES, {}),
    "mute": ("sleep 1", {}),
    "hasty": ("echo ::summary made it", {}),
    "again": (
        'echo attempt "$AGENTJOBS_ATTEMPT"; [ "$AGENTJOBS_ATTEMPT" = 2 ]',
        {"retry": {"maxAttempts": 2, "causes": ["tool_error"]}},
    ),
    "parts": ('echo part "$JOB_COMPLETION_INDEX"', {}),
    "alone": ("echo on a node; sleep 600", {"pod": {"nodeSelector": OTHER_NODE}}),
}


@pytest.fixture(scope="module")
def readers(platform: Platform) -> Iterator[Readers]:
    readers = Readers(platform.in_namespace())
    readers.settle()
    yield readers
    readers.here.kubectl("delete", "agentjobs", "--all", "--wait=false")


def document(here: Platform, name: str) -> dict[str, Any]:
    script, more = JOBS[name]
    pod = {"nodeSelector": STAYS, **more.get("pod", {})}
    made = here.job(name, script, **{**more, "pod": pod})
    if name == "parts":
        made["spec"]["template"]["spec"] |= PARTS
    return made


@dataclass(frozen=True)
class Hurried:
    """What a tool printed at full speed, and what it took to keep it and to read it."""

    reading: Reading
    memory: dict[str, tuple[int, int]]
    """Of each of our processes: bytes before, and bytes more at most."""


@pytest.fixture(scope="module")
def hurried(readers: Readers) -> Hurried:
    """By itself and first: in a moment the operator is killed, and its peak goes with it."""
    here = readers.here
    found = programs(here)
    before = {name: each.memory for name, each in found.items()}
    for each in found.values():
        each.forget_peak()
    here.create(document(here, "hurries"))
    reading = readers.read("hurries", READ_WITHIN)
    readers.wait_until_archived("hurries")
    more = {name: (before[name], each.peak - before[name]) for name, each in found.items()}
    return Hurried(reading, more)


@pytest.fixture(scope="module")
def seen(readers: Readers, hurried: Hurried) -> dict[str, Reading]:
    """Each job, read as it comes from before its start to its end, whatever happens to it."""
    here = readers.here
    others = [name for name in JOBS if name != "hurries"]
    here.create(*(document(here, name) for name in others))
    hands = [threading.Thread(target=each, args=(readers,)) for each in (take_away, kill, lose)]
    for hand in hands:
        hand.start()
    try:
        return readers.read_all(others, WITHIN * 2) | {"hurries": hurried.reading}
    finally:
        for hand in hands:
            hand.join()
        here.cluster.start_kubelet("node2")


def take_away(readers: Readers) -> None:
    readers.until("taken-away", "tick 20\n")
    (pod,) = readers.here.pods_of("taken-away")
    name = pod["metadata"]["name"]
    readers.here.kubectl("delete", "pod", name, "--force", "--grace-period=0", "--wait=false")


def kill(readers: Readers) -> None:
    readers.until("unattended", "step 50\n")
    readers.here.operator.kill()


def lose(readers: Readers) -> None:
    readers.until("alone", "on a node\n")
    readers.here.cluster.kill_kubelet("node2")


@pytest.mark.parametrize("name", JOBS)
def test_r_output_what_was_read_as_it_came_is_what_is_kept(
    seen: dict[str, Reading], readers: Readers, name: str
) -> None:
    reading = seen[name]
    status = readers.wait_until_archived(name)
    assert (reading.ended, reading.largest <= PAGE_BYTES) == (True, True)
    again = readers.read(name)
    assert (again.data, again.gaps) == (reading.data, reading.gaps)
    assert readers.octets(name) == reading.data
    kept = status["output"]
    # Of several parts one was read; a digest is of one stream.
    assert kept["bytes"] == len(reading.data) * (2 if name == "parts" else 1)
    assert kept.get("sha256") == (None if name in {"again", "parts"} else reading.sha256)
    assert kept["gaps"] == len(reading.gaps)


WHOLE = {
    "ends": ("done", counted(100)),
    "greedy": ("failed", b"before\n"),
    "unattended": ("done", counted(250)),
    "mute": ("done", b""),
    "hasty": ("done", b"::summary made it\n"),
    "again": ("done", b"attempt 1\nattempt 2\n"),
    "parts": ("done", b"part 0\n"),
}


@pytest.mark.parametrize("name", WHOLE)
def test_r_output_all_that_was_printed_is_there(
    seen: dict[str, Reading], readers: Readers, name: str
) -> None:
    """After its end, out of memory, and through an operator that is killed in the middle."""
    # A shell that outlives what was killed for its memory says so, or is killed with it.
    data = seen[name].data.removesuffix(b"Killed\n") if name == "greedy" else seen[name].data
    assert (readers.here.status(name)["state"], data) == WHOLE[name]
    assert seen[name].gaps == []


def test_r_event_what_a_tool_says_just_before_its_end_is_told(
    seen: dict[str, Reading], readers: Readers
) -> None:
    del seen
    assert readers.here.status("hasty")["summary"] == "made it"


def test_r_output_both_streams_of_a_tool_are_kept(seen: dict[str, Reading]) -> None:
    lines = seen["prints-both"].data.splitlines(keepends=True)
    for word in ("step", "wrong"):
        assert b"".join(line for line in lines if line.startswith(word.encode())) == counted(
            40, word
        )
    assert (len(lines), seen["prints-both"].gaps) == (80, [])


def test_r_output_a_tool_ended_by_its_deadline_leaves_all_that_it_printed(
    seen: dict[str, Reading], readers: Readers
) -> None:
    lines = seen["overdue"].data.count(b"\n")
    assert seen["overdue"].data == counted(lines, "tick")
    (pod,) = readers.here.pods_of("overdue")
    (container,) = pod["status"]["containerStatuses"]
    # The tool notes each tick after it has printed it, and may be killed in between.
    noted = container["state"]["terminated"]["message"].split()
    assert noted == [str(n) for n in range(1, len(noted) + 1)]
    assert noted
    assert (lines - len(noted) in {0, 1}, seen["overdue"].gaps) == (True, [])
    assert readers.here.status("overdue")["state"] == "timed_out"


def test_r_output_a_pod_deleted_by_force_leaves_what_it_printed(seen: dict[str, Reading]) -> None:
    lines = seen["taken-away"].data.count(b"\n")
    assert seen["taken-away"].data == counted(lines, "tick")
    assert lines >= 20


def test_r_output_a_lost_node_leaves_a_gap(seen: dict[str, Reading], readers: Readers) -> None:
    data = b"on a node\n"
    assert (seen["alone"].data, seen["alone"].gaps) == (data, [(len(data), LOST)])
    assert readers.here.status("alone")["cause"]["evidence"] == "lost"


def test_r_output_a_tool_that_hurries_leaves_every_byte_or_a_gap(
    seen: dict[str, Reading], readers: Readers, show: Callable[[str], None]
) -> None:
    reading = seen["hurries"]
    told = json.loads(readers.here.status("hurries")["result"]["text"])
    status = readers.here.status("hurries")
    (archive,) = [each for each in status["conditions"] if each["type"] == "OutputArchived"]
    show(
        f"\n{told['bytes']} bytes at full speed: {len(reading.data)} kept, gaps {reading.gaps}; "
        f"finished at {status['finishedAt']}, archived at {archive['lastTransitionTime']}, "
        f"read in {len(reading.cursors)} pages and {reading.seconds:.0f} s"
    )
    jumps = jumps_of(reading.data)
    missing = sum(lines for _, lines in jumps)
    show(f"{missing * LINE_BYTES} bytes are missing at {[offset for offset, _ in jumps]}")
    assert {offset for offset, _ in jumps} <= {offset for offset, _ in reading.gaps}
    assert len(reading.data) + missing * LINE_BYTES == told["bytes"] == HURRIES_BYTES
    if not reading.gaps:
        assert (len(reading.data), reading.sha256) == (told["bytes"], told["sha256"])
    # One file of the kubelet's is larger than this.
    assert SOAK or not reading.gaps


def jumps_of(data: bytearray) -> list[tuple[int, int]]:
    """Where lines of "hurries" are missing, and how many; all others are whole and in order."""
    jumps, due = [], 0
    for at in range(0, len(data), LINE_BYTES):
        line = bytes(data[at : at + LINE_BYTES])
        number = int(line[:9])
        assert line == (HURRIES_LINE % number).encode(), (at, line)
        assert number >= due, (at, line, due)
        if number > due:
            jumps.append((at, number - due))
        due = number + 1
    left = HURRIES_BYTES // LINE_BYTES - due
    assert left >= 0
    return [*jumps, (len(data), left)] if left else jumps


def test_r_output_a_tool_that_hurries_is_kept_and_read_in_bounded_memory(
    hurried: Hurried, show: Callable[[str], None]
) -> None:
    assert len(hurried.memory) > 1
    for name, (before, more) in hurried.memory.items():
        show(f"\n{name}: {before / MEBIBYTE:.0f} MiB, at most {more / MEBIBYTE:.1f} more")
        assert more < MORE_BYTES


def test_r_output_each_attempt_and_each_part_can_be_asked_for(
    seen: dict[str, Reading], readers: Readers
) -> None:
    del seen
    for attempt in (1, 2):
        data = readers.read("again", attempt=attempt).data
        assert data == f"attempt {attempt}\n".encode()
    assert readers.read("parts", index=1).data == b"part 1\n"


def test_r_output_one_stream_for_a_container_and_none_of_the_gateways(
    seen: dict[str, Reading], readers: Readers
) -> None:
    del seen
    here = readers.here
    spans = defaultdict(list)
    for each in audit.read(here.cluster.audit_log):
        if each.resource == "pods/log" and each.namespace == here.namespace:
            assert each.user == OPERATOR
            spans[each.name].append((each.at, each.answered))
    assert len(spans) >= len(JOBS)
    for pod, found in spans.items():
        found.sort()
        for (_, ended), (began, _) in pairwise(found):
            assert ended <= began, (pod, found)


def test_r_output_a_job_with_output_and_callback_keeps_the_budget_of_requests(
    readers: Readers, show: Callable[[str], None]
) -> None:
    here = readers.here
    log = audit.Tail(here.cluster.audit_log)
    here.create(here.job("frugal", steps(20, 0.1)))
    readers.wait_until_archived("frugal")
    here.receiver.wait_for(f"frugal.{here.namespace}")
    made = [
        each
        for each in log.new(here.namespace)
        if (each.user, each.namespace) == (OPERATOR, here.namespace)
        and each.resource != "events"
        and "frugal" in {each.name.partition("-")[0], job_of(each).partition("-")[0]}
    ]
    counts = audit.count(made)
    show(f"\nrequests of the operator for a job:\n{audit.table(counts, 1)}")
    assert counts["get", "pods/log"] == 1
    assert sum(counts.values()) <= BUDGET


def job_of(request: audit.Request) -> str:
    """The Job that a request makes: it has no name in its path."""
    made = request.resource == "jobs" and request.verb == "create"
    return str((request.sent.get("metadata") or {}).get("name", "")) if made else ""


# The shared cases


def test_output_outlives_a_cancelled_pod(readers: Readers) -> None:
    """R-OUTPUT, R-TWO-WRITES, R-TTL, R-HONEST: case output-outlives-a-cancelled-pod."""
    here = readers.here
    pod_spec = {"terminationGracePeriodSeconds": CHATTY_GRACE}
    here.create(here.job("chatty", CHATTY, pod=pod_spec, deadlineSeconds=600))
    here.wait_for("chatty", ["running"])
    began = time.monotonic()
    readers.until("chatty", "line 1000\n")
    assert time.monotonic() - began < 10
    stopped = readers.agent.send(readers.urls[0], "DELETE", readers.path("chatty", "").rstrip("/"))
    assert stopped.code == 202
    stages = []
    while not archived(here.status("chatty")):
        stages.append(len(here.pods_of("chatty")))
        assert len(stages) < 600
        time.sleep(POLL)
    assert set(stages) <= {1}, "the pod stays until its output is archived"
    status = here.wait_for("chatty", ["cancelled"])
    cause = status["cause"]
    assert (cause["code"], cause["forced"], cause["exitCode"]) == ("stopped", False, 0)
    (asked,) = [each for each in status["conditions"] if each["type"] == "StopRequested"]
    took = moment(status["finishedAt"]) - moment(asked["lastTransitionTime"])
    assert took.total_seconds() < CHATTY_GRACE / 2, "it ends with its tool"
    (pod,) = here.pods_of("chatty")
    here.kubectl("delete", "pod", pod["metadata"]["name"])

    reading = readers.read("chatty")
    assert reading.data == counted(1000, "line") + counted(5, "tidy")
    assert (reading.gaps, status["output"]["gaps"]) == ([], 0)
    assert reading.largest <= PAGE_BYTES
    assert status["output"] == {"bytes": len(reading.data), "sha256": reading.sha256, "gaps": 0}
    small = readers.page(readers.urls[0], "chatty", limit=1000)[0]["next"]
    second = readers.page(readers.urls[0], "chatty", small, limit=1000)
    assert readers.page(readers.urls[-1], "chatty", small, limit=1000) == second

    refused = readers.agent.get(readers.urls[0], readers.path("chatty", "result"))
    assert (refused.code, refused.body["job_status"]) == (409, "cancelled")
    assert "/output" in refused.body["detail"]
    assert here.get("job", "chatty-1")
    events = here.receiver.of(f"chatty.{here.namespace}")
    assert {each.event["type"] for each in events} == {"job_cancelled"}
    assert len({each.id for each in events}) == 1


def moment(text: str) -> datetime:
    return datetime.fromisoformat(text)


def test_endless_line(readers: Readers, show: Callable[[str], None]) -> None:
    """R-OUTPUT: case endless-line."""
    here = readers.here
    before = {name: each.memory for name, each in programs(here).items()}
    for each in programs(here).values():
        each.forget_peak()
    names = [f"oneline-{n}" for n in range(8)]
    here.create(*(here.job(name, ENDLESS, deadlineSeconds=600) for name in names))
    found = here.wait_for_all(names, seconds=90)
    assert {each["status"]["state"] for each in found.values()} == {"done"}
    digest = hashlib.sha256(WITHOUT_END).hexdigest()
    for name in names:
        kept = readers.wait_until_archived(name)["output"]
        assert kept == {"bytes": len(WITHOUT_END), "sha256": digest, "gaps": 0}
        reading = readers.read(name)
        assert reading.data == WITHOUT_END
        assert reading.encodings.count("base64") == 1
        assert reading.encodings[-1] == "base64"
        assert reading.largest <= PAGE_BYTES
    assert readers.octets(names[0]) == WITHOUT_END
    for name, each in programs(here).items():
        more = each.peak - before[name]
        show(f"\n{name}: {before[name] / MEBIBYTE:.0f} MiB, at most {more / MEBIBYTE:.1f} more")
        assert more < MORE_BYTES


# How long it is kept


def stored(here: Platform, uid: str) -> list[str]:
    """What lies on the volume of an AgentJob's output."""
    if not isinstance(here.cluster, LocalCluster):
        pytest.skip("only where the volume can be looked into")
    claim = here.cluster.kubectl(
        *("--namespace", NAMESPACE, "get", "pvc", "agentjobs-output"),
        *("-o", "jsonpath={.spec.volumeName}"),
    )
    node, _, number = claim.partition("-")
    place = f"{VOLUME_DIRECTORY}/{number}/output/{uid}"
    (home,) = [each for each in here.cluster.nodes if each.name == node]
    command = [str(part) for part in home.inside("find", place, "-type", "f")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.split()


@pytest.mark.parametrize("way", ["kubectl delete", "time to live"])
def test_r_ttl_output_goes_with_its_agentjob(readers: Readers, way: str) -> None:
    """And another of the same name never sees it."""
    here, name = readers.here, way.replace(" ", "-")
    more = {} if way == "kubectl delete" else {"ttlSecondsAfterFinished": 8}
    here.create(here.job(name, "echo of the first", **more))
    readers.wait_until_archived(name)
    uid = here.get("agentjob", name)["metadata"]["uid"]
    assert readers.read(name).data == b"of the first\n"
    assert stored(here, uid)
    if not more:
        here.kubectl("delete", "agentjob", name, "--timeout=60s")
    end = time.monotonic() + WITHIN
    while here.get("agentjob", name):
        assert time.monotonic() < end, "the AgentJob is still there"
        time.sleep(POLL)
    assert not stored(here, uid)
    here.create(here.job(name, "echo of the second"))
    assert readers.read(name).data == b"of the second\n"
