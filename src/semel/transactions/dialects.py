"""What a transaction needs of each database beside the verbs of its store (see `Records`).

SQLite has one writer at a time: a caller that waits, waits for the whole file. On PostgreSQL an
advisory lock of the transaction orders the callers of a key, at every isolation level. On MySQL and
MariaDB the row itself does. On these servers a record that has ended is read without a lock.
"""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Callable, Mapping
from datetime import date, time, timedelta
from decimal import Decimal
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, Final

from semel.core.records import ClaimRequest, CompleteRequest, GetRequest, Identity, Record
from semel.errors import ConfigError, ValueRejected
from semel.stores.sql.mysql.statements import READ_NOW, TEXTS, MySQLTable
from semel.stores.sql.mysql.verbs import MySQLVerbs
from semel.stores.sql.postgres.verbs import PostgresVerbs
from semel.stores.sql.rows import WITH_UNICODE, texts_as_bytes
from semel.stores.sql.sqlite_statements import SQLiteTable, SQLiteVerbs
from semel.stores.sql.verbs import Statement, Verb, record_of
from semel.transactions import Records
from semel.transactions._sync.links import SQLiteLink
from semel.transactions.links import command, question

if TYPE_CHECKING:  # its driver, where it needs one, is there
    from semel.stores.sql.mysql import AsyncMySQLStore, MySQLStore
    from semel.stores.sql.postgres import AsyncPostgresStore, PostgresStore
    from semel.stores.sql.sqlite import AsyncSQLiteStore, SQLiteStore

# --- SQLite -------------------------------------------------------------------------------

_DATABASES: Final = question("PRAGMA database_list")


def sqlite_records(store: SQLiteStore | AsyncSQLiteStore, table: str | None) -> SQLiteRecords:
    """Return the records of a store, or those in another table of the same prefix."""
    own = store.table
    return SQLiteRecords(
        own if table is None else SQLiteTable(table, own.prefix, own.clock), _file_of(store)
    )


class SQLiteRecords(Records):
    """The records of one table."""

    by_key = False  # there is one lock for the whole file

    def __init__(self, table: SQLiteTable, file: str) -> None:
        hold = f"UPDATE {table.quoted} SET hold = ? WHERE identity = ? AND owner = ?"  # noqa: S608 - a checked name
        super().__init__(SQLiteVerbs(table), hold, table.digest)
        self._table = table
        self._file = file

    def read(self, identity: Identity) -> Verb[None]:  # noqa: ARG002 - see `lock`
        """Read nothing: a reader that wants to write then may not wait."""
        yield from ()

    def prepare(self, seconds: float, *, wait: bool) -> Verb[None]:  # noqa: ARG002 - the owner of the lock need not have the record
        """Reject another file; bound the wait for the write lock."""
        files = yield from self._files()
        if len(files) == 1:
            self._check(files["main"])
        if self.bound is None:
            self.bound = (yield question("PRAGMA busy_timeout")).rows[0][0]
        yield command(f"PRAGMA busy_timeout = {round(seconds * 1000)}")

    def _restored(self, bound: int) -> Statement:
        return command(f"PRAGMA busy_timeout = {bound}")

    def lock(self, identity: Identity, *, wait: bool) -> Verb[bool]:  # noqa: ARG002 - one line for all
        """Take the write lock before the first read: a reader that wants to write may not wait."""
        yield command(f"DELETE FROM {self._table.quoted} WHERE 0")  # noqa: S608 - a checked name
        files = yield from self._files()
        if len(files) > 1:  # only now: to look for the table is to read
            self._check((yield from self._found_in(files)))
        return True

    def _check(self, found: str) -> None:
        if self._file != _NOWHERE and not _same(found, self._file):
            shown = "a database in memory" if found == _NOWHERE else found
            raise ConfigError(
                f"the table {self._table.name} of the connection is in {shown}, the engine keeps "
                f"its records in {self._file}: they could not be committed together"
            )

    def _files(self) -> Verb[dict[str, str]]:
        """Name the databases of this connection, and the file of each."""
        reply = yield _DATABASES
        files = {name: file for _, name, file in reply.rows}
        if "main" not in files:  # every connection has it
            raise ConfigError("the connection's text_factory must be str")
        return files

    def _found_in(self, files: Mapping[str, str]) -> Verb[str]:
        """Name the file in which this connection has just found the table."""
        # SQLite looks for a name in this order, and takes the first that it finds.
        *others, last = sorted(files, key=lambda name: name != "temp")
        for name in others:
            quoted = name.replace('"', '""')
            there = yield question(
                f'SELECT 1 FROM "{quoted}".sqlite_master '  # noqa: S608 - quoted
                "WHERE type IN ('table', 'view') AND name = ? COLLATE NOCASE",
                self._table.name,
            )
            if there.rows:
                return files[name]
        return files[last]


_NOWHERE: Final = ""
"""What SQLite names as the file of a database in memory."""


