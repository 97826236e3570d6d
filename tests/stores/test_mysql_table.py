"""The table: how it comes to be, what it keeps apart, who may do what to it."""

from __future__ import annotations

import importlib.resources
import multiprocessing
from contextlib import closing

import pymysql
import pytest

from semel.core.records import Busy, Claimed, CompleteRequest, Identity, State
from semel.errors import ConfigError, StoreError, StoreUnavailable
from semel.stores.base import PurgeRequest, ScanRequest, StuckRequest
from semel.stores.sql import schema
from semel.stores.sql.mysql import AsyncMySQLStore, MySQLStore
from semel.stores.sql.mysql.threads import send
from semel.stores.sql.mysql.verbs import MySQLVerbs
from semel.stores.sql.verbs import Reply
from stores.mysql_given import (
    IDENTITY,
    KINDS,
    RESULT,
    TABLE,
    ask,
    at_once,
    database_of,
    driven,
    new_owner,
    wait_until,
)

spawn = multiprocessing.get_context("spawn")


@pytest.fixture
def server(mariadb_of_this_worker):
    return mariadb_of_this_worker


@pytest.fixture
def run(server, mysql_url):
    """Runs a statement as root, in the test's database."""
    database = database_of(mysql_url)
    return lambda sql, *parameters: server.execute(sql, *parameters, database=database)


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


# --- migrations -----------------------------------------------------------------------------


def test_the_file_for_the_administrator_makes_the_table_that_the_store_makes(run, mysql_url, kind):
    text = importlib.resources.files("semel.stores.sql.mysql").joinpath("ddl/0001_records.sql")
    for statement in text.read_text().split(";\n"):
        if statement.strip():
            run(statement)
    by_hand = run("SHOW CREATE TABLE idempotent_record")
    versions = run("SELECT * FROM semel_schema")
    run("DROP TABLE idempotent_record, semel_schema")
    with driven(kind, mysql_url) as store:
        store.counts()
    assert run("SHOW CREATE TABLE idempotent_record") == by_hand
    assert run("SELECT * FROM semel_schema") == versions == [("idempotent_record", 1)]


def test_every_file_may_run_twice(run, mysql_url):
    store = MySQLStore(mysql_url, table="payments")
    for _ in range(2):
        for statement in store.migration().split(";\n"):
            if statement.strip():
                run(statement)
    store.claim(ask())
    store.close()
    assert run("SELECT * FROM semel_schema") == [("payments", 1)]


def test_migrate_makes_the_table_and_says_which_version_it_has(run, mysql_url, kind):
    if kind == "threads":
        store = MySQLStore(mysql_url, autocreate=False)
        assert store.migrate() == store.migrate() == 1
        store.close()
    else:
        import asyncio

        async def migrate():
            store = AsyncMySQLStore(mysql_url, autocreate=False)
            assert "CREATE TABLE IF NOT EXISTS `idempotent_record`" in store.migration()
            assert await store.migrate() == await store.migrate() == 1
            await store.close()

        asyncio.run(migrate())
    with driven(kind, mysql_url, autocreate=False) as store:
        assert isinstance(store.claim(ask()), Claimed)


def test_without_autocreate_a_missing_table_is_named(mysql_url, kind):
    with driven(kind, f"{mysql_url}?autocreate=off&table=payments") as store:
        for _ in range(2):
            with pytest.raises(ConfigError, match=r"table payments is missing.*`semel migrate`"):
                store.claim(ask())


def test_a_store_that_may_create_nothing_names_the_missing_table(run, mysql_url, kind):
    with driven(kind, mysql_url, table="payments") as store:
        store._store.create_nothing()
        with pytest.raises(ConfigError, match=r"table payments is missing"):
            store.claim(ask())
    assert run("SHOW TABLES LIKE 'payments'") == []


def test_both_kinds_tell_of_settings_that_lose_commits(mysql_url, kind):
    with driven(kind, mysql_url) as store:
        # The servers of these tests are quick, not safe.
        assert any("nosync" in risk for risk in store._finish(store._store.diagnose()))


def test_a_table_of_a_newer_version_is_refused(run, mysql_url, kind):
    with driven(kind, mysql_url) as store:
        store.counts()
    run("UPDATE semel_schema SET version = 99")
    with driven(kind, mysql_url) as store, pytest.raises(StoreError, match="newer version"):
        store.counts()


