"""What an executor for threads needs of a connection, and how psycopg's gives it.

`aio_sessions` is the twin of this module.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeAlias

import psycopg
from psycopg.rows import tuple_row

from semel.stores.sql.postgres.connections import (
    CONFIGURE,
    BoundedConnection,
    is_dead,
    is_idle,
    limits,
)
from semel.stores.sql.postgres.patience import Patience
from semel.stores.sql.postgres.settings import Settings
from semel.stores.sql.verbs import Reply, Statement

Connection: TypeAlias = psycopg.Connection[Any]


class Session(Protocol):
    """A connection that is lent for one call."""

    def execute(self, statement: Statement) -> Reply:
        """Run one statement."""
        ...

    def transaction(self) -> AbstractContextManager[Any]:
        """Open a transaction; it ends with the block."""
        ...


class OwnSession(Session, Protocol):
    """A connection that belongs to our own pool."""

    idle_since: float
    seat: object
    """Its place in the pool while it is lent: a session that is lost takes none along."""

    def end_waits_at(self, deadline: float) -> None:
        """Let every wait end at this moment of the monotonic clock."""
        ...

    @property
    def dead(self) -> bool:
        """Whether the server is known to have hung up."""
        ...

    @property
    def idle(self) -> bool:
        """Whether it may be used again."""
        ...

    def close(self) -> None:
        """Close it."""
        ...


class PsycopgSession:
    """A connection of psycopg's."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def execute(self, statement: Statement) -> Reply:
        """Run one statement."""
        return execute(self._connection, statement)

    def transaction(self) -> AbstractContextManager[Any]:
        """Open a transaction; it ends with the block."""
        return self._connection.transaction()


class OwnPsycopgSession(PsycopgSession):
    """One that we opened."""

    idle_since = float("inf")
    seat: object = None

    def __init__(self, connection: BoundedConnection) -> None:
        super().__init__(connection)
        self.bounded = connection

    def end_waits_at(self, deadline: float) -> None:
        """Let every wait end at this moment of the monotonic clock."""
        self.bounded.deadline = deadline

    @property
    def dead(self) -> bool:
        """Whether the server is known to have hung up."""
        return is_dead(self.bounded)

    @property
    def idle(self) -> bool:
        """Whether it may be used again."""
        return is_idle(self.bounded)

    def close(self) -> None:
        """Close it."""
        self.bounded.close()


def connect(settings: Settings, patience: Patience) -> OwnPsycopgSession:
    """Open a connection, with settings of our own."""
    connection = BoundedConnection.connect_until(
        patience.deadline,
        settings.conninfo,
        autocommit=True,
        prepare_threshold=settings.prepare_threshold,
        client_encoding="utf8",  # SQL_ASCII, that of a database, gives bytes for texts
    )
    connection.deadline = patience.deadline
    if settings.own_session:
        try:
            psycopg.RawCursor(connection).execute(CONFIGURE, limits(settings.timeout))
        except BaseException:
            connection.close()
            raise
    return OwnPsycopgSession(connection)


def execute(connection: Connection, statement: Statement) -> Reply:
    """Run one statement."""
    with psycopg.RawCursor(connection, row_factory=tuple_row) as cursor:
        cursor.execute(statement.sql.encode(), statement.parameters, binary=True)
        rows = [] if cursor.description is None else cursor.fetchall()
        return Reply(rows, cursor.rowcount)
