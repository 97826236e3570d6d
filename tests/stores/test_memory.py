"""What the memory store does beyond the shared contract: bounds, forks, options."""

from __future__ import annotations

import threading
import time

import pytest

from semel.core.records import (
    Busy,
    Claimed,
    ClaimRequest,
    Encoded,
    Finished,
    Identity,
    PutRequest,
    State,
)
from semel.errors import ConfigError, StoreFull
from semel.stores import urls
from semel.stores.memory import SLACK, AsyncMemoryStore, MemoryStore
from semel.testing import FakeClock
from stores.sqlite_helpers import in_a_fork

RESULT = Encoded("json", b"1")


def identity(key):
    return Identity("orders", str(key))


def ask(key, owner=b"a", *, lease=30.0, ttl=60.0, hold=False):
    return ClaimRequest(identity(key), owner, None, lease, ttl, hold)


def finish(store, key, ttl=60.0):
    assert isinstance(store.claim(ask(key)), Claimed)
    assert store.complete(identity(key), b"a", RESULT, ttl)


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def small(clock):
    return MemoryStore(max_records=2, clock=clock)


def test_a_full_store_refuses_a_new_key_and_serves_the_others(small):
    finish(small, 1)
    small.claim(ask(2))
    with pytest.raises(StoreFull, match="holds 2 records"):
        small.claim(ask(3))
    assert small.get(identity(3)) is None
    assert isinstance(small.claim(ask(1, b"b")), Finished)
    assert isinstance(small.claim(ask(2, b"b")), Busy)
    assert small.complete(identity(2), b"a", RESULT, 60.0)


def test_in_a_batch_only_the_member_without_room_is_refused(small):
    claims = small.send([ask(1), ask(2), ask(3), ask(1, b"b")])
    assert [type(claim) for claim in claims] == [Claimed, Claimed, StoreFull, Busy]
    puts = small.send([PutRequest(identity(4), b"b", RESULT, 60.0)])
    assert [type(put) for put in puts] == [StoreFull]


def test_expired_records_make_room_first(small, clock):
    finish(small, 1, ttl=10.0)
    finish(small, 2, ttl=100.0)
    clock.advance(10.0)
    assert isinstance(small.claim(ask(3)), Claimed)
    assert small.get(identity(2)) is not None


def test_a_touched_record_keeps_its_place(small, clock):
    finish(small, 1, ttl=10.0)
    finish(small, 2, ttl=100.0)
    assert small.touch(identity(1), 100.0)
    clock.advance(10.0)
    with pytest.raises(StoreFull):
        small.claim(ask(3))
    clock.advance(90.0)
    assert isinstance(small.claim(ask(3)), Claimed)


def test_an_abandoned_record_makes_room_once_its_ttl_has_passed_too(small, clock):
    small.claim(ask(1, lease=10.0, ttl=60.0))
    finish(small, 2, ttl=1000.0)
    clock.advance(69.0)
    with pytest.raises(StoreFull):
        small.claim(ask(3))
    clock.advance(1.0)
    assert isinstance(small.claim(ask(3)), Claimed)
    assert small.get(identity(1)) is None


def test_a_renewed_record_is_not_taken_for_an_abandoned_one(small, clock):
    small.claim(ask(1, lease=10.0, ttl=10.0))
    finish(small, 2, ttl=1000.0)
    clock.advance(9.0)
    assert small.renew(identity(1), b"a", 100.0)
    clock.advance(50.0)
    with pytest.raises(StoreFull):
        small.claim(ask(3))


def test_a_held_record_never_makes_room(clock):
    store = MemoryStore(max_records=1, evict="finished", clock=clock)
    store.claim(ask(1, lease=1.0, ttl=1.0, hold=True))
    clock.advance(1e9)
    with pytest.raises(StoreFull):
        store.claim(ask(2))


def test_a_record_claimed_again_under_hold_never_makes_room(small, clock):
    small.claim(ask(1))
    assert small.fail(identity(1), b"a", RESULT, retryable=True, keep_fingerprint=False, ttl=5.0)
    assert isinstance(small.claim(ask(1, b"b", hold=True)), Claimed)
    finish(small, 2, ttl=1e10)
    clock.advance(1e9)
    with pytest.raises(StoreFull):
        small.claim(ask(3))


def test_eviction_takes_the_record_that_ended_first_and_no_running_one(clock):
    store = MemoryStore(max_records=3, evict="finished", clock=clock)
    store.claim(ask("running"))
    store.claim(ask("ends last"))
    finish(store, "ends first")
    store.complete(identity("ends last"), b"a", RESULT, 60.0)
    finish(store, "new")
    assert store.get(identity("ends first")) is None
    assert store.get(identity("ends last")) is not None
    assert store.get(identity("running")) is not None


def test_memory_shrinks_again_after_a_burst(clock):
    store = MemoryStore(clock=clock)
    for key in range(100):
        finish(store, key, ttl=1.0)
    clock.advance(1.0)
    for key in range(100, 150):
        finish(store, key, ttl=1000.0)
    assert len(store._records) == 50


