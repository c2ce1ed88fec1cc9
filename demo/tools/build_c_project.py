"""Builds a C project from its source package, with the compiler, and tries what came out.

Arguments: `project` (zstd or lua), `optimization` (-O0 to -O3), `parallel` (compilers at once),
`self_test` (whether the new program is tried).
"""

import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .contract import ArgumentError, ToolError, progress, run, say

SOURCES = Path(os.environ.get("DEMO_SOURCES", "/opt/demo/sources"))
OPTIMIZATIONS = ("-O0", "-O1", "-O2", "-O3")
MAX_PARALLEL = 8
COMPILE = re.compile(r"\s-c\s")
PROBLEM = re.compile(r"\berror: |\*\*\* ")
SOURCE_NAME = re.compile(r"(\S+\.[cS])(?=\s|$)")
TEST_TIMEOUT = 60.0
PRIMES_BELOW_A_MILLION = "78498"
SIEVE = """
local n, sieve, count = 1000000, {}, 0
for i = 2, n do
  if not sieve[i] then
    count = count + 1
    for j = i * i, n, i do sieve[j] = true end
  end
end
print(count)
"""


@dataclass(frozen=True)
class Project:
    """How one project is built and tried."""

    folder: str
    """Where its Makefile is."""
    target: str
    flags: str
    """make's variable for compiler options."""
    program: str
    version: tuple[str, ...]
    """Arguments that make the program print its version."""
    test: Callable[[Path], str]
    """Tries the program in its built tree; returns what was proven."""


def test_zstd(tree: Path) -> str:
    """Read the project's own test vectors, then pack and unpack all of its sources."""
    program = str(tree / "programs/zstd")
    vectors = sorted(map(str, tree.glob("tests/golden-decompression/*.zst")))
    output_of([program, "--test", "--quiet", *vectors])
    everything, again = tree / "everything", tree / "again"
    everything.write_bytes(b"".join(path.read_bytes() for path in source_files(tree)))
    output_of([program, "--quiet", "-9", str(everything), "-o", f"{everything}.zst"])
    output_of([program, "--quiet", "--decompress", f"{everything}.zst", "-o", str(again)])
    if everything.read_bytes() != again.read_bytes():
        raise ToolError("what zstd unpacked is not what it had packed")
    before, after = everything.stat().st_size, Path(f"{everything}.zst").stat().st_size
    return f"{len(vectors)} test vectors read; {before} bytes packed to {after} and back"


def test_lua(tree: Path) -> str:
    """Let the new interpreter count the primes below a million."""
    found = output_of([str(tree / "src/lua"), "-e", SIEVE])
    if found != PRIMES_BELOW_A_MILLION:
        raise ToolError(f"lua found {found} primes, not {PRIMES_BELOW_A_MILLION}")
    return f"{found} primes found below a million"


PROJECTS = {
    "zstd": Project(
        folder="programs",
        target="zstd-release",
        flags="CFLAGS",
        program="programs/zstd",
        version=("--version",),
        test=test_zstd,
    ),
    "lua": Project(
        folder="src",
        target="linux",
        flags="MYCFLAGS",
        program="src/lua",
        version=("-v",),
        test=test_lua,
    ),
}


def build_c_project(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Build and try the project that the arguments name; return the result."""
    name, flags, parallel = checked(arguments)
    project, began = PROJECTS[name], time.monotonic()
    with tempfile.TemporaryDirectory(prefix="build-") as directory:
        tree = Path(directory, name)
        shutil.copytree(SOURCES / name, tree)
        lines = sum(path.read_bytes().count(b"\n") for path in source_files(tree))
        command = ["make", "-C", str(tree / project.folder), "V=1"]
        command += [f"{project.flags}={flags}", project.target]
        compiled = compile_all(command, parallel)
        program = tree / project.program
        version = output_of([str(program), *project.version]).strip("* ")
        tried = "not tried"
        if arguments.get("self_test", True):
            progress(99, "trying the new program")
            tried = project.test(tree)
        size = program.stat().st_size
    seconds = round(time.monotonic() - began, 1)
    return {
        "summary": f"{name} built in {seconds} s: {compiled} files compiled, program of {size} "
        f"bytes; {tried}",
        "project": name,
        "version": version,
        "compiled_files": compiled,
        "source_lines": lines,
        "program_bytes": size,
        "optimization": flags,
        "self_test": tried,
        "seconds": seconds,
    }


def checked(arguments: Mapping[str, Any]) -> tuple[str, str, int]:
    """Return project, compiler options and number of compilers, or say what is wrong."""
    name = arguments.get("project", "zstd")
    if name not in PROJECTS:
        raise ArgumentError(f"project must be one of {', '.join(PROJECTS)}, not {name!r}")
    flags = arguments.get("optimization", "-O2")
    if flags not in OPTIMIZATIONS:
        raise ArgumentError(f"optimization must be one of {', '.join(OPTIMIZATIONS)}")
    parallel = arguments.get("parallel", 2)
    if not isinstance(parallel, int) or not 1 <= parallel <= MAX_PARALLEL:
        raise ArgumentError(f"parallel must be a whole number from 1 to {MAX_PARALLEL}")
    return str(name), str(flags), parallel


def compile_all(command: list[str], parallel: int) -> int:
    """Run make and count its compiler calls against those that it had planned."""
    planned = sum(map(bool, map(COMPILE.search, output_of([*command, "-n"]).splitlines())))
    say(f"{planned} files to compile")
    done = 0
    with subprocess.Popen(  # noqa: S603
        [*command, f"-j{parallel}"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as make:
        for line in make.stdout or ():
            if COMPILE.search(line):
                done += 1
                found = SOURCE_NAME.search(line)
                text = f"file {done} of {planned}: {Path(found[1]).name if found else '?'}"
                # make tells what it begins, so the last one is not done yet
                progress(98 * (done - 1) // max(planned, 1), text)
            elif PROBLEM.search(line):
                say(line.rstrip())
    if make.returncode:
        raise ToolError(f"make ended with exit code {make.returncode}; its errors are above")
    return done


def source_files(tree: Path) -> list[Path]:
    """Return all C files of the project."""
    return sorted(path for path in tree.rglob("*.[chS]") if path.is_file())


def output_of(command: list[str]) -> str:
    """Return what a command prints; it must succeed."""
    done = subprocess.run(  # noqa: S603
        command, capture_output=True, text=True, timeout=TEST_TIMEOUT, check=False
    )
    if done.returncode:
        problem = done.stderr.strip()[-300:]
        raise ToolError(f"{Path(command[0]).name} ended with {done.returncode}: {problem}")
    return done.stdout.strip()


if __name__ == "__main__":
    run(build_c_project, terminate=False)
