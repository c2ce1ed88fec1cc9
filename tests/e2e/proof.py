"""What the tools say themselves: each appends a line to a file of its node when it begins."""

import subprocess
from collections import Counter
from dataclasses import dataclass
from typing import Any

from tests.cluster.local import LocalCluster

DIRECTORY = "/var/lib/agentjobs-proof"
MOUNT = "/proof"
LINE = f'echo "$AGENTJOBS_JOB_ID $AGENTJOBS_ATTEMPT $HOSTNAME" >> {MOUNT}/began'


@dataclass(frozen=True)
class Proof:
    """The files of one namespace's tools."""

    cluster: LocalCluster
    namespace: str

    def pod(self) -> dict[str, Any]:
        """What a pod needs so that its tool can run `LINE`."""
        place = {"path": f"{DIRECTORY}/{self.namespace}", "type": "DirectoryOrCreate"}
        return {
            "volumes": [{"name": "proof", "hostPath": place}],
            "container": {"volumeMounts": [{"name": "proof", "mountPath": MOUNT}]},
        }

    def began(self) -> Counter[str]:
        """How often the tool of each job has begun, by the job's id."""
        begun: Counter[str] = Counter()
        for node in self.cluster.nodes:
            file = f"{DIRECTORY}/{self.namespace}/began"
            command = [str(part) for part in node.inside("cat", file)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            # Where no tool has run there is no file.
            begun.update(line.split()[0] for line in done.stdout.splitlines())
        return begun
