"""The contract of `claim`: each answer in the state that it belongs to."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from semel.core.records import Busy, Claimed, Exhausted, Finished, Mismatch, State
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
    ask,
    fail,
    park,
    record_of,
    succeed,
)
from semel.testing.driver import StoreDriver


class ClaimContract(StoreUnderTest):
    """Each answer of `claim`."""

    def test_the_first_claim_of_a_key_is_claimed(self, driven: StoreDriver) -> None:
        claim = driven.claim(ask(ANNA, RED))
        assert isinstance(claim, Claimed)
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
        claim = driven.claim(ask(BERT))
        assert isinstance(claim, Busy)
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
        claim = driven.claim(ask(BERT))
        assert isinstance(claim, Busy)
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
        driven.claim(ask(ANNA, RED))
        park(driven)
        assert isinstance(driven.claim(ask(BERT, None)), Claimed)
        assert record_of(driven).fingerprint == RED
        assert driven.claim(ask(CARL, BLUE)) == Mismatch()

    def test_a_payload_is_remembered_from_the_first_claim_that_brings_one(
        self, driven: StoreDriver
    ) -> None:
        driven.claim(ask(ANNA, None))
        park(driven)
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
        finished = driven.claim(ask(BERT, RED))
        assert isinstance(finished, Finished)
        assert finished.state is State.FAILED
        assert finished.outcome == ERROR

    def test_a_retryable_failure_may_be_claimed_again(self, driven: StoreDriver) -> None:
        driven.claim(ask(ANNA, RED))
        fail(driven)
        claim = driven.claim(ask(BERT, RED))
        assert isinstance(claim, Claimed)
        assert claim.number == 2
        assert claim.takeover is False
        record = record_of(driven)
        assert record.state is State.PROCESSING
        assert record.outcome is None
        assert record.retryable is False
        assert record.expires_at is None

    def test_a_parked_attempt_is_taken_over_at_once(self, driven: StoreDriver) -> None:
        driven.claim(ask(ANNA, RED))
        park(driven)
        assert record_of(driven).abandoned is True
        claim = driven.claim(ask(BERT, RED))
        assert isinstance(claim, Claimed)
        assert claim.number == 2
        assert claim.takeover is True
        assert record_of(driven).owner == BERT

    def test_an_attempt_is_taken_over_when_its_lease_has_passed(
        self, driven: StoreDriver, sleep: Sleep
    ) -> None:
        driven.claim(ask(ANNA, lease=SHORT))
        sleep(2 * SHORT)
        claim = driven.claim(ask(BERT))
        assert isinstance(claim, Claimed)
        assert claim.takeover is True
        assert isinstance(driven.claim(ask(CARL)), Busy)

    def test_attempts_are_counted_over_takeovers_and_failures(self, driven: StoreDriver) -> None:
        numbers = []
        for owner, end in ((ANNA, park), (BERT, fail), (CARL, park), (ANNA, fail)):
            claim = driven.claim(ask(owner))
            assert isinstance(claim, Claimed)
            numbers.append(claim.number)
            end(driven, owner)
        assert numbers == [1, 2, 3, 4]

    def test_a_caller_whose_limit_of_attempts_is_reached_is_told_so(
        self, driven: StoreDriver
    ) -> None:
        driven.claim(ask(ANNA))
        park(driven)
        assert driven.claim(ask(BERT, max_attempts=1)) == Exhausted(1)
        assert record_of(driven).owner == ANNA
        assert isinstance(driven.claim(ask(BERT, max_attempts=2)), Claimed)
        fail(driven, BERT)
        assert driven.claim(ask(CARL, max_attempts=2)) == Exhausted(2)

    def test_a_claim_that_never_ran_gives_its_number_back(self, driven: StoreDriver) -> None:
        first = driven.claim(ask(ANNA, RED, max_attempts=1))
        assert isinstance(first, Claimed)
        assert fail(driven, keep_fingerprint=False, ran=False)
        record = record_of(driven)
        assert (record.number, record.fence, record.owner) == (0, first.fence, ANNA)
        second = driven.claim(ask(BERT, BLUE, max_attempts=1))
        assert isinstance(second, Claimed)
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
        driven.claim(ask(ANNA))
        park(driven)
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
        claim = driven.claim(ask(BERT))
        assert isinstance(claim, Claimed)
        assert claim.fence > last
        assert record_of(driven).fence == claim.fence

    def test_the_fence_grows_over_every_kind_of_new_claim(
        self, driven: StoreDriver, sleep: Sleep
    ) -> None:
        fences = []

        def claim(owner: bytes) -> None:
            answer = driven.claim(ask(owner))
            assert isinstance(answer, Claimed)
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
        claim = driven.claim(ask(BERT, BLUE))
        assert isinstance(claim, Claimed)
        assert claim.number == 1
