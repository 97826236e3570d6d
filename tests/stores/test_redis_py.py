"""What semel takes from the inside of redis-py, and how its versions differ."""

from __future__ import annotations

import asyncio
import contextlib
import pkgutil
from collections import deque
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

import pytest
import redis
import redis.asyncio
from redis import exceptions as driver

from semel import AsyncIdempotency, Idempotency
from semel.core.records import Identity
from semel.errors import ConfigError
from semel.stores.redis import AsyncRedisStore, RedisStore, redis_py, threads
from semel.stores.redis.cluster import AsyncClusterTransport, ClusterTransport

ANYWHERE = "redis://127.0.0.1:1"


@pytest.fixture(autouse=True)
def looked_up_anew():
    redis_py.check.cache_clear()
    yield
    redis_py.check.cache_clear()


def opened_in_every_way():
    yield lambda: Idempotency(ANYWHERE)
    yield lambda: AsyncIdempotency(ANYWHERE)
    yield lambda: RedisStore(redis.Redis())
    yield lambda: AsyncRedisStore(redis.asyncio.Redis())


@pytest.mark.parametrize("name", redis_py._NAMES)
def test_a_method_that_redis_py_has_no_more_is_named_when_a_store_is_opened(name, monkeypatch):
    owner, _, attribute = name.rpartition(".")
    for kind in pkgutil.resolve_name(owner).__mro__:
        if attribute in vars(kind):
            monkeypatch.delattr(kind, attribute)
    message = f"redis {version('redis')} has no {name.replace(':', '.')}, which semel needs"
    for opening in opened_in_every_way():
        with pytest.raises(ConfigError) as refused:
            opening()
        assert str(refused.value).startswith(message)


@pytest.mark.parametrize(
    ("name", "attribute"),
    [(name, each) for name, attributes in redis_py._ATTRIBUTES for each in attributes],
)
def test_an_attribute_that_redis_py_has_no_more_is_named_too(name, attribute, monkeypatch):
    whole = pkgutil.resolve_name(name)

    class Connection(whole):
        def __init__(self, **options):
            super().__init__(**options)
            delattr(self, attribute)

        def __del__(self):
            pass  # redis-py's own would miss it

    module, _, kind = name.partition(":")
    monkeypatch.setattr(pkgutil.resolve_name(module), kind, Connection)
    for opening in opened_in_every_way():
        with pytest.raises(ConfigError, match=rf"redis .* has no .*Connection\.{attribute}, which"):
            opening()


def test_a_module_that_redis_py_has_no_more_is_named(monkeypatch):
    monkeypatch.setattr(redis_py, "_NAMES", ("redis.gone.away:Thing",))
    with pytest.raises(ConfigError, match=r"redis .* has no redis\.gone\.away\.Thing, which"):
        Idempotency(ANYWHERE)


def test_nothing_is_looked_up_twice(monkeypatch):
    Idempotency(ANYWHERE).close()
    monkeypatch.setattr(redis_py, "_NAMES", ("redis.gone.away:Thing",))
    Idempotency(ANYWHERE).close()


# --- what a server answers ---------------------------------------------------------------------


@pytest.mark.parametrize("code", redis_py._ERRORS)
def test_an_error_of_the_server_has_the_class_that_redis_py_gives_it(code):
    rest = "1 127.0.0.1:7000" if code in {"ASK", "MOVED"} else "and why"
    error = redis_py.reply_error(f"{code} {rest}")
    assert type(error) is redis_py._ERRORS[code]
    assert str(error) == rest


def test_other_errors_of_the_server_keep_their_words():
    assert type(redis_py.reply_error("ERR max number of clients reached")) is driver.ConnectionError
    other = redis_py.reply_error("BUSY Redis is busy running a script")
    assert type(other) is driver.ResponseError
    assert str(other) == "BUSY Redis is busy running a script"


def test_an_error_of_a_cluster_gets_its_class_where_redis_py_knows_it_only_in_a_clusters_client():
    moved = redis_py.known_error(driver.ResponseError("MOVED 12 127.0.0.1:7001"))
    assert isinstance(moved, driver.MovedError)
    assert (moved.host, moved.port) == ("127.0.0.1", 7001)
    known = driver.NoScriptError("no such script")
    assert redis_py.known_error(known) is known


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (driver.MaxConnectionsError(), True),
        (driver.ConnectionError("Too many connections"), True),
        (driver.ConnectionError("refused"), False),
        (driver.BusyLoadingError("Too many connections"), False),
    ],
)
def test_a_pool_without_a_connection_is_recognised_in_every_version(error, expected):
    assert redis_py.pool_is_empty(error) is expected


# --- versions that are not installed here ------------------------------------------------------


def test_an_older_pool_is_told_a_command(monkeypatch):
    monkeypatch.setattr(redis_py, "_FOR_A_POOL", ("",))
    pool = SimpleNamespace(get_connection=lambda command: f"for {command!r}")
    assert redis_py.take_connection(pool) == "for ''"


@pytest.mark.parametrize("name", ["aclose", "disconnect"])
def test_a_pool_is_closed_by_the_name_that_its_version_has(name):
    closed = []

    async def closing():
        closed.append(name)

    asyncio.run(redis_py.close_pool(SimpleNamespace(**{name: closing})))
    assert closed == [name]


def test_a_connection_goes_back_to_a_node_of_every_version():
    given_back = []
    redis_py.give_back_to_node(SimpleNamespace(release=given_back.append), "one")
    older = SimpleNamespace(_free=deque())
    redis_py.give_back_to_node(older, "another")
    assert (given_back, list(older._free)) == (["one"], ["another"])


