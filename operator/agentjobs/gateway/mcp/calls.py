"""What an MCP client can do: list tools, call them, follow their jobs as tasks (R-MRTR)."""

import asyncio
import contextlib
import json
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Any, Final

from pydantic import ValidationError

from agentjobs.api.agenttool import AgentTool
from agentjobs.api.inputrequest import InputKind, InputRequest
from agentjobs.api.names import State
from agentjobs.contract.calls import ResultPage, StartRequest
from agentjobs.contract.operations import MAX_PAGE_BYTES
from agentjobs.contract.problems import ProblemType
from agentjobs.domain.arguments import RESERVED_ARGUMENT
from agentjobs.domain.errors import AgentJobError, InvalidSpecError
from agentjobs.domain.idempotency import KEY_PATTERN
from agentjobs.domain.jobids import job_id
from agentjobs.domain.nesting import check_depth
from agentjobs.gateway import audit
from agentjobs.gateway.catalogue import Catalogue
from agentjobs.gateway.cursors import open_cursor, seal_cursor
from agentjobs.gateway.inputs import Inputs
from agentjobs.gateway.jobs import RECHECK_SECONDS, Jobs
from agentjobs.gateway.keys import KeyRing
from agentjobs.gateway.known import JobRecord, KnownInputs, KnownJobs
from agentjobs.gateway.mcp import tools, wire
from agentjobs.gateway.mcp.wire import Abilities, Json, WireError
from agentjobs.gateway.outputs import Outputs
from agentjobs.gateway.problems import ProblemError
from agentjobs.gateway.reviews import Caller
from agentjobs.gateway.server import Room, tenant_of
from agentjobs.gateway.starts import Starts
from agentjobs.metrics import GatewayMetrics

