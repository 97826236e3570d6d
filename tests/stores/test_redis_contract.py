"""The shared contract on every kind of Redis: one server, a cluster, Valkey."""

from __future__ import annotations

import contextlib

import pytest

from semel.stores.redis import open_async_store, open_store
from semel.testing import StoreContract
from semel.testing.contract.given import KEY
from servers.redis import redis_cluster, redis_server


@pytest.fixture(scope="module")
def valkey():
    with redis_server(valkey=True) as server:
        yield server


@pytest.fixture(scope="module")
def cluster():
    with redis_cluster() as servers:
        yield servers


def emptied(client):
    with contextlib.closing(client):
        client.flushall()


class OnRedis(StoreContract):
    @pytest.fixture
    def server(self, redis_of_this_worker):
        return redis_of_this_worker

    @pytest.fixture
    def set_clock_back(self, server, store):
        def raise_the_fence():
            # Where the fence stands in a record: see lua/record.lua.
            name, first, last = store.keys.record(KEY), 7, 13
            with contextlib.closing(server.client()) as client:
                fence = int.from_bytes(client.getrange(name, first, last)) + 600_000_000
                client.setrange(name, first, fence.to_bytes(7))

        return raise_the_fence

    @pytest.fixture
    def make_unreadable(self, server, store):
        def damage(identity):
            with contextlib.closing(server.client()) as client:
                client.setrange(store.keys.record(identity), 0, b"\xff")  # its version

        return damage


class TestRedis(OnRedis):
    @pytest.fixture
    def store(self, redis_url):
        return open_store(redis_url)


class TestAsyncRedis(OnRedis):
    @pytest.fixture
    def store(self, redis_url):
        return open_async_store(redis_url)


@pytest.mark.more(one_of=4)
class TestValkey(OnRedis):
    @pytest.fixture
    def server(self, valkey):
        return valkey

    @pytest.fixture
    def store(self, valkey):
        emptied(valkey.client())
        return open_store(valkey.url)


class TestCluster(OnRedis):
    @pytest.fixture
    def server(self, cluster):
        return cluster

    @pytest.fixture
    def store(self, cluster):
        emptied(cluster.client())
        return open_store(cluster.url)


@pytest.mark.more(one_of=4)
class TestAsyncCluster(OnRedis):
    @pytest.fixture
    def server(self, cluster):
        return cluster

    @pytest.fixture
    def store(self, cluster):
        emptied(cluster.client())
        return open_async_store(cluster.url)