@pytest.mark.parametrize("host", ["10.0.0.1", b"10.0.0.1"])
def test_the_address_of_a_primary_may_be_forced_where_redis_py_can(host, monkeypatch):
    manager = SimpleNamespace(_force_master_ip=None)
    monkeypatch.setattr(redis_py, "_MAY_FORCE", True)
    assert redis_py.primary_address(manager, (host, 6379)) == ("10.0.0.1", 6379)
    manager._force_master_ip = "127.0.0.1"
    assert redis_py.primary_address(manager, (host, 6379)) == ("127.0.0.1", 6379)
    monkeypatch.setattr(redis_py, "_MAY_FORCE", False)
    assert redis_py.primary_address(manager, (host, 6379)) == ("10.0.0.1", 6379)


# --- the map of a cluster ----------------------------------------------------------------------


class ReadMeanwhile(contextlib.AbstractContextManager, contextlib.AbstractAsyncContextManager):
    """A lock that is had only after somebody else has read the map."""

    def __init__(self, transport):
        self.transport = transport

    def __enter__(self):
        self.transport._maps_read += 1

    def __exit__(self, *_):
        pass

    async def __aenter__(self):
        self.transport._maps_read += 1

    async def __aexit__(self, *_):
        pass


async def test_a_map_that_somebody_has_read_meanwhile_is_not_read_again():
    client = SimpleNamespace(nodes_manager=None)  # to read it would be an error
    plain = ClusterTransport(lambda: client, "here", 5.0)
    plain._reading_map = ReadMeanwhile(plain)
    plain._read_map(None)
    asynchronous = AsyncClusterTransport(lambda: client, "here", 5.0)
    asynchronous._reading_map = ReadMeanwhile(asynchronous)
    await asynchronous._read_map(None)
    assert plain._maps_read == asynchronous._maps_read == 1


def test_an_application_keeps_its_connections_after_errors_and_pipelines(redis_url):
    with contextlib.closing(redis.Redis.from_url(redis_url)) as client:
        client.ping()
        store = RedisStore(client)  # from before the store: connected once more, and then kept
        assert store.get(Identity("s", "k")) is None
        [connection] = client.connection_pool._available_connections
        socket = redis_py.socket_of(connection)
        assert store.get(Identity("s", "k")) is None
        client.connection_pool.disconnect()
        other = client.connection_pool.make_connection()
        client.connection_pool._available_connections[:] = [other]
        with pytest.raises(redis.ResponseError):
            client.execute_command("NONSENSE")
        kept = redis_py.socket_of(other)
        assert kept is not socket
        client.pipeline().get("a").get("b").execute()
        client.ping()
        assert redis_py.socket_of(other) is kept
        other.send_command("PING")  # its reply is not read
        client.ping()
        assert redis_py.socket_of(other) is not kept


async def test_so_does_one_with_tasks(redis_url):
    client = redis.asyncio.Redis.from_url(redis_url)
    await client.ping()
    store = AsyncRedisStore(client)
    assert await store.get(Identity("s", "k")) is None  # on the one from before the store
    with pytest.raises(redis.ResponseError):
        await client.execute_command("NONSENSE")
    [connection] = client.connection_pool._available_connections
    writer = connection._writer
    await client.ping()
    assert connection._writer is writer
    await connection.send_command("PING")  # its reply is not read
    await client.ping()
    assert connection._writer is not writer
    await store.close()
    await client.connection_pool.disconnect()


def test_an_application_that_listens_keeps_its_connection_and_its_messages(redis_url):
    with contextlib.closing(redis.Redis.from_url(redis_url)) as client:
        RedisStore(client)
        listening = client.pubsub()
        listening.subscribe("a")
        socket = redis_py.socket_of(listening.connection)
        listening.subscribe("b")  # before the first reply is read
        messages = listening.listen()
        assert [next(messages)["type"] for _ in "ab"] == ["subscribe"] * 2
        assert redis_py.socket_of(listening.connection) is socket
        listening.close()


async def test_so_does_one_that_listens_with_tasks(redis_url):
    client = redis.asyncio.Redis.from_url(redis_url)
    store = AsyncRedisStore(client)
    listening = client.pubsub()
    await listening.subscribe("a")
    writer = listening.connection._writer
    await listening.subscribe("b")
    assert [(await listening.parse_response())[0] for _ in "ab"] == [b"subscribe"] * 2
    assert listening.connection._writer is writer
    await listening.aclose()
    await store.close()
    await client.connection_pool.disconnect()


def test_a_connection_that_cannot_be_made_ready_goes_back_to_its_pool(redis_of_this_worker):
    class Older(redis.Connection):
        """What an application's pool made before the store had it."""

        def connect(self) -> None:
            if connects:
                raise connects.pop()
            super().connect()

    connects: list[Exception] = []
    with contextlib.closing(redis_of_this_worker.client()) as client:
        pool = client.connection_pool
        older = Older(**pool.connection_kwargs)
        pool._available_connections.append(older)
        pool._created_connections += 1
        older.connect()

        def first_take(*_: Any) -> Any:
            connects.append(redis.ConnectionError("not now"))
            pool._in_use_connections.add(pool._available_connections.pop())
            return older

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pool, "get_connection", first_take)
            with pytest.raises(redis.ConnectionError):
                threads.Connection(pool, lent=True)
        assert pool._available_connections == [older]
        assert redis_py.socket_of(older) is None
