"""The store cannot be reached before or while a function runs.

| fault | expected |
|---|---|
| 10 renewal fails for good | the function is signalled before the lease ends; then as 8 |
| 26 no connection at the claim | StoreUnavailable, nothing ran; store_error=open: runs, loudly |

Redis has no free connection, stands still (SIGSTOP) or is killed; an SQLite file is locked by
another connection. A memory store cannot be out of reach.
"""

from __future__ import annotations

import signal
import threading
import time

import pytest

from engines.facade import PATIENCE, Effect, World, never, wait_until
from faults.outages import short_of_time
from semel import (
    ConcurrentRequest,
    LeaseLost,
    Policy,
    StoreUnavailable,
    current_attempt,
    events,
)
from semel.core.records import Identity
from semel.testing import Refuse

fault = pytest.mark.fault


# --- at the claim -----------------------------------------------------------------------------


@fault(26)
def test_without_a_connection_at_the_claim_nothing_runs(outage):
    with outage.during(), pytest.raises(StoreUnavailable):
        outage.engine.execute("k", never)
    assert outage.engine.told(events.StoreFailed)
    effect = Effect()
    assert outage.engine.execute("k", effect) == "done"
    assert effect.runs == 1


@fault(26)
def test_without_a_connection_at_the_claim_an_open_policy_runs_and_says_so_loudly(outage):
    effect = Effect()
    with outage.during():
        assert outage.engine.execute("k", effect, policy=Policy(store_error="open")) == "done"
    assert effect.runs == 1
    (told,) = outage.engine.told(events.RanUnprotected)
    assert told.level >= 40
    assert outage.engine.peek("k") is None


# --- at the renewal ---------------------------------------------------------------------------


class Worker:
    """A function that works until its lease is lost, tells so, and ends when it may."""

    def __init__(self) -> None:
        self.began = threading.Event()
        self.heard = threading.Event()
        self.may_end = threading.Event()

    def __call__(self):
        attempt = current_attempt()
        self.began.set()
        while True:
            look = time.monotonic()
            if attempt.lost:
                break
            unaware = look
            time.sleep(0.005)
        with pytest.raises(LeaseLost):
            attempt.check()
        # However slow this machine is, it never looked so late in vain.
        self.in_time = unaware < attempt.lease.until - 0.05 * attempt.lease.seconds
        self.heard.set()
        assert self.may_end.wait(PATIENCE)
        return "worked on"

    def wait_told(self, engine):
        assert self.heard.wait(PATIENCE)
        assert engine.told(events.RenewalFailed), "the fault did not fire"
        assert self.in_time, "it was signalled when others may run already"
        wait_until(lambda: engine.told(events.LostLease))


@fault(10)
def test_a_function_whose_lease_cannot_be_renewed_is_told_in_time_and_saved_if_nobody_came(
    outage, shared
):
    work = Worker()
    running = outage.engine.start("k", work, policy=Policy(lease=2.0))
    assert work.began.wait(PATIENCE)
    with outage.during():
        work.wait_told(outage.engine)
    work.may_end.set()
    assert running.result(PATIENCE) == "worked on"
    assert shared.engine().execute("k", never) == "worked on"


@fault(10)
def test_a_function_is_told_in_time_that_redis_stands_still_and_gives_way_to_a_successor(
    kind, own_server
):
    with World(kind, own_server.url) as world, short_of_time(world) as engine:
        successor = world.engine()
        work = Worker()
        running = engine.start("k", work, policy=Policy(lease=2.0))
        assert work.began.wait(PATIENCE)
        own_server.process.send_signal(signal.SIGSTOP)
        work.wait_told(engine)
        engine.break_renewals()  # or the first one after the pause may be quicker than the other
        own_server.process.send_signal(signal.SIGCONT)
        assert successor.execute("k", Effect("by the successor")) == "by the successor"
        work.may_end.set()
        with pytest.raises(LeaseLost):
            running.result(PATIENCE)
        assert engine.execute("k", never) == "by the successor"


@fault(10)
def test_a_function_is_told_in_time_that_redis_was_killed_and_its_claim_is_gone_with_it(
    kind, own_server
):
    with World(kind, own_server.url) as world, short_of_time(world) as engine:
        work = Worker()
        running = engine.start("k", work, policy=Policy(lease=2.0))
        assert work.began.wait(PATIENCE)
        own_server.kill()
        work.wait_told(engine)
        own_server.restart()
        work.may_end.set()
        with pytest.raises(LeaseLost):
            running.result(PATIENCE)
        assert engine.peek("k") is None


