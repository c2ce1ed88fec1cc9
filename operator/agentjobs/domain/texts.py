"""Texts that come from elsewhere, made fit for one line of ours."""

import unicodedata

ELLIPSIS = "…"
JOINERS = frozenset("\u200c\u200d")
"""Format characters that letters and emoji are made of; the others can reorder or hide text."""


def one_line(text: str) -> str:
    """Put a text on one line: control characters and line breaks become single blanks (R-EVENT).

    They are taken out so that no tool's words can forge another event or a user's turn.
    """
    if not text.isprintable():
        text = "".join(" " if _unsafe(c) else c for c in text)
    return " ".join(text.split())


def cut(text: str, characters: int) -> str:
    """Shorten a text to that many characters; a cut is visible."""
    return text if len(text) <= characters else text[: characters - 1] + ELLIPSIS


def cut_bytes(text: str, size: int) -> str:
    """Shorten a text to that many bytes of UTF-8, never in the middle of a character."""
    raw = text.encode("utf-8", "replace")
    if len(raw) <= size:
        return raw.decode()
    room = size - len(ELLIPSIS.encode())
    if room < 0:
        return raw[:size].decode("utf-8", "ignore")
    return raw[:room].decode("utf-8", "ignore") + ELLIPSIS


def _unsafe(character: str) -> bool:
    if character in JOINERS:
        return False
    return unicodedata.category(character) in {"Cc", "Cf", "Zl", "Zp", "Cs"}
