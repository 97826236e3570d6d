"""A record is written only where the engine will look for it: in its own database.

Two databases that both have the table are the dangerous case: nothing else would complain.
"""

from __future__ import annotations

import contextlib
import sqlite3
import threading

import pymysql
import pytest

from semel import ConfigError, Idempotency
from semel.core.records import State
from semel.stores.sql.mysql import MySQLStore
from semel.stores.sql.sqlite import SQLiteStore
from transactions.conftest import World
from transactions.kinds import KINDS, mysql_login, path_of

SQLITE = [kind for kind in KINDS if kind.dialect == "sqlite"]
MYSQL = [kind for kind in KINDS if kind.dialect == "mysql"]


def on(kinds):
    return pytest.mark.parametrize("world", kinds, ids=lambda kind: kind.name, indirect=True)


def make_table(url):
    with Idempotency(url) as idem:
        idem.peek("any")


@on(SQLITE)
async def test_a_connection_to_another_file_is_refused_though_it_has_the_table(world, tmp_path):
    other = World(world.kind, f"sqlite:///{tmp_path / 'other.db'}")
    make_table(other.url)
    async with world.engine() as idem, other.work() as work:
        with pytest.raises(ConfigError, match="committed together") as refused:
            async with world.once(idem, work):
                pytest.fail("it ran")
        assert str(tmp_path / "other.db") in str(refused.value)
        assert path_of(world.url) in str(refused.value)
    assert other.query("SELECT count(*) FROM idempotent_record") == [(0,)]


@on(SQLITE)
async def test_another_name_of_the_same_file_is_the_same_file(world, tmp_path):
    async with world.engine() as idem:
        (tmp_path / "soft.db").symlink_to(path_of(world.url))
        async with (
            world.kind.working(f"sqlite:///{tmp_path / 'soft.db'}") as work,
            world.once(idem, work) as attempt,
        ):
            attempt.result = 1
        assert (await world.done(idem.peek("order-1"))).state is State.SUCCEEDED


@contextlib.contextmanager
def begun(path):
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        yield connection


def test_a_database_in_memory_is_not_the_engines_file(sqlite_url):
    with (
        Idempotency(sqlite_url) as idem,
        begun(":memory:") as connection,
        pytest.raises(ConfigError, match="in a database in memory"),
    ):
        idem.transaction(connection, "k").__enter__()


@pytest.fixture
def attached(sqlite_url, tmp_path):
    """A connection to a shop that has attached the engine's file under a name of its own."""
    make_table(sqlite_url)
    with contextlib.closing(
        sqlite3.connect(tmp_path / "shop.db", isolation_level=None)
    ) as connection:
        connection.execute('ATTACH ? AS "the ""records"""', (path_of(sqlite_url),))
        yield connection


def test_a_table_in_an_attached_file_is_found_there(sqlite_url, attached):
    with Idempotency(sqlite_url) as idem:
        attached.execute("BEGIN IMMEDIATE")
        with idem.transaction(attached, "k") as attempt:
            attempt.result = 1
        attached.execute("COMMIT")
        assert idem.peek("k").state is State.SUCCEEDED


@pytest.mark.parametrize("hiding", ["main", "temp"])
def test_a_table_that_hides_the_attached_one_is_refused(sqlite_url, attached, hiding):
    attached.execute(f"CREATE TABLE {hiding}.IDEMPOTENT_record (identity BLOB PRIMARY KEY)")
    with Idempotency(sqlite_url) as idem:
        attached.execute("BEGIN IMMEDIATE")
        with pytest.raises(ConfigError, match=r"shop\.db" if hiding == "main" else "in memory"):
            idem.transaction(attached, "k").__enter__()


def test_a_table_that_is_in_no_file_is_missing_in_the_first(sqlite_url):
    with Idempotency(sqlite_url) as idem, begun(path_of(sqlite_url)) as connection:
        connection.execute("CREATE TABLE temp.basket (entry TEXT)")
        with pytest.raises(ConfigError, match="semel migrate"):
            idem.transaction(connection, "k").__enter__()


def test_another_table_has_to_be_in_the_engines_file_too(sqlite_url, attached):
    with Idempotency(sqlite_url) as idem:
        attached.execute("CREATE TABLE orders_done AS SELECT * FROM idempotent_record")
        attached.execute("BEGIN IMMEDIATE")
        with pytest.raises(ConfigError, match="table orders_done of the connection is in"):
            idem.transaction(attached, "k", table="orders_done").__enter__()


# --- an engine on the application's own connection ---------------------------------------------


