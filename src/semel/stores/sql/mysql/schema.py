"""Brings the table to the version that this semel needs, once, however many processes start.

Data definition commits by itself here, so a step cannot be undone as a whole: a lock of the server
keeps the others out, and every step may run twice. The verbs are generators, as everywhere. When
one fails its connection is closed, and the server takes the lock back.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from semel.errors import StoreUnavailable
from semel.stores.sql.mysql.addresses import lock_wait
from semel.stores.sql.mysql.statements import quoted
from semel.stores.sql.schema import (
    DEFAULT_TABLE,
    VERSIONS,
    Found,
    Migration,
    checked_name,
    not_created,
    read_migrations,
    still_to_run,
)
from semel.stores.sql.verbs import Statement, Verb

MIGRATIONS: Final = read_migrations("semel.stores.sql.mysql")

_LOCK: Final = f"CONCAT('{VERSIONS}:', SHA1(CONCAT(DATABASE(), '.', %s)))"
"""Locks are the whole server's: the name holds the database, and fits into 64 characters."""

_FIND_TABLE: Final = (
    "SELECT 1 FROM information_schema.tables WHERE table_schema = DATABASE() AND table_name = %s"
)
_FIND_COLUMN: Final = (
    "SELECT 1 FROM information_schema.columns "
    "WHERE table_schema = DATABASE() AND table_name = %s AND column_name = %s"
)
_READ_VERSION: Final = f"SELECT version FROM {VERSIONS} WHERE table_name = %s"  # noqa: S608 - a constant


class Schema:
    """One table of records, and how it is made."""

    def __init__(self, table: str, timeout: float, *, autocreate: bool) -> None:
        self._table = table
        self._lock_wait = lock_wait(timeout)
        self._autocreate = autocreate
        self.ensured = False
        """Whether the table was found, or made; all who share it need not look again."""

    def create_nothing(self) -> None:
        """From now on, raise ConfigError where the table would be created."""
        self._autocreate = False

    def ensure(self) -> Verb[None]:
        """Look whether the table is there, in the newest version; make it so, if that is wanted."""
        found = yield from self._found()
        found.check(self._table)
        if still_to_run(MIGRATIONS, found.version, self._table):
            if not self._autocreate:
                raise not_created(self._table, found, "semel/stores/sql/mysql/ddl")
            yield from self.migrate({})
        self.ensured = True

    def migrate(self, columns: Mapping[str, str]) -> Verb[int]:
        """Run what is missing and return the version; `columns` are added with their types."""
        locked = yield _ask(f"SELECT GET_LOCK({_LOCK}, %s)", self._table, self._lock_wait)
        if locked.rows != [(1,)]:
            raise StoreUnavailable(f"another program is migrating {self._table}, and takes long")
        found = yield from self._found()
        version = None if found.gone else found.version
        for text in self._written(still_to_run(MIGRATIONS, version, self._table)):
            yield Statement(text, (), writes=True)
        for name, kind in columns.items():
            there = yield _ask(_FIND_COLUMN, self._table, checked_name("column", name))
            if not there.rows:
                change = f"ALTER TABLE {quoted(self._table)} ADD COLUMN {quoted(name)} {kind}"
                yield Statement(change, (), writes=True)
        yield _ask(f"SELECT RELEASE_LOCK({_LOCK})", self._table)
        return MIGRATIONS[-1].version

    def script(self) -> str:
        """Write everything that `migrate` runs, for a person to read and run."""
        return "".join(f"{text};\n\n" for text in self._written(MIGRATIONS))

    def _written(self, steps: tuple[Migration, ...]) -> list[str]:
        return [
            text.replace(DEFAULT_TABLE, self._table) for step in steps for text in step.statements
        ]

    def _found(self) -> Verb[Found]:
        version = None
        reply = yield _ask(_FIND_TABLE, VERSIONS)
        if reply.rows:
            reply = yield _ask(_READ_VERSION, self._table)
            version = int(reply.rows[0][0]) if reply.rows else None
        # Last: somebody who makes the table meanwhile must not look like one who dropped it.
        reply = yield _ask(_FIND_TABLE, self._table)
        return Found(version, exists=bool(reply.rows))


def _ask(sql: str, *parameters: object) -> Statement:
    return Statement(sql, parameters, writes=False)
