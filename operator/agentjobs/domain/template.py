"""What of a JobTemplateSpec we refuse, and what we take over from it (R-TEMPLATE).

Everything else is kept as given and checked by the API server when the Job is created.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from agentjobs.api.names import GROUP, LABEL_QUEUE, MAX_DURATION_SECONDS, VOLUME
from agentjobs.domain.errors import InvalidSpecError
from agentjobs.domain.nesting import check_depth

TEMPLATE_FIELDS = frozenset({"metadata", "spec"})
RESERVED_PREFIX = f"{GROUP}/"


@dataclass(frozen=True, slots=True)
class Template:
    """A JobTemplateSpec that passed our checks, and what of it becomes the AgentJob's."""

    body: Mapping[str, Any]
    active_deadline: int | None = None
    ttl: int | None = None
    suspend: bool | None = None
    queue: str | None = None
    repeats: str = ""
    """The field by which the author has decided on repetitions; it excludes `retry`."""


def read_template(body: Any, *, namespace: str, path: str = "spec.template") -> Template:
    """Check a template and take out what becomes the AgentJob's.

    :param body: the JobTemplateSpec as given.
    :param namespace: of the AgentJob; a template may name no other. Empty: any name is refused.
    :param path: how messages call the template.
    :raises InvalidSpecError: the first thing that we refuse.
    """
    check_depth(body, path)
    template = _mapping(body, path)
    for unknown in [key for key in template if key not in TEMPLATE_FIELDS]:
        raise InvalidSpecError(
            f"{path}.{unknown}: unknown field; a template has metadata and spec, nothing else"
        )
    spec = _mapping(template.get("spec"), f"{path}.spec")
    pod = _mapping(spec.get("template"), f"{path}.spec.template")
    pod_spec = _mapping(pod.get("spec"), f"{path}.spec.template.spec")
    pod_path = f"{path}.spec.template"
    labels = _metadata(template, path, namespace)
    _metadata(pod, pod_path, namespace)
    _selector(spec, f"{path}.spec")
    _pod_spec(pod_spec, f"{pod_path}.spec")
    queue = labels.get(LABEL_QUEUE)
    return Template(
        body=template,
        active_deadline=_duration(spec, "activeDeadlineSeconds", f"{path}.spec"),
        ttl=_duration(spec, "ttlSecondsAfterFinished", f"{path}.spec"),
        suspend=_boolean(spec, "suspend", f"{path}.spec"),
        queue=queue if isinstance(queue, str) else None,
        repeats=_repeats(spec, pod_spec),
    )


def containers_of(pod_spec: Mapping[str, Any], field: str) -> Iterator[Mapping[str, Any]]:
    """Yield the containers of a pod spec, skipping what is none."""
    values = pod_spec.get(field)
    if isinstance(values, list):
        yield from (value for value in values if isinstance(value, Mapping))


def _mapping(value: Any, path: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise InvalidSpecError(f"{path}: an object is required")
    return value


def _metadata(owner: Mapping[str, Any], path: str, namespace: str) -> Mapping[str, Any]:
    """Refuse what would give a Job or pod to somebody else; return the labels."""
    if owner.get("metadata") is None:
        return {}
    meta = _mapping(owner["metadata"], f"{path}.metadata")
    for field in ("finalizers", "ownerReferences"):
        if meta.get(field):
            raise InvalidSpecError(
                f"{path}.metadata.{field}: not allowed; a run belongs to its AgentJob alone"
            )
    if meta.get("namespace") not in {None, "", namespace}:
        raise InvalidSpecError(
            f"{path}.metadata.namespace: {meta['namespace']!r} is not the AgentJob's namespace"
        )
    for field in ("labels", "annotations"):
        for key in _mapping(meta.get(field) or {}, f"{path}.metadata.{field}"):
            if str(key).startswith(RESERVED_PREFIX):
                raise InvalidSpecError(
                    f"{path}.metadata.{field}[{key}]: names under {RESERVED_PREFIX} are reserved"
                )
    return meta.get("labels") or {}


def _selector(spec: Mapping[str, Any], path: str) -> None:
    if spec.get("manualSelector"):
        raise InvalidSpecError(
            f"{path}.manualSelector: not allowed; with it the Job would adopt foreign pods"
        )
    if spec.get("selector") is not None:
        raise InvalidSpecError(f"{path}.selector: not allowed; the selector is always generated")


def _pod_spec(pod: Mapping[str, Any], path: str) -> None:
    if pod.get("restartPolicy") == "Always":
        raise InvalidSpecError(f"{path}.restartPolicy: Always never ends; use OnFailure or Never")
    for container in containers_of(pod, "containers"):
        if container.get("restartPolicy") == "Always":
            raise InvalidSpecError(
                f"{path}.containers[{container.get('name')}].restartPolicy: Always never ends; "
                "use OnFailure or Never"
            )
    for volume in containers_of(pod, "volumes"):
        if volume.get("name") == VOLUME:
            raise InvalidSpecError(f"{path}.volumes[{VOLUME}]: this volume name is reserved")


def _duration(spec: Mapping[str, Any], field: str, path: str) -> int | None:
    value = spec.get(field)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool):
        raise InvalidSpecError(f"{path}.{field}: a whole number of seconds is required")
    if not 0 <= value <= MAX_DURATION_SECONDS:
        raise InvalidSpecError(
            f"{path}.{field}: {value} is not between 0 and {MAX_DURATION_SECONDS} seconds"
        )
    return value


def _boolean(spec: Mapping[str, Any], field: str, path: str) -> bool | None:
    value = spec.get(field)
    if value is not None and not isinstance(value, bool):
        raise InvalidSpecError(f"{path}.{field}: true or false is required")
    return value


def _repeats(spec: Mapping[str, Any], pod: Mapping[str, Any]) -> str:
    if spec.get("backoffLimit"):
        return "backoffLimit"
    for field in ("backoffLimitPerIndex", "podFailurePolicy"):
        if spec.get(field) is not None:
            return field
    return "restartPolicy OnFailure" if pod.get("restartPolicy") == "OnFailure" else ""
