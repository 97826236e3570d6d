"""How the table comes to be: migrations, plain SQL, names, partitions, the application's columns."""

from __future__ import annotations

import time
from contextlib import closing
from importlib.resources import files

import psycopg
import pytest

from semel.core.records import Claimed
from semel.errors import ConfigError, StoreError
from semel.stores.sql.errors import Deadline
from semel.stores.sql.postgres import PostgresStore
from semel.stores.urls import open_store
from stores.postgres_given import driven, in_threads, migrate, rows
from stores.sqlite_helpers import RESULT, ask, finish, identity, spawn

kinds = pytest.mark.parametrize("kind", ["threads", "asyncio"])

TABLES = "SELECT table_schema || '.' || table_name FROM information_schema.tables WHERE table_schema NOT IN ('pg_catalog', 'information_schema') ORDER BY 1"
PROCESSES = 8


def tables(url):
    return [name for (name,) in rows(url, TABLES)]


# --- migrations --------------------------------------------------------------------------


def migrate_together(url, barrier, answers):
    store = PostgresStore(url, timeout=60)
    barrier.wait()
    answers.put(store.migrate())
    store.close()


def test_migrations_of_many_processes_run_once(postgres_url):
    barrier, answers = spawn.Barrier(PROCESSES), spawn.Queue()
    processes = [
        spawn.Process(target=migrate_together, args=(postgres_url, barrier, answers))
        for _ in range(PROCESSES)
    ]
    for process in processes:
        process.start()
    assert [answers.get(timeout=60) for _ in processes] == [1] * PROCESSES
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert rows(postgres_url, "SELECT table_name, version FROM semel_schema") == [
        ("idempotent_record", 1)
    ]


@kinds
def test_a_store_makes_its_table_on_first_use(postgres_url, kind):
    with driven(kind, postgres_url) as store:
        assert tables(postgres_url) == []
        store.counts()
        assert tables(postgres_url) == ["public.idempotent_record", "public.semel_schema"]


@kinds
def test_without_autocreate_a_missing_table_is_an_error_that_tells_what_to_run(postgres_url, kind):
    with driven(kind, postgres_url, autocreate="off") as store:
        with pytest.raises(ConfigError, match=r"autocreate=off\): run `semel migrate`"):
            store.claim(ask("k"))
        assert tables(postgres_url) == []
        migrate(postgres_url)
        assert isinstance(store.claim(ask("k")), Claimed)


async def test_an_async_store_migrates_too(postgres_url):
    from semel.stores.sql.postgres import AsyncPostgresStore

    store = AsyncPostgresStore(postgres_url, autocreate=False)
    assert await store.migrate() == await store.migrate() == 1
    assert "CREATE TABLE" in store.migration()
    assert isinstance(await store.claim(ask("k")), Claimed)
    await store.close()


def test_the_file_for_administrators_runs_as_it_is(postgres_url):
    script = files("semel.stores.sql.postgres").joinpath("ddl/0001_create_table.sql").read_text()
    rows(postgres_url, script)
    store = PostgresStore(postgres_url, autocreate=False)
    finish(store, "k")
    store.close()


@pytest.mark.parametrize(
    "options",
    [{}, {"table": "orders_idem"}, {"schema": "billing"}, {"partitions": 3, "table": "sliced"}],
)
def test_the_script_that_a_store_writes_makes_the_table_that_it_needs(postgres_url, options):
    rows(postgres_url, "CREATE SCHEMA billing")
    store = PostgresStore(postgres_url, autocreate=False, **options)
    rows(postgres_url, store.migration())
    finish(store, "k")
    store.close()


def test_a_table_of_a_newer_version_is_refused(postgres_url):
    migrate(postgres_url)
    rows(postgres_url, "UPDATE semel_schema SET version = 99")
    store = PostgresStore(postgres_url)
    with pytest.raises(StoreError, match="newer version of semel"):
        store.claim(ask("k"))
    store.close()


def test_somebody_elses_table_of_that_name_is_left_alone(postgres_url):
    rows(postgres_url, "CREATE TABLE idempotent_record (precious text)")
    store = PostgresStore(postgres_url)
    with pytest.raises(ConfigError, match="take another table name"):
        store.claim(ask("k"))
    assert rows(postgres_url, "SELECT count(precious) FROM idempotent_record") == [(0,)]
    assert tables(postgres_url) == ["public.idempotent_record"], "the rest was undone"
    store.close()


