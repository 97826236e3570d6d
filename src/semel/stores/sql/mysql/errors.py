"""The one place where the errors of the server and its drivers become ours.

PyMySQL and asyncmy raise alike: `error.args` is (code, message), with the server's code, or the
client library's from 2000 on. None of their messages holds a password.

This module decides. It never sleeps and touches no connection.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any, Final

from semel.errors import (
    ConfigError,
    IdempotencyError,
    StoreError,
    StoreFull,
    StoreRefused,
    StoreUnavailable,
    ValueRejected,
)
from semel.stores.sql.errors import Deadline, RecordLocked, Repeat, rejects_value
from semel.stores.sql.mysql.addresses import lock_wait
from semel.stores.sql.mysql.statements import Bulk
from semel.stores.sql.schema import RESTORE
from semel.stores.sql.verbs import Reply, Statement
from semel.stores.urls import tls_error

LOCKED: Final = 1205
TLS_REFUSED: Final = 2026

_REPEATED: Final = frozenset({
    1205,  # lock wait timeout: another transaction holds the row; or wsrep_sync_wait took too long
    1213,  # deadlock: this statement was chosen to give way
    3101,  # group replication: another member changed the row first
})  # fmt: skip
"""The statement was undone as a whole; sent again, it may well succeed."""

BROKEN: Final[Mapping[int, str]] = {
    0: "closed already (PyMySQL and asyncmy)",
    1053: "the server is shutting down",
    1153: "larger than max_allowed_packet: the server says so, if at all, and hangs up",
    1927: "the connection was killed (MariaDB)",
    2006: "the server has gone away",
    2013: "lost while waiting for the answer",
    2014: "an answer was left half read",
    2055: "lost while waiting for the answer, with the system's reason",
    3169: "the session was killed (MySQL)",
    4031: "idle for too long (MySQL)",
}
"""The connection is of no use any more. Whether the statement was carried out is not known."""

READ_ONLY: Final[Mapping[int, str]] = {
    1290: "the server runs with --read-only",
    1792: "the transaction is read-only",
    1836: "the server is in read-only mode",
}
"""The connection works, but after a failover its server is no longer the primary."""

OUT_OF_CLUSTER: Final[Mapping[int, str]] = {
    1047: "the node is not in the primary component, or not ready (Galera)",
    1180: "the commit failed, for instance since the node left the cluster",
}
"""The connection works, but its server cannot commit; another one can."""

UNREACHABLE: Final[Mapping[int, str]] = {
    1040: "no connection is left",
    1203: "no connection is left for this user",
    1226: "this user has used up a limit",
    2002: "cannot be reached",
    2003: "cannot be reached",
    2005: "its name is not known",
}
"""No server answers there: it is down, and may be starting again. Or it has no connection left
to give, and one of ours may become idle."""

NOT_THE_STATEMENT: Final[Mapping[int, str]] = {
    **BROKEN, **READ_ONLY, **OUT_OF_CLUSTER, **UNREACHABLE
}  # fmt: skip
"""Errors of the connection or the server, whatever was asked: another connection may do it.

1153 is among them for its connection's sake; `rejects_value` knows that it concerns the value."""

_MIGRATE = "run `semel migrate`, or the SQL files in semel/stores/sql/mysql/ddl"
_DENIED = "rejects the user or the password"
_FORBIDDEN = (
    f"does not permit this user to do that; let one who may create tables {_MIGRATE}, and GRANT "
    "SELECT, INSERT, UPDATE, DELETE on the table and SELECT on semel_schema"
)
_CROWDED = "has no connection left to give; raise its limit or lower max_size"
_READ_ONLY = "takes no writes (a replica, or read-only); name the primary"
_OUT_OF_CLUSTER = "cannot commit (a node outside its cluster's primary component)"

_NO_VALUE = (
    "has a column that must not be empty and that nothing fills: give it a default, let it be "
    "NULL, or name it in columns="
)
_BINLOG = "cannot log this change: set binlog_format to ROW or MIXED"

