"""Records in PostgreSQL (12 or newer): few round trips for each call, one for many calls at once.

The driver is psycopg 3; for asyncio asyncpg, where it can do what is asked for.

    postgresql://user:password@host:5432/database?table=orders_idem&max_size=20

Options in the URL, or by name:

    table, schema    where the records are; by default idempotent_record, on the search_path
    autocreate       off: the table must be there (store.migrate(), or the SQL files in ddl/)
    partitions       how many hash partitions the table gets when it is made
    columns          only by name: {"tenant_id": function of the claim}, columns of your own
    min_size, max_size   connections of the pool, by default 0 and 10; one more renews leases
    prepare          off: for pgbouncer in transaction mode
    timeout          seconds that a call may take
    batching         off: callers that ask at the same time do not share statements

Everything else is libpq's: sslmode, target_session_attrs, several hosts. `PostgresStore` and
`AsyncPostgresStore` also take a pool or a connection that the application already has.

aio, store         the stores for asyncio and for threads, what runs their operations, and where
                   their connections come from: pools of our own, or the application's
verbs              the SQL about one record, and the verbs that are PostgreSQL's own
batch              the same for many members at once
tasks, threads     the drivers: asyncpg for asyncio, psycopg for threads and for the rest
errors             what errors mean, and which calls are repeated
settings           what a URL says
listener           wake-ups for callers that wait
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

from semel.core.optional import Needed

if TYPE_CHECKING:
    from semel.stores.sql.postgres.aio import AsyncPostgresStore, open_async_store
    from semel.stores.sql.postgres.store import PostgresStore, open_store

__all__ = ["AsyncPostgresStore", "PostgresStore", "open_async_store", "open_store"]

_MODULES: Final = {
    "AsyncPostgresStore": "aio",
    "open_async_store": "aio",
    "PostgresStore": "store",
    "open_store": "store",
}


def __getattr__(name: str) -> Any:
    """Import one kind of store, and so its driver, when it is asked for: few have both."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with Needed("semel[postgres]", by=f"{__name__}.{name}"):
        return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
