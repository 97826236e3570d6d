"""The connections that a store for threads keeps, at the moment when it is closed."""

from __future__ import annotations

import redis

from semel.stores.redis.wires import Wires


def test_a_connection_that_comes_back_after_the_closing_is_closed(redis_url):
    pool = redis.ConnectionPool.from_url(redis_url)
    wires = Wires(pool, keep=True)
    lent = wires._take()
    assert lent.is_connected
    wires.close()
    assert lent.is_connected  # somebody reads a reply from it
    wires._give_back(lent)
    assert not lent.is_connected
    assert not wires._idle
    pool.close()
