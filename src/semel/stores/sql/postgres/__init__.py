"""Records in PostgreSQL (12 or newer): one statement, one round trip per verb, or for many at once.

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
    batching         off: tasks that ask at the same time do not share statements

Everything else is libpq's: sslmode, target_session_attrs, several hosts. `PostgresStore` and
`AsyncPostgresStore` also take a pool or a connection that the application already has.
"""

from __future__ import annotations

from typing import Any

from semel.stores.registry import DEFAULT_PREFIX, DEFAULT_TIMEOUT
from semel.stores.sql.postgres.aio import AsyncPostgresStore
from semel.stores.sql.postgres.settings import part
from semel.stores.sql.postgres.store import PostgresStore
from semel.stores.urls import merge_options

__all__ = ["AsyncPostgresStore", "PostgresStore", "open_async_store", "open_store"]


def open_store(
    url: str, *, prefix: str = DEFAULT_PREFIX, timeout: float = DEFAULT_TIMEOUT, **options: Any
) -> PostgresStore:
    """Open a store for threads; connects on first use."""
    address, merged = _options(url, timeout, options)
    return PostgresStore(address, prefix=prefix, **merged)


def open_async_store(
    url: str, *, prefix: str = DEFAULT_PREFIX, timeout: float = DEFAULT_TIMEOUT, **options: Any
) -> AsyncPostgresStore:
    """Open a store for asyncio; connects on first use."""
    address, merged = _options(url, timeout, options)
    return AsyncPostgresStore(address, prefix=prefix, **merged)


def _options(url: str, timeout: float, options: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    address, in_url = part(url)
    known = frozenset(in_url) | frozenset(options)  # libpq knows the others, and is asked
    merged = merge_options("postgresql", in_url, options, known)
    return address, {"timeout": timeout, **merged}
