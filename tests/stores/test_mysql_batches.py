"""Many members in one statement on MariaDB, and many tasks that share one."""

from __future__ import annotations

import asyncio
import time
from contextlib import closing

import pytest
from asyncmy.connection import Connection as DriverConnection

from semel.core.records import (
    Busy,
    Claimed,
    CompleteRequest,
    Encoded,
    Finished,
    Identity,
    RenewRequest,
    State,
)
from semel.errors import ConfigError, RecordUnreadable, StoreError, StoreUnavailable
from semel.stores.batching import MOST_MEMBERS
from semel.stores.sql.errors import Deadline
from semel.stores.sql.mysql import AsyncMySQLStore, MySQLStore
from semel.stores.sql.mysql.statements import UNABLE, BatchStatements
from semel.stores.sql.mysql.tasks import Sender
from semel.stores.sql.mysql.verbs import HEAVY
from servers.mariadb import mariadb_server
from servers.proxy import proxy_to
from stores.mysql_given import (
    DEADLOCK,
    KINDS,
    LOCK_TIMEOUT,
    RESULT,
    TABLE,
    ask,
    claim_in,
    database_of,
    driven,
    is_bulk,
    spy_on_repeats,
    through,
    transaction,
)

OTHERS = range(8)


@pytest.fixture
def server(mariadb_of_this_worker):
    return mariadb_of_this_worker


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


@pytest.fixture
async def store(mysql_url):
    """A store for asyncio whose connections are open, so that what follows counts alone."""
    store = AsyncMySQLStore(mysql_url, max_size=20, timeout=30.0)
    await store.counts()
    yield store
    await store.close()


def named(key):
    return Identity("s", str(key))


def asks(keys, **more):
    return [ask(named(key), **more) for key in keys]


def completes(requests, result=RESULT):
    return [CompleteRequest(each.identity, each.owner, result, 60.0) for each in requests]


def renewals(requests, lease=30.0):
    return [RenewRequest(each.identity, each.owner, lease) for each in requests]


def rewrite(server, url, changes, key):
    """Change a row behind the store's back."""
    server.execute(
        f"UPDATE idempotent_record SET {changes} WHERE digest = %s",  # noqa: S608 - the test's own
        TABLE.digest(named(key)),
        database=database_of(url),
    )


def lock(holder, key):
    with holder.cursor() as cursor:
        digest = TABLE.digest(named(key))
        cursor.execute("SELECT 1 FROM idempotent_record WHERE digest = %s FOR UPDATE", (digest,))


async def at_once(calls):
    """The first goes by itself, and the others find it under way."""
    return await asyncio.gather(*calls, return_exceptions=True)


async def claim_all(store, requests):
    return await at_once([store.claim(request) for request in requests])


async def complete_all(store, requests, result=RESULT):
    return await at_once(
        [store.complete(each.identity, each.owner, result, 60.0) for each in requests]
    )


# --- how many statements --------------------------------------------------------------------


async def writes(server, work):
    """How many statements that write the server was sent."""

    def count():
        found = server.execute(
            "SHOW GLOBAL STATUS WHERE Variable_name IN "
            "('Com_insert', 'Com_update', 'Com_update_multi')"
        )
        return sum(int(value) for _, value in found)

    before = count()
    await work
    return count() - before


async def test_what_comes_while_one_is_under_way_leaves_together(store, server):
    requests = asks(range(40))
    assert await writes(server, claim_all(store, requests)) == 2
    assert await writes(server, complete_all(store, requests)) == 2
    assert await writes(server, claim_all(store, asks(range(40)))) == 1, "who went together"
    records = await store.get_many([each.identity for each in requests])
    assert {record.outcome for record in records} == {RESULT}


async def test_batching_can_be_switched_off(server, mysql_url):
    store = AsyncMySQLStore(f"{mysql_url}?batching=off")
    await store.counts()
    requests = asks(range(7))
    assert await writes(server, claim_all(store, requests)) == 7
    assert await writes(server, complete_all(store, requests)) == 7
    await store.close()