def test_threads_that_start_together_make_the_table_once(run, mysql_url):
    stores = [MySQLStore(mysql_url) for _ in range(8)]
    claims = [call.result() for call in at_once([lambda s=s: s.claim(ask()) for s in stores])]
    assert sum(isinstance(claim, Claimed) for claim in claims) == 1
    assert run("SELECT * FROM semel_schema") == [("idempotent_record", 1)]
    for store in stores:
        store.close()


def make_and_claim(url, gate, results):
    store = MySQLStore(url, timeout=20.0)
    gate.wait()
    results.put(isinstance(store.claim(ask()), Claimed))
    store.close()


def test_processes_that_start_together_make_the_table_once(run, mysql_url):
    gate, results = spawn.Barrier(3), spawn.Queue()
    children = [
        spawn.Process(target=make_and_claim, args=(mysql_url, gate, results)) for _ in range(3)
    ]
    for child in children:
        child.start()
    assert sorted(results.get(timeout=60) for _ in children) == [False, False, True]
    for child in children:
        child.join()
    assert run("SELECT count(*) FROM semel_schema") == [(1,)]


def test_a_migration_that_takes_long_is_waited_for_and_then_named(server, mysql_url, kind):
    database = database_of(mysql_url)
    holder = server.client(database=database)
    with holder.cursor() as cursor:
        cursor.execute(f"SELECT GET_LOCK({schema.MYSQL_LOCK}, 0)", ("idempotent_record",))
        assert cursor.fetchall() == ((1,),)
    with driven(kind, mysql_url, timeout=2.5) as store:
        with pytest.raises(StoreUnavailable, match="another program is migrating"):
            store.claim(ask())
        (claim,) = at_once([lambda: store.claim(ask())])
        wait_until(
            lambda: server.execute(
                "SELECT 1 FROM information_schema.processlist WHERE state = 'User lock'"
            )
        )
        holder.close()
        assert isinstance(claim.result(), Claimed)


def test_a_migration_that_fails_leaves_no_lock_behind(server, mysql_url, kind, monkeypatch):
    written = schema.MySQLSchema._written
    monkeypatch.setattr(schema.MySQLSchema, "_written", lambda *_: ["CREATE NONSENSE"])
    with driven(kind, mysql_url) as store:
        with pytest.raises(StoreUnavailable, match="NONSENSE"):
            store.claim(ask())
        monkeypatch.setattr(schema.MySQLSchema, "_written", written)
        with driven(kind, mysql_url) as other:
            assert isinstance(other.claim(ask()), Claimed)
        assert isinstance(store.claim(ask()), Busy)


# --- own columns ----------------------------------------------------------------------------


def test_own_columns_are_filled_by_each_claim(run, mysql_url, kind):
    admin = MySQLStore(mysql_url)
    admin.migrate(columns={"tenant_id": "BIGINT", "amount": "DECIMAL(10, 2)"})
    assert admin.migrate(columns={"tenant_id": "BIGINT"}) == 1  # once is enough
    admin.close()
    tenants = {"tenant_id": lambda request: 7 if request.hold else 8}
    with driven(kind, mysql_url, columns=tenants) as store:
        first = ask(hold=False)
        store.claim(first)
        assert run("SELECT tenant_id FROM idempotent_record") == [(8,)]
        store.renew(IDENTITY, first.owner, 0)
        store.adopt(IDENTITY, first.owner, 0)
        assert run("SELECT tenant_id FROM idempotent_record") == [(8,)]
        store.fail(IDENTITY, first.owner, RESULT, retryable=True, keep_fingerprint=True, ttl=60)
        store.claim(ask(hold=True))
        assert run("SELECT tenant_id FROM idempotent_record") == [(7,)]
        store.put(Identity("s", "mark"), RESULT, 60, owner=new_owner())
        assert run("SELECT tenant_id FROM idempotent_record WHERE idem_key = 'mark'") == [(8,)]


