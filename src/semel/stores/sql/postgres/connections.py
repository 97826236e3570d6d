"""Connections as the store needs them: no wait without an end, and settings of our own.

A server that is frozen, or cut off, sends nothing, not even an error; only the client can end such
a wait. psycopg waits in slices and tells its generators when one has passed: there the deadline of
the call is looked at.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Generator
from math import ceil
from typing import Any, Final, Protocol, Self, TypeVar

import psycopg
from psycopg.abc import PQGen, PQGenConn
from psycopg.pq import TransactionStatus
from psycopg.waiting import Ready

from semel.core.optional import inside
from semel.stores.sql.postgres.errors import TimeIsUp

R = TypeVar("R")
V = TypeVar("V")
Y = TypeVar("Y")

LOCK_SHARE, STATEMENT_SHARE = 0.8, 0.9
"""Which part of the call's time each wait of the server may take. Each ends before the next one
out (the last is ours), so that the error names the cause."""

BATCH_LOCK_SHARE: Final = 0.1
"""Less for a batch, so that one member's lock does not make all the others wait."""

MOST_IDLE: Final = 300.0
"""Seconds after which an unused connection is one too many."""

MOMENT: Final = 0.05
"""Seconds for which a connection that answered is taken to be alive."""

CONFIGURE: Final = (
    "SELECT set_config('lock_timeout', $1, false), set_config('statement_timeout', $2, false), "
    "set_config('default_transaction_isolation', 'read committed', false), "
    "set_config('enable_seqscan', 'off', false)"
)
"""The last one because every statement has its index, and its plan is kept: made while the table is
small, it would read all of it for each batch, until statistics are taken of what it has become.
Only `counts`, which has to read everything, takes half as long again by an index."""


class _Limit(Protocol):
    deadline: float
    """Of the monotonic clock."""


class _Connecting(threading.local):
    """How long this thread may wait for the connection that psycopg makes for it."""

    deadline = float("inf")


_connecting: Final = _Connecting()

# Overridden below: without it a connection that is being opened would wait without an end.
inside("psycopg", "psycopg:Connection._connect_gen")


class BoundedConnection(psycopg.Connection[Any]):
    """A connection for threads, whose waits end at `deadline` (of the monotonic clock)."""

    deadline = float("inf")
    idle_since = float("inf")

    @classmethod
    def connect_until(cls, deadline: float, conninfo: str, **options: Any) -> Self:
        """Connect; libpq's own limit counts whole seconds, of which it takes two at least."""
        _connecting.deadline = deadline
        try:
            return cls.connect(conninfo, **options)
        finally:
            _connecting.deadline = float("inf")

    @classmethod
    def _connect_gen(cls, conninfo: str = "", **options: Any) -> PQGenConn[Self]:
        # psycopg 3.2 has an option here (timeout), 3.3 has none.
        return _bounded(super()._connect_gen(conninfo, **options), _connecting)

    def wait(self, gen: PQGen[V], *args: Any, **options: Any) -> V:
        """See the base class."""
        return super().wait(_bounded(gen, self), *args, **options)


class AsyncBoundedConnection(psycopg.AsyncConnection[Any]):
    """A connection for asyncio, whose waits end at `deadline` (of the monotonic clock)."""

    deadline = float("inf")
    idle_since = float("inf")

    async def wait(self, gen: PQGen[V], *args: Any, **options: Any) -> V:
        """See the base class."""
        return await super().wait(_bounded(gen, self), *args, **options)


def _bounded(gen: Generator[Y, R, V], limit: _Limit) -> Generator[Y, R, V]:
    try:
        wanted = next(gen)
        while True:
            ready = yield wanted
            if ready == Ready.NONE and time.monotonic() >= limit.deadline:
                raise TimeIsUp("the server has not answered")
            wanted = gen.send(ready)
    except StopIteration as end:
        result: V = end.value
        return result


def is_dead(connection: BoundedConnection | AsyncBoundedConnection) -> bool:
    """Whether the server is known to have hung up, asked without sending anything."""
    try:
        connection.pgconn.consume_input()  # its last words
        connection.pgconn.consume_input()  # the end
    except psycopg.OperationalError:
        return True
    return connection.closed


def is_idle(connection: BoundedConnection | AsyncBoundedConnection) -> bool:
    """Whether it may be used again; where an answer may still come, it would meet a stranger."""
    # Not by `info`, which makes an object for the answer and one for the question.
    return connection.pgconn.transaction_status == TransactionStatus.IDLE


def limits(timeout: float) -> tuple[str, str]:
    """Give `CONFIGURE` its values."""
    # Never 0, which means no limit at all.
    return f"{ceil(timeout * LOCK_SHARE * 1000)}ms", f"{ceil(timeout * STATEMENT_SHARE * 1000)}ms"