def _file_of(store: SQLiteStore | AsyncSQLiteStore) -> str:
    """Name the store's file, if it has one and it is known."""
    if store.path is not None:
        return store.path
    try:
        (main, *_) = SQLiteLink(store.connection).execute(_DATABASES).rows
    except sqlite3.ProgrammingError:  # another thread's connection, which cannot be asked
        return _NOWHERE
    file: str = main[2]
    return file


def _same(one: str, other: str) -> bool:
    try:
        return Path(one).samefile(other)
    except OSError:  # one of them has no file
        return False


# --- PostgreSQL ---------------------------------------------------------------------------


_SET_LOCK_TIMEOUT = (
    "WITH before AS MATERIALIZED (SELECT current_setting('lock_timeout') AS bound) "
    "SELECT bound, set_config('lock_timeout', $1::text, true) FROM before"
)
_RESTORE_LOCK_TIMEOUT = "SELECT set_config('lock_timeout', $1::text, true)"
_LOCK = "SELECT true FROM pg_advisory_xact_lock($1::bigint)"
_TRY_LOCK = "SELECT pg_try_advisory_xact_lock($1::bigint)"


def postgres_records(
    store: PostgresStore | AsyncPostgresStore, table: str | None
) -> PostgresRecords:
    """Return the records of a store, or those in another table of the same schema and prefix."""
    return PostgresRecords(store.verbs_on(table))


class PostgresRecords(Records):
    """The records of one table."""

    def __init__(self, verbs: PostgresVerbs) -> None:
        hold = f"UPDATE {verbs.table} SET hold = $1::boolean WHERE digest = $2 AND owner = $3"  # noqa: S608 - a checked name
        super().__init__(verbs, hold, verbs.digest)
        self._get = verbs.get
        self._short_digest = verbs.short_digest

    def read(self, identity: Identity) -> Verb[Record | None]:
        """Read the record as this transaction sees it."""
        self.waits_for_table = True  # no row keeps a plain SELECT waiting
        record = yield from self._get(GetRequest(identity)).start()
        self.waits_for_table = False
        return record

    def prepare(self, seconds: float, *, wait: bool) -> Verb[None]:  # noqa: ARG002 - `lock` asks
        """Bound the wait for locks until it is restored, or the savepoint before is undone.

        Which server and database a connection reaches is not known here: poolers rename both.
        """
        # 0 would mean for ever.
        reply = yield question(_SET_LOCK_TIMEOUT, f"{max(1, round(seconds * 1000))}ms")
        if self.bound is None:  # only now: interrupted before, the savepoint takes it back
            self.bound = reply.rows[0][0]

    def _restored(self, bound: str) -> Statement:
        return question(_RESTORE_LOCK_TIMEOUT, bound)

    def lock(self, identity: Identity, *, wait: bool) -> Verb[bool]:
        """Take the lock of the record; the end of the transaction, or undoing, releases it."""
        number = int.from_bytes(self._short_digest(identity)[:8], "big", signed=True)
        reply = yield question(_LOCK if wait else _TRY_LOCK, number)
        self.waits_for_table = bool(reply.rows[0][0])
        return self.waits_for_table


# --- MySQL and MariaDB --------------------------------------------------------------------
#
# The row is inserted first, then read as it is now. A plain SELECT under REPEATABLE READ shows the
# past: the row that the insert has just met would be missing. So every read locks. A read before
# the insert, even one that does not wait, would lock the gap of an absent key, and two of those
# that insert are a deadlock: a caller that does not want to wait bounds the wait of the insert.
#
# Those locks last as long as the caller's transaction, replays included. And a plain SELECT under
# REPEATABLE READ decides what the caller sees from then on, which is too early before a wait. So a
# record that has ended is read on a connection of the store, and the transaction is left alone.

_SESSION: Final = (
    "SELECT @@SESSION.innodb_lock_wait_timeout, DATABASE(), CAST(VERSION() AS CHAR), "
    "@@max_allowed_packet, "
    "@@innodb_rollback_on_timeout, @@SESSION.sql_mode, @@SESSION.autocommit, @@SESSION.timestamp, "
    "TIMESTAMPDIFF(SECOND, NOW(6), SYSDATE(6)) LIMIT 1"
)
_CLOCK: Final = "SELECT @@SESSION.timestamp LIMIT 1"
_SET_LOCK_WAIT: Final = "SET SESSION innodb_lock_wait_timeout = %s"


def mysql_records(store: MySQLStore | AsyncMySQLStore, table: str | None) -> MySQLRecords:
    """Return the records of a store, or those in another table of the same prefix."""
    own = store.table
    locking = _LockingTable(table or own.name, own.prefix, own.own_columns)
    return MySQLRecords(locking, store)


_SAFE_TYPES: Final = (str, bytes, int, float, Decimal, date, time, timedelta, NoneType)
"""Written by `written_out`, or by drivers without foreign text in it."""

_REST_OF_MESSAGE: Final = 1024
"""Bytes, at most, beside the hexadecimal result."""


def _from_hex(text: str) -> str:
    return bytes.fromhex(text).decode()


