"""What the MySQL tests ask for: requests with the parts that do not matter filled in, and spies."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

from semel.core.records import ClaimRequest, Encoded, Identity
from semel.stores.sql.errors import Deadline
from semel.stores.sql.mysql import AsyncMySQLStore, MySQLStore
from semel.stores.sql.mysql.errors import code_of
from semel.stores.sql.mysql.statements import MySQLTable
from semel.stores.sql.mysql.threads import send
from semel.stores.urls import DEFAULT_PREFIX
from semel.testing import StoreDriver

IDENTITY = Identity("orders.create", "42")
RESULT = Encoded("json", b'{"id": 42}')
TABLE = MySQLTable("idempotent_record", DEFAULT_PREFIX, {})
KINDS = {"threads": MySQLStore, "asyncio": AsyncMySQLStore}

DEADLOCK, LOCK_TIMEOUT = 1213, 1205


def new_owner() -> bytes:
    return os.urandom(12)


def ask(identity=IDENTITY, owner=None, *, fingerprint=None, lease=30.0, ttl=600.0, **more):
    return ClaimRequest(identity, owner or new_owner(), fingerprint, lease, ttl, **more)


def write_as_owner(store, verb, request):
    """Complete, fail or renew what was claimed."""
    named = request.identity, request.owner
    if verb == "complete":
        return store.complete(*named, RESULT, 60)
    if verb == "renew":
        return store.renew(*named, 600)
    return store.fail(*named, RESULT, retryable=True, keep_fingerprint=True, ttl=60)


def is_bulk(sent):
    """Whether a client sent the rows of a prepared statement (COM_STMT_BULK_EXECUTE)."""
    return sent[4:5] == b"\xfa"


def database_of(url):
    return urlsplit(url).path[1:]


def through(proxy, url):
    """The same database, reached through a proxy."""
    parts = urlsplit(url)
    return url.replace(f":{parts.port}/", f":{proxy.port}/")


@contextlib.contextmanager
def driven(kind, *args, **options):
    """A store of either kind behind plain calls, closed in the end."""
    driver = StoreDriver(KINDS[kind](*args, **options))
    try:
        yield driver
    finally:
        driver.close()


@contextlib.contextmanager
def transaction(server, url):
    """A connection with a transaction open; rolled back unless the test commits."""
    with contextlib.closing(server.client(database=database_of(url), autocommit=False)) as client:
        yield client


def claim_in(client, request):
    """Insert a claim in the client's own transaction, as the store would."""
    return send(client, TABLE.claim(request))


def at_once(calls):
    """Start all calls at the same moment in threads; gives their futures."""
    ready = threading.Barrier(len(calls))

    def run(call):
        ready.wait()
        return call()

    threads = ThreadPoolExecutor(len(calls))
    futures = [threads.submit(run, call) for call in calls]
    threads.shutdown(wait=False)
    return futures


def wait_until(condition, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


def waiting_for_a_lock(server):
    """How many statements wait for a row now."""
    time.sleep(0.11)  # the server looks anew only when nobody has asked for a tenth of a second
    (row,) = server.execute(
        "SELECT count(*) FROM information_schema.innodb_trx WHERE trx_state = 'LOCK WAIT'"
    )
    return row[0]


def spy_on_repeats(monkeypatch):
    """Collects the codes of the errors after which a statement was sent again."""
    repeated = []
    pause_after = Deadline.pause_after

    def spying(self, error, repeat):
        pause = pause_after(self, error, repeat)
        if pause is not None:
            repeated.append(code_of(error))
        return pause

    monkeypatch.setattr(Deadline, "pause_after", spying)
    return repeated
