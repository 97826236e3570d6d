"""A tally counts every event exactly, in any thread, beside forks and signals; and few labels."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from engines.facade import KINDS, PATIENCE, Effect, World, never, wait_until
from measuring import unmeasured
from observe.counting import CALLS, CALLS_OF_A_CHILD, FORKS, THREADS
from semel import Idempotency, Policy, events
from semel.core.records import Identity
from semel.errors import PayloadMismatch
from semel.observe import Histogram, Tally
from semel.observe.tally import (
    EVENT_NAMES,
    MOST_SCOPES,
    OTHER,
    RUN_BUCKETS,
    STORE_BUCKETS,
    ScopeLabels,
    _Scope,
)
from semel.repair import Succeeded, settle
from stores.sqlite_helpers import in_a_fork

HERE = Path(__file__).parent


def event_of(scope: str, kind: type[events.Event] = events.RejectedBusy, **fields) -> events.Event:
    return kind(identity=Identity(scope, "k"), **fields)


def counted(tally: Tally, scope: str) -> dict[str, int]:
    """What happened in a scope, without what did not."""
    return {name: count for name, count in tally.totals().events[scope].items() if count}


@pytest.fixture(params=KINDS)
def world(request):
    with World(request.param, "memory://") as opened:
        yield opened


# --- what is counted -------------------------------------------------------------------------


def test_calls_of_an_engine_are_counted_by_scope_and_event(world):
    idem, tally = world.engine(), Tally()
    for key in ("a", "b"):
        idem.execute(key, lambda: "paid", scope="payments")
    idem.execute("a", never, scope="payments")
    idem.execute("a", lambda: "sent", scope="mails", payload=1)
    with pytest.raises(PayloadMismatch):
        idem.execute("a", never, scope="mails", payload=2)
    for event in idem.events:
        tally(event)
    assert counted(tally, "payments") == {"Ran": 2, "Replayed": 1}
    assert counted(tally, "mails") == {"Ran": 1, "Mismatched": 1}
    totals = tally.totals()
    assert totals.result_bytes == {"payments": 12, "mails": 6}
    assert {scope: run.count for scope, run in totals.run_seconds.items()} == {
        "payments": 2,
        "mails": 1,
    }
    # A mismatch says nothing about how long the store took.
    assert {scope: store.count for scope, store in totals.store_seconds.items()} == {
        "payments": 3,
        "mails": 1,
    }


def test_one_tally_serves_engines_of_both_kinds():
    tally = Tally()
    for kind in KINDS:
        with World(kind, "memory://") as world:
            engine = world.kind.engine(world._store(), hooks=[tally])
            world.kind.call(engine.execute, "a", lambda: 1, scope="shop")
            world.kind.finish(engine.close)
    assert counted(tally, "shop") == {"Ran": 2}


def test_replays_that_did_not_ask_the_store_say_nothing_of_its_speed(world):
    idem, tally = world.engine(), Tally()
    effect = Effect().held()
    first = idem.start("a", effect, scope="shop")
    effect.wait_started()
    second = idem.start("a", never, scope="shop")
    wait_until(idem.sharers)
    effect.release()
    assert first.result(PATIENCE) == second.result(PATIENCE)
    for event in idem.events:
        tally(event)
    assert counted(tally, "shop") == {"Ran": 1, "Replayed": 1}
    assert tally.totals().store_seconds["shop"].count == 1


def test_seconds_are_in_the_bucket_whose_bound_they_do_not_pass():
    tally = Tally()
    took = (0.0, RUN_BUCKETS[0], 0.006, RUN_BUCKETS[-1], RUN_BUCKETS[-1] + 1)
    for seconds in took:
        tally(event_of("shop", events.Ran, seconds=seconds, size=0, store_seconds=seconds))
    tally(event_of("shop", events.Ran, seconds=0.0, size=0))
    totals = tally.totals()
    run, store = totals.run_seconds["shop"], totals.store_seconds["shop"]
    assert run.counts[:2] == (3, 1)
    assert run.counts[-2:] == (1, 1)
    assert (run.count, run.sum) == (6, sum(took))
    assert run.cumulative()[:2] == (3, 4)
    assert run.cumulative()[-1] == run.count
    assert store.count == len(took)
    slow = sum(seconds > STORE_BUCKETS[-1] for seconds in took)
    assert store.counts[-1] == slow > 0
    assert (store.cumulative()[-1], store.sum) == (store.count, sum(took))
    assert store.bounds == STORE_BUCKETS


def test_a_histogram_is_a_value():
    assert Histogram((1.0,), (2, 3), 9.0) == Histogram((1.0,), (2, 3), 9.0)


# --- labels ----------------------------------------------------------------------------------


def test_a_scope_that_was_seen_has_a_number_for_every_event():
    tally = Tally()
    tally(event_of("shop"))
    assert tuple(tally.totals().events["shop"]) == EVENT_NAMES
    announced = {
        kind.__name__
        for kind in vars(events).values()
        if isinstance(kind, type) and issubclass(kind, events.Event)
    }
    assert set(EVENT_NAMES) == announced - {"Event"}


def test_after_a_hundred_scopes_all_further_ones_are_counted_together():
    tally = Tally()
    for number in range(MOST_SCOPES + 50):
        for _ in range(2):
            tally(event_of(f"tenant-{number}", events.Ran, seconds=1, size=3, store_seconds=1))
    totals = tally.totals()
    assert set(totals.events) == {*(f"tenant-{number}" for number in range(100)), "(other)"}
    assert OTHER == "(other)"
    assert totals.events["tenant-99"]["Ran"] == 2
    assert totals.events[OTHER]["Ran"] == 100
    assert totals.result_bytes[OTHER] == 300
    tally(event_of("tenant-0", events.Parked, error="OSError"))
    assert counted(tally, "tenant-0") == {"Ran": 2, "Parked": 1}


def test_threads_that_name_the_last_scope_at_once_name_it_alike():
    labels = ScopeLabels()
    for number in range(MOST_SCOPES - 1):
        labels(f"tenant-{number}")
    # Both have seen that it is new before one of them has named it.
    assert [labels._named("last") for _ in range(2)] == ["last", "last"]
    assert labels("further") == OTHER


def test_a_signal_handler_may_begin_a_scope_while_the_totals_are_read(monkeypatch):
    tally = Tally()
    tally(event_of("shop"))
    by_name = _Scope.by_name

    def interrupted(self):
        tally(event_of(f"new-{len(tally._scopes)}"))
        return by_name(self)

    monkeypatch.setattr(_Scope, "by_name", interrupted)
    assert tally.totals().events.keys() == {"shop"}
    assert tally.totals().events.keys() == {"shop", "new-1"}


def test_decisions_about_stuck_records_are_counted(sqlite_url):
    tally = Tally()
    with Idempotency(sqlite_url, hooks=[tally]) as idem:
        with pytest.raises(TimeoutError):
            idem.execute("k", Effect(raising=TimeoutError()), policy=Policy(abandoned="hold"))
        settle(idem, "k", Succeeded("paid"), ttl=3600)
    assert counted(tally, "default") == {"Parked": 1, "Resolved": 1}


def test_an_event_of_your_own_is_counted_by_its_name():
    class Audited(events.Event, frozen=True, kw_only=True):
        pass

    tally = Tally()
    tally(event_of("shop", Audited))
    assert counted(tally, "shop") == {"Audited": 1}


# --- threads, forks, signals -----------------------------------------------------------------


def test_eight_threads_with_ten_thousand_calls_each_are_counted_exactly():
    tally = Tally()
    with Idempotency("memory://", hooks=[tally]) as idem:
        begin = threading.Barrier(8)

        def work(number):
            begin.wait()
            for call in range(10_000):
                idem.execute(f"{number}:{call % 100}", lambda: "done", scope=f"shop-{call % 2}")

        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        before = sys.getswitchinterval()
        sys.setswitchinterval(1e-5)
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            sys.setswitchinterval(before)
    for scope in ("shop-0", "shop-1"):
        assert counted(tally, scope) == {"Ran": 400, "Replayed": 39_600}
        assert tally.totals().run_seconds[scope].count == 400
        assert tally.totals().store_seconds[scope].count == 40_000
        assert tally.totals().result_bytes[scope] == 400 * len('"done"')


@pytest.mark.parametrize("step", [lambda tally: tally(event_of("shop")), Tally.totals])
def test_counting_and_reading_wait_for_each_other(step):
    tally = Tally()
    tally(event_of("shop"))
    done = threading.Event()
    with tally._counted.lock:
        thread = threading.Thread(target=lambda: (step(tally), done.set()))
        thread.start()
        # The thread has come as far as it can; no time is long enough to see that it never ends.
        assert not done.wait(0.05)
    assert done.wait(PATIENCE)
    thread.join()


def test_a_signal_handler_may_count_while_its_thread_does():
    tally = Tally()
    with tally._counted.lock:
        tally(event_of("shop"))
    assert counted(tally, "shop") == {"RejectedBusy": 1}


def test_a_forked_child_begins_with_nothing():
    tally = Tally()
    tally(event_of("shop"))
    assert in_a_fork(lambda: tally.totals().events) == "{}"
    assert counted(tally, "shop") == {"RejectedBusy": 1}


@pytest.mark.timeout(180)
def test_a_process_that_forks_while_its_threads_count_loses_nothing_and_counts_nothing_twice():
    ran = subprocess.run(
        [sys.executable, HERE / "counting.py", "tally"],
        capture_output=True,
        text=True,
        env=unmeasured(),
        timeout=150,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    children, parent = map(json.loads, ran.stdout.splitlines())
    assert [child.keys() for child in children] == [{"child"}] * FORKS
    assert [child["child"]["Ran"] for child in children] == [CALLS_OF_A_CHILD] * FORKS
    assert parent.keys() == {"shop"}
    assert sum(parent["shop"].values()) == THREADS * CALLS
    assert parent["shop"]["Ran"] == THREADS * 100
