"""Cursors are carried by callers and changed by nobody (R-KEY: keys that seal can be changed)."""

import base64
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from agentjobs.domain.sealed import LONGEST, BrokenSealError, seal, unseal

bounded = settings(max_examples=40, derandomize=True, database=None, deadline=None)
"""The same examples on every run."""
KEYS = st.integers(0, 2**32 - 1).map(lambda number: number.to_bytes(32))
PURPOSES = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=40)
VALUES = st.one_of(
    st.integers(),
    st.lists(st.text(st.characters(codec="utf-8"), max_size=20), max_size=3),
)
ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
KEY, PURPOSE = b"k" * 32, "page search"
TOKEN = seal([KEY], PURPOSE, ["2026-03-01T12:00:00Z", "a1b2"])


def opens(keys: list[bytes], purpose: str, token: str) -> bool:
    try:
        unseal(keys, purpose, token)
    except BrokenSealError:
        return False
    return True


@bounded
@given(KEYS, PURPOSES, VALUES)
def test_what_was_sealed_is_opened_again(key: bytes, purpose: str, value: Any) -> None:
    token = seal([key], purpose, value)
    assert unseal([key], purpose, token) == value
    assert set(token) <= set(ALPHABET), "it stands in a URL as it is"


@bounded
@given(KEYS, KEYS, PURPOSES, VALUES)
def test_r_key_an_older_key_opens_what_it_has_sealed_and_seals_nothing_more(
    old: bytes, new: bytes, purpose: str, value: Any
) -> None:
    assume(old != new)
    assert unseal([new, old], purpose, seal([old], purpose, value)) == value
    assert not opens([old], purpose, seal([new, old], purpose, value))


@bounded
@given(KEYS, KEYS, PURPOSES, VALUES)
def test_another_key_opens_nothing(key: bytes, other: bytes, purpose: str, value: Any) -> None:
    assume(key != other)
    assert not opens([other], purpose, seal([key], purpose, value))
    assert not opens([], purpose, seal([key], purpose, value))


@bounded
@given(KEYS, PURPOSES, PURPOSES, VALUES)
def test_a_cursor_opens_nothing_else(key: bytes, purpose: str, other: str, value: Any) -> None:
    assume(purpose != other)
    assert not opens([key], other, seal([key], purpose, value))


@bounded
@given(VALUES, st.data())
def test_no_character_can_be_changed(value: Any, data: st.DataObject) -> None:
    token = seal([KEY], PURPOSE, value)
    place = data.draw(st.integers(0, len(token) - 1))
    letter = data.draw(st.sampled_from(ALPHABET).filter(lambda each: each != token[place]))
    assert not opens([KEY], PURPOSE, token[:place] + letter + token[place + 1 :])


@bounded
@given(VALUES, st.data())
def test_nothing_can_be_taken_out_put_in_or_moved(value: Any, data: st.DataObject) -> None:
    token = seal([KEY], PURPOSE, value)
    begin = data.draw(st.integers(0, len(token)))
    end = data.draw(st.integers(begin, len(token)))
    changed = token[:begin] + data.draw(st.text(max_size=6)) + token[end:]
    assume(changed != token)
    assert not opens([KEY], PURPOSE, changed)


@bounded
@given(st.text())
def test_what_strangers_make_up_opens_nothing(token: str) -> None:
    assert not opens([KEY], PURPOSE, token)


@bounded
@given(st.binary(max_size=80))
def test_what_strangers_encode_opens_nothing(raw: bytes) -> None:
    assert not opens([KEY], PURPOSE, base64.urlsafe_b64encode(raw).decode().rstrip("="))


LAST = ALPHABET[ALPHABET.index(TOKEN[-1]) ^ 1]
"""Differs from the last character in bits that stand for no byte."""


@pytest.mark.parametrize(
    "token",
    [
        pytest.param("", id="nothing"),
        pytest.param(TOKEN + "=", id="padding that we leave out"),
        pytest.param(TOKEN + "==", id="more of it"),
        pytest.param(TOKEN + "\n", id="a line break after it"),
        pytest.param(" " + TOKEN, id="a blank before it"),
        pytest.param(TOKEN[:8] + "\n" + TOKEN[8:], id="a line break inside"),
        pytest.param(TOKEN[:-1] + LAST, id="another spelling of the same bytes"),
        pytest.param(TOKEN.translate(str.maketrans("-_", "+/")) + "+", id="another alphabet"),
        pytest.param(TOKEN[:21], id="less than the seal"),
        pytest.param(TOKEN[:22], id="the seal alone"),
        pytest.param(TOKEN + "ä", id="a letter that base64 has not"),
        pytest.param(TOKEN + "\ud800", id="half a character"),
        pytest.param("A" * LONGEST, id="the longest"),
        pytest.param("A" * 1_000_000, id="much longer"),
    ],
)
def test_a_broken_cursor_is_refused(token: str) -> None:
    assert opens([KEY], PURPOSE, TOKEN)
    with pytest.raises(BrokenSealError):
        unseal([KEY], PURPOSE, token)
