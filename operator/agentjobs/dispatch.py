"""Sends events. What is owed and what comes of it stands in the AgentJob's status, not here."""

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Generic, TypeVar

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.resolver import DefaultResolver
from typing_extensions import override

from agentjobs import __version__
from agentjobs.domain.breaker import Standing
from agentjobs.domain.callbacks import Outcome, Reply, answered
from agentjobs.domain.destinations import DeniedError, Destinations, as_address, host_of
from agentjobs.domain.errors import InvalidSpecError
from agentjobs.domain.turns import Lane, Target, Turns
from agentjobs.metrics import Metrics
from agentjobs.signing import Signer

log = logging.getLogger(__name__)
audit = logging.getLogger("agentjobs.audit")
audit.setLevel(logging.INFO)
K = TypeVar("K", bound=Hashable)
NOT_ALLOWED = "the receiver's address is not an allowed destination"
CONNECT_SECONDS = 5
"""For the look-up of the name, too."""
HEADERS_SECONDS = 10
"""From the beginning of a try until the headers of its answer are there, however they drip."""
AUDITED = frozenset({"taken", "gone", "denied"})
PROMPT_SECONDS = 0.25
"""What takes longer does not keep others waiting; receivers answer within some milliseconds."""
READ_BYTES = 16 * 1024
READ_SECONDS = 2
"""For the body, which says nothing that the status has not."""
CONTENT_TYPE = "application/cloudevents+json; charset=utf-8"


@dataclass(frozen=True, slots=True)
class Letter:
    """One event, ready to be sent."""

    id: str
    namespace: str
    url: str
    body: bytes


class Dispatcher(Generic[K]):
    """Tries events, each on a task of its own, when `Turns` says that its turn has come.

    What waits here is a part of what the AgentJobs in the cache owe; tasks have a bound.
    """

    def __init__(
        self,
        signer: Signer,
        destinations: Destinations,
        tell: Callable[[K], None],
        metrics: Metrics,
    ) -> None:
        """Prepare.

        :param tell: called with the key of an event whose outcome is there.
        """
        self.signer = signer
        """Replaced when keys are added or retired."""
        self._destinations = destinations
        self._tell = tell
        self._metrics = metrics
        self._turns = Turns()
        self._letters: dict[str, tuple[K, Letter]] = {}
        self._outcomes: dict[K, dict[str, Outcome]] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def submit(self, key: K, letter: Letter) -> None:
        """Try to deliver an event as soon as its turn comes, unless that is under way."""
        if letter.id in self._letters or letter.id in self.outcomes(key):
            return
        self._letters[letter.id] = key, letter
        self._turns.add(letter.id, _target(letter), datetime.now(UTC))
        self._send_next()

    def outcomes(self, key: K) -> Mapping[str, Outcome]:
        """What came of the last tries, by event, until it is settled."""
        return self._outcomes.get(key, {})

    def busy(self, event_id: str) -> bool:
        """Whether the event is being tried, or waits for its turn."""
        return event_id in self._letters

    def settle(self, key: K, event_ids: Iterable[str]) -> None:
        """Forget outcomes that were written into the status."""
        outcomes = self._outcomes.get(key, {})
        for each in event_ids:
            outcomes.pop(each, None)
        if not outcomes:
            self._outcomes.pop(key, None)

    def forget(self, key: K) -> None:
        """Forget what came of the events of an AgentJob that is gone."""
        self._outcomes.pop(key, None)

    def measure(self) -> None:
        """Bring the gauges up to date."""
        self._metrics.deliveries_waiting.set(self._turns.waiting())
        under_way, standings = self._turns.under_way(), self._turns.standings(datetime.now(UTC))
        for lane in Lane:
            self._metrics.deliveries_under_way.labels(lane.value).set(under_way[lane])
        for standing in (Standing.OPEN, Standing.HALF_OPEN):
            self._metrics.destinations.labels(standing.value).set(standings[standing])

    async def close(self) -> None:
        """End all tries; what they did not deliver stays owed."""
        while tasks := list(self._tasks.values()):
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _send_next(self) -> None:
        while turn := self._turns.next():
            if turn.held:
                self._end(turn.event_id, turn.held)
                continue
            task = asyncio.create_task(
                self._deliver(turn.event_id), name=f"deliver-{turn.event_id}"
            )
            self._tasks[turn.event_id] = task

    async def _deliver(self, event_id: str) -> None:
        _, letter = self._letters[event_id]
        began = time.perf_counter()
        alarm = self._linger_later(event_id)
        try:
            outcome = await self._tried(letter)
        finally:
            alarm[0].cancel()
            del self._tasks[event_id]
        self._metrics.delivery_seconds.observe(time.perf_counter() - began)
        self._turns.done(event_id, outcome)
        self._end(event_id, outcome)
        self._send_next()

    def _linger_later(self, event_id: str) -> list[asyncio.TimerHandle]:
        """Let others go before a try that takes long; return what is to be cancelled at its end."""
        loop = asyncio.get_running_loop()

        def linger() -> None:
            if self._turns.linger(event_id):
                self._send_next()
            else:
                alarm[0] = loop.call_later(PROMPT_SECONDS, linger)

        alarm = [loop.call_later(PROMPT_SECONDS, linger)]
        return alarm

    def _end(self, event_id: str, outcome: Outcome) -> None:
        """Keep what came of an event for the next pass over its AgentJob, and ask for that."""
        key, letter = self._letters.pop(event_id)
        self._outcomes.setdefault(key, {})[event_id] = outcome
        came_of_it = "denied" if outcome.error == NOT_ALLOWED else outcome.reply.value
        self._metrics.deliveries.labels(came_of_it).inc()
        if came_of_it in AUDITED:
            _record(letter, came_of_it)
        if outcome.reply is not Reply.TAKEN:
            log.info("event %s was not delivered: %s", event_id, outcome.error)
        self._tell(key)

    async def _tried(self, letter: Letter) -> Outcome:
        """Try once; whatever happens has an outcome."""
        try:
            return await self._try(letter)
        except (InvalidSpecError, DeniedError) as error:
            # Which address a name has inside is for the platform's log, not for a tenant's status.
            log.warning("event %s goes nowhere: %s", letter.id, error)
            return Outcome(Reply.FAILED, datetime.now(UTC), NOT_ALLOWED)
        except Exception as error:
            # Without an outcome the event would stay owed, and its AgentJob be kept, for ever.
            log.exception("the try to deliver event %s broke", letter.id)
            return Outcome(Reply.FAILED, datetime.now(UTC), _unknown(error))

    async def _try(self, letter: Letter) -> Outcome:
        host, port = host_of(letter.url)
        literal = as_address(host)
        if literal is not None:
            self._destinations.check_address(letter.namespace, host, port, literal)
        resolver = _CheckedResolver(self._destinations, letter.namespace)
        timeout = aiohttp.ClientTimeout(
            total=HEADERS_SECONDS + READ_SECONDS,
            connect=CONNECT_SECONDS,
            sock_connect=CONNECT_SECONDS,
        )
        headers = {
            "Content-Type": CONTENT_TYPE,
            "User-Agent": f"agentjobs/{__version__}",
            **self.signer.headers(letter.id, int(time.time()), letter.body),
        }
        try:
            async with aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(resolver=resolver, force_close=True),
                timeout=timeout,
                trust_env=False,
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
            ) as session:
                async with asyncio.timeout(HEADERS_SECONDS):
                    answer = await session.post(
                        letter.url, data=letter.body, headers=headers, allow_redirects=False
                    )
                asked = answer.headers.get("Retry-After", "")
                outcome = answered(answer.status, asked, datetime.now(UTC))
                with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                    async with asyncio.timeout(READ_SECONDS):
                        await _drain(answer.content)
                answer.close()
                return outcome
        except aiohttp.ConnectionTimeoutError:
            text = f"no connection to the receiver within {CONNECT_SECONDS} s"
            return Outcome(Reply.FAILED, datetime.now(UTC), text, works=False)
        except TimeoutError:
            text = f"no answer within {HEADERS_SECONDS} s"
            return Outcome(Reply.FAILED, datetime.now(UTC), text, works=False)
        except aiohttp.ClientError as error:
            text = _without_addresses(error)
            return Outcome(Reply.FAILED, datetime.now(UTC), text, works=False)


