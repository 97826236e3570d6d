"""Many callers on one table: processes, forks, the application's own pool and connection, a bouncer."""

from __future__ import annotations

import asyncio
import threading
import time
import warnings
from contextlib import closing

import psycopg
import pytest
from psycopg_pool import AsyncConnectionPool, ConnectionPool

from semel.core.records import Claimed, Finished, State
from semel.errors import ConfigError, StoreError, StoreUnavailable
from semel.stores.sql.errors import Deadline
from semel.stores.sql.postgres import AsyncPostgresStore, PostgresStore
from servers.postgres import pgbouncer, postgres_server
from stores.postgres_given import blocking, driven, in_threads, migrate, rows, transaction
from stores.sqlite_helpers import (
    RESULT,
    ask,
    finish,
    identity,
    in_a_fork,
    spawn,
    start_fork,
    wait_until,
)

kinds = pytest.mark.parametrize("kind", ["threads", "asyncio"])
fault = pytest.mark.fault

PROCESSES, KEYS = 4, 60
OWNER = b"owner-------"
CURRENT_XACT = "SELECT txid_snapshot_xmax(txid_current_snapshot())"


# --- processes and forks -----------------------------------------------------------------


def claim_everything(url, barrier, answers, number):
    store = PostgresStore(url, timeout=60)
    barrier.wait()
    owner = b"%d" % number
    mine = [key for key in range(KEYS) if isinstance(store.claim(ask(key, owner)), Claimed)]
    for key in mine:
        assert store.complete(identity(key), owner, RESULT, 60.0)
    answers.put(mine)
    store.close()


@fault(17)
def test_processes_that_start_together_claim_each_key_once(postgres_url):
    barrier, answers = spawn.Barrier(PROCESSES), spawn.Queue()
    processes = [
        spawn.Process(target=claim_everything, args=(postgres_url, barrier, answers, number))
        for number in range(PROCESSES)
    ]
    for process in processes:
        process.start()
    claimed = [key for _ in processes for key in answers.get(timeout=600)]
    for process in processes:
        process.join()
    assert sorted(claimed) == list(range(KEYS))


@fault(32)
def test_after_a_fork_each_process_has_connections_of_its_own(postgres_url):
    store = PostgresStore(postgres_url, max_size=1)
    finish(store, "before")
    assert "Finished" in in_a_fork(lambda: store.claim(ask("before", b"child-------")))
    assert "Claimed" in in_a_fork(lambda: store.claim(ask("new", b"child-------")))
    assert isinstance(store.claim(ask("before", b"parent------")), Finished)
    finish(store, "after")
    store.close()


@fault(32)
def test_a_fork_while_threads_use_the_store_harms_neither_side(postgres_url):
    store = PostgresStore(postgres_url, max_size=4, timeout=60)
    store.counts()
    stop = threading.Event()
    failures = []

    def work(number):
        key = 0
        while not stop.is_set():
            try:
                finish(store, f"{number}-{key}")
            except Exception as error:
                failures.append(error)
            key += 1

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    children = [start_fork(finish, store, f"child-{number}") for number in range(5)]
    for child in children:
        child.join(60)
    stop.set()
    for thread in threads:
        thread.join()
    assert failures == []
    assert all(
        store.get(identity(f"child-{number}")).state is State.SUCCEEDED for number in range(5)
    )
    store.close()


@fault(32)
async def test_an_async_store_connects_anew_in_a_forked_child(postgres_url):
    store = AsyncPostgresStore(postgres_url)
    await store.claim(ask("before"))

    def child():
        return asyncio.new_event_loop().run_until_complete(store.claim(ask("new", b"child-------")))

    def in_a_new_thread_of_the_child():
        answers = []
        thread = threading.Thread(target=lambda: answers.append(child()))
        thread.start()
        thread.join()
        return answers

    assert "Claimed" in in_a_fork(in_a_new_thread_of_the_child)
    assert await store.complete(identity("before"), OWNER, RESULT, 60.0)
    await store.close()


def test_given_connections_and_pools_are_refused_after_a_fork(postgres_url):
    with (
        psycopg.connect(postgres_url) as connection,
        ConnectionPool(postgres_url, min_size=1) as pool,
    ):
        for store in (PostgresStore(connection=connection), PostgresStore(pool=pool)):
            store.counts()
            assert "from before the fork" in in_a_fork(store.counts)
            store.counts()


# --- what the application has ------------------------------------------------------------


