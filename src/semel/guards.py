"""Logical idempotency: updates that are safe to repeat by themselves, with no record at all.

    match update_if_version(connection, "accounts", 7, expected_version=3, changes={"limit": 500}):
        case Applied(): ...                 # this call changed the row
        case AlreadyApplied(): ...          # an earlier call did, with the same values
        case Conflict(current): ...         # another program changed it: read it again

Each guard is one compare-and-set UPDATE of one column, the version or the state; only when it finds
nothing to change is the row read to tell why. Nothing is committed here. `connection` is a DB-API
connection (sqlite3, psycopg, PyMySQL and others, of any paramstyle), or a SQLAlchemy Connection or
Session.
"""

from __future__ import annotations

import re
import struct
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing
from decimal import Decimal, InvalidOperation
from typing import Any, NamedTuple, TypeAlias

from msgspec import Struct

from semel.errors import ConfigError

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
    """The new version or state of the row."""


class AlreadyApplied(Struct, frozen=True):
    """The row already is as this call would make it."""

    value: object


class Conflict(Struct, frozen=True):
    """The row is neither as expected nor as wanted; nothing changed."""

    current: object
    """The version or state of the row."""
    found: bool = True
    """False if there is no such row."""


Guarded: TypeAlias = Applied | AlreadyApplied | Conflict


class VersionGuard:
    """Updates rows of a `table` whose version is still the one that you read.

    `id_column` identifies the row, and `version_column` is compared.

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
        """Change the row and increment its version, if that still is `expected_version`.

        `connection` is a DB-API or SQLAlchemy connection, `row_id` identifies the row, and
        `changes` are the columns to write. You commit.
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

    `id_column` identifies the row, and `state_column` is compared. If you pass all `states`, semel
    rejects a mistyped one; without them, it can't detect it.

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
    """Update a row like `VersionGuard(table).update`, without a guard object.

    `connection`, `row_id`, `expected_version`, and `changes` are those of `update`; `id_column` and
    `version_column` are those of the guard.

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
    """Move a row like `StateGuard(table, {target: source}).transition`, without a guard object.

    `connection`, `row_id`, and `changes` are those of `transition`; `id_column` and `state_column`
    are those of the guard.

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


# --- databases: connections of any DB-API driver, and of SQLAlchemy ------------------------
#
# Whether a row holds the very values that a call would write is for the database to say, because
# it converts them (rounds a fraction, normalises a JSON document). But its `=` is no judge of that:
# for it 'ABC' may be 'abc' and 'hello' may be 0, and some types have none. So both sides are
# compared exactly, after the conversion to the type of the column.

_POSTGRES = frozenset({"psycopg", "psycopg2", "pg8000", "postgresql"})
_MYSQL = frozenset({"pymysql", "MySQLdb", "mysql", "mariadb"})
_SQLITE = frozenset({"sqlite3", "sqlite"})
_LOCKING = _POSTGRES | _MYSQL | {"oracledb", "oracle"}
"""Drivers, and SQLAlchemy's names of databases, that know FOR UPDATE. MySQL needs it: a plain read
shows what the transaction saw at its beginning, not what the UPDATE has just met."""


class Condition(NamedTuple):
    """A part of a statement, and the values of its marks."""

    sql: str
    values: tuple[object, ...] = ()


_NEVER = Condition("1 = 0")


class _Style(NamedTuple):
    """How a driver marks parameters, and how it takes them."""

    mark: Callable[[int], str]
    pack: Callable[[Sequence[object]], Any] = tuple


_STYLES = {
    "qmark": _Style(lambda _: "?"),
    "format": _Style(lambda _: "%s"),
    "pyformat": _Style(lambda _: "%s"),
    "numeric": _Style(lambda at: f":{at + 1}"),
    "numeric_dollar": _Style(lambda at: f"${at + 1}"),
    "named": _Style(
        lambda at: f":p{at}", lambda values: {f"p{at}": value for at, value in enumerate(values)}
    ),
}


