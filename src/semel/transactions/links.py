"""A caller's connection in transactional mode: what is asked of it, and savepoints made by SQL.

Here are the links that both kinds of engines have; `drivers` has the others, and chooses. A link
speaks to one connection for one block. It never begins, commits or rolls back the transaction
itself. A driver, and the part of a store that stands on it, is imported when its first connection
comes: by then the driver is there.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from itertools import count
from typing import Any, Final, Protocol

from semel.errors import ConfigError
from semel.stores.sql.verbs import Reply, Statement
from semel.transactions import db_errors

BEGIN: Final = "BEGIN IMMEDIATE"

_names: Final = count(1)
"""A savepoint's name means something to one connection alone."""


def command(sql: str) -> Statement:
    """Make a statement without values whose answer is not read."""
    return Statement(sql, (), writes=True)


def question(sql: str, *values: object) -> Statement:
    """Make a statement that is asked for its rows."""
    return Statement(sql, values, writes=False)


def no_transaction(way_in: str) -> ConfigError:
    """Say that a transaction is needed, and how to begin one."""
    return ConfigError(
        "idem.transaction() writes its record in your own transaction, and none is open on this "
        f"connection; {way_in}"
    )


# --- links and savepoints ----------------------------------------------------------------


class AsyncNested(Protocol):
    """A savepoint, which a framework may keep an account of."""

    async def commit(self) -> object:
        """Release it: what was done since belongs to the transaction."""
        ...

    async def rollback(self) -> object:
        """Undo what was done since."""
        ...


class AsyncLink(ABC):
    """A caller's connection."""

    dialect: str
    """sqlite, postgresql or mysql."""

    @abstractmethod
    async def begin(self) -> AsyncNested:
        """Open a savepoint, or raise a ConfigError when no transaction is open."""

    @abstractmethod
    async def execute(self, statement: Statement) -> Reply:
        """Run one statement, in the caller's transaction."""


class AsyncSavepoint:
    """A savepoint made by SQL, which all three databases spell alike."""

    def __init__(self, link: AsyncLink) -> None:
        self._link = link
        self._name = f"semel_{next(_names)}"

    async def open(self) -> None:
        await self._run("SAVEPOINT")

    async def commit(self) -> None:
        """Release it; an error says that its transaction has ended."""
        await self._run("RELEASE SAVEPOINT")

    async def rollback(self) -> None:
        """Undo what was done since, and forget it."""
        await self._run("ROLLBACK TO SAVEPOINT")
        await self._run("RELEASE SAVEPOINT")

    async def _run(self, verb: str) -> None:
        await self._link.execute(command(f"{verb} {self._name}"))


