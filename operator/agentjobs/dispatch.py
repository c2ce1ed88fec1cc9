"""Sends events. What is owed and what comes of it stands in the AgentJob's status, not here."""

import asyncio
import contextlib
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Generic, TypeVar

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.resolver import DefaultResolver
from typing_extensions import override

from agentjobs import __version__
from agentjobs.domain.callbacks import Outcome, Reply, answered
from agentjobs.domain.destinations import DeniedError, Destinations, as_address, host_of
from agentjobs.domain.errors import InvalidSpecError
from agentjobs.signing import Signer

log = logging.getLogger(__name__)
K = TypeVar("K", bound=Hashable)
NOT_ALLOWED = "the receiver's address is not an allowed destination"
CONNECT_SECONDS = 5
"""For the look-up of the name, too."""
HEADERS_SECONDS = 10
"""From the beginning of a try until the headers of its answer are there, however they drip."""
PER_DESTINATION = 4
AT_ONCE = 256
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
    """Tries events, each on a task of its own, so that no receiver delays another."""

    def __init__(
        self, signer: Signer, destinations: Destinations, tell: Callable[[K], None]
    ) -> None:
        """Prepare.

        :param tell: called with the key of an event whose outcome is there.
        """
        self._signer = signer
        self._destinations = destinations
        self._tell = tell
        self._outcomes: dict[str, Outcome] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._per_host: dict[tuple[str, int], asyncio.Semaphore] = defaultdict(
            lambda: asyncio.Semaphore(PER_DESTINATION)
        )

    def submit(self, key: K, letter: Letter) -> None:
        """Try to deliver an event, unless it is being tried."""
        if letter.id in self._tasks or letter.id in self._outcomes:
            return
        task = asyncio.create_task(self._deliver(key, letter), name=f"deliver-{letter.id}")
        self._tasks[letter.id] = task

    def outcome(self, event_id: str) -> Outcome | None:
        """The outcome of the last try, until it is settled."""
        return self._outcomes.get(event_id)

    def busy(self, event_id: str) -> bool:
        """Whether the event is being tried."""
        return event_id in self._tasks

    def settle(self, event_id: str) -> None:
        """Forget an outcome that was written into the status."""
        self._outcomes.pop(event_id, None)

    async def close(self) -> None:
        """End all tries; what they did not deliver stays owed."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _deliver(self, key: K, letter: Letter) -> None:
        try:
            host = host_of(letter.url)
            async with self._per_host[host], self._slots:
                outcome = await self._try(letter)
        except (InvalidSpecError, DeniedError) as error:
            # Which address a name has inside is for the platform's log, not for a tenant's status.
            log.warning("event %s goes nowhere: %s", letter.id, error)
            outcome = Outcome(Reply.FAILED, datetime.now(UTC), NOT_ALLOWED)
        except Exception as error:
            # Without an outcome the event would stay owed, and its AgentJob be kept, for ever.
            log.exception("the try to deliver event %s broke", letter.id)
            outcome = Outcome(Reply.FAILED, datetime.now(UTC), _unknown(error))
        finally:
            self._tasks.pop(letter.id, None)
        self._outcomes[letter.id] = outcome
        if outcome.reply is not Reply.TAKEN:
            log.info("event %s was not delivered: %s", letter.id, outcome.error)
        self._tell(key)

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
            **self._signer.headers(letter.id, int(time.time()), letter.body),
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
            return Outcome(Reply.FAILED, datetime.now(UTC), text)
        except TimeoutError:
            text = f"no answer within {HEADERS_SECONDS} s"
            return Outcome(Reply.FAILED, datetime.now(UTC), text)
        except aiohttp.ClientError as error:
            return Outcome(Reply.FAILED, datetime.now(UTC), _without_addresses(error))


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
