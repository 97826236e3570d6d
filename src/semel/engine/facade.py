"""The engine for asyncio: execute once per key, replay the result to every duplicate."""

from __future__ import annotations

import time
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import AbstractAsyncContextManager
from datetime import tzinfo
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, Self, TypeVar, Unpack, overload

from msgspec import UNSET, UnsetType

from semel import transactions
from semel.core.attempts import Attempt, Outcome, Result
from semel.core.codec import returned_by
from semel.core.policy import Duration, Policy, seconds
from semel.core.process import notice_fork
from semel.core.records import Record, State
from semel.core.schedules import Period
from semel.decorating import KeySource, PayloadSource, Unknown
from semel.engine.marks import AsyncMarks
from semel.engine.once import AsyncOnce, AsyncOnceDecorator
from semel.engine.once_per import AsyncOncePerDecorator
from semel.engine.runs import AsyncRuns
from semel.engine.setup import Call, Secrets, Setup, unexpected
from semel.engine.transactions import (
    RETRIES,
    AsyncTransactionContext,
    AsyncTransactionsContext,
    aio_run_in_transaction,
)
from semel.errors import ConfigError, IdempotencyError, raise_about
from semel.events import Hook
from semel.stores.base import AsyncStore, ScanRequest
from semel.stores.urls import open_async_store

if TYPE_CHECKING:
    from semel.core.codec import Codec

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")
T = TypeVar("T")

CONSUMING = Policy(concurrent="reject")


