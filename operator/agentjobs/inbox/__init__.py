"""The inbox of an agent runtime: it hears of the ends of jobs, and hands them to the model.

    async with Client(url, token=token) as client, Inbox(path, client) as inbox:
        watching = asyncio.create_task(Watcher(inbox, client).run())
        job = await inbox.start("crawl-site", {"url": "http://docs-site/"})
        while True:
            batch = await inbox.take()
            await think(batch.parts)
            await inbox.acknowledge(batch)

No Kubernetes in it; needs the extra `inbox`.
"""

from agentjobs.inbox.acceptance import Rules, Ruling
from agentjobs.inbox.batch import Part, Role, estimate_tokens
from agentjobs.inbox.deliveries import Refused, judge
from agentjobs.inbox.heard import Heard
from agentjobs.inbox.keyring import KeyRing
from agentjobs.inbox.receiver import handler_of, serving
from agentjobs.inbox.runtime import Inbox, Loop, Reply
from agentjobs.inbox.signatures import Verifier
from agentjobs.inbox.store import Batch, FullError
from agentjobs.inbox.watcher import Watcher

__all__ = [
    "Batch",
    "FullError",
    "Heard",
    "Inbox",
    "KeyRing",
    "Loop",
    "Part",
    "Refused",
    "Reply",
    "Role",
    "Rules",
    "Ruling",
    "Verifier",
    "Watcher",
    "estimate_tokens",
    "handler_of",
    "judge",
    "serving",
]
