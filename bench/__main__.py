"""`python -m bench [burst|gateway|inbox]`: prints figures, and ratios within the same run."""

import argparse
import json
import platform
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from bench import gateway, inbox
from bench.burst import Figures, measure
from tests.audit import table
from tests.cluster import FAST_LIMITS


def main(argv: list[str] | None = None) -> int:
    """Run a benchmark; the last line is the ratio to bare Jobs."""
    parser = argparse.ArgumentParser(prog="bench", description=__doc__)
    parser.add_argument("name", nargs="?", choices=["burst", "gateway", "inbox"], default="burst")
    parser.add_argument("--jobs", type=int, default=200, help="jobs (or starts) of each kind")
    parser.add_argument("--reads", type=int, default=10_000, help="status reads at the gateway")
    parser.add_argument("--polls", type=int, default=1000, help="long polls at the gateway")
    parser.add_argument("--limits", choices=["default", "raised"], default="raised")
    parser.add_argument(
        "--docs", type=Path, help="where docs/inbox.md is, to be brought up to date"
    )
    parser.add_argument("--output", type=Path, help="where to write the figures as JSON")
    chosen = parser.parse_args(argv)
    figures: Figures | gateway.Figures | inbox.Figures
    with TemporaryDirectory(prefix="bench-") as directory:
        if chosen.name == "inbox":
            figures = inbox.measure()
            sys.stdout.write(f"{inbox.table(figures)}\n")
            if chosen.docs:
                inbox.write(figures, chosen.docs)
        elif chosen.name == "gateway":
            figures = gateway.measure(Path(directory), chosen.jobs, chosen.reads, chosen.polls)
            show_gateway(figures)
        else:
            limits = FAST_LIMITS if chosen.limits == "raised" else None
            figures = measure(Path(directory), chosen.jobs, limits)
            show(figures, chosen.limits)
    if chosen.output:
        chosen.output.write_text(json.dumps(figures.to_json(), indent=2) + "\n")
    return 0


def show_gateway(figures: gateway.Figures) -> None:
    """Print what was measured at the gateway, with the budgets beside it."""
    write = sys.stdout.write
    p50, p99 = figures.start_ratios
    write(f"{platform.machine()}, Python {platform.python_version()}\n")
    write(f"start        p50 {figures.start_p50:.1f} ms, p99 {figures.start_p99:.1f} ms\n")
    write(f"bare create  p50 {figures.bare_p50:.1f} ms, p99 {figures.bare_p99:.1f} ms\n")
    write(f"start against bare create: p50 {p50:.2f} (budget 2), p99 {p99:.2f} (budget 3)\n")
    write(f"status reads per second of a core: {figures.reads_per_core_second:.0f} (budget 3000)\n")
    write(
        f"requests beside {figures.reads} reads: {figures.api_requests_during_reads} (budget 0), "
        f"reviews {figures.reviews_during_reads} (budget 2 in 10 s)\n"
    )
    write(
        f"{figures.polls} long polls: {figures.poll_kilobytes:.0f} KiB each, "
        f"all answered {figures.poll_answered_ms:.0f} ms after the change\n"
    )


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
