"""The parts that the stores for threads and for asyncio are made of alike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from semel.errors import ConfigError
from semel.stores.sql.migrations import checked_name
from semel.stores.sql.postgres.schema import Schema
from semel.stores.sql.postgres.words import OURS
from semel.stores.sql.verbs import OwnColumns
from semel.stores.urls import switch, whole_number


def make_schema(
    table: str, schema: str | None, partitions: int | str | None, autocreate: bool | str
) -> Schema:
    """Describe the table, from options that may come from a URL."""
    return Schema(
        table,
        schema,
        partitions=None if partitions is None else whole_number("partitions", partitions),
        autocreate=switch("autocreate", autocreate),
    )


def checked_columns(columns: OwnColumns | None) -> OwnColumns:
    """Refuse own columns that are semel's, or that nothing fills."""
    for name, value in (columns or {}).items():
        if checked_name("column", name) in OURS:
            raise ConfigError(f"the column {name} is semel's own; take another name")
        if not callable(value):
            raise ConfigError(f"the column {name} needs a function of the claim, not {value!r}")
    return dict(columns or {})


def check_given(
    url: str | None, pool: object, connection: object, options: Mapping[str, Any]
) -> None:
    """Insist on one way to the database, and on options that have a meaning there."""
    given = [way for way in (url, pool, connection) if way is not None]
    if len(given) != 1:
        raise ConfigError("a PostgreSQL store takes a URL, a pool or a connection, one of them")
    if url is None and options:
        raise ConfigError(f"{min(options)} goes with a URL, not with what is open already")
