"""Many members in one statement on PostgreSQL, and many tasks that share one."""

from __future__ import annotations

import asyncio
import os

import asyncpg
import psycopg
import pytest
from psycopg.pq import Conninfo

from engines.facade import until
from semel import AsyncIdempotency, Idempotency
from semel.core.records import (
    Busy,
    Claimed,
    CompleteRequest,
    Finished,
    RenewRequest,
    State,
)
from semel.errors import ConfigError, RecordUnreadable, StoreError, StoreUnavailable
from semel.stores.listening import Listening
from semel.stores.sql.errors import Deadline
from semel.stores.sql.postgres import AsyncPostgresStore, PostgresStore
from semel.stores.sql.postgres.batch import lock_number
from semel.stores.sql.postgres.settings import settings
from semel.stores.sql.postgres.tasks import asyncpg_understands
from semel.stores.sql.verbs import Reply, Statement
from servers.postgres import postgres_server
from stores.postgres_given import blocked, driven, migrate, rows, transaction
from stores.sqlite_helpers import RESULT, ask, finish, identity

kinds = pytest.mark.parametrize("kind", ["threads", "asyncio"])
OWNER = b"owner-------"
OTHERS = range(50)


def complete(key, owner=OWNER):
    return CompleteRequest(identity(key), owner, RESULT, 60.0)


def renew(key, owner=OWNER):
    return RenewRequest(identity(key), owner, 30.0)


def hold_key(holder, url, key):
    """Take the lock that a transactional block takes."""
    store = PostgresStore(url)
    digest = store._verbs.short_digest(identity(key))
    holder.execute("SELECT pg_advisory_xact_lock(%s)", [lock_number(digest)])
    store.close()


# --- how many statements -----------------------------------------------------------------


def statements_of(server, work):
    before = len(server.log().splitlines())
    work()
    lines = server.log().splitlines()[before:]
    return [line for line in lines if "execute" in line or "statement:" in line]


@kinds
def test_thousands_of_members_are_more_than_one_statement_and_less_than_thousands(talkative, kind):
    with driven(kind, talkative.fresh_database(), timeout=60) as store:
        store.send([ask("warm"), ask("up")])
        asks = [ask(key) for key in range(1500)]
        assert len(statements_of(talkative, lambda: store.send(asks))) == 3
        renewals = [renew(key) for key in range(1500)]
        assert store.send(renewals) == [True for _ in renewals]
        answers = store.send([ask(key, b"second------") for key in range(1500)])
        assert all(isinstance(answer, Busy) for answer in answers)


@pytest.fixture(scope="module")
def talkative():
    with postgres_server("log_statement=all", "log_error_verbosity=terse") as server:
        yield server


@kinds
def test_many_members_are_one_statement(talkative, kind):
    with driven(kind, talkative.fresh_database()) as store:
        store.send([ask("warm"), ask("up")])
        store.send([renew("warm"), renew("up")])
        asks = [ask(key) for key in OTHERS]
        assert len(statements_of(talkative, lambda: store.send(asks))) == 1
        renewals = [renew(key) for key in OTHERS]
        assert len(statements_of(talkative, lambda: store.send(renewals))) == 1
        completes = [complete(key) for key in OTHERS]
        assert len(statements_of(talkative, lambda: store.send(completes))) == 1
        assert len(statements_of(talkative, lambda: store.send(asks))) == 1
        assert store.counts().succeeded == len(OTHERS)


def test_tasks_that_ask_at_the_same_time_share_statements(talkative):
    store = AsyncPostgresStore(talkative.fresh_database())

    async def work():
        answers = await asyncio.gather(*(store.claim(ask(key)) for key in OTHERS))
        assert all(isinstance(answer, Claimed) for answer in answers)
        done = await asyncio.gather(
            *(store.complete(identity(key), OWNER, RESULT, 60.0) for key in OTHERS)
        )
        assert done == [True for _ in OTHERS]

    async def prepared():
        await store.counts()

    with asyncio.Runner() as runner:
        runner.run(prepared())
        sent = statements_of(talkative, lambda: runner.run(work()))
        runner.run(store.close())
    writes = [line for line in sent if "INSERT" in line or "UPDATE" in line]
    assert len(writes) == 4, "one straight through and one batch, for each verb"