class AsyncIdempotency:
    """Makes operations safe to retry: one run per key, and the same result for every duplicate.

    `url_or_store` is a store URL or a store object; without it, the settings decide. The engine
    belongs to the first event loop that uses it.

    `policy` is the policy of all calls, and `scopes` maps a scope to its own policy. semel calls
    each of `hooks` with each event. `prefix` and `key_pattern` are as in the settings. `codecs`
    read old results, beside those of the policies. `cache` is how many finished results this
    process keeps, each for `cache_ttl` at most. `max_waiting` is how many calls may wait for
    others at the same time. `fingerprint_secret` keys the fingerprints of payloads, so that a
    reader of the store can't guess a payload; of several, the first one writes and all are
    compared.

    Examples:
        >>> async with AsyncIdempotency("memory://", policy=Policy(ttl=3600)) as idem:
        ...     await idem.execute("order:42", charge)
        'paid'
    """

    def __init__(
        self,
        url_or_store: str | AsyncStore | None = None,
        *,
        policy: Policy | None = None,
        scopes: Mapping[str, Policy] | None = None,
        prefix: str | UnsetType = UNSET,
        hooks: Sequence[Hook] = (),
        key_pattern: str | UnsetType | None = UNSET,
        codecs: Sequence[Codec] = (),
        cache: int = 0,
        cache_ttl: Duration = 60.0,
        max_waiting: int | UnsetType | None = UNSET,
        fingerprint_secret: Secrets | UnsetType = UNSET,
        **unknown: Unpack[Unknown],
    ) -> None:
        if unknown:
            raise unexpected(type(self).__name__, unknown, "open_async_store")
        setup = Setup(
            url_or_store,
            asynchronous=True,
            policy=policy,
            scopes=scopes,
            prefix=prefix,
            hooks=hooks,
            key_pattern=key_pattern,
            codecs=codecs,
            cache=cache,
            cache_ttl=cache_ttl,
            max_waiting=max_waiting,
            fingerprint_secret=fingerprint_secret,
        )
        self._internals = AsyncRuns(setup, setup.opened(open_async_store, url_or_store))

    @property
    def internals(self) -> AsyncRuns:
        """The parts for semel's own integrations; not public API."""
        notice_fork()
        return self._internals

    async def execute(
        self,
        key: str,
        fn: Callable[[], Awaitable[T]],
        *,
        scope: str = "default",
        payload: object = UNSET,
        returns: type[T] | None = None,
        policy: Policy | None = None,
    ) -> T:
        """Run `fn` once per `key` and return its result; duplicates wait, then get the same result.

        `scope` is the kind of operation, and each scope has its own keys. `payload` is the data
        that must match on a retry; otherwise the call raises `PayloadMismatch`. `returns` is the
        class of the result, if `fn` doesn't declare it. `policy` wins over the engine's policy.

        Examples:
            >>> await idem.execute("order:42", charge, scope="payments", payload={"amount": 5})
            'paid'
        """
        setup = self._internals.setup
        setup.check_function(fn)
        hint = returned_by(fn) if returns is None else returns
        call = setup.call(key, scope, payload, setup.rules(scope, policy), returns=hint)
        attempt = await self._internals.run(call, fn)
        return attempt.result

    async def run(
        self,
        key: str,
        fn: Callable[[], Awaitable[T]],
        *,
        scope: str = "default",
        payload: object = UNSET,
        returns: type[T] | None = None,
        policy: Policy | None = None,
    ) -> Outcome[T]:
        """Run like `execute`; return the value with its attempt, and whether it was replayed.

        `key`, `fn`, `scope`, `payload`, `returns` and `policy` are those of `execute`.

        Examples:
            >>> outcome = await idem.run("order:42", charge)
            >>> outcome.value, outcome.replayed, outcome.attempt.number
            ('paid', False, 1)
        """
        setup = self._internals.setup
        setup.check_function(fn)
        hint = returned_by(fn) if returns is None else returns
        call = setup.call(key, scope, payload, setup.rules(scope, policy), returns=hint)
        return Outcome.of(await self._internals.run(call, fn))

    async def consume(
        self,
        key: str,
        fn: Callable[[], Awaitable[object]],
        *,
        scope: str = "default",
        payload: object = UNSET,
        ttl: Duration | None = None,
        policy: Policy | None = None,
    ) -> bool:
        """Handle a message once; return True if it ran now, False if it was done before.

        A message that is running elsewhere raises `ConcurrentRequest` at once, so you never
        acknowledge it by mistake. `key`, `fn`, `scope`, `payload`, and `policy` are those of
        `execute`; `ttl` is how long semel remembers the message.

        Examples:
            >>> await idem.consume("message:7", charge, ttl=86400)
            True
            >>> await idem.consume("message:7", charge)
            False
        """
        setup = self.internals.setup
        setup.check_function(fn)
        retention = None if ttl is None else Policy(ttl=ttl)
        rules = setup.rules(scope, CONSUMING, retention, policy)
        if rules.max_attempts is not None and rules.failed_ttl < rules.ttl:
            # Else the record goes between two deliveries, and the count begins anew.
            counted = Policy(failed_ttl=rules.ttl)
            rules = setup.rules(scope, counted, CONSUMING, retention, policy)
        call = setup.call(key, scope, payload, rules, keeps_value=False)
        return not (await self.internals.run(call, fn)).replayed

    @overload
    def once(self, function: Callable[P, Coroutine[Any, Any, R]], /) -> AsyncOnce[P, R]: ...
    @overload
    def once(
        self,
        template: str | None = None,
        /,
        *,
        key: KeySource = None,
        scope: str | None = None,
        payload: PayloadSource = UNSET,
        ttl: Duration | None = None,
        message: str | None = None,
        policy: Policy | None = None,
    ) -> AsyncOnceDecorator: ...
    def once(self, given: Any = None, /, *, key: KeySource = None, **options: Any) -> Any:
        """Decorate a function, so that each call runs once per key made from its arguments.

        The key is a template such as "order:{order.id}", or `key`, which can also be a function of
        the arguments; without both, it is a digest of all arguments. `scope` defaults to the
        function's name. `ttl` and `message` are fields of a policy, and `policy` is a whole one.

        A call with the same key and other arguments raises `PayloadMismatch`. semel compares the
        arguments whose whole value isn't in the template. `payload` names others, or is a function
        of the arguments; None compares none.

        Examples:
            >>> @idem.once("order:{number}", ttl=3600)
            ... async def pay(number: int) -> str:
            ...     return f"paid {number}"
            >>> await pay(42)
            'paid 42'
        """
        return AsyncOnceDecorator.of(lambda: self, given, key=key, **options)

    def once_per(
        self,
        period: Period,
        /,
        *,
        tz: str | tzinfo | None = None,
        standby: Duration | bool = False,
        key: KeySource = None,
        scope: str | None = None,
        ttl: Duration | None = None,
        policy: Policy | None = None,
        clock: Callable[[], float] = time.time,
    ) -> AsyncOncePerDecorator:
        """Decorate a job that every machine starts, so that it runs once in each slot of time.

        A call returns True if it ran, and False if it was done in this slot or is running
        elsewhere. The slots are those of `period`: "minute", "hour", "day", "week" or "month" in
        the time zone `tz` (UTC unless given), a timedelta (counted from 1970 on), or a function
        that names the slot of the time it gets. A start up to a second early counts for the coming
        slot.

        If the function fails, or its process dies, a later call in the slot runs it. With `standby`
        a call waits for that: so many seconds, or up to the end of the slot (True).

        Arguments are part of the key as in `once`, with `key` and `scope` as there. `ttl` and
        `policy` say how a slot is remembered, for two slots at least. `clock` returns the seconds
        since 1970.

        Examples:
            >>> @idem.once_per("day", tz="Europe/Berlin")
            ... async def send_report() -> None:
            ...     print("sent")
            >>> await send_report()
            sent
            True
            >>> await send_report()
            False
        """
        return AsyncOncePerDecorator(
            lambda: self,
            period,
            tz=tz,
            standby=standby,
            key=key,
            scope=scope,
            ttl=ttl,
            policy=policy,
            clock=clock,
        )

    def attempt(
        self,
        key: str,
        *,
        returns: type[Result] | None = None,
        scope: str = "default",
        payload: object = UNSET,
        policy: Policy | None = None,
    ) -> AsyncAttemptContext[Result]:
        """Open a block that does by hand what `execute` does: it runs, or finds a stored result.

        `key`, `scope`, `payload`, and `policy` are those of `execute`. `returns` is the class of
        the result: a replay is read as that class, and type checkers know it.

        Examples:
            >>> async with idem.attempt("order:42", returns=str) as attempt:
            ...     if not attempt.replayed:
            ...         attempt.result = "paid"
            >>> attempt.result
            'paid'
        """
        setup = self.internals.setup
        call = setup.call(key, scope, payload, setup.rules(scope, policy), returns=returns)
        return AsyncAttemptContext(self.internals, call)

    def transaction(
        self,
        connection: object,
        key: str,
        *,
        returns: type[Result] | None = None,
        scope: str = "default",
        payload: object = UNSET,
        policy: Policy | None = None,
        table: str | None = None,
    ) -> AsyncTransactionContext[Result]:
        """Write the record in your own open transaction.

        You commit the record and your rows together, or neither. `connection` is a connection or a
        session with an open transaction, and `table` is the name of the record table, if it is
        another one there. `key`, `scope`, `payload`, `returns` and `policy`
        are those of `attempt`.

        Examples:
            >>> async with idem.transaction(connection, "order:42") as attempt:
            ...     if not attempt.replayed:
            ...         attempt.result = "paid"
        """
        setup = self.internals.setup
        call = setup.call(key, scope, payload, setup.rules(scope, policy), returns=returns)
        return AsyncTransactionContext(self.internals, call, connection, table)

    def transactions(
        self,
        connection: object,
        keys: Iterable[str],
        *,
        scope: str = "default",
        policy: Policy | None = None,
        table: str | None = None,
    ) -> AsyncTransactionsContext:
        """Write the records of several `keys` in your transaction; yield a dict of their attempts.

        semel claims them in one order, so two such transactions don't block each other.
        `connection`, `scope`, `policy` and `table` are those of `transaction`.
        """
        transactions.check_keys(keys)
        setup = self.internals.setup
        rules = setup.rules(scope, policy)
        calls = {key: setup.call(key, scope, UNSET, rules) for key in keys}
        # In one order for everybody: two transactions with the same keys then never deadlock.
        in_order = sorted(calls.items(), key=lambda item: item[1].identity.digest)
        return AsyncTransactionsContext(
            {
                key: AsyncTransactionContext(self.internals, call, connection, table)
                for key, call in in_order
            }
        )

    async def run_transaction(
        self,
        begin: Callable[[], AbstractAsyncContextManager[S]],
        key: str,
        fn: Callable[[S], Awaitable[T]],
        *,
        scope: str = "default",
        payload: object = UNSET,
        policy: Policy | None = None,
        retries: int = RETRIES,
    ) -> T:
        """Run `fn` once per key in a transaction that `begin()` opens, and repeat it on a deadlock.

        Duplicates get the stored result. `begin` is `Session.begin`, for example, and `fn` gets the
        connection that it opens. semel repeats the unit of work up to `retries` times. `key`,
        `scope`, `payload` and `policy` are those of `execute`.
        """
        transactions.check_begin(begin)
        setup = self.internals.setup
        setup.check_function(fn)
        rules = setup.rules(scope, policy)
        call = setup.call(key, scope, payload, rules, returns=returned_by(fn))
        attempt = await aio_run_in_transaction(self.internals, begin, call, fn, retries)
        return attempt.result

    @property
    def marks(self) -> AsyncMarks:
        """Marks on the same records: check, set, do, results, and batches of them.

        Examples:
            >>> await idem.marks.set("order:42")
            True
            >>> await idem.marks.check("order:42")
            True
        """
        return AsyncMarks(self)

    async def peek(self, key: str, *, scope: str = "default") -> Record | None:
        """Return the record of a `key` in a `scope`, or None; nothing changes.

        Examples:
            >>> await idem.peek("order:42") is None
            True
        """
        identity = self.internals.setup.identity(key, scope)
        self.internals.loop_guard.check(identity)
        try:
            return await self.internals.store.get(identity)
        except IdempotencyError as error:
            raise_about(error, identity)

    async def records(
        self, *, scope: str | None = None, prefix: str = "", state: State | None = None
    ) -> AsyncIterator[Record]:
        """Iterate over records, page by page, optionally of one `scope` or `state`.

        `prefix` is the beginning of the key.
        """
        self.internals.loop_guard.check()
        if ScanRequest in self.internals.store.unsupported:
            raise ConfigError(f"{type(self.internals.store).__name__} cannot list its records")
        cursor: str | None = None
        while True:
            page = await self.internals.store.scan(
                scope=scope, prefix=prefix, state=state, cursor=cursor
            )
            for record in page.records:
                yield record
            cursor = page.cursor
            if cursor is None:
                return

    async def forget(self, key: str, *, scope: str = "default") -> bool:
        """Remove the record of a `key` in a `scope`, so that the next call runs again.

        Return False if there was none.
        """
        identity = self.internals.setup.identity(key, scope)
        self.internals.loop_guard.check(identity)
        try:
            return await self.internals.store.forget(identity)
        except IdempotencyError as error:
            raise_about(error, identity)
        finally:
            self.internals.forgotten(identity)

    async def migrate(self) -> int | None:
        """Create or upgrade the store's tables, and return their version.

        You can repeat it; `semel migrate` does the same. Return None if the store needs no tables.

        Examples:
            >>> await idem.migrate()
            1
        """
        self.internals.loop_guard.check()
        return await self.internals.store.migrate()

    async def close(self, timeout: Duration = 5.0) -> None:  # noqa: ASYNC109 - twin of a thread's
        """Reject new calls, wait until running ones are saved, and close what the engine opened.

        A call whose function has not started yet raises `StoreUnavailable`, and semel releases its
        claim. semel stops renewing attempts that still run after `timeout`; their keys are then
        abandoned, and the policy decides.

        If a function that runs under this engine calls it, or a signal handler that interrupted it
        or its claim, it returns at once. The engine then closes when the function's result is
        saved, or its claim is released.
        """
        await self.internals.close(seconds("timeout", timeout, zero=True))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class AsyncAttemptContext(Generic[Result]):
    """One attempt by hand, created by `attempt()`."""

    def __init__(self, runs: AsyncRuns, call: Call) -> None:
        self._runs = runs
        self._call = call

    async def __aenter__(self) -> Attempt[Result]:
        attempt: Attempt[Result] | None = None
        try:
            attempt = self._attempt = await self._runs.begin(self._call)
            if not attempt.replayed:
                attempt.__enter__()
            return attempt  # noqa: TRY300 - inside: an interruption of this line, too, gives it back
        except BaseException as error:
            self._runs.settle(self._call, error, attempt)
            raise

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            attempt = self._attempt
            if attempt.replayed:
                return
            attempt.__exit__(kind, error, trace)
            if error is None:
                attempt.result = await self._runs.succeeded(self._call, attempt, attempt.result)
            else:
                await self._runs.failed(self._call, attempt, error)
        except BaseException as failure:
            attempt = self._attempt
            if error is None:
                self._runs.settle(self._call, failure, attempt, attempt.result)
            else:
                self._runs.settle(self._call, error, attempt)
            raise
