"""The database refuses a value for good: it is not sent again and again, and nothing runs twice.

| fault | expected |
|---|---|
| 46 the value is beyond a limit of the server | SUCCEEDED without a value; never retried as an outage, never a second run |
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator

import psycopg
import pymysql
import pytest

from engines.facade import PATIENCE, Driven, Effect, World, never, wait_until
from semel import (
    Idempotency,
    Policy,
    RecordUnreadable,
    ResultUnavailable,
    StoreError,
    StoreUnavailable,
    ValueRejected,
    events,
    open_async_store,
    open_store,
)
from semel.core.records import (
    OMITTED,
    ClaimRequest,
    CompleteRequest,
    Encoded,
    Identity,
    State,
)
from semel.repair import AsyncReconciler, Failed, Reconciler, Succeeded, settle, settle_async
from semel.stores.sql.sqlite import SQLiteStore
from semel.testing import Refuse, StoreDriver
from servers.mariadb import MariaDBServer, mariadb_server
from servers.redis import RedisServer, redis_cluster, redis_server
from transactions.kinds import mysql_login

fault = pytest.mark.fault

LIMIT = 1 << 16
LARGE = "x" * (4 * LIMIT)


@pytest.fixture(scope="module")
def small_packets() -> Iterator[MariaDBServer]:
    """A MariaDB that takes no message above 64 kB."""
    with mariadb_server(f"--max-allowed-packet={LIMIT}") as server:
        yield server


@pytest.fixture
def limited_mysql(small_packets: MariaDBServer) -> str:
    return small_packets.database()


@pytest.fixture
def limited_postgres(postgres_url: str) -> str:
    """A table whose owner wants no large results."""
    with Idempotency(postgres_url) as engine:
        engine.peek("k")  # the table exists
    with psycopg.connect(postgres_url, autocommit=True) as client:
        client.execute(
            "ALTER TABLE idempotent_record ADD CONSTRAINT small "
            f"CHECK (octet_length(result_payload) < {LIMIT})"
        )
    return postgres_url


@pytest.fixture(params=["postgres", "mysql"])
def limited(request, kind: str) -> Iterator[World]:
    """Both engines, on each store that takes no large values."""
    with World(kind, request.getfixturevalue(f"limited_{request.param}")) as world:
        yield world


@pytest.fixture
def limited_file() -> Iterator[Idempotency]:
    """An engine on a connection of the application's own, which takes no large values."""
    with contextlib.closing(
        sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
    ) as connection:
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, LIMIT)
        with Idempotency(SQLiteStore(connection=connection)) as engine:
            yield engine


@fault(46)
def test_a_refused_result_is_left_out_once_and_nothing_runs_again(limited):
    engine, effect = limited.engine(), Effect(LARGE)
    assert engine.execute("k", effect) == LARGE
    (omitted,) = engine.told(events.ResultOmitted)
    assert "rejected" in omitted.reason
    assert not engine.told(events.StoreFailed)
    record = engine.peek("k")
    assert (record.state, record.outcome.codec) == (State.SUCCEEDED, OMITTED)
    for duplicate in (engine, limited.engine()):
        with pytest.raises(ResultUnavailable, match="rejected"):
            duplicate.execute("k", effect)
    assert effect.runs == 1
    assert engine.execute("other", Effect("small")) == "small"


@fault(46)
def test_a_result_that_is_refused_after_an_outage_is_left_out_too(limited):
    engine, effect = limited.engine(), Effect(LARGE)
    engine.peek("connected")
    engine.store.inject("complete", Refuse(), times=1000)
    assert engine.execute("k", effect) == LARGE
    assert engine.told(events.ResultNotStored)
    engine.store.heal()
    wait_until(lambda: engine.told(events.ResultStoredLate))
    assert len(engine.told(events.ResultOmitted)) == 1
    with pytest.raises(ResultUnavailable, match="rejected"):
        limited.engine().execute("k", effect)
    assert effect.runs == 1


