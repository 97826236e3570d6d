"""The connections that transactional mode takes: the link of each, and those of one kind only.

A driver, and the part of a store that stands on it, is imported when its first connection comes:
by then the driver is there.
"""

from __future__ import annotations

from typing import Any, Final, Literal, overload

from semel.errors import ConfigError
from semel.stores.sql.mysql.statements import written_out
from semel.stores.sql.verbs import Reply, Statement
from semel.transactions import db_errors
from semel.transactions._sync.links import (
    Link,
    Nested,
    PlainLink,
    PsycopgLink,
    Savepoint,
    SQLAlchemyLink,
    SQLiteLink,
)
from semel.transactions.links import (
    AsyncPlainLink,
    AsyncPsycopgLink,
    AsyncSQLAlchemyLink,
    AsyncSQLiteLink,
    no_transaction,
)

# --- PostgreSQL: asyncpg -----------------------------------------------------------------


class AsyncpgLink(AsyncPlainLink):
    """An `asyncpg.Connection`, its own or a pool's."""

    dialect = "postgresql"
    way_in = "use `async with connection.transaction():` around it"

    def __init__(self, connection: Any) -> None:
        super().__init__(connection)
        from semel.stores.sql.postgres import tasks  # noqa: PLC0415 - see above

        self._asyncpg = tasks

    def in_transaction(self) -> bool:
        return bool(self._connection.is_in_transaction())

    async def execute(self, statement: Statement) -> Reply:
        return await self._asyncpg.execute(self._connection, statement)


# --- MySQL and MariaDB: PyMySQL and mysqlclient for threads, asyncmy for asyncio ---------
#
# The session is the application's: how its driver would quote our values there is not relied on.

_IN_TRANSACTION: Final = 1
"""SERVER_STATUS_IN_TRANS: the server says so with each answer."""


class PyMySQLLink(PlainLink):
    """A connection of PyMySQL."""

    dialect = "mysql"
    way_in = "call connection.begin() first"

    def __init__(self, connection: Any) -> None:
        super().__init__(connection)
        from semel.stores.sql.mysql import threads  # noqa: PLC0415 - see above

        self._driver = threads

    def in_transaction(self) -> bool:
        return bool(self._connection.server_status & _IN_TRANSACTION)

    def joins(self) -> bool:
        """Under autocommit this server takes a savepoint and forgets it at once."""
        return self.in_transaction() or not self._connection.get_autocommit()

    def execute(self, statement: Statement) -> Reply:
        return self._driver.send(self._connection, written_out(statement))


class AsyncmyLink(AsyncPlainLink):
    """A connection of asyncmy."""

    dialect = "mysql"
    way_in = "call `await connection.begin()` first"

    def __init__(self, connection: Any) -> None:
        super().__init__(connection)
        from semel.stores.sql.mysql import tasks  # noqa: PLC0415 - see above

        self._driver = tasks

    def in_transaction(self) -> bool:
        return bool(self._connection.get_transaction_status())

    def joins(self) -> bool:
        """Under autocommit this server takes a savepoint and forgets it at once."""
        return self.in_transaction() or not self._connection.get_autocommit()

    async def execute(self, statement: Statement) -> Reply:
        return await self._driver.send(self._connection, written_out(statement))


class MySQLdbLink(PlainLink):
    """A connection of mysqlclient, which does not say whether a transaction is open."""

    dialect = "mysql"
    way_in = 'call connection.query("START TRANSACTION") first'

    def in_transaction(self) -> bool:
        """Try it: under autocommit, a savepoint outside a transaction is forgotten at once."""
        if not self._connection.get_autocommit():
            return True  # if none is open, the next statement begins one, and waits for a commit
        savepoint = Savepoint(self)
        savepoint.open()
        try:
            savepoint.commit()
        except Exception as error:
            if db_errors.is_ended(error):
                return False
            raise
        return True

    def joins(self) -> bool:
        return self.in_transaction()

    def execute(self, statement: Statement) -> Reply:
        # The default of the class: an application's own connection may have another.
        cursor = self._connection.cursor(self._connection.default_cursor)
        sql, values, _, then = written_out(statement)
        try:
            changed = cursor.execute(sql, values)
            if then is not None:
                cursor.execute(then.sql, then.parameters)
            return Reply(list(cursor.fetchall()), changed)
        finally:
            cursor.close()


# --- Django: the connection of an alias, or `django.db.connection` itself -----------------
#
# Savepoints are those of `transaction.atomic()`: Django then knows what was undone, and drops the
# `on_commit` hooks that belonged to it. The statements go to the driver's connection underneath.


class DjangoLink(Link):
    """A database of a Django project."""

    def __init__(self, given: Any) -> None:
        if isinstance(given, str):
            given = _of_alias(given)
        self._wrapper = given
        self.dialect: str = given.vendor

    def begin(self) -> Nested:
        """Enter an inner `atomic()`, which is a savepoint."""
        if not self._wrapper.in_atomic_block:
            raise no_transaction("use `with transaction.atomic():` around it")
        # First: a driver that is not known must be rejected before anything is entered.
        self._driver = link_to(self._wrapper.connection, asynchronous=False)
        return _Atomic(self._wrapper.alias)

    def execute(self, statement: Statement) -> Reply:
        return self._driver.execute(statement)


