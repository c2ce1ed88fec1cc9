"""How a tool of the demo takes its arguments and hands in its result."""

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from demo.tools import contract
from demo.tools.build_c_project import checked
from demo.tools.contract import ArgumentError, ToolError


@pytest.fixture(autouse=True)
def message_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    message, arguments = tmp_path / "termination-log", tmp_path / "arguments.json"
    message.touch()
    arguments.write_text('{"size": 3}', encoding="utf-8")
    monkeypatch.setattr(contract, "TERMINATION_MESSAGE", message)
    monkeypatch.setenv("AGENTJOBS_ARGUMENTS_FILE", str(arguments))
    before = signal.getsignal(signal.SIGTERM)
    yield message
    signal.signal(signal.SIGTERM, before)


def run(error: ToolError | None, *, terminate: bool = True) -> int | str | None:
    def tool(arguments: object) -> dict[str, object]:
        if error:
            raise error
        return {"summary": "fine", "arguments": arguments}

    with pytest.raises(SystemExit) as ended:
        contract.run(tool, terminate=terminate)
    return ended.value.code


def test_the_result_is_the_last_line_and_the_termination_message(
    message_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(None) == 0
    *_, summary, last = capsys.readouterr().out.splitlines()
    assert summary == "::summary fine"
    assert json.loads(last) == {"summary": "fine", "arguments": {"size": 3}}
    assert message_file.read_text(encoding="utf-8") == last


def test_a_tool_that_uses_its_last_line_writes_no_termination_message(message_file: Path) -> None:
    assert run(None, terminate=False) == 0
    assert message_file.read_bytes() == b""


def test_an_error_is_told_in_the_log_and_in_the_termination_message(
    message_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(ToolError("no disk")) == 1
    assert capsys.readouterr().err == "error: no disk\n"
    assert message_file.read_text(encoding="utf-8") == "no disk"


def test_bad_arguments_have_an_exit_code_of_their_own() -> None:
    assert run(ArgumentError("no start")) == 2


@pytest.mark.parametrize("content", ["", "[1]", "{"])
def test_arguments_that_are_no_json_object_are_refused(
    content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "other.json"
    path.write_text(content, encoding="utf-8")
    monkeypatch.setenv("AGENTJOBS_ARGUMENTS_FILE", str(path))
    assert run(None) == 2


def test_progress_is_one_readable_line(capsys: pytest.CaptureFixture[str]) -> None:
    contract.progress(40, "file 4 of 10")
    assert capsys.readouterr().out == "::progress 40 file 4 of 10\n"


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        pytest.param({"project": "bash"}, "project must be one of zstd, lua", id="project"),
        pytest.param({"optimization": "-O2 -v"}, "optimization must be", id="more than a level"),
        pytest.param({"parallel": 0}, "parallel must be", id="no compiler"),
    ],
)
def test_a_build_refuses_what_it_cannot_do(arguments: dict[str, object], complaint: str) -> None:
    with pytest.raises(ArgumentError, match=complaint):
        checked(arguments)


def test_a_build_has_defaults() -> None:
    assert checked({}) == ("zstd", "-O2", 2)
