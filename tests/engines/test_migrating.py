"""`migrate` of both engines: tables are created the same way on every store."""

from __future__ import annotations

import asyncio
from contextlib import closing

import pytest

from semel import AsyncIdempotency, Idempotency, open_async_store, open_store
from semel.cli import main
from semel.testing import AsyncFaultyStore, FaultyStore


def migrated(store):
    with Idempotency(store) as idem:
        return idem.migrate()


async def migrated_async(store):
    async with AsyncIdempotency(store) as idem:
        return await idem.migrate()


@pytest.mark.parametrize("asynchronous", [False, True], ids=["threads", "asyncio"])
@pytest.mark.parametrize("kind", ["sqlite", "postgres", "mysql"])
def test_an_engine_creates_the_table_that_the_command_would_create(request, kind, asynchronous):
    url = request.getfixturevalue(f"{kind}_url")
    for _ in range(2):  # it is safe to repeat
        version = asyncio.run(migrated_async(url)) if asynchronous else migrated(url)
        assert version == 1
    assert main(["--url", url, "counts"]) == 0  # a command creates no table: it was there


def test_of_two_tiers_the_store_behind_is_migrated(redis_url, sqlite_url):
    with closing(open_store(redis_url, behind=sqlite_url)) as store:
        assert migrated(store) == 1
    assert main(["--url", sqlite_url, "counts"]) == 0

    async def in_tasks():
        store = open_async_store(redis_url, behind=sqlite_url)
        assert await migrated_async(store) == 1
        await store.close()

    asyncio.run(in_tasks())


@pytest.mark.parametrize("kind", ["memory", "redis"])
def test_a_store_without_tables_has_nothing_to_migrate(request, kind):
    url = "memory://" if kind == "memory" else request.getfixturevalue("redis_url")
    assert migrated(url) is None
    assert asyncio.run(migrated_async(url)) is None


def test_a_store_that_fails_on_purpose_is_migrated_as_it_is(sqlite_url):
    assert migrated(FaultyStore(open_store(sqlite_url))) == 1
    assert asyncio.run(migrated_async(AsyncFaultyStore(open_async_store(sqlite_url)))) == 1
