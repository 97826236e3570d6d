"""Duplicates that wait for a commit hold a connection: `max_waiting` keeps them from taking all.

A pool of four connections, one slow handler, and thirty duplicates of it beside another key. Without
a bound they take every connection, and no other key runs before the slow handler has ended.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, NamedTuple, TypeAlias

import pytest
from sqlalchemy import NullPool, Pool, create_engine, text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from semel import (
    AsyncIdempotency,
    ConcurrentRequest,
    Idempotency,
    Policy,
    RetryTransaction,
    StoreError,
    TooManyWaiting,
)
from semel.events import Event, RejectedBusy
from servers.mariadb import MariaDBServer, mariadb_server
from transactions.conftest import World, started
from transactions.kinds import KINDS, PATIENCE, Kind, sqlalchemy_url
from transactions.test_contention import Pause, paying_slowly

DUPLICATES = 30
CONNECTIONS = 4
WAITING = 2
"""The bound in a transaction if nobody sets one."""

PATIENT = Policy(wait_timeout=PATIENCE)
SERVERS = {"postgresql": "postgres_url", "mariadb": "mysql_url"}


class Gate:
    """Where the slow handler stays until it is let go."""

    def __init__(self) -> None:
        self._reached, self._released = threading.Event(), threading.Event()

    def wait_reached(self) -> None:
        assert self._reached.wait(PATIENCE), "nobody came"

    def release(self) -> None:
        self._released.set()

    def stay(self) -> None:
        self._reached.set()
        assert self._released.wait(PATIENCE), "nobody let go"


Inside: TypeAlias = Callable[[], None] | None
Pay: TypeAlias = Callable[..., Future[Any]]


class Shop(NamedTuple):
    """A database behind a pool of four connections, and units of work on it."""

    pool: Any
    pay: Pay
    """Begins a unit of work (one ledger entry per key) beside the test."""
    ledger: Callable[[], list[str]]


def paying(idem: Idempotency, sessions: Any, key: str, inside: Inside) -> Any:
    with Session(sessions) as session, session.begin():
        with idem.transaction(session, key) as attempt:
            if not attempt.replayed:
                session.execute(text(f"INSERT INTO ledger VALUES ('{key}')"))
                attempt.result = f"paid {key}"
                if inside is not None:
                    inside()
        return attempt


async def paying_async(
    idem: AsyncIdempotency, sessions: Any, threads: ThreadPoolExecutor, key: str, inside: Inside
) -> Any:
    async with AsyncSession(sessions) as session, session.begin():
        async with idem.transaction(session, key) as attempt:
            if not attempt.replayed:
                await session.execute(text(f"INSERT INTO ledger VALUES ('{key}')"))
                attempt.result = f"paid {key}"
                if inside is not None:
                    await asyncio.get_running_loop().run_in_executor(threads, inside)
        return attempt


DRIVERS = {
    "postgresql": {False: "psycopg", True: "asyncpg"},
    "mariadb": {False: "pymysql", True: "asyncmy"},
}


@asynccontextmanager
async def opened(
    url: str, driver: str, *, asynchronous: bool, pool_timeout: float = PATIENCE, **options: Any
) -> AsyncIterator[Shop]:
    """Open the shop; each unit of work runs in a thread or a task of its own."""
    limits = {"pool_size": CONNECTIONS, "max_overflow": 0, "pool_timeout": pool_timeout}
    usual = "psycopg" if url.startswith("postgresql") else "pymysql"
    outside = create_engine(sqlalchemy_url(url, usual), poolclass=NullPool)
    with outside.begin() as connection:
        connection.execute(text("CREATE TABLE ledger (entry VARCHAR(40))"))

    def ledger() -> list[str]:
        with outside.begin() as connection:
            return sorted(connection.execute(text("SELECT entry FROM ledger")).scalars())

    options.setdefault("policy", PATIENT)
    with ThreadPoolExecutor(DUPLICATES + 2) as threads:
        opening = in_tasks if asynchronous else in_threads
        async with opening(url, sqlalchemy_url(url, driver), threads, limits, options) as (
            pool,
            pay,
        ):
            yield Shop(pool, pay, ledger)


@asynccontextmanager
async def in_threads(
    url: str, pool_url: str, threads: ThreadPoolExecutor, limits: Any, options: Any
) -> AsyncIterator[tuple[Pool, Pay]]:
    pooled = create_engine(pool_url, **limits)
    with Idempotency(url, **options) as idem:
        idem.peek("any")
        yield (
            pooled.pool,
            lambda key, inside=None: threads.submit(paying, idem, pooled, key, inside),
        )
    pooled.dispose()


@asynccontextmanager
async def in_tasks(
    url: str, pool_url: str, threads: ThreadPoolExecutor, limits: Any, options: Any
) -> AsyncIterator[tuple[Pool, Pay]]:
    pooled = create_async_engine(pool_url, **limits)
    loop = asyncio.get_running_loop()

    def pay(key: str, inside: Inside = None) -> Future[Any]:
        unit = paying_async(idem, pooled, threads, key, inside)
        return asyncio.run_coroutine_threadsafe(unit, loop)

    async with AsyncIdempotency(url, **options) as idem:
        await idem.peek("any")
        yield pooled.pool, pay
    await pooled.dispose()


async def until(condition: Callable[[], bool], pause: float = 0.01) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "it did not come about in time"
        await asyncio.sleep(pause)


async def answer(future: Future[Any]) -> Any:
    return await asyncio.wait_for(asyncio.wrap_future(future), PATIENCE)


def ended(futures: list[Future[Any]]) -> list[Future[Any]]:
    return [future for future in futures if future.done()]


@pytest.fixture
def url(request: pytest.FixtureRequest, server: str) -> str:
    found: str = request.getfixturevalue(SERVERS[server])
    return found


on_both_servers = pytest.mark.parametrize("server", SERVERS)
in_both_engines = pytest.mark.parametrize("asynchronous", [False, True], ids=["threads", "asyncio"])


@in_both_engines
@on_both_servers
async def test_another_key_runs_beside_thirty_duplicates_of_a_slow_handler(
    url, server, asynchronous
):
    told: list[Event] = []
    gate = Gate()
    async with opened(
        url, DRIVERS[server][asynchronous], asynchronous=asynchronous, hooks=[told.append]
    ) as shop:
        try:
            first = shop.pay("slow", gate.stay)
            await asyncio.to_thread(gate.wait_reached)
            duplicates = [shop.pay("slow") for _ in range(DUPLICATES)]
            assert (await answer(shop.pay("other"))).result == "paid other"
            await until(lambda: len(ended(duplicates)) == DUPLICATES - WAITING)
            assert not first.done()
        finally:
            gate.release()
        assert (await answer(first)).result == "paid slow"
        results = await asyncio.gather(*map(answer, duplicates), return_exceptions=True)
    rejected = [result for result in results if isinstance(result, TooManyWaiting)]
    waited = [result for result in results if not isinstance(result, BaseException)]
    assert len(rejected) == DUPLICATES - WAITING
    assert [(attempt.replayed, attempt.result) for attempt in waited] == [(True, "paid slow")] * 2
    assert "max_waiting" in str(rejected[0])
    assert sum(isinstance(event, RejectedBusy) for event in told) == len(rejected)
    assert shop.ledger() == ["other", "slow"]


@in_both_engines
@on_both_servers
async def test_without_a_bound_the_duplicates_take_every_connection(url, server, asynchronous):
    gate = Gate()
    async with opened(
        url,
        DRIVERS[server][asynchronous],
        asynchronous=asynchronous,
        pool_timeout=1.0,
        max_waiting=None,
    ) as shop:
        try:
            first = shop.pay("slow", gate.stay)
            await asyncio.to_thread(gate.wait_reached)
            waiting = [shop.pay("slow") for _ in range(CONNECTIONS - 1)]
            await until(lambda: shop.pool.checkedout() == CONNECTIONS)
            with pytest.raises(StoreError, match="QueuePool limit"):
                await answer(shop.pay("other"))
            assert ended([first, *waiting]) == []
        finally:
            gate.release()
        assert [(await answer(each)).replayed for each in (first, *waiting)] == [False, *[True] * 3]


@in_both_engines
@on_both_servers
async def test_the_bound_is_for_all_keys_together(url, server, asynchronous):
    gates = {"one": Gate(), "two": Gate()}
    async with opened(
        url, DRIVERS[server][asynchronous], asynchronous=asynchronous, max_waiting=1
    ) as shop:
        try:
            slow = [shop.pay(key, gate.stay) for key, gate in gates.items()]
            for gate in gates.values():
                await asyncio.to_thread(gate.wait_reached)
            futures = [shop.pay(key) for key in gates]
            await until(lambda: len(ended(futures)) == 1)
        finally:
            for gate in gates.values():
                gate.release()
        results = await asyncio.gather(*map(answer, futures), return_exceptions=True)
        await asyncio.gather(*map(answer, slow))
    assert sorted(type(result).__name__ for result in results) == ["Attempt", "TooManyWaiting"]


@in_both_engines
@on_both_servers
async def test_a_call_that_waits_no_longer_makes_room_for_the_next(url, server, asynchronous):
    gate = Gate()
    async with opened(
        url,
        DRIVERS[server][asynchronous],
        asynchronous=asynchronous,
        max_waiting=1,
        policy=Policy(wait_timeout=0.2),
    ) as shop:
        try:
            first = shop.pay("slow", gate.stay)
            await asyncio.to_thread(gate.wait_reached)
            for _ in range(3):
                with pytest.raises(ConcurrentRequest) as refused:
                    await answer(shop.pay("slow"))
                assert type(refused.value) is ConcurrentRequest, "it did not wait"
        finally:
            gate.release()
        await answer(first)


def on(kinds: list[Kind]) -> Any:
    return pytest.mark.parametrize("world", kinds, ids=lambda kind: kind.name, indirect=True)


@on([kind for kind in KINDS if kind.dialect != "sqlite"])
async def test_on_every_connection_the_transaction_goes_on_after_the_error(world):
    pause = Pause()
    async with world.engine(max_waiting=0) as idem:
        first = started(lambda: paying_slowly(world, pause))
        pause.wait_reached()
        async with world.work() as work:
            await work.run("INSERT INTO ledger VALUES ('before', 1)")
            with pytest.raises(TooManyWaiting):
                async with world.once(idem, work, policy=PATIENT):
                    pytest.fail("it ran")
            await work.run("INSERT INTO ledger VALUES ('after', 1)")
        pause.release()
        first.result(PATIENCE)
        assert (await world.pay(idem)).replayed
    assert world.entries() == ["after", "before", "order-1"]


@on([kind for kind in KINDS if kind.name in {"sqlite3", "aiosqlite"}])
async def test_on_sqlite_where_all_keys_wait_for_one_file_nothing_is_bounded(world):
    async with world.engine(max_waiting=0):
        pause = Pause()
        first = started(lambda: paying_slowly(world, pause))
        pause.wait_reached()
        second = started(lambda: paying_within(world, max_waiting=0))
        with pytest.raises(TimeoutError):
            second.result(timeout=0.2)
        pause.release()
        first.result(PATIENCE)
        assert second.result(PATIENCE).replayed


async def paying_within(world: World, **options: Any) -> Any:
    async with world.engine(**options) as idem:
        return await world.pay(idem)


async def test_a_policys_message_is_that_of_the_error_too(postgres_url):
    gate = Gate()
    told = Policy(wait_timeout=PATIENCE, message="we are on it")
    async with opened(
        postgres_url, "psycopg", asynchronous=False, policy=told, max_waiting=0
    ) as shop:
        try:
            first = shop.pay("slow", gate.stay)
            await asyncio.to_thread(gate.wait_reached)
            with pytest.raises(TooManyWaiting) as refused:
                await answer(shop.pay("slow"))
            assert refused.value.text == "we are on it"
        finally:
            gate.release()
        await answer(first)


# --- a server that gives up the whole transaction after a lock wait ------------------------------


@pytest.fixture(scope="module")
def rolling_back() -> Iterator[MariaDBServer]:
    with mariadb_server("--innodb-rollback-on-timeout") as server:
        yield server


STRICT = [kind for kind in KINDS if kind.name in {"pymysql", "asyncmy"}]


@pytest.mark.parametrize("kind", STRICT, ids=lambda kind: kind.name)
async def test_where_a_lock_wait_may_end_the_transaction_duplicates_wait_without_a_bound(
    rolling_back, kind
):
    world = World(kind, rolling_back.database())
    async with world.engine(max_waiting=0) as idem:
        pause = Pause()
        first = started(lambda: paying_slowly(world, pause))
        pause.wait_reached()

        async def second() -> Any:
            async with world.engine(max_waiting=0) as other, world.work() as work:
                await work.run("INSERT INTO ledger VALUES ('before', 1)")
                async with world.once(other, work, policy=PATIENT) as attempt:
                    assert attempt.replayed

        waiting = started(second)
        await until(lambda: bool(rolling_back.execute(LOCK_WAITS)), LOOKED_AGAIN)
        pause.release()
        first.result(PATIENCE)
        waiting.result(PATIENCE)
        assert (await world.pay(idem)).replayed
    assert world.entries() == ["before", "order-1"]


LOCK_WAITS = "SELECT 1 FROM information_schema.innodb_trx WHERE trx_state = 'LOCK WAIT'"
LOOKED_AGAIN = 0.2
"""The server shows again what it has shown within the last 100 ms."""


@pytest.mark.parametrize("impatient", [Policy(wait_timeout=0.2), Policy(concurrent="reject")])
@pytest.mark.parametrize("kind", STRICT, ids=lambda kind: kind.name)
async def test_a_transaction_that_the_server_gave_up_with_the_wait_is_to_be_repeated(
    rolling_back, kind, impatient
):
    world = World(kind, rolling_back.database())
    async with world.engine() as idem:
        pause = Pause()
        first = started(lambda: paying_slowly(world, pause))
        pause.wait_reached()
        with pytest.raises(RetryTransaction):
            async with world.work() as work:
                await work.run("INSERT INTO ledger VALUES ('given up', 1)")
                async with world.once(idem, work, policy=impatient):
                    pytest.fail("it ran")
        pause.release()
        first.result(PATIENCE)
    assert world.entries() == ["order-1"]
