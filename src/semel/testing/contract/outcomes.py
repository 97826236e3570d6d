"""The contract of `complete` and `fail`: what is kept of an ended attempt, and what `get` tells."""

from __future__ import annotations

import pytest

from semel.core.records import Claimed, Finished, State
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
    record_of,
)
from semel.testing.driver import StoreDriver


class OutcomeContract(StoreUnderTest):
    """A success never changes; a failure says who may try again."""

    def test_a_key_never_used_has_no_record(self, driven: StoreDriver) -> None:
        assert driven.get(KEY) is None

    def test_a_success_is_kept_with_all_that_is_known_of_it(
        self, driven: StoreDriver, sleep: Sleep
    ) -> None:
        claim = driven.claim(ask(ANNA, RED))
        claimed = record_of(driven)
        sleep(SHORT)
        assert driven.complete(KEY, ANNA, RESULT, LONG) is True
        record = record_of(driven)
        assert isinstance(claim, Claimed)
        assert record.state is State.SUCCEEDED
        assert record.owner == ANNA
        assert record.fingerprint == RED
        assert record.outcome == RESULT
        assert record.retryable is False
        assert (record.number, record.fence) == (claim.number, claim.fence)
        assert record.lease_until is None
        assert record.abandoned is False
        assert record.created_at == claimed.created_at
        assert record.updated_at > claimed.updated_at
        assert record.now >= record.updated_at

    def test_retention_starts_when_the_operation_ends(
        self, driven: StoreDriver, sleep: Sleep
    ) -> None:
        driven.claim(ask(ANNA))
        sleep(SHORT)
        driven.complete(KEY, ANNA, RESULT, LONG)
        record = record_of(driven)
        assert record.expires_at == pytest.approx(record.updated_at + LONG, abs=0.01)
        assert record.remaining is not None
        assert 0 < record.remaining <= LONG

    def test_renew_and_takeover_keep_the_time_of_creation(
        self, driven: StoreDriver, sleep: Sleep
    ) -> None:
        driven.claim(ask(ANNA))
        created_at = record_of(driven).created_at
        sleep(SHORT)
        driven.renew(KEY, ANNA, 0)
        renewed_at = record_of(driven).updated_at
        sleep(SHORT)
        driven.claim(ask(BERT))
        record = record_of(driven)
        assert record.created_at == created_at
        assert created_at < renewed_at < record.updated_at

    @pytest.mark.parametrize("retryable", [True, False])
    def test_a_failure_is_kept_with_all_that_is_known_of_it(
        self, driven: StoreDriver, *, retryable: bool
    ) -> None:
        driven.claim(ask(ANNA, RED))
        assert fail(driven, retryable=retryable) is True
        record = record_of(driven)
        assert record.state is State.FAILED
        assert record.owner == ANNA
        assert record.outcome == ERROR
        assert record.retryable is retryable
        assert record.fingerprint == RED
        assert record.lease_until is None
        assert record.expires_at == pytest.approx(record.updated_at + LONG, abs=0.01)

    def test_a_forgotten_failure_may_run_again_with_any_payload(self, driven: StoreDriver) -> None:
        driven.claim(ask(ANNA, RED))
        assert fail(driven, retryable=True, keep_fingerprint=False) is True
        assert record_of(driven).fingerprint is None
        claim = driven.claim(ask(BERT, BLUE))
        assert isinstance(claim, Claimed)
        assert claim.number == 2
        assert record_of(driven).fingerprint == BLUE

    def test_a_final_failure_without_its_payload_is_finished_for_any(
        self, driven: StoreDriver
    ) -> None:
        driven.claim(ask(ANNA, RED))
        fail(driven, retryable=False, keep_fingerprint=False)
        assert isinstance(driven.claim(ask(BERT, BLUE)), Finished)

    def test_a_success_after_failures_replaces_them(self, driven: StoreDriver) -> None:
        driven.claim(ask(ANNA, RED))
        fail(driven)
        driven.claim(ask(BERT, RED))
        assert driven.complete(KEY, BERT, RESULT, LONG) is True
        record = record_of(driven)
        assert (record.state, record.outcome, record.number) == (State.SUCCEEDED, RESULT, 2)
        assert record.retryable is False
