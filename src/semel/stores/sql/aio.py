"""What the stores of all SQL databases share, for asyncio: from a request to a connection.

A request becomes an operation (`verbs`), an executor runs the operation's statements on connections
of a pool, again where that helps, and batches carry out many requests in one statement. SQLite has
an executor of its own. What a driver does in its own way is in a module of its database.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from asyncio import sleep
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from queue import Empty
from time import monotonic
from typing import Any, Final, Protocol, TypeAlias, TypeVar, cast

from semel.core.process import ForkAware, follow_forks, leave_alone, notice_fork
from semel.core.records import (
    ClaimRequest,
    CompleteRequest,
    Identity,
    RenewRequest,
    Request,
)
from semel.errors import IdempotencyError, StoreError, StoreUnavailable
from semel.stores.base import AsyncStore
from semel.stores.batching import (
    ALONE,
    MOST_BYTES,
    Alone,
    AsyncBatcher,
    AsyncSlots,
    has_ended,
    only_loop,
)
from semel.stores.sql.batch import (
    by_digest,
    each_its_own,
    filled_in,
    left_open,
    own_errors,
    put_back,
)
from semel.stores.sql.errors import Deadline, ErrorRules, RecordLocked, busy_if_locked
from semel.stores.sql.verbs import (
    BatchVerbs,
    Dialect,
    Operation,
    Reply,
    Statement,
    Verb,
    operations_of,
)

T = TypeVar("T")

# --- stores -----------------------------------------------------------------------------------


class AsyncRunner(Protocol):
    """Runs operations for tasks; each outcome is an answer or an error."""

    async def run(self, operations: Sequence[Operation[Any]]) -> list[Any]:
        """Run the operations; the outcomes come in their order."""
        ...

    async def close(self) -> None:
        """Release what was opened."""
        ...


class AsyncSQLStore(AsyncStore):
    """A store for asyncio."""

    def __init__(self, verbs: Dialect, executor: AsyncRunner) -> None:
        self._verbs = verbs
        self._operations = operations_of(verbs)
        self._executor = executor

    async def send(self, requests: Sequence[Request[T]]) -> list[T | StoreError]:
        """Answer requests about single records, in one transaction."""
        order = by_digest(requests)
        ordered = [requests[place] for place in order]
        outcomes = await self._executor.run([self._operations[type(ask)](ask) for ask in ordered])
        answers = [
            busy_if_locked(outcome) if isinstance(ask, ClaimRequest) else outcome
            for ask, outcome in zip(ordered, outcomes, strict=True)
        ]
        return own_errors(put_back(answers, order))

    async def close(self) -> None:
        """Release what this store opened itself."""
        await self._executor.close()


class AsyncSingles(AsyncSQLStore):
    """Answers the requests to a server one by one."""

    _executor: AsyncExecutor

    async def ask(self, request: Request[T]) -> T:
        """Answer one request."""
        operation: Operation[T] = self._operations[type(request)](request)
        try:
            return await self._executor.run_one(operation)
        except RecordLocked as locked:
            if isinstance(request, ClaimRequest):
                return cast("T", busy_if_locked(locked))
            raise


class AsyncServerStore(AsyncStore):
    """A store on a database server: every call enters it by `ask` or `send`."""

    def __init__(
        self,
        verbs: BatchVerbs,
        calls: AsyncExecutor,
        batches: AsyncExecutor,
        renewals: AsyncExecutor,
        *,
        shares: bool,
        most_bytes: int = MOST_BYTES,
    ) -> None:
        """`shares`: whether requests of the same time share statements."""
        self._shares = shares
        self._most_bytes = most_bytes
        self._calls = calls
        self._singles = AsyncSingles(verbs, calls)
        self._batches = AsyncBatches(verbs, batches, renewals)
        self._batcher = (
            # Not of methods of the store itself: it would stay until the garbage collector runs.
            AsyncBatcher(self._singles.ask, self._batches.send, most_bytes=self._most_bytes)
            if self._shares
            else None
        )

    # Handed on, not awaited: one coroutine less in every call.
    def ask(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, request: Request[T]
    ) -> Coroutine[Any, Any, T]:
        """Answer one request; claims, and completes, together with those of the same time."""
        if self._batcher is not None:
            return self._batcher.ask(request)
        return self._singles.ask(request)

    async def send(self, requests: Sequence[Request[T]]) -> list[T | StoreError]:
        """Answer requests of one kind in one statement, as far as that goes."""
        answers = await self._batches.send(requests)
        return filled_in(answers, await self._singles.send(left_open(requests, answers)))

    async def close(self) -> None:
        """Release what this store opened itself."""
        if self._batcher is not None:
            await self._batcher.close()
        await self._batches.close()
        await self._calls.close()

    def create_nothing(self) -> None:
        """From now on, raise ConfigError where a call would create the table."""
        self._calls.schema.create_nothing()

    async def migrate(self, *, columns: Mapping[str, str] | None = None) -> int:
        """Make the table or bring it up to date, and return its version; safe to repeat.

        `columns` are added with their types: `{"tenant_id": "bigint"}`.
        """
        return await self._calls.migrate(columns or {})

    def migration(self) -> str:
        """Write what `migrate` runs on an empty database, for a person to read and run."""
        return self._calls.schema.script()


# --- batches ----------------------------------------------------------------------------------


class AsyncBatches:
    """Answers many requests of one kind by one statement; ALONE is for what that cannot tell."""

    def __init__(self, verbs: BatchVerbs, executor: AsyncExecutor, renewals: AsyncExecutor) -> None:
        """`renewals` has a connection of its own: claims, however many, must not hold them up."""
        self._verbs = verbs
        self._executor = executor
        self._renewals = renewals

    async def send(self, requests: Sequence[Request[T]]) -> list[T | StoreError | Alone]:
        """Answer requests of one kind; of other kinds, or of several, nothing."""
        kinds = {type(request) for request in requests}
        kind = kinds.pop() if len(kinds) == 1 else None
        if kind not in {ClaimRequest, CompleteRequest, RenewRequest}:
            return [ALONE] * len(requests)
        asks: Sequence[Any] = requests
        executor = self._renewals if kind is RenewRequest else self._executor
        parts = self._verbs.batches_of(asks)
        outcomes = await executor.run_each([self._verbs.batch(part) for part in parts])
        met = [*zip(parts, outcomes, strict=True)]
        looks = [
            (part, look)
            for part, outcome in met
            if (look := self._verbs.second_look(part, outcome)) is not None
        ]
        if looks:
            seen = await executor.run_each([look for _, look in looks])
            met += zip([part for part, _ in looks], seen, strict=True)
        answers = each_its_own(self._by_identity(met), asks)
        if kind is RenewRequest:  # nothing else may keep them waiting
            rest = [self._verbs.renew(ask) for ask in left_open(asks, answers)]
            answers = filled_in(answers, own_errors(await executor.run_each(rest)))
        return answers

    def _by_identity(self, met: Sequence[tuple[Sequence[Any], Any]]) -> dict[Identity, Any]:
        """Turn the outcomes of batches into answers; who is not among them is asked for alone."""
        answers: dict[Identity, Any] = {}
        for asks, outcome in met:
            if not isinstance(outcome, Exception):
                answers |= outcome
            elif self._executor.rules.fails_every_request(outcome):
                answers |= {ask.identity: _copied(outcome) for ask in asks}
            # else the member that it belongs to meets it again
        return answers

    async def close(self) -> None:
        """Release what was opened."""
        await self._executor.close()
        await self._renewals.close()


def _copied(error: Exception) -> Exception:
    """Raised for many, one error would gather all their tracebacks."""
    copy = type(error)(*error.args)
    copy.__cause__ = error.__cause__
    return copy


# --- executors --------------------------------------------------------------------------------


class TableSchema(Protocol):
    """How the table comes to be."""

    ensured: bool
    """Whether the table was found, or made; all who share it need not look again."""

    def create_nothing(self) -> None:
        """From now on, raise ConfigError where the table would be created."""
        ...

    def script(self) -> str:
        """Write everything that a migration runs, for a person to read and run."""
        ...


class AsyncExecutor(ABC):
    """Runs operations on the connections of a pool. Each statement commits by itself."""

    rules: ErrorRules

    def __init__(
        self,
        pool: AsyncSource,
        schema: TableSchema,
        timeout: float,
        *,
        waits_for_locks: bool = True,
    ) -> None:
        """`waits_for_locks`: whether a statement that met a lock is sent again."""
        self.pool = pool
        self.schema = schema
        self._timeout = timeout
        self._waits_for_locks = waits_for_locks

    async def run(self, operations: Sequence[Operation[Any]]) -> list[Any]:
        """Run the operations and return their outcomes, errors among them."""
        return await self.run_each(operations)

    async def run_each(self, operations: Sequence[Operation[Any]]) -> list[Any]:
        """Run the operations one after the other, in the time of one call."""
        deadline = self.deadline()
        return [await self.outcome(operation, deadline) for operation in operations]

    async def outcome(self, operation: Operation[Any], deadline: Deadline) -> Any:
        """Run one operation, and return its answer or its error; what is no such error is raised.

        That may be an exception of a signal handler: it is no request's outcome.
        """
        try:
            deadline.check()
            return await self.run_one(operation, deadline)
        except IdempotencyError as error:
            if self.rules.fails_every_request(error):
                deadline.verdict = error
            return error

    async def run_one(self, operation: Operation[T], deadline: Deadline | None = None) -> T:
        """Run one operation, and raise its error. A statement that failed is sent again alone."""
        if deadline is None:
            deadline = self.deadline()
        verb = operation.start()
        statement: Statement | None = None
        while True:
            try:
                if statement is None:
                    statement = next(verb)
                if not self.schema.ensured:
                    await self.prepare(deadline)
                async with self.pool.lend(deadline) as session:
                    try:
                        while True:
                            statement = verb.send(await session.execute(statement))
                    except StopIteration as end:
                        answer: T = end.value
                        return answer
            except Exception as error:  # noqa: BLE001 - raised again, but if it is repeated
                pause = deadline.pause_after(error, self.rules.repeat_after(error))
                if pause is None:
                    raise await self._ours(error, deadline)  # noqa: B904 - it has its cause
            await sleep(pause)

    def deadline(self) -> Deadline:
        """Begin the time of a call."""
        return Deadline(self._timeout, waits_for_locks=self._waits_for_locks)

    @abstractmethod
    async def migrate(self, columns: Mapping[str, str]) -> int:
        """Make the table, bring it up to date and add columns; returns its version."""

    @abstractmethod
    async def prepare(self, deadline: Deadline) -> None:
        """Look whether the table is there, and make it if that is wanted."""

    async def repeated(self, work: Callable[[Any], Awaitable[T]], deadline: Deadline) -> T:
        """Do some work on one connection, again while there is time and sense in it."""
        while True:
            try:
                async with self.pool.lend(deadline) as session:
                    return await work(session)
            except Exception as error:  # noqa: BLE001 - raised again, but if it is repeated
                pause = deadline.pause_after(error, self.rules.repeat_after(error))
                if pause is None:
                    raise await self._ours(error, deadline)  # noqa: B904 - it has its cause
            await sleep(pause)

    # Not raised here: an error that a frame of its own traceback refers to stays, with all that the
    # other frames hold, until the garbage collector runs.
    async def _ours(self, error: Exception, deadline: Deadline) -> Exception:
        """Translate a driver's error; return others unchanged."""
        reason = await self.reason(error, deadline)
        ours = self.rules.translate(reason, self.pool.place)
        if ours is not reason:
            ours.__cause__ = reason
        return ours

    async def reason(self, error: Exception, deadline: Deadline) -> Exception:  # noqa: ARG002 - for databases that have to be asked
        """Find out why a call failed, where the error alone does not tell."""
        return error

    async def close(self) -> None:
        """Close what the pool opened."""
        await self.pool.close()


