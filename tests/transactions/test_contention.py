"""Two transactions with one key, and transactions that the database gives up.

| # | fault | expected in transactional mode |
|---|---|---|
| 8 | paused for long, then complete | unaffected: others wait for the commit, and replay |
| 28 | deadlock, serialization failure, SQLITE_BUSY | one typed error; repeated whole, it succeeds |
"""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from contextlib import asynccontextmanager, closing, contextmanager, nullcontext, suppress

import psycopg
import pymysql
import pytest

from engines.facade import wait_until
from semel import ConcurrentRequest, Idempotency, PayloadMismatch, Policy, RetryTransaction
from semel.core.decide import decide
from semel.stores.sql.verbs import Reply
from semel.transactions import records_of
from semel.transactions.drivers import AsyncmyLink, MySQLdbLink, PyMySQLLink
from transactions.conftest import started
from transactions.kinds import KINDS, ONE_EACH, PATIENCE, mysql_login, path_of

fault = pytest.mark.fault

SOON = Policy(wait_timeout=0.3)


def on(kinds):
    return pytest.mark.parametrize("world", kinds, ids=lambda kind: kind.name, indirect=True)


class Declined(Exception):
    """A business error."""


class Pause:
    """A point that the first transaction reaches, and where it stays until it is let go."""

    def __init__(self):
        self._reached, self._released = threading.Event(), threading.Event()

    def wait_reached(self):
        assert self._reached.wait(PATIENCE), "nobody came"

    def release(self):
        self._released.set()

    def stay(self):
        self._reached.set()
        assert self._released.wait(PATIENCE), "nobody let go"


async def paying_slowly(world, pause, *, fails=False):
    """The unit of work of `world.pay`, which stays in its transaction for a while."""
    async with world.engine() as idem, world.work() as work, world.once(idem, work) as attempt:
        await work.run("INSERT INTO ledger VALUES ('order-1', 1)")
        attempt.result = {"paid": "order-1"}
        await asyncio.to_thread(pause.stay)
        if fails:
            raise Declined


async def paying(world, **options):
    async with world.engine() as idem:
        return await world.pay(idem, **options)


@fault(8)
@on(KINDS)
async def test_a_duplicate_waits_for_the_commit_and_replays(world):
    async with world.engine():
        pause = Pause()
        first = started(lambda: paying_slowly(world, pause))
        pause.wait_reached()
        second = started(lambda: paying(world))
        with pytest.raises(TimeoutError):
            second.result(timeout=0.2)
        pause.release()
        first.result(PATIENCE)
        assert second.result(PATIENCE).replayed
    assert world.entries() == ["order-1"]


@on(ONE_EACH)
async def test_a_duplicate_of_one_that_was_rolled_back_runs(world):
    async with world.engine():
        pause = Pause()
        first = started(lambda: paying_slowly(world, pause, fails=True))
        pause.wait_reached()
        second = started(lambda: paying(world))
        pause.release()
        assert isinstance(first.exception(PATIENCE), Declined)
        with suppress(RetryTransaction):  # MySQL's waiters of a row that vanished may deadlock
            assert not second.result(PATIENCE).replayed
            assert world.entries() == ["order-1"]


@on([kind for kind in KINDS if kind.dialect != "sqlite"])
async def test_a_duplicate_out_of_patience_is_told_busy_and_its_transaction_goes_on(world):
    async with world.engine() as idem:
        pause = Pause()
        first = started(lambda: paying_slowly(world, pause))
        pause.wait_reached()
        async with world.work() as work:
            with pytest.raises(ConcurrentRequest, match="open transaction has this key"):
                async with world.once(idem, work, policy=SOON):
                    pytest.fail("it ran")
            await work.run("INSERT INTO ledger VALUES ('other', 1)")
        pause.release()
        first.result(PATIENCE)
    assert world.entries() == ["order-1", "other"]


# --- a record that has ended is replayed without a lock ----------------------------------------

ON_SERVERS = [kind for kind in KINDS if kind.dialect != "sqlite"]
"""SQLite has one lock, for the file."""

IMPATIENT = Policy(concurrent="reject")


