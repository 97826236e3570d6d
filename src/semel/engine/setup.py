"""How an engine is made: settings, rules, the store, and what a fork leaves of it.

This module prepares. Every bad input of a call is refused here, before anything is stored.
"""

from __future__ import annotations

import inspect
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, Generic, NotRequired, TypedDict, TypeVar, Unpack, cast
from weakref import WeakSet

from msgspec import UNSET, Struct, UnsetType

from semel import events
from semel.attempts import Attempt, current_attempt, innermost, is_nested
from semel.core.cache import FinishedCache
from semel.core.codec import check_codec
from semel.core.fingerprint import fingerprint
from semel.core.keys import KeyRules, OwnerIds
from semel.core.leases import Lease, Leases
from semel.core.policy import Duration, Policy, Rules, resolve, seconds
from semel.core.records import (
    ClaimRequest,
    Identity,
)
from semel.core.settings import BYPASSED, CODE, Settings, load_settings
from semel.decorating import Unknown
from semel.engine.colours.leaders import forget_flights
from semel.errors import (
    ConfigError,
    IdempotencyError,
    NestedCall,
    StoreUnavailable,
    about,
    raise_about,
)
from semel.stores.base import Store, is_for_asyncio
from semel.transactions.inside import warn_inside

if TYPE_CHECKING:
    from semel.core.codec import Codec


S = TypeVar("S")


RULES_CACHED = 256

SCOPES_CACHED = 1024


CLOSED = "this engine was closed"


WAITING_IN_TRANSACTION = 2
"""How many calls may wait in their callers' transactions, unless `max_waiting` says so.

With the one that they wait for they take three connections. The smallest pool that people have
without a choice of their own (psycopg's) has four."""


class Call(Struct, eq=False, weakref=True):
    """What to do, for which payload, under which rules; and what it may have to give back."""

    identity: Identity
    fingerprint: bytes | None
    rules: Rules
    returns: object = None
    keeps_value: bool = True
    """False for `consume`: only that it was done is stored."""
    asked: ClaimRequest | None = None
    """The claim that the store may hold for this call."""
    lease: Lease | None = None
    """The lease of the claim that the store gave."""
    generation: int = 0
    """Of its identity when the call began: an execution is not shared over a `forget`."""
    shares: bool = True
    """False for a call that may not wait for others of its process: too many do."""

    @property
    def place(self) -> tuple[Identity, bytes | None, int] | None:
        """Calls of a process with the same place share one execution; None = this one does not."""
        if self.keeps_value and self.rules.waits and self.shares:
            return self.identity, self.fingerprint, self.generation
        return None

    def ask(self, owner: bytes) -> ClaimRequest:
        """Make the claim of this call for a new owner."""
        rules = self.rules
        return ClaimRequest(
            self.identity,
            owner,
            self.fingerprint,
            rules.lease,
            rules.ttl,
            rules.hold,
            rules.replace,
            rules.max_attempts,
        )


class WaitingCalls:
    """Counts the calls of an engine that wait for another one, and bounds how many may.

    The bound is for all keys together: waiting calls of any key take connections of the same pool.
    """

    def __init__(self, most: int | UnsetType | None) -> None:
        self.in_transaction = WAITING_IN_TRANSACTION if most is UNSET else most
        """The bound for calls that wait inside their caller's transaction; None = no bound."""
        self.elsewhere = None if most is UNSET else most
        """The bound for all other calls, which hold no connection while they wait."""
        # Weakly, and by call: one whose end was interrupted must not count for ever.
        self._calls: WeakSet[Call] = WeakSet()
        # A signal handler may make a call while its thread holds the lock.
        self._lock = threading.RLock()

    def join(self, call: Call, most: int | None) -> bool:
        """Count this call, once; False = so many wait already."""
        if most is None:
            return True
        with self._lock:
            if call not in self._calls and len(self._calls) >= most:
                return False
            self._calls.add(call)
            return True

    def leave(self, call: Call) -> None:
        """Count this call no more, if it was counted."""
        self._calls.discard(call)


class Opening(TypedDict):
    """What a store is opened with."""

    url: str
    behind: NotRequired[str]
    prefix: str
    timeout: float


