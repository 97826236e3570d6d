"""A cluster's client is made at its first use: once, however many threads come for it."""

from __future__ import annotations

import threading

from semel.stores.redis.cluster import ClusterTransport
from servers.redis import wait_until


class CountedLock:
    """A lock that tells who has come for it."""

    def __init__(self) -> None:
        self.came: list[threading.Thread] = []
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        self.came.append(threading.current_thread())
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def test_a_thread_that_waited_for_another_to_make_the_client_takes_that_one():
    lock, made, taken = CountedLock(), [], []

    def connect() -> object:
        wait_until(lambda: len(lock.came) == 2, "the second thread")
        made.append(object())
        return made[-1]

    transport = ClusterTransport(connect, "a cluster", 1.0)
    transport._lock = lock
    threads = [threading.Thread(target=lambda: taken.append(transport.client)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert taken == [made[0], made[0]]
