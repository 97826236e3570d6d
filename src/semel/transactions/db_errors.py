"""The one place where a driver's error inside a caller's transaction becomes ours.

Drivers are not imported: PostgreSQL's errors carry an SQLSTATE, MySQL's a number, SQLite's a code
of its own. SQLAlchemy and Django wrap them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NoReturn, TypeAlias

from semel.errors import (
    ConcurrentRequest,
    ConfigError,
    IdempotencyError,
    OutcomeUnknown,
    RetryTransaction,
    StoreError,
    StoreUnavailable,
    ValueRejected,
)
from semel.stores.sql.errors import is_too_large, rejects_value

Code: TypeAlias = str | int

_RETRY: Final = frozenset({
    "40001",  # serialization failure
    "40P01",  # deadlock
    1020,     # MariaDB: the row has changed since the transaction's snapshot
    1205,     # lock wait timeout
    1213,     # deadlock
    "SQLITE_BUSY",
    "SQLITE_LOCKED",
})  # fmt: skip
"""The unit of work lost against another one, and may win when it is repeated."""

_LOCK_TIMEOUT: Final = frozenset({"55P03", 1205})
"""While claiming: the wait for the record was too long."""

_DUPLICATE_KEY: Final = frozenset({"23505"})
"""While claiming: a row of the same key that came at the same moment."""

_ENDED: Final = frozenset({"3B001", "25P01", 1305, "no such savepoint"})
"""The savepoint is gone, and so is its transaction."""

_NO_TABLE: Final = frozenset({"42P01", 1146, "no such table"})

_CONNECTION_LOST: Final = frozenset({2006, 2013})

_ABORTED: Final = frozenset({"25P02"})
"""An earlier statement failed: PostgreSQL takes nothing more until a rollback."""

_NO_TRANSACTION: Final = frozenset({"25P01"})

_WRAPPERS: Final = frozenset({"sqlalchemy", "django"})
_NUMBERED = ("pymysql", "asyncmy", "MySQLdb")
"""Drivers whose errors carry the server's number as their first argument."""


def must_retry(error: BaseException) -> bool:
    """Whether the database asks for the whole unit of work again."""
    return isinstance(error, RetryTransaction) or not _RETRY.isdisjoint(_codes(error))


def retry_error() -> RetryTransaction:
    """The error that asks for the whole unit of work again."""
    return RetryTransaction(
        "the database gave up this transaction in favour of another one: roll it back and repeat "
        "the whole unit of work, as idem.run_transaction() does"
    )


def would_wait(error: Exception) -> bool:
    """Whether a claim found that an open transaction has its record, or waited too long for it."""
    return not _LOCK_TIMEOUT.isdisjoint(_codes(error))


def raise_claim_error(error: Exception, *, waits_for_table: bool = False) -> NoReturn:
    """Raise what an error before the block means; `waits_for_table`: the record was not locked."""
    codes = set(_codes(error))
    if waits_for_table and codes & _LOCK_TIMEOUT:
        raise StoreUnavailable(
            "the table of records is locked as a whole (ALTER TABLE, VACUUM FULL, a migration); "
            "nothing was written"
        ) from error
    if codes & _LOCK_TIMEOUT:
        raise ConcurrentRequest(
            "an open transaction has this key and did not end within the time that this caller "
            "waits; try again later"
        ) from error
    if codes & _DUPLICATE_KEY:
        raise retry_error() from error
    if codes & _NO_TRANSACTION:
        raise ConfigError(
            "idem.transaction() needs an open transaction, and this connection commits each "
            "statement by itself"
        ) from error
    _raise(error, codes)


def raise_end_error(error: Exception) -> NoReturn:
    """Raise what an error after the block means."""
    if is_ended(error):
        raise ended_error() from error
    _raise(error, set(_codes(error)))


def is_ended(error: BaseException) -> bool:
    """Whether a savepoint is gone, and its transaction with it."""
    return not _ENDED.isdisjoint(_codes(error))


def ended_error() -> OutcomeUnknown:
    """The error when the transaction did not last as long as the block."""
    return OutcomeUnknown(
        "the transaction was ended inside the block of idem.transaction(). If it was committed, so "
        "was what the block had done until then, and its record is held as unknown; commit after "
        "the block"
    )


def _raise(error: Exception, codes: set[Code]) -> NoReturn:
    if isinstance(error, IdempotencyError):
        raise error
    if must_retry(error):
        raise retry_error() from error
    if codes & _NO_TABLE:
        raise ConfigError(
            f"the table of records is missing in this database ({_first_line(error)}). If it was "
            "there before, restore it with its records, which a new table has forgotten; for a new "
            "database run `semel migrate`"
        ) from error
    if codes & _ABORTED:
        raise StoreError(
            "the transaction was aborted by an earlier error of the database, which was caught: "
            "PostgreSQL takes nothing more in it, and nothing was written. Let such an error end "
            "the transaction, or use a savepoint (begin_nested()) for what may fail"
        ) from error
    if any(map(rejects_value, codes)) or is_too_large(_first_line(error)):
        raise ValueRejected(
            f"the database cannot take this record, nor will it later: {_first_line(error)}"
        ) from error
    hint = "; a message above max_allowed_packet does that" if codes & _CONNECTION_LOST else ""
    raise StoreError(
        f"the record could not be written in this transaction: {_first_line(error)}{hint}"
    ) from error


def _first_line(error: Exception) -> str:
    # The rest can hold users' keys and values.
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"


def _codes(error: BaseException | None) -> Iterator[Code]:
    while error is not None:
        yield from _own_code(error)
        wrapped = type(error).__module__.partition(".")[0] in _WRAPPERS
        error = (getattr(error, "orig", None) or error.__cause__) if wrapped else None


def _own_code(error: BaseException) -> Iterator[Code]:
    state = getattr(error, "sqlstate", None)
    if isinstance(state, str):
        yield state
    name = getattr(error, "sqlite_errorname", None)
    if isinstance(name, str):
        # SQLITE_BUSY_SNAPSHOT is a kind of SQLITE_BUSY; plain errors are told apart by their words.
        yield "_".join(name.split("_")[:2])
        yield str(error).partition(":")[0]
    if _of_mysql(error) and error.args and isinstance(error.args[0], int):
        yield error.args[0]


def _of_mysql(error: BaseException) -> bool:
    """A number means something only in an error of these drivers; a KeyError may hold any."""
    return any(kind.__module__.partition(".")[0] in _NUMBERED for kind in type(error).__mro__)