def test_both_kinds_of_store_take_the_same_url(mysql_url):
    MySQLStore(f"{mysql_url}?batching=off").close()
    for kind in KINDS.values():
        with pytest.raises(ConfigError, match="batching"):
            kind(f"{mysql_url}?batching=perhaps")


def test_a_batch_is_one_commit(server, mysql_url, kind):
    def commits():
        ((_, count),) = server.execute("SHOW GLOBAL STATUS LIKE 'Handler_commit'")
        return int(count)

    with driven(kind, mysql_url) as store:
        store.send(asks(["warm"]))
        requests = asks(range(20))
        before = commits()
        store.send(requests)
        store.send(completes(requests))
        assert commits() - before < len(requests)


def test_a_batch_finds_its_rows_by_their_digests_in_a_small_table_and_in_a_large_one(
    server, mysql_url
):
    store = MySQLStore(mysql_url)
    for count in (3, 500):
        store.send(asks(f"{count}-{number}" for number in range(count)))
        ordered = {TABLE.digest(each.identity): each for each in asks(range(3))}
        some = dict(zip(ordered, completes(ordered.values()), strict=True))
        statement = BatchStatements(TABLE).complete(some)
        plan = server.execute(
            f"EXPLAIN {statement.sql}", *statement.parameters, database=database_of(mysql_url)
        )
        assert [(row[3], row[5]) for row in plan] == [("range", "PRIMARY")]
    store.close()


@pytest.mark.parametrize("more", [0, 3])
def test_more_members_than_a_batch_takes_are_cut_into_several(mysql_url, kind, more):
    with driven(kind, mysql_url) as store:
        requests = asks(range(2 * MOST_MEMBERS + more))
        assert all(isinstance(claim, Claimed) for claim in store.send(requests))
        assert store.send(renewals(requests)) == [True] * len(requests)
        assert store.send(completes(requests)) == [True] * len(requests)


# --- each member its own answer -------------------------------------------------------------


async def test_of_duplicates_that_come_at_once_one_gets_the_key(store):
    keys = [0, 1, 1, 2, 0, 2, 2, 0]
    answers = await claim_all(store, asks(keys))
    for key in set(keys):
        own = [answer for answer, name in zip(answers, keys, strict=True) if name == key]
        assert sorted(type(answer).__name__ for answer in own) == ["Busy"] * (len(own) - 1) + [
            "Claimed"
        ]


async def test_claims_in_a_batch_meet_every_state_of_a_record(store, server, mysql_url):
    done, gone, failed, left, again, held, spent = requests = asks(
        ["done", "gone", "failed", "left", "again", "held", "spent"], fingerprint=b"red"
    )
    await claim_all(store, requests)
    await store.complete(done.identity, done.owner, RESULT, 60.0)
    await store.complete(gone.identity, gone.owner, RESULT, 0.001)
    await store.fail(
        failed.identity, failed.owner, RESULT, retryable=True, keep_fingerprint=True, ttl=60.0
    )
    for each in (left, held, spent):
        await store.renew(each.identity, each.owner, 0.0)
    await asyncio.sleep(0.01)
    new = asks(["new"])
    answers = await store.send(
        [
            *asks(["done", "gone", "failed", "left"], fingerprint=b"red"),
            again,
            *asks(["held"], hold=True),
            *asks(["spent"], max_attempts=1),
            *new,
        ]
    )
    assert isinstance(answers[0], Finished)
    assert [(each.number, each.takeover) for each in answers[1:5]] == [
        (1, False),
        (2, False),
        (2, True),
        (1, False),
    ]
    assert [type(each).__name__ for each in answers[5:]] == ["Abandoned", "Exhausted", "Claimed"]
    records = await store.get_many([named(key) for key in ("gone", "left", "again", "new")])
    assert [record.number for record in records] == [1, 2, 1, 1]
    assert records[-1].owner == new[0].owner
    assert records[-1].fence == answers[-1].fence


