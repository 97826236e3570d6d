"""Where a store for threads gets its connections: a pool of its own, or the application's.

Whoever opened something closes it. What is lent out is free of transactions and commits each
statement by itself. `aio_sources` is the twin of this module.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol, TypeAlias

import psycopg
from psycopg.pq import TransactionStatus
from psycopg_pool import ConnectionPool

from semel.errors import StoreUnavailable
from semel.stores.forking import follow_forks
from semel.stores.sql.postgres.connections import (
    CONFIGURE,
    BoundedConnection,
    is_dead,
    limits,
    opening,
)
from semel.stores.sql.postgres.lending import (
    check_idle,
    check_process,
    leave_alone,
)
from semel.stores.sql.postgres.patience import BECAME_REPLICA, Patience
from semel.stores.sql.postgres.settings import Settings

Connection: TypeAlias = psycopg.Connection[Any]
Pool: TypeAlias = ConnectionPool[Any]


class Source(Protocol):
    """What an executor asks for connections."""

    place: str
    """The name of the database, for error messages."""
    refused: str
    """What the server said when a connection was last tried in vain."""

    def first(self, patience: Patience) -> AbstractContextManager[Connection]:
        """Lend the connection that finds out whether everything is as it should be."""
        ...

    def lend(self, patience: Patience) -> AbstractContextManager[Connection]:
        """Lend a connection for one call."""
        ...

    def close(self) -> None:
        """Close what was opened here."""
        ...


class OwnPool:
    """A pool that is opened by the first call, and again by the first call after a fork."""

    def __init__(self, settings: Settings, timeout: float) -> None:
        self.place = settings.place
        self.refused = ""
        self._settings = settings
        self._timeout = timeout
        self._pool: Pool | None = None
        self._closed = False
        self._lock = threading.Lock()
        follow_forks(self)

    @contextmanager
    def first(self, patience: Patience) -> Iterator[Connection]:
        """Connect without the pool, which would not tell at once why it cannot."""
        connection: BoundedConnection = BoundedConnection.connect(
            self._settings.conninfo, **opening(self._settings, self._note)
        )
        try:
            connection.deadline = patience.deadline
            self._configure(connection)
            yield connection
        finally:
            connection.close()

    @contextmanager
    def lend(self, patience: Patience) -> Iterator[Connection]:
        """Lend a connection that was not hung up meanwhile, as far as one can know."""
        pool = self._opened()
        while True:
            connection = pool.getconn(timeout=patience.left)
            if not is_dead(connection):
                break
            connection.close()
            pool.putconn(connection)
        try:
            connection.deadline = patience.deadline
            yield connection
        except BECAME_REPLICA:
            connection.close()
            raise
        finally:
            if connection.info.transaction_status is not TransactionStatus.IDLE:
                connection.close()  # an answer may still be on its way, and would meet a stranger
            pool.putconn(connection)

    def close(self) -> None:
        """Close the pool for good."""
        with self._lock:
            self._closed = True
            if self._pool is not None:
                self._pool.close()

    def _opened(self) -> Pool:
        with self._lock:
            if self._closed:
                raise StoreUnavailable(f"the store on {self.place} was closed")
            if self._pool is None:
                self._pool = ConnectionPool(
                    self._settings.conninfo,
                    connection_class=BoundedConnection,
                    kwargs=opening(self._settings, self._note),
                    configure=self._configure,
                    min_size=self._settings.min_size,
                    max_size=self._settings.max_size,
                    # The next caller makes it try again at once; its own pauses get long.
                    reconnect_timeout=self._timeout,
                    open=True,
                )
            return self._pool

    def _configure(self, connection: Connection) -> None:
        self.refused = ""
        if self._settings.own_session:
            psycopg.RawCursor(connection).execute(CONFIGURE, limits(self._timeout))

    def _note(self, error: psycopg.Error) -> None:
        self.refused = str(error)

    def before_fork(self) -> None:
        """Let nobody be half-way through opening."""
        self._lock.acquire()

    def after_fork_in_parent(self) -> None:
        """Go on."""
        self._lock.release()

    def after_fork_in_child(self) -> None:
        """Open another pool: this one's sockets are the parent's, and its threads are not here."""
        self._lock = threading.Lock()
        if self._pool is not None:
            leave_alone(self._pool)
        self._pool = None


class GivenPool:
    """A pool that the application opened, and will close."""

    place = "the PostgreSQL database of the given pool"
    refused = ""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._opened_by = os.getpid()

    @contextmanager
    def lend(self, patience: Patience) -> Iterator[Connection]:
        """Borrow a connection, and give it back as it was."""
        check_process(self._opened_by)
        connection = self._pool.getconn(timeout=patience.left)
        try:
            with committing(connection):
                yield connection
        finally:
            self._pool.putconn(connection)

    first = lend

    def close(self) -> None:
        """Leave it open."""


class GivenConnection:
    """A connection that the application opened, and will close."""

    place = "the PostgreSQL database of the given connection"
    refused = ""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._opened_by = os.getpid()
        self._lock = threading.Lock()

    @contextmanager
    def lend(self, patience: Patience) -> Iterator[Connection]:
        """Use it, one call at a time, unless the application has a transaction open on it."""
        check_process(self._opened_by)
        if not self._lock.acquire(timeout=patience.left):
            raise StoreUnavailable("the given connection was busy with other calls all the time")
        try:
            with committing(self._connection):
                yield self._connection
        finally:
            self._lock.release()

    first = lend

    def close(self) -> None:
        """Leave it open."""


@contextmanager
def committing(connection: Connection) -> Iterator[None]:
    """Let each statement commit by itself for a while."""
    check_idle(connection)
    before = connection.autocommit
    connection.autocommit = True
    try:
        yield
    finally:
        if not connection.closed:
            connection.autocommit = before
