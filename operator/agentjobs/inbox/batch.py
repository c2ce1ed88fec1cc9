"""What an agent is given at once: all that has come in, in its order, within a budget of tokens.

Pure: the same items make the same batch, so a batch that is given again is the same to the letter.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from agentjobs.api.names import SUMMARY_CHARACTERS, EventType
from agentjobs.inbox.heard import Heard
from agentjobs.inbox.lines import event_line

BYTES_OF_TOKEN: Final = 3
"""Of UTF-8; English has four to five, JSON and other scripts fewer. Too many tokens are guessed
rather than too few."""
Estimate = Callable[[str], int]


class Role(StrEnum):
    """Who speaks."""

    USER = "user"
    EVENT = "event"


@dataclass(frozen=True, slots=True)
class Item:
    """One thing that came in: an event, or words."""

    role: Role
    event: Heard | None = None
    text: str = ""
    """A user's words as they are, or a line of ours."""


@dataclass(frozen=True, slots=True)
class Part:
    """What one side says: a user's words, or events, each on a line of its own."""

    role: Role
    text: str


@dataclass(frozen=True, slots=True)
class Composed:
    """A batch, and how many items it is made of."""

    parts: tuple[Part, ...]
    items: int
    tokens: int
    """As they were estimated."""


def estimate_tokens(text: str) -> int:
    """Tokens of a text, guessed without knowing the model."""
    return -(-len(text.encode("utf-8", "replace")) // BYTES_OF_TOKEN)


def compose(items: Sequence[Item], budget: int, estimate: Estimate = estimate_tokens) -> Composed:
    """Make a batch of the first items: as many as fit, at least one, none left out in between.

    Summaries are cut, the longest first, before an item is left for the next batch. A user's words
    are never cut.
    """
    taken = _fitting(items, budget, estimate)
    chosen = items[:taken]
    characters = _largest_summary(chosen, budget, estimate)
    entries = _entries(chosen, characters)
    tokens = sum(estimate(text) for _, text in entries)
    return Composed(_joined(entries), taken, tokens)


def _fitting(items: Sequence[Item], budget: int, estimate: Estimate) -> int:
    """How many of the first items fit when no summary is shown.

    Folding makes a batch no larger: a line stands for itself and what came before it.
    """
    used = 0
    for count, item in enumerate(items):
        used += estimate(_text(item, 0, 0))
        if used > budget and count:
            return count
    return len(items)


def _largest_summary(items: Sequence[Item], budget: int, estimate: Estimate) -> int:
    """The most characters that each summary may have: so the longest are cut first."""
    low, high = 0, SUMMARY_CHARACTERS
    while low < high:
        middle = (low + high + 1) // 2
        tokens = sum(estimate(text) for _, text in _entries(items, middle))
        low, high = (middle, high) if tokens <= budget else (low, middle - 1)
    return low


def _entries(items: Sequence[Item], characters: int) -> list[tuple[Role, str]]:
    """The lines and words of a batch: what a later event of the same job says better is folded."""
    folded = _folded(items)
    into = _counts(items, folded)
    return [
        (item.role, _text(item, characters, into.get(place, 0)))
        for place, item in enumerate(items)
        if place not in folded
    ]


def _folded(items: Sequence[Item]) -> frozenset[int]:
    """Places of events that a later one makes idle: of a job that is over then; old progress."""
    folded: set[int] = set()
    ends: set[str] = set()
    progress: set[str] = set()
    for place in range(len(items) - 1, -1, -1):
        event = items[place].event
        if event is None:
            continue
        reports = event.type is EventType.PROGRESS
        if event.over:
            ends.add(event.job_id)
        elif event.job_id in ends or (reports and event.job_id in progress):
            # A question stays beside progress: only an end closes it.
            folded.add(place)
        elif reports:
            progress.add(event.job_id)
    return frozenset(folded)


def _counts(items: Sequence[Item], folded: frozenset[int]) -> dict[int, int]:
    """How many events each line stands for beside its own: those before it that were folded."""
    waiting: dict[str, int] = {}
    counts: dict[int, int] = {}
    for place, item in enumerate(items):
        if item.event is None:
            continue
        job_id = item.event.job_id
        if place in folded:
            waiting[job_id] = waiting.get(job_id, 0) + 1
        else:
            counts[place] = waiting.pop(job_id, 0)
    return counts


def _text(item: Item, characters: int, folded: int) -> str:
    if item.event is None:
        return item.text
    return event_line(item.event, characters, folded=folded)


def _joined(entries: Sequence[tuple[Role, str]]) -> tuple[Part, ...]:
    """Events that follow each other make one part; each message of a user is one of its own."""
    parts: list[Part] = []
    for role, text in entries:
        if role is Role.EVENT and parts and parts[-1].role is Role.EVENT:
            parts[-1] = Part(role, f"{parts[-1].text}\n{text}")
        else:
            parts.append(Part(role, text))
    return tuple(parts)