class EngineOptions(TypedDict, total=False):
    """The options of an engine, for functions that pass them on."""

    policy: Policy | None
    scopes: Mapping[str, Policy] | None
    prefix: str | UnsetType
    hooks: Sequence[events.Hook]
    key_pattern: str | UnsetType | None
    codecs: Sequence[Codec]
    cache: int
    cache_ttl: Duration
    max_waiting: int | UnsetType | None


class Setup(ABC, Generic[S]):
    """An engine's settings and parts, and the preparing of calls."""

    _asynchronous: bool

    def __init__(
        self,
        url_or_store: str | S | None = None,
        *,
        policy: Policy | None = None,
        scopes: Mapping[str, Policy] | None = None,
        prefix: str | UnsetType = UNSET,
        hooks: Sequence[events.Hook] = (),
        key_pattern: str | UnsetType | None = UNSET,
        codecs: Sequence[Codec] = (),
        cache: int = 0,
        cache_ttl: Duration = 60.0,
        max_waiting: int | UnsetType | None = UNSET,
        **unknown: Unpack[Unknown],
    ) -> None:
        if unknown:  # Python itself would name this class, which users do not know
            opener = "open_async_store" if self._asynchronous else "open_store"
            name, taken = min(unknown), inspect.getfullargspec(Setup.__init__).kwonlyargs
            raise TypeError(
                f"{type(self).__name__}() got an unexpected keyword argument {name!r}; "
                f"{where_it_goes(name, taken, opener)}"
            )
        check_options(policy, scopes, hooks, codecs, cache)
        written: dict[str, Any] = {
            "prefix": prefix,
            "key_pattern": key_pattern,
            "max_waiting": max_waiting,
        }
        if url_or_store is not None:
            written["url"] = url_or_store if isinstance(url_or_store, str) else None
        settings = load_settings(
            **{name: value for name, value in written.items() if value is not UNSET}
        )
        self._levels = (policy, settings.policy)
        self._scopes: dict[str, tuple[Policy | None, ...]] = {
            scope: ((scopes or {}).get(scope), settings.scopes.get(scope))
            for scope in {*(scopes or {}), *settings.scopes}
        }
        self._rules_of: dict[tuple[object, ...], Rules] = {}
        self._known_scopes: set[str] = set()
        self._key_rules = KeyRules(settings.key_pattern)
        self._max_waiting = settings.max_waiting
        self._disabled = settings.disabled
        if self._disabled:
            events.logger.warning("idempotency is switched off by the settings: every call runs")
        base_rules = resolve(*self._levels)
        self._codecs = {codec.name: codec for codec in (base_rules.codec, *codecs)}
        self._announce = events.Announcer(tuple(hooks))
        self._cache = FinishedCache(cache, seconds("cache_ttl", cache_ttl)) if cache else None
        self._closed = False
        self._opening: Opening | None = None
        self._store: S
        if url_or_store is None or isinstance(url_or_store, str):
            self._opening = Opening(
                url=cast("str", settings.url),
                prefix=settings.prefix,
                timeout=base_rules.store_timeout,
            )
            if settings.behind is not None:
                self._opening["behind"] = settings.behind
            self._store = self._open_as_set(self._opening, settings)
        else:
            self._store = checked_store(url_or_store, asynchronous=self._asynchronous)
        self._reset()
        _engines.add(self)

    @abstractmethod
    def _open(self, opening: Opening) -> S:
        """Open a store; it connects on first use."""

    def _reset(self) -> None:
        """Begin with nothing running; also in a forked child, where nothing is."""
        self._owners = OwnerIds()
        self._leases = Leases()
        self._endings: dict[Identity, tuple[int, str]] = {}
        """How held attempts of this engine ended: the number of each, and what happened."""
        self._tasks: set[Any] = set()
        self._waiting = WaitingCalls(self._max_waiting)

    def _switch(self, store: S) -> dict[str, Any]:
        """Go on with another store, as an engine that has just been made; for tests.

        Returns the state to go back to: everything that the engine knew of its own store.
        """
        store = checked_store(store, asynchronous=self._asynchronous)
        if self._leases.running() or self._leases.claims():
            raise ConfigError(
                "this engine has calls that still run: its store can only be exchanged while none "
                "does, as a call must not claim in one store and save in the other"
            )
        before = vars(self)
        cache = None if self._cache is None else self._cache.emptied()
        fresh = {"_store": store, "_opening": None, "_closed": False, "_cache": cache}
        object.__setattr__(self, "__dict__", {**before, **fresh})
        self._reset()
        return before

    def _after_fork(self) -> None:
        # The parent goes on using its connections: ours are left alone, unclosed, and not used.
        self._inherited = self._store
        if self._opening is not None:
            self._store = self._open(self._opening)
        if self._cache is not None:
            self._cache.clear()
        self._reset()

    def _open_as_set(self, opening: Opening, settings: Settings) -> S:
        """Open the store; an error names the settings that say which, unless the code does."""
        try:
            return self._open(opening)
        except ConfigError as error:
            said = [settings.sources[name] for name in ("url", "behind") if name in opening]
            if said == [f"{CODE}: url"]:
                raise
            raise ConfigError(f"{', '.join(said)}: {error}") from error

    # --- preparing a call ----------------------------------------------------------------

    def _rules(self, scope: str, *policies: Policy | None) -> Rules:
        """Give the rules of a scope under these policies, the highest level first."""
        try:
            rules = self._rules_of.get((scope if scope in self._scopes else None, policies))
        except TypeError:  # nothing that can be looked up
            rules = None
        # Outside of the except clause, whose error is no part of a user's traceback.
        return self._resolve(scope, policies) if rules is None else rules

    def _resolve(self, scope: str, policies: tuple[Policy | None, ...]) -> Rules:
        self._key_rules.check_scope(scope)
        for policy in policies:
            if policy is not None and not isinstance(policy, Policy):
                raise ConfigError(f"policy must be a Policy, not {type(policy).__name__}")
        rules = resolve(*policies, *self._scopes.get(scope, ()), *self._levels)
        if len(self._rules_of) < RULES_CACHED:
            with suppress(TypeError):  # a codec of the user's own may have no hash
                self._rules_of[scope if scope in self._scopes else None, policies] = rules
        return rules

    def _call(
        self,
        key: str,
        scope: str,
        payload: object,
        rules: Rules,
        *,
        returns: object = None,
        keeps_value: bool = True,
    ) -> Call:
        """Prepare a call; every bad input is refused here, before anything is stored."""
        identity = self._identity(key, scope)
        if payload is not UNSET:
            try:
                said = fingerprint(payload)
            except IdempotencyError as error:
                raise_about(error, identity)
            return Call(identity, said, rules, returns, keeps_value)
        if rules.payload_required:
            needed = ConfigError(
                "this policy compares payloads (as Policy.payment() does): pass payload=..."
            )
            raise about(needed, identity)
        return Call(identity, None, rules, returns, keeps_value)

    def _check_function(self, fn: object) -> None:
        """Refuse what cannot be run before its key is claimed."""
        if not callable(fn):
            raise ConfigError(f"a function without arguments is needed, not {type(fn).__name__}")
        code = getattr(fn, "__code__", None)
        if not self._asynchronous and code is not None and code.co_flags & inspect.CO_COROUTINE:
            raise ConfigError("an async function needs an AsyncIdempotency")

    def _identity(self, key: str, scope: str) -> Identity:
        self._key_rules.check(key)
        if type(key) is str and type(scope) is str:
            if scope not in self._known_scopes:
                self._check_scope(scope)
            return Identity(scope, key)
        self._check_scope(scope)
        # A text enum formats as its member's name: the key is its plain text.
        return Identity(str.__str__(scope), str.__str__(key))

    def _check_scope(self, scope: str) -> None:
        """Refuse a scope that cannot be used; those that can are few, and not looked at again."""
        self._key_rules.check_scope(scope)
        if len(self._known_scopes) < SCOPES_CACHED:
            self._known_scopes.add(scope)

    # --- before the claim ----------------------------------------------------------------

    def _bypassing(self) -> bool:
        return self._disabled or BYPASSED.get()

    def _unprotected(self, call: Call) -> Attempt:
        return Attempt(call.identity, protected=False)

    def _refuse_unusable(self, call: Call) -> Attempt | None:
        """Refuse a call that could only wait for itself, or that comes after the end.

        Gives the attempt around it, if any.
        """
        if self._closed:
            raise about(StoreUnavailable(CLOSED), call.identity)
        around = current_attempt()
        if around is not None and is_nested(call.identity, self._store, around):
            nested = NestedCall(
                "the running attempt asked for its own key; it would wait for itself for ever"
            )
            raise about(nested, call.identity)
        return around

    def _patience(self, call: Call) -> float | None:
        """How long a usable call may wait in all; None = as long as its caller does."""
        limit = call.rules.wait_timeout
        if not self._closed and innermost() is None:
            return limit
        if self._refuse_unusable(call) is None:
            return limit
        warn_inside(self._store)
        # Two attempts that wait for each other's keys must not hang for ever.
        return call.rules.lease if limit is None else limit


