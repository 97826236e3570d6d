"""Writes that miss a row that is there, and servers that no longer take writes.

| fault | expected |
|---|---|
| 58 complete, fail or renew reaches a node before the row | tried again; never a lost lease |
| 61 pooled connections to a server that takes no writes | replaced; calls work within their timeout |

A real cluster has the first of these (`make test-galera`). Here a proxy makes a write miss its row.
"""

from __future__ import annotations

import contextlib

import asyncpg
import pytest
from psycopg_pool import AsyncConnectionPool, ConnectionPool

from semel import Idempotency, Policy
from semel.core.records import Busy, Claimed, Identity, RenewRequest, State
from semel.errors import StoreUnavailable
from semel.stores.sql.errors import Deadline
from semel.stores.sql.mysql import AsyncMySQLStore, MySQLStore
from semel.stores.sql.postgres import AsyncPostgresStore, PostgresStore
from semel.stores.sql.verbs import Statement
from semel.testing import StoreDriver
from servers.mariadb import PASSWORD, mariadb_server
from servers.postgres import postgres_server
from servers.proxy import proxy_to
from stores.mysql_given import (
    IDENTITY,
    KINDS,
    ask,
    at_once,
    driven,
    spy_on_repeats,
    through,
    wait_until,
    write_as_owner,
)

fault = pytest.mark.fault

STORES = {
    ("MariaDB", "threads"): MySQLStore,
    ("MariaDB", "asyncio"): AsyncMySQLStore,
    ("PostgreSQL", "threads"): PostgresStore,
    ("PostgreSQL", "asyncio"): AsyncPostgresStore,
}


@pytest.fixture
def server(mariadb_of_this_worker):
    return mariadb_of_this_worker


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


# --- a write that misses its row ------------------------------------------------------------


def missing_the_row(proxy, times):
    """Let the next writes of owners, so many of them, find no running record, as on a node that
    has not applied the claim yet; returns what counts them."""
    missed = []

    def rewrite(request):
        if b"UPDATE" not in request or len(missed) == times:
            return request
        missed.append(request)
        return request.replace(b"AND status = 0", b"AND status = 9")

    proxy.rewrite = rewrite
    return missed


@fault(58)
@pytest.mark.parametrize("verb", ["complete", "fail", "renew"])
def test_a_write_that_misses_the_running_record_of_its_owner_is_tried_again(
    server, mysql_url, kind, verb
):
    with proxy_to(server.port) as proxy, driven(kind, through(proxy, mysql_url)) as store:
        request = ask()
        store.claim(request)
        missed = missing_the_row(proxy, 3)
        assert write_as_owner(store, verb, request) is True
        assert len(missed) == 3
        record = store.get(IDENTITY)
        assert record.owner == request.owner
        if verb == "renew":
            assert record.lease_until - record.now > 300
        else:
            assert record.state is {"complete": State.SUCCEEDED, "fail": State.FAILED}[verb]


@fault(58)
@pytest.mark.parametrize("verb", ["complete", "fail", "renew"])
def test_a_running_record_that_every_write_misses_is_an_outage_and_no_lost_lease(
    server, mysql_url, kind, verb
):
    with proxy_to(server.port) as proxy, driven(kind, through(proxy, mysql_url)) as store:
        request = ask()
        store.claim(request)
        missed = missing_the_row(proxy, 1000)
        with pytest.raises(StoreUnavailable, match="none of 20 writes reached it") as caught:
            write_as_owner(store, verb, request)
        assert repr(IDENTITY.key) not in str(caught.value), "a key may be a secret"
        assert len(missed) == 20


@fault(58)
@pytest.mark.parametrize("times", [1, 2, 1000])
def test_leases_that_a_batch_misses_are_not_called_renewed(server, mysql_url, kind, times):
    with proxy_to(server.port) as proxy, driven(kind, through(proxy, mysql_url)) as store:
        claims = [ask(Identity("s", str(number))) for number in range(3)]
        for request in claims:
            store.claim(request)
        lost = ask(Identity("s", "lost"))
        missed = missing_the_row(proxy, times)
        answers = store.send(
            [RenewRequest(request.identity, request.owner, 600.0) for request in (*claims, lost)]
        )
        assert missed
        assert answers[-1] is False
        for request, answer in zip(claims, answers, strict=False):
            record = store.get(request.identity)
            assert (record.lease_until - record.now > 300) is (answer is True)
            assert answer is True or (times == 1000 and isinstance(answer, StoreUnavailable))
        others = [ask(request.identity) for request in claims]
        asked = [RenewRequest(other.identity, other.owner, 600.0) for other in others]
        assert store.send(asked) == [False] * 3


@fault(58)
def test_a_result_whose_save_misses_its_record_is_saved_later_and_nothing_runs_twice(
    server, mysql_url
):
    runs = []
    with (
        proxy_to(server.port) as proxy,
        Idempotency(through(proxy, mysql_url), policy=Policy(lease=3.0)) as idem,
    ):
        idem.peek("any")
        missed = missing_the_row(proxy, 50)
        assert idem.execute("k", lambda: runs.append(1) or "done") == "done"
        wait_until(lambda: len(missed) == 50)
        assert idem.execute("k", lambda: runs.append(2) or "again") == "done"
    assert runs == [1]


