# Generated from engine/once.py by `make generate`: change that file instead.
"""Functions that run once per key."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MethodType
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Generic,
    ParamSpec,
    TypeVar,
    Unpack,
    cast,
    overload,
)

from msgspec import UNSET

from semel.core.attempts import Outcome
from semel.decorating import KeySource, PayloadSource, Plan, Unknown, bound_in_class_methods
from semel.errors import ConfigError, SerializationError

if TYPE_CHECKING:
    from semel.core.policy import Duration, Policy
    from semel.core.records import Record
    from semel.engine._sync.facade import Idempotency
    from semel.engine._sync.runs import Runs
    from semel.engine.setup import Call

P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R")
I = TypeVar("I")  # noqa: E741 - the instance


class Once(Generic[P, R]):
    """A function that runs once per key, created by `once`."""

    def __init__(
        self,
        engine: Callable[[], Idempotency],
        plan: Plan,
        bound_to: tuple[()] | tuple[object] = (),
    ) -> None:
        # A bound one shows the signature that its callers see: without the instance.
        wrapped = MethodType(plan.fn, *bound_to) if bound_to else plan.fn
        functools.update_wrapper(cast("Any", self), wrapped)
        self._engine = engine
        self._plan = plan
        self._bound_to = bound_to

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the function once per key; a duplicate gets the first result."""
        plan, arguments = self._plan, (*self._bound_to, *args) if self._bound_to else args
        runs = self._engine().internals
        call = self._prepared(runs, arguments, kwargs)
        attempt = runs.run(call, plan.fn, *arguments, **kwargs)
        result: R = attempt.result
        return result

    def run(self, *args: P.args, **kwargs: P.kwargs) -> Outcome[R]:
        """Run like a call; return the value with its attempt, and whether it was replayed."""
        plan, arguments = self._plan, (*self._bound_to, *args) if self._bound_to else args
        runs = self._engine().internals
        call = self._prepared(runs, arguments, kwargs)
        attempt = runs.run(call, plan.fn, *arguments, **kwargs)
        return Outcome.of(attempt)

    @property
    def scope(self) -> str:
        """The scope of its records: `scope=`, or the function's module and name."""
        return self._plan.scope

    def key_for(self, *args: P.args, **kwargs: P.kwargs) -> str:
        """Return the key that a call with these arguments would use."""
        return self._plan.key_of(self._plan.arrived((*self._bound_to, *args), kwargs))

    def forget(self, *args: P.args, **kwargs: P.kwargs) -> bool:
        """Remove the record of a call with these arguments, so that the next one runs again."""
        return self._engine().forget(self.key_for(*args, **kwargs), scope=self._plan.scope)

    def peek(self, *args: P.args, **kwargs: P.kwargs) -> Record | None:
        """Return the record of a call with these arguments, or None, without running anything."""
        return self._engine().peek(self.key_for(*args, **kwargs), scope=self._plan.scope)

    # Each kind is known by its first parameter. `self` is what a call takes, not Once[...]: there
    # mypy does not look at the parameters before a ParamSpec.
    @overload  # a method, through its class
    def __get__(
        self: Callable[Concatenate[I, Q], R], instance: None, owner: type[I]
    ) -> Once[P, R]: ...
    @overload  # a method
    def __get__(
        self: Callable[Concatenate[I, Q], R],
        instance: I,
        owner: type | None = None,
    ) -> Once[Q, R]: ...
    @overload  # a class method
    def __get__(  # type: ignore[misc]  # it is no supertype of every Once: that is the point
        self: Callable[Concatenate[type[I], Q], R],
        instance: I | None,
        owner: type[I],
    ) -> Once[Q, R]: ...
    @overload  # a static method
    def __get__(self, instance: object, owner: type | None = None) -> Once[P, R]: ...
    def __get__(self, instance: Any, owner: type | None = None) -> Once[Any, R]:
        """Bind to an instance or a class, as functions do."""
        if self._plan.binding == "class":
            return Once(self._engine, self._plan, (owner,))
        if instance is None or self._plan.binding == "static":
            return self
        return Once(self._engine, self._plan, (instance,))

    def __reduce__(self) -> str:
        """A pickle names a decorated function, as it names any function."""
        return self._plan.name

    def _prepared(self, runs: Runs, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        plan = self._plan
        arrived = plan.arrived(args, kwargs)
        rules = runs.setup.rules(plan.scope, *plan.policies)
        key, payload = plan.key_of(arrived), plan.payload_of(arrived)
        try:
            return runs.setup.call(key, plan.scope, payload, rules, returns=plan.returns)
        except SerializationError as error:
            raise plan.explained(error) from error.__cause__


class OnceDecorator:
    """The decorator that `once(...)` returns."""

    def __init__(
        self,
        engine: Callable[[], Idempotency],
        *,
        key: KeySource = None,
        scope: str | None = None,
        payload: PayloadSource = UNSET,
        ttl: Duration | None = None,
        message: str | None = None,
        policy: Policy | None = None,
        **unknown: Unpack[Unknown],
    ) -> None:
        if unknown:  # Python itself would name this class, which users do not know
            raise TypeError(f"once() got an unexpected keyword argument {min(unknown)!r}")
        self._engine = engine
        self._plan = functools.partial(
            Plan,
            asynchronous=False,
            key=key,
            scope=scope,
            payload=payload,
            ttl=ttl,
            message=message,
            policy=policy,
        )

    @classmethod
    def of(
        cls, engine: Callable[[], Idempotency], given: Any, *, key: KeySource, **options: Any
    ) -> Any:
        """Distinguish the bare `@once` (given a function) from `@once("template", ...)`."""
        if given is None or isinstance(given, str):
            if given is not None and key is not None:
                raise ConfigError("once was given two keys: the template and key=")
            return cls(engine, key=given if key is None else key, **options)
        if key is not None or options:
            raise ConfigError("a callable that makes the key is passed as key=...")
        return cls(engine)(given)

    def __call__(self, fn: Callable[P, R]) -> Once[P, R]:
        """Decorate this function."""
        plan = self._plan(fn)
        return bound_in_class_methods(Once(self._engine, plan), plan.name)
