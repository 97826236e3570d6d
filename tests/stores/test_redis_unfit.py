"""Servers that answer, but not now or not this: still loading, turned replica, command forbidden."""

from __future__ import annotations

import os
import threading

import pytest

from semel.core.records import Claimed
from semel.errors import StoreError, StoreUnavailable
from semel.testing import StoreDriver
from servers.redis import errors_answered, free_port, redis_sentinel, redis_server, wait_until
from stores.redis_given import IDENTITY, ask, open_async_store, open_store

KINDS = {"threads": open_store, "asyncio": open_async_store}


@pytest.fixture(scope="module")
def server():
    with redis_server(args=("--enable-debug-command", "yes")) as running:
        yield running


@pytest.fixture
def client(server):
    with server.client() as client:
        client.flushall()
        yield client
        client.replicaof("NO", "ONE")


@pytest.fixture(params=KINDS)
def open_on(request):
    """Open a store of either kind, driven by plain calls."""
    drivers = []

    def opening(url: str, **options) -> StoreDriver:
        drivers.append(StoreDriver(KINDS[request.param](url, **options)))
        return drivers[-1]

    yield opening
    for driver in drivers:
        driver.close()


def test_a_server_that_is_still_loading_is_asked_until_it_is_ready(server, client, open_on):
    store = open_on(server.url, timeout=60)
    assert store.get(IDENTITY) is None  # connected before it loads
    for number in range(200):
        client.set(f"ballast-{number}", os.urandom(2000))
    client.config_set("loading-process-events-interval-bytes", 1024)
    client.config_set("key-load-delay", 50_000)  # microseconds for each key

    def load_again():
        with server.client() as other:
            other.execute_command("DEBUG", "RELOAD")

    reload, answers = threading.Thread(target=load_again), []
    asking = threading.Thread(target=lambda: answers.append(store.claim(ask())))
    before = errors_answered(client, "LOADING")
    reload.start()
    wait_until(lambda: client.info("persistence")["loading"] == 1, "the loading to begin")
    asking.start()
    wait_until(
        lambda: errors_answered(client, "LOADING") > before + 1, "the claim to be sent again"
    )
    client.config_set("key-load-delay", 0)
    for thread in (reload, asking):
        thread.join()
    assert isinstance(answers[0], Claimed)


def test_a_server_that_turns_replica_is_told_and_found_again_when_it_is_none(
    server, client, open_on
):
    store = open_on(server.url)
    assert store.get(IDENTITY) is None
    client.replicaof("127.0.0.1", free_port())
    with pytest.raises(StoreUnavailable, match="is a replica"):
        store.claim(ask())
    client.replicaof("NO", "ONE")
    assert isinstance(store.claim(ask()), Claimed)


def test_a_user_who_may_not_list_is_told(server, client, open_on):
    client.acl_setuser(
        "clerk", enabled=True, passwords=["+key"], keys=["*"], commands=["+@all", "-scan"]
    )
    store = open_on(f"redis://clerk:key@127.0.0.1:{server.port}/0")
    assert isinstance(store.claim(ask()), Claimed)
    with pytest.raises(StoreError, match="scan"):
        store.scan()


def test_behind_a_sentinel_a_primary_that_turns_replica_is_left_until_there_is_one(open_on):
    with redis_sentinel() as sentinel, sentinel.primary.client() as primary:
        store = open_on(sentinel.url, timeout=60)
        assert store.get(IDENTITY) is None
        primary.replicaof("127.0.0.1", sentinel.replica.port)
        answers = []
        asking = threading.Thread(target=lambda: answers.append(store.claim(ask())))
        asking.start()
        wait_until(lambda: errors_answered(primary, "READONLY") > 0, "the claim to be refused")
        primary.replicaof("NO", "ONE")
        asking.join()
        assert isinstance(answers[0], Claimed)
