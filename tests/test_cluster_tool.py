import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from hashlib import sha256
from ipaddress import IPv4Network
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import (
    Cluster,
    ClusterError,
    ControlPlane,
    binaries,
    images,
    network,
    programs,
    remains,
)
from tests.cluster import cgroups as control_groups
from tests.cluster.cli import main
from tests.cluster.keeper import identity
from tests.cluster.network import Network
from tests.cluster.pki import Pki
from tests.cluster.processes import Process, Processes
from tests.cluster.temporary import name_for, orphans, temporary

ROOT = Path(__file__).parent.parent
NAME = "tool-test"


# Names and addresses


def test_the_networks_of_a_cluster_do_not_overlap() -> None:
    one = Network("one", IPv4Network("10.201.0.0/16"))
    parts = [
        IPv4Network(f"{one.host}/24", strict=False),
        one.services,
        *(one.pods(node) for node in range(1, 10)),
    ]

    assert not any(first.overlaps(second) for first, second in combinations(parts, 2))
    assert all(part.subnet_of(one.range) for part in parts)
    assert all(one.address(node) in parts[0] for node in range(1, 10))
    assert one.dns in one.services


def test_interface_names_fit_into_fifteen_characters() -> None:
    bridge = Network("a" * 30, IPv4Network("10.201.0.0/16")).bridge

    assert len(f"{bridge}n9") <= 15


def test_a_network_in_use_is_refused_with_what_uses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "_used", lambda: [IPv4Network("10.50.3.0/24")])

    with pytest.raises(ClusterError, match=r"10\.50\.0\.0/16 overlaps 10\.50\.3\.0/24"):
        network.find_network(NAME, "10.50.0.0/16")


def test_the_first_free_network_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "_used", lambda: [IPv4Network("10.201.0.0/24")])

    assert network.find_network(NAME, None).range == IPv4Network("10.202.0.0/16")


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("10.9.0.0/24", id="too small"),
        pytest.param("fd00::/16", id="IPv6"),
        pytest.param("10.9.0.1/16", id="not the first address"),
        pytest.param("nonsense", id="no network at all"),
    ],
)
def test_a_network_that_is_no_ipv4_slash_16_is_refused(text: str) -> None:
    with pytest.raises(ClusterError, match=r"/16"):
        network.find_network(NAME, text)


@pytest.mark.parametrize("name", ["", "Upper", "under_score", "-x", "x" * 31, "a/b"])
def test_a_cluster_name_that_cannot_be_part_of_others_is_refused(name: str) -> None:
    with pytest.raises(ClusterError, match="no name for a cluster"):
        Cluster.find(name)


# Processes


def test_a_process_is_ours_only_while_pid_and_start_agree() -> None:
    me = os.getpid()

    assert Process("me", me, identity(me) or "").alive
    assert not Process("me", me, "another-boot/1").alive


def test_a_process_that_took_over_a_recorded_pid_is_left_alone(tmp_path: Path) -> None:
    with _sleeper() as stranger:
        (tmp_path / "run").mkdir()
        record = {"name": "etcd", "pid": stranger.pid, "identity": "another-boot/1"}
        (tmp_path / "run" / "etcd.json").write_text(json.dumps(record))

        Processes(tmp_path).stop_all()

        assert stranger.poll() is None
        assert not (tmp_path / "run" / "etcd.json").exists()


def test_a_process_is_found_and_ended_by_another_instance(tmp_path: Path) -> None:
    started = Processes(tmp_path).start("sleeper", ["sleep", "60"])

    Processes(tmp_path).stop("sleeper")

    assert not started.alive


def test_a_process_that_ends_early_is_reported_with_its_last_words(tmp_path: Path) -> None:
    processes = Processes(tmp_path)
    processes.start("broken", ["sh", "-c", "echo no such luck; exit 3"])

    with pytest.raises(ClusterError, match="no such luck"):
        processes.wait_until("it is not there", lambda: False, timeout=10)


