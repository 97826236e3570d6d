"""The SQL of SQLite: the table, its indexes, and what each verb sends.

This module writes SQL. It runs none. The rules are those of `judge`: inside a transaction no other
call writes, so a verb reads the record, has it judged and writes it. Two verbs need one statement
in the plain case: a claim inserts where there is no row, a complete updates what its owner runs.
Many of these share a statement: SQLite works on it without Python's lock, so that the event loop
goes on meanwhile. With a statement for each, the lock is fought for at every one of them.
"""

from __future__ import annotations

import hashlib
import re
import sqlite3
from collections.abc import Callable, Sequence
from functools import partial
from inspect import cleandoc
from itertools import chain
from typing import Any, Final, TypeVar

from msgspec.structs import replace

from semel.core import judge
from semel.core.observers import Log
from semel.core.records import (
    AUDIT_SCOPE,
    Abandoned,
    Busy,
    Claim,
    ClaimRequest,
    CompleteRequest,
    ForgetRequest,
    Identity,
    Record,
    State,
)
from semel.errors import ConfigError, RecordUnreadable, StoreError
from semel.stores.base import CountRequest, Counts, Page, PurgeRequest, ScanRequest, StuckRequest
from semel.stores.batching import ALONE, Alone
from semel.stores.sql.rows import (
    COLUMNS,
    ENTRIES_PURGED,
    FORMAT,
    MICROSECONDS,
    Row,
    behind,
    listed,
    page_of,
    seconds,
    stamp,
    stamp_or_none,
    to_record,
    to_row,
)
from semel.stores.sql.schema import VERSIONS
from semel.stores.sql.verbs import Operation, Statement, Verb
from semel.stores.urls import position, whole_number


def create(table: str) -> tuple[str, ...]:
    """Make the table and its indexes."""
    quoted = f'"{table}"'  # it may be a word of SQL
    # A table with rowids: results live outside the tree of digests, which stays small. With
    # WITHOUT ROWID and 4 KB results, claim + complete runs at 0.4 of this speed.
    return (
        f"""
        CREATE TABLE {quoted} (
            identity BLOB PRIMARY KEY NOT NULL,
            prefix TEXT NOT NULL,
            idem_key TEXT NOT NULL,
            biz_type TEXT NOT NULL,
            payload_hash BLOB,
            status INTEGER NOT NULL,
            result_payload BLOB,
            expire_at INTEGER,
            created_at INTEGER NOT NULL,
            updated_at INTEGER NOT NULL,
            codec TEXT,
            retryable INTEGER NOT NULL,
            owner BLOB NOT NULL,
            number INTEGER NOT NULL,
            fence INTEGER NOT NULL,
            hold INTEGER NOT NULL,
            lease_until INTEGER,
            superseded BLOB,
            format INTEGER NOT NULL
        )
        """,
        f"CREATE UNIQUE INDEX {table}_key ON {quoted} (idem_key, biz_type, prefix)",
        f"CREATE INDEX {table}_lease ON {quoted} (prefix, lease_until) WHERE status = 0",
        f"CREATE INDEX {table}_expiry ON {quoted} (prefix, expire_at) WHERE expire_at IS NOT NULL",
    )


def insert(table: str, rows: int) -> str:
    """Insert first claims, where there is no row. What they all have in common is in the text."""
    return (
        f"INSERT INTO {table} (identity, prefix, idem_key, biz_type, payload_hash, created_at, "  # noqa: S608 - names from this module
        "updated_at, owner, fence, hold, lease_until, result_payload, "
        "status, number, retryable, format) VALUES "
        + ", ".join([f"({'?, ' * 12}{int(State.PROCESSING)}, 1, 0, {FORMAT})"] * rows)
        + " ON CONFLICT (identity) DO NOTHING"
    )


