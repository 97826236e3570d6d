"""The table of records as SQLAlchemy metadata, for Alembic.

    metadata = MetaData()
    add_tables(metadata, "postgresql")      # then target_metadata = metadata in env.py

It describes what the SQL files make; a test compares them. `metadata.create_all()` also notes the
version of the table, which the stores ask for. In a migration that Alembic has written, that is a
line of its own: `op.execute(version_row())`.
"""

from __future__ import annotations

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

_BINARY_COLLATION: Final = {"mysql": "utf8mb4_0900_bin", "mariadb": "utf8mb4_nopad_bin"}
"""Compares every character, also the last; each server has its own name for it."""


def add_tables(metadata: MetaData, dialect: str, *, table: str = DEFAULT_TABLE) -> Table:
    """Describe the table of records, and the table of versions beside it, in this metadata.

    `dialect` is postgresql, mysql, mariadb or sqlite. Gives the table of records.
    """
    checked_name("table", table)
    match dialect:
        case "postgresql":
            versions, records = _postgresql(metadata, table)
        case "mysql" | "mariadb":
            versions, records = _mysql(metadata, table, _BINARY_COLLATION[dialect])
        case "sqlite":
            versions, records = _sqlite(metadata, table)
        case _:
            raise ConfigError(f"semel keeps no records in {dialect}")
    records.add_is_dependent_on(versions)

    def note_version(_: Table, connection: Connection, **__: object) -> None:
        connection.execute(text(version_row(table)))

    event.listen(records, "after_create", note_version)
    return records


def version_row(table: str = DEFAULT_TABLE) -> str:
    """Write the statement that notes the version of a new table."""
    checked_name("table", table)
    return f"INSERT INTO {VERSIONS} (table_name, version) VALUES ('{table}', {VERSION})"  # noqa: S608 - checked


def _versions(metadata: MetaData, *columns: Column[Any], **options: Any) -> Table:
    found = metadata.tables.get(VERSIONS)
    return Table(VERSIONS, metadata, *columns, **options) if found is None else found


def _postgresql(metadata: MetaData, name: str) -> tuple[Table, Table]:
    moment = DateTime(timezone=True)
    word = Text(collation="C")
    versions = _versions(
        metadata,
        Column("table_name", Text, primary_key=True),
        Column("version", Integer, nullable=False),
        Column("applied_at", moment, nullable=False, server_default=func.now()),
    )
    records = Table(
        name,
        metadata,
        Column("digest", postgresql.UUID, primary_key=True),
        Column("prefix", word, nullable=False),
        Column("idem_key", word, nullable=False),
        Column("biz_type", word, nullable=False),
        Column("payload_hash", LargeBinary),
        Column("status", SmallInteger, nullable=False),
        Column("result_payload", LargeBinary),
        Column("expire_at", moment),
        Column("created_at", moment, nullable=False),
        Column("updated_at", moment, nullable=False),
        Column("codec", Text),
        Column("retryable", Boolean, nullable=False),
        Column("owner", LargeBinary, nullable=False),
        Column("number", Integer, nullable=False),
        Column("fence", BigInteger, nullable=False),
        Column("hold", Boolean, nullable=False),
        Column("lease_until", moment),
        Column("superseded", postgresql.ARRAY(LargeBinary), nullable=False),
        Column("takeover", Boolean, nullable=False),
        Column("waited_for", Boolean, nullable=False),
        Column("format", SmallInteger, nullable=False),
    )
    columns = records.c
    Index(f"{name}_key", columns.idem_key, columns.biz_type, columns.prefix, unique=True)
    Index(
        f"{name}_lease",
        columns.prefix,
        columns.lease_until,
        postgresql_where=text("status = 0"),
    )
    Index(
        f"{name}_expiry",
        columns.prefix,
        columns.expire_at,
        postgresql_where=text("expire_at IS NOT NULL"),
    )
    return versions, records


def _mysql(metadata: MetaData, name: str, collation: str) -> tuple[Table, Table]:
    moment = mysql.DATETIME(fsp=6)

    def word(length: int) -> mysql.VARCHAR:
        return mysql.VARCHAR(length, charset="utf8mb4", collation=collation)

    versions = _versions(
        metadata,
        Column("table_name", mysql.VARCHAR(64), primary_key=True),
        Column("version", Integer, nullable=False),
        mysql_engine="InnoDB",
        mysql_default_charset="utf8mb4",
    )
    records = Table(
        name,
        metadata,
        Column("digest", mysql.BINARY(16), primary_key=True),
        Column("prefix", word(128), nullable=False),
        Column("idem_key", word(255), nullable=False),
        Column("biz_type", word(255), nullable=False),
        Column("payload_hash", mysql.VARBINARY(64)),
        Column("status", mysql.TINYINT, nullable=False),
        Column("result_payload", mysql.LONGBLOB),
        Column("expire_at", moment),
        Column("created_at", moment, nullable=False),
        Column("updated_at", moment, nullable=False),
        Column("codec", mysql.VARCHAR(255, charset="utf8mb4")),
        Column("retryable", mysql.TINYINT, nullable=False, server_default="0"),
        Column("owner", mysql.VARBINARY(64), nullable=False),
        Column("number", BigInteger, nullable=False),
        Column("fence", BigInteger, nullable=False),
        Column("hold", mysql.TINYINT, nullable=False),
        Column("lease_until", moment),
        Column("superseded", mysql.VARBINARY(1024)),
        Column("format", Integer, nullable=False),
        UniqueConstraint("idem_key", "biz_type", "prefix", name="identity"),
        Index("due", "prefix", "lease_until", "expire_at"),
        mysql_engine="InnoDB",
        mysql_row_format="DYNAMIC",
    )
    return versions, records


def _sqlite(metadata: MetaData, name: str) -> tuple[Table, Table]:
    versions = _versions(
        metadata,
        Column("table_name", Text, primary_key=True, nullable=False),
        Column("version", Integer, nullable=False),
    )
    records = Table(
        name,
        metadata,
        Column("identity", LargeBinary, primary_key=True, nullable=False),
        Column("prefix", Text, nullable=False),
        Column("idem_key", Text, nullable=False),
        Column("biz_type", Text, nullable=False),
        Column("payload_hash", LargeBinary),
        Column("status", Integer, nullable=False),
        Column("result_payload", LargeBinary),
        Column("expire_at", Integer),
        Column("created_at", Integer, nullable=False),
        Column("updated_at", Integer, nullable=False),
        Column("codec", Text),
        Column("retryable", Integer, nullable=False),
        Column("owner", LargeBinary, nullable=False),
        Column("number", Integer, nullable=False),
        Column("fence", Integer, nullable=False),
        Column("hold", Integer, nullable=False),
        Column("lease_until", Integer),
        Column("superseded", LargeBinary),
        Column("format", Integer, nullable=False),
    )
    columns = records.c
    Index(f"{name}_key", columns.idem_key, columns.biz_type, columns.prefix, unique=True)
    Index(f"{name}_lease", columns.prefix, columns.lease_until, sqlite_where=text("status = 0"))
    Index(
        f"{name}_expiry",
        columns.prefix,
        columns.expire_at,
        sqlite_where=text("expire_at IS NOT NULL"),
    )
    return versions, records