def test_a_key_forgotten_and_claimed_in_a_loop_takes_no_more_memory(clock):
    store = MemoryStore(clock=clock)
    for _ in range(3 * SLACK):
        store.claim(ask(1))
        store.forget(identity(1))
    assert len(store._records) == 0
    assert len(store._records._agenda) <= SLACK + 2


def test_one_of_many_threads_gets_the_claim():
    store = MemoryStore()
    barrier = threading.Barrier(16)
    answers = []

    def run(number):
        barrier.wait()
        answers.extend(store.claim(ask(key, b"%d" % number)) for key in range(50))

    threads = [threading.Thread(target=run, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(isinstance(answer, Claimed) for answer in answers) == 50


def test_a_jump_of_the_wall_clock_ends_no_lease(monkeypatch):
    store = MemoryStore()
    store.claim(ask(1))
    later = time.time() + 1e6
    monkeypatch.setattr(time, "time", lambda: later)
    assert isinstance(store.claim(ask(1, b"b")), Busy)


def test_its_times_look_like_the_epoch():
    store = MemoryStore()
    before = time.time()
    store.claim(ask(1))
    assert store.get(identity(1)).created_at == pytest.approx(before, abs=5.0)


def test_a_child_goes_on_with_a_copy_though_another_thread_was_at_work():
    in_lock, go_on = threading.Event(), threading.Event()

    def slow_clock():
        if store._lock.locked() and threading.current_thread() is not threading.main_thread():
            in_lock.set()
            go_on.wait(20.0)
        return 1000.0

    store = MemoryStore(clock=slow_clock)
    store.claim(ask("before"))
    worker = threading.Thread(target=store.claim, args=(ask("meanwhile"),))
    worker.start()
    in_lock.wait(20.0)
    threading.Timer(0.1, go_on.set).start()

    def child():
        seen = [store.get(identity(key)) is not None for key in ("before", "meanwhile")]
        store.claim(ask("child"))
        return seen

    assert in_a_fork(child) == "[True, True]"
    worker.join()
    assert store.get(identity("child")) is None
    assert isinstance(store.claim(ask("parent")), Claimed)


def test_the_url_sets_its_bounds():
    store = urls.open_store("memory://?max_records=1&evict=finished")
    assert isinstance(store, MemoryStore)
    finish(store, 1)
    finish(store, 2)
    assert store.counts().succeeded == 1


async def test_the_async_url_takes_the_same_options(clock):
    store = urls.open_async_store("memory://?max_records=1", clock=clock)
    assert isinstance(store, AsyncMemoryStore)
    await store.claim(ask(1))
    with pytest.raises(StoreFull):
        await store.claim(ask(2))
    await store.close()


@pytest.mark.parametrize(
    ("url", "options", "words"),
    [
        ("memory://?max_records=0", {}, "max_records must be a whole number above 0, not '0'"),
        (
            "memory://?max_records=many",
            {},
            "max_records must be a whole number above 0, not 'many'",
        ),
        ("memory://", {"max_records": True}, "max_records must be a whole number above 0"),
        ("memory://", {"max_records": 1.5}, "max_records must be a whole number above 0"),
        ("memory://?evict=all", {}, 'evict must be "finished" or left out'),
        ("memory://?size=3", {}, "does not know the option size; known: clock, evict, max_records"),
        ("memory://?evict=finished&evict=finished", {}, "has the option evict twice"),
        ("memory://?evict=finished", {"evict": "finished"}, "option evict in its URL and by name"),
        ("memory://localhost", {}, "has no address; got 'localhost'"),
    ],
)
def test_a_wrong_option_is_named(url, options, words):
    with pytest.raises(ConfigError, match=words.replace("(", r"\(")):
        urls.open_store(url, **options)


@pytest.mark.parametrize("cursor", ["", "next", "[1]", '["a"]'])
def test_a_cursor_of_something_else_is_refused(small, cursor):
    with pytest.raises(ConfigError, match="is not the cursor of a page"):
        small.scan(cursor=cursor)


def test_a_page_of_no_records_cannot_be_asked_for(small):
    with pytest.raises(ConfigError, match="limit must be a whole number above 0"):
        small.scan(state=State.FAILED, limit=0)


def test_who_is_overtaken_on_the_way_to_the_lock_is_told_so():
    store = MemoryStore()

    class Overtaken:
        """Another thread is faster, once."""

        def __enter__(self):
            store._lock = lock
            assert isinstance(store.claim(ask(1, b"faster")), Claimed)
            lock.acquire()

        def __exit__(self, *_):
            lock.release()

    lock, store._lock = store._lock, Overtaken()
    answer = store.claim(ask(1, b"slower"))
    assert isinstance(answer, Busy)
    assert answer.owner == b"faster"


def test_an_attempt_that_is_renewed_while_a_duplicate_looks_is_not_abandoned():
    now, steps = [0.0], []
    store = MemoryStore(clock=lambda: steps.pop()() if steps else now[0])
    store.claim(ask(1, b"a", lease=30.0, hold=True))

    def renewed_meanwhile():
        """Another thread renews, and this one goes on late: when the first lease has passed."""
        now[0] = 20.0
        assert store.renew(identity(1), b"a", 30.0)
        now[0] = 31.0
        return now[0]

    steps.append(renewed_meanwhile)
    assert isinstance(store.claim(ask(1, b"b", hold=True)), Busy)
