"""A database with a business table, an engine on it, and work of one kind of connection."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import Future
from typing import Any

import psycopg
import pymysql
import pytest

from semel import AsyncIdempotency, Idempotency
from transactions.kinds import PATIENCE, Kind, Work, mysql_login, path_of


class World:
    """One database, seen by connections of one kind."""

    def __init__(self, kind: Kind, url: str) -> None:
        self.kind = kind
        self.url = url
        self.query("CREATE TABLE ledger (entry VARCHAR(100) NOT NULL, amount INTEGER NOT NULL)")

    def query(self, sql: str) -> list[Any]:
        """Run a statement from outside, on a connection of its own."""
        match self.kind.dialect:
            case "sqlite":
                opened: Any = sqlite3.connect(path_of(self.url), timeout=PATIENCE)
            case "postgresql":
                opened = psycopg.connect(self.url)
            case _:
                opened = pymysql.connect(**mysql_login(self.url))
        with contextlib.closing(opened) as connection:
            cursor = connection.cursor()
            cursor.execute(sql)
            rows = list(cursor.fetchall()) if cursor.description else []
            connection.commit()
            return rows

    def entries(self) -> list[str]:
        """What the business table holds."""
        return sorted(row[0] for row in self.query("SELECT entry FROM ledger"))

    @contextlib.asynccontextmanager
    async def engine(self, *, ready: bool = True, **options: Any) -> AsyncIterator[Any]:
        """An engine of the connection's kind, with its table made."""
        if self.kind.asynchronous:
            async with AsyncIdempotency(self.url, **options) as idem:
                if ready:
                    await idem.peek("any")
                yield idem
        else:
            with Idempotency(self.url, **options) as idem:
                if ready:
                    idem.peek("any")
                yield idem

    def work(self) -> contextlib.AbstractAsyncContextManager[Work]:
        """A connection with a transaction that commits in the end."""
        return self.kind.working(self.url)

    def idle(self) -> contextlib.AbstractAsyncContextManager[Work]:
        """A connection without a transaction."""
        return self.kind.idle(self.url)

    def once(
        self, idem: Any, work: Work, key: str = "order-1", **options: Any
    ) -> contextlib.AbstractAsyncContextManager[Any]:
        """The block under test."""
        return self.entered(idem.transaction(work.connection, key, **options))

    @contextlib.asynccontextmanager
    async def entered(self, block: Any) -> AsyncIterator[Any]:
        if self.kind.asynchronous:
            async with block as given:
                yield given
        else:
            with block as given:
                yield given

    async def done(self, called: Any) -> Any:
        """The answer of a call of either engine."""
        return await called if self.kind.asynchronous else called

    async def pay(self, idem: Any, key: str = "order-1", **options: Any) -> Any:
        """A whole unit of work: one ledger entry per key."""
        async with self.work() as work, self.once(idem, work, key, **options) as attempt:
            if not attempt.replayed:
                await work.run(f"INSERT INTO ledger VALUES ('{key}', 1)")
                attempt.result = {"paid": key}
        return attempt


def started(scenario: Callable[[], Coroutine[Any, Any, Any]]) -> Future[Any]:
    """Run a scenario in a thread of its own, with its own loop."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(asyncio.run(scenario()))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


DATABASES = {"sqlite": "sqlite_url", "postgresql": "postgres_url", "mysql": "mysql_url"}


@pytest.fixture
def world(request: pytest.FixtureRequest) -> World:
    """A database for the kind of connection that the test asks for by parameter."""
    kind: Kind = request.param
    return World(kind, request.getfixturevalue(DATABASES[kind.dialect]))
