"""The running attempt: what a function may know about itself, and for how long."""

from __future__ import annotations

import asyncio
import contextvars
import threading

import pytest

from semel import (
    AsyncIdempotency,
    Attempt,
    ConfigError,
    Idempotency,
    Outcome,
    current_attempt,
    require_attempt,
)
from semel.core.attempts import Lease, is_nested
from semel.core.records import Identity
from semel.errors import DuplicateRequest, LeaseLost

KEY = Identity("orders", "42")
OTHER = Identity("orders", "43")
STORE = object()


def attempt(identity=KEY, **changes):
    return Attempt(identity, **{"store": STORE, **changes})


# --- what it tells -------------------------------------------------------------------------


def test_it_tells_its_scope_key_and_number():
    one = attempt(number=3, fence=77, owner=b"anna")
    assert (one.scope, one.key, one.number, one.fence) == ("orders", "42", 3, 77)
    assert one.protected
    assert not one.replayed


def test_an_identity_shows_its_digest_and_not_its_key():
    identity = Identity("orders", "card-4242")
    for text in (repr(identity), repr(identity.__rich_repr__())):
        assert "card-4242" not in text
        assert identity.key_digest in text
        assert "orders" in text


def test_its_text_names_the_digest_and_never_the_raw_key():
    text = repr(Attempt(Identity("orders", "card-4242"), number=2))
    assert text == f"<Attempt 2 of {Identity('orders', 'card-4242').digest.hex()} in 'orders'>"
    assert "card" not in text


def test_a_derived_key_is_the_same_on_every_attempt_and_another_in_every_scope():
    first, second = attempt(number=1, fence=1), attempt(number=2, fence=9)
    assert first.derive("capture") == second.derive("capture")
    others = [
        first.derive("refund"),
        attempt(OTHER).derive("capture"),
        attempt(Identity("refunds", "42")).derive("capture"),
        attempt(Identity("ord", "ers42")).derive("capture"),
    ]
    assert len({first.derive("capture"), *others}) == 5


def test_a_derived_key_stays_the_same_for_ever():
    # Written down: another value after an upgrade would repeat an effect downstream.
    assert attempt().derive("capture") == "capture-fc877938c24f9898e6cea9cda242f79f"


def test_calls_of_one_name_are_told_apart_by_their_order_on_every_attempt():
    first, second = attempt(number=1), attempt(number=2)
    keys = [first.derive_next("charge") for _ in range(3)]
    assert keys == [second.derive_next("charge") for _ in range(3)]
    assert len(set(keys)) == 3
    assert keys[0] == first.derive("charge")
    assert first.derive_next("refund") == first.derive("refund")


def test_a_counted_key_is_met_by_none_that_a_part_could_give():
    one = attempt()
    counted = {one.derive_next("charge") for _ in range(3)}
    named = {one.derive(f"charge{mark}{number}") for mark in "#:-/" for number in (2, 3)}
    assert counted.isdisjoint(named)


def test_a_counted_key_stays_the_same_for_ever():
    one = attempt()
    keys = [one.derive_next("charge") for _ in range(2)]
    assert keys[1] == "charge-793d40049565b9010998abc3bc7c4ea2"


def test_calls_of_the_longest_name_can_be_counted():
    one = attempt()
    assert len({one.derive_next("x" * 255) for _ in range(3)}) == 3


def test_threads_of_one_attempt_never_derive_the_same_key():
    one, keys = attempt(), []

    def derive():
        keys.extend(one.derive_next("charge") for _ in range(200))

    threads = [threading.Thread(target=derive) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(keys)) == 800


def test_its_result_is_none_until_it_is_set():
    one = attempt()
    assert one.result is None
    one.result = 0
    assert one.result == 0


def test_the_result_of_a_replay_is_kept_and_cannot_be_set_again():
    one = attempt(replayed=True, _result=[1])
    assert one.result == [1]
    with pytest.raises(DuplicateRequest, match="cannot be set again"):
        one.result = [2]
    assert one.result == [1]


def test_an_attempt_without_a_lease_cannot_lose_it():
    one = attempt(protected=False)
    assert not one.lost
    one.check()


