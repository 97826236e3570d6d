"""Brings the table to the version that this semel needs, once, however many processes start.

Data definition commits by itself here, so a step cannot be undone as a whole: a lock of the server
keeps the others out, and every step may run twice.
"""

from __future__ import annotations

from typing import Final

from semel.errors import StoreError, StoreUnavailable
from semel.stores.sql.migrations import (
    DEFAULT_TABLE,
    VERSIONS,
    Migration,
    read_migrations,
    still_to_run,
)
from semel.stores.sql.mysql.session import lock_wait
from semel.stores.sql.verbs import Statement, Verb

MIGRATIONS: Final = read_migrations("semel.stores.sql.mysql")

_LOCK: Final = f"CONCAT('{VERSIONS}:', SHA1(CONCAT(DATABASE(), '.', %s)))"
"""Locks are the whole server's: the name holds the database, and fits into 64 characters."""

_FIND_VERSIONS: Final = (
    "SELECT 1 FROM information_schema.tables "  # noqa: S608 - a constant
    f"WHERE table_schema = DATABASE() AND table_name = '{VERSIONS}'"
)
_READ_VERSION: Final = f"SELECT version FROM {VERSIONS} WHERE table_name = %s"  # noqa: S608 - a constant


def ensure(table: str, timeout: float, *, autocreate: bool) -> Verb[None]:
    """Check that the table is there; create it, or bring it up to date, if that may be done."""
    steps = still_to_run(MIGRATIONS, (yield from _version(table)), table)
    if steps and not autocreate:
        raise StoreError(
            f"the table {table} is missing or older than this version of semel: "
            "run `semel migrate`, or the SQL files that come with it"
        )
    if steps:
        yield from migrate(table, timeout)


def migrate(table: str, timeout: float) -> Verb[int]:
    """Run the steps that are still to run; returns how many there were.

    If a step fails the caller closes the connection, and the server takes the lock back.
    """
    locked = yield Statement(
        f"SELECT GET_LOCK({_LOCK}, %s)", (table, lock_wait(timeout)), writes=True
    )
    if locked.rows[0][0] != 1:
        raise StoreUnavailable(f"another process is migrating the table {table}, and takes long")
    steps = still_to_run(MIGRATIONS, (yield from _version(table)), table)
    for statement in statements(steps, table):
        yield Statement(statement, (), writes=True)
    yield Statement(f"SELECT RELEASE_LOCK({_LOCK})", (table,), writes=True)
    return len(steps)


def statements(steps: tuple[Migration, ...], table: str) -> list[str]:
    """Write the statements of some steps for a table."""
    return [text.replace(DEFAULT_TABLE, table) for step in steps for text in step.statements]


def _version(table: str) -> Verb[int | None]:
    # Looked for first: a user who may not see the table of versions has none, which is no error.
    found = yield Statement(_FIND_VERSIONS, (), writes=False)
    if not found.rows:
        return None
    reply = yield Statement(_READ_VERSION, (table,), writes=False)
    return int(reply.rows[0][0]) if reply.rows else None
