"""Builds the images of product and demo into archives for `ctr images import`.

`python -m tests.cluster.imagebuild operator|demo` prints the path of the archive. An archive is
kept under a digest of all that went into it, so a second run builds nothing.
"""

import argparse
import hashlib
import os
import re
import shutil
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from .console import say, step
from .engines import Engine, engine, require_packages, run
from .errors import ClusterError
from .hostsettings import apt_settings, apt_sources, build_secrets, debian_release
from .paths import cache_directory, lock

REPOSITORY = Path(__file__).parents[2]
BASE_PACKAGES = ("ca-certificates", "python3", "python3-venv")
"""What both Dockerfiles expect of a base that is made here."""
LEFT_OUT = ("doc", "info", "locale", "man")
"""Folders of /usr/share that no container needs."""
OF_THIS_MACHINE = (
    "etc/apt/sources.list",
    "etc/apt/sources.list.d/*",
    "etc/apt/apt.conf.d/99mmdebstrap",
    "etc/hostname",
    "etc/resolv.conf",
)
"""What is written into a new file system for this machine alone."""
ARCHIVES_KEPT = 2
"""Older archives of the same image are removed."""
DEFAULT_BASE = re.compile(r"^ARG BASE=(\S+)$", re.MULTILINE)


@dataclass(frozen=True)
class Recipe:
    """An image of this repository."""

    name: str
    context: Path
    files: tuple[str, ...]
    """What of the context matters: nothing else is given to the build."""
    build_args: Mapping[str, str] = field(default_factory=dict)

    @property
    def dockerfile(self) -> Path:
        """The Dockerfile, always at the top of the context."""
        return self.context / "Dockerfile"

    def archive(self) -> Path:
        """Return the image's archive, built if it is not there yet."""
        return build_image(
            self.name,
            dockerfile=self.dockerfile,
            context=self.context,
            files=self.files,
            build_args=self.build_args,
        )


def product_version() -> str:
    """Return the version of the product in this work tree."""
    with (REPOSITORY / "pyproject.toml").open("rb") as file:
        return str(tomllib.load(file)["project"]["version"])


def recipes() -> Mapping[str, Recipe]:
    """Return the images that can be built, by the word for them on the command line."""
    version = product_version()
    return {
        "operator": Recipe(
            name=f"docker.io/local/agentjobs:{version}",
            context=REPOSITORY,
            files=("pyproject.toml", "README.md", "LICENSE", "requirements", "operator"),
            build_args={"VERSION": version},
        ),
        "demo": Recipe(
            name="docker.io/local/agentjobs-demo:1",
            context=REPOSITORY / "demo",
            files=("fetch.sh", "tools"),
        ),
    }


def build_image(
    name: str,
    *,
    dockerfile: Path,
    context: Path,
    files: Sequence[str],
    build_args: Mapping[str, str],
) -> Path:
    """Return an archive of the image, from the cache if nothing that goes into it has changed.

    The base is `$AGENTJOBS_BASE_IMAGE`, else the Dockerfile's own if its registry can be reached,
    else one made from this machine's Debian.
    """
    with lock("images"), _staged(dockerfile, context, files) as folder:
        content = _digest_of(folder, repr((name, sorted(build_args.items()))))
        bases = _bases(dockerfile)
        archives = {base: _archive(name, f"{content}\n{base}") for base in bases}
        for archive in archives.values():
            if archive.exists():
                say(f"image {name}: unchanged")
                return archive
        base = _choose(bases)
        _build(name, folder, base, build_args, archives[base])
        return archives[base]


def debian_base(packages: Sequence[str]) -> str:
    """Return an image of this machine's Debian release with these packages, in the engine's store.

    It holds no package sources and no settings of this machine.
    """
    release = debian_release()
    if release is None:
        raise ClusterError(
            "no registry can be reached and this machine is not Debian or Ubuntu: "
            "name a base with Python >= 3.11 in AGENTJOBS_BASE_IMAGE"
        )
    reference = _debian_reference(packages)
    if engine().has(reference):
        return reference
    archive = cache_directory() / "images" / f"base-{reference.rpartition(':')[2]}.tar"
    if not archive.exists():
        with step(f"base image: {release} with {' '.join(packages)}"):
            _bootstrap(release, packages, archive)
    with (
        step("base image: taking it into the store"),
        tempfile.TemporaryDirectory(dir=archive.parent, prefix="base-") as directory,
    ):
        os.link(archive, Path(directory, "base.tar"))
        Path(directory, "Dockerfile").write_text("FROM scratch\nADD base.tar /\n", encoding="utf-8")
        engine().build(
            reference, context=Path(directory), build_args={}, secrets={}, log="image-base"
        )
    return reference


