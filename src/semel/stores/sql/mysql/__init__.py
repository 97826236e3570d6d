"""`mysql://user:password@host:3306/database`, also `mariadb://`: MySQL 8 and MariaDB.

statements       the SQL, for one record and for many
verbs            what each verb does, as generators that yield statements and receive rows
ddl              the SQL files that make the table
addresses        the URL and the options of a store, and the settings of its connections
errors           what a failure means, and how long and how often a statement is sent again
aio              the store for asyncio; `store`, for threads, is generated from it
tasks, threads   the drivers: asyncmy for asyncio, PyMySQL for threads
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

from semel.core.optional import Needed

if TYPE_CHECKING:
    from semel.stores.sql.mysql.aio import AsyncMySQLStore, open_async_store
    from semel.stores.sql.mysql.store import MySQLStore, open_store

__all__ = ["AsyncMySQLStore", "MySQLStore", "open_async_store", "open_store"]

_MODULES: Final = {
    "AsyncMySQLStore": "aio",
    "open_async_store": "aio",
    "MySQLStore": "store",
    "open_store": "store",
}


def __getattr__(name: str) -> Any:
    """Import one kind of store, and so its driver, when it is asked for: few have both."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with Needed("semel[mysql]", by=f"{__name__}.{name}"):
        return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