@on([kind for kind in ON_SERVERS if "django" not in kind.name])  # one connection for each thread
async def test_a_replay_leaves_no_lock_behind_for_as_long_as_its_transaction_lasts(world):
    async with world.engine(max_waiting=0) as idem:
        await world.pay(idem, payload=1)
        async with world.work() as first, world.work() as second:
            # Else undoing the block would be undoing the whole transaction, row locks included.
            await first.run("INSERT INTO ledger VALUES ('first', 1)")
            async with world.once(idem, first, payload=1) as attempt:
                assert attempt.replayed
            for policy in (IMPATIENT, Policy()):
                async with world.once(idem, second, payload=1, policy=policy) as attempt:
                    assert (attempt.replayed, attempt.result) == (True, {"paid": "order-1"})
                with pytest.raises(PayloadMismatch):
                    async with world.once(idem, second, payload=2, policy=policy):
                        pytest.fail("it ran")
            assert await world.done(idem.forget("order-1")), "it was locked"


@on([kind for kind in KINDS if kind.dialect == "postgresql"])
async def test_a_replay_that_waited_for_a_commit_gives_its_lock_back_before_its_own(world):
    first_pays, second_stays = Pause(), Pause()

    async def replaying():
        async with world.engine() as idem, world.work() as work:
            await work.run("INSERT INTO ledger VALUES ('other', 1)")
            async with world.once(idem, work) as attempt:
                assert attempt.replayed
            await asyncio.to_thread(second_stays.stay)

    locks = (
        "SELECT count(*) FROM pg_locks JOIN pg_database AS d ON d.oid = database "
        "WHERE locktype = 'advisory' AND d.datname = current_database() AND granted = %s"
    )
    async with world.engine():
        first = started(lambda: paying_slowly(world, first_pays))
        first_pays.wait_reached()
        second = started(replaying)
        with psycopg.connect(world.url, autocommit=True) as looker:
            wait_until(lambda: looker.execute(locks, [False]).fetchone() == (1,))
            first_pays.release()
            first.result(PATIENCE)
            second_stays.wait_reached()
            assert looker.execute(locks, [True]).fetchone() == (0,)
        second_stays.release()
        second.result(PATIENCE)
    assert world.entries() == ["order-1", "other"]


@on(ON_SERVERS)
async def test_a_replay_does_not_meet_another_one_that_is_on_its_way(world, monkeypatch):
    pause = Pause()
    stays = iter([pause.stay])

    def decide_later(answer, rules):
        next(stays, lambda: None)()
        return decide(answer, rules)

    async with world.engine(max_waiting=0) as idem:
        await world.pay(idem)
        for module in ("semel.engine.transactions", "semel.engine._sync.transactions"):
            monkeypatch.setattr(f"{module}.decide", decide_later)
        first = started(lambda: paying(world))
        pause.wait_reached()  # its record is read, and its savepoint open
        try:
            assert (await world.pay(idem, policy=IMPATIENT)).replayed
            assert (await world.pay(idem)).replayed
        finally:
            pause.release()
        assert first.result(PATIENCE).replayed
    assert world.entries() == ["order-1"]


@on(ON_SERVERS)
@pytest.mark.parametrize("policy", [IMPATIENT, Policy(concurrent="reject", abandoned="hold")])
async def test_a_record_that_an_open_transaction_takes_over_is_busy(world, policy):
    async with world.engine() as idem:
        with pytest.raises(Declined):  # of which nobody knows what it did
            async with world.entered(idem.attempt("order-1", policy=Policy(failure="unknown"))):
                raise Declined
        pause = Pause()
        first = started(lambda: paying_slowly(world, pause))
        pause.wait_reached()
        try:
            with pytest.raises(ConcurrentRequest):
                await world.pay(idem, policy=policy)
        finally:
            pause.release()
        first.result(PATIENCE)
        assert (await world.pay(idem, policy=policy)).replayed
    assert world.entries() == ["order-1"]


@on([kind for kind in KINDS if kind.name in {"psycopg", "asyncpg", "pymysql", "asyncmy"}])
async def test_until_another_payload_is_committed_the_old_one_replays_and_the_new_one_is_busy(
    world,
):
    replacing = Policy(mismatch="replace", concurrent="reject")
    async with world.engine() as idem:
        await world.pay(idem, payload="old")
        async with world.work() as work:
            async with world.once(idem, work, payload="new", policy=replacing) as attempt:
                assert not attempt.replayed
                attempt.result = "replaced"
            old = await world.pay(idem, payload="old", policy=replacing)
            assert (old.replayed, old.result) == (True, {"paid": "order-1"})
            with pytest.raises(ConcurrentRequest):
                await world.pay(idem, payload="new", policy=replacing)
        assert (await world.pay(idem, payload="new", policy=replacing)).result == "replaced"
        with pytest.raises(PayloadMismatch):
            await world.pay(idem, payload="old", policy=replacing)
    assert world.entries() == ["order-1"]


