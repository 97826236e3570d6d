"""The contract of `complete`, `fail` and `renew`: who may write, and that a repeat is harmless."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from semel.core.records import Busy, Claimed, CompleteRequest, Identity, Record, State
from semel.testing.contract.given import (
    ANNA,
    BERT,
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
    ask,
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
    """The current owner is the one in the record; nobody else writes."""

    def test_a_late_owner_is_refused_after_takeover_and_the_new_attempt_is_untouched(
        self, driven: StoreDriver
    ) -> None:
        driven.claim(ask(ANNA, RED))
        park(driven)
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
            driven.claim(ask(ANNA, identity=identity))
            park(driven, identity=identity)
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
        driven.claim(ask(ANNA, RED))
        park(driven)
        succeed(driven, BERT, RED)
        before = record_of(driven)
        assert writes(driven, ANNA) == REFUSED
        assert unread(record_of(driven)) == unread(before)

    def test_a_late_owner_is_refused_after_the_new_attempt_failed(
        self, driven: StoreDriver
    ) -> None:
        driven.claim(ask(ANNA, RED))
        park(driven)
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
        driven.claim(ask(ANNA, hold=True))
        park(driven)
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
        claim = driven.claim(ask(BERT))
        assert isinstance(claim, Busy)
        assert 2 * LONG < claim.retry_after <= 3 * LONG

    def test_renew_may_shorten_the_lease_too(self, driven: StoreDriver, sleep: Sleep) -> None:
        driven.claim(ask(ANNA, lease=LONG))
        driven.renew(KEY, ANNA, SHORT)
        sleep(2 * SHORT)
        assert isinstance(driven.claim(ask(BERT)), Claimed)

    def test_a_parked_attempt_may_be_revived_by_its_owner(self, driven: StoreDriver) -> None:
        driven.claim(ask(ANNA))
        park(driven)
        assert driven.renew(KEY, ANNA, LONG) is True
        assert isinstance(driven.claim(ask(CARL)), Busy)
