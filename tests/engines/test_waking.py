"""A waiter is woken by the end of what it waits for: on Redis, PostgreSQL, and tiers over it.

The waiters here would poll after half a minute at the earliest. An answer before that was told.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading

import pytest
import redis

from engines.facade import PATIENCE, Effect, Gate, World, never, until, wait_until
from semel import (
    AsyncIdempotency,
    DuplicateRequest,
    LeaseLost,
    OutcomeUnknown,
    Policy,
    PreviousFailure,
    WaitTimeout,
)
from semel.core.records import Identity
from semel.stores import listening
from stores.postgres_given import rows

SOON = 20.0
"""Well before the first poll."""

SELDOM = Policy(wait_interval=60, wait_interval_max=60, lease=60)
"""Polls after 30 s, and asks when the lease ends, which is later."""


@pytest.fixture(params=["redis", "postgres", "tiers"])
def world(request, kind):
    options = {}
    if request.param == "tiers":
        url = request.getfixturevalue("redis_url")
        options = {"behind": request.getfixturevalue("postgres_url"), "front_timeout": PATIENCE}
    else:
        url = request.getfixturevalue(f"{request.param}_url")
    with World(kind, url, **options) as opened:
        yield opened


@pytest.fixture
def owner(world):
    return world.engine(policy=SELDOM)


@pytest.fixture
def waiter(world):
    return world.engine(policy=SELDOM)


def listeners_of(store) -> list:
    if hasattr(store, "_listeners"):  # one for each server of Redis
        return list(store._listeners._listeners.values())
    return [store._wakeups._listener]


def is_listening(engine, channels: int = 1) -> bool:
    """So many watches of this engine's store are notified of their records' ends."""
    store = engine.store.store
    listeners = listeners_of(getattr(store, "behind", store))
    found = [
        channel.subscribed
        for listener in listeners
        for channel in list(listener.subscriptions._channels.values())
    ]
    return len(found) == channels and all(found)


@pytest.fixture(autouse=True)
def pauses(monkeypatch):
    """What every watch was asked: how long to wait now, after the store's answer."""
    asked = []
    pause = listening.Waiter.pause

    def counted(watch, planned):
        asked.append(watch)
        return pause(watch, planned)

    monkeypatch.setattr(listening.Waiter, "pause", counted)
    return asked


@contextlib.contextmanager
def waited_for(owner, waiter, effect, pauses, *, policy=None, waiting_policy=None, fn=never):
    """`effect` runs, held, and another engine waits for it; gives both calls."""
    pauses.clear()
    running = owner.start("k", effect.held(), policy=policy)
    effect.wait_started()
    waiting = waiter.start("k", fn, policy=waiting_policy)
    # Asked, waited for the subscription, asked again: from here on it is told.
    wait_until(lambda: len(pauses) == 2 and is_listening(waiter))
    yield running, waiting


def ask_count(engine) -> int:
    return engine.commands("claim")


# --- what wakes -------------------------------------------------------------------------------


def test_the_end_wakes_whoever_waits_for_it(owner, waiter, pauses):
    effect = Effect({"id": 42})
    with waited_for(owner, waiter, effect, pauses) as (running, waiting):
        effect.release()
        assert waiting.result(SOON) == running.result(SOON) == {"id": 42}
    assert ask_count(waiter) == 3, "it asked, subscribed and asked, was woken and asked"


def test_a_failure_wakes_one_that_then_runs(owner, waiter, pauses):
    effect = Effect(raising=ValueError("no"))
    with waited_for(owner, waiter, effect, pauses, fn=lambda: "second") as (running, waiting):
        effect.release()
        assert waiting.result(SOON) == "second"
        with pytest.raises(ValueError, match="no"):
            running.result(SOON)


def test_a_final_failure_is_told(owner, waiter, pauses):
    effect = Effect(raising=ValueError("no"))
    final = Policy(failure="final")
    with waited_for(owner, waiter, effect, pauses, policy=final) as (_, waiting):
        effect.release()
        with pytest.raises(PreviousFailure, match="no"):
            waiting.result(SOON)


