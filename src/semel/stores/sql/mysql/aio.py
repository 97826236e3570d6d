"""The store for asyncio, on asyncmy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, Unpack

from semel.core.records import (
    Claim,
    ClaimRequest,
    Encoded,
    Identity,
    Request,
)
from semel.errors import StoreError
from semel.stores.batching import Batcher, Single
from semel.stores.registry import DEFAULT_PREFIX, DEFAULT_TIMEOUT
from semel.stores.sql.aio import AsyncSQLStore
from semel.stores.sql.members import filled_in, left_open
from semel.stores.sql.mysql import tasks
from semel.stores.sql.mysql.aio_many import AsyncTogether
from semel.stores.sql.mysql.parts import (
    BATCH_CONNECTIONS,
    RENEWAL_CONNECTIONS,
    Options,
    Setup,
    set_up,
)
from semel.stores.sql.mysql.verbs import MOST_BYTES

T = TypeVar("T")


def open_async_store(url: str, *, prefix: str, timeout: float, **options: Any) -> AsyncMySQLStore:
    """Open a store for asyncio; the first call connects."""
    return AsyncMySQLStore(url, prefix=prefix, timeout=timeout, **options)


class AsyncMySQLStore(AsyncSQLStore):
    """A store for asyncio, with a small pool of connections.

    The arguments are those of `MySQLStore`; `connect=` is awaited and opens asyncmy connections.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        connect: tasks.Connect | None = None,
        prefix: str = DEFAULT_PREFIX,
        timeout: float = DEFAULT_TIMEOUT,
        **options: Unpack[Options],
    ) -> None:
        setup = set_up(url, connect, tasks.connector, prefix, timeout, **options)
        pool = tasks.Pool(setup.connect, setup.place, setup.timeout, setup.max_size)
        batches = self._hurried(setup, BATCH_CONNECTIONS)
        renewals = self._hurried(setup, RENEWAL_CONNECTIONS)
        # Not those of renewals: nothing else may keep them busy.
        pool.spares, batches.spares, renewals.spares = (batches,), (pool,), (pool, batches)
        self._database = setup.database
        self._schema = setup.schema
        self._mysql = tasks.Executor(pool, setup.timeout, setup.schema)
        self._together = AsyncTogether(
            setup.verbs,
            tasks.Executor(batches, setup.timeout, setup.schema),
            tasks.Executor(renewals, setup.timeout, setup.schema),
        )
        super().__init__(setup.verbs, self._mysql)
        one_by_one = AsyncSQLStore(setup.verbs, self._mysql)
        self._batcher = (
            Batcher(one_by_one, self._together, most_bytes=MOST_BYTES) if setup.batching else None
        )
        self._single: Single = self._batcher or one_by_one

    def _hurried(self, setup: Setup[tasks.Connect], size: int) -> tasks.Pool:
        return tasks.Pool(setup.connect, setup.place, setup.timeout, size, patient=False)

    async def claim(self, ask: ClaimRequest) -> Claim:
        """Ask to run the operation, together with those who ask at the same time."""
        return await self._single.claim(ask)

    async def complete(self, identity: Identity, owner: bytes, result: Encoded, ttl: float) -> bool:
        """Store the owner's success, together with those who do at the same time."""
        return await self._single.complete(identity, owner, result, ttl)

    async def send(self, requests: Sequence[Request[T]]) -> list[T | StoreError]:
        """Answer requests of one kind in one statement, as far as that goes."""
        told = await self._together.send(requests)
        return filled_in(told, await super().send(left_open(requests, told)))

    async def close(self) -> None:
        """Close the connections."""
        if self._batcher is not None:
            await self._batcher.close()
        await self._together.close()
        await super().close()

    async def migrate(self, *, columns: Mapping[str, str] | None = None) -> int:
        """Make the table or bring it up to date; see `MySQLStore.migrate`."""
        return await self._mysql.migrate({} if columns is None else columns)

    def migration(self) -> str:
        """Write what `migrate` would run on an empty database, for a person to read and run."""
        return self._schema.script()