@fault(46)
def test_one_refused_result_of_a_batch_costs_the_others_nothing(limited):
    engine = limited.engine()
    results = {f"k{number}": LARGE if number == 3 else str(number) for number in range(8)}
    effects = {key: Effect(result).held() for key, result in results.items()}
    running = {key: engine.start(key, effect) for key, effect in effects.items()}
    for effect in effects.values():
        effect.wait_started()
    for effect in effects.values():
        effect.release()
    assert {key: each.result() for key, each in running.items()} == results
    elsewhere = limited.engine()
    for key, result in results.items():
        if result == LARGE:
            with pytest.raises(ResultUnavailable):
                elsewhere.execute(key, never)
        else:
            assert elsewhere.execute(key, never) == result
    assert not engine.told(events.StoreFailed)


@fault(46)
def test_a_refused_mark_is_a_clear_error_and_the_others_of_its_batch_are_set(limited):
    engine = limited.engine()
    marks, finish = engine.engine.marks, limited.kind.finish
    with pytest.raises(ValueRejected, match="cannot take this"):
        finish(marks.set_result, "large", LARGE)
    with pytest.raises(ValueRejected, match="cannot take this"):
        finish(marks.set_result_many, {"a": "small", "large": LARGE, "z": "small"})
    assert finish(marks.check_many, ["a", "large", "z"]) == {"a": True, "large": False, "z": True}


@fault(46)
def test_sqlite_leaves_out_a_result_beyond_its_limit(limited_file):
    effect = Effect(LARGE)
    assert limited_file.execute("k", effect) == LARGE
    with pytest.raises(ResultUnavailable, match="rejected"):
        limited_file.execute("k", effect)
    with pytest.raises(ValueRejected, match="cannot take this"):
        limited_file.marks.set_result("mark", LARGE)
    assert effect.runs == 1


# --- Redis: a value above a megabyte, the least that a server can be told to take ------------

MEGABYTE = 1 << 20
VERY_LARGE = "x" * (8 * MEGABYTE)
KEEPING_ALL = Policy(max_result_bytes=64 * MEGABYTE)


@pytest.fixture(params=["proto-max-bulk-len", "client-query-buffer-limit"])
def limited_redis(request) -> Iterator[RedisServer]:
    """A Redis that takes no value above a megabyte; of the second limit it says nothing."""
    with redis_server() as server:
        with contextlib.closing(server.client()) as client:
            client.config_set(request.param, MEGABYTE)
        yield server


@fault(46)
@pytest.mark.parametrize("protocol", [2, 3])
def test_redis_leaves_out_a_result_beyond_its_limits(kind, limited_redis, protocol):
    with World(kind, f"{limited_redis.url}?protocol={protocol}") as world:
        engine, effect = world.engine(policy=KEEPING_ALL), Effect(VERY_LARGE)
        beside = engine.start("beside", held := Effect("small").held())
        held.wait_started()
        assert engine.execute("k", effect) == VERY_LARGE
        held.release()
        assert beside.result(PATIENCE) == "small"
        assert engine.told(events.ResultOmitted)
        assert not engine.told(events.StoreFailed)
        with pytest.raises(ResultUnavailable, match="rejected"):
            world.engine(policy=KEEPING_ALL).execute("k", effect)
        assert effect.runs == 1
        marks, finish = engine.engine.marks, world.kind.finish
        with pytest.raises(ValueRejected, match="proto-max-bulk-len"):
            finish(marks.set_result, "mark", VERY_LARGE)
        with pytest.raises(ValueRejected, match="proto-max-bulk-len"):
            finish(marks.set_result_many, {"a": 1, "mark": VERY_LARGE})
        assert finish(marks.check_many, ["a", "mark"]) == {"a": True, "mark": False}


@fault(46)
def test_a_user_who_may_not_ask_for_the_limits_stores_large_results_all_the_same(kind):
    with redis_server() as server:
        with contextlib.closing(server.client()) as client:
            client.acl_setuser(
                "shop", enabled=True, nopass=True, keys=["*"], channels=["*"],
                categories=["+@all"], commands=["-config"],
            )  # fmt: skip
        with World(kind, server.url.replace("redis://", "redis://shop:x@")) as world:
            engine = world.engine(policy=KEEPING_ALL)
            assert engine.execute("k", Effect(VERY_LARGE)) == VERY_LARGE
            assert engine.execute("k", never) == VERY_LARGE
            assert not engine.told(events.ResultOmitted)


