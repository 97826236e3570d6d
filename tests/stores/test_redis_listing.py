"""Expiry of keys, the index of running leases, and what is read through it."""

from __future__ import annotations

import base64
import time

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis import exceptions as driver

from semel.core.records import AUDIT_SCOPE, Identity, State
from semel.errors import (
    ConfigError,
    RecordUnreadable,
    StoreError,
    StoreFull,
    StoreRefused,
    StoreUnavailable,
)
from semel.stores.base import CountRequest, Counts
from semel.stores.redis.commands import Commands, KeyLayout
from semel.stores.redis.errors import failure
from semel.stores.redis.listing import Listing
from stores.redis_given import ERROR, IDENTITY, RESULT, ask, new_owner, opened

LAYOUT = KeyLayout("idem:")
RECORD, INDEX = LAYOUT.record_and_index(IDENTITY)
MEMBER = IDENTITY.encoded


@pytest.fixture
def store(redis_url):
    with opened(redis_url) as store:
        yield store


@pytest.fixture
def client(redis_of_this_worker):
    with redis_of_this_worker.client() as client:
        yield client


def remaining(client) -> float:
    return client.pttl(RECORD) / 1000


# --- expiry ---------------------------------------------------------------------------------


def test_a_running_key_outlives_its_lease_by_the_retention(store, client):
    store.claim(ask(lease=30, ttl=600))
    assert remaining(client) == pytest.approx(630, abs=5)


def test_renewing_sets_the_expiry_again_from_the_retention_of_the_claim(store, client):
    request = ask(lease=1000, ttl=600)
    store.claim(request)
    store.renew(IDENTITY, request.owner, 30)
    assert remaining(client) == pytest.approx(630, abs=5)
    store.renew(IDENTITY, request.owner, 0)
    assert remaining(client) == pytest.approx(600, abs=5)
    store.claim(request)
    assert remaining(client) == pytest.approx(1600, abs=5)


def test_a_held_key_never_expires_until_it_ends(store, client):
    request = ask(hold=True)
    store.claim(request)
    assert client.pttl(RECORD) == -1
    store.renew(IDENTITY, request.owner, 0)
    assert client.pttl(RECORD) == -1
    store.complete(IDENTITY, request.owner, RESULT, 60)
    assert remaining(client) == pytest.approx(60, abs=5)


def test_an_abandoned_key_that_expired_is_claimed_afresh(store):
    store.claim(ask(lease=0, ttl=0.05))
    time.sleep(0.1)
    claimed = store.claim(ask())
    assert (claimed.number, claimed.takeover) == (1, False)


def test_the_shortest_retention_is_not_for_ever(store, client):
    store.claim(ask(lease=0, ttl=0))
    assert client.pttl(RECORD) != -1


# --- the index ------------------------------------------------------------------------------


def test_the_index_names_running_records_by_their_deadline(store, client):
    request = ask(lease=30)
    store.claim(request)
    assert client.zscore(INDEX, MEMBER) / 1e6 == store.get(IDENTITY).lease_until
    store.renew(IDENTITY, request.owner, 60)
    assert client.zscore(INDEX, MEMBER) / 1e6 == store.get(IDENTITY).lease_until


@pytest.mark.parametrize("ending", ["complete", "fail", "forget", "put"])
def test_a_record_that_ended_leaves_the_index(store, client, ending):
    request = ask(lease=0)
    store.claim(request)
    assert client.zcard(INDEX) == 1
    match ending:
        case "complete":
            assert store.complete(IDENTITY, request.owner, RESULT, 60)
        case "fail":
            assert store.fail(
                IDENTITY, request.owner, ERROR, retryable=True, keep_fingerprint=True, ttl=60
            )
        case "forget":
            assert store.forget(IDENTITY)
        case "put":
            assert store.put(IDENTITY, RESULT, 60, owner=new_owner())
    assert client.zcard(INDEX) == 0


def test_what_is_stuck_is_found_without_a_scan(store, redis_of_this_worker):
    for number in range(50):
        store.put(Identity("s", str(number)), RESULT, 60, owner=new_owner())
    store.claim(ask(lease=0))
    before = redis_of_this_worker.calls("scan", "keys")
    assert [record.identity for record in store.stuck()] == [IDENTITY]
    assert redis_of_this_worker.calls("scan", "keys") == before


def test_a_listing_leaves_the_audit_trail_out_without_reading_it(store, redis_of_this_worker):
    for number in range(50):
        entry = Identity(AUDIT_SCOPE, f"audit-{number}")
        store.put(entry, RESULT, 60, owner=new_owner())
    store.put(IDENTITY, RESULT, 60, owner=new_owner())
    before = redis_of_this_worker.calls("evalsha", "eval", "get")
    assert [record.identity for record in store.scan().records] == [IDENTITY]
    assert redis_of_this_worker.calls("evalsha", "eval", "get") <= before + 2  # a script reads it
    assert len(store.scan(scope=AUDIT_SCOPE).records) == 50


