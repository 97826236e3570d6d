"""What the databases' drivers have in common, by what the guards need of it.

This module speaks to connections of any DB-API driver, and of SQLAlchemy. It commits nothing.

Whether a row holds the very values that a call would write is for the database to say, because it
converts them (rounds a fraction, normalises a JSON document). But its `=` is no judge of that: for
it 'ABC' may be 'abc' and 'hello' may be 0, and some types have none. So both sides are compared
exactly, after the conversion to the type of the column.
"""

from __future__ import annotations

import re
import struct
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from decimal import Decimal, InvalidOperation
from typing import Any, NamedTuple

from semel.errors import ConfigError

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)

_LOCKING = frozenset(
    {"psycopg", "psycopg2", "pg8000", "pymysql", "MySQLdb", "mysql", "mariadb", "oracledb"}
    | {"postgresql", "oracle"}
)
"""Drivers, and SQLAlchemy's names of databases, that know FOR UPDATE. MySQL needs it: a plain read
shows what the transaction saw at its beginning, not what the UPDATE has just met."""


_POSTGRES = frozenset({"psycopg", "psycopg2", "pg8000", "postgresql"})
_MYSQL = frozenset({"pymysql", "MySQLdb", "mysql", "mariadb"})
_SQLITE = frozenset({"sqlite3", "sqlite"})


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
            self._connection = _core_connection(connection)
            name, style = self._connection.dialect.name, self._connection.dialect.paramstyle
            self._run = self._run_sqlalchemy
        else:
            self._connection = connection
            name, style = driver.partition(".")[0], _paramstyle(driver)
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
                return _unless_cursor(connection, name)
    raise ConfigError(
        f"a DB-API or SQLAlchemy connection is needed, not {type(connection).__name__}"
    )


def _unless_cursor(connection: Any, driver: str) -> str:
    if not hasattr(connection, "cursor"):
        raise ConfigError(
            f"a connection is needed, not a {type(connection).__name__} of {driver}: guards open "
            "cursors of their own"
        )
    return driver


def _paramstyle(driver: str) -> str:
    style: str = sys.modules[driver].paramstyle
    return style


def _core_connection(connection: Any) -> Any:
    return connection if hasattr(connection, "exec_driver_sql") else connection.connection()


def identifier(what: str, name: object, *, dots: bool = False) -> str:
    """Reject what cannot stand in a statement as it is; a table may name its schema."""
    parts = name.split(".") if isinstance(name, str) and dots else [name]
    if not all(isinstance(part, str) and _NAME.fullmatch(part) for part in parts):
        raise ConfigError(f"the name of a {what} is made of letters, digits and _, not {name!r}")
    return str(name)
