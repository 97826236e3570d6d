"""`with idem.attempt(key) as attempt`: the same as `execute`, by hand, in both engines."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import pytest

from engines.facade import Stop, never, wait_until
from semel import (
    DuplicateRequest,
    LeaseLost,
    PayloadMismatch,
    Policy,
    ResultUnavailable,
    State,
    StoreUnavailable,
    current_attempt,
    events,
)
from semel.testing import Refuse


@pytest.fixture
def idem(memory_world):
    return memory_world.engine()


@contextlib.contextmanager
def attempt(idem, key="k", **options):
    """An attempt of either engine, as a plain context manager."""
    context = idem.engine.attempt(key, **options)
    if idem.engine.internals.setup.asynchronous:
        enter, leave = context.__aenter__, context.__aexit__
    else:
        enter, leave = context.__enter__, context.__exit__
    entered = idem._kind.finish(enter)
    try:
        yield entered
    except BaseException as error:
        if not idem._kind.finish(leave, type(error), error, error.__traceback__):
            raise
    else:
        idem._kind.finish(leave, None, None, None)


def test_what_was_set_is_stored_and_replayed(idem):
    with attempt(idem) as first:
        assert not first.replayed
        assert (first.number, first.key, first.scope, first.protected) == (1, "k", "default", True)
        assert first.running
        first.result = {"paid": (1, 2)}
    assert not first.running
    with attempt(idem) as second:
        assert second.replayed
        assert second.result == {"paid": (1, 2)}
        with pytest.raises(DuplicateRequest):
            second.result = "another"
    assert idem.execute("k", never) == {"paid": (1, 2)}


@pytest.mark.parametrize("value", [None, 0, "", False])
def test_a_falsy_result_is_a_result(idem, value):
    with attempt(idem) as first:
        first.result = value
    outcome = idem.run("k", never)
    assert outcome.value == value
    assert type(outcome.value) is type(value)


def test_without_a_result_it_is_done_with_none(idem):
    with attempt(idem):
        pass
    assert idem.execute("k", never) is None


def test_the_result_is_afterwards_what_duplicates_get(idem):
    mine = {"items": [1]}
    with attempt(idem) as first:
        first.result = mine
    assert first.result == mine
    assert first.result is not mine


def test_an_error_inside_reaches_the_caller_and_is_recorded(idem):
    with pytest.raises(ValueError, match="not today"), attempt(idem):
        raise ValueError("not today")
    assert idem.peek("k").state is State.FAILED
    with attempt(idem) as second:
        assert (second.replayed, second.number) == (False, 2)


def test_an_interruption_inside_is_recorded_as_the_policy_says(idem):
    with pytest.raises(Stop), attempt(idem, policy=Policy(abandoned="hold")):
        raise Stop
    wait_until(lambda: idem.told(events.Parked))
    assert idem.peek("k").abandoned


def test_payload_scope_and_policy_hold_here_too(idem):
    policy = Policy(ttl=50)
    with attempt(idem, scope="orders", payload=1, policy=policy) as first:
        first.result = 1
    assert 40 < idem.peek("k", scope="orders").remaining <= 50
    with pytest.raises(PayloadMismatch), attempt(idem, scope="orders", payload=2):
        never()


def test_a_lost_lease_is_told_at_the_end(idem):
    with pytest.raises(LeaseLost), attempt(idem):
        idem.forget("k")
    assert idem.peek("k") is None


def test_an_unreadable_replay_is_an_error_and_no_second_run(idem):
    with attempt(idem) as first:
        first.result = object()
    with pytest.raises(ResultUnavailable), attempt(idem):
        never()


def test_a_store_that_is_down_lets_nobody_in_unless_the_policy_says_so(idem):
    idem.store.inject("claim", Refuse(), times=2)
    with pytest.raises(StoreUnavailable), attempt(idem):
        never()
    value = object()
    with attempt(idem, policy=Policy(store_error="open")) as unprotected:
        assert not unprotected.protected
        unprotected.result = value
    assert unprotected.result is value
    assert idem.peek("k") is None


def test_it_is_the_current_attempt_inside(kind, memory_world):
    idem = memory_world.engine()

    def work():
        return current_attempt().key

    async def by_hand_async():
        async with idem.engine.attempt("k") as mine:
            return current_attempt() is mine

    def by_hand():
        with idem.engine.attempt("k") as mine:
            return current_attempt() is mine

    assert memory_world.kind.finish(by_hand if kind == "threads" else by_hand_async)
    assert idem.execute("other", work) == "other"


@dataclass
class Receipt:
    """A result that a replay cannot make without its class."""

    order: int


def test_a_replay_by_hand_is_read_as_the_class_that_it_returns(idem):
    with attempt(idem, returns=Receipt) as first:
        first.result = Receipt(42)
    with attempt(idem, returns=Receipt) as second:
        assert (second.replayed, second.result) == (True, Receipt(42))
