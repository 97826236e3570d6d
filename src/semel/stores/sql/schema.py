"""How a table comes to be, and grows with new versions of semel: plain SQL files, each run once.

Every dialect keeps its files in a folder `ddl` of its package, named `0001_what_it_does.sql`. They
are written for the table's default name, so that a database administrator can read them and run
them as they are; for another name the word is exchanged. The table `semel_schema` remembers how
far each table has come. This module reads and plans. It touches no database: the verbs are
generators, as everywhere.

Two programs that start at the same time take turns: PostgreSQL's migrations take an advisory lock
in a transaction, MySQL's a lock of the server, because data definition commits by itself there.
SQLite's are in `sqlite_statements`.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Final, NamedTuple

from semel.errors import ConfigError, StoreError, StoreUnavailable
from semel.stores.sql.rows import COLUMNS
from semel.stores.sql.verbs import OwnColumns, Statement, Verb
from semel.stores.urls import boolean, whole_number

DEFAULT_TABLE: Final = "idempotent_record"
"""The name of the table in the files."""

VERSIONS: Final = "semel_schema"
"""The table with one row for each table of records: its name and its version."""

LONGEST_NAME: Final = 48
"""Databases allow 63 or 64; the names of indexes and partitions are made from the table's."""

RESTORE: Final = (
    "restore it with its records; if they may be forgotten, `semel migrate` makes an empty one"
)
"""What to do about a table that was dropped: a new one has forgotten every record."""

_NAME = re.compile(r"[a-z_][a-z0-9_]*")
_COMMENT = re.compile(r"--[^\n]*")


class Migration(NamedTuple):
    """One step from a version of the table to the next."""

    version: int
    statements: tuple[str, ...]


def checked_name(what: str, name: object) -> str:
    """Refuse what cannot stand in a statement as it is; capitals fold differently everywhere."""
    if not isinstance(name, str) or not _NAME.fullmatch(name) or len(name) > LONGEST_NAME:
        raise ConfigError(
            f"the name of a {what} is made of lower-case letters, digits and _ "
            f"(at most {LONGEST_NAME}), not {name!r}"
        )
    return name


def checked_table(name: str) -> str:
    """Refuse what cannot be the name of a table of records."""
    if checked_name("table", name) == VERSIONS:
        raise ConfigError(f"{VERSIONS} is the table that remembers versions; take another name")
    return name


@cache
def read_migrations(package: str) -> tuple[Migration, ...]:
    """Read the files of a dialect, in their order."""
    found = [file for file in files(package).joinpath("ddl").iterdir() if file.name[:4].isdigit()]
    return tuple(
        Migration(int(file.name[:4]), split(file.read_text("utf-8")))
        for file in sorted(found, key=lambda file: file.name)
    )


def split(script: str) -> tuple[str, ...]:
    """Split a script into its statements. In our scripts only the end of one has a semicolon."""
    statements = (statement.strip() for statement in _COMMENT.sub("", script).split(";"))
    return tuple(statement for statement in statements if statement)


class Found(NamedTuple):
    """What a database knows of a table: the version that was noted, and whether it is there."""

    version: int | None
    exists: bool

    @property
    def gone(self) -> bool:
        """Whether it was there once."""
        return self.version is not None and not self.exists

    def check(self, table: str) -> None:
        """Refuse to recreate a dropped table silently: its records would be lost."""
        if self.gone:
            raise ConfigError(
                f"the table {table} is gone: {VERSIONS} knows it, and it was dropped or renamed; "
                f"{RESTORE}"
            )


def not_created(table: str, found: Found, folder: str) -> ConfigError:
    """Say that a table is missing or old, and that it is not created or changed here."""
    if found.version is None and not found.exists:
        what = f"the table {table} is missing in this database: is the URL right? It"
    else:
        what = f"the table {table} is of an older version, or {VERSIONS} does not know it; it"
    return ConfigError(
        f"{what} is not created or changed here (commands never do that, nor does a store with "
        f"autocreate=off): run `semel migrate`, or the SQL files in {folder}"
    )


