"""Transactions behind a front: SQL decides, and Redis hears of a record once its commit was seen."""

from __future__ import annotations

import contextlib

import pytest
import redis

from semel import AsyncIdempotency, Idempotency, Policy, open_async_store, open_store
from transactions.kinds import KINDS

NAMES = {"sqlite3", "aiosqlite", "psycopg", "asyncpg", "pymysql", "asyncmy"}

pytestmark = pytest.mark.parametrize(
    "world",
    [kind for kind in KINDS if kind.name in NAMES],
    ids=lambda kind: kind.name,
    indirect=True,
)


@contextlib.asynccontextmanager
async def tiered(world, front):
    """An engine with Redis in front of the world's database."""
    if world.kind.asynchronous:
        store = open_async_store(front, behind=world.url)
        async with AsyncIdempotency(store) as idem:
            await idem.peek("any")
            yield idem
        await store.close()
    else:
        store = open_store(front, behind=world.url)
        with Idempotency(store) as idem:
            idem.peek("any")
            yield idem
        store.close()


@pytest.fixture
def front(redis_url):
    """What is in the front."""
    with contextlib.closing(redis.Redis.from_url(redis_url)) as client:
        yield client


class Declined(Exception):
    """A business error."""


async def run_again(world, idem):
    def fn():
        return "ran again"

    async def awaited():
        return "ran again"

    return await world.done(idem.run("order-1", awaited if world.kind.asynchronous else fn))


async def test_a_transaction_that_was_rolled_back_never_reaches_the_front(world, redis_url, front):
    async with tiered(world, redis_url) as idem:
        with pytest.raises(Declined):
            async with world.work() as work:
                async with world.once(idem, work) as attempt:
                    attempt.result = "rolled back"
                raise Declined
        assert front.dbsize() == 0
        assert (await run_again(world, idem)).value == "ran again"


async def test_the_front_answers_for_a_record_after_its_commit_was_seen(world, redis_url, front):
    async with tiered(world, redis_url) as idem:
        async with world.work() as work:
            async with world.once(idem, work) as attempt:
                attempt.result = "paid"
            assert front.dbsize() == 0, "told before the commit"
        assert front.dbsize() == 0, "nobody has asked yet"
        assert (await run_again(world, idem)).value == "paid"
        world.query("DELETE FROM idempotent_record")  # from here on, only the front knows
        again = await run_again(world, idem)
        assert (again.replayed, again.value) == (True, "paid")


async def test_a_record_that_its_policy_holds_is_not_copied(world, redis_url, front):
    async with tiered(world, redis_url) as idem:
        async with world.work() as work:
            options = {"policy": Policy(abandoned="hold")}
            async with world.once(idem, work, **options) as attempt:
                attempt.result = "paid"
        assert (await run_again(world, idem)).value == "paid"
        assert all(key.endswith(b"~generation") for key in front.scan_iter())
