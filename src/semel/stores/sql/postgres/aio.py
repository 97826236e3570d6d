"""The twin of `store`, for asyncio."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from semel.core.records import Identity, Request
from semel.errors import StoreError
from semel.stores.batching import Batcher
from semel.stores.listening import AsyncWatch
from semel.stores.registry import DEFAULT_PREFIX, DEFAULT_TIMEOUT
from semel.stores.sql.aio import AsyncSQLStore
from semel.stores.sql.migrations import DEFAULT_TABLE
from semel.stores.sql.postgres.aio_executor import AsyncExecutor
from semel.stores.sql.postgres.aio_given import (
    AsyncpgPool,
    AsyncPool,
    source_of_connection,
    source_of_pool,
)
from semel.stores.sql.postgres.aio_many import AsyncTogether
from semel.stores.sql.postgres.aio_sessions import AsyncConnection, connect_psycopg
from semel.stores.sql.postgres.aio_sources import AsyncOwnPool, AsyncSource, Connect
from semel.stores.sql.postgres.aio_wakeups import AsyncPostgresWakeups
from semel.stores.sql.postgres.asyncpg_sessions import (
    AsyncpgConnection,
    asyncpg_understands,
    connect_asyncpg,
)
from semel.stores.sql.postgres.connections import BATCH_LOCK_SHARE
from semel.stores.sql.postgres.parts import check_given, checked_columns, make_schema
from semel.stores.sql.postgres.settings import Settings, all_options, settings
from semel.stores.sql.postgres.together import PostgresBatchVerbs, filled_in, left_open
from semel.stores.sql.verbs import Operation, OwnColumns
from semel.stores.urls import positive_seconds, switch

T = TypeVar("T")


def open_async_store(
    url: str, *, prefix: str = DEFAULT_PREFIX, timeout: float = DEFAULT_TIMEOUT, **options: Any
) -> AsyncPostgresStore:
    """Open a store for asyncio; connects on first use."""
    address, merged = all_options(url, timeout, options)
    return AsyncPostgresStore(address, prefix=prefix, **merged)


class AsyncPostgresStore(AsyncSQLStore):
    """A store for asyncio; it belongs to the event loop that uses it first.

    It takes a URL, or `pool=` or `connection=` of the application, which it never closes. A
    connection must not be in a transaction when the store is used. Stores with different prefixes
    may share a table and never see each other's records. Times are the server's.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        pool: AsyncPool | AsyncpgPool | None = None,
        connection: AsyncConnection | AsyncpgConnection | None = None,
        prefix: str = DEFAULT_PREFIX,
        table: str = DEFAULT_TABLE,
        schema: str | None = None,
        columns: OwnColumns | None = None,
        partitions: int | str | None = None,
        autocreate: bool | str = True,
        timeout: float | str = DEFAULT_TIMEOUT,
        batching: bool | str = True,
        **options: Any,
    ) -> None:
        check_given(url, pool, connection, options)
        seconds = positive_seconds("timeout", timeout)
        own: Settings | None = None
        if pool is not None:
            source: AsyncSource = source_of_pool(pool)
            reserved = source
        elif connection is not None:
            source = reserved = source_of_connection(connection)
        else:
            own = settings(str(url), options, seconds)
            connect = quickest(own, columns)
            pool_of_calls = AsyncOwnPool(own, connect)
            source = pool_of_calls
            reserved = AsyncOwnPool(own.for_renewals(), connect, spare=pool_of_calls)
        self._schema = make_schema(table, schema, partitions, autocreate)
        self._postgres = AsyncExecutor(source, self._schema, seconds)
        self._wakeups = AsyncPostgresWakeups(own, source.place)
        self._postgres_verbs = PostgresBatchVerbs(
            self._schema.table,
            prefix,
            checked_columns(columns),
            self._wakeups,
            seconds * BATCH_LOCK_SHARE,
        )
        self._renewals = AsyncExecutor(reserved, self._schema, seconds)
        self._together = AsyncTogether(self._postgres_verbs, self._postgres, self._renewals)
        super().__init__(self._postgres_verbs, self._postgres)
        one_by_one = AsyncSQLStore(self._postgres_verbs, self._postgres)
        batched = switch("batching", batching)
        self._batcher = Batcher(one_by_one.ask, self._together.send) if batched else None

    def watch(self, identity: Identity) -> AsyncWatch:
        """Listen for the end of the record's running attempt."""
        return self._wakeups.watch(self._postgres_verbs.digest(identity))

    async def ask(self, request: Request[T]) -> T:
        """Answer one request; claims, and completes, together with those of the same time."""
        if self._batcher is not None:
            return await self._batcher.ask(request)
        return await super().ask(request)

    async def send(self, requests: Sequence[Request[T]]) -> list[T | StoreError]:
        """Answer requests of one kind in one statement, as far as that goes."""
        told = await self._together.send(requests)
        return filled_in(told, await super().send(left_open(requests, told)))

    async def _run(self, operation: Operation[T]) -> T:
        return await self._postgres.run_one(operation)

    async def close(self) -> None:
        """Release what this store opened itself."""
        if self._batcher is not None:
            await self._batcher.close()
        await self._wakeups.close()
        await self._renewals.close()
        await super().close()

    async def migrate(self, *, columns: Mapping[str, str] | None = None) -> int:
        """Make the table or bring it up to date, and return its version; safe to repeat.

        `columns` are added with their types: `{"tenant_id": "bigint"}`.
        """
        return await self._postgres.migrate(columns or {})

    def migration(self) -> str:
        """Write what `migrate` runs on an empty database, for a person to read and run."""
        return self._schema.script()


def quickest(settings: Settings, columns: OwnColumns | None) -> Connect:
    """Take asyncpg where it can do what is asked for, else psycopg.

    asyncpg wants values of the very type of their column: for those of semel that is no question.
    """
    return connect_asyncpg if asyncpg_understands(settings) and not columns else connect_psycopg