def complete(table: str) -> str:
    """Store the success of a running owner."""
    return (
        f"UPDATE {table} SET status = {int(State.SUCCEEDED)}, result_payload = ?, codec = ?, "  # noqa: S608 - names from this module
        "lease_until = NULL, expire_at = ?, updated_at = ? "
        f"WHERE identity = ? AND owner = ? AND status = {int(State.PROCESSING)}"
    )


def complete_many(table: str, rows: int) -> str:
    """`complete`, with the same parameters for each."""
    # "+": by the index of what runs, it would read all that does, for each batch. SQLite takes it
    # if somebody has had statistics made (ANALYZE, PRAGMA optimize) while little ran.
    return (
        f"UPDATE {table} SET status = {int(State.SUCCEEDED)}, result_payload = v.column1, "  # noqa: S608 - names from this module
        "codec = v.column2, lease_until = NULL, expire_at = v.column3, updated_at = v.column4 "
        f"FROM (VALUES {_placeholders(rows, 6)}) AS v WHERE identity = v.column5 "
        f"AND owner = v.column6 AND +status = {int(State.PROCESSING)}"
    )


def whose(table: str, rows: int) -> str:
    """Read who owns the rows that are running for the first time, by which claim."""
    return (
        f"SELECT +biz_type, +idem_key, +owner, +fence FROM {table} "  # noqa: S608 - names from this module
        f"WHERE identity IN {_placeholders(1, rows)} "
        f"AND status = {int(State.PROCESSING)} AND number = 1"
    )


def upsert(table: str) -> str:
    """Insert or overwrite a whole row."""
    kept = {"idem_key", "biz_type"}
    changes = ", ".join(f"{name} = excluded.{name}" for name in COLUMNS if name not in kept)
    names = ("identity", "prefix", *COLUMNS)
    return (
        f"INSERT INTO {table} ({', '.join(names)}) VALUES {_placeholders(1, len(names))} "  # noqa: S608 - names from this module
        f"ON CONFLICT (identity) DO UPDATE SET {changes}"
    )


def _placeholders(rows: int, columns: int) -> str:
    row = ", ".join("?" * columns)
    return ", ".join([f"({row})"] * rows)


# --- the statements of one table ----------------------------------------------------------

SCHEMA_VERSION = 1
"""Noted for each table in `VERSIONS`: `user_version` is one number for a whole file."""

SIZES: Final = (64, 32, 16, 8, 4, 2)
"""Rows in one statement. Few sizes, because each is a text that SQLite has to prepare once."""

NOTE = "clock set back, seen at "
"""Begins the note in `codec` of a running record; microseconds follow."""

_CODEC = COLUMNS.index("codec")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,62}")
# "+": as expressions, they have no declared type, for which an application may have converters.
_LIST = ", ".join(f"+{name}" for name in COLUMNS)

FIND_VERSIONS = f"SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = '{VERSIONS}'"  # noqa: S608 - a constant
FIND_TABLE = "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = ?"
LIST_COLUMNS = "SELECT name FROM pragma_table_info(?)"
MAIN_FILE = "SELECT file FROM pragma_database_list WHERE name = 'main'"
READ_VERSION = f"SELECT +version FROM {VERSIONS} WHERE table_name = ?"  # noqa: S608 - the same
WRITE_VERSION = f"INSERT INTO {VERSIONS} (table_name, version) VALUES (?, ?)"  # noqa: S608 - the same
CREATE_VERSIONS = f"""
CREATE TABLE IF NOT EXISTS {VERSIONS} (
    table_name TEXT PRIMARY KEY NOT NULL,
    version INTEGER NOT NULL
)
"""


