"""Starts: one AgentJob for each caller's key, whatever is repeated, raced or lost (R-KEY)."""

import asyncio
import logging
import random
import re
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Never

from agentjobs.api.agentjob import AgentJob, ToolKind
from agentjobs.api.agenttool import AgentTool
from agentjobs.contract.calls import Fault, StartRequest
from agentjobs.contract.problems import ProblemType
from agentjobs.domain.arguments import check_size
from agentjobs.domain.destinations import as_address, host_of
from agentjobs.domain.errors import AgentJobError, InvalidSpecError
from agentjobs.domain.idempotency import job_name, payload_of_request, payload_of_spec
from agentjobs.domain.jobids import parse_job_id
from agentjobs.domain.observed import Policy
from agentjobs.domain.start import InvalidArgumentsError, Start, agentjob_of
from agentjobs.gateway.keys import Keys
from agentjobs.gateway.known import JobRecord, KnownJobs, KnownTools, Name, record_of
from agentjobs.gateway.problems import ProblemError, try_later
from agentjobs.gateway.reviews import Caller, Reviews, Right
from agentjobs.kube import (
    AGENTJOBS,
    ConflictError,
    Kube,
    KubeError,
    NotFoundError,
    UnavailableError,
)
from agentjobs.lookups import LookUps
from agentjobs.metrics import GatewayMetrics

log = logging.getLogger(__name__)
PATIENCE_SECONDS = 10.0
"""How long an API server that does not answer is asked again, always for the same name."""
FIRST_PAUSE = 0.05
LARGEST_PAUSE = 1.0
QUOTA_RETRY_SECONDS = 30
QUOTA = re.compile(
    r"exceeded quota: (?P<quota>[^,]+), requested: [^,]*, used: [^,]*, "
    r"limited: (?P<what>[^=,]+)=(?P<limit>[^,\s]+)"
)


@dataclass(frozen=True, slots=True)
class Places:
    """Where the gateway may run what."""

    denied: frozenset[str]
    """Namespaces in which it runs nothing (R-POLICY-PLACES)."""
    templates: bool
    """Whether callers may bring a template of their own."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a start."""

    record: JobRecord
    repeated: bool
    """Whether the job was there before."""


