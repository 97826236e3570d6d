"""The one place where a driver's error inside a caller's transaction becomes ours.

Drivers are not imported: PostgreSQL's errors carry an SQLSTATE, MySQL's a number, SQLite's a code
of its own. SQLAlchemy and Django wrap them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, NoReturn, TypeAlias

from semel.core.observers import is_for_the_caller
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
from semel.stores.sql.errors import REJECTED, RecordLocked, is_too_large, rejects_value
from semel.stores.sql.mysql.errors import NOT_THE_STATEMENT

Code: TypeAlias = str | int

_RETRY: Final = frozenset({
    "40001",  # serialization failure
    "40P01",  # deadlock
    1020,     # MariaDB: the row has changed since the transaction's snapshot
    1205,     # lock wait timeout
    1213,     # deadlock
    3101,     # group replication: another member changed the row first
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

_LOST: Final[frozenset[Code]] = frozenset({
    "57P01",  # an administrator ended the session, or the server is stopping
    "57P02",  # another session crashed, and the server ends all of them
    "57P03",  # the server is starting
    "25006",  # the server takes no writes: after a failover it is no longer the primary
    "SQLITE_CANTOPEN",
    "SQLITE_IOERR",
    "SQLITE_READONLY",
    *(NOT_THE_STATEMENT.keys() - REJECTED - {2014}),  # 2014: the program read no answer to its end
})  # fmt: skip
"""The connection is lost, or its server is of no use: whatever was asked, it failed."""

_CONNECTION: Final = "08"
"""Connection exceptions, as the first part of an SQLSTATE."""

_TOO_SLOW: Final = frozenset({"25P03", "25P04"})
"""PostgreSQL ended the session because the program idled in its transaction, or took too long."""

_INVALIDATED: Final = "8s2b"
"""What SQLAlchemy's errors are marked with that come after a connection was lost."""

_FORBIDDEN_BY_AN_OPTION: Final = 1290
"""MySQL names the option: --read-only, or another one that only concerns the statement."""

_HANGS_UP: Final = frozenset({2006, 2013})

_ABORTED: Final = frozenset({"25P02"})
"""An earlier statement failed: PostgreSQL takes nothing more until a rollback."""

_NO_TRANSACTION: Final = frozenset({"25P01"})

DROPPED: Final = (OSError, EOFError)
"""What a driver may raise itself when a connection breaks; in a program it can mean anything."""

_WRAPPERS: Final = frozenset({"sqlalchemy", "django"})
_NUMBERED: Final = frozenset({"pymysql", "asyncmy", "MySQLdb"})
"""Drivers whose errors carry the server's number as their first argument."""

_DRIVERS: Final = _WRAPPERS | _NUMBERED | {"sqlite3", "aiosqlite", "psycopg", "asyncpg"}
"""The packages whose errors say what became of a statement."""


# What the application's own error means. The class of the error decides, not where it was raised:
# the database has undone the transaction, whatever the program makes of that. So an error that was
# raised from such a one, or while it was handled, says the same; `from None` says otherwise.


def must_retry(error: BaseException, around: BaseException | None = None) -> bool:
    """Whether the database asks for the whole unit of work again; `around`: see `_meant`."""
    return any(
        isinstance(each, RetryTransaction) or not _RETRY.isdisjoint(_own_code(each))
        for each in _meant(error, around)
    )


def is_lost(error: BaseException, around: BaseException | None = None) -> bool:
    """Whether the connection was lost, or its server is stopping or takes no writes."""
    return _tell_lost(list(_meant(error, around)))


def lost_error() -> StoreUnavailable:
    """The error when the connection was lost inside the block."""
    return StoreUnavailable(
        "the connection was lost inside the block of idem.transaction(): the transaction is rolled "
        "back, and nothing was written"
    )


def retry_error() -> RetryTransaction:
    """The error that asks for the whole unit of work again."""
    return RetryTransaction(
        "the database gave up this transaction in favor of another one: roll it back and repeat "
        "the whole unit of work, as idem.run_transaction() does"
    )


def would_wait(error: Exception) -> bool:
    """Whether a claim found that an open transaction has its record, or waited too long for it."""
    return not _LOCK_TIMEOUT.isdisjoint(_codes(error))


def is_locked(error: Exception) -> bool:
    """Whether a call of the store found that an open transaction has the record."""
    return isinstance(error, RecordLocked)


def is_interruption(error: BaseException) -> bool:
    """Whether neither a driver nor semel raised it: a worker's time limit, a cancellation."""
    if isinstance(error, DROPPED):
        return is_for_the_caller(error)
    return not isinstance(error, IdempotencyError) and not _is_of(_DRIVERS, error)


def raise_claim_error(error: BaseException, *, waits_for_table: bool = False) -> NoReturn:
    """Raise what an error before the block means; `waits_for_table`: the record was not locked."""
    if is_interruption(error):
        raise error
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


