"""Tiers by URL, by objects and by settings; what is wrong is said before anything is connected."""

from __future__ import annotations

import contextlib

import pytest
import redis

from contract.reference_store import DictStore
from engines.facade import never
from semel import AsyncIdempotency, Idempotency
from semel.core.records import Identity
from semel.core.settings import load_settings
from semel.errors import ConfigError
from semel.stores.memory import AsyncMemoryStore, MemoryStore
from semel.stores.redis import RedisStore
from semel.stores.redis import open_async_store as open_async_redis
from semel.stores.redis import open_store as open_redis
from semel.stores.sql.sqlite import AsyncSQLiteStore, SQLiteStore
from semel.stores.tiered import AsyncTieredStore, TieredStore
from semel.stores.urls import open_async_store, open_store
from servers.redis import redis_cluster
from stores.tiered_given import ANNA, BERT, KEY, RED, RESULT, Tiers, ask, entry_key, succeed

NOWHERE = "redis://127.0.0.1:1"


# --- by objects ---------------------------------------------------------------------------------


def test_stores_of_the_application_are_used_and_stay_open(redis_url, tmp_path):
    client = redis.Redis.from_url(redis_url)
    in_front, behind = RedisStore(client, prefix="shop:"), SQLiteStore(tmp_path / "semel.db")
    tiers = TieredStore(in_front, behind)
    tiers.claim(ask(ANNA, RED))
    assert tiers.complete(KEY, ANNA, RESULT, 60)
    assert client.exists(entry_key(KEY, "shop:"))
    tiers.close()
    assert client.ping()
    assert behind.claim(ask(BERT, RED)).outcome == RESULT
    behind.close()
    client.close()


async def test_async_stores_of_the_application_are_used_and_stay_open(redis_url, tmp_path):
    in_front, behind = open_async_redis(redis_url), AsyncSQLiteStore(tmp_path / "semel.db")
    tiers = AsyncTieredStore(in_front, behind)
    await tiers.claim(ask(ANNA, RED))
    assert await tiers.complete(KEY, ANNA, RESULT, 60)
    assert repr(tiers) == f"<AsyncTieredStore in front of {behind!r}>"
    await tiers.close()
    assert (await behind.claim(ask(BERT, RED))).outcome == RESULT
    assert await in_front.get(KEY) is None
    await behind.close()
    await in_front.close()


def test_a_url_in_front_of_a_store_of_the_application(redis_url, tmp_path):
    behind = SQLiteStore(tmp_path / "semel.db")
    tiers = open_store(redis_url, behind=behind, max_connections=3, front_ttl=5)
    assert repr(tiers) == f"<TieredStore in front of {behind!r}>"
    assert tiers.claim(ask(ANNA)).number == 1
    tiers.close()
    assert behind.get(KEY).owner == ANNA
    behind.close()


@pytest.mark.parametrize("kind", ["threads", "asyncio"])
def test_a_cluster_stands_in_front_as_well(kind, sqlite_url):
    keys = [Identity("cluster", str(number)) for number in range(10)]
    with redis_cluster() as servers, contextlib.closing(servers.client()) as client:
        tiers = Tiers(kind, servers.url, sqlite_url)
        for key in keys:
            succeed(tiers, ANNA, RED, identity=key)
        assert tiers.sql == ["claim", "complete"] * 10
        answers = tiers.send([ask(BERT, RED, identity=key) for key in keys])
        assert [answer.outcome for answer in answers] == [RESULT] * 10
        assert tiers.sql == []
        assert tiers.forget_many(keys) == [True] * 10
        assert all(client.exists(entry_key(key)) for key in keys)  # marked
        tiers.close()


# --- what is wrong --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url", ["sqlite:///semel.db", "memory://", "postgresql://h/d", "other://x"]
)
def test_only_redis_stands_in_front(url):
    with pytest.raises(ConfigError, match="goes with Redis in front"):
        open_store(url, behind="memory://")
    with pytest.raises(ConfigError, match="goes with Redis in front"):
        open_async_store(url, behind="memory://")


def test_the_front_must_be_a_redis_store_of_the_right_kind():
    given = open_async_redis(NOWHERE)
    with pytest.raises(ConfigError, match="a Redis URL or RedisStore, not AsyncRedisStore"):
        TieredStore(given, "memory://")
    with pytest.raises(ConfigError, match="a Redis URL or AsyncRedisStore, not MemoryStore"):
        AsyncTieredStore(MemoryStore(), "memory://")


def test_options_go_with_a_front_that_is_given_by_url():
    with pytest.raises(ConfigError, match="'max_connections' goes with a front"):
        TieredStore(open_redis(NOWHERE), MemoryStore(), max_connections=3)
    with pytest.raises(ConfigError, match="unknown option 'colour'"):
        open_store(NOWHERE, behind="sqlite:///semel.db", colour="red")


