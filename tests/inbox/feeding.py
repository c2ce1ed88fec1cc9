"""What an agent's loop is given of what a receiver got."""

from collections import Counter
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta

from agentjobs.inbox.acceptance import Rules
from agentjobs.inbox.deliveries import Refused, judge
from agentjobs.inbox.signatures import Verifier
from agentjobs.inbox.store import Store
from tests.receiver import Request

LEASE = timedelta(minutes=10)


def lines_of(requests: Iterable[Request], public_key: str, namespace: str) -> Counter[str]:
    """Feed an inbox, whose settings name the namespace; count the lines about each job.

    Each delivery is judged by the clock of its arrival, and the loop takes after every other one.
    """
    store, verifier = Store(None, Rules(namespaces=frozenset({namespace}))), Verifier([public_key])
    lines: list[str] = []
    now = datetime.now(UTC)
    for n, request in enumerate(requests):
        now = datetime.fromtimestamp(request.at, UTC)
        event = judge(request.headers, request.body, verifier, now)
        assert not isinstance(event, Refused), event
        store.accept(event, now)
        if n % 2:
            lines += _taken(store, now)
    while new := _taken(store, now):
        lines += new
    store.close()
    return Counter(line.split("job_id=")[1].split()[0] for line in lines)


def _taken(store: Store, now: datetime) -> list[str]:
    batch = store.take("loop", now, LEASE, 4000)
    if batch is None:
        return []
    store.acknowledge(batch.id)
    return batch.text.split("\n")
