"""The task of a call is cancelled.

| fault | expected |
|---|---|
| 22 cancelled during the function | takeover: forgotten; hold: parked as unknown; never locked for its ttl |
| 23 cancelled after the effect, during the save | the save completes, close() drains it, the retry replays; loop torn down: as a crash |
| 40 cancelled during the claim | a claim nobody wants is forgotten, also under hold |

Threads cannot be cancelled: these are for asyncio.
"""

from __future__ import annotations

import asyncio

import pytest

from engines.facade import World, intercepted, wait_until
from faults.children import child
from semel import AsyncIdempotency, OutcomeUnknown, Policy, events, open_async_store
from semel.core.records import State
from semel.testing import AsyncFaultyStore, Delay

fault = pytest.mark.fault

HOLD = Policy(abandoned="hold")


@pytest.fixture
async def store(store_url):
    """A store on the loop of the test."""
    opened = AsyncFaultyStore(open_async_store(store_url))
    yield opened
    await opened.close()


async def cancel(task) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


class Endless:
    """A coroutine function that never ends by itself."""

    def __init__(self) -> None:
        self.started = asyncio.Event()
        self.ends = []

    async def __call__(self):
        self.started.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.ends.append("cancelled")
            raise


async def done():
    return "done"


# --- during the function ----------------------------------------------------------------------


@fault(22)
async def test_a_function_that_was_cancelled_is_forgotten_and_the_next_call_runs(store):
    engine = AsyncIdempotency(store)
    work = Endless()
    task = asyncio.create_task(engine.execute("k", work))
    await work.started.wait()
    await cancel(task)
    assert work.ends == ["cancelled"]
    outcome = await engine.run("k", done)
    assert (outcome.value, outcome.attempt.number) == ("done", 2)
    await engine.close()


@fault(22)
async def test_a_held_function_that_was_cancelled_is_parked_as_unknown(store):
    told = []
    engine = AsyncIdempotency(store, policy=HOLD, hooks=[told.append])
    work = Endless()
    task = asyncio.create_task(engine.execute("k", work))
    await work.started.wait()
    await cancel(task)
    await engine.close()  # waits for what is recorded in the background
    assert work.ends == ["cancelled"]
    assert [type(event) for event in told] == [events.Parked]
    again = AsyncIdempotency(store, policy=HOLD)
    assert (await again.peek("k")).abandoned
    with pytest.raises(OutcomeUnknown):
        await again.execute("k", done)
    await again.close()


@fault(22)
async def test_a_time_limit_frees_the_caller_at_once_and_the_record_is_told_behind_its_back(store):
    engine = AsyncIdempotency(store)
    work = Endless()
    store.inject("fail", Delay(2.0))
    running = asyncio.create_task(engine.execute("k", work))
    await work.started.wait()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(running, 0.05)
    assert (await engine.peek("k")).state is State.PROCESSING, "the caller waited for the record"
    await engine.close()
    assert store.fired("fail") == 1
    assert (await engine.peek("k")).state is State.FAILED


@fault(22)
async def test_being_cancelled_twice_does_not_stop_the_record_from_being_told(store):
    engine = AsyncIdempotency(store)
    work = Endless()
    store.inject("fail", Delay(0.1))
    task = asyncio.create_task(engine.execute("k", work))
    await work.started.wait()
    task.cancel()
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await engine.run("k", done)).attempt.number == 2
    assert store.fired("fail") == 1
    await engine.close()


# --- during the save --------------------------------------------------------------------------


def slow_saves(store) -> tuple[asyncio.Event, asyncio.Event]:
    """Hold up every save: the first event tells that one has begun, the second lets it go on."""
    saving, go_on = asyncio.Event(), asyncio.Event()

    async def slow(ask, request):
        saving.set()
        await go_on.wait()
        return await ask(request)

    intercepted(store.store, "complete", slow)
    return saving, go_on


@fault(23)
@pytest.mark.parametrize("policy", [Policy(), HOLD], ids=["takeover", "hold"])
async def test_a_save_goes_on_when_its_caller_is_cancelled_and_the_retry_replays(store, policy):
    engine = AsyncIdempotency(store, policy=policy)
    saving, go_on = slow_saves(store)
    runs = []

    async def work():
        runs.append(1)
        return "saved"

    task = asyncio.create_task(engine.execute("k", work))
    await saving.wait()
    await cancel(task)
    assert (await engine.peek("k")).state is State.PROCESSING  # the fault: not saved yet
    go_on.set()
    assert await engine.execute("k", done) == "saved"
    assert runs == [1]
    await engine.close()


@fault(23)
async def test_close_drains_the_save_of_a_cancelled_call(store):
    engine = AsyncIdempotency(store)
    saving, go_on = slow_saves(store)
    task = asyncio.create_task(engine.execute("k", done))
    await saving.wait()
    await cancel(task)
    assert (await engine.peek("k")).state is State.PROCESSING
    asyncio.get_running_loop().call_soon(go_on.set)
    await engine.close()
    assert (await engine.peek("k")).state is State.SUCCEEDED


@fault(40)
@pytest.mark.parametrize("policy", [Policy(), HOLD], ids=["takeover", "hold"])
async def test_close_drains_the_giving_back_of_a_claim_that_nobody_wants(store, policy):
    engine = AsyncIdempotency(store, policy=policy)
    asked, looked = asyncio.Event(), asyncio.Event()

    async def given_and_not_told(ask, request):
        answer = await ask(request)
        if asked.is_set():
            return answer
        asked.set()
        return await asyncio.Event().wait()

    async def given_back_later(ask, request):
        await looked.wait()
        return await ask(request)

    intercepted(store.store, "claim", given_and_not_told)
    intercepted(store.store, "fail", given_back_later)
    task = asyncio.create_task(engine.execute("k", done))
    await asked.wait()
    await cancel(task)
    assert (await engine.peek("k")).state is State.PROCESSING
    closing = asyncio.create_task(engine.close())
    await asyncio.sleep(0)
    looked.set()
    await closing
    assert (await engine.peek("k")).state is State.FAILED


@fault(23)
@pytest.mark.parametrize("abandoned", ["takeover", "hold"])
def test_a_save_that_its_loop_was_torn_down_under_is_as_good_as_a_crash(
    shared_url, ledger, abandoned
):
    policy = {"lease": 0.3, "abandoned": abandoned}
    with child("torn_loop.py", url=shared_url, ledger=str(ledger.path), policy=policy) as it:
        assert it.hear("left") == 1
        it.ended()
    assert len(ledger.entries()) == 1
    with World("threads", shared_url) as world:
        engine = world.engine()
        wait_until(lambda: engine.peek("k").abandoned)
        if abandoned == "takeover":
            assert engine.execute("k", ledger.effect()) == "done here"
        else:
            with pytest.raises(OutcomeUnknown):
                engine.execute("k", ledger.effect())
    assert len(ledger.entries()) == (2 if abandoned == "takeover" else 1)
