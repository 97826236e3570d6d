"""The operation that brings the table of records to a version, with the SQL of the stores."""

from __future__ import annotations

from typing import Any

from django.db.migrations.operations.base import Operation

from semel.errors import ConfigError
from semel.stores.sql.migrations import DEFAULT_TABLE, VERSIONS, read_migrations
from semel.stores.sql.sqlite_table import CREATE_VERSIONS, SQLiteTable

_PACKAGES = {"postgresql": "semel.stores.sql.postgres", "mysql": "semel.stores.sql.mysql"}


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
        """Run the step of this version."""
        for statement in statements(schema_editor.connection.vendor, self.version):
            schema_editor.execute(statement, params=None)

    def database_backwards(
        self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any
    ) -> None:
        """Drop the table; other tables of records may be in the same database."""
        schema_editor.execute(f"DROP TABLE {DEFAULT_TABLE}", params=None)
        schema_editor.execute(
            f"DELETE FROM {VERSIONS} WHERE table_name = '{DEFAULT_TABLE}'",  # noqa: S608 - constants
            params=None,
        )

    def describe(self) -> str:
        """Say what happens."""
        return f"Bring {DEFAULT_TABLE} to version {self.version}"


def statements(vendor: str, version: int) -> tuple[str, ...]:
    """Give the statements that lead to a version of the table."""
    if vendor == "sqlite":
        return (
            CREATE_VERSIONS,
            *SQLiteTable(DEFAULT_TABLE, "", float).create,
            f"INSERT INTO {VERSIONS} (table_name, version) VALUES ('{DEFAULT_TABLE}', {version})",  # noqa: S608 - constants
        )
    if vendor not in _PACKAGES:
        raise ConfigError(f"semel keeps no records in {vendor}")
    (step,) = [step for step in read_migrations(_PACKAGES[vendor]) if step.version == version]
    return step.statements
