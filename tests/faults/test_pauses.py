"""A process, or its event loop, stands still for longer than its lease.

| fault | expected |
|---|---|
| 8 paused, then complete | replaced: LeaseLost, the other's record untouched; not replaced: saved |
| 9 paused, then the effect | takeover: twice, under one derived key; hold: once, unless resolved without proof |
| 38 event loop blocked | as 8 |

Processes are stopped with SIGSTOP; the effects are lines of a file.
"""

from __future__ import annotations

import threading

import pytest

from engines.facade import PATIENCE, Effect, World, never, wait_until
from semel import Idempotency, LeaseLost, OutcomeUnknown, Policy
from semel.core.records import State

fault = pytest.mark.fault

SHORT = {"lease": 0.4}


def wait_until_abandoned(engine) -> None:
    wait_until(lambda: engine.peek("k").abandoned)


@fault(8)
def test_a_paused_owner_that_was_replaced_is_told_and_changes_nothing(
    shared, kind, operation, ledger
):
    other = shared.engine()
    with operation(kind=kind, url=shared.url, steps=["effect", "wait", "lost"], policy=SHORT) as it:
        it.hear("waiting")
        it.pause()
        assert other.execute("k", ledger.effect("by the other")) == "by the other"
        stored = other.peek("k")
        it.resume()
        it.go()
        assert it.hear("lost") is True
        assert it.outcome() == {"error": "LeaseLost"}
    assert (stored.state, stored.number) == (State.SUCCEEDED, 2)
    left = other.peek("k")
    assert (left.owner, left.outcome, left.number) == (stored.owner, stored.outcome, 2)
    assert [entry.number for entry in ledger.entries()] == [1, 2]


@fault(8)
def test_a_paused_owner_does_not_disturb_the_one_that_is_still_running(shared, kind, operation):
    other = shared.engine()
    effect = Effect("by the other").held()
    with operation(kind=kind, url=shared.url, steps=["wait"], policy=SHORT) as it:
        it.hear("waiting")
        it.pause()
        running = other.start("k", effect)
        effect.wait_started()
        stored = other.peek("k")
        it.resume()
        it.go()
        assert it.outcome() == {"error": "LeaseLost"}
        left = other.peek("k")
        assert (left.owner, left.state) == (stored.owner, State.PROCESSING)
        assert left.lease_until >= stored.lease_until
    effect.release()
    assert running.result(PATIENCE) == "by the other"


@fault(8)
@pytest.mark.parametrize("abandoned", ["takeover", "hold"])
def test_a_paused_owner_that_nobody_replaced_saves_its_result(
    shared, kind, operation, ledger, abandoned
):
    other = shared.engine()
    policy = SHORT | {"abandoned": abandoned}
    with operation(kind=kind, url=shared.url, steps=["effect", "wait"], policy=policy) as it:
        it.hear("waiting")
        it.pause()
        wait_until_abandoned(other)
        it.resume()
        it.go()
        result = it.hear("result")
    assert other.execute("k", never) == result
    assert len(ledger.entries()) == 1


@fault(9)
def test_an_effect_after_the_pause_is_a_second_one_under_the_same_derived_key(
    shared, kind, operation, ledger
):
    other = shared.engine()
    with operation(kind=kind, url=shared.url, steps=["wait", "effect"], policy=SHORT) as it:
        it.hear("waiting")
        it.pause()
        other.execute("k", ledger.effect())
        it.resume()
        it.go()
        assert it.outcome() == {"error": "LeaseLost"}
    assert [entry.number for entry in ledger.entries()] == [2, 1]
    downstream = {entry.derived for entry in ledger.entries()}
    assert len(downstream) == 1, "downstream could not have told that they are one"


@fault(9)
def test_a_function_that_checks_its_lease_after_the_pause_has_no_second_effect(
    shared, kind, operation, ledger
):
    other = shared.engine()
    steps = ["wait", "check", "effect"]
    with operation(kind=kind, url=shared.url, steps=steps, policy=SHORT) as it:
        it.hear("waiting")
        it.pause()
        other.execute("k", ledger.effect())
        it.resume()
        it.go()
        assert it.outcome() == {"error": "LeaseLost"}
    assert [entry.number for entry in ledger.entries()] == [2]


@fault(9)
def test_under_hold_the_paused_owner_is_the_only_one_to_have_an_effect(
    shared, kind, operation, ledger
):
    other = shared.engine()
    policy = SHORT | {"abandoned": "hold"}
    with operation(kind=kind, url=shared.url, steps=["wait", "effect"], policy=policy) as it:
        it.hear("waiting")
        it.pause()
        wait_until_abandoned(other)
        with pytest.raises(OutcomeUnknown):
            other.execute("k", ledger.effect())
        it.resume()
        it.go()
        it.hear("result")
    assert [entry.number for entry in ledger.entries()] == [1]


@fault(9)
def test_under_hold_a_resolver_that_says_not_done_without_proof_makes_it_twice(
    shared, kind, operation, ledger
):
    other = shared.engine()
    policy = SHORT | {"abandoned": "hold"}
    with operation(kind=kind, url=shared.url, steps=["wait", "effect"], policy=policy) as it:
        it.hear("waiting")
        it.pause()
        wait_until_abandoned(other)
        assert other.forget("k")
        other.execute("k", ledger.effect())
        it.resume()
        it.go()
        assert it.outcome() == {"error": "LeaseLost"}
    assert len(ledger.entries()) == 2


# --- the event loop stands still --------------------------------------------------------------


@fault(38)
@pytest.mark.parametrize("replaced", [True, False], ids=["replaced", "not replaced"])
def test_an_event_loop_that_was_blocked_is_treated_like_a_pause(
    shared_url, operation, ledger, replaced
):
    with (
        World("asyncio", shared_url) as world,
        operation(
            kind="asyncio", url=shared_url, steps=["effect", "block", "lost"], policy=SHORT
        ) as it,
    ):
        other = world.engine()
        it.hear("waiting")
        wait_until_abandoned(other)  # the fault: nothing was renewed
        if replaced:
            other.execute("k", ledger.effect())
        it.go()
        assert it.hear("lost") is True
        outcome = it.outcome()
        if replaced:
            assert outcome == {"error": "LeaseLost"}
            assert len(ledger.entries()) == 2
        else:
            assert other.execute("k", never) == outcome["result"]
            assert len(ledger.entries()) == 1


@fault(38)
def test_a_blocked_event_loop_on_the_memory_store_is_treated_like_a_pause():
    with World("asyncio", "memory://") as world:
        blocked = world.engine()
        effect = Effect("blocked").held()
        running = blocked.start("k", effect, policy=Policy(**SHORT))
        effect.wait_started()
        block = threading.Event()
        world.kind.loop.call_soon_threadsafe(block.wait, PATIENCE)
        elsewhere = Idempotency(blocked.store.store._store)  # the same records, without the loop
        assert elsewhere.execute("k", lambda: "by the other") == "by the other"
        assert elsewhere.peek("k").number == 2
        block.set()
        effect.release()
        with pytest.raises(LeaseLost):
            running.result(PATIENCE)
        assert blocked.execute("k", never) == "by the other"
        elsewhere.close()