def test_a_table_that_was_dropped_is_named(postgres_url):
    store = PostgresStore(postgres_url)
    store.counts()
    rows(postgres_url, "DROP TABLE idempotent_record")
    with pytest.raises(ConfigError, match="the table is missing"):
        store.claim(ask("k"))
    store.close()


# --- names -------------------------------------------------------------------------------


def test_each_domain_may_have_its_own_table_and_schema(postgres_url):
    stores = [
        open_store(postgres_url),
        open_store(f"{postgres_url}?table=order"),  # a reserved word
        open_store(f"{postgres_url}?schema=billing"),
        open_store(postgres_url, schema="billing", table="order"),
    ]
    for store in stores:
        assert isinstance(store.claim(ask("k")), Claimed)
        store.close()
    assert [name for name in tables(postgres_url) if "semel" not in name] == [
        "billing.idempotent_record",
        "billing.order",
        "public.idempotent_record",
        "public.order",
    ]


def test_a_schema_that_exists_needs_no_right_to_create_schemas(postgres_url):
    rows(postgres_url, "CREATE ROLE tenant LOGIN")
    try:
        rows(postgres_url, "CREATE SCHEMA of_tenant AUTHORIZATION tenant")
        store = PostgresStore(postgres_url.replace("semel@", "tenant@"), schema="of_tenant")
        finish(store, "k")
        store.close()
    finally:
        rows(postgres_url, "DROP OWNED BY tenant CASCADE")
        rows(postgres_url, "DROP ROLE tenant")


@pytest.mark.parametrize(
    "options",
    [
        {"table": "Orders"},
        {"table": "a-b"},
        {"table": "x; DROP TABLE y"},
        {"table": ""},
        {"table": "t" * 49},
        {"table": "semel_schema"},
        {"table": 7},
        {"schema": 'a"b'},
        {"columns": {"Tenant": str}},
        {"columns": {"owner": str}},
        {"columns": {"tenant_id": 7}},
        {"partitions": 0},
        {"partitions": "many"},
        {"autocreate": "perhaps"},
    ],
)
def test_names_and_options_are_checked_before_anything_is_opened(options):
    with pytest.raises(ConfigError):
        PostgresStore("postgresql://127.0.0.1:1/nowhere", **options)


# --- partitions --------------------------------------------------------------------------


def test_partitions_share_the_records_and_hide_from_the_verbs(postgres_url):
    store = PostgresStore(postgres_url, partitions=4)
    store.send([ask(key) for key in range(80)])
    sizes = [
        size
        for _, size in rows(
            postgres_url, "SELECT tableoid, count(*) FROM idempotent_record GROUP BY 1"
        )
    ]
    assert len(sizes) == 4
    assert sum(sizes) == 80
    listed = store.scan(limit=100).records
    assert [record.identity.key for record in listed] == sorted(map(str, range(80)))
    keys = rows(postgres_url, "SELECT indexdef FROM pg_indexes WHERE indexdef LIKE '%(idem_key%'")
    assert len(keys) == 5
    assert not any("UNIQUE" in definition for (definition,) in keys)
    store.close()


def test_a_table_without_partitions_has_the_unique_index(postgres_url):
    store = PostgresStore(postgres_url)
    store.claim(ask("k"))
    copied = "INSERT INTO idempotent_record SELECT gen_random_uuid(), {} FROM idempotent_record"
    [(names,)] = rows(
        postgres_url,
        "SELECT string_agg(column_name, ', ' ORDER BY ordinal_position) FROM information_schema.columns "
        "WHERE table_name = 'idempotent_record' AND column_name <> 'digest'",
    )
    with pytest.raises(psycopg.errors.UniqueViolation):
        rows(postgres_url, copied.format(names))
    store.close()


# --- the application's own columns -------------------------------------------------------


