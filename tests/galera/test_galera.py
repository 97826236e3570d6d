"""A Galera cluster of three nodes: `make test-galera`.

| fault | expected |
|---|---|
| 58 complete, fail or renew reaches a node before the claim's row | tried again; never a lost lease |
| 61 pooled connections to a node that left the cluster | replaced; calls work within their timeout |
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pymysql
import pytest

from semel import AsyncIdempotency, Idempotency, Policy
from semel.core.records import Claimed, Identity, State
from semel.errors import StoreUnavailable
from semel.stores.sql.errors import Deadline
from servers.galera import galera_cluster
from servers.proxy import Balancer, proxy_to
from stores.mysql_given import (
    IDENTITY,
    KINDS,
    ask,
    database_of,
    driven,
    through,
    wait_until,
    write_as_owner,
)
from transactions.kinds import mysql_login

fault = pytest.mark.fault

CALLERS, CALLS = 16, 20
POLICY = Policy(lease=3.0, concurrent="wait", wait_timeout=60.0)
ROWS = (50_000, 100_000, 200_000, 400_000)
"""Of a transaction that keeps the other nodes busy; the next larger one if that was too quick."""


@pytest.fixture(scope="module")
def nodes():
    with galera_cluster() as nodes:
        yield nodes


@pytest.fixture
def url(nodes):
    """An empty database, by the address of the first node; every node has it."""
    url = nodes[0].database()
    name = database_of(url)
    nodes[0].execute(f"CREATE TABLE {name}.big (a BIGINT AUTO_INCREMENT PRIMARY KEY, b CHAR(64))")
    nodes[0].execute(f"CREATE TABLE {name}.ledger (entry VARCHAR(100) NOT NULL)")
    with driven("threads", url) as store:
        store.counts()  # makes the table
    for node in nodes:
        node.execute(f"SELECT COUNT(*) FROM {name}.idempotent_record", **CAUSAL)  # noqa: S608 - ours
    return url


CAUSAL = {"init_command": "SET SESSION wsrep_sync_wait = 7"}


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


@contextlib.contextmanager
def balanced(nodes, url):
    """The database by a balancer that spreads connections over the nodes."""
    balancer = Balancer([node.port for node in nodes])
    try:
        yield through(balancer, url)
        assert balancer.connections >= len(nodes)
    finally:
        balancer.close()


@contextlib.contextmanager
def load_on(node, url):
    """Ordinary work beside the test: transactions that the other nodes have to apply."""
    ended = threading.Event()

    def work():
        with contextlib.closing(node.client(database=database_of(url))) as client:
            while not ended.is_set():
                client.cursor().execute("INSERT INTO big (b) SELECT MD5(seq) FROM seq_1_to_2000")
                ended.wait(0.05)

    with ThreadPoolExecutor(1) as threads:
        working = threads.submit(work)
        try:
            yield
        finally:
            ended.set()
            working.result(60)


# --- a node that lags -----------------------------------------------------------------------


@fault(58)
@pytest.mark.parametrize("verb", ["complete", "fail", "renew"])
def test_a_write_that_comes_before_the_row_it_is_for_waits_for_it(nodes, url, kind, verb):
    first, second, _ = nodes
    elsewhere = url.replace(f":{first.port}/", f":{second.port}/")
    with driven(kind, url) as one, driven(kind, elsewhere) as other:
        one.counts(), other.counts()
        for attempt, rows in enumerate(ROWS):
            first.execute(
                f"INSERT INTO big (b) SELECT MD5(seq) FROM seq_1_to_{rows}",  # noqa: S608 - ours
                database=database_of(url),
            )
            request = ask(Identity("s", str(attempt)))
            assert isinstance(one.claim(request), Claimed)
            seen = second.execute(
                "SELECT 1 FROM idempotent_record WHERE idem_key = %s",
                request.identity.key,
                database=database_of(url),
            )
            assert write_as_owner(other, verb, request) is True
            record = one.get(request.identity)
            assert record.owner == request.owner
            assert (record.state is State.PROCESSING) is (verb == "renew")
            if not seen:
                return  # the write came first
        pytest.fail("the second node never lagged")


# --- a balancer -----------------------------------------------------------------------------


@fault(58)
def test_behind_a_balancer_no_key_runs_twice(nodes, url):
    runs = Counter()
    with (
        balanced(nodes, url) as spread,
        load_on(nodes[0], url),
        Idempotency(spread, policy=POLICY) as idem,
        ThreadPoolExecutor(CALLERS) as threads,
    ):

        def calls(caller):
            for number in range(CALLS):
                key = f"{caller}-{number}"
                assert idem.execute(key, lambda key=key: runs.update([key]) or key) == key

        list(threads.map(calls, range(CALLERS)))
    assert runs == Counter({f"{i}-{j}": 1 for i in range(CALLERS) for j in range(CALLS)})


@fault(58)
async def test_behind_a_balancer_no_key_of_a_task_runs_twice(nodes, url):
    runs = Counter()
    with balanced(nodes, url) as spread, load_on(nodes[0], url):
        async with AsyncIdempotency(spread, policy=POLICY) as idem:

            async def calls(caller):
                for number in range(CALLS):
                    key = f"{caller}-{number}"

                    async def effect(key=key):
                        runs[key] += 1
                        return key

                    assert await idem.execute(key, effect) == key

            await asyncio.gather(*map(calls, range(CALLERS)))
    assert runs == Counter({f"{i}-{j}": 1 for i in range(CALLERS) for j in range(CALLS)})


def test_duplicates_on_all_nodes_at_once_run_once(nodes, url):
    runs = Counter()
    with contextlib.ExitStack() as stack:
        engines = [
            stack.enter_context(
                Idempotency(url.replace(f":{nodes[0].port}/", f":{node.port}/"), policy=POLICY)
            )
            for node in nodes
        ]
        threads = stack.enter_context(ThreadPoolExecutor(9))
        for key in map(str, range(20)):
            together = threading.Barrier(9)

            def call(number, key=key, together=together):
                together.wait(60)
                return engines[number % 3].execute(key, lambda: runs.update([key]) or key)

            assert set(threads.map(call, range(9))) == {key}
    assert runs == Counter({str(number): 1 for number in range(20)})


def test_transactions_on_all_nodes_at_once_take_effect_once(nodes, url):
    """The session is the application's, and set up as the page says."""
    with contextlib.ExitStack() as stack:
        units = []
        for node in nodes:
            address = url.replace(f":{nodes[0].port}/", f":{node.port}/")
            engine = stack.enter_context(Idempotency(address, policy=POLICY, max_waiting=None))
            units.append((engine, address))
        threads = stack.enter_context(ThreadPoolExecutor(6))
        for key in map(str, range(10)):
            together = threading.Barrier(6)

            def call(number, key=key, together=together):
                idem, address = units[number % 3]
                together.wait(60)
                return idem.run_transaction(
                    lambda: begun(address), key, lambda work: pay(work, key), retries=20
                )

            assert set(threads.map(call, range(6))) == {key}
    entries = nodes[2].execute("SELECT entry FROM ledger", database=database_of(url), **CAUSAL)
    assert sorted(entries) == [(str(number),) for number in range(10)]


