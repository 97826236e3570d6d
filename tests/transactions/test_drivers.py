"""The connections of each driver and framework, what is rejected before anything runs, blocks."""

from __future__ import annotations

import contextlib
import sqlite3
from types import SimpleNamespace

import asyncpg
import psycopg
import pymysql
import pytest
from sqlalchemy import NullPool, create_engine, text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from semel import (
    AsyncIdempotency,
    ConcurrentRequest,
    ConfigError,
    DuplicateRequest,
    Idempotency,
    LeaseLost,
    OutcomeUnknown,
    Policy,
    RetryTransaction,
    StoreError,
    events,
)
from semel.core.records import State
from semel.testing import bypass
from semel.transactions import db_errors, drivers
from semel.transactions._sync.links import Savepoint, SQLiteLink
from semel.transactions.links import AsyncSavepoint, AsyncSQLiteLink
from transactions.conftest import started
from transactions.kinds import (
    KINDS,
    PATIENCE,
    django_alias,
    mysql_login,
    path_of,
    sqlalchemy_url,
)

SQLITE = [kind for kind in KINDS if kind.name in {"sqlite3", "aiosqlite"}]
POSTGRES = [kind for kind in KINDS if kind.name in {"psycopg", "asyncpg"}]
DRIVERS = [kind for kind in KINDS if kind.name in {"sqlite3", "asyncpg", "pymysql"}]


def on(kinds):
    return pytest.mark.parametrize("world", kinds, ids=lambda kind: kind.name, indirect=True)


@contextlib.contextmanager
def session_of(url, driver="pysqlite", **options):
    engine = create_engine(sqlalchemy_url(url, driver), poolclass=NullPool, **options)
    with Session(engine) as session:
        yield session


AUTOCOMMIT = r"AUTOCOMMIT|commits each statement"


# --- refused ---------------------------------------------------------------------------------


@on(SQLITE)
async def test_a_connection_of_the_other_engines_kind_is_refused(world):
    async with world.idle() as work:
        with Idempotency("sqlite:///x.db") as plain:
            other = AsyncIdempotency("sqlite:///x.db")
            with pytest.raises(ConfigError, match="goes with an"):
                if world.kind.asynchronous:
                    with plain.transaction(work.connection, "k"):
                        pytest.fail("it ran")
                else:
                    async with other.transaction(work.connection, "k"):
                        pytest.fail("it ran")
            await other.close()


@pytest.mark.parametrize("thing", [object(), 42, None])
def test_what_is_no_connection_is_refused(sqlite_url, thing):
    with Idempotency(sqlite_url) as idem, pytest.raises(ConfigError, match="it takes connections"):
        idem.transaction(thing, "k").__enter__()


def test_an_alias_that_django_does_not_know_is_refused(sqlite_url):
    django_alias("sqlite", sqlite_url)
    with (
        Idempotency(sqlite_url) as idem,
        pytest.raises(ConfigError, match="no such alias; it has default"),
    ):
        idem.transaction("shop", "k").__enter__()


@pytest.mark.parametrize("url", ["memory://", "postgresql://nobody@localhost/none"])
def test_an_engine_whose_records_are_not_in_that_database_is_refused(sqlite_url, url):
    with (
        contextlib.closing(sqlite3.connect(path_of(sqlite_url))) as connection,
        Idempotency(url) as idem,
        pytest.raises(ConfigError, match=r"keeps (its records|them)"),
    ):
        idem.transaction(connection, "k").__enter__()


@pytest.mark.parametrize("session", [False, True], ids=["connection", "session"])
@pytest.mark.parametrize("driver", ["psycopg", "pymysql"])
def test_a_connection_in_autocommit_is_refused_whatever_sqlalchemy_says(request, driver, session):
    url = request.getfixturevalue("mysql_url" if driver == "pymysql" else "postgres_url")
    engine = create_engine(
        sqlalchemy_url(url, driver), poolclass=NullPool, isolation_level="AUTOCOMMIT"
    )
    with (
        Idempotency(url) as idem,
        Session(engine) if session else engine.connect() as given,
        given.begin(),
    ):
        idem.peek("any")
        with pytest.raises(ConfigError, match=AUTOCOMMIT):
            idem.transaction(given, "k").__enter__()
        assert idem.peek("k") is None


