"""Closing: running calls end and save, new ones are refused, and only what was opened is closed."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time

import pytest
from msgspec import UNSET

from engines.facade import PATIENCE, Effect, World, held_up, never, wait_until
from semel import (
    AsyncIdempotency,
    ConfigError,
    Idempotency,
    Policy,
    State,
    StoreUnavailable,
    events,
)
from semel.core.records import CompleteRequest
from semel.testing import Refuse


@pytest.fixture
def idem(memory_world):
    return memory_world.engine()


def test_a_closed_engine_refuses_new_calls(idem):
    idem.execute("k", lambda: 1)
    idem.close()
    for method in (idem.execute, idem.run, idem.consume):
        with pytest.raises(StoreUnavailable, match="this engine was closed"):
            method("new", never)
    with pytest.raises(StoreUnavailable, match="this engine was closed"):
        idem.execute("k", never)
    assert idem.ask_store("get", idem.engine.internals.setup.identity("new", "default")) is None


def test_closing_twice_is_closing_once(idem):
    idem.close()
    idem.close()


def test_closing_waits_for_what_runs_and_saves_it(idem):
    effect = Effect().held()
    running = idem.start("k", effect)
    effect.wait_started()
    closing = threading.Thread(target=idem.close, kwargs={"timeout": 60})
    closing.start()
    wait_until(lambda: idem.engine.internals.closed)
    with pytest.raises(StoreUnavailable):
        idem.execute("other", never)
    assert closing.is_alive()
    effect.release()
    closing.join()
    assert running.result() == "done"
    assert idem.peek("k").state is State.SUCCEEDED


def test_what_still_runs_after_the_timeout_is_renewed_no_more_but_may_save(idem):
    effect = Effect().held()
    running = idem.start("k", effect, policy=Policy(lease=0.1))
    effect.wait_started()
    wait_until(lambda: idem.commands("renew", "renew_many"))
    idem.close(timeout=0.01)
    wait_until(lambda: idem.peek("k").abandoned)
    effect.release()
    assert running.result() == "done"
    assert idem.peek("k").state is State.SUCCEEDED, "nobody took it over"


def test_nothing_ticks_after_closing_even_if_a_late_result_cannot_be_saved(idem, monkeypatch):
    monkeypatch.setattr("semel.engine.outcomes.SAVE_FOR", 0.01)
    effect = Effect().held()
    running = idem.start("k", effect, policy=Policy(lease=0.1))
    effect.wait_started()
    idem.close(timeout=0)
    idem.store.inject("complete", Refuse(), times=1000)
    effect.release()
    assert running.result() == "done"
    wait_until(lambda: idem.told(events.ResultNotStored))
    calls = len(idem.store.calls)
    threading.Event().wait(0.1)
    assert len(idem.store.calls) == calls


def test_closing_tries_once_more_to_save_what_could_not_be_saved(idem, monkeypatch):
    monkeypatch.setattr("semel.engine.outcomes.SAVE_FOR", 0.01)
    idem.store.inject("complete", Refuse(), times=1000)
    assert idem.execute("k", lambda: "paid") == "paid"
    assert len(idem.told(events.ResultNotStored)) == 1
    idem.store.heal()
    idem.close()
    assert len(idem.told(events.ResultStoredLate)) == 1
    assert idem.peek("k").state is State.SUCCEEDED


def test_closing_gives_up_on_a_store_that_stays_down(idem, monkeypatch):
    monkeypatch.setattr("semel.engine.outcomes.SAVE_FOR", 0.01)
    idem.store.inject("complete", Refuse(), times=1000)
    assert idem.execute("k", lambda: "paid") == "paid"
    idem.close()
    idem.store.heal()
    assert idem.peek("k").state is State.PROCESSING


@pytest.mark.parametrize("timeout", [-1, "soon", None])
def test_a_bad_timeout_is_refused(idem, timeout):
    with pytest.raises(ConfigError, match="timeout"):
        idem.close(timeout=timeout)


# --- whoever opened it closes it -----------------------------------------------------------


def closings(store, monkeypatch):
    """Count how often a store is closed."""
    counted = []
    close = store.close

    def closing():
        counted.append(1)
        return close()

    monkeypatch.setattr(store, "close", closing)
    return counted


def test_a_store_opened_by_url_is_closed(kind, sqlite_url, monkeypatch):
    with World(kind, "memory://") as world:
        engine = world.kind.engine(sqlite_url)
        closed = closings(engine.internals.store, monkeypatch)
        world.kind.call(engine.execute, "k", lambda: 1)
        world.kind.finish(engine.close)
        assert closed == [1]


def test_a_store_that_was_given_stays_open(kind, sqlite_url, monkeypatch):
    with World(kind, "memory://") as world:
        store = world.kind.open_store(sqlite_url)
        closed = closings(store, monkeypatch)
        engine = world.kind.engine(store)
        world.kind.call(engine.execute, "k", lambda: 1)
        world.kind.finish(engine.close)
        assert closed == []
        another = world.kind.engine(store)
        assert world.kind.call(another.execute, "k", never) == 1
        world.kind.finish(another.close)
        world.kind.finish(store.close)


def test_an_engine_is_a_context_manager(sqlite_url):
    with Idempotency(sqlite_url) as idem:
        assert idem.execute("k", lambda: 1) == 1
    with pytest.raises(StoreUnavailable):
        idem.execute("k", never)


async def test_an_async_engine_is_an_async_context_manager(sqlite_url):
    async def one():
        return 1

    async with AsyncIdempotency(sqlite_url) as idem:
        assert await idem.execute("k", one) == 1
    with pytest.raises(StoreUnavailable):
        await idem.execute("k", one)


def test_an_error_inside_closes_too_and_is_not_hidden():
    with pytest.raises(ZeroDivisionError), Idempotency("memory://") as idem:
        idem.execute("k", lambda: 1 / 0)
    with pytest.raises(StoreUnavailable):
        idem.execute("k", never)


def test_the_timer_of_an_idle_engine_ends_by_itself():
    with Idempotency("memory://", policy=Policy(lease=0.1)) as idem:
        idem.execute(
            "k", lambda: wait_until(lambda: idem.internals.renewer.timer._thread is not None)
        )
        wait_until(lambda: all(thread.name != "semel-timer" for thread in threading.enumerate()))


# --- closing from within: by the function itself, or by a signal handler ------------------------


@pytest.mark.parametrize("nested", [False, True])
def test_a_function_that_closes_its_engine_is_saved_before_the_store_is_closed(
    sqlite_url, monkeypatch, nested
):
    idem = Idempotency(sqlite_url)
    closed = closings(idem.internals.store, monkeypatch)

    def work():
        idem.close()
        assert idem.internals._closing.is_alive()
        assert closed == [], "it waits for the function"
        return "paid"

    def outer():
        return idem.execute("inner", work)

    assert idem.execute("k", outer if nested else work) == "paid"
    idem.internals._closing.join(PATIENCE)
    assert closed == [1]
    with Idempotency(sqlite_url) as again:
        assert again.execute("k", never) == "paid"


async def test_an_async_function_that_closes_its_engine_is_saved_before_the_store_is_closed(
    sqlite_url, monkeypatch
):
    idem = AsyncIdempotency(sqlite_url)
    closed = closings(idem.internals.store, monkeypatch)

    async def work():
        await idem.close()
        assert closed == []
        return "paid"

    assert await idem.execute("k", work) == "paid"
    await idem.internals._closing
    assert closed == [1]
    async with AsyncIdempotency(sqlite_url) as again:
        assert await again.execute("k", work) == "paid"


@pytest.mark.parametrize("during", ["function", "complete"])
def test_a_signal_handler_may_close_the_engine_of_the_call_it_interrupts(
    sqlite_url, monkeypatch, during
):
    idem = Idempotency(sqlite_url)
    closed = closings(idem.internals.store, monkeypatch)
    ask = idem.internals.store.ask

    def terminate():
        before = signal.signal(signal.SIGTERM, lambda *_: idem.close())
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            signal.signal(signal.SIGTERM, before)
        assert idem.internals.closed
        assert closed == []

    def terminated_complete(request):
        if isinstance(request, CompleteRequest):
            terminate()
        return ask(request)

    def work():
        if during == "function":
            terminate()
        return "paid"

    if during == "complete":
        monkeypatch.setattr(idem.internals.store, "ask", terminated_complete)
    assert idem.execute("k", work) == "paid"
    wait_until(lambda: closed == [1])
    with Idempotency(sqlite_url) as again:
        assert again.execute("k", never) == "paid"


def test_closing_does_not_wait_for_an_attempt_that_nobody_can_end_any_more():
    idem = Idempotency("memory://")
    call = idem.internals.setup.call("k", "default", UNSET, idem.internals.setup.rules("default"))
    idem.internals.begin(call)
    assert idem.internals.leases.running()
    del call
    assert not idem.internals.leases.running()
    started = time.monotonic()
    idem.close(timeout=60)
    assert time.monotonic() - started < 30


# --- closing while a claim is on its way, or while a call waits ----------------------------------


def closing_of(idem, **options):
    """Close in a thread of its own, until new calls are refused."""
    closing = threading.Thread(target=idem.close, kwargs=options)
    closing.start()
    wait_until(lambda: idem.engine.internals.closed)
    return closing


@pytest.mark.parametrize("answer", ["closed", "open"])
def test_a_claim_that_is_answered_after_closing_began_is_given_back(memory_world, answer):
    idem, other = memory_world.engine(), memory_world.engine()
    policy = Policy(lease=60, store_error=answer, concurrent="reject", abandoned="hold")
    gate = held_up(idem, "claim")
    running = idem.start("k", never, policy=policy)
    gate.wait()
    closing = closing_of(idem, timeout=60)
    assert closing.is_alive(), "it waits for the claim"
    gate.open()
    with pytest.raises(StoreUnavailable, match="this engine was closed"):
        running.result(PATIENCE)
    closing.join()
    assert other.execute("k", lambda: "paid", policy=policy) == "paid", "at once: nothing ran"


def test_a_claim_that_is_answered_after_the_engine_was_closed_starts_nothing(memory_world):
    idem, other = memory_world.engine(), memory_world.engine()
    gate = held_up(idem, "claim")
    running = idem.start("k", never, policy=Policy(lease=60))
    gate.wait()
    idem.close(timeout=0)
    gate.open()
    with pytest.raises(StoreUnavailable, match="this engine was closed"):
        running.result(PATIENCE)
    wait_until(lambda: other.peek("k").state is State.FAILED)
    assert other.execute("k", lambda: "paid") == "paid"


def test_a_call_that_waits_when_the_engine_is_closed_starts_nothing(memory_world):
    idem, other = memory_world.engine(), memory_world.engine()
    effect, patient = Effect(raising=ValueError("no")).held(), Policy(failure="retryable")
    running = other.start("k", effect, policy=patient)
    effect.wait_started()
    waiting = idem.start("k", never, policy=patient)
    wait_until(lambda: idem.commands("claim"))
    idem.close(timeout=0)
    effect.release()
    with pytest.raises(ValueError, match="no"):
        running.result(PATIENCE)
    with pytest.raises(StoreUnavailable, match="this engine was closed"):
        waiting.result(PATIENCE)
    assert other.execute("k", lambda: "paid", policy=patient) == "paid"


def test_calls_of_another_engine_on_the_same_store_go_on_when_their_leader_is_closed(memory_world):
    idem = memory_world.engine()
    other = memory_world.engine_on(idem.store)
    gate = held_up(idem, "claim")
    leading = idem.start("k", never)
    gate.wait()
    following = other.start("k", lambda: "paid")
    wait_until(lambda: other.sharers() == 1)
    closing = closing_of(idem, timeout=60)
    gate.open()
    with pytest.raises(StoreUnavailable, match="this engine was closed"):
        leading.result(PATIENCE)
    closing.join()
    assert following.result(PATIENCE) == "paid"


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_signal_handler_may_close_the_engine_whose_claim_it_interrupts(
    sqlite_url, monkeypatch, when
):
    idem = Idempotency(sqlite_url)
    closed = closings(idem.internals.store, monkeypatch)
    ask = idem.internals.store.ask

    def terminate():
        monkeypatch.setattr(idem.internals.store, "ask", ask)
        before = signal.signal(signal.SIGTERM, lambda *_: idem.close(timeout=0))
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            signal.signal(signal.SIGTERM, before)
        assert idem.internals._closing.is_alive()
        assert closed == [], "it waits for the claim"

    def terminated_claim(request):
        if when == "before":
            terminate()
            return ask(request)
        answer = ask(request)
        terminate()
        return answer

    monkeypatch.setattr(idem.internals.store, "ask", terminated_claim)
    with pytest.raises(StoreUnavailable, match="this engine was closed"):
        idem.execute("k", never, policy=Policy(lease=60))
    idem.internals._closing.join(PATIENCE)
    assert closed == [1]
    with Idempotency(sqlite_url) as again:
        assert again.execute("k", lambda: "paid", policy=Policy(concurrent="reject")) == "paid"


# --- attempts that are never left ---------------------------------------------------------------

NEVER_LEFT = """
import {imports}
from semel import Idempotency

