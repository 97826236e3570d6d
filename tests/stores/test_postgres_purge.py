"""Purging on PostgreSQL: along an index, and without waiting for a disk or a replica."""

from __future__ import annotations

import time

import pytest

from semel.errors import StoreUnavailable
from semel.stores.sql.postgres import PostgresStore
from semel.stores.sql.postgres.verbs import Statements
from servers.postgres import postgres_server
from stores.postgres_given import driven, rows
from stores.sqlite_helpers import ask, finish, wait_until

kinds = pytest.mark.parametrize("kind", ["threads", "asyncio"])


@pytest.fixture(scope="module")
def server():
    """A server of this file's own, which is told to wait for replicas that are not there."""
    with postgres_server() as running:
        yield running


@kinds
def test_a_purge_waits_for_no_replica_and_leaves_the_next_claim_durable(server, kind):
    """Commits wait for a replica that is away, which shows who waits for durability and who not."""
    with driven(kind, server.fresh_database(), timeout=2.0, max_size=1) as store:
        for key in range(3):
            finish(store, key, ttl=0.01)
        store.claim(ask("free"))
        store.renew(ask("free").identity, ask("free").owner, 0.0)
        time.sleep(0.05)
        replicas(server, "'*'")
        try:
            wait_until(lambda: commits_wait(store))
            assert store.purge(abandoned_after=0.0) == 4
            with pytest.raises(StoreUnavailable):
                store.claim(ask("a new key"))
        finally:
            replicas(server, "''")


def commits_wait(store):
    """Whether the server has begun to wait for replicas: told to, it does so a moment later."""
    try:
        store.claim(ask(time.monotonic_ns()))
    except StoreUnavailable:
        return True
    return False


def replicas(server, names):
    server.run(f"ALTER SYSTEM SET synchronous_standby_names = {names}")
    server.run("SELECT pg_reload_conf()")


@pytest.mark.parametrize(
    ("purge", "index"),
    [("purge_expired", "_expiry"), ("purge_audit", "_expiry"), ("purge_abandoned", "_lease")],
)
def test_a_purge_follows_its_index_even_if_every_record_may_go(postgres_url, purge, index):
    store = PostgresStore(postgres_url)
    finish(store, "k", ttl=0.01)
    store.claim(ask("free"))
    store.close()
    many = (
        "INSERT INTO idempotent_record SELECT (jsonb_populate_record(r, jsonb_build_object("
        "'digest', md5(r.idem_key || n)::uuid, 'idem_key', r.idem_key || n))).* "
        "FROM idempotent_record AS r, generate_series(1, 2000) AS n"
    )
    rows(postgres_url, many)
    rows(postgres_url, "ANALYZE idempotent_record")
    statement = getattr(Statements("idempotent_record", ()), purge)
    sql = statement(prefix="idem:", limit=10, since=0.0).sql
    values = {"$1": "'idem:'", "$2": "0" if "$3" in sql else "10", "$3": "10"}
    for place, value in values.items():
        sql = sql.replace(place, value)
    plan = str(rows(postgres_url, f"EXPLAIN {sql}"))
    assert f"idempotent_record{index}" in plan
    assert "Seq Scan" not in plan