def test_an_attempt_that_is_parked_wakes_whoever_waits(owner, waiter, pauses):
    effect = Effect(raising=ValueError("no"))
    with waited_for(owner, waiter, effect, pauses, policy=Policy(abandoned="hold")) as (_, waiting):
        effect.release()
        with pytest.raises(OutcomeUnknown):
            waiting.result(SOON)


def end_lease(engine, url):
    """Let the lease of "k" be over at once, by the store's own record of it: nobody is told."""
    store = engine.store.store
    if hasattr(store, "keys"):
        running_tail = 38  # of a record without a fingerprint: see lua/record.lua
        with contextlib.closing(redis.Redis.from_url(url)) as client:
            client.setrange(store.keys.record(Identity("default", "k")), running_tail, bytes(7))
    else:
        rows(url, "UPDATE idempotent_record SET lease_until = created_at")


@pytest.mark.parametrize("world", ["redis", "postgres"], indirect=True)
def test_who_waits_is_told_of_the_end_of_an_attempt_that_took_over(world, owner, waiter, pauses):
    effect = Effect("late")
    owner.break_renewals()
    with waited_for(owner, waiter, effect, pauses) as (running, waiting):
        end_lease(owner, world.url)
        successor = world.engine(policy=SELDOM)
        assert successor.execute("k", Effect("by the successor")) == "by the successor"
        assert waiting.result(SOON) == "by the successor"
        effect.release()
        with pytest.raises(LeaseLost):
            running.result(PATIENCE)


def test_a_guard_is_told_that_it_was_done(owner, waiter, pauses):
    effect = Effect()
    guard = Policy(duplicate="reject", wait_timeout=PATIENCE, message="done already")
    with waited_for(owner, waiter, effect, pauses, waiting_policy=guard) as (_, waiting):
        effect.release()
        with pytest.raises(DuplicateRequest, match="done already"):
            waiting.result(SOON)


def test_a_record_that_is_forgotten_wakes_whoever_waits(owner, waiter, pauses):
    effect = Effect()
    with waited_for(owner, waiter, effect, pauses, fn=lambda: "second") as (_, waiting):
        owner.forget("k")
        assert waiting.result(SOON) == "second"
        effect.release()


def test_many_keys_are_waited_for_at_once(owner, waiter, pauses):
    effects = {f"k{number}": Effect(number).held() for number in range(20)}
    running = [owner.start(key, effect) for key, effect in effects.items()]
    for effect in effects.values():
        effect.wait_started()
    waiting = [waiter.start(key, never) for key in effects]
    wait_until(lambda: len(pauses) == 40 and is_listening(waiter, 20))
    for effect in effects.values():
        effect.release()
    assert [call.result(SOON) for call in waiting] == list(range(20))
    assert [call.result(SOON) for call in running] == list(range(20))


def test_a_second_waiter_joins_the_subscription_of_the_first(world, owner, waiter, pauses):
    beside = world.engine_on(waiter.store, policy=SELDOM)
    effect = Effect()
    with waited_for(owner, waiter, effect, pauses) as (_, waiting):
        # Another payload than none is another flight, and waits by itself.
        also = beside.start("k", never, payload="p")
        wait_until(lambda: len(pauses) == 4)
        effect.release()
        assert waiting.result(SOON) == also.result(SOON) == "done"


def test_a_waiter_that_joins_a_subscription_hears_of_an_end_that_came_just_before(
    world, owner, waiter, pauses
):
    beside = world.engine_on(waiter.store, policy=SELDOM)
    effect = Effect()
    with waited_for(owner, waiter, effect, pauses) as (running, waiting):
        told_busy, woken = Gate(), Gate()
        waiter.store.after["claim"] = told_busy
        also = beside.start("k", never, payload="p")
        told_busy.wait()
        waiter.store.before["claim"] = woken
        effect.release()
        assert running.result(SOON) == "done"
        woken.wait()  # The first one has the message, and keeps the subscription.
        told_busy.open()
        assert also.result(SOON) == "done"
        woken.open()
        assert waiting.result(SOON) == "done"