_engines: WeakSet[Setup[Any]] = WeakSet()


def _in_forked_child() -> None:
    forget_flights()
    for engine in tuple(_engines):
        engine._after_fork()  # noqa: SLF001 - our own class


if hasattr(os, "register_at_fork"):  # pragma: no branch - Windows has no fork
    os.register_at_fork(after_in_child=_in_forked_child)


# --- checks of what the user passed --------------------------------------------------------


STORE_VERBS = tuple(name for name in vars(Store) if not name.startswith("_"))


SETTINGS: Final = {
    "url": "the URL, or the store, is the first argument, without a name",
    "preset": "a preset is chosen by the settings: `preset` in semel.toml, or SEMEL_ENV",
    "environment": "the environment is chosen by the settings: SEMEL_ENV",
    "disabled": "it is one of the settings: `disabled` in semel.toml, or SEMEL_DISABLED",
}
"""Where a setting is said that is no argument of an engine."""


def where_it_goes(name: str, taken: Sequence[str], opener: str) -> str:
    """Say what to do with an argument that an engine does not take."""
    if name in SETTINGS:
        return SETTINGS[name]
    if name in Policy.__struct_fields__:
        return f"it is a field of a policy: policy=Policy({name}=...)"
    return (
        f"known are {', '.join(taken)}; "
        f"options of a store, such as behind=, go to semel.{opener}(url, ...)"
    )