@contextlib.contextmanager
def begun(url):
    connection = pymysql.connect(**mysql_login(url), ssl_disabled=True, **CAUSAL)
    with contextlib.closing(connection):
        connection.begin()
        yield connection
        connection.commit()


def pay(connection, key):
    connection.cursor().execute("INSERT INTO ledger VALUES (%s)", (key,))
    return key


# --- a node that leaves ---------------------------------------------------------------------


@fault(61)
def test_pooled_connections_to_a_node_that_left_the_cluster_are_replaced(nodes, url, kind):
    first, second, _ = nodes
    with proxy_to(second.port) as proxy, driven(kind, through(proxy, url)) as store:
        pool = store._store._calls.pool
        for session in [store._finish(pool.take(Deadline(60.0))) for _ in range(8)]:
            store._finish(pool.give_back(session))
        assert len(pool._idle) == 8
        running = ask(Identity("s", "running"))
        assert isinstance(store.claim(running), Claimed)
        second.isolate(apart=True)
        try:
            wait_until(lambda: not second.is_ready(), 60)
            for call in (
                lambda: store.claim(ask()),
                lambda: write_as_owner(store, "renew", running),
                lambda: store.get(IDENTITY),
            ):
                with pytest.raises(StoreUnavailable, match="cluster"):
                    call()
            proxy.upstream_port = first.port
            for number in range(20):
                assert isinstance(store.claim(ask(Identity("s", str(number)))), Claimed)
            assert isinstance(store.claim(ask(IDENTITY)), Claimed)
            assert write_as_owner(store, "complete", running)
        finally:
            second.isolate(apart=False)
            wait_until(second.is_ready, 60)
