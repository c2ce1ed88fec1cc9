"""What an inbox must not forget, in SQLite: every method is one transaction.

Several processes may use one file: a receiver, a watcher, the loop of the agent. What a method has
returned is on the disk.
"""

import json
import secrets
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

from pydantic import TypeAdapter

from agentjobs.api.names import TERMINAL_STATES, State
from agentjobs.inbox.acceptance import KEPT, Known, Rules, Ruling, rule
from agentjobs.inbox.batch import Estimate, Item, Part, Role, compose, estimate_tokens
from agentjobs.inbox.heard import Heard, namespace_of
from agentjobs.inbox.lines import follow_up_line, lost_line
from agentjobs.inbox.schema import connect

MOST_ITEMS: Final = 1000
"""In one batch."""
SKEW_SECONDS: Final = 86400.0
LOST: Final = "lost"
"""In place of a status: the gateway does not know the job any more."""
CLOSED: Final = "closed"
HEARD: Final = TypeAdapter(Heard)
PARTS: Final = TypeAdapter(tuple[Part, ...])


class FullError(Exception):
    """Too much waits for the agent already."""


@dataclass(frozen=True, slots=True)
class Batch:
    """What an agent is given at once. It is given again until it is acknowledged."""

    id: str
    parts: tuple[Part, ...]
    tokens: int
    """As they were estimated."""
    again: bool
    """Whether it was given out before, to the letter."""

    @property
    def text(self) -> str:
        """All of it as one text. Lines of a user's words are set in, so none begins like ours."""
        return "\n".join(
            part.text
            if part.role is Role.EVENT
            else "[user] " + "\n  ".join(part.text.splitlines())
            for part in self.parts
        )


@dataclass(frozen=True, slots=True)
class OpenStart:
    """A start whose answer is not on record."""

    key: str
    request: str
    at: datetime
    """When it was begun, or got due."""
    follows: bool
    """Whether a follow-up has made it, and wants to hear of it."""


