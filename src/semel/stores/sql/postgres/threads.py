"""psycopg's connections: for threads, and for asyncio where asyncpg cannot do what is asked for.

No wait is without an end. A server that is frozen, or cut off, sends nothing, not even an error;
only the client can end such a wait. psycopg waits in slices and tells its generators when one has
passed: there the deadline of the call is looked at.

Threads do without psycopg's cursors (`PreparedSession`).
"""

from __future__ import annotations

import asyncio
import os
import select
import threading
import time
from collections.abc import Callable, Generator
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from functools import lru_cache
from itertools import count
from math import ceil
from operator import attrgetter
from struct import Struct
from typing import Any, Final, NamedTuple, Protocol, Self, TypeAlias, TypeVar
from uuid import UUID
from zlib import crc32

import psycopg
from psycopg.abc import PQGen, PQGenConn
from psycopg.adapt import Transformer
from psycopg.pq import DiagnosticField, ExecStatus, PipelineStatus, TransactionStatus
from psycopg.pq.abc import PGresult
from psycopg.rows import tuple_row
from psycopg.waiting import Ready
from psycopg_pool import ConnectionPool

from semel.core.optional import inside
from semel.errors import ConfigError, StoreError, StoreUnavailable
from semel.stores.sql.errors import Deadline
from semel.stores.sql.postgres.errors import TimeIsUp
from semel.stores.sql.postgres.settings import Settings
from semel.stores.sql.rows import WITH_UTF8, texts_as_bytes
from semel.stores.sql.store import Source
from semel.stores.sql.verbs import OwnColumns, Reply, Statement

R = TypeVar("R")
V = TypeVar("V")
Y = TypeVar("Y")

LOCK_SHARE, STATEMENT_SHARE = 0.8, 0.9
"""Which part of the call's time each wait of the server may take. Each ends before the next one
out (the last is ours), so that the error names the cause."""

BATCH_LOCK_SHARE: Final = 0.1
"""Less for a batch, so that one member's lock does not make all the others wait."""

CONFIGURE: Final = (
    "SELECT set_config('lock_timeout', $1, false), set_config('statement_timeout', $2, false), "
    "set_config('default_transaction_isolation', 'read committed', false), "
    "set_config('enable_seqscan', 'off', false)"
)
"""The last one because every statement has its index, and its plan is kept: made while the table is
small, it would read all of it for each batch, until statistics are taken of what it has become.
Only `counts`, which has to read everything, takes half as long again by an index."""


class _Limit(Protocol):
    deadline: float
    """Of the monotonic clock."""


class _Connecting(threading.local):
    """How long this thread may wait for the connection that psycopg makes for it."""

    deadline = float("inf")


_connecting: Final = _Connecting()

# Overridden below: without it a connection that is being opened would wait without an end.
inside("psycopg", "psycopg:Connection._connect_gen")


class BoundedConnection(psycopg.Connection[Any]):
    """A connection for threads, whose waits end at `deadline` (of the monotonic clock)."""

    deadline = float("inf")
    idle_since = float("inf")

    @classmethod
    def connect_until(cls, deadline: float, conninfo: str, **options: Any) -> Self:
        """Connect; libpq's own limit counts whole seconds, of which it takes two at least."""
        _connecting.deadline = deadline
        try:
            return cls.connect(conninfo, **options)
        finally:
            _connecting.deadline = float("inf")

    @classmethod
    def _connect_gen(cls, conninfo: str = "", **options: Any) -> PQGenConn[Self]:
        # psycopg 3.2 has an option here (timeout), 3.3 has none.
        return _bounded(super()._connect_gen(conninfo, **options), _connecting)

    def wait(self, gen: PQGen[V], *args: Any, **options: Any) -> V:
        return super().wait(_bounded(gen, self), *args, **options)


class AsyncBoundedConnection(psycopg.AsyncConnection[Any]):
    """A connection for asyncio, whose waits end at `deadline` (of the monotonic clock)."""

    deadline = float("inf")
    idle_since = float("inf")

    async def wait(self, gen: PQGen[V], *args: Any, **options: Any) -> V:
        return await super().wait(_bounded(gen, self), *args, **options)


def _bounded(gen: Generator[Y, R, V], limit: _Limit) -> Generator[Y, R, V]:
    try:
        wanted = next(gen)
        while True:
            ready = yield wanted
            if ready == Ready.NONE and time.monotonic() >= limit.deadline:
                raise TimeIsUp("the server has not answered")
            wanted = gen.send(ready)
    except StopIteration as end:
        result: V = end.value
        return result