def _of_alias(alias: str) -> Any:
    from django.core.exceptions import ImproperlyConfigured  # noqa: PLC0415 - see above
    from django.db import connections  # noqa: PLC0415

    # No other text is shown than that of an alias: a URL may hold a password.
    try:
        known = list(connections)
    except ImproperlyConfigured as error:
        raise ConfigError(
            "a string is the alias of a Django database, and Django has no settings here: set "
            "DJANGO_SETTINGS_MODULE and call django.setup(), or pass the connection itself"
        ) from error
    if alias not in known:
        raise ConfigError(f"Django's DATABASES has no such alias; it has {', '.join(known)}")
    return connections[alias]


class _Undo(Exception):
    """Makes `atomic()` roll back; it never leaves this module."""


class _Atomic:
    """An inner `atomic()`, from its entry on."""

    def __init__(self, alias: str) -> None:
        from django.db import transaction  # noqa: PLC0415 - see above

        self._atomic: Any = transaction.atomic(using=alias)
        self._atomic.__enter__()

    def commit(self) -> None:
        self._atomic.__exit__(None, None, None)

    def rollback(self) -> None:
        error = _Undo()
        self._atomic.__exit__(_Undo, error, error.__traceback__)


# --- which link takes a connection -------------------------------------------------------

LINKS: Final[dict[tuple[str, str], Any]] = {
    ("sqlite3", "Connection"): SQLiteLink,
    ("psycopg", "Connection"): PsycopgLink,
    ("psycopg", "Transaction"): PsycopgLink,
    ("pymysql", "Connection"): PyMySQLLink,
    ("MySQLdb", "Connection"): MySQLdbLink,
    ("sqlalchemy", "Session"): SQLAlchemyLink,
    ("sqlalchemy", "scoped_session"): SQLAlchemyLink,
    ("sqlalchemy", "Connection"): SQLAlchemyLink,
    ("django", "BaseDatabaseWrapper"): DjangoLink,
    ("django", "ConnectionProxy"): DjangoLink,
    ("builtins", "str"): DjangoLink,
}
"""For threads, by the package and the class of a connection. A text is an alias of Django's."""

ASYNC_LINKS: Final[dict[tuple[str, str], Any]] = {
    ("aiosqlite", "Connection"): AsyncSQLiteLink,
    ("psycopg", "AsyncConnection"): AsyncPsycopgLink,
    ("psycopg", "AsyncTransaction"): AsyncPsycopgLink,
    ("asyncpg", "Connection"): AsyncpgLink,
    ("asyncpg", "PoolConnectionProxy"): AsyncpgLink,
    ("asyncmy", "Connection"): AsyncmyLink,
    ("sqlalchemy", "AsyncSession"): AsyncSQLAlchemyLink,
    ("sqlalchemy", "async_scoped_session"): AsyncSQLAlchemyLink,
    ("sqlalchemy", "AsyncConnection"): AsyncSQLAlchemyLink,
}
"""For asyncio."""


@overload
def link_to(connection: object, *, asynchronous: Literal[False]) -> PlainLink: ...
@overload
def link_to(connection: object, *, asynchronous: Literal[True]) -> AsyncPlainLink: ...
def link_to(connection: object, *, asynchronous: bool) -> Any:
    """Make the link that takes this connection."""
    ours, theirs = (ASYNC_LINKS, LINKS) if asynchronous else (LINKS, ASYNC_LINKS)
    names = _names(connection)
    link = next((ours[name] for name in names if name in ours), None)
    if link is not None:
        try:
            return link(connection)
        except ModuleNotFoundError as error:
            # The text is not shown: it may be a URL, given by mistake, with a password in it.
            what = (
                "a string is the alias of a Django database"
                if link is DjangoLink
                else "it needs more"
            )
            raise ConfigError(
                f"idem.transaction() cannot write on this connection: {what}, and {error.name} is "
                "not installed"
            ) from error
    shown = f"{names[0][0]}.{names[0][1]}"
    if any(name in theirs for name in names):
        engine = "Idempotency" if asynchronous else "AsyncIdempotency"
        raise ConfigError(f"{shown} goes with an {engine}, not with this kind of engine")
    raise ConfigError(
        f"idem.transaction() cannot write on {shown}; it takes connections of sqlite3, "
        "aiosqlite, psycopg, asyncpg, PyMySQL, mysqlclient, asyncmy, SQLAlchemy's sessions "
        "and connections, and Django's aliases"
    )


def is_connection(thing: object) -> bool:
    """Whether this is a connection that one of the engines can write on."""
    return any(name in LINKS or name in ASYNC_LINKS for name in _names(thing))


def _names(connection: object) -> list[tuple[str, str]]:
    return [(kind.__module__.partition(".")[0], kind.__name__) for kind in type(connection).__mro__]
