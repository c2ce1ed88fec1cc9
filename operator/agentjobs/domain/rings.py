"""Jobs that wait for each other and so for ever (R-DEPENDS)."""

from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import TypeVar

K = TypeVar("K", bound=Hashable)


def find_rings(
    starts: Iterable[K], waits_for: Callable[[K], Iterable[K]]
) -> Iterator[tuple[K, ...]]:
    """Rings that can be reached from some jobs: each waits for the next, the last for the first.

    One ring at least of all that share a job; the others show when that one is broken. Every job is
    looked at once, however many ways lead to it.
    """
    done: set[K] = set()
    for start in starts:
        if start in done:
            continue
        path: dict[K, Iterator[K]] = {start: iter(tuple(waits_for(start)))}
        while path:
            job, others = next(reversed(path.items()))
            other = next(others, None)
            if other is None:
                del path[job]
                done.add(job)
            elif other in path:
                names = list(path)
                yield tuple(names[names.index(other) :])
            elif other not in done:
                path[other] = iter(tuple(waits_for(other)))
