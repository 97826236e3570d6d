"""Attempts inside attempts: one's own key is refused at once, another's is waited for in bounds."""

from __future__ import annotations

import asyncio
import threading

import pytest

from engines.facade import Effect, never, wait_until
from semel import AsyncIdempotency, ConfigError, Idempotency, NestedCall, Policy, WaitTimeout
from semel.core.records import Identity
from semel.stores.memory import AsyncMemoryStore


@pytest.fixture
def idem(memory_world):
    return memory_world.engine()


@pytest.mark.parametrize("method", ["execute", "run", "consume"])
def test_a_nested_call_with_the_same_key_is_an_error_at_once(idem, method):
    def asks_for_itself():
        with pytest.raises(NestedCall, match="would wait for itself"):
            getattr(idem, method)("k", never)
        return "done"

    assert idem.execute("k", asks_for_itself) == "done"
    assert idem.commands("claim") == 1
    assert idem.execute("k", never) == "done"


def test_it_is_an_error_through_another_key_and_another_engine_too(memory_world, idem):
    other = memory_world.engine_on(idem.store)

    def deepest():
        for engine in (idem, other):
            for key in ("outer", "inner"):
                with pytest.raises(NestedCall):
                    engine.execute(key, never)
        return "deep"

    assert idem.execute("outer", lambda: other.execute("inner", deepest)) == "deep"


def test_another_scope_key_or_store_is_not_nested(memory_world, idem):
    elsewhere = memory_world.engine_on(
        memory_world.kind.steered(memory_world.kind.open_store("memory://"))
    )

    def inner():
        return [
            idem.execute("k", lambda: 1, scope="other"),
            idem.execute("k2", lambda: 2),
            elsewhere.execute("k", lambda: 3),
        ]

    assert idem.execute("k", inner) == [1, 2, 3]


def test_after_a_nested_call_failed_the_outer_one_goes_on(idem):
    def outer():
        with pytest.raises(ZeroDivisionError):
            idem.execute("inner", lambda: 1 / 0)
        return idem.execute("inner", lambda: "second try")

    assert idem.execute("outer", outer) == "second try"


def test_by_hand_it_is_an_error_too():
    with Idempotency("memory://") as idem, idem.attempt("k") as attempt:
        with pytest.raises(NestedCall), idem.attempt("k"):
            pass
        attempt.result = 1


@pytest.mark.parametrize("where", ["one engine", "two engines"])
def test_two_attempts_that_wait_for_each_others_keys_end_by_the_lease(memory_world, where):
    one = memory_world.engine(policy=Policy(lease=0.4))
    two = one if where == "one engine" else memory_world.engine(policy=Policy(lease=0.4))
    both_run = threading.Barrier(2)

    def crossing(engine, key):
        def work():
            both_run.wait(60)
            return engine.execute(key, lambda: "got through")

        return work

    calls = [one.start("k1", crossing(one, "k2")), two.start("k2", crossing(two, "k1"))]
    wait_until(lambda: all(call.done() for call in calls))
    errors = [call.exception() for call in calls]
    # Where one gives up first, the other may get its key in time.
    assert any(isinstance(error, WaitTimeout) for error in errors)
    assert all(error is None or isinstance(error, WaitTimeout) for error in errors)


def test_a_wait_timeout_that_was_set_holds_inside_an_attempt_too(memory_world):
    one, two = memory_world.engine(), memory_world.engine(policy=Policy(lease=0.05))
    effect = Effect().held()
    running = one.start("k", effect)
    effect.wait_started()
    waiting = two.start("outer", lambda: two.execute("k", never, policy=Policy(wait_timeout=60)))
    wait_until(lambda: two.commands("renew", "renew_many") > 3)  # longer than its lease
    assert not waiting.done()
    effect.release()
    assert waiting.result() == running.result() == "done"


# --- event loops ---------------------------------------------------------------------------


def test_an_engine_belongs_to_the_first_loop_that_uses_it():
    idem = AsyncIdempotency(AsyncMemoryStore())

    async def one():
        return 1

    async def by_hand():
        async with idem.attempt("k"):
            pass

    assert asyncio.run(idem.execute("k", one)) == 1
    for method in (idem.execute, idem.run, idem.consume):
        with pytest.raises(ConfigError, match="another event loop: make one for each") as refused:
            asyncio.run(method("k", one))
        assert refused.value.key_digest == Identity("default", "k").digest.hex()
    with pytest.raises(ConfigError, match="belongs to another event loop"):
        asyncio.run(by_hand())


@pytest.mark.parametrize(
    "use", ["peek", "forget", "marks.check", "marks.set", "marks.set_many", "marks.clear"]
)
def test_reading_and_marking_on_another_loop_is_refused_where_connections_cannot_follow(
    use, redis_url
):
    idem = AsyncIdempotency(redis_url)

    async def one():
        return 1

    async def first():
        await idem.execute("k", one)

    async def second():
        method = idem
        for part in use.split("."):
            method = getattr(method, part)
        await method(["k"] if use.endswith("many") else "k")

    async def both():
        await first()
        with pytest.raises(ConfigError, match="belongs to another event loop"):
            await asyncio.to_thread(asyncio.run, second())
        await idem.close()

    asyncio.run(both())
