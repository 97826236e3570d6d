"""The book of running attempts: when each lease is renewed, and when it counts as lost."""

from __future__ import annotations

import math

import pytest

from semel.core.attempts import CHUNK, Lease, Leases
from semel.core.records import ClaimRequest, CompleteRequest, Encoded, Identity, RenewRequest
from semel.core.run_info import OwnRunInfo
from semel.errors import StoreUnavailable

KEY = Identity("orders", "42")
SENT = 1000.0
DOWN = StoreUnavailable("down")


def lease(owner=b"anna", seconds=30.0, sent=SENT):
    return Lease(KEY, owner, 1, seconds, sent)


def book(*leases):
    running = Leases()
    for one in leases:
        running.add(one)
    return running


def unsaved(one):
    one.unsaved = CompleteRequest(KEY, one.owner, Encoded("json/1", b"1"), 60.0)
    return one


# --- one lease -----------------------------------------------------------------------------


def test_a_lease_is_counted_from_before_the_claim_was_sent():
    one = lease()
    assert (one.began, one.due, one.until) == (SENT, SENT + 10.0, SENT + 30.0)
    assert one.renewal == RenewRequest(KEY, b"anna", 30.0)


def test_an_attempt_is_parked_with_what_its_record_says():
    one = lease()
    assert one.parking == RenewRequest(KEY, b"anna", 0.0, None)
    one.run_info, one.why = OwnRunInfo(60.0, "json/1"), "TimeoutError"
    assert one.parking == RenewRequest(KEY, b"anna", 0.0, one.run_info.parked("TimeoutError"))


def test_a_lease_is_lost_a_little_before_it_ends():
    one = lease()
    assert not one.lost_at(SENT + 26.9)
    assert one.lost_at(SENT + 27.0)


def test_a_refused_lease_is_lost_at_once():
    one = lease()
    one.rejected = True
    assert one.lost_at(SENT)


@pytest.mark.parametrize(("seconds", "pause"), [(30.0, 1.0), (0.3, 0.015)])
def test_a_retry_comes_soon_and_sooner_for_short_leases(seconds, pause):
    one = lease(seconds=seconds)
    one.due = math.inf
    one.retry(SENT)
    assert one.due == pytest.approx(SENT + pause)


def test_a_retry_never_delays_what_is_due_before():
    one = lease()
    one.due = SENT + 0.5
    one.retry(SENT)
    assert one.due == SENT + 0.5


# --- the book ------------------------------------------------------------------------------


def test_an_empty_book_is_never_due():
    assert book().next_due() == math.inf
    assert book().due(SENT) == []
    assert len(book()) == 0


def test_it_knows_whom_it_holds():
    anna, double = lease(b"anna"), lease(b"anna")
    running = book(anna)
    assert anna in running
    assert double not in running, "the same owner id does not make it the same attempt"
    assert None not in running
    running.drop(anna)
    running.drop(anna)
    assert anna not in running
    assert len(running) == 0


def test_what_is_nearly_due_comes_along():
    soon, later = lease(b"anna"), lease(b"bert", sent=SENT + 5.0)
    running = book(soon, later)
    assert running.next_due() == SENT + 10.0
    assert running.due(SENT + 7.4) == []
    assert running.due(SENT + 7.5) == [[soon]]
    assert running.due(SENT + 12.5) == [[soon, later]]


def test_many_are_renewed_in_chunks():
    leases = [lease(number.to_bytes(4)) for number in range(CHUNK + 1)]
    chunks = book(*leases).due(SENT + 10.0)
    assert [len(chunk) for chunk in chunks] == [CHUNK, 1]


def test_it_tells_what_could_not_be_saved():
    saved, waiting = lease(b"anna"), unsaved(lease(b"bert"))
    assert book(saved, waiting).unsaved() == [(waiting, waiting.unsaved)]


