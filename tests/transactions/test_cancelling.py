"""A call that is cancelled inside `idem.transaction()` ends by that, and its connection is not lost.

SQLAlchemy closes a connection whose statement was interrupted, and opens another for the next
caller. The statements of a record go to the driver's connection underneath, and must do the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from engines.facade import until
from interrupting import TimeLimit
from semel import AsyncIdempotency, Idempotency, RetryTransaction
from servers.mariadb import MariaDBServer
from stores import mysql_given, postgres_given
from stores.sqlite_helpers import write_lock
from transactions.kinds import PATIENCE, path_of

DRIVERS = {
    "asyncmy": ("mysql", "mysql+asyncmy"),
    "asyncpg": ("postgres", "postgresql+asyncpg"),
    "psycopg": ("postgres", "postgresql+psycopg"),
    "aiosqlite": ("sqlite", "sqlite+aiosqlite"),
}


class Place:
    """A database with one pooled connection for requests, and one that holds a key."""

    def __init__(self, request, scheme: str, database: str) -> None:
        self.url = request.getfixturevalue(f"{database}_url")
        self._database = database
        self._server: MariaDBServer | None = (
            request.getfixturevalue("mariadb_of_this_worker") if database == "mysql" else None
        )
        if database == "sqlite":
            self.engine_url = f"{scheme}:///{path_of(self.url)}?timeout={PATIENCE:g}"
        else:
            self.engine_url = f"{scheme}://{self.url.partition('://')[2]}"
        self.one = {"pool_size": 1, "max_overflow": 0, "pool_timeout": PATIENCE}

    def waits(self) -> bool:
        """Whether a statement waits for the lock of another transaction."""
        if self._server is not None:
            return mysql_given.waiting_for_a_lock(self._server) > 0
        return self._database == "sqlite" or postgres_given.blocked(self.url)


@contextlib.asynccontextmanager
async def session_of(engine):
    async with AsyncSession(engine) as session, session.begin():
        yield session


@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize("begin", [session_of, lambda engine: engine.begin()], ids=["session", ""])
def test_a_task_that_is_cancelled_while_it_claims_gives_its_connection_back(request, driver, begin):
    database, scheme = DRIVERS[driver]
    place = Place(request, scheme, database)

    async def scenario() -> None:
        # Named: before SQLAlchemy 2.0.38 a file of SQLite has no pool by default.
        pool = sa.AsyncAdaptedQueuePool
        pooled = create_async_engine(place.engine_url, poolclass=pool, **place.one)
        begun: list[object] = []
        sa.event.listen(pooled.sync_engine, "begin", begun.append)
        others = create_async_engine(place.engine_url)
        async with AsyncIdempotency(place.url) as idem:
            await idem.peek("any")

            async def request_() -> object:
                async with begin(pooled) as work, idem.transaction(work, "k") as attempt:
                    if not attempt.replayed:
                        attempt.result = "done"
                return attempt.replayed

            async with others.connect() as holder, holder.begin() as transaction:
                async with idem.transaction(holder, "k") as attempt:
                    attempt.result = "never committed"
                cancelled = asyncio.create_task(request_())
                await until(lambda: begun)
                while not await asyncio.to_thread(place.waits):
                    pass
                cancelled.cancel()
                await asyncio.sleep(0)
                await transaction.rollback()
            with pytest.raises(asyncio.CancelledError):
                await cancelled
            assert pooled.pool.checkedout() == 0
            async with pooled.connect() as connection:
                assert (await connection.execute(sa.text("SELECT 42"))).scalar() == 42
            assert await request_() is False
            assert await request_() is True
        await pooled.dispose()
        await others.dispose()

    asyncio.run(scenario())


class Stop(BaseException):
    """What a signal handler raises in the middle of a statement."""


@pytest.mark.parametrize(
    ("scheme", "error"),
    [
        ("mysql+pymysql", Stop),
        ("mysql+pymysql", TimeLimit),
        ("postgresql+psycopg", Stop),
        ("postgresql+psycopg", TimeLimit),
        ("postgresql+psycopg", TimeoutError),  # PyMySQL itself takes it for a lost connection
    ],
)
def test_a_thread_that_is_interrupted_while_it_claims_gives_its_connection_back(
    request, scheme, error
):
    place = Place(request, scheme, "mysql" if scheme.startswith("mysql") else "postgres")
    pooled = sa.create_engine(place.engine_url, **place.one)
    others = sa.create_engine(place.engine_url)

    def interrupt() -> None:
        while not place.waits():
            pass
        signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)

    def stop(*_: object) -> None:
        raise error

    before = signal.signal(signal.SIGUSR1, stop)
    interrupting = threading.Thread(target=interrupt)
    try:
        with Idempotency(place.url) as idem:
            idem.peek("any")

            def request_() -> object:
                with (
                    Session(pooled) as work,
                    work.begin(),
                    idem.transaction(work, "k") as attempt,
                ):
                    if not attempt.replayed:
                        attempt.result = "done"
                return attempt.replayed

            with others.connect() as holder, holder.begin() as transaction:
                with idem.transaction(holder, "k") as attempt:
                    attempt.result = "never committed"
                interrupting.start()
                with pytest.raises(error):
                    request_()
                interrupting.join()
                transaction.rollback()
            assert pooled.pool.checkedout() == 0
            assert request_() is False
            assert request_() is True
    finally:
        signal.signal(signal.SIGUSR1, before)
        pooled.dispose()
        others.dispose()


def test_a_sqlite_file_that_another_connection_has_locked_asks_for_a_repetition(sqlite_url):
    engine = sa.create_engine(f"sqlite:///{path_of(sqlite_url)}?timeout=0")
    with Idempotency(sqlite_url) as idem:
        idem.peek("any")
        with write_lock(path_of(sqlite_url)), engine.begin() as work:
            with pytest.raises(RetryTransaction), idem.transaction(work, "k"):
                pass
            assert engine.pool.checkedout() == 1
        assert engine.pool.checkedout() == 0
    engine.dispose()


def test_a_task_is_asked_for_a_repetition_as_well(sqlite_url):
    async def scenario() -> None:
        engine = create_async_engine(f"sqlite+aiosqlite:///{path_of(sqlite_url)}?timeout=0")
        async with AsyncIdempotency(sqlite_url) as idem:
            await idem.peek("any")
            with write_lock(path_of(sqlite_url)):
                async with engine.begin() as work:
                    with pytest.raises(RetryTransaction):
                        await idem.transaction(work, "k").__aenter__()
        await engine.dispose()

    asyncio.run(scenario())
