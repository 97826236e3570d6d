"""The URL and the options of a store, and the settings of its connections.

`mysql://user:password@host:3306/database?option=value`: nothing here, and no error message, shows
the password again.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable
from math import ceil
from typing import Any, Final, Generic, NamedTuple, TypedDict, TypeVar, Unpack
from urllib.parse import SplitResult, unquote, urlsplit

from msgspec import Struct

from semel.errors import ConfigError
from semel.stores.sql.rows import WITH_UNICODE, texts_as_bytes
from semel.stores.sql.schema import DEFAULT_TABLE
from semel.stores.sql.verbs import OwnColumns
from semel.stores.urls import (
    boolean,
    check_login,
    merge_options,
    positive_seconds,
    reject_in_url,
    split_url,
    whole_number,
)

Connect = TypeVar("Connect")

PORT: Final = 3306

TLS_OPTIONS: Final = frozenset({"ssl", "ssl_ca", "ssl_cert", "ssl_key", "ssl_verify"})
ADDRESS_OPTIONS: Final = frozenset({"unix_socket"}) | TLS_OPTIONS
STORE_OPTIONS: Final = frozenset(
    {"table", "timeout", "max_size", "autocreate", "columns", "batching"}
)


MOST_CONNECTIONS: Final = 10


class Options(TypedDict, total=False):
    """The options of a store, by name; the plain ones also in its URL."""

    table: str
    columns: OwnColumns
    """The application's own columns, each with the function of the claim that fills it."""
    autocreate: bool
    """False leaves the table to `migrate` or to the SQL files."""
    max_size: int
    batching: bool
    """Whether claims and completes of many callers share statements."""
    unix_socket: str
    ssl: bool
    ssl_ca: str
    ssl_cert: str
    ssl_key: str
    ssl_verify: bool


class Address(Struct, frozen=True, kw_only=True):
    """Where a server is, and how to get in."""

    host: str
    port: int
    user: str
    password: bytes
    database: str
    unix_socket: str | None
    tls: ssl.SSLContext | None

    @property
    def place(self) -> str:
        """Name the database in error messages."""
        where = self.unix_socket or f"{self.host}:{self.port}"
        return f"the database {self.database} at {where}"

    def __repr__(self) -> str:
        return f"<Address {self.place}>"

    def __rich_repr__(self) -> list[tuple[str, str]]:
        return [("place", self.place)]


def parse(url: str, options: dict[str, Any]) -> tuple[Address, dict[str, Any]]:
    """Part a URL, with the options given by name, into an address and the store's options."""
    scheme = url.partition("://")[0]
    check_login(url)
    try:
        parts = urlsplit(url)
        port = parts.port or PORT
    except ValueError:
        # Unnamed, and without its cause: what is no port may be a part of the password.
        raise ConfigError(
            f"the address of {scheme}:// cannot be read; in a password, write %40 for @, %3A for : "
            "and %2F for /"
        ) from None
    database = unquote(parts.path.removeprefix("/"))
    if not database or "/" in database:
        raise ConfigError(f"name the database in the URL: {scheme}://user:password@host/database")
    in_url = split_url(url)[1]
    reject_in_url(in_url, columns="a mapping of functions")
    merged = merge_options(scheme, in_url, options, ADDRESS_OPTIONS | STORE_OPTIONS)
    address = Address(
        host=parts.hostname or "localhost",
        port=port,
        user=_user(parts, scheme),
        # As bytes: the drivers would write a text in Latin-1, which has too few letters.
        password=unquote(parts.password or "").encode(),
        database=database,
        unix_socket=merged.pop("unix_socket", None),
        tls=_tls({name: merged.pop(name) for name in sorted(TLS_OPTIONS & set(merged))}),
    )
    return address, merged


def _user(parts: SplitResult, scheme: str) -> str:
    if not parts.username:
        raise ConfigError(f"name the user in the URL: {scheme}://user:password@host/database")
    return unquote(parts.username)


def _tls(options: dict[str, Any]) -> ssl.SSLContext | None:
    """Make a context that checks the server's certificate, unless `ssl_verify` is off."""
    if not options or not boolean("ssl", options.get("ssl", True)):
        return None
    try:
        context = ssl.create_default_context(cafile=options.get("ssl_ca"))
        if "ssl_cert" in options:
            context.load_cert_chain(options["ssl_cert"], options.get("ssl_key"))
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"the certificates of the URL cannot be read: {error}") from error
    if not boolean("ssl_verify", options.get("ssl_verify", True)):
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


class Setup(NamedTuple, Generic[Connect]):
    """What a store is made from, checked."""

    connect: Connect
    database: str | None
    """Its name, if the URL names it."""
    place: str
    timeout: float
    table: str
    columns: OwnColumns
    autocreate: bool
    max_size: int
    batching: bool