def test_processes_end_when_their_starter_is_killed(tmp_path: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path\n"
        "from tests.cluster.keeper import Keeper; from tests.cluster.processes import Processes\n"
        "Processes(Path(sys.argv[1]), Keeper()).start('sleeper', ['sleep', '60'])\n"
        "print('started', flush=True); time.sleep(60)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE
    ) as starter:
        assert starter.stdout
        starter.stdout.readline()
        sleeper = Processes(tmp_path).get("sleeper")
        assert sleeper
        assert sleeper.alive
        starter.send_signal(signal.SIGKILL)

    Processes(tmp_path / "none").wait_until("it goes on", lambda: not sleeper.alive, timeout=10)


# Clusters of test runs


def test_runs_at_the_same_time_have_clusters_of_their_own() -> None:
    names = [name_for(process, purpose) for process in (12, 123, 4194304) for purpose in ("", "x")]

    assert len({Cluster.find(name).name for name in names}) == len(names)
    assert not any(one in other for one in names for other in names if one != other)


def test_what_a_dead_run_has_left_is_found_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGENTJOBS_CACHE", str(tmp_path))
    with _sleeper() as ended:
        pass
    with _sleeper() as other:
        for name in (
            "agentjobs-demo",
            name_for(other.pid),
            name_for(os.getpid()),
            name_for(ended.pid),
            name_for(ended.pid, "tool"),
        ):
            (tmp_path / "clusters" / name).mkdir(parents=True)

        assert set(orphans()) == {name_for(ended.pid), name_for(ended.pid, "tool")}


@pytest.mark.cluster
def test_the_cluster_of_a_run_that_is_killed_is_taken_away() -> None:
    program = (
        "import os, signal\n"
        "from tests.cluster import LocalCluster, network\n"
        "from tests.cluster.temporary import temporary\n"
        "with temporary('killed') as name:\n"
        "    with network.alone():\n"
        "        network.create(network.find_network(name, None), nodes=1)\n"
        "    LocalCluster(name).directory.mkdir(parents=True)\n"
        "    print(name, flush=True)\n"
        "    signal.pause()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        env={**os.environ, "CLUSTER": "local"},
    ) as run:
        assert run.stdout
        name = run.stdout.readline().decode().strip()
        assert name == name_for(run.pid, "killed")
        assert remains.there(name)
        assert network.namespaces(name)
        run.kill()

    Processes(Path("none")).wait_until("it is there", lambda: not remains.there(name), timeout=30)


# Programs


