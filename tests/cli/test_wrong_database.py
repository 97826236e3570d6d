"""Commands look at what programs have written: a database without a table of records is an error."""

from __future__ import annotations

import contextlib
import re
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import psycopg
import pytest

from semel import Idempotency, open_store
from semel.cli.store import create_nothing
from semel.core.records import Encoded, Identity
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


# --- no URL ---------------------------------------------------------------------------------------

ALL = [*LOOKING, ("audit",), ("reconcile", "--resolvers", "somewhere:resolvers")]


@pytest.mark.parametrize("words", ALL, ids=lambda words: words[0])
def test_without_a_url_a_command_says_so_and_does_not_propose_to_create_one(semel_sqlite, words):
    Path("somewhere.py").write_text("resolvers = {}\n")
    said = semel_sqlite(*words)
    assert (said.code, said.out) == (2, "")
    assert "no URL was given" in said.err
    assert "Set SEMEL_URL to the store of the program" in said.err
    assert "migrate" not in said.err
    assert not Path("semel.db").exists()


def test_without_a_url_the_default_of_the_environment_is_named(semel_sqlite, monkeypatch):
    assert "nothing is at the default sqlite:///semel.db." in semel_sqlite("stuck").err
    monkeypatch.setenv("SEMEL_ENV", "test")
    assert "nothing is at the default memory://." in semel_sqlite("stuck").err


def test_the_default_is_used_if_it_is_there(semel_sqlite):
    assert semel_sqlite("migrate").code == 0
    assert semel_sqlite("stuck").out == "nothing is stuck\n"


@pytest.mark.parametrize(
    ("url", "text"),
    [
        (None, "no URL was given"),
        ("sqlite:///smel.db", "there is no SQLite database"),
        ("memory://", "memory:// belongs to one process"),
    ],
)
def test_doctor_reports_a_store_that_can_only_be_empty_as_a_problem(semel_sqlite, url, text):
    said = semel_sqlite(*(() if url is None else ("--url", url)), "doctor")
    assert (said.code, said.err) == (1, "")
    assert [line[:2] for line in said.lines[1:]] == [["ok", "settings"], ["problem", "store"]]
    assert text in said.out
    assert "migrate" not in said.out


def test_doctor_names_the_file_that_a_wrong_url_came_from(semel_sqlite):
    Path("other.toml").write_text('url = "sqlite:///smel.db"')
    said = semel_sqlite("--config", "other.toml", "doctor")
    assert said.code == 1
    assert "other.toml: there is no SQLite database" in said.out


# --- Redis: every database and every prefix looks like a new store -------------------------------

QUESTION = "are the URL and the prefix right?"
EMPTY: dict[tuple[str, ...], tuple[int, str]] = {
    ("stuck",): (0, "nothing is stuck\n"),
    ("stuck", "--json"): (0, "[]\n"),
    ("stuck", "--scope", "http"): (0, "nothing is stuck in http\n"),
    ("list",): (0, "no record\n"),
    ("list", "--json"): (0, "[]\n"),
    ("list", "--prefix", "a"): (0, "no record\n"),
    ("find", "order:1"): (1, ""),
    ("find", "order:1", "--json"): (1, "[]\n"),
}
"""Commands on a store without a record: the exit code and the output."""


@pytest.fixture
def shop(redis_url):
    """The Redis of a program, which uses the database 0 and the prefix idem:."""
    with Idempotency(redis_url) as engine:
        engine.execute("order:1", lambda: 1, scope="orders")
    return redis_url.removesuffix("/0")


@pytest.mark.parametrize("words", [*EMPTY, ("counts",)], ids=" ".join)
def test_a_redis_without_a_record_is_doubted(semel_sqlite, shop, words):
    place = f"redis {shop.removeprefix('redis://')}, database"
    said = semel_sqlite("--url", f"{shop}/1", *words)
    assert said.err.endswith(f"there is no record at all under idem: in {place} 1: {QUESTION}\n")
    if words in EMPTY:
        assert said[:2] == EMPTY[words]
    else:
        assert (said.code, {line[1] for line in said.lines}) == (0, {"0"})
    said = semel_sqlite("--url", shop, "--prefix", "shop:", *words)
    assert said.err.endswith(f"there is no record at all under shop: in {place} 0: {QUESTION}\n")
    assert QUESTION not in semel_sqlite("--url", shop, *words).err


@pytest.mark.parametrize("words", EMPTY, ids=" ".join)
def test_a_table_without_a_record_is_not_doubted(semel_sqlite, words):
    said = semel_sqlite.on_store(*words)
    assert said[:2] == EMPTY[words]
    assert QUESTION not in said.err


def test_a_front_without_a_record_is_not_doubted(semel_sqlite, redis_url):
    Path("semel.toml").write_text(f'url = "{redis_url}"\nbehind = "{semel_sqlite.url}"\n')
    said = semel_sqlite("stuck")
    assert (said.code, said.err) == (0, "")
    assert QUESTION not in semel_sqlite("doctor").out