def test_marks_fill_own_columns_that_must_not_be_empty(run, mysql_url, kind):
    admin = MySQLStore(mysql_url)
    admin.migrate(columns={"tenant_id": "BIGINT NOT NULL"})
    admin.close()
    with driven(kind, mysql_url, columns={"tenant_id": lambda claim: int(claim.identity.key)}) as s:
        assert s.put(Identity("s", "7"), RESULT, 60, owner=new_owner())
        s.touch(Identity("s", "7"), 0)
        run("UPDATE idempotent_record SET tenant_id = 1")
        assert s.put(Identity("s", "7"), RESULT, 60, owner=new_owner())
        assert run("SELECT tenant_id FROM idempotent_record") == [(7,)]
        with pytest.raises(ConfigError, match="give it a default"):
            s.put(Identity("s", "no tenant"), RESULT, 60, owner=new_owner())
    with driven(kind, mysql_url) as s, pytest.raises(ConfigError, match="give it a default"):
        s.claim(ask())  # by a program that does not know the column


async def test_words_of_sql_are_names_too(run, mysql_url):
    columns = {"order": "INT", "rank": "INT"}
    fill = dict.fromkeys(columns, lambda request: int(request.identity.key))
    store = AsyncMySQLStore(mysql_url, table="group", columns=fill)
    await store.migrate(columns=columns)
    asks = [ask(Identity("s", str(number)), lease=0.001) for number in range(3)]
    assert all(isinstance(claim, Claimed) for claim in await store.send(asks))
    again = ask(asks[1].identity)
    wait_until(lambda: not run("SELECT 1 FROM `group` WHERE lease_until > UTC_TIMESTAMP(6)"))
    assert (await store.claim(again)).number == 2
    assert run("SELECT `order`, `rank` FROM `group` ORDER BY `order`") == [(0, 0), (1, 1), (2, 2)]
    assert await store.purge(abandoned_after=0) == 2
    await store.close()


def test_a_column_that_the_table_does_not_have_is_named(mysql_url, kind):
    with (
        driven(kind, mysql_url, columns={"tenant_id": lambda _: 1}) as store,
        pytest.raises(ConfigError, match=r"store.migrate\(columns=.*tenant_id"),
    ):
        store.claim(ask())


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"owner": lambda _: 1}, "semel's own"),
        ({"digest": lambda _: 1}, "semel's own"),
        ({"tenant": 7}, "needs a function"),
        ({"tenant id": lambda _: 1}, "the name of a column"),
        ({"x; DROP TABLE y": lambda _: 1}, "the name of a column"),
    ],
)
def test_columns_that_cannot_be_are_refused_at_once(mysql_url, columns, message):
    with pytest.raises(ConfigError, match=message):
        MySQLStore(mysql_url, columns=columns)


def test_a_column_to_add_must_have_a_plain_name(mysql_url):
    store = MySQLStore(mysql_url)
    with pytest.raises(ConfigError, match="the name of a column"):
        store.migrate(columns={"a b": "INT"})
    store.close()


# --- what is kept apart ---------------------------------------------------------------------


def test_tables_and_prefixes_are_worlds_of_their_own(mysql_url, kind):
    worlds = [{}, {"prefix": "other:"}, {"table": "payments"}, {"prefix": "", "table": "payments"}]
    for options in worlds:
        with driven(kind, mysql_url, **options) as store:
            assert isinstance(store.claim(ask()), Claimed)
            assert store.counts().processing == 1
            assert len(store.scan().records) == 1
    with driven(kind, mysql_url) as store:
        assert store.forget(IDENTITY)
    for options in worlds[1:]:
        with driven(kind, mysql_url, **options) as store:
            assert store.get(IDENTITY) is not None
            assert store.purge(abandoned_after=0.0) == 0


def test_listings_follow_code_points_whatever_the_database_sorts_by(mysql_url, kind):
    """The databases of these tests sort as Swedish does, without regard to case."""
    keys = ["A", "B", "a", "a ", "aa", "b", "\u00e4", "\u4e2d", "\U0001f600"]
    with driven(kind, mysql_url) as store:
        for key in reversed(keys):
            store.put(Identity("s", key), RESULT, 60, owner=new_owner())
        found, cursor = [], None
        while True:
            page = store.scan(limit=2, cursor=cursor)
            found += [record.identity.key for record in page.records]
            if (cursor := page.cursor) is None:
                break
        assert found == keys
        assert [r.identity.key for r in store.scan(prefix="a").records] == ["a", "a ", "aa"]
        assert [r.identity.key for r in store.scan(prefix="\U0001f600").records] == ["\U0001f600"]


