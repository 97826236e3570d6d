# Generated from stores/sql/postgres/aio_pool.py by `make generate`: change that file instead.
"""Where a store for threads gets its connections: a pool of its own, or the application's.

The code that opened something closes it. A connection that is lent is free of transactions and
commits each statement by itself. Sessions raise psycopg's errors, whatever their driver is:
`errors` knows only those.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from queue import Empty
from typing import Any, Final, Protocol, TypeAlias

import psycopg
from psycopg_pool import ConnectionPool

from semel.errors import StoreUnavailable
from semel.stores.forking import Slots, follow_forks
from semel.stores.sql.errors import Deadline
from semel.stores.sql.postgres.errors import BECAME_REPLICA
from semel.stores.sql.postgres.psycopg_sessions import (
    Connection,
    PsycopgSession,
    check_idle,
    check_process,
    leave_alone,
)
from semel.stores.sql.postgres.settings import Settings
from semel.stores.sql.verbs import Reply, Statement

MOST_IDLE: Final = 300.0
"""Seconds after which an unused connection is one too many."""

MOMENT: Final = 0.05
"""Seconds for which a connection that answered is taken to be alive; if it died since, the
statement is sent again."""


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
    slot: object
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


class Source(Protocol):
    """What an executor asks for connections."""

    place: str
    """The name of the database, for error messages."""

    def lend(self, deadline: Deadline) -> AbstractContextManager[Session]:
        """Lend a connection for one call."""
        ...

    def close(self) -> None:
        """Close what was opened here."""
        ...


Connect: TypeAlias = Callable[[Settings, Deadline], OwnSession]
"""How a connection is opened, for a call with this deadline."""


class OwnPool:
    """Connections that are opened when they are needed, and kept for the next call.

    Not psycopg_pool's: that connects in the background, so that a caller does not learn why it
    cannot. Its workers do not outlive a fork, and keep an event loop that is torn down from ending.
    """

    def __init__(self, settings: Settings, connect: Connect, spare: OwnPool | None = None) -> None:
        """`spare` lends an idle connection when this pool cannot open one of its own."""
        self.place = settings.place
        self.spare = spare
        self._settings = settings
        self._connect = connect
        self._closed = False
        self._start()
        follow_forks(self)

    def _start(self) -> None:
        self._slots = Slots(self._settings.max_size)
        self._idle: deque[OwnSession] = deque()
        """The one that was used last is used next, so that the others become old."""

    def lend(self, deadline: Deadline) -> Loan:
        """Lend a connection that was not hung up meanwhile, as far as one can know."""
        return Loan(self, deadline)

    def take(self, deadline: Deadline) -> OwnSession:
        """Take a connection out, or open one."""
        if self._closed:
            raise StoreUnavailable(f"the store on {self.place} was closed")
        try:
            slot = self._slots.get(timeout=deadline.left)
        except Empty:
            raise StoreUnavailable(
                f"all {self._settings.max_size} connections to {self.place} stayed in use; nothing "
                "was sent. Raise max_size, or look for what holds them"
            ) from None
        try:
            session = self._take() or self._connect(self._settings, deadline)
        except BaseException:
            self._slots.give(slot)
            raise
        session.slot = slot
        session.end_waits_at(deadline.at)
        return session

    def take_open(self, deadline: Deadline) -> OwnSession | None:
        """Take a connection out, if one is open that nobody uses."""
        try:
            slot = self._slots.get(block=False)
        except Empty:
            return None
        session = None
        try:
            session = self._take()
        finally:
            if session is None:
                self._slots.give(slot)
            else:
                session.slot = slot
                session.end_waits_at(deadline.at)
        return session

    def give_back(self, session: OwnSession) -> None:
        """Keep a connection for the next call, if it can serve one."""
        slot, session.slot = session.slot, None
        try:
            if self._closed or not session.idle:
                session.close()
                return
            session.idle_since = time.monotonic()
            self._idle.append(session)
            with suppress(IndexError):
                oldest = session.idle_since - MOST_IDLE
                while len(self._idle) > self._settings.min_size and (
                    self._idle[0].idle_since < oldest
                ):
                    self._idle.popleft().close()
        finally:
            self._slots.give(slot)

    def close(self) -> None:
        """Close the connections; those that are lent out, when they come back."""
        self._closed = True
        with suppress(IndexError):
            while True:
                session = self._idle.pop()
                with suppress(RuntimeError):  # gone already, with an event loop that has ended
                    session.close()

    def _take(self) -> OwnSession | None:
        with suppress(IndexError):  # none is left, or another caller was faster
            while True:
                session = self._idle.pop()
                if time.monotonic() - session.idle_since < MOMENT or not session.dead:
                    return session
                session.close()
        return None

    def before_fork(self) -> None:
        """Do nothing: nothing is left half done that the child would see."""

    def after_fork_in_parent(self) -> None:
        """Go on."""

    def after_fork_in_child(self) -> None:
        """Start with no connection: these sockets are the parent's."""
        leave_alone(self._idle)
        self._start()


