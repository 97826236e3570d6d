"""The store on PostgreSQL for threads. `aio` is the twin of this module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from semel.core.records import Identity, Request
from semel.errors import StoreError
from semel.stores.listening import Watch
from semel.stores.registry import DEFAULT_PREFIX, DEFAULT_TIMEOUT
from semel.stores.sql.migrations import DEFAULT_TABLE
from semel.stores.sql.postgres.connections import BATCH_LOCK_SHARE
from semel.stores.sql.postgres.executor import Executor
from semel.stores.sql.postgres.many import Together
from semel.stores.sql.postgres.parts import check_given, checked_columns, make_schema
from semel.stores.sql.postgres.quick import connect_quickly
from semel.stores.sql.postgres.sessions import Connection
from semel.stores.sql.postgres.sessions import connect as connect_usually
from semel.stores.sql.postgres.settings import Settings, all_options, settings
from semel.stores.sql.postgres.sources import (
    Connect,
    GivenConnection,
    GivenPool,
    OwnPool,
    Pool,
    Source,
)
from semel.stores.sql.postgres.together import PostgresBatchVerbs, filled_in, left_open
from semel.stores.sql.postgres.wakeups import PostgresWakeups
from semel.stores.sql.store import SQLStore
from semel.stores.sql.verbs import Operation, OwnColumns
from semel.stores.urls import positive_seconds, switch

T = TypeVar("T")


def open_store(
    url: str, *, prefix: str = DEFAULT_PREFIX, timeout: float = DEFAULT_TIMEOUT, **options: Any
) -> PostgresStore:
    """Open a store for threads; connects on first use."""
    address, merged = all_options(url, timeout, options)
    return PostgresStore(address, prefix=prefix, **merged)


class PostgresStore(SQLStore):
    """A store for threads.

    It takes a URL, or `pool=` or `connection=` of the application, which it never closes. A
    connection must not be in a transaction when the store is used. Stores with different prefixes
    may share a table and never see each other's records. Times are the server's.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        pool: Pool | None = None,
        connection: Connection | None = None,
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
            source: Source = GivenPool(pool)
            reserved = source
        elif connection is not None:
            source = reserved = GivenConnection(connection)
        else:
            own = settings(str(url), options, seconds)
            connect = quickest(columns)
            pool_of_calls = OwnPool(own, connect)
            source = pool_of_calls
            reserved = OwnPool(own.for_renewals(), connect, spare=pool_of_calls)
        self._schema = make_schema(table, schema, partitions, autocreate)
        self._postgres = Executor(source, self._schema, seconds)
        self._wakeups = PostgresWakeups(own, source.place)
        self._postgres_verbs = PostgresBatchVerbs(
            self._schema.table,
            prefix,
            checked_columns(columns),
            self._wakeups,
            seconds * BATCH_LOCK_SHARE,
        )
        self._renewals = Executor(reserved, self._schema, seconds)
        self._together = Together(self._postgres_verbs, self._postgres, self._renewals)
        super().__init__(self._postgres_verbs, self._postgres)
        switch("batching", batching)  # threads have no use for it, and the same URL

    def watch(self, identity: Identity) -> Watch:
        """Listen for the end of the record's running attempt."""
        return self._wakeups.watch(self._postgres_verbs.digest(identity))

    def send(self, requests: Sequence[Request[T]]) -> list[T | StoreError]:
        """Answer requests of one kind in one statement, as far as that goes."""
        told = self._together.send(requests)
        return filled_in(told, super().send(left_open(requests, told)))

    def _run(self, operation: Operation[T]) -> T:
        return self._postgres.run_one(operation)

    def close(self) -> None:
        """Release what this store opened itself."""
        self._wakeups.close()
        self._renewals.close()
        super().close()

    def create_nothing(self) -> None:
        """From now on, raise ConfigError where a call would create the table."""
        self._schema.create_nothing()

    def migrate(self, *, columns: Mapping[str, str] | None = None) -> int:
        """Make the table or bring it up to date, and return its version; safe to repeat.

        `columns` are added with their types: `{"tenant_id": "bigint"}`.
        """
        return self._postgres.migrate(columns or {})

    def diagnose(self) -> list[str]:
        """Tell what the server's settings put at risk."""
        return self._run(self._postgres_verbs.diagnose())

    def migration(self) -> str:
        """Write what `migrate` runs on an empty database, for a person to read and run."""
        return self._schema.script()


def quickest(columns: OwnColumns | None) -> Connect:
    """Go under psycopg's cursors, unless values of the application's types have to be written."""
    return connect_usually if columns else connect_quickly
