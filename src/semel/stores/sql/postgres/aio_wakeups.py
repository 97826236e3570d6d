"""The twin of `wakeups`, for asyncio."""

from __future__ import annotations

import asyncio
import os
from functools import partial
from typing import Any, cast
from uuid import UUID

import psycopg

from semel.stores.listening import AsyncListener, AsyncWatch, OnLost, Subscriptions
from semel.stores.sql.postgres.hearsay import LISTEN, channel, read_outcome, tell
from semel.stores.sql.postgres.lending import leave_alone
from semel.stores.sql.postgres.settings import Settings


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
        """Tell what has come."""
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


class AsyncPostgresWakeups:
    """Everything that a store hears. It contains the digests of the records it listens for."""

    def __init__(self, settings: Settings | None, place: str) -> None:
        listens = settings is not None and settings.own_session
        self._new_subscriber = (
            partial(AsyncPostgresSubscriber, cast("Settings", settings)) if listens else None
        )
        self._place = place
        self._begin()

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._listener = AsyncListener(self._new_subscriber, self._place)

    def __contains__(self, digest: object) -> bool:
        return self._listener.subscriptions.is_subscribed(channel(cast("UUID", digest)))

    def watch(self, digest: UUID) -> AsyncWatch:
        """Listen for the end of the record's running attempt."""
        if self._pid != os.getpid():
            leave_alone(self._listener)  # the parent's
            self._begin()
        return AsyncWatch(self._listener, channel(digest), read_outcome)

    async def close(self) -> None:
        """End the connection."""
        await self._listener.close()