def test_a_lost_lease_is_seen_by_the_clock_and_check_raises():
    one = attempt(lease=Lease(KEY, b"anna", 1, 30.0, began=float("inf")))
    assert not one.lost
    one.check()
    one.lease.begin(sent=-100.0)
    assert one.lost
    with pytest.raises(LeaseLost, match="another attempt may be running"):
        one.check()


def test_an_outcome_tells_value_and_origin():
    replay = Outcome("paid", attempt(replayed=True))
    assert (replay.value, replay.replayed, replay.attempt.key) == ("paid", True, "42")
    assert repr(replay) == "Outcome('paid', replayed=True)"


# --- which one is current ------------------------------------------------------------------


def test_there_is_none_outside():
    assert current_attempt() is None


def test_outside_of_an_attempt_requiring_one_raises():
    with pytest.raises(ConfigError, match="no attempt is running here"):
        require_attempt()
    one = attempt()
    with one:
        assert require_attempt() is one


def test_it_is_current_while_it_runs():
    one = attempt()
    with one:
        assert current_attempt() is one
        assert one.running
    assert current_attempt() is None
    assert not one.running


def test_the_innermost_is_current():
    outer, inner = attempt(KEY), attempt(OTHER)
    with outer:
        with inner:
            assert current_attempt() is inner
            assert inner.outer is outer
        assert current_attempt() is outer


def test_a_context_that_outlives_it_falls_back_to_the_one_around():
    outer, inner = attempt(KEY), attempt(OTHER)
    with outer:
        with inner:
            copied = contextvars.copy_context()
        assert copied.run(current_attempt) is outer
    assert copied.run(current_attempt) is None


def test_it_may_end_in_another_context_than_it_began_in():
    one = attempt()
    contextvars.copy_context().run(one.__enter__)
    one.__exit__(None, None, None)
    assert not one.running
    assert current_attempt() is None


def test_one_that_never_began_may_end():
    attempt().__exit__(None, None, None)


def test_nesting_is_the_same_record_of_the_same_store_anywhere_around():
    assert not is_nested(KEY, STORE, current_attempt())
    with attempt(KEY), attempt(OTHER):
        assert is_nested(KEY, STORE, current_attempt())
        assert is_nested(OTHER, STORE, current_attempt())
        assert not is_nested(Identity("orders", "44"), STORE, current_attempt())
        assert not is_nested(KEY, object(), current_attempt())
    assert not is_nested(KEY, STORE, current_attempt())


def test_an_attempt_that_has_ended_around_a_running_one_is_no_nesting():
    outer, inner = attempt(KEY), attempt(OTHER)
    outer.__enter__()
    inner.__enter__()
    outer.running = False  # as a task sees it that outlived the outer attempt
    assert not is_nested(KEY, STORE, current_attempt())
    assert is_nested(OTHER, STORE, current_attempt())
    inner.__exit__()
    outer.__exit__()


# --- in the engines ------------------------------------------------------------------------


def test_a_thread_started_inside_does_not_take_the_attempt_along():
    seen = []
    with Idempotency("memory://") as idem:

        def work():
            assert current_attempt().key == "k"
            thread = threading.Thread(target=lambda: seen.append(current_attempt()))
            thread.start()
            thread.join()

        idem.execute("k", work)
    assert seen == [None]


async def test_a_task_that_outlives_its_attempt_has_none_and_may_use_the_key():
    async with AsyncIdempotency("memory://") as idem:
        ended = asyncio.Event()
        tasks = []

        async def outlive():
            inside = current_attempt()
            await ended.wait()
            return inside, current_attempt(), await idem.execute("k", never_again)

        async def never_again():
            raise AssertionError("it was done")

        async def work():
            tasks.append(asyncio.create_task(outlive()))
            await asyncio.sleep(0)
            return "done"

        assert await idem.execute("k", work) == "done"
        ended.set()
        inside, afterwards, replay = await tasks[0]
        assert inside.key == "k"
        assert afterwards is None
        assert replay == "done"


async def test_two_tasks_each_see_their_own():
    async with AsyncIdempotency("memory://") as idem:
        meeting = asyncio.Barrier(2)

        async def work():
            await meeting.wait()
            mine = current_attempt().key
            await asyncio.sleep(0)
            assert current_attempt().key == mine
            return mine

        results = await asyncio.gather(idem.execute("a", work), idem.execute("b", work))
        assert results == ["a", "b"]
