"""Makes sure that the table is there, in the version this program knows.

The verbs are generators, as everywhere. `check` looks; `migrate` must run in a transaction: an
advisory lock lets one program after the other in, and the second one finds the work done.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from semel.errors import ConfigError
from semel.stores.sql.postgres.verbs import OURS
from semel.stores.sql.schema import (
    DEFAULT_TABLE,
    VERSIONS,
    Found,
    Migration,
    checked_name,
    not_created,
    not_ours,
    read_migrations,
    still_to_run,
)
from semel.stores.sql.verbs import OwnColumns, Statement, Verb
from semel.stores.urls import boolean, whole_number

LOCK: Final = int.from_bytes(b"semel", "big")
"""The advisory lock that migrations take, for all tables of a database."""

MIGRATIONS: Final = read_migrations("semel.stores.sql.postgres")

READ_COMMITTED: Final = Statement(
    "SET TRANSACTION ISOLATION LEVEL READ COMMITTED", (), writes=False
)
"""Under stricter levels a transaction that waited for another does not see what that one did."""

_EXISTS: Final = "SELECT EXISTS (SELECT FROM pg_catalog.pg_class WHERE oid = to_regclass($1))"
"""Not `to_regclass` alone: it remembers that there was no table, until a table is read or changed,
and so would miss what another program made while this one waited for the lock."""

_COLUMNS: Final = (
    "SELECT attname::text FROM pg_catalog.pg_attribute "
    "WHERE attrelid = to_regclass($1) AND attnum > 0 AND NOT attisdropped"
)

_WORD = re.compile(rf"('?)\b{DEFAULT_TABLE}(\b|_)")
_SWITCHED_OFF = re.compile(r"/\*(.*?)\*/")


class Schema:
    """One table of records: its name, its place, and how it is made."""

    def __init__(
        self, table: str, schema: str | None, *, partitions: int | None, autocreate: bool
    ) -> None:
        self._table = checked_name("table", table)
        if table == VERSIONS:
            raise ConfigError(f"{VERSIONS} is the table that remembers versions; take another name")
        self._schema = None if schema is None else checked_name("schema", schema)
        self._partitions = partitions
        self._autocreate = autocreate
        self.ensured = False
        """Whether the table was found, or made; all who share it need not look again."""

    def create_nothing(self) -> None:
        """From now on, raise ConfigError where the table would be created."""
        self._autocreate = False

    @property
    def table(self) -> str:
        """The name of the table, as it stands in statements."""
        return self._qualified(self._table)

    def beside(self, table: str) -> str:
        """Name another table of the same schema, as it stands in statements."""
        return Schema(table, self._schema, partitions=None, autocreate=False).table

    def check(self) -> Verb[bool]:
        """Look whether the table is there, in the newest version; newer ones are refused."""
        found = yield from self._found()
        found.check(self.table)
        missing = still_to_run(MIGRATIONS, found.version, self._table)
        if missing and not self._autocreate:
            raise not_created(self.table, found, "semel/stores/sql/postgres/ddl")
        return not missing

    def migrate(self, columns: Mapping[str, str]) -> Verb[int]:
        """Run what is missing and return the version; `columns` are added with their types."""
        yield _ask("SELECT pg_advisory_xact_lock($1::bigint)", LOCK)
        if self._schema is not None:
            # Asked first: without it, who may not create schemas could not even use this one.
            reply = yield _ask("SELECT to_regnamespace($1) IS NULL", f'"{self._schema}"')
            if reply.rows == [(True,)]:
                yield _change(f'CREATE SCHEMA "{self._schema}"')
            yield _ask("SELECT set_config('search_path', $1, true)", f'"{self._schema}"')
        found = yield from self._found()
        if found.gone:
            yield Statement(
                f"DELETE FROM {self._qualified(VERSIONS)} WHERE table_name = $1",  # noqa: S608 - checked
                (self._table,),
                writes=True,
            )
            found = Found(None, exists=False)
        if found.version is None and found.exists:
            yield from self._note_version()
        else:
            for step in still_to_run(MIGRATIONS, found.version, self._table):
                for statement in self._written(step):
                    yield _change(statement)
        for name, kind in columns.items():
            checked_name("column", name)
            yield _change(f'ALTER TABLE {self.table} ADD COLUMN IF NOT EXISTS "{name}" {kind}')
        return MIGRATIONS[-1].version

    def try_lock(self) -> Verb[None]:
        """Lock the table as every write does, and fail at once if that cannot be; in a transaction.

        Tells a locked table from a locked record, to which the server gives one and the same error.
        """
        yield _change(f"LOCK TABLE {self.table} IN ROW EXCLUSIVE MODE NOWAIT")

    def script(self) -> str:
        """Write everything that `migrate` runs, for a person to read and run."""
        place = [] if self._schema is None else [f'SET search_path TO "{self._schema}"']
        steps = [statement for step in MIGRATIONS for statement in self._written(step)]
        return "".join(f"{statement};\n\n" for statement in [*place, *steps])

    def _found(self) -> Verb[Found]:
        version = None
        reply = yield _ask(_EXISTS, self._qualified(VERSIONS))
        if reply.rows == [(True,)]:
            reply = yield _ask(
                f"SELECT version FROM {self._qualified(VERSIONS)} WHERE table_name = $1",  # noqa: S608 - checked
                self._table,
            )
            version = reply.rows[0][0] if reply.rows else None
        # Last: somebody who makes the table meanwhile must not look like one who dropped it.
        reply = yield _ask(_EXISTS, self.table)
        return Found(version, exists=reply.rows == [(True,)])

    def _note_version(self) -> Verb[None]:
        """Note the version of a table that was restored without it, or renamed."""
        reply = yield _ask(_COLUMNS, self.table)
        if not OURS.issubset(name for (name,) in reply.rows):
            raise not_ours(self.table)
        for step in MIGRATIONS:
            for statement in self._written(step):
                if VERSIONS in statement:
                    yield _change(statement)

    def _written(self, step: Migration) -> Iterator[str]:
        """Write the statements of a step, in the way that its file describes."""
        for text in step.statements:
            statement = _WORD.sub(self._name, text)
            if self._partitions is None:
                yield statement
            else:
                yield _SWITCHED_OFF.sub(r"\1", statement).replace("UNIQUE INDEX", "INDEX")
                if _SWITCHED_OFF.search(statement):
                    yield from self._partition(self._partitions)

    def _name(self, found: re.Match[str]) -> str:
        # Quoted where it stands for the table itself: it may be a word of SQL.
        before, behind = found.groups()
        alone = not before and not behind
        return f'"{self._table}"' if alone else f"{before}{self._table}{behind}"

    def _partition(self, count: int) -> Iterator[str]:
        for number in range(count):
            yield (
                f'CREATE TABLE {self._table}_p{number} PARTITION OF "{self._table}" '
                f"FOR VALUES WITH (MODULUS {count}, REMAINDER {number})"
            )

    def _qualified(self, name: str) -> str:
        return f'"{name}"' if self._schema is None else f'"{self._schema}"."{name}"'


def _ask(sql: str, *parameters: object) -> Statement:
    return Statement(sql, parameters, writes=False)


def _change(sql: str) -> Statement:
    return Statement(sql, (), writes=True)


# --- what a store is given ----------------------------------------------------------------------


def make_schema(
    table: str, schema: str | None, partitions: int | str | None, autocreate: bool | str
) -> Schema:
    """Describe the table, from options that may come from a URL."""
    return Schema(
        table,
        schema,
        partitions=None if partitions is None else whole_number("partitions", partitions),
        autocreate=boolean("autocreate", autocreate),
    )


def checked_columns(columns: OwnColumns | None) -> OwnColumns:
    """Refuse own columns that are semel's, or that nothing fills."""
    for name, value in (columns or {}).items():
        if checked_name("column", name) in OURS:
            raise ConfigError(f"the column {name} is semel's own; take another name")
        if not callable(value):
            raise ConfigError(f"the column {name} needs a function of the claim, not {value!r}")
    return dict(columns or {})


def check_given(
    url: str | None, pool: object, connection: object, options: Mapping[str, Any]
) -> None:
    """Insist on one way to the database, and on options that have a meaning there."""
    given = [way for way in (url, pool, connection) if way is not None]
    if len(given) != 1:
        raise ConfigError("a PostgreSQL store takes a URL, a pool or a connection, one of them")
    if url is None and options:
        raise ConfigError(f"{min(options)} goes with a URL, not with what is open already")