_SETUP: Final = {
    1146: f"has no such table: {RESTORE}",
    1054: "has no such column; own columns are added by store.migrate(columns={name: type})",
    1364: _NO_VALUE,
    1048: _NO_VALUE,
    1663: _BINLOG,
    1664: _BINLOG,
    1665: _BINLOG,
    1142: _FORBIDDEN,
    1143: _FORBIDDEN,
    1227: _FORBIDDEN,
    1370: _FORBIDDEN,
}
"""Errors that no retry helps against: the database has to be set up."""

_REFUSED: Final = {
    1044: "does not let this user in",
    1045: _DENIED,
    1049: "does not exist; create it, or correct the URL",
    1130: "does not let this machine in",
    1698: _DENIED,
    2059: "asks for a kind of login that the driver does not know",
}
"""No connection can be had, and a retry does not help."""

_NO_ENTRY: Final = _REFUSED | {
    1040: _CROWDED,
    1203: _CROWDED,
    1226: _CROWDED,
    2002: "cannot be reached",
    2003: "cannot be reached",
    2005: "cannot be reached: its name is not known",
    TLS_REFUSED: "does not agree with this program on TLS",
}
"""No connection can be had."""

_SAYS: Final = _NO_ENTRY | {
    1205: "has the record locked by another transaction",
    1213: "rolled this statement back because of deadlocks, time after time",
    3101: "undid this statement in favor of another one, time after time",
    **dict.fromkeys(READ_ONLY, _READ_ONLY),
    **dict.fromkeys(OUT_OF_CLUSTER, _OUT_OF_CLUSTER),
}

_FULL: Final = frozenset({
    1021,  # no space on the disk
    1041,  # out of memory
    1114,  # the table is full
})  # fmt: skip

_DISK_FULL: Final = "No space left"
"""How 1030 ("got error ... from storage engine") and 3 (writing a file) tell it."""


class OutOfSync(StoreUnavailable):
    """A node of a Galera cluster does not catch up with it, or has left it.

    Where reads wait for that (`wsrep_sync_wait`), the server tells it by the number of a locked
    row. But no read of ours waits for a row.
    """


PROBE: Final = Statement("SELECT 1", (), writes=False)
"""Asked after a write met a lock, to tell whether that was one."""


def code_of(error: BaseException) -> int | None:
    """Read the code of a driver's error; None when it has none."""
    first = error.args[0] if error.args else None
    return first if isinstance(first, int) and _of_a_driver(error) else None


def may_repeat(error: BaseException) -> bool:
    """Whether the server undid the statement and asks for it to be sent again."""
    return code_of(error) in _REPEATED


def is_lost(error: BaseException) -> bool:
    """Whether the connection is of no use any more."""
    return isinstance(error, (OSError, EOFError)) or code_of(error) in BROKEN


def cannot_write(error: BaseException) -> bool:
    """Whether the server of this connection takes no writes; another connection may reach one."""
    code = code_of(error)
    return (
        isinstance(error, OutOfSync)
        or code in READ_ONLY
        or (code in OUT_OF_CLUSTER and not _is_full(error))
    )


def is_unreachable(error: BaseException) -> bool:
    """Whether no connection came about at all."""
    return code_of(error) in UNREACHABLE and tls_error(error, connecting=True) is None


def repeat_after(error: Exception) -> Repeat | None:
    """Return whether what met this error is worth sending again."""
    if may_repeat(error):
        return Repeat.LOCKED
    if is_unreachable(error) or cannot_write(error):
        return Repeat.AWAY
    return Repeat.LOST if is_lost(error) else None


def fails_every_request(error: Exception) -> bool:
    """Whether every other statement would meet this error, because there is no connection."""
    if not isinstance(error, StoreError):
        return False
    cause = error.__cause__ or error
    return (
        breaks_all_connections(cause)
        or isinstance(cause, StoreUnavailable)
        or code_of(cause) in _NO_ENTRY
    )


def breaks_all_connections(error: BaseException) -> bool:
    """Whether no open connection can be used any more: the server went away, or takes no writes."""
    return is_lost(error) or cannot_write(error)


def is_locked(outcome: object) -> bool:
    """Whether a batch met a lock, which concerns only one of its members, whichever it is."""
    cause = outcome.__cause__ if isinstance(outcome, StoreUnavailable) else None
    return cause is not None and may_repeat(cause)


