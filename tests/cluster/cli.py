"""The command line: `python -m tests.cluster up`, and so on."""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from . import programs
from .binaries import binary, ensure
from .cluster import DEFAULT_NAME, Cluster
from .console import say
from .errors import ClusterError

Run = Callable[[argparse.Namespace], None]


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what the arguments say; return the exit code, 1 when it cannot be done."""
    chosen = _parser().parse_args(arguments)
    try:
        chosen.run(chosen)
    except ClusterError as error:
        say(f"error: {error}")
        return 1
    except KeyboardInterrupt:
        say("interrupted; running it again goes on from here")
        return 130
    return 0


def _build(chosen: argparse.Namespace) -> None:
    control_plane = (*programs.CONTROL_PLANE, programs.KWOK)
    ensure(control_plane if chosen.control_plane else programs.ALL)


def _binary(chosen: argparse.Namespace) -> None:
    sys.stdout.write(f"{binary(chosen.program)}\n")


def _up(chosen: argparse.Namespace) -> None:
    cluster = Cluster.up(chosen.name, chosen.nodes, chosen.network)
    sys.stdout.write(cluster.status())


def _down(chosen: argparse.Namespace) -> None:
    Cluster.find(chosen.name).down()


def _status(chosen: argparse.Namespace) -> None:
    sys.stdout.write(Cluster.find(chosen.name).status())


def _load_image(chosen: argparse.Namespace) -> None:
    cluster = Cluster.find(chosen.name)
    for file in chosen.files:
        cluster.load_image(file)


def _kubeconfig(chosen: argparse.Namespace) -> None:
    cluster = Cluster.find(chosen.name)
    try:
        sys.stdout.write(cluster.kubeconfig.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ClusterError(
            f"there is no {cluster.kubeconfig}: bring the cluster up first"
        ) from error


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.cluster", description=__doc__)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    named = argparse.ArgumentParser(add_help=False)
    named.add_argument("--name", default=DEFAULT_NAME, help="the cluster (default: %(default)s)")

    def add(name: str, run: Run, about: str, *, of_cluster: bool = True) -> argparse.ArgumentParser:
        parents = [named] if of_cluster else []
        command = commands.add_parser(name, parents=parents, help=about, description=about)
        command.set_defaults(run=run)
        return command

    up = add("up", _up, "bring a cluster up")
    up.add_argument("--nodes", type=int, help="how many nodes (default: 1)")
    up.add_argument("--network", help="the /16 to use (default: one that is free)")
    add("down", _down, "remove a cluster and everything of it")
    add("status", _status, "what runs, and what to do next")
    add("kubeconfig", _kubeconfig, "write the kubeconfig to standard output")
    load = add("load-image", _load_image, "load image archives into every node")
    load.add_argument("files", nargs="+", type=Path, metavar="FILE.tar")
    build = add("build", _build, "build every program that is not cached yet", of_cluster=False)
    build.add_argument(
        "--control-plane", action="store_true", help="only what a control plane without nodes needs"
    )
    path = add("binary", _binary, "print the path of kubectl, helm, ...", of_cluster=False)
    path.add_argument("program")
    return parser