@pytest.mark.parametrize("session", [False, True], ids=["connection", "session"])
@pytest.mark.parametrize("driver", ["asyncpg", "asyncmy"])
async def test_the_same_is_refused_in_a_task(request, driver, session):
    url = request.getfixturevalue("mysql_url" if driver == "asyncmy" else "postgres_url")
    engine = create_async_engine(
        sqlalchemy_url(url, driver), poolclass=NullPool, isolation_level="AUTOCOMMIT"
    )
    async with (
        AsyncIdempotency(url) as idem,
        AsyncSession(engine) if session else engine.connect() as given,
        given.begin(),
    ):
        await idem.peek("any")
        with pytest.raises(ConfigError, match=AUTOCOMMIT):
            await idem.transaction(given, "k").__aenter__()
        assert await idem.peek("k") is None


# --- the end of a block ----------------------------------------------------------------------


@on(DRIVERS)
async def test_a_record_that_was_removed_inside_the_block_undoes_it(world):
    async with world.engine() as idem, world.work() as work:
        with pytest.raises(LeaseLost):
            async with world.once(idem, work):
                await work.run("INSERT INTO ledger VALUES ('undone', 1)")
                await work.run("DELETE FROM idempotent_record")
    assert world.entries() == []


@on(POSTGRES)
async def test_a_database_error_that_was_swallowed_inside_undoes_the_block(world):
    async with world.engine() as idem, world.work() as work:
        with pytest.raises(StoreError, match="aborted"):
            async with world.once(idem, work):
                await work.run("INSERT INTO ledger VALUES ('undone', 1)")
                with contextlib.suppress(Exception):
                    await work.run("SELECT 1 / 0")
        await work.run("INSERT INTO ledger VALUES ('after', 1)")
    assert world.entries() == ["after"]


@on(DRIVERS)
async def test_a_rollback_inside_the_block_is_noticed_at_its_end(world):
    # Only MySQL has a connection beside the caller's that tells, and rolls back by itself.
    expected = RetryTransaction if world.kind.dialect == "mysql" else OutcomeUnknown
    async with world.engine() as idem:
        with contextlib.suppress(Exception):  # there is nothing to commit
            async with world.work() as work:
                with pytest.raises(expected, match="inside the block") as noticed:
                    async with world.once(idem, work):
                        await work.run("ROLLBACK")
        assert noticed.value.__cause__ is not None
        assert await world.done(idem.peek("order-1")) is None


@on([kind for kind in KINDS if kind.name in {"pymysql", "asyncmy"}])
async def test_where_the_record_cannot_be_looked_for_the_outcome_is_unknown(
    world, mariadb_of_this_worker
):
    user = mysql_login(world.url)["user"]
    async with world.engine(policy=Policy(store_timeout=1.0)) as idem, world.work() as work:
        with pytest.raises(OutcomeUnknown):
            async with world.once(idem, work):
                await work.run("ROLLBACK")
                mariadb_of_this_worker.execute(f"ALTER USER {user}@'%' ACCOUNT LOCK")
                for (number,) in mariadb_of_this_worker.execute(
                    "SELECT id FROM information_schema.processlist WHERE user = %s AND id <> %s",
                    user,
                    work.connection.thread_id(),
                ):
                    mariadb_of_this_worker.execute(f"KILL {number}")


@on([kind for kind in KINDS if kind.dialect == "mysql"])
async def test_a_deadlock_that_was_swallowed_inside_the_block_asks_for_a_repeat(world):
    world.query("CREATE TABLE account (name VARCHAR(9) PRIMARY KEY, amount INTEGER NOT NULL)")
    world.query("INSERT INTO account VALUES ('x', 0), ('y', 0)")
    world.query("CREATE TABLE heavy SELECT seq FROM seq_1_to_1000")
    swallowed = []
    # What comes after the deadlock is in a transaction of its own, or each in one of its own.
    committed = world.kind.name == "mysqlclient"
    expected = OutcomeUnknown if committed else RetryTransaction
    with contextlib.closing(pymysql.connect(**mysql_login(world.url))) as other:
        cursor = other.cursor()
        # The server gives up the transaction that has changed fewer rows.
        cursor.execute("UPDATE heavy SET seq = seq + 1")
        cursor.execute("UPDATE account SET amount = 1 WHERE name = 'x'")

        async def wait_for_y():
            cursor.execute("UPDATE account SET amount = 1 WHERE name = 'y'")

        async with world.engine() as idem:
            with pytest.raises(expected, match="inside the block"):
                async with world.work() as work, world.once(idem, work) as attempt:
                    await work.run("UPDATE account SET amount = 2 WHERE name = 'y'")
                    waiting = started(wait_for_y)
                    try:
                        await work.run("UPDATE account SET amount = 2 WHERE name = 'x'")
                    except Exception as error:
                        swallowed.append(error)
                    await work.run("INSERT INTO ledger VALUES ('order-1', 1)")
                    attempt.result = "paid"
            waiting.result(PATIENCE)
            other.commit()
            assert len(swallowed) == 1
            assert db_errors.must_retry(swallowed[0])
            assert world.entries() == ["order-1"] * committed
            assert await world.done(idem.peek("order-1")) is None


