"""Which connections transactional mode knows, and who speaks to each of them.

The module of a family is imported when its first connection comes: by then its driver is there.
"""

from __future__ import annotations

import importlib
from typing import Any, Final, Literal, NamedTuple, overload

from semel.errors import ConfigError
from semel.transactions.links import AsyncPlainLink, PlainLink

PACKAGE: Final = "semel.transactions"


class _Family(NamedTuple):
    """The class that speaks to a kind of connection."""

    module: str
    name: str


_PSYCOPG = _Family("psycopg", "PsycopgLink")
_ASYNC_PSYCOPG = _Family("psycopg", "AsyncPsycopgLink")
_ASYNCPG = _Family("asyncpg", "AsyncpgLink")
_SQLALCHEMY = _Family("sqlalchemy", "SQLAlchemyLink")
_ASYNC_SQLALCHEMY = _Family("sqlalchemy", "AsyncSQLAlchemyLink")
_DJANGO = _Family("django", "DjangoLink")

FAMILIES: Final = {
    ("sqlite3", "Connection"): _Family("sqlite", "SQLiteLink"),
    ("psycopg", "Connection"): _PSYCOPG,
    ("psycopg", "Transaction"): _PSYCOPG,
    ("pymysql", "Connection"): _Family("mysql", "PyMySQLLink"),
    ("sqlalchemy", "Session"): _SQLALCHEMY,
    ("sqlalchemy", "scoped_session"): _SQLALCHEMY,
    ("sqlalchemy", "Connection"): _SQLALCHEMY,
    ("django", "BaseDatabaseWrapper"): _DJANGO,
    ("django", "ConnectionProxy"): _DJANGO,
    ("builtins", "str"): _DJANGO,
}
"""For threads: the package and the class of a connection. A text is an alias of Django's."""

ASYNC_FAMILIES: Final = {
    ("aiosqlite", "Connection"): _Family("sqlite", "AsyncSQLiteLink"),
    ("psycopg", "AsyncConnection"): _ASYNC_PSYCOPG,
    ("psycopg", "AsyncTransaction"): _ASYNC_PSYCOPG,
    ("asyncpg", "Connection"): _ASYNCPG,
    ("asyncpg", "PoolConnectionProxy"): _ASYNCPG,
    ("asyncmy", "Connection"): _Family("mysql", "AsyncmyLink"),
    ("sqlalchemy", "AsyncSession"): _ASYNC_SQLALCHEMY,
    ("sqlalchemy", "async_scoped_session"): _ASYNC_SQLALCHEMY,
    ("sqlalchemy", "AsyncConnection"): _ASYNC_SQLALCHEMY,
}
"""For asyncio."""


@overload
def link_to(connection: object, *, asynchronous: Literal[False]) -> PlainLink: ...
@overload
def link_to(connection: object, *, asynchronous: Literal[True]) -> AsyncPlainLink: ...
def link_to(connection: object, *, asynchronous: bool) -> Any:
    """Find who speaks to this connection."""
    ours, theirs = (ASYNC_FAMILIES, FAMILIES) if asynchronous else (FAMILIES, ASYNC_FAMILIES)
    names = [
        (kind.__module__.partition(".")[0], kind.__name__) for kind in type(connection).__mro__
    ]
    for name in names:
        if name in ours:
            family = ours[name]
            module = importlib.import_module(f"{PACKAGE}.{family.module}")
            return getattr(module, family.name)(connection)
    shown = f"{names[0][0]}.{names[0][1]}"
    if any(name in theirs for name in names):
        engine = "Idempotency" if asynchronous else "AsyncIdempotency"
        raise ConfigError(f"{shown} goes with an {engine}, not with this kind of engine")
    raise ConfigError(
        f"idem.transaction() cannot write on {shown}; it takes connections of sqlite3, psycopg, "
        "asyncpg, PyMySQL, asyncmy, SQLAlchemy's sessions and connections, and Django's aliases"
    )
