"""The connections that a store for threads keeps, at the moment when it is closed."""

from __future__ import annotations

import gc

import pytest
import redis

from semel.errors import StoreUnavailable
from semel.stores.redis.commands import packed
from semel.stores.redis.redis_py import socket_of
from semel.stores.redis.threads import Gate, Wires

KEEPS_FRAMES = redis.__version__.startswith("5.")
"""A server before 7.2 answers an error when redis-py connects, and its traceback keeps our frames."""


def test_a_connection_that_comes_back_after_the_closing_is_closed(redis_url):
    pool = redis.ConnectionPool.from_url(redis_url)
    wires = Wires(pool, keep=True)
    wire = wires._take()
    lent = wire.connection
    assert socket_of(lent)
    wires.close()
    assert socket_of(lent)  # somebody reads a reply from it
    wires._give_back(wire)
    assert not socket_of(lent)
    assert not wires._idle
    pool.disconnect()


def test_a_connection_that_nobody_holds_any_more_goes_back_to_the_pool_closed(redis_url):
    pool = redis.ConnectionPool.from_url(redis_url, max_connections=1)
    wires = Wires(pool, keep=True)
    wire = wires._take()
    lost = wire.connection
    del wire  # as if its thread had been interrupted between two steps
    if KEEPS_FRAMES:
        gc.collect()
    assert not socket_of(lost)
    assert wires.exchange([packed(("PING",))]) == [b"PONG"]
    wires.close()
    pool.disconnect()


@pytest.mark.skipif(KEEPS_FRAMES, reason="redis-py 5 leaves an error of its own to the collector")
def test_a_connection_on_which_the_server_answered_an_error_goes_back_without_the_collector(
    redis_url,
):
    pool = redis.ConnectionPool.from_url(redis_url, max_connections=1)
    wires = Wires(pool, keep=True)
    gc.disable()
    try:
        (reply,) = wires.exchange([packed(("EVALSHA", "0" * 40, 0))])
        assert isinstance(reply, redis.exceptions.NoScriptError)
        del reply
        wires._idle.pop()  # as if its thread had been interrupted between two steps
        assert wires.exchange([packed(("PING",))]) == [b"PONG"]
    finally:
        gc.enable()
    wires.close()
    pool.disconnect()


def test_a_place_that_nobody_holds_any_more_returns():
    gate = Gate(1, 0.01, "a server")
    place = gate.take()
    with pytest.raises(StoreUnavailable, match="all 1 connections"):
        gate.take()
    del place
    place = gate.take()
    gate.give(place)
    del place
    gate.take()


def test_a_place_that_outlives_its_gate_returns_nowhere():
    gate = Gate(1, 0.01, "a server")
    place = gate.take()
    del gate
    del place
