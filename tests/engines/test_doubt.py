"""What the engine does when an answer is lost, a function is not what it seems, or a timer fails."""

from __future__ import annotations

import asyncio
import inspect
import pickle
import threading
import types

import pytest

from engines.facade import PATIENCE, wait_until
from semel import (
    AsyncIdempotency,
    ConfigError,
    Idempotency,
    InvalidKey,
    LeaseLost,
    OutcomeUnknown,
    Policy,
    StoreUnavailable,
)
from semel import events as semel_events
from semel.core.records import Busy, Claimed, ClaimRequest, Identity
from semel.stores.memory import AsyncMemoryStore, MemoryStore
from semel.testing import AsyncFaultyStore, FaultyStore, LoseReply, Refuse

HELD = Policy(abandoned="hold", lease=0.2)


def test_a_claim_whose_answer_was_lost_is_given_back_also_under_hold():
    store = FaultyStore(MemoryStore())
    store.inject("claim", LoseReply())
    with Idempotency(store, policy=HELD) as idem:
        with pytest.raises(StoreUnavailable):
            idem.execute("k", lambda: "must not run")
        assert store.fired("claim") == 1
        wait_until(lambda: len(store.calls) >= 3)  # claimed again, then failed: given back
        wait_until(lambda: idem.peek("k").retryable)
        assert idem.execute("k", lambda: "runs") == "runs"


async def test_a_claim_whose_answer_was_lost_is_given_back_on_asyncio_too():
    store = AsyncFaultyStore(AsyncMemoryStore())
    store.inject("claim", LoseReply())
    async with AsyncIdempotency(store, policy=HELD) as idem:

        async def runs() -> str:
            return "runs"

        with pytest.raises(StoreUnavailable):
            await idem.execute("k", runs)
        async with asyncio.timeout(60):
            while not (await idem.peek("k")).retryable:  # noqa: ASYNC110 - the store has no event
                await asyncio.sleep(0.01)
        assert await idem.execute("k", runs) == "runs"


def test_giving_back_waits_for_a_store_that_is_away_and_stops_at_its_first_refusal():
    store = FaultyStore(MemoryStore())
    store.inject("claim", LoseReply(), times=2)
    with Idempotency(store, policy=HELD) as idem:
        for key in ("a", "b"):
            with pytest.raises(StoreUnavailable):
                idem.execute(key, lambda: "must not run")
        store.inject("claim", Refuse(), times=2)
        wait_until(lambda: store.fired("claim") == 4)
        wait_until(lambda: all(idem.peek(key).retryable for key in ("a", "b")))


@pytest.fixture
def late_timer(monkeypatch):
    """A timer that gives no claim back before the next call comes."""
    monkeypatch.setattr("semel.core.attempts.Leases.doubtful", lambda *_: [])


COUNTED = Policy(max_attempts=1, lease=0.2)


@pytest.mark.usefixtures("late_timer")
def test_a_claim_in_doubt_is_given_back_before_the_next_one_counts():
    store = FaultyStore(MemoryStore())
    store.inject("claim", LoseReply())
    with Idempotency(store, policy=COUNTED) as idem:
        with pytest.raises(StoreUnavailable):
            idem.execute("k", lambda: "must not run")
        wait_until(lambda: idem.peek("k").abandoned)
        assert idem.execute("k", lambda: "runs") == "runs"
        assert idem.peek("k").number == 1


@pytest.mark.usefixtures("late_timer")
async def test_a_claim_in_doubt_is_given_back_on_asyncio_before_the_next_one_counts():
    async def runs() -> str:
        return "runs"

    store = AsyncFaultyStore(AsyncMemoryStore())
    store.inject("claim", LoseReply())
    async with AsyncIdempotency(store, policy=COUNTED) as idem:
        with pytest.raises(StoreUnavailable):
            await idem.execute("k", runs)
        while not (await idem.peek("k")).abandoned:  # noqa: ASYNC110 - the store has no event
            await asyncio.sleep(0.01)
        assert await idem.execute("k", runs) == "runs"


class Locked(MemoryStore):
    """One whose record an open transaction has, for two questions; the first one is not lost.

    It waits in the database, and is carried out after the second was told that it is busy.
    """

    def __init__(self):
        super().__init__()
        self.asks = []

    def ask(self, request):
        if not isinstance(request, ClaimRequest):
            return super().ask(request)
        self.asks.append(request)
        if len(self.asks) == 1:
            raise StoreUnavailable("the caller has left")
        if len(self.asks) == 2:
            assert isinstance(super().ask(self.asks[0]), Claimed)
            return Busy(0.1)
        return super().ask(request)


def test_a_claim_that_may_wait_for_a_transaction_is_given_back_after_it():
    with Idempotency(Locked(), policy=Policy(abandoned="hold", lease=60.0)) as idem:
        with pytest.raises(StoreUnavailable):
            idem.execute("k", lambda: "must not run")
        wait_until(lambda: idem.peek("k") is not None and idem.peek("k").retryable)
        assert idem.execute("k", lambda: "runs") == "runs"


