"""asyncmy: the connections of a store for asyncio, and what is sent on them.

`threads` has the same names. A caller that is cancelled closes its connection: the answer it did
not wait for would be taken for the next one's.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, TypeAlias

from asyncmy.connection import Connection as AsyncmyConnection
from asyncmy.cursors import Cursor
from asyncmy.errors import MySQLError, NotSupportedError

from semel.errors import StoreUnavailable
from semel.stores.forking import follow_forks
from semel.stores.loops import only_loop
from semel.stores.sql.mysql.addresses import (
    FIRST_QUESTION,
    Address,
    check_first_answer,
    driver_arguments,
    settings,
)
from semel.stores.sql.mysql.errors import MOMENT
from semel.stores.sql.mysql.statements import UNABLE, Bulk
from semel.stores.sql.verbs import Reply, Statement

sleep = asyncio.sleep

SENDS_BULK = True
"""Whether `Pool.send` may know how to send a `Bulk`."""


Connection: TypeAlias = AsyncmyConnection


class OwnConnection(AsyncmyConnection):
    """A connection that this store opens, with the settings it needs."""


Connect: TypeAlias = Callable[[], Awaitable[Connection]]


def connector(address: Address, timeout: float) -> Connect:
    """Return the function that opens a connection to an address."""
    arguments = driver_arguments(address, timeout)

    async def connect() -> Connection:
        connection = OwnConnection(**arguments)  # type: ignore[no-untyped-call] # its own stubs say so
        await connection.connect()
        return connection

    return connect


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
        self._prepared = PreparedStatements()
        self._fresh()
        follow_forks(self)

    def _fresh(self) -> None:
        self._free = asyncio.Semaphore(self._size)
        self._idle: deque[Connection] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None

    async def take(self, seconds: float) -> Connection:
        """Return a connection that nobody else uses."""
        if self._closed:
            raise StoreUnavailable(f"the store on {self.place} is closed")
        self._loop = only_loop(self._loop, self.place)
        end = time.monotonic() + seconds
        try:
            async with asyncio.timeout(seconds):
                await self._free.acquire()
        except TimeoutError:
            raise StoreUnavailable(
                f"all {self._size} connections to {self.place} are in use; nothing was done"
            ) from None
        try:
            with contextlib.suppress(IndexError):
                return self._idle.pop()  # the last one used: the others may grow old and go
            return await self._open(end - time.monotonic())
        except BaseException:
            self._free.release()
            raise

    async def take_open(self) -> Connection | None:
        """Return a connection that is open and that nobody uses, if there is one."""
        if not self._idle or self._free.locked():
            return None
        await self._free.acquire()  # one is free: it is not waited for
        return self._idle.pop()

    async def send(self, connection: Connection, statement: Statement, seconds: float) -> Reply:
        """Send a statement, which may take this time."""
        async with asyncio.timeout(seconds):
            if isinstance(statement, Bulk):
                return await self._prepared.send(connection, statement)
            return await send(connection, statement)

    def give_back(self, connection: Connection) -> None:
        """Take a connection back that is fit for the next caller."""
        self._idle.append(connection)
        if self._closed:
            self.close_idle()
        self._free.release()

    def drop(self, connection: Connection) -> None:
        """Take back a connection that nobody can use any more."""
        connection.close()
        self._free.release()

    def close_idle(self) -> None:
        """Close what nobody uses; the next callers open connections anew."""
        while self._idle:
            self._idle.pop().close()

    async def close(self) -> None:
        """Close what is idle now, and the rest when it is given back."""
        self._closed = True
        while self._idle:
            with contextlib.suppress(Exception):  # broken already
                await self._idle.pop().ensure_closed()

    async def _open(self, seconds: float) -> Connection:
        async with asyncio.timeout(max(seconds, MOMENT)):
            connection = await self._connect()
            try:
                cursor = connection.cursor(Cursor)
                await cursor.execute(self._settings)
                if not isinstance(connection, OwnConnection):
                    await cursor.execute(FIRST_QUESTION)
                    check_first_answer(await cursor.fetchone())
            except BaseException:
                connection.close()
                raise
        return connection

    def before_fork(self) -> None:
        """Do nothing: the child begins with a pool of its own."""

    def after_fork_in_parent(self) -> None:
        """Do nothing: see `before_fork`."""

    def after_fork_in_child(self) -> None:
        """Let go of the parent's connections without a word: a farewell would end its sessions."""
        # Kept, not closed: closing them would take them off the event loop, which the two share.
        self._inherited = self._idle
        self._fresh()


async def send(connection: Connection, statement: Statement) -> Reply:
    """Send a statement and its follower, in one message; asyncmy always allows it."""
    cursor = connection.cursor(Cursor)  # an application's own connection may have another default
    then = statement.then
    if then is None:
        await cursor.execute(statement.sql, statement.parameters)
        return Reply(list(await cursor.fetchall()), connection.affected_rows())
    await cursor.execute(f"{statement.sql}; {then.sql}", statement.parameters + then.parameters)
    changed, last_id = connection.affected_rows(), cursor.lastrowid
    await cursor.nextset()
    return Reply(list(await cursor.fetchall()), changed, last_id)


# --- rows that travel apart from their statement, which the server has read once ----------
#
# For an insert of many, reading its text takes a server a third of the time. MariaDB takes the rows
# of a prepared statement in one message, and treats them as one insert: one moment, one commit, all
# or none. MySQL has nothing like it, and a server may be out of room for prepared statements: then
# it says so, and the text is sent instead.


_REFUSED: Final = None


class PreparedStatements:
    """What the connections of a pool have prepared."""

    def __init__(self) -> None:
        self._prepared: dict[Connection, dict[str, Any]] = {}

    async def send(self, connection: Connection, bulk: Bulk) -> Reply:
        """Carry out the statement for all rows; UNABLE: nothing was done."""
        prepared = self._of(connection)
        if bulk.sql not in prepared:
            prepared[bulk.sql] = await _prepare(connection, bulk.sql)
        statement = prepared[bulk.sql]
        if statement is _REFUSED:
            return UNABLE
        try:
            result = await statement.execute_bulk(bulk.parameters)
        except NotSupportedError:  # known before anything is sent
            prepared[bulk.sql] = _REFUSED
            return UNABLE
        return Reply([], result.affected_rows, result.insert_id)

    def _of(self, connection: Connection) -> dict[str, Any]:
        if connection not in self._prepared:
            # What a closed connection had prepared is gone.
            open_ones = {one: its for one, its in self._prepared.items() if one.connected}
            self._prepared = {**open_ones, connection: {}}
        return self._prepared[connection]


async def _prepare(connection: Connection, sql: str) -> Any:
    prepare = getattr(connection, "prepare", None)
    if prepare is None:
        return _REFUSED  # an older asyncmy, until 0.2.11
    try:
        return await prepare(sql)
    except MySQLError:
        return _REFUSED  # what else is wrong, the text will meet as well
