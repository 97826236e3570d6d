"""The contract of `put`, `touch` and `forget`: what marks and operators may do."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from semel.core.records import Claimed, Finished, State
from semel.testing.contract.given import (
    ANNA,
    BERT,
    BLUE,
    CARL,
    KEY,
    LONG,
    OTHER,
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


class MarkContract(StoreUnderTest):
    """Marks write only where nothing runs and nothing is done."""

    def test_put_marks_an_unused_key_as_done(self, driven: StoreDriver) -> None:
        assert driven.put(KEY, RESULT, LONG, owner=ANNA) is True
        record = record_of(driven)
        assert record.state is State.SUCCEEDED
        assert record.owner == ANNA
        assert record.number == 1
        assert record.fence > 0
        assert record.fingerprint is None
        assert record.outcome == RESULT
        assert record.hold is False
        assert record.lease_until is None
        assert record.created_at == record.updated_at
        assert record.expires_at == pytest.approx(record.updated_at + LONG, abs=0.01)

    def test_a_put_key_is_finished_for_any_payload(self, driven: StoreDriver) -> None:
        driven.put(KEY, RESULT, LONG, owner=ANNA)
        finished = driven.claim(ask(BERT, BLUE))
        assert isinstance(finished, Finished)
        assert finished.outcome == RESULT

    def test_put_sent_twice_gives_the_same_answer_and_keeps_the_first_result(
        self, driven: StoreDriver
    ) -> None:
        assert driven.put(KEY, RESULT, LONG, owner=ANNA) is True
        assert driven.put(KEY, OTHER_RESULT, LONG, owner=ANNA) is True
        assert record_of(driven).outcome == RESULT

    def test_put_by_another_owner_does_not_change_what_is_done(self, driven: StoreDriver) -> None:
        driven.put(KEY, RESULT, LONG, owner=ANNA)
        assert driven.put(KEY, OTHER_RESULT, LONG, owner=BERT) is False
        record = record_of(driven)
        assert (record.owner, record.outcome) == (ANNA, RESULT)

    def test_put_is_refused_beside_a_running_attempt(self, driven: StoreDriver) -> None:
        driven.claim(ask(ANNA))
        assert driven.put(KEY, RESULT, LONG, owner=BERT) is False
        assert driven.put(KEY, RESULT, LONG, owner=ANNA) is False
        assert record_of(driven).state is State.PROCESSING

    def test_put_is_refused_after_success_and_after_final_failure(
        self, driven: StoreDriver
    ) -> None:
        succeed(driven)
        assert driven.put(KEY, OTHER_RESULT, LONG, owner=BERT) is False
        driven.forget(KEY)
        driven.claim(ask(ANNA))
        fail(driven, retryable=False)
        assert driven.put(KEY, OTHER_RESULT, LONG, owner=BERT) is False
        assert record_of(driven).state is State.FAILED

    def test_put_ends_an_abandoned_attempt_and_its_owner_is_refused(
        self, driven: StoreDriver
    ) -> None:
        driven.claim(ask(ANNA, RED))
        park(driven)
        before = record_of(driven)
        assert driven.put(KEY, RESULT, LONG, owner=BERT) is True
        record = record_of(driven)
        assert (record.state, record.owner, record.number) == (State.SUCCEEDED, BERT, 2)
        assert record.fence > before.fence
        assert record.created_at == before.created_at
        assert driven.complete(KEY, ANNA, OTHER_RESULT, LONG) is False
        assert record_of(driven).outcome == RESULT

    def test_put_raises_the_fence_when_the_clock_was_set_back(
        self, driven: StoreDriver, set_clock_back: Callable[[], None]
    ) -> None:
        driven.claim(ask(ANNA))
        set_clock_back()
        park(driven)
        before = record_of(driven)
        assert driven.put(KEY, RESULT, LONG, owner=BERT) is True
        assert record_of(driven).fence > before.fence

    def test_put_replaces_a_retryable_failure(self, driven: StoreDriver) -> None:
        driven.claim(ask(ANNA, RED))
        fail(driven)
        assert driven.put(KEY, RESULT, LONG, owner=BERT) is True
        record = record_of(driven)
        assert (record.state, record.outcome, record.number) == (State.SUCCEEDED, RESULT, 2)
        assert record.retryable is False

    def test_touch_keeps_a_finished_record_from_now(
        self, driven: StoreDriver, sleep: Sleep
    ) -> None:
        succeed(driven, ttl=4 * SHORT)
        assert driven.touch(KEY, LONG) is True
        sleep(6 * SHORT)
        record = record_of(driven)
        assert record.outcome == RESULT
        assert record.remaining is not None
        assert 0 < record.remaining <= LONG

    def test_touch_may_shorten_retention_too(self, driven: StoreDriver, sleep: Sleep) -> None:
        succeed(driven)
        driven.touch(KEY, SHORT)
        sleep(2 * SHORT)
        assert driven.get(KEY) is None

    def test_what_is_touched_to_be_kept_for_no_time_is_gone_at_once(
        self, driven: StoreDriver
    ) -> None:
        succeed(driven, ANNA, RED)
        assert driven.touch(KEY, 0.0) is True
        assert driven.get(KEY) is None
        assert driven.touch(KEY, 0.0) is False
        claimed = driven.claim(ask(BERT, BLUE))
        assert isinstance(claimed, Claimed)
        assert claimed.number == 1

    def test_what_runs_or_is_abandoned_cannot_be_touched_away(self, driven: StoreDriver) -> None:
        driven.claim(ask(ANNA, hold=True))
        assert driven.touch(KEY, 0.0) is False
        park(driven)
        assert driven.touch(KEY, 0.0) is False
        assert record_of(driven).state is State.PROCESSING
        assert driven.complete(KEY, ANNA, RESULT, LONG) is True

    def test_touch_is_refused_without_a_finished_record(self, driven: StoreDriver) -> None:
        assert driven.touch(KEY, LONG) is False
        driven.claim(ask(ANNA))
        assert driven.touch(KEY, LONG) is False
        assert record_of(driven).expires_at is None

    def test_touch_keeps_a_failure_too(self, driven: StoreDriver) -> None:
        driven.claim(ask(ANNA))
        fail(driven)
        assert driven.touch(KEY, 3 * LONG) is True
        remaining = record_of(driven).remaining
        assert remaining is not None
        assert 2 * LONG < remaining <= 3 * LONG

    def test_forget_removes_a_record_of_any_state(self, driven: StoreDriver) -> None:
        driven.claim(ask(ANNA))
        assert driven.forget(KEY) is True
        assert driven.get(KEY) is None
        succeed(driven, BERT)
        assert driven.forget(KEY) is True
        driven.claim(ask(CARL))
        fail(driven, CARL)
        assert driven.forget(KEY) is True
        assert driven.forget(KEY) is False

    def test_forget_leaves_other_keys_alone(self, driven: StoreDriver) -> None:
        succeed(driven)
        succeed(driven, identity=OTHER)
        driven.forget(KEY)
        assert driven.get(OTHER) is not None

    def test_a_forgotten_key_is_new_for_the_same_owner_too(self, driven: StoreDriver) -> None:
        succeed(driven, ANNA, RED)
        driven.forget(KEY)
        assert isinstance(driven.claim(ask(ANNA, BLUE)), Claimed)
