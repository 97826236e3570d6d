"""Fills tables quickly: one record is made by its library, the others are copies of it.

A copy has a key of its own, of the same length; everything else is what the library wrote.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from contextlib import closing
from typing import LiteralString

import psycopg
from psycopg import sql


def fill_postgres(url: str, table: str, keys: Mapping[str, LiteralString], records: int) -> None:
    """Copy the first row of a table; `keys` are expressions of `n` for the columns of the key."""
    name = sql.Identifier(*table.split("."))
    with psycopg.connect(url, autocommit=True) as connection:
        cursor = connection.execute(sql.SQL("SELECT * FROM {} LIMIT 0").format(name))
        columns = [column.name for column in cursor.description or ()]
        values = [
            sql.SQL(keys[column]) if column in keys else sql.Identifier("r", column)
            for column in columns
        ]
        copy = sql.SQL(
            "INSERT INTO {} ({}) SELECT {} FROM (SELECT * FROM {} LIMIT 1) r, "
            "generate_series((SELECT count(*) FROM {}), {} - 1) n"
        ).format(
            name,
            sql.SQL(", ").join(map(sql.Identifier, columns)),
            sql.SQL(", ").join(values),
            name,
            name,
            sql.Literal(records),
        )
        connection.execute(copy)
        connection.execute(sql.SQL("VACUUM ANALYZE {}").format(name))
        connection.execute("CHECKPOINT")


SEMEL_ON_POSTGRES: Mapping[str, LiteralString] = {
    "digest": "md5(n::text)::uuid",
    "idem_key": "lpad(n::text, 36, '0')",
}


def fill_sqlite(url: str, table: str, records: int) -> None:
    """Copy the first row of semel's table."""
    with closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as connection, connection:
        cursor = connection.execute(f"SELECT * FROM {table} LIMIT 0")  # noqa: S608 - our own name
        columns = [column[0] for column in cursor.description]
        keys = {"identity": "randomblob(16)", "idem_key": "printf('%036d', n)"}
        values = ", ".join(keys.get(column, f"r.{column}") for column in columns)
        connection.execute(
            f"WITH RECURSIVE numbers (n) AS (SELECT count(*) FROM {table} "  # noqa: S608 - the same
            "UNION ALL SELECT n + 1 FROM numbers WHERE n + 1 < :records) "
            f"INSERT INTO {table} ({', '.join(columns)}) SELECT {values} "
            f"FROM (SELECT * FROM {table} LIMIT 1) r, numbers",
            {"records": records},
        )
