"""Worlds for the tests of both engines: each kind of engine on each kind of store."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from engines.facade import KINDS, PATIENCE, World


@pytest.fixture(params=KINDS)
def kind(request) -> str:
    """Threads, then asyncio."""
    return request.param


@pytest.fixture(params=["memory", "sqlite", "redis", "postgres", "mysql", "tiers"])
def world(request, kind: str) -> Iterator[World]:
    """Both engines in turn, on each store in turn; tiers are Redis in front of SQLite."""
    options = {}
    match request.param:
        case "memory":
            url = "memory://"
        case "tiers":
            url = request.getfixturevalue("redis_url")
            behind = request.getfixturevalue("sqlite_url")
            options = {"behind": f"{behind}?synchronous=NORMAL", "front_timeout": PATIENCE}
        case single:
            url = request.getfixturevalue(f"{single}_url")
    with World(kind, url, **options) as opened:
        yield opened


@pytest.fixture
def memory_world(kind: str) -> Iterator[World]:
    """Both engines in turn, for what has nothing to do with the kind of store."""
    with World(kind, "memory://") as opened:
        yield opened


@pytest.fixture(params=["sqlite", "redis", "postgres", "mysql"])
def lasting_url(request) -> str:
    """A store that outlives a process."""
    return request.getfixturevalue(f"{request.param}_url")
