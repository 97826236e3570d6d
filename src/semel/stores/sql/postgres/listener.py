"""Wake-ups from PostgreSQL: one connection that listens, beside the pool.

Only a store that opens its connections itself has one: a given pool or connection is not for us
to take for long. Nor has one behind pgbouncer, which would give the session to the next caller.

One channel serves all records: a message is the digest of its record.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final
from uuid import UUID

import psycopg
from psycopg.pq.abc import PGconn

from semel.stores.listening import OnLost, Subscriptions
from semel.stores.sql.postgres.settings import Settings
from semel.stores.sql.postgres.verbs import CHANNEL

LISTEN: Final = f"LISTEN {CHANNEL}"


def channel(digest: UUID) -> bytes:
    """Return the message that a record's end sends."""
    return str(digest).encode()


def tell(pgconn: PGconn, subscriptions: Subscriptions[Any]) -> None:
    """Take in what has come: each message names its record, and the others are not ours."""
    pgconn.consume_input()
    while (notice := pgconn.notifies()) is not None:
        subscriptions.received(notice.extra)


# --- for threads ------------------------------------------------------------------------------


class PostgresSubscriber:
    """One connection that listens."""

    confirms = False

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._connection: psycopg.Connection[Any] | None = None

    def open(self) -> None:
        """Connect, and listen to everything."""
        connection = psycopg.Connection.connect(self._settings.conninfo, autocommit=True)
        self._connection = connection
        connection.execute(LISTEN)
        self._pgconn = connection.pgconn

    def fileno(self) -> int:
        """Return the socket to wait on."""
        return self._pgconn.socket

    def subscribe(self, channel: Any) -> None:
        """Nothing to ask for: every message comes."""

    def unsubscribe(self, channel: Any) -> None:
        """Nothing was asked for."""

    def read(self, subscriptions: Subscriptions[Any]) -> None:
        """Return what has come."""
        tell(self._pgconn, subscriptions)

    def close(self) -> None:
        """Disconnect."""
        if self._connection is not None:
            self._connection.close()


# --- for asyncio ------------------------------------------------------------------------------


class AsyncPostgresSubscriber:
    """One connection that listens."""

    confirms = False

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._connection: psycopg.AsyncConnection[Any] | None = None
        self._socket: int | None = None

    async def open(self, subscriptions: Subscriptions[Any], on_lost: OnLost) -> None:
        """Connect, and listen to everything."""
        connection = await psycopg.AsyncConnection.connect(self._settings.conninfo, autocommit=True)
        self._connection = connection
        await connection.execute(LISTEN)
        self._pgconn = connection.pgconn
        self._socket = self._pgconn.socket  # a broken connection does not tell it any more
        asyncio.get_running_loop().add_reader(self._socket, self._read, subscriptions, on_lost)

    def subscribe(self, channel: Any) -> None:
        """Nothing to ask for: every message comes."""

    def unsubscribe(self, channel: Any) -> None:
        """Nothing was asked for."""

    def _read(self, subscriptions: Subscriptions[Any], on_lost: OnLost) -> None:
        """Return what has come."""
        try:
            tell(self._pgconn, subscriptions)
        except psycopg.OperationalError as error:
            self._read_no_more()
            on_lost(self, error)

    def _read_no_more(self) -> None:
        if self._socket is not None:
            asyncio.get_running_loop().remove_reader(self._socket)
            self._socket = None  # the number may be another connection's soon

    async def close(self) -> None:
        """Disconnect."""
        self._read_no_more()
        if self._connection is not None:
            await self._connection.close()
