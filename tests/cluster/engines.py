"""The program that builds images: docker, podman or buildah, whichever this machine has."""

import os
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from .console import say, step
from .errors import ClusterError
from .paths import cache_directory

BUILD_TIMEOUT = 1800.0
PULL_TIMEOUT = 180.0
PROBE_TIMEOUT = 15.0
STORE_LIMIT_BYTES = 3 << 30
"""Layers are kept for the next build up to this size, then all are dropped."""
LAST_LINES = 5
DEBIAN_PACKAGES = ("buildah", "mmdebstrap")


def run(command: Sequence[str], *, what: str, log: str, timeout: float = BUILD_TIMEOUT) -> None:
    """Run a command with its output in a log of that name; an error names the log."""
    path = cache_directory() / "logs" / f"{log}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with path.open("w", encoding="utf-8") as file:
            subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                timeout=timeout,
                check=True,
            )
    except FileNotFoundError as error:
        raise ClusterError(f"{what}: `{command[0]}` is not installed") from error
    except subprocess.TimeoutExpired as error:
        raise ClusterError(f"{what} took more than {timeout:.0f} s; log: {path}") from error
    except subprocess.CalledProcessError as error:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()[-LAST_LINES:]
        quoted = "".join(f"\n  {line}" for line in lines)
        raise ClusterError(f"{what} failed; the end of {path}:{quoted}") from error


@dataclass(frozen=True)
class Engine:
    """Builds images and writes them to archives."""

    name: str
    command: tuple[str, ...]
    """The program with its global options."""
    keeps_layers: bool = True

    def has(self, reference: str) -> bool:
        """Return whether the image is in the engine's own store."""
        inspect = {"buildah": ("inspect", "--type", "image"), "podman": ("image", "inspect")}
        words = inspect.get(self.name, ("image", "inspect"))
        return _succeeds([*self.command, *words, reference], timeout=PROBE_TIMEOUT)

    def pull(self, reference: str) -> bool:
        """Fetch the image from its registry; return whether that worked."""
        return _succeeds([*self.command, "pull", reference], timeout=PULL_TIMEOUT)

    def build(
        self,
        reference: str,
        *,
        context: Path,
        build_args: Mapping[str, str],
        secrets: Mapping[str, Path],
        log: str,
    ) -> None:
        """Build the Dockerfile of the folder `context` with nothing but that folder."""
        options = [*self._build_command(), "--tag", reference, "--file", f"{context}/Dockerfile"]
        for key, value in build_args.items():
            options += ["--build-arg", f"{key}={value}"]
        for key, path in secrets.items():
            options += ["--secret", f"id={key},src={path}"]
        run([*self.command, *options, str(context)], what=f"building {reference}", log=log)

    def export(self, reference: str, archive: Path, *, log: str) -> None:
        """Write the image to an archive that `ctr images import` reads."""
        match self.name:
            case "buildah":
                words = ["push", reference, f"oci-archive:{archive}:{reference}"]
            case "podman":
                words = ["save", "--format", "docker-archive", "--output", str(archive), reference]
            case _:
                words = ["save", "--output", str(archive), reference]
        run([*self.command, *words], what=f"writing {archive}", log=log)

    def clean(self) -> None:
        """Drop what builds have left in a store of our own; a shared one belongs to its user."""
        if self.name != "buildah":
            return
        _succeeds([*self.command, "rm", "--all"], timeout=PROBE_TIMEOUT * 4)
        if not self.keeps_layers or _size(_store()) > STORE_LIMIT_BYTES:
            _succeeds([*self.command, "rmi", "--all", "--force"], timeout=PROBE_TIMEOUT * 8)

    def _build_command(self) -> list[str]:
        # The host's network, so that a build reaches what the host reaches. chroot isolation
        # needs neither a container runtime nor namespaces that a sandbox may deny.
        match self.name:
            case "docker":
                return ["build", "--network", "host", *_proxy_arguments()]
            case "podman":
                return ["build", "--network", "host"]
            case _:
                layers = f"--layers={'true' if self.keeps_layers else 'false'}"
                return ["bud", "--isolation", "chroot", "--network", "host", layers]


@cache
def engine() -> Engine:
    """Return docker if its daemon answers, else podman, else buildah, installed if need be."""
    if shutil.which("docker") and _succeeds(["docker", "info"], timeout=PROBE_TIMEOUT):
        return Engine("docker", ("docker",))
    if shutil.which("podman"):
        return Engine("podman", ("podman",))
    require_packages(["buildah"])
    return _buildah()


def require_packages(names: Iterable[str]) -> None:
    """See that these programs of Debian are there: install them as root, else say how."""
    missing = [name for name in names if shutil.which(name) is None]
    if not missing:
        return
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise ClusterError(
            f"{' and '.join(missing)} missing: `apt-get install {' '.join(DEBIAN_PACKAGES)}`, "
            "or have docker or podman running"
        )
    # Another run of apt-get on this machine is waited for.
    install = ["apt-get", "-o", "DPkg::Lock::Timeout=300", "install", "--yes"]
    with step(f"installing {' '.join(missing)}"):
        run(["apt-get", "update"], what="apt-get update", log="apt-update")
        command = [*install, "--no-install-recommends", *missing]
        run(command, what=f"installing {' '.join(missing)}", log="apt-install")


def _buildah() -> Engine:
    """Return buildah with a store below the cache directory, with overlay where that works."""
    store = _store()
    places = ("--root", str(store / "root"), "--runroot", str(store / "run"))
    for driver in ("overlay", "vfs"):
        command = ("buildah", *places, "--storage-driver", driver)
        if _succeeds([*command, "info"], timeout=PROBE_TIMEOUT * 4):
            # vfs copies all files for each layer: keeping them would fill the disk
            return Engine("buildah", command, keeps_layers=driver == "overlay")
        if (store / "root").exists():
            say(f"buildah cannot use the storage driver {driver} in {store}")
    raise ClusterError(f"buildah cannot store images in {store}: see `buildah info`")


def _store() -> Path:
    return cache_directory() / "buildah"


def _succeeds(command: Sequence[str], *, timeout: float) -> bool:
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout, check=False
        )
    except (subprocess.TimeoutExpired, FileNotFoundError):
        return False
    return done.returncode == 0


def _size(directory: Path) -> int:
    return sum(
        path.lstat().st_size
        for path in directory.rglob("*")
        if "merged" not in path.parts and path.is_file() and not path.is_symlink()
    )


def _proxy_arguments() -> list[str]:
    names = ("http_proxy", "https_proxy", "no_proxy")
    given = [name for name in (*names, *map(str.upper, names)) if name in os.environ]
    return [word for name in given for word in ("--build-arg", name)]
