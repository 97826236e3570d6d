"""How an engine and a call are prepared: settings, rules, the store, the input.

This module prepares. Every bad input of a call is rejected here, before anything is stored.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, NotRequired, TypeAlias, TypedDict, TypeVar, cast
from weakref import WeakSet

from msgspec import UNSET, Struct, UnsetType

from semel import events
from semel.core.attempts import Attempt, Lease
from semel.core.cache import FinishedCache
from semel.core.codec import check_codec, decode_result
from semel.core.fingerprint import fingerprint, keyed
from semel.core.keys import KeyRules
from semel.core.policy import POLICY_FIELDS, Duration, Policy, Rules, resolve, seconds
from semel.core.records import ClaimRequest, Encoded, Identity
from semel.core.settings import BYPASSED, CODE, WILDCARD, load_settings, names_for
from semel.core.stored_answers import AnswerCodec, MessageCodec
from semel.errors import (
    ConfigError,
    IdempotencyError,
    about,
    raise_about,
)
from semel.stores.base import AsyncStore, Store
from semel.transactions import db_errors

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
    open_claim: ClaimRequest | None = None
    """The claim that the store may hold for this call."""
    lease: Lease | None = None
    """The lease of the claim that the store gave."""
    counted: Attempt | None = None
    """The attempt that was claimed, and so counted, before the transaction that it runs in."""
    generation: int = 0
    """Of its identity when the call began: an execution is not shared over a `forget`."""
    store_seconds: float = 0.0
    """How long it has waited for answers of the store; added up where there are hooks."""
    shared_as: tuple[Identity, bytes | None, int] | None = None
    """Calls of a process with the same value share one execution; None = this one shares none."""
    around: BaseException | None = None
    """What was being handled when its transaction began: no error of the call is about that."""

    def must_retry(self, error: BaseException) -> bool:
        """Whether the database asks for its whole transaction again, by this error."""
        return not self._is_frameworks(error) and db_errors.must_retry(error, self.around)

    def is_lost(self, error: BaseException) -> bool:
        """Whether its transaction has lost the connection, by this error."""
        return not self._is_frameworks(error) and db_errors.is_lost(error, self.around)

    def _is_frameworks(self, error: BaseException) -> bool:
        """Whether it is a framework's own, such as Retry, which has sent the message again."""
        return isinstance(error, self.rules.not_done)


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


Secrets: TypeAlias = str | bytes | Sequence[str | bytes]
"""One secret, or several for a rotation: the first one writes, all are compared."""


Digests: TypeAlias = tuple[bytes | None, ...]
"""The fingerprints that the store may know a payload by; it writes the first one."""


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
    fingerprint_secret: Secrets | UnsetType