class SQLiteTable:
    """One table of records, seen by the store of one prefix."""

    def __init__(self, name: str, prefix: str, clock: Callable[[], float]) -> None:
        if not _NAME.fullmatch(name) or name.lower().startswith("sqlite_") or name == VERSIONS:
            raise ConfigError(
                f"a table name is made of letters, digits and _ (at most 63), not {name!r}"
            )
        self.name = name
        self.quoted = f'"{name}"'
        """The name as it stands in statements."""
        self.autocreate = True
        """Whether opening the file creates the table."""
        self.prefix = prefix
        self._salt = f"{len(prefix)}:{prefix}:".encode()
        self.clock = clock
        self.create = create(name)
        self._read = f"SELECT {_LIST} FROM {self.quoted} WHERE identity = ?"  # noqa: S608 - checked above
        self._save = upsert(self.quoted)
        self._insert = {size: insert(self.quoted, size) for size in (1, *SIZES)}
        self._complete = complete(self.quoted)
        self._complete_many = {size: complete_many(self.quoted, size) for size in SIZES}
        self._whose = {size: whose(self.quoted, size) for size in SIZES}
        self._note = f"UPDATE {self.quoted} SET codec = ? WHERE identity = ?"  # noqa: S608 - checked above
        self._delete = f"DELETE FROM {self.quoted} WHERE identity = ?"  # noqa: S608 - checked above

    def made(self) -> Verb[int]:
        """Make the table if it is gone (opening the file has made a new one), and give its version.

        Only if it is asked for: an empty table has forgotten every record.
        """
        found = yield Statement(FIND_TABLE, (self.name,), writes=False)
        if not found.rows:
            for text in self.create:
                yield Statement(text, (), writes=True)
        reply = yield Statement(READ_VERSION, (self.name,), writes=False)
        return int(reply.rows[0][0])

    def script(self) -> str:
        """Write what makes the table in an empty file, for a person to read and run."""
        noted = WRITE_VERSION.replace("?, ?", f"'{self.name}', {SCHEMA_VERSION}")
        return "".join(f"{cleandoc(text)};\n\n" for text in (CREATE_VERSIONS, *self.create, noted))

    # A clock that was set back: the lease of a record that was written "in the future" would last
    # until the clock is there again. It ends when its own length has passed since somebody noticed.
    # When that was is noted in the column `codec`, which a running record has no use for: whatever
    # writes the record, a renewal above all, removes the note. The times themselves stay as they
    # are, so that a clock that is set right again finds what it left.

    def read(self, identity: Identity) -> Verb[tuple[Record | None, float, bool]]:
        """Read the record and the time, and whether to note that the clock is behind the record."""
        reply = yield Statement(self._read, (self.digest(identity),), writes=False)
        now = self.now()
        if not reply.rows:
            return None, now, False
        record = to_record(reply.rows[0], now)
        if record.identity != identity:
            raise StoreError("the digest of this key is taken by another key")
        if record.updated_at <= now or record.lease_until is None:
            return record, now, False
        since = _noted(reply.rows[0][_CODEC], now)
        ends = (now if since is None else since) + (record.lease_until - record.updated_at)
        return replace(record, lease_until=ends), now, since is None

    def note(self, identity: Identity, now: float) -> Statement:
        """Note that the clock was seen to be behind this running record."""
        return Statement(self._note, (f"{NOTE}{stamp(now)}", self.digest(identity)), writes=True)

    def save(self, record: Record) -> Statement:
        """Insert or overwrite the record."""
        row = (self.digest(record.identity), self.prefix, *to_row(record))
        return Statement(self._save, row, writes=True)

    def insert(self, records: Sequence[Record]) -> Statement:
        """Insert those of the records, each of a first claim, that have no row."""
        rows = chain.from_iterable([self._claimed(record) for record in records])
        return Statement(self._insert[len(records)], tuple(rows), writes=True)

    def complete(self, ask: CompleteRequest) -> Statement:
        """Store the success of a running owner."""
        return Statement(self._complete, self._success(ask, self.now()), writes=True)

    def complete_many(self, asks: Sequence[CompleteRequest]) -> Statement:
        """Store the successes of those owners that are running."""
        now = self.now()
        rows = chain.from_iterable([self._success(ask, now) for ask in asks])
        return Statement(self._complete_many[len(asks)], tuple(rows), writes=True)

    def whose(self, records: Sequence[Record]) -> Statement:
        """Read who owns the rows of these records, by which claim."""
        digests = tuple(self.digest(record.identity) for record in records)
        return Statement(self._whose[len(records)], digests, writes=False)

    # The rows of every call. sqlite3 asks for an adapter of whatever is no plain number, text or
    # bytearray, which takes it longer than the rest of the parameter.

    def _claimed(self, record: Record) -> Row:
        identity, since = record.identity, stamp(record.created_at)
        return (
            *(self.digest(identity), self.prefix, identity.key, identity.scope),
            *(record.fingerprint, since, since, bytearray(record.owner), record.fence),
            *(int(record.hold), stamp_or_none(record.lease_until), bytearray(record.run_info)),
        )

    def _success(self, ask: CompleteRequest, now: float) -> Row:
        result, identity = ask.result, self.digest(ask.identity)
        return (
            *(result.data, result.codec, stamp(now + ask.ttl), stamp(now)),
            *(identity, bytearray(ask.owner)),
        )

    def delete(self, identity: Identity) -> Statement:
        """Remove the record."""
        return Statement(self._delete, (self.digest(identity),), writes=True)

    def now(self) -> float:
        """Read the store's time."""
        # Cut to what the table can hold: a lease that ends "now" must read back as ended.
        return seconds(int(self.clock() * MICROSECONDS))

    def digest(self, identity: Identity) -> bytearray:
        """Return the primary key of an identity under this prefix."""
        return bytearray(hashlib.sha256(self._salt + identity.encoded).digest()[:16])