async def drive(session: AsyncSession, verb: Verb[T]) -> T:
    """Run the statements of a verb on one connection, to its end."""
    try:
        statement = next(verb)
        while True:
            statement = verb.send(await session.execute(statement))
    except StopIteration as end:
        answer: T = end.value
        return answer


# --- connections ------------------------------------------------------------------------------

MOST_IDLE: Final = 300.0
"""Seconds after which an unused connection is one too many."""

MOMENT: Final = 0.05
"""Seconds for which a connection that answered is taken to be alive; if it died since, the
statement is sent again."""


class AsyncSession(Protocol):
    """A connection that is lent for one call. It commits each statement by itself."""

    async def execute(self, statement: Statement) -> Reply:
        """Run one statement."""
        ...


class AsyncOwnSession(AsyncSession, Protocol):
    """A connection that belongs to our own pool."""

    idle_since: float
    slot: object
    """Its place in the pool while it is lent: a session that is lost takes none along."""
    lost: bool
    """Whether it is of no use any more: then no server is waited for when it is closed."""

    def begin(self, deadline: Deadline) -> None:
        """Serve a call: every wait ends at its deadline."""
        ...

    @property
    def dead(self) -> bool:
        """Whether the server is known to have hung up."""
        ...

    @property
    def idle(self) -> bool:
        """Whether it may be used again."""
        ...

    async def close(self) -> None:
        """Close it."""
        ...