class Loan:
    """A connection on loan for the time of a `with` block.

    Not a generator: every call goes through here.
    """

    __slots__ = ("_deadline", "_pool", "_session")

    def __init__(self, pool: OwnPool, deadline: Deadline) -> None:
        self._pool = pool
        self._deadline = deadline

    def __enter__(self) -> Session:
        try:
            self._session = self._pool.take(self._deadline)
        except psycopg.Error:
            # The server may have no connection left to give, and one that is open may be idle.
            if not self._borrow():
                raise
        return self._session

    def _borrow(self) -> bool:
        pool = self._pool.spare
        session = None if pool is None else pool.take_open(self._deadline)
        if pool is None or session is None:
            return False
        self._pool, self._session = pool, session
        return True

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and issubclass(kind, BECAME_REPLICA):
            self._session.close()
        self._pool.give_back(self._session)


# --- what the application has: given back as it was, never closed -----------------------------

Pool: TypeAlias = ConnectionPool[Any]


class GivenPool:
    """A pool that the application opened, and will close."""

    place = "the PostgreSQL database of the given pool"

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._opened_by = os.getpid()

    @contextmanager
    def lend(self, deadline: Deadline) -> Iterator[Session]:
        """Borrow a connection, and give it back as it was."""
        check_process(self._opened_by)
        connection = self._pool.getconn(timeout=deadline.left)
        try:
            with committing(connection):
                yield PsycopgSession(connection)
        finally:
            self._pool.putconn(connection)

    def close(self) -> None:
        """Leave it open."""


class GivenConnection:
    """A connection that the application opened, and will close."""

    place = "the PostgreSQL database of the given connection"

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._opened_by = os.getpid()
        self._turn = Slots(1)

    @contextmanager
    def lend(self, deadline: Deadline) -> Iterator[Session]:
        """Use it, one call at a time, unless the application has a transaction open on it."""
        check_process(self._opened_by)
        with in_turn(self._turn, deadline), committing(self._connection):
            yield PsycopgSession(self._connection)

    def close(self) -> None:
        """Leave it open."""


@contextmanager
def in_turn(turn: Slots, deadline: Deadline) -> Iterator[None]:
    """Let one call at a time use a connection."""
    try:
        place = turn.get(timeout=deadline.left)
    except Empty:
        raise StoreUnavailable(
            "the given connection was busy with other calls all the time"
        ) from None
    try:
        yield
    finally:
        turn.give(place)


@contextmanager
def committing(connection: Connection) -> Iterator[None]:
    """Let each statement commit by itself for a while."""
    check_idle(connection)
    before = connection.autocommit
    connection.set_autocommit(True)
    try:
        yield
    finally:
        with suppress(psycopg.OperationalError):  # it broke
            connection.set_autocommit(before)
