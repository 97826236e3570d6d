"""Migrations of the table of records: each runs the SQL of the stores, as `semel migrate` does."""

from __future__ import annotations

from typing import Any

from django.db.migrations.operations.base import Operation

from semel.errors import ConfigError
from semel.stores.sql.schema import DEFAULT_TABLE, LOCK, VERSIONS, read_migrations
from semel.stores.sql.sqlite_statements import CREATE_VERSIONS, SQLiteTable

_PACKAGES = {"postgresql": "semel.stores.sql.postgres", "mysql": "semel.stores.sql.mysql"}

_OURS = f"table_name = '{DEFAULT_TABLE}'"
_READ_VERSION = f"SELECT version FROM {VERSIONS} WHERE {_OURS}"  # noqa: S608 - constants
_FORGET_VERSION = f"DELETE FROM {VERSIONS} WHERE {_OURS}"  # noqa: S608 - constants


class RecordsVersion(Operation):  # type: ignore[misc]  # Django ships no types
    """Runs the same statements as `semel migrate`, so that stores find what they expect."""

    reduces_to_sql = True
    reversible = True

    def __init__(self, version: int) -> None:
        self.version = version

    def state_forwards(self, app_label: str, state: Any) -> None:
        """Nothing: the table has no model."""

    def database_forwards(
        self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any
    ) -> None:
        """Run the step of this version, unless a store was here first: they make it themselves."""
        connection = schema_editor.connection
        steps = statements(connection.vendor, self.version)
        if schema_editor.collect_sql or _is_needed(connection, self.version):
            for statement in steps:
                schema_editor.execute(statement, params=None)

    def database_backwards(
        self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any
    ) -> None:
        """Drop the table; other tables of records may be in the same database."""
        schema_editor.execute(f"DROP TABLE {DEFAULT_TABLE}", params=None)
        schema_editor.execute(_FORGET_VERSION, params=None)

    def describe(self) -> str:
        """Say what happens."""
        return f"Bring {DEFAULT_TABLE} to version {self.version}"


def statements(vendor: str, version: int) -> tuple[str, ...]:
    """Return the statements that lead to a version of the table."""
    if vendor == "sqlite":
        return (
            CREATE_VERSIONS,
            *SQLiteTable(DEFAULT_TABLE, "", float).create,
            f"INSERT INTO {VERSIONS} (table_name, version) VALUES ('{DEFAULT_TABLE}', {version})",  # noqa: S608 - constants
        )
    if vendor not in _PACKAGES:
        raise ConfigError(f"semel can't keep records in {vendor}")
    (step,) = [step for step in read_migrations(_PACKAGES[vendor]) if step.version == version]
    return step.statements


def _is_needed(connection: Any, version: int) -> bool:
    """Return whether the table has yet to come to this version."""
    vendor = connection.vendor
    with connection.cursor() as cursor:
        for statement in _turn(vendor):
            cursor.execute(statement)
        tables = connection.introspection.table_names(cursor)
        noted = None
        if VERSIONS in tables:
            cursor.execute(_READ_VERSION)
            noted = cursor.fetchone()
        if noted is None:
            # MySQL commits each statement by itself: there it may be the rest of a broken step.
            if DEFAULT_TABLE in tables and vendor != "mysql":
                raise ConfigError(
                    f"there is a table {DEFAULT_TABLE}, but {VERSIONS} does not say of which "
                    f"version: if it is semel's, of version {version}, run what `semel migrate "
                    f"--print` shows of {VERSIONS}, then migrate again; else rename it first"
                )
            return True
        if DEFAULT_TABLE not in tables:
            cursor.execute(_FORGET_VERSION)  # somebody dropped the table, and left the note
            return True
        return bool(noted[0] < version)


def _turn(vendor: str) -> tuple[str, ...]:
    """Return the statements that keep stores from making the table until this transaction ends."""
    match vendor:
        case "sqlite":  # a transaction that reads first could not write after another has written
            return (CREATE_VERSIONS, f"{_FORGET_VERSION} AND 0")
        case "postgresql":
            return (f"SELECT pg_advisory_xact_lock({LOCK})",)
        case _:  # MySQL's steps may run twice, also at the same time
            return ()