@fault(10)
def test_hooks_hear_in_time_that_a_lease_is_lost_although_the_renewal_hangs(kind, own_server):
    with World(kind, own_server.url) as world:
        engine = world.engine()  # it waits for its store for longer than the lease
        work = Worker()
        work.may_end.set()
        running = engine.start("k", work, policy=Policy(lease=1.5))
        assert work.began.wait(PATIENCE)
        own_server.process.send_signal(signal.SIGSTOP)
        assert work.heard.wait(PATIENCE)
        time.sleep(0.1)
        told = engine.told(events.LostLease)
        own_server.process.send_signal(signal.SIGCONT)
        assert running.result(PATIENCE) == "worked on"
        assert work.in_time
        assert told, "the function could have known, the hooks were not told"


# --- the lease ends, and the process that lost it gets the key again --------------------------


@fault(10)
@pytest.mark.parametrize("saving", [False, True], ids=["running", "saving"])
def test_a_process_does_not_take_over_its_own_attempt(shared, saving):
    engine = shared.engine()
    began, may_end = threading.Event(), threading.Event()

    def work():
        began.set()
        assert saving or may_end.wait(PATIENCE)

    if saving:  # the function ends, and its result cannot be saved until the end of this test
        engine.store.inject("complete", Refuse(), times=1_000_000)
    engine.break_renewals()
    running = engine.start_consuming("k", work, policy=Policy(lease=0.5, store_timeout=0.1))
    assert began.wait(PATIENCE)
    wait_until(lambda: engine.ask_store("get", Identity("default", "k")).abandoned)
    with pytest.raises(ConcurrentRequest) as rejected:
        engine.consume("k", never)
    assert rejected.value.retry_after == 1.0
    waiting = engine.start("k", never)
    if not saving:
        assert engine.consume("other", Effect()) is True  # another key is not held up
    engine.store.heal()
    may_end.set()
    assert running.result(PATIENCE) is True
    assert waiting.result(PATIENCE) is None


@fault(10)
def test_another_process_takes_over_what_a_process_keeps_from_itself(shared):
    engine, successor = shared.engine(), shared.engine()
    began, may_end = threading.Event(), threading.Event()

    def work():
        began.set()
        assert may_end.wait(PATIENCE)

    engine.break_renewals()
    running = engine.start_consuming("k", work, policy=Policy(lease=0.5))
    assert began.wait(PATIENCE)
    wait_until(lambda: engine.ask_store("get", Identity("default", "k")).abandoned)
    with pytest.raises(ConcurrentRequest):
        engine.consume("k", never)
    assert successor.consume("k", Effect()) is True
    may_end.set()
    with pytest.raises(LeaseLost):
        running.result(PATIENCE)
    assert engine.consume("k", never) is False


@fault(10)
def test_a_claim_that_is_granted_late_replaces_no_attempt_that_runs_here(shared):
    engine, other = shared.engine(), shared.engine()
    effect = Effect().held()
    engine.break_renewals()
    running = engine.start_consuming("k", effect, policy=Policy(lease=2))
    effect.wait_started()
    # The claim is on its way when the lease ends.
    engine.store.before["claim"] = lambda: wait_until(lambda: other.peek("k").abandoned)
    with pytest.raises(ConcurrentRequest):
        engine.consume("k", never)
    assert other.peek("k").number == 1, "nothing has run, so nothing is counted"
    effect.release()
    with pytest.raises(LeaseLost):
        running.result(PATIENCE)
    assert engine.consume("k", effect) is True


@fault(10)
def test_an_attempt_whose_record_is_gone_keeps_the_key_from_its_own_process(shared):
    engine, other = shared.engine(), shared.engine()
    effect = Effect().held()
    running = engine.start_consuming("k", effect, policy=Policy(lease=1))
    effect.wait_started()
    other.forget("k")
    wait_until(lambda: engine.told(events.LostLease))
    with pytest.raises(ConcurrentRequest):
        engine.consume("k", never)
    effect.release()
    with pytest.raises(LeaseLost):
        running.result(PATIENCE)
    assert engine.consume("k", effect) is True
