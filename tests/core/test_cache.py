"""The local memory of finished operations: bounded, for a while, for the same payload alone."""

from __future__ import annotations

import threading

from semel.core.cache import FinishedCache
from semel.core.records import Encoded, Finished, Identity, State

NOW = 1000.0
RED, BLUE = b"red." * 4, b"blue" * 4


def key(name):
    return Identity("orders", name)


def finished(remaining=60.0, data=b"1"):
    return Finished(State.SUCCEEDED, Encoded("json/1", data), 1, 77, remaining)


def test_an_unknown_operation_is_not_answered():
    assert FinishedCache(2, 60.0).get(key("a"), None, NOW) is None


def test_a_finished_operation_is_answered_for_the_same_payload_alone():
    cache = FinishedCache(2, 60.0)
    cache.add(key("a"), RED, finished(), NOW)
    assert cache.get(key("a"), RED, NOW) == finished()
    assert cache.get(key("a"), BLUE, NOW) is None
    assert cache.get(key("a"), None, NOW) is None
    assert cache.get(key("b"), RED, NOW) is None
    assert cache.get(key("a"), RED, NOW) == finished(), "a mismatch does not drop it"


def test_it_is_answered_no_longer_than_its_record_is_kept():
    cache = FinishedCache(2, 60.0)
    cache.add(key("a"), None, finished(remaining=5.0), NOW)
    assert cache.get(key("a"), None, NOW + 4.9) is not None
    assert cache.get(key("a"), None, NOW + 5.0) is None


def test_it_is_answered_no_longer_than_the_cache_may():
    cache = FinishedCache(2, 3.0)
    cache.add(key("a"), None, finished(remaining=60.0), NOW)
    assert cache.get(key("a"), None, NOW + 2.9) is not None
    assert cache.get(key("a"), None, NOW + 3.0) is None
    assert cache.get(key("a"), None, NOW) is None, "what has expired is gone"


def test_the_least_recently_used_one_goes_first():
    cache = FinishedCache(2, 60.0)
    cache.add(key("a"), None, finished(), NOW)
    cache.add(key("b"), None, finished(), NOW)
    assert cache.get(key("a"), None, NOW) is not None
    cache.add(key("c"), None, finished(), NOW)
    assert cache.get(key("b"), None, NOW) is None
    assert cache.get(key("a"), None, NOW) is not None
    assert cache.get(key("c"), None, NOW) is not None


def test_adding_again_replaces_and_counts_as_use():
    cache = FinishedCache(2, 60.0)
    cache.add(key("a"), RED, finished(), NOW)
    cache.add(key("b"), None, finished(), NOW)
    cache.add(key("a"), BLUE, finished(data=b"2"), NOW)
    cache.add(key("c"), None, finished(), NOW)
    assert cache.get(key("b"), None, NOW) is None
    assert cache.get(key("a"), BLUE, NOW) == finished(data=b"2")
    assert cache.get(key("a"), RED, NOW) is None


def test_what_is_dropped_is_forgotten():
    cache = FinishedCache(2, 60.0)
    cache.add(key("a"), None, finished(), NOW)
    cache.drop(key("a"))
    cache.drop(key("never there"))
    assert cache.get(key("a"), None, NOW) is None


def test_clearing_works_even_while_another_thread_held_the_lock_at_a_fork():
    cache = FinishedCache(2, 60.0)
    cache.add(key("a"), None, finished(), NOW)
    cache._lock.acquire()  # as a thread of the parent would have left it
    cache.clear()
    assert cache.get(key("a"), None, NOW) is None


def test_threads_share_it_without_exceeding_its_size():
    cache = FinishedCache(8, 60.0)

    def use(worker):
        for step in range(500):
            name = key(f"{worker}-{step % 16}")
            cache.add(name, None, finished(), NOW)
            cache.get(name, None, NOW)
            cache.drop(key(f"{worker}-{(step + 1) % 16}"))

    threads = [threading.Thread(target=use, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(cache._entries) <= 8
