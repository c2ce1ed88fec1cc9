"""Events as lines in a model's context, which no tool's words can forge (R-EVENT).

    [event] job_completed job_id=a.team-a tool=crawl status=done summary: "3 pages" details: \
get_job_result(a.team-a)

What comes from a tool stands between straight double quotes and holds none itself; square brackets
are ours alone. So a line has one `[event]`, at its beginning, and one quoted text, however hard the
text tries.
"""

import re
import unicodedata
from collections.abc import Iterable
from functools import lru_cache
from typing import Final

from agentjobs.api.names import SUMMARY_CHARACTERS, State
from agentjobs.inbox.heard import Heard

MARK: Final = "[event]"
ELLIPSIS: Final = "…"
WORD: Final = re.compile(r"[^A-Za-z0-9_.-]")
LONGEST_WORD = 127
HIDDEN: Final = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
"""Categories of characters that break, reorder or hide text, or that nobody knows."""
JOINERS: Final = frozenset("\u200c\u200d")
"""Format characters that letters and emoji are made of."""
UNSEEN: Final = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u3164\ufe00-\ufe0e\uffa0\U000e0100-\U000e01ef]"
)
"""Letters and marks that show nothing: text can hide in them."""
TAKEN_OUT: Final = str.maketrans(
    {"[": "(", "]": ")", '"': "'", "<": "\u2039", ">": "\u203a", "|": "\u00a6"}
)
"""Ours, and those of which chat templates make their turns."""
QUOTES: Final = frozenset("\u201c\u201d\u201e\u201f\u2033\u3003\uff02")
"""What else looks like a straight double quote."""


def plain(text: str, characters: int = SUMMARY_CHARACTERS) -> str:
    """A foreign text as one line without power: nothing in it can look like ours.

    Control characters, line breaks of any kind and characters that reorder or hide text become
    blanks; brackets and quotes, and whatever Unicode counts as compatible with them, become others.
    """
    line = _on_one_line(text)
    return line if len(line) <= characters else line[: max(0, characters - 1)] + ELLIPSIS


def event_line(
    event: Heard, summary_characters: int = SUMMARY_CHARACTERS, *, folded: int = 0
) -> str:
    """One event as a line.

    :param summary_characters: what may be shown of the summary at most; 0: none of it.
    :param folded: earlier events of the same job that this line stands for, too.
    """
    words = [
        MARK,
        event.type.value,
        f"job_id={word(event.job_id)}",
        f"tool={word(event.tool) or '-'}",
        f"status={event.status.value}",
        *([f"cause={word(event.cause)}"] if event.cause else []),
        *([f"earlier_events={folded}"] if folded else []),
        f'summary: "{plain(event.summary, summary_characters)}"',
        f"details: {_details(event)}",
    ]
    return " ".join(words)


def lost_line(job_id: str) -> str:
    """A job of which nobody can say any more how it ended."""
    return (
        f"{MARK} job_lost job_id={word(job_id)} status=unknown details: the gateway does not know "
        "this job any more: it was deleted, or may not be seen any longer"
    )


def started_line(tool: str, job_id: str) -> str:
    """A start whose answer was lost has made a job."""
    return (
        f"{MARK} job_started job_id={word(job_id)} tool={word(tool) or '-'} "
        "details: the answer to this start had been lost"
    )


def not_started_line(tool: str, reason: str) -> str:
    """A start whose answer was lost has made no job, or nobody can say.

    :param reason: in the gateway's words, or ours.
    """
    return f'{MARK} job_not_started tool={word(tool) or "-"} reason: "{plain(reason)}"'


def follow_up_line(ends: Iterable[tuple[str, State | None]], note: str, outcome: str = "") -> str:
    """Jobs that were waited for are all over.

    :param ends: job ids and how they ended; None: nobody knows.
    :param note: what the agent wanted to be reminded of.
    :param outcome: what was done because of it, in words of ours.
    """
    jobs = ",".join(f"{word(job)}:{state.value if state else 'unknown'}" for job, state in ends)
    done = f" {outcome}" if outcome else ""
    return f'{MARK} jobs_over jobs={jobs} note: "{plain(note)}"{done}'


def word(text: str) -> str:
    """A foreign text as one word of a line: letters, digits, `_`, `.` and `-`."""
    return WORD.sub("_", text)[:LONGEST_WORD]


def _details(event: Heard) -> str:
    call = "get_job_result" if event.status is State.DONE else "get_job_status"
    return f"{call}({word(event.job_id)})"


@lru_cache(maxsize=2048)  # a batch tries many cuts of the same texts
def _on_one_line(text: str) -> str:
    seen = UNSEEN.sub(" ", text)
    return " ".join("".join(" " if _hidden(c) else _harmless(c) for c in seen).split())


def _hidden(character: str) -> bool:
    return character not in JOINERS and unicodedata.category(character) in HIDDEN


def _harmless(character: str) -> str:
    """The character, unless it is one of ours or looks like one."""
    if character.isascii():
        return character.translate(TAKEN_OUT)
    if character in QUOTES:
        return "'"
    shape = unicodedata.normalize("NFKC", character)
    mended = shape.translate(TAKEN_OUT)
    return character if mended == shape else mended
