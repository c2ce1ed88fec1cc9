"""Rings of dependencies (R-DEPENDS)."""

from hypothesis import given
from hypothesis import strategies as st

from agentjobs.domain.rings import find_rings

graphs = st.dictionaries(st.integers(0, 9), st.lists(st.integers(0, 9), max_size=3), max_size=10)


def reachable(graph: dict[int, list[int]], start: int) -> set[int]:
    found: set[int] = set()
    left = [*graph.get(start, ())]
    while left:
        job = left.pop()
        if job not in found:
            found.add(job)
            left += graph.get(job, ())
    return found


@given(graph=graphs)
def test_r_depends_every_ring_is_found_and_nothing_else_is_taken_for_one(
    graph: dict[int, list[int]],
) -> None:
    rings = list(find_rings(graph, lambda job: graph.get(job, ())))
    for ring in rings:
        assert len(set(ring)) == len(ring)
        for job, other in zip(ring, (*ring[1:], ring[0]), strict=True):
            assert other in graph[job]
    in_a_ring = any(job in reachable(graph, job) for job in graph)
    assert bool(rings) is in_a_ring


@given(graph=graphs)
def test_r_depends_to_break_the_rings_that_were_found_breaks_all_in_the_end(
    graph: dict[int, list[int]],
) -> None:
    for _ in range(len(graph) + 1):
        rings = list(find_rings(graph, lambda job: graph.get(job, ())))
        if not rings:
            return
        for ring in rings:
            graph.pop(max(ring), None)
    raise AssertionError("there are rings for ever")


def test_r_depends_many_ways_to_a_job_are_not_gone_one_by_one() -> None:
    """A hundred layers of two that all wait for both of the next: 2^100 ways."""
    asked = []

    def waits_for(job: int) -> list[int]:
        asked.append(job)
        layer = job // 2 + 1
        return [2 * layer, 2 * layer + 1] if layer < 100 else []

    assert list(find_rings([0, 1], waits_for)) == []
    assert len(asked) == 200
