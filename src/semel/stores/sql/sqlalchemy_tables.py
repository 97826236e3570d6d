"""The table of records as SQLAlchemy metadata, for Alembic.

    metadata = MetaData()
    add_tables(metadata, "postgresql")      # then target_metadata = metadata in env.py

It describes what the SQL files make; a test compares them. `metadata.create_all()` also notes the
version of the table, which the stores ask for. In a migration that Alembic has written, that is a
line of its own: `op.execute(version_row())`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from semel.core.optional import Needed
from semel.errors import ConfigError
from semel.stores.sql.schema import DEFAULT_TABLE, VERSIONS, checked_name

with Needed("semel[sqlalchemy]", by=__name__):
    from sqlalchemy import (
        BigInteger,
        Boolean,
        Column,
        Connection,
        DateTime,
        Index,
        Integer,
        LargeBinary,
        MetaData,
        SmallInteger,
        Table,
        Text,
        UniqueConstraint,
        event,
        func,
        text,
    )
    from sqlalchemy.dialects import mysql, postgresql

VERSION: Final = 1

_POSTGRESQL, _MYSQL, _SQLITE = range(3)
_TYPES_OF: Final = {
    "postgresql": _POSTGRESQL,
    "mysql": _MYSQL,
    "mariadb": _MYSQL,
    "sqlite": _SQLITE,
}
"""Which of the three types of a column belongs to a dialect."""

_BINARY_COLLATION: Final = {"mysql": "utf8mb4_0900_bin", "mariadb": "utf8mb4_nopad_bin"}
"""Compares every character, also the last; each server has its own name for it."""

_OPTIONAL: Final = frozenset(
    {"payload_hash", "result_payload", "expire_at", "codec", "lease_until"}
)


def add_tables(metadata: MetaData, dialect: str, *, table: str = DEFAULT_TABLE) -> Table:
    """Describe the table of records, and the table of versions beside it, in this metadata.

    `dialect` is postgresql, mysql, mariadb or sqlite. Returns the table of records.
    """
    checked_name("table", table)
    if dialect not in _TYPES_OF:
        raise ConfigError(f"semel keeps no records in {dialect}")
    types = _TYPES_OF[dialect]
    versions = metadata.tables.get(VERSIONS)
    if versions is None:
        versions = _versions(metadata, types)
    records = Table(table, metadata, *_columns(types, _BINARY_COLLATION.get(dialect)))
    columns = records.c
    of_all = columns.idem_key, columns.biz_type, columns.prefix
    if types == _MYSQL:
        records.append_constraint(UniqueConstraint(*of_all, name="identity"))
        Index("due", columns.prefix, columns.lease_until, columns.expire_at)
        records.kwargs.update(mysql_engine="InnoDB", mysql_row_format="DYNAMIC")
    else:
        Index(f"{table}_key", *of_all, unique=True)
        for what, column, condition in (
            ("lease", columns.lease_until, "status = 0"),
            ("expiry", columns.expire_at, "expire_at IS NOT NULL"),
        ):
            where: dict[str, Any] = {f"{dialect}_where": text(condition)}
            Index(f"{table}_{what}", columns.prefix, column, **where)
    records.add_is_dependent_on(versions)

    def note_version(_: Table, connection: Connection, **__: object) -> None:
        connection.execute(text(version_row(table)))

    event.listen(records, "after_create", note_version)
    return records


def version_row(table: str = DEFAULT_TABLE) -> str:
    """Write the statement that notes the version of a new table."""
    checked_name("table", table)
    return f"INSERT INTO {VERSIONS} (table_name, version) VALUES ('{table}', {VERSION})"  # noqa: S608 - checked


def _versions(metadata: MetaData, types: int) -> Table:
    name = (Text, mysql.VARCHAR(64), Text)[types]
    table = Table(
        VERSIONS,
        metadata,
        Column("table_name", name, primary_key=True, nullable=False),
        Column("version", Integer, nullable=False),
    )
    if types == _POSTGRESQL:
        moment = DateTime(timezone=True)
        table.append_column(Column("applied_at", moment, nullable=False, server_default=func.now()))
    if types == _MYSQL:
        table.kwargs.update(mysql_engine="InnoDB", mysql_default_charset="utf8mb4")
    return table


def _columns(types: int, collation: str | None) -> Iterator[Column[Any]]:
    """Describe the columns of records."""

    def word(length: int) -> tuple[Any, ...]:
        short = mysql.VARCHAR(length, charset="utf8mb4", collation=collation)
        return Text(collation="C"), short, Text

    moment = DateTime(timezone=True), mysql.DATETIME(fsp=6), Integer
    flag = Boolean, mysql.TINYINT, Integer
    array = postgresql.ARRAY(LargeBinary)
    all_types: dict[str, tuple[Any, ...]] = {
        # name: PostgreSQL, MySQL and MariaDB, SQLite
        "prefix": word(128),
        "idem_key": word(255),
        "biz_type": word(255),
        "payload_hash": (LargeBinary, mysql.VARBINARY(64), LargeBinary),
        "status": (SmallInteger, mysql.TINYINT, Integer),
        "result_payload": (LargeBinary, mysql.LONGBLOB, LargeBinary),
        "expire_at": moment,
        "created_at": moment,
        "updated_at": moment,
        "codec": (Text, mysql.VARCHAR(255, charset="utf8mb4"), Text),
        "retryable": flag,
        "owner": (LargeBinary, mysql.VARBINARY(64), LargeBinary),
        "number": (Integer, BigInteger, Integer),
        "fence": (BigInteger, BigInteger, Integer),
        "hold": flag,
        "lease_until": moment,
        "superseded": (array, mysql.VARBINARY(1024), LargeBinary),
        "takeover": (Boolean, None, None),
        "waited_for": (Boolean, None, None),
        "format": (SmallInteger, Integer, Integer),
    }
    digest = postgresql.UUID, mysql.BINARY(16), LargeBinary
    name_of_first = "identity" if types == _SQLITE else "digest"
    yield Column(name_of_first, digest[types], primary_key=True, nullable=False)
    for name, of_dialects in all_types.items():
        if (of_this := of_dialects[types]) is not None:
            yield Column(
                name,
                of_this,
                # An array may be empty, and is never missing.
                nullable=name in _OPTIONAL or (name == "superseded" and types != _POSTGRESQL),
                server_default="0" if name == "retryable" and types == _MYSQL else None,
            )
