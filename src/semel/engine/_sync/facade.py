# Generated from engine/facade.py by `make generate`: change that file instead.
"""The engine for threads: execute once per key, replay the result to every duplicate."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
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
from semel.engine._sync.marks import Marks
from semel.engine._sync.once import Once, OnceDecorator
from semel.engine._sync.transactions import TransactionRunner
from semel.engine.colours.threads import aside, can_go_on, drain, sleep
from semel.engine.setup import Call
from semel.errors import ConfigError, IdempotencyError, raise_about
from semel.stores.base import Scannable

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

CONSUMING = Policy(concurrent="reject")


class Idempotency(TransactionRunner):
    """Makes operations safe to retry: one execution per key, one answer for every duplicate.

    `url_or_store` is a store URL, a store object, or nothing (then the settings decide).
    Any number of threads may use it.

    `policy` is the policy of all calls, `scopes` what differs in a scope. `hooks` are called with
    each event. `prefix` and `key_pattern` are as in the settings. `codecs` read old results, beside
    those of the policies. `cache` is how many finished results are kept in this process, each for
    `cache_ttl` at most. `max_waiting` is how many calls may wait for others at the same time.

    Examples:
        >>> with Idempotency("memory://", policy=Policy(ttl=3600)) as idem:
        ...     idem.execute("order:42", charge)
        'paid'
    """

    def execute(
        self,
        key: str,
        fn: Callable[[], T],
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
            >>> idem.execute("order:42", charge, scope="payments", payload={"amount": 5})
            'paid'
        """
        self._check_function(fn)
        hint = returned_by(fn) if returns is None else returns
        call = self._call(key, scope, payload, self._rules(scope, policy), returns=hint)
        attempt = self._run(call, fn)
        return attempt.result

    def run(
        self,
        key: str,
        fn: Callable[[], T],
        *,
        scope: str = "default",
        payload: object = UNSET,
        returns: type[T] | None = None,
        policy: Policy | None = None,
    ) -> Outcome[T]:
        """Do what `execute` does, and tell whether the value was replayed and by which attempt.

        `key`, `fn`, `scope`, `payload`, `returns` and `policy` are those of `execute`.

        Examples:
            >>> outcome = idem.run("order:42", charge)
            >>> outcome.value, outcome.replayed, outcome.attempt.number
            ('paid', False, 1)
        """
        self._check_function(fn)
        hint = returned_by(fn) if returns is None else returns
        call = self._call(key, scope, payload, self._rules(scope, policy), returns=hint)
        return Outcome.of(self._run(call, fn))

    def consume(
        self,
        key: str,
        fn: Callable[[], object],
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
            >>> idem.consume("message:7", charge, ttl=86400)
            True
            >>> idem.consume("message:7", charge)
            False
        """
        self._check_function(fn)
        retention = None if ttl is None else Policy(ttl=ttl)
        rules = self._rules(scope, CONSUMING, retention, policy)
        call = self._call(key, scope, payload, rules, keeps_value=False)
        return not self._run(call, fn).replayed

    @overload
    def once(self, function: Callable[P, R], /) -> Once[P, R]: ...
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
    ) -> OnceDecorator: ...
    def once(self, given: Any = None, /, *, key: KeySource = None, **options: Any) -> Any:
        """Decorate a function: each call runs once per key made from its arguments.

        The key is a template such as "order:{order.id}", or `key`, which may also be a function of
        the arguments; without both it is a digest of all arguments. `scope` is the name of the
        function unless given. `payload` names the arguments to compare. `ttl` and `message` are
        fields of a policy, and `policy` is a whole one.

        Examples:
            >>> @idem.once("order:{number}", ttl=3600)
            ... def pay(number: int) -> str:
            ...     return f"paid {number}"
            >>> pay(42)
            'paid 42'
        """
        return OnceDecorator.of(lambda: self, given, key=key, **options)

    @overload
    def attempt(
        self,
        key: str,
        *,
        returns: type[T],
        scope: str = "default",
        payload: object = UNSET,
        policy: Policy | None = None,
    ) -> AttemptContext[T]: ...
    @overload
    def attempt(
        self,
        key: str,
        *,
        returns: None = None,
        scope: str = "default",
        payload: object = UNSET,
        policy: Policy | None = None,
    ) -> AttemptContext[Any]: ...
    def attempt(
        self,
        key: str,
        *,
        returns: type[Any] | None = None,
        scope: str = "default",
        payload: object = UNSET,
        policy: Policy | None = None,
    ) -> AttemptContext[Any]:
        """Do what `execute` does by hand, in a block that may run or find a stored result.

        `key`, `scope`, `payload` and `policy` are those of `execute`. `returns` is the class of the
        result: a replay is read as that class, and type checkers know it.

        Examples:
            >>> with idem.attempt("order:42", returns=str) as attempt:
            ...     if not attempt.replayed:
            ...         attempt.result = "paid"
            >>> attempt.result
            'paid'
        """
        call = self._call(key, scope, payload, self._rules(scope, policy), returns=returns)
        return AttemptContext(self, call)

    @property
    def marks(self) -> Marks:
        """Plain marks on the same records: check, set, do, results, and batches of them.

        Examples:
            >>> idem.marks.set("order:42")
            True
            >>> idem.marks.check("order:42")
            True
        """
        return Marks(self)

    def peek(self, key: str, *, scope: str = "default") -> Record | None:
        """Read the record of a `key` in a `scope`, without changing anything; None: there is none.

        Examples:
            >>> idem.peek("order:42") is None
            True
        """
        identity = self._identity(key, scope)
        try:
            return self._store.get(identity)
        except IdempotencyError as error:
            raise_about(error, identity)

    def records(
        self, *, scope: str | None = None, prefix: str = "", state: State | None = None
    ) -> Iterator[Record]:
        """List records, page by page, of one `scope` or `state` if given.

        `prefix` is the beginning of the key.
        """
        if not isinstance(self._store, Scannable):
            raise ConfigError(f"{type(self._store).__name__} cannot list its records")
        cursor: str | None = None
        while True:
            page = self._store.scan(scope=scope, prefix=prefix, state=state, cursor=cursor)
            for record in page.records:
                yield record
            cursor = page.cursor
            if cursor is None:
                return

    def forget(self, key: str, *, scope: str = "default") -> bool:
        """Remove the record of a `key` in a `scope`: the next call runs again.

        False when there was none.
        """
        identity = self._identity(key, scope)
        try:
            return self._store.forget(identity)
        except IdempotencyError as error:
            raise_about(error, identity)
        finally:
            self._forgotten(identity)

    def close(self, timeout: Duration = 5.0) -> None:
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
            self._close((), (), end)

    def _close(self, own: Sequence[Lease], claims: Sequence[bytes], end: float) -> None:
        """Close after these attempts, while they can go on, and after the others until `end`."""
        while can_go_on(self._leases.running(own)) or self._leases.claims(claims):
            sleep(0.01)
        while monotonic() < end and (self._leases.running() or self._leases.claims()):
            sleep(0.01)
        drain(self._tasks, max(0.0, end - monotonic()))
        self._timer.stop()
        self._watch.stop()
        for timer in self._timers.values():
            timer.stop()
        for lease, ask in self._leases.unsaved():
            if not self._save_late(lease, ask) and monotonic() >= end:
                break  # The store is away and the time is over: the leases end by themselves.
        self._disown_doubtful(math.inf, end)
        if self._opening is not None:
            self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AttemptContext(Generic[Result]):
    """One attempt by hand; made by `attempt()`."""

    def __init__(self, engine: Idempotency, call: Call) -> None:
        self._engine = engine
        self._call = call

    def __enter__(self) -> Attempt[Result]:
        attempt: Attempt[Result] | None = None
        try:
            attempt = self._attempt = self._engine._begin(self._call)
            if not attempt.replayed:
                attempt.__enter__()
            return attempt  # noqa: TRY300 - inside: an interruption of this line, too, gives it back
        except BaseException as error:
            self._engine._settle(self._call, error, attempt)
            raise

    def __exit__(
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
                attempt.result = self._engine._succeeded(self._call, attempt, attempt.result)
            else:
                self._engine._failed(self._call, attempt, error)
        except BaseException as failure:
            attempt = self._attempt
            if error is None:
                self._engine._settle(self._call, failure, attempt, attempt.result)
            else:
                self._engine._settle(self._call, error, attempt)
            raise
