"""Threads that cannot be started for a moment, or whose start is interrupted.

| fault | expected |
|---|---|
| 45 a thread cannot be started (memory, pids) for a moment | nothing ran or it is protected; renewal works again afterwards |
"""

from __future__ import annotations

import itertools
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from engines.facade import PATIENCE, Effect, Stop, World, never, wait_until
from semel import Policy, State, StoreUnavailable, events
from semel.core.records import ClaimRequest, Identity
from semel.engine.colours.threads import Timer
from semel.repair import Reconciler, Succeeded
from semel.stores.urls import open_store
from semel.testing import LoseReply

fault = pytest.mark.fault

LEASE = 6.0
TAKEOVER = Policy(lease=LEASE)
HOLD = Policy(lease=LEASE, abandoned="hold")
NO_THREAD = RuntimeError("can't start new thread")


class Starts:
    """What becomes of the threads that are started meanwhile."""

    def __init__(self) -> None:
        self.failed = 0


@contextmanager
def failing_starts(
    name: str, error: BaseException, *, begun: bool = False, after: int = 0
) -> Iterator[Starts]:
    """Let no thread of this name start, `after` some; `begun`: it does, and is interrupted then."""
    starts, start = Starts(), threading.Thread.start
    fine = itertools.count(1)

    def fail(thread: threading.Thread) -> None:
        if thread.name != name or next(fine) <= after:
            start(thread)
            return
        if begun:
            start(thread)
        starts.failed += 1
        raise error

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(threading.Thread, "start", fail)
        yield starts


_others: set[threading.Thread] = set()


@pytest.fixture(autouse=True)
def _note_other_threads() -> None:
    """An engine of another test may still run a thread."""
    _others.clear()
    _others.update(threading.enumerate())


def threads_named(name: str) -> list[threading.Thread]:
    """The threads of this name that the test has brought about."""
    return [
        thread for thread in threading.enumerate() if thread.name == name and thread not in _others
    ]


@pytest.fixture
def world() -> Iterator[World]:
    with World("threads", "memory://") as opened:
        yield opened


def assert_renewed(world: World, engine: object) -> None:
    """Whatever happened before: an attempt that runs longer than its lease is not repeated."""
    effect = Effect("once").held()
    running = engine.start("long", effect)
    effect.wait_started()
    wait_until(lambda: engine.commands("renew_many"))
    waiting = world.engine(policy=TAKEOVER).start("long", never)
    effect.release()
    assert running.result(PATIENCE) == waiting.result(PATIENCE) == "once"
    assert effect.runs == 1


@fault(45)
@pytest.mark.parametrize("policy", [TAKEOVER, HOLD], ids=["takeover", "hold"])
@pytest.mark.parametrize("error", [NO_THREAD, MemoryError()], ids=["threads", "memory"])
def test_a_claim_that_no_thread_can_renew_is_given_back_before_anything_runs(world, policy, error):
    engine = world.engine(policy=policy)
    with failing_starts("semel-timer", error) as starts:
        with pytest.raises(StoreUnavailable, match="no thread could be started"):
            engine.execute("k", never)
        assert starts.failed == 1
        record = engine.peek("k")
    assert record.state is State.FAILED
    assert record.retryable
    assert engine.execute("k", Effect("now"), policy=Policy(lease=60)) == "now"
    assert_renewed(world, engine)


@fault(45)
def test_without_a_thread_a_policy_that_prefers_to_run_unprotected_says_so(world):
    engine = world.engine(policy=Policy(lease=LEASE, store_error="open"))
    with failing_starts("semel-timer", NO_THREAD):
        assert engine.execute("k", Effect("unprotected")) == "unprotected"
    assert len(engine.told(events.RanUnprotected)) == 1
    assert_renewed(world, engine)


@fault(45)
@pytest.mark.parametrize("begun", [False, True], ids=["before", "after"])
def test_a_signal_while_the_timer_starts_does_not_switch_renewal_off(world, begun):
    engine = world.engine(policy=HOLD)
    with failing_starts("semel-timer", Stop(), begun=begun), pytest.raises(Stop):
        engine.execute("k", never)
    assert engine.execute("k", Effect("now")) == "now", "the claim was given back"
    assert_renewed(world, engine)
    engine.close()
    wait_until(lambda: not threads_named("semel-timer"))


@fault(45)
def test_a_claim_of_unknown_fate_is_given_back_when_a_thread_can_be_started_again(world):
    engine = world.engine(policy=HOLD)
    engine.store.inject("claim", LoseReply())
    with failing_starts("semel-timer", NO_THREAD) as starts:
        with pytest.raises(StoreUnavailable, match="cut"):
            engine.execute("k", never)
        assert starts.failed == 1
    assert engine.peek("k").state is State.PROCESSING
    assert engine.execute("another", Effect("done")) == "done"
    wait_until(lambda: engine.peek("k").state is State.FAILED)


