"""The engine for asyncio: execute once per key, replay the result to every duplicate."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from functools import partial
from time import monotonic
from types import TracebackType
from typing import Any, Generic, ParamSpec, Self, TypeVar, overload

from msgspec import UNSET

from semel.attempts import Attempt, Outcome, Result
from semel.core.codec_classes import returned_by
from semel.core.leases import Lease
from semel.core.policy import Duration, Policy, seconds
from semel.core.records import Record, State
from semel.decorating import KeySource, PayloadSource
from semel.engine.colours.tasks import aside, can_go_on, drain, sleep
from semel.engine.marks import AsyncMarks
from semel.engine.once import AsyncOnce, AsyncOnceDecorator
from semel.engine.setup import Call
from semel.engine.transactions import AsyncTransactionRunner
from semel.errors import ConfigError, IdempotencyError, raise_about
from semel.stores.base import AsyncScannable

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

CONSUMING = Policy(concurrent="reject")


class AsyncIdempotency(AsyncTransactionRunner):
    """Makes operations safe to retry: one execution per key, one answer for every duplicate.

    `url_or_store` is a store URL, a store object, or nothing (then the settings decide).
    It belongs to the first event loop that uses it.

    `policy` is the policy of all calls, `scopes` what differs in a scope. `hooks` are called with
    each event. `prefix` and `key_pattern` are as in the settings. `codecs` read old results, beside
    those of the policies. `cache` is how many finished results are kept in this process, each for
    `cache_ttl` at most. `max_waiting` is how many calls may wait for others at the same time.

    Examples:
        >>> async with AsyncIdempotency("memory://", policy=Policy(ttl=3600)) as idem:
        ...     await idem.execute("order:42", charge)
        'paid'
    """

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
        """Run `fn` once per `key` and return its result; duplicates wait, then get the same.

        `scope` is the kind of operation: each has its own keys. `payload` is what every call with
        this key has to say again: another one raises `PayloadMismatch`. `returns` is the class of
        the result, where `fn` does not declare it. `policy` wins over that of the engine.

        Examples:
            >>> await idem.execute("order:42", charge, scope="payments", payload={"amount": 5})
            'paid'
        """
        self._check_function(fn)
        hint = returned_by(fn) if returns is None else returns
        call = self._call(key, scope, payload, self._rules(scope, policy), returns=hint)
        attempt = await self._run(call, fn)
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
        """Do what `execute` does, and tell whether the value was replayed and by which attempt.

        `key`, `fn`, `scope`, `payload`, `returns` and `policy` are those of `execute`.

        Examples:
            >>> outcome = await idem.run("order:42", charge)
            >>> outcome.value, outcome.replayed, outcome.attempt.number
            ('paid', False, 1)
        """
        self._check_function(fn)
        hint = returned_by(fn) if returns is None else returns
        call = self._call(key, scope, payload, self._rules(scope, policy), returns=hint)
        return Outcome.of(await self._run(call, fn))

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
        """Handle a message once: True = ran now, False = was done before.

        A message that is being handled elsewhere raises `ConcurrentRequest` at once, so that it
        is never acknowledged as done by mistake. `key`, `fn`, `scope`, `payload` and `policy` are
        those of `execute`; `ttl` is how long it is remembered that the message was handled.

        Examples:
            >>> await idem.consume("message:7", charge, ttl=86400)
            True
            >>> await idem.consume("message:7", charge)
            False
        """
        self._check_function(fn)
        retention = None if ttl is None else Policy(ttl=ttl)
        rules = self._rules(scope, CONSUMING, retention, policy)
        call = self._call(key, scope, payload, rules, keeps_value=False)
        return not (await self._run(call, fn)).replayed

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
        payload: PayloadSource = None,
        ttl: Duration | None = None,
        message: str | None = None,
        policy: Policy | None = None,
    ) -> AsyncOnceDecorator: ...
    def once(self, given: Any = None, /, *, key: KeySource = None, **options: Any) -> Any:
        """Decorate a function: each call runs once per key made from its arguments.

        The key is a template such as "order:{order.id}", or `key`, which may also be a function of
        the arguments; without both it is a digest of all arguments. `scope` is the name of the
        function unless given. `payload` names the arguments to compare. `ttl` and `message` are
        fields of a policy, and `policy` is a whole one.

        Examples:
            >>> @idem.once("order:{number}", ttl=3600)
            ... async def pay(number: int) -> str:
            ...     return f"paid {number}"
            >>> await pay(42)
            'paid 42'
        """
        return AsyncOnceDecorator.of(lambda: self, given, key=key, **options)

    @overload
    def attempt(
        self,
        key: str,
        *,
        returns: type[T],
        scope: str = "default",
        payload: object = UNSET,
        policy: Policy | None = None,
    ) -> AsyncAttemptContext[T]: ...
    @overload
    def attempt(
        self,
        key: str,
        *,
        returns: None = None,
        scope: str = "default",
        payload: object = UNSET,
        policy: Policy | None = None,
    ) -> AsyncAttemptContext[Any]: ...
    def attempt(
        self,
        key: str,
        *,
        returns: type[Any] | None = None,
        scope: str = "default",
        payload: object = UNSET,
        policy: Policy | None = None,
    ) -> AsyncAttemptContext[Any]:
        """Do what `execute` does by hand, in a block that may run or find a stored result.

        `key`, `scope`, `payload` and `policy` are those of `execute`. `returns` is the class of the
        result: a replay is read as that class, and type checkers know it.

        Examples:
            >>> async with idem.attempt("order:42", returns=str) as attempt:
            ...     if not attempt.replayed:
            ...         attempt.result = "paid"
            >>> attempt.result
            'paid'
        """
        call = self._call(key, scope, payload, self._rules(scope, policy), returns=returns)
        return AsyncAttemptContext(self, call)

    @property
    def marks(self) -> AsyncMarks:
        """Plain marks on the same records: check, set, do, results, and batches of them.

        Examples:
            >>> await idem.marks.set("order:42")
            True
            >>> await idem.marks.check("order:42")
            True
        """
        return AsyncMarks(self)

    async def peek(self, key: str, *, scope: str = "default") -> Record | None:
        """Read the record of a `key` in a `scope`, without changing anything; None: there is none.

        Examples:
            >>> await idem.peek("order:42") is None
            True
        """
        identity = self._identity(key, scope)
        self._home.check(identity)
        try:
            return await self._store.get(identity)
        except IdempotencyError as error:
            raise_about(error, identity)

    async def records(
        self, *, scope: str | None = None, prefix: str = "", state: State | None = None
    ) -> AsyncIterator[Record]:
        """List records, page by page, of one `scope` or `state` if given.

        `prefix` is the beginning of the key.
        """
        self._home.check()
        if not isinstance(self._store, AsyncScannable):
            raise ConfigError(f"{type(self._store).__name__} cannot list its records")
        cursor: str | None = None
        while True:
            page = await self._store.scan(scope=scope, prefix=prefix, state=state, cursor=cursor)
            for record in page.records:
                yield record
            cursor = page.cursor
            if cursor is None:
                return

    async def forget(self, key: str, *, scope: str = "default") -> bool:
        """Remove the record of a `key` in a `scope`: the next call runs again.

        False when there was none.
        """
        identity = self._identity(key, scope)
        self._home.check(identity)
        try:
            return await self._store.forget(identity)
        except IdempotencyError as error:
            raise_about(error, identity)
        finally:
            self._forgotten(identity)

    async def close(self, timeout: Duration = 5.0) -> None:  # noqa: ASYNC109 - twin of a thread's
        """Take no new calls, let running ones end and save, and close what was opened here.

        A call whose function has not started yet raises `StoreUnavailable`; its claim is given
        back. Attempts that still run after `timeout` are not renewed any more; what happens to
        their keys is what the policy says of abandoned ones.

        Called by a function while it runs under this engine, or by a signal handler that has
        interrupted it or its claim, this returns at once: the engine is closed when the function's
        result is saved, or the claim is given back.
        """
        self._closed = True
        end = monotonic() + seconds("timeout", timeout, zero=True)
        own = self._held_here()
        claims = self._claiming_here()
        if own or claims:
            # Waiting here would hold up the very function, or claim, that is waited for.
            self._closing = aside(
                partial(self._close, own, claims, end), partial(self._close, (), (), end)
            )
        else:
            await self._close((), (), end)

    async def _close(self, own: Sequence[Lease], claims: Sequence[bytes], end: float) -> None:
        """Close after these attempts, while they can go on, and after the others until `end`."""
        while can_go_on(self._leases.running(own)) or self._leases.claims(claims):
            await sleep(0.01)
        while monotonic() < end and (self._leases.running() or self._leases.claims()):
            await sleep(0.01)
        await drain(self._tasks, max(0.0, end - monotonic()))
        await self._timer.stop()
        await self._watch.stop()
        for timer in self._timers.values():
            await timer.stop()
        for lease, ask in self._leases.unsaved():
            if not await self._save_late(lease, ask) and monotonic() >= end:
                break  # The store is away and the time is over: the leases end by themselves.
        await self._disown_doubtful(math.inf, end)
        if self._opening is not None:
            await self._store.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class AsyncAttemptContext(Generic[Result]):
    """One attempt by hand; made by `attempt()`."""

    def __init__(self, engine: AsyncIdempotency, call: Call) -> None:
        self._engine = engine
        self._call = call

    async def __aenter__(self) -> Attempt[Result]:
        attempt: Attempt[Result] | None = None
        try:
            attempt = self._attempt = await self._engine._begin(self._call)
            if not attempt.replayed:
                attempt.__enter__()
            return attempt  # noqa: TRY300 - inside: an interruption of this line, too, gives it back
        except BaseException as error:
            self._engine._settle(self._call, error, attempt)
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
                attempt.result = await self._engine._succeeded(self._call, attempt, attempt.result)
            else:
                await self._engine._failed(self._call, attempt, error)
        except BaseException as failure:
            attempt = self._attempt
            if error is None:
                self._engine._settle(self._call, failure, attempt, attempt.result)
            else:
                self._engine._settle(self._call, error, attempt)
            raise
