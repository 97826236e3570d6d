"""What a block of `idem.transaction()` does, on every kind of connection."""

from __future__ import annotations

import contextlib
import inspect
from itertools import permutations

import pytest

from semel import (
    ConcurrentRequest,
    ConfigError,
    NestedCall,
    OutcomeUnknown,
    PayloadMismatch,
    Policy,
    StoreUnavailable,
)
from semel.core.records import State
from semel.core.run_info import RunInfo, process_name, read
from semel.transactions import OutsideTransaction
from transactions.kinds import KINDS

pytestmark = pytest.mark.parametrize("world", KINDS, ids=lambda kind: kind.name, indirect=True)


class Declined(Exception):
    """A business error."""


async def test_record_and_business_row_are_committed_together_and_a_duplicate_replays(world):
    async with world.engine() as idem:
        first = await world.pay(idem)
        assert (first.replayed, first.number, first.result) == (False, 1, {"paid": "order-1"})
        second = await world.pay(idem)
        assert (second.replayed, second.result) == (True, {"paid": "order-1"})
        # The ordinary calls speak of the same record.
        record = await world.done(idem.peek("order-1"))
        assert record.state is State.SUCCEEDED
    assert world.entries() == ["order-1"]


async def test_what_the_ordinary_calls_did_is_replayed_in_a_transaction(world):
    async with world.engine() as idem:
        await world.done(idem.marks.set_result("order-1", {"paid": "before"}))
        attempt = await world.pay(idem)
        assert (attempt.replayed, attempt.result) == (True, {"paid": "before"})
    assert world.entries() == []


async def test_an_error_undoes_the_block_and_its_record_but_not_what_was_before_it(world):
    async with world.engine() as idem:
        async with world.work() as work:
            await work.run("INSERT INTO ledger VALUES ('before', 1)")
            with pytest.raises(Declined):
                async with world.once(idem, work):
                    await work.run("INSERT INTO ledger VALUES ('undone', 1)")
                    raise Declined
            await work.run("INSERT INTO ledger VALUES ('after', 1)")
        assert world.entries() == ["after", "before"]
        assert await world.done(idem.peek("order-1")) is None
        assert not (await world.pay(idem)).replayed


async def test_rolling_the_transaction_back_takes_the_record_along(world):
    async with world.engine() as idem:
        with pytest.raises(Declined):
            async with world.work() as work:
                async with world.once(idem, work) as attempt:
                    await work.run("INSERT INTO ledger VALUES ('order-1', 1)")
                    attempt.result = "paid"
                raise Declined
        assert world.entries() == []
        assert await world.done(idem.peek("order-1")) is None


async def test_the_same_key_again_in_the_same_transaction_replays(world):
    async with world.engine() as idem, world.work() as work:
        for replayed in (False, True):
            async with world.once(idem, work) as attempt:
                assert attempt.replayed is replayed
                if not replayed:
                    attempt.result = "paid"
            assert attempt.result == "paid"


async def test_without_an_open_transaction_nothing_runs(world):
    async with world.engine() as idem, world.idle() as work:
        with pytest.raises(ConfigError, match=r"none is open on this connection; (use|call|BEGIN)"):
            async with world.once(idem, work):
                pytest.fail("it ran")


async def test_a_commit_inside_the_block_is_never_taken_for_success(world):
    async with world.engine() as idem:
        with contextlib.suppress(Exception):  # frameworks complain that their transaction is gone
            async with world.work() as work:
                with pytest.raises(OutcomeUnknown, match="inside the block"):
                    async with world.once(idem, work) as attempt:
                        await work.run("INSERT INTO ledger VALUES ('order-1', 1)")
                        await work.run("COMMIT")
                        attempt.result = "paid"
                raised = True
        assert raised
        assert world.entries() == ["order-1"]
        held = await world.done(idem.peek("order-1"))
        assert held.state is State.PROCESSING
        assert read(held.run_info) == RunInfo(process_name(), 86400, "json/1")
        with pytest.raises(OutcomeUnknown):
            await world.pay(idem)
        with pytest.raises(OutcomeUnknown):
            await world.done(idem.consume("order-1", lambda: None))
    assert world.entries() == ["order-1"]


async def test_another_payload_is_refused_and_the_transaction_goes_on(world):
    async with world.engine() as idem:
        await world.pay(idem, payload={"amount": 1})
        async with world.work() as work:
            with pytest.raises(PayloadMismatch):
                async with world.once(idem, work, payload={"amount": 2}):
                    pytest.fail("it ran")
            await work.run("INSERT INTO ledger VALUES ('later', 1)")
    assert world.entries() == ["later", "order-1"]


async def test_a_key_that_runs_elsewhere_under_a_lease_is_busy_at_once(world):
    async with (
        world.engine() as elsewhere,
        world.entered(elsewhere.attempt("order-1")),
        world.engine() as idem,
    ):
        async with world.work() as work:
            with pytest.raises(ConcurrentRequest) as refused:
                async with world.once(idem, work):
                    pytest.fail("it ran")
        assert 0 < refused.value.retry_after <= 30


async def test_an_abandoned_record_is_taken_over_if_the_policy_says_so_and_held_then(world):
    async with world.engine() as idem:
        with pytest.raises(Declined):  # of which nobody knows what it did
            async with world.entered(idem.attempt("order-1", policy=Policy(failure="unknown"))):
                raise Declined
        async with world.work() as work:
            with pytest.raises(OutcomeUnknown):
                async with world.once(idem, work, policy=Policy(abandoned="hold")):
                    pytest.fail("it ran")
        async with world.work() as work, world.once(idem, work) as attempt:
            assert attempt.number == 2
            held = await work.run("SELECT hold FROM idempotent_record")
            assert held[0][0] == 1