@kinds
def test_own_columns_are_filled_by_each_claim_that_is_given(postgres_url, kind):
    columns = {
        "tenant_id": lambda ask: int(ask.identity.scope.removeprefix("tenant-")),
        "region2": lambda ask: None,
        "seen_by": lambda ask: ask.owner.decode(),
    }
    migrate(postgres_url, tenant_id="bigint", region2="integer", seen_by="text")
    migrate(postgres_url, tenant_id="bigint")  # twice is fine
    with driven(kind, postgres_url, columns=columns) as store:
        store.claim(claim_of("tenant-7", b"first-------"))
        own = "SELECT tenant_id, region2, seen_by FROM idempotent_record"
        assert rows(postgres_url, own) == [(7, None, "first-------")]
        store.claim(claim_of("tenant-7", b"second------"))  # busy: nothing changes
        assert rows(postgres_url, own) == [(7, None, "first-------")]
        store.renew(claim_of("tenant-7", b"").identity, b"first-------", 0.0)
        assert store.claim(claim_of("tenant-7", b"second------")).takeover
        assert rows(postgres_url, own) == [(7, None, "second------")]
        assert store.put(identity("mark"), RESULT, 60.0, owner=b"marker------")  # without a tenant
        mark = claim_of("tenant-8", b"marker------").identity
        assert store.put(mark, RESULT, 60.0, owner=b"marker------")
        assert rows(postgres_url, f"{own} WHERE biz_type = 'tenant-8'") == [
            (8, None, "marker------")
        ]


def claim_of(scope, owner):
    from semel.core.records import ClaimRequest, Identity

    return ClaimRequest(Identity(scope, "k"), owner, None, 30.0, 60.0)


def test_an_own_column_that_is_missing_is_named(postgres_url):
    store = PostgresStore(postgres_url, columns={"tenant_id": lambda ask: 7})
    with pytest.raises(ConfigError, match=r"tenant_id.*migrate\(columns"):
        store.claim(ask("k"))
    store.close()


@kinds
def test_marks_fill_own_columns_that_must_not_be_empty(postgres_url, kind):
    columns = {"tenant_id": lambda ask: int(ask.identity.scope.removeprefix("tenant-"))}
    migrate(postgres_url, tenant_id="bigint NOT NULL")
    with driven(kind, postgres_url, columns=columns) as store:
        mark = claim_of("tenant-8", b"marker------").identity
        assert store.put(mark, RESULT, 0.001, owner=b"marker------")
        time.sleep(0.01)
        assert store.put(mark, RESULT, 60.0, owner=b"again-------")  # over the expired one, or not
        with pytest.raises(ConfigError, match="give the column a default"):
            store.put(identity("mark"), RESULT, 60.0, owner=b"marker------")


@pytest.mark.parametrize("name", ["Tenant", "a b", "x; --"])
def test_the_names_of_added_columns_are_checked(postgres_url, name):
    store = PostgresStore(postgres_url)
    with pytest.raises(ConfigError):
        store.migrate(columns={name: "bigint"})
    store.close()


def test_stores_that_start_together_make_one_table(postgres_url):
    stores = [PostgresStore(postgres_url, max_size=1) for _ in range(12)]
    answers = in_threads(lambda number: stores[number].claim(ask("k", b"%d" % number)), 12)
    assert sum(isinstance(answer, Claimed) for answer in answers) == 1
    for store in stores:
        store.close()


@pytest.mark.parametrize("asked", [0, 1])
def test_a_table_that_somebody_makes_meanwhile_is_not_taken_for_a_dropped_one(postgres_url, asked):
    with closing(PostgresStore(postgres_url)) as store, closing(PostgresStore(postgres_url)) as too:
        check = store._schema.check()
        with store._calls.pool.lend(Deadline(60.0)) as session:
            migrate_at = iter(range(9))
            reply, answer = None, None
            while answer is None:
                try:
                    statement = check.send(reply)
                except StopIteration as end:
                    answer = end.value
                else:
                    if next(migrate_at) == asked:
                        too.migrate()
                    reply = session.execute(statement)
        assert answer is (asked == 0)


@kinds
def test_a_store_of_either_kind_tells_what_is_at_risk_and_can_be_kept_from_making_its_table(
    postgres_url, kind
):
    with driven(kind, postgres_url) as store:
        store._store.create_nothing()
        with pytest.raises(ConfigError, match="autocreate"):
            store.counts()
        migrate(postgres_url)
        risks = store._finish(store._store.diagnose())
        assert all(" is off: " in risk for risk in risks)
        assert any("fsync" in risk for risk in risks), "the server of the tests flushes nothing"
