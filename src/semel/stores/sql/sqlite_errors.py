"""The one place where SQLite's errors become ours."""

from __future__ import annotations

import sqlite3
from copy import copy

from semel.errors import ConfigError, StoreError, StoreFull, StoreUnavailable, ValueRejected

_UNAVAILABLE = {
    sqlite3.SQLITE_BUSY: "is locked by another process or connection",
    sqlite3.SQLITE_LOCKED: "is locked by another statement",
    sqlite3.SQLITE_READONLY: "cannot be written: the file or its directory is read-only",
    sqlite3.SQLITE_CANTOPEN: "cannot be opened: check its directory and permissions",
    sqlite3.SQLITE_PERM: "cannot be opened: permission denied",
    sqlite3.SQLITE_NOTADB: "is not an SQLite database",
    sqlite3.SQLITE_CORRUPT: "is damaged",
    sqlite3.SQLITE_IOERR: "could not be read or written",
}

VALUE_ERRORS = (
    sqlite3.DataError,
    sqlite3.IntegrityError,
    sqlite3.InterfaceError,
    sqlite3.ProgrammingError,
    OverflowError,
    ValueError,
)
"""Raised for what one statement was given; the transaction around it is not harmed."""


def primary_code(error: BaseException) -> int | None:
    """Read SQLite's result code, without its details."""
    code = getattr(error, "sqlite_errorcode", None)
    return None if code is None else code & 0xFF


def is_old_snapshot(error: BaseException) -> bool:
    """Whether a read that is open on the same connection keeps it from writing.

    Others have written since that read began. Waiting does not help: the read has to end first.
    """
    return getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_BUSY_SNAPSHOT


def translate(error: Exception, place: str) -> Exception:
    """Make an error of ours, one for each caller, that names the file and keeps the cause."""
    ours = _ours(error, place)
    if ours is not error:
        ours.__cause__ = error
    return ours


def _ours(error: Exception, place: str) -> Exception:
    code = primary_code(error)
    if isinstance(error, (StoreError, ConfigError)):
        return copy(error)
    if code == sqlite3.SQLITE_FULL:
        return StoreFull(f"no room is left for the SQLite database {place}: {error}")
    if is_old_snapshot(error):
        return StoreUnavailable(
            f"the SQLite database {place} cannot be written through this connection: another "
            f"cursor of it has not read all of its rows; read them, or close it: {error}"
        )
    if code in _UNAVAILABLE:
        return StoreUnavailable(f"the SQLite database {place} {_UNAVAILABLE[code]}: {error}")
    if isinstance(error, VALUE_ERRORS):
        # The driver's own complaints are about the connection: closed, or of another thread.
        kind = StoreError if isinstance(error, sqlite3.ProgrammingError) else ValueRejected
        return kind(f"the SQLite database {place} cannot take this: {error}")
    if isinstance(error, sqlite3.OperationalError) and str(error).startswith("no such table"):
        return ConfigError(
            f"the SQLite database {place} has {error}: restore it with its records; if they may be "
            "forgotten, `semel migrate` makes an empty one"
        )
    if isinstance(error, sqlite3.Error):
        return StoreUnavailable(f"the SQLite database {place} failed: {error}")
    return error
