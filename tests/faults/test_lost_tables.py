"""The table, its version or the whole file is gone while programs use it.

| fault | expected |
|---|---|
| 47 table dropped, file deleted or replaced while open | a clear error at once; `migrate` makes it again |
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from engines.facade import Effect, World, never
from semel import ConfigError, Idempotency, StoreUnavailable, open_store
from semel.stores.sql.sqlite import SQLiteStore
from servers.mariadb import MariaDBServer
from stores.mysql_given import database_of

fault = pytest.mark.fault

TABLE = "idempotent_record"

FORGETS = (
    r"estore it with its records; if they may be forgotten, `semel migrate` makes an empty one"
)


class Place:
    """A database, and somebody who changes it from outside."""

    def __init__(self, world: World, run: Callable[[str], object]) -> None:
        self.world = world
        self.run = run

    @property
    def url(self) -> str:
        return self.world.url

    def migrate(self, **options: Any) -> int:
        """What `semel migrate` does, in a program of its own."""
        with contextlib.closing(open_store(self.url, **options)) as store:
            return store.migrate()


@pytest.fixture(params=["sqlite", "postgres", "mysql"])
def place(request, kind: str, mariadb_of_this_worker: MariaDBServer) -> Iterator[Place]:
    url = request.getfixturevalue(f"{request.param}_url")

    def run(sql: str) -> object:
        match request.param:
            case "sqlite":
                path = url.removeprefix("sqlite:///")
                with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as client:
                    return client.execute(sql).fetchall()
            case "postgres":
                with psycopg.connect(url, autocommit=True) as client:
                    return client.execute(sql)
            case _:
                return mariadb_of_this_worker.execute(sql, database=database_of(url))

    with World(kind, url) as world:
        yield Place(world, run)


@fault(47)
def test_a_dropped_table_is_a_clear_error_until_migrate_makes_it_again(place):
    engine = place.world.engine()
    assert engine.execute("k", Effect(1)) == 1
    place.run(f"DROP TABLE {TABLE}")
    with pytest.raises(ConfigError, match=FORGETS):
        engine.execute("k", never)
    restarted = place.world.engine()
    for _ in range(2):
        with pytest.raises(ConfigError, match=FORGETS):
            restarted.execute("k", never)
    assert place.migrate() == 1
    assert place.migrate() == 1
    effect = Effect(2)
    assert engine.execute("k", effect) == 2
    assert restarted.execute("k", effect) == 2
    assert place.world.engine().execute("k", effect) == 2
    assert effect.runs == 1


def test_a_table_that_has_lost_its_version_keeps_its_records(place):
    assert place.world.engine().execute("k", Effect(1)) == 1
    place.run("DROP TABLE semel_schema")  # a restore of the records alone
    assert place.world.engine().execute("k", never) == 1
    place.run("DELETE FROM semel_schema")
    assert place.migrate() == 1
    assert place.world.engine().execute("k", never) == 1


def test_a_renamed_table_keeps_its_records_under_its_new_name(place):
    assert place.world.engine().execute("k", Effect(1)) == 1
    place.run(f"ALTER TABLE {TABLE} RENAME TO payments")
    with Idempotency(f"{place.url}?table=payments") as engine:
        assert engine.execute("k", never) == 1
    with pytest.raises(ConfigError, match=r"dropped or renamed|no such table"):
        place.world.engine().execute("k", never)


@pytest.mark.parametrize("database", ["sqlite", "postgres"])  # MySQL names the missing column
def test_a_table_that_is_not_ours_is_left_alone(request, database, tmp_path):
    url = request.getfixturevalue(f"{database}_url")
    create = f"CREATE TABLE {TABLE} (id INTEGER)"
    if database == "sqlite":
        with contextlib.closing(sqlite3.connect(tmp_path / "semel.db")) as client:
            client.execute(create)
    else:
        with psycopg.connect(url, autocommit=True) as client:
            client.execute(create)
    with Idempotency(url) as engine:
        for _ in range(2):
            with pytest.raises(ConfigError, match="take another table name"):
                engine.execute("k", never)


def test_an_index_of_another_table_is_named(postgres_url):
    with Idempotency(postgres_url) as engine:
        engine.execute("k", Effect(1))
    with psycopg.connect(postgres_url, autocommit=True) as client:
        client.execute(f"ALTER TABLE {TABLE} RENAME TO payments")
    with (
        contextlib.closing(open_store(postgres_url)) as store,
        pytest.raises(ConfigError, match="keeps the names of its indexes"),
    ):
        store.migrate()


# --- files ----------------------------------------------------------------------------------


def removed(path: Path) -> None:
    for each in (path, path.with_name("semel.db-wal"), path.with_name("semel.db-shm")):
        each.unlink(missing_ok=True)


@fault(47)
def test_a_deleted_file_is_a_clear_error_until_migrate_makes_it_again(kind, sqlite_url, tmp_path):
    with World(kind, sqlite_url) as world:
        engine = world.engine()
        assert engine.execute("k", Effect(1)) == 1
        removed(tmp_path / "semel.db")
        for _ in range(3):
            with pytest.raises(ConfigError, match="deleted or replaced"):
                engine.execute("k", never)
        assert not (tmp_path / "semel.db").exists()
        with contextlib.closing(open_store(sqlite_url)) as store:
            assert store.migrate() == 1
        assert engine.execute("k", Effect(2)) == 2
        assert world.engine().execute("k", never) == 2


@fault(47)
def test_a_replaced_file_is_told_once_and_used_from_then_on(kind, sqlite_url, tmp_path):
    with World(kind, sqlite_url) as world, Idempotency(f"{sqlite_url}.backup") as backup:
        backup.execute("k", Effect("from the backup"))
        backup.close()
        engine = world.engine()
        assert engine.execute("k", Effect("new")) == "new"
        removed(tmp_path / "semel.db")
        (tmp_path / "semel.db.backup").rename(tmp_path / "semel.db")
        with pytest.raises(ConfigError, match="deleted or replaced"):
            engine.execute("k", never)
        assert engine.execute("k", never) == "from the backup"


@fault(47)
@pytest.mark.parametrize("replaced", [False, True], ids=["deleted", "replaced"])
def test_a_log_that_was_deleted_or_replaced_is_a_clear_error_before_anything_is_written(
    kind, sqlite_url, tmp_path, replaced
):
    log = tmp_path / "semel.db-wal"
    with World(kind, sqlite_url) as world:
        engine = world.engine()
        assert engine.execute("k", Effect(1)) == 1
        log.unlink()
        if replaced:
            log.touch()
        with pytest.raises(ConfigError, match=r"semel\.db-wal was deleted or replaced"):
            engine.execute("new", never)
        assert engine.execute("new", Effect(2)) == 2  # the file was opened anew
        assert world.engine().execute("new", never) == 2


@fault(47)
def test_the_log_of_a_file_that_is_reached_through_a_link_is_found(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "semel.db").touch()
    (tmp_path / "semel.db").symlink_to(tmp_path / "real" / "semel.db")
    with Idempotency(f"sqlite:///{tmp_path}/semel.db") as engine:
        assert engine.execute("k", Effect(1)) == 1
        (tmp_path / "real" / "semel.db-wal").unlink()
        with pytest.raises(ConfigError, match=r"real/semel\.db-wal was deleted or replaced"):
            engine.execute("new", never)


@fault(47)
def test_a_file_deleted_under_a_given_connection_is_a_clear_error(tmp_path):
    path = tmp_path / "semel.db"
    with (
        contextlib.closing(sqlite3.connect(path, check_same_thread=False)) as connection,
        Idempotency(SQLiteStore(connection=connection)) as engine,
    ):
        assert engine.execute("k", Effect(1)) == 1
        removed(path)
        for _ in range(2):
            with pytest.raises(ConfigError, match=r"deleted or replaced.*open a connection"):
                engine.execute("k", never)
        path.touch()
        with pytest.raises(ConfigError, match="deleted or replaced"):
            engine.execute("k", never)


def test_a_given_connection_to_memory_has_no_file_that_could_be_lost():
    with (
        contextlib.closing(sqlite3.connect(":memory:", check_same_thread=False)) as connection,
        Idempotency(SQLiteStore(connection=connection)) as engine,
    ):
        assert engine.execute("k", Effect(1)) == 1
        assert engine.execute("k", never) == 1


@fault(47)
def test_a_directory_that_became_something_else_is_a_clear_error_until_it_is_back(kind, tmp_path):
    home, aside = tmp_path / "home", tmp_path / "aside"
    home.mkdir()
    with World(kind, f"sqlite:///{home}/semel.db") as world:
        engine = world.engine()
        assert engine.execute("k", Effect(1)) == 1
        home.rename(aside)
        home.symlink_to(home)  # a name that cannot be followed
        with pytest.raises(StoreUnavailable, match="cannot be reached"):
            engine.execute("k", never)
        home.unlink()
        home.touch()
        with pytest.raises(ConfigError, match="deleted or replaced"):
            engine.execute("k", never)
        home.unlink()
        aside.rename(home)
        assert engine.execute("k", never) == 1