def test_a_renewal_counts_from_before_it_was_sent():
    one = lease()
    running = book(one)
    assert running.renewed(one, True, sent=SENT + 10.0, now=SENT + 12.0) is False
    assert (one.due, one.until) == (SENT + 20.0, SENT + 40.0)


def test_a_refused_renewal_ends_the_lease_at_once():
    one = lease()
    running = book(one)
    assert running.renewed(one, False, sent=SENT + 10.0, now=SENT + 10.1) is True
    assert one.rejected
    assert one not in running


def test_a_refused_renewal_of_what_waits_to_be_saved_leaves_the_answer_to_the_save():
    one = unsaved(lease())
    running = book(one)
    assert running.renewed(one, False, sent=SENT + 10.0, now=SENT + 10.1) is False
    assert not one.rejected
    assert running.unsaved() == [(one, one.unsaved)], "it may have been saved without our knowing"
    assert SENT + 10.1 < running.next_due() <= SENT + 11.1, "soon, and not at once over and over"


def test_a_refused_renewal_of_an_attempt_whose_end_is_being_told_is_no_loss():
    one = lease()
    one.ending = True
    running = book(one)
    assert running.renewed(one, False, sent=SENT + 10.0, now=SENT + 10.1) is False
    assert one in running
    assert not one.rejected
    assert running.next_due() == running.next_danger() == math.inf, "only the answer to that tells"


def test_an_attempt_that_was_given_up_is_neither_renewed_nor_lost():
    one = lease()
    running = book(one)
    one.stop()
    for answer in (True, False, DOWN):
        assert running.renewed(one, answer, sent=SENT + 10.0, now=SENT + 10.1) is False
    one.due = SENT  # by a timer that was just noting an answer
    assert running.due(SENT + 60.0) == running.newly_lost(SENT + 60.0) == []
    assert running.next_due() == running.next_danger() == math.inf


def test_an_answer_to_an_attempt_that_has_ended_says_nothing():
    one = lease()
    for answer in (True, False, DOWN):
        assert book().renewed(one, answer, sent=SENT + 10.0, now=SENT + 29.0) is False
    assert not one.rejected
    assert one.until == SENT + 30.0


def test_a_failed_renewal_is_tried_again_soon():
    one = lease()
    running = book(one)
    assert running.renewed(one, DOWN, sent=SENT + 10.0, now=SENT + 10.1) is False
    assert one.due == pytest.approx(SENT + 11.1)
    assert one in running


def test_a_lease_that_ends_during_a_renewal_is_told_as_lost():
    one = lease()
    running = book(one)
    assert running.renewed(one, DOWN, sent=SENT + 26.0, now=SENT + 27.5) is True


def test_a_lease_that_ends_between_two_renewals_is_told_as_lost_once():
    one = lease()
    running = book(one)
    assert running.renewed(one, DOWN, sent=SENT + 26.8, now=SENT + 26.9) is False
    assert running.renewed(one, DOWN, sent=SENT + 27.9, now=SENT + 28.0) is True
    assert running.renewed(one, DOWN, sent=SENT + 29.0, now=SENT + 29.1) is False


def test_a_lease_that_was_kept_after_all_can_be_lost_again():
    one = lease()
    running = book(one)
    assert running.renewed(one, DOWN, sent=SENT + 27.9, now=SENT + 28.0) is True
    assert running.renewed(one, True, sent=SENT + 29.0, now=SENT + 29.1) is False
    assert not one.lost_at(SENT + 29.1)
    assert running.renewed(one, DOWN, sent=SENT + 57.0, now=SENT + 57.1) is True


def test_a_renewal_that_took_longer_than_the_lease_does_not_let_its_loss_be_told_again():
    one = lease()
    running = book(one)
    assert running.newly_lost(SENT + 27.0) == [one]
    assert running.renewed(one, True, sent=SENT + 10.0, now=SENT + 60.0) is False
    assert running.newly_lost(SENT + 60.0) == []
    assert running.renewed(one, True, sent=SENT + 60.0, now=SENT + 60.1) is False
    assert running.newly_lost(SENT + 87.0) == [one], "kept after all, and lost again"


