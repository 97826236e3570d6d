"""The store for asyncio, on asyncmy: from a request to a connection.

A store has three pools of connections: for calls, for batches and for renewals. An `Executor` runs
the verbs of each caller on one of them; a `_Session` sends their statements, again where that
helps. What each driver does in its own way is in its own module.
"""

from __future__ import annotations

from asyncio import AbstractEventLoop
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from queue import Empty
from time import monotonic
from typing import Any, Final, TypeVar, Unpack
from weakref import WeakKeyDictionary

from semel.core.records import (
    Claim,
    ClaimRequest,
    CompleteRequest,
    RenewRequest,
    Request,
)
from semel.errors import StoreError, StoreUnavailable
from semel.stores.batching import (
    ALONE,
    Alone,
    AsyncSlots,
    Batcher,
    only_loop,
    weight_of_claim,
    weight_of_complete,
)
from semel.stores.forking import follow_forks
from semel.stores.sql.aio import AsyncSQLStore
from semel.stores.sql.batch import each_its_own, filled_in, left_open, own_errors
from semel.stores.sql.mysql import tasks
from semel.stores.sql.mysql.addresses import Options, set_up, settings
from semel.stores.sql.mysql.errors import (
    LARGEST_MESSAGE,
    MySQLDeadline,
    code_of,
    is_locked,
    is_lost,
    message_size,
    translate,
)
from semel.stores.sql.mysql.schema import Schema
from semel.stores.sql.mysql.statements import MySQLTable
from semel.stores.sql.mysql.verbs import (
    MOST_BYTES,
    MySQLVerbs,
    answers_of,
    batches_of,
    weight_of_renewal,
)
from semel.stores.sql.verbs import Operation, Reply, Statement, Verb
from semel.stores.urls import DEFAULT_PREFIX, DEFAULT_TIMEOUT

T = TypeVar("T")

BATCH_CONNECTIONS: Final = 2
"""One for claims and one for completes: of each, one batch is under way at a time."""

RENEWAL_CONNECTIONS: Final = 1


def open_async_store(url: str, *, prefix: str, timeout: float, **options: Any) -> AsyncMySQLStore:
    """Open a store for asyncio; the first call connects."""
    return AsyncMySQLStore(url, prefix=prefix, timeout=timeout, **options)


class AsyncMySQLStore(AsyncSQLStore):
    """A store for asyncio, with a small pool of connections.

    It takes a URL, or `connect=`, a coroutine function that opens an asyncmy connection; what it
    opens is the store's own from then on. Stores with different prefixes may share a table and
    never see each other's records.
    """

    dialect = "mysql"

    def __init__(
        self,
        url: str | None = None,
        *,
        connect: tasks.Connect | None = None,
        prefix: str = DEFAULT_PREFIX,
        timeout: float = DEFAULT_TIMEOUT,
        **options: Unpack[Options],
    ) -> None:
        setup = set_up(url, connect, tasks.connector, timeout, **options)
        self.table = MySQLTable(setup.table, prefix, setup.columns)
        self._schema = Schema(self.table.name, setup.timeout, autocreate=setup.autocreate)
        self._mysql_verbs = MySQLVerbs(self.table)
        self.database = setup.database

        def executor(size: int, *, waits_for_locks: bool = False) -> Executor:
            pool = Pool(
                setup.connect, setup.place, setup.timeout, size, waits_for_locks=waits_for_locks
            )
            return Executor(pool, setup.timeout, self._schema)

        self._mysql = executor(setup.max_size, waits_for_locks=True)
        batches, renewals = executor(BATCH_CONNECTIONS), executor(RENEWAL_CONNECTIONS)
        # Not those of renewals: nothing else may keep them busy.
        self._mysql.pool.spares = (batches.pool,)
        batches.pool.spares = (self._mysql.pool,)
        renewals.pool.spares = (self._mysql.pool, batches.pool)
        self._batches = AsyncBatches(self._mysql_verbs, batches, renewals)
        super().__init__(self._mysql_verbs, self._mysql)
        self._batcher: Batcher | None = None
        if setup.batching:
            one_by_one = AsyncSQLStore(self._mysql_verbs, self._mysql)
            self._batcher = Batcher(one_by_one.ask, self._batches.send, most_bytes=MOST_BYTES)

    async def ask(self, request: Request[T]) -> T:
        """Answer one request; claims, and completes, together with those of the same time."""
        if self._batcher is not None:
            return await self._batcher.ask(request)
        return await super().ask(request)

    async def send(self, requests: Sequence[Request[T]]) -> list[T | StoreError]:
        """Answer requests of one kind in one statement, as far as that goes."""
        answers = await self._batches.send(requests)
        return filled_in(answers, await super().send(left_open(requests, answers)))

    async def close(self) -> None:
        """Close the connections."""
        if self._batcher is not None:
            await self._batcher.close()
        await self._batches.close()
        await super().close()

    def create_nothing(self) -> None:
        """From now on, raise ConfigError where a call would create the table."""
        self._schema.create_nothing()

    async def migrate(self, *, columns: Mapping[str, str] | None = None) -> int:
        """Make the table or bring it up to date, and return its version; once is enough.

        `columns` are added with their types: `{"tenant_id": "bigint"}`.
        """
        return await self._mysql.migrate({} if columns is None else columns)

    async def diagnose(self) -> list[str]:
        """Tell what the server's settings put at risk."""
        return await self._run(self._mysql_verbs.diagnose())

    def migration(self) -> str:
        """Write what `migrate` would run on an empty database, for a person to read and run."""
        return self._schema.script()


