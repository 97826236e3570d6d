"""PyMySQL: the connections of a store for threads, and what is sent on them.

`tasks` has the same names.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, TypeAlias

from pymysql.connections import Connection as PyMySQLConnection
from pymysql.constants import CLIENT, CR
from pymysql.cursors import Cursor
from pymysql.err import MySQLError, OperationalError

from semel.core.optional import have
from semel.stores.sql.mysql.addresses import (
    FIRST_QUESTION,
    MULTI_STATEMENTS,
    UNKNOWN_VARIABLE,
    Address,
    SessionSettings,
    check_first_answer,
    driver_arguments,
)
from semel.stores.sql.mysql.errors import MOMENT
from semel.stores.sql.verbs import Reply, Statement

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


def open_connection(connect: Connect, settings: SessionSettings, seconds: float) -> Connection:
    """Open a connection and set it up, in this time."""
    connection = connect()
    try:
        if isinstance(connection, OwnConnection):  # not one that the application opened
            connection.connect_within(max(seconds, MOMENT))
        cursor = connection.cursor(Cursor)
        _set_up(cursor, settings)
        if not isinstance(connection, OwnConnection):
            cursor.execute(FIRST_QUESTION)
            check_first_answer(cursor.fetchone())
    except BaseException:
        close(connection)
        raise
    return connection


def _set_up(cursor: Cursor, settings: SessionSettings) -> None:
    try:
        cursor.execute(settings.sql)
    except MySQLError as error:
        if error.args[:1] != (UNKNOWN_VARIABLE,):
            raise
        cursor.execute(settings.without_galera)


def close(connection: Connection) -> None:
    """Close a connection, and let the server know."""
    with contextlib.suppress(Exception):  # broken already
        connection.close()


ensure_closed = close


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


class Sender:
    """Sends the statements of one connection."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def send(self, statement: Statement, seconds: float) -> Reply:
        """Send a statement, which may take this time; on an application's, what that allows."""
        if isinstance(self._connection, OwnConnection):
            self._connection.allow(seconds)
        return send(self._connection, statement)