def check_options(
    policy: object, scopes: object, hooks: object, codecs: object, cache: object
) -> None:
    """Refuse options of the wrong kind."""
    if policy is not None and not isinstance(policy, Policy):
        raise ConfigError(f"policy must be a Policy, not {type(policy).__name__}")
    if scopes is not None and not (
        isinstance(scopes, Mapping) and all(isinstance(item, Policy) for item in scopes.values())
    ):
        raise ConfigError("scopes must be a mapping from scope to Policy")
    if not isinstance(hooks, Sequence) or not all(callable(hook) for hook in hooks):
        raise ConfigError("hooks must be a sequence of callables that take an event")
    for hook in hooks:
        if _is_async(hook):
            name = getattr(hook, "__qualname__", type(hook).__qualname__)
            raise ConfigError(
                f"hooks must be plain functions: nobody would await {name}, an async one"
            )
    if not isinstance(codecs, Sequence) or any(isinstance(item, str) for item in codecs):
        raise ConfigError("codecs must be a sequence of codecs, beside those of the policies")
    for codec in codecs:
        check_codec(codec, "each of codecs")
    if isinstance(cache, bool) or not isinstance(cache, int) or cache < 0:
        raise ConfigError("cache must be the number of results to keep, 0 for none")


def _is_async(hook: object) -> bool:
    called = (hook, getattr(hook, "__call__", None))  # noqa: B004 - an object is called by its method
    return any(
        inspect.iscoroutinefunction(each) or inspect.isasyncgenfunction(each) for each in called
    )


def checked_store(store: S, *, asynchronous: bool) -> S:
    """Give the store back; what is none, or one of the other kind, is refused."""
    if not hasattr(store, "claim"):
        raise ConfigError(
            "a store URL or a store object is needed (a client goes into its store, such as "
            f"RedisStore(client)); got {type(store).__name__}"
        )
    missing = [verb for verb in STORE_VERBS if not callable(getattr(store, verb, None))]
    if missing:
        raise ConfigError(
            f"{type(store).__name__} is not a whole store: it cannot {', '.join(missing)}"
        )
    if is_for_asyncio(store) is not asynchronous:
        raise ConfigError(
            "AsyncIdempotency needs an async store; for one for threads use Idempotency"
            if asynchronous
            else "Idempotency needs a store for threads; for an async one use AsyncIdempotency"
        )
    return store
