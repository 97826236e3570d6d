"""Policies: what to do with a duplicate, a failure, a crash, another payload, a broken store.

A `Policy` says only what its author wrote: fields left out stay UNSET, so that an explicit value
equal to the default still wins over a lower level. `resolve` lays the levels over each other
(call > decorator > scope > engine > environment > file > default) and returns complete `Rules`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, TypeAlias, TypedDict, Unpack, cast, get_args

from msgspec import UNSET, Struct, UnsetType
from msgspec.structs import asdict, force_setattr

from semel.core.codec import Codec, check_codec, codec_named
from semel.core.records import LONGEST
from semel.core.run_info import OwnRunInfo
from semel.errors import ConfigError, did_you_mean

Duration: TypeAlias = float | timedelta
Duplicate: TypeAlias = Literal["replay", "reject"]
Concurrent: TypeAlias = Literal["wait", "reject"]
Failure: TypeAlias = Literal["forget", "retryable", "final", "unknown"]
Abandonment: TypeAlias = Literal["takeover", "hold"]
Mismatching: TypeAlias = Literal["reject", "replace"]
StoreFailure: TypeAlias = Literal["closed", "open"]
Exceptions: TypeAlias = type[BaseException] | Sequence[type[BaseException]]

SHORTEST_LEASE = 0.05
"""A lease is renewed after a third of it, and what a thread waits for its turn, and a store for its
disk, must fit into that third: a shorter one is lost again and again while nothing is wrong."""

MINUTE, HOUR, DAY = 60.0, 3600.0, 86400.0

GUARD_WAIT = 0.3
"""How long reject mode waits for a running attempt before it rejects, by default."""

CHOICES: dict[str, tuple[str, ...]] = {
    "duplicate": get_args(Duplicate),
    "concurrent": get_args(Concurrent),
    "failure": get_args(Failure),
    "abandoned": get_args(Abandonment),
    "mismatch": get_args(Mismatching),
    "store_error": get_args(StoreFailure),
}
POSITIVE = ("ttl", "failed_ttl", "lease", "wait_interval", "wait_interval_max", "store_timeout")


class PolicyFields(TypedDict, total=False):
    """The fields of a policy, for functions that pass them on."""

    duplicate: Duplicate | UnsetType
    concurrent: Concurrent | UnsetType
    failure: Failure | Callable[[BaseException], Failure] | UnsetType
    abandoned: Abandonment | UnsetType
    mismatch: Mismatching | UnsetType
    store_error: StoreFailure | UnsetType
    ttl: Duration | UnsetType
    failed_ttl: Duration | UnsetType
    lease: Duration | UnsetType
    wait_timeout: Duration | UnsetType | None
    wait_interval: Duration | UnsetType
    wait_interval_max: Duration | UnsetType
    max_attempts: int | UnsetType | None
    max_result_bytes: int | UnsetType
    codec: str | Codec | UnsetType
    store_timeout: Duration | UnsetType
    message: str | UnsetType | None
    not_done: Exceptions | UnsetType
    payload_required: bool | UnsetType


POLICY_FIELDS = tuple(PolicyFields.__annotations__)


@dataclass(frozen=True, init=False, repr=False, eq=False)
class Policy:
    """How one kind of operation behaves; durations are seconds or timedelta.

    Examples:
        >>> Policy(ttl=3600, concurrent="reject")
        Policy(concurrent='reject', ttl=3600.0)
    """

    duplicate: Duplicate | UnsetType = UNSET
    concurrent: Concurrent | UnsetType = UNSET
    failure: Failure | Callable[[BaseException], Failure] | UnsetType = UNSET
    abandoned: Abandonment | UnsetType = UNSET
    mismatch: Mismatching | UnsetType = UNSET
    store_error: StoreFailure | UnsetType = UNSET
    ttl: Duration | UnsetType = UNSET
    failed_ttl: Duration | UnsetType = UNSET
    lease: Duration | UnsetType = UNSET
    wait_timeout: Duration | UnsetType | None = UNSET
    wait_interval: Duration | UnsetType = UNSET
    wait_interval_max: Duration | UnsetType = UNSET
    max_attempts: int | UnsetType | None = UNSET
    max_result_bytes: int | UnsetType = UNSET
    codec: str | Codec | UnsetType = UNSET
    store_timeout: Duration | UnsetType = UNSET
    message: str | UnsetType | None = UNSET
    not_done: Exceptions | UnsetType = UNSET
    """Exceptions that prove the effect did not happen: under hold they free the key."""
    payload_required: bool | UnsetType = UNSET

    __signature__ = inspect.Signature(
        [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in POLICY_FIELDS]
    )
    """For `help` and editors, which see no names in `**fields`."""

    def __init__(self, **fields: Unpack[PolicyFields]) -> None:
        for name, value in fields.items():
            if name not in POLICY_FIELDS:
                raise TypeError(
                    f"Policy() got an unexpected keyword argument {name!r}; known are "
                    f"{', '.join(POLICY_FIELDS)}{did_you_mean(name, POLICY_FIELDS)}"
                )
            if value is not UNSET:
                # What was written is what the instance has; the rest are attributes of the class.
                vars(self)[name] = _checked(name, value)

    def __eq__(self, other: object) -> bool:
        return vars(self) == vars(other) if isinstance(other, Policy) else NotImplemented

    def __hash__(self) -> int:
        return hash(frozenset(vars(self).items()))

    def __repr__(self) -> str:
        written = (f"{name}={vars(self)[name]!r}" for name in POLICY_FIELDS if name in vars(self))
        return f"Policy({', '.join(written)})"

    @classmethod
    def preset(cls, name: str, **changes: Unpack[PolicyFields]) -> Policy:
        """Look a preset up by `name`: http, message, job, payment, coupon; `changes` win over it.

        Examples:
            >>> Policy.preset("job", lease=60)
            Policy(ttl=86400.0, lease=60.0)
        """
        if name not in PRESETS:
            known = ", ".join(PRESETS)
            raise ConfigError(f"no policy preset is called {name!r}; known: {known}")
        fields: dict[str, Any] = {**PRESETS[name], **changes}
        return cls(**fields)

    @classmethod
    def http(cls, **changes: Unpack[PolicyFields]) -> Policy:
        """Web requests: kept for 10 minutes."""
        return cls.preset("http", **changes)

    @classmethod
    def messages(cls, **changes: Unpack[PolicyFields]) -> Policy:
        """Queue messages: kept for 30 days (`message` is the text of a rejection)."""
        return cls.preset("message", **changes)

    @classmethod
    def job(cls, **changes: Unpack[PolicyFields]) -> Policy:
        """Scheduled jobs: kept for 24 hours."""
        return cls.preset("job", **changes)

    @classmethod
    def payment(cls, **changes: Unpack[PolicyFields]) -> Policy:
        """Payments: kept for 3 days, payload needed and compared, held after a crash.

        Examples:
            >>> Policy.payment(ttl=7 * 86400).abandoned
            'hold'
        """
        return cls.preset("payment", **changes)

    @classmethod
    def coupon(cls, **changes: Unpack[PolicyFields]) -> Policy:
        """Coupons: kept for 7 days."""
        return cls.preset("coupon", **changes)


PRESETS: dict[str, PolicyFields] = {
    "http": {"ttl": 10 * MINUTE},
    "message": {"ttl": 30 * DAY},
    "job": {"ttl": 24 * HOUR},
    "payment": {
        "ttl": 3 * DAY,
        "abandoned": "hold",
        "mismatch": "reject",
        "payload_required": True,
    },
    "coupon": {"ttl": 7 * DAY},
}


class Rules(Struct, frozen=True, kw_only=True):
    """A complete policy: every field decided."""

    duplicate: Duplicate = "replay"
    concurrent: Concurrent = "wait"
    failure: Failure | Callable[[BaseException], Failure] | None = None
    """None: forget, or unknown under hold."""
    abandoned: Abandonment = "takeover"
    mismatch: Mismatching = "reject"
    store_error: StoreFailure = "closed"
    ttl: float = 24 * HOUR
    failed_ttl: float = 5 * MINUTE
    lease: float = 30.0
    wait_timeout: float | None = None
    wait_interval: float = 0.05
    wait_interval_max: float = 0.5
    max_attempts: int | None = None
    max_result_bytes: int = 1024 * 1024
    codec: Codec = codec_named("json")
    store_timeout: float = 5.0
    message: str | None = None
    not_done: tuple[type[BaseException], ...] = ()
    payload_required: bool = False

    # What follows from the fields above, whatever is given here: every call asks, so it is decided
    # once.
    hold: bool = False
    """An abandoned attempt waits for a resolver or a person."""
    replace: bool = False
    """Another payload replaces the finished one (loose)."""
    waits: bool = True
    """A duplicate waits for the attempt that runs."""
    replays: bool = True
    """A duplicate gets the result."""
    run_info: OwnRunInfo = cast("OwnRunInfo", None)
    """What running records say about this process."""

    def __post_init__(self) -> None:
        force_setattr(self, "hold", self.abandoned == "hold")
        force_setattr(self, "replace", self.mismatch == "replace")
        force_setattr(self, "waits", self.concurrent == "wait")
        force_setattr(self, "replays", self.duplicate == "replay")
        own = OwnRunInfo(self.ttl, self.codec.name, self.max_attempts)
        force_setattr(self, "run_info", own)


def written(policy: Policy) -> dict[str, Any]:
    """Return the fields that the author of a policy wrote."""
    return vars(policy).copy()


def changed(rules: Rules, **fields: Any) -> Rules:
    """Return the rules with other values, and with what follows from those."""
    # Not by msgspec's replace: until 0.19 it runs no __post_init__.
    return Rules(**{**asdict(rules), **fields})


def resolve(*levels: Policy | None) -> Rules:
    """Lay policies over each other, the highest level first."""
    fields: dict[str, Any] = {}
    for policy in levels:
        if policy is not None:
            fields = written(policy) | fields
    if isinstance(fields.get("codec"), str):
        fields["codec"] = codec_named(fields["codec"])
    if fields.get("duplicate") == "reject":
        fields.setdefault("wait_timeout", GUARD_WAIT)
    # A bound set at one level and a start set at another must still make sense together.
    interval = fields.get("wait_interval", 0.0)
    fields["wait_interval_max"] = max(interval, fields.get("wait_interval_max", 0.5))
    return Rules(**fields)


def _checked(name: str, value: Any) -> Any:  # noqa: C901 - one case per kind of field
    """One field of a policy in its stored form, or a ConfigError that names it."""
    if name in CHOICES:
        return _choice(name, value)
    if name == "lease":
        return _lease(value)
    if name in POSITIVE:
        return seconds(f"policy field {name}", value)
    match name:
        case "wait_timeout":
            return value if value is None else seconds(f"policy field {name}", value, zero=True)
        case "max_attempts":
            return value if value is None else _whole(name, value, at_least=1)
        case "max_result_bytes":
            return _whole(name, value, at_least=0)
        case "codec":
            return _codec(value)
        case "message":
            if value is not None and not isinstance(value, str):
                raise _wrong(name, value, "a string or None")
        case "not_done":
            return _exception_types(value)
        case _:
            if not isinstance(value, bool):
                raise _wrong(name, value, "True or False")
    return value


def _choice(name: str, value: Any) -> Any:
    if name == "failure" and callable(value):
        if inspect.iscoroutinefunction(value):
            raise _wrong(name, value, "a plain function, not an async one")
        return value
    if not isinstance(value, str) or value not in CHOICES[name]:
        choices = ", ".join(repr(choice) for choice in CHOICES[name])
        also = " or a function of the exception" if name == "failure" else ""
        raise _wrong(name, value, f"one of {choices}{also}")
    return value


def seconds(name: str, value: Any, *, zero: bool = False) -> float:
    """Turn a duration into seconds, once, at the edge; a ConfigError names what is wrong."""
    if isinstance(value, timedelta):
        value = value.total_seconds()
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise _config_error(name, value, "a number of seconds or a timedelta")
    if value < 0 or (value == 0 and not zero):
        raise _config_error(
            name, value, "zero or more seconds" if zero else "more than zero seconds"
        )
    if value > LONGEST:
        raise _config_error(name, value, "at most 100 years")
    return float(value)


def _lease(value: Any) -> float:
    lease = seconds("policy field lease", value)
    if lease < SHORTEST_LEASE:
        expected = f"at least {SHORTEST_LEASE} seconds, or it ends before it can be renewed"
        raise _wrong("lease", lease, expected)
    return lease


def _whole(name: str, value: Any, *, at_least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        raise _wrong(name, value, f"a whole number of {at_least} or more")
    return value


def _codec(value: Any) -> Any:
    if isinstance(value, str):
        codec_named(value)  # a ConfigError now is better than one at the first call
        return value
    check_codec(value, "policy field codec")
    return value


def _exception_types(value: Any) -> tuple[type[BaseException], ...]:
    several = isinstance(value, Sequence) and not isinstance(value, str)
    types = value if several else (value,)
    for item in types:
        if not (isinstance(item, type) and issubclass(item, BaseException)):
            raise _wrong("not_done", item, "exception classes")
    return tuple(types)


def _wrong(name: str, value: Any, expected: str) -> ConfigError:
    return _config_error(f"policy field {name}", value, expected)


def _config_error(what: str, value: Any, expected: str) -> ConfigError:
    shown = repr(value) if isinstance(value, str | int | float | bool) else type(value).__name__
    return ConfigError(f"{what} must be {expected}; got {shown[:80]}")
