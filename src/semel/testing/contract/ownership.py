"""The contract of an attempt: who may write, and what is kept of its end; repeats are harmless."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from semel.core.records import (
    Abandoned,
    Busy,
    Claimed,
    CompleteRequest,
    Finished,
    Identity,
    Record,
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
    OTHER_ERROR,
    OTHER_RESULT,
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


def writes(driven: StoreDriver, owner: bytes) -> dict[str, bool]:
    """Send every write an owner may send, and collect the answers."""
    return {
        "renew": driven.renew(KEY, owner, LONG),
        "complete": driven.complete(KEY, owner, OTHER_RESULT, LONG),
        "fail": fail(driven, owner),
        "park": driven.renew(KEY, owner, 0),
    }


APART = (0.0, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02)
"""Seconds between two that race: one falls between the steps of a store that takes several."""

REFUSED = {"renew": False, "complete": False, "fail": False, "park": False}


def unread(record: Record) -> Record:
    """Drop the moment it was read at, to compare two readings."""
    return replace(record, now=0.0)


class OwnershipContract(StoreUnderTest):
    """The current owner is the one in the record; no other one writes."""

    def test_a_late_owner_is_refused_after_takeover_and_the_new_attempt_is_untouched(
        self, driven: StoreDriver
    ) -> None:
        abandon(driven, ANNA, RED)
        driven.claim(ask(BERT, RED))
        before = record_of(driven)
        assert writes(driven, ANNA) == REFUSED
        assert unread(record_of(driven)) == unread(before)
        assert driven.complete(KEY, BERT, RESULT, LONG)

    @pytest.mark.parametrize("first", ["complete", "claim"])
    def test_a_late_complete_and_a_takeover_at_the_same_moment_never_both_succeed(
        self, driven: StoreDriver, first: str
    ) -> None:
        for number, apart in enumerate(APART):
            identity = Identity("orders.create", f"order:{number}")
            abandon(driven, ANNA, identity=identity)
            late = CompleteRequest(identity, ANNA, RESULT, LONG)
            takeover = ask(BERT, identity=identity)
            completed: object
            claim: object
            if first == "complete":
                completed, claim = driven.race([late, takeover], apart=apart)
            else:
                claim, completed = driven.race([takeover, late], apart=apart)
            record = record_of(driven, identity)
            if isinstance(claim, Claimed):
                assert completed is False
                assert (record.state, record.owner) == (State.PROCESSING, BERT)
            else:
                assert completed is True
                assert (record.state, record.owner) == (State.SUCCEEDED, ANNA)

    def test_a_late_owner_is_refused_after_the_new_attempt_succeeded(
        self, driven: StoreDriver
    ) -> None:
        abandon(driven, ANNA, RED)
        succeed(driven, BERT, RED)
        before = record_of(driven)
        assert writes(driven, ANNA) == REFUSED
        assert unread(record_of(driven)) == unread(before)

    def test_a_late_owner_is_refused_after_the_new_attempt_failed(
        self, driven: StoreDriver
    ) -> None:
        abandon(driven, ANNA, RED)
        driven.claim(ask(BERT, RED))
        fail(driven, BERT)
        before = record_of(driven)
        assert writes(driven, ANNA) == REFUSED
        assert unread(record_of(driven)) == unread(before)

    def test_an_owner_that_failed_is_refused_after_the_next_one_claimed(
        self, driven: StoreDriver
    ) -> None:
        driven.claim(ask(ANNA))
        fail(driven, ANNA)
        driven.claim(ask(BERT))
        assert writes(driven, ANNA) == REFUSED
        assert record_of(driven).state is State.PROCESSING

    def test_writes_without_a_record_are_refused_and_make_none(self, driven: StoreDriver) -> None:
        assert writes(driven, ANNA) == REFUSED
        assert driven.get(KEY) is None

    def test_an_owner_is_refused_after_its_record_was_forgotten(self, driven: StoreDriver) -> None:
        driven.claim(ask(ANNA))
        driven.forget(KEY)
        assert writes(driven, ANNA) == REFUSED
        assert driven.get(KEY) is None

    def test_a_paused_owner_that_nobody_replaced_may_still_complete(
        self, driven: StoreDriver, sleep: Sleep
    ) -> None:
        driven.claim(ask(ANNA, lease=SHORT))
        sleep(2 * SHORT)
        assert record_of(driven).abandoned is True
        assert driven.complete(KEY, ANNA, RESULT, LONG) is True
        assert record_of(driven).state is State.SUCCEEDED

    def test_a_paused_owner_that_nobody_replaced_may_still_fail(
        self, driven: StoreDriver, sleep: Sleep
    ) -> None:
        driven.claim(ask(ANNA, lease=SHORT))
        sleep(2 * SHORT)
        assert fail(driven) is True
        assert record_of(driven).state is State.FAILED

    def test_a_paused_owner_that_nobody_replaced_may_still_renew(
        self, driven: StoreDriver, sleep: Sleep
    ) -> None:
        driven.claim(ask(ANNA, lease=SHORT))
        sleep(2 * SHORT)
        assert driven.renew(KEY, ANNA, LONG) is True
        assert isinstance(driven.claim(ask(BERT)), Busy)

    def test_a_parked_owner_that_nobody_replaced_may_still_complete(
        self, driven: StoreDriver
    ) -> None:
        abandon(driven, ANNA, hold=True)
        assert driven.complete(KEY, ANNA, RESULT, LONG) is True

    def test_complete_sent_twice_gives_the_same_answer_and_keeps_the_first_result(
        self, driven: StoreDriver
    ) -> None:
        driven.claim(ask(ANNA))
        assert driven.complete(KEY, ANNA, RESULT, LONG) is True
        before = record_of(driven)
        assert driven.complete(KEY, ANNA, OTHER_RESULT, 2 * LONG) is True
        assert unread(record_of(driven)) == unread(before)

    def test_fail_sent_twice_gives_the_same_answer_and_keeps_the_first_error(
        self, driven: StoreDriver
    ) -> None:
        driven.claim(ask(ANNA))
        assert fail(driven) is True
        before = record_of(driven)
        again = driven.fail(
            KEY, ANNA, OTHER_ERROR, retryable=False, keep_fingerprint=False, ttl=LONG
        )
        assert again is True
        assert unread(record_of(driven)) == unread(before)

    @pytest.mark.parametrize("lease", [LONG, 0])
    def test_renew_sent_twice_gives_the_same_answer(
        self, driven: StoreDriver, lease: float
    ) -> None:
        driven.claim(ask(ANNA))
        assert driven.renew(KEY, ANNA, lease) is True
        assert driven.renew(KEY, ANNA, lease) is True

    def test_an_attempt_that_succeeded_can_no_longer_fail_or_renew(
        self, driven: StoreDriver
    ) -> None:
        succeed(driven)
        assert fail(driven) is False
        assert driven.renew(KEY, ANNA, LONG) is False
        assert driven.renew(KEY, ANNA, 0) is False
        assert record_of(driven).outcome == RESULT

    def test_an_attempt_that_failed_can_no_longer_complete_or_renew(
        self, driven: StoreDriver
    ) -> None:
        driven.claim(ask(ANNA))
        fail(driven)
        assert driven.complete(KEY, ANNA, RESULT, LONG) is False
        assert driven.renew(KEY, ANNA, LONG) is False
        assert record_of(driven).outcome == ERROR

    def test_renew_extends_the_lease_from_now(self, driven: StoreDriver) -> None:
        driven.claim(ask(ANNA, lease=LONG))
        assert driven.renew(KEY, ANNA, 3 * LONG) is True
        record = record_of(driven)
        assert record.lease_until == pytest.approx(record.updated_at + 3 * LONG, abs=0.01)
        claim = expect(Busy, driven.claim(ask(BERT)))
        assert 2 * LONG < claim.retry_after <= 3 * LONG

    def test_renew_may_shorten_the_lease_too(self, driven: StoreDriver, sleep: Sleep) -> None:
        driven.claim(ask(ANNA, lease=LONG))
        driven.renew(KEY, ANNA, SHORT)
        sleep(2 * SHORT)
        assert isinstance(driven.claim(ask(BERT)), Claimed)

    def test_a_parked_attempt_may_be_revived_by_its_owner(self, driven: StoreDriver) -> None:
        abandon(driven, ANNA)
        assert driven.renew(KEY, ANNA, LONG) is True
        assert isinstance(driven.claim(ask(CARL)), Busy)


# --- a held record is given away to no caller ---------------------------------------------


class HoldContract(StoreUnderTest):
    """Held by the record or by the caller: it may have taken effect."""

    def test_an_abandoned_record_that_is_held_is_given_to_nobody(self, driven: StoreDriver) -> None:
        abandon(driven, ANNA, hold=True)
        assert driven.claim(ask(BERT, hold=True)) == Abandoned(1)
        assert record_of(driven).owner == ANNA

    def test_a_caller_that_would_take_over_cannot_weaken_a_held_record(
        self, driven: StoreDriver
    ) -> None:
        abandon(driven, ANNA, hold=True)
        assert driven.claim(ask(BERT, hold=False)) == Abandoned(1)
        assert record_of(driven).hold is True

    def test_a_caller_that_holds_does_not_take_over_a_record_that_does_not(
        self, driven: StoreDriver
    ) -> None:
        abandon(driven, ANNA, hold=False)
        assert driven.claim(ask(BERT, hold=True)) == Abandoned(1)
        assert record_of(driven).owner == ANNA
        assert isinstance(driven.claim(ask(CARL, hold=False)), Claimed)

    def test_a_repeated_claim_does_not_weaken_its_own_hold(self, driven: StoreDriver) -> None:
        driven.claim(ask(ANNA, hold=True))
        abandon(driven, ANNA, hold=False)
        assert driven.claim(ask(BERT)) == Abandoned(1)

    def test_a_renewed_attempt_stays_held(self, driven: StoreDriver) -> None:
        driven.claim(ask(ANNA, hold=True))
        driven.renew(KEY, ANNA, LONG)
        park(driven)
        assert driven.claim(ask(BERT)) == Abandoned(1)

    def test_a_held_record_outlives_its_lease_and_its_ttl(
        self, driven: StoreDriver, sleep: Sleep
    ) -> None:
        driven.claim(ask(ANNA, hold=True, lease=SHORT, ttl=SHORT))
        sleep(4 * SHORT)
        assert driven.claim(ask(BERT)) == Abandoned(1)

    def test_the_owner_of_a_held_record_may_still_end_it(self, driven: StoreDriver) -> None:
        abandon(driven, ANNA, hold=True)
        assert driven.complete(KEY, ANNA, RESULT, LONG)
        assert isinstance(driven.claim(ask(BERT, hold=True)), Finished)

    def test_a_held_record_that_was_forgotten_is_free(self, driven: StoreDriver) -> None:
        abandon(driven, ANNA, hold=True)
        assert driven.forget(KEY) is True
        assert isinstance(driven.claim(ask(BERT, hold=True)), Claimed)

    def test_each_claim_writes_its_own_hold(self, driven: StoreDriver) -> None:
        driven.claim(ask(ANNA, hold=True))
        fail(driven)
        driven.claim(ask(BERT, hold=False))
        assert record_of(driven).hold is False
        park(driven, BERT)
        assert isinstance(driven.claim(ask(CARL)), Claimed)

    def test_a_held_record_is_not_marked_as_done(self, driven: StoreDriver) -> None:
        abandon(driven, ANNA, hold=True)
        assert driven.put(KEY, RESULT, LONG, owner=BERT) is False
        assert driven.claim(ask(BERT)) == Abandoned(1)


# --- what is kept of an ended attempt -----------------------------------------------------


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
        claim = expect(Claimed, driven.claim(ask(BERT, BLUE)))
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
