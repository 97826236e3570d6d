"""PyMySQL: the connections of a store for threads, and the verbs that run on them."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from queue import Empty
from typing import Any, TypeAlias, TypeVar
from weakref import WeakKeyDictionary

from pymysql.connections import Connection as PyMySQLConnection
from pymysql.constants import CLIENT, CR
from pymysql.cursors import Cursor
from pymysql.err import OperationalError

from semel.core.extras import have
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
from semel.stores.sql.verbs import Operation, Reply, Statement, Verb

T = TypeVar("T")

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
    """Give the function that makes a connection to an address, which is not connected yet."""
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
        patient: bool = True,
    ) -> None:
        """`patient`: whether a statement waits for a lock, and is sent again after that."""
        self.place = place
        self.spares: Sequence[Pool] = ()
        """They lend an idle connection when this pool cannot open one of its own."""
        self.patient = patient
        self._connect = connect
        self._settings = settings(timeout, patient=patient)
        self._size = size
        self._closed = False
        self._fresh()
        follow_forks(self)

    def _fresh(self) -> None:
        self._seats = Places(self._size)
        self._lent: WeakKeyDictionary[Connection, Place] = WeakKeyDictionary()
        """The seat of each connection that is in use: one that is lost takes none along."""
        self._idle: deque[Connection] = deque()

    def take(self, patience: float) -> Connection:
        """Give a connection that nobody else uses."""
        if self._closed:
            raise StoreUnavailable(f"the store on {self.place} is closed")
        end = time.monotonic() + patience
        try:
            seat = self._seats.get(timeout=patience)
        except Empty:
            raise StoreUnavailable(
                f"all {self._size} connections to {self.place} are in use; nothing was done"
            ) from None
        try:
            # The last one used: the others may grow old and go.
            connection = _last(self._idle) or self._open(end - time.monotonic())
        except BaseException:
            self._seats.give(seat)
            raise
        self._lent[connection] = seat
        return connection

    def take_open(self) -> Connection | None:
        """Give a connection that is open and that nobody uses, if there is one."""
        with contextlib.suppress(Empty):
            seat = self._seats.get(block=False)
            connection = _last(self._idle)
            if connection is not None:
                self._lent[connection] = seat
                return connection
            self._seats.give(seat)
        return None

    def give_back(self, connection: Connection) -> None:
        """Take a connection back that is fit for the next caller."""
        seat = self._lent.pop(connection, None)
        self._idle.append(connection)
        if self._closed:  # looked at last, so that a `close` meanwhile is not missed
            self.close_idle()
        self._seats.give(seat)

    def drop(self, connection: Connection) -> None:
        """Take back a connection that nobody can use any more."""
        seat = self._lent.pop(connection, None)
        _close(connection)
        self._seats.give(seat)

    def close_idle(self) -> None:
        """Close what nobody uses; the next callers open connections anew."""
        while (connection := _last(self._idle)) is not None:
            _close(connection)

    def close(self) -> None:
        """Close what is idle now, and the rest when it is given back."""
        self._closed = True
        self.close_idle()

    def _open(self, patience: float) -> Connection:
        connection = self._connect()
        try:
            if isinstance(connection, OwnConnection):  # not one that the application opened
                connection.connect_within(max(patience, MOMENT))
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

    def drive(self, verb: Verb[T]) -> T:
        """Run a verb to its answer."""
        try:
            statement = next(verb)
            while True:
                statement = verb.send(self._answer(statement))
        except StopIteration as end:
            answer: T = end.value
            return answer
        finally:
            verb.close()

    def _answer(self, statement: Statement) -> Reply:
        while True:
            try:
                if self._size_lost:
                    size, self._size_lost = self._size_lost, 0
                    self._effort.check_size(size, self._send(LARGEST_MESSAGE))
                return self._send(statement)
            except Exception as error:  # noqa: BLE001 - `pause_after` raises what it must
                time.sleep(self._effort.pause_after(error))

    def _send(self, statement: Statement) -> Reply:
        self._effort.check()
        if self._connection is None:
            self._connection = self._take()
        try:
            if isinstance(self._connection, OwnConnection):
                self._connection.allow(self._effort.statement_time)
            return send(self._connection, statement)
        except BaseException as error:
            if is_lost(error):
                self._size_lost = message_size(self._connection, statement)
            if code_of(error) is None or is_lost(error):
                self.drop()  # interrupted or lost: what comes next on it may be an old answer
            if is_lost(error):  # a server that went away took all of them along
                self._lender.close_idle()
                self._pool.close_idle()
            raise

    def _take(self) -> Connection:
        self._lender = self._pool
        try:
            return self._pool.take(self._effort.remaining)
        except StoreUnavailable:  # the pool's own word: nothing was opened
            raise
        except Exception:
            # The server may have no connection left to give, and one that is open may be idle.
            for spare in self._pool.spares:
                connection = spare.take_open()
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
    """Runs the operations of threads, each caller's on one connection."""

    def __init__(self, pool: Pool, timeout: float, schema: Schema) -> None:
        self._pool = pool
        self._timeout = timeout
        self._schema = schema

    def run(self, operations: Sequence[Operation[Any]]) -> list[Any]:
        """Run the operations one after the other; the outcomes come in their order."""
        line = self._line()
        try:
            return [self._outcome(line, operation) for operation in operations]
        finally:
            line.end()

    def migrate(self, columns: Mapping[str, str]) -> int:
        """Make the table or bring it up to date."""
        line = self._line()
        try:
            return self._alone(line, self._schema.migrate(columns))
        finally:
            line.end()

    def close(self) -> None:
        """Close the connections."""
        self._pool.close()

    def _outcome(self, line: _Line, operation: Operation[Any]) -> Any:
        try:
            if not self._schema.ensured:
                self._alone(line, self._schema.ensure())
            return line.drive(operation.start())
        except Exception as error:  # noqa: BLE001 - it reaches the caller as its outcome
            return translate(error, self._pool.place)

    def _line(self) -> _Line:
        effort = Deadline(self._pool.place, self._timeout, patient=self._pool.patient)
        return _Line(self._pool, effort)

    def _alone(self, line: _Line, verb: Verb[T]) -> T:
        """Run a verb that takes a lock of the server, which ends with the connection."""
        try:
            return line.drive(verb)
        except BaseException:
            line.drop()
            raise


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