def test_a_refusal_after_the_loss_was_told_is_not_told_again():
    one = lease()
    running = book(one)
    assert running.renewed(one, DOWN, sent=SENT + 27.9, now=SENT + 28.0) is True
    assert running.renewed(one, False, sent=SENT + 29.0, now=SENT + 29.1) is False
    assert one.rejected
    assert one not in running


def test_a_result_that_could_not_be_saved_comes_after_the_others():
    one, other = unsaved(lease()), unsaved(lease())
    other.owner = b"another one."
    running = book(one, other)
    running.put_off(one, SENT)
    assert [each for each, _ in running.unsaved()] == [other, one]
    running.drop(one)
    running.put_off(one, SENT)
    assert one not in running, "it was saved meanwhile"


def test_doubtful_claims_are_bounded(monkeypatch):
    monkeypatch.setattr("semel.core.attempts.MOST_DOUBTS", 1)
    running = Leases()
    first, second = (ClaimRequest(KEY, owner, None, 30.0, 60.0) for owner in (b"anna", b"bert"))
    assert running.doubt(first, SENT) == running.doubt(second, SENT) == SENT + 1.0
    assert running.doubtful(SENT + 1.0) == [first]


def test_a_claim_that_is_doubted_while_another_is_settled_is_given_back_too():
    running = Leases()
    first, second = (ClaimRequest(KEY, owner, None, 30.0, 60.0) for owner in (b"anna", b"bert"))
    running.doubt(first, SENT)

    class Shared(dict):
        """Another thread comes in between as soon as it was seen empty."""

        came = False

        def __len__(self):
            found = super().__len__()
            if found == 0 and not self.came:
                self.came = True
                running.doubt(second, SENT)
            return found

    running._unsure = shared = Shared(running._unsure)
    running.settled(first)
    running.next_due()
    assert shared.came
    assert running.next_due() == SENT + 1.0
    assert running.doubtful(SENT + 1.0) == [second]


def test_a_lease_in_a_traceback_tells_neither_key_nor_result():
    one = Lease(Identity("cards", "card-of-anna"), b"anna", 2, 30.0, SENT)
    one.unsaved = CompleteRequest(one.identity, b"anna", Encoded("json/1", b'"secret"'), 60.0)
    assert "card-of-anna" not in repr(one)
    assert "secret" not in repr(one)
    assert "attempt 2" in repr(one)


# --- several servers -------------------------------------------------------------------------


def test_each_server_has_its_own_renewals():
    here, there = lease(b"here"), lease(b"there", sent=SENT + 5.0)
    servers = {b"here": "a", b"there": "b"}
    for one in (here, there):
        one.identity = Identity("orders", one.owner.decode())
    running = book(here, there)
    assert running.place(lambda identity: servers[identity.key.encode()]) == {
        "a": SENT + 10.0,
        "b": SENT + 15.0,
    }
    assert running.due(SENT + 10.0, "a") == [[here]]
    assert running.due(SENT + 10.0, "b") == []
    assert running.due(SENT + 10.0) == []
    assert running.next_renewal("b") == SENT + 15.0
    assert running.next_renewal() == math.inf


def test_a_store_with_one_server_is_not_asked_for_the_server_of_every_record():
    asked = []
    running = book(*(lease(bytes([number])) for number in range(5)))
    assert running.place(asked.append) == {}
    assert len(asked) == 1


def test_a_lease_stays_with_the_server_that_it_was_first_found_on():
    running = book(lease())
    running.place(lambda _: "a")
    assert running.place(lambda _: "b") == {"a": SENT + 10.0}


def test_a_claim_that_could_not_be_given_back_goes_to_the_end():
    running = book()
    for owner in (b"anna", b"bert", b"anna"):
        running.doubt(ClaimRequest(KEY, owner, None, 30.0, 60.0), SENT)
    assert [ask.owner for ask in running.doubtful(math.inf)] == [b"bert", b"anna"]
