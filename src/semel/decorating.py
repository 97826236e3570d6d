"""What `once` and `once_per` work out at decoration: key, payload, rules and slots of a function.

This module plans. Wrong decorations are rejected here, before the program serves anything.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from datetime import tzinfo
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias, TypedDict, TypeVar, cast

from msgspec import UNSET, UnsetType

from semel.core.codec import returned_by
from semel.core.keys import Arguments, KeyRules, check_plain, compile_template, digest_key
from semel.core.policy import Duration, Policy, Rules, resolve, seconds
from semel.core.schedules import Period, Schedule, Slot, rules_of_slot, seconds_left
from semel.errors import ConfigError, InvalidKey, SerializationError

Binding: TypeAlias = Literal["function", "class", "static"]
KeySource: TypeAlias = str | Callable[..., str] | None
PayloadSource: TypeAlias = str | Sequence[str] | Callable[..., object] | UnsetType | None
"""The arguments to compare; UNSET = those that the key leaves out, None = none."""


class Unknown(TypedDict):
    """Unknown options, so that type checkers allow none."""


class Arrived(NamedTuple):
    """The arguments of one call, as they came and by name."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    values: Mapping[str, Any]


class Plan:
    """How one decorated function is called once per key."""

    def __init__(
        self,
        fn: Any,
        *,
        asynchronous: bool,
        key: KeySource,
        scope: str | None,
        payload: PayloadSource,
        ttl: Duration | None,
        message: str | None,
        policy: Policy | None,
    ) -> None:
        self.binding: Binding = "function"
        if isinstance(fn, classmethod):
            self.binding, fn = "class", fn.__func__
        elif isinstance(fn, staticmethod):
            self.binding, fn = "static", fn.__func__
        self.fn = fn
        self.name = getattr(fn, "__qualname__", type(fn).__name__)
        self._check_kind(asynchronous=asynchronous)
        self.policies = _policies(ttl, message, policy)
        self._arguments = Arguments.of(fn)
        self._key_given = key is not None
        self._key = self._key_maker(key)
        self._payload = self._payload_maker(payload, key)
        self._payload_chosen = payload is not UNSET
        if self._payload is None and resolve(*self.policies).payload_required:
            raise ConfigError(
                f"{self.name}: this policy compares payloads; name the arguments to compare, "
                "such as payload='order'"
            )
        self.scope = self._checked_scope(scope)

    @cached_property
    def returns(self) -> object:
        """The annotated return type, read at the first call: by then its module is complete."""
        return returned_by(self.fn)

    @property
    def tells_calls_apart(self) -> bool:
        """Whether the key of one call may differ from that of another: by arguments, or `key=`."""
        return self._key_given or bool(self._arguments.names)

    def _check_kind(self, *, asynchronous: bool) -> None:
        if not callable(self.fn) or inspect.isclass(self.fn):
            raise ConfigError(f"once decorates functions, not {type(self.fn).__name__}")
        forms = (self.fn, type(self.fn).__call__)  # an object is what its call is
        if any(
            inspect.isgeneratorfunction(form) or inspect.isasyncgenfunction(form) for form in forms
        ):
            raise ConfigError(f"{self.name} is a generator: its result cannot be replayed")
        if any(inspect.iscoroutinefunction(form) for form in forms) is not asynchronous:
            raise ConfigError(
                f"{self.name} is not async: decorate it with an Idempotency"
                if asynchronous
                else f"{self.name} is async: decorate it with an AsyncIdempotency"
            )

    def _checked_scope(self, given: str | None) -> str:
        if given is None and (not hasattr(self.fn, "__qualname__") or "<lambda>" in self.name):
            # Two of them would share a scope, and one be answered with the other's results.
            raise ConfigError(f"{self.name} has no name of its own: pass scope=...")
        scope = f"{self.fn.__module__}.{self.name}" if given is None else given
        try:
            KeyRules().check_scope(scope)
        except InvalidKey as error:
            raise ConfigError(f"{self.name}: {error}") from None
        return scope

    def arrived(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Arrived:
        """Bind the arguments of a call; one that the function would reject never gets further."""
        return Arrived(args, kwargs, self._arguments.mapping(args, kwargs))

    def key_of(self, call: Arrived) -> str:
        """Make the key of a call."""
        return self._key(call)

    def payload_of(self, call: Arrived) -> object:
        """Pick the payload of a call; UNSET when none is compared."""
        return UNSET if self._payload is None else self._payload(call)

    def explained(self, error: SerializationError) -> SerializationError:
        """Return the error with what to do, unless the application chose what to compare.

        No `ConfigError`: the arguments may be a message's, and one message must stop no consumer.
        """
        if self._payload_chosen:
            return error
        told = SerializationError(
            f"{self.name}: semel compares the arguments that aren't in the key, and {error.text}. "
            "Name the arguments to compare, such as payload='order', or pass payload=None to "
            "compare none"
        )
        told.scope, told.key_digest = error.scope, error.key_digest
        return told

    def _key_maker(self, key: KeySource) -> Callable[[Arrived], str]:
        names = self._arguments.names
        if key is None:
            if names[:1] == ("self",) and self.binding == "function":
                raise ConfigError(
                    f"{self.name} is a method: name what makes its key, such as "
                    "key='{self.id}:{order.id}'; the instance is no part of a digest"
                )
            receiver = self._receiver
            return lambda call: digest_key(
                {
                    # A subclass makes other things of the same arguments.
                    name: _class_name(value) if name == receiver else value
                    for name, value in call.values.items()
                }
            )
        return key_maker(self.name, self._arguments, key)

    @property
    def _receiver(self) -> str | None:
        """The parameter that the instance or the class arrives in; None: it is a plain function."""
        names = self._arguments.names
        bound = self.binding == "class" or names[:1] in {("self",), ("cls",)}
        return names[0] if bound else None

    def _payload_maker(
        self, payload: PayloadSource, key: KeySource
    ) -> Callable[[Arrived], object] | None:
        if payload is None:
            return None
        if not isinstance(payload, UnsetType):
            return payload_maker(self.name, self._arguments, payload)
        if key is None:
            return None  # All arguments are in the key.
        in_key: frozenset[str] = frozenset()
        if isinstance(key, str):
            in_key = compile_template(key, self._arguments.names).whole_arguments
        left_out = in_key | {self._receiver}

        def other_arguments(call: Arrived) -> object:
            compared = {name: call.values[name] for name in call.values if name not in left_out}
            return self._arguments.without_defaults(compared)

        return other_arguments


def key_maker(
    name: str, arguments: Arguments, key: str | Callable[..., str]
) -> Callable[[Arrived], str]:
    """Make the function that returns the key of a call of the function `name`."""
    if isinstance(key, str):
        template = compile_template(key, arguments.names)

        def key_of(call: Arrived) -> str:
            try:
                return template.render(call.values.__getitem__)
            except InvalidKey as error:
                raise InvalidKey(f"{name}: {error}") from error.__cause__

        return key_of
    if callable(key):
        check_plain(f"{name}: key", key)
        return lambda call: key(*call.args, **call.kwargs)
    raise ConfigError(
        f"{name}: key must be a template, a callable or None, not {type(key).__name__}"
    )


def payload_maker(
    name: str, arguments: Arguments, payload: str | Sequence[str] | Callable[..., object]
) -> Callable[[Arrived], object]:
    """Make the function that picks the payload of a call of the function `name`."""
    if callable(payload):
        check_plain(f"{name}: payload", payload)
        return lambda call: payload(*call.args, **call.kwargs)
    names: tuple[str, ...] = ()
    if isinstance(payload, str):
        names = (payload,)
    elif isinstance(payload, Sequence):
        names = tuple(payload)
    if not names or any(each not in arguments.names for each in names):
        raise ConfigError(
            f"{name}: payload must name arguments of the function "
            f"({', '.join(arguments.names)}); got {payload!r}"
        )
    if isinstance(payload, str):
        return lambda call: call.values[payload]
    return lambda call: {each: call.values[each] for each in names}


def _class_name(value: object) -> object:
    return f"{value.__module__}.{value.__qualname__}" if isinstance(value, type) else value


def _policies(
    ttl: Duration | None, message: str | None, policy: Policy | None
) -> tuple[Policy, ...]:
    """The decorator's own words first, then the policy it was given."""
    if policy is not None and not isinstance(policy, Policy):
        raise ConfigError(f"policy must be a Policy, not {type(policy).__name__}")
    words: dict[str, Any] = {}
    if ttl is not None:
        words["ttl"] = ttl
    if message is not None:
        words["message"] = message
    own = (Policy(**words),) if words else ()
    return own if policy is None else (*own, policy)


def scope_of_script(fn: Callable[..., object]) -> str | None:
    """Name the scope of a function of the main program by its module or file; None: by neither.

    Cron starts many programs, and each of them has a function `__main__.main`.
    """
    name = getattr(fn, "__qualname__", "<lambda>")
    if getattr(fn, "__module__", None) != "__main__" or "<lambda>" in name:
        return None
    program = sys.modules["__main__"]
    if program.__spec__ is not None:  # python -m jobs.billing: as an import of it is named
        return f"{program.__spec__.name.removesuffix('.__main__')}.{name}"
    file = getattr(program, "__file__", None)
    return None if file is None else f"{Path(file).stem}.{name}"


# --- slots of time: what `once_per` adds ---------------------------------------------------


class Timing:
    """For which slot a call counts, and how long it waits for one that runs."""

    def __init__(
        self,
        period: Period,
        *,
        tz: str | tzinfo | None,
        standby: Duration | bool,
        ttl: Duration | None,
        policy: Policy | None,
        clock: Callable[[], float],
    ) -> None:
        self._schedule = Schedule(period, tz)
        self._clock = clock
        self._to_the_end = standby is True
        self._standby = None
        if self._to_the_end and self._schedule.longest is None:
            raise ConfigError(
                "once_per: only you know when a slot ends that a function names: pass standby= as "
                "a number of seconds or a timedelta"
            )
        if not isinstance(standby, bool):
            self._standby = seconds("standby of once_per", standby)
        kept = any(each.ttl is not UNSET for each in _policies(ttl, None, policy))
        if self._schedule.longest is None and not kept:
            raise ConfigError(
                "once_per: only you know how long a slot is that a function names: pass ttl=, at "
                'least two slots long. The job itself is decorated as in @once_per("day")'
            )

    def slot(self) -> Slot:
        """Return the slot that a call counts for now."""
        return self._schedule.slot(self._clock())

    def rules(self, rules: Rules, slot: Slot) -> Rules:
        """Return the rules of a call in its slot."""
        standby = self._standby
        if self._to_the_end:
            standby = seconds_left(slot, self._clock())
        return rules_of_slot(rules, self._schedule.longest, standby)


# --- class methods, bound to their class on every Python ----------------------------------
#
# From 3.13 on, `classmethod` does not bind what it wraps: `Till.open` would be a method around
# a function decorated by `once`, whose `run` or `key_for` never learn the class. An object does not
# learn that a `classmethod` wraps it, so the body of its class gets one more name while it runs:
# Python calls its `__set_name__` when the class is made, which puts the class methods right and
# removes the name.


D = TypeVar("D")

NAME = "__semel_once__"
"""With underscores on both sides, a name that enums and models leave alone."""


def bound_in_class_methods(decorated: D, qualified_name: str) -> D:
    """Let a `classmethod` around this object hand it out bound, if a class body is running."""
    body = _class_body(qualified_name.rpartition(".")[0])
    if body is not None:
        body.setdefault(NAME, _ClassIsMade()).decorated.append(decorated)
    return decorated


def _class_body(owner: str) -> MutableMapping[str, Any] | None:
    """Find the names of the class body that is being run for this class."""
    frame = inspect.currentframe() if owner and not owner.endswith("<locals>") else None
    while frame is not None:
        code = frame.f_code
        if code.co_qualname == owner and not code.co_flags & inspect.CO_OPTIMIZED:
            return cast("MutableMapping[str, Any]", frame.f_locals)
        frame = frame.f_back
    return None


class _ClassIsMade:
    """Told by Python when the class whose body holds it is made."""

    def __init__(self) -> None:
        self.decorated: list[object] = []

    def __set_name__(self, owner: type, name: str) -> None:
        # Past the metaclass, which may have its own idea of new attributes.
        type.__delattr__(owner, name)
        for attribute, value in tuple(vars(owner).items()):
            if isinstance(value, classmethod) and any(
                value.__func__ is each for each in self.decorated
            ):
                type.__setattr__(owner, attribute, _BindingClassMethod(value.__func__))


class _BindingClassMethod(classmethod):  # type: ignore[type-arg]  # of anything
    """Binds what it wraps, as classmethod itself did before Python 3.13."""

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        return cast("Any", self.__func__).__get__(type(instance) if owner is None else owner)
