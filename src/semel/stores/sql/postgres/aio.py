"""The twin of `store`, for asyncio."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from semel.core.records import Identity
from semel.stores.registry import DEFAULT_PREFIX, DEFAULT_TIMEOUT
from semel.stores.sql.aio import AsyncSQLStore
from semel.stores.sql.migrations import DEFAULT_TABLE
from semel.stores.sql.postgres.aio_executor import AsyncExecutor
from semel.stores.sql.postgres.aio_sources import (
    AsyncConnection,
    AsyncGivenConnection,
    AsyncGivenPool,
    AsyncOwnPool,
    AsyncPool,
    AsyncSource,
)
from semel.stores.sql.postgres.aio_wakeups import AsyncPostgresWakeups
from semel.stores.sql.postgres.parts import check_given, checked_columns, make_schema
from semel.stores.sql.postgres.settings import Settings, settings
from semel.stores.sql.postgres.verbs import OwnColumns, PostgresVerbs
from semel.stores.urls import positive_seconds
from semel.stores.wakeups.tasks import AsyncWatch


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
        pool: AsyncPool | None = None,
        connection: AsyncConnection | None = None,
        prefix: str = DEFAULT_PREFIX,
        table: str = DEFAULT_TABLE,
        schema: str | None = None,
        columns: OwnColumns | None = None,
        partitions: int | str | None = None,
        autocreate: bool | str = True,
        timeout: float | str = DEFAULT_TIMEOUT,
        **options: Any,
    ) -> None:
        check_given(url, pool, connection, options)
        seconds = positive_seconds("timeout", timeout)
        own: Settings | None = None
        if pool is not None:
            source: AsyncSource = AsyncGivenPool(pool)
        elif connection is not None:
            source = AsyncGivenConnection(connection)
        else:
            own = settings(str(url), options, seconds)
            source = AsyncOwnPool(own, seconds)
        self._schema = make_schema(table, schema, partitions, autocreate)
        self._postgres = AsyncExecutor(source, self._schema, seconds)
        self._wakeups = AsyncPostgresWakeups(own, source.place)
        self._postgres_verbs = PostgresVerbs(
            self._schema.table, prefix, checked_columns(columns), self._wakeups
        )
        super().__init__(self._postgres_verbs, self._postgres)

    def watch(self, identity: Identity) -> AsyncWatch:
        """Listen for the end of the record's running attempt."""
        return self._wakeups.watch(self._postgres_verbs.digest(identity))

    async def close(self) -> None:
        """Release what this store opened itself."""
        await self._wakeups.close()
        await super().close()

    async def migrate(self, *, columns: Mapping[str, str] | None = None) -> int:
        """Make the table or bring it up to date, and return its version; safe to repeat.

        `columns` are added with their types: `{"tenant_id": "bigint"}`.
        """
        return await self._postgres.migrate(columns or {})

    def migration(self) -> str:
        """Write what `migrate` runs on an empty database, for a person to read and run."""
        return self._schema.script()
