"""`sqlite:///path`: one file, several processes on one machine, nothing to install.

`sqlite:///semel.db` is relative to the working directory, `sqlite:////var/lib/semel.db` absolute.
Options in the URL: `table`, `synchronous` (FULL, or NORMAL: the last commits may be lost when the
machine, not the program, goes down) and `timeout`; `clock` and `trace`, functions, by name only.
"""

from __future__ import annotations

import os
import sqlite3
import time
import weakref
from collections.abc import Callable
from typing import Any, Final

from semel.core.records import Claim, ClaimRequest, CompleteRequest, Encoded, Identity
from semel.errors import ConfigError
from semel.stores.registry import DEFAULT_PREFIX, DEFAULT_TIMEOUT
from semel.stores.sql.aio import AsyncSQLStore
from semel.stores.sql.members import answers_or_error
from semel.stores.sql.sqlite_session import Session
from semel.stores.sql.sqlite_source import FileSource, GivenSource, Trace
from semel.stores.sql.sqlite_statements import DEFAULT_TABLE, SQLiteTable, SQLiteVerbs
from semel.stores.sql.sqlite_writer import Combiner, Writer
from semel.stores.sql.store import SQLStore
from semel.stores.sql.verbs import Operation
from semel.stores.urls import merge_options, positive_seconds, refuse_in_url, split_url

OPTIONS: Final = frozenset({"table", "synchronous", "timeout", "trace", "clock"})


def open_store(url: str, *, prefix: str, timeout: float, **options: Any) -> SQLiteStore:
    """Open a store for threads; the file is opened by the first call."""
    path, arguments = _arguments(url, timeout, options)
    return SQLiteStore(path, prefix=prefix, **arguments)


def open_async_store(url: str, *, prefix: str, timeout: float, **options: Any) -> AsyncSQLiteStore:
    """Open a store for asyncio; the file is opened by the first call."""
    path, arguments = _arguments(url, timeout, options)
    return AsyncSQLiteStore(path, prefix=prefix, **arguments)


class SQLiteStore(SQLStore):
    """A store for threads, which share their commits.

    It takes a path, or `connection=` of the application, which must not be in a transaction when
    the store is used and is never closed by it. Stores with different prefixes may share a table
    and never see each other's records. Times are the host's. `synchronous` and `trace` (which is
    told every statement) go with a path.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        connection: sqlite3.Connection | None = None,
        prefix: str = DEFAULT_PREFIX,
        table: str = DEFAULT_TABLE,
        timeout: float = DEFAULT_TIMEOUT,
        synchronous: str = "FULL",
        trace: Trace | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.path: str | None = None
        """The file, absolute; None with a connection of the application."""
        records = SQLiteTable(table, prefix, clock)
        upkeep = None
        if connection is None and path is not None:
            file = FileSource(path, records, timeout=timeout, synchronous=synchronous, trace=trace)
            source: FileSource | GivenSource = file
            self.path = file.place
            upkeep = Combiner(Session(file.for_upkeep()), timeout)
        elif connection is not None and path is None:
            source = GivenSource(connection, records, timeout=timeout)
        else:
            raise ConfigError("an SQLite store takes a path or a connection, one of them")
        self._records = records
        super().__init__(SQLiteVerbs(records), Combiner(Session(source), timeout), upkeep)

    def create_nothing(self) -> None:
        """From now on, raise ConfigError where a call would create the table."""
        self._records.autocreate = False

    def migrate(self) -> int:
        """Make the table, as any first call does too unless it is gone, and return its version."""
        return self._run(Operation(self._records.made, peek=True))

    def migration(self) -> str:
        """Write what makes the table in an empty file, for a person to read and run."""
        return self._records.script()


class AsyncSQLiteStore(AsyncSQLStore):
    """A store for asyncio: a writer thread of its own serves all tasks, many in one commit.

    The arguments are those of `SQLiteStore`, but for `connection`.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        prefix: str = DEFAULT_PREFIX,
        table: str = DEFAULT_TABLE,
        timeout: float = DEFAULT_TIMEOUT,
        synchronous: str = "FULL",
        trace: Trace | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        records = SQLiteTable(table, prefix, clock)
        source = FileSource(path, records, timeout=timeout, synchronous=synchronous, trace=trace)
        self.path = source.place
        verbs, writer = SQLiteVerbs(records), Writer(Session(source), timeout)
        upkeep = Writer(Session(source.for_upkeep()), timeout)
        super().__init__(verbs, writer, upkeep)
        self._asked = writer.asked
        for of_this_store in (writer, upkeep):
            # Dropped without being closed, it would keep a thread and two files for a while.
            weakref.finalize(self, of_this_store.drop).atexit = False

    # The verbs of every call go straight to the writer: each coroutine on the way takes time.

    async def claim(self, ask: ClaimRequest) -> Claim:
        """Ask to run the operation."""
        answer: Claim = answers_or_error(await self._asked((self._verbs.claim(ask),)))[0]
        return answer

    async def complete(self, identity: Identity, owner: bytes, result: Encoded, ttl: float) -> bool:
        """Store the owner's success."""
        ask = CompleteRequest(identity, owner, result, ttl)
        stored: bool = answers_or_error(await self._asked((self._verbs.complete(ask),)))[0]
        return stored


def _arguments(url: str, timeout: float, options: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    address, in_url = split_url(url)
    if not address.startswith("/"):
        raise ConfigError(f"{url}: write sqlite:///semel.db, or sqlite:////var/lib/semel.db")
    refuse_in_url(in_url, clock="a function", trace="a function")
    arguments = merge_options("sqlite", in_url, options, OPTIONS)
    given = arguments.pop("timeout", timeout)
    return address[1:], {**arguments, "timeout": positive_seconds("timeout", given)}
