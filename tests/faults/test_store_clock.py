"""The clock of the store itself jumps.

| # | expected |
|---|---|
| 12 forward | leases and retention end early, then a late owner is refused |
| 12 back | the takeover comes late, on SQLite by one lease at most; nothing runs twice |
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from semel import ConcurrentRequest, Idempotency, LeaseLost, Policy
from semel.stores.memory import MemoryStore
from semel.stores.sql.sqlite import SQLiteStore
from semel.testing import FakeClock

fault = pytest.mark.fault

HOUR = 3600.0
REFUSING = Policy(concurrent="reject", lease=30.0)


@pytest.fixture(params=["memory", "sqlite"])
def store_and_clock(request, tmp_path):
    """A store whose clock can be made to jump; SQLite's is that of the machine."""
    clock = FakeClock()
    if request.param == "memory":
        yield MemoryStore(clock=clock), clock
    else:
        store = SQLiteStore(f"{tmp_path}/records.db", clock=clock)
        yield store, clock
        store.close()


def elsewhere(step):
    """Do it as another caller would: in a thread that knows nothing of the running attempt."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(step).result()


@fault(12)
def test_after_a_jump_forward_leases_end_early_and_the_late_owner_is_refused(store_and_clock):
    store, clock = store_and_clock
    effects = []
    with Idempotency(store) as one, Idempotency(store) as other:

        def paused() -> str:
            clock.advance(HOUR)
            elsewhere(lambda: other.execute("k", lambda: effects.append("other"), policy=REFUSING))
            effects.append("late")
            return "late"

        with pytest.raises(LeaseLost):
            one.execute("k", paused, policy=REFUSING)
        assert effects == ["other", "late"]  # as with a pause longer than the lease
        assert other.run("k", lambda: "again", policy=REFUSING).replayed


@fault(12)
def test_after_a_jump_forward_retention_ends_early(store_and_clock):
    store, clock = store_and_clock
    with Idempotency(store, policy=Policy(ttl=60.0)) as idem:
        assert idem.execute("k", lambda: 1) == 1
        clock.advance(HOUR)
        assert idem.execute("k", lambda: 2) == 2


@fault(12)
def test_after_a_jump_back_the_takeover_comes_late_and_nothing_runs_twice(store_and_clock):
    store, clock = store_and_clock
    with Idempotency(store) as one, Idempotency(store) as other:

        def jumping() -> str:
            clock.set_back(HOUR)
            clock.advance(31.0)  # longer than the lease, as the wall counts it
            with pytest.raises(ConcurrentRequest) as busy:
                elsewhere(lambda: other.execute("k", lambda: "must not run", policy=REFUSING))
            if isinstance(store, MemoryStore):  # whose own clock is never set back
                assert busy.value.retry_after > HOUR / 2  # until the clock is back where it was
            else:
                assert busy.value.retry_after == pytest.approx(30.0)  # the lease, from now on
            return "first"

        assert one.execute("k", jumping, policy=REFUSING) == "first"
        assert other.execute("k", lambda: "must not run", policy=REFUSING) == "first"
