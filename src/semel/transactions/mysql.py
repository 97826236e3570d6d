"""PyMySQL and mysqlclient."""

from __future__ import annotations

from typing import Any

from semel.stores.sql.mysql import threads
from semel.stores.sql.verbs import Reply, Statement
from semel.transactions import troubles
from semel.transactions.links import PlainLink, Savepoint

_IN_TRANSACTION = 1
"""SERVER_STATUS_IN_TRANS: the server tells with each answer."""


class PyMySQLLink(PlainLink):
    """A connection of PyMySQL."""

    dialect = "mysql"
    way_in = "call connection.begin() first"

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    def in_transaction(self) -> bool:
        """Ask for what the server said last."""
        return bool(self._connection.server_status & _IN_TRANSACTION)

    def joins(self) -> bool:
        """Under autocommit this server takes a savepoint and forgets it at once."""
        return self.in_transaction() or not self._connection.get_autocommit()

    def execute(self, statement: Statement) -> Reply:
        """Run one statement."""
        return threads.send(self._connection, statement)


class MySQLdbLink(PlainLink):
    """A connection of mysqlclient, which keeps to itself whether a transaction is open."""

    dialect = "mysql"
    way_in = 'call connection.query("START TRANSACTION") first'

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    def in_transaction(self) -> bool:
        """Try it: under autocommit, a savepoint outside a transaction is forgotten at once."""
        if not self._connection.get_autocommit():
            return True  # if none is open, the next statement begins one, and waits for a commit
        savepoint = Savepoint(self)
        savepoint.open()
        try:
            savepoint.commit()
        except Exception as error:
            if troubles.is_ended(error):
                return False
            raise
        return True

    def joins(self) -> bool:
        """Ask the same."""
        return self.in_transaction()

    def execute(self, statement: Statement) -> Reply:
        """Run one statement, and its follower by itself."""
        # The default of the class: an application's own connection may have another.
        cursor = self._connection.cursor(self._connection.default_cursor)
        try:
            changed = cursor.execute(statement.sql, statement.parameters)
            if statement.then is not None:
                cursor.execute(statement.then.sql, statement.then.parameters)
            return Reply(list(cursor.fetchall()), changed)
        finally:
            cursor.close()
