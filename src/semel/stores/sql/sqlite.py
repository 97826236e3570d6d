"""The stores on SQLite, `sqlite:///path`: one file, several processes, nothing to install.

`sqlite:///semel.db` is relative to the working directory, `sqlite:////var/lib/semel.db` absolute.
Options in the URL: `table`, `synchronous` (FULL, or NORMAL: the last commits may be lost when the
machine, not the program, goes down) and `timeout`; `clock` and `trace`, functions, by name only.

sqlite              the stores, and the file that they open
sqlite_statements   the SQL, and what each verb does with it
sqlite_session      one connection, one transaction for many callers, and what its errors mean
sqlite_writer       which thread runs the transaction: one of the callers, or a writer for asyncio
"""

from __future__ import annotations

import os
import sqlite3
import sys
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, TypeAlias, TypeVar, cast

from semel.core.records import PurgeRequest, Request
from semel.errors import ConfigError, StoreError, StoreUnavailable
from semel.stores.sql import sqlite_statements as schema
from semel.stores.sql.aio import AsyncSQLStore
from semel.stores.sql.batch import answers_or_error
from semel.stores.sql.rows import COLUMNS
from semel.stores.sql.schema import DEFAULT_TABLE, not_ours
from semel.stores.sql.sqlite_session import Session, primary_code
from semel.stores.sql.sqlite_statements import SQLiteOperation, SQLiteTable, SQLiteVerbs
from semel.stores.sql.sqlite_writer import Combiner, Writer
from semel.stores.sql.store import SQLStore
from semel.stores.urls import (
    DEFAULT_PREFIX,
    DEFAULT_TIMEOUT,
    merge_options,
    positive_seconds,
    reject_in_url,
    split_url,
)

Trace = Callable[[str], object]

T = TypeVar("T")

FileId: TypeAlias = tuple[int, int]
"""The device and the number of a file: what it is, whatever its name."""

SYNCHRONOUS: Final = ("FULL", "NORMAL")

ASK_AGAIN_MS = 1
"""A caller that finds the file locked by another process asks again so often. SQLite itself would
sleep longer and longer, and miss moments in which the lock is free."""

RETRY_WAL = 0.01

LOG_PAGES, UPKEEP_LOG_PAGES = 1000, 250
"""The commit that finds so many pages in the log writes them back; 1000 is SQLite's own number."""


LOG_BYTES = 16 << 20
"""A log that grew larger during a long read is cut to this size when it is used again."""

OPTIONS: Final = frozenset({"table", "synchronous", "timeout", "trace", "clock"})


def open_store(url: str, *, prefix: str, timeout: float, **options: Any) -> SQLiteStore:
    """Open a store for threads; the file is opened by the first call."""
    path, arguments = _arguments(url, timeout, options)
    return SQLiteStore(path, prefix=prefix, **arguments)


def open_async_store(url: str, *, prefix: str, timeout: float, **options: Any) -> AsyncSQLiteStore:
    """Open a store for asyncio; the file is opened by the first call."""
    path, arguments = _arguments(url, timeout, options)
    return AsyncSQLiteStore(path, prefix=prefix, **arguments)


class SQLiteStore(SQLStore):
    """A store for threads, which share their commits.

    It takes a path, or `connection=` of the application, which must not be in a transaction when
    the store is used and is never closed by it. Stores with different prefixes may share a table
    and never see each other's records. Times are the host's. `synchronous` and `trace` (which is
    called with every statement) go with a path.
    """

    dialect = "sqlite"

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        connection: sqlite3.Connection | None = None,
        prefix: str = DEFAULT_PREFIX,
        table: str = DEFAULT_TABLE,
        timeout: float = DEFAULT_TIMEOUT,
        synchronous: str = "FULL",
        trace: Trace | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.path: str | None = None
        """The file, absolute; None with a connection of the application."""
        self.connection = connection
        """The application's own, if one was given."""
        self.table = records = SQLiteTable(table, prefix, clock)
        upkeep = None
        if connection is None and path is not None:
            file = FileSource(path, records, timeout=timeout, synchronous=synchronous, trace=trace)
            source: FileSource | GivenSource = file
            self.path = file.place
            upkeep = Combiner(Session(file.for_upkeep()), timeout)
        elif connection is not None and path is None:
            source = GivenSource(connection, records, timeout=timeout)
        else:
            raise ConfigError("an SQLite store takes a path or a connection, one of them")
        super().__init__(SQLiteVerbs(records), Combiner(Session(source), timeout))
        self._upkeep = upkeep or self._executor
        """Runs what can wait, beside the calls."""

    def ask(self, request: Request[T]) -> T:
        """Answer one request."""
        runner = self._upkeep if isinstance(request, PurgeRequest) else self._executor
        operation = self._operations[type(request)](request)
        answer: T = answers_or_error(runner.run([operation]))[0]
        return answer

    def close(self) -> None:
        """Release what this store opened itself."""
        self._upkeep.close()
        super().close()

    def create_nothing(self) -> None:
        """From now on, raise ConfigError where a call would create the table."""
        self.table.autocreate = False

    def migrate(self) -> int:
        """Make the table, as any first call does too unless it is gone, and return its version."""
        return cast("int", answers_or_error(self._executor.run([_making(self.table)]))[0])

    def migration(self) -> str:
        """Write what makes the table in an empty file, for a person to read and run."""
        return self.table.script()