async def _drain(content: aiohttp.StreamReader) -> None:
    """Read the body of an answer up to its bound: to hang up in its middle looks like a fault."""
    left = READ_BYTES
    while left > 0:
        chunk = await content.read(left)
        if not chunk:
            return
        left -= len(chunk)


class _CheckedResolver(AbstractResolver):
    """Looks a name up and refuses it if any of its addresses is denied.

    The connection then goes to the very addresses that were checked, so that a name which changes
    its mind in between gains nothing.
    """

    def __init__(self, destinations: Destinations, namespace: str) -> None:
        self._destinations = destinations
        self._namespace = namespace
        self._resolver = DefaultResolver()

    @override
    async def resolve(self, host: str, port: int = 0, family: int = 0) -> list[ResolveResult]:
        found = await self._resolver.resolve(host, port, family)  # type: ignore[arg-type]
        for result in found:
            address = as_address(result["host"])
            if address is None:
                raise DeniedError(f"{host} resolves to {result['host']}, which is no address")
            self._destinations.check_address(self._namespace, host.rstrip("."), port, address)
        return found

    @override
    async def close(self) -> None:
        await self._resolver.close()


def _record(letter: Letter, outcome: str) -> None:
    """Write down who was told, or was not to be; of the URL only the host, which is no secret."""
    told = {
        "action": "deliver",
        "event": letter.id,
        "namespace": letter.namespace,
        "destination": _target(letter).host,
        "outcome": outcome,
    }
    audit.info("%s", json.dumps(told), extra={"audit": told})


def _target(letter: Letter) -> Target:
    try:
        return Target(letter.namespace, *host_of(letter.url))
    except InvalidSpecError:
        # Its try says so.
        return Target(letter.namespace, "", 0)


def _without_addresses(error: aiohttp.ClientError) -> str:
    """Say what failed without telling a tenant what the network looks like inside."""
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        return "the receiver's name could not be resolved"
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return "the receiver's certificate is not trusted"
    if isinstance(error, aiohttp.ClientConnectorError):
        return "no connection to the receiver"
    return _unknown(error)


def _unknown(error: Exception) -> str:
    return f"the exchange with the receiver failed ({type(error).__name__})"