def test_new_records_of_a_batch_are_known_by_the_insert_alone(server, mysql_url, kind):
    def reads():
        """How many queries have found a row."""
        found = server.execute(
            "SHOW GLOBAL STATUS WHERE Variable_name IN ('Com_select', 'Empty_queries')"
        )
        counts = {name: int(count) for name, count in found}
        return counts["Com_select"] - counts["Empty_queries"]

    with driven(kind, mysql_url) as store:
        store.send(asks(["warm"]))
        before = reads()
        requests = asks(range(5))
        claims = store.send(requests)
        assert reads() == before
        records = store.get_many([each.identity for each in requests])
        assert [each.fence for each in claims] == [each.fence for each in records]
        assert {each.fence for each in records} == {round(records[0].created_at * 1e6)}


def test_a_batch_knows_its_records_in_a_table_that_counts_its_rows(server, mysql_url, kind):
    with driven(kind, mysql_url) as store:
        store.send(asks(["warm"]))
        server.execute(
            "ALTER TABLE idempotent_record ADD COLUMN counted BIGINT NOT NULL AUTO_INCREMENT UNIQUE",
            database=database_of(mysql_url),
        )
        requests = asks(range(5))
        claims = [*store.send(requests), *store.send(asks(range(5)))]
        assert [type(each).__name__ for each in claims] == ["Claimed"] * 5 + ["Busy"] * 5
        records = store.get_many([each.identity for each in requests])
        assert [(each.number, each.fence) for each in claims[:5]] == [
            (each.number, each.fence) for each in records
        ]


async def test_a_bad_member_fails_alone(store):
    good = asks(OTHERS)
    bad = [
        ask(named("k" * 300)),
        ask(named("\ud800")),
        ask(named("owner"), owner=b"o" * 65),
        ask(named("lease"), lease=1e12),
        ask(named("endless"), lease=float("inf")),
    ]
    answers = await claim_all(store, [*good, *bad])
    assert all(isinstance(answer, Claimed) for answer in answers[: len(good)])
    assert all("cannot take this" in str(answer) for answer in answers[len(good) :])
    stored = await at_once(
        store.complete(each.identity, each.owner, RESULT, 1e12 if each is good[3] else 60.0)
        for each in good
    )
    assert "cannot take this" in str(stored.pop(3))
    assert stored == [True] * (len(good) - 1)


async def test_a_damaged_record_and_a_taken_digest_are_told_to_who_asks_for_them(
    store, server, mysql_url
):
    await claim_all(store, asks(["damaged", "taken"]))
    rewrite(server, mysql_url, "superseded = 'no list'", "damaged")
    rewrite(server, mysql_url, "idem_key = 'another'", "taken")
    *others, damaged, taken = await store.send(asks([*OTHERS, "damaged", "taken"]))
    assert all(isinstance(answer, Claimed) for answer in others)
    assert isinstance(damaged, RecordUnreadable)
    assert isinstance(taken, StoreError)
    assert "taken by another key" in str(taken)


def test_completes_in_a_batch_meet_owners_that_came_too_late(mysql_url, kind):
    with driven(kind, mysql_url) as store:
        first, late, twice, gone, _never = requests = asks(range(5))
        store.send([first, late, twice, gone])
        store.renew(late.identity, late.owner, 0.0)
        heir = ask(late.identity)
        store.claim(heir)
        store.complete(twice.identity, twice.owner, RESULT, 60.0)
        store.complete(gone.identity, gone.owner, RESULT, 0.001)
        time.sleep(0.01)
        assert store.send(completes(requests)) == [True, False, True, False, False]
        assert store.get(late.identity).owner == heir.owner
        assert store.get(first.identity).outcome == RESULT


def test_renewals_in_a_batch_tell_who_has_lost_the_record(mysql_url, kind):
    with driven(kind, mysql_url) as store:
        running, ended, lost, _never = requests = asks(range(4), lease=1.0)
        store.send([running, ended, ask(lost.identity)])
        store.complete(ended.identity, ended.owner, RESULT, 60.0)
        assert store.send(renewals(requests, 90.0)) == [True, False, False, False]
        record = store.get(running.identity)
        assert record.lease_until - record.now > 60
        assert store.send(renewals([running], 0.0)) == [True]
        assert store.claim(ask(running.identity)).takeover