def test_an_engine_on_a_given_connection_has_that_ones_file(sqlite_url, tmp_path):
    with contextlib.closing(sqlite3.connect(path_of(sqlite_url))) as given:
        given.row_factory = sqlite3.Row
        with Idempotency(SQLiteStore(connection=given)) as idem:
            idem.peek("any")
            with (
                begun(path_of(sqlite_url)) as connection,
                idem.transaction(connection, "k") as attempt,
            ):
                attempt.result = 1
            with (
                begun(tmp_path / "other.db") as connection,
                pytest.raises(ConfigError, match=r"other\.db"),
            ):
                idem.transaction(connection, "k").__enter__()


def test_a_connection_in_memory_serves_the_engine_and_its_transactions():
    with contextlib.closing(sqlite3.connect(":memory:", isolation_level=None)) as connection:
        idem = Idempotency(SQLiteStore(connection=connection))
        idem.peek("any")
        connection.execute("BEGIN")
        with idem.transaction(connection, "k") as attempt:
            attempt.result = 1
        connection.execute("COMMIT")
        assert idem.peek("k").state is State.SUCCEEDED
        idem.close()


def test_the_file_of_another_threads_connection_is_not_asked_for(sqlite_url):
    done = []
    with contextlib.closing(sqlite3.connect(path_of(sqlite_url))) as given:
        idem = Idempotency(SQLiteStore(connection=given))
        idem.peek("any")

        def work():
            with begun(path_of(sqlite_url)) as connection:
                with idem.transaction(connection, "k") as attempt:
                    attempt.result = 1
                connection.execute("COMMIT")
            done.append(True)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert done == [True]
        idem.close()


# --- MySQL -------------------------------------------------------------------------------------


@on(MYSQL)
async def test_a_connection_to_another_mysql_database_is_refused(world, mariadb_of_this_worker):
    other = World(world.kind, mariadb_of_this_worker.database())
    make_table(other.url)
    names = [mysql_login(url)["database"] for url in (world.url, other.url)]
    async with world.engine() as idem, other.work() as work:
        with pytest.raises(ConfigError) as refused:
            async with world.once(idem, work):
                pytest.fail("it ran")
        assert all(name in str(refused.value) for name in names)
    assert other.query("SELECT count(*) FROM idempotent_record") == [(0,)]


def test_without_any_database_a_mysql_connection_is_refused(mysql_url):
    login = mysql_login(mysql_url) | {"database": None}
    with Idempotency(mysql_url) as idem, contextlib.closing(pymysql.connect(**login)) as connection:
        connection.begin()
        with pytest.raises(ConfigError, match="to the database None"):
            idem.transaction(connection, "k").__enter__()


def test_an_engine_on_given_mysql_connections_does_not_know_the_databases_name(mysql_url):
    login = mysql_login(mysql_url)
    with (
        Idempotency(MySQLStore(connect=lambda: pymysql.connect(**login))) as idem,
        contextlib.closing(pymysql.connect(**login)) as connection,
    ):
        idem.peek("any")
        connection.begin()
        with idem.transaction(connection, "k") as attempt:
            attempt.result = 1
        connection.commit()
        assert idem.peek("k").state is State.SUCCEEDED
        idem.internals.store.close()


@on(MYSQL)
async def test_the_applications_last_insert_id_stays_its_own(world):
    world.query("CREATE TABLE numbered (id INT AUTO_INCREMENT PRIMARY KEY, entry INT)")
    world.query("ALTER TABLE numbered AUTO_INCREMENT = 77")
    async with world.engine() as idem, world.work() as work:
        await work.run("INSERT INTO numbered (entry) VALUES (1)")
        for replayed in (False, True):
            async with world.once(idem, work) as attempt:
                assert attempt.replayed is replayed
                assert await work.run("SELECT LAST_INSERT_ID()") == [(77,)]
            assert await work.run("SELECT LAST_INSERT_ID()") == [(77,)]


def test_a_connection_with_a_temporary_table_waits_for_another_writer_too(tmp_path):
    """A look for the table before the write lock would be a read, and a reader may not wait."""
    file = tmp_path / "shop.db"
    with Idempotency(f"sqlite:///{file}") as idem:
        idem.execute("before", lambda: None)
        connection = sqlite3.connect(file, isolation_level=None)
        writer = sqlite3.connect(file, isolation_level=None, check_same_thread=False)
        with contextlib.closing(connection), contextlib.closing(writer):
            connection.execute("CREATE TEMP TABLE of_the_application (n)")
            writer.execute("BEGIN IMMEDIATE")
            ending = threading.Timer(0.3, writer.execute, ("COMMIT",))
            ending.start()
            connection.execute("BEGIN")
            with idem.transaction(connection, "k") as attempt:
                attempt.result = "waited"
            connection.execute("COMMIT")
            ending.join()
        assert idem.peek("k").state is State.SUCCEEDED
