"""What the user gives to an engine, checked before it is used: options and store objects."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Final, TypeVar

from semel.core.codec import check_codec
from semel.core.policy import Policy
from semel.errors import ConfigError
from semel.stores.base import Store, is_for_asyncio

S = TypeVar("S")

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
