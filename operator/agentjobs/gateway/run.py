"""The gateway as a process: its parts, and the order of their lives."""

import asyncio
import logging
import signal
import ssl
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aiohttp import web

from agentjobs import codec
from agentjobs.api.agentjob import ToolKind
from agentjobs.api.names import State
from agentjobs.contract import operations
from agentjobs.contract.asyncapi import asyncapi_document
from agentjobs.contract.calls import Answer, QuestionList, SigningKeys, Started, Stopped, ToolList
from agentjobs.contract.openapi import openapi_document
from agentjobs.contract.operations import (
    DEFAULT_PAGE_JOBS,
    KEY,
    MAX_PAGE_BYTES,
    OCTETS,
    REPORTING_JOB,
    Stream,
)
from agentjobs.contract.problems import ProblemType
from agentjobs.domain.destinations import Destinations
from agentjobs.domain.errors import AgentJobError
from agentjobs.domain.jobids import job_id
from agentjobs.domain.observed import Policy
from agentjobs.expiring import Expiring
from agentjobs.gateway import audit
from agentjobs.gateway.asks import Asks
from agentjobs.gateway.catalogue import Catalogue
from agentjobs.gateway.connections import Listener
from agentjobs.gateway.inputs import Inputs
from agentjobs.gateway.jobs import Filter, Jobs, Page
from agentjobs.gateway.keys import KeyRing
from agentjobs.gateway.known import KnownInputs, KnownJobs, KnownTools
from agentjobs.gateway.mcp.calls import Calls, Parts
from agentjobs.gateway.outputs import Outputs, Which
from agentjobs.gateway.pieces import Pieces
from agentjobs.gateway.pods import JobsOfPods
from agentjobs.gateway.problems import ProblemError, try_later
from agentjobs.gateway.reflector import Reflector
from agentjobs.gateway.reports import Reports
from agentjobs.gateway.reviews import Pod, Reviews
from agentjobs.gateway.server import SAFE, Call, Server, answer
from agentjobs.gateway.starts import Places, Starts
from agentjobs.gateway.tls import Certificate
from agentjobs.kube import (
    AGENTJOBS,
    AGENTTOOLS,
    CLUSTERAGENTTOOLS,
    CONFIGMAPS,
    INPUTREQUESTS,
    Kube,
    NotFoundError,
)
from agentjobs.metrics import OPEN_METRICS, GatewayMetrics
from agentjobs.settings import GatewaySettings, SettingsError
from agentjobs.store import OutputStore

if TYPE_CHECKING:
    from agentjobs.gateway.mcp.listener import McpListener

log = logging.getLogger(__name__)
RETRY_SECONDS = 2.0
KEYS_SECONDS = 60.0
"""How often the keys that seal cursors are read again."""
RETRY_AFTER_START = 2
"""Seconds after which a client that polls asks for the first time."""
SIGNING_KEYS = "agentjobs-signing-key"
SIGNING_KEYS_SECONDS = 60.0
NEVER = "kube-system"