def not_ours(table: str) -> ConfigError:
    """Say that a table of that name is there, and cannot be used."""
    return ConfigError(
        f"there is a table {table} without a row in {VERSIONS}, and it lacks columns of semel's: "
        "take another table name. But if it is an old table of semel's, restore its row: under "
        "another name every record would be forgotten"
    )


def still_to_run(
    migrations: Sequence[Migration], version: int | None, table: str
) -> tuple[Migration, ...]:
    """Plan the steps from the version that was found (None: there is no table) to the newest."""
    newest = migrations[-1].version
    if version is not None and version > newest:
        raise StoreError(
            f"the table {table} was made by a newer version of semel (schema {version}, "
            f"this one knows {newest}): upgrade this program"
        )
    return tuple(step for step in migrations if version is None or step.version > version)


def checked_columns(columns: OwnColumns | None, ours: Container[str]) -> OwnColumns:
    """Refuse own columns that are semel's, or that nothing fills."""
    for name, fill in (columns or {}).items():
        if checked_name("column", name) in ours:
            raise ConfigError(f"the column {name} is semel's own; take another name")
        if not callable(fill):
            raise ConfigError(f"the column {name} needs a function of the claim, not {fill!r}")
    return dict(columns or {})


def _ask(sql: str, *parameters: object) -> Statement:
    return Statement(sql, parameters, writes=False)


def _change(sql: str) -> Statement:
    return Statement(sql, (), writes=True)


# --- PostgreSQL ---------------------------------------------------------------------------------
#
# `check` looks; `migrate` must run in a transaction: an advisory lock lets one program after the
# other in, and the second one finds the work done.

LOCK: Final = int.from_bytes(b"semel", "big")
"""The advisory lock that migrations take, for all tables of a database."""

_POSTGRES: Final = "semel.stores.sql.postgres"

POSTGRES_COLUMNS: Final = frozenset({*COLUMNS, "digest", "prefix", "takeover", "waited_for"})
"""Every column of the table that semel itself writes."""

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
_SWITCHED_OFF = re.compile(r"/\*([^*]*)\*/")


class PostgresSchema:
    """One table of records: its name, its place, and how it is made."""

    def __init__(
        self,
        table: str,
        schema: str | None,
        *,
        partitions: int | str | None,
        autocreate: bool | str,
    ) -> None:
        """Take options that may come from a URL."""
        self._table = checked_table(table)
        self._schema = None if schema is None else checked_name("schema", schema)
        self._partitions = None if partitions is None else whole_number("partitions", partitions)
        self._autocreate = boolean("autocreate", autocreate)
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
        return PostgresSchema(table, self._schema, partitions=None, autocreate=False).table

    def check(self) -> Verb[bool]:
        """Look whether the table is there, in the newest version; newer ones are refused."""
        found = yield from self._found()
        found.check(self.table)
        missing = still_to_run(read_migrations(_POSTGRES), found.version, self._table)
        if missing and not self._autocreate:
            raise not_created(self.table, found, "semel/stores/sql/postgres/ddl")
        return not missing

    def migrate(self, columns: Mapping[str, str]) -> Verb[int]:
        """Run the missing migrations and return the version; add `columns` with their types."""
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
            for step in still_to_run(read_migrations(_POSTGRES), found.version, self._table):
                for statement in self._written(step):
                    yield _change(statement)
        for name, kind in columns.items():
            checked_name("column", name)
            yield _change(f'ALTER TABLE {self.table} ADD COLUMN IF NOT EXISTS "{name}" {kind}')
        return read_migrations(_POSTGRES)[-1].version

    def try_lock(self) -> Verb[None]:
        """Lock the table as every write does, and fail at once if that cannot be; in a transaction.

        Tells a locked table from a locked record, to which the server gives one and the same error.
        """
        yield _change(f"LOCK TABLE {self.table} IN ROW EXCLUSIVE MODE NOWAIT")

    def script(self) -> str:
        """Write everything that `migrate` runs, for a person to read and run."""
        place = [] if self._schema is None else [f'SET search_path TO "{self._schema}"']
        steps = [
            statement for step in read_migrations(_POSTGRES) for statement in self._written(step)
        ]
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
        # Last: a table that is created meanwhile must not look like one that was dropped.
        reply = yield _ask(_EXISTS, self.table)
        return Found(version, exists=reply.rows == [(True,)])

    def _note_version(self) -> Verb[None]:
        """Note the version of a table that was restored without it, or renamed."""
        reply = yield _ask(_COLUMNS, self.table)
        if not POSTGRES_COLUMNS.issubset(name for (name,) in reply.rows):
            raise not_ours(self.table)
        for step in read_migrations(_POSTGRES):
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