def test_a_server_that_does_not_know_galera_is_set_up_without_it(server, mysql_url, kind):
    asked = []

    def rewrite(request):
        if b"wsrep_sync_wait" in request:
            asked.append(request)
        return request.replace(b"wsrep_sync_wait", b"wsrep_sync_xxxx")

    with proxy_to(server.port) as proxy:
        proxy.rewrite = rewrite
        with driven(kind, through(proxy, mysql_url), batching=False) as store:
            assert isinstance(store.claim(ask()), Claimed)
            proxy.cut_all()
            assert isinstance(store.claim(ask()), Busy)
            assert proxy.connections == 2
    assert len(asked) == 2  # each connection may lead to another server


def test_a_session_that_cannot_be_set_up_is_an_error(server, mysql_url, kind):
    with proxy_to(server.port) as proxy:
        proxy.rewrite = lambda request: request.replace(b"+00:00", b"+99:00")
        with driven(kind, through(proxy, mysql_url)) as store:
            with pytest.raises(StoreUnavailable, match="time zone"):
                store.counts()
            proxy.rewrite = lambda request: request
            assert store.counts().processing == 0


def test_every_session_waits_for_what_its_node_has_to_apply(mysql_url, kind):
    with driven(kind, mysql_url) as store:
        pool = store._store._calls.pool
        session = store._finish(pool.take(Deadline(60.0)))
        reply = store._finish(
            session.execute(Statement("SELECT @@wsrep_sync_wait", (), writes=False))
        )
        assert reply.rows == [(3,)]
        store._finish(pool.give_back(session))


# --- a failover, after which the old server still answers ------------------------------------


class Failover:
    """Two servers behind one address; the first becomes read-only, and keeps its connections."""

    def __init__(self, proxy, old, new, url):
        self.proxy, self.old, self.new = proxy, old, new
        self.url = through(proxy, url)

    def begin(self):
        """The old server takes no writes any more."""
        self.old.execute("SET GLOBAL read_only = 1")

    def end(self):
        """Its address leads to the new one."""
        self.proxy.upstream_port = self.new.port


def set_read_only(server, value):
    server.run(f"ALTER SYSTEM SET default_transaction_read_only = {value}")
    server.run("SELECT pg_reload_conf()")
    # By then the server has told every session that was open before.
    wait_until(lambda: server.run("SHOW default_transaction_read_only") == [(value,)])


class PostgresFailover(Failover):
    def begin(self):
        set_read_only(self.old, "on")


@pytest.fixture(scope="module")
def mariadbs():
    with mariadb_server() as old, mariadb_server() as new:
        for server in (old, new):
            server.execute("CREATE DATABASE shop")
            server.execute("CREATE USER app@'%%' IDENTIFIED BY %s", PASSWORD)
            server.execute("GRANT ALL ON shop.* TO app@'%'")
        yield old, new, [server.url("shop", "app") for server in (old, new)]


@pytest.fixture(scope="module")
def postgreses():
    with postgres_server() as old, postgres_server() as new:
        yield old, new, [old.url(), new.url()]


@pytest.fixture
def of_mariadb(mariadbs):
    old, new, urls = mariadbs
    for server, url in zip((old, new), urls, strict=True):
        server.execute("SET GLOBAL read_only = 0")
        server.execute("DROP TABLE IF EXISTS shop.idempotent_record")
        with contextlib.closing(MySQLStore(url)) as store:
            store.migrate()
    with proxy_to(old.port) as proxy:
        yield Failover(proxy, old, new, urls[0])


@pytest.fixture
def of_postgres(postgreses):
    old, new, urls = postgreses
    set_read_only(old, "off")
    for server, url in zip((old, new), urls, strict=True):
        with contextlib.closing(PostgresStore(url)) as store:
            store.migrate()
        server.run("TRUNCATE idempotent_record")
    with proxy_to(old.port) as proxy:
        yield PostgresFailover(proxy, old, new, urls[0])


@pytest.fixture(params=["MariaDB", "PostgreSQL"])
def failover(request):
    return request.getfixturevalue("of_mariadb" if request.param == "MariaDB" else "of_postgres")


def store_of(failover, kind, **options):
    database = "PostgreSQL" if isinstance(failover, PostgresFailover) else "MariaDB"
    return contextlib.closing(StoreDriver(STORES[database, kind](failover.url, **options)))


def fill_pools(store, size=8):
    """Open so many connections for calls, and one of each other kind."""
    pool = store._store._calls.pool
    for session in [store._finish(pool.take(Deadline(60.0))) for _ in range(size)]:
        store._finish(pool.give_back(session))
    assert len(pool._idle) == size
    owner = ask(Identity("s", "before"))
    assert isinstance(store.send([owner])[0], Claimed)
    assert store.send([RenewRequest(owner.identity, owner.owner, 30.0)]) == [True]


