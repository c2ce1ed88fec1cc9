"""`python -m agentjobs.inbox FILE --gateway URL --token FILE`: takes in events for an agent's loop.

A process of its own, so that events are heard while the loop is down. It shares the file with the
loop, which does all else. It listens for callbacks with --port, watches with --watch, or both,
until it is told to end.
"""

import argparse
import asyncio
import logging
import signal
import sqlite3
import ssl
import sys
from contextlib import AsyncExitStack
from pathlib import Path

from agentjobs.client import Client
from agentjobs.inbox.acceptance import Rules
from agentjobs.inbox.keyring import KeyRing
from agentjobs.inbox.receiver import PATH, serving
from agentjobs.inbox.runtime import Inbox
from agentjobs.inbox.watcher import OWN, Watcher

log = logging.getLogger("agentjobs.inbox")


def main() -> int:
    """Take in events until SIGTERM or SIGINT; return the exit code."""
    chosen = _parser().parse_args()
    if chosen.port is None and not chosen.watch:
        _parser().error("one of --port and --watch is needed")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    try:
        asyncio.run(_run(chosen))
    except (OSError, ValueError, sqlite3.Error) as error:
        log.error("the inbox %s cannot be served: %s", chosen.file, error)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m agentjobs.inbox", description="Take in events for an agent's loop."
    )
    add = parser.add_argument
    add("file", type=Path, help="the inbox, the same as the loop's")
    add("--gateway", required=True, help="URL of the gateway")
    add("--token", type=Path, required=True, help="file of the token for it")
    add("--ca", type=Path, help="file of the CA that has signed the gateway's certificate")
    add("--watch", action="store_true", help="watch the gateway's changes")
    add("--port", type=int, help="listen for callbacks there")
    add("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    add("--path", default=PATH, help="path of callbacks (default: %(default)s)")
    add("--certificate", type=Path, help="serve TLS: file of the chain")
    add("--key", type=Path, help="file of its key")
    add(
        "--namespace",
        action="append",
        default=[],
        help="take the events of all jobs there, whoever has started them; may be repeated",
    )
    return parser


async def _run(chosen: argparse.Namespace) -> None:
    ended = asyncio.Event()
    for name in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(name, ended.set)
    rules = Rules(namespaces=frozenset(chosen.namespace))
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(
            Client(chosen.gateway, token=chosen.token, tls=chosen.ca)
        )
        keys = KeyRing(client) if chosen.port is not None else None
        inbox = await stack.enter_async_context(
            Inbox(chosen.file, client, verifier=keys, rules=rules, tends=False)
        )
        waiting: list[asyncio.Task[object]] = [asyncio.create_task(ended.wait())]
        if chosen.port is not None:
            port = await stack.enter_async_context(
                serving(inbox, chosen.host, chosen.port, path=chosen.path, tls=_tls(chosen))
            )
            log.info("callbacks are taken at %s:%d%s", chosen.host, port, chosen.path)
        if chosen.watch:
            watcher = Watcher(inbox, client, tuple(chosen.namespace) or (OWN,))
            waiting.append(asyncio.create_task(watcher.run()))
        done, rest = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)
        for task in done:
            task.result()


def _tls(chosen: argparse.Namespace) -> ssl.SSLContext | None:
    if chosen.certificate is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(chosen.certificate, chosen.key)
    return context


if __name__ == "__main__":
    sys.exit(main())