# --- what is left behind ----------------------------------------------------------------------


def test_who_gives_up_leaves_no_subscription(owner, waiter):
    effect = Effect().held()
    owner.start("k", effect)
    effect.wait_started()
    with pytest.raises(WaitTimeout):
        waiter.execute("k", never, policy=Policy(wait_timeout=0.5))
    assert is_listening(waiter, 0)
    effect.release()


async def test_a_task_that_is_cancelled_while_it_waits_leaves_no_subscription(redis_url):
    async with AsyncIdempotency(redis_url) as owner, AsyncIdempotency(redis_url) as waiter:
        may_end = asyncio.Event()
        running = asyncio.create_task(owner.execute("k", may_end.wait))
        await until(lambda: owner.internals.leases)
        waiting = asyncio.create_task(waiter.execute("k", may_end.wait))
        await until(lambda: listeners_of(waiter.internals.store))
        (listener,) = listeners_of(waiter.internals.store)
        channels = listener.subscriptions._channels
        await until(lambda: any(channel.subscribed for channel in channels.values()))
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert not listener.subscriptions
        may_end.set()
        await running


def test_who_does_not_wait_does_not_listen(owner, waiter):
    effect = Effect().held()
    owner.start("k", effect)
    effect.wait_started()
    with pytest.raises(WaitTimeout):
        waiter.execute("k", never, policy=Policy(wait_timeout=0))
    assert not threads_that_listen()
    effect.release()


def threads_that_listen() -> list[str]:
    return [each.name for each in threading.enumerate() if each.name == "semel-wakeups"]


def test_nobody_listens_for_long_where_nobody_waits(monkeypatch, owner, waiter, pauses):
    monkeypatch.setattr(listening, "LINGER", 0.1)
    monkeypatch.setattr(listening, "CLEANUP", 0.05)
    for number in range(2):
        effect = Effect(number)
        waiter.store.calls.clear()
        owner.forget("k")
        with waited_for(owner, waiter, effect, pauses) as (_, waiting):
            effect.release()
            assert waiting.result(SOON) == number
        store = waiter.store.store
        listeners = listeners_of(getattr(store, "behind", store))
        wait_until(lambda listeners=listeners: all(each._subscriber is None for each in listeners))
    wait_until(lambda: not threads_that_listen())  # a thread ends after its connection


def test_a_store_that_is_closed_lets_go_of_whoever_waits(world, owner, waiter, pauses):
    effect = Effect()
    with waited_for(owner, waiter, effect, pauses, waiting_policy=Policy(wait_interval=0.01)) as (
        _,
        waiting,
    ):
        world.kind.finish(waiter.store.store.close)
        wait_until(waiting.done)
        assert waiting.exception() is not None
        effect.release()


# --- who is told ------------------------------------------------------------------------------


def wakes(world, engine) -> bool:
    store, identity = engine.store.store, Identity("s", "k")

    async def in_the_loop():
        return store.watch(identity) is not None

    if world.name == "threads":
        return store.watch(identity) is not None
    return world.kind.finish(in_the_loop)


def test_stores_offer_to_tell_where_they_can(world, owner, sqlite_url):
    assert wakes(world, owner)
    with World(world.name, sqlite_url) as other:
        assert not wakes(other, other.engine())


def test_tiers_tell_only_what_sql_tells(kind, redis_url, sqlite_url):
    with World(kind, redis_url, behind=sqlite_url, front_timeout=PATIENCE) as world:
        assert not wakes(world, world.engine())


def test_who_is_notified_asks_seldom_and_who_is_not_as_often_as_planned():
    listener = listening.Listener(None, "there")
    watch = listening.Watch(listener, b"k")
    assert watch.pause(0.05) == listening.SOON
    watch.listening = listening.Listening.YES
    assert listening.SAFETY / 2 <= watch.pause(0.05) <= listening.SAFETY
    assert watch.pause(60.0) == 60.0
    watch.listening = listening.Listening.NO
    assert watch.pause(0.05) == 0.05
