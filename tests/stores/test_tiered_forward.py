"""The front only goes forward: late, lost, repeated and foreign writes never bring the past back."""

from __future__ import annotations

import time

import pytest
from msgspec.structs import replace

from semel.core.records import Busy, Claimed, Finished, Mismatch
from semel.errors import StoreUnavailable
from semel.stores.redis.commands import script
from semel.stores.tiered import front as timing
from semel.stores.tiered.front import Calls, Kind
from stores.tiered_given import (
    ANNA,
    BERT,
    BLUE,
    CARL,
    KEY,
    LONG,
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

MOMENT = 0.1
ASKED, VALID = 2, 3
"""Where a put says when SQL was asked, and for how long its answer holds."""


@pytest.fixture(params=["threads", "asyncio"])
def tiers(request, redis_url, sqlite_url):
    opened = Tiers(request.param, redis_url, sqlite_url)
    yield opened
    opened.close()


@pytest.fixture
def client(redis_of_this_worker):
    with redis_of_this_worker.client() as opened:
        yield opened


def with_argument(call, position, change):
    args = list(call.args)
    args[position] = change(args[position])
    return replace(call, args=tuple(args))


# --- forget -----------------------------------------------------------------------------------


def test_a_forgotten_copy_answers_nobody(tiers, client):
    succeed(tiers, ANNA, RED)
    assert tiers.forget(KEY)
    assert entry_of(client, KEY).kind is Kind.CLOSED
    assert tiers.claim(ask(BERT, RED)).number == 1


def test_a_copy_that_was_on_its_way_when_the_key_was_forgotten_is_refused(tiers):
    with tiers.withheld() as late:
        succeed(tiers, ANNA, RED)
    assert tiers.forget(KEY)
    assert tiers.deliver(late) == [False]
    assert tiers.claim(ask(BERT, RED)).number == 1


def test_a_copy_of_what_was_read_before_the_forgetting_is_refused_too(tiers, client):
    succeed(tiers, ANNA, RED)
    client.flushall()
    with tiers.withheld() as late:
        assert isinstance(tiers.claim(ask(BERT, RED)), Finished)
    assert len(late) == 1
    tiers.forget(KEY)
    assert tiers.deliver(late) == [False]


def evict_mark(client) -> None:
    assert client.delete(entry_key(KEY)) == 1


def evict_generation(client) -> None:
    (generation,) = client.scan_iter("*~generation")
    assert client.delete(entry_key(KEY), generation) == 2


def flush(client) -> None:
    client.flushall()


@pytest.mark.parametrize("lose", [evict_mark, evict_generation, flush])
def test_a_late_copy_is_refused_also_when_the_mark_of_the_forgetting_is_gone(tiers, client, lose):
    succeed(tiers, ANNA, RED)
    client.flushall()
    with tiers.withheld() as late:
        assert isinstance(tiers.claim(ask(BERT, RED)), Finished)
    assert len(late) == 1
    assert tiers.forget(KEY)
    lose(client)
    assert tiers.deliver(late) == [False]
    assert tiers.claim(ask(BERT, RED)).number == 1


@pytest.mark.parametrize("lose", [evict_mark, evict_generation, flush])
def test_a_late_result_is_refused_also_when_the_mark_of_the_forgetting_is_gone(tiers, client, lose):
    with tiers.withheld() as late:
        succeed(tiers, ANNA, RED)
    assert tiers.forget(KEY)
    lose(client)
    assert tiers.deliver(late) == [False]
    assert tiers.claim(ask(BERT, RED)).number == 1


def test_nothing_is_copied_while_a_cluster_moves_the_slot(tiers, client):
    """The generation is out of reach then: the scripts get the entry's key alone."""
    with tiers.withheld() as late:
        succeed(tiers, ANNA, RED)
    assert tiers.deliver([call.without_index() for call in late]) == [False]
    assert tiers.deliver(late) == [True]
    forgotten = Calls("idem:", LONG).mark(KEY, timing.ABOVE_ALL).without_index()
    assert tiers.deliver([forgotten]) == [True]
    assert entry_of(client, KEY).kind is Kind.CLOSED
    (found,) = tiers.deliver([Calls("idem:", LONG).get(KEY).without_index()])
    assert found.generation == b""


def test_a_hint_that_was_on_its_way_when_the_key_was_forgotten_is_refused(tiers):
    tiers.claim(ask(ANNA, RED))
    with tiers.withheld() as late:
        assert isinstance(tiers.claim(ask(BERT, RED)), Busy)
    tiers.forget(KEY)
    assert tiers.deliver(late) == [False]
    assert isinstance(tiers.claim(ask(BERT, RED)), Claimed)


def test_a_mark_outlives_every_write_that_may_still_come():
    assert timing.MARK_LIFE > timing.WINDOW


def test_after_its_mark_a_key_is_copied_again(tiers, client, monkeypatch):
    monkeypatch.setattr(timing, "MARK_LIFE", MOMENT)
    succeed(tiers, ANNA, RED)
    tiers.forget(KEY)
    time.sleep(2 * MOMENT)
    assert client.get(entry_key(KEY)) is None
    succeed(tiers, BERT, BLUE)
    assert entry_of(client, KEY).kind is Kind.SUCCEEDED


def test_a_copy_that_came_back_from_the_dead_is_removed_by_the_next_claim(tiers, client):
    """As a replica does that is promoted without the mark."""
    succeed(tiers, ANNA, RED)
    lost = client.get(entry_key(KEY))
    tiers.forget(KEY)
    client.set(entry_key(KEY), lost)
    assert tiers.claim(ask(BERT, BLUE)).number == 1
    assert entry_of(client, KEY).kind is Kind.CLOSED
    assert tiers.claim(ask(CARL, RED)) == Mismatch()


# --- touch --------------------------------------------------------------------------------------


def test_a_shortened_retention_counts_for_the_front_too(tiers):
    succeed(tiers, ANNA, RED)
    assert tiers.touch(KEY, MOMENT)
    time.sleep(2 * MOMENT)
    assert tiers.claim(ask(BERT, RED)).number == 1


def test_a_copy_that_does_not_know_of_the_shortened_retention_is_refused(tiers):
    with tiers.withheld() as late:
        succeed(tiers, ANNA, RED)
    assert tiers.touch(KEY, MOMENT)
    assert tiers.deliver(late) == [False]


# --- newer attempts -------------------------------------------------------------------------------


def test_a_late_write_of_an_old_attempt_does_not_replace_a_newer_one(tiers, client):
    with tiers.withheld() as late:
        tiers.claim(ask(ANNA, RED))
        fail(tiers)
    succeed(tiers, BERT, RED)
    newest = client.get(entry_key(KEY))
    assert tiers.deliver(late) == [False]
    assert client.get(entry_key(KEY)) == newest
    assert tiers.claim(ask(CARL, RED)).number == 2


def test_a_replaced_result_is_not_answered_any_more(tiers):
    with tiers.withheld() as late:
        succeed(tiers, ANNA, RED)
    assert tiers.deliver(late) == [True]
    assert tiers.claim(ask(BERT, BLUE, replace=True)).number == 1
    assert tiers.claim(ask(CARL, RED)) == Mismatch()
    assert tiers.deliver(late) == [False]
    tiers.complete(KEY, BERT, OTHER_RESULT, LONG)
    assert tiers.deliver(late) == [False]
    assert tiers.claim(ask(CARL, RED)) == Mismatch()
    assert tiers.claim(ask(CARL, BLUE)).outcome == OTHER_RESULT


def test_a_late_hint_does_not_hide_a_finished_attempt(tiers):
    tiers.claim(ask(ANNA, RED))
    with tiers.withheld() as late:
        assert isinstance(tiers.claim(ask(BERT, RED)), Busy)
    tiers.complete(KEY, ANNA, RESULT, LONG)
    assert tiers.deliver(late) == [False]
    assert tiers.claim(ask(BERT, RED)).outcome == RESULT


def test_a_late_mark_does_not_remove_the_copy_of_its_own_attempt(tiers, client):
    tiers.claim(ask(ANNA, RED))
    fail(tiers)
    with tiers.withheld() as late:
        assert tiers.claim(ask(BERT, RED)).number == 2
    tiers.complete(KEY, BERT, RESULT, LONG)
    assert tiers.deliver(late) == [False]
    assert entry_of(client, KEY).kind is Kind.SUCCEEDED


def test_a_late_hint_does_not_hide_what_was_put(tiers):
    tiers.claim(ask(ANNA, RED, lease=MOMENT))
    with tiers.withheld() as late:
        assert isinstance(tiers.claim(ask(BERT, RED)), Busy)
    (hint,) = late
    time.sleep(MOMENT)
    assert tiers.put(KEY, RESULT, LONG, owner=CARL)
    assert tiers.deliver([with_argument(hint, VALID, lambda _: 60_000_000)]) == [False]
    assert tiers.claim(ask(BERT, RED)).outcome == RESULT


@pytest.mark.parametrize("end", [fail, park])
def test_a_late_hint_does_not_hide_a_failed_or_parked_attempt(tiers, end):
    tiers.claim(ask(ANNA, RED))
    with tiers.withheld() as late:
        assert isinstance(tiers.claim(ask(BERT, RED)), Busy)
    end(tiers)
    assert tiers.deliver(late) == [False]
    assert isinstance(tiers.claim(ask(BERT, RED)), Claimed)


# --- the front's clock ------------------------------------------------------------------------------


def test_a_write_that_is_late_by_the_fronts_clock_is_refused(tiers):
    with tiers.withheld() as late:
        succeed(tiers, ANNA, RED)
    (put,) = late
    window = int(timing.WINDOW * 1e6)
    assert tiers.deliver([with_argument(put, ASKED, lambda asked: asked - window - 1)]) == [False]
    assert tiers.deliver([with_argument(put, ASKED, lambda asked: asked - window // 2)]) == [True]


def test_a_write_meant_for_another_servers_clock_is_refused(tiers):
    with tiers.withheld() as late:
        succeed(tiers, ANNA, RED)
    (put,) = late
    hour = 3_600_000_000
    assert tiers.deliver([with_argument(put, ASKED, lambda asked: asked + hour)]) == [False]
    assert tiers.deliver([with_argument(put, ASKED, lambda asked: asked - hour)]) == [False]
    assert tiers.deliver(late) == [True]


def test_a_write_whose_word_has_ended_meanwhile_is_refused(tiers):
    with tiers.withheld() as late:
        succeed(tiers, ANNA, RED, ttl=MOMENT)
    time.sleep(2 * MOMENT)
    assert tiers.deliver(late) == [False]


def test_time_on_the_way_is_taken_off_what_the_copy_may_live(tiers, client):
    with tiers.withheld() as late:
        succeed(tiers, ANNA, RED, ttl=10)
    (put,) = late
    assert tiers.deliver([with_argument(put, ASKED, lambda asked: asked - 4_000_000)]) == [True]
    assert client.pttl(entry_key(KEY)) <= 6_000


def test_a_front_whose_clock_is_wrong_by_years_does_no_harm(tiers, client, monkeypatch):
    """The clock of a server cannot be set here; what its scripts read of it can."""
    years = 5 * 365 * 86400 * 1_000_000
    for name in ("GET", "PUT", "MARK"):
        text = getattr(timing, name).text.replace("+ time[2]", f"+ time[2] + {years}")
        monkeypatch.setattr(timing, name, script(text))
    succeed(tiers, ANNA, RED, ttl=3 * MOMENT)
    entry = entry_of(client, KEY)
    assert entry.expires > time.time() * 1e6 + years - 60e6
    tiers.sql  # noqa: B018 - begin anew
    assert tiers.claim(ask(BERT, RED)).outcome == RESULT
    assert tiers.sql == []
    time.sleep(4 * MOMENT)
    assert tiers.claim(ask(BERT, RED)).number == 1


# --- entries that cannot be read ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "strange", [b"", b"\x02 of a newer release", b"\x01\x02cut", b"\x01\x09" + bytes(40)]
)
def test_an_entry_that_cannot_be_read_is_a_miss(tiers, client, strange):
    client.set(entry_key(KEY), strange)
    succeed(tiers, ANNA, RED)
    assert tiers.claim(ask(BERT, RED)).outcome == RESULT
    assert tiers.forget(KEY)
    assert entry_of(client, KEY).kind is Kind.CLOSED


def test_an_entry_of_a_newer_release_is_left_to_those_who_can_read_it(tiers, client):
    newer = b"\x02" + bytes(40)
    client.set(entry_key(KEY), newer)
    succeed(tiers, ANNA, RED)
    assert client.get(entry_key(KEY)) == newer


def test_a_foreign_value_in_the_place_of_an_entry_is_a_miss(tiers, client):
    client.lpush(entry_key(KEY), "somebody else's")
    succeed(tiers, ANNA, RED)
    assert tiers.claim(ask(BERT, RED)).outcome == RESULT
    assert tiers.forget(KEY)


# --- forget needs both ----------------------------------------------------------------------------


@pytest.mark.parametrize("confirmed", [0, 1])
def test_forget_raises_unless_the_front_confirms_before_and_after(tiers, monkeypatch, confirmed):
    succeed(tiers, ANNA, RED)
    sent = []
    send = tiers.store._front._transport.send

    def losing(calls):
        sent.append(calls)
        if len(sent) > confirmed:
            raise StoreUnavailable("the front is gone")
        return send(calls)

    async def losing_async(calls):
        answers = losing(calls)
        return await answers

    losing_now = losing_async if tiers._is_async else losing
    monkeypatch.setattr(tiers.store._front._transport, "send", losing_now)
    with pytest.raises(StoreUnavailable, match="did not confirm"):
        tiers.forget(KEY)
    assert (tiers.get(KEY) is None) is (confirmed == 1)
    monkeypatch.undo()
    assert tiers.forget(KEY) is (confirmed == 0)
    assert tiers.claim(ask(BERT, RED)).number == 1