@pytest.mark.parametrize("off", [{"batching": False}, {"batching": "off"}])
def test_batching_can_be_switched_off(talkative, off):
    store = AsyncPostgresStore(talkative.fresh_database(), **off)

    async def work():
        await asyncio.gather(*(store.claim(ask(key)) for key in range(8)))

    with asyncio.Runner() as runner:
        runner.run(store.counts())
        sent = statements_of(talkative, lambda: runner.run(work()))
        runner.run(store.close())
    assert len([line for line in sent if "INSERT" in line]) == 8


@pytest.mark.parametrize("kind", [PostgresStore, AsyncPostgresStore])
def test_batching_is_on_or_off(kind):
    with pytest.raises(ConfigError, match="batching"):
        kind("postgresql://u@127.0.0.1:1/db", batching="often")


# --- how they are planned ----------------------------------------------------------------


@pytest.mark.parametrize("verb", ["renew", "adopt", "complete_batch", "renew_batch"])
def test_no_verb_about_some_records_reads_the_index_of_all_that_run(postgres_url, verb):
    """Where few run, that index is small and the planner takes it; then thousands do."""
    store = PostgresStore(postgres_url)
    for _ in range(5):
        keys = [os.urandom(4).hex() for _ in range(200)]
        store.send([ask(key) for key in keys])
        store.send([complete(key) for key in keys])
    one = complete("k") if verb.startswith("complete") else renew("k")
    operation = getattr(store._verbs, verb)([one] if "batch" in verb else one)
    statement = next(operation.start())
    store.close()
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute("VACUUM ANALYZE idempotent_record")
        connection.execute("SET plan_cache_mode = force_generic_plan")
        connection.execute(f"PREPARE planned AS {statement.sql}".encode())
        nothing = ", ".join("NULL" for _ in statement.parameters)
        plan = str(connection.execute(f"EXPLAIN EXECUTE planned ({nothing})").fetchall())
    assert "idempotent_record_lease" not in plan
    assert "Index Scan using" in plan or "Bitmap Index Scan on" in plan


@pytest.mark.parametrize("verb", ["claim", "complete", "renew"])
def test_a_plan_that_is_made_while_the_table_is_empty_serves_a_full_one(postgres_url, verb):
    migrate(postgres_url)
    store = PostgresStore(postgres_url)
    one = {"claim": ask, "complete": complete, "renew": renew}[verb]("k")
    batch = getattr(store._verbs, f"{verb}_batch")
    statement = next(batch([one]).start())
    with store._calls.pool.lend(Deadline(5.0)) as session:
        connection = session.bounded
        connection.execute("SET plan_cache_mode = force_generic_plan")
        connection.execute(f"PREPARE planned AS {statement.sql}".encode())
        nothing = ", ".join("NULL" for _ in statement.parameters)
        plan = str(connection.execute(f"EXPLAIN EXECUTE planned ({nothing})").fetchall())
    assert "Seq Scan on idempotent_record" not in plan
    store.close()


@pytest.mark.parametrize("options", [{}, {"keepalives_idle": "5"}], ids=["asyncpg", "psycopg"])
async def test_no_plan_of_asyncio_reads_a_whole_table_either(postgres_url, options):
    store = AsyncPostgresStore(postgres_url, **options)
    async with store._calls.pool.lend(Deadline(5.0)) as session:
        asked = await session.execute(Statement("SHOW enable_seqscan", (), writes=False))
    assert asked.rows == [("off",)]
    await store.close()


# --- open transactions -------------------------------------------------------------------


async def test_an_open_transaction_with_one_key_does_not_stall_the_batch_it_is_in(postgres_url):
    store = AsyncPostgresStore(postgres_url, timeout=60)
    await store.counts()
    with transaction(postgres_url) as holder:
        hold_key(holder, postgres_url, "taken")
        # Something goes straight through first, so that the others are a batch.
        answers = await asyncio.gather(
            store.claim(ask("first")),
            store.claim(ask("taken")),
            *(store.claim(ask(key)) for key in OTHERS),
        )
        assert [type(answer) for answer in answers] == [Claimed, Busy, *(Claimed for _ in OTHERS)]
        assert answers[1].retry_after > 0, "whoever waits must not ask without a pause"
    assert isinstance(await store.claim(ask("taken")), Claimed)
    await store.close()