@fault(46)
def test_a_cluster_asks_the_node_that_has_the_key(kind):
    with redis_cluster(primaries=2) as cluster:
        for node in cluster.servers:
            with contextlib.closing(node.client()) as client:
                client.config_set("proto-max-bulk-len", MEGABYTE)
        with World(kind, cluster.url) as world:
            engine, effect = world.engine(policy=KEEPING_ALL), Effect(VERY_LARGE)
            assert engine.execute("k", effect) == VERY_LARGE
            with pytest.raises(ResultUnavailable):
                engine.execute("k", effect)
            assert effect.runs == 1


@fault(46)
def test_a_large_result_is_no_outage_of_the_front(kind, sqlite_url):
    with redis_server() as server, contextlib.closing(server.client()) as client:
        client.config_set("proto-max-bulk-len", MEGABYTE)
        with World(kind, server.url, behind=sqlite_url, front_timeout=PATIENCE) as world:
            engine = world.engine(policy=KEEPING_ALL)
            assert engine.execute("large", Effect(VERY_LARGE)) == VERY_LARGE
            assert world.engine(policy=KEEPING_ALL).execute("large", never) == VERY_LARGE
            assert engine.execute("small", Effect("small")) == "small"
            before = client.info("commandstats")["cmdstat_evalsha"]["calls"]
            assert engine.execute("small", never) == "small"
            assert client.info("commandstats")["cmdstat_evalsha"]["calls"] > before


@fault(46)
@pytest.mark.parametrize("opened", ["threads", "asyncio"])
def test_postgres_is_not_sent_a_gigabyte(postgres_url, opened):
    # The bytes are never touched: the system gives them no memory.
    gigabyte = Encoded("bytes", bytes(1 << 30))
    store = StoreDriver(
        open_store(postgres_url) if opened == "threads" else open_async_store(postgres_url)
    )
    small, large = Identity("s", "small"), Identity("s", "large")
    owner = bytes(12)
    try:
        for identity in (small, large):
            store.claim(ClaimRequest(identity, owner, None, 600.0, 600.0))
        with pytest.raises(ValueRejected, match="at most"):
            store.complete(large, owner, gigabyte, 600.0)
        with pytest.raises(ValueRejected, match="at most"):
            store.put(Identity("s", "mark"), gigabyte, 600.0, owner=owner)
        stored, rejected = store.send(
            [
                CompleteRequest(small, owner, Encoded("bytes", b"1"), 600.0),
                CompleteRequest(large, owner, gigabyte, 600.0),
            ]
        )
        assert stored is True
        assert isinstance(rejected, ValueRejected)
    finally:
        store.close()


REFUSALS = {
    "54000": "string buffer exceeds maximum allowed length",
    "XX000": "invalid memory alloc request size 1073741824",
}


@fault(46)
@pytest.mark.parametrize("code", REFUSALS)
def test_a_limit_inside_the_server_is_no_outage(postgres_url, kind, code):
    with World(kind, postgres_url) as world:
        engine, effect = world.engine(), Effect(LARGE)
        engine.peek("k")
        with psycopg.connect(postgres_url, autocommit=True) as client:
            client.execute(
                "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
                f"IF octet_length(NEW.result_payload) > {LIMIT} THEN "
                f"RAISE EXCEPTION '{REFUSALS[code]}' USING ERRCODE = '{code}'; END IF; "
                "RETURN NEW; END $$"
            )
            client.execute(
                "CREATE TRIGGER refuse BEFORE UPDATE ON idempotent_record "
                "FOR EACH ROW EXECUTE FUNCTION refuse()"
            )
        assert engine.execute("k", effect) == LARGE
        assert engine.told(events.ResultOmitted)
        with pytest.raises(ResultUnavailable):
            world.engine().execute("k", effect)
        assert effect.runs == 1


# --- what is no outage does not run unprotected ---------------------------------------------


@pytest.mark.parametrize("error", [ValueRejected("too long"), RecordUnreadable("cut short")])
def test_an_answer_that_stays_the_same_is_no_outage_to_run_through(kind, error):
    with World(kind, "memory://") as world:
        engine = world.engine(policy=Policy(store_error="open"))
        engine.store.inject("claim", Refuse(error))
        with pytest.raises(type(error)):
            engine.execute("k", never)
        engine.store.inject("claim", Refuse(StoreUnavailable("away")))
        assert engine.execute("k", Effect("ran")) == "ran"
        assert engine.told(events.RanUnprotected)


# --- transactions and repairs ----------------------------------------------------------------


