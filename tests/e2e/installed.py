"""What is installed: the operator with the process of it on this machine, and the gateway."""

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.cluster import Cluster

NAMESPACE = "agentjobs-system"
DEPLOYMENT = "agentjobs-operator"
SELECTOR = "app.kubernetes.io/component=operator"
COMMAND = (b"-m", b"agentjobs.main", b"operator")
GONE_WITHIN = 30.0
POLL = 0.05

Document = dict[str, Any]


class InstalledOperator:
    """One replica, as the chart installs it."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def kill(self) -> None:
        """SIGKILL; the kubelet starts it again."""
        (pod,) = self._pods()
        send(pod["metadata"]["uid"], signal.SIGKILL)

    @contextmanager
    def away(self) -> Iterator[None]:
        """Kill it and keep it away; it is back and ready afterwards."""
        (pod,) = self._pods()
        uid = pod["metadata"]["uid"]
        # Frozen first: it must not hear of being scaled down, and give its Lease up.
        send(uid, signal.SIGSTOP)
        try:
            self._scale(0)
            send(uid, signal.SIGKILL)
            self._wait_until_gone()
            yield
        finally:
            self._scale(1)
            self.wait_until_ready()

    @contextmanager
    def replaced(self) -> Iterator[None]:
        """Without it, for another one to act in its place; it gives its Lease up."""
        self._scale(0)
        try:
            self._wait_until_gone()
            yield
        finally:
            self._scale(1)
            self.wait_until_ready()

    def wait_until_ready(self) -> None:
        self._kubectl("rollout", "status", f"deployment/{DEPLOYMENT}", "--timeout=60s")

    def _scale(self, replicas: int) -> None:
        self._kubectl("scale", f"deployment/{DEPLOYMENT}", f"--replicas={replicas}")

    def _wait_until_gone(self) -> None:
        end = time.monotonic() + GONE_WITHIN
        while self._pods():
            assert time.monotonic() < end, "the operator's pod is still there"
            time.sleep(POLL)

    def _pods(self) -> list[dict[str, Any]]:
        text = self._kubectl("get", "pods", "-l", SELECTOR, "-o", "json")
        items: list[dict[str, Any]] = json.loads(text)["items"]
        return items

    def _kubectl(self, *arguments: str) -> str:
        return self._cluster.kubectl("--namespace", NAMESPACE, *arguments)


class InstalledGateway:
    """Its replicas, as the chart installs them."""

    REPLICAS = 2
    DEPLOYMENT = "agentjobs-gateway"
    SERVICE = f"http://{DEPLOYMENT}.{NAMESPACE}.svc:8080"
    """Where pods reach it."""
    ACCOUNT = f"system:serviceaccount:{NAMESPACE}:{DEPLOYMENT}"
    KEYS = "agentjobs-gateway-keys"

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    @property
    def urls(self) -> list[str]:
        """Each replica that is ready, as this machine reaches it: a Service has no way in."""
        found = [each for each in self.pods() if _is_ready(each)]
        return [f"http://{each['status']['podIP']}:8080" for each in found]

    def pods(self) -> list[Document]:
        """Its pods, those that are going included."""
        selector = "app.kubernetes.io/component=gateway"
        items: list[Document] = self._get("pods", "--selector", selector)["items"]
        return items

    def restart(self) -> None:
        """`kubectl rollout restart`, until the last pod from before is gone."""
        before = {each["metadata"]["uid"] for each in self.pods()}
        self._kubectl("rollout", "restart", f"deployment/{self.DEPLOYMENT}")
        self.wait_until_ready()
        self._wait_until_gone(before)

    def renew_keys(self) -> None:
        """Empty its Secret and start it anew; only while no job is named by its key."""
        before = {each["metadata"]["uid"] for each in self.pods()}
        self._kubectl("patch", "secret", self.KEYS, "--type=merge", "--patch", '{"data":null}')
        chosen = ["--selector", "app.kubernetes.io/component=gateway"]
        self._kubectl("delete", "pods", *chosen, "--grace-period=1")
        self._wait_until_gone(before)
        self.wait_until_ready()

    def keys(self) -> Document:
        """The data of its Secret."""
        data: Document = self._get("secret", self.KEYS).get("data") or {}
        return data

    def wait_until_ready(self) -> None:
        self._kubectl("rollout", "status", f"deployment/{self.DEPLOYMENT}", "--timeout=90s")

    def _wait_until_gone(self, uids: set[str]) -> None:
        end = time.monotonic() + GONE_WITHIN
        while left := uids & {each["metadata"]["uid"] for each in self.pods()}:
            assert time.monotonic() < end, f"pods of the gateway are still there: {left}"
            time.sleep(POLL * 4)

    def _get(self, *what: str) -> Document:
        found: Document = json.loads(self._kubectl("get", *what, "--output", "json"))
        return found

    def _kubectl(self, *arguments: str) -> str:
        return self._cluster.kubectl("--namespace", NAMESPACE, *arguments)


def _is_ready(pod: Document) -> bool:
    conditions = pod["status"].get("conditions", ())
    return "deletionTimestamp" not in pod["metadata"] and any(
        (each["type"], each["status"]) == ("Ready", "True") for each in conditions
    )


def send(pod_uid: str, number: signal.Signals) -> None:
    """Signal the operator's process of one pod, and no other.

    The pod's uid stands in the control group of its processes. The process is held by a
    descriptor while it is looked at, so that its number cannot become somebody else's.
    """
    held = [fd for process in Path("/proc").glob("[0-9]*") if (fd := _hold(process, pod_uid))]
    try:
        assert len(held) == 1, f"{len(held)} processes of the operator in pod {pod_uid}"
        signal.pidfd_send_signal(held[0], number)
    finally:
        for fd in held:
            os.close(fd)


def _hold(process: Path, pod_uid: str) -> int | None:
    """A descriptor of the process, if it is the operator's in that pod."""
    try:
        if not _is_ours(process, pod_uid):
            return None
        fd = os.pidfd_open(int(process.name))
    except OSError:
        return None
    try:
        ours = _is_ours(process, pod_uid)
    except OSError:
        ours = False
    if not ours:
        os.close(fd)
        return None
    return fd


def _is_ours(process: Path, pod_uid: str) -> bool:
    words = (process / "cmdline").read_bytes().split(b"\0")
    inside = f"pod{pod_uid}/" in (process / "cgroup").read_text(encoding="utf-8")
    return inside and tuple(words[1:4]) == COMMAND
