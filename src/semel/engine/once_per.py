"""Async functions that run once in each slot of time, however many processes start them."""

from __future__ import annotations

import functools
import time
from collections.abc import Awaitable, Callable, Coroutine
from datetime import tzinfo
from types import MethodType
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Generic,
    ParamSpec,
    TypeVar,
    cast,
    overload,
)

from msgspec import UNSET

from semel.core.policy import Duration, Policy
from semel.core.schedules import Period, Slot
from semel.decorating import (
    KeySource,
    Plan,
    Timing,
    bound_in_class_methods,
    scope_of_script,
)
from semel.engine.colours.tasks import mark_coroutine_function
from semel.errors import ConcurrentRequest, WaitTimeout

if TYPE_CHECKING:
    from semel.core.attempts import Attempt
    from semel.core.records import Record
    from semel.engine.facade import AsyncIdempotency
    from semel.engine.runs import AsyncRuns
    from semel.engine.setup import Call

P = ParamSpec("P")
Q = ParamSpec("Q")
T = TypeVar("T")
I = TypeVar("I")  # noqa: E741 - the instance


async def aio_run_unless_taken(
    runs: AsyncRuns, call: Call, fn: Callable[..., Awaitable[T]], /, *args: Any, **kwargs: Any
) -> Attempt[T] | None:
    """Run a function; None = it was done before, or it runs elsewhere and the wait is over."""
    try:
        attempt = await runs.run(call, fn, *args, **kwargs)
    except (ConcurrentRequest, WaitTimeout) as error:
        # The function may have made calls of its own: their errors are not about this one.
        if (error.scope, error.key_digest) != (call.identity.scope, call.identity.key_digest):
            raise
        return None
    return None if attempt.replayed else attempt


class AsyncOncePer(Generic[P]):
    """A function that runs once in each slot of time, created by `once_per`.

    A call returns True if the function ran, and False if it was done in this slot or is running
    elsewhere. semel doesn't keep what the function returns.
    """

    def __init__(
        self,
        engine: Callable[[], AsyncIdempotency],
        plan: Plan,
        timing: Timing,
        bound_to: tuple[()] | tuple[object] = (),
    ) -> None:
        # A bound one shows the signature that its callers see: without the instance.
        wrapped = MethodType(plan.fn, *bound_to) if bound_to else plan.fn
        functools.update_wrapper(cast("Any", self), wrapped)
        self._engine = engine
        self._plan = plan
        self._timing = timing
        self._bound_to = bound_to
        mark_coroutine_function(self)

    async def __call__(self, *args: P.args, **kwargs: P.kwargs) -> bool:
        """Run, unless it was done in this slot or runs elsewhere; return whether it ran."""
        plan, arguments = self._plan, (*self._bound_to, *args)
        slot = self.slot()
        runs = self._engine().internals
        call = runs.setup.call(
            self._key(slot, arguments, kwargs),
            plan.scope,
            UNSET,
            self._timing.rules(runs.setup.rules(plan.scope, *plan.policies), slot),
            keeps_value=False,
        )
        return await aio_run_unless_taken(runs, call, plan.fn, *arguments, **kwargs) is not None

    def slot(self) -> Slot:
        """Return the slot that a call now counts for."""
        return self._timing.slot()

    @property
    def scope(self) -> str:
        """The scope of its records: `scope=`, or the function's module and name."""
        return self._plan.scope

    def key_for(self, *args: P.args, **kwargs: P.kwargs) -> str:
        """Return the key that a call with these arguments would use now."""
        return self._key(self.slot(), (*self._bound_to, *args), kwargs)

    async def forget(self, *args: P.args, **kwargs: P.kwargs) -> bool:
        """Remove the record of this slot, so that the next call runs again."""
        return await self._engine().forget(self.key_for(*args, **kwargs), scope=self._plan.scope)

    async def peek(self, *args: P.args, **kwargs: P.kwargs) -> Record | None:
        """Return the record of this slot, or None, without running anything."""
        return await self._engine().peek(self.key_for(*args, **kwargs), scope=self._plan.scope)

    # Each kind is known by its first parameter, as in `once`.
    @overload  # a method, through its class
    def __get__(
        self: Callable[Concatenate[I, Q], Coroutine[Any, Any, bool]], instance: None, owner: type[I]
    ) -> AsyncOncePer[P]: ...
    @overload  # a method
    def __get__(
        self: Callable[Concatenate[I, Q], Coroutine[Any, Any, bool]],
        instance: I,
        owner: type | None = None,
    ) -> AsyncOncePer[Q]: ...
    @overload  # a class method
    def __get__(  # type: ignore[misc]  # it is no supertype of every OncePer: that is the point
        self: Callable[Concatenate[type[I], Q], Coroutine[Any, Any, bool]],
        instance: I | None,
        owner: type[I],
    ) -> AsyncOncePer[Q]: ...
    @overload  # a static method
    def __get__(self, instance: object, owner: type | None = None) -> AsyncOncePer[P]: ...
    def __get__(self, instance: Any, owner: type | None = None) -> AsyncOncePer[...]:
        """Bind to an instance or a class, as functions do."""
        if self._plan.binding == "class":
            return AsyncOncePer(self._engine, self._plan, self._timing, (owner,))
        if instance is None or self._plan.binding == "static":
            return self
        return AsyncOncePer(self._engine, self._plan, self._timing, (instance,))

    def __reduce__(self) -> str:
        """A pickle names a decorated function, as it names any function."""
        return self._plan.name

    def _key(self, slot: Slot, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """The slot's name, and what the arguments or `key=` add to it, if there are any."""
        plan = self._plan
        arrived = plan.arrived(args, kwargs)
        return f"{slot.name}:{plan.key_of(arrived)}" if plan.tells_calls_apart else slot.name


class AsyncOncePerDecorator:
    """The decorator that `once_per(...)` returns."""

    def __init__(
        self,
        engine: Callable[[], AsyncIdempotency],
        period: Period,
        *,
        tz: str | tzinfo | None = None,
        standby: Duration | bool = False,
        key: KeySource = None,
        scope: str | None = None,
        ttl: Duration | None = None,
        policy: Policy | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._engine = engine
        self._timing = Timing(period, tz=tz, standby=standby, ttl=ttl, policy=policy, clock=clock)
        self._scope = scope
        self._plan = functools.partial(
            Plan,
            asynchronous=True,
            key=key,
            payload=None,
            ttl=ttl,
            message=None,
            policy=policy,
        )

    def __call__(self, fn: Callable[P, Coroutine[Any, Any, object]]) -> AsyncOncePer[P]:
        """Decorate this function."""
        scope = scope_of_script(fn) if self._scope is None else self._scope
        plan = self._plan(fn, scope=scope)
        return bound_in_class_methods(AsyncOncePer(self._engine, plan, self._timing), plan.name)