@kinds
def test_a_transactional_block_does_not_stall_a_batch(postgres_url, kind):
    with driven(kind, postgres_url, timeout=60) as store:
        store.counts()
        idem = Idempotency(PostgresStore(postgres_url))
        with (
            psycopg.connect(postgres_url) as connection,
            connection.transaction(),
            idem.transaction(connection, "taken", scope="orders") as attempt,
        ):
            attempt.result = "done"
            answers = store.send([ask(key) for key in ["taken", *OTHERS]])
            assert isinstance(answers[0], Busy)
            assert all(isinstance(answer, Claimed) for answer in answers[1:])
        assert isinstance(store.claim(ask("taken")), Finished)
        idem.close()


@kinds
def test_what_has_ended_is_answered_although_an_open_transaction_has_its_key(postgres_url, kind):
    with driven(kind, postgres_url, timeout=60) as store:
        finish(store, "done")
        with transaction(postgres_url) as holder:
            hold_key(holder, postgres_url, "done")
            done, new = store.send([ask("done", b"duplicate---"), ask("new")])
        assert (type(done), type(new)) == (Finished, Claimed)


async def test_completes_are_not_stalled_by_an_open_transaction_either(postgres_url):
    store = AsyncPostgresStore(postgres_url, timeout=60)
    await asyncio.gather(*(store.claim(ask(key)) for key in ["first", "taken", *OTHERS]))
    with transaction(postgres_url) as holder:
        hold_key(holder, postgres_url, "taken")
        holder.execute("SELECT 1 FROM idempotent_record WHERE idem_key = 'taken' FOR UPDATE")
        first, taken, *others = (
            asyncio.ensure_future(store.complete(identity(key), OWNER, RESULT, 60.0))
            for key in ["first", "taken", *OTHERS]
        )
        assert await asyncio.gather(first, *others) == [True, *(True for _ in OTHERS)]
        assert not taken.done(), "it waits, alone"
    assert await taken is True
    await store.close()


@kinds
def test_renewals_wait_for_no_open_transaction(postgres_url, kind):
    with driven(kind, postgres_url, timeout=60) as store:
        store.send([ask(key) for key in ["taken", *OTHERS]])
        with transaction(postgres_url) as holder:
            hold_key(holder, postgres_url, "taken")
            holder.execute("SELECT 1 FROM idempotent_record WHERE idem_key = 'taken' FOR UPDATE")
            taken, lost, *others = store.send(
                [renew("taken"), renew(0, b"another-----"), *(renew(key) for key in OTHERS[1:])]
            )
        assert isinstance(taken, StoreUnavailable)
        assert lost is False
        assert others == [True for _ in OTHERS[1:]]


@kinds
def test_a_lock_that_is_no_transaction_of_ours_holds_up_its_own_member_alone(postgres_url, kind):
    with driven(kind, postgres_url, timeout=2) as store:
        store.send([ask(key) for key in ["locked", "a", "b"]])
        with transaction(postgres_url) as holder:
            holder.execute("SELECT 1 FROM idempotent_record WHERE idem_key = 'locked' FOR UPDATE")
            locked, *others = store.send([complete(key) for key in ["locked", "a", "b"]])
        assert isinstance(locked, StoreUnavailable)
        assert "open transaction" in str(locked)
        assert others == [True, True]


# --- members that a batch cannot tell ----------------------------------------------------


@kinds
def test_members_in_every_state_are_answered_as_if_they_came_alone(postgres_url, kind):
    with driven(kind, postgres_url) as store:
        finish(store, "done")
        finish(store, "expired", ttl=0.0)
        store.claim(ask("running"))
        store.claim(ask("parked", lease=0.0))
        keys = ["done", "expired", "running", "parked", "new"]
        done, expired, running, parked, new = store.send(
            [ask(key, b"second------") for key in keys]
        )
        assert isinstance(done, Finished)
        assert isinstance(running, Busy)
        assert (expired.number, expired.takeover) == (1, False)
        assert (parked.number, parked.takeover) == (2, True)
        assert (new.number, new.takeover) == (1, False)
        assert store.get(identity("new")).fence == new.fence
        again = store.send([ask(key, b"second------") for key in keys])
        same = [(answer.number, answer.fence) for answer in (expired, parked, new)]
        assert [(again[place].number, again[place].fence) for place in (1, 3, 4)] == same
        ended = store.send([complete(key, b"second------") for key in keys])
        assert ended == [False, True, False, True, True]
        assert store.send([complete(key, b"second------") for key in keys]) == ended


