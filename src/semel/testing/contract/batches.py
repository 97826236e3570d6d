"""The contract of `send`: many requests at once, each with its own answer, in their order.

Requests about one identity are carried out one after another, in an order that the store chooses.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from semel.core.records import (
    OWNER_BYTES,
    Abandoned,
    AdoptRequest,
    Busy,
    Claimed,
    CompleteRequest,
    CountRequest,
    Encoded,
    Exhausted,
    FailRequest,
    Finished,
    ForgetRequest,
    GetRequest,
    Identity,
    Mismatch,
    PurgeRequest,
    PutRequest,
    RenewRequest,
    Request,
    ScanRequest,
    State,
    StuckRequest,
)
from semel.errors import ConfigError, StoreError
from semel.testing.contract.given import (
    ANNA,
    BERT,
    BLUE,
    CARL,
    ERROR,
    KEY,
    LONG,
    OTHER,
    OTHER_RESULT,
    RED,
    RESULT,
    StoreUnderTest,
    abandon,
    ask,
    expect,
    fail,
    record_of,
    succeed,
)
from semel.testing.driver import StoreDriver


class BatchingContract(StoreUnderTest):
    """A batch answers as its members would have been answered one by one."""

    def test_an_empty_batch_has_no_answers(self, driven: StoreDriver) -> None:
        assert driven.send([]) == []

    def test_each_claim_of_a_batch_has_its_own_answer_in_order(self, driven: StoreDriver) -> None:
        keys = [Identity("batch", name) for name in ("new", "done", "busy", "other", "held", "out")]
        new, done, busy, other, held, out = keys
        succeed(driven, identity=done)
        driven.claim(ask(ANNA, identity=busy))
        driven.claim(ask(ANNA, RED, identity=other))
        abandon(driven, ANNA, identity=held, hold=True)
        abandon(driven, ANNA, identity=out)
        answers = driven.send([ask(BERT, BLUE, identity=key, max_attempts=1) for key in keys])
        assert [type(answer) for answer in answers] == [
            *(Claimed, Finished, Busy, Mismatch, Abandoned, Exhausted)
        ]
        assert record_of(driven, new).owner == BERT
        backwards = driven.send([ask(BERT, BLUE, identity=key) for key in reversed(keys)])
        assert [type(answer) for answer in backwards] == [
            *(Claimed, Abandoned, Mismatch, Busy, Finished, Claimed)
        ]

    def test_a_large_batch_is_claimed_completed_read_and_forgotten(
        self, driven: StoreDriver
    ) -> None:
        keys = [Identity("batch", str(index)) for index in range(200)]
        results = [Encoded("json", str(index).encode()) for index in range(200)]
        claims = driven.send([ask(ANNA, identity=key) for key in keys])
        assert all(isinstance(claim, Claimed) and claim.number == 1 for claim in claims)
        completed = driven.send(
            [
                CompleteRequest(key, ANNA, result, LONG)
                for key, result in zip(keys, results, strict=True)
            ]
        )
        assert completed == [True] * len(keys)
        records = driven.get_many(keys)
        assert [record.outcome for record in records if record is not None] == results
        assert driven.forget_many(keys) == [True] * len(keys)
        assert driven.get_many(keys) == [None] * len(keys)

    def test_one_of_several_owners_in_a_batch_gets_the_key(self, driven: StoreDriver) -> None:
        owners = [index.to_bytes(OWNER_BYTES, "big") for index in range(1, 6)]
        answers = driven.send([ask(owner) for owner in owners])
        winners = [index for index, answer in enumerate(answers) if isinstance(answer, Claimed)]
        assert len(winners) == 1
        assert sum(isinstance(answer, Busy) for answer in answers) == len(owners) - 1
        assert record_of(driven).owner == owners[winners[0]]

    def test_a_claim_repeated_inside_a_batch_is_the_same_attempt(self, driven: StoreDriver) -> None:
        one, other, again = driven.send([ask(ANNA), ask(ANNA, identity=OTHER), ask(ANNA)])
        assert one == again
        assert isinstance(one, Claimed)
        assert isinstance(other, Claimed)
        assert record_of(driven).number == 1

    def test_each_complete_of_a_batch_has_its_own_answer_in_order(
        self, driven: StoreDriver
    ) -> None:
        driven.claim(ask(ANNA))
        driven.claim(ask(BERT, identity=OTHER))
        answers = driven.send(
            [
                CompleteRequest(KEY, ANNA, RESULT, LONG),
                CompleteRequest(OTHER, ANNA, RESULT, LONG),
                CompleteRequest(Identity("batch", "absent"), ANNA, RESULT, LONG),
                CompleteRequest(KEY, ANNA, OTHER_RESULT, LONG),
                CompleteRequest(KEY, BERT, OTHER_RESULT, LONG),
            ]
        )
        assert answers == [True, False, False, True, False]
        assert record_of(driven).outcome in {RESULT, OTHER_RESULT}
        assert record_of(driven, OTHER).state is State.PROCESSING

    def test_each_renewal_of_a_batch_has_its_own_answer_in_order(self, driven: StoreDriver) -> None:
        driven.claim(ask(ANNA))
        driven.claim(ask(BERT, identity=OTHER))
        answers = driven.send(
            [
                RenewRequest(KEY, ANNA, 3 * LONG),
                RenewRequest(OTHER, ANNA, 0),
                RenewRequest(Identity("batch", "absent"), ANNA, LONG),
            ]
        )
        assert answers == [True, False, False]
        busy = expect(Busy, driven.claim(ask(CARL)))
        assert busy.retry_after > 2 * LONG
        assert isinstance(driven.claim(ask(CARL, identity=OTHER)), Busy)

    def test_a_batch_may_park(self, driven: StoreDriver) -> None:
        driven.claim(ask(ANNA))
        assert driven.send([RenewRequest(KEY, ANNA, 0)]) == [True]
        assert isinstance(driven.claim(ask(BERT)), Claimed)

    def test_each_record_read_by_a_batch_stands_at_its_place(self, driven: StoreDriver) -> None:
        succeed(driven)
        driven.claim(ask(BERT, identity=OTHER))
        absent = Identity("batch", "absent")
        records = driven.get_many([absent, OTHER, KEY, OTHER])
        assert [record and record.owner for record in records] == [None, BERT, ANNA, BERT]

    def test_each_put_of_a_batch_has_its_own_answer_in_order(self, driven: StoreDriver) -> None:
        driven.claim(ask(ANNA))
        failed = Identity("batch", "failed")
        driven.claim(ask(ANNA, identity=failed))
        fail(driven, identity=failed)
        answers = driven.send([PutRequest(key, BERT, RESULT, LONG) for key in (KEY, OTHER, failed)])
        assert answers == [False, True, True]
        assert record_of(driven).state is State.PROCESSING
        assert record_of(driven, OTHER).outcome == RESULT

    def test_one_of_several_puts_of_a_key_in_a_batch_is_kept(self, driven: StoreDriver) -> None:
        answers = driven.send(
            [PutRequest(KEY, ANNA, RESULT, LONG), PutRequest(KEY, BERT, OTHER_RESULT, LONG)]
        )
        assert sorted(answers, key=bool) == [False, True]
        assert record_of(driven).owner == (ANNA if answers[0] is True else BERT)

    def test_requests_of_different_kinds_are_answered_in_their_order(
        self, driven: StoreDriver
    ) -> None:
        absent, ended = Identity("batch", "absent"), Identity("batch", "ended")
        driven.claim(ask(ANNA))
        driven.claim(ask(ANNA, identity=ended))
        requests: list[Request[object]] = [
            GetRequest(absent),
            CompleteRequest(KEY, ANNA, RESULT, LONG),
            ask(BERT, identity=OTHER),
            FailRequest(ended, ANNA, ERROR, retryable=True, keep_fingerprint=True, ttl=LONG),
            ForgetRequest(Identity("batch", "also-absent")),
        ]
        none, completed, claim, failed, forgotten = driven.send(requests)
        assert none is None
        assert (completed, failed, forgotten) == (True, True, False)
        assert isinstance(claim, Claimed)
        assert record_of(driven).state is State.SUCCEEDED
        assert record_of(driven, OTHER).owner == BERT
        assert record_of(driven, ended).state is State.FAILED

    def test_different_requests_about_one_record_are_carried_out_one_after_another(
        self, driven: StoreDriver
    ) -> None:
        abandon(driven, ANNA)
        requests: list[Request[object]] = [
            CompleteRequest(KEY, ANNA, RESULT, LONG),
            ask(BERT),
        ]
        completed, claim = driven.send(requests)
        record = record_of(driven)
        if isinstance(claim, Claimed):
            assert (completed, record.owner, record.state) == (False, BERT, State.PROCESSING)
        else:
            assert isinstance(claim, Finished)
            assert (completed, record.owner, record.state) == (True, ANNA, State.SUCCEEDED)

    def test_an_end_that_is_there_twice_is_stored_once(self, driven: StoreDriver) -> None:
        driven.claim(ask(ANNA))
        ends = [CompleteRequest(KEY, ANNA, each, LONG) for each in (RESULT, RESULT)]
        assert driven.send(ends) == [True, True]
        assert record_of(driven).outcome == RESULT

    def test_the_error_of_one_request_takes_no_answer_from_the_others(
        self, driven: StoreDriver, make_unreadable: Callable[[Identity], None]
    ) -> None:
        driven.claim(ask(ANNA))
        make_unreadable(KEY)
        keys = [OTHER, KEY, Identity("batch", "last")]
        try:
            answers = driven.send([ask(BERT, identity=key) for key in keys])
        except StoreError as error:
            raise AssertionError("send raised the error of one request of three") from error
        assert [isinstance(answer, StoreError) for answer in answers] == [False, True, False]
        assert isinstance(answers[0], Claimed)
        assert isinstance(answers[2], Claimed)

    def test_what_a_store_does_not_answer_is_refused_by_name(self, driven: StoreDriver) -> None:
        requests: list[Request[object]] = [
            AdoptRequest(KEY, BERT, LONG),
            ScanRequest(),
            StuckRequest(),
            PurgeRequest(),
            CountRequest(),
        ]
        for request in requests:
            if not driven.offers(type(request)):
                with pytest.raises(ConfigError, match=type(request).__name__):
                    driven.ask(request)

    def test_each_forget_of_a_batch_has_its_own_answer_in_order(self, driven: StoreDriver) -> None:
        succeed(driven)
        driven.claim(ask(BERT, identity=OTHER))
        assert driven.forget_many([Identity("batch", "absent"), OTHER, KEY]) == [
            *(False, True, True)
        ]
        assert driven.get_many([KEY, OTHER]) == [None, None]
