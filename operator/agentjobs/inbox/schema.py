"""The file of an inbox: its tables, who may read it, how it is written."""

import os
import sqlite3
import time
from pathlib import Path
from typing import Final

VERSION: Final = 1
BUSY_SECONDS: Final = 10.0
"""How long one process waits for another that writes."""
SWITCH_SECONDS: Final = 0.01
TABLES: Final = """
CREATE TABLE items (              -- what waits for the agent, in the order of its arrival
  seq INTEGER PRIMARY KEY AUTOINCREMENT,
  id TEXT NOT NULL UNIQUE,        -- of the event, the message, the follow-up
  role TEXT NOT NULL,
  job_id TEXT NOT NULL DEFAULT '',
  body TEXT NOT NULL,             -- an event as JSON, or text
  held INTEGER NOT NULL DEFAULT 0,
  batch TEXT                      -- the batch that it was given out in
);
CREATE INDEX items_by_batch ON items (batch);
CREATE TABLE seen (id TEXT PRIMARY KEY, at REAL NOT NULL) WITHOUT ROWID;
CREATE INDEX seen_by_time ON seen (at);
CREATE TABLE batches (            -- given out, not acknowledged
  id TEXT PRIMARY KEY,
  holder TEXT NOT NULL,
  until REAL NOT NULL,            -- when others may have it
  parts TEXT NOT NULL,
  tokens INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE starts (             -- begun, the answer not on record
  key TEXT PRIMARY KEY,
  request TEXT NOT NULL,
  namespace TEXT,                 -- NULL: the caller's own
  at REAL NOT NULL
) WITHOUT ROWID;
CREATE TABLE jobs (               -- started by this agent, or heard of
  id TEXT PRIMARY KEY,
  own INTEGER NOT NULL,
  at REAL NOT NULL,
  status TEXT,                    -- how it ended; NULL: no end has come in
  looked REAL NOT NULL            -- when the gateway was asked about it
) WITHOUT ROWID;
CREATE TABLE follow_ups (
  id TEXT PRIMARY KEY,
  jobs TEXT NOT NULL,
  note TEXT NOT NULL,
  request TEXT,                   -- a start; NULL: the agent is told
  condition TEXT NOT NULL,
  due REAL                        -- when its jobs were over
) WITHOUT ROWID;
CREATE TABLE cursors (namespace TEXT PRIMARY KEY, since TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE counts (name TEXT PRIMARY KEY, n INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE flags (name TEXT PRIMARY KEY) WITHOUT ROWID;
"""


def connect(path: Path | None) -> sqlite3.Connection:
    """Open the file of an inbox, or make it; None: in memory, for tries.

    Whoever may read the file reads what users and tools say, so it is made for its owner alone.

    :raises OSError: it cannot be made.
    :raises sqlite3.Error: it is no database.
    :raises ValueError: it is another version's.
    """
    if path is not None:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    connection = sqlite3.connect(
        path or ":memory:", timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False
    )
    try:
        _prepare(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def _prepare(connection: sqlite3.Connection) -> None:
    # What is written into a damaged file may be gone tomorrow: no 2xx for that.
    (found,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    if found != "ok":
        raise sqlite3.DatabaseError(f"the file is damaged: {found}")
    _write_ahead(connection)
    # A 2xx is a promise: it must hold when the power goes, not only when the process does.
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("BEGIN IMMEDIATE")
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version == 0:
        for statement in TABLES.split(";\n"):
            if statement.strip():
                connection.execute(statement)
        connection.execute(f"PRAGMA user_version = {VERSION:d}")
    connection.execute("COMMIT")
    if version not in {0, VERSION}:
        raise ValueError(f"the file is of version {version} of the inbox, this is {VERSION}")


def _write_ahead(connection: sqlite3.Connection) -> None:
    """Switch to WAL. Here alone SQLite does not wait for another process that does the same."""
    end = time.monotonic() + BUSY_SECONDS
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > end:
                raise
            time.sleep(SWITCH_SECONDS)
        else:
            return
