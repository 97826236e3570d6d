"""The store classes: a URL or the application's own connections, and the verbs on them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Generic, NamedTuple, TypedDict, TypeVar, Unpack

from semel.core.records import Claim, ClaimRequest, CompleteRequest, Encoded, Identity, RenewRequest
from semel.errors import ConfigError, StoreError
from semel.stores.batching import Batcher, Single
from semel.stores.registry import DEFAULT_PREFIX, DEFAULT_TIMEOUT
from semel.stores.sql.aio import AsyncSQLStore
from semel.stores.sql.members import filled_in, left_open
from semel.stores.sql.migrations import DEFAULT_TABLE
from semel.stores.sql.mysql import tasks, threads
from semel.stores.sql.mysql.addresses import STORE_OPTIONS, Address, parse
from semel.stores.sql.mysql.aio_many import AsyncTogether
from semel.stores.sql.mysql.many import Together
from semel.stores.sql.mysql.migrating import Schema
from semel.stores.sql.mysql.sharing import MOST_BYTES
from semel.stores.sql.mysql.table import MySQLTable
from semel.stores.sql.mysql.together import MySQLBatchVerbs
from semel.stores.sql.store import SQLStore
from semel.stores.sql.verbs import OwnColumns
from semel.stores.urls import merge_options, positive_seconds, switch, whole_number

Connect = TypeVar("Connect")

MOST_CONNECTIONS: Final = 10

BATCH_CONNECTIONS: Final = 2
"""One for claims and one for completes: of each, one batch is under way at a time."""

RENEWAL_CONNECTIONS: Final = 1


class Options(TypedDict, total=False):
    """What a store may be told by name; the plain ones also in its URL."""

    table: str
    columns: OwnColumns
    """The application's own columns, each with the function of the claim that fills it."""
    autocreate: bool
    """False leaves the table to `migrate` or to the SQL files."""
    max_size: int
    batching: bool
    """Whether claims and completes of many tasks share statements; threads have no use for it."""
    unix_socket: str
    ssl: bool
    ssl_ca: str
    ssl_cert: str
    ssl_key: str
    ssl_verify: bool


def open_store(url: str, *, prefix: str, timeout: float, **options: Any) -> MySQLStore:
    """Open a store for threads; the first call connects."""
    return MySQLStore(url, prefix=prefix, timeout=timeout, **options)


def open_async_store(url: str, *, prefix: str, timeout: float, **options: Any) -> AsyncMySQLStore:
    """Open a store for asyncio; the first call connects."""
    return AsyncMySQLStore(url, prefix=prefix, timeout=timeout, **options)


