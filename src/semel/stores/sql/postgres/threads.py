"""A store for threads: psycopg's connections, without its cursors.

A cursor looks its statement up, counts how often it was sent, finds out how to write each value
and describes each column of the answer. semel's statements are few and their values of seven
types, so a session prepares each statement once, writes the values itself and lets psycopg read
the answer. What has values of other types, or none, goes through a cursor.
"""

from __future__ import annotations

import select
from collections.abc import Callable
from functools import lru_cache
from itertools import count
from operator import attrgetter
from struct import Struct
from time import monotonic
from typing import Any, Final, NamedTuple, TypeAlias
from uuid import UUID
from zlib import crc32

import psycopg
from psycopg.adapt import Transformer
from psycopg.pq import DiagnosticField, ExecStatus
from psycopg.pq.abc import PGresult
from psycopg_pool import ConnectionPool

from semel.stores.sql.errors import Deadline
from semel.stores.sql.postgres.errors import TimeIsUp
from semel.stores.sql.postgres.psycopg_sessions import (
    BoundedConnection,
    Connection,
    OwnPsycopgSession,
    connect,
)
from semel.stores.sql.postgres.settings import Settings
from semel.stores.sql.verbs import OwnColumns, Reply, Statement

__all__ = ["SOURCES", "Connection", "Pool", "PreparedSession", "connect_for", "connect_prepared"]

Pool: TypeAlias = ConnectionPool[Any]

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


class _Writing(NamedTuple):
    """How to write values of certain types, one after the other."""

    writers: tuple[Callable[[Any], bytes | None], ...]
    formats: list[int]
    """A list: psycopg 3.2 takes nothing else."""


@lru_cache(maxsize=256)
def _writing(*types: type) -> _Writing | None:
    """Find out how to write them; None = that is psycopg's business."""
    if not types or not _WRITERS.keys() >= set(types):
        return None
    return _Writing(
        tuple(_WRITERS[kind][0] for kind in types), [_WRITERS[kind][1] for kind in types]
    )


class PreparedSession(OwnPsycopgSession):
    """A connection whose statements are prepared when they are first sent."""

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
        writing = _writing(*map(type, parameters))
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
        while pgconn.is_busy():
            self._ready(self._incoming)
            pgconn.consume_input()
        result = pgconn.get_result()
        if result is None:
            raise psycopg.OperationalError(pgconn.get_error_message())
        while pgconn.get_result() is not None:  # the end of the answer
            pass
        if result.status == ExecStatus.FATAL_ERROR:
            raise _error_of(result)
        return result

    def _ready(self, poll: select.poll) -> int:
        left = min(max(0.0, self.bounded.deadline - monotonic()), _LONGEST_WAIT)
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


SOURCES: Final[tuple[tuple[Any, Callable[[Any], Any]], ...]] = ()
"""What takes connections of another driver than psycopg: there is none."""
