"""The contract of `claim`: the order in which it judges, where several answers would fit."""

from __future__ import annotations

import pytest

from semel.core.records import Abandoned, Busy, Claimed, Exhausted, Finished, Mismatch, State
from semel.testing.contract.given import (
    ANNA,
    BERT,
    BLUE,
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
            claim = driven.claim(late)
            assert isinstance(claim, Finished)
            assert claim.outcome == RESULT

    @pytest.mark.parametrize("retryable", [True, False])
    def test_a_late_claim_of_an_owner_that_failed_is_finished(
        self, driven: StoreDriver, *, retryable: bool
    ) -> None:
        driven.claim(ask(ANNA, RED))
        fail(driven, retryable=retryable)
        claim = driven.claim(ask(ANNA, RED))
        assert isinstance(claim, Finished)
        assert (claim.state, claim.outcome) == (State.FAILED, ERROR)
        assert record_of(driven).state is State.FAILED

    def test_an_owner_that_was_replaced_is_judged_like_anyone(self, driven: StoreDriver) -> None:
        driven.claim(ask(ANNA, RED))
        park(driven)
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
        driven.claim(ask(ANNA, RED))
        park(driven)
        assert driven.claim(ask(BERT, BLUE)) == Mismatch()
        assert record_of(driven).owner == ANNA

    def test_mismatch_comes_before_held_and_exhausted(self, driven: StoreDriver) -> None:
        driven.claim(ask(ANNA, RED, hold=True))
        park(driven)
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
        driven.claim(ask(ANNA, hold=True))
        park(driven)
        assert driven.claim(ask(BERT, max_attempts=1)) == Abandoned(1)

    def test_a_hold_does_not_matter_after_a_recorded_failure(self, driven: StoreDriver) -> None:
        driven.claim(ask(ANNA, hold=True))
        fail(driven)
        assert driven.claim(ask(BERT, hold=True, max_attempts=1)) == Exhausted(1)
        assert isinstance(driven.claim(ask(BERT, hold=True)), Claimed)