@kinds
def test_a_damaged_row_is_its_own_members_error(postgres_url, kind):
    with driven(kind, postgres_url) as store:
        finish(store, "newer")
        finish(store, "done")
        rows(postgres_url, "UPDATE idempotent_record SET format = 99 WHERE idem_key = 'newer'")
        newer, done, new = store.send(
            [ask(key, b"second------") for key in ["newer", "done", "new"]]
        )
        assert isinstance(newer, RecordUnreadable)
        assert isinstance(done, Finished)
        assert isinstance(new, Claimed)


@kinds
def test_a_key_that_no_database_takes_spoils_no_batch(postgres_url, kind):
    with driven(kind, postgres_url) as store:
        good, bad, worse = store.send([ask("good"), ask("zero\0"), ask("\ud800")])
        assert isinstance(good, Claimed)
        assert isinstance(bad, StoreError)
        assert isinstance(worse, StoreError)


async def test_a_bad_key_is_its_own_callers_error_among_tasks(postgres_url):
    store = AsyncPostgresStore(postgres_url)
    await store.counts()
    first, good, bad, other = await asyncio.gather(
        *(store.claim(ask(key)) for key in ["first", "good", "zero\0", "other"]),
        return_exceptions=True,
    )
    assert all(isinstance(answer, Claimed) for answer in (first, good, other))
    assert isinstance(bad, StoreError)
    await store.close()


@kinds
def test_own_columns_are_filled_by_a_batch_too(postgres_url, kind):
    migrate(postgres_url, tenant_id="bigint")
    columns = {"tenant_id": lambda claim: int(claim.identity.key)}
    with driven(kind, postgres_url, columns=columns) as store:
        store.send([ask("1"), ask("2")])
        store.race([ask("3"), ask("4")])
    found = rows(postgres_url, "SELECT idem_key, tenant_id FROM idempotent_record ORDER BY 1")
    assert found == [("1", 1), ("2", 2), ("3", 3), ("4", 4)]


async def test_tasks_that_wait_for_a_key_are_noted_although_they_ask_in_a_batch(postgres_url):
    store = AsyncPostgresStore(postgres_url)
    await store.claim(ask("k"))
    with store.watch(identity("k")) as watch:
        await until(lambda: watch.listening is Listening.YES)  # else the waiter asks again later
        await asyncio.gather(
            store.claim(ask("first")), store.claim(ask("k", b"waiter------")), store.claim(ask("x"))
        )
        noted = rows(postgres_url, "SELECT idem_key FROM idempotent_record WHERE waited_for")
        assert noted == [("k",)]
    await store.close()


def test_a_member_that_was_inserted_by_another_while_the_statement_ran_is_asked_for_alone():
    store = PostgresStore("postgresql://u@127.0.0.1:1/db")
    steps = store._verbs.claim_batch([ask("a"), ask("b")]).start()
    next(steps)
    with pytest.raises(StopIteration) as end:
        steps.send(Reply([], 0))
    assert end.value.value == {}, "nothing is known of either"
    store.close()


async def test_an_insert_at_the_same_moment_is_seen_by_the_batch_it_met(postgres_url):
    """Two stores, as in two processes, and the same keys: each key is given once."""
    stores = [AsyncPostgresStore(postgres_url) for _ in range(3)]
    await asyncio.gather(*(store.counts() for store in stores))
    owners = [b"%d" % number for number in range(3)]
    answers = await asyncio.gather(
        *(
            store.claim(ask(key, owner))
            for store, owner in zip(stores, owners, strict=True)
            for key in OTHERS
        )
    )
    assert sum(isinstance(answer, Claimed) for answer in answers) == len(OTHERS)
    assert sum(isinstance(answer, Busy) for answer in answers) == 2 * len(OTHERS)
    for store in stores:
        await store.close()


# --- a lane of their own for renewals ----------------------------------------------------


@kinds
def test_renewals_do_not_wait_for_a_connection_that_claims_keep_busy(postgres_url, kind):
    with driven(kind, postgres_url, timeout=1, max_size=1) as store:
        store.send([ask(key) for key in OTHERS])
        busy = store._store._calls.pool.lend(Deadline(60.0))
        store._finish(busy.__enter__() if kind == "threads" else busy.__aenter__())
        try:
            with pytest.raises(StoreUnavailable, match="max_size"):
                store.touch(identity(0), 60.0)
            assert store.send([renew(key) for key in OTHERS]) == [True for _ in OTHERS]
        finally:
            leave = busy.__exit__ if kind == "threads" else busy.__aexit__
            store._finish(leave(None, None, None))


