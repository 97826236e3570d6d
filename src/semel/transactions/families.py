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
    ("MySQLdb", "Connection"): _Family("mysql", "MySQLdbLink"),
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
    ("asyncmy", "Connection"): _Family("asyncmy", "AsyncmyLink"),
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
    names = _names(connection)
    for name in names:
        if name in ours:
            return _speaker(ours[name])(connection)
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
    return any(name in FAMILIES or name in ASYNC_FAMILIES for name in _names(thing))


def _names(connection: object) -> list[tuple[str, str]]:
    return [(kind.__module__.partition(".")[0], kind.__name__) for kind in type(connection).__mro__]


def _speaker(family: _Family) -> Any:
    """Give the class that speaks to a family."""
    try:
        module = importlib.import_module(f"{PACKAGE}.{family.module}")
    except ModuleNotFoundError as error:
        # The text is not shown: whoever took this for the place of a URL has a password in it.
        what = "a text is the alias of a Django database" if family is _DJANGO else "it needs more"
        raise ConfigError(
            f"idem.transaction() cannot write on this connection: {what}, and {error.name} is not "
            "installed"
        ) from error
    return getattr(module, family.name)