class Starts:
    """Starts jobs for callers who may."""

    def __init__(
        self,
        kube: Kube,
        jobs: KnownJobs,
        tools: tuple[KnownTools, KnownTools],
        reviews: Reviews,
        places: Places,
        policy: Policy,
        metrics: GatewayMetrics,
    ) -> None:
        """Prepare.

        :param tools: those of namespaces, and those of the cluster.
        """
        self._kube = kube
        self._jobs = jobs
        self._tools, self._cluster_tools = tools
        self._reviews = reviews
        self._places = places
        self._policy = policy
        self._metrics = metrics
        self._lookups = LookUps()

    async def start(
        self, keys: Keys, caller: Caller, namespace: str, key: str, request: StartRequest
    ) -> Outcome:
        """Start a job, or find the one that this key has started.

        :raises ProblemError: refused; nothing was stored, and the key is as good as new.
        """
        try:
            # Before anything is waited for: what waits stands in memory, many times its size.
            check_size(request.arguments or {}, self._policy.max_arguments)
        except InvalidSpecError as error:
            raise ProblemError(ProblemType.UNRUNNABLE, str(error)) from error
        await self._check_place(caller, namespace, request)
        name = Name(namespace, job_name(keys.name, namespace, caller.name, key))
        digest = payload_of_request(request).digest
        known = self._jobs.get(name)
        if known:
            if known.digest == digest:
                return Outcome(known, repeated=True)
            found = await self._read(name)
            if found:
                return _same(found, request)
        try:
            body = await self._agentjob(caller, name, request)
        except ProblemError:
            # What another replica has started is found, whatever became of its tool since.
            found = await self._read(name)
            if found:
                return _same(found, request)
            raise
        return await self._create(name, body, request)

    def tool(self, namespace: str, name: str) -> tuple[AgentTool, ToolKind] | None:
        """The tool of that name: one of the namespace hides one of the cluster."""
        own = self._tools.get(namespace, name)
        if own:
            return own, ToolKind.AGENT_TOOL
        wide = self._cluster_tools.get("", name)
        return (wide, ToolKind.CLUSTER_AGENT_TOOL) if wide else None

    async def may_use(self, caller: Caller, namespace: str, name: str, kind: ToolKind) -> bool:
        """Whether a caller may start a tool."""
        if kind is ToolKind.CLUSTER_AGENT_TOOL:
            return await self._reviews.allowed(caller, Right("use", "clusteragenttools", "", name))
        return await self._reviews.allowed(caller, Right("use", "agenttools", namespace, name))

    async def _check_place(self, caller: Caller, namespace: str, request: StartRequest) -> None:
        if namespace in self._places.denied:
            raise ProblemError(
                ProblemType.NAMESPACE_DENIED, f"the gateway runs nothing in namespace {namespace}"
            )
        if request.template is not None and not self._places.templates:
            raise ProblemError(
                ProblemType.TEMPLATES_DENIED,
                "start a tool of the catalogue; a platform team can allow templates with the "
                "chart's value gateway.allowTemplates",
            )
        await self._reviews.require(caller, Right("create", "agentjobs", namespace))
        if request.template is not None:
            await self._reviews.require(caller, Right("create", "jobs", namespace, group="batch"))

    async def _agentjob(self, caller: Caller, name: Name, request: StartRequest) -> dict[str, Any]:
        """The AgentJob to create.

        :raises ProblemError: the caller may not start it, or it could never run.
        """
        start = await self._checked(caller, name, request)
        try:
            if request.callback:
                await self._check_receiver(name.namespace, request.callback.url)
            return agentjob_of(start, self._policy, datetime.now(UTC))
        except InvalidArgumentsError as error:
            raise ProblemError(
                ProblemType.INVALID_ARGUMENTS,
                f"tool {request.tool} does not take these arguments",
                faults=error.faults,
            ) from error
        except InvalidSpecError as error:
            raise ProblemError(ProblemType.UNRUNNABLE, str(error)) from error

    async def _check_receiver(self, namespace: str, url: str) -> None:
        """Check where a receiver's name leads.

        :raises InvalidSpecError: to where no event may be sent.
        """
        self._policy.destinations.check_url(namespace, url)
        host, _ = host_of(url)
        if as_address(host) is None:
            found = await self._lookups.addresses_of(host)
            self._policy.destinations.check_found(namespace, url, found)

    async def _checked(self, caller: Caller, name: Name, request: StartRequest) -> Start:
        """Check what depends on other objects.

        :raises ProblemError: an unknown tool, or one that the caller may not use: both look alike.
        """
        await self._check_dependencies(caller, name.namespace, request)
        start = Start(request, name.namespace, name.name, caller.name)
        if request.tool is None:
            return start
        found = self.tool(name.namespace, request.tool)
        if found is None or not await self.may_use(caller, name.namespace, request.tool, found[1]):
            raise ProblemError(
                ProblemType.TOOL_NOT_FOUND,
                f"namespace {name.namespace} has no tool {request.tool} that {caller.name} may use",
            )
        return Start(request, name.namespace, name.name, caller.name, *found)

    async def _check_dependencies(
        self, caller: Caller, namespace: str, request: StartRequest
    ) -> None:
        faults = []
        for index, each in enumerate(request.depends_on or ()):
            place = parse_job_id(each)
            if place is None or place[0] != namespace or not await self._exists(caller, place):
                detail = f"there is no such job in namespace {namespace}"
                faults.append(Fault(pointer=f"/depends_on/{index}", detail=detail))
        if faults:
            raise ProblemError(
                ProblemType.INVALID_BODY, "depends_on names jobs that do not exist", faults=faults
            )

    async def _exists(self, caller: Caller, place: tuple[str, str]) -> bool:
        name = Name(*place)
        if not await self._reviews.allowed(caller, Right("get", "agentjobs", *name)):
            return False
        return self._jobs.get(name) is not None or await self._read(name) is not None

    async def _read(self, name: Name) -> dict[str, Any] | None:
        try:
            body = await self._kube.get(AGENTJOBS, *name)
        except NotFoundError:
            return None
        self._jobs.wrote(body)
        return body

    async def _create(self, name: Name, body: dict[str, Any], request: StartRequest) -> Outcome:
        """Create the AgentJob; whoever else creates it at the same time gets the same one."""
        loop = asyncio.get_running_loop()
        end = loop.time() + PATIENCE_SECONDS
        pause = FIRST_PAUSE
        while True:
            outcome = await self._create_once(name, body, request)
            if isinstance(outcome, Outcome):
                return outcome
            if loop.time() + pause > end:
                log.warning("AgentJob %s/%s could not be created: %s", *name, outcome)
                raise try_later(
                    ProblemType.UNAVAILABLE, "repeat the request with the same Idempotency-Key"
                ) from outcome
            await asyncio.sleep(pause * random.uniform(0.5, 1))  # noqa: S311 - no secret
            pause = min(2 * pause, LARGEST_PAUSE)

    async def _create_once(
        self, name: Name, body: dict[str, Any], request: StartRequest
    ) -> Outcome | AgentJobError:
        """Try to create it; return why that must be tried again.

        :raises ProblemError: refused.
        """
        try:
            made = await self._kube.create(AGENTJOBS, name.namespace, body)
        except UnavailableError as error:
            return error
        except KubeError as refusal:
            # Its name is taken: by an equal start, or by one that used this key before us. Or there
            # is a reason younger than the job: a quota that it has filled.
            found = await self._read(name)
            if found:
                return _same(found, request)
            if not isinstance(refusal, ConflictError) and not _passes(refusal):
                self._refused(name.namespace, refusal)
            return refusal
        self._jobs.wrote(made)
        return Outcome(record_of(made), repeated=False)

    def _refused(self, namespace: str, refusal: KubeError) -> Never:
        message = str(refusal.status.get("message") or "")
        quota = QUOTA.search(message)
        if quota:
            self._metrics.quota_refusals.inc()
            raise try_later(
                ProblemType.QUOTA_EXCEEDED,
                f"namespace {namespace}: quota {quota['quota']} allows {quota['what']}="
                f"{quota['limit']}; try again, with the same key, when jobs have been deleted",
                QUOTA_RETRY_SECONDS,
            ) from refusal
        if "cannot create resource" in message:
            # Ours, not the caller's.
            log.error("the gateway's account lacks a right: %s", message)
            raise try_later(
                ProblemType.UNAVAILABLE, "the gateway itself lacks a right; see its log"
            ) from refusal
        log.info("the API server refused an AgentJob in %s: %s", namespace, message)
        if isinstance(refusal, NotFoundError):
            raise ProblemError(
                ProblemType.UNRUNNABLE, f"there is no namespace {namespace}"
            ) from refusal
        kind = ProblemType.FORBIDDEN if refusal.code == 403 else ProblemType.UNRUNNABLE  # noqa: PLR2004
        raise ProblemError(kind, message) from refusal


def _passes(refusal: KubeError) -> bool:
    """Whether a refusal passes by itself: a quota that is new and not counted yet."""
    return "status unknown for quota" in str(refusal.status.get("message") or "")


def _same(body: dict[str, Any], request: StartRequest) -> Outcome:
    """The job that is there, if it is what was asked for.

    :raises ProblemError: the key was used for something else; says for what members, not how.
    """
    record = record_of(body)
    asked = payload_of_request(request)
    if record.digest == asked.digest:
        return Outcome(record, repeated=True)
    job = AgentJob.from_json(body)
    first = payload_of_spec(job.spec, record.name.namespace)
    differs = asked.differs_from(first) or ("payload",)
    raise ProblemError(
        ProblemType.KEY_REUSED,
        f"this key has started {record.name.name}.{record.name.namespace} with other "
        f"{' and '.join(differs)}; use a new key for a new job",
        differs=differs,
        job_id=f"{record.name.name}.{record.name.namespace}",
    )
