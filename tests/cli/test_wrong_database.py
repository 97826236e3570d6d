"""Commands look at what programs have written: a database without a table of records is an error."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import psycopg
import pytest

from semel import Idempotency, open_store
from semel.cli.store import create_nothing
from semel.stores.memory import MemoryStore
from stores.mysql_given import database_of

LOOKING = [
    ("list",),
    ("show", "orders", "order:1"),
    ("find", "order:1"),
    ("stuck",),
    ("watch", "--count", "1"),
    ("counts",),
    ("forget", "orders", "order:1"),
    ("resolve", "orders", "order:1", "--succeeded", "1", "--ttl", "3d"),
    ("purge",),
]


class Database(NamedTuple):
    """A database that a command may be given by mistake."""

    url: str
    run: Callable[[str], list[Any]]
    tables: str
    """Lists its tables."""

    def names(self) -> list[str]:
        return sorted(name for (name,) in self.run(self.tables))


@pytest.fixture(params=["sqlite", "postgres", "mysql"])
def database(request, tmp_path) -> Database:
    match request.param:
        case "sqlite":
            path = tmp_path / "another.db"

            def run(sql: str) -> list[Any]:
                with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as client:
                    return client.execute(sql).fetchall()

            found = Database(f"sqlite:///{path}", run, "SELECT name FROM sqlite_master")
        case "postgres":
            url = request.getfixturevalue("postgres_url")

            def run(sql: str) -> list[Any]:
                with psycopg.connect(url, autocommit=True) as client:
                    reply = client.execute(sql)
                    return reply.fetchall() if reply.description else []

            of_ours = "SELECT tablename FROM pg_tables WHERE schemaname = 'public'"
            found = Database(url, run, of_ours)
        case _:
            url = request.getfixturevalue("mysql_url")
            server = request.getfixturevalue("mariadb_of_this_worker")

            def run(sql: str) -> list[Any]:
                return list(server.execute(sql, database=database_of(url)))

            found = Database(url, run, "SHOW TABLES")
    found.run("CREATE TABLE mine (id INTEGER)")
    return found


@pytest.mark.parametrize("words", LOOKING, ids=lambda words: words[0])
def test_a_command_on_the_wrong_database_says_so_and_creates_nothing(semel_sqlite, database, words):
    said = semel_sqlite("--url", database.url, *words)
    assert (said.code, said.out) == (2, "")
    assert "the table" in said.err
    assert "is missing in" in said.err
    assert "right?" in said.err
    assert "`semel migrate`" in said.err
    assert database.names() == ["mine"]


def test_doctor_finds_that_there_is_no_table(semel_sqlite, database):
    said = semel_sqlite("--url", database.url, "doctor")
    assert said.code == 1
    assert "problem  store" in said.out
    assert "is missing in" in said.out
    assert database.names() == ["mine"]


def test_after_migrate_commands_find_the_table(semel_sqlite, database):
    assert semel_sqlite("--url", database.url, "migrate").code == 0
    assert semel_sqlite("--url", database.url, "stuck").code == 0


def test_behind_a_front_a_command_creates_nothing_either(semel_sqlite, database, redis_url):
    Path("semel.toml").write_text(f'url = "{redis_url}"\nbehind = "{database.url}"\n')
    said = semel_sqlite("counts")
    assert said.code == 2
    assert "is missing in" in said.err
    assert "is missing in" in semel_sqlite("doctor").out
    assert database.names() == ["mine"]


def test_tiers_before_a_store_without_a_table_work_as_before(redis_url):
    store = open_store(redis_url, behind=MemoryStore())
    create_nothing(store)
    assert store.counts().succeeded == 0
    store.close()


def test_a_table_that_has_lost_its_version_is_not_taken_for_a_wrong_database(
    semel_sqlite, database
):
    with Idempotency(database.url) as engine:
        engine.execute("order:1", lambda: 1)
    database.run("DROP TABLE semel_schema")
    said = semel_sqlite("--url", database.url, "counts")
    assert "is missing" not in said.err
    assert "semel_schema" not in database.names()
    if database.url.startswith("sqlite"):
        assert said.code == 0
    else:
        assert said.code == 2
        assert "semel_schema does not know it" in said.err


def test_a_file_of_another_program_keeps_its_journal_mode(semel_sqlite, tmp_path):
    path = tmp_path / "another.db"
    with contextlib.closing(sqlite3.connect(path)) as client:
        client.execute("CREATE TABLE mine (id INTEGER)")
    before = path.read_bytes()
    assert semel_sqlite("--url", f"sqlite:///{path}", "stuck").code == 2
    assert path.read_bytes() == before


def test_doctor_says_that_a_file_is_empty(semel_sqlite):
    Path("empty.db").touch()
    said = semel_sqlite("--url", "sqlite:///empty.db", "doctor")
    assert said.code == 1
    assert "the table idempotent_record is missing in the SQLite database" in said.out
    assert Path("empty.db").read_bytes() == b""
