"""Finds the two stores of a tiered one: by URL, or as objects of the application.

This module checks. What is wrong is said before anything is connected.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, TypeVar

from semel.errors import ConfigError
from semel.stores.base import AsyncStore, Store
from semel.stores.redis import AsyncRedisStore, RedisStore
from semel.stores.registry import BACKENDS, TIER_OPTIONS
from semel.stores.urls import did_you_mean

RedisKind = TypeVar("RedisKind", RedisStore, AsyncRedisStore)

FRONT_TTL: Final = 600.0
"""How long the front answers with a copy. It bounds how long a lost mark can matter."""

FRONT_TIMEOUT: Final = 0.25
"""How long a call of the front may take: once, and then the breaker is open."""


def check_front_url(url: str) -> None:
    """Refuse a URL that is not of the Redis family."""
    backend = BACKENDS.get(url.partition("://")[0])
    if backend is None or backend != BACKENDS["redis"]:
        raise ConfigError(
            "a store behind goes with Redis in front, as in redis://localhost with "
            "behind=sqlite:///semel.db; leave behind out for another store"
        )


def check_behind_url(url: str) -> None:
    """Refuse a store behind that forgets with its process: Redis would outlast what decides.

    A store object in memory is accepted: it is for a test, and shared among the engines of a
    process.
    """
    if url.partition("://")[0] == "memory":
        raise ConfigError(
            "the store behind decides, so it must outlast the process, and memory:// does not; "
            "give an SQL store, as in behind=sqlite:///semel.db (a test may give a MemoryStore)"
        )


def checked_front(front: object, kind: type[RedisKind], options: Mapping[str, Any]) -> RedisKind:
    """Give a Redis store of the application, if it is one; options are for URLs."""
    if not isinstance(front, kind):
        found = type(front).__name__
        raise ConfigError(f"the front must be a Redis URL or {kind.__name__}, not {found}")
    if options:
        name = min(options)
        raise ConfigError(
            f"the option {name!r} goes with a front that is given by URL"
            + did_you_mean(name, TIER_OPTIONS)
        )
    return front


def checked_behind(behind: Any, *, asynchronous: bool) -> Any:
    """Give a store that decides: of the right kind, and not Redis again."""
    if isinstance(behind, (RedisStore, AsyncRedisStore)):
        raise ConfigError("the store behind decides, so it must not be Redis; give an SQL store")
    found = type(behind).__name__
    if not isinstance(behind, AsyncStore if asynchronous else Store):
        wanted = "asyncio" if asynchronous else "threads"
        raise ConfigError(f"the store behind must be one for {wanted}, not {found}")
    return behind
