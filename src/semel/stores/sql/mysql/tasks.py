"""asyncmy: the connections of a store for asyncio, and the verbs that run on them.

The twin of `threads`. A caller that is cancelled closes its connection: the answer it did not wait
for would be taken for the next one's.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias, TypeVar

from asyncmy.connection import Connection
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
from semel.stores.sql.mysql.errors import (
    LARGEST_MESSAGE,
    MOMENT,
    Deadline,
    code_of,
    is_lost,
    message_size,
    translate,
)
from semel.stores.sql.mysql.schema import Schema
from semel.stores.sql.mysql.statements import UNABLE, Bulk
from semel.stores.sql.verbs import Operation, Reply, Statement, Verb

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


T = TypeVar("T")


class OwnConnection(Connection):
    """A connection that this store opens, with the settings it needs."""


Connect: TypeAlias = Callable[[], Awaitable[Connection]]


def connector(address: Address, timeout: float) -> Connect:
    """Give the function that opens a connection to an address."""
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
        patient: bool = True,
    ) -> None:
        """`patient`: whether a statement waits for a lock, and is sent again if in vain."""
        self.place = place
        self.spares: Sequence[Pool] = ()
        """They lend an idle connection when this pool cannot open one of its own."""
        self.patient = patient
        self._connect = connect
        self._settings = settings(timeout, patient=patient)
        self._size = size
        self._closed = False
        self.prepared = PreparedStatements()
        self._fresh()
        follow_forks(self)

    def _fresh(self) -> None:
        self._seats = asyncio.Semaphore(self._size)
        self._idle: deque[Connection] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None

    async def take(self, patience: float) -> Connection:
        """Give a connection that nobody else uses."""
        if self._closed:
            raise StoreUnavailable(f"the store on {self.place} is closed")
        self._loop = only_loop(self._loop, self.place)
        end = time.monotonic() + patience
        try:
            async with asyncio.timeout(patience):
                await self._seats.acquire()
        except TimeoutError:
            raise StoreUnavailable(
                f"all {self._size} connections to {self.place} are in use; nothing was done"
            ) from None
        try:
            with contextlib.suppress(IndexError):
                return self._idle.pop()  # the last one used: the others may grow old and go
            return await self._open(end - time.monotonic())
        except BaseException:
            self._seats.release()
            raise

    async def take_open(self) -> Connection | None:
        """Give a connection that is open and that nobody uses, if there is one."""
        if not self._idle or self._seats.locked():
            return None
        await self._seats.acquire()  # one is free: it is not waited for
        return self._idle.pop()

    def give_back(self, connection: Connection) -> None:
        """Take a connection back that is fit for the next caller."""
        self._idle.append(connection)
        if self._closed:
            self.close_idle()
        self._seats.release()

    def drop(self, connection: Connection) -> None:
        """Take back a connection that nobody can use any more."""
        connection.close()
        self._seats.release()

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

    async def _open(self, patience: float) -> Connection:
        async with asyncio.timeout(max(patience, MOMENT)):
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


class _Line:
    """A caller's hold on one connection, from its first statement to its last."""

    def __init__(self, pool: Pool, effort: Deadline) -> None:
        self._pool = pool
        self._lender = pool
        """The pool that the connection goes back to."""
        self._effort = effort
        self._connection: Connection | None = None
        self._size_lost = 0
        """Bytes of the message on which the connection was lost, until its size is checked."""

    async def drive(self, verb: Verb[T]) -> T:
        """Run a verb to its answer."""
        try:
            statement = next(verb)
            while True:
                statement = verb.send(await self._answer(statement))
        except StopIteration as end:
            answer: T = end.value
            return answer
        finally:
            verb.close()

    async def _answer(self, statement: Statement) -> Reply:
        while True:
            try:
                if self._size_lost:
                    size, self._size_lost = self._size_lost, 0
                    self._effort.check_size(size, await self._send(LARGEST_MESSAGE))
                return await self._send(statement)
            except Exception as error:  # noqa: BLE001 - `pause_after` raises what it must
                await asyncio.sleep(self._effort.pause_after(error))

    async def _send(self, statement: Statement) -> Reply:
        self._effort.check()
        if self._connection is None:
            self._connection = await self._take()
        try:
            async with asyncio.timeout(self._effort.statement_time):
                if isinstance(statement, Bulk):
                    return await self._pool.prepared.send(self._connection, statement)
                return await send(self._connection, statement)
        except BaseException as error:
            if is_lost(error):
                self._size_lost = message_size(self._connection, statement)
            if code_of(error) is None or is_lost(error):
                self.drop()  # cancelled or lost: what comes next on it may be an old answer
            if is_lost(error):  # a server that went away took all of them along
                self._lender.close_idle()
                self._pool.close_idle()
            raise

    async def _take(self) -> Connection:
        self._lender = self._pool
        try:
            return await self._pool.take(self._effort.remaining)
        except StoreUnavailable:  # the pool's own word: nothing was opened
            raise
        except Exception:
            # The server may have no connection left to give, and one that is open may be idle.
            for spare in self._pool.spares:
                connection = await spare.take_open()
                if connection is not None:
                    self._lender = spare
                    return connection
            raise

    def drop(self) -> None:
        """Close the connection; the next statement opens another."""
        connection, self._connection = self._connection, None  # first: never given back twice
        if connection is not None:
            self._lender.drop(connection)

    def end(self) -> None:
        """Give the connection back."""
        connection, self._connection = self._connection, None  # first: never given back twice
        if connection is not None:
            self._lender.give_back(connection)


class Executor:
    """Runs the operations of tasks, each caller's on one connection."""

    def __init__(self, pool: Pool, timeout: float, schema: Schema) -> None:
        self._pool = pool
        self._timeout = timeout
        self._schema = schema

    async def run(self, operations: Sequence[Operation[Any]]) -> list[Any]:
        """Run the operations one after the other; the outcomes come in their order."""
        line = self._line()
        try:
            return [await self._outcome(line, operation) for operation in operations]
        finally:
            line.end()

    async def migrate(self, columns: Mapping[str, str]) -> int:
        """Make the table or bring it up to date."""
        line = self._line()
        try:
            return await self._alone(line, self._schema.migrate(columns))
        finally:
            line.end()

    async def close(self) -> None:
        """Close the connections."""
        await self._pool.close()

    async def _outcome(self, line: _Line, operation: Operation[Any]) -> Any:
        try:
            if not self._schema.ensured:
                await self._alone(line, self._schema.ensure())
            return await line.drive(operation.start())
        except Exception as error:  # noqa: BLE001 - it reaches the caller as its outcome
            return translate(error, self._pool.place)

    def _line(self) -> _Line:
        effort = Deadline(self._pool.place, self._timeout, patient=self._pool.patient)
        return _Line(self._pool, effort)

    async def _alone(self, line: _Line, verb: Verb[T]) -> T:
        """Run a verb that takes a lock of the server, which ends with the connection."""
        try:
            return await line.drive(verb)
        except BaseException:
            line.drop()
            raise


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