class AsyncBatches:
    """The verbs for many, each one statement; ALONE stands for what that cannot tell.

    Batches have connections of their own, on which nothing waits for a lock: what an open
    transaction has is asked for alone, so that the others go on. So have renewals: claims, however
    many, must not hold them up.
    """

    def __init__(self, verbs: MySQLVerbs, batches: Executor, renewals: Executor) -> None:
        self._verbs = verbs
        self._claim = verbs.claim_in_bulk if tasks.SENDS_BULK else verbs.claim_batch
        self._batches = batches
        self._renewals = renewals

    async def send(self, requests: Sequence[Request[T]]) -> list[T | StoreError | Alone]:
        """Answer requests of one kind; of other kinds, or of several, nothing."""
        kinds = {type(request) for request in requests}
        answer = _ANSWERS.get(kinds.pop()) if len(kinds) == 1 else None
        return [ALONE] * len(requests) if answer is None else await answer(self, requests)

    async def claim_many(self, asks: Sequence[ClaimRequest]) -> list[Claim | StoreError | Alone]:
        """`claim` for each; with one of them locked, only what a look can tell."""
        parts = batches_of(asks, weight_of_claim)
        outcomes = await self._batches.run([self._claim(part) for part in parts])
        met = list(zip(parts, outcomes, strict=True))
        again = [part for part, outcome in met if is_locked(outcome)]
        looks = await self._batches.run([self._verbs.read_batch(part) for part in again])
        return each_its_own(answers_of([*met, *zip(again, looks, strict=True)]), asks)

    async def complete_many(
        self, asks: Sequence[CompleteRequest]
    ) -> list[bool | StoreError | Alone]:
        """`complete` for each."""
        parts = batches_of(asks, weight_of_complete)
        outcomes = await self._batches.run([self._verbs.complete_batch(part) for part in parts])
        return each_its_own(answers_of(zip(parts, outcomes, strict=True)), asks)

    async def renew_many(self, asks: Sequence[RenewRequest]) -> list[bool | StoreError]:
        """`renew` for each, if need be one by one; nothing waits for a lock."""
        parts = batches_of(asks, weight_of_renewal)
        outcomes = await self._renewals.run([self._verbs.renew_batch(part) for part in parts])
        answers = each_its_own(answers_of(zip(parts, outcomes, strict=True)), asks)
        rest = [self._verbs.renew(ask) for ask in left_open(asks, answers)]
        return filled_in(answers, own_errors(await self._renewals.run(rest)))

    async def close(self) -> None:
        """Close the connections."""
        await self._batches.close()
        await self._renewals.close()