class AsyncSQLiteStore(AsyncSQLStore):
    """A store for asyncio: a writer thread of its own serves all tasks, many in one commit.

    The arguments are those of `SQLiteStore`, but for `connection`.
    """

    dialect = "sqlite"
    connection: None = None

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        prefix: str = DEFAULT_PREFIX,
        table: str = DEFAULT_TABLE,
        timeout: float = DEFAULT_TIMEOUT,
        synchronous: str = "FULL",
        trace: Trace | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.table = records = SQLiteTable(table, prefix, clock)
        source = FileSource(path, records, timeout=timeout, synchronous=synchronous, trace=trace)
        self.path = source.place
        verbs, writer = SQLiteVerbs(records), Writer(Session(source), timeout)
        upkeep = Writer(Session(source.for_upkeep()), timeout)
        super().__init__(verbs, writer)
        self._upkeep = upkeep
        self._submit, self._submit_upkeep = writer.submit, upkeep.submit
        for of_this_store in (writer, upkeep):
            # Dropped without being closed, it would keep a thread and two files for a while.
            weakref.finalize(self, of_this_store.drop).atexit = False

    async def ask(self, request: Request[T]) -> T:
        """Answer one request, straight from a writer: each coroutine on the way takes time."""
        submit = self._submit_upkeep if isinstance(request, PurgeRequest) else self._submit
        outcomes = await submit((self._operations[type(request)](request),))
        answer: T = answers_or_error(outcomes)[0]
        return answer

    async def migrate(self) -> int:
        """Make the table, as any first call does too unless it is gone, and return its version."""
        return cast("int", answers_or_error(await self._submit((_making(self.table),)))[0])

    async def close(self) -> None:
        """Release what this store opened itself."""
        await self._upkeep.close()
        await super().close()


def _making(table: SQLiteTable) -> SQLiteOperation[int]:
    return SQLiteOperation(table.made, look=table.made)