def test_a_store_of_somebody_else_is_not_doubted(semel_sqlite, plain_url):
    assert QUESTION not in semel_sqlite("--url", plain_url, "doctor").out


def test_watch_doubts_a_redis_until_it_has_seen_a_record(semel_sqlite, shop, monkeypatch):
    said = semel_sqlite("--url", f"{shop}/1", "watch", "--count", "2", "--every", "1ms")
    assert (said.code, said.out.count(QUESTION)) == (0, 2)
    asked = []

    def ask(*_):
        asked.append(1)

    monkeypatch.setattr("semel.cli.stuck.hint_if_empty", ask)
    said = semel_sqlite("--url", shop, "watch", "--count", "2", "--every", "1ms")
    assert (said.out.count("nothing is stuck"), asked) == (2, [1])


def test_doctor_warns_of_a_redis_without_a_record(semel_sqlite, own_redis):
    with contextlib.closing(own_redis.client()) as client:
        client.config_set("appendonly", "yes")
    said = semel_sqlite("--url", own_redis.url, "doctor")
    assert said.code == 1
    (warning,) = [line for line in said.out.splitlines() if line.startswith("warning")]
    place = f"redis 127.0.0.1:{own_redis.port}, database 0"
    assert (
        warning
        == f"warning  records   there is no record at all under idem: in {place}: {QUESTION}"
    )
    with contextlib.closing(open_store(own_redis.url)) as store:
        store.put(Identity("a", "b"), Encoded("json/1", b"1"), 60.0, owner=bytes(12))
    assert semel_sqlite("--url", own_redis.url, "doctor").code == 0


def test_what_the_audit_trail_has_is_no_record_of_a_program(semel_sqlite, redis_url):
    assert semel_sqlite("--url", redis_url, "purge").code == 0
    assert len(semel_sqlite("--url", redis_url, "audit").lines) == 2
    assert QUESTION in semel_sqlite("--url", redis_url, "stuck").err


def test_the_search_among_keys_of_others_is_given_up_after_a_while(
    semel_sqlite, own_redis, monkeypatch
):
    with contextlib.closing(own_redis.client()) as client:
        client.mset({f"others:{number}": 1 for number in range(40_000)})
    assert QUESTION in semel_sqlite("--url", own_redis.url, "stuck").err
    monkeypatch.setattr("semel.cli.store.SEARCH_SECONDS", -1.0)
    said = semel_sqlite("--url", own_redis.url, "stuck")
    assert said == (0, "nothing is stuck\n", "")


# --- doctor names the store -----------------------------------------------------------------------


def test_doctor_names_the_database_and_no_password(semel_sqlite, database):
    url = database.url
    said = semel_sqlite("--url", url, "doctor")
    scheme, _, rest = url.partition("://")
    if scheme == "sqlite":
        assert f"ok       store     the SQLite database {rest[1:]}, prefix idem:" in said.out
    else:
        assert re.search(r"ok +store +the .*database \w+ at \S+:\d+, prefix idem:", said.out)


@pytest.mark.parametrize(
    ("url", "named"),
    [
        ("redis://ann:s3cret@127.0.0.1:1/4", "redis 127.0.0.1:1, database 4"),
        ("redis://127.0.0.1:1?db=3&password=s3cret", "redis 127.0.0.1:1, database 3"),
        ("redis+unix:///no/socket?db=2&password=s3cret", "redis /no/socket, database 2"),
        ("redis+cluster://:s3cret@127.0.0.1:1", "redis cluster 127.0.0.1:1"),
        (
            "redis+sentinel://:s3cret@127.0.0.1:1/shop/2",
            "redis 'shop' (sentinels 127.0.0.1:1), database 2",
        ),
        (
            "postgresql://ann:s3cret@127.0.0.1:1/shop?table=mine",
            "the PostgreSQL database shop at 127.0.0.1:1",
        ),
        ("mysql://ann:s3cret@127.0.0.1:1/shop?table=mine", "the database shop at 127.0.0.1:1"),
    ],
)
def test_a_password_is_never_shown(semel_sqlite, url, named):
    said = semel_sqlite("--url", url, "doctor")
    assert said.code == 1
    assert f"ok       store     {named}, prefix idem:\n" in said.out
    assert "s3cret" not in said.out + said.err


def test_doctor_names_a_service_without_a_prefix(semel_sqlite, monkeypatch):
    monkeypatch.setenv("SEMEL_STORE_TIMEOUT", "0.1")
    said = semel_sqlite("--url", "semel+http://127.0.0.1:1", "doctor")
    assert "ok       store     the semel service at http://127.0.0.1:1\n" in said.out


def test_doctor_names_both_tiers(semel_sqlite):
    Path("semel.toml").write_text(f'url = "redis://127.0.0.1:1"\nbehind = "{semel_sqlite.url}"\n')
    path = semel_sqlite.url.removeprefix("sqlite:///")
    named = f"redis 127.0.0.1:1, database 0 in front of the SQLite database {path}, prefix idem:"
    assert named in semel_sqlite("doctor").out