@fault(61)
def test_pooled_connections_to_a_server_that_became_read_only_are_replaced(failover, kind):
    with store_of(failover, kind) as store:
        fill_pools(store)
        failover.begin()
        failover.end()
        requests = [ask(Identity("s", str(number))) for number in range(20)]
        for request in requests:  # none of them meets a connection that takes no writes for good
            assert isinstance(store.claim(request), Claimed)
        assert store.send([RenewRequest(ask.identity, ask.owner, 30.0) for ask in requests]) == (
            [True] * 20
        )
        crowd = store.race([ask(Identity("crowd", str(number))) for number in range(20)])
        assert all(isinstance(claim, Claimed) for claim in crowd)


@fault(61)
def test_a_call_that_meets_a_read_only_server_looks_for_the_primary(failover, kind, monkeypatch):
    repeats = spy_on_repeats(monkeypatch)
    with store_of(failover, kind, timeout=30.0) as store:
        fill_pools(store)
        before = len(repeats)
        failover.begin()
        (call,) = at_once([lambda: store.claim(ask())])
        wait_until(lambda: len(repeats) > before)
        failover.end()
        assert isinstance(call.result(), Claimed)


@fault(61)
def test_a_node_that_left_its_cluster_is_no_permanent_error(of_mariadb, kind):
    with store_of(of_mariadb, kind) as store:
        fill_pools(store)
        of_mariadb.old.execute(
            "CREATE TRIGGER shop.left_the_cluster BEFORE INSERT ON shop.idempotent_record "
            "FOR EACH ROW SIGNAL SQLSTATE '08S01' SET MYSQL_ERRNO = 1047, MESSAGE_TEXT = 'WSREP'"
        )
        with pytest.raises(StoreUnavailable, match="cannot commit"):
            store.claim(ask())
        of_mariadb.end()
        assert isinstance(store.claim(ask()), Claimed)


@fault(61)
def test_a_node_that_does_not_catch_up_with_its_cluster_is_left(of_mariadb, kind):
    # What `wsrep_sync_wait` answers then, by a function in a view in the place of the table.
    behind = (
        "CREATE OR REPLACE FUNCTION shop.behind() RETURNS INT BEGIN "
        "SIGNAL SQLSTATE 'HY000' SET MYSQL_ERRNO = 1205, MESSAGE_TEXT = 'wait'; RETURN 1; END"
    )
    view = "CREATE VIEW shop.idempotent_record AS SELECT * FROM shop.records WHERE shop.behind()"
    with store_of(of_mariadb, kind) as store:
        store.claim(ask())
    of_mariadb.old.execute("RENAME TABLE shop.idempotent_record TO shop.records")
    of_mariadb.old.execute(behind)
    of_mariadb.old.execute(view)
    try:
        with store_of(of_mariadb, kind) as store:
            with pytest.raises(StoreUnavailable, match="behind its cluster"):
                store.get(IDENTITY)
            of_mariadb.end()
            assert store.get(IDENTITY) is None
    finally:
        of_mariadb.old.execute("DROP VIEW shop.idempotent_record")
        of_mariadb.old.execute("RENAME TABLE shop.records TO shop.idempotent_record")


def test_a_conflict_of_group_replication_is_repeated(of_mariadb, kind, monkeypatch):
    repeats = spy_on_repeats(monkeypatch)
    with store_of(of_mariadb, kind, timeout=30.0) as store:
        store.counts()
        of_mariadb.old.execute(
            "CREATE TRIGGER shop.conflict BEFORE INSERT ON shop.idempotent_record "
            "FOR EACH ROW SIGNAL SQLSTATE 'HY000' SET MYSQL_ERRNO = 3101, MESSAGE_TEXT = 'conflict'"
        )
        (call,) = at_once([lambda: store.claim(ask())])
        wait_until(lambda: 3101 in repeats)
        of_mariadb.old.execute("DROP TRIGGER shop.conflict")
        assert isinstance(call.result(), Claimed)


# --- the application's own pool --------------------------------------------------------------


@fault(61)
def test_a_given_pool_replaces_connections_to_a_server_that_became_read_only(of_postgres):
    with ConnectionPool(of_postgres.url, min_size=8, max_size=8, open=True) as pool:
        pool.wait(60.0)
        with contextlib.closing(PostgresStore(pool=pool, timeout=30.0)) as store:
            store.counts()
            of_postgres.begin()
            of_postgres.end()
            for number in range(20):
                assert isinstance(store.claim(ask(Identity("s", str(number)))), Claimed)


@fault(61)
@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
async def test_a_given_pool_of_tasks_replaces_them_too(of_postgres, driver):
    url = of_postgres.url
    async with contextlib.AsyncExitStack() as stack:
        if driver == "psycopg":
            pool = AsyncConnectionPool(url, min_size=8, max_size=8, open=False)
            await stack.enter_async_context(pool)
            await pool.wait(60.0)
        else:
            pool = await stack.enter_async_context(asyncpg.create_pool(url, min_size=8, max_size=8))
        store = AsyncPostgresStore(pool=pool, timeout=30.0)
        await store.counts()
        of_postgres.begin()
        of_postgres.end()
        for number in range(20):
            assert isinstance(await store.claim(ask(Identity("s", str(number)))), Claimed)
        await store.close()