def test_members_of_the_same_identity_keep_their_order(mysql_url, kind):
    with driven(kind, mysql_url) as store:
        first, second = asks(["k", "k"])
        claims = store.send([first, second])
        assert [type(claim).__name__ for claim in claims] == ["Claimed", "Busy"]
        assert store.send([*renewals([first], 30.0), *renewals([first], 0.0)]) == [True, True]
        assert store.claim(ask(first.identity)).takeover


def test_results_in_a_batch_come_back_to_the_last_byte(mysql_url, kind):
    texts = [b"", b"\x00", bytes(range(256)), b"'\"\\%s%%;--{}", "\U0001f600".encode()]
    with driven(kind, mysql_url) as store:
        requests = asks(range(len(texts)), fingerprint=b"\x00'%s")
        store.send(requests)
        store.send(
            [
                CompleteRequest(each.identity, each.owner, Encoded(f"raw/{n}%s", texts[n]), 60.0)
                for n, each in enumerate(requests)
            ]
        )
        records = store.get_many([each.identity for each in requests])
        assert [record.outcome.data for record in records] == texts
        assert [record.outcome.codec for record in records] == [f"raw/{n}%s" for n in range(5)]
        assert {record.fingerprint for record in records} == {b"\x00'%s"}


def test_each_member_of_a_batch_has_its_own_times(mysql_url, kind):
    with driven(kind, mysql_url) as store:
        requests = asks(range(4))
        spans = [100.0, 200.0, 100.0, 400.0]
        pairs = list(zip(requests, spans, strict=True))
        identities = [each.identity for each in requests]
        store.send(requests)
        store.send([RenewRequest(each.identity, each.owner, span) for each, span in pairs])
        found = [round(each.lease_until - each.updated_at) for each in store.get_many(identities)]
        assert found == spans
        store.send(
            [CompleteRequest(each.identity, each.owner, RESULT, span) for each, span in pairs]
        )
        found = [round(each.expires_at - each.updated_at) for each in store.get_many(identities)]
        assert found == spans


# --- own columns ----------------------------------------------------------------------------


def test_a_batch_fills_the_columns_of_the_application(server, mysql_url, kind):
    def tenant(claim):
        return int(claim.identity.key)

    with driven(kind, mysql_url, columns={"tenant": tenant}) as store:
        with closing(MySQLStore(mysql_url)) as admin:
            admin.migrate(columns={"tenant": "BIGINT"})
        requests = asks([7, 8, "no number"])
        with pytest.raises(ConfigError, match="the column tenant raised ValueError"):
            store.send(requests)
        # Each by itself, as a batcher asks then: what was claimed is its owner's already.
        assert all(isinstance(claim, Claimed) for claim in store.send(requests[:2]))
    select = "SELECT tenant FROM idempotent_record ORDER BY 1"
    found = server.execute(select, database=database_of(mysql_url))
    assert found == [(7,), (8,)]


# --- large results --------------------------------------------------------------------------


def test_a_batch_fits_into_the_smallest_packets_that_servers_take(kind):
    with (
        mariadb_server("--max-allowed-packet=1M") as server,
        driven(kind, server.database()) as store,
    ):
        requests = asks(range(9))
        store.send(requests)
        awkward = Encoded("raw", b"'" * (HEAVY - 1000))  # twice as long when it is quoted
        heavy = Encoded("raw", b"x" * (3 * HEAVY))
        results = [heavy, *[awkward] * 8]
        done = [
            CompleteRequest(each.identity, each.owner, result, 60.0)
            for each, result in zip(requests, results, strict=True)
        ]
        assert store.send(done) == [True] * 9
        assert store.get(requests[0].identity).outcome == heavy


# --- open transactions ----------------------------------------------------------------------


def test_no_batch_waits_for_a_lock(mysql_url):
    store = MySQLStore(mysql_url)
    for executor in (store._batches._executor, store._batches._renewals):
        with (
            executor.pool.lend(Deadline(5.0)) as session,
            session.connection.cursor() as cursor,
        ):
            cursor.execute("SELECT @@innodb_lock_wait_timeout")
            assert cursor.fetchall() == ((0,),)
    store.close()


