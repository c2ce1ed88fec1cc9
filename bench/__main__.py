"""`python -m bench [burst] [--jobs N] [--limits default|raised]`: prints a table and a ratio."""

import argparse
import json
import platform
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.burst import Figures, measure
from tests.audit import table
from tests.cluster import FAST_LIMITS


def main(argv: list[str] | None = None) -> int:
    """Run a benchmark; the last line is the ratio to bare Jobs."""
    parser = argparse.ArgumentParser(prog="bench", description=__doc__)
    parser.add_argument("name", nargs="?", choices=["burst"], default="burst")
    parser.add_argument("--jobs", type=int, default=200, help="jobs of each kind")
    parser.add_argument("--limits", choices=["default", "raised"], default="raised")
    parser.add_argument("--output", type=Path, help="where to write the figures as JSON")
    chosen = parser.parse_args(argv)
    limits = FAST_LIMITS if chosen.limits == "raised" else None
    with TemporaryDirectory(prefix="bench-") as directory:
        figures = measure(Path(directory), chosen.jobs, limits)
    show(figures, chosen.limits)
    if chosen.output:
        chosen.output.write_text(json.dumps(figures.to_json(), indent=2) + "\n")
    return 0


def show(figures: Figures, limits: str) -> None:
    """Print what was measured, and on what."""
    write = sys.stdout.write
    write(f"{platform.machine()}, Python {platform.python_version()}, limits: {limits}\n")
    write(f"bare Jobs   {figures.jobs} in {figures.bare_seconds:.1f} s\n")
    write(f"AgentJobs   {figures.jobs} in {figures.ours_seconds:.1f} s\n")
    write(f"\nrequests of the operator\n{table(figures.requests, figures.jobs)}\n")
    write(f"\nAgentJobs per second against bare Jobs: {figures.ratio:.2f}\n")


if __name__ == "__main__":
    sys.exit(main())