class Setup:
    """What an engine is made of: settings, rules and codecs; and the preparing of calls."""

    def __init__(
        self,
        url_or_store: object,
        *,
        asynchronous: bool,
        policy: Policy | None,
        scopes: Mapping[str, Policy] | None,
        prefix: str | UnsetType,
        hooks: Sequence[events.Hook],
        key_pattern: str | UnsetType | None,
        codecs: Sequence[Codec],
        cache: int,
        cache_ttl: Duration,
        max_waiting: int | UnsetType | None,
        fingerprint_secret: Secrets | UnsetType,
    ) -> None:
        check_options(policy, scopes, hooks, codecs, cache)
        written: dict[str, Any] = {
            "prefix": prefix,
            "key_pattern": key_pattern,
            "max_waiting": max_waiting,
            "fingerprint_secret": fingerprint_secret,
        }
        if url_or_store is not None:
            written["url"] = url_or_store if isinstance(url_or_store, str) else None
        settings = load_settings(
            **{name: value for name, value in written.items() if value is not UNSET}
        )
        self.asynchronous = asynchronous
        self.levels = (policy, settings.policy)
        self.scopes: dict[str, tuple[Policy | None, ...]] = {
            scope: ((scopes or {}).get(scope), settings.scopes.get(scope))
            for scope in {*(scopes or {}), *settings.scopes}
        }
        self._has_patterns = any(name.endswith(WILDCARD) for name in self.scopes)
        self.bounds = settings.bounds
        self._rules_of: dict[tuple[object, ...], Rules] = {}
        self._known_scopes: set[str] = set()
        self.key_rules = KeyRules(settings.key_pattern)
        self.max_waiting = settings.max_waiting
        self._secrets = settings.fingerprint_secret
        self.rotates = len(self._secrets) > 1
        """Whether the store may know a payload by the fingerprint of an older secret."""
        self.disabled = settings.disabled
        if self.disabled:
            events.logger.warning("idempotency is disabled by the settings; every call runs")
        base_rules = resolve(*self.levels)
        # Responses that were stored before encryption was switched on are read by their own codecs.
        known = (AnswerCodec(), MessageCodec(), base_rules.codec, *codecs)
        self.codecs: dict[str, Codec] = {codec.name: codec for codec in known}
        self.announce = events.Announcer(tuple(hooks))
        self.cache = FinishedCache(cache, seconds("cache_ttl", cache_ttl)) if cache else None
        self.opening: Opening | None = None
        """What the store is opened with; None when the user gave an open one."""
        if url_or_store is None or isinstance(url_or_store, str):
            self.opening = Opening(
                url=cast("str", settings.url),
                prefix=settings.prefix,
                timeout=base_rules.store_timeout,
            )
            if settings.behind is not None:
                self.opening["behind"] = settings.behind
            self._sources = [
                settings.sources[name] for name in ("url", "behind") if name in self.opening
            ]

    def opened(self, open_store: Callable[..., S], store: object) -> S:
        """Open the store, which connects on first use, or check the one that the user gave.

        An error names the settings that say which store to open, unless the code does.
        """
        if self.opening is None:
            return checked_store(cast("S", store), asynchronous=self.asynchronous)
        try:
            return open_store(**self.opening)
        except ConfigError as error:
            if self._sources == [f"{CODE}: url"]:
                raise
            raise ConfigError(f"{', '.join(self._sources)}: {error}") from error

    def rules(self, scope: str, *policies: Policy | None) -> Rules:
        """Return the rules of a scope under these policies, the highest level first."""
        try:
            rules = self._rules_of.get((self._cached_as(scope), policies))
        except TypeError:  # nothing that can be looked up
            rules = None
        # Outside of the except clause, whose error is no part of a user's traceback.
        return self._resolve(scope, policies) if rules is None else rules

    def policies_of(self, scope: str) -> tuple[Policy | None, ...]:
        """Return the policies of a scope and of the engine, the highest level first."""
        levels = (level for name in self.names(scope) for level in self.scopes[name])
        return (*levels, *self.levels)

    def names(self, scope: str) -> tuple[str, ...]:
        """Return the names and patterns of `scopes` that rule a scope, the closest first."""
        if self._has_patterns:
            return names_for(scope, self.scopes)
        return (scope,) if scope in self.scopes else ()

    def _cached_as(self, scope: str) -> object:
        """Return what scopes with the same rules have in common."""
        if self._has_patterns:
            return names_for(scope, self.scopes)
        return scope if scope in self.scopes else None

    def _resolve(self, scope: str, policies: tuple[Policy | None, ...]) -> Rules:
        self.key_rules.check_scope(scope)
        for policy in policies:
            if policy is not None and not isinstance(policy, Policy):
                raise ConfigError(f"policy must be a Policy, not {type(policy).__name__}")
        rules = resolve(*policies, *self.policies_of(scope))
        if len(self._rules_of) < RULES_CACHED:
            with suppress(TypeError):  # a codec of the user's own may have no hash
                self._rules_of[self._cached_as(scope), policies] = rules
        return rules

    def call(
        self,
        key: str,
        scope: str,
        payload: object,
        rules: Rules,
        *,
        returns: object = None,
        keeps_value: bool = True,
    ) -> Call:
        """Prepare a call; every bad input is rejected here, before anything is stored."""
        identity = self.identity(key, scope)
        said = None
        if payload is not UNSET:
            try:
                said = fingerprint(payload)
            except IdempotencyError as error:
                raise_about(error, identity)
        elif rules.payload_required:
            needed = ConfigError(
                "this policy compares payloads (as Policy.payment() does): pass payload=..."
            )
            raise about(needed, identity)
        return Call(identity, said, rules, returns, keeps_value)

    def digests(self, call: Call) -> Digests:
        """Return the fingerprints that the store may know a call's payload by; it writes the first.

        They are made here, where claims are, so that what any integration compares is keyed.
        """
        said = call.fingerprint
        if said is None or not self._secrets:
            return (said,)
        return tuple(keyed(said, call.identity, secret) for secret in self._secrets)

    def check_function(self, fn: object) -> None:
        """Reject what cannot be run before its key is claimed."""
        if not callable(fn):
            raise ConfigError(f"a function without arguments is needed, not {type(fn).__name__}")
        if self.asynchronous:
            return
        code = getattr(fn, "__code__", None)
        if code is not None and code.co_flags & inspect.CO_COROUTINE:
            raise ConfigError("an async function needs an AsyncIdempotency")

    def identity(self, key: str, scope: str) -> Identity:
        """Check the key and the scope of an operation."""
        self.key_rules.check(key)
        if type(key) is str and type(scope) is str:
            if scope not in self._known_scopes:
                self._check_scope(scope)
            return Identity(scope, key)
        self._check_scope(scope)
        # A text enum formats as its member's name: the key is its plain text.
        return Identity(str.__str__(scope), str.__str__(key))

    def _check_scope(self, scope: str) -> None:
        """Reject a scope that cannot be used; those that can are few, and not looked at again."""
        self.key_rules.check_scope(scope)
        if len(self._known_scopes) < SCOPES_CACHED:
            self._known_scopes.add(scope)

    def bypassing(self) -> bool:
        """Return whether calls run unprotected, by the settings or for this thread or task."""
        return self.disabled or BYPASSED.get()

    def read(self, stored: Encoded | None, identity: Identity, hint: object) -> Any:
        """Read a stored result, outside of a call."""
        return decode_result(stored, identity, hint, self.rules(identity.scope).codec, self.codecs)