async def test_a_claim_that_may_wait_for_a_transaction_is_given_back_on_asyncio_too():
    async def runs() -> str:
        return "runs"

    store = AsyncMemoryStore()
    store._store = Locked()
    async with AsyncIdempotency(store, policy=Policy(abandoned="hold", lease=60.0)) as idem:
        with pytest.raises(StoreUnavailable):
            await idem.execute("k", runs)
        async with asyncio.timeout(60):
            while idem.internals.leases._unsure:  # noqa: ASYNC110 - the store has no event
                await asyncio.sleep(0.01)
        assert (await idem.peek("k")).retryable
        assert await idem.execute("k", runs) == "runs"


def test_what_was_never_claimed_is_not_left_behind_either():
    store = FaultyStore(MemoryStore())
    store.inject("claim", Refuse())
    with Idempotency(store, policy=HELD) as idem:
        with pytest.raises(StoreUnavailable):
            idem.execute("k", lambda: "must not run")
        assert idem.execute("k", lambda: "runs") == "runs"
        wait_until(lambda: sum(call.verb == "claim" for call in store.calls) == 3)
        assert idem.execute("k", lambda: "runs again") == "runs"


def test_a_coroutine_that_nobody_would_await_is_no_result():
    async def charge() -> str:
        return "charged"

    with Idempotency("memory://") as idem:
        with pytest.raises(ConfigError, match="AsyncIdempotency") as refusal:
            idem.execute("k", lambda: charge())  # noqa: PLW0108 - hides that it is async
        assert type(refusal.value) is ConfigError
        assert refusal.value.nothing_ran
        assert refusal.value.key_digest == Identity("default", "k").digest.hex()
        assert not idem.marks.check("k")
        assert idem.execute("k", lambda: "charged") == "charged"


def test_a_coroutine_that_nobody_has_begun_leaves_no_doubt_even_under_hold():
    async def charge() -> str:
        return "charged"

    with Idempotency("memory://", policy=HELD) as idem:
        with pytest.raises(ConfigError, match="AsyncIdempotency"):
            idem.execute("k", lambda: charge())  # noqa: PLW0108 - hides that it is async
        assert idem.execute("k", lambda: "charged") == "charged"


def test_a_coroutine_that_has_begun_leaves_the_outcome_in_doubt():
    @types.coroutine
    def pause():
        yield

    async def charge() -> None:
        await pause()

    def begin():
        coroutine = charge()
        coroutine.send(None)
        return coroutine

    with Idempotency("memory://", policy=HELD) as idem:
        with pytest.raises(ConfigError, match="AsyncIdempotency") as refusal:
            idem.execute("k", begin)
        assert not refusal.value.nothing_ran
        with pytest.raises(OutcomeUnknown):
            idem.execute("k", lambda: "must not run")


@pytest.mark.parametrize("ending", ["return", "raise"])
def test_a_lease_that_the_store_refused_is_announced_once(ending):
    told = []
    store = MemoryStore()
    with Idempotency(store, policy=Policy(lease=0.15), hooks=[told.append]) as idem:

        def replaced() -> None:
            idem.forget("k")
            wait_until(lambda: any(isinstance(one, semel_events.LostLease) for one in told))
            if ending == "raise":
                raise ValueError

        with pytest.raises(LeaseLost if ending == "return" else ValueError):
            idem.execute("k", replaced)
    assert sum(isinstance(one, semel_events.LostLease) for one in told) == 1


def test_an_attempt_that_has_ended_is_never_lost():
    with Idempotency("memory://", policy=Policy(lease=0.05)) as idem:
        attempt = idem.run("k", lambda: None).attempt
        asyncio.run(asyncio.sleep(0.1))
        assert not attempt.lost
        attempt.check()


def test_a_record_is_read_only_from_the_loop_that_the_engine_belongs_to():
    idem = AsyncIdempotency("memory://")

    async def use() -> None:
        await idem.marks.set("k")

    asyncio.run(use())
    for ask in (
        lambda: idem.peek("k"),
        lambda: idem.forget("k"),
        lambda: idem.marks.check_many(["k"]),
        lambda: idem.marks.set("k"),
    ):

        async def other_loop(ask=ask) -> None:
            await ask()

        with pytest.raises(ConfigError, match="another event loop"):
            asyncio.run(other_loop())


def test_the_timer_survives_a_failing_tick(monkeypatch, caplog):
    monkeypatch.setattr("semel.engine.colours.threads.AFTER_FAILURE", 0.02)
    with Idempotency("memory://", policy=Policy(lease=0.3, abandoned="hold")) as idem:
        ticks, tick = [], idem.internals.renewer.timer._tick

        def broken() -> float:
            ticks.append(1)
            if len(ticks) == 1:
                raise RuntimeError("a bug")
            return tick()

        idem.internals.renewer.timer._tick = broken
        assert idem.execute("k", lambda: wait_until(lambda: len(ticks) > 3)) is None
    assert "it goes on" in caplog.text