@fault(46)
@pytest.mark.parametrize("dialect", ["mysql", "postgres", "sqlite"])
def test_a_refused_result_undoes_its_block_with_a_clear_error(request, dialect, tmp_path):
    with contextlib.ExitStack() as open_ones:
        match dialect:
            case "sqlite":
                url = f"sqlite:///{tmp_path / 'semel.db'}"
                connection = open_ones.enter_context(
                    contextlib.closing(sqlite3.connect(tmp_path / "semel.db", isolation_level=None))
                )
                connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, LIMIT)
                begin, run = "BEGIN IMMEDIATE", connection.execute
            case "postgres":
                url = request.getfixturevalue("limited_postgres")
                connection = open_ones.enter_context(psycopg.connect(url))
                begin, run = "SELECT 1", connection.execute
            case _:
                url = request.getfixturevalue("limited_mysql")
                connection = open_ones.enter_context(
                    contextlib.closing(pymysql.connect(**mysql_login(url)))
                )
                begin, run = "BEGIN", connection.cursor().execute
        engine = open_ones.enter_context(Idempotency(url))
        engine.peek("k")  # the table exists
        run(begin)
        with (
            pytest.raises(ValueRejected, match=r"max_allowed_packet|cannot take this"),
            engine.transaction(connection, "k") as attempt,
        ):
            attempt.result = LARGE
        run("SELECT 1")  # the connection lives, and the caller may go on
        connection.rollback()
        assert engine.peek("k") is None


@fault(46)
def test_a_transaction_that_the_server_hangs_up_on_hears_of_the_likely_reason(limited_mysql):
    # Between half the limit and all of it, only the driver knows how long its message gets.
    nearly = b"\x00" * (LIMIT * 3 // 4)
    with (
        Idempotency(limited_mysql) as engine,
        contextlib.closing(pymysql.connect(**mysql_login(limited_mysql))) as connection,
    ):
        engine.peek("k")
        connection.begin()
        with (
            pytest.raises(StoreError, match="max_allowed_packet"),
            engine.transaction(connection, "k") as attempt,
        ):
            attempt.result = nearly
        assert engine.peek("k") is None


def abandoned(engine: Driven) -> Identity:
    identity = Identity("orders", "k")
    engine.ask_store("claim", ClaimRequest(identity, bytes(12), None, 600.0, 600.0, hold=True))
    engine.ask_store("renew", identity, bytes(12), 0.0)
    return identity


@fault(46)
def test_a_person_whose_value_is_refused_is_told_and_may_decide_again_at_once(limited):
    engine = limited.engine()
    abandoned(engine)
    decide = settle if limited.name == "threads" else settle_async
    finish = limited.kind.finish
    with pytest.raises(ValueRejected, match="cannot take this"):
        finish(decide, engine.engine, "k", Succeeded(LARGE), scope="orders", ttl=3600)
    assert finish(decide, engine.engine, "k", Succeeded("small"), scope="orders", ttl=3600)
    assert engine.execute("k", never, scope="orders") == "small"


@fault(46)
def test_a_resolver_whose_value_is_refused_has_decided_all_the_same(limited):
    engine = limited.engine()
    abandoned(engine)
    kind = Reconciler if limited.name == "threads" else AsyncReconciler
    reconciler = kind(engine.engine, {"orders": lambda _: Succeeded(LARGE)}, older_than=0.0)
    report = limited.kind.finish(reconciler.run_once)
    assert (report.resolved, report.errors) == (1, 0)
    assert engine.told(events.ResultOmitted)
    with pytest.raises(ResultUnavailable, match="rejected"):
        engine.execute("k", never, scope="orders")


def test_a_failure_that_is_refused_is_never_written_as_a_success(kind):
    with World(kind, "memory://") as world:
        engine = world.engine()
        identity = abandoned(engine)
        engine.store.inject("fail", Refuse(ValueRejected("against a CHECK")))
        resolver = Reconciler if kind == "threads" else AsyncReconciler
        reconciler = resolver(
            engine.engine, {"orders": lambda _: Failed("no", False)}, older_than=0.0
        )
        assert world.kind.finish(reconciler.run_once).errors == 1
        assert engine.ask_store("get", identity).state is State.PROCESSING
        assert world.kind.finish(reconciler.run_once).resolved == 1