@on(DRIVERS)
async def test_an_interrupted_block_is_undone_and_the_interrupt_goes_on(world):
    async with world.engine() as idem, world.work() as work:
        with pytest.raises(Interrupt):
            async with world.once(idem, work):
                await work.run("INSERT INTO ledger VALUES ('undone', 1)")
                raise Interrupt
    assert world.entries() == []


@on(SQLITE)
async def test_an_error_of_your_own_statement_that_asks_for_a_repeat_becomes_the_typed_one(world):
    async with world.engine() as idem, world.work() as work:
        with pytest.raises(RetryTransaction) as raised:
            async with world.once(idem, work):
                raise busy()
        assert isinstance(raised.value.__cause__, sqlite3.OperationalError)


@on(SQLITE)
async def test_one_key_of_several_that_is_refused_undoes_them_all(world):
    async with world.engine() as elsewhere, world.engine() as idem:
        async with world.entered(elsewhere.attempt("b")), world.work() as work:
            with pytest.raises(ConcurrentRequest):
                async with world.entered(idem.transactions(work.connection, ["a", "b", "c"])):
                    pytest.fail("it ran")
        assert await world.done(idem.marks.exists_many(["a", "c"])) == {"a": False, "c": False}


class Interrupt(BaseException):
    """Stands for KeyboardInterrupt and its kind."""


def failing_at(monkeypatch, world, word, error):
    """Let the link raise at the first statement that holds a word."""
    kind = AsyncSQLiteLink if world.kind.asynchronous else SQLiteLink
    execute, raised = kind.execute, []

    def failing(self, statement):
        if word in statement.sql and not raised:
            raised.append(statement)
            raise error
        return execute(self, statement)

    monkeypatch.setattr(kind, "execute", failing)
    return raised


@on(SQLITE)
@pytest.mark.parametrize("word", ["DELETE FROM", "RELEASE SAVEPOINT", "busy_timeout = 30000"])
async def test_an_interrupt_of_our_own_statements_undoes_the_block(world, word, monkeypatch):
    async with world.engine() as idem:
        with pytest.raises(Interrupt):
            async with world.work() as work:
                raised = failing_at(monkeypatch, world, word, Interrupt())
                async with world.once(idem, work):
                    await work.run("INSERT INTO ledger VALUES ('undone', 1)")
        assert len(raised) == 1
        assert await world.done(idem.peek("order-1")) is None
    assert world.entries() == []


@on(SQLITE)
async def test_a_connection_that_is_lost_while_claiming_is_told_as_it_is(world, monkeypatch):
    async with world.engine() as idem, world.work() as work:
        failing_at(monkeypatch, world, "DELETE FROM", ConnectionError("lost"))
        monkeypatch.setattr("semel.transactions.dialects.SQLiteRecords.restore", no_more)
        with pytest.raises(StoreError, match="ConnectionError: lost"):
            async with world.once(idem, work):
                pytest.fail("it ran")


def no_more(self, before):
    raise ConnectionError("lost")


def test_a_row_of_the_same_key_at_the_same_moment_is_to_be_repeated():
    with pytest.raises(RetryTransaction):
        db_errors.raise_claim_error(psycopg.errors.UniqueViolation())


@on(DRIVERS)
async def test_hooks_hear_of_a_block_and_a_replay(world):
    heard = []
    async with world.engine(hooks=[heard.append]) as idem:
        await world.pay(idem)
        await world.pay(idem)
    assert [type(event) for event in heard] == [events.RanInTransaction, events.Replayed]
    assert heard[0].size == len('{"paid":"order-1"}')


@on(SQLITE)
async def test_bypassed_the_block_runs_without_a_record(world):
    async with world.engine() as idem:
        with bypass():
            for _ in range(2):
                assert not (await world.pay(idem)).replayed
        assert await world.done(idem.peek("order-1")) is None