MYSQL = [kind for kind in KINDS if kind.name in {"pymysql", "asyncmy"}]


@on(MYSQL)
async def test_under_repeatable_read_a_duplicate_that_waited_sees_what_it_waited_for(world):
    async def second():
        async with world.engine() as idem, world.work() as work:
            async with world.once(idem, work) as attempt:
                assert attempt.replayed
            return await work.run("SELECT entry FROM ledger")

    async with world.engine():
        pause = Pause()
        first = started(lambda: paying_slowly(world, pause))
        pause.wait_reached()
        waiting = started(second)
        with pytest.raises(TimeoutError):
            waiting.result(timeout=0.2)
        pause.release()
        first.result(PATIENCE)
        assert waiting.result(PATIENCE) == [("order-1",)]


@on(MYSQL)
async def test_a_store_that_has_no_connection_to_look_with_leaves_it_to_the_claim(world):
    async with world.engine() as idem:
        await world.done(idem.internals.store.close())
        assert not (await world.pay(idem)).replayed
        assert (await world.pay(idem)).replayed
    assert world.entries() == ["order-1"]


# --- how long a claim waits ----------------------------------------------------------------------


BOUNDING = "innodb_lock_wait_timeout = "


@pytest.fixture
def bounds_sent(monkeypatch):
    """The bounds for locks that MySQL was told, in their order."""
    told = []

    def watched(kind):
        execute = kind.execute

        def spy(self, statement):
            if BOUNDING in statement.sql:
                told.append(statement.parameters[0])
            return execute(self, statement)

        monkeypatch.setattr(kind, "execute", spy)

    for kind in (PyMySQLLink, MySQLdbLink, AsyncmyLink):
        watched(kind)
    return told


@on([kind for kind in KINDS if kind.dialect == "mysql"])
async def test_who_does_not_wait_lets_mariadb_answer_without_a_wait(world, bounds_sent):
    async with world.engine() as idem:
        pause = Pause()
        first = started(lambda: paying_slowly(world, pause))
        pause.wait_reached()
        bounds_sent.clear()
        async with world.work() as work:
            ((usual,),) = await work.run(BOUNDS["mysql"])
            with pytest.raises(ConcurrentRequest):
                async with world.once(idem, work, policy=Policy(concurrent="reject")):
                    pytest.fail("it ran")
            assert bounds_sent == [0, usual]
            await work.run("INSERT INTO ledger VALUES ('other', 1)")
        pause.release()
        first.result(PATIENCE)
    assert world.entries() == ["order-1", "other"]


@pytest.mark.parametrize(
    ("version", "wait", "bound"),
    [("8.4.3", False, 1), ("8.4.3", True, 3), ("11.4.2-MariaDB", False, 0)],
)
def test_mysql_itself_cannot_wait_for_less_than_a_second(mysql_url, version, wait, bound):
    with Idempotency(mysql_url) as idem:
        asking = records_of(idem.internals.store, "mysql", None).prepare(2.5, wait=wait)
        next(asking)
        session = (50, mysql_login(mysql_url)["database"], version, 1 << 24, 0, "", 0, 1.5, 0)
        assert asking.send(Reply([session], 1)).parameters == (bound,)


def test_the_bound_of_a_session_is_noted_once(sqlite_url):
    with Idempotency(sqlite_url) as idem:
        idem.migrate()
        records = records_of(idem.internals.store, "sqlite", None)
        file = sqlite_url.removeprefix("sqlite:///")
        asked = []
        for _ in range(2):
            asking = records.prepare(2.5, wait=False)
            statement = next(asking)
            while "PRAGMA busy_timeout =" not in statement.sql:
                asked.append(statement.sql)
                rows = [(0, "main", file)] if "database_list" in statement.sql else [(700,)]
                statement = asking.send(Reply(rows, len(rows)))
        assert asked.count("PRAGMA busy_timeout") == 1
        assert records.bound == 700


@on([kind for kind in KINDS if kind.name in {"psycopg", "asyncpg"}])
async def test_who_does_not_wait_is_told_busy_at_once(world):
    async with world.engine() as idem:
        pause = Pause()
        first = started(lambda: paying_slowly(world, pause))
        pause.wait_reached()
        async with world.work() as work:
            with pytest.raises(ConcurrentRequest):
                async with world.once(idem, work, policy=Policy(concurrent="reject")):
                    pytest.fail("it ran")
        pause.release()
        first.result(PATIENCE)


