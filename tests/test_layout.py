"""The shape of the repository."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "operator/agentjobs"

LOCK_FILES = {"uv.lock", "go.sum"}
"""Written by tools, in which hosts are part of the format."""

FORBIDDEN = {
    "a path of somebody's machine": re.compile(
        r"(?<![\w.])/(?:work|home|Users|root)/(?!\.\w|\{)[\w.-]+/"
    ),
    "the host of a package registry": re.compile(
        r"\b(?:[\w-]+\.)*(?:pypi|pythonhosted|npmjs|artifactory|jfrog|nexus|devpi)\.(?:org|com|io)\b"
        r"|\bproxy\.golang\.org\b"
    ),
}


def tracked_files() -> list[Path]:
    names = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    return [path for name in names.split("\0") if name and (path := ROOT / name).is_file()]


def offences(text: str) -> list[str]:
    return [
        f"{what}: {match.group()}"
        for what, pattern in FORBIDDEN.items()
        for match in pattern.finditer(text)
    ]


def test_the_source_root_is_no_package() -> None:
    # It would hide the standard library's module `operator`.
    assert not (ROOT / "operator/__init__.py").exists()


def test_tracked_files_name_no_machine_and_no_registry() -> None:
    found = {
        str(path.relative_to(ROOT)): bad
        for path in tracked_files()
        if path.name not in LOCK_FILES and path != Path(__file__)
        if (bad := offences(path.read_bytes().decode("utf-8", "replace")))
    }
    assert found == {}


def test_commit_messages_name_no_machine_and_no_registry() -> None:
    log = subprocess.run(
        ["git", "log", "--format=%B"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    assert offences(log) == []


@pytest.mark.parametrize(
    "text",
    ["see /home/somebody/notes.md", "cd /work/x/y", "--index-url https://pypi" + ".org/simple"],
)
def test_an_offence_is_found(text: str) -> None:
    assert offences(text)


def test_every_module_is_in_an_import_layer() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = settings["tool"]["importlinter"]["contracts"]
    (layers,) = [
        contract
        for contract in contracts
        if contract["type"] == "layers" and contract["containers"] == ["agentjobs"]
    ]
    known = {name.strip() for layer in layers["layers"] for name in re.split(r"[|:]", layer)}
    there = {
        path.stem if path.suffix else path.name
        for path in PACKAGE.iterdir()
        if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    assert layers["exhaustive"]
    assert there - {"__init__"} <= known


def test_imports_keep_their_direction() -> None:
    lint = subprocess.run(
        [Path(sys.executable).with_name("lint-imports"), "--no-cache"],
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
    )
    assert lint.returncode == 0, lint.stdout + lint.stderr