def test_times_are_utc_whatever_the_server_lives_by(run, mysql_url, kind):
    with driven(kind, mysql_url) as store:
        store.claim(ask(lease=100.0))
        record = store.get(IDENTITY)
        ((age, lease),) = run(
            "SELECT ABS(TIMESTAMPDIFF(SECOND, created_at, UTC_TIMESTAMP())), "
            "TIMESTAMPDIFF(MICROSECOND, created_at, lease_until) FROM idempotent_record"
        )
        assert age < 30
        assert lease == 100_000_000
        assert record.lease_until - record.created_at == pytest.approx(100.0, abs=1e-5)


def test_a_digest_taken_by_another_identity_is_told(run, mysql_url, kind):
    with driven(kind, mysql_url) as store:
        store.claim(ask(Identity("s", "other")))
        run("UPDATE idempotent_record SET digest = %s", TABLE.digest(IDENTITY))
        with pytest.raises(StoreError, match="is taken by"):
            store.claim(ask())


def test_a_record_of_a_newer_version_is_told(run, mysql_url, kind):
    with driven(kind, mysql_url) as store:
        store.claim(ask())
        run("UPDATE idempotent_record SET format = 99")
        with pytest.raises(StoreError, match="newer version"):
            store.get(IDENTITY)


def test_a_key_that_meets_another_row_of_the_unique_index_is_told(run, mysql_url, kind):
    """Only a row that semel did not write can have the key without its digest."""
    with driven(kind, mysql_url) as store:
        store.claim(ask())
        run("UPDATE idempotent_record SET digest = UNHEX(MD5('x'))")
        with pytest.raises(StoreUnavailable, match="changed"):
            store.claim(ask())


PREFIX_BYTES = 128 * 4 + 2
"""What a text of 128 characters takes in an index."""


@pytest.mark.parametrize("verb", ["stuck", "purge_expired", "purge_abandoned"])
def test_what_is_due_is_read_from_the_old_end_of_an_index(server, mysql_url, verb):
    store = MySQLStore(mysql_url)
    asks = [ask(Identity("s", str(number))) for number in range(300)]
    store.send(asks)
    # Most have ended, and have no lease: in the index they come before all that have one.
    store.send([CompleteRequest(a.identity, a.owner, RESULT, 60.0) for a in asks[:290]])
    server.execute("ANALYZE TABLE idempotent_record", database=database_of(mysql_url))
    verbs = MySQLVerbs(TABLE)
    asking = {
        "stuck": verbs.stuck(StuckRequest(1.0, 10)),
        "purge_expired": verbs.purge(PurgeRequest(10, None)),
        "purge_abandoned": verbs.purge(PurgeRequest(10, 1.0)),
    }[verb].start()
    statement = next(asking)
    if verb == "purge_abandoned":
        statement = asking.send(Reply([], 0))
    ((*_, kind, _, key, length, _, _, more),) = server.execute(
        f"EXPLAIN {statement.sql}", *statement.parameters, database=database_of(mysql_url)
    )
    assert (kind, key) == ("range", "due")
    assert int(length) > PREFIX_BYTES, "not by the prefix alone"
    assert "filesort" not in more
    store.close()


@pytest.mark.parametrize("scope", ["s", None])
@pytest.mark.parametrize("prefix", ["", "k-"])
@pytest.mark.parametrize("first", [True, False])
def test_a_page_is_read_from_its_index_and_nothing_is_sorted(
    server, mysql_url, scope, prefix, first
):
    """Each page of the audit trail sorted all that were still to come: a minute for 100,000."""
    store = MySQLStore(mysql_url)
    store.send([ask(Identity("s", f"k-{number}")) for number in range(1000)])
    cursor = None if first else store.scan(limit=10).cursor
    verb = MySQLVerbs(TABLE).scan(ScanRequest(scope, prefix, None, 10, cursor))
    statement = next(verb.start())
    ((*_, key, _, _, _, more),) = server.execute(
        f"EXPLAIN {statement.sql}", *statement.parameters, database=database_of(mysql_url)
    )
    assert key == "identity"
    assert "filesort" not in more
    store.close()


# --- grants ---------------------------------------------------------------------------------