# --- checks of what the user passed --------------------------------------------------------


SETTINGS: Final = {
    "url": "the URL, or the store, is the first argument, without a name",
    "preset": "a preset is chosen by the settings: `preset` in semel.toml, or SEMEL_ENV",
    "environment": "the environment is chosen by the settings: SEMEL_ENV",
    "disabled": "it is one of the settings: `disabled` in semel.toml, or SEMEL_DISABLED",
}
"""Where to set a setting that is not an argument of an engine."""


def unexpected(engine: str, options: Mapping[str, object], opener: str) -> TypeError:
    """Say what to do with an argument that an engine does not take.

    Python itself would name a class that users do not know.
    """
    name = min(options)
    if name in SETTINGS:
        advice = SETTINGS[name]
    elif name in POLICY_FIELDS:
        advice = f"it is a field of a policy: policy=Policy({name}=...)"
    else:
        advice = (
            f"known are {', '.join(EngineOptions.__annotations__)}; "
            f"options of a store, such as behind=, go to semel.{opener}(url, ...)"
        )
    return TypeError(f"{engine}() got an unexpected keyword argument {name!r}; {advice}")


def check_options(
    policy: object, scopes: object, hooks: object, codecs: object, cache: object
) -> None:
    """Reject options of the wrong kind."""
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
            raise ConfigError(f"hooks must be plain functions, and {name} is async")
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
    """Return the store; reject anything else, and a store of the other kind."""
    if not isinstance(store, Store | AsyncStore):
        raise ConfigError(
            "a store URL or a store object is needed (a client goes into its store, such as "
            f"RedisStore(client)); got {type(store).__name__}. A store of your own derives from "
            "semel.stores.base.Store or AsyncStore"
        )
    if isinstance(store, AsyncStore) is not asynchronous:
        raise ConfigError(
            "AsyncIdempotency needs an async store; for one for threads use Idempotency"
            if asynchronous
            else "Idempotency needs a store for threads; for an async one use AsyncIdempotency"
        )
    return store
