"""Logical idempotency: updates that are safe to repeat by themselves, with no record at all.

    match update_if_version(connection, "accounts", 7, expected_version=3, changes={"limit": 500}):
        case Applied(): ...                 # this call changed the row
        case AlreadyApplied(): ...          # an earlier call did, with the same values
        case Conflict(current): ...         # somebody else changed it: read it again

Each guard is one compare-and-set UPDATE of one column, the version or the state; only when it finds
nothing to change is the row read to tell why. Nothing is committed here. `connection` is a DB-API
connection (sqlite3, psycopg, PyMySQL and others, of any paramstyle), or a SQLAlchemy Connection or
Session.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, TypeAlias

from msgspec import Struct

from semel.errors import ConfigError
from semel.guards.databases import Database, identifier

__all__ = [
    "AlreadyApplied",
    "Applied",
    "Conflict",
    "Guarded",
    "StateGuard",
    "VersionGuard",
    "transition",
    "update_if_version",
]


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
    """Updates rows of a `table` whose version is still the one that the caller has seen.

    `id_column` names the row, and `version_column` is the one that is compared.

    Examples:
        >>> guard = VersionGuard("accounts")
        >>> guard.update(connection, 7, expected_version=3, changes={"name": "new"})
        Applied(value=4)
    """

    def __init__(
        self, table: str, *, id_column: str = "id", version_column: str = "version"
    ) -> None:
        self._row = GuardedRow(table, id_column, version_column)

    def update(
        self, connection: Any, row_id: object, expected_version: int, changes: Mapping[str, object]
    ) -> Guarded:
        """Change the row and raise its version by one, if it still is `expected_version`.

        `connection` is a DB-API connection, or one of SQLAlchemy; `row_id` names the row, and
        `changes` are the columns to write. Nothing is committed here.
        """
        if isinstance(expected_version, bool) or not isinstance(expected_version, int):
            shown = _shown(expected_version)
            raise ConfigError(f"expected_version must be a whole number, not {shown}")
        written = self._row.changes(changes)
        if not written:
            raise ConfigError("changes must name the columns to change")
        return self._row.set(connection, row_id, (expected_version,), expected_version + 1, written)


class StateGuard:
    """Moves rows of a `table` along the allowed `transitions`: `{"paid": {"new"}, ...}`, by target.

    `id_column` names the row, and `state_column` is the one that is compared. Give all `states` to
    have a mistyped one rejected; without them nobody can know that it is.

    Examples:
        >>> guard = StateGuard("accounts", {"paid": {"new"}})
        >>> guard.transition(connection, 7, "paid")
        Applied(value='paid')
    """

    def __init__(
        self,
        table: str,
        transitions: Mapping[str, Collection[str]],
        *,
        id_column: str = "id",
        state_column: str = "state",
        states: Collection[str] | None = None,
    ) -> None:
        self._row = GuardedRow(table, id_column, state_column)
        self._sources = _checked_transitions(transitions, states)

    def transition(
        self,
        connection: Any,
        row_id: object,
        target: str,
        *,
        changes: Mapping[str, object] | None = None,
    ) -> Guarded:
        """Move the row `row_id` to the state `target`, with other `changes`, if that is allowed.

        `connection` is as for `VersionGuard`.
        """
        if _state_name("target", target) not in self._sources:
            raise ConfigError(f"no transition leads to {target!r}")
        written = self._row.changes({} if changes is None else changes)
        return self._row.set(connection, row_id, self._sources[target], target, written)


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
    """Do what `VersionGuard(table).update` does, once.

    `connection`, `row_id`, `expected_version` and `changes` are those of `update`; `id_column` and
    `version_column` those of the guard.

    Examples:
        >>> update_if_version(connection, "accounts", 7, 3, {"name": "new"})
        Applied(value=4)
    """
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
    """Do what `StateGuard(table, {target: source}).transition` does, once.

    `connection`, `row_id` and `changes` are those of `transition`; `id_column` and `state_column`
    those of the guard.

    Examples:
        >>> transition(connection, "accounts", 7, "new", "paid")
        Applied(value='paid')
    """
    flow = {_state_name("target", target): source}
    guard = StateGuard(table, flow, id_column=id_column, state_column=state_column)
    return guard.transition(connection, row_id, target, changes=changes)


# --- one row, one compare-and-set: the UPDATE of both guards, and its outcome -------------


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
        if not isinstance(changes, Mapping):
            raise ConfigError(
                f"changes must be a mapping from column to value, not {_shown(changes)}"
            )
        written = dict(changes)
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


# --- checks of arguments, before a database sees them -------------------------------------


def _checked_transitions(value: object, states: object) -> dict[str, tuple[str, ...]]:
    """Return the states that lead to each target; all must be among `states` if those are given."""
    if not isinstance(value, Mapping) or not value:
        raise ConfigError(
            "transitions must be a mapping from each target to the states that lead to it, "
            + (f"not {_shown(value)}" if not isinstance(value, Mapping) else "and not be empty")
        )
    checked = {
        _state_name("target", target): _sources(target, given) for target, given in value.items()
    }
    if states is not None:
        known = _states("states", states)
        named = {each for target, sources in checked.items() for each in (target, *sources)}
        unknown = sorted(named - set(known))
        if unknown:
            raise ConfigError(f"{unknown[0]!r} is not among the states {', '.join(sorted(known))}")
    return checked


def _sources(target: str, given: object) -> tuple[str, ...]:
    sources = _states(f"source of {target!r}", given)
    if not sources or target in sources:
        raise ConfigError(f"name the states that lead to {target!r}, without itself")
    return sources


def _states(name: str, given: object) -> tuple[str, ...]:
    if isinstance(given, str):
        return (_state_name(name, given),)
    if not isinstance(given, Collection):
        raise ConfigError(f"{name} must be a state or several, not {_shown(given)}")
    return tuple(_state_name(name, each) for each in given)


def _state_name(name: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{name} must be the name of a state, not {_shown(value)}")
    return value


def _shown(value: object) -> str:
    return repr(value)[:80] if isinstance(value, str | int | float) else type(value).__name__
