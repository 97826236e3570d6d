"""The one connection of an SQLite store, and the transactions on it: one for many callers.

This module runs operations, and turns SQLite's errors into ours. Which thread does it, and who
waits for it, is decided by `sqlite_writer`.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from functools import partial
from typing import Any, Final, Protocol, TypeVar, cast

from msgspec import Struct

from semel.core.process import ForkAware, follow_forks, leave_alone
from semel.core.records import Identity
from semel.errors import (
    ConfigError,
    IdempotencyError,
    StoreError,
    StoreFull,
    StoreUnavailable,
    ValueRejected,
)
from semel.stores.batching import ALONE
from semel.stores.sql.sqlite_statements import SIZES, SQLiteOperation
from semel.stores.sql.verbs import Reply

PENDING: Final = object()
"""The outcome of an operation that has none yet."""


class Member(Struct):
    """One operation and, in the end, what became of it: its answer or its error.

    The collector follows it: an error knows the frames it came through, and they know the member.
    """

    operation: SQLiteOperation[Any]
    outcome: Any = PENDING


class Job:
    """What one caller asked for, answered as a whole."""

    __slots__ = ("_ticket", "members", "served")

    def __init__(self, operations: Sequence[Any]) -> None:
        self.members = list(map(Member, operations))
        self._ticket = threading.Lock()
        self.served = False
        """Whether the runner has taken it."""

    def take(self) -> bool:
        """Decide its fate: the runner takes it to run it, a caller out of time to drop it."""
        return self._ticket.acquire(blocking=False)

    def serve(self) -> bool:
        """Take it to run it; False when its caller has dropped it."""
        self.served = self.take()
        return self.served

    def given_up(self, place: str, seconds: float) -> StoreUnavailable:
        """Drop it, unless the runner has taken it; the error says which of the two it was."""
        what = "nothing was done" if self.take() else "the transaction may still be committed"
        return StoreUnavailable(
            f"the SQLite database {place} did not answer within {seconds:g} s; {what}"
        )

    @property
    def outcomes(self) -> list[Any]:
        """The outcomes, in the order of the operations."""
        return [member.outcome for member in self.members]


# --- which operations of a transaction are carried out by one statement -------------------


def in_batches(members: Sequence[Member]) -> Iterator[list[Member]]:
    """Put operations of one kind together; those on one record stay in their order."""
    kinds: dict[Callable[..., Any], list[Member]] = {}
    names: set[Identity] = set()
    for member in members:
        ask, batch = member.operation.ask, member.operation.batch
        if ask is None or batch is None or ask.identity in names:
            yield from _portions(kinds)
            kinds, names = {}, set()
        if ask is None or batch is None:
            yield [member]
        else:
            names.add(ask.identity)
            kinds.setdefault(batch, []).append(member)
    yield from _portions(kinds)


def _portions(kinds: Mapping[Any, list[Member]]) -> Iterator[list[Member]]:
    """Cut groups into sizes that statements are prepared for."""
    for group in kinds.values():
        begin = 0
        for size in (*SIZES, 1):
            while len(group) - begin >= size:
                yield group[begin : begin + size]
                begin += size


# --- the one place where SQLite's errors become ours --------------------------------------


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
    """Make an error of semel, one for each caller, that names the file and keeps the cause."""
    ours = _ours(error, place)
    if ours is not error:
        ours.__cause__ = error
    return ours


def _ours(error: Exception, place: str) -> Exception:
    code = primary_code(error)
    if isinstance(error, (StoreError, ConfigError)):
        return copy(error)
    if code == sqlite3.SQLITE_FULL:
        return StoreFull(
            f"no room is left for the SQLite database {place}: {error}. Make 16 MB of room on its "
            "disk first (delete or move other files, or enlarge it), because a purge takes room, "
            "too; then run semel purge, and new records use the room of the old ones"
        )
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


J = TypeVar("J", bound=Job)

RETRY_LOCK = 0.0005
"""Seconds between two tries to get the write lock, for connections that do not wait at all."""


class Source(Protocol):
    """Where a session's connection comes from."""

    place: str
    """The name of the database, for error messages."""
    timeout: float

    def connect(self) -> sqlite3.Connection:
        """Return a connection that is ready for use."""
        ...

    def check(self, connection: sqlite3.Connection) -> None:
        """Raise when the connection may not be used right now."""
        ...

    def check_log(self) -> None:
        """Raise when a write would be lost now."""
        ...

    def release(self, connection: sqlite3.Connection) -> None:
        """Take the connection back."""
        ...

    def disown(self, connection: sqlite3.Connection) -> None:
        """Take back a connection that this process inherited through a fork."""
        ...


_torn_by_forks: set[str] = set()
"""Databases with a transaction under way when this process was forked: SQLite believes that the
process has the parent's locks, on every connection to the same file."""