BOUNDS = {
    "sqlite": "PRAGMA busy_timeout",
    "postgresql": "SELECT current_setting('lock_timeout')",
    "mysql": "SELECT @@SESSION.innodb_lock_wait_timeout",
}


@on(KINDS)
async def test_the_sessions_own_bound_for_locks_is_restored(world):
    async with world.engine() as idem, world.work() as work:
        before = await work.run(BOUNDS[world.kind.dialect])
        async with world.once(idem, work, payload=1, policy=SOON) as attempt:
            assert await work.run(BOUNDS[world.kind.dialect]) == before
            attempt.result = 1
        with pytest.raises(Exception, match="another payload"):
            async with world.once(idem, work, payload=2, policy=SOON):
                pytest.fail("it ran")
        assert await work.run(BOUNDS[world.kind.dialect]) == before


# --- the database gives up a transaction -----------------------------------------------------


@contextmanager
def begun(url):
    """A unit of work on a plain connection, for `run_transaction`."""
    if url.startswith("sqlite"):
        opened = sqlite3.connect(path_of(url), timeout=PATIENCE, isolation_level=None)
    elif url.startswith("postgresql"):
        opened = psycopg.connect(url, autocommit=True)
    else:
        opened = pymysql.connect(**mysql_login(url))
    with closing(opened) as connection:
        cursor = connection.cursor()
        cursor.execute("BEGIN")
        try:
            yield connection
        except BaseException:
            with suppress(sqlite3.OperationalError):  # SQLite may have rolled back by itself
                cursor.execute("ROLLBACK")
            raise
        cursor.execute("COMMIT")


def execute(connection, sql):
    cursor = connection.cursor()
    cursor.execute(sql)
    return cursor.fetchall() if cursor.description else None


PLAIN = [kind for kind in KINDS if kind.name in {"psycopg", "pymysql"}]


def accounts(world):
    world.query("CREATE TABLE account (name VARCHAR(9) PRIMARY KEY, amount INTEGER NOT NULL)")
    world.query("INSERT INTO account VALUES ('x', 0), ('y', 0)")


def crossing(world, meet, tries, made_of=nullcontext):
    """Two units of work that update the same two rows in opposite order.

    `made_of` is what the application makes of the database's errors.
    """

    def unit(key, one, other):
        def fn(connection):
            tries.append(key)
            execute(connection, f"UPDATE account SET amount = amount + 1 WHERE name = '{one}'")
            if len(tries) <= 2:
                meet.wait(PATIENCE)
            with made_of():
                execute(
                    connection, f"UPDATE account SET amount = amount + 1 WHERE name = '{other}'"
                )
            return key

        with Idempotency(world.url) as idem:
            return idem.run_transaction(lambda: begun(world.url), key, fn)

    async def first():
        return unit("a", "x", "y")

    async def second():
        return unit("b", "y", "x")

    return started(first), started(second)


@fault(28)
@on(PLAIN)
async def test_a_deadlock_is_repeated_as_a_whole_and_both_take_effect_once(world):
    async with world.engine():
        accounts(world)
        tries = []
        both = crossing(world, threading.Barrier(2), tries)
        assert [future.result(PATIENCE) for future in both] == ["a", "b"]
    assert len(tries) == 3, "no deadlock came about"
    assert world.query("SELECT amount FROM account") == [(2,), (2,)]


@contextmanager
def declined_from():
    try:
        yield
    except Exception as error:
        raise Declined from error


@contextmanager
def declined_meanwhile():
    try:
        yield
    except Exception:
        raise Declined  # noqa: B904 - the case


@contextmanager
def declined_in_a_group():
    try:
        yield
    except Exception as error:
        raise ExceptionGroup("tasks", [Declined(), error])  # noqa: B904 - the case


@contextmanager
def declined_for_good():
    try:
        yield
    except Exception:
        raise Declined from None


@fault(28)
@on(PLAIN)
@pytest.mark.parametrize("made_of", [declined_from, declined_meanwhile, declined_in_a_group])
async def test_an_error_that_the_application_makes_of_a_deadlock_is_repeated_too(world, made_of):
    async with world.engine():
        accounts(world)
        tries = []
        both = crossing(world, threading.Barrier(2), tries, made_of)
        assert [future.result(PATIENCE) for future in both] == ["a", "b"]
    assert len(tries) == 3, "no deadlock came about"
    assert world.query("SELECT amount FROM account") == [(2,), (2,)]


