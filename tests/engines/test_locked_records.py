"""A record that an open transaction has is busy: the store is there, and says so."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from urllib.parse import unquote, urlsplit

import psycopg
import pymysql
import pytest

from semel import ConcurrentRequest, Idempotency, Policy, StoreUnavailable, WaitTimeout


@pytest.mark.parametrize(
    ("policy", "refusal"),
    [
        (Policy(store_error="open", concurrent="reject"), ConcurrentRequest),
        (Policy(store_error="open", wait_timeout=0.1), WaitTimeout),
    ],
)
def test_a_call_beside_an_open_transaction_never_runs_without_the_store(
    postgres_url, policy, refusal
):
    ran = []
    # The server waits for the lock for four fifths of it; the rest is for a machine that is busy.
    with Idempotency(postgres_url, policy=Policy(store_timeout=5.0)) as idem:
        idem.execute("warm", lambda: None)
        with psycopg.connect(postgres_url) as connection, connection.transaction():
            with idem.transaction(connection, "k") as attempt:
                attempt.result = "in the transaction"
            with pytest.raises(refusal):
                idem.execute("k", lambda: ran.append("beside"), policy=policy)
        assert not ran
        assert idem.execute("k", lambda: ran.append("after")) == "in the transaction"
    assert not ran


def test_a_record_that_a_transaction_of_mysql_has_is_busy_too(mysql_url):
    place = urlsplit(mysql_url)
    login = {"user": unquote(place.username), "password": unquote(place.password or "")}
    connection = pymysql.connect(
        host=place.hostname, port=place.port, database=place.path[1:], **login
    )
    with Idempotency(mysql_url, policy=Policy(store_timeout=2.0)) as idem, closing(connection):
        idem.execute("warm", lambda: None)
        connection.begin()
        with idem.transaction(connection, "k") as attempt:
            attempt.result = "in the transaction"
        with pytest.raises(ConcurrentRequest):
            idem.execute("k", lambda: "beside", policy=Policy(concurrent="reject"))
        connection.commit()
        assert idem.execute("k", lambda: "after") == "in the transaction"


@pytest.mark.parametrize("key", ["k", "another"])
def test_on_sqlite_a_call_waits_for_the_file_and_not_for_the_key(sqlite_url, key):
    path = sqlite_url.removeprefix("sqlite:///")
    hasty = Policy(store_timeout=0.2, concurrent="reject")
    with Idempotency(sqlite_url, policy=hasty) as idem:
        idem.execute("warm", lambda: None)
        with closing(sqlite3.connect(path, isolation_level=None)) as connection:
            connection.execute("BEGIN IMMEDIATE")
            with idem.transaction(connection, "k") as attempt:
                attempt.result = "in the transaction"
            with pytest.raises(StoreUnavailable):
                idem.execute(key, lambda: "beside")