idem = Idempotency("memory://")
idem.internals.store.close = lambda: print("closed")

def enter(close=lambda: idem.close(timeout=0.2)):
    global context
    context = idem.attempt("k")
    context.__enter__()
    close()

{run}
print("left")
"""


@pytest.mark.parametrize(
    ("imports", "run"),
    [
        ("threading", "enter()"),
        ("threading", "one = threading.Thread(target=enter); one.start(); one.join()"),
        (
            "threading, time",
            """threading.Thread(target=lambda: (enter(), time.sleep(3600)), daemon=True).start()
while not hasattr(idem.internals, "_closing"): time.sleep(0.01)""",
        ),
        ("atexit", "atexit.register(idem.close, timeout=0.2); enter(close=lambda: None)"),
    ],
    ids=["main thread", "thread that ends", "daemon thread", "atexit"],
)
def test_an_attempt_that_is_never_left_does_not_keep_the_process_alive(imports, run):
    script = NEVER_LEFT.format(imports=imports, run=run)
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=PATIENCE, check=True
    )
    assert sorted(ended.stdout.split()) == ["closed", "left"], ended.stderr


def test_closing_inside_a_function_when_no_thread_can_be_started_closes_there(monkeypatch):
    idem = Idempotency("memory://")

    def no_thread(thread):
        raise RuntimeError("can't start new thread")

    def work():
        monkeypatch.setattr(threading.Thread, "start", no_thread)
        idem.close(timeout=0)
        monkeypatch.undo()
        return "paid"

    assert idem.execute("k", work) == "paid"
    with pytest.raises(StoreUnavailable):
        idem.execute("k", never)