class Gateway:
    """Serves the contract until a signal comes."""

    def __init__(
        self,
        settings: GatewaySettings,
        kube: Kube,
        metrics: GatewayMetrics,
        destinations: Destinations,
        store: OutputStore | None,
    ) -> None:
        self._settings = settings
        self._kube = kube
        self._metrics = metrics
        self._keys = KeyRing(kube, settings.namespace)
        self._unready = "no contact with the API server yet"
        self._known = KnownJobs()
        own, wide = KnownTools(ToolKind.AGENT_TOOL), KnownTools(ToolKind.CLUSTER_AGENT_TOOL)
        inputs = self._questions = KnownInputs()
        self._reflectors = (
            Reflector(kube, AGENTTOOLS, own),
            Reflector(kube, CLUSTERAGENTTOOLS, wide),
            Reflector(kube, INPUTREQUESTS, inputs),
            Reflector(kube, AGENTJOBS, self._known),
        )
        reviews = Reviews(kube, metrics, user_tokens=settings.accept_user_tokens)
        places = Places(frozenset({NEVER, settings.namespace}), settings.allow_templates)
        policy = Policy(
            default_deadline=settings.default_deadline_seconds,
            default_ttl=settings.default_ttl_seconds,
            max_arguments=settings.max_arguments_bytes,
            destinations=destinations,
        )
        self._starts = Starts(kube, self._known, (own, wide), reviews, places, policy, metrics)
        self._jobs = Jobs(kube, self._known, reviews)
        self._outputs = Outputs(store)
        pods = JobsOfPods(kube, self._known)
        self._reports = Reports(kube, self._known, pods, store)
        self._asks = Asks(kube, inputs, pods)
        self._pieces = Pieces(pods, store, settings.max_reported_output_bytes)
        self._inputs = Inputs(kube, inputs, self._jobs, reviews)
        self._catalogue = Catalogue(own, wide, self._starts)
        self._signing_keys: Expiring[str, SigningKeys] = Expiring(lambda _: SIGNING_KEYS_SECONDS, 1)
        self._openapi = codec.dumps(openapi_document())
        self._asyncapi = codec.dumps(asyncapi_document())
        self._server = Server(reviews, metrics, not_ready=lambda: self._unready)
        self._mcp = self._make_mcp(reviews) if settings.mcp else None
        self._route()

    @property
    def app(self) -> web.Application:
        """The application."""
        return self._server.app

    async def run(self) -> int:
        """Serve until a signal comes; 0 then."""
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        certificate = _certificate(self._settings)
        listener = Listener(self.app, self._settings.end_seconds)
        try:
            await listener.start(
                self._settings.listen,
                (self._settings.port,),
                certificate.context if certificate else None,
            )
            if self._mcp:
                context = certificate.context if certificate else None
                self._mcp.bind(self._settings.listen, self._settings.mcp_port, context)
        except OSError as error:
            raise SettingsError(
                f"cannot listen on {self._settings.listen} ({error}); "
                "set AGENTJOBS_HTTP_PORT and AGENTJOBS_MCP_PORT to free ports"
            ) from error
        tasks = [asyncio.ensure_future(each.run()) for each in self._reflectors]
        tasks.append(asyncio.ensure_future(self._get_ready()))
        if certificate:
            tasks.append(asyncio.ensure_future(certificate.follow()))
        mcp = [asyncio.ensure_future(self._mcp.run())] if self._mcp else []
        tasks += mcp
        try:
            await _first_of(asyncio.ensure_future(stop.wait()), *tasks)
            await self._end(listener, *mcp)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return 0

    async def _end(self, listener: Listener, *servers: asyncio.Future[None]) -> None:
        """Serve on until nobody is sent here any more, then finish what was accepted."""
        log.info("ending")
        self._server.ending = True
        self._known.close()
        self._questions.close()
        await asyncio.sleep(self._settings.drain_seconds)
        if self._mcp:
            self._mcp.stop()
        await asyncio.gather(listener.stop(), *servers)
        await self._reports.close()
        log.info("ended")

    async def _get_ready(self) -> None:
        for each in self._reflectors:
            await each.synced.wait()
        while self._keys.keys is None:
            try:
                await self._keys.load(jobs_exist=self._known.any_named_by_key)
            except AgentJobError as error:
                if str(error) != self._unready:
                    log.error("not ready: %s", error)
                self._unready = str(error)
                await asyncio.sleep(RETRY_SECONDS)
        self._unready = ""
        log.info("ready; %d AgentJobs are known", len(self._known))
        while True:
            # A state key that was taken away must not go on sealing here.
            await asyncio.sleep(KEYS_SECONDS)
            await self._keys.refresh()

    def _make_mcp(self, reviews: Reviews) -> "McpListener":
        # Its libraries are large and are loaded where they are needed alone.
        from agentjobs.gateway.mcp.endpoint import Endpoint  # noqa: PLC0415
        from agentjobs.gateway.mcp.listener import Gate, McpListener  # noqa: PLC0415

        settings = self._settings
        parts = Parts(
            self._starts, self._jobs, self._inputs, self._outputs, self._catalogue,
            self._known, self._questions, self._keys,
        )  # fmt: skip
        calls = Calls(
            parts,
            self._metrics,
            plain=settings.mcp_plain_tools,
            sync_seconds=settings.mcp_sync_seconds,
        )
        endpoint = Endpoint(calls, self._metrics)
        gate = Gate(
            endpoint.app,
            reviews,
            not_ready=lambda: self._unready,
            origins=settings.mcp_allowed_origins,
        )
        return McpListener(gate, endpoint.running(), settings.end_seconds)

    # --- the calls

    def _route(self) -> None:
        serve = self._server.serve
        serve(operations.START, self._start)
        serve(operations.LIST, self._list)
        serve(operations.STATUS, self._status)
        serve(operations.STOP, self._stop)
        serve(operations.OUTPUT, self._output)
        serve(operations.RESULT, self._result)
        serve(operations.INPUTS, self._open_inputs)
        serve(operations.ANSWER, self._answer)
        serve(operations.TOOLS, self._tools)
        serve(operations.REPORT_PROGRESS, self._report_progress)
        serve(operations.REPORT_SUMMARY, self._report_summary)
        serve(operations.REPORT_OUTPUT, self._report_output)
        serve(operations.REPORT_RESULT, self._report_result)
        serve(operations.ASK, self._ask)
        serve(operations.ASKED, self._asked)
        serve(operations.SIGNING_KEYS, self._show_signing_keys)
        serve(operations.OPENAPI, self._show_openapi)
        serve(operations.ASYNCAPI, self._show_asyncapi)
        serve(operations.HEALTHZ, self._healthz)
        serve(operations.READYZ, self._readyz)
        serve(operations.METRICS, self._show_metrics)

    async def _start(self, call: Call) -> web.Response:
        namespace = _namespace(call, call.body.namespace)
        outcome = await self._starts.start(
            self._keys.current, call.caller, namespace, call.values[KEY], call.body
        )
        this = job_id(*outcome.record.name)
        headers = {
            "Location": f"/v1/jobs/{this}",
            "Retry-After": str(RETRY_AFTER_START),
            "ETag": outcome.record.etag,
        }
        repeated = "true" if outcome.repeated else ""
        if repeated:
            headers["Idempotency-Replayed"] = repeated
        audit.record(
            "start", call.caller, this,
            tool=outcome.record.tool, digest=outcome.record.digest, repeated=repeated,
        )  # fmt: skip
        return answer(Started(job_id=this, status=outcome.record.state), 202, headers)

    async def _list(self, call: Call) -> web.Response:
        values = call.values
        namespace = _namespace(call)
        wanted = Filter(values.get("status"), values.get("tool"))
        if "since" in values:
            page = await self._keys.with_cursor(
                lambda keys: self._jobs.changes(
                    keys,
                    call.caller,
                    namespace,
                    wanted,
                    since=values["since"],
                    wait=values.get("wait", 0),
                )
            )
        else:
            page = await self._keys.with_cursor(
                lambda keys: self._jobs.page(
                    keys,
                    call.caller,
                    namespace,
                    wanted,
                    limit=values.get("limit", DEFAULT_PAGE_JOBS),
                    cursor=values.get("cursor", ""),
                )
            )
        return answer(_page(page))

    async def _status(self, call: Call) -> web.Response:
        seen = call.values.get("If-None-Match", "")
        record = await self._jobs.status(
            call.caller, call.values["job_id"], seen=seen, wait=call.values.get("wait", 0)
        )
        headers = {"ETag": record.etag, "Cache-Control": "no-cache"}
        if record.tag in seen:
            return web.Response(status=304, headers=headers)
        return answer(record.body, headers=headers)

    async def _stop(self, call: Call) -> web.Response:
        record = await self._jobs.stop(
            call.caller, call.values["job_id"], call.values.get("reason", "")
        )
        audit.record("stop", call.caller, call.values["job_id"])
        stopped = Stopped(job_id=call.values["job_id"], status=State.STOPPING)
        return answer(stopped, 202, {"ETag": record.etag})

    async def _output(self, call: Call) -> web.Response:
        values = call.values
        record = await self._jobs.find(call.caller, values["job_id"])
        kind = values.get("stream", Stream.PRINTED)
        which = Which(values.get("attempt"), values.get("index", 0), kind)
        cursor, limit = values.get("cursor", ""), values.get("limit", MAX_PAGE_BYTES)
        if OCTETS in values["Accept"]:
            piece = await self._keys.with_cursor(
                lambda keys: self._outputs.piece(keys, record, which, cursor=cursor, limit=limit)
            )
            headers = {"Agentjobs-Next": piece.next, "Agentjobs-End": str(piece.end).lower()}
            return web.Response(body=piece.data, headers={**SAFE, **headers}, content_type=OCTETS)
        page = await self._keys.with_cursor(
            lambda keys: self._outputs.page(keys, record, which, cursor=cursor, limit=limit)
        )
        return answer(page)

    async def _result(self, call: Call) -> web.Response:
        values = call.values
        job = await self._jobs.done(call.caller, values["job_id"])
        page = await self._keys.with_cursor(
            lambda keys: self._outputs.result(
                keys,
                job,
                cursor=values.get("cursor", ""),
                limit=values.get("limit", MAX_PAGE_BYTES),
            )
        )
        return answer(page)

    async def _open_inputs(self, call: Call) -> web.Response:
        found = await self._inputs.open(call.caller, call.values["job_id"])
        return answer(QuestionList(inputs=found))

    async def _answer(self, call: Call) -> web.Response:
        job, key = call.values["job_id"], call.values["key"]
        await self._inputs.answer(call.caller, job, key, call.body)
        given: Answer = call.body
        digest = audit.digest_of(given.answer) if given.answer is not None else ""
        audit.record("answer", call.caller, job, key=key, outcome=given.outcome, digest=digest)
        return web.Response(status=204)

    async def _tools(self, call: Call) -> web.Response:
        functions = await self._catalogue.functions(call.caller, _namespace(call))
        return answer(ToolList(tools=functions))

    async def _report_progress(self, call: Call) -> web.Response:
        await self._reports.progress(_pod(call), call.values[REPORTING_JOB.name], call.body)
        return web.Response(status=204)

    async def _report_summary(self, call: Call) -> web.Response:
        job = call.values[REPORTING_JOB.name]
        await self._reports.summary(_pod(call), job, call.body.summary)
        return web.Response(status=204)

    async def _report_output(self, call: Call) -> web.Response:
        job, offset = call.values[REPORTING_JOB.name], call.values["offset"]
        return answer(await self._pieces.put(_pod(call), job, offset, call.body))

    async def _report_result(self, call: Call) -> web.Response:
        await self._reports.result(_pod(call), call.values[REPORTING_JOB.name], call.body)
        return web.Response(status=204)

    async def _ask(self, call: Call) -> web.Response:
        job = call.values[REPORTING_JOB.name]
        state = await self._asks.ask(_pod(call), job, call.body)
        audit.record(
            "ask", _pod(call), job, key=state.key, digest=audit.digest_of(call.body.to_json())
        )
        return answer(state)

    async def _asked(self, call: Call) -> web.Response:
        values = call.values
        job, wait = values[REPORTING_JOB.name], values.get("wait", 0)
        return answer(await self._asks.state(_pod(call), job, values["key"], wait))

    async def _show_signing_keys(self, _: Call) -> web.Response:
        async def read() -> SigningKeys:
            try:
                found = await self._kube.get(CONFIGMAPS, self._settings.namespace, SIGNING_KEYS)
            except NotFoundError as error:
                raise try_later(
                    ProblemType.UNAVAILABLE, "the operator has not made its key yet", 5
                ) from error
            return SigningKeys(keys=tuple((found.get("data") or {}).values()))

        keys = await self._signing_keys.get("", read)
        return answer(keys, headers={"Cache-Control": f"max-age={SIGNING_KEYS_SECONDS:.0f}"})

    async def _show_openapi(self, _: Call) -> web.Response:
        return answer(self._openapi, headers={"Cache-Control": "no-cache"})

    async def _show_asyncapi(self, _: Call) -> web.Response:
        return answer(self._asyncapi, headers={"Cache-Control": "no-cache"})

    async def _healthz(self, _: Call) -> web.Response:
        return web.Response(text="ok\n")

    async def _readyz(self, _: Call) -> web.Response:
        reason = "ending" if self._server.ending else self._unready
        return web.Response(text=f"{reason or 'ok'}\n", status=503 if reason else 200)

    async def _show_metrics(self, _: Call) -> web.Response:
        self._metrics.known.set(len(self._known))
        return web.Response(body=self._metrics.render(), headers={"Content-Type": OPEN_METRICS})