class Database:
    """A connection, by what the guards need of it; statements mark parameters with {}."""

    def __init__(self, connection: Any) -> None:
        driver = _driver(connection)
        if driver == "sqlalchemy":
            core = hasattr(connection, "exec_driver_sql")  # a Session has it inside
            self._connection = connection if core else connection.connection()
            name, style = self._connection.dialect.name, self._connection.dialect.paramstyle
            self._run = self._run_sqlalchemy
        else:
            self._connection = connection
            name, style = driver.partition(".")[0], sys.modules[driver].paramstyle
            self._run = self._run_plain
        self._name = name
        self._style = _STYLES[style]
        self._lock = " FOR UPDATE" if name in _LOCKING else ""

    def changed(self, template: str, values: Sequence[object]) -> bool:
        """Run an UPDATE; return whether it found its row."""
        count, _ = self._run(template, values, rows=False)
        if count > 1:
            raise ConfigError("the id column names more than one row: roll the transaction back")
        return count == 1

    def read(self, template: str, values: Sequence[object]) -> tuple[Any, ...] | None:
        """Run a SELECT for its one row."""
        _, found = self._run(template + self._lock, values, rows=True)
        return found[0] if found else None

    def holds(self, table: str, wanted: Mapping[str, object]) -> Condition:
        """Write the condition that a row of the table has exactly these values."""
        compared = self._compared(table)
        parts = [
            Condition(f"{name} IS NULL") if value is None else compared(name, value)
            for name, value in wanted.items()
        ]
        return Condition(
            " AND ".join(part.sql for part in parts),
            tuple(value for part in parts for value in part.values),
        )

    def _compared(self, table: str) -> Callable[[str, object], Condition]:
        if self._name in _SQLITE:
            return _as_sqlite
        if self._name in _POSTGRES:
            types = self._types(
                "SELECT attname, format_type(atttypid, atttypmod) FROM pg_attribute "
                "WHERE attrelid = CAST({} AS regclass) AND attnum > 0",
                [table],
            )
            return lambda name, value: _as_postgres(name, types[name.lower()], value)
        if self._name in _MYSQL:
            types = self._types(f"SHOW COLUMNS FROM {table}", [])
            return lambda name, value: _as_mysql(name, types[name.lower()], value)
        return lambda name, value: Condition(f"{name} = {{}}", (value,))

    def _types(self, template: str, values: Sequence[object]) -> dict[str, str]:
        _, columns = self._run(template, values, rows=True)
        return {_text(name).lower(): _text(kind) for name, kind, *_ in columns}

    def _run_plain(
        self, template: str, values: Sequence[object], *, rows: bool
    ) -> tuple[int, list[tuple[Any, ...]]]:
        with closing(self._connection.cursor()) as cursor:
            cursor.execute(*self._statement(template, values))
            found = [_values(row) for row in cursor.fetchall()] if rows else []
            return cursor.rowcount, found

    def _run_sqlalchemy(
        self, template: str, values: Sequence[object], *, rows: bool
    ) -> tuple[int, list[tuple[Any, ...]]]:
        result = self._connection.exec_driver_sql(*self._statement(template, values))
        found = [tuple(row) for row in result.all()] if rows else []
        return result.rowcount, found

    def _statement(self, template: str, values: Sequence[object]) -> tuple[str, Any]:
        marks = [self._style.mark(at) for at in range(len(values))]
        return template.format(*marks), self._style.pack(values)


def _as_sqlite(name: str, value: object) -> Condition:
    """Convert by the column's affinity, and compare without its collation."""
    return Condition(f"{name} = {{}} COLLATE BINARY", (value,))


def _as_postgres(name: str, kind: str, value: object) -> Condition:
    """Compare as texts: each type has one, and json has no other way."""
    return Condition(
        f'CAST({name} AS text) COLLATE "C" = CAST(CAST({{}} AS {kind}) AS text) COLLATE "C"',
        (value,),
    )