class Session(ForkAware):
    """Runs jobs on a connection that is opened on first use."""

    def __init__(self, source: Source) -> None:
        self._source: Final = source
        self._connection: sqlite3.Connection | None = None
        self._lock = threading.Lock()
        self._closed = False
        self._at_rest = False
        self._repeats = self._blamed = False
        follow_forks(self)

    def run(self, jobs: Sequence[J], answer: Callable[[list[J]], None]) -> BaseException | None:
        """Run the jobs, all writes in one transaction; `answer` is called once for each job.

        An exception that is no error of the database's may be one of a signal handler's, raised in
        the thread that happens to work for all. It is no caller's outcome: what was undone by it is
        done once more, and it is returned, for that thread alone. One that comes again is a bug.
        """
        waiting = list(jobs)
        interruption: BaseException | None = None
        try:
            with self._lock:
                connection = self._ready()
                try:
                    if self._peek(connection, waiting):
                        answered, waiting = _split(waiting)
                        answer(answered)
                    if waiting:
                        self._write(connection, waiting)
                except (sqlite3.Error, IdempotencyError):
                    raise
                except BaseException as error:  # noqa: BLE001 - returned
                    # On another connection: this one may have a read open that was never finished,
                    # and would go on to see the database as it was then.
                    self._release()
                    if not self._again(waiting):
                        interruption = error
        except Exception as error:  # noqa: BLE001 - it reaches the callers as their outcome
            interruption = None
            self._fail(waiting, error)
        finally:
            # Also when interrupted (KeyboardInterrupt): nobody is left waiting.
            if waiting:
                self._fail(waiting, StoreUnavailable("the transaction was interrupted"))
                answer(waiting)
        try:
            return interruption
        finally:
            del interruption  # its traceback has this frame: a cycle would keep all that is in it

    def _again(self, jobs: Sequence[Job]) -> bool:
        """Run what was undone; True when an exception came again, which then is its member's."""
        self._repeats, self._blamed = True, False
        try:
            self._write(self._ready(), jobs)
        finally:
            self._repeats = False
        return self._blamed

    @property
    def place(self) -> str:
        """Name the database, for error messages."""
        return self._source.place

    def rest(self) -> None:
        """Release the connection until it is needed again."""
        with self._lock:
            self._release()

    def close(self) -> None:
        """Release the connection; no operation runs after this."""
        with self._lock:
            self._closed = True
            self._release()

    def _ready(self) -> sqlite3.Connection:
        if self._closed:
            raise StoreUnavailable(f"the store on {self._source.place} is closed")
        if self._source.place in _torn_by_forks:
            raise StoreUnavailable(
                f"this process was forked during a transaction on {self._source.place}; "
                "SQLite cannot be used safely in it"
            )
        if self._connection is None:
            self._connection = self._source.connect()
        self._guarded(self._source.check, self._connection)
        return self._connection

    def _guarded(self, check: Callable[..., None], *arguments: Any) -> None:
        try:
            check(*arguments)
        except ConfigError:
            self._release()  # the next call looks for the file anew
            raise

    def _release(self) -> None:
        # Taken out first: struck by an exception, it must not stay here, closed, for every call.
        connection, self._connection = self._connection, None
        if connection is not None:
            self._source.release(connection)

    def _peek(self, connection: sqlite3.Connection, jobs: Sequence[Job]) -> bool:
        """Answer what needs no write without the write lock, up to the first that does.

        Tells whether any was answered.

        An answer that writes nothing judges a state that was committed when it was read, so it
        is as good as one from a transaction, and does not wait for another process's commit.
        From the first write on the transaction has to come anyway: a look in advance at each of
        the others would cost a batch of first claims a quarter of its speed.
        """
        members = _pending(jobs)
        for member in members:
            if not self._peeked(connection, member):
                return member is not members[0]
        return True

    def _peeked(self, connection: sqlite3.Connection, member: Member) -> bool:
        if member.operation.look is not None:
            try:
                self._drive(connection, member, may_write=False)
            except sqlite3.OperationalError as error:
                if primary_code(error) != sqlite3.SQLITE_BUSY:
                    raise
                # Another process repairs the file: a transaction waits for it.
        return member.outcome is not PENDING

    def _write(self, connection: sqlite3.Connection, jobs: Sequence[Job]) -> None:
        # Only here: it costs as much as a tenth of a replay, which writes nothing.
        self._guarded(self._source.check_log)
        batch: list[Member] = []
        lost = self._transact(connection, jobs, batch)
        if lost is not None and is_old_snapshot(lost):
            # A read was left open, by an exception that came between it and its end.
            self._release()
            connection = self._ready()
            lost = self._transact(connection, jobs, batch)
        if lost is None:
            return
        if primary_code(lost) == sqlite3.SQLITE_FULL and len(batch) > 1:
            # A large result that does not fit must not keep out the small ones beside it.
            for member in batch:
                self._transact(connection, (), [member])
        for member in _pending(jobs):
            # The transaction failed (mostly for the write lock): answer operations that only read.
            if not self._peeked(connection, member):
                member.outcome = translate(lost, self._source.place)

    def _transact(
        self, connection: sqlite3.Connection, jobs: Sequence[Job], members: list[Member]
    ) -> sqlite3.Error | None:
        """Run members, and those of the jobs, in one transaction; return what lost it, if so."""
        try:
            self._begin(connection)
            # Only now: a caller that gave up while another process held the lock is not served.
            members.extend(_pending([job for job in jobs if job.served or job.serve()]))
            for group in in_batches(members):
                self._drive_batch(connection, group)
            connection.execute("COMMIT")
        except sqlite3.Error as error:
            for member in members:
                member.outcome = translate(error, self._source.place)
            return error
        except BaseException:
            if connection.in_transaction:
                # Interrupted before the commit: their answers are undone with the rest.
                for member in members:
                    member.outcome = PENDING
            raise
        finally:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
        return None

    def _begin(self, connection: sqlite3.Connection) -> None:
        deadline = time.monotonic() + self._source.timeout
        while True:
            try:
                connection.execute("BEGIN IMMEDIATE")
            except sqlite3.OperationalError as error:
                busy = primary_code(error) == sqlite3.SQLITE_BUSY and not is_old_snapshot(error)
                if not busy or time.monotonic() >= deadline:
                    raise
                time.sleep(RETRY_LOCK)
            else:
                return

    def _drive_batch(self, connection: sqlite3.Connection, group: Sequence[Member]) -> None:
        outcomes = [ALONE] * len(group)
        if len(group) > 1:
            batch = cast("Callable[..., Any]", group[0].operation.batch)
            asks = [member.operation.ask for member in group]
            shared = Member(SQLiteOperation(partial(batch, asks)))
            try:
                self._drive(connection, shared, may_write=True)
            except sqlite3.OperationalError as error:
                # More than this connection takes in one statement: it was not even begun.
                if primary_code(error) != sqlite3.SQLITE_ERROR or not connection.in_transaction:
                    raise
                shared.outcome = error
            if not isinstance(shared.outcome, Exception):  # else whose it is shows alone
                outcomes = shared.outcome
        for member, outcome in zip(group, outcomes, strict=True):
            if outcome is ALONE:
                self._drive(connection, member, may_write=True)
            else:
                member.outcome = outcome

    def _drive(self, connection: sqlite3.Connection, member: Member, *, may_write: bool) -> None:
        try:
            member.outcome = drive(connection, member.operation, may_write=may_write)
        except Exception as error:  # even a bug in one member is not the others'
            if isinstance(error, sqlite3.Error) and not isinstance(error, VALUE_ERRORS):
                raise  # disk full, I/O: SQLite gives up the whole transaction
            if not isinstance(error, (*VALUE_ERRORS, IdempotencyError)):
                if not self._repeats:
                    raise  # perhaps a signal handler's: see `run`
                self._blamed = True
            member.outcome = translate(error, self._source.place)

    def _fail(self, jobs: Sequence[Job], error: Exception) -> None:
        for member in _pending(jobs):
            member.outcome = translate(error, self._source.place)

    # --- forks: no connection is open while the process forks --------------------------------
    # SQLite remembers in memory which files this process has locked. A child inherits that, and
    # trusts locks that only the parent holds, even on a connection of its own: the parent then
    # deletes the write-ahead log under it, and commits of the child are lost.

    def before_fork(self) -> None:
        """Close the connection, once its transaction has ended."""
        self._at_rest = self._lock.acquire(timeout=2 * self._source.timeout + 1.0)
        if self._at_rest:
            self._release()

    def after_fork(self) -> None:
        """Release the lock; the next operation opens a connection again."""
        if self._at_rest:
            self._at_rest = False
            self._lock.release()

    def after_fork_in_child(self) -> None:
        """Start with a new lock, unless a transaction was under way.

        A connection that an unseen fork left open is closed before another one is opened. SQLite
        forgets its locks by that; in the system the child has none, and the parent keeps its own.
        """
        connection, self._connection = self._connection, None
        if self._lock.locked():
            _torn_by_forks.add(self._source.place)
            leave_alone(connection)
        elif connection is not None:
            self._source.disown(connection)
        self._lock = threading.Lock()


def drive(
    connection: sqlite3.Connection, operation: SQLiteOperation[Any], *, may_write: bool
) -> Any:
    """Run an operation to its answer; PENDING when it wants to write and may not."""
    verb = operation.start() if may_write or operation.look is None else operation.look()
    cursor = connection.cursor()
    cursor.row_factory = None  # an application's own connection may have another
    try:
        statement = next(verb)
        while may_write or not statement.writes:
            cursor.execute(statement.sql, statement.parameters)
            statement = verb.send(Reply(cursor.fetchall(), cursor.rowcount))
    except StopIteration as end:
        return end.value
    finally:
        # A read that is not finished keeps its snapshot, on which nothing can be written.
        cursor.close()
        verb.close()
    return PENDING


def _split(jobs: Sequence[J]) -> tuple[list[J], list[J]]:
    """Split the jobs that have all of their answers from those that do not."""
    answered: list[J] = []
    waiting: list[J] = []
    for job in jobs:
        (waiting if _pending((job,)) else answered).append(job)
    return answered, waiting


def _pending(jobs: Sequence[Job]) -> list[Member]:
    return [member for job in jobs for member in job.members if member.outcome is PENDING]
