"""A server that refuses connections: looked for during half of `timeout`, by every store.

One that refuses the login would refuse it again, and is asked once.

Time stands still here, but for the pauses between two tries.
"""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from urllib.parse import urlsplit, urlunsplit

import pytest

from semel import StoreUnavailable, open_async_store, open_store
from semel.core.records import Identity
from semel.errors import StoreRefused
from semel.stores.redis import retry
from semel.stores.redis import tasks as redis_tasks
from semel.stores.redis import threads as redis_threads
from semel.stores.sql import aio, store
from semel.stores.sql import errors as sql_errors
from semel.stores.urls import SEARCH_SHARE

TIMEOUT = 4.0
LONGEST_PAUSE = 0.25

URLS = [
    "redis://127.0.0.1:1/0",
    "postgresql://shop:secret@127.0.0.1:1/shop",
    "postgresql://shop:secret@127.0.0.1:1/shop?keepalives=1",  # for asyncio: psycopg
    "mysql://shop:secret@127.0.0.1:1/shop",
]

KEY = Identity("orders", "42")


class Clock:
    """Goes on only while somebody waits."""

    def __init__(self) -> None:
        self.now = time.monotonic()
        self.pauses: list[float] = []

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds

    async def async_sleep(self, seconds: float) -> None:
        self.sleep(seconds)


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    for module in (redis_threads, sql_errors):
        monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(retry, "monotonic", clock.monotonic)
    patched = SimpleNamespace(**{**vars(asyncio), "sleep": clock.async_sleep})
    monkeypatch.setattr(redis_tasks, "asyncio", patched)
    monkeypatch.setattr(store, "sleep", clock.sleep)
    monkeypatch.setattr(aio, "sleep", clock.async_sleep)
    return clock


def check(clock: Clock) -> None:
    assert len(clock.pauses) > 5
    assert abs(sum(clock.pauses) - TIMEOUT * SEARCH_SHARE) <= LONGEST_PAUSE


@pytest.mark.parametrize("url", URLS)
def test_it_is_looked_for_during_half_of_the_time(url, clock):
    store = open_store(url, timeout=TIMEOUT)
    with pytest.raises(StoreUnavailable) as refused:
        store.get(KEY)
    store.close()
    check(clock)
    reasons, error = [], refused.value
    while error is not None:
        reasons.append(error)
        error = error.__cause__ or error.__context__
    assert not any(isinstance(reason, IndexError) for reason in reasons), "it has no part in this"


@pytest.mark.parametrize("url", URLS)
async def test_it_is_looked_for_during_half_of_the_time_by_tasks(url, clock):
    store = open_async_store(url, timeout=TIMEOUT)
    with pytest.raises(StoreUnavailable):
        await store.get(KEY)
    await store.close()
    check(clock)


PATIENT = 60.0
"""Seconds of a clock that stands still: these servers are real, and may be slow."""


@pytest.fixture(params=["redis", "postgres", "mysql"])
def unknown_user(request):
    """The URL of a server that runs, with a user that it does not know."""
    parts = urlsplit(request.getfixturevalue(f"{request.param}_url"))
    return urlunsplit(parts._replace(netloc=f"nobody:secret@{parts.hostname}:{parts.port}"))


def test_a_login_that_is_refused_is_not_tried_again(unknown_user, clock):
    store = open_store(unknown_user, timeout=PATIENT)
    with pytest.raises(StoreRefused):
        store.get(KEY)
    store.close()
    assert clock.pauses == []


async def test_a_login_that_is_refused_is_not_tried_again_by_tasks(unknown_user, clock):
    store = open_async_store(unknown_user, timeout=PATIENT)
    with pytest.raises(StoreRefused):
        await store.get(KEY)
    await store.close()
    assert clock.pauses == []
