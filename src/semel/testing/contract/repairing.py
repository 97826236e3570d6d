"""The contract of `AdoptRequest`: an abandoned attempt is given to a resolver, and only to one."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from semel.core.records import Abandoned, AdoptRequest, Busy, Finished, StuckRequest
from semel.stores.base import AsyncStore, Store
from semel.testing.contract.given import (
    ANNA,
    BERT,
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


class RepairContract(StoreUnderTest):
    """Whoever adopts a record owns it: the attempt that was abandoned comes second everywhere."""

    @pytest.fixture
    def repairing(self, store: Store | AsyncStore, driven: StoreDriver) -> StoreDriver:
        """Drive a store that answers `AdoptRequest`."""
        if not driven.offers(AdoptRequest):
            pytest.skip(f"{type(store).__name__} does not answer AdoptRequest")
        return driven

    @pytest.mark.parametrize("hold", [False, True])
    def test_an_abandoned_attempt_is_given_to_a_resolver(
        self, repairing: StoreDriver, hold: bool
    ) -> None:
        repairing.claim(ask(ANNA, RED, hold=hold))
        park(repairing)
        before = record_of(repairing)
        adopted = repairing.adopt(KEY, BERT, LONG)
        assert adopted is not None
        assert (adopted.owner, adopted.number) == (BERT, before.number)
        assert adopted.fence > before.fence
        assert adopted.hold is hold
        assert adopted.fingerprint == RED
        assert adopted.created_at == before.created_at
        assert adopted.abandoned is False
        stored = record_of(repairing)
        assert (stored.owner, stored.number, stored.fence) == (BERT, 1, adopted.fence)
        assert (stored.hold, stored.fingerprint) == (hold, RED)

    def test_a_resolver_gets_a_higher_fence_when_the_clock_was_set_back(
        self, repairing: StoreDriver, set_clock_back: Callable[[], None]
    ) -> None:
        repairing.claim(ask(ANNA))
        set_clock_back()
        park(repairing)
        before = record_of(repairing)
        adopted = repairing.adopt(KEY, BERT, LONG)
        assert adopted is not None
        assert adopted.fence > before.fence
        assert record_of(repairing).fence == adopted.fence

    def test_an_attempt_whose_lease_passed_is_given_to_a_resolver(
        self, repairing: StoreDriver, sleep: Sleep
    ) -> None:
        repairing.claim(ask(ANNA, lease=SHORT))
        sleep(2 * SHORT)
        assert repairing.adopt(KEY, BERT, LONG) is not None
        assert record_of(repairing).owner == BERT

    def test_adopt_sent_twice_gives_the_same_answer(self, repairing: StoreDriver) -> None:
        repairing.claim(ask(ANNA, hold=True))
        park(repairing)
        once, twice = (repairing.adopt(KEY, BERT, LONG) for _ in range(2))
        assert once is not None
        assert twice is not None
        assert (twice.owner, twice.number, twice.fence) == (once.owner, once.number, once.fence)

    def test_a_live_attempt_is_not_given_away(self, repairing: StoreDriver) -> None:
        repairing.claim(ask(ANNA))
        assert repairing.adopt(KEY, BERT, LONG) is None
        assert record_of(repairing).owner == ANNA
        assert repairing.complete(KEY, ANNA, RESULT, LONG) is True

    def test_of_two_resolvers_one_gets_the_attempt(self, repairing: StoreDriver) -> None:
        repairing.claim(ask(ANNA, hold=True))
        park(repairing)
        assert repairing.adopt(KEY, BERT, LONG) is not None
        assert repairing.adopt(KEY, CARL, LONG) is None
        assert record_of(repairing).owner == BERT

    def test_a_revived_owner_is_refused_after_its_attempt_was_adopted(
        self, repairing: StoreDriver
    ) -> None:
        repairing.claim(ask(ANNA))
        park(repairing)
        repairing.adopt(KEY, BERT, LONG)
        assert repairing.renew(KEY, ANNA, LONG) is False
        assert repairing.complete(KEY, ANNA, RESULT, LONG) is False
        assert fail(repairing, ANNA) is False
        assert record_of(repairing).owner == BERT
        assert repairing.complete(KEY, BERT, RESULT, LONG) is True

    def test_callers_wait_while_a_resolver_finds_out(self, repairing: StoreDriver) -> None:
        repairing.claim(ask(ANNA, hold=True))
        park(repairing)
        repairing.adopt(KEY, BERT, LONG)
        assert isinstance(repairing.claim(ask(CARL)), Busy)

    def test_a_resolver_ends_what_it_adopted(self, repairing: StoreDriver) -> None:
        repairing.claim(ask(ANNA, hold=True))
        park(repairing)
        repairing.adopt(KEY, BERT, LONG)
        assert repairing.complete(KEY, BERT, RESULT, LONG) is True
        finished = repairing.claim(ask(CARL))
        assert isinstance(finished, Finished)
        assert finished.outcome == RESULT

    def test_a_resolver_that_does_not_know_leaves_the_record_held(
        self, repairing: StoreDriver
    ) -> None:
        repairing.claim(ask(ANNA, hold=True))
        park(repairing)
        repairing.adopt(KEY, BERT, LONG)
        park(repairing, BERT)
        assert repairing.claim(ask(CARL)) == Abandoned(1)
        assert repairing.adopt(KEY, CARL, LONG) is not None

    @pytest.mark.parametrize("hold", [False, True])
    def test_a_resolver_that_does_not_know_gives_the_attempt_back_with_its_age(
        self, repairing: StoreDriver, hold: bool
    ) -> None:
        repairing.claim(ask(ANNA, hold=hold))
        park(repairing)
        repairing.adopt(KEY, BERT, LONG)
        assert repairing.renew(KEY, BERT, -LONG / 2) is True
        record = record_of(repairing)
        assert record.abandoned is True
        assert record.lease_until is not None
        assert record.now - record.lease_until >= LONG / 2
        if repairing.offers(StuckRequest):
            (stuck,) = repairing.stuck(older_than=LONG / 2)
            assert stuck.identity == KEY
            assert repairing.stuck(older_than=LONG) == []
        assert repairing.adopt(KEY, CARL, LONG) is not None

    def test_there_is_nothing_to_adopt_where_nothing_runs(
        self, repairing: StoreDriver, sleep: Sleep
    ) -> None:
        assert repairing.adopt(KEY, BERT, LONG) is None
        succeed(repairing, ttl=SHORT)
        assert repairing.adopt(KEY, BERT, LONG) is None
        sleep(2 * SHORT)
        assert repairing.adopt(KEY, BERT, LONG) is None

    def test_an_owner_whose_attempt_has_ended_adopts_nothing(self, repairing: StoreDriver) -> None:
        repairing.claim(ask(ANNA))
        repairing.fail(KEY, ANNA, ERROR, retryable=True, keep_fingerprint=True, ttl=LONG)
        assert repairing.adopt(KEY, ANNA, LONG) is None

    def test_an_adopted_attempt_is_stuck_again_when_its_resolver_is_gone(
        self, repairing: StoreDriver, sleep: Sleep
    ) -> None:
        repairing.claim(ask(ANNA, hold=True))
        park(repairing)
        repairing.adopt(KEY, BERT, SHORT)
        sleep(2 * SHORT)
        assert record_of(repairing).abandoned is True
        if repairing.offers(StuckRequest):
            assert [record.identity for record in repairing.stuck()] == [KEY]