@pytest.mark.parametrize("opener", [open_store, open_async_store])
@pytest.mark.parametrize(
    ("typed", "meant"),
    [("front_tl", "front_ttl"), ("front_timout", "front_timeout"), ("max_conections", "max_c")],
)
def test_a_mistyped_option_is_answered_with_the_one_that_was_meant(opener, typed, meant):
    with pytest.raises(ConfigError, match=f"unknown option '{typed}'.*did you mean {meant}"):
        opener(NOWHERE, behind="sqlite:///semel.db", **{typed: 5})


def test_a_mistyped_option_beside_a_store_in_front_is_answered_too():
    with pytest.raises(ConfigError, match="given by URL; did you mean front_ttl"):
        TieredStore(open_redis(NOWHERE), MemoryStore(), front_tl=5)


@pytest.mark.parametrize("opener", [open_store, open_async_store])
def test_what_decides_must_outlast_the_process(opener):
    with pytest.raises(ConfigError, match=r"must outlast the process, and memory:// does not"):
        opener(NOWHERE, behind="memory://?max_records=10")


@pytest.mark.parametrize("opener", [open_store, open_async_store])
@pytest.mark.parametrize("name", ["front_ttl", "front_timeout"])
@pytest.mark.parametrize("url", [NOWHERE, "sqlite:///semel.db"])
def test_an_option_of_tiers_without_a_store_behind_says_what_is_missing(opener, name, url):
    with pytest.raises(ConfigError, match=f"{name} goes with a store behind"):
        opener(url, **{name: 5})


@pytest.mark.parametrize("behind", [NOWHERE, open_redis(NOWHERE), open_async_redis(NOWHERE)])
def test_redis_cannot_decide(behind):
    with pytest.raises(ConfigError, match="must not be Redis"):
        open_store(NOWHERE, behind=behind)


def test_the_store_behind_must_be_of_the_right_kind():
    with pytest.raises(ConfigError, match="for threads, not AsyncMemoryStore"):
        open_store(NOWHERE, behind=AsyncMemoryStore())
    with pytest.raises(ConfigError, match="for asyncio, not MemoryStore"):
        open_async_store(NOWHERE, behind=MemoryStore())
    with pytest.raises(ConfigError, match="for threads, not object"):
        open_store(NOWHERE, behind=object())


@pytest.mark.parametrize("name", ["front_ttl", "front_timeout"])
def test_durations_are_more_than_nothing(name):
    with pytest.raises(ConfigError, match=name):
        open_store(NOWHERE, behind="sqlite:///semel.db", **{name: 0})


# --- by settings ----------------------------------------------------------------------------------


def test_settings_name_the_store_behind(tmp_path):
    (tmp_path / "semel.toml").write_text(f'url = "{NOWHERE}"\nbehind = "sqlite:///a.db"')
    assert load_settings({}, tmp_path).behind == "sqlite:///a.db"
    by_variable = load_settings({"SEMEL_BEHIND": "sqlite:///b.db"}, tmp_path)
    assert (by_variable.url, by_variable.behind) == (NOWHERE, "sqlite:///b.db")
    (tmp_path / "semel.ci.toml").write_text('url = "memory://"\nbehind = ""')
    assert load_settings({"SEMEL_ENV": "ci"}, tmp_path).behind is None
    assert load_settings({}, tmp_path, url="memory://", behind=None).behind is None


def test_production_keeps_nothing_in_memory_behind_either(tmp_path):
    with pytest.raises(ConfigError, match="must not keep its records in memory"):
        load_settings({"SEMEL_ENV": "production"}, tmp_path, url=NOWHERE, behind="memory://")
    settings = load_settings(
        {"SEMEL_ENV": "production"}, tmp_path, url=NOWHERE, behind="sqlite:///semel.db"
    )
    assert settings.behind == "sqlite:///semel.db"


async def test_engines_open_tiers_by_settings(redis_url, sqlite_url, monkeypatch):
    monkeypatch.setenv("SEMEL_URL", redis_url)
    monkeypatch.setenv("SEMEL_BEHIND", sqlite_url)
    with Idempotency() as idem:
        assert idem.execute("k", lambda: "done") == "done"
        assert isinstance(idem.internals.store, TieredStore)
    async with AsyncIdempotency() as idem:
        assert await idem.consume("k", never) is False
        assert isinstance(idem.internals.store, AsyncTieredStore)


def test_a_store_behind_another_than_redis_is_refused_by_engines(monkeypatch):
    monkeypatch.setenv("SEMEL_BEHIND", "sqlite:///semel.db")
    with pytest.raises(ConfigError, match="goes with Redis in front"):
        Idempotency("memory://")


# --- what the store behind offers --------------------------------------------------------------


def test_tiers_answer_what_the_store_behind_answers():
    assert TieredStore(NOWHERE, MemoryStore()).unsupported == frozenset()
    assert TieredStore(NOWHERE, DictStore()).unsupported == DictStore.unsupported
    with pytest.raises(ConfigError, match="DictStore does not support CountRequest"):
        TieredStore(NOWHERE, DictStore()).counts()