def is_dead(connection: BoundedConnection | AsyncBoundedConnection) -> bool:
    """Whether the server is known to have hung up, asked without sending anything."""
    try:
        connection.pgconn.consume_input()  # its last words
        connection.pgconn.consume_input()  # the end
    except psycopg.OperationalError:
        return True
    return connection.closed


def limits(timeout: float) -> tuple[str, str]:
    """Return the values of `CONFIGURE`."""
    # Never 0, which means no limit at all.
    return f"{ceil(timeout * LOCK_SHARE * 1000)}ms", f"{ceil(timeout * STATEMENT_SHARE * 1000)}ms"


# --- sessions ---------------------------------------------------------------------------------

Pool: TypeAlias = ConnectionPool[Any]
Connection: TypeAlias = psycopg.Connection[Any]
AsyncConnection: TypeAlias = psycopg.AsyncConnection[Any]


class _OwnConnection:
    """What a session of our own pool knows of its connection."""

    bounded: Any
    idle_since = float("inf")
    slot: object = None
    lost = False

    def begin(self, deadline: Deadline) -> None:
        """Serve a call: every wait ends at its deadline."""
        self.bounded.deadline = deadline.at

    @property
    def dead(self) -> bool:
        """Whether the server is known to have hung up."""
        return is_dead(self.bounded)

    @property
    def idle(self) -> bool:
        """Whether it may be used again; an answer that may still come would meet a stranger."""
        # Not by `info`, which makes an object for the answer and one for the question.
        status = self.bounded.pgconn.transaction_status
        return not self.lost and bool(status == TransactionStatus.IDLE)


class PsycopgSession:
    """A connection of psycopg's, for threads."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def execute(self, statement: Statement) -> Reply:
        return execute(self._connection, statement)

    def transaction(self) -> AbstractContextManager[Any]:
        return self._connection.transaction()


class OwnPsycopgSession(_OwnConnection, PsycopgSession):
    """One that we opened."""

    def __init__(self, connection: BoundedConnection) -> None:
        super().__init__(connection)
        self.bounded: BoundedConnection = connection

    def close(self) -> None:
        self.bounded.close()


class AsyncPsycopgSession:
    """A connection of psycopg's, for asyncio."""

    def __init__(self, connection: AsyncConnection) -> None:
        self._connection = connection

    async def execute(self, statement: Statement) -> Reply:
        return await async_execute(self._connection, statement)

    def transaction(self) -> AbstractAsyncContextManager[Any]:
        return self._connection.transaction()


class OwnAsyncPsycopgSession(_OwnConnection, AsyncPsycopgSession):
    """One that we opened."""

    def __init__(self, connection: AsyncBoundedConnection) -> None:
        super().__init__(connection)
        self.bounded: AsyncBoundedConnection = connection

    async def close(self) -> None:
        await self.bounded.close()


def connect(settings: Settings, deadline: Deadline) -> OwnPsycopgSession:
    """Open a connection, with settings of our own."""
    connection = BoundedConnection.connect_until(
        deadline.at,
        settings.conninfo,
        autocommit=True,
        prepare_threshold=settings.prepare_threshold,
        client_encoding="utf8",  # SQL_ASCII, that of a database, gives bytes for texts
    )
    connection.deadline = deadline.at
    if settings.own_session:
        try:
            psycopg.RawCursor(connection).execute(CONFIGURE, limits(settings.timeout))
        except BaseException:
            connection.close()
            raise
    return OwnPsycopgSession(connection)


def execute(connection: Connection, statement: Statement) -> Reply:
    """Run one statement, by a cursor."""
    with psycopg.RawCursor(connection, row_factory=tuple_row) as cursor:
        cursor.execute(statement.sql.encode(), statement.parameters, binary=True)
        rows = [] if cursor.description is None else cursor.fetchall()
        return Reply(rows, cursor.rowcount)


async def async_connect(settings: Settings, deadline: Deadline) -> OwnAsyncPsycopgSession:
    """Open a connection, with settings of our own."""
    try:
        async with asyncio.timeout(deadline.left):
            connection = await AsyncBoundedConnection.connect(
                settings.conninfo,
                autocommit=True,
                prepare_threshold=settings.prepare_threshold,
                client_encoding="utf8",  # SQL_ASCII, that of a database, gives bytes for texts
            )
    except TimeoutError:
        raise TimeIsUp("the server has not answered") from None
    connection.deadline = deadline.at
    if settings.own_session:
        try:
            await psycopg.AsyncRawCursor(connection).execute(CONFIGURE, limits(settings.timeout))
        except BaseException:
            await connection.close()
            raise
    return OwnAsyncPsycopgSession(connection)