async def test_a_claim_that_meets_an_open_transaction_waits_alone(
    store, server, mysql_url, monkeypatch
):
    repeated = spy_on_repeats(monkeypatch)
    done = ask(named("done"))
    await store.claim(done)
    await store.complete(done.identity, done.owner, RESULT, 60.0)
    with transaction(server, mysql_url) as holder:
        claim_in(holder, ask(named("locked")))
        calls = [asyncio.create_task(store.claim(each)) for each in asks([*OTHERS, "done"])]
        locked = asyncio.create_task(store.claim(ask(named("locked"))))
        *others, replay = await asyncio.gather(*calls)
        assert all(isinstance(answer, Claimed) for answer in others)
        assert isinstance(replay, Finished)
        assert not locked.done()
        holder.commit()
        assert isinstance(await locked, Busy)
    assert not {LOCK_TIMEOUT, DEADLOCK} & {*repeated}


def test_what_needs_no_write_is_told_while_another_member_is_locked(server, mysql_url, kind):
    with driven(kind, mysql_url, timeout=2.5) as store:
        done, running = asks(["done", "running"])
        store.send([done, running])
        store.complete(done.identity, done.owner, RESULT, 60.0)
        with transaction(server, mysql_url) as holder:
            claim_in(holder, ask(named("locked")))
            answers = store.send(asks(["done", "locked", "new", "running"]))
    assert [type(answer).__name__ for answer in answers] == [
        "Finished",
        "Busy",
        "Claimed",
        "Busy",
    ]


async def test_a_complete_that_meets_an_open_transaction_waits_alone(store, server, mysql_url):
    requests = asks([*OTHERS, "locked"])
    await store.send(requests)
    with transaction(server, mysql_url) as holder:
        lock(holder, "locked")
        *others, locked = (
            asyncio.create_task(store.complete(each.identity, each.owner, RESULT, 60.0))
            for each in requests
        )
        assert await asyncio.gather(*others) == [True] * len(others)
        assert not locked.done()
        holder.rollback()
        assert await locked is True


def test_a_renewal_that_meets_an_open_transaction_is_one_error_at_once(server, mysql_url, kind):
    with driven(kind, mysql_url, timeout=30.0) as store:
        requests = asks([*OTHERS, "locked"])
        store.send(requests)
        with transaction(server, mysql_url) as holder:
            lock(holder, "locked")
            *others, locked = store.send(renewals(requests))
        assert others == [True] * len(others)
        assert isinstance(locked, StoreUnavailable)
        assert "locked by another transaction" in str(locked)


async def test_renewals_do_not_queue_behind_claims(server, mysql_url):
    store = AsyncMySQLStore(mysql_url, max_size=1, timeout=30.0)
    running = ask(named("running"))
    await store.claim(running)
    with transaction(server, mysql_url) as holder:
        claim_in(holder, ask(named("locked")))
        waiting = asyncio.create_task(store.claim(ask(named("locked"))))
        await asyncio.sleep(0)  # it has the only connection for single calls
        assert await store.send(renewals([running])) == [True]
        assert not waiting.done()
        holder.commit()
        await waiting
    await store.close()


# --- lost connections, cancelled callers, the end -------------------------------------------


IN_BULK = pytest.param(
    "claim in bulk",
    marks=pytest.mark.skipif(
        not hasattr(DriverConnection, "prepare"),
        reason="asyncmy before 0.2.12 has no prepared statements",
    ),
)