def _bootstrap(release: str, packages: Sequence[str], archive: Path) -> None:
    """Make a file system of the release with apt alone, from the sources of this machine."""
    require_packages(["mmdebstrap"])
    partial = archive.with_suffix(".partial")
    with tempfile.TemporaryDirectory(prefix="agentjobs-base-") as directory:
        sources, settings = Path(directory, "sources.list"), Path(directory, "apt.conf")
        lines = apt_sources().splitlines(keepends=True)
        sources.write_text("".join(line for line in lines if line.startswith("deb ")), "utf-8")
        settings.write_text(apt_settings(in_build=False), "utf-8")
        command = [
            "mmdebstrap",
            "--variant=minbase",
            "--format=tar",
            f"--include={','.join(packages)}",
            f"--aptopt={settings}",
            *(f"--dpkgopt=path-exclude=/usr/share/{folder}/*" for folder in LEFT_OUT),
            *(f'--customize-hook=rm -f "$1"/{path}' for path in OF_THIS_MACHINE),
            release,
            str(partial),
            str(sources),
        ]
        run(command, what=f"making a base image of {release}", log="image-base-mmdebstrap")
    partial.replace(archive)


def _build(
    name: str, folder: Path, base: str, build_args: Mapping[str, str], archive: Path
) -> None:
    builder = engine()
    own = base.startswith("debian:")
    reference = debian_base(BASE_PACKAGES) if own else base
    log = f"image-{_short(name)}"
    try:
        with (
            step(f"image {name}: building with {builder.name}"),
            build_secrets(with_apt=own) as secrets,
        ):
            builder.build(
                name,
                context=folder,
                build_args={**build_args, "BASE": reference},
                secrets=secrets,
                log=log,
            )
        with step(f"image {name}: writing {archive.name}"):
            _export(builder, name, archive, log=f"{log}-export")
    finally:
        builder.clean()
    _remove_older(name, archive)


def _export(builder: Engine, name: str, archive: Path, *, log: str) -> None:
    partial = archive.with_suffix(".partial")
    partial.unlink(missing_ok=True)
    builder.export(name, partial, log=log)
    partial.replace(archive)


def _bases(dockerfile: Path) -> list[str]:
    """Return the possible bases, best first."""
    if chosen := os.environ.get("AGENTJOBS_BASE_IMAGE"):
        return [chosen]
    found = DEFAULT_BASE.search(dockerfile.read_text(encoding="utf-8"))
    public = [found[1]] if found else []
    return [*public, _debian_identity(BASE_PACKAGES)] if debian_release() else public


def _choose(bases: Sequence[str]) -> str:
    """Return the first base that can be had; one that was made here earlier is kept to."""
    *wished, last = bases
    if wished and engine().has(_debian_reference(BASE_PACKAGES)):
        return last
    for base in wished:
        if engine().has(base):
            return base
        with step(f"base image: looking for {base}"):
            found = engine().pull(base)
        if found:
            return base
        say(f"base image: no registry has {base} for us; making one from packages")
    return last


def _debian_identity(packages: Sequence[str]) -> str:
    return f"debian:{debian_release()} {' '.join(sorted(packages))}"


def _debian_reference(packages: Sequence[str]) -> str:
    return f"localhost/agentjobs-base:{_hash(_debian_identity(packages))}"


@contextmanager
def _staged(dockerfile: Path, context: Path, files: Sequence[str]) -> Iterator[Path]:
    """Copy what matters to a folder of its own, so that nothing else can get into the image."""
    images = cache_directory() / "images"
    images.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=images, prefix="context-") as directory:
        folder = Path(directory)
        shutil.copy(dockerfile, folder / "Dockerfile")
        for name in files:
            source, target = context / name, folder / name
            if source.is_dir():
                shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", ".*"))
            else:
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(source, target)
        yield folder


def _digest_of(folder: Path, more: str) -> str:
    content = hashlib.sha256(more.encode())
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        mode = path.stat().st_mode & 0o111
        content.update(f"\n{path.relative_to(folder)} {mode:o} ".encode())
        content.update(hashlib.sha256(path.read_bytes()).digest())
    return content.hexdigest()


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _short(name: str) -> str:
    return name.rpartition("/")[2].partition(":")[0]


def _archive(name: str, inputs: str) -> Path:
    return cache_directory() / "images" / f"{_short(name)}@{_hash(inputs)}.tar"


def _remove_older(name: str, newest: Path) -> None:
    others = [path for path in newest.parent.glob(f"{_short(name)}@*.tar") if path != newest]
    others.sort(key=lambda path: path.stat().st_mtime, reverse=True)
    for path in others[ARCHIVES_KEPT - 1 :]:
        path.unlink()


def main() -> int:
    """Build one image and print the path of its archive."""
    parser = argparse.ArgumentParser(prog="python -m tests.cluster.imagebuild", description=__doc__)
    parser.add_argument("image", choices=sorted(recipes()))
    chosen = recipes()[parser.parse_args().image]
    try:
        sys.stdout.write(f"{chosen.archive()}\n")
    except ClusterError as error:
        say(f"error: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
