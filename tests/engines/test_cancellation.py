"""Cancelled tasks, at every step of a call.

What must hold: the caller is free at once, no key stays locked, and an effect is never repeated.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc

import pytest

from engines.facade import PATIENCE, Effect, never, until
from semel import (
    AsyncIdempotency,
    Idempotency,
    OutcomeUnknown,
    Policy,
    StoreUnavailable,
    events,
    open_async_store,
)
from semel.core.records import ClaimRequest, State
from semel.stores.memory import AsyncMemoryStore
from semel.testing import AsyncFaultyStore, Call, Delay, Refuse

HOLD = Policy(abandoned="hold")
TAKEOVER = Policy()
IMPATIENT = Policy(wait_timeout=15)
"""Less than a lease: what is found locked is never waited for until the lease ends."""

FOR_EVER = 3600


class Hanging(AsyncFaultyStore):
    """A store on which one call of a verb hangs, as a server does that stopped answering."""

    def __init__(self, store):
        super().__init__(store)
        self.hanging = {}

    def hang(self, verb, *, applied):
        """Let the next call hang: before it is applied, after it, or applied behind our back."""
        self.hanging[verb] = applied

    async def _meet(self, verb, apply, /, *args, **kwargs):
        applied = self.hanging.pop(verb, None)
        if applied is None:
            return await super()._meet(verb, apply, *args, **kwargs)
        if applied == "later":
            self.late = asyncio.create_task(self._later(apply, args, kwargs))
        elif applied == "yes":
            await apply(*args, **kwargs)
        self.calls.append(Call(verb, args, None))
        await asyncio.sleep(FOR_EVER)
        raise AssertionError("nobody cancelled this call")

    async def _later(self, apply, args, kwargs):
        await until(lambda: self.deliver)
        self.late_answer = await apply(*args, **kwargs)

    deliver = False

    def asked(self, verb):
        return sum(call.verb == verb for call in self.calls)


@pytest.fixture
async def store(store_url):
    opened = Hanging(open_async_store(store_url))
    yield opened
    await opened.close()


@pytest.fixture
async def idem(store):
    seen = []
    async with AsyncIdempotency(store, hooks=[seen.append]) as engine:
        engine.seen = seen
        yield engine


async def cancelled(task):
    """Cancel a task; it is free at once, whatever the store does."""
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, PATIENCE)


async def done():
    return "done"


async def never_async():
    never()


# --- while claiming --------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [TAKEOVER, HOLD], ids=["takeover", "hold"])
@pytest.mark.parametrize("applied", ["never", "yes"])
async def test_cancelled_while_claiming_leaves_the_key_free(store, idem, applied, policy):
    store.hang("claim", applied=applied)
    task = asyncio.create_task(idem.execute("k", never_async, policy=policy))
    await until(lambda: store.asked("claim"))
    await cancelled(task)
    assert await idem.execute("k", done, policy=IMPATIENT) == "done"


async def test_a_cancelled_claim_that_the_store_applies_later_is_refused(store, idem):
    store.hang("claim", applied="later")
    task = asyncio.create_task(idem.execute("k", never_async, policy=HOLD))
    await until(lambda: store.asked("claim"))
    await cancelled(task)
    await until(lambda: not idem.internals.in_background)
    store.deliver = True
    await store.late
    record = await idem.peek("k")
    assert (record.state, record.retryable) == (State.FAILED, True)
    assert await idem.execute("k", done, policy=IMPATIENT) == "done"


@contextlib.asynccontextmanager
async def running_elsewhere(store):
    """The key is run by another process, which ends with "theirs" when the block does."""
    started, go = asyncio.Event(), asyncio.Event()

    async def waits():
        started.set()
        await go.wait()
        return "theirs"

    async with AsyncIdempotency(store.store) as other:
        running = asyncio.create_task(other.execute("k", waits))
        await started.wait()
        yield
        go.set()
        assert await running == "theirs"


async def test_a_cancelled_claim_does_not_disturb_the_one_that_runs(store, idem):
    async with running_elsewhere(store):
        store.hang("claim", applied="yes")
        task = asyncio.create_task(idem.execute("k", never_async))
        await until(lambda: store.asked("claim"))
        await cancelled(task)
        await until(lambda: not idem.internals.in_background)
    assert await idem.execute("k", never_async) == "theirs"


@pytest.mark.parametrize("error", [StoreUnavailable("gone"), RuntimeError("a bug of the store")])
async def test_a_claim_that_cannot_be_given_back_is_told(store, idem, error):
    store.hang("claim", applied="never")
    store.inject("claim", Refuse(error))
    task = asyncio.create_task(idem.execute("k", never_async))
    await until(lambda: store.asked("claim"))
    await cancelled(task)
    await until(lambda: any(isinstance(event, events.StoreFailed) for event in idem.seen))
    await until(lambda: not idem.internals.in_background)


async def test_cancelled_while_waiting_for_another_process(store, idem):
    async with running_elsewhere(store):
        leader = asyncio.create_task(idem.execute("k", never_async))
        sharers = [asyncio.create_task(idem.execute("k", never_async)) for _ in range(3)]
        await until(lambda: store.asked("claim") >= 2)
        await cancelled(leader)
        await cancelled(sharers.pop())
        asked = store.asked("claim")
        await until(lambda: store.asked("claim") > asked)  # the next one leads
    assert await asyncio.gather(*sharers) == ["theirs"] * 2


async def test_a_slow_claim_that_is_cancelled_while_it_is_made_again_is_given_back(store, idem):
    policy = Policy(lease=0.3, abandoned="hold")
    store.inject("claim", Delay(0.2))
    task = asyncio.create_task(idem.execute("k", never_async, policy=policy))
    await until(lambda: store.asked("claim") == 1)
    store.hang("claim", applied="never")
    await until(lambda: store.asked("claim") == 2)
    await cancelled(task)
    assert await idem.execute("k", done, policy=IMPATIENT) == "done"


# --- while the function runs -------------------------------------------------------------------


async def cancelled_in_the_function(store, idem, policy):
    async def hangs():
        started.set()
        await asyncio.sleep(FOR_EVER)

    started = asyncio.Event()
    task = asyncio.create_task(idem.execute("k", hangs, policy=policy))
    await started.wait()
    await cancelled(task)


async def test_cancelled_in_the_function_is_forgotten(store, idem):
    await cancelled_in_the_function(store, idem, TAKEOVER)
    outcome = await idem.run("k", done, policy=IMPATIENT, payload="any")
    assert (outcome.value, outcome.attempt.number) == ("done", 2)


async def test_cancelled_in_the_function_is_parked_under_hold(store, idem):
    await cancelled_in_the_function(store, idem, HOLD)
    with pytest.raises(OutcomeUnknown):
        await idem.execute("k", never_async, policy=IMPATIENT)
    assert [type(event) for event in idem.seen if isinstance(event, events.Parked)]


@pytest.mark.parametrize("verb", ["fail", "renew"])
async def test_the_caller_is_free_at_once_though_its_failure_cannot_be_recorded_yet(
    store, idem, verb
):
    store.inject(verb, Delay(0.2))
    policy = HOLD if verb == "renew" else TAKEOVER
    await cancelled_in_the_function(store, idem, policy)
    assert (await idem.peek("k")).state is State.PROCESSING, "not yet"
    await idem.close()
    record = await idem.peek("k")
    assert record.abandoned if verb == "renew" else record.state is State.FAILED, "close() waited"


async def test_the_next_call_leads_after_the_running_one_was_cancelled(store, idem):
    started = asyncio.Event()

    async def hangs():
        started.set()
        await asyncio.sleep(FOR_EVER)

    leader = asyncio.create_task(idem.execute("k", hangs))
    await started.wait()
    runs = []

    async def counts():
        runs.append(1)
        return "next"

    sharers = [asyncio.create_task(idem.execute("k", counts)) for _ in range(5)]
    await asyncio.sleep(0)
    await cancelled(leader)
    assert await asyncio.wait_for(asyncio.gather(*sharers), PATIENCE) == ["next"] * 5
    assert runs == [1]


# --- while the end is recorded -------------------------------------------------------------------


@pytest.mark.parametrize("applied", ["never", "yes"])
async def test_cancelled_during_the_save_the_save_is_done_and_the_retry_replays(
    store, idem, applied
):
    store.hang("complete", applied=applied)
    task = asyncio.create_task(idem.execute("k", done))
    await until(lambda: store.asked("complete"))
    await cancelled(task)
    assert await idem.execute("k", never_async) == "done"


async def test_closing_waits_for_the_save_of_a_cancelled_caller(store_url, store):
    idem = AsyncIdempotency(store)
    store.hang("complete", applied="never")
    store.inject("complete", Delay(0.2))
    task = asyncio.create_task(idem.execute("k", done))
    await until(lambda: store.asked("complete"))
    await cancelled(task)
    await idem.close()
    async with AsyncIdempotency(store) as other:
        assert await other.execute("k", never_async, policy=Policy(concurrent="reject")) == "done"


async def test_sharers_get_the_result_of_a_caller_that_was_cancelled_during_its_save(store, idem):
    store.hang("complete", applied="never")
    leader = asyncio.create_task(idem.execute("k", done))
    await until(lambda: store.asked("complete"))
    sharers = [asyncio.create_task(idem.execute("k", never_async)) for _ in range(5)]
    await asyncio.sleep(0)
    await cancelled(leader)
    assert await asyncio.wait_for(asyncio.gather(*sharers), PATIENCE) == ["done"] * 5
    assert store.asked("claim") == 1


async def test_a_save_that_is_done_again_and_refused_disturbs_nobody(store, idem):
    store.hang("complete", applied="never")
    task = asyncio.create_task(idem.execute("k", done))
    await until(lambda: store.asked("complete"))
    assert await idem.forget("k")
    await cancelled(task)
    await until(lambda: not idem.internals.in_background)
    assert [event for event in idem.seen if isinstance(event, events.LostLease)]
    assert await idem.execute("k", done) == "done"


async def test_cancelled_while_a_failure_is_recorded_it_is_recorded(store, idem):
    async def fails():
        raise ValueError

    store.hang("fail", applied="never")
    task = asyncio.create_task(idem.execute("k", fails, policy=Policy(failure="final")))
    await until(lambda: store.asked("fail"))
    await cancelled(task)
    await until(lambda: not idem.internals.in_background)
    assert (await idem.peek("k")).state is State.FAILED


class Swallowing(Hanging):
    """A store whose driver takes a cancellation for itself, and then answers."""

    swallows = ""
    later = 0
    """How many calls of the verb go well before."""

    async def _meet(self, verb, apply, /, *args, **kwargs):
        answer = await super()._meet(verb, apply, *args, **kwargs)
        if verb == self.swallows:
            self.later -= 1
        if verb == self.swallows and self.later < 0:
            self.swallows = ""
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(FOR_EVER)
        return answer


@pytest.mark.parametrize("hold", ["takeover", "hold"])
@pytest.mark.parametrize("verb", ["claim", "second claim", "complete"])
async def test_a_cancellation_that_a_driver_swallows_is_heeded(verb, hold):
    """As asyncio.wait_for does in Python 3.11, and with it redis-py."""
    store, policy = Swallowing(AsyncMemoryStore()), Policy(abandoned=hold, lease=0.5)
    store.swallows = verb.split()[-1]
    if verb == "second claim":
        store.later = 1
        store.inject("claim", Delay(0.3))  # an answer so slow that the lease is begun anew
    runs = []

    async def counts():
        runs.append(1)
        return "once"

    async with AsyncIdempotency(store) as idem:
        task = asyncio.create_task(idem.execute("k", counts, policy=policy))
        await until(lambda: not store.swallows)
        await cancelled(task)
        assert runs == ([1] if verb == "complete" else [])
        assert await idem.execute("k", counts, policy=IMPATIENT) == "once"
        assert runs == [1]


class Promising(AsyncMemoryStore):
    """A store that answers claims by a future, as Redis does."""

    promised = None

    def ask(self, request):
        if self.promised is None and type(request) is ClaimRequest:
            self.promised = asyncio.get_running_loop().create_future()
            self.claim_of = request
            return self.promised
        return super().ask(request)


@pytest.mark.parametrize("answered", ["before", "after"])
async def test_a_claim_by_a_future_that_is_answered_in_the_turn_of_a_cancellation_is_given_back(
    answered,
):
    store, runs = Promising(), []

    async def counts():
        runs.append(1)
        return "once"

    async with AsyncIdempotency(store) as idem:
        call = asyncio.create_task(idem.execute("k", counts))
        await until(lambda: store.promised is not None)
        claimed = await AsyncMemoryStore.ask(store, store.claim_of)
        if answered == "before":
            store.promised.set_result(claimed)
        call.cancel()
        if answered == "after" and not store.promised.done():
            store.promised.set_result(claimed)
        await cancelled(call)
        assert runs == []
        assert await idem.execute("k", counts, policy=IMPATIENT) == "once"
        assert runs == [1]


async def test_a_call_in_a_task_that_survived_a_cancellation_is_not_disturbed_by_it():
    async def survives():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(FOR_EVER)
        async with AsyncIdempotency(AsyncMemoryStore()) as idem:
            return await idem.execute("k", done)

    task = asyncio.create_task(survives())
    await asyncio.sleep(0)
    task.cancel()
    assert await task == "done"


async def test_wherever_a_call_is_cancelled_its_retry_ends_with_one_effect_and_no_waiting(
    store_url,
):
    """The same at every moment of a call on a real store, from the first step to the last."""
    store = open_async_store(store_url)
    ended = 0
    async with AsyncIdempotency(store) as idem, AsyncIdempotency(store) as other:
        for steps in range(60):
            effects = []

            async def effect(effects=effects):
                await asyncio.sleep(0)
                effects.append("paid")  # from here on it must not run again
                return "paid"

            key = f"k{steps}"
            task = asyncio.create_task(idem.execute(key, effect))
            for _ in range(steps):
                await asyncio.sleep(0 if steps % 2 else 0.0001)
            task.cancel()
            ends = await asyncio.gather(task, return_exceptions=True)
            ended += ends == ["paid"]
            assert await other.execute(key, effect, policy=IMPATIENT) == "paid"
            assert effects == ["paid"]
    await store.close()
    assert ended < 60, "some were cancelled"


# --- loops that end ------------------------------------------------------------------------------


def test_a_program_stopped_by_its_user_saves_when_it_closes(lasting_url):
    """Ctrl-C cancels the main task; leaving `async with` waits for what is to be recorded."""

    async def main():
        async with AsyncIdempotency(lasting_url) as idem:

            async def interrupted():
                asyncio.get_running_loop().call_soon(asyncio.current_task().cancel)
                await asyncio.sleep(FOR_EVER)

            await idem.execute("k", interrupted)

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(main())
    with Idempotency(lasting_url) as idem:
        assert idem.peek("k").state is State.FAILED
        assert idem.execute("k", Effect("again")) == "again"


def test_a_loop_torn_down_under_a_running_call_is_like_a_crash(recwarn):
    """No loop, no background: nothing is raised from the wreck."""
    idem = AsyncIdempotency(AsyncMemoryStore())

    async def begin():
        call = idem.execute("k", lambda: asyncio.get_running_loop().create_future())
        call.send(None)
        return call

    call = asyncio.run(begin())
    call.close()
    del call
    gc.collect()
    assert not recwarn.list
    assert (
        asyncio.run(idem.internals.store.get(idem.internals.setup.identity("k", "default"))).state
        is State.PROCESSING
    )


@pytest.mark.parametrize("step", ["complete", "fail"])
async def test_a_step_in_the_background_that_is_cancelled_leaves_no_lease_that_is_renewed(step):
    store = Hanging(AsyncMemoryStore())
    async with AsyncIdempotency(store, policy=Policy(lease=1)) as idem:
        started = asyncio.Event()

        async def work():
            started.set()
            if step == "fail":
                await asyncio.sleep(FOR_EVER)

        store.hang(step, applied="no")
        call = asyncio.create_task(idem.execute("k", work))
        await started.wait()
        if step == "complete":
            await until(lambda: store.asked(step) == 1)
            store.hang(step, applied="no")  # the step that does it again, too
        call.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await call
        del call
        await until(lambda: store.asked(step) == (2 if step == "complete" else 1))
        for task in tuple(idem.internals.in_background):
            task.cancel()
        del task
        await until(lambda: not idem.internals.in_background)
        gc.collect()
        assert await idem.execute("k", completed, policy=IMPATIENT) == "again"


async def completed():
    return "again"


async def test_a_coroutine_that_an_async_function_returns_is_not_kept():
    inner = completed()

    async def work():
        return inner

    async with AsyncIdempotency("memory://") as idem:
        assert await idem.execute("k", work) is inner
        inner.close()
        record = await idem.peek("k")
        assert record.state is State.SUCCEEDED
