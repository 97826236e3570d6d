"""What every connection of a store is told before its first statement."""

from __future__ import annotations

from math import ceil
from typing import Any, Final

from semel.stores.sql.mysql.addresses import Address
from semel.stores.sql.rows import WITH_UNICODE, texts_as_bytes

MULTI_STATEMENTS: Final = 1 << 16
FOUND_ROWS: Final = 1 << 1

CLIENT_FLAGS: Final = MULTI_STATEMENTS | FOUND_ROWS
"""Two statements in one message; and an UPDATE counts the rows it matches, not those it changes,
so that writing the same again is no refusal."""


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


FIRST_QUESTION: Final = "SELECT VERSION()"
"""Tells of an application's own connection whether it gives texts or bytes for them."""


def check_first_answer(row: Any) -> None:
    """Refuse a connection that was opened with use_unicode=False."""
    if isinstance(row[0], bytes):
        raise texts_as_bytes(WITH_UNICODE)


_NO_LOCK_WAIT: Final = "/*M! 0 */ /*!80000 1 */"
"""The least that each server takes, in seconds. Each of these comments is read by one of them."""


def settings(timeout: float, *, patient: bool = True) -> str:
    """Write the statement that makes a session ours, whatever the server's defaults are."""
    return (
        "SET SESSION autocommit = 1, time_zone = '+00:00', sql_notes = 0, "
        # Strict: a value that does not fit is an error, never cut. And without
        # NO_BACKSLASH_ESCAPES, under which the drivers would quote bytes wrongly.
        "sql_mode = 'STRICT_ALL_TABLES,NO_ENGINE_SUBSTITUTION,ERROR_FOR_DIVISION_BY_ZERO', "
        # For a table that is locked as a whole. Longer than the driver waits: the server would call
        # it by the name of a locked row, which is waited for in another way.
        f"lock_wait_timeout = {ceil(timeout) + 1}, "
        f"innodb_lock_wait_timeout = {lock_wait(timeout) if patient else _NO_LOCK_WAIT}"
    )


def lock_wait(timeout: float) -> int:
    """Give the seconds to wait for a lock: half of all, so that the wait can be repeated."""
    return max(1, int(timeout / 2))  # the server counts whole seconds
