"""The records of an engine's store, for a connection of the same kind of database.

Both have to mean the same rows: whoever asks the engine later finds what a transaction wrote.
"""

from __future__ import annotations

import importlib
from typing import Final

from semel.errors import ConfigError
from semel.transactions.dialects import Records

STORES: Final = {
    "semel.stores.sql.sqlite": "sqlite",
    "semel.stores.sql.postgres": "postgresql",
    "semel.stores.sql.mysql": "mysql",
}
"""Where the stores of each dialect live."""

_MODULES: Final = {"sqlite": "sqlite", "postgresql": "postgres", "mysql": "mysql"}


def records_of(store: object, dialect: str, table: str | None) -> Records:
    """Find the records; `table` names another one than the store's."""
    # In tiers SQL decides. The front hears of a record when somebody asks after the commit.
    behind = getattr(store, "_behind", store)
    kind = _dialect_of(behind)
    if kind is None:
        raise ConfigError(
            "idem.transaction() needs an engine whose records are in SQL, and "
            f"{type(store).__name__} keeps them elsewhere: open it with the URL of the database "
            "that the connection is to"
        )
    if kind != dialect:
        raise ConfigError(
            f"the connection is to {dialect}, the engine keeps its records in {kind}: they could "
            "not be committed together"
        )
    module = importlib.import_module(f"semel.transactions.dialects.{_MODULES[kind]}")
    found: Records = module.records(behind, table)
    return found


def _dialect_of(store: object) -> str | None:
    for kind in type(store).__mro__:
        for package, dialect in STORES.items():
            if f"{kind.__module__}.".startswith(f"{package}."):
                return dialect
    return None