_ANSWERS: dict[type, Callable[..., Any]] = {
    ClaimRequest: AsyncBatches.claim_many,
    CompleteRequest: AsyncBatches.complete_many,
    RenewRequest: AsyncBatches.renew_many,
}
"""Not in the object itself: it would stay until the garbage collector runs."""


class Executor:
    """Runs the operations of many callers, each caller's on one connection."""

    def __init__(self, pool: Pool, timeout: float, schema: Schema) -> None:
        self.pool = pool
        self._timeout = timeout
        self._schema = schema

    async def run(self, operations: Sequence[Operation[Any]]) -> list[Any]:
        """Run the operations one after the other; the outcomes come in their order."""
        session = self._session()
        try:
            return [await self._outcome(session, operation) for operation in operations]
        finally:
            session.end()

    async def migrate(self, columns: Mapping[str, str]) -> int:
        """Make the table or bring it up to date."""
        session = self._session()
        try:
            return await self._alone(session, self._schema.migrate(columns))
        finally:
            session.end()

    async def close(self) -> None:
        """Close the connections."""
        await self.pool.close()

    def _session(self) -> _Session:
        deadline = MySQLDeadline(
            self.pool.place, self._timeout, waits_for_locks=self.pool.waits_for_locks
        )
        return _Session(self.pool, deadline)

    async def _outcome(self, session: _Session, operation: Operation[Any]) -> Any:
        try:
            if not self._schema.ensured:
                await self._alone(session, self._schema.ensure())
            return await session.drive(operation.start())
        except Exception as error:  # noqa: BLE001 - it reaches the caller as its outcome
            return translate(error, self.pool.place)

    async def _alone(self, session: _Session, verb: Verb[T]) -> T:
        """Run a verb that takes a lock of the server, which ends with the connection."""
        try:
            return await session.drive(verb)
        except BaseException:
            session.drop()
            raise


class _Session:
    """A caller's use of one connection, from its first statement to its last."""

    def __init__(self, pool: Pool, deadline: MySQLDeadline) -> None:
        self._pool = pool
        self._lender = pool
        """The pool that the connection goes back to."""
        self._deadline = deadline
        self._connection: tasks.Connection | None = None
        self._size_lost = 0
        """Bytes of the message on which the connection was lost, until its size is checked."""

    async def drive(self, verb: Verb[T]) -> T:
        """Run a verb to its answer."""
        try:
            statement = next(verb)
            while True:
                try:
                    if self._size_lost:
                        size, self._size_lost = self._size_lost, 0
                        self._deadline.check_size(size, await self._send(LARGEST_MESSAGE))
                    reply = await self._send(statement)
                except Exception as error:  # noqa: BLE001 - `pause_after` raises what it must
                    await tasks.sleep(self._deadline.pause_after(error))
                else:
                    statement = verb.send(reply)
        except StopIteration as end:
            answer: T = end.value
            return answer
        finally:
            verb.close()

    async def _send(self, statement: Statement) -> Reply:
        self._deadline.check()
        if self._connection is None:
            self._connection = await self._take()
        try:
            return await self._pool.send(self._connection, statement, self._deadline.statement_time)
        except BaseException as error:
            if is_lost(error):
                self._size_lost = message_size(self._connection, statement)
            if code_of(error) is None or is_lost(error):
                self.drop()  # cancelled or lost: what comes next on it may be an old answer
            if is_lost(error):  # a server that went away took all of them along
                self._lender.close_idle()
                self._pool.close_idle()
            raise

    async def _take(self) -> tasks.Connection:
        self._lender = self._pool
        try:
            return await self._pool.take(self._deadline.left)
        except StoreUnavailable:  # the pool's own word: nothing was opened
            raise
        except Exception:
            # The server may have no connection left to give, and one that is open may be idle.
            for spare in self._pool.spares:
                connection = await spare.take_open()
                if connection is not None:
                    self._lender = spare
                    return connection
            raise

    def drop(self) -> None:
        """Close the connection; the next statement opens another."""
        connection, self._connection = self._connection, None  # first: never given back twice
        if connection is not None:
            self._lender.drop(connection)

    def end(self) -> None:
        """Give the connection back."""
        connection, self._connection = self._connection, None  # first: never given back twice
        if connection is not None:
            self._lender.give_back(connection)


