"""The inbox under a growing load, in virtual time: decisions of a model with and without it.

Triggers (ends of jobs, and now and then a user) come at random, one to forty a minute; a decision
of the model takes six seconds, however much it is given. With the inbox the model takes all that
has come in meanwhile as one batch; without it each trigger is a decision of its own, in order.
What is taken goes through the real store and the real router.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from agentjobs.api.names import EventType, State
from agentjobs.inbox import Rules
from agentjobs.inbox.heard import Heard
from agentjobs.inbox.store import Store

RATES = (1, 2, 5, 10, 20, 30, 40)
"""Triggers a minute."""
DECISION_SECONDS = 6.0
MINUTES = 60
USERS = 0.2
"""Share of triggers that are words of a user."""
SEED = 8
BEGIN = datetime(2026, 1, 1, tzinfo=UTC)
TOKENS = 4000
LEASE = timedelta(minutes=10)


@dataclass(frozen=True)
class Side:
    """What one way of handing over makes of a load."""

    decisions: int
    batch_mean: float
    batch_largest: int
    seconds_per_trigger: float
    """Of the model's time."""
    latency_p50: float
    """Seconds from a trigger until the end of the decision about it."""
    latency_p99: float


@dataclass(frozen=True)
class Load:
    """One rate of triggers."""

    rate: int
    triggers: int
    alone: Side
    together: Side


@dataclass(frozen=True)
class Figures:
    """All loads."""

    loads: tuple[Load, ...]

    def to_json(self) -> dict[str, Any]:
        """The figures for files."""
        return asdict(self)


def measure() -> Figures:
    """Play an hour of each load."""
    return Figures(tuple(_load(rate) for rate in RATES))


def _load(rate: int) -> Load:
    chance = random.Random(f"{SEED} {rate}")  # noqa: S311 - a load, no secrets
    arrivals: list[float] = []
    at = chance.expovariate(rate / 60)
    while at < MINUTES * 60:
        arrivals.append(at)
        at += chance.expovariate(rate / 60)
    users = [chance.random() < USERS for _ in arrivals]
    together = _side(arrivals, _batches(arrivals, users))
    return Load(rate, len(arrivals), _side(arrivals, _one_by_one(arrivals)), together)


def _one_by_one(arrivals: Sequence[float]) -> list[tuple[float, int]]:
    """End of each decision, and how many triggers it was about."""
    ends: list[tuple[float, int]] = []
    free = 0.0
    for at in arrivals:
        free = max(free, at) + DECISION_SECONDS
        ends.append((free, 1))
    return ends


def _batches(arrivals: Sequence[float], users: Sequence[bool]) -> list[tuple[float, int]]:
    """The same with the inbox; it is asked whenever the model is free."""
    store = Store(None, Rules(namespaces=frozenset({"team-a"})))
    ends: list[tuple[float, int]] = []
    given, free = 0, 0.0
    for place, (at, by_user) in enumerate(zip(arrivals, users, strict=True)):
        while given < place and free <= at:
            free, count = _decide(store, free)
            ends.append((free, count))
            given += count
        free = max(free, at) if given == place else free
        _put(store, place, at, by_user=by_user)
    while given < len(arrivals):
        free, count = _decide(store, free)
        ends.append((free, count))
        given += count
    store.close()
    return ends


def _decide(store: Store, now: float) -> tuple[float, int]:
    """Take what is there, decide for six seconds, acknowledge; the end, and of how many."""
    batch = store.take("loop", BEGIN + timedelta(seconds=now), LEASE, TOKENS)
    if batch is None:
        raise RuntimeError(f"nothing waits at {now:.1f} s")
    store.acknowledge(batch.id)
    return now + DECISION_SECONDS, len(batch.text.splitlines())


def _put(store: Store, place: int, at: float, *, by_user: bool) -> None:
    now = BEGIN + timedelta(seconds=at)
    if by_user:
        store.say(f"message {place}", now)
        return
    event = Heard(
        id=f"evt_{place}",
        type=EventType.COMPLETED,
        job_id=f"job-{place}.team-a",
        tool="crawl-site",
        status=State.DONE,
        summary=f"{place} pages, 3 broken links",
        cause="",
        time=now,
    )
    store.accept(event, now)