def _noted(codec: str | None, now: float) -> float | None:
    """When the clock was first seen to be behind a record, unless it was set back once more."""
    if codec is None:
        return None
    since = seconds(int(codec.removeprefix(NOTE)))
    return since if since <= now else None


# --- the verbs ----------------------------------------------------------------------------

log = Log(__name__)

UPDATES_MANY: Final = (3, 33)
"""The version of SQLite that learned to update from a list of values."""

T = TypeVar("T")
A = TypeVar("A")

LARGE: Final = 16_384
"""Bytes of a result that has a statement of its own: a list is copied before it is worked on."""


class SQLiteOperation(Operation[T], frozen=True, gc=False):
    """An operation that may do without a transaction, or share a statement with others."""

    look: Callable[[], Verb[T]] | None = None
    """What to try without a transaction: it often, or always, ends without writing."""
    ask: ClaimRequest | CompleteRequest | None = None
    """What is asked for; set where many of a kind can be carried out by one statement."""
    batch: Callable[[Sequence[Any]], Verb[list[T | Alone]]] | None = None
    """Carries out many; it gets what each of them asks. No two are about the same identity."""


def _reads(verb: Callable[[Any, A], Verb[T]]) -> Callable[[Any, A], SQLiteOperation[T]]:
    """Turn a verb that writes nothing into a function that returns its operation."""

    def prepare(verbs: Any, ask: A) -> SQLiteOperation[T]:
        start = partial(verb, verbs, ask)
        return SQLiteOperation(start, look=start)

    return prepare


