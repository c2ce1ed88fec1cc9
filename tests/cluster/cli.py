"""The command line: `python -m tests.cluster up`, and so on."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from . import programs
from .binaries import binary, ensure
from .cluster import DEFAULT_NAME, Cluster
from .console import say
from .errors import ClusterError


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what the arguments say; return the exit code, 1 when it cannot be done."""
    chosen = _parser().parse_args(arguments)
    try:
        _run(chosen)
    except ClusterError as error:
        say(f"error: {error}")
        return 1
    except KeyboardInterrupt:
        say("interrupted; running it again goes on from here")
        return 130
    return 0


def _run(chosen: argparse.Namespace) -> None:
    match chosen.command:
        case "build":
            control_plane = (*programs.CONTROL_PLANE, programs.KWOK)
            ensure(control_plane if chosen.control_plane else programs.ALL)
        case "binary":
            sys.stdout.write(f"{binary(chosen.program)}\n")
        case "up":
            Cluster.up(chosen.name, chosen.nodes, chosen.network)
            sys.stdout.write(Cluster.find(chosen.name).status())
        case "down":
            Cluster.find(chosen.name).down()
        case "status":
            sys.stdout.write(Cluster.find(chosen.name).status())
        case "kubeconfig":
            sys.stdout.write(_kubeconfig(Cluster.find(chosen.name)))
        case "load-image":
            cluster = Cluster.find(chosen.name)
            for file in chosen.files:
                cluster.load_image(file)


def _kubeconfig(cluster: Cluster) -> str:
    try:
        return cluster.kubeconfig.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ClusterError(
            f"there is no {cluster.kubeconfig}: bring the cluster up first"
        ) from error


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.cluster", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    build = commands.add_parser("build", help="build every program that is not cached yet")
    build.add_argument(
        "--control-plane", action="store_true", help="only what a control plane without nodes needs"
    )
    path = commands.add_parser("binary", help="print the path of kubectl, helm, ...")
    path.add_argument("program")
    named = argparse.ArgumentParser(add_help=False)
    named.add_argument("--name", default=DEFAULT_NAME, help="the cluster (default: %(default)s)")
    up = commands.add_parser("up", parents=[named], help="bring a cluster up")
    up.add_argument("--nodes", type=int, default=1, help="how many nodes (default: 1)")
    up.add_argument("--network", help="the /16 to use (default: one that is free)")
    for command, help_text in (
        ("down", "remove a cluster and everything of it"),
        ("status", "what runs, and what to do next"),
        ("kubeconfig", "write the kubeconfig to standard output"),
    ):
        commands.add_parser(command, parents=[named], help=help_text)
    load = commands.add_parser("load-image", parents=[named], help="load image archives")
    load.add_argument("files", nargs="+", type=Path, metavar="FILE.tar")
    return parser