# --- either driver -----------------------------------------------------------------------


async def lent(store):
    async with store._calls.pool.lend(Deadline(10.0)) as session:
        return type(session).__name__


@pytest.mark.parametrize(
    ("options", "driver"),
    [
        ({}, "OwnAsyncpgSession"),
        ({"sslmode": "prefer", "application_name": "shop"}, "OwnAsyncpgSession"),
        ({"target_session_attrs": "read-write"}, "OwnAsyncpgSession"),
        ({"prepare": "off"}, "OwnAsyncPsycopgSession"),
        ({"options": "-c work_mem=1MB"}, "OwnAsyncPsycopgSession"),
        ({"keepalives_idle": "5"}, "OwnAsyncPsycopgSession"),
        ({"require_auth": "none"}, "OwnAsyncPsycopgSession"),
        ({"columns": {"x": len}}, "OwnAsyncPsycopgSession"),
    ],
)
async def test_asyncpg_is_taken_where_it_can_do_what_is_asked_for(postgres_url, options, driver):
    store = AsyncPostgresStore(postgres_url, **options)
    assert await lent(store) == driver
    await store.close()


async def test_an_environment_that_only_libpq_reads_is_left_to_it(postgres_url, monkeypatch):
    monkeypatch.setenv("PGOPTIONS", "-c work_mem=1MB")
    store = AsyncPostgresStore(postgres_url)
    assert await lent(store) == "OwnAsyncPsycopgSession"
    await store.close()


READ_BY_ASYNCPG = {
    *("user", "password", "passfile", "dbname", "host", "port", "target_session_attrs"),
    *("sslmode", "sslcert", "sslkey", "sslrootcert", "sslcrl"),
    *("connect_timeout", "application_name"),
}


def test_a_variable_that_asyncpg_would_ignore_is_left_to_libpq(monkeypatch):
    def understood(name: str, value: str) -> bool:
        with monkeypatch.context() as patched:
            patched.setenv(name, value)
            return asyncpg_understands(settings("postgresql://h/d", {}, 5.0))

    variables = {each.envvar.decode(): each for each in Conninfo.get_defaults() if each.envvar}
    assert variables.keys() >= {"PGREQUIREAUTH", "PGREQUIREPEER", "PGGSSENCMODE", "PGSSLCRLDIR"}
    for name, option in variables.items():
        assert understood(name, "other") == (option.keyword.decode() in READ_BY_ASYNCPG), name
    assert not understood("PGSSLROOTCERT", "system")


async def test_a_server_that_asks_for_the_password_in_clear_does_not_get_it(monkeypatch):
    monkeypatch.setenv("PGREQUIREAUTH", "scram-sha-256")
    monkeypatch.setenv("PGSSLMODE", "disable")
    received = []

    async def serve(reader, writer):
        await reader.read(1000)
        writer.write(b"R\0\0\0\x08\0\0\0\x03")  # AuthenticationCleartextPassword
        received.append(await reader.read(1000))
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        store = AsyncPostgresStore(f"postgresql://user:secret@127.0.0.1:{port}/db", timeout=2)
        with pytest.raises(StoreError):
            await store.counts()
        await store.close()
        await until(lambda: received)
    assert b"secret" not in b"".join(received)


async def test_the_name_of_the_application_comes_from_the_environment(postgres_url, monkeypatch):
    monkeypatch.setenv("PGAPPNAME", "shop")
    store = AsyncPostgresStore(postgres_url)
    async with store._calls.pool.lend(Deadline(10.0)) as session:
        reply = await session.execute(Statement("SHOW application_name", (), writes=False))
    assert reply.rows == [("shop",)]
    await store.close()


async def test_several_hosts_are_tried_in_turn(postgres_of_this_worker, postgres_url):
    address = f"127.0.0.1:{postgres_of_this_worker.port}"
    store = AsyncPostgresStore(postgres_url.replace(address, f"127.0.0.1:1,{address}"))
    assert isinstance(await store.claim(ask("k")), Claimed)
    await store.close()


async def test_a_server_without_tls_is_refused_where_tls_is_required(postgres_url):
    store = AsyncPostgresStore(postgres_url, sslmode="require", timeout=2)
    with pytest.raises(StoreUnavailable, match="does not let this client in"):
        await store.counts()
    await store.close()


