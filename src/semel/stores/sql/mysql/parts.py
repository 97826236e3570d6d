"""What both kinds of store are made from: a URL or the application's connections, and options.

This module needs no driver. `store` is for threads and needs PyMySQL, `aio` is for asyncio and
needs asyncmy: an application has one of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Generic, NamedTuple, TypedDict, TypeVar, Unpack

from semel.errors import ConfigError
from semel.stores.sql.migrations import DEFAULT_TABLE
from semel.stores.sql.mysql.addresses import STORE_OPTIONS, Address, parse
from semel.stores.sql.mysql.schema import Schema
from semel.stores.sql.mysql.statements import MySQLTable
from semel.stores.sql.mysql.verbs import MySQLBatchVerbs
from semel.stores.sql.verbs import OwnColumns
from semel.stores.urls import merge_options, positive_seconds, switch, whole_number

Connect = TypeVar("Connect")

MOST_CONNECTIONS: Final = 10

BATCH_CONNECTIONS: Final = 2
"""One for claims and one for completes: of each, one batch is under way at a time."""

RENEWAL_CONNECTIONS: Final = 1


class Options(TypedDict, total=False):
    """What a store may be told by name; the plain ones also in its URL."""

    table: str
    columns: OwnColumns
    """The application's own columns, each with the function of the claim that fills it."""
    autocreate: bool
    """False leaves the table to `migrate` or to the SQL files."""
    max_size: int
    batching: bool
    """Whether claims and completes of many tasks share statements; threads have no use for it."""
    unix_socket: str
    ssl: bool
    ssl_ca: str
    ssl_cert: str
    ssl_key: str
    ssl_verify: bool


class Setup(NamedTuple, Generic[Connect]):
    """What both kinds of store are made from."""

    connect: Connect
    database: str | None
    """Its name, if a URL has told it."""
    place: str
    timeout: float
    max_size: int
    batching: bool
    verbs: MySQLBatchVerbs
    schema: Schema


def set_up(
    url: str | None,
    connect: Connect | None,
    connector: Callable[[Address, float], Connect],
    prefix: str,
    timeout: float,
    **options: Unpack[Options],
) -> Setup[Connect]:
    """Check what a store was given."""
    if url is not None and connect is None:
        address, told = parse(url, dict(options))
        patience = positive_seconds("timeout", told.get("timeout", timeout))
        place, opener = address.place, connector(address, patience)
        database: str | None = address.database
    elif url is None and connect is not None:
        told = merge_options("mysql", {}, options, STORE_OPTIONS)
        patience = positive_seconds("timeout", timeout)
        place, opener, database = "the database of the given connections", connect, None
    else:
        raise ConfigError("a MySQL store takes a URL or connect=, one of them")
    table = MySQLTable(told.get("table", DEFAULT_TABLE), prefix, told.get("columns", {}))
    autocreate = switch("autocreate", told.get("autocreate", True))
    return Setup(
        opener,
        database,
        place,
        patience,
        whole_number("max_size", told.get("max_size", MOST_CONNECTIONS)),
        switch("batching", told.get("batching", True)),
        MySQLBatchVerbs(table),
        Schema(table.name, patience, autocreate=autocreate),
    )