class AsyncSource(Protocol):
    """What an executor asks for connections."""

    place: str
    """The name of the database, for error messages."""

    def lend(self, deadline: Deadline) -> AbstractAsyncContextManager[Any]:
        """Lend a connection for one call."""
        ...

    async def close(self) -> None:
        """Close what was opened here."""
        ...


AsyncConnect: TypeAlias = Callable[[Deadline], Awaitable[AsyncOwnSession]]
"""How a connection is opened, for a call with this deadline."""


class AsyncPool(ForkAware):
    """Connections that are opened when they are needed, and kept for the next call.

    Not a driver's: psycopg_pool connects in the background, so that a caller does not learn why it
    cannot. Its workers do not outlive a fork, and keep an event loop that is torn down from ending.
    """

    def __init__(
        self,
        connect: AsyncConnect,
        rules: ErrorRules,
        place: str,
        *,
        max_size: int,
        min_size: int = 0,
        closes_anywhere: bool = False,
    ) -> None:
        """`closes_anywhere`: whether its driver may close connections of another event loop."""
        self.place = place
        self.rules = rules
        self.spares: tuple[AsyncPool, ...] = ()
        """Lend an idle connection when this pool cannot open one of its own."""
        self._connect = connect
        self._max_size = max_size
        self._min_size = min_size
        self._closes_anywhere = closes_anywhere
        self._closed = False
        self._start()
        follow_forks(self)

    def _start(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._slots = AsyncSlots(self._max_size)
        self._idle: deque[AsyncOwnSession] = deque()
        """The one that was used last is used next, so that the others become old."""

    def lend(self, deadline: Deadline) -> AsyncLoan:
        """Lend a connection that was not hung up meanwhile, as far as one can know."""
        return AsyncLoan(self, deadline)

    async def take(self, deadline: Deadline) -> AsyncOwnSession:
        """Take a connection out, or open one."""
        notice_fork()
        if self._closed:
            raise StoreUnavailable(f"the store on {self.place} was closed")
        self._loop = only_loop(self._loop, self.place)
        try:
            slot = await self._slots.get(timeout=deadline.left)
        except Empty:
            raise StoreUnavailable(
                f"all {self._max_size} connections to {self.place} are in use; nothing was sent. "
                "Raise max_size, or look for what holds them"
            ) from None
        try:
            session = await self._take() or await self._connect(deadline)
        except BaseException:
            self._slots.give(slot)
            raise
        session.slot = slot
        session.begin(deadline)
        return session

    async def take_open(self, deadline: Deadline) -> AsyncOwnSession | None:
        """Take out an idle connection, if there is one."""
        notice_fork()
        try:
            slot = await self._slots.get(block=False)
        except Empty:
            return None
        session = None
        try:
            session = await self._take()
        finally:
            if session is None:
                self._slots.give(slot)
            else:
                session.slot = slot
                session.begin(deadline)
        return session

    async def give_back(self, session: AsyncOwnSession) -> None:
        """Keep a connection for the next call, if it can serve one."""
        slot, session.slot = session.slot, None
        try:
            if self._closed or not session.idle:
                await session.close()
                return
            session.idle_since = monotonic()
            self._idle.append(session)
            with suppress(IndexError):
                oldest = session.idle_since - MOST_IDLE
                while len(self._idle) > self._min_size and self._idle[0].idle_since < oldest:
                    await self._idle.popleft().close()
        finally:
            self._slots.give(slot)

    async def close_idle(self) -> None:
        """Close the idle connections to a server that is gone; the next callers open others."""
        with suppress(IndexError):
            while True:
                session = self._idle.pop()
                session.lost = True
                await session.close()

    async def close(self) -> None:
        """Close the connections; those that are lent out, when they come back."""
        notice_fork()
        # Of a loop that goes on, it is refused.
        has_ended(None if self._closes_anywhere else self._loop, self.place)
        self._closed = True
        with suppress(IndexError):
            while True:
                session = self._idle.pop()
                with suppress(RuntimeError):  # gone already, with an event loop that has ended
                    await session.close()

    async def _take(self) -> AsyncOwnSession | None:
        with suppress(IndexError):  # none is left, or another caller was faster
            while True:
                session = self._idle.pop()
                if monotonic() - session.idle_since < MOMENT or not session.dead:
                    return session
                await session.close()
        return None

    def after_fork_in_child(self) -> None:
        """Start with no connection: these sockets are the parent's."""
        leave_alone(self._idle)
        self._start()


class AsyncLoan:
    """A connection on loan for the time of a `with` block.

    Not a generator: every call goes through here.
    """

    __slots__ = ("_deadline", "_lender", "_pool", "_session")

    def __init__(self, pool: AsyncPool, deadline: Deadline) -> None:
        self._pool = self._lender = pool
        self._deadline = deadline

    async def __aenter__(self) -> AsyncOwnSession:
        try:
            self._session = await self._pool.take(self._deadline)
        except Exception as error:
            # The server may have no connection left to give, and one that is open may be idle. An
            # error of the pool's own, or of a signal handler, says nothing about the server.
            if self._pool.rules.translate(error, "") is error or not await self._borrow():
                raise
        return self._session

    async def _borrow(self) -> bool:
        for pool in self._pool.spares:
            session = await pool.take_open(self._deadline)
            if session is not None:
                self._lender, self._session = pool, session
                return True
        return False

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        if error is not None and self._pool.rules.breaks_all_connections(error):
            self._session.lost = True
            await self._lender.close_idle()
            await self._pool.close_idle()
        await self._lender.give_back(self._session)


@asynccontextmanager
async def in_turn(turn: AsyncSlots, deadline: Deadline) -> AsyncIterator[None]:
    """Let one call at a time use a connection of the application."""
    try:
        place = await turn.get(timeout=deadline.left)
    except Empty:
        raise StoreUnavailable(
            "the given connection was busy with other calls all the time"
        ) from None
    try:
        yield
    finally:
        turn.give(place)
