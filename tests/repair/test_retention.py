"""Purging: in small batches, on each store, and never what is live or held."""

from __future__ import annotations

import threading
from contextlib import closing

import pytest

from engines.facade import wait_until
from semel import ConfigError, Idempotency, Policy, open_store
from semel.core.records import ClaimRequest, Encoded, Identity
from semel.repair import (
    AsyncReconciler,
    Reconciler,
    health,
    health_async,
    purge,
    purge_async,
)
from semel.repair._sync import maintenance
from semel.stores.memory import SWEEP, AsyncMemoryStore, MemoryStore
from semel.testing import FakeClock, FaultyStore

OWNER = b"\x00the owner\xff\x00"
DONE = Encoded("json", b"1")


def fill(store, count, ttl=0.01, purges=1):
    """Put so many records that as many are left for purges: each begins with an entry of the audit
    trail, a new record, for which a store in memory drops a few that are due."""
    for number in range(count + purges * SWEEP):
        store.put(Identity("old", str(number)), DONE, ttl, owner=OWNER)


def test_purging_goes_on_in_batches_until_nothing_is_left():
    clock = FakeClock()
    store = FaultyStore(MemoryStore(clock=clock))
    fill(store, 25)
    store.put(Identity("new", "a"), DONE, 600.0, owner=OWNER)
    clock.advance(1)
    assert purge(store, batch=10, pause=0) == 25
    assert [call.requests[0].limit for call in store.calls if call.verb == "purge"] == [10, 10, 10]
    assert purge(store) == 0
    assert store.get(Identity("new", "a")) is not None


async def test_purging_awaited():
    clock = FakeClock()
    store = AsyncMemoryStore(clock=clock)
    for number in range(5 + SWEEP):
        await store.put(Identity("old", str(number)), DONE, 0.01, owner=OWNER)
    clock.advance(1)
    told: list[int] = []
    assert await purge_async(store, batch=2, pause=0.001, progress=told.append) == 5
    assert told == [2, 4, 5]


def test_progress_is_told_after_each_batch():
    clock, told = FakeClock(), list[int]()
    store = MemoryStore(clock=clock)
    fill(store, 4)
    clock.advance(1)
    assert purge(store, batch=2, pause=0, progress=told.append) == 4
    assert told == [2, 4, 4], "the last batch was empty"


def test_purging_ends_when_its_time_is_up():
    clock = FakeClock()
    store = MemoryStore(clock=clock)
    fill(store, 5, purges=2)
    clock.advance(1)
    assert purge(store, batch=2, pause=1.0, max_seconds=0.5) == 2
    assert purge(store, batch=2, pause=0.001, max_seconds=60) == 3


@pytest.mark.parametrize(
    ("pause", "took", "rests"), [(2.0, 0.5, 2.0), (2.0, 7.0, 7.0), (0, 7.0, 0.0)]
)
def test_a_purge_rests_as_long_as_its_batch_took_and_never_less_than_the_pause(
    monkeypatch, pause, took, rests
):
    clock = FakeClock()
    monkeypatch.setattr(maintenance, "monotonic", clock)
    slept: list[float] = []
    monkeypatch.setattr(maintenance, "sleep", slept.append)

    class Slow(MemoryStore):
        """A store that needs its time for a batch."""

        def purge(self, **options):
            clock.advance(took)
            return super().purge(**options)

    store = Slow(clock=clock)
    fill(store, 5)
    clock.advance(1)
    assert purge(store, batch=2, pause=pause) == 5
    assert slept == [rests, rests]


def test_abandoned_attempts_go_when_asked_and_held_ones_never(store_url):
    with closing(open_store(store_url)) as store:
        for key, hold in (("free", False), ("held", True), ("live", False)):
            identity = Identity("orders", key)
            store.claim(ClaimRequest(identity, OWNER, None, 600.0, 600.0, hold=hold))
            if key != "live":
                store.renew(identity, OWNER, 0.0)
        wait_until(lambda: store.stuck(older_than=0.02, limit=2)[1:])
        assert purge(store) == 0
        assert purge(store, abandoned_after=0.01) == 1
        left = [store.get(Identity("orders", key)) is not None for key in ("free", "held", "live")]
        assert left == [False, True, True]


@pytest.fixture
def place(sqlite_url, request, monkeypatch):
    """A store by its URL, or by the settings."""
    if request.param == "url":
        return sqlite_url
    monkeypatch.setenv("SEMEL_URL", sqlite_url)
    return None


@pytest.fixture
def stuck(sqlite_url):
    """An attempt that was abandoned an hour ago."""
    with closing(open_store(sqlite_url)) as store:
        store.claim(ClaimRequest(Identity("orders", "a"), OWNER, None, 600.0, 600.0))
        store.renew(Identity("orders", "a"), OWNER, -3600.0)


@pytest.mark.usefixtures("stuck")
@pytest.mark.parametrize("place", ["url", "settings"], indirect=True)
def test_a_store_is_found_by_its_url_or_by_the_settings(place):
    assert health(place).oldest >= 3600
    assert purge(place, abandoned_after=60) == 1
    assert health(place).oldest is None