def _arguments(url: str, timeout: float, options: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    address, in_url = split_url(url)
    if not address.startswith("/"):
        raise ConfigError(f"{url}: write sqlite:///semel.db, or sqlite:////var/lib/semel.db")
    reject_in_url(in_url, clock="a function", trace="a function")
    arguments = merge_options("sqlite", in_url, options, OPTIONS)
    given = arguments.pop("timeout", timeout)
    return address[1:], {**arguments, "timeout": positive_seconds("timeout", given)}


# --- where the connection comes from: a file of the store's, or the application's own ------


class FileSource:
    """A database file, opened when it is needed and closed by the store."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        table: SQLiteTable,
        *,
        timeout: float,
        synchronous: str,
        trace: Trace | None,
        log_pages: int = LOG_PAGES,
    ) -> None:
        self.place = _checked(path)
        self._log = f"{self.place}-wal"
        self.timeout = timeout
        if synchronous.upper() not in SYNCHRONOUS:
            raise ConfigError(f"synchronous must be FULL or NORMAL, not {synchronous!r}")
        self._synchronous = synchronous.upper()
        self._table = table
        self._trace = trace
        self._log_pages = log_pages
        self._opened: FileId | None = None
        """The file that was opened last, whatever its name means by now."""
        self._opened_log: FileId | None = None
        """The same of its write-ahead log, which has the latest commits."""

    def for_upkeep(self) -> FileSource:
        """The same file, for work that can wait.

        Its commits are not relied on, so not synced; and it writes the log back long before
        a commit of the others would have to stop and do so.
        """
        return FileSource(
            self.place,
            self._table,
            timeout=self.timeout,
            synchronous="NORMAL",
            trace=self._trace,
            log_pages=UPKEEP_LOG_PAGES,
        )

    def connect(self) -> sqlite3.Connection:
        """Open the file in WAL mode, with the table in it."""
        if self._opened is not None and _file_id(self.place) is None:
            raise _lost(self.place)  # it would be made anew, and every record forgotten
        _create(self.place)
        connection = sqlite3.connect(
            self.place,
            timeout=self.timeout,
            isolation_level=None,  # transactions begin and end where the session says
            check_same_thread=False,  # used by one thread at a time: the session's lock sees to it
        )
        try:
            if not self._table.autocreate:
                self._expect_table(connection)  # first: WAL would change another program's file
            self._use_wal(connection)
            connection.execute(f"PRAGMA synchronous = {self._synchronous}")
            connection.execute(f"PRAGMA wal_autocheckpoint = {self._log_pages}")
            connection.execute(f"PRAGMA journal_size_limit = {LOG_BYTES}")
            ensure_table(connection, self._table)
            connection.execute(f"PRAGMA busy_timeout = {ASK_AGAIN_MS}")
            self._opened = _file_id(self.place)
            # SQLite follows links, and has the log beside the file itself.
            self._log = f"{Path(self.place).resolve()}-wal"
            self._opened_log = _file_id(self._log)
        except BaseException:
            connection.close()
            raise
        connection.set_trace_callback(self._trace)
        return connection

    def check(self, connection: sqlite3.Connection) -> None:
        """Undo what an interrupt between two statements left open; its callers know.

        No other program sees what is written to a file that has lost its name.
        """
        if _file_id(self.place) != self._opened:
            raise _lost(self.place)
        if connection.in_transaction:
            connection.execute("ROLLBACK")

    def check_log(self) -> None:
        """Reject writing to a log that has lost its name, for the same reason."""
        if _file_id(self._log) != self._opened_log:
            raise ConfigError(
                f"{self._log} was deleted or replaced while the SQLite database was open: records "
                "of the latest calls may be lost. It is a part of the database: leave it alone, or "
                "stop the programs that use the database first"
            )

    def release(self, connection: sqlite3.Connection) -> None:
        """Close the connection."""
        connection.close()

    def disown(self, connection: sqlite3.Connection) -> None:
        """Close the connection, and leave the log to the processes that still use it."""
        with suppress(sqlite3.Error):
            if sys.version_info >= (3, 12):
                connection.setconfig(sqlite3.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, True)
            connection.close()

    def _expect_table(self, connection: sqlite3.Connection) -> None:
        if _version(connection, self._table) is None and not _has_table(connection, self._table):
            raise ConfigError(
                f"the table {self._table.name} is missing in the SQLite database {self.place}: is "
                "the path right? For a new database run `semel migrate`"
            )

    def _use_wal(self, connection: sqlite3.Connection) -> None:
        # The busy timeout does not cover this change of mode: several processes that start
        # together on a new file have to take turns by themselves.
        deadline = time.monotonic() + self.timeout
        while True:
            try:
                (mode,) = connection.execute("PRAGMA journal_mode = WAL").fetchone()
            except sqlite3.OperationalError as error:
                if primary_code(error) != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                    raise
                time.sleep(RETRY_WAL)
            else:
                break
        if mode != "wal":
            raise StoreUnavailable(
                f"the SQLite database {self.place} cannot use WAL (a network file system?); "
                "put it on a local disk"
            )


class GivenSource:
    """A connection the application opened, and will close."""

    place = "of the given connection"

    def __init__(
        self, connection: sqlite3.Connection, table: SQLiteTable, *, timeout: float
    ) -> None:
        if connection.text_factory is not str:
            raise ConfigError("the connection's text_factory must be str")
        self.timeout = timeout
        self._connection = connection
        self._table = table
        self._opened_by = os.getpid()
        self._file = ""
        """Where its database is, once it is known; nowhere for one in memory."""
        self._found: FileId | None = None

    def connect(self) -> sqlite3.Connection:
        """Make sure that the table is there."""
        if os.getpid() != self._opened_by:
            raise StoreUnavailable("an SQLite connection cannot be used after a fork")
        self.check(self._connection)
        ensure_table(self._connection, self._table)
        if not self._file:
            ((file,),) = _plain(self._connection).execute(schema.MAIN_FILE)
            self._found = _file_id(file)
            self._file = file  # last: it says that the other one is known
        return self._connection

    def check(self, connection: sqlite3.Connection) -> None:
        """Reject calls while the application's own transaction is open: ours would be part of it.

        And reject a file that lost its name since the connection was first used here.
        """
        if self._file and _file_id(self._file) != self._found:
            raise ConfigError(
                f"the SQLite database {self._file} was deleted or replaced while it was open: "
                "no other program sees what this connection writes; restore the file, open a "
                "connection to it, and make a new store with that"
            )
        if connection.in_transaction:
            raise StoreError(
                "the given connection has an open transaction; commit it or roll it back first, "
                "or give the store a connection of its own"
            )

    def check_log(self) -> None:
        """Whether it has a log is up to the application."""

    def release(self, connection: sqlite3.Connection) -> None:
        """Leave it open: the application opened it, and closes it."""

    disown = release


def _create(path: str) -> None:
    """Create a file that only its owner reads; SQLite gives its mode to the log beside it.

    A file that is there is not opened, as closing it would end the locks of this process on it.
    What cannot be created is left to SQLite, which says why.
    """
    with suppress(OSError):
        os.close(os.open(os.path.realpath(path), os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))


def _file_id(path: str) -> FileId | None:
    try:
        found = os.stat(path)  # noqa: PTH116 - a Path takes three times as long, each call
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise StoreUnavailable(
            f"the SQLite database {path} cannot be reached: {error.strerror}"
        ) from error
    return found.st_dev, found.st_ino


def _lost(place: str) -> ConfigError:
    return ConfigError(
        f"the SQLite database {place} was deleted or replaced while it was open: restore "
        "it with its records; if they may be forgotten, `semel migrate` makes an empty one"
    )


def ensure_table(connection: sqlite3.Connection, table: SQLiteTable) -> None:
    """Create the table unless it exists; reject one that a newer version of semel made."""
    version = _version(connection, table)
    if version is None and table.autocreate:
        try:
            connection.execute("BEGIN IMMEDIATE")  # inside: interrupted here, too, it is undone
            version = _version(connection, table)  # another process may have been faster
            if version is None:
                version = schema.SCHEMA_VERSION
                connection.execute(schema.CREATE_VERSIONS)
                if not _has_table(connection, table):
                    for statement in table.create:
                        connection.execute(statement)
                connection.execute(schema.WRITE_VERSION, (table.name, version))
            connection.execute("COMMIT")
        finally:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
    if version is not None and version > schema.SCHEMA_VERSION:
        raise StoreError(
            f"the table {table.name} was made by a newer version of semel (schema {version}, "
            f"this one knows {schema.SCHEMA_VERSION}): upgrade this program"
        )


def _has_table(connection: sqlite3.Connection, table: SQLiteTable) -> bool:
    """Whether a table is there whose version was lost; one that is not ours is rejected."""
    columns = {name for (name,) in _plain(connection).execute(schema.LIST_COLUMNS, (table.name,))}
    if columns and not columns.issuperset({"identity", "prefix", *COLUMNS}):
        raise not_ours(table.name)
    return bool(columns)


def _plain(connection: sqlite3.Connection) -> sqlite3.Cursor:
    cursor = connection.cursor()
    cursor.row_factory = None  # an application's own connection may have another
    return cursor


def _version(connection: sqlite3.Connection, table: SQLiteTable) -> int | None:
    cursor = _plain(connection)
    if cursor.execute(schema.FIND_VERSIONS).fetchone() is None:
        return None
    row = cursor.execute(schema.READ_VERSION, (table.name,)).fetchone()
    return None if row is None else int(row[0])


def _checked(path: str | os.PathLike[str]) -> str:
    given = os.fspath(path)
    if given == ":memory:":
        raise ConfigError("an SQLite database in memory belongs to one connection; use memory://")
    if not given:
        raise ConfigError("the path of the SQLite database is missing: sqlite:///semel.db")
    # Absolute from now on: a later change of directory must not mean another database.
    place = Path(given).absolute()
    if place.is_dir():
        raise ConfigError(f"the SQLite database {place} is a directory")
    if not place.parent.is_dir():
        raise ConfigError(f"the directory of the SQLite database {place} does not exist")
    return str(place)
