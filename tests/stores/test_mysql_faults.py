"""What a MySQL server can do to a call, done to it: each test checks that its fault really fired."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading

import pymysql
import pytest

from semel.core.records import Busy, Claimed, Encoded, Finished, Identity
from semel.errors import ConfigError, StoreError, StoreFull, StoreUnavailable
from semel.stores.sql.errors import Deadline
from semel.stores.sql.mysql import AsyncMySQLStore, MySQLStore
from servers.mariadb import mariadb_server
from servers.proxy import proxy_to
from stores.mysql_given import (
    IDENTITY,
    KINDS,
    RESULT,
    ask,
    at_once,
    claim_in,
    database_of,
    driven,
    new_owner,
    spy_on_repeats,
    through,
    transaction,
    wait_until,
    waiting_for_a_lock,
)
from stores.sqlite_helpers import in_a_fork

LOST = {2006, 2013}


@pytest.fixture
def server(mariadb_of_this_worker):
    return mariadb_of_this_worker


@pytest.fixture(scope="module")
def breakable():
    """A server that the tests of this module may stop, kill and misconfigure."""
    with mariadb_server() as server:
        yield server


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


# --- lost connections -----------------------------------------------------------------------


def test_a_claim_whose_answer_is_lost_is_given_to_the_same_owner(server, mysql_url, kind):
    with proxy_to(server.port) as proxy, driven(kind, through(proxy, mysql_url)) as store:
        store.counts()
        proxy.lose_reply(lambda request: b"INSERT INTO" in request)
        assert isinstance(store.claim(ask()), Claimed)
        assert proxy.lost == 1
        assert store.get(IDENTITY).number == 1


def test_a_takeover_whose_answer_is_lost_is_given_to_the_same_owner(server, mysql_url, kind):
    with proxy_to(server.port) as proxy, driven(kind, through(proxy, mysql_url)) as store:
        first = ask()
        store.claim(first)
        store.renew(IDENTITY, first.owner, 0)
        proxy.lose_reply(lambda request: b"UPDATE" in request and b"SET payload_hash" in request)
        claim = store.claim(ask())
        assert proxy.lost == 1
        assert isinstance(claim, Claimed)
        assert claim.number == store.get(IDENTITY).number == 2


@pytest.mark.parametrize("verb", ["complete", "fail", "put", "renew", "touch"])
def test_a_write_whose_answer_is_lost_is_answered_all_the_same(server, mysql_url, kind, verb):
    with proxy_to(server.port) as proxy, driven(kind, through(proxy, mysql_url)) as store:
        request = ask()
        if verb == "touch":
            store.put(IDENTITY, RESULT, 60, owner=request.owner)
        elif verb != "put":
            store.claim(request)
        else:
            store.counts()
        word = b"INSERT" if verb == "put" else b"UPDATE"
        proxy.lose_reply(lambda sent: sent[5:11] == word)
        assert {
            "complete": lambda: store.complete(IDENTITY, request.owner, RESULT, 60),
            "fail": lambda: store.fail(
                IDENTITY, request.owner, RESULT, retryable=True, keep_fingerprint=True, ttl=60
            ),
            "put": lambda: store.put(IDENTITY, RESULT, 60, owner=request.owner),
            "renew": lambda: store.renew(IDENTITY, request.owner, 30),
            "touch": lambda: store.touch(IDENTITY, 90),
        }[verb]() is True
        assert proxy.lost == 1


def test_a_server_that_hangs_up_twice_is_an_error(server, mysql_url, kind):
    with proxy_to(server.port) as proxy, driven(kind, through(proxy, mysql_url)) as store:
        store.counts()
        proxy.cut_all()
        proxy.refusing = True
        with pytest.raises(StoreUnavailable) as caught:
            store.claim(ask())
        assert proxy.refused >= 1
        assert "only" not in str(caught.value)  # the password
        outcomes = store.send([ask(Identity("s", str(n))) for n in range(3)])
        assert all(isinstance(outcome, StoreUnavailable) for outcome in outcomes)
        proxy.refusing = False
        assert isinstance(store.claim(ask()), Claimed)


def test_a_server_that_does_not_answer_is_given_up_in_time(server, mysql_url, kind):
    with (
        proxy_to(server.port) as proxy,
        driven(kind, through(proxy, mysql_url), timeout=0.3) as store,
    ):
        store.counts()
        proxy.delay = 1.0
        with pytest.raises(StoreUnavailable):
            store.claim(ask())
        proxy.delay = 0.0
        proxy.cut_all()


# --- restarts and crashes -------------------------------------------------------------------


def test_a_restart_between_claim_and_complete_is_not_noticed(breakable, kind, monkeypatch):
    repeated = spy_on_repeats(monkeypatch)
    with driven(kind, breakable.database()) as store:
        request = ask()
        store.claim(request)
        breakable.restart()
        assert store.complete(IDENTITY, request.owner, RESULT, 60)
        assert isinstance(store.claim(ask()), Finished)
    assert set(repeated) & LOST


@pytest.mark.parametrize("step", ["claim", "complete"])
def test_a_server_killed_in_the_middle_leaves_one_outcome(breakable, kind, step):
    url = breakable.database()
    with driven(kind, url) as store, transaction(breakable, url) as holder:
        store.counts()
        request = ask()
        if step == "complete":
            store.claim(request)
            with holder.cursor() as cursor:
                cursor.execute("SELECT * FROM idempotent_record FOR UPDATE")
            work = lambda: store.complete(IDENTITY, request.owner, RESULT, 60)  # noqa: E731
        else:
            claim_in(holder, ask())
            work = lambda: store.claim(request)  # noqa: E731
        (call,) = at_once([work])
        wait_until(lambda: waiting_for_a_lock(breakable) == 1)
        breakable.kill()
        breakable.start()
        with contextlib.suppress(StoreUnavailable):  # unless the server was back in time
            assert isinstance(call.result(), bool | Claimed)
        if step == "complete":
            assert store.complete(IDENTITY, request.owner, RESULT, 60)
            assert isinstance(store.claim(ask()), Finished)
        else:
            claim = store.claim(request)
            assert (claim.number, claim.takeover) == (1, False)
            assert isinstance(store.claim(ask()), Busy)


def test_a_connection_that_the_server_closed_is_replaced(server, mysql_url, kind):
    with driven(kind, mysql_url) as store:
        store.counts()
        user = database_of(mysql_url)
        for (number,) in server.execute(
            "SELECT id FROM information_schema.processlist WHERE user = %s", user
        ):
            server.execute(f"KILL {number}")
        assert isinstance(store.claim(ask()), Claimed)


# --- limits ---------------------------------------------------------------------------------


def test_a_pool_in_use_is_one_clear_error_and_nothing_is_done(server, mysql_url):
    store = MySQLStore(mysql_url, max_size=1, timeout=20.0)
    store.counts()
    impatient = Identity("s", "impatient")
    with transaction(server, mysql_url) as holder:
        claim_in(holder, ask())
        (blocked,) = at_once([lambda: store.claim(ask())])
        wait_until(lambda: waiting_for_a_lock(server) == 1)
        store._calls._timeout = 0.1
        with pytest.raises(StoreUnavailable, match=r"all 1 connections .* are in use"):
            store.claim(ask(impatient))
        holder.commit()
        assert isinstance(blocked.result(), Busy)
    assert store.get(impatient) is None
    store.close()


async def test_a_pool_in_use_by_tasks_is_one_clear_error(server, mysql_url):
    store = AsyncMySQLStore(mysql_url, max_size=1, timeout=20.0, batching=False)
    await store.counts()
    with transaction(server, mysql_url) as holder:
        claim_in(holder, ask())
        blocked = asyncio.create_task(store.claim(ask()))
        await asyncio.sleep(0.1)
        store._calls._timeout = 0.1
        with pytest.raises(StoreUnavailable, match=r"all 1 connections .* are in use"):
            await store.claim(ask(Identity("s", "impatient")))
        holder.commit()
        assert isinstance(await blocked, Busy)
    await store.close()


def test_waiting_callers_get_the_connection_one_after_the_other(mysql_url):
    store = MySQLStore(mysql_url, max_size=2)
    claims = at_once([lambda n=n: store.claim(ask(Identity("s", str(n)))) for n in range(16)])
    assert all(isinstance(claim.result(), Claimed) for claim in claims)
    assert len(store._calls.pool._idle) <= 2
    store.close()


def test_a_server_without_connections_to_spare_is_named(server, mysql_url, kind):
    user = database_of(mysql_url)
    server.execute(f"ALTER USER {user}@'%' WITH MAX_USER_CONNECTIONS 1")
    with driven(kind, mysql_url) as first, driven(kind, mysql_url) as second:
        first.counts()
        with pytest.raises(StoreUnavailable, match="no connection left"):
            second.counts()


def test_a_read_only_server_is_named(breakable, kind):
    with driven(kind, breakable.database()) as store:
        request = ask()
        store.claim(request)
        breakable.execute("SET GLOBAL read_only = 1")
        try:
            with pytest.raises(StoreUnavailable, match="takes no writes"):
                store.complete(IDENTITY, request.owner, RESULT, 60)
        finally:
            breakable.execute("SET GLOBAL read_only = 0")
        assert store.complete(IDENTITY, request.owner, RESULT, 60)


def test_a_full_disk_refuses_new_records_and_serves_the_old():
    full = ("--innodb-file-per-table=0", "--innodb-data-file-path=ibdata1:8M:autoextend:max:76M")
    with mariadb_server(*full) as server, driven("threads", server.database()) as store:
        store.put(IDENTITY, RESULT, 600, owner=new_owner())
        large = Encoded("raw", os.urandom(1_000_000))

        def fill():
            for number in range(100):
                store.put(Identity("s", str(number)), large, 600, owner=new_owner())

        with pytest.raises(StoreFull, match="no room left"):
            fill()
        assert isinstance(store.claim(ask()), Finished)


def test_a_result_larger_than_the_servers_packets_is_refused(breakable, kind):
    breakable.execute("SET GLOBAL max_allowed_packet = 1048576")
    try:
        with driven(kind, breakable.database()) as store:
            request = ask()
            store.claim(request)
            with pytest.raises(StoreError):
                store.complete(IDENTITY, request.owner, Encoded("raw", bytes(3_000_000)), 60)
            assert store.complete(IDENTITY, request.owner, RESULT, 60)
    finally:
        breakable.execute("SET GLOBAL max_allowed_packet = 16777216")


# --- callers that leave ---------------------------------------------------------------------


async def test_a_cancelled_caller_leaves_no_answer_behind_for_the_next(server, mysql_url):
    store = AsyncMySQLStore(mysql_url, max_size=1)
    await store.counts()
    with transaction(server, mysql_url) as holder:
        claim_in(holder, ask())
        cancelled = asyncio.create_task(store.claim(ask()))
        await asyncio.sleep(0.1)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        other = Identity("s", "other")
        assert isinstance(await store.claim(ask(other)), Claimed)
        assert (await store.get(other)).identity == other
    await store.close()


def test_an_interrupted_thread_leaves_no_answer_behind_for_the_next(mysql_url, monkeypatch):
    store = MySQLStore(mysql_url, max_size=1)
    store.counts()
    read = pymysql.connections.Connection._read_query_result

    def interrupted(*_args, **_more):
        raise KeyboardInterrupt

    monkeypatch.setattr(pymysql.connections.Connection, "_read_query_result", interrupted)
    with pytest.raises(KeyboardInterrupt):
        store.claim(ask())
    monkeypatch.setattr(pymysql.connections.Connection, "_read_query_result", read)
    other = Identity("s", "other")
    assert isinstance(store.claim(ask(other)), Claimed)
    assert store.get(other).identity == other
    store.close()


def test_an_interrupted_connect_gives_its_seat_back(mysql_url, monkeypatch):
    store = MySQLStore(mysql_url, max_size=1, timeout=1.0)
    query = pymysql.connections.Connection.query

    def interrupted(connection, sql, **more):
        if "lock_wait" in sql:
            raise KeyboardInterrupt
        return query(connection, sql, **more)

    monkeypatch.setattr(pymysql.connections.Connection, "query", interrupted)
    with pytest.raises(KeyboardInterrupt):
        store.claim(ask())
    monkeypatch.setattr(pymysql.connections.Connection, "query", query)
    assert isinstance(store.claim(ask()), Claimed)
    store.close()


async def test_a_cancelled_connect_gives_its_seat_back(mysql_url, monkeypatch):
    from semel.stores.sql.mysql import tasks

    store = AsyncMySQLStore(mysql_url, max_size=1, timeout=5.0)

    class Hanging(tasks.Cursor):
        async def execute(self, *_args):
            await asyncio.sleep(60)

    monkeypatch.setattr(tasks, "Cursor", Hanging)
    call = asyncio.create_task(store.claim(ask()))
    await asyncio.sleep(0.2)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    monkeypatch.undo()
    assert isinstance(await store.claim(ask()), Claimed)
    await store.close()


def test_a_closed_store_says_so(mysql_url, kind):
    store = KINDS[kind](mysql_url)
    with driven(kind, mysql_url):
        pass
    if kind == "threads":
        store.counts()
        store.close()
        with pytest.raises(StoreUnavailable, match="closed"):
            store.counts()
        store.close()
    else:

        async def use():
            await store.counts()
            await store.close()
            with pytest.raises(StoreUnavailable, match="closed"):
                await store.counts()
            await store.close()

        asyncio.run(use())


def test_a_call_that_runs_while_the_store_closes_gets_its_answer(server, mysql_url):
    store = MySQLStore(mysql_url)
    store.counts()
    with transaction(server, mysql_url) as holder:
        claim_in(holder, ask())
        (call,) = at_once([lambda: store.claim(ask())])
        wait_until(lambda: waiting_for_a_lock(server) == 1)
        store.close()
        holder.commit()
        assert isinstance(call.result(), Busy)
    assert not store._calls.pool._idle


async def test_a_task_that_runs_while_the_store_closes_gets_its_answer(server, mysql_url):
    store = AsyncMySQLStore(mysql_url)
    await store.counts()
    with transaction(server, mysql_url) as holder:
        claim_in(holder, ask())
        call = asyncio.create_task(store.claim(ask()))
        await asyncio.sleep(0.1)
        await store.close()
        holder.commit()
        assert isinstance(await call, Busy)
    assert not store._calls.pool._idle
    await asyncio.sleep(0)  # the transport closes in the loop's next turn


def test_a_server_that_hung_up_took_all_connections_along(server, mysql_url, kind):
    with proxy_to(server.port) as proxy, driven(kind, through(proxy, mysql_url)) as store:
        pool = store._store._calls.pool
        for session in [store._finish(pool.take(Deadline(60.0))) for _ in range(3)]:
            store._finish(pool.give_back(session))
        assert len(pool._idle) == 3
        proxy.cut_all()
        store.counts()
        assert len(pool._idle) == 1


# --- forks ----------------------------------------------------------------------------------


def test_a_forked_child_speaks_on_connections_of_its_own(server, mysql_url):
    store = MySQLStore(mysql_url)
    request = ask()
    store.claim(request)
    (session,) = store._calls.pool._idle

    def work():
        assert isinstance(store.claim(ask()), Busy)
        assert store.complete(IDENTITY, request.owner, RESULT, 60)
        (own,) = store._calls.pool._idle
        return own.connection.thread_id()

    number = int(in_a_fork(work))
    assert number != session.connection.thread_id()
    assert isinstance(store.claim(ask()), Finished)
    assert list(store._calls.pool._idle) == [session]  # still the parent's, and alive
    store.close()


def test_a_forked_child_may_use_the_store_while_a_thread_of_the_parent_does(server, mysql_url):
    store = MySQLStore(mysql_url, max_size=1)
    store.counts()
    with transaction(server, mysql_url) as holder:
        claim_in(holder, ask())
        answers = []
        thread = threading.Thread(target=lambda: answers.append(store.claim(ask())))
        thread.start()
        wait_until(lambda: waiting_for_a_lock(server) == 1)
        counted = in_a_fork(lambda: store.claim(ask(Identity("s", "child"))))
        holder.commit()
        thread.join()
    assert counted.startswith("Claimed")
    assert isinstance(answers[0], Busy)
    store.close()


def test_a_forked_child_may_use_an_async_store_in_a_loop_of_its_own(mysql_url):
    store = AsyncMySQLStore(mysql_url)

    async def use(request):
        return await store.claim(request)

    async def parent():
        request = ask()
        assert isinstance(await use(request), Claimed)
        loop = asyncio.get_running_loop()
        answer = await loop.run_in_executor(
            None, in_a_fork, lambda: asyncio.run(use(ask(Identity("s", "child"))))
        )
        assert answer.startswith("Claimed")
        assert await store.complete(IDENTITY, request.owner, RESULT, 60)
        await store.close()

    asyncio.run(parent())


# --- login ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda url: url.replace("only", "0nly"), "rejects the user or the password"),
        (lambda url: url.replace("://semel", "://nobody"), "rejects the user or the password"),
        (lambda url: url + "_missing", r"does not let this user in|does not exist"),
    ],
)
def test_a_login_that_fails_is_one_clear_error_without_the_password(
    mysql_url, kind, change, message
):
    with (
        driven(kind, change(mysql_url)) as store,
        pytest.raises(StoreUnavailable, match=message) as caught,
    ):
        store.counts()
    error: BaseException | None = caught.value
    while error is not None:
        assert "for tests" not in repr(error)
        error = error.__cause__ or error.__context__


def test_a_database_that_does_not_exist_is_named(server, kind):
    with (
        driven(kind, server.url("missing_database", user="root", password="")) as store,
        pytest.raises(StoreUnavailable, match=r"missing_database .* does not exist"),
    ):
        store.counts()


def test_a_server_that_is_not_there_is_named(kind):
    with (
        driven(kind, "mysql://user:secret@127.0.0.1:9/semel") as store,
        pytest.raises(StoreUnavailable, match=r"semel at 127.0.0.1:9 cannot be reached"),
    ):
        store.counts()


def test_a_table_that_is_dropped_is_named(server, mysql_url, kind):
    with driven(kind, mysql_url) as store:
        store.counts()
        server.execute("DROP TABLE idempotent_record", database=database_of(mysql_url))
        with pytest.raises(ConfigError, match="has no such table"):
            store.counts()


def test_another_event_loop_is_told_to_open_another_store(mysql_url):
    store = AsyncMySQLStore(mysql_url)
    with asyncio.Runner() as first, asyncio.Runner() as second:
        first.run(store.counts())
        with pytest.raises(ConfigError, match="belongs to another event loop"):
            second.run(store.counts())
        first.run(store.close())