@pytest.fixture
def clerk(server, mysql_url):
    """The URL of a user with the grants of the documentation, and no more."""
    database, name = database_of(mysql_url), f"clerk_{database_of(mysql_url)}"
    server.execute(f"CREATE USER {name}@'%' IDENTIFIED BY 'only for tests'")
    admin = MySQLStore(mysql_url)
    admin.migrate()
    admin.close()
    server.execute(
        f"GRANT SELECT, INSERT, UPDATE, DELETE ON {database}.idempotent_record TO {name}@'%'"
    )
    server.execute(f"GRANT SELECT ON {database}.semel_schema TO {name}@'%'")
    return server.url(database, user=name)


def test_the_documented_grants_are_enough_for_every_verb(clerk, kind):
    with driven(kind, clerk) as store:
        request = ask()
        assert isinstance(store.claim(request), Claimed)
        assert store.renew(IDENTITY, request.owner, 0)
        adopted = new_owner()
        assert store.adopt(IDENTITY, adopted, 30) is not None
        assert store.complete(IDENTITY, adopted, RESULT, 60)
        assert store.touch(IDENTITY, 90)
        assert store.scan(state=State.SUCCEEDED).records
        assert store.stuck() == []
        assert store.counts().succeeded == 1
        assert store.forget(IDENTITY)
        assert store.put(IDENTITY, RESULT, 60, owner=new_owner())
        assert store.purge(abandoned_after=1.0) == 0


def test_the_documented_grants_are_enough_to_migrate(server, mysql_url):
    database, name = database_of(mysql_url), f"mover_{database_of(mysql_url)}"
    server.execute(f"CREATE USER {name}@'%' IDENTIFIED BY 'only for tests'")
    server.execute(
        f"GRANT CREATE, ALTER, SELECT, INSERT, UPDATE, DELETE ON {database}.* TO {name}@'%'"
    )
    store = MySQLStore(server.url(database, user=name))
    assert store.migrate(columns={"tenant_id": "BIGINT"}) == 1
    store.close()


def test_a_user_who_may_not_create_is_told_what_is_missing(clerk, kind):
    with (
        driven(kind, clerk, table="payments") as store,
        pytest.raises(ConfigError, match="GRANT SELECT, INSERT, UPDATE, DELETE"),
    ):
        store.claim(ask())


def test_a_user_without_a_grant_is_told_which(server, clerk, kind):
    database = database_of(clerk)
    with driven(kind, clerk) as store:
        store.counts()
        server.execute(f"REVOKE UPDATE ON {database}.idempotent_record FROM clerk_{database}@'%'")
        with pytest.raises(ConfigError, match=r"does not permit.*UPDATE command denied"):
            store.claim(ask())


def test_a_user_who_may_see_nothing_is_told(server, mysql_url, kind):
    database, name = database_of(mysql_url), f"ghost_{database_of(mysql_url)}"
    server.execute(f"CREATE USER {name}@'%' IDENTIFIED BY 'only for tests'")
    with (
        driven(kind, server.url(database, user=name)) as store,
        pytest.raises(StoreUnavailable, match="does not let this user in"),
    ):
        store.counts()


def test_pymysql_counts_what_an_insert_did_by_its_flags(mysql_url, server):
    """The reason why the store asks the row, not the count, who made it."""
    database = database_of(mysql_url)
    with closing(MySQLStore(mysql_url)) as store:
        store.migrate()
    for flag, duplicates in ((0, 0), (pymysql.constants.CLIENT.FOUND_ROWS, 1)):
        client = server.client(database=database, client_flag=flag)
        with client.cursor() as cursor:
            statement = TABLE.claim(ask(Identity("s", str(flag))))
            assert cursor.execute(statement.sql, statement.parameters) == 1
            assert cursor.execute(statement.sql, statement.parameters) == duplicates
        client.close()


@pytest.mark.parametrize("asked", [0, 1])
def test_a_table_that_somebody_makes_meanwhile_is_not_taken_for_a_dropped_one(
    mysql_url, server, asked
):
    with closing(MySQLStore(mysql_url)) as store, closing(MySQLStore(mysql_url)) as too:
        found = store._calls.schema._found()
        with closing(server.client(database=database_of(mysql_url))) as connection:
            migrate_at = iter(range(9))
            reply, answer = None, None
            while answer is None:
                try:
                    statement = found.send(reply)
                except StopIteration as end:
                    answer = end.value
                else:
                    if next(migrate_at) == asked:
                        too.migrate()
                    reply = send(connection, statement)
        assert not answer.gone
