# Generated from transactions/links.py by `make generate`: change that file instead.
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

from semel.stores.sql.verbs import Reply, Statement
from semel.transactions import db_errors
from semel.transactions.links import command, driver_connection, is_core, no_transaction

BEGIN: Final = "BEGIN IMMEDIATE"

_names: Final = count(1)
"""A savepoint's name means something to one connection alone."""


# --- links and savepoints ----------------------------------------------------------------


class Nested(Protocol):
    """A savepoint, which a framework may keep an account of."""

    def commit(self) -> object:
        """Release it: what was done since belongs to the transaction."""
        ...

    def rollback(self) -> object:
        """Undo what was done since."""
        ...


class Link(ABC):
    """A caller's connection."""

    dialect: str
    """sqlite, postgresql or mysql."""

    @abstractmethod
    def begin(self) -> Nested:
        """Open a savepoint, or raise a ConfigError when no transaction is open."""

    @abstractmethod
    def execute(self, statement: Statement) -> Reply:
        """Run one statement, in the caller's transaction."""


class Savepoint:
    """A savepoint made by SQL, which all three databases spell alike."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._name = f"semel_{next(_names)}"

    def open(self) -> None:
        self._run("SAVEPOINT")

    def commit(self) -> None:
        """Release it; an error says that its transaction has ended."""
        self._run("RELEASE SAVEPOINT")

    def rollback(self) -> None:
        """Undo what was done since, and forget it."""
        self._run("ROLLBACK TO SAVEPOINT")
        self._run("RELEASE SAVEPOINT")

    def _run(self, verb: str) -> None:
        self._link.execute(command(f"{verb} {self._name}"))


class PlainLink(Link):
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

    def begin(self) -> Nested:
        if not self.in_transaction():
            raise no_transaction(self.way_in)
        savepoint = Savepoint(self)
        savepoint.open()
        return savepoint


# --- SQLite ------------------------------------------------------------------------------


class SQLiteLink(PlainLink):
    """A connection of sqlite3."""

    dialect = "sqlite"
    way_in = f'BEGIN first: connection.execute("{BEGIN}")'

    def in_transaction(self) -> bool:
        return bool(self._connection.in_transaction)

    def ensure(self) -> None:
        """Begin what a framework believes to have begun: sqlite3 waits for the first write."""
        if not self._connection.in_transaction:
            self._connection.execute(BEGIN)

    def execute(self, statement: Statement) -> Reply:
        cursor = self._connection.cursor()
        cursor.row_factory = None  # the application's own may be another
        try:
            cursor.execute(statement.sql, statement.parameters)
            rows = [tuple(row) for row in cursor.fetchall()]
            return Reply(rows, cursor.rowcount)
        finally:
            cursor.close()


# --- PostgreSQL: psycopg 3 ---------------------------------------------------------------


class PsycopgLink(PlainLink):
    """A `psycopg.Connection`, or the `Transaction` that its `transaction()` returns."""

    dialect = "postgresql"
    way_in = "use `with connection.transaction():` around it"

    def __init__(self, connection: Any) -> None:
        from psycopg.pq import TransactionStatus  # noqa: PLC0415 - see above

        from semel.stores.sql.postgres import threads  # noqa: PLC0415 - see above

        super().__init__(getattr(connection, "connection", connection))
        self._open = (TransactionStatus.INTRANS, TransactionStatus.INERROR)
        self._sessions = threads

    def in_transaction(self) -> bool:
        self._sessions.check_answers(self._connection)
        return self._connection.info.transaction_status in self._open

    def execute(self, statement: Statement) -> Reply:
        reply: Reply = self._sessions.execute(self._connection, statement)
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


class SQLAlchemyLink(Link):
    """One of `Session` and `Connection`."""

    def __init__(self, given: Any) -> None:
        self._given = given
        name: str = (given if is_core(given) else given.get_bind()).dialect.name
        self.dialect = _DIALECTS.get(name, name)

    def begin(self) -> Nested:
        from semel.transactions.drivers import link_to  # noqa: PLC0415 - it knows this link, too

        given = self._given
        if not given.in_transaction():
            raise no_transaction("use `with session.begin():` around it")
        self._core = core = given if is_core(given) else given.connection()
        self._driver = link_to(driver_connection(core), asynchronous=False)
        if isinstance(self._driver, SQLiteLink):
            try:
                self._driver.ensure()
            except BaseException as error:
                self._close_if_interrupted(error)
                raise
        if not self._driver.joins():
            raise no_transaction(_AUTOCOMMIT)
        self._nested: Any = given.begin_nested()
        if core is not given:
            try:
                given.connection()  # only now a session sets its savepoint
            except BaseException:
                self._nested.rollback()
                raise
        nested: Nested = self._nested
        return nested

    def execute(self, statement: Statement) -> Reply:
        if self._core.invalidated:
            raise db_errors.lost_error()
        # After a commit the driver's connection may be another caller's already, by the pool.
        if not self._nested.is_active:
            raise db_errors.ended_error()
        try:
            return self._driver.execute(statement)
        except BaseException as error:
            self._close_if_interrupted(error)
            raise

    def _close_if_interrupted(self, error: BaseException) -> None:
        if db_errors.is_interruption(error):
            self._core.invalidate()
