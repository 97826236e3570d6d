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
from typing import Any

from semel.errors import ConfigError
from semel.guards import checks
from semel.guards.rows import Guarded, GuardedRow


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
        expected = checks.whole_number("expected_version", expected_version)
        written = self._row.changes(changes)
        if not written:
            raise ConfigError("changes must name the columns to change")
        return self._row.set(connection, row_id, (expected,), expected + 1, written)


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
        self._sources = checks.transitions(transitions, states)

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
        if checks.state("target", target) not in self._sources:
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
    flow = {checks.state("target", target): source}
    guard = StateGuard(table, flow, id_column=id_column, state_column=state_column)
    return guard.transition(connection, row_id, target, changes=changes)
