"""Real faults on a real PostgreSQL: restarts, crashes, lost replies, locks, deadlocks, silence."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from contextlib import closing

import psycopg
import pytest
from psycopg_pool import ConnectionPool

from semel import Idempotency, Policy
from semel.core.records import Busy, Claimed, Finished, PutRequest, State
from semel.errors import ConfigError, StoreError, StoreFull, StoreUnavailable
from semel.stores.sql.errors import Deadline
from semel.stores.sql.postgres import AsyncPostgresStore, PostgresStore
from servers.postgres import CAREFUL, postgres_server
from servers.proxy import proxy_to
from stores.postgres_given import (
    blocked,
    blocking,
    driven,
    in_threads,
    meanwhile,
    migrate,
    rows,
    transaction,
)
from stores.sqlite_helpers import RESULT, ask, finish, identity, spawn, wait_until

fault = pytest.mark.fault
kinds = pytest.mark.parametrize("kind", ["threads", "asyncio"])

OWNER = b"owner-------"
SAME_KEY = "INSERT INTO idempotent_record SELECT * FROM other"
LOCK_ROW = "SELECT * FROM idempotent_record FOR UPDATE"


@pytest.fixture(scope="module")
def server():
    """A server that the tests of this file may break, and must leave running."""
    with postgres_server("deadlock_timeout=50ms") as running:
        yield running


@pytest.fixture
def url(server):
    if server.process.poll() is not None:  # a test failed before it could start it again
        server.start()
    return server.fresh_database()


# --- the server goes away ----------------------------------------------------------------


@fault(16)
@kinds
def test_a_claim_that_a_crash_of_the_server_interrupts_is_sent_again(server, url, kind):
    with driven(kind, url, timeout=20) as store:
        store.counts()
        with driven(kind, url, table="other") as other:
            other.claim(ask("k", b"first-------"))
        with blocking(url, lambda: store.claim(ask("k")), lock=SAME_KEY) as (_, answer):
            server.crash()
            assert not answer.done()
            server.start()
            assert isinstance(answer.result(), Claimed)
        assert store.get(identity("k")).number == 1


@fault(16)
@kinds
def test_a_complete_that_a_crash_of_the_server_interrupts_is_sent_again(server, url, kind):
    with driven(kind, url, timeout=20) as store:
        store.claim(ask("k"))

        def work():
            return store.complete(identity("k"), OWNER, RESULT, 60.0)

        with blocking(url, work, lock=LOCK_ROW) as (_, answer):
            server.crash()
            assert not answer.done()
            server.start()
            assert answer.result() is True
        assert isinstance(store.claim(ask("k", b"other-------")), Finished)


# A server sends the rows of a statement first, and then commits it: here that fails or takes long.
AT_COMMIT = """
    CREATE TABLE trouble (idem_key text, kind text);
    CREATE FUNCTION commit_badly() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
        IF EXISTS (SELECT FROM trouble t WHERE t.idem_key = NEW.idem_key AND t.kind = 'error') THEN
            RAISE EXCEPTION 'no commit' USING ERRCODE = 'integrity_constraint_violation';
        ELSIF EXISTS (SELECT FROM trouble t WHERE t.idem_key = NEW.idem_key) THEN
            PERFORM pg_sleep(60);
        END IF;
        RETURN NULL;
    END $$;
    CREATE CONSTRAINT TRIGGER at_commit AFTER INSERT OR UPDATE ON idempotent_record
        DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION commit_badly();
