"""The default engine behind `semel.execute` and its siblings: made at the first use.

`configure` decides what it is made of. Decorated functions ask for it at each call, so that
decorating at import time and configuring later in `main` works. A forked child never waits for a
thread that only its parent has.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import tzinfo
from typing import Any, ParamSpec, TypeVar, Unpack, overload

from msgspec import UNSET

from semel.core.attempts import Outcome, Result
from semel.core.policy import Duration, Policy
from semel.core.process import ForkAware, follow_forks, notice_fork
from semel.core.schedules import Period
from semel.decorating import KeySource, PayloadSource
from semel.engine._sync.facade import AttemptContext, Idempotency
from semel.engine._sync.marks import Marks
from semel.engine._sync.once import Once, OnceDecorator
from semel.engine._sync.once_per import OncePerDecorator
from semel.engine.setup import EngineOptions
from semel.stores.base import Store

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


class _Default(ForkAware):
    """Holds the one engine of the module-level functions."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._engine: Idempotency | None = None
        follow_forks(self)

    def get(self) -> Idempotency:
        if self._engine is None:
            notice_fork()
            with self._lock:
                if self._engine is None:
                    self._engine = Idempotency()
        return self._engine

    def replace(self, engine: Idempotency) -> None:
        notice_fork()
        with self._lock:
            previous, self._engine = self._engine, engine
        if previous is not None:
            previous.close()

    def after_fork_in_child(self) -> None:
        """Free the lock: the thread that held it exists only in the parent.

        The engine is one assignment, so it is there whole or not at all.
        """
        self._lock = threading.RLock()


_default = _Default()
default_engine = _default.get
"""Return the engine of the module-level functions; made from the settings unless configured."""


def configure(
    url_or_store: str | Store | None = None, **options: Unpack[EngineOptions]
) -> Idempotency:
    """Create the default engine anew; `url_or_store` and `options` are those of `Idempotency`.

    Examples:
        >>> engine = configure("memory://", policy=Policy(ttl=3600))
        >>> execute("order:42", lambda: "paid")
        'paid'
    """
    engine = Idempotency(url_or_store, **options)
    _default.replace(engine)
    return engine


def execute(
    key: str,
    fn: Callable[[], T],
    *,
    scope: str = "default",
    payload: object = UNSET,
    returns: type[T] | None = None,
    policy: Policy | None = None,
) -> T:
    """Call `Idempotency.execute` on the default engine.

    Examples:
        >>> execute("order:42", charge, scope="payments")
        'paid'
    """
    return default_engine().execute(
        key, fn, scope=scope, payload=payload, returns=returns, policy=policy
    )


def run(
    key: str,
    fn: Callable[[], T],
    *,
    scope: str = "default",
    payload: object = UNSET,
    returns: type[T] | None = None,
    policy: Policy | None = None,
) -> Outcome[T]:
    """Call `Idempotency.run` on the default engine.

    Examples:
        >>> run("order:42", charge).replayed
        False
    """
    return default_engine().run(
        key, fn, scope=scope, payload=payload, returns=returns, policy=policy
    )


def consume(
    key: str,
    fn: Callable[[], object],
    *,
    scope: str = "default",
    payload: object = UNSET,
    ttl: Duration | None = None,
    policy: Policy | None = None,
) -> bool:
    """Call `Idempotency.consume` on the default engine.

    Examples:
        >>> consume("message:7", charge)
        True
    """
    return default_engine().consume(key, fn, scope=scope, payload=payload, ttl=ttl, policy=policy)


@overload
def once(function: Callable[P, R], /) -> Once[P, R]: ...
@overload
def once(
    template: str | None = None,
    /,
    *,
    key: KeySource = None,
    scope: str | None = None,
    payload: PayloadSource = UNSET,
    ttl: Duration | None = None,
    message: str | None = None,
    policy: Policy | None = None,
) -> OnceDecorator: ...
def once(given: Any = None, /, *, key: KeySource = None, **options: Any) -> Any:
    """Decorate with `Idempotency.once` on the default engine, which each call looks up.

    Examples:
        >>> @once("order:{number}")
        ... def pay(number: int) -> str:
        ...     return f"paid {number}"
        >>> pay(42)
        'paid 42'
    """
    return OnceDecorator.of(default_engine, given, key=key, **options)


def once_per(
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
) -> OncePerDecorator:
    """Decorate with `Idempotency.once_per` on the default engine, which each call looks up.

    Examples:
        >>> @once_per("day", tz="Europe/Berlin")
        ... def send_report() -> None:
        ...     print("sent")
        >>> send_report()
        sent
        True
    """
    return OncePerDecorator(
        default_engine,
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
    key: str,
    *,
    returns: type[Result] | None = None,
    scope: str = "default",
    payload: object = UNSET,
    policy: Policy | None = None,
) -> AttemptContext[Result]:
    """Open `Idempotency.attempt` on the default engine.

    Examples:
        >>> with attempt("order:42") as running:
        ...     running.result = "paid"
    """
    return default_engine().attempt(
        key, returns=returns, scope=scope, payload=payload, policy=policy
    )


class _DefaultMarks:
    """`Idempotency.marks` of the default engine, asked for at each use."""

    def __getattr__(self, name: str) -> Any:
        return getattr(default_engine().marks, name)


marks: Marks = _DefaultMarks()  # type: ignore[assignment]
