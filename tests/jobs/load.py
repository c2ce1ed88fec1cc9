"""Reads the manifests beside this file. What is in them: `runs` are accepted and must reach their
Job as written, `refused` must end or be turned away, `tools` are catalogue entries with examples of
arguments. None of the images exists.
"""

from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent
Json = dict[str, Any]


def names(kind: str) -> list[str]:
    """Names of the manifests of one kind."""
    return sorted(path.stem for path in (HERE / kind).glob("*.yaml"))


def path_of(kind: str, name: str) -> Path:
    """Where a manifest is."""
    return HERE / kind / f"{name}.yaml"


def manifest(kind: str, name: str) -> Json:
    """The first document of a file."""
    return documents(kind, name)[0]


def documents(kind: str, name: str) -> list[Json]:
    """All documents of a file: of a tool the entry itself, then its examples."""
    return list(yaml.safe_load_all(path_of(kind, name).read_text(encoding="utf-8")))
