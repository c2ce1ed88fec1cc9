"""`python -m demo up|down`."""

import argparse
import sys
import time
from collections.abc import Sequence

from tests.cluster import ClusterError
from tests.cluster.binaries import binary
from tests.cluster.console import duration, say

from . import install
from .logs import Followers
from .run import (
    NAMESPACE,
    call_the_gateway,
    create_jobs,
    follow,
    new_display,
    next_commands,
    report,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what the arguments say; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m demo", description="Two real jobs to look at.")
    parser.add_argument("what", choices=("up", "down"), help="run the demo, or take it away")
    chosen = parser.parse_args(arguments)
    try:
        return up() if chosen.what == "up" else down()
    except ClusterError as error:
        say(f"error: {error}")
        return 1
    except KeyboardInterrupt:
        say("interrupted; the cluster stays: run it again, or `python -m demo down`")
        return 130


def up() -> int:
    """Run the demo; 0 only if both jobs ended well and the gateway kept its contract."""
    began = time.monotonic()
    cluster = install.up()
    create_jobs(cluster)
    kubectl = [str(binary("kubectl")), "--kubeconfig", str(cluster.kubeconfig)]
    with Followers(kubectl, NAMESPACE) as followers:
        jobs = follow(cluster, new_display(), followers)
        results = report(jobs, followers)
    sys.stdout.write(f"{results}\n")
    sys.stdout.flush()
    kept = call_the_gateway(cluster, kubectl)
    sys.stdout.write(f"{next_commands(cluster, jobs)}\n")
    sys.stdout.flush()
    say(f"\nthe demo took {duration(time.monotonic() - began)}")
    return 0 if kept and all(job.state == "done" for job in jobs) else 1


def down() -> int:
    """Take away what `up` has made."""
    install.down()
    return 0


if __name__ == "__main__":
    sys.exit(main())
