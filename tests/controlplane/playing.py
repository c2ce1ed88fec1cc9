"""Fixtures that play scenarios: all that were chosen, at once, each in a thread."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.chart import Document
from tests.cluster import ControlPlane
from tests.controlplane.stage import (
    SHARED,
    TELLS_US,
    Place,
    Scenario,
    Stage,
    open_stage,
    play,
)


@pytest.fixture(scope="session")
def stage(
    control_plane: ControlPlane,
    chart: list[Document],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Stage]:
    yield from open_stage(control_plane, chart, tmp_path_factory.mktemp("operators"))


@pytest.fixture(scope="session")
def shared(stage: Stage) -> Callable[[], Place]:
    """The namespace of all scenarios that can live beside others, and its one operator."""
    lock = threading.Lock()
    places: list[Place] = []

    def get() -> Place:
        with lock:
            if not places:
                place = stage.place(SHARED)
                stage.operator(place, settings=TELLS_US)
                places.append(place)
        return places[0]

    return get


@pytest.fixture(scope="session")
def played(
    request: pytest.FixtureRequest, stage: Stage, shared: Callable[[], Place]
) -> Iterator[Callable[[Scenario], None]]:
    """Wait for a scenario and raise what it has raised."""
    chosen = {
        each: None
        for item in request.session.items
        if isinstance(item, pytest.Function) and hasattr(item, "callspec")
        if isinstance(each := item.callspec.params.get("scenario"), Scenario)
    }
    if any(not each.own for each in chosen):
        shared()
    with ThreadPoolExecutor(max(len(chosen), 1)) as pool:
        # The longest have operators of their own and wait for room.
        longest_first = sorted(chosen, key=lambda each: not each.own)
        futures = {each: pool.submit(play, each, stage, shared) for each in longest_first}
        yield lambda each: futures[each].result()
