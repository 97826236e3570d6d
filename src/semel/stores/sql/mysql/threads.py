"""PyMySQL: the connections of a store for threads, and what is sent on them.

`tasks` has the same names.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from queue import Empty
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

from pymysql.connections import Connection as PyMySQLConnection
from pymysql.constants import CLIENT, CR
from pymysql.cursors import Cursor
from pymysql.err import OperationalError

from semel.core.optional import have
from semel.errors import StoreUnavailable
from semel.stores.forking import follow_forks
from semel.stores.places import Place, Places
from semel.stores.sql.mysql.addresses import (
    FIRST_QUESTION,
    MULTI_STATEMENTS,
    Address,
    check_first_answer,
    driver_arguments,
    settings,
)
from semel.stores.sql.mysql.errors import MOMENT
from semel.stores.sql.verbs import Reply, Statement

sleep = time.sleep

SENDS_BULK = False
"""PyMySQL prepares no statements."""

Connection: TypeAlias = "PyMySQLConnection[Cursor]"
Connect: TypeAlias = Callable[[], Connection]


class OwnConnection(PyMySQLConnection):
    """One to an address: nothing on it takes longer than the call has time."""

    _allowed = 0.0

    def connect_within(self, seconds: float) -> None:
        """Connect."""
        self.connect_timeout = seconds
        self.allow(seconds)
        self.connect()

    def _request_authentication(self) -> None:
        # PyMySQL before 1.2 would go on in plain text.
        offered = self.server_capabilities  # type: ignore[attr-defined]  # not in its stubs
        if self.ssl and not offered & CLIENT.SSL:
            raise OperationalError(CR.CR_SSL_CONNECTION_ERROR, "the server offers no TLS")
        super()._request_authentication()  # type: ignore[misc]  # nor is this

    def allow(self, seconds: float) -> None:
        """Let the next statement take this time."""
        if self._allowed != seconds:
            self._allowed = self._read_timeout = self._write_timeout = seconds


def connector(address: Address, timeout: float) -> Connect:
    """Return the function that makes a connection to an address, which is not connected yet."""
    arguments: dict[str, Any] = driver_arguments(address, timeout) | {
        "defer_connect": True,
        # Said aloud: by itself PyMySQL reads all certificates of the machine for each connection,
        # to try a TLS that checks none of them.
        "ssl_disabled": address.tls is None,
    }
    # What `OwnConnection` stands on; it is not public.
    have("pymysql", OwnConnection(**arguments), "_read_timeout", "_write_timeout", "ssl")
    have("pymysql", PyMySQLConnection, "_request_authentication")
    return lambda: OwnConnection(**arguments)


class Pool:
    """At most `size` connections, opened when they are needed."""

    def __init__(
        self,
        connect: Connect,
        place: str,
        timeout: float,
        size: int,
        *,
        waits_for_locks: bool = True,
    ) -> None:
        """`waits_for_locks`: whether a statement waits for a lock, and is sent again after that."""
        self.place = place
        self.spares: Sequence[Pool] = ()
        """They lend an idle connection when this pool cannot open one of its own."""
        self.waits_for_locks = waits_for_locks
        self._connect = connect
        self._settings = settings(timeout, waits_for_locks=waits_for_locks)
        self._size = size
        self._closed = False
        self._fresh()
        follow_forks(self)

    def _fresh(self) -> None:
        self._free = Places(self._size)
        self._lent: WeakKeyDictionary[Connection, Place] = WeakKeyDictionary()
        """The slot of each connection that is in use: one that is lost takes none along."""
        self._idle: deque[Connection] = deque()

    def take(self, seconds: float) -> Connection:
        """Return a connection that nobody else uses."""
        if self._closed:
            raise StoreUnavailable(f"the store on {self.place} is closed")
        end = time.monotonic() + seconds
        try:
            slot = self._free.get(timeout=seconds)
        except Empty:
            raise StoreUnavailable(
                f"all {self._size} connections to {self.place} are in use; nothing was done"
            ) from None
        try:
            # The last one used: the others may grow old and go.
            connection = _last(self._idle) or self._open(end - time.monotonic())
        except BaseException:
            self._free.give(slot)
            raise
        self._lent[connection] = slot
        return connection

    def take_open(self) -> Connection | None:
        """Return a connection that is open and that nobody uses, if there is one."""
        with contextlib.suppress(Empty):
            slot = self._free.get(block=False)
            connection = _last(self._idle)
            if connection is not None:
                self._lent[connection] = slot
                return connection
            self._free.give(slot)
        return None

    def send(self, connection: Connection, statement: Statement, seconds: float) -> Reply:
        """Send a statement, which may take this time; on an application's, what that allows."""
        if isinstance(connection, OwnConnection):
            connection.allow(seconds)
        return send(connection, statement)

    def give_back(self, connection: Connection) -> None:
        """Take a connection back that is fit for the next caller."""
        slot = self._lent.pop(connection, None)
        self._idle.append(connection)
        if self._closed:  # looked at last, so that a `close` meanwhile is not missed
            self.close_idle()
        self._free.give(slot)

    def drop(self, connection: Connection) -> None:
        """Take back a connection that nobody can use any more."""
        slot = self._lent.pop(connection, None)
        _close(connection)
        self._free.give(slot)

    def close_idle(self) -> None:
        """Close what nobody uses; the next callers open connections anew."""
        while (connection := _last(self._idle)) is not None:
            _close(connection)

    def close(self) -> None:
        """Close what is idle now, and the rest when it is given back."""
        self._closed = True
        self.close_idle()

    def _open(self, seconds: float) -> Connection:
        connection = self._connect()
        try:
            if isinstance(connection, OwnConnection):  # not one that the application opened
                connection.connect_within(max(seconds, MOMENT))
            cursor = connection.cursor(Cursor)
            cursor.execute(self._settings)
            if not isinstance(connection, OwnConnection):
                cursor.execute(FIRST_QUESTION)
                check_first_answer(cursor.fetchone())
        except BaseException:
            _close(connection)
            raise
        return connection

    def before_fork(self) -> None:
        """Do nothing: the child begins with a pool of its own."""

    def after_fork_in_parent(self) -> None:
        """Do nothing: see `before_fork`."""

    def after_fork_in_child(self) -> None:
        """Let go of the parent's connections without a word: a farewell would end its sessions."""
        self._fresh()


def send(connection: Connection, statement: Statement) -> Reply:
    """Send a statement and its follower, in one message where the connection allows it."""
    cursor = connection.cursor(Cursor)  # an application's own connection may have another default
    then = statement.then
    if then is None:
        cursor.execute(statement.sql, statement.parameters)
        return Reply(list(cursor.fetchall()), cursor.rowcount)
    if connection.client_flag & MULTI_STATEMENTS:
        cursor.execute(f"{statement.sql}; {then.sql}", statement.parameters + then.parameters)
        changed, last_id = cursor.rowcount, cursor.lastrowid
        cursor.nextset()
    else:
        changed = cursor.execute(statement.sql, statement.parameters)
        last_id = cursor.lastrowid
        cursor.execute(then.sql, then.parameters)
    return Reply(list(cursor.fetchall()), changed, last_id)


def _last(idle: deque[Connection]) -> Connection | None:
    with contextlib.suppress(IndexError):  # none is left, or another thread was faster
        return idle.pop()
    return None


def _close(connection: Connection) -> None:
    with contextlib.suppress(Exception):  # broken already
        connection.close()