# --- MySQL --------------------------------------------------------------------------------------
#
# Data definition commits by itself here, so a step cannot be undone as a whole: a lock of the
# server keeps the others out, and every step may run twice. When one fails its connection is
# closed, and the server takes the lock back.

_MYSQL: Final = "semel.stores.sql.mysql"

MYSQL_LOCK: Final = f"CONCAT('{VERSIONS}:', SHA1(CONCAT(DATABASE(), '.', %s)))"
"""Locks are the whole server's: the name holds the database, and fits into 64 characters."""

_FIND_TABLE: Final = (
    "SELECT 1 FROM information_schema.tables WHERE table_schema = DATABASE() AND table_name = %s"
)
_FIND_COLUMN: Final = (
    "SELECT 1 FROM information_schema.columns "
    "WHERE table_schema = DATABASE() AND table_name = %s AND column_name = %s"
)
_READ_VERSION: Final = f"SELECT version FROM {VERSIONS} WHERE table_name = %s"  # noqa: S608 - a constant


class MySQLSchema:
    """One table of records, and how it is made."""

    def __init__(self, table: str, lock_wait: int, *, autocreate: bool) -> None:
        """`lock_wait`: seconds to wait for the migration of another program."""
        self._table = table
        self._lock_wait = lock_wait
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
        if still_to_run(read_migrations(_MYSQL), found.version, self._table):
            if not self._autocreate:
                raise not_created(self._table, found, "semel/stores/sql/mysql/ddl")
            yield from self.migrate({})
        self.ensured = True

    def migrate(self, columns: Mapping[str, str]) -> Verb[int]:
        """Run the missing migrations and return the version; add `columns` with their types."""
        locked = yield _ask(f"SELECT GET_LOCK({MYSQL_LOCK}, %s)", self._table, self._lock_wait)
        if locked.rows != [(1,)]:
            raise StoreUnavailable(f"another program is migrating {self._table}, and takes long")
        found = yield from self._found()
        version = None if found.gone else found.version
        for text in self._written(still_to_run(read_migrations(_MYSQL), version, self._table)):
            yield _change(text)
        for name, kind in columns.items():
            there = yield _ask(_FIND_COLUMN, self._table, checked_name("column", name))
            if not there.rows:
                change = f"ALTER TABLE {quoted(self._table)} ADD COLUMN {quoted(name)} {kind}"
                yield _change(change)
        yield _ask(f"SELECT RELEASE_LOCK({MYSQL_LOCK})", self._table)
        return read_migrations(_MYSQL)[-1].version

    def script(self) -> str:
        """Write everything that `migrate` runs, for a person to read and run."""
        return "".join(f"{text};\n\n" for text in self._written(read_migrations(_MYSQL)))

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
        # Last: a table that is created meanwhile must not look like one that was dropped.
        reply = yield _ask(_FIND_TABLE, self._table)
        return Found(version, exists=bool(reply.rows))


def quoted(name: str) -> str:
    """Write a checked name as it stands in statements: `order` may be one, and is a word of SQL."""
    return f"`{name}`"
