"""What this client has seen of each job last, so that no replica shows it anything older."""

import re
from collections import OrderedDict
from dataclasses import dataclass

from agentjobs.contract.calls import JobStatus

VERSION = re.compile(r"[0-9]{1,19}")
REMEMBERED = 1024
"""Jobs; of others a replica may show what it knows."""


@dataclass(frozen=True, slots=True)
class Sight:
    """The newest version of a job that was seen."""

    etag: str
    status: JobStatus | None
    """None after a stop, whose answer names the version without showing it."""


class Seen:
    """The last jobs that were looked at."""

    def __init__(self, size: int = REMEMBERED) -> None:
        self._sights: OrderedDict[str, Sight] = OrderedDict()
        self._size = size

    def __len__(self) -> int:
        """How many."""
        return len(self._sights)

    def get(self, job_id: str) -> Sight | None:
        """What was seen of a job last."""
        return self._sights.get(job_id)

    def put(self, job_id: str, etag: str, status: JobStatus | None) -> None:
        """Remember a version, unless a newer one came in meanwhile on another connection."""
        known = self._sights.get(job_id)
        if known and _version(known.etag) > _version(etag):
            return
        self._sights[job_id] = Sight(etag, status)
        self._sights.move_to_end(job_id)
        while len(self._sights) > self._size:
            self._sights.popitem(last=False)

    def forget(self, job_id: str) -> None:
        """Forget a job."""
        self._sights.pop(job_id, None)


def _version(etag: str) -> int:
    """The resourceVersion in `"<resourceVersion>-<digest>"`; 0 where a proxy has rewritten it."""
    digits = etag.removeprefix("W/").strip('"').partition("-")[0]
    return int(digits) if VERSION.fullmatch(digits) else 0
