"""Large results on Redis: sent beside the record first, read by a plain GET, judged as ever."""

from __future__ import annotations

import contextlib
import json

import pytest

from semel import Idempotency
from semel.core.records import (
    Busy,
    Claimed,
    ClaimRequest,
    CompleteRequest,
    Encoded,
    Finished,
    Identity,
    Mismatch,
    State,
)
from semel.errors import RecordUnreadable, StoreFull, StoreUnavailable, ValueRejected
from semel.stores.redis import open_async_store, open_store
from semel.stores.redis.commands import LARGE, Command, KeyLayout
from semel.stores.redis.replies import LONGEST_HEADER, unpack_outcome
from semel.testing.driver import StoreDriver
from servers.redis import redis_cluster, redis_server, wait_until
from stores.redis_given import ERROR, IDENTITY, RESULT, ask, new_owner

KINDS = {"threads": open_store, "asyncio": open_async_store}
KEYS = KeyLayout("idem:")
RECORD, INDEX = KEYS.record_and_index(IDENTITY)
PRINTS = [bytes([number]) * 16 for number in range(12)]
BORDER = [LARGE - 1, LARGE, LARGE + 1, 1_000_000]


def value(size: int, codec: str = "json/1") -> Encoded:
    """A result of that many bytes, no two parts of which are alike."""
    text = b"".join(b"%d," % number for number in range(size // 4))
    return Encoded(codec, (text + bytes(size))[:size])


BIG = value(1_000_000)


@pytest.fixture(scope="module", params=["redis", "valkey", "cluster"])
def running(request):
    if request.param == "cluster":
        with redis_cluster() as servers:
            yield servers
    else:
        with redis_server(valkey=request.param == "valkey") as server:
            yield server


@pytest.fixture
def server(running):
    with contextlib.closing(running.client()) as client:
        client.flushall()
    return running


@pytest.fixture
def client(server):
    with contextlib.closing(server.client()) as client:
        yield client


@pytest.fixture(params=KINDS)
def open_on(request):
    """Open a store of either kind, driven by plain calls."""
    with contextlib.ExitStack() as stack:

        def opening(url: str, **options) -> StoreDriver:
            driver = StoreDriver(KINDS[request.param](url, **options))
            stack.callback(driver.close)
            return driver

        yield opening


@pytest.fixture
def store(open_on, server):
    return open_on(server.url)


@pytest.fixture
def single(open_on, redis_url):
    return open_on(redis_url)


@pytest.fixture
def single_client(redis_of_this_worker):
    with redis_of_this_worker.client() as client:
        yield client


def keys(client) -> set[bytes]:
    return set(client.scan_iter(count=1000))


def calls(client, command: str) -> int:
    """How often a server has run a command, in scripts or not."""
    return client.info("commandstats").get(f"cmdstat_{command}", {"calls": 0})["calls"]


# --- ends and replays ------------------------------------------------------------------------


@pytest.mark.parametrize("size", BORDER)
@pytest.mark.parametrize("fingerprint", [None, PRINTS[0]])
def test_a_result_of_any_size_comes_back_as_it_was(store, client, size, fingerprint):
    first, result = ask(fingerprint=fingerprint), value(size)
    claimed = store.claim(first)
    assert isinstance(claimed, Claimed)
    assert store.complete(IDENTITY, first.owner, result, 60)
    for again in (ask(fingerprint=fingerprint), first):
        answer = store.claim(again)
        assert isinstance(answer, Finished)
        assert answer.outcome == result
        assert (answer.state, answer.number, answer.fence) == (State.SUCCEEDED, 1, claimed.fence)
        assert 50 < answer.remaining <= 60
    record = store.get(IDENTITY)
    assert (record.outcome, record.owner, record.fingerprint) == (result, first.owner, fingerprint)
    assert record.created_at <= record.updated_at <= record.now < record.expires_at
    assert not record.retryable
    assert keys(client) == {RECORD}
    assert store.stuck() == []


@pytest.mark.parametrize("room", range(-200, 60, 16))
def test_a_record_that_is_about_as_long_as_what_a_script_reads(single, room):
    first, result = ask(fingerprint=PRINTS[0]), value(LARGE + room)
    single.claim(first)
    assert single.complete(IDENTITY, first.owner, result, 60)
    assert single.claim(ask()).outcome == result


def test_replaced_fingerprints_are_kept_and_remembered(store):
    """Whatever their number is: the filling before the outcome is as long as those that are not."""
    for number in range(11):
        first = ask(fingerprint=PRINTS[number], replace=True)
        assert isinstance(store.claim(first), Claimed)
        assert store.complete(IDENTITY, first.owner, BIG, 60)
        replaced = tuple(PRINTS[max(0, number - 8) : number])
        assert store.get(IDENTITY).superseded == replaced
        assert store.get(IDENTITY).outcome == BIG, number
        assert store.claim(ask(fingerprint=PRINTS[number])).outcome == BIG, number
        assert store.claim(ask(fingerprint=PRINTS[number], replace=True)).outcome == BIG, number
        assert store.claim(ask(fingerprint=PRINTS[11])) == Mismatch(superseded=False)
        for old in replaced:
            assert store.claim(ask(fingerprint=old, replace=True)) == Mismatch(superseded=True)


def test_a_codec_that_has_no_number_is_kept_by_name(single):
    first, result = ask(), value(LARGE, "own/1")
    single.claim(first)
    assert single.complete(IDENTITY, first.owner, result, 60)
    assert single.claim(ask()).outcome == result
    assert single.get(IDENTITY).outcome == result


def test_a_held_attempt_expires_once_it_has_ended(single, single_client):
    first = ask(hold=True)
    single.claim(first)
    assert single_client.pttl(RECORD) == -1
    assert single.complete(IDENTITY, first.owner, BIG, 60)
    assert 50_000 < single_client.pttl(RECORD) <= 60_000
    assert single.get(IDENTITY).hold


@pytest.mark.parametrize("ttl", [0, -1])
def test_a_large_result_that_is_kept_for_no_time_at_all_is_not_kept(single, single_client, ttl):
    first = ask()
    single.claim(first)
    assert single.complete(IDENTITY, first.owner, BIG, ttl)
    assert keys(single_client) == set()


def test_no_script_carries_the_value(single, single_client):
    """What this is for: the server copies it neither from a script nor into one."""
    first = ask()
    single.claim(first)
    single_client.config_resetstat()
    assert single.complete(IDENTITY, first.owner, BIG, 60)
    assert (calls(single_client, "set"), calls(single_client, "rename")) == (1, 1)
    before = calls(single_client, "get")
    single.claim(ask())
    assert calls(single_client, "get") == before + 1
    small = ask(Identity("s", "small"))
    single.claim(small)
    assert single.complete(small.identity, small.owner, RESULT, 60)
    assert calls(single_client, "rename") == 1
    before = calls(single_client, "get")
    single.claim(ask(small.identity))
    assert calls(single_client, "get") == before


# --- sent twice, or too late -----------------------------------------------------------------


def test_an_end_that_is_sent_twice_has_the_same_answer(store, client):
    first = ask()
    store.claim(first)
    assert store.complete(IDENTITY, first.owner, BIG, 60)
    assert store.complete(IDENTITY, first.owner, BIG, 60)
    assert store.claim(ask()).outcome == BIG
    assert keys(client) == {RECORD}


def test_an_attempt_that_failed_is_not_completed(store, client):
    first = ask()
    store.claim(first)
    assert store.fail(IDENTITY, first.owner, ERROR, retryable=False, keep_fingerprint=True, ttl=60)
    assert not store.complete(IDENTITY, first.owner, BIG, 60)
    assert store.get(IDENTITY).outcome == ERROR
    assert keys(client) == {RECORD}


def test_an_owner_that_comes_too_late_changes_nothing(store, client):
    first, second = ask(lease=0.0), ask()
    store.claim(first)
    assert store.claim(second).takeover
    assert not store.complete(IDENTITY, first.owner, BIG, 60)
    assert keys(client) == {RECORD, INDEX}
    assert store.get(IDENTITY).owner == second.owner
    assert store.complete(IDENTITY, second.owner, value(LARGE), 60)
    assert not store.complete(IDENTITY, first.owner, BIG, 60)
    assert store.claim(ask()).outcome == value(LARGE)
    assert keys(client) == {RECORD}


def test_an_attempt_that_was_forgotten_is_not_completed(store, client):
    first = ask()
    store.claim(first)
    assert store.forget(IDENTITY)
    assert not store.complete(IDENTITY, first.owner, BIG, 60)
    assert keys(client) == set()


def test_a_large_mark_is_put_and_replayed(store):
    assert store.put(IDENTITY, BIG, 60, owner=new_owner())
    assert store.claim(ask()).outcome == BIG
    assert store.get(IDENTITY).outcome == BIG


# --- the record changes between the script and the GET ---------------------------------------


@pytest.fixture
def meanwhile(monkeypatch):
    """Do something each time a record was judged, before it is read."""
    steps = []
    next_command = Command.next_command

    def then_follow(self, judged):
        if self.asked is None and steps:
            steps.pop(0)()
        return next_command(self, judged)

    monkeypatch.setattr(Command, "next_command", then_follow)
    return steps


@pytest.fixture
def other(server):
    with contextlib.closing(open_store(server.url)) as store:
        yield store


def completed(store, result=BIG, **terms) -> ClaimRequest:
    request = ask(**terms)
    assert isinstance(store.claim(request), Claimed)
    assert store.complete(IDENTITY, request.owner, result, 60)
    return request


def test_a_record_that_is_forgotten_meanwhile_is_claimed(store, other, meanwhile):
    completed(store)
    meanwhile.append(lambda: other.forget(IDENTITY))
    answer = store.claim(ask())
    assert isinstance(answer, Claimed)
    assert not meanwhile


def test_a_record_that_is_replaced_meanwhile_is_judged_again(store, other, meanwhile):
    completed(store, fingerprint=PRINTS[0])
    later = value(500_000)

    def replace():
        completed(other, later, fingerprint=PRINTS[1], replace=True)

    meanwhile.append(replace)
    assert store.claim(ask()).outcome == later
    meanwhile.append(lambda: completed(other, fingerprint=PRINTS[2], replace=True))
    assert store.claim(ask(fingerprint=PRINTS[1])) == Mismatch(superseded=False)
    assert not meanwhile


def test_a_record_that_is_replaced_again_and_again_is_judged_until_it_stays(
    store, other, meanwhile
):
    completed(store)

    def start_anew():
        other.forget(IDENTITY)
        completed(other)

    meanwhile += [start_anew] * 3
    answer = store.claim(ask())
    assert isinstance(answer, Finished)
    assert answer.fence == other.get(IDENTITY).fence
    assert not meanwhile


def test_a_record_that_runs_again_meanwhile_is_busy(store, other, meanwhile):
    completed(store, fingerprint=PRINTS[0])
    meanwhile.append(lambda: other.claim(ask(fingerprint=PRINTS[1], replace=True)))
    assert isinstance(store.claim(ask()), Busy)


def test_a_batch_reads_again_what_changed_meanwhile(store, other, meanwhile):
    completed(store)
    meanwhile.append(lambda: other.forget(IDENTITY))
    [answer, small] = store.send([ask(), ask(Identity("s", "small"))])
    assert isinstance(answer, Claimed)
    assert isinstance(small, Claimed)


def test_a_record_that_is_cut_short_meanwhile_is_told(single, single_client, meanwhile):
    completed(single)

    def damage():
        single_client.set(RECORD, single_client.getrange(RECORD, 0, 37))

    meanwhile.append(damage)
    with pytest.raises(RecordUnreadable, match="damaged"):
        single.claim(ask())


# --- batches ---------------------------------------------------------------------------------


def test_a_batch_mixes_large_and_small(store, client):
    identities = [Identity("batch", str(number)) for number in range(12)]
    results = [value(LARGE + 100) if number % 3 else RESULT for number in range(12)]
    asks = [ask(identity) for identity in identities]
    assert {type(answer) for answer in store.send(asks)} == {Claimed}
    ends = [
        CompleteRequest(request.identity, request.owner, result, 60)
        for request, result in zip(asks, results, strict=True)
    ]
    assert store.send(ends[:6]) == [True] * 6
    assert [store.ask(end) for end in ends[6:]] == [True] * 6
    answers = store.send([ask(identity) for identity in identities])
    assert [answer.outcome for answer in answers] == results
    assert keys(client) == {KEYS.record(identity) for identity in identities}


def test_calls_at_once_have_each_its_own_answer(store):
    identities = [Identity("at once", str(number)) for number in range(16)]
    results = [value(LARGE + number) if number % 2 else RESULT for number in range(16)]
    asks = [ask(identity) for identity in identities]
    store.send(asks)
    ends = [
        CompleteRequest(request.identity, request.owner, result, 60)
        for request, result in zip(asks, results, strict=True)
    ]
    assert store.race(ends) == [True] * 16
    answers = store.race([ask(identity) for identity in identities * 2])
    assert [answer.outcome for answer in answers] == results * 2


# --- where it cannot be done so --------------------------------------------------------------


@pytest.fixture
def full(server, client):
    """Let the server be full from now on."""
    servers = getattr(server, "servers", [server])

    def fill(limit: int = 1):
        for each in servers:
            with contextlib.closing(each.client()) as direct:
                direct.config_set("maxmemory-policy", "noeviction")
                direct.config_set("maxmemory", limit)

    yield fill
    fill(0)


@pytest.mark.parametrize("waited_for", [False, True])
def test_a_full_server_takes_a_large_result_of_what_it_admitted(store, full, client, waited_for):
    first = ask(fingerprint=PRINTS[0])
    store.claim(first)
    full()
    if waited_for:
        assert isinstance(store.claim(ask()), Busy)
    with pytest.raises(StoreFull):
        store.claim(ask(Identity("full", "new")))
    assert store.complete(IDENTITY, first.owner, BIG, 60)
    assert store.claim(ask()).outcome == BIG
    assert store.stuck() == []
    assert keys(client) == {RECORD}


def test_a_server_that_is_full_once_the_value_is_there_ends_the_attempt(single, single_client):
    """Between the two commands: the script needs memory for nothing."""
    first = ask()
    single.claim(first)
    store = single._store
    upload, end = store._commands.upload(CompleteRequest(IDENTITY, first.owner, BIG, 60))
    assert single_client.execute_command("SET", *upload.keys, bytes(LONGEST_HEADER) + b"\x01{}")
    single_client.config_set("maxmemory", 1)
    try:
        assert single._finish(store.transport.send([end])) == [True]
    finally:
        single_client.config_set("maxmemory", 0)
    assert single.claim(ask()).outcome == Encoded("json/1", b"{}")


@pytest.mark.parametrize("missing", ["+setrange", "+rename"])
def test_without_the_permissions_the_whole_value_goes_to_a_script(
    open_on, redis_of_this_worker, redis_url, missing
):
    with redis_of_this_worker.client() as client:
        rules = ["+@all", missing.replace("+", "-")]
        client.acl_setuser(
            "clerk", enabled=True, passwords=["+key"], keys=["*"], channels=["*"], commands=rules
        )
        store = open_on(f"redis://clerk:key@127.0.0.1:{redis_of_this_worker.port}/0")
        first = ask()
        store.claim(first)
        assert store.complete(IDENTITY, first.owner, BIG, 60)
        assert store.claim(ask()).outcome == BIG
        assert store.stuck() == []
        assert keys(client) == {RECORD}
        client.acl_deluser("clerk")


def test_what_never_became_a_record_is_no_record_and_goes_by_itself(store, client):
    upload = KEYS.upload(IDENTITY, new_owner())
    client.set(upload, bytes(LONGEST_HEADER) + b"\x01{}", px=60_000)
    assert store.scan().records == ()
    assert store.scan(scope=IDENTITY.scope, prefix=IDENTITY.key).records == ()
    counts = store.counts()
    assert (counts.processing, counts.succeeded, counts.failed, counts.abandoned) == (0, 0, 0, 0)
    assert store.stuck() == []
    assert store.purge(abandoned_after=0) == 0
    assert store.get(IDENTITY) is None
    assert keys(client) == {upload}


def test_a_value_that_was_sent_goes_by_itself_when_nobody_uses_it(single, single_client):
    first = ask()
    single.claim(first)
    store = single._store
    upload, _ = store._commands.upload(CompleteRequest(IDENTITY, first.owner, BIG, 60))
    assert single._finish(store.transport.send([upload])) == [True]
    assert 50_000 < single_client.pttl(upload.keys[0]) <= 60_000


def test_a_value_that_is_lost_before_its_script_runs_is_sent_again(
    single, single_client, monkeypatch
):
    """As when another node has the slot for one of the two commands."""
    first = ask()
    single.claim(first)
    commands_of = type(single._store._commands)
    upload = commands_of.upload

    def lost(self, request):
        _, end = upload(self, request)
        return end, end

    monkeypatch.setattr(commands_of, "upload", lost)
    assert single.complete(IDENTITY, first.owner, BIG, 60)
    assert single.claim(ask()).outcome == BIG
    assert keys(single_client) == {RECORD}


def test_an_end_without_its_other_keys_leaves_the_record_alone(single):
    first = ask()
    single.claim(first)
    store = single._store
    _, end = store._commands.upload(CompleteRequest(IDENTITY, first.owner, BIG, 60))
    assert single._finish(store.transport.send([end.without_index()])) == [None]
    assert single.get(IDENTITY).state is State.PROCESSING


def test_a_server_that_is_away_is_told_at_once(open_on):
    with redis_server() as server:
        store = open_on(server.url, timeout=0.5)
        first = ask()
        store.claim(first)
    with pytest.raises(StoreUnavailable):
        store.complete(IDENTITY, first.owner, BIG, 60)


def test_a_result_above_what_the_server_takes_is_rejected_before_it_is_sent(open_on):
    with redis_server() as server, contextlib.closing(server.client()) as client:
        client.config_set("proto-max-bulk-len", 2 << 20)
        store = open_on(server.url)
        first = ask()
        store.claim(first)
        with pytest.raises(ValueRejected, match="takes at most 2097152 at once"):
            store.complete(IDENTITY, first.owner, value(3 << 20), 60)
        with pytest.raises(ValueRejected, match="takes at most 2097152 at once"):
            store.put(Identity("s", "mark"), value(3 << 20), 60, owner=new_owner())
        fits = value(2_000_000)
        assert store.complete(IDENTITY, first.owner, fits, 60)
        assert store.claim(ask()).outcome == fits


def test_a_script_that_was_forgotten_is_sent_whole(single, single_client):
    first = ask()
    single.claim(first)
    single_client.script_flush()
    assert single.complete(IDENTITY, first.owner, BIG, 60)
    single_client.script_flush()
    assert single.claim(ask()).outcome == BIG


# --- what is found under a key ---------------------------------------------------------------


def test_an_empty_key_is_a_damaged_record_and_not_an_unused_one(store, client):
    client.set(RECORD, b"")
    for terms in ({}, {"hold": True}):
        with pytest.raises(RecordUnreadable, match="empty record"):
            store.claim(ask(**terms))
    assert client.get(RECORD) == b""


def test_what_a_later_release_keeps_of_a_running_attempt_is_left_as_it_is(single, single_client):
    first = ask()
    single.claim(first)
    single_client.append(RECORD, b"later" * 20_000)
    raw = single_client.get(RECORD)
    assert isinstance(single.claim(ask()), Busy)
    noted = single_client.get(RECORD)
    assert (noted[2:], noted[1]) == (raw[2:], raw[1] | 32)


def test_the_filling_before_a_large_outcome_is_skipped():
    packed = bytes((254, 16)) + bytes(14) + b"\x01{}"
    assert unpack_outcome(packed) == Encoded("json/1", b"{}")
    assert unpack_outcome(b"xyz" + packed, 3) == Encoded("json/1", b"{}")
    for damaged in (packed[:1], packed[:2], packed[:16]):
        with pytest.raises(IndexError):
            unpack_outcome(damaged)


def test_a_record_that_is_all_filling_is_damaged(single, single_client):
    completed(single)
    end = 38 + 144
    single_client.set(RECORD, single_client.getrange(RECORD, 0, end - 1))
    with pytest.raises(RecordUnreadable, match="damaged"):
        single.claim(ask())


# --- those who wait --------------------------------------------------------------------------


def test_a_record_that_is_waited_for_still_expires(single, single_client):
    single.claim(ask())
    before = single_client.pttl(RECORD)
    assert isinstance(single.claim(ask()), Busy)
    assert single_client.get(RECORD)[1] & 32, "it is noted"
    assert 0 < single_client.pttl(RECORD) <= before


@pytest.mark.parametrize("waits", [True, False])
def test_whoever_waits_is_woken(single, single_client, waits):
    first = ask()
    single.claim(first)
    with single_client.pubsub() as channel:
        channel.ssubscribe(RECORD)
        wait_until(lambda: channel.get_sharded_message(timeout=1) is not None, "the subscription")
        if waits:
            assert isinstance(single.claim(ask()), Busy)
        assert single.complete(IDENTITY, first.owner, BIG, 60)
        message = channel.get_sharded_message(timeout=1 if waits else 0.1)
        assert (None if message is None else message["data"]) == (b"" if waits else None)
    assert not single_client.get(RECORD)[1] & 32


# --- an engine -------------------------------------------------------------------------------


def test_an_engine_replays_a_large_result(redis_url):
    large = {"text": "x" * 1_000_000}
    with contextlib.closing(Idempotency(redis_url)) as idem:
        assert idem.execute("large", lambda: large) == large
        assert idem.execute("large", lambda: None) == json.loads(json.dumps(large))
