"""Nothing is lost and nothing happens twice, whenever the operator or the API server dies."""

import os
import random
from collections.abc import Callable, Iterator

import pytest

from tests import audit
from tests.cluster.local import LocalCluster
from tests.e2e.crashes import USER, Killer, Run, Size, Tally, tally
from tests.e2e.platform import LINGER_SECONDS, Platform
from tests.e2e.proof import Proof
from tests.operator_process import OperatorProcess

SOAK = bool(os.environ.get("AGENTJOBS_SOAK"))
SMALL = Size(jobs=24, kills=6, restarts=1, in_flight=24, seconds=60)
LARGE = Size(jobs=320, kills=110, restarts=6, in_flight=24, seconds=1200)
SIZE = LARGE if SOAK else SMALL

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180, func_only=True)]


@pytest.fixture(scope="module")
def counts(
    platform: Platform, tmp_path_factory: pytest.TempPathFactory, show: Callable[[str], None]
) -> Iterator[Tally]:
    """The counts of one run, in which the operator of this work tree acts, with the chart's rights.

    It runs beside the cluster, as the user of the chart's service account, so that it can be killed
    more often than the kubelet would start it again.
    """
    cluster = platform.cluster
    if not isinstance(cluster, LocalCluster):
        pytest.skip("only with CLUSTER=local the API server can be restarted")
    seed = int(os.environ.get("AGENTJOBS_SEED") or random.SystemRandom().randrange(10**6))
    show(f"\ncrashes with AGENTJOBS_SEED={seed}")
    here = platform.in_namespace()
    log = audit.Tail(cluster.audit_log)
    process = OperatorProcess(
        "crashing", cluster.kubeconfig_for(USER), tmp_path_factory.mktemp("crashes"), settings(here)
    )
    usual = here.receiver.answer
    with here.operator.replaced(), process:
        killer = Killer(here, process, random.Random(seed))  # noqa: S311 - dice
        run = Run(here, killer, Proof(cluster, here.namespace), SIZE)
        here.receiver.answer = killer.answer
        try:
            run.play()
        finally:
            here.receiver.answer = usual
            run.watched.close()
        counts = tally(run, list(log.new()))
    show(counts.table())
    yield counts
    here.kubectl("delete", "agentjobs", "--all", "--wait=false")


def settings(here: Platform) -> dict[str, str | int]:
    """As installed, but for nodes: those of this cluster are called silent after seconds, and are
    now and then while the API server is away. None is lost here.
    """
    allow = f'[{{"cidrs": ["{here.cluster.host_address}/32"]}}]'
    return {"CALLBACKS_ALLOW": allow, "LINGER_SECONDS": LINGER_SECONDS}


def test_no_job_is_lost_and_each_ends_as_it_should(counts: Tally) -> None:
    """R-LEVEL, R-HONEST, R-DEAD."""
    assert (counts.jobs, counts.lost, counts.wrong) == (SIZE.jobs, [], [])
    assert sum(counts.ends.values()) == counts.jobs


def test_nothing_is_made_or_run_twice(counts: Tally) -> None:
    """R-CLAIM: by the audit log for Jobs and pods, by the tools' own word for runs."""
    assert counts.twice == []


def test_no_end_changes_once_it_is_written(counts: Tally) -> None:
    """R-STATE-FINAL, from every status write that the API server took."""
    assert counts.changed == []


def test_every_event_arrives_under_one_id(counts: Tally) -> None:
    """R-CALLBACK, R-TWO-WRITES: at least once each; the same bytes on every try."""
    assert (counts.missing, counts.several_ids, counts.forged) == ([], [], [])
    assert counts.received == counts.owed == counts.jobs


def test_an_agent_is_told_of_each_end_once(counts: Tally) -> None:
    """R-INBOX-OWN: its inbox is given whatever the receiver got."""
    assert counts.not_told_once == {}


def test_the_operator_and_the_api_server_did_die(counts: Tally) -> None:
    assert (sum(counts.kills.values()), counts.restarts) == (SIZE.kills, SIZE.restarts)
