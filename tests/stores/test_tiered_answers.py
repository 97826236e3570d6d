"""What the front of a tiered store answers, and what it never answers."""

from __future__ import annotations

import time

import pytest

from semel.core.records import (
    Abandoned,
    Busy,
    Claimed,
    CompleteRequest,
    Encoded,
    Finished,
    Identity,
    Mismatch,
    PutRequest,
    RenewRequest,
    State,
)
from semel.errors import StoreUnavailable
from semel.stores.redis import open_store as open_redis
from semel.stores.tiered.front import Kind
from semel.stores.tiered.rules import HINTED
from stores.tiered_given import (
    ANNA,
    BERT,
    BLUE,
    CARL,
    KEY,
    LONG,
    OTHER,
    OTHER_RESULT,
    RED,
    RESULT,
    Tiers,
    ask,
    entry_key,
    entry_of,
    fail,
    park,
    succeed,
)

LEASE = 0.3
"""A lease that a test waits for."""


@pytest.fixture(params=["threads", "asyncio"])
def tiers(request, redis_url, sqlite_url):
    opened = Tiers(request.param, redis_url, sqlite_url)
    yield opened
    opened.close()


@pytest.fixture
def client(redis_of_this_worker):
    with redis_of_this_worker.client() as opened:
        yield opened


# --- replays --------------------------------------------------------------------------------


def test_a_replay_is_one_question_to_the_front_and_none_to_sql(tiers, redis_of_this_worker):
    succeed(tiers, ANNA, RED)
    assert tiers.sql == ["claim", "complete"]
    record = tiers.get(KEY)
    assert tiers.sql == ["get"]
    before = redis_of_this_worker.calls("evalsha", "eval")
    finished = tiers.claim(ask(BERT, RED))
    assert redis_of_this_worker.calls("evalsha", "eval") - before == 1
    assert tiers.sql == []
    assert (finished.state, finished.outcome) == (State.SUCCEEDED, RESULT)
    assert (finished.number, finished.fence) == (record.number, record.fence)
    assert LONG - 60 < finished.remaining <= record.remaining


def test_a_first_execution_asks_the_front_once_and_tells_it_once(tiers, redis_of_this_worker):
    succeed(tiers, ANNA, identity=OTHER)  # a new server does not know the scripts
    before = redis_of_this_worker.calls("evalsha", "eval")
    succeed(tiers, ANNA)
    assert redis_of_this_worker.calls("evalsha", "eval") - before == 2


def test_a_failure_for_good_is_answered_by_the_front(tiers):
    tiers.claim(ask(ANNA, RED))
    fail(tiers, retryable=False)
    assert tiers.sql == ["claim", "fail"]
    finished = tiers.claim(ask(BERT, RED))
    assert (finished.state, finished.number) == (State.FAILED, 1)
    assert tiers.sql == []


def test_a_failure_that_may_run_again_is_not_kept_by_the_front(tiers, client):
    tiers.claim(ask(ANNA, RED))
    fail(tiers, retryable=True)
    assert entry_of(client, KEY).kind is Kind.CLOSED
    assert tiers.claim(ask(BERT, RED)).number == 2


def test_a_failure_for_good_that_kept_no_payload_is_answered_to_every_payload(tiers):
    tiers.claim(ask(ANNA, RED))
    fail(tiers, retryable=False, keep_fingerprint=False)
    assert tiers.claim(ask(BERT, BLUE)).state is State.FAILED  # SQL, which makes the copy
    assert tiers.sql
    assert tiers.claim(ask(BERT, BLUE)).state is State.FAILED
    assert tiers.sql == []


def test_another_payload_is_judged_by_sql(tiers):
    succeed(tiers, ANNA, RED)
    assert tiers.sql
    assert tiers.claim(ask(BERT, BLUE)) == Mismatch()
    assert tiers.sql == ["claim"]


@pytest.mark.parametrize(("stored", "asked"), [(RED, None), (None, RED), (None, None)])
def test_an_absent_payload_matches_every_other(tiers, stored, asked):
    succeed(tiers, ANNA, stored)
    assert tiers.sql
    assert tiers.claim(ask(BERT, asked)).outcome == RESULT
    assert tiers.sql == []


def test_a_second_attempt_without_payload_may_have_inherited_one_so_sql_is_asked(tiers):
    tiers.claim(ask(ANNA, RED))
    park(tiers)
    assert tiers.claim(ask(BERT)).takeover
    tiers.complete(KEY, BERT, RESULT, LONG)
    assert tiers.sql
    assert tiers.claim(ask(CARL, BLUE)) == Mismatch()
    assert tiers.claim(ask(CARL, RED)).outcome == RESULT  # SQL, which makes the copy
    assert tiers.sql == ["claim", "claim", "get_many"]
    assert tiers.claim(ask(CARL, RED)).outcome == RESULT
    assert tiers.sql == []


