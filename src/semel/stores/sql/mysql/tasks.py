"""asyncmy: the connections of a store for asyncio, and what is sent on them.

`threads` has the same names. A caller that is canceled closes its connection: the answer it did
not wait for would be taken for the next one's.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeAlias

from asyncmy.connection import Connection as AsyncmyConnection
from asyncmy.cursors import Cursor
from asyncmy.errors import MySQLError, NotSupportedError

from semel.stores.sql.mysql.addresses import (
    FIRST_QUESTION,
    UNKNOWN_VARIABLE,
    Address,
    SessionSettings,
    check_first_answer,
    driver_arguments,
)
from semel.stores.sql.mysql.errors import MOMENT
from semel.stores.sql.mysql.statements import UNABLE, Bulk
from semel.stores.sql.verbs import Reply, Statement

SENDS_BULK = True
"""Whether `Sender.send` may know how to send a `Bulk`."""


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


async def open_connection(
    connect: Connect, settings: SessionSettings, seconds: float
) -> Connection:
    """Open a connection and set it up, in this time."""
    async with asyncio.timeout(max(seconds, MOMENT)):
        connection = await connect()
        try:
            cursor = connection.cursor(Cursor)
            await _set_up(cursor, settings)
            if not isinstance(connection, OwnConnection):
                await cursor.execute(FIRST_QUESTION)
                check_first_answer(await cursor.fetchone())
        except BaseException:
            connection.close()
            raise
    return connection


async def _set_up(cursor: Cursor, settings: SessionSettings) -> None:
    try:
        await cursor.execute(settings.sql)
    except MySQLError as error:
        if error.args[:1] != (UNKNOWN_VARIABLE,):
            raise
        await cursor.execute(settings.without_galera)


def close(connection: Connection) -> None:
    """Close a connection at once."""
    connection.close()


async def ensure_closed(connection: Connection) -> None:
    """Close a connection, and let the server know."""
    with contextlib.suppress(Exception):  # broken already
        await connection.ensure_closed()


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


class Sender:
    """Sends the statements of one connection, and knows what it has prepared."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._prepared: dict[str, Any] = {}

    async def send(self, statement: Statement, seconds: float) -> Reply:
        """Send a statement, which may take this time."""
        async with asyncio.timeout(seconds):
            if isinstance(statement, Bulk):
                return await self._send_bulk(statement)
            return await send(self._connection, statement)

    async def _send_bulk(self, bulk: Bulk) -> Reply:
        """Carry out the statement for all rows; UNABLE: nothing was done."""
        if bulk.sql not in self._prepared:
            self._prepared[bulk.sql] = await _prepare(self._connection, bulk.sql)
        statement = self._prepared[bulk.sql]
        if statement is _REFUSED:
            return UNABLE
        try:
            result = await statement.execute_bulk(bulk.parameters)
        except NotSupportedError:  # known before anything is sent
            self._prepared[bulk.sql] = _REFUSED
            return UNABLE
        return Reply([], result.affected_rows, result.insert_id)


async def _prepare(connection: Connection, sql: str) -> Any:
    prepare = getattr(connection, "prepare", None)
    if prepare is None:
        return _REFUSED  # an older asyncmy, until 0.2.11
    try:
        return await prepare(sql)
    except MySQLError:
        return _REFUSED  # what else is wrong, the text will meet as well