# --- run_transaction -------------------------------------------------------------------------


def test_run_transaction_runs_once_and_replays_with_a_session(sqlite_url):
    sessions = sessionmaker(
        create_engine(sqlalchemy_url(sqlite_url, "pysqlite"), poolclass=NullPool)
    )
    runs = []

    def fn(session):
        runs.append(session.execute(text("SELECT 1")).scalar_one())
        return {"id": 42}

    with Idempotency(sqlite_url) as idem:
        idem.peek("any")
        for _ in range(2):
            assert idem.run_transaction(sessions.begin, "k", fn, payload=1) == {"id": 42}
    assert runs == [1]


async def test_run_transaction_awaits_its_function(postgres_url):
    sessions = async_sessionmaker(
        create_async_engine(sqlalchemy_url(postgres_url, "asyncpg"), poolclass=NullPool)
    )
    runs = []

    async def fn(session):
        runs.append((await session.execute(text("SELECT 1"))).scalar_one())
        return {"id": 42}

    async with AsyncIdempotency(postgres_url) as idem:
        await idem.peek("any")
        for _ in range(2):
            assert await idem.run_transaction(sessions.begin, "k", fn) == {"id": 42}
    assert runs == [1]


class Giving:
    """A unit of work whose commit fails as often as it is told to."""

    def __init__(self, world, failures, error):
        self._world, self.failures, self._error = world, failures, error
        self.runs = 0

    async def run(self, idem, **options):
        """Let the engine run it, as its kind does."""
        if self._world.kind.asynchronous:
            return await idem.run_transaction(self._awaited, "k", self._counted, **options)
        return idem.run_transaction(self._plain, "k", self._count, **options)

    @contextlib.contextmanager
    def _plain(self):
        with contextlib.closing(
            sqlite3.connect(path_of(self._world.url), isolation_level=None)
        ) as connection:
            connection.execute("BEGIN IMMEDIATE")
            yield connection
            self._may_fail()
            connection.execute("COMMIT")

    @contextlib.asynccontextmanager
    async def _awaited(self):
        async with self._world.work() as work:
            yield work.connection
            self._may_fail()

    def _may_fail(self):
        if self.failures:
            self.failures -= 1
            raise self._error

    def _count(self, connection):
        self.runs += 1
        return self.runs

    async def _counted(self, connection):
        return self._count(connection)


def busy():
    error = sqlite3.OperationalError("database is locked")
    error.sqlite_errorname = "SQLITE_BUSY"
    return error


@on(SQLITE)
async def test_a_commit_that_the_database_refused_is_repeated_with_everything_before_it(world):
    units = Giving(world, 2, busy())
    async with world.engine() as idem:
        assert await units.run(idem) == 3
        assert await units.run(idem) == 3
    assert units.runs == 3


@on(SQLITE)
async def test_after_the_last_repeat_the_typed_error_keeps_its_cause(world):
    units = Giving(world, 9, busy())
    async with world.engine() as idem:
        with pytest.raises(RetryTransaction) as raised:
            await units.run(idem, retries=1)
        assert isinstance(raised.value.__cause__, sqlite3.OperationalError)
        assert units.failures == 7


@on(SQLITE)
async def test_any_other_error_is_not_repeated(world):
    units = Giving(world, 9, ConnectionError("lost"))
    async with world.engine() as idem:
        with pytest.raises(ConnectionError):
            await units.run(idem)
        assert units.failures == 8
        with pytest.raises(ConfigError, match="retries"):
            await units.run(idem, retries=-1)


# --- more of the frameworks ------------------------------------------------------------------


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)


def test_a_sessions_objects_of_an_undone_block_are_gone_from_it_too(sqlite_url):
    with Idempotency(sqlite_url) as idem, session_of(sqlite_url) as session:
        idem.peek("any")
        with session.begin():
            Base.metadata.create_all(session.connection())
            with pytest.raises(ZeroDivisionError), idem.transaction(session, "k"):
                session.add(Order(id=1))
                session.flush()
                raise ZeroDivisionError
            assert list(session) == []
            with idem.transaction(session, "k"):
                session.add(Order(id=1))  # flushed with the end of the block
        assert session.get(Order, 1) is not None