def test_a_copy_that_was_lost_is_made_again_by_the_next_replay(tiers, client):
    succeed(tiers, ANNA, RED)
    client.flushall()
    assert tiers.sql
    assert tiers.claim(ask(BERT, RED)).outcome == RESULT
    assert tiers.sql == ["claim", "get_many"]
    assert tiers.claim(ask(BERT, RED)).outcome == RESULT
    assert tiers.sql == []


def test_what_was_put_is_copied_by_its_first_reader(tiers):
    assert tiers.put(KEY, RESULT, LONG, owner=ANNA)
    assert tiers.send([PutRequest(OTHER, ANNA, RESULT, LONG)]) == [True]
    for identity in (KEY, OTHER):
        assert tiers.claim(ask(BERT, RED, identity=identity)).outcome == RESULT
    assert tiers.sql
    assert tiers.claim(ask(CARL, BLUE)).outcome == RESULT
    assert tiers.sql == []


def test_the_front_keeps_a_copy_no_longer_than_front_ttl(redis_url, sqlite_url, client):
    tiers = Tiers("threads", redis_url, sqlite_url, front_ttl=LEASE)
    succeed(tiers, ANNA, RED)
    assert 0 < client.pttl(entry_key(KEY)) <= LEASE * 1000
    assert tiers.claim(ask(BERT, RED)).remaining > LONG - 60  # what SQL keeps, not the front
    time.sleep(LEASE)
    assert client.get(entry_key(KEY)) is None
    assert tiers.sql
    assert tiers.claim(ask(BERT, RED)).outcome == RESULT
    assert tiers.sql == ["claim", "get_many"]
    tiers.close()


def test_the_front_keeps_a_copy_no_longer_than_sql(tiers, client):
    succeed(tiers, ANNA, RED, ttl=LEASE)
    assert 0 < client.pttl(entry_key(KEY)) <= LEASE * 1000
    time.sleep(LEASE)
    assert tiers.claim(ask(BERT, RED)).number == 1


def test_a_success_that_is_told_twice_is_copied_as_it_was_stored_first(tiers, client):
    with tiers.withheld():
        succeed(tiers, ANNA, RED, ttl=60)
    assert tiers.complete(KEY, ANNA, OTHER_RESULT, 100 * LONG)
    assert entry_of(client, KEY).kind is Kind.CLOSED
    finished = tiers.claim(ask(BERT, RED))
    assert finished.outcome == RESULT
    assert finished.remaining <= 60


@pytest.mark.parametrize("outcome", [Encoded("my-codec", b""), Encoded("x" * 60, b"\x00\xff" * 9)])
def test_every_codec_and_every_byte_comes_back_from_the_front(tiers, outcome):
    tiers.claim(ask(ANNA))
    tiers.complete(KEY, ANNA, outcome, LONG)
    assert tiers.sql
    assert tiers.claim(ask(BERT)).outcome == outcome
    assert tiers.sql == []


# --- busy keys ------------------------------------------------------------------------------


def test_the_second_duplicate_of_a_running_key_is_told_busy_by_the_front(tiers):
    tiers.claim(ask(ANNA, RED))
    first = tiers.claim(ask(BERT, RED))
    assert tiers.sql == ["claim", "claim"]
    second = tiers.claim(ask(BERT, RED))
    assert tiers.sql == []
    assert first.retry_after > LONG - 60
    assert 0 < second.retry_after <= HINTED


@pytest.mark.parametrize("other", [None, BLUE])
def test_a_hint_is_for_the_very_same_payload(tiers, other):
    tiers.claim(ask(ANNA, RED))
    assert isinstance(tiers.claim(ask(BERT, RED)), Busy)
    assert tiers.sql
    tiers.claim(ask(CARL, other))
    assert tiers.sql == ["claim"]


def test_the_owner_itself_is_never_told_busy(tiers):
    tiers.claim(ask(ANNA, RED))
    assert isinstance(tiers.claim(ask(BERT, RED)), Busy)
    assert tiers.claim(ask(ANNA, RED)).number == 1
    (again,) = tiers.send([ask(ANNA, RED)])
    assert again.number == 1


def test_an_owner_that_asks_again_for_a_shorter_lease_ends_the_hint(tiers):
    tiers.claim(ask(ANNA, RED))
    assert isinstance(tiers.claim(ask(BERT, RED)), Busy)
    assert tiers.claim(ask(ANNA, RED, lease=0.001)).number == 1
    time.sleep(0.01)
    assert tiers.claim(ask(BERT, RED)).takeover


