"""The contract of `hold`: a held record is not given away, whoever asks."""

from __future__ import annotations

from semel.core.records import Abandoned, Claimed, Finished
from semel.testing.contract.given import (
    ANNA,
    BERT,
    CARL,
    KEY,
    LONG,
    RESULT,
    SHORT,
    Sleep,
    StoreUnderTest,
    ask,
    fail,
    park,
    record_of,
)
from semel.testing.driver import StoreDriver


class HoldContract(StoreUnderTest):
    """Held by the record or by the caller: nobody knows whether it happened."""

    def test_an_abandoned_record_that_is_held_is_given_to_nobody(self, driven: StoreDriver) -> None:
        driven.claim(ask(ANNA, hold=True))
        park(driven)
        assert driven.claim(ask(BERT, hold=True)) == Abandoned(1)
        assert record_of(driven).owner == ANNA

    def test_a_caller_that_would_take_over_cannot_weaken_a_held_record(
        self, driven: StoreDriver
    ) -> None:
        driven.claim(ask(ANNA, hold=True))
        park(driven)
        assert driven.claim(ask(BERT, hold=False)) == Abandoned(1)
        assert record_of(driven).hold is True

    def test_a_caller_that_holds_does_not_take_over_a_record_that_does_not(
        self, driven: StoreDriver
    ) -> None:
        driven.claim(ask(ANNA, hold=False))
        park(driven)
        assert driven.claim(ask(BERT, hold=True)) == Abandoned(1)
        assert record_of(driven).owner == ANNA
        assert isinstance(driven.claim(ask(CARL, hold=False)), Claimed)

    def test_a_repeated_claim_does_not_weaken_its_own_hold(self, driven: StoreDriver) -> None:
        driven.claim(ask(ANNA, hold=True))
        driven.claim(ask(ANNA, hold=False))
        park(driven)
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
        driven.claim(ask(ANNA, hold=True))
        park(driven)
        assert driven.complete(KEY, ANNA, RESULT, LONG)
        assert isinstance(driven.claim(ask(BERT, hold=True)), Finished)

    def test_a_held_record_that_was_forgotten_is_free(self, driven: StoreDriver) -> None:
        driven.claim(ask(ANNA, hold=True))
        park(driven)
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
        driven.claim(ask(ANNA, hold=True))
        park(driven)
        assert driven.put(KEY, RESULT, LONG, owner=BERT) is False
        assert driven.claim(ask(BERT)) == Abandoned(1)
