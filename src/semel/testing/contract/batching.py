"""The contract of `Batching`: many identities at once, each member with its own answer."""

from __future__ import annotations

import pytest

from semel.core.records import (
    OWNER_BYTES,
    Abandoned,
    Busy,
    Claimed,
    CompleteRequest,
    Encoded,
    Exhausted,
    Finished,
    Identity,
    Mismatch,
    PutRequest,
    RenewRequest,
    State,
)
from semel.stores.base import AsyncStore, Batching, Store
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
    StoreUnderTest,
    ask,
    fail,
    park,
    record_of,
    succeed,
)
from semel.testing.driver import StoreDriver


class BatchingContract(StoreUnderTest):
    """A batch answers as its members would have been answered one by one."""

    @pytest.fixture
    def batching(self, store: Store | AsyncStore, driven: StoreDriver) -> StoreDriver:
        """Drive a store that is `Batching`."""
        if not driven.offers(Batching):
            pytest.skip(f"{type(store).__name__} is not Batching")
        return driven

    def test_an_empty_batch_has_no_answers(self, batching: StoreDriver) -> None:
        assert batching.claim_many([]) == []
        assert batching.complete_many([]) == []
        assert batching.renew_many([]) == []
        assert batching.get_many([]) == []
        assert batching.put_many([]) == []
        assert batching.forget_many([]) == []

    def test_each_claim_of_a_batch_has_its_own_answer_in_order(self, batching: StoreDriver) -> None:
        keys = [Identity("batch", name) for name in ("new", "done", "busy", "other", "held", "out")]
        new, done, busy, other, held, out = keys
        succeed(batching, identity=done)
        batching.claim(ask(ANNA, identity=busy))
        batching.claim(ask(ANNA, RED, identity=other))
        batching.claim(ask(ANNA, identity=held, hold=True))
        park(batching, identity=held)
        batching.claim(ask(ANNA, identity=out))
        park(batching, identity=out)
        answers = batching.claim_many(
            [ask(BERT, BLUE, identity=key, max_attempts=1) for key in keys]
        )
        assert [type(answer) for answer in answers] == [
            *(Claimed, Finished, Busy, Mismatch, Abandoned, Exhausted)
        ]
        assert record_of(batching, new).owner == BERT
        backwards = batching.claim_many([ask(BERT, BLUE, identity=key) for key in reversed(keys)])
        assert [type(answer) for answer in backwards] == [
            *(Claimed, Abandoned, Mismatch, Busy, Finished, Claimed)
        ]

    def test_a_large_batch_is_claimed_completed_read_and_forgotten(
        self, batching: StoreDriver
    ) -> None:
        keys = [Identity("batch", str(index)) for index in range(200)]
        results = [Encoded("json", str(index).encode()) for index in range(200)]
        claims = batching.claim_many([ask(ANNA, identity=key) for key in keys])
        assert all(isinstance(claim, Claimed) and claim.number == 1 for claim in claims)
        completed = batching.complete_many(
            [
                CompleteRequest(key, ANNA, result, LONG)
                for key, result in zip(keys, results, strict=True)
            ]
        )
        assert completed == [True] * len(keys)
        records = batching.get_many(keys)
        assert [record.outcome for record in records if record is not None] == results
        assert batching.forget_many(keys) == [True] * len(keys)
        assert batching.get_many(keys) == [None] * len(keys)

    def test_one_of_several_owners_in_a_batch_gets_the_key(self, batching: StoreDriver) -> None:
        owners = [index.to_bytes(OWNER_BYTES, "big") for index in range(1, 6)]
        answers = batching.claim_many([ask(owner) for owner in owners])
        winners = [index for index, answer in enumerate(answers) if isinstance(answer, Claimed)]
        assert len(winners) == 1
        assert sum(isinstance(answer, Busy) for answer in answers) == len(owners) - 1
        assert record_of(batching).owner == owners[winners[0]]

    def test_a_claim_repeated_inside_a_batch_is_the_same_attempt(
        self, batching: StoreDriver
    ) -> None:
        one, other, again = batching.claim_many([ask(ANNA), ask(ANNA, identity=OTHER), ask(ANNA)])
        assert one == again
        assert isinstance(one, Claimed)
        assert isinstance(other, Claimed)
        assert record_of(batching).number == 1

    def test_each_complete_of_a_batch_has_its_own_answer_in_order(
        self, batching: StoreDriver
    ) -> None:
        batching.claim(ask(ANNA))
        batching.claim(ask(BERT, identity=OTHER))
        answers = batching.complete_many(
            [
                CompleteRequest(KEY, ANNA, RESULT, LONG),
                CompleteRequest(OTHER, ANNA, RESULT, LONG),
                CompleteRequest(Identity("batch", "absent"), ANNA, RESULT, LONG),
                CompleteRequest(KEY, ANNA, OTHER_RESULT, LONG),
                CompleteRequest(KEY, BERT, OTHER_RESULT, LONG),
            ]
        )
        assert answers == [True, False, False, True, False]
        assert record_of(batching).outcome in {RESULT, OTHER_RESULT}
        assert record_of(batching, OTHER).state is State.PROCESSING

    def test_each_renewal_of_a_batch_has_its_own_answer_in_order(
        self, batching: StoreDriver
    ) -> None:
        batching.claim(ask(ANNA))
        batching.claim(ask(BERT, identity=OTHER))
        answers = batching.renew_many(
            [
                RenewRequest(KEY, ANNA, 3 * LONG),
                RenewRequest(OTHER, ANNA, 0),
                RenewRequest(Identity("batch", "absent"), ANNA, LONG),
            ]
        )
        assert answers == [True, False, False]
        busy = batching.claim(ask(CARL))
        assert isinstance(busy, Busy)
        assert busy.retry_after > 2 * LONG
        assert isinstance(batching.claim(ask(CARL, identity=OTHER)), Busy)

    def test_a_batch_may_park(self, batching: StoreDriver) -> None:
        batching.claim(ask(ANNA))
        assert batching.renew_many([RenewRequest(KEY, ANNA, 0)]) == [True]
        assert isinstance(batching.claim(ask(BERT)), Claimed)

    def test_each_record_read_by_a_batch_stands_at_its_place(self, batching: StoreDriver) -> None:
        succeed(batching)
        batching.claim(ask(BERT, identity=OTHER))
        absent = Identity("batch", "absent")
        records = batching.get_many([absent, OTHER, KEY, OTHER])
        assert [record and record.owner for record in records] == [None, BERT, ANNA, BERT]

    def test_each_put_of_a_batch_has_its_own_answer_in_order(self, batching: StoreDriver) -> None:
        batching.claim(ask(ANNA))
        failed = Identity("batch", "failed")
        batching.claim(ask(ANNA, identity=failed))
        fail(batching, identity=failed)
        answers = batching.put_many(
            [PutRequest(key, BERT, RESULT, LONG) for key in (KEY, OTHER, failed)]
        )
        assert answers == [False, True, True]
        assert record_of(batching).state is State.PROCESSING
        assert record_of(batching, OTHER).outcome == RESULT

    def test_one_of_several_puts_of_a_key_in_a_batch_is_kept(self, batching: StoreDriver) -> None:
        answers = batching.put_many(
            [PutRequest(KEY, ANNA, RESULT, LONG), PutRequest(KEY, BERT, OTHER_RESULT, LONG)]
        )
        assert sorted(answers, key=bool) == [False, True]
        assert record_of(batching).owner == (ANNA if answers[0] is True else BERT)

    def test_each_forget_of_a_batch_has_its_own_answer_in_order(
        self, batching: StoreDriver
    ) -> None:
        succeed(batching)
        batching.claim(ask(BERT, identity=OTHER))
        assert batching.forget_many([Identity("batch", "absent"), OTHER, KEY]) == [
            *(False, True, True)
        ]
        assert batching.get_many([KEY, OTHER]) == [None, None]
