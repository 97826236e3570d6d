"""What the databases' drivers have in common, by what the guards need of it.

This module speaks to connections of any DB-API driver, and of SQLAlchemy. It commits nothing.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from typing import Any, NamedTuple

from semel.errors import ConfigError

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)

_LOCKING = frozenset(
    {"psycopg", "psycopg2", "pg8000", "pymysql", "MySQLdb", "mysql", "mariadb", "oracledb"}
    | {"postgresql", "oracle"}
)
"""Drivers, and SQLAlchemy's names of databases, that know FOR UPDATE. MySQL needs it: a plain read
shows what the transaction saw at its beginning, not what the UPDATE has just met."""


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
        self._style = _STYLES[style]
        self._lock = " FOR UPDATE" if name in _LOCKING else ""

    def changed(self, template: str, values: Sequence[object]) -> bool:
        """Run an UPDATE; tell whether it found its row."""
        count, _ = self._run(template, values, rows=False)
        if count > 1:
            raise ConfigError("the id column names more than one row: roll the transaction back")
        return count == 1

    def read(self, template: str, values: Sequence[object]) -> tuple[Any, ...] | None:
        """Run a SELECT for its one row."""
        _, row = self._run(template + self._lock, values, rows=True)
        return row

    def _run_plain(
        self, template: str, values: Sequence[object], *, rows: bool
    ) -> tuple[int, tuple[Any, ...] | None]:
        with closing(self._connection.cursor()) as cursor:
            cursor.execute(*self._statement(template, values))
            found = cursor.fetchone() if rows else None
            return cursor.rowcount, None if found is None else _values(found)

    def _run_sqlalchemy(
        self, template: str, values: Sequence[object], *, rows: bool
    ) -> tuple[int, tuple[Any, ...] | None]:
        result = self._connection.exec_driver_sql(*self._statement(template, values))
        found = result.first() if rows else None
        return result.rowcount, None if found is None else tuple(found)

    def _statement(self, template: str, values: Sequence[object]) -> tuple[str, Any]:
        marks = [self._style.mark(at) for at in range(len(values))]
        return template.format(*marks), self._style.pack(values)


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
    """Refuse what cannot stand in a statement as it is; a table may name its schema."""
    parts = name.split(".") if isinstance(name, str) and dots else [name]
    if not all(isinstance(part, str) and _NAME.fullmatch(part) for part in parts):
        raise ConfigError(f"the name of a {what} is made of letters, digits and _, not {name!r}")
    return str(name)