async def test_a_cancelled_call_leaves_no_connection_with_half_an_answer(postgres_url):
    store = AsyncPostgresStore(postgres_url, max_size=1, timeout=60)
    await store.claim(ask("k"))
    with transaction(postgres_url) as holder:
        holder.execute("SELECT 1 FROM idempotent_record FOR UPDATE")
        waiting = asyncio.ensure_future(store.renew(identity("k"), OWNER, 30.0))
        while not blocked(postgres_url):  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.01)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert (await store.get(identity("k"))).state is State.PROCESSING
    await store.close()


async def test_a_given_pool_of_asyncpg_is_used_and_left_open(postgres_url):
    async with asyncpg.create_pool(postgres_url, min_size=0, max_size=3) as pool:
        store = AsyncPostgresStore(pool=pool, timeout=1)
        await asyncio.gather(*(store.claim(ask(key)) for key in OTHERS))
        await store.send([])
        assert await store.forget_many([identity(0), identity(1)]) == [True, True]
        held = [await pool.acquire() for _ in range(3)]
        with pytest.raises(StoreUnavailable, match="max_size"):
            await store.counts()
        for connection in held:
            await pool.release(connection)
        await store.close()
        assert await pool.fetchval("SELECT count(*) FROM idempotent_record") == len(OTHERS) - 2
    with pytest.raises(StoreUnavailable, match="closed"):
        await store.counts()


async def test_a_given_pool_of_asyncpg_whose_server_is_gone_says_so(postgres_url):
    async with asyncpg.create_pool("postgresql://u@127.0.0.1:1/db", min_size=0) as pool:
        store = AsyncPostgresStore(pool=pool, timeout=0.3)
        with pytest.raises(StoreUnavailable, match="refused"):
            await store.counts()


async def test_a_given_connection_of_asyncpg_is_used_and_left_open(postgres_url):
    connection = await asyncpg.connect(postgres_url)
    store = AsyncPostgresStore(connection=connection, timeout=2)
    await asyncio.gather(*(store.claim(ask(key)) for key in OTHERS))
    with pytest.raises(StoreError, match="open transaction"):
        async with connection.transaction():
            await store.counts()
    assert (await store.counts()).processing == len(OTHERS)
    await store.close()
    await connection.close()
    with pytest.raises(StoreUnavailable):
        await store.counts()


async def test_errors_of_asyncpg_that_psycopg_has_no_class_for_are_errors_of_the_database(
    postgres_url,
):
    store = AsyncPostgresStore(postgres_url)
    await store.claim(ask("k"))
    rows(
        postgres_url,
        "CREATE FUNCTION fail() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN RAISE EXCEPTION 'no' USING ERRCODE = 'ZZ123'; END $$",
    )
    rows(
        postgres_url,
        "CREATE TRIGGER fail BEFORE UPDATE ON idempotent_record FOR EACH ROW "
        "EXECUTE FUNCTION fail()",
    )
    with pytest.raises(StoreUnavailable, match="no"):
        await store.renew(identity("k"), OWNER, 30.0)
    await store.close()


# --- through the engine ------------------------------------------------------------------


async def test_many_calls_at_once_run_each_key_once(postgres_url):
    runs = []

    async def work():
        runs.append(1)
        return os.urandom(4).hex()

    async with AsyncIdempotency(postgres_url) as idem:
        results = await asyncio.gather(
            *(idem.execute(f"key-{number % 100}", work) for number in range(300))
        )
        assert len(runs) == 100
        again = await asyncio.gather(
            *(idem.execute(f"key-{number % 100}", work) for number in range(300))
        )
        assert again == results


async def test_a_caller_cancelled_in_a_batch_gives_its_claim_back(postgres_url):
    async with AsyncIdempotency(postgres_url) as idem:

        async def work():
            return 1

        await idem.execute("warm", work)
        calls = [asyncio.ensure_future(idem.execute(f"key-{number}", work)) for number in OTHERS]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        for call in calls[::2]:
            call.cancel()
        answers = await asyncio.gather(*calls, return_exceptions=True)
        assert answers[1::2] == [1 for _ in OTHERS[1::2]]
        again = await asyncio.gather(*(idem.execute(f"key-{number}", work) for number in OTHERS))
        assert again == [1 for _ in OTHERS]