def translate(error: Exception, place: str) -> Exception:
    """Make an error of semel that names the place and keeps the cause.

    Ours stay as they are, and so does what comes from neither a driver nor Python itself: it may be
    an exception of a signal handler.
    """
    if isinstance(error, IdempotencyError) or _comes_from(error) not in _BELOW_US:
        return error
    ours = _ours(error, place)
    ours.__cause__ = error
    return ours


def _ours(error: Exception, place: str) -> Exception:
    code = code_of(error)
    detail = error.args[-1] if error.args else error
    if _is_full(error):
        return StoreFull(f"{place} has no room left: {detail}")
    if rejects_value(code) or isinstance(error, (ValueError, TypeError, OverflowError)):
        return ValueRejected(f"{place} cannot take this: {detail}")
    if code in _SETUP:
        return ConfigError(f"{place} {_SETUP[code]}: {detail}")
    if code == TLS_REFUSED or tls_error(error, connecting=code in UNREACHABLE) is not None:
        return StoreRefused(f"{place} {_SAYS[TLS_REFUSED]}; check ssl_ca and ssl_verify: {detail}")
    if code in _REFUSED:
        return StoreRefused(f"{place} {_REFUSED[code]}: {detail}")
    if code == LOCKED:
        return RecordLocked(f"{place} {_SAYS[code]}: {detail}")
    if code in _SAYS:
        return StoreUnavailable(f"{place} {_SAYS[code]}: {detail}")
    if isinstance(error, TimeoutError):
        return StoreUnavailable(f"{place} did not answer in time; it may still do what was asked")
    if is_lost(error):
        return StoreUnavailable(f"the connection to {place} was lost: {detail or 'closed'}")
    return StoreUnavailable(f"{place} failed: {error!r}")


def _is_full(error: BaseException) -> bool:
    code = code_of(error)
    return code in _FULL or (code is not None and _DISK_FULL in str(error.args[-1]))


_DRIVERS: Final = frozenset({"pymysql", "asyncmy"})
_BELOW_US: Final = _DRIVERS | {"builtins", "asyncio", "socket", "ssl", "struct"}


def _comes_from(error: BaseException) -> str:
    return type(error).__module__.split(".")[0]


def _of_a_driver(error: BaseException) -> bool:
    return _comes_from(error) in _DRIVERS


# --- how long and how often one call to the store is repeated after a failure --------------

LARGEST_MESSAGE: Final = Statement("SELECT @@max_allowed_packet", (), writes=False)
"""Asked after a connection was lost: a server hangs up on a larger message, often without a word,
and would do so each time that it is sent."""

MOMENT: Final = 0.05
"""Seconds. Less cannot be kept to, and none at all means "do not wait" to a socket."""

_HARDLY_ANY: Final = 0.1
"""While less than this share of the timeout is used, the full timeout is set."""


def statement_time(deadline: Deadline, least: float) -> float:
    """Return the seconds that the next statement may take: what remains, or the wait for a lock."""
    left = deadline.left
    if left > deadline.seconds * (1 - _HARDLY_ANY):
        return deadline.seconds  # the same for most calls, so that the driver need not be set again
    return max(left, least)


def least_time(timeout: float, *, waits_for_locks: bool) -> float:
    """Return the seconds that every statement may take.

    The server answers that a record is locked after this time. Who did not wait for that answer
    could not tell a locked record from a server that is unreachable.
    """
    return min(timeout, (lock_wait(timeout) if waits_for_locks else 1) + 0.5)


def check_size(size: int, largest: Reply, place: str) -> None:
    """Refuse to send again what this server can never take."""
    ((limit,),) = largest.rows
    if size > limit - min(1024, limit // 16):  # what the drivers add is only guessed
        raise ValueRejected(
            f"{place} cannot take this: {size} bytes, and its max_allowed_packet is "
            f"{limit}; raise that, or let the policy's max_result_bytes be well below it"
        )


def message_size(connection: Any, statement: Statement) -> int:
    """Count the bytes of a statement about as its driver, PyMySQL or asyncmy, writes them."""
    values = statement.parameters
    if isinstance(statement, Bulk):
        values = tuple(chain.from_iterable(values))
    text = len(statement.sql) + sum(len(connection.escape(value)) for value in values)
    return text if statement.then is None else text + message_size(connection, statement.then)
