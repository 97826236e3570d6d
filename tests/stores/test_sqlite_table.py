"""The table in the file: its columns, its version, its prefixes, what each verb costs."""

from __future__ import annotations

import sqlite3
from contextlib import closing

import pytest

from semel.core.records import Busy, Claimed, ClaimRequest, Encoded, Finished, Identity, State
from semel.errors import ConfigError, RecordUnreadable, StoreError
from semel.stores.sql import sqlite
from semel.stores.sql.sqlite import SQLiteStore
from semel.testing import FakeClock
from stores.sqlite_helpers import RESULT, Statements, ask, finish, identity


@pytest.fixture
def path(tmp_path):
    return tmp_path / "semel.db"


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def store(path, clock):
    store = SQLiteStore(path, clock=clock)
    yield store
    store.close()


def query(path, sql, *values):
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        return connection.execute(sql, values).fetchall()


def test_the_table_has_the_columns_everybody_expects(store, path, clock):
    finish(store, "order:1", result=Encoded("json", b'"paid"'))
    now = round(clock() * 1_000_000)
    rows = query(
        path,
        "SELECT idem_key, biz_type, status, result_payload, expire_at, created_at, updated_at "
        "FROM idempotent_record",
    )
    assert rows == [("order:1", "orders", 1, b'"paid"', now + 60_000_000, now, now)]


def test_the_database_itself_refuses_a_second_row_for_a_key(store, path):
    finish(store, "order:1")
    with pytest.raises(sqlite3.IntegrityError, match="idem_key"):
        query(
            path,
            "INSERT INTO idempotent_record SELECT x'00', prefix, idem_key, biz_type, payload_hash, "
            "status, result_payload, expire_at, created_at, updated_at, codec, retryable, owner, "
            "number, fence, hold, lease_until, superseded, format FROM idempotent_record",
        )


@pytest.mark.parametrize(
    ("sql", "index"),
    [
        ("status = 0 AND prefix = 'x' AND lease_until <= 9 ORDER BY lease_until", "_lease"),
        ("expire_at <= 9 AND prefix = 'x'", "_expiry"),
        (
            "idem_key >= 'a' AND (idem_key, biz_type) > ('a', 'b') ORDER BY idem_key, biz_type",
            "_key",
        ),
    ],
)
def test_stuck_purge_and_scan_follow_an_index_and_never_sort(store, path, sql, index):
    store.counts()
    explain = "EXPLAIN QUERY PLAN SELECT * FROM idempotent_record WHERE "
    plan = str(query(path, explain + sql))
    assert f"idempotent_record{index}" in plan
    assert "TEMP B-TREE" not in plan


def test_first_execution_is_two_transactions_and_a_replay_is_one_read(path):
    statements = Statements()
    store = SQLiteStore(path, trace=statements)
    store.counts()
    statements.seen.clear()
    finish(store, 1)
    assert statements.seen["BEGIN"] == statements.seen["COMMIT"] == 2
    statements.seen.clear()
    assert isinstance(store.claim(ask(1, b"other")), Finished)
    assert statements.seen == {"SELECT": 1}
    store.close()


def test_a_batch_is_one_transaction(path):
    statements = Statements()
    store = SQLiteStore(path, trace=statements)
    assert all(isinstance(one, Claimed) for one in store.send([ask(n) for n in range(50)]))
    assert statements.seen["COMMIT"] == 1
    store.close()


def test_several_tables_live_in_one_file(path):
    orders, payments = SQLiteStore(path, table="orders"), SQLiteStore(path, table="payments")
    finish(orders, 1)
    assert isinstance(payments.claim(ask(1)), Claimed)
    assert query(path, "SELECT table_name, version FROM semel_schema ORDER BY 1") == [
        ("orders", 1),
        ("payments", 1),
    ]
    orders.close()
    payments.close()


def test_a_table_of_a_newer_version_is_refused(store, path):
    finish(store, 1)
    query(path, "UPDATE semel_schema SET version = 2")
    with pytest.raises(StoreError, match=r"made by a newer version of semel \(schema 2"):
        SQLiteStore(path).get(identity(1))


def test_a_record_of_a_newer_version_is_refused(store, path):
    finish(store, 1)
    query(path, "UPDATE idempotent_record SET format = 2")
    with pytest.raises(RecordUnreadable, match=r"written by a newer version of semel \(format 2"):
        store.claim(ask(1))


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE idempotent_record SET status = 7",
        "UPDATE idempotent_record SET superseded = x'ff'",
        "UPDATE idempotent_record SET created_at = 'soon'",
    ],
)
def test_a_damaged_row_is_named_as_such_without_showing_its_key(store, path, damage):
    finish(store, 1)
    query(path, damage)
    with pytest.raises(RecordUnreadable, match="row is damaged") as refused:
        store.claim(ask(1))
    assert str(refused.value).count("cannot be read") == 1
    assert identity(1).key not in str(refused.value)
    assert store.forget(identity(1)), "the way out that the error names"
    assert isinstance(store.claim(ask(1)), Claimed)