async def async_execute(connection: AsyncConnection, statement: Statement) -> Reply:
    """Run one statement, by a cursor."""
    async with psycopg.AsyncRawCursor(connection, row_factory=tuple_row) as cursor:
        await cursor.execute(statement.sql.encode(), statement.parameters, binary=True)
        rows = [] if cursor.description is None else await cursor.fetchall()
        return Reply(rows, cursor.rowcount)


# --- what the application gives: checked before it is used --------------------------------------

OF_GIVEN_POOL: Final = "the PostgreSQL database of the given pool"
OF_GIVEN_CONNECTION: Final = "the PostgreSQL database of the given connection"
"""The names of databases that are only known by their connections."""


def check_process(opened_by: int) -> None:
    """Refuse a connection of another process: two programs would speak through one socket."""
    if os.getpid() != opened_by:
        raise StoreUnavailable(
            "the given connection or pool is from before the fork; open another one in this process"
        )


def check_idle(connection: Connection | AsyncConnection) -> None:
    """Refuse while the application's own transaction is open: ours would become part of it."""
    check_answers(connection)
    if connection.info.transaction_status in {
        TransactionStatus.INTRANS,
        TransactionStatus.INERROR,
    }:
        raise open_transaction()


def check_answers(connection: Connection | AsyncConnection) -> None:
    """Refuse a connection whose answers come later, or are not what we ask for."""
    if connection.pgconn.pipeline_status != PipelineStatus.OFF:
        raise ConfigError(
            "the connection is in pipeline mode, in which answers come later than semel needs "
            "them; use it outside the block of connection.pipeline()"
        )
    if connection.pgconn.parameter_status(b"client_encoding") == b"SQL_ASCII":
        raise texts_as_bytes(WITH_UTF8)


def open_transaction() -> StoreError:
    """Return the error for a connection whose transaction is open."""
    return StoreError(
        "the given connection has an open transaction; commit it or roll it back first, or "
        "give the store a connection of its own"
    )


# --- for threads: without cursors ---------------------------------------------------------------

_TEXT, _BINARY = 0, 1

_LONGEST_WAIT: Final = 86_400.0
"""Seconds. More is more than a poll can count."""

# No functions of Python's own: each call goes through most of them, with cold caches.
_WRITERS: Final[dict[type, tuple[Callable[[Any], bytes | None], int]]] = {
    # As text, a value would end at its first zero byte; in binary, the server refuses that byte.
    str: (str.encode, _BINARY),
    bytes: (bytes, _BINARY),
    UUID: (attrgetter("bytes"), _BINARY),
    bool: ({True: b"t", False: b"f"}.__getitem__, _TEXT),
    int: (b"%d".__mod__, _TEXT),
    float: (Struct("!d").pack, _BINARY),  # where a statement takes one, it says ::float8
    type(None): ({None: None}.__getitem__, _TEXT),
}

_ELEMENTS: Final[dict[type, tuple[int, Callable[[Any], bytes]]]] = {
    bytes: (17, bytes),
    str: (25, str.encode),
    int: (20, Struct("!q").pack),
    float: (701, Struct("!d").pack),
    bool: (16, Struct("!?").pack),
}
"""What the arrays of a batch hold: the number of its type in PostgreSQL, and how it is written."""

_ARRAY_HEAD: Final = Struct("!iiIii").pack
_LENGTH: Final = Struct("!i").pack
_NULL: Final = _LENGTH(-1)


class Array(NamedTuple):
    """The type of a list: that of its elements, None if there are none but None."""

    elements: type | None


def _type_of(value: object) -> type | Array:
    if not isinstance(value, list):
        return type(value)
    return Array(next((type(element) for element in value if element is not None), None))


def _array_writer(elements: type) -> Callable[[list[Any]], bytes]:
    oid, write = _ELEMENTS[elements]

    def write_array(values: list[Any]) -> bytes:
        parts = [_ARRAY_HEAD(1, None in values, oid, len(values), 1)]
        for value in values:
            if value is None:
                parts.append(_NULL)
            else:
                data = write(value)
                parts += (_LENGTH(len(data)), data)
        return b"".join(parts)

    return write_array


def _write_nulls(values: list[None]) -> bytes:
    return b"{%s}" % b",".join([b"NULL"] * len(values))  # as text it may be of any type


def _writer(kind: type | Array) -> tuple[Callable[[Any], bytes | None], int] | None:
    if not isinstance(kind, Array):
        return _WRITERS.get(kind)
    if kind.elements is None:
        return _write_nulls, _TEXT
    return (_array_writer(kind.elements), _BINARY) if kind.elements in _ELEMENTS else None


class _Writing(NamedTuple):
    """How to write values of certain types, one after the other."""

    writers: tuple[Callable[[Any], bytes | None], ...]
    formats: list[int]
    """A list: psycopg 3.2 takes nothing else."""