def test_a_given_connection_is_neither_closed_nor_changed(postgres_url):
    with psycopg.connect(postgres_url) as connection:
        store = PostgresStore(connection=connection)
        finish(store, "k")
        store.close()
        assert not connection.closed
        assert connection.autocommit is False
        assert connection.info.transaction_status is psycopg.pq.TransactionStatus.IDLE
    assert rows(postgres_url, "SELECT status FROM idempotent_record") == [(1,)]


async def test_a_given_async_connection_is_neither_closed_nor_changed(postgres_url):
    async with await psycopg.AsyncConnection.connect(postgres_url) as connection:
        store = AsyncPostgresStore(connection=connection)
        await asyncio.gather(*(store.claim(ask(key)) for key in range(5)))
        await store.close()
        assert not connection.closed
        assert connection.autocommit is False
    assert rows(postgres_url, "SELECT count(*) FROM idempotent_record") == [(5,)]


def test_an_open_transaction_of_the_application_is_refused_and_left_open(postgres_url):
    migrate(postgres_url)
    with psycopg.connect(postgres_url) as connection:
        store = PostgresStore(connection=connection)
        connection.execute("CREATE TABLE business (x int)")
        with pytest.raises(StoreError, match="open transaction"):
            store.claim(ask("k"))
        connection.commit()
        assert isinstance(store.claim(ask("k")), Claimed)


async def test_an_open_transaction_of_an_async_application_is_refused(postgres_url):
    async with await psycopg.AsyncConnection.connect(postgres_url) as connection:
        store = AsyncPostgresStore(connection=connection)
        await connection.execute("SELECT 1")
        with pytest.raises(StoreError, match="open transaction"):
            await store.claim(ask("k"))
        await connection.rollback()
        assert isinstance(await store.claim(ask("k")), Claimed)


def test_a_given_connection_serves_one_call_at_a_time(postgres_url):
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        store = PostgresStore(connection=connection, timeout=30)
        answers = in_threads(lambda number: store.claim(ask("k", b"%d" % number)), 8)
        assert sum(isinstance(answer, Claimed) for answer in answers) == 1
        impatient = PostgresStore(connection=connection, timeout=0.2)
        place = impatient._calls.pool._turn.get()
        with pytest.raises(StoreUnavailable, match="busy with other calls"):
            impatient.claim(ask("k"))
        impatient._calls.pool._turn.give(place)


async def test_a_given_async_connection_that_is_busy_keeps_nobody_waiting_for_ever(postgres_url):
    async with await psycopg.AsyncConnection.connect(postgres_url) as connection:
        store = AsyncPostgresStore(connection=connection, timeout=0.2)
        await store._calls.pool._turn.get()
        with pytest.raises(StoreUnavailable, match="busy with other calls"):
            await store.claim(ask("k"))
        await connection.rollback()


def test_a_given_connection_that_was_closed_is_unavailable(postgres_url):
    connection = psycopg.connect(postgres_url)
    store = PostgresStore(connection=connection)
    store.counts()
    connection.close()
    with pytest.raises(StoreUnavailable, match="closed"):
        store.counts()


def test_a_given_connection_that_was_cut_is_unavailable(postgres_url):
    connection = psycopg.connect(postgres_url)
    store = PostgresStore(connection=connection)
    store.counts()
    rows(postgres_url, "SELECT pg_terminate_backend(%s)", connection.info.backend_pid)
    with pytest.raises(StoreUnavailable):
        store.counts()
    connection.close()


async def test_a_given_async_connection_that_was_cut_is_unavailable(postgres_url):
    connection = await psycopg.AsyncConnection.connect(postgres_url)
    store = AsyncPostgresStore(connection=connection)
    await store.counts()
    rows(postgres_url, "SELECT pg_terminate_backend(%s)", connection.info.backend_pid)
    with pytest.raises(StoreUnavailable):
        await store.counts()
    await connection.close()


def test_a_given_pool_is_used_and_left_open(postgres_url):
    with ConnectionPool(postgres_url, min_size=1, max_size=3) as pool:
        store = PostgresStore(pool=pool)
        in_threads(lambda number: finish(store, number), 6)
        store.close()
        assert not pool.closed
        with pool.connection() as connection:
            assert connection.autocommit is False
            assert connection.execute("SELECT count(*) FROM idempotent_record").fetchone() == (6,)
    with pytest.raises(StoreUnavailable, match="closed"):
        store.counts()


async def test_a_given_async_pool_is_used_and_left_open(postgres_url):
    async with AsyncConnectionPool(postgres_url, min_size=1, max_size=3, open=False) as pool:
        store = AsyncPostgresStore(pool=pool)
        await asyncio.gather(*(store.claim(ask(key)) for key in range(6)))
        await store.close()
        async with pool.connection() as connection:
            assert connection.autocommit is False
        assert (await store.counts()).processing == 6


