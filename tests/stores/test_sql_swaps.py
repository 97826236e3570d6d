"""Between the look at a row and the write over it, on the servers that many programs write to.

A claim is taken step by step, and the row is changed behind its back.
"""

from __future__ import annotations

import contextlib

import psycopg
import pytest

from semel.core.records import Busy, Claimed, Finished, PutRequest
from semel.stores.sql.mysql import MySQLStore
from semel.stores.sql.mysql.threads import send
from semel.stores.sql.mysql.verbs import MySQLVerbs
from semel.stores.sql.postgres import PostgresStore
from semel.stores.sql.postgres.threads import execute
from semel.stores.sql.postgres.verbs import PostgresVerbs
from semel.stores.urls import DEFAULT_PREFIX
from stores.mysql_given import IDENTITY, RESULT, TABLE, ask, database_of, new_owner

DATABASES = ["mysql", "postgres"]

CHANGES = {
    "fence": "fence = fence + 1",
    "status": "status = 1",
    "lease": "lease_until = lease_until - INTERVAL '1' SECOND",
    "expiry": "expire_at = created_at + INTERVAL '1' DAY",
}
"""What another program may change, one column at a time."""


class ByHand:
    """One database: a store on it, its verbs, and a connection to take their steps on."""

    def __init__(self, store, verbs, run, change):
        self.store = store
        self.verbs = verbs
        self.run = run
        """Send one statement."""
        self.change = change
        """Change the row behind everybody's back."""

    def look(self, operation):
        """Begin, and stop before the write: gives the verb, and the statement that would write."""
        verb = operation.start()
        return verb, verb.send(self.run(next(verb)))

    def finish(self, verb, statement):
        """Send what is left; gives the answer."""
        while True:
            try:
                statement = verb.send(self.run(statement))
            except StopIteration as end:
                return end.value

    def abandoned(self):
        """Let somebody claim and be abandoned; gives the owner."""
        owner = new_owner()
        self.store.claim(ask(owner=owner))
        assert self.store.renew(IDENTITY, owner, 0)
        return owner


@contextlib.contextmanager
def on_mysql(request):
    server = request.getfixturevalue("mariadb_of_this_worker")
    url = request.getfixturevalue("mysql_url")
    with (
        contextlib.closing(MySQLStore(url)) as store,
        contextlib.closing(server.client(database=database_of(url), autocommit=True)) as client,
    ):
        yield ByHand(
            store,
            MySQLVerbs(TABLE),
            lambda statement: send(client, statement),
            lambda sql: server.execute(
                f"UPDATE idempotent_record SET {sql}",  # noqa: S608 - the test's own
                database=database_of(url),
            ),
        )


@contextlib.contextmanager
def on_postgres(request):
    url = request.getfixturevalue("postgres_url")
    with (
        contextlib.closing(PostgresStore(url)) as store,
        psycopg.connect(url, autocommit=True) as connection,
    ):
        store.counts()  # the table is there
        yield ByHand(
            store,
            PostgresVerbs(store._schema.table, DEFAULT_PREFIX, {}),
            lambda statement: execute(connection, statement),
            lambda sql: connection.execute(f"UPDATE idempotent_record SET {sql}"),  # noqa: S608 - the test's own
        )


@pytest.fixture(params=DATABASES)
def database(request):
    with {"mysql": on_mysql, "postgres": on_postgres}[request.param](request) as database:
        yield database


@pytest.mark.parametrize("changed", CHANGES)
def test_nothing_is_written_over_a_row_of_which_one_column_has_changed(database, changed):
    database.abandoned()
    _, write = database.look(database.verbs.claim(ask()))
    database.change(CHANGES[changed])
    assert database.run(write).changed == 0


def test_what_has_not_changed_is_written_over_once(database):
    database.abandoned()
    _, write = database.look(database.verbs.claim(ask()))
    assert [database.run(write).changed for _ in range(2)] == [1, 0]


def test_a_claim_is_not_written_over_an_attempt_that_its_owner_revived(database):
    anna = database.abandoned()
    look = database.look(database.verbs.claim(ask()))
    assert database.store.renew(IDENTITY, anna, 600.0)
    assert isinstance(database.finish(*look), Busy)
    assert database.store.get(IDENTITY).owner == anna


def test_a_claim_is_not_written_over_a_result_that_its_owner_stored(database):
    anna = database.abandoned()
    look = database.look(database.verbs.claim(ask()))
    assert database.store.complete(IDENTITY, anna, RESULT, 600.0)
    assert isinstance(database.finish(*look), Finished)
    assert database.store.get(IDENTITY).outcome == RESULT


def test_of_two_claims_that_looked_at_the_same_row_one_takes_over(database):
    database.abandoned()
    first, second = (database.look(database.verbs.claim(ask())) for _ in range(2))
    answers = [database.finish(*each) for each in (first, second)]
    assert [type(answer) for answer in answers] == [Claimed, Busy]
    assert database.store.get(IDENTITY).number == 2


def test_a_mark_is_not_written_over_an_attempt_that_its_owner_revived(database):
    anna = database.abandoned()
    look = database.look(database.verbs.put(PutRequest(IDENTITY, new_owner(), RESULT, 600.0)))
    assert database.store.renew(IDENTITY, anna, 600.0)
    assert database.finish(*look) is False
    assert database.store.get(IDENTITY).owner == anna