def test_a_stale_entry_is_pruned_by_whoever_meets_it(store, client):
    client.zadd(INDEX, {MEMBER: 1})
    assert store.stuck() == []
    assert client.zcard(INDEX) == 0
    store.put(IDENTITY, RESULT, 60, owner=new_owner())
    client.zadd(INDEX, {MEMBER: 1})
    assert store.purge(abandoned_after=0) == 0
    assert client.zcard(INDEX) == 0
    assert store.get(IDENTITY).state is State.SUCCEEDED


def test_an_entry_with_a_wrong_deadline_is_put_right(store, client):
    store.claim(ask(lease=30))
    client.zadd(INDEX, {MEMBER: 1})
    assert store.stuck() == []
    assert client.zscore(INDEX, MEMBER) / 1e6 == store.get(IDENTITY).lease_until
    client.zadd(INDEX, {MEMBER: 1})
    assert store.purge(abandoned_after=0) == 0
    assert client.zscore(INDEX, MEMBER) / 1e6 == store.get(IDENTITY).lease_until


SAME_BUCKET = [
    identity
    for identity in (Identity("s", str(n)) for n in range(20_000))
    if LAYOUT.record_and_index(identity)[1] == INDEX
]


def test_stale_entries_in_front_do_not_hide_what_is_stuck_behind_them(store, client):
    for number, identity in enumerate(SAME_BUCKET[:10]):
        client.zadd(INDEX, {identity.encoded: number + 1})
    client.zadd(INDEX, {f"not ours {n}": 0.5 for n in range(10)})
    store.claim(ask(lease=0))
    assert [record.identity for record in store.stuck(limit=3)] == [IDENTITY]


def test_held_records_in_front_do_not_stop_a_purge(store):
    for number in range(10):
        store.claim(ask(Identity("held", str(number)), lease=0, hold=True))
    for number in range(5):
        store.claim(ask(Identity("free", str(number)), lease=0))
    assert store.purge(limit=3, abandoned_after=0) == 3
    assert store.purge(limit=3, abandoned_after=0) == 2
    assert store.purge(limit=3, abandoned_after=0) == 0
    assert store.counts().abandoned == 10


def test_held_records_of_one_bucket_do_not_stop_a_purge_of_that_bucket(store, client):
    *held, free = SAME_BUCKET[:6]
    for identity in held:
        store.claim(ask(identity, lease=0, hold=True))
    store.claim(ask(free, lease=0))
    assert client.zcard(INDEX) == 6
    assert store.purge(limit=1, abandoned_after=0) == 1
    assert store.get(free) is None


def test_a_foreign_type_in_the_place_of_an_index_is_a_typed_error(store, client):
    client.set(INDEX, "x")
    with pytest.raises(RecordUnreadable, match="another type"):
        store.stuck()


# --- pages ----------------------------------------------------------------------------------


def pages(store, **asked):
    cursor, found = None, []
    while True:
        page = store.scan(cursor=cursor, **asked)
        assert len(page.records) <= asked["limit"]
        found += [record.identity.key for record in page.records]
        cursor = page.cursor
        if cursor is None:
            return found


@pytest.mark.parametrize("limit", [1, 7, 100, 5000])
def test_pages_never_exceed_the_limit_and_never_miss_a_record(store, limit):
    keys = {str(number) for number in range(300)}
    for key in keys:
        store.put(Identity("s", key), RESULT, 60, owner=new_owner())
    found = pages(store, limit=limit)
    assert len(found) == 300
    assert set(found) == keys


def test_a_few_records_among_many_foreign_keys_are_found(store, client):
    client.mset({f"other:{number}": "x" for number in range(20_000)})
    store.put(Identity("s", "needle"), RESULT, 60, owner=new_owner())
    assert pages(store, limit=10) == ["needle"]
    assert store.counts().succeeded == 1


def test_a_page_that_finds_nothing_for_long_is_given_back_short(store):
    for number in range(100):
        store.put(Identity("s", str(number)), RESULT, 60, owner=new_owner())
    page = store.scan(state=State.FAILED, limit=1)
    assert page.records == ()
    assert page.cursor is not None
    assert pages(store, state=State.FAILED, limit=1) == []


def test_asking_for_nothing_gives_nothing(store):
    store.claim(ask(lease=0))
    assert store.stuck(limit=0) == []
    assert store.purge(limit=0, abandoned_after=0) == 0