@pytest.mark.usefixtures("stuck")
@pytest.mark.parametrize("place", ["url", "settings"], indirect=True)
async def test_a_store_is_found_by_its_url_or_by_the_settings_in_asyncio(place):
    assert (await health_async(place)).oldest >= 3600
    assert await purge_async(place, abandoned_after=60) == 1
    assert (await health_async(place)).oldest is None


@pytest.mark.parametrize(
    ("option", "value"),
    [("batch", 0), ("pause", -1), ("abandoned_after", 0), ("max_seconds", 0)],
)
def test_wrong_options_of_a_purge_are_refused(option, value):
    with pytest.raises(ConfigError, match=f"^{option} must be"):
        purge(MemoryStore(), **{option: value})


def test_a_store_that_cannot_list_cannot_be_purged():
    with pytest.raises(ConfigError, match="object"):
        purge(object())


@pytest.mark.fault(33)
def test_a_purge_beside_late_duplicates_repeats_nothing_before_its_time(store_url):
    """While purges run, a kept key is replayed, an expired one runs again exactly once."""
    kept, expired = Policy(ttl=600), Policy(ttl=0.05)
    runs: list[str] = []

    def run(name):
        runs.append(name)
        return name

    with Idempotency(store_url) as engine:
        purging, stop = threading.Event(), threading.Event()

        def purge_all_the_time():
            while not stop.is_set():
                purge(engine, batch=3, pause=0, abandoned_after=3600)
                purging.set()

        purger = threading.Thread(target=purge_all_the_time)
        purger.start()
        try:
            assert purging.wait(60)
            for number in range(20):
                engine.execute(f"kept:{number}", lambda n=number: run(f"kept:{n}"), policy=kept)
                engine.execute(
                    f"short:{number}", lambda n=number: run(f"short:{n}"), policy=expired
                )
            with engine.attempt("live", policy=Policy(abandoned="hold")):
                for number in range(20):
                    engine.execute(f"kept:{number}", lambda: run("a repetition"), policy=kept)
                wait_until(lambda: not engine.marks.exists("short:19"))
                for number in range(20):
                    for _ in range(2):  # the retention has ended: once again, not twice
                        engine.execute(
                            f"short:{number}", lambda n=number: run(f"again:{n}"), policy=kept
                        )
                assert engine.marks.exists("live")
        finally:
            stop.set()
            purger.join()
    assert "a repetition" not in runs
    assert sorted(name for name in runs if name.startswith("again")) == sorted(
        f"again:{number}" for number in range(20)
    )
    assert len(runs) == 60


# --- health ------------------------------------------------------------------------------


def test_health_tells_how_long_the_oldest_has_been_stuck():
    clock = FakeClock()
    store = MemoryStore(clock=clock)
    assert health(store).oldest is None
    assert health(store).alert is False
    for key in ("a", "b"):
        store.claim(ClaimRequest(Identity("orders", key), OWNER, None, 10.0, 600.0, hold=True))
        clock.advance(60)
    looked = health(store)
    assert (looked.oldest, looked.counts.abandoned, looked.alert) == (110.0, 2, False)
    clock.advance(190)
    assert health(store).alert is True
    assert health(store, alert_after=301).alert is False


def test_health_says_which_of_its_arguments_is_wrong():
    with pytest.raises(ConfigError, match=r"^alert_after must be"):
        health(MemoryStore(), alert_after="5m")


async def test_health_awaited():
    store = AsyncMemoryStore()
    await store.claim(ClaimRequest(Identity("orders", "a"), OWNER, None, 600.0, 600.0))
    looked = await health_async(store, alert_after=0)
    assert (looked.oldest, looked.counts.processing, looked.alert) == (None, 1, False)
    await store.renew(Identity("orders", "a"), OWNER, 0.0)
    assert (await health_async(store, alert_after=0)).alert is True


@pytest.fixture(params=["memory", "a missing file", "a missing file of the settings"])
def empty_place(request, tmp_path, monkeypatch):
    """A store that can only be empty, and what is said of it."""
    if request.param == "memory":
        return "memory://", "belongs to one process"
    missing = f"sqlite:///{tmp_path / 'smel.db'}"
    if request.param == "a missing file":
        return missing, "there is no SQLite database"
    monkeypatch.setenv("SEMEL_URL", missing)
    return None, "there is no SQLite database"


async def test_a_store_that_can_only_be_empty_is_refused(empty_place, tmp_path):
    place, said = empty_place
    for look in (health, purge, lambda at: Reconciler(at, {}), lambda at: AsyncReconciler(at, {})):
        with pytest.raises(ConfigError, match=said):
            look(place)
    for look in (health_async, purge_async):
        with pytest.raises(ConfigError, match=said):
            await look(place)
    assert list(tmp_path.iterdir()) == [], "nothing was made"