class Store:
    """The memory of an inbox."""

    def __init__(self, path: Path | None, rules: Rules | None = None) -> None:
        """Open it; raises what `connect` does."""
        self._db = connect(path)
        self._lock = threading.RLock()
        self.rules = rules or Rules()

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._db.close()

    # What comes in

    def accept(self, event: Heard, now: datetime) -> Ruling:
        """Take an event that is known to be the platform's, or say why not."""
        with self._changing():
            return self._accept(event, now)

    def accept_page(
        self, namespace: str, since: str, events: Sequence[Heard], now: datetime
    ) -> bool:
        """Take what a watcher read, and where it goes on.

        :returns: False where there was no room for all of it: the cursor stays, so that what is
            missing is read again.
        """
        with self._changing():
            for event in events:
                if self._accept(event, now) is Ruling.FULL:
                    return False
            self._db.execute("REPLACE INTO cursors VALUES (?, ?)", (namespace, since))
        return True

    def say(self, text: str, now: datetime, message_id: str | None = None) -> bool:
        """Put a user's words in the queue.

        :param message_id: names the message, so that it is taken once; absent: a new one.
        :returns: False: it was taken before.
        :raises FullError: too much waits already.
        """
        item = f"user {message_id or secrets.token_hex(8)}"
        with self._changing():
            if self._one("SELECT 1 FROM seen WHERE id = ?", item):
                return False
            if self._waiting() >= self.rules.capacity:
                raise FullError(f"{self.rules.capacity} items wait for the agent")
            self._see(item, now)
            self._put(item, Role.USER, text)
        return True

    # What goes out

    def take(
        self,
        holder: str,
        now: datetime,
        lease: timedelta,
        budget: int,
        estimate: Estimate = estimate_tokens,
    ) -> Batch | None:
        """Give out what waits, for as long as the lease; None: nothing does.

        A holder that asks again without an acknowledgement has lost its batch in a crash: it gets
        the same one. Another holder gets it when the lease is over.
        """
        until = (now + lease).timestamp()
        with self._changing():
            row = self._one(
                "SELECT id, parts, tokens FROM batches WHERE holder = ? OR until <= ? "
                "ORDER BY holder <> ?, until LIMIT 1",
                holder,
                now.timestamp(),
                holder,
            )
            if row:
                self._db.execute(
                    "UPDATE batches SET holder = ?, until = ? WHERE id = ?", (holder, until, row[0])
                )
                return Batch(row[0], PARTS.validate_json(row[1]), row[2], again=True)
            return self._new_batch(holder, until, budget, estimate)

    def acknowledge(self, batch_id: str) -> bool:
        """The agent has it: it is never given again. False: it was acknowledged before."""
        with self._changing():
            self._db.execute("DELETE FROM items WHERE batch = ?", (batch_id,))
            return self._db.execute("DELETE FROM batches WHERE id = ?", (batch_id,)).rowcount > 0

    # Jobs of this agent

    def begin_start(self, key: str, request: str, namespace: str | None, now: datetime) -> None:
        """Record a start before it is sent: from here on its job is this agent's."""
        with self._changing():
            self._db.execute(
                "INSERT OR IGNORE INTO starts VALUES (?, ?, ?, ?)",
                (key, request, namespace, now.timestamp()),
            )

    def end_start(self, key: str, job_id: str | None, now: datetime, line: str = "") -> None:
        """Record the answer to a start.

        :param job_id: None: there is no job, or nobody will ever know.
        :param line: tells the agent, which did not get the answer itself.
        """
        with self._changing():
            item = f"start {key}"
            begun = self._one("SELECT 1 FROM starts WHERE key = ?", key)
            # A start that is lost again before the agent has read of it is told once.
            if line and begun and not self._one("SELECT 1 FROM items WHERE id = ?", item):
                self._put(item, Role.EVENT, line)
            self._end_start(key, job_id, now)

    def adopt(self, job_id: str, now: datetime) -> None:
        """Record a job as this agent's; the gateway is to be asked how it stands."""
        with self._changing():
            self._db.execute(
                "INSERT INTO jobs VALUES (?, 1, ?, NULL, 0) ON CONFLICT (id) DO UPDATE SET own = 1",
                (job_id, now.timestamp()),
            )
            self._settle(now)

    def open_starts(self) -> list[OpenStart]:
        """Starts without an answer on record, those of follow-ups too; the oldest first."""
        rows = self._all(
            "SELECT key, request, at, key IN (SELECT id FROM follow_ups) FROM starts ORDER BY at"
        )
        return [OpenStart(key, text, _time(at), bool(follows)) for key, text, at, follows in rows]

    def is_open(self, key: str) -> bool:
        """Whether a start has no answer on record."""
        return self._one("SELECT 1 FROM starts WHERE key = ?", key) is not None

    def unheard(self, before: datetime, limit: int) -> list[str]:
        """Jobs of which an end is awaited and nobody asked since a moment."""
        rows = self._all(
            "SELECT id FROM jobs WHERE status IS NULL AND looked < ? ORDER BY looked LIMIT ?",
            before.timestamp(),
            limit,
        )
        return [job_id for (job_id,) in rows]

    def looked_at(self, job_id: str, now: datetime) -> None:
        """The gateway was asked, and the job is not over."""
        with self._changing():
            self._db.execute("UPDATE jobs SET looked = ? WHERE id = ?", (now.timestamp(), job_id))

    def lost(self, job_id: str, now: datetime) -> None:
        """The gateway does not know a job any more, and how it ended was not heard."""
        with self._changing():
            open_ = self._one("SELECT 1 FROM jobs WHERE id = ? AND status IS NULL", job_id)
            if open_:
                self._put(f"lost {job_id} {now.timestamp()}", Role.EVENT, lost_line(job_id))
                self._over(job_id, LOST, now)

    # Follow-ups

    def follow_up(
        self,
        id_: str,
        jobs: Sequence[str],
        note: str,
        request: str | None,
        condition: str,
        now: datetime,
    ) -> None:
        """Remember what is to be done when jobs are over; an id that was used before, nothing.

        :param request: a start as JSON; None: the agent is told.
        :param condition: of a start: `done`, all have to be; `over`, however they ended.
        :raises ValueError: a job is not known here, so its end would not be heard.
        """
        wanted = tuple(dict.fromkeys(jobs))
        with self._changing():
            if self._one("SELECT 1 FROM seen WHERE id = ?", _item_of(id_)):
                return
            for job_id in wanted:
                if self._one("SELECT 1 FROM jobs WHERE id = ?", job_id):
                    continue
                if namespace_of(job_id) not in self.rules.namespaces:
                    raise ValueError(f"{job_id} was not started by this agent")
                # Its event may have come and gone: from here on the gateway is asked, too.
                self._db.execute(
                    "INSERT INTO jobs VALUES (?, 0, ?, NULL, 0)", (job_id, now.timestamp())
                )
            self._see(_item_of(id_), now)
            self._db.execute(
                "INSERT INTO follow_ups VALUES (?, ?, ?, ?, ?, NULL)",
                (id_, json.dumps(wanted), note, request, condition),
            )
            self._fire(now)

    def followed(self, id_: str, job_id: str | None, outcome: str, now: datetime) -> None:
        """What became of a start that was due; the agent is told in the same write.

        :param job_id: of the job that was started; None: it was not.
        :param outcome: in words of ours.
        """
        with self._changing():
            row = self._one("SELECT jobs, note FROM follow_ups WHERE id = ?", id_)
            if row is None:
                return
            self._end_start(id_, job_id, now)
            line = follow_up_line(self._ends(json.loads(row[0])), row[1], outcome)
            self._put(_item_of(id_), Role.EVENT, line)
            self._db.execute("DELETE FROM follow_ups WHERE id = ?", (id_,))

    # The rest

    def cursor(self, namespace: str) -> str:
        """Where the watcher of a namespace goes on; empty: at the beginning."""
        row = self._one("SELECT since FROM cursors WHERE namespace = ?", namespace)
        return str(row[0]) if row else ""

    def forget_cursor(self, namespace: str) -> None:
        """The gateway does not take it any more."""
        with self._changing():
            self._db.execute("DELETE FROM cursors WHERE namespace = ?", (namespace,))

    def close_for_good(self) -> None:
        """No event is wanted any more: senders are told to stop."""
        with self._changing():
            self._db.execute("INSERT OR IGNORE INTO flags VALUES (?)", (CLOSED,))

    def closed_for_good(self) -> bool:
        """Whether no event is wanted any more."""
        return self._one("SELECT 1 FROM flags WHERE name = ?", CLOSED) is not None

    def counts(self) -> dict[str, int]:
        """What became of events, by ruling; `waiting`: items for the agent, not acknowledged."""
        counted: dict[str, int] = dict(self._all("SELECT name, n FROM counts"))
        return {**counted, "waiting": self._waiting()}

    def prune(self, now: datetime) -> None:
        """Forget what is older than it has to be."""
        old = (now - self.rules.retention).timestamp()
        with self._changing():
            # Clocks differ: an event must be stale before its id is forgotten.
            self._db.execute(
                "DELETE FROM seen WHERE at < ? AND id NOT IN "
                "(SELECT id FROM items UNION SELECT 'follow-up ' || id FROM follow_ups)",
                (old - SKEW_SECONDS,),
            )
            self._db.execute(
                # One whose end is awaited is asked about until the gateway says what became of it.
                "DELETE FROM jobs WHERE at < ? AND status IS NOT NULL AND id NOT IN "
                "(SELECT value FROM follow_ups, json_each(follow_ups.jobs))",
                (old,),
            )

    # Within a transaction

    def _accept(self, event: Heard, now: datetime) -> Ruling:
        job = self._one("SELECT own, status FROM jobs WHERE id = ?", event.job_id)
        own = bool(job and job[0])
        known = Known(
            seen=self._one("SELECT 1 FROM seen WHERE id = ?", event.id) is not None,
            own=own,
            unheard=job is not None and job[1] is None,
            starting=self._starting(event.namespace),
            waiting=self._waiting(),
            held=self._waiting(held=True),
        )
        ruling = rule(event, known, self.rules, now)
        self._count(ruling)
        if ruling in KEPT:
            self._see(event.id, now)
            body = HEARD.dump_json(event).decode()
            self._put(event.id, Role.EVENT, body, event.job_id, held=ruling is Ruling.HELD)
        # An end that was taken so long ago that its job is forgotten may be awaited anew.
        awaited = ruling is Ruling.DUPLICATE and known.unheard
        if event.over and (ruling is Ruling.TAKEN or awaited):
            self._over(event.job_id, event.status.value, now)
        return ruling

    def _end_start(self, key: str, job_id: str | None, now: datetime) -> None:
        self._db.execute("DELETE FROM starts WHERE key = ?", (key,))
        if job_id is not None:
            self._db.execute(
                "INSERT INTO jobs VALUES (?, 1, ?, NULL, ?) ON CONFLICT (id) DO UPDATE SET own = 1",
                (job_id, now.timestamp(), now.timestamp()),
            )
        self._settle(now)

    def _settle(self, now: datetime) -> None:
        """Let go of held events: to the agent, or, when no start can claim them any more, away."""
        rows = self._all(
            "SELECT items.id, job_id, body, jobs.id FROM items "
            "LEFT JOIN jobs ON jobs.id = job_id AND own WHERE held ORDER BY seq"
        )
        for id_, job_id, body, own in rows:
            if own:
                self._db.execute("UPDATE items SET held = 0 WHERE id = ?", (id_,))
                self._count(Ruling.TAKEN)
                event = HEARD.validate_json(body)
                if event.over:
                    self._over(job_id, event.status.value, now)
            elif not self._starting(namespace_of(job_id)):
                self._db.execute("DELETE FROM items WHERE id = ?", (id_,))
                self._db.execute("DELETE FROM seen WHERE id = ?", (id_,))
                self._count(Ruling.NOT_OURS)

    def _over(self, job_id: str, status: str, now: datetime) -> None:
        """Record the end of a job, and what waited for it."""
        self._db.execute(
            "INSERT INTO jobs VALUES (?, 0, ?, ?, ?) "
            "ON CONFLICT (id) DO UPDATE SET status = excluded.status, at = excluded.at",
            (job_id, now.timestamp(), status, now.timestamp()),
        )
        self._fire(now)

    def _fire(self, now: datetime) -> None:
        """Tell of follow-ups whose jobs are all over, or make their starts due."""
        rows = self._all(
            "SELECT id, jobs, note, request, condition FROM follow_ups WHERE due IS NULL"
        )
        for id_, jobs, note, request, condition in rows:
            statuses = [self._status(job_id) for job_id in json.loads(jobs)]
            if None in statuses:
                continue
            wanted = condition != "done" or set(statuses) == {State.DONE.value}
            if request is not None and wanted:
                self._due(id_, request, now)
                continue
            outcome = "" if request is None else "nothing was started: not all are done"
            line = follow_up_line(self._ends(json.loads(jobs)), note, outcome)
            self._put(_item_of(id_), Role.EVENT, line)
            self._db.execute("DELETE FROM follow_ups WHERE id = ?", (id_,))

    def _due(self, id_: str, request: str, now: datetime) -> None:
        """From here on the job of a follow-up is this agent's: its id is the key of the start."""
        at = now.timestamp()
        namespace = json.loads(request).get("namespace")
        self._db.execute("UPDATE follow_ups SET due = ? WHERE id = ?", (at, id_))
        self._db.execute(
            "INSERT OR IGNORE INTO starts VALUES (?, ?, ?, ?)", (id_, request, namespace, at)
        )

    def _ends(self, jobs: Sequence[str]) -> list[tuple[str, State | None]]:
        ends = ((job_id, self._status(job_id)) for job_id in jobs)
        return [(job_id, State(end) if end in TERMINAL_STATES else None) for job_id, end in ends]

    def _status(self, job_id: str) -> str | None:
        row = self._one("SELECT status FROM jobs WHERE id = ?", job_id)
        return row[0] if row else None

    def _new_batch(
        self, holder: str, until: float, budget: int, estimate: Estimate
    ) -> Batch | None:
        rows = self._all(
            "SELECT seq, role, job_id, body FROM items WHERE NOT held AND batch IS NULL "
            "ORDER BY seq LIMIT ?",
            MOST_ITEMS,
        )
        if not rows:
            return None
        items = [_item(Role(role), job_id, body) for _, role, job_id, body in rows]
        composed = compose(items, budget, estimate)
        id_ = f"batch_{secrets.token_hex(8)}"
        self._db.executemany(
            "UPDATE items SET batch = ? WHERE seq = ?",
            [(id_, seq) for seq, *_ in rows[: composed.items]],
        )
        parts = PARTS.dump_json(composed.parts).decode()
        self._db.execute(
            "INSERT INTO batches VALUES (?, ?, ?, ?, ?)",
            (id_, holder, until, parts, composed.tokens),
        )
        return Batch(id_, composed.parts, composed.tokens, again=False)

    def _put(
        self, id_: str, role: Role, body: str, job_id: str = "", *, held: bool = False
    ) -> None:
        self._db.execute(
            "INSERT INTO items (id, role, job_id, body, held) VALUES (?, ?, ?, ?, ?)",
            (id_, role.value, job_id, body, held),
        )

    def _see(self, id_: str, now: datetime) -> None:
        self._db.execute("INSERT INTO seen VALUES (?, ?)", (id_, now.timestamp()))

    def _count(self, ruling: Ruling) -> None:
        self._db.execute(
            "INSERT INTO counts VALUES (?, 1) ON CONFLICT (name) DO UPDATE SET n = n + 1",
            (ruling.value,),
        )

    def _waiting(self, *, held: bool = False) -> int:
        return int(self._all("SELECT count(*) FROM items WHERE held = ?", held)[0][0])

    def _starting(self, namespace: str) -> bool:
        return (
            self._one(
                "SELECT 1 FROM starts WHERE namespace IS NULL OR namespace = ? LIMIT 1", namespace
            )
            is not None
        )

    def _one(self, statement: str, *values: object) -> tuple[Any, ...] | None:
        rows = self._all(statement, *values)
        return rows[0] if rows else None

    def _all(self, statement: str, *values: object) -> list[Any]:
        with self._lock:
            return self._db.execute(statement, values).fetchall()

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """One transaction: all of it, or nothing."""
        with self._lock:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise


def _item(role: Role, job_id: str, body: str) -> Item:
    """Only events have a job; other lines of ours are kept as they will be shown."""
    if job_id:
        return Item(role, HEARD.validate_json(body))
    return Item(role, text=body)


def _item_of(follow_up: str) -> str:
    return f"follow-up {follow_up}"


def _time(stamp: float) -> datetime:
    return datetime.fromtimestamp(stamp, UTC)