def test_an_owner_whose_answer_was_lost_is_told_by_sql(tiers, monkeypatch):
    claim = ask(ANNA, RED)
    monkeypatch.setattr(tiers.store._front, "tell", None)
    with pytest.raises(TypeError):
        tiers.claim(claim)  # applied; interrupted before anybody knew
    monkeypatch.undo()
    assert isinstance(tiers.claim(ask(BERT, RED)), Busy)
    assert tiers.claim(claim).number == 1


def test_a_member_of_a_batch_whose_answer_was_lost_is_told_by_sql_too(tiers):
    claim = ask(ANNA, RED)
    tiers.after("claim_many", lambda: [StoreUnavailable("applied, and the reply was lost")])
    (lost,) = tiers.send([claim])
    assert isinstance(lost, StoreUnavailable)
    assert isinstance(tiers.claim(ask(BERT, RED)), Busy)
    assert tiers.claim(claim).number == 1


def test_a_hint_ends_with_the_lease_and_then_sql_gives_the_key_away(tiers, client):
    tiers.claim(ask(ANNA, RED, lease=LEASE))
    assert tiers.claim(ask(BERT, RED)).retry_after <= LEASE
    assert 0 < client.pttl(entry_key(KEY)) <= LEASE * 1000
    time.sleep(LEASE)
    assert tiers.claim(ask(BERT, RED)).takeover


@pytest.mark.parametrize("end", ["complete", "fail", "park", "shorten", "forget"])
def test_whatever_ends_an_attempt_ends_the_hint(tiers, end):
    tiers.claim(ask(ANNA, RED))
    assert isinstance(tiers.claim(ask(BERT, RED)), Busy)
    match end:
        case "complete":
            tiers.complete(KEY, ANNA, RESULT, LONG)
        case "fail":
            fail(tiers)
        case "park":
            assert tiers.send([RenewRequest(KEY, ANNA, 0.0)]) == [True]
        case "shorten":
            tiers.renew(KEY, ANNA, 0.001)
            time.sleep(0.01)
        case "forget":
            tiers.forget(KEY)
    assert isinstance(tiers.claim(ask(BERT, RED)), (Claimed, Finished))


def test_an_end_that_came_from_another_process_ends_the_hint_too(tiers, redis_url, sqlite_url):
    other = Tiers("threads", redis_url, sqlite_url)
    for identity in (KEY, OTHER):
        other.claim(ask(ANNA, RED, identity=identity))
        assert isinstance(tiers.claim(ask(BERT, RED, identity=identity)), Busy)
    assert tiers.send([CompleteRequest(KEY, ANNA, RESULT, LONG)]) == [True]
    assert tiers.renew(OTHER, ANNA, 0.0)
    assert tiers.claim(ask(BERT, RED)).outcome == RESULT
    assert tiers.claim(ask(BERT, RED, identity=OTHER)).takeover
    other.close()


def test_a_renewal_tells_the_front_nothing(tiers, redis_of_this_worker):
    tiers.claim(ask(ANNA, RED))
    before = redis_of_this_worker.calls("evalsha", "eval")
    assert tiers.renew(KEY, ANNA, LONG)
    assert tiers.send([RenewRequest(KEY, ANNA, LONG)]) == [True]
    assert redis_of_this_worker.calls("evalsha", "eval") == before


# --- what the front never keeps -------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "kept"),
    [
        ({"hold": True}, None),
        ({"replace": True}, Kind.CLOSED),  # what it may have replaced is kept out
    ],
)
def test_held_and_replacing_callers_pass_the_front_by(tiers, client, policy, kept):
    tiers.claim(ask(ANNA, RED, **policy))
    assert isinstance(tiers.claim(ask(BERT, RED, **policy)), Busy)
    entry = entry_of(client, KEY)
    assert (None if entry is None else entry.kind) is kept
    tiers.complete(KEY, ANNA, RESULT, LONG)
    assert entry_of(client, KEY).kind is Kind.CLOSED
    assert tiers.claim(ask(BERT, RED, **policy)).outcome == RESULT
    assert tiers.sql == ["claim", "claim", "complete", "claim"]
    assert entry_of(client, KEY).kind is Kind.CLOSED


def test_a_held_record_is_not_copied_for_a_caller_that_does_not_hold(tiers, client):
    tiers.claim(ask(ANNA, RED, hold=True))
    tiers.complete(KEY, ANNA, RESULT, LONG)
    client.flushall()
    assert tiers.claim(ask(BERT, RED)).outcome == RESULT
    assert entry_of(client, KEY) is None


