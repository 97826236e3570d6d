"""Connections as the store needs them: no wait without an end, and settings of our own.

A server that is frozen, or cut off, sends nothing, not even an error; only the client can end such
a wait. psycopg waits in slices and tells its generators when one has passed: there the deadline of
the call is looked at.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final, TypeVar

import psycopg
from psycopg.abc import PQGen
from psycopg.waiting import Ready

from semel.stores.sql.postgres.errors import TimeIsUp
from semel.stores.sql.postgres.settings import Settings

V = TypeVar("V")

LOCK_SHARE, STATEMENT_SHARE = 0.8, 0.9
"""Which part of the call's time each wait of the server may take. Each ends before the next one
out (the last is ours), so that the error names the cause."""

CONFIGURE: Final = (
    "SELECT set_config('lock_timeout', $1, false), set_config('statement_timeout', $2, false), "
    "set_config('default_transaction_isolation', 'read committed', false)"
)

Refused = Callable[[psycopg.Error], None]


class BoundedConnection(psycopg.Connection[Any]):
    """A connection for threads, whose waits end at `deadline` (of the monotonic clock)."""

    deadline = float("inf")

    @classmethod
    def connect(cls, conninfo: str = "", **options: Any) -> Any:
        """Connect, or tell `refused` why not: a pool that tries by itself would only log it."""
        refused: Refused = options.pop("refused")
        try:
            return super().connect(conninfo, **options)
        except psycopg.Error as error:
            refused(error)
            raise

    def wait(self, gen: PQGen[V], *args: Any, **options: Any) -> V:
        """See the base class."""
        return super().wait(_bounded(gen, self), *args, **options)


class AsyncBoundedConnection(psycopg.AsyncConnection[Any]):
    """A connection for asyncio, whose waits end at `deadline` (of the monotonic clock)."""

    deadline = float("inf")

    @classmethod
    async def connect(cls, conninfo: str = "", **options: Any) -> Any:
        """Connect, or tell `refused` why not: a pool that tries by itself would only log it."""
        refused: Refused = options.pop("refused")
        try:
            return await super().connect(conninfo, **options)
        except psycopg.Error as error:
            refused(error)
            raise

    async def wait(self, gen: PQGen[V], *args: Any, **options: Any) -> V:
        """See the base class."""
        return await super().wait(_bounded(gen, self), *args, **options)


def _bounded(gen: PQGen[V], connection: BoundedConnection | AsyncBoundedConnection) -> PQGen[V]:
    try:
        wanted = next(gen)
        while True:
            ready = yield wanted
            if ready == Ready.NONE and time.monotonic() >= connection.deadline:
                raise TimeIsUp("the server has not answered")
            wanted = gen.send(ready)
    except StopIteration as end:
        result: V = end.value
        return result


def is_dead(connection: psycopg.Connection[Any] | psycopg.AsyncConnection[Any]) -> bool:
    """Whether the server is known to have hung up, asked without sending anything."""
    try:
        connection.pgconn.consume_input()
    except psycopg.OperationalError:
        return True
    return connection.closed


def opening(settings: Settings, refused: Refused) -> dict[str, Any]:
    """List the arguments that connections are made with."""
    return {
        "autocommit": True,
        "prepare_threshold": settings.prepare_threshold,
        "refused": refused,
    }


def limits(timeout: float) -> tuple[str, str]:
    """Give `CONFIGURE` its values."""
    return f"{timeout * LOCK_SHARE:.3f}s", f"{timeout * STATEMENT_SHARE:.3f}s"
