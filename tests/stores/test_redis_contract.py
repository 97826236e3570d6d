"""The shared contract on every kind of Redis: one server, a cluster, Valkey."""

from __future__ import annotations

import contextlib

import pytest

from semel.stores.redis import open_async_store, open_store
from semel.testing import StoreContract
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


class TestRedis(StoreContract):
    @pytest.fixture
    def store(self, redis_url):
        return open_store(redis_url)


class TestAsyncRedis(StoreContract):
    @pytest.fixture
    def store(self, redis_url):
        return open_async_store(redis_url)


class TestValkey(StoreContract):
    @pytest.fixture
    def store(self, valkey):
        emptied(valkey.client())
        return open_store(valkey.url)


class TestCluster(StoreContract):
    @pytest.fixture
    def store(self, cluster):
        emptied(cluster.client())
        return open_store(cluster.url)


class TestAsyncCluster(StoreContract):
    @pytest.fixture
    def store(self, cluster):
        emptied(cluster.client())
        return open_async_store(cluster.url)
