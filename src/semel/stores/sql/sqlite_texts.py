"""The texts of SQLite's statements, for a table whose name has been checked.

All but `create` take it quoted.
"""

from __future__ import annotations

from semel.core.records import State
from semel.stores.sql.rows import COLUMNS, FORMAT


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
        "updated_at, owner, fence, hold, lease_until, status, number, retryable, format) VALUES "
        + ", ".join([f"({'?, ' * 11}{int(State.PROCESSING)}, 1, 0, {FORMAT})"] * rows)
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
        f"FROM (VALUES {_places(rows, 6)}) AS v WHERE identity = v.column5 "
        f"AND owner = v.column6 AND +status = {int(State.PROCESSING)}"
    )


def whose(table: str, rows: int) -> str:
    """Read who owns the rows that are running for the first time, by which claim."""
    return (
        f"SELECT biz_type, idem_key, owner, fence FROM {table} "  # noqa: S608 - names from this module
        f"WHERE identity IN {_places(1, rows)} AND status = {int(State.PROCESSING)} AND number = 1"
    )


def upsert(table: str) -> str:
    """Insert or overwrite a whole row."""
    kept = {"idem_key", "biz_type"}
    changes = ", ".join(f"{name} = excluded.{name}" for name in COLUMNS if name not in kept)
    names = ("identity", "prefix", *COLUMNS)
    return (
        f"INSERT INTO {table} ({', '.join(names)}) VALUES {_places(1, len(names))} "  # noqa: S608 - names from this module
        f"ON CONFLICT (identity) DO UPDATE SET {changes}"
    )


def _places(rows: int, columns: int) -> str:
    row = ", ".join("?" * columns)
    return ", ".join([f"({row})"] * rows)