# --- opening and closing -----------------------------------------------------------------


@kinds
def test_a_store_that_was_closed_says_so(postgres_url, kind):
    with driven(kind, postgres_url) as store:
        store.counts()
        store._finish(store._store.close())
        with pytest.raises(StoreUnavailable, match="was closed"):
            store.counts()


def test_a_connection_that_is_lent_out_is_closed_when_it_comes_back(postgres_url):
    store = PostgresStore(postgres_url)
    with store._calls.pool.lend(Deadline(10.0)) as session:
        store.close()
        assert not session.dead
    assert session.dead


async def test_an_async_connection_that_is_lent_out_is_closed_when_it_comes_back(postgres_url):
    store = AsyncPostgresStore(postgres_url)
    async with store._calls.pool.lend(Deadline(10.0)) as session:
        await store.close()
        assert not session.dead
    assert session.dead


@kinds
def test_connections_that_nobody_needs_any_more_are_closed(postgres_url, kind, monkeypatch):
    with driven(kind, postgres_url, min_size=1, max_size=4) as store:
        store.race([ask("k", b"%d" % number) for number in range(12)])
        assert sessions(postgres_url) > 1
        for module in ("aio", "store"):
            monkeypatch.setattr(f"semel.stores.sql.{module}.MOST_IDLE", 0.0)
        store.counts()
        wait_until(lambda: sessions(postgres_url) == 1)


async def leave_open(url):
    await asyncio.gather(
        *(AsyncPostgresStore(url).claim(ask(key)) for key in range(3)), return_exceptions=True
    )


def run_a_loop(url):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # it is the point
        asyncio.run(leave_open(url))


def test_a_store_that_is_not_closed_does_not_keep_its_loop_from_ending(postgres_url):
    process = spawn.Process(target=run_a_loop, args=(postgres_url,))
    process.start()
    process.join(30)
    assert process.exitcode == 0


def test_another_event_loop_is_told_to_open_another_store(postgres_url):
    store = AsyncPostgresStore(postgres_url)
    with asyncio.Runner() as first, asyncio.Runner() as second:
        first.run(store.counts())
        with pytest.raises(ConfigError, match="belongs to another event loop"):
            second.run(store.counts())
        first.run(store.close())


@kinds
def test_connections_are_opened_when_needed_and_not_before(postgres_url, kind):
    with driven(kind, postgres_url, max_size=3) as store:
        assert sessions(postgres_url) == 0
        store.race([ask("k", b"%d" % number) for number in range(12)])
        assert 1 <= sessions(postgres_url) <= 3
    deadline = time.monotonic() + 20
    while sessions(postgres_url):
        assert time.monotonic() < deadline


# --- what a call costs -------------------------------------------------------------------


def statements_of(server, work):
    before = len(server.log().splitlines())
    work()
    lines = server.log().splitlines()[before:]
    return [line for line in lines if "execute" in line or "statement:" in line]


def test_every_verb_is_one_statement_but_what_takes_an_attempt_over_and_the_last_batch_of_a_purge():
    with postgres_server("log_statement=all", "log_error_verbosity=terse") as server:
        store = PostgresStore(server.fresh_database())
        store.counts()
        key = identity("k")
        for work in (
            lambda: store.claim(ask("k", b"first-------")),
            lambda: store.claim(ask("k", b"second------")),
            lambda: store.renew(key, b"first-------", 0.0),
        ):
            assert len(statements_of(server, work)) == 1
        for work in (
            lambda: store.claim(ask("k", b"second------", lease=0.0)),
            lambda: store.adopt(key, b"third-------", 30.0),
        ):
            assert len(statements_of(server, work)) == 2, "read and judged, then swapped"
        for work in (
            lambda: store.complete(key, b"third-------", RESULT, 60.0),
            lambda: store.claim(ask("k", b"second------")),
            lambda: store.get(key),
            lambda: store.touch(key, 60.0),
            lambda: store.put(key, RESULT, 60.0, owner=OWNER),
            lambda: store.forget(key),
        ):
            assert len(statements_of(server, work)) == 1
        for number in range(2):
            store.put(identity(number), RESULT, 0.0, owner=OWNER)
        purges = [statements_of(server, lambda: store.purge(limit=2)) for _ in range(2)]
        assert list(map(len, purges)) == [1, 2], (
            "the last batch asks for entries of the audit trail"
        )
        store.close()