def _side(arrivals: Sequence[float], ends: Sequence[tuple[float, int]]) -> Side:
    told = [end for end, count in ends for _ in range(count)]
    latencies = sorted(end - at for at, end in zip(arrivals, told, strict=True))
    counts = [count for _, count in ends]
    return Side(
        decisions=len(ends),
        batch_mean=sum(counts) / len(counts),
        batch_largest=max(counts),
        seconds_per_trigger=len(ends) * DECISION_SECONDS / len(arrivals),
        latency_p50=latencies[len(latencies) // 2],
        latency_p99=latencies[math.ceil(len(latencies) * 0.99) - 1],
    )


def table(figures: Figures) -> str:
    """The figures as Markdown."""
    columns = (
        "triggers a minute",
        "decisions without",
        "with",
        "batch, mean (largest)",
        "model's seconds for each trigger, without",
        "with",
        "latency p50 (p99) without",
        "with",
    )
    rows = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for load in figures.loads:
        alone, together = load.alone, load.together
        rows.append(
            f"| {load.rate} | {alone.decisions} | {together.decisions} "
            f"| {together.batch_mean:.1f} ({together.batch_largest}) "
            f"| {alone.seconds_per_trigger:.1f} | {together.seconds_per_trigger:.1f} "
            f"| {_seconds(alone.latency_p50)} ({_seconds(alone.latency_p99)}) "
            f"| {_seconds(together.latency_p50)} ({_seconds(together.latency_p99)}) |"
        )
    return "\n".join(rows)


def _seconds(value: float) -> str:
    return f"{value:.1f} s" if value < 60 else f"{value / 60:.0f} min"  # noqa: PLR2004


WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 760, 330, 60, 40, 50
PANEL = 300
WITHOUT, WITH = "#b5482a", "#2a6fb5"


def plot(figures: Figures) -> str:
    """Latency and batch size over the rate, as SVG."""
    loads = figures.loads
    latency = _panel(
        LEFT,
        "latency p50, seconds (logarithmic)",
        [1, 10, 100, 1000, 10_000],
        [
            (WITHOUT, "without", [load.alone.latency_p50 for load in loads]),
            (WITH, "with the inbox", [load.together.latency_p50 for load in loads]),
        ],
        logarithmic=True,
    )
    batch = _panel(
        LEFT + PANEL + 80,
        "triggers in a decision, mean",
        [0, 1, 2, 3, 4, 5],
        [
            (WITHOUT, "without", [1.0] * len(loads)),
            (WITH, "with the inbox", [load.together.batch_mean for load in loads]),
        ],
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" '
        f'viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">\n'
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>\n{latency}{batch}</svg>\n'
    )


def _panel(
    left: int,
    title: str,
    ticks: Sequence[float],
    lines: Sequence[tuple[str, str, Sequence[float]]],
    *,
    logarithmic: bool = False,
) -> str:
    base = HEIGHT - BOTTOM
    scale = math.log10 if logarithmic else float

    def x(rate: float) -> float:
        return left + PANEL * rate / RATES[-1]

    def y(value: float) -> float:
        low, high = scale(ticks[0]), scale(ticks[-1])
        return base - (base - TOP) * (scale(value) - low) / (high - low)

    out = [f'<text x="{left}" y="{TOP - 16}" font-weight="bold">{title}</text>']
    out += [
        f'<path d="M{left} {y(tick):.1f}h{PANEL}" stroke="#ddd"/>'
        f'<text x="{left - 6}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick}</text>'
        for tick in ticks
    ]
    out += [
        f'<text x="{x(rate):.1f}" y="{base + 16}" text-anchor="middle">{rate}</text>'
        for rate in RATES
        if rate != 2  # noqa: PLR2004 - no room beside 1
    ]
    out.append(
        f'<text x="{left + PANEL / 2}" y="{base + 36}" text-anchor="middle">'
        "triggers a minute</text>"
    )
    for place, (colour, name, values) in enumerate(lines):
        points = " ".join(
            f"{x(rate):.1f},{y(value):.1f}" for rate, value in zip(RATES, values, strict=True)
        )
        out.append(
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>'
            f'<text x="{left + 8}" y="{TOP + 14 + 16 * place}" fill="{colour}">{name}</text>'
        )
    return "\n".join(out) + "\n"


def write(figures: Figures, folder: Path) -> None:
    """Write table and plot into the documentation."""
    page = folder / "inbox.md"
    page.write_text(with_table(page.read_text(encoding="utf-8"), figures), encoding="utf-8")
    (folder / "inbox-load.svg").write_text(plot(figures), encoding="utf-8")


BEGIN_MARK, END_MARK = "<!-- table: make bench BENCH=inbox -->", "<!-- end of the table -->"


def with_table(text: str, figures: Figures) -> str:
    """A page with its table as it is now."""
    before, _, rest = text.partition(BEGIN_MARK)
    _, _, after = rest.partition(END_MARK)
    return f"{before}{BEGIN_MARK}\n{table(figures)}\n{END_MARK}{after}"
