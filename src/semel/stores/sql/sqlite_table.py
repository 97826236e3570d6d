"""The statements of SQLite: the table, its indexes, and every query the verbs send.

This module writes SQL. It runs none.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from inspect import cleandoc

from semel.core.records import CompleteRequest, Identity, Record, State
from semel.errors import ConfigError, StoreError
from semel.stores.base import Counts, Page
from semel.stores.paging import position
from semel.stores.sql.listed import listed, page_of
from semel.stores.sql.ranges import behind
from semel.stores.sql.rows import COLUMNS, MICROSECONDS, Row, seconds, stamp, to_record, to_row
from semel.stores.sql.verbs import Statement, Verb
from semel.stores.urls import whole_number

DEFAULT_TABLE = "idempotent_record"

SCHEMA_VERSION = 1

VERSIONS = "semel_schema"
"""Remembers the schema version of each table: `user_version` is one number for a whole file."""

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,62}")
_LIST = ", ".join(COLUMNS)

FIND_VERSIONS = f"SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = '{VERSIONS}'"  # noqa: S608 - a constant
READ_VERSION = f"SELECT version FROM {VERSIONS} WHERE table_name = ?"  # noqa: S608 - the same
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
        self._prefix = prefix
        self._salt = f"{len(prefix)}:{prefix}:".encode()
        self._clock = clock
        self.create = _create(name)
        self._read = f"SELECT {_LIST} FROM {name} WHERE identity = ?"  # noqa: S608 - checked above
        self._save = _upsert(name)
        self._insert = _insert(name)
        self._complete = (
            f"UPDATE {name} SET status = {int(State.SUCCEEDED)}, result_payload = ?, codec = ?, "  # noqa: S608 - checked above
            "lease_until = NULL, expire_at = ?, updated_at = ? "
            f"WHERE identity = ? AND owner = ? AND status = {int(State.PROCESSING)}"
        )
        self._delete = f"DELETE FROM {name} WHERE identity = ?"  # noqa: S608 - checked above

    def version(self) -> Verb[int]:
        """Read the version of the table, which opening the file has made."""
        reply = yield Statement(READ_VERSION, (self.name,), writes=False)
        return int(reply.rows[0][0])

    def script(self) -> str:
        """Write what makes the table in an empty file, for a person to read and run."""
        noted = WRITE_VERSION.replace("?, ?", f"'{self.name}', {SCHEMA_VERSION}")
        return "".join(f"{cleandoc(text)};\n\n" for text in (CREATE_VERSIONS, *self.create, noted))

    def read(self, identity: Identity) -> Verb[tuple[Record | None, float]]:
        """Read the record as stored, and the store's time once the answer is there."""
        reply = yield Statement(self._read, (self._digest(identity),), writes=False)
        now = self.now()
        if not reply.rows:
            return None, now
        record = to_record(reply.rows[0], now)
        if record.identity != identity:
            raise StoreError("the digest of this key is taken by another key")
        return record, now

    def save(self, record: Record) -> Verb[None]:
        """Insert or overwrite the record."""
        yield Statement(self._save, self._row(record), writes=True)

    def insert(self, record: Record) -> Statement:
        """Insert the record, unless there is a row."""
        return Statement(self._insert, self._row(record), writes=True)

    def complete(self, ask: CompleteRequest) -> Statement:
        """Store the success of a running owner."""
        now = self.now()
        return Statement(
            self._complete,
            (
                *(ask.result.data, ask.result.codec, stamp(now + ask.ttl), stamp(now)),
                *(self._digest(ask.identity), ask.owner),
            ),
            writes=True,
        )

    def _row(self, record: Record) -> Row:
        return (self._digest(record.identity), self._prefix, *to_row(record))

    def delete(self, identity: Identity) -> Verb[None]:
        """Remove the record."""
        yield Statement(self._delete, (self._digest(identity),), writes=True)

    def page(
        self, scope: str | None, prefix: str, state: State | None, limit: int, cursor: str | None
    ) -> Verb[Page]:
        """List records in the order of the unique index, so that no page sorts or skips."""
        whole_number("limit", limit)
        now = self.now()
        where = ["prefix = ?", "idem_key >= ?", "(expire_at IS NULL OR expire_at > ?)"]
        values: list[object] = [self._prefix, prefix, stamp(now)]
        end = behind(prefix)
        for condition, value in (
            ("idem_key < ?", end),
            ("biz_type = ?", scope),
            ("status = ?", None if state is None else int(state)),
        ):
            if value is not None:
                where.append(condition)
                values.append(value)
        if cursor is not None:
            where.append("(idem_key, biz_type) > (?, ?)")
            values.extend(position(cursor))
        reply = yield Statement(
            f"SELECT {_LIST} FROM {self.name} WHERE {' AND '.join(where)} "  # noqa: S608 - constants
            "ORDER BY idem_key, biz_type LIMIT ?",
            (*values, limit + 1),
            writes=False,
        )
        return page_of([(*row, stamp(now)) for row in reply.rows], limit)

    def stuck(self, older_than: float, limit: int) -> Verb[list[Record]]:
        """Read the index of leases from its old end."""
        now = self.now()
        reply = yield Statement(
            f"SELECT {_LIST} FROM {self.name} "  # noqa: S608 - checked above
            "WHERE status = 0 AND prefix = ? AND lease_until <= ? ORDER BY lease_until LIMIT ?",
            (self._prefix, stamp(now - older_than), limit),
            writes=False,
        )
        return listed((*row, stamp(now)) for row in reply.rows)

    def purge(self, limit: int, abandoned_after: float | None) -> Verb[int]:
        """Delete along the indexes, in one small batch."""
        now = self.now()
        # By rowid, which each index holds: the record is looked up once, where it is deleted.
        may_go = f"SELECT rowid FROM {self.name} WHERE expire_at <= ? AND prefix = ?"  # noqa: S608 - checked above
        values: list[object] = [stamp(now), self._prefix]
        if abandoned_after is not None:
            may_go += (
                f" UNION ALL SELECT rowid FROM {self.name} "  # noqa: S608 - checked above
                "WHERE status = 0 AND hold = 0 AND prefix = ? AND lease_until <= ?"
            )
            values.extend((self._prefix, stamp(now - abandoned_after)))
        reply = yield Statement(
            f"DELETE FROM {self.name} WHERE rowid IN ({may_go} LIMIT ?)",  # noqa: S608 - checked above
            (*values, limit),
            writes=True,
        )
        return reply.changed

    def counts(self) -> Verb[Counts]:
        """Count what has not expired."""
        now = stamp(self.now())
        reply = yield Statement(
            "SELECT count(CASE WHEN status = 0 AND lease_until > ? THEN 1 END), "  # noqa: S608 - as above
            "count(CASE WHEN status = 0 AND lease_until <= ? THEN 1 END), "
            "count(CASE WHEN status = 1 THEN 1 END), count(CASE WHEN status = 2 THEN 1 END) "
            f"FROM {self.name} WHERE prefix = ? AND (expire_at IS NULL OR expire_at > ?)",
            (now, now, self._prefix, now),
            writes=False,
        )
        return Counts(*reply.rows[0])

    def now(self) -> float:
        """Read the store's time."""
        # Cut to what the table can hold: a lease that ends "now" must read back as ended.
        return seconds(int(self._clock() * MICROSECONDS))

    def _digest(self, identity: Identity) -> bytes:
        return hashlib.sha256(self._salt + identity.encoded).digest()[:16]


def _create(table: str) -> tuple[str, ...]:
    # A table with rowids: results live outside the tree of digests, which stays small. With
    # WITHOUT ROWID and 4 KB results, claim + complete runs at 0.4 of this speed.
    return (
        f"""
        CREATE TABLE {table} (
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
        f"CREATE UNIQUE INDEX {table}_key ON {table} (idem_key, biz_type, prefix)",
        f"CREATE INDEX {table}_lease ON {table} (prefix, lease_until) WHERE status = 0",
        f"CREATE INDEX {table}_expiry ON {table} (prefix, expire_at) WHERE expire_at IS NOT NULL",
    )


def _insert(table: str) -> str:
    return _new_row(table) + "ON CONFLICT (identity) DO NOTHING"


def _upsert(table: str) -> str:
    kept = {"idem_key", "biz_type"}
    changes = ", ".join(f"{name} = excluded.{name}" for name in COLUMNS if name not in kept)
    return _new_row(table) + f"ON CONFLICT (identity) DO UPDATE SET {changes}"


def _new_row(table: str) -> str:
    names = ("identity", "prefix", *COLUMNS)
    return f"INSERT INTO {table} ({', '.join(names)}) VALUES ({', '.join('?' * len(names))}) "  # noqa: S608 - names from this module
