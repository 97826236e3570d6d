"""The connections that a store for threads keeps, at the moment when it is closed."""

from __future__ import annotations

import gc

import pytest
import redis

from semel.errors import StoreUnavailable
from semel.stores.redis.commands import pack
from semel.stores.redis.redis_py import socket_of
from semel.stores.redis.threads import Connections, Limit

KEEPS_FRAMES = redis.__version__.startswith("5.")
"""A server before 7.2 answers an error when redis-py connects, and its traceback keeps our frames."""


def test_a_connection_that_comes_back_after_the_closing_is_closed(redis_url):
    pool = redis.ConnectionPool.from_url(redis_url)
    connections = Connections(pool, keep=True)
    taken = connections._take()
    lent = taken.connection
    assert socket_of(lent)
    connections.close()
    assert socket_of(lent)  # somebody reads a reply from it
    connections._give_back(taken)
    assert not socket_of(lent)
    assert not connections._idle
    pool.disconnect()


def test_a_connection_that_no_caller_holds_any_more_closes(redis_url):
    pool = redis.ConnectionPool.from_url(redis_url, max_connections=1)
    connections = Connections(pool, keep=True)
    taken = connections._take()
    lost = taken.connection
    del taken  # as if its thread had been interrupted between two steps
    if KEEPS_FRAMES:
        gc.collect()
    assert not socket_of(lost)
    assert connections.exchange([pack(("PING",))]) == [b"PONG"]
    connections.close()
    pool.disconnect()


@pytest.mark.skipif(KEEPS_FRAMES, reason="redis-py 5 leaves an error of its own to the collector")
def test_a_connection_on_which_the_server_answered_an_error_closes_without_the_collector(
    redis_url,
):
    pool = redis.ConnectionPool.from_url(redis_url, max_connections=1)
    connections = Connections(pool, keep=True)
    gc.disable()
    try:
        (reply,) = connections.exchange([pack(("EVALSHA", "0" * 40, 0))])
        assert isinstance(reply, redis.exceptions.NoScriptError)
        del reply
        taken = connections._idle.pop()
        lost = taken.connection
        del taken  # as if its thread had been interrupted between two steps
        assert not socket_of(lost)
    finally:
        gc.enable()
    connections.close()
    pool.disconnect()


def test_a_place_that_nobody_holds_any_more_returns():
    limit = Limit(1, 0.01, "a server")
    place = limit.take()
    with pytest.raises(StoreUnavailable, match="all 1 connections"):
        limit.take()
    del place
    place = limit.take()
    limit.give(place)
    del place
    limit.take()


def test_a_place_that_outlives_its_limit_returns_nowhere():
    limit = Limit(1, 0.01, "a server")
    place = limit.take()
    del limit
    del place
