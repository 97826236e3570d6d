"""The store classes: a URL or the application's own connections, and the verbs on them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final, Generic, NamedTuple, TypedDict, TypeVar, Unpack

from semel.errors import ConfigError
from semel.stores.registry import DEFAULT_PREFIX, DEFAULT_TIMEOUT
from semel.stores.sql.aio import AsyncSQLStore
from semel.stores.sql.migrations import DEFAULT_TABLE
from semel.stores.sql.mysql import tasks, threads
from semel.stores.sql.mysql.addresses import STORE_OPTIONS, Address, parse, switch
from semel.stores.sql.mysql.migrating import ensure
from semel.stores.sql.mysql.table import MySQLTable, OwnColumns
from semel.stores.sql.mysql.verbs import MySQLVerbs
from semel.stores.sql.store import SQLStore
from semel.stores.sql.verbs import Verb
from semel.stores.urls import merge_options, positive_seconds, whole_number

Connect = TypeVar("Connect")

POOL_SIZE: Final = 10


class Options(TypedDict, total=False):
    """What a store may be told by name; the plain ones also in its URL."""

    table: str
    columns: OwnColumns
    """Further columns of the table, and how a claim fills each from the identity."""
    autocreate: bool
    """False leaves the table to `semel migrate` or to the SQL files."""
    pool_size: int
    unix_socket: str
    ssl: bool
    ssl_ca: str
    ssl_cert: str
    ssl_key: str
    ssl_verify: bool


def open_store(url: str, *, prefix: str, timeout: float, **options: Any) -> MySQLStore:
    """Open a store for threads; the first call connects."""
    return MySQLStore(url, prefix=prefix, timeout=timeout, **options)


def open_async_store(url: str, *, prefix: str, timeout: float, **options: Any) -> AsyncMySQLStore:
    """Open a store for asyncio; the first call connects."""
    return AsyncMySQLStore(url, prefix=prefix, timeout=timeout, **options)


class MySQLStore(SQLStore):
    """A store for threads, with a small pool of connections.

    It takes a URL, or `connect=`, a function that opens a PyMySQL connection; what it opens is the
    store's own from then on. Stores with different prefixes may share a table and never see each
    other's records.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        connect: threads.Connect | None = None,
        prefix: str = DEFAULT_PREFIX,
        timeout: float = DEFAULT_TIMEOUT,
        **options: Unpack[Options],
    ) -> None:
        setup = _setup(url, connect, threads.connector, prefix, timeout, **options)
        pool = threads.Pool(setup.connect, setup.place, setup.timeout, setup.pool_size)
        super().__init__(setup.verbs, threads.Executor(pool, setup.timeout, setup.ensure))


class AsyncMySQLStore(AsyncSQLStore):
    """A store for asyncio, with a small pool of connections.

    The arguments are those of `MySQLStore`; `connect=` is awaited and opens asyncmy connections.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        connect: tasks.Connect | None = None,
        prefix: str = DEFAULT_PREFIX,
        timeout: float = DEFAULT_TIMEOUT,
        **options: Unpack[Options],
    ) -> None:
        setup = _setup(url, connect, tasks.connector, prefix, timeout, **options)
        pool = tasks.Pool(setup.connect, setup.place, setup.timeout, setup.pool_size)
        super().__init__(setup.verbs, tasks.Executor(pool, setup.timeout, setup.ensure))


class _Setup(NamedTuple, Generic[Connect]):
    """What both kinds of store are made from."""

    connect: Connect
    place: str
    timeout: float
    pool_size: int
    verbs: MySQLVerbs
    ensure: Callable[[], Verb[None]]


def _setup(
    url: str | None,
    connect: Connect | None,
    connector: Callable[[Address, float], Connect],
    prefix: str,
    timeout: float,
    **options: Unpack[Options],
) -> _Setup[Connect]:
    if url is not None and connect is None:
        address, told = parse(url, dict(options))
        patience = positive_seconds("timeout", told.get("timeout", timeout))
        place, opener = address.place, connector(address, patience)
    elif url is None and connect is not None:
        told = merge_options("mysql", {}, options, STORE_OPTIONS)
        patience = positive_seconds("timeout", timeout)
        place, opener = "the database of the given connections", connect
    else:
        raise ConfigError("a MySQL store takes a URL or connect=, one of them")
    table = MySQLTable(told.get("table", DEFAULT_TABLE), prefix, told.get("columns", {}))
    autocreate = switch("autocreate", told.get("autocreate", True))
    return _Setup(
        opener,
        place,
        patience,
        whole_number("pool_size", told.get("pool_size", POOL_SIZE)),
        MySQLVerbs(table),
        partial(ensure, table.name, patience, autocreate=autocreate),
    )