def test_a_session_committed_inside_the_block_is_noticed(sqlite_url):
    with Idempotency(sqlite_url) as idem, session_of(sqlite_url) as session:
        idem.peek("any")
        session.begin()
        with pytest.raises(OutcomeUnknown), idem.transaction(session, "k"):
            session.commit()
        session.close()
        assert idem.peek("k").state is State.PROCESSING


def test_psycopgs_transaction_object_stands_for_its_connection(postgres_url):
    with Idempotency(postgres_url) as idem, psycopg.connect(postgres_url) as connection:
        idem.peek("any")
        assert idem.run_transaction(connection.transaction, "k", lambda _: 1) == 1
        assert idem.peek("k").state is State.SUCCEEDED


async def test_a_connection_of_asyncpgs_pool_is_taken_too(postgres_url):
    async with (
        AsyncIdempotency(postgres_url) as idem,
        asyncpg.create_pool(postgres_url, min_size=1, max_size=1) as pool,
    ):
        await idem.peek("any")
        async with (
            pool.acquire() as connection,
            connection.transaction(),
            idem.transaction(connection, "k") as attempt,
        ):
            attempt.result = 1
        assert (await idem.peek("k")).state is State.SUCCEEDED


def test_every_connection_has_a_link_that_can_do_its_work():
    for link in {*drivers.LINKS.values(), *drivers.ASYNC_LINKS.values()}:
        assert not getattr(link, "__abstractmethods__", ())
        assert callable(link.begin)
        assert callable(link.execute)


@on([kind for kind in KINDS if kind.name == "sqlite3"])
async def test_a_guard_refuses_instead_of_replaying(world):
    async with world.engine() as idem:
        await world.pay(idem)
        with pytest.raises(DuplicateRequest):
            await world.pay(idem, policy=Policy(duplicate="reject"))


def test_what_a_session_could_not_write_at_the_end_is_the_applications_own_error(sqlite_url):
    with Idempotency(sqlite_url) as idem, session_of(sqlite_url) as session:
        idem.peek("any")
        with session.begin():
            Base.metadata.create_all(session.connection())
            session.add(Order(id=1))
            session.flush()
            session.expunge_all()
            with pytest.raises(IntegrityError), idem.transaction(session, "k"):
                session.add(Order(id=1))  # flushed with the end of the block
        assert idem.peek("k") is None


async def test_so_it_is_in_a_task(sqlite_url):
    engine = create_async_engine(sqlalchemy_url(sqlite_url, "aiosqlite"), poolclass=NullPool)
    async with AsyncIdempotency(sqlite_url) as idem, AsyncSession(engine) as session:
        await idem.peek("any")
        async with session.begin():
            await (await session.connection()).run_sync(Base.metadata.create_all)
            session.add(Order(id=1))
            await session.flush()
            session.expunge_all()
            with pytest.raises(IntegrityError):
                async with idem.transaction(session, "k"):
                    session.add(Order(id=1))
        assert await idem.peek("k") is None


@on(SQLITE)
async def test_a_deadlock_at_the_very_end_of_a_block_becomes_the_typed_error(world, monkeypatch):
    kind = AsyncSavepoint if world.kind.asynchronous else Savepoint
    ends = []
    commit = kind.commit

    def failing(self):
        ends.append(self)
        if len(ends) == 2:  # the inner one, which is the witness, then the outer one
            raise busy()
        return commit(self)

    monkeypatch.setattr(kind, "commit", failing)
    async with world.engine() as idem, world.work() as work:
        with pytest.raises(RetryTransaction) as raised:
            async with world.once(idem, work):
                pass
        assert isinstance(raised.value.__cause__, sqlite3.OperationalError)
        assert len(ends) == 2
    assert world.query("SELECT count(*) FROM idempotent_record") == [(0,)]


def test_a_number_in_an_error_of_the_application_is_no_deadlock():
    assert not db_errors.must_retry(KeyError(1213))
    assert db_errors.must_retry(pymysql.err.OperationalError(1213, "Deadlock found"))
    assert db_errors.must_retry(pymysql.err.OperationalError(3101, "Plugin instructed to rollback"))


def test_an_unknown_driver_under_django_is_refused_before_anything_is_entered(monkeypatch):
    entered = []
    monkeypatch.setattr(drivers, "_Atomic", entered.append)
    wrapper = SimpleNamespace(
        vendor="sqlite", alias="default", in_atomic_block=True, connection=object()
    )
    with pytest.raises(ConfigError):
        drivers.DjangoLink(wrapper).begin()
    assert entered == []
