"""doctor: what it looks at, and what it warns about."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import psycopg
import pytest

from semel.core.records import Encoded, Identity
from semel.errors import StoreError
from semel.stores.redis import RedisStore
from semel.stores.redis.replies import diagnose
from semel.stores.sql.sqlite import SQLiteStore
from semel.stores.urls import open_store
from servers.mariadb import mariadb_server
from servers.postgres import postgres_server


def with_record(url):
    """Put a record there: without any, doctor asks whether it is the right store."""
    with contextlib.closing(open_store(url)) as store:
        store.put(Identity("orders", "order:1"), Encoded("json/1", b"1"), 60.0, owner=bytes(12))


def findings(said):
    return [(each["level"], each["about"]) for each in said.data]


def test_all_is_well(semel_sqlite):
    said = semel_sqlite.on_store("doctor")
    assert said.code == 0
    assert said.lines[0] == ["RESULT", "ABOUT"]
    assert {line[0] for line in said.lines[1:]} == {"ok"}
    levels = findings(semel_sqlite.on_store("doctor", "--json"))
    assert levels == [("ok", about) for about in ("settings", "store", "store", "clock", "stuck")]
    store = open_store(semel_sqlite.url)
    assert store.counts().succeeded == 0, "it leaves nothing behind"
    store.close()


def test_a_store_that_cannot_be_reached_is_a_problem(semel_sqlite):
    said = semel_sqlite("--url", "redis://127.0.0.1:1/0", "doctor")
    assert said.code == 1
    assert "problem  store" in said.out


def test_a_redis_that_may_forget_is_warned_about(own_redis, semel_sqlite):
    words = ("--url", own_redis.url, "doctor")
    client = own_redis.client()
    client.config_set("appendonly", "yes")
    with_record(own_redis.url)
    assert semel_sqlite(*words).code == 0
    client.config_set("maxmemory-policy", "allkeys-lru")
    client.config_set("appendonly", "no")
    client.close()
    said = semel_sqlite(*words)
    assert said.code == 1
    assert "maxmemory-policy is allkeys-lru" in said.out
    assert "appendonly is off" in said.out


HOWTO = Path(__file__).resolve().parents[2] / "docs" / "stores" / "redis.md"


@pytest.fixture
def permitted(own_redis):
    """Gives the URL of a user who may do what the page on Redis says, but for some of it."""

    def permit(*without: str) -> str:
        table = HOWTO.read_text("utf-8").partition("ACL SETUSER semel")[2].partition("```")[0]
        rules = [word for word in re.findall(r"[~&+]\S+", table) if word not in without]
        with own_redis.client() as client:
            client.config_set("appendonly", "yes")
            client.execute_command("ACL", "SETUSER", "semel", "on", ">secret", "-@all", *rules)
        with_record(own_redis.url)
        return f"redis://semel:secret@127.0.0.1:{own_redis.port}/0"

    return permit


def test_the_permissions_of_the_page_on_redis_are_enough(permitted, semel_sqlite):
    said = semel_sqlite("--url", permitted(), "doctor")
    assert (said.code, {line[0] for line in said.lines[1:]}) == (0, {"ok"})


def test_a_right_that_is_not_granted_is_told_and_is_no_danger(permitted, semel_sqlite):
    said = semel_sqlite("--url", permitted("+info"), "doctor")
    assert said.code == 0
    assert "skipped  server" in said.out
    assert "the command info; what to grant is on the page docs/stores/redis.md" in said.out
    assert "secret" not in said.out


def test_a_server_that_cannot_tell_about_itself_is_warned_about(
    permitted, semel_sqlite, monkeypatch
):
    def fail(_):
        raise StoreError("gibberish")

    monkeypatch.setattr(RedisStore, "diagnose", fail)
    said = semel_sqlite("--url", permitted(), "doctor")
    assert said.code == 1
    assert "could not be read: gibberish" in said.out


def test_what_info_says_is_read():
    assert diagnose(b"# Memory\r\nmaxmemory_policy:noeviction\r\naof_enabled:1\r\n") == []
    (danger,) = diagnose(b"aof_last_write_status:err\r\n")
    assert "cannot write" in danger


def test_disabled_settings_are_warned_about(semel_sqlite):
    Path("semel.toml").write_text("disabled = true\n")
    said = semel_sqlite.on_store("doctor", "--json")
    assert said.code == 1
    assert findings(said)[:3] == [("ok", "settings"), ("warning", "settings"), ("ok", "store")]


@pytest.mark.parametrize(
    ("ago", "level", "oldest"), [(120.0, "ok", "2m"), (600.0, "warning", "10m")]
)
def test_doctor_and_stuck_agree(semel_sqlite, ago, level, oldest):
    semel_sqlite.abandon("order:1", ago=ago)
    semel_sqlite.abandon("order:2", hold=False)
    said = semel_sqlite.on_store("doctor")
    told = f"{level} stuck 2 stuck, 1 of them held, the oldest for {oldest}"
    assert " ".join(said.lines[-1]).startswith(told)
    assert said.out.endswith(": see semel stuck\n")
    listed = semel_sqlite.on_store("stuck")
    assert [line[1] for line in listed.lines[1:]] == ["order:1", "order:2"], "as doctor said"
    assert said.code == listed.code == (1 if level == "warning" else 0)


def test_a_clock_that_is_off_is_said(semel_sqlite, monkeypatch):
    monkeypatch.setattr("semel.cli.doctor.time.time", lambda: 1_000_000.0)
    said = semel_sqlite.on_store("doctor")
    assert said.code == 1
    assert "warning  clock" in said.out


def test_a_store_that_forgets_at_once_is_a_problem(semel_sqlite, monkeypatch):
    monkeypatch.setattr(SQLiteStore, "get", lambda *_: None)
    said = semel_sqlite.on_store("doctor")
    assert said.code == 1
    assert "is missing" in said.out


def test_a_store_that_cannot_list_is_looked_at_as_far_as_it_goes(semel_sqlite, plain_url):
    assert findings(semel_sqlite("--url", plain_url, "doctor", "--json"))[-1] == ("ok", "clock")


@pytest.fixture
def failing(monkeypatch):
    def fail(*_, **__):
        raise StoreError("run semel migrate")

    monkeypatch.setattr(SQLiteStore, "put", fail)


def test_what_the_store_complains_about_is_told(semel_sqlite, failing):
    assert "run semel migrate" in semel_sqlite.on_store("doctor").out


def tiers(front, behind):
    Path("semel.toml").write_text(f'url = "{front}"\nbehind = "{behind}"\n')


def test_both_tiers_are_named_and_looked_at(semel_sqlite, redis_url):
    tiers(redis_url, semel_sqlite.url)
    said = semel_sqlite("doctor")
    assert said.code == 0
    assert ", database 0 in front of the SQLite database " in said.out
    assert ["ok", "front", "it", "is", "reachable"] in said.lines


def test_a_front_that_is_away_hides_nothing_of_the_store_behind(semel_sqlite):
    tiers("redis://127.0.0.1:1/0", semel_sqlite.url)
    said = semel_sqlite("doctor", "--json")
    assert said.code == 1
    assert findings(said) == [
        *(("ok", about) for about in ("settings", "store", "store", "clock")),
        ("warning", "front"),
        ("ok", "stuck"),
    ]
    (front,) = [each["text"] for each in said.data if each["about"] == "front"]
    assert front.startswith("it is unreachable, and sqlite decides alone")
    store = open_store(semel_sqlite.url)
    assert store.counts().succeeded == 0, "it leaves nothing behind"
    store.close()


def migrated(url: str) -> str:
    with contextlib.closing(open_store(url)) as store:
        store.migrate()
    return url


def test_a_postgres_that_may_lose_commits_is_warned_about(postgres_url, semel_sqlite):
    with psycopg.connect(postgres_url) as client:  # the servers of these tests are quick, not safe
        assert client.execute("SHOW fsync").fetchone() == ("off",)
    said = semel_sqlite("--url", migrated(postgres_url), "doctor")
    assert said.code == 1
    assert "fsync is off" in said.out
    assert "full_page_writes is off" in said.out
    assert "synchronous_commit" not in said.out
    hasty = f"{postgres_url}?options=-c%20synchronous_commit%3Doff"
    assert "synchronous_commit is off" in semel_sqlite("--url", hasty, "doctor").out


def test_a_mysql_that_may_lose_commits_is_warned_about(mysql_url, semel_sqlite):
    said = semel_sqlite("--url", migrated(mysql_url), "doctor")
    assert said.code == 1
    assert "innodb_flush_log_at_trx_commit is 2" in said.out
    assert "innodb_flush_method is nosync" in said.out


def test_databases_that_keep_what_they_commit_are_well(semel_sqlite):
    with mariadb_server(
        "--innodb-flush-log-at-trx-commit=1", "--innodb-flush-method=fsync"
    ) as server:
        assert semel_sqlite("--url", migrated(server.database()), "doctor").code == 0
    with postgres_server("fsync=on", "full_page_writes=on") as careful:
        assert semel_sqlite("--url", migrated(careful.url()), "doctor").code == 0


def test_the_database_behind_a_front_is_asked_and_not_the_front(
    postgres_url, redis_url, semel_sqlite
):
    tiers(redis_url, migrated(postgres_url))
    said = semel_sqlite("doctor")
    assert "fsync is off" in said.out
    assert "appendonly" not in said.out


def test_a_table_that_is_missing_is_a_problem_like_any_other(postgres_url, semel_sqlite):
    said = semel_sqlite("--url", f"{postgres_url}?autocreate=false", "doctor")
    assert said.code == 1
    assert "problem  store" in said.out
    assert "run `semel migrate`" in said.out
