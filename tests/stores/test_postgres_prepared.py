"""The way under psycopg's cursors: prepared once, values of every type and size, errors and ends."""

from __future__ import annotations

import datetime as dt
import select
import threading
from contextlib import closing
from uuid import uuid4

import psycopg
import pytest
from psycopg.pq import ExecStatus

from semel.core.records import Claimed, Encoded, Finished
from semel.errors import ConfigError, StoreError
from semel.stores.sql.errors import Deadline
from semel.stores.sql.postgres import PostgresStore, threads
from semel.stores.sql.postgres.threads import OwnPsycopgSession, PreparedSession
from semel.stores.sql.verbs import Reply, Statement
from servers.proxy import proxy_to
from stores.postgres_given import migrate, rows
from stores.sqlite_helpers import RESULT, ask, finish, identity

OWNER = b"owner-------"


@pytest.fixture
def session(postgres_url):
    with (
        closing(PostgresStore(postgres_url)) as store,
        store._calls.pool.lend(Deadline(60.0)) as lent,
    ):
        yield lent


def question(sql, *values):
    return Statement(sql, values, writes=False)


def kind_of_session(store):
    with store._calls.pool.lend(Deadline(60.0)) as lent:
        return type(lent)


def test_values_of_every_type_come_back_as_they_went(session):
    assert isinstance(session, PreparedSession)
    values = ("grün", b"\0\xff", uuid4(), True, False, -(2**40), 0.1, None)
    sql = (
        "SELECT $1::text, $2::bytea, $3::uuid, $4::boolean, $5::boolean, $6::bigint, $7::float8, "
        "$8::text"
    )
    for _ in range(2):
        assert session.execute(question(sql, *values)).rows == [values]


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("bytea", [b"\0\xff", None, b""]),
        ("text", ["grün", None, ""]),
        ("bigint", [-(2**40), None, 0]),
        ("float8", [0.1, None, float("inf")]),
        ("boolean", [True, None, False]),
        ("text", [None, None]),
        ("uuid", [uuid4(), uuid4()]),  # written by psycopg
    ],
)
def test_arrays_come_back_as_they_went(session, kind, values):
    for _ in range(2):
        found = session.execute(question(f"SELECT unnest($1::{kind}[])", values)).rows
        assert [value for (value,) in found] == values


def test_times_without_end_are_understood(session):
    sql = "SELECT $1::float8, $2::float8"
    assert session.execute(question(sql, float("inf"), 1e-300)).rows == [(float("inf"), 1e-300)]


def test_a_statement_is_prepared_once_and_has_a_name(session):
    for number in range(3):
        assert session.execute(question("SELECT $1::bigint", number)).rows == [(number,)]
    prepared = session.execute(question("SELECT name FROM pg_prepared_statements")).rows
    (name,) = [name for (name,) in prepared if name.startswith("semel_")]
    assert name.startswith("semel_0_")


def test_values_of_other_types_go_through_a_cursor(session):
    today = dt.date(2024, 2, 29)
    assert session.execute(question("SELECT $1::date", today)).rows == [(today,)]
    assert session.execute(question("SELECT $1::bigint[]", [1, 2])).rows == [([1, 2],)]


def test_what_is_changed_is_counted(session):
    session.execute(Statement("CREATE TABLE t (n bigint)", (), writes=True))
    insert = Statement("INSERT INTO t SELECT generate_series(1, $1::bigint)", (5,), writes=True)
    assert session.execute(insert) == Reply([], 5)
    delete = Statement("DELETE FROM t WHERE n > $1 RETURNING n", (3,), writes=True)
    assert session.execute(delete).changed == 2
    nothing = Statement("SELECT FROM t WHERE n = $1", (99,), writes=False)
    assert session.execute(nothing).rows == []


def test_an_error_of_the_server_is_psycopgs_and_leaves_the_session_usable(session):
    divide = question("SELECT 1 / $1::bigint", 0)
    with pytest.raises(psycopg.errors.DivisionByZero) as told:
        session.execute(divide)
    assert told.value.diag.message_primary == "division by zero"
    assert session.idle
    with pytest.raises(psycopg.errors.UndefinedTable):
        session.execute(question("SELECT $1::text FROM nowhere", "x"))
    assert session.execute(question("SELECT 1 / $1::bigint", 1)).rows == [(1,)]


def test_large_values_leave_and_arrive_whole(postgres_url):
    large = Encoded("json", bytes(range(256)) * (16 * 4096))  # 16 MiB, more than any buffer
    with closing(PostgresStore(postgres_url, timeout=60)) as store:
        store.claim(ask("k"))
        assert store.complete(identity("k"), OWNER, large, 60.0)
        assert store.claim(ask("k", b"duplicate---")).outcome == large


def test_an_answer_that_comes_while_a_large_value_leaves_is_read(session):
    """A server that answers before it has read everything must not wait for us, nor we for it."""
    padding = "x" * (8 << 20)
    sql = "SELECT repeat('y', 8000000), length($1::text)"
    [(echo, length)] = session.execute(question(sql, padding)).rows
    assert (len(echo), length) == (8_000_000, len(padding))


def test_a_zero_byte_is_refused_and_nothing_is_cut_off(postgres_url):
    with closing(PostgresStore(postgres_url)) as store:
        with pytest.raises(StoreError):
            store.claim(ask("key\0rest"))
        assert store.get(identity("key")) is None