_MYSQL_TYPE = re.compile(r"(\w+)(?:\((\d+)(?:,(\d+))?\))?")

_WHOLE_NUMBERS = frozenset({"tinyint", "smallint", "mediumint", "int", "bigint"})
_TIMES = {"datetime": "DATETIME", "timestamp": "DATETIME", "time": "TIME"}
_TEXTS = frozenset({"varchar", "tinytext", "text", "mediumtext", "longtext", "enum", "set", "char"})
_BYTES = frozenset({"binary", "varbinary", "tinyblob", "blob", "mediumblob", "longblob"})


def _as_mysql(name: str, kind: str, value: object) -> Condition:
    """Convert as far as a CAST goes, and compare texts byte by byte."""
    base, size, digits = _MYSQL_TYPE.match(kind.lower()).groups()  # type: ignore[union-attr] # any word
    if base in _TEXTS:
        sides = [f"CAST(CONVERT({side} USING utf8mb4) AS BINARY)" for side in (name, "{}")]
        if base == "char":  # it has no blanks at its end
            sides = [f"TRIM(TRAILING ' ' FROM {side})" for side in sides]
        return Condition(" = ".join(sides), (value,))
    if base in _BYTES:
        return Condition(f"CAST({name} AS BINARY) = CAST({{}} AS BINARY)", (value,))
    if base in _TIMES:
        return Condition(f"{name} = CAST({{}} AS {_TIMES[base]}({size or 0}))", (value,))
    if base == "json":
        return Condition(f"{name} = CAST({{}} AS JSON)", (value,))
    if base in _WHOLE_NUMBERS or base in {"decimal", "float", "double"}:
        return _as_mysql_number(name, base, f"{size or 65},{digits or 0}", value)
    return Condition(f"{name} = {{}}", (value,))


def _as_mysql_number(name: str, base: str, decimals: str, value: object) -> Condition:
    if isinstance(value, str):
        try:
            value = Decimal(value)
        except InvalidOperation:  # for this server 'hello' would be 0
            return _NEVER
    if base in _WHOLE_NUMBERS:
        return Condition(f"{name} = CAST({{}} AS DECIMAL(65,0))", (value,))
    if base == "decimal":
        return Condition(f"{name} = CAST({{}} AS DECIMAL({decimals}))", (value,))
    number = float(value)  # type: ignore[arg-type] # what a driver writes into such a column
    if base == "float":  # as much of it as the column holds
        (number,) = struct.unpack("f", struct.pack("f", number))
    return Condition(f"{name} = {{}}", (number,))


def _text(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode()


def _values(row: Any) -> tuple[Any, ...]:
    """The values of a row; some cursors give dictionaries."""
    return tuple(row.values() if isinstance(row, Mapping) else row)


def _driver(connection: Any) -> str:
    """Name the module that a connection comes from; a subclass of the user's has a base there."""
    for kind in type(connection).__mro__:
        parts = kind.__module__.split(".")
        if parts[0] == "sqlalchemy":
            return parts[0]
        for end in range(1, len(parts) + 1):
            name = ".".join(parts[:end])
            if hasattr(sys.modules.get(name), "paramstyle"):
                if not hasattr(connection, "cursor"):
                    raise ConfigError(
                        f"a connection is needed, not a {type(connection).__name__} of {name}: "
                        "guards open cursors of their own"
                    )
                return name
    raise ConfigError(
        f"a DB-API or SQLAlchemy connection is needed, not {type(connection).__name__}"
    )


# --- checks of arguments, before a database sees them -------------------------------------

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)


def identifier(what: str, name: object, *, dots: bool = False) -> str:
    """Reject what cannot stand in a statement as it is; a table may name its schema."""
    parts = name.split(".") if isinstance(name, str) and dots else [name]
    if not all(isinstance(part, str) and _NAME.fullmatch(part) for part in parts):
        raise ConfigError(f"the name of a {what} is made of letters, digits and _, not {name!r}")
    return str(name)


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
