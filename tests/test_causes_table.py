"""`docs/causes.md` tells of every cause, and says what the tests on the cluster hold jobs to."""

import re
from pathlib import Path
from typing import Any

import pytest

from agentjobs.api.names import CauseCode
from tests.e2e.causes import CASES, NOT_YET, Case

ROOT = Path(__file__).resolve().parents[1]
ROW = re.compile(r"^\| `(?P<code>\w+)` \| (?P<how>.+?) \| (?P<shows>.+) \|$", re.MULTILINE)
DOCUMENT = (ROOT / "docs/causes.md").read_text(encoding="utf-8")
ROWS = [found.groupdict() for found in ROW.finditer(DOCUMENT)]
WORDS: dict[str, Any] = {"true": True, "false": False}
CHANGING = re.compile(
    r"\b[0-9a-f]{8}-[0-9a-f]{4}-|\b\d{4}-\d\d-\d\d|\bt-[0-9a-f]{8}\b|/(?:tmp|root|work|home)/"
)


def facts(shows: str) -> dict[str, Any]:
    """What a row shows apart from sentences, in the words of `status`."""
    lines = dict(re.findall(r"`+([A-Z][A-Za-z ]+): +([^`]+)`+", shows))
    found = {name: WORDS.get(value, value) for name, value in lines.items()}
    wanted = ("State", "Code", "Ran", "Retryable", "Forced", "Evidence", "Exit Code", "Signal")
    told = {name: found[name] for name in wanted if name in found}
    numbers = {name: int(told[name]) for name in ("Exit Code", "Signal") if name in told}
    return {_camel(name): value for name, value in (told | numbers).items()}


def _camel(name: str) -> str:
    first, *rest = name.split()
    return first.lower() + "".join(rest)


def message(shows: str) -> str:
    (found,) = re.findall(r"`Message: (.*?)`+<br>", shows)
    return str(found)


def test_r_cause_every_cause_has_a_row() -> None:
    assert {row["code"] for row in ROWS} == {code.value for code in CauseCode}


def test_r_cause_the_rows_are_those_of_the_cases() -> None:
    cases = [(case.code.value, case.how) for case in CASES]
    rows = [(row["code"], row["how"]) for row in ROWS]
    assert rows == [*cases, *((code.value, why) for code, why in NOT_YET.items())], "make causes"


@pytest.mark.parametrize(
    ("case", "row"),
    [pytest.param(case, row, id=case.job) for case, row in zip(CASES, ROWS, strict=False)],
)
def test_r_cause_a_row_shows_what_the_case_demands(case: Case, row: dict[str, str]) -> None:
    assert case.fits(facts(row["shows"])), "make causes"
    assert re.search(case.pattern, message(row["shows"]).replace("\\|", "|"))
    assert "Events:" in row["shows"]


def test_r_cause_the_table_is_the_same_after_every_run() -> None:
    assert not CHANGING.search(DOCUMENT)


@pytest.mark.parametrize("code", list(CauseCode))
def test_r_cause_what_is_said_to_end_no_job_is_written_nowhere(code: CauseCode) -> None:
    package = ROOT / "operator/agentjobs"
    # The gateway tells causes, it gives none.
    sources = [each for each in package.rglob("*.py") if package / "gateway" not in each.parents]
    used = [file.name for file in sources if f"CauseCode.{code.name}" in file.read_text("utf-8")]
    assert bool(used) == (code not in NOT_YET)