class SQLiteVerbs:
    """The verbs of the store SPI on one table; each runs in a transaction if it writes.

    The clock is the machine's and may be set back.
    """

    def __init__(self, table: SQLiteTable) -> None:
        self._table = table
        self._shares = sqlite3.sqlite_version_info >= UPDATES_MANY

    def claim(self, ask: ClaimRequest) -> SQLiteOperation[Claim]:
        """Ask to run the operation."""
        return SQLiteOperation(
            partial(self._insert_first, ask),
            # Without a transaction it is only looked for: a replay needs no write lock.
            look=partial(self._claim, ask),
            ask=ask,
            batch=self._insert_all if self._shares else None,
        )

    def complete(self, ask: CompleteRequest) -> SQLiteOperation[bool]:
        """Store the owner's success."""
        shares = self._shares and len(ask.result.data) < LARGE
        return SQLiteOperation(
            partial(self._update_first, ask),
            ask=ask,
            batch=self._update_all if shares else None,
        )

    def renew(self, ask: Any) -> SQLiteOperation[Any]:
        """Carry out a request about one record that mostly writes."""
        return SQLiteOperation(partial(self._judge, ask))

    fail = touch = adopt = forget = renew

    def get(self, ask: Any) -> SQLiteOperation[Any]:
        """Carry out a request about one record that mostly, or always, finds nothing to write."""
        start = partial(self._judge, ask)
        return SQLiteOperation(start, look=start)

    put = get

    @_reads
    def scan(self, ask: ScanRequest) -> Verb[Page]:
        """List records in the order of the unique index, so that no page sorts or skips."""
        whole_number("limit", ask.limit)
        now = self._table.now()
        where = ["prefix = ?", "idem_key >= ?", "(expire_at IS NULL OR expire_at > ?)"]
        values: list[object] = [self._table.prefix, ask.prefix, stamp(now)]
        for condition, value in (
            ("idem_key < ?", behind(ask.prefix)),
            ("biz_type = ?", ask.scope),
            ("biz_type <> ?", AUDIT_SCOPE if ask.scope is None else None),
            ("status = ?", None if ask.state is None else int(ask.state)),
        ):
            if value is not None:
                where.append(condition)
                values.append(value)
        if ask.cursor is not None:
            where.append("(idem_key, biz_type) > (?, ?)")
            values.extend(position(ask.cursor))
        reply = yield Statement(
            f"SELECT {_LIST} FROM {self._table.quoted} WHERE {' AND '.join(where)} "  # noqa: S608 - constants
            "ORDER BY idem_key, biz_type LIMIT ?",
            (*values, ask.limit + 1),
            writes=False,
        )
        return page_of([(*row, stamp(now)) for row in reply.rows], ask.limit)

    @_reads
    def stuck(self, ask: StuckRequest) -> Verb[list[Record]]:
        """Read the index of leases from its old end."""
        now = self._table.now()
        reply = yield Statement(
            f"SELECT {_LIST} FROM {self._table.quoted} "  # noqa: S608 - a checked name
            "WHERE status = 0 AND prefix = ? AND lease_until <= ? ORDER BY lease_until LIMIT ?",
            (self._table.prefix, stamp(now - ask.older_than), ask.limit),
            writes=False,
        )
        return listed((*row, stamp(now)) for row in reply.rows)

    def purge(self, ask: PurgeRequest) -> SQLiteOperation[int]:
        """Remove what has expired."""
        return SQLiteOperation(partial(self._purge, ask))

    def _purge(self, ask: PurgeRequest) -> Verb[int]:
        """Delete along the indexes, in one small batch."""
        now, prefix, table = self._table.now(), self._table.prefix, self._table.quoted
        # By rowid, which each index holds: the record is looked up once, where it is deleted.
        expired = f"SELECT rowid FROM {table} WHERE expire_at <= ? AND prefix = ?"  # noqa: S608 - a checked name
        may_go = expired
        values: list[object] = [stamp(now), prefix]
        if ask.abandoned_after is not None:
            may_go += (
                f" UNION ALL SELECT rowid FROM {table} "  # noqa: S608 - a checked name
                "WHERE status = 0 AND hold = 0 AND prefix = ? AND lease_until <= ?"
            )
            values.extend((prefix, stamp(now - ask.abandoned_after)))
        # The scope is compared outside: it is not in the indexes.
        records = f"DELETE FROM {table} WHERE rowid IN ({may_go} LIMIT ?) AND biz_type <> ?"  # noqa: S608 - a checked name
        entries = f"DELETE FROM {table} WHERE rowid IN ({expired} LIMIT ?) AND biz_type = ?"  # noqa: S608 - a checked name
        removed = 0
        while removed < ask.limit:
            wanted = ask.limit - removed
            reply = yield Statement(records, (*values, wanted, AUDIT_SCOPE), writes=True)
            removed += reply.changed
            if reply.changed < wanted:  # that was all, unless entries stand before the others
                reply = yield Statement(
                    entries, (*values[:2], ENTRIES_PURGED, AUDIT_SCOPE), writes=True
                )
                if not reply.changed:
                    break
        return removed

    @_reads
    def counts(self, _: CountRequest) -> Verb[Counts]:
        """Count what has not expired."""
        now = stamp(self._table.now())
        reply = yield Statement(
            "SELECT count(CASE WHEN status = 0 AND lease_until > ? THEN 1 END), "  # noqa: S608 - a checked name
            "count(CASE WHEN status = 0 AND lease_until <= ? THEN 1 END), "
            "count(CASE WHEN status = 1 THEN 1 END), count(CASE WHEN status = 2 THEN 1 END) "
            f"FROM {self._table.quoted} WHERE prefix = ? AND (expire_at IS NULL OR expire_at > ?) "
            "AND biz_type <> ?",
            (now, now, self._table.prefix, now, AUDIT_SCOPE),
            writes=False,
        )
        return Counts(*reply.rows[0])

    def _claim(self, ask: ClaimRequest) -> Verb[Claim]:
        """Read, judge and write a claim; note that the clock is behind a running record."""
        stored, now, to_note = yield from self._table.read(ask.identity)
        answer, record = judge.claim(stored, ask, now)
        if record is not None:
            yield self._table.save(record)
        elif isinstance(answer, Busy) and to_note:
            yield self._table.note(ask.identity, now)
            log.warning(
                "this machine's clock was set back: a running record was written in the "
                "future; its lease ends in %.1f s, counted from now, unless it is renewed",
                answer.retry_after,
            )
        elif isinstance(answer, Abandoned) and stored is not None and stored.updated_at > now:
            # Written as it is seen: a resolver looks for leases that have ended.
            yield self._table.save(replace(stored, updated_at=now))
        return answer

    def _judge(self, ask: Any) -> Verb[Any]:
        """Read, judge and write any request about one record."""
        try:
            stored, now, _ = yield from self._table.read(ask.identity)
        except RecordUnreadable:
            if not isinstance(ask, ForgetRequest):
                raise
            yield self._table.delete(ask.identity)  # the way out of a damaged record
            return True
        answer, record = judge.answer(stored, ask, now)
        if record is None and stored is not None:
            yield self._table.delete(ask.identity)
        elif record is not None and record is not stored:
            yield self._table.save(record)
        return answer

    def _insert_first(self, ask: ClaimRequest) -> Verb[Claim]:
        answer, record = judge.first_claim(ask, self._table.now())
        reply = yield self._table.insert([record])
        if reply.changed:
            return answer
        return (yield from self._claim(ask))

    def _update_first(self, ask: CompleteRequest) -> Verb[bool]:
        reply = yield self._table.complete(ask)
        return reply.changed > 0 or (yield from self._judge(ask))

    def _insert_all(self, asks: Sequence[ClaimRequest]) -> Verb[list[Claim | Alone]]:
        now = self._table.now()
        answers, records = zip(*(judge.first_claim(ask, now) for ask in asks), strict=True)
        reply = yield self._table.insert(records)
        if reply.changed == len(asks):
            return list(answers)
        reply = yield self._table.whose(records)
        inserted = set(reply.rows)
        return [
            answer if _owned(record) in inserted else ALONE
            for answer, record in zip(answers, records, strict=True)
        ]

    def _update_all(self, asks: Sequence[CompleteRequest]) -> Verb[list[bool | Alone]]:
        reply = yield self._table.complete_many(asks)
        # An owner whose update was made gets that answer again, alone.
        return [True if reply.changed == len(asks) else ALONE] * len(asks)


def _owned(record: Record) -> tuple[str, str, bytes, int]:
    return record.identity.scope, record.identity.key, record.owner, record.fence
