"""The count of slots in the audit log says when a limit is exceeded."""

import pytest

from agentjobs.api.names import API_VERSION
from agentjobs.kube import AGENTJOBS, AGENTTOOLS, JOBS, LEASES
from tests.model.apiserver import ApiServer, Json
from tests.model.audit import CHANGED, EXCEEDED, WAITS, slots_in
from tests.model.clock import Clock

NAMESPACE = "search"


def say(server: ApiServer, name: str, **status: object) -> None:
    server.patch(AGENTJOBS, NAMESPACE, name, {"status": status}, "status")


def claim(server: ApiServer, name: str, *, by: str) -> None:
    """Claim the first attempt and make its Job."""
    server.written_by = by
    say(server, name, attempts=[{"number": 1, "jobName": name}], state="queued")
    uid = server.get(AGENTJOBS, NAMESPACE, name)["metadata"]["uid"]
    owner = {"apiVersion": API_VERSION, "kind": "AgentJob", "name": name, "uid": uid}
    meta: Json = {"name": name, "ownerReferences": [owner]}
    server.create(JOBS, NAMESPACE, {"metadata": meta, "spec": {}})


@pytest.fixture
def server() -> ApiServer:
    """One has the only slot of a tool; another one wants it."""
    server = ApiServer(Clock())
    tool = {"metadata": {"name": "single"}, "spec": {"maxConcurrent": 1}}
    server.create(AGENTTOOLS, NAMESPACE, tool)
    for name in ("one", "two"):
        spec = {"toolRef": {"name": "single"}}
        server.create(AGENTJOBS, NAMESPACE, {"metadata": {"name": name}, "spec": spec})
    lease = {"metadata": {"name": "leader"}, "spec": {"holderIdentity": "first"}}
    server.create(LEASES, NAMESPACE, lease)
    claim(server, "one", by="first")
    return server


def test_r_slots_one_too_many_is_counted(server: ApiServer) -> None:
    claim(server, "two", by="first")
    assert slots_in(server.audit)[EXCEEDED] == 1


def test_r_slots_what_a_former_leader_has_sent_counts_too(server: ApiServer) -> None:
    server.patch(LEASES, NAMESPACE, "leader", {"spec": {"holderIdentity": "second"}})
    claim(server, "two", by="first")
    counts = slots_in(server.audit)
    assert (counts[EXCEEDED], counts[CHANGED]) == (1, 1)


@pytest.mark.parametrize("end", ["Complete", "Failed", "gone", "written"])
def test_r_slots_a_slot_is_free_when_its_job_has_ended(server: ApiServer, end: str) -> None:
    if end == "gone":
        server.delete(JOBS, NAMESPACE, "one")
    elif end == "written":
        say(server, "one", state="cancelled", finishedAt="2026-03-01T12:00:00Z")
    else:
        status = {"conditions": [{"type": end, "status": "True"}]}
        server.patch(JOBS, NAMESPACE, "one", {"status": status}, "status")
    claim(server, "two", by="first")
    assert slots_in(server.audit)[EXCEEDED] == 0


def test_r_slots_who_waits_is_counted_once(server: ApiServer) -> None:
    for message in ("place 1", "place 2"):
        say(server, "two", waiting={"code": "slot", "message": message})
    assert slots_in(server.audit)[WAITS] == 1
