"""The contract of retention: expired means absent, at once, for every verb."""

from __future__ import annotations

from semel.core.records import Claimed, Finished
from semel.testing.contract.given import (
    ANNA,
    BERT,
    BLUE,
    KEY,
    LONG,
    OTHER_RESULT,
    RED,
    RESULT,
    SHORT,
    Sleep,
    StoreUnderTest,
    ask,
    fail,
    record_of,
    succeed,
)
from semel.testing.driver import StoreDriver


class RetentionContract(StoreUnderTest):
    """Before any purge ran, an expired record is as if it had never been."""

    def test_an_expired_success_is_a_first_request_again(
        self, driven: StoreDriver, sleep: Sleep
    ) -> None:
        succeed(driven, ANNA, RED, ttl=SHORT)
        sleep(2 * SHORT)
        assert driven.get(KEY) is None
        claim = driven.claim(ask(BERT, BLUE, max_attempts=1))
        assert isinstance(claim, Claimed)
        assert (claim.number, claim.takeover) == (1, False)
        record = record_of(driven)
        assert record.created_at == record.updated_at
        assert record.fingerprint == BLUE
        assert record.superseded == ()

    def test_an_expired_final_failure_is_a_first_request_again(
        self, driven: StoreDriver, sleep: Sleep
    ) -> None:
        driven.claim(ask(ANNA, RED))
        fail(driven, retryable=False, ttl=SHORT)
        sleep(2 * SHORT)
        claim = driven.claim(ask(BERT, BLUE))
        assert isinstance(claim, Claimed)
        assert claim.number == 1

    def test_the_owner_of_an_expired_record_is_refused_like_anyone(
        self, driven: StoreDriver, sleep: Sleep
    ) -> None:
        succeed(driven, ttl=SHORT)
        sleep(2 * SHORT)
        assert driven.complete(KEY, ANNA, RESULT, LONG) is False
        assert fail(driven) is False
        assert driven.renew(KEY, ANNA, LONG) is False
        assert driven.get(KEY) is None

    def test_an_expired_record_cannot_be_touched_or_forgotten(
        self, driven: StoreDriver, sleep: Sleep
    ) -> None:
        succeed(driven, ttl=SHORT)
        sleep(2 * SHORT)
        assert driven.touch(KEY, LONG) is False
        assert driven.forget(KEY) is False
        assert driven.get(KEY) is None

    def test_an_expired_record_can_be_put_anew(self, driven: StoreDriver, sleep: Sleep) -> None:
        succeed(driven, ttl=SHORT)
        sleep(2 * SHORT)
        assert driven.put(KEY, OTHER_RESULT, LONG, owner=BERT) is True
        record = record_of(driven)
        assert (record.number, record.outcome) == (1, OTHER_RESULT)

    def test_a_running_attempt_does_not_expire(self, driven: StoreDriver, sleep: Sleep) -> None:
        driven.claim(ask(ANNA, RED, lease=LONG, ttl=SHORT))
        sleep(3 * SHORT)
        assert record_of(driven).owner == ANNA
        assert driven.complete(KEY, ANNA, RESULT, LONG) is True

    def test_a_renewed_attempt_does_not_expire(self, driven: StoreDriver, sleep: Sleep) -> None:
        driven.claim(ask(ANNA, RED, lease=SHORT, ttl=LONG))
        driven.renew(KEY, ANNA, LONG)
        sleep(3 * SHORT)
        assert driven.complete(KEY, ANNA, RESULT, LONG) is True

    def test_a_record_claimed_again_does_not_expire_by_its_old_retention(
        self, driven: StoreDriver, sleep: Sleep
    ) -> None:
        driven.claim(ask(ANNA))
        fail(driven, ttl=4 * SHORT)
        claim = driven.claim(ask(BERT))
        sleep(6 * SHORT)
        assert isinstance(claim, Claimed)
        record = record_of(driven)
        assert record.owner == BERT
        assert record.expires_at is None

    def test_retention_longer_than_the_claim_said_is_kept(
        self, driven: StoreDriver, sleep: Sleep
    ) -> None:
        driven.claim(ask(ANNA, lease=LONG, ttl=SHORT))
        driven.complete(KEY, ANNA, RESULT, LONG)
        sleep(3 * SHORT)
        assert isinstance(driven.claim(ask(BERT)), Finished)