@fault(45)
def test_without_a_thread_that_watches_leases_are_renewed_all_the_same(world):
    engine = world.engine(policy=Policy(lease=1.0))  # nobody else wants the key
    effect = Effect("once").held()
    running = engine.start("k", effect)
    effect.wait_started()
    engine.break_renewals()
    wait_until(lambda: engine.told(events.LostLease) and len(threads_named("semel-timer")) == 1)
    with failing_starts("semel-timer", NO_THREAD) as starts:
        engine.store.heal()
        renewals = engine.commands("renew_many")
        wait_until(lambda: starts.failed and engine.commands("renew_many") >= renewals + 3)
    effect.release()
    assert running.result(PATIENCE) == "once"


@fault(45)
def test_a_server_whose_thread_cannot_be_started_is_renewed_when_it_can(world):
    engine = world.engine(policy=TAKEOVER)
    engine.store.server_of = lambda identity: "node"  # as the nodes of a cluster
    effect = Effect("once").held()
    with failing_starts("semel-timer", NO_THREAD, after=2) as starts:
        running = engine.start("k", effect)
        wait_until(lambda: starts.failed)
    wait_until(lambda: engine.commands("renew_many"))
    effect.release()
    assert running.result(PATIENCE) == "once"


def test_an_attempt_that_a_hook_interrupts_before_it_runs_gives_its_claim_back(kind, request):
    owner = Identity("default", "k")
    interrupted = []

    def strike(*_: object) -> None:
        raise Stop

    # What a signal handler raises gets out of a hook.
    before = signal.signal(signal.SIGUSR1, strike)
    request.addfinalizer(lambda: signal.signal(signal.SIGUSR1, before))

    def interrupt(event: events.Event) -> None:
        if isinstance(event, events.TakenOver) and not interrupted:
            interrupted.append(event)
            strike(signal.SIGUSR1, None)

    with World(kind, "memory://") as world:
        engine = world.engine(policy=TAKEOVER)
        engine.ask_store("claim", ClaimRequest(owner, b"gone", None, 60.0, 60.0))
        engine.ask_store("renew", owner, b"gone", 0.0)  # its owner has crashed
        engine.engine.internals.announce._hooks += (interrupt,)
        with pytest.raises(Stop):
            engine.execute("k", never)
        assert interrupted
        wait_until(lambda: engine.peek("k").state is State.FAILED)
        assert len(engine.engine.internals.leases) == 0, "nothing is renewed for which nothing runs"
        assert engine.execute("k", Effect("now")) == "now"


def test_a_hook_that_exits_in_the_thread_of_the_timer_does_not_switch_renewal_off(world, caplog):
    engine = world.engine(policy=Policy(lease=1.0))

    def exits(event: events.Event) -> None:
        if isinstance(event, events.RenewalFailed):
            raise SystemExit

    engine.engine.internals.announce._hooks += (exits,)
    effect = Effect("once").held()
    running = engine.start("k", effect)
    effect.wait_started()
    engine.break_renewals(times=1)
    wait_until(lambda: engine.commands("renew_many") >= 3)
    assert engine.renewals_failed() == 1
    assert "a hook failed on RenewalFailed" in caplog.text
    effect.release()
    assert running.result(PATIENCE) == "once"


def test_a_timer_that_is_stopped_while_it_is_asked_to_come_does_not_start_again():
    asked = threading.Event()

    class Due(float):
        """A time; it tells when it is compared for the first time."""

        def __lt__(self, other: float) -> bool:
            asked.set()
            return super().__lt__(other)

    timer = Timer(never)
    asking = threading.Thread(target=timer.due, args=(Due(1.0),))
    with timer._lock:
        asking.start()
        assert asked.wait(PATIENCE)
        timer.stop()
    asking.join(PATIENCE)
    assert timer._thread is None


# --- the other threads of the library ----------------------------------------------------------


def test_a_reconciler_whose_thread_could_not_be_started_can_be_started_later():
    store, key = open_store("memory://"), Identity("orders", "a")
    made = Reconciler(store, {"orders": lambda _: Succeeded("found")}, older_than=0, every=0.01)
    for begun in (False, True):
        with failing_starts("semel-reconciler", Stop(), begun=begun), pytest.raises(Stop):
            made.start()
        wait_until(lambda: not threads_named("semel-reconciler"))
    made.stop()  # nothing runs: harmless
    made.start()
    store.claim(ClaimRequest(key, b"gone", None, 600.0, 600.0, hold=True))
    store.renew(key, b"gone", 0.0)
    wait_until(lambda: store.get(key).state is State.SUCCEEDED)
    made.close()