@on(PLAIN)
async def test_an_error_from_none_is_final_and_leaves_nothing(world):
    async with world.engine() as idem:
        accounts(world)
        tries = []
        both = crossing(world, threading.Barrier(2), tries, declined_for_good)
        (lost,) = [error for future in both if (error := future.exception(PATIENCE)) is not None]
        assert isinstance(lost, Declined)
        assert sorted(tries) == ["a", "b"]
        assert idem.marks.check("a") is not idem.marks.check("b")
    assert world.query("SELECT amount FROM account") == [(1,), (1,)]


@on([kind for kind in KINDS if kind.name in {"psycopg", "asyncpg"}])
async def test_a_unit_of_work_in_the_handler_of_a_deadlock_fails_by_its_own_error(world):
    async with world.engine() as idem:
        try:
            raise psycopg.errors.DeadlockDetected("an earlier one")  # noqa: TRY301 - the case
        except psycopg.errors.DeadlockDetected:
            with pytest.raises(Declined):
                async with world.work() as work, world.once(idem, work):
                    raise Declined  # noqa: B904 - the case


@fault(28)
@on(PLAIN)
async def test_a_deadlock_in_the_block_is_one_typed_error_with_its_cause(world):
    async with world.engine() as idem:
        accounts(world)
        met = threading.Barrier(2)

        async def unit(key, one, other):
            with begun(world.url) as connection, idem.transaction(connection, key):
                execute(connection, f"UPDATE account SET amount = amount + 1 WHERE name = '{one}'")
                met.wait(PATIENCE)
                execute(
                    connection, f"UPDATE account SET amount = amount + 1 WHERE name = '{other}'"
                )

        both = [started(lambda: unit("a", "x", "y")), started(lambda: unit("b", "y", "x"))]
        (lost,) = [error for future in both if (error := future.exception(PATIENCE)) is not None]
        assert isinstance(lost, RetryTransaction)
        assert "whole unit of work" in str(lost)
        assert "eadlock" in str(lost.__cause__)
        assert idem.marks.check("a") is not idem.marks.check("b")


@fault(28)
@on([kind for kind in KINDS if kind.name == "psycopg"])
@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
async def test_under_stricter_isolation_a_duplicate_that_waited_is_to_be_repeated(world, level):
    async with world.engine() as idem:

        @asynccontextmanager
        async def strict():
            async with world.work() as work:
                await work.run(f"SET TRANSACTION ISOLATION LEVEL {level}")
                yield work

        async with strict() as work:
            await work.run("SELECT 1 FROM ledger")  # from here on it sees the past
            await world.pay(idem)
            with pytest.raises(RetryTransaction):
                async with world.once(idem, work):
                    pytest.fail("it ran")
        async with strict() as work, world.once(idem, work) as attempt:
            assert attempt.replayed


@on([kind for kind in KINDS if kind.name == "pymysql"])
async def test_under_repeatable_read_a_row_of_another_commit_is_seen_all_the_same(world):
    async with world.engine() as idem, world.work() as work:
        await work.run("SELECT count(*) FROM ledger")  # from here on plain reads see the past
        await world.pay(idem)
        async with world.once(idem, work) as attempt:
            assert (attempt.replayed, attempt.result) == (True, {"paid": "order-1"})
        assert await work.run("SELECT count(*) FROM ledger") == [(0,)]


@fault(28)
@on([kind for kind in KINDS if kind.name == "sqlite3"])
async def test_a_deferred_sqlite_transaction_that_has_read_cannot_be_waited_out(world):
    async with world.engine() as idem:
        with closing(sqlite3.connect(path_of(world.url), isolation_level=None)) as connection:
            connection.execute("BEGIN")
            connection.execute("SELECT count(*) FROM ledger").fetchall()
            await world.pay(idem, "another")
            with pytest.raises(RetryTransaction) as refused, idem.transaction(connection, "k"):
                pytest.fail("it ran")
            assert refused.value.__cause__.sqlite_errorname == "SQLITE_BUSY_SNAPSHOT"
            connection.execute("ROLLBACK")


@fault(28)
@on([kind for kind in KINDS if kind.name == "sqlite3"])
async def test_a_locked_sqlite_database_is_waited_for_and_then_to_be_repeated(world):
    async with world.engine() as idem, world.work():
        with closing(sqlite3.connect(path_of(world.url), isolation_level=None)) as connection:
            connection.execute("BEGIN")
            with (
                pytest.raises(RetryTransaction) as refused,
                idem.transaction(connection, "k", policy=SOON),
            ):
                pytest.fail("it ran")
            assert refused.value.__cause__.sqlite_errorname == "SQLITE_BUSY"
            connection.execute("ROLLBACK")