class _LockingTable(MySQLTable):
    """The table, read with FOR UPDATE.

    A row that is locked and has a new owner's id was made by its insert: LAST_INSERT_ID() is not
    needed to tell, and stays what the application's own last insert has made it.
    """

    new_fence = READ_NOW
    when_met = "digest"
    unless_made = ""
    made_here = "1"
    texts = f"HEX({TEXTS})"
    read_texts = staticmethod(_from_hex)
    """The character set of the caller's connection need not have all their characters."""
    largest = math.inf
    """Bytes of one message; on a larger one the server hangs up, and the transaction is gone."""
    sql_mode = ""

    def filled(self, ask: ClaimRequest) -> dict[str, Any]:
        """Return the application's own columns, unless the driver could not quote their values."""
        values = super().filled(ask)
        if "NO_BACKSLASH_ESCAPES" in self.sql_mode:
            for name, value in values.items():
                if not isinstance(value, _SAFE_TYPES):
                    raise ConfigError(
                        f"the column {name} was filled with {type(value).__name__}, which drivers "
                        "quote with backslashes, and this session has NO_BACKSLASH_ESCAPES: let "
                        "its function return a str, or take that mode out of sql_mode"
                    )
        return values

    def complete(self, ask: CompleteRequest) -> Statement:
        """Store the success of a running owner, unless the server can never take its result."""
        size = len(ask.result.data)
        if 2 * size + _REST_OF_MESSAGE > self.largest:
            raise ValueRejected(
                f"the result has {size} bytes, twice as many in a message, and the server's "
                f"max_allowed_packet is {self.largest}; raise that, or lower the policy's "
                "max_result_bytes"
            )
        return super().complete(ask)

    def read(self, identity: Identity) -> Statement:
        """Read the newest version of the row, and keep others from changing it."""
        plain = self.read_committed(identity)
        # LIMIT: a session's sql_select_limit may be 0.
        return plain._replace(sql=f"{plain.sql} LIMIT 1 FOR UPDATE")

    read_met = read

    def read_committed(self, identity: Identity) -> Statement:
        """Read the row, and lock nothing."""
        return super().read(identity)


class MySQLRecords(Records):
    """The records of one table."""

    def __init__(self, table: _LockingTable, store: MySQLStore | AsyncMySQLStore) -> None:
        hold = f"UPDATE {table.quoted} SET hold = %s WHERE digest = %s AND owner = %s"  # noqa: S608 - a checked name
        super().__init__(MySQLVerbs(table), hold, table.digest)
        self._table = table
        self._database = store.database
        """The store's, if its URL has named it."""
        self.outside = store

    def read(self, identity: Identity) -> Verb[Record | None]:
        """Read the record as other transactions see it."""
        reply = yield self._table.read_committed(identity)
        return record_of(self._table.unpacked(reply.rows[0]), identity) if reply.rows else None

    def prepare(self, seconds: float, *, wait: bool) -> Verb[None]:
        """Bound the wait for row locks; the servers count whole seconds, MySQL from one on."""
        reply = yield question(_SESSION)
        ((before, database, version, largest, rolls_back, sql_mode, commits_each, *clock),) = (
            reply.rows
        )
        if isinstance(version, bytes):  # cast, so that it is in the character set of the connection
            raise texts_as_bytes(f"{WITH_UNICODE}, and with another collation than binary")
        yield from self._check_clock(*clock)
        self._table.largest, self._table.sql_mode = largest, sql_mode
        self._check(database)
        self.rolls_back, self.commits_each = bool(rolls_back), bool(commits_each)
        least = 0 if "MariaDB" in version else 1
        bound = max(1, math.ceil(seconds)) if wait else least
        if self.bound is None:
            self.bound = before
        yield question(_SET_LOCK_WAIT, bound)

    def _restored(self, bound: int) -> Statement:
        return question(_SET_LOCK_WAIT, bound)

    def lock(self, identity: Identity, *, wait: bool) -> Verb[bool]:  # noqa: ARG002 - see above
        """Do nothing: the insert of the claim stands in line."""
        yield from ()
        return True

    def _check_clock(self, timestamp: float, behind: int) -> Verb[None]:
        """Reject a session whose clock stands still; all times of the record would be wrong.

        SYSDATE() goes on, so that it is `behind` then. The server may also have been slow: only a
        clock that was set says the same twice.
        """
        if behind and (yield question(_CLOCK)).rows[0][0] == timestamp:
            raise ConfigError(
                f"this session's clock was set by SET timestamp, {abs(behind)} seconds from the "
                "server's, and the record's times would follow it: SET timestamp = DEFAULT first"
            )

    def _check(self, database: str | None) -> None:
        # Names that differ in capitals alone may be one: that depends on the server's file system.
        own = self._database
        if own is not None and own.casefold() != (database or "").casefold():
            raise ConfigError(
                f"the connection is to the database {database}, the engine keeps its records in "
                f"{own}: open it with the URL of the database that the connection is to"
            )


RECORDS: Final[Mapping[str, Callable[[Any, str | None], Records]]] = {
    "sqlite": sqlite_records,
    "postgresql": postgres_records,
    "mysql": mysql_records,
}
"""What makes the records of a store, by the dialect of its database."""