class AsyncPlainLink(AsyncLink):
    """A driver's own connection, judged by its state."""

    way_in: str
    """How a transaction is begun on it, for the error when none is open."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    @abstractmethod
    def in_transaction(self) -> bool:
        """Whether a transaction is open; the autocommit flag says nothing about that."""

    def joins(self) -> bool:
        """Whether a savepoint can be relied on; most servers reject it outside a transaction."""
        return True

    async def begin(self) -> AsyncNested:
        if not self.in_transaction():
            raise no_transaction(self.way_in)
        savepoint = AsyncSavepoint(self)
        await savepoint.open()
        return savepoint


# --- SQLite ------------------------------------------------------------------------------


class AsyncSQLiteLink(AsyncPlainLink):
    """A connection of aiosqlite."""

    dialect = "sqlite"
    way_in = f'BEGIN first: await connection.execute("{BEGIN}")'

    def in_transaction(self) -> bool:
        return bool(self._connection.in_transaction)

    async def ensure(self) -> None:
        """Begin what a framework believes to have begun: sqlite3 waits for the first write."""
        if not self._connection.in_transaction:
            await self._connection.execute(BEGIN)

    async def execute(self, statement: Statement) -> Reply:
        cursor = await self._connection.cursor()
        cursor.row_factory = None  # the application's own may be another
        try:
            await cursor.execute(statement.sql, statement.parameters)
            rows = [tuple(row) for row in await cursor.fetchall()]
            return Reply(rows, cursor.rowcount)
        finally:
            await cursor.close()


# --- PostgreSQL: psycopg 3 ---------------------------------------------------------------


class AsyncPsycopgLink(AsyncPlainLink):
    """A `psycopg.AsyncConnection`, or the `AsyncTransaction` that its `transaction()` returns."""

    dialect = "postgresql"
    way_in = "use `async with connection.transaction():` around it"

    def __init__(self, connection: Any) -> None:
        from psycopg.pq import TransactionStatus  # noqa: PLC0415 - see above

        from semel.stores.sql.postgres import threads  # noqa: PLC0415 - see above

        super().__init__(getattr(connection, "connection", connection))
        self._open = (TransactionStatus.INTRANS, TransactionStatus.INERROR)
        self._sessions = threads

    def in_transaction(self) -> bool:
        self._sessions.check_answers(self._connection)
        return self._connection.info.transaction_status in self._open

    async def execute(self, statement: Statement) -> Reply:
        reply: Reply = await self._sessions.async_execute(self._connection, statement)
        return reply


# --- SQLAlchemy 2: sessions and connections ----------------------------------------------
#
# Savepoints are SQLAlchemy's own, because a session has to know which of its objects went with one.
# The statements go to the driver's connection underneath. So a statement that is interrupted (a
# cancellation, a signal) is ours to report: SQLAlchemy closes the connection, as it does after
# its own statements. An answer may still come on it.

_DIALECTS = {"mariadb": "mysql"}
"""Where SQLAlchemy has two names for what is one to us."""

_AUTOCOMMIT = "SQLAlchemy runs this connection in AUTOCOMMIT: give it another isolation level"


class AsyncSQLAlchemyLink(AsyncLink):
    """One of `AsyncSession` and `AsyncConnection`."""

    def __init__(self, given: Any) -> None:
        self._given = given
        name: str = (given if is_core(given) else given.get_bind()).dialect.name
        self.dialect = _DIALECTS.get(name, name)

    async def begin(self) -> AsyncNested:
        from semel.transactions.drivers import link_to  # noqa: PLC0415 - it knows this link, too

        given = self._given
        if not given.in_transaction():
            raise no_transaction("use `async with session.begin():` around it")
        self._core = core = given if is_core(given) else await given.connection()
        self._driver = link_to(await aio_driver_connection(core), asynchronous=True)
        if isinstance(self._driver, AsyncSQLiteLink):
            try:
                await self._driver.ensure()
            except BaseException as error:
                await self._close_if_interrupted(error)
                raise
        if not self._driver.joins():
            raise no_transaction(_AUTOCOMMIT)
        self._nested: Any = await given.begin_nested()
        if core is not given:
            try:
                await given.connection()  # only now a session sets its savepoint
            except BaseException:
                await self._nested.rollback()
                raise
        nested: AsyncNested = self._nested
        return nested

    async def execute(self, statement: Statement) -> Reply:
        if self._core.invalidated:
            raise db_errors.lost_error()
        # After a commit the driver's connection may be another caller's already, by the pool.
        if not self._nested.is_active:
            raise db_errors.ended_error()
        try:
            return await self._driver.execute(statement)
        except BaseException as error:
            await self._close_if_interrupted(error)
            raise

    async def _close_if_interrupted(self, error: BaseException) -> None:
        if db_errors.is_interruption(error):
            await self._core.invalidate()


def is_core(given: Any) -> bool:
    """Whether this is a connection rather than a session."""
    return hasattr(given, "exec_driver_sql")


def driver_connection(core: Any) -> Any:
    """Return the driver's connection below a `Connection`."""
    return core.connection.driver_connection


async def aio_driver_connection(core: Any) -> Any:
    """Return the driver's connection below an `AsyncConnection`."""
    return (await core.get_raw_connection()).driver_connection
