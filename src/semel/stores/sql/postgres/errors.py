"""What psycopg's errors mean: which are worth a repeat, and what the others become.

Each message says which database it was and what to do about it. None repeats a statement or more
than the first line of the server's own words: the rest can hold users' keys and values.
"""

from __future__ import annotations

import re
from typing import Final

import psycopg
from psycopg import errors as sql
from psycopg_pool import PoolClosed, PoolTimeout, TooManyRequests

from semel.errors import (
    ConfigError,
    IdempotencyError,
    StoreError,
    StoreFull,
    StoreRefused,
    StoreUnavailable,
    ValueRejected,
)
from semel.stores.sql.errors import RecordLocked, Repeat, is_too_large, rejects_value
from semel.stores.sql.schema import RESTORE


class TimeIsUp(psycopg.OperationalError):
    """The server has not answered within the time of the call."""


class TableLocked(psycopg.OperationalError):
    """The whole table is locked, not one record: ALTER TABLE, VACUUM FULL and their like."""


class MigrationLocked(psycopg.OperationalError):
    """Another program has the lock of migrations, or locks that keep a migration out."""


_MIGRATE = "run `semel migrate`, or the SQL files in semel/stores/sql/postgres/ddl"
_GRANT = "GRANT SELECT, INSERT, UPDATE, DELETE on the table and SELECT on semel_schema"

_CLOSED = "the connections to {place} were closed, or never opened"
_POOL = "no connection to {place} was free in time; give the pool a higher max_size"
_QUEUE = "too many callers wait for a connection to {place}"
_SILENT = "{place} did not answer in time; what was asked may still happen"
_SLOW = "{place} took too long and was stopped (statement_timeout); nothing was written"
_CANCELLED = "{place}: {text}; nothing was written"
_TABLE_LOCKED = (
    "the table of records in {place} is locked as a whole (ALTER TABLE, VACUUM FULL, a migration); "
    "nothing was written"
)
_MIGRATING = (
    "another program is migrating the tables in {place}, or keeps locks on them, and takes long; "
    "nothing was changed"
)
_LOCKED = "an open transaction in {place} has this record locked; nothing was written"
_REPLICA = "{place} takes no writes; name the primary, or add target_session_attrs=read-write"
_DISK = "the disk of {place} is full; make room there"
_MEMORY = "{place} is out of memory"
_CLIENTS = "{place} has no connection left; lower max_size, or put pgbouncer in between"
_TABLE = f"the table is missing in {{place}} ({{text}}): {RESTORE}"
_COLUMN = "{place}: {text}; own columns are added by ALTER TABLE, or store.migrate(columns=...)"
_RIGHTS = f"{{place}}: {{text}}; as a role that may create tables, {_MIGRATE}, then {_GRANT}"
_OTHER_TABLE = (
    "{place}: {text}, and it belongs to another table (one that is renamed keeps the names of its "
    "indexes): rename it, or take another table name"
)
_OTHER_ROW = "{place} has another row with this key that semel did not write"
_NOT_THERE = "{place} is not there, or its user is not; correct the URL ({text})"
_POOLER = (
    "{place} lost a prepared statement ({text}): a pooler such as pgbouncer, in transaction mode, "
    "is in between; add prepare=off to the URL"
)
_NO_VALUE = "{place}: {text}; give the column a default, let it be NULL, or name it in columns="
_NOT_UNDERSTOOD = "{place} does not understand what it is asked: {text}"
_VALUE = "{place} cannot take this: {text}"

# The first class that fits gives the answer, so subclasses stand before their bases.
_BY_CLASS: Final[tuple[tuple[type[Exception], type[IdempotencyError], str], ...]] = (
    (PoolClosed, StoreUnavailable, _CLOSED),
    (PoolTimeout, StoreUnavailable, _POOL),
    (TooManyRequests, StoreUnavailable, _QUEUE),
    (TimeIsUp, StoreUnavailable, _SILENT),
    (TableLocked, StoreUnavailable, _TABLE_LOCKED),
    (MigrationLocked, StoreUnavailable, _MIGRATING),
    (sql.LockNotAvailable, RecordLocked, _LOCKED),
    (sql.ReadOnlySqlTransaction, StoreUnavailable, _REPLICA),
    (sql.DiskFull, StoreFull, _DISK),
    (sql.OutOfMemory, StoreFull, _MEMORY),
    (sql.TooManyConnections, StoreUnavailable, _CLIENTS),
    (sql.InvalidCatalogName, StoreRefused, _NOT_THERE),
    (sql.InvalidSqlStatementName, ConfigError, _POOLER),
    (sql.DuplicatePreparedStatement, ConfigError, _POOLER),
    (sql.UndefinedTable, ConfigError, _TABLE),
    (sql.InvalidSchemaName, ConfigError, _TABLE),
    (sql.UndefinedColumn, ConfigError, _COLUMN),
    (sql.InsufficientPrivilege, ConfigError, _RIGHTS),
    (sql.DuplicateTable, ConfigError, _OTHER_TABLE),
    (sql.NotNullViolation, ConfigError, _NO_VALUE),
    (sql.UniqueViolation, StoreError, _OTHER_ROW),
    (psycopg.DataError, ValueRejected, _VALUE),  # psycopg's own, without a code
    (psycopg.ProgrammingError, ConfigError, _NOT_UNDERSTOOD),
    (UnicodeEncodeError, ValueRejected, _VALUE),
)