@pytest.mark.parametrize("verb", [IN_BULK, "claim by text", "complete"])
async def test_a_batch_whose_answer_is_lost_is_answered_all_the_same(server, mysql_url, verb):
    with proxy_to(server.port) as proxy:
        store = AsyncMySQLStore(through(proxy, mysql_url))
        await store.send(asks(["warm"]))
        requests = asks(OTHERS)
        if verb == "claim by text":
            await store.send(asks(["warm"]))  # who met a record once expects more of them
        if verb == "complete":
            await store.send(requests)
        proxy.lose_reply(
            {
                "claim in bulk": is_bulk,
                "claim by text": lambda sent: sent.count(b"UTC_TIMESTAMP") > 12,
                "complete": lambda sent: b"(digest, owner) IN" in sent,
            }[verb]
        )
        if verb == "complete":
            assert await store.send(completes(requests)) == [True] * len(requests)
        else:
            answers = await store.send(requests)
            assert {(answer.number, answer.takeover) for answer in answers} == {(1, False)}
        assert proxy.lost == 1
        records = await store.get_many([each.identity for each in requests])
        assert [record.owner for record in records] == [each.owner for each in requests]
        await store.close()


async def test_a_server_that_is_away_is_told_to_each_member(server, mysql_url, monkeypatch):
    # One try for each who asks, to be counted.
    monkeypatch.setattr("semel.stores.sql.errors.SEARCH_SHARE", 0)
    with proxy_to(server.port) as proxy:
        store = AsyncMySQLStore(through(proxy, mysql_url))
        await claim_all(store, asks(["warm 1", "warm 2"]))
        proxy.refusing = True
        proxy.cut_all()
        answers = await claim_all(store, asks(OTHERS))
        assert all(isinstance(answer, StoreUnavailable) for answer in answers)
        assert len({id(answer) for answer in answers}) == len(answers)
        many = await store.send(asks(range(2 * MOST_MEMBERS)))
        assert all(isinstance(answer, StoreUnavailable) for answer in many)
        assert proxy.refused < len(OTHERS), "nobody tried again for each of them"
        proxy.refusing = False
        assert all(isinstance(each, Claimed) for each in await claim_all(store, asks(OTHERS)))
        await store.close()


async def test_a_cancelled_caller_takes_nobody_along(server, mysql_url):
    with proxy_to(server.port) as proxy:
        store = AsyncMySQLStore(through(proxy, mysql_url))
        await claim_all(store, asks(["warm 1", "warm 2"]))
        proxy.delay = 0.2
        requests = asks(OTHERS)
        calls = [asyncio.create_task(store.claim(each)) for each in requests]
        await asyncio.sleep(0.1)
        calls[3].cancel()
        answers = await asyncio.gather(*calls, return_exceptions=True)
        proxy.delay = 0.0
        assert isinstance(answers.pop(3), asyncio.CancelledError)
        assert all(isinstance(answer, Claimed) for answer in answers)
        assert (await store.get(requests[3].identity)).owner == requests[3].owner
        await store.close()


async def test_a_closed_store_says_so_to_each_member(store):
    await store.claim(ask())
    await store.close()
    answers = await claim_all(store, asks(OTHERS))
    assert all("closed" in str(answer) for answer in answers)
    assert all("closed" in str(answer) for answer in await store.send(asks(OTHERS)))


async def test_a_table_that_is_gone_is_told_to_each_member(store, server, mysql_url):
    server.execute("DROP TABLE idempotent_record", database=database_of(mysql_url))
    answers = await claim_all(store, asks(OTHERS))
    assert all(isinstance(answer, ConfigError) for answer in answers)


async def test_what_a_batch_writes_is_what_single_calls_write(store):
    alone, shared = asks(["alone", "shared"], fingerprint=b"red", hold=True)
    await store.claim(alone)
    await store.complete(alone.identity, alone.owner, RESULT, 60.0)
    await store.send([shared])
    await store.send(completes([shared]))
    one, other = await store.get_many([alone.identity, shared.identity])
    for name in ("state", "number", "hold", "fingerprint", "outcome", "retryable", "superseded"):
        assert getattr(one, name) == getattr(other, name)
    assert one.state is State.SUCCEEDED
    assert other.fence == round(other.created_at * 1e6)


async def test_a_driver_without_prepared_statements_is_sent_the_text():
    class Connection:
        """One of asyncmy's before 0.2.12."""

    bulk = BatchStatements(TABLE).claim_in_bulk({b"digest": ask()})
    assert await Sender(Connection()).send(bulk, 60.0) is UNABLE
