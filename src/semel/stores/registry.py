"""Opens a store by its URL; its module, and so its driver, is imported only when asked for."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, NamedTuple

from semel.core.optional import Needed
from semel.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from semel.stores.base import AsyncStore, Store

DEFAULT_PREFIX = "idem:"
DEFAULT_TIMEOUT = 5.0

SEARCH_SHARE = 0.5
"""For which part of its `timeout` a call looks for a server that it cannot reach, in every store.
Enough for a restart; and a request does not pay all of it while the server stays away."""


class Backend(NamedTuple):
    """Where the stores of a URL scheme live: a module with `open_store` and `open_async_store`."""

    module: str
    install: str | None
    """What pip installs to have the driver; None when nothing is needed."""


BACKENDS = {
    "memory": Backend("semel.stores.memory", None),
    "sqlite": Backend("semel.stores.sql.sqlite", None),
    "redis": Backend("semel.stores.redis", "semel[redis]"),
    "rediss": Backend("semel.stores.redis", "semel[redis]"),
    "redis+unix": Backend("semel.stores.redis", "semel[redis]"),
    "redis+cluster": Backend("semel.stores.redis", "semel[redis]"),
    "rediss+cluster": Backend("semel.stores.redis", "semel[redis]"),
    "redis+sentinel": Backend("semel.stores.redis", "semel[redis]"),
    "rediss+sentinel": Backend("semel.stores.redis", "semel[redis]"),
    "mysql": Backend("semel.stores.sql.mysql", "semel[mysql]"),
    "mariadb": Backend("semel.stores.sql.mysql", "semel[mysql]"),
    "postgresql": Backend("semel.stores.sql.postgres", "semel[postgres]"),
    "postgres": Backend("semel.stores.sql.postgres", "semel[postgres]"),
}
"""Our own schemes. Others come from the entry point group `semel.stores` (name = scheme)."""

RELATED = {
    "valkey": "redis",
    "valkeys": "rediss",
    "aioredis": "redis",
    "unix": "redis+unix",
    "sqlite3": "sqlite",
    "pgsql": "postgresql",
    "psql": "postgresql",
}
"""Schemes that other libraries use, and which of ours is meant by them."""

TIERS = Backend("semel.stores.tiered", "semel[redis]")
"""Redis in front, another store behind: asked for by `behind`, not by a scheme."""

TIER_OPTIONS = frozenset({"front_ttl", "front_timeout"})
"""Options that mean nothing without a store behind."""

OPEN_OPTIONS = TIER_OPTIONS | {"behind", "prefix", "timeout"}
"""Options of `open_store` itself, whichever store is opened."""

ENTRY_POINT_GROUP = "semel.stores"


def open_store(
    url: str,
    *,
    behind: str | Store | None = None,
    prefix: str = DEFAULT_PREFIX,
    timeout: float = DEFAULT_TIMEOUT,
    **options: Any,
) -> Store:
    """Open the store of a `url` for threads; it connects on first use.

    `prefix` stands in front of all names in the store. `timeout` bounds each store call in seconds;
    further options go to the store itself. With `behind`, a URL or a store, Redis only stands in
    front: `open_store("redis://localhost", behind="sqlite:///semel.db")`.

    Examples:
        >>> store = open_store("memory://", timeout=2.0)
        >>> idem = Idempotency(store)
    """
    if behind is not None:
        options["behind"] = behind
    opener: Callable[..., Store] = _opener(url, "open_store", options)
    return opener(url, prefix=prefix, timeout=timeout, **options)


def open_async_store(
    url: str,
    *,
    behind: str | AsyncStore | None = None,
    prefix: str = DEFAULT_PREFIX,
    timeout: float = DEFAULT_TIMEOUT,
    **options: Any,
) -> AsyncStore:
    """Open the store of a `url` for asyncio; it connects on first use.

    `behind`, `prefix`, `timeout` and further options are those of `open_store`.

    Examples:
        >>> store = open_async_store("memory://")
        >>> idem = AsyncIdempotency(store)
    """
    if behind is not None:
        options["behind"] = behind
    opener: Callable[..., AsyncStore] = _opener(url, "open_async_store", options)
    return opener(url, prefix=prefix, timeout=timeout, **options)


def _opener(url: object, name: str, options: Mapping[str, Any]) -> Any:
    if not isinstance(url, str) or "://" not in url:
        # Not the text itself: whatever it is, it may hold a password.
        shown = "a text without ://" if isinstance(url, str) else f"a {type(url).__name__}"
        raise ConfigError(
            f"a store URL looks like sqlite:///semel.db or redis://localhost:6379/0; got {shown}"
        )
    scheme = url.partition("://")[0]
    backend = TIERS if "behind" in options else BACKENDS.get(scheme)
    of_tiers = TIER_OPTIONS & set(options)
    if of_tiers and backend is not TIERS:
        raise ConfigError(
            f"{min(of_tiers)} goes with a store behind: "
            'open_store("redis://localhost", behind="postgresql://...")'
        )
    if backend is None:
        module = _third_party(scheme)
        if not hasattr(module, name):
            raise ConfigError(
                f"the store of {scheme}:// cannot be opened here: its entry point in "
                f"{ENTRY_POINT_GROUP} has no {name}"
            )
        return getattr(module, name)
    with Needed(backend.install, by=f"{scheme}://", error=ConfigError):
        # The second step too: it may import the driver of this kind of store.
        return getattr(importlib.import_module(backend.module), name)


def _third_party(scheme: str) -> Any:
    # Imported here: it costs more than all of semel, and few ask for another's store.
    from importlib.metadata import entry_points  # noqa: PLC0415

    for entry in entry_points(group=ENTRY_POINT_GROUP):
        if entry.name == scheme:
            return entry.load()
    known = ", ".join(f"{name}://" for name in BACKENDS)
    raise ConfigError(f"no store knows the scheme {scheme}://; {_hint(scheme)}known: {known}")


def _hint(scheme: str) -> str:
    """Name the scheme that was probably meant: others' URLs also name a driver."""
    database, _, driver = scheme.lower().partition("+")
    ours = RELATED.get(database, database)
    if scheme.lower() in BACKENDS:
        return f"write it in small letters, {scheme.lower()}://; "
    if ours not in BACKENDS:
        return ""
    why = " (Idempotency and AsyncIdempotency choose the driver by themselves)" if driver else ""
    return f"write {ours}://{why}; "