def test_a_session_that_was_cut_is_not_used_again(postgres_url):
    with closing(PostgresStore(postgres_url, max_size=1)) as store:
        finish(store, "k")
        kill = (
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE datname = current_database() AND application_name = 'semel'"
        )
        rows(postgres_url, kill)
        assert isinstance(store.claim(ask("k", b"duplicate---")), Finished)


def test_a_connection_that_ends_in_the_middle_of_an_answer_is_lost(
    postgres_of_this_worker, postgres_url
):
    with proxy_to(postgres_of_this_worker.port) as proxy:
        through = postgres_url.replace(f":{postgres_of_this_worker.port}/", f":{proxy.port}/")
        with (
            closing(PostgresStore(through)) as store,
            store._calls.pool.lend(Deadline(60.0)) as session,
        ):
            session.execute(question("SELECT $1::bigint", 1))
            proxy.lose_reply(lambda _: True)
            with pytest.raises(psycopg.OperationalError):
                session.execute(question("SELECT $1::bigint", 2))
            assert not session.idle


class Slow:
    """Shows what libpq does while a large value leaves and the server already has something to say."""

    def __init__(self, told):
        self.told = told
        self.read = 0

    def flush(self):
        return 0 if self.read else 1

    def consume_input(self):
        self.read += 1

    def is_busy(self):
        return 0

    def get_result(self):
        return self.told.pop() if self.told else None


def test_what_the_server_says_while_a_large_value_leaves_is_read(session):
    class Answer:
        status = 2

    class AlwaysReady:
        def __init__(self, *events):
            self.events = list(events)

        def poll(self, _milliseconds):
            return [(0, self.events.pop(0))]

    answer = Answer()
    slow = session._pgconn = Slow([None, answer])
    session._either = AlwaysReady(select.POLLOUT, select.POLLIN)
    assert session._wait() is answer
    assert slow.read == 1
    assert session._either.events == []


class Unanswered:
    """What libpq shows when there is neither an answer nor an error."""

    def flush(self):
        return 0

    def is_busy(self):
        return 0

    def get_result(self):
        return None

    def get_error_message(self):
        return "no result"


def test_no_answer_at_all_is_a_lost_connection(session):
    session._pgconn = Unanswered()
    with pytest.raises(psycopg.OperationalError, match="no result"):
        session._wait()


class Failed:
    """An error as libpq shows it: the connection's, as it has no code."""

    status = ExecStatus.FATAL_ERROR

    def __init__(self, message):
        self.message = message

    def error_field(self, _):
        return None

    def get_error_message(self):
        return self.message


def test_of_two_errors_the_first_is_the_reason(session):
    answer = Slow([Failed("the connection broke, too"), Failed("the statement failed")])
    answer.read = 1  # all has left
    session._pgconn = answer
    with pytest.raises(psycopg.OperationalError, match="the statement failed"):
        session._wait()
    assert answer.told == []


def test_an_error_without_a_code_is_the_connections(session):
    class Broken:
        def error_field(self, _):
            return None

        def get_error_message(self):
            return "server closed the connection unexpectedly"

    assert type(threads._error_of(Broken())) is psycopg.OperationalError


def test_a_wait_ends_at_the_deadline(session):
    session.begin(Deadline(0.0))
    with pytest.raises(psycopg.OperationalError, match="not answered"):
        session.execute(question("SELECT pg_sleep($1)", 30.0))


# --- when it is not taken ----------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [{"prepare": "off"}, {"columns": {"tenant_id": len}}],
    ids=["a bouncer", "own columns"],
)
def test_what_cannot_be_quick_goes_through_cursors(postgres_url, options):
    migrate(postgres_url, tenant_id="bigint")
    with closing(PostgresStore(postgres_url, **options)) as store:
        assert kind_of_session(store) is OwnPsycopgSession
    with closing(PostgresStore(postgres_url)) as store:
        assert kind_of_session(store) is PreparedSession


def test_a_system_without_poll_goes_through_cursors(postgres_url, monkeypatch):
    monkeypatch.delattr(select, "poll")
    with closing(PostgresStore(postgres_url)) as store:
        assert kind_of_session(store) is OwnPsycopgSession
        assert isinstance(store.claim(ask("k")), Claimed)


# --- seats -------------------------------------------------------------------------------


def test_a_seat_is_left_when_no_connection_can_be_made(postgres_url):
    with closing(PostgresStore(postgres_url, max_size=1, timeout=0.3)) as store:
        source = store._calls.pool
        connect, source._connect = source._connect, fails
        for _ in range(3):
            with pytest.raises(ConfigError, match="not today"):
                store.counts()
        source._connect = connect
        store.counts()


def fails(_deadline):
    raise psycopg.ProgrammingError("not today")


def test_threads_wait_for_a_seat_in_turn(postgres_url):
    with closing(PostgresStore(postgres_url, max_size=1, timeout=60)) as store:
        store.claim(ask("k"))
        answers = []
        with store._calls.pool.lend(Deadline(60.0)):
            thread = threading.Thread(
                target=lambda: answers.append(store.complete(identity("k"), OWNER, RESULT, 60.0))
            )
            thread.start()
            assert answers == []
        thread.join(60)
        assert answers == [True]