def test_the_cache_key_changes_with_the_checksums(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def program() -> programs.Program:
        return programs.Program("p", "example.org/p", {"p": ""}, minutes=1)

    monkeypatch.setattr(programs, "GO_MODULES", tmp_path)
    (tmp_path / "p").mkdir()
    (tmp_path / "p" / "go.mod").write_text("require example.org/p v1.2.3 // indirect\n")
    (tmp_path / "p" / "go.sum").write_text("one")
    before = program().digest

    (tmp_path / "p" / "go.sum").write_text("two")

    assert program().version == "v1.2.3"
    assert program().digest != before


@pytest.mark.parametrize(
    "program", [*programs.ALL, *programs.ON_DEMAND], ids=lambda program: program.name
)
def test_every_program_has_a_version(program: programs.Program) -> None:
    assert program.version.startswith("v")


def test_without_go_the_message_says_which_go_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AGENTJOBS_CACHE", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))

    assert main(["build", "--control-plane"]) == 1

    said = capsys.readouterr().err
    assert f"install Go {binaries.required_go()} or newer" in said
    assert "Traceback" not in said


def test_a_go_that_is_too_old_is_named_as_the_cause(tmp_path: Path) -> None:
    log = tmp_path / "build.log"
    log.write_text("go: go.mod requires go >= 1.26.8 (running go 1.25.1; GOTOOLCHAIN=local)\n")

    said = binaries._failure(programs.CONTAINERD, log)

    assert f"too old to build containerd: install Go {binaries.required_go()} or newer" in said


def test_without_root_the_message_names_the_other_ways(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AGENTJOBS_CACHE", str(tmp_path))
    monkeypatch.delenv("CLUSTER", raising=False)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)

    assert main(["up"]) == 1

    said = capsys.readouterr().err
    assert "needs root" in said
    assert "CLUSTER=existing" in said


def test_an_existing_cluster_gets_images_by_the_command_that_the_user_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLUSTER", "existing")
    monkeypatch.delenv("CLUSTER_LOAD_IMAGE_COMMAND", raising=False)
    (tmp_path / "image.tar").touch()

    with pytest.raises(ClusterError, match="CLUSTER_LOAD_IMAGE_COMMAND"):
        Cluster.find().load_image(tmp_path / "image.tar")
    monkeypatch.setenv("CLUSTER_LOAD_IMAGE_COMMAND", f"cp -t {tmp_path / 'loaded'}")
    (tmp_path / "loaded").mkdir()
    Cluster.find().load_image(tmp_path / "image.tar")

    assert (tmp_path / "loaded" / "image.tar").exists()


# Images and certificates


def test_an_image_archive_is_the_same_each_time_and_every_digest_holds() -> None:
    def build() -> bytes:
        return images.archive("docker.io/local/x:1", images.layer(b"program", ["sh"]), ["/bin/sh"])

    content = build()

    assert content == build()
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        files = {
            name: member.read() for name in tar.getnames() if (member := tar.extractfile(name))
        }
    blobs = {name: blob for name, blob in files.items() if name.startswith("blobs/")}
    for name, blob in blobs.items():
        assert name == f"blobs/sha256/{sha256(blob).hexdigest()}"
    (entry,) = json.loads(files["index.json"])["manifests"]
    assert entry["annotations"]["io.containerd.image.name"] == "docker.io/local/x:1"
    manifest = json.loads(blobs[_blob(entry)])
    configuration = json.loads(blobs[_blob(manifest["config"])])
    layer = blobs[_blob(manifest["layers"][0])]
    assert configuration["rootfs"]["diff_ids"] == [f"sha256:{sha256(layer).hexdigest()}"]
    with tarfile.open(fileobj=io.BytesIO(layer)) as tar:
        assert tar.getmember("bin/sh").linkname == "busybox"


def test_two_users_never_share_a_certificate_file(tmp_path: Path) -> None:
    pki = Pki(tmp_path)
    pki.create()

    files = {pki.client("jane")[0], pki.client("jane", ["a"])[0], pki.client("jane", ["b"])[0]}

    assert len(files) == 3


# The real thing


@pytest.mark.controlplane
def test_a_control_plane_starts_serves_users_and_leaves_no_process(tmp_path: Path) -> None:
    with ControlPlane(tmp_path) as plane:
        pids = plane.pids.values()
        jane = plane.kubeconfig_for("jane", ["developers"])
        assert json.loads(_as(plane, jane, "auth", "whoami", "-o", "json"))["status"]["userInfo"][
            "groups"
        ] == ["developers", "system:authenticated"]
        with pytest.raises(ClusterError, match='User "jane" cannot create resource "jobs"'):
            _as(plane, jane, "create", "job", "j", "--image=x")
        plane.kubectl("create", "job", "j", "--image=x")
        plane.restart_apiserver()
        assert plane.kubectl("get", "jobs", "-o", "name") == "job.batch/j\n"
        writes = [(event["user"]["username"], event["level"]) for event in _job_creates(plane)]

    assert writes == [("jane", "RequestResponse"), ("admin", "RequestResponse")]
    assert not any(Path(f"/proc/{pid}/exe").exists() for pid in pids)


@pytest.mark.controlplane
def test_fake_nodes_run_jobs_to_the_end_that_was_asked_for(tmp_path: Path) -> None:
    with ControlPlane(tmp_path, kwok=True) as plane:
        plane.add_fake_nodes(2)
        plane.kubectl("create", "-f", "-", input_text=json.dumps(_job("good", {})))
        code = {"tests.agentjobs.dev/exit-code": "3"}
        plane.kubectl("create", "-f", "-", input_text=json.dumps(_job("bad", code)))

        plane.kubectl("wait", "--for=condition=Complete", "job/good", "--timeout=60s")
        plane.kubectl("wait", "--for=condition=Failed", "job/bad", "--timeout=60s")


@pytest.mark.cluster
@pytest.mark.timeout(600)
def test_a_cluster_comes_up_once_survives_a_crash_and_leaves_nothing() -> None:
    with temporary("tool") as name:
        cluster = Cluster.up(name)
        first = cluster.kubectl("get", "namespace", "kube-system", "-o", "jsonpath={.metadata.uid}")
        assert Cluster.up(name).kubectl("get", "namespace", "kube-system", "-o", "name")
        assert (
            cluster.kubectl("get", "namespace", "kube-system", "-o", "jsonpath={.metadata.uid}")
            == first
        ), "a cluster that is up must stay as it is"

        _crash(cluster)
        cluster = Cluster.up(name)
        cluster.kubectl("create", "-f", "-", input_text=json.dumps(_job("hello", {})))
        cluster.kubectl("wait", "--for=condition=Complete", "job/hello", "--timeout=60s")
        assert cluster.kubectl("logs", "job/hello") == "hello\n"
        assert all(_traces(name).values()), "what is looked for below can be seen"

    assert not any(_traces(name).values())
    Cluster.find(name).down()


def _crash(cluster: Cluster) -> None:
    """Kill some of it and lose the record of others, as a power cut in mid-start would."""
    records = sorted((cluster.kubeconfig.parent / "run").glob("*.json"))
    for record in records[::2]:
        process = Process(**json.loads(record.read_text()))
        process.send(signal.SIGKILL)
    for record in records[1::3]:
        record.unlink()


def _traces(name: str) -> dict[str, list[str]]:
    """What of a cluster can be seen on this machine."""
    bridge = Network(name, network.CANDIDATES[0]).bridge
    links = json.loads(subprocess.check_output(["ip", "-j", "link", "show"]))
    routes = subprocess.check_output(["ip", "route", "show"], text=True).splitlines()
    groups = [root for _, root in control_groups.hierarchies()]
    own = f"agentjobs-{name}-"
    return {
        "mounts": [line for line in _lines("/proc/self/mounts") if name in line],
        "links": [link["ifname"] for link in links if link["ifname"].startswith(bridge)],
        "routes": [line for line in routes if bridge in line],
        "namespaces": [str(file) for file in network.namespaces(name)],
        "groups": [str(file) for root in groups for file in root.iterdir() if own in file.name],
        "loops": [file for file in _loop_files() if name in file],
        "processes": [line for line in _commands() if name in line and "pytest" not in line],
    }


def _lines(file: str) -> list[str]:
    return Path(file).read_text(encoding="utf-8").splitlines()


def _loop_files() -> Iterator[str]:
    for file in Path("/sys/block").glob("loop*/loop/backing_file"):
        with contextlib.suppress(FileNotFoundError):
            yield file.read_text(encoding="utf-8")


def _commands() -> Iterator[str]:
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            yield file.read_text(encoding="utf-8", errors="replace")


def _content(tar: tarfile.TarFile, name: str) -> bytes:
    file = tar.extractfile(name)
    assert file
    return file.read()


def _blob(descriptor: dict[str, str]) -> str:
    return f"blobs/{descriptor['digest'].replace(':', '/')}"


def _as(plane: ControlPlane, kubeconfig: Path, *arguments: str) -> str:
    return plane.kubectl("--kubeconfig", kubeconfig, *arguments)


def _job_creates(plane: ControlPlane) -> list[dict[str, Any]]:
    events = [json.loads(line) for line in plane.audit_log.read_text().splitlines()]
    return [
        event
        for event in events
        if event["verb"] == "create" and event.get("objectRef", {}).get("resource") == "jobs"
    ]


def _job(name: str, annotations: dict[str, str]) -> dict[str, object]:
    container = {
        "name": "hello",
        "image": images.BUSYBOX_IMAGE,
        "command": ["echo", "hello"],
    }
    pod = {"restartPolicy": "Never", "containers": [container]}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name},
        "spec": {
            "backoffLimit": 0,
            "template": {"metadata": {"annotations": annotations}, "spec": pod},
        },
    }


@contextlib.contextmanager
def _sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "60"]) as process:
        try:
            yield process
        finally:
            process.kill()
