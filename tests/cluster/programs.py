"""The programs a cluster consists of, and the Go modules they are built from."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from pathlib import Path

GO_MODULES = Path(__file__).parent / "go"
BUILD_FLAGS = ("-trimpath", "-buildvcs=false")


@dataclass(frozen=True)
class Program:
    """A set of binaries built by one `go build`."""

    name: str
    module: str
    """The Go module; its version stands in `go.mod`."""
    packages: Mapping[str, str]
    """Binary name to package path, the latter relative to the module."""
    minutes: float
    """About how long a cold build takes on two cores."""
    directory: str = ""
    """The folder under `go/`, when it is not called like the program."""
    link: str = ""
    """More linker flags; `{version}` stands for the module's version."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Files and folders of the module that are kept with the binaries: name to path in it."""

    @property
    def source(self) -> Path:
        """The folder with the program's go.mod and go.sum."""
        return GO_MODULES / (self.directory or self.name)

    @cached_property
    def version(self) -> str:
        """The version that go.mod requires."""
        for line in (self.source / "go.mod").read_text(encoding="utf-8").splitlines():
            words = line.removeprefix("require ").split()
            if words[:1] == [self.module]:
                return words[1]
        message = f"{self.source}/go.mod does not require {self.module}"
        raise LookupError(message)

    @property
    def ldflags(self) -> str:
        """Stripped binaries: symbols double the size and nobody debugs these."""
        return f"-s -w {self.link.format(version=self.version)}".strip()

    @cached_property
    def digest(self) -> str:
        """Changes when, and only when, the build would give something else."""
        said = [*BUILD_FLAGS, self.ldflags, *self.packages.items(), *self.files.items()]
        content = sha256(repr(said).encode())
        for name in ("go.mod", "go.sum"):
            content.update((self.source / name).read_bytes())
        return f"{self.name}-{content.hexdigest()[:16]}"


_KUBERNETES_VERSION = "-X k8s.io/component-base/version.gitVersion={version}"

KUBERNETES = Program(
    name="kubernetes",
    module="k8s.io/kubernetes",
    packages={
        name: f"cmd/{name}"
        for name in ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubectl")
    },
    minutes=6,
    link=_KUBERNETES_VERSION,
)
ETCD = Program(name="etcd", module="go.etcd.io/etcd/server/v3", packages={"etcd": ""}, minutes=0.5)
KWOK = Program(
    name="kwok",
    module="sigs.k8s.io/kwok",
    packages={"kwok": "cmd/kwok"},
    minutes=1,
    files={
        "node-initialize.yaml": "kustomize/stage/node/fast/node-initialize.yaml",
        "pod-ready.yaml": "kustomize/stage/pod/fast/pod-ready.yaml",
        "pod-complete.yaml": "kustomize/stage/pod/fast/pod-complete.yaml",
        "pod-delete.yaml": "kustomize/stage/pod/fast/pod-delete.yaml",
    },
)
KUBERNETES_NODE = Program(
    name="kubernetes-node",
    module="k8s.io/kubernetes",
    packages={name: f"cmd/{name}" for name in ("kubelet", "kube-proxy")},
    minutes=1.5,
    directory="kubernetes",
    link=_KUBERNETES_VERSION,
)
CONTAINERD = Program(
    name="containerd",
    module="github.com/containerd/containerd/v2",
    packages={name: f"cmd/{name}" for name in ("containerd", "containerd-shim-runc-v2", "ctr")},
    minutes=1,
)
COREDNS = Program(
    name="coredns", module="github.com/coredns/coredns", packages={"coredns": ""}, minutes=2
)
HELM = Program(name="helm", module="helm.sh/helm/v4", packages={"helm": "cmd/helm"}, minutes=2)
SEAWEEDFS = Program(
    name="seaweedfs",
    module="github.com/seaweedfs/seaweedfs",
    packages={"weed": "weed"},
    minutes=5,
)
KUEUE = Program(
    name="kueue",
    module="sigs.k8s.io/kueue",
    packages={"kueue": "cmd/kueue"},
    minutes=4,
    files={"config": "config"},
)

CONTROL_PLANE = (ETCD, KUBERNETES)
"""What a control plane needs; KWOK comes on top where pods shall seem to run."""
NODE = (*CONTROL_PLANE, KUBERNETES_NODE, CONTAINERD, COREDNS)
"""What a cluster with real nodes needs."""
ALL = (ETCD, KUBERNETES, KWOK, KUBERNETES_NODE, CONTAINERD, COREDNS, HELM)
"""In the order in which they are built: the small control plane first."""
ON_DEMAND = (SEAWEEDFS, KUEUE)
"""An S3 server and a queue, for long tests only: each is built when one of them asks for it."""