class Pool:
    """At most `size` connections, opened when they are needed."""

    def __init__(
        self,
        connect: tasks.Connect,
        place: str,
        timeout: float,
        size: int,
        *,
        waits_for_locks: bool = True,
    ) -> None:
        """`waits_for_locks`: whether a statement waits for a lock, and is sent again after that."""
        self.place = place
        self.spares: Sequence[Pool] = ()
        """They lend an idle connection when this pool cannot open one of its own."""
        self.waits_for_locks = waits_for_locks
        self.send = tasks.Sender().send
        self._connect = connect
        self._settings = settings(timeout, waits_for_locks=waits_for_locks)
        self._size = size
        self._closed = False
        self._fresh()
        follow_forks(self)

    def _fresh(self) -> None:
        self._loop: AbstractEventLoop | None = None
        self._slots = AsyncSlots(self._size)
        self._lent: WeakKeyDictionary[tasks.Connection, Any] = WeakKeyDictionary()
        """The place of each connection that is in use: one that is lost takes none along."""
        self._idle: deque[tasks.Connection] = deque()

    async def take(self, seconds: float) -> tasks.Connection:
        """Return a connection that nobody else uses."""
        if self._closed:
            raise StoreUnavailable(f"the store on {self.place} is closed")
        self._loop = only_loop(self._loop, self.place)
        end = monotonic() + seconds
        try:
            place = await self._slots.get(timeout=seconds)
        except Empty:
            raise StoreUnavailable(
                f"all {self._size} connections to {self.place} are in use; nothing was done"
            ) from None
        try:
            connection = self._last() or await tasks.open_connection(
                self._connect, self._settings, end - monotonic()
            )
        except BaseException:
            self._slots.give(place)
            raise
        self._lent[connection] = place
        return connection

    async def take_open(self) -> tasks.Connection | None:
        """Return a connection that is open and that nobody uses, if there is one."""
        with suppress(Empty):
            place = await self._slots.get(block=False)
            connection = self._last()
            if connection is not None:
                self._lent[connection] = place
                return connection
            self._slots.give(place)
        return None

    def give_back(self, connection: tasks.Connection) -> None:
        """Take a connection back that is fit for the next caller."""
        place = self._lent.pop(connection, None)
        self._idle.append(connection)
        if self._closed:  # looked at last, so that a `close` meanwhile is not missed
            self.close_idle()
        self._slots.give(place)

    def drop(self, connection: tasks.Connection) -> None:
        """Take back a connection that nobody can use any more."""
        place = self._lent.pop(connection, None)
        tasks.close(connection)
        self._slots.give(place)

    def close_idle(self) -> None:
        """Close what nobody uses; the next callers open connections anew."""
        while (connection := self._last()) is not None:
            tasks.close(connection)

    async def close(self) -> None:
        """Close what is idle now, and the rest when it is given back."""
        self._closed = True
        while (connection := self._last()) is not None:
            await tasks.ensure_closed(connection)

    def _last(self) -> tasks.Connection | None:
        """Take the one that was used last: the others may grow old and go."""
        with suppress(IndexError):  # none is left, or another caller was faster
            return self._idle.pop()
        return None

    def before_fork(self) -> None:
        """Do nothing: the child begins with a pool of its own."""

    def after_fork_in_parent(self) -> None:
        """Do nothing: see `before_fork`."""

    def after_fork_in_child(self) -> None:
        """Let go of the parent's connections without a word: a farewell would end its sessions."""
        self._inherited = self._idle  # closing them would take them off the loop that both share
        self._fresh()
