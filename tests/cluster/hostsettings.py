"""What image builds need to know of this machine: package sources, pip settings, certificates.

All of it goes into a build as secrets that are mounted for one step; nothing stays in an image.
"""

import ast
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from .errors import ClusterError

SECRETS = "/run/secrets"
"""Where a build step sees its secrets."""
CA_BUNDLE_VARIABLES = ("PIP_CERT", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")
CA_BUNDLE_OF_DEBIAN = "/etc/ssl/certs/ca-certificates.crt"
PIP_NETWORK_KEYS = frozenset(
    {
        "default-timeout",
        "extra-index-url",
        "index-url",
        "no-index",
        "proxy",
        "retries",
        "timeout",
        "trusted-host",
    }
)
"""pip settings that make sense on another file system than this machine's."""
APT_NETWORK_SETTING = re.compile(r"^Acquire::(https?|ftp|Check|Retries|ForceIP|Allow)")
APT_CA_SETTING = re.compile(r"^Acquire::https.*::CaInfo ")
APT_CREDENTIALS = ("/etc/apt/auth.conf", "/etc/apt/auth.conf.d/*.conf")


def debian_release() -> str | None:
    """Return the code name of the Debian or Ubuntu that this machine runs, if it runs one."""
    values = _os_release()
    return values.get("VERSION_CODENAME") if values.get("ID") in {"debian", "ubuntu"} else None


def apt_sources() -> str:
    """Return the distribution's own sources, as apt has them configured, in one-line format.

    Other vendors' repositories are left out: images are made of the distribution alone.
    """
    lines = _index_targets()
    if not lines:  # the lists were cleaned away: fetch them to a place of our own
        with tempfile.TemporaryDirectory(prefix="agentjobs-apt-") as directory:
            Path(directory, "partial").mkdir()
            lists = f"Dir::State::Lists={directory}"
            _apt("update", "-qq", "-o", lists)
            lines = _index_targets("-o", lists)
    if not lines:
        raise ClusterError(
            "apt knows no package source of the distribution itself: see `apt-get indextargets`"
        )
    return "".join(f"{kind} {line}\n" for kind in ("deb", "deb-src") for line in lines)


def apt_settings(*, in_build: bool) -> str:
    """Return apt's network settings; for a build step, with its secrets as sources and the like."""
    lines = [line for line in _apt_config() if APT_NETWORK_SETTING.match(line)]
    if in_build:
        lines = [line for line in lines if not APT_CA_SETTING.match(line)]
        lines += [
            f'Acquire::https::CaInfo "{SECRETS}/ca_bundle";' if ca_bundle() else "",
            f'Dir::Etc::SourceList "{SECRETS}/apt_sources";',
            'Dir::Etc::SourceParts "/dev/null";',
            f'Dir::Etc::Netrc "{SECRETS}/apt_auth";',
            'APT::Sandbox::User "root";',  # secrets are readable for root only
        ]
    return "".join(f"{line}\n" for line in lines if line)


def ca_bundle() -> Path | None:
    """Return the certificates that this machine trusts, if it says which."""
    named = [os.environ.get(variable, "") for variable in CA_BUNDLE_VARIABLES]
    paths = [Path(name) for name in (*named, CA_BUNDLE_OF_DEBIAN) if name]
    return next((path for path in paths if path.is_file()), None)


def pip_settings() -> str:
    """Return a pip.conf with what pip of this machine needs to reach its index."""
    settings: dict[str, str] = {}
    for line in _pip_config():
        key, separator, value = line.partition("=")
        name = key.rpartition(".")[2].strip("'")
        if separator and name in PIP_NETWORK_KEYS:  # later lines win, as they do in pip
            settings[name] = str(ast.literal_eval(value))
    indented = {name: value.replace("\n", "\n  ") for name, value in settings.items()}
    return "[global]\n" + "".join(f"{name} = {value}\n" for name, value in indented.items())


@contextmanager
def build_secrets(*, with_apt: bool) -> Iterator[Mapping[str, Path]]:
    """Write the secrets for a build to a private directory, by id; it is gone afterwards.

    apt's are for a base made from this machine's distribution; another has sources of its own.
    """
    contents = {"pip_conf": pip_settings()}
    if with_apt:
        contents["apt_conf"] = apt_settings(in_build=True)
        contents["apt_sources"] = apt_sources()
        contents["apt_auth"] = _apt_credentials()
    with tempfile.TemporaryDirectory(prefix="agentjobs-build-") as directory:
        secrets = {name: Path(directory, name) for name in contents}
        for name, path in secrets.items():
            path.write_text(contents[name], encoding="utf-8")
        bundle = ca_bundle()
        yield secrets | ({"ca_bundle": bundle} if bundle else {})


def _os_release() -> dict[str, str]:
    path = Path("/etc/os-release")
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    pairs = (line.partition("=") for line in lines)
    return {key: value.strip("\"'") for key, _, value in pairs}


def _index_targets(*options: str) -> list[str]:
    form = "$(ORIGIN)|$(REPO_URI) $(RELEASE) $(COMPONENT)"
    found = _apt("indextargets", *options, "--format", form, "Created-By: Packages")
    origin = _os_release().get("ID", "")
    pairs = (line.partition("|") for line in found.splitlines())
    return sorted({source for name, _, source in pairs if name.lower() == origin})


def _apt(*arguments: str) -> str:
    command = ["apt-get", *arguments]
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout
    except subprocess.CalledProcessError as error:
        raise ClusterError(f"`{' '.join(command)}` failed: {error.stderr.strip()}") from error


def _apt_config() -> list[str]:
    command = ["apt-config", "dump"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()


def _apt_credentials() -> str:
    paths = [path for pattern in APT_CREDENTIALS for path in sorted(Path("/").glob(pattern[1:]))]
    return "".join(path.read_text(encoding="utf-8") for path in paths if os.access(path, os.R_OK))


def _pip_config() -> list[str]:
    command = [sys.executable, "-m", "pip", "config", "list"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    return done.stdout.splitlines()  # no pip here: then there is nothing to follow