log = logging.getLogger(__name__)
PAGE_TOOLS: Final = 100
MAX_BUSY: Final = 256
"""Requests that are worked on at once; beyond it callers are asked to come back."""
MAX_WAITING: Final = 1000
"""Calls and subscriptions that wait at once."""
MAX_TASKS: Final = 64
"""Tasks of one subscription."""
RETRY_SECONDS: Final = 2.0
STATE_SECONDS: Final = 600
"""How long a person has for what is asked before a start."""
ASKED: Final = "arguments"
"""Key of the request for arguments that are missing."""
ANSWERABLE: Final = frozenset({InputKind.ELICITATION, InputKind.SAMPLING, InputKind.ROOTS})
PROTOCOL: Final = frozenset({ProblemType.TOOL_NOT_FOUND, ProblemType.NAMESPACE_REQUIRED})
"""Refusals of a call that are no results of a tool."""
FOLLOW: Final = "Its status: get_job_status; its result once it is done: get_job_result."
Tell = Callable[[Json], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Visit:
    """Who calls, for which namespace, with a client that can do what."""

    caller: Caller
    place: str
    client: Abilities

    @property
    def namespace(self) -> str:
        """Where tools are called: what the path names, else the caller's own (R-NAMESPACE).

        :raises ProblemError: neither is there (422).
        """
        found = self.place or self.caller.home
        if not found:
            raise ProblemError(
                ProblemType.NAMESPACE_REQUIRED,
                "use the path /mcp/NAMESPACE: the caller is no ServiceAccount, whose own is taken",
            )
        return found


@dataclass(frozen=True, slots=True)
class ToolCall:
    """The parameters of tools/call."""

    name: str
    arguments: Mapping[str, Any]
    responses: Mapping[str, Any]
    state: str | None


@dataclass(frozen=True, slots=True)
class Parts:
    """What the calls are made of."""

    starts: Starts
    jobs: Jobs
    inputs: Inputs
    outputs: Outputs
    catalogue: Catalogue
    known: KnownJobs
    questions: KnownInputs
    keys: KeyRing


class Calls:
    """The calls. Nothing is kept here: what there is to know is on the cluster."""

    def __init__(
        self, parts: Parts, metrics: GatewayMetrics, *, plain: bool, sync_seconds: float
    ) -> None:
        """Prepare.

        :param plain: whether there are tools for clients that know no tasks.
        :param sync_seconds: how long such a client waits for the end of a tool.
        """
        self._parts = parts
        self._metrics = metrics
        self._plain = plain
        self._sync_seconds = sync_seconds
        self._busy = Room(MAX_BUSY, "requests are under way")
        self._waiting = Room(MAX_WAITING, "calls and subscriptions wait")

    @contextlib.contextmanager
    def busy(self, caller: Caller) -> Iterator[None]:
        """A place for a request that is answered at once.

        :raises ProblemError: there is none (503).
        """
        with self._busy.place(tenant_of(caller, None)):
            yield

    @contextlib.contextmanager
    def _wait(self, caller: Caller) -> Iterator[None]:
        in_progress = self._metrics.waiting.track_inprogress()
        with self._waiting.place(tenant_of(caller, None)), in_progress:
            yield

    # --- tools

    async def tools(self, visit: Visit, cursor: str | None, *, only: str = "") -> Json:
        """A page of the tools that the caller may use.

        :param only: the tool of that name alone.
        """
        namespace = visit.namespace
        name = only.removeprefix(tools.START)
        usable = await self._parts.catalogue.usable(visit.caller, namespace, only=name)
        listed = tools.definitions(usable, plain=self._plain)
        if cursor:
            after = str(await self._opened(f"tools {namespace}", cursor))
            listed = [each for each in listed if each["name"] > after]
        page = listed[:PAGE_TOOLS]
        answer: Json = {"tools": page}
        if len(listed) > len(page):
            last = page[-1]["name"]
            keys = self._parts.keys.current
            answer["nextCursor"] = seal_cursor(keys, f"tools {namespace}", last)
        return answer

    async def call(self, visit: Visit, call: ToolCall) -> Json:
        """Call a tool: a task; for other clients its result, or the handle of its job.

        :raises WireError: the protocol has an error for it.
        :raises ProblemError: the same.
        """
        try:
            if self._plain and call.name in tools.FOLLOW_UP_NAMES:
                with self.busy(visit.caller):
                    return await self._follow_up(visit, call)
            return await self._start(visit, call)
        except ProblemError as problem:
            ours = problem.kind.status >= HTTPStatus.INTERNAL_SERVER_ERROR
            if ours or problem.kind in PROTOCOL:
                raise
            return wire.problem_result(problem)

    async def _start(self, visit: Visit, call: ToolCall) -> Json:
        _check_json(call.arguments)
        plain = self._plain and call.name.startswith(tools.START)
        tool = call.name.removeprefix(tools.START) if plain else call.name
        arguments = {**call.arguments}
        key = _key(arguments.pop(RESERVED_ARGUMENT, None))
        if call.state is not None:
            sealed = await self._opened_state(visit, call, arguments)
            key = key or sealed
            given = call.responses.get(ASKED)
            if isinstance(given, Mapping) and given.get("action") in {"decline", "cancel"}:
                return wire.declined_result(tool)
            content = given.get("content") if isinstance(given, Mapping) else None
            arguments |= content if isinstance(content, Mapping) else {}
            _check_json(arguments)
        key = key or secrets.token_urlsafe(32)
        asked = await self._ask_before(visit, call, tool, key, arguments)
        if asked:
            return asked
        # Who hangs up does not break off what was begun.
        record = await asyncio.shield(self._begin(visit, tool, key, arguments))
        if plain:
            return wire.handle_result(record, FOLLOW)
        if visit.client.tasks:
            return wire.created_task(self._task(visit, record))
        return await self._synchronously(visit, record)

    async def _begin(self, visit: Visit, tool: str, key: str, arguments: Json) -> JobRecord:
        """Start the job, or find the one that this key has started (R-KEY)."""
        caller, namespace = visit.caller, visit.namespace
        try:
            request = StartRequest(tool=tool, arguments=arguments)
        except ValidationError as error:
            raise _no_such_tool(visit, tool) from error
        with self.busy(caller):
            keys = self._parts.keys.current
            outcome = await self._parts.starts.start(keys, caller, namespace, key, request)
        record = outcome.record
        audit.record(
            "start", caller, job_id(*record.name), tool=record.tool, digest=record.digest,
            repeated="true" if outcome.repeated else "", over="mcp",
        )  # fmt: skip
        return record

    async def _synchronously(self, visit: Visit, record: JobRecord) -> Json:
        """Wait for the end of a job, within the bound."""
        clock = asyncio.get_running_loop().time
        end = clock() + self._sync_seconds
        this = job_id(*record.name)
        with self._wait(visit.caller):
            while not record.over and (left := end - clock()) > 0:
                if self._parts.known.changes.closed or self._open(record):
                    break
                seconds = min(left, RECHECK_SECONDS)
                record = await self._parts.jobs.status(visit.caller, this, wait=seconds)
        if not record.over:
            asks = "It asks something: answer over HTTP. " if self._open(record) else ""
            return wire.handle_result(record, asks + FOLLOW)
        fault = wire.fault_of(record)
        if fault:
            raise fault
        return await self._result(visit, record)

    async def _follow_up(self, visit: Visit, call: ToolCall) -> Json:
        """The tools for clients that know no tasks."""
        jobs, given = self._parts.jobs, call.arguments
        this = given.get("job_id")
        if not isinstance(this, str):
            raise ProblemError(ProblemType.INVALID_ARGUMENTS, "job_id is required, a string")
        if call.name == "get_job_status":
            return wire.status_result(await jobs.find(visit.caller, this))
        if call.name == "stop_job":
            reason = given.get("reason")
            record = await jobs.stop(visit.caller, this, reason if isinstance(reason, str) else "")
            audit.record("stop", visit.caller, this, over="mcp")
            return wire.status_result(record)
        limit, cursor = given.get("limit"), given.get("cursor")
        page = await self._page(
            visit,
            this,
            cursor if isinstance(cursor, str) else "",
            min(max(limit, 4), MAX_PAGE_BYTES) if isinstance(limit, int) else MAX_PAGE_BYTES,
        )
        return wire.page_result(page)

    # --- what is asked before a start

    async def _ask_before(
        self, visit: Visit, call: ToolCall, tool: str, key: str, arguments: Json
    ) -> Json | None:
        """Ask the person for arguments that the model has left out, if they can be asked."""
        if wire.ELICIT not in visit.client.asked:
            return None
        found = await self._parts.catalogue.usable(visit.caller, visit.namespace, only=tool)
        form = _missing(found[0], arguments) if found else None
        if form is None:
            return None
        first = {k: v for k, v in call.arguments.items() if k != RESERVED_ARGUMENT}
        value = [key, time.time() + STATE_SECONDS, audit.digest_of(first)]
        state = seal_cursor(self._parts.keys.current, _purpose(visit, call), value)
        asked = wire.elicitation(f"{tool} needs {', '.join(form['required'])}.", form)
        return {
            "resultType": "input_required",
            "inputRequests": {ASKED: asked},
            "requestState": state,
        }

    async def _opened_state(self, visit: Visit, call: ToolCall, arguments: Json) -> str:
        """The key in a state that we have given for this very call.

        :raises WireError: it is not ours, for somebody or something else, or too old.
        """
        bad = WireError(
            wire.INVALID_PARAMS,
            "Invalid or expired requestState",
            {"reason": "invalid_request_state"},
        )
        try:
            key, expires, digest = await self._opened(_purpose(visit, call), call.state or "")
        except ProblemError as error:
            raise bad from error
        if time.time() >= expires or digest != audit.digest_of(arguments):
            raise bad
        return str(key)

    async def _opened(self, purpose: str, token: str) -> Any:
        async def read(keys: Any) -> Any:
            return open_cursor(keys, purpose, token)

        return await self._parts.keys.with_cursor(read)

    # --- tasks

    async def get(self, visit: Visit, task_id: str) -> Json:
        """A task as it is now, with what belongs to its status."""
        return await self._detailed(visit, await self._own(visit, task_id))

    async def update(self, visit: Visit, task_id: str, responses: Mapping[str, Any]) -> None:
        """Answer questions of a task; what is asked no more, or never was, is passed over.

        :raises ProblemError: an answer is not as its question asks; the others are taken.
        """
        record = await self._own(visit, task_id)
        refused: ProblemError | None = None
        for key, response in responses.items():
            try:
                await self._answer(visit, record, key, response)
            except ProblemError as error:
                if error.kind.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
                    raise
                if error.kind not in {ProblemType.NOT_FOUND, ProblemType.ALREADY_ANSWERED}:
                    refused = error
        if refused:
            raise refused

    async def _answer(self, visit: Visit, record: JobRecord, key: str, response: Any) -> None:
        question = await self._parts.inputs.question(record, key)
        if question.spec.kind not in ANSWERABLE:
            return
        given = wire.answer_of(question.spec.kind, response)
        if given is None:
            return
        _check_json(given.answer or {})
        this = job_id(*record.name)
        await self._parts.inputs.answer(visit.caller, this, key, given)
        digest = audit.digest_of(given.answer) if given.answer is not None else ""
        audit.record(
            "answer", visit.caller, this,
            key=key, outcome=given.outcome, digest=digest, over="mcp",
        )  # fmt: skip

    async def cancel(self, visit: Visit, task_id: str) -> None:
        """Ask for the end of a task; again, or after its end, that changes nothing."""
        record = await self._own(visit, task_id)
        this = job_id(*record.name)
        try:
            await self._parts.jobs.stop(visit.caller, this, "cancelled by the MCP client")
        except ProblemError as error:
            if error.kind is not ProblemType.ALREADY_STOPPED:
                raise
        else:
            audit.record("stop", visit.caller, this, over="mcp")

    async def agreed(self, visit: Visit, task_ids: Sequence[str]) -> list[str]:
        """Those of these tasks that the caller is told of; of others nothing is said."""
        found = []
        for each in dict.fromkeys(task_ids):
            with contextlib.suppress(WireError):
                await self._own(visit, each)
                found.append(each)
        return found[:MAX_TASKS]

    async def follow(self, visit: Visit, task_ids: Sequence[str], tell: Tell) -> None:
        """Tell of each task as it is, and whenever it has changed, until all are over.

        :raises ProblemError: there is no room to wait (503).
        """
        with self._wait(visit.caller):
            async with asyncio.TaskGroup() as group:
                for each in task_ids:
                    group.create_task(self._follow(visit, each, tell))

    async def _follow(self, visit: Visit, task_id: str, tell: Tell) -> None:
        told: Json | None = None
        while True:
            try:
                # Each time anew: who may no longer see it is told nothing more (R-AUTH).
                record = await self._own(visit, task_id)
                shown = self._shown(record)
                task = await self._detailed(visit, record)
            except WireError:
                return
            except AgentJobError as error:
                # The API server or the store: the stream outlives it, unless we end.
                if self._parts.known.changes.closed:
                    return
                log.warning("task %s cannot be told of: %s", task_id, error)
                await asyncio.sleep(RETRY_SECONDS)
                continue
            if task != told:
                await tell(task)
                told = task
            if record.over or self._parts.known.changes.closed:
                return
            if self._shown(record) == shown:
                await self._change(record)

    def _shown(self, record: JobRecord) -> tuple[Any, ...]:
        """What a task is made of, to see whether it has changed."""
        known = self._parts.known.get(record.name)
        asked = self._parts.questions.of(record.uid)
        return known and known.tag, [each.metadata.resource_version for each in asked]

    async def _change(self, record: JobRecord) -> None:
        """Wait for a change of a job or of its questions; for a look at rights at the latest."""
        parts = self._parts
        waits = (
            asyncio.ensure_future(parts.known.changes.wait(record.name, RECHECK_SECONDS)),
            asyncio.ensure_future(parts.questions.changes.wait(record.uid, RECHECK_SECONDS)),
        )
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in waits:
                each.cancel()

    async def _own(self, visit: Visit, task_id: str) -> JobRecord:
        """A job that the caller has started; others look as if they were not there (R-AUTH)."""
        try:
            record = await self._parts.jobs.find(visit.caller, task_id)
        except ProblemError as error:
            if error.kind is not ProblemType.JOB_NOT_FOUND:
                raise
            raise _no_such_task() from error
        if record.caller != visit.caller.name:
            raise _no_such_task()
        return record

    async def _detailed(self, visit: Visit, record: JobRecord) -> Json:
        task = self._task(visit, record)
        fault = wire.fault_of(record) if task["status"] == "failed" else None
        if fault:
            task["error"] = {"code": fault.code, "message": fault.message, "data": fault.data}
        if task["status"] == "completed":
            task["result"] = {**await self._result(visit, record), "resultType": "complete"}
        return task

    def _task(self, visit: Visit, record: JobRecord) -> Json:
        return wire.task_of(record, self._open(record), visit.client)

    def _open(self, record: JobRecord) -> tuple[InputRequest, ...]:
        """Questions that wait for an answer of the job's requester."""
        now = datetime.now(UTC)
        return tuple(
            each
            for each in self._parts.questions.of(record.uid)
            if each.status.outcome is None
            and now < each.spec.expires_at
            and each.spec.kind in ANSWERABLE
        )

    async def _result(self, visit: Visit, record: JobRecord) -> Json:
        page = None
        if record.state is State.DONE:
            page = await self._page(visit, job_id(*record.name), "", MAX_PAGE_BYTES)
        return wire.result_of(record, page)

    async def _page(self, visit: Visit, this: str, cursor: str, limit: int) -> ResultPage:
        job = await self._parts.jobs.done(visit.caller, this)
        return await self._parts.keys.with_cursor(
            lambda keys: self._parts.outputs.result(keys, job, cursor=cursor, limit=limit)
        )


def _purpose(visit: Visit, call: ToolCall) -> str:
    return f"call {visit.caller.name} {visit.namespace} {call.name}"


def _key(given: Any) -> str:
    """The key that a call brings; empty: none.

    :raises ProblemError: it is none.
    """
    if given is None:
        return ""
    if not isinstance(given, str) or not KEY_PATTERN.fullmatch(given):
        raise ProblemError(
            ProblemType.INVALID_ARGUMENTS,
            f"{RESERVED_ARGUMENT} has 1 to 255 characters of visible ASCII",
        )
    return given


def _check_json(value: Any) -> None:
    """Refuse what is JSON for Python's reader alone.

    :raises ProblemError: nested too deeply, no number, or half of a character.
    """
    try:
        check_depth(value, "arguments")
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
    except (InvalidSpecError, ValueError) as error:
        raise ProblemError(ProblemType.INVALID_ARGUMENTS, str(error)[:200]) from error


def _missing(tool: AgentTool, arguments: Mapping[str, Any]) -> Json | None:
    """A form for the required arguments that are missing; None where it cannot be filled in."""
    schema = tool.spec.input_schema or {}
    properties = schema.get("properties") or {}
    names = [
        name
        for name in schema.get("required") or ()
        if name not in arguments and "default" not in (properties.get(name) or {})
    ]
    if not names or not all(wire.is_flat(properties.get(name)) for name in names):
        return None
    fields = {name: properties[name] for name in names}
    return {"type": "object", "properties": fields, "required": names}


def _no_such_tool(visit: Visit, tool: str) -> ProblemError:
    return ProblemError(
        ProblemType.TOOL_NOT_FOUND,
        f"namespace {visit.namespace} has no tool {tool[:64]} that {visit.caller.name} may use",
    )


def _no_such_task() -> WireError:
    return WireError(wire.INVALID_PARAMS, "There is no such task")