def set_up(
    url: str | None,
    connect: Connect | None,
    connector: Callable[[Address, float], Connect],
    timeout: float,
    **options: Unpack[Options],
) -> Setup[Connect]:
    """Check what a store was given: a URL or the application's connections, and options."""
    if url is not None and connect is None:
        address, merged = parse(url, dict(options))
        seconds = positive_seconds("timeout", merged.get("timeout", timeout))
        place, opener = address.place, connector(address, seconds)
        database: str | None = address.database
    elif url is None and connect is not None:
        merged = merge_options("mysql", {}, options, STORE_OPTIONS)
        seconds = positive_seconds("timeout", timeout)
        place, opener, database = "the database of the given connections", connect, None
    else:
        raise ConfigError("a MySQL store takes a URL or connect=, one of them")
    return Setup(
        opener,
        database,
        place,
        seconds,
        merged.get("table", DEFAULT_TABLE),
        merged.get("columns", {}),
        boolean("autocreate", merged.get("autocreate", True)),
        whole_number("max_size", merged.get("max_size", MOST_CONNECTIONS)),
        boolean("batching", merged.get("batching", True)),
    )


# --- the settings of every connection ------------------------------------------------------

MULTI_STATEMENTS: Final = 1 << 16
FOUND_ROWS: Final = 1 << 1

CLIENT_FLAGS: Final = MULTI_STATEMENTS | FOUND_ROWS
"""Two statements in one message; and an UPDATE counts the rows it matches, not those it changes,
so that writing the same again is not taken for a refusal."""


def driver_arguments(address: Address, timeout: float) -> dict[str, Any]:
    """Say to PyMySQL or asyncmy where the server is; both take the same names."""
    arguments: dict[str, Any] = {
        "host": address.host,
        "port": address.port,
        "user": address.user,
        "password": address.password,
        "database": address.database,
        "unix_socket": address.unix_socket,
        "charset": "utf8mb4",
        "autocommit": True,
        "client_flag": CLIENT_FLAGS,
        "connect_timeout": timeout,
    }
    if address.tls is not None:
        arguments["ssl"] = address.tls
    return arguments


FIRST_QUESTION: Final = "SELECT _utf8mb4 x'F09F8E89'"
"""The answer shows whether an application's own connection returns texts, or bytes for them, and
whether it writes and reads them as UTF-8."""


def check_first_answer(row: Any) -> None:
    """Refuse a connection that would garble keys, or was opened with use_unicode=False."""
    (text,) = row
    if isinstance(text, bytes):
        raise texts_as_bytes(WITH_UNICODE)
    if text != "\N{PARTY POPPER}":
        raise ConfigError(
            "this connection garbles strings, and keys would be mistaken for others: open it with "
            "charset='utf8mb4'"
        )


_NO_LOCK_WAIT: Final = "/*M! 0 */ /*!80000 1 */"
"""The least that each server takes, in seconds. Each of these comments is read by one of them."""


_NO_LIMIT: Final = (1 << 64) - 1


UNKNOWN_VARIABLE: Final = 1193
"""What a server answers that was built without Galera."""


class SessionSettings:
    """The statement that sets a session up, whatever the server's defaults are."""

    def __init__(self, timeout: float, *, waits_for_locks: bool) -> None:
        self.without_galera = (
            "SET SESSION autocommit = 1, time_zone = '+00:00', sql_notes = 0, "
            # An application may have opened it with charset='utf8', which lacks many characters.
            "character_set_client = utf8mb4, character_set_connection = utf8mb4, "
            "character_set_results = utf8mb4, timestamp = DEFAULT, "
            f"sql_select_limit = {_NO_LIMIT}, "
            # Strict: a value that does not fit is an error, never cut. And without
            # NO_BACKSLASH_ESCAPES, under which the drivers would quote bytes wrongly.
            "sql_mode = 'STRICT_ALL_TABLES,NO_ENGINE_SUBSTITUTION,ERROR_FOR_DIVISION_BY_ZERO', "
            # For a table that is locked as a whole. Longer than the driver waits: the server would
            # call it by the name of a locked row, which is waited for in another way.
            f"lock_wait_timeout = {ceil(timeout) + 1}, "
            f"innodb_lock_wait_timeout = {lock_wait(timeout) if waits_for_locks else _NO_LOCK_WAIT}"
        )
        # In a Galera cluster, reads, updates and deletes then wait until their node has applied
        # what others had committed before. Without a cluster it changes nothing.
        self.sql = f"{self.without_galera}, wsrep_sync_wait = 3"


def lock_wait(timeout: float) -> int:
    """Return the seconds to wait for a lock: half of all, so that the wait can be repeated."""
    return max(1, int(timeout / 2))  # the server counts whole seconds
