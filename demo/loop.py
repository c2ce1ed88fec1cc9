"""The loop of an agent that starts a build and a crawl, keeps talking, and reacts to their ends.

The model is a stand-in with a script: it needs no network. All else is as in a real agent: jobs are
started through the inbox, and what comes in meanwhile is handed to the model in batches.
"""

import asyncio
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentjobs.client import Client, ClientError
from agentjobs.inbox import Inbox, Part, Role, Watcher
from tests.cluster import ClusterError

from .table import UNPRINTABLE

TASK = "Build lua, and look over the documentation site. Tell me when both are done."
QUESTION = "While we wait: what is 6 times 7?"
BUILD = ("build-c-project", {"project": "lua", "optimization": "-O0"})
CRAWL = (
    "crawl-site",
    {"start": "http://docs-site.agentjobs-demo.svc/index.html", "max_pages": 20},
)
WAIT_SECONDS = 120.0
SHOWN = 320
"""Characters of a line."""

Say = Callable[[str], None]
ENDED = re.compile(r"^\[event\] job_\w+ job_id=(\S+) tool=(\S+) status=(\S+)", re.MULTILINE)
ALL_OVER = re.compile(r"^\[event\] jobs_over ", re.MULTILINE)


@dataclass(frozen=True)
class Reply:
    """The model speaks to the user."""

    text: str


@dataclass(frozen=True)
class Start:
    """The model calls tools that take long; it is to be woken when all are over."""

    tools: tuple[tuple[str, dict[str, Any]], ...]


@dataclass(frozen=True)
class Result:
    """The model wants to see what a job handed in."""

    job_id: str


Action = Reply | Start | Result


@dataclass
class ScriptedModel:
    """Decides what a model would."""

    ends: dict[str, str] = field(default_factory=dict)
    """How each tool's job ended."""
    answered_meanwhile: bool = False
    finished: bool = False

    def decide(self, parts: Sequence[Part]) -> list[Action]:
        """What it does about all that has come in."""
        return [action for part in parts for action in self._about(part)]

    def _about(self, part: Part) -> list[Action]:
        if part.role is Role.USER:
            return self._answer(part.text)
        actions: list[Action] = []
        for job_id, tool, status in ENDED.findall(part.text):
            self.ends[tool] = status
            actions += [Result(job_id)] if status == "done" else []
            actions.append(Reply(f"{tool} is over: {status}."))
        if ALL_OVER.search(part.text):
            self.finished = True
            actions.append(Reply("Both are over. That was all."))
        return actions

    def _answer(self, text: str) -> list[Action]:
        if text == TASK:
            return [Start((BUILD, CRAWL)), Reply("Both are under way; go on, I am listening.")]
        self.answered_meanwhile = not self.ends
        return [Reply("42.")]


class Loop:
    """An agent: an inbox, a model, and what it may do."""

    def __init__(self, client: Client, inbox: Inbox, say: Say) -> None:
        self._client = client
        self._inbox = inbox
        self._say = say
        self.model = ScriptedModel()

    async def run(self) -> bool:
        """Talk until both jobs are over; whether all was as it should be."""
        await self._inbox.say(TASK)
        asked = False
        while not self.model.finished:
            async with asyncio.timeout(WAIT_SECONDS):
                batch = await self._inbox.take()
            for line in batch.text.split("\n"):
                self._show("", line)
            for action in self.model.decide(batch.parts):
                await self._act(action)
            await self._inbox.acknowledge(batch)
            if not asked:
                await self._inbox.say(QUESTION)
                asked = True
        ends = {BUILD[0]: "done", CRAWL[0]: "done"}
        return self.model.ends == ends and self.model.answered_meanwhile

    async def _act(self, action: Action) -> None:
        match action:
            case Reply(text):
                self._show("[agent] ", text)
            case Result(job_id):
                result = await self._client.result(job_id)
                self._show("[result] ", result.text)
            case Start(tools):
                await self._start(tools)

    async def _start(self, tools: Sequence[tuple[str, dict[str, Any]]]) -> None:
        jobs = [await self._inbox.start(tool, arguments) for tool, arguments in tools]
        for (tool, _), job in zip(tools, jobs, strict=True):
            self._show("[tool] ", f"{tool} -> {job.job_id} {job.status}")
        await self._inbox.when_over([job.job_id for job in jobs], "tell the user")

    def _show(self, who: str, text: str) -> None:
        line = f"{who}{UNPRINTABLE.sub(' ', text)}"
        self._say(f"  {line if len(line) <= SHOWN else line[:SHOWN] + '…'}")


async def talk(url: str, token: str, directory: Path, say: Say) -> bool:
    """Run the loop against a gateway that cannot call back; its memory is in the directory.

    :raises ClusterError: the gateway does not do its part.
    """
    try:
        async with (
            Client(url, token=token) as client,
            Inbox(directory / "inbox.db", client) as inbox,
        ):
            watching = asyncio.create_task(Watcher(inbox, client).run())
            try:
                return await Loop(client, inbox, say).run()
            finally:
                watching.cancel()
                await asyncio.wait({watching})
    except TimeoutError as error:
        raise ClusterError(f"nothing came into the inbox for {WAIT_SECONDS:.0f} s") from error
    except ClientError as error:
        raise ClusterError(f"the gateway: {error}") from error