@lru_cache(maxsize=256)
def _writing(*types: type | Array) -> _Writing | None:
    """Find out how to write them; None = that is psycopg's business."""
    found = [writer for kind in types if (writer := _writer(kind)) is not None]
    if not found or len(found) < len(types):
        return None
    return _Writing(tuple(write for write, _ in found), [form for _, form in found])


class PreparedSession(OwnPsycopgSession):
    """A connection whose statements are prepared when they are first sent.

    A cursor looks its statement up, counts how often it was sent, finds out how to write each value
    and describes each column of the answer. semel's statements are few and their values of seven
    types, so a session prepares each statement once, writes the values itself and lets psycopg read
    the answer. What has values of other types, or none, goes through a cursor.
    """

    def __init__(self, connection: BoundedConnection) -> None:
        super().__init__(connection)
        self._pgconn = connection.pgconn
        self._names: dict[str, bytes] = {}
        self._numbers = count()
        self._reader = Transformer(connection)
        self._incoming = _polling(self._pgconn.socket, select.POLLIN)
        self._either = _polling(self._pgconn.socket, select.POLLIN | select.POLLOUT)

    def execute(self, statement: Statement) -> Reply:
        parameters = statement.parameters
        types: tuple[type | Array, ...] = tuple(map(type, parameters))
        if list in types:
            types = tuple(map(_type_of, parameters))
        writing = _writing(*types)
        if writing is None:
            return super().execute(statement)
        values = [write(value) for write, value in zip(writing.writers, parameters, strict=True)]
        name = self._names.get(statement.sql) or self._prepare(statement.sql)
        self._pgconn.send_query_prepared(name, values, writing.formats, _BINARY)
        result = self._wait()
        reader = self._reader
        reader.set_pgresult(result)
        rows = reader.load_rows(0, result.ntuples, tuple) if result.nfields else []
        return Reply(rows, result.command_tuples or 0)

    def _prepare(self, sql: str) -> bytes:
        # No number comes twice: after an exception of a signal handler the server may know a
        # statement that is not noted here. The rest tells which statement it is: behind a pooler,
        # another program's must never be taken for it.
        name = b"semel_%d_%08x" % (next(self._numbers), crc32(sql.encode()))
        self._pgconn.send_prepare(name, sql.encode())
        self._wait()
        self._names[sql] = name
        return name

    def _wait(self) -> PGresult:
        """Wait for the answer, until the deadline; an error that the server answers is raised."""
        pgconn = self._pgconn
        while pgconn.flush():  # a large value leaves in parts
            if self._ready(self._either) & select.POLLIN:
                pgconn.consume_input()
        result = self._next_result()
        if result is None:
            raise psycopg.OperationalError(pgconn.get_error_message())
        while (rest := self._next_result()) is not None:
            # The rows come before the commit: if that fails, an error follows them.
            if result.status != ExecStatus.FATAL_ERROR:
                result = rest
        if result.status == ExecStatus.FATAL_ERROR:
            raise _error_of(result)
        return result

    def _next_result(self) -> PGresult | None:
        """Wait for the next part of an answer; None = it has ended."""
        while self._pgconn.is_busy():
            self._ready(self._incoming)
            self._pgconn.consume_input()
        return self._pgconn.get_result()

    def _ready(self, poll: select.poll) -> int:
        left = min(max(0.0, self.bounded.deadline - time.monotonic()), _LONGEST_WAIT)
        for _, event in poll.poll(left * 1000):
            return event
        raise TimeIsUp("the server has not answered")


def _error_of(result: PGresult) -> psycopg.Error:
    if result.error_field(DiagnosticField.SQLSTATE) is None:  # libpq's own: the connection broke
        return psycopg.OperationalError(result.get_error_message())
    return psycopg.errors.error_from_result(result)


def _polling(socket: int, events: int) -> select.poll:
    poll = select.poll()
    poll.register(socket, events)
    return poll


def connect_prepared(settings: Settings, deadline: Deadline) -> OwnPsycopgSession:
    """Open a connection; one that cannot be quick (behind a bouncer) is a usual one."""
    session = connect(settings, deadline)
    if settings.prepare and hasattr(select, "poll"):
        return PreparedSession(session.bounded)
    return session


# --- which driver serves: `tasks` has two -------------------------------------------------------


def connect_for(
    own: Settings,  # noqa: ARG001 - as for asyncio
    columns: OwnColumns | None,
) -> Callable[[Settings, Deadline], OwnPsycopgSession]:
    """Return what opens a connection."""
    # Values of the application's types have to be written by psycopg.
    return connect if columns else connect_prepared


def source_of(given: Any, of_psycopg: Callable[[Any], Source]) -> Source:
    """Return what takes connections from what the application gave."""
    return of_psycopg(given)
