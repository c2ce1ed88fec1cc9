"""The two images that every node has: written by hand, byte for byte the same each time."""

import hashlib
import io
import json
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from .packages import BUSYBOX
from .processes import run

PAUSE = "docker.io/local/pause:1"
BUSYBOX_IMAGE = "docker.io/local/busybox:1"
_OCI = "application/vnd.oci.image"


def write_base_images(directory: Path) -> list[Path]:
    """Write the archives of the pause and the busybox image and return their paths."""
    program = BUSYBOX.read_bytes()
    applets = sorted(set(run([BUSYBOX, "--list"]).split()) - {"busybox"})
    # A pod's pause container has nothing to do but to be there; the runtime kills it.
    pause = layer(program, [])
    busybox = layer(program, applets)
    directory.mkdir(parents=True, exist_ok=True)
    files = {
        "pause.tar": archive(PAUSE, pause, ["/bin/busybox", "sleep", "2147483647"]),
        "busybox.tar": archive(BUSYBOX_IMAGE, busybox, ["/bin/sh"]),
    }
    for name, content in files.items():
        (directory / name).write_bytes(content)
    return [directory / name for name in files]


def layer(busybox: bytes, applets: Iterable[str]) -> bytes:
    """Return a root file system with busybox, links for its applets, and users."""
    directories = ["bin", "dev", "etc", "home", "proc", "root", "sys", "tmp", "usr", "var"]
    files = {
        "etc/group": b"root:x:0:\nnogroup:x:65534:\n",
        "etc/passwd": b"root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534::/:/bin/sh\n",
    }
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name in directories:
            entry = tarfile.TarInfo(name)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o1777 if name == "tmp" else 0o755
            tar.addfile(entry)
        for name, content in {"bin/busybox": busybox, **files}.items():
            _add(tar, name, content, mode=0o755 if name.startswith("bin/") else 0o644)
        for name in applets:
            entry = tarfile.TarInfo(f"bin/{name}")
            entry.type, entry.linkname = tarfile.SYMTYPE, "busybox"
            tar.addfile(entry)
    return buffer.getvalue()


def archive(name: str, content: bytes, command: Sequence[str]) -> bytes:
    """Return an OCI archive of an image `name` that has one layer."""
    configuration = _json(
        {
            "architecture": "amd64",
            "os": "linux",
            "config": {"Cmd": list(command), "Env": ["PATH=/bin"]},
            "rootfs": {"type": "layers", "diff_ids": [_digest(content)]},
        }
    )
    manifest = _json(
        {
            "schemaVersion": 2,
            "mediaType": f"{_OCI}.manifest.v1+json",
            "config": _descriptor(f"{_OCI}.config.v1+json", configuration),
            "layers": [_descriptor(f"{_OCI}.layer.v1.tar", content)],
        }
    )
    index = {
        **_descriptor(f"{_OCI}.manifest.v1+json", manifest),
        "annotations": {
            "io.containerd.image.name": name,
            "org.opencontainers.image.ref.name": name.rpartition(":")[2],
        },
    }
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        _add(tar, "oci-layout", _json({"imageLayoutVersion": "1.0.0"}))
        _add(tar, "index.json", _json({"schemaVersion": 2, "manifests": [index]}))
        for blob in (configuration, manifest, content):
            _add(tar, f"blobs/sha256/{_digest(blob).removeprefix('sha256:')}", blob)
    return buffer.getvalue()


def _add(tar: tarfile.TarFile, name: str, content: bytes, mode: int = 0o644) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(content), mode
    tar.addfile(entry, io.BytesIO(content))


def _descriptor(media_type: str, content: bytes) -> dict[str, str | int]:
    return {"mediaType": media_type, "digest": _digest(content), "size": len(content)}


def _digest(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def _json(document: Mapping[str, object]) -> bytes:
    return json.dumps(document, sort_keys=True).encode()
