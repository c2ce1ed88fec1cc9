"""Run in a pod: starts jobs until standard input ends; says as JSON what each key has started.

No start is given up: the client repeats it with its key until it is answered.
"""

import asyncio
import json
import sys
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from agentjobs.client import Client

TOKEN = Path("/var/run/secrets/agentjobs/token")
CALLERS = 3
PAUSE = 0.4


async def main(url: str, tool: str, arguments: str, dependency: str) -> dict[str, Any]:
    """Start jobs that wait for another one, so that nothing of them runs."""
    jobs: dict[str, str] = {}
    longest = 0.0
    ended = asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)

    async def call(client: Client, number: int) -> None:
        nonlocal longest
        while not ended.done():
            key = f"rollout-{number}-{len(jobs)}"
            began = time.monotonic()
            started = await client.start(
                tool, json.loads(arguments), key=key, depends_on=[dependency]
            )
            longest = max(longest, time.monotonic() - began)
            jobs[key] = started.job_id
            await asyncio.sleep(PAUSE)

    async with AsyncExitStack() as stack:
        # Each with connections of its own: to both replicas, and kept alive.
        clients = [Client(url, token=TOKEN) for _ in range(CALLERS)]
        for client in clients:
            await stack.enter_async_context(client)
        sys.stdout.write("begun\n")
        sys.stdout.flush()
        await asyncio.gather(*(call(client, number) for number, client in enumerate(clients)))
    return {"jobs": jobs, "longest": longest}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asyncio.run(main(*sys.argv[1:]))))
