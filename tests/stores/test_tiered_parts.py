"""The parts of a tiered store that decide by themselves: breaker, notes, entries."""

from __future__ import annotations

import pytest

from semel.core.records import Busy, Claimed, Encoded
from semel.errors import RecordUnreadable, StoreFull, StoreUnavailable
from semel.stores.tiered.front import (
    FIRST_PAUSE,
    LONGEST_PAUSE,
    Breaker,
    Entry,
    Found,
    Kind,
    Look,
    pack_body,
    unpack,
)
from semel.stores.tiered.rules import Notes, Tier
from stores.tiered_given import ANNA, BERT, CARL, KEY, RED, ask

DOWN = [StoreUnavailable("down")]
UP = [True]


# --- the breaker ------------------------------------------------------------------------------


@pytest.fixture
def breaker():
    return Breaker("redis somewhere", longest_call=0.25)


def test_a_front_in_use_is_asked_by_everybody(breaker):
    assert all(breaker.allows(now) for now in (0.0, 0.0, 1.0))
    breaker.learn(UP, 0.0, 1.0)
    assert breaker.allows(1.0)


def test_the_first_error_opens_it_and_one_call_tries_again_after_a_pause(breaker):
    breaker.learn(DOWN, 0.0, 1.0)
    assert not breaker.allows(1.0 + FIRST_PAUSE / 2 - 0.001)
    later = 1.0 + FIRST_PAUSE
    assert breaker.allows(later)
    assert not breaker.allows(later), "one at a time"
    assert not breaker.allows(later + 0.249), "the first may still be answered"
    assert breaker.allows(later + 0.25), "it never came back"


def test_an_answer_closes_it(breaker):
    breaker.learn(DOWN, 0.0, 1.0)
    assert breaker.allows(2.0)
    breaker.learn(UP, 2.0, 2.1)
    assert breaker.allows(2.1)
    assert breaker.allows(2.1)


def test_pauses_grow_up_to_a_limit_and_begin_anew_after_an_answer(breaker):
    now, pauses = 0.0, []
    breaker.learn(DOWN, now, now)
    for _ in range(12):
        began = now
        while not breaker.allows(now):
            now += 0.01
        pauses.append(now - began)
        breaker.learn(DOWN, now, now)
    assert pauses[0] <= FIRST_PAUSE + 0.01
    assert max(pauses) <= LONGEST_PAUSE + 0.01
    assert pauses[-1] >= LONGEST_PAUSE / 2
    now += LONGEST_PAUSE
    assert breaker.allows(now)
    breaker.learn(UP, now, now)
    breaker.learn(DOWN, now, now)
    assert breaker.allows(now + FIRST_PAUSE)


def test_pauses_are_not_all_alike():
    def pause() -> float:
        breaker = Breaker("redis somewhere", longest_call=0.25)
        breaker.learn(DOWN, 0.0, 0.0)
        return next(now for now in range(101) if breaker.allows(now / 1000))

    assert len({pause() for _ in range(20)}) > 1


def test_many_calls_that_fail_at_once_are_one_outage(breaker):
    for _ in range(100):
        breaker.learn(DOWN, began=0.0, now=1.0)
    assert breaker.allows(1.0 + FIRST_PAUSE)


def test_an_answer_to_a_call_from_before_the_outage_tells_nothing(breaker):
    breaker.learn(DOWN, began=0.5, now=1.0)
    breaker.learn(UP, began=0.4, now=1.01)
    assert not breaker.allows(1.01)


@pytest.mark.parametrize("error", [StoreFull("full"), RecordUnreadable("damaged")])
def test_an_error_of_one_key_is_no_outage(breaker, error):
    breaker.learn([error], 0.0, 1.0)
    assert breaker.allows(1.0)
    breaker.learn([error, *DOWN], 0.0, 1.0)
    assert not breaker.allows(1.0)


# --- notes --------------------------------------------------------------------------------------


def test_the_oldest_note_makes_room(breaker):
    notes = Notes(limit=2)
    for owner in (ANNA, BERT, CARL):
        notes.sent(ask(owner))
    assert [(KEY, owner) in notes for owner in (ANNA, BERT, CARL)] == [False, True, True]


def test_a_repeated_claim_keeps_what_the_first_one_said():
    notes = Notes()
    look = Look(Found(None, 0, b""), 0.0)
    assert notes.given(ask(ANNA, RED), Claimed(1, 7), look) is False
    assert notes.given(ask(ANNA, None, lease=1.0), Claimed(1, 7), None) is True
    note = notes.find(KEY, ANNA)
    assert (note.fingerprint, note.lease, note.look) == (RED, 1.0, look)
    assert notes.given(ask(ANNA), Claimed(2, 8), look) is False
    assert notes.take(KEY, ANNA).fence == 8
    assert notes.take(KEY, ANNA) is None


# --- the rules ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("now", "answer"), [(8, Busy(1e-6)), (9, None), (10, None)])
def test_an_entry_answers_up_to_its_very_end(now, answer):
    look = Look(Found(Entry(Kind.HINT, 0, 9, 0, RED), now, b""), 0.0)
    assert Tier("idem:", 60.0).answer(ask(BERT, RED), look) == answer


def test_the_fronts_time_is_never_thought_later_than_it_is():
    look = Look(Found(None, 1_000_000, b""), seen_at=50.0)
    assert look.front_time(50.0) == 1_000_000
    assert 1_998_000 < look.front_time(51.0) < 2_000_000


# --- entries ------------------------------------------------------------------------------------


def fixed(kind: int, fence: int = 5, expires: int = 9) -> bytes:
    return bytes((1, kind)) + fence.to_bytes(7) + expires.to_bytes(7)


@pytest.mark.parametrize("fingerprint", [None, RED])
@pytest.mark.parametrize("outcome", [Encoded("json/1", b""), Encoded("é" * 300, bytes(range(256)))])
def test_a_copy_comes_back_as_it_was(fingerprint, outcome):
    raw = fixed(Kind.SUCCEEDED) + pack_body(3, fingerprint, outcome)
    assert unpack(raw) == Entry(Kind.SUCCEEDED, 5, 9, 3, fingerprint, outcome)


def test_a_mark_is_nothing_but_its_fence():
    assert unpack(fixed(Kind.CLOSED)) == Entry(Kind.CLOSED, 5, 9)


@pytest.mark.parametrize(
    "raw",
    [b"", b"\x02", fixed(Kind.SUCCEEDED), fixed(9) + bytes(20), fixed(2)[:8], fixed(2) + bytes(6)],
)
def test_what_is_no_entry_is_named_as_such(raw):
    with pytest.raises(RecordUnreadable, match="front"):
        unpack(raw)
