"""One row, one compare-and-set: the UPDATE of both guards, and what became of it.

Each guard compares one column: the version, or the state. Only when nothing was changed is the row
read to tell why.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from msgspec import Struct

from semel.errors import ConfigError
from semel.guards import checks
from semel.guards.databases import Database, identifier


class Applied(Struct, frozen=True):
    """This call changed the row."""

    value: object
    """The row's version, or state, from now on."""


class AlreadyApplied(Struct, frozen=True):
    """The row is already as this call would make it."""

    value: object


class Conflict(Struct, frozen=True):
    """The row is neither as expected nor as wanted; nothing was changed."""

    current: object
    """The row's version or state."""
    found: bool = True
    """False when there is no such row."""


Guarded: TypeAlias = Applied | AlreadyApplied | Conflict


class GuardedRow:
    """Rows of a table, and the column that says whether one may still be changed."""

    def __init__(self, table: str, id_column: str, guard_column: str) -> None:
        self._table = identifier("table", table, dots=True)
        self._id = identifier("column", id_column)
        self._guard = identifier("column", guard_column)
        # Databases fold names: ID is id.
        self._own = {self._id.lower(), self._guard.lower()}
        if len(self._own) == 1:
            raise ConfigError(f"{self._id} cannot be the id and what is compared, both")

    def changes(self, changes: object) -> dict[str, object]:
        """Check what shall be written beside the guard."""
        written = checks.mapping("changes", changes)
        for name in written:
            if identifier("column", name).lower() in self._own:
                raise ConfigError(f"changes must not hold {name}: the guard compares it")
        return written

    def set(
        self,
        connection: Any,
        row_id: object,
        expected: tuple[object, ...],
        wanted: object,
        changes: Mapping[str, object],
    ) -> Guarded:
        """Write the wanted guard and the changes, if the guard is one of those expected."""
        if row_id is None:
            raise ConfigError("row_id must be the id of a row, not None")
        database = Database(connection)
        setting = "".join(f", {name} = {{}}" for name in changes)
        if database.changed(
            f"UPDATE {self._table} SET {self._guard} = {{}}{setting} "  # noqa: S608 - checked names
            f"WHERE {self._id} = {{}} AND {self._guard} IN ({', '.join('{}' for _ in expected)})",
            [wanted, *changes.values(), row_id, *expected],
        ):
            return Applied(wanted)
        same = database.holds(self._table, {self._guard: wanted, **changes})
        row = database.read(
            f"SELECT {self._guard}, CASE WHEN {same.sql} THEN 1 ELSE 0 END "  # noqa: S608 - checked names
            f"FROM {self._table} WHERE {self._id} = {{}}",
            [*same.values, row_id],
        )
        if row is None:
            return Conflict(None, found=False)
        current, done = row
        return AlreadyApplied(wanted) if done else Conflict(current)