class MySQLStore(SQLStore):
    """A store for threads, with a small pool of connections.

    It takes a URL, or `connect=`, a function that opens a PyMySQL connection; what it opens is the
    store's own from then on. Stores with different prefixes may share a table and never see each
    other's records.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        connect: threads.Connect | None = None,
        prefix: str = DEFAULT_PREFIX,
        timeout: float = DEFAULT_TIMEOUT,
        **options: Unpack[Options],
    ) -> None:
        setup = _setup(url, connect, threads.connector, prefix, timeout, **options)
        pool = threads.Pool(setup.connect, setup.place, setup.timeout, setup.max_size)
        batches = self._hurried(setup, BATCH_CONNECTIONS)
        renewals = self._hurried(setup, RENEWAL_CONNECTIONS)
        # Not those of renewals: nothing else may keep them busy.
        pool.spares, batches.spares, renewals.spares = (batches,), (pool,), (pool, batches)
        self._database = setup.database
        self._schema = setup.schema
        self._mysql = threads.Executor(pool, setup.timeout, setup.schema)
        self._together = Together(
            setup.verbs,
            threads.Executor(batches, setup.timeout, setup.schema),
            threads.Executor(renewals, setup.timeout, setup.schema),
        )
        self._mysql_verbs = setup.verbs
        super().__init__(setup.verbs, self._mysql)

    def _hurried(self, setup: _Setup[threads.Connect], size: int) -> threads.Pool:
        return threads.Pool(setup.connect, setup.place, setup.timeout, size, patient=False)

    def claim_many(self, asks: Sequence[ClaimRequest]) -> list[Claim | StoreError]:
        """`claim` for each, in one statement as far as that goes."""
        answers = self._together.claim_many(asks)
        return filled_in(answers, super().claim_many(left_open(asks, answers)))

    def complete_many(self, asks: Sequence[CompleteRequest]) -> list[bool | StoreError]:
        """`complete` for each, in one statement as far as that goes."""
        answers = self._together.complete_many(asks)
        return filled_in(answers, super().complete_many(left_open(asks, answers)))

    def renew_many(self, asks: Sequence[RenewRequest]) -> list[bool | StoreError]:
        """`renew` for each, in one statement as far as that goes, on a connection of its own."""
        return self._together.renew_many(asks)

    def close(self) -> None:
        """Close the connections."""
        self._together.close()
        super().close()

    def create_nothing(self) -> None:
        """From now on, raise ConfigError where a call would create the table."""
        self._schema.create_nothing()

    def migrate(self, *, columns: Mapping[str, str] | None = None) -> int:
        """Make the table or bring it up to date, and return its version; once is enough.

        `columns` are added with their types: `{"tenant_id": "bigint"}`.
        """
        return self._mysql.migrate({} if columns is None else columns)

    def diagnose(self) -> list[str]:
        """Tell what the server's settings put at risk."""
        return self._run(self._mysql_verbs.diagnose())

    def migration(self) -> str:
        """Write what `migrate` would run on an empty database, for a person to read and run."""
        return self._schema.script()


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
        setup = _setup(url, connect, tasks.connector, prefix, timeout, **options)
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

    def _hurried(self, setup: _Setup[tasks.Connect], size: int) -> tasks.Pool:
        return tasks.Pool(setup.connect, setup.place, setup.timeout, size, patient=False)

    async def claim(self, ask: ClaimRequest) -> Claim:
        """Ask to run the operation, together with those who ask at the same time."""
        return await self._single.claim(ask)

    async def complete(self, identity: Identity, owner: bytes, result: Encoded, ttl: float) -> bool:
        """Store the owner's success, together with those who do at the same time."""
        return await self._single.complete(identity, owner, result, ttl)

    async def claim_many(self, asks: Sequence[ClaimRequest]) -> list[Claim | StoreError]:
        """`claim` for each, in one statement as far as that goes."""
        answers = await self._together.claim_many(asks)
        return filled_in(answers, await super().claim_many(left_open(asks, answers)))

    async def complete_many(self, asks: Sequence[CompleteRequest]) -> list[bool | StoreError]:
        """`complete` for each, in one statement as far as that goes."""
        answers = await self._together.complete_many(asks)
        return filled_in(answers, await super().complete_many(left_open(asks, answers)))

    async def renew_many(self, asks: Sequence[RenewRequest]) -> list[bool | StoreError]:
        """`renew` for each, in one statement as far as that goes, on a connection of its own."""
        return await self._together.renew_many(asks)

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


class _Setup(NamedTuple, Generic[Connect]):
    """What both kinds of store are made from."""

    connect: Connect
    database: str | None
    """Its name, if a URL has told it."""
    place: str
    timeout: float
    max_size: int
    batching: bool
    verbs: MySQLBatchVerbs
    schema: Schema


def _setup(
    url: str | None,
    connect: Connect | None,
    connector: Callable[[Address, float], Connect],
    prefix: str,
    timeout: float,
    **options: Unpack[Options],
) -> _Setup[Connect]:
    if url is not None and connect is None:
        address, told = parse(url, dict(options))
        patience = positive_seconds("timeout", told.get("timeout", timeout))
        place, opener = address.place, connector(address, patience)
        database: str | None = address.database
    elif url is None and connect is not None:
        told = merge_options("mysql", {}, options, STORE_OPTIONS)
        patience = positive_seconds("timeout", timeout)
        place, opener, database = "the database of the given connections", connect, None
    else:
        raise ConfigError("a MySQL store takes a URL or connect=, one of them")
    table = MySQLTable(told.get("table", DEFAULT_TABLE), prefix, told.get("columns", {}))
    autocreate = switch("autocreate", told.get("autocreate", True))
    return _Setup(
        opener,
        database,
        place,
        patience,
        whole_number("max_size", told.get("max_size", MOST_CONNECTIONS)),
        switch("batching", told.get("batching", True)),
        MySQLBatchVerbs(table),
        Schema(table.name, patience, autocreate=autocreate),
    )
