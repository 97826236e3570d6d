"""The contract of claims: each answer in the state that it belongs to, in the order of judging."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from semel.core.records import (
    FINGERPRINT_BYTES,
    OWNER_BYTES,
    SUPERSEDED_LIMIT,
    Abandoned,
    Busy,
    Claimed,
    Exhausted,
    Finished,
    Mismatch,
    State,
)
from semel.testing.contract.given import (
    ANNA,
    BERT,
    BLUE,
    CARL,
    ERROR,
    KEY,
    LONG,
    RED,
    RESULT,
    SHORT,
    Sleep,
    StoreUnderTest,
    abandon,
    ask,
    expect,
    fail,
    park,
    record_of,
    succeed,
)
from semel.testing.driver import StoreDriver


class ClaimContract(StoreUnderTest):
    """Each answer of `claim`."""

    def test_the_first_claim_of_a_key_is_claimed(self, driven: StoreDriver) -> None:
        claim = expect(Claimed, driven.claim(ask(ANNA, RED)))
        assert claim.number == 1
        assert claim.fence > 0
        assert claim.takeover is False

    def test_a_claimed_record_is_processing_and_has_no_end(self, driven: StoreDriver) -> None:
        claim = driven.claim(ask(ANNA, RED, hold=True))
        record = record_of(driven)
        assert isinstance(claim, Claimed)
        assert record.identity == KEY
        assert record.state is State.PROCESSING
        assert record.owner == ANNA
        assert record.fingerprint == RED
        assert (record.number, record.fence) == (claim.number, claim.fence)
        assert record.hold is True
        assert record.superseded == ()
        assert record.outcome is None
        assert record.retryable is False
        assert record.expires_at is None
        assert record.remaining is None
        assert record.created_at == record.updated_at
        assert record.lease_until == pytest.approx(record.created_at + LONG, abs=0.01)
        assert record.abandoned is False

    def test_a_second_owner_is_told_busy_and_for_how_long(self, driven: StoreDriver) -> None:
        driven.claim(ask(ANNA))
        claim = expect(Busy, driven.claim(ask(BERT)))
        assert 0 < claim.retry_after <= LONG
        assert record_of(driven).owner == ANNA

    def test_a_claim_sent_twice_is_claimed_again_as_the_same_attempt(
        self, driven: StoreDriver
    ) -> None:
        first = driven.claim(ask(ANNA, RED))
        assert driven.claim(ask(ANNA, RED)) == first
        assert record_of(driven).number == 1

    def test_a_claim_sent_twice_refreshes_the_lease(self, driven: StoreDriver) -> None:
        driven.claim(ask(ANNA, lease=LONG))
        driven.claim(ask(ANNA, lease=2 * LONG))
        claim = expect(Busy, driven.claim(ask(BERT)))
        assert claim.retry_after > LONG

    def test_another_payload_while_the_first_runs_is_a_mismatch_and_changes_nothing(
        self, driven: StoreDriver
    ) -> None:
        driven.claim(ask(ANNA, RED))
        before = record_of(driven)
        assert driven.claim(ask(BERT, BLUE)) == Mismatch()
        after = record_of(driven)
        assert (after.owner, after.fingerprint) == (ANNA, RED)
        assert after.lease_until == before.lease_until

    def test_a_payload_absent_on_either_side_is_not_compared(self, driven: StoreDriver) -> None:
        driven.claim(ask(ANNA, RED))
        assert isinstance(driven.claim(ask(BERT, None)), Busy)
        driven.forget(KEY)
        driven.claim(ask(ANNA, None))
        assert isinstance(driven.claim(ask(BERT, BLUE)), Busy)

    def test_a_caller_without_a_payload_does_not_erase_what_the_key_was_used_for(
        self, driven: StoreDriver
    ) -> None:
        abandon(driven, ANNA, RED)
        assert isinstance(driven.claim(ask(BERT, None)), Claimed)
        assert record_of(driven).fingerprint == RED
        assert driven.claim(ask(CARL, BLUE)) == Mismatch()

    def test_a_payload_is_remembered_from_the_first_claim_that_brings_one(
        self, driven: StoreDriver
    ) -> None:
        abandon(driven, ANNA, None)
        driven.claim(ask(BERT, RED))
        assert record_of(driven).fingerprint == RED
        assert record_of(driven).superseded == ()

    def test_a_success_is_finished_for_everyone_else(self, driven: StoreDriver) -> None:
        claimed = driven.claim(ask(ANNA, RED))
        driven.complete(KEY, ANNA, RESULT, LONG)
        finished = driven.claim(ask(BERT, RED))
        assert isinstance(claimed, Claimed)
        assert isinstance(finished, Finished)
        assert finished.state is State.SUCCEEDED
        assert finished.outcome == RESULT
        assert (finished.number, finished.fence) == (claimed.number, claimed.fence)
        assert 0 < finished.remaining <= LONG

    def test_a_final_failure_is_finished_for_everyone_else(self, driven: StoreDriver) -> None:
        driven.claim(ask(ANNA, RED))
        fail(driven, retryable=False)
        finished = expect(Finished, driven.claim(ask(BERT, RED)))
        assert finished.state is State.FAILED
        assert finished.outcome == ERROR

    def test_a_retryable_failure_may_be_claimed_again(self, driven: StoreDriver) -> None:
        driven.claim(ask(ANNA, RED))
        fail(driven)
        claim = expect(Claimed, driven.claim(ask(BERT, RED)))
        assert claim.number == 2
        assert claim.takeover is False
        record = record_of(driven)
        assert record.state is State.PROCESSING
        assert record.outcome is None
        assert record.retryable is False
        assert record.expires_at is None

    def test_a_parked_attempt_is_taken_over_at_once(self, driven: StoreDriver) -> None:
        abandon(driven, ANNA, RED)
        assert record_of(driven).abandoned is True
        claim = expect(Claimed, driven.claim(ask(BERT, RED)))
        assert claim.number == 2
        assert claim.takeover is True
        assert record_of(driven).owner == BERT

    def test_an_attempt_is_taken_over_when_its_lease_has_passed(
        self, driven: StoreDriver, sleep: Sleep
    ) -> None:
        driven.claim(ask(ANNA, lease=SHORT))
        sleep(2 * SHORT)
        claim = expect(Claimed, driven.claim(ask(BERT)))
        assert claim.takeover is True
        assert isinstance(driven.claim(ask(CARL)), Busy)

    def test_attempts_are_counted_over_takeovers_and_failures(self, driven: StoreDriver) -> None:
        numbers = []
        for owner, end in ((ANNA, park), (BERT, fail), (CARL, park), (ANNA, fail)):
            claim = expect(Claimed, driven.claim(ask(owner)))
            numbers.append(claim.number)
            end(driven, owner)
        assert numbers == [1, 2, 3, 4]

    def test_a_caller_whose_limit_of_attempts_is_reached_is_told_so(
        self, driven: StoreDriver
    ) -> None:
        abandon(driven, ANNA)
        assert driven.claim(ask(BERT, max_attempts=1)) == Exhausted(1)
        assert record_of(driven).owner == ANNA
        assert isinstance(driven.claim(ask(BERT, max_attempts=2)), Claimed)
        fail(driven, BERT)
        assert driven.claim(ask(CARL, max_attempts=2)) == Exhausted(2)

    def test_a_claim_that_never_ran_gives_its_number_back(self, driven: StoreDriver) -> None:
        first = expect(Claimed, driven.claim(ask(ANNA, RED, max_attempts=1)))
        assert fail(driven, keep_fingerprint=False, ran=False)
        record = record_of(driven)
        assert (record.number, record.fence, record.owner) == (0, first.fence, ANNA)
        second = expect(Claimed, driven.claim(ask(BERT, BLUE, max_attempts=1)))
        assert (second.number, second.takeover) == (1, False)
        assert second.fence > first.fence
        assert fail(driven, BERT)
        assert driven.claim(ask(CARL, BLUE, max_attempts=1)) == Exhausted(1)

    def test_a_number_is_given_back_once_however_often_that_is_sent(
        self, driven: StoreDriver
    ) -> None:
        driven.claim(ask(ANNA, RED))
        fail(driven)
        driven.claim(ask(BERT, RED))
        assert [fail(driven, BERT, ran=False) for _ in range(3)] == [True] * 3
        record = record_of(driven)
        assert (record.number, record.fingerprint) == (1, RED)
        assert isinstance(driven.claim(ask(BERT, RED)), Finished)

    def test_a_limit_of_no_attempt_claims_only_a_key_without_a_record(
        self, driven: StoreDriver
    ) -> None:
        assert isinstance(driven.claim(ask(ANNA, max_attempts=0)), Claimed)
        fail(driven, ran=False)
        assert driven.claim(ask(BERT, max_attempts=0)) == Exhausted(0)
        assert record_of(driven).owner == ANNA

    def test_a_limit_of_attempts_does_not_stop_the_first(self, driven: StoreDriver) -> None:
        assert isinstance(driven.claim(ask(ANNA, max_attempts=1)), Claimed)

    def test_one_of_many_simultaneous_claims_is_claimed(self, driven: StoreDriver) -> None:
        owners = [index.to_bytes(12, "big") for index in range(1, 21)]
        claims = driven.race([ask(owner, RED) for owner in owners])
        winners = [claim for claim in claims if isinstance(claim, Claimed)]
        assert len(winners) == 1
        assert sum(isinstance(claim, Busy) for claim in claims) == len(owners) - 1
        assert record_of(driven).owner == owners[claims.index(winners[0])]

    def test_one_of_many_simultaneous_claims_takes_over(self, driven: StoreDriver) -> None:
        abandon(driven, ANNA)
        claims = driven.race([ask(index.to_bytes(12, "big")) for index in range(1, 21)])
        assert sum(isinstance(claim, Claimed) for claim in claims) == 1
        assert record_of(driven).number == 2

    @pytest.mark.parametrize("end", [fail, park])
    def test_the_fence_grows_when_the_clock_was_set_back(
        self,
        driven: StoreDriver,
        set_clock_back: Callable[[], None],
        end: Callable[[StoreDriver], object],
    ) -> None:
        driven.claim(ask(ANNA))
        set_clock_back()
        end(driven)
        last = record_of(driven).fence
        claim = expect(Claimed, driven.claim(ask(BERT)))
        assert claim.fence > last
        assert record_of(driven).fence == claim.fence

    def test_the_fence_grows_over_every_kind_of_new_claim(
        self, driven: StoreDriver, sleep: Sleep
    ) -> None:
        fences = []

        def claim(owner: bytes) -> None:
            answer = expect(Claimed, driven.claim(ask(owner)))
            fences.append(answer.fence)

        claim(ANNA)
        park(driven, ANNA)
        claim(BERT)
        fail(driven, BERT)
        claim(CARL)
        driven.forget(KEY)
        sleep(0.001)  # a fence grows with the clock where no record remembers the last one
        claim(ANNA)
        fail(driven, ANNA, ran=False)
        claim(CARL)
        fail(driven, CARL)
        claim(BERT)
        driven.complete(KEY, BERT, RESULT, SHORT)
        sleep(2 * SHORT)
        claim(ANNA)
        driven.forget(KEY)
        sleep(0.001)
        driven.put(KEY, RESULT, LONG, owner=CARL)
        fences.append(record_of(driven).fence)
        assert fences == sorted(set(fences))

    def test_a_forgotten_record_counts_from_one_again(self, driven: StoreDriver) -> None:
        succeed(driven)
        driven.forget(KEY)
        claim = expect(Claimed, driven.claim(ask(BERT, BLUE)))
        assert claim.number == 1


# --- the order in which a claim is judged -------------------------------------------------


class JudgingContract(StoreUnderTest):
    """Own, ended, mismatch, finished, busy, held, exhausted, claimed: the first that fits."""

    def test_own_comes_before_mismatch(self, driven: StoreDriver) -> None:
        first = driven.claim(ask(ANNA, RED))
        assert driven.claim(ask(ANNA, BLUE)) == first
        assert record_of(driven).fingerprint == RED

    def test_own_comes_before_held_and_exhausted(self, driven: StoreDriver) -> None:
        first = driven.claim(ask(ANNA, RED, hold=True))
        park(driven)
        assert driven.claim(ask(ANNA, RED, hold=True, max_attempts=1)) == first
        assert record_of(driven).abandoned is False

    def test_an_owner_whose_lease_passed_is_still_the_same_attempt(
        self, driven: StoreDriver, sleep: Sleep
    ) -> None:
        first = driven.claim(ask(ANNA, lease=SHORT))
        sleep(2 * SHORT)
        assert driven.claim(ask(ANNA)) == first
        assert isinstance(driven.claim(ask(BERT)), Busy)

    def test_a_late_claim_of_an_owner_that_succeeded_is_finished(self, driven: StoreDriver) -> None:
        succeed(driven, ANNA, RED)
        for late in (ask(ANNA, RED), ask(ANNA, BLUE), ask(ANNA, BLUE, replace=True)):
            claim = expect(Finished, driven.claim(late))
            assert claim.outcome == RESULT

    @pytest.mark.parametrize("retryable", [True, False])
    def test_a_late_claim_of_an_owner_that_failed_is_finished(
        self, driven: StoreDriver, *, retryable: bool
    ) -> None:
        driven.claim(ask(ANNA, RED))
        fail(driven, retryable=retryable)
        claim = expect(Finished, driven.claim(ask(ANNA, RED)))
        assert (claim.state, claim.outcome) == (State.FAILED, ERROR)
        assert record_of(driven).state is State.FAILED

    def test_an_owner_that_was_replaced_is_judged_like_anyone(self, driven: StoreDriver) -> None:
        abandon(driven, ANNA, RED)
        driven.claim(ask(BERT, RED))
        assert isinstance(driven.claim(ask(ANNA, RED)), Busy)
        assert driven.claim(ask(ANNA, BLUE)) == Mismatch()
        driven.complete(KEY, BERT, RESULT, LONG)
        assert isinstance(driven.claim(ask(ANNA, RED)), Finished)

    def test_mismatch_comes_before_finished(self, driven: StoreDriver) -> None:
        succeed(driven, ANNA, RED)
        assert driven.claim(ask(BERT, BLUE)) == Mismatch()
        assert record_of(driven).outcome == RESULT

    def test_mismatch_comes_before_a_final_failure(self, driven: StoreDriver) -> None:
        driven.claim(ask(ANNA, RED))
        fail(driven, retryable=False)
        assert driven.claim(ask(BERT, BLUE)) == Mismatch()

    def test_mismatch_comes_before_takeover(self, driven: StoreDriver) -> None:
        abandon(driven, ANNA, RED)
        assert driven.claim(ask(BERT, BLUE)) == Mismatch()
        assert record_of(driven).owner == ANNA

    def test_mismatch_comes_before_held_and_exhausted(self, driven: StoreDriver) -> None:
        abandon(driven, ANNA, RED, hold=True)
        assert driven.claim(ask(BERT, BLUE, hold=True, max_attempts=1)) == Mismatch()

    def test_mismatch_comes_before_a_retry_that_would_be_allowed(self, driven: StoreDriver) -> None:
        driven.claim(ask(ANNA, RED))
        fail(driven, retryable=True, keep_fingerprint=True)
        assert driven.claim(ask(BERT, BLUE)) == Mismatch()
        assert isinstance(driven.claim(ask(BERT, RED)), Claimed)

    def test_finished_comes_before_exhausted(self, driven: StoreDriver) -> None:
        succeed(driven)
        assert isinstance(driven.claim(ask(BERT, hold=True, max_attempts=1)), Finished)

    def test_busy_comes_before_held_and_exhausted(self, driven: StoreDriver) -> None:
        driven.claim(ask(ANNA, hold=True))
        assert isinstance(driven.claim(ask(BERT, hold=True, max_attempts=1)), Busy)

    def test_held_comes_before_exhausted(self, driven: StoreDriver) -> None:
        abandon(driven, ANNA, hold=True)
        assert driven.claim(ask(BERT, max_attempts=1)) == Abandoned(1)

    def test_a_hold_does_not_matter_after_a_recorded_failure(self, driven: StoreDriver) -> None:
        driven.claim(ask(ANNA, hold=True))
        fail(driven)
        assert driven.claim(ask(BERT, hold=True, max_attempts=1)) == Exhausted(1)
        assert isinstance(driven.claim(ask(BERT, hold=True)), Claimed)


# --- a new payload takes the key, and the old ones stay out -------------------------------


def payload(index: int) -> bytes:
    """Make the fingerprint of the n-th payload."""
    return index.to_bytes(FINGERPRINT_BYTES, "big")


def replaced(driven: StoreDriver, count: int) -> None:
    """Succeed with payload 0, then replace it `count` times."""
    for index in range(count + 1):
        owner = index.to_bytes(OWNER_BYTES, "big")
        assert isinstance(driven.claim(ask(owner, payload(index), replace=True)), Claimed)
        assert driven.complete(KEY, owner, RESULT, LONG)


class ReplaceContract(StoreUnderTest):
    """Loose payloads: the last one wins, but never over a running attempt."""

    def test_a_new_payload_replaces_a_success(self, driven: StoreDriver) -> None:
        succeed(driven, ANNA, RED)
        claim = expect(Claimed, driven.claim(ask(BERT, BLUE, replace=True)))
        assert (claim.number, claim.takeover) == (1, False)
        record = record_of(driven)
        assert record.fingerprint == BLUE
        assert record.superseded == (RED,)
        assert record.outcome is None

    def test_the_attempts_of_a_replaced_payload_do_not_count(self, driven: StoreDriver) -> None:
        fences = []
        for owner in (ANNA, BERT):
            claim = expect(Claimed, driven.claim(ask(owner, RED)))
            fences.append(claim.fence)
            fail(driven, owner)
        limited = ask(CARL, BLUE, replace=True, max_attempts=1)
        claim = expect(Claimed, driven.claim(limited))
        assert claim.number == record_of(driven).number == 1
        assert claim.fence > max(fences)
        fail(driven, CARL)
        late = ask(bytes(OWNER_BYTES), BLUE, replace=True, max_attempts=1)
        assert driven.claim(late) == Exhausted(1)

    def test_a_new_payload_replaces_a_final_failure(self, driven: StoreDriver) -> None:
        driven.claim(ask(ANNA, RED))
        fail(driven, retryable=False)
        assert isinstance(driven.claim(ask(BERT, BLUE, replace=True)), Claimed)
        assert record_of(driven).superseded == (RED,)

    def test_the_same_payload_is_finished_not_replaced(self, driven: StoreDriver) -> None:
        succeed(driven, ANNA, RED)
        assert isinstance(driven.claim(ask(BERT, RED, replace=True)), Finished)
        assert isinstance(driven.claim(ask(BERT, None, replace=True)), Finished)

    def test_a_new_payload_never_interrupts_a_live_attempt(self, driven: StoreDriver) -> None:
        driven.claim(ask(ANNA, RED))
        assert isinstance(driven.claim(ask(BERT, BLUE, replace=True)), Busy)
        record = record_of(driven)
        assert (record.owner, record.fingerprint) == (ANNA, RED)

    def test_a_new_payload_takes_over_an_abandoned_attempt(self, driven: StoreDriver) -> None:
        abandon(driven, ANNA, RED)
        claim = expect(Claimed, driven.claim(ask(BERT, BLUE, replace=True)))
        assert claim.takeover is True
        assert record_of(driven).superseded == (RED,)

    def test_a_new_payload_does_not_take_a_held_record(self, driven: StoreDriver) -> None:
        abandon(driven, ANNA, RED, hold=True)
        assert driven.claim(ask(BERT, BLUE, replace=True)) == Abandoned(1)

    def test_a_late_retry_of_the_replaced_payload_is_refused(self, driven: StoreDriver) -> None:
        succeed(driven, ANNA, RED)
        driven.claim(ask(BERT, BLUE, replace=True))
        late = ask(CARL, RED, replace=True)
        assert driven.claim(late) == Mismatch(superseded=True)
        driven.complete(KEY, BERT, RESULT, LONG)
        assert driven.claim(late) == Mismatch(superseded=True)
        assert record_of(driven).fingerprint == BLUE

    def test_a_strict_caller_is_not_told_superseded(self, driven: StoreDriver) -> None:
        replaced(driven, 1)
        assert driven.claim(ask(CARL, payload(0))) == Mismatch()

    def test_a_replaced_payload_stays_refused_over_failures_and_takeovers(
        self, driven: StoreDriver
    ) -> None:
        succeed(driven, ANNA, RED)
        driven.claim(ask(BERT, BLUE, replace=True))
        park(driven, BERT)
        driven.claim(ask(CARL, BLUE, replace=True))
        fail(driven, CARL, keep_fingerprint=False)
        assert driven.claim(ask(ANNA, RED, replace=True)) == Mismatch(superseded=True)
        assert record_of(driven).superseded == (RED,)

    def test_the_last_replaced_payloads_are_remembered_in_order(self, driven: StoreDriver) -> None:
        replaced(driven, SUPERSEDED_LIMIT)
        remembered = tuple(payload(index) for index in range(SUPERSEDED_LIMIT))
        assert record_of(driven).superseded == remembered

    def test_each_remembered_payload_is_refused(self, driven: StoreDriver) -> None:
        replaced(driven, SUPERSEDED_LIMIT)
        for index in range(SUPERSEDED_LIMIT):
            late = ask(ANNA, payload(index), replace=True)
            assert driven.claim(late) == Mismatch(superseded=True), index
        assert record_of(driven).fingerprint == payload(SUPERSEDED_LIMIT)

    def test_put_keeps_the_replaced_payloads_refused(self, driven: StoreDriver) -> None:
        replaced(driven, SUPERSEDED_LIMIT)
        driven.claim(ask(BERT, BLUE, replace=True))
        fail(driven, BERT)
        remembered = record_of(driven).superseded
        assert driven.put(KEY, RESULT, LONG, owner=CARL) is True
        assert record_of(driven).superseded == remembered
        for fingerprint in remembered:
            late = ask(ANNA, fingerprint, replace=True)
            assert driven.claim(late) == Mismatch(superseded=True), fingerprint

    def test_a_payload_replaced_too_long_ago_is_new_again(self, driven: StoreDriver) -> None:
        replaced(driven, SUPERSEDED_LIMIT + 1)
        refused = ask(ANNA, payload(1), replace=True)
        assert driven.claim(refused) == Mismatch(superseded=True)
        assert isinstance(driven.claim(ask(ANNA, payload(0), replace=True)), Claimed)
        assert len(record_of(driven).superseded) == SUPERSEDED_LIMIT

    def test_an_owner_whose_success_was_replaced_cannot_write(self, driven: StoreDriver) -> None:
        succeed(driven, ANNA, RED)
        driven.claim(ask(BERT, BLUE, replace=True))
        assert driven.complete(KEY, ANNA, RESULT, LONG) is False
        assert record_of(driven).owner == BERT
