"""Other clients have taken every connection that a server gives out.

| fault | expected |
|---|---|
| 51 max_connections taken by others | running attempts keep their leases on a connection that is already open |
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pymysql
import pytest
import redis

from engines.facade import PATIENCE, Driven, Effect, World, never, wait_until
from semel import ConcurrentRequest, Policy, StoreUnavailable, events, open_async_store, open_store
from semel.core.records import RenewRequest
from semel.stores.sql.errors import Deadline
from servers.mariadb import PASSWORD, mariadb_server
from servers.postgres import postgres_server
from servers.redis import redis_server
from stores.sqlite_helpers import RESULT, ask, identity

fault = pytest.mark.fault

LEASE = 6.0


class Crowded:
    """A server with few connections, and other clients that can take all of them."""

    def __init__(
        self,
        url: str,
        connect: Callable[[], Any],
        refusals: type[Exception],
        waiting: Callable[[], bool] = bool,
    ) -> None:
        self.url = url
        self.connect = connect
        self.waiting = waiting
        """Whether a statement waits for a lock."""
        self._refusals = refusals

    @contextlib.contextmanager
    def full(self) -> Iterator[None]:
        """Take every connection that is left, for the time of the block."""
        with contextlib.ExitStack() as taken:
            while (connection := self._connection()) is not None:
                taken.enter_context(contextlib.closing(connection))
            yield

    def _connection(self) -> Any:
        try:
            return self.connect()
        except self._refusals:  # the server gives no more
            return None


@contextlib.contextmanager
def postgres() -> Iterator[Crowded]:
    with postgres_server("max_connections=20") as server:
        server.run("CREATE ROLE clerk LOGIN")
        server.run("CREATE DATABASE shop OWNER clerk")
        url = server.url("shop", user="clerk")

        def waiting() -> bool:  # a superuser has connections of its own
            return server.run("SELECT count(*) FROM pg_locks WHERE NOT granted") != [(0,)]

        yield Crowded(url, lambda: psycopg.connect(url), psycopg.OperationalError, waiting)


@contextlib.contextmanager
def mariadb() -> Iterator[Crowded]:
    with (
        mariadb_server("--max-connections=20") as server,
        contextlib.closing(server.client()) as root,
        root.cursor() as cursor,
    ):
        url = server.database()
        user = url.rsplit("/", 1)[1]

        def connect() -> Any:
            return server.client(user=user, password=PASSWORD, database=user, autocommit=False)

        def waiting() -> bool:
            time.sleep(0.11)  # the server looks again only after a tenth of a second
            return cursor.execute("SELECT 1 FROM information_schema.innodb_lock_waits") > 0

        yield Crowded(url, connect, pymysql.OperationalError, waiting)


@contextlib.contextmanager
def redis_() -> Iterator[Crowded]:
    with redis_server(args=("--maxclients", "20")) as server:

        def connect() -> Any:
            client = redis.Redis.from_url(server.url, single_connection_client=True)
            client.ping()
            return client

        yield Crowded(server.url, connect, redis.exceptions.ConnectionError)


@pytest.fixture(params=[postgres, mariadb, redis_], ids=["postgres", "mysql", "redis"])
def crowded(request) -> Iterator[Crowded]:
    with request.param() as server:
        yield server


OWNER = b"owner-------"
LOCK_ROW = "SELECT * FROM idempotent_record WHERE idem_key = 'locked' FOR UPDATE"


@fault(51)
@pytest.mark.parametrize("server", [postgres, mariadb], ids=["postgres", "mysql"])
def test_a_renewal_waits_for_the_only_connection_while_a_call_uses_it(kind, server, monkeypatch):
    refused = spy_on_pauses(monkeypatch)
    opened = open_store if kind == "threads" else open_async_store
    with server() as crowded, World(kind, crowded.url) as world, ThreadPoolExecutor(2) as threads:
        store = opened(crowded.url, timeout=60, max_size=1)
        ask_store = world.kind.finish
        for key in ("k", "locked"):
            ask_store(store.claim, ask(key))
        with contextlib.closing(crowded.connect()) as holder, crowded.full():
            holder.cursor().execute(LOCK_ROW)
            saved = (identity("locked"), OWNER, RESULT, 60.0)
            saving = threads.submit(ask_store, store.complete, *saved)
            wait_until(crowded.waiting)
            renewal = RenewRequest(identity("k"), OWNER, 60.0)
            renewing = threads.submit(ask_store, store.send, [renewal])
            wait_until(lambda: refused or renewing.done())
            assert not renewing.done()
            holder.rollback()
            assert saving.result(PATIENCE) is True
            assert renewing.result(PATIENCE) == [True]
        ask_store(store.close)


@fault(51)
@pytest.mark.parametrize("server", [postgres, mariadb], ids=["postgres", "mysql"])
def test_without_any_open_connection_a_renewal_fails_and_says_why(kind, server):
    opened = open_store if kind == "threads" else open_async_store
    with server() as crowded, World(kind, crowded.url) as world, crowded.full():
        store = opened(crowded.url, timeout=1)
        renewal = RenewRequest(identity("k"), OWNER, 60.0)
        [answer] = world.kind.finish(store.send, [renewal])
        assert isinstance(answer, StoreUnavailable)
        assert "no connection left" in str(answer)
        world.kind.finish(store.close)


def spy_on_pauses(monkeypatch) -> list[Exception]:
    """List the errors after which a call is repeated."""
    met: list[Exception] = []

    pause_after = Deadline.pause_after

    def spying(self: Deadline, error: Exception, repeat: Any) -> Any:
        met.append(error)
        return pause_after(self, error, repeat)

    monkeypatch.setattr(Deadline, "pause_after", spying)
    return met


@fault(51)
def test_running_attempts_are_renewed_and_saved_on_a_connection_that_is_already_open(kind, crowded):
    with World(kind, crowded.url) as world:
        engine, other = world.engine(), world.engine()
        for each in (engine, other):
            each.execute("connected", Effect())
        effect = Effect().held()
        running = engine.start("k", effect, policy=Policy(lease=LEASE))
        effect.wait_started()
        claimed_until = until(other)
        with crowded.full():
            renewed = claimed_until + LEASE / 2
            wait_until(lambda: engine.told(events.LostLease) or until(other) > renewed)
            assert not engine.told(events.LostLease)
            with pytest.raises(ConcurrentRequest):
                other.execute("k", never, policy=Policy(concurrent="reject"))
            effect.release()
            assert running.result(PATIENCE) == "done"
            assert other.execute("k", never) == "done"
        assert effect.runs == 1


def until(engine: Driven) -> float:
    """When the lease of the running attempt ends, by the store's clock."""
    record = engine.peek("k")
    assert record is not None
    assert record.lease_until is not None
    return record.lease_until
