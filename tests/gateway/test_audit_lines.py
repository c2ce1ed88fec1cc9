"""Lines of audit: who did what, never what was said."""

import json
import logging

import pytest

from agentjobs.gateway import audit
from agentjobs.gateway.reviews import Caller, Pod
from agentjobs.logs import JsonFormatter


def line(caplog: pytest.LogCaptureFixture) -> dict[str, object]:
    (record,) = caplog.records
    text = JsonFormatter().format(record)
    assert "\n" not in text
    value: dict[str, object] = json.loads(text)
    return value


def test_a_line_says_who_did_what_to_which_job(caplog: pytest.LogCaptureFixture) -> None:
    audit.record("ask", Pod("team-a", "crawl-1-x", "u"), "crawl.team-a", key="drop", digest="")
    written = line(caplog)
    assert (written["logger"], written["message"]) == ("agentjobs.audit", "ask")
    assert written["audit"] == {
        "action": "ask",
        "who": "pod team-a/crawl-1-x",
        "job_id": "crawl.team-a",
        "key": "drop",
    }


def test_a_line_is_written_whatever_the_level_of_the_log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger(), "level", logging.ERROR)
    audit.record("stop", Caller("eve\nforged"), "a.b")
    assert line(caplog)["audit"] == {"action": "stop", "who": "eve\nforged", "job_id": "a.b"}


def test_digests_are_of_the_value_and_not_of_its_spelling() -> None:
    assert audit.digest_of({"a": 1, "b": "\u00e9"}) == audit.digest_of({"b": "\u00e9", "a": 1})
    assert audit.digest_of({"ok": True}) != audit.digest_of({"ok": False})