async def test_the_timer_survives_that_every_task_is_cancelled(monkeypatch, caplog):
    monkeypatch.setattr("semel.engine.colours.tasks.AFTER_FAILURE", 0.02)
    async with AsyncIdempotency("memory://", policy=Policy(lease=0.3, abandoned="hold")) as idem:
        ticks, tick = [], idem.internals.renewer.timer._tick

        async def broken() -> float:
            ticks.append(1)
            if len(ticks) == 1:
                raise RuntimeError("a bug")
            if len(ticks) == 2:
                asyncio.current_task().cancel()
                await asyncio.sleep(1)
            return await tick()

        async def until_it_ticks() -> None:
            async with asyncio.timeout(60):
                while len(ticks) < 4:  # noqa: ASYNC110 - nor has the timer
                    await asyncio.sleep(0.01)

        idem.internals.renewer.timer._tick = broken
        assert await idem.execute("k", until_it_ticks) is None
    assert "it goes on" in caplog.text


def test_an_unknown_outcome_stays_unknown_when_nothing_was_lost():
    with Idempotency("memory://", policy=HELD) as idem:
        with pytest.raises(ValueError, match="who knows"):
            idem.execute("k", lambda: (_ for _ in ()).throw(ValueError("who knows")))
        with pytest.raises(OutcomeUnknown):
            idem.execute("k", lambda: "must not run")


async def test_a_plain_function_on_the_async_engine_runs_once_too():
    runs = []
    async with AsyncIdempotency("memory://") as idem:
        for _ in range(2):
            assert await idem.execute("k", lambda: runs.append(1) or "done") == "done"
    assert runs == [1]


class SlowToTakeBack(MemoryStore):
    """Loses the answer to the claim of "doubtful", and takes it back when the test says so."""

    def __init__(self):
        super().__init__()
        self.asked_back, self.may_take_back = threading.Event(), threading.Event()
        self.claims = self.renewals = 0

    def ask(self, request):
        if isinstance(request, ClaimRequest) and request.identity.key == "doubtful":
            self.claims += 1
            if self.claims == 1:
                super().ask(request)
                raise StoreUnavailable("the answer is lost")
            self.asked_back.set()
            assert self.may_take_back.wait(PATIENCE)
        return super().ask(request)

    def send(self, requests):
        self.renewals += 1
        return super().send(requests)


def test_a_store_that_takes_no_claim_back_holds_up_no_renewal():
    store, ends = SlowToTakeBack(), threading.Event()
    with Idempotency(store, policy=Policy(lease=2.0)) as idem:
        running = threading.Thread(target=idem.execute, args=["running", lambda: ends.wait(60)])
        running.start()
        with pytest.raises(StoreUnavailable, match="the answer is lost"):
            idem.execute("doubtful", lambda: None)
        assert store.asked_back.wait(PATIENCE)
        before = store.renewals
        wait_until(lambda: store.renewals >= before + 2)
        store.may_take_back.set()
        ends.set()
        running.join()


def test_one_text_is_not_taken_for_many_keys():
    with Idempotency("memory://") as idem:
        for many in (idem.marks.set_many, idem.marks.check_many, idem.marks.delete_many):
            with pytest.raises(InvalidKey, match="a str would be split"):
                many("abc")
        assert list(idem.records()) == []


def test_an_engine_that_is_switched_off_says_so(monkeypatch, caplog):
    monkeypatch.setenv("SEMEL_DISABLED", "1")
    with Idempotency("memory://"):
        assert "disabled" in caplog.text


def test_a_client_in_the_place_of_a_store_is_told_where_it_goes():
    with pytest.raises(ConfigError, match=r"RedisStore\(client\)"):
        Idempotency(object())


def test_a_preset_may_be_changed():
    assert Policy.payment(ttl=60).ttl == 60.0
    assert Policy.payment(ttl=60).abandoned == "hold"
    assert inspect.signature(Policy).parameters["codec"]


decorating = Idempotency("memory://")


@decorating.once("{n}")
def doubled(n: int) -> int:
    return 2 * n


def test_a_decorated_function_is_pickled_by_its_name():
    assert pickle.loads(pickle.dumps(doubled)) is doubled  # noqa: S301 - our own bytes


decorating_async = AsyncIdempotency("memory://")


@decorating_async.once("{n}")
async def doubled_later(n: int) -> int:
    return 2 * n


def test_a_decorated_async_function_is_pickled_by_its_name():
    assert pickle.loads(pickle.dumps(doubled_later)) is doubled_later  # noqa: S301 - our own bytes


def test_an_event_tells_the_key_to_those_who_may_see_it():
    seen = []
    with Idempotency("memory://", hooks=[seen.append]) as idem:
        idem.execute("order:1", lambda: None)
    assert [event.key for event in seen] == ["order:1"]