def _pod(call: Call) -> Pod:
    if call.pod is None:  # pragma: no cover - the table says that pods call it
        raise ProblemError(ProblemType.NOT_ITS_POD)
    return call.pod


def _namespace(call: Call, in_body: str | None = None) -> str:
    """Where a call is about: what it names, else the caller's own (R-NAMESPACE)."""
    in_query = call.values.get("namespace")
    if in_body and in_query and in_body != in_query:
        raise ProblemError(
            ProblemType.INVALID_REQUEST, "body and query name different namespaces; give one"
        )
    namespace = in_body or in_query or call.caller.home
    if not namespace:
        raise ProblemError(
            ProblemType.NAMESPACE_REQUIRED,
            "give namespace: the caller is no ServiceAccount, whose own would be taken",
        )
    return str(namespace)


def _page(page: Page) -> bytes:
    """A page, from statuses that are JSON already."""
    jobs = b",".join(record.body for record in page.records)
    rest = {"next": page.next, "since": page.since} if page.next else {"since": page.since}
    return b'{"jobs":[' + jobs + b"]," + codec.dumps(rest)[1:]


def _certificate(settings: GatewaySettings) -> Certificate | None:
    if not settings.tls_certificate:
        return None
    try:
        return Certificate(Path(settings.tls_certificate), Path(settings.tls_key))
    except (OSError, ssl.SSLError) as error:
        raise SettingsError(
            f"AGENTJOBS_TLS_CERTIFICATE={settings.tls_certificate}, "
            f"AGENTJOBS_TLS_KEY={settings.tls_key}: {error}"
        ) from error


async def _first_of(*tasks: asyncio.Future[Any]) -> None:
    """Wait for the first to end; what broke is raised."""
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()