def test_a_record_that_vanishes_while_it_is_counted_is_not_counted():
    steps = Listing(Commands(LAYOUT)).counts(CountRequest())
    next(steps)
    steps.send([""])
    assert len(steps.send((0, [RECORD]))) == 1
    with pytest.raises(StopIteration) as done:
        steps.send([None])
    assert done.value.value == Counts(processing=0, abandoned=0, succeeded=0, failed=0)


@pytest.mark.parametrize("cursor", ["", "x", "!!!", "bm90IGpzb24=", "W10="])
def test_a_cursor_that_is_none_is_named(store, cursor):
    with pytest.raises(ConfigError, match="is not a cursor"):
        store.scan(cursor=cursor)


@given(st.text(max_size=20), st.text(max_size=20), st.text(max_size=10))
def test_every_identity_has_one_key_and_comes_back_from_it(scope, key, prefix):
    identity = Identity(scope, key)
    try:
        keys = KeyLayout(prefix.replace("{", "").replace("}", ""))
        record, index = keys.record_and_index(identity)
    except UnicodeEncodeError:
        return
    assert keys.identity(record) == identity
    assert keys.record(identity) == record
    assert index in keys.indexes
    assert record not in keys.indexes


# --- errors that are hard to have a real server make -----------------------------------------

REPLIES = {
    "MISCONF Redis is configured to save RDB snapshots": (StoreUnavailable, "cannot write to its disk"),
    "NOREPLICAS Not enough good replicas to write.": (StoreUnavailable, "too few good replicas"),
    "MASTERDOWN Link with MASTER is down": (StoreUnavailable, "lost its primary"),
    "BUSY Redis is busy running a script.": (StoreUnavailable, "busy running a Lua script"),
    "ERR Error running script (call to f_x): @user_script:9: OOM command not allowed": (StoreFull, "is full"),
    "ERR Error running script (call to f_x): @user_script:9: READONLY You can't write": (StoreUnavailable, "is a replica"),
    "ERR Error running script: @user_script:1: WRONGTYPE Operation against a key": (RecordUnreadable, "another type"),
    "NOPERM this user has no permissions to access one of the channels": (StoreRefused, "a channel"),
    "ERR Protocol error: unauthenticated multibulk length": (StoreRefused, "authentication failed"),
    "NOPERM nothing in particular": (StoreRefused, "something"),
    "ERR something new": (StoreError, "answered: ERR something new"),
}  # fmt: skip


@pytest.mark.parametrize(("reply", "expected"), REPLIES.items())
def test_replies_become_our_errors_with_a_way_out(reply, expected):
    kind, message = expected
    error = failure(driver.ResponseError(reply), "redis h:1")
    assert type(error) is kind
    assert message in str(error)
    assert "redis h:1" in str(error)


@pytest.mark.parametrize(
    ("raised", "message"),
    [
        (driver.BusyLoadingError("LOADING"), "still loading"),
        (driver.ClusterDownError("CLUSTERDOWN"), "no server has some of its slots"),
        (driver.MovedError("1 h:2"), "use redis\\+cluster://"),
        (driver.TryAgainError("TRYAGAIN"), "moving this slot"),
        (driver.ConnectionError("max number of clients reached"), "maxclients"),
        (driver.ConnectionError("Too many connections"), "higher max_connections"),
        (driver.ConnectionError(""), "cannot be reached: ConnectionError"),
        (OSError("no route"), "cannot be reached: no route"),
    ],
)
def test_driver_errors_become_store_unavailable(raised, message):
    with pytest.raises(StoreUnavailable, match=message):
        raise failure(raised, "redis h:1")


def test_a_store_on_a_cluster_is_not_told_to_open_a_cluster():
    error = failure(driver.MovedError("1 h:2"), "redis cluster h:1")
    assert "did not settle in time; see CLUSTER INFO" in str(error)
    assert "redis+cluster://" not in str(error)


# --- cursors ---------------------------------------------------------------------------------


def forged(*waiting: Identity) -> str:
    """A cursor that a caller has made, with records that no listing has found."""
    return base64.urlsafe_b64encode(msgspec.json.encode([None, 0, waiting])).decode()


def test_a_forged_cursor_reads_nothing_that_was_not_asked_for(store):
    mine, other, audit = Identity("a", "1"), Identity("b", "1"), Identity(AUDIT_SCOPE, "1")
    for identity in (mine, other, audit):
        store.put(identity, RESULT, 60, owner=new_owner())
    cursor = forged(mine, other, audit)

    def found(**ask):
        return [record.identity for record in store.scan(cursor=cursor, **ask).records]

    assert found(scope="a") == [mine]
    assert found(scope="b") == [other]
    assert found() == [mine, other]
    assert found(scope="a", prefix="2") == []
    assert found(scope="a", state=State.FAILED) == []
