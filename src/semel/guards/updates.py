"""Logical idempotency: updates that are safe to repeat by themselves, with no record at all.

    match update_if_version(connection, "accounts", 7, expected_version=3, changes={"limit": 500}):
        case Applied(): ...                 # this call changed the row
        case AlreadyApplied(): ...          # an earlier call did, with the same values
        case Conflict(current): ...         # somebody else changed it: read it again

Each guard is one compare-and-set UPDATE; only when it finds nothing to change is the row read to
tell why. Nothing is committed here. `connection` is a DB-API connection (sqlite3, psycopg, PyMySQL
and others, of any paramstyle), or a SQLAlchemy Connection or Session.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, TypeAlias

from msgspec import Struct

from semel.errors import ConfigError
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


class VersionGuard:
    """Updates rows of a table whose version column is still the one that the caller has seen."""

    def __init__(
        self, table: str, *, id_column: str = "id", version_column: str = "version"
    ) -> None:
        self._table = identifier("table", table, dots=True)
        self._id = identifier("column", id_column)
        self._version = identifier("column", version_column)

    def update(
        self, connection: Any, row_id: object, expected_version: int, changes: Mapping[str, object]
    ) -> Guarded:
        """Change the row and raise its version by one, if it still has the expected one."""
        columns = [identifier("column", name) for name in changes]
        if not columns or self._version in columns:
            raise ConfigError(f"name the columns to change, without {self._version} itself")
        database = Database(connection)
        values, wanted = list(changes.values()), expected_version + 1
        setting = "".join(f"{name} = {{}}, " for name in columns)
        if database.changed(
            f"UPDATE {self._table} SET {setting}{self._version} = {{}} "  # noqa: S608 - checked names
            f"WHERE {self._id} = {{}} AND {self._version} = {{}}",
            [*values, wanted, row_id, expected_version],
        ):
            return Applied(wanted)
        # The database compares: it knows what its types make of our values.
        same = " AND ".join(
            f"{name} IS NULL" if value is None else f"{name} = {{}}"
            for name, value in zip(columns, values, strict=True)
        )
        row = database.read(
            f"SELECT {self._version}, CASE WHEN {same} THEN 1 ELSE 0 END "  # noqa: S608 - checked names
            f"FROM {self._table} WHERE {self._id} = {{}}",
            [*(value for value in values if value is not None), row_id],
        )
        if row is None:
            return Conflict(None, found=False)
        current, equal = row
        return AlreadyApplied(wanted) if current == wanted and equal else Conflict(current)


class StateGuard:
    """Moves rows of a table along the allowed transitions: `{"paid": {"new"}, ...}`, by target."""

    def __init__(
        self,
        table: str,
        transitions: Mapping[str, Collection[str]],
        *,
        id_column: str = "id",
        state_column: str = "state",
    ) -> None:
        self._table = identifier("table", table, dots=True)
        self._id = identifier("column", id_column)
        self._state = identifier("column", state_column)
        self._sources = {target: _sources(target, given) for target, given in transitions.items()}

    def transition(
        self,
        connection: Any,
        row_id: object,
        target: str,
        *,
        changes: Mapping[str, object] | None = None,
    ) -> Guarded:
        """Move the row to the target state, with other changes, if its state allows that."""
        if target not in self._sources:
            raise ConfigError(f"no transition leads to {target!r}")
        written = {} if changes is None else changes
        columns = [identifier("column", name) for name in written]
        sources = self._sources[target]
        database = Database(connection)
        setting = "".join(f", {name} = {{}}" for name in columns)
        if database.changed(
            f"UPDATE {self._table} SET {self._state} = {{}}{setting} "  # noqa: S608 - checked names
            f"WHERE {self._id} = {{}} AND {self._state} IN ({', '.join('{}' for _ in sources)})",
            [target, *written.values(), row_id, *sources],
        ):
            return Applied(target)
        row = database.read(
            f"SELECT {', '.join([self._state, *columns])} "  # noqa: S608 - checked names
            f"FROM {self._table} WHERE {self._id} = {{}}",
            [row_id],
        )
        if row is None:
            return Conflict(None, found=False)
        current, *others = row
        if current == target and others == list(written.values()):
            return AlreadyApplied(target)
        return Conflict(current)


def update_if_version(
    connection: Any,
    table: str,
    row_id: object,
    expected_version: int,
    changes: Mapping[str, object],
    *,
    id_column: str = "id",
    version_column: str = "version",
) -> Guarded:
    """Do what `VersionGuard(table).update` does, once."""
    guard = VersionGuard(table, id_column=id_column, version_column=version_column)
    return guard.update(connection, row_id, expected_version, changes)


def transition(
    connection: Any,
    table: str,
    row_id: object,
    source: str | Collection[str],
    target: str,
    *,
    changes: Mapping[str, object] | None = None,
    id_column: str = "id",
    state_column: str = "state",
) -> Guarded:
    """Do what `StateGuard(table, {target: source}).transition` does, once."""
    sources = (source,) if isinstance(source, str) else source
    guard = StateGuard(table, {target: sources}, id_column=id_column, state_column=state_column)
    return guard.transition(connection, row_id, target, changes=changes)


def _sources(target: str, given: Collection[str]) -> tuple[str, ...]:
    sources = (given,) if isinstance(given, str) else tuple(given)
    if not sources or target in sources:
        raise ConfigError(f"name the states that lead to {target!r}, without itself")
    return sources
