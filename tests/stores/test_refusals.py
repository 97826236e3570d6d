"""A store that does not let us in says so, and that a retry does not help; one that is away does."""

from __future__ import annotations

import contextlib
from urllib.parse import urlsplit

import psycopg
import pytest

from semel import open_async_store, open_store
from semel.core.records import Identity
from semel.errors import ConfigError, StoreRefused, StoreUnavailable
from semel.stores.sql.mysql import errors as mysql
from semel.stores.sql.postgres.errors import is_hopeless, translate
from semel.testing import StoreDriver
from servers.postgres import CAREFUL
from servers.redis import redis_server

IDENTITY = Identity("orders", "1")


@pytest.fixture(params=[open_store, open_async_store])
def refused(request):
    """The error of the first call on a URL."""

    def ask(url: str, **options):
        with (
            contextlib.closing(StoreDriver(request.param(url, **options))) as store,
            pytest.raises((StoreUnavailable, ConfigError)) as caught,
        ):
            store.get(IDENTITY)
        return caught.value

    return ask


def test_redis(refused):
    with redis_server(password="right") as server:
        wrong = refused(f"redis://:wrong@127.0.0.1:{server.port}")
        missing = refused(f"redis://:right@127.0.0.1:{server.port}/99")
        with server.client() as client:
            client.acl_setuser("guest", enabled=True, passwords=["+pw"], keys=["*"])
        not_permitted = refused(f"redis://guest:pw@127.0.0.1:{server.port}")
    for error in (wrong, missing, not_permitted):
        assert type(error) is StoreRefused
        assert error.retry_helps is False
    assert refused(f"redis://:right@127.0.0.1:{server.port}").retry_helps is True  # it is down now


def test_postgresql(refused, postgres_of_this_worker, postgres_url):
    server = postgres_of_this_worker
    server.run(f"DROP ROLE IF EXISTS {CAREFUL}")
    server.run(f"CREATE ROLE {CAREFUL} LOGIN PASSWORD 'right'")
    server.run("DROP ROLE IF EXISTS nologin")
    server.run("CREATE ROLE nologin NOLOGIN")
    try:
        errors = [
            refused(server.url("postgres", user=f"{CAREFUL}:wrong")),
            refused(server.url("no_such_database")),
            refused(server.url("postgres", user="no_such_user")),
            refused(server.url("postgres", user="nologin")),
        ]
    finally:
        server.run(f"DROP ROLE {CAREFUL}")
        server.run("DROP ROLE nologin")
    assert {type(error) for error in errors} == {StoreRefused}
    assert {error.retry_helps for error in errors} == {False}
    missing = refused(postgres_url, autocreate=False)
    assert isinstance(missing, ConfigError)
    assert missing.retry_helps is False
    assert refused("postgresql://127.0.0.1:1/db").retry_helps is True


def test_mysql(refused, mariadb_of_this_worker, mysql_url):
    server, database = mariadb_of_this_worker, urlsplit(mysql_url).path[1:]
    errors = [
        refused(server.url(database, password="wrong")),
        refused(server.url("no_such_database", user="root", password="")),
        refused(server.url("mysql", user=database)),
    ]
    assert {type(error) for error in errors} == {StoreRefused}
    assert {error.retry_helps for error in errors} == {False}
    missing = refused(mysql_url, autocreate=False)
    assert isinstance(missing, ConfigError)
    assert missing.retry_helps is False
    assert refused("mysql://user:secret@127.0.0.1:1/db").retry_helps is True


@pytest.mark.parametrize(
    "said",
    [
        "SSL connection has been closed unexpectedly",
        "SSL SYSCALL error: EOF detected",
        "FATAL:  canceling authentication due to timeout",
        "FATAL:  sorry, too many clients already",
    ],
)
def test_a_connection_that_was_lost_or_not_to_be_had_is_worth_another_try(said):
    error = psycopg.OperationalError(said)
    assert type(translate(error, "the database")) is StoreUnavailable
    assert not is_hopeless(error)


def test_every_refusal_of_mysql_concerns_all_statements():
    assert set(mysql._REFUSED) < set(mysql._NO_ENTRY)