def raise_end_error(error: BaseException, *, rolled_back: bool = False) -> NoReturn:
    """Raise what an error after the block means; `rolled_back`: the record of its claim is gone."""
    if is_interruption(error):
        raise error
    if rolled_back:
        raise RetryTransaction(
            "the transaction was rolled back inside the block of idem.transaction(): by a deadlock "
            "whose error was caught, or by a ROLLBACK. Let such an error end the transaction, then "
            "repeat the whole unit of work, as idem.run_transaction() does"
        ) from error
    if is_ended(error):
        raise ended_error() from error
    _raise(error, set(_codes(error)))


def is_ended(error: BaseException) -> bool:
    """Whether a savepoint is gone, and its transaction with it."""
    return isinstance(error, OutcomeUnknown) or not _ENDED.isdisjoint(_codes(error))


def ended_error() -> OutcomeUnknown:
    """The error when the transaction did not last as long as the block."""
    return OutcomeUnknown(
        "the transaction was ended inside the block of idem.transaction(). If it was committed, so "
        "was what the block had done until then, and its record is held as unknown; commit after "
        "the block"
    )


def _raise(error: BaseException, codes: set[Code]) -> NoReturn:
    if isinstance(error, IdempotencyError):
        raise error
    if codes & _RETRY:
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
    hint = "; a message above max_allowed_packet does that" if codes & _HANGS_UP else ""
    lost = _tell_lost(list(_unwrapped(error))) or isinstance(error, DROPPED)
    raise (StoreUnavailable if lost else StoreError)(
        f"the record could not be written in this transaction: {_first_line(error)}{hint}"
    ) from error


def _first_line(error: BaseException) -> str:
    # The rest can hold users' keys and values.
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"


def _codes(error: BaseException) -> Iterator[Code]:
    for each in _unwrapped(error):
        yield from _own_code(each)


def _unwrapped(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error, and those that it wraps."""
    while error is not None:
        yield error
        wraps = _package(type(error)) in _WRAPPERS
        error = (getattr(error, "orig", None) or error.__cause__) if wraps else None


def _meant(error: BaseException, around: BaseException | None) -> Iterator[BaseException]:
    """Yield an error of the application, what it was raised from, and the members of a group.

    What it was raised from: by `from`, or because another error was being handled. `around` was
    handled already when the unit of work began, and has nothing to do with it. An interruption
    means itself, and so does an error of semel, which was made of what is below it.
    """
    found: list[Any] = [error] if isinstance(error, Exception) else []
    known = {id(around), id(None)}
    for each in found:  # which grows meanwhile
        yield each
        known.add(id(each))
        if not isinstance(each, IdempotencyError):
            found += [one for one in _below(each) if id(one) not in known]


def _below(error: BaseException) -> list[Any]:
    wrapped = getattr(error, "orig", None)
    cause = wrapped if isinstance(wrapped, BaseException) else error.__cause__
    if cause is None and not error.__suppress_context__:
        cause = error.__context__
    return [cause, *(error.exceptions if isinstance(error, BaseExceptionGroup) else ())]


def _tell_lost(errors: Sequence[BaseException]) -> bool:
    codes = {code for each in errors for code in _own_code(each)}
    if codes & _TOO_SLOW:
        return False
    return (
        not codes.isdisjoint(_LOST)
        or any(isinstance(code, str) and code.startswith(_CONNECTION) for code in codes)
        or any(map(_says_lost, errors))
    )


def _says_lost(error: BaseException) -> bool:
    """Whether an error without a code is one of a lost connection."""
    if isinstance(error, StoreUnavailable):
        return True
    match _package(type(error)):
        case "sqlalchemy":
            flag = getattr(error, "connection_invalidated", False)
            return flag is True or getattr(error, "code", None) == _INVALIDATED
        case "psycopg":
            # The server's own errors have a code; without one it is the client that speaks.
            return type(error).__name__ == "OperationalError" and _codeless(error)
        case "asyncpg":
            return type(error).__name__ == "InterfaceError" and "connection is closed" in str(error)
    return False


def _codeless(error: BaseException) -> bool:
    return getattr(error, "sqlstate", None) is None


def _package(kind: type) -> str:
    return kind.__module__.partition(".")[0]


def _own_code(error: BaseException) -> Iterator[Code]:
    state = getattr(error, "sqlstate", None)
    if isinstance(state, str):
        yield state
    name = getattr(error, "sqlite_errorname", None)
    if isinstance(name, str):
        # SQLITE_BUSY_SNAPSHOT is a kind of SQLITE_BUSY; plain errors are told apart by their words.
        yield "_".join(name.split("_")[:2])
        yield str(error).partition(":")[0]
    # A number means something only in an error of these drivers; a KeyError may hold any.
    if _is_of(_NUMBERED, error) and error.args and isinstance(error.args[0], int):
        code = error.args[0]
        if code != _FORBIDDEN_BY_AN_OPTION or "read-only" in str(error).replace("_", "-"):
            yield code


def _is_of(packages: frozenset[str], error: BaseException) -> bool:
    """Whether one of these packages has made the error's class, or one that it inherits from."""
    return any(_package(kind) in packages for kind in type(error).__mro__)