@pytest.mark.parametrize("abandoned", ["takeover", "hold"])
async def test_in_the_end_a_record_is_held_as_its_policy_says(world, abandoned):
    async with world.engine() as idem:
        policy = Policy(abandoned=abandoned)
        async with world.work() as work, world.once(idem, work, policy=policy) as attempt:
            attempt.result = "paid"
        assert world.query("SELECT hold FROM idempotent_record") == [(abandoned == "hold",)]


async def test_asking_for_its_own_key_inside_the_block_is_an_error(world):
    async with world.engine() as idem, world.work() as work, world.once(idem, work):
        with pytest.raises(NestedCall):
            async with world.once(idem, work):
                pytest.fail("it ran")


async def test_several_keys_are_committed_together_or_not_at_all(world):
    keys = ["c", "a", "b"]
    async with world.engine() as idem:
        await world.pay(idem, "b")
        with pytest.raises(Declined):
            async with (
                world.work() as work,
                world.entered(idem.transactions(work.connection, keys)) as attempts,
            ):
                assert {key: attempts[key].replayed for key in keys} == {
                    "a": False, "b": True, "c": False
                }  # fmt: skip
                raise Declined
        assert await world.done(idem.marks.check_many(keys)) == {"a": False, "b": True, "c": False}
        async with (
            world.work() as work,
            world.entered(idem.transactions(work.connection, keys)) as attempts,
        ):
            for key in ("a", "c"):
                attempts[key].result = key
        assert await world.done(idem.marks.get_result_many(keys)) == {
            "a": "a", "b": {"paid": "b"}, "c": "c"
        }  # fmt: skip


async def test_several_keys_are_claimed_in_one_order_whatever_the_caller_says(world):
    # Else two transactions with the same keys could wait for each other.
    claimed = []
    async with world.engine() as idem:
        for keys in permutations(("a", "b", "c")):
            with pytest.raises(Declined):
                async with (
                    world.work() as work,
                    world.entered(idem.transactions(work.connection, keys)) as attempts,
                ):
                    fences = [attempt.fence for attempt in attempts.values()]
                    assert fences == sorted(fences), "the order of the dict is that of the claims"
                    claimed.append([*attempts])
                    raise Declined
    assert claimed == [claimed[0]] * 6


async def test_a_missing_table_is_named_together_with_the_way_out(world):
    async with world.engine(ready=False) as idem:
        with contextlib.suppress(Exception):
            async with world.work() as work:
                with pytest.raises(ConfigError, match="semel migrate") as refused:
                    async with world.once(idem, work):
                        pytest.fail("it ran")
        assert "missing" in str(refused.value)


async def test_records_may_live_in_another_table(world):
    named = "`order`" if world.kind.dialect == "mysql" else '"order"'  # a word of SQL
    async with world.engine() as idem:
        columns = "* FROM idempotent_record WHERE 1 = 0"
        if world.kind.dialect == "mysql":
            world.query(f"CREATE TABLE {named} LIKE idempotent_record")
        elif world.kind.dialect == "postgresql":
            world.query(f"CREATE TABLE {named} (LIKE idempotent_record INCLUDING ALL)")
        else:
            world.query(f"CREATE TABLE {named} AS SELECT {columns}")
            world.query(f"CREATE UNIQUE INDEX order_id ON {named} (identity)")
        assert not (await world.pay(idem, table="order")).replayed
        assert (await world.pay(idem, table="order")).replayed
        assert await world.done(idem.peek("order-1")) is None
    assert world.query(f"SELECT count(*) FROM {named}") == [(1,)]


async def test_the_ordinary_calls_inside_a_block_warn_at_the_place_where_they_are_used(world):
    async def use_the_ordinary_call(idem):
        with contextlib.suppress(StoreUnavailable):  # SQLite has one writer: it waits in vain
            async with world.entered(idem.attempt("another")):
                pass

    policy = Policy(store_timeout=1.0) if world.kind.dialect == "sqlite" else None
    async with world.engine(policy=policy) as idem, world.work() as work:
        async with world.once(idem, work):
            with pytest.warns(OutsideTransaction, match="committed at once") as warned:
                await use_the_ordinary_call(idem)
        assert [warning.filename for warning in warned] == [inspect.getfile(type(world))]


async def test_secrets_of_fingerprints_are_rotated(world):
    old, new = "an old secret of 24 bytes", "a new secret of 23 bytes"
    loose = Policy(mismatch="replace")
    async with world.engine(fingerprint_secret=old) as before:
        await world.pay(before, payload=1)
        await world.pay(before, "loose", payload=1, policy=loose)
    async with world.engine(fingerprint_secret=[new, old]) as during:
        assert (await world.pay(during, payload=1)).replayed
        assert (await world.pay(during, "loose", payload=1, policy=loose)).replayed
        with pytest.raises(PayloadMismatch):
            await world.pay(during, payload=2)
        await world.pay(during, "fresh", payload=1)
    async with world.engine(fingerprint_secret=new) as after:
        assert (await world.pay(after, "fresh", payload=1)).replayed
        with pytest.raises(PayloadMismatch):
            await world.pay(after, payload=1)
    assert sorted(world.entries()) == ["fresh", "loose", "order-1"]
