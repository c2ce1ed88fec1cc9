"""What a job waits for, and what no waiting can cure."""

from dataclasses import dataclass

from agentjobs.api.agentjob import Waiting
from agentjobs.api.names import CauseCode, WaitingCode
from agentjobs.domain.children import JobView
from agentjobs.domain.observed import Observed
from agentjobs.domain.pods import ContainerView, PodView
from agentjobs.domain.refusal import Refusal, RefusalKind
from agentjobs.domain.texts import cut, one_line

PULL_FAILURES = frozenset({"ErrImagePull", "ImagePullBackOff", "RegistryUnavailable"})
PULL_HOPELESS = frozenset({"InvalidImageName", "ErrImageNeverPull"})
"""What the kubelet says of an image that no waiting will bring."""
ORDINARY = frozenset({"", "ContainerCreating", "PodInitializing"})


@dataclass(frozen=True, slots=True)
class Hopeless:
    """A wait that cannot end well: the attempt is ended with this cause."""

    code: CauseCode
    message: str


def hopeless(seen: Observed) -> Hopeless | None:
    """Find what no waiting can cure (R-CAUSE)."""
    for pod in seen.pods:
        if pod.dead or pod.started:
            continue
        for container in _containers(pod):
            if container.waiting_reason in PULL_HOPELESS:
                text = f"image of container {container.name}, pod {pod.name}: "
                return Hopeless(CauseCode.IMAGE_PULL, text + _unpulled(container))
    refusal = seen.refusal
    if refusal is None or seen.pods:
        return None
    if refusal.kind is RefusalKind.DENIED:
        return Hopeless(CauseCode.ADMISSION_DENIED, refusal.message)
    if refusal.kind is RefusalKind.INVALID:
        return Hopeless(CauseCode.INVALID_SPEC, refusal.message)
    return None


def waiting_for(seen: Observed, child: JobView) -> Waiting:
    """Say what a claimed attempt that does not run yet waits for."""
    if child.held_back:
        message = f"spec.suspend was set; Job {child.name} is ended, and another may follow"
        return Waiting(code=WaitingCode.SUSPENDED, message=message)
    if child.suspended and child.queued:
        message = (
            f"Job {child.name} waits in LocalQueue {child.queue} to be admitted by Kueue; "
            "its Workload says why it is not"
        )
        return Waiting(code=WaitingCode.KUEUE, message=message)
    if child.suspended:
        return Waiting(code=WaitingCode.SUSPENDED, message=f"Job {child.name} is suspended")
    alive = [pod for pod in seen.pods if not pod.dead]
    if not alive:
        return refused(seen.refusal) if seen.refusal else creating(child.name)
    return _pod_waits(alive[0])


def creating(name: str) -> Waiting:
    """The ordinary way: nothing is wrong."""
    return Waiting(code=WaitingCode.CREATING, message=f"Job {name} is starting its pod")


def refused(refusal: Refusal) -> Waiting:
    """A refusal that may cure itself, or that a person must cure."""
    code = WaitingCode.QUOTA_EXCEEDED if refusal.kind is RefusalKind.QUOTA else WaitingCode.CREATING
    return Waiting(code=code, message=cut(refusal.message, 1024))


def _pod_waits(pod: PodView) -> Waiting:
    if pod.unschedulable:
        text = f"pod {pod.name} cannot be scheduled: {pod.unschedulable}"
        return Waiting(code=WaitingCode.UNSCHEDULABLE, message=_text(text))
    for container in _containers(pod):
        reason = container.waiting_reason
        if reason in PULL_FAILURES:
            text = f"pod {pod.name}, container {container.name}: {_unpulled(container)}"
            return Waiting(code=WaitingCode.IMAGE_PULL, message=_text(text))
        if reason not in ORDINARY:
            text = f"pod {pod.name}, container {container.name}: {_reason(container)}"
            return Waiting(code=WaitingCode.CREATING, message=_text(text))
    return Waiting(code=WaitingCode.CREATING, message=f"pod {pod.name} is starting")


def _containers(pod: PodView) -> tuple[ContainerView, ...]:
    tool = (pod.tool,) if pod.tool else ()
    return (*pod.init, *tool, *pod.others)


def _reason(container: ContainerView) -> str:
    return f"{container.waiting_reason} ({one_line(container.waiting_message)})"


def _unpulled(container: ContainerView) -> str:
    """The kubelet's words, with the image where they leave it out."""
    image = "" if container.image in container.waiting_message else f" of {container.image}"
    return f"{container.waiting_reason}{image} ({one_line(container.waiting_message)})"


def _text(text: str) -> str:
    return cut(one_line(text), 1024)
