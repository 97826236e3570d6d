"""Wake-ups from PostgreSQL for threads: one connection that listens, beside the pool.

Only a store that opens its connections itself has one: a given pool or connection is not for us
to take for long. Nor has one behind pgbouncer, which would give the session to the next caller.
"""

from __future__ import annotations

import os
from functools import partial
from typing import Any, cast
from uuid import UUID

import psycopg

from semel.stores.listening import Listener, Subscriptions, Watch
from semel.stores.sql.postgres.hearsay import LISTEN, channel, read_outcome, tell
from semel.stores.sql.postgres.lending import leave_alone
from semel.stores.sql.postgres.settings import Settings


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
        """Give the socket to wait on."""
        return self._pgconn.socket

    def subscribe(self, channel: Any) -> None:
        """Nothing to ask for: every message comes."""

    def unsubscribe(self, channel: Any) -> None:
        """Nothing was asked for."""

    def read(self, subscriptions: Subscriptions[Any]) -> None:
        """Tell what has come."""
        tell(self._pgconn, subscriptions)

    def close(self) -> None:
        """Disconnect."""
        if self._connection is not None:
            self._connection.close()


class PostgresWakeups:
    """Everything that a store hears. It contains the digests of the records it listens for."""

    def __init__(self, settings: Settings | None, place: str) -> None:
        listens = settings is not None and settings.own_session
        self._new_subscriber = (
            partial(PostgresSubscriber, cast("Settings", settings)) if listens else None
        )
        self._place = place
        self._begin()

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._listener = Listener(self._new_subscriber, self._place)

    def __contains__(self, digest: object) -> bool:
        return self._listener.subscriptions.is_subscribed(channel(cast("UUID", digest)))

    def watch(self, digest: UUID) -> Watch:
        """Listen for the end of the record's running attempt."""
        if self._pid != os.getpid():
            leave_alone(self._listener)  # the parent's
            self._begin()
        return Watch(self._listener, channel(digest), read_outcome)

    def close(self) -> None:
        """End the connection."""
        self._listener.close()