@kinds
def test_a_duplicate_that_gets_nothing_writes_nothing(postgres_url, kind):
    with driven(kind, postgres_url) as store:
        finish(store, "done")
        store.claim(ask("running"))
        before = rows(postgres_url, CURRENT_XACT)
        store.claim(ask("done", b"duplicate---"))
        store.claim(ask("running", b"duplicate---"))
        assert not store.put(identity("done"), RESULT, 60.0, owner=b"duplicate---")
        assert rows(postgres_url, CURRENT_XACT) == before, "no transaction took a number"
        store.claim(ask("new"))
        assert rows(postgres_url, CURRENT_XACT) != before


@kinds
def test_a_replay_waits_for_nobody(postgres_url, kind):
    with driven(kind, postgres_url, timeout=2) as store:
        finish(store, "done")
        with transaction(postgres_url) as holder:
            holder.execute("SELECT * FROM idempotent_record FOR UPDATE")
            assert isinstance(store.claim(ask("done", b"duplicate---")), Finished)


# --- repair and retention ----------------------------------------------------------------


@kinds
def test_stores_can_be_repaired(postgres_url, kind):
    with driven(kind, postgres_url) as store:

        def adopt(owner):
            return store._finish(store._store.adopt(identity("k"), owner, 30.0))

        assert adopt(b"resolver----") is None
        store.claim(ask("k", hold=True))
        assert adopt(b"resolver----") is None, "its owner is alive"
        store.renew(identity("k"), OWNER, 0.0)
        before = store.get(identity("k"))
        adopted = adopt(b"resolver----")
        assert (adopted.owner, adopted.number, adopted.hold) == (b"resolver----", 1, True)
        assert adopted.fence > before.fence
        assert adopt(b"resolver----").fence == adopted.fence, "sent twice, the same answer"
        assert not store.complete(identity("k"), OWNER, RESULT, 60.0), "a revived owner is second"
        assert store.complete(identity("k"), b"resolver----", RESULT, 60.0)
        assert adopt(b"another-----") is None


@fault(33)
@kinds
def test_a_purge_steps_over_what_is_locked_and_leaves_what_is_alive(postgres_url, kind):
    with driven(kind, postgres_url) as store:
        for key in range(6):
            finish(store, key, ttl=0.01)
        store.claim(ask("live"))
        store.claim(ask("held", hold=True))
        store.renew(identity("held"), OWNER, 0.0)
        time.sleep(0.05)
        with transaction(postgres_url) as holder:
            holder.execute("SELECT * FROM idempotent_record WHERE idem_key = '0' FOR UPDATE")
            assert store.purge(limit=4, abandoned_after=0.0) == 4
            assert store.purge(limit=4, abandoned_after=0.0) == 1
        assert store.purge(limit=4, abandoned_after=0.0) == 1
        left = {record.identity.key for record in store.scan().records}
        assert left == {"live", "held"}


@fault(33)
def test_a_late_duplicate_and_a_purge_agree(postgres_url):
    store = PostgresStore(postgres_url)
    finish(store, "k", ttl=0.01)
    time.sleep(0.05)
    late = "DELETE FROM idempotent_record"
    with blocking(postgres_url, lambda: store.claim(ask("k", b"late--------")), lock=late) as (
        purge,
        answer,
    ):
        purge.commit()
        assert answer.result().number == 1
    assert store.get(identity("k")).owner == b"late--------"
    assert store.purge() == 0
    store.close()


# --- a bouncer ---------------------------------------------------------------------------


@kinds
def test_pgbouncer_in_transaction_mode_serves_more_callers_than_it_has_connections(
    postgres_of_this_worker, postgres_url, kind
):
    with pgbouncer(postgres_of_this_worker) as address:
        url = f"{address}/{postgres_url.rpartition('/')[2]}?prepare=off&max_size=8"
        from semel.stores.sql.postgres import open_async_store, open_store
        from semel.testing import StoreDriver

        opened = open_store(url) if kind == "threads" else open_async_store(url)
        with closing(StoreDriver(opened)) as store:
            for turn in range(12):  # more often than it takes to prepare a statement
                answers = store.race([ask(turn, b"%d" % number) for number in range(8)])
                assert sum(isinstance(answer, Claimed) for answer in answers) == 1
            assert store.send([ask(f"batch-{key}") for key in range(5)])
        prepared = rows(
            f"{address}/{postgres_url.rpartition('/')[2]}",
            "SELECT count(*) FROM pg_prepared_statements",
        )
        assert prepared == [(0,)]


def sessions(url):
    [(count,)] = rows(
        url,
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() "
        "AND application_name = 'semel'",
    )
    return count
