"""The contract of `replace`: a new payload takes the key, and the old ones stay out."""

from __future__ import annotations

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
)
from semel.testing.contract.given import (
    ANNA,
    BERT,
    BLUE,
    CARL,
    KEY,
    LONG,
    RED,
    RESULT,
    StoreUnderTest,
    ask,
    fail,
    park,
    record_of,
    succeed,
)
from semel.testing.driver import StoreDriver


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
        claim = driven.claim(ask(BERT, BLUE, replace=True))
        assert isinstance(claim, Claimed)
        assert (claim.number, claim.takeover) == (1, False)
        record = record_of(driven)
        assert record.fingerprint == BLUE
        assert record.superseded == (RED,)
        assert record.outcome is None

    def test_the_attempts_of_a_replaced_payload_do_not_count(self, driven: StoreDriver) -> None:
        fences = []
        for owner in (ANNA, BERT):
            claim = driven.claim(ask(owner, RED))
            assert isinstance(claim, Claimed)
            fences.append(claim.fence)
            fail(driven, owner)
        limited = ask(CARL, BLUE, replace=True, max_attempts=1)
        claim = driven.claim(limited)
        assert isinstance(claim, Claimed)
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
        driven.claim(ask(ANNA, RED))
        park(driven)
        claim = driven.claim(ask(BERT, BLUE, replace=True))
        assert isinstance(claim, Claimed)
        assert claim.takeover is True
        assert record_of(driven).superseded == (RED,)

    def test_a_new_payload_does_not_take_a_held_record(self, driven: StoreDriver) -> None:
        driven.claim(ask(ANNA, RED, hold=True))
        park(driven)
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