def test_a_record_that_has_replaced_another_is_not_copied(tiers, client):
    succeed(tiers, ANNA, RED)
    tiers.claim(ask(BERT, BLUE, replace=True))
    tiers.complete(KEY, BERT, OTHER_RESULT, LONG)
    client.flushall()
    assert tiers.claim(ask(CARL, BLUE)).outcome == OTHER_RESULT
    assert entry_of(client, KEY) is None


def test_an_abandoned_held_record_is_answered_by_sql(tiers):
    tiers.claim(ask(ANNA, RED, hold=True))
    assert isinstance(tiers.claim(ask(BERT, RED)), Busy)
    park(tiers)
    assert tiers.claim(ask(BERT, RED)) == Abandoned(1)


def test_a_record_that_went_before_it_was_copied_is_not_copied(tiers, client):
    succeed(tiers, ANNA, RED)
    client.flushall()
    tiers.instead("get_many", lambda: [None])
    assert tiers.claim(ask(BERT, RED)).outcome == RESULT
    assert entry_of(client, KEY) is None


@pytest.mark.parametrize("end", [park, fail])
def test_a_record_that_is_not_finished_any_more_is_not_copied(tiers, client, end):
    tiers.claim(ask(ANNA, RED))
    end(tiers)
    changed = tiers.get(KEY)
    succeed(tiers, BERT, RED)
    client.flushall()
    tiers.instead("get_many", lambda: [changed])
    assert tiers.claim(ask(CARL, RED)).outcome == RESULT
    assert entry_of(client, KEY) is None


def test_a_copy_that_cannot_be_made_is_nobodys_error(tiers, client):
    def down():
        raise StoreUnavailable("SQL went away between two questions")

    succeed(tiers, ANNA, RED)
    client.flushall()
    tiers.instead("get_many", down)
    assert tiers.claim(ask(BERT, RED)).outcome == RESULT
    assert tiers.sql[-1] == "get_many"


# --- many at once ---------------------------------------------------------------------------


def test_a_batch_asks_sql_only_for_what_the_front_does_not_know(tiers, redis_of_this_worker):
    known, new, running = (Identity("batch", name) for name in ("known", "new", "running"))
    succeed(tiers, ANNA, RED, identity=known)
    tiers.claim(ask(ANNA, RED, identity=running))
    tiers.claim(ask(BERT, RED, identity=running))
    finished, claimed, busy = tiers.send(
        [ask(CARL, RED, identity=identity) for identity in (known, new, running)]
    )
    (asked,) = tiers.behind.batches
    assert [each.identity for each in asked] == [new]
    assert (finished.outcome, claimed.number) == (RESULT, 1)
    assert isinstance(busy, Busy)
    (finished,) = tiers.send([ask(CARL, RED, identity=known)])
    assert (finished.outcome, tiers.behind.batches) == (RESULT, [asked])


def test_successes_of_a_batch_are_copied(tiers):
    tiers.send([ask(ANNA, RED), ask(ANNA, RED, identity=OTHER)])
    told = tiers.send(
        [CompleteRequest(KEY, ANNA, RESULT, LONG), CompleteRequest(OTHER, BERT, RESULT, LONG)]
    )
    assert told == [True, False]
    assert tiers.sql
    assert tiers.claim(ask(BERT, RED)).outcome == RESULT
    assert tiers.sql == []
    assert isinstance(tiers.claim(ask(BERT, RED, identity=OTHER)), Busy)


# --- beside others on the same server ---------------------------------------------------------


def test_a_plain_redis_store_with_the_same_prefix_never_meets_an_entry(tiers, redis_url):
    succeed(tiers, ANNA, RED)
    plain = open_redis(redis_url)
    assert plain.get(KEY) is None
    assert plain.scan().records == ()
    assert plain.claim(ask(BERT, BLUE)).number == 1
    assert tiers.claim(ask(BERT, RED)).outcome == RESULT
    plain.close()


def test_sql_answers_listings_and_repair(tiers):
    succeed(tiers, ANNA)
    tiers.claim(ask(ANNA, identity=OTHER))
    park(tiers, identity=OTHER)
    assert [record.identity for record in tiers.stuck()] == [OTHER]
    assert (tiers.counts().succeeded, tiers.counts().abandoned) == (1, 1)
    adopted = tiers._finish(tiers.store.adopt(OTHER, BERT, LONG))
    assert (adopted.owner, adopted.number) == (BERT, 1)
    assert tiers.complete(OTHER, BERT, RESULT, LONG)
    assert tiers.claim(ask(CARL, identity=OTHER)).outcome == RESULT
