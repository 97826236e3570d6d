# Generated from stores/sql/mysql/aio.py by `make generate`: change that file instead.
"""The MySQL store for threads, on PyMySQL: its pools, what runs its operations, its connections.

A store has three pools of connections: for calls, for batches and for renewals. On those of batches
and renewals nothing waits for a lock: what an open transaction has is asked for alone, so that the
others go on. What each driver does in its own way is in its own module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, TypeVar, Unpack

from semel.stores.sql.errors import Deadline
from semel.stores.sql.mysql import errors, threads
from semel.stores.sql.mysql.addresses import Options, SessionSettings, lock_wait, set_up
from semel.stores.sql.mysql.errors import (
    LARGEST_MESSAGE,
    LOCKED,
    PROBE,
    OutOfSync,
    check_size,
    code_of,
    is_lost,
    least_time,
    message_size,
    statement_time,
)
from semel.stores.sql.mysql.statements import MySQLTable
from semel.stores.sql.mysql.verbs import MOST_BYTES, MySQLVerbs
from semel.stores.sql.schema import MySQLSchema
from semel.stores.sql.store import Executor, Pool, ServerStore, Session, drive
from semel.stores.sql.verbs import Reply, Statement, Verb
from semel.stores.urls import DEFAULT_PREFIX, DEFAULT_TIMEOUT

T = TypeVar("T")

BATCH_CONNECTIONS: Final = 4
"""Two for claims and two for completes: as many batches of each are out at a time, at most."""

RENEWAL_CONNECTIONS: Final = 1


def open_store(url: str, *, prefix: str, timeout: float, **options: Any) -> MySQLStore:
    """Open a store for threads; the first call connects."""
    return MySQLStore(url, prefix=prefix, timeout=timeout, **options)


class MySQLStore(ServerStore):
    """A store for threads, with a small pool of connections.

    It takes a URL, or `connect=`, a function that opens a PyMySQL connection; what it
    opens is the store's own from then on. Stores with different prefixes may share a table and
    never see each other's records.
    """

    dialect = "mysql"

    def __init__(
        self,
        url: str | None = None,
        *,
        connect: threads.Connect | None = None,
        prefix: str = DEFAULT_PREFIX,
        timeout: float = DEFAULT_TIMEOUT,
        **options: Unpack[Options],
    ) -> None:
        setup = set_up(url, connect, threads.connector, timeout, **options)
        self.table = MySQLTable(setup.table, prefix, setup.columns)
        self.database = setup.database
        self._verbs = MySQLVerbs(self.table, in_bulk=threads.SENDS_BULK)
        schema = MySQLSchema(self.table.name, lock_wait(setup.timeout), autocreate=setup.autocreate)

        def pool(size: int, *, waits_for_locks: bool = False) -> Pool:
            session_settings = SessionSettings(setup.timeout, waits_for_locks=waits_for_locks)
            least = least_time(setup.timeout, waits_for_locks=waits_for_locks)
            opened = partial(open_session, setup.connect, setup.place, session_settings, least)
            return Pool(opened, errors, setup.place, max_size=size, closes_anywhere=True)

        calls = pool(setup.max_size, waits_for_locks=True)
        batches, renewals = pool(BATCH_CONNECTIONS), pool(RENEWAL_CONNECTIONS)
        # Not those of renewals: nothing else may keep them busy.
        calls.spares, batches.spares, renewals.spares = (batches,), (calls,), (calls, batches)
        super().__init__(
            self._verbs,
            MySQLExecutor(calls, schema, setup.timeout),
            MySQLExecutor(batches, schema, setup.timeout, waits_for_locks=False),
            MySQLExecutor(renewals, schema, setup.timeout, waits_for_locks=False),
            shares=setup.batching,
            most_bytes=MOST_BYTES,
        )

    def read_committed(self, start: Callable[[], Verb[T]]) -> T:
        """Run a verb that only reads, for a caller who has a transaction; makes no table."""

        def work(session: MySQLSession) -> T:
            return drive(session, start())

        return self._calls.repeated(work, self._calls.deadline())

    def diagnose(self) -> list[str]:
        """Return what the server's settings put at risk."""
        return self._calls.run_one(self._verbs.diagnose())


class MySQLExecutor(Executor):
    """Runs operations on the connections of a pool."""

    schema: MySQLSchema
    rules = errors

    def migrate(self, columns: Mapping[str, str]) -> int:
        """Make the table or bring it up to date."""

        def work(session: MySQLSession) -> int:
            return alone(session, self.schema.migrate(columns))

        return self.repeated(work, self.deadline())

    def prepare(self, deadline: Deadline) -> None:
        """Look whether the table is there, and make it if that is wanted."""
        with self.pool.lend(deadline) as session:
            alone(session, self.schema.ensure())


def alone(session: MySQLSession, verb: Verb[T]) -> T:
    """Run a verb that takes a lock of the server, which ends with the connection."""
    try:
        return drive(session, verb)
    except BaseException:
        session.lost = True
        raise


class MySQLSession(Session):
    """A connection to the server."""

    idle_since = float("inf")
    slot: object = None
    dead = False
    """It is not looked at before it is used: a statement that finds it so is sent again."""

    def __init__(self, connection: threads.Connection, place: str, least: float) -> None:
        """`least`: seconds that every statement may take."""
        self.connection = connection
        self.lost = False
        self._place = place
        self._least = least
        self._sender = threads.Sender(connection)

    def begin(self, deadline: Deadline) -> None:
        """Serve a call."""
        self._deadline = deadline

    @property
    def idle(self) -> bool:
        """Whether it may be used again."""
        return not self.lost

    def execute(self, statement: Statement) -> Reply:
        """Send a statement; one on which a connection was lost only if the server can take it."""
        size, self._deadline.bytes_lost = self._deadline.bytes_lost, 0
        if size:
            check_size(size, self._send(LARGEST_MESSAGE), self._place)
        return self._send(statement)

    def _send(self, statement: Statement) -> Reply:
        try:
            return self._sender.send(statement, statement_time(self._deadline, self._least))
        except BaseException as error:
            if code_of(error) == LOCKED:
                if not statement.writes:
                    raise OutOfSync(f"{self._place} is behind its cluster, or out of it") from None
                self._send(PROBE)
            if is_lost(error):
                self._deadline.bytes_lost = message_size(self.connection, statement)
            # Cancelled or lost: what comes next on it may be an old answer.
            self.lost = self.lost or code_of(error) is None or is_lost(error)
            raise

    def close(self) -> None:
        """Close it, and tell the server if the connection still works."""
        if self.lost:
            threads.close(self.connection)
        else:
            self.lost = True
            threads.ensure_closed(self.connection)


def open_session(
    connect: threads.Connect,
    place: str,
    session_settings: SessionSettings,
    least: float,
    deadline: Deadline,
) -> MySQLSession:
    """Open a connection and set it up, in the time of a call."""
    connection = threads.open_connection(connect, session_settings, deadline.left)
    return MySQLSession(connection, place, least)