"""
KILL_COMMITS = (
    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
    "WHERE datname = current_database() AND wait_event = 'PgSleep'"
)


@pytest.fixture
def trouble(url):
    """Give what lets the commits of a key fail ("error") or take long ("slow")."""
    migrate(url)
    with psycopg.connect(url, autocommit=True) as administrator:
        administrator.execute(AT_COMMIT)
        yield lambda key, kind: administrator.execute(
            "INSERT INTO trouble VALUES (%s, %s)", (key, kind)
        )


@fault(16)
@kinds
def test_a_claim_whose_commit_fails_is_no_claim(url, kind, trouble):
    trouble("k", "error")
    with driven(kind, url) as store:
        with pytest.raises(StoreError):
            store.claim(ask("k"))
        assert store.get(identity("k")) is None


@fault(16)
@kinds
def test_a_complete_whose_commit_fails_is_no_success(url, kind, trouble):
    with driven(kind, url) as store:
        store.claim(ask("k"))
        trouble("k", "error")
        with pytest.raises(StoreError):
            store.complete(identity("k"), OWNER, RESULT, 60.0)
        assert store.get(identity("k")).state is State.PROCESSING


@fault(16)
@kinds
def test_a_claim_whose_server_process_ends_during_the_commit_is_sent_again(url, kind, trouble):
    trouble("k", "slow")
    with driven(kind, url, timeout=20) as store, meanwhile(lambda: store.claim(ask("k"))) as answer:
        wait_until(lambda: rows(url, "SELECT 1 FROM pg_stat_activity WHERE wait_event = 'PgSleep'"))
        rows(url, "DELETE FROM trouble RETURNING idem_key")
        rows(url, KILL_COMMITS)
        assert isinstance(answer.result(), Claimed)
        assert store.get(identity("k")).number == 1


def test_of_threads_that_share_a_commit_only_the_one_that_cannot_be_committed_fails(url, trouble):
    trouble("k7", "error")
    # Not the usual five seconds: on a busy machine 48 threads take longer to be asked for alone.
    engine = Idempotency(url, policy=Policy(store_timeout=60.0))
    ran = []

    def call(number):
        try:
            return engine.execute(f"k{number}", lambda: ran.append(number) or number)
        except StoreError as error:
            return type(error).__name__

    with closing(engine):
        answers = in_threads(call, 48)
    assert answers == [number if number != 7 else answers[7] for number in range(48)]
    assert answers[7] != 7
    assert sorted(ran) == [number for number in range(48) if number != 7]


@fault(16)
@kinds
def test_calls_go_on_through_a_restart(server, url, kind):
    with driven(kind, url, timeout=20) as store:
        finish(store, "first")

        def work():
            for key in range(400):
                finish(store, key)

        with meanwhile(work) as done:
            wait_until(lambda: store_has(url, 20))
            server.restart()
            assert not done.done(), "the restart came too late"
            done.result()
        assert store.counts().succeeded == 401


@fault(16)
@kinds
@pytest.mark.parametrize("driver", [{}, {"keepalives": 1}], ids=["", "psycopg"])
def test_connections_that_died_while_idle_are_not_noticed_by_callers(server, url, kind, driver):
    with driven(kind, url, max_size=5, batching=False, **driver) as store:
        store.race([ask(key) for key in range(20)])
        assert sessions(url) > 1
        before = server.log().count("terminating connection due to administrator command")
        server.restart()
        assert server.log().count("terminating connection due to administrator command") > before
        finish(store, "after")


@fault(2)
@kinds
def test_a_claim_whose_reply_is_lost_is_the_same_attempt(server, url, kind):
    with proxy_to(server.port) as proxy:
        through = url.replace(f":{server.port}/", f":{proxy.port}/")
        with driven(kind, through) as store:
            store.counts()
            proxy.lose_reply(lambda request: b"INSERT" in request)
            answer = store.claim(ask("k"))
            assert proxy.lost == 1
            assert (answer.number, answer.takeover) == (1, False)
            assert rows(url, "SELECT number FROM idempotent_record") == [(1,)]


@fault(6)
@kinds
def test_a_complete_whose_reply_is_lost_is_a_success(server, url, kind):
    with proxy_to(server.port) as proxy:
        through = url.replace(f":{server.port}/", f":{proxy.port}/")
        with driven(kind, through) as store:
            store.claim(ask("k"))
            proxy.lose_reply(lambda request: b"UPDATE" in request)
            assert store.complete(identity("k"), OWNER, RESULT, 60.0)
            assert proxy.lost == 1


@kinds
@pytest.mark.parametrize("driver", [{}, {"keepalives": 1}], ids=["", "psycopg"])
def test_a_connection_that_breaks_while_it_is_made_is_made_again(server, url, kind, driver):
    with proxy_to(server.port) as proxy:
        through = url.replace(f":{server.port}/", f":{proxy.port}/")
        with driven(kind, through, **driver) as store:
            proxy.lose_reply(lambda request: b"set_config" in request)
            finish(store, "k")
            assert proxy.lost == 1


@kinds
def test_a_server_that_is_down_is_unavailable_and_used_again_when_it_is_back(server, url, kind):
    with driven(kind, url, timeout=1) as store:
        finish(store, "before")
        server.stop()
        try:
            with pytest.raises(StoreUnavailable, match="refused") as down:
                store.claim(ask("meanwhile"))
            assert url.rpartition("/")[2] in str(down.value)
        finally:
            server.start()
        wait_until(lambda: answers(store))
        finish(store, "after")


@kinds
def test_a_store_may_be_made_before_its_server_runs(server, url, kind):
    server.stop()
    try:
        with driven(kind, url, timeout=20) as store, meanwhile(store.counts) as answer:
            server.start()
            assert answer.result().processing == 0
    finally:
        if server.process.poll() is not None:
            server.start()


@kinds
@pytest.mark.parametrize("driver", [{}, {"keepalives": 1, "prepare": "off"}], ids=["", "cursors"])
def test_a_frozen_server_keeps_nobody_waiting_for_ever(server, url, kind, driver):
    with driven(kind, url, timeout=1, max_size=1, **driver) as store:
        finish(store, "before")
        server.pause()
        try:
            with pytest.raises(StoreUnavailable, match="did not answer in time"):
                store.claim(ask("meanwhile"))
        finally:
            server.resume()
        wait_until(lambda: answers(store))
        finish(store, "after")


@kinds
def test_a_batch_on_a_server_that_is_down_waits_once(server, url, kind):
    with driven(kind, url, timeout=4) as store:
        store.counts()
        server.stop()
        try:
            started = time.monotonic()
            outcomes = store.send([ask(key) for key in range(20)])
            outcomes += store.send(
                [PutRequest(identity(key), OWNER, RESULT, 60.0) for key in range(20)]
            )
            assert time.monotonic() - started < 40, "not two seconds for each"
        finally:
            server.start()
        assert all(isinstance(outcome, StoreUnavailable) for outcome in outcomes)
        assert len(set(map(id, outcomes))) == 40


# --- others are in the way ---------------------------------------------------------------


@kinds
def test_a_record_locked_for_too_long_is_unavailable_and_unchanged(url, kind):
    with driven(kind, url, timeout=1) as store:
        store.claim(ask("k"))

        def work():
            return store.renew(identity("k"), OWNER, 30.0)

        with (
            blocking(url, work, lock=LOCK_ROW) as (_, answer),
            pytest.raises(StoreUnavailable, match="open transaction"),
        ):
            answer.result()
        assert store.renew(identity("k"), OWNER, 30.0)


@kinds
def test_a_statement_that_takes_too_long_is_stopped(url, kind):
    with driven(kind, url, timeout=1) as store:
        store.claim(ask("k"))
        slow_trigger(url, "PERFORM pg_sleep(30)")
        with pytest.raises(StoreUnavailable, match="statement_timeout"):
            store.renew(identity("k"), OWNER, 30.0)


@fault(26)
def test_a_pool_without_a_free_connection_is_unavailable(url):
    store = PostgresStore(url, timeout=3, max_size=1)
    store.claim(ask("k"))
    busy = store._calls.pool.lend(Deadline(10.0))
    with busy, pytest.raises(StoreUnavailable, match="max_size"):
        store.renew(identity("k"), OWNER, 30.0)
    assert store.renew(identity("k"), OWNER, 30.0)
    store.close()


@fault(26)
def test_a_given_pool_without_a_free_connection_is_unavailable(url):
    with ConnectionPool(url, min_size=1, max_size=1) as pool:
        PostgresStore(pool=pool).counts()  # creates the table
        store = PostgresStore(pool=pool, timeout=0.3)
        with pool.connection(), pytest.raises(StoreUnavailable, match="max_size"):
            store.counts()


@fault(26)
async def test_an_async_pool_without_a_free_connection_is_unavailable(url):
    store = AsyncPostgresStore(url, timeout=3, max_size=1)
    await store.claim(ask("k"))
    async with store._calls.pool.lend(Deadline(10.0)):
        with pytest.raises(StoreUnavailable, match="max_size"):
            await store.renew(identity("k"), OWNER, 30.0)
    assert await store.renew(identity("k"), OWNER, 30.0)
    await store.close()


@fault(17)
@kinds
def test_a_claim_behind_an_open_first_claim_sees_its_commit(url, kind):
    with driven(kind, url) as store:
        with driven(kind, url, table="other") as other:
            other.claim(ask("k", b"first-------"))
        store.counts()
        with blocking(url, lambda: store.claim(ask("k")), lock=SAME_KEY) as (holder, answer):
            holder.commit()
            assert isinstance(answer.result(), Busy)


@fault(17)
@kinds
def test_a_claim_behind_an_open_takeover_sees_its_commit(url, kind):
    with driven(kind, url) as store:
        store.claim(ask("k", lease=0.0))
        takeover = "UPDATE idempotent_record SET lease_until = now() + interval '1 minute'"
        work = lambda: store.claim(ask("k", b"second------"))  # noqa: E731 - a name for the call
        with blocking(url, work, lock=takeover) as (holder, answer):
            holder.commit()
            assert isinstance(answer.result(), Busy)


@fault(28)
@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
def test_a_serialization_failure_is_repeated_inside_the_store(server, url, level):
    escaped = level.replace(" ", r"\ ")
    strict = {"options": f"-c default_transaction_isolation={escaped}"}
    with ConnectionPool(url, kwargs=strict, min_size=1, max_size=2) as pool:
        store = PostgresStore(pool=pool)
        store.claim(ask("k"))
        before = server.log().count("could not serialize")
        bump = "UPDATE idempotent_record SET lease_until = lease_until + interval '1 second'"

        def work():
            return store.renew(identity("k"), OWNER, 30.0)

        with blocking(url, work, lock=bump) as (holder, answer):
            holder.commit()
            assert answer.result() is True
        assert server.log().count("could not serialize") == before + 1


@fault(28)
@kinds
def test_a_deadlock_is_repeated_inside_the_store(server, url, kind):
    # Only the store's session looks for a deadlock in time, so that it is the one that loses.
    with driven(kind, url, options="-c deadlock_timeout=500ms") as store:
        keys = sorted(map(str, range(2)), key=lambda key: identity(key).digest)
        store.send([ask(key) for key in keys])
        before = server.log().count("deadlock detected")
        lock = "SELECT * FROM idempotent_record WHERE idem_key = '{}' FOR UPDATE"
        with transaction(url) as other:
            other.execute("SET LOCAL deadlock_timeout = '20s'")
            other.execute(lock.format(keys[1]))
            with meanwhile(lambda: store.forget_many([*map(identity, keys)])) as answer:
                wait_until(lambda: blocked(url))
                other.execute(lock.format(keys[0]))  # waits for the store, which waits for us
                other.commit()
                assert answer.result() == [True, True]
        assert server.log().count("deadlock detected") > before


# --- the server refuses ------------------------------------------------------------------


@pytest.fixture
def careful(server, url):
    """A URL with a password in it, of a role that may log in and nothing else."""
    server.run(f"DROP ROLE IF EXISTS {CAREFUL}")
    server.run(f"CREATE ROLE {CAREFUL} LOGIN PASSWORD 's3cret!'")
    yield url.replace("semel@", f"{CAREFUL}:s3cret%21@")
    rows(url, f"DROP OWNED BY {CAREFUL} CASCADE")
    server.run(f"DROP ROLE {CAREFUL}")


def refusal(url, kind="threads", **options):
    either = (StoreError, ConfigError)
    with driven(kind, url, timeout=2, **options) as store, pytest.raises(either) as refused:
        store.claim(ask("k"))
    shown = "".join(str(error) for error in chain(refused.value))
    assert "s3cret" not in shown
    assert "s3cret" not in repr(refused.value)
    return refused.value


def chain(error):
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


@kinds
def test_a_wrong_password_is_named(careful, kind):
    wrong = refusal(careful.replace("s3cret%21", "s3cret%20"), kind)
    assert isinstance(wrong, StoreUnavailable)
    assert "check user and password" in str(wrong)


@kinds
def test_a_missing_database_and_a_missing_role_are_named(server, careful, kind):
    missing = refusal(server.url("nowhere"), kind)
    assert isinstance(missing, StoreUnavailable)
    assert 'database "nowhere" does not exist' in str(missing)
    assert 'role "nobody_here" does not exist' in str(refusal(server.url(user="nobody_here"), kind))


def test_a_port_where_nobody_listens_is_unreachable():
    assert isinstance(refusal("postgresql://u:s3cret@127.0.0.1:1/db"), StoreUnavailable)


@kinds
def test_a_role_that_may_not_create_tables_is_told_what_to_do(careful, url, kind):
    rows(url, "REVOKE CREATE ON SCHEMA public FROM PUBLIC")
    refused = refusal(careful, kind)
    assert isinstance(refused, ConfigError)
    assert "semel migrate" in str(refused)
    assert "GRANT SELECT, INSERT, UPDATE, DELETE" in str(refused)


@kinds
def test_four_rights_are_all_that_a_store_needs(careful, url, kind):
    rows(url, "REVOKE CREATE ON SCHEMA public FROM PUBLIC")
    with driven(kind, url) as administrator:
        administrator.counts()
    rows(url, f"GRANT SELECT, INSERT, UPDATE, DELETE ON idempotent_record TO {CAREFUL}")
    rows(url, f"GRANT SELECT ON semel_schema TO {CAREFUL}")
    with driven(kind, careful) as store:
        finish(store, "k", ttl=0.01)
        store.claim(ask("abandoned", lease=0.0))
        wait_until(lambda: store.get(identity("k")) is None)
        assert store.put(identity("mark"), RESULT, 60.0, owner=OWNER)
        assert store.touch(identity("mark"), 60.0)
        assert len(store.scan().records) == 2
        assert store.purge(abandoned_after=0.0) == 2
        assert store.forget(identity("mark"))


@kinds
def test_a_full_disk_is_a_full_store(url, kind):
    with driven(kind, url) as store:
        store.claim(ask("k"))
        slow_trigger(url, "RAISE EXCEPTION USING ERRCODE = 'disk_full'")
        with pytest.raises(StoreFull, match="make room"):
            store.complete(identity("k"), OWNER, RESULT, 60.0)


@kinds
def test_a_database_that_takes_no_writes_is_unavailable(url, kind):
    with driven(kind, url) as store:
        store.counts()
    rows(url, f"ALTER DATABASE {url.rpartition('/')[2]} SET default_transaction_read_only = on")
    refused = refusal(url, kind)
    assert isinstance(refused, StoreUnavailable)
    assert "name the primary" in str(refused)


@fault(48)
def test_a_crowd_on_a_read_only_server_fails_within_its_time_and_works_when_it_takes_writes(url):
    database = url.rpartition("/")[2]
    callers, timeout = 2000, 4.0

    async def scenario(administrator):
        store = AsyncPostgresStore(url, timeout=timeout)

        async def claim(key):
            began = time.monotonic()
            try:
                return time.monotonic() - began, await store.claim(ask(key))
            except StoreUnavailable as error:
                return time.monotonic() - began, error

        def crowd(name):
            return asyncio.gather(*(claim(f"{name}{number}") for number in range(callers)))

        assert all(isinstance(answer, Claimed) for _, answer in await crowd("before"))
        administrator.execute(f"ALTER DATABASE {database} SET default_transaction_read_only = on")
        administrator.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE datname = %s AND pid <> pg_backend_pid()",
            [database],
        )
        met = await crowd("meanwhile")
        assert all("takes no writes" in str(answer) for _, answer in met)
        # Half of it is spent on the search for a primary; one search after another took 20 times.
        assert max(seconds for seconds, _ in met) < 10 * timeout / 2
        administrator.execute("SET default_transaction_read_only = off")
        administrator.execute(f"ALTER DATABASE {database} RESET default_transaction_read_only")
        assert isinstance((await claim("after"))[1], Claimed)
        await store.close()

    with psycopg.connect(url, autocommit=True) as administrator:
        asyncio.run(scenario(administrator))


@kinds
def test_too_few_connections_of_the_server_are_named(url, kind):
    name = url.rpartition("/")[2]
    rows(url, f"ALTER DATABASE {name} CONNECTION LIMIT 0")
    # The tests' own role is a superuser, whom no limit holds.
    rows(url, "CREATE ROLE ordinary LOGIN")
    try:
        assert "lower max_size" in str(refusal(url.replace("semel@", "ordinary@"), kind))
    finally:
        rows(url, "DROP ROLE ordinary")


# --- processes die -----------------------------------------------------------------------


def claim_and_die(url):
    PostgresStore(url).claim(ask("k", lease=0.3))
    os.kill(os.getpid(), signal.SIGKILL)


def test_what_a_killed_process_claimed_is_free_after_its_lease(url):
    child = spawn.Process(target=claim_and_die, args=(url,))
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    store = PostgresStore(url)
    wait_until(lambda: isinstance(store.claim(ask("k", b"second------")), Claimed))
    record = store.get(identity("k"))
    assert (record.number, record.owner) == (2, b"second------")
    store.close()


# --- helpers -----------------------------------------------------------------------------


def answers(store):
    try:
        store.counts()
    except StoreUnavailable:
        return False
    return True


def store_has(url, records):
    return rows(url, "SELECT count(*) >= %s FROM idempotent_record", records) == [(True,)]


def sessions(url):
    [(count,)] = rows(
        url,
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() "
        "AND application_name = 'semel'",
    )
    return count


def slow_trigger(url, body):
    """Run `body` inside every change of the table."""
    rows(
        url,
        f"CREATE FUNCTION fail() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN {body}; RETURN NEW; END $$",
    )
    rows(
        url,
        "CREATE TRIGGER fail BEFORE UPDATE ON idempotent_record FOR EACH ROW EXECUTE FUNCTION fail()",
    )
