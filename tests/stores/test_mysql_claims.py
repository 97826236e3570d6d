"""Many callers, one row: duplicates, open transactions, deadlocks, isolation levels, processes."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
from collections import Counter

import pytest

from semel.core.records import (
    Busy,
    Claimed,
    CompleteRequest,
    Encoded,
    Finished,
    Identity,
    State,
)
from semel.errors import StoreUnavailable
from semel.stores.sql.mysql import MySQLStore, threads, verbs
from semel.stores.sql.mysql.addresses import SessionSettings
from semel.stores.sql.mysql.threads import send
from semel.stores.sql.mysql.verbs import MySQLVerbs
from semel.stores.sql.verbs import Statement
from servers.proxy import proxy_to
from stores.mysql_given import (
    DEADLOCK,
    IDENTITY,
    KINDS,
    LOCK_TIMEOUT,
    RESULT,
    TABLE,
    ask,
    at_once,
    claim_in,
    database_of,
    driven,
    new_owner,
    spy_on_repeats,
    through,
    transaction,
    wait_until,
    waiting_for_a_lock,
)

spawn = multiprocessing.get_context("spawn")

LEVELS = ["READ UNCOMMITTED", "READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"]


@pytest.fixture
def server(mariadb_of_this_worker):
    return mariadb_of_this_worker


@pytest.fixture
def store(mysql_url):
    store = MySQLStore(mysql_url, max_size=20, timeout=30.0)
    store.counts()  # the table is there
    yield store
    store.close()


# --- round trips ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_first_execution_is_two_round_trips_and_a_replay_is_one(server, mysql_url, kind):
    with proxy_to(server.port) as proxy, driven(kind, through(proxy, mysql_url)) as store:
        store.counts()  # connected, and the table is there

        def round_trips(call):
            before = proxy.requests
            call()
            return proxy.requests - before

        request = ask()
        assert round_trips(lambda: store.claim(request)) == 1
        assert round_trips(lambda: store.renew(IDENTITY, request.owner, 30)) == 1
        assert round_trips(lambda: store.complete(IDENTITY, request.owner, RESULT, 60)) == 1
        assert round_trips(lambda: store.claim(ask())) == 1
        assert round_trips(lambda: store.get(IDENTITY)) == 1


# --- open transactions ----------------------------------------------------------------------


def test_ten_duplicates_behind_an_open_transaction_are_told_busy_after_its_commit(
    server, mysql_url, store, monkeypatch
):
    repeated = spy_on_repeats(monkeypatch)
    with transaction(server, mysql_url) as owner:
        claim_in(owner, ask())
        claims = at_once([lambda: store.claim(ask())] * 10)
        wait_until(lambda: waiting_for_a_lock(server) == 10)
        owner.commit()
        assert all(isinstance(claim.result(), Busy) for claim in claims)
    assert repeated == []  # not one deadlock, not even a hidden one


def test_ten_duplicates_behind_a_transaction_that_is_rolled_back_give_one_claim(
    server, mysql_url, store, monkeypatch
):
    repeated = spy_on_repeats(monkeypatch)
    with transaction(server, mysql_url) as owner:
        claim_in(owner, ask())
        claims = at_once([lambda: store.claim(ask())] * 10)
        wait_until(lambda: waiting_for_a_lock(server) == 10)
        owner.rollback()
        answers = Counter(type(claim.result()) for claim in claims)
    assert answers == {Claimed: 1, Busy: 9}
    assert DEADLOCK in repeated


@pytest.mark.parametrize("kind", KINDS)
def test_a_lock_timeout_is_repeated_until_the_row_is_free(
    server, mysql_url, store, kind, monkeypatch
):
    repeated = spy_on_repeats(monkeypatch)
    with transaction(server, mysql_url) as holder, driven(kind, mysql_url, timeout=3.0) as other:
        other.counts()
        claim_in(holder, ask())
        (claim,) = at_once([lambda: other.claim(ask())])  # waits for a second, then again
        wait_until(lambda: LOCK_TIMEOUT in repeated)
        holder.commit()
        assert isinstance(claim.result(), Busy)


@pytest.mark.parametrize("kind", KINDS)
def test_a_record_that_an_open_transaction_keeps_is_busy(server, mysql_url, store, kind):
    with transaction(server, mysql_url) as holder, driven(kind, mysql_url, timeout=2.5) as other:
        other.counts()
        claim_in(holder, ask())
        assert isinstance(other.claim(ask()), Busy)
        assert [type(answer) for answer in other.send([ask()])] == [Busy]
        holder.commit()
        assert isinstance(store.claim(ask()), Busy)


def test_a_purge_that_loses_a_deadlock_goes_on(server, mysql_url, store, monkeypatch):
    repeated = spy_on_repeats(monkeypatch)
    identities = sorted((Identity("s", str(n)) for n in range(40)), key=TABLE.digest)
    for identity in identities:
        store.put(identity, RESULT, 0.001, owner=new_owner())
    first, last = TABLE.digest(identities[0]), TABLE.digest(identities[-1])
    with transaction(server, mysql_url) as other, other.cursor() as cursor:
        # Heavier than the purge, so that the server lets the purge give way.
        cursor.execute("CREATE TEMPORARY TABLE seq AS SELECT seq FROM seq_1_to_2000")
        cursor.execute(
            "INSERT INTO idempotent_record (digest, prefix, idem_key, biz_type, status, created_at,"
            " updated_at, owner, number, fence, hold, format) SELECT UNHEX(MD5(seq)), 'other:', seq,"
            " 's', 0, UTC_TIMESTAMP(6), UTC_TIMESTAMP(6), 'o', 1, 1, 0, 1 FROM seq"
        )
        lock = "SELECT 1 FROM idempotent_record WHERE digest = %s FOR UPDATE"
        cursor.execute(lock, (last,))
        (purge,) = at_once([store.purge])
        wait_until(lambda: waiting_for_a_lock(server) == 1)
        cursor.execute(lock, (first,))
        other.rollback()
    assert purge.result() == 40
    assert repeated[0] == DEADLOCK


def test_a_purge_commits_a_few_rows_at_a_time(store, monkeypatch):
    monkeypatch.setattr(verbs, "PURGED_AT_ONCE", 3)
    for number in range(10):
        store.put(Identity("s", str(number)), RESULT, 0.001, owner=new_owner())
    time.sleep(0.01)
    assert store.purge(limit=4) == 4
    assert store.purge() == 6


def test_a_record_that_never_stands_still_is_given_up(store, monkeypatch):
    store.claim(ask(lease=0.001))
    time.sleep(0.01)
    nothing = Statement("UPDATE idempotent_record SET number = number WHERE 1 = 0", (), writes=True)
    monkeypatch.setattr(type(TABLE), "swap", lambda *_: nothing)
    for call in (
        lambda: store.claim(ask()),
        lambda: store.put(IDENTITY, RESULT, 60, owner=new_owner()),
        lambda: store.adopt(IDENTITY, new_owner(), 30),
    ):
        with pytest.raises(StoreUnavailable, match="changed"):
            call()


@pytest.mark.parametrize("verb", ["claim", "put"])
def test_a_record_removed_between_insert_and_read_is_inserted_again(store, monkeypatch, verb):
    store.get(IDENTITY)  # the table is there
    asked = []

    def removed_the_first_time(connection, statement):
        asked.append(statement)
        return send(connection, statement if len(asked) > 1 else statement.then)

    monkeypatch.setattr(threads, "send", removed_the_first_time)
    if verb == "claim":
        assert isinstance(store.claim(ask()), Claimed)
    else:
        assert store.put(IDENTITY, RESULT, 60, owner=new_owner())
    assert len(asked) == 2


# --- isolation levels -----------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
def test_one_of_many_runs_at_every_isolation_level(server, mysql_url, level):
    def connect():
        return server.client(
            database=mysql_url.rpartition("/")[2],
            init_command=f"SET SESSION TRANSACTION ISOLATION LEVEL {level}",
        )

    store = MySQLStore(connect=connect, max_size=8)
    try:
        for key in range(10):
            identity = Identity("storm", str(key))
            asks = [ask(identity) for _ in range(8)]
            claims = at_once([lambda each=each: store.claim(each) for each in asks])
            answers = [claim.result() for claim in claims]
            (winner,) = (n for n, answer in enumerate(answers) if isinstance(answer, Claimed))
            assert store.complete(identity, asks[winner].owner, RESULT, 60)
            assert isinstance(store.claim(ask(identity)), Finished)
    finally:
        store.close()


# --- processes ------------------------------------------------------------------------------


def claim_everything(url, keys, name, results):
    store = MySQLStore(url)
    won = []
    for key in keys:
        request = ask(Identity("race", str(key)))
        if isinstance(store.claim(request), Claimed):
            won.append(key)
            done = Encoded("json", f"{name}".encode())
            assert store.complete(request.identity, request.owner, done, 60)
    store.close()
    results.put((name, won))


def test_processes_share_the_keys_and_none_is_run_twice(mysql_url):
    """The table does not exist yet: they create it at the same moment, too."""
    results = spawn.Queue()
    children = [
        spawn.Process(target=claim_everything, args=(mysql_url, range(60), name, results))
        for name in range(4)
    ]
    for child in children:
        child.start()
    won = [results.get(timeout=60) for _ in children]
    for child in children:
        child.join()
        assert child.exitcode == 0
    assert sorted(key for _, keys in won for key in keys) == list(range(60))
    store = MySQLStore(mysql_url)
    for name, keys in won:
        for key in keys:
            assert store.get(Identity("race", str(key))).outcome.data == f"{name}".encode()
    store.close()


def claim_and_hang(url, ready):
    store = MySQLStore(url)
    store.claim(ask(lease=1.0))
    ready.set()
    time.sleep(60)


def test_a_killed_owner_is_replaced_after_its_lease(mysql_url, store):
    ready = spawn.Event()
    child = spawn.Process(target=claim_and_hang, args=(mysql_url, ready))
    child.start()
    assert ready.wait(60)
    os.kill(child.pid, signal.SIGKILL)
    child.join()
    wait_until(lambda: isinstance(store.claim(ask(max_attempts=2)), Claimed))
    record = store.get(IDENTITY)
    assert (record.number, record.state) == (2, State.PROCESSING)


# --- batches --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_bad_member_of_a_batch_fails_alone(mysql_url, kind):
    with driven(kind, mysql_url) as store:
        good, bad = ask(Identity("s", "good")), ask(Identity("s", "\ud800"))
        long = ask(Identity("s", "k" * 300))
        claims = store.send([good, bad, long])
        assert isinstance(claims[0], Claimed)
        assert "cannot take this" in str(claims[1])
        assert "cannot take this" in str(claims[2])
        done = [CompleteRequest(each.identity, each.owner, RESULT, 60) for each in (good, bad)]
        assert store.send(done)[0] is True


def test_a_locked_member_of_a_batch_does_not_refuse_the_others(server, mysql_url):
    store = MySQLStore(mysql_url, timeout=2.5)
    store.counts()
    asks = [ask(Identity("s", str(n))) for n in range(5)]
    with transaction(server, mysql_url) as holder:
        claim_in(holder, ask(asks[2].identity))
        outcomes = store.send(asks)
    store.close()
    assert isinstance(outcomes.pop(2), Busy)
    assert all(isinstance(outcome, Claimed) for outcome in outcomes)


# --- between the look at a row and the write over it -------------------------------------


class ByHand:
    """A claim that a test takes step by step, on a connection of its own."""

    def __init__(self, client, request):
        self._client = client
        self._verb = MySQLVerbs(TABLE).claim(request).start()
        self._statement = next(self._verb)

    def step(self):
        """Send one statement, and give the answer of the claim if that was the last one."""
        try:
            self._statement = self._verb.send(send(self._client, self._statement))
        except StopIteration as end:
            return end.value
        return None

    def finish(self):
        while (answer := self.step()) is None:
            pass
        return answer


@pytest.fixture
def by_hand(server, mysql_url, store):
    with transaction(server, mysql_url) as client:
        client.autocommit(True)
        yield lambda request: ByHand(client, request)


def change(server, url, sql):
    server.execute(f"UPDATE idempotent_record SET {sql}", database=database_of(url))  # noqa: S608 - the test's own


def test_a_claim_is_not_written_over_another_takeover_whose_lease_looks_the_same(
    store, server, mysql_url, by_hand
):
    anna = new_owner()
    store.claim(ask(owner=anna))
    assert store.renew(IDENTITY, anna, 0)
    claim = by_hand(ask())
    assert claim.step() is None  # it has looked, and would take over
    server.execute(
        "CREATE TABLE before_it SELECT lease_until FROM idempotent_record",
        database=database_of(mysql_url),
    )
    assert store.claim(ask()).number == 2
    change(server, mysql_url, "lease_until = (SELECT lease_until FROM before_it)")
    assert claim.finish().number == 3
    assert store.get(IDENTITY).number == 3


def test_a_claim_is_not_written_over_an_attempt_that_its_owner_revived(store, by_hand):
    anna = new_owner()
    store.claim(ask(owner=anna))
    assert store.renew(IDENTITY, anna, 0)
    claim = by_hand(ask())
    assert claim.step() is None
    assert store.renew(IDENTITY, anna, 600.0)
    assert isinstance(claim.finish(), Busy)
    assert store.get(IDENTITY).owner == anna


def test_a_claim_is_not_written_over_a_result_that_is_kept_for_longer(
    store, server, mysql_url, by_hand
):
    anna = new_owner()
    store.claim(ask(owner=anna))
    assert store.complete(IDENTITY, anna, RESULT, 600.0)
    change(server, mysql_url, "expire_at = created_at")
    claim = by_hand(ask())
    assert claim.step() is None
    change(server, mysql_url, "expire_at = created_at + INTERVAL 1 DAY")
    assert isinstance(claim.finish(), Finished)
    assert store.get(IDENTITY).outcome == RESULT


@pytest.fixture
def frozen(server, mysql_url, store, monkeypatch):
    """A store for whose connections the server's clock stands still."""
    set_up = SessionSettings.__init__

    def stop_the_clock(settings, *args, **options):
        set_up(settings, *args, **options)
        for name, statement in vars(settings).items():
            moved = statement.replace("timestamp = DEFAULT", "timestamp = 1900000000.000001")
            setattr(settings, name, moved)

    monkeypatch.setattr(SessionSettings, "__init__", stop_the_clock)

    def connect():
        return server.client(database=database_of(mysql_url))

    with contextlib.closing(MySQLStore(connect=connect)) as frozen:
        yield frozen


@pytest.mark.parametrize("together", [False, True], ids=["one", "many"])
def test_a_row_of_the_same_microsecond_is_not_taken_for_the_own_insert(frozen, together):
    other = Identity("orders.create", "43")
    first = frozen.claim(ask())
    asks = [ask(), ask(other)]
    answers = frozen.send(asks) if together else [frozen.claim(each) for each in asks]
    assert [type(answer) for answer in answers] == [Busy, Claimed]
    assert answers[1].fence == first.fence, "they did not meet in one microsecond"


def test_a_mark_is_not_told_as_set_where_a_row_of_the_same_microsecond_is_in_its_way(frozen):
    first = frozen.claim(ask())
    assert frozen.put(IDENTITY, RESULT, 600.0, owner=new_owner()) is False
    assert frozen.get(IDENTITY).fence == first.fence
    other = Identity("orders.create", "43")
    assert frozen.put(other, RESULT, 600.0, owner=new_owner()) is True
    assert frozen.get(other).fence == first.fence, "they did not meet in one microsecond"
