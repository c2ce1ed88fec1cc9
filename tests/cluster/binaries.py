"""Builds the programs with `go build` and keeps them outside the work tree."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path

from .console import step
from .errors import ClusterError
from .paths import cache_directory, lock
from .programs import ALL, BUILD_FLAGS, ON_DEMAND, Program

BUILD_TIMEOUT = 3600.0
SPACE_TO_BUILD = 8 << 30
"""Go's build cache and the binaries of all programs together stay below this."""


def binary(name: str) -> Path:
    """Return the path of the binary `name`; its program is built first if that is needed."""
    for program in (*ALL, *ON_DEMAND):
        if name in program.packages:
            ensure([program])
            return directory_of(program) / name
    known = ", ".join(sorted(name for program in (*ALL, *ON_DEMAND) for name in program.packages))
    raise ClusterError(f"there is no program called {name!r}; known are {known}")


def directory_of(program: Program) -> Path:
    """Return where the built program is, or will be."""
    return cache_directory() / "bin" / program.digest


def ensure(programs: Iterable[Program]) -> None:
    """Build those of `programs` that are not in the cache yet, one after the other."""
    if all(directory_of(program).is_dir() for program in programs):
        return
    with lock("build"):
        missing = [program for program in programs if not directory_of(program).is_dir()]
        if missing:
            _check_go()
            _check_space()
            _remove_partial_builds()
        for program in missing:
            about = f"{program.minutes:g} min" if program.minutes >= 1 else "30 s"
            with step(f"building {program.name} {program.version} (about {about})"):
                _build(program)


def _check_go() -> None:
    if shutil.which("go") is None:
        raise ClusterError(
            "the cluster's programs are built from source, and there is no Go here: "
            f"install Go {required_go()} or newer and put it on the PATH"
        )


def required_go() -> str:
    """Return the newest version that one of the go.mod files asks for."""
    said = [
        line.split()[1]
        for program in ALL
        for line in (program.source / "go.mod").read_text(encoding="utf-8").splitlines()
        if line.startswith("go ")
    ]
    return max(said, key=lambda version: [int(part) for part in version.split(".")])


def _check_space() -> None:
    cache_directory().mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(cache_directory()).free
    if free < SPACE_TO_BUILD:
        raise ClusterError(
            f"{cache_directory()} has {free >> 30} GiB free, a build needs "
            f"{SPACE_TO_BUILD >> 30}: free some, or set AGENTJOBS_CACHE to another disk"
        )


def _remove_partial_builds() -> None:
    """Remove what an interrupted build left; Go's own cache keeps its progress."""
    for left in (cache_directory() / "bin").glob(".partial-*"):
        shutil.rmtree(left)


def _build(program: Program) -> None:
    target = directory_of(program)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=target.parent))
    log = cache_directory() / "logs" / f"build-{program.name}.log"
    _go_build(program, partial, log)
    for name, path in program.files.items():
        _copy(_module_directory(program) / path, partial / name)
    partial.chmod(0o755)
    partial.rename(target)
    log.unlink()


def _copy(source: Path, target: Path) -> None:
    """Copy a file or a folder. Go's module cache is read-only; a copy of the content is not."""
    if source.is_dir():
        target.mkdir()
        for each in source.iterdir():
            _copy(each, target / each.name)
    else:
        shutil.copyfile(source, target)


def _go_build(program: Program, output: Path, log: Path) -> None:
    packages = [f"{program.module}/{path}".rstrip("/") for path in program.packages.values()]
    # A lone package may be called `server` or `v3`: name the file. Several take a directory.
    out = f"{output}/" if len(packages) > 1 else str(output / next(iter(program.packages)))
    command = ["go", "build", *BUILD_FLAGS, "-ldflags", program.ldflags, "-o", out, *packages]
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as file:
        try:
            done = subprocess.run(
                command,
                cwd=program.source,
                env={**os.environ, "CGO_ENABLED": "0"},
                stdout=file,
                stderr=subprocess.STDOUT,
                timeout=BUILD_TIMEOUT,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise ClusterError(
                f"building {program.name} took longer than {BUILD_TIMEOUT / 60:.0f} min and was "
                f"stopped; the log is {log}; running it again goes on where it stopped"
            ) from error
    if done.returncode != 0:
        raise ClusterError(_failure(program, log))


def _failure(program: Program, log: Path) -> str:
    said = log.read_text(encoding="utf-8", errors="replace")
    if "go.mod requires go" in said or "invalid go version" in said:
        return (
            f"this Go is too old to build {program.name}: install Go {required_go()} or newer, "
            "or set GOTOOLCHAIN=auto so that Go fetches it"
        )
    if "no space left on device" in said:
        return f"the disk is full: building {program.name} stopped; free some space, run it again"
    tail = "\n".join(f"  {line}" for line in said.splitlines()[-5:])
    return f"building {program.name} {program.version} failed; the log is {log}, its end:\n{tail}"


def _module_directory(program: Program) -> Path:
    done = subprocess.run(
        ["go", "list", "-m", "-f", "{{.Dir}}", program.module],
        cwd=program.source,
        capture_output=True,
        text=True,
        check=True,
    )
    return Path(done.stdout.strip())