def test_somebody_elses_table_of_that_name_is_left_alone(path):
    query(path, "CREATE TABLE idempotent_record (x)")
    with pytest.raises(ConfigError, match="take another table name"):
        SQLiteStore(path).claim(ask(1))
    assert query(path, "SELECT name FROM sqlite_master") == [("idempotent_record",)]


def test_another_process_may_create_the_table_first(path, monkeypatch):
    with closing(SQLiteStore(path)) as faster:
        faster.counts()
    looks = iter([None])
    read_version = sqlite._version
    monkeypatch.setattr(
        sqlite, "_version", lambda *where: next(looks, "look") and read_version(*where)
    )
    with closing(SQLiteStore(path)) as slower:
        assert slower.counts().succeeded == 0


def test_a_digest_that_belongs_to_another_identity_is_an_error(store, path):
    finish(store, 1)
    query(path, "UPDATE idempotent_record SET idem_key = 'other'")
    with pytest.raises(StoreError, match=r"digest of .* is taken by") as refused:
        store.claim(ask(1))
    assert "other'" not in str(refused.value)
    assert identity(1).key not in str(refused.value)


@pytest.mark.parametrize(
    "name", ["", "1st", "a b", 'a"b', "a;b", "x" * 64, "sqlite_x", "semel_schema"]
)
def test_a_table_name_is_an_identifier(path, name):
    with pytest.raises(ConfigError, match="a table name is made of"):
        SQLiteStore(path, table=name)


def test_prefixes_share_a_table_and_never_meet(path, clock):
    plain = SQLiteStore(path, clock=clock)
    other = SQLiteStore(path, prefix="orders:", clock=clock)
    plain.claim(ask("1"))
    for scope in ("orders", ""):
        request = ClaimRequest(Identity(scope, "1"), b"other", None, 1.0, 60.0)
        assert isinstance(other.claim(request), Claimed)
    clock.advance(2.0)
    assert plain.counts().processing == 1
    assert other.counts().abandoned == 2
    assert [record.identity.scope for record in other.scan().records] == ["", "orders"]
    assert len(other.stuck()) == 2
    assert plain.stuck() == []
    assert plain.purge(abandoned_after=0.0) == 0
    assert other.purge(abandoned_after=0.0) == 2
    assert isinstance(plain.claim(ask("1", b"late")), Busy)
    plain.close()
    other.close()


def test_scan_pages_through_everything_once(store):
    keys = sorted(f"order:{number:03}" for number in range(25))
    for key in reversed(keys):
        finish(store, key)
    store.claim(ask("other:1"))
    seen, cursor = [], None
    while True:
        page = store.scan(prefix="order:", state=State.SUCCEEDED, limit=10, cursor=cursor)
        seen.extend(record.identity.key for record in page.records)
        cursor = page.cursor
        if cursor is None:
            break
    assert seen == keys


@pytest.mark.parametrize(
    "prefix",
    [
        "a\ud7ff".encode("utf-16", "surrogatepass").decode("utf-16"),
        "z\U0010ffff",
        "\U0010ffff",
        "é",
    ],
)
def test_scan_by_prefix_reaches_the_end_of_the_alphabet(store, prefix):
    for key in (prefix, prefix + "\U0010ffff", prefix + "x", "b", "~"):
        finish(store, key)
    found = {record.identity.key for record in store.scan(prefix=prefix).records}
    assert found == {prefix, prefix + "\U0010ffff", prefix + "x"}


def test_scan_by_scope(store):
    finish(store, 1)
    assert store.scan(scope="payments").records == ()
    assert len(store.scan(scope="orders").records) == 1


def test_purge_works_in_batches_and_spares_what_is_live_or_held(store, clock):
    for key in range(7):
        finish(store, f"expired {key}", ttl=1.0)
    finish(store, "kept", ttl=1000.0)
    store.claim(ask("live", lease=1000.0))
    store.claim(ask("held", lease=1.0, hold=True))
    store.claim(ask("abandoned", lease=1.0))
    clock.advance(10.0)
    assert [store.purge(limit=3) for _ in range(4)] == [3, 3, 1, 0]
    assert store.purge(abandoned_after=100.0) == 0
    assert store.purge(abandoned_after=5.0) == 1
    left = [record.identity.key for record in store.scan().records]
    assert left == ["held", "kept", "live"]


def test_a_purge_finds_what_may_go_in_the_index_alone(path, clock):
    sent: list[str] = []
    store = SQLiteStore(path, clock=clock, trace=sent.append)
    store.purge(limit=3, abandoned_after=5.0)
    store.close()
    deletes = [sql for sql in sent if sql.startswith("DELETE")]
    assert len(deletes) == 2, "of records, and of entries of the audit trail"
    for delete in deletes:
        plan = str(query(path, f"EXPLAIN QUERY PLAN {delete}"))
        assert "COVERING INDEX idempotent_record_expiry" in plan
        assert "USING INTEGER PRIMARY KEY" in plan


def test_a_finished_record_survives_closing_and_opening(path):
    first = SQLiteStore(path)
    finish(first, 1)
    first.close()
    second = SQLiteStore(path, synchronous="normal")
    assert second.claim(ask(1, b"other")).outcome == RESULT
    second.close()
