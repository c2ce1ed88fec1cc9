"""What the inbox saves under load, and that the documentation says so."""

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from bench import inbox
from tests.inbox.played import PlayedGateway
from tests.until import until

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = (DOCS / "inbox.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def figures() -> Iterator[inbox.Figures]:
    return inbox.measure()


def test_at_forty_triggers_a_minute_the_model_keeps_up(figures: inbox.Figures) -> None:
    load = figures.loads[-1]
    assert load.rate == 40
    assert load.together.latency_p99 <= 2 * inbox.DECISION_SECONDS
    assert load.alone.latency_p50 > 3600
    assert load.together.batch_mean > 3.5
    assert load.together.seconds_per_trigger < inbox.DECISION_SECONDS / 3


def test_a_quiet_agent_pays_nothing(figures: inbox.Figures) -> None:
    load = figures.loads[0]
    assert load.together.latency_p50 == load.alone.latency_p50 == inbox.DECISION_SECONDS


def test_the_documentation_has_the_figures_of_this_code(figures: inbox.Figures) -> None:
    """`make bench BENCH="inbox --docs docs"` brings it up to date."""
    assert inbox.with_table(PAGE, figures) == PAGE
    assert (DOCS / "inbox-load.svg").read_text(encoding="utf-8") == inbox.plot(figures)


def test_the_plot_is_whole() -> None:
    root = ET.parse(DOCS / "inbox-load.svg").getroot()  # noqa: S314 - our own file
    lines = root.findall("{http://www.w3.org/2000/svg}polyline")
    assert len(lines) == 4
    for line in lines:
        points = [point.split(",") for point in line.attrib["points"].split()]
        assert len(points) == len(inbox.RATES)
        assert all(0 < float(x) < inbox.WIDTH for x, _ in points)
        assert all(inbox.TOP <= float(y) <= inbox.HEIGHT - inbox.BOTTOM for _, y in points)


async def test_the_example_in_the_documentation_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (code,) = re.findall(r"```python\n(import asyncio.*?)```", PAGE, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "token").write_text("t")
    said: list[tuple[str, str]] = []
    names: dict[str, Any] = {"print": lambda role, text: said.append((role, text))}
    exec(code, names)  # noqa: S102 - our own documentation
    async with PlayedGateway().serving() as gateway:
        running = asyncio.create_task(names["run"](gateway.url, tmp_path / "token"))
        await until(lambda: gateway.jobs and said)
        gateway.end(next(iter(gateway.jobs)))
        await until(lambda: len(said) > 1)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    assert said[0] == ("user", "And what is the weather like?")
    assert said[1][1].startswith("[event] job_completed job_id=job-")
