"""Run in a pod: the contract through the client; says as JSON what it has seen."""

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

from agentjobs.client import Client, NotDoneError

TOKEN = Path("/var/run/secrets/agentjobs/token")
KEY = "through-the-client"


async def main(url: str, tool: str, short: str, long: str) -> dict[str, Any]:
    """Run a job to its end, stop another one, and ask for the result of both."""
    async with Client(url, token=TOKEN) as client:
        began = time.monotonic()
        started = await client.start(tool, json.loads(short), key=KEY)
        answered = time.monotonic()
        ended = await client.wait(started.job_id, timeout=60)
        seen = {
            "job_id": started.job_id,
            "status": started.status,
            "answered_in": answered - began,
            "ended": ended.status,
            "ended_in": time.monotonic() - began,
            "result": (await client.result(started.job_id)).text,
            "again": [(await client.start(tool, json.loads(short), key=KEY)).job_id],
        }
        other = await client.start(tool, json.loads(long), key=f"{KEY}-2")
        await client.stop(other.job_id, "no longer needed")
        seen["stopped"] = (await client.wait(other.job_id, timeout=60)).status
        try:
            await client.result(other.job_id)
        except NotDoneError as error:
            problem = error.problem
            seen["refused"] = [problem.status, error.type, problem.job_status]
        return seen


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asyncio.run(main(*sys.argv[1:]))))