DRIVER_ERRORS: Final = (psycopg.Error, UnicodeEncodeError)
"""What `translate` knows: all that psycopg raises, and text that no database can hold."""

# A refused connection brings no code, only the server's words.
_REJECTIONS: Final = (
    ("does not exist", _NOT_THERE),
    (
        "password|authentication (?:failed|method)|permitted to log in",
        "{place} rejected the login; check user and password ({text})",
    ),
    (
        "pg_hba.conf|certificate|not support SSL|rejected SSL|permission denied",
        "{place} does not let this client in ({text})",
    ),
)
_HOPELESS: Final = re.compile("|".join(words for words, _ in _REJECTIONS))
_CROWDED: Final = re.compile("too many (?:clients|connections)|connection slots")


def is_hopeless(error: BaseException) -> bool:
    """Whether a refused connection would be refused again."""
    return _HOPELESS.search(str(error)) is not None


def translate(error: Exception, place: str) -> Exception:
    """Turn a driver's error into one of semel that names the database; return others unchanged."""
    if not isinstance(error, DRIVER_ERRORS):
        return error
    text = _first_line(error)
    if isinstance(error, psycopg.Error):
        error.args = (text,)  # Its detail quotes the row with its key, and a traceback shows it.
    if isinstance(error, sql.QueryCanceled):
        # Its own limit and an administrator (pg_cancel_backend) differ in the words alone.
        message = _SLOW if "statement timeout" in text else _CANCELLED
        return StoreUnavailable(message.format(place=place, text=text))
    if rejects_value(getattr(error, "sqlstate", None)) or is_too_large(text):
        return ValueRejected(_VALUE.format(place=place, text=text))
    for kind, ours, message in _BY_CLASS:
        if isinstance(error, kind):
            return ours(message.format(place=place, text=text))
    for words, message in _REJECTIONS:
        if re.search(words, text):
            return StoreRefused(message.format(place=place, text=text))
    if _CROWDED.search(text):
        return StoreUnavailable(_CLIENTS.format(place=place))
    return StoreUnavailable(f"{place} cannot be used: {text}")


def _first_line(error: Exception) -> str:
    primary = error.diag.message_primary if isinstance(error, psycopg.Error) else None
    return (primary or str(error)).partition("\n")[0]


# --- repeats ----------------------------------------------------------------------------------
#
# A deadlock, a serialization failure and a duplicate that was inserted at the same moment undo the
# whole statement: it is repeated. So is one whose connection was lost, on another connection: every
# verb is safe to send twice. A server that cannot be reached is looked for.


UNDONE: Final = (sql.SerializationFailure, sql.DeadlockDetected, sql.UniqueViolation)
"""The statement was undone and may succeed when sent again.

A unique violation is one of them: the index on the key can notice a row that was inserted at the
same moment before `ON CONFLICT`, which watches the digest, does.
"""

_NOT_THE_CONNECTION: Final = (
    TimeIsUp,
    TableLocked,
    MigrationLocked,
    PoolTimeout,
    PoolClosed,
    TooManyRequests,
)
_GOING_DOWN: Final = (sql.AdminShutdown, sql.CrashShutdown, sql.CannotConnectNow)
_NO_MORE_CONNECTIONS: Final = sql.TooManyConnections
"""Only asyncpg gives the code: libpq describes a refused connection in words."""
BECAME_REPLICA: Final = sql.ReadOnlySqlTransaction
"""After a failover, a connection may be left with the server that is no longer the primary."""


def is_lost(error: BaseException) -> bool:
    """Whether the connection, not the statement, was the trouble."""
    if isinstance(error, _NOT_THE_CONNECTION) or is_hopeless(error):
        return False
    return isinstance(error, (*_GOING_DOWN, _NO_MORE_CONNECTIONS, BECAME_REPLICA)) or (
        # The client's own errors have no code of the server.
        isinstance(error, psycopg.OperationalError)
        and (error.sqlstate is None or error.sqlstate.startswith("08"))
    )


def repeat_after(error: Exception) -> Repeat | None:
    """Return whether what met this error is worth sending again."""
    if isinstance(error, UNDONE):
        return Repeat.UNDONE
    return Repeat.AWAY if is_lost(error) else None


def fails_every_request(error: Exception) -> bool:
    """Whether every member of a batch would meet this error of ours: there is no connection."""
    if not isinstance(error, StoreUnavailable):
        return False
    cause = error.__cause__
    if cause is None:  # the pool's own: all connections are in use, or it was closed
        return True
    return isinstance(cause, (psycopg.OperationalError, BECAME_REPLICA)) and not isinstance(
        cause, (*UNDONE, sql.LockNotAvailable, sql.QueryCanceled)
    )


def breaks_all_connections(error: BaseException) -> bool:
    """Whether no open connection can be used any more."""
    return isinstance(error, BECAME_REPLICA)
